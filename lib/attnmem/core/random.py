"""Layers drawn at random: what almost every choice of weights can do."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from ..checks import Range, Seed, checked, on_cpu
from .deep import DeepWeights, Layer
from .layers import MHAWeights


def gaussian(generator: torch.Generator, *shape: int) -> Float[Tensor, "..."]:
    """Independent standard normal numbers, in float64, on the CPU."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def map_scale(spread: int | float, dim: int, head_dim: int) -> float:
    """Deviation of the entries of ``W_Q`` and ``W_K`` for logits of deviation ``spread``."""
    # Entries of queries and tokens are independent and have variance one.
    return (spread / (dim * head_dim**0.5)) ** 0.5


@on_cpu
@checked
def random_mha(
    heads: int,
    dim: int,
    head_dim: int,
    *,
    seed: Seed,
    value_dim: int = 1,
    spread: Annotated[int | float, Range(0, 1e6)] = 1.0,
) -> MHAWeights:
    """Draw a generic layer: independent Gaussian weights, with one output and ``W_D = 1``.

    ``spread`` is the standard deviation of the logits for standard normal tokens and queries.

    Example:
        >>> random_mha(2, 5, 3, seed=0).W_Q.shape
        torch.Size([2, 5, 3])

    Source: this book, the chapter on generic layers.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = map_scale(spread, dim, head_dim)
    return MHAWeights(
        scale * gaussian(generator, heads, dim, head_dim),
        scale * gaussian(generator, heads, dim, head_dim),
        gaussian(generator, heads, dim, value_dim),
        gaussian(generator, heads * value_dim, 1),
        torch.ones(1, 1, dtype=torch.float64),
    )


def random_deep(
    heads: tuple[int, ...],
    head_dim: int,
    value_dim: int,
    dim: int,
    generator: torch.Generator,
    *,
    outputs: int = 1,
    logits: float = 0.5,
    values: float = 0.5,
) -> DeepWeights:
    """Gaussian weights in float64, for tokens with entries of about one.

    Logits then have about the standard deviation ``logits``, and what a layer's heads add to a
    token together has about ``values`` in each dimension, before the attention averages.
    """

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    map_size = (logits / (dim * math.sqrt(head_dim))) ** 0.5
    layers = [
        Layer(
            map_size * draw(H, dim, head_dim),
            map_size * draw(H, dim, head_dim),
            draw(H, dim, value_dim) / math.sqrt(dim),
            draw(H, value_dim, dim) * values / math.sqrt(H * value_dim),
        )
        for H in heads
    ]
    return DeepWeights(tuple(layers), draw(dim, outputs))


@checked
def xavier(heads: int, dim: int, head_dim: int, outputs: int, *, seed: Seed) -> MHAWeights:
    """Random weights to start from, uniform with Xavier's bounds; ``d_v = 1`` and ``d_o = d``.

    They are in torch's default dtype.

    Example:
        >>> xavier(heads=2, dim=5, head_dim=3, outputs=4, seed=0).W_D.shape
        torch.Size([5, 4])
    """
    g = torch.Generator().manual_seed(seed)
    shapes = [(heads, dim, head_dim)] * 2 + [(heads, dim, 1), (heads, dim), (dim, outputs)]
    drawn = [2 * torch.rand(*shape, generator=g) - 1 for shape in shapes]
    bounds = [math.sqrt(6 / sum(shape[-2:])) for shape in shapes]
    return MHAWeights(*(W * bound for W, bound in zip(drawn, bounds, strict=True)))
