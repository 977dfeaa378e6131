"""The units that are to be measured, one after the other, and their rows as they land."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, as_completed, wait
from typing import Any, NamedTuple, Protocol, runtime_checkable

from .. import results, training
from ..results import Row
from . import read
from .registry import STUDIES, study
from .study import WHOLE, Part, Unit
from .trainings import CHECKPOINTS


class Job(NamedTuple):
    """A part of a study in one of its profiles.

    Attributes:
        name: A key of ``STUDIES``.
        profile: One of the study's profiles.
        part: Which part of it.
    """

    name: str
    profile: str
    part: Part = WHOLE

    def check(self) -> None:
        """Refuse names, profiles and parts that there are not."""
        study(self.name).check(self.profile, self.part)


def perform(name: str, unit: Unit, device: str) -> list[Row]:
    """Measure one unit of a study, in any process.

    Args:
        name: A key of ``STUDIES``.
        unit: Configurations that are measured at once.
        device: Where.

    Returns:
        One row for each configuration.
    """
    results.commit()  # before a long measurement, during which the checkout may change
    return STUDIES[name].perform(unit, device)


class Queue:
    """The units of several jobs that are still to be measured, in order.

    What comes next may depend on rows, so :meth:`landed` says which there are.

    Args:
        jobs: What to measure, the first first.
        device: Where.
        recompute: As for :func:`run`.
        workers: How many units are measured at once, which share the device's memory.
        urgent: Whether the cheapest curves of a grid come first, for a limit of time.
        in_time: Asked before a unit is given out; if it says no, none is.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        device: str,
        recompute: bool = False,
        workers: int = 1,
        urgent: bool = False,
        in_time: Callable[[], bool] = lambda: True,
    ) -> None:
        for job in jobs:
            job.check()
        self.jobs, self.in_time = list(jobs), in_time
        self.place = (device, workers, urgent)
        places = {(job.name, job.profile) for job in jobs}
        self.rows = {place: read.rows(*place, recompute=recompute) for place in places}
        self._started: set[str] = set()
        self._pass, self._stale = self._listed(), False

    def _listed(self) -> Iterator[tuple[str, Unit]]:
        for job in self.jobs:
            rows = self.rows[job.name, job.profile]
            for unit in STUDIES[job.name].units(job.profile, job.part, rows, *self.place):
                yield job.name, unit

    def count(self) -> int | None:
        """The number of units, if it does not depend on rows to come."""
        if not all(STUDIES[job.name].foreseen for job in self.jobs):
            return None
        return len({unit[0].key for _, unit in self._listed()})

    def next(self) -> tuple[str, Unit] | None:
        """A unit, without what has been given out in another, and the name of its study.

        None if there is none, or if the time is over.
        """
        while self.in_time():
            for name, unit in self._pass:
                if left := [asked for asked in unit if asked.key not in self._started]:
                    self._started |= {asked.key for asked in left}
                    return name, left
            if not self._stale:
                return None
            self._pass, self._stale = self._listed(), False
        return None

    def landed(self, rows: Sequence[Row]) -> None:
        """Take note of rows, on which the next units may depend."""
        self._stale = True
        for asked, found in rows:
            self.rows[asked.experiment, asked.profile][asked.key] = asked, found


@runtime_checkable
class Units(Protocol):
    """Where :func:`measured` takes units from."""

    def next(self) -> tuple[str, Unit] | None:
        """A unit with the name of its study, or None if there is none now."""

    def landed(self, rows: Sequence[Row]) -> None:
        """Take note of the rows of a unit."""


class Landed(NamedTuple):
    """The rows of one unit of a study.

    Attributes:
        name: The study's name.
        rows: The rows.
        added: How many of them are new to the store.
    """

    name: str
    rows: list[Row]
    added: int

    @property
    def said(self) -> str:
        """The unit in words."""
        return STUDIES[self.name].say(self.rows)


def measured(
    units: Units,
    device: str,
    executor: Executor | None = None,
    at_once: int | float = 1,
) -> Iterator[Landed]:
    """Give out units, append their rows as they come, and yield them.

    After an error in a unit, or where its rows cannot be stored, nothing more is given out. The
    error is raised when the rows of the units in flight have been yielded. If the caller stops, or
    is interrupted, the rows of the units in flight are stored before this ends.

    Args:
        units: Where units come from.
        device: Where they are measured.
        executor: By whom; by default they are measured here, one after the other.
        at_once: How many of them are with the executor at most.

    Yields:
        The rows of each unit.
    """
    executor = executor or _Here()
    flying: dict[Future, str] = {}
    error: BaseException | None = None
    try:
        while True:
            while error is None and len(flying) < at_once and (given := units.next()):
                name, unit = given
                results.check_writable(unit[0])
                flying[executor.submit(perform, name, unit, device)] = name
            if not flying:
                break
            finished, _ = wait(flying, return_when=FIRST_COMPLETED)
            for future in finished:
                name = flying.pop(future)
                try:
                    rows, added = _stored(future)
                except BaseException as wrong:
                    error = error or wrong
                    continue
                units.landed(rows)
                yield Landed(name, rows, added)
    finally:
        begun = [future for future in flying if not future.cancel()]
        for future in as_completed(begun):
            if not future.exception():
                _stored(future)
    if error:
        raise error


def _stored(future: Future) -> tuple[list[Row], int]:
    """The rows of a unit that has ended, when they are stored, and how many of them are new."""
    rows = future.result()
    added = results.append(rows)
    training.forget(results.writable_root() / CHECKPOINTS, [asked for asked, _ in rows])
    return rows, added


class _Here(Executor):
    """Does what it is given at once, in this process."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future:
        """Call the function and wait for it."""
        future: Future = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future
