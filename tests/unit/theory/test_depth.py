"""Several layers meet what the floor promises, as a plain forward pass sees them."""

import math

import pytest
import torch

from attnmem import random_deep
from attnmem.theory import deep_bounds
from attnmem.theory.depth import memorize_by_depth
from attnmem.theory.solutions import certified_deep_solution

from oracles import F64, deep_output, gaussian


def errors(weights, X, y):
    outputs = [deep_output(weights.layers, x) @ weights.W_D[:, 0] for x in X]
    return [abs(float(output - label)) for output, label in zip(outputs, y, strict=True)]


@pytest.mark.parametrize(
    ("heads", "d_h", "d_v", "d", "n"),
    [
        ((1, 1), 1, 1, 2, 2),
        ((2, 1), 5, 9, 3, 3),  # maps and values wider than the tokens
        ((3, 3), 2, 2, 3, 2),
        ((6, 3), 1, 3, 6, 2),
        ((5, 2), 6, 3, 6, 3),  # groups of four and three
        ((1, 7), 2, 2, 4, 5),  # the second layer alone
        ((7, 1), 2, 2, 4, 2),  # the first
        ((1, 1), 5, 5, 5, 3),
        ((3, 3), 1, 5, 6, 4),  # groups of both layers, beyond one layer
        ((1, 1), 5, 5, 5, 2),
        ((2, 1, 2), 2, 3, 5, 3),
        ((1, 2, 1, 1, 1), 1, 2, 4, 3),  # of five layers
        ((3,), 2, 2, 4, 3),  # of one
        ((6, 1, 3), 5, 4, 4, 3),  # groups without heads in some layers
    ],
)
def test_every_label_at_the_floor(heads, d_h, d_v, d, n):
    T = deep_bounds.deep_floor(heads, d_h, d_v, d, context=n)
    X, y = gaussian(0, T, n, d), gaussian(1, T)
    weights = memorize_by_depth(X, y, heads=heads, head_dim=d_h, value_dim=d_v, seed=2)
    for H, layer in zip(heads, weights.layers, strict=True):
        shapes = [tuple(W.shape) for W in layer]
        assert shapes == [(H, d, d_h), (H, d, d_h), (H, d, d_v), (H, d_v, d)]
    assert max(errors(weights, X, y)) < 1e-8 * (y.max() - y.min()) / 2
    X, y = gaussian(0, T + 1, n, d), gaussian(1, T + 1)
    with pytest.raises(ValueError, match=rf"labels: got T = {T + 1} .* at most {T}, the floor"):
        memorize_by_depth(X, y, heads=heads, head_dim=d_h, value_dim=d_v)


SMALL = {"heads": (3, 2), "head_dim": 2, "value_dim": 2}


@pytest.mark.parametrize("tokens", [1e-150, 1.0, 1e150])
@pytest.mark.parametrize("labels", [1e-100, 1.0, 1e100])
def test_scales(tokens, labels):
    X, y = tokens * gaussian(0, 31, 3, 4), labels * gaussian(1, 31)
    assert max(errors(memorize_by_depth(X, y, **SMALL), X, y)) < 1e-8 * y.abs().max()


@pytest.mark.hostile("mahdavi-finding-two-layers")
@pytest.mark.parametrize(
    "X",
    [
        gaussian(0, 31, 1, 4) + 0.1 * gaussian(1, 31, 3, 4),  # tokens of an example nearly equal
        gaussian(0, 1, 3, 4) + 0.01 * gaussian(1, 31, 3, 4),  # examples nearly equal
        10 + gaussian(0, 31, 3, 4),
        gaussian(0, 31, 3, 4) * torch.logspace(0, -6, 4, **F64),
        gaussian(0, 31, 3, 4).round(),
        torch.cat([gaussian(0, 1, 1, 4).expand(31, 1, 4), gaussian(1, 31, 2, 4)], 1),
    ],
)
def test_hostile_tokens(X):
    y = gaussian(2, 31).sign()
    assert max(errors(memorize_by_depth(X, y, **SMALL), X, y)) < 1e-8


@pytest.mark.parametrize("offset", [1e3, 1e9])
def test_labels_are_met_within_their_spread(offset):
    """Far from zero a label is a small part of itself off, and that may be all that it tells."""
    X, y = gaussian(0, 31, 3, 4), gaussian(1, 31)
    spread = (y.max() - y.min()) / 2
    if offset == 1e9:
        with pytest.raises(ValueError, match=r"errs by .* times what is allowed"):
            memorize_by_depth(X, y + offset, **SMALL)
    else:
        weights = memorize_by_depth(X, y + offset, **SMALL)
        assert max(errors(weights, X, y + offset)) < 1e-8 * spread


def test_few_and_equal_labels():
    X = gaussian(0, 31, 3, 4)
    zeros = memorize_by_depth(X, torch.zeros(31, **F64), **SMALL)
    assert max(errors(zeros, X, torch.zeros(31))) == 0
    one = memorize_by_depth(X[:1].float(), torch.ones(1), **SMALL)  # in float32
    assert errors(one, X[:1].float().double(), torch.ones(1))[0] < 1e-8
    again = memorize_by_depth(X, torch.ones(31), seed=1, **SMALL)
    assert not torch.equal(again.layers[0].W_Q, zeros.layers[0].W_Q)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens": gaussian(0, 5, 1, 4)},
            r"tokens: got shape \(5, 1, 4\); .* 2 tokens",
        ),
        ({"tokens": gaussian(0, 5, 3, 1)}, r"tokens: got shape \(5, 3, 1\); .* d >= 2"),
        ({"tokens": torch.full((5, 3, 4), math.nan)}, "tokens: got 60 entries that are NaN"),
        ({"tokens": torch.ones(5, 3, 4)}, "examples: got 0 and 1 equal, with different labels"),
        ({"heads": ()}, r"heads: got \(\); expected a sequence of integers, one or more"),
        # Both tokens are one: all attention is alike, and outputs are linear in it.
        ({"tokens": gaussian(0, 5, 1, 3).expand(5, 2, 3)}, "repeated token have rank 3 .* rank 5,"),
        (
            {"tokens": gaussian(0, 5, 3, 4) * (torch.arange(5.0) > 0)[:, None, None]},
            "outputs are odd",
        ),
        ({"tokens": torch.zeros(1, 3, 4), "labels": torch.ones(1)}, "tokens: got zeros only"),
        # Without biases outputs are odd.
        ({"tokens": torch.stack([X_1 := gaussian(0, 3, 4), -X_1]), "labels": torch.ones(2)}, "odd"),
        ({"tokens": gaussian(0, 5, 3, 4), "labels": 1e9 + gaussian(1, 5)}, "labels: got data on"),
        ({"tokens": gaussian(0, 5, 3, 4), "labels": gaussian(1, 5) - 1e9}, "labels: got data on"),
        (
            {"tokens": gaussian(0, 31, 3, 1) * gaussian(2, 4), "labels": gaussian(1, 31)},
            "all tokens have rank 1",
        ),
        (
            {
                "tokens": torch.cat([gaussian(0, 88, 2, 5), torch.ones(88, 1, 5, **F64)], 1),
                "labels": gaussian(1, 88),
                "heads": (2, 2, 2),
            },
            "the last tokens have rank 1",
        ),
        ({"tokens": 1e-150 * gaussian(0, 5, 3, 4), "labels": 1e200 * gaussian(1, 5)}, "by inf"),
    ],
)
def test_refusals(changes, message):
    arguments = {"tokens": gaussian(0, 5, 3, 4), "labels": gaussian(1, 5), **SMALL}
    with pytest.raises(ValueError, match=message):
        memorize_by_depth(**(arguments | changes))


# --- exact weights nearby -------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(2, 1), (3, 2)])
def test_exact_weights_are_proved_to_be_near(heads):
    size = {"head_dim": 1, "value_dim": 2}
    T = deep_bounds.deep_floor(heads, 1, 2, 3)
    X, y = gaussian(0, T, 3, 3), gaussian(1, T)
    weights = memorize_by_depth(X, y, heads=heads, **size, seed=1)
    proof = certified_deep_solution(weights, X, y)
    assert proof.proven
    assert proof.distance < 1e-9
    assert proof.error == pytest.approx(max(errors(weights, X, y)), abs=1e-13)
    # Labels a little further off are met as well, by weights about as far away.
    near = certified_deep_solution(weights, X, y + 1e-9 * gaussian(2, T))
    assert near.proven
    assert 1e-10 < near.distance < 1e-5
    # No weights give two equal examples different labels.
    X[1] = X[0]
    assert not certified_deep_solution(weights, X, y, most_bits=128).proven


def test_proof_refuses_two_outputs():
    weights = random_deep((1,), 1, 1, 2, torch.Generator().manual_seed(0), outputs=2)
    with pytest.raises(ValueError, match=r"weights.W_D: got shape \(2, 2\); expected one output"):
        certified_deep_solution(weights, gaussian(0, 3, 2, 2), gaussian(1, 3))
