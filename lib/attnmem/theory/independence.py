"""The numerical rank: singular values above a tolerance. Of one matrix, and of random subsets."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ..checks import FLOATS, Range, Seed, check_finite, checked, refuse
from ..core.bounds import sign_vectors
from ..examples import unit
from .balls import BallMatrix, Enclosure, MostBits, flint, precision, precisions

_MARGIN = 2.0  # a bound shows full rank if it exceeds the tolerance by this factor
_LARGE = 2**13  # vectors beyond which small subsets are drawn without a key for each vector
_GATHERED = 2**23  # numbers that are gathered at once, 64 MB of them
_BLOCK = 8192  # subsets whose ranks are computed at once
_PRIME_BITS, _MANTISSA_BITS = 62, 53  # of a random prime, and of a float64
_MOST_REGIONS = 2**25  # times rows, in a minute
_MIX = 2**20  # largest coefficient of the combinations
_CONFIDENCE = 0.95  # of the bounds by samples

_Dtype = torch.dtype | None
_Tolerance = Annotated[int | float | None, Range(0.0, 1.0)]


def _are_numbers(**given) -> None:
    """Accept finite reals of single or double precision, or integers, and such an arithmetic."""
    for name, matrix in given.items():
        if isinstance(matrix, Tensor):
            coarse = torch.float16, torch.bfloat16, torch.bool
            if matrix.dtype.is_complex or matrix.dtype in coarse:
                refuse(name, f"dtype {matrix.dtype}", "float32, float64 or integers")
            check_finite(name, matrix)
    if given.get("dtype") not in (None, *FLOATS):
        refuse("dtype", str(given["dtype"]), "torch.float32 or torch.float64")
    if (size := given.get("size", 0)) > (most := len(given.get("vectors", ()))):
        refuse("size", size, f"at most the number of vectors, {most}")


@checked(also=_are_numbers)
def numerical_rank(
    matrix: Shaped[Tensor, "*batch m n"], *, rtol: _Tolerance = None, dtype: _Dtype = None
) -> int | Int[Tensor, "*batch"]:
    """Number of singular values above ``rtol`` times the largest one, of each matrix of a batch.

    Full rank is certain up to rounding. A lower rank only says that the matrix is close to one of
    that rank; :func:`certified_rank` proves a rank without a tolerance. By default ``rtol`` is
    ``max(m, n)`` times the rounding unit of ``dtype``, as in numpy and torch, and ``dtype`` that of
    the matrix (float64 for integers).
    """
    values, (m, n) = _in_units(matrix, dtype), matrix.shape[-2:]
    if m * n == 0:
        rank = torch.zeros(matrix.shape[:-2], dtype=torch.int64, device=matrix.device)
    else:
        rank = _ranks(values.reshape(-1, m, n), rtol).view(matrix.shape[:-2])
    return int(rank) if matrix.ndim == 2 else rank


def _in_units(matrix: Tensor, dtype: _Dtype) -> Tensor:
    """The matrix in its arithmetic and unit, so that no sum overflows."""
    matrix = matrix.to(dtype or (matrix.dtype if matrix.dtype in FLOATS else torch.float64))
    return matrix / unit(matrix, (-2, -1)) if matrix.numel() else matrix


def _ranks(matrices: Float[Tensor, "B m n"], rtol: float | None) -> Int[Tensor, " B"]:
    """The ranks, from the singular values where a Cholesky decomposition shows no full rank."""
    m, n = matrices.shape[1:]
    rtol = max(m, n) * torch.finfo(matrices.dtype).eps if rtol is None else rtol
    unsettled = ~_clearly_full((matrices if m <= n else matrices.mT).double(), rtol)
    rank = torch.full(unsettled.shape, min(m, n), device=matrices.device)
    values = torch.linalg.svdvals(matrices[unsettled])
    rank[unsettled] = (values > rtol * values[:, :1]).sum(dim=1)
    return rank


def _clearly_full(wide: Float[Tensor, "B m n"], rtol: float) -> Bool[Tensor, " B"]:
    """Which have a least singular value clearly above ``rtol`` times the largest, and rounding."""
    # Their squares are eigenvalues of the Gram matrix. They all exceed a bound if what remains
    # after its subtraction is positive definite, and none exceeds the trace. The entries are
    # products of length n, which may underflow; the decomposition is backward stable.
    gram, kind = wide @ wide.mT, torch.finfo(wide.dtype)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    relative = _MARGIN * rtol**2 + 4 * sum(wide.shape[1:]) * kind.eps
    diagonal -= relative * diagonal.sum(dim=1, keepdim=True) + kind.tiny
    return torch.linalg.cholesky_ex(gram).info == 0


# --- random subsets: what they show and what they cannot show -------------------------------------


class SampledIndependence(NamedTuple):
    """What random subsets of ``size`` vectors showed, which proves no Kruskal rank."""

    size: int
    samples: int
    dependent: int
    confidence: float
    dependent_at_most: float  # of all subsets, a fraction, with this confidence (Clopper, Pearson)


@checked(also=_are_numbers)
def sampled_independence(
    vectors: Shaped[Tensor, "T d"],
    size: int,
    *,
    samples: int = 5000,
    seed: Seed,
    rtol: _Tolerance = None,
    dtype: _Dtype = None,
) -> SampledIndependence:
    """Test uniformly random subsets of ``size`` rows for independence: :func:`numerical_rank`.

    Source: Mahdavi et al. 2024, Table 1 (their test of Assumption 1: 5000 samples, float32).
    """
    return sample_subsets(_in_units(vectors, dtype), size, samples, seed, rtol)


def sample_subsets(
    vectors: Tensor, size: int, samples: int, seed: int, rtol: float | None = None
) -> SampledIndependence:
    """:func:`sampled_independence` of vectors in their units, without checks."""
    generator, dependent = torch.Generator().manual_seed(seed), 0
    for subsets in _subsets(len(vectors), size, samples, generator):
        blocks = subsets.to(vectors.device)
        for block in blocks.split(1 + _GATHERED // (size * max(size, vectors.shape[1]))):
            dependent += int((_ranks(vectors[block], rtol) < size).sum())
    test = scipy.stats.binomtest(dependent, samples, alternative="less")
    at_most = float(test.proportion_ci(_CONFIDENCE, method="exact").high)
    return SampledIndependence(size, samples, dependent, _CONFIDENCE, at_most)


def _subsets(T, size, samples, generator) -> Iterator[Int[Tensor, "block size"]]:
    """Uniformly random subsets, some at a time."""
    few = T > _LARGE and size**2 <= T  # a draw of so few repeats nothing at least half of the time
    while samples:
        if few:
            subsets = torch.randint(T, (samples, size), generator=generator, device="cpu")
            in_order = subsets.sort(dim=1).values
            subsets = subsets[(in_order[:, 1:] != in_order[:, :-1]).all(dim=1)]
        else:
            block = min(1 + _GATHERED // T, samples)
            keys = torch.rand(block, T, generator=generator, device="cpu")
            subsets = keys.topk(size, dim=1).indices
        samples -= len(subsets)
        yield subsets


@checked(also=_are_numbers)
def kruskal_rank(
    vectors: Shaped[Tensor, "T d"], *, rtol: _Tolerance = None, max_subsets: int = 100_000_000
) -> int:
    """The largest ``k`` such that any ``k`` of the rows are linearly independent.

    Independent means of full numerical rank in float64, the rows scaled to length one. All subsets
    of a size are looked at, 10^5 to 10^6 a second, sizes upwards until a dependent one appears.
    ``ValueError`` says what is known if there are more than ``max_subsets`` of a size.

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
    for size in range(2, bound + 1):
        subsets = math.comb(len(rows), size)
        if subsets > max_subsets:
            got = f"{len(rows)} rows, whose Kruskal rank lies between {size - 1} and {bound}"
            most = f"at most max_subsets = {max_subsets} subsets of a size, not {subsets} of size"
            refuse("vectors", got, f"{most} {size} (see sampled_independence)")
        every = itertools.combinations(range(len(rows)), size)
        while block := [*itertools.islice(every, _BLOCK)]:
            subsets = torch.tensor(block, device=rows.device)
            if (_ranks(rows[subsets], rtol) < size).any():
                return size - 1
    return bound


# --- certified ranks ------------------------------------------------------------------------------


class CertifiedRank(NamedTuple):
    """A proven lower bound of a matrix's rank; 0 if the largest precision did not suffice."""

    rank: int
    shape: tuple[int, int]
    proof: str  # the prime, or the precision of the determinant; or "not certified ..."

    @property
    def full(self) -> bool:
        """Whether full rank is proven: no matrix of this shape has more."""
        return self.rank == min(self.shape)


@checked(also=_are_numbers)
def certified_rank(
    matrix: Shaped[Tensor, "m n"] | Enclosure,
    *,
    times: Shaped[Tensor, "n k"] | None = None,
    target: int | None = None,
    seed: Seed = 0,
    most_bits: MostBits = 1024,
) -> CertifiedRank:
    """Prove a lower bound of the rank by exact arithmetic or by ball arithmetic.

    **A tensor** stands for exactly the numbers that it holds, or for their product with ``times``.
    Their rank modulo a prime never exceeds the rank. It falls short of it only if that prime, drawn
    from all 62-bit ones, divides every largest minor.

    **A function** from bits to an ``arb_mat`` encloses one real matrix, such as
    :func:`attnmem.theory.certificates.enclosed_features`. Random integer combinations of its rows
    and columns form a square matrix of size ``target`` (by default the numerical rank of the
    midpoints), whose rank is no higher. Its determinant is not zero if the ball excludes that.
    Otherwise the precision doubles, up to ``most_bits``.

    Example:
        >>> certified_rank(torch.tensor([[1, 2], [2, 4]])).rank
        1
        >>> close = torch.tensor([[1.0, 2.0], [2.0, 4.0 + 1e-15]], dtype=torch.float64)
        >>> int(torch.linalg.matrix_rank(close)), certified_rank(close).rank
        (1, 2)
    """
    if not callable(matrix):
        if target is not None:
            refuse("target", target, "None for a tensor: its rank is computed, not aimed at")
        return _rank_modulo_prime([matrix] if times is None else [matrix, times], seed)
    if times is not None:
        refuse("times", "a tensor", "None for a function, which encloses the whole product")
    for bits in precisions(most_bits):
        with precision(bits):
            balls = matrix(bits)
            shape = (balls.nrows(), balls.ncols())
            size = _aim(balls) if target is None else target
            if size > min(shape):
                refuse("target", size, f"at most {min(shape)}, the smaller side")
            if size == 0:
                return CertifiedRank(0, shape, "not certified: a zero or infinite matrix")
            determinant = _compressed(balls, size, seed).det()
            if determinant.is_finite() and determinant != 0:  # no number in the ball is zero
                return CertifiedRank(size, shape, f"determinant of size {size}, {bits} bits")
    return CertifiedRank(0, shape, f"not certified with up to {bits} bits")


def _rank_modulo_prime(factors: list[Tensor], seed: int) -> CertifiedRank:
    """Of a product, modulo a random prime."""
    p, shape, rank = _prime(seed), (len(factors[0]), factors[-1].shape[1]), 0
    if all(0 not in factor.shape for factor in factors):
        first, *others = (flint().nmod_mat(*f.shape, _residues(f, p), p) for f in factors)
        rank = math.prod(others, start=first).rank()
    return CertifiedRank(rank, shape, f"rank modulo the prime {p}")


def _are_few(rows: Tensor) -> None:
    _are_numbers(rows=rows)
    if 0 not in rows.shape and len(rows) * sign_vectors(*rows.shape) > _MOST_REGIONS:
        refuse("rows", f"shape {(*rows.shape,)}", f"rows times regions of at most {_MOST_REGIONS}")


@checked(also=_are_few)
def regions(rows: Shaped[Tensor, "T m"], *, seed: Seed = 0) -> int:
    r"""Sign vectors of ``T`` examples that a read-out meets, for any features.

    They are regions between hyperplanes: :math:`\sum_S (-1)^{|S| + \operatorname{rank} Z_S}` over
    all sets of rows, with ranks modulo a random prime, as those of :func:`certified_rank`. Rounded
    features have lost their relations: give integers in proportion.

    Example:
        >>> regions(torch.tensor([[1, 0], [0, 1], [1, 1], [2, 2]]))
        6

    Source: Zaslavsky 1975.
    """
    p, (T, m) = _prime(seed), rows.shape
    residues = _residues(rows, p)
    return _regions([residues[t * m : (t + 1) * m] for t in range(T)], p)


def _regions(rows: list[list[int]], p: int) -> int:
    """Rows are added one by one: each cuts as many regions as there are within its hyperplane."""
    different = {}  # up to a factor, with the place of the first entry, which is one
    for row in rows:
        if not any(row):
            return 0
        at = next(i for i, x in enumerate(row) if x)
        inverse = pow(row[at], -1, p)
        different[tuple(x * inverse % p for x in row)] = at
    if len(different) < 3:
        return 2 ** len(different)
    count, before = 1, []
    for row, at in different.items():
        within = [[(x - r[at] * y) % p for x, y in zip(r, row, strict=True)] for r in before]
        count += _regions(within, p)
        before.append(row)
    return count


def _prime(seed: int) -> int:
    draw = random.Random(seed)
    while True:
        candidate = draw.getrandbits(_PRIME_BITS - 1) | 1 << _PRIME_BITS - 1 | 1
        if flint().fmpz(candidate).is_prime():
            return candidate


def _residues(matrix: Shaped[Tensor, "m n"], p: int) -> list[int]:
    """All entries modulo ``p``, row by row: ``k 2^e`` with integers ``k, e``, for every float."""
    if not matrix.is_floating_point():
        return [k % p for k in matrix.flatten().tolist()]
    fraction, exponent = np.frexp(matrix.detach().cpu().double().flatten().numpy())
    whole = np.ldexp(fraction, _MANTISSA_BITS).astype(np.int64).tolist()
    powers = {int(e): pow(2, int(e) - _MANTISSA_BITS, p) for e in np.unique(exponent)}
    return [k * powers[e] % p for k, e in zip(whole, exponent.tolist(), strict=True)]


def _aim(balls: BallMatrix) -> int:
    """The numerical rank of the midpoints, rows and columns scaled to a largest entry of one."""
    rows = balls.mid().tolist()
    for _ in range(2):  # the rows, then the columns: scaling changes no rank
        pairs = [(row, max(map(abs, row), default=0)) for row in rows]
        scaled = [[x / top if top > 0 else x for x in row] for row, top in pairs]
        rows = [*zip(*scaled, strict=True)]
    midpoints = torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)
    return numerical_rank(midpoints) if midpoints.numel() and midpoints.isfinite().all() else 0


def _compressed(balls: BallMatrix, size: int, seed: int) -> BallMatrix:
    """A square matrix of at most the same rank: random integer combinations of rows and columns."""
    draw = random.Random(seed)
    for _ in range(2):  # the columns, then the rows
        if balls.ncols() > size:
            mix = [draw.randint(-_MIX, _MIX) for _ in range(balls.ncols() * size)]
            balls = balls * flint().arb_mat(balls.ncols(), size, mix)
        balls = balls.transpose()
    return balls
