"""How many examples training memorizes without an error, by bisection over their number.

The accuracy of an overloaded model says how much of a table it gets right; its *capacity* is the
size of the largest table that it gets right entirely, and that is what a capacity theorem bounds.
``search`` trains, and appends every training as a row; ``found`` reads off the rows what they show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch

from . import bounds, experiments, results, training
from .checks import checked_by, refuse
from .experiments import Cells, check_profile
from .results import Outcome, Run

Rows = dict[str, tuple[Run, Outcome]]  # by key
Train = Callable[[list[Run]], Rows]


class Search(NamedTuple):
    """The shapes of model to search at, for each profile, and how often each size is tried."""

    source: str
    cells: dict[str, Cells]
    restarts: dict[str, int]


class Bracket(NamedTuple):
    """The largest number that was memorized, and the smallest that was not (None: all were)."""

    memorized: int
    failed: int | None


def _associations(cells: Cells, **changes: Any) -> Cells:
    """Whole-set trainings of the paper's equations; the rate falls linearly to a tenth."""
    common = {
        "model": "aot",
        "variant": "paper",
        "N": 50,
        "n": 2,
        "width": None,
        "layers": 1,
        "steps": 10_000,
        "task": "associations",
        "context": None,
        "schedule": "linear",
        "lr": 3e-3,
        "lr_start": 1.0,
        "lr_end": 0.1,
        "evaluate_every": 50,
        "early_stop": True,
    }
    return [common | changes | {"d_h": cell["d"]} | cell for cell in cells]


def _classes(cells: Cells, **changes: Any) -> Cells:
    """Trainings as for Figure 3 of Mahdavi et al., but stopped when every example is right."""
    sized = [{"n": 32, "T": 1} | cell for cell in cells]
    protocol = {"context": "shared", "least_steps": 300_000} | changes
    made = experiments.memorization(sized, **protocol)
    return [{field: value for field, value in cell.items() if field != "T"} for cell in made]


SEARCHES = {
    "mahdavi-capacity": Search(
        "examples of Mahdavi et al. 2024 (shared context), memorized without an error",
        {
            "paper": _classes([{"H": 4}, {"H": 8}]),
            "quick": _classes([{"H": H, "n": 8} for H in (1, 2, 4)], **experiments.SMALLER),
        },
        {"paper": 3, "quick": 2},
    ),
    "dana-capacity": Search(
        "associations of Dana et al. 2025, memorized without an error",
        {
            "paper": _associations(
                [{"d": 10, "H": H} for H in (1, 2, 4, 6)]
                + [{"d": 10, "H": 4, "d_h": d_h} for d_h in (1, 2, 5)]
                + [{"d": 5, "H": H} for H in (4, 8, 16)]
            ),
            "quick": _associations([{"d": 3, "H": H} for H in (1, 2)], N=10, steps=500),
        },
        {"paper": 4, "quick": 2},
    ),
}


def _check_name(name, profile) -> None:
    if name not in SEARCHES:
        refuse("name", repr(name), f"one of {', '.join(SEARCHES)}")
    check_profile(profile)


def bisect(memorizes: Callable[[int], bool], start: int, most: int) -> Bracket:
    """Double from ``start`` until something fails, then halve the gap to 2% of what is memorized.

    As if a size that fails left no hope for a larger one, which luck may break: then the smaller
    answer is given.

    >>> bisect(lambda T: T <= 700, start=50, most=2500)
    Bracket(memorized=700, failed=712)
    """
    low, high = 0, most + 1
    size = min(start, most)
    while high - low > max(1, low // 50):
        if memorizes(size):
            low = size
        else:
            high = size
        size = min(2 * low, most) if high > most else (low + high) // 2
    return Bracket(low, high if high <= most else None)


def probe(name: str, profile: str, cell: dict[str, Any], size: int) -> list[Run]:
    """The trainings that decide whether ``size`` associations are memorized."""
    sizes = {"batch": size} | cell | {"T": size}  # associations are taken all at once
    return [
        Run(experiment=name, profile=profile, seed=seed, **sizes)
        for seed in range(SEARCHES[name].restarts[profile])
    ]


class _Untrained(Exception):
    """A bisection needs a row that the store does not have."""


def _brackets(name: str, profile: str, train: Train) -> Iterator[tuple[dict[str, Any], Bracket]]:
    """Every cell with its bisection from the rows; ``train`` is asked for those it lacks.

    A cell for which ``train`` raises :class:`_Untrained` is left out.
    """
    known = results.known(name, profile)
    for cell in SEARCHES[name].cells[profile]:
        with contextlib.suppress(_Untrained):
            yield cell, _bracket(partial(probe, name, profile, cell), cell, known, train)


def _bracket(
    runs_of: Callable[[int], list[Run]], cell: dict[str, Any], known: Rows, train: Train
) -> Bracket:

    def memorizes(size: int) -> bool:
        while _memorized(runs_of, known) < size:
            missing = [run for run in runs_of(size) if run.key not in known]
            if not missing:
                return False
            known.update(train(missing))
        return True

    [run, *_] = runs_of(1)
    most = run.N**2 if run.model == "aot" else training.parameter_count(run)
    failed = bisect(memorizes, _bound(run), most).failed
    return Bracket(_memorized(runs_of, known), failed)


def _memorized(runs_of: Callable[[int], list[Run]], known: Rows) -> int:
    """The largest set that a row had right; the weights that had it have all of its subsets."""
    right = (run for run, outcome in known.values() if _all_right(outcome))
    return max((run.T for run in right if run in runs_of(run.T)), default=0)


def _all_right(outcome: Outcome) -> bool:
    return outcome.accuracy == 1


def _bound(run: Run) -> int:
    """What the paper's theorem guarantees for a layer of this shape."""
    if run.model == "aot":
        return bounds.aot_capacity(run.H, run.d_h, run.d)
    return bounds.mha_capacity(run.H, run.n, run.d_h)


@checked_by(lambda name, profile, device, report: _check_name(name, profile))
def search(
    name: str,
    profile: str = "paper",
    device: str = "auto",
    report: Callable[[Run, bool], None] | None = None,
) -> int:
    """Train what the bisections still need and append the rows; returns how many were added.

    A size counts as memorized if a restart has every answer right, at this size or a larger one.
    On a GPU they are trained at once; on a processor one after the other, until one gets there. The
    path of a bisection follows from the rows, so an interrupted search goes on where it was.
    ``report`` is called after each training with its first run and whether one had all right.
    """
    device, added = experiments.choose_device(device), 0
    at_once = 1 if torch.device(device).type == "cpu" else None

    def train(missing: list[Run]) -> Rows:
        nonlocal added
        runs = missing[:at_once]
        outcomes = training.train(runs, device=device)
        rows = {run.key: (run, outcome) for run, outcome in zip(runs, outcomes, strict=True)}
        added += results.append(rows.values())
        if report:
            report(runs[0], any(map(_all_right, outcomes)))
        return rows

    for _ in _brackets(name, profile, train):
        pass
    return added


def _do_not_train(runs: list[Run]) -> Rows:
    raise _Untrained


@checked_by(_check_name)
def found(name: str, profile: str) -> pd.DataFrame:
    """What the stored rows show: one line for every cell whose bisection is complete.

    Columns: the cell's sizes, ``memorized`` and ``failed`` (see :class:`Bracket`; missing if
    everything was memorized), ``bound`` (by the paper's theorem) and ``parameters`` of the model.
    """
    lines = []
    for cell, bracket in _brackets(name, profile, _do_not_train):
        [run, *_] = probe(name, profile, cell, 1)
        sizes = {field: cell[field] for field in ("N", "n", "d", "d_h", "H", "steps")}
        theory = {"bound": _bound(run), "parameters": training.parameter_count(run)}
        lines.append(sizes | bracket._asdict() | theory)
    return pd.DataFrame(lines)
