"""Every statement of Dana et al. 2025, each against an oracle of its own."""

import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from attnmem import aot
from attnmem.theory import associations, counts
from attnmem.theory.associations import memorize_aot
from attnmem.theory.certificates import certified_associations, enclosed_offers
from attnmem.theory.independence import certified_rank

F64 = {"dtype": torch.float64}
quick = settings(max_examples=40)
seeds = st.integers(0, 2**32)


def distinct_sequences(generator, N, S, T):
    codes = torch.randperm(N**S, generator=generator)[:T]
    return torch.stack([codes // N**s % N for s in range(S)], dim=1)


# --- the theorem and its corollaries --------------------------------------------------------------


def square(seed):
    """A draw whose ``F`` on all pairs of ten tokens is square, and targets."""
    pairs = torch.cartesian_prod(torch.arange(10), torch.arange(10))
    drawn = associations.random_aot(10, 2, 2, 2, 49, spread=30.0, seed=seed)
    W_U = associations.circle(10)
    tokens = torch.randint(10, (100,), generator=torch.Generator().manual_seed(seed))
    return drawn, W_U, pairs, W_U[tokens]


@pytest.mark.parametrize("seed", [0, 1, 2, 5, 7, 8])
def test_a_draw_is_fitted(seed):
    drawn, W_U, pairs, targets = square(seed)
    logits = aot(associations.fitted(drawn, W_U, pairs, targets), pairs.flip(0)).flip(0)
    torch.testing.assert_close(logits, targets @ W_U.T, rtol=0, atol=2e-6)


def test_a_draw_with_dependent_rows_is_refused():
    with pytest.raises(ValueError, match=r"^drawn: .* F has rank 9\d in float64, for 100 sequen"):
        associations.fitted(*square(seed=3))


def test_more_sequences_than_f_has_columns_are_not_fitted():
    drawn = associations.random_aot(4, 2, 2, 1, 3, spread=3.0, seed=0)
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))[:6]
    with pytest.raises(ValueError, match=r"^sequences: got T_0 = 6; expected T_0 <= .* = 5$"):
        associations.fitted(
            drawn, associations.circle(4), pairs, associations.circle(4)[pairs[:, 0]]
        )


@pytest.mark.parametrize(
    ("N", "S", "d", "d_h", "H", "T"),
    [(10, 3, 2, 2, 499, 1000), (50, 2, 10, 10, 249, 2500), (50, 256, 16, 16, 31, 500)],
)
def test_corollary_1_at_the_sizes_of_the_book(N, S, d, d_h, H, T):
    generator = torch.Generator().manual_seed(0)
    if T == N**S:
        sequences = torch.cartesian_prod(*[torch.arange(N)] * S)
    else:
        sequences = torch.randint(N, (T, S), generator=generator)
    tokens = torch.randint(N, (T,), generator=generator)
    weights = memorize_aot(sequences, tokens, vocab=N, dim=d, head_dim=d_h, heads=H, seed=0)
    assert (aot(weights, sequences).argmax(-1) == tokens).all()


def test_corollary_1_is_certified():
    generator = torch.Generator().manual_seed(1)
    sequences = distinct_sequences(generator, 10, 3, 202)
    tokens = torch.randint(10, (202,), generator=generator)
    weights = memorize_aot(sequences, tokens, vocab=10, dim=2, head_dim=2, heads=100, seed=0)
    proof = certified_associations(weights, sequences, tokens)
    assert proof.memorized == 202
    lead = associations.margins(aot(weights, sequences), tokens)
    assert 0 < proof.margin <= float(lead.min()) + 1e-6
    assert certified_rank(enclosed_offers(weights, sequences), target=202).rank == 202
    wrong = (tokens + 1) % 10
    assert certified_associations(weights, sequences, wrong).memorized == 0


@pytest.mark.hostile("dana-remark-1")
@pytest.mark.parametrize(("N", "S", "d", "d_h", "H"), [(2, 3, 2, 2, 1), (7, 4, 2, 1, 6)])
def test_remark_1_counts_parameters_but_full_rank_leaves_c_infinite(N, S, d, d_h, H):
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
