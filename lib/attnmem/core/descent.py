"""Weights found by descent, where the theorem writes them down.

Trained weights often memorize several times what Theorem 1 promises. This is training in its plain
form: one layer, one loop of Adam. ``lab`` does the same for many layers at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from ..checks import Range, checked
from .layers import MHAWeights, mha


def adam_steps(
    loss: Callable[[], Tensor],
    leaves: Iterable[Tensor],
    steps: int,
    schedule: Callable[[Optimizer], LRScheduler] | None = None,
    optimizer: Callable[..., Optimizer] = torch.optim.Adam,
    **settings: Any,
) -> Iterator[tuple[int, Tensor]]:
    """Minimize a loss over its leaves, and tell after each step how many were made, and its loss.

    The loss is that before the step. ``settings`` go to the optimizer, such as ``lr``. A loss that
    needs no gradient has put the gradients beside the leaves itself.
    """
    optimize = optimizer(leaves, **settings)
    scheduled = schedule(optimize) if schedule else None
    for made in range(1, steps + 1):
        optimize.zero_grad()
        value = loss()
        if value.requires_grad:
            value.backward()
        optimize.step()
        if scheduled:
            scheduled.step()
        yield made, value.detach()


@checked
def descend(
    weights: MHAWeights,
    contexts: Float[Tensor, "n d"] | Float[Tensor, "T n d"],
    queries: Float[Tensor, "T d"],
    labels: Shaped[Tensor, " T"],
    *,
    steps: int,
    lr: Annotated[float, Range(0, 1)],
) -> tuple[MHAWeights, Float[Tensor, " steps"]]:
    """Gradient descent on the layer of the theorem: Adam on the whole set at once.

    It starts from ``weights``, which are not changed. Integer ``labels`` are classes, learned by
    cross-entropy of the outputs; real ones are met in the mean square by the one output. The rate
    falls from ``lr``, at most 1, along a cosine to zero. Returned are the last weights, and the
    loss before every step, in the precision of the arguments.
    """
    leaves = MHAWeights(*(W.detach().clone().requires_grad_() for W in weights))
    real = labels.is_floating_point()

    def loss() -> Tensor:
        outputs = mha(leaves, contexts, queries)
        return F.mse_loss(outputs[:, 0], labels) if real else F.cross_entropy(outputs, labels)

    cosine = functools.partial(CosineAnnealingLR, T_max=steps)
    losses = [value for _, value in adam_steps(loss, leaves, steps, cosine, lr=lr)]
    return MHAWeights(*(W.detach() for W in leaves)), torch.stack(losses)
