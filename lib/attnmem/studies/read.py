"""The one reader of stored rows: what there is, what is missing, and tables for figures."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import pandas as pd

from .. import results, training
from ..checks import check_integer, checked_by, refuse
from ..reporting import papers
from ..results import Row, Run
from .grids import DANA, experiment, runs
from .study import Part
from .trainings import PROFILES, SIZES, diverged


def rows(name: str, profile: str, *, recompute: bool = False) -> dict[str, Row]:
    """The stored rows of a study by key: those that came with the library and those added since.

    Args:
        name: A study.
        profile: One of its profiles.
        recompute: Whether only rows in the folder for new rows count.

    Returns:
        A configuration and what was measured, for each key.

    Raises:
        ValueError: With ``recompute``, if new rows would go among the shipped ones.
        DamagedResultsError: A file that cannot be trusted.
    """
    if not recompute:
        return results.known(name, profile)
    root = results.writable_root()
    if root.resolve() == results.SHIPPED.resolve():
        refuse("recompute", "True", "ATTNMEM_MEASUREMENTS to name a folder for the new rows")
    return results.read(results.file_of(name, profile, root))


def missing(
    name: str,
    profile: str,
    seeds: int | None = None,
    *,
    recompute: bool = False,
    **chosen: Any,
) -> list[Run]:
    """The trainings of an experiment that the store does not have.

    Args:
        name: An experiment.
        profile: ``paper`` or ``quick``.
        seeds: The first so many of them.
        recompute: As for :func:`rows`.
        **chosen: ``variant`` and ``where``, as for :func:`attnmem.studies.grids.runs`.

    Returns:
        The runs without a row; one that diverged has a row.
    """
    have = rows(name, profile, recompute=recompute)
    return [run for run in runs(name, profile, seeds, **chosen) if run.key not in have]


def coverage(names: Iterable[str]) -> pd.DataFrame:
    """How many of the published runs of experiments the store has, and how many of the quick."""
    counts = {}
    for name in names:
        counts[name] = {"source": experiment(name).source}
        for profile, title in (("paper", "published"), ("quick", "quick")):
            wanted = len(runs(name, profile))
            counts[name][f"{title} runs"] = wanted
            counts[name][f"{title}, stored"] = wanted - len(missing(name, profile))
    return pd.DataFrame(counts).T


# --- rows for a figure ----------------------------------------------------------------------------


def _check_stored(name, profile, seeds, variant, curves) -> None:
    if seeds is not None:
        check_integer("seeds", seeds)
    experiment(name).check(profile, Part(variant=variant))
    if curves is not None and curves not in SIZES:
        refuse("curves", repr(curves), f"one of {', '.join(SIZES)}")


@checked_by(_check_stored)
def stored(
    name: str,
    profile: str,
    seeds: int | None = None,
    *,
    variant: str | None = None,
    curves: str | None = None,
) -> tuple[pd.DataFrame, str]:
    """The rows of an experiment in the profile asked for, or, saying so, in the other one.

    A grid of which some cells have no row at all is passed over while the other profile's is whole,
    since a figure with holes misleads. It prints how many rows there are, and how many of them are
    trainings that diverged; these stay in the table, without an accuracy.

    Args:
        name: An experiment.
        profile: ``paper`` or ``quick``.
        seeds: The first so many of them.
        variant: As for :func:`attnmem.studies.grids.runs`.
        curves: The field that tells the curves of a figure apart, such as ``"T"``. One curve
            without a hole is then enough, and only such curves are returned, with the seeds that
            have every cell of the curve.

    Returns:
        The table, with rows of the runs that :func:`attnmem.studies.grids.runs` lists only, and the
        profile that it is of.

    Raises:
        ValueError: The store has rows of neither profile.
    """
    published, *_ = experiment(name).variants
    what = name if variant in (None, published) else f"{name}, variant {variant!r}"
    order = dict.fromkeys((profile, *PROFILES))
    found = {p: _rows_of(name, p, seeds, variant, curves) for p in order}
    whole = [p for p, part in found.items() if part.whole]
    some = [p for p, part in found.items() if part.rows]
    if not some:
        refuse("name", repr(what), "an experiment with stored rows (python -m attnmem run)")
    [chosen, *_] = [*whole, *some]
    have, wanted = len(found[profile].rows), found[profile].wanted
    lost = sum(diverged(outcome) for _, outcome in found[chosen].rows)
    ends = f"; {lost} of {len(found[chosen].rows)} diverged" if lost else ""
    if chosen == profile:
        place = "on whole curves in the store" if curves else "in the store"
        print(f"{have} of {wanted} rows of {what} {place}, profile {profile!r}{ends}")
    else:
        left = f"{have} of {wanted}" if have else "no"
        print(f"{left} rows of {what} in profile {profile!r}; what follows is {chosen!r}{ends}")
    return results.as_table(found[chosen].rows), chosen


class _Part(NamedTuple):
    rows: list[Row]
    wanted: int
    whole: bool  # no cell of the grid, or of the curves that are returned, lacks a row


def _rows_of(
    name: str,
    profile: str,
    seeds: int | None = None,
    variant: str | None = None,
    curves: str | None = None,
) -> _Part:
    wanted = {run.key: run for run in runs(name, profile, seeds, variant=variant)}
    known = rows(name, profile)
    have = [known[key] for key in known if key in wanted]
    if curves and (sound := _on_whole_curves(wanted.values(), have, curves)):
        return _Part(sound, len(wanted), True)
    return _Part(have, len(wanted), not _holes(wanted.values(), have))


def _holes(wanted: Collection[Run], have: Iterable[Row]) -> list[Run]:
    """The runs of cells that no seed has a row of."""
    covered = {training.configuration(run) for run, _ in have}
    return [run for run in wanted if training.configuration(run) not in covered]


def _on_whole_curves(wanted: Collection[Run], have: list[Row], curves: str) -> list[Row]:
    """The rows on curves without a hole, of the seeds that have the whole curve if there are any.

    The other seeds are under way: they would move some of a curve's means and leave the others.
    """
    curve, stored = operator.attrgetter(curves), {run.key for run, _ in have}
    torn = {curve(run) for run in _holes(wanted, have)}
    begun = {(curve(run), run.seed) for run in wanted if run.key not in stored}
    with_seed = {curve(run) for run in wanted if (curve(run), run.seed) not in begun}
    return [
        (run, outcome)
        for run, outcome in have
        if curve(run) not in torn
        and ((curve(run), run.seed) not in begun or curve(run) not in with_seed)
    ]


def _check_published(name) -> None:
    if name not in DANA:
        refuse("name", repr(name), f"one of {', '.join(DANA)}")


@checked_by(_check_published)
def beside_published(name: str) -> pd.DataFrame:
    """The published means of an experiment beside ours, a line for each point.

    Trainings that diverged are left out of the means. Points without a stored training are left
    out, and so are those that are not at hand (:func:`attnmem.results.published`).

    Args:
        name: An experiment of Dana et al., whose numbers are published.

    Returns:
        A table with the sizes, ``published``, ``ours`` (the mean over the seeds of the published
        grid), ``seeds`` (how many of them are stored), ``error`` (its standard error) and
        ``difference`` (ours less the published).

    Raises:
        ValueError: ``name`` is no such experiment.

    Example:
        >>> len(beside_published("dana-exp1"))
        77
    """
    axes = ["N", "d", "d_h", "H", "width"]
    paper = papers()[experiment(name).paper]
    [model, *_] = {run.model for run in runs(name, "paper", 1)}
    points = results.published(f"{paper.key}-{paper.year}")
    points = points[(points.experiment == name.split("-")[1]) & (points.model == model)]
    table = results.as_table(_rows_of(name, "paper").rows)
    sizes = table[axes].fillna(0).astype(int)
    accuracy = sizes.assign(accuracy=table.accuracy.astype(float))
    ours = accuracy.groupby(axes).accuracy.agg(ours="mean", seeds="count", error="sem")
    both = points.set_index(axes)[["accuracy"]].rename(columns={"accuracy": "published"})
    both = both.join(ours[ours.seeds > 0], how="inner")
    return both.assign(difference=both.ours - both.published).reset_index()


def with_parameters(table: pd.DataFrame, name: str, profile: str) -> pd.DataFrame:
    """Rows of an experiment with one more column, the number of parameters that each run trained.

    Args:
        table: Rows of the experiment, as :func:`stored` returns them.
        name: The experiment.
        profile: The profile that they are of.

    Returns:
        The table with the column ``parameters``, counted from the tensors that the loss depends on
        (:func:`attnmem.training.parameter_count`).

    Raises:
        ValueError: A row has sizes that the grid does not have.
    """
    fields = list(SIZES)
    counts = {
        tuple(getattr(run, field) or 0 for field in fields): training.parameter_count(run)
        for run in runs(name, profile, 1)
    }
    sizes = [*table[fields].fillna(0).astype(int).itertuples(index=False, name=None)]
    for size in sizes:
        if size not in counts:
            got = f"a row with {dict(zip(fields, size, strict=True))}"
            refuse("table", got, f"rows of {name}, profile {profile!r}")
    return table.assign(parameters=[counts[size] for size in sizes])


def repeat(
    name: str,
    profile: str,
    *,
    variant: str | None = None,
    where: Mapping[str, Any] | None = None,
    epochs: int | None = None,
) -> tuple[Any, Any]:
    """Do the first stored training of a part of a grid again, on the CPU.

    Args:
        name: An experiment.
        profile: ``paper`` or ``quick``.
        variant: As for :func:`attnmem.studies.grids.runs`.
        where: Likewise.
        epochs: Train only so many, and compare curves.

    Returns:
        The accuracy now and in the row; or the two curves of the first ``epochs``.

    Raises:
        ValueError: There is no such row, or it has no curve.
    """
    [run, *_] = runs(name, profile, 1, variant=variant, where=where)
    known = rows(name, profile)
    if run.key not in known:
        got = f"{name}, {run.variant}, {where}"
        refuse("where", got, "a run whose row is in the store")
    _, row = known[run.key]
    if epochs is not None:
        if row.curve is None:
            refuse("epochs", epochs, "None, since the row was stored without a curve")
        return training.opening(run, epochs), row.curve[:epochs]
    [outcome] = training.train([run], device="cpu")
    return outcome.accuracy, row.accuracy
