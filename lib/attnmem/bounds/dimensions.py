"""How many real labels a layer can meet: the dimension of what it computes, and what is reached.

A layer with one output is determined by its logit matrices, of rank at most ``d_h``, and by its
values. Their number, ``P(H)``, is a ceiling: almost no labels of more than ``P(H)`` examples are
met. The floors are ranks of the derivative at weights where the output vanishes since the values of
heads with equal attention cancel. Heads that cancel form a group.
"""

from __future__ import annotations

import math

from ..checks import check_integer, check_integers, checked_by


@checked_by(check_integers)
def own_context_ceiling(heads: int, head_dim: int, dim: int) -> int:
    """Number of parameters that determine the one output of a layer on own contexts.

    The formula is :math:`P(H) = H (d_h (2 d - d_h) + d)`, with ``d_h`` at most ``d``. Each head
    contributes its logits, a matrix of shape ``(d, d)`` and rank at most ``d_h``, and its values.
    Contexts have at least two tokens. Weights that meet more real labels than that exist only for
    a set of labels of measure zero (Sard's theorem). The count also holds for a shared context of
    more than ``d`` tokens.

    Args:
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``.
        dim: Embedding dimension ``d``.

    Returns:
        The number of examples beyond which almost all real labels are out of reach.

    Raises:
        ValueError: If an argument is not an integer of at least 1.

    Example:
        >>> own_context_ceiling(heads=4, head_dim=64, dim=64)
        16640

    Source: this book, the chapter on the capacity of one layer.
    """
    rank = min(head_dim, dim)
    return heads * (rank * (2 * dim - rank) + dim)


def _check_group(size, keys, dim, rank) -> None:
    check_integers(size=size, dim=dim)
    check_integer("keys", keys, most=dim)
    check_integer("rank", rank, most=keys)


@checked_by(_check_group)
def group_rank(size: int, keys: int, dim: int, rank: int) -> int:
    """Rank of the derivative in the weights of one group, whose values sum to zero.

    All heads of the group share one logit matrix, of shape ``(keys, dim)`` and rank ``rank``. Their
    values span ``p = size - 1`` dimensions, or all ``keys``. The formula is :math:`p r (m + d - r)
    - \\binom p2 r - \\binom{p - m + r}2 (d - r) + m` with ``m = keys`` and ``r = rank``, where the
    last binomial is zero if ``p`` is at most ``m - r``.

    Args:
        size: Number of heads in the group.
        keys: Dimensions that tell tokens apart: ``d``, or ``n - 1`` on a shared context of ``n <=
            d`` tokens. At most ``dim``.
        dim: Embedding dimension ``d``.
        rank: Rank of the logit matrix, at most ``keys``.

    Returns:
        The rank.

    Raises:
        ValueError: If an argument is not an integer of at least 1, or too large.

    Example:
        >>> group_rank(size=2, keys=8, dim=8, rank=8) == own_context_ceiling(1, 8, 8)
        True

    Source: this book, the chapter on the capacity of one layer.
    """
    return _group_rank(size, keys, dim, rank)


def _group_rank(size: int, keys: int, dim: int, rank: int) -> int:
    p = min(size - 1, keys)
    missed = math.comb(p, 2) * rank + math.comb(max(p - keys + rank, 0), 2) * (dim - rank)
    return p * rank * (keys + dim - rank) - missed + keys


def _check_groups(heads, keys, dim, rank) -> None:
    check_integer("heads", heads)
    _check_group(heads, keys, dim, rank)


@checked_by(_check_groups)
def best_groups(heads: int, keys: int, dim: int, rank: int) -> list[int]:
    """Sizes of the groups whose ranks have the largest sum.

    From the second head of a group on, the gain of one more head falls. So groups of nearly equal
    size are best, and their number is tried.

    Args:
        heads: Number of heads ``H``.
        keys: As for :func:`group_rank`, at most ``dim``.
        dim: Embedding dimension ``d``.
        rank: Rank of the logit matrices, at most ``keys``.

    Returns:
        The sizes; their sum is ``heads``.

    Raises:
        ValueError: If an argument is not an integer of at least 1, or too large.

    Example:
        >>> best_groups(heads=32, keys=64, dim=64, rank=64)
        [11, 11, 10]

    Source: this book, the chapter on the capacity of one layer.
    """

    def reached(groups: int) -> int:
        small, larger = divmod(heads, groups)
        more, fewer = (_group_rank(size, keys, dim, rank) for size in (small + 1, small))
        return larger * more + (groups - larger) * fewer

    groups = max(range(1, heads + 1), key=reached)
    small, larger = divmod(heads, groups)
    return [small + 1] * larger + [small] * (groups - larger)


@checked_by(check_integers)
def own_context_floor(heads: int, head_dim: int, dim: int) -> int:
    """Examples with own contexts whose real labels are all met, for almost all data.

    The count is the sum of :func:`group_rank` over the best groups, for contexts of at least two
    tokens. It is at least ``P(floor(H/2))`` and at most ``P(H)``, the
    :func:`own_context_ceiling`.

    Args:
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``.
        dim: Embedding dimension ``d``.

    Returns:
        The number of examples.

    Raises:
        ValueError: If an argument is not an integer of at least 1.

    Example:
        >>> own_context_floor(heads=4, head_dim=64, dim=64)
        12160

    Source: this book, the chapter on the capacity of one layer.
    """
    rank = min(head_dim, dim)
    return sum(group_rank(g, dim, dim, rank) for g in best_groups(heads, dim, dim, rank))


def _check_shared(heads, context, head_dim, dim) -> None:
    check_integers(heads=heads, dim=dim, head_dim=head_dim)
    check_integer("context", context, least=2)


@checked_by(_check_shared)
def shared_context_floor(heads: int, context: int, head_dim: int, dim: int) -> int:
    """Examples on one shared context whose real labels are all met, for almost all data.

    The count is the sum of :func:`group_rank` over the best groups, and one for a constant if the
    context has at most ``d`` tokens. On longer contexts it is :func:`own_context_floor`.

    Args:
        heads: Number of heads ``H``.
        context: Tokens in the context, ``n >= 2``.
        head_dim: Head dimension ``d_h``.
        dim: Embedding dimension ``d``.

    Returns:
        The number of examples, at most :func:`attnmem.bounds.shared_context_ceiling`.

    Raises:
        ValueError: If a size is not an integer of at least 1, or ``context`` not one of at least 2.

    Example:
        >>> shared_context_floor(heads=4, context=32, head_dim=64, dim=64)
        5792

    Source: this book, the chapter on the capacity of one layer.
    """
    if context > dim:
        return own_context_floor(heads, head_dim, dim)
    keys, rank = context - 1, min(head_dim, context - 1)
    groups = best_groups(heads, keys, dim, rank)
    return sum(group_rank(size, keys, dim, rank) for size in groups) + 1
