"""Attention-only and MLP transformers on sequences of tokens, as Dana et al. train them.

Weights are dictionaries of tensors whose leading axis ``R`` stacks independent runs. A decision
that the paper leaves open is marked ``# open:``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..attention import (
    Maps,
    after_pairs,
    attend_and_add_columns,
    look_up,
    next_token_losses,
)
from ..attention.pairs import after_pairs_vjp, next_token_losses_vjp
from ..results import Run
from .gradients import Gradient, by_autograd
from .initial import Parameters, bias, embedding, linear, uniform


class Variant(NamedTuple):
    """How an attention-only transformer is read: the paper's equations or the published code.

    Attributes:
        shared_maps: All heads share one map to dimension ``d_h`` and one back (the code, used where
            ``d_h`` differs from ``d``), or each head projects from dimension ``d`` (the equations).
        position_in_skip: Positions are added to the residual stream, or to the attention's input
            only.
        scaled: Logits are divided by the root of ``d_h``, or not.
        published_init: Initial weights as in the published code, or PyTorch's defaults for an
            ``Embedding`` and a ``Linear``.
        tied: All layers use one table of positions and one pair of maps, and the feed-forward
            layer's second map has no bias (the code); or each layer has its own, and the bias.
    """

    shared_maps: bool = True
    position_in_skip: bool = False
    scaled: bool = True
    published_init: bool = True
    tied: bool = True


VARIANTS = {
    "code": Variant(),
    "own-maps": Variant(shared_maps=False),
    "skip-positions": Variant(position_in_skip=True),
    "unscaled": Variant(scaled=False),
    "default-init": Variant(published_init=False),
    "own-layers": Variant(tied=False),
    "paper": Variant(shared_maps=False, position_in_skip=True, scaled=False),
    "paper-default-init": Variant(False, True, False, False),
}


def aot_parameters(run: Run, g: torch.Generator) -> Parameters:
    """Initial weights of an attention-only or MLP transformer, drawn as its variant says.

    Args:
        run: A run of the model ``aot`` or ``mlp``.
        g: Where the numbers come from.

    Returns:
        The weights by name and layer, such as ``W_Q.0``; what layers share is of layer 0.
    """
    variant, d, d_h = VARIANTS[run.variant], run.d, run.d_h
    shared = variant.shared_maps and d_h != d
    inner = d_h if shared else d
    published = variant.published_init
    table = linear if published else embedding
    P = {"embedding": table(g, run.N, d), "unembedding": linear(g, run.N, d)}
    for layer in range(run.layers):
        if _owner(run, layer) == layer:
            # The code has three rows of positions for two places.
            P[f"positions.{layer}"] = table(g, 3, d if variant.position_in_skip else inner)
            if shared:  # open: without bias, as the heads are
                P[f"down.{layer}"] = linear(g, d_h, d)
                P[f"up.{layer}"] = linear(g, d, d_h)
        # Xavier over the packed (3 d_h, inner) matrix, or each map on its own
        bound = math.sqrt(6 / (3 * d_h + inner)) if published else inner**-0.5
        for name in ("W_Q", "W_K", "W_V"):
            P[f"{name}.{layer}"] = uniform(g, bound, run.H, d_h, inner)
        P[f"W_O.{layer}"] = uniform(g, d_h**-0.5, run.H, inner, d_h)
        if run.width:
            P[f"W_1.{layer}"], P[f"b_1.{layer}"] = linear(g, run.width, d), bias(g, run.width, d)
            P[f"W_2.{layer}"] = linear(g, d, run.width)
            if not variant.tied:
                P[f"b_2.{layer}"] = bias(g, d, run.width)
    return P


def _owner(run: Run, layer: int) -> int:
    """The layer whose positions and maps a layer uses: the first, or the layer itself."""
    return 0 if VARIANTS[run.variant].tied else layer


# --- forward passes -------------------------------------------------------------------------------


def aot_logits(P: Parameters, run: Run, tokens: Int[Tensor, "R B S"]) -> Float[Tensor, "R N B"]:
    """Logits after the last token, examples along the last axis as everywhere on the way.

    Args:
        P: Stacked weights, as :func:`aot_parameters` names them.
        run: Any run of the stack, for the sizes and the variant.
        tokens: Integers in ``[0, N)``, one sequence for each example.

    Returns:
        The logits of the next token.
    """
    return P["unembedding"] @ _last_stream(P, run, tokens)


def aot_losses(
    P: Parameters, run: Run, tokens: Int[Tensor, "R B S"], answers: Int[Tensor, "R B"]
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R N B"], Gradient]:
    """The mean cross-entropy of :func:`aot_logits` on a batch, the logits, and the gradient.

    Args:
        P: Stacked weights, as :func:`aot_parameters` names them.
        run: Any run of the stack, for the sizes and the variant.
        tokens: Integers in ``[0, N)``, one sequence for each example.
        answers: The next tokens.

    Returns:
        The loss of each run, the logits, and how gradients follow (see :data:`Gradient`).
    """
    if _on_pairs(P, run, tokens) and _only_heads(P, run):
        return _losses_of_heads(P, run, tokens, answers)
    losses, logits = next_token_losses(P["unembedding"], _last_stream(P, run, tokens), answers)
    return losses, logits, by_autograd(P, losses)


def _last_stream(P: Parameters, run: Run, tokens: Int[Tensor, "R B S"]) -> Float[Tensor, "R d B"]:
    """The residual stream of the last place after all layers.

    Hidden layers compute every place, the last layer only one. The first place attends to itself,
    so it is computed once for every token of the vocabulary, not for every example.
    """
    S = tokens.shape[-1]
    if _on_pairs(P, run, tokens):
        return _stream_after_pairs(P, run, tokens)
    x = _columns(P["embedding"], tokens)
    first = P["embedding"].mT[:, None]
    for layer in range(run.layers - 1):
        entered = _enter(P, run, layer, x)
        later = [_block(P, run, layer, *entered, s) for s in range(1, S)]
        first = _block(P, run, layer, *_enter(P, run, layer, first), 0)[:, None]
        [chosen] = _columns(first[:, 0].mT, tokens[..., :1]).unbind(dim=1)
        x = torch.stack([chosen, *later], dim=1)
    layer = run.layers - 1
    return _block(P, run, layer, *_enter(P, run, layer, x), S - 1)


def _on_pairs(P: Parameters, run: Run, tokens: Tensor) -> bool:
    """Whether there is one layer, on pairs, with heads that are not narrow."""
    return run.layers == 1 and tokens.shape[-1] == 2 and not _narrow(P)


def _narrow(P: Parameters) -> bool:
    """Whether products with the narrow maps are fewer than with one matrix a head."""
    d_h, d = P["W_Q.0"].shape[-2:]
    return 2 * d_h < d


def _stream_after_pairs(
    P: Parameters, run: Run, tokens: Int[Tensor, "R B 2"]
) -> Float[Tensor, "R d B"]:
    """One layer on pairs: what belongs to single tokens is computed once for the vocabulary."""
    W_Q, W_K, W_V, W_O = _heads(P, run, 0)
    if "up.0" in P:
        W_O = P["up.0"][:, None] @ W_O
    y = after_pairs(Maps(W_Q, W_K, W_V, W_O), *_tables(P, run), tokens)
    return _feed_forward(P, run, 0, y)


def _only_heads(P: Parameters, run: Run) -> bool:
    """Whether there is nothing but heads of the embedding's dimension, as in Experiment 1."""
    return not (run.width or "up.0" in P or VARIANTS[run.variant].position_in_skip)


@torch.inference_mode()
def _losses_of_heads(P: Parameters, run: Run, tokens: Tensor, answers: Tensor):
    """:func:`aot_losses` where :func:`_only_heads` is true, without what autograd costs."""
    maps, positions = Maps(*_heads(P, run, 0)), P["positions.0"]
    stream, of_attention = after_pairs_vjp(maps, *_tables(P, run), tokens)
    losses, logits, of_losses = next_token_losses_vjp(P["unembedding"], stream, answers)

    @torch.inference_mode()
    def gradient(g):
        g_unembedding, g_stream = of_losses(g)
        W_Q, W_K, W_V, W_O, g_first, g_second, g_x = of_attention(g_stream)
        g_places = torch.stack([g_first.sum(dim=2), g_second.sum(dim=2)], dim=1)
        found = {
            "embedding": g_first.add_(g_second).add_(g_x).mT,
            "unembedding": g_unembedding,
            "positions.0": F.pad(g_places, (0, 0, 0, positions.shape[1] - 2)),
            "W_Q.0": W_Q * _scale(run),
            "W_K.0": W_K,
            "W_V.0": W_V,
            "W_O.0": W_O,
        }
        return [found[name] for name in P]

    return losses, logits, gradient


def _tables(P: Parameters, run: Run) -> tuple[Float[Tensor, "R 2 N inner"], Tensor]:
    """For every token, the first layer's input at both places and the stream at the second."""
    x, places = P["embedding"], P["positions.0"][:, :2, None]
    if not VARIANTS[run.variant].position_in_skip:
        inputs = x @ P["down.0"].mT if "down.0" in P else x
        return inputs[:, None] + places, x
    placed = x[:, None] + places
    inputs = placed @ P["down.0"].mT[:, None] if "down.0" in P else placed
    return inputs, placed[:, 1]


def _columns(table: Float[Tensor, "R N d"], tokens: Tensor) -> Float[Tensor, "R S d B"]:
    return look_up(table, tokens).permute(0, 2, 3, 1).contiguous()


def _enter(P: Parameters, run: Run, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream and the attention's input, at the places from the first on."""
    variant, owner = VARIANTS[run.variant], _owner(run, layer)
    positions = P[f"positions.{owner}"][:, : x.shape[1], :, None]
    if variant.position_in_skip:
        x = x + positions
    inputs = P[f"down.{owner}"][:, None] @ x if f"down.{owner}" in P else x
    return x, inputs if variant.position_in_skip else inputs + positions


def _heads(P: Parameters, run: Run, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four maps of a layer's heads, the query's with the logits' scale in it."""
    W_Q, W_K, W_V, W_O = (P[f"{name}.{layer}"] for name in ("W_Q", "W_K", "W_V", "W_O"))
    return W_Q * _scale(run), W_K, W_V, W_O


def _scale(run: Run) -> float:
    return run.d_h**-0.5 if VARIANTS[run.variant].scaled else 1.0


def _block(P: Parameters, run: Run, layer: int, x: Tensor, inputs: Tensor, s: int) -> Tensor:
    """Attention of place ``s`` to the places up to it, then the feed-forward layer if any."""
    W_Q, W_K, W_V, W_O = _heads(P, run, layer)
    seen, asking = inputs[:, : s + 1], inputs[:, s]
    update = attend_and_add_columns(W_Q.mT, W_K.mT, W_V, W_O, seen, asking)
    return _after_attention(P, run, layer, x[:, s], update)


def _after_attention(P: Parameters, run: Run, layer: int, x: Tensor, update: Tensor) -> Tensor:
    owner = _owner(run, layer)
    if f"up.{owner}" in P:
        update = P[f"up.{owner}"] @ update
    return _feed_forward(P, run, layer, x + update)


def _feed_forward(P: Parameters, run: Run, layer: int, y: Float[Tensor, "R d B"]) -> Tensor:
    """The stream after the feed-forward layer, if there is one."""
    if not run.width:
        return y
    y = y + P[f"W_2.{layer}"] @ F.gelu(P[f"W_1.{layer}"] @ y + P[f"b_1.{layer}"][..., None])
    return y + P[f"b_2.{layer}"][..., None] if f"b_2.{layer}" in P else y


def aot_logits_of_pairs(
    P: Parameters, run: Run, first: Int[Tensor, " F"]
) -> Float[Tensor, "R N F*N"]:
    """Logits after every pair ``(a, b)`` with ``a`` in ``first``, with ``b`` fastest.

    With one layer, keys, queries and values belong to single tokens, so they are computed once for
    every token: a pair costs ``O(H d)`` instead of ``O(H d^2)``.

    Args:
        P: Stacked weights, as :func:`aot_parameters` names them.
        run: Any run of the stack, for the sizes and the variant.
        first: Some tokens of the vocabulary.

    Returns:
        The logits of the next token.
    """
    N = P["embedding"].shape[1]
    if run.layers > 1:
        pairs = torch.cartesian_prod(first, torch.arange(N, device=first.device))
        return aot_logits(P, run, pairs.expand(len(P["embedding"]), -1, -1))
    inputs, stream = _tables(P, run)
    x, (before, asking) = stream.mT, inputs.mT.unbind(dim=1)  # (R, inner or d, N)
    before = before[..., first]
    W_Q, W_K, W_V, W_O = _heads(P, run, 0)
    q, k = W_Q @ asking[:, None], W_K @ asking[:, None]  # (R, H, d_h, N)
    logits = (W_K @ before[:, None]).mT @ q - (q * k).sum(dim=-2)[..., None, :]  # (R, H, F, N)
    move = W_O @ W_V
    values, own = move @ before[:, None], move @ asking[:, None]  # (R, H, inner, F or N)
    alpha = logits.sigmoid()
    update = torch.einsum("rhfn,rhif->rifn", alpha, values) + own.sum(dim=1)[:, :, None]
    update = update - torch.einsum("rhfn,rhin->rifn", alpha, own)
    x = x[:, :, None].expand(-1, -1, len(first), -1).flatten(-2)
    return P["unembedding"] @ _after_attention(P, run, 0, x, update.flatten(-2))
