r"""One layer on data in the dimensions that they have: derivative, ranks and a fit.

Attention sees tokens through their differences within a context, which span ``m`` dimensions, and
queries through the ``q`` dimensions that they span. Values see the differences too. What they see
besides is the same for all tokens of a context, hence the same for all heads: ``c`` linear
functions. So one head contributes :math:`r (m + q - r) + m` parameters, ``r = min(d_h, m, q)``, and
the layer ``c`` more. On free data of one's own ``m = q = d`` and ``c = 0``, which gives ``P(H)``.
"""

from __future__ import annotations

import dataclasses
import time
from typing import NamedTuple

import scipy
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from attnmem.core import bounds
from attnmem.examples import unit
from attnmem.theory import tangents
from attnmem.theory.fitting import newton
from attnmem.theory.tangents import Coordinates, ScalarHeads

from .data import Data

_SMALL = 400  # examples of which singular values are computed
GRAM = 12_000  # examples beyond which nothing is formed for all pairs
_PATIENCE = 40  # steps in which the squared error must fall by a tenth
_BLUNT, SHARP = 0.5, 4.0  # standard deviations of logits where ranks are computed
# Pivots that surely suffice: of rows with less beyond the others, float64 may miss labels by 1e-6.
# Chosen on tables of scikit-learn, where all labels are met, those along the weakest axes too.
SURE = 3e-4


class _Spectrum(NamedTuple):
    """Directions of some vectors, and the singular values on both sides of the tolerance."""

    axes: Float[Tensor, "d k"]  # orthonormal directions that are used
    sizes: Float[Tensor, " k"]  # root mean square along each
    limits: dict[str, float]  # the least kept, the largest dropped; shares of the largest

    def whitening(self) -> Float[Tensor, "d k"]:
        """A map after which vectors spread alike, but for directions hardly used."""
        return self.axes / self.sizes.clamp(min=1e-3 * float(self.sizes[:1].sum()))


def _spectrum(rows: Float[Tensor, "N d"], rtol: float, scale: float | None = None) -> _Spectrum:
    """Decompose vectors; singular values are relative to ``scale``, by default to the largest."""
    R = rows
    for part in rows.split(2**16) if len(rows) > 2**16 else ():
        R = torch.linalg.qr(part if R is rows else torch.cat([R, part]), mode="r").R
    _, values, axes = torch.linalg.svd(R, full_matrices=False)
    turned = axes @ torch.linspace(1, 2, R.shape[1]).to(R) < 0  # signs are the same everywhere
    axes = torch.where(turned[:, None], -axes, axes)
    k, kept, dropped = _counted(values, rtol, scale or float(values[:1].sum()) or 1.0)
    limits = {"kept": kept, "dropped": dropped, "tolerance": rtol}
    return _Spectrum(axes[:k].T, values[:k] / len(rows) ** 0.5, limits)


def _counted(values: Float[Tensor, " k"], rtol: float, top: float) -> tuple[int, float, float]:
    """How many singular values count, and those on both sides, in units of ``top``; 0 if none."""
    shares = [1.0, *(values / top).tolist(), 0.0]
    k = sum(share > rtol for share in shares[1:])
    return k, shares[k], shares[k + 1]


class Reduced(NamedTuple):
    """The data in the dimensions that they have, filled with zeros to one width ``D``."""

    contexts: Float[Tensor, "*T n D"]  # each token less the first one of its context: m numbers
    base: Float[Tensor, "T_or_one D"]  # these first tokens: m numbers, and c that contexts share
    queries: Float[Tensor, "T D"]  # q numbers
    mask: Bool[Tensor, "T n"]  # True where a token is padding
    sizes: tuple[int, int, int]  # m, q and c
    maps: tuple[Tensor, Tensor]  # what tokens and queries are multiplied by to get the numbers
    spectra: tuple[_Spectrum, _Spectrum, _Spectrum]  # of the m, q and c directions

    def some(self, rows: Int[Tensor, " k"]) -> Reduced:
        """Some of the examples."""
        own = ("contexts", "base") if self.contexts.ndim == 3 else ()
        return self._replace(**{x: getattr(self, x)[rows] for x in (*own, "queries", "mask")})

    def features(self, W_Q: Tensor, W_K: Tensor) -> Float[Tensor, "T H D"]:
        """Attended tokens of every head, the first ones of the contexts included."""
        z = tangents.attended(W_Q, W_K, self.contexts, self.queries, self.mask)[1]
        return z + self.base[:, None]

    def outputs(self, heads: ScalarHeads) -> Float[Tensor, " T"]:
        """One number for each example."""
        return torch.einsum("thd,hd->t", self.features(heads.W_Q, heads.W_K), heads.mu)

    def tangents(self, heads: ScalarHeads) -> tangents.Tangents:
        """Their derivative in all weights, and the outputs."""
        return tangents.tangents(heads, self.contexts, self.queries, self.mask, self.base)

    def outward(self, heads: ScalarHeads) -> ScalarHeads:
        """The weights for the data as they came."""
        return Coordinates(*self.maps).outward(heads)


def reduced(data: Data) -> Reduced:
    """Find the dimensions that the data have, and change to them."""
    # What is smaller than this share may be rounding of numbers of this precision.
    rtol = max(1e-12, 8 * min(torch.finfo(data.precision).eps, 1e-4))
    # Each coordinate in its own unit, so that small ones do not pass for rounding of large ones.
    sizes = [unit(x.flatten(0, -2), (0,))[0] for x in (data.contexts, data.queries)]
    E, e = data.contexts / sizes[0], data.queries / sizes[1]
    first, hidden = E[..., :1, :], torch.zeros(len(e), E.shape[-2], dtype=torch.bool)
    if data.mask is not None:  # the first token that is none of padding
        hidden = data.mask
        first = E[torch.arange(len(E)), hidden.int().argmin(-1)][:, None]
    apart = E - first
    if not data.shared:
        apart = apart.masked_fill(hidden[..., None], 0.0)
    kept = first.flatten(0, -2)
    moves = _spectrum(apart.flatten(0, -2), rtol, float(torch.linalg.vector_norm(E)) or None)
    asked = _spectrum(e, rtol)
    left = kept - (kept @ moves.axes) @ moves.axes.T
    same = _spectrum(left, rtol, float(torch.linalg.vector_norm(kept)) or None)
    m, q, c = (each.axes.shape[1] for each in (moves, asked, same))
    D = max(m + c, q, 1)
    tokens = torch.cat([moves.whitening(), same.whitening()], dim=1)
    tokens, queries = (pad(W, (0, D - W.shape[1])) for W in (tokens, asked.whitening()))
    contexts = apart @ tokens
    contexts[..., m:] = 0.0  # but for rounding, it is
    maps = tokens / sizes[0][:, None], queries / sizes[1][:, None]
    seen = contexts, kept @ tokens, e @ queries, hidden
    return Reduced(*seen, (m, q, c), maps, (moves, asked, same))


def draw(
    heads: int, head_dim: int, at: Reduced, spread: float, seed: int, groups: bool = False
) -> ScalarHeads:
    """Random heads whose logits have standard deviation ``spread``; ``groups`` of them cancel."""
    m, q, c = at.sizes
    r, D = max(1, min(head_dim, m, q)), at.queries.shape[1]
    sizes = [1] * heads
    if groups:
        count = bounds.most_ranks(heads, min(m, q), max(m, q), r)[1] if min(m, q) else 1
        sizes = bounds.group_sizes(heads, count)
    g = torch.Generator().manual_seed(seed)
    shapes = (len(sizes), q, r), (len(sizes), m, r), (heads, m + c, 1)
    drawn = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes)
    W_Q, W_K, mu = (pad(W, (0, 0, 0, D - W.shape[1])) for W in drawn)
    mu = mu[..., 0]
    few = at.some(torch.arange(min(512, len(at.queries))))
    logits = torch.einsum("te,her,hdr->thd", few.queries, W_Q, W_K) @ few.contexts.mT
    scale = (spread / logits.std(correction=0).clamp(min=1e-9)) ** 0.5
    repeats = torch.tensor(sizes)
    W_Q, W_K = (W.mul(scale).repeat_interleave(repeats, dim=0) for W in (W_Q, W_K))
    if groups:
        mu = torch.cat([part - part.mean(0) for part in mu.split(sizes)])
    return ScalarHeads(W_Q, W_K, mu / D**0.5)


def enough_rows(at: Reduced, heads: int, head_dim: int, seed: int) -> Int[Tensor, " k"]:
    """All examples, or random ones if there are many: more than the rank can be."""
    T, width = len(at.queries), bounds.context_ceiling(heads, head_dim, *at.sizes)
    order = torch.randperm(T, generator=torch.Generator().manual_seed(seed))
    return torch.arange(T) if T <= GRAM else order[: min(GRAM, width + width // 8 + 50)]


@dataclasses.dataclass(frozen=True)
class Rank:
    """The rank of a derivative on some data, its rows scaled to length one."""

    rank: int  # the number of singular values, or of Cholesky's pivots, above the tolerance
    of: int  # the number of examples that were looked at
    kept: float  # the smallest one that counts
    dropped: float | None  # the largest one that does not; None if unknown, 0 if all count
    tolerance: float  # relative to the largest
    how: str  # singular values or Cholesky


def free_rank(heads: int, head_dim: int, at: Reduced, seed: int) -> Rank:
    """The rank at random weights: of sharp or of blunt attention, where float64 sees more."""
    sharp, blunt = (draw(heads, head_dim, at, spread, seed) for spread in (SHARP, _BLUNT))
    found = rank_at(sharp, at)
    full = found.rank == found.of
    return found if full else max(found, rank_at(blunt, at), key=lambda each: each.rank)


def rank_at(heads: ScalarHeads, at: Reduced, least: float | None = None) -> Rank:
    """The rank of the derivative by singular values, or by Cholesky's pivots above ``least``."""
    T = len(at.queries)
    if T > _SMALL or least:
        least = least or _least(T)
        rows, kept = independent_rows(heads, at, least)
        return Rank(len(rows), T, kept, 0.0 if len(rows) == T else None, least, "Cholesky")
    J = torch.cat(at.tangents(heads).parts(), dim=1)
    J = J / torch.linalg.vector_norm(J, dim=1, keepdim=True).clamp(min=1e-300)
    values, least = torch.linalg.svdvals(J), max(J.shape) * 1e-15
    k, kept, dropped = _counted(values, least, max(float(values[0]), 1e-300))
    return Rank(k, T, kept, dropped, least, "singular values")


def _least(T: int) -> float:
    """What products of rows can tell from zero."""
    return (T * torch.finfo(torch.float64).eps) ** 0.5


def independent_rows(
    heads: ScalarHeads, at: Reduced, least: float | None = None
) -> tuple[Int[Tensor, " k"], float]:
    """Examples of independent rows, by Cholesky's pivots above ``least``, and the last pivot."""
    K, T = at.tangents(heads).gram(), len(at.queries)
    size = K.diagonal().clamp(min=1e-300).rsqrt()  # rows of length one, or hardly less,
    size *= torch.linspace(1, 1 - 1e-6, T, dtype=K.dtype)  # so that no tie is the first pivot
    K.mul_(size[:, None]).mul_(size)
    if least:
        factor, failed = torch.linalg.cholesky_ex(K)
        if not failed and (kept := float(factor.diagonal().min())) > least:  # three times as fast
            return torch.arange(T), kept
    tol = (least or _least(T)) ** 2
    factor, order, rank, _ = scipy.linalg.lapack.dpstrf(K.numpy(), lower=1, tol=tol)
    rows = torch.from_numpy(order.astype("int64"))[:rank] - 1
    return rows, float(factor[rank - 1, rank - 1]) if rank else 0.0


def meet(
    heads: ScalarHeads, at: Reduced, labels: Tensor, *, tolerance: float, steps: int, until: float
) -> tuple[ScalarHeads, int]:
    """``theory.fitting.levenberg_marquardt`` with padding; the weights, and steps."""
    squares: list[float] = []

    def done(made: int, residual: Tensor) -> bool:
        squares.append(float(residual.square().sum()))
        slow = len(squares) > _PATIENCE and squares[-1] > 0.9 * squares[-_PATIENCE]
        met = float(residual.abs().max()) <= tolerance
        return met or slow or made == steps or time.monotonic() > until

    made, heads, _ = newton(heads, at.outputs, at.tangents, labels, done)
    return heads, made
