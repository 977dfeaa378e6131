"""Laws that curves may follow, and their coefficients by least squares."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Law(NamedTuple):
    """A function of ``x`` with named coefficients.

    Attributes:
        names: The coefficients.
        value: The function of ``x`` and of the coefficients, in this order.
        basis: For a law that is linear in its coefficients, the functions that they multiply, along
            the last axis. None for any other law.
        scan: For any other law, which has a factor and one more coefficient, the values of the
            latter that are tried for given places, rising. The fit lies between the ends.
    """

    names: tuple[str, ...]
    value: Callable[..., Array]
    basis: Callable[[Array], Array] | None = None
    scan: Callable[[Array], Array] | None = None


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
    "power": Law(
        ("factor", "exponent"),
        lambda x, a, p: a * x**p,
        scan=lambda x: np.linspace(-10, 10, 201),
    ),
    "saturating": Law(  # at a million times the largest place it is a line
        ("limit", "half"),
        lambda x, a, h: a * x / (h + x),
        scan=lambda x: x.max() * np.geomspace(1e-6, 1e6, 241),
    ),
}


def solve(law: Law, x: Array, y: Array) -> Array:
    """The coefficients with the least sum of squared distances.

    Args:
        law: A law.
        x: Places, shape ``(points,)``, at least as many different ones as there are coefficients.
        y: Values, shape ``(points,)``.

    Returns:
        The coefficients, in the order of the law's names.
    """
    if law.basis is None:
        return _scanned(law, x, y)
    return _linear(law.basis(x), y)


def _linear(columns: Array, y: Array) -> Array:
    """The coefficients of columns of any size."""
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1
    return np.linalg.lstsq(columns / scale, y, rcond=None)[0] / scale


def _scanned(law: Law, x: Array, y: Array) -> Array:
    """The factor is linear; the other coefficient is the best one near the best that is tried."""

    def factor(other: float) -> float:
        return _linear(law.value(x, 1.0, other)[:, None], y)[0]

    def residual(other: float) -> float:
        return ((y - law.value(x, factor(other), other)) ** 2).sum()

    tried = law.scan(x)
    best = int(np.argmin([residual(other) for other in tried]))

    def beside(shift: float) -> float:
        return np.interp(best + shift, range(len(tried)), tried)

    beneath = scipy.optimize.minimize_scalar(lambda shift: residual(beside(shift)), bounds=(-1, 1))
    other = min(tried[best], beside(beneath.x), key=residual)
    return np.array([factor(other), other])
