"""Weights by theorem: no training, only linear algebra."""

from .mahdavi import memorize_mha

__all__ = ["memorize_mha"]
