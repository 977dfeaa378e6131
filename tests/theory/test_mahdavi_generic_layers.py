"""Our own theorems: generic rank, one instance for almost all, labels in the attention."""

import itertools
import math

import pytest
import torch
from flint import fmpz_mat
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem import MHAWeights, mha, mha_features, random_mha
from attnmem.core import bounds
from attnmem.theory.certificates import enclosed_features
from attnmem.theory.independence import certified_rank, numerical_rank
from attnmem.theory.scalars import memorize_scalars

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


def shared_rank(H, n, d):
    """Our count for a shared context: H min(n - 1, d) + [n <= d]."""
    return bounds.affine_span_rank(H, min(n - 1, d), through_origin=n > d)


@pytest.mark.parametrize(
    ("H", "n", "d"), [(1, 3, 3), (3, 4, 5), (2, 6, 6), (3, 1, 4), (2, 4, 3), (3, 5, 2), (4, 2, 1)]
)
def test_the_instance_with_a_shared_context_has_the_full_affine_rank(H, n, d):
    """Independent tokens if n <= d, the moment curve if not; k^T x_i = i for both."""
    E, keys = torch.eye(d, **F64)[:n], torch.zeros(d, **F64)
    keys[:n] = torch.arange(min(n, d), **F64)
    if n > d:
        E = torch.arange(n, **F64)[:, None] ** torch.arange(1, d + 1)
        keys = torch.eye(d, **F64)[0]
    torch.testing.assert_close(E @ keys, torch.arange(n, **F64))
    q = torch.ones(d, **F64) / 4
    T = shared_rank(H, n, d)
    e = torch.linspace(-3, 4, T, **F64)[:, None] * q  # all on one line
    layer = instance(H, q, keys, torch.arange(2, H + 2, **F64).sqrt())
    assert certified_rank(enclosed_features(layer, E, e), target=T).rank == T


@pytest.mark.parametrize(("H", "n", "d", "d_h"), [(4, 3, 5, 1), (3, 2, 4, 2), (6, 4, 3, 1)])
def test_self_attention_has_the_generic_rank_too(H, n, d, d_h):
    E = gaussian(torch.Generator().manual_seed(0), H * d, n, d)
    layer = random_mha(H, d, d_h, seed=0, spread=3)
    proof = certified_rank(enclosed_features(layer, E, E[:, 0].clone()), target=H * d)
    assert proof.rank == H * d


# --- all data in general position -----------------------------------------------------------------


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
