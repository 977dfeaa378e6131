r"""Attention layers one after the other: each token asks, and what it hears is added to it.

So values of one layer become logits of the next. Tokens are the rows of :math:`X`. A layer with a
skip connection is

.. math:: X \leftarrow X + \sum_h \operatorname{softmax}(X W_{Q,h} W_{K,h}^\top X^\top)
          X W_{V,h} W_{O,h},

and the outputs are :math:`W_D^\top x_n`, read at the last token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_Tokens = Float[Tensor, "*T n d"]


class Layer(NamedTuple):
    """The weights of one layer: maps to queries, keys and values, and back, for each head."""

    W_Q: Float[Tensor, "H d d_h"]
    W_K: Float[Tensor, "H d d_h"]
    W_V: Float[Tensor, "H d d_v"]
    W_O: Float[Tensor, "H d_v d"]


class DeepWeights(NamedTuple):
    """The layers from the first to the last, and the read-out."""

    layers: tuple[Layer, ...]
    W_D: Float[Tensor, "d o"]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All weights in order, four for each layer and then the read-out."""
        return (*(W for layer in self.layers for W in layer), self.W_D)

    def like(self, tensors: Sequence[Tensor]) -> DeepWeights:
        """The same network with other tensors, in the order of :attr:`tensors`."""
        layers = [Layer(*tensors[i : i + 4]) for i in range(0, len(tensors) - 1, 4)]
        return DeepWeights(tuple(layers), W_D=tensors[-1])

    def moved(self, step: DeepWeights, size: float = 1.0) -> DeepWeights:
        """The weights after a step of some size in a direction."""
        pairs = zip(self.tensors, step.tensors, strict=True)
        return self.like(tuple(W + size * S for W, S in pairs))


def deep(
    weights: DeepWeights, tokens: _Tokens, *, skip: bool = True, causal: bool = False
) -> Float[Tensor, "*T o"]:
    """The outputs at the last token; with ``causal``, each token attends to those up to it."""
    *_, X = streams(weights, tokens, skip=skip, causal=causal)
    return X[..., -1, :] @ weights.W_D


def streams(
    weights: DeepWeights, tokens: _Tokens, *, skip: bool = True, causal: bool = False
) -> Iterator[_Tokens]:
    """The tokens before the first layer and after every layer."""
    X, n = tokens, tokens.shape[-2]
    mask = X.new_zeros(n, n)  # added to the logits
    if causal:  # a token sees none of those after it
        mask = X.new_full((n, n), -math.inf).triu(1)
    yield X
    for layer in weights.layers:
        maps = layer.W_Q, layer.W_K, layer.W_V
        Q, K, V = (torch.einsum("...nd,hdk->...hnk", X, W) for W in maps)
        A = torch.softmax(Q @ K.mT + mask, -1)  # row i: where token i looks
        Y = torch.einsum("...hnv,hvd->...nd", A @ V, layer.W_O)  # summed over the heads
        if skip:
            Y = X + Y
        X = Y
        yield X
