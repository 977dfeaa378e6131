r"""Next tokens of sequences, built: Theorem 1 of Dana et al. 2025, and by heads that cancel.

**Theorem 1 for associations**, without a limit. Draw a transformer ``e', pos', W'_Q, W'_K, W'_V``.
It offers the numbers :math:`F(t) = [x'(t, S); W_V'^1 A'^1(t); \dots; W_V'^H A'^H(t)]` for every
sequence ``t``. If these rows are independent, there are ``M`` and ``W_O`` with ``M x'(t, S) + sum_h
W_O^h W_V'^h A'^h(t) = E(t)`` for any ``E(t)``. ``M`` can be moved into the embedding, ``e = M e'``
and ``pos = M pos'``, and out of the heads again, ``W = W' M^{-1}`` for the maps that read ``x``.
Then every attention weight stays as it was, and the output is ``W_U E(t)``.

**Heads that cancel** meet far more. Let token ``k`` have the unembedding :math:`2 c_k u - c_k^2 r`
with distinct :math:`c_k`, and the residual stream the products :math:`y(t)` with ``u`` and
:math:`z(t) > 0` with ``r``. If :math:`y = c_k z`, token ``k`` has the largest logit. The heads
write along one direction that ``r`` does not see, so the skip connection gives ``z``, and
:math:`y(t) = u^\top x(t, S) + \sum_h m_h^\top A^h(t)` is to be met (:mod:`attnmem.theory.near`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ..checks import Range, Seed, check_tokens, checked, on_cpu, refuse
from ..core.bounds import aot_capacity
from ..core.layers import AoTWeights, aot, aot_features, look_up
from ..core.memorize import read_out
from ..core.random import gaussian, map_scale
from ..examples import Sequences, check_data, check_distinct_sequences
from . import sequences as told_apart
from .near import closest, draw_base, linearized, near
from .sequences import Dim, HeadDim
from .tangents import ScalarHeads, scalar_outputs, tangents

_SHARP = (30.0, 10.0, 100.0)  # standard deviations of the drawn logits, tried in turn
_SOFTER = (*_SHARP, 3.0, 6.0, 1.0)  # soft attention tells more sequences apart that share tokens
_FIRST, _MOST = 9, 60  # draws to choose the largest margin from, and at most if none fits
_REFINEMENTS = 3  # the features are worse conditioned than those of the other paper
_SOFT = (1.0, 2.0, 0.3, 3.0) * 2  # for heads that cancel: sharp attention has a small derivative
_Spread = Annotated[int | float, Range(0)]
_ENOUGH = 0.99, 0.9  # shares of the exact margin at which no more is tried, by either construction


@on_cpu
@checked
def circle(vocab: int) -> Float[Tensor, "N 2"]:
    """Unit vectors at equal angles, as in Dana et al. 2025, Proposition 3, for ``d = 2``."""
    angles = 2 * math.pi * torch.arange(vocab, dtype=torch.float64) / vocab
    return torch.stack([angles.cos(), angles.sin()], dim=1)


@on_cpu
@checked
def spread_tokens(vocab: int, dim: Dim, seed: Seed) -> Float[Tensor, "N d"]:
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
    maps = (scale, scale, dim**-0.5)
    return (
        gaussian(generator, vocab, dim) / 2**0.5,
        gaussian(generator, length, dim) / 2**0.5,
        *(size * gaussian(generator, heads, head_dim, dim) for size in maps),
    )


def offered(weights: AoTWeights, sequences: Int[Tensor, "T S"]) -> Float[Tensor, "T d_plus_Hd_h"]:
    """The matrix ``F`` of the proof of Theorem 1, with rows ``[x(t, S); W_V^1 A^1(t); ...]``."""
    x = look_up(weights.embedding, sequences[:, -1:])[:, 0] + weights.positions[-1]
    A = aot_features(weights, sequences).unflatten(-1, (len(weights.W_V), -1))
    return torch.cat([x, torch.einsum("thd,hkd->thk", A, weights.W_V).flatten(1)], dim=1)


def _are_told_apart(sequences, next_tokens, vocab) -> None:
    for name, tokens in (("sequences", sequences), ("next_tokens", next_tokens)):
        check_tokens(name, tokens, vocab)
    check_distinct_sequences(sequences, next_tokens)


def _is_a_task(sequences, next_tokens, vocab, dim, head_dim, heads, unembedding=None) -> None:
    if sequences.shape[1] < 2:
        got = f"S = {sequences.shape[1]}"
        refuse("sequences", got, "S >= 2: a single token attends to nothing but itself")
    _are_told_apart(sequences, next_tokens, vocab)
    room = aot_capacity(heads, head_dim, dim)
    if not 1 <= len(sequences) <= room:
        refuse("sequences", f"T_0 = {len(sequences)}", f"1 <= T_0 <= H d_h + d = {room}")
    if unembedding is None:
        return
    check_data(unembedding=unembedding)
    if unembedding.shape != (vocab, dim):
        refuse("unembedding", f"shape {tuple(unembedding.shape)}", f"shape {(vocab, dim)}")
    rows = unembedding.double()
    if (rows.norm(dim=1) - 1).abs().max() > 1e-6:
        refuse("unembedding", "rows of other lengths", "rows of length one")
    if len(rows.unique(dim=0)) < vocab:
        refuse("unembedding", "equal rows", "pairwise distinct rows")


@on_cpu
@checked(also=_is_a_task)
@torch.no_grad()
def memorize_aot(
    sequences: Sequences,
    next_tokens: Int[Tensor, " T"],
    *,
    vocab: int,
    dim: Dim,
    head_dim: HeadDim,
    heads: int,
    seed: Seed,
    unembedding: Float[Tensor, "N d"] | None = None,
) -> AoTWeights:
    """Build an attention-only transformer that predicts every next token.

    There may be up to ``H d_h + d`` sequences that attention can tell apart, as it usually can
    random ones: :func:`~attnmem.theory.sequences.offered_rank` is their number. In sets that share
    tokens in a regular way, such as all settings of a few bits, some next tokens are beyond any
    weights. ``unembedding`` has distinct rows of length one, by default :func:`spread_tokens`. Of a
    few draws the one with the largest least margin is returned.

    Example:
        >>> pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        >>> sizes = {"vocab": 4, "dim": 2, "head_dim": 2, "heads": 7, "seed": 0}
        >>> weights = memorize_aot(pairs, pairs.sum(1) % 4, **sizes)
        >>> bool((aot(weights, pairs).argmax(-1) == pairs.sum(1) % 4).all())
        True

    Source: Dana et al. 2025, Theorem 1 with epsilon = 0 and Corollary 1, without their limit.
    """
    W_U = spread_tokens(vocab, dim, seed) if unembedding is None else unembedding
    W_U = W_U.to(torch.float64, memory_format=torch.contiguous_format, copy=True)
    products = (W_U @ W_U.T).fill_diagonal_(-math.inf)
    exact_margin = float(1 - products[next_tokens].max())
    generator = torch.Generator().manual_seed(seed)

    def drawn(attempts: range, spreads: Sequence[float]) -> Iterator[tuple[AoTWeights, float]]:
        for attempt in attempts:
            # Targets in a proper subspace, or equal ones, may make M singular; jitter prevents it.
            jitter = exact_margin / 4 if attempt else 0.0
            move = gaussian(generator, len(sequences), dim)  # each logit moves by at most jitter
            targets = W_U[next_tokens] + jitter * move / move.norm(dim=1).max()
            spread = spreads[attempt % len(spreads)]
            sizes = (vocab, sequences.shape[1], dim, head_dim, heads)
            weights = fitted(
                random_aot(*sizes, spread, seed + 1000 * attempt), W_U, sequences, targets
            )
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
    if proof := told_apart.impossible_subset(sequences, next_tokens, heads):
        rows = proof.rows.tolist()
        got = f"a task that is impossible for H = {heads} at any d and d_h: the next tokens of the "
        got += f"{len(rows)} sequences {rows}, which end in one token, are orthogonal to all "
        got += f"functions of {heads} place{'s' * (heads > 1)}"
        refuse("next_tokens", got, "more heads, or other next tokens (see impossible_subset)")
    if subset := told_apart.dependent_subset(sequences, heads, head_dim, dim).tolist():
        offers = told_apart.offered_rank(sequences, heads, head_dim, dim)
        got = f"T_0 = {len(sequences)} of which H = {heads}, d_h = {head_dim}, d = {dim} offer "
        got += f"rank {offers} at most: no weights make the {len(subset)} sequences {subset} "
        wanted = "every subset independent (see dependent_subset): more heads, or fewer sequences "
        refuse("sequences", got + "independent", wanted + "that share tokens")


def fitted(
    drawn: tuple[Tensor, ...], W_U: Tensor, sequences: Tensor, targets: Float[Tensor, "T d"]
) -> AoTWeights:
    """Fit a drawn transformer such that the inputs of its last layer are ``targets``, ``E(t)``.

    ``M`` is nearest to the identity and ``W_O`` to zero. If ``M`` is singular, weights are not
    finite.
    """
    embedding, positions, W_Q, W_K, W_V = drawn
    heads, head_dim, dim = W_V.shape
    silent = W_V.new_zeros(heads, dim, head_dim)
    F = offered(AoTWeights(embedding, positions, W_Q, W_K, W_V, silent, W_U), sequences)
    # M x' + sum_h W_O^h W_V'^h A'^h = E, with M = I + the first rows of the solution
    solution = read_out(F, targets - F[:, :dim], _REFINEMENTS)
    M = torch.eye(dim, dtype=F.dtype) + solution[:dim].T
    W_O = solution[dim:].unflatten(0, (heads, head_dim)).mT.contiguous()
    back = torch.linalg.inv_ex(M).inverse  # not finite if M is singular: no margin then
    return AoTWeights(
        embedding @ M.T, positions @ M.T, W_Q @ back, W_K @ back, W_V @ back, W_O, W_U
    )


# --- by heads that cancel -------------------------------------------------------------------------


def _reach_every_labeling(sequences, next_tokens, vocab, dim, head_dim, groups) -> None:
    _are_told_apart(sequences, next_tokens, vocab)
    rank = told_apart.cancelling_rank(sequences, groups, head_dim, dim)
    if rank < len(sequences):
        got = f"T_0 = {len(sequences)}, on which heads in the groups {(*groups,)} have a Jacobian "
        wanted = "a Jacobian of rank T_0 (see cancelling_rank): more heads, or fewer sequences"
        refuse("sequences", f"{got}of rank {rank}", wanted)


@on_cpu
@checked(also=_reach_every_labeling)
@torch.no_grad()
def memorize_next_tokens(
    sequences: Sequences,
    next_tokens: Int[Tensor, " T"],
    *,
    vocab: Annotated[int, Range(2)],
    dim: Dim,
    head_dim: HeadDim,
    groups: Sequence[int],
    seed: Seed,
) -> AoTWeights:
    """Build an attention-only transformer that predicts every next token, by cancelling heads.

    ``groups`` are the numbers of heads that cancel, such as ``(2, 2)``. For any next tokens they
    serve as many sequences as :func:`~attnmem.theory.sequences.cancelling_rank` says: of random
    ones about ``d_h (2 d - d_h) + d`` for each pair, where :func:`memorize_aot` serves ``2 d_h``
    (see the chapter on token sequences).
    """
    c = torch.linspace(-1, 1, vocab, dtype=torch.float64)

    def drawn() -> Iterator[tuple[AoTWeights, float]]:
        for attempt, spread in enumerate(_SOFT):
            generator = torch.Generator().manual_seed(seed + 1000 * attempt)
            sizes = vocab, sequences.shape[1]
            tables = [gaussian(generator, n, dim) / 2**0.5 for n in sizes]
            # The last coordinate of x(t, S), which is z(t), is at least one.
            tables[1][-1, -1] = 1 - tables[0][sequences[:, -1], -1].min()
            heads = draw_base(groups, dim, head_dim, spread, generator)
            for weights in _near(heads, *tables, sequences, next_tokens, c):
                yield weights, -float(margins(aot(weights, sequences), next_tokens).min())

    exact_margin = float((c[1] - c[0]) ** 2)
    weights, lost = closest(drawn(), -_ENOUGH[1] * exact_margin)
    if lost >= 0:
        got = f"{len(sequences)} sequences with a Jacobian of full rank, of which each of "
        got += f"{len(_SOFT)} draws loses some next token to rounding"
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
