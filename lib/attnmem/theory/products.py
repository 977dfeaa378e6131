"""The attention of :mod:`attnmem.core.layers` in the cheapest order of products, for trainings.

A product of three matrices costs as much as the order makes it. The functions here count the
multiplications of each order and take the least. That changes rounding only. Examples or heads stay
last in the softmax: on a CPU it is several times slower along a last axis of fewer than 16 entries.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_Maps = Float[Tensor, "*runs H d d_h"]
_Tokens = Float[Tensor, "*examples d"]  # own contexts (*runs, B, n, d), or (*runs, n, d)
_Queries = Float[Tensor, "*data B d"]
_Attention = Float[Tensor, "*allruns B H n"]

OWN, SHARED = "...bnd", "...nd"  # einsum axes of contexts


def token_axes(context: Tensor, query: Tensor) -> str:
    """Whether examples have contexts of their own ``(*data, B, n, d)`` or one for all."""
    return OWN if context.ndim == query.ndim + 1 else SHARED


def attend(
    W_Q: _Maps, W_K: _Maps, context: _Tokens, query: _Queries
) -> tuple[_Attention, Float[Tensor, "*allruns B H d"]]:
    """Every head's attention weights, and the mean ``z_h = E^T alpha_h`` of the tokens."""
    alpha = attention_weights(W_Q, W_K, context, query)
    return alpha, torch.einsum(f"...bhn,{token_axes(context, query)}->...bhd", alpha, context)


def attention_weights(W_Q: _Maps, W_K: _Maps, context: _Tokens, query: _Queries) -> _Attention:
    """The softmax over the tokens of ``E W_K W_Q^T e``, for every head."""
    axes = token_axes(context, query)
    (B, d), (H, d_h), n = query.shape[-2:], W_Q.shape[-3::2], context.shape[-2]
    vector_by_vector = B * (2 * d * d_h + n * d)  # E (W_K (W_Q^T e)); multiplications of each head
    head_product_first = d * d * d_h + B * (d * d + n * d)  # E ((W_K W_Q^T) e)
    if axes == SHARED:
        shared_keys_first = min(d * d_h * d + n * d * d, 2 * n * d * d_h) + B * n * d
        if shared_keys_first < min(vector_by_vector, head_product_first):  # (E W_K W_Q^T) e
            E = context[..., None, :, :]
            first = product_first(n, d, d_h, d)
            asked = E @ (W_K @ W_Q.mT) if first else (E @ W_K) @ W_Q.mT
            logits = asked.flatten(-3, -2) @ query.mT  # (*allruns, H n, B)
            return logits.unflatten(-2, (H, n)).softmax(dim=-2).movedim(-1, -3)
    if head_product_first < vector_by_vector:
        product = torch.einsum("...hdk,...hek->...dhe", W_Q, W_K)
        key = torch.einsum("...bd,...dhe->...bhe", query, product)
    else:
        key = torch.einsum("...bd,...hdk->...bhk", query, W_Q)
        key = torch.einsum("...bhk,...hdk->...bhd", key, W_K)
    return torch.einsum(f"{axes},...bhd->...bnh", context, key).softmax(dim=-2).mT


def head_values(
    alpha: Float[Tensor, "*data B H n"], context: _Tokens, W_V: _Maps, axes: str
) -> Float[Tensor, "*allruns B H d_v"]:
    """The heads' values ``W_V^T z_h``; those of the tokens are formed first where it is cheaper."""
    (B, _, n), (d, d_v) = alpha.shape[-3:], W_V.shape[-2:]
    contexts = 1 if axes == SHARED else B
    if contexts * n * d * d_v + B * n * d_v >= B * (n * d + d * d_v):
        z = torch.einsum(f"...bhn,{axes}->...bhd", alpha, context)
        return torch.einsum("...bhd,...hdv->...bhv", z, W_V)
    if axes == SHARED:
        values = context[..., None, :, :] @ W_V  # (*allruns, H, n, d_v)
        return (values.mT @ alpha.movedim(-3, -1)).movedim(-1, -3)
    values = torch.einsum("...bnd,...hdv->...bnhv", context, W_V)
    return (alpha.mT[..., None] * values).sum(dim=-3)


def product_first(B: int, a: int, b: int, c: int) -> bool:
    """Whether ``B`` vectors pass matrices ``(a, b)`` and ``(b, c)`` cheaper by their product."""
    return a * b * c + B * a * c < B * b * (a + c)
