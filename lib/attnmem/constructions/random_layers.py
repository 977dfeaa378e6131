"""Layers drawn at random: what almost every choice of weights can do."""

from __future__ import annotations

import functools
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import MHAWeights
from ..checks import Function, Range, Seed, checked


def on_cpu(function: Function) -> Function:
    """Let a function make its tensors on the CPU, whatever torch's default device is."""

    @functools.wraps(function)
    def placed(*args, **kwargs):
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return placed


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
