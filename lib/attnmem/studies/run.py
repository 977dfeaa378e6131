"""Measure what is missing of any study, on any executor, and append the rows.

Rows are stored unit by unit, so an interrupted run loses the units in flight and nothing else, and
the next one resumes.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from time import monotonic
from typing import Any, NamedTuple

import torch

from .. import store, training
from ..checks import check_integer, refuse
from ..store import Row, Rows
from ..training.devices import STREAMS
from . import STUDIES
from .study import ALL, CHECKPOINTS, Selection, Unit, _Place


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

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end at the rate so far, or None if the number of units is unknown."""
        return None if self.units is None else self.seconds / self.done * (self.units - self.done)


def choose_device(device: str, *, here: bool = True) -> str:
    """The device to use: ``auto`` is the GPU if there is one.

    Refuses what torch does not know, and what this machine lacks, unless others measure (``here``).
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        refuse("device", repr(device), "auto, cpu, cuda, cuda:1 or the like")
    if here and kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
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

    The part is chosen as for :func:`attnmem.studies.runs`.

    Args:
        profile: ``paper`` or ``quick``, or the tier of tests; by default ``paper`` or ``shipped``.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``.
        executor: Anything with the interface of ``concurrent.futures`` (processes, or dask's
            ``Client.get_executor()``); by default units are measured here, one after the other.
        tf32: Allow a GPU to compute products in TF32. Such trainings have rows of their own.
        **options: ``workers``, units in flight at once, which share a GPU's memory (by default an
            executor is given all units at once, so a limit of time needs this number);
            ``limit_minutes``, after which no unit begins (the cheapest curves of a grid come first,
            and first seeds before others); ``recompute``, to measure again what came with the
            library; ``report``, called with a :class:`Progress` after each unit.
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
    limit_minutes: int | float | None = None,
    recompute: bool = False,
    report: Callable[[Progress], None] | None = None,
) -> int:
    """Measure what is missing of several studies, one queue for all; arguments as for :func:`run`.

    After an error in a unit, or if its rows cannot be stored, no other unit begins. The error is
    raised when the rows of the units in flight are stored; so is an interrupt.
    """
    pools = (type(None), ProcessPoolExecutor, ThreadPoolExecutor)
    for job in jobs:  # all are checked before anything is measured
        STUDIES[job.name].configs(job.profile, job.selection)
    device = choose_device(device, here=isinstance(executor, pools))
    if limit_minutes is not None and not 0 < limit_minutes < math.inf:
        refuse("limit_minutes", limit_minutes, "a number above 0")
    if device == "cpu" and any(job.selection.tf32 for job in jobs):
        refuse("tf32", True, "False on a CPU, which has no such products")
    if workers is not None:
        check_integer("workers", workers)
    elif executor and limit_minutes is not None:
        refuse("workers", None, "how many units the executor does at once, for a limit of time")
    start = monotonic()
    ends = math.inf if limit_minutes is None else start + 60 * limit_minutes
    at_once = workers or (math.inf if executor else 1)
    place = _Place(device, workers or 1, limit_minutes is not None)
    rows = {job[:2]: store.known(*job[:2], recompute=recompute) for job in jobs}
    known = all(STUDIES[job.name].units_known for job in jobs)
    units = len([*iter(_queue(jobs, rows, place).__next__, None)]) if known else None
    waiting = _queue(jobs, rows, place)
    executor = executor or _Inline()
    in_flight: dict[Future, str] = {}
    error: BaseException | None = None
    done = added = 0
    try:
        while True:
            while error is None and len(in_flight) < at_once and monotonic() < ends:
                if (given := next(waiting)) is None:
                    break
                name, unit = given
                store.check_writable(unit[0])
                in_flight[executor.submit(STUDIES[name].perform, unit, device)] = name
            if not in_flight:
                break
            finished, _ = futures.wait(in_flight, return_when=futures.FIRST_COMPLETED)
            for future in finished:
                name = in_flight.pop(future)
                try:
                    measured, new = _stored(future)
                except BaseException as wrong:
                    error = error or wrong
                    continue
                done += 1
                added += new
                for config, result in measured:
                    rows[config.experiment, config.profile][config.key] = config, result
                if report:
                    said = STUDIES[name].say(measured)
                    report(Progress(done, units, added, monotonic() - start, said))
    finally:
        begun = [future for future in in_flight if not future.cancel()]
        for future in futures.as_completed(begun):
            if not future.exception():
                _stored(future)
    if error:
        raise error
    return added


def pool(workers: int, device: str) -> contextlib.AbstractContextManager[Executor | None]:
    """Several workers: processes on a CPU, and on a GPU threads, which share it by streams.

    One worker is this process itself, so the context gives None for it; otherwise an executor.
    """
    check_integer("workers", workers)
    if workers == 1:
        return contextlib.nullcontext()
    if device == "cpu":
        return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    if workers > STREAMS:
        refuse("workers", workers, f"at most {STREAMS} on a GPU, each with a stream of its own")
    return ThreadPoolExecutor(workers)


def _queue(
    jobs: Sequence[Job], rows: Mapping[tuple[str, str], Rows], place: _Place
) -> Iterator[tuple[str, Unit] | None]:
    """Units to measure, each with its study's name; None whenever all that are known are out."""
    started: set[str] = set()
    while True:
        before = len(started)
        for job in jobs:
            known = rows[job.name, job.profile]
            for unit in STUDIES[job.name].units(job.profile, job.selection, known, place):
                if fresh := [config for config in unit if config.key not in started]:
                    started |= {config.key for config in fresh}
                    yield job.name, fresh
        if len(started) == before:
            yield None


def _stored(future: Future) -> tuple[list[Row], int]:
    """The rows of a unit that has ended, when they are stored, and how many of them are new."""
    rows = future.result()
    added = store.append(rows)
    training.forget(store.writable_root() / CHECKPOINTS, [config for config, _ in rows])
    return rows, added


class _Inline(Executor):
    """Does what it is given at once, in this process."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future
