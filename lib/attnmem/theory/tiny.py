r"""Two small models for calibration: a linear associative memory, and tiny transformers.

In the memory one matrix maps keys to values, and the largest match is read: ``p`` associations of
random unit vectors take ``p log2 p`` bits, and a matrix has ``d^2`` parameters. Of transformers the
question is whether gradient descent finds weights at all for a handful of sequences.
"""

from __future__ import annotations

import bisect
import math
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ..checks import Range, Seed, check_tokens, checked, on_cpu, refuse
from ..core.random import gaussian, map_scale
from ..core.sequences import margins
from .counts import class_price

_MEMORY_RATE = 0.3  # of Adam on the memory, at the start
_EVERY = 50  # steps between two counts of what is right
_SPREAD = 3.0  # standard deviation of the transformers' logits at the start


# --- the linear associative memory ----------------------------------------------------------------


class Facts(NamedTuple):
    """Associations of random unit vectors, as rows: the value of a key has its number."""

    keys: Float[Tensor, "p d"]
    values: Float[Tensor, "p d"]


@on_cpu
@checked
def random_facts(count: Annotated[int, Range(2)], dim: int, seed: Seed) -> Facts:
    """Draw keys and as many values, uniform on the unit sphere; float64."""
    vectors = gaussian(torch.Generator().manual_seed(seed), 2, count, dim)
    keys, values = vectors / vectors.norm(dim=-1, keepdim=True)
    return Facts(keys, values)


def _are_some(facts: Facts) -> None:
    if not len(facts.keys):
        refuse("facts.keys", f"shape {tuple(facts.keys.shape)}", "at least one fact")


@checked(also=_are_some)
def outer_products(facts: Facts) -> Float[Tensor, "d d"]:
    r"""The sum of outer products :math:`\sum_i u_i x_i^\top` of values and keys (Hebb's rule)."""
    return facts.values.mT @ facts.keys


@checked(also=_are_some)
def recalled(matrix: Float[Tensor, "d d"], facts: Facts) -> float:
    """The share of keys whose image by ``W`` matches its own value best, without a tie."""
    return _share_right(facts.keys @ matrix.mT @ facts.values.mT)


def _share_right(matches: Float[Tensor, "p p"]) -> float:
    keys = torch.arange(len(matches), device=matches.device)
    return (margins(matches, keys) > 0).double().mean().item()


@checked(also=_are_some)
def trained_matrix(facts: Facts, steps: int = 300) -> Float[Tensor, "d d"]:
    """A matrix trained to recall associations: cross-entropy on all of them, Adam, all at once.

    It starts from the outer products, and the rate falls linearly to zero. The best one is kept.
    """
    numbers = torch.arange(len(facts.keys), device=facts.keys.device)
    W = (2 * math.log(len(numbers)) * outer_products(facts)).requires_grad_()
    adam = torch.optim.Adam([W], lr=_MEMORY_RATE)
    falling = LambdaLR(adam, lambda step: 1 - step / steps)
    best, largest_share = W.detach().clone(), -1.0
    for step in range(steps + 1):
        matches = facts.keys @ W.mT @ facts.values.mT
        share = _share_right(matches.detach())
        if share > largest_share:
            best, largest_share = W.detach().clone(), share
        if share == 1 or step == steps:
            break
        adam.zero_grad()
        F.cross_entropy(matches, numbers).backward()
        adam.step()
        falling.step()
    return best


@checked
def count_at(load: Annotated[float | int, Range(0, 100)], dim: int) -> int:
    r"""The largest number of associations ``p`` with :math:`p \, \delta_p \le` ``load`` d^2, or 1.

    At load one about half of all draws are recalled, by a formula
    (:func:`~attnmem.theory.counts.class_price`).
    """
    bits = load * dim**2
    # A price is at least half a bit for p >= 2, so that 2 bits + 2 associations are too many.
    counts = range(2, int(2 * bits) + 3)
    return 1 + bisect.bisect_right(counts, bits, key=lambda p: p * class_price(p))


# --- tiny transformers ----------------------------------------------------------------------------


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
    rate: Annotated[float | int, Range(0)] = 0.03,
    rounds: int = 1,
    least_runs: int = 1,
) -> Int[Tensor, " R"]:
    """Count how many next tokens of each task trainings get right at their best step.

    The model is :func:`attnmem.core.layers.aot` in float64. Every weight is trained, from a
    Gaussian start. Adam with betas (0.9, 0.99) minimizes the cross-entropy, and its ``rate`` falls
    linearly to zero. The answers are counted every 50 steps and at the end. Each round trains the
    tasks that are not all right yet, with the next ``seed``, and each of them several times as long
    as there are at most ``least_runs`` runs.
    """
    sizes, B = (vocab, dim, head_dim, heads), next_tokens.shape[1]
    best = torch.zeros(len(sequences), dtype=torch.int64, device="cpu")
    for round_seed in range(seed, seed + rounds):
        unsolved = (best < B).nonzero()[:, 0]
        if len(unsolved) == 0:
            break
        tasks = unsolved.repeat(max(1, least_runs // len(unsolved)))
        task = sequences[tasks], next_tokens[tasks], tasks
        right = _most_right(*task, sizes, round_seed, steps, rate)
        best.scatter_reduce_(0, tasks, right, "amax")
    return best


def _most_right(sequences, next_tokens, tasks, sizes, seed, steps, rate) -> Int[Tensor, " R"]:
    """The most right answers of each run, until one with its number in ``tasks`` has all right."""
    (R, B, S), N = sequences.shape, sizes[0]
    labels = next_tokens.long()
    with torch.device("cpu"):
        start = _start(R, S, sizes, seed)
        places = F.one_hot(torch.arange(S)).expand(R, B, S, S)
        running = torch.arange(R)
    # All weights of a run are one row: then a run that is done is a row less.
    flat = torch.cat([W.flatten(1) for W in start], 1).requires_grad_()
    optimizer = torch.optim.Adam([flat], betas=(0.9, 0.99), fused=True)
    [group] = optimizer.param_groups
    # Embeddings and positions, one below the other, are looked up by one product.
    rows = torch.cat([F.one_hot(sequences.long(), N), places], -1).flatten(1, 2).double()
    best = torch.zeros_like(tasks)
    for step in range(steps + 1):
        if step % _EVERY == 0 or step == steps:
            logits = _logits(flat.detach(), rows, S, sizes)
            right = (margins(logits, labels.flatten()) > 0).view_as(labels).sum(1)
            best[running] = torch.maximum(best[running], right)
            unfinished = ~torch.isin(tasks[running], tasks[best == B])
            if step == steps or not unfinished.any():
                break
            running, rows, labels = running[unfinished], rows[unfinished], labels[unfinished]
            moments = optimizer.state.pop(flat, {})
            flat = flat.detach()[unfinished].requires_grad_()
            optimizer.state[flat] = {k: v[unfinished] if v.ndim else v for k, v in moments.items()}
            group["params"] = [flat]
        group["lr"] = rate * (1 - step / steps)
        logits = _logits(flat, rows, S, sizes)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / B
        [flat.grad] = torch.autograd.grad(loss, flat)
        optimizer.step()
    return best


def _start(R: int, S: int, sizes: tuple[int, ...], seed: int) -> list[Tensor]:
    """Gaussian weights of ``R`` runs, in the order of :class:`AoTWeights`."""
    N, d, d_h, H = sizes
    generator = torch.Generator().manual_seed(seed)
    scale = map_scale(_SPREAD, d, d_h)
    embedding, positions = gaussian(generator, R, N, d), gaussian(generator, R, S, d)
    W_Q, W_K = (scale * gaussian(generator, R, H, d_h, d) for _ in range(2))
    W_V = d**-0.5 * gaussian(generator, R, H, d_h, d)
    W_O = d_h**-0.5 * gaussian(generator, R, H, d, d_h)
    return [embedding, positions, W_Q, W_K, W_V, W_O, gaussian(generator, R, N, d)]


def _logits(
    flat: Float[Tensor, "R P"], rows: Float[Tensor, "R BS NS"], S: int, sizes: tuple[int, ...]
) -> Float[Tensor, "RB N"]:
    """The logits of all sequences of each run, from its weights as one row."""
    N, d, d_h, H = sizes
    maps = (H, d_h, d)
    shapes = [(N + S, d), maps, maps, maps, (H, d, d_h), (N, d)]
    weights = []
    for W, shape in zip(flat.split([math.prod(s) for s in shapes], 1), shapes, strict=True):
        weights.append(W.unflatten(1, shape))
    tables, W_Q, W_K, W_V, W_O, W_U = weights
    x = (rows @ tables).unflatten(1, (-1, S))
    last = x[:, :, -1]
    # Calling an operation is what it costs at these sizes: the heads' maps are multiplied.
    asked = (last @ (W_Q.mT @ W_K).transpose(1, 2).flatten(2)).unflatten(2, (H, d))
    attended = ((asked @ x.mT).softmax(-1) @ x).flatten(2)
    out = last + attended @ (W_O @ W_V).mT.flatten(1, 2)
    return (out @ W_U.mT).flatten(0, 1)
