r"""One layer that meets more real labels than Theorem 1: weights near heads that cancel.

Take heads that attend alike, with values that sum to zero, such as two heads with the values
:math:`\mu` and :math:`-\mu`. Together they say nothing: the output :math:`F(\theta_0)` is zero on
all data. Move their weights by a small step :math:`\varepsilon \delta`, and they no longer cancel.
What they then say is almost linear in the step: :math:`F(\theta_0 + \varepsilon \delta) /
\varepsilon` tends to :math:`J \delta`, where ``J`` is the derivative at :math:`\theta_0`, and
dividing by :math:`\varepsilon` divides the values. So the layer is as easy to fit as a linear map
with as many unknowns as ``J`` has independent columns, far more than one head's values.

If ``J`` has full row rank, some ``delta`` meets any labels exactly, for small ``eps`` (inverse
function theorem). The first one is :math:`J^\top (J J^\top)^{-1} y`, and the same inverse corrects
it. How many labels that are is :func:`attnmem.core.bounds.group_rank` of each group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from .. import examples
from ..checks import Seed, construction, refuse
from ..core import memorize
from ..core.bounds import best_groups, group_rank
from ..core.layers import MHAWeights, mha
from ..core.random import gaussian
from ..examples import Contexts, Labels, Queries, check_data, unit
from . import tangents
from .tangents import Coordinates, ScalarHeads

__all__ = ["memorize_by_cancellation", "memorize_by_difference"]
__all__ += ["Base", "closest", "draw_base", "linearized", "near"]

# Standard deviations of the logits at the base point. With 2 attention is neither flat nor
# saturated, and most digits are left; blunter and sharper logits are for data on which it fails.
_SPREADS = (2.0, 4.0, 1.0, 8.0, 0.5)
_DRAWS = 8  # base points of each spread before the data are refused: generous
# Examples up to which all base points are compared before one is chosen, within a second or two:
# each takes a matrix of so many rows and columns. The shortest step loses the fewest digits.
_FEW = 500
# Sizes of a step, per weight, in which it is tried: a long one bends the outputs, a short one
# cancels digits, about as many as it is shorter than one.
_FIRST_STEPS = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4)
_CORRECTIONS = 25  # each at least halves the error: by 3e7 in all, where it starts near one
_ALLOWED = 1e-8  # error, of the labels' spread: what the docstrings promise
_AIM = 1e-2  # of what is allowed, in balanced coordinates: a reserve for the way back to the data


# --- the constructions ----------------------------------------------------------------------------


def _can_differ(contexts, queries, labels) -> None:
    """No two examples to which every layer gives one output."""
    check_data(contexts=contexts, queries=queries, labels=labels)
    examples.check_distinct_examples(contexts, queries, labels)
    if contexts.shape[-2] < 2:
        refuse("contexts", "n = 1 token", "at least 2 tokens, so that attention has a choice")
    # A context of one repeated token gives one output, whatever the query: its token stands for it.
    first_tokens = contexts[..., :1, :]
    repeated = (contexts == first_tokens).flatten(-2).all(-1).expand(len(queries)).tolist()
    tokens = first_tokens[..., 0, :].expand_as(queries).tolist()
    outputs_of: list = list(range(len(queries)))
    for example, token in enumerate(tokens):
        if repeated[example]:
            outputs_of[example] = tuple(token)
    examples.check_distinct("contexts of one repeated token", outputs_of, labels.tolist())


@construction(also=_can_differ)
def memorize_by_difference(
    contexts: Contexts, queries: Queries, labels: Labels, *, heads: int, head_dim: int, seed: Seed
) -> MHAWeights:
    """Build a layer that meets all labels, from differences of two copies of each head.

    Half of the heads stand at weights theta + eps delta, with values divided by eps, and half at
    theta, with values divided by -eps. With ``h = floor(H / 2)`` there may be as many examples as
    :func:`attnmem.core.bounds.own_context_ceiling` of ``h`` heads says, or, for a shared context of
    ``n <= d`` tokens, :func:`attnmem.core.bounds.shared_context_ceiling`. With several outputs,
    each has ``floor(H / d_out)`` heads for itself, at least two; those left over are idle. Values
    have width one, and contexts at least two tokens. Errors are at most 1e-8 of the labels' spread:
    half their range, or the label if all are equal. ``ValueError`` says that examples are equal or
    too many, or lie so near the set where the rank is smaller that float64 misses the labels.
    """

    def pairs(heads: int, keys: int, dim: int, rank: int) -> list[int]:
        return [2] * (heads // 2)

    return _memorize(contexts, queries, labels, heads, head_dim, seed, pairs)


@construction(also=_can_differ)
def memorize_by_cancellation(
    contexts: Contexts, queries: Queries, labels: Labels, *, heads: int, head_dim: int, seed: Seed
) -> MHAWeights:
    """Build a layer that meets all labels, from groups of heads whose values cancel.

    There may be as many examples as :func:`attnmem.core.bounds.own_context_floor` says, or
    :func:`attnmem.core.bounds.shared_context_floor`. An output needs one head for itself. The rest
    is as for :func:`memorize_by_difference`.
    """
    return _memorize(contexts, queries, labels, heads, head_dim, seed, best_groups)


def _memorize(contexts, queries, labels, heads, head_dim, seed, grouping) -> MHAWeights:
    """One layer for each output, side by side."""
    (n, d), outputs = contexts.shape[-2:], labels[0].numel()
    # The tokens of a shared context may all differ: then a constant is one more function.
    independent = contexts.ndim == 2 and n <= d
    keys = n - 1 if independent else d  # dimensions that tell tokens apart
    rank, heads_per_output = min(head_dim, keys), heads // outputs
    groups = grouping(heads_per_output, keys, d, rank) if heads_per_output else []
    room = sum(group_rank(size, keys, d, rank) for size in groups)
    if groups and independent:
        room += 1
    if len(queries) > room:
        sizes = str(max(groups)) if groups else "two or more"
        reason = f"the rank of the derivative where {heads_per_output} heads cancel in groups of"
        refuse("labels", f"T = {len(queries)} examples", f"at most {room}, {reason} {sizes}")

    def build(contexts: Tensor, queries: Tensor, labels: Tensor) -> MHAWeights:
        layers = [one_output(contexts, queries, y, groups, rank, seed) for y in labels.T]
        return side_by_side(layers, heads, head_dim)

    return memorize.build_in_units(build, contexts, queries, labels)


def side_by_side(layers: Sequence[ScalarHeads], heads: int, head_dim: int) -> MHAWeights:
    """Layers of one output as one layer of so many heads, of this width, that has all outputs."""
    W_Q, W_K, mu = (torch.cat(maps) for maps in zip(*layers, strict=True))
    idle, narrower = heads - len(mu), head_dim - W_Q.shape[-1]
    W_Q, W_K = (pad(W, (0, narrower, 0, 0, 0, idle)) for W in (W_Q, W_K))
    W_D = torch.eye(len(layers), dtype=mu.dtype, device=mu.device)
    W_O = W_D.repeat_interleave(len(layers[0].mu), dim=0)  # a head writes to its own output
    return MHAWeights(W_Q, W_K, pad(mu, (0, 0, 0, idle))[..., None], pad(W_O, (0, 0, 0, idle)), W_D)


def one_output(
    contexts: Contexts,
    queries: Queries,
    labels: Float[Tensor, " T"],
    groups: Sequence[int],
    rank: int,
    seed: int,
) -> ScalarHeads:
    """The first weights near a base point that meet the labels of one output."""
    scale = unit(labels)  # outputs may differ in scale
    labels = labels / scale
    tolerance = _ALLOWED * memorize.label_spread(labels)
    attempts = _attempts(contexts, queries, labels, groups, rank, seed, _AIM * tolerance)
    heads, error = closest(attempts, tolerance)
    if error <= tolerance:
        return heads._replace(mu=heads.mu * scale)
    got = "the derivative of the layer has dependent rows in float64"
    if heads is not None:
        got = f"float64 errs by {error / tolerance:.1e} times what is allowed"
    return refuse("contexts", f"data for which {got}", "queries and tokens further from dependent")


def _attempts(contexts, queries, labels, groups, rank, seed, aim) -> Iterator:
    """Weights near one base point after the other, with their error on the data themselves."""
    own_contexts = contexts.reshape(-1, *contexts.shape[-2:])  # for which tokens are centred
    change = Coordinates.balancing(own_contexts, queries)
    tokens, balanced = contexts @ change.tokens, queries @ change.queries

    def outputs(heads: ScalarHeads) -> Tensor:
        return tangents.scalar_outputs(heads, tokens, balanced)

    for base in _bases(tokens, balanced, labels, groups, rank, seed):
        heads, _ = closest(near(base, outputs, labels), aim)
        if heads is not None:
            heads = change.outward(heads)
            answers = mha(heads.layer(), contexts, queries)[:, 0]
            yield heads, float((answers - labels).abs().max())


def _bases(tokens, queries, labels, groups, rank, seed) -> Iterable[Base]:
    """Base points of full rank; for few examples those with the shortest steps come first."""

    def drawn() -> Iterator[Base]:
        generator = torch.Generator().manual_seed(seed)
        for spread in _SPREADS * _DRAWS:
            heads = draw_base(groups, queries.shape[1], rank, spread, generator)
            heads = ScalarHeads(*(W.to(queries.device) for W in heads))
            base = linearized(heads, tangents.tangents(heads, tokens, queries), labels)
            if base is not None:
                yield base

    if len(labels) > _FEW:
        return drawn()
    return sorted(drawn(), key=lambda base: base.size)


# --- steps from heads that cancel -----------------------------------------------------------------


class Base(NamedTuple):
    """A base point, its derivative, and the shortest direction with the right derivative."""

    heads: ScalarHeads
    derivative: tangents.Tangents
    factor: Float[Tensor, "T T"]  # of J J^T
    step: ScalarHeads
    size: float  # the root mean square of the direction


def draw_base(groups: Sequence[int], dim: int, rank: int, spread: float, generator) -> ScalarHeads:
    """Heads in groups of equal attention, with Gaussian values that sum to zero in each group.

    Their logits have the deviation ``spread``, for tokens and queries of second moments one.
    """
    drawn = [gaussian(generator, len(groups), dim, rank) for _ in range(2)]
    W_Q, W_K = (torch.linalg.qr(W)[0] for W in drawn)
    if dim == 1:
        W_K = drawn[1]  # signs alone would make all heads equal or opposite
    W_K = spread / rank**0.5 * W_K
    values = [gaussian(generator, size, dim) for size in groups]
    maps = (W.repeat_interleave(torch.tensor(groups), dim=0) for W in (W_Q, W_K))
    return ScalarHeads(*maps, torch.cat([mu - mu.mean(0) for mu in values]))


def linearized(
    heads: ScalarHeads, derivative: tangents.Tangents, labels: Float[Tensor, " T"]
) -> Base | None:
    """The base point with its derivative; None if that has no full rank in float64."""
    factor, failed = torch.linalg.cholesky_ex(derivative.gram())
    if failed:
        return None
    step = derivative.transposed(tangents.solved(factor, labels))  # J^T (J J^T)^-1 y
    size = math.sqrt(sum(float(W.square().mean()) for W in step))
    return Base(heads, derivative, factor, step, size)


def near(
    base: Base, outputs: Callable[[ScalarHeads], Tensor], labels: Float[Tensor, " T"]
) -> Iterator[tuple[ScalarHeads | None, float]]:
    """For smaller and smaller steps: weights with divided values, and their largest error."""
    if not base.size:
        if len(labels):  # all are zero
            yield base.heads._replace(mu=0 * base.heads.mu), 0.0
        return
    for size in _FIRST_STEPS:
        yield corrected(base, outputs, labels, size / base.size)


def corrected(
    base: Base, outputs: Callable[[ScalarHeads], Tensor], labels: Float[Tensor, " T"], eps: float
) -> tuple[ScalarHeads | None, float]:
    """The weights of one ``eps``, whose direction is corrected until its error no longer halves."""
    best, least, step = None, math.inf, base.step
    for _ in range(_CORRECTIONS):
        heads = stepped(base.heads, step, eps)
        residual = labels - outputs(heads)
        error = float(residual.abs().max())
        if not error < 0.5 * least:
            break
        best, least = heads, error
        correction = base.derivative.transposed(tangents.solved(base.factor, residual))
        step = step.moved(correction)  # delta + J^T (J J^T)^-1 r
    return best, least


def stepped(heads: ScalarHeads, step: ScalarHeads, eps: float) -> ScalarHeads:
    """The weights of ``F(theta_0 + eps delta) / eps``."""
    moved = heads.moved(step, eps)
    return moved._replace(mu=moved.mu / eps)


def closest(attempts: Iterable[tuple[Any, float]], enough: float) -> tuple[Any, float]:
    """The weights with the least error, up to the first ones whose error is small enough."""
    best, least = None, math.inf
    for weights, error in attempts:
        if error < least:  # which leaves out NaN
            best, least = weights, error
        if least <= enough:
            break
    return best, least
