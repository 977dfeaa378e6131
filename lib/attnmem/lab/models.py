"""The models that are trained: of Dana et al. transformers, of Mahdavi et al. a layer, and a block.

Weights are dictionaries of tensors whose leading axis ``R`` stacks independent runs. A decision
that a paper leaves open is marked ``# open:``. A model is its initial weights and its outputs, and
is trained by autograd; :mod:`attnmem.lab.gradients` does the same faster for those of the papers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Num
from torch import Tensor

from ..core import bounds
from ..theory.products import OWN, attention_weights, head_values, token_axes
from .data import generator
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


def take_columns(
    table: Num[Tensor, "*runs d N"], chosen: Int[Tensor, "*runs m"]
) -> Num[Tensor, "*runs d m"]:
    """The columns of each run's table that its integers choose."""
    return table.gather(-1, chosen[..., None, :].expand(*table.shape[:-1], -1))


def aot_logits(P: Parameters, run: Run, tokens: Int[Tensor, "R B 2"]) -> Float[Tensor, "R N B"]:
    """Logits after pairs of tokens, by stacked weights; examples last, since long rows are fast."""
    table = P["embedding"].mT
    first, second = (take_columns(table, place) for place in tokens.unbind(dim=-1))  # (R, d, B)
    for layer in range(run.layers):
        first, first_inputs = _enter(P, run, layer, 0, first)
        second, second_inputs = _enter(P, run, layer, 1, second)
        maps = layer_maps(P, run, layer)
        to_first, to_second = _attend_to_pair(*maps, first_inputs, second_inputs)
        first = feed_forward(P, run, layer, first + to_first)
        second = feed_forward(P, run, layer, second + to_second)
    return P["unembedding"] @ second


def _enter(
    P: Parameters, run: Run, layer: int, place: int, stream: Float[Tensor, "R d B"]
) -> tuple[Float[Tensor, "R d B"], Float[Tensor, "R inner B"]]:
    """The residual stream and the attention's input at a place of the pair."""
    variant = VARIANTS[run.variant]
    owner = 0 if variant.tied else layer  # the layer whose positions and maps this one uses
    position = P[f"positions.{owner}"][:, place, :, None]
    if variant.position_in_skip:
        stream = stream + position
    inputs = P[f"down.{owner}"] @ stream if f"down.{owner}" in P else stream
    if not variant.position_in_skip:
        inputs = inputs + position
    return stream, inputs


def _attend_to_pair(
    W_Q: Tensor, W_K: Tensor, W_V: Tensor, W_O: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    r"""What both places of pairs ``(R, d, B)`` get; the first attends to itself, the other to both.

    Softmax over two tokens is a sigmoid: with :math:`\delta = x_a - x_b`, :math:`A_h = (W_Q^h)^\top
    W_K^h` and :math:`M_h = W_O^h W_V^h` the second place gets :math:`\sum_h M_h x_b + \sum_h
    \operatorname{sigmoid}(x_b^\top A_h \delta) M_h \delta`.
    """
    A, M = W_Q.mT @ W_K, W_O @ W_V  # (R, H, d, d), (R, H, d_o, d)
    delta, alone = (a - b)[:, None], M.sum(dim=1)
    keys = (A.mT.flatten(1, 2) @ b).unflatten(1, A.shape[1:3])  # A_h^T x_b, (R, H, d, B)
    alpha = (keys * delta).sum(dim=2, keepdim=True).sigmoid()
    mixed = M.transpose(1, 2).flatten(2) @ (alpha * delta).flatten(1, 2)
    return alone @ a, alone @ b + mixed


def layer_maps(P: Parameters, run: Run, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four maps of a layer's heads, with the logits' scale and the map back to the stream."""
    W_Q, W_K, W_V, W_O = (P[f"{name}.{layer}"] for name in ("W_Q", "W_K", "W_V", "W_O"))
    if VARIANTS[run.variant].scaled:
        W_Q = W_Q * run.d_h**-0.5
    up = P.get(f"up.{0 if VARIANTS[run.variant].tied else layer}")
    return W_Q, W_K, W_V, W_O if up is None else up[:, None] @ W_O


def feed_forward(P: Parameters, run: Run, layer: int, y: Float[Tensor, "R d B"]) -> Tensor:
    """The stream after the feed-forward layer, if there is one."""
    if not run.width:
        return y
    y = y + P[f"W_2.{layer}"] @ F.gelu(P[f"W_1.{layer}"] @ y + P[f"b_1.{layer}"][..., None])
    return y + P[f"b_2.{layer}"][..., None] if f"b_2.{layer}" in P else y


# --- one block that stores facts ------------------------------------------------------------------

FROZEN = ("subjects", "relations", "objects")  # tables of vectors around the block


def initial_block(run: Run, g: torch.Generator) -> Parameters:
    """A block of attention and MLP without biases, and random vectors, which are not trained."""
    d, d_h, H = run.d, run.d_h, run.H
    normal = functools.partial(torch.randn, generator=g, dtype=torch.float32)
    P = {name: normal(run.N, d) for name in FROZEN}
    for name in ("W_Q", "W_K", "W_V"):
        P[f"{name}.0"] = _uniform(g, H, d_h, d)
    P["W_O.0"] = _uniform(g, H, d, d_h, bound=(H * d_h) ** -0.5)
    return P | {"W_1": _uniform(g, run.width, d), "W_2": _uniform(g, d, run.width)}


def block_logits(P: Parameters, run: Run, tokens: Int[Tensor, "R B 2"]) -> Float[Tensor, "R N B"]:
    """Logits of the objects, read from the stream at the relation, after the subject."""
    subjects, relations = tokens.unbind(dim=-1)
    first = take_columns(P["subjects"].mT, subjects)  # (R, d, B)
    stream = take_columns(P["relations"].mT, relations)
    _, attended = _attend_to_pair(*layer_maps(P, run, 0), _normed(first), _normed(stream))
    stream = stream + attended
    stream = stream + P["W_2"] @ F.gelu(P["W_1"] @ _normed(stream))
    return P["objects"] @ stream


def _normed(x: Float[Tensor, "R d B"]) -> Float[Tensor, "R d B"]:
    """An RMSNorm without weights."""
    return x * x.square().mean(dim=1, keepdim=True).add(1e-6).rsqrt()


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
@torch.inference_mode(False)  # so that autograd may use what an evaluation has cached
def sinusoids(
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
    positions = sinusoids(run.n + 1, run.d, queries.dtype, queries.device)
    tokens = token_axes(contexts, queries)
    W_E, b_E = P["W_E"].mT, P["b_E"][:, None]
    e = (queries @ W_E + (b_E + positions[0])) / 8
    shift = positions[1:] + b_E
    if tokens == OWN:
        W_E, shift = W_E[:, None], shift[:, None]
    E = contexts @ W_E + shift
    alpha = attention_weights(P["W_Q"], P["W_K"], E, e)
    return alpha, head_values(alpha, E, P["W_V"], tokens)[..., 0]


def mha_outputs(
    P: Parameters, run: Run, contexts: Tensor, queries: Float[Tensor, "R B d"]
) -> Float[Tensor, "R N B"]:
    """What is decoded from the values of :func:`mha_heads`: logits of classes, or a number."""
    _, values = mha_heads(P, run, contexts, queries)
    return torch.baddbmm(P["b_D"][..., None], P["W_D"] @ P["W_O"].mT, values.mT)


# --- kinds of models ------------------------------------------------------------------------------


class Model(NamedTuple):
    """A kind of model that can be trained: nothing else has to be written for a new one."""

    initial: Callable[[Run, torch.Generator], Parameters]  # without the axis of runs
    # From stacked weights, a run of the stack and inputs, pairs of tokens or contexts and queries.
    outputs: Callable[..., Float[Tensor, "R N B"]]
    tasks: tuple[str, ...]  # what it can be trained on, names in PROTOCOLS
    variants: tuple[str, ...] = ("code",)  # how the paper can be read
    frozen: tuple[str, ...] = ()  # the names of weights that are not trained


_PAIRS = Model(initial_aot, aot_logits, ("bigrams", "associations", "text"), (*VARIANTS,))
_CONTEXTS = Model(initial_mha, mha_outputs, ("classes", "reals"))
_FACTS = Model(initial_block, block_logits, ("associations",), frozen=FROZEN)
MODELS = {"aot": _PAIRS, "mlp": _PAIRS, "mha": _CONTEXTS, "block": _FACTS}


def guaranteed(run: Run) -> int:
    """How many examples the paper's theorem guarantees for a model of this size."""
    if run.model == "mha":
        return bounds.mha_capacity(run.H, run.n, run.d_h)
    return bounds.aot_capacity(run.H, run.d_h, run.d)


# --- losses and gradients -------------------------------------------------------------------------

# From derivatives at the losses (R, B) to the gradients at the weights, in their order.
Gradient = Callable[[Tensor], Sequence[Tensor]]
Losses = tuple[Float[Tensor, "R B"], Float[Tensor, "R N B"], Gradient]

# By model and variant what stands in for by_autograd, equal to it up to rounding. A new model or
# variant has none.
ACCELERATORS: dict[tuple[str, str], Callable[..., Losses]] = {}


def losses(P: Parameters, run: Run, *batch: Tensor) -> Losses:
    """The loss of each example of a batch, the outputs, and the gradient, which is asked for once.

    The last tensor of a batch has the labels; the loss of classes, or of distributions ``(R, N,
    B)`` over them, is the cross-entropy, of real numbers the squared error.
    """
    return ACCELERATORS.get((run.model, run.variant), by_autograd)(P, run, *batch)


def by_autograd(P: Parameters, run: Run, *batch: Tensor) -> Losses:
    """:func:`losses` of any model; on a GPU a look-up's gradient repeats up to rounding only."""
    *inputs, labels = batch
    outputs = MODELS[run.model].outputs(P, run, *inputs)
    if run.N is None:
        by_example = (outputs[:, 0] - labels).square()
    else:
        by_example = F.cross_entropy(outputs, labels, reduction="none")

    def gradient(derivatives: Tensor) -> Sequence[Tensor]:
        trained = [W for W in P.values() if W.requires_grad]
        return torch.autograd.grad(by_example, trained, derivatives)

    return by_example.detach(), outputs.detach(), gradient


# --- how many numbers are trained -----------------------------------------------------------------

# What the sizes of a run's weights do not depend on.
_IRRELEVANT = {"experiment": "", "profile": "", "seed": 0, "T": 0, "steps": 0, "batch": 0}


def parameter_count(run: Run) -> int:
    """How many trained numbers the loss of a model depends on: all but the unused position."""
    return sum(
        run.n * shape[1] if name.startswith("positions.") else math.prod(shape)
        for name, shape in _shapes(dataclasses.replace(run, **_IRRELEVANT)).items()
    )


@functools.cache
def _shapes(run: Run) -> dict[str, torch.Size]:
    model = MODELS[run.model]
    P = model.initial(run, generator(run, "weights"))
    return {name: W.shape for name, W in P.items() if name not in model.frozen}
