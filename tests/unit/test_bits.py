"""Bits of stored trainings: one estimator, counted by hand and pair by pair."""

import dataclasses
import math

import pandas as pd
import pytest

from attnmem.lab import bits, data, experiments, models
from attnmem.lab import store as storage
from attnmem.lab.store import Outcome
from attnmem.theory import counts

FROM = {"wall_s": 1.0, "device": "cpu", "torch": "2", "commit": "none"}


@pytest.mark.parametrize(
    ("accuracy", "loss", "classes", "labels", "expected"),
    [
        (1.0, 0.2, 8, 5, 15.0),  # the list of wrong answers is empty
        (0.5, math.log(2), 8, 5, 10.0),  # probabilities: one bit of three is missing
        (0.1, 3.0, 8, 5, 0.0),  # worse than guessing by either code
        (None, 1 / (2 * math.pi * math.e) / 64, None, 5, 15.0),
        (None, 0.5, None, 5, 0.0),
    ],
)
def test_the_better_code_counts(accuracy, loss, classes, labels, expected):
    assert bits.saved_bits(accuracy, loss, classes, labels) == pytest.approx(expected)


def test_real_labels_are_read_to_eight_decimals_at_most():
    limit = bits.saved_bits(None, 1e-16, None, 1)
    assert limit == pytest.approx(-math.log2(2 * math.pi * math.e) / 2 + 8 * math.log2(10))
    assert bits.saved_bits(None, 0.0, None, 1) == limit
    assert bits.saved_bits(None, 1e-15, None, 1) < limit
    with pytest.raises(ValueError, match=r"^accuracy: got None"):
        bits.saved_bits(None, 0.1, 5, 3)


def test_stored_trainings_have_their_bits_and_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(tmp_path))
    monkeypatch.setattr(storage, "SHIPPED", tmp_path)
    first, second, *_ = experiments.runs("dana-exp1", "quick")
    lost = Outcome(accuracy=None, loss=None, diverged=3, **FROM)
    storage.append([(first, Outcome(accuracy=0.5, loss=1.0, **FROM)), (second, lost)])
    table = bits.trainings("quick")
    [line] = table.itertuples()
    labels = counts.different_draws(first.N**2, first.T)
    assert 0 < labels < min(first.N**2, first.T)
    assert line.bits == pytest.approx(labels * (math.log(first.N) - 1) / math.log(2))
    assert line.parameters == models.parameter_count(first)
    assert line.layer_parameters == models.parameter_count(first, tables=False)
    assert line.dimension == models.dimension(first)


def test_a_recount_goes_over_every_pair_that_was_drawn():
    [run, *_] = experiments.runs("dana-exp1", "quick", 1)
    run = dataclasses.replace(run, T=128, batch=64, steps=250)
    found = bits.recount(run)
    drawn = len(data.pairs_of(run).tokens.unique(dim=0))
    assert drawn < run.N**2
    assert 0 < found.counted <= drawn * math.log2(run.N)
    assert found.counted != found.read
    classes = experiments.runs("mahdavi-fig2a", "quick", 1)[0]
    with pytest.raises(ValueError, match=r"^run: got the task 'classes'"):
        bits.recount(classes)


def lines(**columns):
    shape = {"model": "aot", "variant": "paper", "context": None, "N": 4, "n": 2, "d": 3}
    shape |= {"d_h": 3, "width": None, "layers": 1, "experiment": "none", "lr": 0.1}
    return pd.DataFrame({"steps": 9, **columns}).assign(**shape)


def test_the_largest_set_of_each_shape_is_the_largest_that_is_right():
    table = lines(H=[1, 1, 1, 2], T=[5, 9, 12, 7], accuracy=[1.0, 1.0, 0.9, 1.0])
    assert bits.largest_sets(table)["T"].tolist() == [9, 7]


def test_a_span_is_over_means_of_cells():
    table = lines(
        H=[1, 1, 2],
        T=[5, 5, 5],
        bits=[8.0, 12.0, 30.0],
        parameters=[10, 10, 15],
        layer_parameters=[5, 5, 6],
        dimension=[None, None, 12],
    )
    found = bits.span(table)
    assert found == {"low": 1.0, "high": 2.0, "layer_parameters": 5, "dimension": 2.5, "cells": 2}
    assert math.isnan(bits.span(table[:2])["dimension"])
    longer = bits.span(table.assign(steps=[9, 18, 9]))
    assert (longer["low"], longer["cells"]) == (0.8, 3)
    with pytest.raises(ValueError, match=r"^table: got no lines"):
        bits.span(table[:0])
