"""Networks fitted: how far optimizers get, and the derivative where they end."""

import math

import pytest
import torch

from attnmem import deep, random_deep
from attnmem.core import bounds
from attnmem.theory import fitting
from attnmem.theory.tangents import jacobian

N, D, D_H, D_V, T = 3, 5, 2, 4, 11


def problem(heads=(2, 3), examples=T, seed=0, **start):
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


@pytest.mark.parametrize(("optimizer", "part"), [("levenberg_marquardt", 2), ("lbfgs", 8)])
def test_a_part_of_a_networks_ceiling_is_met(optimizer, part):
    ceiling = bounds.deep_ceiling((2, 1), D_H, D_V, D)
    data = problem((2, 1), ceiling // part)
    fit = getattr(fitting, optimizer)(*data, steps=400)
    _, tokens, _, labels = data
    error = (deep(fit.weights, tokens)[:, 0] - labels).abs().max()
    assert fit.stop == "met"
    assert fit.error == pytest.approx(float(error / labels.max()))


def test_limits_of_a_network_are_dense_algebra():
    weights, tokens, _, labels = data = problem(logits=4.0, values=2.0)
    limits = fitting.limits(*data)
    J = jacobian(weights, tokens)
    values = torch.linalg.svdvals(J)
    residual = deep(weights, tokens)[:, 0] - labels
    assert (limits.largest, limits.least) == pytest.approx((float(values[0]), float(values[T - 1])))
    ratio = float((J.T @ residual).norm() / (values[0] * residual.norm()))
    assert limits.gradient == pytest.approx(ratio)
    tops = plain_attention(weights, tokens)
    assert limits.saturated == pytest.approx(sum(top > 0.99 for top in tops) / len(tops))
    assert 0 < limits.saturated < 1
    assert limits.weight == float(flat(weights).abs().max())


def test_networks_that_do_not_fit_are_refused():
    weights, tokens, _, labels = problem()
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
