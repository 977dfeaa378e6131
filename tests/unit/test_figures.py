"""Every figure draws what it is given, on the axes it is given."""

import inspect

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch

from attnmem.pages import figures

mpl.use("agg")
import matplotlib.pyplot as plt

AXES = ("heads", "accuracy")
BAND = {"d = 5": pd.DataFrame([[0.1, 0.2], [0.2, np.nan]], index=[1, 2])}
LARGEST = torch.rand(7, 3)
CALLS = {  # arguments, and the vertical values of the lines that are drawn
    "curves": (({"AoT": ([1, 2], [0.1, 0.2]), "MLP": ([1], [0.3])}, AXES), [[0.1, 0.2], [0.3]]),
    "curves_with_bands": (
        (BAND, {"d = 5": ([1], [0.15])}, AXES),
        [[pytest.approx(0.15), 0.2], [0.15], []],
    ),
    "formulas": (([1, 2], {"rank": [3, 5]}, {"built": ([1], [4])}, AXES), [[3, 5], [4]]),
    "decay": (([1, 2], {"a": [0.1, 0.01]}, {"a": [0.2, 0.02]}, AXES), [[0.1, 0.01], [0.2, 0.02]]),
    "between": (
        ([1, 2], ("floor", [3, 5]), ("ceiling", [4, 7]), {"random": [1, 2]}, AXES),
        [[4, 7], [3, 5], [1, 2]],
    ),
    "spectra": (({"a": torch.tensor([2.0, 0.5])}, {"a": 0.1}), [[2, 0.5], [0.1, 0.1]]),
    "saturation_map": ((LARGEST,), []),
}


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


@pytest.mark.parametrize("name", CALLS)
def test_a_figure_draws_its_data_unchanged_on_the_given_axes(name):
    _, (ax, other) = plt.subplots(2)
    arguments, drawn = CALLS[name]
    assert getattr(figures, name)(*arguments, ax=ax) is ax
    assert ax.has_data()
    assert not other.has_data()
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert not ax.get_title()
    assert [list(line.get_ydata()) for line in ax.lines] == drawn


def test_every_public_figure_is_tried_here():
    functions = inspect.getmembers(figures, inspect.isfunction)
    public = {n for n, f in functions if f.__module__ == figures.__name__ and n[0] != "_"}
    assert public - {"use_style"} == set(CALLS)


def test_a_saturation_map_has_a_row_for_each_head():
    image = figures.saturation_map(LARGEST).images[0].get_array()
    assert (image == LARGEST.T.numpy()).all()
