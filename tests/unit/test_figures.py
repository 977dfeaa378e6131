"""Every figure draws what it is given, on the axes it is given."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch

from attnmem import figures

mpl.use("agg")
import matplotlib.pyplot as plt

T, H = 7, 3
CALLS = {
    "sharpening": (torch.logspace(-1, 1, 5), torch.rand(5, 3)),
    "attended_path": (torch.rand(3, 2), torch.rand(5, 2)),
    "spectra": ({"a": torch.rand(4), "b": torch.rand(4)}, {"a": 0.1, "b": 0.2}),
    "detection": ([2, 3], [0.1, 0.2], [0.1, 0.3]),
    "rank_staircase": ([1, 2], {"built": [3, 5]}, {"built": [3, 5]}),
    "saturation_map": (torch.rand(T, H),),
    "memorized": (torch.rand(T), {"built": torch.rand(T)}),
    "curves_with_bands": (
        {"d = 5": pd.DataFrame([[0.1, 0.2], [0.2, np.nan]], index=[1, 2])},
        {"d = 5": ([1], [0.15])},
        ("heads", "accuracy"),
    ),
    "bounds_below": ([1, 2], [0.2, 0.3], {"bound": [0.1, 0.2]}, ("heads", "accuracy")),
    "laws": ([1, 2], [1, 4], [(0.5, 1.5), (3, 5)], {"square": ([1, 2], [1, 4])}, ("d", "slope")),
    "logit_fan": (torch.rand(4), {"served": torch.rand(4, 3)}),
    "logit_map": (torch.randn(T, 3),),
    "decay": ([1, 2], {"a": [0.1, 0.01]}, {"a": [0.1, 0.01]}, ("scale", "missing attention")),
    "finite_scale": ([1, 2], {"sigma": [0.1, 0.2]}, {"promised": 1.5}),
    "between": (
        [1, 2],
        ("floor", [3, 5]),
        ("ceiling", [4, 7]),
        {"random": [1, 2]},
        ("heads", "examples"),
    ),
    "capacities": ([1, 2], {"rank": [3, 5]}, {"built": ([1], [4])}, ("heads", "examples")),
    "curves": ({"AoT": ([1, 2], [0.1, 0.2]), "MLP": ([1], [0.3])}, ("epoch", "accuracy")),
    "shares_reached": (
        ["one head", "two heads"],
        {"L-BFGS": ([0.5, np.nan], [0.7, np.nan])},
        {"floor": [0.1, 0.5]},
        ("share", "shape"),
    ),
    "residual_cliff": ([1, 2], {"best read-out": [0.0, 0.1]}, 1),
}


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


@pytest.mark.parametrize("name", CALLS)
def test_figure_draws_on_the_given_axes(name):
    _, (ax, other) = plt.subplots(2)
    assert getattr(figures, name)(*CALLS[name], ax=ax) is ax
    assert ax.has_data()
    assert not other.has_data()
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert not ax.get_title()


def test_spans_have_a_bar_and_a_dot_for_each_source_and_an_arrow_where_one_is_cut():
    lines = pd.DataFrame(
        {"group": ["a", "b"], "low": [0.001, 2.0], "high": [1.0, 3.0], "other": [np.nan, 5.0]},
        index=["first", "second"],
    )
    _, (ax, unused) = plt.subplots(2)
    marks = {"all": "high o", "else": "other D"}
    assert figures.spans(lines, "bits", marks, (0.01, 10.0), ax=ax) is ax
    assert not unused.has_data()
    assert [text.get_text() for text in ax.get_yticklabels()] == ["first", "second"]
    heights = ax.get_yticks()
    assert heights[0] > heights[1]
    drawn = [(line.get_marker(), *line.get_xdata()) for line in ax.lines]
    assert ("None", 0.01, 1.0) in drawn
    assert ("None", 2.0, 3.0) in drawn
    assert [found[1:] for found in drawn if found[0] == "o"] == [(1.0,), (3.0,), ()]
    assert [line.get_ydata()[0] for line in ax.lines if line.get_marker() == "<"] == [heights[0]]
    [diamonds] = [line for line in ax.lines if line.get_marker() == "D"]
    assert diamonds.get_xdata()[1] == 5
    assert ax.lines[0].get_color() != ax.lines[-4].get_color()


@pytest.mark.parametrize(("shared", "maps"), [(True, 2), (False, 0)])
def test_the_wiring_names_the_maps_that_heads_share(shared, maps):
    _, (ax, other) = plt.subplots(2)
    assert figures.wiring(shared, ax=ax) is ax
    texts = [text.get_text() for text in ax.texts]
    assert sum("for all heads" in text for text in texts) == maps
    assert sum("$(d_h, d_h)$" in text for text in texts) == 3 * shared
    assert sum("\n$(d_h, d)$" in text for text in texts) == 3 * (not shared)
    assert not other.texts


def test_every_public_figure_is_tried_here():
    public = {name for name in figures.__all__ if callable(getattr(figures, name))}
    assert public - {"use_style", "wiring", "spans"} == set(CALLS)


def test_data_are_drawn_unchanged():
    ax = figures.rank_staircase([1, 2, 3], {"built": [3, 5, 9]}, {"built": [3, 6, 9]})
    assert [list(line.get_ydata()) for line in ax.lines] == [[3, 6, 9], [3, 5, 9]]
    ax = figures.shares_reached(["a", "b"], {"x": ([0.5, 0.8], [0.7, 0.9])}, {}, ("s", "n"))
    assert [list(line.get_xdata()) for line in ax.lines[-3:-1]] == [[0.7, 0.9], [0.5, 0.8]]
    largest = torch.rand(T, H)
    image = figures.saturation_map(largest, plt.figure().gca()).images[0].get_array()
    assert (image == largest.T.numpy()).all()
