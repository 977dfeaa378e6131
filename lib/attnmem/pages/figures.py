"""What is drawn alike in several chapters: data in, Axes out; nothing is computed or saved.

Theory is drawn dashed, data as solid lines or dots, in colours of Okabe and Ito that colour-blind
readers can tell apart. Captions are in the chapters, so no figure has a title. A dictionary has
what is drawn by its name, which stands at the line's end. By default ``ax`` is the current axes.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from ..checks import need

if TYPE_CHECKING:
    from IPython.display import HTML
    from matplotlib.axes import Axes
    from pandas import DataFrame

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
CYCLE = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9")
THEORY = {"color": "black", "linestyle": "--", "linewidth": 1.2}
_MARKERS = "os^vDP"
_Axes = tuple[str, str]  # the names of the horizontal and of the vertical axis
_Points = Mapping[str, tuple[ArrayLike, ArrayLike]]  # horizontal and vertical values, by name


def use_style() -> None:
    """Set the book's look, ``style.toml``, for all figures that are drawn after this call."""
    look = tomllib.loads(resources.files(__package__).joinpath("style.toml").read_text("utf-8"))
    plt.rcParams.update(look | {"axes.prop_cycle": plt.cycler(color=CYCLE)})


def _labelled(ax: Axes | None, labels: _Axes) -> Axes:
    ax = ax or plt.gca()
    ax.set(xlabel=labels[0], ylabel=labels[1])
    return ax


def label_ends(ax: Axes | None = None) -> Axes:
    """Name each line that has a label beside its right end, instead of in a legend."""
    ax = ax or plt.gca()
    ax.figure.draw_without_rendering()  # now the places on paper are known
    lines = [line for line in ax.lines if not line.get_label().startswith("_")]
    drawn = [line.get_xydata() for line in lines]
    ends = [places[np.isfinite(places).all(axis=1)][-1] for places in drawn]
    ends = sorted(zip(lines, ends, strict=True), key=lambda end: end[1][1])
    points = 72 / ax.figure.dpi
    heights = [float(ax.transData.transform(end)[1]) * points for _, end in ends]
    apart = np.arange(len(ends)) * 1.2 * plt.rcParams["font.size"]
    free = isotonic_regression(heights - apart).x + apart if ends else []
    for (line, end), height, place in zip(ends, heights, free, strict=True):
        leads = {"arrowstyle": "-", "color": line.get_color(), "shrinkA": 0, "shrinkB": 2}
        offset = {"xytext": (14, place - height), "textcoords": "offset points", "va": "center"}
        ax.annotate(line.get_label(), end, **offset, arrowprops=leads, annotation_clip=False)
    return ax


def named_points(points: Sequence[tuple[Axes, float, float, str]]) -> HTML:
    """Words for each point of a figure, which a browser shows where the mouse rests.

    A point is its axes, its horizontal and vertical value, and its words. Call it when all else is
    drawn, before ``plt.show``, and let the next cell end with what it returns. Places are stored as
    shares of the picture, from its upper left.
    """
    fig = points[0][0].figure
    fig.draw_without_rendering()  # now the places on paper are known
    paper = fig.get_tightbbox().padded(plt.rcParams["savefig.pad_inches"])  # as notebooks cut it
    named = []
    for ax, x, y, words in points:
        place = ax.transData.transform((x, y))
        if ax.bbox.contains(*place):  # it is drawn
            right, up = (place / fig.dpi - paper.min) / paper.size
            named.append({"at": [round(right, 4), round(1 - up, 4)], "says": words})
    stored = json.dumps(named, ensure_ascii=False).replace("<", r"\u003c")  # closes no script
    script = f'<script type="application/json" class="points">{stored}</script>'
    return need("IPython.display").HTML(script)


def curves(series: _Points, labels: _Axes, ax: Axes | None = None) -> Axes:
    """Named lines with dots, of horizontal and vertical values each."""
    ax = _labelled(ax, labels)
    for (name, (x, y)), marker in zip(series.items(), itertools.cycle(_MARKERS), strict=False):
        ax.plot(x, y, marker + "-", markersize=4, label=name)
    return label_ends(ax)


def curves_with_bands(
    curves: Mapping[str, DataFrame], published: tuple | None, labels: _Axes, ax: Axes | None = None
) -> Axes:
    """Means over seeds within their range, and published means, if there are some, as crosses.

    A curve has a row for each point, indexed by its place, and a column for each seed or NaN.
    """
    ax = _labelled(ax, labels)
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(curves)))
    for colour, (name, seeds) in zip(colours, curves.items(), strict=True):
        x, low, high = seeds.index, seeds.min(axis=1), seeds.max(axis=1)
        ax.plot(x, seeds.mean(axis=1), "o-", color=colour, markersize=3, label=name)
        ax.fill_between(x, low, high, color=colour, alpha=0.25)
    if published is not None:
        ax.plot(*published, "x", color="black", markersize=7, markeredgewidth=1.5)
        ax.plot([], [], "x", color="black", label="published")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    return ax
