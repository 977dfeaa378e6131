"""Theorem 1 of Mahdavi et al. built, their other statements, and what both papers say in passing.

Ranks are exact wherever the statement allows rational numbers.
"""

import itertools

import pytest
import torch
from flint import fmpz_mat
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem import (
    AoTWeights,
    MHAWeights,
    aot,
    memorize_mha,
    mha,
    mha_attention,
    mha_features,
    random_mha,
)
from attnmem.core import bounds, memorize
from attnmem.theory.certificates import enclosed_features
from attnmem.theory.independence import certified_rank, numerical_rank

import hostile

F64 = {"dtype": torch.float64}
seeds = st.integers(0, 2**32)
quick = settings(max_examples=40)


def examples(T, n, d, shared, outputs=1, generator=None):
    draw = {"generator": generator, **F64}
    contexts = torch.rand(*(() if shared else (T,)), n, d, **draw)
    return contexts, torch.rand(T, d, **draw), torch.rand(T, outputs, **draw)


def error(weights, contexts, queries, labels, skip=False):
    """One example at a time, as no batched evaluation rounds: the most different order."""
    rows = [
        mha(weights, contexts if contexts.ndim == 2 else contexts[t][None], e[None], skip=skip)
        for t, e in enumerate(queries)
    ]
    return float((torch.cat(rows) - labels.reshape(len(labels), -1)).abs().max())


@st.composite
def admissible(draw):
    d = draw(st.integers(2, 14))
    sizes = {
        "d": d,
        "n": draw(st.integers(1, d - 1)),
        "heads": draw(st.integers(1, 6)),
        "head_dim": draw(st.integers(1, d + 2)),
        "outputs": draw(st.integers(1, min(d, 3))),
        "shared": draw(st.booleans()),
        "skip": draw(st.booleans()),
        "extra": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 2**32)),
    }
    sizes["T"] = draw(
        st.integers(1, bounds.mha_capacity(sizes["heads"], sizes["n"], sizes["head_dim"]))
    )
    return sizes


@settings(max_examples=120)
@given(admissible())
def test_theorem_1_every_admissible_task_is_memorized(case):
    generator = torch.Generator().manual_seed(case["seed"])
    sizes = [case[name] for name in ("T", "n", "d", "shared", "outputs")]
    contexts, queries, labels = examples(*sizes, generator)
    value_dim = case["outputs"] + case["extra"]
    chosen = {name: case[name] for name in ("heads", "head_dim", "seed", "skip")}
    weights = memorize_mha(contexts, queries, labels, value_dim=value_dim, **chosen)
    d, H = case["d"], case["heads"]
    output = d if case["skip"] else case["outputs"]
    assert [tuple(W.shape) for W in weights] == [
        (H, d, case["head_dim"]),
        (H, d, case["head_dim"]),
        (H, d, value_dim),
        (H * value_dim, output),
        (output, case["outputs"]),
    ]
    assert error(weights, contexts, queries, labels, case["skip"]) <= 1e-8
    # Rows of comparable length before the rank is judged by float64's default tolerance.
    assert numerical_rank(mha_features(weights, contexts, queries)) == case["T"]


def test_the_papers_size_with_a_shared_context():
    contexts, queries, labels = examples(bounds.mha_capacity(32, 32, 64), 32, 64, shared=True)
    weights = memorize_mha(contexts, queries, labels, heads=32, head_dim=32, seed=1)
    assert error(weights, contexts, queries, labels) <= 1e-8


def test_nearly_dependent_tokens_are_told_apart_to_1e_8_or_refused():
    errors = []
    for power in range(-12, 0):
        contexts, queries, labels = examples(13, 4, 6, shared=True)
        contexts[3] = contexts[:3].sum(0) + 10.0**power * contexts[3]
        try:
            weights = memorize_mha(contexts, queries, labels, heads=4, head_dim=4, seed=0)
        except ValueError as refusal:
            refused = str(refusal)
        else:
            errors.append(error(weights, contexts, queries, labels))
    assert 0 < len(errors) < 12
    assert max(errors) <= 1e-8
    assert refused.startswith("contexts, queries: got nearly dependent contexts or queries (error")


def test_the_refused_example_does_not_depend_on_rounding():
    """Coordinates in another order give the same problem, with other sums."""
    queries = torch.randn(9, 3, **F64) @ torch.randn(3, 12, **F64)
    contexts, _, labels = examples(9, 6, 12, shared=True)
    said = set()
    for seed in range(10):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        with pytest.raises(ValueError, match=r"^queries: ") as refusal:
            memorize_mha(contexts[:, order], queries[:, order], labels, heads=3, head_dim=6, seed=0)
        said.add(str(refusal.value))
    assert len(said) == 1


def test_float32_data_give_float64_weights():
    contexts, queries, labels = (x.float() for x in examples(29, 8, 16, shared=True))
    weights = memorize_mha(contexts, queries, labels[:, 0], heads=4, head_dim=8, seed=0)
    assert weights.W_Q.dtype == torch.float64
    assert error(weights, contexts, queries, labels) <= 1e-8


@pytest.mark.parametrize("shared", [True, False])
def test_claim_2_heads_choose_where_they_serve_and_are_one_hot_elsewhere(shared):
    T, n, d, heads = 29, 8, 16, 4
    contexts, queries, labels = examples(T, n, d, shared)
    weights = memorize_mha(contexts, queries, labels, heads=heads, head_dim=n, seed=0)
    alpha = mha_attention(weights, contexts, queries)
    mine = torch.zeros(T, heads, dtype=torch.bool)
    served = memorize.serve(T, heads)
    mine[served, torch.arange(heads)[:, None]] = True
    largest = alpha.amax(dim=-1)
    assert (largest[~mine] == 1.0).all()  # to the last bit: what the computed scale promises
    assert (largest[mine] < 0.99).all()
    assert (alpha[mine] > 0).all()


def gaussian(generator, *shape):
    return torch.randn(*shape, generator=generator, **F64)


@pytest.mark.hostile("mahdavi-readings")
@pytest.mark.parametrize(("H", "n", "d"), [(1, 2, 3), (2, 3, 4), (5, 4, 9), (3, 8, 9)])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_readings_of_theorem_1_with_their_constants(H, n, d, number):
    d_h, d_v, outputs = {1: (n, 1, 1), 2: (d, d, 1), 3: (d, d, d)}[number]
    unit = H * n * d if number == 1 else H * d * d
    T = bounds.mha_capacity(H, n, d_h)
    E, e, y = (torch.rand(T, *shape, **F64) for shape in ((n, d), (d,), (outputs,)))
    layer = memorize_mha(E, e, y, heads=H, head_dim=d_h, seed=0, value_dim=d_v)
    parameters = sum(W.numel() for W in layer)
    assert (number + 1) * unit <= parameters <= (number + 2) * unit
    assert parameters >= T * outputs >= H * n * outputs / 2
    if number == 3:
        assert parameters <= 10 * d / n * T * outputs


@pytest.mark.hostile("mahdavi-wide-heads")
@quick
@given(st.integers(1, 4), st.integers(2, 5), st.integers(2, 8), st.integers(1, 8), seeds)
def test_wide_heads_add_nothing_on_a_shared_context(H, n, d, d_h, seed):
    generator = torch.Generator().manual_seed(seed)
    E, e = gaussian(generator, n, d), gaussian(generator, 12, d)
    layer = random_mha(H, d, d_h, seed=seed % 1000, spread=3)
    span = torch.linalg.qr((E[1:] - E[0]).T).Q  # (d, min(n - 1, d))
    narrow = layer._replace(W_K=span.expand(H, *span.shape), W_Q=layer.W_Q @ (layer.W_K.mT @ span))
    assert narrow.W_K.shape[-1] <= n - 1
    torch.testing.assert_close(mha(narrow, E, e), mha(layer, E, e), rtol=1e-7, atol=1e-9)


@pytest.mark.hostile("mahdavi-section-4-3")
def test_section_4_3_one_relu_unit_beats_any_attention_on_one_token():
    token, label = torch.tensor([[1, 0], [0, 1], [1, 1]]), torch.tensor([0, 0, 1])
    assert torch.equal((token.sum(1) - 1).clamp(min=0), label)
    layer = random_mha(50, 2, 2, seed=0, spread=3)
    outputs = mha(layer, token[:, None].double(), token.double())[:, 0]
    torch.testing.assert_close(outputs[0] + outputs[1], outputs[2])  # and 0 + 0 is not 1


@pytest.mark.parametrize(("H", "n", "d", "d_h"), [(4, 3, 5, 1), (3, 2, 4, 2), (6, 4, 3, 1)])
def test_self_attention_has_the_generic_rank_too(H, n, d, d_h):
    E = gaussian(torch.Generator().manual_seed(0), H * d, n, d)
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
def test_conjecture_general_position_gives_h_k_plus_1_and_not_more_than_its_sharp_family(n, d, H):
    m = (n - 1) * d // n
    generator = torch.Generator().manual_seed(n * d)
    E = differences_in_a_flat(n, d, H * d + 3, generator)
    some = E[: -(-12 // n)].flatten(0, 1).tolist()
    assert all(fmpz_mat([*rows]).det() != 0 for rows in itertools.combinations(some, d))
    e = gaussian(generator, len(E), d)
    most, served = H * m + d // n, H * m + 1
    layer = random_mha(H, d, m + 1, seed=0, spread=3)
    Z = mha_features(layer, E.double() / 64, e)
    assert numerical_rank(Z, rtol=1e-11) <= most <= bounds.affine_rank(H, d)
    enclosure = enclosed_features(layer, E.double()[:served] / 64, e[:served])
    assert certified_rank(enclosure, target=served).rank == served > H * d / 4


@pytest.mark.hostile("mahdavi-appendix-i")
@pytest.mark.parametrize(("H", "n", "d"), [(2, 2, 2), (3, 2, 4), (2, 5, 3)])
def test_appendix_i_full_rank_is_out_of_reach_for_a_constant_sum_only(H, n, d):
    """Of the same tokens, all but the last coordinate as they are: a sum of one, and free."""
    g = torch.Generator().manual_seed(H * n * d)
    free = (torch.randn(H * d, n, d, generator=g, **F64) * 2**20).round() / 2**20
    level = free.clone()
    level[..., -1] = 1 - free[..., :-1].sum(-1)
    e, layer = gaussian(g, H * d, d), random_mha(H, d, d, seed=0, spread=3)
    for E, T, holds in ((free, H * d, True), (level, H * (d - 1) + 1, True), (level, H * d, False)):
        Z = enclosed_features(layer, E[:T], e[:T])
        assert certified_rank(Z, target=T).full == holds


def centred(logits):
    """In whole numbers: times the number of tokens."""
    return logits.shape[1] * logits - logits.sum(dim=1, keepdim=True)


@pytest.mark.hostile("dana-section-3")
@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(0, 3), seeds)
def test_any_number_of_distributions_is_exact_but_independent_ones_are_not(d, more, seed):
    """A transformer without heads has a distribution for each of N > d tokens, all different."""
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
    others = centred(torch.eye(d + 1, N, dtype=torch.int64))
    assert certified_rank(others).rank == d + 1, "logits W E have rank d at most"


@pytest.mark.hostile("mahdavi-low-rank")
@settings(max_examples=40)
@given(st.integers(3, 6), st.integers(0, 2), st.sampled_from([0.1, 3.0, 30.0]), seeds)
def test_a_head_two_narrower_than_the_context_loses_attention(n, more, spread, seed):
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
    keys, asks = hostile.integers(seed, d, n - 2), hostile.integers(seed + 1, n - 2, n)
    logits = hostile.integers(seed + 2, n, d) @ keys @ asks  # of any head of width n - 2
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
