"""The exact Kruskal rank: by looking at every subset, or by an integer program."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ..checks import Range, checked, refuse
from .numerical import Tolerance, check_entries, numerical_rank

SUSPECT = 1e-6  # volume of unit vectors below which a subset's singular values are computed
ENTRIES = 2**19  # numbers that a block of residuals holds, about a core's cache
PAIRS = 2**24  # pairs of residuals that are compared at once, 128 MB of them
BLOCK = 8192  # subsets whose singular values are computed at once


@checked(also=lambda vectors: check_entries(vectors=vectors))
def kruskal_rank(
    vectors: Shaped[Tensor, "T d"],
    *,
    rtol: Tolerance = None,
    method: Literal["exhaustive", "milp"] = "exhaustive",
    max_subsets: int = 100_000_000,
    max_seconds: Annotated[int | float, Range(0)] = 600,
) -> int:
    """The largest ``k`` such that any ``k`` of the rows are linearly independent.

    Independent means of full numerical rank in float64. The rows are scaled to length one first,
    which changes no dependency. A zero row, or rows without entries, make it 0.

    ``"exhaustive"`` tries sizes upwards until a dependent subset appears. It looks at 10^6 to 10^7
    subsets a second, and refuses sizes of more than ``max_subsets``.

    ``"milp"`` finds the smallest dependent set by an integer program, to the tolerances of its
    solver (HiGHS, about 1e-6), within ``max_seconds``. Singular values confirm its dependency. This
    pays where there are few more vectors than dimensions: among 40 vectors of dimension 36, not
    among 30 of dimension 10.

    Raises:
        ValueError: If the work allowed does not suffice (the error says what is known by then), or
            the solver's smallest set is dependent only to its own tolerance.

    Example:
        >>> kruskal_rank(torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]]))
        2

    Source: Mahdavi et al. 2024, Definition 1.
    """
    rows = vectors.detach().to(torch.float64)
    if 0 in rows.shape or not rows.any(dim=1).all():
        return 0
    rows = rows / rows.abs().amax(dim=1, keepdim=True)
    rows = rows / rows.norm(dim=1, keepdim=True)
    bound = numerical_rank(rows, rtol=rtol)
    if bound == len(rows):
        return bound
    if method == "milp":
        return _smallest_circuit(rows, bound, rtol, max_seconds) - 1
    for size in range(2, bound + 1):
        subsets = math.comb(len(rows), size)
        if subsets > max_subsets:
            refuse(
                "vectors",
                f"{len(rows)} rows, whose Kruskal rank lies between {size - 1} and {bound}",
                f"at most max_subsets = {max_subsets} subsets of a size, not {subsets} of size "
                f"{size} (see method='milp' and sampled_kruskal_rank)",
            )
        for suspects in _suspects(rows, size, rtol):
            if (numerical_rank(rows[suspects], rtol=rtol) < size).any():
                return size - 1
    return bound


# --- every subset, one elimination for all that begin alike ---------------------------------------


def _suspects(rows, size, rtol) -> Iterator[Int[Tensor, "block size"]]:
    """All subsets of ``size`` unit vectors that could be dependent, and some others."""
    # All subsets with a common beginning are checked in one product.
    # If extreme singular values have a ratio of at most rtol, k unit vectors span a volume of at
    # most sqrt(e k) rtol. Squares of volumes have errors of about 1e-16, far below threshold^2.
    threshold = SUSPECT + 2 * math.sqrt(size) * (rtol or 0.0)
    none = torch.empty(1, 0, dtype=torch.int64, device=rows.device)
    prefixes = _prefixes(none, rows[None], rows.new_ones(1), size - 2, len(rows))
    for prefix, residual, square in prefixes:
        squares = residual.square().sum(dim=-1)
        tiny = (threshold**2 / square.clamp(min=1e-300))[:, None, None]
        later = _later(prefix, residual, len(rows))[:, :, None]
        length = 1 + PAIRS // squares.numel()
        for start in range(0, residual.shape[1], length):  # not all pairs of many rows at once
            part = slice(start, start + length)
            areas = squares[:, part, None] * squares[:, None, :]
            areas -= (residual[:, part] @ residual.mT).square_()  # |a|^2 |b|^2 - (a . b)^2
            small = (areas < tiny).logical_and_(later[:, part])
            block, first, second = small.triu_(diagonal=start + 1).nonzero(as_tuple=True)
            pairs = torch.stack([start + first, second], dim=1) + len(rows) - residual.shape[1]
            for b, pair in zip(block.split(BLOCK), pairs.split(BLOCK), strict=True):
                yield torch.cat([prefix[b], pair], dim=1)


def _prefixes(
    prefix: Int[Tensor, "block k"],
    residual: Float[Tensor, "block R d"],
    square: Float[Tensor, " block"],
    missing: int,
    count: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each prefix with ``missing`` more vectors, its squared volume, and the residual rows."""
    # residual: the last R of the rows, less their part in the span of the prefix. A block of
    # prefixes has one last index, so that all of them need equally many of these rows.
    if missing == 0:
        yield prefix, residual, square
        return
    start = count - residual.shape[1]
    room = residual.shape[1] - missing - 1  # for those that follow
    new, block = _later(prefix, residual, count)[:, :room].T.nonzero(as_tuple=True)
    length = 1 + ENTRIES // residual[0].numel()
    for i, b in zip(new.split(length), block.split(length), strict=True):
        added, rest = residual[b, i], residual[b, int(i[0]) + 1 :]
        norm = added.square().sum(dim=1)
        # Gram and Schmidt: what is left of the later rows, orthogonal to the added one.
        along = (rest @ added[:, :, None]) / norm.clamp(min=1e-300)[:, None, None]
        rest = rest.addcmul_(along, added[:, None, :], value=-1)
        longer = torch.cat([prefix[b], i[:, None] + start], dim=1)
        yield from _prefixes(longer, rest, square[b] * norm, missing - 1, count)


def _later(prefix: Tensor, residual: Tensor, count: int) -> Bool[Tensor, "block R"]:
    """Which of the remaining rows come after the last one of each prefix."""
    start = count - residual.shape[1]
    last = prefix[:, -1:] if prefix.shape[1] else prefix.new_full((1, 1), -1)
    return torch.arange(start, count, device=prefix.device) > last


# --- the smallest circuit by integer programming --------------------------------------------------


def _smallest_circuit(rows, rank, rtol, max_seconds) -> int:
    """The size of the smallest dependent subset (the spark), for dependent non-zero unit rows."""
    # Minimize sum z over z, p in {0, 1}^T: a dependency has its coefficients x where z is one, and
    # its largest one, where p is one, is scaled to one.
    count = len(rows)
    V = (rows @ torch.linalg.svd(rows, full_matrices=False).Vh[:rank].mT).cpu().numpy()
    one, none = scipy.sparse.eye(count), scipy.sparse.csr_array((count, count))
    flat, row = scipy.sparse.csr_array((rank, count)), scipy.sparse.csr_array(np.ones((1, count)))
    bounded = (
        ([scipy.sparse.csr_array(V.T), flat, flat], 0, 0),  # sum_i x_i v_i = 0; columns x, z, p
        ([one, -one, none], -np.inf, 0),  # x <= z
        ([one, one, none], 0, np.inf),  # -z <= x
        ([one, none, -2 * one], -1, np.inf),  # x >= 2 p - 1
        ([0 * row, 0 * row, row], 1, 1),  # sum p = 1
        ([0 * row, row, 0 * row], 2, rank + 1),  # sizes of a circuit
    )
    constraints = [
        scipy.optimize.LinearConstraint(scipy.sparse.hstack(parts), low, high)
        for parts, low, high in bounded
    ]
    result = scipy.optimize.milp(
        np.concatenate([np.zeros(count), np.ones(count), np.zeros(count)]),
        constraints=constraints,
        integrality=np.repeat([0, 1, 1], count),
        bounds=scipy.optimize.Bounds(np.repeat([-1, 0, 0], count), np.ones(3 * count)),
        options={"time_limit": float(max_seconds), "mip_rel_gap": 0.0},
    )
    if result.status != 0:
        known = max(math.ceil((result.mip_dual_bound or 2) - 1e-6), 2)
        refuse(
            "vectors",
            f"{count} rows, whose Kruskal rank lies between {known - 1} and {rank}",
            f"an integer program solved within max_seconds = {max_seconds} ({result.message})",
        )
    circuit = torch.from_numpy(result.x[count : 2 * count] > 0.5)
    size = int(circuit.sum())
    if numerical_rank(rows[circuit.to(rows.device)], rtol=rtol) == size:
        refuse(
            "vectors",
            f"{size} rows that are dependent to the solver's tolerance, not to rtol",
            "no such near-dependent sets with method='milp'",
        )
    return size
