"""The record of an experiment, in one form: protocol, coverage, curves beside published points."""

import dataclasses
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
    found = EXPERIMENTS[name].table(shown)
    if axis is not None and (axis not in SIZES or found[axis].isna().all()):
        refuse("axis", repr(axis), f"a size of {name}: one of {', '.join(SIZES)}")
    show("\n".join(_sentences(name, grid, have, len(shown))))
    if axis is None:
        return
    measured = "loss" if found.task.iloc[0] == "reals" else "accuracy"
    field = EXPERIMENTS[name].curves  # the size that tells curves apart, if it has several values
    named = field if field in SIZES and len({getattr(run, field) for run in grid}) > 1 else None
    curves = _curves_of(found, axis, measured, named)
    crosses = None
    if name in DANA:
        points = beside_published(name)
        crosses = points[axis], points.published
    vertical = "mean square error" if measured == "loss" else "accuracy"
    if own:
        own.draw(plt.gca(), name, axis, measured)
    ax = curves_with_bands(curves, crosses, (f"{_AXES[axis]} ${_LETTERS[axis]}$", vertical))
    if measured == "loss":
        ax.set_yscale("log")
    plt.show()
    means = pd.DataFrame({label: curve.mean(axis=1) for label, curve in curves.items()}).T
    settled = means.round(12)  # a mean of decimals may end in a 5, which rounding would decide
    cells = means.map("{:.1e}".format) if measured == "loss" else settled.round(3)
    cells = cells.astype(object).where(means.notna(), "")
    what = "Mean" if vertical == "accuracy" else "Mean of the"
    smoke = "" if grid[0].profile == "paper" else f", profile {grid[0].profile}"
    title = f"{what} {vertical} of our seeds: {EXPERIMENTS[name].what}{smoke}."
    lines = [(f"${_LETTERS[axis]}$", *cells.columns), *cells.itertuples(name=None)]
    show(titled_table(title, f"tab-record-{name}", lines))


def _sentences(name: str, grid: list[Run], have: list[Row], shown: int) -> Iterable[str]:
    """What was trained, on which data, how, and how much of it is stored."""
    one, seeds = grid[0], EXPERIMENTS[name].seeds[grid[0].profile]
    rates = f"the rate rises over the first 5% to {_range(run.lr for run in grid)}, then falls"
    rates += " along a cosine to zero"
    if one.schedule != "warmup-cosine":
        ends = [_range(run.lr * end for run in grid) for end in (one.lr_start, one.lr_end)]
        line = f"falls on a line from {ends[0]} to {ends[1]}"
        rates = f"the rate {line if len({*ends}) > 1 else f'stays at {ends[0]}'}"
    cells = len({dataclasses.replace(run, seed=0) for run, _ in have})
    stored = f"{len(have):,} of {len(grid):,} trainings, in {cells:,} of {len(grid) // seeds:,} "
    stored += f"cells, up to {seeds} seeds each"
    if have:
        lost = sum(outcome.diverged is not None for _, outcome in have)
        seconds = mean(outcome.wall_s for _, outcome in have)
        stored += f"; {lost} diverged; {seconds:,.0f} seconds each on average"
    if shown < len(have):
        stored += f"; shown here: {shown:,}, the seeds of whole curves"
    if one.profile != "paper":
        stored += ". Nothing of the published grid is stored, so this is the profile "
        stored += f"`{one.profile}`: a smoke test, not a result"
    ranges = {letter: _range(getattr(run, f) for run in grid) for f, letter in _LETTERS.items()}
    sizes = ", ".join(f"${letter}$: {values}" for letter, values in ranges.items() if values)
    steps = _range(run.steps for run in grid)
    yield f"- **Source.** {EXPERIMENTS[name].source}."
    yield f"- **Sizes.** {sizes}."
    yield f"- **Data.** {_DATA[one.task]}{_DATA[one.context]}"
    yield f"- **Training.** {steps} steps of Adam, batches of {one.batch:,}; {rates}."
    yield f"- **Stored.** {stored}."


def _stored(name: str) -> tuple[list[Run], list[Row], list[Row]]:
    """A grid, its stored rows, and those of its whole curves, if it has some; quick if need be."""
    for profile in (*PROFILES, PROFILES[0]):
        grid, known = runs(name, profile), rows(name, profile)
        if have := {run.key: known[run.key] for run in grid if run.key in known}:
            break
    shown, _ = usable({run.key: run for run in grid}, have, EXPERIMENTS[name].curves)
    return grid, [*have.values()], shown


def _curves_of(
    found: pd.DataFrame, axis: str, measured: str, named: str | None = None
) -> dict[str, pd.DataFrame]:
    """One table for each curve, a line for each value of ``axis``, a column for each seed.

    Sizes that vary beside ``axis`` name a curve, as does the size ``named``; equal ones share it.
    """
    names: dict[str, list[str]] = {}  # of the sizes that are equal in every row, by the first
    for field in ("N", *SIZES):
        if field == axis or (field != named and found[field].dropna().nunique() < 2):
            continue
        first = next((f for f in names if (found[f] == found[field]).all()), field)
        names.setdefault(first, []).append(field)
    tied = [f for f in names if (found[f] == found[axis]).all()]
    groups = [f for f in names if f not in tied]
    if not groups:
        return {"ours": by_seed(found, axis, measured)}
    labels = {f: " = ".join(f"${_LETTERS[each]}$" for each in names[f]) for f in groups}
    curves = {}
    for values, part in found.groupby(groups):
        sizes = (f"{labels[f]} = {int(v):,}" for f, v in zip(groups, values, strict=True))
        curves[", ".join(sizes)] = by_seed(part, axis, measured)
    return curves


def _range(values: Iterable[float | None]) -> str:
    """The value of a size, or the least, the largest and how many there are; nothing of None."""
    each = sorted({*values} - {None})
    ends = dict.fromkeys((*each[:1], *each[-1:]))
    ends = " to ".join(f"{x:,.6g}" if x < 1 else f"{x:,}" for x in ends)
    return f"{ends} ({len(each)} values)" if len(each) > 2 else ends
