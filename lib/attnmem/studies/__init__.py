"""What is measured: the studies, how they are run, and how their rows are read.

:mod:`attnmem.studies.study` says what a study is, and each kind has a file. Grids stand in
``dana`` and ``mahdavi``; ``registry`` holds every study by name, ``run`` measures what is missing,
and ``tables`` reads the rows.
"""

from .registry import STUDIES, study

__all__ = ["STUDIES", "study"]
