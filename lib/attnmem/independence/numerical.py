"""The numerical rank: singular values above a tolerance. Of one matrix, and of random subsets."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import scipy
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ..checks import FLOATS, Range, Seed, check_finite, checked, refuse
from ..examples import unit

MARGIN = 2.0  # a bound settles the rank if it differs from the tolerance by this factor
DRAWN = 8192  # subsets drawn at once
LARGE = 2**13  # vectors beyond which nothing is formed for all pairs, 512 MB
ENTRIES = 2**23  # numbers that are gathered at once, 64 MB of them

Share = Annotated[int | float, Range(0.0, 1.0)]
Tolerance = Annotated[int | float | None, Range(0.0, 1.0)]


def check_entries(dtype: torch.dtype | None = None, **matrices: Tensor) -> None:
    """Accept finite reals of single or double precision, or integers, and such an arithmetic."""
    for name, matrix in matrices.items():
        if matrix.dtype.is_complex or matrix.dtype in (torch.float16, torch.bfloat16, torch.bool):
            refuse(name, f"dtype {matrix.dtype}", "float32, float64 or integers")
        check_finite(name, matrix)
    if dtype is not None and dtype not in FLOATS:
        refuse("dtype", str(dtype), "torch.float32 or torch.float64")


@checked(also=lambda matrix, dtype: check_entries(dtype, matrix=matrix))
def numerical_rank(
    matrix: Shaped[Tensor, "*batch m n"],
    *,
    rtol: Tolerance = None,
    dtype: torch.dtype | None = None,
) -> int | Int[Tensor, "*batch"]:
    """Number of singular values above ``rtol`` times the largest one, of each matrix of a batch.

    Full rank is certain up to rounding. A lower rank only says that the matrix is close to one of
    that rank. There, :func:`attnmem.independence.certified_rank` proves a rank without a tolerance;
    the rank of some rows is a lower bound for all.

    Args:
        rtol: The default is ``max(m, n)`` times the rounding unit of ``dtype``, the rule of numpy
            and torch. It grows with the number of rows, to 0.05 for 400,000 rows in float32.
        dtype: The default is that of the matrix (float64 for integers).

    Example:
        >>> numerical_rank(torch.tensor([[1, 2], [2, 4]]))
        1
    """
    values, rtol = _scaled(matrix, rtol, dtype)
    if 0 in matrix.shape[-2:]:
        rank = torch.zeros(matrix.shape[:-2], dtype=torch.int64, device=matrix.device)
    else:
        # A Cholesky or a QR decomposition settles most matrices of full rank.
        matrices = values.reshape(-1, *matrix.shape[-2:])
        wide = (matrices if matrix.shape[-2] <= matrix.shape[-1] else matrices.mT).double()
        unsettled = ~_clearly_full(wide @ wide.mT, wide.shape[2], rtol)
        rank = torch.full(unsettled.shape, wide.shape[1], device=matrix.device)
        rank[unsettled] = _ranks_by_values(matrices[unsettled], rtol)
        rank = rank.view(matrix.shape[:-2])
    return int(rank) if matrix.ndim == 2 else rank


def _scaled(
    matrix: Shaped[Tensor, "*batch m n"], rtol: float | None, dtype: torch.dtype | None
) -> tuple[Float[Tensor, "*batch m n"], float]:
    """The matrix in its arithmetic and unit, so that no sum overflows, and the tolerance."""
    dtype = dtype or (matrix.dtype if matrix.dtype in FLOATS else torch.float64)
    matrix = matrix.to(dtype)
    if rtol is None:
        rtol = max(matrix.shape[-2:]) * torch.finfo(dtype).eps
    return (matrix / unit(matrix, (-2, -1)) if matrix.numel() else matrix), rtol


def _ranks_by_values(matrices: Float[Tensor, "B m n"], rtol: float) -> Int[Tensor, " B"]:
    """The ranks, from the singular values where a QR decomposition does not settle them."""
    unsettled = torch.ones(len(matrices), dtype=torch.bool, device=matrices.device)
    if matrices.dtype == torch.float64:  # for float32 the Gram matrices have shown as much already
        unsettled = ~_clearly_full_triangle(matrices, rtol)
    rank = torch.full(unsettled.shape, min(matrices.shape[1:]), device=matrices.device)
    values = torch.linalg.svdvals(matrices[unsettled])
    rank[unsettled] = (values > rtol * values[:, :1]).sum(dim=1)
    return rank


def _clearly_full_triangle(matrices: Float[Tensor, "B m n"], rtol: float) -> Bool[Tensor, " B"]:
    """Which matrices have full rank by the factor ``MARGIN``, from a QR decomposition."""
    # R has the matrix's singular values, the least of them at least 1 over the Frobenius norm of
    # its inverse. Unlike a Gram matrix, it loses no digits by squaring.
    tall = matrices if matrices.shape[1] >= matrices.shape[2] else matrices.mT
    R = torch.linalg.qr(tall, mode="r").R
    eye = torch.eye(R.shape[1], dtype=R.dtype, device=R.device)
    inverse = torch.linalg.solve_triangular(R, eye, upper=True)
    largest, product = torch.linalg.matrix_norm(R), torch.linalg.matrix_norm(inverse)
    rounding = max(matrices.shape[1:]) * torch.finfo(R.dtype).eps
    return largest * product < 1 / (MARGIN * max(rtol, rounding))


# --- what the Gram matrices of vectors in ``d`` dimensions tell about singular values -------------


def _clearly_full(gram: Float[Tensor, "B m m"], d: int, rtol: float) -> Bool[Tensor, " B"]:
    """Which have a least eigenvalue clearly above ``rtol^2`` times the largest, and rounding."""
    largest = torch.linalg.matrix_norm(gram)  # Frobenius: no eigenvalue is larger
    return _exceeds(gram, MARGIN * rtol**2 * largest + _noise(gram, d))


def _clearly_short(
    gram: Float[Tensor, "B m m"], d: int, rtol: float, ceiling: float
) -> Bool[Tensor, " B"]:
    """Which have a least eigenvalue, at most ``ceiling``, clearly below ``rtol^2`` the largest."""
    # The largest is at least any Rayleigh quotient: here that of x after two power iterations.
    x = gram @ (gram @ gram.sum(dim=2, keepdim=True))
    x = x / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    tolerated = rtol**2 / MARGIN * (x.mT @ gram @ x)[:, 0, 0]
    bound = tolerated - 2 * _noise(gram, d)
    return (tolerated > ceiling) | (bound > 0) & ~_exceeds(gram, bound)


def _exceeds(gram: Float[Tensor, "B m m"], bound: Float[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Whether all eigenvalues exceed the bound: the difference is positive definite."""
    difference = gram.clone()
    difference.diagonal(dim1=1, dim2=2).sub_(bound[:, None])
    return torch.linalg.cholesky_ex(difference).info == 0


def _noise(gram: Float[Tensor, "B m m"], d: int) -> Float[Tensor, " B"]:
    """A bound of the errors in the eigenvalues."""
    # The entries are products of length ``d``, which may underflow. They are then decomposed by a
    # backward stable method. No norm exceeds the trace.
    kind = torch.finfo(gram.dtype)
    trace = gram.diagonal(dim1=1, dim2=2).sum(dim=1)
    return 4 * (gram.shape[-1] + d) * kind.eps * trace + kind.tiny


# --- random subsets: what they show and what they cannot show -------------------------------------


class SampledIndependence(NamedTuple):
    """What random subsets of ``size`` vectors showed: so many of ``samples`` were ``dependent``.

    A fraction of at most ``dependent_at_most`` of all subsets is dependent, with this
    ``confidence`` (Clopper and Pearson). That proves no Kruskal rank.
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

    ``rank`` is that size, 0 if none passed. ``passed`` is its test, and ``failed`` that of the next
    size; None if none passed or failed.
    """

    rank: int
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
    confidence: Share = 0.95,
) -> SampledIndependence:
    """Test uniformly random subsets of ``size`` rows for independence.

    A subset is independent if its :func:`numerical_rank` is ``size``. ``confidence`` is that of the
    bound of the fraction of dependent subsets.

    Example:
        >>> sampled_independence(torch.eye(5), 3, samples=100, seed=0).dependent
        0

    Source: Mahdavi et al. 2024, Table 1 (their test of Assumption 1: 5000 samples, float32).
    """
    generator = torch.Generator().manual_seed(seed)
    vectors, _ = _scaled(vectors, rtol, dtype)
    double = vectors.double()
    gram = double @ double.mT if len(vectors) <= LARGE else None

    @functools.cache
    def ceiling() -> float:  # by interlacing, no subset has a larger least squared singular value
        short = size > min(vectors.shape)
        return 0.0 if short else float(torch.linalg.svdvals(vectors)[size - 1]) ** 2

    dependent = 0
    for subsets in _subsets(len(vectors), size, samples, generator):
        blocks = subsets.to(vectors.device)
        for block in blocks.split(1 + ENTRIES // (size * max(size, vectors.shape[1]))):
            dependent += int(_dependent(vectors, gram, block, rtol, ceiling).sum())
    test = scipy.stats.binomtest(dependent, samples, alternative="less")
    at_most = float(test.proportion_ci(confidence, method="exact").high)
    return SampledIndependence(size, samples, dependent, confidence, at_most)


def _subsets(T, size, samples, generator) -> Iterator[Int[Tensor, "block size"]]:
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


def _dependent(vectors, gram, subsets, rtol, ceiling) -> Bool[Tensor, " block"]:
    """Which subsets, ``(block, size)``, have a numerical rank below their size."""
    size, d = subsets.shape[1], vectors.shape[1]
    if rtol is None:
        rtol = max(size, d) * torch.finfo(vectors.dtype).eps
    if gram is None:
        rows = vectors[subsets].double()
        blocks = rows @ rows.mT
    else:
        blocks = gram[subsets[:, :, None], subsets[:, None, :]]
    dependent = ~_clearly_full(blocks, d, rtol)
    unsettled = dependent.nonzero()[:, 0]
    if len(unsettled):
        unsettled = unsettled[~_clearly_short(blocks[unsettled], d, rtol, ceiling())]
        dependent[unsettled] = _ranks_by_values(vectors[subsets[unsettled]], rtol) < size
    return dependent


@checked(also=lambda vectors, dtype: check_entries(dtype, vectors=vectors))
def sampled_kruskal_rank(
    vectors: Shaped[Tensor, "T d"],
    *,
    samples: int = 5000,
    threshold: Share = 0.99,
    seed: Seed,
    rtol: Tolerance = None,
    dtype: torch.dtype | None = None,
    confidence: Share = 0.95,
) -> SampledKruskalRank:
    """Estimate the Kruskal rank as published: the largest size that passes the sampled test.

    A size passes if a fraction ``threshold`` of its samples is independent. The size is found by
    bisection, since larger subsets are dependent more often. The result is an upper estimate of the
    Kruskal rank, unless a dependent size passes by luck. :class:`SampledIndependence` says what the
    samples guarantee.

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
    return SampledKruskalRank(low, passed, failed)
