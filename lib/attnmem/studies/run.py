"""Measure what is missing of any study, on any executor, and append the rows."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from time import monotonic
from typing import Any, NamedTuple

import torch

from ..checks import check_integer, refuse
from ..training.places import STREAMS
from .registry import study
from .study import Part
from .work import Job, Queue, measured


class Progress(NamedTuple):
    """Where a run stands after a unit.

    Attributes:
        done: Units done.
        units: All of them; None if they depend on the rows to come.
        rows: Rows written.
        seconds: Time spent.
        said: The unit in words.
    """

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

    Args:
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``.
        here: whether this machine must have it; or only those that measure elsewhere.

    Returns:
        The name that torch knows it by.

    Raises:
        ValueError: Torch knows no such device, or this machine has none.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        refuse("device", repr(device), "auto, cpu, cuda, cuda:1 or the like")
    if place.type not in ("cpu", "cuda"):
        refuse("device", repr(device), "auto, cpu, cuda, cuda:1 or the like")
    if here and place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        refuse("device", repr(device), "a GPU that this machine has; torch finds no such one")
    return device


def check_limit(minutes: int | float | None, name: str = "limit_minutes") -> None:
    """Accept no limit, or a time that something can be done in.

    Args:
        minutes: The limit, or None.
        name: What the error calls it.

    Raises:
        ValueError: It is not a positive and finite number.
    """
    if minutes is not None and not 0 < minutes < math.inf:
        refuse(name, minutes, "a number above 0")


def run(
    name: str,
    profile: str | None = None,
    device: str = "auto",
    executor: Executor | None = None,
    *,
    seeds: int | None = None,
    limit_minutes: int | float | None = None,
    tf32: bool = False,
    recompute: bool = False,
    variant: str | None = None,
    where: Mapping[str, Any] | None = None,
    report: Callable[[Progress], None] | None = None,
    workers: int | None = None,
) -> int:
    """Measure what is missing of a study and append the rows.

    Rows land unit by unit, so an interrupted run loses the units in flight and nothing else, and
    the next call resumes.

    Args:
        name: A key of ``STUDIES``.
        profile: ``paper`` or ``quick``, or the tier of tests; by default ``paper`` or ``shipped``.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``.
        executor: Anything with the interface of ``concurrent.futures`` (processes, or dask's
            ``Client.get_executor()``); by default units are measured here, one after the other.
        seeds: The first so many seeds of each training (see :func:`attnmem.studies.grids.runs`).
        limit_minutes: Start no unit after that time; the rows of those in flight are kept.
        tf32: Allow a GPU to compute products in TF32. Such trainings have rows of their own.
        recompute: Measure again what came with the library (see :func:`attnmem.studies.read.rows`).
        variant: How the paper is read.
        where: Only the trainings with these values.
        report: Called after each unit.
        workers: How many units are in flight at once (see :func:`run_jobs`).

    Returns:
        How many rows were added.

    Raises:
        ValueError: The study does not have what an argument asks for; the message names it.
    """
    job = Job(name, profile or study(name).usual, Part(seeds, variant, where, tf32))
    return run_jobs(
        [job],
        device,
        executor,
        limit_minutes=limit_minutes,
        recompute=recompute,
        report=report,
        workers=workers,
    )


def run_jobs(
    jobs: Sequence[Job],
    device: str = "auto",
    executor: Executor | None = None,
    *,
    limit_minutes: int | float | None = None,
    recompute: bool = False,
    report: Callable[[Progress], None] | None = None,
    workers: int | None = None,
) -> int:
    """The same for several studies, one queue for all; arguments as for :func:`run`.

    Args:
        jobs: What to measure, the first first.
        device: Where.
        executor: By whom.
        limit_minutes: For all jobs together.
        recompute: As for :func:`run`.
        report: As for :func:`run`.
        workers: Units in flight at once. By default, as many as a pool of ``concurrent.futures``
            has workers; to any other executor all units are given at once, so a limit of time needs
            this number.

    Returns:
        How many rows were added.
    """
    device = choose_device(device, here=executor is None or _size(executor) is not None)
    check_limit(limit_minutes)
    if any(job.part.tf32 for job in jobs) and torch.device(device).type == "cpu":
        refuse("tf32", True, "False on a CPU, which has no such products")
    start = monotonic()
    ends = math.inf if limit_minutes is None else start + 60 * limit_minutes
    at_once = _at_once(executor, workers, limit_minutes)
    each = 1 if at_once == math.inf else at_once
    limited = limit_minutes is not None
    queue = Queue(jobs, device, recompute, each, limited, in_time=lambda: monotonic() < ends)
    units, added = queue.count(), 0
    for done, landed in enumerate(measured(queue, device, executor, at_once), start=1):
        added += landed.added
        if report:
            report(Progress(done, units, added, monotonic() - start, landed.said))
    return added


def pool(workers: int, device: str) -> contextlib.AbstractContextManager[Executor | None]:
    """Several workers: processes on a CPU, and on a GPU threads, which share it by streams.

    Args:
        workers: How many; one is this process itself, which needs no pool.
        device: Such as ``cpu`` or ``cuda``.

    Returns:
        A context that gives the executor and shuts it down at its end; None for one worker.

    Raises:
        ValueError: Fewer than one, or more than a GPU has streams.
    """
    check_integer("workers", workers)
    if workers == 1:
        return contextlib.nullcontext()
    if torch.device(device).type != "cpu":
        if workers > STREAMS:
            refuse("workers", workers, f"at most {STREAMS} on a GPU, each with a stream of its own")
        return ThreadPoolExecutor(workers)
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def _at_once(
    executor: Executor | None, workers: int | None, limit_minutes: int | float | None
) -> int | float:
    if workers is not None:
        check_integer("workers", workers)
        return workers
    known = 1 if executor is None else _size(executor)
    if known is None and limit_minutes is not None:
        refuse("workers", None, "how many units the executor does at once, for a limit of time")
    return known or math.inf


def _size(executor: Executor) -> int | None:
    """The workers of a pool of ``concurrent.futures``; None of executors elsewhere."""
    return getattr(executor, "_max_workers", None)
