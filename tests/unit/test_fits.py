"""Fits of one layer: what is listed, equal data for all optimizers, rows and what is read off."""

import dataclasses

import pytest
import torch

from attnmem.core import bounds
from attnmem.lab import experiments, fits
from attnmem.lab import store as storage
from attnmem.lab.experiments import STUDIES
from attnmem.lab.study import ALL
from attnmem.theory import fitting
from attnmem.theory.tangents import scalar_outputs

pytestmark = pytest.mark.usefixtures("store")


@pytest.mark.parametrize("profile", ["paper", "quick"])
def test_every_fit_is_listed_once_and_within_its_ceiling(profile):
    listed = fits.fittings(profile)
    assert len({asked.key for asked in listed}) == len(listed)
    for asked in listed:
        shape = fits.Shape(asked.context, asked.H, asked.n, asked.d, asked.d_h)
        assert 1 <= asked.T <= shape.ceiling
        assert asked.optimizer in ("lm", "lbfgs", "adam")
        assert (asked.lr is None) == (asked.optimizer != "adam")


def test_the_bounds_of_a_shape():
    own, shared = fits.Shape("own", 4, 4, 8, 2), fits.Shape("shared", 4, 6, 8, 5)
    assert (own.ceiling, own.theorem) == (144, 5)
    assert own.floor == bounds.own_context_floor(heads=4, head_dim=2, dim=8)
    assert shared.ceiling == bounds.shared_context_ceiling(heads=4, context=6, head_dim=5, dim=8)
    assert shared.floor == bounds.shared_context_floor(heads=4, context=6, head_dim=5, dim=8)
    assert shared.theorem == 4 * 4 + 1


@pytest.mark.parametrize("context", ["own", "shared"])
def test_optimizers_and_coordinates_share_data_and_start(context):
    [asked, *_] = [fit for fit in fits.fittings("quick") if fit.context == context]
    balanced = fits.examples(asked)
    raw = fits.examples(dataclasses.replace(asked, optimizer="adam", coordinates="raw"))
    assert torch.equal(balanced.labels, raw.labels)
    outputs = [scalar_outputs(*given[:3]) for given in (balanced, raw)]
    assert torch.allclose(*outputs)
    for data in raw[1:]:
        assert data.dtype == torch.float64
        assert 0 <= float(data.min()) < 0.3
        assert 0.7 < float(data.max()) <= 1
    other = fits.examples(dataclasses.replace(asked, seed=1))
    assert not torch.equal(other.labels, balanced.labels)
    assert not torch.equal(other.heads.mu, balanced.heads.mu)


def test_the_start_has_logits_of_the_size_that_it_says():
    asked = dataclasses.replace(next(iter(fits.fittings("paper"))), H=50, n=5, d=16, d_h=9, T=300)
    given = fits.examples(asked)
    keys = torch.einsum("tnd,hdk->thnk", given.contexts, given.heads.W_K)
    logits = torch.einsum("thnk,td,hdk->thn", keys, given.queries, given.heads.W_Q)
    logits = logits - logits.mean(-1, keepdim=True)
    spread = float(logits.square().mean().sqrt()) * (5 / 4) ** 0.5
    assert spread == pytest.approx(fits.LOGITS, rel=0.1)


def test_fits_become_rows_and_resume():
    assert experiments.run(fits.NAME, "quick", limit_minutes=1e-9) == 0
    said = []
    wanted = [*fits.fittings("quick")]
    added = experiments.run(fits.NAME, "quick", report=lambda p: said.append(p.said))
    assert added == len(wanted) == len(said)
    assert said[0].startswith("lm, balanced, own, H=2, n=3, d=4, d_h=4, T=20, seed 0: met after")
    assert experiments.run(fits.NAME, "quick") == 0
    rows = experiments.rows(fits.NAME, "quick")
    assert STUDIES[fits.NAME].done("quick", ALL, rows) == (6, 6)
    asked, found = rows[wanted[0].key]
    given = fits.examples(asked)
    fit = fitting.levenberg_marquardt(*given, steps=asked.steps)
    assert (found.error, found.made, found.stop) == (fit.error, fit.steps, fit.stop)
    assert found.damping == fit.damping
    assert found.least == fitting.limits(fit.weights, *given[1:]).least
    table = experiments.table(fits.NAME, "quick")
    assert [*dict.fromkeys(table.way)] == ["Levenberg-Marquardt", "L-BFGS", "Adam, rate 0.01"]
    assert set(table.fraction) == {0.5}
    assert table.ceiling.tolist() == [40, 21] * 3
    assert table.met.tolist() == (table.error <= fitting.MET).tolist()
    assert table["shape"][0] == "own, H=2, n=3, d=4, d_h=4"


def test_ways_are_named_by_what_differs_from_the_published_protocol():
    [asked, *_] = [fit for fit in fits.fittings("paper") if fit.optimizer == "adam"]
    published = dataclasses.replace(asked, **fits.AS_PUBLISHED)
    outcome = storage.Fitted(0.5, 0.1, 9, "steps", None, 0.1, 0.1, 1.0, 0.0, 1.0, "cpu", "2", "abc")
    changes = ({}, {"coordinates": "balanced"}, {"lr": 1e-2}, {"optimizer": "lm", "lr": None})
    rows = [
        (dataclasses.replace(published, seed=i, **change), outcome)
        for i, change in enumerate(changes)
    ]
    storage.append(rows)
    assert experiments.table(fits.NAME, "paper").way.tolist() == [
        "Adam as published",
        "Adam, rate 0.001",
        "Adam, rate 0.01, raw",
        "Levenberg-Marquardt, raw",
    ]


def test_what_was_reached_is_read_off_fraction_by_fraction():
    """All seeds up to 0.5; of the larger fractions one seed met 0.9, and none met the last."""
    outcome = storage.Fitted(0.5, 0.1, 9, "steps", 1.0, 0.1, 0.1, 1.0, 0.0, 1.0, "cpu", "2", "abc")
    met = dataclasses.replace(outcome, stop="met", error=1e-7)
    right = {(0.5, 0), (0.5, 1), (0.8, 1), (0.9, 0), (0.9, 1)}
    cells = [(f, s) for f in (0.5, 0.8, 0.9, 1.0) for s in range(2)]
    listed = {
        (fit.context, fit.H, fit.n, fit.d, fit.d_h, fraction, fit.seed): fit
        for fit, fraction in fits.fittings("paper").items()
        if (fit.optimizer, fit.coordinates) == ("lm", "balanced")
    }
    rows = [(listed[*fits.OWN, *cell], met if cell in right else outcome) for cell in cells]
    storage.append([*rows, *((listed[*fits.ONE, 0.5, seed], outcome) for seed in range(3))])
    first, second = fits.reached(experiments.table(fits.NAME, "paper")).itertuples(index=False)
    assert first[:7] == ("own, H=4, n=4, d=8, d_h=8", "Levenberg-Marquardt", 288, 2, 0.5, 0.9, 1.0)
    assert (first.floor, first.theorem) == (fits.OWN.floor / 288, 13 / 288)
    assert second[2:7] == (72, 3, 0.0, 0.0, 0.5)


def test_what_there_is_not_is_refused():
    with pytest.raises(ValueError, match="profile: got 'fast'"):
        fits.fittings("fast")
    with pytest.raises(ValueError, match="seeds: got 3"):
        experiments.run(fits.NAME, "quick", seeds=3)
