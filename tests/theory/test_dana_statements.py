"""Every statement of Dana et al. 2025, each against an oracle of its own."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attnmem import AoTWeights, aot
from attnmem.core import bounds
from attnmem.lab import data as data_of_the_paper
from attnmem.theory import counts, dana
from attnmem.theory.certificates import certified_associations, enclosed_offers
from attnmem.theory.dana import memorize_aot
from attnmem.theory.independence import certified_rank
from attnmem.theory.sequences import offered_rank

F64 = {"dtype": torch.float64}
quick = settings(max_examples=40)
seeds = st.integers(0, 2**32)


def divergence(pi, logits):
    """KL of each row."""
    return (torch.special.xlogy(pi, pi) - pi * logits.log_softmax(-1)).sum(-1)


def distinct_sequences(generator, N, S, T):
    codes = torch.randperm(N**S, generator=generator)[:T]
    return torch.stack([codes // N**s % N for s in range(S)], dim=1)


@st.composite
def tasks(draw, most=60):
    """Sequences and next tokens that the construction takes."""
    N, S, d = draw(st.integers(5, 9)), draw(st.integers(2, 5)), draw(st.integers(2, 7))
    d_h, H = draw(st.integers(1, d)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(seeds))
    T = min(bounds.aot_capacity(H, d_h, d), N**S, draw(st.integers(1, most)))
    sequences = distinct_sequences(generator, N, S, T)
    assume(offered_rank(sequences, H, d_h, d) == T)  # the others: test_dana_subsets.py
    sizes = {"vocab": N, "dim": d, "head_dim": d_h, "heads": H}
    return sequences, torch.randint(N, (T,), generator=generator), sizes


# --- encoders -------------------------------------------------------------------------------------


def test_assumption_1_the_bigrams_have_one_next_token_each():
    data = data_of_the_paper.bigrams(torch.Generator().manual_seed(3), 5, 400)
    answers = {}
    for pair, token in zip(data.tokens.tolist(), data.next_tokens.tolist(), strict=True):
        answers.setdefault(tuple(pair), set()).add(token)
    assert len(answers) == 25  # each pair is drawn several times
    assert all(len(tokens) == 1 for tokens in answers.values())


# --- the rank of attention ------------------------------------------------------------------------


@pytest.mark.parametrize(("N", "S", "d", "H"), [(2, 2, 4, 1), (2, 3, 6, 2), (3, 2, 4, 2)])
def test_lemma_2_fails_where_there_are_few_tokens(N, S, d, H):
    """Any attention weights, as exact integers: the tokens' affine hull is too small."""
    generator = torch.Generator().manual_seed(N * S)
    sequences = torch.cartesian_prod(*[torch.arange(N)] * S)
    promised = min(len(sequences), H * d)
    bound = bounds.affine_span_rank(H, N + S - 2)
    for _ in range(50):
        x = torch.randint(-99, 100, (N, d), generator=generator)[sequences]
        x = x + torch.randint(-99, 100, (S, d), generator=generator)
        cuts = torch.randint(0, 11, (len(sequences), H, S - 1), generator=generator)
        ends = torch.zeros(len(sequences), H, 1, dtype=torch.int64)
        alpha = torch.cat([ends, cuts.sort().values, ends + 10], -1).diff()
        A = torch.einsum("ths,tsd->thd", alpha, x).flatten(1)
        assert certified_rank(A).rank <= bound < promised


# --- the theorem and its corollaries --------------------------------------------------------------


@settings(max_examples=100)
@given(tasks(), st.integers(0, 1000))
def test_corollary_1_associations_are_memorized(task, seed):
    sequences, tokens, sizes = task
    weights = memorize_aot(sequences, tokens, **sizes, seed=seed)
    for t, sequence in enumerate(sequences):  # one by one: another order of summation
        assert aot(weights, sequence[None]).argmax() == tokens[t]
    assert weights.W_Q.shape == (sizes["heads"], sizes["head_dim"], sizes["dim"])


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
    lead = dana.margins(aot(weights, sequences), tokens)
    assert 0 < proof.margin <= float(lead.min()) + 1e-6
    assert certified_rank(enclosed_offers(weights, sequences), target=202).rank == 202
    wrong = (tokens + 1) % 10
    assert certified_associations(weights, sequences, wrong).memorized == 0


def test_corollary_2_the_rest_is_guessed():
    N, d, H, accuracies = 12, 3, 10, []
    generator = torch.Generator().manual_seed(0)
    room = bounds.aot_capacity(H, d, d)
    for seed in range(30):
        sequences = distinct_sequences(generator, N, 2, N * N)
        tokens = torch.randint(N, (N * N,), generator=generator)
        sizes = {"vocab": N, "dim": d, "head_dim": d, "heads": H}
        weights = memorize_aot(sequences[:room], tokens[:room], **sizes, seed=seed)
        hits = aot(weights, sequences).argmax(-1) == tokens
        assert hits[:room].all()
        accuracies.append(float(hits.double().mean()))
    mean = sum(accuracies) / 30
    expected = counts.associations_to_accuracy(room, N, N * N)
    # A guess is right with probability 1/N: standard error sqrt(30 * 111 / N) / (30 * 144).
    assert abs(mean - expected) < 4 * math.sqrt(30 * (N * N - room) / N) / (30 * N * N)


@quick
@given(st.integers(3, 6), st.integers(2, 5), st.integers(0, 3), seeds)
def test_theorem_1_exact_on_likely_sequences_and_bounded_elsewhere(N, heads, spare, seed):
    generator = torch.Generator().manual_seed(seed)
    d, S = N - 1, 3
    sequences = distinct_sequences(generator, N, S, N**S)
    T = min(heads * d + d, N**S - 1)
    if offered_rank(sequences[:T], heads, d, d) < T:
        return
    pi = torch.randn(N**S, N, generator=generator, **F64).softmax(-1)
    centred = pi.log() - pi.log().mean(1, keepdim=True)
    W = torch.linalg.svd(centred, full_matrices=False).Vh[:d].T.contiguous()
    E = centred @ W
    drawn = dana.draw(N, S, d, d, heads + spare, 30.0, seed % 1000)
    silent = torch.zeros(heads + spare, d, d, **F64)
    F = dana.offered(AoTWeights(*drawn, silent, W), sequences)
    sigma = torch.linalg.svdvals(F[:T])
    if sigma[-1] < 1e-6 * sigma[0]:
        return  # too close to singular for float64, which this test is not about
    weights = dana.fitted(drawn, W, sequences[:T], E[:T])
    # Attention sees the drawn embedding through a map and its inverse, then W_O magnifies.
    magnified = max(1.0, float(weights.W_O.abs().max()))
    rounding = 2**-52 * 30.0 * float(torch.linalg.cond(weights.embedding)) ** 2 * magnified
    if rounding > 1e-3:
        return  # so is the map, and the logits are off by about as much
    G = F[T:] @ torch.linalg.pinv(F[:T])
    C = math.sqrt(1 + float(torch.linalg.matrix_norm(G, ord=2)) ** 2)
    size = float(torch.linalg.matrix_norm((E - F[:, :d]) @ W.T, ord=2))
    kl = divergence(pi, aot(weights, sequences))
    assert kl[:T].max() < 1e-6  # of second order in the error of the logits
    assert kl[T:].max() <= math.sqrt(2) * C * size * (1 + 1e-6)


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


def test_finding_t_epsilon_is_rounded_up():
    for total, epsilon in itertools.product((1, 7, 216), (Fraction(0), Fraction(1, 7))):
        rounded = math.ceil((1 - epsilon) * total)
        for tail in (0, 1):  # uniform, and k-th as likely as 1/k
            weights = [Fraction(1, k**tail) for k in range(1, total + 1)]
            sums = itertools.accumulate(weight / sum(weights) for weight in weights)
            count = next(k for k, reached in enumerate(sums, 1) if reached >= 1 - epsilon)
            assert count == rounded if tail == 0 else count <= rounded


@pytest.mark.hostile("dana-theorem-2-simple")
@quick
@given(st.integers(2, 12), st.floats(0.01, 0.49), st.booleans(), seeds)
def test_theorem_2_simple_form_by_one_strength_for_all(N, C, same_g, seed):
    W, pi, g, H = nearly_orthogonal_table(N, C, same_g, seed)
    logarithm = math.log((N - 1) / math.expm1(float(H.mean())))
    mean = float(divergence(pi, logarithm / (1 - 2 * C) * (W @ W.T)[g]).mean())
    wrong = 1 - float(pi.gather(1, g[:, None]).mean())
    assert mean <= wrong * (1 + 2 * C) / (1 - 2 * C) * logarithm * (1 + 1e-9) + 1e-9


def nearly_orthogonal_table(N, C, same_g, seed):
    """W with products at most C off the identity, some of them exactly, and a noisy table."""
    generator = torch.Generator().manual_seed(seed)
    off = 2 * torch.rand(N, N, generator=generator, **F64) - 1
    off = (off + off.T) / 2
    off /= off.abs().max()
    off *= C  # the smallest eigenvalue may be below zero: then smaller, so that W exists
    off *= min(1.0, 0.99 / max(1e-9, -float(torch.linalg.eigvalsh(off)[0])))
    W = torch.linalg.cholesky(torch.eye(N, **F64) + off)
    assert (W @ W.T - torch.eye(N, **F64)).abs().max() <= C + 1e-12
    g = torch.zeros(9, dtype=torch.int64) if same_g else torch.randint(N, (9,), generator=generator)
    pi = torch.rand(9, N, generator=generator, **F64).pow(3) + 1e-3
    pi /= pi.sum(1, keepdim=True)
    return W, pi, g, -(pi * pi.log()).sum(1)


@pytest.mark.parametrize(("N", "d"), [(2, 3), (50, 100), (200, 200)])
def test_theorem_2_random_signs_are_nearly_orthogonal(N, d):
    generator = torch.Generator().manual_seed(0)
    W = (2 * torch.randint(2, (40, N, d), generator=generator) - 1) / math.sqrt(d)
    coherence = (W.double() @ W.double().mT - torch.eye(N, **F64)).abs().amax((1, 2)).min()
    assert coherence <= 2 * math.sqrt(math.log(N) / d) + 1e-6


@quick
@given(st.integers(1, 6), st.floats(0.001, 1.0), seeds)
def test_definition_2_no_encoder_meets_the_lower_half_on_full_support(N, distance, seed):
    generator = torch.Generator().manual_seed(seed)
    pi = torch.randn(N, generator=generator, **F64).softmax(-1)
    f = pi.log() + distance * torch.randn(N, generator=generator, **F64)
    assert (pi.log() - f.log_softmax(-1)).min() <= 1e-12


def test_lemma_4_is_false_for_all_encoders_of_some_tables():
    """d = 1: pi_1 = (1/2, 1/2, 0), pi_2 = (1, 0, 0). Encoders exist; none has a small range."""
    for delta in (0.1, 1e-3, 1e-5):
        w = torch.tensor([0, -delta / 4, -math.log(2 / delta)], **F64)
        E = torch.tensor([[1.0], [4 / delta * math.log(2 / delta)]], **F64)
        log_q = (E * w).log_softmax(-1)
        ratios = torch.cat([math.log(0.5) - log_q[0, :2], -log_q[1, :1]])
        assert (ratios >= delta / 16).all()
        assert (ratios <= delta).all()
        steep = (math.log(1 / delta) - delta) / delta  # least of |v / u|
        assert float(E[1, 0]) >= steep
        least = steep * (math.log(0.5 / delta) - delta)
        assert float((E[1] * w).amax() - (E[1] * w).amin()) >= least
