r"""Attention to pairs of tokens of a vocabulary, and the loss of what follows them.

A pair :math:`(a, b)` is asked for at its second place. With :math:`\delta = x_a - x_b`,

.. math:: \textstyle y = r_b + \sum_h M_h x_b + \sum_h \sigma_h M_h \delta , \qquad
          \sigma_h = \operatorname{sigmoid}(x_b^\top A_h \delta) ,

where :math:`r_b` is the residual stream, :math:`A_h = W_Q^h (W_K^h)^\top` and
:math:`M_h = W_O^h W_V^h`. The first two terms belong to single tokens of the vocabulary, so they
are computed once for each of them and looked up. Both gradients are written out: for models as
small as the published ones, most of a step's time would go to many small operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .losses import cross_entropy_vjp
from .once import once
from .short import of_outer_products, of_sigmoid_, outer_products
from .tables import add_columns, take_columns


class Maps(NamedTuple):
    """The four maps of a layer's heads, in stacks of runs.

    Attributes:
        W_Q: Query maps, which act from the left, ``(R, H, d_h, d)``.
        W_K: Key maps, which act from the left, ``(R, H, d_h, d)``.
        W_V: Value maps, which act from the left, ``(R, H, d_h, d)``.
        W_O: Output maps, which act from the left, ``(R, H, d_o, d_h)``.
    """

    W_Q: Float[Tensor, "R H d_h d"]
    W_K: Float[Tensor, "R H d_h d"]
    W_V: Float[Tensor, "R H d_h d"]
    W_O: Float[Tensor, "R H d_o d_h"]


def after_pairs(
    maps: Maps,
    inputs: Float[Tensor, "R 2 N d"],
    stream: Float[Tensor, "R N d_o"],
    tokens: Int[Tensor, "R B 2"],
) -> Float[Tensor, "R d_o B"]:
    """The residual stream at the second place, after attention to both places; for autograd.

    It has a first derivative. Where an example attends to a first token ``10^k`` times as small as
    the second, ``k`` digits are lost.

    Args:
        maps: The maps of the heads; a scale of the logits is in one of them.
        inputs: The attention's input at the two places, for every token of the vocabulary.
        stream: The residual stream at the second place, for every token.
        tokens: Pairs of integers in ``[0, N)``.

    Returns:
        One column for each pair.
    """
    return _AfterPairs.apply(*maps, inputs, stream, tokens)


def next_token_losses(
    unembedding: Float[Tensor, "R N d"],
    stream: Float[Tensor, "R d B"],
    answers: Int[Tensor, "R B"],
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R N B"]]:
    """The mean cross-entropy of the logits ``unembedding @ stream``, and these; for autograd.

    Args:
        unembedding: One row for every token of the vocabulary.
        stream: One column for each example.
        answers: The right tokens.

    Returns:
        The loss of each run, and the logits, which no gradient goes through.
    """
    return _NextTokenLosses.apply(unembedding, stream, answers)


# --- attention ------------------------------------------------------------------------------------


def after_pairs_vjp(
    maps: Maps, inputs: Tensor, stream: Tensor, tokens: Tensor
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """:func:`after_pairs`, and the gradients at its arguments from that at what it returns.

    Args:
        maps: As there.
        inputs: As there.
        stream: As there.
        tokens: As there.

    Returns:
        The columns, and a function from a gradient of their shape to those at the four maps, the
        inputs at the first and at the second place, and the stream, one column for each token.
    """
    W_Q, W_K, W_V, W_O = maps
    A, M, N = W_Q.mT @ W_K, W_O @ W_V, inputs.shape[2]
    alone = M.sum(dim=1)
    (first, second), (a, b) = inputs.mT.unbind(dim=1), tokens.unbind(dim=-1)
    looked_up = torch.cat([second, torch.baddbmm(stream.mT, alone, second)], dim=1)
    q, y = take_columns(looked_up, b).split([A.shape[-1], M.shape[-2]], dim=1)
    delta = take_columns(first, a).sub_(q)
    road = _shorter_road(A, M)
    update, kept = road.forward(A, M, q, delta)

    def vjp(g):
        g = g.contiguous()
        g_A, g_M, g_q, g_delta = road.backward(A, M, q, delta, kept, g)
        g_first = add_columns(g_delta, a, N)
        g_looked_up = add_columns(torch.cat([g_q.sub_(g_delta), g], dim=1), b, N)
        g_second, g_stream = g_looked_up.split([q.shape[1], g.shape[1]], dim=1)
        g_M = g_M + torch.bmm(g_stream, second.mT)[:, None]
        g_maps = W_K @ g_A.mT, W_Q @ g_A, W_O.mT @ g_M, g_M @ W_V.mT
        g_second = torch.baddbmm(g_second, alone.mT, g_stream)
        return *g_maps, g_first, g_second, g_stream

    return update.add_(y), vjp


class _AfterPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given):
        found, ctx.vjp = after_pairs_vjp(Maps(*given[:4]), *given[4:])
        ctx.save_for_backward(*given)  # which also tells whether one was changed since
        return found

    @staticmethod
    @once
    def backward(ctx, g):
        _ = ctx.saved_tensors
        *g_maps, g_first, g_second, g_stream = ctx.vjp(g)
        return *g_maps, torch.stack([g_first, g_second], dim=1).mT, g_stream.mT, None


class _Road(NamedTuple):
    """One way to form the sum over heads, and its gradient.

    Attributes:
        forward: From ``A`` (R, H, d, d), ``M`` (R, H, d_o, d), ``q`` and ``delta`` (R, d, B) to the
            sum (R, d_o, B), and what the gradient needs besides.
        backward: From the same, what is kept, and the gradient at the sum to those at the four.
    """

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


def _shorter_road(A: Tensor, M: Tensor) -> _Road:
    """Both roads have the same products; this one has less to write and read between them."""
    (H, d), d_o = A.shape[1:3], M.shape[2]
    return OUTER if d + d_o < 2 * H else WIDE


# Nothing is larger than H d B: keys A^T q and mixtures sigma delta of every head.


def _wide_forward(A, M, q, delta):
    R, H, d, B = *A.shape[:3], q.shape[-1]
    asks, moves = A.mT.flatten(1, 2), M.transpose(1, 2).flatten(2)  # of all heads at once
    keys = torch.bmm(asks, q).view(R, H, d, B)
    alpha = (keys * delta[:, None]).sum(dim=2, keepdim=True).sigmoid_()
    mixtures = (alpha * delta[:, None]).flatten(1, 2)
    return torch.bmm(moves, mixtures), (asks, moves, keys, alpha, mixtures)


def _wide_backward(A, M, q, delta, kept, g):
    asks, moves, keys, alpha, mixtures = kept
    (H, d), d_o = A.shape[1:3], M.shape[2]
    g_mixtures = torch.bmm(moves.mT, g).view_as(keys)
    g_alpha = (g_mixtures * delta[:, None]).sum(dim=2, keepdim=True)
    g_logits = of_sigmoid_(g_alpha, alpha)
    g_delta = g_mixtures.mul_(alpha).addcmul_(keys, g_logits).sum(dim=1)
    g_keys = (g_logits * delta[:, None]).flatten(1, 2)
    g_A = torch.bmm(q, g_keys.mT).view(-1, d, H, d).transpose(1, 2)
    g_M = torch.bmm(g, mixtures.mT).view(-1, d_o, H, d).transpose(1, 2)
    return g_A, g_M, torch.bmm(asks.mT, g_keys), g_delta


OUTER, WIDE = _Road(outer_products, of_outer_products), _Road(_wide_forward, _wide_backward)


# --- the loss -------------------------------------------------------------------------------------


def next_token_losses_vjp(
    unembedding: Tensor, stream: Tensor, answers: Tensor
) -> tuple[Tensor, Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """:func:`next_token_losses`, and the gradients at its arguments from that at the losses.

    Args:
        unembedding: As there.
        stream: As there.
        answers: As there.

    Returns:
        The losses, the logits, and a function from a gradient ``(R,)`` to those at the unembedding
        and the stream. It may be called once, since it overwrites what it needs.
    """
    logits = torch.bmm(unembedding, stream)
    each, of_each = cross_entropy_vjp(logits, answers)

    def vjp(g):
        g_logits = of_each((g / each.shape[1]).view(-1, 1, 1))
        return torch.bmm(stream, g_logits.mT).mT, torch.bmm(unembedding.mT, g_logits)

    return each.mean(dim=1), logits, vjp


class _NextTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        losses, logits, ctx.vjp = next_token_losses_vjp(*inputs)
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(logits)
        ctx.set_materialize_grads(False)
        return losses, logits

    @staticmethod
    @once
    def backward(ctx, g, _):
        _ = ctx.saved_tensors
        vjp, ctx.vjp = ctx.vjp, None
        if vjp is None:
            raise RuntimeError("the gradient can be formed once: its arrays were used in place")
        return *vjp(g), None
