"""The numerical rank: singular values above a tolerance."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ..checks import FLOATS, Range, check_finite, checked, refuse
from ..examples import unit

MARGIN = 2.0  # a bound settles the rank if it differs from the tolerance by this factor

Tolerance = Annotated[int | float | None, Range(0.0, 1.0)]


def check_entries(dtype: torch.dtype | None = None, **matrices: Tensor) -> None:
    """Accept finite reals of single or double precision, or integers.

    Args:
        dtype: The arithmetic to compute in, or None.
        **matrices: The matrices, by the names for the error.

    Raises:
        ValueError: If an entry or a dtype is not accepted.
    """
    for name, matrix in matrices.items():
        if matrix.dtype.is_complex or matrix.dtype in (torch.float16, torch.bfloat16, torch.bool):
            refuse(name, f"dtype {matrix.dtype}", "float32, float64 or integers")
        check_finite(name, matrix)
    if dtype is not None and dtype not in FLOATS:
        refuse("dtype", str(dtype), "torch.float32 or torch.float64")


def _is_numerical(matrix, dtype) -> None:
    check_entries(dtype, matrix=matrix)


def scaled(
    matrix: Shaped[Tensor, "*batch m n"], rtol: float | None, dtype: torch.dtype | None
) -> tuple[Float[Tensor, "*batch m n"], float]:
    """The matrix in its arithmetic and unit, so that no sum overflows, and the tolerance.

    Args:
        matrix: A matrix, or a batch of them.
        rtol: The relative tolerance, by default the longer side times the rounding unit.
        dtype: The arithmetic, by default the matrix's own (float64 for integers).

    Returns:
        The matrix with a largest entry from 1 to 4, and the tolerance.
    """
    dtype = dtype or (matrix.dtype if matrix.dtype in FLOATS else torch.float64)
    matrix = matrix.to(dtype)
    if rtol is None:
        rtol = max(matrix.shape[-2:]) * torch.finfo(dtype).eps
    return (matrix / unit(matrix, (-2, -1)) if matrix.numel() else matrix), rtol


@checked(also=_is_numerical)
def numerical_rank(
    matrix: Shaped[Tensor, "*batch m n"],
    *,
    rtol: Tolerance = None,
    dtype: torch.dtype | None = None,
) -> int | Int[Tensor, "*batch"]:
    """Number of singular values above ``rtol`` times the largest one.

    A tolerance makes a statement about a perturbed matrix. Full rank is certain up to rounding. A
    lower rank only says that the matrix is close to one of that rank. There,
    :func:`attnmem.independence.certified_rank` proves a rank without a tolerance; the rank of some
    rows is a lower bound for all.

    Most matrices of full rank are settled by a Cholesky decomposition of their Gram matrix, or by a
    QR decomposition. Only the others get their singular values computed.

    Args:
        matrix: One matrix or a batch of them, floats or integers.
        rtol: Relative tolerance from 0 to 1. The default is ``max(m, n)`` times the rounding unit
            of ``dtype``, the rule of numpy and torch. It grows with the number of rows, to 0.05 for
            400,000 rows in float32: :func:`rank_margin` says how much of the rank it decides.
        dtype: The arithmetic to compute in, float32 or float64. The default is that of the matrix
            (float64 for integers).

    Returns:
        An ``int`` for one matrix, an integer tensor for a batch.

    Raises:
        ValueError: On NaN or infinite entries, half precision, complex numbers, or a tolerance out
            of range.

    Example:
        >>> numerical_rank(torch.tensor([[1, 2], [2, 4]]))
        1
    """
    values, rtol = scaled(matrix, rtol, dtype)
    if 0 in matrix.shape[-2:]:
        rank = torch.zeros(matrix.shape[:-2], dtype=torch.int64, device=matrix.device)
    else:
        rank = _ranks(values.reshape(-1, *matrix.shape[-2:]), rtol).view(matrix.shape[:-2])
    return int(rank) if matrix.ndim == 2 else rank


class RankMargin(NamedTuple):
    """A numerical rank, and how far it is from another one.

    Attributes:
        rank: The number of singular values above the tolerance.
        tolerance: The tolerance, relative to the largest singular value as all that follows.
        kept: The smallest singular value above it; 0 if there is none.
        dropped: The largest one up to it; 0 if there is none.
    """

    rank: int
    tolerance: float
    kept: float
    dropped: float


@checked(also=_is_numerical)
def rank_margin(
    matrix: Shaped[Tensor, "m n"],
    *,
    rtol: Tolerance = None,
    dtype: torch.dtype | None = None,
) -> RankMargin:
    """The numerical rank with its tolerance and the singular values on both sides of it.

    A rank below ``min(m, n)`` whose ``dropped`` is far above the rounding unit is one of the
    tolerance, not of the matrix. In float64 the default tolerance is 5e8 times as small.

    Args:
        matrix: Floats or integers.
        rtol: As for :func:`numerical_rank`.
        dtype: As for :func:`numerical_rank`.

    Returns:
        The rank of :func:`numerical_rank`, up to rounding, and what it rests on.

    Raises:
        ValueError: As for :func:`numerical_rank`.

    Example:
        >>> tall = torch.eye(2).repeat(10**6, 1) * torch.tensor([1.0, 0.1])
        >>> rank_margin(tall).rank, rank_margin(tall, dtype=torch.float64).rank
        (1, 2)
        >>> round(rank_margin(tall).dropped, 3), round(rank_margin(tall).tolerance, 3)
        (0.1, 0.238)
    """
    matrix, rtol = scaled(matrix, rtol, dtype)
    values = torch.linalg.svdvals(matrix).double()
    shares = (values / values[:1].clamp(min=torch.finfo(values.dtype).tiny)).tolist()
    rank = sum(share > rtol for share in shares)
    return RankMargin(rank, rtol, *(([0.0, *shares][rank], [*shares, 0.0][rank])))


def _ranks(matrices: Float[Tensor, "B m n"], rtol: float) -> Int[Tensor, " B"]:
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    gram = wide.double() @ wide.double().mT
    unsettled = ~clearly_full(gram, wide.shape[2], rtol)
    rank = torch.full(unsettled.shape, wide.shape[1], device=matrices.device)
    rank[unsettled] = rank_by_values(matrices[unsettled], rtol)
    return rank


def rank_by_values(matrices: Float[Tensor, "B m n"], rtol: float) -> Int[Tensor, " B"]:
    """The numerical rank, from the singular values where a QR decomposition does not settle it.

    Args:
        matrices: A batch of float32 or float64 matrices.
        rtol: Relative tolerance from 0 to 1.

    Returns:
        The rank of each matrix.
    """
    unsettled = torch.ones(len(matrices), dtype=torch.bool, device=matrices.device)
    if matrices.dtype == torch.float64:  # for float32 the Gram matrices have shown as much already
        unsettled = ~_clearly_full_triangle(matrices, rtol)
    rank = torch.full(unsettled.shape, min(matrices.shape[1:]), device=matrices.device)
    values = torch.linalg.svdvals(matrices[unsettled])
    rank[unsettled] = (values > rtol * values[:, :1]).sum(dim=1)
    return rank


def _clearly_full_triangle(matrices: Float[Tensor, "B m n"], rtol: float) -> Bool[Tensor, " B"]:
    """Which matrices have full rank by the factor ``MARGIN``, from a QR decomposition.

    The triangle has the same singular values as the matrix. The least of them is at least 1 over
    the Frobenius norm of the inverse. Unlike a Gram matrix, a triangle loses no digits by squaring.
    """
    tall = matrices if matrices.shape[1] >= matrices.shape[2] else matrices.mT
    R = torch.linalg.qr(tall, mode="r").R
    eye = torch.eye(R.shape[1], dtype=R.dtype, device=R.device)
    inverse = torch.linalg.solve_triangular(R, eye, upper=True)
    largest, product = torch.linalg.matrix_norm(R), torch.linalg.matrix_norm(inverse)
    rounding = max(matrices.shape[1:]) * torch.finfo(R.dtype).eps
    return largest * product < 1 / (MARGIN * max(rtol, rounding))


# --- what a Gram matrix tells about singular values -----------------------------------------------


def clearly_full(gram: Float[Tensor, "B m m"], d: int, rtol: float) -> Bool[Tensor, " B"]:
    """Which Gram matrices have a least eigenvalue clearly above ``rtol^2`` times the largest.

    "Clearly" means by the factor ``MARGIN``, and by more than rounding errors.

    Args:
        gram: A batch of Gram matrices of ``m`` vectors.
        d: Number of entries of each vector.
        rtol: Relative tolerance of the vectors' singular values.

    Returns:
        True for each such matrix.
    """
    largest = torch.linalg.matrix_norm(gram)  # Frobenius: no eigenvalue is larger
    return _exceeds(gram, MARGIN * rtol**2 * largest + _noise(gram, d))


def clearly_short(
    gram: Float[Tensor, "B m m"], d: int, rtol: float, ceiling: float
) -> Bool[Tensor, " B"]:
    """Which Gram matrices have a least eigenvalue clearly below ``rtol^2`` times the largest.

    "Clearly" means by the factor ``MARGIN``, and by more than rounding errors. The largest
    eigenvalue is at least the Rayleigh quotient of any vector, here of one after two power
    iterations.

    Args:
        gram: A batch of Gram matrices of ``m`` vectors.
        d: Number of entries of each vector.
        rtol: Relative tolerance of the vectors' singular values.
        ceiling: A number that no least eigenvalue exceeds, such as that of all vectors together.

    Returns:
        True for each such matrix.
    """
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
    """A bound of the errors in the eigenvalues of Gram matrices of vectors in ``d`` dimensions.

    The entries are products of length ``d``, which may underflow. They are then decomposed by a
    backward stable method. No norm exceeds the trace.
    """
    kind = torch.finfo(gram.dtype)
    trace = gram.diagonal(dim1=1, dim2=2).sum(dim=1)
    return 4 * (gram.shape[-1] + d) * kind.eps * trace + kind.tiny
