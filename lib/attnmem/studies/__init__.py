"""What is measured: every study by name, and the plain list of an experiment's runs.

:mod:`attnmem.studies.study` says what a study is, and each kind has a file. Grids stand in ``dana``
and ``mahdavi``, ``run`` measures what is missing, and ``tables`` reads the rows. Profile ``paper``
is the published protocol, every run of it; ``quick`` is the same code on a grid that two processor
cores finish within a minute: a smoke test, never a result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..store import Run
from . import dana, mahdavi
from .assumptions import TESTS
from .depth import DEPTH
from .fits import FITS
from .searches import SEARCHES
from .study import Experiment, Selection, Study, _Named

MAHDAVI, DANA = (_Named({one.name: one for one in paper.PUBLISHED}) for paper in (mahdavi, dana))
PUBLISHED: dict[str, Experiment] = _Named(MAHDAVI | DANA)
OURS: dict[str, Experiment] = _Named({one.name: one for one in (*dana.OURS, *mahdavi.OURS)})
EXPERIMENTS: dict[str, Experiment] = _Named(PUBLISHED | OURS)
STUDIES: dict[str, Study] = _Named(EXPERIMENTS | SEARCHES | TESTS | FITS | DEPTH)


def runs(
    name: str,
    profile: str,
    seeds: int | None = None,
    *,
    variant: str | None = None,
    where: Mapping[str, Any] | None = None,
) -> list[Run]:
    """All trainings of an experiment, one per cell of its grid and seed, every setting explicit.

    A part of them: the first so many ``seeds``; one ``variant``, how the paper is read; ``where``,
    the cells with these values, such as ``{"d": 10}``. The default is what was published. What the
    experiment does not have is refused with a ``ValueError`` that names the argument.

    Example:
        >>> len(runs("dana-exp1", "paper"))
        385
    """
    return EXPERIMENTS[name].configs(profile, Selection(seeds, variant, where))
