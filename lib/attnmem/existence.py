r"""Proofs that exact weights exist near stored ones, in ball arithmetic.

The outputs of a layer depend on its weights through softmaxes, so no linear system gives weights
that meet labels exactly. The theorem of Newton and Kantorovich in Krawczyk's form proves that they
exist: stored weights move along as many directions as there are examples, and the outputs, as
functions of these lengths, are close to the identity in a small box around zero. It needs the extra
``certify``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .attention import MHAWeights
from .attention.tangents import ScalarHeads, tangents
from .balls import (
    FIRST_BITS,
    Ball,
    BallMatrix,
    Enclosure,
    above,
    exact,
    flint,
    precision,
    precisions,
    softmax,
)
from .certificates import check_enclosed
from .checks import check_integer, check_reals, check_size, check_tensor, checked_by, refuse


class CertifiedSolution(NamedTuple):
    """What is proven about exact weights near stored ones.

    Attributes:
        error: No output of the stored weights, computed without rounding, is further from its
            label.
        distance: Some weights meet every label exactly, and no entry of them is further than this
            from the stored one. Infinite without a proof.
        contraction: Newton's correction shrinks distances at least by this factor in the box. The
            proof needs less than one.
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


def _check_scalar(weights, contexts, queries) -> None:
    check_enclosed(weights, contexts, queries)
    check_size("weights.W_V", weights.W_V, -1, 1, "values of width one")
    check_size("weights.W_D", weights.W_D, -1, 1, "one output")


@checked_by(_check_scalar)
def enclosed_derivative(
    weights: MHAWeights, contexts: Float[Tensor, "*T n d"], queries: Float[Tensor, "T d"]
) -> Enclosure:
    """The derivative of the outputs in ``W_Q``, ``W_K`` and ``W_V``, in ball arithmetic.

    Weights and data are taken as exact. A certified rank of this matrix is a theorem about these
    data, and about almost all data of its size.

    Args:
        weights: The weights of one layer with one output and values of width one.
        contexts: Contexts, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.

    Returns:
        A function from bits to a ``flint.arb_mat`` of shape ``(T, H (2 d d_h + d))``.

    Raises:
        ValueError: As for :func:`attnmem.certificates.enclosed_features`; also if values or outputs
            are wider than one.
        ImportError: From the returned function, without the extra ``certify``.

    Source: this book, the chapter on the capacity of one layer.
    """

    def enclosure(bits: int) -> BallMatrix:
        with precision(bits):
            return _derivative(_stored(weights), contexts, queries)[1]

    return enclosure


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
        asked = (e * head.W_Q).tolist()
        keys = (e * head.W_Q * head.W_K.transpose()).tolist()
        for t, (E, query) in enumerate(zip(tokens, e.tolist(), strict=True)):
            z, c = _attended(E, keys[t], head.mu)
            outputs[t] += head.factor * (z * head.mu)[0, 0]
            pulled = (c * head.W_K).entries()
            parts = (
                [x * k for x in query for k in pulled],
                [x * q for x in c.entries() for q in asked[t]],
                z.entries(),
            )
            rows[t] += [head.factor * x for x in itertools.chain(*parts)]
    return outputs, flint().arb_mat(rows)


def _attended(E: BallMatrix, key: list[Ball], mu: BallMatrix) -> tuple[BallMatrix, BallMatrix]:
    """The attended token ``z`` and the covariance of the tokens times the values, as rows."""
    logits = (E * flint().arb_mat(len(key), 1, key)).entries()
    alpha = softmax(logits)
    values = (E * mu).entries()
    mean = sum((a * s for a, s in zip(alpha, values, strict=True)), flint().arb(0))
    pulls = [a * (s - mean) for a, s in zip(alpha, values, strict=True)]
    z, c = (flint().arb_mat(1, len(row), row) * E for row in (alpha, pulls))
    return z, c


# --- exact weights --------------------------------------------------------------------------------


def _check_solution(weights, contexts, queries, labels, most_bits) -> None:
    _check_scalar(weights, contexts, queries)
    check_tensor("labels", labels, "(T,) or (T, 1)", (1, 2))
    check_reals("labels", labels)
    check_size("labels", labels, 0, len(queries), "the number of queries")
    if labels.ndim == 2:
        check_size("labels", labels, 1, 1, "one output")
    if not (weights.W_O.flatten() @ weights.W_O.flatten()) * weights.W_D.abs().max() > 0:
        refuse("weights.W_O", "zeros only", "an output that depends on the values")
    check_integer("most_bits", most_bits, least=FIRST_BITS)


@checked_by(_check_solution)
def certified_solution(
    weights: MHAWeights,
    contexts: Float[Tensor, "*T n d"],
    queries: Float[Tensor, "T d"],
    labels: Float[Tensor, "T *d_out"],
    *,
    most_bits: int = 512,
) -> CertifiedSolution:
    """Prove that weights near the stored ones meet every label exactly.

    The weights move by ``B u`` with ``u`` of as many entries as there are examples, and ``B`` an
    approximate right inverse of the derivative. Let ``G(u)`` be the outputs less the labels. If
    ``|G(0)| + q rho < rho`` in the largest-entry norm, where ``q`` bounds ``I - G'`` on the box of
    radius ``rho`` (enclosed in balls), then the map ``u - G(u)`` sends the box into itself and
    shrinks distances, so ``G`` has a zero there.

    Args:
        weights: The weights of one layer with one output and values of width one. They meet the
            labels nearly, and their derivative has full row rank.
        contexts: Contexts, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        labels: One real label for each query.
        most_bits: The largest precision, at least 128 bits.

    Returns:
        What is proven.

    Raises:
        ValueError: If sizes or types do not fit, or an entry is not finite.
        ImportError: Without the extra ``certify``.

    Example:
        >>> from attnmem.constructions import memorize_by_difference
        >>> E, e, y = torch.rand(6, 3, 2), torch.rand(6, 2), torch.rand(6)
        >>> weights = memorize_by_difference(E, e, y, heads=2, head_dim=2, seed=0)
        >>> certified_solution(weights, E, e, y).proven
        True

    Source: this book, the chapter on the capacity of one layer; R. Krawczyk, Computing 4 (1969).
    """
    contexts, queries, labels = (x.to(torch.float64) for x in (contexts, queries, labels))
    weights = MHAWeights(*(w.to(torch.float64) for w in weights))  # exact, too
    guess = _right_inverse(weights, contexts, queries)
    error = contraction = math.inf
    for bits in precisions(most_bits):
        with precision(bits):
            heads = _stored(weights)
            outputs, J = _derivative(heads, contexts, queries)
            wanted = exact(labels.reshape(-1, 1)).entries()
            misses = [(f - y).abs_upper() for f, y in zip(outputs, wanted, strict=True)]
            error = max(above(miss) for miss in misses)
            B = _refined(J, exact(guess))
            if B is None:
                continue
            reach = [_sum(row) * (1 + 1e-9) for row in B.tolist()]  # in a box of radius one
            radius = 2 * error + 2.0 ** (-bits // 2)
            _, near = _derivative(_boxed(heads, [radius * r for r in reach]), contexts, queries)
            contraction = _distance_from_identity(near * B)
            if error + contraction * radius < radius * (1 - 1e-9):
                distance = math.nextafter(radius * max(reach), math.inf)
                return CertifiedSolution(error, distance, contraction, bits)
    return CertifiedSolution(error, math.inf, contraction, bits)


def _refined(J: BallMatrix, B: BallMatrix) -> BallMatrix | None:
    """``B`` times an approximate inverse of ``J B``; None if that may be singular."""
    try:
        return (B * (J * B).inv().mid()).mid()
    except ZeroDivisionError:  # flint raises it if the ball contains a singular matrix
        return None


def _right_inverse(weights: MHAWeights, contexts: Tensor, queries: Tensor) -> Tensor:
    """A float64 matrix ``B``, one column an example, with ``J B`` near the identity."""
    factor = (weights.W_O @ weights.W_D).double()
    H = len(factor)
    scaled = ScalarHeads(weights.W_Q, weights.W_K, weights.W_V[..., 0] * factor)
    # Steps are measured relative to the size of each kind of weights.
    sizes = [float(w.square().mean().sqrt()) or 1.0 for w in scaled]
    parts = zip(tangents(scaled, contexts, queries).parts(), sizes, strict=True)
    Q, K, V = ((part * size).unflatten(1, (H, -1)) for part, size in parts)
    J = torch.cat([Q, K, V], dim=-1).flatten(1)  # head by head
    steps = torch.linalg.pinv(J, rtol=1e-14).unflatten(0, (H, -1))
    counts = [w[0].numel() for w in scaled]
    kinds = zip(steps.split_with_sizes(counts, dim=1), sizes, strict=True)
    W_Q, W_K, mu = (step * size for step, size in kinds)
    W_V = mu / factor.where(factor != 0, torch.ones(())).unsqueeze(-1)  # an idle head does not move
    return torch.cat([W_Q, W_K, W_V], dim=1).flatten(0, 1)


def _boxed(heads: list[_Head], radii: list[float]) -> list[_Head]:
    """The weights as balls with these radii, in the order of the derivative's columns."""
    each = iter(radii)
    return [_Head(*(_widened(w, each) for w in head[:3]), head.factor) for head in heads]


def _widened(matrix: BallMatrix, radii: Iterator[float]) -> BallMatrix:
    arb = flint().arb
    balls = [x + arb(0, math.nextafter(next(radii), math.inf)) for x in matrix.entries()]
    return flint().arb_mat(matrix.nrows(), matrix.ncols(), balls)


def _distance_from_identity(matrix: BallMatrix) -> float:
    """An upper bound of the largest row sum of ``|I - M|``."""
    rows = matrix.tolist()
    for i, row in enumerate(rows):
        row[i] -= 1
    return max(_sum(row) for row in rows)


def _sum(row: list[Ball]) -> float:
    """An upper bound of the sum of the absolute values."""
    return above(sum((x.abs_upper() for x in row), flint().arb(0)).upper())
