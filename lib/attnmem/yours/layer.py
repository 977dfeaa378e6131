r"""One layer on data in the dimensions that they have: outputs, derivative, fits.

Attention sees tokens through their differences within a context, which span ``m`` dimensions, and
queries through the ``q`` dimensions that they span. Values see the differences too. What they see
besides is the same for all tokens of a context, hence the same for all heads: ``c`` linear
functions. So one head contributes :math:`r (m + q - r) + m` parameters, ``r = min(d_h, m, q)``, and
the layer ``c`` more. On free data of one's own ``m = q = d`` and ``c = 0``, which gives ``P(H)``.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import scipy
import torch
from jaxtyping import Float, Int
from torch import Tensor

from .data import Data

EXPLICIT, SMALL = 24_000_000, 2_000  # entries, and the smaller side, of what svdvals gets
GRAM = 12_000  # examples beyond which nothing is formed for all pairs
FIRST, LOWEST, HIGHEST = 1e-2, 1e-14, 1e8  # damping, in units of the mean squared row
FALL, RISE = 5.0, 4.0


class Spectrum(NamedTuple):
    """Directions of some vectors, and the singular values on both sides of the tolerance.

    Attributes:
        axes: Orthonormal directions that are used.
        sizes: Root mean square along each.
        kept: The smallest singular value that counts, in units of the largest.
        dropped: The largest one that does not; 0 if there is none.
    """

    axes: Float[Tensor, "d k"]
    sizes: Float[Tensor, " k"]
    kept: float
    dropped: float

    @property
    def rank(self) -> int:
        """Number of directions."""
        return len(self.sizes)

    def whitening(self) -> Float[Tensor, "d k"]:
        """A map after which vectors spread alike, but for directions hardly used."""
        least = 1e-3 * float(self.sizes.max()) if self.rank else 0.0
        return self.axes / self.sizes.clamp(min=least)


def spectrum(rows: Float[Tensor, "N d"], rtol: float, scale: float | None = None) -> Spectrum:
    """Decompose vectors by a QR decomposition and the singular values of its triangle."""
    R = rows
    for part in rows.split(2**16) if len(rows) > 2**16 else ():
        R = torch.linalg.qr(part if R is rows else torch.cat([R, part]), mode="r").R
    _, values, axes = torch.linalg.svd(R, full_matrices=False)
    top = scale or float(values[:1].sum()) or 1.0
    k = int((values > rtol * top).sum())
    shares = [*(values / top).tolist(), 0.0]
    kept = shares[k - 1] if k else 0.0
    return Spectrum(axes[:k].T, values[:k] / len(rows) ** 0.5, kept, shares[k])


class Reduced(NamedTuple):
    """The data in the dimensions that they have.

    Attributes:
        tokens: Tokens in ``m`` coordinates, own or shared.
        queries: Queries in ``q`` coordinates.
        fixed: What all tokens of a context share, ``c`` numbers of each example.
        hidden: Minus infinity at padding, 0 elsewhere; None without padding.
        maps: What tokens, queries and tokens are multiplied by to get the three.
        spectra: Of differences of tokens, queries, and what tokens share.
    """

    tokens: Float[Tensor, "*T n m"]
    queries: Float[Tensor, "T q"]
    fixed: Float[Tensor, "T c"]
    hidden: Float[Tensor, "T 1 n"] | None
    maps: tuple[Tensor, Tensor, Tensor]
    spectra: tuple[Spectrum, Spectrum, Spectrum]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """``m``, ``q`` and ``c``."""
        return self.tokens.shape[-1], self.queries.shape[1], self.fixed.shape[1]

    def some(self, rows: Int[Tensor, " k"]) -> Reduced:
        """Some of the examples."""
        return self._replace(
            tokens=self.tokens if self.tokens.ndim == 2 else self.tokens[rows],
            queries=self.queries[rows],
            fixed=self.fixed[rows],
            hidden=None if self.hidden is None else self.hidden[rows],
        )

    def outward(self, heads: Heads, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """``W_Q``, ``W_K`` and values for the data as they came."""
        tokens, queries, fixed = self.maps
        wider = (0, head_dim - heads.Q.shape[2])
        W_Q, W_K = queries @ heads.Q, tokens @ heads.K
        values = tokens @ heads.mu
        values[0] += fixed @ heads.beta
        return torch.nn.functional.pad(W_Q, wider), torch.nn.functional.pad(W_K, wider), values


def reduced(data: Data) -> Reduced:
    """Find the dimensions that the data have, and change to them."""
    rtol = tolerance(data.precision)
    E, e = data.contexts, data.queries
    first = E[..., :1, :]
    if data.mask is not None:  # the first token that is none of padding
        first = E[torch.arange(len(E)), data.mask.int().argmin(-1)][:, None]
    apart = E - first
    if data.mask is not None:
        apart = torch.where(data.mask[..., None], 0.0, apart)
    size = float(torch.linalg.vector_norm(E)) or 1.0
    moves = spectrum(apart.flatten(0, -2), rtol, size)
    asked = spectrum(e, rtol)
    kept = first.flatten(0, -2)
    left = kept - (kept @ moves.axes) @ moves.axes.T
    scale = float(torch.linalg.vector_norm(kept)) or 1.0
    same = spectrum(left, rtol, scale)
    maps = moves.whitening(), asked.whitening(), same.whitening()
    fixed = (kept @ maps[2]).expand(len(e), -1)
    hidden = None
    if data.mask is not None:
        hidden = torch.zeros(data.mask.shape, dtype=E.dtype).masked_fill(data.mask, -torch.inf)
        hidden = hidden[:, None]
    return Reduced(E @ maps[0], e @ maps[1], fixed, hidden, maps, (moves, asked, same))


def tolerance(precision: torch.dtype) -> float:
    """The relative size below which a direction is rounding of numbers of this precision."""
    return max(1e-12, 8 * min(torch.finfo(precision).eps, 1e-4))


class Heads(NamedTuple):
    """Weights of the layer in these dimensions."""

    Q: Float[Tensor, "H q r"]
    K: Float[Tensor, "H m r"]
    mu: Float[Tensor, "H m o"]
    beta: Float[Tensor, "c o"]

    def moved(self, step: Heads, size: float) -> Heads:
        """The weights after a step."""
        return Heads(*(w + size * s for w, s in zip(self, step, strict=True)))


class Tangents(NamedTuple):
    """Outputs and the vectors whose products are the rows of the derivative, one for each output.

    Row ``t o + k`` belongs to output ``k`` of example ``t``.
    """

    outputs: Float[Tensor, "T o"]
    attended: Float[Tensor, "T H m"]
    pulls: Float[Tensor, "To H m"]
    asked: Float[Tensor, "T H r"]
    keyed: Float[Tensor, "To H r"]
    queries: Float[Tensor, "T q"]
    fixed: Float[Tensor, "T c"]

    def gram(self) -> Float[Tensor, "To To"]:
        """Products of all pairs of rows of the derivative."""
        o = self.outputs.shape[1]
        z, k = self.attended.flatten(1), self.keyed.flatten(1)
        K = z @ z.T
        K.addmm_(self.fixed, self.fixed.T)
        K = K if o == 1 else torch.kron(K, torch.eye(o, dtype=K.dtype))
        e, asked = (x.repeat_interleave(o, dim=0) for x in (self.queries, self.asked))
        K.addcmul_(e @ e.T, k @ k.T)
        for h in range(asked.shape[1]):
            c, q = self.pulls[:, h], asked[:, h]
            K.addcmul_(c @ c.T, q @ q.T)
        return K

    def transposed(self, rows: Float[Tensor, " To"]) -> Heads:
        """The derivative's transpose, applied to one number for each row."""
        each = rows.view_as(self.outputs)
        o = each.shape[1]
        keyed = (rows[:, None, None] * self.keyed).unflatten(0, (-1, o)).sum(1)
        pulls = (rows[:, None, None] * self.pulls).unflatten(0, (-1, o)).sum(1)
        return Heads(
            torch.einsum("te,thk->hek", self.queries, keyed),
            torch.einsum("thm,thk->hmk", pulls, self.asked),
            torch.einsum("to,thm->hmo", each, self.attended),
            self.fixed.T @ each,
        )

    def matrix(self, keys: Float[Tensor, "H m r"]) -> Float[Tensor, "T W"]:
        """The derivative of one output, less columns that a change of basis in a head repeats."""
        across = torch.linalg.qr(keys, mode="complete").Q[..., min(keys.shape[1:]) :]
        pulls = torch.einsum("thm,hmk->thk", self.pulls, across)
        parts = (
            torch.einsum("te,thk->thek", self.queries, self.keyed),
            torch.einsum("thm,thk->thmk", pulls, self.asked),
            self.attended,
        )
        return torch.cat([*(part.flatten(1) for part in parts), self.fixed], dim=1)


def tangents(heads: Heads, at: Reduced) -> Tangents:
    """The derivative of the outputs in all weights, and the outputs."""
    asked, alpha, attended = attend(heads.Q, heads.K, at)
    pulls = [_pulls(mu, alpha, attended, at) for mu in heads.mu.unbind(-1)]
    pulls = torch.stack(pulls, dim=1).flatten(0, 1)
    keyed = torch.einsum("thm,hmr->thr", pulls, heads.K)
    shown = torch.einsum("thm,hmo->to", attended, heads.mu) + at.fixed @ heads.beta
    return Tangents(shown, attended, pulls, asked, keyed, at.queries, at.fixed)


def _pulls(mu: Float[Tensor, "H m"], alpha, attended, at: Reduced) -> Float[Tensor, "T H m"]:
    """The covariance of the tokens under the attention, times the values."""
    centred = mu @ at.tokens.mT - (attended * mu).sum(-1, keepdim=True)
    return (alpha * centred) @ at.tokens


def outputs(heads: Heads, at: Reduced) -> Float[Tensor, "T o"]:
    """One row for each example."""
    z = attend(heads.Q, heads.K, at)[2]
    return torch.einsum("thm,hmo->to", z, heads.mu) + at.fixed @ heads.beta


def attend(
    Q: Float[Tensor, "H q r"], K: Float[Tensor, "H m r"], at: Reduced
) -> tuple[Float[Tensor, "T H r"], Float[Tensor, "T H n"], Float[Tensor, "T H m"]]:
    """What each query asks, the attention weights, and the attended tokens."""
    asked = torch.einsum("te,her->thr", at.queries, Q)
    logits = torch.einsum("thr,hmr->thm", asked, K) @ at.tokens.mT
    alpha = (logits if at.hidden is None else logits + at.hidden).softmax(-1)
    return asked, alpha, alpha @ at.tokens


def draw(
    groups: list[int], head_dim: int, at: Reduced, spread: float, seed: int, outputs: int = 1
) -> Heads:
    """Heads in groups of equal attention, whose values sum to zero; free heads in groups of 0."""
    m, q, c = at.sizes
    r = max(1, min(head_dim, m, q))
    g = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    Q, K = gaussian(len(groups), q, r), gaussian(len(groups), m, r)
    sizes = torch.tensor([max(size, 1) for size in groups])
    values = [gaussian(size, m, outputs) for size in sizes.tolist()]
    values = [mu - mu.mean(0) if size else mu for mu, size in zip(values, groups, strict=True)]
    logits = torch.einsum("te,her,hmr->thm", at.queries[:512], Q, K) @ _centred(at.tokens[:512]).mT
    scale = (spread / logits.std().clamp(min=1e-9)) ** 0.5
    Q, K = (W.mul(scale).repeat_interleave(sizes, dim=0) for W in (Q, K))
    values = torch.cat(values) / max(m, 1) ** 0.5
    return Heads(Q, K, values, torch.zeros(c, outputs, dtype=torch.float64))


def _centred(tokens: Tensor) -> Tensor:
    return tokens - tokens.mean(-2, keepdim=True)


# --- counts ---------------------------------------------------------------------------------------


def ceiling(heads: int, head_dim: int, sizes: tuple[int, int, int], outputs: int = 1) -> int:
    """The parameters that determine the outputs on such data: almost no more labels are met."""
    m, q, c = sizes
    r = min(head_dim, m, q)
    return heads * (r * (m + q - r) + m * outputs) + c * outputs


def floor(heads: int, head_dim: int, sizes: tuple[int, int, int]) -> tuple[int, list[int]]:
    """The largest rank where heads cancel in groups, and the sizes of these groups.

    It is :func:`attnmem.bounds.group_rank` with ``q`` dimensions of queries, which may be fewer
    than those of the tokens.
    """
    m, q, c = sizes
    r = min(head_dim, m, q)

    def group(size: int) -> int:
        p = min(size - 1, m)
        missed = math.comb(p, 2) * r + math.comb(max(p - m + r, 0), 2) * (q - r)
        return p * r * (m + q - r) - missed + m

    def reached(groups: int) -> int:
        small, larger = divmod(heads, groups)
        return larger * group(small + 1) + (groups - larger) * group(small)

    best = max(range(1, heads + 1), key=reached)
    small, larger = divmod(heads, best)
    return reached(best) + c, [small + 1] * larger + [small] * (best - larger)


# --- ranks ----------------------------------------------------------------------------------------


class Rank(NamedTuple):
    """The rank of a derivative on some data.

    Attributes:
        rank: The number of singular values above the tolerance.
        of: The number of examples that were looked at.
        kept: The smallest singular value that counts, relative to the largest.
        dropped: The largest one that does not; 0 if all count.
        how: How it was computed.
    """

    rank: int
    of: int
    kept: float
    dropped: float
    how: str


def rank_at(heads: Heads, at: Reduced) -> Rank:
    """The numerical rank of the derivative, its rows scaled to length one.

    Small ones by singular values; large ones by a pivoted Cholesky decomposition of the products
    of rows, which sees singular values down to about 1e-7 of the largest.
    """
    here = tangents(heads, at)
    T, width = len(here.outputs), ceiling(len(heads.Q), heads.Q.shape[2], at.sizes)
    if T * width <= EXPLICIT and min(T, width) <= SMALL:
        J = here.matrix(heads.K)
        J = J / torch.linalg.vector_norm(J, dim=1, keepdim=True).clamp(min=1e-300)
        values = torch.linalg.svdvals(J)
        shares = [1.0, *(values / values[0]).tolist()]
        k = sum(share > max(J.shape) * 1e-15 for share in shares[1:])
        return Rank(k, T, shares[k], [*shares, 0.0][k + 1], "computed")
    K, least = _scaled(here.gram()), _least(T)
    factor, failed = torch.linalg.cholesky_ex(K)
    if not failed and float(factor.diagonal().min()) > least:  # three times as fast
        kept = float(factor.diagonal().min())
        return Rank(T, T, kept, 0.0, "from a Cholesky decomposition")
    _, steps = _pivoted(K)
    kept = float(steps[-1]) if len(steps) else 0.0
    return Rank(len(steps), T, kept, least, "from a pivoted Cholesky decomposition")


def _scaled(K: Float[Tensor, "T T"]) -> Float[Tensor, "T T"]:
    size = K.diagonal().clamp(min=1e-300).rsqrt()
    return K.mul_(size[:, None]).mul_(size)


def _least(T: int) -> float:
    """What products of rows can tell from zero."""
    return (T * torch.finfo(torch.float64).eps) ** 0.5


def _pivoted(K: Float[Tensor, "T T"]) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"]]:
    """The order of the pivots of a Cholesky decomposition, and their sizes."""
    tol = _least(len(K)) ** 2
    factor, order, rank, _ = scipy.linalg.lapack.dpstrf(K.numpy(), lower=1, tol=tol)
    pivots = torch.from_numpy(order.astype("int64"))[:rank] - 1
    return pivots, torch.from_numpy(factor.diagonal()[:rank].copy())


def independent_rows(heads: Heads, at: Reduced) -> Int[Tensor, " k"]:
    """Examples whose rows of the derivative are independent, the clearest first."""
    return _pivoted(_scaled(tangents(heads, at).gram()))[0]


# --- Levenberg and Marquardt ----------------------------------------------------------------------


def meet(
    heads: Heads,
    at: Reduced,
    labels: Float[Tensor, "T o"],
    *,
    tolerance: float,
    until: float,
    steps: int = 600,
) -> Heads:
    """Move every output to its label by damped Gauss-Newton steps."""
    damping, squares = FIRST, []
    for _ in range(steps):
        here = tangents(heads, at)
        residual = here.outputs - labels
        squares.append(float(residual.square().sum()))
        slow = len(squares) > 40 and squares[-1] > 0.9 * squares[-40]
        if float(residual.abs().max()) <= tolerance or slow or time.monotonic() > until:
            break
        moved, damping = _better(heads, here, at, labels, damping)
        if moved is None:
            break
        heads, damping = moved, max(damping / FALL, LOWEST)
    return heads


def _better(heads, here, at, labels, damping) -> tuple[Heads | None, float]:
    """Weights of a smaller squared error, and the damping that led there."""
    K, residual = here.gram(), (here.outputs - labels).flatten()
    diagonal, squared = K.diagonal().clone(), float(residual.square().sum())
    unit = float(diagonal.mean())
    while damping <= HIGHEST:
        K.diagonal().copy_(diagonal + damping * unit)
        factor, failed = torch.linalg.cholesky_ex(K)
        if not failed:
            moved = heads.moved(here.transposed(solved(factor, residual)), -1.0)
            if float((outputs(moved, at) - labels).square().sum()) < squared:
                return moved, damping
        damping *= RISE
    return None, damping


def solved(factor: Float[Tensor, "T T"], rows: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Solve a system by its lower Cholesky factor, which ``torch.cholesky_solve`` would copy."""
    half = torch.linalg.solve_triangular(factor, rows[:, None], upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)[:, 0]
