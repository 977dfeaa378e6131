"""Proofs that weights in few digits still meet their labels, in ball arithmetic."""

from __future__ import annotations

from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from ..checks import Range, checked
from ..core.layers import MHAWeights
from ..examples import Contexts
from . import balls
from .balls import Ball, BallMatrix, exact, flint, precision
from .certificates import can_be_enclosed
from .solutions import added, contexts_of, forward, pulled, row_by_maps

_MOST_DIGITS = 52  # of a float64, after the first


@checked(also=can_be_enclosed)
def certified_rounding(
    weights: MHAWeights,
    contexts: Contexts,
    queries: Float[Tensor, "T d"],
    labels: Float[Tensor, "T d_out"],
    *,
    digits: Annotated[int, Range(0, 1000)],
) -> float:
    """No output is further from its label, whichever way all weights are rounded; or infinity.

    Each weight ``w`` of all five matrices may become any number within ``2^-(digits + 1) |w|``; its
    nearest number of so many binary digits after the first is one. An output moves by at most the
    sum of these radii times the absolute derivatives, enclosed on all balls at once.

    Source: this book, the theorem on rounding all weights.
    """
    W_O = weights.W_O.unflatten(0, (len(weights.W_Q), -1))
    furthest = 0.0
    with precision(balls.FIRST_BITS + digits):
        radius = flint().arb(2) ** -(digits + 1)
        W_D = exact(weights.W_D)
        maps = []
        for maps_h in zip(weights.W_Q, weights.W_K, weights.W_V, W_O, strict=True):
            maps.append([exact(W) for W in maps_h])
        tokens = contexts_of(contexts, queries)
        for query, E, y in zip(queries, tokens, labels.tolist(), strict=True):
            outputs, moves = _outputs_and_moves(maps, W_D, exact(query[None]), E, radius)
            for output, move, label in zip(outputs, moves, y, strict=True):
                furthest = max(furthest, balls.above(abs(output - label) + move))
    return furthest


def _outputs_and_moves(
    maps: list[list[BallMatrix]], W_D: BallMatrix, x: BallMatrix, E: BallMatrix, radius: Ball
) -> tuple[list[Ball], list[Ball]]:
    """The outputs of one example, and how far each moves at most if all weights are rounded."""
    # The mean value theorem: |f(w') - f(w)| <= sum_i |df/dw_i| radius |w_i|, with the derivatives
    # anywhere between, that is, on the balls of all weights w_i (1 + radius [-1, 1]).
    factor = 1 + radius * flint().arb(0, 1)
    zero = flint().arb_mat(1, W_D.nrows())
    outputs = sum((added(forward(maps_h, x, E)) for maps_h in maps), zero) * W_D
    heads = [forward([W * factor for W in maps_h], x, E) for maps_h in maps]
    by_W_D = sum((added(head) for head in heads), zero).entries()
    moves = []
    for column in W_D.transpose().tolist():
        G = flint().arb_mat([[w * factor for w in column]])
        derivatives = row_by_maps([pulled(head, G).by_maps for head in heads]) + by_W_D
        weights = row_by_maps(maps) + column
        terms = [abs(g * w) for g, w in zip(derivatives, weights, strict=True)]
        moves.append(radius * sum(terms))
    return outputs.entries(), moves


def certified_digits(*data: Tensor | MHAWeights, tolerance: float = 0.01) -> int | None:
    """The least digits for which :func:`certified_rounding` is ``tolerance`` of the largest label.

    More keep the labels, too: what they round to lies in the same balls. None if 52 do not. Float32
    has 23, float16 10 and bfloat16 7, of weights neither too large nor too small for the exponent.
    """
    limit = tolerance * float(data[-1].abs().max())
    for digits in range(_MOST_DIGITS + 1):
        if certified_rounding(*data, digits=digits) <= limit:
            return digits
    return None
