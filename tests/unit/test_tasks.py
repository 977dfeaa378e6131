"""The data sets have the published shapes, ranges and laws."""

import pytest
import torch

from attnmem.lab import tasks


def g(seed=0):
    return torch.Generator().manual_seed(seed)


def test_bigrams_follow_one_fixed_table():
    data = tasks.bigrams(g(), vocab=7, count=3000)
    assert data.tokens.shape == (3000, 2)
    assert torch.equal(data.next_tokens, data.table[data.tokens[:, 0], data.tokens[:, 1]])
    for values in (data.tokens[:, 0], data.tokens[:, 1], data.table.flatten()):
        assert set(values.tolist()) == set(range(7))
    counts = torch.bincount(data.tokens[:, 0] * 7 + data.tokens[:, 1], minlength=49)
    assert (counts - 3000 / 49).abs().max() < 5 * (3000 / 49) ** 0.5  # five standard deviations


def test_associations_are_different_pairs_and_follow_the_table():
    data = tasks.associations(g(), vocab=7, count=40)
    assert len(set(map(tuple, data.tokens.tolist()))) == 40
    assert torch.equal(data.next_tokens, data.table[data.tokens[:, 0], data.tokens[:, 1]])
    everything = tasks.associations(g(1), vocab=7, count=49)
    assert sorted(everything.tokens.tolist()) == [[a, b] for a in range(7) for b in range(7)]
    with pytest.raises(ValueError, match=r"^count: got 50; expected .* 49"):
        tasks.associations(g(), vocab=7, count=50)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("classes", [None, 5])
def test_contexts_and_queries(shared, classes):
    data = tasks.context_queries(g(), 200, 3, 11, shared=shared, classes=classes)
    assert data.contexts.shape == ((3, 11) if shared else (200, 3, 11))
    assert data.queries.shape == (200, 11)
    for x in (data.contexts, data.queries):
        assert 0 <= x.min() < 0.1
        assert 0.9 < x.max() < 1
    assert data.labels.dtype == (torch.float32 if classes is None else torch.int64)
    assert classes is None or set(data.labels.tolist()) == set(range(5))


def test_the_generator_decides():
    first, again, other = (tasks.bigrams(g(seed), 5, 50) for seed in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: tasks.bigrams(None, 2, 5), "generator"),
        (lambda: tasks.associations(0, 2, 4), "generator"),
        (lambda: tasks.context_queries(None, 5, 3, shared=True), "generator"),
        (lambda: tasks.context_queries(g(), 5, 3, shared=True, dtype=torch.int64), "dtype"),
        (lambda: tasks.bigrams(g(), 1, 5), "vocab"),
        (lambda: tasks.bigrams(g(), 5, 0), "count"),
        (lambda: tasks.context_queries(g(), 0, 3, shared=True), "examples"),
        (lambda: tasks.context_queries(g(), 5, 3, shared=True, classes=1), "classes"),
        (lambda: tasks.context_queries(g(), 5, 3, shared=1), "shared"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: got "):
        call()


def test_associations_are_a_uniformly_random_subset():
    """Of 400 draws of 5 of the 25 pairs each pair is in about 80; the standard deviation is 8."""
    drawn = [tasks.associations(torch.Generator().manual_seed(seed), 5, 5) for seed in range(400)]
    tokens = torch.cat([one.tokens for one in drawn])
    counts = torch.bincount(5 * tokens[:, 0] + tokens[:, 1], minlength=25)
    assert 40 < counts.min() <= counts.max() < 120


@pytest.mark.parametrize("part", ["contexts", "queries", "labels"])
def test_real_numbers_are_uniform_on_the_unit_interval(part):
    g = torch.Generator().manual_seed(0)
    drawn = tasks.context_queries(g, 1000, 3, 5, shared=False, classes=None)
    x = getattr(drawn, part).flatten()
    assert 0 <= x.min() < 0.01
    assert 0.99 < x.max() <= 1
    assert x.mean().item() == pytest.approx(1 / 2, abs=0.04)
    assert x.var().item() == pytest.approx(1 / 12, abs=0.01)
