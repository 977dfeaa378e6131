"""Weights by theorem, and weights drawn at random."""

from .next_tokens import memorize_next_tokens
from .dana import memorize_aot
from .generic import random_mha
from .mahdavi import memorize_mha
from .scalar import memorize_scalars

__all__ = [
    "memorize_aot",
    "memorize_next_tokens",
    "memorize_mha",
    "memorize_scalars",
    "random_mha",
]
