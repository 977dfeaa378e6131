"""Random numbers and data of the runs of both papers, drawn on the CPU."""

from __future__ import annotations

import functools
import hashlib
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import Range, check_integer, checked
from .store import Run

# --- the data sets --------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """Pairs of tokens with the token that follows each, by a fixed random look-up table."""

    tokens: Int[Tensor, "count 2"]  # from 0 to N - 1
    next_tokens: Int[Tensor, " count"]  # table[a, b] for each pair (a, b)
    table: Int[Tensor, "N N"]


class ContextQueries(NamedTuple):
    """Contexts, queries and labels of the synthetic experiments."""

    contexts: Float[Tensor, "*T n d"]  # one for each example, (T, n, d), or one for all, (n, d)
    queries: Float[Tensor, "T d"]
    labels: Tensor  # of each example a class, or a real number


@checked
def bigrams(generator: torch.Generator, vocab: Annotated[int, Range(2)], count: int) -> Pairs:
    """Draw ``count`` uniformly random pairs of tokens, each followed by its entry in a table.

    A pair may occur more than once. Source: Dana et al. 2025, the bigrams of their experiments.
    """
    table = _table(generator, vocab)
    tokens = torch.randint(vocab, (count, 2), generator=generator, device=generator.device)
    return _followed(tokens, table)


def _table(generator: torch.Generator, vocab: int) -> Int[Tensor, "N N"]:
    return torch.randint(vocab, (vocab, vocab), generator=generator, device=generator.device)


def _followed(tokens: Tensor, table: Tensor) -> Pairs:
    return Pairs(tokens, table[tokens[:, 0], tokens[:, 1]], table)


@checked
def associations(generator: torch.Generator, vocab: Annotated[int, Range(2)], count: int) -> Pairs:
    """Draw a random subset of ``count`` of all ``N^2`` pairs, followed as :func:`bigrams` are."""
    check_integer("count", count, most=vocab**2)
    table, size = _table(generator, vocab), vocab**2
    chosen = torch.randperm(size, generator=generator, device=generator.device)[:count]
    tokens = torch.stack([chosen // vocab, chosen % vocab], dim=1)
    return _followed(tokens, table)


# --- what a run's key decides ---------------------------------------------------------------------


def generator(run: Run | str, stream: str) -> torch.Generator:
    """A new generator on the CPU, seeded by a run's key, or a text in its place, and a purpose."""
    key = run if isinstance(run, str) else run.key
    digest = hashlib.sha256(f"{key} {stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def contexts_of(run: Run) -> ContextQueries:
    """What a run of Mahdavi et al.'s is trained on: entries uniform on [0, 1], in float32.

    Labels are uniform over the classes, or, where they are real numbers, on [0, 1].
    """
    g = generator(run, "data")
    if run.table is not None:  # a number that decides the examples for all seeds
        g = generator(f"{run.n} {run.d} {run.N} {run.context} {run.table}", "examples")
    rand = functools.partial(torch.rand, generator=g, dtype=torch.float32)
    contexts = rand(*(() if run.context == "shared" else (run.T,)), run.n, run.d)
    queries = rand(run.T, run.d)
    labels = torch.randint(run.N, (run.T,), generator=g) if run.N else rand(run.T)
    return ContextQueries(contexts, queries, labels)


def pairs_of(run: Run) -> Pairs:
    """The pairs of tokens that a run of Dana et al.'s is trained on, with their next tokens."""
    draw = {"bigrams": bigrams, "associations": associations}[run.task]
    drawn = draw(generator(run, "data"), run.N, run.T)
    if run.table is None:
        return drawn
    return _followed(drawn.tokens, _table(generator(f"{run.N} {run.table}", "table"), run.N))
