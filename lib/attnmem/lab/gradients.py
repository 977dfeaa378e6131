r"""Gradients by hand, an accelerator: most of a small model's step goes to many small operations.

This file registers faster losses of the published models in
``attnmem.lab.models.ACCELERATORS``. Without it, and for every other model, autograd
differentiates, with the same results up to rounding.

A function ``..._vjp`` gives its value, and a function from the gradient at the value to those at
its arguments. Stacks of runs come first, examples last: long rows make all sums fast.

**Pairs of tokens.** Softmax over two tokens is a sigmoid. The second token asks; with
:math:`\delta = x_a - x_b`, :math:`A_h = (W_Q^h)^\top W_K^h` and :math:`M_h = W_O^h W_V^h`,

.. math:: y = r_b + \sum_h M_h x_b + \sum_h \sigma_h M_h \delta , \qquad
          \sigma_h = \operatorname{sigmoid}(\ell_h), \quad \ell_h = x_b^\top A_h \delta ,

where :math:`r_b` is the residual stream. From the gradient :math:`g` at :math:`y` come
:math:`g_h = \sigma_h (1 - \sigma_h)\, g^\top M_h \delta` at :math:`\ell_h`, :math:`g_h x_b
\delta^\top` at :math:`A_h`, :math:`g (\sigma_h \delta + x_b)^\top` at :math:`M_h`, and
:math:`\sum_h (\sigma_h M_h^\top g + g_h A_h^\top x_b)` at :math:`\delta`.

**Contexts and queries.** A query :math:`q` and tokens :math:`x_s` are embedded by one matrix, a
bias and positions, and heads have scalar values :math:`v_{h,s}`:

.. math:: \ell_{h,s} = \lambda\, (W_E x_s + p_s)^\top W_K^h (W_Q^h)^\top (W_E q + b + p_0) , \qquad
          v_{h,s} = w_h^\top (W_E x_s + p_s + b) , \qquad
          y_h = \sum_s \alpha_{h,s} v_{h,s} ,

where :math:`\alpha` is the softmax of the logits over the tokens; the bias of the tokens would add
the same to all logits of a head. The gradient is :math:`g_h \alpha_{h,s}` at the values and
:math:`g_h \alpha_{h,s} (v_{h,s} - y_h)` at the logits. Nothing is embedded but a shared context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from .models import (
    ACCELERATORS,
    VARIANTS,
    Losses,
    Parameters,
    feed_forward,
    layer_maps,
    sinusoids,
    take_columns,
)
from .store import Run

# From the gradient at a value to those at the arguments, in their order.
_VJP = Callable[[Tensor], Sequence[Tensor | None]]
_LOG2_E = math.log2(math.e)  # on a CPU exp2 is several times faster than exp
_sigmoid_vjp = torch.ops.aten.sigmoid_backward.grad_input  # g alpha (1 - alpha) in one pass


class _WrittenOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *arguments):
        value, ctx.vjp = function(*arguments)
        ctx.save_for_backward(*arguments)  # which also tells whether one was changed since
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        _ = ctx.saved_tensors
        return None, *ctx.vjp(g)


# From a function with a gradient by hand and its arguments, its value for autograd.
written_out: Callable[..., Tensor] = _WrittenOut.apply


def cross_entropy_vjp(
    logits: Float[Tensor, "R N B"], classes: Int[Tensor, "R B"] | Float[Tensor, "R N B"]
) -> tuple[Float[Tensor, "R B"], Callable[[Tensor], Float[Tensor, "R N B"]]]:
    """The cross-entropy of a softmax over ``N`` classes; its gradient may be asked for once.

    Its targets are classes, or distributions over them.
    """
    largest, right = logits.amax(dim=1, keepdim=True), classes[:, None]
    shares = (logits - largest).mul_(_LOG2_E).exp2_()
    total = shares.sum(dim=1, keepdim=True)
    if classes.is_floating_point():
        expected = (logits * classes).sum(dim=1)
        losses = total.log().add_(largest)[:, 0].sub_(expected)
        return losses, lambda g: shares.mul_(g / total).sub_(g * classes)
    losses = total.log().add_(largest).sub_(logits.gather(1, right))[:, 0]

    def vjp(g):  # (R, 1, B) or (R, 1, 1): g times softmax, less g at the right class
        return shares.mul_(g / total).scatter_add_(1, right, g.neg().expand_as(right))

    return losses, vjp


# --- pairs of tokens ------------------------------------------------------------------------------


def take_columns_vjp(table, chosen) -> tuple[Tensor, _VJP]:
    """:func:`take_columns` with a gradient that repeats bit for bit."""
    return take_columns(table, chosen), lambda g: (_add_columns(g, chosen, table.shape[-1]), None)


def _add_columns(columns: Tensor, chosen: Tensor, N: int) -> Float[Tensor, "R d N"]:
    if columns.is_cuda:  # scatter_add adds in any order there
        vocabulary = torch.arange(N, device=columns.device)
        return columns @ (chosen[..., None] == vocabulary).to(columns.dtype)
    R, d, _ = columns.shape
    sums = columns.new_zeros(R, d, N)
    return sums.scatter_add_(2, chosen[:, None].expand(-1, d, -1), columns)


def heads_vjp(A: Tensor, M: Tensor, q: Tensor, delta: Tensor) -> tuple[Tensor, _VJP]:
    """``sum_h sigmoid(q^T A_h delta) M_h delta`` for every column of ``q`` and ``delta``.

    Columns are ``(R, d, B)``, ``A`` is ``(R, H, d, d)``, ``M`` ``(R, H, d_o, d)``.
    """
    (R, H, d_o, d), B = M.shape, q.shape[-1]
    if d + d_o >= 2 * H:  # few heads have less to write and read in another order
        return _few_heads(A, M, q, delta)
    outer = (q.unsqueeze(2) * delta.unsqueeze(1)).flatten(1, 2)  # vec(q delta^T)
    alpha = torch.bmm(A.flatten(2), outer).sigmoid_()
    mixed = torch.bmm(M.flatten(2).mT, alpha).view(R, d_o, d, B)  # sum_h sigma_h M_h

    def vjp(g):  # the sum is mixed delta, so the gradient at mixed is g delta^T
        g_mixed = (g.unsqueeze(2) * delta.unsqueeze(1)).flatten(1, 2)
        g_logits = torch.bmm(M.flatten(2), g_mixed)  # at alpha, then, in its place, at the logits
        _sigmoid_vjp(g_logits, alpha, grad_input=g_logits)
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
        _sigmoid_vjp(g_logits, alpha, grad_input=g_logits)
        g_delta = g_mixtures.mul_(alpha).addcmul_(keys, g_logits).sum(dim=1)  # both ways
        g_keys = (g_logits * delta[:, None]).flatten(1, 2)
        g_A = torch.bmm(q, g_keys.mT).view(R, d, H, d).transpose(1, 2)
        g_M = torch.bmm(g, mixtures.mT).view(R, -1, H, d).transpose(1, 2)
        return g_A, g_M, torch.bmm(asks.mT, g_keys), g_delta

    return torch.bmm(moves, mixtures), vjp


def after_pairs_vjp(W_Q, W_K, W_V, W_O, inputs, stream, tokens) -> tuple[Tensor, _VJP]:
    """The residual stream ``(R, d_o, B)`` at the second place, after attention to both places.

    For every token of the vocabulary ``inputs``, ``(R, 2, N, d)``, are the attention's at both
    places, and ``stream``, ``(R, N, d_o)``, the residual stream at the second. Where an example
    attends to a first token ``10^k`` times as small as the second, ``k`` digits are lost.
    """
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
        g_first = _add_columns(g_delta, a, N)  # delta is the first less the second
        g_looked_up = _add_columns(torch.cat([g_q.sub_(g_delta), g], dim=1), b, N)
        g_second, g_stream = g_looked_up.split([q.shape[1], g.shape[1]], dim=1)
        g_M = g_M + torch.bmm(g_stream, second.mT)[:, None]  # through alone, the sum of all M
        g_maps = W_K @ g_A.mT, W_Q @ g_A, W_O.mT @ g_M, g_M @ W_V.mT
        g_second = torch.baddbmm(g_second, alone.mT, g_stream)
        return *g_maps, torch.stack([g_first, g_second], dim=1).mT, g_stream.mT, None

    return update.add_(y), vjp


def aot_losses(
    P: Parameters, run: Run, tokens: Int[Tensor, "R B 2"], answers: Int[Tensor, "R B"]
) -> Losses:
    """Those of :func:`~attnmem.lab.models.aot_logits`.

    One layer of heads, as in Experiment 1, goes without what autograd costs, a third of a step.
    """
    several_parts = run.layers > 1 or run.width or "up.0" in P
    if several_parts or VARIANTS[run.variant].position_in_skip:
        stream, stream_vjp = _layers_vjp(P, run, tokens)
    else:
        stream, stream_vjp = _one_layer_vjp(P, run, tokens)
    with torch.inference_mode():  # under no_grad autograd would take a tenth of a small step
        logits = torch.bmm(P["unembedding"], stream)
        losses, losses_vjp = cross_entropy_vjp(logits, answers)

    def gradient(derivatives):
        with torch.inference_mode():
            g_logits = losses_vjp(derivatives[:, None])
            g_unembedding = torch.bmm(stream, g_logits.mT).mT
            g_stream = torch.bmm(P["unembedding"].mT, g_logits)
        by_name = {"unembedding": g_unembedding, **stream_vjp(g_stream)}
        return [by_name[name] for name in P]

    return losses, logits, gradient


@torch.inference_mode()
def _one_layer_vjp(P: Parameters, run: Run, tokens: Tensor):
    """The residual stream after it, and from its gradient those at the weights by name."""
    inputs = P["embedding"][:, None] + P["positions.0"][:, :2, None]
    data = inputs, P["embedding"], tokens
    stream, pairs_vjp = after_pairs_vjp(*layer_maps(P, run, 0), *data)

    @torch.inference_mode()
    def vjp(g):
        W_Q, W_K, W_V, W_O, g_inputs, g_x, _ = pairs_vjp(g)
        if VARIANTS[run.variant].scaled:
            W_Q = W_Q * run.d_h**-0.5
        return {  # the embedding is the input at both places and the stream at the second
            "embedding": g_inputs[:, 0] + g_inputs[:, 1] + g_x,
            "positions.0": F.pad(g_inputs.sum(dim=2), (0, 0, 0, P["positions.0"].shape[1] - 2)),
            **{"W_Q.0": W_Q, "W_K.0": W_K, "W_V.0": W_V, "W_O.0": W_O},
        }

    return stream, vjp


def _layers_vjp(P: Parameters, run: Run, tokens: Tensor):
    stream, names = _stream(P, run, tokens), [name for name in P if name != "unembedding"]

    def vjp(g):
        gradients = torch.autograd.grad(stream, [P[name] for name in names], g)
        return dict(zip(names, gradients, strict=True))

    return stream.detach(), vjp


def _stream(P: Parameters, run: Run, tokens: Int[Tensor, "R B 2"]) -> Float[Tensor, "R d B"]:
    """The residual stream of the second place after all layers."""
    # The first place attends to itself only, so it is computed once for every token.
    x, inputs = _enter(P, run, 0, P["embedding"][:, None], slice(2))
    y = written_out(after_pairs_vjp, *layer_maps(P, run, 0), inputs, x[:, -1], tokens)
    y = feed_forward(P, run, 0, y)
    first, first_inputs = x[:, 0].mT, inputs[:, 0].mT  # (R, d, N), (R, inner, N)
    for layer in range(1, run.layers):
        first = first + _own_values(*layer_maps(P, run, layer - 1)[2:], first_inputs)
        first = feed_forward(P, run, layer - 1, first)
        x, inputs = _enter(P, run, layer, first.mT[:, None], slice(1))
        first, first_inputs = x[:, 0].mT, inputs[:, 0].mT
        x, inputs = _enter(P, run, layer, y.mT[:, None], slice(1, 2))
        second, queries = x[:, 0].mT, inputs[:, 0].mT
        chosen = written_out(take_columns_vjp, first_inputs, tokens[..., 0])
        W_Q, W_K, W_V, W_O = layer_maps(P, run, layer)
        A, M = W_Q.mT @ W_K, W_O @ W_V
        update = written_out(heads_vjp, A, M, queries, chosen - queries)
        y = second + (_own_values(W_V, W_O, queries) + update)
        y = feed_forward(P, run, layer, y)
    return y


def _own_values(W_V: Tensor, W_O: Tensor, x: Float[Tensor, "R d B"]) -> Float[Tensor, "R d_o B"]:
    """What a token gets that attends to itself only: ``sum_h M_h x``."""
    return W_O.transpose(1, 2).flatten(2) @ W_V.flatten(1, 2) @ x


def _enter(
    P: Parameters, run: Run, layer: int, x: Float[Tensor, "R _ M d"], places: slice
) -> tuple[Float[Tensor, "R _ M d"], Float[Tensor, "R _ M inner"]]:
    """The residual stream and the attention's input at some places, each for ``M`` rows."""
    variant = VARIANTS[run.variant]
    owner = 0 if variant.tied else layer  # the layer whose positions and maps this one uses
    positions = P[f"positions.{owner}"][:, places, None]
    if variant.position_in_skip:
        x = x + positions
    inputs = x @ P[f"down.{owner}"].mT[:, None] if f"down.{owner}" in P else x
    return x, inputs if variant.position_in_skip else inputs + positions


# --- contexts and queries -------------------------------------------------------------------------


class EmbeddedHeads(NamedTuple):
    """Weights of heads on embedded data; queries act from the right."""

    W_E: Float[Tensor, "R d c"]  # embeds tokens and queries
    b_E: Float[Tensor, "R d"]
    W_Q: Float[Tensor, "R H d d_h"]
    W_K: Float[Tensor, "R H d d_h"]
    W_V: Float[Tensor, "R H d 1"]


def _forms(P: EmbeddedHeads, scale: float, tokens: Tensor, bias: Tensor):
    """Of each head and token a vector ``(R, H m, c)`` and a number for a query's logit, in bits."""
    scale *= _LOG2_E
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


def shared_heads_vjp(P: EmbeddedHeads, positions, scale: float, contexts, queries):
    """Heads ``(R, H, B)`` on one context ``(R, n, c)`` for all queries ``(R, B, c)``.

    ``positions`` are the query's, then the tokens'; the gradient may be asked for once.
    """
    embedded = torch.baddbmm(positions[1:], contexts, P.W_E.mT)
    vectors, numbers, of_forms = _forms(P, scale, embedded, P.b_E + positions[0])
    tokens, w = embedded + P.b_E[:, None], P.W_V[..., 0]
    values = w @ tokens.mT
    shares = torch.baddbmm(numbers, vectors, queries.mT).view(*values.shape, -1)
    shares = shares.sub_(shares.amax(dim=2, keepdim=True)).exp2_()
    total = shares.sum(dim=2, keepdim=True)
    heads = (values[:, :, None] @ shares).div_(total)

    def of_heads(g):
        # The gradient at the logits, which are in bits, is divided by log2(e).
        g_heads = shares.mul_(g[:, :, None].div(total).div_(_LOG2_E))
        g_values = g_heads.sum(dim=-1).mul_(_LOG2_E)
        g_logits = (values[..., None] - heads).mul_(g_heads).flatten(1, 2)
        g_numbers = g_logits.sum(dim=-1, keepdim=True)
        W_E, b_E, W_Q, W_K, g_tokens = of_forms(g_logits @ queries, g_numbers)
        of_values = g_values.mT @ w  # at the embedded tokens, through the values
        b_E += of_values.sum(dim=1)
        W_E.baddbmm_(g_tokens.add_(of_values).mT, contexts)
        return W_E, b_E, W_Q, W_K, (g_values @ tokens)[..., None]

    return heads[:, :, 0], of_heads


def own_heads_vjp(P: EmbeddedHeads, positions, scale: float, contexts, queries):
    """As :func:`shared_heads_vjp` on own contexts ``(R, B, n, c)``."""
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
        g_heads = shares.mul_(g.mT.div(total).div_(_LOG2_E)[..., None])  # as on a shared one
        g_logits = values.sub_(heads[..., None]).mul_(g_heads).flatten(0, 1)
        g_keys = torch.cat([g_logits @ flat, g_logits], dim=-1).view(R, B, -1)
        g_vectors, g_numbers = (queries.mT @ g_keys).mT, g_keys.sum(dim=1)[..., None]
        W_E, b_E, W_Q, W_K, g_rows = of_forms(g_vectors, g_numbers)
        # A value is linear in the context, in its position, and in the bias.
        by_head = g_heads.transpose(1, 2).reshape(R, -1, B * n)
        of_values = [by_head @ contexts.flatten(1, 2), g_heads.sum(dim=1)]
        of_values = torch.cat(of_values, dim=-1).mul_(_LOG2_E)
        of_bias = of_values[..., c:].sum(dim=-1, keepdim=True)
        W_V = (of_values @ rows).addcmul_(of_bias, P.b_E[:, None])
        b_E += (of_bias.mT @ w)[:, 0]
        W_E += g_rows.add_(of_values.mT @ w)[:, :c].mT
        return W_E, b_E, W_Q, W_K, W_V[..., None]

    return heads.mT, of_heads


@torch.inference_mode()
def mha_losses(
    P: Parameters, run: Run, contexts: Tensor, queries: Float[Tensor, "R B d"], labels: Tensor
) -> Losses:
    """Those of :func:`~attnmem.lab.models.mha_outputs`."""
    *weights, W_O, W_D, b_D = P.values()
    positions = sinusoids(run.n + 1, run.d, queries.dtype, queries.device)
    arguments = EmbeddedHeads(*weights), positions, 1 / 8, contexts, queries
    attend = shared_heads_vjp if run.shares_context else own_heads_vjp
    heads, heads_vjp = attend(*arguments)
    decoder = W_D @ W_O.mT
    outputs = torch.baddbmm(b_D[..., None], decoder, heads)
    if run.N:
        losses, losses_vjp = cross_entropy_vjp(outputs, labels)
    else:
        errors = outputs - labels[:, None]
        losses = errors.square()[:, 0]

    @torch.inference_mode()
    def gradient(derivatives):
        derivatives = derivatives[:, None]
        g = losses_vjp(derivatives) if run.N else 2 * errors * derivatives
        g_decoder = g @ heads.mT
        g_weights = heads_vjp(decoder.mT @ g)
        return [*g_weights, g_decoder.mT @ W_D, g_decoder @ W_O, g.sum(dim=-1)]

    return losses, outputs, gradient


# --- what is accelerated --------------------------------------------------------------------------

# A reading that is not listed trains by autograd.
for _variant in (
    *("code", "own-maps", "skip-positions", "unscaled", "default-init", "own-layers"),
    *("paper", "paper-default-init"),
):
    ACCELERATORS["aot", _variant] = ACCELERATORS["mlp", _variant] = aot_losses
ACCELERATORS["mha", "code"] = mha_losses
