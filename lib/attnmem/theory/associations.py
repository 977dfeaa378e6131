"""Token sequences beyond the core: tasks that no weights can do, and heads that cancel.

The construction of Dana et al. is :mod:`attnmem.core.sequences`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from ..checks import Range, Seed, checked, construction, refuse
from ..core.layers import AoTWeights, aot
from ..core.random import gaussian
from ..core.sequences import margins
from ..examples import Sequences, check_associations
from .cancelling import closest, draw_base, linearized, near
from .impossible import impossible_subset
from .sequence_ranks import cancelling_rank, dependent_subset, offered_rank
from .tangents import ScalarHeads, scalar_outputs, tangents

_Dim = Annotated[int, Range(2)]
_HeadDim = Annotated[int, Range(1, "dim")]

_SOFT = (1.0, 2.0, 0.3, 3.0)  # deviations of logits: sharp attention has a small derivative
_FIRST, _MOST = 8, 60  # draws to choose the largest margin from, and at most if none fits
_ENOUGH = 0.9  # share of the exact margin at which no more is tried
_SEED_STEP = 1000  # from the seed of a draw to that of the next

# --- what no weights can do -----------------------------------------------------------------------


@checked
def obstacle(
    sequences: Sequences,
    next_tokens: Int[Tensor, " T"],
    *,
    heads: int,
    head_dim: _HeadDim,
    dim: _Dim,
) -> str | None:
    """Why ``memorize_aot`` refuses a task, in words; None if nothing is in its way.

    Either the task is impossible for all weights, which
    :func:`attnmem.theory.impossible.impossible_subset` proves, or no weights tell its sequences
    apart (:func:`attnmem.theory.sequence_ranks.dependent_subset`). The sequences to blame are named
    by their numbers. Without an obstacle there are weights; float64 may lose their digits.

    Example:
        >>> pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        >>> obstacle(pairs, pairs[:, 0], heads=1, head_dim=9, dim=9)[:41]
        'no weights tell the 7 sequences [0, 1, 2,'
    """
    sizes = f"H = {heads}, d_h = {head_dim}, d = {dim}"
    proof = impossible_subset(sequences, next_tokens, heads)
    if proof is not None:
        rows, places = proof.rows.tolist(), "place" if heads == 1 else "places"
        return (
            f"impossible for H = {heads} at any d and d_h: the next tokens of the {len(rows)} "
            f"sequences {rows}, which end in one token, are orthogonal to all functions of {heads} "
            f"{places}"
        )
    subset = dependent_subset(sequences, heads, head_dim, dim).tolist()
    if subset:
        rank = offered_rank(sequences, heads, head_dim, dim)
        return (
            f"no weights tell the {len(subset)} sequences {subset} apart: all {len(sequences)} "
            f"have rank {rank} at {sizes}"
        )
    return None


# --- heads that cancel ----------------------------------------------------------------------------

# They meet far more. Let token k have the unembedding 2 c_k u - c_k^2 r with distinct c_k, and the
# residual stream the products y(t) with u and z(t) > 0 with r. Its logit 2 c_k y - c_k^2 z is
# largest where c_k is nearest to y / z, so token k is predicted if y = c_k z. The heads write along
# one direction that r does not see, so the skip connection gives z, and
#     y(t) = u^T x(t, S) + sum_h m_h^T A^h(t)
# is to be met (attnmem.theory.cancelling).


def _reach_every_labeling(sequences, next_tokens, vocab, dim, head_dim, groups) -> None:
    check_associations(sequences, next_tokens, vocab)
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
    + d`` for each pair, where :func:`attnmem.core.sequences.memorize_aot`
    serves ``2 d_h``.
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
    first = attempts(range(_FIRST))
    weights, shortfall = closest(first, -_ENOUGH * exact_margin)
    if shortfall >= 0:
        weights, shortfall = closest(attempts(range(_FIRST, _MOST)), -math.ulp(0))
    if shortfall >= 0:
        got = f"{len(sequences)} sequences with a Jacobian of full rank, of which each of {_MOST} "
        got += "draws loses some next token to rounding"
        refuse("sequences", got, "a better conditioned task: fewer sequences or more heads")
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
