"""Which sequences attention can tell apart: exact ranks, tasks beyond any weights, and refusals."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from attnmem import AoTWeights, aot, memorize_aot
from attnmem.core import bounds
from attnmem.core.sequences import random_aot
from attnmem.theory import counts, residues
from attnmem.theory.associations import obstacle
from attnmem.theory.certificates import certified_associations, enclosed_offers
from attnmem.theory.impossible import every_parity, impossible_subset, parity_by_heads
from attnmem.theory.independence import certified_rank
from attnmem.theory.sequence_ranks import dependent_subset, offered_rank

import oracles
from oracles import F64

seeds = st.integers(0, 2**32)
SQUARE = torch.cartesian_prod(torch.arange(3), torch.arange(3))
TWENTY = torch.cat([SQUARE, torch.stack([torch.arange(20, 31), torch.arange(3, 14)], dim=1)])


def among_others(k, H, d, d_h, T=None, seed=0):
    """The parity of k bits among other sequences, and the next tokens of all."""
    cube, parity = every_parity(k)
    more = (bounds.aot_capacity(H, d_h, d) if T is None else T) - len(cube)
    draw = torch.Generator().manual_seed(seed)
    rest = torch.randint(2, 50, (more, k + 1), generator=draw)
    rest[: d + 1, -1] = torch.arange(2, 3 + d)[:more]
    labels = torch.randint(50, (more,), generator=draw)
    return torch.cat([cube, rest]), torch.cat([parity, labels])


LENGTHS = st.integers(2, 4)


@st.composite
def sets(draw, S=LENGTHS, most=9, vocab=3):
    """Distinct sequences over two tokens or more, often of a few last tokens: hostile ones."""
    N, S = draw(st.integers(2, vocab)), draw(S)
    every = torch.cartesian_prod(*[torch.arange(N)] * S)
    if draw(st.booleans()):
        every = every[every[:, -1] == 0]
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(draw(seeds)))
    return every[order[: draw(st.integers(1, min(most, len(every))))]]


def real_rank(rows, H, d_h, d, target, one_entry=False):
    """Proven rank of F of one random transformer with real exponentials."""
    e, pos, W_Q, W_K, W_V = random_aot(int(rows.max()) + 1, rows.shape[1], d, d_h, H, 3.0, 1)
    if one_entry:
        W_Q[:, 1:], W_K[:, 1:], W_Q[:, :, 1:] = 0, 0, 0
        W_K[:, :, 0], W_K[:, :, 2:] = 0, 0
    silent = torch.zeros(H, d, d_h, **F64)
    weights = AoTWeights(e, pos, W_Q, W_K, W_V, silent, e)
    return certified_rank(enclosed_offers(weights, rows), target=target, most_bits=2048).rank


# --- the exact rank -------------------------------------------------------------------------------


@pytest.mark.hostile("dana-lemma-2", "dana-remark-2")
@settings(max_examples=25, deadline=None)
@given(sets(), st.integers(1, 2), st.integers(2, 3), st.booleans())
def test_rank_is_reached_by_real_exponentials(rows, H, d, one_entry):
    d_h = d - 1
    rank = offered_rank(rows, H, d_h, d)
    assert real_rank(rows, H, d_h, d, rank, one_entry) == rank


@pytest.mark.hostile("dana-lemma-2")
@settings(max_examples=40)
@given(sets(), st.integers(1, 3), st.integers(2, 5), seeds)
def test_rank_is_not_exceeded_by_rational_attention(rows, H, d, seed):
    """Weights in base two are powers of two, so F is a matrix of fractions: no rounding."""
    draw = torch.Generator().manual_seed(seed)
    N, S = int(rows.max()) + 1, rows.shape[1]

    def integers(*shape, most=4):
        return torch.randint(-most, most + 1, shape, generator=draw)

    x = (integers(N, d) + 0)[rows] + integers(S, d)
    F = x[:, -1].tolist()
    for _ in range(H):
        W, W_V = integers(d, d, most=1), integers(d, d, most=2).tolist()
        logits = ((x[:, -1:] @ W) * x).sum(-1)
        for row, tokens, own in zip(F, x.tolist(), logits.tolist(), strict=True):
            A = oracles.averages(oracles.softmax2(own), tokens)
            row += [oracles.dot(line, A) for line in W_V]
    assert oracles.rank(F) <= offered_rank(rows, H, d, d)


@pytest.mark.parametrize(
    ("rows", "H", "d", "d_h", "rank"),
    [
        (every_parity(2)[0], 1, 9, 9, 3),
        (every_parity(2)[0], 2, 2, 1, 3),
        (every_parity(2)[0], 2, 2, 2, 4),
        (every_parity(3)[0], 2, 9, 9, 7),  # 1 + 3 + 3
        (every_parity(4)[0], 3, 9, 9, 13),  # 3 * 4 + 1, although 1 + 4 + 6 + 4 = 15
        (every_parity(4)[0], 4, 9, 9, 16),
        (SQUARE, 1, 10, 10, 6),
        (TWENTY, 1, 10, 10, 17),
        (torch.arange(7)[:, None], 3, 5, 5, 5),  # one token attends to itself
        (torch.tensor([[a, a] for a in range(7)]), 2, 3, 3, 5),  # all steps alike: H + d
        (torch.tensor([[a, 0] for a in range(9)]), 2, 3, 2, 5),  # one last token: 1 + H d_h
        (torch.tensor([[1, 0], [1, 0]]), 2, 3, 3, 1),
    ],
)
def test_rank_by_hand(rows, H, d, d_h, rank):
    assert offered_rank(rows, H, d_h, d) == rank
    assert offered_rank(rows, H, d_h, d, seed=1) == rank


@pytest.mark.hostile("dana-finding-told-apart")
@settings(max_examples=80)
@given(sets(S=st.just(2), vocab=5), st.integers(1, 3), st.integers(2, 6), st.integers(1, 6))
def test_rank_of_bigrams_is_the_condition_on_subsets(rows, H, d, d_h):
    """The condition of the chapter on associations."""
    assert oracles.subset_rank(rows, H, min(d_h, d), d) == offered_rank(rows, H, min(d_h, d), d)


def test_no_denominator_is_zero_modulo_the_prime(monkeypatch):
    """With a small prime it often would be, and the rank of the cube would come out too large."""
    monkeypatch.setattr(residues, "PRIME", 101)
    ranks = [offered_rank(every_parity(2)[0], 1, 4, 4, seed) for seed in range(200)]
    assert max(ranks) == 3


@settings(max_examples=60)
@given(sets(), st.integers(1, 2), st.integers(2, 4))
def test_a_dependent_subset_is_a_circuit(rows, H, d):
    subset = dependent_subset(rows, H, d, d)
    rank = offered_rank(rows, H, d, d)
    assert (len(subset) == 0) == (rank == len(rows))
    if len(subset):
        assert offered_rank(rows[subset], H, d, d) == len(subset) - 1
        for leave in range(len(subset)):
            kept = torch.cat([subset[:leave], subset[leave + 1 :]])
            assert not len(kept) or offered_rank(rows[kept], H, d, d) == len(kept)


# --- next tokens beyond any weights ---------------------------------------------------------------


def brute_force_possible(rows, labels, H):
    """Scores that are functions of at most H places, all right by a margin: a plain program."""
    S, T = rows.shape[1], len(rows)
    features = [np.ones(T)]
    for k in range(1, H + 1):
        for places in itertools.combinations(range(S - 1), k):
            for tokens in itertools.product(range(3), repeat=k):
                features.append((rows[:, places] == torch.tensor(tokens)).all(1).double().numpy())
    features = np.array(features).T
    classes, m = int(labels.max()) + 1, features.shape[1]
    below = []
    for t, k in itertools.product(range(T), range(classes)):
        if k != labels[t]:
            row = np.zeros((classes, m))
            row[k] += features[t]
            row[labels[t]] -= features[t]
            below.append(row.ravel())
    if not below:
        return True
    solved = linprog(
        np.zeros(classes * m), np.array(below), -np.ones(len(below)), bounds=(None,) * 2
    )
    return solved.status == 0


@pytest.mark.hostile("dana-corollary-1", "dana-theorem-1")
@settings(max_examples=120, deadline=None)
@given(sets(S=st.integers(3, 4), most=16), st.integers(1, 2), st.integers(2, 3), seeds)
def test_impossible_is_what_no_functions_separate(rows, H, classes, seed):
    """Functions of as many places as there are heads."""
    rows = rows[rows[:, -1] == rows[0, -1]]
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (len(rows),), generator=draw)
    proof = impossible_subset(rows, labels, H)
    assert (proof is None) == brute_force_possible(rows, labels, H)
    if proof is not None:
        assert len(proof.rows) >= 2 ** (H + 1)
        check_contradiction(proof, rows, labels, H)


def check_contradiction(proof, rows, labels, H):
    """The weights are orthogonal to every function of ``H`` places."""
    weights = proof.weights.numpy().astype(object)
    own = labels[proof.rows][:, None] == proof.tokens
    assert (weights.sum(1) == 0).all()
    assert (weights[~own.numpy()] <= 0).all()
    assert (weights != 0).any(1).all()
    S = rows.shape[1]
    for places in itertools.combinations(range(S - 1), min(H, S - 1)):
        totals = {}
        for row, weight in zip(rows[proof.rows][:, places].tolist(), weights, strict=True):
            totals[tuple(row)] = totals.get(tuple(row), 0) + weight
        assert all((total == 0).all() for total in totals.values())


@pytest.mark.hostile("dana-corollary-2")
def test_all_sequences_of_three_bits_need_two_heads():
    """The formula gives one head an accuracy of 1; behind each last token one is wrong."""
    cube = torch.cartesian_prod(*[torch.arange(2)] * 3)
    xor = (cube[:, 0] != cube[:, 1]).long()
    known = bounds.aot_capacity(1, 4, 4)
    assert counts.accuracy_to_associations(1, 2, len(cube)) == known
    for rows in (cube, cube[::2], cube[1::2]):
        labels = (rows[:, 0] != rows[:, 1]).long()
        proof = impossible_subset(rows, labels, 1)
        assert len(rows[proof.rows][:, -1].unique()) == 1
        check_contradiction(proof, rows, labels, 1)
    assert impossible_subset(cube, xor, 2) is None


@pytest.mark.hostile("dana-finding-parity")
@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_as_many_heads_as_bits_tell_their_parity(k):
    cube, parity = every_parity(k)
    assert certified_associations(parity_by_heads(k), cube, parity).memorized == 2**k
    assert impossible_subset(cube, parity, k) is None
    assert impossible_subset(cube, parity, k - 1) is not None


def test_parity_of_ten_bits_is_right():
    rows, parity = every_parity(10)
    assert torch.equal(aot(parity_by_heads(10), rows).argmax(-1), parity)


@pytest.mark.parametrize("bits", [11, 12, 16])
def test_parity_of_more_bits_is_refused(bits):
    with pytest.raises(ValueError, match=rf"^bits: got {bits}"):
        parity_by_heads(bits)


# --- what memorize_aot does with them -------------------------------------------------------------


PARITIES = [(2, 1, 7, 3), (3, 2, 7, 3), (4, 1, 17, 13), (4, 3, 11, 11)]  # k, H, d, d_h


@pytest.mark.hostile("dana-corollary-1", "dana-table-1", "dana-theorem-1")
@pytest.mark.parametrize(("k", "H", "d", "d_h"), PARITIES)
@pytest.mark.parametrize("full", [False, True])
def test_parity_with_fewer_heads_is_impossible(k, H, d, d_h, full):
    T = None if full else 2**k + min(3, bounds.aot_capacity(H, d_h, d) - 2**k)
    rows, labels = among_others(k, H, d, d_h, T)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(k + H))
    sizes = {"vocab": 50, "dim": d, "head_dim": d_h, "heads": H, "seed": 0}
    with pytest.raises(ValueError, match=r"^sequences: got T_0 = .* misses some"):
        memorize_aot(rows[order], labels[order], **sizes)
    why = obstacle(rows[order], labels[order], heads=H, head_dim=d_h, dim=d)
    assert why.startswith(f"impossible for H = {H} at any d and d_h")
    named = why.split("sequences [")[1].split("]")[0]
    named = torch.tensor([int(number) for number in named.split(", ")])
    assert (order[named] < 2**k).all()  # of the cube, or of one of its faces
    assert len(named) >= 2 ** (H + 1)


@pytest.mark.hostile("dana-corollary-1", "dana-lemma-2")
@pytest.mark.parametrize(("d", "d_h"), [(10, 10), (13, 7)])
def test_dependent_bigrams_are_refused_by_subset(d, d_h):
    sizes = {"dim": d, "head_dim": d_h, "heads": 1}
    drawn = {"vocab": 50, "seed": 0}
    with pytest.raises(ValueError, match=r"^sequences: got T_0 = 20, .* tells 17 apart"):
        memorize_aot(TWENTY, torch.arange(20), **sizes, **drawn)
    why = obstacle(TWENTY, torch.arange(20), **sizes)
    assert why.startswith("no weights tell the 7 sequences [0, ")
    kept = torch.cat([TWENTY[:6], TWENTY[9:]])
    assert obstacle(kept, torch.arange(17), **sizes) is None
    weights = memorize_aot(kept, torch.arange(17), **sizes, **drawn)
    assert (aot(weights, kept).argmax(-1) == torch.arange(17)).all()


@pytest.mark.hostile("dana-corollary-1", "dana-remark-2")
@settings(max_examples=60, deadline=None)
@given(sets(S=st.integers(2, 4), most=12), st.integers(1, 3), st.integers(2, 4), seeds)
def test_memorize_aot_builds_or_refuses(rows, H, d, seed):
    """Full rank is built; what is impossible is refused, and has an obstacle of that name."""
    T = min(len(rows), bounds.aot_capacity(H, d, d))
    rows = rows[:T]
    labels = torch.randint(3, (T,), generator=torch.Generator().manual_seed(seed))
    beyond = impossible_subset(rows, labels, H) is not None
    sizes = {"vocab": 3, "dim": d, "head_dim": d, "heads": H, "seed": 0}
    why = obstacle(rows, labels, heads=H, head_dim=d, dim=d)
    if offered_rank(rows, H, d, d) == T:
        weights = memorize_aot(rows, labels, **sizes)
        assert (aot(weights, rows).argmax(-1) == labels).all()
        assert why is None
        assert not beyond
    elif beyond:
        assert why.startswith("impossible")
        with pytest.raises(ValueError, match=r"^sequences: .* misses some"):
            memorize_aot(rows, labels, **sizes)
    else:
        assert why.startswith("no weights tell")
