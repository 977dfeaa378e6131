"""The linear associative memory: one matrix maps keys to values, and the largest match is read.

It is the simplest memory of facts, and its constant is known. So it calibrates counts of bits for
each parameter: ``p`` associations of random unit vectors take ``p log2 p`` bits, and a matrix has
``d^2`` parameters. Each function raises ``ValueError`` for bad input, and names the argument.
"""

from __future__ import annotations

import bisect
import math
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..checks import Range, Seed, checked, refuse
from .dana import margins

RATE = 0.3  # of Adam, at the first step
LOOSE = 2.0  # the start's logits of right answers, in units of log p


class Facts(NamedTuple):
    """Associations of random unit vectors, as rows: the value of a key has its number."""

    keys: Float[Tensor, "p d"]
    values: Float[Tensor, "p d"]


@checked
def draw(count: Annotated[int, Range(2)], dim: int, seed: Seed) -> Facts:
    """Draw ``count`` keys and as many values, uniform on the unit sphere; float64."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, count, dim, generator=generator, dtype=torch.float64, device="cpu")
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
    """The share of keys whose image by ``W`` matches its own value best, without a tie.

    Example:
        >>> facts = draw(count=5, dim=40, seed=0)
        >>> recalled(outer_products(facts), facts)
        1.0
    """
    return _share_right(facts.keys @ matrix.mT @ facts.values.mT)


def _share_right(matches: Float[Tensor, "p p"]) -> float:
    own = torch.arange(len(matches), device=matches.device)
    return (margins(matches, own) > 0).double().mean().item()


@checked(also=_are_some)
def trained(facts: Facts, steps: int = 300) -> Float[Tensor, "d d"]:
    """A matrix trained to recall associations: cross-entropy on all of them, Adam, all at once.

    It starts from the outer products. The rate falls linearly to zero, and the training stops when
    every key is recalled. The matrix that recalled most on the way is returned.
    """
    own = torch.arange(len(facts.keys), device=facts.keys.device)
    W = (LOOSE * math.log(len(own)) * outer_products(facts)).requires_grad_()
    optimizer = torch.optim.Adam([W], lr=RATE)
    best, most = W.detach().clone(), -1.0
    for step in range(steps + 1):
        matches = facts.keys @ W.mT @ facts.values.mT
        if (right := _share_right(matches.detach())) > most:
            best, most = W.detach().clone(), right
        if most == 1 or step == steps:
            break
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(matches, own).backward()
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        optimizer.step()
    return best


@checked
def count_at(load: Annotated[float | int, Range(0, 1e9)], dim: int) -> int:
    """The largest number of associations ``p`` with ``p ln p <= load d^2``.

    Example:
        >>> count_at(0.5, dim=64)
        349
    """
    most = load * dim**2
    return bisect.bisect_right(range(1, int(most) + 3), most, key=lambda p: p * math.log(p))
