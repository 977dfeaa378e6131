"""Proofs that exact weights are near stored ones, in ball arithmetic.

The theorem of Newton and Kantorovich in Krawczyk's form: stored weights move along as many
directions as there are examples, and the outputs, as functions of these lengths, are close to the
identity in a small box around zero. So some weights in it meet every label exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..checks import checked, refuse
from ..core.layers import MHAWeights
from ..core.stacked import DeepWeights
from ..examples import Contexts, Labels, unit
from . import balls
from .balls import Ball, BallMatrix, Enclosure, MostBits, exact, flint, precision, precisions
from .certificates import can_be_enclosed

_SMALLEST = 1e-14  # singular values that the approximate inverse keeps, of the largest


class CertifiedSolution(NamedTuple):
    """What is proven about exact weights near stored ones."""

    error: float  # no output of the stored weights, without rounding, is further from its label
    distance: float  # some exact weights are entrywise as near to them; infinite without a proof
    contraction: float  # Newton's correction shrinks distances by this factor; below 1/2 in a proof
    bits: int  # the precision at which the proof was found, or the search given up

    @property
    def proven(self) -> bool:
        """Whether exact weights are proven to exist."""
        return math.isfinite(self.distance)


def _has_one_output(weights, **arguments) -> None:
    can_be_enclosed(weights, **arguments)
    if isinstance(weights, MHAWeights) and weights.W_V.shape[-1] != 1:
        refuse("weights.W_V", f"shape {tuple(weights.W_V.shape)}", "values of width one")
    if weights.W_D.shape[-1] != 1:
        refuse("weights.W_D", f"shape {tuple(weights.W_D.shape)}", "one output")
    labels = arguments.get("labels")
    if labels is not None and labels.numel() != len(labels):
        refuse("labels", f"shape {tuple(labels.shape)}", "one output")


# --- heads ----------------------------------------------------------------------------------------


class Head(NamedTuple):
    """What one head makes of queries ``X`` and tokens ``E``."""

    maps: Sequence[BallMatrix]  # W_Q, W_K, W_V, W_O
    X: BallMatrix
    E: BallMatrix
    Q: BallMatrix
    K: BallMatrix
    V: BallMatrix
    A: BallMatrix  # the attention weights


class Pulled(NamedTuple):
    """The derivative of an output in what a head is made of, given that in what it adds."""

    by_maps: list[BallMatrix]  # in W_Q, W_K, W_V, W_O
    by_inputs: list[BallMatrix]  # in Q, K, V


def forward(maps: Sequence[BallMatrix], X: BallMatrix, E: BallMatrix, causal: bool = False) -> Head:
    """One head on queries ``X`` and tokens ``E``."""
    W_Q, W_K, W_V, _ = maps
    Q, K, V = X * W_Q, E * W_K, E * W_V
    return Head(maps, X, E, Q, K, V, balls.attention(Q, K, causal))


def added(head: Head) -> BallMatrix:
    """What a head adds to its queries: ``A V W_O``."""
    return head.A * head.V * head.maps[3]


def pulled(head: Head, G: BallMatrix) -> Pulled:
    """Pull the derivative ``G`` of an output in what the head adds back through the head."""
    by_Y = G * head.maps[3].transpose()  # Y = A V
    # By the softmax, a logit's derivative is a (g - sum of a g), if g is that of its weight a.
    rows = []
    for alpha, g in zip(head.A.tolist(), (by_Y * head.V.transpose()).tolist(), strict=True):
        mean = sum(a * b for a, b in zip(alpha, g, strict=True))
        rows.append([a * (b - mean) for a, b in zip(alpha, g, strict=True)])
    by_logits = flint().arb_mat(rows)
    by_Q = by_logits * head.K
    by_K = by_logits.transpose() * head.Q
    by_V = head.A.transpose() * by_Y
    by_W_O = (head.A * head.V).transpose() * G
    X_T, E_T = head.X.transpose(), head.E.transpose()
    return Pulled([X_T * by_Q, E_T * by_K, E_T * by_V, by_W_O], [by_Q, by_K, by_V])


def row_by_maps(heads: Sequence[Sequence[BallMatrix]]) -> list[Ball]:
    """One row from a matrix for each map of each head: all first maps, then all second ones."""
    row = []
    for maps in zip(*heads, strict=True):
        for matrix in maps:
            row += matrix.entries()
    return row


# --- derivatives ----------------------------------------------------------------------------------


@checked(also=_has_one_output)
def enclosed_derivative(
    weights: MHAWeights, contexts: Contexts, queries: Float[Tensor, "T d"]
) -> Enclosure:
    """The derivative of the outputs in ``W_Q``, ``W_K`` and ``W_V``, in ball arithmetic.

    A certified rank of this matrix, of shape ``(T, H (2 d d_h + d))``, is a theorem about these
    data, and about almost all data of its size (the chapter on the capacity of one layer).
    """
    return _enclosed(_of_layer(weights, contexts, queries))


@checked(also=can_be_enclosed)
def enclosed_jacobian(
    weights: DeepWeights, tokens: Float[Tensor, "T n d"], *, skip: bool = True, causal: bool = False
) -> Enclosure:
    """The derivative of layers one after the other, in all weights, in ball arithmetic.

    Rows and columns are those of :func:`attnmem.theory.tangents.jacobian`.
    """
    return _enclosed(_of_network(weights, tokens, skip, causal))


class _Stored(NamedTuple):
    """Stored matrices that move, and the outputs with their derivative as a function of them."""

    matrices: list[Tensor]
    sizes: list[float]  # of each matrix, the size of the weights of its kind
    derivative: Callable[[list[BallMatrix]], tuple[list[Ball], BallMatrix]]


def _enclosed(stored: _Stored) -> Enclosure:
    return balls.enclosing(lambda: stored.derivative([exact(W) for W in stored.matrices])[1])


def _size(weights: Tensor) -> float:
    """The root mean square; one, if all are zero."""
    largest = unit(weights)  # so that no square overflows
    size = float(largest * (weights / largest).square().mean().sqrt())
    return size if size > 0 else 1.0


def contexts_of(contexts: Contexts, queries: Tensor) -> list[BallMatrix]:
    """The context of each example, whether it has its own or shares one."""
    if contexts.ndim == 2:
        return [exact(contexts)] * len(queries)
    return [exact(E) for E in contexts]


def _of_layer(weights: MHAWeights, contexts: Tensor, queries: Tensor) -> _Stored:
    """Of a layer with values of width one and one output, whose ``W_O`` and ``W_D`` stay."""
    H = len(weights.W_Q)

    def derivative(matrices: list[BallMatrix]) -> tuple[list[Ball], BallMatrix]:
        W_Q, W_K, W_V = matrices[:H], matrices[H : 2 * H], matrices[2 * H :]
        W_O, W_D = [exact(W[None]) for W in weights.W_O], exact(weights.W_D)
        maps = [*zip(W_Q, W_K, W_V, W_O, strict=True)]
        outputs, rows = [], []
        for E, x in zip(contexts_of(contexts, queries), queries, strict=True):
            heads = [forward(maps_h, exact(x[None]), E) for maps_h in maps]
            outputs.append(sum((added(head) * W_D)[0, 0] for head in heads))
            G = W_D.transpose()
            rows.append(row_by_maps([pulled(head, G).by_maps[:3] for head in heads]))
        return outputs, flint().arb_mat(rows)

    matrices, sizes = [], []
    for maps in (weights.W_Q, weights.W_K, weights.W_V):
        matrices += [*maps]
        sizes += [_size(maps)] * H
    return _Stored(matrices, sizes, derivative)


def _of_network(weights: DeepWeights, tokens: Tensor, skip: bool, causal: bool = False) -> _Stored:
    """Of layers one after the other, all weights in the order of ``weights.tensors``."""

    def derivative(matrices: list[BallMatrix]) -> tuple[list[Ball], BallMatrix]:
        remaining, layers = iter(matrices), []
        for layer in weights.layers:
            maps = [[next(remaining) for _ in range(len(W))] for W in layer]
            layers.append([*zip(*maps, strict=True)])  # W_Q, W_K, W_V, W_O of each head
        W_D = next(remaining)
        outputs, rows = [], []
        for x in tokens:
            X, heads = _through(layers, exact(x), skip, causal)
            outputs += (X * W_D).tolist()[-1]
            rows += [_back(heads, X, W_D, output, skip) for output in range(W_D.ncols())]
        return outputs, flint().arb_mat(rows)

    matrices, sizes = [], []
    for W in weights.tensors:
        maps = W.reshape(-1, *W.shape[-2:])
        matrices += [*maps]
        sizes += [_size(maps)] * len(maps)
    return _Stored(matrices, sizes, derivative)


def _through(
    layers: list[list[Sequence[BallMatrix]]], X: BallMatrix, skip: bool, causal: bool
) -> tuple[BallMatrix, list[list[Head]]]:
    """The last tokens of an example, and the heads of each layer on what they met."""
    heads = []
    for layer in layers:
        heads.append([forward(maps, X, X, causal) for maps in layer])
        X = sum((added(head) for head in heads[-1]), X if skip else 0 * X)
    return X, heads


def _back(
    heads: list[list[Head]], X: BallMatrix, W_D: BallMatrix, output: int, skip: bool
) -> list[Ball]:
    """The derivative of one output at the last token in all weights, layer by layer."""
    last = X.nrows() - 1
    # G is the derivative in the tokens X behind the last layer, then in those before each layer.
    G, by_W_D = 0 * X, flint().arb_mat(W_D.nrows(), W_D.ncols())
    for j in range(X.ncols()):
        G[last, j] = W_D[j, output]
        by_W_D[j, output] = X[last, j]
    row = by_W_D.entries()
    for layer in reversed(heads):
        pulls = [pulled(head, G) for head in layer]
        row = row_by_maps([pull.by_maps for pull in pulls]) + row
        if not skip:
            G = 0 * G
        for head, pull in zip(layer, pulls, strict=True):
            for by_input, W in zip(pull.by_inputs, head.maps[:3], strict=True):
                G = G + by_input * W.transpose()
    return row


# --- exact weights --------------------------------------------------------------------------------


@checked(also=_has_one_output)
def certified_solution(
    weights: MHAWeights,
    contexts: Contexts,
    queries: Float[Tensor, "T d"],
    labels: Labels,
    *,
    most_bits: MostBits = 512,
) -> CertifiedSolution:
    """Prove that weights near the stored ones meet every label exactly.

    The weights move by ``B u`` with one entry of ``u`` for each example, and ``B`` an approximate
    right inverse of the derivative, of least size relative to the root mean square of each kind of
    weights. Let ``G(u)`` be the outputs less the labels, and ``q`` a bound of ``I - G'`` in the
    largest-entry norm on the box of radius ``2 |G(0)|``. If ``q < 1/2``, the map ``u - G(u)`` sends
    the box into itself and shrinks distances, so ``G`` has a zero there. The precision doubles, up
    to ``most_bits``, until the proof is found.

    Example:
        >>> from attnmem.theory.cancelling import memorize_by_difference
        >>> E, e, y = torch.rand(6, 3, 2), torch.rand(6, 2), torch.rand(6)
        >>> weights = memorize_by_difference(E, e, y, heads=2, head_dim=2, seed=0)
        >>> certified_solution(weights, E, e, y).proven
        True

    Source: this book, the chapter on the capacity of one layer; R. Krawczyk, Computing 4 (1969).
    """
    return _near_stored(_of_layer(weights, contexts, queries), labels, most_bits)


@checked(also=_has_one_output)
def certified_deep_solution(
    weights: DeepWeights,
    tokens: Float[Tensor, "T n d"],
    labels: Float[Tensor, " T"],
    *,
    skip: bool = True,
    most_bits: MostBits = 512,
) -> CertifiedSolution:
    """Prove that weights near those of layers one after the other meet every label exactly.

    All weights move, and the proof is that of :func:`certified_solution`; the book has it in the
    chapter on weights of several layers.
    """
    return _near_stored(_of_network(weights, tokens, skip), labels, most_bits)


def _near_stored(stored: _Stored, labels: Tensor, most_bits: int) -> CertifiedSolution:
    T = len(labels)
    error = contraction = math.inf
    for bits in precisions(most_bits):
        with precision(bits):
            matrices = [exact(W) for W in stored.matrices]
            outputs, J = stored.derivative(matrices)
            error = balls.largest(flint().arb_mat(T, 1, outputs) - exact(labels.reshape(-1, 1)))
            B = _right_inverse(J, stored)
            # The box |u| <= 2 |G(0)|, and q >= |I - G'| there in the largest-entry norm.
            u = flint().arb_mat(T, 1, [flint().arb(0, 2 * error)] * T)
            steps = B * u
            remaining = iter(steps.entries())
            box = [_moved(W, remaining) for W in matrices]
            difference = stored.derivative(box)[1] * B - 1
            contraction = max(balls.above(sum(map(abs, row))) for row in difference.tolist())
            if contraction < 0.5:
                return CertifiedSolution(error, balls.largest(steps), contraction, bits)
    return CertifiedSolution(error, math.inf, contraction, bits)


def _moved(W: BallMatrix, steps: Iterator[Ball]) -> BallMatrix:
    """The matrix after the next steps, one for each entry."""
    return flint().arb_mat(W.nrows(), W.ncols(), [x + next(steps) for x in W.entries()])


def _right_inverse(J: BallMatrix, stored: _Stored) -> BallMatrix:
    """Exact numbers ``B`` with ``J B`` near the identity, if the rows of ``J`` are independent."""
    # With the sizes S of the weights, B = S (J S)^+ has the least size relative to them. Floats see
    # rows of J S divided by their largest entries, so that none is too large or too small.
    sizes = []
    for W, size in zip(stored.matrices, stored.sizes, strict=True):
        sizes += [size] * W.numel()
    rows = [[(x * size).mid() for x, size in zip(row, sizes, strict=True)] for row in J.tolist()]
    largest = [max(map(abs, row)) for row in rows]
    scaled = [[float(x / top) for x in row] for row, top in zip(rows, largest, strict=True)]
    scaled = torch.tensor(scaled, dtype=torch.float64).nan_to_num()  # of a row of zeros
    inverse = exact(torch.linalg.pinv(scaled, rtol=_SMALLEST)).tolist()
    B = []
    for row, size in zip(inverse, sizes, strict=True):
        B.append([x * size / top for x, top in zip(row, largest, strict=True)])
    return flint().arb_mat(B).mid()
