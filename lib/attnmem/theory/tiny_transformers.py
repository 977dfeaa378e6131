"""Many tiny transformers trained at once on a few sequences each.

The question is whether gradient descent finds weights at all for a handful of sequences, not how
fast. The published protocols and sizes are in :mod:`attnmem.lab.training`.

A task is ``B`` sequences of tokens from 0 to ``vocab - 1``, on the CPU, and the token that follows
each; ``vocab`` is ``N``, ``dim`` the embedding dimension ``d``, ``head_dim`` that of a head
``d_h``, ``heads`` their number ``H``. Sizes that do not fit raise ``ValueError``.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import Range, Seed, check_tokens, checked, refuse
from ..core.layers import AoTWeights, aot
from ..lab.engine import FusedAdam
from .dana import margins

EVERY = 50  # steps between two counts of what is right
RATE, BETA_2 = 0.03, 0.99  # Adam's, the rate at the first step
SPREAD = 3.0  # standard deviation of the logits at the start


def _are_tokens(sequences: Tensor, next_tokens: Tensor, vocab: int) -> None:
    for name, tensor in (("sequences", sequences), ("next_tokens", next_tokens)):
        check_tokens(name, tensor, vocab)
        if tensor.device.type != "cpu":
            refuse(name, f"device {tensor.device}", "the CPU")
    if not sequences.shape[-1]:
        refuse("sequences", f"shape {tuple(sequences.shape)}", "at least one token in each")


@checked(also=_are_tokens)
def train_tiny(
    sequences: Int[Tensor, "R B S"],
    next_tokens: Int[Tensor, "R B"],
    *,
    vocab: int,
    dim: int,
    head_dim: int,
    heads: int,
    seed: Seed,
    steps: int = 1000,
    rate: Annotated[float | int, Range(0)] = RATE,
) -> Int[Tensor, " R"]:
    """Count how many next tokens of each task one training gets right at its best step.

    The model is :func:`attnmem.core.layers.aot` in float64. Every weight is trained, from a
    Gaussian start. Adam with betas (0.9, 0.99) minimizes the cross-entropy, and its ``rate`` falls
    linearly to zero. The answers are counted every 50 steps and at the end.

    Example:
        >>> xor = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]).expand(5, 4, 3)
        >>> labels = torch.tensor([0, 1, 1, 0]).expand(5, 4)
        >>> sizes = {"vocab": 2, "dim": 2, "head_dim": 2, "seed": 0, "steps": 400}
        >>> [int(train_tiny(xor, labels, heads=H, **sizes).max()) for H in (1, 2)]
        [3, 4]
    """
    R, _, S = sequences.shape
    runs = _Runs(_gaussian(R, S, vocab, dim, head_dim, heads, seed), sequences, next_tokens)
    return _most_right(runs, torch.arange(R, device="cpu"), steps, rate)


@checked(also=_are_tokens)
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
    """The numbers of the tasks, one a row, of which no training gets all next tokens right.

    Each round trains the remaining tasks as :func:`train_tiny` does, with its number as the seed.
    If fewer than ``least_runs`` tasks remain, each of them starts several times in a round, as long
    as there are at most so many runs.

    Example:
        >>> bits = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]).expand(2, 4, 3)
        >>> labels = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 0]])  # and, xor
        >>> sizes = {"vocab": 2, "dim": 2, "head_dim": 2, "rounds": 2, "steps": 400}
        >>> never_learned(bits, labels, heads=1, **sizes).tolist()
        [1]
    """
    _, B, S = sequences.shape
    remaining = torch.arange(len(sequences), device="cpu")
    for seed in range(rounds):
        if not len(remaining):
            break
        tasks = remaining.repeat(max(1, least_runs // len(remaining)))
        weights = _gaussian(len(tasks), S, vocab, dim, head_dim, heads, seed)
        runs = _Runs(weights, sequences[tasks], next_tokens[tasks])
        right = _most_right(runs, tasks, steps, RATE)
        remaining = remaining[~torch.isin(remaining, tasks[right == B])]
    return remaining


def _gaussian(R: int, S: int, N: int, d: int, d_h: int, H: int, seed: int) -> AoTWeights:
    """Weights of R transformers."""
    draw, on_cpu = torch.Generator().manual_seed(seed), {"dtype": torch.float64, "device": "cpu"}
    map_scale = (SPREAD / d_h**0.5) ** 0.5 / d**0.5
    of_maps = ((H, d_h, d), map_scale)  # W_Q and W_K
    of_heads = of_maps, of_maps, ((H, d_h, d), d**-0.5), ((H, d, d_h), d_h**-0.5)
    sizes = ((N, d), 1.0), ((S, d), 1.0), *of_heads, ((N, d), 1.0)
    drawn = (c * torch.randn(R, *shape, generator=draw, **on_cpu) for shape, c in sizes)
    return AoTWeights(*drawn)


def _most_right(runs: _Runs, tasks: Tensor, steps: int, rate: float) -> Int[Tensor, " R"]:
    """The most right answers of each run, until one with its number in ``tasks`` has all right."""
    training, best = torch.arange(len(tasks), device=tasks.device), torch.zeros_like(tasks)
    for step in range(steps):
        if step % EVERY == 0:
            best[training] = torch.maximum(best[training], runs.right())
            unsolved = ~torch.isin(tasks[training], tasks[best == runs.next_tokens.shape[1]])
            if not unsolved.all():
                training = training[unsolved]
                runs.keep(unsolved.nonzero()[:, 0])
            if not len(training):
                return best
        runs.step(rate * (1 - step / steps))
    best[training] = torch.maximum(best[training], runs.right())
    return best


class _Runs:
    """Trainings of one shape side by side."""

    def __init__(
        self, weights: AoTWeights, sequences: Int[Tensor, "R B S"], next_tokens: Int[Tensor, "R B"]
    ) -> None:
        self.weights = weights
        self.optimizer = FusedAdam(weights._asdict(), beta_2=BETA_2)
        self.sequences, self.next_tokens = sequences.long(), next_tokens.long()
        S, vocab = sequences.shape[-1], weights.embedding.shape[-2]
        # Which rows of the embeddings and of the positions are added for each token.
        tokens = F.one_hot(self.sequences, vocab)
        positions = F.one_hot(torch.arange(S, device=sequences.device)).expand(*sequences.shape, -1)
        self.rows = torch.cat([tokens, positions], dim=-1).flatten(1, 2).double()
        self.labels = F.one_hot(self.next_tokens, vocab).double()

    @torch.inference_mode()
    def right(self) -> Int[Tensor, " R"]:
        """How many next tokens each run gets right."""
        logits = aot(self.weights, self.sequences).flatten(0, 1)
        right = margins(logits, self.next_tokens.flatten()) > 0
        return right.view(self.next_tokens.shape).sum(-1)

    @torch.inference_mode()
    def step(self, rate: float) -> None:
        gradient = _gradient(self.weights, self.rows, self.labels)
        self.optimizer.step(gradient, torch.tensor([rate], dtype=torch.float64, device="cpu"))

    def keep(self, index: Int[Tensor, " k"]) -> None:
        self.weights = AoTWeights(*(W[index] for W in self.weights))
        self.optimizer = self.optimizer.kept(self.weights._asdict(), index)
        for name in ("sequences", "next_tokens", "rows", "labels"):
            setattr(self, name, getattr(self, name)[index])


def _gradient(
    weights: AoTWeights, rows: Float[Tensor, "R BS NS"], labels: Float[Tensor, "R B N"]
) -> AoTWeights:
    """The gradient of the mean cross-entropy of :func:`attnmem.core.layers.aot`, written out."""
    # At these sizes calling an operation is what it costs, and autograd calls five times as many.
    embedding, positions, W_Q, W_K, W_V, W_O, W_U = weights
    (R, B, _), (H, _, d) = labels.shape, W_Q.shape[1:]
    x = (rows @ torch.cat([embedding, positions], dim=1)).view(R, B, -1, d)
    last = x[:, :, -1]
    # The heads' maps are multiplied first: A_h = (W_Q^h)^T W_K^h and M_h = (W_O^h W_V^h)^T.
    A = (W_Q.mT @ W_K).transpose(1, 2).flatten(2)  # (R, d, H d)
    M = (W_O @ W_V).mT.flatten(1, 2)  # (R, H d, d)
    q = (last @ A).view(R, B, H, d)
    alpha = (q @ x.mT).softmax(-1)
    z = (alpha @ x).flatten(2)
    out = last + z @ M

    g_logits = ((out @ W_U.mT).softmax(-1) - labels) / B
    g_out = g_logits @ W_U
    g_M = (g_out.mT @ z).view(R, d, H, d).transpose(1, 2)  # of W_O W_V
    g_z = (g_out @ M.mT).view(R, B, H, d)
    g_alpha = g_z @ x.mT
    g_scores = alpha * (g_alpha - (alpha * g_alpha).sum(-1, keepdim=True))
    g_q = (g_scores @ x).flatten(2)
    g_A = (last.mT @ g_q).view(R, d, H, d).transpose(1, 2)  # of W_Q^T W_K
    g_x = alpha.mT @ g_z + g_scores.mT @ q
    g_x[:, :, -1] += g_out + g_q @ A.mT
    g_tables = rows.mT @ g_x.flatten(1, 2)
    of_tables = g_tables.split([embedding.shape[1], positions.shape[1]], dim=1)
    of_heads = W_K @ g_A.mT, W_Q @ g_A, W_O.mT @ g_M, g_M @ W_V.mT
    return AoTWeights(*of_tables, *of_heads, g_logits.mT @ out)
