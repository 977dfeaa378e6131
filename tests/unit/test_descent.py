"""Tiny trainings: their steps against PyTorch's, and what is learned or never."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from attnmem import descent
from attnmem.attention import AoTWeights, aot
from attnmem.constructions.sequences import every_parity
from attnmem.descent import never_learned, train_tiny

TINY = [  # runs, sequences, tokens of each, N, d, d_h, H
    (1, 1, 1, 1, 1, 1, 1),
    (3, 4, 3, 2, 2, 2, 1),
    (2, 5, 2, 3, 4, 3, 2),
    (4, 2, 5, 4, 3, 1, 3),
    (2, 6, 4, 2, 1, 1, 2),
]


def random_tasks(R, B, S, N):
    """``R`` tasks of ``B`` sequences each; small ones are sometimes learned in a few steps."""
    generator = torch.Generator().manual_seed(1)
    sequences = torch.randint(N, (R, B, S), generator=generator)
    return sequences, torch.randint(N, (R, B), generator=generator)


def tiny(sequences, next_tokens, N, d, d_h, H):
    """Trainings on these tasks, and the same weights again."""
    weights = descent._start(len(sequences), sequences.shape[-1], N, d, d_h, H, 7)
    copies = AoTWeights(*(W.clone().requires_grad_() for W in weights))
    return descent._Trainings(weights, sequences, next_tokens), copies


def plain_loss(weights, trainings):
    """The sum over runs of the mean cross-entropy, by PyTorch."""
    logits, wanted = aot(weights, trainings.sequences), trainings.next_tokens
    each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return each.view_as(wanted).mean(dim=1).sum()


@pytest.mark.parametrize("sizes", TINY)
def test_the_gradient_of_tiny_trainings_is_that_of_autograd(sizes):
    trainings, weights = tiny(*random_tasks(*sizes[:4]), *sizes[3:])
    loss = plain_loss(weights, trainings)
    expected = torch.autograd.grad(loss, weights, materialize_grads=True)
    found = descent._gradient(trainings.weights, trainings.used, trainings.wanted)
    for name, wanted, g in zip(AoTWeights._fields, expected, found, strict=True):
        torch.testing.assert_close(g, wanted, msg=name)


@pytest.mark.parametrize("sizes", TINY)
def test_tiny_trainings_take_the_steps_of_adam_and_may_leave(sizes):
    trainings, weights = tiny(*random_tasks(*sizes[:4]), *sizes[3:])
    optimizer = torch.optim.Adam(weights, betas=(0.9, 0.99))
    whole = copy.copy(trainings)
    stay = torch.arange(0, sizes[0], 2)
    for step in range(20):
        if step == 7:
            trainings.keep(stay)
        optimizer.param_groups[0]["lr"] = rate = 0.1 / (1 + step)
        trainings.step(rate)
        optimizer.zero_grad()
        plain_loss(weights, whole).backward()
        optimizer.step()
    for wanted, W in zip(weights, trainings.weights, strict=True):
        torch.testing.assert_close(W, wanted.detach()[stay], rtol=1e-9, atol=1e-9)
    right = aot(weights, whole.sequences).argmax(-1) == whole.next_tokens
    assert trainings.right().tolist() == right.sum(-1)[stay].tolist()


def plain(weights, trainings, tasks, steps, rate):
    """Most right answers of each run, by PyTorch's Adam, run until its task is solved by one."""
    optimizer = torch.optim.Adam(weights, lr=rate, betas=(0.9, 0.99))
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    best, solved = [0] * len(tasks), set()
    for step in range(steps + 1):
        if step in {0, 3, 6, steps}:
            right = aot(weights, trainings.sequences).argmax(-1) == trainings.next_tokens
            counts = zip(tasks, right.sum(-1).tolist(), strict=True)
            looks = [0 if task in solved else count for task, count in counts]
            best = [max(before, now) for before, now in zip(best, looks, strict=True)]
            solved |= {task for task, most in zip(tasks, best, strict=True) if most == SOLVED}
        optimizer.zero_grad()
        plain_loss(weights, trainings).backward()
        optimizer.step()
        falling.step()
    return best


SIZES = {"vocab": 5, "dim": 3, "head_dim": 2, "heads": 2}
SOLVED = 4  # sequences of each task


@pytest.mark.parametrize("starts", [1, 4])
@pytest.mark.parametrize("steps", [2, 7])
def test_tiny_trainings_are_those_of_a_plain_loop(starts, steps, monkeypatch):
    monkeypatch.setattr(descent, "EVERY", 3)
    repeated = (x.repeat_interleave(starts, dim=0) for x in random_tasks(100, SOLVED, 3, 5))
    trainings, weights = tiny(*repeated, *SIZES.values())
    whole, tasks = copy.copy(trainings), torch.arange(100).repeat_interleave(starts)
    expected = plain(weights, whole, tasks.tolist(), steps, 0.3)
    found = descent._most_right(trainings, tasks, steps, 0.3)
    assert 0 < expected.count(SOLVED) < len(expected)
    assert found.tolist() == expected


@pytest.mark.parametrize("least_runs", [1, 40])
def test_what_is_never_learned_is_what_no_round_learns(least_runs):
    tasks, left = random_tasks(30, SOLVED, 3, 5), torch.arange(30)
    for seed in range(3):
        tried = left.repeat(max(1, least_runs // len(left)))
        right = train_tiny(*(x[tried] for x in tasks), seed=seed, steps=12, **SIZES)
        left = torch.tensor([task for task in left if right[tried == task].max() < SOLVED])
    found = never_learned(*tasks, rounds=3, steps=12, least_runs=least_runs, **SIZES)
    assert 0 < len(left) < 30
    assert found.tolist() == left.tolist()


def test_answers_are_counted_every_fifty_steps_and_at_the_end(monkeypatch):
    made, looks = [], []
    right, step = descent._Trainings.right, descent._Trainings.step
    monkeypatch.setattr(descent._Trainings, "step", lambda *x: made.append(0) or step(*x))
    monkeypatch.setattr(
        descent._Trainings, "right", lambda *x: looks.append(len(made)) or right(*x)
    )
    parity = (rows[None] for rows in every_parity(2))
    train_tiny(*parity, vocab=2, dim=2, head_dim=2, heads=1, seed=0, steps=120)
    assert looks == [0, 50, 100, 120]


def test_rates_fall_from_three_hundredths_to_zero(monkeypatch):
    rates = []
    monkeypatch.setattr(descent._Trainings, "step", lambda trainings, rate: rates.append(rate))
    tasks, sizes = random_tasks(2, 5, 3, 2), {"vocab": 2, "dim": 2, "head_dim": 1, "heads": 1}
    descent.train_tiny(*tasks, seed=0, steps=4, **sizes)
    descent.never_learned(*tasks, rounds=1, steps=4, **sizes)
    assert rates == pytest.approx(2 * [0.03, 0.0225, 0.015, 0.0075])


def test_tiny_trainings_start_from_gaussians_that_spread_the_logits():
    N, S, d, d_h, H = 3, 2, 5, 3, 2
    weights = descent._start(20_000, S, N, d, d_h, H, 0)
    deviations = dict.fromkeys(AoTWeights._fields, 1.0)
    deviations |= {"W_V": d**-0.5, "W_O": d_h**-0.5}
    deviations["W_Q"] = deviations["W_K"] = (3 / (d * d_h**0.5)) ** 0.5
    for name, W in weights._asdict().items():
        assert float(W.mean()) == pytest.approx(0, abs=0.02)
        assert float(W.std()) == pytest.approx(deviations[name], rel=0.01)
    x, y = torch.randn(2, 20_000, d, 1, dtype=torch.float64)
    logits = x.mT @ weights.W_Q[:, 0].mT @ weights.W_K[:, 0] @ y
    assert float(logits.std()) == pytest.approx(3, rel=0.05)


def test_tiny_trainings_do_not_see_each_other():
    """A hard task beside an easy one: the easy one is learned, and counts its own answers."""
    cube, parity = every_parity(2)
    tasks, labels = torch.stack([cube, cube]), torch.stack([parity, cube[:, 0]])
    sizes = {"vocab": 2, "dim": 2, "head_dim": 2, "heads": 1, "seed": 3, "steps": 300}
    hard, easy = train_tiny(tasks, labels, **sizes).tolist()
    assert (hard, easy) == (3, 4)


@pytest.mark.parametrize("least_runs", [1, 12])
def test_only_parity_and_its_opposite_are_never_learned_by_one_head(least_runs):
    cube, parity = every_parity(2)
    labels = torch.stack([parity, cube[:, 0], 1 - parity, cube[:, 1]])
    tasks, sizes = cube.expand(4, 4, 3), {"vocab": 2, "dim": 2, "head_dim": 2, "heads": 1}
    sizes |= {"steps": 200, "rounds": 3, "least_runs": least_runs}
    assert never_learned(tasks, labels, **sizes).tolist() == [0, 2]
    assert never_learned(tasks, labels.roll(1, 0), **sizes).tolist() == [1, 3]
    assert never_learned(tasks[:0], labels[:0], **sizes).tolist() == []


@pytest.mark.parametrize("name", ["rounds", "least_runs", "dim", "head_dim", "heads", "steps"])
def test_bad_sizes_of_repeated_trainings_are_refused_by_name(name):
    cube, parity = every_parity(2)
    sizes = {"vocab": 2, "dim": 2, "head_dim": 2, "heads": 1, "rounds": 1, "steps": 1}
    with pytest.raises(ValueError, match=f"^{name}: got 0"):
        never_learned(cube.expand(2, 4, 3), parity.expand(2, 4), **sizes | {name: 0})


def test_tokens_of_32_bits_are_tokens():
    sequences, next_tokens = random_tasks(3, 4, 3, 2)
    sizes = {"vocab": 2, "dim": 2, "head_dim": 2, "heads": 1, "seed": 0, "steps": 60}
    narrow = train_tiny(sequences.int(), next_tokens.int(), **sizes)
    assert torch.equal(narrow, train_tiny(sequences, next_tokens, **sizes))


def test_a_tie_is_not_right():
    trainings, _ = tiny(*random_tasks(2, 3, 2, 4), 4, 2, 2, 1)
    trainings.weights.W_U.zero_()
    assert trainings.right().tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"next_tokens": torch.zeros(2, 3, dtype=torch.int64)}, "next_tokens: got shape"),
        ({"next_tokens": torch.full((2, 4), 2)}, "next_tokens: got tokens from 2 to 2"),
        ({"sequences": torch.zeros(4, 3, dtype=torch.int64)}, "sequences: got shape"),
        ({"next_tokens": torch.zeros(4, dtype=torch.int64)}, "next_tokens: got shape"),
        ({"next_tokens": torch.zeros(2, 4, 1, dtype=torch.int64)}, "next_tokens: got shape"),
        ({"steps": 0}, "steps: got 0"),
        ({"vocab": 2.5}, "vocab: got 2.5"),
        ({"seed": -1}, "seed: got -1"),
        ({"dim": 0}, "dim: got 0"),
        ({"head_dim": 0}, "head_dim: got 0"),
        ({"heads": 0}, "heads: got 0"),
        ({"sequences": torch.zeros(2, 4, 0, dtype=torch.int64)}, "sequences: got shape"),
        ({"rate": math.nan}, "rate: got nan"),
        ({"rate": -0.1}, "rate: got -0.1"),
    ],
)
def test_bad_input_of_tiny_trainings_is_refused_by_name(change, name):
    cube, parity = every_parity(2)
    task = {"sequences": cube.expand(2, 4, 3), "next_tokens": parity.expand(2, 4)}
    task |= {"vocab": 2, "dim": 2, "head_dim": 2, "heads": 1, "seed": 0, "steps": 10} | change
    with pytest.raises(ValueError, match=f"^{name}"):
        train_tiny(task.pop("sequences"), task.pop("next_tokens"), **task)
