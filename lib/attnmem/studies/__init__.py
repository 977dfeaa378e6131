"""What is measured: the studies, how they are run, and how their rows are read.

A *study* has *units*; a unit becomes *rows* (:mod:`attnmem.studies.study`). Data stand in ``dana``,
``mahdavi`` (grids of trainings), ``searches`` and ``cases`` (models and data for tests of
assumptions). ``STUDIES`` holds every study, ``run`` measures what is missing of any of them, and
``read`` reads the rows.
"""

from .registry import STUDIES, study

__all__ = ["STUDIES", "study"]
