"""Drawing: data in, Axes out. Nothing here computes a result, and nothing is saved.

Theory is dashed, data are solid or dots; the colours can be told apart by colour-blind readers
(Okabe and Ito's palette). Captions live in the chapters, so no figure has a title.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

try:
    import matplotlib.pyplot as plt
except ImportError as error:
    raise ImportError("attnmem.figures needs matplotlib: pip install matplotlib") from error

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, "#E69F00", "#56B4E9")
STYLES = ("--", ":", "-.")  # of theory, where there is more than one
THEORY = {"color": "black", "linestyle": "--", "linewidth": 1.2}


def use_style() -> None:
    """The book's look, for all figures drawn after this call."""
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


def _axes(ax: Axes | None, x: str, y: str) -> Axes:
    ax = ax or plt.gca()
    ax.set(xlabel=x, ylabel=y)
    return ax


def sharpening(
    scales: Float[Tensor, " scales"], alpha: Float[Tensor, "scales n"], ax: Axes | None = None
) -> Axes:
    """Attention on each token against the scale of the logits."""
    ax = _axes(ax, "scale $c$ of the logits", r"attention weight $\alpha_i$")
    for token, weights in enumerate(alpha.numpy().T, start=1):
        ax.semilogx(scales.numpy(), weights, label=f"token {token}")
    ax.legend()
    return ax


def attended_path(
    tokens: Float[Tensor, "n 2"], path: Float[Tensor, "steps 2"], ax: Axes | None = None
) -> Axes:
    """The attended vector ``z`` moving inside the triangle, square, ... of its tokens."""
    ax = _axes(ax, "first coordinate", "second coordinate")
    ax.fill(*tokens.numpy().T, color=GREY, alpha=0.15, linewidth=0)
    for token, (x, y) in enumerate(tokens.tolist()):
        ax.plot(x, y, "o", color=CYCLE[token], markersize=8)
        ax.annotate(f"token {token + 1}", (x, y), textcoords="offset points", xytext=(6, 6))
    ax.plot(*path.numpy().T, color="black", label=r"$z = E^\top \alpha$")
    ax.margins(0.2)
    ax.legend(loc="lower left")
    return ax


def spectra(
    values: Mapping[str, Float[Tensor, " k"]],
    tolerances: Mapping[str, float],
    ax: Axes | None = None,
) -> Axes:
    """Singular values, largest first, with the tolerance below which each is counted as zero."""
    ax = _axes(ax, "index", "singular value")
    for colour, (name, series) in zip(CYCLE, values.items(), strict=False):
        ax.semilogy(range(1, len(series) + 1), series.numpy(), ".-", color=colour, label=name)
        ax.axhline(tolerances[name], color=colour, linestyle="--", linewidth=1)
        ax.annotate("tolerance", (1, tolerances[name]), color=colour, va="bottom", fontsize=8)
    ax.legend()
    return ax


def detection(
    sizes: Sequence[int],
    expected: Sequence[float],
    observed: Sequence[float],
    ax: Axes | None = None,
) -> Axes:
    """Probability that the sampled test meets a planted dependency, against its size."""
    ax = _axes(ax, "size of the planted dependent set", "chance that a test finds it")
    ax.plot(sizes, expected, **THEORY, label="exact probability")
    ax.plot(sizes, observed, "o", color=BLUE, label="observed")
    ax.legend()
    return ax


def rank_staircase(
    heads: Sequence[int],
    ranks: Mapping[str, Sequence[int]],
    predicted: Mapping[str, Sequence[int]],
    ax: Axes | None = None,
) -> Axes:
    """Rank of the first heads' features as heads are added, on its predicted line."""
    ax = _axes(ax, "heads used", "rank of $Z$")
    for (name, series), marker in zip(ranks.items(), "os^", strict=False):
        ax.plot(heads, predicted[name], **THEORY)
        ax.plot(heads, series, marker, markersize=5, label=name)
    ax.legend()
    return ax


def saturation_map(largest: Float[Tensor, "T H"], ax: Axes | None = None) -> Axes:
    """Largest attention weight of each head (row) on each example (column)."""
    ax = _axes(ax, "example", "head")
    image = ax.imshow(largest.numpy().T, aspect="auto", vmin=0, vmax=1)
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax, label=r"largest $\alpha_i$")
    return ax


def memorized(
    labels: Float[Tensor, " T"], outputs: Mapping[str, Float[Tensor, " T"]], ax: Axes | None = None
) -> Axes:
    """Outputs of several models against the labels, on the diagonal where memorized."""
    ax = _axes(ax, "label", "output")
    ends = [float(labels.min()), float(labels.max())]
    ax.plot(ends, ends, **THEORY, label="output = label")
    for name, series in outputs.items():
        ax.plot(labels.numpy(), series.numpy(), ".", markersize=3, label=name)
    ax.legend()
    return ax


def residual_cliff(
    examples: Sequence[int],
    residuals: Mapping[str, Sequence[float]],
    capacity: int,
    ax: Axes | None = None,
) -> Axes:
    """Error of the best read-out against the number of examples, with the capacity marked."""
    ax = _axes(ax, "examples $T$", "root mean square error")
    return _marked(ax, ax.plot, examples, residuals, {f"capacity {capacity}": capacity})


def _marked(
    ax: Axes,
    draw: Callable,
    x: ArrayLike,
    values: Mapping[str, ArrayLike],
    marks: Mapping[str, int | float],
) -> Axes:
    """Series drawn by ``draw``, and places on the axis marked by theory."""
    for (name, series), marker in zip(values.items(), "os^", strict=False):
        draw(x, series, marker + "-", markersize=4, label=name)
    for (name, where), style in zip(marks.items(), STYLES, strict=False):
        ax.axvline(where, **THEORY | {"linestyle": style}, label=name)
    ax.legend()
    return ax


def _theory_lines(ax: Axes, x: ArrayLike, lines: Mapping[str, ArrayLike]) -> None:
    for (name, values), style in zip(lines.items(), STYLES, strict=False):
        ax.plot(x, values, **THEORY | {"linestyle": style}, label=name)


def curves_with_bands(
    curves: Mapping[str, pd.DataFrame],
    published: Mapping[str, tuple[ArrayLike, ArrayLike]],
    labels: tuple[str, str],
    ax: Axes | None = None,
) -> Axes:
    """Means over seeds in the range between them; published means as crosses.

    A curve has one row per point, indexed by its place on the axis, and one column per seed; where
    a seed was not run, NaN.
    """
    ax = _axes(ax, *labels)
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
    """Measured means above the theoretical lower bounds."""
    ax = _axes(ax, *labels)
    ax.plot(x, measured, "o-", markersize=4, label="trained")
    _theory_lines(ax, x, bounds)
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
    """Points with intervals, and the laws fitted to them (dashed)."""
    ax = _axes(ax, *labels)
    low, high = np.asarray(intervals).T
    bars = np.stack([np.asarray(y) - low, high - np.asarray(y)]).clip(min=0)
    ax.errorbar(x, y, bars, fmt="o", markersize=4, capsize=3, label="measured")
    for (name, (where, values)), colour in zip(fits.items(), CYCLE[1:], strict=False):
        ax.plot(where, values, "--", color=colour, label=name)
    ax.legend()
    return ax


def logit_fan(
    scales: Float[Tensor, " scales"],
    logits: Mapping[str, Float[Tensor, "scales n"]],
    ax: Axes | None = None,
) -> Axes:
    """Logits of all tokens against the scale, one colour per example."""
    ax = _axes(ax, "scale $c$", "logit, less the mean")
    for colour, (name, series) in zip(CYCLE, logits.items(), strict=False):
        centred = (series - series.mean(dim=1, keepdim=True)).numpy()
        ax.plot(scales.numpy(), centred, color=colour)
        ax.plot([], [], color=colour, label=name)
    ax.legend()
    return ax


def logit_map(logits: Float[Tensor, "T n"], ax: Axes | None = None) -> Axes:
    """Logits of every token (row) on every example (column), zero in white."""
    ax = _axes(ax, "example", "token")
    size = float(logits.abs().max())
    image = ax.imshow(logits.numpy().T, cmap="RdBu", aspect="auto", vmin=-size, vmax=size)
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax, label="logit")
    return ax


def decay(
    x: ArrayLike,
    measured: Mapping[str, ArrayLike],
    predicted: Mapping[str, ArrayLike],
    labels: tuple[str, str],
    ax: Axes | None = None,
) -> Axes:
    """Measured dots on predicted lines, on a logarithmic axis."""
    ax = _axes(ax, *labels)
    for (name, series), colour, marker in zip(measured.items(), CYCLE, "os^vDP", strict=False):
        ax.semilogy(x, series, marker, color=colour, markersize=4, label=name)
        if name in predicted:
            ax.semilogy(x, predicted[name], **THEORY)
    ax.legend()
    return ax


def finite_scale(
    scales: ArrayLike,
    values: Mapping[str, ArrayLike],
    marks: Mapping[str, int | float],
    ax: Axes | None = None,
) -> Axes:
    """Quantities against the saturation scale, both logarithmic, with scales of interest marked."""
    ax = _axes(ax, "scale $c$", "value")
    return _marked(ax, ax.loglog, scales, values, marks)


def capacities(
    x: ArrayLike,
    lines: Mapping[str, ArrayLike],
    built: Mapping[str, tuple[ArrayLike, ArrayLike]],
    labels: tuple[str, str],
    ax: Axes | None = None,
) -> Axes:
    """Formulas as lines, and the layers really built as dots."""
    ax = _axes(ax, *labels)
    _theory_lines(ax, x, lines)
    for (name, (where, values)), marker in zip(built.items(), "os^", strict=False):
        ax.plot(where, values, marker, markersize=6, label=name)
    ax.legend()
    return ax


def curves(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    labels: tuple[str, str],
    ax: Axes | None = None,
) -> Axes:
    """Named lines of dots, each with an axis of its own."""
    ax = _axes(ax, *labels)
    for (name, (x, y)), marker in zip(series.items(), itertools.cycle("os^vDP"), strict=False):
        ax.plot(x, y, marker + "-", markersize=4, label=name)
    ax.legend(fontsize=8)
    return ax


def wiring(shared: bool, ax: Axes | None = None) -> Axes:
    """How heads meet the residual stream: with maps of their own, or with two that all share."""
    ax = ax or plt.gca()
    head = "$(d_h, d_h)$" if shared else "$(d_h, d)$"
    level = 0.0
    boxes = [(1.5, level, r"residual stream $x \in \mathbb{R}^d$", GREY)]
    if shared:
        boxes.append((1.5, level := level + 1, r"one map $d \to d_h$ for all heads", ORANGE))
    heads = level + 1.2
    boxes += [
        (place, heads, f"head {name}\n$W_Q, W_K, W_V$:\n{head}", BLUE)
        for place, name in ((0.5, 1), (1.5, 2), (2.5, "H"))
    ]
    level = heads + 1.2
    back = r"one map $d_h \to d$ for all heads" if shared else r"sum of $W_O^h$, each $(d, d_h)$"
    boxes.append((1.5, level, back, ORANGE if shared else BLUE))
    boxes.append((1.5, level + 1, "add to the residual stream", GREY))
    for x, y, text, colour in boxes:
        style = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": colour}
        ax.text(x, y, text, ha="center", va="center", fontsize=8, bbox=style | {"linewidth": 1.4})
    arrow = {"arrowstyle": "->", "color": "black", "shrinkA": 12, "shrinkB": 12}
    for place in (0.5, 1.5, 2.5):
        for start, end in (((1.5, heads - 1.2), (place, heads)), ((place, heads), (1.5, level))):
            wide = arrow | {"shrinkB": 24} if end[1] == heads else arrow | {"shrinkA": 24}
            ax.annotate("", xy=end, xytext=start, arrowprops=wide)
    for start, end in [(0, 1)] * shared + [(level, level + 1)]:
        ax.annotate("", xy=(1.5, end), xytext=(1.5, start), arrowprops=arrow)
    ax.set(xlim=(-0.2, 3.2), ylim=(-0.4, 4.9))
    ax.axis("off")
    return ax
