"""The linear associative memory against plain loops and cases with a known answer."""

import math

import pytest
import torch

from attnmem.theory.tiny import (
    Facts,
    count_at,
    outer_products,
    random_facts,
    recalled,
    trained_matrix,
)


def test_drawn_vectors_have_length_one_and_differ():
    facts = random_facts(count=7, dim=3, seed=1)
    for vectors in facts:
        assert vectors.shape == (7, 3)
        assert vectors.dtype == torch.float64
        assert torch.allclose(vectors.norm(dim=1), torch.ones(7).double())
        assert len(vectors.unique(dim=0)) == 7
    assert not torch.allclose(*facts)
    again = random_facts(count=7, dim=3, seed=1)
    assert torch.equal(facts.keys, again.keys)
    assert not torch.equal(facts.keys, random_facts(count=7, dim=3, seed=2).keys)


def test_recall_is_that_of_a_plain_loop():
    facts = random_facts(count=11, dim=5, seed=0)
    W = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double()
    right = 0
    for i, key in enumerate(facts.keys):
        image = [sum(W[a, b].item() * key[b].item() for b in range(5)) for a in range(5)]
        scores = [sum(u[a].item() * image[a] for a in range(5)) for u in facts.values]
        right += scores.index(max(scores)) == i
    assert 0 < right < 11
    assert recalled(W, facts) == pytest.approx(right / 11)


def test_a_tie_and_what_is_no_number_are_not_recalled():
    facts = random_facts(count=5, dim=3, seed=0)
    assert recalled(torch.zeros(3, 3).double(), facts) == 0
    assert recalled(torch.full((3, 3), torch.nan).double(), facts) == 0
    twice = Facts(torch.eye(3), torch.eye(3)[[0, 1, 1]])  # two equal values
    assert recalled(torch.eye(3), twice) == pytest.approx(1 / 3)


def test_outer_products_recall_orthogonal_keys_whatever_the_values():
    _, values = random_facts(count=6, dim=6, seed=3)
    facts = Facts(torch.eye(6).double(), values)
    W = outer_products(facts)
    assert torch.allclose(W, values.mT)
    assert recalled(W, facts) == 1


def test_training_recalls_what_outer_products_confuse():
    facts = random_facts(count=count_at(0.6, 16), dim=16, seed=0)
    assert recalled(outer_products(facts), facts) < 0.9
    assert recalled(trained_matrix(facts), facts) == 1


def plain_training(facts, steps):
    """Cross-entropy by Adam, with the gradient by hand; the best matrix of all steps."""
    (p, d), (keys, values) = facts.keys.shape, facts
    W = 2 * math.log(p) * sum(torch.outer(u, x) for x, u in zip(keys, values, strict=True))
    mean, square, best, most = torch.zeros(d, d), torch.zeros(d, d), None, -1
    for step in range(steps + 1):
        matches = torch.stack([values @ W @ x for x in keys])
        if (right := recalled(W, facts)) > most:
            best, most = W, right
        if right == 1 or step == steps:
            return best, step
        errors = (matches.softmax(1) - torch.eye(p)) / p
        gradient = values.T @ errors.T @ keys
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        first, second = mean / (1 - 0.9 ** (step + 1)), square / (1 - 0.999 ** (step + 1))
        W = W - 0.3 * (1 - step / steps) * first / (second.sqrt() + 1e-8)
    raise AssertionError


@pytest.mark.parametrize(("load", "steps", "last"), [(2.0, 1, 1), (2.0, 9, 9), (0.7, 200, 21)])
def test_training_is_that_of_a_plain_loop(load, steps, last):
    facts = random_facts(count_at(load, 8), 8, seed=0)
    best, step = plain_training(facts, steps)
    assert step == last
    torch.testing.assert_close(trained_matrix(facts, steps=steps), best, rtol=1e-6, atol=1e-6)


def test_training_keeps_the_best_matrix_and_cannot_do_the_impossible():
    """Two equal keys with different values: one of them is lost, whatever the matrix."""
    keys, values = random_facts(count=4, dim=8, seed=0)
    facts = Facts(keys[[0, 1, 2, 2]], values)
    assert recalled(trained_matrix(facts, steps=50), facts) == 0.75


@pytest.mark.parametrize("dim", [1, 2, 5, 16])
@pytest.mark.parametrize("load", [0.0, 0.1, 0.5, 1.0, 3.7])
def test_the_count_is_the_last_within_the_load(load, dim):
    p = count_at(load, dim)
    assert p * math.log(p) <= load * dim**2 < (p + 1) * math.log(p + 1)


ONES, DRAWN = torch.ones(3, 2), random_facts(3, 3, seed=0)


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (random_facts, (1, 3, 0), "count"),
        (random_facts, (3, 0, 0), "dim"),
        (random_facts, (3, 3, -1), "seed"),
        (count_at, (-0.1, 3), "load"),
        (count_at, (math.inf, 3), "load"),
        (count_at, (0.5, 0), "dim"),
        (trained_matrix, (DRAWN, 0), "steps"),
        (outer_products, (Facts(ONES[:0], ONES[:0]),), "facts.keys"),
        (outer_products, (Facts(ONES, ONES.half()),), "facts.values"),
        (outer_products, (Facts(ONES, ONES[:2]),), "facts.values"),
        (outer_products, (Facts(ONES, ONES[:, :1]),), "facts.values"),
        (recalled, (torch.ones(2, 3), DRAWN), "matrix"),
        (recalled, (torch.eye(4), DRAWN), "facts.keys"),
    ],
)
def test_bad_arguments_are_named(function, arguments, name):
    with pytest.raises(ValueError, match=rf"^{name}: got "):
        function(*arguments)
