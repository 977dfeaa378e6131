"""The loss of heads on embedded data, with the gradient written out, against sums head by head."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from attnmem.lab import data, experiments, models
from attnmem.lab.embedded import EmbeddedWeights, embedded_losses
from attnmem.lab.models import mha_losses

from plain import mha_outputs

SIZES = [  # R, H, c, d, d_h, d_o, d_out, n, B
    (1, 1, 1, 1, 1, 1, 1, 1, 1),
    (1, 2, 3, 5, 2, 4, 3, 1, 7),
    (2, 3, 5, 4, 7, 2, 6, 2, 1),
    (3, 5, 2, 7, 3, 11, 4, 6, 13),
    (2, 1, 7, 3, 4, 5, 1, 11, 2),
]


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def drawn(sizes, shared):
    """Weights that want gradients, positions, contexts and queries."""
    R, H, c, d, d_h, d_o, d_out, n, B = sizes
    shapes = [(d, c), (d,), (H, d, d_h), (H, d, d_h), (H, d, 1), (H, d_o), (d_out, d_o), (d_out,)]
    P = EmbeddedWeights(*(numbers(R, *shape) for shape in shapes))
    contexts = numbers(R, *(() if shared else (B,)), n, c)
    return [W.requires_grad_() for W in P], numbers(n + 1, d), contexts, numbers(R, B, c)


def head_by_head(P, positions, scale, contexts, queries):
    """The outputs ``(R, d_out, B)``: one run, example and head at a time."""
    runs = []
    for r, asked in enumerate(queries):
        W_E, b_E, W_Q, W_K, W_V, W_O, W_D, b_D = (W[r] for W in P)
        columns = []
        for i, q in enumerate(asked):
            context = contexts[r] if contexts.ndim == 3 else contexts[r, i]
            E = context @ W_E.T + b_E + positions[1:]
            e = W_E @ q + b_E + positions[0]
            out = b_D
            for h in range(len(W_Q)):
                alpha = (scale * E @ W_K[h] @ W_Q[h].T @ e).softmax(dim=0)
                out = out + W_D @ W_O[h] * (alpha @ E @ W_V[h, :, 0])
            columns.append(out)
        runs.append(torch.stack(columns, dim=-1))
    return torch.stack(runs)


def loss_of(outputs, labels):
    if labels.is_floating_point():
        return (outputs[:, 0] - labels) ** 2
    return F.cross_entropy(outputs, labels, reduction="none")


@pytest.mark.parametrize("classes", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_losses_and_gradients_are_those_of_a_sum_over_heads(sizes, shared, classes):
    R, d_out, B = sizes[0], sizes[6] if classes else 1, sizes[-1]
    weights, *data = drawn((*sizes[:6], d_out, *sizes[7:]), shared)
    labels = torch.randint(d_out, (R, B)) if classes else numbers(R, B)
    positions, contexts, queries = data
    plain = head_by_head(weights, positions, 0.3, contexts, queries)
    with torch.no_grad():
        P = EmbeddedWeights(*weights)
        losses, outputs, gradient = embedded_losses(P, positions, 0.3, contexts, queries, labels)
    torch.testing.assert_close(outputs, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(losses, loss_of(plain, labels), rtol=1e-11, atol=1e-11)
    part = numbers(R, B)
    part[:, -1] = 0  # an example that does not count
    expected = torch.autograd.grad(loss_of(plain, labels), weights, part, allow_unused=True)
    with torch.no_grad():
        found = gradient(part)
    for name, ours, theirs in zip(found._fields, found, expected, strict=True):
        assert ours.shape == theirs.shape, name
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("shared", [True, False])
def test_logits_and_outputs_of_any_size_have_finite_losses_and_gradients(shared):
    """Heads look at one token only, and one class has all the probability."""
    weights, positions, contexts, queries = drawn((2, 3, 5, 4, 7, 2, 6, 8, 9), shared)
    P = EmbeddedWeights(*(300 * W.detach() for W in weights))
    labels = torch.randint(6, (2, 9))
    losses, outputs, gradient = embedded_losses(P, positions, 1.0, contexts, queries, labels)
    torch.testing.assert_close(losses, F.cross_entropy(outputs, labels, reduction="none"))
    assert all(g.isfinite().all() for g in gradient(torch.ones(2, 9).double()))


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_that_is_not_finite_leaves_the_others_alone(shared):
    weights, *data = drawn((2, 3, 5, 4, 7, 2, 6, 8, 9), shared)
    labels = torch.randint(6, (2, 9))
    with torch.no_grad():
        whole = embedded_losses(EmbeddedWeights(*weights), data[0], 1.0, *data[1:], labels)
        weights[2][0, 0, 0, 0] = torch.nan
        broken = embedded_losses(EmbeddedWeights(*weights), data[0], 1.0, *data[1:], labels)
    assert broken[0][0].isnan().all()
    assert torch.equal(broken[0][1], whole[0][1])
    for ours, theirs in zip(
        broken[2](torch.ones(2, 9).double()), whole[2](torch.ones(2, 9).double()), strict=True
    ):
        assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("context", ["shared", "random"])
@pytest.mark.parametrize("N", [None, 7])
def test_it_is_what_the_trained_model_loses(context, N):
    """The layer in the orders of :mod:`attnmem.core.layers`, and autograd."""
    [run, *_] = experiments.runs("mahdavi-fig2a", "paper", 1)
    run = dataclasses.replace(run, context=context, N=N, H=3, n=4, d=5, d_h=3)
    P = {
        name: torch.stack([W, 3 * W]).double().requires_grad_()
        for name, W in models.mha_parameters(run, data.generator(run, "weights")).items()
    }
    B = 23
    contexts = numbers(2, *(() if context == "shared" else (B,)), run.n, run.d)
    queries = numbers(2, B, run.d)
    labels = torch.randint(N, (2, B)) if N else numbers(2, B)
    outputs = mha_outputs(P, run, contexts, queries).mT
    plain = loss_of(outputs, labels)
    with torch.no_grad():
        losses, ours, gradient = mha_losses(P, run, contexts, queries, labels)
        found = gradient(torch.ones(2, B).double())
    torch.testing.assert_close(ours, outputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(losses, plain, rtol=1e-11, atol=1e-11)
    expected = torch.autograd.grad(plain.sum(), [*P.values()])
    assert [*P] == [*found._fields], "gradients come in the order of the weights"
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
