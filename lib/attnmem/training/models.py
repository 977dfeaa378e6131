"""The models that are trained: that of Mahdavi et al., and a registry of families.

Weights are dictionaries of tensors whose leading axis ``R`` stacks independent runs. Forward passes
call the attention layers of :mod:`attnmem.attention`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .. import bounds
from ..attention import (
    OWN,
    EmbeddedWeights,
    attention_weights,
    combine_heads,
    embedded_losses,
    head_values,
)
from ..attention.products import token_axes
from ..results import Run
from .gradients import Gradient
from .initial import Parameters, bias, generator, linear, xavier
from .transformers import VARIANTS, aot_logits, aot_logits_of_pairs, aot_losses, aot_parameters

# --- Mahdavi et al. -------------------------------------------------------------------------------


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
    W_E, b_E = linear(g, d, d), bias(g, d, d)
    W_D, b_D = linear(g, outputs, d), bias(g, outputs, d)
    return {
        "W_E": W_E,
        "b_E": b_E,
        "W_Q": xavier(g, H, d, d_h),
        "W_K": xavier(g, H, d, d_h),
        "W_V": xavier(g, H, d, 1),
        "W_O": xavier(g, H, d),
        "W_D": W_D,
        "b_D": b_D,
    }


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

    Args:
        P: Stacked weights, as :func:`mha_parameters` names them.
        run: Any run of the stack, for the sizes.
        contexts: Tokens as rows, own ``(R, B, n, d)`` or shared ``(R, n, d)``.
        queries: One vector for each example.

    Returns:
        The attention weights and the values.
    """
    positions = _positions(run.n + 1, run.d, queries.device, queries.dtype)
    tokens = token_axes(contexts, queries)
    W_E, b_E = P["W_E"].mT, P["b_E"][:, None]
    e = (queries @ W_E + (b_E + positions[0])) / 8
    places = positions[1:] + b_E
    if tokens == OWN:
        W_E, places = W_E[:, None], places[:, None]
    E = contexts @ W_E + places
    alpha = attention_weights(P["W_Q"], P["W_K"], E, e)
    return alpha, head_values(alpha, E, P["W_V"], tokens)[..., 0]


def mha_losses(
    P: Parameters,
    run: Run,
    contexts: Tensor,
    queries: Float[Tensor, "R B d"],
    labels: Tensor,
) -> tuple[Float[Tensor, "R B"], Float[Tensor, "R d_out B"], Gradient]:
    """What :func:`mha_outputs` loses on every example, with the gradient written out.

    Args:
        P: Stacked weights, as :func:`mha_parameters` names them.
        run: Any run of the stack, for the sizes.
        contexts: Tokens as rows, own ``(R, B, n, d)`` or shared ``(R, n, d)``.
        queries: One vector for each example.
        labels: A class or a real number for each example, ``(R, B)``.

    Returns:
        As of :func:`attnmem.attention.embedded_losses`.
    """
    positions = _positions(run.n + 1, run.d, queries.device, queries.dtype)
    return embedded_losses(EmbeddedWeights(**P), positions, 1 / 8, contexts, queries, labels)


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
        losses: From the same and next tokens or labels ``(R, B)`` to the losses, the outputs and
            the gradient. Of models of token sequences, the mean loss of each run ``(R,)``; None to
            compute it from the outputs. Of models of contexts and queries, the loss of each example
            ``(R, B)``, and outputs with the examples last.
        pairs: Of models of token sequences, logits of all pairs from weights, run and first tokens.
    """

    initial: Callable[[Run, torch.Generator], Parameters]
    outputs: Callable[..., Tensor]
    tasks: tuple[str, ...]
    guaranteed: Callable[[Run], int]
    variants: tuple[str, ...] = ("code",)
    losses: Callable[..., tuple[Tensor, Tensor, Gradient]] | None = None
    pairs: Callable[..., Tensor] | None = None


_TRANSFORMER = Family(
    aot_parameters,
    aot_logits,
    ("bigrams", "associations"),
    lambda run: bounds.aot_capacity(run.H, run.d_h, run.d),
    tuple(VARIANTS),
    aot_losses,
    aot_logits_of_pairs,
)
FAMILIES = {
    "aot": _TRANSFORMER,
    "mlp": _TRANSFORMER,
    "mha": Family(
        mha_parameters,
        mha_outputs,
        ("classes", "reals"),
        lambda run: bounds.mha_capacity(run.H, run.n, run.d_h),
        losses=mha_losses,
    ),
}


def parameter_count(run: Run) -> int:
    """How many trained numbers the loss of a model depends on: all but the unused position."""
    return _parameter_count(architecture(run))


def architecture(run: Run) -> Run:
    """What the sizes of a run's weights depend on, the rest made equal."""
    same = {"experiment": "", "profile": "", "seed": 0, "T": 0, "steps": 0, "batch": 0}
    return dataclasses.replace(run, **same)


@functools.cache
def _parameter_count(run: Run) -> int:
    P = FAMILIES[run.model].initial(run, generator(run, "weights"))
    unused = sum(x[run.n :].numel() for name, x in P.items() if name.startswith("positions."))
    return sum(x.numel() for x in P.values()) - unused
