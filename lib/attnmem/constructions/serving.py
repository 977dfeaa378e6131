"""Step 1 of the proof of Theorem 1 of Mahdavi et al. 2024: what each head attends to."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import check_integers, checked_by, refuse
from .generic import gaussian, on_cpu

EPS = torch.finfo(torch.float64).eps
PEAK = 4.0  # logit of the token that a head prefers on a served example; the others are near 0
SPREAD = 0.5  # standard deviation of those others: generic, so that no coincidence lowers the rank
CANDIDATES = 64  # random directions among which the best separating one is kept


@on_cpu
@checked_by(check_integers)
def serve(examples: int, heads: int) -> Int[Tensor, "H k"]:
    """Which ``k = ceil((T - 1) / H)`` examples each head serves; no head serves example 0.

    The examples are consecutive, so that head 0 serves 1 to ``k``. Where ``H k`` exceeds ``T - 1``
    the last slots start again from example 1. So no head is idle, and the examples of one head are
    distinct.

    Args:
        examples: Number of examples ``T``.
        heads: Number of heads ``H``.

    Returns:
        The examples of each head.

    Raises:
        ValueError: If a number is not an integer of at least 1.

    Example:
        >>> serve(examples=6, heads=2)
        tensor([[1, 2, 3],
                [4, 5, 1]])

    Source: Mahdavi et al. 2024, proof of Theorem 1, Step 1.
    """
    slots = math.ceil((examples - 1) / heads)
    return 1 + (torch.arange(heads * slots) % max(examples - 1, 1)).reshape(heads, slots)


def _of_served(tensor: Tensor, served: Int[Tensor, "H k"]) -> Tensor:
    """The served examples' own matrices, or the one matrix that all examples share."""
    return tensor[served] if tensor.ndim == 3 else tensor


def dual_basis(
    queries: Float[Tensor, "T d"], served: Int[Tensor, "H k"]
) -> tuple[Float[Tensor, "H d k"], Float[Tensor, "H d d_minus_k"]]:
    """For each head, vectors ``f_s`` with ``f_s . e_s' = [s = s']``, and a basis of the complement.

    Args:
        queries: One query a row.
        served: The examples of each head.

    Returns:
        The vectors ``f_s`` as columns, and an orthonormal basis of the orthogonal complement of the
        head's queries.

    Raises:
        ValueError: If the queries of a head are dependent (Assumption 1 is broken).
    """
    slots = served.shape[1]
    U, sigma, Vh = torch.linalg.svd(queries[served], full_matrices=True)
    if slots:
        weak = sigma[:, -1] <= max(queries.shape) * EPS * sigma[:, 0]
        if weak.any():
            head = int(weak.nonzero()[0])
            few = served[head, :6].tolist()
            _refuse_queries(f"dependent ones among examples {few}...", slots)
    duals = (Vh[:, :slots].mT / sigma[:, None, :]) @ U.mT
    return duals, Vh[:, slots:].mT


def _refuse_queries(got: str, slots: int) -> None:
    refuse("queries", got, f"Kruskal rank at least {slots + 1}: any {slots + 1} independent")


def separating_direction(
    contexts: Float[Tensor, "*T n d"], generator: torch.Generator
) -> Float[Tensor, " d"]:
    """A direction ``u`` such that ``E u`` has no near tie at its top or bottom, in any context.

    A Gaussian direction has distinct entries almost surely. The best of a few is kept.

    Args:
        contexts: Contexts, own ``(T, n, d)`` or shared ``(n, d)``.
        generator: Source of the random directions, on the CPU.

    Returns:
        A unit vector.

    Source: Mahdavi et al. 2024, Lemma 3.
    """
    directions = _gaussian(generator, CANDIDATES, contexts.shape[-1], like=contexts)
    directions = directions / directions.norm(dim=1, keepdim=True)
    heights = (contexts @ directions.mT).mT  # (*T, candidates, n)
    gaps = torch.minimum(_lead(heights), _lead(-heights))
    worst = gaps.amin(dim=0) if gaps.ndim == 2 else gaps
    return directions[worst.argmax()]


def _lead(heights: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """How far the highest entry is above the second; infinite if there is none."""
    if heights.shape[-1] == 1:
        return torch.full(heights.shape[:-1], math.inf, dtype=heights.dtype, device=heights.device)
    first, second = heights.topk(2, dim=-1).values.unbind(dim=-1)
    return first - second


def _gaussian(generator: torch.Generator, *shape: int, like: Tensor) -> Tensor:
    return gaussian(generator, *shape).to(like.device)


def orthogonal_direction(
    free: Float[Tensor, "H d d_minus_k"],
    queries: Float[Tensor, "T d"],
    served: Int[Tensor, "H k"],
    generator: torch.Generator,
) -> Float[Tensor, "H d"]:
    """For each head, a unit ``v`` with ``v . e = 0`` on its served queries and on no other.

    Of a few random directions it keeps the one furthest from zero on the other queries.

    Args:
        free: Basis of the complement of each head's queries, from :func:`dual_basis`.
        queries: One query a row.
        served: The examples of each head.
        generator: Source of the random directions, on the CPU.

    Returns:
        One vector for each head.

    Raises:
        ValueError: If some other query lies in the span of a head's queries.

    Source: Mahdavi et al. 2024, Lemma 3.
    """
    heads, _, left = free.shape
    mix = _gaussian(generator, heads, left, CANDIDATES, like=queries)
    directions = free @ (mix / mix.norm(dim=1, keepdim=True))  # (H, d, candidates)
    reach = (queries @ directions).abs() / queries.norm(dim=1)[:, None]  # (H, T, candidates)
    head = torch.arange(heads, device=queries.device)
    reach[head[:, None], served] = math.inf
    worst, best = reach.amin(dim=1).max(dim=1)
    zero = max(queries.shape) * EPS
    if worst.min() <= zero:  # name the first head and example, not the smallest zero
        lost = int((worst <= zero).nonzero()[0])
        example = int((reach[lost, :, best[lost]] <= zero).nonzero()[0])
        _refuse_queries(f"example {example} in the span of others", served.shape[1])
    return directions[head, :, best]


def interpolating_keys(
    contexts: Float[Tensor, "*T n d"],
    served: Int[Tensor, "H k"],
    log_alpha: Float[Tensor, "H k n"],
) -> Float[Tensor, "H d k"]:
    """Vectors ``x_s`` with ``E^(s) x_s = log_alpha_s``: any logits on the served examples.

    Args:
        contexts: Contexts, own ``(T, n, d)`` or shared ``(n, d)``, each of rank ``n``.
        served: The examples of each head.
        log_alpha: Target logits of each served example.

    Returns:
        The vectors as columns, for each head.

    Source: Mahdavi et al. 2024, Claim 1.
    """
    inverses = _of_served(torch.linalg.pinv(contexts), served)
    return torch.einsum("...dn,...n->...d", inverses, log_alpha).mT


def saturating_scale(
    contexts: Float[Tensor, "*T n d"],
    queries: Float[Tensor, "T d"],
    served: Int[Tensor, "H k"],
    duals: Float[Tensor, "H d k"],
    keys: Float[Tensor, "H d k"],
    u: Float[Tensor, " d"],
    v: Float[Tensor, "H d"],
    tail: float = EPS,
) -> Float[Tensor, " H"]:
    r"""For each head, the least ``c`` that saturates it on every example that it does not serve.

    Saturated means that the attention on the token that ``c u v^T`` points to is at least ``1 -
    tail``. It suffices that the logit of every other token is smaller by ``log((n - 1) / tail)``.
    With ``m = E u``, and ``b`` the logits of the served part, token ``i`` asks for

    .. math:: c \ge \frac{\log((n-1)/\mathrm{tail}) + b_i - b_{top}}{|v \cdot e| \, |m_{top} - m_i|}

    At the default ``tail``, the rounding unit of float64, the head equals its limit to the last
    bit, with no limit taken.

    Args:
        contexts: Contexts, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        served: The examples of each head.
        duals: The vectors ``f_s`` of :func:`dual_basis`.
        keys: The vectors ``x_s`` of :func:`interpolating_keys`.
        u: The direction of :func:`separating_direction`.
        v: The directions of :func:`orthogonal_direction`.
        tail: Attention that may be left to the other tokens, between 0 and 1.

    Returns:
        The scale of each head.

    Source: Mahdavi et al. 2024, Lemma 4 and Appendix B.2.
    """
    heights = (contexts @ u).expand(len(queries), -1)[:, None]  # (T, 1, n)
    slope = (queries @ v.mT)[..., None]  # (T, H, 1)
    signed = slope * heights  # (T, H, n)
    top = signed.argmax(dim=-1, keepdim=True)
    below = signed.gather(-1, top) - signed
    mixed = torch.einsum("td,hdk,hxk->thx", queries, duals, keys)
    served_logits = torch.einsum(f"thd,{'t' * (contexts.ndim == 3)}nd->thn", mixed, contexts)
    rise = served_logits - served_logits.gather(-1, top)
    others = max(contexts.shape[-2] - 1, 1)
    scale = (math.log(others / tail) + rise) / below
    scale.scatter_(-1, top, 0.0)
    scale[served, torch.arange(len(v), device=v.device)[:, None]] = 0.0
    return scale.amax(dim=(0, 2))


def attention_maps(
    contexts: Float[Tensor, "*T n d"],
    queries: Float[Tensor, "T d"],
    heads: int,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "H d r"], Float[Tensor, "H d r"]]:
    """The maps ``W_Q`` and ``W_K`` of all heads, of width ``k + 1``: Step 1 of the proof.

    Args:
        contexts: Contexts, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        heads: Number of heads ``H``.
        generator: Source of the random directions, on the CPU.

    Returns:
        ``W_Q`` and ``W_K``.

    Raises:
        ValueError: If the queries are dependent.

    Source: Mahdavi et al. 2024, proof of Theorem 1, Step 1.
    """
    served = serve(len(queries), heads).to(queries.device)
    duals, free = dual_basis(queries, served)
    u = separating_direction(contexts, generator)
    v = orthogonal_direction(free, queries, served, generator)
    log_alpha = _preferences(contexts, served, u, generator)
    keys = interpolating_keys(contexts, served, log_alpha)
    root = saturating_scale(contexts, queries, served, duals, keys, u, v).sqrt()[:, None]
    W_Q = torch.cat([duals, (root * v)[..., None]], dim=-1)
    W_K = torch.cat([keys, (root * u)[..., None]], dim=-1)
    return W_Q, W_K


def _preferences(
    contexts: Float[Tensor, "*T n d"],
    served: Int[Tensor, "H k"],
    u: Float[Tensor, " d"],
    generator: torch.Generator,
) -> Float[Tensor, "H k n"]:
    """Target logits: slot ``j`` prefers the token ranked ``j + 1`` by ``u``, never the top one.

    Saturated heads look at the top token. Preferring others keeps the rows far from dependent.
    """
    heads, slots = served.shape
    tokens = contexts.shape[-2]
    noise = SPREAD * _gaussian(generator, heads, slots, tokens, like=contexts)
    order = (contexts @ u).argsort(dim=-1, descending=True)
    order = order[served] if order.ndim == 2 else order.expand(heads, slots, -1)
    rank = 1 + torch.arange(slots, device=order.device).expand(heads, -1)[..., None]
    preferred = order.gather(-1, rank)
    return noise.scatter_add_(-1, preferred, torch.full_like(noise, PEAK))
