"""Weights that predict next tokens, step by step. More in tests/theory, on hostile sets."""

import math

import pytest
import torch

from attnmem import aot
from attnmem.theory import associations
from attnmem.theory.associations import (
    circle,
    margins,
    memorize_aot,
    memorize_next_tokens,
    random_aot,
    spread_tokens,
)

PAIRS = torch.cartesian_prod(torch.arange(4), torch.arange(4))
TOKENS = PAIRS.sum(1) % 4
SIZES = {"vocab": 4, "dim": 3, "head_dim": 2}


def test_margins_are_those_of_a_plain_loop():
    logits = torch.randn(7, 5)
    tokens = torch.randint(5, (7,))
    for row, token, margin in zip(logits, tokens, margins(logits, tokens), strict=True):
        others = [float(x) for k, x in enumerate(row) if k != token]
        assert float(margin) == pytest.approx(float(row[token]) - max(others))


@pytest.mark.parametrize("dim", [2, 3, 7])
def test_spread_tokens_have_length_one(dim):
    W_U = spread_tokens(9, dim, seed=1)
    torch.testing.assert_close(W_U.norm(dim=1), torch.ones(9).double())
    assert torch.equal(W_U, circle(9)) == (dim == 2)


def test_draws_have_their_shapes_and_spread():
    """Logits of token and query, of two parts of variance 1/2 each, deviate by about 5."""
    e, pos, W_Q, W_K, W_V = random_aot(200, 3, 16, 8, 5, spread=5.0, seed=0)
    assert (e.shape, pos.shape, W_V.shape) == ((200, 16), (3, 16), (5, 8, 16))
    x = e + pos[0]
    logits = torch.einsum("xd,hkd,hke,ye->hxy", x, W_Q, W_K, x)
    assert float(logits.std()) == pytest.approx(5, rel=0.3)


@pytest.mark.parametrize("most", [9, 10])
def test_lost_margins_are_refused_after_all_draws(most, monkeypatch):
    monkeypatch.setattr(associations, "margins", lambda logits, tokens: -torch.ones(1))
    monkeypatch.setattr(associations, "_MOST", most)
    with pytest.raises(ValueError, match=rf"^sequences: got 16 .* each of {most} draws"):
        memorize_aot(PAIRS, TOKENS, **SIZES | {"heads": 7}, seed=0)
    with pytest.raises(ValueError, match=rf"^sequences: got 16 .* each of {most} draws"):
        memorize_next_tokens(PAIRS, TOKENS, **SIZES, groups=(2, 2), seed=0)


def test_exact_margin_ends_the_draws(monkeypatch):
    """On a circle of four the first draw, without jitter, leads by one."""
    seeds = []
    draw = associations.random_aot
    monkeypatch.setattr(associations, "random_aot", lambda *a: seeds.append(a[-1]) or draw(*a))
    weights = memorize_aot(PAIRS, TOKENS, vocab=4, dim=2, head_dim=2, heads=7, seed=3)
    assert math.isclose(float(margins(aot(weights, PAIRS), TOKENS).min()), 1, rel_tol=1e-2)
    assert seeds == [3]
