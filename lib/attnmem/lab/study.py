"""What every study offers: configurations to measure, in units, and the rows that they become.

A *study* is a figure, a table or a question of ours. A *unit* is what is measured at once and takes
minutes to hours; each of its configurations becomes a *row* of the store. Each kind of study has a
file; trainings of a grid (:class:`Experiment`) are here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple, NoReturn

import pandas as pd

from ..checks import check_integer, refuse
from ..papers import papers
from . import store, training
from .grids import PROFILES, Cells
from .store import COLUMNS, Row, Rows, Run

CHECKPOINTS = ".checkpoints"  # the folder of trainings under way, beside those of the rows
SIZES = ("d", "d_h", "H", "n", "T", "width")  # what the published grids sweep
Unit = list[Any]  # configurations that are measured at once, one row each


class Selection(NamedTuple):
    """A part of a study; by default all that was published."""

    seeds: int | None = None  # the first so many of each training
    variant: str | None = None  # how the paper is read, one of attnmem.lab.models.VARIANTS
    where: Mapping[str, Any] | None = None  # the values of some fields, such as {"d": 10}
    tf32: bool = False  # whether a GPU may compute products so, in trainings of their own


class _Place(NamedTuple):
    """Where units are measured; if time is ``limited``, cheap curves and first seeds come first."""

    device: str = "cpu"
    workers: int = 1  # which share the device's memory
    limited: bool = False


class Done(NamedTuple):
    """How many rows (of a search: complete cells) are stored, of how many."""

    have: int
    of: int


class _Named(dict):
    """Studies by name; a name that is not among them is refused."""

    def __missing__(self, name: str) -> NoReturn:
        refuse("name", repr(name), f"one of {', '.join(self)}")


ALL, _HERE = Selection(), _Place()


@dataclass(frozen=True, eq=False)
class Study:
    """A figure, a table or a question; a kind of its own says what is not as for trainings.

    ``name`` in the command line and in the store; ``paper``, a key of
    :func:`attnmem.papers.papers`; ``what``, its name in the paper. ``kind`` says in words what
    is measured, ``config`` is the class of its configurations, ``profiles`` are its versions.
    ``units_known``: whether all units are known before the first is measured.
    """

    name: str
    paper: str
    what: str

    kind = "trainings"
    config = Run
    profiles = PROFILES
    default_profile = "paper"
    variants = ()
    curves = None
    units_known = True

    @property
    def source(self) -> str:
        """Its paper and its name there, such as ``Dana et al. 2025, Exp. 1``."""
        return papers()[self.paper].source(self.what)

    def check_profile(self, profile: str) -> None:
        """Refuse a profile that the study does not have."""
        if profile not in self.profiles:
            refuse("profile", repr(profile), f"one of {', '.join(self.profiles)}")

    def configs(self, profile: str, selection: Selection = ALL) -> list[Any]:
        """All configurations; none of a search. Refuses what the study does not have, by name."""
        self.check_profile(profile)
        for field, value in selection._asdict().items():
            if value is not None and value is not False:
                refuse(field, repr(value), f"nothing, since {self.name} is {self.kind}")
        return []

    def missing(self, profile: str, selection: Selection, rows: Rows) -> list[Any]:
        """The configurations that could be measured now and have no row."""
        return [one for one in self.configs(profile, selection) if one.key not in rows]

    def done(self, profile: str, selection: Selection, rows: Rows) -> Done:
        """How much of a selection is stored."""
        configs = self.configs(profile, selection)
        return Done(sum(one.key in rows for one in configs), len(configs))

    def units(
        self, profile: str, selection: Selection, rows: Rows, place: _Place = _HERE
    ) -> Iterable[Unit]:
        """What is missing, in units. Rows may grow between two of them."""
        return [[one] for one in self.missing(profile, selection, rows)]

    def curve_of(self, config: Any) -> Any:
        """The value of the field ``curves``, or None if the study has one curve."""
        return getattr(config, self.curves) if self.curves else None

    def prices(self, configs: Iterable[Any], rows: Rows) -> list[float]:
        """The seconds of each configuration on a CPU; nan if there are no rows.

        By rows of its own cell; else by the time of a step in this cell on other curves, as if it
        did not stop early; else by the time of a step in all rows.
        """
        times: dict[Any, list[float]] = {}
        for config, result in _on_a_cpu(rows):
            steps = made = getattr(config, "steps", 1)
            if getattr(config, "early_stop", False) and result.accuracy == 1:
                made = result.best_step or steps
            own, *others = self._cells(config)
            times.setdefault(own, []).append(result.wall_s / steps)
            for cell in others:
                times.setdefault(cell, []).append(result.wall_s / made)
        return [
            getattr(one, "steps", 1)
            * mean(next((times[c] for c in self._cells(one) if c in times), [math.nan]))
            for one in configs
        ]

    def _cells(self, config: Any) -> tuple[tuple[Any, ...], ...]:
        """Its cell, all seeds; the same place on all curves; and the whole study."""
        own = tuple(pair for pair in vars(config).items() if pair[0] != "seed")
        return own, tuple(pair for pair in own if pair[0] not in ("steps", self.curves)), ()

    def perform(self, unit: Unit, device: str) -> list[Row]:
        """Measure a unit, in any process: one row for each configuration."""
        store.commit()  # asked now, since the checkout may change before the end
        checkpoints = store.writable_root() / CHECKPOINTS
        outcomes = training.train(unit, device=device, checkpoints=checkpoints)
        return list(zip(unit, outcomes, strict=True))

    def say(self, rows: Sequence[Row]) -> str:
        """A few words on the rows of one unit, for whoever waits."""
        lost = sum(outcome.diverged is not None for _, outcome in rows)
        name = name_of([run for run, _ in rows])
        return f"{name}, {lost} of {len(rows)} diverged" if lost else name

    def table(self, rows: Iterable[Row]) -> pd.DataFrame:
        """Rows with a column for each field of the store, and those that this kind adds.

        Of a training that diverged, ``accuracy`` and ``loss`` are missing; of others ``diverged``.
        """
        values = [vars(config) | vars(result) for config, result in rows]
        return pd.DataFrame(values, columns=[*COLUMNS[self.config]])


def _on_a_cpu(rows: Rows) -> Iterable[Row]:
    """The rows from there, or all if none is."""
    return [row for row in rows.values() if row[1].device == "cpu"] or rows.values()


# --- trainings ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Experiment(Study):
    """A figure or table of a paper: the cells of its grid for each profile, and its seeds.

    Each of the ``cells`` has the fields of a :class:`~attnmem.lab.store.Run`. The published reading
    is the first of ``variants``; ``curves`` is the field that tells a figure's curves apart.
    """

    cells: dict[str, Cells]
    seeds: dict[str, int]
    variants: Sequence[str] = ("code",)
    curves: str | None = None

    def configs(self, profile: str, selection: Selection = ALL) -> list[Run]:
        seeds, variant, where, tf32 = selection
        self.check_profile(profile)
        if seeds is not None:
            check_integer("seeds", seeds)
        if variant not in (None, *self.variants):
            refuse("variant", repr(variant), f"one of {', '.join(self.variants)} for {self.name}")
        cells = self._part(profile, where) if where else self.cells[profile]
        own = {"variant": variant or self.variants[0], "products": "tf32" if tf32 else None}
        return [
            Run(experiment=self.name, profile=profile, seed=seed, **cell | own)
            for cell in cells
            for seed in range(seeds or self.seeds[profile])
        ]

    def _part(self, profile: str, where: Mapping[str, Any]) -> Cells:
        """The cells with these values; a field, a value or a part that there is not is refused."""
        cells = every = self.cells[profile]
        for field, value in where.items():
            if field not in every[0]:
                numbers = [f for f, x in every[0].items() if isinstance(x, (int, float))]
                refuse("where", f"the field {field!r}", f"one of {', '.join(numbers)}")
            known = dict.fromkeys(cell[field] for cell in every)
            if value not in known:
                values = f"{field} among {', '.join(map(str, known))} for {self.name}"
                refuse("where", f"{field} = {value}", values)
            cells = [cell for cell in cells if cell[field] == value]
        return cells or refuse("where", where, f"values that stand together in {self.name}")

    def units(
        self, profile: str, selection: Selection, rows: Rows, place: _Place = _HERE
    ) -> Iterator[Unit]:
        runs = self.missing(profile, selection, rows)
        device, workers, limited = place
        parts = [runs]
        if limited:
            costs = self._costs(runs, rows)
            runs.sort(key=lambda run: costs[self.curve_of(run)])
            # On a GPU a step of all seeds takes hardly longer than a step of one.
            if not device.startswith("cuda"):
                parts = [[r for r in runs if not r.seed], [r for r in runs if r.seed]]
        for part in parts:
            yield from training.stacks(part, device, workers=workers)

    def _costs(self, runs: list[Run], rows: Rows) -> dict[Any, tuple[float, int]]:
        """Of each curve the mean time of its rows; then the size of its largest training."""
        seconds: dict[Any, list[float]] = {}
        for run, outcome in _on_a_cpu(rows):
            seconds.setdefault(self.curve_of(run), []).append(outcome.wall_s)
        sizes: dict[Any, int] = {}
        for run in runs:
            size = run.steps * run.batch * run.d * max(run.H * run.d_h, run.width or 0)
            curve = self.curve_of(run)
            sizes[curve] = max(size, sizes.get(curve, 0))
        return {c: (mean(seconds.get(c, [math.inf])), size) for c, size in sizes.items()}


def name_of(runs: Sequence[Run]) -> str:
    """Trainings of one experiment in a few words: its name, their variant, their sizes."""
    run = runs[0]
    words = [run.experiment if run.variant == "code" else f"{run.experiment}, {run.variant}"]
    for field in SIZES:
        if sizes := {size for each in runs if (size := getattr(each, field)) is not None}:
            ends = " to ".join(str(end) for end in dict.fromkeys((min(sizes), max(sizes))))
            words.append(f"{field}={ends}")
    return " ".join(words)
