"""Many tiny transformers trained at once on a few sequences each.

The question is whether gradient descent finds weights at all for a handful of sequences, not how
fast. The published protocols and sizes are in :mod:`attnmem.training`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .attention import AoTWeights, aot
from .checks import (
    check_integer,
    check_integers,
    check_number,
    check_seed,
    check_size,
    check_tensor,
    check_tokens,
    checked_by,
    refuse,
)
from .constructions.dana import margins
from .training.engine import FusedAdam

EVERY = 50  # steps between two counts of what is right
RATE, BETA_2 = 0.03, 0.99  # Adam's, the rate at the first step
SPREAD = 3.0  # standard deviation of the logits at the start


def _check_tasks(sequences, next_tokens, vocab, dim, head_dim, heads, seed, steps, rate) -> None:
    check_tensor("sequences", sequences, "(R, T_0, S)", 3)
    check_tensor("next_tokens", next_tokens, "(R, T_0)", 2)
    check_integer("vocab", vocab)
    for name, tensor in (("sequences", sequences), ("next_tokens", next_tokens)):
        check_tokens(name, tensor, vocab)
        if tensor.device.type != "cpu":
            refuse(name, f"device {tensor.device}", "the CPU")
    if not sequences.shape[-1]:
        refuse("sequences", f"shape {tuple(sequences.shape)}", "at least one token in each")
    for axis, what in enumerate(("the number of runs", "the number of sequences")):
        check_size("next_tokens", next_tokens, axis, sequences.shape[axis], what)
    for name, value in (("dim", dim), ("head_dim", head_dim), ("heads", heads), ("steps", steps)):
        check_integer(name, value)
    check_seed(seed)
    check_number("rate", rate, least=0, most=math.inf)


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
    rate: float = RATE,
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
    R, _, S = sequences.shape
    weights = _start(R, S, vocab, dim, head_dim, heads, seed)
    trainings = _Trainings(weights, sequences, next_tokens)
    return _most_right(trainings, torch.arange(R, device="cpu"), steps, rate)


def _most_right(
    trainings: _Trainings, tasks: Int[Tensor, " R"], steps: int, rate: float
) -> Int[Tensor, " R"]:
    """The largest number of right answers of each run, until a run of its task has all right.

    Runs with the same number in ``tasks`` train for the same task.
    """
    left, best = torch.arange(len(tasks), device=tasks.device), torch.zeros_like(tasks)
    for step in range(steps):
        if step % EVERY == 0:
            best[left] = torch.maximum(best[left], trainings.right())
            stay = ~torch.isin(tasks[left], tasks[best == trainings.asked])
            if not stay.all():
                left = left[stay]
                trainings.keep(stay.nonzero()[:, 0])
            if not len(left):
                return best
        trainings.step(rate * (1 - step / steps))
    best[left] = torch.maximum(best[left], trainings.right())
    return best


class _Trainings:
    """Trainings of one shape side by side, which may leave."""

    def __init__(
        self, weights: AoTWeights, sequences: Int[Tensor, "R B S"], next_tokens: Int[Tensor, "R B"]
    ) -> None:
        self.weights = weights
        self.optimizer = FusedAdam(weights._asdict(), beta_2=BETA_2)
        self.sequences, self.next_tokens = sequences.long(), next_tokens.long()
        self.asked = next_tokens.shape[1]
        S, vocab = sequences.shape[-1], weights.embedding.shape[-2]
        places = F.one_hot(torch.arange(S, device=sequences.device)).expand(*sequences.shape, -1)
        self.used = (
            torch.cat([F.one_hot(self.sequences, vocab), places], dim=-1).flatten(1, 2).double()
        )
        self.wanted = F.one_hot(self.next_tokens, vocab).double()

    @torch.inference_mode()
    def right(self) -> Int[Tensor, " R"]:
        """How many next tokens each run gets right."""
        logits = aot(self.weights, self.sequences).flatten(0, 1)
        right = margins(logits, self.next_tokens.flatten()) > 0
        return right.view(self.next_tokens.shape).sum(-1)

    @torch.inference_mode()
    def step(self, rate: float) -> None:
        """Take one step of Adam."""
        gradient = _gradient(self.weights, self.used, self.wanted)
        self.optimizer.step(gradient, torch.tensor([rate], dtype=torch.float64, device="cpu"))

    def keep(self, places: Int[Tensor, " k"]) -> None:
        """Drop all runs but those at ``places``."""
        self.weights = AoTWeights(*(W[places] for W in self.weights))
        self.optimizer = self.optimizer.kept(self.weights._asdict(), places)
        for name in ("sequences", "next_tokens", "used", "wanted"):
            setattr(self, name, getattr(self, name)[places])


def _gradient(
    weights: AoTWeights, used: Float[Tensor, "R BS NS"], wanted: Float[Tensor, "R B N"]
) -> AoTWeights:
    r"""The gradient of the mean cross-entropy of :func:`attnmem.attention.aot`, written out.

    At these sizes a step costs what its operations cost to call, and autograd calls five times as
    many. The heads' maps are multiplied first, :math:`A_h = (W_Q^h)^\top W_K^h` for the logits and
    :math:`M_h = (W_O^h W_V^h)^\top` for the outputs.

    Args:
        weights: Of each run.
        used: Which rows of the embeddings and the positions, one table after the other, are added
            for each token, as zeros and ones.
        wanted: The next tokens, one-hot.

    Returns:
        The gradient, in the place of each weight.
    """
    embedding, positions, W_Q, W_K, W_V, W_O, W_U = weights
    (R, B, _), (H, _, d) = wanted.shape, W_Q.shape[1:]
    x = (used @ torch.cat([embedding, positions], dim=1)).view(R, B, -1, d)
    last = x[:, :, -1]
    A = (W_Q.mT @ W_K).transpose(1, 2).flatten(2)  # (R, d, H d)
    M = (W_O @ W_V).mT.flatten(1, 2)  # (R, H d, d)
    q = (last @ A).view(R, B, H, d)
    alpha = (q @ x.mT).softmax(-1)
    z = (alpha @ x).flatten(2)
    out = last + z @ M

    g_logits = ((out @ W_U.mT).softmax(-1) - wanted) / B
    g_out = g_logits @ W_U
    g_M = (g_out.mT @ z).view(R, d, H, d).transpose(1, 2)  # of W_O W_V
    g_z = (g_out @ M.mT).view(R, B, H, d)
    g_alpha = g_z @ x.mT
    g_scores = alpha * (g_alpha - (alpha * g_alpha).sum(-1, keepdim=True))
    g_q = (g_scores @ x).flatten(2)
    g_A = (last.mT @ g_q).view(R, d, H, d).transpose(1, 2)  # of W_Q^T W_K
    g_x = alpha.mT @ g_z + g_scores.mT @ q
    g_x[:, :, -1] += g_out + g_q @ A.mT
    g_tables = used.mT @ g_x.flatten(1, 2)
    of_tables = g_tables.split([embedding.shape[1], positions.shape[1]], dim=1)
    of_heads = W_K @ g_A.mT, W_Q @ g_A, W_O.mT @ g_M, g_M @ W_V.mT
    return AoTWeights(*of_tables, *of_heads, g_logits.mT @ out)


def _check_rounds(
    sequences, next_tokens, vocab, dim, head_dim, heads, rounds, steps, least_runs
) -> None:
    _check_tasks(sequences, next_tokens, vocab, dim, head_dim, heads, 0, steps, RATE)
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
    left = torch.arange(len(sequences), device="cpu")
    for seed in range(rounds):
        if not len(left):
            break
        tried = left.repeat(max(1, least_runs // len(left)))
        weights = _start(len(tried), sequences.shape[-1], vocab, dim, head_dim, heads, seed)
        trainings = _Trainings(weights, sequences[tried], next_tokens[tried])
        right = _most_right(trainings, tried, steps, RATE)
        left = left[~torch.isin(left, tried[right == trainings.asked])]
    return left


def _start(R: int, S: int, N: int, d: int, d_h: int, H: int, seed: int) -> AoTWeights:
    """Gaussian weights of R transformers."""
    draw, on_cpu = torch.Generator().manual_seed(seed), {"dtype": torch.float64, "device": "cpu"}
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
            name: scale * torch.randn(R, *shape, generator=draw, **on_cpu)
            for name, (shape, scale) in sizes.items()
        }
    )
