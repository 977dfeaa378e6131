"""The data sets of the two papers' experiments, drawn on the CPU from a generator of their own."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .checks import check_integer, checked_by, refuse


class Bigrams(NamedTuple):
    """Pairs of tokens with the token that follows each, by a fixed random look-up table."""

    tokens: Int[Tensor, "count 2"]
    next_tokens: Int[Tensor, " count"]
    table: Int[Tensor, "N N"]


class ContextQueries(NamedTuple):
    """Contexts (own, or one for all), queries and labels (classes or reals)."""

    contexts: Float[Tensor, "*T n d"]
    queries: Float[Tensor, "T d"]
    labels: Tensor


def _check_bigrams(generator, vocab, count) -> None:
    check_integer("vocab", vocab, least=2)
    check_integer("count", count)


@checked_by(_check_bigrams)
def bigrams(generator: torch.Generator, vocab: int, count: int) -> Bigrams:
    """``count`` uniformly random pairs over ``vocab`` tokens, each followed by its table entry.

    Source: Dana et al. 2025, the bigrams of their experiments.
    """
    table = torch.randint(vocab, (vocab, vocab), generator=generator)
    tokens = torch.randint(vocab, (count, 2), generator=generator)
    return Bigrams(tokens, table[tokens[:, 0], tokens[:, 1]], table)


def _check_associations(generator, vocab, count) -> None:
    check_integer("vocab", vocab, least=2)
    check_integer("count", count, most=vocab**2)


@checked_by(_check_associations)
def associations(generator: torch.Generator, vocab: int, count: int) -> Bigrams:
    """``count`` different pairs over ``vocab`` tokens, each followed by its table entry.

    The pairs are a uniformly random subset of all ``vocab**2``.
    """
    table = torch.randint(vocab, (vocab, vocab), generator=generator)
    chosen = torch.randperm(vocab * vocab, generator=generator)[:count]
    tokens = torch.stack([chosen // vocab, chosen % vocab], dim=1)
    return Bigrams(tokens, table.flatten()[chosen], table)


def _check_context_queries(generator, examples, context, dim, shared, classes, dtype) -> None:
    for name, value in (("examples", examples), ("context", context), ("dim", dim)):
        check_integer(name, value)
    if classes is not None:
        check_integer("classes", classes, least=2)
    if not isinstance(shared, bool):
        refuse("shared", repr(shared), "True or False")


@checked_by(_check_context_queries)
def context_queries(
    generator: torch.Generator,
    examples: int,
    context: int,
    dim: int = 64,
    *,
    shared: bool,
    classes: int | None = 100,
    dtype: torch.dtype | None = None,
) -> ContextQueries:
    """Queries and contexts uniform on [0, 1]; labels uniform classes, or reals if None.

    ``dtype``: of the real numbers; torch's default if None.

    Source: Mahdavi et al. 2024, synthetic experiments (Figs. 2-5).
    """
    rand = functools.partial(torch.rand, generator=generator, dtype=dtype)
    contexts = rand(*(() if shared else (examples,)), context, dim)
    queries = rand(examples, dim)
    if classes is None:
        return ContextQueries(contexts, queries, rand(examples))
    labels = torch.randint(classes, (examples,), generator=generator)
    return ContextQueries(contexts, queries, labels)
