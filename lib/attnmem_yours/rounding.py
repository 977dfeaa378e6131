"""Weights that a number type holds as they are, of nearly the same outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from attnmem.core.layers import MHAWeights

from . import layer
from .data import Examples, largest

NumberType = Literal["float32", "bfloat16", "float16", "int8"]
_BLOCKS = 16  # rounds, each with a derivative of its own
_ENTRIES = 4e6  # of such a derivative at most: 32 MB
_GROWTH = 0.5  # of a weight in one round at most, so that none changes its sign


def stored(weights: MHAWeights, number_type: NumberType) -> MHAWeights:
    """The weights as a number type holds them, in float64; ``int8`` scaled for each output."""
    if number_type != "int8":
        return MHAWeights(*(W.to(getattr(torch, number_type)).double() for W in weights))
    steps = [W.abs().amax(-2, keepdim=True).clamp(min=1e-320) / 127 for W in weights]
    return MHAWeights(*((W / s).round() * s for W, s in zip(weights, steps, strict=True)))


def roundings(
    examples: Examples, weights: MHAWeights, number_type: NumberType
) -> Iterator[MHAWeights]:
    """The nearest weights of a number type; then others of it, of nearly the same outputs.

    A sixteenth of the weights is rounded at a time, and the others make up for it.
    """
    yield stored(weights, number_type)
    sizes = [W.numel() for W in weights]
    flat = torch.cat([W.flatten() for W in weights])

    def layer_of(flat: Tensor) -> MHAWeights:
        pieces = zip(flat.split(sizes), weights, strict=True)
        return MHAWeights(*(piece.view_as(W) for piece, W in pieces))

    def outputs(flat: Tensor) -> Tensor:
        return (layer.outputs(layer_of(flat), examples) / scale).flatten()

    def nearest(flat: Tensor) -> Tensor:
        return torch.cat([W.flatten() for W in stored(layer_of(flat), number_type)])

    scale = largest(layer.outputs(weights, examples)).clamp(min=1e-300)
    top = float(flat.abs().max())
    aim = outputs(flat)
    free = ~torch.isclose(nearest(flat), flat, rtol=1e-12, atol=0)
    if len(aim) * len(flat) > _ENTRIES or not nearest(flat).isfinite().all():
        return
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
    for block in order[free[order]].chunk(_BLOCKS):
        flat[block], free[block] = nearest(flat)[block], False
        J = torch.func.jacrev(outputs)(flat)[:, free] * flat[free]  # in relative changes
        step = torch.linalg.lstsq(J, aim - outputs(flat), rcond=1e-6, driver="gelsd").solution
        flat[free] = (flat[free] * (1 + step.clamp(-_GROWTH, _GROWTH))).clamp(-top, top)
    yield stored(layer_of(flat), number_type)  # once more, in case some weight changed a scale
