"""The record of an experiment, in one form: protocol, coverage, curves beside published points."""

from collections.abc import Iterable
from statistics import mean

import matplotlib.pyplot as plt
import pandas as pd

from ..checks import refuse
from ..lab.experiments import DANA, EXPERIMENTS, beside_published, by_seed, rows, runs, usable
from ..lab.store import Row, Run
from ..lab.study import PROFILES, SIZES
from .figures import curves_with_bands
from .live import Live
from .reporting import show, titled_table

# Of each size that a grid may sweep, its letter and its name; and what data there are.
_LETTERS = {size: size for size in ("N", "n", "T", "d", "d_h", "H")} | {"width": "w"}
_AXES = {"H": "heads", "n": "tokens", "d": "dimension", "T": "examples", "d_h": "head width"}
_AXES |= {"width": "hidden units"}
_MEASURED = {"accuracy": "accuracy", "loss": "mean square error"}
_DATA = {
    "bigrams": "Random pairs of $N$ tokens, each with one fixed, uniformly random next token.",
    "associations": "$T$ fixed pairs of $N$ tokens, each with a uniformly random next token.",
    "classes": "$T$ queries, and tokens, uniform on $[0, 1]^d$; labels uniform over $N$ classes.",
    "reals": "$T$ queries, and tokens, uniform on $[0, 1]^d$; labels uniform on $[0, 1]$.",
    "shared": " All examples share one context.",
    "random": " Each has a context of its own.",
    None: "",
}


def record(name: str, axis: str | None, own: Live | None = None) -> None:
    """Show what was trained and how, how much of it is stored, and the means of its curves.

    They are drawn with the range of the seeds, the published points where they are known, and what
    ``own`` has of it. A curve with a hole is not shown beside whole ones, nor is a seed that has a
    part of a curve only. ``axis`` is the size on the horizontal axis, such as ``"H"``; other sizes
    that vary make curves. Without it there are the words alone. Where nothing of the published
    profile is stored it shows ``quick``, a smoke test, and says so; without any row it refuses.
    """
    grid, have, shown = _stored(name)
    if not have:
        measure = f"python -m attnmem run {name}, in full or with --profile quick"
        refuse("name", repr(name), f"an experiment with stored rows ({measure})")
    table = EXPERIMENTS[name].table(shown)
    if axis is not None and (axis not in SIZES or table[axis].isna().all()):
        refuse("axis", repr(axis), f"a size of {name}: one of {', '.join(SIZES)}")
    show("\n".join(_sentences(name, grid, have, len(shown))))
    if axis is None:
        return
    measured = "loss" if table.task.iloc[0] == "reals" else "accuracy"
    field = EXPERIMENTS[name].curves  # the size that tells curves apart, if it has several values
    several = field in SIZES and len({getattr(run, field) for run in grid}) > 1
    curves = _curves_of(table, axis, measured, field if several else None)
    _draw(name, axis, measured, curves, own)
    _show_means(name, axis, measured, curves, grid[0].profile)


def _draw(
    name: str, axis: str, measured: str, curves: dict[str, pd.DataFrame], own: Live | None
) -> None:
    """The curves with the range of their seeds, beside published points and ``own`` ones."""
    published = None
    if name in DANA:
        points = beside_published(name)
        published = points[axis], points.published
    if own:
        own.draw(plt.gca(), name, axis, measured)
    labels = f"{_AXES[axis]} ${_LETTERS[axis]}$", _MEASURED[measured]
    ax = curves_with_bands(curves, published, labels)
    if measured == "loss":
        ax.set_yscale("log")
    plt.show()


def _show_means(
    name: str, axis: str, measured: str, curves: dict[str, pd.DataFrame], profile: str
) -> None:
    """The means over the seeds as a table, a row for each curve."""
    means = pd.DataFrame({label: curve.mean(axis=1) for label, curve in curves.items()}).T
    if measured == "loss":
        cells, title = means.map("{:.1e}".format), "Mean of the mean square error"
    else:
        settled = means.round(12)  # a mean of decimals may end in a 5, which rounding would decide
        cells, title = settled.round(3), "Mean accuracy"
    cells = cells.astype(object).where(means.notna(), "")
    title += f" of our seeds: {EXPERIMENTS[name].what}"
    if profile != "paper":
        title += f", profile {profile}"
    rows = [(f"${_LETTERS[axis]}$", *cells.columns), *cells.itertuples(name=None)]
    show(titled_table(f"{title}.", f"tab-record-{name}", rows))


def _sentences(name: str, grid: list[Run], have: list[Row], n_shown: int) -> Iterable[str]:
    """What was trained, on which data, how, and how much of it is stored."""
    run = grid[0]
    ranges = {letter: _range(getattr(r, field) for r in grid) for field, letter in _LETTERS.items()}
    sizes = ", ".join(f"${letter}$: {values}" for letter, values in ranges.items() if values)
    steps = _range(r.steps for r in grid)
    yield f"- **Source.** {EXPERIMENTS[name].source}."
    yield f"- **Sizes.** {sizes}."
    yield f"- **Data.** {_DATA[run.task]}{_DATA[run.context]}"
    yield f"- **Training.** {steps} steps of Adam, batches of {run.batch:,}; {_rates(grid)}."
    yield f"- **Stored.** {_coverage(name, grid, have, n_shown)}."


def _rates(grid: list[Run]) -> str:
    """How the learning rate goes."""
    run = grid[0]
    if run.schedule == "warmup-cosine":
        peak = _range(r.lr for r in grid)
        return f"the rate rises over the first 5% to {peak}, then falls along a cosine to zero"
    start, end = (_range(r.lr * share for r in grid) for share in (run.lr_start, run.lr_end))
    if start == end:
        return f"the rate stays at {start}"
    return f"the rate falls on a line from {start} to {end}"


def _coverage(name: str, grid: list[Run], have: list[Row], n_shown: int) -> str:
    """How many trainings are stored, and how many of them are shown."""
    seeds, profile = EXPERIMENTS[name].seeds[grid[0].profile], grid[0].profile
    cells = len({run.cell for run, _ in have})
    text = f"{len(have):,} of {len(grid):,} trainings, in {cells:,} of {len(grid) // seeds:,} "
    text += f"cells, up to {seeds} seeds each"
    if have:
        diverged = sum(outcome.diverged is not None for _, outcome in have)
        seconds = mean(outcome.wall_s for _, outcome in have)
        text += f"; {diverged} diverged; {seconds:,.0f} seconds each on average"
    if n_shown < len(have):
        text += f"; shown here: {n_shown:,}, the seeds of whole curves"
    if profile != "paper":
        text += ". Nothing of the published grid is stored, so this is the profile "
        text += f"`{profile}`: a smoke test, not a result"
    return text


def _stored(name: str) -> tuple[list[Run], list[Row], list[Row]]:
    """A grid, its stored rows, and those of its whole curves, if it has some; quick if need be."""
    for profile in (*PROFILES, PROFILES[0]):
        grid, stored = runs(name, profile), rows(name, profile)
        have = {run.key: stored[run.key] for run in grid if run.key in stored}
        if have:
            break
    shown, _ = usable({run.key: run for run in grid}, have, EXPERIMENTS[name].curves)
    return grid, [*have.values()], shown


def _curves_of(
    table: pd.DataFrame, axis: str, measured: str, named: str | None = None
) -> dict[str, pd.DataFrame]:
    """One table for each curve, a line for each value of ``axis``, a column for each seed.

    Sizes that vary beside ``axis`` name a curve, as does the size ``named``; equal ones share it.
    """
    equal: dict[str, list[str]] = {}  # sizes that are equal in every row, by the first of them
    for field in ("N", *SIZES):
        varies = field == named or table[field].dropna().nunique() > 1
        if field != axis and varies:
            first = next((f for f in equal if (table[f] == table[field]).all()), field)
            equal.setdefault(first, []).append(field)
    groups = [field for field in equal if (table[field] != table[axis]).any()]
    if not groups:
        return {"ours": by_seed(table, axis, measured)}
    labels = [" = ".join(f"${_LETTERS[field]}$" for field in equal[group]) for group in groups]
    curves = {}
    for values, rows_of_curve in table.groupby(groups):
        sizes = [f"{label} = {int(x):,}" for label, x in zip(labels, values, strict=True)]
        curves[", ".join(sizes)] = by_seed(rows_of_curve, axis, measured)
    return curves


def _range(values: Iterable[float | None]) -> str:
    """The value of a size, or the least, the largest and how many there are; nothing of None."""
    numbers = sorted({*values} - {None})
    if not numbers:
        return ""
    least, largest = (f"{x:,.6g}" if x < 1 else f"{x:,}" for x in (numbers[0], numbers[-1]))
    if len(numbers) == 1:
        return least
    if len(numbers) == 2:
        return f"{least} to {largest}"
    return f"{least} to {largest} ({len(numbers)} values)"
