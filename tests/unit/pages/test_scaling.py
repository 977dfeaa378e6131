"""Fits recover planted laws, intervals cover, the criterion picks the law behind the data."""

import math
from functools import partial

import numpy as np
import pandas as pd
import pytest

from attnmem.pages import scaling

X = np.array([1.0, 2, 3, 5, 7, 11, 13])


LITERAL = {  # coefficients by name, and the values at 2 and 3
    "linear": ({"1": 5, "x^1": 7}, [5 + 14, 5 + 21]),
    "quadratic": ({"1": 5, "x^1": -7, "x^2": 11}, [5 - 14 + 44, 5 - 21 + 99]),
    "square": ({"1": 5, "x^2": 7}, [5 + 28, 5 + 63]),
    "cube": ({"1": -5, "x^3": 7}, [-5 + 56, -5 + 189]),
    "pure square": ({"x^2": 5}, [20, 45]),
    "pure cube": ({"x^3": 5}, [40, 135]),
    "power": ({"factor": 5, "exponent": 3}, [40, 135]),
    "power and constant": ({"1": -7, "factor": 5, "exponent": 3}, [33, 128]),
    "saturating": ({"limit": 15, "half": 3}, [30 / 5, 45 / 6]),
}


@pytest.mark.parametrize("law", scaling.LAWS)
def test_fit_finds_the_coefficients_of_a_law(law):
    coefficients, values = LITERAL[law]
    assert scaling.LAWS[law].names == tuple(coefficients)
    found = scaling.FittedLaw(law, coefficients, 1.0, 0.0, 2)
    assert found([2, 3]).tolist() == values
    assert found(pd.Series([2, 3], dtype=object)).tolist() == values
    again = scaling.fit(law, X, found(X))
    assert again.coefficients == pytest.approx(coefficients, rel=1e-5, abs=1e-9)
    assert again.r2 == pytest.approx(1)


def test_linear_fit_against_the_textbook_formulas():
    y = np.array([2.0, 1, 4, 3, 8, 9, 16])
    slope = ((X - X.mean()) * (y - y.mean())).sum() / ((X - X.mean()) ** 2).sum()
    found = scaling.fit("linear", X, y)
    assert found.coefficients["x^1"] == pytest.approx(slope)
    assert found.r2 == pytest.approx(np.corrcoef(X, y)[0, 1] ** 2)
    residual = ((y - found(X)) ** 2).sum()
    assert found.aicc == pytest.approx(7 * math.log(residual / 7) + 6 + 24 / 3)
    assert [each.law for each in scaling.select(["cube", "square"], X, y)] == ["square", "cube"]
    seeds = y[:, None] + [-0.5, 0.25, 0.25]
    assert scaling.fit("linear", X, seeds) == found, "of the means over seeds"


def test_fit_of_too_few_points_has_no_aicc():
    assert scaling.fit("linear", [1, 2, 3, 4], [1, 2, 3, 5]).aicc == math.inf
    five = scaling.fit("linear", [1, 2, 3, 4, 5], [1, 2, 3, 5, 4])  # residual 1.9
    assert five.aicc == pytest.approx(5 * math.log(1.9 / 5) + 6 + 24 / 1)
    none = scaling.fit("quadratic", [1, 1, 2], [1, 2, 3])
    assert (none.points, none.aicc) == (3, math.inf)
    assert np.isnan([none.r2, *none.coefficients.values()]).all()
    two = scaling.fit("linear", [1, 3], [2, 8])
    assert (two.points, two.aicc) == (2, math.inf)
    assert two.coefficients == pytest.approx({"1": -1, "x^1": 3})


@pytest.mark.parametrize("unit", [1e-20, 1e-6, 1.0, 3e4, 1e8, 1e20])
@pytest.mark.parametrize("law", scaling.LAWS)
def test_fit_does_not_depend_on_the_unit(law, unit):
    """Powers of large numbers fill the digits of a float unless they are scaled."""
    y = np.array([0.9, 0.8, 0.75, 0.4, 0.35, 0.2, 0.05])
    one, other = scaling.fit(law, X, y), scaling.fit(law, unit * X, y)
    assert other.r2 == pytest.approx(one.r2, abs=1e-7)
    assert other(unit * X) == pytest.approx(one(X), rel=1e-4)


@pytest.mark.parametrize("y", [X**2, X**0.5, 1 / X, np.exp(-X), 1 + 0 * X, np.sin(X)])
@pytest.mark.parametrize("law", ["power", "power and constant", "saturating"])
def test_no_other_coefficients_are_closer(law, y):
    found = scaling.fit(law, X, y)
    residual = ((y - found(X)) ** 2).sum()
    random = np.random.default_rng(0)
    powers = random.uniform(-10, 10, 2000)
    for other in 10 ** random.uniform(-4, 6, 2000) if law == "saturating" else powers:
        linear = np.eye(len(found.coefficients) - 1)
        columns = np.stack([scaling.LAWS[law].value(X, *one, other) for one in linear], axis=1)
        columns /= columns.max(axis=0)
        closest = y - columns @ np.linalg.lstsq(columns, y)[0]
        assert residual <= (closest**2).sum() * (1 + 1e-9) + 1e-20


@pytest.mark.parametrize("exponent", [-12, -9.97, -9.93, 1.84, 1.86, 9.93, 9.97, 12])
def test_exponents_are_sought_from_minus_ten_to_ten(exponent):
    found = scaling.fit("power", X, X**exponent).coefficients["exponent"]
    assert found == pytest.approx(min(10, max(-10, exponent)), rel=1e-7)


def test_places_may_be_far_apart_or_zero():
    x = np.array([0.0, 0.01, 1, 100, 1e4, 1e7])
    found = scaling.fit("cube", x, 7 - 1e-20 * x**3)
    assert tuple(found.coefficients.values()) == pytest.approx((7, -1e-20))
    assert scaling.fit("pure square", [0.0], [2.0]).coefficients == {"x^2": 0}


@pytest.mark.parametrize("curve", [3.0, -0.5])
def test_quadratic_term_is_at_the_largest_place(curve):
    x = np.array([0.0, 1, 2, 4])
    assert scaling.quadratic_term(7 - 2 * x + curve * x**2, x) == pytest.approx(16 * curve)


def test_columns_of_objects_count_as_numbers():
    """As tables have them where a column holds whole numbers and missing values."""
    x, y = (pd.Series(values, dtype=object) for values in ([1, 2, 4, 5], [3, 5, 9, 11]))
    assert scaling.fit("linear", x, y).coefficients == pytest.approx({"1": 1, "x^1": 2})
    y = pd.DataFrame({0: [0.25, 0.5, 1, 1], 1: [0.25, 0.5, 1, 1]}, dtype=object)
    assert scaling.unsaturated(x, y).tolist() == [True, True, False, False]
    above, error = scaling.mean_difference(x, y, x, y * 2)
    assert (above.tolist(), error.tolist()) == ([-0.25, -0.5, -1, -1], [0] * 4)
    assert scaling.bootstrap(np.mean, y, draws=1, seed=0)


def test_bootstrap_draws_seeds_of_each_point():
    y = np.arange(5.0) + np.array([[0.0], [10.0]])
    seen = []

    def statistic(drawn):
        seen.append(drawn)
        return [drawn[0].mean(), drawn[1].max() - drawn[0].min()]

    intervals = scaling.bootstrap(statistic, y, draws=400, seed=0)
    drawn = np.stack(seen)
    spans = [scaling.bootstrap(np.std, y, draws=20, seed=seed) for seed in (0, 0, 1)]
    assert spans[0] == spans[1] != spans[2]
    assert drawn.shape == (400, 2, 5)
    values = drawn[:, 0].mean(axis=1), drawn[:, 1].max(axis=1) - drawn[:, 0].min(axis=1)
    for interval, each in zip(intervals, values, strict=True):
        assert interval == pytest.approx(np.quantile(each, (0.025, 0.975)), abs=1e-12)
    assert set(drawn[:, 0].flatten()) == set(range(5))
    assert set(drawn[:, 1].flatten()) == set(range(10, 15))
    repeated = np.mean([len(set(row)) < 5 for row in drawn[:, 0]])
    assert repeated == pytest.approx(1 - math.factorial(5) / 5**5, abs=0.05)
    together = np.mean(drawn[:, 0] + 10 == drawn[:, 1])
    assert together == pytest.approx(1 / 5, abs=0.05)  # 2,000 pairs: six standard deviations


def test_unsaturated_ends_at_the_first_high_point():
    accuracy = np.array([0.25, 0.5, 1.0, 0.75, 1.0])
    assert scaling.unsaturated(np.arange(5), accuracy).tolist() == [True, True, False, False, False]
    assert scaling.unsaturated_gains(np.arange(5), accuracy).tolist() == [0.25, 0.5]
    shuffled = np.array([3, 0, 4, 1, 2])
    assert scaling.unsaturated(shuffled, accuracy[shuffled]).tolist() == [0, 1, 0, 1, 0]
    assert scaling.unsaturated_gains(shuffled, accuracy[shuffled, None]).tolist() == [0.25, 0.5]
    at = [0.1, 0.2, math.nextafter(0.95, 0), 0.95]
    assert scaling.unsaturated(range(4), at).tolist() == [True, True, True, False]
    line = scaling.unsaturated_line([1, 2, 3, 4, 5], [0.2, 0.4, 0.6, 0.96, 0.99])
    assert line.points == 3
    assert line.coefficients["x^1"] == pytest.approx(0.2)


@pytest.mark.parametrize("y", [[0.2, 0.4, 0.96], [0.2, 0.96, 1.0], [0.96, 1.0, 1.0], [1, 1, 1]])
def test_a_saturated_curve_cannot_tell(y):
    x, seeds = np.arange(1.0, 4.0), np.repeat(np.array(y)[:, None], 2, axis=1)
    line = scaling.unsaturated_line(x, seeds)
    assert math.isnan(line.r2)
    assert scaling.rises_on_a_line(line) is None
    assert scaling.follows("square", x, seeds)[0] is None
    keep = scaling.unsaturated(x, seeds)
    for statistic in (scaling.exponent, scaling.quadratic_term):
        statistic = partial(statistic, x=x[keep])
        [span] = scaling.bootstrap(statistic, seeds[keep], draws=2, seed=0)
        assert math.isnan(span.low)


@pytest.mark.parametrize(
    ("y", "of"),
    [
        (lambda x: 0.1 + 0.8 * x, {"linear"}),
        (lambda x: 0.1 + 0.8 * x**2, {"square"}),
        (lambda x: 0.8 * x**2 - 0.01, {"square"}),
        (lambda x: 0.02 + 0.8 * x**3, set()),
        (lambda x: 0.01 * np.exp(4.5 * x), set()),
        (lambda x: 0.02 + 0.8 * x**1.3, {"linear"}),
        (lambda x: 0.02 + 0.8 * x**1.5, set()),
        (lambda x: 0.8 * x**0.5, set()),
        (lambda x: 0.9 - 0.8 * x, set()),
        (lambda x: 0.9 - 0.8 * x**2, set()),
        (lambda x: 0.3 + 0 * x, set()),
        (lambda x: 0.4 + 0.2 * np.sin(40 * x), set()),
        (lambda x: np.minimum(0.1 + 1.7 * x, 1), {"linear"}),
    ],
)
def test_follows_tells_a_line_from_a_square(y, of):
    """A law needs its exponent, too, so a cubic is no square, though nearer to it than to a line.

    Small noise keeps the criterion from comparing residuals of rounding.
    """
    x = np.arange(1, 11) / 10
    noisy = y(x) + 0.002 * np.random.default_rng(0).normal(size=10)
    holds = {law: scaling.follows(law, x, noisy)[0] for law in ("linear", "square")}
    assert {law for law, held in holds.items() if held} == of
    assert None not in holds.values()


def test_an_exponent_is_that_beside_a_constant():
    assert scaling.exponent(0.3 + 0.2 * X**1.7, X) == pytest.approx(1.7, abs=1e-6)
    assert scaling.exponent(0.3 - 0.2 * X**-0.5, X) == pytest.approx(-0.5, abs=1e-6)


def test_mean_difference_has_the_error_of_both():
    random = np.random.default_rng(0)
    x, y = np.arange(1.0, 6.0), random.normal(size=(5, 400)) + 3
    other = random.normal(scale=2.0, size=(5, 100)) + np.arange(1.0, 6.0)[:, None]
    above, error = scaling.mean_difference(x, y, x, other)
    np.testing.assert_allclose(above, y.mean(axis=1) - other.mean(axis=1))
    np.testing.assert_allclose(error, np.sqrt(1 / 400 + 4 / 100), rtol=0.2)
    halfway, _ = scaling.mean_difference([1.5], [[0.0, 0.0]], x, other)
    np.testing.assert_allclose(halfway, -other.mean(axis=1)[:2].mean())
    _, error = scaling.mean_difference([0.5], [[0, 0]], [0, 2], [[-1, 1], [-2, 2]])
    assert error == pytest.approx(math.hypot(0.75 * 1, 0.25 * 2))
    beyond, _ = scaling.mean_difference([9.0], [[0.0, 0.0]], x, other)
    np.testing.assert_allclose(beyond, -other.mean(axis=1)[-1])


ONES, COLUMN = np.ones((2, 3)), X[:, None]
INFINITE, MISSING = np.where(X == 5, math.inf, X), np.where(X == 5, math.nan, X)


@pytest.mark.parametrize(
    ("function", "arguments", "options", "name", "got"),
    [
        (scaling.fit, ("cubic", X, X), {}, "law", "'cubic'"),
        (scaling.follows, ("cubic", X, X), {}, "law", "'cubic'"),
        (scaling.fit, ("linear", X, X[1:]), {}, "y", r"shape \(6,\)"),
        (scaling.fit, ("power", [0.0, 1, 2], [0.0, 1, 2]), {}, "x", "a value of 0.0"),
        (scaling.fit, ("linear", X, MISSING), {}, "y", "NaN"),
        (scaling.fit, ("linear", INFINITE, X), {}, "x", "NaN or infinite"),
        (scaling.bootstrap, (np.mean, COLUMN), {"seed": 0, "draws": 0}, "draws", "0"),
        (scaling.bootstrap, (np.mean, X), {"seed": 0}, "y", r"shape \(7,\)"),
        (scaling.bootstrap, (np.mean, np.empty((3, 0))), {"seed": 0}, "y", r"shape \(3, 0\)"),
        (scaling.unsaturated_line, (COLUMN, X), {}, "x", r"shape \(7, 1\)"),
        (scaling.mean_difference, ([1, 1], ONES, [1, 2], ONES), {}, "x", "values that do not rise"),
        (scaling.mean_difference, ([1, 2], ONES, [1, 1], ONES), {}, "other_x", "values that do"),
        (scaling.mean_difference, ([1, 2], ONES[:, :1], [1, 2], ONES), {}, "y", r"shape \(2, 1\)"),
        (scaling.mean_difference, ([1, 2], ONES, [1, 2], ONES.T), {}, "other_y", r"shape \(3, 2\)"),
    ],
)
def test_scaling_refuses_bad_arguments(function, arguments, options, name, got):
    with pytest.raises(ValueError, match=rf"^{name}: got {got}"):
        function(*arguments, **options)


@pytest.mark.parametrize(
    ("y", "answer"),
    [([1, 2, 3.01], True), ([3, 2, 1], False), ([0, 0, 1], False), ([2, 2, 2], False)],
    ids=["a line", "falls", "bends", "flat"],
)
def test_a_line_has_to_rise_and_to_explain(y, answer):
    assert scaling.rises_on_a_line(scaling.fit("linear", [1, 2, 3], y)) is answer
    assert scaling.rises_on_a_line(scaling.unsaturated_line([1, 2], [0.1, 0.2])) is None
