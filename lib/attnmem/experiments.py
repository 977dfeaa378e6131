"""The studies as chapters call them: their grids, how to run them, and their rows.

``runs`` is the plain list of an experiment's trainings; ``run`` measures what the store does not
have yet of any study; ``table`` and ``stored`` read its rows; ``record`` shows them.
"""

from .record import record
from .studies import DANA, EXPERIMENTS, MAHDAVI, OURS, PUBLISHED, runs
from .studies.run import Progress, choose_device, run
from .studies.study import PROFILES, SIZES, Experiment
from .studies.tables import (
    beside_published,
    by_seed,
    coverage,
    fewest_seeds,
    missing,
    published,
    published_curves,
    repeat,
    rows,
    spans,
    stored,
    table,
    with_parameters,
)

__all__ = [
    "DANA",
    "EXPERIMENTS",
    "MAHDAVI",
    "OURS",
    "PROFILES",
    "PUBLISHED",
    "SIZES",
    "Experiment",
    "Progress",
    "beside_published",
    "by_seed",
    "choose_device",
    "coverage",
    "fewest_seeds",
    "missing",
    "published",
    "published_curves",
    "record",
    "repeat",
    "rows",
    "run",
    "runs",
    "spans",
    "stored",
    "table",
    "with_parameters",
]
