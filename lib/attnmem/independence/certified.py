"""Ranks proven by computation: lower bounds that no rounding error can invalidate."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from ..balls import BallMatrix, Enclosure, MostBits, flint, precision, precisions
from ..checks import Seed, checked, refuse
from .numerical import check_entries, numerical_rank

PRIME_BITS = 62
MANTISSA_BITS = 53  # of a float64
MIX = 2**20  # largest coefficient of the combinations


class CertifiedRank(NamedTuple):
    """A proven lower bound of a matrix's rank; 0 if the largest precision did not suffice."""

    rank: int
    shape: tuple[int, int]
    proof: str  # the prime, or the precision of the determinant; or "not certified ..."

    @property
    def full(self) -> bool:
        """Whether full rank is proven: no matrix of this shape has more."""
        return self.rank == min(self.shape)


def _is_exact(matrix, times, target) -> None:
    if callable(matrix):
        if times is not None:
            refuse("times", "a tensor", "None for a function, which encloses the whole product")
        return
    if target is not None:
        refuse("target", target, "None for a tensor: its rank is computed, not aimed at")
    check_entries(matrix=matrix, **({} if times is None else {"times": times}))


@checked(also=_is_exact)
def certified_rank(
    matrix: Shaped[Tensor, "m n"] | Enclosure,
    *,
    times: Shaped[Tensor, "n k"] | None = None,
    target: int | None = None,
    seed: Seed = 0,
    most_bits: MostBits = 1024,
) -> CertifiedRank:
    """Prove a lower bound of the rank by exact arithmetic or by ball arithmetic.

    **A tensor** stands for exactly the numbers that it holds. They are integers, or fractions whose
    denominator is a power of two, so they have residues modulo an odd prime ``p``. The rank modulo
    ``p`` never exceeds the rank. It falls short of it only if ``p``, drawn from all 62-bit primes,
    divides every largest minor.

    **A function** from bits to an ``arb_mat`` encloses one and the same real matrix at any
    precision, such as the features of :func:`attnmem.certificates.enclosed_features`. Random
    integer combinations of its rows and columns form a square matrix of size ``target``, whose rank
    is no higher. If the ball of its determinant excludes zero, the rank is at least ``target``.
    Otherwise the precision doubles, up to ``most_bits``.

    Args:
        times: A second tensor, whose exact product with the first one has the rank in question.
        target: The rank to prove of a function, by default the numerical rank of the midpoints.
        most_bits: At least 128.

    Example:
        >>> certified_rank(torch.tensor([[1, 2], [2, 4]])).rank
        1
        >>> close = torch.tensor([[1.0, 2.0], [2.0, 4.0 + 1e-15]], dtype=torch.float64)
        >>> int(torch.linalg.matrix_rank(close)), certified_rank(close).rank
        (1, 2)
    """
    if not callable(matrix):
        return _rank_modulo_prime([matrix] if times is None else [matrix, times], seed)
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


# --- modulo a prime -------------------------------------------------------------------------------


def _rank_modulo_prime(factors: list[Tensor], seed: int) -> CertifiedRank:
    p = _prime(seed)
    shape = (len(factors[0]), factors[-1].shape[1])
    proof = f"rank modulo the prime {p}"
    if any(0 in factor.shape for factor in factors):
        return CertifiedRank(0, shape, proof)
    first, *others = (flint().nmod_mat(*f.shape, _residues(f, p), p) for f in factors)
    return CertifiedRank(math.prod(others, start=first).rank(), shape, proof)


def _prime(seed: int) -> int:
    draw = random.Random(seed)
    while True:
        candidate = draw.getrandbits(PRIME_BITS - 1) | 1 << PRIME_BITS - 1 | 1
        if flint().fmpz(candidate).is_prime():
            return candidate


def _residues(matrix: Shaped[Tensor, "m n"], p: int) -> list[int]:
    """All entries modulo ``p``, row by row: ``k 2^e`` with integers ``k, e``, for every float."""
    if not matrix.is_floating_point():
        return [k % p for k in matrix.flatten().tolist()]
    fraction, exponent = np.frexp(matrix.detach().cpu().double().flatten().numpy())
    whole = np.ldexp(fraction, MANTISSA_BITS).astype(np.int64).tolist()
    powers = {int(e): pow(2, int(e) - MANTISSA_BITS, p) for e in np.unique(exponent)}
    return [k * powers[e] % p for k, e in zip(whole, exponent.tolist(), strict=True)]


# --- in balls -------------------------------------------------------------------------------------


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
            mix = [draw.randint(-MIX, MIX) for _ in range(balls.ncols() * size)]
            balls = balls * flint().arb_mat(balls.ncols(), size, mix)
        balls = balls.transpose()
    return balls
