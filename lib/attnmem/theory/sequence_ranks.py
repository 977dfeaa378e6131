r"""How many token sequences attention tells apart: exact ranks over all weights.

Two sequences with one last token ask with one query. So a head weighs a token ``a`` at a place
``s`` in both by one number :math:`\alpha(t_S, a)\, \beta(t_S, s)`. For ``d >= 2`` these numbers
satisfy no other polynomial relation. So ranks of matrices built from embeddings, maps and attention
weights can be computed with random integers in place of all of them, modulo a prime (theorems
``thm-free-weights`` and ``thm-free-tangents`` of the book): of the rows ``F(t) = [x(t, S); W_V^1
A^1(t); ...]`` that the heads offer, and of the derivatives of

.. math:: f(t) = u^\top x(t, S) + \sum_h m_h^\top A^h(t) .
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..checks import Range, Seed, checked, on_cpu
from ..examples import Sequences, check_token_numbers
from . import residues

_Dim = Annotated[int, Range(2)]
_HeadDim = Annotated[int, Range(1, "dim")]

# --- attention whose weights are free variables, at a random point modulo the prime ---------------


class _Variables(NamedTuple):
    """The numbers by which sequences share their variables, each from 0 upwards."""

    tokens: Int[np.ndarray, "T S"]
    last: Int[np.ndarray, " T"]  # of the last token
    pairs: Int[np.ndarray, "T S"]  # of the last token and the one at each place


def _variables(sequences: Sequences) -> _Variables:
    names, numbers = np.unique(sequences.numpy(), return_inverse=True)
    tokens = numbers.reshape(sequences.shape)
    last = tokens[:, -1:]
    pairs = np.unique(last * len(names) + tokens, return_inverse=True)[1]
    last = np.unique(last, return_inverse=True)[1].reshape(-1)
    return _Variables(tokens, last, pairs.reshape(sequences.shape))


def _draw(random: np.random.Generator, *shape: int) -> Int[np.ndarray, "..."]:
    """Random residues, none of them zero."""
    return random.integers(1, residues.PRIME, shape, dtype=np.int64)


def _tokens(
    variables: _Variables, dim: int, random: np.random.Generator
) -> Int[np.ndarray, "T S d"]:
    """``x(t, s) = e(t_s) + pos_s`` of a random embedding and random positions."""
    embedding = _draw(random, int(variables.tokens.max()) + 1, dim)
    positions = _draw(random, variables.tokens.shape[1], dim)
    return (embedding[variables.tokens] + positions) % residues.PRIME


def _attention(variables: _Variables, random: np.random.Generator) -> Int[np.ndarray, "T S"]:
    """The attention weights of one head: ``alpha beta`` over its sum, so each row sums to 1."""
    while True:
        alpha = _draw(random, int(variables.pairs.max()) + 1)
        beta = _draw(random, int(variables.last.max()) + 1, variables.pairs.shape[1])
        weights = alpha[variables.pairs] * beta[variables.last] % residues.PRIME
        denominators = residues.total(weights)
        if denominators.all():  # zero has no inverse: another draw
            inverses = np.array([pow(x, -1, residues.PRIME) for x in denominators.tolist()])
            return weights * inverses[:, None] % residues.PRIME


# --- what heads offer -----------------------------------------------------------------------------


@on_cpu
@checked(also=check_token_numbers)
def offered_rank(
    sequences: Sequences,
    heads: int,
    head_dim: _HeadDim,
    dim: _Dim,
    seed: Seed = 0,
    *,
    skip: bool = True,
) -> int:
    """The largest rank of ``F`` over all weights; almost all weights reach it.

    It is computed modulo the prime ``2^31 - 1`` at a random integer point: a lower bound, so a full
    rank is proven. It falls short with a probability below ``T_0 (4 H + 2) / (2^31 - 2)`` over
    ``seed`` (Schwartz and Zippel), unless that prime divides every coefficient of every largest
    minor. Without ``skip``, ``F`` lacks the first ``d`` columns, of the skip connection. This
    corrects Dana et al. 2025, Lemma 2 and the proof of Theorem 1.
    """
    F = _free_offers(sequences, heads, head_dim, dim, seed)
    if not skip:
        F = F[:, dim:]
    return residues.rank(F)


@on_cpu
@checked(also=check_token_numbers)
def dependent_subset(
    sequences: Sequences, heads: int, head_dim: _HeadDim, dim: _Dim, seed: Seed = 0
) -> Int[Tensor, " k"]:
    """Rows that no weights make independent, and of which every proper subset can be: a circuit.

    It is the smallest of the circuits that one elimination finds, as right as :func:`offered_rank`;
    empty if all rows can be independent.
    """
    # Eliminated by columns, each row of F that is no pivot is a combination of some pivots.
    form = residues.echelon(_free_offers(sequences, heads, head_dim, dim, seed).T)
    circuits = []
    for row in form.free:
        combined = [form.pivots[i] for i in np.flatnonzero(form.rows[:, row])]
        circuits.append(sorted([*combined, row]))
    return torch.tensor(min(circuits, key=len, default=[]), dtype=torch.int64)


def _free_offers(sequences, heads, head_dim, dim, seed) -> np.ndarray:
    """``F`` modulo the prime, with random embeddings, value maps and attention weights."""
    random = np.random.default_rng(seed)
    variables = _variables(sequences)
    x = _tokens(variables, dim, random)
    blocks = [x[:, -1]]
    for _ in range(heads):
        A = residues.total(_attention(variables, random)[..., None] * x)
        blocks.append(residues.product(A, _draw(random, dim, head_dim)))
    return np.concatenate(blocks, axis=1)


# --- what their derivatives add -------------------------------------------------------------------


@checked(also=check_token_numbers)
def jacobian_rank(
    sequences: Sequences, heads: int, head_dim: _HeadDim, dim: _Dim, *, trained: bool = False
) -> int:
    """The largest rank of the Jacobian of all outputs; almost all weights reach it.

    If it is below the number of sequences, weights exist for almost no real labels. It is computed
    as :func:`offered_rank` is; by embeddings and positions, too, if those are ``trained``.
    """
    return residues.rank(_tangents(sequences, [1] * heads, head_dim, dim, trained))


@checked(also=check_token_numbers)
def cancelling_rank(
    sequences: Sequences, groups: Sequence[int], head_dim: _HeadDim, dim: _Dim
) -> int:
    """The largest rank of the Jacobian at weights where the heads of each group cancel.

    The heads of a group have one ``W_QK``, and values with sum zero. So a pair is worth one head in
    :func:`jacobian_rank`, and a head alone has the value zero. If the rank is the number of
    sequences, as many heads meet every real label (see the chapter on token sequences).
    """
    n_values = [size - 1 for size in groups]  # the last value of a group is given by the others
    return residues.rank(_tangents(sequences, n_values, head_dim, dim))


def _tangents(sequences, n_values: list[int], head_dim, dim, trained=False) -> np.ndarray:
    """The Jacobian modulo the prime, of attentions with so many values each."""
    # With the covariance C of a sequence's tokens under the attention and q = x(t, S), derivatives
    # are q by u, A by m, and q^T D C m for a change of W_QK by D. A change of basis in the head
    # makes the first d_h columns of W_K constant, so they are not varied.
    random = np.random.default_rng(0)
    variables = _variables(sequences)
    x = _tokens(variables, dim, random)
    q = x[:, -1]
    by_x = np.zeros_like(x)  # the derivative by x(t, s)
    by_x[:, -1] = _draw(random, dim)  # u
    blocks = [q]
    for count in n_values:
        a = _attention(variables, random)
        W_Q, W_K = _draw(random, head_dim, dim), _draw(random, head_dim, dim)
        blocks.append(residues.total(a[..., None] * x))  # A
        W_Q_q = residues.product(q, W_Q.T)
        keys = residues.product(W_Q_q, W_K)  # W_K^T W_Q q, by which tokens are weighed
        for _ in range(count):
            m = _draw(random, dim)
            # C m = sum_s a_s (m^T x_s - m^T A) x_s
            values = residues.total(x * m, axis=2)
            centred = values - residues.total(a * values)[:, None]
            shares = a * (centred % residues.PRIME) % residues.PRIME
            Cm = residues.total(shares[..., None] * x)
            W_K_Cm = residues.product(Cm, W_K.T)
            blocks.append(residues.outer(W_K_Cm, q))  # by W_Q
            blocks.append(residues.outer(W_Q_q, Cm[:, head_dim:]))  # by W_K
            # A token is averaged, and it is weighed; the last one asks, too.
            by_x += a[..., None] * m % residues.PRIME
            by_x += shares[..., None] * keys[:, None] % residues.PRIME
            by_x[:, -1] += residues.product(W_K_Cm, W_Q)
    if trained:
        by_x %= residues.PRIME
        by_embedding = np.zeros((len(x), variables.tokens.max() + 1, dim), dtype=np.int64)
        np.add.at(by_embedding, (np.arange(len(x))[:, None], variables.tokens), by_x)
        blocks += [by_embedding.reshape(len(x), -1), by_x.reshape(len(x), -1)]
    return np.concatenate(blocks, axis=1)
