"""A proof of exact weights claims no more than is true: boxes, distances and errors in closed form.

Layers here have tokens that are mostly zero. Then softmaxes are nearly exponentials, derivatives
grow along all weights alike, and balls lose a few percent only: a box just too small is seen.
"""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from attnmem import MHAWeights, mha_features
from attnmem.theory.certificates import certified_memorization
from attnmem.theory.solutions import certified_solution

import oracles

F64 = {"dtype": torch.float64}
ONE = torch.ones(1, 1, **F64)
ZEROS = 2000


def layer(q, k, mu):
    """One head of width one in dimension one."""
    return MHAWeights(*(torch.full((1, 1, 1), float(x), **F64) for x in (q, k, mu)), ONE, ONE)


def spread(*tokens):
    """A context of these tokens and many zeros."""
    return torch.cat([torch.tensor(tokens, **F64), torch.zeros(ZEROS, len(tokens[0]), **F64)])


def output(q, k, mu):
    """The layer's output on a token 1 among zeros, with the query 1."""
    return mu * math.exp(q * k) / (math.exp(q * k) + ZEROS)


def slopes(q, k, mu):
    z = output(q, k, 1.0)
    return mu * k * z * (1 - z), mu * q * z * (1 - z), z


# --- the box --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0.001, 0.01, 0.1, -0.1, 0.177, 0.1773, 0.3, -0.3, 0.4])
def test_box_of_three_equal_weights(gap):
    """All three grow alike, so no shorter step than the one in closed form meets the label."""
    label = (1 - gap) * output(1, 1, 1)
    labels = torch.tensor([label], **F64)
    proof = certified_solution(layer(1, 1, 1), spread([1.0]), ONE, labels, most_bits=128)
    miss = abs(gap) * output(1, 1, 1)
    assert miss * (1 - 1e-12) < proof.error < miss * (1 + 1e-12)
    J = slopes(1, 1, 1)
    B = [slope / sum(s * s for s in J) for slope in J]
    ends = [[1 + sign * 2 * miss * b for b in B] for sign in (1, -1)]
    worst = max(abs(1 - sum(map(math.prod, zip(B, slopes(*w), strict=True)))) for w in ends)
    assert worst < proof.contraction < 1.01 * worst
    assert proof.proven == (proof.contraction < 0.5) == (-0.2 < gap < 0.1772)
    if proof.proven:
        reach = 2 * miss * max(B)
        assert reach * (1 - 1e-12) < proof.distance < reach * (1 + 1e-6)
        w = [1 - math.copysign(proof.distance, gap)] * 3
        assert (output(*w) - label) * gap < 0  # beyond the label


@pytest.mark.parametrize("gap", [1e-3, 1e-9, 1e-15])
def test_two_labels_of_one_example_are_not_proven(gap):
    """Steps can only meet the mean of both: the rows of ``I - G'`` are 1/2 and -1/2."""
    E, e, y = spread([1.0]), ONE.expand(2, 1), torch.tensor([1, -1.0], **F64)
    proof = certified_solution(layer(1, 1, 1), E, e, output(1, 1, 1) + gap * y, most_bits=128)
    assert (proof.proven, proof.distance) == (False, math.inf)
    assert proof.contraction >= 1


# --- the error ------------------------------------------------------------------------------------


@pytest.mark.parametrize("worst", [0, 1, 2])
@pytest.mark.parametrize("sign", [1, -1])
def test_error_is_that_of_the_worst_example(worst, sign):
    """Rounded up; attention is uniform, and outputs are fractions."""
    g = torch.Generator().manual_seed(worst)
    E, e = torch.randn(3, 3, 2, generator=g, **F64), torch.randn(3, 2, generator=g, **F64)
    K, V = torch.randn(2, 1, 2, 1, generator=g, **F64)
    weights = MHAWeights(0 * K, K, V, ONE / 3, ONE * 7)
    factor = Fraction(1 / 3) * 7
    [value] = oracles.rows_of(V.reshape(1, 2))
    sums = [sum(oracles.dot(token, value) for token in oracles.rows_of(context)) for context in E]
    outputs = [factor * total / 3 for total in sums]
    y = torch.tensor([*map(float, outputs)], **F64)
    y += 1e-3 * torch.rand(3, generator=g, **F64)
    y[worst] = float(outputs[worst]) - sign * 0.01
    exact = max(abs(f - Fraction(label)) for f, label in zip(outputs, y.tolist(), strict=True))
    for proof in (
        certified_solution(weights, E, e, y, most_bits=128),
        certified_memorization(weights, E, e, y[:, None], most_bits=128),
    ):
        assert exact < Fraction(proof.error) < exact * Fraction(1 + 1e-15)


@pytest.mark.parametrize("seed", range(6))
def test_error_counts_what_balls_do_not_know(seed):
    """Two heads of equal attention cancel, but at 128 bits only up to 1e-9: outputs are zero."""
    g = torch.Generator().manual_seed(seed)
    E, e = torch.randn(1, 3, 2, generator=g, **F64), torch.randn(1, 2, generator=g, **F64)
    E[..., 0] = 1  # so that the first row of W_K adds the same to all logits
    Q, K, more = torch.randn(3, 2, 2, generator=g, **F64)
    K, Q = torch.stack([K, torch.stack([more[0], K[1]])]), torch.stack([Q, Q])
    values = torch.tensor([[0, 2.0**100], [0, -(2.0**100)]], **F64)[..., None]
    weights = MHAWeights(Q, K, values, torch.ones(2, 1, **F64), ONE)
    for power, sign in itertools.product(range(20, 32), (1, -1)):
        y = torch.tensor([[sign * 2.0**-power]], **F64)
        proof = certified_memorization(weights, E, e, y, most_bits=128)
        for error in (proof.error, certified_solution(weights, E, e, y, most_bits=128).error):
            assert 2.0**-power < error < 2.0**-power + 1e-6
        pivot = float(mha_features(weights, E, e).abs().max())  # the largest feature makes up for y
        assert 2.0**-power < proof.shift * pivot * (1 + 1e-12) < 2.0**-power + 1e-6


def test_correction_counts_what_balls_do_not_know():
    """Logits ``L`` and ``L + u``: 128 bits hold their difference with an error of up to 2^-67.

    Attention is ``1/2, 1/2`` for one query and ``s(-u), s(u)`` for the other. Labels 0 and 1 take a
    read-out of ``2 / tanh(u / 2)``, which is larger than ``4 / u``.
    """
    one = torch.eye(3, **F64)
    layer = MHAWeights(one[None], one[None], 0 * one[None], one, one[:, :1])
    E, y = torch.tensor([[1, 0, 1], [0, 1, 1]], **F64), torch.tensor([[0], [1]], **F64)
    for k, sign in itertools.product(range(100, 140), (1, -1)):
        e = torch.tensor([[0, 0, 0], [0, sign * k * 2.0**-70, 2.0**60]], **F64)
        proof = certified_memorization(layer, E, e, y, most_bits=128)
        assert 2.0**72 / k < proof.shift < 2.0**72 / (k - 64)


# --- every scale ----------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [-1000, -660, -500, 500, 660, 1000])
@pytest.mark.parametrize(
    "powers",  # of W_Q, W_K, W_V, W_O, W_D, the query and the label
    [
        (0, 0, -1, 1, 0, 0, 0),
        (0, 0, -1, 0, 1, 0, 0),
        (0, 0, 0, -1, 1, 0, 0),
        (1, -1, 0, 0, 0, 0, 0),
        (-1, 0, 0, 0, 0, 1, 0),
        (0, 0, 1, 0, 0, 0, 1),
        (0, 0, 0, 1, 0, 0, 1),
    ],
)
def test_every_scale_is_proven_alike(power, powers):
    """Powers of two that cancel change neither the outputs nor the proof."""
    scales = [2.0 ** (power * exponent) for exponent in powers]
    weights = layer(1, 1, 1)
    y = torch.tensor([0.99 * output(1, 1, 1)], **F64)
    plain = certified_solution(weights, spread([1.0]), ONE, y)
    weights = MHAWeights(*(W * s for W, s in zip(weights, scales[:5], strict=True)))
    proof = certified_solution(weights, spread([1.0]), ONE * scales[5], y * scales[6])
    assert proof.proven
    assert proof.contraction == pytest.approx(plain.contraction, rel=1e-6)
    assert proof.error / plain.error == pytest.approx(scales[6], rel=1e-6, abs=0)


def test_products_that_no_float_holds_are_enclosed():
    tiny = MHAWeights(*layer(1, 1, 1)[:3], ONE * 1e-200, ONE * 1e-200)
    proof = certified_solution(tiny, spread([1.0]), ONE, ONE * 0)
    assert (proof.error, proof.distance) == (5e-324, math.inf)  # no float is as small as the output
    huge = MHAWeights(*layer(1, 1, 1)[:3], ONE * 1e200, ONE * 1e200)
    assert certified_solution(huge, spread([1.0]), ONE, ONE * 0).error == math.inf


@pytest.mark.parametrize("zero", ["W_V", "W_O", "W_D"])
def test_zeros_are_proven_where_values_matter(zero):
    weights = layer(1, 1, 1)
    weights = weights._replace(**{zero: 0 * getattr(weights, zero)})
    for label in (0.0, 1.0):
        proof = certified_solution(weights, spread([1.0]), ONE, ONE * label)
        assert proof.error == math.nextafter(label, 2)
        assert proof.proven == (zero == "W_V")
