r"""Weights that meet every label of as many examples as the derivative has rank.

Heads with equal attention whose values sum to zero cancel: the output :math:`F(\theta_0)` is zero
for all data. Near such weights :math:`F(\theta_0 + \varepsilon \delta) / \varepsilon` tends to the
derivative :math:`J \delta`, and dividing by :math:`\varepsilon` divides the values. So if ``J`` has
full row rank, some ``delta`` meets any labels exactly, for small ``eps`` (inverse function
theorem). It is found by correcting ``delta`` with the inverse of :math:`J J^\top`. Groups of two
heads are a difference of two copies; larger ones reach more labels unless ``d`` is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..checks import Seed, checked, on_cpu, refuse
from ..core.bounds import best_groups, group_rank
from ..core.layers import MHAWeights, mha
from ..core.memorize import build_in_units, label_spread
from ..core.random import gaussian
from ..examples import Contexts, Labels, check_data, check_distinct, check_distinct_examples, unit
from .tangents import (
    Coordinates,
    ScalarHeads,
    Tangents,
    balancing_map,
    scalar_outputs,
    solved,
    tangents,
)

SPREADS = (2.0, 4.0, 1.0, 8.0, 0.5)  # standard deviations of the logits at the base point
SIZES = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4)  # of the first step, per weight
DRAWS = 8  # base points of each spread
FEW = 500  # examples up to which all base points are tried before one is chosen
CORRECTIONS = 25
TOLERANCE = 1e-8  # of the labels' spread


def _can_differ(contexts, queries, labels) -> None:
    """No two examples to which every layer gives one output."""
    check_data(contexts=contexts, queries=queries, labels=labels)
    check_distinct_examples(contexts, queries, labels)
    if contexts.shape[-2] < 2:
        refuse("contexts", "n = 1 token", "at least 2 tokens, so that attention has a choice")
    # A context of one repeated token gives one output, whatever the query.
    same = (contexts == contexts[..., :1, :]).flatten(-2).all(-1).expand(len(queries)).tolist()
    rows = contexts[..., 0, :].expand_as(queries).tolist()
    rows = [(*row,) if same[t] else t for t, row in enumerate(rows)]
    check_distinct("contexts of one repeated token", rows, labels.tolist())


@on_cpu
@checked(also=_can_differ)
@torch.no_grad()
def memorize_by_difference(
    contexts: Contexts,
    queries: Float[Tensor, "T d"],
    labels: Labels,
    *,
    heads: int,
    head_dim: int,
    seed: Seed,
) -> MHAWeights:
    """Build a layer that meets all labels, from differences of two copies of each head.

    Half of the heads stand at weights theta + eps delta, with values divided by eps, and half at
    theta, with values divided by -eps. With ``h = floor(H / 2)`` the number of examples may be as
    large as ``P(h)``: :func:`attnmem.core.bounds.own_context_ceiling` for own contexts, and
    :func:`attnmem.core.bounds.shared_context_ceiling` for a shared one of ``n <= d`` tokens.
    :func:`memorize_by_cancellation` reaches more. With several outputs, each has ``floor(H /
    d_out)`` heads for itself, at least two; those left over are idle. Values have width one, and
    contexts at least two tokens. Errors are at most 1e-8 of the labels' spread: half their range,
    or the label if all are equal.

    Raises:
        ValueError: If two examples are equal, ``T`` exceeds what the derivative's rank allows, or
            the data lie so near the set where that rank is smaller that float64 misses the labels.

    Example:
        >>> E, e, y = torch.rand(24, 3, 4), torch.rand(24, 4), torch.rand(24)
        >>> memorize_by_difference(E, e, y, heads=4, head_dim=2, seed=0).W_Q.shape
        torch.Size([4, 4, 2])

    Source: this book, the chapter on the capacity of one layer.
    """
    return _memorize(contexts, queries, labels, heads, head_dim, seed, lambda h, *_: [2] * (h // 2))


@on_cpu
@checked(also=_can_differ)
@torch.no_grad()
def memorize_by_cancellation(
    contexts: Contexts,
    queries: Float[Tensor, "T d"],
    labels: Labels,
    *,
    heads: int,
    head_dim: int,
    seed: Seed,
) -> MHAWeights:
    """Build a layer that meets all labels, from groups of heads whose values cancel.

    The number of examples may be as large as :func:`attnmem.core.bounds.own_context_floor` for own
    contexts, and :func:`attnmem.core.bounds.shared_context_floor` for a shared one. With several
    outputs, each has ``floor(H / d_out)`` heads for itself, at least one. The rest is as for
    :func:`memorize_by_difference`.

    Source: this book, the chapter on the capacity of one layer.
    """
    return _memorize(contexts, queries, labels, heads, head_dim, seed, best_groups)


def _memorize(contexts, queries, labels, heads, head_dim, seed, grouping) -> MHAWeights:
    """One layer for each output, side by side."""
    (n, d), d_out = contexts.shape[-2:], labels[0].numel()
    few = contexts.ndim == 2 and n <= d  # shared tokens: a constant is one more function
    keys = n - 1 if few else d  # dimensions that tell tokens apart
    rank = min(head_dim, keys)
    each = heads // d_out
    groups = grouping(each, keys, d, rank) if each else []
    reached = sum(group_rank(size, keys, d, rank) for size in groups) + few if groups else 0
    if len(queries) > reached:
        room = f"as {each} heads for each output form no group that cancels"
        if groups:
            room = f"the rank of the derivative where {each} heads cancel in groups of "
            room += str(max(groups))
        refuse("labels", f"T = {len(queries)} examples", f"at most {reached}, {room}")
    extra, idle = head_dim - rank, heads - sum(groups) * d_out

    def build(contexts, queries, labels) -> MHAWeights:
        layers = [_one_output(contexts, queries, y, groups, rank, seed) for y in labels.T]
        W_Q, W_K, mu = (torch.cat(parts) for parts in zip(*layers, strict=True))
        eye = torch.eye(d_out, dtype=mu.dtype, device=mu.device)
        outputs = eye.repeat_interleave(sum(groups), dim=0)
        pad = torch.nn.functional.pad
        maps = [pad(W, (0, extra, 0, 0, 0, idle)) for W in (W_Q, W_K)]
        return MHAWeights(
            *maps, pad(mu, (0, 0, 0, idle))[..., None], pad(outputs, (0, 0, 0, idle)), eye
        )

    return build_in_units(build, contexts, queries, labels)


def _one_output(contexts, queries, labels, groups, rank, seed) -> ScalarHeads:
    """The first weights near a base point that meet the labels."""
    tokens = balancing_map(contexts.flatten(0, -2), centred=True)
    change = Coordinates(tokens, balancing_map(queries))
    tokens, balanced = contexts @ change.tokens, queries @ change.queries
    size = unit(labels)  # outputs may differ in scale
    labels = labels / size
    tolerance = TOLERANCE * label_spread(labels)
    if not tolerance:
        maps = queries.new_zeros(sum(groups), queries.shape[1], rank)
        return ScalarHeads(maps, maps, maps[..., 0])
    least = math.inf
    for base in _bases(groups, tokens, balanced, labels, rank, seed):
        heads = _near(base, tokens, balanced, labels, tolerance)
        if heads is None:
            continue
        heads = change.outward(heads)
        error = float((mha(heads.layer(), contexts, queries)[:, 0] - labels).abs().max())
        if error <= tolerance:
            return heads._replace(mu=heads.mu * size)
        least = min(least, error)
    got = f"float64 errs by {least / tolerance:.1e} times what is allowed"
    if least == math.inf:
        got = "the derivative of the layer has dependent rows in float64"
    refuse("contexts", f"data for which {got}", "queries and tokens further from dependent")


class Base(NamedTuple):
    """A base point, its derivative, and the shortest direction with the right derivative."""

    heads: ScalarHeads
    at: Tangents
    factor: Float[Tensor, "T T"]  # of J J^T
    step: ScalarHeads

    def size(self) -> float:
        """The root mean square of the direction."""
        return math.sqrt(sum(float(w.square().mean()) for w in self.step))


def _bases(groups, tokens, queries, labels, rank, seed) -> Iterator[Base]:
    """Base points one by one; for few examples, those with the shortest steps first."""
    g = torch.Generator().manual_seed(seed)
    drawn = (draw_base(groups, queries.shape[1], rank, spread, g) for spread in SPREADS * DRAWS)
    moved = (ScalarHeads(*(W.to(queries.device) for W in heads)) for heads in drawn)
    derived = (linearized(heads, tangents(heads, tokens, queries), labels) for heads in moved)
    bases = filter(None, derived)
    yield from bases if len(labels) > FEW else sorted(bases, key=Base.size)


@on_cpu
def draw_base(
    groups: Sequence[int], dim: int, rank: int, spread: float, generator: torch.Generator
) -> ScalarHeads:
    """Heads in groups of equal attention, with Gaussian values that sum to zero in each group.

    Query and key maps have ``rank`` orthonormal columns, at most ``d``; for ``d = 1`` a key map is
    a Gaussian number. Logits have the standard deviation ``spread``, for tokens and queries of
    second moments one.
    """
    drawn = [gaussian(generator, len(groups), dim, rank) for _ in range(2)]
    W_Q, W_K = (torch.linalg.qr(W)[0] for W in drawn)
    W_K = drawn[1] if dim == 1 else W_K  # signs alone would make all heads equal or opposite
    scale = spread / rank**0.5  # of logits of balanced tokens and queries
    values = [gaussian(generator, size, dim) for size in groups]
    sizes = torch.tensor(groups)
    return ScalarHeads(
        W_Q.repeat_interleave(sizes, dim=0),
        (scale * W_K).repeat_interleave(sizes, dim=0),
        torch.cat([mu - mu.mean(0) for mu in values]),
    )


def linearized(heads: ScalarHeads, at: Tangents, labels: Float[Tensor, " T"]) -> Base | None:
    """The base point with its derivative; None if that has no full rank in float64."""
    factor, failed = torch.linalg.cholesky_ex(at.gram())  # the step is J^T (J J^T)^-1 y
    return None if failed else Base(heads, at, factor, at.transposed(solved(factor, labels)))


def _near(base: Base, tokens, queries, labels, tolerance) -> ScalarHeads | None:
    """The best weights near the base point, with divided values."""
    best, least = None, math.inf
    for heads, error in near(base, lambda w: scalar_outputs(w, tokens, queries), labels):
        if error < least:
            best, least = heads, error
        if least <= 1e-2 * tolerance:
            break
    return best


def near(
    base: Base, outputs: Callable[[ScalarHeads], Tensor], labels: Float[Tensor, " T"]
) -> Iterator[tuple[ScalarHeads | None, float]]:
    """For smaller and smaller steps: weights with divided values, and their largest error."""
    length = base.size()
    for size in SIZES if length else ():
        yield _corrected(base, size / length, outputs, labels)


def _corrected(base: Base, eps: float, outputs, labels) -> tuple[ScalarHeads | None, float]:
    """Correct the direction until its error no longer halves."""
    best, least, step = None, math.inf, base.step
    for _ in range(CORRECTIONS):
        near = base.heads.moved(step, eps)
        heads = near._replace(mu=near.mu / eps)  # F(theta_0 + eps delta) / eps
        residual = labels - outputs(heads)
        error = float(residual.abs().max())
        if not error < 0.5 * least:
            break
        best, least = heads, error
        step = step.moved(base.at.transposed(solved(base.factor, residual)))  # J^T (J J^T)^-1 r
    return best, least
