"""Figures of how a layer works: attention, features, ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

from .style import BLUE, CYCLE, GREY, ORANGE, THEORY, labelled, marked, plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def sharpening(
    scales: Float[Tensor, " scales"], alpha: Float[Tensor, "scales n"], ax: Axes | None = None
) -> Axes:
    """Attention on each token against the scale of the logits.

    Args:
        scales: Scales ``c``, positive.
        alpha: Attention weights at each scale.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, "scale $c$ of the logits", r"attention weight $\alpha_i$")
    for token, weights in enumerate(alpha.numpy().T, start=1):
        ax.semilogx(scales.numpy(), weights, label=f"token {token}")
    ax.legend()
    return ax


def attended_path(
    tokens: Float[Tensor, "n 2"], path: Float[Tensor, "steps 2"], ax: Axes | None = None
) -> Axes:
    """The attended vector ``z`` as it moves inside the polygon of its tokens.

    Args:
        tokens: Tokens in the plane.
        path: Positions of ``z``.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, "first coordinate", "second coordinate")
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
    """Singular values, largest first, with the tolerance below which each counts as zero.

    Args:
        values: Singular values by name, in falling order.
        tolerances: The tolerance for each name.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, "index", "singular value")
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
    """Probability that the sampled test meets a planted dependent set, against its size.

    Args:
        sizes: Sizes of the planted set.
        expected: The exact probabilities.
        observed: The observed frequencies.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, "size of the planted dependent set", "chance that a test finds it")
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
    """Rank of the features of the first heads against their number, with the predicted rank.

    Args:
        heads: Numbers of heads.
        ranks: Computed ranks by name.
        predicted: Predicted ranks for each name.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, "heads used", "rank of $Z$")
    for (name, series), marker in zip(ranks.items(), "os^", strict=False):
        ax.plot(heads, predicted[name], **THEORY)
        ax.plot(heads, series, marker, markersize=5, label=name)
    ax.legend()
    return ax


def saturation_map(largest: Float[Tensor, "T H"], ax: Axes | None = None) -> Axes:
    """Largest attention weight of each head (row) on each example (column).

    Args:
        largest: The largest weights, from 0 to 1.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, "example", "head")
    image = ax.imshow(largest.numpy().T, aspect="auto", vmin=0, vmax=1)
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax, label=r"largest $\alpha_i$")
    return ax


def memorized(
    labels: Float[Tensor, " T"], outputs: Mapping[str, Float[Tensor, " T"]], ax: Axes | None = None
) -> Axes:
    """Outputs of several models against the labels; memorized labels lie on the diagonal.

    Args:
        labels: The labels.
        outputs: Outputs by the model's name.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, "label", "output")
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
    """Error of the best read-out against the number of examples, with the capacity marked.

    Args:
        examples: Numbers of examples ``T``.
        residuals: Root mean square errors by name.
        capacity: The number of examples to mark.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, "examples $T$", "root mean square error")
    return marked(ax, ax.plot, examples, residuals, {f"capacity {capacity}": capacity})


def logit_fan(
    scales: Float[Tensor, " scales"],
    logits: Mapping[str, Float[Tensor, "scales n"]],
    ax: Axes | None = None,
) -> Axes:
    """Logits of all tokens against the scale, one colour for each example.

    Args:
        scales: Scales ``c``.
        logits: Logits by the example's name. Their mean is subtracted.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, "scale $c$", "logit, less the mean")
    for colour, (name, series) in zip(CYCLE, logits.items(), strict=False):
        centred = (series - series.mean(dim=1, keepdim=True)).numpy()
        ax.plot(scales.numpy(), centred, color=colour)
        ax.plot([], [], color=colour, label=name)
    ax.legend()
    return ax


def logit_map(logits: Float[Tensor, "T n"], ax: Axes | None = None) -> Axes:
    """Logits of every token (row) on every example (column), with zero in white.

    Args:
        logits: The logits.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, "example", "token")
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
    """Measured values as dots on predicted lines, on a logarithmic axis.

    Args:
        x: Places, common to all series.
        measured: Positive values by name.
        predicted: Predicted values, for some or all of the names.
        labels: Names of the two axes.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, *labels)
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
    """Quantities against the saturation scale, both logarithmic, with some scales marked.

    Args:
        scales: Scales ``c``, positive.
        values: Positive values by name.
        marks: Scales to mark, by name.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
    ax = labelled(ax, "scale $c$", "value")
    return marked(ax, ax.loglog, scales, values, marks)


def wiring(shared: bool, ax: Axes | None = None) -> Axes:
    """How heads read and write the residual stream.

    Args:
        shared: Whether all heads share two maps between them and the stream; otherwise each head
            has maps of its own.
        ax: Axes to draw into.

    Returns:
        The axes.
    """
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
