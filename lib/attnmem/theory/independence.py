"""The numerical rank: singular values above a tolerance. Of one matrix, and of random subsets."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ..checks import FLOATS, Range, Seed, check_finite, checked, refuse
from ..core.bounds import sign_vectors
from ..examples import unit
from .balls import Ball, BallMatrix, Enclosure, MostBits, flint, precision, precisions

_COARSE = (torch.float16, torch.bfloat16, torch.bool)  # types in which no rank is computed
_MARGIN = 2.0  # a bound shows full rank if it exceeds the tolerance's square by this factor
_LARGE = 2**13  # vectors beyond which small subsets are drawn without a key for each vector
_GATHERED = 2**23  # numbers that are gathered at once, 64 MB of them
_BLOCK = 8192  # subsets whose ranks are computed at once
_PRIME_BITS = 62  # of a random prime, so that a word holds a residue
_MANTISSA_BITS = 53  # of a float64
_MOST_REGIONS = 2**25  # times rows, in a minute
_MIX = 2**20  # largest coefficient of the combinations, small beside the balls' first bits
_CONFIDENCE = 0.95  # of the bounds by samples

_Dtype = torch.dtype | None
_Tolerance = Annotated[int | float | None, Range(0.0, 1.0)]


def _are_numbers(**arguments) -> None:
    """Accept finite reals of single or double precision, or integers, and such an arithmetic."""
    for name, matrix in arguments.items():
        if isinstance(matrix, Tensor):
            if matrix.dtype.is_complex or matrix.dtype in _COARSE:
                refuse(name, f"dtype {matrix.dtype}", "float32, float64 or integers")
            check_finite(name, matrix)
    dtype = arguments.get("dtype")
    if dtype is not None and dtype not in FLOATS:
        refuse("dtype", str(dtype), "torch.float32 or torch.float64")
    size = arguments.get("size")
    if size is not None and size > len(arguments["vectors"]):
        refuse("size", size, f"at most the number of vectors, {len(arguments['vectors'])}")


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
    matrices, (m, n) = _in_units(matrix, dtype), matrix.shape[-2:]
    if m == 0 or n == 0:
        rank = torch.zeros(matrix.shape[:-2], dtype=torch.int64, device=matrix.device)
    else:
        rank = _ranks(matrices.reshape(-1, m, n), rtol).view(matrix.shape[:-2])
    return int(rank) if matrix.ndim == 2 else rank


def _in_units(matrix: Tensor, dtype: _Dtype) -> Tensor:
    """The matrix in its arithmetic and unit, so that no sum overflows."""
    if dtype is None:
        dtype = matrix.dtype if matrix.dtype in FLOATS else torch.float64
    matrix = matrix.to(dtype)
    return matrix / unit(matrix, (-2, -1)) if matrix.numel() else matrix


def _ranks(matrices: Float[Tensor, "B m n"], rtol: float | None) -> Int[Tensor, " B"]:
    """The ranks, from the singular values where a Cholesky decomposition shows no full rank."""
    m, n = matrices.shape[1:]
    if rtol is None:
        rtol = max(m, n) * torch.finfo(matrices.dtype).eps
    wide = matrices if m <= n else matrices.mT
    unsettled = ~_clearly_full(wide.double(), rtol)
    rank = torch.full(unsettled.shape, min(m, n), device=matrices.device)
    values = torch.linalg.svdvals(matrices[unsettled])
    rank[unsettled] = (values > rtol * values[:, :1]).sum(dim=1)
    return rank


def _clearly_full(wide: Float[Tensor, "B m n"], rtol: float) -> Bool[Tensor, " B"]:
    """Which have a least singular value clearly above ``rtol`` times the largest, and rounding."""
    # Their squares are eigenvalues of the Gram matrix. They all exceed a bound if what remains
    # after its subtraction is positive definite, and none exceeds the trace. The entries are
    # products of length n, which may underflow; the decomposition is backward stable.
    gram, info = wide @ wide.mT, torch.finfo(wide.dtype)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    relative = _MARGIN * rtol**2 + 4 * sum(wide.shape[1:]) * info.eps
    diagonal -= relative * diagonal.sum(dim=1, keepdim=True) + info.tiny
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
    gathered = 1 + _GATHERED // (size * max(size, vectors.shape[1]))  # subsets at once
    for subsets in _subsets(len(vectors), size, samples, generator):
        for block in subsets.to(vectors.device).split(gathered):
            dependent += int((_ranks(vectors[block], rtol) < size).sum())
    test = scipy.stats.binomtest(dependent, samples, alternative="less")
    at_most = float(test.proportion_ci(_CONFIDENCE, method="exact").high)
    return SampledIndependence(size, samples, dependent, _CONFIDENCE, at_most)


def _subsets(T, size, samples, generator) -> Iterator[Int[Tensor, "block size"]]:
    """Uniformly random subsets, a block at a time."""
    while samples:
        if T > _LARGE and size**2 <= T:
            # Drawn with repetition, and kept without: at least half of so small ones are.
            drawn = torch.randint(T, (samples, size), generator=generator, device="cpu")
            ordered = drawn.sort(dim=1).values
            subsets = drawn[(ordered[:, 1:] != ordered[:, :-1]).all(dim=1)]
        else:
            # Each vector gets a random key, and a subset are those with the largest.
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
        n_subsets = math.comb(len(rows), size)
        if n_subsets > max_subsets:
            got = f"{len(rows)} rows, whose Kruskal rank lies between {size - 1} and {bound}"
            limit = f"at most max_subsets = {max_subsets} subsets of a size"
            refuse(
                "vectors",
                got,
                f"{limit}, not {n_subsets} of size {size} (see sampled_independence)",
            )
        subsets = itertools.combinations(range(len(rows)), size)
        while block := [*itertools.islice(subsets, _BLOCK)]:
            gathered = rows[torch.tensor(block, device=rows.device)]
            if (_ranks(gathered, rtol) < size).any():
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
            enclosed = matrix(bits)
            shape = (enclosed.nrows(), enclosed.ncols())
            size = _aim(enclosed) if target is None else target
            if size > min(shape):
                refuse("target", size, f"at most {min(shape)}, the smaller side")
            if size == 0:
                return CertifiedRank(0, shape, "not certified: a zero or infinite matrix")
            determinant = _compressed(enclosed, size, seed).det()
            if determinant.is_finite() and determinant != 0:  # no number in the ball is zero
                return CertifiedRank(size, shape, f"determinant of size {size}, {bits} bits")
    return CertifiedRank(0, shape, f"not certified with up to {bits} bits")


def _rank_modulo_prime(factors: list[Tensor], seed: int) -> CertifiedRank:
    """Of a product, modulo a random prime."""
    p, shape = _prime(seed), (len(factors[0]), factors[-1].shape[1])
    if any(factor.numel() == 0 for factor in factors):
        rank = 0
    else:
        residues = [flint().nmod_mat(*f.shape, _residues(f, p), p) for f in factors]
        rank = math.prod(residues[1:], start=residues[0]).rank()
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
    # Rows up to a factor, as those have one hyperplane: the first entry that is not zero, at the
    # pivot, becomes one.
    pivots = {}
    for row in rows:
        if not any(row):
            return 0  # the output is zero, whatever the read-out: neither sign
        pivot = next(i for i, x in enumerate(row) if x)
        inverse = pow(row[pivot], -1, p)
        pivots[tuple(x * inverse % p for x in row)] = pivot
    if len(pivots) < 3:
        return 2 ** len(pivots)
    n_regions, before = 1, []
    for row, pivot in pivots.items():
        n_regions += _regions([_within(row, pivot, other, p) for other in before], p)
        before.append(row)
    return n_regions


def _within(row: tuple[int, ...], pivot: int, other: tuple[int, ...], p: int) -> list[int]:
    """Another row within the hyperplane of a row, where its coordinate ``pivot`` follows."""
    return [(x - other[pivot] * y) % p for x, y in zip(other, row, strict=True)]


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
    fractions, exponents = np.frexp(matrix.detach().cpu().double().flatten().numpy())
    mantissas = np.ldexp(fractions, _MANTISSA_BITS).astype(np.int64).tolist()
    powers = {int(e): pow(2, int(e) - _MANTISSA_BITS, p) for e in np.unique(exponents)}
    return [k * powers[e] % p for k, e in zip(mantissas, exponents.tolist(), strict=True)]


def _aim(enclosed: BallMatrix) -> int:
    """The numerical rank of the midpoints, rows and columns scaled to a largest entry of one."""
    rows = enclosed.mid().tolist()
    for _ in range(2):  # the rows, then the columns: scaling changes no rank
        rows = [*zip(*map(_scaled, rows), strict=True)]
    midpoints = torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)
    if midpoints.numel() == 0 or not midpoints.isfinite().all():
        return 0
    return numerical_rank(midpoints)


def _scaled(row: Sequence[Ball]) -> list[Ball]:
    """The entries divided by the largest of them, unless all are zero."""
    largest = max(map(abs, row), default=0)
    return [x / largest for x in row] if largest > 0 else [*row]


def _compressed(enclosed: BallMatrix, size: int, seed: int) -> BallMatrix:
    """A square matrix of at most the same rank: random integer combinations of rows and columns."""
    draw = random.Random(seed)
    for _ in range(2):  # the columns, then the rows
        n_columns = enclosed.ncols()
        if n_columns > size:
            mix = [draw.randint(-_MIX, _MIX) for _ in range(n_columns * size)]
            enclosed = enclosed * flint().arb_mat(n_columns, size, mix)
        enclosed = enclosed.transpose()
    return enclosed
