"""Proofs about several layers and several examples claim no more than is true.

On one token attention is one, and the outputs of layers are polynomials in their weights. If these
are all positive, so is every coefficient, and the largest derivative in a box stands at its upper
corner: contractions and distances are known in closed form.
"""

import itertools
from fractions import Fraction

import pytest
import scipy
import torch

from attnmem import DeepWeights, Layer, MHAWeights, deep, random_deep
from attnmem.theory import balls, certificates
from attnmem.theory.certificates import (
    certified_deep_solution,
    certified_solution,
    enclosed_jacobian,
)
from attnmem.theory.tangents import jacobian

import oracles

F64 = {"dtype": torch.float64}
INTEGERS = [  # the inverse has entries of both signs, and rows of different sums
    *([2, 1, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0], [1, 0, 3, 1, 0, 0]),
    *([0, 1, 0, 2, 1, 0], [0, 0, 1, 0, 1, 1], [1, 0, 0, 1, 0, 2]),
]


def draw(seed, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), **F64)


def positive(heads, d_h, d_v, d, seed=0):
    """A network whose weights are all positive, each kind of a size of its own."""
    sizes = itertools.cycle((0.7, 0.2, 0.5, 0.3))
    layers, kinds = [], ((d, d_h), (d, d_h), (d, d_v), (d_v, d))
    for layer, H in enumerate(heads):
        tensors = [
            size * (0.1 + draw(seed + 10 * layer + i, H, *shape))
            for i, (size, shape) in enumerate(zip(sizes, kinds, strict=False))
        ]
        layers.append(Layer(*tensors))
    return DeepWeights(tuple(layers), 0.1 + draw(seed + 99, d, 1))


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
def test_contraction_and_distance_of_layers_on_one_token(heads, d, T, wanted, skip):
    """In the box every weight moves, the read-out too; of several examples rows are summed."""
    weights = positive(heads, 2, 2, d)
    no_logits = [W._replace(W_Q=0 * W.W_Q, W_K=0 * W.W_K) for W in weights.layers]
    weights = weights._replace(layers=tuple(no_logits))
    X = 0.3 * draw(5, T, d) + torch.eye(d, **F64)[:T]

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


# --- masked attention to zeros --------------------------------------------------------------------

ZEROS = 150


def after_zeros(weights, skip):
    """What layers do, masked, to a token 1 behind zeros, which stay zero."""
    x = torch.ones((), **F64)
    for layer in weights.layers:
        new = x if skip else 0 * x
        for Q, K, V, O in zip(*(W[:, 0, 0] for W in layer), strict=True):
            power = torch.exp(x * Q * x * K)
            new = new + power / (power + ZEROS) * x * V * O
        x = new
    return x * weights.W_D[0]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("wanted", [0.1, 0.4])
@pytest.mark.parametrize("heads", [(1,), (2, 1), (1, 1, 1)])
def test_contraction_and_distance_of_masked_attention(heads, wanted, skip):
    """Softmaxes are nearly exponentials, so all slopes grow along all weights."""
    v, o = (2, 3) if skip else (8, 5)
    layers = [
        Layer(0.5 + W.W_Q, 0.7 + W.W_K, v + W.W_V, o + W.W_O)
        for W in positive(heads, 1, 1, 1).layers
    ]
    weights = DeepWeights(tuple(layers), torch.full((1, 1), 2.0, **F64))
    X = torch.zeros(1, ZEROS + 1, 1, **F64)
    X[0, -1] = 1

    def output(at):
        return after_zeros(at, skip)

    J = derivative(output, weights)
    B = least_steps(J, weights)

    def contraction(miss):
        return float(derivative(output, moved(weights, 2 * miss * B[:, 0])) @ B - 1)

    miss = reaching(contraction, wanted)
    options = {"skip": skip, "causal": True, "most_bits": 128}
    proof = certified_deep_solution(weights, X, output(weights) + miss, **options)
    assert proof.proven
    assert proof.error == pytest.approx(miss, rel=1e-9)
    assert proof.distance == pytest.approx(2 * miss * float(B.max()), rel=1e-6)
    assert wanted < proof.contraction < 1.08 * wanted


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_a_box_of_weights_has_the_derivatives_of_its_points(skip, causal):
    """Also where a derivative vanishes at the middle: values 1, 0, -1, seen alike by the last."""
    weights = random_deep((2, 1), 2, 2, 3, torch.Generator().manual_seed(0), logits=2.0)
    zero = torch.zeros(1, 3, 1, **F64)
    flat = Layer(1 + zero, zero, torch.tensor([[[1.0], [0], [-1]]], **F64), 1 + zero.mT)
    flat = DeepWeights((flat,), torch.ones(3, 1, **F64))
    g = torch.Generator().manual_seed(1)
    for network, X in ((weights, draw(2, 2, 3, 3)), (flat, torch.eye(3, **F64)[None])):
        sizes = [1e-3] * sum(W.numel() for W in network.tensors)
        steps = [balls.flint().arb(0, size) for size in sizes]
        with balls.precision(128):
            step, (stored, derivative) = (
                iter(steps),
                certificates._of_network(network, X, skip, causal),
            )
            moved_maps = [certificates._moved(balls.exact(W), step) for W, _ in stored]
            outputs, near = derivative(moved_maps)
        for _ in range(8):
            corner = 2.0 * torch.randint(2, (len(sizes),), generator=g) - 1
            at = moved(network, torch.tensor(sizes, **F64) * corner)
            J = jacobian(at, X, skip=skip, causal=causal)
            for ball, value in zip(near.entries(), J.flatten().tolist(), strict=True):
                assert balls.below(ball) - 1e-12 < value < balls.above(ball) + 1e-12
            values = deep(at, X, skip=skip, causal=causal).flatten().tolist()
            for ball, value in zip(outputs, values, strict=True):
                assert balls.below(ball) - 1e-12 < value < balls.above(ball) + 1e-12


# --- several examples -----------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [range(6), [3, 1, 5, 0, 4, 2]])
def test_a_distance_is_a_largest_row_sum(columns):
    """One head without logits on tokens of one each: outputs are ``a x mu``, so ``B`` is known."""
    X, a = torch.tensor(INTEGERS, **F64)[:, [*columns]], 0.5
    labels = torch.tensor([3, -1, 4, 1, -5, 9], **F64) / 64
    inverse = oracles.fractions(oracles.rational(X).inv())
    most = max(sum(map(abs, row)) for row in inverse) / Fraction(a)
    assert most > 2 * max(map(abs, itertools.chain(*inverse))) / Fraction(a)
    zero, one = torch.zeros(1, 6, 1, **F64), torch.ones(1, 1, **F64)
    one_layer = MHAWeights(zero, zero, zero, a * one, one)
    proof = certified_solution(one_layer, X[:, None], X, labels)
    assert proof.contraction < 1e-12  # the outputs are linear in the values
    assert proof.distance == pytest.approx(float(2 * Fraction(9, 64) * most), rel=1e-7)


@pytest.mark.parametrize("labels", [[0.5, float("nan")], [0.5, float("inf")], [0.5]])
def test_labels_that_no_network_can_meet_are_refused(labels):
    weights, X = positive((1, 1), 1, 1, 2), draw(3, 2, 2, 2)
    with pytest.raises(ValueError, match=r"^labels: got"):
        certified_deep_solution(weights, X, torch.tensor(labels, **F64))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_derivatives_of_layers_are_enclosed_at_few_bits(skip, causal):
    weights = random_deep((2, 1), 2, 2, 3, torch.Generator().manual_seed(0), outputs=2)
    enclosed = enclosed_jacobian(weights, draw(1, 2, 3, 3), skip=skip, causal=causal)
    exact = enclosed(1024)
    assert all(enclosed(bits).contains(exact) for bits in (2, 5, 10, 20, 53, 128))
