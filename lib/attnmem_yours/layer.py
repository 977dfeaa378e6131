r"""One layer on examples in the dimensions that they have: derivative, ranks and a fit.

Attention sees tokens through their differences within a context, which span ``m`` dimensions, and
queries through the ``q`` dimensions that they span. Values see the differences too. What they see
besides is the same for all tokens of a context, hence the same for all heads: ``c`` linear
functions. So one head contributes :math:`r (m + q - r) + m` parameters, ``r = min(d_h, m, q)``, and
the layer ``c`` more. On free data of one's own ``m = q = d`` and ``c = 0``, which gives ``P(H)``.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import NamedTuple

import scipy
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from attnmem.core import bounds
from attnmem.core.layers import MHAWeights
from attnmem.core.random import gaussian
from attnmem.examples import unit
from attnmem.theory import tangents
from attnmem.theory.fitting import newton
from attnmem.theory.tangents import Coordinates, ScalarHeads, Tangents

from .data import Examples

_BLOCK = 2**16  # vectors that are decomposed at once: 52 MB of width 100
_ROWS = 2048  # examples whose outputs are computed at once
_DRAWN = 512  # examples by which logits of random heads get their deviation
_SMALL = 400  # examples of which singular values are computed; Cholesky's pivots cost less
GRAM = 12_000  # examples beyond which nothing is formed for all pairs: these take 1.2 GB
# Of the largest singular value: what may be rounding in float64, and in units of the precision in
# which numbers came. The coarsest precision, bfloat16, would drop real dimensions by more.
_ROUNDING, _ULPS, _COARSEST = 1e-12, 8, 1e-4
_PATIENCE = 40  # steps in which the squared error must fall by a tenth
# Standard deviations of logits where ranks are computed: rows of the derivative differ clearly at
# sharp attention; blunt attention shows what sharp one hides when it saturates.
_BLUNT, SHARP = 0.5, 4.0
# Pivots that surely suffice: of rows with less beyond the others, float64 may miss labels by 1e-6.
# Chosen on tables of scikit-learn, where all labels are met, those along the weakest axes too.
SURE = 3e-4


class Spectrum(NamedTuple):
    """Directions of some vectors, and the singular values on both sides of the tolerance."""

    axes: Float[Tensor, "d k"]  # orthonormal directions that are used
    sizes: Float[Tensor, " k"]  # root mean square along each
    limits: dict[str, float]  # the least kept, the largest dropped; shares of the largest

    def whitening(self) -> Float[Tensor, "d k"]:
        """A map after which vectors spread alike, but for directions hardly used."""
        return self.axes / self.sizes.clamp(min=1e-3 * float(self.sizes[:1].sum()))


def _spectrum(rows: Float[Tensor, "N d"], rtol: float, scale: float) -> Spectrum:
    """Decompose vectors; singular values are shares of ``scale``, or if it is 0 of the largest."""
    R = rows
    if len(rows) > _BLOCK:  # a triangle has the same singular values and axes
        first, *later = rows.split(_BLOCK)
        R = torch.linalg.qr(first, mode="r").R
        for block in later:
            R = torch.linalg.qr(torch.cat([R, block]), mode="r").R
    _, values, axes = torch.linalg.svd(R, full_matrices=False)
    turned = axes @ torch.linspace(1, 2, R.shape[1]).to(R) < 0  # signs are the same everywhere
    axes = torch.where(turned[:, None], -axes, axes)
    k, kept, dropped = _cutoff(values, rtol, scale or float(values[:1].sum()) or 1.0)
    limits = {"kept": kept, "dropped": dropped, "tolerance": rtol}
    return Spectrum(axes=axes[:k].T, sizes=values[:k] / len(rows) ** 0.5, limits=limits)


def _cutoff(values: Float[Tensor, " k"], rtol: float, top: float) -> tuple[int, float, float]:
    """How many singular values count, and those on both sides, in units of ``top``; 0 if none."""
    shares = [1.0, *(values / top).tolist(), 0.0]
    k = sum(share > rtol for share in shares[1:])
    return k, shares[k], shares[k + 1]


class Dimensions(NamedTuple):
    """How many dimensions the examples have."""

    m: int  # of differences between tokens of a context
    q: int  # of queries
    c: int  # of what all tokens of a context share besides


class Reduction(NamedTuple):
    """The change of coordinates to the dimensions that examples have."""

    dimensions: Dimensions
    spectra: tuple[Spectrum, Spectrum, Spectrum]  # of the m, q and c directions
    maps: Coordinates  # what tokens and queries are multiplied by


def reduced(examples: Examples) -> tuple[Examples, Reduction]:
    """The examples in the dimensions that they have, filled with zeros to one width ``D``.

    Contexts are the ``m`` numbers of each token less the first one of its context. Offsets are
    these first tokens: ``m`` numbers, and the ``c`` that tokens of a context share. There always is
    a mask: heads are then computed one by one, so that equal ones cancel to the last digit.
    """
    precision = torch.finfo(examples.precision).eps
    rtol = max(_ROUNDING, _ULPS * min(precision, _COARSEST))
    # Each coordinate in its own unit, so that small ones do not pass for rounding of large ones.
    token_unit = unit(examples.contexts.flatten(0, -2), (0,))[0]
    query_unit = unit(examples.queries, (0,))[0]
    E, e = examples.contexts / token_unit, examples.queries / query_unit
    if examples.mask is None:
        hidden = torch.zeros(len(e), E.shape[-2], dtype=torch.bool)
        first = E[..., :1, :]
    else:  # the first token that is none of padding
        hidden = examples.mask
        first = E[torch.arange(len(E)), hidden.int().argmin(-1)][:, None]
    differences = E - first
    if not examples.shared:
        differences = differences.masked_fill(hidden[..., None], 0.0)
    first = first.flatten(0, -2)
    moving = _spectrum(differences.flatten(0, -2), rtol, float(torch.linalg.vector_norm(E)))
    asking = _spectrum(e, rtol, 0.0)
    rest = first - (first @ moving.axes) @ moving.axes.T
    common = _spectrum(rest, rtol, float(torch.linalg.vector_norm(first)))
    m, q, c = (spectrum.axes.shape[1] for spectrum in (moving, asking, common))
    D = max(m + c, q, 1)
    token_map = _widened(torch.cat([moving.whitening(), common.whitening()], dim=1), D)
    query_map = _widened(asking.whitening(), D)
    contexts = differences @ token_map
    contexts[..., m:] = 0.0  # but for rounding, it is
    changed = examples._replace(
        contexts=contexts, queries=e @ query_map, mask=hidden, offsets=first @ token_map
    )
    return changed, Reduction(
        dimensions=Dimensions(m, q, c),
        spectra=(moving, asking, common),
        maps=Coordinates(token_map / token_unit[:, None], query_map / query_unit[:, None]),
    )


def _widened(W: Float[Tensor, "d k"], width: int) -> Float[Tensor, "d D"]:
    return pad(W, (0, width - W.shape[1]))


# --- outputs and their derivative -----------------------------------------------------------------


def outputs(weights: MHAWeights, examples: Examples) -> Float[Tensor, "T d_out"]:
    """Outputs of a layer, with padding left out."""
    heads = []
    for start in range(0, len(examples.queries), _ROWS):
        block = examples.some(slice(start, start + _ROWS))
        z = attended(weights.W_Q, weights.W_K, block)
        heads.append(torch.einsum("thd,hdv->thv", z, weights.W_V).flatten(1))
    return torch.cat(heads) @ weights.W_O @ weights.W_D


def attended(W_Q: Tensor, W_K: Tensor, examples: Examples) -> Float[Tensor, "T H d"]:
    """Attended tokens of every head, the offsets of the contexts included."""
    z = tangents.attended(W_Q, W_K, examples.contexts, examples.queries, examples.mask)[1]
    return z if examples.offsets is None else z + examples.offsets[:, None]


def scalar_outputs(heads: ScalarHeads, examples: Examples) -> Float[Tensor, " T"]:
    """One number for each example."""
    return torch.einsum("thd,hd->t", attended(heads.W_Q, heads.W_K, examples), heads.mu)


def derivative(heads: ScalarHeads, examples: Examples) -> Tangents:
    """The derivative of these numbers in all weights, and the numbers."""
    tokens, queries = examples.contexts, examples.queries
    return tangents.tangents(heads, tokens, queries, examples.mask, examples.offsets)


def draw(
    heads: int,
    head_dim: int,
    examples: Examples,
    dimensions: Dimensions,
    spread: float,
    seed: int,
    cancelling: bool = False,
) -> ScalarHeads:
    """Random heads on reduced examples, whose logits have standard deviation ``spread``.

    ``cancelling`` ones stand in groups of equal attention, with values that sum to zero.
    """
    m, q, c = dimensions
    r, D = max(1, min(head_dim, m, q)), examples.queries.shape[1]
    sizes = [1] * heads
    if cancelling:
        n_groups = 1
        if min(m, q):
            n_groups = bounds.most_ranks(heads, min(m, q), max(m, q), r)[1]
        sizes = bounds.group_sizes(heads, n_groups)
    g = torch.Generator().manual_seed(seed)
    shapes = (len(sizes), q, r), (len(sizes), m, r), (heads, m + c, 1)
    drawn = (gaussian(g, *shape) for shape in shapes)
    W_Q, W_K, mu = (pad(W, (0, 0, 0, D - W.shape[1])) for W in drawn)
    mu = mu[..., 0]
    sample = examples.some(torch.arange(min(_DRAWN, len(examples.queries))))
    logits = torch.einsum("te,her,hdr->thd", sample.queries, W_Q, W_K) @ sample.contexts.mT
    scale = (spread / logits.std(correction=0).clamp(min=1e-9)) ** 0.5
    repeats = torch.tensor(sizes)
    W_Q, W_K = (W.mul(scale).repeat_interleave(repeats, dim=0) for W in (W_Q, W_K))
    if cancelling:
        mu = torch.cat([values - values.mean(0) for values in mu.split(sizes)])
    return ScalarHeads(W_Q, W_K, mu / D**0.5)


# --- ranks ----------------------------------------------------------------------------------------


def enough_rows(T: int, ceiling: int, seed: int) -> Int[Tensor, " k"]:
    """All examples, or random ones if there are many: more than the ceiling of the rank."""
    if T <= GRAM:
        return torch.arange(T)
    order = torch.randperm(T, generator=torch.Generator().manual_seed(seed))
    return order[: min(GRAM, ceiling + ceiling // 8 + 50)]


@dataclasses.dataclass(frozen=True)
class Rank:
    """The rank of a derivative on some data, its rows scaled to length one."""

    rank: int  # the number of singular values, or of Cholesky's pivots, above the tolerance
    of: int  # the number of examples that were looked at
    kept: float  # the smallest one that counts
    dropped: float | None  # the largest one that does not; None if unknown, 0 if all count
    tolerance: float  # relative to the largest
    how: str  # singular values or Cholesky


def free_rank(
    heads: int, head_dim: int, examples: Examples, dimensions: Dimensions, seed: int
) -> Rank:
    """The rank at random weights: of sharp or of blunt attention, where float64 sees more."""
    sharp = rank_at(draw(heads, head_dim, examples, dimensions, SHARP, seed), examples)
    if sharp.rank == sharp.of:
        return sharp
    blunt = rank_at(draw(heads, head_dim, examples, dimensions, _BLUNT, seed), examples)
    return max(sharp, blunt, key=lambda rank: rank.rank)


def cancelling_rank(
    heads: int, head_dim: int, examples: Examples, dimensions: Dimensions, seed: int
) -> Rank:
    """The rank where all outputs are zero, of rows by which float64 surely meets labels."""
    base = draw(heads, head_dim, examples, dimensions, SHARP, seed, cancelling=True)
    return rank_at(base, examples, SURE)


def rank_at(heads: ScalarHeads, examples: Examples, least: float | None = None) -> Rank:
    """The rank of the derivative by singular values, or by Cholesky's pivots above ``least``."""
    T = len(examples.queries)
    if T > _SMALL or least:
        least = least or _least_pivot(T)
        rows, kept = independent_rows(heads, examples, least)
        dropped = 0.0 if len(rows) == T else None
        return Rank(len(rows), T, kept, dropped, least, "Cholesky")
    J = torch.cat(derivative(heads, examples).parts(), dim=1)
    J = J / torch.linalg.vector_norm(J, dim=1, keepdim=True).clamp(min=1e-300)
    values, tolerance = torch.linalg.svdvals(J), max(J.shape) * 1e-15
    k, kept, dropped = _cutoff(values, tolerance, max(float(values[0]), 1e-300))
    return Rank(k, T, kept, dropped, tolerance, "singular values")


def _least_pivot(T: int) -> float:
    """What products of rows can tell from zero."""
    return (T * torch.finfo(torch.float64).eps) ** 0.5


def independent_rows(
    heads: ScalarHeads, examples: Examples, least: float | None = None
) -> tuple[Int[Tensor, " k"], float]:
    """Examples of independent rows, by Cholesky's pivots above ``least``, and the last pivot."""
    K, T = derivative(heads, examples).gram(), len(examples.queries)
    size = K.diagonal().clamp(min=1e-300).rsqrt()  # rows of length one, or hardly less,
    size *= torch.linspace(1, 1 - 1e-6, T, dtype=K.dtype)  # so that no tie is the first pivot
    K.mul_(size[:, None]).mul_(size)
    if least:
        factor, failed = torch.linalg.cholesky_ex(K)
        if not failed and (kept := float(factor.diagonal().min())) > least:  # three times as fast
            return torch.arange(T), kept
    tol = (least or _least_pivot(T)) ** 2
    factor, order, rank, _ = scipy.linalg.lapack.dpstrf(K.numpy(), lower=1, tol=tol)
    rows = torch.from_numpy(order.astype("int64"))[:rank] - 1
    return rows, float(factor[rank - 1, rank - 1]) if rank else 0.0


# --- a fit ----------------------------------------------------------------------------------------


def fit(
    heads: ScalarHeads,
    examples: Examples,
    labels: Float[Tensor, " T"],
    *,
    tolerance: float,
    steps: int,
    until: float,
) -> tuple[ScalarHeads, int]:
    """``theory.fitting.levenberg_marquardt`` with padding; the weights, and steps."""
    squares: list[float] = []

    def done(step: int, residual: Tensor) -> bool:
        squares.append(float(residual.square().sum()))
        slow = len(squares) > _PATIENCE and squares[-1] > 0.9 * squares[-_PATIENCE]
        met = float(residual.abs().max()) <= tolerance
        return met or slow or step == steps or time.monotonic() > until

    of_outputs = functools.partial(scalar_outputs, examples=examples)
    of_derivative = functools.partial(derivative, examples=examples)
    step, heads, _ = newton(heads, of_outputs, of_derivative, labels, done)
    return heads, step
