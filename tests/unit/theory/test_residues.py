"""Linear algebra modulo a prime, against integers of Python and ranks over the rationals."""

import numpy as np
import pytest

from attnmem.theory import residues

import oracles

P = residues.PRIME


def drawn(seed, *shape):
    return np.random.default_rng(seed).integers(0, P, shape)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_echelon_and_rank_of_small_integers(rank):
    draw = np.random.default_rng(rank)
    matrix = draw.integers(-9, 10, (5, rank)) @ draw.integers(-9, 10, (rank, 7))
    rows, pivots, free = residues.echelon(matrix)
    assert residues.rank(matrix) == len(pivots) == oracles.rank(matrix.tolist()) == rank
    assert sorted(pivots + free) == [*range(7)]
    assert (rows[:rank, pivots] == np.eye(rank)).all()
    assert not rows[rank:].any()
    combined = matrix[:, pivots].astype(object) @ rows[:rank]
    assert not ((combined - matrix) % P).any()


def test_rank_modulo_the_prime_is_a_lower_bound():
    assert residues.rank(np.array([[1, 0], [0, P]])) == 1


def test_sums_and_products_of_large_residues():
    left, right = drawn(0, 3, 50), drawn(1, 50, 2)
    exact = left.astype(object) @ right.astype(object) % P
    assert (residues.product(left, right) == exact).all()
    terms = left[:, :, None] * right[:, :1]  # up to the square of the prime: 50 would overflow
    assert (residues.total(terms)[:, 0] == exact[:, 0]).all()
    rows = residues.outer(left, left[:, :2])
    assert (rows.reshape(3, 50, 2)[1, 7] == left[1, 7] * left[1, :2] % P).all()
