"""Fits recover planted laws, intervals cover, the criterion picks the law behind the data."""

import math

import numpy as np
import pytest

from attnmem import scaling

X = np.array([1.0, 2, 3, 5, 7, 11, 13])


@pytest.mark.parametrize(
    ("law", "coefficients"),
    [
        ("linear", (3.0, -2.0)),
        ("quadratic", (1.0, -2.0, 0.5)),
        ("square", (1.0, 0.5)),
        ("cube", (-1.0, 0.25)),
        ("pure square", (2.0,)),
        ("pure cube", (2.0,)),
        ("power", (0.7, 1.83)),
        ("shifted power", (0.4, 0.7, 1.83)),
        ("saturating", (5.0, 3.0)),
    ],
)
def test_an_exact_law_is_recovered(law, coefficients):
    y = scaling.LAWS[law].value(X, *coefficients)
    found = scaling.fit(law, X, y)
    assert tuple(found.coefficients.values()) == pytest.approx(coefficients, rel=1e-5)
    assert found.r2 == pytest.approx(1)
    assert found(X) == pytest.approx(y, rel=1e-5)


def test_linear_fit_against_the_textbook_formulas():
    y = np.array([2.0, 1, 4, 3, 8, 9, 16])
    slope = ((X - X.mean()) * (y - y.mean())).sum() / ((X - X.mean()) ** 2).sum()
    found = scaling.fit("linear", X, y)
    assert found.coefficients["x^1"] == pytest.approx(slope)
    assert found.r2 == pytest.approx(np.corrcoef(X, y)[0, 1] ** 2)
    residual = ((y - found(X)) ** 2).sum()
    assert found.aicc == pytest.approx(7 * math.log(residual / 7) + 6 + 24 / 3)


def test_seeds_are_averaged_before_the_fit():
    y = np.random.default_rng(0).normal(size=(7, 4)) + X[:, None]
    assert scaling.fit("linear", X, y) == scaling.fit("linear", X, y.mean(axis=1))


@pytest.mark.parametrize("truth", ["linear", "square", "cube"])
def test_the_law_that_made_the_data_is_selected(truth):
    x = np.arange(1.0, 12)
    random = np.random.default_rng(1)
    y = scaling.LAWS[truth].value(x, 1.0, 0.5)[:, None] + random.normal(size=(11, 5)) * 0.2
    assert scaling.select(["cube", "linear", "square"], x, y)[0].law == truth


def test_too_few_points_cannot_be_compared():
    assert scaling.fit("linear", [1, 2, 3, 4], [1, 2, 3, 5]).aicc == math.inf


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    random, covered = np.random.default_rng(2), 0
    weights = (X - X.mean()) / ((X - X.mean()) ** 2).sum()  # of the slope of a fitted line
    for trial in range(100):
        y = (3 + 2 * X)[:, None] + random.normal(size=(len(X), 20))
        [interval] = scaling.bootstrap(lambda y: weights @ y.mean(axis=1), y, draws=200, seed=trial)
        covered += interval.low <= 2 <= interval.high
    # 20 seeds: a little below 95%; below 85 or all of 100 would each have probability under 1%.
    assert 85 <= covered <= 99


def test_bootstrap_is_reproducible_and_keeps_points_apart():
    y = np.arange(6.0)[:, None] + np.zeros((6, 3))
    first, again = (scaling.bootstrap(lambda y: y.mean(1), y, draws=9, seed=0) for _ in range(2))
    assert first == again
    assert [i.low for i in first] == [i.high for i in first] == list(range(6))


def test_the_unsaturated_part_ends_at_the_first_point_that_reaches_the_ceiling():
    accuracy = np.array([0.1, 0.5, 0.96, 0.94, 1.0])
    assert scaling.unsaturated(np.arange(5), accuracy).tolist() == [True, True, False, False, False]
    shuffled = np.array([3, 0, 4, 1, 2])
    assert scaling.unsaturated(shuffled, accuracy[shuffled]).tolist() == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_gains_are_of_the_steps_that_start_below_the_ceiling_whatever_the_order():
    accuracy = np.array([0.25, 0.5, 1.0, 0.75, 1.0])
    assert scaling.unsaturated_gains(np.arange(5), accuracy).tolist() == [0.25, 0.5]
    shuffled = np.array([3, 0, 4, 1, 2])
    seeds = accuracy[shuffled, None] + [-0.125, 0.125]
    assert scaling.unsaturated_gains(shuffled, seeds).tolist() == [0.25, 0.5]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: scaling.fit("cubic", X, X), "law"),
        (lambda: scaling.fit("linear", X, X[1:]), "y"),
        (lambda: scaling.fit("linear", [1.0], [1.0]), "x"),
        (lambda: scaling.fit("power", [0.0, 1, 2], [0.0, 1, 2]), "x"),
        (lambda: scaling.fit("linear", X, X * math.nan), "y"),
        (lambda: scaling.bootstrap(np.mean, X, seed=0), "y"),
        (lambda: scaling.bootstrap(np.mean, X[:, None], draws=0, seed=0), "draws"),
        (lambda: scaling.unsaturated(X, X, ceiling=2), "ceiling"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: got "):
        call()


def test_the_line_ends_where_the_curve_saturates():
    x, y = [1, 2, 3, 4, 5], [0.2, 0.4, 0.6, 0.96, 0.99]
    line = scaling.unsaturated_line(x, y)
    assert line.points == 3
    assert line.coefficients["x^1"] == pytest.approx(0.2)
    assert scaling.unsaturated_line(x, [0.2, 0.4, 0.97, 0.98, 0.99]) is None


def test_a_lead_is_the_difference_of_means_with_the_error_of_both():
    random = np.random.default_rng(0)
    x, y = np.arange(1.0, 6.0), random.normal(size=(5, 400)) + 3
    other = random.normal(scale=2.0, size=(5, 100)) + np.arange(1.0, 6.0)[:, None]
    above, error = scaling.lead(x, y, x, other)
    np.testing.assert_allclose(above, y.mean(axis=1) - other.mean(axis=1))
    np.testing.assert_allclose(error, np.sqrt(1 / 400 + 4 / 100), rtol=0.2)
    halfway, _ = scaling.lead([1.5], [[0.0, 0.0]], x, other)
    np.testing.assert_allclose(halfway, -other.mean(axis=1)[:2].mean())
    beyond, _ = scaling.lead([9.0], [[0.0, 0.0]], x, other)
    np.testing.assert_allclose(beyond, -other.mean(axis=1)[-1])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([2, 1], np.ones((2, 3)), [1, 2], np.ones((2, 3))), "x"),
        (([1, 2], np.ones((2, 1)), [1, 2], np.ones((2, 3))), "y"),
        (([1, 2], np.ones((2, 3)), [1, 1], np.ones((2, 3))), "other_x"),
        (([1, 2], np.ones((2, 3)), [1, 2], np.ones((3, 3))), "other_y"),
    ],
)
def test_a_lead_names_bad_input(arguments, name):
    with pytest.raises(ValueError, match=rf"^{name}: got .*; expected "):
        scaling.lead(*arguments)
