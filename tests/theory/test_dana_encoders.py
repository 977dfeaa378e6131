"""What Dana et al. state of encoders, widths and counts, each against an oracle of its own."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem import AoTWeights, aot
from attnmem.core import sequences as construction
from attnmem.theory import counts
from attnmem.theory.independence import certified_rank

import hostile
import oracles
from oracles import F64, ExactTransformer, centred, gaussian

seeds = st.integers(0, 2**32)


@pytest.mark.hostile("dana-proposition-1")
@pytest.mark.parametrize("size", [1, 3, 9])
@pytest.mark.parametrize(("S", "d", "H"), [(1, 1, 3), (3, 1, 7), (2, 2, 5), (5, 3, 2)])
def test_proposition_1_logits_have_rank_d(S, d, H, size):
    """However many heads there are; exactly, for logits of one, hundreds and thousands."""
    N = 7
    sequences = hostile.every_sequence(2, S)
    exact = ExactTransformer.drawn(size, N, S, d, d, H, size=size)
    W_O, W_U = hostile.integers(size + 7, H, d, d), hostile.integers(size + 8, N, d)
    out = torch.cat([torch.eye(d, dtype=torch.int64), *W_O.mT])
    last = oracles.rational(exact.offered(sequences.tolist())) * oracles.rational(out)
    logits = last * oracles.rational(W_U.T)
    assert logits.rank() <= d < N
    rows = torch.tensor([[float(x) for x in r] for r in oracles.fractions(logits)], **F64)
    weights = AoTWeights(*exact.weights(W_O.double(), W_U.double()))
    torch.testing.assert_close(aot(weights, sequences), rows, rtol=1e-9, atol=1e-7)


@pytest.mark.hostile("dana-proposition-3")
@pytest.mark.parametrize("N", [2, 3, 4, 5, 997])
def test_proposition_3_circle_in_closed_form(N):
    W = construction.circle(N)
    logits = W @ W.T
    assert (logits.argmax(1) == torch.arange(N)).all()
    lead = construction.margins(logits, torch.arange(N))
    exact = 2 * math.sin(math.pi / N) ** 2  # 1 - cos(2 pi / N), without cancellation
    torch.testing.assert_close(lead, torch.full((N,), exact, **F64), rtol=1e-6, atol=1e-15)
    scale = 50 / exact
    rest = sum(math.exp(-scale * 2 * math.sin(math.pi * j / N) ** 2) for j in range(1, N))
    paid = -float((scale * logits[0]).log_softmax(0)[0])  # the divergence
    assert paid == pytest.approx(math.log1p(rest), abs=1e-9)
    for dim in (2, 3, 5):  # any unit vectors that differ: far more tokens than dimensions
        rows = construction.spread_tokens(min(N, 97), dim, seed=0)
        assert (construction.margins(rows @ rows.T, torch.arange(len(rows))) > 0).all()


@pytest.mark.hostile("dana-section-3")
@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(0, 3), seeds)
def test_section_3_dependent_distributions_are_exact(d, more, seed):
    """Any number of them, but not d + 1 independent ones.

    A transformer without heads has a distribution for each of N > d tokens, all different.
    """
    N = d + 2 + more
    embedding = hostile.integers(seed, N, d, size=9)
    embedding[:, 0] = torch.arange(N)
    silent = torch.zeros(1, 1, d, **F64)
    tokens = embedding.to(**F64)
    weights = AoTWeights(tokens, silent[0], silent, silent, silent, silent.mT, tokens)
    logits = aot(weights, torch.arange(N)[:, None])
    exact = embedding @ embedding.T
    assert torch.equal(logits, exact.to(**F64))
    assert len(torch.unique(centred(exact), dim=0)) == N > d
    assert certified_rank(centred(exact)).rank <= d
    unit_rows = centred(torch.eye(d + 1, N, dtype=torch.int64))
    assert certified_rank(unit_rows).rank == d + 1, "logits W E have rank d at most"


@pytest.mark.hostile("dana-footnote-1")
@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from([1e-2, 1.0, 3.0]), seeds)
def test_footnote_1_a_head_as_wide_as_a_token(d, more, scale, seed):
    draw, N, S, H = torch.Generator().manual_seed(seed), 3, 3, 2
    wide = (H, d + more, d)
    shapes = [(N, d), (S, d), wide, wide, wide, (H, d, d + more), (N, d)]
    weights = AoTWeights(*(scale * gaussian(draw, *shape) for shape in shapes))
    narrow = weights._replace(
        W_Q=torch.eye(d, **F64).expand(H, d, d),
        W_K=torch.einsum("hkd, hke -> hde", weights.W_Q, weights.W_K),
        W_V=torch.einsum("hdk, hke -> hde", weights.W_O, weights.W_V),
        W_O=torch.eye(d, **F64).expand(H, d, d),
    )
    sequences = torch.cartesian_prod(*[torch.arange(N)] * S)
    torch.testing.assert_close(
        aot(narrow, sequences), aot(weights, sequences), rtol=1e-9, atol=1e-9
    )


@pytest.mark.hostile("dana-section-5-1")
@pytest.mark.parametrize("N", [3, 10, 1000])
def test_section_5_1_rank_two_stores_any_associations(N):
    """On a parabola, in whole numbers: 2 i j - i^2 is largest at i = j. On a line two can win."""
    tokens = torch.arange(N)
    memory = torch.stack([2 * tokens, -(tokens**2)], dim=1) @ torch.stack([tokens, tokens**0])
    assert torch.equal(memory.argmax(0), tokens)
    assert certified_rank(memory).rank == 2
    on_a_line = (tokens - N // 2)[:, None] * torch.tensor([[-5, -1, 1, 5]])
    assert certified_rank(on_a_line).rank == 1 < len(on_a_line.argmax(0).unique())


@pytest.mark.hostile("dana-remark-1")
@pytest.mark.parametrize(("N", "S", "d", "d_h", "H"), [(2, 3, 2, 2, 1), (7, 4, 2, 1, 6)])
def test_remark_1_counts_parameters(N, S, d, d_h, H):
    """But full rank leaves C infinite."""
    T_0 = H * d_h + d
    assert counts.aot_parameters(H, d_h, d, N, S) == d * (S + 2 * N + 4 * (T_0 - d))
    F = torch.tensor([[0, 1], [2, 0], [0, 0]])  # two columns of rank two; the first row is likely
    assert certified_rank(F).rank == 2
    assert torch.linalg.svd(F.T.double()).Vh[0, 0] == 0  # the block whose inverse C has


@pytest.mark.hostile("dana-parameters")
@pytest.mark.parametrize(("N", "S", "d", "d_h", "H"), [(7, 3, 5, 4, 2), (11, 4, 2, 1, 6)])
def test_parameters_are_what_the_matrices_hold(N, S, d, d_h, H):
    def held(width):
        shapes = [(N, d), (S, d), (N, d)]  # embedding, positions, unembedding
        shapes += H * [(width, d), (width, d), (d_h, d), (d, d_h)]
        return sum(math.prod(shape) for shape in shapes)

    assert held(d_h) == d * (S + 2 * N + 4 * d_h * H) == counts.aot_parameters(H, d_h, d, N, S)
    assert held(1) == d * (S + 2 * N + 2 * (d_h + 1) * H)
    if d == 2:
        assert held(d_h) == 2 * (S + 2 * N + 4 * (H * d_h + 2 - 2))
