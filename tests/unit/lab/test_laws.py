"""The laws of all sweeps: what a training has against what it costs, curves, and predictions."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from attnmem.lab import experiments, laws


def rows(**fields):
    return pd.DataFrame(fields)


def test_trainings_have_the_numbers_of_the_laws():
    names = ["mahdavi-fig2a", "mahdavi-fig4-context", "mahdavi-fig5-shared-heads"]
    found = laws.trainings(names).set_index(["experiment", "T", "H", "n", "seed"])
    assert found.index.is_unique
    shared = found.loc["mahdavi-fig2a", 10_000, 20, 32, 0]
    logits, values = 31 * 64, 64 * (20 * 31 + 1 + 100 - 64)
    assert shared.x == pytest.approx((20 * logits + values) / (4.7933 * 10_000), rel=1e-4)
    assert shared.theorem == (20 * 31 + 1) / 10_000
    assert shared.bits == pytest.approx(math.log2(100) - shared.loss / math.log(2))
    assert math.isnan(shared.left)
    assert math.isnan(found.loc["mahdavi-fig4-context", 20_000, 20, 1, 0].x)
    own = found.loc["mahdavi-fig4-context", 20_000, 20, [5, 60], 0]
    assert own.x.nunique() == 1, "with own contexts tokens add nothing"
    reals = found.loc["mahdavi-fig5-shared-heads", 25_000, 1, 32, 0]
    assert reals.x == (31 * 64 + 31 + 1) / 25_000
    assert reals.left == 12 * reals.loss
    assert math.isnan(reals.bits)
    assert {*laws.trainings(names, "quick").d} == {16}


def test_a_rising_curve_evens_out_what_falls():
    curve = laws.rising([3, 1, 2, 2, 5], [0.4, 0.0, 0.5, 0.7, 1.0])
    middle = (0.4 + 0.5 + 0.7) / 3
    assert curve([0, 1, 2, 3, 4, 9]) == pytest.approx([0, 0, middle, middle, (middle + 1) / 2, 1])


def test_explained_is_one_less_what_is_missed():
    y = np.array([0.0, 1.0, 2.0])
    assert laws.explained(y, y) == 1
    assert laws.explained(y, np.ones(3)) == 0
    assert laws.explained(y, 2 - y) == -3


def test_bits_lie_on_a_line_below_saturation_only():
    H = np.array([1, 5, 10, 20, 30])
    bits = np.minimum(0.2 * H + 0.1, 5)
    curve = rows(H=H, bits=bits, accuracy=[0.1, 0.2, 0.4, 0.7, 1.0])
    curve["T"] = 1000
    assert laws.bits_line(curve) == pytest.approx([200, 100])


def test_bits_turn_into_accuracy_between_guessing_and_certainty():
    curve = rows(H=[1, 2], bits=[1.0, 2.0], accuracy=[0.3, 0.6], N=[16, 16])
    curve["T"] = 1000
    accuracy = laws.accuracy_of_bits(curve)
    assert accuracy([-1, 0, 1, 1.5, 4, 5]) == pytest.approx([1 / 16, 1 / 16, 0.3, 0.45, 1, 1])


def test_stored_predictions_are_those_of_the_laws():
    """They read no row of what they predict, so new rows leave them as they are."""
    made = laws.predicted()
    assert {*made} == {*laws.PREDICTIONS} - {"commit"}
    for name, tables in made.items():
        assert {*tables} == {*laws.PREDICTIONS[name]}
        for curve, points in tables.items():
            assert laws.PREDICTIONS[name][curve] == pytest.approx(points, abs=0.002, nan_ok=True)
            T = int(curve.rpartition("-")[2])
            assert len(points) == len(experiments.runs(name, "paper", 1, where={"T": T}))


@pytest.fixture
def sweeps(monkeypatch):
    """Six seeds of two curves of Figure 2a, one of 4 left and one of 5, which obey all laws."""

    def made(bits=lambda heads: heads / 10):
        curves = [("mahdavi-fig2a", 100), ("mahdavi-fig2a", 200), ("mahdavi-fig4-heads", 100)]
        curves.append(("mahdavi-fig5-shared-heads", 400))
        cells = itertools.product(curves, (1, 2, 4, 6, 8), range(6))
        rows = pd.DataFrame([(*curve, H, seed) for curve, H, seed in cells])
        rows.columns = ["experiment", "T", "H", "seed"]
        rows = rows.assign(n=32, d_h=4, N=4, x=10 * rows.H / rows["T"])
        reals = rows.experiment.str.contains("fig5")
        rows["context"] = rows.experiment.str.contains("fig4").map(
            {True: "random", False: "shared"}
        )
        rows["task"] = reals.map({True: "reals", False: "classes"})
        rows["theorem"], rows["rank"] = rows.x, -rows.x
        rows["bits"] = (bits(rows.H) * 100 / rows["T"]).where(~reals)
        rows["accuracy"] = np.sqrt(rows.bits).fillna(0)
        rows["left"] = (1 - rows.x).where(reals)
        monkeypatch.setattr(laws, "trainings", lambda names=None: rows)
        return rows

    return made


def test_held_back_seeds_that_obey_the_laws(sweeps):
    sweeps()
    held = laws.held_back()
    assert held.x == pytest.approx(1)
    assert held.theorem == pytest.approx(1)
    assert held["rank"] < 0.1, "accuracy falls with it, so the best rising curve is flat"
    assert held.left == pytest.approx(0, abs=1e-12)
    assert held.bits == pytest.approx(1)
    assert held.accuracy == pytest.approx(0, abs=1e-12)
    assert (held.settings, held.lefts, held.curves, held.own, held.seeds) == (15, 5, 3, 5, 3)


def test_seeds_that_are_fitted_judge_nothing(sweeps):
    rows = sweeps()
    rows.loc[rows.seed < 3, "left"] += 0.3
    assert laws.held_back().left == pytest.approx(0, abs=1e-12)
    rows.loc[rows.seed == 4, "left"] += 0.3
    assert laws.held_back().left == pytest.approx(0.1)


def test_a_curve_that_bends_is_no_line_of_bits(sweeps):
    sweeps(bits=lambda heads: (heads / 10) ** 3)
    assert laws.held_back().bits < 0.9


def test_own_contexts_with_another_accuracy_are_missed(sweeps):
    rows = sweeps()
    rows.loc[rows.experiment == "mahdavi-fig4-heads", "accuracy"] += 0.04
    assert laws.held_back().accuracy == pytest.approx(0.04)


def test_predictions_stand_beside_trainings_once_there_are_some(sweeps):
    sweeps()
    points = laws.predictions()
    assert len(points) == 8 * 13
    assert points.trained.isna().all()
    rows = laws.trainings()
    rows.loc[rows.experiment == "mahdavi-fig4-heads", "T"] = 70_000
    points = laws.predictions().set_index(["figure", "T", "H", "n"])
    one = points.loc["Figure 4, left", 70_000, 1, 32]
    assert one.trained == pytest.approx(math.sqrt(0.1))
    assert one.seeds == 6
    assert points.trained.count() == 1, "of the heads that were trained here one is in the figure"
    assert points.loc["Figure 4, left", 70_000, 60, 32].bits == 1.0
    assert points.loc["Figure 5, own, heads", 90_000, 1, 32].left == 0.915


def test_as_many_right_labels_are_a_smaller_share_of_more(sweeps):
    sweeps()
    rows = laws.trainings()
    rows.loc[rows.experiment == "mahdavi-fig4-heads", "T"] = 50_000
    points = laws.predictions().set_index(["figure", "T", "H", "n"])["as many"]
    right = math.sqrt(0.1) * 50_000
    assert points["Figure 4, left", 70_000, 1, 32] * 70_000 == pytest.approx(right)
    assert points["Figure 4, left", 130_000, 1, 32] * 130_000 == pytest.approx(right)
    assert points.drop(1, level="H").isna().all()
