"""Scaling laws: fits, confidence intervals over seeds, and which law the data prefer.

The data have one row for each point of a sweep and one column for each seed. Laws are fitted to the
means. Intervals come from resampling the seeds of every point (bootstrap), so they describe the
variation between seeds and not the choice of points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .checks import check_integer, check_number, check_seed, checked_by, refuse
from .laws import LAWS, Array, solve


class Fit(NamedTuple):
    """A law fitted by least squares.

    Attributes:
        law: Its name in ``LAWS``.
        coefficients: The fitted coefficients by name.
        r2: Share of the variance around the mean that the law explains; NaN if there is none.
        aicc: Akaike's criterion, which compares laws on the same points; less is better.
        points: Number of points.
    """

    law: str
    coefficients: dict[str, float]
    r2: float
    aicc: float
    points: int

    def __call__(self, x: ArrayLike) -> Array:
        """The fitted curve.

        Args:
            x: Places, of any shape.

        Returns:
            The values there, of the same shape.
        """
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
        if (places := len(np.unique(x))) < len(LAWS[law].names):
            refuse("x", f"{places} places", f"at least {len(LAWS[law].names)} for {law!r}")
        if LAWS[law].basis is None and (x <= 0).any():
            refuse("x", f"a value of {x.min()}", f"positive values for {law!r}")


def _check_fit(law, x, y) -> None:
    _check_points(x, y, law)


@checked_by(_check_fit)
def fit(law: str, x: ArrayLike, y: ArrayLike) -> Fit:
    """Fit a law to points, or to the means over seeds.

    AICc is Akaike's criterion for Gaussian errors, corrected for few points. It is infinite where
    there are too few points to tell.

    Args:
        law: A name in ``LAWS``.
        x: Places of the points, shape ``(points,)``; positive for a law that is not linear in its
            coefficients.
        y: Values, shape ``(points,)`` or ``(points, seeds)``.

    Returns:
        The fitted law.

    Raises:
        ValueError: If the law is unknown, the shapes differ, a value is not finite, or there are
            fewer different places than coefficients.

    Example:
        >>> fit("quadratic", [0.0, 1.0, 2.0, 3.0], [1.0, 3.0, 7.0, 13.0]).r2
        1.0
    """
    x, y = np.asarray(x, dtype=float), _means(y)
    coefficients = solve(LAWS[law], x, y)
    residual = float(((y - LAWS[law].value(x, *coefficients)) ** 2).sum())
    spread = float(((y - y.mean()) ** 2).sum())
    r2 = 1 - residual / spread if spread else math.nan
    named = dict(zip(LAWS[law].names, map(float, coefficients), strict=True))
    return Fit(law, named, r2, _aicc(residual, len(x), len(coefficients)), len(x))


def _means(y: ArrayLike) -> Array:
    y = np.asarray(y, dtype=float)
    return y if y.ndim == 1 else y.mean(axis=1)


def _aicc(residual: float, points: int, coefficients: int) -> float:
    k = coefficients + 1  # and the variance
    if points <= k + 1:
        return math.inf
    likelihood = points * math.log(max(residual, 1e-300) / points)
    return likelihood + 2 * k + 2 * k * (k + 1) / (points - k - 1)


def select(laws: list[str], x: ArrayLike, y: ArrayLike) -> list[Fit]:
    """Fit all the given laws to the same points.

    Args:
        laws: Names in ``LAWS``.
        x: As for :func:`fit`.
        y: As for :func:`fit`.

    Returns:
        The fits, the one with the least AICc first.

    Raises:
        ValueError: As for :func:`fit`.

    Example:
        >>> x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        >>> select(["linear", "square"], x, [1.0, 4.1, 9.0, 15.9, 25.0, 36.1, 49.0])[0].law
        'square'
    """
    return sorted((fit(law, x, y) for law in laws), key=lambda found: found.aicc)


def bend(y: ArrayLike, x: ArrayLike) -> float:
    """How much a fitted quadratic bends: its quadratic term at the largest ``x``.

    Args:
        y: Values, as for :func:`fit`.
        x: Places, as for :func:`fit`.

    Returns:
        The term, in units of ``y``; negative if the curve bends down.

    Raises:
        ValueError: As for :func:`fit`.

    Example:
        >>> round(bend([1.0, 3.0, 7.0, 13.0], [0.0, 1.0, 2.0, 3.0]), 6)
        9.0
    """
    return fit("quadratic", x, y).coefficients["x^2"] * float(np.max(x)) ** 2


def _check_lead(x, y, other_x, other_y) -> None:
    for name, values in (("x", x), ("other_x", other_x)):
        values = np.asarray(values, dtype=float)
        if not np.isfinite(values).all() or (np.diff(values) <= 0).any():
            refuse(name, "values that do not rise or are not finite", "rising, finite values")
    for name, points, values in (("y", x, y), ("other_y", other_x, other_y)):
        shape = np.shape(values)
        if len(shape) != 2 or shape[0] != len(points) or shape[1] < 2:
            refuse(name, f"shape {shape}", f"({len(points)}, seeds) with at least 2 seeds")
        if not np.isfinite(np.asarray(values, dtype=float)).all():
            refuse(name, "NaN or infinite values", "finite values")


@checked_by(_check_lead)
def lead(x: ArrayLike, y: ArrayLike, other_x: ArrayLike, other_y: ArrayLike) -> tuple[Array, Array]:
    """How far the means of one sweep lie above those of another, at the places of the first.

    Between its points the other sweep is taken to be a straight line, and beyond them its last
    value.

    Args:
        x: Places of the first sweep, rising.
        y: Its values, shape ``(points, seeds)`` with at least two seeds.
        other_x: Places of the other sweep, rising.
        other_y: Its values, shape ``(other points, seeds)`` with at least two seeds.

    Returns:
        The differences of the means, and their standard errors, both of shape ``(points,)``.

    Raises:
        ValueError: If places do not rise, the shapes do not fit, or a value is not finite.

    Example:
        >>> above, error = lead([1, 2], [[3, 5], [5, 5]], [0, 2], [[0, 0], [4, 4]])
        >>> above.tolist(), error.tolist()
        ([2.0, 1.0], [1.0, 0.0])
    """
    mean, error = _with_error(y)
    other_mean, other_error = _with_error(other_y)
    shares = [np.interp(x, other_x, one) for one in np.eye(len(other_mean))]  # of each other point
    between = np.sqrt(other_error**2 @ np.square(shares))
    return mean - other_mean @ np.asarray(shares), np.hypot(error, between)


def _with_error(y: ArrayLike) -> tuple[Array, Array]:
    y = np.asarray(y, dtype=float)
    return y.mean(axis=1), y.std(axis=1, ddof=1) / math.sqrt(y.shape[1])


class Interval(NamedTuple):
    """A percentile interval.

    Attributes:
        low: Its lower end.
        high: Its upper end.
    """

    low: float
    high: float


def _check_bootstrap(statistic, y, draws, level, seed) -> None:
    y = np.asarray(y)
    if y.ndim != 2 or 0 in y.shape:
        refuse("y", f"shape {y.shape}", "(points, seeds), at least one of each")
    check_integer("draws", draws)
    check_seed(seed)
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
    """Percentile intervals of each number that a statistic computes from all points and seeds.

    Every draw replaces the seeds of each point by as many drawn from them with replacement, each
    point on its own. With few seeds such intervals are somewhat too short. In 400 trials of a line
    through seven points, 95% intervals covered the slope in 90% of the trials with 5 seeds, and in
    92% with 20.

    Args:
        statistic: A function of an array of shape ``(points, seeds)`` that returns a number or a
            vector.
        y: Values, shape ``(points, seeds)``.
        draws: Number of draws.
        level: Share of the draws inside the interval, from 0 to 1.
        seed: Seed of the draws, at least 0.

    Returns:
        One interval for each number.

    Raises:
        ValueError: If ``y`` has not two axes with values, or another argument is out of range.

    Example:
        >>> bootstrap(lambda y: y.mean(), [[1.0, 1.0], [3.0, 3.0]], draws=10, seed=0)
        [Interval(low=2.0, high=2.0)]
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
    """Which points come before the first one whose mean reaches ``ceiling``, in the order of ``x``.

    Both papers fit the part of an accuracy curve that has not saturated. Neither text says where
    that part ends; the code of Dana et al. 2025 keeps the first point above 0.95, too. An accuracy
    above 0.95 has no room to grow along a line.

    Args:
        x: Places, shape ``(points,)``, in any order.
        y: Values, shape ``(points,)`` or ``(points, seeds)``.
        ceiling: Mean from which on a curve counts as saturated, from 0 to 1.

    Returns:
        True for each point of the unsaturated part, in the order of ``x`` as it is given.

    Raises:
        ValueError: If the shapes differ, a value is not finite, or ``ceiling`` is out of range.

    Example:
        >>> unsaturated([1, 2, 3, 4], [0.25, 0.5, 1.0, 0.75]).tolist()
        [True, True, False, False]
    """
    order = np.argsort(np.asarray(x, dtype=float))
    reached = np.maximum.accumulate(_means(y)[order] >= ceiling)
    keep = np.empty(len(order), dtype=bool)
    keep[order] = ~reached
    return keep


@checked_by(_check_part)
def unsaturated_gains(x: ArrayLike, y: ArrayLike, ceiling: float = 0.95) -> Array:
    """How much the mean gains in each step that starts at an :func:`unsaturated` point.

    Args:
        x: As for :func:`unsaturated`.
        y: As for :func:`unsaturated`.
        ceiling: As for :func:`unsaturated`.

    Returns:
        One difference of neighbouring means for each such step, by rising ``x``.

    Raises:
        ValueError: As for :func:`unsaturated`.

    Example:
        >>> unsaturated_gains([1, 2, 3, 4], [0.25, 0.5, 1.0, 0.75]).tolist()
        [0.25, 0.5]
    """
    order = np.argsort(np.asarray(x, dtype=float))
    return np.diff(_means(y)[order])[unsaturated(x, y, ceiling)[order][:-1]]


@checked_by(_check_part)
def unsaturated_line(x: ArrayLike, y: ArrayLike, ceiling: float = 0.95) -> Fit | None:
    """The line through the :func:`unsaturated` points.

    Args:
        x: As for :func:`unsaturated`.
        y: As for :func:`unsaturated`.
        ceiling: As for :func:`unsaturated`.

    Returns:
        The fitted line, or None if fewer than three points are unsaturated.

    Raises:
        ValueError: As for :func:`unsaturated`.

    Example:
        >>> unsaturated_line([1, 2, 3, 4], [0.1, 0.2, 0.3, 1.0]).points
        3
    """
    part = unsaturated(x, y, ceiling)
    if part.sum() < 3:
        return None
    return fit("linear", np.asarray(x)[part], np.asarray(y)[part])
