"""The products of an attention layer in their cheapest orders, which layers and training share.

All functions take leading run axes, as :mod:`attnmem.attention.layers` describes them; ``allruns``
stands for the run axes of weights and data, broadcast against each other. Costs are counted in
multiplications of numbers.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

OWN, SHARED = "...bnd", "...nd"  # einsum axes of contexts


def token_axes(context: Tensor, query: Tensor) -> str:
    """Whether every example has a context of its own or all share one.

    Args:
        context: Tokens as rows, own ``(*data, B, n, d)`` or shared ``(*data, n, d)``.
        query: One vector per example, ``(*data, B, d)``.

    Returns:
        The context's axes in an einsum, :data:`OWN` or :data:`SHARED`.
    """
    return OWN if context.ndim == query.ndim + 1 else SHARED


# --- attention weights ----------------------------------------------------------------------------


def attend(
    W_Q: Float[Tensor, "*runs H d d_h"],
    W_K: Float[Tensor, "*runs H d d_h"],
    context: Float[Tensor, "*examples d"],
    query: Float[Tensor, "*data B d"],
) -> tuple[Float[Tensor, "*allruns B H n"], Float[Tensor, "*allruns B H d"]]:
    r"""Attention weights and attended tokens of every head, for one query per example.

    .. math:: \alpha_h = \operatorname{softmax}(E W_K W_Q^\top e), \qquad z_h = E^\top \alpha_h .

    Args:
        W_Q: Query maps of the heads.
        W_K: Key maps of the heads.
        context: Tokens as rows, own ``(*data, B, n, d)`` or shared ``(*data, n, d)``.
        query: One vector ``e`` per example.

    Returns:
        The attention weights and the attended tokens.
    """
    alpha = attention_weights(W_Q, W_K, context, query)
    return alpha, torch.einsum(f"...bhn,{token_axes(context, query)}->...bhd", alpha, context)


def attention_weights(
    W_Q: Float[Tensor, "*runs H d d_h"],
    W_K: Float[Tensor, "*runs H d d_h"],
    context: Float[Tensor, "*examples d"],
    query: Float[Tensor, "*data B d"],
) -> Float[Tensor, "*allruns B H n"]:
    """The softmax of :func:`attention_logits` over the tokens.

    Args:
        W_Q: Query maps of the heads.
        W_K: Key maps of the heads.
        context: Tokens as rows, own ``(*data, B, n, d)`` or shared ``(*data, n, d)``.
        query: One vector ``e`` per example.

    Returns:
        The attention weights; they sum to one over the tokens.
    """
    return over_tokens(attention_logits(W_Q, W_K, context, query))


def attention_logits(
    W_Q: Float[Tensor, "*runs H d d_h"],
    W_K: Float[Tensor, "*runs H d d_h"],
    context: Float[Tensor, "*examples d"],
    query: Float[Tensor, "*data B d"],
) -> Float[Tensor, "*allruns B n H"]:
    """The logits ``e W_Q W_K^T E^T``, multiplied in the cheapest order.

    All orders give the same numbers but for rounding; the cost is counted per head. None of them
    forms the keys of every example, and only the query's position is computed.

    Args:
        W_Q: Query maps of the heads.
        W_K: Key maps of the heads.
        context: Tokens as rows, own ``(*data, B, n, d)`` or shared ``(*data, n, d)``.
        query: One vector ``e`` per example.

    Returns:
        The logits. Those of shared contexts are stored with the examples last.
    """
    tokens = token_axes(context, query)
    (B, d), (H, d_h), n = query.shape[-2:], W_Q.shape[-3::2], context.shape[-2]
    orders = {
        "vector by vector": B * (2 * d * d_h + n * d),
        "head product first": d * d * d_h + B * (d * d + n * d),
    }
    if tokens == SHARED:
        orders["shared keys first"] = chain_cost(n, d, d_h, d) + B * n * d
    match min(orders, key=orders.__getitem__):
        case "shared keys first":
            [asked] = _asked(W_Q, W_K, context)
            logits = asked.flatten(-3, -2) @ query.mT  # examples last: long rows
            return logits.unflatten(-2, (H, n)).transpose(-3, -1)
        case "head product first":
            product = torch.einsum("...hdk,...hek->...dhe", W_Q, W_K)
            key = torch.einsum("...bd,...dhe->...bhe", query, product)
        case _:
            key = torch.einsum("...bd,...hdk->...bhk", query, W_Q)
            key = torch.einsum("...bhk,...hdk->...bhd", key, W_K)
    return torch.einsum(f"{tokens},...bhd->...bnh", context, key)


def _asked(
    W_Q: Float[Tensor, "*runs H d d_h"],
    W_K: Float[Tensor, "*runs H d d_h"],
    *sets: Float[Tensor, "... d"],
) -> list[Float[Tensor, "... d"]]:
    """``E W_K W_Q^T`` for sets of tokens, ``(*allruns, H, m, d)``: a query times it is logits."""
    d, d_h = W_Q.shape[-2:]
    sets = [tokens[..., None, :, :] for tokens in sets]
    if product_first(sum(tokens.shape[-2] for tokens in sets), d, d_h, d):
        product = W_K @ W_Q.mT
        return [tokens @ product for tokens in sets]
    return [(tokens @ W_K) @ W_Q.mT for tokens in sets]


def embedded_logits(
    W_Q: Float[Tensor, "*runs H d d_h"],
    W_K: Float[Tensor, "*runs H d d_h"],
    embedding: Float[Tensor, "*runs c d"],
    places: Float[Tensor, "... n d"],
    context: Float[Tensor, "*data B n c"],
    query: Float[Tensor, "*data B d"],
) -> Float[Tensor, "*allruns B n H"]:
    """The logits at own tokens ``x W + p``, which are never formed.

    A token is linear in ``x`` and in the indicator of its place. So the rows of ``W`` and the
    places go through the heads' maps as shared tokens would, once for all examples.

    Args:
        W_Q: Query maps of the heads.
        W_K: Key maps of the heads.
        embedding: The matrix ``W``, with the run axes of the maps.
        places: One vector ``p`` for every place; without run axes if all runs have the same.
        context: Own contexts, before they are embedded.
        query: One embedded vector per example.

    Returns:
        The logits, stored with the heads last.
    """
    of_rows, of_places = _asked(W_Q, W_K, embedding, places)
    key = (query @ of_rows.flatten(-3, -2).mT).unflatten(-1, of_rows.shape[-3:-1])
    of_places = of_places.transpose(-3, -2)  # (*runs, n, H, d)
    by_place = query @ of_places.flatten(-3, -2).mT
    return _inner_products(context, key) + by_place.unflatten(-1, of_places.shape[-3:-1])


def embedded_values(
    W_V: Float[Tensor, "*runs H d"],
    embedding: Float[Tensor, "*runs c d"],
    places: Float[Tensor, "... n d"],
    context: Float[Tensor, "*data B n c"],
) -> Float[Tensor, "*allruns B n H"]:
    """The values of own tokens ``x W + p`` in heads with scalar values; tokens are never formed.

    Args:
        W_V: One vector a head.
        embedding: The matrix ``W``, with the run axes of the vectors.
        places: One vector ``p`` for every place; without run axes if all runs have the same.
        context: Own contexts, before they are embedded.

    Returns:
        The values, stored with the heads last.
    """
    of_tokens = _inner_products(context.flatten(-3, -2), W_V @ embedding.mT)
    by_place = (places @ W_V.mT)[..., None, :, :]
    return of_tokens.unflatten(-2, context.shape[-3:-1]) + by_place


def over_tokens(logits: Float[Tensor, "*allruns B n H"]) -> Float[Tensor, "*allruns B H n"]:
    """The softmax over the tokens, in the layout that the logits are stored in.

    Heads or examples stay last while it runs: it is several times slower along a short last axis.
    """
    if logits.stride(-3) == 1:
        return logits.transpose(-3, -1).softmax(dim=-2).movedim(-1, -3)
    return logits.softmax(dim=-2).mT


# --- values ---------------------------------------------------------------------------------------


def attend_values(
    logits: Float[Tensor, "*allruns B n H"], values: Float[Tensor, "*values n H"]
) -> tuple[Float[Tensor, "*allruns B H n"], Float[Tensor, "*allruns B H"]]:
    r"""Attention weights, and :math:`\sum_s \alpha_{h,s} v_{h,s}` for heads with scalar values.

    Args:
        logits: As :func:`attention_logits` returns them.
        values: The values of own tokens ``(*allruns, B, n, H)`` or of shared ones
            ``(*allruns, n, H)``.

    Returns:
        The attention weights and the attended values.
    """
    if values.ndim == logits.ndim:
        alpha, attended = _Attended.apply(logits, values)
        return alpha.mT, attended[..., 0, :]
    alpha, attended = _Attended.apply(logits.transpose(-3, -1), values.mT[..., None])
    return alpha.movedim(-1, -3), attended[..., 0, :].mT


class _Attended(torch.autograd.Function):
    """The softmax of logits ``(..., n, k)`` over ``n``, and the sum of values weighted by it.

    The values have the logits' shape or ``(..., n, 1)``. The gradient at the logits is
    ``alpha (v - y) g`` for outputs ``y``: no product of their size is kept but ``alpha``.
    """

    @staticmethod
    def forward(ctx, logits, values):
        alpha = logits.softmax(dim=-2)
        if values.shape[-1] == 1:
            attended = values.mT @ alpha
        else:
            attended = (alpha * values).sum(dim=-2, keepdim=True)
        ctx.save_for_backward(values, alpha, attended)
        ctx.set_materialize_grads(False)
        return alpha, attended

    @staticmethod
    def backward(ctx, g_alpha, g):
        values, alpha, attended = ctx.saved_tensors
        g_logits, g_values = None, None
        if g is not None and values.shape[-1] == 1:
            g_logits = ((values - attended) * g).mul_(alpha)
            g_values = alpha @ g.mT
        elif g is not None:
            g_values = alpha * g
            g_logits = (values - attended) * g_values
        if g_alpha is not None:
            of_alpha = alpha * (g_alpha - (alpha * g_alpha).sum(dim=-2, keepdim=True))
            g_logits = of_alpha if g_logits is None else g_logits + of_alpha
        return g_logits, g_values


class _InnerProducts(torch.autograd.Function):
    """``x y^T`` for rows, with a gradient for ``y`` in the layout of ``y``.

    Autograd forms ``x^T g`` instead, which is several times slower for many small matrices.
    """

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x @ y.mT

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return g @ y if wanted[0] else None, g.mT @ x if wanted[1] else None


def _inner_products(
    x: Float[Tensor, "*x a c"], y: Float[Tensor, "*y b c"]
) -> Float[Tensor, "*xy a b"]:
    axes = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return _InnerProducts.apply(x.expand(*axes, -1, -1), y.expand(*axes, -1, -1))


def head_values(
    alpha: Float[Tensor, "*data B H n"],
    context: Float[Tensor, "*examples d"],
    W_V: Float[Tensor, "*runs H d d_v"],
    tokens: str,
) -> Float[Tensor, "*allruns B H d_v"]:
    """``W_V^T z_h``; the tokens' values are formed first where that is cheaper.

    Args:
        alpha: Attention weights.
        context: Tokens as rows, own ``(*data, B, n, d)`` or shared ``(*data, n, d)``.
        W_V: Value maps of the heads.
        tokens: Which of the two, as :func:`token_axes` says it.

    Returns:
        The value of every head.
    """
    (B, _, n), (d, d_v) = alpha.shape[-3:], W_V.shape[-2:]
    shared = tokens == SHARED
    first = (n if shared else B * n) * d * d_v + B * n * d_v
    if first < B * (n * d + d * d_v):
        if shared:
            values = context[..., None, :, :] @ W_V  # (*allruns, H, n, d_v)
            return (values.mT @ alpha.movedim(-3, -1)).movedim(-1, -3)
        values = torch.einsum("...bnd,...hdv->...bnhv", context, W_V)
        return (alpha.mT[..., None] * values).sum(dim=-3)
    z = torch.einsum(f"...bhn,{tokens}->...bhd", alpha, context)
    return torch.einsum("...bhd,...hdv->...bhv", z, W_V)


# --- sums over heads ------------------------------------------------------------------------------


def _chain_costs(B: int, a: int, b: int, c: int) -> tuple[int, int]:
    """Multiplications with the product of the two matrices first, and with one after the other."""
    return a * b * c + B * a * c, B * b * (a + c)


def product_first(B: int, a: int, b: int, c: int) -> bool:
    """Whether vectors are sent through two matrices cheaper when those are multiplied first.

    Args:
        B: The number of vectors.
        a: The length of a vector.
        b: The number of columns of the first matrix, ``(a, b)``.
        c: The number of columns of the second matrix, ``(b, c)``.

    Returns:
        True if the product of the matrices comes first, False if the vectors go through each.
    """
    product, each = _chain_costs(B, a, b, c)
    return product < each


def chain_cost(B: int, a: int, b: int, c: int) -> int:
    """Multiplications that send vectors through two matrices, in the cheaper order.

    Args:
        B: The number of vectors.
        a: The length of a vector.
        b: The number of columns of the first matrix, ``(a, b)``.
        c: The number of columns of the second matrix, ``(b, c)``.

    Returns:
        Their number.
    """
    return min(_chain_costs(B, a, b, c))


def add_heads(
    z: Float[Tensor, "*data B H d"],
    W_V: Float[Tensor, "*runs H d_h d"],
    W_O: Float[Tensor, "*runs H d_o d_h"],
) -> Float[Tensor, "*allruns B d_o"]:
    """``sum_h W_O^h W_V^h z_h``; the product of the two is formed first where that is cheaper.

    Args:
        z: Attended tokens of every head.
        W_V: Value maps of the heads, acting from the left.
        W_O: Output maps of the heads, acting from the left.

    Returns:
        The sum over the heads, one vector for each example.
    """
    B, (d_h, d), d_o = z.shape[-3], W_V.shape[-2:], W_O.shape[-2]
    if product_first(B, d, d_h, d_o):
        product = torch.einsum("...hkd,...hok->...hdo", W_V, W_O)
        return torch.einsum("...bhd,...hdo->...bo", z, product)
    values = torch.einsum("...bhd,...hkd->...bhk", z, W_V)
    return torch.einsum("...bhk,...hok->...bo", values, W_O)


def combine_heads(
    values: Float[Tensor, "*allruns B Hd_v"],
    W_O: Float[Tensor, "*runs Hd_v d_o"],
    W_D: Float[Tensor, "*runs d_o d_out"],
) -> Float[Tensor, "*allruns B d_out"]:
    """``values W_O W_D``, multiplied in the cheaper order.

    Args:
        values: The values of all heads side by side.
        W_O: The output map.
        W_D: The read-out.

    Returns:
        The outputs, one vector for each example.
    """
    if product_first(values.shape[-2], *W_O.shape[-2:], W_D.shape[-1]):
        return values @ (W_O @ W_D)
    return values @ W_O @ W_D
