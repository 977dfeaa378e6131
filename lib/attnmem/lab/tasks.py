"""The data sets of the experiments of both papers, drawn on the CPU from a given generator."""

from __future__ import annotations

import functools
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import Range, check_integer, checked, refuse


class Bigrams(NamedTuple):
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
def bigrams(generator: torch.Generator, vocab: Annotated[int, Range(2)], count: int) -> Bigrams:
    """Draw ``count`` uniformly random pairs of tokens, each followed by its entry in a table.

    A pair may occur more than once.

    Example:
        >>> drawn = bigrams(torch.Generator().manual_seed(0), vocab=5, count=7)
        >>> drawn.tokens.shape, drawn.table.shape
        (torch.Size([7, 2]), torch.Size([5, 5]))

    Source: Dana et al. 2025, the bigrams of their experiments.
    """
    source = {"generator": generator, "device": generator.device}
    table = torch.randint(vocab, (vocab, vocab), **source)
    tokens = torch.randint(vocab, (count, 2), **source)
    return Bigrams(tokens, table[tokens[:, 0], tokens[:, 1]], table)


def _all_pairs(vocab, count) -> None:
    check_integer("count", count, most=vocab**2)


@checked(also=_all_pairs)
def associations(
    generator: torch.Generator, vocab: Annotated[int, Range(2)], count: int
) -> Bigrams:
    """Draw ``count`` different pairs of tokens, each followed by its entry in a random table.

    The pairs are a uniformly random subset of all ``N^2``.

    Example:
        >>> drawn = associations(torch.Generator().manual_seed(0), vocab=5, count=25)
        >>> len(drawn.tokens.unique(dim=0))
        25
    """
    source = {"generator": generator, "device": generator.device}
    table = torch.randint(vocab, (vocab, vocab), **source)
    chosen = torch.randperm(vocab * vocab, **source)[:count]
    tokens = torch.stack([chosen // vocab, chosen % vocab], dim=1)
    return Bigrams(tokens, table.flatten()[chosen], table)


def _real(dtype) -> None:
    if dtype is not None and not dtype.is_floating_point:
        refuse("dtype", dtype, "a floating-point dtype of torch")


@checked(also=_real)
def context_queries(
    generator: torch.Generator,
    examples: int,
    context: int,
    dim: int = 64,
    *,
    shared: bool,
    classes: Annotated[int | None, Range(2)] = 100,
    dtype: torch.dtype | None = None,
) -> ContextQueries:
    """Draw queries and contexts with entries uniform on [0, 1], and random labels.

    Args:
        shared: Whether one context serves all examples.
        classes: Labels are uniform over so many; None draws real labels uniform on [0, 1].
        dtype: Of the real numbers; None is torch's default.

    Example:
        >>> drawn = context_queries(torch.Generator(), 7, context=3, dim=5, shared=True)
        >>> drawn.contexts.shape, drawn.queries.shape, drawn.labels.shape
        (torch.Size([3, 5]), torch.Size([7, 5]), torch.Size([7]))

    Source: Mahdavi et al. 2024, the synthetic experiments (Figures 2 to 5).
    """
    source = {"generator": generator, "device": generator.device}
    rand = functools.partial(torch.rand, dtype=dtype, **source)
    contexts = rand(*(() if shared else (examples,)), context, dim)
    queries = rand(examples, dim)
    if classes is None:
        return ContextQueries(contexts, queries, rand(examples))
    return ContextQueries(contexts, queries, torch.randint(classes, (examples,), **source))
