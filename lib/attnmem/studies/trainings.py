"""A grid of trainings: its cells, its runs, and the units that are trained at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import mean
from typing import Any, NamedTuple

import torch

from .. import results, training
from ..checks import check_integer, refuse
from ..results import Outcome, Row, Run
from .study import WHOLE, Done, Part, Rows, Unit, check_profile, source_of

PROFILES = ("paper", "quick")
CHECKPOINTS = ".checkpoints"  # the folder of trainings under way, beside those of the rows
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
        name: Its name in the store, such as ``dana-exp1``.
        paper: The paper's key.
        what: Its name in the paper, such as ``Exp. 1``.
        cells: For each profile, all fields of a :class:`~attnmem.kinds.Run` of each cell.
        seeds: For each profile, how many seeds each cell is trained with.
        variants: The readings of the paper that it is run in, first the one that was published.
        curves: The field that tells the curves of the figure apart; none if there is one curve.
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

    source = source_of

    def check(self, profile: str, part: Part = WHOLE) -> None:
        """Refuse a profile or a part that the grid does not have.

        Args:
            profile: ``paper`` or ``quick``.
            part: A choice of seeds, variant and cells.

        Raises:
            ValueError: The grid does not have it; the message names the profile, the seeds, the
                variant, or the field in ``where``.
        """
        check_profile(profile, PROFILES)
        if part.seeds is not None:
            check_integer("seeds", part.seeds)
        if part.variant is not None and part.variant not in self.variants:
            known = f"one of {', '.join(self.variants)} for {self.name}"
            refuse("variant", repr(part.variant), known)
        numbers = [f for f, x in self.cells[profile][0].items() if isinstance(x, (int, float))]
        for field, value in (part.where or {}).items():
            if field not in self.cells[profile][0]:
                refuse("where", f"the field {field!r}", f"one of {', '.join(numbers)}")
            known = dict.fromkeys(cell[field] for cell in self.cells[profile])
            if value not in known:
                values = f"{field} among {', '.join(map(str, known))} for {self.name}"
                refuse("where", f"{field} = {value}", values)
        if not self._chosen(profile, part):
            refuse("where", part.where, f"values that stand together in the grid of {self.name}")

    def _chosen(self, profile: str, part: Part) -> Cells:
        wanted = (part.where or {}).items()
        cells = self.cells[profile]
        return [cell for cell in cells if all(cell[field] == value for field, value in wanted)]

    def runs(self, profile: str, part: Part = WHOLE) -> list[Run]:
        """The trainings of a part.

        Args:
            profile: ``paper`` or ``quick``.
            part: A choice of seeds, variant and cells.

        Returns:
            The runs, cell by cell, each cell with all its seeds.
        """
        self.check(profile, part)
        chosen = {"variant": part.variant or self.variants[0]}
        chosen["products"] = "tf32" if part.tf32 else None
        return [
            Run(experiment=self.name, profile=profile, seed=seed, **cell | chosen)
            for cell in self._chosen(profile, part)
            for seed in range(part.seeds or self.seeds[profile])
        ]

    def units(
        self,
        profile: str,
        part: Part,
        rows: Rows,
        device: str = "cpu",
        workers: int = 1,
        urgent: bool = False,
    ) -> Iterator[Unit]:
        """The trainings that have no row yet, those that are trained at once together.

        Args:
            profile: ``paper`` or ``quick``.
            part: A choice of seeds, variant and cells.
            rows: Stored rows by key.
            device: Where they are to be trained (see :func:`attnmem.training.stacks`).
            workers: How many units share the device's memory.
            urgent: Whether the cheapest curve comes first, and first seeds before others.

        Yields:
            Runs that are trained at once.
        """
        left = [run for run in self.runs(profile, part) if run.key not in rows]
        parts = [left]
        if urgent:
            left = self.by_cost(left, rows)
            on_gpu = torch.device(device).type == "cuda"  # where all seeds take as long as one
            further = [] if on_gpu else [run for run in left if run.seed > 0]
            parts = [[run for run in left if run not in further], further]
        for part in parts:
            yield from training.stacks(part, device, workers=workers)

    def by_cost(self, runs: Sequence[Run], rows: Rows) -> list[Run]:
        """Runs in the order of their curves, the cheapest curve first.

        Args:
            runs: Some of its runs.
            rows: Stored rows by key: the mean seconds of a curve's rows are its cost. A curve
                without rows comes after all that have some, by the size of its trainings.

        Returns:
            The runs. Those of one curve keep their order.
        """
        seconds: dict[Any, list[float]] = {}
        for run, outcome in rows.values():
            seconds.setdefault(curve_of(self, run), []).append(outcome.wall_s)
        size: dict[Any, int] = {}
        for run in runs:
            of_one = (
                run.steps * run.batch * run.layers * run.d * max(run.H * run.d_h, run.width or 0)
            )
            size[curve_of(self, run)] = max(of_one, size.get(curve_of(self, run), 0))

        def cost(run: Run) -> tuple[float, int]:
            curve = curve_of(self, run)
            return mean(seconds[curve]) if curve in seconds else math.inf, size[curve]

        return sorted(runs, key=cost)

    def perform(self, unit: Unit, device: str) -> list[Row]:
        """Train a unit.

        Args:
            unit: Runs that can be trained at once.
            device: Where.

        Returns:
            Each run with its outcome.
        """
        return train(unit, device)

    def done(self, profile: str, part: Part, rows: Rows) -> Done:
        """How many of the trainings have a row; one that diverged has.

        Args:
            profile: ``paper`` or ``quick``.
            part: A choice of seeds, variant and cells.
            rows: Stored rows by key.

        Returns:
            The number of trainings with a row, and of all trainings.
        """
        runs = self.runs(profile, part)
        return Done(sum(run.key in rows for run in runs), len(runs))

    def say(self, rows: Sequence[Row]) -> str:
        """The sizes of the unit's trainings, and how many of them diverged."""
        lost = sum(diverged(outcome) for _, outcome in rows)
        name = name_of([run for run, _ in rows])
        return f"{name}, {lost} of {len(rows)} diverged" if lost else name


def name_of(runs: Sequence[Run]) -> str:
    """Trainings of one experiment in a few words: its name, their variant, their sizes.

    Example:
        >>> from attnmem.studies.grids import runs
        >>> name_of(runs("dana-exp2", "quick", variant="paper"))
        'dana-exp2, paper d=4 d_h=1 to 4 H=5 n=2 T=2048'
    """
    run = runs[0]
    words = [run.experiment if run.variant == "code" else f"{run.experiment}, {run.variant}"]
    for field in SIZES:
        if sizes := {size for each in runs if (size := getattr(each, field)) is not None}:
            ends = " to ".join(str(end) for end in dict.fromkeys((min(sizes), max(sizes))))
            words.append(f"{field}={ends}")
    return " ".join(words)


def diverged(outcome: Outcome) -> bool:
    """Whether a training was lost to numbers that are not finite."""
    return outcome.diverged is not None


def train(runs: Sequence[Run], device: str) -> list[Row]:
    """Train runs at once.

    A long training is stored beside the new rows while it is under way, and goes on from there,
    until its rows are stored (:func:`attnmem.studies.work.measured`).

    Args:
        runs: Runs that can be trained at once (see :func:`attnmem.training.train`).
        device: Where.

    Returns:
        Each run with its outcome.
    """
    checkpoints = results.writable_root() / CHECKPOINTS
    outcomes = training.train(runs, device=device, checkpoints=checkpoints)
    return list(zip(runs, outcomes, strict=True))


def curve_of(experiment: Experiment, run: Run) -> Any:
    """The curve of the experiment's figure that a run lies on.

    Args:
        experiment: A grid of trainings.
        run: One of its runs.

    Returns:
        The value of the field ``curves``, or None if the figure has one curve.
    """
    return getattr(run, experiment.curves) if experiment.curves else None
