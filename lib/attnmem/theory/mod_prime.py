"""Linear algebra modulo the prime 2^31 - 1, by FLINT; such a rank never exceeds the rank."""

from __future__ import annotations

import numpy as np

from .balls import flint

PRIME = 2**31 - 1  # products of two residues fit into 64 bits


def _to_flint(matrix: np.ndarray):
    entries = (matrix % PRIME).flatten().tolist()
    return flint().nmod_mat(*matrix.shape, entries, PRIME)


def _to_numpy(matrix) -> np.ndarray:
    entries = np.array([int(x) for x in matrix.entries()], dtype=np.int64)
    return entries.reshape(matrix.nrows(), matrix.ncols())


def rank(matrix: np.ndarray) -> int:
    """The rank modulo the prime, of a matrix of integers."""
    return _to_flint(matrix).rank()


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The product of two integer matrices modulo the prime."""
    return _to_numpy(_to_flint(left) * _to_flint(right))


def echelon(matrix: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """The reduced row echelon form modulo the prime, and the columns of its pivots.

    Example:
        >>> reduced, pivots = echelon(np.array([[0, 2, 4], [0, 1, 3]]))
        >>> reduced.tolist(), pivots
        ([[0, 1, 0], [0, 0, 1]], [1, 2])
    """
    reduced, count = _to_flint(matrix).rref()
    reduced = _to_numpy(reduced)
    return reduced, [int(np.flatnonzero(row)[0]) for row in reduced[:count]]
