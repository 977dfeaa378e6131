"""Optimizers: against dense algebra, autograd and closed forms; where they stop."""

import math

import pytest
import torch

from attnmem import deep, mha, mha_attention, random_deep
from attnmem.core import bounds
from attnmem.theory import fitting
from attnmem.theory.tangents import (
    Coordinates,
    ScalarHeads,
    balancing_map,
    scalar_outputs,
    tangents,
)

H, N, D, D_H, T = 2, 3, 5, 4, 11


def given(shared=False, heads=H, n=N, d=D, d_h=D_H, examples=T, scale=0.3):
    options = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    maps = (scale * torch.randn(heads, d, d_h, **options) for _ in range(2))
    start = ScalarHeads(*maps, torch.randn(heads, d, **options))
    sizes = (n, d) if shared else (examples, n, d), (examples, d), (examples,)
    return start, *(torch.rand(*size, **options) for size in sizes)


def network():
    """Layers one after the other, for which there are no queries."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randn(T, N, D, generator=g, dtype=torch.float64)
    return random_deep((2, 3), 2, 4, D, g), tokens, None, given()[-1]


DATA = {"own": given(), "shared": given(shared=True), "layers": network()}


def outputs(weights, contexts, queries):
    return (
        deep(weights, contexts)[:, 0]
        if queries is None
        else scalar_outputs(weights, contexts, queries)
    )


@pytest.mark.parametrize("kind", DATA)
def test_a_step_of_levenberg_marquardt_is_that_of_dense_algebra(kind):
    """By autograd's Jacobian and the normal equations of the other side."""
    start, contexts, queries, labels = DATA[kind]
    fit = fitting.levenberg_marquardt(*DATA[kind], steps=1)
    tried = fitting.DAMPING * fitting.RISE ** round(
        math.log(fit.damping * fitting.FALL / fitting.DAMPING, fitting.RISE)
    )
    of = lambda *tensors: outputs(start.like(tensors), contexts, queries)  # noqa: E731
    parts = torch.autograd.functional.jacobian(of, start.tensors)
    J = torch.cat([part.flatten(1) for part in parts], dim=1)
    unit = float(J.square().sum(1).mean())
    normal = J.T @ J + tried * unit * torch.eye(J.shape[1], dtype=J.dtype)
    step = torch.linalg.solve(normal, J.T @ (of(*start.tensors) - labels))
    got, was = (torch.cat([w.flatten() for w in at.tensors]) for at in (fit.weights, start))
    assert torch.allclose(got, was - step, atol=1e-10)
    assert (fit.steps, fit.stop) == (1, "steps")


@pytest.mark.parametrize("optimizer", [fitting.levenberg_marquardt, fitting.lbfgs])
def test_linear_least_squares_is_solved_exactly(optimizer):
    """With more examples than dimensions, and to a zero residual with fewer."""
    start, contexts, queries, labels = given(n=1, examples=13)  # linear in mu
    fit = optimizer(start, contexts, queries, labels, steps=400)
    tokens = contexts[:, 0]
    residual = tokens @ torch.linalg.lstsq(tokens, labels[:, None]).solution[:, 0] - labels
    got = scalar_outputs(fit.weights, contexts, queries) - labels
    assert torch.allclose(got, residual, atol=1e-7)
    assert fit.stop != "met"
    assert fit.error == pytest.approx(float(residual.abs().max() / labels.max()), abs=1e-7)
    met = optimizer(*given(n=1, examples=D), steps=400)
    assert (met.stop, met.error <= fitting.MET) == ("met", True)
    assert met.steps < 400


@pytest.mark.parametrize("shared", [False, True])
def test_half_of_the_ceiling_is_met(shared):
    """The error that is told is that of the layer with these weights."""
    ceiling = (
        bounds.shared_context_ceiling(4, 4, 3, 6) if shared else bounds.own_context_ceiling(4, 3, 6)
    )
    data = given(shared, heads=4, n=4, d=6, d_h=3, examples=ceiling // 2)
    fit = fitting.levenberg_marquardt(*data, steps=100)
    _, contexts, queries, labels = data
    error = (mha(fit.weights.layer(), contexts, queries)[:, 0] - labels).abs().max()
    assert fit.stop == "met"
    assert fit.error == pytest.approx(float(error / labels.max()), rel=1e-6)
    assert fit.error <= fitting.MET
    met = fit.weights, contexts, queries, scalar_outputs(fit.weights, contexts, queries)
    none = fitting.levenberg_marquardt(*met, steps=5)
    assert (none.steps, none.stop, none.error) == (0, "met", 0.0)
    again = fitting.levenberg_marquardt(*data, steps=100)
    assert all(torch.equal(a, b) for a, b in zip(fit.weights, again.weights, strict=True))


def test_contradicting_labels_leave_it_at_a_stationary_point():
    """Two equal examples with labels 0 and 1: the best output is 1/2."""
    start, contexts, queries, _ = given(examples=1)
    twice = contexts.repeat(2, 1, 1), queries.repeat(2, 1)
    labels = torch.tensor([0.0, 1.0], dtype=torch.float64)
    fit = fitting.levenberg_marquardt(start, *twice, labels, steps=50)
    assert fit.stop != "met"
    assert torch.allclose(scalar_outputs(fit.weights, *twice), labels.new_full((2,), 0.5))
    found = fitting.limits(fit.weights, *twice, labels)
    assert found.gradient < 1e-7
    assert found.least < 1e-7 * found.largest
    assert found.rms == pytest.approx(0.5)


@pytest.mark.parametrize("optimizer", [fitting.levenberg_marquardt, fitting.lbfgs])
def test_where_no_step_helps_it_is_stuck(optimizer):
    """Outputs of zero are the best for two equal examples with labels 1 and -1."""
    start, contexts, queries, _ = given(examples=1)
    zero = start._replace(mu=torch.zeros_like(start.mu))
    labels = torch.tensor([1.0, -1.0], dtype=torch.float64)
    fit = optimizer(zero, contexts.repeat(2, 1, 1), queries.repeat(2, 1), labels, steps=50)
    assert fit.stop == "stuck"
    assert fit.error == pytest.approx(1.0)
    assert fit.steps <= 1
    assert fit.damping is None or fit.damping > fitting.HIGHEST


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("batch", [4, 5, T, 100])
def test_adam_against_autograd(monkeypatch, kind, batch):
    """Epochs of 3, 3 and 1 batches; the last look is at the last step."""
    start, contexts, queries, labels = data = DATA[kind]
    rate = lambda step: 0.1 / (step + 1)  # noqa: E731
    monkeypatch.setattr(fitting, "_EVERY", 3)
    fit = fitting.adam(*data, steps=8, rate=rate, batch=batch, seed=3)
    weights = start.like(tuple(w.clone().requires_grad_() for w in start.tensors))
    optimizer, g = torch.optim.Adam(weights.tensors), torch.Generator().manual_seed(3)
    order, seen = [], []
    for step in range(8):
        order = order or [*torch.randperm(T, generator=g).split(batch)]
        at = order.pop(0)
        optimizer.zero_grad()
        tokens = contexts if kind == "shared" else contexts[at]
        asking = queries if queries is None else queries[at]
        (outputs(weights, tokens, asking) - labels[at]).square().mean().backward()
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        residual = outputs(weights, contexts, queries) - labels
        seen.append(float(residual.detach().square().sum()))
    residual = outputs(fit.weights, contexts, queries) - labels
    looks = [seen[2], seen[5], seen[7]]
    assert float(residual.square().sum()) == pytest.approx(min(looks), rel=1e-9)
    assert (fit.steps, fit.stop) == (8, "steps")
    if batch >= T:
        whole = fitting.adam(*data, steps=8, rate=rate, seed=9)
        assert whole.error == pytest.approx(fit.error, rel=1e-9)


def test_adam_and_lbfgs_stop_where_labels_are_met_and_at_their_limit(monkeypatch):
    monkeypatch.setattr(fitting, "_EVERY", 10)
    fit = fitting.adam(*given(examples=3), steps=5000, rate=lambda _: 0.01)
    assert (fit.stop, fit.steps % 10, fit.steps < 5000) == ("met", 0, True)
    data = given(examples=6)
    fit = fitting.lbfgs(*data, steps=2000)
    assert (fit.stop, fit.steps < 2000) == ("met", True)
    short = fitting.lbfgs(*data, steps=7)
    assert (short.steps, short.stop) == (7, "steps")
    assert short.error < fitting.lbfgs(*data, steps=1).error


@pytest.mark.parametrize("shared", [False, True])
def test_limits_against_the_dense_jacobian(shared):
    heads, contexts, queries, labels = given(shared, scale=3)
    found = fitting.limits(heads, contexts, queries, labels)
    J = torch.cat(tangents(heads, contexts, queries).parts(), dim=1)
    values = torch.linalg.svdvals(J)
    residual = scalar_outputs(heads, contexts, queries) - labels
    assert found.largest == pytest.approx(float(values[0]))
    assert found.least == pytest.approx(float(values[len(labels) - 1]), rel=1e-4, abs=1e-6)
    ratio = float((J.T @ residual).norm() / (values[0] * residual.norm()))
    assert found.gradient == pytest.approx(ratio)
    assert found.rms == pytest.approx(float(residual.norm()) / 11**0.5 / float(labels.max()))
    alpha = mha_attention(heads.layer(), contexts, queries)
    assert found.saturated == float((alpha.amax(-1) > 0.99).double().mean())
    assert 0 < found.saturated < 1


@pytest.mark.parametrize("shared", [False, True])
def test_balanced_coordinates_change_no_output(shared):
    heads, contexts, queries, _ = given(shared, n=7)
    change = Coordinates.balancing(contexts, queries)
    there = scalar_outputs(heads, contexts @ change.tokens, queries @ change.queries)
    assert torch.allclose(scalar_outputs(change.outward(heads), contexts, queries), there)
    moved = queries @ change.queries
    assert torch.allclose(moved.T @ moved / len(moved), torch.eye(D, dtype=torch.float64))
    tokens = (contexts @ change.tokens).flatten(0, -2)
    tokens = tokens if shared else tokens - tokens.mean(0)
    assert torch.allclose(tokens.T @ tokens / len(tokens), torch.eye(D, dtype=torch.float64))


def test_directions_that_no_row_has_are_stretched_by_a_thousand_only():
    rows = torch.zeros(4, 3, dtype=torch.float64)
    rows[:, 0], rows[:, 1] = 2.0, torch.tensor([1.0, -1.0, 1.0, -1.0])
    expected = torch.tensor([0.5, 1.0, 500.0], dtype=torch.float64)
    assert torch.allclose(balancing_map(rows), expected.diag())


@pytest.mark.parametrize("scale", [1e-69, 1e69])
def test_squares_of_accepted_labels_keep_their_digits(scale):
    """At a start of their scale, labels are met by Newton steps as those near one are."""
    start, contexts, queries, labels = given(examples=6)
    start = start._replace(mu=scale * start.mu)
    data = start, contexts, queries, scale * labels
    assert fitting.levenberg_marquardt(*data, steps=400).stop == "met"
    assert math.isfinite(fitting.lbfgs(*data, steps=50).error)
    assert math.isfinite(fitting.adam(*data, steps=50, rate=lambda _: 0.1).error)
