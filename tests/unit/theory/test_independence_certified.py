"""What is proven is true: certified ranks against rational arithmetic."""

import math
import sys

import pytest
import torch
from flint import arb, arb_mat

from attnmem.theory import balls
from attnmem.theory.independence import certified_rank

import oracles

F64 = {"dtype": torch.float64}
INFINITE = arb.pos_inf()
BIG, SMALL = arb(10) ** 400, arb(10) ** -400  # which no float holds


def adversarial(name, generator):
    """A small matrix made to mislead a tolerance."""
    m, n = torch.randint(1, 8, (2,), generator=generator).tolist()
    k = int(torch.randint(1, min(m, n) + 1, (), generator=generator))
    draw = {"generator": generator, **F64}

    def integers(*shape):
        return torch.randint(-9, 10, shape, generator=generator)

    match name:
        case "exactly singular":
            return integers(m, k) @ integers(k, n)
        case "nearly singular":
            matrix = (integers(m, k) @ integers(k, n)).double()
            matrix[m - 1, n - 1] = math.nextafter(float(matrix[m - 1, n - 1]), math.inf)
            return matrix
        case "graded":
            powers = torch.randint(-1000, 997, (m, n), generator=generator).double()
            return torch.randn(m, n, **draw) * torch.exp2(powers)
        case "graded rows of low rank":
            powers = torch.randint(-990, 980, (m, 1), generator=generator).double()
            return (integers(m, k) @ integers(k, n)).double() * torch.exp2(powers)
        case "subnormal":
            return integers(m, n).double() * sys.float_info.min * 2.0**-50
        case "one row":
            return torch.randn(1, n, **draw) * (torch.rand(1, n, **draw) < 0.3)
        case "empty":
            return torch.zeros((0, n) if k % 2 else (m, 0), **F64)
        case "float32":
            return torch.randn(m, n, generator=generator) @ torch.ones(n, n)
        case "huge integers":
            return integers(m, k) @ integers(k, n) * 2**50


NAMES = "exactly singular, nearly singular, graded, graded rows of low rank, subnormal, "
NAMES += "one row, empty, float32, huge integers"


@pytest.mark.parametrize("name", NAMES.split(", "))
def test_certified_rank_is_never_above_the_true_one(name):
    """Of floats it is equal unless the prime divides every minor; of balls it may be lower."""
    generator = torch.Generator().manual_seed(len(name))
    for seed in range(100):
        matrix = adversarial(name, generator)
        true = oracles.rank(matrix)
        assert certified_rank(matrix, seed=seed)[:2] == (true, tuple(matrix.shape))
        enclosure = lambda bits, matrix=matrix: balls.exact(matrix)  # noqa: E731
        assert certified_rank(enclosure).rank <= true
        for target in range(1, min(matrix.shape) + 1):
            result = certified_rank(enclosure, target=target, most_bits=4096)
            assert result.rank in ((0, target) if target <= true else (0,))


def test_each_seed_has_a_prime_of_its_own():
    primes = {certified_rank(torch.eye(2), seed=seed).proof for seed in range(20)}
    assert len(primes) == 20


def test_product_is_exact_where_no_float_holds_it():
    """[[2^60 + 2^-60, 1 + 2^-240], [1, 2^-60]] is singular once it is rounded, not before."""
    left = torch.tensor([[2.0**60, 2.0**-60], [1.0, 0.0]], **F64)
    right = torch.tensor([[1.0, 2.0**-60], [1.0, 2.0**-180]], **F64)
    assert certified_rank(left @ right).rank == 1
    assert certified_rank(left, times=right).rank == 2


@pytest.mark.parametrize("rank", range(5))
def test_product_of_integers_has_its_rank(rank):
    generator = torch.Generator().manual_seed(rank)
    thin = torch.randint(-9, 9, (7, rank), generator=generator)
    wide = torch.randint(-9, 9, (rank, 6), generator=generator)
    assert certified_rank(thin, times=wide)[:2] == (oracles.rank(thin @ wide), (7, 6))


def test_precision_is_raised_until_it_suffices():
    asked = []

    def nearly_singular(bits):
        """[[1, 1], [1, 1 + 10^-60]], as an expression that rounds."""
        asked.append(bits)
        return arb_mat([[1, 1], [1, 1 + arb(10) ** -60]])

    assert certified_rank(nearly_singular).rank == 1  # all that float64 midpoints suggest
    assert certified_rank(nearly_singular, target=2).rank == 2
    assert asked == [128, 128, 256]
    failed = certified_rank(nearly_singular, target=2, most_bits=128)
    assert (failed.rank, failed.full) == (0, False)
    assert certified_rank(torch.ones(3, 1)).full


@pytest.mark.parametrize(
    ("matrix", "target", "rank"),
    [
        ([[arb(1, 0.9), 0], [1, 1]], 2, 2),  # the determinant is the corner's entry
        ([[arb(1, 1.1), 0], [1, 1]], 2, 0),
        ([[1, 2], [2, 4]], 2, 0),
        *(([[entry]], target, 0) for entry in (0, arb.nan(), INFINITE) for target in (None, 1)),
        ([[INFINITE, 0], [0, 1]], 2, 0),
        ([[BIG * BIG, BIG], [1, 2 * SMALL]], None, 2),
        ([[0, SMALL], [0, SMALL], [0, 0]], None, 1),
    ],
)
def test_ranks_of_balls_by_hand(matrix, target, rank):
    proof = certified_rank(lambda bits: arb_mat(matrix), target=target)
    assert proof.rank == rank
    assert proof.proof.startswith("not certified") == (rank == 0)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flint", None)
    with pytest.raises(ImportError, match=r"pip install python-flint$"):
        certified_rank(torch.eye(2))
