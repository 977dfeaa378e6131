r"""How many directions the outputs of attention can move in, on a set of sequences: exact ranks.

The output is one number for each sequence,

.. math:: f(t) = u^\top x(t, S) + \sum_h m_h^\top A^h(t) .

Its derivatives by ``u``, the values ``m_h`` and the maps of each head are rational functions of
these, of embeddings and positions, and of free attention weights (``attnmem.constructions.free``,
theorem ``thm-free-tangents`` of the book). With the covariance ``C`` of a sequence's tokens under
the attention and the query ``q = x(t, S)``, they are ``q``, ``A`` and, for a change of ``W_QK`` by
``D``, :math:`q^\top D\, C m`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from torch import Tensor

from ..checks import check_integer, checked_by, refuse
from . import residues
from .free import FreeSequences, embedded, free_sequences, numbers, shares
from .impossible import check_sequences


def _check_jacobian(sequences, heads, head_dim, dim, seed, trained) -> None:
    check_sequences(sequences, heads, head_dim, dim, seed)


@checked_by(_check_jacobian)
def jacobian_rank(
    sequences: Int[Tensor, "T S"],
    heads: int,
    head_dim: int,
    dim: int,
    seed: int = 0,
    *,
    trained: bool = False,
) -> int:
    """The largest rank of the Jacobian of all outputs; almost all weights reach it.

    If it is below the number of sequences, weights exist for almost no real labels. It is computed
    modulo a prime at a random point, as :func:`attnmem.constructions.sequences.offered_rank` is: a
    full rank is proven, and a lower one is right up to a tiny probability.

    Args:
        sequences: Token numbers.
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``, at most ``d``.
        dim: Embedding dimension ``d``, at least 2.
        seed: Seed of the point, at least 0.
        trained: Whether embeddings and positions are among the weights by which the outputs are
            differentiated; if not, they are fixed.

    Returns:
        The rank.

    Raises:
        ValueError: If the sequences are no token numbers, or a size is out of range.

    Example:
        >>> import torch
        >>> bits = torch.cartesian_prod(*[torch.arange(2)] * 3, torch.zeros(1, dtype=int))
        >>> [jacobian_rank(bits, heads, head_dim=1, dim=9) for heads in (1, 2)]
        [7, 8]

    Source: this book, the chapter on token sequences.
    """
    return residues.rank(_tangents(sequences, [1] * heads, head_dim, dim, seed, trained))


def check_groups(groups) -> None:
    """Accept the sizes of groups of heads, at least one.

    Args:
        groups: Integers of at least 1.

    Raises:
        ValueError: If there are none, or one is no integer of at least 1.
    """
    if not isinstance(groups, Sequence) or not groups:
        refuse("groups", repr(groups), "a sequence of at least one integer")
    for size in groups:
        check_integer("groups", size)


def _check_cancelling(sequences, groups, head_dim, dim, seed) -> None:
    check_groups(groups)
    check_sequences(sequences, sum(groups), head_dim, dim, seed)


@checked_by(_check_cancelling)
def cancelling_rank(
    sequences: Int[Tensor, "T S"],
    groups: Sequence[int],
    head_dim: int,
    dim: int,
    seed: int = 0,
) -> int:
    """The largest rank of the Jacobian at weights where the heads of each group cancel.

    The heads of a group have one ``W_QK``, and their values have sum zero; ``k`` heads have ``k -
    1`` free values. If the rank is the number of sequences, heads as many as in all groups meet
    every real label. It is computed as :func:`jacobian_rank` is.

    Args:
        sequences: Token numbers.
        groups: The number of heads of each group. A pair is worth one head in
            :func:`jacobian_rank`; a head alone has the value zero.
        head_dim: Head dimension ``d_h``, at most ``d``.
        dim: Embedding dimension ``d``, at least 2.
        seed: Seed of the point, at least 0.

    Returns:
        The rank.

    Raises:
        ValueError: As for :func:`jacobian_rank`, or if a group is not an integer of at least 1.

    Example:
        >>> import torch
        >>> bits = torch.cartesian_prod(*[torch.arange(2)] * 3, torch.zeros(1, dtype=int))
        >>> cancelling_rank(bits, (2, 2), head_dim=1, dim=9)
        8

    Source: this book, the chapter on token sequences.
    """
    return residues.rank(_tangents(sequences, [k - 1 for k in groups], head_dim, dim, seed))


def _tangents(
    sequences: Tensor,
    values: Sequence[int],
    head_dim: int,
    dim: int,
    seed: int,
    trained: bool = False,
) -> np.ndarray:
    """The Jacobian modulo the prime; each entry of ``values`` is an attention with so many values.

    A change of basis in the head makes the first ``d_h`` columns of ``W_K`` constant, so they are
    not varied.
    """
    free, draw = free_sequences(sequences), np.random.default_rng(seed)
    x = embedded(free, dim, draw)
    moved = np.zeros_like(x)  # the derivative by x(t, s)
    moved[:, -1] = numbers(draw, dim)
    blocks = [x[:, -1]]
    for count in values:
        a, W_Q, W_K = shares(free, draw), numbers(draw, head_dim, dim), numbers(draw, head_dim, dim)
        blocks.append(_total(a[..., None] * x))
        asked = residues.product(x[:, -1], W_Q.T)
        for _ in range(count):
            m = numbers(draw, dim)
            share = a * (_spread(a, _total(x * m, axis=2)) % residues.PRIME) % residues.PRIME
            Cm = _total(share[..., None] * x)
            keyed = residues.product(Cm, W_K.T)
            blocks += [_outer(keyed, x[:, -1]), _outer(asked, Cm[:, head_dim:])]
            keys = residues.product(asked, W_K)
            moved += a[..., None] * m % residues.PRIME
            moved += share[..., None] * keys[:, None] % residues.PRIME
            moved[:, -1] += residues.product(keyed, W_Q)
    if trained:
        blocks += _moved(free, moved % residues.PRIME)
    return np.concatenate(blocks, axis=1)


def _total(terms: np.ndarray, axis: int = 1) -> np.ndarray:
    return (terms % residues.PRIME).sum(axis) % residues.PRIME


def _spread(a: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Each value less the average of its row."""
    return values - _total(a * values)[:, None]


def _outer(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left[:, :, None] * right[:, None] % residues.PRIME).reshape(len(left), -1)


def _moved(free: FreeSequences, moved: np.ndarray) -> list[np.ndarray]:
    """The derivatives by embeddings and by positions."""
    T, _, dim = moved.shape
    table = np.zeros((T, int(free.tokens.max()) + 1, dim), dtype=np.int64)
    np.add.at(table, (np.arange(T)[:, None], free.tokens), moved)
    return [table.reshape(T, -1) % residues.PRIME, moved.reshape(T, -1)]
