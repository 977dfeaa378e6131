"""What is proven is true: certified ranks against rational arithmetic, balls against floats."""

import itertools
import math
import random
import sys
from fractions import Fraction

import pytest
import torch
from flint import arb, arb_mat, fmpq

from attnmem import AoTWeights, MHAWeights, memorize_mha, mha, mha_features
from attnmem.theory import balls
from attnmem.theory.associations import offered
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


def adversarial(kind, generator):
    """A small matrix made to mislead a tolerance."""
    m, n = torch.randint(1, 8, (2,), generator=generator).tolist()
    k = int(torch.randint(1, min(m, n) + 1, (), generator=generator))
    draw = {"generator": generator, **F64}
    whole = lambda *shape: torch.randint(-9, 10, shape, generator=generator)  # noqa: E731
    match kind:
        case "exactly singular":
            return whole(m, k) @ whole(k, n)
        case "nearly singular":
            matrix = (whole(m, k) @ whole(k, n)).double()
            row, column = m - 1, n - 1
            matrix[row, column] = math.nextafter(float(matrix[row, column]), math.inf)
            return matrix
        case "graded":
            powers = torch.randint(-1000, 997, (m, n), generator=generator).double()
            return torch.randn(m, n, **draw) * torch.exp2(powers)
        case "graded rows of low rank":
            powers = torch.randint(-990, 980, (m, 1), generator=generator).double()
            return (whole(m, k) @ whole(k, n)).double() * torch.exp2(powers)
        case "subnormal":
            return whole(m, n).double() * sys.float_info.min * 2.0**-50
        case "one row":
            return torch.randn(1, n, **draw) * (torch.rand(1, n, **draw) < 0.3)
        case "empty":
            return torch.zeros((0, n) if k % 2 else (m, 0), **F64)
        case "float32":
            return torch.randn(m, n, generator=generator) @ torch.ones(n, n)
        case "huge integers":
            return whole(m, k) @ whole(k, n) * 2**50


KINDS = "exactly singular, nearly singular, graded, graded rows of low rank, subnormal, "
KINDS += "one row, empty, float32, huge integers"


@pytest.mark.parametrize("kind", KINDS.split(", "))
def test_a_certified_rank_is_never_above_the_true_one(kind):
    """Of floats it is equal unless the prime divides every minor; of balls it may be lower."""
    generator = torch.Generator().manual_seed(len(kind))
    for seed in range(100):
        matrix = adversarial(kind, generator)
        true = oracles.rank(matrix)
        assert certified_rank(matrix, seed=seed)[:2] == (true, tuple(matrix.shape))
        enclosure = lambda bits, matrix=matrix: balls.exact(matrix)  # noqa: E731
        assert certified_rank(enclosure).rank <= true
        for target in range(1, min(matrix.shape) + 1):
            result = certified_rank(enclosure, target=target, most_bits=4096)
            assert result.rank in ((0, target) if target <= true else (0,))


def test_each_seed_has_a_prime_of_its_own():
    primes = {certified_rank(torch.eye(2), seed=seed).proof for seed in range(20)}
    assert len(primes) == 20


def test_a_product_is_exact_where_no_float_holds_it():
    """[[2^60 + 2^-60, 1 + 2^-240], [1, 2^-60]] is singular once it is rounded, not before."""
    left = torch.tensor([[2.0**60, 2.0**-60], [1.0, 0.0]], dtype=torch.float64)
    right = torch.tensor([[1.0, 2.0**-60], [1.0, 2.0**-180]], dtype=torch.float64)
    assert certified_rank(left @ right).rank == 1
    assert certified_rank(left, times=right).rank == 2
    assert certified_rank(left, times=torch.ones(2, 5)).rank == 1
    assert certified_rank(torch.ones(5, 2), times=left).rank == 1
    generator = torch.Generator().manual_seed(0)
    for rank in range(5):
        thin = torch.randint(-9, 9, (7, rank), generator=generator)
        wide = torch.randint(-9, 9, (rank, 6), generator=generator)
        found = certified_rank(thin, times=wide)
        assert (found.rank, found.shape) == (oracles.rank(thin @ wide), (7, 6))


def test_precision_is_raised_until_it_suffices_and_failure_is_admitted():
    asked = []

    def nearly_singular(bits):
        """[[1, 1], [1, 1 + 10^-60]], as an expression that rounds."""
        asked.append(bits)
        return arb_mat([[1, 1], [1, 1 + arb(10) ** -60]])

    assert certified_rank(nearly_singular).rank == 1  # all that float64 midpoints suggest
    assert certified_rank(nearly_singular, target=2).rank == 2
    assert asked[1:] == [128, 256]
    failed = certified_rank(nearly_singular, target=2, most_bits=128)
    assert (failed.rank, failed.full, certified_rank(torch.ones(3, 1)).full) == (0, False, True)
    for radius, rank in [(0.9, 2), (1.1, 0)]:  # the determinant is the corner's entry
        wide = arb_mat([[arb(1, radius), 0], [1, 1]])
        assert certified_rank(lambda bits, wide=wide: wide, target=2).rank == rank
    singular = certified_rank(lambda bits: arb_mat([[1, 2], [2, 4]]), target=2)
    assert (singular.rank, singular.proof) == (0, "not certified with up to 1024 bits")


def test_matrices_that_are_zero_or_not_finite_are_not_certified():
    for entry in (arb(0), arb.nan(), arb.pos_inf()):
        for target in (None, 1):
            result = certified_rank(lambda bits, entry=entry: arb_mat([[entry]]), target=target)
            assert (result.rank, result.proof[:13]) == (0, "not certified")
    halves = arb_mat([[arb.pos_inf(), 0], [0, 1]])
    assert certified_rank(lambda bits: halves, target=2).rank == 0
    # But a rank is aimed at where no float holds the entries.
    big, small = arb(10) ** 400, arb(10) ** -400
    scaled = arb_mat([[big * big, big], [1, 2 * small]])
    assert certified_rank(lambda bits: scaled) == (2, (2, 2), "determinant of size 2, 128 bits")
    assert certified_rank(lambda bits: arb_mat([[0, small], [0, small], [0, 0]])).rank == 1


def test_without_its_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flint", None)
    with pytest.raises(ImportError, match=r"pip install python-flint$"):
        certified_rank(torch.eye(2))


# --- layers ---------------------------------------------------------------------------------------


def small_task(own, skip=False, T=9):
    """A construction: (weights, contexts, queries), labels."""
    n, d = 3, 5
    contexts = torch.rand(*((T,) if own else ()), n, d, **F64)
    queries, labels = torch.rand(T, d, **F64), torch.rand(T, 2, **F64)
    weights = memorize_mha(contexts, queries, labels, heads=4, head_dim=3, seed=0, skip=skip)
    return (weights, contexts, queries), labels


def encloses(enclosure, rounded):
    """Whether balls are small, near the numbers in float64, and right at every precision."""
    Z = enclosure(256)
    assert max(balls.above(ball.rad()) for ball in Z.entries()) < 1e-60
    middle = torch.tensor([[float(x) for x in row] for row in Z.tolist()], **F64)
    torch.testing.assert_close(middle, rounded, rtol=1e-12, atol=1e-12)
    finer = enclosure(1024)
    return all(enclosure(bits).contains(finer) for bits in (2, 5, 10, 53, 256))


@pytest.mark.parametrize("own", [False, True])
def test_the_balls_are_small_and_contain_the_features(own):
    weights, E, e = small_task(own)[0]
    layer = MHAWeights(*(W.round(decimals=1) for W in weights))
    assert encloses(enclosed_features(layer, E, e), mha_features(layer, E, e))


def test_a_softmax_that_is_known_exactly():
    row = [arb(2).log(), arb(0), arb(5).log()]
    alpha = balls.softmax(row)
    assert all(ball.contains(fmpq(k, 8)) for ball, k in zip(alpha, (2, 1, 5), strict=True))
    assert balls.softmax([]) == []

    widened = balls.softmax([arb(0, 1), arb(0)])
    for x in (-1, 0, 1):
        assert widened[0].contains(1 / (1 + (-arb(x)).exp()))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_a_construction_is_certified_and_a_wrong_label_is_not(own, skip):
    layer, labels = small_task(own, skip)
    proof = certified_memorization(*layer, labels, skip=skip)
    assert proof.rank == 9
    assert proof.error < 1e-9
    assert proof.shift < 1e-6
    assert proof.radius < 1e-20
    rounded = (mha(*layer, skip=skip) - labels).abs().max()
    assert abs(proof.error - rounded) < 1e-9
    labels = labels.clone()
    labels[4, 1] += 0.25
    assert certified_memorization(*layer, labels, skip=skip).error == pytest.approx(0.25)


def test_dependent_features_are_not_certified():
    (weights, E, e), labels = small_task(own=False)
    for weights_, queries in (
        (weights, e[[0, 1, 2, 3, 4, 5, 6, 7, 7]]),  # two equal examples
        (MHAWeights(*(W[:1] for W in weights[:3]), weights.W_O[:2], weights.W_D), e),  # one head
    ):
        proof = certified_memorization(weights_, E, queries, labels, most_bits=256)
        assert (proof.rank, proof.shift, proof.radius) == (0, math.inf, math.inf)
        assert numerical_rank(mha_features(weights_, E, queries)) < 9


def test_bounds_are_rounded_outwards():
    generator = random.Random(0)
    for _ in range(200):
        exact = arb(generator.random() - 0.5) * arb(3).sqrt()
        lower = exact.lower()
        assert lower - 1e-15 < arb(balls.below(lower)) < lower
        assert exact.upper() < arb(balls.above(exact.upper())) < exact.upper() + 1e-15
    assert balls.below(arb(1)) == math.nextafter(1, 0)
    assert balls.above(arb(1)) == math.nextafter(1, 2)
    assert balls.below(arb.neg_inf()) == balls.below(arb.nan()) == -math.inf
    assert balls.above(arb.pos_inf()) == balls.above(arb.nan()) == math.inf
    for power in (0, 400, -400):  # beyond the floats, too
        ball = arb(3, 0.25) * arb(10) ** power
        for x in (ball, -ball, ball - ball):
            assert arb(balls.below(x)) < x < arb(balls.above(x))
    assert 1.999 < balls.below(arb(2.5, 0.5)) < 2 < 3 < balls.above(arb(2.5, 0.5)) < 3.001


def test_the_largest_entry_is_that_of_the_outer_ends():
    wide = arb_mat([[arb(1, 0.5), arb(-2, 0.25)], [arb(0, 2.125), arb(2)]])
    assert 2.25 < balls.largest(wide) < 2.2500001  # radii have 30 bits
    assert balls.largest(arb_mat([[-3, 2]])) == math.nextafter(3, 4)
    assert balls.largest(arb_mat(0, 3)) == 0.0


# --- attention-only transformers ------------------------------------------------------------------


def transformer(attends=True):
    """A vocabulary of 11, three positions, width 7, two heads of width 5; and 13 sequences."""
    g = torch.Generator().manual_seed(0)
    shapes = [(11, 7), (3, 7), (2, 5, 7), (2, 5, 7), (2, 5, 7), (2, 7, 5), (11, 7)]
    weights = AoTWeights(*(torch.randn(*shape, generator=g, **F64) for shape in shapes))
    return weights._replace(W_Q=attends * weights.W_Q), torch.randint(11, (13, 3), generator=g)


def test_the_balls_contain_what_a_transformer_offers():
    weights, sequences = transformer()
    weights = AoTWeights(*(W.round(decimals=1) for W in weights))
    F = offered(weights, sequences)
    assert F.shape == (13, 7 + 2 * 5)
    assert encloses(enclosed_offers(weights, sequences), F)


def exact_leads(weights, sequences, next_tokens):
    """By how much the right logit leads, in fractions, for heads that attend to all alike."""
    e, pos, W_U = (oracles.rows_of(W) for W in (weights.embedding, weights.positions, weights.W_U))
    W_V, W_O = (list(map(oracles.rows_of, W)) for W in (weights.W_V, weights.W_O))
    leads = []
    for sequence, right in zip(sequences.tolist(), next_tokens.tolist(), strict=True):
        tokens = zip(sequence, pos, strict=True)
        x = [[a + b for a, b in zip(e[t], place, strict=True)] for t, place in tokens]
        mean = oracles.averages([Fraction(1, len(x))] * len(x), x)
        out = x[-1]
        for V, O in zip(W_V, W_O, strict=True):
            value = [oracles.dot(row, mean) for row in V]
            out = [a + oracles.dot(row, value) for a, row in zip(out, O, strict=True)]
        logits = [oracles.dot(row, out) for row in W_U]
        leads.append(logits[right] - max(z for k, z in enumerate(logits) if k != right))
    return leads


def test_a_certified_margin_is_the_exact_one_rounded_down_and_overlapping_balls_do_not_count():
    """Right is the token with the largest logit, but of each third sequence the second.

    With few bits the upper end of a lead says yes long before the lower one does.
    """
    weights, sequences = transformer(attends=False)
    tokens = torch.arange(11)
    every = [exact_leads(weights, row.expand(11, -1), tokens) for row in sequences]
    ranked = [sorted(tokens.tolist(), key=leads.__getitem__) for leads in every]
    next_tokens = torch.tensor([order[-2 if t % 3 == 2 else -1] for t, order in enumerate(ranked)])
    leads = exact_leads(weights, sequences, next_tokens)
    assert [lead > 0 for lead in leads] == [t % 3 != 2 for t in range(13)]
    proof = certified_associations(weights, sequences, next_tokens)
    assert proof.memorized == 9
    least = min(lead for lead in leads if lead > 0)
    assert least * Fraction(1 - 1e-15) < Fraction(proof.margin) < least

    decided = []
    for bits, (t, lead) in itertools.product((2, 5, 7, 9, 11, 14, 20, 128), enumerate(leads)):
        one = sequences[t : t + 1], next_tokens[t : t + 1]
        proof = certified_associations(weights, *one, bits=bits)
        assert 0 < proof.margin < lead if proof.memorized else proof == (0, 0.0)
        decided += [proof.memorized] if lead > 0 else []
    assert 20 < sum(decided) < len(decided) - 20


def test_a_tie_is_not_memorized_and_one_token_in_all_is_always_right():
    weights, sequences = transformer()
    zeros = torch.zeros(13, dtype=torch.int64)
    ties = weights._replace(W_U=weights.W_U[:1].expand(11, -1))
    assert certified_associations(ties, sequences, zeros) == (0, 0.0)
    one = weights._replace(embedding=weights.embedding[:1], W_U=weights.W_U[:1])
    assert certified_associations(one, 0 * sequences, zeros) == (13, math.inf)


# --- memorization, at its edges -------------------------------------------------------------------


@pytest.mark.parametrize("skip", [False, True])
def test_the_certified_error_is_the_exact_one_rounded_up(skip):
    """One example, and heads that attend to its three tokens alike: an output in fractions."""
    g = torch.Generator().manual_seed(0)
    n, d, d_h, H = 3, 5, 2, 2
    shapes = [(H, d, d_h), (H, d, d_h), (H, d, d_h), (H * d_h, d), (d, 7)]
    Q, K, V, O, D = (torch.randn(*shape, generator=g, **F64) for shape in shapes)
    layer = MHAWeights(torch.zeros_like(Q), K, V, O, D)
    E, e, y = (torch.randn(*shape, generator=g, **F64) for shape in ((n, d), (1, d), (1, 7)))
    proof = certified_memorization(layer, E, e, y, skip=skip)

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


def test_precision_is_raised_until_a_correction_is_proven():
    """Two queries that differ by 2^-150: 128 bits cannot tell their two attention weights apart."""
    one = torch.eye(2, **F64)
    layer = MHAWeights(one[None], one[None], one[None], one, one)
    e = torch.tensor([[0, 0], [0, 2.0**-150]], **F64)
    for most_bits, found in [(128, (0, 128)), (255, (0, 128)), (256, (2, 256)), (512, (2, 256))]:
        proof = certified_memorization(layer, one, e, torch.zeros(2, 2, **F64), most_bits=most_bits)
        assert (proof.rank, proof.bits) == found
        assert math.isfinite(proof.shift) == math.isfinite(proof.radius) == (proof.rank > 0)
        assert proof.error == math.nextafter(0.5, 1)


def test_examples_that_only_rounding_tells_apart_are_not_certified():
    """All tokens begin with 1, so the second query raises all logits alike: one attention."""
    E = torch.tensor([[1, 0.3], [1, 0.7], [1, -0.2]], **F64)
    e, y = torch.tensor([[1, 1], [0.3 * 2.0**90, 1]], **F64), torch.tensor([[0], [1.0]], **F64)
    one = torch.eye(2, **F64)
    layer = MHAWeights(one[None], one[None], one[None, :, :1], one[:1, :1], one[:1, :1])
    for most_bits in (128, 512):
        proof = certified_memorization(layer, E, e, y, most_bits=most_bits)
        assert (proof.rank, proof.shift) == (0, math.inf)
        Z = enclosed_features(layer, E, e)
        assert certified_rank(Z, target=2, most_bits=most_bits).rank == 0
        assert certified_rank(Z, target=1, most_bits=most_bits).rank == 1
        assert not certified_solution(layer, E, e, y, most_bits=most_bits).proven


def test_precision_ends_at_1024_bits_or_where_it_is_told_also_beyond_floats():
    (weights, E, e), labels = small_task(own=True)
    assert certified_memorization(weights, E[:1].expand_as(E), e * 0, labels).bits == 1024
    huge = weights._replace(W_Q=weights.W_Q * 1e300, W_K=weights.W_K * 1e300)
    proof = certified_memorization(huge, E, e, labels, most_bits=128)
    assert (proof.rank, proof.shift, proof.bits) == (0, math.inf, 128)
