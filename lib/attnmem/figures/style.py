"""The book's look, and what several figures share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

try:
    import matplotlib.pyplot as plt
except ImportError as error:
    raise ImportError("attnmem.figures needs matplotlib: pip install matplotlib") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, "#E69F00", "#56B4E9")
STYLES = ("--", ":", "-.", (0, (8, 2, 1, 2, 1, 2)))  # of theory, where there is more than one
THEORY = {"color": "black", "linestyle": "--", "linewidth": 1.2}


def use_style() -> None:
    """Set the book's look for all figures that are drawn after this call."""
    plt.rcParams.update(
        {
            "axes.grid": True,
            "axes.prop_cycle": plt.cycler(color=CYCLE),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "figure.dpi": 144,
            "figure.figsize": (6.0, 3.4),
            "figure.constrained_layout.use": True,
            "font.size": 10,
            "grid.alpha": 0.3,
            "image.cmap": "cividis",
            "legend.frameon": False,
        }
    )


def labelled(ax: Axes | None, x: str, y: str) -> Axes:
    """The given axes, or the current ones, with a name for each axis.

    Args:
        ax: Axes to draw into, or None for the current ones.
        x: Name of the horizontal axis.
        y: Name of the vertical axis.

    Returns:
        The axes.
    """
    ax = ax or plt.gca()
    ax.set(xlabel=x, ylabel=y)
    return ax


def marked(
    ax: Axes,
    draw: Callable,
    x: ArrayLike,
    values: Mapping[str, ArrayLike],
    marks: Mapping[str, int | float],
) -> Axes:
    """Draw series, and mark places on the horizontal axis that theory names.

    Args:
        ax: Axes to draw into.
        draw: A method of them, such as ``ax.plot``.
        x: Places, common to all series.
        values: Series by name.
        marks: Places to mark, by name.

    Returns:
        The axes.
    """
    for (name, series), marker in zip(values.items(), "os^", strict=False):
        draw(x, series, marker + "-", markersize=4, label=name)
    for (name, where), style in zip(marks.items(), STYLES, strict=False):
        ax.axvline(where, **THEORY | {"linestyle": style}, label=name)
    ax.legend()
    return ax


def theory_lines(ax: Axes, x: ArrayLike, lines: Mapping[str, ArrayLike]) -> None:
    """Draw formulas as lines, each with a line style of its own.

    Args:
        ax: Axes to draw into.
        x: Places, common to all lines.
        lines: Values by name.
    """
    for (name, values), style in zip(lines.items(), STYLES, strict=False):
        ax.plot(x, values, **THEORY | {"linestyle": style}, label=name)
