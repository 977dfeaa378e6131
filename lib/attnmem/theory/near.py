r"""Weights for more real labels than Theorem 1: near heads that cancel, and in the attention.

**One layer.** Heads with equal attention whose values sum to zero cancel: the output
:math:`F(\theta_0)` is zero. Near there :math:`F(\theta_0 + \varepsilon \delta) / \varepsilon` tends
to the derivative :math:`J \delta`, and dividing by :math:`\varepsilon` divides the values. So if
``J`` has full row rank, some ``delta`` meets any labels exactly, for small ``eps`` (inverse
function theorem). It is found by correcting ``delta`` with the inverse of :math:`J J^\top`.

**Several layers.** Nobody reads the last coordinate of the tokens, and all heads write along it
alone. So heads of a group attend alike whichever layer they stand in, and the output is zero if
their values sum to zero. Small steps then write into the other coordinates, which later layers
read. Steps of size :math:`\tau` meet the labels when what is written along the last coordinate is
divided by :math:`\tau`. Two layers may also share out the dimensions: layer 2 reads its logits in
``e`` of them, ``S``, where nobody writes; layer 1 writes into ``c`` others, ``C``, which the values
of layer 2 read; and both write along the last one, ``w``, where the values of a group cancel in
each layer. Then :math:`\tau = \sigma^3`, and in a group of three or more heads also differ by
:math:`\sigma^2` (chapter on weights of several layers).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn.functional import pad

from .. import examples
from ..checks import Seed, construction, refuse
from ..core import memorize
from ..core.bounds import DeepGroups, best_groups, deep_floor, deep_groups, group_rank
from ..core.layers import MHAWeights, mha
from ..core.random import gaussian
from ..core.stacked import DeepWeights, Layer, deep
from ..examples import Contexts, Labels, Queries, check_data, unit
from . import tangents
from .independence import numerical_rank
from .tangents import Coordinates, ScalarHeads, balancing_map

_SPREADS = (2.0, 4.0, 1.0, 8.0, 0.5)  # standard deviations of the logits at the base point
_DRAWS = 8  # base points of each spread, for one layer
_FEW = 500  # examples up to which all base points are tried before one is chosen
_FIRST_STEPS = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4)  # their sizes, per weight
_CORRECTIONS = 25
_SIGMAS = (0.3, 0.1, 0.03, 0.01)  # of two layers
_NEWTON, _HALVINGS = 40, 10  # steps of Newton's method, and halvings of one step
_ALLOWED = 1e-8  # error, of the labels' spread
_LOW, _HIGH = 0.25, 0.75  # attention on the carrier for the smallest and the largest label


def closest(tried: Iterable[tuple[Any, float]], enough: float) -> tuple[Any, float]:
    """The weights with the least error, up to the first ones whose error is small enough."""
    best = None, math.inf
    for pair in tried:
        best = min(best, pair, key=lambda pair: pair[1])  # which leaves out NaN
        if best[1] <= enough:
            break
    return best


# --- one layer ------------------------------------------------------------------------------------


def _can_differ(contexts, queries, labels) -> None:
    """No two examples to which every layer gives one output."""
    check_data(contexts=contexts, queries=queries, labels=labels)
    examples.check_distinct_examples(contexts, queries, labels)
    if contexts.shape[-2] < 2:
        refuse("contexts", "n = 1 token", "at least 2 tokens, so that attention has a choice")
    # A context of one repeated token gives one output, whatever the query.
    same = (contexts == contexts[..., :1, :]).flatten(-2).all(-1).expand(len(queries)).tolist()
    rows = contexts[..., 0, :].expand_as(queries).tolist()
    rows = [(*row,) if same[t] else t for t, row in enumerate(rows)]
    examples.check_distinct("contexts of one repeated token", rows, labels.tolist())


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
    return _memorize(contexts, queries, labels, heads, head_dim, seed, lambda h, *_: [2] * (h // 2))


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
    (n, d), d_out = contexts.shape[-2:], labels[0].numel()
    few = contexts.ndim == 2 and n <= d  # shared tokens: a constant is one more function
    keys = n - 1 if few else d  # dimensions that tell tokens apart
    rank, each = min(head_dim, keys), heads // d_out
    groups = grouping(each, keys, d, rank) if each else []
    reached = sum(group_rank(size, keys, d, rank) for size in groups) + few if groups else 0
    if len(queries) > reached:
        room = f"the rank of the derivative where {each} heads cancel in groups of "
        room += str(max(groups, default="two or more"))
        refuse("labels", f"T = {len(queries)} examples", f"at most {reached}, {room}")
    extra, idle = head_dim - rank, heads - sum(groups) * d_out

    def build(contexts, queries, labels) -> MHAWeights:
        layers = [_one_output(contexts, queries, y, groups, rank, seed) for y in labels.T]
        W_Q, W_K, mu = (torch.cat(parts) for parts in zip(*layers, strict=True))
        eye = torch.eye(d_out, dtype=mu.dtype, device=mu.device)
        W_O = pad(eye.repeat_interleave(sum(groups), dim=0), (0, 0, 0, idle))
        maps = [pad(W, (0, extra, 0, 0, 0, idle)) for W in (W_Q, W_K)]
        return MHAWeights(*maps, pad(mu, (0, 0, 0, idle))[..., None], W_O, eye)

    return memorize.build_in_units(build, contexts, queries, labels)


def _one_output(contexts, queries, labels, groups, rank, seed) -> ScalarHeads:
    """The first weights near a base point that meet the labels."""
    own = contexts.reshape(-1, *contexts.shape[-2:])  # for which tokens are centred
    change = Coordinates.balancing(own, queries)
    tokens, balanced = contexts @ change.tokens, queries @ change.queries
    size = unit(labels)  # outputs may differ in scale
    labels = labels / size
    tolerance = _ALLOWED * memorize.label_spread(labels)

    def tried() -> Iterator[tuple[ScalarHeads, float]]:
        g = torch.Generator().manual_seed(seed)
        drawn = (draw_base(groups, len(change.queries), rank, s, g) for s in _SPREADS * _DRAWS)
        moved = (ScalarHeads(*(W.to(queries.device) for W in heads)) for heads in drawn)
        at = ((heads, tangents.tangents(heads, tokens, balanced)) for heads in moved)
        bases = filter(None, (linearized(*point, labels) for point in at))
        # For few examples those with the shortest steps come first.
        for base in bases if len(labels) > _FEW else sorted(bases, key=lambda base: base.size):
            steps = near(base, lambda w: tangents.scalar_outputs(w, tokens, balanced), labels)
            heads, _ = closest(steps, 1e-2 * tolerance)
            if heads:
                heads = change.outward(heads)
                outputs = mha(heads.layer(), contexts, queries)[:, 0]
                yield heads, float((outputs - labels).abs().max())

    heads, error = closest(tried(), tolerance)
    if error <= tolerance:
        return heads._replace(mu=heads.mu * size)
    got = "the derivative of the layer has dependent rows in float64"
    if heads:
        got = f"float64 errs by {error / tolerance:.1e} times what is allowed"
    return refuse("contexts", f"data for which {got}", "queries and tokens further from dependent")


class _Base(NamedTuple):
    """A base point, its derivative, and the shortest direction with the right derivative."""

    heads: ScalarHeads
    at: tangents.Tangents
    factor: Float[Tensor, "T T"]  # of J J^T
    step: ScalarHeads
    size: float  # the root mean square of the direction


def draw_base(groups: Sequence[int], dim: int, rank: int, spread: float, generator) -> ScalarHeads:
    """Heads in groups of equal attention, with Gaussian values that sum to zero in each group.

    Their logits have the deviation ``spread``, for tokens and queries of second moments one.
    """
    drawn = [gaussian(generator, len(groups), dim, rank) for _ in range(2)]
    W_Q, W_K = (torch.linalg.qr(W)[0] for W in drawn)
    W_K = drawn[1] if dim == 1 else W_K  # signs alone would make all heads equal or opposite
    W_K = spread / rank**0.5 * W_K
    values = [gaussian(generator, size, dim) for size in groups]
    maps = (W.repeat_interleave(torch.tensor(groups), dim=0) for W in (W_Q, W_K))
    return ScalarHeads(*maps, torch.cat([mu - mu.mean(0) for mu in values]))


def linearized(
    heads: ScalarHeads, at: tangents.Tangents, labels: Float[Tensor, " T"]
) -> _Base | None:
    """The base point with its derivative; None if that has no full rank in float64."""
    factor, failed = torch.linalg.cholesky_ex(at.gram())
    step = at.transposed(tangents.solved(factor, labels))  # J^T (J J^T)^-1 y
    size = math.sqrt(sum(float(w.square().mean()) for w in step))
    return None if failed else _Base(heads, at, factor, step, size)


def near(
    base: _Base, outputs: Callable[[ScalarHeads], Tensor], labels: Float[Tensor, " T"]
) -> Iterator[tuple[ScalarHeads | None, float]]:
    """For smaller and smaller steps: weights with divided values, and their largest error."""
    if len(labels) and not base.size:  # all labels are zero
        yield base.heads._replace(mu=0 * base.heads.mu), 0.0
    for size in _FIRST_STEPS if base.size else ():
        # The direction is corrected until its error no longer halves.
        best, least, step, eps = None, math.inf, base.step, size / base.size
        for _ in range(_CORRECTIONS):
            heads = _stepped(base.heads, step, eps)
            residual = labels - outputs(heads)
            error = float(residual.abs().max())
            if not error < 0.5 * least:
                break
            best, least = heads, error
            # J^T (J J^T)^-1 r
            step = step.moved(base.at.transposed(tangents.solved(base.factor, residual)))
        yield best, least


def _stepped(heads: ScalarHeads, step: ScalarHeads, eps: float) -> ScalarHeads:
    """The weights of ``F(theta_0 + eps delta) / eps``."""
    moved = heads.moved(step, eps)
    return moved._replace(mu=moved.mu / eps)


# --- labels in the attention ----------------------------------------------------------------------

# Where attention depends on the labels l_s, one head meets d - 1 of them by the product of rank two
#     W_K W_Q^T = g w^T + c u v^T,   w = sum_{s served} l_s f_s .
# Its first part raises the logit of one carrier token, such that the attention on it is the label.
# Its second part separates two idle tokens of equal value, one of which takes all attention on
# every example that the head does not serve. There the head adds only a constant.


def _satisfies_scalars(context, queries, labels, heads) -> None:
    check_data(context=context, queries=queries, labels=labels)
    (n, d), T = context.shape, len(queries)
    if heads * (d - 1) < T:
        refuse("labels", f"T = {T} examples", f"1 <= T <= H (d - 1) = {heads * (d - 1)}")
    if n < 3 or numerical_rank(context, dtype=torch.float64) < n:
        refuse("context", f"{n} tokens", "at least 3 tokens, all independent")
    examples.check_distinct_examples(context, queries, labels)


@construction(also=_satisfies_scalars)
def memorize_scalars(
    context: Float[Tensor, "n d"], queries: Queries, labels: Float[Tensor, " T"], *, heads: int
) -> MHAWeights:
    """Build a layer that reproduces ``T <= H (d - 1)`` scalar labels on one shared context.

    The context has at least three independent tokens, and any ``d`` queries are independent; it
    suffices that no other one lies in the span of the ``d - 1`` that a head serves. The heads have
    width ``d_h = 2``, the values ``d_v = 1``. The only error is that of rounding: where a head is
    idle, its attention off the idle tokens is below the rounding unit. ``ValueError`` says which
    hypothesis fails, or that float64 misses a label by 1e-8 of their spread.

    Source: this book; compare Mahdavi et al. 2024, Proposition 2.
    """

    def build(context: Tensor, queries: Tensor, labels: Tensor) -> MHAWeights:
        # Token 0 is the carrier, tokens 1 and 2 are idle.
        labels = labels[:, 0]
        lowest, width = labels.min(), labels.max() - labels.min()
        # The attention that the carrier is to have.
        share = _LOW + (_HIGH - _LOW) * (labels - lowest) / width.clamp(min=memorize.EPS)
        logit = torch.log((len(context) - 1) * share / (1 - share))
        lift = torch.linalg.pinv(context)  # context @ lift = identity
        carrier, pull = lift[:, 0], lift[:, 1] - lift[:, 2]
        W_Q, W_K = (queries.new_zeros(heads, queries.shape[1], 2) for _ in range(2))
        # The carrier's value spans the width of the labels. All heads share one constant.
        gain = width / (_HIGH - _LOW)
        W_V = (lift.sum(dim=1) * (lowest - _LOW * gain) / heads).repeat(heads, 1)
        generator = torch.Generator().manual_seed(0)
        served = torch.arange(len(queries), device=queries.device).tensor_split(heads)
        for head, group in enumerate(group for group in served if len(group)):
            alone = group[None]  # one head at a time: their groups may differ in size by one
            duals, free = memorize.dual_basis(queries, alone)
            v = memorize.orthogonal_direction(free, queries, alone, generator)
            keys = carrier[:, None] * logit[group]
            c = memorize.saturating_scale(context, queries, alone, duals, keys[None], pull, v)
            W_Q[head] = torch.stack([duals[0] @ logit[group], c.sqrt() * v[0]], dim=1)
            W_K[head] = torch.stack([carrier, c.sqrt() * pull], dim=1)
            W_V[head] += gain * carrier
        ones = W_V.new_ones(heads, 1)
        weights = MHAWeights(W_Q, W_K, W_V[..., None], ones, ones[:1])
        error = float((mha(weights, context, queries)[:, 0] - labels).abs().max())
        if not error <= _ALLOWED * memorize.label_spread(labels):
            got = f"nearly dependent queries, or ones of very different lengths (error {error:.1e})"
            refuse("queries", got, "better conditioned data")
        return weights

    return memorize.build_in_units(build, context, queries, labels)


# --- several layers -------------------------------------------------------------------------------


def _can_be_met(tokens, labels) -> None:
    check_data(tokens=tokens, labels=labels)
    if min(tokens.shape[1:]) < 2:  # attention has no choice
        refuse("tokens", f"shape {(*tokens.shape,)}", "at least 2 tokens, and d >= 2")
    if not tokens.any():
        refuse("tokens", "zeros only", "some other token")
    examples.check_distinct_examples(tokens, tokens[:, -1], labels)


@construction(also=_can_be_met)
def memorize_by_depth(
    tokens: Float[Tensor, "T n d"],
    labels: Float[Tensor, " T"],
    *,
    heads: Sequence[int],
    head_dim: int,
    value_dim: int,
    seed: Seed = 0,
) -> DeepWeights:
    """Build layers, with skip connections, that meet all labels at the last token.

    There may be as many examples as :func:`attnmem.core.bounds.deep_floor` says, of at least two
    tokens and dimensions. Errors are as for :func:`memorize_by_difference`, or ``ValueError`` says
    why not: the data may lie in the exceptional set, or near it (chapter on the weights).
    """
    tokens, labels = tokens.double(), labels.double()
    T, n, d = tokens.shape
    floor = deep_floor(heads, head_dim, value_dim, d, context=n)
    if floor < T:
        room = f"at most {floor}, the floor of these layers for {n} tokens, bounds.deep_floor"
        refuse("labels", f"T = {T} examples", room)
    tried = range(1, sum(heads) + 1)  # heads in a group, as few as serve so many examples
    tried = (deep_groups(heads, head_dim, value_dim, d, context=n, most=most) for most in tried)
    groups = next(groups for groups in tried if groups.labels >= T)
    size, scale = unit(tokens), unit(labels)
    change = balancing_map((tokens / size).flatten(0, 1))
    change = change @ balancing_map((tokens / size @ change).flatten(0, 1))
    X, y = tokens / size @ change, labels / scale
    # Logits matter through the differences of an example's tokens, which have this size.
    within = float((X - X.mean(1, keepdim=True)).square().mean().sqrt()) or 1.0
    tolerance = _ALLOWED * (memorize.label_spread(y) or 1)
    generator = torch.Generator().manual_seed(seed)
    family = _spanning if groups.carried is None else _carrying

    def networks() -> Iterator[tuple[DeepWeights, float]]:
        for spread, sigma in itertools.product(_SPREADS[:3] * 2, _SIGMAS):
            near = family(groups, d, head_dim, value_dim, spread / within, sigma, generator)
            network = _newton(near, X, y, 1e-2 * tolerance)
            network = _outward(network, change / size, groups, heads, head_dim, value_dim)
            network = network._replace(W_D=network.W_D * (scale if labels.any() else 0))
            yield network, float(((deep(network, tokens)[:, 0] - labels) / scale).abs().max())

    network, error = closest(networks(), tolerance)
    if error > tolerance:
        _refuse_exceptional(tokens / unit(tokens, (0, 1)), y, error / tolerance)
    return network


def _refuse_exceptional(tokens, labels, times: float) -> None:
    """Data for which the theorems do not speak at any precision, where that is quickly seen."""
    both = torch.cat([tokens, -tokens])
    try:
        examples.check_distinct_examples(both, both[:, -1], torch.cat([labels, -labels]))
    except ValueError:
        got = "an example and its negative, with labels that are not opposite"
        refuse("tokens", got, "other examples, as without biases outputs are odd")
    unit_rows = torch.nn.functional.normalize(tokens, dim=-1)  # of any scales
    alike = (tokens == tokens[:, :1]).flatten(1).all(1)  # all attention is one average there
    for which, rows, most in (
        ("all tokens", unit_rows.flatten(0, 1), min(tokens.shape[-1], len(tokens))),
        ("the last tokens", unit_rows[:, -1], min(tokens.shape[-1], len(tokens))),
        ("the examples of one repeated token", unit_rows[alike, 0], int(alike.sum())),
    ):
        if (rank := int(torch.linalg.matrix_rank(rows)) if len(rows) else 0) < most:
            got = f"exceptional data, where {which} have rank {rank} in float64"
            refuse("tokens", got, f"rank {most}, or fewer labels")
    got = f"data on which float64 errs by {times:.1e} times what is allowed"
    name = "labels" if (labels.mean() / memorize.label_spread(labels)).abs() > 1e3 else "tokens"
    refuse(name, got, "tokens further from dependent, scales near one, labels near zero")


def _spanning(groups: DeepGroups, d, head_dim, value_dim, spread, sigma, generator):
    """Networks near weights whose groups span the layers, and how many numbers a step has."""
    active = [*filter(None, groups.sizes)]
    # One layer alone may read the last coordinate, too: nobody has written there before.
    m, tau = d - (len(active) > 1), sigma**3
    r, v = min(head_dim, m), min(value_dim, m)
    sizes = [sum(group) for group in zip(*active, strict=True)]
    drawn = draw_base(sizes, m, r, spread, generator)  # one group after the other
    first, layers = [0, *itertools.accumulate(sizes)], []
    for counts in active:
        here = [i + k for i, count in zip(first, counts, strict=False) for k in range(count)]
        first = [i + count for i, count in zip(first, counts, strict=False)]
        W_Q, W_K, mu = (W[here] for W in drawn)
        # Values W_V o are mu along the last coordinate, and W_V is generic besides.
        o = torch.nn.functional.normalize(gaussian(generator, len(here), v), dim=-1)
        W_V = gaussian(generator, len(here), m, v) / m**0.5
        W_V += torch.einsum("hm,hv->hmv", mu - torch.einsum("hmv,hv->hm", W_V, o), o)
        layers += [W_Q, W_K, W_V, pad(o[..., None], (d - 1, 0))]
    base = [*layers, torch.zeros(d - 1, dtype=torch.float64)]
    parts = [W.numel() for W in base]
    along_w = torch.ones(d, dtype=torch.float64)
    along_w[-1] = 1 / tau

    def network(flat: Tensor) -> DeepWeights:
        steps = zip(flat.split(parts), base, strict=True)
        *inner, out = (W + tau * step.view_as(W) for step, W in steps)
        stacked = [
            Layer(*(pad(W, (0, 0, 0, d - m)) for W in inner[i : i + 3]), inner[i + 3] * along_w)
            for i in range(0, len(inner), 4)
        ]
        return DeepWeights(tuple(stacked), pad(out / tau, (0, 1), value=1.0)[:, None])

    return network, sum(parts)


def _carrying(groups: DeepGroups, d, head_dim, value_dim, spread, sigma, generator):
    """The same for groups within each of two layers, in coordinates S, C, w."""
    c = groups.carried
    e, tau = d - 1 - c, sigma**3
    below, above = filter(None, groups.sizes)
    first = draw_base(below, d, min(head_dim, d), spread, generator)
    second = draw_base(above, e, min(head_dim, e), spread, generator)
    # Heads a and b of a group with the values q_a and q_b along w: their keys move by q_b s^T and
    # -q_a s^T. The sum along w sees the symmetric product q_a q_b - q_b q_a = 0.
    start, blocks = 0, []
    for size in below:
        s = gaussian(generator, first.W_K.shape[-1])
        for a in range(start, start + min(size - 1, d) // 2 * 2, 2):
            first.W_K[a] += sigma**2 * torch.outer(first.mu[a + 1], s)
            first.W_K[a + 1] -= sigma**2 * torch.outer(first.mu[a], s)
        start += size
        # The sum of a large group stays, and differences between its heads are divided.
        mean = torch.full((size, size), 1 / size, dtype=torch.float64)
        blocks.append(mean + (torch.eye(size) - mean) / (sigma**2 if size > 2 else 1))
    divided = torch.block_diag(*blocks)
    read = gaussian(generator, len(second.mu), c)  # how the values of layer 2 read C
    shapes = [W.shape for W in (*first, *second)] + [(sum(below), d, c), (d - 1,)]
    sizes = [math.prod(shape) for shape in shapes]
    writes = torch.eye(d, dtype=torch.float64)

    def network(flat: Tensor) -> DeepWeights:
        parts = zip(flat.split(sizes), shapes, strict=True)
        *step, written, out = (part.view(shape) for part, shape in parts)
        W_Q, W_K, mu = _stepped(first, ScalarHeads(*step[:3]), tau)
        into_C = torch.einsum("hk,kdc->hdc", divided, written)
        # The read-out sees C, too. What it sees there of a head is taken off what the head writes
        # along w, so that no two unknowns are multiplied.
        into_w = mu - into_C @ out[e:]
        W_V = torch.cat([into_C, into_w[..., None]], -1)
        lower = Layer(W_Q, W_K, W_V, writes[e:].expand(len(mu), -1, -1))
        *maps, mu = _stepped(second, ScalarHeads(*step[3:]), tau)
        maps = (pad(W, (0, 0, 0, d - e)) for W in maps)  # they see S alone
        W_V = pad(torch.cat([mu, read], -1), (0, 1))[..., None]
        upper = Layer(*maps, W_V, writes[-1:].expand(len(mu), -1, -1))
        return DeepWeights((lower, upper), pad(out, (0, 1), value=1.0)[:, None])

    return network, sum(sizes)


def _outward(network: DeepWeights, inward, groups, heads, head_dim, value_dim) -> DeepWeights:
    """The network on the data that computes what this one computes on ``data @ inward``."""
    back, layers, active = torch.linalg.inv(inward), [], iter(network.layers)
    for H, sizes in zip(heads, groups.sizes, strict=True):
        layer = next(active) if sizes else Layer(*(W[:0] for W in network.layers[0]))
        idle, free = H - len(layer.W_V), value_dim - layer.W_V.shape[-1]
        W_Q, W_K = (pad(inward @ W, (0, head_dim - W.shape[-1], 0, 0, 0, idle)) for W in layer[:2])
        W_V = pad(inward @ layer.W_V, (0, free, 0, 0, 0, idle))
        layers.append(Layer(W_Q, W_K, W_V, pad(layer.W_O @ back, (0, 0, 0, free, 0, idle))))
    return DeepWeights(tuple(layers), inward @ network.W_D)


def _newton(family, tokens, labels, tolerance: float) -> DeepWeights:
    """The network with the least error that Newton's method finds from the base, damped."""
    network, count = family

    def output(flat: Tensor, x: Tensor) -> Tensor:
        return deep(network(flat), x)[0]

    outputs, derivative = (vmap(f, (None, 0)) for f in (output, jacrev(output)))
    at = torch.zeros(count, dtype=torch.float64)
    for _ in range(_NEWTON):
        residual = labels - outputs(at, tokens)
        if not residual.abs().max() > tolerance:
            break
        whole = memorize.read_out(derivative(at, tokens), residual[:, None])[:, 0]  # J x = residual
        shorter = (at + whole / 2**halvings for halvings in range(_HALVINGS))
        better = (x for x in shorter if (labels - outputs(x, tokens)).norm() < residual.norm())
        before, at = at, next(better, at)
        if at is before:
            break
    return network(at)
