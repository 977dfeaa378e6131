"""Tiny trainings: their steps against PyTorch's, and what is learned or never."""

import copy

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


def tiny(R, B, S, N, d, d_h, H):
    """Trainings on random tasks, and the same weights again."""
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(N, (R, B, S), generator=generator)
    next_tokens = torch.randint(N, (R, B), generator=generator)
    weights = descent._start(R, S, N, d, d_h, H, 7)
    copies = AoTWeights(*(W.clone().requires_grad_() for W in weights))
    return descent._Trainings(weights, sequences, next_tokens), copies


def plain_loss(weights, trainings):
    """The sum over runs of the mean cross-entropy, by PyTorch."""
    logits, wanted = aot(weights, trainings.sequences), trainings.next_tokens
    each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return each.view_as(wanted).mean(dim=1).sum()


@pytest.mark.parametrize("sizes", TINY)
def test_the_gradient_of_tiny_trainings_is_that_of_autograd(sizes):
    trainings, weights = tiny(*sizes)
    loss = plain_loss(weights, trainings)
    expected = torch.autograd.grad(loss, weights, materialize_grads=True)
    found = descent._gradient(trainings.weights, trainings.used, trainings.wanted)
    for name, wanted, g in zip(AoTWeights._fields, expected, found, strict=True):
        torch.testing.assert_close(g, wanted, msg=name)


@pytest.mark.parametrize("sizes", TINY)
def test_tiny_trainings_take_the_steps_of_adam_and_may_leave(sizes):
    trainings, weights = tiny(*sizes)
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
        torch.testing.assert_close(W, wanted.detach()[stay])
    right = aot(weights, whole.sequences).argmax(-1) == whole.next_tokens
    assert trainings.right().tolist() == right.sum(-1)[stay].tolist()


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


@pytest.mark.parametrize("name", ["rounds", "least_runs", "heads"])
def test_bad_sizes_of_repeated_trainings_are_refused_by_name(name):
    cube, parity = every_parity(2)
    sizes = {"vocab": 2, "dim": 2, "head_dim": 2, "heads": 1, "rounds": 1, "least_runs": 1}
    with pytest.raises(ValueError, match=f"^{name}: got 0"):
        never_learned(cube.expand(2, 4, 3), parity.expand(2, 4), **sizes | {name: 0})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"next_tokens": torch.zeros(2, 3, dtype=torch.int64)}, "next_tokens: got shape"),
        ({"next_tokens": torch.full((2, 4), 2)}, "next_tokens: got tokens from 2 to 2"),
        ({"sequences": torch.zeros(4, 3, dtype=torch.int64)}, "sequences: got shape"),
        ({"steps": 0}, "steps: got 0"),
        ({"heads": 0}, "heads: got 0"),
    ],
)
def test_bad_input_of_tiny_trainings_is_refused_by_name(change, name):
    cube, parity = every_parity(2)
    task = {"sequences": cube.expand(2, 4, 3), "next_tokens": parity.expand(2, 4)}
    task |= {"vocab": 2, "dim": 2, "head_dim": 2, "heads": 1, "seed": 0, "steps": 10} | change
    with pytest.raises(ValueError, match=f"^{name}"):
        train_tiny(task.pop("sequences"), task.pop("next_tokens"), **task)
