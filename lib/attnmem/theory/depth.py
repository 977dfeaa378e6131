r"""Two layers that meet every label of more examples than one layer with all their heads can.

The ``d`` dimensions of the residual stream are shared out. Layer 2 reads its logits in ``e`` of
them, ``S``, where nobody writes. Layer 1 writes into ``c`` others, ``C``, which the values of layer
2 read, and both layers write along the last one, ``w``. So what the first layer writes into ``C``
enters the output *exactly linearly*, through the attention of both layers.

In each layer heads with equal attention form groups whose values along ``w`` cancel, as in
:mod:`attnmem.theory.cancellation`. With steps of size :math:`\tau = \sigma^3` and values
divided by :math:`\tau` the outputs tend to a linear function of the steps, as :math:`\sigma` tends
to zero. Newton's method finds those that meet the labels. In a group of three or more, heads also
differ by :math:`\sigma^2` in directions that the sum along ``w`` does not see. Divided by
:math:`\sigma^2`, the differences of what they write into ``C`` are more functions of the example.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn.functional import pad

from ..checks import Seed, checked, on_cpu, refuse
from ..core.bounds import DeepGroups, deep_groups
from ..core.deep import DeepWeights, Layer, deep
from ..core.memorize import label_spread, read_out
from ..core.random import gaussian
from ..examples import check_data, check_distinct_examples, unit
from .cancellation import draw_base
from .independence import numerical_rank
from .tangents import ScalarHeads, balancing_map

SIZES = (0.3, 0.1, 0.03, 0.01)  # sigma
SPREADS = (2.0, 4.0, 1.0) * 2  # standard deviations of the logits at the base point
STEPS = 40  # of Newton's method
HALVINGS = 10  # of one step
TOLERANCE = 1e-8  # of the labels' spread


# --- the theorem ----------------------------------------------------------------------------------


def _can_be_met(tokens, labels, heads, head_dim, value_dim) -> None:
    """The hypotheses: two layers, a choice for attention, distinct examples, and their number."""
    check_data(tokens=tokens, labels=labels)
    n, d = tokens.shape[1:]
    if n < 2:
        refuse("tokens", "n = 1 token", "at least 2 tokens, so that attention has a choice")
    if d < 2:
        refuse("tokens", "dimension d = 1", "at least 2")
    check_distinct_examples(tokens, tokens[:, -1], labels)
    floor = deep_groups(heads, head_dim, value_dim, d).labels
    if len(labels) > floor:
        room = "the floor of two layers, attnmem.deep_floor"
        refuse("labels", f"T = {len(labels)} examples", f"at most {floor}, {room}")


@on_cpu
@checked(also=_can_be_met)
@torch.no_grad()
def memorize_by_depth(
    tokens: Float[Tensor, "T n d"],
    labels: Float[Tensor, " T"],
    *,
    heads: Sequence[int],
    head_dim: int,
    value_dim: int,
    seed: Seed = 0,
) -> DeepWeights:
    """Build two layers, with skip connections, that meet all labels at the last token.

    The number of examples may be as large as :func:`attnmem.core.bounds.deep_floor`. Every error
    of an output of :func:`attnmem.core.deep.deep` is at most 1e-8 of the labels' spread: half their
    range, or the label if all are equal.

    Args:
        tokens: Own contexts of at least two tokens, in at least two dimensions.
        heads: One number for each of the two layers.

    Raises:
        ValueError: If two examples are equal, ``T`` exceeds the floor, or the data lie in the
            exceptional set, for which the theorem does not speak, or so near that float64 does not
            meet the labels.

    Example:
        >>> X, y = torch.rand(49, 3, 4), torch.rand(49)
        >>> memorize_by_depth(X, y, heads=(4, 2), head_dim=1, value_dim=3).layers[0].W_V.shape
        torch.Size([4, 4, 3])

    Source: this book, the chapter on weights of two layers.
    """
    tokens, labels = tokens.double(), labels.double()
    d = tokens.shape[-1]
    sizes = range(1, sum(heads) + 1)  # of groups, small ones first
    tried = (deep_groups(heads, head_dim, value_dim, d, most=most) for most in sizes)
    groups = next(groups for groups in tried if groups.labels >= len(labels))
    size, scale = unit(tokens), unit(labels)
    change = balancing_map((tokens / size).flatten(0, 1))
    change = change @ balancing_map((tokens / size @ change).flatten(0, 1))
    X, y = tokens / size @ change, labels / scale
    # Logits matter through the differences of an example's tokens, which have this size.
    within = float((X - X.mean(1, keepdim=True)).square().mean().sqrt()) or 1.0
    tolerance = TOLERANCE * (label_spread(y) or 1)
    least, generator = math.inf, torch.Generator().manual_seed(seed)
    for spread, sigma in itertools.product(SPREADS, SIZES):
        base = _draw_base(groups, heads[0], d, head_dim, spread / within, generator)
        step = _newton(base, sigma, X, y, 1e-2 * tolerance)
        network = _outward(_network(base, step, sigma), change, size, head_dim, value_dim)
        network = network._replace(W_D=network.W_D * (scale if labels.any() else 0))
        error = float(((deep(network, tokens)[:, 0] - labels) / scale).abs().max())
        if error <= tolerance:
            return network
        least = min(least, error)  # which leaves out NaN
    _refuse_exceptional(tokens / unit(tokens, (0, 1)), y)
    got = f"data on which float64 errs by {least / tolerance:.1e} times what is allowed"
    return refuse("tokens", got, "tokens further from dependent, scales near one, labels near zero")


def _refuse_exceptional(tokens, labels) -> None:
    """Data for which the theorem does not speak at any precision, where that is quickly seen."""
    d = tokens.shape[-1]
    if (rank := numerical_rank(tokens.flatten(0, 1))) < d:
        refuse("tokens", f"rank {rank} in d = {d} dimensions", f"rank {d}, or fewer labels")
    alike = (tokens == tokens[:, :1]).flatten(1).all(1)  # all attention is one average there
    x, y = tokens[alike, 0], labels[alike, None]
    if (y - x @ torch.linalg.pinv(x) @ y).abs().sum() > 1e-6:
        got = "examples of one repeated token with labels that are not linear in it"
        refuse("tokens", got, "different tokens in an example")


# --- the network ----------------------------------------------------------------------------------


class _Base(NamedTuple):
    """What stays: heads in groups that cancel, and how the values of layer 2 read ``C``."""

    first: ScalarHeads  # logits in all d dimensions, values along w
    apart: Float[Tensor, "H1 d r"]  # changes of the keys that the sum along w does not see
    second: ScalarHeads  # logits and values in S
    read: Float[Tensor, "H2 c"]
    same: Float[Tensor, "H1 H1"]  # the mean over a head's group
    large: Float[Tensor, " H1"]  # one in groups of three heads or more, else zero


class _Step(NamedTuple):
    """What Newton's method finds."""

    first: ScalarHeads
    written: Float[Tensor, "H1 d c"]  # values of layer 1 for C
    second: ScalarHeads
    out: Float[Tensor, " d_minus_1"]  # the read-out in S and C


def _draw_base(groups: DeepGroups, H1, d, head_dim, spread, generator) -> _Base:
    c, sizes = groups.carried, torch.tensor(groups.first or [1] * H1)
    e = d - 1 - c
    if groups.both:  # both layers see S, all but the last coordinate, where nobody writes
        heads = draw_base(groups.both, e, min(head_dim, e), spread, generator)
        maps, second = zip(*(W.split([H1, len(W) - H1]) for W in heads), strict=True)
        first = ScalarHeads(*(pad(W, (0, 0, 0, 1)) for W in maps[:2]), pad(maps[2], (0, 1)))
        second = ScalarHeads(*second)
    else:
        first = draw_base(groups.first, d, min(head_dim, d), spread, generator)
        second = draw_base(groups.second, e, min(head_dim, e), spread, generator)
    # Heads a and b of a group with the values q_a and q_b along w: their keys move by q_b s^T and
    # -q_a s^T. The sum along w sees the symmetric product q_a q_b - q_b q_a = 0.
    apart = torch.zeros_like(first.W_K)
    start = 0
    for size in sizes.tolist():
        s = gaussian(generator, first.W_K.shape[-1])
        for a in range(start, start + min(size - 1, d) // 2 * 2, 2):
            apart[a] = torch.outer(first.mu[a + 1], s)
            apart[a + 1] = -torch.outer(first.mu[a], s)
        start += size
    same = [torch.full((size, size), 1 / size) for size in sizes.tolist()]
    return _Base(
        first,
        apart,
        second,
        gaussian(generator, len(second.mu), c),
        torch.block_diag(*same).double(),
        (sizes > 2).double().repeat_interleave(sizes),
    )


def _network(base: _Base, step: _Step, sigma: float) -> DeepWeights:
    """The plain network after a step. Its coordinates are S, then C, then w."""
    (H1, d, _), (H2, e) = step.written.shape, step.second.mu.shape
    tau = sigma**3
    W_Q = base.first.W_Q + tau * step.first.W_Q
    W_K = base.first.W_K + sigma**2 * base.apart + tau * step.first.W_K
    # The sum of a large group stays, and differences between its heads are divided by sigma^2.
    mean = torch.einsum("hk,kdc->hdc", base.same, step.written)
    into_C = mean + (1 + base.large * (sigma**-2 - 1))[:, None, None] * (step.written - mean)
    # The read-out sees C, too. What it sees there of a head is taken off what the head writes along
    # w, so that no two unknowns are multiplied.
    into_w = base.first.mu / tau + step.first.mu - into_C @ step.out[e:]
    W_V = torch.cat([into_C, into_w[..., None]], -1)
    writes = torch.eye(d).to(W_V)
    first = Layer(W_Q, W_K, W_V, writes[e:].expand(H1, -1, -1))

    moved = base.second.moved(step.second, tau)
    W_Q, W_K = (pad(W, (0, 0, 0, d - e)) for W in (moved.W_Q, moved.W_K))  # they see S alone
    W_V = torch.cat([moved.mu / tau, base.read], -1)
    second = Layer(W_Q, W_K, pad(W_V, (0, 1))[..., None], writes[-1:].expand(H2, -1, -1))
    return DeepWeights((first, second), pad(step.out, (0, 1), value=1.0)[:, None])


def _outward(network: DeepWeights, change, size, head_dim, value_dim) -> DeepWeights:
    """The network on the data that computes what this one computes on ``data / size @ change``."""
    inward, back = change / size, torch.linalg.inv(change) * size
    layers = []
    for layer in network.layers:
        W_Q, W_K = (pad(inward @ W, (0, head_dim - W.shape[-1])) for W in layer[:2])
        idle = value_dim - layer.W_V.shape[-1]
        W_V, W_O = pad(inward @ layer.W_V, (0, idle)), pad(layer.W_O @ back, (0, 0, 0, idle))
        layers.append(Layer(W_Q, W_K, W_V, W_O))
    return DeepWeights(tuple(layers), inward @ network.W_D)


# --- Newton's method ------------------------------------------------------------------------------


def _newton(base: _Base, sigma: float, tokens, labels, tolerance: float) -> _Step:
    """The step with the least error that Newton's method finds from zero, damped."""
    (H1, d), c = base.first.mu.shape, base.read.shape[1]
    zero = [torch.zeros_like(W) for W in (*base.first, *base.second)]
    shapes = *zero[:3], base.read.new_zeros(H1, d, c), *zero[3:], base.read.new_zeros(d - 1)
    sizes = [W.numel() for W in shapes]

    def step(flat: Tensor) -> _Step:
        parts = flat.split(sizes)
        W = [part.view_as(shape) for part, shape in zip(parts, shapes, strict=True)]
        return _Step(ScalarHeads(*W[:3]), W[3], ScalarHeads(*W[4:7]), W[7])

    def output(flat: Tensor, x: Tensor) -> Tensor:
        return deep(_network(base, step(flat), sigma), x)[0]

    outputs, derivative = (vmap(f, (None, 0)) for f in (output, jacrev(output)))
    at = torch.zeros(sum(sizes), dtype=torch.float64)
    residual = labels - outputs(at, tokens)
    for _ in range(STEPS):
        if not residual.abs().max() > tolerance:
            break
        whole = read_out(derivative(at, tokens), residual[:, None])[:, 0]  # J x = residual
        for halvings in range(HALVINGS):
            near = at + whole / 2**halvings
            left = labels - outputs(near, tokens)
            if left.norm() < residual.norm():
                break
        else:
            break
        at, residual = near, left
    return step(at)
