"""In which order missing trainings are worth most, and which of them fit into a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..results import Run
from .study import Part, Rows
from .trainings import Experiment, curve_of


class Piece(NamedTuple):
    """What the first seed lacks of one curve of a figure, or further seeds, or all of them.

    Attributes:
        figure: The experiment's name.
        curve: The value that tells the curve apart, or None if the figure has one curve.
        further: Whether it is about the seeds after the first only.
        runs: The trainings that have no row.
    """

    figure: str
    curve: Any
    further: bool
    runs: tuple[Run, ...]


def pieces(
    experiment: Experiment, profile: str, part: Part, rows: Rows, together: bool = False
) -> list[Piece]:
    """What is missing of an experiment, by curve, the first seed apart from the others.

    Args:
        experiment: A grid of trainings.
        profile: ``paper`` or ``quick``.
        part: Which part of it.
        rows: Its stored rows by key.
        together: Whether all seeds of a curve are one piece, where they cost no more than one.

    Returns:
        A piece for each curve whose first seed is not complete, and one for each curve whose
        further seeds are not.
    """
    left: dict[tuple, list[Run]] = defaultdict(list)
    for run in experiment.runs(profile, part):
        if run.key not in rows:
            left[curve_of(experiment, run), run.seed > 0 and not together].append(run)
    return [
        Piece(experiment.name, curve, further, tuple(runs))
        for (curve, further), runs in left.items()
    ]


def by_curve(found: Iterable[Piece]) -> dict[Any, list[Run]]:
    """The trainings that are missing on each curve of one figure."""
    total: dict[Any, list[Run]] = defaultdict(list)
    for piece in found:
        total[piece.curve] += piece.runs
    return dict(sorted(total.items()))


def plan(found: Iterable[Piece], seconds: Callable[[Run], float]) -> list[Piece]:
    """Pieces in the order of their value.

    First the cheapest missing curve of each figure at its first seed, then all other curves at
    their first seeds, then further seeds; the cheapest first each time. So are the runs of each.

    Args:
        found: What is missing.
        seconds: What a training is expected to take.

    Returns:
        The same pieces.
    """
    found = list(found)
    spent = {id(piece): sum(map(seconds, piece.runs)) for piece in found}
    found = sorted(found, key=lambda piece: spent[id(piece)])
    by_figure: dict[str, list[Piece]] = defaultdict(list)
    for piece in found:
        if not piece.further:
            by_figure[piece.figure].append(piece)
    first = {id(each[0]) for each in by_figure.values()}
    order = sorted(found, key=lambda piece: (piece.further, id(piece) not in first))
    return [piece._replace(runs=tuple(sorted(piece.runs, key=seconds))) for piece in order]


class Budget:
    """A time that is kept: what does not fit into the rest of it is not begun.

    Estimates are corrected by what finished units took, all together.

    Args:
        seconds: The whole time.
        clock: The time now, in seconds.
    """

    def __init__(self, seconds: int | float, clock: Callable[[], float]) -> None:
        self.clock, self.ends = clock, clock() + seconds
        self.expected = self.taken = 0.0

    @property
    def left(self) -> float:
        """Seconds that are left, not below 0."""
        return max(0.0, self.ends - self.clock())

    @property
    def slower(self) -> float:
        """How many times longer than expected units took so far, at least 1."""
        return max(1.0, self.taken / self.expected) if self.expected else 1.0

    def fits(self, seconds: int | float) -> bool:
        """Whether something that is expected to take so long would end in time."""
        return 0 < self.slower * seconds <= self.left

    def learn(self, expected: int | float, taken: int | float) -> None:
        """Correct later estimates by what one unit took.

        Args:
            expected: The seconds that it was expected to take.
            taken: The seconds that it took.
        """
        self.expected += expected
        self.taken += taken


class Planned:
    """The units of a plan that fit into a budget, given out in its order.

    Has what :func:`attnmem.studies.work.measured` asks of a queue.

    Args:
        units: Each with its study and what it is expected to take, the most valuable first.
        budget: The time that there is.
    """

    def __init__(self, units: Sequence[tuple[str, list[Run], float]], budget: Budget) -> None:
        self.waiting, self.budget = list(units), budget
        self.begun: dict[str, tuple[float, float]] = {}  # expected, and when it began

    def next(self) -> tuple[str, list[Run]] | None:
        """The next unit that fits; those before it wait, should the others be faster."""
        for i, (name, unit, seconds) in enumerate(self.waiting):
            if self.budget.fits(seconds):
                del self.waiting[i]
                self.begun[unit[0].key] = seconds, self.budget.clock()
                return name, unit
        return None

    def landed(self, rows: Sequence[tuple[Run, Any]]) -> None:
        """Compare the time of a unit with what was expected."""
        expected, began = self.begun[rows[0][0].key]
        self.budget.learn(expected, self.budget.clock() - began)


def units_of(
    order: Iterable[Piece],
    group: Callable[[list[Run]], list[list[Run]]],
    seconds: Callable[[list[Run]], float],
) -> list[tuple[str, list[Run], float]]:
    """The units of pieces, in the order of the pieces.

    Args:
        order: Pieces, the most valuable first.
        group: Divides trainings into those that are trained at once.
        seconds: What trainings that are made at once are expected to take.

    Returns:
        For each unit its experiment's name, its trainings, and its expected seconds.
    """
    return [
        (piece.figure, unit, seconds(unit)) for piece in order for unit in group(list(piece.runs))
    ]
