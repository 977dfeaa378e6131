"""The numerical rank: singular values above a tolerance."""

from __future__ import annotations

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from ..checks import FLOATS, check_finite, check_number, check_tensor, checked_by, refuse


def _check_rank(matrix, rtol, dtype) -> None:
    check_tensor("matrix", matrix, "(*batch, m, n)", range(2, 99))
    check_entries("matrix", matrix, rtol, dtype)


def check_entries(name, value, rtol, dtype=None) -> None:
    """Accept finite reals of single or double precision, or integers; and the options with them."""
    if value.dtype.is_complex or value.dtype in (torch.float16, torch.bfloat16, torch.bool):
        refuse(name, f"dtype {value.dtype}", "float32, float64 or integers")
    check_finite(name, value)
    if rtol is not None:
        check_number("rtol", rtol, least=0.0, most=1.0)
    if dtype is not None and dtype not in FLOATS:
        refuse("dtype", str(dtype), "torch.float32 or torch.float64")


def arithmetic(matrix: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The arithmetic to compute in, by default the matrix's own (float64 for integers)."""
    return dtype or (matrix.dtype if matrix.dtype in FLOATS else torch.float64)


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
    dtype = arithmetic(matrix, dtype)
    if rtol is None:
        rtol = max(matrix.shape[-2:]) * torch.finfo(dtype).eps
    if 0 in matrix.shape[-2:]:
        rank = torch.zeros(matrix.shape[:-2], dtype=torch.int64)
    else:
        values = torch.linalg.svdvals(matrix.to(dtype))
        rank = (values > rtol * values[..., :1]).sum(dim=-1)
    return int(rank) if matrix.ndim == 2 else rank
