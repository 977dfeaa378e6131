"""Linear independence, three ways: numerical rank, exact Kruskal rank, and the sampled test.

Source of the definitions: Mahdavi et al. 2024, Definitions 1 and 2 and Assumptions 1-3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int, Shaped
from scipy.stats import beta
from torch import Tensor

from .checks import (
    FLOATS,
    check_finite,
    check_integer,
    check_number,
    check_tensor,
    checked_by,
    refuse,
)

BLOCK = 8192  # subsets whose ranks are computed in one batch


def _check_rank(matrix, rtol, dtype) -> None:
    check_tensor("matrix", matrix, "(*batch, m, n)", range(2, 99))
    _check_entries("matrix", matrix, rtol, dtype)


def _check_entries(name, value, rtol, dtype=None) -> None:
    if value.dtype.is_complex or value.dtype in (torch.float16, torch.bfloat16, torch.bool):
        refuse(name, f"dtype {value.dtype}", "float32, float64 or integers")
    check_finite(name, value)
    if rtol is not None:
        check_number("rtol", rtol, least=0.0, most=1.0)
    if dtype is not None and dtype not in FLOATS:
        refuse("dtype", str(dtype), "torch.float32 or torch.float64")


@checked_by(_check_rank)
def numerical_rank(
    matrix: Shaped[Tensor, "*batch m n"],
    *,
    rtol: float | None = None,
    dtype: torch.dtype | None = None,
) -> int | Int[Tensor, "*batch"]:
    r"""Number of singular values above ``rtol`` times the largest one.

    Arguments
        ``rtol``: relative tolerance in [0, 1]; by default ``max(m, n)`` times the rounding unit of
        ``dtype``, the rule of numpy and torch. ``dtype``: the arithmetic to compute in, float32 or
        float64; by default that of the matrix (float64 for integers).
    Returns
        An ``int`` for one matrix, an integer tensor for a batch.
    Raises
        ``ValueError`` on NaN or infinite entries, half precision, complex numbers.

    A tolerance makes a statement about a *perturbed* matrix: full rank is certain (up to rounding),
    a lower rank only says that the matrix is close to one of that rank.

    >>> numerical_rank(torch.tensor([[1, 2], [2, 4]]))
    1
    """
    if dtype is None:
        dtype = matrix.dtype if matrix.dtype in FLOATS else torch.float64
    if rtol is None:
        rtol = max(matrix.shape[-2:]) * torch.finfo(dtype).eps
    if 0 in matrix.shape[-2:]:
        rank = torch.zeros(matrix.shape[:-2], dtype=torch.int64)
    else:
        values = torch.linalg.svdvals(matrix.to(dtype))
        rank = (values > rtol * values[..., :1]).sum(dim=-1)
    return int(rank) if matrix.ndim == 2 else rank


# --- Kruskal rank: every subset ------------------------------------------------------------------


def _check_kruskal(vectors, rtol, max_subsets) -> None:
    check_tensor("vectors", vectors, "(T, d)", 2)
    _check_entries("vectors", vectors, rtol)
    check_integer("max_subsets", max_subsets)


@checked_by(_check_kruskal)
def kruskal_rank(
    vectors: Shaped[Tensor, "T d"], *, rtol: float | None = None, max_subsets: int = 1_000_000
) -> int:
    """The largest ``k`` such that EVERY ``k`` of the rows are linearly independent.

    Exhaustive: sizes are tried upwards until a dependent subset appears, each subset by its
    numerical rank in float64 (rows scaled to length one first, which changes no dependency).

    Arguments
        ``rtol``: as for :func:`numerical_rank`. ``max_subsets``: the work allowed for one size;
        a million subsets of up to ten vectors take about ten seconds on one core.
    Raises
        ``ValueError`` if a size needs more than ``max_subsets`` ranks; the message says what is
        known by then. :func:`sampled_kruskal_rank` takes any size, and promises less.

    >>> kruskal_rank(torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]]))
    2

    Source: Mahdavi et al. 2024, Definition 1.
    """
    rows = vectors.to(torch.float64)
    rows = rows / rows.norm(dim=1, keepdim=True).where(rows.any(dim=1, keepdim=True), 1.0)
    count = len(rows)
    bound = numerical_rank(rows, rtol=rtol)
    if bound == count:
        return count
    for size in range(1, bound + 1):
        if math.comb(count, size) > max_subsets:
            refuse(
                "vectors",
                f"{count} rows, whose Kruskal rank lies between {size - 1} and {bound}",
                f"at most max_subsets = {max_subsets} subsets of a size, not "
                f"{math.comb(count, size)} of size {size} (see sampled_kruskal_rank)",
            )
        for subsets in _subsets(count, size):
            if (numerical_rank(rows[subsets], rtol=rtol) < size).any():
                return size - 1
    return bound


def _subsets(count: int, size: int) -> Iterator[Int[Tensor, "block size"]]:
    combinations = itertools.combinations(range(count), size)
    while block := list(itertools.islice(combinations, BLOCK)):
        yield torch.tensor(block)


# --- the sampled test: some subsets --------------------------------------------------------------


class SampledIndependence(NamedTuple):
    """What ``samples`` random subsets of ``size`` vectors showed.

    ``dependent`` of them were rank-deficient. With the given confidence the fraction of dependent
    subsets among ALL subsets is at most ``dependent_at_most`` (Clopper and Pearson's one-sided
    bound). It is zero only if every subset was seen: sampling cannot prove a Kruskal rank.
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

    ``passed`` is None if no size passed, ``failed`` is None if none failed.
    """

    rank: int
    threshold: float
    passed: SampledIndependence | None
    failed: SampledIndependence | None


def _check_sampling(
    vectors, samples, seed, rtol, dtype, confidence, size=None, threshold=0.0
) -> None:
    check_tensor("vectors", vectors, "(T, d)", 2)
    _check_entries("vectors", vectors, rtol, dtype)
    check_integer("samples", samples)
    check_integer("seed", seed, least=0)
    check_number("confidence", confidence, least=0.0, most=1.0)
    check_number("threshold", threshold, least=0.0, most=1.0)
    if size is not None:
        check_integer("size", size, most=len(vectors))


@checked_by(_check_sampling)
def sampled_independence(
    vectors: Shaped[Tensor, "T d"],
    size: int,
    *,
    samples: int = 5000,
    seed: int,
    rtol: float | None = None,
    dtype: torch.dtype | None = None,
    confidence: float = 0.95,
) -> SampledIndependence:
    """Test ``samples`` uniformly random subsets of ``size`` rows for independence.

    ``rtol`` and ``dtype`` as for :func:`numerical_rank`; ``seed`` fixes the subsets.

    >>> sampled_independence(torch.eye(5), 3, samples=100, seed=0).dependent
    0

    Source: Mahdavi et al. 2024, Table 1 (their test of Assumption 1: 5000 samples, float32).
    """
    generator = torch.Generator().manual_seed(seed)
    dependent = 0
    for start in range(0, samples, BLOCK):
        keys = torch.rand(min(BLOCK, samples - start), len(vectors), generator=generator)
        subsets = keys.topk(size, dim=1).indices.to(vectors.device)
        ranks = numerical_rank(vectors[subsets], rtol=rtol, dtype=dtype)
        dependent += int((ranks < size).sum())
    # Clopper-Pearson, one-sided; beta(samples + 1, 0) is the point mass at one.
    at_most = beta.ppf(confidence, dependent + 1, samples - dependent) if dependent < samples else 1
    return SampledIndependence(size, samples, dependent, confidence, float(at_most))


@checked_by(_check_sampling)
def sampled_kruskal_rank(
    vectors: Shaped[Tensor, "T d"],
    *,
    samples: int = 5000,
    threshold: float = 0.99,
    seed: int,
    rtol: float | None = None,
    dtype: torch.dtype | None = None,
    confidence: float = 0.95,
) -> SampledKruskalRank:
    """The published estimate: the largest size of which a ``threshold`` of samples is independent.

    Found by bisection over the sizes (larger subsets are dependent more often), each size with its
    own ``samples`` random subsets. The result is an upper estimate of the Kruskal rank, unless the
    threshold is met by luck; :class:`SampledIndependence` says what the samples do guarantee.

    Source: Mahdavi et al. 2024, Tables 1 and 3 (Appendix J).
    """
    low, high = 0, min(vectors.shape) + 1
    passed = failed = None
    while high - low > 1:
        size = (low + high) // 2
        test = sampled_independence(
            vectors,
            size,
            samples=samples,
            seed=seed + size,
            rtol=rtol,
            dtype=dtype,
            confidence=confidence,
        )
        if test.independent_fraction >= threshold:
            low, passed = size, test
        else:
            high, failed = size, test
    return SampledKruskalRank(low, threshold, passed, failed)
