"""Every study that there is, by name."""

from __future__ import annotations

from ..checks import refuse
from .assumptions import TESTS
from .fits import FITS
from .grids import EXPERIMENTS
from .searches import SEARCHES
from .study import Study

STUDIES: dict[str, Study] = EXPERIMENTS | SEARCHES | TESTS | FITS


def study(name: str) -> Study:
    """The study of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in STUDIES:
        refuse("name", repr(name), f"one of {', '.join(STUDIES)}")
    return STUDIES[name]
