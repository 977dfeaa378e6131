"""Real numbers as balls: a midpoint and a radius that provably contains every rounding error.

A thin layer over python-flint's ``arb`` (extra ``certify``). Floating-point tensors enter exactly,
since every float is a rational number; from there on each operation widens the ball as needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

Ball = Any  # flint.arb
BallMatrix = Any  # flint.arb_mat
Enclosure = Callable[[int], BallMatrix]  # of one real matrix, at any number of bits
FIRST_BITS = 128


def flint() -> ModuleType:
    """The module ``flint``; ``ImportError`` naming the extra if it is not installed."""
    try:
        import flint
    except ImportError as error:
        message = "certificates need python-flint: pip install 'attnmem[certify]'"
        raise ImportError(message) from error
    return flint


def precision(bits: int) -> AbstractContextManager:
    """Compute with midpoints of so many ``bits`` inside a ``with`` block."""
    return flint().ctx.workprec(bits)


def precisions(most_bits: int) -> Iterator[int]:
    """``FIRST_BITS``, twice as many, and so on, up to ``most_bits``."""
    bits = FIRST_BITS
    while bits <= most_bits:
        yield bits
        bits *= 2


def exact(matrix: Shaped[Tensor, "m n"]) -> BallMatrix:
    """The very entries of a matrix, as balls of radius zero."""
    return flint().arb_mat(*matrix.shape, matrix.flatten().tolist())


def softmax(logits: Sequence[Ball]) -> list[Ball]:
    """Balls around the softmax of one row of logits."""
    powers = [logit.exp() for logit in logits]
    total = sum(powers[1:], powers[0])
    return [power / total for power in powers]


def largest(matrix: BallMatrix) -> float:
    """An upper bound of the entries' absolute values, rounded up to a float."""
    return max((above(entry.abs_upper()) for entry in matrix.entries()), default=0.0)


def above(bound: Ball) -> float:
    """The float next above an exact number, infinite if that is not finite."""
    value = float(bound)
    return math.inf if math.isnan(value) else math.nextafter(value, math.inf)


def below(bound: Ball) -> float:
    """The float next below an exact number, minus infinity if that is not finite."""
    return -above(-bound)
