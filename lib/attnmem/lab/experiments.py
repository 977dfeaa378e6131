"""What is measured: every study by name; running what is missing of it, and reading its rows.

:mod:`attnmem.lab.study` says what a study is, and each kind has a file; grids stand in
``grids.toml``. Profile ``paper`` is the published protocol, every run of it; ``quick`` is the same
code on a grid that two processor cores finish within a minute: a smoke test, never a result.

Who reads rows wants :func:`stored`, for the figure of an experiment, or :func:`table`, for any
study; both give data frames. :func:`rows` has the same as configurations with their results.
"""

import contextlib
import dataclasses
import errno
import functools
import itertools
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import pandas as pd
import torch

from ..checks import check_integer, refuse
from ..papers import papers
from . import store, study, training
from .assumptions import TESTS
from .fits import FITS
from .searches import SEARCHES
from .store import Row, Rows, Run, Skewed
from .study import ALL, EXPERIMENTS, PROFILES, SIZES, ByName, Selection, Study


def _published_in(paper: str) -> ByName:
    published = ByName()
    for name, experiment in EXPERIMENTS.items():
        if experiment.paper == paper and not experiment.what.endswith("(not in the paper)"):
            published[name] = experiment
    return published


MAHDAVI, DANA = _published_in("mahdavi"), _published_in("dana")
STUDIES: dict[str, Study] = ByName(EXPERIMENTS | SEARCHES | TESTS | FITS)
AGAIN, PATIENCE = 60.0, 3600.0  # seconds between tries to store on a full disk, and of all tries
# Units with the names of their studies; None whenever all that are known are out.
_Queue = Iterator[tuple[str, study.Unit] | None]


def runs(name: str, profile: str, seeds: int | None = None, **selection: Any) -> list[Run]:
    """All trainings of an experiment, one per cell of its grid and seed, every setting explicit.

    A part of them: the first so many ``seeds``; one ``variant``, how the paper is read; ``where``,
    the cells with these values, such as ``{"d": 10}``. By default what was published.
    """
    return EXPERIMENTS[name].configs(profile, Selection(seeds, **selection))


# --- running --------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A part of a study in one of its profiles."""

    name: str
    profile: str
    selection: Selection = ALL


class Progress(NamedTuple):
    """After a unit: units done, of how many if that is known, rows added, seconds, and words."""

    done: int
    units: int | None
    rows: int
    seconds: float
    said: str


def choose_device(device: str, *, on_this_machine: bool = True) -> str:
    """The device to use: ``auto`` is the GPU if there is one.

    Refuses what torch does not know, and what this machine lacks, unless others measure.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    type_, _, index = device.partition(":")
    if type_ not in ("cpu", "cuda") or (index and not index.isdecimal()):
        refuse("device", repr(device), "auto, cpu, cuda, cuda:1 or the like")
    if on_this_machine and type_ == "cuda" and int(index or 0) >= torch.cuda.device_count():
        refuse("device", repr(device), "a GPU that this machine has; torch finds no such one")
    return device


def run(
    name: str,
    profile: str | None = None,
    device: str = "auto",
    executor: Executor | None = None,
    *,
    seeds: int | None = None,
    tf32: bool = False,
    variant: str | None = None,
    where: Mapping[str, Any] | None = None,
    **options: Any,
) -> int:
    """Measure what is missing of a study and append the rows; how many were added.

    The part is chosen as for :func:`runs`; options are those of :func:`run_jobs`. ``profile`` is
    ``paper``, ``quick`` or the tier of tests, by default ``paper`` or ``shipped``. The ``executor``
    is anything with the interface of ``concurrent.futures`` (processes, or dask's
    ``Client.get_executor()``); by default units are measured here, one after the other. ``tf32``
    allows a GPU to compute products so; such trainings have rows of their own.
    """
    selection = Selection(seeds, variant, where, tf32)
    job = Job(name, profile or STUDIES[name].default_profile, selection)
    return run_jobs([job], device, executor, **options)


def run_jobs(
    jobs: Sequence[Job],
    device: str = "auto",
    executor: Executor | None = None,
    *,
    workers: int | None = None,
    limit_minutes: int | float = math.inf,
    recompute: bool = False,
    root: Path | None = None,
    report: Callable[[Progress], None] | None = None,
) -> int:
    """Measure what is missing of several studies, one queue for all; how many rows were added.

    So many ``workers`` are units in flight at once, which share a GPU's memory; by default an
    executor is given all units at once, so a limit of time needs this number. After
    ``limit_minutes`` no unit begins: the cheapest curves of a grid come first, and first seeds
    before others. ``recompute`` measures again what came with the library. Rows go to the folder
    ``root``, by default :func:`~attnmem.lab.store.writable_root`. ``report`` is called after each
    unit. After an error in a unit, or if its rows cannot be stored, no other unit begins; the error
    is raised when the rows of those in flight are stored, and so is an interrupt. Rows for which a
    disk has no room wait for some, up to an hour.
    """
    for job in jobs:  # all are checked before anything is measured
        STUDIES[job.name].configs(job.profile, job.selection)
    local = executor is None or isinstance(executor, (ProcessPoolExecutor, ThreadPoolExecutor))
    device = choose_device(device, on_this_machine=local)
    if not limit_minutes > 0:
        refuse("limit_minutes", limit_minutes, "a number above 0")
    if device == "cpu" and any(job.selection.tf32 for job in jobs):
        refuse("tf32", True, "False on a CPU, which has no such products")
    if workers is not None:
        check_integer("workers", workers)
    elif executor and limit_minutes < math.inf:
        refuse("workers", None, "how many units the executor does at once, for a limit of time")
    start = monotonic()
    place = study.Place(device, limited=limit_minutes < math.inf)
    rows = {}
    for job in jobs:
        file = job.name, job.profile
        if file not in rows:
            rows[file] = store.known(*file, recompute=recompute, root=root)
    n_units = None
    if all(STUDIES[job.name].units_known for job in jobs):
        n_units = sum(1 for _ in itertools.takewhile(bool, _queue(jobs, rows, place)))
    means = _Means(
        executor=executor or _Inline(),
        device=device,
        root=root,
        at_once=workers or (math.inf if executor else 1),
        ends=start + 60 * limit_minutes,
    )
    added = 0
    with contextlib.closing(_measured(_queue(jobs, rows, place), means)) as units:
        for done, unit in enumerate(units, start=1):
            added += unit.added
            for config, result in unit.rows:
                rows[config.experiment, config.profile][config.key] = config, result
            if report:
                said = STUDIES[unit.name].say(unit.rows)
                report(Progress(done, n_units, added, monotonic() - start, said))
    return added


class _Means(NamedTuple):
    """By what units are measured, until when, and where their rows go."""

    executor: Executor
    device: str
    root: Path | None
    at_once: float  # units in flight, at most
    ends: float  # by the clock of this process


class _Measured(NamedTuple):
    """A unit that has ended and is stored."""

    name: str  # of the study
    rows: list[Row]
    added: int  # of the rows, those that are new


def _measured(queue: _Queue, means: _Means) -> Iterator[_Measured]:
    """Each unit once it has ended and is stored."""
    in_flight: dict[Future, str] = {}
    try:
        while True:
            while len(in_flight) < means.at_once and monotonic() < means.ends:
                task = next(queue)
                if task is None:
                    break
                name, unit = task
                store.check_writable(unit[0], means.root)
                perform = STUDIES[name].perform
                future = means.executor.submit(perform, unit, means.device, means.root)
                in_flight[future] = name
            if not in_flight:
                break
            finished, _ = futures.wait(in_flight, return_when=futures.FIRST_COMPLETED)
            for future in finished:
                yield _stored(in_flight.pop(future), future, means.root, PATIENCE)
    except BaseException as error:  # after an interrupt only what has begun is waited for
        interrupted = not isinstance(error, Exception)
        waited = [future for future in in_flight if not (interrupted and future.cancel())]
        for future in futures.as_completed(waited):
            if not future.exception():
                _stored(in_flight[future], future, means.root, patience=0)
        raise


def _stored(name: str, future: Future, root: Path | None, patience: float) -> _Measured:
    """Append the rows of a unit that has ended, and delete what was kept of its trainings.

    On a full disk they wait for room, so many seconds.
    """
    rows = future.result()
    while True:
        try:
            added = store.append(rows, root)
            break
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or patience <= 0:
                raise
            place = (root or store.writable_root()).absolute()
            waiting = f"the disk is full: {len(rows)} rows of {name} wait for room in {place}"
            print(f"{waiting}, for {patience / 60:.0f} minutes", file=sys.stderr, flush=True)
            sleep(AGAIN)
            patience -= AGAIN
    checkpoints = (root or store.writable_root()) / study.CHECKPOINTS
    training.forget(checkpoints, [config for config, _ in rows])
    return _Measured(name, rows, added)


def pool(workers: int, device: str) -> contextlib.AbstractContextManager[Executor | None]:
    """Several workers: processes on a CPU, and on a GPU threads, which share it by streams.

    One worker is this process itself, so the context gives None for it; otherwise an executor.
    """
    check_integer("workers", workers)
    if workers == 1:
        return contextlib.nullcontext()
    if device == "cpu":
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(workers, spawn, initializer=_end_with_parent)
    if workers > training.STREAMS:
        limit = f"at most {training.STREAMS} on a GPU, each with a stream of its own"
        refuse("workers", workers, limit)
    return ThreadPoolExecutor(workers)


def _end_with_parent() -> None:
    """Else a worker whose parent is killed would train on, for nobody, beside its successor."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _queue(jobs: Sequence[Job], rows: Mapping[tuple[str, str], Rows], place: study.Place) -> _Queue:
    """Units to measure, one after the other."""
    started: set[str] = set()
    while True:
        before = len(started)
        for job in jobs:
            stored_rows = rows[job.name, job.profile]
            for unit in STUDIES[job.name].units(job.profile, job.selection, stored_rows, place):
                if fresh := [config for config in unit if config.key not in started]:
                    started |= {config.key for config in fresh}
                    yield job.name, fresh
        if len(started) == before:
            yield None


class _Inline(Executor):
    """Does what it is given at once, in this process."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


# --- reading --------------------------------------------------------------------------------------


def rows(
    name: str, profile: str, *, recompute: bool = False, root: Path | None = None
) -> dict[str, Row]:
    """The stored rows of a study by key; with ``recompute`` without those that are shipped.

    Rows that were measured since are in the folder ``root``, by default where new ones go.
    """
    STUDIES[name].check_profile(profile)
    return store.known(name, profile, recompute=recompute, root=root)


def table(name: str, profile: str, *, root: Path | None = None) -> pd.DataFrame:
    """The stored rows of a study, with the fields of the store and those that its kind adds."""
    return STUDIES[name].table(rows(name, profile, root=root).values())


def stored(
    name: str,
    profile: str,
    seeds: int | None = None,
    *,
    variant: str | None = None,
    curves: str | None = None,
    quiet: bool = False,
) -> tuple[pd.DataFrame, str]:
    """Rows of a figure and their profile, which is the other one if need be; it prints which.

    A grid of which some cells have no row at all is passed over while the other profile's is whole,
    since a figure with holes misleads. ``curves`` is the field that tells the curves of a figure
    apart, such as ``"T"``: one curve without a hole is then enough, and only such curves are
    returned, with the seeds that have every cell of the curve. ``quiet`` prints nothing where the
    rows are of ``profile``. If there are rows of neither profile, ``name`` is refused.
    """
    experiment = EXPERIMENTS[name]
    if curves not in (None, *SIZES):
        refuse("curves", repr(curves), f"one of {', '.join(SIZES)}")
    grids, usable_rows, whole = {}, {}, {}
    for candidate in dict.fromkeys((profile, *PROFILES)):
        runs_of_grid = experiment.configs(candidate, Selection(seeds, variant))
        grids[candidate] = {run.key: run for run in runs_of_grid}
        stored_rows = store.known(name, candidate)
        usable_rows[candidate], whole[candidate] = usable(grids[candidate], stored_rows, curves)
    label = name
    if variant not in (None, experiment.variants[0]):
        label = f"{name}, variant {variant!r}"
    candidates = [candidate for candidate in grids if usable_rows[candidate]]
    if not candidates:
        refuse("name", repr(label), "an experiment with stored rows (python -m attnmem run)")
    chosen = next((candidate for candidate in candidates if whole[candidate]), candidates[0])
    count, of = len(usable_rows[profile]), len(grids[profile])
    n_rows = len(usable_rows[chosen])
    n_diverged = sum(outcome.diverged is not None for _, outcome in usable_rows[chosen])
    ending = f"; {n_diverged} of {n_rows} diverged" if n_diverged else ""
    if chosen != profile:
        rows_of = f"{count} of {of} rows of" if count else "no rows of"
        print(f"{rows_of} {label} in profile {profile!r}; what follows is {chosen!r}{ending}")
    elif not quiet:
        place = "on whole curves in the store" if curves else "in the store"
        print(f"{count} of {of} rows of {label} {place}, profile {profile!r}{ending}")
    return experiment.table(usable_rows[chosen]), chosen


def usable(
    grid: Mapping[str, Run], stored_rows: Rows, curves: str | None
) -> tuple[list[Row], bool]:
    """Rows of a grid, of its whole curves if it has some, and whether they are without holes."""
    in_grid = [row for key, row in stored_rows.items() if key in grid]
    cells = {run.cell for run, _ in in_grid}
    holes = [run for run in grid.values() if run.cell not in cells]
    if curves is None:
        return in_grid, not holes

    def curve(run: Run) -> Any:
        return getattr(run, curves)

    # Seeds under way would move some of a curve's means: left out if others have the whole curve.
    torn = {curve(run) for run in holes}
    under_way = {(curve(run), run.seed) for key, run in grid.items() if key not in stored_rows}
    whole = {curve(run) for run in grid.values() if (curve(run), run.seed) not in under_way}
    on_curves = []
    for run, outcome in in_grid:
        left_out = curve(run) in whole and (curve(run), run.seed) in under_way
        if curve(run) not in torn and not left_out:
            on_curves.append((run, outcome))
    return on_curves or in_grid, bool(on_curves) or not holes


def published_curves(name: str) -> int:
    """How many curves the published figure of an experiment has."""
    return len({EXPERIMENTS[name].curve_of(run) for run in runs(name, "paper", 1)})


def by_seed(table: pd.DataFrame, axis: str, measured: str = "accuracy") -> pd.DataFrame:
    """One measurement, with a row for every value of ``axis`` and a column for every seed.

    Rows that differ in more than these are refused. Of a seed that diverged it is missing.
    """
    return table.pivot(index=axis, columns="seed", values=measured)


def epochs_to(curve: Sequence[float], share: float = 0.9) -> int:
    """The first epoch that ends with that share of a curve's last accuracy."""
    return 1 + next(i for i, accuracy in enumerate(curve) if accuracy >= share * curve[-1])


def spans(table: pd.DataFrame, *fields: str) -> str:
    """The ends of each column of whole numbers, for the ``sizes`` of a verdict; holes are refused.

    Example:
        >>> spans(pd.DataFrame({"T": [250, 1000], "n": [8, 8]}), "T", "n")
        'T = 250 to 1,000, n = 8'
    """
    ranges = []
    for field in fields:
        if field not in table or table[field].isna().any():
            refuse("fields", repr(field), "a column without missing values")
        least, largest = int(table[field].min()), int(table[field].max())
        if least == largest:
            ranges.append(f"{field} = {least:,}")
        else:
            ranges.append(f"{field} = {least:,} to {largest:,}")
    return ", ".join(ranges)


def fewest_seeds(table: pd.DataFrame) -> int:
    """The number of seeds, diverged ones included, of the configuration that has the fewest."""
    names = [field.name for field in dataclasses.fields(Skewed) if field.name != "seed"]
    settings = [name for name in names if name in table]
    return int(table.groupby(settings, dropna=False).seed.nunique().min())


@functools.cache
def published(paper: str) -> pd.DataFrame:
    """Numbers of ``dana-2025``, ``mahdavi-2024``, or ``bits-per-parameter`` (of several papers).

    A line has a number and the sizes that it belongs to. With three layers ``depth1`` is complete;
    of ``depth2`` and ``depth5`` there are four points, which an earlier model was far from.
    """
    return pd.read_csv(store.PACKAGE / "published" / f"{paper}.csv")


def beside_published(name: str) -> pd.DataFrame:
    """The published means of an experiment of Dana et al. beside ours, a line for each point.

    ``ours`` is the mean over the stored ``seeds`` of the published grid that did not diverge,
    ``error`` its standard error, ``difference`` ours less ``published``.
    """
    axes, paper = ["N", "d", "d_h", "H", "width"], papers()[DANA[name].paper]
    grid = {run.key: run for run in runs(name, "paper")}
    [model] = {run.model for run in grid.values()}
    points = published(f"{paper.key}-{paper.year}")
    points = points[(points.experiment == name.split("-")[1]) & (points.model == model)]
    stored_rows = store.known(name, "paper").items()
    table = DANA[name].table(row for key, row in stored_rows if key in grid)
    sizes = table[axes].fillna(0).astype(int)
    accuracy = sizes.assign(accuracy=table.accuracy.astype(float))
    ours = accuracy.groupby(axes).accuracy.agg(ours="mean", seeds="count", error="sem")
    pairs = points.set_index(axes)[["accuracy"]].rename(columns={"accuracy": "published"})
    pairs = pairs.join(ours[ours.seeds > 0], how="inner")
    return pairs.assign(difference=pairs.ours - pairs.published).reset_index()


def repeat(
    name: str, profile: str, *, epochs: int | None = None, **selection: Any
) -> tuple[Any, Any]:
    """Do the first stored training of a part of a grid again, on the CPU: accuracy now, and then.

    With ``epochs`` both curves of the first of them. A part without a row or curve is refused.
    """
    [run, *_] = runs(name, profile, 1, **selection)
    stored_rows = rows(name, profile)
    if run.key not in stored_rows:
        got = f"{name}, {run.variant}, {selection.get('where')}"
        refuse("where", got, "a run whose row is in the store")
    _, before = stored_rows[run.key]
    if epochs is not None:
        if before.curve is None:
            refuse("epochs", epochs, "None, since the row was stored without a curve")
        return training.first_epochs(run, epochs), before.curve[:epochs]
    [outcome] = training.train([run], device="cpu")
    return outcome.accuracy, before.accuracy
