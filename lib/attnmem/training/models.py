"""The models that are trained: initial weights, forward passes, and a registry of families.

Weights are dictionaries of tensors whose leading axis ``R`` stacks independent runs. Forward passes
call the attention layers of :mod:`attnmem.attention`. All draws are float32, whatever torch's
default is, so a run's key decides its numbers. A decision that a paper leaves open is marked
``# open:``.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .. import bounds
from ..attention import (
    attend_and_add_columns,
    attend_values,
    attention_logits,
    combine_heads,
    embedded_logits,
    embedded_values,
    look_up,
)
from ..results import Run

Parameters = dict[str, Tensor]


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


def generator(run: Run, stream: str) -> torch.Generator:
    """A generator of its own for every run and purpose, the same on every machine.

    Args:
        run: The run, whose key seeds the generator.
        stream: What the numbers are for, such as ``weights``.

    Returns:
        A new generator on the CPU, at the start of its numbers.
    """
    digest = hashlib.sha256(f"{run.key} {stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


# --- initial weights ------------------------------------------------------------------------------


def _uniform(g: torch.Generator, bound: float, *shape: int) -> Tensor:
    """Float32 numbers between ``-bound`` and ``bound``."""
    return (2 * torch.rand(*shape, generator=g, dtype=torch.float32) - 1) * bound


def _linear(g: torch.Generator, outputs: int, inputs: int) -> Float[Tensor, "outputs inputs"]:
    """PyTorch's initial weight of ``Linear(inputs, outputs)``."""
    return _uniform(g, inputs**-0.5, outputs, inputs)


def _bias(g: torch.Generator, outputs: int, inputs: int) -> Float[Tensor, " outputs"]:
    """PyTorch's initial bias of ``Linear(inputs, outputs)``."""
    return _uniform(g, inputs**-0.5, outputs)


def _xavier(g: torch.Generator, *shape: int) -> Tensor:
    """Xavier's uniform matrices, in the last two axes."""
    return _uniform(g, math.sqrt(6 / sum(shape[-2:])), *shape)


def _embedding(g: torch.Generator, rows: int, dim: int) -> Tensor:
    """PyTorch's initial weight of ``Embedding(rows, dim)``."""
    return torch.randn(rows, dim, generator=g, dtype=torch.float32)


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
    table = _linear if published else _embedding
    P = {"embedding": table(g, run.N, d), "unembedding": _linear(g, run.N, d)}
    for layer in range(run.layers):
        if _owner(run, layer) == layer:
            # The code has three rows of positions for two places.
            P[f"positions.{layer}"] = table(g, 3, d if variant.position_in_skip else inner)
            if shared:  # open: without bias, as the heads are
                P[f"down.{layer}"] = _linear(g, d_h, d)
                P[f"up.{layer}"] = _linear(g, d, d_h)
        # Xavier over the packed (3 d_h, inner) matrix, or each map on its own
        bound = math.sqrt(6 / (3 * d_h + inner)) if published else inner**-0.5
        for name in ("W_Q", "W_K", "W_V"):
            P[f"{name}.{layer}"] = _uniform(g, bound, run.H, d_h, inner)
        P[f"W_O.{layer}"] = _uniform(g, d_h**-0.5, run.H, inner, d_h)
        if run.width:
            P[f"W_1.{layer}"], P[f"b_1.{layer}"] = _linear(g, run.width, d), _bias(g, run.width, d)
            P[f"W_2.{layer}"] = _linear(g, d, run.width)
            if not variant.tied:
                P[f"b_2.{layer}"] = _bias(g, d, run.width)
    return P


def _owner(run: Run, layer: int) -> int:
    """The layer whose positions and maps a layer uses: the first, or the layer itself."""
    return 0 if VARIANTS[run.variant].tied else layer


def mha_parameters(run: Run, g: torch.Generator) -> Parameters:
    """Initial weights of the model that Mahdavi et al. train (``d_v = 1``).

    Args:
        run: A run of the model ``mha``.
        g: Where the numbers come from.

    Returns:
        The weights by name, without the axis of runs.
    """
    d, d_h, H = run.d, run.d_h, run.H
    outputs = run.N or 1
    W_E, b_E = _linear(g, d, d), _bias(g, d, d)
    W_D, b_D = _linear(g, outputs, d), _bias(g, outputs, d)
    return {
        "W_E": W_E,
        "b_E": b_E,
        "W_Q": _xavier(g, H, d, d_h),
        "W_K": _xavier(g, H, d, d_h),
        "W_V": _xavier(g, H, d, 1),
        "W_O": _xavier(g, H, d),
        "W_D": W_D,
        "b_D": b_D,
    }


# --- Dana et al.: forward passes ------------------------------------------------------------------


def aot_logits(P: Parameters, run: Run, tokens: Int[Tensor, "R B S"]) -> Float[Tensor, "R N B"]:
    """Logits after the last token, examples along the last axis as everywhere on the way.

    Hidden layers compute every place, the last layer only one. The first place attends to itself,
    so it is computed once for every token of the vocabulary, not for every example.

    Args:
        P: Stacked weights, as :func:`aot_parameters` names them.
        run: Any run of the stack, for the sizes and the variant.
        tokens: Integers in ``[0, N)``, one sequence for each example.

    Returns:
        The logits of the next token.
    """
    S = tokens.shape[-1]
    x = _columns(P["embedding"], tokens)
    first = P["embedding"].mT[:, None]
    for layer in range(run.layers - 1):
        entered = _enter(P, run, layer, x)
        later = [_block(P, run, layer, *entered, s) for s in range(1, S)]
        first = _block(P, run, layer, *_enter(P, run, layer, first), 0)[:, None]
        [chosen] = _columns(first[:, 0].mT, tokens[..., :1]).unbind(dim=1)
        x = torch.stack([chosen, *later], dim=1)
    layer = run.layers - 1
    return P["unembedding"] @ _block(P, run, layer, *_enter(P, run, layer, x), S - 1)


def _columns(table: Float[Tensor, "R N d"], tokens: Tensor) -> Float[Tensor, "R S d B"]:
    return look_up(table, tokens).permute(0, 2, 3, 1).contiguous()


def _enter(P: Parameters, run: Run, layer: int, x: Tensor, at: int = 0) -> tuple[Tensor, Tensor]:
    """The residual stream and the attention's input, at the places from ``at`` on."""
    variant, owner = VARIANTS[run.variant], _owner(run, layer)
    positions = P[f"positions.{owner}"][:, at : at + x.shape[1], :, None]
    if variant.position_in_skip:
        x = x + positions
    inputs = P[f"down.{owner}"][:, None] @ x if f"down.{owner}" in P else x
    return x, inputs if variant.position_in_skip else inputs + positions


def _heads(P: Parameters, run: Run, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four maps of a layer's heads, the query's with the logits' scale in it."""
    W_Q, W_K, W_V, W_O = (P[f"{name}.{layer}"] for name in ("W_Q", "W_K", "W_V", "W_O"))
    return W_Q * run.d_h**-0.5 if VARIANTS[run.variant].scaled else W_Q, W_K, W_V, W_O


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
    y = x + update
    if not run.width:
        return y
    y = y + P[f"W_2.{layer}"] @ F.gelu(P[f"W_1.{layer}"] @ y + P[f"b_1.{layer}"][..., None])
    return y + P[f"b_2.{layer}"][..., None] if f"b_2.{layer}" in P else y


def _aot_logits_of_pairs(
    P: Parameters, run: Run, first: Int[Tensor, " F"]
) -> Float[Tensor, "R N F*N"]:
    """Logits after every pair ``(a, b)`` with ``a`` in ``first``, with ``b`` fastest.

    With one layer, keys, queries and values belong to single tokens, so they are computed once for
    every token: a pair costs ``O(H d)`` instead of ``O(H d^2)``.
    """
    N = P["embedding"].shape[1]
    if run.layers > 1:
        pairs = torch.cartesian_prod(first, torch.arange(N, device=first.device))
        return aot_logits(P, run, pairs.expand(len(P["embedding"]), -1, -1))
    every = P["embedding"].mT[:, None]  # (R, 1, d, N)
    (_, before), (x, asking) = (_enter(P, run, 0, every, at) for at in (0, 1))
    before, asking = before[:, 0][..., first], asking[:, 0]  # (R, inner, F) and (R, inner, N)
    W_Q, W_K, W_V, W_O = _heads(P, run, 0)
    q, k = W_Q @ asking[:, None], W_K @ asking[:, None]  # (R, H, d_h, N)
    logits = (W_K @ before[:, None]).mT @ q - (q * k).sum(dim=-2)[..., None, :]  # (R, H, F, N)
    move = W_O @ W_V
    values, own = move @ before[:, None], move @ asking[:, None]  # (R, H, inner, F or N)
    alpha = logits.sigmoid()
    update = torch.einsum("rhfn,rhif->rifn", alpha, values) + own.sum(dim=1)[:, :, None]
    update = update - torch.einsum("rhfn,rhin->rifn", alpha, own)
    x = x[:, 0][:, :, None].expand(-1, -1, len(first), -1).flatten(-2)
    return P["unembedding"] @ _after_attention(P, run, 0, x, update.flatten(-2))


# --- Mahdavi et al.: forward pass -----------------------------------------------------------------


def sinusoids(
    places: int, dim: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "places dim"]:
    """The fixed positions: sines in the even coordinates, cosines in the odd ones.

    Args:
        places: How many places.
        dim: How many coordinates.
        dtype: float32 or float64.

    Returns:
        One row for each place, on the CPU.
    """
    rates = 10000.0 ** (-torch.arange(0, dim, 2, dtype=dtype) / dim)
    angles = torch.arange(places)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :dim]


@functools.cache
def _positions(places: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """On the device once, since a captured step may not copy from the host."""
    return sinusoids(places, dim, dtype).to(device)


def mha_outputs(
    P: Parameters, run: Run, contexts: Tensor, queries: Float[Tensor, "R B d"]
) -> Float[Tensor, "R B d_out"]:
    """Embed, add positions (the query's is 0), attend, decode; logits over the root of 64.

    Args:
        P: Stacked weights, as :func:`mha_parameters` names them.
        run: Any run of the stack, for the sizes.
        contexts: Tokens as rows, own ``(R, B, n, d)`` or shared ``(R, n, d)``.
        queries: One vector for each example.

    Returns:
        One output for each class, or a single one for real labels.
    """
    _, values = mha_heads(P, run, contexts, queries)
    return combine_heads(values, P["W_O"], P["W_D"].mT) + P["b_D"][:, None]


def mha_heads(
    P: Parameters, run: Run, contexts: Tensor, queries: Float[Tensor, "R B d"]
) -> tuple[Float[Tensor, "R B H n"], Float[Tensor, "R B H"]]:
    """Attention weights and values of every head in :func:`mha_outputs`.

    Own contexts are never embedded. Logits and values are linear in tokens and in positions, so the
    embedding is multiplied into the heads' maps.

    Args:
        P: Stacked weights, as :func:`mha_parameters` names them.
        run: Any run of the stack, for the sizes.
        contexts: Tokens as rows, own ``(R, B, n, d)`` or shared ``(R, n, d)``.
        queries: One vector for each example.

    Returns:
        The attention weights and the values.
    """
    positions = _positions(run.n + 1, run.d, queries.device, queries.dtype)
    W_E, b_E = P["W_E"].mT, P["b_E"][:, None]
    W_Q, W_K, W_V = P["W_Q"], P["W_K"], P["W_V"][..., 0]
    e = (queries @ W_E + (b_E + positions[0])) / 8
    places = positions[1:] + b_E
    if contexts.ndim == queries.ndim:
        E = contexts @ W_E + places
        return attend_values(attention_logits(W_Q, W_K, E, e), E @ W_V.mT)
    # Without the bias, which adds the same to all tokens' logits and would cost a gradient.
    logits = embedded_logits(W_Q, W_K, W_E, positions[1:], contexts, e)
    return attend_values(logits, embedded_values(W_V, W_E, places, contexts))


# --- the registry ---------------------------------------------------------------------------------


class Family(NamedTuple):
    """A kind of model that can be trained.

    Attributes:
        initial: From a run and a generator to initial weights, without the axis of runs.
        outputs: From stacked weights, a run of the stack and a batch to outputs. Models of token
            sequences take ``(R, B, S)`` tokens and give ``(R, N, B)`` logits. Models of contexts
            and queries take those and give ``(R, B, outputs)``.
        tasks: What it can be trained on, names in ``PROTOCOLS``.
        guaranteed: How many examples the paper's theorem guarantees for the sizes of a run.
        variants: How the paper can be read, names in :data:`VARIANTS`.
        pairs: Of models of token sequences, logits of all pairs from weights, run and first tokens.
    """

    initial: Callable[[Run, torch.Generator], Parameters]
    outputs: Callable[..., Tensor]
    tasks: tuple[str, ...]
    guaranteed: Callable[[Run], int]
    variants: tuple[str, ...] = ("code",)
    pairs: Callable[..., Tensor] | None = None


_TRANSFORMER = Family(
    aot_parameters,
    aot_logits,
    ("bigrams", "associations"),
    lambda run: bounds.aot_capacity(run.H, run.d_h, run.d),
    tuple(VARIANTS),
    _aot_logits_of_pairs,
)
FAMILIES = {
    "aot": _TRANSFORMER,
    "mlp": _TRANSFORMER,
    "mha": Family(
        mha_parameters,
        mha_outputs,
        ("classes", "reals"),
        lambda run: bounds.mha_capacity(run.H, run.n, run.d_h),
    ),
}


def parameter_count(run: Run) -> int:
    """How many trained numbers the loss of a model depends on: all but the unused position."""
    P = FAMILIES[run.model].initial(run, generator(run, "weights"))
    unused = sum(x[run.n :].numel() for name, x in P.items() if name.startswith("positions."))
    return sum(x.numel() for x in P.values()) - unused
