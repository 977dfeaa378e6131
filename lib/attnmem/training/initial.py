"""Where a run's numbers come from, and PyTorch's initial weights.

All draws are float32, whatever torch's default is, so a run's key decides its numbers.
"""

from __future__ import annotations

import hashlib
import math

import torch
from jaxtyping import Float
from torch import Tensor

from ..results import Run

Parameters = dict[str, Tensor]


def generator(run: Run, stream: str) -> torch.Generator:
    """A generator of its own for every run and purpose, the same on every machine.

    Args:
        run: The run, whose key seeds the generator.
        stream: What the numbers are for, such as ``weights``.

    Returns:
        A new generator on the CPU, at the start of its numbers.
    """
    digest = hashlib.sha256(f"{run.key} {stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def uniform(g: torch.Generator, bound: float, *shape: int) -> Tensor:
    """Float32 numbers between ``-bound`` and ``bound``."""
    return (2 * torch.rand(*shape, generator=g, dtype=torch.float32) - 1) * bound


def linear(g: torch.Generator, outputs: int, inputs: int) -> Float[Tensor, "outputs inputs"]:
    """PyTorch's initial weight of ``Linear(inputs, outputs)``."""
    return uniform(g, inputs**-0.5, outputs, inputs)


def bias(g: torch.Generator, outputs: int, inputs: int) -> Float[Tensor, " outputs"]:
    """PyTorch's initial bias of ``Linear(inputs, outputs)``."""
    return uniform(g, inputs**-0.5, outputs)


def xavier(g: torch.Generator, *shape: int) -> Tensor:
    """Xavier's uniform matrices, in the last two axes."""
    return uniform(g, math.sqrt(6 / sum(shape[-2:])), *shape)


def embedding(g: torch.Generator, rows: int, dim: int) -> Tensor:
    """PyTorch's initial weight of ``Embedding(rows, dim)``."""
    return torch.randn(rows, dim, generator=g, dtype=torch.float32)
