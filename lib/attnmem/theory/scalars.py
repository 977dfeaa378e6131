r"""Scalar labels on a shared context, written into the attention itself.

Theorem 1 chooses the attention without regard to the labels, and the read-out meets them: one head
then serves at most ``n - 1`` examples of a shared context. Let the attention depend on the labels,
and a head serves ``d - 1``, since each number of its logit matrix can hold a label. Its product of
two maps is of rank two,

.. math:: W_K W_Q^\top = g w^\top + c\, u v^\top, \qquad w = \sum_{s \text{ served}} l_s f_s,

with vectors :math:`f_s` that are one on the query of example ``s`` and zero on the others served.
The first part raises the logit of one *carrier* token by :math:`l_s`, such that the attention on it
is the label. The second part separates two *idle* tokens of equal value, one of which takes all
attention on every example that the head does not serve. There the head adds only a constant.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .. import examples
from ..checks import construction, refuse
from ..core import memorize
from ..core.layers import MHAWeights, mha
from ..examples import Queries, check_data
from .independence import numerical_rank

__all__ = ["memorize_scalars"]

# Attention on the carrier for the smallest and the largest label: far from 0 and 1, where the
# softmax is flat and logits would lose digits.
_LOW, _HIGH = 0.25, 0.75
_ALLOWED = 1e-8  # error, of the labels' spread: what the docstring promises
_CARRIER, _IDLE = 0, (1, 2)  # tokens; any three will do, as all are independent


def _satisfies_scalars(context, queries, labels, heads) -> None:
    check_data(context=context, queries=queries, labels=labels)
    (n, d), T = context.shape, len(queries)
    if heads * (d - 1) < T:
        refuse("labels", f"T = {T} examples", f"1 <= T <= H (d - 1) = {heads * (d - 1)}")
    if n < 3 or numerical_rank(context, dtype=torch.float64) < n:
        refuse("context", f"{n} tokens", "at least 3 tokens, all independent")
    examples.check_distinct_examples(context, queries, labels)


@construction(also=_satisfies_scalars)
def memorize_scalars(
    context: Float[Tensor, "n d"], queries: Queries, labels: Float[Tensor, " T"], *, heads: int
) -> MHAWeights:
    """Build a layer that reproduces ``T <= H (d - 1)`` scalar labels on one shared context.

    The context has at least three independent tokens, and any ``d`` queries are independent; it
    suffices that no other one lies in the span of the ``d - 1`` that a head serves. The heads have
    width ``d_h = 2``, the values ``d_v = 1``. The only error is that of rounding: where a head is
    idle, its attention off the idle tokens is below the rounding unit. ``ValueError`` says which
    hypothesis fails, or that float64 misses a label by 1e-8 of their spread.

    Source: this book; compare Mahdavi et al. 2024, Proposition 2.
    """

    def build(context: Tensor, queries: Tensor, labels: Tensor) -> MHAWeights:
        labels = labels[:, 0]
        lift = torch.linalg.pinv(context)  # context @ lift = identity
        logits = carrier_logits(labels, len(context))
        W_Q, W_K = attention_maps(context, queries, logits, lift, heads)
        W_V = values(labels, lift, heads)
        ones = W_V.new_ones(heads, 1)
        weights = MHAWeights(W_Q, W_K, W_V[..., None], ones, ones[:1])
        error = float((mha(weights, context, queries)[:, 0] - labels).abs().max())
        if not error <= _ALLOWED * memorize.label_spread(labels):
            got = f"nearly dependent queries, or ones of very different lengths (error {error:.1e})"
            refuse("queries", got, "better conditioned data")
        return weights

    return memorize.build_in_units(build, context, queries, labels)


def carrier_logits(labels: Float[Tensor, " T"], n: int) -> Float[Tensor, " T"]:
    """Logits of the carrier, the others' being zero, with which its attention tells the labels."""
    width = (labels.max() - labels.min()).clamp(min=memorize.EPS)
    attention = _LOW + (_HIGH - _LOW) * (labels - labels.min()) / width
    return torch.log((n - 1) * attention / (1 - attention))


def attention_maps(
    context: Float[Tensor, "n d"],
    queries: Queries,
    logits: Float[Tensor, " T"],
    lift: Float[Tensor, "d n"],
    heads: int,
) -> tuple[Float[Tensor, "H d 2"], Float[Tensor, "H d 2"]]:
    """Maps with which each head gives the carrier these logits on the examples that it serves."""
    carrier, pull = lift[:, _CARRIER], lift[:, _IDLE[0]] - lift[:, _IDLE[1]]
    W_Q, W_K = (queries.new_zeros(heads, queries.shape[1], 2) for _ in range(2))
    generator = torch.Generator().manual_seed(0)  # of v, on which the outputs do not depend
    for head, group in enumerate(_shares(queries, heads)):
        served = group[None]  # one head at a time: their groups may differ in size by one
        duals, free = memorize.dual_basis(queries, served)
        v = memorize.orthogonal_direction(free, queries, served, generator)
        keys = carrier[:, None] * logits[group]
        c = memorize.saturating_scale(context, queries, served, duals, keys[None], pull, v)
        W_Q[head] = torch.stack([duals[0] @ logits[group], c.sqrt() * v[0]], dim=1)
        W_K[head] = torch.stack([carrier, c.sqrt() * pull], dim=1)
    return W_Q, W_K


def _shares(queries: Queries, heads: int) -> list[Int[Tensor, " k"]]:
    """The examples of each head that serves some, the first heads."""
    examples = torch.arange(len(queries), device=queries.device)
    return [group for group in examples.tensor_split(heads) if len(group)]


def values(
    labels: Float[Tensor, " T"], lift: Float[Tensor, "d n"], heads: int
) -> Float[Tensor, "H d"]:
    """Values with which the carrier spans the width of the labels; all heads share a constant."""
    gain = (labels.max() - labels.min()) / (_HIGH - _LOW)
    W_V = (lift.sum(dim=1) * (labels.min() - _LOW * gain) / heads).repeat(heads, 1)
    W_V[: len(labels)] += gain * lift[:, _CARRIER]  # of heads that serve an example
    return W_V
