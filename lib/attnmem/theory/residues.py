"""Linear algebra modulo a prime, by FLINT: a rank that is computed so never exceeds the true one.

For a minor that is zero is zero modulo the prime, too. Matrices are arrays of integers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .balls import flint

PRIME = 2**31 - 1  # products of two residues fit into 64 bits


class Echelon(NamedTuple):
    """The reduced row echelon form of a matrix."""

    rows: np.ndarray
    pivots: list[int]  # the column of the leading one of each row that is not zero
    free: list[int]  # the other columns


def _to_flint(matrix: np.ndarray):
    return flint().nmod_mat(*matrix.shape, (matrix % PRIME).flatten().tolist(), PRIME)


def _from_flint(matrix) -> np.ndarray:
    entries = np.array([int(x) for x in matrix.entries()], dtype=np.int64)
    return entries.reshape(matrix.nrows(), matrix.ncols())


def rank(matrix: np.ndarray) -> int:
    """The rank modulo the prime."""
    return _to_flint(matrix).rank()


def echelon(matrix: np.ndarray) -> Echelon:
    """The reduced row echelon form modulo the prime."""
    reduced, rank = _to_flint(matrix).rref()
    rows = _from_flint(reduced)
    pivots = [int(np.flatnonzero(row)[0]) for row in rows[:rank]]
    return Echelon(rows, pivots, np.setdiff1d(np.arange(matrix.shape[1]), pivots).tolist())


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The product of two matrices."""
    return _from_flint(_to_flint(left) * _to_flint(right))


def total(terms: np.ndarray, axis: int = 1) -> np.ndarray:
    """The sum along an axis, of terms that are reduced first, so that 64 bits hold it."""
    return (terms % PRIME).sum(axis) % PRIME


def outer(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """For each row of two matrices the outer product, as one row."""
    return (left[:, :, None] * right[:, None] % PRIME).reshape(len(left), -1)
