"""The numerical rank: singular values above a tolerance. Of one matrix, and of random subsets."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ..checks import FLOATS, Range, Seed, check_finite, checked, refuse
from ..core.bounds import sign_vectors
from ..examples import unit
from .balls import BallMatrix, Enclosure, MostBits, flint, precision, precisions

_MARGIN = 2.0  # a bound settles the rank if it differs from the tolerance by this factor
_LARGE = 2**13  # vectors beyond which nothing is formed for all pairs, 512 MB
_GATHERED = 2**23  # numbers that are gathered at once, 64 MB of them
_SUSPECT = 1e-6  # volume of unit vectors below which a subset's singular values are computed
_ENTRIES = 2**19  # numbers that a block of residuals holds, about a core's cache
_PAIRS = 2**24  # pairs of residuals that are compared at once, 128 MB of them
_BLOCK = 8192  # subsets whose singular values are computed at once
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
    values = _in_units(matrix, dtype)
    (m, n), batch = matrix.shape[-2:], matrix.shape[:-2]
    if m * n == 0:
        rank = torch.zeros(batch, dtype=torch.int64, device=matrix.device)
    else:
        # A Cholesky or a QR decomposition settles most matrices of full rank.
        matrices, rtol = values.reshape(-1, m, n), _tolerance(rtol, m, n, values.dtype)
        wide = (matrices if m <= n else matrices.mT).double()
        unsettled = ~_clearly_full(wide @ wide.mT, wide.shape[2], rtol)
        rank = torch.full(unsettled.shape, min(m, n), device=matrix.device)
        rank[unsettled] = _ranks_by_values(matrices[unsettled], rtol)
        rank = rank.view(batch)
    return int(rank) if matrix.ndim == 2 else rank


def _in_units(matrix: Tensor, dtype: _Dtype) -> Tensor:
    """The matrix in its arithmetic and unit, so that no sum overflows."""
    matrix = matrix.to(dtype or (matrix.dtype if matrix.dtype in FLOATS else torch.float64))
    return matrix / unit(matrix, (-2, -1)) if matrix.numel() else matrix


def _tolerance(rtol: float | None, m: int, n: int, dtype: torch.dtype) -> float:
    return max(m, n) * torch.finfo(dtype).eps if rtol is None else rtol


def _ranks_by_values(matrices: Float[Tensor, "B m n"], rtol: float) -> Int[Tensor, " B"]:
    """The ranks, from the singular values where a QR decomposition shows no full rank."""
    m, n = matrices.shape[1:]
    unsettled = torch.ones(len(matrices), dtype=torch.bool, device=matrices.device)
    if matrices.dtype == torch.float64:  # for float32 the Gram matrices have shown as much already
        # R has the matrix's singular values, the least of them at least 1 over the Frobenius norm
        # of its inverse. Unlike a Gram matrix, it loses no digits by squaring.
        R = torch.linalg.qr(matrices if m >= n else matrices.mT, mode="r").R
        eye = torch.eye(R.shape[1], dtype=R.dtype, device=R.device)
        inverse = torch.linalg.solve_triangular(R, eye, upper=True)
        condition = torch.linalg.matrix_norm(R) * torch.linalg.matrix_norm(inverse)
        unsettled = ~(condition < 1 / (_MARGIN * max(rtol, _tolerance(None, m, n, R.dtype))))
    rank = torch.full(unsettled.shape, min(m, n), device=matrices.device)
    values = torch.linalg.svdvals(matrices[unsettled])
    rank[unsettled] = (values > rtol * values[:, :1]).sum(dim=1)
    return rank


def _clearly_full(gram: Float[Tensor, "B m m"], d: int, rtol: float) -> Bool[Tensor, " B"]:
    """Which have a least eigenvalue clearly above ``rtol^2`` times the largest, and rounding."""
    largest = torch.linalg.matrix_norm(gram)  # Frobenius: no eigenvalue is larger
    return _exceeds(gram, d, _MARGIN * rtol**2 * largest, errors=1)


def _clearly_short(
    gram: Float[Tensor, "B m m"], d: int, rtol: float, ceiling: float
) -> Bool[Tensor, " B"]:
    """Which have a least eigenvalue, at most ``ceiling``, clearly below ``rtol^2`` the largest."""
    # The largest is at least any Rayleigh quotient: here that of x after two power iterations.
    x = gram @ (gram @ gram.sum(dim=2, keepdim=True))
    x = x / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    tolerated = rtol**2 / _MARGIN * (x.mT @ gram @ x)[:, 0, 0]
    return (tolerated > ceiling) | ~_exceeds(gram, d, tolerated, errors=-2)


def _exceeds(
    gram: Float[Tensor, "B m m"], d: int, bound: Float[Tensor, " B"], errors: int
) -> Bool[Tensor, " B"]:
    """Whether all eigenvalues exceed the bound with so many of their errors, if it is positive."""
    # The entries are products of length ``d``, which may underflow. They are then decomposed by a
    # backward stable method. No norm exceeds the trace.
    kind, difference = torch.finfo(gram.dtype), gram.clone()
    diagonal = difference.diagonal(dim1=1, dim2=2)
    trace = diagonal.sum(dim=1)
    bound = bound + errors * (4 * (gram.shape[-1] + d) * kind.eps * trace + kind.tiny)
    diagonal.sub_(bound[:, None])
    return (bound <= 0) | (torch.linalg.cholesky_ex(difference).info == 0)


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
    generator, double = torch.Generator().manual_seed(seed), vectors.double()
    gram = double @ double.mT if len(vectors) <= _LARGE else None

    @functools.cache
    def ceiling() -> float:  # by interlacing, no subset has a larger least squared singular value
        short = size > min(vectors.shape)
        return 0.0 if short else float(torch.linalg.svdvals(vectors)[size - 1]) ** 2

    dependent = 0
    for subsets in _subsets(len(vectors), size, samples, generator):
        blocks = subsets.to(vectors.device)
        for block in blocks.split(1 + _GATHERED // (size * max(size, vectors.shape[1]))):
            dependent += int(_dependent(vectors, gram, block, rtol, ceiling).sum())
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


def _dependent(vectors, gram, subsets, rtol, ceiling) -> Bool[Tensor, " block"]:
    """Which subsets, ``(block, size)``, have a numerical rank below their size."""
    size, d = subsets.shape[1], vectors.shape[1]
    rtol = _tolerance(rtol, size, d, vectors.dtype)
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


@checked(also=_are_numbers)
def kruskal_rank(
    vectors: Shaped[Tensor, "T d"],
    *,
    rtol: _Tolerance = None,
    method: Literal["exhaustive", "milp"] = "exhaustive",
    max_subsets: int = 100_000_000,
    max_seconds: Annotated[int | float, Range(0)] = 600,
) -> int:
    """The largest ``k`` such that any ``k`` of the rows are linearly independent.

    Independent means of full numerical rank in float64, the rows scaled to length one.
    ``"exhaustive"`` tries sizes upwards until a dependent subset appears, 10^6 to 10^7 subsets a
    second. ``"milp"`` finds the smallest dependent set by an integer program, to the tolerances of
    its solver (HiGHS, about 1e-6); singular values confirm it. This pays among 40 vectors of
    dimension 36, not among 30 of dimension 10. ``ValueError`` says what is known if ``max_subsets``
    of a size, or ``max_seconds``, do not suffice, or the solver's set is dependent to it alone.

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
            got = f"{len(rows)} rows, whose Kruskal rank lies between {size - 1} and {bound}"
            most = f"at most max_subsets = {max_subsets} subsets of a size, not {subsets} of size"
            refuse("vectors", got, f"{most} {size} (see method='milp' and sampled_independence)")
        for suspects in _suspects(rows, size, rtol):
            if (numerical_rank(rows[suspects], rtol=rtol) < size).any():
                return size - 1
    return bound


def _suspects(rows, size, rtol) -> Iterator[Int[Tensor, "block size"]]:
    """All subsets of ``size`` unit vectors that could be dependent, and some others."""
    # All subsets with a common beginning are checked in one product.
    # If extreme singular values have a ratio of at most rtol, k unit vectors span a volume of at
    # most sqrt(e k) rtol. Squares of volumes have errors of about 1e-16, far below threshold^2.
    threshold = _SUSPECT + 2 * math.sqrt(size) * (rtol or 0.0)
    none = torch.empty(1, 0, dtype=torch.int64, device=rows.device)
    prefixes = _prefixes(none, rows[None], rows.new_ones(1), size - 2, len(rows))
    for prefix, residual, square in prefixes:
        squares = residual.square().sum(dim=-1)
        tiny = (threshold**2 / square.clamp(min=1e-300))[:, None, None]
        later = _later(prefix, residual, len(rows))[:, :, None]
        length = 1 + _PAIRS // squares.numel()
        for start in range(0, residual.shape[1], length):  # not all pairs of many rows at once
            part = slice(start, start + length)
            areas = squares[:, part, None] * squares[:, None, :]
            areas -= (residual[:, part] @ residual.mT).square_()  # |a|^2 |b|^2 - (a . b)^2
            small = (areas < tiny).logical_and_(later[:, part])
            block, first, second = small.triu_(diagonal=start + 1).nonzero(as_tuple=True)
            pairs = torch.stack([start + first, second], dim=1) + len(rows) - residual.shape[1]
            for b, pair in zip(block.split(_BLOCK), pairs.split(_BLOCK), strict=True):
                yield torch.cat([prefix[b], pair], dim=1)


def _prefixes(
    prefix: Tensor, residual: Tensor, square: Tensor, missing: int, count: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Prefixes ``(block, k)`` with ``missing`` more of the rows, ``residual`` rows, and volumes."""
    # residual: the last R of the rows, less their part in the span of the prefix. A block of
    # prefixes has one last index, so that all of them need equally many of these rows.
    if missing == 0:
        yield prefix, residual, square
        return
    start = count - residual.shape[1]
    room = residual.shape[1] - missing - 1  # for those that follow
    new, block = _later(prefix, residual, count)[:, :room].T.nonzero(as_tuple=True)
    length = 1 + _ENTRIES // residual[0].numel()
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


def _smallest_circuit(rows, rank, rtol, max_seconds) -> int:
    """The size of the smallest dependent subset (the spark), for dependent non-zero unit rows."""
    # Minimize sum z over z, p in {0, 1}^T: a dependency has its coefficients x where z is one, and
    # its largest one, where p is one, is scaled to one.
    count = len(rows)
    V = (rows @ torch.linalg.svd(rows, full_matrices=False).Vh[:rank].mT).cpu().numpy()
    one, row = np.eye(count), np.ones((1, count))
    bounded = (  # columns x, z, p; rows, and their bounds
        ([V.T, 0 * V.T, 0 * V.T], 0, 0),  # sum_i x_i v_i = 0
        ([one, -one, 0 * one], -np.inf, 0),  # x <= z
        ([one, one, 0 * one], 0, np.inf),  # -z <= x
        ([one, 0 * one, -2 * one], -1, np.inf),  # x >= 2 p - 1
        ([0 * row, 0 * row, row], 1, 1),  # sum p = 1
        ([0 * row, row, 0 * row], 2, rank + 1),  # sizes of a circuit
    )
    constrained = scipy.optimize.LinearConstraint
    constraints = [constrained(np.hstack(parts), low, high) for parts, low, high in bounded]
    goal, lowest, whole = (np.repeat(each, count) for each in ([0, 1, 0], [-1, 0, 0], [0, 1, 1]))
    limits = {"bounds": scipy.optimize.Bounds(lowest, np.ones(3 * count)), "integrality": whole}
    options = {"time_limit": float(max_seconds), "mip_rel_gap": 0.0}
    result = scipy.optimize.milp(goal, constraints=constraints, options=options, **limits)
    if result.status != 0:
        known = max(math.ceil((result.mip_dual_bound or 2) - 1e-6), 2)
        got = f"{count} rows, whose Kruskal rank lies between {known - 1} and {rank}"
        most = f"max_seconds = {max_seconds} ({result.message})"
        refuse("vectors", got, f"an integer program solved within {most}")
    circuit = torch.from_numpy(result.x[count : 2 * count] > 0.5)
    size = int(circuit.sum())
    if numerical_rank(rows[circuit.to(rows.device)], rtol=rtol) == size:
        got = f"{size} rows that are dependent to the solver's tolerance, not to rtol"
        refuse("vectors", got, "no such near-dependent sets with method='milp'")
    return size


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
