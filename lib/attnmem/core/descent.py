"""Weights found by descent, where the theorem writes them down.

Trained weights often memorize several times what Theorem 1 promises. This is training in its plain
form: one layer, one loop of Adam. ``lab`` does the same for many layers at once.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from ..checks import Range, check_size, checked
from .layers import MHAWeights, mha


def _outputs_fit(weights, labels) -> None:
    if labels.is_floating_point():
        check_size("weights.W_D", weights.W_D, -1, 1, "the one output of real labels")


@checked(also=_outputs_fit)
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
    weights = MHAWeights(*(W.detach().clone().requires_grad_() for W in weights))
    optimizer = torch.optim.Adam(weights, lr=lr)
    cosine = CosineAnnealingLR(optimizer, T_max=steps)
    losses = []
    for _ in range(steps):
        outputs = mha(weights, contexts, queries)
        if labels.is_floating_point():
            loss = F.mse_loss(outputs[:, 0], labels)
        else:
            loss = F.cross_entropy(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cosine.step()
        losses.append(loss.detach())
    return MHAWeights(*(W.detach() for W in weights)), torch.stack(losses)
