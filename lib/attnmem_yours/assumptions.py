"""Whether the assumptions of the theorems hold for some examples, in a precision."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnmem.examples import unit
from attnmem.theory.independence import certified_rank, kruskal_rank, sample_subsets

from . import report
from .data import Examples

INDEPENDENT_QUERIES, INDEPENDENT_TOKENS = "Assumption 1", "Assumption 2"
INDEPENDENT_SUMS, GENERAL = "Assumption 3", "general position"
NAMES = (INDEPENDENT_QUERIES, INDEPENDENT_TOKENS, INDEPENDENT_SUMS, GENERAL)
PRECISIONS = ("float32", "float64")
HOLDS, FAILS, TO_ROUNDING = "holds", "fails", "fails to rounding"
NOT_REFUTED = "not refuted"
_FEW = 200_000  # subsets of which every one is looked at, and numbers whose rank is certified


@dataclasses.dataclass(frozen=True)
class Tested:
    """One assumption in one precision."""

    name: str
    precision: str  # float32 or float64
    verdict: str  # holds, fails, fails to rounding (by a tolerance), or not refuted (by samples)
    detail: str  # what was looked at, and what was found


def tested(examples: Examples, name: str, precision: str, samples: int, seed: int) -> Tested:
    """Look at the vectors of an assumption, rounded to a precision."""
    vectors = examples.queries
    if name == INDEPENDENT_TOKENS:
        vectors = examples.contexts
    if name == INDEPENDENT_SUMS:  # with the mean tokens; padding is zero
        vectors = vectors + examples.contexts.sum(-2) / examples.lengths[:, None]
    dtype = getattr(torch, precision)
    if not vectors.to(dtype).isfinite().all():
        return Tested(name, precision, *_outcome(FAILS, "overflow"))
    # Each coordinate in its own unit, as for the dimensions: no rank depends on units.
    vectors = (vectors / unit(vectors, (*range(vectors.ndim - 1),))).to(dtype)
    if name == INDEPENDENT_TOKENS:
        contexts = vectors.view(-1, *vectors.shape[-2:])
        return Tested(name, precision, *_of_each_context(contexts, examples.lengths))
    size = vectors.shape[1] if name == GENERAL else examples.contexts.shape[-2]
    size = min(len(vectors), size)
    return Tested(name, precision, *_of_subsets(vectors, size, samples, seed))


def _outcome(verdict: str, reason: str, **numbers: Any) -> tuple[str, str]:
    """A verdict, and its reason in words."""
    return verdict, report.REASONS[reason].format(**numbers)


def _of_subsets(
    vectors: Float[Tensor, "T d"], size: int, samples: int, seed: int
) -> tuple[str, str]:
    """Whether all sets of so many vectors are independent."""
    T, d = vectors.shape
    if size > d:
        return _outcome(FAILS, "too many", size=size, dim=d)
    zero = (~vectors.any(1)).nonzero()[:, 0].tolist()
    if zero:
        return _outcome(FAILS, "zero", example=zero[0])
    if size == 1:
        return _outcome(HOLDS, "not zero")
    _, group, counts = vectors.unique(dim=0, return_inverse=True, return_counts=True)
    if counts.max() > 1:
        first, second = (group == counts.argmax()).nonzero()[:2, 0].tolist()
        return _outcome(FAILS, "equal", first=first, second=second)
    rank = int(torch.linalg.matrix_rank(vectors))
    if rank < size and vectors.numel() > _FEW:
        return _outcome(TO_ROUNDING, "rank", rank=rank)
    if rank < size:
        exact = certified_rank(vectors).rank
        return _outcome(TO_ROUNDING, "certified rank", rank=rank, exact=exact)
    if size == T:
        return _outcome(HOLDS, "independent", count=T)
    n_subsets = max(math.comb(T, k) for k in range(d + 1))
    if n_subsets <= _FEW and vectors.dtype == torch.float64:
        rank = kruskal_rank(vectors, max_subsets=_FEW)
        verdict = HOLDS if rank >= size else TO_ROUNDING
        return _outcome(verdict, "every set", size=size, rank=rank)
    test = sample_subsets(vectors, size, samples, seed)
    numbers = {"dependent": test.dependent, "samples": samples, "size": size}
    verdict = TO_ROUNDING if test.dependent else NOT_REFUTED
    return _outcome(verdict, "samples", **numbers, at_most=test.dependent_at_most)


def _of_each_context(
    contexts: Float[Tensor, "T n d"], lengths: Int[Tensor, " T"]
) -> tuple[str, str]:
    """Whether the tokens of each context are independent."""
    deficient = (torch.linalg.matrix_rank(contexts) < lengths).nonzero()[:, 0].tolist()
    if not deficient:
        return _outcome(HOLDS, "full", contexts=len(contexts))
    t, count = deficient[0], len(deficient)
    tokens, rank = int(lengths[t]), certified_rank(contexts[t]).rank
    verdict = FAILS if tokens > contexts.shape[2] else TO_ROUNDING
    return _outcome(verdict, "deficient", count=count, first=t, tokens=tokens, rank=rank)
