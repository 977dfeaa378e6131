"""Proofs about several layers and several examples claim no more than is true.

On one token attention is one, and the outputs of layers are polynomials in their weights. If these
are all positive, so is every coefficient, and the largest derivative in a box stands at its upper
corner: contractions and distances are known in closed form.
"""

import itertools

import pytest
import scipy
import torch

from attnmem import DeepWeights, Layer, random_deep
from attnmem.theory.solutions import certified_deep_solution, enclosed_jacobian
from attnmem.theory.tangents import jacobian

from oracles import F64, uniform


def positive(heads, d_h, d_v, d, seed=0):
    """A network whose weights are all positive, each kind of a size of its own."""
    sizes = itertools.cycle((0.7, 0.2, 0.5, 0.3))
    layers, shapes = [], ((d, d_h), (d, d_h), (d, d_v), (d_v, d))
    for layer, H in enumerate(heads):
        drawn = [0.1 + uniform(seed + 10 * layer + i, H, *shapes[i]) for i in range(4)]
        layers.append(Layer(*(size * W for size, W in zip(sizes, drawn, strict=False))))
    return DeepWeights(tuple(layers), 0.1 + uniform(seed + 99, d, 1))


def on_one_token(weights, X, skip):
    """The outputs for contexts of one token each, the rows of ``X``."""
    for layer in weights.layers:
        X = (X if skip else 0) + sum(X @ V @ O for V, O in zip(layer.W_V, layer.W_O, strict=True))
    return (X @ weights.W_D)[:, 0]


def derivative(outputs, weights):
    """Rows of the derivative of some outputs in all weights."""
    tensors = [W.detach().requires_grad_() for W in weights.tensors]
    rows = []
    for output in outputs(weights.like(tensors)):
        parts = torch.autograd.grad(output, tensors, retain_graph=True, allow_unused=True)
        parts = [0 * W if part is None else part for part, W in zip(parts, tensors, strict=True)]
        rows.append(torch.cat([part.flatten() for part in parts]).detach())
    return torch.stack(rows)


def moved(weights, step):
    """The weights after a step in all of them."""
    parts = step.split([W.numel() for W in weights.tensors])
    return weights.like(
        [W + part.view_as(W) for W, part in zip(weights.tensors, parts, strict=True)]
    )


def least_steps(J, weights):
    """The steps with the right derivatives, shortest relative to the size of each kind."""
    squares = [W.square().mean().expand(W.numel()) for W in weights.tensors]
    S = torch.cat(squares)
    return S[:, None] * J.T @ torch.linalg.inv((J * S) @ J.T)


def reaching(contraction, wanted):
    """The error of the stored weights at which the contraction is as wanted."""
    most = 1e-3
    while contraction(most) < wanted:
        most *= 2
    return scipy.optimize.brentq(lambda miss: contraction(miss) - wanted, 0, most)


# --- layers on one token --------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("wanted", [0.1, 0.499, 0.501])
@pytest.mark.parametrize(
    ("heads", "d", "T"), [((1,), 1, 1), ((2, 1), 2, 1), ((1, 2), 2, 2), ((1, 1, 1), 3, 3)]
)
def test_box_of_layers_on_one_token(heads, d, T, wanted, skip):
    """In the box every weight moves, the read-out too; of several examples rows are summed."""
    weights = positive(heads, 2, 2, d)
    no_logits = [W._replace(W_Q=0 * W.W_Q, W_K=0 * W.W_K) for W in weights.layers]
    weights = weights._replace(layers=tuple(no_logits))
    X = 0.3 * uniform(5, T, d) + torch.eye(d, **F64)[:T]

    def outputs(at):
        return on_one_token(at, X, skip)

    J = derivative(outputs, weights)
    B = least_steps(J, weights)

    def radii(miss):
        return 2 * miss * B.abs().sum(1)

    def contraction(miss):
        growth = derivative(outputs, moved(weights, radii(miss))) - J
        return float((growth @ B.abs()).sum(1).max())

    miss = reaching(contraction, wanted)
    signs = torch.ones(T, **F64)
    signs[1:] = -0.5
    y = outputs(weights) + miss * signs
    proof = certified_deep_solution(weights, X[:, None], y, skip=skip, most_bits=128)
    assert proof.error == pytest.approx(miss, rel=1e-9)
    assert proof.contraction == pytest.approx(wanted, rel=1e-6)
    assert proof.proven == (wanted < 0.5)
    if proof.proven:
        assert proof.distance == pytest.approx(float(radii(miss).max()), rel=1e-6)
    for corner in itertools.product((1.0, -1.0), repeat=T):  # no point of the box is worse
        u = 2 * miss * torch.tensor(corner, **F64)
        there = torch.eye(T, **F64) - derivative(outputs, moved(weights, B @ u)) @ B
        assert there.abs().sum(1).max() < proof.contraction * (1 + 1e-6)


# --- several examples -----------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [[0.5, float("nan")], [0.5, float("inf")], [0.5]])
def test_impossible_labels_are_refused(labels):
    weights, X = positive((1, 1), 1, 1, 2), uniform(3, 2, 2, 2)
    with pytest.raises(ValueError, match=r"^labels: got"):
        certified_deep_solution(weights, X, torch.tensor(labels, **F64))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_derivatives_are_enclosed_at_few_bits(skip, causal):
    weights = random_deep((2, 1), 2, 2, 3, torch.Generator().manual_seed(0), outputs=2)
    X = uniform(1, 2, 3, 3)
    enclosed = enclosed_jacobian(weights, X, skip=skip, causal=causal)
    exact = enclosed(1024)
    entries = torch.tensor([float(ball.mid()) for ball in exact.entries()], **F64)
    torch.testing.assert_close(entries, jacobian(weights, X, skip=skip, causal=causal).flatten())
    assert all(enclosed(bits).contains(exact) for bits in (2, 5, 10, 20, 53, 128))
