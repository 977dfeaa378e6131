"""Every figure draws what it is given, on the axes it is given."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from attnmem.pages import figures

mpl.use("agg")
import matplotlib.pyplot as plt

BAND = {"d = 5": pd.DataFrame([[0.1, 0.2], [0.2, np.nan]], index=[1, 2])}
CALLS = {  # arguments, and the vertical values of the lines that are drawn
    "curves": (({"AoT": ([1, 2], [0.1, 0.2]), "MLP": ([1], [0.3])},), [[0.1, 0.2], [0.3]]),
    "curves_with_bands": (
        (BAND, ([1], [0.15])),
        [[pytest.approx(0.15), 0.2], [0.15], []],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_figure_draws_its_data_on_the_given_axes(name):
    _, (ax, other) = plt.subplots(2)
    arguments, drawn = CALLS[name]
    assert getattr(figures, name)(*arguments, ("heads", "accuracy"), ax=ax) is ax
    assert not other.has_data()
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("heads", "accuracy", "")
    assert [list(line.get_ydata()) for line in ax.lines] == drawn
    plt.close("all")
