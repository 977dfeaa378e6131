"""How many examples training memorizes without an error, by bisection over their number.

The accuracy of an overloaded model says how much of a table it gets right; its *capacity* is the
size of the largest table that it gets right entirely, and that is what a capacity theorem bounds.
Every training of a search is a row, and the path of its bisection follows from the rows alone, so
that an interrupted search goes on where it was. :func:`found` reads off the rows what they show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch

from .. import training
from ..checks import checked_by, refuse
from ..results import Outcome, Row, Run
from . import mahdavi, read
from .study import Done, Part, Rows, Unit, check_whole, source_of
from .trainings import PROFILES, Cells, name_of, train


class Bracket(NamedTuple):
    """Where a bisection ends.

    Attributes:
        memorized: The largest number that was memorized; 0 if none was.
        failed: The smallest number that was not, or None if all were.
    """

    memorized: int
    failed: int | None


class Untrained(Exception):
    """A bisection needs rows that the store does not have: those of ``runs``."""

    def __init__(self, runs: list[Run]) -> None:
        super().__init__(runs)
        self.runs = runs


class Search(NamedTuple):
    """The shapes of model to search at, for each profile, and how often each size is tried.

    A size counts as memorized if a restart has every answer right, at this size or a larger one. On
    a GPU restarts are trained at once; on a processor one after the other, until one gets there.

    Attributes:
        name: Its name in the store.
        paper: The paper's key.
        what: What is searched for, in words.
        cells: For each profile, the fields of the trainings of each shape but their size.
        restarts: For each profile, how many seeds try a size.
    """

    name: str
    paper: str
    what: str
    cells: dict[str, Cells]
    restarts: dict[str, int]

    kind = "a search"
    profiles = PROFILES
    usual = "paper"
    variants = ()
    foreseen = False

    source = source_of
    check = check_whole

    def units(
        self, profile: str, part: Part, rows: Rows, device: str, workers: int, urgent: bool
    ) -> Iterator[Unit]:
        """For each shape the trainings that its bisection needs next, as long as there are any.

        Args:
            profile: ``paper`` or ``quick``.
            part: The whole.
            rows: Stored rows by key, which may grow between two units.
            device: On a CPU a unit is one restart, on a GPU all that are missing at a size.
            workers: Has no effect.
            urgent: Has no effect.

        Yields:
            Restarts of one size.
        """
        self.check(profile, part)
        at_once = 1 if torch.device(device).type == "cpu" else None
        for cell in self.cells[profile]:
            asked = None
            while (runs := self._next(profile, cell, rows)) and runs[:at_once] != asked:
                asked = runs[:at_once]
                yield asked

    def _next(self, profile: str, cell: dict[str, Any], rows: Rows) -> list[Run]:
        try:
            bracket(partial(probe, self.name, profile, cell), rows)
        except Untrained as needed:
            return needed.runs
        return []

    def perform(self, unit: Unit, device: str) -> list[Row]:
        """Train restarts of one size.

        Args:
            unit: The restarts.
            device: Where.

        Returns:
            Each restart with its outcome.
        """
        return train(unit, device)

    def done(self, profile: str, part: Part, rows: Rows) -> Done:
        """How many of the shapes have a complete bisection.

        Args:
            profile: ``paper`` or ``quick``.
            part: The whole.
            rows: Stored rows by key.

        Returns:
            The number of complete bisections, and of all shapes.
        """
        self.check(profile, part)
        cells = self.cells[profile]
        return Done(sum(not self._next(profile, cell, rows) for cell in cells), len(cells))

    def say(self, rows: Sequence[Row]) -> str:
        """The size that was tried, and whether it was memorized."""
        run, _ = rows[0]
        verb = "memorized" if any(_all_right(outcome) for _, outcome in rows) else "not memorized"
        return f"{name_of([run])}, restart {run.seed}, {verb}"


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
    made = mahdavi.memorization(sized, **protocol)
    return [{field: value for field, value in cell.items() if field != "T"} for cell in made]


SEARCHES = {
    search.name: search
    for search in (
        Search(
            "mahdavi-capacity",
            "mahdavi",
            "examples (shared context) memorized without an error",
            {
                "paper": _classes([{"H": 4}, {"H": 8}]),
                "quick": _classes([{"H": H, "n": 8} for H in (1, 2, 4)], **mahdavi.SMALLER),
            },
            {"paper": 3, "quick": 2},
        ),
        Search(
            "dana-capacity",
            "dana",
            "associations memorized without an error",
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
        Search(  # as many parameters, or as large a dimension, as d_h = d = 5 and H = 4
            "dana-shapes",
            "dana",
            "associations memorized without an error, narrower heads (not in the paper)",
            {
                "paper": _associations(
                    [{"d": 5, "H": H, "d_h": d_h} for H, d_h in ((10, 2), (20, 1), (11, 1), (6, 2))]
                ),
                "quick": _associations([{"d": 3, "H": 2, "d_h": 1}], N=10, steps=500),
            },
            {"paper": 4, "quick": 2},
        ),
    )
}


def bisect(memorizes: Callable[[int], bool], start: int, most: int) -> Bracket:
    """Double from ``start`` until something fails, then halve the gap to 2% of what is memorized.

    As if a size that fails left no hope for a larger one, which luck may break: then the smaller
    answer is given.

    Args:
        memorizes: Whether a size, from 1 to ``most``, is memorized; no size is asked for twice.
        start: The first size that is asked for.
        most: The largest size.

    Returns:
        The largest size that was memorized, and the smallest that was not.

    Example:
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
    """The trainings that decide whether ``size`` examples are memorized by one shape of model.

    Args:
        name: A key of ``SEARCHES``.
        profile: ``paper`` or ``quick``.
        cell: The fields of the shape, one of the search's ``cells``.
        size: The number of examples, at least 1.

    Returns:
        The restarts, one for each seed.
    """
    sizes = {"batch": size} | cell | {"T": size}  # associations are taken all at once
    return [
        Run(experiment=name, profile=profile, seed=seed, **sizes)
        for seed in range(SEARCHES[name].restarts[profile])
    ]


def bracket(runs_of: Callable[[int], list[Run]], rows: Rows) -> Bracket:
    """The bisection of one shape of model, from its rows.

    Args:
        runs_of: The restarts of a size.
        rows: Stored rows by key.

    Returns:
        Where the bisection ends.

    Raises:
        Untrained: It needs a size whose restarts do not all have rows, and none memorized it.
    """
    best = _memorized(runs_of, rows)

    def memorizes(size: int) -> bool:
        if best >= size:
            return True
        if needed := [run for run in runs_of(size) if run.key not in rows]:
            raise Untrained(needed)
        return False

    [run, *_] = runs_of(1)
    most = run.N**2 if run.task == "associations" else training.parameter_count(run)
    return Bracket(best, bisect(memorizes, guaranteed(run), most).failed)


def _memorized(runs_of: Callable[[int], list[Run]], rows: Rows) -> int:
    """The largest set that a row had right; the weights that had it have all of its subsets."""
    right = (run for run, outcome in rows.values() if _all_right(outcome))
    return max((run.T for run in right if run in runs_of(run.T)), default=0)


def _all_right(outcome: Outcome) -> bool:
    """Every answer; a training that diverged has no accuracy, and none right."""
    return outcome.accuracy == 1


def guaranteed(run: Run) -> int:
    """How many examples the paper's theorem guarantees for a layer of this shape."""
    return training.FAMILIES[run.model].guaranteed(run)


def _check_name(name, profile) -> None:
    if name not in SEARCHES:
        refuse("name", repr(name), f"one of {', '.join(SEARCHES)}")
    SEARCHES[name].check(profile)


@checked_by(_check_name)
def found(name: str, profile: str) -> pd.DataFrame:
    """What the stored rows show: one line for every cell whose bisection is complete.

    Args:
        name: A key of ``SEARCHES``.
        profile: ``paper`` or ``quick``.

    Returns:
        A table with the cell's sizes, ``memorized`` and ``failed`` (see :class:`Bracket`; missing
        if everything was memorized), ``bound`` (by the paper's theorem) and ``parameters`` of the
        model.

    Raises:
        ValueError: An argument is unknown; the message names it.
    """
    rows, lines = read.rows(name, profile), []
    for cell in SEARCHES[name].cells[profile]:
        try:
            ends = bracket(partial(probe, name, profile, cell), rows)
        except Untrained:
            continue
        [run, *_] = probe(name, profile, cell, 1)
        sizes = {field: cell[field] for field in ("N", "n", "d", "d_h", "H", "steps")}
        theory = {"bound": guaranteed(run), "parameters": training.parameter_count(run)}
        lines.append(sizes | ends._asdict() | theory)
    return pd.DataFrame(lines)
