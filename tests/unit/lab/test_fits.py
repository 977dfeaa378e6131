"""The studies of fits: what is listed, their data and starts, their rows and what is read off."""

import dataclasses

import pytest
import torch

from attnmem import random_deep
from attnmem.core import bounds
from attnmem.lab import experiments, fits
from attnmem.lab import store as storage
from attnmem.lab.fits import DEEP, LAYER
from attnmem.lab.study import ALL
from attnmem.theory import fitting
from attnmem.theory.tangents import scalar_outputs

BOTH = pytest.mark.parametrize("study", [LAYER, DEEP], ids=lambda study: study.name)
FELL_SHORT = storage.Fitted(0.5, 0.1, 9, "steps", 1.0, 0.1, 0.1, 1.0, 0.0, 1.0, "cpu", "2", "abc")
MET = dataclasses.replace(FELL_SHORT, stop="met", error=1e-7)


def test_the_bounds_of_a_shape():
    own, shared = fits.Shape("own", 4, 4, 8, 2), fits.Shape("shared", 4, 6, 8, 5)
    sizes = {"heads": 4, "head_dim": 5, "dim": 8, "context": 6}
    assert (own.ceiling, own.theorem, shared.theorem) == (144, 5, 17)
    assert own.floor == bounds.own_context_floor(heads=4, head_dim=2, dim=8)
    assert shared.ceiling == bounds.shared_context_ceiling(**sizes)
    assert shared.floor == bounds.shared_context_floor(**sizes)


def test_networks_of_a_family_have_equal_weights():
    wide = fits.named_sizes(fits.Network, "wide-4", "wide-8")
    family = {DEEP.sizes_of(fit) for fit in DEEP.fittings("paper")} - {*wide}
    for d in {net.d for net in family}:
        nets = sorted(net for net in family if net.d == d)
        assert len({(net.weights, net.flat) for net in nets}) == 1
        assert sorted(net.ceiling for net in nets) == [net.ceiling for net in nets]
    ceilings = {(net.d, net.layers): net.ceiling for net in family}
    assert wide[0].ceiling == ceilings[4, 3] == 132
    assert (wide[1].ceiling, ceilings[8, 2]) == (384, 383)
    g = torch.Generator().manual_seed(0)
    net = next(net for net in family if (net.d, net.layers) == (6, 2))
    weights = random_deep((net.H,) * net.layers, net.d_h, net.d_v, net.d, g)
    assert sum(W.numel() for W in weights.tensors) == net.weights
    # One layer of as many heads, and of as many weights, with values of width one.
    assert (net.flat, net.narrow) == (6 * 26 + 6, 8 * 26 + 6)


@pytest.mark.parametrize("context", ["own", "shared"])
def test_optimizers_and_coordinates_share_data(context):
    [asked, *_] = [fit for fit in LAYER.fittings("quick") if fit.context == context]
    balanced = LAYER.examples(asked)
    raw = LAYER.examples(dataclasses.replace(asked, optimizer="adam", coordinates="raw"))
    assert torch.equal(balanced.labels, raw.labels)
    outputs = [scalar_outputs(*given[:3]) for given in (balanced, raw)]
    assert torch.allclose(*outputs)
    for data in raw[1:]:
        assert data.dtype == torch.float64
        assert 0 <= float(data.min()) < 0.3
        assert 0.7 < float(data.max()) <= 1
    other = LAYER.examples(dataclasses.replace(asked, seed=1))
    assert not torch.equal(other.labels, balanced.labels)
    assert not torch.equal(other.weights.mu, balanced.weights.mu)


def test_a_layer_starts_with_the_spread_of_its_logits():
    asked = dataclasses.replace(next(iter(LAYER.fittings("paper"))), H=50, n=5, d=16, d_h=9, T=300)
    given = LAYER.examples(asked)
    keys = torch.einsum("tnd,hdk->thnk", given.contexts, given.weights.W_K)
    logits = torch.einsum("thnk,td,hdk->thn", keys, given.queries, given.weights.W_Q)
    logits = logits - logits.mean(-1, keepdim=True)
    spread = float(logits.square().mean().sqrt()) * (5 / 4) ** 0.5
    assert spread == pytest.approx(fits.LOGITS, rel=0.1)


@pytest.mark.parametrize(("d_h", "d_v", "H"), [(9, 2, 40), (1, 12, 3)])
def test_networks_start_with_the_spreads_of_their_rows(d_h, d_v, H):
    """Whatever the widths: of the logits of both layers' maps, and of what the heads add."""
    asked = next(iter(DEEP.fittings("paper")))
    for logits, values in ((asked.logits, asked.values), (6.0, 0.2)):
        sizes = {"layers": 2, "H": H, "d": 16, "d_h": d_h, "d_v": d_v, "T": 400}
        fit = dataclasses.replace(asked, logits=logits, values=values, **sizes)
        weights, X, _, labels = DEEP.examples(fit)
        assert float(X.mean()) == pytest.approx(0, abs=0.05)
        assert float(X.square().mean()) == pytest.approx(1, rel=0.05)
        assert float(X.abs().max()) <= 3**0.5
        assert 0 <= float(labels.min()) < 0.1 < 0.9 < float(labels.max()) <= 1
        for layer in weights.layers:
            queries, keys = X.flatten(0, 1) @ layer.W_Q, X.flatten(0, 1).flip(0) @ layer.W_K
            spread = (queries * keys).sum(-1).square().mean().sqrt()
            assert float(spread) == pytest.approx(logits, rel=0.3)
            added = (X.flatten(0, 1) @ layer.W_V @ layer.W_O).sum(0)
            assert float(added.square().mean().sqrt()) == pytest.approx(values, rel=0.2)


def test_a_sharp_start_has_the_same_data():
    asked = next(iter(DEEP.fittings("paper")))
    soft, sharp = (DEEP.examples(dataclasses.replace(asked, **s)) for s in ({}, fits.SHARP))
    assert torch.equal(soft.contexts, sharp.contexts)
    assert torch.equal(soft.labels, sharp.labels)
    assert not torch.equal(soft.weights.layers[0].W_Q, sharp.weights.layers[0].W_Q)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("study", "said", "ways", "shape"),
    [
        (
            LAYER,
            "lm, balanced, own, H=2, n=3, d=4, d_h=4, T=20, seed 0: met after",
            ["Levenberg-Marquardt", "L-BFGS", "Adam, rate 0.01"],
            "own, H=2, n=3, d=4, d_h=4",
        ),
        (
            DEEP,
            "lm, raw, L=1, H=2, n=4, d=3, d_h=2, d_v=2, T=12, seed 0: met after",
            ["Levenberg-Marquardt", "Adam"],
            "L=1, H=2, n=4, d=3, d_h=2, d_v=2",
        ),
    ],
)
def test_fits_become_rows_and_resume(study, said, ways, shape):
    assert experiments.run(study.name, "quick", limit_minutes=1e-9) == 0
    words, wanted = [], [*study.fittings("quick")]
    added = experiments.run(study.name, "quick", report=lambda p: words.append(p.said))
    assert added == len(wanted) == len(words)
    assert words[0].startswith(said)
    assert experiments.run(study.name, "quick") == 0
    rows = experiments.rows(study.name, "quick")
    assert study.done("quick", ALL, rows) == (len(wanted), len(wanted))
    asked, found = rows[wanted[0].key]
    given = study.examples(asked)
    fit = fitting.levenberg_marquardt(*given, steps=asked.steps)
    limits = fitting.limits(fit.weights, *given[1:])
    assert (found.error, found.made, found.stop) == (fit.error, fit.steps, fit.stop)
    assert (found.damping, found.least, found.weight) == (fit.damping, limits.least, limits.weight)
    table = experiments.table(study.name, "quick")
    assert [*dict.fromkeys(table.way)] == ways
    assert set(table.fraction) == {0.5}
    assert table.ceiling.tolist() == [study.sizes_of(asked).ceiling for asked in wanted]
    assert table.met.tolist() == (table.error <= fitting.MET).tolist()
    assert (table["shape"][0], table.ratio[0]) == (shape, found.least / found.largest)


@pytest.mark.usefixtures("store")
def test_ways_are_named_by_their_difference():
    [asked, *_] = [fit for fit in LAYER.fittings("paper") if fit.optimizer == "adam"]
    published = dataclasses.replace(asked, **fits.AS_PUBLISHED)
    changes = ({}, {"coordinates": "balanced"}, {"lr": 1e-2}, {"optimizer": "lm", "lr": None})
    storage.append(
        (dataclasses.replace(published, seed=i, **change), FELL_SHORT)
        for i, change in enumerate(changes)
    )
    assert experiments.table(LAYER.name, "paper").way.tolist() == [
        "Adam as published",
        "Adam, rate 0.001",
        "Adam, rate 0.01, raw",
        "Levenberg-Marquardt, raw",
    ]


@BOTH
@pytest.mark.usefixtures("store")
def test_reached_is_read_off_fraction_by_fraction(study):
    """All seeds up to the first; of the larger ones a seed met the third, and none the last."""
    by_place = {
        (study.sizes_of(fit), fraction, fit.seed): fit
        for fit, fraction in study.fittings("paper").items()
        if (fit.optimizer, fit.logits) in (("lm", None), ("lm", 0.5)) and fit.context == "own"
    }
    fractions = (0.8, 0.9, 0.95, 1.0)
    net = [net for net, fraction, _ in by_place if fraction == 1.0][-1]
    other, low, _ = next(place for place in by_place if place[1] in (0.2, 0.6))
    right = {(0.8, 0), (0.8, 1), (0.9, 1), (0.95, 0), (0.95, 1)}
    cells = [(fraction, seed) for fraction in fractions for seed in range(2)]
    rows = [(by_place[net, *cell], MET if cell in right else FELL_SHORT) for cell in cells]
    storage.append([*rows, *((by_place[other, low, seed], FELL_SHORT) for seed in range(3))])
    one, two = study.reached(experiments.table(study.name, "paper")).itertuples(index=False)
    assert (one.shape, one.way, one.ceiling) == (net.words, "Levenberg-Marquardt", net.ceiling)
    assert one[-6:] == (2, 0.8, 0.95, 1.0, int(0.8 * net.ceiling), int(0.95 * net.ceiling))
    assert (two.ceiling, *two[-6:]) == (other.ceiling, 3, 0.0, 0.0, low, 0, 0)


def test_what_there_is_not_is_refused():
    with pytest.raises(ValueError, match="profile: got 'fast'"):
        LAYER.fittings("fast")
    with pytest.raises(ValueError, match="seeds: got 3"):
        experiments.run(LAYER.name, "quick", seeds=3)
