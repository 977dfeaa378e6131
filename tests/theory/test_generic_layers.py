"""Our own theorems: generic rank, one instance for almost all, labels in the attention."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem import bounds
from attnmem.attention import MHAWeights, mha, mha_features
from attnmem.certificates import certified_memorization, enclosed_features
from attnmem.constructions import memorize_mha, memorize_scalars, random_mha
from attnmem.independence import certified_rank, numerical_rank

F64 = {"dtype": torch.float64}


def gaussian(generator, *shape):
    return torch.randn(*shape, generator=generator, **F64)


# --- the instances that the proofs choose ---------------------------------------------------------


def instance(heads, queries, keys, scales):
    """``W_K W_Q^T = kappa_h k q^T`` of rank one, for all heads."""
    d = len(keys)
    W_K = scales[:, None, None] * keys[None, :, None]
    W_Q = queries.expand(heads, d)[..., None].clone()
    rest = torch.zeros(heads, d, 1, **F64), torch.zeros(heads, 1, **F64)
    return MHAWeights(W_Q, W_K, *rest, torch.zeros(1, 1, **F64))


@pytest.mark.parametrize(("H", "n", "d"), [(1, 2, 3), (3, 2, 2), (4, 5, 3)])
def test_the_instance_with_own_contexts_is_a_kronecker_product(H, n, d):
    kappa, s = torch.arange(1, H + 1, **F64), torch.linspace(-1, 3, H, **F64)
    q = torch.eye(d, **F64)[0]
    E = torch.zeros(H * d, n, d, **F64)
    E[:, 0] = torch.eye(d, **F64).repeat(H, 1)
    e = s.repeat_interleave(d)[:, None] * q
    layer = instance(H, q, torch.ones(d, **F64), kappa)
    Z = mha_features(layer, E, e)
    A = torch.sigmoid(s[:, None] * kappa - math.log(n - 1))
    torch.testing.assert_close(Z, torch.kron(A, torch.eye(d, **F64)))
    assert certified_rank(enclosed_features(layer, E, e), target=H * d).full


@pytest.mark.parametrize(("H", "n", "d"), [(1, 3, 3), (3, 4, 5), (2, 6, 6)])
def test_the_instance_with_a_shared_context_has_the_full_affine_rank(H, n, d):
    E = torch.eye(d, **F64)[:n]
    keys = torch.zeros(d, **F64)
    keys[:n] = torch.arange(n, **F64)
    q = torch.ones(d, **F64) / 4
    T = bounds.shared_context_rank(H, n)
    e = torch.linspace(-3, 3, T, **F64)[:, None] * q  # all on one line
    layer = instance(H, q, keys, torch.arange(2, H + 2, **F64).sqrt())
    assert certified_rank(enclosed_features(layer, E, e), target=T).rank == T


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.data())
def test_finding_generic_random_layers_reach_the_affine_bound(H, n, d, d_h, data):
    kind = data.draw(st.sampled_from(["shared", "own", "flat"]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    if kind == "shared":
        T = bounds.affine_span_rank(H, min(n - 1, d), n > d)
        E = gaussian(generator, n, d)
    elif n == 1:
        return  # one token leaves no choice: Theorem of generic rank asks for two
    elif kind == "own":
        T = H * d
        E = gaussian(generator, T, n, d)
    else:
        T = bounds.affine_span_rank(H, d - 1)
        E = (gaussian(generator, T, n, d) * 2**20).round() / 2**20
        E[..., -1] = 1 - E[..., :-1].sum(-1)
    if T == 0 or (kind == "flat" and d == 1):
        return
    layer = random_mha(H, d, d_h, seed=data.draw(st.integers(0, 1000)), spread=3)
    enclosure = enclosed_features(layer, E, gaussian(generator, T, d))
    assert certified_rank(enclosure, target=T).rank == T


def test_one_token_leaves_no_choice():
    Z = mha_features(
        random_mha(4, 3, 3, seed=0), torch.randn(20, 1, 3, **F64), torch.randn(20, 3, **F64)
    )
    assert numerical_rank(Z) == 3


# --- labels in the attention ----------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(3, 12), st.integers(1, 6), st.data())
def test_finding_capacity_scalars_beyond_the_rank_are_memorized(d, heads, data):
    n = data.draw(st.integers(3, d))
    T = data.draw(st.integers(1, heads * (d - 1)))
    scale = 10.0 ** data.draw(st.integers(-6, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    context, queries = gaussian(generator, n, d), gaussian(generator, T, d)
    labels = scale * gaussian(generator, T)
    weights = memorize_scalars(context, queries, labels, heads=heads)
    assert weights.W_Q.shape == (heads, d, 2)
    assert weights.W_V.shape == (heads, d, 1)
    error = (mha(weights, context, queries)[:, 0] - labels).abs().max()
    assert error <= 1e-8 * labels.abs().max()


def test_finding_capacity_is_not_rounding_below_the_rank():
    """35 examples where no attention gives the features more than rank 11, certified."""
    H, n, d, T = 5, 3, 8, 35
    context, queries = torch.rand(n, d, **F64), torch.rand(T, d, **F64)
    labels = torch.rand(T, **F64)
    weights = memorize_scalars(context, queries, labels, heads=H)
    proof = certified_memorization(weights, context, queries, labels[:, None], most_bits=256)
    assert proof.error < 1e-9  # although
    assert proof.rank == 0  # no read-out could fit other labels with this attention
    Z = mha_features(weights, context, queries)
    assert numerical_rank(Z) <= bounds.shared_context_rank(H, n) == 11
    with pytest.raises(ValueError, match=r"^labels: got T = 35"):
        memorize_mha(context, queries, labels, heads=H, head_dim=n, seed=0)


def test_equal_labels_and_few_examples_are_no_special_case():
    context, queries = torch.rand(4, 6, **F64), torch.rand(3, 6, **F64)
    for labels in (torch.zeros(3, **F64), torch.full((3,), -2.5, **F64)):
        weights = memorize_scalars(context, queries, labels, heads=7)
        outputs = mha(weights, context, queries)[:, 0]
        torch.testing.assert_close(outputs, labels, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda E, e, y: (E[:2], e, y), "context: got 2 tokens"),
        (lambda E, e, y: (E[[0, 1, 1]], e, y), "context: got 3 tokens"),
        (lambda E, e, y: (E, e[[0] * 8 + [1] * 3], y), "queries: got dependent"),
        (lambda E, e, y: (E, e, y[:-1]), "labels: got shape"),
        (lambda E, e, y: (E, torch.cat([e, e]), torch.cat([y, y])), "labels: got T = 22 examples"),
        (lambda E, e, y: (E, e.log(), y), "queries: got .* NaN"),
        (lambda E, e, y: (E, torch.cat([e[:10], e[:1] + e[1:2]]), y), "queries: got example 10 in"),
    ],
)
def test_bad_input_is_refused_by_name(change, name):
    arguments = change(*(torch.randn(*s, **F64) for s in ((3, 6), (11, 6), (11,))))
    with pytest.raises(ValueError, match=f"^{name}"):
        memorize_scalars(*arguments, heads=3)
