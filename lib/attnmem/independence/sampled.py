"""The sampled test of the papers: random subsets, what they show and what they cannot show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import scipy
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ..checks import Range, Seed, checked, refuse
from .numerical import (
    Tolerance,
    check_entries,
    clearly_full,
    clearly_short,
    rank_by_values,
    scaled,
)

DRAWN = 8192  # subsets drawn at once
LARGE = 2**13  # vectors beyond which nothing is formed for all pairs, 512 MB
ENTRIES = 2**23  # numbers that are gathered at once, 64 MB of them

Fraction = Annotated[int | float, Range(0.0, 1.0)]


class SampledIndependence(NamedTuple):
    """What random subsets of ``size`` vectors showed.

    Sampling cannot prove a Kruskal rank: ``dependent_at_most`` is zero only if every subset was
    seen.

    Attributes:
        size: Number of vectors in a subset.
        samples: Number of subsets.
        dependent: How many of them were rank-deficient.
        confidence: Confidence of the bound that follows.
        dependent_at_most: Bound of the fraction of dependent subsets among all subsets (Clopper and
            Pearson's one-sided bound).
    """

    size: int
    samples: int
    dependent: int
    confidence: float
    dependent_at_most: float

    @property
    def independent_fraction(self) -> float:
        """The observed fraction of independent subsets."""
        return 1 - self.dependent / self.samples


class SampledKruskalRank(NamedTuple):
    """The largest size that passed the sampled test, with the evidence on both sides of it.

    Attributes:
        rank: That size, 0 if none passed.
        threshold: The fraction of independent samples that a size needs to pass.
        passed: The test of that size; None if no size passed.
        failed: The test of the next size; None if none failed.
    """

    rank: int
    threshold: float
    passed: SampledIndependence | None
    failed: SampledIndependence | None


def _can_be_sampled(vectors, dtype, size=1) -> None:
    check_entries(dtype, vectors=vectors)
    if size > len(vectors):
        refuse("size", size, f"at most the number of vectors, {len(vectors)}")


@checked(also=_can_be_sampled)
def sampled_independence(
    vectors: Shaped[Tensor, "T d"],
    size: int,
    *,
    samples: int = 5000,
    seed: Seed,
    rtol: Tolerance = None,
    dtype: torch.dtype | None = None,
    confidence: Fraction = 0.95,
) -> SampledIndependence:
    """Test uniformly random subsets of ``size`` rows for independence.

    A subset is independent if its numerical rank is ``size``. Most ranks are settled by a Cholesky
    decomposition of the subset's Gram matrix, cut from that of all vectors if there are few. Ranks
    below what squares can resolve are settled by a QR decomposition. Those close to the tolerance
    get their singular values computed.

    Args:
        vectors: One vector a row.
        size: Number of vectors in a subset, from 1 to ``T``.
        samples: Number of subsets.
        seed: Seed of the subsets, at least 0.
        rtol: As for :func:`numerical_rank`.
        dtype: As for :func:`numerical_rank`.
        confidence: Confidence of the bound, from 0 to 1.

    Returns:
        The counts, with a bound of the fraction of dependent subsets.

    Raises:
        ValueError: On entries that :func:`numerical_rank` refuses, or arguments out of range.

    Example:
        >>> sampled_independence(torch.eye(5), 3, samples=100, seed=0).dependent
        0

    Source: Mahdavi et al. 2024, Table 1 (their test of Assumption 1: 5000 samples, float32).
    """
    generator = torch.Generator().manual_seed(seed)
    vectors, _ = scaled(vectors, rtol, dtype)
    double = vectors.double()
    gram = double @ double.mT if len(vectors) <= LARGE else None
    ceiling = functools.cache(functools.partial(_ceiling, vectors, size))
    dependent = 0
    for subsets in _subsets(len(vectors), size, samples, generator):
        blocks = subsets.to(vectors.device)
        for block in blocks.split(1 + ENTRIES // (size * max(size, vectors.shape[1]))):
            dependent += int(_dependent(vectors, gram, block, rtol, ceiling).sum())
    test = scipy.stats.binomtest(dependent, samples, alternative="less")
    at_most = float(test.proportion_ci(confidence, method="exact").high)
    return SampledIndependence(size, samples, dependent, confidence, at_most)


def _subsets(
    T: int, size: int, samples: int, generator: torch.Generator
) -> Iterator[Int[Tensor, "block size"]]:
    """Uniformly random subsets, some at a time."""
    block = DRAWN if T <= LARGE else 1 + ENTRIES // T
    few = T > LARGE and size**2 <= T  # a draw of so few repeats nothing at least half of the time
    while samples:
        if few:
            subsets = torch.randint(T, (samples, size), generator=generator, device="cpu")
            in_order = subsets.sort(dim=1).values
            subsets = subsets[(in_order[:, 1:] != in_order[:, :-1]).all(dim=1)]
        else:
            keys = torch.rand(min(block, samples), T, generator=generator, device="cpu")
            subsets = keys.topk(size, dim=1).indices
        samples -= len(subsets)
        yield subsets


def _ceiling(vectors: Float[Tensor, "T d"], size: int) -> float:
    """A bound of the least squared singular value of any ``size`` of the vectors (interlacing)."""
    if size > min(vectors.shape):
        return 0.0
    return float(torch.linalg.svdvals(vectors)[size - 1]) ** 2


def _dependent(
    vectors: Float[Tensor, "T d"],
    gram: Float[Tensor, "T T"] | None,
    subsets: Int[Tensor, "block size"],
    rtol: float | None,
    ceiling: Callable[[], float],
) -> Bool[Tensor, " block"]:
    """Which subsets have a numerical rank below their size."""
    size, d = subsets.shape[1], vectors.shape[1]
    if rtol is None:
        rtol = max(size, d) * torch.finfo(vectors.dtype).eps
    if gram is None:
        rows = vectors[subsets].double()
        blocks = rows @ rows.mT
    else:
        blocks = gram[subsets[:, :, None], subsets[:, None, :]]
    dependent = ~clearly_full(blocks, d, rtol)
    unsettled = dependent.nonzero()[:, 0]
    if len(unsettled):
        unsettled = unsettled[~clearly_short(blocks[unsettled], d, rtol, ceiling())]
        dependent[unsettled] = rank_by_values(vectors[subsets[unsettled]], rtol) < size
    return dependent


@checked(also=lambda vectors, dtype: check_entries(dtype, vectors=vectors))
def sampled_kruskal_rank(
    vectors: Shaped[Tensor, "T d"],
    *,
    samples: int = 5000,
    threshold: Fraction = 0.99,
    seed: Seed,
    rtol: Tolerance = None,
    dtype: torch.dtype | None = None,
    confidence: Fraction = 0.95,
) -> SampledKruskalRank:
    """Estimate the Kruskal rank as published: the largest size that passes the sampled test.

    A size passes if a fraction ``threshold`` of its samples is independent. The size is found by
    bisection, since larger subsets are dependent more often. The result is an upper estimate of the
    Kruskal rank, unless a dependent size passes by luck. :class:`SampledIndependence` says what the
    samples guarantee.

    Args:
        vectors: One vector a row.
        samples: Number of subsets of each size that is tried.
        threshold: Fraction of independent samples that a size needs to pass, from 0 to 1.
        seed: Seed of the subsets, at least 0.
        rtol: As for :func:`numerical_rank`.
        dtype: As for :func:`numerical_rank`.
        confidence: Confidence of the bounds, from 0 to 1.

    Returns:
        The estimate, with the tests on both sides of it.

    Raises:
        ValueError: As for :func:`sampled_independence`.

    Example:
        >>> sampled_kruskal_rank(torch.eye(5)[:, :4] + 1, samples=100, seed=0).rank
        4

    Source: Mahdavi et al. 2024, Tables 1 and 3 (Appendix J).
    """
    low, high = 0, min(vectors.shape) + 1
    passed = failed = None
    while high - low > 1:
        size = (low + high) // 2
        options = {"rtol": rtol, "dtype": dtype, "confidence": confidence}
        test = sampled_independence(vectors, size, samples=samples, seed=seed + size, **options)
        if test.independent_fraction >= threshold:
            low, passed = size, test
        else:
            high, failed = size, test
    return SampledKruskalRank(low, threshold, passed, failed)
