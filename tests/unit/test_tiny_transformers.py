"""Tiny trainings: their steps against PyTorch's, and what is learned or never."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F

from attnmem import AoTWeights, aot
from attnmem.theory.sequences import every_parity
from attnmem.theory.tiny import never_learned, train_tiny

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
    tables, maps, values, outputs = ((N, d), (S, d)), 2 * ((H, d_h, d),), (H, d_h, d), (H, d, d_h)
    shapes = *tables, *maps, values, outputs, (N, d)
    deviations = 1, 1, *2 * ((3 / (d * d_h**0.5)) ** 0.5,), d**-0.5, d_h**-0.5, 1
    drawn = (torch.randn(R, *shape, generator=g, dtype=torch.float64) for shape in shapes)
    weights = (W * deviation for W, deviation in zip(drawn, deviations, strict=True))
    return AoTWeights(*(W.requires_grad_() for W in weights))


def plain_loss(weights, sequences, next_tokens):
    """The sum over runs of the mean cross-entropy, by PyTorch."""
    logits = aot(weights, sequences)
    losses = F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten(), reduction="none")
    return losses.view_as(next_tokens).mean(dim=1).sum()


def plain(weights, sequences, next_tokens, steps, rate):
    """Most right answers of each run at steps 0, 50, ... and the last, by PyTorch's Adam."""
    optimizer = torch.optim.Adam(weights, lr=rate, betas=(0.9, 0.99))
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    best = torch.zeros(len(sequences), dtype=torch.int64)
    for step in range(steps + 1):
        if step % 50 == 0 or step == steps:
            right = aot(weights, sequences).argmax(-1) == next_tokens
            best = torch.maximum(best, right.sum(-1))
        optimizer.zero_grad()
        plain_loss(weights, sequences, next_tokens).backward()
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
def test_what_is_never_learned_is_what_no_round_learns(least_runs):
    tasks, remaining = random_tasks(30, 4, 3, 5), torch.arange(30)
    for seed in range(3):
        tried = remaining.repeat(max(1, least_runs // len(remaining)))
        right = train_tiny(*(x[tried] for x in tasks), seed=seed, steps=12, **SIZES)
        remaining = torch.tensor([task for task in remaining if right[tried == task].max() < 4])
    never = never_learned(*tasks, rounds=3, steps=12, least_runs=least_runs, **SIZES)
    assert 0 < len(remaining) < 30
    assert never.tolist() == remaining.tolist()


def test_tiny_trainings_do_not_see_each_other():
    """A hard task beside an easy one: the easy one is learned, and counts its own answers."""
    cube, parity = every_parity(2)
    tasks, labels = torch.stack([cube, cube]), torch.stack([parity, cube[:, 0]])
    assert train_tiny(tasks, labels, **ONE_HEAD, seed=3, steps=300).tolist() == [3, 4]


@pytest.mark.parametrize("least_runs", [1, 12])
def test_only_parity_and_its_opposite_are_never_learned_by_one_head(least_runs):
    cube, parity = every_parity(2)
    labels = torch.stack([parity, cube[:, 0], 1 - parity, cube[:, 1]])
    tasks, sizes = cube.expand(4, 4, 3), ONE_HEAD | {"steps": 200, "rounds": 3}
    sizes |= {"least_runs": least_runs}
    assert never_learned(tasks, labels, **sizes).tolist() == [0, 2]
    assert never_learned(tasks, labels.roll(1, 0), **sizes).tolist() == [1, 3]
    assert never_learned(tasks[:0], labels[:0], **sizes).tolist() == []


def test_equal_sequences_with_different_labels_are_not_all_right():
    sequences = torch.zeros(2, 3, 2, dtype=torch.int64)
    sizes = {"vocab": 4, "dim": 2, "head_dim": 2, "heads": 1, "seed": 0}
    labels = torch.tensor([[0, 1, 2]]).expand(2, 3)
    assert train_tiny(sequences, labels, steps=200, **sizes).max() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next_tokens": torch.zeros(2, 3, dtype=torch.int64)}, "next_tokens: got B = 3"),
        ({"next_tokens": torch.zeros(1, 4, dtype=torch.int64)}, "next_tokens: got R = 1"),
        ({"next_tokens": torch.full((2, 4), 2)}, "next_tokens: got tokens from 2 to 2"),
        ({"next_tokens": torch.zeros(4, dtype=torch.int64)}, "next_tokens: got shape"),
        ({"next_tokens": torch.zeros(2, 4)}, "next_tokens: got dtype"),
        ({"next_tokens": torch.zeros(2, 4, dtype=int, device="meta")}, "next_tokens: got device"),
        ({"sequences": torch.full((2, 4, 3), -1)}, "sequences: got tokens from -1 to -1"),
        ({"sequences": torch.zeros(4, 3, dtype=torch.int64)}, "sequences: got shape"),
        ({"sequences": torch.zeros(2, 4, 0, dtype=torch.int64)}, "sequences: got shape"),
        ({"vocab": 2.5}, "vocab: got 2.5"),
        ({"seed": -1}, "seed: got -1"),
        *(({name: 0}, f"{name}: got 0") for name in ("dim", "head_dim", "heads", "steps")),
        *(({name: 0}, f"{name}: got 0") for name in ("rounds", "least_runs")),
        ({"rate": math.nan}, "rate: got nan"),
        ({"rate": -0.1}, "rate: got -0.1"),
    ],
)
def test_bad_input_is_refused_by_name(change, message):
    cube, parity = every_parity(2)
    task = {"sequences": cube.expand(2, 4, 3), "next_tokens": parity.expand(2, 4)}
    task |= ONE_HEAD | {"steps": 10} | change
    for function, own in ((train_tiny, {"seed": 0}), (never_learned, {"rounds": 1})):
        if change.keys() <= inspect.signature(function).parameters.keys():
            with pytest.raises(ValueError, match=f"^{message}"):
                function(**own | task)
