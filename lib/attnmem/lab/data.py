"""Random numbers and data of the runs of both papers, drawn on the CPU."""

from __future__ import annotations

import collections
import functools
import hashlib
import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import check_integer, refuse
from ..features import corpora
from .store import Run


class Pairs(NamedTuple):
    """Pairs of tokens with the token that follows each, by a fixed random look-up table."""

    tokens: Int[Tensor, "count 2"]  # from 0 to N - 1
    next_tokens: Int[Tensor, " count"]  # table[a, b] for each pair (a, b)
    table: Int[Tensor, "N N"] | None  # none of a text
    # Of every pair in order the distribution of its next token, if that is not certain; the table
    # has the likeliest.
    distributions: Float[Tensor, "N pairs"] | None = None


class ContextQueries(NamedTuple):
    """Contexts, queries and labels of the synthetic experiments."""

    contexts: Float[Tensor, "*T n d"]  # one for each example, (T, n, d), or one for all, (n, d)
    queries: Float[Tensor, "T d"]
    labels: Tensor  # of each example a class, or a real number


def generator(run: Run | str, stream: str) -> torch.Generator:
    """A new generator on the CPU, seeded by a run's key, or a text in its place, and a purpose."""
    key = run if isinstance(run, str) else run.key
    digest = hashlib.sha256(f"{key} {stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def contexts_of(run: Run) -> ContextQueries:
    """What a run of Mahdavi et al.'s is trained on: entries uniform on [0, 1], in float32.

    Labels are uniform over the classes, or, where they are real numbers, on [0, 1]. Queries are
    those of :func:`poor_queries` if the run's context asks for them.
    """
    g = generator(run, "data")
    if run.table is not None:  # a number that decides the examples for all seeds
        g = generator(f"{run.n} {run.d} {run.N} {run.context} {run.table}", "examples")
    rand = functools.partial(torch.rand, generator=g, dtype=torch.float32)
    contexts = rand(*(() if run.shares_context else (run.T,)), run.n, run.d)
    queries = rand(run.T, run.d) if run.context in ("shared", "random") else poor_queries(run, g)
    labels = torch.randint(run.N, (run.T,), generator=g) if run.N else rand(run.T)
    return ContextQueries(contexts, queries, labels)


def poor_queries(run: Run, g: torch.Generator) -> Float[Tensor, "T d"]:
    """Normal queries of Kruskal rank ``Q``, for a context named ``shared-groups-Q`` or so.

    In ``groups`` of ``Q + 1`` the last query is a combination of the others. Its coefficients have
    length one, so it is distributed as they are, and all span ``d`` dimensions. In
    ``shared-flat-Q`` all lie in one random subspace of ``Q`` dimensions; their mean square length
    is ``d``, too.
    """
    _, kind, number = run.context.split("-")
    Q, normal = int(number), functools.partial(torch.randn, generator=g, dtype=torch.float32)
    if kind == "flat":
        basis, _ = torch.linalg.qr(normal(run.d, Q))
        return normal(run.T, Q) @ basis.mT * (run.d / Q) ** 0.5
    queries = normal(run.T, run.d)
    groups = queries[: run.T // (Q + 1) * (Q + 1)].unflatten(0, (-1, Q + 1))
    coefficients = normal(len(groups), 1, Q)
    coefficients /= coefficients.norm(dim=2, keepdim=True)
    groups[:, Q:] = coefficients @ groups[:, :Q]
    return queries


def pairs_of(run: Run) -> Pairs:
    """What a run of Dana et al.'s is trained on; of associations no two pairs are equal."""
    if run.task == "text":
        words, _ = words_of(run)
        return Pairs(words[:, :2], words[:, 2], None)
    g = generator(run, "data")
    table = torch.randint(run.N, (run.N, run.N), generator=g)
    if run.task == "associations":
        check_integer("T", run.T, most=run.N**2)
        tokens = _pairs_numbered(torch.randperm(run.N**2, generator=g)[: run.T], run.N)
    elif run.prior is not None:
        shares = torch.arange(1, run.N**2 + 1, dtype=torch.float64) ** -run.prior
        ranked = torch.randperm(run.N**2, generator=g)  # pairs, the likeliest first
        chosen = ranked[torch.multinomial(shares, run.T, replacement=True, generator=g)]
        tokens = _pairs_numbered(chosen, run.N)
    else:
        tokens = torch.randint(run.N, (run.T, 2), generator=g)
    if run.table is not None:
        g = generator(f"{run.N} {run.table}", "table")
        table = torch.randint(run.N, (run.N, run.N), generator=g)
    distributions = None
    if run.entropy is not None:
        distributions = distributions_of(run.N**2, run.N, run.entropy, g)
        table = distributions.argmax(dim=0).view(run.N, run.N)
    return Pairs(tokens, table[tokens[:, 0], tokens[:, 1]], table, distributions)


def words_of(run: Run) -> tuple[Int[Tensor, "T 3"], Int[Tensor, "new 3"]]:
    """Every three words in a row of Python's manual, as numbers: ``T`` to train on, and new ones.

    The ``N - 1`` most frequent words have a number each, all others are ``N - 1``. Of every 72
    parts of the text each ninth is new to the training, so that all topics are in both.
    """
    words = corpora.manual_words()
    size = run.T // 64  # of a part
    if run.T % 64 or not 0 < 72 * size <= len(words) - 2:
        refuse("T", run.T, f"a multiple of 64 up to {(len(words) - 2) // 72 * 64}")
    ranks = collections.Counter(words).most_common(run.N - 1)
    numbers = {word: number for number, (word, _) in enumerate(ranks)}
    text = torch.tensor([numbers.get(word, run.N - 1) for word in words])
    triples = text.unfold(0, 3, 1)[: 72 * size].unflatten(0, (8, 9 * size))
    return triples[:, : 8 * size].flatten(0, 1), triples[:, 8 * size :].flatten(0, 1)


def _pairs_numbered(numbers: Int[Tensor, " count"], N: int) -> Int[Tensor, "count 2"]:
    return torch.stack([numbers // N, numbers % N], dim=1)


def distributions_of(
    count: int, N: int, bits: float, g: torch.Generator
) -> Float[Tensor, "N count"]:
    """Distributions over ``N`` tokens, all of this entropy: softmaxes of scaled normal numbers."""
    if not 0 < bits < math.log2(N):
        refuse("entropy", bits, f"above 0 and below log2(N) = {math.log2(N):.4f}")
    logits = torch.randn(N, count, generator=g, dtype=torch.float64)
    logits = logits - logits.amax(dim=0)
    low = torch.full((count,), -20.0, dtype=logits.dtype)  # of the logarithm of the scale
    high = -low
    for _ in range(60):
        middle = (low + high) / 2
        shares = (middle.exp() * logits).softmax(dim=0)
        flat = torch.special.entr(shares).sum(dim=0) > bits * math.log(2)
        low, high = torch.where(flat, middle, low), torch.where(flat, high, middle)
    return shares.float()
