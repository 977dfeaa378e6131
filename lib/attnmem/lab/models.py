"""The models that are trained: the transformers of Dana et al. and the layer of Mahdavi et al.

Weights are dictionaries of tensors whose leading axis ``R`` stacks independent runs. A decision
that a paper leaves open is marked ``# open:``. Gradients are by :mod:`attnmem.lab.gradients`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..core import bounds
from ..core.layers import OWN, attention_weights, head_values, token_axes
from . import gradients
from .data import generator
from .gradients import Gradient, written_out
from .store import Run

Parameters = dict[str, Tensor]


def _uniform(g: torch.Generator, *shape: int, bound: float | None = None) -> Tensor:
    """Uniform within a bound, by default that of a PyTorch ``Linear`` with such weights."""
    # In float32, whatever torch's default is.
    drawn = 2 * torch.rand(*shape, generator=g, dtype=torch.float32) - 1
    return drawn * (shape[-1] ** -0.5 if bound is None else bound)


# --- Dana et al. ----------------------------------------------------------------------------------


class Variant(NamedTuple):
    """How a transformer is read: the paper's equations or the published code."""

    # All heads share one map to dimension d_h and one back (the code, used where d_h differs from
    # d), or each head projects from dimension d (the equations).
    shared_maps: bool = True
    position_in_skip: bool = False  # added to the residual stream, or the attention's input only
    scaled: bool = True  # logits divided by the root of d_h
    published_init: bool = True  # or PyTorch's defaults for an Embedding and a Linear
    # All layers use one table of positions and one pair of maps, and the feed-forward layer's
    # second map has no bias (the code); or each layer has its own, and the bias.
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


def initial_aot(run: Run, g: torch.Generator) -> Parameters:
    """Initial weights with no axis of runs; ``W_Q.0`` is of layer 0, as is what layers share."""
    variant, d, d_h = VARIANTS[run.variant], run.d, run.d_h
    shared = variant.shared_maps and d_h != d
    inner = d_h if shared else d
    # PyTorch's default for tables is that of an Embedding.
    normal = functools.partial(torch.randn, generator=g, dtype=torch.float32)
    table = functools.partial(_uniform, g) if variant.published_init else normal
    P = {"embedding": table(run.N, d), "unembedding": _uniform(g, run.N, d)}
    for layer in range(run.layers):
        if layer == 0 or not variant.tied:
            # The code has three rows of positions for two places.
            P[f"positions.{layer}"] = table(3, d if variant.position_in_skip else inner)
            if shared:  # open: without bias, as the heads are
                P[f"down.{layer}"] = _uniform(g, d_h, d)
                P[f"up.{layer}"] = _uniform(g, d, d_h)
        # Xavier over the packed (3 d_h, inner) matrix, or each map on its own
        bound = math.sqrt(6 / (3 * d_h + inner)) if variant.published_init else None
        for name in ("W_Q", "W_K", "W_V"):
            P[f"{name}.{layer}"] = _uniform(g, run.H, d_h, inner, bound=bound)
        P[f"W_O.{layer}"] = _uniform(g, run.H, inner, d_h)
        if run.width:
            P[f"W_1.{layer}"] = _uniform(g, run.width, d)
            P[f"b_1.{layer}"] = _uniform(g, run.width, bound=d**-0.5)
            P[f"W_2.{layer}"] = _uniform(g, d, run.width)
            if not variant.tied:
                P[f"b_2.{layer}"] = _uniform(g, d, bound=run.width**-0.5)
    return P


def aot_losses(
    P: Parameters, run: Run, tokens: Int[Tensor, "R B 2"], answers: Int[Tensor, "R B"]
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R N B"], Gradient]:
    """The mean cross-entropy of :func:`aot_logits` on a batch, the logits, and the gradient.

    One layer of heads, as in Experiment 1, goes without what autograd costs, a third of a step.
    """
    more = run.layers > 1 or run.width or "up.0" in P or VARIANTS[run.variant].position_in_skip
    stream, of_stream = _layers_vjp(P, run, tokens) if more else _one_layer_vjp(P, run, tokens)
    with torch.inference_mode():  # under no_grad autograd would take a tenth of a small step
        logits = torch.bmm(P["unembedding"], stream)
        losses, of_losses = gradients.cross_entropy_vjp(logits, answers)

    def gradient(g):
        with torch.inference_mode():
            g_logits = of_losses((g / answers.shape[1]).view(-1, 1, 1))
            g_unembedding = torch.bmm(stream, g_logits.mT).mT
            g_stream = torch.bmm(P["unembedding"].mT, g_logits)
        found = {"unembedding": g_unembedding, **of_stream(g_stream)}
        return [found[name] for name in P]

    return losses.mean(dim=1), logits, gradient


@torch.inference_mode()
def _one_layer_vjp(P: Parameters, run: Run, tokens: Tensor):
    """The residual stream after it, and from its gradient those at the weights by name."""
    inputs = P["embedding"][:, None] + P["positions.0"][:, :2, None]
    data = inputs, P["embedding"], tokens
    stream, of_pairs = gradients.after_pairs_vjp(*_maps(P, run, 0), *data)

    @torch.inference_mode()
    def vjp(g):
        W_Q, W_K, W_V, W_O, g_inputs, g_x, _ = of_pairs(g)
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
        found = torch.autograd.grad(stream, [P[name] for name in names], g)
        return dict(zip(names, found, strict=True))

    return stream.detach(), vjp


def aot_logits(P: Parameters, run: Run, tokens: Int[Tensor, "R B 2"]) -> Float[Tensor, "R N B"]:
    """Logits after pairs of tokens, by stacked weights; examples last as everywhere on the way."""
    return P["unembedding"] @ _stream(P, run, tokens)


def _stream(P: Parameters, run: Run, tokens: Int[Tensor, "R B 2"]) -> Float[Tensor, "R d B"]:
    """The residual stream of the second place after all layers."""
    # The first place attends to itself only, so it is computed once for every token.
    x, inputs = _enter(P, run, 0, P["embedding"][:, None], slice(2))
    y = written_out(gradients.after_pairs_vjp, *_maps(P, run, 0), inputs, x[:, -1], tokens)
    y = _feed_forward(P, run, 0, y)
    first, seen = x[:, 0].mT, inputs[:, 0].mT  # (R, d, N), (R, inner, N)
    for layer in range(1, run.layers):
        first = first + _own_values(*_maps(P, run, layer - 1)[2:], seen)
        first = _feed_forward(P, run, layer - 1, first)
        first, seen = (z[:, 0].mT for z in _enter(P, run, layer, first.mT[:, None], slice(1)))
        x, asking = (z[:, 0].mT for z in _enter(P, run, layer, y.mT[:, None], slice(1, 2)))
        chosen = written_out(gradients.take_columns_vjp, seen, tokens[..., 0])
        W_Q, W_K, W_V, W_O = _maps(P, run, layer)
        A, M = W_Q.mT @ W_K, W_O @ W_V
        update = written_out(gradients.heads_vjp, A, M, asking, chosen - asking)
        y = _feed_forward(P, run, layer, x + (_own_values(W_V, W_O, asking) + update))
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


def _maps(P: Parameters, run: Run, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four maps of a layer's heads, with the logits' scale and the map back to the stream."""
    W_Q, W_K, W_V, W_O = (P[f"{name}.{layer}"] for name in ("W_Q", "W_K", "W_V", "W_O"))
    if VARIANTS[run.variant].scaled:
        W_Q = W_Q * run.d_h**-0.5
    up = P.get(f"up.{0 if VARIANTS[run.variant].tied else layer}")
    return W_Q, W_K, W_V, W_O if up is None else up[:, None] @ W_O


def _feed_forward(P: Parameters, run: Run, layer: int, y: Float[Tensor, "R d B"]) -> Tensor:
    """The stream after the feed-forward layer, if there is one."""
    if not run.width:
        return y
    y = y + P[f"W_2.{layer}"] @ F.gelu(P[f"W_1.{layer}"] @ y + P[f"b_1.{layer}"][..., None])
    return y + P[f"b_2.{layer}"][..., None] if f"b_2.{layer}" in P else y


# --- Mahdavi et al. -------------------------------------------------------------------------------


def initial_mha(run: Run, g: torch.Generator) -> Parameters:
    """Initial weights of the model that Mahdavi et al. train (``d_v = 1``), no axis of runs."""
    d, d_h, H, outputs = run.d, run.d_h, run.H, run.N or 1
    W_E, b_E = _uniform(g, d, d), _uniform(g, d)
    W_D, b_D = _uniform(g, outputs, d), _uniform(g, outputs, bound=d**-0.5)
    shapes = {"W_Q": (H, d, d_h), "W_K": (H, d, d_h), "W_V": (H, d, 1), "W_O": (H, d)}
    P = {"W_E": W_E, "b_E": b_E}
    for name, shape in shapes.items():  # Xavier's
        P[name] = _uniform(g, *shape, bound=math.sqrt(6 / sum(shape[-2:])))
    return P | {"W_D": W_D, "b_D": b_D}


@functools.cache  # on the device once, since a captured step may not copy from the host
def _sinusoids(
    places: int, dim: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "places dim"]:
    """The fixed positions: sines in the even coordinates, cosines in the odd ones."""
    rates = 10000.0 ** (-torch.arange(0, dim, 2, dtype=dtype) / dim)
    angles = torch.arange(places)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :dim].to(device)


def mha_heads(
    P: Parameters, run: Run, contexts: Tensor, queries: Float[Tensor, "R B d"]
) -> tuple[Float[Tensor, "R B H n"], Float[Tensor, "R B H"]]:
    """Attention weights and values of every head, with contexts own or shared ``(R, n, d)``.

    Tokens and queries are embedded, positions added (the query's is 0), and logits divided by 8.
    """
    positions = _sinusoids(run.n + 1, run.d, queries.dtype, queries.device)
    tokens = token_axes(contexts, queries)
    W_E, b_E = P["W_E"].mT, P["b_E"][:, None]
    e = (queries @ W_E + (b_E + positions[0])) / 8
    shift = positions[1:] + b_E
    if tokens == OWN:
        W_E, shift = W_E[:, None], shift[:, None]
    E = contexts @ W_E + shift
    alpha = attention_weights(P["W_Q"], P["W_K"], E, e)
    return alpha, head_values(alpha, E, P["W_V"], tokens)[..., 0]


def mha_losses(
    P: Parameters, run: Run, contexts: Tensor, queries: Float[Tensor, "R B d"], labels: Tensor
) -> tuple[Float[Tensor, "R B"], Float[Tensor, "R d_out B"], Gradient]:
    """The loss of every example by the decoded values of :func:`mha_heads`; asked for once.

    Of classes it is a cross-entropy, of real numbers the squared error.
    """
    *weights, W_O, W_D, b_D = P.values()
    positions = _sinusoids(run.n + 1, run.d, queries.dtype, queries.device)
    arguments = gradients.EmbeddedHeads(*weights), positions, 1 / 8, contexts, queries
    shared = run.context == "shared"
    attend = gradients.shared_heads_vjp if shared else gradients.own_heads_vjp
    heads, of_heads = attend(*arguments)
    decoder = W_D @ W_O.mT
    outputs = torch.baddbmm(b_D[..., None], decoder, heads)
    if run.N:
        losses, of_losses = gradients.cross_entropy_vjp(outputs, labels)
    else:
        apart = outputs - labels[:, None]
        losses = apart.square()[:, 0]

    def gradient(g):
        g = of_losses(g[:, None]) if run.N else 2 * apart * g[:, None]
        g_decoder = g @ heads.mT
        of_weights = of_heads(decoder.mT @ g)
        return [*of_weights, g_decoder.mT @ W_D, g_decoder @ W_O, g.sum(dim=-1)]

    return losses, outputs, gradient


# --- kinds of models ------------------------------------------------------------------------------


class Model(NamedTuple):
    """A kind of model that can be trained."""

    initial: Callable[[Run, torch.Generator], Parameters]  # without the axis of runs
    # From stacked weights, a run of the stack and a batch to losses, outputs with the examples
    # last, and the gradient. Of pairs and next tokens the mean loss of each run (R,); of contexts,
    # queries and labels the loss of each example (R, B).
    losses: Callable[..., tuple[Tensor, Tensor, Gradient]]
    tasks: tuple[str, ...]  # what it can be trained on, names in PROTOCOLS
    variants: tuple[str, ...] = ("code",)  # how the paper can be read


_PAIRS = Model(initial_aot, aot_losses, ("bigrams", "associations"), (*VARIANTS,))
MODELS = {"aot": _PAIRS, "mlp": _PAIRS, "mha": Model(initial_mha, mha_losses, ("classes", "reals"))}


def guaranteed(run: Run) -> int:
    """How many examples the paper's theorem guarantees for a model of this size."""
    if run.model == "mha":
        return bounds.mha_capacity(run.H, run.n, run.d_h)
    return bounds.aot_capacity(run.H, run.d_h, run.d)


# --- how many numbers are trained -----------------------------------------------------------------

# What the sizes of a run's weights do not depend on.
_NO_PART = {"experiment": "", "profile": "", "seed": 0, "T": 0, "steps": 0, "batch": 0}


def parameter_count(run: Run) -> int:
    """How many trained numbers the loss of a model depends on: all but the unused position."""
    return sum(
        run.n * shape[1] if name.startswith("positions.") else math.prod(shape)
        for name, shape in _shapes(dataclasses.replace(run, **_NO_PART)).items()
    )


@functools.cache
def _shapes(run: Run) -> dict[str, torch.Size]:
    P = MODELS[run.model].initial(run, generator(run, "weights"))
    return {name: W.shape for name, W in P.items()}
