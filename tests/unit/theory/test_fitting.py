"""Optimizers: against dense algebra, autograd and closed forms; where they stop."""

import math

import pytest
import torch

from attnmem import deep, mha, mha_attention, random_deep
from attnmem.core import bounds
from attnmem.theory import fitting
from attnmem.theory.tangents import ScalarHeads, scalar_outputs, tangents

H, N, D, D_H, T = 2, 3, 5, 4, 11


def examples(shared=False, heads=H, n=N, d=D, d_h=D_H, n_examples=T, scale=0.3):
    options = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    maps = (scale * torch.randn(heads, d, d_h, **options) for _ in range(2))
    start = ScalarHeads(*maps, torch.randn(heads, d, **options))
    sizes = (n, d) if shared else (n_examples, n, d), (n_examples, d), (n_examples,)
    return start, *(torch.rand(*size, **options) for size in sizes)


def network():
    """Layers one after the other, for which there are no queries."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randn(T, N, D, generator=g, dtype=torch.float64)
    return random_deep((2, 3), 2, 4, D, g), tokens, None, examples()[-1]


DATA = {"own": examples(), "shared": examples(shared=True), "layers": network()}


def outputs(weights, contexts, queries):
    return (
        deep(weights, contexts)[:, 0]
        if queries is None
        else scalar_outputs(weights, contexts, queries)
    )


@pytest.mark.parametrize("kind", DATA)
def test_levenberg_marquardt_step_is_dense_algebra(kind):
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
    start, contexts, queries, labels = examples(n=1, n_examples=13)  # linear in mu
    fit = optimizer(start, contexts, queries, labels, steps=400)
    tokens = contexts[:, 0]
    residual = tokens @ torch.linalg.lstsq(tokens, labels[:, None]).solution[:, 0] - labels
    got = scalar_outputs(fit.weights, contexts, queries) - labels
    assert torch.allclose(got, residual, atol=1e-7)
    assert fit.stop != "met"
    assert fit.error == pytest.approx(float(residual.abs().max() / labels.max()), abs=1e-7)
    met = optimizer(*examples(n=1, n_examples=D), steps=400)
    assert (met.stop, met.error <= fitting.MET) == ("met", True)
    assert met.steps < 400


@pytest.mark.parametrize("shared", [False, True])
def test_half_of_the_ceiling_is_met(shared):
    """The error that is told is that of the layer with these weights."""
    ceiling = (
        bounds.shared_context_ceiling(4, 4, 3, 6) if shared else bounds.own_context_ceiling(4, 3, 6)
    )
    data = examples(shared, heads=4, n=4, d=6, d_h=3, n_examples=ceiling // 2)
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


def test_limits_where_labels_contradict():
    """Two equal examples with labels 0 and 1: the best output is 1/2."""
    start, contexts, queries, _ = examples(n_examples=1)
    twice = contexts.repeat(2, 1, 1), queries.repeat(2, 1)
    labels = torch.tensor([0.0, 1.0], dtype=torch.float64)
    fit = fitting.levenberg_marquardt(start, *twice, labels, steps=50)
    assert fit.stop != "met"
    assert torch.allclose(scalar_outputs(fit.weights, *twice), labels.new_full((2,), 0.5))
    measured = fitting.limits(fit.weights, *twice, labels)
    assert measured.gradient < 1e-7
    assert measured.least < 1e-7 * measured.largest
    assert measured.rms == pytest.approx(0.5)


@pytest.mark.parametrize("optimizer", [fitting.levenberg_marquardt, fitting.lbfgs])
def test_stuck_where_no_step_helps(optimizer):
    """Outputs of zero are the best for two equal examples with labels 1 and -1."""
    start, contexts, queries, _ = examples(n_examples=1)
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
    epoch, squared_errors = [], []
    for step in range(8):
        if not epoch:
            epoch = [*torch.randperm(T, generator=g).split(batch)]
        rows = epoch.pop(0)
        optimizer.zero_grad()
        tokens = contexts if kind == "shared" else contexts[rows]
        asking = queries if queries is None else queries[rows]
        (outputs(weights, tokens, asking) - labels[rows]).square().mean().backward()
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        residual = outputs(weights, contexts, queries) - labels
        squared_errors.append(float(residual.detach().square().sum()))
    residual = outputs(fit.weights, contexts, queries) - labels
    best = min(squared_errors[i] for i in (2, 5, 7))
    assert float(residual.square().sum()) == pytest.approx(best, rel=1e-9)
    assert (fit.steps, fit.stop) == (8, "steps")
    if batch >= T:
        full = fitting.adam(*data, steps=8, rate=rate, seed=9)
        assert full.error == pytest.approx(fit.error, rel=1e-9)


def test_adam_stops_where_labels_are_met(monkeypatch):
    monkeypatch.setattr(fitting, "_EVERY", 10)
    fit = fitting.adam(*examples(n_examples=3), steps=5000, rate=lambda _: 0.01)
    assert (fit.stop, fit.steps % 10, fit.steps < 5000) == ("met", 0, True)


def test_lbfgs_stops_where_met_and_at_its_limit():
    data = examples(n_examples=6)
    fit = fitting.lbfgs(*data, steps=2000)
    assert (fit.stop, fit.steps < 2000) == ("met", True)
    short = fitting.lbfgs(*data, steps=7)
    assert (short.steps, short.stop) == (7, "steps")
    assert short.error < fitting.lbfgs(*data, steps=1).error


@pytest.mark.parametrize("shared", [False, True])
def test_limits_against_the_dense_jacobian(shared):
    heads, contexts, queries, labels = examples(shared, scale=3)
    measured = fitting.limits(heads, contexts, queries, labels)
    J = torch.cat(tangents(heads, contexts, queries).parts(), dim=1)
    values = torch.linalg.svdvals(J)
    residual = scalar_outputs(heads, contexts, queries) - labels
    assert measured.largest == pytest.approx(float(values[0]))
    assert measured.least == pytest.approx(float(values[len(labels) - 1]), rel=1e-4, abs=1e-6)
    ratio = float((J.T @ residual).norm() / (values[0] * residual.norm()))
    assert measured.gradient == pytest.approx(ratio)
    assert measured.rms == pytest.approx(float(residual.norm()) / 11**0.5 / float(labels.max()))
    alpha = mha_attention(heads.layer(), contexts, queries)
    assert measured.saturated == float((alpha.amax(-1) > 0.99).double().mean())
    assert 0 < measured.saturated < 1


@pytest.mark.parametrize("scale", [1e-69, 1e69])
def test_squares_of_accepted_labels_keep_their_digits(scale):
    """At a start of their scale, labels are met by Newton steps as those near one are."""
    start, contexts, queries, labels = examples(n_examples=6)
    start = start._replace(mu=scale * start.mu)
    data = start, contexts, queries, scale * labels
    assert fitting.levenberg_marquardt(*data, steps=400).stop == "met"
    assert math.isfinite(fitting.lbfgs(*data, steps=50).error)
    assert math.isfinite(fitting.adam(*data, steps=50, rate=lambda _: 0.1).error)


# --- signs ----------------------------------------------------------------------------------------


def sign_examples(heads, d, d_h, n_examples):
    start, contexts, queries, labels = examples(
        heads=heads, d=d, d_h=d_h, n_examples=n_examples, scale=0.25
    )
    return start, contexts, queries, torch.where(labels > 0.5, 1.0, -1.0).double()


def test_signs_beyond_the_dimensions_are_met():
    ceiling = bounds.own_context_ceiling(8, 4, 4)
    data = _, contexts, queries, labels = sign_examples(8, 4, 4, 3 * ceiling // 2)
    fit = fitting.signs(*data, steps=300)
    assert (fit.stop, fit.error) == ("met", 0.0)
    assert (scalar_outputs(fit.weights, contexts, queries) * labels > 0).all()


def test_signs_that_are_wrong_are_counted():
    data = _, contexts, queries, labels = sign_examples(1, 3, 1, 40)
    fit = fitting.signs(*data, steps=5)
    wrong = float((scalar_outputs(fit.weights, contexts, queries) * labels <= 0).double().mean())
    assert fit.stop in ("steps", "stuck")
    assert fit.error == wrong > 0


def test_labels_other_than_signs_are_refused():
    start, contexts, queries, labels = sign_examples(1, 3, 1, 4)
    with pytest.raises(ValueError, match=r"^labels: got "):
        fitting.signs(start, contexts, queries, labels / 2, steps=5)
