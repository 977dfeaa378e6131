"""Weights that predict next tokens: by Theorem 1 of Dana et al., and by heads that cancel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ..checks import Range, Seed, check_tokens, checked, construction, on_cpu, refuse
from ..core.bounds import aot_capacity
from ..core.layers import AoTWeights, aot, aot_features, look_up
from ..core.memorize import read_out
from ..core.random import gaussian, map_scale
from ..examples import Sequences, check_distinct_sequences
from .cancelling import closest, draw_base, linearized, near
from .impossible import impossible_subset
from .independence import numerical_rank
from .sequence_ranks import cancelling_rank, dependent_subset, offered_rank
from .tangents import ScalarHeads, scalar_outputs, tangents

# Standard deviations of the drawn logits, tried in turn.
_SHARP = (30.0, 10.0, 100.0)
_SOFTER = (*_SHARP, 3.0, 6.0, 1.0)  # soft attention tells more sequences apart that share tokens
_SOFT = (1.0, 2.0, 0.3, 3.0)  # for heads that cancel: sharp attention has a small derivative
# Draws to choose the largest margin from, for either construction, and at most if none fits.
_FIRST, _FIRST_CANCELLING, _MOST = 9, 8, 60
# Shares of the exact margin at which no more is tried, for either construction.
_ENOUGH, _ENOUGH_CANCELLING = 0.99, 0.9
_SEED_STEP = 1000  # from the seed of a draw to that of the next
_MISSED = 1e-6  # error of a logit, of the largest: half of the digits, for rows nearly dependent
_REFINEMENTS = 3  # the features are worse conditioned than those of the other paper

_Dim = Annotated[int, Range(2)]
_HeadDim = Annotated[int, Range(1, "dim")]
_Spread = Annotated[int | float, Range(0)]

# --- Theorem 1 of Dana et al. ---------------------------------------------------------------------

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
    rivals = logits.scatter(1, next_tokens[:, None], -math.inf)
    return right - rivals.amax(dim=1)


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

    def attempts(numbers: range, spreads: Sequence[float]) -> Iterator[tuple[AoTWeights, float]]:
        """Weights, each with minus its least margin."""
        for number in numbers:
            # Targets in a proper subspace, or equal ones, may make M singular; jitter prevents it.
            # Each logit moves by at most the jitter, so that the margin loses twice as much.
            jitter = 0.0 if number == 0 else exact_margin / 4
            direction = gaussian(generator, len(sequences), dim)
            targets = W_U[next_tokens] + jitter * direction / direction.norm(dim=1).max()
            spread = spreads[number % len(spreads)]
            transformer = random_aot(*sizes, spread, seed + _SEED_STEP * number)
            weights, _ = _fitted(transformer, W_U, sequences, targets)
            least_margin = float(margins(aot(weights, sequences), next_tokens).min())
            yield weights, -least_margin
            if least_margin >= _ENOUGH * (exact_margin - 2 * jitter):
                return

    weights, shortfall = closest(attempts(range(_FIRST), _SHARP), -math.inf)
    if shortfall >= 0:
        _refuse_short_of_rank(sequences, next_tokens, heads, head_dim, dim)
        weights, shortfall = closest(attempts(range(_FIRST, _MOST), _SOFTER), -math.ulp(0))
    if shortfall >= 0:
        _refuse_rounding(f"{len(sequences)} associations, independent in exact arithmetic,", "some")
    return weights


def _refuse_rounding(task: str, lost: str) -> NoReturn:
    got = f"{task} of which each of {_MOST} draws loses {lost} to rounding"
    refuse("sequences", got, "a better conditioned task: fewer sequences or more heads")


def _refuse_short_of_rank(sequences, next_tokens, heads, head_dim, dim) -> None:
    """Refuse a task that is impossible, and a set of sequences that no weights tell apart."""
    proof = impossible_subset(sequences, next_tokens, heads)
    if proof is not None:
        rows, places = proof.rows.tolist(), "place" if heads == 1 else "places"
        got = f"a task that is impossible for H = {heads} at any d and d_h: the next tokens of the "
        got += f"{len(rows)} sequences {rows}, which end in one token, are orthogonal to all "
        got += f"functions of {heads} {places}"
        refuse("next_tokens", got, "more heads, or other next tokens (see impossible_subset)")
    subset = dependent_subset(sequences, heads, head_dim, dim).tolist()
    if subset:
        rank = offered_rank(sequences, heads, head_dim, dim)
        got = f"T_0 = {len(sequences)} of which H = {heads}, d_h = {head_dim}, d = {dim} offer "
        got += f"rank {rank} at most: no weights make the {len(subset)} sequences {subset} "
        got += "independent"
        expected = "every subset independent (see dependent_subset): more heads, or fewer sequences"
        refuse("sequences", got, f"{expected} that share tokens")


def fitted(
    drawn: tuple[Tensor, ...], W_U: Tensor, sequences: Tensor, targets: Float[Tensor, "T d"]
) -> AoTWeights:
    """Fit a drawn transformer such that the inputs of its last layer are ``targets``, ``E(t)``.

    ``M`` is nearest to the identity, ``W_O`` to zero. Logits are within 1e-6 of the largest one of
    ``W_U E(t)``, or ``ValueError`` says that the offers of this draw have dependent rows, or that
    ``M`` is singular, or so nearly that float64 cannot tell.
    """
    heads, head_dim, dim = drawn[-1].shape
    room = aot_capacity(heads, head_dim, dim)
    if len(sequences) > room:
        refuse("sequences", f"T_0 = {len(sequences)}", f"T_0 <= H d_h + d = {room}")
    weights, F = _fitted(drawn, W_U, sequences, targets)
    logits = targets @ W_U.T
    error = float((aot(weights, sequences) - logits).abs().max() / logits.abs().max())
    if not error <= _MISSED:  # which NaN is not
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
    inverse = torch.linalg.inv_ex(M).inverse  # not finite if M is singular: no margin then
    weights = AoTWeights(
        embedding=embedding @ M.T,
        positions=positions @ M.T,
        W_Q=W_Q @ inverse,
        W_K=W_K @ inverse,
        W_V=W_V @ inverse,
        W_O=solution[dim:].unflatten(0, (heads, head_dim)).mT.contiguous(),
        W_U=W_U,
    )
    return weights, F


# --- heads that cancel ----------------------------------------------------------------------------

# They meet far more. Let token k have the unembedding 2 c_k u - c_k^2 r with distinct c_k, and the
# residual stream the products y(t) with u and z(t) > 0 with r. Its logit 2 c_k y - c_k^2 z is
# largest where c_k is nearest to y / z, so token k is predicted if y = c_k z. The heads write along
# one direction that r does not see, so the skip connection gives z, and
#     y(t) = u^T x(t, S) + sum_h m_h^T A^h(t)
# is to be met (attnmem.theory.cancelling).


def _reach_every_labeling(sequences, next_tokens, vocab, dim, head_dim, groups) -> None:
    _are_told_apart(sequences, next_tokens, vocab)
    rank = cancelling_rank(sequences, groups, head_dim, dim)
    if rank < len(sequences):
        got = f"T_0 = {len(sequences)}, on which heads in the groups {(*groups,)} have a Jacobian "
        expected = "a Jacobian of rank T_0 (see cancelling_rank): more heads, or fewer sequences"
        refuse("sequences", f"{got}of rank {rank}", expected)


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

    def attempts(numbers: range) -> Iterator[tuple[AoTWeights, float]]:
        """Weights, each with minus its least margin."""
        for number in numbers:
            generator = torch.Generator().manual_seed(seed + _SEED_STEP * number)
            embedding = gaussian(generator, vocab, dim) / 2**0.5
            positions = gaussian(generator, sequences.shape[1], dim) / 2**0.5
            # The last coordinate of x(t, S), which is z(t), is at least one.
            positions[-1, -1] = 1 - embedding[sequences[:, -1], -1].min()
            spread = _SOFT[number % len(_SOFT)]
            heads = draw_base(groups, dim, head_dim, spread, generator)
            for weights in _near(heads, embedding, positions, sequences, next_tokens, c):
                yield weights, -float(margins(aot(weights, sequences), next_tokens).min())

    exact_margin = float((c[1] - c[0]) ** 2)
    first = attempts(range(_FIRST_CANCELLING))
    weights, shortfall = closest(first, -_ENOUGH_CANCELLING * exact_margin)
    if shortfall >= 0:
        weights, shortfall = closest(attempts(range(_FIRST_CANCELLING, _MOST)), -math.ulp(0))
    if shortfall >= 0:
        task = f"{len(sequences)} sequences with a Jacobian of full rank,"
        _refuse_rounding(task, "some next token")
    return weights


def _near(heads, embedding, positions, sequences, next_tokens, c) -> Iterator[AoTWeights]:
    """Transformers of logits ``2 c y - c^2 z`` near cancelling heads, with ``y`` near ``c z``."""
    x = embedding[sequences] + positions
    q, z = x[:, -1], x[:, -1, -1]
    # One more head stands for u: it attends to the last token alone, and its maps do not move.
    extended = ScalarHeads(*(pad(W, (0, 0) * (W.ndim - 1) + (0, 1)) for W in heads))
    derivative = tangents(extended, x, q)
    derivative.attended[-1] = q

    def outputs(weights: ScalarHeads) -> Tensor:
        return scalar_outputs(ScalarHeads(*(W[:-1] for W in weights)), x, q) + q @ weights.mu[-1]

    base = linearized(extended, derivative, c[next_tokens] * z)
    if base is None:
        return
    r = torch.eye(q.shape[1], dtype=c.dtype)[-1]  # reads the last coordinate, z
    for stepped, _ in near(base, outputs, c[next_tokens] * z):
        if stepped is None:
            continue
        W_Q, W_K = (W[:-1].mT.contiguous() for W in (stepped.W_Q, stepped.W_K))
        mu, u = stepped.mu[:-1], stepped.mu[-1]
        W_V, W_O = torch.zeros_like(W_Q), torch.zeros_like(stepped.W_Q[:-1])
        W_V[:, 0] = mu
        # The product with u is 1, with r it is 0; if all labels are zero, nothing is written.
        written = u * (1 - r)
        W_O[:, :, 0] = written / (written @ written).clamp(min=torch.finfo(c.dtype).tiny)
        W_U = 2 * c[:, None] * u - c[:, None] ** 2 * r
        yield AoTWeights(embedding, positions, W_Q, W_K, W_V, W_O, W_U)
