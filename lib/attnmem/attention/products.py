"""Products of an attention layer in their cheapest orders, and look-ups in tables of embeddings.

All functions take leading run axes, as :mod:`attnmem.attention` describes them; ``allruns`` are
those of weights and data, broadcast against each other. Costs are multiplications of numbers.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

OWN, SHARED = "...bnd", "...nd"  # einsum axes of contexts


def token_axes(context: Tensor, query: Tensor) -> str:
    """Whether examples have contexts of their own ``(*data, B, n, d)`` or one for all."""
    return OWN if context.ndim == query.ndim + 1 else SHARED


def attend(
    W_Q: Float[Tensor, "*runs H d d_h"],
    W_K: Float[Tensor, "*runs H d d_h"],
    context: Float[Tensor, "*examples d"],
    query: Float[Tensor, "*data B d"],
) -> tuple[Float[Tensor, "*allruns B H n"], Float[Tensor, "*allruns B H d"]]:
    r"""Attention weights and attended tokens of every head, for one query per example.

    .. math:: \alpha_h = \operatorname{softmax}(E W_K W_Q^\top e), \qquad z_h = E^\top \alpha_h .
    """
    alpha = attention_weights(W_Q, W_K, context, query)
    return alpha, torch.einsum(f"...bhn,{token_axes(context, query)}->...bhd", alpha, context)


def attention_weights(
    W_Q: Float[Tensor, "*runs H d d_h"],
    W_K: Float[Tensor, "*runs H d d_h"],
    context: Float[Tensor, "*examples d"],
    query: Float[Tensor, "*data B d"],
) -> Float[Tensor, "*allruns B H n"]:
    """The softmax over the tokens of ``E W_K W_Q^T e``, in the cheapest order (costs per head)."""
    tokens = token_axes(context, query)
    (B, d), (H, d_h), n = query.shape[-2:], W_Q.shape[-3::2], context.shape[-2]
    orders = {
        "vector by vector": B * (2 * d * d_h + n * d),
        "head product first": d * d * d_h + B * (d * d + n * d),
    }
    if tokens == SHARED:
        orders["shared keys first"] = min(d * d_h * d + n * d * d, 2 * n * d * d_h) + B * n * d
    # Examples or heads stay last in the softmax: on a CPU it is several times slower along a last
    # axis of fewer than 16 entries.
    match min(orders, key=orders.__getitem__):
        case "shared keys first":
            E = context[..., None, :, :]
            first = product_first(n, d, d_h, d)
            asked = E @ (W_K @ W_Q.mT) if first else (E @ W_K) @ W_Q.mT
            logits = asked.flatten(-3, -2) @ query.mT  # (*allruns, H n, B)
            return logits.unflatten(-2, (H, n)).softmax(dim=-2).movedim(-1, -3)
        case "head product first":
            product = torch.einsum("...hdk,...hek->...dhe", W_Q, W_K)
            key = torch.einsum("...bd,...dhe->...bhe", query, product)
        case _:
            key = torch.einsum("...bd,...hdk->...bhk", query, W_Q)
            key = torch.einsum("...bhk,...hdk->...bhd", key, W_K)
    return torch.einsum(f"{tokens},...bhd->...bnh", context, key).softmax(dim=-2).mT


def head_values(
    alpha: Float[Tensor, "*data B H n"],
    context: Float[Tensor, "*examples d"],
    W_V: Float[Tensor, "*runs H d d_v"],
    tokens: str,
) -> Float[Tensor, "*allruns B H d_v"]:
    """``W_V^T z_h``; the tokens' values are formed first where that is cheaper."""
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


def product_first(B: int, a: int, b: int, c: int) -> bool:
    """Whether ``B`` vectors pass matrices ``(a, b)`` and ``(b, c)`` cheaper by their product."""
    return a * b * c + B * a * c < B * b * (a + c)


def add_heads(
    z: Float[Tensor, "*data B H d"],
    W_V: Float[Tensor, "*runs H d_h d"],
    W_O: Float[Tensor, "*runs H d_o d_h"],
) -> Float[Tensor, "*allruns B d_o"]:
    """``sum_h W_O^h W_V^h z_h``; the product of the two is formed first where that is cheaper."""
    B, (d_h, d), d_o = z.shape[-3], W_V.shape[-2:], W_O.shape[-2]
    if product_first(B, d, d_h, d_o):
        product = torch.einsum("...hkd,...hok->...hdo", W_V, W_O)
        return torch.einsum("...bhd,...hdo->...bo", z, product)
    values = torch.einsum("...bhd,...hkd->...bhk", z, W_V)
    return torch.einsum("...bhk,...hok->...bo", values, W_O)


# --- tables of embeddings -------------------------------------------------------------------------


def look_up(
    embedding: Float[Tensor, "*runs N d"], tokens: Int[Tensor, "*data B S"]
) -> Float[Tensor, "*allruns B S d"]:
    """The embedding of every token, each run from its own table; gradients repeat bit for bit."""
    runs = torch.broadcast_shapes(embedding.shape[:-2], tokens.shape[:-2])
    N, d = embedding.shape[-2:]
    table = embedding.expand(*runs, N, d).reshape(math.prod(runs), N, d)
    chosen = tokens.expand(*runs, *tokens.shape[-2:]).flatten(-2)
    chosen = chosen.reshape(len(table), chosen.shape[-1])
    rows = _Rows.apply if table.is_cuda else take_rows
    return rows(table, chosen).view(*runs, *tokens.shape[-2:], d)


def take_rows(table: Num[Tensor, "R N d"], chosen: Int[Tensor, "R m"]) -> Num[Tensor, "R m d"]:
    """The rows of each run's table that its integers choose."""
    # The tables are put one below the other. F.embedding's gradient might wait for the host.
    first = table.shape[1] * torch.arange(len(chosen), device=chosen.device)
    rows = table.flatten(0, 1).index_select(0, (chosen + first[:, None]).flatten())
    return rows.view(*chosen.shape, table.shape[-1])


def add_rows(
    rows: Float[Tensor, "R m d"], chosen: Int[Tensor, "R m"], N: int
) -> Float[Tensor, "R N d"]:
    """The gradient of :func:`take_rows`, as one product: on a GPU torch's own adds in any order."""
    vocabulary = torch.arange(N, device=rows.device)
    return (chosen[:, None] == vocabulary[:, None]).to(rows.dtype) @ rows


class _Rows(torch.autograd.Function):
    """:func:`take_rows` with :func:`add_rows`, for a GPU; transforms of ``torch.func`` know it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(table, chosen):
        return take_rows(table, chosen)

    @staticmethod
    def setup_context(ctx, inputs, output):
        table, chosen = inputs
        ctx.save_for_backward(chosen)
        ctx.save_for_forward(chosen)
        ctx.N = table.shape[-2]

    @staticmethod
    def backward(ctx, g):
        [chosen] = ctx.saved_tensors
        return add_rows(g, chosen, ctx.N), None

    @staticmethod
    def jvp(ctx, table, _):
        [chosen] = ctx.saved_tensors
        return take_rows(table, chosen)
