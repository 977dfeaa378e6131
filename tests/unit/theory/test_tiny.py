"""The linear associative memory and tiny trainings, against plain loops and known answers."""

import math

import pytest
import torch
import torch.nn.functional as F

from attnmem import AoTWeights, aot
from attnmem.theory.counts import class_price
from attnmem.theory.impossible import every_parity
from attnmem.theory.tiny import (
    Facts,
    count_at,
    outer_products,
    random_facts,
    recalled,
    train_tiny,
    trained_matrix,
)

# --- the linear associative memory ----------------------------------------------------------------


def test_drawn_vectors_have_length_one_and_differ():
    facts = random_facts(count=7, dim=3, seed=1)
    for vectors in facts:
        assert torch.allclose(vectors.norm(dim=1), torch.ones(7).double())
    assert len(torch.cat(facts).unique(dim=0)) == 14
    assert torch.equal(facts.keys, random_facts(count=7, dim=3, seed=1).keys)
    assert not torch.equal(facts.keys, random_facts(count=7, dim=3, seed=2).keys)


def test_recall_is_that_of_a_plain_loop_without_ties():
    facts = random_facts(count=11, dim=5, seed=0)
    W = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double()
    right = 0
    for i, key in enumerate(facts.keys):
        scores = [float(u @ W @ key) for u in facts.values]
        right += scores.index(max(scores)) == i
    assert 0 < right < 11
    assert recalled(W, facts) == pytest.approx(right / 11)
    assert recalled(0 * W, facts) == recalled(W * math.nan, facts) == 0
    twice = Facts(torch.eye(3), torch.eye(3)[[0, 1, 1]])  # two equal values
    assert recalled(torch.eye(3), twice) == pytest.approx(1 / 3)


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


@pytest.mark.parametrize(("count", "steps", "last"), [(35, 1, 1), (35, 9, 9), (16, 200, 21)])
def test_trained_matrix_is_that_of_a_plain_loop(count, steps, last):
    facts = random_facts(count, 8, seed=0)
    best, step = plain_training(facts, steps)
    assert step == last
    torch.testing.assert_close(trained_matrix(facts, steps=steps), best, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 16])
@pytest.mark.parametrize("load", [0.0, 0.1, 1.0, 3.7])
def test_the_count_is_the_last_within_the_load(load, dim):
    p, price = count_at(load, dim), lambda p: p * class_price(p)
    assert p == 1 or price(p) <= load * dim**2
    assert load * dim**2 < price(p + 1)


ONES, DRAWN = torch.ones(3, 2), random_facts(3, 3, seed=0)


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (random_facts, (1, 3, 0), "count"),
        (count_at, (-0.1, 3), "load"),
        (count_at, (math.inf, 3), "load"),
        (trained_matrix, (DRAWN, 0), "steps"),
        (outer_products, (Facts(ONES[:0], ONES[:0]),), "facts.keys"),
        (outer_products, (Facts(ONES, ONES[:2]),), "facts.values"),
        (recalled, (torch.ones(2, 3), DRAWN), "matrix"),
        (recalled, (torch.eye(4), DRAWN), "facts.keys"),
    ],
)
def test_memory_refuses_by_name(function, arguments, name):
    with pytest.raises(ValueError, match=rf"^{name}: got "):
        function(*arguments)


# --- tiny transformers ----------------------------------------------------------------------------

TINY = [  # runs, sequences, tokens of each, N, d, d_h, H
    (1, 1, 1, 1, 1, 1, 1),
    (90, 4, 3, 5, 3, 2, 2),
    (30, 5, 2, 3, 4, 3, 1),
    (40, 4, 5, 4, 3, 1, 3),
]
SIZES = {"vocab": 5, "dim": 3, "head_dim": 2, "heads": 2}
ONE_HEAD = {"vocab": 2, "dim": 2, "head_dim": 2, "heads": 1}


def random_tasks(R, B, S, N):
    """``R`` tasks of ``B`` sequences each; small ones are sometimes learned in a few steps."""
    generator = torch.Generator().manual_seed(1)
    sequences = torch.randint(N, (R, B, S), generator=generator)
    return sequences, torch.randint(N, (R, B), generator=generator)


def start(R, S, N, d, d_h, H, seed):
    """Gaussian weights with logits of standard deviation 3 between tokens of standard Gaussians."""
    g = torch.Generator().manual_seed(seed)
    shapes = (N, d), (S, d), *3 * ((H, d_h, d),), (H, d, d_h), (N, d)
    deviations = 1, 1, *2 * ((3 / (d * d_h**0.5)) ** 0.5,), d**-0.5, d_h**-0.5, 1
    drawn = (torch.randn(R, *shape, generator=g, dtype=torch.float64) for shape in shapes)
    weights = (W * deviation for W, deviation in zip(drawn, deviations, strict=True))
    return AoTWeights(*(W.requires_grad_() for W in weights))


def plain(weights, sequences, next_tokens, steps, rate):
    """Most right answers of each run at steps 0, 50, ... and the last, by the layer itself."""
    optimizer = torch.optim.Adam(weights, lr=rate, betas=(0.9, 0.99))
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    best = torch.zeros(len(sequences), dtype=torch.int64)
    for step in range(steps + 1):
        logits = aot(weights, sequences)
        if step % 50 == 0 or step == steps:
            best = torch.maximum(best, (logits.argmax(-1) == next_tokens).sum(-1))
        losses = F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten(), reduction="none")
        optimizer.zero_grad()
        losses.view_as(next_tokens).mean(dim=1).sum().backward()
        optimizer.step()
        falling.step()
    return best.tolist()


@pytest.mark.parametrize("sizes", TINY)
@pytest.mark.parametrize(("steps", "rate"), [(2, 0.3), (49, 0.03), (120, 0.03)])
def test_tiny_trainings_are_those_of_a_plain_loop(sizes, steps, rate):
    R, B, S, N, d, d_h, H = sizes
    tasks, weights = random_tasks(R, B, S, N), start(R, S, N, d, d_h, H, seed=7)
    model = {"vocab": N, "dim": d, "head_dim": d_h, "heads": H, "seed": 7}
    options = {} if rate == 0.03 else {"rate": rate}  # by default three hundredths
    right = train_tiny(*tasks, steps=steps, **model, **options).tolist()
    assert right == plain(weights, *tasks, steps, rate)
    assert len(set(right)) > 1 or set(right) == {B}
    narrow = train_tiny(*(x.int() for x in tasks), steps=steps, **model, **options)
    assert narrow.tolist() == right


@pytest.mark.parametrize("least_runs", [1, 40])
def test_rounds_train_the_rest_with_the_next_seed(least_runs):
    tasks, best = random_tasks(30, 4, 3, 5), torch.zeros(30, dtype=int)
    for seed in (7, 8, 9):
        tried = torch.arange(30)[best < 4]
        tried = tried.repeat(max(1, least_runs // len(tried)))
        right = train_tiny(*(x[tried] for x in tasks), seed=seed, steps=12, **SIZES)
        for task, count in zip(tried.tolist(), right.tolist(), strict=True):
            best[task] = max(int(best[task]), count if least_runs == 1 or count == 4 else 0)
    found = train_tiny(*tasks, seed=7, rounds=3, steps=12, least_runs=least_runs, **SIZES)
    assert 0 < int((best < 4).sum()) < 30
    assert ((found < 4) == (best < 4)).all()
    assert least_runs > 1 or torch.equal(found, best)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next_tokens": torch.zeros(2, 3, dtype=torch.int64)}, "next_tokens: got B = 3"),
        ({"next_tokens": torch.full((2, 4), 2)}, "next_tokens: got tokens from 2 to 2"),
        ({"next_tokens": torch.zeros(2, 4, dtype=int, device="meta")}, "next_tokens: got device"),
        ({"sequences": torch.full((2, 4, 3), -1)}, "sequences: got tokens from -1 to -1"),
        ({"sequences": torch.zeros(2, 4, 0, dtype=torch.int64)}, "sequences: got shape"),
        *(({name: 0}, f"{name}: got 0") for name in ("steps", "rounds", "least_runs")),
        ({"rate": -0.1}, "rate: got -0.1"),
    ],
)
def test_tiny_refuses_by_name(change, message):
    cube, parity = every_parity(2)
    task = {"sequences": cube.expand(2, 4, 3), "next_tokens": parity.expand(2, 4)}
    task |= ONE_HEAD | {"steps": 10} | change
    with pytest.raises(ValueError, match=f"^{message}"):
        train_tiny(**{"seed": 0} | task)
