"""Fits of several layers: a step against dense algebra, the attention of hidden tokens, rows."""

import dataclasses
import math

import pytest
import torch

from attnmem import DeepWeights, deep, random_deep
from attnmem.core import bounds
from attnmem.lab import depth, experiments
from attnmem.lab import store as storage
from attnmem.lab.experiments import STUDIES
from attnmem.lab.study import ALL
from attnmem.theory import fitting
from attnmem.theory.tangents import jacobian

N, D, D_H, D_V, T = 3, 5, 2, 4, 11


def given(heads=(2, 3), examples=T, seed=0, **start):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randn(examples, N, D, generator=g, dtype=torch.float64)
    labels = torch.rand(examples, generator=g, dtype=torch.float64)
    return random_deep(heads, D_H, D_V, D, g, **start), tokens, None, labels


def flat(weights):
    return torch.cat([w.flatten() for w in weights.tensors])


def plain_attention(weights, tokens):
    """The largest attention weight of each example, layer, head and asking token, one by one."""
    tops = []
    for X in tokens:
        for i, layer in enumerate(weights.layers):
            rows, moved = range(len(X)), X.clone()
            for W_Q, W_K, W_V, W_O in zip(*layer, strict=True):
                A = torch.softmax(X @ W_Q @ W_K.T @ X.T, 1)
                last = i == len(weights.layers) - 1
                tops += [float(A[k].max()) for k in (rows[-1:] if last else rows)]
                moved = moved + A @ X @ W_V @ W_O
            X = moved
    return tops


@pytest.mark.parametrize(("d_h", "d_v", "H"), [(9, 2, 40), (1, 12, 3)])
def test_fits_start_with_logits_and_values_of_the_size_that_their_rows_say(d_h, d_v, H):
    """Whatever the widths: of the logits of both layers' maps, and of what the heads add."""
    asked = next(iter(depth.fittings("paper")))
    for logits, values in ((asked.logits, asked.values), (6.0, 0.2)):
        sizes = {"layers": 2, "H": H, "d": 16, "d_h": d_h, "d_v": d_v, "T": 400}
        fit = dataclasses.replace(asked, logits=logits, values=values, **sizes)
        weights, X, _, labels = depth.examples(fit)
        assert float(X.mean()) == pytest.approx(0, abs=0.05)
        assert float(X.square().mean()) == pytest.approx(1, rel=0.05)
        assert 0 <= float(labels.min()) < 0.1 < 0.9 < float(labels.max()) <= 1
        for layer in weights.layers:
            queries, keys = X.flatten(0, 1) @ layer.W_Q, X.flatten(0, 1).flip(0) @ layer.W_K
            spread = (queries * keys).sum(-1).square().mean().sqrt()
            assert float(spread) == pytest.approx(logits, rel=0.3)
            added = (X.flatten(0, 1) @ layer.W_V @ layer.W_O).sum(0)
            assert float(added.square().mean().sqrt()) == pytest.approx(values, rel=0.2)


def test_a_step_of_levenberg_marquardt_is_that_of_dense_algebra():
    weights, tokens, _, labels = data = given()
    fit = fitting.levenberg_marquardt(*data, steps=1)
    tried = fitting.DAMPING * fitting.RISE ** round(
        math.log(fit.damping * fitting.FALL / fitting.DAMPING, fitting.RISE)
    )
    J = jacobian(weights, tokens)
    unit = float(J.square().sum(1).mean())
    normal = J.T @ J + tried * unit * torch.eye(J.shape[1], dtype=J.dtype)
    step = torch.linalg.solve(normal, J.T @ (deep(weights, tokens)[:, 0] - labels))
    assert torch.allclose(flat(fit.weights), flat(weights) - step, atol=1e-10)
    assert (fit.steps, fit.stop) == (1, "steps")


def test_without_heads_linear_least_squares_is_solved_exactly():
    """Layers whose values are zero at the start stay so where no error is left to remove."""
    weights, tokens, _, _ = given(examples=D)
    zero = [layer._replace(W_O=torch.zeros_like(layer.W_O)) for layer in weights.layers]
    labels = tokens[:, -1] @ torch.arange(1.0, D + 1, dtype=torch.float64)
    start = DeepWeights(tuple(zero), weights.W_D)
    fit = fitting.levenberg_marquardt(start, tokens, None, labels, steps=50)
    assert fit.stop == "met"
    assert torch.allclose(deep(fit.weights, tokens)[:, 0], labels, atol=1e-4)


@pytest.mark.parametrize(("optimizer", "part"), [("levenberg_marquardt", 2), ("lbfgs", 8)])
def test_a_part_of_the_ceiling_is_met(optimizer, part):
    ceiling = bounds.deep_ceiling((2, 1), D_H, D_V, D)
    data = given((2, 1), ceiling // part)
    fit = getattr(fitting, optimizer)(*data, steps=400)
    _, tokens, _, labels = data
    error = (deep(fit.weights, tokens)[:, 0] - labels).abs().max()
    assert fit.stop == "met"
    assert fit.error == pytest.approx(float(error / labels.max()))


def test_adam_against_autograd(monkeypatch):
    """Epochs of three batches; the last look is at the last step."""
    weights, tokens, _, labels = data = given()
    rate = lambda step: 0.1 / (step + 1)  # noqa: E731
    monkeypatch.setattr(fitting, "EVALUATE_EVERY", 3)
    fit = fitting.adam(*data, steps=5, rate=rate, batch=4, seed=3)
    plain = weights.like(tuple(w.clone().requires_grad_() for w in weights.tensors))
    optimizer, g, order, looks = torch.optim.Adam(plain.tensors), torch.Generator(), [], []
    g.manual_seed(3)
    for step in range(5):
        order = order or [*torch.randperm(T, generator=g).split(4)]
        at = order.pop(0)
        optimizer.zero_grad()
        (deep(plain, tokens[at])[:, 0] - labels[at]).square().mean().backward()
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        if step in (2, 4):
            looks.append((deep(plain, tokens)[:, 0] - labels).square().sum().item())
    got = float((deep(fit.weights, tokens)[:, 0] - labels).square().sum())
    assert got == pytest.approx(min(looks), rel=1e-9)


def test_limits_against_dense_algebra():
    weights, tokens, _, labels = data = given(logits=4.0, values=2.0)
    found = fitting.limits(*data)
    J = jacobian(weights, tokens)
    values = torch.linalg.svdvals(J)
    residual = deep(weights, tokens)[:, 0] - labels
    assert (found.largest, found.least) == pytest.approx((float(values[0]), float(values[T - 1])))
    ratio = float((J.T @ residual).norm() / (values[0] * residual.norm()))
    assert found.gradient == pytest.approx(ratio)
    tops = plain_attention(weights, tokens)
    assert found.saturated == pytest.approx(sum(top > 0.99 for top in tops) / len(tops))
    assert 0 < found.saturated < 1
    assert found.weight == float(flat(weights).abs().max())


def test_what_cannot_be_fitted_is_refused():
    weights, tokens, _, labels = given()
    other = weights.layers[1]._replace(W_O=weights.layers[1].W_O[..., 1:])
    for change, match in (
        ({"queries": tokens[:, 0]}, "queries: got Tensor; expected None"),
        ({"contexts": tokens[0]}, "contexts: got shape"),
        ({"labels": labels[1:]}, "labels: got T = 10"),
        ({"weights": weights._replace(layers=(other, other))}, "layer.W_O: got d = 4"),
        ({"weights": weights._replace(W_D=torch.ones(D, 2))}, r"weights.W_D: got shape \(5, 2\)"),
        ({"weights": weights.moved(weights, math.nan)}, r"weights.layers\[0\].W_Q: got 20 entries"),
        ({"weights": tokens}, "weights: got Tensor; expected ScalarHeads or DeepWeights"),
    ):
        whole = {"weights": weights, "contexts": tokens, "queries": None, "labels": labels}
        with pytest.raises(ValueError, match=match):
            fitting.levenberg_marquardt(**whole | change, steps=2)


# --- the study ------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["paper", "quick"])
def test_every_fit_is_listed_once_and_within_its_ceiling(profile):
    listed = depth.fittings(profile)
    assert len({asked.key for asked in listed}) == len(listed)
    for asked in listed:
        assert 1 <= asked.T <= depth.sizes_of(asked, depth.Network).ceiling


def test_networks_of_a_family_have_equal_weights_and_the_wide_ones_nearly_the_ceiling():
    for nets in (*depth.FAMILIES, depth.LARGE):
        assert len({net.weights for net in nets}) == 1
        assert [net.layers for net in nets] == [1, 2, 3]
        assert sorted(net.ceiling for net in nets) == [net.ceiling for net in nets]
    assert depth.WIDE[0].ceiling == depth.FAMILIES[0][2].ceiling == 132
    assert (depth.WIDE[1].ceiling, depth.FAMILIES[2][1].ceiling) == (384, 383)
    net = depth.FAMILIES[1][1]
    g = torch.Generator().manual_seed(0)
    weights = random_deep((net.H,) * net.layers, net.d_h, net.d_v, net.d, g)
    assert len(flat(weights)) == net.weights


def test_optimizers_share_data_and_start_and_a_sharp_start_has_the_same_data():
    asked = next(iter(depth.fittings("paper")))
    soft = depth.examples(asked)
    adam = depth.examples(dataclasses.replace(asked, **depth.ADAM))
    assert torch.equal(flat(soft.weights), flat(adam.weights))
    sharp = depth.examples(dataclasses.replace(asked, **depth.SHARP))
    assert torch.equal(soft.contexts, sharp.contexts)
    assert torch.equal(soft.labels, sharp.labels)
    ratio = sharp.weights.layers[0].W_Q / soft.weights.layers[0].W_Q
    ratio = float(ratio.mean()) ** 2
    assert ratio == pytest.approx(depth.SHARP["logits"] / depth.SOFT["logits"])
    assert float(soft.contexts.square().mean()) == pytest.approx(1, rel=0.1)
    assert float(soft.contexts.abs().max()) <= 3**0.5
    other = depth.examples(dataclasses.replace(asked, seed=1))
    assert not torch.equal(other.labels, soft.labels)


def test_fits_become_rows_and_resume(store):
    wanted = [*depth.fittings("quick")]
    assert experiments.run(depth.NAME, "quick") == len(wanted) == 4
    assert experiments.run(depth.NAME, "quick") == 0
    rows = experiments.rows(depth.NAME, "quick")
    assert STUDIES[depth.NAME].done("quick", ALL, rows) == (4, 4)
    asked, found = rows[wanted[0].key]
    data = depth.examples(asked)
    fit = fitting.levenberg_marquardt(*data, steps=asked.steps)
    assert (found.error, found.made, found.stop) == (fit.error, fit.steps, fit.stop)
    assert found.weight == fitting.limits(fit.weights, *data[1:]).weight
    table = experiments.table(depth.NAME, "quick")
    assert [*dict.fromkeys(table.way)] == ["Levenberg-Marquardt", "Adam"]
    assert set(table.fraction) == {0.5}
    assert table["shape"][0] == "L=1, H=2, n=4, d=3, d_h=2, d_v=2"
    assert table.ratio[0] == found.least / found.largest


def test_what_was_reached_is_read_off_fraction_by_fraction(store):
    """All seeds up to 0.8; of the larger fractions one seed met 0.95, and none met 0.9."""
    outcome = storage.Fitted(0.5, 0.1, 9, "steps", 1.0, 0.1, 0.1, 1.0, 0.0, 1.0, "cpu", "2", "abc")
    met, net, other = dataclasses.replace(outcome, stop="met"), *depth.FAMILIES[1][1:]
    first = next(
        fit for fit in depth.fittings("paper") if depth.sizes_of(fit, depth.Network) == net
    )
    fit = lambda net, f, seed: dataclasses.replace(  # noqa: E731
        first, **net._asdict(), T=int(f * net.ceiling), seed=seed
    )
    right = {(0.8, 0), (0.8, 1), (0.95, 1)}
    cells = [(f, s) for f in (0.8, 0.9, 0.95) for s in range(2)]
    rows = [(fit(net, *cell), met if cell in right else outcome) for cell in cells]
    storage.append([*rows, (fit(other, 0.8, 0), outcome)])
    one, two = depth.reached(experiments.table(depth.NAME, "paper")).itertuples(index=False)
    assert one[6:] == (294, 204, 162, 0.8, 163, 193, 2)
    assert two[6:] == (294, 218, 162, 0.0, 0, 0, 1)
