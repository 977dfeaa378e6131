"""Real numbers as balls: a midpoint, and a radius that provably covers every rounding error.

A thin layer over python-flint's ``arb``. Tensors enter exactly; each operation widens the balls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Annotated, Any

from jaxtyping import Shaped
from torch import Tensor

from ..checks import Range, checked, need

Ball = Any  # flint.arb
BallMatrix = Any  # flint.arb_mat
Enclosure = Callable[[int], BallMatrix]  # of one real matrix, at any number of bits
FIRST_BITS = 128
MostBits = Annotated[int, Range(FIRST_BITS)]


def flint() -> ModuleType:
    """The package ``flint``, imported where it is needed."""
    return need("flint")


@checked
def precision(bits: Annotated[int, Range(2)]) -> AbstractContextManager:
    """Compute with midpoints of so many ``bits``, at least 2, inside a ``with`` block."""
    return flint().ctx.workprec(bits)


def enclosing(compute: Callable[[], BallMatrix]) -> Enclosure:
    """A function from bits to what ``compute`` returns at that precision."""

    def enclosure(bits: int) -> BallMatrix:
        with precision(bits):
            return compute()

    return enclosure


def precisions(most_bits: int) -> Iterator[int]:
    """The precisions to try in turn: ``FIRST_BITS``, twice as many, and so on."""
    return itertools.takewhile(most_bits.__ge__, (FIRST_BITS << k for k in itertools.count()))


def exact(matrix: Shaped[Tensor, "m n"]) -> BallMatrix:
    """An ``arb_mat`` of the very entries of a matrix of floats or integers, with radius zero."""
    return flint().arb_mat(*matrix.shape, matrix.flatten().tolist())


def softmax(logits: Sequence[Ball]) -> list[Ball]:
    """Balls around the softmax of one row of logits."""
    powers = [logit.exp() for logit in logits]
    total = sum(powers)
    return [power / total for power in powers]


def attention(Q: BallMatrix, K: BallMatrix, causal: bool = False) -> BallMatrix:
    """Attention weights, a row for each query; with ``causal``, for keys up to its own."""
    rows = []
    for i, logits in enumerate((Q * K.transpose()).tolist()):
        visible = logits[: i + 1] if causal else logits
        hidden = [flint().arb(0)] * (len(logits) - len(visible))
        rows.append(softmax(visible) + hidden)
    return flint().arb_mat(rows)


def largest(matrix: BallMatrix) -> float:
    """The absolute values of all entries are at most this; infinity if one is not finite."""
    return max((above(abs(entry)) for entry in matrix.entries()), default=0.0)


def above(ball: Ball) -> float:
    """The float next above a ball's upper end; infinity if the ball is not bounded."""
    value = float(ball.upper())
    return math.inf if math.isnan(value) else math.nextafter(value, math.inf)


def below(ball: Ball) -> float:
    """The float next below a ball's lower end; minus infinity if the ball is not bounded."""
    return -above(-ball)
