"""Ranks in Mahdavi et al., over all attention or at random weights, and what heads cannot do.

Ranks are exact wherever the statement allows rational numbers.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem import MHAWeights, mha, mha_features, random_mha
from attnmem.core import bounds
from attnmem.theory.certificates import enclosed_features
from attnmem.theory.independence import certified_rank, numerical_rank
from attnmem.theory.scalars import memorize_scalars

import hostile
import oracles
from oracles import F64, centred, gaussian

seeds = st.integers(0, 2**32)


# --- over all attention ---------------------------------------------------------------------------


FLATS = {f"{name}, d = {d}": x for d in (1, 2, 3) for name, x in hostile.flats(d)}


@pytest.mark.hostile("mahdavi-proposition-2")
@pytest.mark.parametrize("name", FLATS)
@pytest.mark.parametrize("H", [1, 2, 3])
def test_proposition_2_on_tokens_of_every_kind(H, name):
    tokens = FLATS[name]
    n, (dimension, through_origin) = len(tokens), oracles.affine(tokens)
    largest = oracles.corner_rank(tokens[None], H)
    assert largest <= bounds.shared_context_rank(H, n)
    assert largest == bounds.affine_span_rank(H, dimension, through_origin)
    if oracles.rank(tokens) == n:
        assert largest == bounds.shared_context_rank(H, n) == 1 + H * (n - 1)


@pytest.mark.hostile("mahdavi-proposition-5")
@pytest.mark.parametrize("total", [-1, 0, 1, 2])
@pytest.mark.parametrize(("d", "H"), [(1, 3), (2, 1), (2, 3), (3, 2), (5, 1)])
def test_proposition_5_on_all_tokens_of_one_sum(d, H, total):
    """Any head may choose any token of the lattice: the rank of all such rows."""
    tokens = hostile.constant_sum(d, total)
    largest = oracles.corner_rank(tokens[None], H)
    assert largest <= bounds.affine_rank(H, d)
    assert (largest == bounds.affine_rank(H, d)) == (total != 0)
    assert largest == bounds.affine_span_rank(H, d - 1, through_origin=total == 0)
    off = torch.cat([tokens, tokens[:1] + torch.eye(d, dtype=torch.int64)[:1]])
    assert oracles.corner_rank(off[None], H) == H * d  # one token off by one


def relu_fits(inputs, labels):
    """Whether some set of active examples admits one ReLU unit with these outputs.

    The unit is affine on those and constant on the others: rational linear algebra for each of the
    ``2^T`` sets. Signs are left out, so that what does not fit here fits no such network.
    """
    for active in itertools.product((0, 1), repeat=len(inputs)):
        columns = [[1, a, *(a * x for x in row)] for row, a in zip(inputs, active, strict=True)]
        both = [[*row, y] for row, y in zip(columns, labels, strict=True)]
        if oracles.rank(columns) == oracles.rank(both):
            return True
    return False


@pytest.mark.hostile("mahdavi-proposition-3")
@pytest.mark.parametrize(("n", "d"), [(1, 2), (2, 3)])
def test_proposition_3_over_all_patterns_of_activity(n, d):
    """All contexts equal: the count fails, the numbers that matter fit, one more does not."""
    T = bounds.relu_capacity(1, d) + 1
    assert d + 4 == T
    labels = [5**t for t in range(T)]
    powers = (torch.arange(1, T + 1)[:, None] ** torch.arange(1, d + 1)).tolist()
    on_a_flat = hostile.moments(T, d, d).tolist()  # there the unit's bias is one number too many
    for queries, true in ((powers, d + 2), (on_a_flat, d + 1)):
        assert oracles.kruskal(queries) == d > n  # admissible, on any shared context of rank n
        assert not relu_fits(queries, labels)
        assert relu_fits(queries[:true], labels[:true])
        assert not relu_fits(queries[: true + 1], labels[: true + 1])


@pytest.mark.hostile("mahdavi-proposition-4", "mahdavi-lemma-2")
@pytest.mark.parametrize(
    ("n", "d", "query"),
    [(1, 2, "equal"), (2, 2, "zero"), (2, 3, "equal"), (4, 5, "zero"), (4, 7, "a token")],
)
def test_proposition_4_where_assumption_3_just_holds(n, d, query):
    """And just fails. ``n`` is a power of two: the layer's averages are exact in floating point."""
    T = 7
    tokens = hostile.integers(n, n, d, size=9)[1:]
    q = {"zero": 0 * tokens[:1], "equal": torch.full((1, d), 3), "a token": tokens[:1]}[query]
    q = q if len(q) else torch.full((1, d), 3)
    eye, zero = torch.eye(d, **F64), torch.zeros(1, d, 1, **F64)
    layer_of_means = MHAWeights(zero, zero, eye[None], eye, eye)
    for Q in (n, n - 1):
        wanted = hostile.moments(T, Q, d)  # Assumption 3 speaks of these, times 1/n
        E = torch.cat([tokens.repeat(T, 1, 1), (wanted - n * q - tokens.sum(0))[:, None]], dim=1)
        e = q.repeat(T, 1)
        assert all(oracles.rank(context) == n for context in E)  # Assumption 2
        assert oracles.kruskal(e) <= 1  # the queries themselves are as poor as can be
        after, moved = (mha(layer_of_means, E.double(), x.double(), skip=True) for x in (e, E))
        assert (n * after == wanted).all()
        assert oracles.kruskal(after) == Q  # Assumption 1 holds at Q = n, and not below
        assert all(oracles.rank(context) == n for context in moved)
        if n > 1:  # the same layer without its skip, and one that subtracts the mean
            assert oracles.rank(mha(layer_of_means, E.double(), E.double())[0]) == 1
            assert oracles.rank(n * E[0] - E[0].sum(0)) == n - 1


@pytest.mark.hostile("mahdavi-lemma-1")
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 2)])
def test_lemma_1_for_all_small_matrices(shape):
    """``A`` of shape (a, b), ``D`` of shape (c, d), every entry -1, 0 or 1."""
    a, b, c, d = shape
    strict = broken = False
    for A in hostile.matrices(a, b):
        for D in hostile.matrices(c, d):
            least = oracles.rank(A) + oracles.rank(D)
            for B in hostile.matrices(a, d, entries=(0, 1)):
                top = [x + y for x, y in zip(A, B, strict=True)]
                M = top + [[0] * b + row for row in D]
                rank = oracles.rank(M)
                assert rank >= least, (A, B, D)
                strict |= rank > least
                below = top + [[1] * b + row for row in D]  # no block of zeros
                broken |= oracles.rank(below) < least
                if shape == (2, 1, 1, 1):
                    assert certified_rank(torch.tensor(M)).rank == rank
    assert strict
    assert broken


@pytest.mark.hostile("mahdavi-lemma-5")
def test_lemma_5_to_the_last_digit():
    M = torch.diag(torch.tensor([2.0**30, 1.0], **F64))
    short = torch.diag(torch.tensor([0.0, math.nextafter(-1.0, 0.0)], **F64))
    assert certified_rank(M + short).rank == oracles.rank(M + short) == 2
    assert certified_rank(M - torch.diag(torch.tensor([0.0, 1.0], **F64))).rank == 1


# --- at random weights ----------------------------------------------------------------------------


GENERIC = [(1, 1, 1, 1), (3, 1, 2, 1), (2, 2, 1, 1), (5, 2, 2, 1), (2, 3, 3, 1), (3, 3, 2, 1)]
GENERIC += [(2, 5, 3, 2), (3, 2, 5, 1), (1, 7, 3, 3), (2, 4, 5, 5)]


def expected(H, n, d, kind):
    """The generic rank, counted by dimensions: of each head's tokens, and one for the constant."""
    if kind == "own":
        return d if n == 1 else H * d
    return H * min(n - 1, d) + (n <= d)


@pytest.mark.hostile("mahdavi-finding-generic")
@pytest.mark.parametrize(("H", "n", "d", "d_h"), GENERIC)
@pytest.mark.parametrize("kind", ["shared", "own", "queries on one line, shared"])
def test_finding_generic_at_the_edges(H, n, d, d_h, kind):
    largest = expected(H, n, d, kind)
    for T in {1, max(1, largest - 1), largest, largest + 2}:
        best = 0
        for seed in range(40):
            if best == min(T, largest):
                break
            shape = (T, n, d) if kind == "own" else (n, d)
            E = hostile.integers(seed, *shape, size=5)
            e = hostile.integers(seed + 50, T, d, size=3)
            if kind.startswith("queries"):
                e = torch.arange(1, T + 1)[:, None] * hostile.integers(seed + 70, 1, d)
            Z = oracles.features2(hostile.maps(seed + 99, H, d, d_h), E, e)
            assert oracles.rank(Z) <= largest
            best = max(best, oracles.rank(Z))
        assert best == min(T, largest), T
    if kind == "own" and n == 1:
        with pytest.raises(ValueError, match=r"^context: got 1"):
            bounds.own_context_rank(H, n, d)
    elif kind == "own":
        assert bounds.own_context_rank(H, n, d) == largest
    elif n <= d:
        assert bounds.shared_context_rank(H, n) == largest
    else:
        assert bounds.affine_span_rank(H, d) - 1 == largest < bounds.shared_context_rank(H, n)


@pytest.mark.hostile("mahdavi-finding-capacity")
@pytest.mark.parametrize("kind", ["moments", "basis and its sum", "lengths from 1 to 2^10"])
@pytest.mark.parametrize(("H", "n", "d"), [(1, 3, 3), (2, 3, 3), (3, 3, 5), (2, 5, 5)])
def test_finding_capacity_at_its_full_count(H, n, d, kind):
    """Queries of Kruskal rank exactly ``d``; labels that differ in one example, or by 2^40."""
    T = H * (d - 1)
    if kind == "basis and its sum":
        T = min(T, d + 1)
        e = torch.cat([torch.eye(d, dtype=torch.int64), torch.ones(1, d, dtype=torch.int64)])[:T]
    else:
        e = hostile.moments(T, d, d)
    assert oracles.kruskal(e) == min(d, T)
    e = e.double()
    if kind.startswith("lengths"):
        e = e * (2.0 ** torch.linspace(0, 10, T, **F64).round())[:, None]
    unit_rows = torch.eye(T, **F64)
    far = 2.0 ** torch.linspace(-20, 20, T, **F64)
    one_hot = torch.eye(d, **F64)[:n]
    contexts = one_hot, 2 * one_hot - 1
    labels = unit_rows[0], -unit_rows[-1], far, -far, torch.full((T,), 3.0, **F64)
    for E, y in itertools.product(contexts, labels):
        weights = memorize_scalars(E, e, y, heads=H)
        assert weights.W_Q.shape == (H, d, 2)
        error = oracles.ball_error(weights, E, e, y[:, None])
        assert error <= 1e-8 * float(y.abs().max()), (E, y)


@pytest.mark.parametrize(("H", "n", "d", "d_h"), [(4, 3, 5, 1), (3, 2, 4, 2), (6, 4, 3, 1)])
def test_self_attention_has_the_generic_rank(H, n, d, d_h):
    E = gaussian(0, H * d, n, d)
    layer = random_mha(H, d, d_h, seed=0, spread=3)
    proof = certified_rank(enclosed_features(layer, E, E[:, 0].clone()), target=H * d)
    assert proof.rank == H * d


def differences_in_a_flat(n, d, T, generator):
    """Integer tokens in general position whose differences span (n - 1) d / n dimensions only."""
    m = (n - 1) * d // n
    differences = torch.randint(-50, 51, (T, n, d), generator=generator)
    differences[..., m:] = 0
    return torch.randint(-50, 51, (T, 1, d), generator=generator) + differences


@pytest.mark.hostile("mahdavi-conjecture")
@pytest.mark.parametrize(("n", "d", "H"), [(2, 4, 5), (2, 6, 3), (3, 6, 3), (4, 4, 2), (2, 2, 4)])
def test_conjecture_on_its_sharp_family(n, d, H):
    """General position gives H K + 1, and there not more than H m + d / n."""
    m = (n - 1) * d // n
    generator = torch.Generator().manual_seed(n * d)
    E = differences_in_a_flat(n, d, H * d + 3, generator)
    some = E[: -(-12 // n)].flatten(0, 1).tolist()
    assert all(oracles.rank(rows) == d for rows in itertools.combinations(some, d))
    e = gaussian(generator, len(E), d)
    most, served = H * m + d // n, H * m + 1
    layer = random_mha(H, d, m + 1, seed=0, spread=3)
    Z = mha_features(layer, E.double() / 64, e)
    assert numerical_rank(Z, rtol=1e-11) <= most <= bounds.affine_rank(H, d)
    enclosure = enclosed_features(layer, E.double()[:served] / 64, e[:served])
    assert certified_rank(enclosure, target=served).rank == served > H * d / 4


@pytest.mark.hostile("mahdavi-appendix-i")
@pytest.mark.parametrize(("H", "n", "d"), [(2, 2, 2), (3, 2, 4), (2, 5, 3)])
def test_appendix_i_a_constant_sum_costs_rank(H, n, d):
    """Of the same tokens, with a last coordinate that is free, or makes the sum one."""
    g = torch.Generator().manual_seed(H * n * d)
    free = (gaussian(g, H * d, n, d) * 2**20).round() / 2**20
    level = free.clone()
    level[..., -1] = 1 - free[..., :-1].sum(-1)
    e, layer = gaussian(g, H * d, d), random_mha(H, d, d, seed=0, spread=3)
    for E, T, holds in ((free, H * d, True), (level, H * (d - 1) + 1, True), (level, H * d, False)):
        Z = enclosed_features(layer, E[:T], e[:T])
        assert certified_rank(Z, target=T).full == holds


# --- what heads of some width can do --------------------------------------------------------------


@pytest.mark.hostile("mahdavi-wide-heads")
@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(2, 5), st.integers(2, 8), st.integers(1, 8), seeds)
def test_wide_heads_add_nothing_on_shared_contexts(H, n, d, d_h, seed):
    generator = torch.Generator().manual_seed(seed)
    E, e = gaussian(generator, n, d), gaussian(generator, 12, d)
    layer = random_mha(H, d, d_h, seed=seed % 1000, spread=3)
    span = torch.linalg.qr((E[1:] - E[0]).T).Q  # (d, min(n - 1, d))
    narrow = layer._replace(W_K=span.expand(H, *span.shape), W_Q=layer.W_Q @ (layer.W_K.mT @ span))
    assert narrow.W_K.shape[-1] <= n - 1
    torch.testing.assert_close(mha(narrow, E, e), mha(layer, E, e), rtol=1e-7, atol=1e-9)


@pytest.mark.hostile("mahdavi-low-rank")
@settings(max_examples=40)
@given(st.integers(3, 6), st.integers(0, 2), st.sampled_from([0.1, 3.0, 30.0]), seeds)
def test_a_head_narrower_by_two_loses_attention(n, more, spread, seed):
    """Saturated demands, too. What a narrow head can do is a rank, in whole numbers."""
    draw, d = torch.Generator().manual_seed(seed), n + more
    context = torch.linalg.qr(gaussian(draw, d, n)).Q.mT
    queries = torch.linalg.qr(gaussian(draw, d, n)).Q.mT
    wish = spread * gaussian(draw, n, n)  # logits, a row for each query
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
    keys, asks = hostile.integers(seed, d, n - 2), hostile.integers(seed + 1, n - 2, n)
    logits = hostile.integers(seed + 2, n, d) @ keys @ asks  # of any head of width n - 2
    assert certified_rank(centred(logits.mT)).rank <= n - 2
    assert certified_rank(centred(torch.eye(n, dtype=torch.int64))).rank == n - 1


@pytest.mark.hostile("mahdavi-section-4-3")
def test_section_4_3_one_relu_unit_beats_attention():
    """On one token, to which all attention is alike."""
    token, label = torch.tensor([[1, 0], [0, 1], [1, 1]]), torch.tensor([0, 0, 1])
    assert torch.equal((token.sum(1) - 1).clamp(min=0), label)
    layer = random_mha(50, 2, 2, seed=0, spread=3)
    outputs = mha(layer, token[:, None].double(), token.double())[:, 0]
    torch.testing.assert_close(outputs[0] + outputs[1], outputs[2])  # and 0 + 0 is not 1
