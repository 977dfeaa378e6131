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
    """Independent standard normal numbers, in float64, on the CPU.

    Args:
        generator: Source of the random numbers, on the CPU.
        *shape: The shape.
    """
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def map_scale(spread: int | float, dim: int, head_dim: int) -> float:
    """Standard deviation of the entries of ``W_Q`` and ``W_K`` for logits of deviation ``spread``.

    The formula is ``sqrt(spread / (d sqrt(d_h)))``, for queries and tokens whose entries are
    independent and have variance one.

    Args:
        spread: Standard deviation of the logits.
        dim: Embedding dimension ``d``.
        head_dim: Head dimension ``d_h``.

    Example:
        >>> map_scale(6.0, dim=3, head_dim=4)
        1.0
    """
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
    """Draw a layer with independent Gaussian weights, in float64, with one output.

    ``W_Q`` and ``W_K`` are scaled such that the logits have standard deviation ``spread`` if tokens
    and queries are standard normal. The layer is generic: it lies in any given set of volume zero
    with probability zero.

    Args:
        heads: Number of heads ``H``.
        dim: Embedding dimension ``d``.
        head_dim: Head dimension ``d_h``.
        seed: Seed of the weights, at least 0.
        value_dim: Width of the values, ``d_v``.
        spread: Standard deviation of the logits, from 0 to 1e6.

    Returns:
        The weights, with ``W_D = 1``.

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
