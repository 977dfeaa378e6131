"""Random numbers of a run, the data of a stack on its device, and the order of the examples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from .. import tasks
from ..attention.pairs import take_columns
from ..store import Run


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
    """A generator on the CPU whose numbers a text decides."""
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


# --- what is drawn --------------------------------------------------------------------------------


def examples(run: Run) -> tasks.ContextQueries:
    """The contexts, queries and labels that a run of Mahdavi et al.'s is trained on; float32."""
    shared = run.context == "shared"
    if run.table is None:
        g = generator(run, "data")
    else:
        g = seeded(f"{run.n} {run.d} {run.N} {run.context} {run.table} examples")
    return tasks.context_queries(
        g, run.T, run.n, run.d, shared=shared, classes=run.N, dtype=torch.float32
    )


def pairs(run: Run) -> tasks.Bigrams:
    """The pairs of tokens that a run of Dana et al.'s is trained on, with their next tokens."""
    draw = {"bigrams": tasks.bigrams, "associations": tasks.associations}[run.task]
    drawn = draw(generator(run, "data"), run.N, run.T)
    if run.table is None:
        return drawn
    table = torch.randint(run.N, (run.N, run.N), generator=seeded(f"{run.N} {run.table} table"))
    return tasks.Bigrams(drawn.tokens, table[drawn.tokens[:, 0], drawn.tokens[:, 1]], table)


# --- on the device --------------------------------------------------------------------------------


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU to the device without blocking."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class Order:
    """Successive batches for each run of a stack: every epoch in a new random order.

    An epoch's last batch is filled up by the next epoch, or, as in the published code of Mahdavi et
    al., by indices that are missing, which are -1 (``Run.last_batch``).
    """

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        self.sizes, self.batch, self.device = [run.T for run in runs], runs[0].batch, device
        self.short = runs[0].last_batch == "short"
        self.generators = [generator(run, "order") for run in runs]
        self.left = [torch.empty(0, dtype=torch.long) for _ in runs]

    def take(self, count: int) -> Int[Tensor, "count R B"]:
        """The next ``count`` batches of every run, on the device."""
        wanted = count * self.batch
        for run, size in enumerate(self.sizes):
            while len(self.left[run]) < wanted:
                epoch = torch.randperm(size, generator=self.generators[run])
                if self.short:
                    epoch = F.pad(epoch, (0, -size % self.batch), value=-1)
                self.left[run] = torch.cat([self.left[run], epoch])
        taken = torch.stack([indices[:wanted] for indices in self.left])
        self.left = [indices[wanted:].clone() for indices in self.left]
        batches = taken.view(len(taken), count, self.batch).movedim(1, 0).contiguous()
        return to_device(batches, self.device)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all runs but those at ``indices``."""
        self.sizes, self.generators, self.left = (
            [part[index] for index in indices] for part in (self.sizes, self.generators, self.left)
        )

    def state(self) -> dict[str, list[Tensor]]:
        """Where every run is in its order."""
        return {"generators": [g.get_state() for g in self.generators], "left": self.left}

    def restore(self, state: dict[str, list[Tensor]]) -> None:
        """Go on from what :meth:`state` gave for the same runs."""
        for g, now in zip(self.generators, state["generators"], strict=True):
            g.set_state(now)
        self.left = state["left"]


class Pairs:
    """Pairs of tokens, their next tokens, and the tables that these come from."""

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        drawn = [pairs(run) for run in runs]
        tokens, labels, tables = (torch.stack(part) for part in zip(*drawn, strict=True))
        self.columns = torch.cat([tokens.mT, labels[:, None]], dim=1).to(device)  # (R, 3, T)
        self.tables = tables.to(device)

    def at(self, index: Int[Tensor, "k R B"]) -> Int[Tensor, "k R 3 B"]:
        """First, second and next tokens of some batches of every run."""
        return take_columns(self.columns.expand(len(index), -1, -1, -1), index)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all runs but those at ``indices``."""
        self.columns, self.tables = self.columns[[*indices]], self.tables[[*indices]]


class Examples:
    """Contexts, queries and labels of a stack, whose runs may have different numbers of them.

    The examples of all runs lie in one array, one run after the other. It is filled run by run, so
    the host never holds more than one run's. Of contexts that all examples share there is one a
    run.
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

        def chosen(x: Tensor) -> Tensor:
            return x.index_select(0, rows).unflatten(0, index.shape)

        contexts = self.contexts if self.shared else chosen(self.contexts)
        return contexts, chosen(self.queries), chosen(self.labels)

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
