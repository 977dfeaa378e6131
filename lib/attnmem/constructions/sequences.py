r"""What attention can offer about a set of sequences: the exact rank, and tasks beyond any weights.

Which rows ``F(t) = [x(t, S); W_V^1 A^1(t); ...]`` can be made independent depends on the tokens
that the sequences share. Two sequences with one last token ask with one query, so a head weighs a
token ``a`` at a place ``s`` in both by the same number

.. math:: e^{x(t, S)^\top W_{QK} (e(a) + pos_s)} = \alpha(t_S, a)\, \beta(t_S, s) .

For ``d >= 2`` the numbers :math:`\alpha, \beta` obey no other polynomial relation (theorem
``thm-free-weights`` of the book). So the largest rank of ``F`` over all weights is that of a matrix
of rational functions, and a random integer point modulo a prime shows it.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from scipy.optimize import linprog
from torch import Tensor

from ..attention import AoTWeights
from ..balls import flint
from ..checks import check_integer, check_tensor, checked_by, refuse

PRIME = 2**31 - 1  # products of two residues fit into 64 bits
DEEPEST = 2**26  # size of the linear program that looks for impossible next tokens
FEW = 16  # sequences whose subsets are all tried


def _check_sequences(sequences, heads, head_dim=1, dim=2, seed=0, *, skip=True) -> None:
    check_tensor("sequences", sequences, "(T_0, S)", 2)
    if sequences.is_floating_point() or sequences.numel() == 0 or int(sequences.min()) < 0:
        refuse("sequences", f"{sequences.dtype} of shape {(*sequences.shape,)}", "token numbers")
    check_integer("heads", heads)
    check_integer("dim", dim, least=2)
    check_integer("head_dim", head_dim, most=dim)
    check_integer("seed", seed, least=0)


# --- the rank, exactly ----------------------------------------------------------------------------


@checked_by(_check_sequences)
def offered_rank(
    sequences: Int[Tensor, "T S"],
    heads: int,
    head_dim: int,
    dim: int,
    seed: int = 0,
    *,
    skip: bool = True,
) -> int:
    r"""The largest rank of ``F`` over all weights; almost all weights reach it.

    Without ``skip``, of ``F`` less its first ``d`` columns, the skip connection's.
    Computed modulo the prime ``2^31 - 1`` at a random integer point: a proven lower bound. It
    falls short of the largest rank with a probability below ``T_0 (4 H + 2) / (2^31 - 2)`` over
    ``seed`` (Schwartz and Zippel), unless that prime divides every coefficient of every largest
    minor; so where the rank is not full, it is the rank up to that tiny probability.

    >>> pairs = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    >>> offered_rank(pairs, heads=1, head_dim=4, dim=4)
    4
    >>> xor = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]])  # the last token is fixed
    >>> [offered_rank(xor, heads, head_dim=9, dim=9) for heads in (1, 2)]
    [3, 4]

    Source: ours; it corrects Dana et al. 2025, Lemma 2 and the proof of Theorem 1.
    """
    F = _free_offers(sequences, heads, head_dim, dim, seed)
    return _rank(F[:, 0 if skip else dim :])


@checked_by(_check_sequences)
def dependent_subset(
    sequences: Int[Tensor, "T S"], heads: int, head_dim: int, dim: int, seed: int = 0
) -> Int[Tensor, " k"]:
    """Rows that no weights make independent, and of which every proper subset can be: a circuit.

    The smallest of those that one elimination finds; empty if all rows can be independent.
    Computed as :func:`offered_rank` is, and right up to the same probability.
    """
    reduced, pivots = _echelon(_free_offers(sequences, heads, head_dim, dim, seed).T)
    rows = [k for k in range(len(sequences)) if k not in {*pivots}]
    circuits = ([*np.flatnonzero(reduced[: len(pivots), k]), k] for k in rows)
    found = [[pivots[i] for i in circuit[:-1]] + circuit[-1:] for circuit in circuits]
    return torch.tensor(sorted(min(found, key=len, default=[])), dtype=torch.int64)


def _free_offers(sequences: Tensor, heads: int, head_dim: int, dim: int, seed: int) -> np.ndarray:
    """``F`` modulo the prime with random embeddings, maps ``W_V``, and weights alpha beta."""
    tokens = sequences.numpy()
    (T, S), draw = tokens.shape, np.random.default_rng(seed)
    last = tokens[:, -1:]
    _, seen = np.unique(tokens, return_inverse=True)
    _, pairs = np.unique(last * (tokens.max() + 1) + tokens, return_inverse=True)
    _, ends = np.unique(last, return_inverse=True)
    seen, pairs, ends = seen.reshape(T, S), pairs.reshape(T, S), ends.reshape(T)

    def numbers(*shape: int) -> np.ndarray:
        return draw.integers(1, PRIME, shape, dtype=np.int64)

    x = (numbers(int(seen.max()) + 1, dim)[seen] + numbers(S, dim)) % PRIME
    count, askers = int(pairs.max()) + 1, int(ends.max()) + 1
    blocks = [x[:, -1]]
    for _ in range(heads):
        weights = np.zeros((T, S), dtype=np.int64)
        while (weights.sum(1) % PRIME == 0).any():  # a denominator
            weights = numbers(count)[pairs] * numbers(askers, S)[ends] % PRIME
        total = (weights[..., None] * x % PRIME).sum(1) % PRIME
        A = total * _inverse(weights.sum(1) % PRIME)[:, None] % PRIME
        blocks.append((A[:, None, :] * numbers(head_dim, dim) % PRIME).sum(2) % PRIME)
    return np.concatenate(blocks, axis=1)


def _rank(matrix: np.ndarray) -> int:
    """Modulo the prime; with python-flint some twenty times as fast."""
    try:
        return flint().nmod_mat(*matrix.shape, matrix.flatten().tolist(), PRIME).rank()
    except ImportError:
        return len(_echelon(matrix.T)[1])


def _inverse(numbers: np.ndarray) -> np.ndarray:
    """Modulo the prime, by Fermat's little theorem."""
    power, left, square = np.ones_like(numbers), PRIME - 2, numbers
    while left:
        if left & 1:
            power = power * square % PRIME
        square, left = square * square % PRIME, left >> 1
    return power


def _echelon(matrix: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Reduced row echelon form modulo the prime, and the columns of its pivots."""
    rows, pivots = matrix.copy() % PRIME, []
    for column in range(rows.shape[1]):
        rank = len(pivots)
        candidates = np.flatnonzero(rows[rank:, column])
        if len(candidates):
            rows[[rank, rank + candidates[0]]] = rows[[rank + candidates[0], rank]]
            pivot = rows[rank] * _inverse(rows[rank, column : column + 1]) % PRIME
            rows = (rows - rows[:, column : column + 1] * pivot % PRIME) % PRIME
            rows[rank] = pivot
            pivots.append(column)
        if len(pivots) == len(rows):
            break
    return rows, pivots


# --- the rank, from the subsets -------------------------------------------------------------------


def own_tokens(sequences: Int[Tensor, "T S"]) -> Int[Tensor, " T"]:
    """For each sequence a place whose token no other one with the same last token contains.

    The token is not the last one itself. For bigrams every place 0 will do, last token or not.
    ``ValueError`` names a sequence without such a place.
    """
    check_tensor("sequences", sequences, "(T_0, S)", 2)
    if sequences.shape[1] == 2:
        return torch.zeros(len(sequences), dtype=torch.int64)
    rows = sequences.tolist()
    return torch.tensor([_own_place(rows, t) for t in range(len(rows))])


def _own_place(rows: list[list[int]], t: int) -> int:
    *before, last = rows[t]
    others = {a for u, row in enumerate(rows) if u != t and row[-1] == last for a in row}
    for place, token in enumerate(before):
        if token not in others | {last}:
            return place
    refuse("sequences", f"row {t}, {rows[t]}, without a token of its own", "a token in each")


def _check_subsets(sequences, heads, head_dim, dim) -> None:
    _check_sequences(sequences, heads, head_dim, dim)
    if len(sequences) > FEW:
        refuse("sequences", f"T_0 = {len(sequences)}", f"T_0 <= {FEW}: all subsets are tried")
    if len(sequences.unique(dim=0)) < len(sequences):
        refuse("sequences", "a repeated sequence", "distinct rows")


@checked_by(_check_subsets)
def subset_rank(sequences: Int[Tensor, "T S"], heads: int, head_dim: int, dim: int) -> int:
    r"""``min over subsets J of T_0 - |J| + H min(d_h, r(J)) + min(d, L(J))``, by trying them all.

    ``L(J)`` counts the different last tokens in ``J``; ``r(J)`` is the dimension that the vectors
    ``e(own token) + pos - e(last token) - pos_S`` of ``J`` span, with the mean of the own token's
    positions (see :func:`own_tokens`). Attention offers at least this rank, and for bigrams exactly
    this rank: theorem ``thm-subsets`` of the book. The sequences are distinct, at most 16.

    >>> square = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    >>> subset_rank(square, heads=1, head_dim=10, dim=10)
    6
    """
    moves = _moves(sequences)
    ends = torch.nn.functional.one_hot(sequences[:, -1].unique(return_inverse=True)[1])
    chosen = torch.cartesian_prod(*[torch.arange(2)] * len(sequences)).reshape(-1, len(sequences))
    # Of small fractions in few rows: singular values that are not zero are far from it.
    r = torch.linalg.matrix_rank(chosen[..., None] * moves)
    L = (chosen @ ends).gt(0).sum(1)
    offered = heads * r.clamp(max=head_dim) + L.clamp(max=dim)
    return int((len(sequences) - chosen.sum(1) + offered).min())


def _moves(sequences: Tensor) -> Tensor:
    """Indicators of own token and place, less those of the last ones: columns tokens, places."""
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


# --- next tokens beyond any weights ---------------------------------------------------------------


class Impossible(NamedTuple):
    r"""Why some next tokens are beyond ``H`` heads: exact integers, checked against every function.

    ``rows``: the sequences, all with one last token. ``weights``: for each of them a number for
    each token of ``tokens``, positive for its next token and not positive for the others. For each
    token they are orthogonal to every function of at most ``H`` places, and so to its logits times
    the positive denominators: the right logits would lead by a positive sum that is zero.
    """

    rows: Int[Tensor, " k"]
    tokens: Int[Tensor, " m"]
    weights: Int[Tensor, "k m"]


def places_kernel(sequences: Int[Tensor, "T S"], heads: int) -> np.ndarray:
    r"""The Gram matrix of all products of at most ``H`` indicators "token a stands at place s".

    Entry ``(t, u)`` is :math:`\sum_{k \le H} \binom{m}{k}`, where ``m`` counts the places before
    the last at which ``t`` and ``u`` agree. Exact integers, shape (T_0, T_0), dtype object. A
    vector in its kernel is orthogonal to every function of at most ``H`` of these places.
    """
    before = sequences[:, :-1].numpy()
    agree = (before[:, None] == before).sum(2)
    counts = [sum(math.comb(m, k) for k in range(heads + 1)) for m in range(before.shape[1] + 1)]
    return np.array(counts, dtype=object)[agree]


def _check_tasks(sequences, next_tokens, heads) -> None:
    _check_sequences(sequences, heads)
    check_tensor("next_tokens", next_tokens, "(T_0,)", 1)


@checked_by(_check_tasks)
def impossible_subset(
    sequences: Int[Tensor, "T S"], next_tokens: Int[Tensor, " T"], heads: int
) -> Impossible | None:
    """Sequences whose next tokens no transformer with so many heads predicts, or None.

    At any ``d``, ``d_h``, embeddings and maps. Found by a linear program among the sequences with
    one last token, proven by exact integers. None means that this argument finds nothing, not that
    weights exist. It takes at least ``2^(H+1)`` distinct sequences with one last token, and
    ``S - 1 > H``.

    >>> bits = torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.zeros(1, dtype=int))
    >>> impossible_subset(bits, bits.sum(1) % 2, heads=1).weights.tolist()
    [[1, -1], [-1, 1], [-1, 1], [1, -1]]
    >>> impossible_subset(bits, bits.sum(1) % 2, heads=2)

    Source: ours, from the argument on parity (theorem ``thm-parity`` of the book).
    """
    for token in sequences[:, -1].unique() if heads < sequences.shape[1] - 1 else ():
        rows = (sequences[:, -1] == token).nonzero()[:, 0]
        if len(rows) >= 2 ** (heads + 1):
            rows = rows[_related(places_kernel(sequences[rows], heads))]
            if found := _contradiction(places_kernel(sequences[rows], heads), next_tokens[rows]):
                return found._replace(rows=rows[found.rows])
    return None


def _related(kernel: np.ndarray) -> Tensor:
    """The rows that take part in some linear relation; the others meet any demand."""
    reduced, pivots = _echelon((kernel % PRIME).astype(np.int64))
    free = [k for k in range(len(kernel)) if k not in {*pivots}]
    used = [k for i, k in enumerate(pivots) if reduced[i, free].any()]
    return torch.tensor(sorted(free + used), dtype=torch.int64)


def _contradiction(kernel: np.ndarray, labels: Tensor) -> Impossible | None:
    """Weights on (sequence, other token) whose sums vanish on all functions: Farkas' lemma."""
    tokens, right = labels.unique(return_inverse=True)
    pairs = [(t, k) for t in range(len(labels)) for k in range(len(tokens)) if k != right[t]]
    features = kernel[_echelon((kernel % PRIME).astype(np.int64))[1]]
    if not pairs or len(pairs) * features.size > DEEPEST:
        return None
    if not (support := _vertex(features, right.tolist(), pairs, len(tokens))):
        return None
    exact = _kernel_vector(_conditions(features, right.tolist(), support, len(tokens)))
    if exact is None or min(exact) <= 0:
        return None
    weights = np.zeros((len(labels), len(tokens)), dtype=object)
    for (t, k), value in zip(support, exact, strict=True):
        weights[t, k] -= value
        weights[t, right[t]] += value
    if (kernel @ weights).any():  # exact integers: the proof
        return None
    rows, columns = (np.flatnonzero(weights.any(axis=axis)) for axis in (1, 0))
    found = torch.from_numpy(weights[np.ix_(rows, columns)].astype(np.int64))
    return Impossible(torch.from_numpy(rows), tokens[columns], found)


Pairs = list[tuple[int, int]]


def _conditions(features: np.ndarray, right: list[int], pairs: Pairs, count: int) -> np.ndarray:
    """A column for each pair (t, k): features of t, for its next token, less those for token k."""
    blocks = np.zeros((count, len(features), len(pairs)), dtype=object)
    for column, (t, k) in enumerate(pairs):
        blocks[right[t], :, column] += features[:, t]
        blocks[k, :, column] -= features[:, t]
    return blocks.reshape(-1, len(pairs))


def _vertex(features: np.ndarray, right: list[int], pairs: Pairs, count: int) -> Pairs:
    """The support of a vertex of all non-negative solutions with sum one; empty if there are none.

    A vertex has a smallest support, so that its solution is unique up to its scale.
    """
    matrix = _conditions(features, right, pairs, count).astype(float)
    scale = np.abs(matrix).max(axis=1, keepdims=True)
    rows = np.vstack([matrix / np.where(scale > 0, scale, 1.0), np.ones(len(pairs))])
    aim = np.append(np.zeros(len(matrix)), 1.0)
    solved = linprog(np.zeros(len(pairs)), A_eq=rows, b_eq=aim, method="highs-ds")
    if not solved.success:
        return []
    return [pair for pair, value in zip(pairs, solved.x, strict=True) if value > 1e-9]


def _kernel_vector(matrix: np.ndarray) -> list[int] | None:
    """The coprime integers that the columns' one relation consists of, if there is just one.

    Read off modulo the prime and recovered as fractions; whoever uses it checks it exactly.
    """
    reduced, pivots = _echelon((matrix % PRIME).astype(np.int64))
    [free, *more] = [k for k in range(matrix.shape[1]) if k not in {*pivots}] or [None]
    if free is None or more:
        return None
    solution = {free: Fraction(1)}
    for i, pivot in enumerate(pivots):
        solution[pivot] = _fraction(-int(reduced[i, free]) % PRIME)
    values = [solution[k] for k in range(matrix.shape[1])]
    whole = [v * math.lcm(*(v.denominator for v in values)) for v in values]
    divisor = math.gcd(*(int(v) for v in whole))
    return [int(v) // divisor for v in whole]


def _fraction(residue: int) -> Fraction:
    """The fraction of small numerator and denominator with this residue modulo the prime."""
    (a, b), (s, t) = (PRIME, residue), (0, 1)
    while b * b > PRIME:
        (a, b), (s, t) = (b, a % b), (t, s - a // b * t)
    return Fraction(b, t)


def every_parity(bits: int) -> tuple[Int[Tensor, "T S"], Int[Tensor, " T"]]:
    """All sequences of so many bits before a last token 0, and the parity of each.

    >>> every_parity(2)[0].tolist(), every_parity(2)[1].tolist()
    ([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]], [0, 1, 1, 0])
    """
    check_integer("bits", bits)
    rows = torch.tensor([[*row, 0] for row in itertools.product(range(2), repeat=bits)])
    return rows, rows.sum(1) % 2


def parity_by_heads(bits: int) -> AoTWeights:
    r"""As many heads as bits, of width one in dimension two, that tell their parity.

    For sequences of :func:`every_parity`, vocabulary 2. Head ``h`` weighs a token 1 by ``a_h`` and
    a token 0 by 1, so it offers ``1 / (S + (a_h - 1) m)``, where ``m`` counts the ones. With a
    constant these functions span every polynomial in ``m`` of degree ``H`` over one denominator.

    >>> from attnmem.attention import aot
    >>> [bool((aot(parity_by_heads(k), every_parity(k)[0]).argmax(-1) == every_parity(k)[1]).all())
    ...  for k in (1, 2, 3, 4, 5)]
    [True, True, True, True, True]

    Source: ours (proposition ``prop-enough-heads`` of the book).
    """
    check_integer("bits", bits)
    a = 2.0 ** torch.arange(1, bits + 1, dtype=torch.float64)  # different poles
    m = torch.arange(bits + 1, dtype=torch.float64)
    offered = a * m[:, None] / (bits + 1 + (a - 1) * m[:, None])  # the share of tokens 1
    columns = torch.cat([torch.ones(bits + 1, 1, dtype=torch.float64), offered], dim=1)
    solution = torch.linalg.solve(columns, -((-1.0) ** m))  # positive where the parity is one
    # A token 0 is (0, 1), which asks and carries the constant; a token 1 is (1, 0).
    embedding = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    one = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    zero = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    return AoTWeights(
        embedding=embedding,
        positions=torch.zeros(bits + 1, 2, dtype=torch.float64),
        W_Q=zero.expand(bits, 1, 2),
        W_K=a.log()[:, None, None] * one,
        W_V=one.expand(bits, 1, 2),
        W_O=solution[1:, None, None] * one.T,
        W_U=torch.tensor([[0.0, 0.0], [1.0, float(solution[0])]], dtype=torch.float64),
    )
