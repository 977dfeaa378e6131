"""What trainings would cost on this machine: from stored rows, or from steps that are timed now."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from .. import training
from ..results import Outcome, Row, Run
from ..training.places import device_name, place
from . import read
from .grids import EXPERIMENTS

Family = tuple[str, str, str | None, int]  # model, task, context and layers
SAMPLE = 40  # stored trainings that a pace is taken from, spread over all there are


class Pace(NamedTuple):
    """How fast trainings of some kind are.

    Attributes:
        fixed: Seconds of each step, whatever its size and however many trainings make it at once.
        each: Seconds of each floating-point operation.
        basis: What these numbers rest on, in words.
    """

    fixed: float
    each: float
    basis: str

    def seconds(self, runs: Sequence[Run]) -> float:
        """The time of trainings that are made at once, if none stops early."""
        computed = sum(run.steps * operations(run) for run in runs)
        return self.fixed * max(run.steps for run in runs) + self.each * computed


def family(run: Run | dict[str, Any]) -> Family:
    """What trainings (or cells of grids) share whose steps consist of the same products."""
    fields = run if isinstance(run, dict) else vars(run)
    return fields["model"], fields["task"], fields["context"], fields["layers"]


@functools.cache
def _counted(run: Run) -> int:
    return training.operations(run)


def operations(run: Run) -> int:
    """Floating-point operations of one step; counted once for every shape."""
    shape = {"experiment": "", "profile": "", "seed": 0, "steps": 1, "T": run.batch}
    return _counted(dataclasses.replace(run, **shape))


def steps_made(run: Run, outcome: Outcome) -> int:
    """The steps that a stored training made.

    Args:
        run: The training.
        outcome: What was stored for it.

    Returns:
        For a training that diverged, the step at which that was seen. For one that stopped early,
        the step of its first look without an error. Otherwise all its steps.
    """
    if outcome.diverged is not None:
        return outcome.diverged
    stopped = run.early_stop and outcome.accuracy == 1 and outcome.best_step
    return outcome.best_step if stopped else run.steps


def pace_of_rows(rows: Iterable[Row], device: str, basis: str) -> Pace | None:
    """The mean pace of stored trainings on a device, weighted by their operations.

    Args:
        rows: Stored trainings.
        device: The device as rows name it: ``cpu``, or the name of a GPU.
        basis: What to call these rows.

    Returns:
        The pace, or None if there are no rows of that device.
    """
    same = [row for row in rows if row[1].device == device]
    spent = done = 0.0
    for run, outcome in same[:: max(1, len(same) // SAMPLE)]:
        spent += outcome.wall_s
        done += steps_made(run, outcome) * operations(run)
    return Pace(0.0, spent / done, basis) if done else None


class Paces:
    """The pace of each experiment on one device, looked up or measured when it is asked for.

    Rows of the experiment itself come first, then rows of trainings whose steps consist of the same
    products, then what is measured now: the time of steps, or only the rate of plain products,
    which no training exceeds. On a GPU steps that are timed come first: rows do not tell how much
    of a step's time is the same for any size.

    Args:
        device: Such as ``cpu`` or ``cuda``.
        timing: How long to time the steps of one kind of training; None for the rate of products.
    """

    def __init__(self, device: str, timing: float | None = None) -> None:
        self.device, self.timing = device, timing
        self.kind = device_name(torch.device(device))
        self._known: dict[tuple, Pace] = {}
        self._measured: dict[Family | None, Pace] = {}

    def of(self, runs: Sequence[Run]) -> Pace:
        """The pace of trainings of one experiment, profile and family.

        Where steps are timed now, they are those of the smallest and of the largest of ``runs``.
        """
        run = runs[0]
        key = (run.experiment, run.profile, family(run))
        if key not in self._known:
            stored = None if self.on_gpu and self.timing else self._own(run) or self._similar(run)
            self._known[key] = stored or self._timed(runs)
        return self._known[key]

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return torch.device(self.device).type == "cuda"

    def seconds_of(self, runs: Iterable[Run]) -> tuple[float, list[str]]:
        """The time of trainings, those made at once one after the other, and what it rests on."""
        groups: dict[tuple, list[Run]] = defaultdict(list)
        for run in runs:
            groups[run.experiment, run.profile, family(run)].append(run)
        paces = {key: self.of(group) for key, group in groups.items()}
        seconds = sum(
            paces[key].seconds(unit)
            for key, group in groups.items()
            for unit in training.stacks(group, self.device)
        )
        return seconds, sorted({pace.basis for pace in paces.values()})

    def _own(self, run: Run) -> Pace | None:
        rows = read.rows(run.experiment, run.profile).values()
        same = [row for row in rows if family(row[0]) == family(run)]
        return pace_of_rows(same, self.kind, "its own rows")

    def _similar(self, run: Run) -> Pace | None:
        """Of all experiments in the same profile that have cells of the same family."""
        rows = [
            row
            for name, other in EXPERIMENTS.items()
            if any(family(cell) == family(run) for cell in other.cells[run.profile])
            for row in read.rows(name, run.profile).values()
            if family(row[0]) == family(run)
        ]
        return pace_of_rows(rows, self.kind, "rows of the same model")

    def _timed(self, runs: Sequence[Run]) -> Pace:
        """Steps of each family once, or the rate of products."""
        kind = None if self.timing is None else family(runs[0])
        if kind not in self._measured:
            self._measured[kind] = (
                Pace(0.0, 1 / product_rate(self.device), "the rate of products, so at least")
                if self.timing is None
                else timed_pace(runs, self.device, self.timing)
            )
        return self._measured[kind]


def timed_pace(runs: Sequence[Run], device: str, seconds: float) -> Pace:
    """The pace of trainings, from a few steps of the smallest alone and of their largest stack.

    Args:
        runs: Trainings of one family.
        device: Where they are to be trained.
        seconds: How long to time each of the two.

    Returns:
        The pace whose line goes through both times, with neither part below zero.
    """
    small = [min(runs, key=operations)]
    large = max(training.stacks(runs, device), key=_work)
    basis = "steps timed now"
    t_small, least, most = step_seconds(small, device, seconds), _work(small), _work(large)
    if least == most:
        return Pace(0.0, t_small / least, basis)
    t_large = step_seconds(large, device, seconds)
    each = max(0.0, t_large - t_small) / (most - least)
    return Pace(max(0.0, t_small - each * least), each, basis)


def _work(runs: Sequence[Run]) -> int:
    """Floating-point operations of a step of all."""
    return sum(map(operations, runs))


def step_seconds(runs: Sequence[Run], device: str, seconds: float) -> float:
    """The time of one step of a stack, measured for a while after a first chunk.

    Args:
        runs: Trainings that are made at once; their data may be cut short, which changes no step.
        device: Where.
        seconds: How long to measure, at least one chunk of steps.

    Returns:
        Seconds for a step of all.
    """
    where, stack = torch.device(device), [_cut_short(run, seed) for seed, run in enumerate(runs)]
    with place(where, tf32=False):
        protocol = training.PROTOCOLS[stack[0].task](stack, where, stays=True)
        try:
            protocol.advance()
            _wait(where)
            start, before = perf_counter(), protocol.count
            while protocol.count == before or perf_counter() < start + seconds:
                if protocol.done:
                    break
                protocol.advance()
                _wait(where)
            spent = perf_counter() - start
            return spent / max(1, protocol.count - before)
        finally:
            protocol.release()


def _cut_short(run: Run, seed: int) -> Run:
    """A training on data that are drawn quickly, different from that with another seed."""
    T = min(run.T, 4 * run.batch) if run.context else run.T
    return dataclasses.replace(run, T=T, seed=seed)


def _wait(device: torch.device) -> None:
    """Until this thread's stream is done; waiting for all of a GPU would break other captures."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def product_rate(device: str, size: int | None = None, seconds: float = 0.5) -> float:
    """Measure the rate of large float32 products.

    Args:
        device: Where.
        size: Rows and columns of the factors; by default 4096 on a GPU, 1024 on a CPU.
        seconds: How long to measure.

    Returns:
        Floating-point operations a second, in the fastest of the products.
    """
    where = torch.device(device)
    size = size or (4096 if where.type == "cuda" else 1024)
    factor = torch.ones(size, size, dtype=torch.float32, device=where)
    best, start = 0.0, perf_counter()
    with place(where, tf32=False):
        while best == 0.0 or perf_counter() < start + seconds:
            _wait(where)
            begin = perf_counter()
            factor @ factor
            _wait(where)
            best = max(best, 2 * size**3 / (perf_counter() - begin))
    return best
