"""Next tokens that no weights predict: functions of few positions, and the parity of bits.

It needs python-flint.
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
from . import mod_prime
from .balls import flint

MOST_ENTRIES = 2**26  # of the linear program that looks for impossible next tokens
LARGEST = 2**53  # weight of a proof that is returned

Pairs = list[tuple[int, int]]


class Impossible(NamedTuple):
    """Why no weights with ``H`` heads predict some next tokens: exact integers, checked exactly.

    For each token the weights are orthogonal to every function of at most ``H`` places, and so to
    the token's logits times the positive denominators. If the right logits were largest, a sum that
    is zero would be positive.
    """

    rows: Int[Tensor, " k"]  # the sequences, all with the same last token
    tokens: Int[Tensor, " m"]  # some tokens
    weights: Int[Tensor, "k m"]  # positive for a sequence's next token and for no other


def places_kernel(sequences: Sequences, heads: int) -> np.ndarray:
    r"""The Gram matrix of all products of at most ``H`` indicators "token a stands at position s".

    Entry ``(t, u)`` is :math:`\sum_{k \le H} \binom{m}{k}`, where ``m`` counts the positions before
    the last at which ``t`` and ``u`` agree: exact integers, dtype object. A vector in the kernel of
    the matrix is orthogonal to every function of at most ``H`` of these positions.

    Example:
        >>> places_kernel(torch.tensor([[0, 0, 0], [0, 1, 0]]), heads=1).tolist()
        [[3, 2], [2, 3]]
    """
    before = sequences[:, :-1].numpy()
    agree = (before[:, None] == before).sum(2)
    counts = [sum(math.comb(m, k) for k in range(heads + 1)) for m in range(before.shape[1] + 1)]
    return np.array(counts, dtype=object)[agree]


@on_cpu
@checked(also=check_token_numbers)
def impossible_subset(
    sequences: Sequences, next_tokens: Int[Tensor, " T"], heads: int
) -> Impossible | None:
    """Find sequences whose next tokens no transformer with so many heads predicts.

    They are impossible at any ``d``, ``d_h``, embeddings and maps. A linear program looks for them
    among the sequences with one last token, and exact integers prove the result. There must be at
    least ``2^(H+1)`` distinct sequences with one last token, and ``S - 1 > H``. None means that
    this argument finds nothing, not that weights exist.

    Example:
        >>> bits = torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.zeros(1, dtype=int))
        >>> impossible_subset(bits, bits.sum(1) % 2, heads=1).weights.tolist()
        [[1, -1], [-1, 1], [-1, 1], [1, -1]]
        >>> impossible_subset(bits, bits.sum(1) % 2, heads=2)

    Source: this book, theorem ``thm-parity``.
    """
    for token in sequences[:, -1].unique() if heads < sequences.shape[1] - 1 else ():
        rows = (sequences[:, -1] == token).nonzero()[:, 0]
        if len(rows) >= 2 ** (heads + 1):
            rows = rows[_related(places_kernel(sequences[rows], heads))]
            proof = _contradiction(places_kernel(sequences[rows], heads), next_tokens[rows])
            if proof:
                return proof._replace(rows=rows[proof.rows])
    return None


def _related(kernel: np.ndarray) -> Tensor:
    """The rows in some linear relation; any next tokens of the others are possible."""
    reduced, pivots = mod_prime.echelon(kernel)
    free = [k for k in range(len(kernel)) if k not in {*pivots}]
    used = [k for i, k in enumerate(pivots) if reduced[i, free].any()]
    return torch.tensor(sorted(free + used), dtype=torch.int64)


def _contradiction(kernel: np.ndarray, labels: Tensor) -> Impossible | None:
    """Weights on (sequence, other token) whose sums vanish on all functions (Farkas' lemma)."""
    tokens, right = labels.unique(return_inverse=True)
    pairs = [(t, k) for t in range(len(labels)) for k in range(len(tokens)) if k != right[t]]
    features = kernel[mod_prime.echelon(kernel)[1]]
    if not pairs or len(pairs) * features.size > MOST_ENTRIES:
        return None
    if not (support := _vertex(features, right.tolist(), pairs, len(tokens))):
        return None
    relation = exact_relation(_conditions(features, right.tolist(), support, len(tokens)))
    if relation is None or not 0 < min(relation) <= max(relation) < LARGEST:
        return None
    weights = np.zeros((len(labels), len(tokens)), dtype=object)
    for (t, k), value in zip(support, relation, strict=True):
        weights[t, k] -= value
        weights[t, right[t]] += value
    if (kernel @ weights).any():  # exact integers: the proof
        return None
    rows, columns = (np.flatnonzero(weights.any(axis=axis)) for axis in (1, 0))
    some = torch.from_numpy(weights[np.ix_(rows, columns)].astype(np.int64))
    return Impossible(torch.from_numpy(rows), tokens[columns], some)


def exact_relation(matrix: np.ndarray) -> list[int] | None:
    """The one linear relation between the columns, as coprime integers; None if not just one."""
    vectors, count = flint().fmpz_mat(matrix.tolist()).nullspace()
    if count != 1:
        return None
    values = [int(row[0]) for row in vectors.tolist()]
    last = next(value for value in reversed(values) if value)
    divisor = math.gcd(*values) * (1 if last > 0 else -1)
    return [value // divisor for value in values]


def _conditions(features: np.ndarray, right: list[int], pairs: Pairs, count: int) -> np.ndarray:
    """A column for each pair (t, k): features of t, for its next token, less those for token k."""
    blocks = np.zeros((count, len(features), len(pairs)), dtype=object)
    for column, (t, k) in enumerate(pairs):
        blocks[right[t], :, column] += features[:, t]
        blocks[k, :, column] -= features[:, t]
    return blocks.reshape(-1, len(pairs))


def _vertex(features: np.ndarray, right: list[int], pairs: Pairs, count: int) -> Pairs:
    """The support of a vertex of non-negative solutions with sum one; empty if there is none."""
    matrix = _conditions(features, right, pairs, count).astype(float)
    scale = np.abs(matrix).max(axis=1, keepdims=True)
    rows = np.vstack([matrix / np.where(scale > 0, scale, 1.0), np.ones(len(pairs))])
    right_side = np.append(np.zeros(len(matrix)), 1.0)
    # A vertex has a smallest support, so its solution is unique up to its scale.
    cost = np.zeros(len(pairs))
    solution = scipy.optimize.linprog(cost, A_eq=rows, b_eq=right_side, method="highs-ds")
    if not solution.success:
        return []
    return [pair for pair, value in zip(pairs, solution.x, strict=True) if value > 1e-9]


@on_cpu
@checked
def every_parity(bits: int) -> tuple[Sequences, Int[Tensor, " T"]]:
    """All sequences of so many bits before a last token 0, and the parity of each.

    Example:
        >>> every_parity(2)[0].tolist(), every_parity(2)[1].tolist()
        ([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]], [0, 1, 1, 0])
    """
    rows = torch.tensor([[*row, 0] for row in itertools.product(range(2), repeat=bits)])
    return rows, rows.sum(1) % 2


@on_cpu
@checked
def parity_by_heads(bits: int) -> AoTWeights:
    """A transformer with as many heads as bits that tells the parity in :func:`every_parity`.

    Its heads have width one in dimension two. Head ``h`` weighs a token 1 by ``a_h`` and a token 0
    by 1, so it offers ``1 / (S + (a_h - 1) m)``, where ``m`` counts the ones. Together with a
    constant these functions span every polynomial in ``m`` of degree ``H`` over one denominator.
    From 11 bits on, rounding in float64 loses a parity, and ``bits`` is refused.

    Example:
        >>> rows, parity = every_parity(5)
        >>> bool((aot(parity_by_heads(5), rows).argmax(-1) == parity).all())
        True

    Source: this book, proposition ``prop-enough-heads``.
    """
    a = 2.0 ** torch.arange(1, bits + 1, dtype=torch.float64)  # different poles
    m = torch.arange(bits + 1, dtype=torch.float64)
    offered = a * m[:, None] / (bits + 1 + (a - 1) * m[:, None])  # the share of tokens 1
    columns = torch.cat([torch.ones(bits + 1, 1, dtype=torch.float64), offered], dim=1)
    solution = torch.linalg.solve(columns, -((-1.0) ** m))  # positive where the parity is one
    # A token 0 is (0, 1), which asks and carries the constant; a token 1 is (1, 0).
    embedding = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    zero, one = embedding.split(1)
    weights = AoTWeights(
        embedding=embedding,
        positions=torch.zeros(bits + 1, 2, dtype=torch.float64),
        W_Q=zero.repeat(bits, 1, 1),
        W_K=a.log()[:, None, None] * one,
        W_V=one.repeat(bits, 1, 1),
        W_O=solution[1:, None, None] * one.T,
        W_U=torch.tensor([[0.0, 0.0], [1.0, float(solution[0])]], dtype=torch.float64),
    )
    ones = torch.arange(bits + 1)[:, None] > torch.arange(bits + 1)  # m of them, then zeros
    if (aot(weights, ones.long()).argmax(-1) != m.long() % 2).any():
        refuse("bits", bits, "fewer, since rounding loses a parity")
    return weights
