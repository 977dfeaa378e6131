"""What every study offers: configurations to measure, in units, and the rows that they become.

A *study* is a figure, a table or a question of ours. A *unit* is what is measured at once and takes
minutes to hours; each of its configurations becomes a *row* of the store. Each kind of study has a
file; trainings of a grid (:class:`Experiment`) are here, and what reads ``grids.toml``.
"""

import itertools
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, NoReturn

import pandas as pd

from ..checks import check_integer, refuse
from ..papers import papers
from . import models, store, training
from .store import COLUMNS, Reading, Row, Rows, Run, Skewed

PROFILES = ("paper", "quick")
CHECKPOINTS = ".checkpoints"  # the folder of trainings under way, beside those of the rows
SIZES = ("d", "d_h", "H", "n", "T", "width")  # what the published grids sweep
# The fields that other runs do not have.
_OF_SKEWED = tuple(field.name for field in fields(Skewed) if field.name not in COLUMNS[Run])
Unit = list[Any]  # configurations that are measured at once, one row each
Cells = list[dict[str, Any]]


class Selection(NamedTuple):
    """A part of a study; by default all that was published."""

    seeds: int | None = None  # the first so many of each training
    variant: str | None = None  # how the paper is read, one of attnmem.lab.models.VARIANTS
    where: Mapping[str, Any] | None = None  # the values of some fields, such as {"d": 10}
    tf32: bool = False  # whether a GPU may compute products so, in trainings of their own


class Place(NamedTuple):
    """Where units are measured; if time is ``limited``, cheap curves and first seeds come first."""

    device: str = "cpu"
    limited: bool = False


class ByName(dict):
    """Studies by name; a name that is not among them is refused."""

    def __missing__(self, name: str) -> NoReturn:
        refuse("name", repr(name), f"one of {', '.join(self)}")


ALL = Selection()


@dataclass(frozen=True, eq=False)
class Study:
    """A figure, a table or a question; a kind of its own says what is not as for trainings."""

    name: str  # in the command line and in the store
    paper: str  # a key of attnmem.papers.papers()
    what: str  # its name in the paper

    kind = "trainings"  # what is measured, in words
    config = Run  # the class of its configurations
    profiles = PROFILES
    default_profile = "paper"
    variants = ()
    curves = None
    units_known = True  # before the first is measured

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
        configs = self.configs(profile, selection)
        return [config for config in configs if config.key not in rows]

    def done(self, profile: str, selection: Selection, rows: Rows) -> tuple[int, int]:
        """How many rows (of a search: complete cells) are stored, of how many."""
        configs = self.configs(profile, selection)
        return sum(config.key in rows for config in configs), len(configs)

    def units(self, profile: str, selection: Selection, rows: Rows, place: Place) -> Iterable[Unit]:
        """What is missing, in units. Rows may grow between two of them."""
        return [[config] for config in self.missing(profile, selection, rows)]

    def curve_of(self, config: Any) -> Any:
        """The value of the field ``curves``, or None if the study has one curve."""
        return getattr(config, self.curves) if self.curves else None

    def prices(self, configs: Iterable[Any], rows: Rows) -> list[float]:
        """The seconds of each configuration on a CPU; nan if there are no rows.

        By rows of its own cell; else by the time of a step in this cell on other curves, as if it
        did not stop early; else by the time of a step in all rows.
        """
        times: dict[Any, list[float]] = {}  # seconds a step, of the rows of each cell
        timed = [row for row in rows.values() if row[1].device == "cpu"] or rows.values()
        for config, result in timed:
            cell, *wider_cells = self._cells(config)
            times.setdefault(cell, []).append(result.wall_s / getattr(config, "steps", 1))
            for wider in wider_cells:
                times.setdefault(wider, []).append(result.wall_s / steps_made(config, result))
        prices = []
        for config in configs:
            of_narrowest = [times[cell] for cell in self._cells(config) if cell in times][:1]
            seconds = mean(of_narrowest[0]) if of_narrowest else math.nan
            prices.append(getattr(config, "steps", 1) * seconds)
        return prices

    def _cells(self, config: Any) -> tuple[tuple[Any, ...], ...]:
        """Its cell, all seeds; the same place on all curves; and the whole study."""
        cell = tuple(pair for pair in vars(config).items() if pair[0] != "seed")
        place = tuple(pair for pair in cell if pair[0] not in ("steps", self.curves))
        return cell, place, ()

    def perform(self, unit: Unit, device: str, root: Path | None = None) -> list[Row]:
        """Measure a unit, in any process: one row for each configuration.

        What is under way is kept in the folder of rows, by default that of the process.
        """
        store.commit()  # asked now, since the checkout may change before the end
        checkpoints = (root or store.writable_root()) / CHECKPOINTS
        outcomes = training.train(unit, device=device, checkpoints=checkpoints)
        return list(zip(unit, outcomes, strict=True))

    def say(self, rows: Sequence[Row]) -> str:
        """A few words on the rows of one unit, for whoever waits."""
        n_diverged = sum(outcome.diverged is not None for _, outcome in rows)
        name = name_of(rows[0][0])
        return f"{name}, {n_diverged} of {len(rows)} diverged" if n_diverged else name

    def table(self, rows: Iterable[Row]) -> pd.DataFrame:
        """Rows with a column for each field of the store, and those that this kind adds.

        Of a training that diverged, ``accuracy`` and ``loss`` are missing; of others ``diverged``.
        A column without any value is one of NaN, as where others have some.
        """
        records = [vars(config) | vars(result) for config, result in rows]
        table = pd.DataFrame(records, columns=[*COLUMNS[self.config]])
        empty = table.columns[table.isna().all()] if records else []
        return table.astype(dict.fromkeys(empty, float))


def steps_made(config: Any, result: Any) -> int:
    """The steps that a row took: fewer than its configuration says if it stopped early."""
    steps = getattr(config, "steps", 1)
    if getattr(config, "early_stop", False) and result.accuracy == 1:
        return result.best_step or steps
    return steps


# --- trainings ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Experiment(Study):
    """A figure or table of a paper: the cells of its grid for each profile, and its seeds.

    Each of the ``cells`` has the fields of a :class:`~attnmem.lab.store.Run`. The published reading
    is the first of ``variants``; ``curves`` is the field that tells a figure's curves apart. Its
    table has the number of ``parameters``, too.
    """

    cells: dict[str, Cells]
    seeds: dict[str, int]
    variants: Sequence[str] = ("code",)
    curves: str | None = None

    @property
    def config(self) -> type[Run]:
        [cell, *_] = self.cells["quick"]
        if cell["task"] == "text":
            return Reading
        return Skewed if "prior" in cell else Run

    def configs(self, profile: str, selection: Selection = ALL) -> list[Run]:
        seeds, variant, where, tf32 = selection
        self.check_profile(profile)
        if seeds is not None:
            check_integer("seeds", seeds)
        if variant not in (None, *self.variants):
            refuse("variant", repr(variant), f"one of {', '.join(self.variants)} for {self.name}")
        cells = self.cells[profile]
        for field, value in (where or {}).items():
            if field not in cells[0]:
                numbers = [f for f, x in cells[0].items() if isinstance(x, (int, float))]
                refuse("where", f"the field {field!r}", f"one of {', '.join(numbers)}")
            choices = dict.fromkeys(cell[field] for cell in cells)
            cells = [cell for cell in cells if cell[field] == value]
            if not cells:
                listed = ", ".join(map(str, choices))
                refuse("where", where, f"a part of {self.name}, with {field} among {listed}")
        settings = {"variant": variant or self.variants[0], "products": "tf32" if tf32 else None}
        runs = []
        for cell in cells:
            for seed in range(seeds or self.seeds[profile]):
                values = cell | settings | {"seed": seed}
                runs.append(self.config(experiment=self.name, profile=profile, **values))
        return runs

    def units(self, profile: str, selection: Selection, rows: Rows, place: Place) -> Iterator[Unit]:
        runs = self.missing(profile, selection, rows)
        if not place.limited:
            yield from training.stacks(runs)
            return
        costs: dict[Any, list[float]] = {}  # of each curve
        for run, seconds in zip(runs, self.prices(runs, rows), strict=True):
            size = run.steps * run.batch * run.d * max(run.H * run.d_h, run.width or 0)
            of_curve = costs.setdefault(self.curve_of(run), [])
            of_curve.append(size if math.isnan(seconds) else seconds)
        runs.sort(key=lambda run: mean(costs[self.curve_of(run)]))
        # On a GPU a step of all seeds takes hardly longer than a step of one.
        if place.device.startswith("cuda"):
            yield from training.stacks(runs)
        else:
            yield from training.stacks([run for run in runs if run.seed == 0])
            yield from training.stacks([run for run in runs if run.seed > 0])

    def table(self, rows: Iterable[Row]) -> pd.DataFrame:
        rows = [*rows]
        counts = [models.parameter_count(run) for run, _ in rows]
        return super().table(rows).assign(parameters=counts)


def name_of(run: Run) -> str:
    """The cell of a training in a few words: its experiment, variant and sizes."""
    name = run.experiment if run.variant == "code" else f"{run.experiment}, {run.variant}"
    sizes = {field: getattr(run, field) for field in (*SIZES, *_OF_SKEWED)}
    words = [f"{field}={size}" for field, size in sizes.items() if size is not None]
    return " ".join([name, *words])


# --- grids.toml, whose head says how it is read ---------------------------------------------------

GRIDS = Path(__file__).with_name("grids.toml")
_ENTRY = ("title", "ours", *PROFILES, "curves", "variants", "search")
_FIELDS = [f.name for f in fields(Skewed) if f.name not in ("experiment", "profile", "seed")]
_NEEDED = ("seeds", *(field for field in _FIELDS if not COLUMNS[Skewed][field][1]))
_TYPES = {field: COLUMNS[Skewed][field][0] for field in _FIELDS}
_TYPES |= dict.fromkeys(("seeds", "batches", "epochs", "least_steps", "width_per_d"), int)


def from_grids(study_type: type[Study], *, search: bool = False) -> dict[str, Any]:
    """All experiments, or all searches, by name. A bad entry is refused by its name and field."""
    tables = tomllib.loads(GRIDS.read_text("utf-8"))
    settings, studies = tables.pop("settings"), ByName()
    for name, entry in tables.items():
        _check_entry(name, entry)
        if entry.get("search", False) != search:
            continue
        cells, seeds = {}, {}
        for profile in PROFILES:
            place = f"grids.toml, {name}, {profile}"
            cells[profile] = _cells(place, entry[profile], settings, search)
            numbers = {cell.pop("seeds") for cell in cells[profile]}
            seeds[profile] = numbers.pop()
            if numbers or seeds[profile] < 1:
                refuse(f"{place}, seeds", seeds[profile], "one number, at least 1")
        options = {key: entry[key] for key in ("curves", "variants") if key in entry}
        title = entry.get("title") or f"{entry['ours']} (not in the paper)"
        studies[name] = study_type(name, _paper_of(name), title, cells, seeds, **options)
    return studies


def _paper_of(name: str) -> str:
    return name.split("-")[0]


def _check_entry(name: str, entry: Mapping[str, Any]) -> None:
    place = f"grids.toml, {name}"
    for field in {*entry} - {*_ENTRY}:
        refuse(place, f"the field {field!r}", f"one of {', '.join(_ENTRY)}")
    if ("title" in entry) == ("ours" in entry) or not {*PROFILES} <= {*entry}:
        refuse(place, ", ".join(entry), "title or ours, and paper and quick")
    if _paper_of(name) not in papers():
        refuse(place, repr(_paper_of(name)), f"a name with one of {', '.join(papers())}")
    if entry.get("curves", "d") not in _FIELDS:
        refuse(f"{place}, curves", entry["curves"], f"one of {', '.join(_FIELDS)}")


def _cells(place: str, grids: Any, settings: dict[str, Any], search: bool) -> Cells:
    """Every combination of the values of a grid, or of several grids."""
    cells = []
    for grid in grids if isinstance(grids, list) else [grids]:
        axes = {}
        for field, value in with_settings(place, grid, settings).items():
            axes[field] = _axis(f"{place}, {field}", field, value)
        for point in itertools.product(*axes.values()):
            cells.append(_cell(place, dict(zip(axes, point, strict=True)), search))
    if not cells:
        refuse(place, grids, "one grid or several")
    return cells


def _axis(place: str, field: str, value: Any) -> list[Any]:
    if field not in _TYPES:
        refuse(place, "a field that nothing reads", f"one of {', '.join(_TYPES)}")
    axis = value if isinstance(value, list) else [value]
    if not axis or not all(isinstance(entry, _TYPES[field]) for entry in axis):
        refuse(place, repr(value), f"one or several of type {_TYPES[field].__name__}")
    return axis


def with_settings(
    place: str, grid: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings that a grid names, then its own, which override them."""
    names = grid.get("like", [])
    inherited = {}
    for name in [names] if isinstance(names, str) else names:
        if name not in settings:
            refuse(f"{place}, like", repr(name), f"one of {', '.join(settings)}")
        inherited |= with_settings(place, settings[name], settings)
    before = {field: value for field, value in inherited.items() if field not in grid}
    return before | {field: value for field, value in grid.items() if field != "like"}


def _cell(place: str, point: dict[str, Any], search: bool) -> dict[str, Any]:
    """A training's fields, with those that follow from others, and ``seeds``."""
    cell = {"variant": "code", "d_h": point.get("d", 0)} | point
    if "batches" in cell:
        cell["T"] = cell["batches"] * cell.get("batch", 0)
    if "epochs" in cell:
        steps = cell["epochs"] * cell.get("T", 0) // cell.get("batch", 1)
        cell = {"steps": max(steps, cell.get("least_steps", 0))} | cell
    if "width_per_d" in cell:
        cell["width"] = cell["width_per_d"] * cell.get("d", 0)
    for field in _NEEDED:
        if field not in cell and not (search and field in ("T", "batch")):  # found later
            refuse(f"{place}, {field}", "nothing", "a value")
    others = () if {*_OF_SKEWED} & {*cell} else _OF_SKEWED
    return {field: cell.get(field) for field in ("seeds", *_FIELDS) if field not in others}


EXPERIMENTS: dict[str, Experiment] = from_grids(Experiment)
