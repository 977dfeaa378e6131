"""Every figure draws what it is given, on the axes it is given."""

import json

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


def test_label_ends_names_each_line_apart():
    _, ax = plt.subplots()
    for name, end in (("AoT", 0.5), ("MLP", 0.5), ("_hidden", 0.1)):
        ax.plot([1, 2, 3], [0.1, end, np.nan], label=name)
    figures.label_ends(ax)
    assert [note.get_text() for note in ax.texts] == ["AoT", "MLP"]
    assert [note.xy for note in ax.texts] == [(2, 0.5)] * 2
    low, high = (note.xyann[1] for note in ax.texts)
    assert high - low >= plt.rcParams["font.size"]
    plt.close("all")


@pytest.mark.parametrize("name", CALLS)
def test_a_figure_draws_its_data_on_the_given_axes(name):
    _, (ax, other) = plt.subplots(2)
    arguments, drawn = CALLS[name]
    assert getattr(figures, name)(*arguments, ("heads", "accuracy"), ax=ax) is ax
    assert not other.has_data()
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("heads", "accuracy", "")
    assert [list(line.get_ydata()) for line in ax.lines] == drawn
    plt.close("all")


def test_points_are_named_where_they_lie_in_the_picture(tmp_path):
    """A lone black dot on white paper is found in the saved picture at the place that is stored."""
    figure, ax = plt.subplots(figsize=(4, 3))
    ax.set(xscale="log", xlim=(1, 100), ylim=(0, 1), ylabel="a label that is cut off otherwise")
    ax.plot([20], [0.3], "s", color="red", ms=4)
    named = figures.named_points([(ax, 20, 0.3, "the dot, <b>bold</b>"), (ax, 200, 0.3, "outside")])
    figure.savefig(tmp_path / "picture.png", bbox_inches="tight")
    image = plt.imread(tmp_path / "picture.png")
    rows, columns = np.nonzero((image[..., 0] > 0.9) & (image[..., 1] < 0.1))
    [point] = json.loads(named.data.split(">", 1)[1].removesuffix("</script>"))
    assert point["says"] == "the dot, <b>bold</b>"
    centre = [columns.mean() / image.shape[1], rows.mean() / image.shape[0]]
    assert point["at"] == pytest.approx(centre, abs=0.01)
    plt.close("all")
