"""The two papers' attention layers, each a pure function over a NamedTuple of weights.

Leading axes ``*runs`` stack independent models. The weights' run axes and the data's run axes
broadcast against each other as in torch arithmetic; a single model has none. float32 and float64
mix as in torch arithmetic too: the computation runs in the wider of them.

Sources: Mahdavi et al. 2024, Sec. 3 (``mha``); Dana et al. 2025, equations (1)-(2) (``aot``).
"""

from __future__ import annotations

import functools
from typing import NamedTuple, get_type_hints

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from .checks import check_floats, check_size, check_tensor, check_tokens, checked_by, refuse


class MHAWeights(NamedTuple):
    """Weights of one multi-head attention layer, in the letters of Mahdavi et al. (Sec. 3)."""

    W_Q: Float[Tensor, "*runs H d d_h"]
    W_K: Float[Tensor, "*runs H d d_h"]
    W_V: Float[Tensor, "*runs H d d_v"]
    W_O: Float[Tensor, "*runs H*d_v d_o"]
    W_D: Float[Tensor, "*runs d_o d_out"]


class AoTWeights(NamedTuple):
    """Weights of an attention-only transformer, in the letters of Dana et al. (equations 1 and 2).

    Their projections act from the left, ``(d_h, d)``, where those of Mahdavi et al. act from the
    right, ``(d, d_h)``.
    """

    embedding: Float[Tensor, "*runs N d"]
    positions: Float[Tensor, "*runs S d"]
    W_Q: Float[Tensor, "*runs H d_h d"]
    W_K: Float[Tensor, "*runs H d_h d"]
    W_V: Float[Tensor, "*runs H d_h d"]
    W_O: Float[Tensor, "*runs H d d_h"]
    W_U: Float[Tensor, "*runs N d"]


# --- the core that both layers share ------------------------------------------------------------


OWN, SHARED = "...bnd", "...nd"  # einsum axes of contexts


def token_axes(context: Tensor, query: Tensor) -> str:
    """Whether every example has a context of its ``OWN`` or all have one ``SHARED``."""
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
    """The softmax of :func:`attention_logits` over the tokens."""
    return over_tokens(attention_logits(W_Q, W_K, context, query))


def attention_logits(
    W_Q: Float[Tensor, "*runs H d d_h"],
    W_K: Float[Tensor, "*runs H d d_h"],
    context: Float[Tensor, "*examples d"],
    query: Float[Tensor, "*data B d"],
) -> Float[Tensor, "*allruns B n H"]:
    """The logits ``e W_Q W_K^T E^T``, multiplied in the cheapest order.

    Three orders give the same numbers but for rounding; the cost is counted per head in products.
    In none of them every example's keys are formed, and only the query's position is computed.
    """
    tokens = token_axes(context, query)
    (B, d), (H, d_h), n = query.shape[-2:], W_Q.shape[-3::2], context.shape[-2]
    orders = {
        "vector by vector": B * (2 * d * d_h + n * d),
        "head product first": d * d * d_h + B * (d * d + n * d),
    }
    if tokens == SHARED:
        orders["shared keys first"] = 2 * n * d * d_h + B * n * d
    match min(orders, key=orders.__getitem__):
        case "shared keys first":
            asked = (context[..., None, :, :] @ W_K) @ W_Q.mT  # (*allruns, H, n, d)
            logits = asked.flatten(-3, -2) @ query.mT  # examples last: long rows
            return logits.unflatten(-2, (H, n)).transpose(-3, -1)
        case "head product first":
            product = torch.einsum("...hdk,...hek->...dhe", W_Q, W_K)
            key = torch.einsum("...bd,...dhe->...bhe", query, product)
        case _:
            key = torch.einsum("...bd,...hdk->...bhk", query, W_Q)
            key = torch.einsum("...bhk,...hdk->...bhd", key, W_K)
    return torch.einsum(f"{tokens},...bhd->...bnh", context, key)


def over_tokens(logits: Float[Tensor, "*allruns B n H"]) -> Float[Tensor, "*allruns B H n"]:
    """The softmax over the tokens, in the layout that the logits are stored in.

    Heads or examples stay last while it runs: it is several times slower along a short last axis.
    """
    if logits.stride(-3) == 1:
        return logits.transpose(-3, -1).softmax(dim=-2).movedim(-1, -3)
    return logits.softmax(dim=-2).mT


def head_values(
    alpha: Float[Tensor, "*data B H n"],
    context: Float[Tensor, "*examples d"],
    W_V: Float[Tensor, "*runs H d d_v"],
    tokens: str,
) -> Float[Tensor, "*allruns B H d_v"]:
    """``W_V^T z_h``; the tokens' values are formed first where that is cheaper.

    ``tokens`` as from :func:`token_axes`.
    """
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


def _product_first(B: int, a: int, b: int, c: int) -> bool:
    """Whether ``B`` vectors are sent through ``(a, b)`` and ``(b, c)`` cheaper as one matrix."""
    return a * b * c + B * a * c < B * b * (a + c)


def add_heads(
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


def attend_and_add(
    W_Q: Float[Tensor, "*runs H d d_h"],
    W_K: Float[Tensor, "*runs H d d_h"],
    W_V: Float[Tensor, "*runs H d_v d"],
    W_O: Float[Tensor, "*runs H d_o d_v"],
    context: Float[Tensor, "*data B n d"],
    query: Float[Tensor, "*data B d"],
) -> Float[Tensor, "*allruns B d_o"]:
    """``sum_h W_O^h W_V^h z_h`` for own contexts, on the shorter of two roads."""
    if context.shape[-2] > SHORT:
        return add_heads(attend(W_Q, W_K, context, query)[1], W_V, W_O)
    columns = context.movedim(-3, -1)
    return attend_and_add_columns(W_Q, W_K, W_V, W_O, columns, query.mT).mT


SHORT = 8  # tokens up to which a loop runs over them; its gain was measured at 2 only


def attend_and_add_columns(
    W_Q: Float[Tensor, "*runs H d d_h"],
    W_K: Float[Tensor, "*runs H d d_h"],
    W_V: Float[Tensor, "*runs H d_v d"],
    W_O: Float[Tensor, "*runs H d_o d_v"],
    context: Float[Tensor, "*data n d B"],
    query: Float[Tensor, "*data d B"],
) -> Float[Tensor, "*allruns d_o B"]:
    r"""The same for short contexts, examples last: long rows make all products and sums fast.

    A softmax does not change when all its logits move together, so tokens are taken relative to the
    last one, :math:`\delta_s = x_s - x_n`: one token less to attend to, and

    .. math:: \textstyle\sum_h W_O^h W_V^h z_h = \bigl(\sum_h W_O^h W_V^h\bigr) x_n
              + \sum_h W_O^h W_V^h \sum_{s<n} \alpha_{h,s} \delta_s .
    """
    last = context[..., -1, :, :]
    out = _over_heads(W_O) @ W_V.flatten(-3, -2) @ last
    if context.shape[-3] == 1:
        return out
    others = context[..., :-1, :, :] - last[..., None, :, :]
    narrow = W_Q.shape[-1] + W_V.shape[-2] < query.shape[-2]
    road = _through_narrow_heads if narrow else _through_wide_heads
    return out + road(W_Q, W_K, W_V, W_O, others, query)


def _through_narrow_heads(W_Q, W_K, W_V, W_O, others, query) -> Float[Tensor, "*allruns d_o B"]:
    """Keys and values of every token: nothing is larger than ``H (d_h + d_v) B``."""
    q = _projected(W_Q.mT, query)
    k = _projected(W_K.mT[..., None, :, :, :], others)  # (*allruns, m, H, d_h, B)
    alpha = _softmax_with_zero((q[..., None, :, :, :] * k).sum(dim=-2))
    v = _projected(W_V[..., None, :, :, :], others)
    z = (alpha[..., None, :] * v).sum(dim=-4)
    return _over_heads(W_O) @ z.flatten(-3, -2)


def _over_heads(W: Float[Tensor, "*runs H d_o k"]) -> Float[Tensor, "*runs d_o Hk"]:
    """One matrix whose product with all heads' vectors is the sum over heads."""
    return W.transpose(-3, -2).flatten(-2)


def _projected(
    W: Float[Tensor, "*runs H k d"], x: Float[Tensor, "*data d B"]
) -> Float[Tensor, "*allruns H k B"]:
    """One product for all heads."""
    return (W.flatten(-3, -2) @ x).unflatten(-2, W.shape[-3:-1])


def _through_wide_heads(W_Q, W_K, W_V, W_O, others, query) -> Float[Tensor, "*allruns d_o B"]:
    """Attended tokens of every head, of size ``H d B``; products of two maps where cheaper."""
    (d, d_h), (d_o, d_v), B = W_Q.shape[-2:], W_O.shape[-2:], query.shape[-1]
    if _product_first(B, d, d_h, d):
        keys = _projected(W_K @ W_Q.mT, query)
    else:
        keys = W_K @ _projected(W_Q.mT, query)
    z = _Mixture.apply(keys, others.expand(*keys.shape[:-3], -1, -1, -1))
    if _product_first(B, d, d_v, d_o):
        return _over_heads(W_O @ W_V) @ z.flatten(-3, -2)
    return _over_heads(W_O) @ (W_V @ z).flatten(-3, -2)


def _softmax_with_zero(logits: Float[Tensor, "*runs m H B"]) -> Float[Tensor, "*runs m H B"]:
    """The softmax of ``logits`` and one zero, the logit of the token that all are relative to."""
    zero = torch.zeros_like(logits[..., :1, :, :])
    return torch.cat([logits, zero], dim=-3).softmax(dim=-3)[..., :-1, :, :]


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
    @once_differentiable
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


def _widest(*tensors: Tensor) -> list[Tensor]:
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(dtype) for tensor in tensors]


# --- Mahdavi et al.: multi-head attention over a context and a query ----------------------------


@functools.cache
def _axes(kind: type) -> dict[str, list[str]]:
    return {name: hint.dim_str.split() for name, hint in get_type_hints(kind).items()}


def _check_weights(weights, kind) -> None:
    """Floats, the number of axes and the sizes that two weights share, each error by name."""
    if not isinstance(weights, kind):
        refuse("weights", type(weights).__name__, kind.__name__)
    runs = weights.W_Q.ndim - 3 if isinstance(weights.W_Q, Tensor) else 0
    sizes: dict[str, tuple[int, str]] = {}
    for name, tensor in weights._asdict().items():
        axes = _axes(kind)[name]
        check_tensor(f"weights.{name}", tensor, f"({', '.join(axes)})", runs + len(axes) - 1)
        check_floats(f"weights.{name}", tensor)
        for axis, size in zip(axes[1:], tensor.shape[runs:], strict=True):
            known, where = sizes.setdefault(axis, (size, name))
            if size != known:
                got = f"{axis} = {size} (shape {tuple(tensor.shape)})"
                refuse(f"weights.{name}", got, f"{axis} = {known}, as in {where}")


def _check_mha_weights(weights) -> None:
    _check_weights(weights, MHAWeights)
    heads, d_v = weights.W_V.shape[-3], weights.W_V.shape[-1]
    check_size("weights.W_O", weights.W_O, -2, heads * d_v, f"H d_v for H = {heads}, d_v = {d_v}")


def check_features(weights, context, query) -> None:
    """Accept weights, contexts and queries whose shapes fit, as all functions of this layer do."""
    _check_mha_weights(weights)
    check_tensor("query", query, "(*runs, B, d)", range(2, 99))
    shape = "(*runs, B, n, d) or (*runs, n, d), with the run axes of the query"
    check_tensor("context", context, shape, (query.ndim, query.ndim + 1))
    for name, tensor in (("query", query), ("context", context)):
        check_floats(name, tensor)
        check_size(name, tensor, -1, weights.W_Q.shape[-2], "d of weights.W_Q")
    if context.ndim == query.ndim + 1:
        check_size("context", context, -3, query.shape[-2], "the number of queries")


def _check_mha(weights, context, query, skip) -> None:
    check_features(weights, context, query)
    if skip:
        check_skip(weights, query)


def check_skip(weights, query) -> None:
    """Accept weights whose attention output can be added to the query."""
    check_size("weights.W_O", weights.W_O, -1, query.shape[-1], "d, which a skip adds to d_o")


@checked_by(check_features)
def mha_attention(
    weights: MHAWeights, context: Float[Tensor, "*examples n d"], query: Float[Tensor, "*data B d"]
) -> Float[Tensor, "*runs B H n"]:
    r"""Attention weights :math:`\alpha_h` of every head: non-negative, each row sums to one.

    Arguments and errors as for :func:`mha`. Source: Mahdavi et al. 2024, Sec. 3, step 2.
    """
    W_Q, W_K, context, query = _widest(weights.W_Q, weights.W_K, context, query)
    return attention_weights(W_Q, W_K, context, query)


@checked_by(check_features)
def mha_features(
    weights: MHAWeights, context: Float[Tensor, "*examples n d"], query: Float[Tensor, "*data B d"]
) -> Float[Tensor, "*runs B Hd"]:
    r"""The feature matrix ``Z``: row ``t`` is :math:`[z_1^{(t)}; \dots; z_H^{(t)}]`.

    The layer's output is linear in these rows, so what it can memorize is decided by their rank.
    Arguments and errors as for :func:`mha`. Source: Mahdavi et al. 2024, Sec. 3, step 3.
    """
    W_Q, W_K, context, query = _widest(weights.W_Q, weights.W_K, context, query)
    return attend(W_Q, W_K, context, query)[1].flatten(-2)


@checked_by(_check_mha)
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

    Arguments
        ``weights``: all with the same number of run axes. ``query``: one vector ``e`` per example.
        ``context``: the tokens ``E`` as rows, one context per example ``(*runs, B, n, d)`` or one
        for all of them ``(*runs, n, d)``, with the run axes of the query. ``skip``: add the query
        to the attention output before the read-out (needs ``d_o = d``).
    Returns
        The outputs, ``(*runs, B, d_out)``.
    Raises
        ``ValueError`` naming the argument: wrong shape, or a dtype other than float32 and float64.

    >>> H, n, d = 2, 3, 5
    >>> W = torch.ones(H, d, 1)
    >>> weights = MHAWeights(W, W, W, torch.ones(H, 4), torch.ones(4, 1))
    >>> mha(weights, torch.zeros(7, n, d), torch.ones(7, d)).shape
    torch.Size([7, 1])

    Source: Mahdavi et al. 2024, Sec. 3; with ``skip``, Appendix C.
    """
    *matrices, context, query = _widest(*weights, context, query)
    W_Q, W_K, W_V, W_O, W_D = matrices
    alpha = attention_weights(W_Q, W_K, context, query)
    values = head_values(alpha, context, W_V, token_axes(context, query)).flatten(-2)
    outputs = combine_heads(values, W_O, W_D)
    return outputs + query @ W_D if skip else outputs


def combine_heads(
    values: Float[Tensor, "*allruns B Hd_v"],
    W_O: Float[Tensor, "*runs Hd_v d_o"],
    W_D: Float[Tensor, "*runs d_o d_out"],
) -> Float[Tensor, "*allruns B d_out"]:
    """``values W_O W_D``, multiplied in the cheaper order."""
    if _product_first(values.shape[-2], *W_O.shape[-2:], W_D.shape[-1]):
        return values @ (W_O @ W_D)
    return values @ W_O @ W_D


# --- Dana et al.: attention-only transformers over sequences of tokens ---------------------------


def check_aot(weights, tokens) -> None:
    """Accept weights and tokens that fit, as all functions of this transformer do."""
    _check_weights(weights, AoTWeights)
    check_tensor("tokens", tokens, "(*runs, B, S)", range(2, 99))
    check_size("tokens", tokens, -1, weights.positions.shape[-2], "S of weights.positions")
    check_tokens("tokens", tokens, weights.embedding.shape[-2])


def look_up(
    embedding: Float[Tensor, "*runs N d"], tokens: Int[Tensor, "*data B S"]
) -> Float[Tensor, "*allruns B S d"]:
    """The embedding of every token, each run from its own table."""
    runs = torch.broadcast_shapes(embedding.shape[:-2], tokens.shape[:-2])
    N, d = embedding.shape[-2:]
    rows = embedding.expand(*runs, N, d).reshape(-1, d)
    first = N * torch.arange(rows.shape[0] // N, device=tokens.device)
    chosen = tokens.expand(*runs, *tokens.shape[-2:]).flatten(-2).reshape(len(first), -1)
    # Not F.embedding: its backward pass may wait for the host, which a captured step may not.
    found = rows.index_select(0, (chosen + first[:, None]).flatten())
    return found.view(*runs, *tokens.shape[-2:], d)


@checked_by(check_aot)
def aot_features(
    weights: AoTWeights, tokens: Int[Tensor, "*data B S"]
) -> Float[Tensor, "*runs B Hd"]:
    r"""The attention before output: row ``t`` is :math:`A(t) = [A^1(t); \dots; A^H(t)]`.

    Arguments and errors as for :func:`aot`. Source: Dana et al. 2025, equation (1).
    """
    embedding, positions, W_Q, W_K, *_ = _widest(*weights)
    x = look_up(embedding, tokens) + positions[..., None, :, :]
    return attend(W_Q.mT, W_K.mT, x, x[..., -1, :])[1].flatten(-2)


@checked_by(check_aot)
def aot(weights: AoTWeights, tokens: Int[Tensor, "*data B S"]) -> Float[Tensor, "*runs B N"]:
    r"""A one-layer attention-only transformer: logits of the token that follows the sequence.

    .. math:: T(t) = W_U \Bigl( x(t, S) + \sum_h W_O^h W_V^h A^h(t) \Bigr), \qquad
              A^h(t) = \sum_s \operatorname{softmax}_s
              \bigl( x(t, S)^\top (W_Q^h)^\top W_K^h \, x(t, s) \bigr) \, x(t, s)

    with ``x(t, s) = e(t_s) + pos_s``. Only the last position asks, and it sees all positions.

    Arguments
        ``weights``: all with the same number of run axes. ``tokens``: integers in ``[0, N)``, one
        sequence of length ``S`` a row.
    Returns
        The logits, ``(*runs, B, N)``.
    Raises
        ``ValueError`` naming the argument: wrong shape or dtype, or (on a CPU) a token out of
        range.

    Source: Dana et al. 2025, equations (1) and (2).
    """
    embedding, positions, W_Q, W_K, W_V, W_O, W_U = _widest(*weights)
    x = look_up(embedding, tokens) + positions[..., None, :, :]
    last = x[..., -1, :]
    return (last + attend_and_add(W_Q.mT, W_K.mT, W_V, W_O, x, last)) @ W_U.mT
