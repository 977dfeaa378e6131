"""Many tiny transformers trained at once on a few sequences each.

The question is whether gradient descent finds weights at all for a handful of sequences, not how
fast. The published protocols and sizes are in :mod:`attnmem.training`.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from .attention import AoTWeights, aot
from .checks import (
    check_integer,
    check_integers,
    check_size,
    check_tensor,
    check_tokens,
    checked_by,
)

EVERY = 50  # steps between two counts of what is right
SPREAD = 3.0  # standard deviation of the logits at the start


def _check_tasks(sequences, next_tokens, vocab, dim, head_dim, heads, seed, steps, rate) -> None:
    check_tensor("sequences", sequences, "(R, T_0, S)", 3)
    check_tensor("next_tokens", next_tokens, "(R, T_0)", 2)
    check_integer("vocab", vocab)
    for name, tensor in (("sequences", sequences), ("next_tokens", next_tokens)):
        check_tokens(name, tensor, vocab)
    for axis, what in enumerate(("the number of runs", "the number of sequences")):
        check_size("next_tokens", next_tokens, axis, sequences.shape[axis], what)
    for name, value in (("dim", dim), ("head_dim", head_dim), ("heads", heads), ("steps", steps)):
        check_integer(name, value)
    check_integer("seed", seed, least=0)


@checked_by(_check_tasks)
def train_tiny(
    sequences: Int[Tensor, "R B S"],
    next_tokens: Int[Tensor, "R B"],
    *,
    vocab: int,
    dim: int,
    head_dim: int,
    heads: int,
    seed: int,
    steps: int = 1000,
    rate: float = 0.03,
) -> Int[Tensor, " R"]:
    """Count how many next tokens of each task one training gets right at its best step.

    The model is :func:`attnmem.attention.aot` in float64. Every weight is trained, from a Gaussian
    start. Adam with betas (0.9, 0.99) minimizes the cross-entropy, and its rate falls linearly to
    zero. The answers are counted every 50 steps and at the end.

    Args:
        sequences: One task for each of ``R`` runs, integers from 0 to ``vocab - 1``.
        next_tokens: What follows each sequence.
        vocab: Vocabulary size ``N``.
        dim: Embedding dimension ``d``.
        head_dim: Head dimension ``d_h``.
        heads: Number of heads ``H``.
        seed: Seed of the start, at least 0.
        steps: Number of steps.
        rate: Learning rate at the first step.

    Returns:
        For each run the largest number of right answers.

    Raises:
        ValueError: If sizes do not fit, or a token is out of range.

    Example:
        >>> xor = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]).expand(5, 4, 3)
        >>> labels = torch.tensor([0, 1, 1, 0]).expand(5, 4)
        >>> sizes = {"vocab": 2, "dim": 2, "head_dim": 2, "seed": 0, "steps": 400}
        >>> [int(train_tiny(xor, labels, heads=H, **sizes).max()) for H in (1, 2)]
        [3, 4]
    """
    weights = _start(len(sequences), sequences.shape[-1], vocab, dim, head_dim, heads, seed)
    optimizer = torch.optim.Adam(weights, lr=rate, betas=(0.9, 0.99))
    best = torch.zeros(len(sequences), dtype=torch.int64)
    for step in range(steps + 1):
        logits = aot(weights, sequences)
        if step % EVERY == 0 or step == steps:
            right = (logits.argmax(-1) == next_tokens).sum(-1)
            best = torch.maximum(best, right)
        if step == steps or bool((best == next_tokens.shape[-1]).all()):
            break
        loss = -logits.log_softmax(-1).gather(-1, next_tokens[..., None]).mean((-1, -2)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.step()
    return best


def _check_rounds(
    sequences, next_tokens, vocab, dim, head_dim, heads, rounds, steps, least_runs
) -> None:
    _check_tasks(sequences, next_tokens, vocab, dim, head_dim, heads, 0, steps, None)
    check_integers(rounds=rounds, least_runs=least_runs)


@checked_by(_check_rounds)
def never_learned(
    sequences: Int[Tensor, "R B S"],
    next_tokens: Int[Tensor, "R B"],
    *,
    vocab: int,
    dim: int,
    head_dim: int,
    heads: int,
    rounds: int,
    steps: int = 1000,
    least_runs: int = 1,
) -> Int[Tensor, " k"]:
    """Find the tasks of which no training gets all next tokens right.

    Each round trains the tasks that are left by :func:`train_tiny`, with its number as the seed.

    Args:
        sequences: As for :func:`train_tiny`, one task in each row.
        next_tokens: What follows each sequence.
        vocab: Vocabulary size ``N``.
        dim: Embedding dimension ``d``.
        head_dim: Head dimension ``d_h``.
        heads: Number of heads ``H``.
        rounds: Number of rounds.
        steps: Number of steps of each training.
        least_runs: If fewer tasks are left, each of them starts several times in a round, as long
            as there are at most so many runs.

    Returns:
        The numbers of the tasks, in rising order.

    Raises:
        ValueError: If sizes do not fit, or a token is out of range.

    Example:
        >>> bits = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]).expand(2, 4, 3)
        >>> labels = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 0]])  # and, xor
        >>> sizes = {"vocab": 2, "dim": 2, "head_dim": 2, "rounds": 2, "steps": 400}
        >>> never_learned(bits, labels, heads=1, **sizes).tolist()
        [1]
    """
    sizes = {"vocab": vocab, "dim": dim, "head_dim": head_dim, "heads": heads, "steps": steps}
    left = torch.arange(len(sequences))
    for seed in range(rounds):
        if not len(left):
            break
        tried = left.repeat(max(1, least_runs // len(left)))
        right = train_tiny(sequences[tried], next_tokens[tried], seed=seed, **sizes)
        left = left[~torch.isin(left, tried[right == next_tokens.shape[1]])]
    return left


def _start(R: int, S: int, N: int, d: int, d_h: int, H: int, seed: int) -> AoTWeights:
    """Gaussian weights of R transformers, as leaves that ask for gradients."""
    draw = torch.Generator().manual_seed(seed)
    map_scale = (SPREAD / d_h**0.5) ** 0.5 / d**0.5
    sizes = {
        "embedding": ((N, d), 1.0),
        "positions": ((S, d), 1.0),
        "W_Q": ((H, d_h, d), map_scale),
        "W_K": ((H, d_h, d), map_scale),
        "W_V": ((H, d_h, d), d**-0.5),
        "W_O": ((H, d, d_h), d_h**-0.5),
        "W_U": ((N, d), 1.0),
    }
    return AoTWeights(
        **{
            name: (
                scale * torch.randn(R, *shape, generator=draw, dtype=torch.float64)
            ).requires_grad_()
            for name, (shape, scale) in sizes.items()
        }
    )
