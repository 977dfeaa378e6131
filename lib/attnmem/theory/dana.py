r"""What attention can tell about token sequences: exact ranks, impossible tasks, and weights.

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
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import scipy
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ..checks import Range, Seed, check_tokens, checked, construction, on_cpu, refuse
from ..core.bounds import aot_capacity
from ..core.layers import AoTWeights, aot, aot_features, look_up
from ..core.memorize import read_out
from ..core.random import gaussian, map_scale
from ..examples import Sequences, check_distinct_sequences, check_token_numbers
from .balls import flint
from .independence import numerical_rank
from .near import closest, draw_base, linearized, near
from .tangents import ScalarHeads, scalar_outputs, tangents

_PRIME = 2**31 - 1  # products of two residues fit into 64 bits
_MOST_ENTRIES = 2**26  # of the linear program that looks for impossible next tokens
_LARGEST = 2**53  # weight of a proof that is returned
_SHARP = (30.0, 10.0, 100.0)  # standard deviations of the drawn logits, tried in turn
_SOFTER = (*_SHARP, 3.0, 6.0, 1.0)  # soft attention tells more sequences apart that share tokens
_FIRST, _MOST = 9, 60  # draws to choose the largest margin from, and at most if none fits
_FIRST_SOFT = 8  # of heads that cancel
_MISSED = 1e-6  # error of a logit, of the largest: half of the digits, for rows nearly dependent
_REFINEMENTS = 3  # the features are worse conditioned than those of the other paper
_SOFT = (1.0, 2.0, 0.3, 3.0)  # for heads that cancel: sharp attention has a small derivative
_Spread = Annotated[int | float, Range(0)]
_ENOUGH = 0.99, 0.9  # shares of the exact margin at which no more is tried, by either construction

_Dim = Annotated[int, Range(2)]
_HeadDim = Annotated[int, Range(1, "dim")]


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
    return _flint(F[:, 0 if skip else dim :]).rank()


@on_cpu
@checked(also=check_token_numbers)
def dependent_subset(
    sequences: Sequences, heads: int, head_dim: _HeadDim, dim: _Dim, seed: Seed = 0
) -> Int[Tensor, " k"]:
    """Rows that no weights make independent, and of which every proper subset can be: a circuit.

    It is the smallest of the circuits that one elimination finds, as right as :func:`offered_rank`;
    empty if all rows can be independent.
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
    sequences: Sequences, heads: int, head_dim: _HeadDim, dim: _Dim, *, trained: bool = False
) -> int:
    """The largest rank of the Jacobian of all outputs; almost all weights reach it.

    If it is below the number of sequences, weights exist for almost no real labels. It is computed
    as :func:`offered_rank` is; by embeddings and positions, too, if those are ``trained``.
    """
    return _flint(_tangents(sequences, [1] * heads, head_dim, dim, trained)).rank()


@checked(also=check_token_numbers)
def cancelling_rank(
    sequences: Sequences, groups: Sequence[int], head_dim: _HeadDim, dim: _Dim
) -> int:
    """The largest rank of the Jacobian at weights where the heads of each group cancel.

    The heads of a group have one ``W_QK``, and values with sum zero. So a pair is worth one head in
    :func:`jacobian_rank`, and a head alone has the value zero. If the rank is the number of
    sequences, as many heads meet every real label (see the chapter on token sequences).
    """
    free = [k - 1 for k in groups]
    return _flint(_tangents(sequences, free, head_dim, dim)).rank()


def _tangents(sequences, values, head_dim, dim, trained=False) -> np.ndarray:
    """The Jacobian modulo the prime. Each of ``values`` is an attention with so many values."""
    # With the covariance C of a sequence's tokens under the attention and q = x(t, S), derivatives
    # are q by u, A by m, and q^T D C m for a change of W_QK by D. A change of basis in the head
    # makes the first d_h columns of W_K constant, so they are not varied.
    at = _Point(sequences, dim, seed=0)
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
            pairs = zip(pivots, reduced, strict=False)
            related = sorted(free + [k for k, row in pairs if row[free].any()])
            rows = rows[related]
            if proof := _contradiction(kernel[np.ix_(related, related)], next_tokens[rows]):
                return proof._replace(rows=rows[proof.rows])
    return None


def _contradiction(kernel: np.ndarray, labels: Tensor) -> Impossible | None:
    """Weights on (sequence, other token) whose sums vanish on all functions (Farkas' lemma)."""
    tokens, right = labels.unique(return_inverse=True)
    shape, right = (len(labels), len(tokens)), right.numpy()
    # Pairs of a sequence t and a token k that is not its next one.
    t, k = np.nonzero(np.arange(shape[1]) != right[:, None])
    features = kernel[_echelon(kernel)[1]]
    if not len(t) or len(t) * features.size > _MOST_ENTRIES:
        return None
    # A column for each pair: features of t, for its next token, less those for token k.
    one = np.eye(shape[1], dtype=object)
    signs = one[right[t]] - one[k]
    conditions = (signs.T[:, None] * features[:, t]).reshape(-1, len(t))
    # A vertex of the non-negative solutions with sum one. Its support is smallest, so the solution
    # is unique up to its scale.
    matrix, ones = conditions.astype(float), np.ones(len(t))
    scale = np.abs(matrix).max(axis=1, keepdims=True)
    rows = np.vstack([matrix / np.where(scale > 0, scale, 1.0), ones])
    right_side = np.append(np.zeros(len(matrix)), 1.0)
    found = scipy.optimize.linprog(0 * ones, A_eq=rows, b_eq=right_side, method="highs-ds")
    if not found.success:
        return None
    support = np.flatnonzero(found.x > 1e-9)
    vectors, count = flint().fmpz_mat(conditions[:, support].tolist()).nullspace()
    relation = np.array([int(row[0]) for row in vectors.tolist()], dtype=object)
    relation = relation // (math.gcd(*relation) or 1) * (1 if relation[0] > 0 else -1)
    if count != 1 or not 0 < min(relation) <= max(relation) < _LARGEST:
        return None
    weights = np.zeros(shape, dtype=object)
    np.add.at(weights, t[support], signs[support] * relation[:, None])
    if (kernel @ weights).any():  # exact integers: the proof
        return None
    rows, columns = (np.flatnonzero(weights.any(axis=axis)) for axis in (1, 0))
    some = torch.from_numpy(weights[np.ix_(rows, columns)].astype(np.int64))
    return Impossible(torch.from_numpy(rows), tokens[columns], some)


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
    # A token 0 is (0, 1), which asks and carries the constant; a token 1 is (1, 0).
    embedding = torch.eye(2, **double).flip(0)
    zero, one = embedding.split(1)
    positions = torch.zeros(bits + 1, 2, **double)
    W_Q, W_V = zero.repeat(bits, 1, 1), one.repeat(bits, 1, 1)
    W_K, W_O = a.log()[:, None, None] * one, solution[1:, None, None] * one.T
    W_U = torch.tensor([[0.0, 0.0], [1.0, float(solution[0])]], **double)
    weights = AoTWeights(embedding, positions, W_Q, W_K, W_V, W_O, W_U)
    ones = torch.arange(bits + 1)[:, None] > torch.arange(bits + 1)  # m of them, then zeros
    if (aot(weights, ones.long()).argmax(-1) != m.long() % 2).any():
        refuse("bits", bits, "fewer, since rounding loses a parity")
    return weights


# --- built: Theorem 1 of Dana et al. --------------------------------------------------------------

# A drawn transformer e', pos', W'_Q, W'_K, W'_V offers F(t) = [x'(t, S); W_V'^1 A'^1(t); ...] for
# every sequence t. If these rows are independent, there are M and W_O with
#     M x'(t, S) + sum_h W_O^h W_V'^h A'^h(t) = E(t)
# for any E(t). M can be moved into the embedding, e = M e' and pos = M pos', and out of the heads
# again, W = W' M^-1 for the maps that read x. Then every attention weight stays as it was, and the
# output is W_U E(t).


@on_cpu
@checked
def circle(vocab: int) -> Float[Tensor, "N 2"]:
    """Unit vectors at equal angles, as in Dana et al. 2025, Proposition 3, for ``d = 2``."""
    angles = 2 * math.pi * torch.arange(vocab, dtype=torch.float64) / vocab
    return torch.stack([angles.cos(), angles.sin()], dim=1)


@on_cpu
@checked
def spread_tokens(vocab: int, dim: _Dim, seed: Seed) -> Float[Tensor, "N d"]:
    """One unit vector for each token: the circle for ``d = 2``, random directions for ``d > 2``."""
    if dim == 2:
        return circle(vocab)
    generator = torch.Generator().manual_seed(seed)
    rows = gaussian(generator, vocab, dim)
    return rows / rows.norm(dim=1, keepdim=True)


def margins(logits: Float[Tensor, "T N"], next_tokens: Int[Tensor, " T"]) -> Float[Tensor, " T"]:
    """The logit of the right token less the largest other one: positive where it is memorized."""
    right = logits.gather(1, next_tokens[:, None])[:, 0]
    others = logits.scatter(1, next_tokens[:, None], -math.inf)
    return right - others.amax(dim=1)


@on_cpu
@checked
def random_aot(
    vocab: int, length: int, dim: int, head_dim: int, heads: int, spread: _Spread, seed: Seed
) -> tuple[Tensor, ...]:
    """Draw ``e', pos', W'_Q, W'_K, W'_V``, Gaussian, for logits of deviation about ``spread``."""
    generator = torch.Generator().manual_seed(seed)
    scale = map_scale(spread, dim, head_dim)
    tables = [gaussian(generator, rows, dim) / 2**0.5 for rows in (vocab, length)]
    maps = (c * gaussian(generator, heads, head_dim, dim) for c in (scale, scale, dim**-0.5))
    return (*tables, *maps)


def offered(weights: AoTWeights, sequences: Int[Tensor, "T S"]) -> Float[Tensor, "T d_plus_Hd_h"]:
    """The matrix ``F`` of the proof of Theorem 1, with rows ``[x(t, S); W_V^1 A^1(t); ...]``."""
    x = look_up(weights.embedding, sequences[:, -1:])[:, 0] + weights.positions[-1]
    A = aot_features(weights, sequences).unflatten(-1, (len(weights.W_V), -1))
    return torch.cat([x, torch.einsum("thd,hkd->thk", A, weights.W_V).flatten(1)], dim=1)


def _are_told_apart(sequences, next_tokens, vocab) -> None:
    for name, tokens in (("sequences", sequences), ("next_tokens", next_tokens)):
        check_tokens(name, tokens, vocab)
    check_distinct_sequences(sequences, next_tokens)


def _is_a_task(sequences, next_tokens, vocab, dim, head_dim, heads) -> None:
    if sequences.shape[1] < 2:
        got = f"S = {sequences.shape[1]}"
        refuse("sequences", got, "S >= 2: a single token attends to nothing but itself")
    _are_told_apart(sequences, next_tokens, vocab)
    room = aot_capacity(heads, head_dim, dim)
    if not 1 <= len(sequences) <= room:
        refuse("sequences", f"T_0 = {len(sequences)}", f"1 <= T_0 <= H d_h + d = {room}")


@construction(also=_is_a_task)
def memorize_aot(
    sequences: Sequences,
    next_tokens: Int[Tensor, " T"],
    *,
    vocab: int,
    dim: _Dim,
    head_dim: _HeadDim,
    heads: int,
    seed: Seed,
) -> AoTWeights:
    """Build an attention-only transformer that predicts every next token.

    There may be up to ``H d_h + d`` sequences that attention can tell apart, as it usually can
    random ones: :func:`offered_rank` is their number. In sets that share tokens in a regular way,
    some next tokens are beyond any weights. The unembedding is :func:`spread_tokens`. Of some draws
    the one with the largest least margin is returned.

    Example:
        >>> pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        >>> sizes = {"vocab": 4, "dim": 2, "head_dim": 2, "heads": 7, "seed": 0}
        >>> weights = memorize_aot(pairs, pairs.sum(1) % 4, **sizes)
        >>> bool((aot(weights, pairs).argmax(-1) == pairs.sum(1) % 4).all())
        True

    Source: Dana et al. 2025, Theorem 1 with epsilon = 0 and Corollary 1, without their limit.
    """
    W_U = spread_tokens(vocab, dim, seed)
    products = (W_U @ W_U.T).fill_diagonal_(-math.inf)
    exact_margin = float(1 - products[next_tokens].max())
    generator = torch.Generator().manual_seed(seed)
    sizes = (vocab, sequences.shape[1], dim, head_dim, heads)

    def drawn(attempts: range, spreads: Sequence[float]) -> Iterator[tuple[AoTWeights, float]]:
        for attempt in attempts:
            # Targets in a proper subspace, or equal ones, may make M singular; jitter prevents it.
            jitter = exact_margin / 4 if attempt else 0.0
            move = gaussian(generator, len(sequences), dim)  # each logit moves by at most jitter
            targets = W_U[next_tokens] + jitter * move / move.norm(dim=1).max()
            spread = spreads[attempt % len(spreads)]
            transformer = random_aot(*sizes, spread, seed + 1000 * attempt)
            weights, _ = _fitted(transformer, W_U, sequences, targets)
            lost = -float(margins(aot(weights, sequences), next_tokens).min())
            yield weights, lost
            if -lost >= _ENOUGH[0] * (exact_margin - 2 * jitter):
                return

    weights, lost = closest(drawn(range(_FIRST), _SHARP), -math.inf)
    if lost >= 0:
        _refuse_short_of_rank(sequences, next_tokens, heads, head_dim, dim)
        weights, lost = closest(drawn(range(_FIRST, _MOST), _SOFTER), -math.ulp(0))
    if lost >= 0:
        got = f"{len(sequences)} associations, independent in exact arithmetic, of which each of "
        got += f"{_MOST} draws loses some to rounding"
        refuse("sequences", got, "a better conditioned task: fewer sequences or more heads")
    return weights


def _refuse_short_of_rank(sequences, next_tokens, heads, head_dim, dim) -> None:
    """Refuse a task that is impossible, and a set of sequences that no weights tell apart."""
    if proof := impossible_subset(sequences, next_tokens, heads):
        rows = proof.rows.tolist()
        got = f"a task that is impossible for H = {heads} at any d and d_h: the next tokens of the "
        got += f"{len(rows)} sequences {rows}, which end in one token, are orthogonal to all "
        got += f"functions of {heads} place{'s' * (heads > 1)}"
        refuse("next_tokens", got, "more heads, or other next tokens (see impossible_subset)")
    if subset := dependent_subset(sequences, heads, head_dim, dim).tolist():
        offers = offered_rank(sequences, heads, head_dim, dim)
        got = f"T_0 = {len(sequences)} of which H = {heads}, d_h = {head_dim}, d = {dim} offer "
        got += f"rank {offers} at most: no weights make the {len(subset)} sequences {subset} "
        wanted = "every subset independent (see dependent_subset): more heads, or fewer sequences "
        refuse("sequences", got + "independent", wanted + "that share tokens")


def fitted(
    drawn: tuple[Tensor, ...], W_U: Tensor, sequences: Tensor, targets: Float[Tensor, "T d"]
) -> AoTWeights:
    """Fit a drawn transformer such that the inputs of its last layer are ``targets``, ``E(t)``.

    ``M`` is nearest to the identity, ``W_O`` to zero. Logits are within 1e-6 of the largest one of
    ``W_U E(t)``, or ``ValueError`` says that the offers of this draw have dependent rows, or that
    ``M`` is singular, or so nearly that float64 cannot tell.
    """
    heads, head_dim, dim = drawn[-1].shape
    if len(sequences) > (room := aot_capacity(heads, head_dim, dim)):
        refuse("sequences", f"T_0 = {len(sequences)}", f"T_0 <= H d_h + d = {room}")
    weights, F = _fitted(drawn, W_U, sequences, targets)
    logits = targets @ W_U.T
    error = float((aot(weights, sequences) - logits).abs().max() / logits.abs().max())
    if not error <= _MISSED:
        got = f"a draw whose F has rank {numerical_rank(F)} in float64, for {len(F)} sequences, "
        got += f"and whose logits miss by {error:.1e} of the largest"
        refuse("drawn", got, "rank T_0 and an invertible M: another draw, more heads")
    return weights


def _fitted(drawn, W_U, sequences, targets) -> tuple[AoTWeights, Tensor]:
    """The weights, which are not finite if ``M`` is singular, and the offers ``F`` of the draw."""
    embedding, positions, W_Q, W_K, W_V = drawn
    heads, head_dim, dim = W_V.shape
    silent = W_V.new_zeros(heads, dim, head_dim)
    F = offered(AoTWeights(embedding, positions, W_Q, W_K, W_V, silent, W_U), sequences)
    # M x' + sum_h W_O^h W_V'^h A'^h = E, with M = I + the first rows of the solution
    solution = read_out(F, targets - F[:, :dim], _REFINEMENTS)
    M = torch.eye(dim, dtype=F.dtype) + solution[:dim].T
    W_O = solution[dim:].unflatten(0, (heads, head_dim)).mT.contiguous()
    back = torch.linalg.inv_ex(M).inverse  # not finite if M is singular: no margin then
    maps = (W @ back for W in (W_Q, W_K, W_V))
    return AoTWeights(embedding @ M.T, positions @ M.T, *maps, W_O, W_U), F


# --- built: by heads that cancel ------------------------------------------------------------------

# They meet far more. Let token k have the unembedding 2 c_k u - c_k^2 r with distinct c_k, and the
# residual stream the products y(t) with u and z(t) > 0 with r. If y = c_k z, token k's logit is the
# largest. The heads write along one direction that r does not see, so the skip connection gives z,
# and
#     y(t) = u^T x(t, S) + sum_h m_h^T A^h(t)
# is to be met (attnmem.theory.near).


def _reach_every_labeling(sequences, next_tokens, vocab, dim, head_dim, groups) -> None:
    _are_told_apart(sequences, next_tokens, vocab)
    rank = cancelling_rank(sequences, groups, head_dim, dim)
    if rank < len(sequences):
        got = f"T_0 = {len(sequences)}, on which heads in the groups {(*groups,)} have a Jacobian "
        wanted = "a Jacobian of rank T_0 (see cancelling_rank): more heads, or fewer sequences"
        refuse("sequences", f"{got}of rank {rank}", wanted)


@construction(also=_reach_every_labeling)
def memorize_next_tokens(
    sequences: Sequences,
    next_tokens: Int[Tensor, " T"],
    *,
    vocab: Annotated[int, Range(2)],
    dim: _Dim,
    head_dim: _HeadDim,
    groups: Sequence[int],
    seed: Seed,
) -> AoTWeights:
    """Build an attention-only transformer that predicts every next token, by cancelling heads.

    ``groups`` are the numbers of heads that cancel, such as ``(2, 2)``. For any next tokens they
    serve as many sequences as :func:`cancelling_rank` says: of random ones about ``d_h (2 d - d_h)
    + d`` for each pair, where :func:`memorize_aot` serves ``2 d_h``.
    """
    c = torch.linspace(-1, 1, vocab, dtype=torch.float64)

    def drawn(attempts: range) -> Iterator[tuple[AoTWeights, float]]:
        for attempt in attempts:
            generator = torch.Generator().manual_seed(seed + 1000 * attempt)
            sizes = vocab, sequences.shape[1]
            tables = [gaussian(generator, n, dim) / 2**0.5 for n in sizes]
            # The last coordinate of x(t, S), which is z(t), is at least one.
            tables[1][-1, -1] = 1 - tables[0][sequences[:, -1], -1].min()
            spread = _SOFT[attempt % len(_SOFT)]
            heads = draw_base(groups, dim, head_dim, spread, generator)
            for weights in _near(heads, *tables, sequences, next_tokens, c):
                yield weights, -float(margins(aot(weights, sequences), next_tokens).min())

    exact_margin = float((c[1] - c[0]) ** 2)
    weights, lost = closest(drawn(range(_FIRST_SOFT)), -_ENOUGH[1] * exact_margin)
    if lost >= 0:
        weights, lost = closest(drawn(range(_FIRST_SOFT, _MOST)), -math.ulp(0))
    if lost >= 0:
        got = f"{len(sequences)} sequences with a Jacobian of full rank, of which each of "
        got += f"{_MOST} draws loses some next token to rounding"
        refuse("sequences", got, "a better conditioned task: fewer sequences or more heads")
    return weights


def _near(heads, embedding, positions, sequences, next_tokens, c) -> Iterator[AoTWeights]:
    """Transformers of logits ``2 c y - c^2 z`` near cancelling heads, with ``y`` near ``c z``."""
    x = embedding[sequences] + positions
    q, z = x[:, -1], x[:, -1, -1]
    # One more head stands for u: it attends to the last token alone, and its maps do not move.
    more = ScalarHeads(*(pad(W, (0, 0) * (W.ndim - 1) + (0, 1)) for W in heads))
    at = tangents(more, x, q)
    at.attended[-1] = q

    def outputs(weights: ScalarHeads) -> Tensor:
        return scalar_outputs(ScalarHeads(*(W[:-1] for W in weights)), x, q) + q @ weights.mu[-1]

    base = linearized(more, at, c[next_tokens] * z)
    for found, _ in near(base, outputs, c[next_tokens] * z) if base else ():
        if found is None:
            continue
        W_Q, W_K = (W[:-1].mT.contiguous() for W in found[:2])
        W_V, W_O = torch.zeros_like(W_Q), torch.zeros_like(found.W_Q[:-1])
        u, r = found.mu[-1], torch.eye(q.shape[1], dtype=c.dtype)[-1]
        written = u * (1 - r)
        W_V[:, 0] = found.mu[:-1]
        # The product with u is 1, with r it is 0; if all labels are zero, nothing is written.
        W_O[:, :, 0] = written / (written @ written).clamp(min=torch.finfo(c.dtype).tiny)
        W_U = 2 * c[:, None] * u - c[:, None] ** 2 * r
        yield AoTWeights(embedding, positions, W_Q, W_K, W_V, W_O, W_U)
