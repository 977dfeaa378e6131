r"""What attention can offer about a set of sequences: the exact rank.

Which rows ``F(t) = [x(t, S); W_V^1 A^1(t); ...]`` can be made independent depends on the tokens
that the sequences share. The largest rank of ``F`` over all weights is that of a matrix of rational
functions in free attention weights (``attnmem.constructions.free``), which a random integer point
modulo a prime shows. Next tokens that no weights predict are in
``attnmem.constructions.impossible``, whose names this module offers too.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..checks import check_tensor, checked_by, refuse
from . import residues
from .free import embedded, free_sequences, numbers, shares
from .generic import on_cpu
from .impossible import (
    Impossible,
    check_distinct_sequences,
    check_sequences,
    every_parity,
    impossible_subset,
    parity_by_heads,
    places_kernel,
)

__all__ = [
    "Impossible",
    "dependent_subset",
    "every_parity",
    "impossible_subset",
    "offered_rank",
    "own_tokens",
    "parity_by_heads",
    "places_kernel",
    "subset_rank",
]

FEW = 16  # sequences whose subsets are all tried


# --- the rank, exactly ----------------------------------------------------------------------------


@on_cpu
@checked_by(check_sequences)
def offered_rank(
    sequences: Int[Tensor, "T S"],
    heads: int,
    head_dim: int,
    dim: int,
    seed: int = 0,
    *,
    skip: bool = True,
) -> int:
    """The largest rank of ``F`` over all weights; almost all weights reach it.

    It is computed modulo the prime ``2^31 - 1`` at a random integer point, which proves a lower
    bound. The result falls short of the largest rank with a probability below ``T_0 (4 H + 2) /
    (2^31 - 2)`` over ``seed`` (Schwartz and Zippel), unless that prime divides every coefficient of
    every largest minor. So a full rank is proven, and a lower one is right up to that tiny
    probability.

    Args:
        sequences: Token numbers.
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``, at most ``d``.
        dim: Embedding dimension ``d``, at least 2.
        seed: Seed of the point, at least 0.
        skip: Whether ``F`` includes its first ``d`` columns, those of the skip connection.

    Returns:
        The rank.

    Raises:
        ValueError: If the sequences are no token numbers, or a size is out of range.

    Example:
        >>> pairs = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
        >>> offered_rank(pairs, heads=1, head_dim=4, dim=4)
        4
        >>> xor = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]])
        >>> [offered_rank(xor, heads, head_dim=9, dim=9) for heads in (1, 2)]
        [3, 4]

    Source: this book; it corrects Dana et al. 2025, Lemma 2 and the proof of Theorem 1.
    """
    F = _free_offers(sequences, heads, head_dim, dim, seed)
    return residues.rank(F[:, 0 if skip else dim :])


@on_cpu
@checked_by(check_sequences)
def dependent_subset(
    sequences: Int[Tensor, "T S"], heads: int, head_dim: int, dim: int, seed: int = 0
) -> Int[Tensor, " k"]:
    """Rows that no weights make independent, and of which every proper subset can be: a circuit.

    It is computed as :func:`offered_rank` is, and right up to the same probability.

    Args:
        sequences: Token numbers.
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``, at most ``d``.
        dim: Embedding dimension ``d``, at least 2.
        seed: Seed of the point, at least 0.

    Returns:
        The smallest of the circuits that one elimination finds; empty if all rows can be
        independent.

    Raises:
        ValueError: As for :func:`offered_rank`.

    Example:
        >>> xor = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [0, 1, 1]])
        >>> dependent_subset(xor, heads=1, head_dim=9, dim=9).tolist()
        [0, 1, 2, 3]

    Source: this book.
    """
    reduced, pivots = residues.echelon(_free_offers(sequences, heads, head_dim, dim, seed).T)
    rows = [k for k in range(len(sequences)) if k not in {*pivots}]
    circuits = ([*np.flatnonzero(reduced[: len(pivots), k]), k] for k in rows)
    found = [[pivots[i] for i in circuit[:-1]] + circuit[-1:] for circuit in circuits]
    return torch.tensor(sorted(min(found, key=len, default=[])), dtype=torch.int64)


def _free_offers(sequences: Tensor, heads: int, head_dim: int, dim: int, seed: int) -> np.ndarray:
    """``F`` modulo the prime, with random embeddings, value maps and attention weights."""
    free, draw = free_sequences(sequences), np.random.default_rng(seed)
    x = embedded(free, dim, draw)
    blocks = [x[:, -1]]
    for _ in range(heads):
        A = (shares(free, draw)[..., None] * x % residues.PRIME).sum(1) % residues.PRIME
        blocks.append(residues.product(A, numbers(draw, dim, head_dim)))
    return np.concatenate(blocks, axis=1)


# --- the rank, from the subsets -------------------------------------------------------------------


@on_cpu
def own_tokens(sequences: Int[Tensor, "T S"]) -> Int[Tensor, " T"]:
    """For each sequence, a place whose token no other sequence with the same last token contains.

    That token is not the last one itself. For bigrams place 0 always serves.

    Args:
        sequences: Token numbers.

    Returns:
        One place for each sequence.

    Raises:
        ValueError: If a sequence has no such place. The error names it.

    Example:
        >>> own_tokens(torch.tensor([[4, 1, 0], [1, 5, 0]])).tolist()
        [0, 1]
    """
    check_tensor("sequences", sequences, "(T_0, S)", 2)
    if not sequences.shape[1]:
        refuse("sequences", f"shape {(*sequences.shape,)}", "at least one token in each")
    if sequences.shape[1] == 2:
        return torch.zeros(len(sequences), dtype=torch.int64)
    rows = sequences.tolist()
    return torch.tensor([_own_place(rows, t) for t in range(len(rows))], dtype=torch.int64)


def _own_place(rows: list[list[int]], t: int) -> int:
    *before, last = rows[t]
    others = {a for u, row in enumerate(rows) if u != t and row[-1] == last for a in row}
    for place, token in enumerate(before):
        if token not in others | {last}:
            return place
    refuse("sequences", f"row {t}, {rows[t]}, without a token of its own", "a token in each")


def _check_subsets(sequences, heads, head_dim, dim) -> None:
    check_sequences(sequences, heads, head_dim, dim)
    if len(sequences) > FEW:
        refuse("sequences", f"T_0 = {len(sequences)}", f"T_0 <= {FEW}: all subsets are tried")
    check_distinct_sequences(sequences)


@on_cpu
@checked_by(_check_subsets)
def subset_rank(sequences: Int[Tensor, "T S"], heads: int, head_dim: int, dim: int) -> int:
    r"""A lower bound of the offered rank, by trying all subsets of the sequences.

    The formula is :math:`\min_J T_0 - |J| + H \min(d_h, r(J)) + \min(d, L(J))` over all subsets
    ``J``. Here ``L(J)`` counts the different last tokens in ``J``, and ``r(J)`` is the dimension
    that the vectors ``e(own token) + pos - e(last token) - pos_S`` of ``J`` span, with the mean of
    the own token's positions (see :func:`own_tokens`). For bigrams the bound is exact (theorem
    ``thm-subsets`` of the book).

    Args:
        sequences: Distinct sequences, at most 16, each with a token of its own.
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``, at most ``d``.
        dim: Embedding dimension ``d``, at least 2.

    Returns:
        The bound.

    Raises:
        ValueError: If there are more than 16 sequences, one is repeated, or one has no token of its
            own.

    Example:
        >>> square = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        >>> subset_rank(square, heads=1, head_dim=10, dim=10)
        6

    Source: this book.
    """
    moves = _moves(sequences)
    ends = torch.nn.functional.one_hot(sequences[:, -1].unique(return_inverse=True)[1])
    chosen = torch.cartesian_prod(*[torch.arange(2)] * len(sequences)).reshape(-1, len(sequences))
    # The entries are simple fractions, so no singular value is small without being zero.
    r = torch.linalg.matrix_rank(chosen[..., None] * moves)
    L = (chosen @ ends).gt(0).sum(1)
    offered = heads * r.clamp(max=head_dim) + L.clamp(max=dim)
    return int((len(sequences) - chosen.sum(1) + offered).min())


def _moves(sequences: Tensor) -> Tensor:
    """Indicators of own token and place less those of the last ones (columns: tokens, places)."""
    T, S = sequences.shape
    place = own_tokens(sequences)
    _, codes = sequences.unique(return_inverse=True)
    tokens = int(codes.max()) + 1
    moves = torch.zeros(T, tokens + S, dtype=torch.float64)
    for t in range(T):
        own, last = codes[t, place[t]], codes[t, -1]
        at = codes[t, :-1] == own
        moves[t, own] += 1
        moves[t, last] -= 1
        moves[t, tokens:-1] += at / at.sum()
        moves[t, -1] -= 1
    return moves
