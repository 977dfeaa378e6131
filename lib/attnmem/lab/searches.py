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
    """

    cells: dict[str, Cells]
    seeds: dict[str, int]

    kind = "a search"
    units_known = False

    def missing(self, profile: str, selection: Selection, rows: Rows) -> list[Run]:
        self.configs(profile, selection)
        return [run for cell in self.cells[profile] for run in self.bracket(profile, cell, rows)[1]]

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

    def bracket(self, profile: str, cell: dict[str, Any], rows: Rows) -> tuple[Bracket, list[Run]]:
        """Where the bisection of one shape of model is, and the restarts that it needs next."""
        # The weights that have a set right have all of its subsets.
        best = 0
        for run, outcome in rows.values():
            if outcome.accuracy == 1 and run in probe(self.name, profile, cell, run.T):
                best = max(best, run.T)
        needed: list[Run] = []

        def memorizes(size: int) -> bool | None:
            runs = [] if size <= best else probe(self.name, profile, cell, size)
            needed[:] = [run for run in runs if run.key not in rows]
            return None if needed else size <= best

        [run, *_] = probe(self.name, profile, cell, 1)
        most = run.N**2 if run.task == "associations" else models.parameter_count(run)
        start = models.guaranteed(run)
        return Bracket(best, bisect(memorizes, start, most).failed), needed

    def say(self, rows: Sequence[Row]) -> str:
        run, _ = rows[0]
        verb = "memorized" if any(o.accuracy == 1 for _, o in rows) else "not memorized"
        return f"{name_of(run)}, restart {run.seed}, {verb}"


SEARCHES: dict[str, Search] = from_grids(Search, search=True)


def bisect(memorizes: Callable[[int], bool | None], start: int, most: int) -> Bracket:
    """Double from ``start`` until a size fails, then halve the gap to 2% of what is memorized.

    Where a size beyond one that fails would not fail, this is the smaller answer. ``memorizes``
    gives None for a size that is not known yet, which ends it there.
    """
    low, high = 0, most + 1
    size = min(start, most)
    while high - low > max(1, low // 50):
        known = memorizes(size)
        if known is None:
            break
        low, high = (size, high) if known else (low, size)
        size = min(2 * low, most) if high > most else (low + high) // 2
    return Bracket(low, high if high <= most else None)


def probe(name: str, profile: str, cell: dict[str, Any], size: int) -> list[Run]:
    """The restarts that decide whether ``size`` examples are memorized by a search's cell."""
    sizes = cell | {"T": size, "batch": cell["batch"] or size}  # associations are taken all at once
    sizes |= {"experiment": name, "profile": profile}
    return [Run(seed=seed, **sizes) for seed in range(SEARCHES[name].seeds[profile])]


def found(name: str, profile: str, rows: Rows | None = None) -> pd.DataFrame:
    """What the rows of a search, by default those stored, show, for each completed cell.

    It has the cell's sizes, ``memorized`` and ``failed`` (missing if everything was memorized),
    ``bound`` (by the paper's theorem) and ``parameters`` of the model.
    """
    search, lines = SEARCHES[name], []
    search.configs(profile)
    rows = store.known(name, profile) if rows is None else rows
    for cell in search.cells[profile]:
        ends, needed = search.bracket(profile, cell, rows)
        if not needed:
            [run, *_] = probe(name, profile, cell, 1)
            sizes = {field: cell[field] for field in ("N", "n", "d", "d_h", "H", "steps")}
            theory = {"bound": models.guaranteed(run), "parameters": models.parameter_count(run)}
            lines.append(sizes | ends._asdict() | theory)
    return pd.DataFrame(lines)
