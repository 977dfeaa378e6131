"""The linear associative memory: one matrix maps keys to values, and the largest match is read.

It is the simplest memory of facts, and its constant is known. So it calibrates counts of bits for
each parameter: ``p`` associations of random unit vectors take ``p log2 p`` bits, and a matrix has
``d^2`` parameters.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .checks import (
    check_floats,
    check_integer,
    check_number,
    check_seed,
    check_size,
    check_tensor,
    checked_by,
    refuse,
)
from .constructions.dana import margins

RATE = 0.3  # of Adam, at the first step
LOOSE = 2.0  # the start's logits of right answers, in units of log p


class Facts(NamedTuple):
    """Associations of random unit vectors, as rows: the value of a key has its number."""

    keys: Float[Tensor, "p d"]
    values: Float[Tensor, "p d"]


def _check_draw(count, dim, seed) -> None:
    check_integer("count", count, least=2)
    check_integer("dim", dim)
    check_seed(seed)


@checked_by(_check_draw)
def draw(count: int, dim: int, seed: int) -> Facts:
    """Draw ``count`` keys and as many values, uniform on the unit sphere; float64.

    Args:
        count: Number of associations ``p``, at least 2.
        dim: Their dimension ``d``.
        seed: Seed of the draw, at least 0.

    Returns:
        The associations.

    Raises:
        ValueError: If an argument is not an integer or too small.
    """
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, count, dim, generator=generator, dtype=torch.float64, device="cpu")
    return Facts(*(both / both.norm(dim=-1, keepdim=True)))


def _check_facts(facts) -> None:
    check_tensor("facts.keys", facts.keys, "(p, d)", 2)
    check_tensor("facts.values", facts.values, "(p, d)", 2)
    for axis, what in enumerate(("the number of keys", "d of the keys")):
        check_size("facts.values", facts.values, axis, facts.keys.shape[axis], what)
    if not len(facts.keys):
        refuse("facts.keys", f"shape {tuple(facts.keys.shape)}", "at least one fact")
    for name, rows in facts._asdict().items():
        check_floats(f"facts.{name}", rows)


@checked_by(_check_facts)
def outer_products(facts: Facts) -> Float[Tensor, "d d"]:
    r"""The sum of outer products :math:`\sum_i u_i x_i^\top` of values and keys (Hebb's rule).

    Args:
        facts: Keys ``x_i`` and values ``u_i``.

    Returns:
        The matrix.

    Raises:
        ValueError: If there are no keys, not as many values, or values of another dimension.
    """
    return facts.values.mT @ facts.keys


def _check_recalled(matrix, facts) -> None:
    _check_facts(facts)
    check_tensor("matrix", matrix, "(d, d)", 2)
    for axis in (0, 1):
        check_size("matrix", matrix, axis, facts.keys.shape[1], "d of the keys")


@checked_by(_check_recalled)
def recalled(matrix: Float[Tensor, "d d"], facts: Facts) -> float:
    """The share of keys whose image matches its own value better than any other, without a tie.

    Args:
        matrix: The memory ``W``.
        facts: Keys and values.

    Returns:
        The share, from 0 to 1.

    Raises:
        ValueError: If the sizes do not fit.

    Example:
        >>> facts = draw(count=5, dim=40, seed=0)
        >>> recalled(outer_products(facts), facts)
        1.0
    """
    return _right(facts.keys @ matrix.mT @ facts.values.mT)


def _right(matches: Float[Tensor, "p p"]) -> float:
    own = torch.arange(len(matches), device=matches.device)
    return (margins(matches, own) > 0).double().mean().item()


def _check_trained(facts, steps) -> None:
    _check_facts(facts)
    check_integer("steps", steps)


@checked_by(_check_trained)
def trained(facts: Facts, steps: int = 300) -> Float[Tensor, "d d"]:
    """A matrix trained to recall associations: cross-entropy on all of them, Adam, all at once.

    It starts from the outer products. The rate falls linearly to zero, and the training stops when
    every key is recalled.

    Args:
        facts: Keys and values.
        steps: The most steps.

    Returns:
        The matrix that recalled most on the way.

    Raises:
        ValueError: If sizes do not fit, or ``steps`` is not an integer of at least 1.
    """
    own = torch.arange(len(facts.keys), device=facts.keys.device)
    start = LOOSE * math.log(len(own)) * outer_products(facts)
    W = start.requires_grad_()
    optimizer = torch.optim.Adam([W], lr=RATE)
    best, most = W.detach().clone(), -1.0
    for step in range(steps + 1):
        matches = facts.keys @ W.mT @ facts.values.mT
        if (right := _right(matches.detach())) > most:
            best, most = W.detach().clone(), right
        if most == 1 or step == steps:
            break
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(matches, own).backward()
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        optimizer.step()
    return best


def _check_load(load, dim) -> None:
    check_number("load", load, least=0, most=math.inf)
    check_integer("dim", dim)


@checked_by(_check_load)
def count_at(load: float, dim: int) -> int:
    """The largest number of associations ``p`` with ``p ln p <= load d^2``.

    Args:
        load: The load ``p ln p / d^2``, at least 0.
        dim: The dimension ``d``.

    Returns:
        The number, at least 1.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> count_at(0.5, dim=64)
        349
    """
    low, high = 1, 2
    while high * math.log(high) <= load * dim**2:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if middle * math.log(middle) <= load * dim**2:
            low = middle
        else:
            high = middle
    return low
