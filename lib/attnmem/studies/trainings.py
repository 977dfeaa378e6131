"""A grid of trainings: its cells, its runs, and the units that are trained at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from typing_extensions import override

from .. import store, training
from ..checks import check_integer, refuse
from ..store import Outcome, Row, Rows, Run
from .study import ALL, Place, Selection, Study, Unit

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


class Trainings(Study):
    """A study whose units are trainings, which are checkpointed until their rows are stored."""

    @override
    def perform(self, unit: Unit, device: str) -> list[Row]:
        checkpoints = store.writable_root() / CHECKPOINTS
        outcomes = training.train(unit, device=device, checkpoints=checkpoints)
        return list(zip(unit, outcomes, strict=True))


@dataclass(frozen=True, eq=False)
class Experiment(Trainings):
    """A figure or table of a paper: the cells of its grid for each profile, and its seeds.

    Attributes:
        cells: For each profile, all fields of a :class:`~attnmem.store.Run` of each cell.
        seeds: For each profile, how many seeds each cell is trained with.
        variants: The readings of the paper that it is run in, first the one that was published.
        curves: The field that tells the curves of the figure apart; none if there is one curve.
    """

    cells: dict[str, Cells]
    seeds: dict[str, int]
    variants: tuple[str, ...] = ("code",)
    curves: str | None = None

    kind = "trainings"

    @override
    def configs(self, profile: str, selection: Selection = ALL) -> list[Run]:
        seeds, variant, where, tf32 = selection
        if profile not in self.profiles:
            refuse("profile", repr(profile), f"one of {', '.join(self.profiles)}")
        if seeds is not None:
            check_integer("seeds", seeds)
        if variant not in (None, *self.variants):
            refuse("variant", repr(variant), f"one of {', '.join(self.variants)} for {self.name}")
        cells = every = self.cells[profile]
        for field, value in (where or {}).items():
            if field not in every[0]:
                numbers = [f for f, x in every[0].items() if isinstance(x, (int, float))]
                refuse("where", f"the field {field!r}", f"one of {', '.join(numbers)}")
            known = dict.fromkeys(cell[field] for cell in every)
            if value not in known:
                values = f"{field} among {', '.join(map(str, known))} for {self.name}"
                refuse("where", f"{field} = {value}", values)
            cells = [cell for cell in cells if cell[field] == value]
        if not cells:
            refuse("where", where, f"values that stand together in the grid of {self.name}")
        own = {"variant": variant or self.variants[0], "products": "tf32" if tf32 else None}
        return [
            Run(experiment=self.name, profile=profile, seed=seed, **cell | own)
            for cell in cells
            for seed in range(seeds or self.seeds[profile])
        ]

    @override
    def say(self, rows: Sequence[Row]) -> str:
        lost = sum(diverged(outcome) for _, outcome in rows)
        name = name_of([run for run, _ in rows])
        return f"{name}, {lost} of {len(rows)} diverged" if lost else name

    def _group(self, configs: list[Run], rows: Rows, place: Place) -> list[Unit]:
        device, workers, limited = place
        if not limited:
            return training.stacks(configs, device, workers=workers)
        seconds: dict[Any, list[float]] = {}
        for run, outcome in rows.values():
            seconds.setdefault(self.curve_of(run), []).append(outcome.wall_s)

        def cost(curve: Any) -> tuple[float, int]:
            """The mean time of a curve's rows; then the size of its largest training."""
            runs = [run for run in configs if self.curve_of(run) == curve]
            size = max(r.steps * r.batch * r.d * max(r.H * r.d_h, r.width or 0) for r in runs)
            return (mean(seconds[curve]) if curve in seconds else math.inf), size

        costs = {curve: cost(curve) for curve in {self.curve_of(run) for run in configs}}
        first, further = [], []
        for run in sorted(configs, key=lambda run: costs[self.curve_of(run)]):
            (further if run.seed and not device.startswith("cuda") else first).append(run)
        # On a GPU a step of all seeds takes hardly longer than a step of one.
        return [
            unit
            for part in (first, further)
            for unit in training.stacks(part, device, workers=workers)
        ]


def name_of(runs: Sequence[Run]) -> str:
    """Trainings of one experiment in a few words: its name, their variant, their sizes.

    Example:
        >>> from attnmem.studies.registry import runs
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
