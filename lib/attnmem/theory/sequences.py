r"""What attention can tell about token sequences: exact ranks, and tasks beyond any weights.

Two sequences with one last token ask with one query. So a head weighs a token ``a`` at a place
``s`` in both by one number :math:`\alpha(t_S, a)\, \beta(t_S, s)`. For ``d >= 2`` these numbers
satisfy no other polynomial relation. So ranks of matrices built from embeddings, maps and attention
weights can be computed with random integers in place of all of them, modulo a prime (theorems
``thm-free-weights`` and ``thm-free-tangents`` of the book): of the rows ``F(t) = [x(t, S); W_V^1
A^1(t); ...]`` that the heads offer, and of the derivatives of

.. math:: f(t) = u^\top x(t, S) + \sum_h m_h^\top A^h(t) .
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import scipy
import torch
from jaxtyping import Int
from torch import Tensor

from ..checks import Range, Seed, checked, on_cpu, refuse
from ..core.layers import AoTWeights, aot
from ..examples import Sequences, check_distinct_sequences, check_token_numbers
from .balls import flint

_PRIME = 2**31 - 1  # products of two residues fit into 64 bits
_MOST_ENTRIES = 2**26  # of the linear program that looks for impossible next tokens
_LARGEST = 2**53  # weight of a proof that is returned

Dim = Annotated[int, Range(2)]
HeadDim = Annotated[int, Range(1, "dim")]


# --- linear algebra modulo the prime, by FLINT: such a rank never exceeds the rank ----------------


def _flint(matrix: np.ndarray):
    return flint().nmod_mat(*matrix.shape, (matrix % _PRIME).flatten().tolist(), _PRIME)


def _numpy(matrix) -> np.ndarray:
    entries = np.array([int(x) for x in matrix.entries()], dtype=np.int64)
    return entries.reshape(matrix.nrows(), matrix.ncols())


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return _numpy(_flint(left) * _flint(right))


def _echelon(matrix: np.ndarray) -> tuple[np.ndarray, list[int], list[int]]:
    """The reduced row echelon form, the columns of its pivots, and the other columns."""
    reduced, count = _flint(matrix).rref()
    reduced = _numpy(reduced)
    pivots = [int(np.flatnonzero(row)[0]) for row in reduced[:count]]
    return reduced, pivots, [k for k in range(matrix.shape[1]) if k not in {*pivots}]


def _total(terms: np.ndarray, axis: int = 1) -> np.ndarray:
    return (terms % _PRIME).sum(axis) % _PRIME


def _outer(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left[:, :, None] * right[:, None] % _PRIME).reshape(len(left), -1)


# --- attention whose weights are free variables, at a random point modulo the prime ---------------


class _Point:
    """Sequences, and random residues, none of them zero, in place of all weights."""

    def __init__(self, sequences: Sequences, dim: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        # The numbers by which sequences share their variables, each from 0 upwards.
        names, tokens = np.unique(sequences.numpy(), return_inverse=True)
        self.tokens = tokens.reshape(sequences.shape)
        last = self.tokens[:, -1:]
        pairs = np.unique(last * len(names) + self.tokens, return_inverse=True)[1]
        self.pairs = pairs.reshape(sequences.shape)  # of the last token and the one at each place
        self.last = np.unique(last, return_inverse=True)[1].reshape(-1)
        # x(t, s) = e(t_s) + pos_s, of shape (T, S, d)
        self.x = self.draw(len(names), dim)[self.tokens] + self.draw(sequences.shape[1], dim)
        self.x %= _PRIME

    def draw(self, *shape: int) -> Int[np.ndarray, "..."]:
        return self.random.integers(1, _PRIME, shape, dtype=np.int64)

    def attention(self) -> Int[np.ndarray, "T S"]:
        """The attention weights of one head: ``alpha beta`` over its sum, so each row sums to 1."""
        total = np.zeros(1, dtype=np.int64)
        while not total.all():  # a denominator
            alpha = self.draw(int(self.pairs.max()) + 1)
            beta = self.draw(int(self.last.max()) + 1, self.pairs.shape[1])
            weights = alpha[self.pairs] * beta[self.last] % _PRIME
            total = _total(weights)
        inverse = np.array([pow(x, -1, _PRIME) for x in total.tolist()])
        return weights * inverse[:, None] % _PRIME


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

    It is computed modulo the prime ``2^31 - 1`` at a random integer point: a lower bound, so a full
    rank is proven. It falls short with a probability below ``T_0 (4 H + 2) / (2^31 - 2)`` over
    ``seed`` (Schwartz and Zippel), unless that prime divides every coefficient of every largest
    minor. Without ``skip``, ``F`` lacks the first ``d`` columns, of the skip connection.

    Example:
        >>> [offered_rank(every_parity(2)[0], heads, head_dim=9, dim=9) for heads in (1, 2)]
        [3, 4]

    Source: this book; it corrects Dana et al. 2025, Lemma 2 and the proof of Theorem 1.
    """
    F = _free_offers(sequences, heads, head_dim, dim, seed)
    return _flint(F[:, 0 if skip else dim :]).rank()


@on_cpu
@checked(also=check_token_numbers)
def dependent_subset(
    sequences: Sequences, heads: int, head_dim: HeadDim, dim: Dim, seed: Seed = 0
) -> Int[Tensor, " k"]:
    """Rows that no weights make independent, and of which every proper subset can be: a circuit.

    It is the smallest of the circuits that one elimination finds, as right as :func:`offered_rank`;
    empty if all rows can be independent.

    Example:
        >>> xor = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [0, 1, 1]])
        >>> dependent_subset(xor, heads=1, head_dim=9, dim=9).tolist()
        [0, 1, 2, 3]
    """
    F = _free_offers(sequences, heads, head_dim, dim, seed)
    reduced, pivots, free = _echelon(F.T)
    circuits = [[*(pivots[i] for i in np.flatnonzero(reduced[:, k])), k] for k in free]
    return torch.tensor(sorted(min(circuits, key=len, default=[])), dtype=torch.int64)


def _free_offers(sequences, heads, head_dim, dim, seed) -> np.ndarray:
    """``F`` modulo the prime, with random embeddings, value maps and attention weights."""
    at = _Point(sequences, dim, seed)
    blocks = [at.x[:, -1]]
    for _ in range(heads):
        A = _total(at.attention()[..., None] * at.x)
        blocks.append(_product(A, at.draw(dim, head_dim)))
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
    as :func:`offered_rank` is; by embeddings and positions, too, if those are ``trained``. See the
    chapter on token sequences.

    Example:
        >>> [jacobian_rank(every_parity(3)[0], heads, head_dim=1, dim=9) for heads in (1, 2)]
        [7, 8]
    """
    return _flint(_tangents(sequences, [1] * heads, head_dim, dim, seed, trained)).rank()


def _are_grouped(sequences, groups) -> None:
    check_token_numbers(sequences)
    if not groups:
        refuse("groups", repr(groups), "a sequence of at least one integer")


@checked(also=_are_grouped)
def cancelling_rank(
    sequences: Sequences, groups: Sequence[int], head_dim: HeadDim, dim: Dim, seed: Seed = 0
) -> int:
    """The largest rank of the Jacobian at weights where the heads of each group cancel.

    The heads of a group have one ``W_QK``, and values with sum zero. So a pair is worth one head in
    :func:`jacobian_rank`, and a head alone has the value zero. If the rank is the number of
    sequences, as many heads meet every real label (see the chapter on token sequences).

    Example:
        >>> cancelling_rank(every_parity(3)[0], (2, 2), head_dim=1, dim=9)
        8
    """
    free = [k - 1 for k in groups]
    return _flint(_tangents(sequences, free, head_dim, dim, seed)).rank()


def _tangents(sequences, values, head_dim, dim, seed, trained=False) -> np.ndarray:
    """The Jacobian modulo the prime. Each of ``values`` is an attention with so many values."""
    # With the covariance C of a sequence's tokens under the attention and q = x(t, S), derivatives
    # are q by u, A by m, and q^T D C m for a change of W_QK by D. A change of basis in the head
    # makes the first d_h columns of W_K constant, so they are not varied.
    at = _Point(sequences, dim, seed)
    x, q = at.x, at.x[:, -1]
    by_x = np.zeros_like(x)  # the derivative by x(t, s)
    by_x[:, -1] = at.draw(dim)  # u
    blocks = [q]
    for count in values:
        a = at.attention()
        W_Q, W_K = at.draw(head_dim, dim), at.draw(head_dim, dim)
        blocks.append(_total(a[..., None] * x))  # A
        asked = _product(q, W_Q.T)
        for _ in range(count):
            m = at.draw(dim)
            projected = _total(x * m, axis=2)
            centred = projected - _total(a * projected)[:, None]
            share = a * (centred % _PRIME) % _PRIME
            Cm = _total(share[..., None] * x)
            keyed = _product(Cm, W_K.T)
            blocks += [_outer(keyed, q), _outer(asked, Cm[:, head_dim:])]  # by W_Q, by W_K
            keys = _product(asked, W_K)
            by_x += a[..., None] * m % _PRIME + share[..., None] * keys[:, None] % _PRIME
            by_x[:, -1] += _product(keyed, W_Q)
    if trained:
        by_x %= _PRIME
        by_embedding = np.zeros((len(x), at.tokens.max() + 1, dim), dtype=np.int64)
        np.add.at(by_embedding, (np.arange(len(x))[:, None], at.tokens), by_x)
        blocks += [by_embedding.reshape(len(x), -1), by_x.reshape(len(x), -1)]
    return np.concatenate(blocks, axis=1)


# --- the rank, from the subsets -------------------------------------------------------------------


def _are_few_bigrams(sequences) -> None:
    check_token_numbers(sequences)
    (T, S), most = sequences.shape, 16
    if S != 2:
        refuse("sequences", f"S = {S}", "bigrams, S = 2 (see offered_rank)")
    if most < T:
        refuse("sequences", f"T_0 = {T}", f"T_0 <= {most}: all subsets are tried")
    check_distinct_sequences(sequences)


@on_cpu
@checked(also=_are_few_bigrams)
def subset_rank(sequences: Sequences, heads: int, head_dim: HeadDim, dim: Dim) -> int:
    r"""The offered rank of at most 16 distinct bigrams, by trying all subsets.

    The formula is :math:`\min_J T_0 - |J| + H \min(d_h, r(J)) + \min(d, L(J))` over all subsets
    ``J``. Here ``L(J)`` counts the different last tokens in ``J``, and ``r(J)`` is the dimension
    that the vectors ``e(a) - e(b) + pos_1 - pos_2`` of ``J`` span (theorem ``thm-subsets``).

    Example:
        >>> square = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        >>> subset_rank(square, heads=1, head_dim=10, dim=10)
        6
    """
    T, codes = len(sequences), sequences.unique(return_inverse=True)[1]
    first, last = torch.nn.functional.one_hot(codes).double().unbind(1)
    moves = torch.nn.functional.pad(first - last, (0, 1), value=1.0)  # the last is pos_1 - pos_2
    chosen = torch.cartesian_prod(*[torch.arange(2.0, dtype=torch.float64)] * T).reshape(-1, T)
    # The entries are whole, so no singular value is small without being zero.
    r = torch.linalg.matrix_rank(chosen[..., None] * moves)
    L = (chosen @ last).gt(0).sum(1)
    offered = heads * r.clamp(max=head_dim) + L.clamp(max=dim)
    return int((T - chosen.sum(1) + offered).min())


# --- next tokens that no weights predict ----------------------------------------------------------


class Impossible(NamedTuple):
    """Why no weights with ``H`` heads predict some next tokens: exact integers, checked exactly.

    The weights are orthogonal to every function of at most ``H`` places, and so to each token's
    logits times the positive denominators. Were the right logits largest, zero would be positive.
    """

    rows: Int[Tensor, " k"]  # the sequences, all with the same last token
    tokens: Int[Tensor, " m"]  # some tokens
    weights: Int[Tensor, "k m"]  # positive for a sequence's next token and for no other


def places_kernel(sequences: Sequences, heads: int) -> np.ndarray:
    r"""The Gram matrix of all products of at most ``H`` indicators "token a stands at position s".

    Entry ``(t, u)`` is :math:`\sum_{k \le H} \binom{m}{k}`, where ``m`` counts the positions before
    the last at which ``t`` and ``u`` agree: exact integers. A vector in the kernel is orthogonal to
    every function of at most ``H`` of these positions.
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
    among sequences with one last token, and exact integers prove the result. That needs ``2^(H+1)``
    such sequences, and ``S - 1 > H``. None means that nothing is found, not that weights exist.

    Example:
        >>> impossible_subset(*every_parity(2), heads=1).weights.tolist()  # theorem thm-parity
        [[1, -1], [-1, 1], [-1, 1], [1, -1]]
    """
    for token in sequences[:, -1].unique() if heads < sequences.shape[1] - 1 else ():
        rows = (sequences[:, -1] == token).nonzero()[:, 0]
        if len(rows) >= 2 ** (heads + 1):
            kernel = places_kernel(sequences[rows], heads)
            # Rows in some linear relation; any next tokens of the others are possible.
            reduced, pivots, free = _echelon(kernel)
            related = sorted(
                free + [k for k, row in zip(pivots, reduced, strict=False) if row[free].any()]
            )
            rows = rows[related]
            if proof := _contradiction(kernel[np.ix_(related, related)], next_tokens[rows]):
                return proof._replace(rows=rows[proof.rows])
    return None


def _contradiction(kernel: np.ndarray, labels: Tensor) -> Impossible | None:
    """Weights on (sequence, other token) whose sums vanish on all functions (Farkas' lemma)."""
    tokens, right = labels.unique(return_inverse=True)
    shape, right = (len(labels), len(tokens)), right.tolist()
    pairs = [(t, k) for t, k in np.ndindex(shape) if k != right[t]]
    features = kernel[_echelon(kernel)[1]]
    if not pairs or len(pairs) * features.size > _MOST_ENTRIES:
        return None
    # A column for each pair (t, k): features of t, for its next token, less those for token k.
    conditions = np.zeros((len(tokens), len(features), len(pairs)), dtype=object)
    for column, (t, k) in enumerate(pairs):
        conditions[right[t], :, column] = features[:, t]
        conditions[k, :, column] = -features[:, t]
    conditions = conditions.reshape(-1, len(pairs))
    # A vertex of the non-negative solutions with sum one. Its support is smallest, so the solution
    # is unique up to its scale.
    matrix, ones = conditions.astype(float), np.ones(len(pairs))
    scale = np.abs(matrix).max(axis=1, keepdims=True)
    rows = np.vstack([matrix / np.where(scale > 0, scale, 1.0), ones])
    right_side = np.append(np.zeros(len(matrix)), 1.0)
    found = scipy.optimize.linprog(0 * ones, A_eq=rows, b_eq=right_side, method="highs-ds")
    support = np.flatnonzero(found.x > 1e-9) if found.success else []
    relation = _exact_relation(conditions[:, support]) if len(support) else None
    if relation is None or not 0 < min(relation) <= max(relation) < _LARGEST:
        return None
    weights = np.zeros(shape, dtype=object)
    for column, value in zip(support, relation, strict=True):
        t, k = pairs[column]
        weights[t, k] -= value
        weights[t, right[t]] += value
    if (kernel @ weights).any():  # exact integers: the proof
        return None
    rows, columns = (np.flatnonzero(weights.any(axis=axis)) for axis in (1, 0))
    some = torch.from_numpy(weights[np.ix_(rows, columns)].astype(np.int64))
    return Impossible(torch.from_numpy(rows), tokens[columns], some)


def _exact_relation(matrix: np.ndarray) -> list[int] | None:
    """The one linear relation between the columns, as coprime integers; None if not just one."""
    vectors, count = flint().fmpz_mat(matrix.tolist()).nullspace()
    if count != 1:
        return None
    values = [int(row[0]) for row in vectors.tolist()]
    divisor = math.gcd(*values) * (1 if values[0] > 0 else -1)
    return [value // divisor for value in values]


# --- the parity of bits ---------------------------------------------------------------------------


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
    by 1, so it offers ``1 / (S + (a_h - 1) m)``, where ``m`` counts the ones. With a constant these
    functions span all polynomials in ``m`` of degree ``H`` over one denominator. From 11 bits on,
    rounding loses a parity, and ``bits`` is refused.

    Example:
        >>> aot(parity_by_heads(2), every_parity(2)[0]).argmax(-1)  # prop-enough-heads
        tensor([0, 1, 1, 0])
    """
    double = {"dtype": torch.float64}
    a = 2.0 ** torch.arange(1, bits + 1, **double)  # different poles
    m = torch.arange(bits + 1, **double)
    offered = a * m[:, None] / (bits + 1 + (a - 1) * m[:, None])  # the share of tokens 1
    columns = torch.cat([torch.ones(bits + 1, 1, **double), offered], dim=1)
    solution = torch.linalg.solve(columns, -((-1.0) ** m))  # positive where the parity is one
    # A token 0 is (0, 1), which asks and carries the constant; a token 1 is (1, 0).
    embedding = torch.eye(2, **double).flip(0)
    zero, one = embedding.split(1)
    weights = AoTWeights(
        embedding=embedding,
        positions=torch.zeros(bits + 1, 2, **double),
        W_Q=zero.repeat(bits, 1, 1),
        W_K=a.log()[:, None, None] * one,
        W_V=one.repeat(bits, 1, 1),
        W_O=solution[1:, None, None] * one.T,
        W_U=torch.tensor([[0.0, 0.0], [1.0, float(solution[0])]], **double),
    )
    ones = torch.arange(bits + 1)[:, None] > torch.arange(bits + 1)  # m of them, then zeros
    if (aot(weights, ones.long()).argmax(-1) != m.long() % 2).any():
        refuse("bits", bits, "fewer, since rounding loses a parity")
    return weights
