"""Refusing bad input at the border: each error names the argument, its value and what was expected.

A public function declares its border with :func:`checked_by`; its body is then only mathematics.
The check runs before any shape annotation is enforced, so that a caller always sees the named
``ValueError``, with or without a runtime type checker.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
FLOATS = (torch.float32, torch.float64)


def checked_by(check: Callable[..., None]) -> Callable[[Function], Function]:
    """Call ``check`` with all arguments, defaults filled in, before the decorated function."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            check(**bound.arguments)
            return function(*args, **kwargs)

        return checked

    return decorate


def refuse(name: str, got: object, expected: str) -> None:
    """Raise the ``ValueError`` that every check of this library raises."""
    raise ValueError(f"{name}: got {got}; expected {expected}")


def check_integer(
    name: str, value: object, *, least: int = 1, most: int | float = math.inf
) -> None:
    """Accept an ``int`` (not a ``bool``, not a float) with ``least <= value <= most``."""
    if not hasattr(value, "__index__") or isinstance(value, (bool, Tensor)):
        refuse(name, repr(value), "an integer")
    if not least <= value <= most:
        above = f" and at most {most}" if most < math.inf else ""
        refuse(name, value, f"an integer of at least {least}{above}")


def check_number(name: str, value: object, *, least: int | float, most: int | float) -> None:
    """Accept a real number with ``least <= value <= most`` (so not NaN)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(name, repr(value), "a number")
    if not least <= value <= most:
        refuse(name, value, f"a number from {least} to {most}")


def check_tensor(name: str, value: object, shape: str, ndim: int | Sequence[int]) -> None:
    """Accept a torch tensor with one of the numbers of axes ``ndim``; ``shape`` is its name."""
    if not isinstance(value, Tensor):
        refuse(name, type(value).__name__, f"a torch.Tensor of shape {shape}")
    if value.ndim not in ((ndim,) if isinstance(ndim, int) else ndim):
        refuse(name, f"shape {tuple(value.shape)}", f"shape {shape}")


def check_floats(name: str, value: Tensor) -> None:
    """Accept float32 and float64 only: in half precision ranks and logits mean little."""
    if value.dtype not in FLOATS:
        refuse(name, f"dtype {value.dtype}", "torch.float32 or torch.float64")


def check_finite(name: str, value: Tensor) -> None:
    """Accept a tensor without NaN and infinity; the error counts them."""
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        refuse(name, f"{bad} entries that are NaN or infinite", "finite entries")


def check_reals(name: str, value: Tensor) -> None:
    """Accept finite float32 and float64 only."""
    check_floats(name, value)
    check_finite(name, value)


def check_tokens(name: str, value: Tensor, vocab: int) -> None:
    """Accept integer tokens from 0 to ``vocab - 1``.

    On a GPU only the dtype is looked at: reading values would stall it, and torch's own indexing
    asserts the range there.
    """
    if value.dtype not in (torch.int32, torch.int64):
        refuse(name, f"dtype {value.dtype}", "torch.int64 or torch.int32")
    if value.device.type == "cpu" and value.numel():
        low, high = value.aminmax()
        if low < 0 or high >= vocab:
            refuse(name, f"tokens from {low} to {high}", f"0 to N - 1 = {vocab - 1}")


def check_size(name: str, value: Tensor, axis: int, size: int, meaning: str) -> None:
    """Accept a tensor whose ``axis`` has the given ``size``; ``meaning`` says where it is from."""
    if value.shape[axis] != size:
        refuse(name, f"shape {tuple(value.shape)}", f"{size} along axis {axis}, {meaning}")
