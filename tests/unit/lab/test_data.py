"""The data sets have the published shapes, ranges and laws."""

import math

import pytest
import torch

from attnmem.lab import data
from attnmem.theory.independence import kruskal_rank, numerical_rank

from plain import association_run, bigram_run, memorization_run


def test_bigrams_follow_one_table():
    drawn = data.pairs_of(bigram_run(N=7, T=3000))
    assert drawn.tokens.shape == (3000, 2)
    assert torch.equal(drawn.next_tokens, drawn.table[drawn.tokens[:, 0], drawn.tokens[:, 1]])
    for values in (drawn.tokens[:, 0], drawn.tokens[:, 1], drawn.table.flatten()):
        assert set(values.tolist()) == set(range(7))
    counts = torch.bincount(drawn.tokens[:, 0] * 7 + drawn.tokens[:, 1], minlength=49)
    assert (counts - 3000 / 49).abs().max() < 5 * (3000 / 49) ** 0.5  # five standard deviations


def test_associations_are_different_pairs():
    drawn = data.pairs_of(association_run(N=7, T=40))
    assert len(set(map(tuple, drawn.tokens.tolist()))) == 40
    assert torch.equal(drawn.next_tokens, drawn.table[drawn.tokens[:, 0], drawn.tokens[:, 1]])
    complete = data.pairs_of(association_run(N=7, T=49))
    assert sorted(complete.tokens.tolist()) == [[a, b] for a in range(7) for b in range(7)]
    with pytest.raises(ValueError, match=r"^T: got 50; expected .* 49"):
        data.pairs_of(association_run(N=7, T=50))


@pytest.mark.parametrize("context", ["random", "shared"])
@pytest.mark.parametrize("classes", [None, 5])
def test_contexts_and_queries_are_uniform(context, classes):
    drawn = data.contexts_of(memorization_run(context=context, N=classes, T=1000, n=31, d=5))
    assert drawn.contexts.shape == ((31, 5) if context == "shared" else (1000, 31, 5))
    assert drawn.queries.shape == (1000, 5)
    for x in (drawn.contexts, drawn.queries, *([] if classes else [drawn.labels])):
        assert x.dtype == torch.float32
        assert 0 <= x.min() < 0.05
        assert 0.95 < x.max() <= 1
        assert x.mean().item() == pytest.approx(1 / 2, abs=0.06)
        assert x.var().item() == pytest.approx(1 / 12, abs=0.02)
    assert classes is None or set(drawn.labels.tolist()) == set(range(5))


def test_associations_are_a_random_subset():
    """Of 400 draws of 5 of the 25 pairs each pair is in about 80; the standard deviation is 8."""
    drawn = [data.pairs_of(association_run(N=5, T=5, seed=seed)) for seed in range(400)]
    tokens = torch.cat([pairs.tokens for pairs in drawn])
    counts = torch.bincount(5 * tokens[:, 0] + tokens[:, 1], minlength=25)
    assert 40 < counts.min() <= counts.max() < 120


def test_generators_differ_by_run_and_purpose():
    runs = [bigram_run(), bigram_run(seed=1), bigram_run(H=4), memorization_run()]
    streams = [(run, purpose) for run in runs for purpose in ("weights", "data", "order")]
    drawn = [torch.rand(3, generator=data.generator(*stream)) for stream in streams]
    assert len(torch.stack(drawn).unique(dim=0)) == len(streams)
    again = torch.rand(3, generator=data.generator(bigram_run(), "weights"))
    assert torch.equal(again, drawn[0])


@pytest.mark.parametrize("rank", [2, 3, 6])
@pytest.mark.parametrize("kind", ["groups", "flat"])
def test_poor_queries_have_their_kruskal_rank(kind, rank):
    """Groups of dependent queries span all dimensions; in a subspace there are no more than Q."""
    run = memorization_run(context=f"shared-{kind}-{rank}", T=19, d=7)
    drawn = data.contexts_of(run)
    assert drawn.contexts.shape == (run.n, 7)
    assert drawn.queries.shape == (19, 7)
    assert kruskal_rank(drawn.queries, rtol=1e-6) == rank
    assert numerical_rank(drawn.queries, rtol=1e-6) == (7 if kind == "groups" else rank)


@pytest.mark.parametrize("kind", ["groups", "flat"])
def test_poor_queries_are_as_long_as_normal_ones(kind):
    run = memorization_run(context=f"shared-{kind}-3", T=4001, d=7)
    queries = data.contexts_of(run).queries
    if kind == "groups":  # a query at each place of its group, and those that are left
        for part in (queries[3::4], queries[::4], queries[4000:]):
            assert (part != 0).all()
        assert queries[3::4].var().item() == pytest.approx(1, abs=0.06)
    assert queries.square().sum(dim=1).mean().item() == pytest.approx(7, abs=0.4)


def test_a_zipf_prior_draws_the_kth_pair_in_proportion():
    """Of shares 1, 1/2, ..., 1/9 (exponent 1) each rank is within five standard deviations."""
    drawn = data.pairs_of(bigram_run(N=3, T=9000, prior=1.0))
    counts = torch.bincount(3 * drawn.tokens[:, 0] + drawn.tokens[:, 1], minlength=9)
    assert torch.equal(drawn.next_tokens, drawn.table[drawn.tokens[:, 0], drawn.tokens[:, 1]])
    shares = 1 / torch.arange(1.0, 10)
    expected = 9000 * shares / shares.sum()
    ranked = counts.sort(descending=True).values
    assert ((ranked - expected).abs() < 5 * expected.sqrt()).all()
    others = data.pairs_of(bigram_run(N=3, T=9000, prior=1.0, seed=1))
    again = torch.bincount(3 * others.tokens[:, 0] + others.tokens[:, 1], minlength=9)
    assert not torch.equal(counts.argsort(), again.argsort())  # every seed has its own ranks
    flat = data.pairs_of(bigram_run(N=3, T=9000, prior=0.0)).tokens
    counts = torch.bincount(3 * flat[:, 0] + flat[:, 1], minlength=9)
    assert (counts - 1000).abs().max() < 5 * 1000**0.5


def test_words_follow_each_other_in_the_manual(monkeypatch):
    """Nine parts of two words, the last of them new; the rarest words share a number."""
    words = [*"abacabadabacabaeabacab"] * 8
    monkeypatch.setattr(data.corpora, "manual_words", lambda: words)
    run = bigram_run(task="text", N=4, T=128)
    known, new = data.words_of(run)
    numbers = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 3}
    text = [numbers[word] for word in words]
    triples = [text[place : place + 3] for place in range(72 * 2)]
    assert known.tolist() == [x for k, x in enumerate(triples) if k // 2 % 9 < 8]
    assert new.tolist() == [x for k, x in enumerate(triples) if k // 2 % 9 == 8]
    pairs = data.pairs_of(run)
    assert torch.equal(torch.cat([pairs.tokens, pairs.next_tokens[:, None]], dim=1), known)
    for T in (0, 100, 192):
        with pytest.raises(ValueError, match=r"^T: got .* a multiple of 64 up to 128"):
            data.words_of(bigram_run(task="text", T=T))


@pytest.mark.parametrize("bits", [1e-3, 0.5, 2.8])
def test_next_tokens_have_the_entropy(bits):
    drawn = data.pairs_of(bigram_run(N=7, entropy=bits))
    p = drawn.distributions.double()
    assert p.shape == (7, 49)
    assert torch.allclose(p.sum(dim=0), torch.ones(49, dtype=p.dtype), atol=1e-6)
    assert torch.allclose(
        -torch.special.xlogy(p, p).sum(dim=0) / math.log(2),
        torch.full((49,), bits, dtype=p.dtype),
        atol=1e-5,
    )
    assert torch.equal(p.argmax(dim=0), drawn.table.flatten())
    assert torch.equal(drawn.next_tokens, drawn.table[drawn.tokens[:, 0], drawn.tokens[:, 1]])
    assert set(drawn.table.flatten().tolist()) == set(range(7))


@pytest.mark.parametrize("bits", [0.0, math.log2(7), -1.0])
def test_an_entropy_that_no_distribution_has_is_refused(bits):
    with pytest.raises(ValueError, match=r"^entropy: got .*; expected above 0 and below log2"):
        data.pairs_of(bigram_run(N=7, entropy=bits))
