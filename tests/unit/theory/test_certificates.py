"""Proofs about stored weights claim no more than is true: outputs in fractions and in floats."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from attnmem import AoTWeights, MHAWeights, memorize_mha, mha, mha_features
from attnmem.core.sequences import offered
from attnmem.theory import balls
from attnmem.theory.certificates import (
    certified_associations,
    certified_memorization,
    enclosed_features,
    enclosed_offers,
)
from attnmem.theory.independence import certified_rank, numerical_rank
from attnmem.theory.solutions import certified_solution

import oracles

F64 = {"dtype": torch.float64}
ONE = torch.eye(2, **F64)


def gaussian(seed, *shapes):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g, **F64) for shape in shapes]


def small_task(own, skip=False, T=9):
    """A construction: (weights, contexts, queries), labels."""
    n, d = 3, 5
    contexts = torch.rand(*((T,) if own else ()), n, d, **F64)
    queries, labels = torch.rand(T, d, **F64), torch.rand(T, 2, **F64)
    weights = memorize_mha(contexts, queries, labels, heads=4, head_dim=3, seed=0, skip=skip)
    return (weights, contexts, queries), labels


def check_encloses(enclosure, rounded):
    """Balls are small, near the numbers in float64, and right at every precision."""
    Z = enclosure(256)
    assert max(balls.above(ball.rad()) for ball in Z.entries()) < 1e-60
    middle = torch.tensor([[float(x) for x in row] for row in Z.tolist()], **F64)
    torch.testing.assert_close(middle, rounded, rtol=1e-12, atol=1e-12)
    finer = enclosure(1024)
    assert all(enclosure(bits).contains(finer) for bits in (2, 5, 10, 53, 256))


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_features_lie_in_small_balls(own):
    weights, E, e = small_task(own)[0]
    layer = MHAWeights(*(W.round(decimals=1) for W in weights))
    check_encloses(enclosed_features(layer, E, e), mha_features(layer, E, e))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_construction_is_certified_a_wrong_label_not(own, skip):
    layer, labels = small_task(own, skip)
    proof = certified_memorization(*layer, labels, skip=skip)
    assert proof.rank == 9
    assert proof.shift < 1e-6
    assert proof.radius < 1e-20
    rounded = (mha(*layer, skip=skip) - labels).abs().max()
    assert proof.error == pytest.approx(float(rounded), abs=1e-9)
    labels = labels.clone()
    labels[4, 1] += 0.25
    assert certified_memorization(*layer, labels, skip=skip).error == pytest.approx(0.25)


def equal_examples(weights, e):
    return weights, e[[0, 1, 2, 3, 4, 5, 6, 7, 7]]


def one_head(weights, e):
    return MHAWeights(*(W[:1] for W in weights[:3]), weights.W_O[:2], weights.W_D), e


@pytest.mark.parametrize("change", [equal_examples, one_head])
def test_dependent_features_are_not_certified(change):
    (weights, E, e), labels = small_task(own=False)
    weights, e = change(weights, e)
    proof = certified_memorization(weights, E, e, labels, most_bits=256)
    assert (proof.rank, proof.shift, proof.radius) == (0, math.inf, math.inf)
    assert numerical_rank(mha_features(weights, E, e)) < 9


@pytest.mark.parametrize("skip", [False, True])
def test_error_is_the_exact_one_rounded_up(skip):
    """One example, and heads that attend to its three tokens alike: an output in fractions."""
    n, d, d_h, H = 3, 5, 2, 2
    K, V, O, D, E, e, y = gaussian(
        0, (H, d, d_h), (H, d, d_h), (H * d_h, d), (d, 7), (n, d), (1, d), (1, 7)
    )
    proof = certified_memorization(MHAWeights(0 * K, K, V, O, D), E, e, y, skip=skip)

    def times(row, matrix):
        return oracles.averages(row, oracles.rows_of(matrix))

    mean = [sum(map(Fraction, column)) / n for column in zip(*E.tolist(), strict=True)]
    heads = [value for V_h in V for value in times(mean, V_h)]
    inner = times(heads, O)
    if skip:
        inner = [a + Fraction(b) for a, b in zip(inner, e[0].tolist(), strict=True)]
    output = times(inner, D)
    exact = max(abs(a - Fraction(b)) for a, b in zip(output, y[0].tolist(), strict=True))
    assert exact < Fraction(proof.error) < exact * Fraction(1 + 1e-15)
    assert (proof.rank, proof.bits) == (1, 128)
    # Only one entry of a feature is used, the largest: it alone makes up for the error.
    needed = exact / max(map(abs, mean))
    assert needed < Fraction(proof.shift) < needed * Fraction(1 + 1e-15)
    assert 0 < proof.radius < 1e-30


@pytest.mark.parametrize(
    ("most_bits", "rank", "bits"), [(128, 0, 128), (255, 0, 128), (256, 2, 256), (512, 2, 256)]
)
def test_precision_is_raised_until_a_proof(most_bits, rank, bits):
    """Two queries that differ by 2^-150: 128 bits cannot tell their two attention weights apart."""
    layer = MHAWeights(ONE[None], ONE[None], ONE[None], ONE, ONE)
    e = torch.tensor([[0, 0], [0, 2.0**-150]], **F64)
    proof = certified_memorization(layer, ONE, e, torch.zeros(2, 2, **F64), most_bits=most_bits)
    assert (proof.rank, proof.bits) == (rank, bits)
    assert math.isfinite(proof.shift) == math.isfinite(proof.radius) == (proof.rank > 0)
    assert proof.error == math.nextafter(0.5, 1)


@pytest.mark.parametrize("most_bits", [128, 512])
def test_examples_that_only_rounding_tells_apart(most_bits):
    """All tokens begin with 1, so the second query raises all logits alike: one attention."""
    E = torch.tensor([[1, 0.3], [1, 0.7], [1, -0.2]], **F64)
    e, y = torch.tensor([[1, 1], [0.3 * 2.0**90, 1]], **F64), torch.tensor([[0], [1.0]], **F64)
    layer = MHAWeights(ONE[None], ONE[None], ONE[None, :, :1], ONE[:1, :1], ONE[:1, :1])
    proof = certified_memorization(layer, E, e, y, most_bits=most_bits)
    assert (proof.rank, proof.shift) == (0, math.inf)
    Z = enclosed_features(layer, E, e)
    assert certified_rank(Z, target=2, most_bits=most_bits).rank == 0
    assert certified_rank(Z, target=1, most_bits=most_bits).rank == 1
    assert not certified_solution(layer, E, e, y, most_bits=most_bits).proven


def test_precision_ends_at_1024_bits_or_as_told():
    (weights, E, e), labels = small_task(own=True)
    assert certified_memorization(weights, E[:1].expand_as(E), e * 0, labels).bits == 1024
    huge = weights._replace(W_Q=weights.W_Q * 1e300, W_K=weights.W_K * 1e300)
    proof = certified_memorization(huge, E, e, labels, most_bits=128)
    assert (proof.rank, proof.shift, proof.bits) == (0, math.inf, 128)


# --- attention-only transformers ------------------------------------------------------------------


def transformer():
    """A vocabulary of 11, three positions, width 7, two heads of width 5; and 13 sequences."""
    weights = gaussian(0, (11, 7), (3, 7), (2, 5, 7), (2, 5, 7), (2, 5, 7), (2, 7, 5), (11, 7))
    sequences = torch.randint(11, (13, 3), generator=torch.Generator().manual_seed(0))
    return AoTWeights(*weights), sequences


def test_offers_lie_in_small_balls():
    weights, sequences = transformer()
    weights = AoTWeights(*(W.round(decimals=1) for W in weights))
    F = offered(weights, sequences)
    assert F.shape == (13, 7 + 2 * 5)
    check_encloses(enclosed_offers(weights, sequences), F)


def exact_logits(weights, sequences):
    """In fractions, for heads that attend to all alike."""
    e, pos, W_U = (oracles.rows_of(W) for W in (weights.embedding, weights.positions, weights.W_U))
    W_V, W_O = (list(map(oracles.rows_of, W)) for W in (weights.W_V, weights.W_O))
    logits = []
    for sequence in sequences.tolist():
        tokens = zip(sequence, pos, strict=True)
        x = [[a + b for a, b in zip(e[t], place, strict=True)] for t, place in tokens]
        mean = oracles.averages([Fraction(1, len(x))] * len(x), x)
        out = x[-1]
        for V, O in zip(W_V, W_O, strict=True):
            value = [oracles.dot(row, mean) for row in V]
            out = [a + oracles.dot(row, value) for a, row in zip(out, O, strict=True)]
        logits.append([oracles.dot(row, out) for row in W_U])
    return logits


def exact_task():
    """Right is the token with the largest logit, but of each third sequence the second."""
    weights, sequences = transformer()
    weights = weights._replace(W_Q=0 * weights.W_Q)
    next_tokens, leads = [], []
    for t, logits in enumerate(exact_logits(weights, sequences)):
        ranked = sorted(range(11), key=logits.__getitem__)
        right = ranked[-2 if t % 3 == 2 else -1]
        next_tokens.append(right)
        leads.append(logits[right] - max(z for token, z in enumerate(logits) if token != right))
    assert [lead > 0 for lead in leads] == [t % 3 != 2 for t in range(13)]
    return weights, sequences, torch.tensor(next_tokens), leads


def test_margin_is_the_exact_one_rounded_down():
    *task, leads = exact_task()
    proof = certified_associations(*task)
    assert proof.memorized == 9
    least = min(lead for lead in leads if lead > 0)
    assert least * Fraction(1 - 1e-15) < Fraction(proof.margin) < least


def test_overlapping_balls_do_not_count():
    """With few bits the upper end of a lead says yes long before the lower one does."""
    weights, sequences, next_tokens, leads = exact_task()
    decided = []
    for bits, (t, lead) in itertools.product((2, 5, 7, 9, 11, 14, 20, 128), enumerate(leads)):
        task = weights, sequences[t : t + 1], next_tokens[t : t + 1]
        proof = certified_associations(*task, bits=bits)
        assert 0 < proof.margin < lead if proof.memorized else proof == (0, 0.0)
        if lead > 0:
            decided.append(proof.memorized)
    assert 20 < sum(decided) < len(decided) - 20


def test_tie_is_not_memorized_and_an_only_token_is():
    weights, sequences = transformer()
    zeros = torch.zeros(13, dtype=torch.int64)
    ties = weights._replace(W_U=weights.W_U[:1].expand(11, -1))
    assert certified_associations(ties, sequences, zeros) == (0, 0.0)
    only = weights._replace(embedding=weights.embedding[:1], W_U=weights.W_U[:1])
    assert certified_associations(only, 0 * sequences, zeros) == (13, math.inf)
