"""The layer of Mahdavi et al.'s theorem by itself: random weights, and descent from them."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..checks import Range, checked, refuse
from .layers import MHAWeights, mha


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
