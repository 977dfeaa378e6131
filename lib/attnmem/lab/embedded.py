r"""Heads with scalar values on embedded data, and the loss of what is decoded from them.

A query :math:`q` and tokens :math:`x_s` are embedded by one matrix, a bias and positions, and

.. math:: \ell_{h,s} = \lambda\, (W_E x_s + p_s)^\top W_K^h (W_Q^h)^\top (W_E q + b + p_0) , \qquad
          y_h = \textstyle\sum_s \alpha_{h,s}\, w_h^\top (W_E x_s + p_s + b) ,

where :math:`\alpha` is the softmax of the logits over the tokens; the bias of the tokens would add
the same to all logits of a head. Nothing is embedded but a shared context. The gradient is written
out, so that it is laid out as the weights are and arrays are used in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

LOG2_E = math.log2(math.e)


class EmbeddedWeights(NamedTuple):
    """The weights of the model, in stacks of runs; queries and keys act from the right."""

    W_E: Float[Tensor, "R d c"]  # embeds tokens and queries
    b_E: Float[Tensor, "R d"]
    W_Q: Float[Tensor, "R H d d_h"]
    W_K: Float[Tensor, "R H d d_h"]
    W_V: Float[Tensor, "R H d 1"]
    W_O: Float[Tensor, "R H d_o"]  # of each head one row, its part of the vector that is decoded
    W_D: Float[Tensor, "R d_out d_o"]  # decodes
    b_D: Float[Tensor, "R d_out"]


def cross_entropy_vjp(
    logits: Float[Tensor, "R N B"], classes: Int[Tensor, "R B"]
) -> tuple[Float[Tensor, "R B"], Callable[[Tensor], Float[Tensor, "R N B"]]]:
    """The cross-entropy of a softmax over ``N`` classes, one column for each example.

    The function from the gradient at the losses to that at the logits may be called once.
    """
    largest, right = logits.amax(dim=1, keepdim=True), classes[:, None]
    shares = (logits - largest).mul_(LOG2_E).exp2_()  # on a CPU several times faster than exp
    total = shares.sum(dim=1, keepdim=True)
    losses = total.log().add_(largest).sub_(logits.gather(1, right))[:, 0]

    def vjp(g):  # (R, 1, B) or (R, 1, 1): g times softmax, less g at the right class
        return shares.mul_(g / total).scatter_add_(1, right, g.neg().expand_as(right))

    return losses, vjp


def embedded_losses(
    P: EmbeddedWeights,
    positions: Float[Tensor, "places d"],
    scale: float,
    contexts: Tensor,
    queries: Float[Tensor, "R B c"],
    labels: Tensor,
) -> tuple[Float[Tensor, "R B"], Float[Tensor, "R d_out B"], Callable[[Tensor], EmbeddedWeights]]:
    """The loss of every example, the outputs, and a function from its gradient to the weights'.

    ``positions`` are the query's and those of the ``n`` tokens, ``scale`` the logits' factor.
    Contexts are own ``(R, B, n, c)`` or shared ``(R, n, c)``. Labels ``(R, B)`` are classes, for a
    cross-entropy, or real numbers, for a squared error. The function overwrites what it needs, so
    it may be called once.
    """
    attend = _own if contexts.ndim == 4 else _shared
    heads, of_heads = attend(P, positions, scale, contexts, queries)
    decoder = P.W_D @ P.W_O.mT
    outputs = torch.baddbmm(P.b_D[..., None], decoder, heads)
    if labels.is_floating_point():
        apart = outputs - labels[:, None]
        losses = apart.square()[:, 0]
    else:
        losses, of_losses = cross_entropy_vjp(outputs, labels)

    def gradient(g):
        g = g[:, None]
        g = 2 * apart * g if labels.is_floating_point() else of_losses(g)
        g_decoder = g @ heads.mT
        attended = of_heads(decoder.mT @ g)
        return EmbeddedWeights(*attended, g_decoder.mT @ P.W_D, g_decoder @ P.W_O, g.sum(dim=-1))

    return losses, outputs, gradient


# --- logits of queries as they came ---------------------------------------------------------------


def _forms(P: EmbeddedWeights, scale: float, tokens: Tensor, bias: Tensor):
    """Of each head and token the vector and the number that give the logit of a query, in bits.

    Embedded ``tokens`` are ``(R, m, d)``, the vectors ``(R, H m, c)``, the numbers ``(R, H m, 1)``;
    ``bias``, ``(R, d)``, is that of every embedded query.
    """
    scale *= LOG2_E
    tokens = (tokens * scale)[:, None]
    keys = tokens @ P.W_K
    asked = keys @ P.W_Q.mT  # the logit of an embedded query is its product with this
    flat, bias = asked.flatten(1, 2), bias[:, None]

    def of_forms(g_vectors, g_numbers):
        g_asked = (g_vectors @ P.W_E.mT).addcmul_(g_numbers, bias).view_as(asked)
        g_keys = g_asked @ P.W_Q
        return (
            flat.mT @ g_vectors,  # W_E
            (flat.mT @ g_numbers)[..., 0],  # bias
            g_asked.mT @ keys,  # W_Q
            tokens.mT @ g_keys,  # W_K
            (g_keys @ P.W_K.mT).sum(dim=1).mul_(scale),  # the tokens, of all heads
        )

    return flat @ P.W_E, flat @ bias.mT, of_forms


# --- one context for all examples: arrays (R, H, n, B) --------------------------------------------


def _shared(P, positions, scale, contexts, queries):
    embedded = torch.baddbmm(positions[1:], contexts, P.W_E.mT)
    vectors, numbers, of_forms = _forms(P, scale, embedded, P.b_E + positions[0])
    tokens, w = embedded + P.b_E[:, None], P.W_V[..., 0]
    values = w @ tokens.mT
    shares = torch.baddbmm(numbers, vectors, queries.mT).view(*values.shape, -1)
    shares = shares.sub_(shares.amax(dim=2, keepdim=True)).exp2_()
    total = shares.sum(dim=2, keepdim=True)
    heads = (values[:, :, None] @ shares).div_(total)

    def of_heads(g):
        # With alpha the softmax, the gradient is g alpha at the values, and at the logits, which
        # are in bits, g alpha (value - head) / log2(e).
        g_heads = shares.mul_(g[:, :, None].div(total).div_(LOG2_E))
        g_values = g_heads.sum(dim=-1).mul_(LOG2_E)
        g_logits = (values[..., None] - heads).mul_(g_heads).flatten(1, 2)
        g_numbers = g_logits.sum(dim=-1, keepdim=True)
        W_E, b_E, W_Q, W_K, g_tokens = of_forms(g_logits @ queries, g_numbers)
        of_values = g_values.mT @ w  # at the embedded tokens, through the values
        b_E += of_values.sum(dim=1)
        W_E.baddbmm_(g_tokens.add_(of_values).mT, contexts)
        return W_E, b_E, W_Q, W_K, (g_values @ tokens)[..., None]

    return heads[:, :, 0], of_heads


# --- own contexts: arrays (R, B, H, n) ------------------------------------------------------------


def _own(P, positions, scale, contexts, queries):
    R, B, n, c = contexts.shape
    w, flat = P.W_V[..., 0], contexts.flatten(0, 1)
    rows = torch.cat([P.W_E.mT, positions[1:].expand(R, -1, -1)], dim=1)
    vectors, numbers, of_forms = _forms(P, scale, rows, P.b_E + positions[0])
    maps = torch.cat([vectors, numbers], dim=-1)
    ones = queries.new_ones(1).expand(R, B, 1)
    keys = (torch.cat([queries, ones], dim=-1) @ maps.mT).view(R * B, -1, c + n)
    shares = torch.baddbmm(keys[..., c:], keys[..., :c], flat.mT).view(R, B, -1, n)
    shares = shares.sub_(shares.amax(dim=-1, keepdim=True)).exp2_()
    of_rows = w @ rows.mT
    of_rows[..., c:] += w @ P.b_E[..., None]
    values = (of_rows[:, None, :, :c] @ contexts.mT).add_(of_rows[:, None, :, c:])
    total = shares.sum(dim=-1)
    heads = (shares * values).sum(dim=-1).div_(total)

    def of_heads(g):
        g_heads = shares.mul_(g.mT.div(total).div_(LOG2_E)[..., None])  # as in _shared
        g_logits = values.sub_(heads[..., None]).mul_(g_heads).flatten(0, 1)
        g_keys = torch.cat([g_logits @ flat, g_logits], dim=-1).view(R, B, -1)
        g_vectors, g_numbers = (queries.mT @ g_keys).mT, g_keys.sum(dim=1)[..., None]
        W_E, b_E, W_Q, W_K, g_rows = of_forms(g_vectors, g_numbers)
        # A value is linear in the context, in its position, and in the bias.
        by_head = g_heads.transpose(1, 2).reshape(R, -1, B * n)
        of_values = [by_head @ contexts.flatten(1, 2), g_heads.sum(dim=1)]
        of_values = torch.cat(of_values, dim=-1).mul_(LOG2_E)
        of_bias = of_values[..., c:].sum(dim=-1, keepdim=True)
        W_V = (of_values @ rows).addcmul_(of_bias, P.b_E[:, None])
        b_E += (of_bias.mT @ w)[:, 0]
        W_E += g_rows.add_(of_values.mT @ w)[:, :c].mT
        return W_E, b_E, W_Q, W_K, W_V[..., None]

    return heads.mT, of_heads
