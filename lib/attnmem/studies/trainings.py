"""A grid of trainings: its cells, its runs, and the units that are trained at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .. import training
from ..checks import check_integer, refuse
from ..reporting import papers
from ..results import Row, Run
from .study import WHOLE, Done, Part, Rows, Unit, check_profile

PROFILES = ("paper", "quick")
SIZES = ("d", "d_h", "H", "n", "T", "width")  # what the published grids sweep
Cells = list[dict[str, Any]]


def grid(**axes: Iterable[Any]) -> Cells:
    """Every combination of the values of some fields.

    Example:
        >>> grid(d=[3, 5], H=[1])
        [{'d': 3, 'H': 1}, {'d': 5, 'H': 1}]
    """
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


class Experiment(NamedTuple):
    """A figure or table of a paper: the cells of its grid for each profile, and its seeds.

    Attributes:
        name: its name in the store, such as ``dana-exp1``.
        paper: the paper's key.
        what: its name in the paper, such as ``Exp. 1``.
        cells: for each profile, all fields of a :class:`~attnmem.results.Run` of each cell.
        seeds: for each profile, how many seeds each cell is trained with.
        variants: the readings of the paper that it is run in, first the one that was published.
        curves: the field that tells the curves of the figure apart; none if there is one curve.
    """

    name: str
    paper: str
    what: str
    cells: dict[str, Cells]
    seeds: dict[str, int]
    variants: tuple[str, ...] = ("code",)
    curves: str | None = None

    kind = "trainings"
    profiles = PROFILES
    usual = "paper"
    foreseen = True

    @property
    def source(self) -> str:
        """Where it stands, such as ``Dana et al. 2025, Exp. 1``."""
        return papers()[self.paper].source(self.what)

    def check(self, profile: str, part: Part = WHOLE) -> None:
        """Refuse a profile or a part that the grid does not have.

        Raises:
            ValueError: naming the profile, the seeds, the variant, or the field in ``where``.
        """
        check_profile(profile, PROFILES)
        if part.seeds is not None:
            check_integer("seeds", part.seeds)
        if part.variant is not None and part.variant not in self.variants:
            known = f"one of {', '.join(self.variants)} for {self.name}"
            refuse("variant", repr(part.variant), known)
        for field in part.where or {}:
            if field not in self.cells[profile][0]:
                refuse("where", f"the field {field!r}", f"one of {', '.join(SIZES)}")
        if not self._chosen(profile, part):
            refuse("where", part.where, f"values that stand together in the grid of {self.name}")

    def _chosen(self, profile: str, part: Part) -> Cells:
        wanted = (part.where or {}).items()
        cells = self.cells[profile]
        return [cell for cell in cells if all(cell[field] == value for field, value in wanted)]

    def runs(self, profile: str, part: Part = WHOLE) -> list[Run]:
        """The trainings of a part, cell by cell, each with all its seeds."""
        self.check(profile, part)
        variant = {"variant": part.variant or self.variants[0]}
        return [
            Run(experiment=self.name, profile=profile, seed=seed, **cell | variant)
            for cell in self._chosen(profile, part)
            for seed in range(part.seeds or self.seeds[profile])
        ]

    def units(self, profile: str, part: Part, rows: Rows, device: str = "cpu") -> Iterator[Unit]:
        """The trainings that have no row yet, those that are trained at once together."""
        yield from stacks([run for run in self.runs(profile, part) if run.key not in rows], device)

    def perform(self, unit: Unit, device: str, tf32: bool) -> list[Row]:
        """Train a unit."""
        return train(unit, device, tf32)

    def done(self, profile: str, part: Part, rows: Rows) -> Done:
        """How many of the trainings have a row; one that diverged has."""
        runs = self.runs(profile, part)
        return Done(sum(run.key in rows for run in runs), len(runs))

    def say(self, rows: Sequence[Row]) -> str:
        """The sizes of the unit's first training, and how many of them diverged."""
        run, _ = rows[0]
        lost = sum(diverged(outcome) for _, outcome in rows)
        return name_of(run) + (f", {lost} of {len(rows)} diverged" if lost else "")


def name_of(run: Run) -> str:
    """A training in a few words: its experiment, its variant if it is not the code's, its sizes."""
    name = run.experiment if run.variant == "code" else f"{run.experiment}, {run.variant}"
    sizes = {field: getattr(run, field) for field in SIZES}
    return " ".join([name, *(f"{name}={size}" for name, size in sizes.items() if size is not None)])


def diverged(outcome: Any) -> bool:
    """Whether a training was lost to numbers that are not finite."""
    return getattr(outcome, "diverged", None) is not None


def stacks(wanted: Sequence[Run], device: str = "cpu") -> list[list[Run]]:
    """Runs that are trained at once: equal but for their seeds, in the order of the grid."""
    groups: dict[Run, list[Run]] = {}
    for run in wanted:
        groups.setdefault(cell_of(run), []).append(run)
    return list(groups.values())


def cell_of(run: Run) -> Run:
    """What the runs of one cell have in common: the run with the first seed."""
    return dataclasses.replace(run, seed=0)


def train(runs: Sequence[Run], device: str, tf32: bool = False) -> list[Row]:
    """Train runs at once, and return their rows."""
    outcomes = training.train(runs, device=device, tf32=tf32)
    return list(zip(runs, outcomes, strict=True))


def curve_of(experiment: Experiment, cell: Mapping[str, Any]) -> Any:
    """The curve of the figure that a cell lies on: the value of the field ``curves``, or None."""
    return cell[experiment.curves] if experiment.curves else None
