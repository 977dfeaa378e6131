r"""Two small models for calibration: a linear associative memory, and tiny transformers.

In the memory one matrix maps keys to values, and the largest match is read: ``p`` associations of
random unit vectors take ``p log2 p`` bits, and a matrix has ``d^2`` parameters. Of transformers the
question is whether gradient descent finds weights at all for a handful of sequences.
"""

from __future__ import annotations

import bisect
import functools
import math
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ..checks import Range, Seed, check_tokens, checked, on_cpu, refuse
from ..core.descent import adam_steps
from ..core.random import gaussian, map_scale
from .associations import margins
from .counts import class_price

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
    both = gaussian(torch.Generator().manual_seed(seed), 2, count, dim)
    return Facts(*(both / both.norm(dim=-1, keepdim=True)))


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
    own = torch.arange(len(matches), device=matches.device)
    return (margins(matches, own) > 0).double().mean().item()


@checked(also=_are_some)
def trained_matrix(facts: Facts, steps: int = 300) -> Float[Tensor, "d d"]:
    """A matrix trained to recall associations: cross-entropy on all of them, Adam, all at once.

    It starts from the outer products, and the rate falls linearly to zero. The best one is kept.
    """
    own = torch.arange(len(facts.keys), device=facts.keys.device)
    W = (2 * math.log(len(own)) * outer_products(facts)).requires_grad_()
    best, most = W.detach().clone(), -1.0

    def loss() -> Tensor:
        nonlocal best, most
        matches = facts.keys @ W.mT @ facts.values.mT
        if (right := _share_right(matches.detach())) > most:
            best, most = W.detach().clone(), right
        return F.cross_entropy(matches, own)

    falling = functools.partial(LambdaLR, lr_lambda=lambda step: 1 - step / steps)
    for _ in adam_steps(loss, [W], steps, falling, lr=0.3):
        if most == 1:
            return best
    loss()  # after the last step
    return best


@checked
def count_at(load: Annotated[float | int, Range(0, 100)], dim: int) -> int:
    r"""The largest number of associations ``p`` with :math:`p \, \delta_p \le` ``load`` d^2, or 1.

    At load one about half of all draws are recalled, by a formula
    (:func:`~attnmem.theory.counts.class_price`).
    """
    most = load * dim**2
    more = range(2, int(2 * most) + 3)
    return 1 + bisect.bisect_right(more, most, key=lambda p: p * class_price(p))


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
    for number in range(seed, seed + rounds):
        left = (best < B).nonzero()[:, 0]
        tasks = left.repeat(max(1, least_runs // max(1, len(left))))
        if len(tasks):
            task = sequences[tasks], next_tokens[tasks], tasks
            best.scatter_reduce_(0, tasks, _most_right(*task, sizes, number, steps, rate), "amax")
    return best


def _most_right(sequences, next_tokens, tasks, sizes, seed, steps, rate) -> Int[Tensor, " R"]:
    """The most right answers of each run, until one with its number in ``tasks`` has all right."""
    (R, B, S), (N, d, d_h, H) = sequences.shape, sizes
    labels = next_tokens.long()
    maps, size = (H, d_h, d), map_scale(_SPREAD, d, d_h)
    shapes = (N, d), (S, d), maps, maps, maps, (H, d, d_h), (N, d)
    scales = 1.0, 1.0, size, size, d**-0.5, d_h**-0.5, 1.0
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(seed)
        scaled = zip(scales, shapes, strict=True)
        drawn = [c * gaussian(generator, R, *shape) for c, shape in scaled]
        places = F.one_hot(torch.arange(S)).expand(R, B, S, S)
        training = torch.arange(R)
    # One row for each run: then a run that is done is a row less.
    flat = torch.cat([W.flatten(1) for W in drawn], 1).requires_grad_()
    optimizer = torch.optim.Adam([flat], betas=(0.9, 0.99), fused=True)
    [group] = optimizer.param_groups
    # Embeddings and positions are looked up by one product.
    shapes = (N + S, d), *shapes[2:]
    rows = torch.cat([F.one_hot(sequences.long(), N), places], -1).flatten(1, 2).double()

    def logits() -> Float[Tensor, "RB N"]:
        # Calling an operation is what it costs at these sizes: the heads' maps are multiplied.
        parts = zip(flat.split([math.prod(shape) for shape in shapes], 1), shapes, strict=True)
        tables, W_Q, W_K, W_V, W_O, W_U = (part.unflatten(1, shape) for part, shape in parts)
        x = (rows @ tables).unflatten(1, (B, S))
        last = x[:, :, -1]
        asked = (last @ (W_Q.mT @ W_K).transpose(1, 2).flatten(2)).unflatten(2, (H, d))
        attended = ((asked @ x.mT).softmax(-1) @ x).flatten(2)
        out = last + attended @ (W_O @ W_V).mT.flatten(1, 2)
        return (out @ W_U.mT).flatten(0, 1)

    best = torch.zeros_like(tasks)
    for step in range(steps + 1):
        if step % _EVERY == 0 or step == steps:
            right = (margins(logits().detach(), labels.flatten()) > 0).view_as(labels).sum(1)
            best[training] = torch.maximum(best[training], right)
            left = ~torch.isin(tasks[training], tasks[best == B])
            if step == steps or not left.any():
                break
            training, rows, labels = training[left], rows[left], labels[left]
            state = optimizer.state.pop(flat, {})
            flat = flat.detach()[left].requires_grad_()
            optimizer.state[flat] = {k: v[left] if v.ndim else v for k, v in state.items()}
            group["params"] = [flat]
        group["lr"] = rate * (1 - step / steps)
        loss = F.cross_entropy(logits(), labels.flatten(), reduction="sum") / B
        [flat.grad] = torch.autograd.grad(loss, flat)
        optimizer.step()
    return best
