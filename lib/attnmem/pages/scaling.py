"""Scaling laws: fits, confidence intervals over seeds, and which law the data prefer.

The data ``y`` have one row for each point of a sweep, whose place is ``x``, and one column for each
seed; where the means are enough, they may have one axis. Laws are fitted to the means. Intervals
describe the variation between seeds and not the choice of points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from ..checks import Seed, checked, refuse

_Array = NDArray[np.float64]
_CEILING = 0.95  # an accuracy above it has no room to grow along a line


class _Law(NamedTuple):
    """A function of ``x`` with named coefficients."""

    names: tuple[str, ...]
    basis: Callable[..., _Array]  # what linear coefficients multiply: of x, and of the last one
    scan: Callable[[_Array], _Array] | None = None  # values of the last coefficient, rising

    def value(self, x: _Array, *coefficients: float) -> _Array:
        linear = len(coefficients) - (self.scan is not None)
        return self.basis(x, *coefficients[linear:]) @ np.asarray(coefficients[:linear])


def _polynomial(*powers: int) -> _Law:
    names = tuple(f"x^{power}" if power else "1" for power in powers)
    return _Law(names, lambda x: np.stack([x**power for power in powers], axis=-1))


_EXPONENTS = np.linspace(-10, 10, 81)
LAWS = {
    "linear": _polynomial(0, 1),
    "quadratic": _polynomial(0, 1, 2),
    "square": _polynomial(0, 2),
    "cube": _polynomial(0, 3),
    "pure square": _polynomial(2),
    "pure cube": _polynomial(3),
    "power": _Law(("factor", "exponent"), lambda x, p: x[..., None] ** p, lambda x: _EXPONENTS),
    "power and constant": _Law(
        ("1", "factor", "exponent"),
        lambda x, p: np.stack([x**0, x**p], axis=-1),
        lambda x: _EXPONENTS,
    ),
    "saturating": _Law(  # with a half at a million times the largest x it is a line
        ("limit", "half"),
        lambda x, half: (x / (half + x))[..., None],
        lambda x: x.max() * np.geomspace(1e-6, 1e6, 241),
    ),
}


def _least_squares(law: _Law, x: _Array, y: _Array) -> _Array:
    if law.scan is None:
        return _linear(law.basis(x), y)

    # The last coefficient is the best one near the best of those that are scanned.
    def coefficients(last: float) -> _Array:
        return np.append(_linear(law.basis(x, last), y), last)

    def residual(last: float) -> float:
        return ((y - law.value(x, *coefficients(last))) ** 2).sum()

    def neighbour(shift: float) -> float:
        return np.interp(best + shift, range(len(scanned)), scanned)

    scanned = law.scan(x)
    best = int(np.argmin([residual(last) for last in scanned]))
    least = scipy.optimize.minimize_scalar(lambda shift: residual(neighbour(shift)), bounds=(-1, 1))
    return coefficients(min(scanned[best], neighbour(least.x), key=residual))


def _linear(columns: _Array, y: _Array) -> _Array:
    scale = np.abs(columns).max(axis=0)  # powers of large numbers fill the digits of a float
    scale[scale == 0] = 1
    return np.linalg.lstsq(columns / scale, y, rcond=None)[0] / scale


class FittedLaw(NamedTuple):
    """A law fitted by least squares."""

    law: str  # its name in LAWS
    coefficients: dict[str, float]
    r2: float  # the share of the variance around the mean that it explains; NaN if there is none
    aicc: float  # Akaike's criterion, which compares laws on the same points; less is better
    points: int

    def __call__(self, x: ArrayLike) -> _Array:
        """The fitted curve at ``x``, of any shape."""
        return LAWS[self.law].value(np.asarray(x, dtype=float), *self.coefficients.values())


def _are_points(x: ArrayLike, y: ArrayLike, prefix: str = "") -> None:
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if x.ndim != 1:
        refuse(f"{prefix}x", f"shape {x.shape}", "one value a point")
    if y.shape[:1] != x.shape:
        refuse(f"{prefix}y", f"shape {y.shape}", f"{len(x)} points along its first axis")
    for name, values in (("x", x), ("y", y)):
        if not np.isfinite(values).all():
            refuse(f"{prefix}{name}", "NaN or infinite values", "finite values")


def fit(law: str, x: ArrayLike, y: ArrayLike) -> FittedLaw:
    """Fit a law of :data:`LAWS` to points, or to the means over seeds.

    AICc is Akaike's criterion for Gaussian errors, corrected for few points, and infinite where
    these are too few to tell. With fewer different ``x`` than coefficients, as on a curve that is
    saturated from its start, all numbers are NaN. A law that is not linear in its coefficients
    takes positive ``x``.
    """
    _are_points(x, y)
    if law not in LAWS:
        refuse("law", repr(law), f"one of {', '.join(LAWS)}")
    shape = LAWS[law]
    x, y = np.asarray(x, dtype=float), _means(y)
    if shape.scan and (x <= 0).any():
        refuse("x", f"a value of {x.min()}", f"positive values for {law!r}")
    if len(np.unique(x)) < len(shape.names):
        return FittedLaw(law, dict.fromkeys(shape.names, math.nan), math.nan, math.inf, len(x))
    coefficients = _least_squares(shape, x, y)
    residual = float(((y - shape.value(x, *coefficients)) ** 2).sum())
    spread = float(((y - y.mean()) ** 2).sum())
    r2 = 1 - residual / spread if spread else math.nan
    named = dict(zip(shape.names, map(float, coefficients), strict=True))
    points, k = len(x), len(coefficients) + 1  # and the variance
    if points <= k + 1:
        return FittedLaw(law, named, r2, math.inf, points)
    likelihood = points * math.log(max(residual, 1e-300) / points)
    aicc = likelihood + 2 * k + 2 * k * (k + 1) / (points - k - 1)
    return FittedLaw(law, named, r2, aicc, points)


def _means(y: ArrayLike) -> _Array:
    y = np.asarray(y, dtype=float)
    return y if y.ndim == 1 else y.mean(axis=1)


def select(laws: list[str], x: ArrayLike, y: ArrayLike) -> list[FittedLaw]:
    """Fit all the given laws to the same points; the fit with the least AICc comes first."""
    return sorted((fit(law, x, y) for law in laws), key=lambda fitted: fitted.aicc)


def quadratic_term(y: ArrayLike, x: ArrayLike) -> float:
    """The quadratic term of a fitted quadratic at the largest ``x``, negative if it bends down."""
    x = np.asarray(x, dtype=float)
    return fit("quadratic", x, y).coefficients["x^2"] * float(x.max(initial=0)) ** 2


def exponent(y: ArrayLike, x: ArrayLike) -> float:
    """The exponent of a fitted power and constant: near one for a line, above it for a bend up."""
    return fit("power and constant", x, y).coefficients["exponent"]


def follows(law: str, x: ArrayLike, y: ArrayLike) -> tuple[bool | None, str]:
    """Whether an unsaturated curve follows ``linear`` or ``square``, and the numbers in words.

    Dana et al. 2025 fit these two to accuracies in the width. The law rises, explains 98% of the
    variance and leads the other by ten in AICc; and the exponent of the best power with a constant,
    rounded, is one or two. None where too few points are below saturation.
    """
    if law not in ("linear", "square"):
        refuse("law", repr(law), "linear or square")
    keep = unsaturated(x, y)
    x, y = np.asarray(x, dtype=float)[keep], _means(y)[keep]
    rival, degree = ("square", 1) if law == "linear" else ("linear", 2)
    fitted, power = fit(law, x, y), exponent(y, x)
    lead = fit(rival, x, y).aicc - fitted.aicc
    factor = fitted.coefficients[f"x^{degree}"]
    holds = None
    if fitted.aicc < math.inf:
        leads = factor > 0 and fitted.r2 >= 0.98 and lead >= 10
        holds = bool(leads and abs(power - degree) < 0.5)
    names = {"linear": "a line", "square": "a square with a constant"}
    text = f"{names[law]} has R2 {fitted.r2:.3f} (0.98 asked) and leads {names[rival]} by "
    text += f"{lead:.0f} in AICc (10 asked); exponent {power:.2f} (rounded to {degree} asked)"
    return holds, text


def mean_difference(
    x: ArrayLike, y: ArrayLike, other_x: ArrayLike, other_y: ArrayLike
) -> tuple[_Array, _Array]:
    """How far the means of one sweep lie above another's at its own ``x``, and standard errors.

    Between its points the other sweep is taken to be a straight line, and beyond them its last
    value. Both have rising ``x`` and at least two seeds.
    """
    for prefix, places, values in (("", x, y), ("other_", other_x, other_y)):
        _are_points(places, values, prefix)
        if (np.diff(np.asarray(places, dtype=float)) <= 0).any():
            refuse(f"{prefix}x", "values that do not rise", "rising values")
        if np.ndim(values) != 2 or np.shape(values)[1] < 2:
            got = f"shape {np.shape(values)}"
            refuse(f"{prefix}y", got, "(points, seeds) with at least 2 seeds")
    y, other_y = np.asarray(y, dtype=float), np.asarray(other_y, dtype=float)
    error, other_error, other_mean = _standard_error(y), _standard_error(other_y), _means(other_y)
    units = np.eye(len(other_mean))
    shares = np.asarray([np.interp(x, other_x, unit) for unit in units])  # of each other point
    error_between = np.sqrt(other_error**2 @ np.square(shares))
    return _means(y) - other_mean @ shares, np.hypot(error, error_between)


def _standard_error(y: _Array) -> _Array:
    return y.std(axis=1, ddof=1) / math.sqrt(y.shape[1])


class Interval(NamedTuple):
    """The ends of an interval."""

    low: float
    high: float


@checked
def bootstrap(
    statistic: Callable[[_Array], ArrayLike], y: ArrayLike, *, draws: int = 1000, seed: Seed
) -> list[Interval]:
    """95% percentile intervals of each number that a statistic computes from all points and seeds.

    Every draw replaces the seeds of each point by as many drawn from them with replacement, each
    point on its own. The ``statistic`` maps an array of shape ``(points, seeds)`` to a number or a
    vector. With few seeds such intervals are somewhat too short: in 400 trials of a line through
    seven points, 95% intervals covered the slope in 90% of the trials with 5 seeds, 92% with 20.
    """
    if np.ndim(y) != 2 or not np.shape(y)[1]:
        refuse("y", f"shape {np.shape(y)}", "(points, seeds) with at least one seed")
    y = np.asarray(y, dtype=float)
    seeds = np.random.default_rng(seed).integers(y.shape[1], size=(draws, *y.shape))
    samples = (np.take_along_axis(y, index, axis=1) for index in seeds)
    values = np.stack([np.atleast_1d(statistic(sample)) for sample in samples])
    low, high = np.percentile(values, [2.5, 97.5], axis=0)
    return [Interval(*map(float, ends)) for ends in zip(low, high, strict=True)]


def unsaturated(x: ArrayLike, y: ArrayLike) -> NDArray[np.bool_]:
    """Which points come before the first one whose mean reaches 0.95, in the order of ``x``.

    Both papers fit the part of an accuracy curve that has not saturated, and neither text says
    where that ends; the code of Dana et al. 2025 keeps the first point above 0.95, too.
    """
    _are_points(x, y)
    order = np.argsort(np.asarray(x, dtype=float))
    reached = np.maximum.accumulate(_means(y)[order] >= _CEILING)
    return ~reached[np.argsort(order)]


def unsaturated_gains(x: ArrayLike, y: ArrayLike) -> _Array:
    """How much the mean gains in each step that starts at an :func:`unsaturated` point."""
    order = np.argsort(np.asarray(x, dtype=float))
    return np.diff(_means(y)[order])[unsaturated(x, y)[order][:-1]]


def all_rise(gains: _Array) -> bool | None:
    """Whether all :func:`unsaturated_gains` are positive; None on a curve that has none."""
    if len(gains) == 0:
        return None
    return bool(gains.min() > 0)


def unsaturated_line(x: ArrayLike, y: ArrayLike) -> FittedLaw:
    """The line through the :func:`unsaturated` points, of NaN if there are fewer than three."""
    keep = unsaturated(x, y)
    if keep.sum() <= 2:
        keep[:] = False
    return fit("linear", np.asarray(x)[keep], np.asarray(y)[keep])


def rises_on_a_line(line: FittedLaw) -> bool | None:
    """Whether a line through at least three points rises and explains 98% of the variance."""
    if line.points <= 2:
        return None
    return line.coefficients["x^1"] > 0 and line.r2 >= 0.98
