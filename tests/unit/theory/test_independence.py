"""Ranks against planted structure and brute force in exact arithmetic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from attnmem.theory import independence
from attnmem.theory.independence import kruskal_rank, numerical_rank, sampled_independence

import oracles

integers = st.integers(-3, 3)
matrices = st.integers(1, 5).flatmap(
    lambda d: st.lists(st.lists(integers, min_size=d, max_size=d), min_size=1, max_size=7)
)


@settings(max_examples=150, deadline=None)
@given(matrices, st.lists(st.integers(-8, 8), min_size=7, max_size=7))
def test_ranks_of_small_integers_are_exact(rows, powers):
    """Whatever the lengths of rows."""
    matrix, expected = torch.tensor(rows), oracles.kruskal(rows)
    assert numerical_rank(matrix) == oracles.rank(rows)
    assert kruskal_rank(matrix) == expected
    scales = 10.0 ** torch.tensor(powers, dtype=torch.float64)[: len(rows), None]
    assert kruskal_rank(matrix * scales) == expected


def test_rank_of_a_batch_and_its_tolerance():
    matrices = torch.diag_embed(torch.tensor([[1.0, 1e-3, 1e-9], [1.0, 0.0, 0.0], [0, 0, 0]]))
    assert numerical_rank(matrices).tolist() == [2, 1, 0]  # the entry 1e-9 is below float32's unit
    assert numerical_rank(matrices, dtype=torch.float64).tolist() == [3, 1, 0]
    assert numerical_rank(matrices, rtol=1e-2).tolist() == [1, 1, 0]
    assert numerical_rank(matrices[0], rtol=0.0) == 3
    assert isinstance(numerical_rank(matrices[0]), int)
    assert numerical_rank(torch.zeros(0, 5)) == 0


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, scale) for scale in (1e-30, 1.0, 1e30)]
    + [(torch.float64, scale) for scale in (1e-300, 1.0, 1e300)],
)
def test_ranks_on_both_sides_of_the_tolerance(dtype, scale):
    """Those of singular values, where the shortcut does and does not decide."""
    generator = torch.Generator().manual_seed(0)
    rtol = 9 * torch.finfo(dtype).eps
    ratios = [0.0, 0.1, 0.5, 2.0, 10.0, 50.0, 1e3, 1e5, 1e9]
    ratios = torch.tensor(ratios, dtype=torch.float64) * rtol
    values = torch.ones(len(ratios), 6, dtype=torch.float64)
    values[:, -1] = ratios.clamp(max=1.0)
    values[:, 1:-1] = 10.0 ** -torch.rand(len(ratios), 4, generator=generator, dtype=torch.float64)
    squares = (torch.randn(k, k, generator=generator, dtype=torch.float64) for k in (6, 9))
    U, V = (torch.linalg.qr(square).Q for square in squares)
    matrices = (scale * (U * values[:, None]) @ V[:6]).to(dtype)
    expected = torch.linalg.matrix_rank(matrices)  # by singular values
    assert expected.tolist() == numerical_rank(matrices).tolist()
    assert expected.tolist() == numerical_rank(matrices.mT).tolist()
    assert {5, 6} == set(expected.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_scale_changes_a_rank(dtype):
    """Up to the largest and down to the smallest numbers that there are."""
    signs = torch.tensor([[1, 1, 1], [1, -1, 1], [1, 1, -1], [1, -1, 1], [-1, 1, 1]], dtype=dtype)
    info = torch.finfo(dtype)
    subnormal = info.tiny * info.eps
    for size in (info.max, info.max**0.51, info.tiny**0.51, info.tiny, 3 * subnormal, subnormal):
        x = signs * size
        assert numerical_rank(torch.stack([x, signs, 0 * x])).tolist() == [3, 3, 0]
        assert kruskal_rank(x) == 1
        for count in (1, 2, 3):
            scaled = sampled_independence(x, count, samples=99, seed=0)
            assert scaled == sampled_independence(signs, count, samples=99, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (1, 0)])
def test_no_vectors_or_entries_have_rank_zero(shape, dtype):
    vectors = torch.ones(shape, dtype=dtype)
    assert numerical_rank(vectors) == 0
    assert kruskal_rank(vectors) == 0
    assert numerical_rank(vectors.expand(2, *shape)).tolist() == [0, 0]


def test_kruskal_rank_says_what_it_knows_on_the_way():
    assert kruskal_rank(torch.eye(40), max_subsets=1) == 40, "no subset is looked at"
    vectors = torch.randn(200, 10, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^vectors: got 200 rows, .* between 2 and 10; .*1313400"):
        kruskal_rank(vectors, max_subsets=10**6)
    vectors[1] = vectors[0]
    assert kruskal_rank(vectors) == 1  # a dependent pair ends the search early


@pytest.mark.parametrize("block", [1, 100, 8192])
def test_kruskal_rank_in_blocks(block, monkeypatch):
    vectors = torch.randn(14, 6, dtype=torch.float64)
    vectors[11] = vectors[3] - vectors[7] + vectors[9]
    near = torch.randn(3, 6, dtype=torch.float64)
    near[0] = near[1] + 1e-9 * near[0]  # close to dependent, and independent
    monkeypatch.setattr(independence, "_BLOCK", block)
    assert kruskal_rank(torch.cat([vectors, near])) == 3


def test_kruskal_rank_of_nearly_dependent_rows():
    vectors = torch.eye(4, dtype=torch.float64).repeat(2, 1)[:5]
    vectors[4] = vectors[0] + 1e-3 * vectors[1]
    assert kruskal_rank(vectors) == 2
    assert kruskal_rank(vectors, rtol=1e-2) == 1
    vectors = torch.eye(3, dtype=torch.float64)[[0, 1, 2, 0]]
    vectors[3, 1] = 1e-9  # far above the default tolerance
    assert kruskal_rank(vectors) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rtol", [None, 0.0, 1e-9, 1e-5, 1e-4, 1e-2])
@pytest.mark.parametrize("decay", [0.0, 1e-15, 1e-12, 5e-8, 3e-5, 0.2, 1.0])
def test_sampled_ranks_are_those_of_singular_values(dtype, rtol, decay):
    """Also where the tolerance cuts through the subsets, and where it is far below squares."""
    seed = torch.Generator().manual_seed(0)
    vectors = torch.randn(60, 20, generator=seed, dtype=torch.float64)
    vectors[:, 12:] *= decay
    size, samples = 14, 300
    found = sampled_independence(vectors, size, samples=samples, seed=1, rtol=rtol, dtype=dtype)
    keys = torch.rand(samples, 60, generator=torch.Generator().manual_seed(1))
    subsets = vectors.to(dtype)[keys.topk(size, dim=1).indices]
    assert found.dependent == int((torch.linalg.matrix_rank(subsets, rtol=rtol) < size).sum())


@pytest.mark.parametrize("decay", [3e-5, 0.2])
def test_many_vectors_are_tested_as_few_are(decay, monkeypatch):
    """With keys in blocks: the same subsets, the same ranks."""
    vectors = torch.randn(60, 20, generator=torch.Generator().manual_seed(0))
    vectors[:, 12:] *= decay
    few = sampled_independence(vectors, 14, samples=100, seed=1, rtol=1e-3)
    monkeypatch.setattr(independence, "_GATHERED", 60 * 6)  # 7 subsets at once
    assert sampled_independence(vectors, 14, samples=100, seed=1, rtol=1e-3) == few


def test_small_subsets_are_uniform_and_repeat_nothing(monkeypatch):
    monkeypatch.setattr(independence, "_LARGE", 8)
    drawn = torch.cat([*independence._subsets(9, 3, 10_000, torch.Generator().manual_seed(0))])
    sets, counts = drawn.sort(dim=1).values.unique(dim=0, return_counts=True)
    assert (sets.diff(dim=1) > 0).all()
    expected = 10_000 / math.comb(9, 3)
    assert len(sets) == math.comb(9, 3)
    assert ((counts - expected).abs() < 5 * expected**0.5).all()  # five standard deviations


def test_400_000_vectors_need_no_square():
    vectors = torch.rand(400_000, 3)
    assert sampled_independence(vectors, 2, samples=100, seed=0).dependent == 0
    assert sampled_independence(vectors, 700, samples=2, seed=0).dependent == 2


def test_sampling_misses_what_is_rare():
    vectors = torch.randn(60, 8, dtype=torch.float64)
    vectors[0] = vectors[1] + vectors[2]  # one dependent triple among 34220
    assert kruskal_rank(vectors) == 2
    triples = sampled_independence(vectors, 3, samples=200, seed=0)
    assert triples.dependent == 0
    assert triples.dependent_at_most > 1 / math.comb(60, 3)
    assert sampled_independence(vectors, 8, samples=200, seed=0).dependent <= 2


@pytest.mark.parametrize(("equal", "samples"), [(1, 5000), (3, 50), (20, 50)])
def test_bound_is_the_largest_fraction_not_refuted(equal, samples):
    vectors = torch.eye(20)  # a pair is dependent iff both are among the equal ones
    vectors[:equal] = vectors[0].clone()
    test = sampled_independence(vectors, 2, samples=samples, seed=0)
    assert (test.dependent == 0, test.dependent == samples) == (equal == 1, equal == 20)
    if equal < 20:  # scipy finds it by bisection
        assert binom.cdf(test.dependent, samples, test.dependent_at_most) == pytest.approx(0.05)
    else:
        assert test.dependent_at_most == 1
