r"""Attention to contexts of a few tokens, computed with the examples along the last axis.

A softmax does not change when all its logits move together, so tokens are taken relative to the
last one, :math:`\delta_s = x_s - x_n`: one token less to attend to, and

.. math:: \textstyle\sum_h W_O^h W_V^h z_h = \bigl(\sum_h W_O^h W_V^h\bigr) x_n
          + \sum_h W_O^h W_V^h \sum_{s<n} \alpha_{h,s} \delta_s .

Three roads lead to these sums; :func:`attend_and_add_columns` takes the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from .once import once
from .products import chain_cost, product_first

Sums = Float[Tensor, "*allruns d_o B"]  # over heads

# Multiplications inside a matrix product that take as long as one number that is written, read and
# summed outside of one: between 10 and 30 on one core, for arrays inside and outside its cache.
PASS = 16


def attend_and_add_columns(
    W_Q: Float[Tensor, "*runs H d d_h"],
    W_K: Float[Tensor, "*runs H d d_h"],
    W_V: Float[Tensor, "*runs H d_v d"],
    W_O: Float[Tensor, "*runs H d_o d_v"],
    context: Float[Tensor, "*data n d B"],
    query: Float[Tensor, "*data d B"],
) -> Float[Tensor, "*allruns d_o B"]:
    """:func:`attend_and_add` for short contexts, examples last: long rows make all sums fast.

    It is for training, on first derivatives by autograd. Where an example attends to tokens
    ``10^k`` times as small as its last one, ``k`` digits are lost. No gradient goes from a context
    of one token to ``W_Q``, ``W_K`` and ``query``.

    Args:
        W_Q: Query maps of the heads, which act from the right.
        W_K: Key maps of the heads, which act from the right.
        W_V: Value maps of the heads, which act from the left.
        W_O: Output maps of the heads, which act from the left.
        context: One context per example, tokens as columns.
        query: One column per example; it may differ from the last token.

    Returns:
        The sum over heads, one column per example.
    """
    last = context[..., -1, :, :]
    if context.shape[-3] == 1:
        return _of_last(W_V, W_O, last)
    others = context[..., :-1, :, :] - last[..., None, :, :]
    road = _cheapest_road(W_Q, W_O, others)
    return road(W_Q, W_K, W_V, W_O, others, query, last)


def _cheapest_road(W_Q: Tensor, W_O: Tensor, others: Tensor) -> Callable[..., Tensor]:
    """The road with the least cost for ``B`` examples and ``m`` other tokens.

    A cost is the number of multiplications in the products of the forward pass, plus ``PASS`` for
    every number of the arrays that are multiplied and summed outside of them. The backward pass
    does about twice as much of both on each road.
    """
    (H, d, d_h), (d_o, d_v), (m, _, B) = W_Q.shape[-3:], W_O.shape[-2:], others.shape[-3:]
    narrow = H * B * ((1 + m) * d * d_h + m * d * d_v + d_v * d_o)
    wide = H * (chain_cost(B, d, d_h, d) + chain_cost(B, d, d_v, d_o))
    costs: dict[Callable[..., Tensor], int] = {
        _through_narrow_heads: narrow + PASS * B * 2 * m * H * (d_h + d_v),
        _through_wide_heads: wide + PASS * B * 2 * m * H * d,
    }
    if m == 1:
        outer = H * d * d_v * d_o + H * d * d_h * d + B * H * d * (d + d_o)
        costs = {_through_outer_products: outer + PASS * B * d * (d + d_o), **costs}
    return min(costs, key=costs.__getitem__)


def _of_last(W_V: Tensor, W_O: Tensor, last: Tensor) -> Float[Tensor, "*allruns d_o B"]:
    """What all heads make of the last token, by two products whatever the number of heads."""
    return _over_heads(W_O) @ W_V.flatten(-3, -2) @ last


def _over_heads(W: Float[Tensor, "*runs H d_o k"]) -> Float[Tensor, "*runs d_o Hk"]:
    """One matrix whose product with all heads' vectors is the sum over heads."""
    return W.transpose(-3, -2).flatten(-2)


# --- any number of other tokens, narrow heads -----------------------------------------------------


def _through_narrow_heads(W_Q, W_K, W_V, W_O, others, query, last) -> Sums:
    """Keys and values of every token: nothing is larger than ``H (d_h + d_v) B``."""
    q = _projected(W_Q.mT, query)
    k = _projected(W_K.mT[..., None, :, :, :], others)  # (*allruns, m, H, d_h, B)
    alpha = _softmax_with_zero((q[..., None, :, :, :] * k).sum(dim=-2))
    v = _projected(W_V[..., None, :, :, :], others)
    z = (alpha[..., None, :] * v).sum(dim=-4)
    return _of_last(W_V, W_O, last) + _over_heads(W_O) @ z.flatten(-3, -2)


def _projected(
    W: Float[Tensor, "*runs H k d"], x: Float[Tensor, "*data d B"]
) -> Float[Tensor, "*allruns H k B"]:
    """One product for all heads."""
    return (W.flatten(-3, -2) @ x).unflatten(-2, W.shape[-3:-1])


def _softmax_with_zero(logits: Float[Tensor, "*runs m H B"]) -> Float[Tensor, "*runs m H B"]:
    """The softmax of ``logits`` and one zero, the logit of the token that all are relative to."""
    zero = torch.zeros_like(logits[..., :1, :, :])
    return torch.cat([logits, zero], dim=-3).softmax(dim=-3)[..., :-1, :, :]


# --- any number of other tokens, wide heads -------------------------------------------------------


def _through_wide_heads(W_Q, W_K, W_V, W_O, others, query, last) -> Sums:
    """Attended tokens of every head, of size ``H d B``; products of two maps where cheaper."""
    (d, d_h), (d_o, d_v), B = W_Q.shape[-2:], W_O.shape[-2:], query.shape[-1]
    if product_first(B, d, d_h, d):
        keys = _projected(W_K @ W_Q.mT, query)
    else:
        keys = W_K @ _projected(W_Q.mT, query)
    z = _Mixture.apply(keys, others.expand(*keys.shape[:-3], -1, -1, -1))
    if product_first(B, d, d_v, d_o):
        out = _over_heads(W_O @ W_V) @ z.flatten(-3, -2)
    else:
        out = _over_heads(W_O) @ (W_V @ z).flatten(-3, -2)
    return _of_last(W_V, W_O, last) + out


class _Mixture(torch.autograd.Function):
    """``sum_s alpha_s x_s`` of each head, ``alpha`` the softmax of ``key x_s`` and of one zero.

    ``keys`` (*runs, H, d, B), ``others`` (*runs, m, d, B); the zero is the logit of the token that
    the others are relative to. The backward pass is written out: nothing of size H d B but the keys
    is kept, and the sums over heads are formed in place.
    """

    @staticmethod
    def forward(ctx, keys, others):
        alpha = _softmax_with_zero(_products(keys, others))
        ctx.save_for_backward(keys, others, alpha)
        return _mixtures(alpha, others)

    @staticmethod
    @once
    def backward(ctx, g):
        keys, others, alpha = ctx.saved_tensors
        g_alpha = _products(g, others)
        g_logits = alpha * (g_alpha - (alpha * g_alpha).sum(dim=-3, keepdim=True))
        pairs = zip(alpha.unbind(dim=-3), g_logits.unbind(dim=-3), strict=True)
        g_others = [
            (g * a[..., None, :]).addcmul_(keys, g_l[..., None, :]).sum(dim=-3) for a, g_l in pairs
        ]
        return _mixtures(g_logits, others), torch.stack(g_others, dim=-3)


def _products(
    x: Float[Tensor, "*runs H d B"], tokens: Float[Tensor, "*runs m d B"]
) -> Float[Tensor, "*runs m H B"]:
    each = [(x * token[..., None, :, :]).sum(dim=-2) for token in tokens.unbind(dim=-3)]
    return torch.stack(each, dim=-3)


def _mixtures(
    weights: Float[Tensor, "*runs m H B"], tokens: Float[Tensor, "*runs m d B"]
) -> Float[Tensor, "*runs H d B"]:
    first, *others = (
        (weight[..., None, :], token[..., None, :, :])
        for weight, token in zip(weights.unbind(dim=-3), tokens.unbind(dim=-3), strict=True)
    )
    mixed = first[0] * first[1]
    for weight, token in others:
        mixed.addcmul_(weight, token)
    return mixed


# --- one other token ------------------------------------------------------------------------------


def _through_outer_products(W_Q, W_K, W_V, W_O, others, query, last) -> Sums:
    r"""Logits and mixtures by products with ``H x d^2`` matrices, for :math:`m = 1`.

    With :math:`A_h = W_Q^h (W_K^h)^\top` and :math:`M_h = W_O^h W_V^h`, one row a head each,

    .. math:: \sigma = \operatorname{sigmoid}(A \operatorname{vec}(q \delta^\top)), \qquad
              \textstyle\sum_h \sigma_h M_h \delta = \operatorname{mat}(M^\top \sigma)\, \delta .

    Nothing is larger than ``d (d + d_o) B``, whatever the number of heads.
    """
    A, M, delta = W_Q @ W_K.mT, W_O @ W_V, others[..., 0, :, :]
    runs = torch.broadcast_shapes(A.shape[:-3], query.shape[:-2])
    maps = (x.expand(*runs, *x.shape[-3:]).reshape(-1, *x.shape[-3:]) for x in (A, M))
    columns = (x.expand(*runs, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (query, delta))
    sums = _OuterProducts.apply(*maps, *columns)
    return M.sum(dim=-3) @ last + sums.view(*runs, *sums.shape[-2:])


class _OuterProducts(torch.autograd.Function):
    """:func:`outer_products` for autograd."""

    @staticmethod
    def forward(ctx, A, M, q, delta):
        out, kept = outer_products(A, M, q, delta)
        ctx.save_for_backward(A, M, q, delta, *kept)
        return out

    @staticmethod
    @once
    def backward(ctx, g):
        A, M, q, delta, *kept = ctx.saved_tensors
        return of_outer_products(A, M, q, delta, kept, g)


def outer_products(
    A: Float[Tensor, "R H d d"],
    M: Float[Tensor, "R H d_o d"],
    q: Float[Tensor, "R d B"],
    delta: Float[Tensor, "R d B"],
) -> tuple[Float[Tensor, "R d_o B"], tuple[Tensor, ...]]:
    """``sum_h sigmoid(q^T A_h delta) M_h delta`` for every column.

    Args:
        A: One matrix a head, of the logits.
        M: One matrix a head, of the outputs.
        q: Queries.
        delta: Tokens, relative to the last one.

    Returns:
        The sums, and what :func:`of_outer_products` needs besides.
    """
    R, d_o, d, B = len(M), *M.shape[2:], q.shape[-1]
    pairs = _pairs(q, delta)
    alpha = torch.bmm(A.flatten(2), pairs).sigmoid_()
    mixed = torch.bmm(M.flatten(2).mT, alpha).view(R, d_o, d, B)
    return (mixed * delta[:, None]).sum(dim=2), (pairs, alpha, mixed)


def of_outer_products(
    A: Tensor, M: Tensor, q: Tensor, delta: Tensor, kept: Sequence[Tensor], g: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of :func:`outer_products`; its arrays of size ``d^2 B`` are used in place.

    Args:
        A: As there.
        M: As there.
        q: As there.
        delta: As there.
        kept: What it returned besides the sums.
        g: The gradient at the sums, ``(R, d_o, B)``.

    Returns:
        The gradients at ``A``, ``M``, ``q`` and ``delta``.
    """
    pairs, alpha, mixed = kept
    R, d, B = q.shape
    g_mixed = _pairs(g, delta)
    g_logits = of_sigmoid_(torch.bmm(M.flatten(2), g_mixed), alpha)
    g_pairs = torch.bmm(A.flatten(2).mT, g_logits).view(R, d, d, B)
    g_A = torch.bmm(g_logits, pairs.mT).view_as(A)
    g_M = torch.bmm(alpha, g_mixed.mT).view_as(M)
    g_q = (g_pairs * delta[:, None]).sum(dim=2)
    g_delta = (mixed * g.unsqueeze(2)).sum(dim=1)
    g_delta += g_pairs.mul_(q.unsqueeze(2)).sum(dim=1)
    return g_A, g_M, g_q, g_delta


def of_sigmoid_(g: Tensor, alpha: Tensor) -> Tensor:
    """The gradient at the logits of ``alpha``, written over that at ``alpha``, in one pass.

    Args:
        g: The gradient at ``alpha``.
        alpha: The sigmoid of the logits.

    Returns:
        ``g``, times ``alpha (1 - alpha)``.
    """
    return torch.ops.aten.sigmoid_backward.grad_input(g, alpha, grad_input=g)


def _pairs(x: Float[Tensor, "R a B"], y: Float[Tensor, "R b B"]) -> Float[Tensor, "R ab B"]:
    """The products of every entry of ``x`` with every one of ``y``, the latter's fastest."""
    return (x.unsqueeze(2) * y.unsqueeze(1)).flatten(1, 2)
