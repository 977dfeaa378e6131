"""How much training memorizes: how many examples without an error.

A model's *capacity* is the size of the largest table that it gets right entirely, which is what a
capacity theorem bounds. Every training of a search is a row, and the path of its bisection follows
from the rows alone, so that an interrupted search goes on where it was.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from . import models, store
from .store import Row, Rows, Run
from .study import Cells, Place, Selection, Study, Unit, from_grids, name_of


class Bracket(NamedTuple):
    """The largest size that was memorized, or 0, and the smallest that was not, if any."""

    memorized: int
    failed: int | None


@dataclass(frozen=True, eq=False)
class Search(Study):
    """The shapes of model to search at, for each profile, and how often each size is tried.

    A size counts as memorized if one of its restarts, which are ``seeds``, has every answer right,
    at this size or a larger one. On a GPU restarts are trained at once; on a processor one after
    the other, until one gets there. ``cells`` are the trainings of each shape without their size.
    A search is asked through its methods, whether it is listed in :data:`SEARCHES` or not.
    """

    cells: dict[str, Cells]
    seeds: dict[str, int]

    kind = "a search"
    units_known = False

    def missing(self, profile: str, selection: Selection, rows: Rows) -> list[Run]:
        self.configs(profile, selection)
        needed = []
        for cell in self.cells[profile]:
            needed += self.bracket(profile, cell, rows)[1]
        return needed

    def done(self, profile: str, selection: Selection, rows: Rows) -> tuple[int, int]:
        self.configs(profile, selection)
        cells = self.cells[profile]
        return sum(not self.bracket(profile, cell, rows)[1] for cell in cells), len(cells)

    def units(self, profile: str, selection: Selection, rows: Rows, place: Place) -> Iterator[Unit]:
        """What each bisection needs next, until that is with a worker already."""
        self.configs(profile, selection)
        at_once = None if place.device.startswith("cuda") else 1
        for cell in self.cells[profile]:
            last: Unit = []
            while (unit := self.bracket(profile, cell, rows)[1][:at_once]) and unit != last:
                yield unit
                last = unit

    def probe(self, profile: str, cell: dict[str, Any], size: int) -> list[Run]:
        """The restarts that decide whether ``size`` examples are memorized by a cell."""
        batch = cell["batch"] or size  # associations are taken all at once
        fields = cell | {"T": size, "batch": batch, "experiment": self.name, "profile": profile}
        return [Run(seed=seed, **fields) for seed in range(self.seeds[profile])]

    def bracket(self, profile: str, cell: dict[str, Any], rows: Rows) -> tuple[Bracket, list[Run]]:
        """Where the bisection of one shape of model is, and the restarts that it needs next."""
        # The weights that have a set right have all of its subsets.
        best = 0
        for run, outcome in rows.values():
            if outcome.accuracy == 1 and run in self.probe(profile, cell, run.T):
                best = max(best, run.T)
        needed: list[Run] = []

        def memorizes(size: int) -> bool | None:
            runs = [] if size <= best else self.probe(profile, cell, size)
            needed[:] = [run for run in runs if run.key not in rows]
            return None if needed else size <= best

        [run, *_] = self.probe(profile, cell, 1)
        largest = run.N**2 if run.task == "associations" else models.parameter_count(run)
        bracket = bisect(memorizes, models.guaranteed(run), largest)
        return Bracket(best, bracket.failed), needed

    def found(self, profile: str, rows: Rows) -> pd.DataFrame:
        """A line for each completed cell, as :func:`found` says."""
        self.configs(profile)
        lines = []
        for cell in self.cells[profile]:
            bracket, needed = self.bracket(profile, cell, rows)
            if needed:
                continue
            [run, *_] = self.probe(profile, cell, 1)
            sizes = {field: cell[field] for field in ("N", "n", "d", "d_h", "H", "steps")}
            theory = {"bound": models.guaranteed(run), "parameters": models.parameter_count(run)}
            lines.append(sizes | bracket._asdict() | theory)
        return pd.DataFrame(lines)

    def say(self, rows: Sequence[Row]) -> str:
        run, _ = rows[0]
        memorized = any(outcome.accuracy == 1 for _, outcome in rows)
        result = "memorized" if memorized else "not memorized"
        return f"{name_of(run)}, restart {run.seed}, {result}"


SEARCHES: dict[str, Search] = from_grids(Search, search=True)


def bisect(memorizes: Callable[[int], bool | None], start: int, largest: int) -> Bracket:
    """Double from ``start`` until a size fails, then halve the gap to 2% of what is memorized.

    Where a size beyond one that fails would not fail, this is the smaller answer. ``memorizes``
    gives None for a size that is not known yet, which ends it there.
    """
    low, high = 0, largest + 1
    size = min(start, largest)
    while high - low > max(1, low // 50):
        memorized = memorizes(size)
        if memorized is None:
            break
        if memorized:
            low = size
        else:
            high = size
        size = min(2 * low, largest) if high > largest else (low + high) // 2
    return Bracket(low, high if high <= largest else None)


def found(name: str, profile: str, rows: Rows | None = None) -> pd.DataFrame:
    """What the rows of a search, by default those stored, show, for each completed cell.

    It has the cell's sizes, ``memorized`` and ``failed`` (missing if everything was memorized),
    ``bound`` (by the paper's theorem) and ``parameters`` of the model.
    """
    search = SEARCHES[name]
    search.check_profile(profile)
    return search.found(profile, store.known(name, profile) if rows is None else rows)
