r"""Next tokens by heads that cancel: far more of them than a linear read-out meets.

One number for each sequence decides its next token. Let token ``k`` have the unembedding :math:`2
c_k u - c_k^2 r` with distinct :math:`c_k`, and let the residual stream have the products
:math:`y(t)` with ``u`` and :math:`z(t) > 0` with ``r``. If :math:`y = c_k z`, token ``k`` has the
largest logit. The heads write along one direction that ``r`` does not see, so ``z`` is what the
skip connection gives, and :math:`y(t) = u^\top x(t, S) + \sum_h m_h^\top A^h(t)` is to be met.

It is met near weights where heads cancel, as in :mod:`attnmem.theory.cancellation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import Range, Seed, check_tokens, checked, on_cpu, refuse
from ..core.layers import AoTWeights, aot
from ..core.random import gaussian
from ..examples import Sequences, check_distinct_sequences
from .dana import draw, margins
from .sequences import Dim, HeadDim, cancelling_rank
from .tangents import ScalarHeads, scalar_outputs, tangents

SPREADS = (1.0, 2.0, 0.3, 3.0)  # of the drawn logits; sharp attention has a small derivative
DRAWS = 8
STEPS = (1e-4, 1e-5, 1e-3, 1e-6, 1e-2, 1e-7)  # sizes of the change, tried in turn
CORRECTIONS = 20
ENOUGH = 0.9  # share of the exact margin at which no other weights are tried
TINY = torch.finfo(torch.float64).tiny  # of a direction that heads do not write in


class Scalars(NamedTuple):
    """The weights of ``y(t)``, or a change of them."""

    u: Float[Tensor, " d"]
    values: Float[Tensor, "H d"]
    W_Q: Float[Tensor, "H d_h d"]
    W_K: Float[Tensor, "H d_h d"]

    def heads(self) -> ScalarHeads:
        """The heads alone, with maps that act from the right."""
        return ScalarHeads(self.W_Q.mT, self.W_K.mT, self.values)


def scalars(x: Float[Tensor, "T S d"], weights: Scalars) -> Float[Tensor, " T"]:
    """The outputs ``y(t)`` on embedded sequences."""
    return x[:, -1] @ weights.u + scalar_outputs(weights.heads(), x, x[:, -1])


def jacobian(x: Float[Tensor, "T S d"], weights: Scalars) -> Float[Tensor, "T p"]:
    """The derivatives of the outputs by all weights, in their order: one row for each sequence."""
    heads = weights.heads()
    *maps, values = tangents(heads, x, x[:, -1]).parts()
    maps = (part.unflatten(1, heads.W_Q.shape).mT.flatten(1) for part in maps)
    return torch.cat([x[:, -1], values, *maps], dim=1)


def _reach_every_labeling(sequences, next_tokens, vocab, dim, head_dim, groups) -> None:
    for name, tokens in (("sequences", sequences), ("next_tokens", next_tokens)):
        check_tokens(name, tokens, vocab)
    check_distinct_sequences(sequences, next_tokens)
    rank = cancelling_rank(sequences, groups, head_dim, dim)
    if rank < len(sequences):
        refuse(
            "sequences",
            f"T_0 = {len(sequences)}, on which heads in the groups {(*groups,)} have a Jacobian of "
            f"rank {rank}",
            "a Jacobian of rank T_0 (see cancelling_rank): more heads, or fewer sequences",
        )


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

    It serves as many distinct sequences as
    :func:`~attnmem.theory.sequences.cancelling_rank` says, for any next tokens. For random
    sequences that is about ``d_h (2 d - d_h) + d`` for each pair of heads, where
    :func:`attnmem.theory.dana.memorize_aot` serves ``2 d_h``. ``groups`` are the numbers of heads
    of each group, ``head_dim`` is at most ``d``, and only one row of each ``W_V`` is not zero.

    Raises:
        ValueError: If the Jacobian's rank is too small, or float64 loses some next token.

    Example:
        >>> pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        >>> sizes = {"vocab": 4, "dim": 4, "head_dim": 2, "seed": 0}
        >>> weights = memorize_next_tokens(pairs, pairs.sum(1) % 4, groups=(2,), **sizes)
        >>> bool((aot(weights, pairs).argmax(-1) == pairs.sum(1) % 4).all())
        True

    Source: this book, the chapter on token sequences.
    """
    c = torch.linspace(-1, 1, vocab, dtype=torch.float64)
    sizes = (vocab, sequences.shape[1], dim, head_dim, len(groups))
    best, largest = None, -math.inf
    for embedding, positions, base in _bases(sequences, sizes, groups, seed):
        x = embedding[sequences] + positions
        z = x[:, -1, -1]
        exact_margin = float((c[1] - c[0]) ** 2 * z.min())
        for solution in _solutions(x, base, labels=c[next_tokens] * z):
            weights = _transformer(embedding, positions, solution, c)
            margin = float(margins(aot(weights, sequences), next_tokens).min())
            if margin > largest:
                best, largest = weights, margin
            if largest > ENOUGH * exact_margin:
                return best
    if best is None or largest <= 0:
        got = f"{len(sequences)} sequences with a Jacobian of full rank, of which each of {DRAWS} "
        got += "draws loses some next token to rounding"
        refuse("sequences", got, "a better conditioned task: fewer sequences or more heads")
    return best


def _bases(sequences, sizes, groups, seed) -> Iterator[tuple[Tensor, Tensor, Scalars]]:
    """Embeddings, positions and cancelling heads. The last coordinate of x(t, S) is positive."""
    group_of_head = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(groups))
    for attempt in range(DRAWS):
        number, spread = seed + 1000 * attempt, SPREADS[attempt % len(SPREADS)]
        embedding, positions, W_Q, W_K, _ = draw(*sizes, spread, number)
        positions[-1, -1] = 1 - embedding[sequences[:, -1], -1].min()
        generator = torch.Generator().manual_seed(number + 1)
        drawn = [gaussian(generator, size, embedding.shape[1]) for size in groups]
        values = torch.cat([m - m.mean(0) for m in drawn])
        u = gaussian(generator, embedding.shape[1])  # a direction to write in, if all labels are 0
        yield embedding, positions, Scalars(u, values, W_Q[group_of_head], W_K[group_of_head])


def _solutions(x: Tensor, base: Scalars, labels: Tensor) -> Iterator[Scalars]:
    """Weights whose outputs are near the labels, one for each size of the change."""
    Q, R = torch.linalg.qr(jacobian(x, base).T)
    for step in STEPS:
        change = 0 * Q[:, 0]
        for _ in range(CORRECTIONS):
            flat = change.split([part.numel() for part in base])
            u, values, W_Q, W_K = (w.view_as(part) for w, part in zip(flat, base, strict=True))
            # All but u move by step times the change, then the values are divided by step.
            maps = base.W_Q + step * W_Q, base.W_K + step * W_K
            weights = Scalars(base.u + u, base.values / step + values, *maps)
            residual = labels - scalars(x, weights)  # corrected by the pseudoinverse Q R^-T
            solved = torch.linalg.solve_triangular(R.T, residual[:, None], upper=False)
            change = change + (Q @ solved)[:, 0]
        yield weights


def _transformer(embedding: Tensor, positions: Tensor, scalars: Scalars, c: Tensor) -> AoTWeights:
    """The transformer whose logits are ``2 c y - c^2 z``, ``z`` the last coordinate of ``x``."""
    heads, head_dim, dim = scalars.W_Q.shape
    r = torch.eye(dim, dtype=c.dtype)[-1]
    written = scalars.u * (1 - r)
    written = written / (written @ written).clamp(min=TINY)  # product 1 with u, 0 with r
    W_V, W_O = c.new_zeros(heads, head_dim, dim), c.new_zeros(heads, dim, head_dim)
    W_V[:, 0], W_O[:, :, 0] = scalars.values, written
    W_U = 2 * c[:, None] * scalars.u - c[:, None] ** 2 * r
    return AoTWeights(embedding, positions, scalars.W_Q, scalars.W_K, W_V, W_O, W_U)
