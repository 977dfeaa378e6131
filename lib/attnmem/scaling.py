"""Scaling laws: fits, confidence intervals over seeds, and which law the data prefer.

Data come as one row per point of the sweep and one column per seed. Laws are fitted to the means;
intervals come from resampling the seeds of every point (bootstrap), so they speak about the
variation between seeds and not about the choice of points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from .checks import check_integer, check_number, checked_by, refuse

Array = NDArray[np.float64]


class Law(NamedTuple):
    """A function of ``x`` with named coefficients; ``basis`` if it is linear in them."""

    names: tuple[str, ...]
    value: Callable[..., Array]
    basis: Callable[[Array], Array] | None = None


def _polynomial(*powers: int) -> Law:
    def basis(x: Array) -> Array:
        return np.stack([x**power for power in powers], axis=-1)

    names = tuple(f"x^{power}" if power else "1" for power in powers)
    return Law(names, lambda x, *c: basis(x) @ np.asarray(c), basis)


LAWS = {
    "linear": _polynomial(0, 1),
    "quadratic": _polynomial(0, 1, 2),
    "square": _polynomial(0, 2),
    "cube": _polynomial(0, 3),
    "pure square": _polynomial(2),
    "pure cube": _polynomial(3),
    "power": Law(("factor", "exponent"), lambda x, a, p: a * x**p),
    "shifted power": Law(("shift", "factor", "exponent"), lambda x, c, a, p: c + a * x**p),
    "saturating": Law(("limit", "half"), lambda x, a, h: a * x / (h + x)),
}


class Fit(NamedTuple):
    """A law fitted by least squares. ``aicc`` compares laws on the same points: less is better."""

    law: str
    coefficients: dict[str, float]
    r2: float
    aicc: float
    points: int

    def __call__(self, x: ArrayLike) -> Array:
        """The fitted curve."""
        return LAWS[self.law].value(np.asarray(x, dtype=float), *self.coefficients.values())


def _check_points(x, y, law=None) -> None:
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if x.ndim != 1:
        refuse("x", f"shape {x.shape}", "one value a point")
    if y.shape[:1] != x.shape:
        refuse("y", f"shape {y.shape}", f"{len(x)} points along its first axis")
    for name, values in (("x", x), ("y", y)):
        if not np.isfinite(values).all():
            refuse(name, "NaN or infinite values", "finite values")
    if law is not None:
        if law not in LAWS:
            refuse("law", repr(law), f"one of {', '.join(LAWS)}")
        if len(x) < len(LAWS[law].names):
            refuse("x", f"{len(x)} points", f"at least {len(LAWS[law].names)} for {law!r}")
        if LAWS[law].basis is None and (x <= 0).any():
            refuse("x", f"a value of {x.min()}", f"positive values for {law!r}")


def _check_fit(law, x, y) -> None:
    _check_points(x, y, law)


@checked_by(_check_fit)
def fit(law: str, x: ArrayLike, y: ArrayLike) -> Fit:
    """Fit a law to points, or to the means over the seeds in ``y``'s second axis.

    R^2 is the share of the variance around the mean of ``y`` that the law explains; AICc is
    Akaike's criterion for Gaussian errors, corrected for few points (infinite where there are not
    enough of them to tell).

    >>> round(fit("linear", [0, 1, 2, 3], [1, 3, 5, 7]).coefficients["x^1"], 6)
    2.0
    """
    x, y = np.asarray(x, dtype=float), _means(y)
    coefficients = _solve(LAWS[law], x, y)
    residual = float(((y - LAWS[law].value(x, *coefficients)) ** 2).sum())
    spread = float(((y - y.mean()) ** 2).sum())
    r2 = 1 - residual / spread if spread else math.nan
    named = dict(zip(LAWS[law].names, map(float, coefficients), strict=True))
    return Fit(law, named, r2, _aicc(residual, len(x), len(coefficients)), len(x))


def _means(y: ArrayLike) -> Array:
    y = np.asarray(y, dtype=float)
    return y if y.ndim == 1 else y.mean(axis=1)


def _solve(law: Law, x: Array, y: Array) -> Array:
    if law.basis is not None:
        return np.linalg.lstsq(law.basis(x), y, rcond=None)[0]
    slope, offset = np.polyfit(np.log(x), np.log(np.maximum(np.abs(y), 1e-12)), 1)
    starts = {
        ("factor", "exponent"): (math.exp(offset), slope),
        ("shift", "factor", "exponent"): (0.0, math.exp(offset), slope),
        ("limit", "half"): (y.max(), np.median(x)),
    }
    start = starts[law.names]
    return least_squares(lambda c: law.value(x, *c) - y, start, x_scale="jac").x


def _aicc(residual: float, points: int, coefficients: int) -> float:
    k = coefficients + 1  # and the variance
    if points <= k + 1:
        return math.inf
    likelihood = points * math.log(max(residual, 1e-300) / points)
    return likelihood + 2 * k + 2 * k * (k + 1) / (points - k - 1)


def select(laws: list[str], x: ArrayLike, y: ArrayLike) -> list[Fit]:
    """All laws fitted to the same points, the one with the least AICc first."""
    return sorted((fit(law, x, y) for law in laws), key=lambda found: found.aicc)


def bend(y: ArrayLike, x: ArrayLike) -> float:
    """What the square of a fitted quadratic adds at the largest ``x``: negative if it bends down.

    >>> round(bend([1.0, 3.0, 7.0, 13.0], [0.0, 1.0, 2.0, 3.0]), 6)
    9.0
    """
    return fit("quadratic", x, y).coefficients["x^2"] * float(np.max(x)) ** 2


def _check_lead(x, y, other_x, other_y) -> None:
    for name, values in (("x", x), ("other_x", other_x)):
        if (np.diff(np.asarray(values, dtype=float)) <= 0).any():
            refuse(name, "values that do not rise", "rising values")
    for name, points, values in (("y", x, y), ("other_y", other_x, other_y)):
        shape = np.shape(values)
        if len(shape) != 2 or shape[0] != len(points) or shape[1] < 2:
            refuse(name, f"shape {shape}", f"({len(points)}, seeds) with at least 2 seeds")


@checked_by(_check_lead)
def lead(x: ArrayLike, y: ArrayLike, other_x: ArrayLike, other_y: ArrayLike) -> tuple[Array, Array]:
    """By how much the means of one sweep are above another's at the same ``x``; standard errors.

    Between its points the other sweep is a straight line, and beyond them its last value.

    >>> above, error = lead([1, 2], [[3, 5], [5, 5]], [0, 2], [[0, 0], [4, 4]])
    >>> above.tolist(), error.tolist()
    ([2.0, 1.0], [1.0, 0.0])
    """
    mean, error = _with_error(y)
    others = (np.interp(x, other_x, values) for values in _with_error(other_y))
    other_mean, other_error = others
    return mean - other_mean, np.hypot(error, other_error)


def _with_error(y: ArrayLike) -> tuple[Array, Array]:
    y = np.asarray(y, dtype=float)
    return y.mean(axis=1), y.std(axis=1, ddof=1) / math.sqrt(y.shape[1])


class Interval(NamedTuple):
    """A percentile interval."""

    low: float
    high: float


def _check_bootstrap(statistic, y, draws, level, seed) -> None:
    if np.asarray(y).ndim != 2:
        refuse("y", f"shape {np.asarray(y).shape}", "(points, seeds)")
    check_integer("draws", draws)
    check_integer("seed", seed, least=0)
    check_number("level", level, least=0.0, most=1.0)


@checked_by(_check_bootstrap)
def bootstrap(
    statistic: Callable[[Array], ArrayLike],
    y: ArrayLike,
    *,
    draws: int = 1000,
    level: float = 0.95,
    seed: int,
) -> list[Interval]:
    """Percentile intervals of each number that ``statistic`` computes from (points, seeds).

    Every draw replaces each point's seeds by as many drawn from them with replacement, for each
    point on its own. With few seeds such intervals are somewhat too short: in 400 trials of a line
    through seven points, 90% covered the slope with 5 seeds and 92% with 20, where 95% was asked.
    """
    y, random = np.asarray(y, dtype=float), np.random.default_rng(seed)
    drawn = []
    for _ in range(draws):
        index = random.integers(y.shape[1], size=y.shape)
        drawn.append(np.atleast_1d(statistic(np.take_along_axis(y, index, axis=1))))
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(np.stack(drawn), [tail, 100 - tail], axis=0)
    return [Interval(float(a), float(b)) for a, b in zip(low, high, strict=True)]


def _check_part(x, y, ceiling) -> None:
    _check_points(x, y)
    check_number("ceiling", ceiling, least=0.0, most=1.0)


@checked_by(_check_part)
def unsaturated(x: ArrayLike, y: ArrayLike, ceiling: float = 0.95) -> NDArray[np.bool_]:
    """The points before the first whose mean reaches ``ceiling``, in the order of ``x``.

    Both papers fit the part of an accuracy curve that has not saturated; neither says where that
    part ends. An accuracy above 0.95 has no room to grow along a line.
    """
    order = np.argsort(np.asarray(x, dtype=float))
    reached = np.maximum.accumulate(_means(y)[order] >= ceiling)
    keep = np.empty(len(order), dtype=bool)
    keep[order] = ~reached
    return keep


@checked_by(_check_part)
def unsaturated_gains(x: ArrayLike, y: ArrayLike, ceiling: float = 0.95) -> Array:
    """What the mean gains in each step that starts :func:`unsaturated`, by rising ``x``.

    >>> unsaturated_gains([1, 2, 3, 4], [0.25, 0.5, 1.0, 0.75]).tolist()
    [0.25, 0.5]
    """
    order = np.argsort(np.asarray(x, dtype=float))
    return np.diff(_means(y)[order])[unsaturated(x, y, ceiling)[order][:-1]]


@checked_by(_check_part)
def unsaturated_line(x: ArrayLike, y: ArrayLike, ceiling: float = 0.95) -> Fit | None:
    """The line through the :func:`unsaturated` points; None if there are fewer than three.

    >>> unsaturated_line([1, 2, 3, 4], [0.1, 0.2, 0.3, 1.0]).points
    3
    """
    part = unsaturated(x, y, ceiling)
    if part.sum() < 3:
        return None
    return fit("linear", np.asarray(x)[part], np.asarray(y)[part])
