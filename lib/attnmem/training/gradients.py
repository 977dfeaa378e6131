"""How gradients follow from a model's losses: by autograd, or as the model has written them out.

Written-out ones are formed in torch's inference mode. Under ``no_grad`` every operation still
passes through autograd, which took about a tenth of a step of Dana et al.'s Experiment 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .initial import Parameters

# From the gradient at the losses to that at each of the weights, in their order. It is called once.
Gradient = Callable[[Tensor], Sequence[Tensor]]


def by_autograd(P: Parameters, losses: Tensor) -> Gradient:
    """The gradient of losses that were computed with autograd.

    Args:
        P: The weights.
        losses: Of each run, or of each example of each run.

    Returns:
        The gradient. Runs do not mix, since no loss depends on the weights of two.
    """
    return lambda g: torch.autograd.grad(losses, [*P.values()], g)
