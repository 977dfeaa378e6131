"""Layers drawn at random: their shapes, and the deviations that they promise."""

import pytest
import torch

from attnmem import mha, random_deep, random_mha
from attnmem.core.random import gaussian
from attnmem.core.stacked import streams

H, d, d_h, d_v = 40, 23, 7, 5


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_random_mha_has_logits_of_its_spread(spread):
    layer = random_mha(H, d, d_h, seed=0, value_dim=d_v, spread=spread)
    e, x = gaussian(generator(), 60, d), gaussian(generator(1), 60, d)
    logits = torch.einsum("td,hdk,hek,se->hts", e, layer.W_Q, layer.W_K, x)
    assert float(logits.std()) == pytest.approx(spread, rel=0.05)
    assert mha(layer, x, e).shape == (60, 1)


def test_random_mha_repeats_with_its_seed():
    once, again, other = (random_mha(2, 3, 2, seed=seed).W_Q for seed in (4, 4, 5))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_random_deep_adds_values_of_its_size():
    """A lone token attends to itself, so nothing is averaged."""
    weights = random_deep((H, H), d_h, d_v, d, generator(), outputs=3, values=0.25)
    assert weights.W_D.shape == (d, 3)
    assert [layer.W_O.shape for layer in weights.layers] == [(H, d_v, d)] * 2
    tokens = gaussian(generator(1), 500, 1, d)
    before, after, _ = streams(weights, tokens)
    assert float((after - before).std()) == pytest.approx(0.25, rel=0.1)
