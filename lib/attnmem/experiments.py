"""The experiments as chapters call them: their grids, how to run them, and their rows.

``runs(name, profile)`` is the plain list of an experiment's trainings, every hyper-parameter
explicit; ``run(name, profile)`` measures what the store does not have yet of any study; ``stored``
and its neighbours read rows. The rooms behind are :mod:`attnmem.studies.grids`,
:mod:`attnmem.studies.run` and :mod:`attnmem.studies.read`.
"""

from .studies.grids import DANA, EXPERIMENTS, MAHDAVI, OURS, PUBLISHED, runs
from .studies.read import (
    beside_published,
    coverage,
    missing,
    repeat,
    stored,
    with_parameters,
)
from .studies.run import Progress, choose_device, run
from .studies.trainings import PROFILES, SIZES, Experiment

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
    "choose_device",
    "coverage",
    "missing",
    "repeat",
    "run",
    "runs",
    "stored",
    "with_parameters",
]
