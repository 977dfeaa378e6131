"""Theorem 1 of Mahdavi et al.: its steps, its hypotheses just held or just missed, and built.

Features are exact fractions where integers allow it (softmax in base 2), and balls where weights of
the library are judged.
"""

import math

import pytest
import torch
from flint import arb_mat
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem import MHAWeights, memorize_mha, mha, mha_attention, mha_features
from attnmem.core import bounds, memorize
from attnmem.theory.independence import numerical_rank

import hostile
import oracles
from oracles import F64, gaussian, uniform

ADMISSIBLE = {name: (sizes, data) for name, sizes, data in hostile.admissible()}


admissible = pytest.mark.parametrize("name", ADMISSIBLE)


def layer(W_log2):
    """A layer whose attention is the softmax in base 2 of ``E W e``, one map a head."""
    H, d, _ = W_log2.shape
    rest = torch.zeros(H, d, 1, **F64), torch.zeros(H, 1, **F64), torch.zeros(1, 1, **F64)
    eye = torch.eye(d, **F64).expand(H, d, d)
    return MHAWeights(W_log2.mT.double() * math.log(2), eye, *rest)


def wishes(heads, slots, n):
    """Extreme positive attention, as logarithms: each slot wants almost one token, another each."""
    far = torch.zeros(heads, slots, n, **F64)
    for slot in range(slots):
        far[:, slot, slot % n] = 300.0
    return [far.log_softmax(-1), (-far).log_softmax(-1), torch.zeros_like(far).log_softmax(-1)]


def farthest(alpha, log_alpha):
    """The largest distance of the logarithms of attention weights from what was asked."""
    pairs = zip(alpha, log_alpha.tolist(), strict=True)
    return max(abs(float(a.log()) - asked) for a, asked in pairs)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("n", "d", "H"), [(1, 2, 3), (2, 3, 5), (5, 3, 2), (3, 7, 2)])
def test_exact_features_are_those_of_the_library(n, d, H, shared):
    W = hostile.maps(n, H, d, 2)
    E = hostile.integers(n, n, d) if shared else hostile.integers(n, 5, n, d)
    e = hostile.integers(n + 9, 5, d, size=1)
    exact = [[float(x) for x in row] for row in oracles.features2(W, E, e)]
    Z = mha_features(layer(W), E.double(), e.double())
    torch.testing.assert_close(Z, torch.tensor(exact, **F64), rtol=1e-9, atol=1e-9)


# --- the statements -------------------------------------------------------------------------------


@pytest.mark.hostile("mahdavi-theorem-1", "mahdavi-proposition-1", "mahdavi-step-1")
@admissible
def test_theorem_1_meets_every_labeling(name):
    """The labels are the unit matrix: outputs are linear in the read-out, so it has them all."""
    (H, n, d, d_h), data = ADMISSIBLE[name]
    E, e = data.double()
    T = len(e)
    eye = torch.eye(T, **F64)
    weights = memorize_mha(E, e, eye, heads=H, head_dim=d_h, seed=0)
    assert weights.W_K.shape == (H, d, d_h)
    assert oracles.ball_error(weights, E, e, eye) < 1e-8
    Z = oracles.ball_features(weights, E, e)
    assert oracles.surely_independent(Z)
    r = min(n, d_h)
    for h in range(1, H):  # Step 1: the first heads have as much as they promise
        part = [row[: h * d] for row in Z.tolist()[: h * (r - 1) + 1]]
        assert oracles.surely_independent(arb_mat(part))


@pytest.mark.hostile("mahdavi-theorem-1", "mahdavi-proposition-1")
@pytest.mark.parametrize("case", [*hostile.inadmissible()], ids=lambda case: case[0])
def test_theorem_1_is_refused_by_name(case):
    """One hypothesis just fails."""
    _, named, data = case
    E, e = data.double()
    labels = torch.zeros(len(e), **F64)
    labels[-1] = 1
    with pytest.raises(ValueError, match=rf"^{named}: got "):
        memorize_mha(E, e, labels, heads=2, head_dim=3, seed=0)


@pytest.mark.hostile("mahdavi-step-2")
def test_step_2_of_extreme_scales():
    """A square read-out is the only one."""
    Z = torch.tensor([[1, 1, 0], [1, 2, 0], [0, 0, 1]], **F64)
    inverse = torch.tensor([[2, -1, 0], [-1, 1, 0], [0, 0, 1]], **F64)
    torch.testing.assert_close(memorize.read_out(Z, torch.eye(3, **F64)), inverse)
    scale = torch.tensor([2.0**-300, 1.0, 2.0**300], **F64)
    M = memorize.read_out(scale[:, None] * Z, torch.diag(scale))
    torch.testing.assert_close(M, inverse)
    wide = torch.cat([Z, torch.ones(3, 2, **F64)], dim=1)
    torch.testing.assert_close(wide @ memorize.read_out(wide, Z), Z)


@pytest.mark.hostile("mahdavi-claim-1")
@admissible
def test_claim_1_at_whole_width_and_extreme_attention(name):
    (_, n, _, d_h), data = ADMISSIBLE[name]
    E, e = data.double()
    r = min(n, d_h, len(e))
    served = torch.arange(len(e) - r, len(e))[None]  # the last ones: the largest queries
    duals, _ = memorize.dual_basis(e, served)
    for wish in wishes(1, r, n):
        keys = memorize.interpolating_keys(E, served, wish)[0]
        assert keys.shape[1] == r <= d_h
        for slot, t in enumerate(served[0]):
            with oracles.workprec(300):
                context = E if E.ndim == 2 else E[t]
                alpha = oracles.ball_attention(duals[0], keys, context, e[t])
                assert farthest(alpha, wish[0, slot]) < 1e-6


@pytest.mark.hostile("mahdavi-claim-2", "mahdavi-lemma-3", "mahdavi-lemma-4")
@admissible
def test_claim_2_silence_at_the_full_count(name):
    """Whatever is asked of the head elsewhere."""
    (_, n, _, d_h), data = ADMISSIBLE[name]
    E, e = data.double()
    k, T = min(min(n, d_h) - 1, len(e) - 1), len(e)
    served = torch.arange(k)[None]
    generator = torch.Generator().manual_seed(0)
    duals, free = memorize.dual_basis(e, served)
    u = memorize.separating_direction(E, generator)
    v = memorize.orthogonal_direction(free, e, served, generator)
    own = [E if E.ndim == 2 else E[t] for t in range(T)]
    exact_u, exact_v = oracles.rows_of(u[None])[0], oracles.rows_of(v)[0]
    corners = []
    for t in range(T):  # Lemma 3, on the numbers that the floats are
        heights = [oracles.dot(token, exact_u) for token in oracles.rows_of(own[t])]
        pull = oracles.dot(oracles.rows_of(e[t][None])[0], exact_v)
        assert len(set(heights)) == n
        assert abs(pull) < 1e-13 * float(e[t].norm()) if t < k else pull != 0
        corners.append(max(range(n), key=lambda i, h=heights, p=pull: p * h[i]))
    epsilon = 2.0**-40
    for wish in wishes(1, k, n):
        keys = memorize.interpolating_keys(E, served, wish)
        c = memorize.saturating_scale(E, e, served, duals, keys, u, v, tail=epsilon)
        W_K = torch.cat([keys[0], c * u[:, None]], dim=1)
        W_Q = torch.cat([duals[0], v[0, :, None]], dim=1)
        for t in range(T):
            with oracles.workprec(300):
                alpha = oracles.ball_attention(W_Q, W_K, own[t], e[t])
                if t < k:
                    assert farthest(alpha, wish[0, t]) < 1e-4
                else:
                    assert 1 - alpha[corners[t]] <= epsilon * (1 + 2.0**-10)


@pytest.mark.hostile("mahdavi-appendix-b2")
@pytest.mark.parametrize("tail", [0.25, 2.0**-20, 2.0**-52])
@pytest.mark.parametrize("against", [-700.0, 0.0, 700.0])
def test_appendix_b2_two_tokens_in_closed_form(tail, against):
    """One served and one silent example: ``1 - alpha = tail / (1 + tail)``, to the digit."""
    E, e = torch.eye(3, **F64)[:2], torch.tensor([[1.0, 0, 0], [1, 2, 0]], **F64)
    served, u = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([3.0, 1, 0], **F64)
    v = torch.tensor([[0.0, 1, 0]], **F64)
    duals = torch.tensor([[[1.0], [0], [0]]], **F64)
    keys = torch.tensor([[[0.0], [against], [0]]], **F64)  # the silent one hears it, too
    c = memorize.saturating_scale(E, e, served, duals, keys, u, v, tail=tail)
    needed = (math.log(1 / tail) + against) / 4  # v . e is 2, and u tells the tokens apart by 2
    assert float(c[0]) == pytest.approx(max(0.0, needed))
    W_K = torch.cat([keys[0], c * u[:, None]], dim=1)
    W_Q = torch.cat([duals[0], v[0, :, None]], dim=1)
    missing = 1 - float(oracles.ball_attention(W_Q, W_K, E, e[1])[0])
    if needed > 0:
        assert missing == pytest.approx(tail / (1 + tail), rel=1e-3, abs=2.0**-52)
    else:  # what is asked of the served example silences this one by itself
        assert missing <= tail
    # With a tie there is no finite scale, and none is returned.
    tie = torch.ones(3, **F64)
    c = memorize.saturating_scale(E, e, served, duals, keys.abs(), tie, v, tail=tail)
    assert not torch.isfinite(c).all()


@pytest.mark.hostile("mahdavi-remark-1")
@pytest.mark.parametrize(("H", "n", "d", "d_h"), [(1, 5, 7, 5), (3, 4, 5, 2), (2, 3, 7, 5)])
def test_remark_1_every_kruskal_rank_below_n(H, n, d, d_h):
    E = torch.eye(d, **F64)[:n]
    for Q in range(1, n):
        T = 1 + H * (min(Q, d_h) - 1)
        e = hostile.moments(T, Q, d)
        assert oracles.kruskal(e) == oracles.rank(e) == min(Q, T)
        eye = torch.eye(T, **F64)
        for contexts in (E, E.repeat(T, 1, 1)):
            weights = memorize_mha(contexts, e.double(), eye, heads=H, head_dim=d_h, seed=0)
            assert oracles.ball_error(weights, contexts, e.double(), eye) < 1e-8
        assert bounds.mha_capacity(H, n, d_h, query_rank=Q) == T
        beyond = hostile.moments(1 + H * Q, Q, d).double()
        if min(n, d_h) > Q:  # one more a head: refused for the queries, since n would allow it
            with pytest.raises(ValueError, match=r"^(queries|examples): got "):
                memorize_mha(E, beyond, beyond[:, 0], heads=H, head_dim=d_h, seed=0)


@pytest.mark.hostile("mahdavi-appendix-c")
@admissible
def test_appendix_c_skip_with_all_outputs(name):
    """Labels that the skip gives alone, labels against it, and ``d_out = d``, the most."""
    (H, _, d, d_h), data = ADMISSIBLE[name]
    E, e = data.double()
    every = torch.eye(len(e), d, **F64).roll(1, 0)
    for labels in (every, -(2.0**20) * e, 2.0**-20 * e[:, :1] + 2.0**-20):
        weights = memorize_mha(E, e, labels, heads=H, head_dim=d_h, seed=0, skip=True)
        error = oracles.ball_error(weights, E, e, labels, skip=True)
        assert error < 1e-8 * float(labels.abs().max())
    more = torch.zeros(len(e), d + 1, **F64)
    with pytest.raises(ValueError, match=rf"^labels: got d_out = {d + 1}"):
        memorize_mha(E, e, more, heads=H, head_dim=d_h, seed=0, skip=True)


# --- built on random data -------------------------------------------------------------------------


def examples(T, n, d, shared, outputs=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    contexts = uniform(g, n, d) if shared else uniform(g, T, n, d)
    return contexts, uniform(g, T, d), uniform(g, T, outputs)


def error(weights, contexts, queries, labels, skip=False):
    """One example at a time, as no batched evaluation rounds: the most different order."""
    rows = [
        mha(weights, contexts if contexts.ndim == 2 else contexts[t][None], e[None], skip=skip)
        for t, e in enumerate(queries)
    ]
    return float((torch.cat(rows) - labels.reshape(len(labels), -1)).abs().max())


@st.composite
def tasks(draw):
    """Sizes that the theorem admits."""
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
    capacity = bounds.mha_capacity(sizes["heads"], sizes["n"], sizes["head_dim"])
    return sizes | {"T": draw(st.integers(1, capacity))}


@settings(max_examples=120)
@given(tasks())
def test_every_admissible_task_is_memorized(case):
    sizes = {name: case[name] for name in ("T", "n", "d", "shared", "outputs", "seed")}
    contexts, queries, labels = examples(**sizes)
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


def test_the_size_of_the_paper_with_a_shared_context():
    contexts, queries, labels = examples(bounds.mha_capacity(32, 32, 64), 32, 64, shared=True)
    weights = memorize_mha(contexts, queries, labels, heads=32, head_dim=32, seed=1)
    assert error(weights, contexts, queries, labels) <= 1e-8


def test_nearly_dependent_tokens_are_told_apart():
    """To 1e-8, or refused."""
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


def test_refused_example_does_not_depend_on_rounding():
    """Coordinates in another order give the same problem, with other sums."""
    queries = gaussian(0, 9, 3) @ gaussian(1, 3, 12)
    contexts, _, labels = examples(9, 6, 12, shared=True)
    messages = set()
    for seed in range(10):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        with pytest.raises(ValueError, match=r"^queries: ") as refusal:
            memorize_mha(contexts[:, order], queries[:, order], labels, heads=3, head_dim=6, seed=0)
        messages.add(str(refusal.value))
    assert len(messages) == 1


def test_float32_data_give_float64_weights():
    contexts, queries, labels = (x.float() for x in examples(29, 8, 16, shared=True))
    weights = memorize_mha(contexts, queries, labels[:, 0], heads=4, head_dim=8, seed=0)
    assert weights.W_Q.dtype == torch.float64
    assert error(weights, contexts, queries, labels) <= 1e-8


@pytest.mark.parametrize("shared", [True, False])
def test_claim_2_heads_are_one_hot_where_they_idle(shared):
    T, n, d, heads = 29, 8, 16, 4
    contexts, queries, labels = examples(T, n, d, shared)
    weights = memorize_mha(contexts, queries, labels, heads=heads, head_dim=n, seed=0)
    alpha = mha_attention(weights, contexts, queries)
    served = torch.zeros(T, heads, dtype=torch.bool)
    served[memorize.serve(T, heads), torch.arange(heads)[:, None]] = True
    largest = alpha.amax(dim=-1)
    assert (largest[~served] == 1.0).all()  # to the last bit: what the computed scale promises
    assert (largest[served] < 0.99).all()
    assert (alpha[served] > 0).all()


@pytest.mark.hostile("mahdavi-readings")
@pytest.mark.parametrize(("H", "n", "d"), [(1, 2, 3), (2, 3, 4), (5, 4, 9), (3, 8, 9)])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_readings_of_theorem_1_with_their_constants(H, n, d, number):
    d_h, d_v, outputs = {1: (n, 1, 1), 2: (d, d, 1), 3: (d, d, d)}[number]
    unit = H * n * d if number == 1 else H * d * d
    T = bounds.mha_capacity(H, n, d_h)
    E, e, y = examples(T, n, d, shared=False, outputs=outputs)
    layer = memorize_mha(E, e, y, heads=H, head_dim=d_h, seed=0, value_dim=d_v)
    parameters = sum(W.numel() for W in layer)
    assert (number + 1) * unit <= parameters <= (number + 2) * unit
    assert parameters >= T * outputs >= H * n * outputs / 2
    if number == 3:
        assert parameters <= 10 * d / n * T * outputs
