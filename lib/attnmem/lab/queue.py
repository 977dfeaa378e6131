"""What to train next of the figures of Mahdavi et al., and how much of it some hours hold.

What is worth most comes first: one training on each curve that has no row, then one of each setting
without a row, then the other seeds; of these always the curve that costs least. Prices are the
seconds of stored rows of the same card.
"""

import heapq
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from ..checks import check_integer, refuse
from . import experiments, training
from .experiments import EXPERIMENTS, MAHDAVI, Job
from .protocols import PROTOCOLS
from .store import Row, Rows, Run
from .study import ALL, SIZES, Selection, steps_made

FILLED = 8  # streams with which the stored rows of GPUs were made; they fill a card
CURVES, SETTINGS, SEEDS = range(3)  # stages of a plan
STAGES = ("one training on each curve without a row", "one of each setting", "the other seeds")
_Stored = Mapping[str, Rows]  # by the name of the study


class Item(NamedTuple):
    """Trainings of one cell that are made at once."""

    stage: int
    job: Job  # what to give to run_jobs for them
    runs: list[Run]
    seconds: float  # of all of them together, while others fill the device

    @property
    def curve(self) -> tuple[int, str, object]:
        """The stage, the study and its curve: what a plan names in one line."""
        return self.stage, self.job.name, EXPERIMENTS[self.job.name].curve_of(self.runs[0])


def stored(profile: str = "paper") -> dict[str, Rows]:
    """The stored rows of all figures."""
    return {name: experiments.rows(name, profile) for name in MAHDAVI}


def cards(rows: _Stored) -> list[str]:
    """The devices that rows name."""
    return sorted({result.device for of_study in rows.values() for _, result in of_study.values()})


def items(rows: _Stored, card: str, profile: str = "paper") -> list[Item]:
    """All that is missing, in the order of its worth, with what it costs on a card.

    A card that has no row is taken for a mean of the GPUs that have some.
    """
    found = []
    for name in MAHDAVI:
        study = EXPERIMENTS[name]
        missing = study.missing(profile, ALL, rows[name])
        have = [run for run in study.configs(profile) if run.key in rows[name]]
        curves, cells = {study.curve_of(run) for run in have}, {run.cell for run in have}
        prices = dict(zip(missing, _prices(name, missing, rows, card), strict=True))
        first_of: dict[object, Item] = {}  # the cheapest training of each new curve
        of_study = []
        for stack in training.stacks(missing):
            new = stack[0].cell not in cells
            for stage, runs in ((SETTINGS, stack[:new]), (SEEDS, stack[new:])):
                if runs:
                    selection = Selection(1 if stage == SETTINGS else None, where=_where(runs[0]))
                    seconds = sum(prices[run] for run in runs)
                    of_study.append(Item(stage, Job(name, profile, selection), runs, seconds))
        for item in sorted(of_study, key=lambda item: item.seconds):
            if item.stage == SETTINGS and item.curve[2] not in curves:
                first_of.setdefault(item.curve[2], item)
        firsts = [*first_of.values()]
        found += [item._replace(stage=CURVES) if item in firsts else item for item in of_study]
    costs: dict[tuple[int, str, object], float] = {}
    for item in found:
        costs[item.curve] = costs.get(item.curve, 0.0) + item.seconds
    found.sort(key=lambda item: (item.stage, costs[item.curve], item.curve, item.seconds))
    return found


def fitted(plan: Iterable[Item], hours: float, at_once: int) -> tuple[list[Item], float]:
    """Those that end within the hours, so many at once, and the seconds until the last one ends.

    One that would end too late is passed over for cheaper ones.
    """
    check_integer("at_once", at_once)
    ends, chosen = [0.0] * at_once, []  # when each stream is free
    for item in plan:
        end = ends[0] + item.seconds
        if end <= 3600 * hours:
            heapq.heapreplace(ends, end)
            chosen.append(item)
    return chosen, max(ends)


def totals(plan: Iterable[Item]) -> tuple[int, float]:
    """How many trainings, and their seconds one after the other."""
    plan = [*plan]
    return sum(len(item.runs) for item in plan), sum(item.seconds for item in plan)


def at_once(workers: int, device: str) -> int:
    """How many of these workers' trainings a device makes at the price of one."""
    return min(workers, (os.cpu_count() or 1) if device == "cpu" else FILLED)


def _where(run: Run) -> dict[str, int]:
    sizes = {field: getattr(run, field) for field in SIZES}
    return {field: size for field, size in sizes.items() if size is not None}


# --- prices ---------------------------------------------------------------------------------------


def _prices(name: str, missing: Sequence[Run], rows: _Stored, card: str) -> list[float]:
    """Seconds on a card: by rows of the study, or else by the step of another study's nearest."""
    known = _of_devices(rows, lambda device: device == card)
    if not any(known.values()):
        known = _of_devices(rows, lambda device: device != "cpu")
    others = [row for of_study in known.values() for row in of_study.values()]
    if missing and not others:
        refuse("rows", f"none of {card} or of a GPU", "some that tell what a training takes")
    of_cells: dict[Run, list[float]] = {}  # the share of the steps that rows made
    for run, result in rows[name].values():
        of_cells.setdefault(run.cell, []).append(steps_made(run, result) / run.steps)
    prices = EXPERIMENTS[name].prices(missing, known[name])
    for i, run in enumerate(missing):
        if math.isnan(prices[i]):
            share = fmean(of_cells.get(run.cell, [1.0]))
            prices[i] = share * run.steps * _nearest_step(run, others)
    return prices


def _of_devices(rows: _Stored, wanted: Callable[[str], bool]) -> dict[str, Rows]:
    return {
        name: {key: row for key, row in of_study.items() if wanted(row[1].device)}
        for name, of_study in rows.items()
    }


def _nearest_step(run: Run, rows: Iterable[Row]) -> float:
    """The mean seconds of a step in rows of the nearest sizes, with such contexts if there are."""

    def distance(other: Run) -> tuple[float, ...]:
        ratios = [getattr(other, size) / getattr(run, size) for size in ("H", "n", "d_h")]
        apart = sum(abs(math.log(ratio)) for ratio in ratios)
        return other.context != run.context, apart, other.task != run.task

    by_distance: dict[tuple[float, ...], list[float]] = {}
    for other, result in rows:
        seconds = result.wall_s / steps_made(other, result)
        by_distance.setdefault(distance(other), []).append(seconds)
    return fmean(by_distance[min(by_distance)])


# --- a device whose pace is not known -------------------------------------------------------------


def pace(runs: Sequence[Run], device: str, seconds: float) -> float:
    """The seconds that one of these runs takes for a step, from training them for so long."""
    place = torch.device(device)
    with training.device_settings(place, tf32=False):
        protocol = PROTOCOLS[runs[0].task](runs, place)
        for _ in range(2):  # the first steps are made one by one
            protocol.advance()
        before, start = protocol.count, time.perf_counter()
        while True:
            protocol.advance()
            if protocol.done or time.perf_counter() - start >= seconds:
                break
        if protocol.captured:
            torch.cuda.current_stream(place).synchronize()
            protocol.captured.release()
        spent = time.perf_counter() - start
    return spent / (protocol.count - before) / len(runs)


def measured_ratio(plan: Sequence[Item], device: str, workers: int, seconds: float = 60.0) -> float:
    """How many times its prices a plan takes on this device, by training parts of it for so long.

    The parts are from all over the plan, as many at once as there are workers.
    """
    sample = plan[:: max(1, len(plan) // max(FILLED, workers))]
    stacks, each = [item.runs for item in sample], seconds * workers / len(sample)
    with experiments.pool(workers, device) as executor:
        apply = executor.map if executor else map
        paces = [*apply(pace, stacks, itertools.repeat(device), itertools.repeat(each))]
    priced = [item.seconds / sum(run.steps for run in item.runs) for item in sample]
    return sum(paces) / sum(priced)
