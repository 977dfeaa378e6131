"""Figures of what was measured: curves, laws, bounds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from .style import BLUE, CYCLE, GREY, STYLES, THEORY, labelled, plt, theory_lines

BAR = {"linewidth": 6, "alpha": 0.4, "solid_capstyle": "butt"}

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def curves_with_bands(
    curves: Mapping[str, pd.DataFrame],
    published: Mapping[str, tuple[ArrayLike, ArrayLike]],
    labels: tuple[str, str],
    ax: Axes | None = None,
) -> Axes:
    """Means over seeds within the range of the seeds, and published means as crosses.

    Args:
        curves: Curves by name. Each has one row for each point, indexed by its place on the axis,
            and one column for each seed. It is NaN where a seed was not run.
        published: Places and values by name.
        labels: Names of the two axes.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, *labels)
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(curves)))
    for colour, (name, seeds) in zip(colours, curves.items(), strict=True):
        x, low, high = seeds.index, seeds.min(axis=1), seeds.max(axis=1)
        ax.plot(x, seeds.mean(axis=1), "o-", color=colour, markersize=3, label=name)
        ax.fill_between(x, low, high, color=colour, alpha=0.25)
    for where, values in published.values():
        ax.plot(where, values, "x", color="black", markersize=7, markeredgewidth=1.5)
    if published:
        ax.plot([], [], "x", color="black", label="published")
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    return ax


def bounds_below(
    x: ArrayLike,
    measured: ArrayLike,
    bounds: Mapping[str, ArrayLike],
    labels: tuple[str, str],
    ax: Axes | None = None,
) -> Axes:
    """Measured means with the lower bounds of theory.

    Args:
        x: Places, common to all lines.
        measured: The means.
        bounds: Lower bounds by name.
        labels: Names of the two axes.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, *labels)
    ax.plot(x, measured, "o-", markersize=4, label="trained")
    theory_lines(ax, x, bounds)
    ax.legend()
    return ax


def laws(
    x: ArrayLike,
    y: ArrayLike,
    intervals: ArrayLike,
    fits: Mapping[str, tuple[ArrayLike, ArrayLike]],
    labels: tuple[str, str],
    ax: Axes | None = None,
) -> Axes:
    """Points with intervals, and the laws fitted to them (dashed).

    Args:
        x: Places of the points.
        y: Their values.
        intervals: Lower and upper end for each point.
        fits: Places and values of each law, by name.
        labels: Names of the two axes.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, *labels)
    low, high = np.asarray(intervals).T
    bars = np.stack([np.asarray(y) - low, high - np.asarray(y)]).clip(min=0)
    ax.errorbar(x, y, bars, fmt="o", markersize=4, capsize=3, label="measured")
    for (name, (where, values)), colour in zip(fits.items(), CYCLE[1:], strict=False):
        ax.plot(where, values, "--", color=colour, label=name)
    ax.legend()
    return ax


def capacities(
    x: ArrayLike,
    lines: Mapping[str, ArrayLike],
    built: Mapping[str, tuple[ArrayLike, ArrayLike]],
    labels: tuple[str, str],
    ax: Axes | None = None,
) -> Axes:
    """Formulas as lines, and the layers that were built as dots.

    Args:
        x: Places, common to all lines.
        lines: Values of the formulas by name.
        built: Places and values of the layers, by name.
        labels: Names of the two axes.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, *labels)
    theory_lines(ax, x, lines)
    for (name, (where, values)), marker in zip(built.items(), "os^", strict=False):
        ax.plot(where, values, marker, markersize=6, label=name)
    ax.legend()
    return ax


def between(
    x: ArrayLike,
    floor: tuple[str, ArrayLike],
    ceiling: tuple[str, ArrayLike],
    lower: Mapping[str, ArrayLike],
    labels: tuple[str, str],
    ax: Axes | None = None,
) -> Axes:
    """A band between what is reached and what cannot be passed, and weaker results below it.

    Both axes are logarithmic. Every line has its name at its right end.

    Args:
        x: Places, common to all lines, each marked on the axis.
        floor: Name and values of the lower edge of the band.
        ceiling: Name and values of its upper edge.
        lower: Values of at most three other lines by name, the highest first.
        labels: Names of the two axes.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, *labels)
    ax.fill_between(x, floor[1], ceiling[1], color=BLUE, alpha=0.25, linewidth=0)
    ends = {"xytext": (5, 0), "textcoords": "offset points", "annotation_clip": False}
    styles = ["-", "-", *STYLES]
    lines = [(*ceiling, BLUE, "bottom"), (*floor, BLUE, "center")]
    lines += [(name, y, GREY, "top") for name, y in lower.items()]
    for (name, y, colour, place), style in zip(lines, styles, strict=False):
        ax.plot(x, y, style, color=colour, linewidth=1.4)
        ax.annotate(name, (x[-1], y[-1]), va=place, fontsize=9, color=colour, **ends)
    ax.set(xscale="log", yscale="log", xticks=x, xticklabels=[str(place) for place in x])
    ax.minorticks_off()
    return ax


def curves(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    labels: tuple[str, str],
    ax: Axes | None = None,
) -> Axes:
    """Named lines with dots, each with places of its own.

    Args:
        series: Places and values by name.
        labels: Names of the two axes.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, *labels)
    for (name, (x, y)), marker in zip(series.items(), itertools.cycle("os^vDP"), strict=False):
        ax.plot(x, y, marker + "-", markersize=4, label=name)
    ax.legend(fontsize=8)
    return ax


def spans(
    lines: pd.DataFrame,
    label: str,
    marks: Mapping[str, str],
    limits: tuple[float, float],
    ax: Axes | None = None,
) -> Axes:
    """One line for each source on one logarithmic axis: a bar from its least to its largest value.

    Args:
        lines: One row for each source, from top to bottom, indexed by its name. Rows of one
            ``group``, which is written above them, stand together; ``low`` and ``high`` are the
            ends of the bar, with a dot at ``high``. Other columns hold one more value each, missing
            where there is none.
        label: Name of the axis.
        marks: From names in the legend to the column and the marker that they stand for, such as
            ``"high o"``.
        limits: Ends of the axis. A bar that begins below is cut, and an arrow says so.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, label, "")
    colours = dict(zip(dict.fromkeys(lines.group), CYCLE, strict=False))
    groups = (lines.group != lines.group.shift()).cumsum().to_numpy()
    heights = -(np.arange(len(lines)) + groups)
    for group in colours:
        top = heights[(lines.group == group).to_numpy()].max()
        ax.text(1.1 * limits[0], top + 0.65, group, fontsize=8, fontweight="bold")
    for height, row in zip(heights, lines.itertuples(), strict=True):
        colour, low = colours[row.group], max(row.low, limits[0])
        ax.plot([low, row.high], [height] * 2, color=colour, **BAR)
        ax.plot(row.high, height, "o", color=colour, markersize=7)
        if row.low < limits[0]:
            ax.plot(1.1 * limits[0], height, "<", color=colour, markersize=5)
    for name, mark in marks.items():
        column, marker = mark.split()
        where = [] if column == "high" else lines[column]
        tall = [] if column == "high" else heights
        ax.plot(where, tall, marker, color="black", fillstyle="none", label=name)
    ax.set(xscale="log", xlim=limits, yticks=heights, yticklabels=lines.index)
    ax.tick_params(axis="y", length=0, labelsize=8)
    ax.grid(axis="y", visible=False)
    ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.25, -0.1), ncols=len(marks))
    return ax


def shares_reached(
    names: Sequence[str],
    reached: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    marks: Mapping[str, Sequence[float]],
    labels: tuple[str, str],
    ax: Axes | None = None,
) -> Axes:
    """A line for each name: what was reached always and at best, and marks of theory.

    Several series are drawn one below the other on each line.

    Args:
        names: Of the lines, from top to bottom.
        reached: By name of the series, for each line the share that was always reached (a dot), and
            the largest that was ever reached (a ring). NaN where there is none.
        marks: Shares by name of the mark, one for each line.
        labels: Names of the two axes.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, *labels)
    places = np.arange(len(names))
    shifts = 0.15 * (np.arange(len(reached)) - (len(reached) - 1) / 2)
    for (name, (always, ever)), colour, shift in zip(reached.items(), CYCLE, shifts, strict=False):
        ax.hlines(places + shift, always, ever, color=colour, linewidth=1)
        ax.plot(ever, places + shift, "o", color=colour, markersize=7, markerfacecolor="none")
        ax.plot(always, places + shift, "o", color=colour, markersize=4, label=name)
    for (name, shares), marker in zip(marks.items(), ("|", "x"), strict=False):
        ax.plot(shares, places, marker, color="black", markersize=9, label=name)
    ax.axvline(1, **THEORY)
    ax.set_yticks(places, names, fontsize=8)
    ax.set_xlim(-0.02, 1.04)
    ax.invert_yaxis()
    ax.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    return ax
