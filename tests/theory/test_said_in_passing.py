"""What the papers say beside their numbered statements, tried where it is likeliest to break."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem import AoTWeights, MHAWeights, aot, mha
from attnmem.theory.independence import certified_rank

F64 = {"dtype": torch.float64}
seeds = st.integers(0, 2**32)


def integers(*shape, seed, most=9):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=draw)


def centred(logits):
    """In whole numbers: times the number of tokens."""
    return logits.shape[1] * logits - logits.sum(dim=1, keepdim=True)


@pytest.mark.hostile("dana-section-3")
@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(0, 3), seeds)
def test_any_number_of_distributions_is_exact_in_one_dimension_but_independent_ones_are_not(
    d, more, seed
):
    """A transformer without heads has a distribution for each of N > d tokens, all different."""
    N = d + 2 + more
    embedding = torch.cat([torch.arange(N)[:, None], integers(N, d - 1, seed=seed)], dim=1)
    silent = torch.zeros(1, 1, d, **F64)
    tokens = embedding.to(**F64)
    weights = AoTWeights(tokens, silent[0], silent, silent, silent, silent.mT, tokens)
    logits = aot(weights, torch.arange(N)[:, None])
    exact = embedding @ embedding.T
    assert torch.equal(logits, exact.to(**F64))
    assert len(torch.unique(centred(exact), dim=0)) == N > d
    assert certified_rank(centred(exact)).rank <= d
    others = centred(torch.eye(d + 1, N, dtype=torch.int64))
    assert certified_rank(others).rank == d + 1, "logits W E have rank d at most"


@pytest.mark.hostile("mahdavi-low-rank")
@settings(max_examples=40)
@given(st.integers(3, 6), st.integers(0, 2), st.sampled_from([0.1, 3.0, 30.0]), seeds)
def test_a_head_two_narrower_than_the_context_loses_attention_and_one_narrower_does_not(
    n, more, spread, seed
):
    """Saturated demands, too. What a narrow head can do is a rank, in whole numbers."""
    draw, d = torch.Generator().manual_seed(seed), n + more
    context = torch.linalg.qr(torch.randn(d, n, generator=draw, **F64)).Q.mT
    queries = torch.linalg.qr(torch.randn(d, n, generator=draw, **F64)).Q.mT
    wish = spread * torch.randn(n, n, generator=draw, **F64)  # logits, a row for each query
    centre = torch.eye(n, **F64) - 1 / n
    U, sizes, V = torch.linalg.svd((wish @ centre).mT)
    narrow = (context.mT @ U * sizes)[:, : n - 1], (queries.mT @ V.mT)[:, : n - 1]
    weights = MHAWeights(
        W_Q=narrow[1][None],
        W_K=narrow[0][None],
        W_V=torch.eye(d, **F64)[None],
        W_O=torch.eye(d, **F64),
        W_D=torch.eye(d, **F64),
    )
    alpha = mha(weights, context, queries) @ context.mT  # the attention: tokens are orthonormal
    torch.testing.assert_close(alpha, wish.softmax(-1), rtol=0, atol=1e-9)
    keys, asks = integers(d, n - 2, seed=seed), integers(n - 2, n, seed=seed + 1)
    logits = integers(n, d, seed=seed + 2) @ keys @ asks  # of any head of width n - 2
    assert certified_rank(centred(logits.mT)).rank <= n - 2
    assert certified_rank(centred(torch.eye(n, dtype=torch.int64))).rank == n - 1


@pytest.mark.hostile("dana-footnote-1")
@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from([1e-2, 1.0, 3.0]), seeds)
def test_a_head_wider_than_a_token_is_one_of_its_width(d, more, scale, seed):
    draw, N, S, H = torch.Generator().manual_seed(seed), 3, 3, 2
    wide = (H, d + more, d)
    shapes = [(N, d), (S, d), wide, wide, wide, (H, d, d + more), (N, d)]
    weights = AoTWeights(*(scale * torch.randn(s, generator=draw, **F64) for s in shapes))
    narrow = weights._replace(
        W_Q=torch.eye(d, **F64).expand(H, d, d),
        W_K=torch.einsum("hkd, hke -> hde", weights.W_Q, weights.W_K),
        W_V=torch.einsum("hdk, hke -> hde", weights.W_O, weights.W_V),
        W_O=torch.eye(d, **F64).expand(H, d, d),
    )
    every = torch.cartesian_prod(*[torch.arange(N)] * S)
    torch.testing.assert_close(aot(narrow, every), aot(weights, every), rtol=1e-9, atol=1e-9)


@pytest.mark.hostile("dana-section-5-1")
@pytest.mark.parametrize("N", [3, 10, 1000])
def test_a_matrix_of_rank_two_stores_any_number_of_associations(N):
    """On a parabola, in whole numbers: 2 i j - i^2 is largest at i = j. On a line two can win."""
    tokens = torch.arange(N)
    memory = torch.stack([2 * tokens, -(tokens**2)], dim=1) @ torch.stack([tokens, tokens**0])
    assert torch.equal(memory.argmax(0), tokens)
    assert certified_rank(memory).rank == 2
    one = (tokens - N // 2)[:, None] * torch.tensor([[-5, -1, 1, 5]])
    assert certified_rank(one).rank == 1 < len(one.argmax(0).unique())
