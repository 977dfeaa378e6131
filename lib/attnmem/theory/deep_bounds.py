r"""How many labels several layers together meet: a floor, and the groups of heads that reach it.

Heads of one group attend alike and their values cancel, so the output is zero, whichever layers
they stand in. The floor is the rank of the derivative there (:mod:`attnmem.core.bounds`), and
:func:`attnmem.theory.depth.memorize_by_depth` builds the weights. Groups span the layers, or those
of one layer work alone; this module finds the grouping of the largest rank. The chapter on silent
groups that span the layers proves each of its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..checks import checked
from ..core.bounds import AtLeast2, Heads, group_sizes, most_ranks, sum_of_ranks


class DeepGroups(NamedTuple):
    """How the heads of all layers are grouped, and the labels that :func:`deep_floor` counts."""

    labels: int
    sizes: list[list[int]]  # of each layer, its heads in each group; an idle layer has none


@checked
def deep_floor(
    heads: Heads, head_dim: int, value_dim: int, dim: AtLeast2, *, context: AtLeast2 = 3
) -> int:
    r"""Examples with own contexts whose real labels all layers together meet, for almost all data.

    The layers have skip connections and one output, full or causal attention, and ``context``
    tokens. Groups of heads span the layers, with :math:`n_g` heads in all and :math:`a_{lg}` in
    layer ``l``. With ``m = d - 1``, ``r = min(d_h, m)``, the :math:`\rho_m` of
    :func:`~attnmem.core.bounds.group_rank` in ``m`` dimensions, and :math:`u_{lg} = \min(a_{lg}
    d_v, m)` it is the largest

    .. math:: \sum_g \rho_m(n_g) + m + \omega \sum_g \sum_l u_{lg}
              + \gamma \sum_g \min \bigl( m, \sum_l u_{lg} \bigr)

    for ``G`` groups with :math:`\omega = \min(m, 2 r G)`, :math:`\gamma = \min(G, m - \omega)`
    (theorem ``thm-depth-span``). The sums over ``l`` run over at most ``m`` layers, or ``m - r +
    1`` if ``r G < m``, such that each group has heads up to the first, between each two, and behind
    the last. There are none for two tokens and for ``d = 2``. Or it is what the layer of most
    heads meets alone, which may read all dimensions: :math:`\sum_g \rho_d(n_g) + m`, if larger.

    Example:
        >>> from attnmem.core.bounds import own_context_ceiling
        >>> own_context_ceiling(144, 64, 768) + 768  # all heads of GPT-2 in one layer, at most
        13677312
        >>> deep_floor([12] * 12, 64, 64, 768)
        19370873

    Source: :func:`attnmem.theory.depth.memorize_by_depth`.
    """
    return deep_groups(heads, head_dim, value_dim, dim, context=context).labels


@checked
def deep_groups(
    heads: Heads,
    head_dim: int,
    value_dim: int,
    dim: AtLeast2,
    *,
    context: AtLeast2 = 3,
    most: int | None = None,
) -> DeepGroups:
    """The groups, of at most ``most`` heads each, with which :func:`deep_floor` is largest."""
    largest = most or sum(heads)  # group
    spanning = _spanning(heads, head_dim, value_dim, dim, context, largest)
    alone = _one_layer(heads, head_dim, dim, largest)
    return max(spanning, alone, key=lambda grouping: grouping.labels)


# --- groups that span the layers ------------------------------------------------------------------


def _spanning(
    heads: Heads, head_dim: int, value_dim: int, dim: int, context: int, largest: int
) -> DeepGroups:
    """The number of groups with which those that span the layers meet most labels."""
    total, m = sum(heads), dim - 1
    r = min(head_dim, m)
    fewest = math.ceil(total / largest)
    # With more groups than these all terms fall.
    enough = max(most_ranks(total, m, m, r, fewest=fewest)[1], *heads, math.ceil(m / (2 * r)))
    numbers = range(fewest, max(fewest, min(total, enough)) + 1)
    labels, groups = max((_labels(heads, G, r, value_dim, m, context), G) for G in numbers)
    return DeepGroups(labels, sizes=_dealt(heads, groups))


def _labels(heads: Heads, groups: int, r: int, value_dim: int, m: int, context: int) -> int:
    """Labels of so many groups that span the layers, read in ``m = d - 1`` dimensions."""
    labels = m + sum_of_ranks(sum(heads), groups, m, m, r)
    if context < 3 or m < 2:  # nothing is proved of what layers carry
        return labels
    # u_lg: what each group of each layer can write, for all that the groups of later layers read.
    written = [[min(a * value_dim, m) for a in layer] for layer in _dealt(heads, groups)]
    counted = [written[layer] for layer in _chosen_layers(heads, groups, [*map(sum, written)])]
    room = m if r * groups >= m else m - r + 1
    counted = sorted(counted, key=sum)[-room:]
    omega = min(m, 2 * r * groups)  # dimensions that logits of later layers read
    gamma = min(groups, m - omega)  # and those that only their values read
    labels += omega * sum(map(sum, counted))
    for of_layers in zip(*counted, strict=True):  # u_lg of one group
        labels += gamma * min(m, sum(of_layers))
    return labels


def _dealt(heads: Heads, groups: int) -> list[list[int]]:
    """For each layer its heads in each group, if heads are dealt out to the groups in turn."""
    layers, first = [], 0  # the group whose turn it is
    for H in heads:
        rounds, rest = divmod(H, groups)
        sizes = [rounds] * groups
        for turn in range(rest):
            sizes[(first + turn) % groups] += 1
        layers.append(sizes)
        first = (first + rest) % groups
    return layers


class _Choice(NamedTuple):
    worth: int
    end: int  # heads up to the last of the layers, and in it
    layers: list[int]


def _chosen_layers(heads: Heads, groups: int, worth: Sequence[int]) -> list[int]:
    """Layers of the largest total worth that have all groups up to the first, between and behind.

    Dealt out in turn, as many heads as there are groups are one of each.
    """
    end, choices = 0, [_Choice(0, end=0, layers=[])]  # the best one for each last layer
    for layer, H in enumerate(heads):
        end += H
        if sum(heads) - end < groups:
            break
        before = [choice for choice in choices if end - choice.end >= groups]
        if before:
            best = max(before)
            choices.append(_Choice(best.worth + worth[layer], end, [*best.layers, layer]))
    return max(choices).layers


# --- groups of one layer, while the others are idle -----------------------------------------------


def _one_layer(heads: Heads, head_dim: int, dim: int, largest: int) -> DeepGroups:
    """The layer of most heads alone, in all dimensions."""
    H = max(heads)
    fewest = math.ceil(H / largest)
    labels, groups = most_ranks(H, dim, dim, min(head_dim, dim), fewest=fewest)
    sizes: list[list[int]] = [[] for _ in heads]
    sizes[heads.index(H)] = group_sizes(H, groups)
    return DeepGroups(labels + dim - 1, sizes)
