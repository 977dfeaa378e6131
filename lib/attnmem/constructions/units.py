"""Data of any scale: weights are built on data near one, and then take the scale over."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..attention import MHAWeights, mha
from ..checks import refuse
from ..examples import unit

TOLERANCE = 1e-12  # of the largest label


def build_in_units(
    build: Callable[..., MHAWeights],
    contexts: Tensor,
    queries: Tensor,
    labels: Tensor,
    skip: bool = False,
) -> MHAWeights:
    """Build a layer on data that are divided by their units, then adapt it to the data.

    Units are powers of four, which change no digit. So the layer's outputs are those of the built
    one, but for numbers that leave the range of float64: those are refused.

    Args:
        build: From contexts, queries and labels ``(T, d_out)`` in float64 to weights.
        contexts: Contexts, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        labels: One label a row.
        skip: Whether the layer has a skip connection.
    """
    data = [x.to(torch.float64) for x in (contexts, queries, labels.reshape(len(queries), -1))]
    a, b, c = (unit(x) for x in data)
    E, e, y = (x / size for x, size in zip(data, (a, b, c), strict=True))
    built = build(E, e, y)
    inner = b if skip else c  # the unit of what W_D reads
    weights = built._replace(
        W_Q=built.W_Q / b,
        W_K=built.W_K / a,
        W_V=built.W_V * (inner / a),
        W_D=built.W_D * (c / inner),
    )
    moved = mha(weights, *data[:2], skip=skip) / c - mha(built, E, e, skip=skip)
    if not moved.abs().max() <= TOLERANCE:
        sizes = ", ".join(f"{float(x.abs().max()):.0e}" for x in data)
        got = f"largest entries {sizes}, with which the layer's numbers leave the range of float64"
        refuse("contexts, queries, labels", got, "scales nearer to one")
    return weights
