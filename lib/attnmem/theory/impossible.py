"""Next tokens that no weights predict, with exact proofs; the parity of bits is the first of them.

Sequences with one last token ask with one query, so the logits of ``H`` heads, over a common
denominator, are sums of functions of at most ``H`` places each. The parity of more than ``H`` bits
is orthogonal to all such functions.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import scipy
import torch
from jaxtyping import Int
from torch import Tensor

from ..checks import checked, on_cpu, refuse
from ..core.layers import AoTWeights, aot
from ..examples import Sequences, check_token_numbers
from . import residues
from .balls import flint

_MOST_ENTRIES = 2**26  # of the linear program: half a gigabyte of floats
_LARGEST = 2**53  # weight of a proof that is returned: a float64 still holds it exactly
_POSITIVE = 1e-9  # above what the linear program leaves of zeros


class Impossible(NamedTuple):
    """Why no weights with ``H`` heads predict some next tokens: exact integers, checked exactly.

    The weights are orthogonal to every function of at most ``H`` places, and so to each token's
    logits times the positive denominators. Were the right logits largest, zero would be positive.
    """

    rows: Int[Tensor, " k"]  # the sequences, all with the same last token
    tokens: Int[Tensor, " m"]  # some tokens
    weights: Int[Tensor, "k m"]  # positive for a sequence's next token and for no other


@on_cpu
@checked(also=check_token_numbers)
def impossible_subset(
    sequences: Sequences, next_tokens: Int[Tensor, " T"], heads: int
) -> Impossible | None:
    """Find sequences whose next tokens no transformer with so many heads predicts.

    They are impossible at any ``d``, ``d_h``, embeddings and maps. A linear program looks for them
    among sequences with one last token, and exact integers prove the result. That needs ``2^(H+1)``
    such sequences, and ``S - 1 > H``. None means that nothing is found, not that weights exist.

    Example:
        >>> impossible_subset(*every_parity(2), heads=1).weights.tolist()  # theorem thm-parity
        [[1, -1], [-1, 1], [-1, 1], [1, -1]]
    """
    if heads >= sequences.shape[1] - 1:
        return None
    for last in sequences[:, -1].unique():
        rows = (sequences[:, -1] == last).nonzero()[:, 0]
        if len(rows) < 2 ** (heads + 1):
            continue
        kernel = _places_kernel(sequences[rows], heads)
        related = _related(kernel)
        rows = rows[related]
        proof = _contradiction(kernel[np.ix_(related, related)], next_tokens[rows])
        if proof is not None:
            return proof._replace(rows=rows[proof.rows])
    return None


def _places_kernel(sequences: Sequences, heads: int) -> np.ndarray:
    r"""The Gram matrix of all products of at most ``H`` indicators "token a stands at position s".

    Entry ``(t, u)`` is :math:`\sum_{k \le H} \binom{m}{k}`, where ``m`` counts the positions before
    the last at which ``t`` and ``u`` agree: exact integers. A vector in the kernel is orthogonal to
    every function of at most ``H`` of these positions.
    """
    before = sequences[:, :-1].numpy()
    agreeing = (before[:, None] == before).sum(2)
    places = before.shape[1]
    products = [sum(math.comb(m, k) for k in range(heads + 1)) for m in range(places + 1)]
    return np.array(products, dtype=object)[agreeing]


def _related(kernel: np.ndarray) -> list[int]:
    """Rows in some linear relation; the others can have any values, and so any next tokens."""
    form = residues.echelon(kernel)
    rows = list(form.free)
    for pivot, row in zip(form.pivots, form.rows, strict=False):  # below are rows of zeros
        if row[form.free].any():
            rows.append(pivot)
    return sorted(rows)


def _contradiction(kernel: np.ndarray, labels: Tensor) -> Impossible | None:
    """Weights of a sum that would be positive were all labels predicted, and is zero (Farkas)."""
    # Let logit z_k(t) = f_k(t) / Z(t), with f_k a function of at most H places and Z positive. All
    # labels y(t) are predicted if Z (z_y(t) - z_k) > 0 for all pairs of t and a token k other than
    # y(t). Not all are, if some c(t, k) >= 0, not all zero, have
    #     sum_{t, k} c(t, k) (f_y(t)(t) - f_k(t)) = 0   for all functions f_1, f_2, ...
    # For each token and each f of a basis that is one equation in the unknowns c.
    tokens, right = labels.unique(return_inverse=True)
    right = right.numpy()
    t, k = np.nonzero(np.arange(len(tokens)) != right[:, None])
    basis = kernel[residues.echelon(kernel).pivots]
    if not len(t) or len(t) * basis.size > _MOST_ENTRIES:
        return None
    one_hot = np.eye(len(tokens), dtype=object)
    signs = one_hot[right[t]] - one_hot[k]
    equations = (signs.T[:, None] * basis[:, t]).reshape(-1, len(t))
    support = _support(equations)
    if support is None:
        return None
    c = _relation(equations[:, support])
    if c is None:
        return None
    weights = np.zeros((len(labels), len(tokens)), dtype=object)
    np.add.at(weights, t[support], signs[support] * c[:, None])
    if (kernel @ weights).any():  # exact integers: the proof
        return None
    rows, columns = np.flatnonzero(weights.any(axis=1)), np.flatnonzero(weights.any(axis=0))
    smallest = torch.from_numpy(weights[np.ix_(rows, columns)].astype(np.int64))
    return Impossible(torch.from_numpy(rows), tokens[columns], smallest)


def _support(equations: np.ndarray) -> np.ndarray | None:
    """Where a solution that is nowhere negative is positive; None if there is no such solution."""
    # A vertex of the non-negative solutions with sum one. Its support is smallest, so the solution
    # is unique up to its scale.
    matrix = equations.astype(float)
    n_equations, n_unknowns = matrix.shape
    scale = np.abs(matrix).max(axis=1, keepdims=True)
    rows = np.vstack([matrix / np.where(scale > 0, scale, 1.0), np.ones(n_unknowns)])
    right_side = np.append(np.zeros(n_equations), 1.0)
    objective = np.zeros(n_unknowns)  # any solution will do
    solved = scipy.optimize.linprog(objective, A_eq=rows, b_eq=right_side, method="highs-ds")
    if not solved.success:
        return None
    return np.flatnonzero(solved.x > _POSITIVE)


def _relation(columns: np.ndarray) -> np.ndarray | None:
    """The only linear relation of columns, in coprime integers; None if not all are positive."""
    vectors, dimension = flint().fmpz_mat(columns.tolist()).nullspace()
    if dimension != 1:
        return None
    relation = np.array([int(row[0]) for row in vectors.tolist()], dtype=object)
    relation //= math.gcd(*relation)
    if relation[0] < 0:
        relation = -relation
    if not 0 < min(relation) <= max(relation) < _LARGEST:
        return None
    return relation


# --- the parity of bits ---------------------------------------------------------------------------


@on_cpu
@checked
def every_parity(bits: int) -> tuple[Sequences, Int[Tensor, " T"]]:
    """All sequences of so many bits before a last token 0, and the parity of each."""
    rows = torch.tensor([[*row, 0] for row in itertools.product(range(2), repeat=bits)])
    return rows, rows.sum(1) % 2


@on_cpu
@checked
def parity_by_heads(bits: int) -> AoTWeights:
    """A transformer with as many heads as bits that tells the parity in :func:`every_parity`.

    Its heads have width one in dimension two. Head ``h`` weighs a token 1 by ``a_h`` and a token 0
    by 1, so it offers ``1 / (S + (a_h - 1) m)``, where ``m`` counts the ones. With a constant these
    functions span all polynomials in ``m`` of degree ``H`` over one denominator. From 11 bits on,
    rounding loses a parity, and ``bits`` is refused.
    """
    double = {"dtype": torch.float64}
    a = 2.0 ** torch.arange(1, bits + 1, **double)  # different poles
    m = torch.arange(bits + 1, **double)
    offered = a * m[:, None] / (bits + 1 + (a - 1) * m[:, None])  # the share of tokens 1
    columns = torch.cat([torch.ones(bits + 1, 1, **double), offered], dim=1)
    solution = torch.linalg.solve(columns, -((-1.0) ** m))  # positive where the parity is one
    constant, gains = float(solution[0]), solution[1:]
    # A token 0 is (0, 1), which asks and carries the constant; a token 1 is (1, 0).
    embedding = torch.eye(2, **double).flip(0)
    zero, one = embedding.split(1)
    weights = AoTWeights(
        embedding=embedding,
        positions=torch.zeros(bits + 1, 2, **double),
        W_Q=zero.repeat(bits, 1, 1),
        W_K=a.log()[:, None, None] * one,
        W_V=one.repeat(bits, 1, 1),
        W_O=gains[:, None, None] * one.T,
        W_U=torch.tensor([[0.0, 0.0], [1.0, constant]], **double),
    )
    ones = torch.arange(bits + 1)[:, None] > torch.arange(bits + 1)  # m of them, then zeros
    if (aot(weights, ones.long()).argmax(-1) != m.long() % 2).any():
        refuse("bits", bits, "fewer, since rounding loses a parity")
    return weights
