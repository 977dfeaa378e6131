"""The two papers' attention layers, each a pure function over a tuple of weights.

In both, a softmax over the tokens says where a query looks, and the output is linear in the tokens
that it sees. Mahdavi et al. give a layer a context and a query beside it (:func:`mha`); Dana et al.
give it a sequence, whose last token asks (:func:`aot`). All else in this book is about what the
weights of these two functions can make of given examples.

Leading ``*runs`` axes are layers side by side; examples are the axis ``B``.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import check_size, check_tokens, checked, refuse


class MHAWeights(NamedTuple):
    """Weights of one multi-head attention layer, in the letters of Mahdavi et al. (Sec. 3).

    ``safetensors.torch`` saves them, without pickles: ``save_file(weights._asdict(), path)`` and
    ``MHAWeights(**load_file(path))``.
    """

    W_Q: Float[Tensor, "*runs H d d_h"]
    W_K: Float[Tensor, "*runs H d d_h"]
    W_V: Float[Tensor, "*runs H d d_v"]
    W_O: Float[Tensor, "*runs H*d_v d_o"]
    W_D: Float[Tensor, "*runs d_o d_out"]


class AoTWeights(NamedTuple):
    """Weights of an attention-only transformer, in the letters of Dana et al. (equations 1 and 2).

    Their projections act from the left, ``(d_h, d)``, where those of Mahdavi et al. act from the
    right, ``(d, d_h)``. They are saved as :class:`MHAWeights` are.
    """

    embedding: Float[Tensor, "*runs N d"]
    positions: Float[Tensor, "*runs S d"]
    W_Q: Float[Tensor, "*runs H d_h d"]
    W_K: Float[Tensor, "*runs H d_h d"]
    W_V: Float[Tensor, "*runs H d_h d"]
    W_O: Float[Tensor, "*runs H d d_h"]
    W_U: Float[Tensor, "*runs N d"]


_Maps = Float[Tensor, "*runs H d d_h"]
_Tokens = Float[Tensor, "*examples d"]  # own contexts (*runs, B, n, d), or (*runs, n, d)
_Queries = Float[Tensor, "*data B d"]
_Attention = Float[Tensor, "*allruns B H n"]


def _widest(*tensors: Tensor) -> list[Tensor]:  # all in the most precise dtype among them
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(dtype) for tensor in tensors]


# --- Mahdavi et al.: multi-head attention over a context and a query ----------------------------


def _fit_together(context, query) -> None:
    own = context.ndim == query.ndim + 1
    if not own and context.ndim != query.ndim:
        shape = "(*runs, B, n, d) or (*runs, n, d), with the run axes of the query"
        refuse("context", f"shape {tuple(context.shape)}", f"shape {shape}")
    if not context.shape[-2]:
        refuse("context", f"shape {tuple(context.shape)}", "at least one token")
    if own:
        check_size("context", context, -3, query.shape[-2], "the number of queries")


def check_skip(weights: MHAWeights, query: Tensor) -> None:
    """Accept weights whose attention output can be added to the query."""
    check_size("weights.W_O", weights.W_O, -1, query.shape[-1], "d, which a skip adds to d_o")


def _fit_with_skip(weights, context, query, skip) -> None:
    _fit_together(context, query)
    if skip:
        check_skip(weights, query)


@checked(also=_fit_together)
def mha_attention(
    weights: MHAWeights, context: Float[Tensor, "*examples n d"], query: Float[Tensor, "*data B d"]
) -> Float[Tensor, "*runs B H n"]:
    r"""Attention weights :math:`\alpha_h` of every head: non-negative, each row sums to one.

    Source: Mahdavi et al. 2024, Sec. 3, step 2.
    """
    return attention_weights(*_widest(weights.W_Q, weights.W_K, context, query))


@checked(also=_fit_together)
def mha_features(
    weights: MHAWeights, context: Float[Tensor, "*examples n d"], query: Float[Tensor, "*data B d"]
) -> Float[Tensor, "*runs B Hd"]:
    r"""The feature matrix ``Z``: row ``t`` is :math:`[z_1^{(t)}; \dots; z_H^{(t)}]`.

    The output is linear in these rows, so their rank decides what one fixed attention memorizes.
    Source: Mahdavi et al. 2024, Sec. 3, step 3.
    """
    return attend(*_widest(weights.W_Q, weights.W_K, context, query))[1].flatten(-2)


@checked(also=_fit_with_skip)
def mha(
    weights: MHAWeights,
    context: Float[Tensor, "*examples n d"],
    query: Float[Tensor, "*data B d"],
    *,
    skip: bool = False,
) -> Float[Tensor, "*runs B d_out"]:
    r"""One multi-head attention layer, read out linearly.

    .. math:: y = W_D^\top W_O^\top [W_{V,1}^\top z_1; \dots; W_{V,H}^\top z_H],
              \qquad z_h = E^\top \operatorname{softmax}(E W_{K,h} W_{Q,h}^\top e)

    The rows of ``context`` are the tokens ``E``, own ``(*runs, B, n, d)`` or shared ``(*runs, n,
    d)``. With ``skip``, ``e`` is added to what ``W_D`` reads, which needs ``d_o = d``.

    Example:
        >>> W = torch.ones(2, 5, 1)
        >>> weights = MHAWeights(W, W, W, torch.ones(2, 4), torch.ones(4, 1))
        >>> mha(weights, torch.zeros(7, 3, 5), torch.ones(7, 5)).shape
        torch.Size([7, 1])

    Source: Mahdavi et al. 2024, Sec. 3; with ``skip``, Appendix C.
    """
    W_Q, W_K, W_V, W_O, W_D, context, query = _widest(*weights, context, query)
    alpha = attention_weights(W_Q, W_K, context, query)  # Sec. 3, steps 1 and 2
    # Steps 3 and 4: what each head sees, and its values. They stand side by side.
    values = head_values(alpha, context, W_V, token_axes(context, query)).flatten(-2)
    # Steps 5 and 6: all pass W_O, and the read-out W_D.
    first = _product_first(values.shape[-2], W_O.shape[-2], W_O.shape[-1], W_D.shape[-1])
    outputs = values @ (W_O @ W_D) if first else values @ W_O @ W_D
    return outputs + query @ W_D if skip else outputs


# --- Dana et al.: attention-only transformers over sequences of tokens ---------------------------


def _tokens_fit(weights, tokens) -> None:
    if not tokens.shape[-1]:
        refuse("tokens", f"shape {tuple(tokens.shape)}", "at least one token")
    check_tokens("tokens", tokens, weights.embedding.shape[-2])


@checked(also=_tokens_fit)
def aot_features(
    weights: AoTWeights, tokens: Int[Tensor, "*data B S"]
) -> Float[Tensor, "*runs B Hd"]:
    r"""The attention before output: row ``t`` is :math:`A(t) = [A^1(t); \dots; A^H(t)]`.

    Source: Dana et al. 2025, equation (1).
    """
    embedding, positions, W_Q, W_K, *_ = _widest(*weights)
    x = look_up(embedding, tokens) + positions[..., None, :, :]
    return attend(W_Q.mT, W_K.mT, x, x[..., -1, :])[1].flatten(-2)


@checked(also=_tokens_fit)
def aot(weights: AoTWeights, tokens: Int[Tensor, "*data B S"]) -> Float[Tensor, "*runs B N"]:
    r"""A one-layer attention-only transformer: logits of the token that follows the sequence.

    .. math:: T(t) = W_U \Bigl( x(t, S) + \sum_h W_O^h W_V^h A^h(t) \Bigr), \qquad
              A^h(t) = \sum_s \operatorname{softmax}_s
              \bigl( x(t, S)^\top (W_Q^h)^\top W_K^h \, x(t, s) \bigr) \, x(t, s)

    with ``x(t, s) = e(t_s) + pos_s``. Only the last position asks, and it sees all positions.
    Source: Dana et al. 2025, equations (1) and (2).
    """
    embedding, positions, W_Q, W_K, W_V, W_O, W_U = _widest(*weights)
    x = look_up(embedding, tokens) + positions[..., None, :, :]
    last = x[..., -1, :]
    _, z = attend(W_Q.mT, W_K.mT, x, last)
    return (last + _add_heads(z, W_V, W_O)) @ W_U.mT


# --- what both layers share: softmax attention, in the cheapest order of products -----------------

# A product of three matrices costs as much as the order makes it. The functions below count the
# multiplications of each order and take the least. That changes rounding only.

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
    tokens = token_axes(context, query)
    (B, d), (H, d_h), n = query.shape[-2:], W_Q.shape[-3::2], context.shape[-2]
    orders = {  # multiplications for each head
        "vector by vector": B * (2 * d * d_h + n * d),  # E (W_K (W_Q^T e))
        "head product first": d * d * d_h + B * (d * d + n * d),  # E ((W_K W_Q^T) e)
    }
    if tokens == SHARED:  # (E W_K W_Q^T) e
        orders["shared keys first"] = min(d * d_h * d + n * d * d, 2 * n * d * d_h) + B * n * d
    # Examples or heads stay last in the softmax: on a CPU it is several times slower along a last
    # axis of fewer than 16 entries.
    match min(orders, key=orders.__getitem__):
        case "shared keys first":
            E = context[..., None, :, :]
            first = _product_first(n, d, d_h, d)
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
    alpha: Float[Tensor, "*data B H n"], context: _Tokens, W_V: _Maps, tokens: str
) -> Float[Tensor, "*allruns B H d_v"]:
    """The heads' values ``W_V^T z_h``; those of the tokens are formed first where it is cheaper."""
    (B, _, n), (d, d_v) = alpha.shape[-3:], W_V.shape[-2:]
    if (n if tokens == SHARED else B * n) * d * d_v + B * n * d_v >= B * (n * d + d * d_v):
        z = torch.einsum(f"...bhn,{tokens}->...bhd", alpha, context)
        return torch.einsum("...bhd,...hdv->...bhv", z, W_V)
    if tokens == SHARED:
        values = context[..., None, :, :] @ W_V  # (*allruns, H, n, d_v)
        return (values.mT @ alpha.movedim(-3, -1)).movedim(-1, -3)
    values = torch.einsum("...bnd,...hdv->...bnhv", context, W_V)
    return (alpha.mT[..., None] * values).sum(dim=-3)


def _product_first(B: int, a: int, b: int, c: int) -> bool:
    """Whether ``B`` vectors pass matrices ``(a, b)`` and ``(b, c)`` cheaper by their product."""
    return a * b * c + B * a * c < B * b * (a + c)


def _add_heads(
    z: Float[Tensor, "*data B H d"],
    W_V: Float[Tensor, "*runs H d_h d"],
    W_O: Float[Tensor, "*runs H d_o d_h"],
) -> Float[Tensor, "*allruns B d_o"]:
    """``sum_h W_O^h W_V^h z_h``; the product of the two is formed first where that is cheaper."""
    B, (d_h, d), d_o = z.shape[-3], W_V.shape[-2:], W_O.shape[-2]
    if _product_first(B, d, d_h, d_o):
        product = torch.einsum("...hkd,...hok->...hdo", W_V, W_O)
        return torch.einsum("...bhd,...hdo->...bo", z, product)
    values = torch.einsum("...bhd,...hkd->...bhk", z, W_V)
    return torch.einsum("...bhk,...hok->...bo", values, W_O)


# --- tables of embeddings -------------------------------------------------------------------------


def look_up(
    embedding: Float[Tensor, "*runs N d"], tokens: Int[Tensor, "*data B S"]
) -> Float[Tensor, "*allruns B S d"]:
    """The embedding of every token, each run from its own table."""
    runs = torch.broadcast_shapes(embedding.shape[:-2], tokens.shape[:-2])
    (N, d), many = embedding.shape[-2:], math.prod(runs)
    # The tables are put one below the other. F.embedding's gradient might wait for the host.
    table = embedding.expand(*runs, N, d).reshape(many * N, d)
    first = N * torch.arange(many, device=tokens.device).view(*runs, 1, 1)
    rows = table.index_select(0, (tokens + first).flatten())
    return rows.view(*runs, *tokens.shape[-2:], d)
