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
    """Whether examples have contexts of their own ``(*data, B, n, d)`` or one for all."""
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
    """The softmax over the tokens of ``E W_K W_Q^T e``, multiplied in the cheapest order.

    All orders give the same numbers but for rounding; the cost is counted per head. None of them
    forms the keys of every example.
    """
    tokens = token_axes(context, query)
    (B, d), (H, d_h), n = query.shape[-2:], W_Q.shape[-3::2], context.shape[-2]
    orders = {
        "vector by vector": B * (2 * d * d_h + n * d),
        "head product first": d * d * d_h + B * (d * d + n * d),
    }
    if tokens == SHARED:
        orders["shared keys first"] = min(_chain_costs(n, d, d_h, d)) + B * n * d
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


# --- values ---------------------------------------------------------------------------------------


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


# --- sums over heads ------------------------------------------------------------------------------


def _chain_costs(B: int, a: int, b: int, c: int) -> tuple[int, int]:
    """Multiplications with the product of the two matrices first, and with one after the other."""
    return a * b * c + B * a * c, B * b * (a + c)


def product_first(B: int, a: int, b: int, c: int) -> bool:
    """Whether ``B`` vectors pass matrices ``(a, b)`` and ``(b, c)`` cheaper by their product."""
    product, each = _chain_costs(B, a, b, c)
    return product < each


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
