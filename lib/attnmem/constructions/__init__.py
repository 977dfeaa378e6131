"""Weights by theorem, and weights drawn at random."""

from .cancellation import memorize_by_cancellation, memorize_by_difference
from .dana import memorize_aot
from .mahdavi import memorize_mha
from .next_tokens import memorize_next_tokens
from .random_layers import random_mha
from .scalar import memorize_scalars

__all__ = [
    "memorize_aot",
    "memorize_by_cancellation",
    "memorize_by_difference",
    "memorize_mha",
    "memorize_next_tokens",
    "memorize_scalars",
    "random_mha",
]
