"""What every kind of study offers: units to measure, and the rows that they become.

A *study* is a figure, a table or a question of ours. It has *units*: what is measured at once and
takes minutes to hours. A unit becomes *rows*, which are appended to the store. There are four
kinds of study: trainings of a grid (:mod:`attnmem.studies.trainings`), searches for the largest set
that is memorized (:mod:`attnmem.studies.searches`), tests of assumptions on features
(:mod:`attnmem.studies.assumptions`), and fits of one layer (:mod:`attnmem.studies.fits`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..checks import refuse
from ..kinds import Configuration
from ..reporting import papers
from ..results import Row

Unit = list[Any]  # configurations that are measured at once, one row each
Rows = Mapping[str, Row]  # stored rows by key


class Part(NamedTuple):
    """Which part of a study is meant; by default all that was published.

    Attributes:
        seeds: The first so many seeds of each training.
        variant: How the paper is read (``attnmem.training.VARIANTS``).
        where: Values that the fields of a training have, such as ``{"d": 10}``.
        tf32: Whether a GPU may compute products in TF32; these are trainings of their own.
    """

    seeds: int | None = None
    variant: str | None = None
    where: Mapping[str, Any] | None = None
    tf32: bool = False


WHOLE = Part()


class Done(NamedTuple):
    """How much of a study is stored.

    Attributes:
        have: Rows of a grid, complete cells of a search, or tests.
        of: How many there are in all.
    """

    have: int
    of: int


@runtime_checkable
class Study(Protocol):
    """What a kind of study implements; all of it follows from data and from stored rows.

    Attributes:
        name: Its name in the command line and in the store.
        paper: The paper that it belongs to, a key of :func:`attnmem.reporting.papers`.
        source: Where it stands in the paper, in words.
        kind: What its units are, in words.
        profiles: The versions that there are of it.
        usual: The profile that is run if none is named.
        variants: The readings of the paper that it is run in.
        foreseen: Whether all its units are known before the first is measured.
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
        """Refuse a profile or a part that the study does not have.

        Args:
            profile: One of :attr:`profiles`.
            part: A part of the study.

        Raises:
            ValueError: The study does not have it; the message names the argument.
        """

    def units(
        self, profile: str, part: Part, rows: Rows, device: str = "cpu", workers: int = 1
    ) -> Iterator[list[Configuration]]:
        """What could be measured now and is not in ``rows``, one unit after the other.

        Args:
            profile: One of :attr:`profiles`.
            part: Which part of the study.
            rows: Stored rows by key. They may grow between two units and so decide what comes next.
            device: Where units will be measured, which may decide how large they are.
            workers: How many units are measured at once and share the device's memory.

        Yields:
            Configurations that are measured at once.
        """

    def perform(self, unit: Unit, device: str) -> list[Row]:
        """Measure a unit.

        Args:
            unit: Configurations that are measured at once.
            device: Where.

        Returns:
            One row for each configuration.
        """

    def done(self, profile: str, part: Part, rows: Rows) -> Done:
        """How much of the study ``rows`` contain.

        Args:
            profile: One of :attr:`profiles`.
            part: Which part of the study.
            rows: Stored rows by key.

        Returns:
            What is stored, and how much there is in all.
        """

    def say(self, rows: Sequence[Row]) -> str:
        """A few words on the rows of one unit, for whoever waits."""


def check_profile(profile: str, profiles: Sequence[str]) -> None:
    """Accept the profiles that there are.

    Args:
        profile: The name of a profile.
        profiles: Those that there are.

    Raises:
        ValueError: ``profile`` is none of ``profiles``.
    """
    if profile not in profiles:
        refuse("profile", repr(profile), f"one of {', '.join(profiles)}")


def check_whole(study: Study, profile: str, part: Part = WHOLE) -> None:
    """Refuse unknown profiles, and all parts: the ``check`` of studies that have none.

    Args:
        study: A study without seeds, variants or fields to choose.
        profile: One of its profiles.
        part: Must be the whole.

    Raises:
        ValueError: The profile is unknown or a part is chosen; the message names the argument.
    """
    check_profile(profile, study.profiles)
    for field, value in part._asdict().items():
        if value is not None and value is not False:
            refuse(field, repr(value), f"nothing, since {study.name} is {study.kind}")


@property
def source_of(study: Any) -> str:
    """Where a study stands, such as ``Dana et al. 2025, Exp. 1``, from its paper and ``what``."""
    return papers()[study.paper].source(study.what)
