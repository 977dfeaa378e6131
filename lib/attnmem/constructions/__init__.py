"""Weights by theorem, and weights drawn at random, in float64.

The arguments mean the same in all functions. ``contexts`` are own ones ``(T, n, d)`` or one that is
shared ``(n, d)``; ``queries`` are one a row; ``labels`` are reals, ``(T, d_out)``, or ``(T,)`` for
``d_out = 1``. ``sequences`` are token numbers from 0, one sequence a row, and ``next_tokens`` what
is to be predicted after each. ``vocab`` is their number ``N``, ``heads`` is ``H``, ``head_dim`` is
``d_h``, and ``dim`` is ``d``, at least 2 for sequences. ``seed`` is that of the random numbers.
"""

from .cancellation import memorize_by_cancellation, memorize_by_difference
from .dana import memorize_aot
from .depth import memorize_by_depth
from .mahdavi import memorize_mha, memorize_scalars
from .next_tokens import memorize_next_tokens
from .random_layers import random_mha

__all__ = [
    "memorize_aot",
    "memorize_by_cancellation",
    "memorize_by_depth",
    "memorize_by_difference",
    "memorize_mha",
    "memorize_next_tokens",
    "memorize_scalars",
    "random_mha",
]
