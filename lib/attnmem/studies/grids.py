"""The grids of trainings that there are, published and ours, and the plain list of their runs.

``runs(name, profile)`` lists an experiment's trainings, every hyper-parameter explicit. Profile
``paper`` is the published protocol, every run of it; ``quick`` is the same code on a grid that two
processor cores finish within a minute: a smoke test, never a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..checks import refuse
from ..results import Run
from . import dana, mahdavi
from .study import Part
from .trainings import Experiment


def _by_name(experiments: Iterable[Experiment]) -> dict[str, Experiment]:
    return {experiment.name: experiment for experiment in experiments}


MAHDAVI, DANA = _by_name(mahdavi.PUBLISHED), _by_name(dana.PUBLISHED)
PUBLISHED = MAHDAVI | DANA
OURS = _by_name([*dana.OURS, *mahdavi.OURS])
EXPERIMENTS = PUBLISHED | OURS


def experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in EXPERIMENTS:
        refuse("name", repr(name), f"one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


def runs(
    name: str,
    profile: str,
    seeds: int | None = None,
    *,
    variant: str | None = None,
    where: Mapping[str, Any] | None = None,
) -> list[Run]:
    """All trainings of an experiment, one per cell of its grid and seed.

    Args:
        name: A key of ``EXPERIMENTS``.
        profile: ``paper`` or ``quick``.
        seeds: The first so many of them; by default as many as the paper has.
        variant: How the paper is read; by default as it was published.
        where: Only the cells with these values, such as ``{"d": 10}``.

    Returns:
        The runs, cell by cell.

    Raises:
        ValueError: The experiment does not have what an argument asks for; the message names it.

    Example:
        >>> len(runs("dana-exp1", "paper"))
        385
    """
    return experiment(name).runs(profile, Part(seeds, variant, where))
