"""Hostile tests of Dana et al.: hypotheses that just hold, or just fail; oracles of our own.

Attention is a softmax in base 2 of integers, so that transformers are exact fractions; logarithms
are integers (powers of two) or balls.
"""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from attnmem import AoTWeights, aot, aot_features
from attnmem.theory import associations
from attnmem.theory.associations import memorize_aot

import hostile
import oracles

F64 = {"dtype": torch.float64}


class Exact:
    """A transformer of integers or fractions, with rank-one attention in base 2.

    Of head ``h``, ``queries[h]`` and ``keys[h]`` are vectors, ``values[h]`` a matrix ``(d_h, d)``.
    """

    def __init__(self, embedding, positions, queries, keys, values):
        self.embedding, self.positions = embedding, positions
        self.queries, self.keys, self.values = queries, keys, values

    @classmethod
    def drawn(cls, seed, vocab, length, dim, head_dim, heads, size=2):
        shapes = ((vocab, dim), (length, dim), (heads, dim), (heads, dim), (heads, head_dim, dim))
        parts = (hostile.integers(seed + i, *s, size=size) for i, s in enumerate(shapes))
        return cls(*(part.tolist() for part in parts))

    def embedded(self, sequence):
        return [
            [a + b for a, b in zip(self.embedding[token], place, strict=True)]
            for token, place in zip(sequence, self.positions, strict=True)
        ]

    def offers(self, sequence):
        """``[x(t, S); W_V^1 A^1(t); ...]``, as fractions."""
        x = self.embedded(sequence)
        row = [Fraction(entry) for entry in x[-1]]
        for q, k, V in zip(self.queries, self.keys, self.values, strict=True):
            asked = oracles.dot(q, x[-1])
            logits = [asked * oracles.dot(k, token) for token in x]
            assert all(Fraction(logit).denominator == 1 for logit in logits)
            A = oracles.averages(oracles.softmax2(logits), oracles.rows_of(x))
            row += [oracles.dot(line, A) for line in V]
        return row

    def offered(self, sequences):
        return [self.offers(sequence) for sequence in sequences]

    def weights(self, W_O=None, W_U=None):
        """The same for the library, whose softmax has base e."""
        tensor = lambda x: torch.tensor(x, **F64)  # noqa: E731
        W_V = tensor(self.values)
        W_Q, W_K = (torch.zeros_like(W_V) for _ in range(2))
        W_Q[:, 0], W_K[:, 0] = math.log(2) * tensor(self.queries), tensor(self.keys)
        embedding = tensor(self.embedding)
        W_O = torch.zeros_like(W_V.mT) if W_O is None else W_O
        W_U = embedding if W_U is None else W_U
        return AoTWeights(embedding, tensor(self.positions), W_Q, W_K, W_V, W_O, W_U)


def test_the_exact_transformers_are_those_of_the_library():
    for seed, (N, S, d, d_h, H) in enumerate([(3, 1, 2, 1, 2), (2, 5, 3, 2, 1), (5, 3, 2, 2, 3)]):
        sequences = hostile.every_sequence(N, S)[:7]
        exact = Exact.drawn(seed, N, S, d, d_h, H, size=1)
        F = [[float(x) for x in row] for row in exact.offered(sequences.tolist())]
        found = associations.offered(exact.weights(), sequences)
        torch.testing.assert_close(found, torch.tensor(F, **F64), rtol=1e-9, atol=1e-9)


# --- encoders -------------------------------------------------------------------------------------


@pytest.mark.hostile("dana-proposition-1")
@pytest.mark.parametrize(("S", "d", "H"), [(1, 1, 3), (3, 1, 7), (2, 2, 5), (5, 3, 2)])
def test_proposition_1_the_logits_have_rank_d_however_many_heads_there_are(S, d, H):
    """Exactly, on every sequence, for logits of one, hundreds and thousands."""
    N = 7
    sequences = hostile.every_sequence(2, S)
    for seed, size in enumerate((1, 3, 9)):
        exact = Exact.drawn(seed, N, S, d, d, H, size=size)
        W_O, W_U = hostile.integers(seed + 7, H, d, d), hostile.integers(seed + 8, N, d)
        out = torch.cat([torch.eye(d, dtype=torch.int64), *W_O.mT])
        last = oracles.rational(exact.offered(sequences.tolist())) * oracles.rational(out)
        logits = last * oracles.rational(W_U.T)
        assert logits.rank() <= d < N
        rows = torch.tensor([[float(x) for x in r] for r in oracles.fractions(logits)], **F64)
        found = aot(exact.weights(W_O.double(), W_U.double()), sequences)
        torch.testing.assert_close(found, rows, rtol=1e-9, atol=1e-7)


@pytest.mark.hostile("dana-proposition-3")
@pytest.mark.parametrize("N", [2, 3, 4, 5, 997])
def test_proposition_3_the_circle_in_closed_form(N):
    W = associations.circle(N)
    logits = W @ W.T
    assert (logits.argmax(1) == torch.arange(N)).all()
    lead = associations.margins(logits, torch.arange(N))
    exact = 2 * math.sin(math.pi / N) ** 2  # 1 - cos(2 pi / N), without cancellation
    torch.testing.assert_close(lead, torch.full((N,), exact, **F64), rtol=1e-6, atol=1e-15)
    scale = 50 / exact
    others = sum(math.exp(-scale * 2 * math.sin(math.pi * j / N) ** 2) for j in range(1, N))
    paid = -float((scale * logits[0]).log_softmax(0)[0])  # the divergence
    assert paid == pytest.approx(math.log1p(others), abs=1e-9)
    for dim in (2, 3, 5):  # any unit vectors that differ: far more tokens than dimensions
        rows = associations.spread_tokens(min(N, 97), dim, seed=0)
        assert (associations.margins(rows @ rows.T, torch.arange(len(rows))) > 0).all()


# --- Theorem 1's step, and exact encoders ---------------------------------------------------------


@pytest.mark.hostile("dana-theorem-1-appendix")
def test_theorem_1_appendix_the_block_is_singular_even_where_the_rows_have_full_rank():
    """A transformer whose likely row is not zero, and whose block is: orthogonality is no reason,
    and neither is the rank of the likely rows, once there are more columns than these."""
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
def test_finding_exact_equals_the_encoder_without_a_rounding_error():
    """``F [M^T; W_O^T] = E`` solved, ``M`` moved into the embedding, and all computed again."""
    d, d_h, H, N, S = 2, 1, 3, 5, 3
    sequences = [(0, 1, 2), (0, 1, 3), (4, 1, 3), (2, 2, 2), (3, 3, 0)]  # shared and repeated
    exact = next(
        model
        for model in (Exact.drawn(seed, N, S, d, d_h, H) for seed in range(99))
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
        moved = Exact(
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
        drawn = exact.weights()[:5]
        W_U = torch.tensor([*SQUARE, (0.6, 0.8)], **F64)
        targets = W_U[list(labels)]
        fitted = associations.fitted(drawn, W_U, torch.tensor(sequences), targets)
        logits = aot(fitted, torch.tensor(sequences))
        torch.testing.assert_close(logits, targets @ W_U.T, rtol=1e-6, atol=1e-6)
        built += 1
    assert built > 40


@pytest.mark.hostile("dana-finding-exact")
@pytest.mark.parametrize("labels", [(0,) * 5, (0, 3, 0, 3, 3)], ids=["one token", "antipodes"])
def test_finding_exact_targets_on_a_line_make_m_singular_and_are_memorized_all_the_same(labels):
    """With a square ``F`` the map to be moved has no inverse; the largest logits are right."""
    sequences = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]
    E = [SQUARE[2 * (label > 0)] for label in labels]  # rows 0 and 3 of a circle of six
    for seed in range(20):
        F = oracles.rational(Exact.drawn(seed, 5, 2, 2, 1, 3).offered(sequences))
        if F.rank() == 5:
            M = oracles.fractions(F.solve(oracles.rational(E)))[:2]
            assert oracles.rank(M) < 2
    tokens, wanted = torch.tensor(sequences), torch.tensor(labels)
    sizes = {"vocab": 6, "dim": 2, "head_dim": 1, "heads": 3, "seed": 0}
    weights = memorize_aot(tokens, wanted, **sizes)
    assert (aot(weights, tokens).argmax(1) == wanted).all()
