"""attnmem: how much can attention memorize?

This is the library behind the book of the same question. ``core`` is the idea, to read in an
evening, and ``import attnmem`` gives its names, and ``memorize_by_difference`` from ``theory``
beside them. All other rooms hang on the core. A room imports only from rooms above its own line:

============  ===================================================================================
``checks``    refusals: errors that name the argument, its value and what was expected
``terminal``  what commands share: wrapped reports, errors in a line
``examples``  examples that a layer is to memorize: shapes, units, refusals
``papers``    the two papers and their claims, as data
``core``      both papers' layers, what they can memorize, and weights that do
``theory``    all else that is proved, built or certified
``features``  features of real models, and the images and texts that they read
``lab``       trainings at scale: grids, the engine, the rows that they leave
``pages``     what chapters use: verdicts, figures, laws fitted to curves, records
``__main__``  the command line, ``python -m attnmem``
============  ===================================================================================
"""

from __future__ import annotations

import importlib

from .core import *  # noqa: F403
from .core import __all__ as _CORE

__version__ = "0.1.0"
# Imported when they are asked for: the core alone needs no theory.
_LATER = {"memorize_by_difference": "theory.cancelling"}
__all__ = [*_CORE, *_LATER]


def __getattr__(name: str) -> object:
    """What ``_LATER`` has, from its module."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)


def __dir__() -> list[str]:
    """Also what is imported later, for completion."""
    return sorted({*globals(), *_LATER})
