"""Backward passes that are written out and have no derivative themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse second derivatives; torch's own mark lets ``torch.autograd.grad`` take them for zero.

    Args:
        backward: The backward pass of a :class:`torch.autograd.Function`.

    Returns:
        The same, with a ``RuntimeError`` where the gradient itself is to be differentiated.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("this gradient is written out and cannot be differentiated again")
        return backward(ctx, *gradients)

    return checked
