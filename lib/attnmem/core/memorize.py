r"""Weights that memorize: Theorem 1 of Mahdavi et al. 2024, built for any data.

The bounds hold for almost all data; this file writes down weights for all that satisfy the
assumptions. The proof asks two things of each head ``h``. On the few examples that it *serves*, its
attention weights are chosen freely (Claim 1). On all others it is *saturated*: it looks at one
token, whatever was chosen (Claim 2). Then every head adds as many independent rows to the feature
matrix ``Z`` as it serves examples (Step 1), and a read-out of full-rank ``Z`` meets any labels
(Step 2). One product of rank at most ``r = min(n, d_h)`` does both parts of Step 1:

.. math:: W_K W_Q^\top = \sum_{s \text{ served}} x_s f_s^\top + c \, u v^\top .

- ``f_s`` finds the query of example ``s`` among those that the head serves (:func:`dual_basis`);
- ``x_s`` gives its tokens the chosen logits ``E^(s) x_s`` (:func:`interpolating_keys`);
- ``v`` is orthogonal to the served queries and to no other (:func:`orthogonal_direction`);
- ``u`` ranks the tokens of each context, without near ties (:func:`separating_direction`);
- ``c`` is so large that one token gets all attention (:func:`saturating_scale`).

So a head serves ``k = r - 1`` examples, and ``T = H k + 1`` with one that all heads look away from.
Why is the rank of ``Z`` then ``T``? The head's part of a served row may move along differences of
tokens, of which ``n - 1 >= k`` are independent, and nothing else moves. If these rows move far
along ``k`` independent differences, they are independent. In the last row each head shows one
token. On a shared context it is no sum of differences; on own contexts the movements can be chosen
so that the last row is independent of the others, too. So a ``T x T`` minor, a polynomial in the
attention, is not zero: almost every choice of the attention on served examples gives rank ``T``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import Seed, checked, construction, on_cpu, refuse
from ..examples import Contexts, Labels, Queries, check_data, check_distinct_examples, unit
from .bounds import mha_capacity
from .layers import MHAWeights, attend, by_example, mha
from .random import gaussian

_Keys = Float[Tensor, "H d k"]  # for each head, one column for each example that it serves
_Served = Int[Tensor, "H k"]  # their numbers

EPS = torch.finfo(torch.float64).eps
# A head is saturated for an example if one of its attention weights is above (Appendix H).
SATURATED = 0.99
# On a served example the token that a head prefers has this logit, exp(4) = 55 times the weight of
# each other. To all logits normal numbers of this deviation are added, so that no coincidence
# lowers the rank.
_PEAK, _SPREAD = 4.0, 0.5
_CANDIDATES = 64  # random directions among which the best one is kept
_DRAWS = 5  # constructions tried before the data are called degenerate
_TOLERANCE = 1e-9  # of the labels' spread: a tenth of the error that the book claims
# Of the largest label, between a layer and the one in other units. Units are powers of four, so
# both differ by the rounding of sums alone, unless numbers leave the range of float64.
_SCALED_TOLERANCE = 1e-12


# --- Step 1: what each head attends to ------------------------------------------------------------


@on_cpu
@checked
def serve(examples: int, heads: int) -> Int[Tensor, "H k"]:
    """Which ``k = ceil((T - 1) / H)`` examples each head serves: no head example 0, none is idle.

    Example:
        >>> serve(examples=6, heads=2)
        tensor([[1, 2, 3],
                [4, 5, 1]])
    """
    slots = math.ceil((examples - 1) / heads)
    return 1 + (torch.arange(heads * slots) % max(examples - 1, 1)).reshape(heads, slots)


def dual_basis(queries: Queries, served: _Served) -> tuple[_Keys, Float[Tensor, "H d m"]]:
    """For each head, columns ``f_s`` with ``f_s . e_s' = [s = s']``; a basis orthogonal to its e_s.

    The queries that a head serves must be independent (Assumption 1).
    """
    slots = served.shape[1]
    U, sigma, Vh = torch.linalg.svd(queries[served], full_matrices=True)
    weak = sigma[:, -1:] <= max(queries.shape) * EPS * sigma[:, :1]
    if weak.any():
        examples = served[int(weak.nonzero()[0, 0]), :6].tolist()
        _refuse_queries(f"dependent ones among examples {examples}...", slots)
    # The pseudoinverse V S^-1 U^T of the head's queries; the rest of V is orthogonal to them.
    duals = (Vh[:, :slots].mT / sigma[:, None, :]) @ U.mT
    return duals, Vh[:, slots:].mT


def _refuse_queries(got: str, slots: int) -> None:
    refuse("queries", got, f"Kruskal rank at least {slots + 1}: any {slots + 1} independent")


def separating_direction(contexts: Contexts, generator: torch.Generator) -> Float[Tensor, " d"]:
    """A unit vector ``u`` for which ``E u`` has no near tie at top or bottom (Lemma 3)."""
    directions = gaussian(generator, _CANDIDATES, contexts.shape[-1]).to(contexts.device)
    directions = directions / directions.norm(dim=1, keepdim=True)
    heights = (contexts @ directions.mT).mT.sort(dim=-1).values  # (*T, candidates, n)
    # The gaps between neighbours; a lone token has infinite ones.
    gaps = heights.diff(append=torch.full_like(heights[..., :1], math.inf))
    least = gaps[..., [0, contexts.shape[-2] - 2]].amin(-1)
    return directions[least.reshape(-1, _CANDIDATES).amin(0).argmax()]


def orthogonal_direction(
    free: Float[Tensor, "H d m"], queries: Queries, served: _Served, generator: torch.Generator
) -> Float[Tensor, "H d"]:
    """For each head, a unit ``v`` with ``v . e = 0`` on its served queries and no other (Lemma 3).

    ``free`` is the basis of :func:`dual_basis`. A query in the span of served ones is refused.
    """
    heads, _, dimension = free.shape
    mix = gaussian(generator, heads, dimension, _CANDIDATES).to(queries.device)
    directions = free @ (mix / mix.norm(dim=1, keepdim=True))  # (H, d, candidates)
    slope = (queries @ directions).abs() / queries.norm(dim=1)[:, None]  # (H, T, candidates)
    head = torch.arange(heads, device=queries.device)
    slope[head[:, None], served] = math.inf
    worst, best = slope.amin(dim=1).max(dim=1)
    zero = max(queries.shape) * EPS
    if worst.min() <= zero:  # name the first head and example, not the smallest zero
        failed = int((worst <= zero).nonzero()[0])
        example = int((slope[failed, :, best[failed]] <= zero).nonzero()[0])
        _refuse_queries(f"example {example} in the span of others", served.shape[1])
    return directions[head, :, best]


def interpolating_keys(
    contexts: Contexts, served: _Served, log_alpha: Float[Tensor, "H k n"]
) -> _Keys:
    """Vectors ``x_s`` with ``E^(s) x_s = log_alpha_s``, for any logits of attention (Claim 1)."""
    inverses = torch.linalg.pinv(contexts)  # each context has rank n (Assumption 2)
    return torch.einsum("...dn,...n->...d", _of_examples(inverses, served, 2), log_alpha).mT


def _of_examples(values: Tensor, examples: Tensor, ndim: int) -> Tensor:
    """The entries of some examples, of ``ndim`` axes each; an entry that all share stays one."""
    return values[examples] if values.ndim > ndim else values


def saturating_scale(
    contexts: Contexts,
    queries: Queries,
    served: _Served,
    duals: _Keys,
    keys: _Keys,
    u: Float[Tensor, " d"],
    v: Float[Tensor, "H d"],
    tail: float = EPS,
) -> Float[Tensor, " H"]:
    r"""For each head, the least ``c`` that saturates it on what it does not serve (Lemma 4, B.2).

    Saturated: the attention on the token that ``c u v^T`` points to is at least ``1 - tail``; at
    the default the head equals its limit to the last bit. It suffices that the logit of every other
    token is smaller by ``log((n - 1) / tail)``, 36 for two tokens. With ``m = E u``, and ``b`` the
    logits of the served part, token ``i`` asks for

    .. math:: c \ge \frac{\log((n-1)/\mathrm{tail}) + b_i - b_{top}}{|v \cdot e| \, |m_{top} - m_i|}
    """
    heights = (contexts @ u).expand(len(queries), -1)[:, None]  # m, (T, 1, n)
    signed = (queries @ v.mT)[..., None] * heights  # (v . e) m, (T, H, n)
    top = signed.argmax(dim=-1, keepdim=True)
    below = signed.gather(-1, top) - signed  # |v . e| |m_top - m_i|
    mixed = torch.einsum("td,hdk,hxk->thx", queries, duals, keys)  # sum_s (f_s . e) x_s
    b = torch.einsum("thd,tnd->thn", mixed, by_example(contexts, queries))
    tokens_below = max(contexts.shape[-2] - 1, 1)
    scale = (math.log(tokens_below / tail) + (b - b.gather(-1, top))) / below
    scale.scatter_(-1, top, 0.0)  # the top token asks for nothing, nor do served examples
    scale[served, torch.arange(len(v), device=v.device)[:, None]] = 0.0
    return scale.amax(dim=(0, 2))


def _attention_maps(
    contexts: Contexts, queries: Queries, heads: int, generator: torch.Generator
) -> tuple[_Keys, _Keys]:
    """The maps ``W_Q`` and ``W_K`` of all heads, of width ``k + 1``."""
    served = serve(len(queries), heads).to(queries.device)
    duals, free = dual_basis(queries, served)
    u = separating_direction(contexts, generator)
    v = orthogonal_direction(free, queries, served, generator)
    # The attention on served examples is free, but for coincidences. Saturated heads look at the
    # top token of u, or at the bottom one where v . e < 0. So slot j prefers the token ranked j + 1
    # along u: that keeps the rows of Z far from dependent.
    slots = served.shape[1]
    noise = _SPREAD * gaussian(generator, heads, slots, contexts.shape[-2]).to(contexts.device)
    ranked = (contexts @ u).argsort(dim=-1, descending=True)  # tokens from the top of u
    ranked = _of_examples(ranked, served, 1).expand(heads, slots, -1)
    place = 1 + torch.arange(slots, device=ranked.device).expand(heads, -1)[..., None]
    preferred = ranked.gather(-1, place)
    log_alpha = noise.scatter_add_(-1, preferred, torch.full_like(noise, _PEAK))
    keys = interpolating_keys(contexts, served, log_alpha)
    root = saturating_scale(contexts, queries, served, duals, keys, u, v).sqrt()[:, None]
    # W_K W_Q^T = sum_s x_s f_s^T + c u v^T, the product of the module's head.
    W_Q = torch.cat([duals, (root * v)[..., None]], dim=-1)
    W_K = torch.cat([keys, (root * u)[..., None]], dim=-1)
    return W_Q, W_K


# --- Step 2: the read-out -------------------------------------------------------------------------


def read_out(
    Z: Float[Tensor, "T Hd"], labels: Float[Tensor, "T o"], refinements: int = 1
) -> Float[Tensor, "Hd o"]:
    """The least-norm ``M`` with ``Z M = labels``, for ``Z`` of full row rank."""
    Q, R = torch.linalg.qr(Z.mT)  # Z = R^T Q^T, and R^T is square
    M = torch.zeros(Z.shape[1], labels.shape[1], dtype=Z.dtype, device=Z.device)
    for _ in range(1 + refinements):  # again for what rounding left over
        M = M + Q @ torch.linalg.solve_triangular(R.mT, labels - Z @ M, upper=False)
    return M


def _factor(M: Tensor, value_dim: int, W_D: Tensor) -> tuple[Tensor, Tensor]:
    """Split a read-out into ``W_V`` and ``W_O`` with ``W_V,h W_O,h W_D = M_h`` for every head."""
    heads, dim, outputs = M.shape
    W_V = torch.cat([M, M.new_zeros(heads, dim, value_dim - outputs)], dim=-1)
    undo = torch.cat([torch.linalg.pinv(W_D), W_D.new_zeros(value_dim - outputs, len(W_D))])
    return W_V, undo.repeat(heads, 1)


# --- data of any scale ----------------------------------------------------------------------------


def build_in_units(
    build: Callable[..., MHAWeights],
    contexts: Contexts,
    queries: Queries,
    labels: Labels,
    skip: bool = False,
) -> MHAWeights:
    """Build a layer on data that are divided by their units, then adapt it to the data.

    Units are powers of four, which change no digit of the outputs. Numbers that leave the range of
    float64 are refused. Both sides are new tensors: sums may depend on where in memory data lie.
    """
    data = [x.to(torch.float64) for x in (contexts, queries, labels.reshape(len(queries), -1))]
    a, b, c = (unit(x) for x in data)
    E, e, y = (x / size for x, size in zip(data, (a, b, c), strict=True))
    in_units = build(E, e, y)
    # Queries meet W_Q, and tokens meet W_K and W_V. So those maps take the units of their data.
    inner = b if skip else c  # the unit of what W_D reads
    W_Q, W_K, W_V, W_O, W_D = in_units
    weights = MHAWeights(W_Q / b, W_K / a, W_V * (inner / a), W_O, W_D * (c / inner))
    change = mha(weights, E * a, e * b, skip=skip) / c - mha(in_units, E, e, skip=skip)
    if not change.abs().max() <= _SCALED_TOLERANCE:
        sizes = ", ".join(f"{float(x.abs().max()):.0e}" for x in data)
        got = f"largest entries {sizes}, with which the layer's numbers leave the range of float64"
        refuse("contexts, queries, labels", got, "scales nearer to one")
    return weights


def label_spread(labels: Tensor) -> float:
    """What errors are compared with: half the range of labels, or their size if all are equal."""
    half = (labels.amax(0) - labels.amin(0)) / 2
    return float(torch.where(half > 0, half, labels.abs().amax(0)).max())


# --- the theorem ----------------------------------------------------------------------------------


def _satisfies_theorem_1(contexts, queries, labels, heads, head_dim, value_dim, skip) -> None:
    """The hypotheses, except the queries' independence, which the steps check."""
    check_data(contexts=contexts, queries=queries, labels=labels)
    (n, d), outputs = contexts.shape[-2:], labels[0].numel()
    if value_dim is not None and value_dim < outputs:
        refuse("value_dim", value_dim, f"at least d_out = {outputs}")
    if skip and outputs > d:
        refuse("labels", f"d_out = {outputs}", f"at most d = {d} with a skip connection")
    check_distinct_examples(contexts, queries, labels)
    if n >= d:  # the paper's hypothesis; the steps need independent tokens only
        refuse("contexts", f"n = {n} tokens in dimension d = {d}", "n < d")
    capacity = mha_capacity(heads, n, head_dim)
    if len(queries) > capacity:
        room = f"T <= H (r - 1) + 1 = {capacity} for H = {heads}, r = min(n, head_dim)"
        refuse("labels", f"T = {len(queries)} examples", f"{room} = {min(n, head_dim)}")
    if not queries.any(dim=1).all():
        refuse("queries", "a zero vector", "Kruskal rank at least 1")
    E = contexts.double()
    ranks = torch.linalg.matrix_rank(E / unit(E, (-2, -1))).reshape(-1)
    if (ranks < n).any():
        example = int((ranks < n).nonzero()[0])
        refuse("contexts", f"rank {int(ranks[example])} in context {example}", f"rank n = {n}")


@construction(also=_satisfies_theorem_1)
def memorize_mha(
    contexts: Contexts,
    queries: Queries,
    labels: Labels,
    *,
    heads: int,
    head_dim: int,
    seed: Seed,
    value_dim: int | None = None,
    skip: bool = False,
) -> MHAWeights:
    """Build one multi-head attention layer that reproduces every label.

    ``mha(weights, contexts, queries, skip=skip)`` equals ``labels``, as ``(T, d_out)``, within 1e-9
    of their spread: half their range, or the label if all are equal. This holds for any ``T`` up to
    ``mha_capacity(heads, n, head_dim)``. ``ValueError`` says which hypothesis fails, or so nearly
    that float64 cannot tell.

    Args:
        contexts: Each of rank ``n`` (Assumption 2), with ``n < d``.
        queries: Any ``n`` of them independent, which is Kruskal rank ``n`` (Assumption 1); that of
            ``ceil((T - 1) / H) + 1`` suffices.
        value_dim: Width of the values ``d_v``, at least ``d_out``, which is the default.
        skip: Whether the layer has a skip connection (``d_o = d``), which needs ``d_out <= d``.

    Example:
        >>> E, e, y = torch.rand(8, 16), torch.rand(25, 16), torch.rand(25)
        >>> weights = memorize_mha(E, e, y, heads=8, head_dim=4, seed=0)
        >>> bool((mha(weights, E, e)[:, 0] - y).abs().max() < 1e-8)
        True

    Source: Mahdavi et al. 2024, Theorem 1 and Remark 1; with ``skip``, Appendix C.
    """

    def build(contexts: Tensor, queries: Tensor, labels: Tensor) -> MHAWeights:
        # Appendix C leaves W_D free. It has the scale of the labels, so that no digits cancel.
        d_out = labels.shape[1]
        W_D = torch.eye(d_out).to(queries)
        if skip:
            W_D = torch.eye(queries.shape[1], d_out).to(queries)
            W_D = W_D * (labels.abs().max() / queries.abs().max())
        generator = torch.Generator().manual_seed(seed)
        backwards = torch.arange(len(queries), device=queries.device).flip(0)
        error = math.inf
        for _ in range(_DRAWS):
            maps = _attention_maps(contexts, queries, heads, generator)
            W_Q, W_K = (torch.nn.functional.pad(W, (0, head_dim - W.shape[2])) for W in maps)
            rest = labels - queries @ W_D if skip else labels
            Z = attend(W_Q, W_K, contexts, queries)[1]  # (T, H, d)
            M = read_out(Z.flatten(-2), rest).unflatten(0, Z.shape[1:])
            weights = MHAWeights(W_Q, W_K, *_factor(M, value_dim or d_out, W_D), W_D)
            # In reverse order, so that shared rounding errors hide nothing.
            reverse = _of_examples(contexts, backwards, 2), queries[backwards]
            outputs = mha(weights, *reverse, skip=skip)[backwards]
            error = float((outputs - labels).abs().max())
            if error <= _TOLERANCE * label_spread(labels):
                return weights
        got = f"nearly dependent contexts or queries (error {error:.1e} after {_DRAWS} draws)"
        return refuse("contexts, queries", got, "data that float64 tells from dependent ones")

    return build_in_units(build, contexts, queries, labels, skip)
