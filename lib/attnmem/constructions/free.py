r"""Attention whose weights are free variables, at a random point modulo a prime.

Two sequences with the same last token ask with the same query. So a head weighs a token ``a`` at a
place ``s`` in both by the same number

.. math:: e^{x(t, S)^\top W_{QK} (e(a) + pos_s)} = \alpha(t_S, a)\, \beta(t_S, s) .

For ``d >= 2`` these numbers satisfy no other polynomial relation. So ranks of matrices built from
embeddings, maps and attention weights can be computed with random integers in place of all of them,
modulo a prime (theorems ``thm-free-weights`` and ``thm-free-tangents`` of the book).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from torch import Tensor

from . import residues


class FreeSequences(NamedTuple):
    """The numbers by which sequences share their variables, each from 0 upwards.

    Attributes:
        tokens: The token at each place.
        asked: The pair of last token and token at each place.
        last: The last token.
    """

    tokens: Int[np.ndarray, "T S"]
    asked: Int[np.ndarray, "T S"]
    last: Int[np.ndarray, " T"]


def free_sequences(sequences: Int[Tensor, "T S"]) -> FreeSequences:
    """Number the tokens, the last tokens and the pairs of both.

    Args:
        sequences: Token numbers.

    Returns:
        The numbers.

    Example:
        >>> import torch
        >>> free_sequences(torch.tensor([[7, 3], [7, 5]])).asked.tolist()
        [[1, 0], [3, 2]]
    """
    given = sequences.numpy()
    names, tokens = np.unique(given, return_inverse=True)
    tokens = tokens.reshape(given.shape)  # from 0 on, so that no pair is too large a number
    last = tokens[:, -1:]
    _, asked = np.unique(last * len(names) + tokens, return_inverse=True)
    _, ends = np.unique(last, return_inverse=True)
    return FreeSequences(tokens, asked.reshape(given.shape), ends.reshape(-1))


def numbers(draw: np.random.Generator, *shape: int) -> Int[np.ndarray, "..."]:
    """Random residues, none of them zero.

    Args:
        draw: Source of the numbers.
        *shape: The shape.

    Returns:
        Residues from 1 to the prime less 1.
    """
    return draw.integers(1, residues.PRIME, shape, dtype=np.int64)


def embedded(free: FreeSequences, dim: int, draw: np.random.Generator) -> Int[np.ndarray, "T S d"]:
    """``x(t, s) = e(t_s) + pos_s`` with random embeddings and positions.

    Args:
        free: The sequences.
        dim: Embedding dimension ``d``.
        draw: Source of the numbers.

    Returns:
        Residues.
    """
    places = free.tokens.shape[1]
    table = numbers(draw, int(free.tokens.max()) + 1, dim)
    return (table[free.tokens] + numbers(draw, places, dim)) % residues.PRIME


def shares(free: FreeSequences, draw: np.random.Generator) -> Int[np.ndarray, "T S"]:
    """The attention weights of one head whose exponentials are random: each row has sum one.

    Args:
        free: The sequences.
        draw: Source of the numbers.

    Returns:
        Residues.
    """
    pairs, askers = int(free.asked.max()) + 1, int(free.last.max()) + 1
    places, total = free.tokens.shape[1], np.zeros(1, dtype=np.int64)
    while not total.all():  # a denominator
        alpha, beta = numbers(draw, pairs), numbers(draw, askers, places)
        weights = alpha[free.asked] * beta[free.last] % residues.PRIME
        total = weights.sum(1) % residues.PRIME
    return weights * residues.inverse(total)[:, None] % residues.PRIME
