"""Layers drawn at random: what almost every choice of weights can do, and where descent starts."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from ..checks import Range, Seed, checked, on_cpu
from .layers import MHAWeights
from .stacked import DeepWeights, Layer


def gaussian(generator: torch.Generator, *shape: int) -> Float[Tensor, "..."]:
    """Independent standard normal numbers, in float64, on the CPU."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


def map_scale(spread: int | float, dim: int, head_dim: int) -> float:
    """Deviation of the entries of ``W_Q`` and ``W_K`` for logits of deviation ``spread``."""
    # A logit is the sum of d^2 d_h products of a token, two map entries and a query. Entries of
    # tokens and queries are independent and have variance one, so its variance is d^2 d_h scale^4.
    return (spread / (dim * head_dim**0.5)) ** 0.5


def random_maps(
    generator: torch.Generator, heads: int, dim: int, head_dim: int, spread: int | float
) -> list[Float[Tensor, "H d d_h"]]:
    """Gaussian ``W_Q`` and ``W_K`` for logits of standard deviation ``spread``."""
    scale = map_scale(spread, dim, head_dim)
    return [scale * gaussian(generator, heads, dim, head_dim) for _ in range(2)]


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

    ``spread`` is the standard deviation of the logits for standard normal tokens and queries (the
    chapter on generic layers).
    """
    generator = torch.Generator().manual_seed(seed)
    W_Q, W_K = random_maps(generator, heads, dim, head_dim, spread)
    W_V = gaussian(generator, heads, dim, value_dim)
    W_O = gaussian(generator, heads * value_dim, 1)
    return MHAWeights(W_Q, W_K, W_V, W_O, W_D=torch.ones(1, 1, dtype=torch.float64))


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
    layers = []
    for H in heads:
        W_Q, W_K = random_maps(generator, H, dim, head_dim, logits)
        # A value is the sum of d products of a token's entry and one of W_V: of variance one.
        W_V = gaussian(generator, H, dim, value_dim) / math.sqrt(dim)
        # A token gets the sum of H d_v products of a value and an entry of W_O.
        W_O = gaussian(generator, H, value_dim, dim) * values / math.sqrt(H * value_dim)
        layers.append(Layer(W_Q, W_K, W_V, W_O))
    return DeepWeights(tuple(layers), gaussian(generator, dim, outputs))


@on_cpu
@checked
def xavier(heads: int, dim: int, head_dim: int, outputs: int, *, seed: Seed) -> MHAWeights:
    """Random weights to start from, uniform with Xavier's bounds; ``d_v = 1`` and ``d_o = d``.

    They are in torch's default dtype. Source: Glorot and Bengio 2010, equation (16).
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:  # the last two axes are read and written
        drawn = 2 * torch.rand(*shape, generator=generator) - 1
        return drawn * math.sqrt(6 / (shape[-2] + shape[-1]))

    W_Q = uniform(heads, dim, head_dim)
    W_K = uniform(heads, dim, head_dim)
    W_V = uniform(heads, dim, 1)
    W_O = uniform(heads, dim)  # heads side by side, each of d_v = 1
    return MHAWeights(W_Q, W_K, W_V, W_O, W_D=uniform(dim, outputs))
