"""Weights in few digits: the proof against every corner of the balls."""

import itertools
import math

import pytest
import torch

from attnmem import MHAWeights, memorize_mha, mha
from attnmem.theory.rounding import certified_digits, certified_rounding


def drawn(shape, own, spread, seed):
    """A small layer of so many heads, dimensions, widths and outputs, and three examples."""
    H, d, d_h, d_v, o = shape
    g = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=g, dtype=torch.float64)  # noqa: E731
    maps = spread * draw(H, d, d_h), spread * draw(H, d, d_h), draw(H, d, d_v)
    weights = MHAWeights(*maps, draw(H * d_v, o), draw(o, o))
    contexts = draw(3, 3, d) if own else draw(3, d)
    return weights, contexts, draw(3, d)


def layers(weights, rows):
    """A layer for each row of all weights."""
    parts = rows.split([W.numel() for W in weights], 1)
    return MHAWeights(*(x.reshape(-1, *W.shape) for x, W in zip(parts, weights, strict=True)))


SHAPES = (1, 2, 1, 1, 1), (1, 2, 2, 1, 1), (2, 2, 1, 1, 1), (1, 2, 1, 2, 2)


@pytest.mark.hostile("mahdavi-finding-rounding")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_no_corner_is_further_than_proven(shape, own, spread):
    """And with many digits some corner is nearly as far; the first order alone is exceeded."""
    weights, E, e = drawn(shape, own, spread, seed=1)
    y, flat = mha(weights, E, e), torch.cat([W.flatten() for W in weights])
    signs = torch.tensor([*itertools.product((-1.0, 1.0), repeat=len(flat))]).double()
    alone = lambda v: mha(layers(weights, v[None]), E[None], e[None]).flatten()  # noqa: E731
    J = torch.autograd.functional.jacobian(alone, flat)
    above = False
    for digits in (1, 4, 8, 28):
        part = 2.0 ** -(digits + 1)
        many = layers(weights, flat * (1 + part * signs))
        N = len(signs)
        outputs = mha(many, E.expand(N, *E.shape), e.expand(N, *e.shape))
        far = float((outputs - y).abs().max())
        proven = certified_rounding(weights, E, e, y, digits=digits)
        assert far <= proven + 1e-14
        above |= far > part * float((J * flat).abs().sum(1).max()) + 1e-14
    assert above
    assert proven < 1.001 * far  # with 28 digits


def test_digits_are_the_least_that_are_proven():
    g = torch.Generator().manual_seed(0)
    E, e, y = (torch.rand(*size, generator=g) for size in [(3, 4), (5, 4), (5, 1)])
    weights = memorize_mha(E, e, y, heads=2, head_dim=3, seed=0)
    data = weights, E, e, y
    digits, top = certified_digits(*data), float(y.max())
    assert certified_rounding(*data, digits=digits) <= 0.01 * top
    assert certified_rounding(*data, digits=digits - 1) > 0.01 * top
    mantissas, exponents = zip(*map(torch.frexp, weights), strict=True)
    short = [(m * 2 ** (digits + 1)).round() / 2 ** (digits + 1) for m in mantissas]
    rounded = MHAWeights(*map(torch.ldexp, short, exponents))
    assert (mha(rounded, E.double(), e.double()) - y).abs().max() <= 0.01 * top
    assert certified_digits(weights, E, e, y + 1) is None  # labels that the weights miss
    assert certified_digits(*data, tolerance=1e-3) > digits
    huge = weights._replace(W_Q=weights.W_Q * 1e300)
    assert certified_rounding(huge, E, e, y, digits=0) > 1  # infinite, or at least no proof


@pytest.mark.parametrize("digits", [0, 3, 9, 20])
def test_linear_layer_moves_by_the_sum_of_its_radii(digits):
    """Zeros are not rounded, so attention is constant, and the output a product of three."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    weights = MHAWeights(0 * one, 0 * one, 3 * one, -5 * one[0], 7 * one[0])
    u = 2.0 ** -(digits + 1)
    proven = certified_rounding(weights, one[0], one[0], -105 * one[0], digits=digits)
    assert 105 * ((1 + u) ** 3 - 1) < proven
    assert math.isclose(proven, 105 * 3 * u * (1 + u) ** 2, rel_tol=1e-7)
