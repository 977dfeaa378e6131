r"""Weights that predict next tokens: Theorem 1 of Dana et al. 2025, for sequences told apart.

``memorize`` chooses what each head looks at. Here nothing is chosen: embeddings, positions and
heads are drawn at random, and the linear maps behind them are solved for. The proof has four steps.

1. *What a draw offers.* After a sequence ``t``, the layer has ``d`` numbers of its last token and
   ``d_h`` of each head. They are a row of a matrix with ``d + H d_h`` columns (:func:`offered`),

   .. math:: F(t) = [x'(t, S);\; W_V'^1 A'^1(t);\; \dots;\; W_V'^H A'^H(t)] .

2. *Any targets.* If the rows are independent, a linear system has a solution for any vectors
   ``E(t)`` that are to reach the unembedding (:func:`solved`):

   .. math:: M x'(t, S) + \sum_h W_O^h W_V'^h A'^h(t) = E(t) .

3. *No transformer has an* ``M`` *behind its skip connection.* But if ``M`` is invertible, it may
   stand in front: embed with ``e = M e'`` and ``pos = M pos'``, and let every map that reads
   tokens undo it, ``W = W' M^-1``. Then ``W x = W' x'``, so each query, key and value is what it
   was, and so is all attention. The skip connection alone passes on ``M x'`` (:func:`moved`).
4. *Targets that name a token.* Let ``E(t)`` be the row of ``W_U`` of the right token. If all rows
   have length one and differ, its logit is 1, and every other one is smaller (Proposition 3,
   :func:`spread_tokens`).

So one fixed attention serves any next tokens, if it makes the rows of ``F`` independent. That takes
``T_0 <= H d_h + d`` sequences, and random ones usually need no more. The paper promises it for all
sequences, which is false: some that share tokens are dependent for all weights, and some tasks are
impossible. :func:`attnmem.theory.associations.obstacle` names such sequences.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import Range, Seed, checked, construction, on_cpu, refuse
from ..examples import Sequences, check_associations
from .bounds import aot_capacity
from .layers import AoTWeights, aot, aot_features, look_up
from .memorize import read_out
from .random import gaussian, map_scale

# Standard deviations of the drawn logits, tried in turn: sharp attention keeps rounding small.
_SHARP = (30.0, 10.0, 100.0)
_SOFTER = (*_SHARP, 3.0, 6.0, 1.0)  # soft attention tells more sequences apart that share tokens
_FIRST = 9  # draws of which the one with the largest margin is kept
_MOST = 60  # draws at most, if none of these predicts all tokens
_ENOUGH = 0.99  # share of the exact margin at which no further draw is tried
_SEED_STEP = 1000  # from the seed of a draw to that of the next
_MISSED = 1e-6  # error of a logit, of the largest: half of the digits, for rows nearly dependent
_REFINEMENTS = 3  # F is worse conditioned than the features of the other paper

_Dim = Annotated[int, Range(2)]
_HeadDim = Annotated[int, Range(1, "dim")]
_Spread = Annotated[int | float, Range(0)]
_Drawn = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # e', pos', W'_Q, W'_K, W'_V
_Offers = Float[Tensor, "T d_plus_Hd_h"]


# --- Step 1: what a draw offers -------------------------------------------------------------------


@on_cpu
@checked
def random_aot(
    vocab: int, length: int, dim: int, head_dim: int, heads: int, spread: _Spread, seed: Seed
) -> _Drawn:
    """Draw ``e', pos', W'_Q, W'_K, W'_V``, Gaussian, for logits of deviation about ``spread``."""
    generator = torch.Generator().manual_seed(seed)
    scale = map_scale(spread, dim, head_dim)
    embedding, positions = (gaussian(generator, rows, dim) / 2**0.5 for rows in (vocab, length))
    W_Q, W_K, W_V = (
        c * gaussian(generator, heads, head_dim, dim) for c in (scale, scale, dim**-0.5)
    )
    return embedding, positions, W_Q, W_K, W_V


def offered(weights: AoTWeights, sequences: Sequences) -> _Offers:
    """The matrix ``F`` of step 1, with rows ``[x(t, S); W_V^1 A^1(t); ...]``."""
    x = look_up(weights.embedding, sequences[:, -1:])[:, 0] + weights.positions[-1]
    A = aot_features(weights, sequences).unflatten(-1, (len(weights.W_V), -1))
    return torch.cat([x, torch.einsum("thd,hkd->thk", A, weights.W_V).flatten(1)], dim=1)


# --- Step 2: any targets --------------------------------------------------------------------------


def solved(
    F: _Offers, targets: Float[Tensor, "T d"], heads: int
) -> tuple[Float[Tensor, "d d"], Float[Tensor, "H d d_h"]]:
    """``M`` and ``W_O`` with ``F [M^T; W_O^T] = E``: ``M`` nearest to 1, ``W_O`` to zero."""
    d = targets.shape[1]
    solution = read_out(F, targets - F[:, :d], _REFINEMENTS)
    M = torch.eye(d, dtype=F.dtype) + solution[:d].T
    return M, solution[d:].unflatten(0, (heads, -1)).mT.contiguous()


# --- Step 3: M moves into the embedding -----------------------------------------------------------


def moved(drawn: _Drawn, M: Float[Tensor, "d d"]) -> _Drawn:
    """``M e', M pos'`` and ``W' M^-1``: the same attention and values, and ``M x'`` for ``x'``.

    They are not finite if ``M`` is singular.
    """
    embedding, positions, W_Q, W_K, W_V = drawn
    inverse = torch.linalg.inv_ex(M).inverse
    return embedding @ M.T, positions @ M.T, W_Q @ inverse, W_K @ inverse, W_V @ inverse


def fitted(
    drawn: _Drawn,
    W_U: Float[Tensor, "N d"],
    sequences: Sequences,
    targets: Float[Tensor, "T d"],
) -> AoTWeights:
    """Fit a draw such that ``targets``, the vectors ``E(t)``, reach the unembedding: steps 1 to 3.

    Logits are within 1e-6 of the largest one of ``W_U E(t)``, or ``ValueError`` says that the rows
    of this draw's ``F`` are dependent, or that ``M`` is singular, or so nearly that float64 cannot
    tell.
    """
    heads, head_dim, dim = drawn[-1].shape
    room = aot_capacity(heads, head_dim, dim)
    if len(sequences) > room:
        refuse("sequences", f"T_0 = {len(sequences)}", f"T_0 <= H d_h + d = {room}")
    weights = _fitted(drawn, W_U, sequences, targets)
    logits = targets @ W_U.T
    error = float((aot(weights, sequences) - logits).abs().max() / logits.abs().max())
    if not error <= _MISSED:  # which NaN is not
        rank = int(torch.linalg.matrix_rank(_offered_by(drawn, W_U, sequences)))
        got = f"a draw whose F has rank {rank} in float64, for {len(sequences)} sequences, "
        got += f"and whose logits miss by {error:.1e} of the largest"
        refuse("drawn", got, "rank T_0 and an invertible M: another draw, more heads")
    return weights


def _fitted(drawn: _Drawn, W_U: Tensor, sequences: Tensor, targets: Tensor) -> AoTWeights:
    """The same, however large the error is."""
    M, W_O = solved(_offered_by(drawn, W_U, sequences), targets, heads=len(drawn[-1]))
    return AoTWeights(*moved(drawn, M), W_O, W_U)


def _offered_by(drawn: _Drawn, W_U: Tensor, sequences: Tensor) -> Tensor:
    silent = torch.zeros_like(drawn[-1].mT)
    return offered(AoTWeights(*drawn, silent, W_U), sequences)


# --- Step 4: targets that name a token ------------------------------------------------------------


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


# --- the theorem ----------------------------------------------------------------------------------


def _is_a_task(sequences, next_tokens, vocab, dim, head_dim, heads) -> None:
    if sequences.shape[1] < 2:
        got = f"S = {sequences.shape[1]}"
        refuse("sequences", got, "S >= 2: a single token attends to nothing but itself")
    check_associations(sequences, next_tokens, vocab)
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

    ``aot(weights, sequences)`` has its largest logit at the next token of each sequence, in
    float64. ``ValueError`` says what is wrong with the sequences, or that no draw tells all of them
    apart. Of some draws the one with the largest least margin is returned.

    Args:
        sequences: ``T_0`` different ones of ``S >= 2`` tokens, numbers below ``vocab``, at most ``H
            d_h + d``. Random ones can usually be told apart, and
            :func:`attnmem.theory.sequence_ranks.offered_rank` says how many of the given ones.
        next_tokens: One for each sequence: any tokens.
        dim: Dimension ``d`` of the embeddings, at least two.
        head_dim: Width ``d_h`` of each head, at most ``d``.

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
    best, best_margin = None, 0.0
    sizes = (vocab, sequences.shape[1], dim, head_dim, heads)
    drawn = random_aot(*sizes, _SHARP[0], seed)
    for number in range(_MOST):
        if number >= _FIRST and best is not None:
            break
        # Targets in a proper subspace, or equal ones, may make M singular; jitter prevents it.
        # Each logit moves by at most the jitter, so that the margin loses twice as much.
        jitter = 0.0 if number == 0 else exact_margin / 4
        direction = gaussian(generator, len(sequences), dim)
        targets = W_U[next_tokens] + jitter * direction / direction.norm(dim=1).max()
        if number > 0:
            spreads = _SHARP if number < _FIRST else _SOFTER
            spread = spreads[number % len(spreads)]
            drawn = random_aot(*sizes, spread, seed + _SEED_STEP * number)
        weights = _fitted(drawn, W_U, sequences, targets)
        margin = float(margins(aot(weights, sequences), next_tokens).min())
        if margin > best_margin:  # which NaN is not, of a singular M
            best, best_margin = weights, margin
        if margin >= _ENOUGH * (exact_margin - 2 * jitter):
            break
    if best is None:  # the last draws are soft, and tell the most apart
        rank = int(torch.linalg.matrix_rank(_offered_by(drawn, W_U, sequences)))
        got = f"T_0 = {len(sequences)}, of which attention tells {rank} apart in float64, and each "
        got += f"of {_MOST} draws misses some"
        named = "attnmem.theory.associations.obstacle names those to blame"
        refuse("sequences", got, f"independent rows of F: more heads, or other sequences ({named})")
    return best
