"""Linear algebra modulo a prime: exact ranks and relations of integer matrices."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from ..balls import flint

PRIME = 2**31 - 1  # products of two residues fit into 64 bits


def rank(matrix: np.ndarray) -> int:
    """The rank modulo the prime.

    It is some twenty times as fast with python-flint.

    Args:
        matrix: Integers, shape ``(m, n)``.

    Returns:
        The rank.

    Example:
        >>> rank(np.array([[1, 2], [2, 4]]))
        1
    """
    try:
        return flint().nmod_mat(*matrix.shape, matrix.flatten().tolist(), PRIME).rank()
    except ImportError:
        return len(echelon(matrix.T)[1])


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The product of two matrices modulo the prime.

    Args:
        left: Residues, shape ``(m, k)``.
        right: Residues, shape ``(k, n)``.

    Returns:
        Residues, shape ``(m, n)``.

    Example:
        >>> product(np.array([[PRIME - 1, 1]]), np.array([[2], [3]])).tolist()
        [[1]]
    """
    total = np.zeros((len(left), right.shape[1]), dtype=np.int64)
    for column, row in zip(left.T, right, strict=True):  # no sum of products fits into 64 bits
        total = (total + column[:, None] * row) % PRIME
    return total


def inverse(numbers: np.ndarray) -> np.ndarray:
    """The inverses modulo the prime, by Fermat's little theorem.

    Args:
        numbers: Residues of any shape, from 1 to the prime less one.

    Returns:
        Residues of the same shape.

    Example:
        >>> 3 * int(inverse(np.array([3]))[0]) % PRIME
        1
    """
    power, left, square = np.ones_like(numbers), PRIME - 2, numbers
    while left:
        if left & 1:
            power = power * square % PRIME
        square, left = square * square % PRIME, left >> 1
    return power


def echelon(matrix: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Reduced row echelon form modulo the prime.

    Args:
        matrix: Integers, shape ``(m, n)``.

    Returns:
        The reduced matrix, of residues, and the columns of its pivots.

    Example:
        >>> reduced, pivots = echelon(np.array([[0, 2, 4], [0, 1, 3]]))
        >>> reduced.tolist(), pivots
        ([[0, 1, 0], [0, 0, 1]], [1, 2])
    """
    rows, pivots = (matrix % PRIME).astype(np.int64), []
    for column in range(rows.shape[1]):
        found = len(pivots)
        candidates = np.flatnonzero(rows[found:, column])
        if len(candidates):
            rows[[found, found + candidates[0]]] = rows[[found + candidates[0], found]]
            pivot = rows[found] * inverse(rows[found, column : column + 1]) % PRIME
            rows = (rows - rows[:, column : column + 1] * pivot % PRIME) % PRIME
            rows[found] = pivot
            pivots.append(column)
        if len(pivots) == len(rows):
            break
    return rows, pivots


def kernel_vector(matrix: np.ndarray) -> list[int] | None:
    """The one linear relation between the columns, as coprime integers.

    It is found modulo the prime and recovered as fractions. The caller has to check it exactly.

    Args:
        matrix: Integers, shape ``(m, n)``.

    Returns:
        A coefficient for each column; None if there is no relation or more than one.

    Example:
        >>> kernel_vector(np.array([[2, 4], [1, 2]]))
        [-2, 1]
    """
    reduced, pivots = echelon(matrix)
    [free, *more] = [k for k in range(matrix.shape[1]) if k not in {*pivots}] or [None]
    if free is None or more:
        return None
    solution = {free: Fraction(1)}
    for i, pivot in enumerate(pivots):
        solution[pivot] = _fraction(-int(reduced[i, free]) % PRIME)
    values = [solution[k] for k in range(matrix.shape[1])]
    whole = [v * math.lcm(*(v.denominator for v in values)) for v in values]
    divisor = math.gcd(*(int(v) for v in whole))
    return [int(v) // divisor for v in whole]


def _fraction(residue: int) -> Fraction:
    """The fraction of small numerator and denominator that has this residue modulo the prime."""
    (a, b), (s, t) = (PRIME, residue), (0, 1)
    while b * b > PRIME:
        (a, b), (s, t) = (b, a % b), (t, s - a // b * t)
    return Fraction(b, t)
