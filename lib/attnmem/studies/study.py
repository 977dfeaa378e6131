"""What every kind of study offers: units to measure, and the rows that they become.

A *study* is a figure, a table or a question of ours. It has *units*: what is measured at once and
takes minutes to hours. A unit becomes *rows*, which are appended to the store. There are three
kinds of study: trainings of a grid (:mod:`attnmem.studies.trainings`), searches for the largest set
that is memorized (:mod:`attnmem.studies.searches`), and tests of assumptions on features
(:mod:`attnmem.studies.assumptions`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..checks import refuse
from ..results import Row
from ..rows import Configuration

Unit = list[Any]  # configurations that are measured at once, one row each
Rows = Mapping[str, Row]  # stored rows by key


class Part(NamedTuple):
    """Which part of a study is meant; by default all that was published.

    Attributes:
        seeds: the first so many seeds of each training.
        variant: how the paper is read (:data:`attnmem.training.VARIANTS`).
        where: values that the fields of a training have, such as ``{"d": 10}``.
    """

    seeds: int | None = None
    variant: str | None = None
    where: Mapping[str, Any] | None = None


WHOLE = Part()


class Done(NamedTuple):
    """How much of a study is stored, of how much: rows of a grid, cells of a search, tests."""

    have: int
    of: int


@runtime_checkable
class Study(Protocol):
    """What a kind of study implements; all of it follows from data and from stored rows.

    Attributes:
        name: its name in the command line and in the store.
        paper: the paper that it belongs to, a key of :func:`attnmem.reporting.papers`.
        source: where it stands in the paper, in words.
        kind: what its units are, in words.
        profiles: the versions that there are of it.
        usual: the profile that is run if none is named.
        variants: the readings of the paper that it is run in.
        foreseen: whether all its units are known before the first is measured.
    """

    name: str
    paper: str
    source: str
    kind: str
    profiles: tuple[str, ...]
    usual: str
    variants: tuple[str, ...]
    foreseen: bool

    def check(self, profile: str, part: Part) -> None:
        """Refuse a profile or a part that the study does not have."""

    def units(
        self, profile: str, part: Part, rows: Rows, device: str = "cpu", workers: int = 1
    ) -> Iterator[list[Configuration]]:
        """What could be measured now and is not in ``rows``, one unit after the other.

        ``rows`` may grow between two units, which then decides what comes next. Each of so many
        ``workers`` has its share of the device's memory.
        """

    def perform(self, unit: Unit, device: str, tf32: bool) -> list[Row]:
        """Measure a unit: one row for each of its configurations."""

    def done(self, profile: str, part: Part, rows: Rows) -> Done:
        """How much of the study ``rows`` contain."""

    def say(self, rows: Sequence[Row]) -> str:
        """A few words on the rows of one unit, for whoever waits."""


def check_profile(profile: str, profiles: Sequence[str]) -> None:
    """Accept the profiles that there are.

    Raises:
        ValueError: ``profile`` is none of ``profiles``.
    """
    if profile not in profiles:
        refuse("profile", repr(profile), f"one of {', '.join(profiles)}")


def check_whole(name: str, kind: str, part: Part) -> None:
    """Accept no choice of seeds, variant or fields, for kinds of study that have none.

    Raises:
        ValueError: one of them is given; the error names it.
    """
    for field, value in part._asdict().items():
        if value:
            refuse(field, repr(value), f"nothing, since {name} is {kind}")
