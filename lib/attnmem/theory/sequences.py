r"""What attention can tell about a set of sequences: exact ranks.

Two sequences with the same last token ask with the same query. So a head weighs a token ``a`` at a
position ``s`` in both by the same number

.. math:: e^{x(t, S)^\top W_{QK} (e(a) + pos_s)} = \alpha(t_S, a)\, \beta(t_S, s) .

For ``d >= 2`` these numbers satisfy no other polynomial relation. So ranks of matrices built from
embeddings, maps and attention weights can be computed with random integers in place of all of them,
modulo a prime (theorems ``thm-free-weights`` and ``thm-free-tangents`` of the book): of the rows
``F(t) = [x(t, S); W_V^1 A^1(t); ...]`` that the heads offer, and of the derivatives of

.. math:: f(t) = u^\top x(t, S) + \sum_h m_h^\top A^h(t) .

It needs python-flint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..checks import Range, Seed, checked, on_cpu, refuse
from ..examples import Sequences, check_distinct_sequences, check_token_numbers
from . import mod_prime

FEW = 16  # sequences whose subsets are all tried

Dim = Annotated[int, Range(2)]
HeadDim = Annotated[int, Range(1, "dim")]


# --- attention whose weights are free variables, at a random point modulo a prime -----------------


class _FreeSequences(NamedTuple):
    """The numbers by which sequences share their variables, each from 0 upwards."""

    tokens: Int[np.ndarray, "T S"]
    pairs: Int[np.ndarray, "T S"]  # of the last token and the token at each position
    last: Int[np.ndarray, " T"]


def _free_sequences(sequences: Sequences) -> _FreeSequences:
    given = sequences.numpy()
    names, tokens = np.unique(given, return_inverse=True)
    tokens = tokens.reshape(given.shape)  # from 0 on, so that no pair is too large a number
    last = tokens[:, -1:]
    _, pairs = np.unique(last * len(names) + tokens, return_inverse=True)
    _, ends = np.unique(last, return_inverse=True)
    return _FreeSequences(tokens, pairs.reshape(given.shape), ends.reshape(-1))


def _numbers(draw: np.random.Generator, *shape: int) -> Int[np.ndarray, "..."]:
    """Random residues, none of them zero."""
    return draw.integers(1, mod_prime.PRIME, shape, dtype=np.int64)


def _embedded(free: _FreeSequences, dim: int, draw: np.random.Generator) -> np.ndarray:
    """``x(t, s) = e(t_s) + pos_s``, of shape ``(T, S, d)``."""
    table = _numbers(draw, int(free.tokens.max()) + 1, dim)
    return (table[free.tokens] + _numbers(draw, free.tokens.shape[1], dim)) % mod_prime.PRIME


def _attention(free: _FreeSequences, draw: np.random.Generator) -> Int[np.ndarray, "T S"]:
    """The attention weights of one head: ``alpha beta`` over its sum, so each row has sum one."""
    pairs, last = int(free.pairs.max()) + 1, int(free.last.max()) + 1
    total = np.zeros(1, dtype=np.int64)
    while not total.all():  # a denominator
        alpha, beta = _numbers(draw, pairs), _numbers(draw, last, free.tokens.shape[1])
        weights = alpha[free.pairs] * beta[free.last] % mod_prime.PRIME
        total = weights.sum(1) % mod_prime.PRIME
    inverse = np.array([pow(x, -1, mod_prime.PRIME) for x in total.tolist()])
    return weights * inverse[:, None] % mod_prime.PRIME


def _total(terms: np.ndarray, axis: int = 1) -> np.ndarray:
    return (terms % mod_prime.PRIME).sum(axis) % mod_prime.PRIME


# --- what heads offer -----------------------------------------------------------------------------


@on_cpu
@checked(also=check_token_numbers)
def offered_rank(
    sequences: Sequences,
    heads: int,
    head_dim: HeadDim,
    dim: Dim,
    seed: Seed = 0,
    *,
    skip: bool = True,
) -> int:
    """The largest rank of ``F`` over all weights; almost all weights reach it.

    It is computed modulo the prime ``2^31 - 1`` at a random integer point, which proves a lower
    bound. The result falls short of the largest rank with a probability below ``T_0 (4 H + 2) /
    (2^31 - 2)`` over ``seed`` (Schwartz and Zippel), unless that prime divides every coefficient of
    every largest minor. So a full rank is proven, and a lower one is right up to that tiny
    probability. Without ``skip``, ``F`` lacks the first ``d`` columns, of the skip connection.

    Example:
        >>> xor = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]])
        >>> [offered_rank(xor, heads, head_dim=9, dim=9) for heads in (1, 2)]
        [3, 4]

    Source: this book; it corrects Dana et al. 2025, Lemma 2 and the proof of Theorem 1.
    """
    F = _free_offers(sequences, heads, head_dim, dim, seed)
    return mod_prime.rank(F[:, 0 if skip else dim :])


@on_cpu
@checked(also=check_token_numbers)
def dependent_subset(
    sequences: Sequences, heads: int, head_dim: HeadDim, dim: Dim, seed: Seed = 0
) -> Int[Tensor, " k"]:
    """Rows that no weights make independent, and of which every proper subset can be: a circuit.

    It is computed as :func:`offered_rank` is, and right up to the same probability. It is the
    smallest of the circuits that one elimination finds; empty if all rows can be independent.

    Example:
        >>> xor = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [0, 1, 1]])
        >>> dependent_subset(xor, heads=1, head_dim=9, dim=9).tolist()
        [0, 1, 2, 3]
    """
    reduced, pivots = mod_prime.echelon(_free_offers(sequences, heads, head_dim, dim, seed).T)
    rows = [k for k in range(len(sequences)) if k not in {*pivots}]
    circuits = ([*np.flatnonzero(reduced[: len(pivots), k]), k] for k in rows)
    found = [[pivots[i] for i in circuit[:-1]] + circuit[-1:] for circuit in circuits]
    return torch.tensor(sorted(min(found, key=len, default=[])), dtype=torch.int64)


def _free_offers(sequences, heads, head_dim, dim, seed) -> np.ndarray:
    """``F`` modulo the prime, with random embeddings, value maps and attention weights."""
    free, draw = _free_sequences(sequences), np.random.default_rng(seed)
    x = _embedded(free, dim, draw)
    blocks = [x[:, -1]]
    for _ in range(heads):
        A = _total(_attention(free, draw)[..., None] * x)
        blocks.append(mod_prime.product(A, _numbers(draw, dim, head_dim)))
    return np.concatenate(blocks, axis=1)


# --- what their derivatives add -------------------------------------------------------------------


@checked(also=check_token_numbers)
def jacobian_rank(
    sequences: Sequences,
    heads: int,
    head_dim: HeadDim,
    dim: Dim,
    seed: Seed = 0,
    *,
    trained: bool = False,
) -> int:
    """The largest rank of the Jacobian of all outputs; almost all weights reach it.

    If it is below the number of sequences, weights exist for almost no real labels. It is computed
    modulo a prime at a random point, as :func:`offered_rank` is. Outputs are differentiated by
    embeddings and positions, too, if those are ``trained``.

    Example:
        >>> bits = torch.cartesian_prod(*[torch.arange(2)] * 3, torch.zeros(1, dtype=int))
        >>> [jacobian_rank(bits, heads, head_dim=1, dim=9) for heads in (1, 2)]
        [7, 8]

    Source: this book, the chapter on token sequences.
    """
    return mod_prime.rank(_tangents(sequences, [1] * heads, head_dim, dim, seed, trained))


def _are_grouped(sequences, groups) -> None:
    check_token_numbers(sequences)
    if not groups:
        refuse("groups", repr(groups), "a sequence of at least one integer")


@checked(also=_are_grouped)
def cancelling_rank(
    sequences: Sequences, groups: Sequence[int], head_dim: HeadDim, dim: Dim, seed: Seed = 0
) -> int:
    """The largest rank of the Jacobian at weights where the heads of each group cancel.

    The heads of a group, as many as ``groups`` says, have one ``W_QK``, and their values have sum
    zero; ``k`` heads have ``k - 1`` free values. So a pair is worth one head in
    :func:`jacobian_rank`, and a head alone has the value zero. If the rank is the number of
    sequences, heads as many as in all groups meet every real label.

    Example:
        >>> bits = torch.cartesian_prod(*[torch.arange(2)] * 3, torch.zeros(1, dtype=int))
        >>> cancelling_rank(bits, (2, 2), head_dim=1, dim=9)
        8

    Source: this book, the chapter on token sequences.
    """
    return mod_prime.rank(_tangents(sequences, [k - 1 for k in groups], head_dim, dim, seed))


def _tangents(sequences, values, head_dim, dim, seed, trained=False) -> np.ndarray:
    """The Jacobian modulo the prime. Each of ``values`` is an attention with so many values."""
    # With the covariance C of a sequence's tokens under the attention and q = x(t, S), derivatives
    # are q by u, A by m, and q^T D C m for a change of W_QK by D. A change of basis in the head
    # makes the first d_h columns of W_K constant, so they are not varied.
    free, draw = _free_sequences(sequences), np.random.default_rng(seed)
    x = _embedded(free, dim, draw)
    q = x[:, -1]
    by_x = np.zeros_like(x)  # the derivative by x(t, s)
    by_x[:, -1] = _numbers(draw, dim)  # u
    blocks = [q]
    for count in values:
        a = _attention(free, draw)
        W_Q, W_K = _numbers(draw, head_dim, dim), _numbers(draw, head_dim, dim)
        blocks.append(_total(a[..., None] * x))  # A
        asked = mod_prime.product(q, W_Q.T)
        for _ in range(count):
            m = _numbers(draw, dim)
            projected = _total(x * m, axis=2)
            centred = projected - _total(a * projected)[:, None]
            share = a * (centred % mod_prime.PRIME) % mod_prime.PRIME
            Cm = _total(share[..., None] * x)
            keyed = mod_prime.product(Cm, W_K.T)
            blocks += [_outer(keyed, q), _outer(asked, Cm[:, head_dim:])]  # by W_Q, by W_K
            keys = mod_prime.product(asked, W_K)
            by_x += a[..., None] * m % mod_prime.PRIME
            by_x += share[..., None] * keys[:, None] % mod_prime.PRIME
            by_x[:, -1] += mod_prime.product(keyed, W_Q)
    if trained:
        by_x %= mod_prime.PRIME
        T = len(x)
        by_embedding = np.zeros((T, int(free.tokens.max()) + 1, dim), dtype=np.int64)
        np.add.at(by_embedding, (np.arange(T)[:, None], free.tokens), by_x)
        blocks += [by_embedding.reshape(T, -1), by_x.reshape(T, -1)]
    return np.concatenate(blocks, axis=1)


def _outer(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left[:, :, None] * right[:, None] % mod_prime.PRIME).reshape(len(left), -1)


# --- the rank, from the subsets -------------------------------------------------------------------


def _are_few(sequences) -> None:
    check_token_numbers(sequences)
    if len(sequences) > FEW:
        refuse("sequences", f"T_0 = {len(sequences)}", f"T_0 <= {FEW}: all subsets are tried")
    check_distinct_sequences(sequences)


@on_cpu
@checked(also=_are_few)
def subset_rank(sequences: Sequences, heads: int, head_dim: HeadDim, dim: Dim) -> int:
    r"""A lower bound of the offered rank, by trying all subsets of at most 16 distinct sequences.

    The formula is :math:`\min_J T_0 - |J| + H \min(d_h, r(J)) + \min(d, L(J))` over all subsets
    ``J``. Here ``L(J)`` counts the different last tokens in ``J``, and ``r(J)`` is the dimension
    that the vectors ``e(own token) + pos - e(last token) - pos_S`` of ``J`` span, with the mean of
    the own token's positions. A sequence's own token is not its last one, and is in no other
    sequence with the same last token; a sequence without one is refused. For bigrams the bound is
    exact, and all first tokens count as own (theorem ``thm-subsets`` of the book).

    Example:
        >>> square = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        >>> subset_rank(square, heads=1, head_dim=10, dim=10)
        6
    """
    T, S = sequences.shape
    names, codes = sequences.unique(return_inverse=True)
    moves = torch.zeros(T, len(names) + S, dtype=torch.float64)  # columns: tokens, then positions
    for t, own in enumerate(_own_positions(sequences)):
        own, last = codes[t, own], codes[t, -1]
        at = codes[t, :-1] == own
        moves[t, own] += 1
        moves[t, last] -= 1
        moves[t, len(names) : -1] += at / at.sum()
        moves[t, -1] -= 1
    ends = torch.nn.functional.one_hot(sequences[:, -1].unique(return_inverse=True)[1])
    chosen = torch.cartesian_prod(*[torch.arange(2)] * T).reshape(-1, T)
    # The entries are simple fractions, so no singular value is small without being zero.
    r = torch.linalg.matrix_rank(chosen[..., None] * moves)
    L = (chosen @ ends).gt(0).sum(1)
    offered = heads * r.clamp(max=head_dim) + L.clamp(max=dim)
    return int((T - chosen.sum(1) + offered).min())


def _own_positions(sequences: Sequences) -> list[int]:
    """For each sequence, the first position of a token of its own."""
    if sequences.shape[1] == 2:
        return [0] * len(sequences)
    rows, positions = sequences.tolist(), []
    for t, (*before, last) in enumerate(rows):
        others = [row for u, row in enumerate(rows) if u != t and row[-1] == last]
        shared = {last}.union(*others)
        own = [position for position, token in enumerate(before) if token not in shared]
        if not own:
            got = f"row {t}, {rows[t]}, without a token of its own"
            refuse("sequences", got, "a token in each")
        positions.append(own[0])
    return positions
