"""Examples that a layer is to memorize: their shapes, their units, and what is refused."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from .checks import check_finite, check_tokens, refuse

Contexts = Float[Tensor, "T n d"] | Float[Tensor, "n d"]  # own ones, or one that all share
Queries = Float[Tensor, "T d"]
Labels = Float[Tensor, "T d_out"] | Float[Tensor, " T"]
Sequences = Int[Tensor, "T S"]


def unit(x: Tensor, axes: tuple[int, ...] = ()) -> Tensor:
    """The largest power of four up to the largest entry: exact to divide by, and so is its root.

    That entry is sought over ``axes``, which are kept, by default over all; zeros have unit one.
    """
    largest = x.detach().abs().amax(axes, keepdim=bool(axes))
    mantissa, exponent = torch.frexp(largest)  # mantissa 2^exponent, the mantissa from 1/2 to 1
    power = largest / (mantissa * torch.where(exponent % 2 == 1, 2, 4))
    # The least subnormal of float32 is no power of four; it is its own unit.
    return torch.where(power > 0, power, torch.where(largest > 0, largest, 1))


def check_data(**data: Tensor) -> None:
    """Accept tensors of finite entries, at least one in each, on the device of the first."""
    first = next(iter(data))
    device = data[first].device
    for name, tensor in data.items():
        check_finite(name, tensor)
        if tensor.device != device:
            refuse(name, f"device {tensor.device}", f"that of {first}, {device}")
        if not tensor.numel():
            refuse(name, f"shape {tuple(tensor.shape)}", "at least one entry")


def check_token_numbers(sequences: Sequences) -> None:
    """Accept token numbers, at least one."""
    if not sequences.numel() or int(sequences.min()) < 0:
        refuse("sequences", f"{sequences.dtype} of shape {(*sequences.shape,)}", "token numbers")


def check_distinct(
    name: str, rows: Sequence[Hashable], answers: Sequence[object], what: str = "labels"
) -> None:
    """Accept rows of which no two are equal; of repeats, two with different answers are named."""
    first: dict[Hashable, int] = {}  # where each row stands first
    pairs = [(first.setdefault(row, t), t) for t, row in enumerate(rows)]
    repeats = [(s, t) for s, t in pairs if s < t]
    conflicts = [(s, t) for s, t in repeats if answers[s] != answers[t]]
    if conflicts:
        s, t = conflicts[0]
        refuse(name, f"{s} and {t} equal, with different {what}", "distinct ones")
    if repeats:
        s, t = repeats[0]
        got = f"{s} and {t} equal (repeats in all: {len(repeats)})"
        refuse(name, got, "distinct ones")


def check_distinct_examples(contexts: Tensor, queries: Tensor, labels: Tensor) -> None:
    """Accept examples of which no two have one query and the same tokens, in whatever order."""
    rows = [query.tobytes() for query in _comparable(queries)]
    if contexts.ndim == 3:
        sets = [sorted(token.tobytes() for token in E) for E in _comparable(contexts)]
        rows = [b"".join([row, *tokens]) for row, tokens in zip(rows, sets, strict=True)]
    check_distinct("examples", rows, labels.tolist())


def check_distinct_sequences(
    sequences: Sequences, next_tokens: Int[Tensor, " T"] | None = None
) -> None:
    """Accept sequences of which no two are equal; the next tokens say which repeats conflict."""
    rows = [*map(tuple, sequences.tolist())]
    answers = rows if next_tokens is None else next_tokens.tolist()
    check_distinct("sequences", rows, answers, "next tokens")


def check_associations(sequences: Sequences, next_tokens: Int[Tensor, " T"], vocab: int) -> None:
    """Accept tokens below ``vocab``, and sequences of which no two are equal."""
    check_tokens("sequences", sequences, vocab)
    check_tokens("next_tokens", next_tokens, vocab)
    check_distinct_sequences(sequences, next_tokens)


def _comparable(x: Tensor) -> np.ndarray:
    """The numbers for comparison by their bytes: without negative zeros."""
    return x.detach().cpu().numpy() + 0
