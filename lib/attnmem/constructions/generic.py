"""Layers drawn at random: what almost every choice of weights can do."""

from __future__ import annotations

import torch

from ..attention import MHAWeights
from ..checks import check_integer, check_number, checked_by


def _check_random(heads, dim, head_dim, seed, value_dim, spread) -> None:
    sizes = {"heads": heads, "dim": dim, "head_dim": head_dim, "value_dim": value_dim}
    for name, value in sizes.items():
        check_integer(name, value)
    check_integer("seed", seed, least=0)
    check_number("spread", spread, least=0.0, most=1e6)


@checked_by(_check_random)
def random_mha(
    heads: int,
    dim: int,
    head_dim: int,
    *,
    seed: int,
    value_dim: int = 1,
    spread: int | float = 1.0,
) -> MHAWeights:
    """A layer with independent Gaussian weights, in float64, with one output.

    ``W_Q`` and ``W_K`` are scaled such that the logits have standard deviation ``spread`` if tokens
    and queries are standard normal. Almost every layer: any set of weights of volume zero has
    probability zero.

    >>> random_mha(2, 5, 3, seed=0).W_Q.shape
    torch.Size([2, 5, 3])
    """
    generator = torch.Generator().manual_seed(int(seed))

    def gaussian(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scale = (spread / (dim * head_dim**0.5)) ** 0.5
    return MHAWeights(
        scale * gaussian(heads, dim, head_dim),
        scale * gaussian(heads, dim, head_dim),
        gaussian(heads, dim, value_dim),
        gaussian(heads * value_dim, 1),
        torch.ones(1, 1, dtype=torch.float64),
    )
