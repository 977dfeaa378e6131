"""Hostile tests of Mahdavi et al.: hypotheses that just hold, or just fail; oracles of our own.

Features are exact fractions where integers allow it (softmax in base 2), and balls where weights of
the library are judged.
"""

import itertools
import math

import pytest
import torch
from flint import arb_mat

from attnmem import MHAWeights, memorize_mha, mha, mha_features
from attnmem.core import bounds, memorize
from attnmem.theory.independence import certified_rank
from attnmem.theory.near import memorize_scalars

import hostile
import oracles

F64 = {"dtype": torch.float64}
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


def test_the_exact_features_are_those_of_the_library():
    for seed, (n, d, H) in enumerate([(1, 2, 3), (2, 3, 5), (5, 3, 2), (3, 7, 2)]):
        W = hostile.maps(seed, H, d, 2)
        for E in (hostile.integers(seed, n, d), hostile.integers(seed, 5, n, d)):
            e = hostile.integers(seed + 9, 5, d, size=1)
            rows = [[float(x) for x in row] for row in oracles.features2(W, E, e)]
            exact = torch.tensor(rows, **F64)
            Z = mha_features(layer(W), E.double(), e.double())
            torch.testing.assert_close(Z, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.hostile("mahdavi-theorem-1", "mahdavi-proposition-1", "mahdavi-step-1")
@admissible
def test_theorem_1_at_full_count_meets_every_labeling(name):
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
def test_theorem_1_is_refused_by_name_where_one_hypothesis_just_fails(case):
    _, named, data = case
    E, e = data.double()
    labels = torch.zeros(len(e), **F64)
    labels[-1] = 1
    with pytest.raises(ValueError, match=rf"^{named}: got "):
        memorize_mha(E, e, labels, heads=2, head_dim=3, seed=0)


@pytest.mark.hostile("mahdavi-step-2")
def test_step_2_a_square_read_out_is_the_only_one_and_has_extreme_scales():
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
def test_claim_1_the_whole_width_and_extreme_attention(name):
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
def test_claim_2_silence_at_the_full_count_whatever_is_asked_elsewhere(name):
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
def test_remark_1_every_kruskal_rank_below_n_at_its_full_count(H, n, d, d_h):
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
def test_appendix_c_a_skip_with_as_many_outputs_as_there_is_room_for(name):
    """Labels that the skip gives alone, labels against it, and ``d_out = d``."""
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


@pytest.mark.hostile("mahdavi-proposition-2")
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("H", [1, 2, 3])
def test_proposition_2_over_all_attention_on_tokens_of_every_kind(H, d):
    for name, tokens in hostile.flats(d):
        n, (a, through) = len(tokens), oracles.affine(tokens)
        largest = oracles.corner_rank(tokens[None], H)
        assert largest <= bounds.shared_context_rank(H, n), name
        assert largest == bounds.affine_span_rank(H, a, through), name
        if oracles.rank(tokens) == n:
            assert largest == bounds.shared_context_rank(H, n) == 1 + H * (n - 1)


@pytest.mark.hostile("mahdavi-proposition-5")
@pytest.mark.parametrize(("d", "H"), [(1, 3), (2, 1), (2, 3), (3, 2), (5, 1)])
def test_proposition_5_over_all_tokens_of_one_sum_and_all_attention(d, H):
    """Any head may choose any token of the lattice: the rank of all such rows."""
    for total in (-1, 0, 1, 2):
        tokens = hostile.constant_sum(d, total)
        assert (tokens.sum(1) == total).all()
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
def test_proposition_3_one_unit_over_all_patterns_of_activity(n, d):
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
def test_proposition_4_where_assumption_3_just_holds_and_just_fails(n, d, query):
    """``n`` a power of two: the layer's averages are exact in floating point."""
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
                found = oracles.rank(M)
                assert found >= least
                strict |= found > least
                below = top + [[1] * b + row for row in D]  # no block of zeros
                broken |= oracles.rank(below) < least
                if shape == (2, 1, 1, 1):
                    assert certified_rank(torch.tensor(M)).rank == found
    assert strict
    assert broken


@pytest.mark.hostile("mahdavi-lemma-5")
def test_lemma_5_to_the_last_digit_in_floating_point():
    M = torch.diag(torch.tensor([2.0**30, 1.0], **F64))
    short = torch.diag(torch.tensor([0.0, math.nextafter(-1.0, 0.0)], **F64))
    assert certified_rank(M + short).rank == oracles.rank(M + short) == 2
    assert certified_rank(M - torch.diag(torch.tensor([0.0, 1.0], **F64))).rank == 1


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
def test_finding_generic_at_the_edges_exactly(H, n, d, d_h, kind):
    most = expected(H, n, d, kind)
    for T in {1, max(1, most - 1), most, most + 2}:
        best = 0
        for seed in range(40):
            if best == min(T, most):
                break
            shape = (T, n, d) if kind == "own" else (n, d)
            E = hostile.integers(seed, *shape, size=5)
            e = hostile.integers(seed + 50, T, d, size=3)
            if kind.startswith("queries"):
                e = torch.arange(1, T + 1)[:, None] * hostile.integers(seed + 70, 1, d)
            Z = oracles.features2(hostile.maps(seed + 99, H, d, d_h), E, e)
            assert oracles.rank(Z) <= most
            best = max(best, oracles.rank(Z))
        assert best == min(T, most)
    if kind == "own" and n == 1:
        with pytest.raises(ValueError, match=r"^context: got 1"):
            bounds.own_context_rank(H, n, d)
    elif kind == "own":
        assert bounds.own_context_rank(H, n, d) == most
    elif n <= d:
        assert bounds.shared_context_rank(H, n) == most
    else:
        assert bounds.affine_span_rank(H, d) - 1 == most < bounds.shared_context_rank(H, n)


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
    one = torch.eye(T, **F64)
    far = 2.0 ** torch.linspace(-20, 20, T, **F64)
    shared = [torch.eye(d, **F64)[:n], 2 * torch.eye(d, **F64)[:n] - 1]
    for E in shared[: 1 + (d > 3)]:
        for y in (one[0], -one[-1], far, -far, one[0] * 0 + 3):
            weights = memorize_scalars(E, e, y, heads=H)
            assert weights.W_Q.shape == (H, d, 2)
            error = oracles.ball_error(weights, E, e, y[:, None])
            assert error <= 1e-8 * float(y.abs().max())
