"""Random numbers of a run, and the data of a stack on its device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from . import tasks
from .store import Run


def generator(run: Run | str, stream: str) -> torch.Generator:
    """A new generator on the CPU for a run and a purpose (``weights``), the same on every machine.

    The run's key seeds it, or a text in place of the key.
    """
    key = run if isinstance(run, str) else run.key
    digest = hashlib.sha256(f"{key} {stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def examples(run: Run) -> tasks.ContextQueries:
    """The contexts, queries and labels that a run of Mahdavi et al.'s is trained on; float32."""
    g = generator(run, "data")
    if run.table is not None:  # a number that decides the examples for all seeds
        g = generator(f"{run.n} {run.d} {run.N} {run.context} {run.table}", "examples")
    kind = {"shared": run.context == "shared", "classes": run.N, "dtype": torch.float32}
    return tasks.context_queries(g, run.T, run.n, run.d, **kind)


def pairs(run: Run) -> tasks.Bigrams:
    """The pairs of tokens that a run of Dana et al.'s is trained on, with their next tokens."""
    draw = {"bigrams": tasks.bigrams, "associations": tasks.associations}[run.task]
    drawn = draw(generator(run, "data"), run.N, run.T)
    if run.table is None:
        return drawn
    shared = generator(f"{run.N} {run.table}", "table")
    table = torch.randint(run.N, (run.N, run.N), generator=shared)
    return tasks.Bigrams(drawn.tokens, table[drawn.tokens[:, 0], drawn.tokens[:, 1]], table)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU to the device without blocking."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class Examples:
    """Contexts, queries and labels of a stack, whose runs may have different numbers of them.

    All lie in one array, which is filled run by run, so that the host never holds more than one
    run's. Of contexts that all examples share there is one a run.
    """

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        one, self.shared = runs[0], runs[0].context == "shared"
        self.sizes = torch.tensor([run.T for run in runs], device=device)
        self.first = self.sizes.cumsum(0) - self.sizes  # where the examples of each run begin
        total = int(self.sizes.sum())
        numbers = {"dtype": torch.float32, "device": device}
        self.contexts = torch.empty(len(runs) if self.shared else total, one.n, one.d, **numbers)
        self.queries = torch.empty(total, one.d, **numbers)
        self.labels = torch.empty(total, **numbers)
        if one.N:
            self.labels = self.labels.long()
        for index, (start, run) in enumerate(zip(self.first.tolist(), runs, strict=True)):
            drawn, rows = examples(run), slice(start, start + run.T)
            self.contexts[index if self.shared else rows] = drawn.contexts.to(device)
            self.queries[rows] = drawn.queries.to(device)
            self.labels[rows] = drawn.labels.to(device)

    def at(self, index: Int[Tensor, "R B"]) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts ``(R, B, n, d)`` or ``(R, n, d)``, queries and labels of every run's batch."""
        rows = (index + self.first[:, None]).flatten()
        held = self.contexts, self.queries, self.labels
        chosen = [x.index_select(0, rows).unflatten(0, index.shape) for x in held[self.shared :]]
        return (self.contexts, *chosen) if self.shared else tuple(chosen)

    def chunks(self, size: int) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], Tensor]]:
        """All examples in order, and which of them are there: runs with fewer are filled up."""
        longest = int(self.sizes.max())
        for start in range(0, longest, size):
            index = torch.arange(start, min(start + size, longest), device=self.sizes.device)
            index = index.expand(len(self.sizes), -1)
            there = index < self.sizes[:, None]
            yield self.at(torch.minimum(index, self.sizes[:, None] - 1)), there

    def keep(self, indices: Sequence[int]) -> None:
        """Forget all runs but those at ``indices``; the examples of all stay in the array."""
        self.sizes, self.first = self.sizes[[*indices]], self.first[[*indices]]
        if self.shared:
            self.contexts = self.contexts[[*indices]]
