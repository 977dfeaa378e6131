r"""Attention to pairs of tokens of a vocabulary.

Softmax over two tokens is a sigmoid. The second token asks; with :math:`\delta = x_a - x_b`,

.. math:: \textstyle y = r_b + \sum_h M_h x_b + \sum_h \sigma_h M_h \delta , \qquad
          \sigma_h = \operatorname{sigmoid}(x_b^\top A_h \delta) ,

where :math:`r_b` is the residual stream, :math:`A_h = (W_Q^h)^\top W_K^h` and
:math:`M_h = W_O^h W_V^h`. Examples are columns: long rows make all sums fast. Gradients are written
out, since most of a small model's step would go to many small operations: a function ``..._vjp``
returns its value and a function from the gradient at the value to those at its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from ..core.layers import take_rows

Vjp = Callable[[Tensor], tuple[Tensor, ...]]
sigmoid_vjp = torch.ops.aten.sigmoid_backward.grad_input  # g alpha (1 - alpha) in one pass


class _WrittenOut(torch.autograd.Function):
    """A function with a vjp, for autograd: ``_WrittenOut.apply(function_vjp, *arguments)``."""

    @staticmethod
    def forward(ctx, function, *arguments):
        value, ctx.vjp = function(*arguments)
        ctx.save_for_backward(*arguments)  # which also tells whether one was changed since
        return value

    @staticmethod
    def backward(ctx, g):
        if torch.is_grad_enabled():  # create_graph=True; torch would take the derivative for zero
            raise RuntimeError("this gradient is written out and cannot be differentiated again")
        _ = ctx.saved_tensors
        return None, *ctx.vjp(g)


# --- tables whose entries are columns -------------------------------------------------------------


def take_columns(
    table: Num[Tensor, "*runs d N"], chosen: Int[Tensor, "*runs m"]
) -> Num[Tensor, "*runs d m"]:
    """The columns of each run's table that its integers choose."""
    return table.gather(-1, chosen[..., None, :].expand(*table.shape[:-1], -1))


def add_columns(
    columns: Float[Tensor, "R d m"], chosen: Int[Tensor, "R m"], N: int
) -> Float[Tensor, "R d N"]:
    """The gradient of :func:`take_columns`."""
    if columns.is_cuda:  # scatter_add adds in any order there
        return add_rows(columns.mT, chosen, N).mT
    R, d, _ = columns.shape
    sums = columns.new_zeros(R, d, N)
    return sums.scatter_add_(2, chosen[:, None].expand(-1, d, -1), columns)


# --- the sum over heads ---------------------------------------------------------------------------


def heads_vjp(
    A: Float[Tensor, "R H d d"],
    M: Float[Tensor, "R H d_o d"],
    q: Float[Tensor, "R d B"],
    delta: Float[Tensor, "R d B"],
) -> tuple[Float[Tensor, "R d_o B"], Vjp]:
    """``sum_h sigmoid(q^T A_h delta) M_h delta`` for every column.

    The logits are ``A vec(q delta^T)``. Few heads have less to write and read in another order.
    """
    (R, H, d_o, d), B = M.shape, q.shape[-1]
    if d + d_o >= 2 * H:
        return _few_heads(A, M, q, delta)
    outer = (q.unsqueeze(2) * delta.unsqueeze(1)).flatten(1, 2)  # vec(q delta^T)
    alpha = torch.bmm(A.flatten(2), outer).sigmoid_()
    mixed = torch.bmm(M.flatten(2).mT, alpha).view(R, d_o, d, B)  # sum_h sigma_h M_h

    def vjp(g):  # the sum is mixed delta, so the gradient at mixed is g delta^T
        g_mixed = (g.unsqueeze(2) * delta.unsqueeze(1)).flatten(1, 2)
        g_logits = torch.bmm(M.flatten(2), g_mixed)  # at alpha, then, in its place, at the logits
        sigmoid_vjp(g_logits, alpha, grad_input=g_logits)
        g_outer = torch.bmm(A.flatten(2).mT, g_logits).view(R, d, d, B)
        g_A = torch.bmm(g_logits, outer.mT).view_as(A)
        g_M = torch.bmm(alpha, g_mixed.mT).view_as(M)
        g_q = (g_outer * delta[:, None]).sum(dim=2)
        g_delta = (mixed * g.unsqueeze(2)).sum(dim=1)  # through M_h delta
        g_delta += g_outer.mul_(q.unsqueeze(2)).sum(dim=1)  # through the logits
        return g_A, g_M, g_q, g_delta

    return (mixed * delta[:, None]).sum(dim=2), vjp


def _few_heads(A, M, q, delta):
    """By keys ``A_h^T q`` and mixtures ``sigma_h delta`` of every head, of size ``H d B``."""
    R, H, d, B = *A.shape[:3], q.shape[-1]
    asks, moves = A.mT.flatten(1, 2), M.transpose(1, 2).flatten(2)  # of all heads at once
    keys = torch.bmm(asks, q).view(R, H, d, B)
    alpha = (keys * delta[:, None]).sum(dim=2, keepdim=True).sigmoid_()
    mixtures = (alpha * delta[:, None]).flatten(1, 2)

    def vjp(g):
        g_mixtures = torch.bmm(moves.mT, g).view_as(keys)
        g_logits = (g_mixtures * delta[:, None]).sum(dim=2, keepdim=True)  # at alpha
        sigmoid_vjp(g_logits, alpha, grad_input=g_logits)
        g_delta = g_mixtures.mul_(alpha).addcmul_(keys, g_logits).sum(dim=1)  # both ways
        g_keys = (g_logits * delta[:, None]).flatten(1, 2)
        g_A = torch.bmm(q, g_keys.mT).view(R, d, H, d).transpose(1, 2)
        g_M = torch.bmm(g, mixtures.mT).view(R, -1, H, d).transpose(1, 2)
        return g_A, g_M, torch.bmm(asks.mT, g_keys), g_delta

    return torch.bmm(moves, mixtures), vjp


# --- attention ------------------------------------------------------------------------------------


def after_pairs(
    W_Q: Float[Tensor, "R H d_h d"],
    W_K: Float[Tensor, "R H d_h d"],
    W_V: Float[Tensor, "R H d_h d"],
    W_O: Float[Tensor, "R H d_o d_h"],
    inputs: Float[Tensor, "R 2 N d"],
    stream: Float[Tensor, "R N d_o"],
    tokens: Int[Tensor, "R B 2"],
) -> Float[Tensor, "R d_o B"]:
    """The residual stream at the second place, after attention to both places; for autograd.

    Maps act from the left; the logits' scale is in one of them. ``inputs`` are the attention's at
    both places, ``stream`` the residual stream at the second, for every token. Where an example
    attends to a first token ``10^k`` times as small as the second, ``k`` digits are lost.
    """
    return _WrittenOut.apply(after_pairs_vjp, W_Q, W_K, W_V, W_O, inputs, stream, tokens)


def after_pairs_vjp(W_Q, W_K, W_V, W_O, inputs, stream, tokens) -> tuple[Tensor, Vjp]:
    """:func:`after_pairs`: what belongs to single tokens is computed once for the vocabulary."""
    A, M, N = W_Q.mT @ W_K, W_O @ W_V, inputs.shape[2]  # numbers: (R, H, d, d), (R, H, d_o, d)
    alone = M.sum(dim=1)
    (first, second), (a, b) = inputs.mT.unbind(dim=1), tokens.unbind(dim=-1)
    looked_up = torch.cat([second, torch.baddbmm(stream.mT, alone, second)], dim=1)
    q, y = take_columns(looked_up, b).split([A.shape[-1], M.shape[-2]], dim=1)
    delta = take_columns(first, a).sub_(q)
    update, of_heads = heads_vjp(A, M, q, delta)

    def vjp(g):
        g = g.contiguous()
        g_A, g_M, g_q, g_delta = of_heads(g)
        g_first = add_columns(g_delta, a, N)  # delta is the first less the second
        g_looked_up = add_columns(torch.cat([g_q.sub_(g_delta), g], dim=1), b, N)
        g_second, g_stream = g_looked_up.split([q.shape[1], g.shape[1]], dim=1)
        g_M = g_M + torch.bmm(g_stream, second.mT)[:, None]  # through alone, the sum of all M
        g_maps = W_K @ g_A.mT, W_Q @ g_A, W_O.mT @ g_M, g_M @ W_V.mT
        g_second = torch.baddbmm(g_second, alone.mT, g_stream)
        return *g_maps, torch.stack([g_first, g_second], dim=1).mT, g_stream.mT, None

    return update.add_(y), vjp


def attend_to_two(W_Q, W_K, W_V, W_O, first, second) -> Float[Tensor, "R d_o B"]:
    """What the second token of every pair gets from both, in layers after the first."""
    update = _WrittenOut.apply(heads_vjp, W_Q.mT @ W_K, W_O @ W_V, second, first - second)
    return attend_to_one(W_V, W_O, second) + update


def attend_to_one(W_V, W_O, x: Float[Tensor, "R d B"]) -> Float[Tensor, "R d_o B"]:
    """What a token gets that attends to itself only: ``sum_h M_h x``."""
    return W_O.transpose(1, 2).flatten(2) @ W_V.flatten(1, 2) @ x


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
