"""Weights that predict next tokens, step by step. More in tests/theory, on hostile sets."""

import math

import pytest
import torch

from attnmem import AoTWeights, aot, memorize_aot
from attnmem.core import sequences as construction
from attnmem.core.sequences import (
    circle,
    margins,
    moved,
    offered,
    random_aot,
    solved,
    spread_tokens,
)

from oracles import F64

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


# Two tokens, two places, one head: the transformer of the book's first chapter on token sequences.
LOGIT = math.log(3) / 2
SMALL = (
    torch.eye(2, **F64),
    torch.tensor([[1, 1], [0, 0]], **F64),
    torch.eye(2, **F64)[None],
    LOGIT * torch.tensor([[[1, -1], [0, 0]]], **F64),
    torch.eye(2, **F64)[None],
)
BITS = torch.cartesian_prod(torch.arange(2), torch.arange(2))


def test_a_draw_offers_what_its_equations_say():
    """The head goes half of the way from the last token to the first; from 0 to 1 a quarter."""
    silent = AoTWeights(*SMALL, torch.zeros(1, 2, 2, **F64), circle(2))
    expected = [[1, 0, 1.5, 0.5], [0, 1, 1, 1], [1, 0, 1, 0.5], [0, 1, 0.5, 1.5]]
    torch.testing.assert_close(offered(silent, BITS), torch.tensor(expected, **F64))


@pytest.mark.parametrize(("T", "H", "d_h", "d"), [(4, 1, 2, 2), (11, 3, 3, 5), (8, 3, 2, 3)])
def test_solved_reaches_the_targets_nearest_to_the_draw(T, H, d_h, d):
    g = torch.Generator().manual_seed(T)
    F, E = (torch.randn(T, size, generator=g, **F64) for size in (d + H * d_h, d))
    M, W_O = solved(F, E, heads=H)
    heads = F[:, d:].unflatten(1, (H, d_h))
    torch.testing.assert_close(F[:, :d] @ M.T + torch.einsum("thk,hdk->td", heads, W_O), E)
    step = torch.cat([(M - torch.eye(d)).T, W_O.mT.flatten(0, 1)])
    torch.testing.assert_close(step, torch.linalg.pinv(F) @ (E - F[:, :d]))


def test_moved_keeps_attention_and_values_and_maps_the_skip():
    """As its equations say: ``W x = W' x'`` for each map, while ``x = M x'``."""
    drawn = random_aot(5, 3, 4, 2, 3, spread=2.0, seed=0)
    M = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), **F64)
    tokens = torch.tensor([[0, 1, 2], [4, 4, 0]])
    before, after = drawn[0][tokens] + drawn[1], moved(drawn, M)
    x = after[0][tokens] + after[1]
    torch.testing.assert_close(x, before @ M.T)
    for old, new in zip(drawn[2:], after[2:], strict=True):
        torch.testing.assert_close(
            torch.einsum("hkd,tsd->thsk", new, x), torch.einsum("hkd,tsd->thsk", old, before)
        )


def test_small_transformer_is_the_one_by_hand():
    """With the second number of the last token kept, M and W_O are the whole numbers drawn."""
    sign = 1.0 - 2 * (BITS[:, 0] ^ BITS[:, 1])
    targets = torch.stack([sign.double(), BITS[:, 1].double()], dim=1)
    weights = construction.fitted(SMALL, circle(2), BITS, targets)
    torch.testing.assert_close(weights.embedding, torch.tensor([[-9, 0], [-13, 1]], **F64))
    torch.testing.assert_close(weights.positions, torch.tensor([[-22, 1], [0, 0]], **F64))
    torch.testing.assert_close(weights.W_O, torch.tensor([[[4, 8], [0, 0]]], **F64))
    assert torch.equal(aot(weights, BITS).argmax(-1), BITS[:, 0] ^ BITS[:, 1])


@pytest.mark.parametrize("most", [9, 10])
def test_lost_margins_are_refused_after_all_draws(most, monkeypatch):
    monkeypatch.setattr(construction, "margins", lambda logits, tokens: -torch.ones(1))
    monkeypatch.setattr(construction, "_MOST", most)
    message = rf"^sequences: got T_0 = 16, .* tells 16 apart .* each of {most} draws"
    with pytest.raises(ValueError, match=message):
        memorize_aot(PAIRS, TOKENS, **SIZES | {"heads": 7}, seed=0)


def test_exact_margin_ends_the_draws(monkeypatch):
    """On a circle of four the first draw, without jitter, leads by one."""
    seeds = []
    draw = construction.random_aot
    monkeypatch.setattr(construction, "random_aot", lambda *a: seeds.append(a[-1]) or draw(*a))
    weights = memorize_aot(PAIRS, TOKENS, vocab=4, dim=2, head_dim=2, heads=7, seed=3)
    assert math.isclose(float(margins(aot(weights, PAIRS), TOKENS).min()), 1, rel_tol=1e-2)
    assert seeds == [3]
