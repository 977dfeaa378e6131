"""What every study offers: configurations to measure, in units, and the rows that they become.

A *study* is a figure, a table or a question of ours. A *unit* is what is measured at once and takes
minutes to hours; each of its configurations becomes a *row* of the store. There are four kinds:
trainings of a grid (:mod:`attnmem.studies.trainings`), searches for the largest set that is
memorized (:mod:`attnmem.studies.searches`), tests of assumptions on features
(:mod:`attnmem.studies.assumptions`), and fits of one layer (:mod:`attnmem.studies.fits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
import torch

from .. import store
from ..checks import refuse
from ..reporting import papers
from ..store import SCHEMAS, Configuration, Row, Rows, Run
from ..training.devices import device_name

PROFILES = ("paper", "quick")
Unit = list[Any]  # configurations that are measured at once, one row each


class Selection(NamedTuple):
    """A part of a study; by default all that was published.

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


class Place(NamedTuple):
    """Where units are measured, which decides how large they are and which come first.

    Attributes:
        device: Such as ``cpu`` or ``cuda``.
        workers: How many units share the device's memory.
        limited: Whether the time is limited: the cheapest curves and first seeds come first.
    """

    device: str = "cpu"
    workers: int = 1
    limited: bool = False


class Done(NamedTuple):
    """How many rows (of a search: complete cells) are stored, of how many."""

    have: int
    of: int


ALL, HERE = Selection(), Place()


@dataclass(frozen=True, eq=False)
class Study:
    """A figure, a table or a question; each kind says what its units are and how to measure one.

    ``kind`` says that in words, ``config`` is the class of its configurations, ``profiles`` are its
    versions. ``units_known``: whether all units are known before the first is measured.

    Attributes:
        name: Its name in the command line and in the store.
        paper: The paper that it belongs to, a key of :func:`attnmem.reporting.papers`.
        what: Its name in the paper, such as ``Exp. 1``.
    """

    name: str
    paper: str
    what: str

    kind = "measurements"
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

    def configs(self, profile: str, selection: Selection = ALL) -> list[Any]:
        """All configurations; none of a search. Refuses what the study does not have, by name."""
        if profile not in self.profiles:
            refuse("profile", repr(profile), f"one of {', '.join(self.profiles)}")
        for field, value in selection._asdict().items():
            if value is not None and value is not False:
                refuse(field, repr(value), f"nothing, since {self.name} is {self.kind}")
        return self._listed(profile)

    def missing(self, profile: str, selection: Selection, rows: Rows) -> list[Any]:
        """The configurations that could be measured now and have no row."""
        return [one for one in self.configs(profile, selection) if one.key not in rows]

    def done(self, profile: str, selection: Selection, rows: Rows) -> Done:
        """How much of a selection is stored."""
        configs = self.configs(profile, selection)
        return Done(sum(one.key in rows for one in configs), len(configs))

    def units(
        self, profile: str, selection: Selection, rows: Rows, place: Place = HERE
    ) -> Iterator[Unit]:
        """What is missing, in units. Rows may grow between two of them."""
        yield from self._group(self.missing(profile, selection, rows), rows, place)

    def curve_of(self, config: Any) -> Any:
        """The value of the field ``curves``, or None if the study has one curve."""
        return getattr(config, self.curves) if self.curves else None

    def perform(self, unit: Unit, device: str) -> list[Row]:
        """Measure a unit: one row for each configuration."""
        raise NotImplementedError

    def say(self, rows: Sequence[Row]) -> str:
        """A few words on the rows of one unit, for whoever waits."""
        raise NotImplementedError

    def table(self, rows: Iterable[Row]) -> pd.DataFrame:
        """Rows with a column for each field of the store, and those that this kind adds."""
        return as_table(rows, self.config)

    def _listed(self, profile: str) -> list[Any]:
        return []

    def _group(self, configs: list[Any], rows: Rows, place: Place) -> list[Unit]:
        return [[one] for one in configs]


def origin(seconds: float, device: torch.device) -> dict[str, Any]:
    """The fields of a result that say how long it took, and where it comes from."""
    where = {"device": device_name(device), "torch": torch.__version__, "commit": store.commit()}
    return {"wall_s": round(seconds, 3)} | where


def as_table(rows: Iterable[Row], config: type[Configuration] = Run) -> pd.DataFrame:
    """Rows as a table with a column for each field, in the order of the file.

    Of a training that diverged, ``accuracy`` and ``loss`` are missing, and ``diverged`` is its
    step; of the others ``diverged`` is missing. ``config`` says the columns if there are no rows.
    """
    values = [vars(config) | vars(result) for config, result in rows]
    return pd.DataFrame(values, columns=[*SCHEMAS[config].types])
