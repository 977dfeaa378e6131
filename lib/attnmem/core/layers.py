"""The two papers' attention layers, each a pure function over a tuple of weights.

In both, a softmax over the tokens says where a query looks, and the output is linear in the tokens
that it sees. Mahdavi et al. give a layer a context and a query beside it (:func:`mha`); Dana et al.
give it a sequence, whose last token asks (:func:`aot`). All else in this book is about what the
weights of these two functions can make of given examples.

Leading ``*runs`` axes are layers side by side; examples are the axis ``B``. Data may have such axes
of their own (``*data``), and results have both (``*allruns``).
"""

from __future__ import annotations

import functools
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


def _widest(*tensors: Tensor) -> list[Tensor]:
    """All in the most precise dtype among them."""
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(dtype) for tensor in tensors]


# --- Mahdavi et al.: multi-head attention over a context and a query ----------------------------


def _fit_together(context, query) -> None:
    if context.ndim not in (query.ndim, query.ndim + 1):
        shape = "(*runs, B, n, d) or (*runs, n, d), with the run axes of the query"
        refuse("context", f"shape {tuple(context.shape)}", f"shape {shape}")
    if not context.shape[-2]:
        refuse("context", f"shape {tuple(context.shape)}", "at least one token")
    if context.ndim == query.ndim + 1:
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
    _, z = attend(W_Q, W_K, context, query)  # Sec. 3, steps 1 to 3
    values = torch.einsum("...bhd,...hdv->...bhv", z, W_V)  # step 4
    # Steps 5 and 6: the heads' values side by side pass W_O, and the read-out W_D.
    outputs = values.flatten(-2) @ W_O @ W_D
    if skip:
        outputs = outputs + query @ W_D
    return outputs


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
    _, A = attend(W_Q.mT, W_K.mT, x, last)
    values = torch.einsum("...bhd,...hkd->...bhk", A, W_V)
    return (last + torch.einsum("...bhk,...hdk->...bd", values, W_O)) @ W_U.mT


# --- what both layers share: softmax attention ----------------------------------------------------

# Letters of products: b is an example, n a token, h a head, d a dimension of tokens and queries, k
# one of the head's maps, v one of its values; "..." are runs.


def by_example(context: _Tokens, query: _Queries) -> Float[Tensor, "*data B_or_one n d"]:
    """The context of every example; one that all share gets an axis of size one for them."""
    if context.ndim == query.ndim:
        return context.unsqueeze(-3)
    return context


def attention_weights(W_Q: _Maps, W_K: _Maps, context: _Tokens, query: _Queries) -> _Attention:
    """Every head's softmax over the tokens of ``E W_K W_Q^T e``."""
    # From right to left, so that each product is one of a matrix and a vector: nothing larger than
    # alpha and z is formed, for own contexts and shared ones. theory.products has faster orders.
    q = torch.einsum("...bd,...hdk->...bhk", query, W_Q)  # W_Q^T e
    asked = torch.einsum("...bhk,...hdk->...bhd", q, W_K)  # W_K W_Q^T e
    return (asked @ by_example(context, query).mT).softmax(-1)  # E of each example


def attend(
    W_Q: _Maps, W_K: _Maps, context: _Tokens, query: _Queries
) -> tuple[_Attention, Float[Tensor, "*allruns B H d"]]:
    """Every head's attention weights, and the mean ``z_h = E^T alpha_h`` of the tokens."""
    alpha = attention_weights(W_Q, W_K, context, query)
    return alpha, alpha @ by_example(context, query)


# --- tables of embeddings -------------------------------------------------------------------------


def look_up(
    embedding: Float[Tensor, "*runs N d"], tokens: Int[Tensor, "*data B S"]
) -> Float[Tensor, "*allruns B S d"]:
    """The embedding of every token, each run from its own table."""
    (B, S), d = tokens.shape[-2:], embedding.shape[-1]
    runs = torch.broadcast_shapes(embedding.shape[:-2], tokens.shape[:-2])
    rows = tokens.long().flatten(-2)[..., None].expand(*runs, B * S, d)
    return embedding.expand(*runs, -1, d).gather(-2, rows).unflatten(-2, (B, S))
