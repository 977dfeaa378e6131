"""Drawing: data in, Axes out. Nothing here computes a result, and nothing is saved.

These are the drawings that several chapters share. Theory is drawn dashed, data as solid lines or
dots. The colours are those of Okabe and Ito, which colour-blind readers can tell apart. Captions
are in the chapters, so no figure has a title. ``labels`` are the names of the two axes, and a
dictionary has what is drawn by its name in the legend. By default ``ax`` is the current axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

try:
    import matplotlib.pyplot as plt
except ImportError as error:
    raise ImportError("attnmem.pages.figures needs matplotlib: pip install matplotlib") from error

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, "#E69F00", "#56B4E9")
THEORY = {"color": "black", "linestyle": "--", "linewidth": 1.2}
STYLES = ("--", ":", "-.", (0, (8, 2, 1, 2, 1, 2)))  # of theory, where there is more than one
MARKERS = "os^vDP"

Labels = tuple[str, str]  # of the horizontal and of the vertical axis
Lines = Mapping[str, ArrayLike]  # vertical values, by name
Points = Mapping[str, tuple[ArrayLike, ArrayLike]]  # horizontal and vertical values, by name


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


def _labelled(ax: Axes | None, labels: Labels) -> Axes:
    ax = ax or plt.gca()
    ax.set(xlabel=labels[0], ylabel=labels[1])
    return ax


def curves(series: Points, labels: Labels, ax: Axes | None = None) -> Axes:
    """Named lines with dots, of horizontal and vertical values each."""
    ax = _labelled(ax, labels)
    for (name, (x, y)), marker in zip(series.items(), itertools.cycle(MARKERS), strict=False):
        ax.plot(x, y, marker + "-", markersize=4, label=name)
    ax.legend(fontsize=8)
    return ax


def curves_with_bands(
    curves: Mapping[str, pd.DataFrame], published: Points, labels: Labels, ax: Axes | None = None
) -> Axes:
    """Means over seeds within the range of the seeds, and published means as crosses.

    A curve has a row for each point, indexed by its horizontal value, and a column for each seed,
    NaN where it was not run.
    """
    ax = _labelled(ax, labels)
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(curves)))
    for colour, (name, seeds) in zip(colours, curves.items(), strict=True):
        x, low, high = seeds.index, seeds.min(axis=1), seeds.max(axis=1)
        ax.plot(x, seeds.mean(axis=1), "o-", color=colour, markersize=3, label=name)
        ax.fill_between(x, low, high, color=colour, alpha=0.25)
    for x, y in published.values():
        ax.plot(x, y, "x", color="black", markersize=7, markeredgewidth=1.5)
    if published:
        ax.plot([], [], "x", color="black", label="published")
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    return ax


def formulas(
    x: ArrayLike, lines: Lines, points: Points, labels: Labels, ax: Axes | None = None
) -> Axes:
    """At most four formulas as lines over ``x``, and what was built or measured as dots."""
    ax = _labelled(ax, labels)
    for (name, y), style in zip(lines.items(), STYLES, strict=False):
        ax.plot(x, y, **THEORY | {"linestyle": style}, label=name)
    for (name, (where, values)), marker in zip(points.items(), MARKERS, strict=False):
        ax.plot(where, values, marker, markersize=5, label=name)
    ax.legend()
    return ax


def decay(
    x: ArrayLike, measured: Lines, predicted: Lines, labels: Labels, ax: Axes | None = None
) -> Axes:
    """Measured values as dots, on predicted lines where there are any, on a logarithmic axis."""
    ax = _labelled(ax, labels)
    for (name, y), colour, marker in zip(measured.items(), CYCLE, MARKERS, strict=False):
        ax.semilogy(x, y, marker, color=colour, markersize=4, label=name)
        if name in predicted:
            ax.semilogy(x, predicted[name], **THEORY)
    ax.legend()
    return ax


def between(
    x: ArrayLike,
    floor: tuple[str, ArrayLike],
    ceiling: tuple[str, ArrayLike],
    lower: Lines,
    labels: Labels,
    ax: Axes | None = None,
) -> Axes:
    """A band between what is reached and what cannot be passed, and weaker results below it.

    Both axes are logarithmic. Every line has its name at its right end; of at most three weaker
    results the highest comes first.
    """
    ax = _labelled(ax, labels)
    ax.fill_between(x, floor[1], ceiling[1], color=BLUE, alpha=0.25, linewidth=0)
    ends = {"xytext": (5, 0), "textcoords": "offset points", "annotation_clip": False}
    lines = [(*ceiling, BLUE, "bottom"), (*floor, BLUE, "center")]
    lines += [(name, y, GREY, "top") for name, y in lower.items()]
    for (name, y, colour, side), style in zip(lines, ("-", "-", *STYLES), strict=False):
        ax.plot(x, y, linestyle=style, color=colour, linewidth=1.4)
        ax.annotate(name, (x[-1], y[-1]), va=side, fontsize=9, color=colour, **ends)
    ax.set(xscale="log", yscale="log", xticks=x, xticklabels=[*map(str, x)])
    ax.minorticks_off()
    return ax


def spectra(
    values: Mapping[str, Float[Tensor, " k"]],
    tolerances: Mapping[str, float],
    ax: Axes | None = None,
) -> Axes:
    """Singular values, largest first, with the tolerance below which each counts as zero."""
    ax = _labelled(ax, ("index", "singular value"))
    for colour, (name, y) in zip(CYCLE, values.items(), strict=False):
        ax.semilogy(range(1, len(y) + 1), y, ".-", color=colour, label=name)
        ax.axhline(tolerances[name], color=colour, linestyle="--", linewidth=1)
        ax.annotate("tolerance", (1, tolerances[name]), color=colour, va="bottom", fontsize=8)
    ax.legend()
    return ax


def saturation_map(largest: Float[Tensor, "T H"], ax: Axes | None = None) -> Axes:
    """Largest attention weight of each head (row) on each example (column)."""
    ax = _labelled(ax, ("example", "head"))
    image = ax.imshow(largest.T.numpy(), aspect="auto", vmin=0, vmax=1)
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax, label=r"largest $\alpha_i$")
    return ax
