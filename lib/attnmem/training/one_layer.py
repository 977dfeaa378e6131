"""The layer of Mahdavi et al.'s theorem by itself: random weights, and descent from them."""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..attention import MHAWeights, mha
from ..checks import Range, Seed, checked, refuse


@checked
def xavier(heads: int, dim: int, head_dim: int, outputs: int, *, seed: Seed) -> MHAWeights:
    """Random weights to start from, uniform with Xavier's bounds; ``d_v = 1`` and ``d_o = d``.

    They are in torch's default dtype.

    Example:
        >>> xavier(heads=2, dim=5, head_dim=3, outputs=4, seed=0).W_D.shape
        torch.Size([5, 4])
    """
    g = torch.Generator().manual_seed(seed)
    shapes = [(heads, dim, head_dim)] * 2 + [(heads, dim, 1), (heads, dim), (dim, outputs)]
    drawn = [2 * torch.rand(*shape, generator=g) - 1 for shape in shapes]
    bounds = [math.sqrt(6 / sum(shape[-2:])) for shape in shapes]
    return MHAWeights(*(W * bound for W, bound in zip(drawn, bounds, strict=True)))


def _one_label_each(queries, labels) -> None:
    if labels.shape != queries.shape[:1]:
        refuse("labels", f"shape {tuple(labels.shape)}", f"one for each of {len(queries)} queries")


@checked(also=_one_label_each)
def descend(
    weights: MHAWeights,
    contexts: Float[Tensor, "n d"] | Float[Tensor, "T n d"],
    queries: Float[Tensor, "T d"],
    labels: Tensor,
    *,
    steps: int,
    lr: Annotated[float, Range(0, 1)],
) -> tuple[MHAWeights, Float[Tensor, " steps"]]:
    """Gradient descent on the layer of the theorem: Adam on the whole set at once.

    Args:
        weights: Where it starts; they are not changed.
        labels: Integers are classes, learned by cross-entropy of the outputs. Real numbers are met
            in the mean square by the one output.
        lr: The rate of the first step, from 0 to 1. It falls along a cosine to zero.

    Returns:
        The last weights, and the loss before every step, in the precision of the arguments.
    """
    leaves = MHAWeights(*(W.detach().clone().requires_grad_() for W in weights))
    optimizer = torch.optim.Adam(leaves, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        outputs = mha(leaves, contexts, queries)
        real = labels.is_floating_point()
        loss = F.mse_loss(outputs[:, 0], labels) if real else F.cross_entropy(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return MHAWeights(*(W.detach() for W in leaves)), torch.stack(losses)
