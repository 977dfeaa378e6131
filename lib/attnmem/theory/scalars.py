r"""Labels stored in the attention itself: each head serves ``d - 1`` examples of scalar labels.

Where attention depends on the labels, one head meets them by the product of rank two

.. math:: W_K W_Q^\top = g \, w^\top + c \, u v^\top, \qquad w = \sum_{s \text{ served}} l_s f_s .

Its first part raises the logit of one *carrier* token by ``l_s``, chosen such that the attention on
it is the label. Its second part separates two *idle* tokens of equal value, one of which takes all
attention on every example that the head does not serve. There the head adds only a constant.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor

from ..checks import checked, on_cpu, refuse
from ..core import memorize
from ..core.layers import MHAWeights, mha
from ..examples import Queries, check_data, check_distinct_examples
from .independence import numerical_rank

_LOW, _HIGH = 0.25, 0.75  # attention on the carrier for the smallest and the largest label
_TOLERANCE = 1e-8  # of the labels' spread


def _satisfies_scalars(context, queries, labels, heads) -> None:
    check_data(context=context, queries=queries, labels=labels)
    (n, d), T = context.shape, len(queries)
    if heads * (d - 1) < T:
        refuse("labels", f"T = {T} examples", f"1 <= T <= H (d - 1) = {heads * (d - 1)}")
    if n < 3 or numerical_rank(context, dtype=torch.float64) < n:
        refuse("context", f"{n} tokens", "at least 3 tokens, all independent")
    check_distinct_examples(context, queries, labels)


@on_cpu
@checked(also=_satisfies_scalars)
@torch.no_grad()
def memorize_scalars(
    context: Float[Tensor, "n d"], queries: Queries, labels: Float[Tensor, " T"], *, heads: int
) -> MHAWeights:
    """Build a layer that reproduces ``T <= H (d - 1)`` scalar labels on one shared context.

    The context has at least three independent tokens, and any ``d`` queries are independent; it
    suffices that no other one lies in the span of the ``d - 1`` that a head serves. The heads have
    width ``d_h = 2``, the values ``d_v = 1``. The only error is that of rounding: where a head is
    idle, its attention off the idle tokens is below the rounding unit.

    Raises:
        ValueError: If a hypothesis fails, or float64 misses a label by 1e-8 of their spread.

    Example:
        >>> E, e, y = torch.eye(5)[:3], torch.randn(12, 5), torch.rand(12)
        >>> memorize_scalars(E, e, y, heads=3).W_Q.shape
        torch.Size([3, 5, 2])

    Source: this book; compare Mahdavi et al. 2024, Proposition 2.
    """
    build = functools.partial(_build_scalars, heads=heads)
    return memorize.build_in_units(build, context, queries, labels)


def _build_scalars(context: Tensor, queries: Tensor, labels: Tensor, heads: int) -> MHAWeights:
    """The layer for data in their units. Token 0 is the carrier, tokens 1 and 2 are idle."""
    labels = labels[:, 0]
    lowest, width = labels.min(), labels.max() - labels.min()
    # The attention that the carrier is to have.
    share = _LOW + (_HIGH - _LOW) * (labels - lowest) / width.clamp(min=memorize.EPS)
    logit = torch.log((len(context) - 1) * share / (1 - share))
    lift = torch.linalg.pinv(context)  # context @ lift = identity
    carrier, pull = lift[:, 0], lift[:, 1] - lift[:, 2]
    W_Q, W_K = (queries.new_zeros(heads, queries.shape[1], 2) for _ in range(2))
    # The carrier's value spans the width of the labels. All heads share one constant.
    gain = width / (_HIGH - _LOW)
    W_V = (lift.sum(dim=1) * (lowest - _LOW * gain) / heads).repeat(heads, 1)
    generator = torch.Generator().manual_seed(0)
    served = torch.arange(len(queries), device=queries.device).tensor_split(heads)
    for head, group in enumerate(group for group in served if len(group)):
        alone = group[None]  # one head at a time: their groups may differ in size by one
        duals, free = memorize.dual_basis(queries, alone)
        v = memorize.orthogonal_direction(free, queries, alone, generator)
        keys = carrier[:, None] * logit[group]
        c = memorize.saturating_scale(context, queries, alone, duals, keys[None], pull, v)
        W_Q[head] = torch.stack([duals[0] @ logit[group], c.sqrt() * v[0]], dim=1)
        W_K[head] = torch.stack([carrier, c.sqrt() * pull], dim=1)
        W_V[head] += gain * carrier
    ones = W_V.new_ones(heads, 1)
    weights = MHAWeights(W_Q, W_K, W_V[..., None], ones, ones[:1])
    error = float((mha(weights, context, queries)[:, 0] - labels).abs().max())
    if not error <= _TOLERANCE * memorize.label_spread(labels):
        got = f"nearly dependent queries, or ones of very different lengths (error {error:.1e})"
        refuse("queries", got, "better conditioned data")
    return weights
