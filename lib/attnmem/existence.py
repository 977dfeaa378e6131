"""Proofs that exact weights exist near stored ones, in ball arithmetic.

The outputs of a layer depend on its weights through softmaxes, so no linear system gives weights
that meet labels exactly. The theorem of Newton and Kantorovich in Krawczyk's form proves that they
exist: stored weights move along as many directions as there are examples, and the outputs, as
functions of these lengths, are close to the identity in a small box around zero. The layer has one
output and values of width one. It needs python-flint.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from . import balls
from .attention import MHAWeights
from .balls import Ball, BallMatrix, Enclosure, exact, flint, precision, precisions
from .certificates import MostBits, check_enclosed
from .checks import checked, refuse
from .examples import Contexts, Labels


class CertifiedSolution(NamedTuple):
    """What is proven about exact weights near stored ones.

    Attributes:
        error: No output of the stored weights, without rounding, is further from its label.
        distance: Some weights meet every label exactly, and no entry of them is further than this
            from the stored one. Infinite without a proof.
        contraction: Newton's correction shrinks distances by this factor; below 1/2 in a proof.
        bits: The precision at which the proof was found, or the search given up.
    """

    error: float
    distance: float
    contraction: float
    bits: int

    @property
    def proven(self) -> bool:
        """Whether exact weights are proven to exist."""
        return math.isfinite(self.distance)


# --- the derivative -------------------------------------------------------------------------------


def _is_scalar(weights, contexts, queries, labels=None) -> None:
    given = {} if labels is None else {"labels": labels}
    check_enclosed(weights, contexts=contexts, queries=queries, **given)
    for name, what in (("W_V", "values of width one"), ("W_D", "one output")):
        shape = tuple(getattr(weights, name).shape)
        if shape[-1] != 1:
            refuse(f"weights.{name}", f"shape {shape}", what)
    if labels is not None and labels.numel() != len(labels):
        refuse("labels", f"shape {tuple(labels.shape)}", "one output")


@checked(also=_is_scalar)
def enclosed_derivative(
    weights: MHAWeights, contexts: Contexts, queries: Float[Tensor, "T d"]
) -> Enclosure:
    """The derivative of the outputs in ``W_Q``, ``W_K`` and ``W_V``, in ball arithmetic.

    Weights and data are taken as exact. A certified rank of this matrix, of shape ``(T, H (2 d d_h
    + d))``, is a theorem about these data, and about almost all data of its size.

    Source: this book, the chapter on the capacity of one layer.
    """
    return balls.enclosing(lambda: _derivative(_stored(weights), contexts, queries)[1])


class _Head(NamedTuple):
    """One head in balls: its maps, its values as a column, and the factor ``W_O W_D``."""

    W_Q: BallMatrix
    W_K: BallMatrix
    mu: BallMatrix
    factor: Ball


def _stored(weights: MHAWeights) -> list[_Head]:
    W_D = exact(weights.W_D)
    parts = zip(weights.W_Q, weights.W_K, weights.W_V, weights.W_O, strict=True)
    return [
        _Head(exact(Q), exact(K), exact(V), (exact(O[None]) * W_D)[0, 0]) for Q, K, V, O in parts
    ]


def _derivative(
    heads: list[_Head], contexts: Tensor, queries: Tensor
) -> tuple[list[Ball], BallMatrix]:
    """The outputs, and their derivative in all weights."""
    e = exact(queries)
    own = [exact(context) for context in contexts] if contexts.ndim == 3 else None
    tokens = own or [exact(contexts)] * len(queries)
    outputs, rows = [flint().arb(0)] * len(queries), [[] for _ in queries]
    for head in heads:
        q = (e * head.W_Q).tolist()
        keys = (e * head.W_Q * head.W_K.transpose()).tolist()
        for t, (E, query) in enumerate(zip(tokens, e.tolist(), strict=True)):
            z, c = _attended(E, keys[t], head.mu)
            outputs[t] += head.factor * (z * head.mu)[0, 0]
            pulled = (c * head.W_K).entries()
            parts = (
                [x * k for x in query for k in pulled],  # by W_Q: e (W_K^T c)^T
                [x * x_q for x in c.entries() for x_q in q[t]],  # by W_K: c (W_Q^T e)^T
                z.entries(),  # by the values
            )
            rows[t] += [head.factor * x for x in itertools.chain(*parts)]
    return outputs, flint().arb_mat(rows)


def _attended(E: BallMatrix, key: list[Ball], mu: BallMatrix) -> tuple[BallMatrix, BallMatrix]:
    """The attended token ``z`` and the covariance of the tokens times the values, as rows."""
    logits = (E * flint().arb_mat(len(key), 1, key)).entries()
    alpha = balls.softmax(logits)
    values = (E * mu).entries()
    mean = sum((a * s for a, s in zip(alpha, values, strict=True)), flint().arb(0))
    pulls = [a * (s - mean) for a, s in zip(alpha, values, strict=True)]
    z, c = (flint().arb_mat(1, len(row), row) * E for row in (alpha, pulls))
    return z, c


# --- exact weights --------------------------------------------------------------------------------


@checked(also=_is_scalar)
def certified_solution(
    weights: MHAWeights,
    contexts: Contexts,
    queries: Float[Tensor, "T d"],
    labels: Labels,
    *,
    most_bits: MostBits = 512,
) -> CertifiedSolution:
    """Prove that weights near the stored ones meet every label exactly.

    The weights move by ``B u`` with ``u`` of as many entries as there are examples, and ``B`` an
    approximate right inverse of the derivative, of least size relative to the root mean square of
    each kind of weights. Let ``G(u)`` be the outputs less the labels, and ``q`` a bound of
    ``I - G'`` in the largest-entry norm on the box of radius ``2 |G(0)|`` (enclosed in balls). If
    ``q < 1/2``, the map ``u - G(u)`` sends the box into itself and shrinks distances, so ``G`` has
    a zero there. The stored weights have to meet the labels nearly, with a derivative of full row
    rank. The precision doubles, up to ``most_bits``, until the proof is found.

    Example:
        >>> from attnmem.constructions import memorize_by_difference
        >>> E, e, y = torch.rand(6, 3, 2), torch.rand(6, 2), torch.rand(6)
        >>> weights = memorize_by_difference(E, e, y, heads=2, head_dim=2, seed=0)
        >>> certified_solution(weights, E, e, y).proven
        True

    Source: this book, the chapter on the capacity of one layer; R. Krawczyk, Computing 4 (1969).
    """
    error = contraction = math.inf
    for bits in precisions(most_bits):
        with precision(bits):
            heads = _stored(weights)
            outputs, J = _derivative(heads, contexts, queries)
            outputs = flint().arb_mat(len(outputs), 1, outputs)
            error = balls.largest(outputs - exact(labels.reshape(-1, 1)))
            B = _right_inverse(J, weights)
            # The box |u| <= 2 |G(0)|, and q >= |I - G'| there in the largest-entry norm.
            u = flint().arb_mat(len(labels), 1, [flint().arb(0, 2 * error)] * len(labels))
            steps = B * u
            _, near = _derivative(_moved(heads, steps.entries()), contexts, queries)
            sums = [[sum(map(abs, row))] for row in (near * B - 1).tolist()]
            contraction = balls.largest(flint().arb_mat(sums))
            if contraction < 0.5:
                return CertifiedSolution(error, balls.largest(steps), contraction, bits)
    return CertifiedSolution(error, math.inf, contraction, bits)


def _right_inverse(J: BallMatrix, weights: MHAWeights) -> BallMatrix:
    """Exact numbers ``B`` with ``J B`` near the identity, if the rows of ``J`` are independent."""
    # Steps are measured relative to the size of each kind of weights. Floats see rows scaled to a
    # largest entry of one, so that none of them is too large or too small.
    sizes = []
    for W in weights[:3]:
        top = W.abs().max().item()  # so that no square overflows
        size = top * (W / top).square().mean().sqrt().item() if top > 0 else 1.0
        sizes += [size] * W[0].numel()
    sizes *= len(weights.W_Q)
    rows = [[(x * s).mid() for x, s in zip(row, sizes, strict=True)] for row in J.tolist()]
    tops = [max(map(abs, row)) for row in rows]
    scaled = [[float(x / top) for x in row] for row, top in zip(rows, tops, strict=True)]
    scaled = torch.tensor(scaled, dtype=torch.float64).nan_to_num()  # of a row of zeros
    steps = zip(exact(torch.linalg.pinv(scaled, rtol=1e-14)).tolist(), sizes, strict=True)
    B = [[x * s / top for x, top in zip(row, tops, strict=True)] for row, s in steps]
    return flint().arb_mat(B).mid()


def _moved(heads: list[_Head], steps: list[Ball]) -> list[_Head]:
    """The weights after steps in the order of the derivative's columns."""
    step = iter(steps)

    def moved(W: BallMatrix) -> BallMatrix:
        return flint().arb_mat(W.nrows(), W.ncols(), [x + next(step) for x in W.entries()])

    return [_Head(*map(moved, head[:3]), head.factor) for head in heads]
