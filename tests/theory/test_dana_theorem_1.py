"""Theorem 1 of Dana et al. and its corollary: draws that are fitted, exact encoders, and built."""

import itertools

import pytest
import torch

from attnmem import AoTWeights, aot, aot_features, memorize_aot
from attnmem.core import sequences as construction
from attnmem.theory.certificates import certified_associations, enclosed_offers
from attnmem.theory.independence import certified_rank

import hostile
import oracles
from oracles import F64, ExactTransformer


def square(seed):
    """A draw whose ``F`` on all pairs of ten tokens is square, and targets."""
    pairs = torch.cartesian_prod(torch.arange(10), torch.arange(10))
    drawn = construction.random_aot(10, 2, 2, 2, 49, spread=30.0, seed=seed)
    W_U = construction.circle(10)
    tokens = torch.randint(10, (100,), generator=torch.Generator().manual_seed(seed))
    return drawn, W_U, pairs, W_U[tokens]


@pytest.mark.parametrize("seed", [0, 1, 2, 5, 7, 8])
def test_a_draw_is_fitted(seed):
    drawn, W_U, pairs, targets = square(seed)
    logits = aot(construction.fitted(drawn, W_U, pairs, targets), pairs.flip(0)).flip(0)
    torch.testing.assert_close(logits, targets @ W_U.T, rtol=0, atol=2e-6)


def test_a_draw_with_dependent_rows_is_refused():
    with pytest.raises(ValueError, match=r"^drawn: .* F has rank 9\d in float64, for 100 sequen"):
        construction.fitted(*square(seed=3))


def test_more_sequences_than_columns_are_not_fitted():
    drawn = construction.random_aot(4, 2, 2, 1, 3, spread=3.0, seed=0)
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))[:6]
    with pytest.raises(ValueError, match=r"^sequences: got T_0 = 6; expected T_0 <= .* = 5$"):
        construction.fitted(
            drawn, construction.circle(4), pairs, construction.circle(4)[pairs[:, 0]]
        )


def distinct_sequences(generator, N, S, T):
    codes = torch.randperm(N**S, generator=generator)[:T]
    return torch.stack([codes // N**s % N for s in range(S)], dim=1)


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
    lead = construction.margins(aot(weights, sequences), tokens)
    assert 0 < proof.margin <= float(lead.min()) + 1e-6
    assert certified_rank(enclosed_offers(weights, sequences), target=202).rank == 202
    wrong = (tokens + 1) % 10
    assert certified_associations(weights, sequences, wrong).memorized == 0


# --- exact transformers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("N", "S", "d", "d_h", "H"), [(3, 1, 2, 1, 2), (2, 5, 3, 2, 1), (5, 3, 2, 2, 3)]
)
def test_exact_transformers_are_those_of_the_library(N, S, d, d_h, H):
    sequences = hostile.every_sequence(N, S)[:7]
    exact = ExactTransformer.drawn(S, N, S, d, d_h, H, size=1)
    F = [[float(x) for x in row] for row in exact.offered(sequences.tolist())]
    offers = construction.offered(AoTWeights(*exact.weights()), sequences)
    torch.testing.assert_close(offers, torch.tensor(F, **F64), rtol=1e-9, atol=1e-9)


@pytest.mark.hostile("dana-theorem-1-appendix")
def test_theorem_1_appendix_the_block_is_singular():
    """Even where the rows have full rank: the likely row is not zero, and its block is.

    Orthogonality is no reason for one, and neither is the rank of the likely rows, once there are
    more columns than these.
    """
    F = torch.tensor([[0.0, 1], [2, 0], [0, 0]], **F64)  # rows: sequences, the first one likely
    twice = torch.arange(3)[:, None].repeat(1, 2)  # equal tokens, no positions: attention is idle
    zero = torch.zeros(1, 2, 2, **F64)
    weights = AoTWeights(F, torch.zeros(2, 2, **F64), zero, zero, zero + torch.eye(2), zero, F)
    assert torch.equal(aot_features(weights, twice), F)
    # F^T = U Sigma V with U the unit matrix, Sigma = diag(2, 1) and V a permutation: all exact.
    V = [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    sigma = [[2, 0, 0], [0, 1, 0]]
    assert oracles.rational(sigma) * oracles.rational(V) == oracles.rational(F.T)
    assert oracles.rational(V) * oracles.rational(V).transpose() == oracles.rational(
        torch.eye(3, dtype=torch.int64)
    )
    assert oracles.rank(F[:1]) == 1  # the likely sequence is told apart
    assert oracles.rank([row[:1] for row in V[:1]]) == 0  # and its block P_1 V P_1^T is zero
    assert oracles.rank([row[:2] for row in V[:2]]) == 2 == oracles.rank(F[:2])


SQUARE = [(1, 0), (0, 1), (-1, 0), (0, -1)]  # four tokens of length one, with integers


@pytest.mark.hostile("dana-finding-exact")
def test_finding_exact_without_a_rounding_error():
    """``F [M^T; W_O^T] = E`` solved, ``M`` moved into the embedding, and all computed again."""
    d, d_h, H, N, S = 2, 1, 3, 5, 3
    sequences = [(0, 1, 2), (0, 1, 3), (4, 1, 3), (2, 2, 2), (3, 3, 0)]  # shared and repeated
    exact = next(
        model
        for model in (ExactTransformer.drawn(seed, N, S, d, d_h, H) for seed in range(99))
        if oracles.rank(model.offered(sequences)) == 5
    )
    F = oracles.rational(exact.offered(sequences))
    built = 0
    for labels in itertools.islice(hostile.labelings(5, 4), 0, None, 17):
        E = oracles.rational([SQUARE[label] for label in labels])
        solution = F.solve(E)
        rows = oracles.fractions(solution)
        M = oracles.rational([list(column) for column in zip(*rows[:d], strict=True)])
        if M.rank() < d:
            continue
        back = M.inv()
        move = lambda vectors, by: oracles.fractions(oracles.rational(vectors) * by)  # noqa: E731
        moved = ExactTransformer(
            move(exact.embedding, M.transpose()),
            move(exact.positions, M.transpose()),
            move(exact.queries, back),
            move(exact.keys, back),
            [move(V, back) for V in exact.values],
        )
        offers = moved.offered(sequences)
        for t, row in enumerate(offers):
            heads = oracles.averages(row[d:], rows[d:])
            assert tuple(a + b for a, b in zip(row[:d], heads, strict=True)) == SQUARE[labels[t]]
        W_U = torch.tensor([*SQUARE, (0.6, 0.8)], **F64)
        targets = W_U[list(labels)]
        fitted = construction.fitted(exact.weights()[:5], W_U, torch.tensor(sequences), targets)
        logits = aot(fitted, torch.tensor(sequences))
        torch.testing.assert_close(logits, targets @ W_U.T, rtol=1e-6, atol=1e-6)
        built += 1
    assert built > 40


@pytest.mark.hostile("dana-finding-exact")
@pytest.mark.parametrize("labels", [(0,) * 5, (0, 3, 0, 3, 3)], ids=["one token", "antipodes"])
def test_finding_exact_targets_on_a_line(labels):
    """They are memorized, although the map ``M`` of a square ``F``, to be moved, has no inverse."""
    sequences = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]
    E = [SQUARE[2 * (label > 0)] for label in labels]  # rows 0 and 3 of a circle of six
    for seed in range(20):
        F = oracles.rational(ExactTransformer.drawn(seed, 5, 2, 2, 1, 3).offered(sequences))
        if F.rank() == 5:
            M = oracles.fractions(F.solve(oracles.rational(E)))[:2]
            assert oracles.rank(M) < 2
    tokens, wanted = torch.tensor(sequences), torch.tensor(labels)
    sizes = {"vocab": 6, "dim": 2, "head_dim": 1, "heads": 3, "seed": 0}
    weights = memorize_aot(tokens, wanted, **sizes)
    assert (aot(weights, tokens).argmax(1) == wanted).all()
