"""Signs and classes: counts against linear programs, exact ranks, closed forms and simulations."""

import functools
import itertools
import math
import random

import numpy as np
import pytest
import scipy
import torch
from flint import fmpz_mat
from scipy.optimize import linprog

from attnmem.core import bounds
from attnmem.core.layers import attend
from attnmem.theory.counts import class_capacity, class_price, unequal_class_capacity
from attnmem.theory.independence import regions
from attnmem.theory.tangents import ScalarHeads, scalar_outputs, tangents


def witness(rows):
    """Weights with the largest least margin on unit rows, or None if it is not positive."""
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    goal = np.r_[np.zeros(rows.shape[1]), -1.0]
    lines = np.hstack([-rows, np.ones((len(rows), 1))])
    box = [(-1, 1)] * rows.shape[1] + [(None, 1)]
    best = linprog(goal, A_ub=lines, b_ub=np.zeros(len(rows)), bounds=box, method="highs").x[:-1]
    return best if (rows @ best).min() > 1e-9 else None


def met(Z):
    """All sign vectors that some read-out meets, with weights that do, by linear programming."""
    Z, found = np.asarray(Z, dtype=float), {}
    if not Z.any(1).all():
        return found
    for half in itertools.product((1.0, -1.0), repeat=len(Z) - 1):
        signs = np.array([1.0, *half])
        if (w := witness(Z * signs[:, None])) is not None:
            found[*signs], found[*-signs] = w, -w
    return found


# --- Cover's count --------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3, 7, 40])
def test_sign_vectors_at_and_twice_the_rank(rank):
    assert all(bounds.sign_vectors(T, rank) == 2**T for T in range(1, rank + 1))
    assert bounds.sign_vectors(2 * rank, rank) == 2 ** (2 * rank - 1)
    shares = [bounds.sign_vectors(T, rank) / 2**T for T in range(1, 4 * rank)]
    assert shares == sorted(shares, reverse=True)


def test_sign_vectors_of_one_more_example():
    for T, R in [*itertools.product(range(1, 12), range(2, 12)), (3000, 1500), (9, 10**12)]:
        more = bounds.sign_vectors(T, R) + bounds.sign_vectors(T, R - 1)
        assert bounds.sign_vectors(T + 1, R) == more


# --- regions --------------------------------------------------------------------------------------


def by_subsets(Z):
    """The sum over all sets of rows, with exact ranks of integers."""
    total, rows = 0, Z.tolist()
    for size in range(len(rows) + 1):
        for chosen in itertools.combinations(rows, size):
            total += (-1) ** (size + (fmpz_mat([*map(list, chosen)]).rank() if size else 0))
    return total


def bigrams(N, d, H=1, skip=False, seed=0):
    """Integer features in proportion to those of all bigrams; attention in random integers."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-50, 51, (N, d), generator=g)
    w = torch.randint(1, 100, (H, N, N), generator=g)
    i, j = torch.cartesian_prod(torch.arange(N), torch.arange(N)).T
    both = torch.stack([w[:, i, j], w[:, j, j]])  # of the first token and of the last
    total = both.sum(0)
    parts = both[0, ..., None] * x[i] + both[1, ..., None] * x[j]
    parts = [parts[h] * total[torch.arange(H) != h].prod(0)[:, None] for h in range(H)]
    return torch.cat(parts + [x[j] * total.prod(0)[:, None]] * skip, 1)


G = torch.Generator().manual_seed(0)
LINES = torch.randint(-9, 10, (7, 3), generator=G)
ARRANGEMENTS = {  # with the number by hand, or by linear programs of the trial
    "general position": (LINES, 2 * (1 + 6 + 15)),
    "in a plane": (LINES * torch.tensor([1, 1, 0]), 14),
    "one twice": (torch.cat([LINES, -3 * LINES[:1]]), 44),
    "a zero": (torch.cat([LINES, 0 * LINES[:1]]), 0),
    "one example": (LINES[:1], 2),
    "signed pairs": (  # x_i = 0 and x_i = +- x_j: the group of the cube, 2^3 3!
        torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1]] + [[1, s, 0] for s in (1, -1)]
                     + [[1, 0, s] for s in (1, -1)] + [[0, 1, s] for s in (1, -1)]),
        48,
    ),
    "bigrams, d = 3": (bigrams(3, 3), 56),
    "bigrams, d = 2": (bigrams(3, 2), 18),
    "bigrams and a skip connection": (bigrams(3, 3, skip=True), 272),
    "bigrams, two heads": (bigrams(3, 2, H=2), 160),
}  # fmt: skip


@pytest.mark.hostile("mahdavi-finding-signs")
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_regions_by_subsets_and_linear_programs(name):
    Z, number = ARRANGEMENTS[name]
    assert regions(Z) == regions(Z, seed=1) == by_subsets(Z) == number
    assert len(met(Z)) == number


@pytest.mark.parametrize(("T", "m"), [(1, 1), (6, 1), (8, 3), (9, 5), (5, 9)])
def test_regions_in_general_position(T, m):
    Z = torch.randn(T, m, generator=torch.Generator().manual_seed(T), dtype=torch.float64)
    assert regions(Z) == bounds.sign_vectors(T, m)


def test_regions_of_bigrams_are_the_same_at_any_draw():
    assert {regions(bigrams(3, 3, seed=seed)) for seed in range(20)} == {56}
    # By hand: features of {i, j} lie in one plane, four in each of three planes; three regions
    # and their opposites are lost in each.
    assert bounds.sign_vectors(9, 3) - 3 * 6 == 56


def test_rounded_features_lose_their_relations():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 3, generator=g, dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    maps = torch.randn(2, 1, 3, 2, generator=g, dtype=torch.float64)
    Z = attend(*maps, x[pairs], x[pairs[:, 1]])[1].flatten(1)
    assert len(met(Z)) == 56 < regions(Z)


@pytest.mark.parametrize("shape", [(40, 12), (21, 21), (10_000, 2), (10_000, 10_000)])
def test_too_many_regions_are_refused(shape):
    with pytest.raises(ValueError, match=r"^rows: got shape .* expected rows times regions"):
        regions(torch.ones(shape))


# --- attention ------------------------------------------------------------------------------------


def drawn(kind, H, n, d, d_h, T, seed=0):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    maps = [2 / math.sqrt(d) * normal(H, d, d_h) for _ in range(2)]
    E, e = normal(*([] if kind == "shared" else [T]), n, d), normal(T, d)
    return maps, E, E[:, 0].clone() if kind == "self" else e, g


RANDOM = [  # contexts, H, n, d, d_h, T, rank, rank with a bias
    ("own", 1, 2, 3, 1, 8, 3, 4),
    ("own", 2, 2, 2, 2, 8, 4, 5),
    ("own", 2, 3, 2, 1, 9, 4, 5),
    ("self", 2, 2, 2, 1, 8, 4, 5),
    ("own", 1, 1, 3, 1, 7, 3, 4),
    ("own", 2, 1, 3, 1, 7, 3, 4),
    ("shared", 1, 4, 5, 2, 8, 4, 4),
    ("shared", 2, 3, 4, 1, 8, 5, 5),
    ("shared", 1, 6, 3, 2, 8, 3, 4),
    ("shared", 3, 1, 4, 2, 5, 1, 1),
]


@pytest.mark.hostile("mahdavi-finding-signs")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "H", "n", "d", "d_h", "T", "rank", "with_bias"), RANDOM)
def test_random_attention_meets_covers_count(kind, H, n, d, d_h, T, rank, with_bias, bias):
    (W_Q, W_K), E, e, _ = drawn(kind, H, n, d, d_h, T)
    Z = attend(W_Q, W_K, E, e)[1].flatten(1)
    Z = torch.cat([Z, torch.ones(T, int(bias), dtype=Z.dtype)], 1)
    U, sizes, _ = torch.linalg.svd(Z, full_matrices=False)
    R = int((sizes > 1e-9 * sizes[0]).sum())
    assert (with_bias if bias else rank) == R
    assert len(met(U[:, :R])) == bounds.sign_vectors(T, R)


SILENT = [("own", 2, 2, 2, 1, 7, 5), ("self", 2, 2, 2, 1, 7, 5), ("shared", 2, 3, 3, 1, 8, 7)]
SILENT += [("own", 1, 2, 3, 2, 7, 3), ("own", 3, 2, 2, 1, 9, 7)]


@pytest.mark.parametrize(("kind", "H", "n", "d", "d_h", "T", "floor"), SILENT)
def test_near_silent_weights_count_of_the_floor(kind, H, n, d, d_h, T, floor):
    (W_Q, W_K), E, e, g = drawn(kind, H, n, d, d_h, T)
    few = kind == "shared" and n <= d
    m = n - 1 if few else d
    sizes = bounds.best_groups(H, m, d, min(d_h, m))
    assert few + sum(bounds.group_rank(k, m, d, min(d_h, m)) for k in sizes) == floor
    mu = [torch.randn(k, d, generator=g, dtype=torch.float64) for k in sizes]
    mu = torch.cat([values - values.mean(0) for values in mu])
    which = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    start = ScalarHeads(W_Q[which], W_K[which], mu)
    J = torch.cat(tangents(start, E, e).parts(), 1)
    U, values, V = torch.linalg.svd(J, full_matrices=False)
    assert int((values > 1e-9 * values[0]).sum()) == min(T, floor)
    U, values, V = U[:, :floor], values[:floor], V[:floor]
    found = met(U)
    assert len(found) == bounds.sign_vectors(T, floor)
    for signs, w in found.items():  # the layer itself, a small step away
        step = V.T @ (torch.from_numpy(w) / values)
        parts = (step / step.norm()).split([x.numel() for x in start])
        parts = (p.view_as(x) for p, x in zip(parts, start, strict=True))
        moved = start.moved(ScalarHeads(*parts), 1e-6)
        assert (scalar_outputs(moved, E, e) * torch.tensor(signs) > 0).all()


# --- classes --------------------------------------------------------------------------------------


def test_prices_in_closed_form():
    # Four: 3 rivals; v_1 = 3/2 E Phi(x / sqrt 2)^2, v_2 = 1/4, v_3 a corner of a tetrahedron.
    closed = {2: 1 / 2, 3: 5 / 6, 4: 5 / 4 - 3 / (2 * math.pi) * math.asin(1 / 3)}
    for classes, price in closed.items():
        assert class_price(classes) == pytest.approx(price, abs=1e-12)


@pytest.mark.parametrize(("classes", "draws"), [(5, 400_000), (30, 200_000), (400, 20_000)])
def test_price_is_the_mean_of_rivals_and_distances(classes, draws):
    g = np.random.default_rng(0).standard_normal((draws, classes))
    right, rivals = g[:, :1], -np.sort(-g[:, 1:], axis=1)
    levels = np.cumsum(np.hstack([right, rivals]), 1) / np.arange(1, classes + 1)
    count = np.cumprod(rivals > levels[:, :-1], 1).sum(1)
    level = np.take_along_axis(levels, count[:, None], 1)
    squared = (level - right)[:, 0] ** 2 + (np.maximum(rivals - level, 0) ** 2).sum(1)
    for form in (count, squared):
        error = form.std() / math.sqrt(draws)
        assert abs(form.mean() - class_price(classes)) < 4 * error


def test_prices_rise_and_fall_for_each_rival():
    sizes = [2, 3, 10, 100, 10**4, 10**6]
    prices = [class_price(C) for C in sizes]
    assert prices == sorted(prices)
    each = [price / (C - 1) for price, C in zip(prices, sizes, strict=True)]
    assert each == sorted(each, reverse=True)
    assert all(
        math.log(C) / 2 < price < 2 * math.log(C) for price, C in zip(prices, sizes, strict=True)
    )


@pytest.mark.parametrize("classes", [10**9, 10**12])
def test_prices_of_very_many_classes(classes):
    g = np.random.default_rng(0)  # of so many, the largest are the points of a Poisson process
    rivals = -scipy.special.ndtri(np.cumsum(g.exponential(size=(20_000, 160)), 1) / (classes - 1))
    above = np.hstack([g.standard_normal((20_000, 1)), rivals[:, :-1]])
    count = np.cumprod(rivals > np.cumsum(above, 1) / np.arange(1, 161), 1).sum(1)
    assert count.max() < 160
    assert abs(count.mean() - class_price(classes)) < 4 * count.std() / math.sqrt(20_000)


@pytest.mark.parametrize("classes", [1, 2.0, True, None, 10**12 + 1])
def test_numbers_of_classes_out_of_range(classes):
    for call in (class_price, functools.partial(class_capacity, 3)):
        with pytest.raises(ValueError, match=rf"^classes: got {classes}; expected an integer"):
            call(classes)


def test_two_classes_are_signs():
    assert class_capacity(24, 2) == pytest.approx(48, abs=1e-9)


def test_unequal_classes_by_all_their_largest():
    """Of all, in any order and proportion; equal ones are what they were."""
    rng = random.Random(0)
    alone = {k: (k - 1) * 5 / class_price(k) for k in range(2, 30)}
    for _ in range(100):
        sizes = [rng.choice((1, 2, 3, 20, 300)) for _ in range(rng.randint(2, 29))]
        largest = sorted(sizes, reverse=True)
        limits = [alone[k] * sum(sizes) / sum(largest[:k]) for k in range(2, len(sizes) + 1)]
        found, k = unequal_class_capacity(5, sizes)
        assert found == pytest.approx(min(limits), rel=1e-12) == pytest.approx(limits[k - 2])
    assert unequal_class_capacity(5, [7] * 10) == (pytest.approx(class_capacity(5, 10)), 10)
    assert unequal_class_capacity(40, [36, 36, *[1] * 8]) == (pytest.approx(80 / 0.9), 2)


UNEQUAL = {
    "two of nine twentieths": [36, 36, *[1] * 8],
    "one of nine tenths": [81, *[1] * 9],
    "three of three tenths": [21, 21, 21, *[1] * 7],
    "each half of the one before": [128, 64, 32, 16, 8, 4, 2, 1],
    "two large ones, many tiny ones": [8, 8, *[1] * 12],
}


@pytest.mark.parametrize("sizes", UNEQUAL.values(), ids=UNEQUAL)
def test_about_half_of_unequal_draws_are_met(sizes):
    limit, _ = unequal_class_capacity(10, sizes)
    assert draws_met(sizes, round(0.7 * limit)) >= 10 > draws_met(sizes, round(1.5 * limit))


def draws_met(sizes, T, mean=0.0):
    """Of 20 draws of Gaussian features, those whose labels a linear program meets."""
    met, N = 0, len(sizes)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        Z, labels = (
            mean + rng.standard_normal((T, 10)),
            rng.choice(N, T, p=np.divide(sizes, sum(sizes))),
        )
        t, rival = np.nonzero(np.arange(N) != labels[:, None])
        signs = (np.eye(N)[labels[t]] - np.eye(N)[rival])[:, 1:]
        met += witness(np.einsum("kn,kr->knr", signs, Z[t]).reshape(len(t), -1)) is not None
    return met


def test_one_large_class_where_features_have_a_mean():
    assert unequal_class_capacity(10, [9, 1])[0] == pytest.approx(20)
    assert draws_met([9, 1], 30) < 10 < draws_met([9, 1], 30, mean=3.0)
