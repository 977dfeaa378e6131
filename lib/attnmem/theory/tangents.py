r"""The derivative of a layer with one output, in all its weights, without forming its matrix.

With ``q = W_Q^T e``, attended token :math:`z_h`, and the covariance :math:`D_h` of the tokens under
the attention of head ``h``, a change of the weights changes the output by

.. math:: \sum_h \dot\mu_h^\top z_h + c_h^\top (\dot W_{K,h} q_h + W_{K,h} \dot W_{Q,h}^\top e),
          \qquad c_h = D_h \mu_h .

So products of all pairs of its rows cost ``T^2 d`` multiplications a head, not ``T^2 d d_h``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.func import jacrev, vmap

from ..core.layers import MHAWeights
from ..core.stacked import DeepWeights, deep
from ..examples import unit
from .products import attend

_BLOCK = 256  # rows of a matrix of products that are made at once, so that they stay in the cache
# Least second moment that is balanced, of the largest: directions that hardly any row has are
# stretched by a thousand at most, so that what rounding left in them does not become large.
_LEAST_MOMENT = 1e-6


class ScalarHeads(NamedTuple):
    """Weights of a layer with one output: each head's values are one vector ``mu``."""

    W_Q: Float[Tensor, "H d d_h"]
    W_K: Float[Tensor, "H d d_h"]
    mu: Float[Tensor, "H d"]

    def layer(self) -> MHAWeights:
        """The same layer as :class:`MHAWeights`, with values of width one."""
        ones = self.mu.new_ones(len(self.mu), 1)
        return MHAWeights(self.W_Q, self.W_K, self.mu[..., None], ones, ones[:1])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All weights, as those of :class:`~attnmem.core.stacked.DeepWeights`."""
        return tuple(self)

    def like(self, tensors: tuple[Tensor, ...]) -> ScalarHeads:
        """The same heads with other tensors."""
        return ScalarHeads(*tensors)

    def moved(self, step: ScalarHeads, size: float = 1.0) -> ScalarHeads:
        """The weights after a step of some size in a direction."""
        return ScalarHeads(*(w + size * s for w, s in zip(self, step, strict=True)))


def attended(
    W_Q: Float[Tensor, "H d d_h"],
    W_K: Float[Tensor, "H d d_h"],
    context: Float[Tensor, "*T n d"],
    query: Float[Tensor, "T d"],
    hidden: Bool[Tensor, "T n"] | None = None,
) -> tuple[Float[Tensor, "T H n"], Float[Tensor, "T H d"]]:
    """Attention weights and attended tokens of every head; ``hidden`` ones are padding."""
    if hidden is None:
        return attend(W_Q, W_K, context, query)
    logits = torch.einsum("te,her,hdr->thd", query, W_Q, W_K) @ context.mT
    alpha = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    return alpha, alpha @ context


def scalar_outputs(
    heads: ScalarHeads, context: Float[Tensor, "*T n d"], query: Float[Tensor, "T d"]
) -> Float[Tensor, " T"]:
    """The outputs on ``T`` queries."""
    z = attend(heads.W_Q, heads.W_K, context, query)[1]
    return torch.einsum("thd,hd->t", z, heads.mu)


class Tangents(NamedTuple):
    """The derivative of ``T`` outputs, as the vectors whose products are its rows."""

    outputs: Float[Tensor, " T"]  # the outputs themselves
    attended: Float[Tensor, "H T d"]  # z_h, the derivative in mu
    pulls: Float[Tensor, "H T d"]  # c_h, the derivative in the keys W_K q
    asked: Float[Tensor, "H T d_h"]  # q_h = W_Q^T e
    keyed: Float[Tensor, "H T d_h"]  # W_K^T c_h
    query: Float[Tensor, "T d"]  # e

    def gram(self) -> Float[Tensor, "T T"]:
        """Products of all pairs of rows of the derivative: the neural tangent kernel."""
        T, e = len(self.query), self.query
        K = e.new_empty(T, T)
        # Of all heads together; e is the same for each of them.
        z, k = (x.transpose(0, 1).flatten(1) for x in (self.attended, self.keyed))
        for start in range(0, T, _BLOCK):  # products up to the diagonal, half of all pairs
            rows, columns = slice(start, start + _BLOCK), slice(start + _BLOCK)
            products = z[rows] @ z[columns].T
            products.addcmul_(e[rows] @ e[columns].T, k[rows] @ k[columns].T)
            for c, q in zip(self.pulls, self.asked, strict=True):
                products.addcmul_(c[rows] @ c[columns].T, q[rows] @ q[columns].T)
            K[rows, columns] = products
            K[columns, rows] = products.T
        return K

    def transposed(self, rows: Float[Tensor, " T"]) -> ScalarHeads:
        """The derivative's transpose, applied to one number for each example."""
        return ScalarHeads(
            torch.einsum("t,te,htk->hek", rows, self.query, self.keyed),
            torch.einsum("t,htd,htk->hdk", rows, self.pulls, self.asked),
            torch.einsum("t,htd->hd", rows, self.attended),
        )

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The derivative as one matrix for each of the weights."""
        return (
            torch.einsum("te,htk->thek", self.query, self.keyed).flatten(1),
            torch.einsum("htd,htk->thdk", self.pulls, self.asked).flatten(1),
            self.attended.transpose(0, 1).flatten(1),
        )


def tangents(
    heads: ScalarHeads,
    context: Float[Tensor, "*T n d"],
    query: Float[Tensor, "T d"],
    hidden: Bool[Tensor, "T n"] | None = None,
    base: Float[Tensor, "T_or_one d"] | None = None,
) -> Tangents:
    """The derivative of :func:`scalar_outputs` in the weights, and the outputs.

    ``hidden`` tokens are padding. ``base`` is a vector of each context that values see added to all
    of its tokens. The derivation stands in the chapter on the capacity of one layer.
    """
    alpha, z = attended(heads.W_Q, heads.W_K, context, query, hidden)
    if hidden is None:
        values = torch.einsum("...nd,hd->...hn", context, heads.mu)
        outputs = torch.einsum("bhd,hd->bh", z, heads.mu)
    else:  # each head by itself, so that equal ones cancel to the last digit
        values, outputs = heads.mu @ context.mT, (z * heads.mu).sum(-1)
    # The covariance of the tokens under the attention, times the values.
    pulls = ((alpha * (values - outputs[..., None])) @ context).transpose(0, 1)
    asked, keyed = query @ heads.W_Q, pulls @ heads.W_K
    if base is not None:
        z = z + base[:, None]
        outputs = torch.einsum("bhd,hd->bh", z, heads.mu)
    return Tangents(outputs.sum(-1), z.transpose(0, 1), pulls, asked, keyed, query)


def solved(factor: Float[Tensor, "T T"], rows: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Solve ``K x = rows`` by the lower Cholesky factor of ``K``, such as :meth:`Tangents.gram`."""
    # torch.cholesky_solve takes ten times as long, since it copies K.
    half = torch.linalg.solve_triangular(factor, rows[:, None], upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)[:, 0]


class DeepTangents(NamedTuple):
    """The derivative of a network's output on ``T`` examples, as one matrix."""

    outputs: Float[Tensor, " T"]
    rows: Float[Tensor, "T P"]  # one column for each weight
    weights: DeepWeights

    def gram(self) -> Float[Tensor, "T T"]:
        """Products of all pairs of rows."""
        return self.rows @ self.rows.T

    def transposed(self, rows: Float[Tensor, " T"]) -> DeepWeights:
        """The derivative's transpose, applied to one number for each example."""
        tensors = self.weights.tensors
        flat = (rows @ self.rows).split([W.numel() for W in tensors])
        return self.weights.like(tuple(x.view_as(W) for x, W in zip(flat, tensors, strict=True)))


def deep_tangents(weights: DeepWeights, tokens: Float[Tensor, "T n d"]) -> DeepTangents:
    """The derivative in all weights, and the outputs, with skip connections and one output."""
    return DeepTangents(deep(weights, tokens)[:, 0], jacobian(weights, tokens), weights)


def jacobian(
    weights: DeepWeights, tokens: Float[Tensor, "T n d"], *, skip: bool = True, causal: bool = False
) -> Float[Tensor, "To P"]:
    """The derivative of all outputs of all examples in all weights, a row for each output."""

    def outputs(tensors, x):
        return deep(weights.like(tensors), x, skip=skip, causal=causal)

    derivatives = vmap(jacrev(outputs), (None, 0))(weights.tensors, tokens)
    return torch.cat([J.flatten(0, 1).flatten(1) for J in derivatives], 1)


def named(weights: tuple) -> dict[str, Tensor]:
    """All weights of one layer or of several, by the names that errors have for them."""
    if not isinstance(weights, DeepWeights):
        return {f"weights.{name}": W for name, W in weights._asdict().items()}
    tensors = {}
    for i, layer in enumerate(weights.layers):
        for name, W in layer._asdict().items():
            tensors[f"weights.layers[{i}].{name}"] = W
    return tensors | {"weights.W_D": weights.W_D}


# --- coordinates ----------------------------------------------------------------------------------


class Coordinates(NamedTuple):
    """A linear change of tokens and queries: matrices that are multiplied from the right."""

    tokens: Float[Tensor, "d d"]
    queries: Float[Tensor, "d d"]

    @classmethod
    def balancing(
        cls, contexts: Float[Tensor, "*T n d"], queries: Float[Tensor, "T d"]
    ) -> Coordinates:
        """Those of second moments one; of own contexts about the mean, as attention sees them."""
        tokens = balancing_map(contexts.flatten(0, -2), centred=contexts.ndim == 3)
        return cls(tokens, balancing_map(queries))

    def outward(self, heads: ScalarHeads) -> ScalarHeads:
        """Weights on the data that compute what ``heads`` compute on the changed data."""
        W_Q, W_K = self.queries @ heads.W_Q, self.tokens @ heads.W_K
        return ScalarHeads(W_Q, W_K, heads.mu @ self.tokens.mT)


def balancing_map(rows: Float[Tensor, "N d"], centred: bool = False) -> Float[Tensor, "d d"]:
    """A symmetric matrix after which rows have second moments of one, but where hardly any are."""
    size = unit(rows)
    rows = rows / size
    if centred:
        rows = rows - rows.mean(0)
    moments, axes = torch.linalg.eigh(rows.T @ rows / len(rows))
    least = _LEAST_MOMENT * float(moments[-1])
    return (axes / moments.clamp(min=least).sqrt()) @ axes.T / size
