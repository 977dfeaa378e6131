"""Exercises of the argument, answered in the page as a reader does."""

import re

import pytest

from tools.chapters import ARGUMENT, pages

# Of each chapter: a right answer, a wrong one with words of its reply, and nonsense.
EXERCISES = {
    "data/features": ("23", ("20", "both directions stay"), "many"),
