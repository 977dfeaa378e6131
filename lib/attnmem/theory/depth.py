r"""Several layers that meet more real labels than one layer with all their heads.

Imagine that no head reads the last coordinate of the tokens, that all heads write there and nowhere
else, and that the output listens there. Then every layer sees the tokens as they were, so heads of
a group attend alike whichever layer they stand in, and if their values sum to zero over all layers
the output is silent. Now change the weights a little, by steps of size :math:`\tau`. As in one
layer (:mod:`attnmem.theory.cancelling`) the heads no longer cancel. Besides, they begin to write
into the other coordinates, which later layers hear: that is what depth adds. The labels are met
when what is written along the last coordinate is divided by :math:`\tau`.

That is theorem ``thm-depth-span``; how many labels it gives is
:func:`attnmem.theory.deep_bounds.deep_floor`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn.functional import normalize, pad

from .. import examples
from ..checks import Seed, construction, refuse
from ..core import memorize
from ..core.random import gaussian
from ..core.stacked import DeepWeights, Layer, deep
from ..examples import check_data, unit
from .cancelling import closest, draw_base
from .deep_bounds import DeepGroups, deep_floor, deep_groups
from .tangents import balancing_map

__all__ = ["memorize_by_depth"]

# Standard deviations of the logits at the base point, the three that one layer tries first.
_SPREADS = (2.0, 4.0, 1.0)
_DRAWS = 2  # base points of each spread, before the data are refused
# Of the steps tau = sigma^3, from 1/37 to a millionth: the first keeps most digits, the last still
# has ten of them.
_SIGMAS = (0.3, 0.1, 0.03, 0.01)
_NEWTON = 40  # steps, which double the digits near the end: if so many are not enough, none are
_HALVINGS = 10  # of one step, up to a thousandth of it, before it is called useless
_ALLOWED = 1e-8  # error, of the labels' spread: what the docstring promises
_AIM = 1e-2  # of what is allowed, in balanced coordinates: a reserve for the way back to the data
_FAR = 1e3  # a mean of the labels, in spreads, that takes three digits: labels are to blame, then


class Family(NamedTuple):
    """Networks near silent weights, as a function of one vector of steps that all weights take."""

    network: Callable[[Float[Tensor, " P"]], DeepWeights]
    n_steps: int  # P


# --- the construction -----------------------------------------------------------------------------


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

    There may be as many examples as :func:`~attnmem.theory.deep_bounds.deep_floor` says, of at
    least two tokens and dimensions. Errors are as for
    :func:`~attnmem.theory.cancelling.memorize_by_difference`, or ``ValueError`` says why not: the
    data may lie in the exceptional set, or near it (chapter on the weights).
    """
    tokens, labels = tokens.double(), labels.double()
    groups = smallest_groups(heads, head_dim, value_dim, tokens)
    data = balanced(tokens, labels)
    tolerance = _ALLOWED * (memorize.label_spread(data.labels) or 1)
    generator = torch.Generator().manual_seed(seed)

    def attempts() -> Iterator[tuple[DeepWeights, float]]:
        for spread, sigma in itertools.product(_SPREADS * _DRAWS, _SIGMAS):
            logits = spread / data.within
            family = spanning(groups, data.dim, head_dim, value_dim, logits, sigma, generator)
            network = newtons_method(family, data.tokens, data.labels, _AIM * tolerance)
            network = _outward(network, data, groups, heads, head_dim, value_dim)
            errors = (deep(network, tokens)[:, 0] - labels) / data.label_unit
            yield network, float(errors.abs().max())

    network, error = closest(attempts(), tolerance)
    if error > tolerance:
        _refuse_exceptional(tokens / unit(tokens, (0, 1)), data.labels, error / tolerance)
    return network


def smallest_groups(
    heads: Sequence[int], head_dim: int, value_dim: int, tokens: Float[Tensor, "T n d"]
) -> DeepGroups:
    """Groups of as few heads as serve so many examples, which keep the most digits."""
    T, n, d = tokens.shape
    floor = deep_floor(heads, head_dim, value_dim, d, context=n)
    if floor < T:
        room = f"at most {floor}, the floor of these layers for {n} tokens, deep_floor"
        refuse("labels", f"T = {T} examples", room)
    sizes = range(1, sum(heads) + 1)
    grouped = (deep_groups(heads, head_dim, value_dim, d, context=n, most=size) for size in sizes)
    return next(groups for groups in grouped if groups.labels >= T)


class Balanced(NamedTuple):
    """Examples in coordinates in which tokens have second moments of about one."""

    tokens: Float[Tensor, "T n d"]
    labels: Float[Tensor, " T"]
    within: float  # the size of the differences of an example's tokens, through which logits matter
    inward: Float[Tensor, "d d"]  # the data's tokens, times this, are these tokens
    label_unit: Float[Tensor, ""]

    @property
    def dim(self) -> int:
        """The letter d."""
        return self.tokens.shape[-1]


def balanced(tokens: Float[Tensor, "T n d"], labels: Float[Tensor, " T"]) -> Balanced:
    """The examples in such coordinates and in units of their own."""
    size, label_unit = unit(tokens), unit(labels)
    change = balancing_map((tokens / size).flatten(0, 1))
    # Twice, since one map stretches no direction by more than a thousand.
    change = change @ balancing_map((tokens / size @ change).flatten(0, 1))
    X = tokens / size @ change
    within = float((X - X.mean(1, keepdim=True)).square().mean().sqrt())
    return Balanced(X, labels / label_unit, within or 1.0, change / size, label_unit)


def newtons_method(
    family: Family, tokens: Float[Tensor, "T n d"], labels: Float[Tensor, " T"], tolerance: float
) -> DeepWeights:
    """The network with the least error that Newton's method finds from the base, damped."""

    def output(steps: Tensor, x: Tensor) -> Tensor:
        return deep(family.network(steps), x)[0]

    outputs, derivative = (vmap(f, (None, 0)) for f in (output, jacrev(output)))
    steps = torch.zeros(family.n_steps, dtype=torch.float64)
    for _ in range(_NEWTON):
        residual = labels - outputs(steps, tokens)
        if not residual.abs().max() > tolerance:
            break
        J = derivative(steps, tokens)
        change = memorize.read_out(J, residual[:, None])[:, 0]  # the shortest with J x = residual
        for halvings in range(_HALVINGS):
            moved = steps + change / 2**halvings
            if (labels - outputs(moved, tokens)).norm() < residual.norm():
                break
        else:
            break
        steps = moved
    return family.network(steps)


def _outward(
    network: DeepWeights, data: Balanced, groups: DeepGroups, heads, head_dim: int, value_dim: int
) -> DeepWeights:
    """The network on the data that computes what this one computes in balanced coordinates.

    It has all heads, and maps of their full widths; what is idle is zero.
    """
    back, layers, active = torch.linalg.inv(data.inward), [], iter(network.layers)
    silent = Layer(*(W[:0] for W in network.layers[0]))
    for H, sizes in zip(heads, groups.sizes, strict=True):
        layer = next(active) if sizes else silent
        idle, free = H - len(layer.W_V), value_dim - layer.W_V.shape[-1]
        narrower = head_dim - layer.W_Q.shape[-1]
        W_Q = pad(data.inward @ layer.W_Q, (0, narrower, 0, 0, 0, idle))
        W_K = pad(data.inward @ layer.W_K, (0, narrower, 0, 0, 0, idle))
        W_V = pad(data.inward @ layer.W_V, (0, free, 0, 0, 0, idle))
        W_O = pad(layer.W_O @ back, (0, 0, 0, free, 0, idle))
        layers.append(Layer(W_Q, W_K, W_V, W_O))
    label_unit = data.label_unit if data.labels.any() else 0
    return DeepWeights(tuple(layers), data.inward @ network.W_D * label_unit)


def _refuse_exceptional(tokens, labels, times: float) -> None:
    """Data for which the theorem does not speak at any precision, where that is quickly seen."""
    both = torch.cat([tokens, -tokens])
    try:
        examples.check_distinct_examples(both, both[:, -1], torch.cat([labels, -labels]))
    except ValueError:
        got = "an example and its negative, with labels that are not opposite"
        refuse("tokens", got, "other examples, as without biases outputs are odd")
    unit_rows = normalize(tokens, dim=-1)  # of any scales
    repeated = (tokens == tokens[:, :1]).flatten(1).all(1)  # all attention is one average there
    generic = min(tokens.shape[-1], len(tokens))
    for which, rows, full in (
        ("all tokens", unit_rows.flatten(0, 1), generic),
        ("the last tokens", unit_rows[:, -1], generic),
        ("the examples of one repeated token", unit_rows[repeated, 0], int(repeated.sum())),
    ):
        rank = int(torch.linalg.matrix_rank(rows)) if len(rows) else 0
        if rank < full:
            got = f"exceptional data, where {which} have rank {rank} in float64"
            refuse("tokens", got, f"rank {full}, or fewer labels")
    got = f"data on which float64 errs by {times:.1e} times what is allowed"
    far = (labels.mean() / memorize.label_spread(labels)).abs() > _FAR
    expected = "tokens further from dependent, scales near one, labels near zero"
    refuse("labels" if far else "tokens", got, expected)


# --- groups that span the layers ------------------------------------------------------------------


def spanning(
    groups: DeepGroups,
    dim: int,
    head_dim: int,
    value_dim: int,
    spread: float,
    sigma: float,
    generator: torch.Generator,
) -> Family:
    """Networks near weights whose groups span the layers (theorem ``thm-depth-span``)."""
    active = [sizes for sizes in groups.sizes if sizes]
    # One layer alone may read the last coordinate, too: nobody has written there before.
    m = dim - 1 if len(active) > 1 else dim
    tau = sigma**3
    base = _spanning_base(active, dim, m, head_dim, value_dim, spread, generator)
    sizes = [W.numel() for W in base]
    along_w = torch.ones(dim, dtype=torch.float64)
    along_w[-1] = 1 / tau

    def network(steps: Tensor) -> DeepWeights:
        split = zip(base, steps.split(sizes), strict=True)
        *inner, read = (W + tau * step.view_as(W) for W, step in split)
        layers = []
        for i in range(0, len(inner), 4):
            W_Q, W_K, W_V = (pad(W, (0, 0, 0, dim - m)) for W in inner[i : i + 3])
            layers.append(Layer(W_Q, W_K, W_V, inner[i + 3] * along_w))
        return DeepWeights(tuple(layers), pad(read / tau, (0, 1), value=1.0)[:, None])

    return Family(network, sum(sizes))


def _spanning_base(active, dim, m, head_dim, value_dim, spread, generator) -> list[Tensor]:
    """Four maps of each layer, and the read-out on all but the last coordinate, which is zero."""
    r, v = min(head_dim, m), min(value_dim, m)
    sizes = [sum(group) for group in zip(*active, strict=True)]
    drawn = draw_base(sizes, m, r, spread, generator)  # one group after the other
    base = []
    for numbers in places(active):
        W_Q, W_K, mu = (W[numbers] for W in drawn)
        # Values W_V o are mu along the last coordinate, and W_V is generic besides.
        o = normalize(gaussian(generator, len(numbers), v), dim=-1)
        W_V = gaussian(generator, len(numbers), m, v) / m**0.5
        W_V += torch.einsum("hm,hv->hmv", mu - torch.einsum("hmv,hv->hm", W_V, o), o)
        base += [W_Q, W_K, W_V, pad(o[..., None], (dim - 1, 0))]
    return [*base, torch.zeros(dim - 1, dtype=torch.float64)]


def places(layers: Sequence[Sequence[int]]) -> list[list[int]]:
    """The numbers of each layer's heads, from how many it has of each group.

    Heads are numbered group by group, within a group from the first layer to the last.

    Example:
        >>> places([[2, 1], [1, 1]])  # heads 0, 1 and 2 are one group
        [[0, 1, 3], [2, 4]]
    """
    sizes = [sum(group) for group in zip(*layers, strict=True)]
    ends = list(itertools.accumulate(sizes))
    free = [end - size for end, size in zip(ends, sizes, strict=True)]
    numbers = []
    for counts in layers:
        in_layer: list[int] = []
        for group, count in enumerate(counts):
            in_layer += range(free[group], free[group] + count)
            free[group] += count
        numbers.append(in_layer)
    return numbers
