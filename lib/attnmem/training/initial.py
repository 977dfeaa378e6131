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
    return seeded(f"{run.key} {stream}")


def seeded(text: str) -> torch.Generator:
    """A generator whose numbers a text decides, the same on every machine.

    Args:
        text: Any text.

    Returns:
        A new generator on the CPU, at the start of its numbers.
    """
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def uniform(g: torch.Generator, bound: float, *shape: int) -> Tensor:
    """Float32 numbers between ``-bound`` and ``bound``.

    Args:
        g: Where the numbers come from.
        bound: The largest size of a number.
        *shape: The axes.

    Returns:
        Numbers drawn uniformly.
    """
    return (2 * torch.rand(*shape, generator=g, dtype=torch.float32) - 1) * bound


def linear(g: torch.Generator, outputs: int, inputs: int) -> Float[Tensor, "outputs inputs"]:
    """PyTorch's initial weight of ``Linear(inputs, outputs)``.

    Args:
        g: Where the numbers come from.
        outputs: The number of outputs.
        inputs: The number of inputs.

    Returns:
        Uniform numbers, one row an output.
    """
    return uniform(g, inputs**-0.5, outputs, inputs)


def bias(g: torch.Generator, outputs: int, inputs: int) -> Float[Tensor, " outputs"]:
    """PyTorch's initial bias of ``Linear(inputs, outputs)``.

    Args:
        g: Where the numbers come from.
        outputs: The number of outputs.
        inputs: The number of inputs.

    Returns:
        Uniform numbers, one an output.
    """
    return uniform(g, inputs**-0.5, outputs)


def xavier(g: torch.Generator, *shape: int) -> Tensor:
    """Xavier's uniform matrices, in the last two axes.

    Args:
        g: Where the numbers come from.
        *shape: The axes.

    Returns:
        Uniform numbers.
    """
    return uniform(g, math.sqrt(6 / sum(shape[-2:])), *shape)


def embedding(g: torch.Generator, rows: int, dim: int) -> Tensor:
    """PyTorch's initial weight of ``Embedding(rows, dim)``.

    Args:
        g: Where the numbers come from.
        rows: The size of the vocabulary.
        dim: The size of a row.

    Returns:
        Gaussian numbers.
    """
    return torch.randn(rows, dim, generator=g, dtype=torch.float32)
