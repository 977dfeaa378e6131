"""Proofs that a layer memorizes: its features and its outputs in ball arithmetic.

A float64 run shows that an output equals its label *up to rounding errors that nobody bounded*.
Here every operation, the softmax included, carries its error, so that what comes out is a theorem
about the stored weights. Needs the extra ``certify``. Layer: Mahdavi et al. 2024, Sec. 3.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import scipy.linalg
from jaxtyping import Float
from torch import Tensor

from .attention import MHAWeights, check_features, mha_features
from .balls import BallMatrix, above, exact, flint, largest, precision, softmax
from .checks import check_finite, check_floats, check_integer, check_size, check_tensor, checked_by
from .independence.certified import FIRST_BITS, Enclosure


class CertifiedMemorization(NamedTuple):
    """What is proven about stored weights and their labels.

    ``error``: no output of the stored weights, computed without rounding, is further from its
    label. ``rank``: the features have at least this rank; it is the number of examples if the
    proof succeeded and 0 if not. ``shift``: some read-out, no entry of which is further than this
    from the stored one, gives every label exactly. ``radius``: of the balls around the outputs of
    that read-out, each of which contains its label. The last two are infinite without a proof.
    ``bits``: the precision at which it was found, or given up.
    """

    error: float
    rank: int
    shift: float
    radius: float
    bits: int


def _check_enclosed(weights, contexts, queries) -> None:
    check_features(weights, contexts, queries)
    check_tensor("queries", queries, "(T, d)", 2)
    for name, tensor in (("contexts", contexts), ("queries", queries)):
        check_finite(name, tensor)


@checked_by(_check_enclosed)
def enclosed_features(
    weights: MHAWeights, contexts: Float[Tensor, "*T n d"], queries: Float[Tensor, "T d"]
) -> Enclosure:
    """``Z`` in ball arithmetic: a function from bits to an ``arb_mat`` of shape (T, H d).

    Weights and data are taken as exact; the balls contain the entries of
    :func:`attnmem.attention.mha_features` as they would be without rounding.
    """
    enclose = _shared_features if contexts.ndim == 2 else _own_features

    def enclosure(bits: int) -> BallMatrix:
        with precision(bits):
            return enclose(weights, contexts, queries)

    return enclosure


def _shared_features(weights: MHAWeights, context: Tensor, queries: Tensor) -> BallMatrix:
    e, E = exact(queries), exact(context)
    heads = []
    for W_Q, W_K in zip(weights.W_Q, weights.W_K, strict=True):
        logits = e * (exact(W_Q) * (E * exact(W_K)).transpose())
        alpha = flint().arb_mat([softmax(row) for row in logits.tolist()])
        heads.append((alpha * E).tolist())
    return flint().arb_mat([[*itertools.chain(*rows)] for rows in zip(*heads, strict=True)])


def _own_features(weights: MHAWeights, contexts: Tensor, queries: Tensor) -> BallMatrix:
    e = exact(queries)
    asked = [
        (e * (exact(W_Q) * exact(W_K).transpose())).tolist()
        for W_Q, W_K in zip(weights.W_Q, weights.W_K, strict=True)
    ]
    rows = []
    for context, keys in zip(contexts, zip(*asked, strict=True), strict=True):
        E = exact(context)
        logits = flint().arb_mat(list(keys)) * E.transpose()
        alpha = flint().arb_mat([softmax(row) for row in logits.tolist()])
        rows.append((alpha * E).entries())
    return flint().arb_mat(rows)


def _check_memorization(weights, contexts, queries, labels, skip, most_bits) -> None:
    _check_enclosed(weights, contexts, queries)
    check_tensor("labels", labels, "(T, d_out)", 2)
    check_floats("labels", labels)
    check_finite("labels", labels)
    check_size("labels", labels, 0, len(queries), "the number of queries")
    check_size("labels", labels, 1, weights.W_D.shape[-1], "d_out of weights.W_D")
    if skip:
        check_size("weights.W_O", weights.W_O, -1, queries.shape[-1], "d, which a skip adds to d_o")
    check_integer("most_bits", most_bits, least=FIRST_BITS)


@checked_by(_check_memorization)
def certified_memorization(
    weights: MHAWeights,
    contexts: Float[Tensor, "*T n d"],
    queries: Float[Tensor, "T d"],
    labels: Float[Tensor, "T d_out"],
    *,
    skip: bool = False,
    most_bits: int = 1024,
) -> CertifiedMemorization:
    r"""Prove how far the stored weights are from their labels, and that exact ones are near.

    With ``M`` the stored read-out, ``M_h = W_V W_O W_D`` of each head, the residual ``y - Z M`` is
    enclosed; its size is the proven error. As many columns of ``Z`` as there are examples, chosen
    by pivoting, form a square matrix ``S``; solving ``S x = y - Z M`` in balls proves that ``S``
    is invertible, hence the rank, and encloses a correction after which every output IS its label.
    The precision doubles up to ``most_bits`` until the solution is found.

    Errors as for :func:`attnmem.attention.mha`. Source: Mahdavi et al. 2024, Theorem 1.
    """
    enclosure = enclosed_features(weights, contexts, queries)
    columns = _pivots(mha_features(weights, contexts.double(), queries.double()))
    bits = FIRST_BITS
    while True:
        with precision(bits):
            Z = enclosure(bits)
            M = _stored_read_out(weights)
            y = exact(labels) - exact(queries) * exact(weights.W_D) if skip else exact(labels)
            residual = y - Z * M
            correction = _solved(Z, columns, residual)
            if correction is not None:
                outputs = Z * (M + correction)
                radius = max(above(entry.rad()) for entry in outputs.entries())
                reached = outputs.contains(y) and math.isfinite(radius)
                if not reached:
                    correction = None
        error = largest(residual)
        if correction is not None:
            return CertifiedMemorization(error, len(labels), largest(correction), radius, bits)
        if 2 * bits > most_bits:
            return CertifiedMemorization(error, 0, math.inf, math.inf, bits)
        bits *= 2


def _pivots(Z: Tensor) -> list[int]:
    """The columns of a well-conditioned square part; too few if ``Z`` has too few."""
    order = scipy.linalg.qr(Z.detach().cpu().numpy(), mode="r", pivoting=True)[1]
    return np.sort(order[: len(Z)]).tolist()


def _stored_read_out(weights: MHAWeights) -> BallMatrix:
    W_D = exact(weights.W_D)
    W_O = weights.W_O.unflatten(0, (len(weights.W_V), -1))
    heads = (exact(V) * exact(O) * W_D for V, O in zip(weights.W_V, W_O, strict=True))
    return flint().arb_mat([row for head in heads for row in head.tolist()])


def _solved(Z: BallMatrix, columns: list[int], residual: BallMatrix) -> BallMatrix | None:
    """A ball around a correction of the read-out, zero outside ``columns``; None if not proven."""
    if len(columns) < Z.nrows():
        return None
    square = flint().arb_mat([[row[j] for j in columns] for row in Z.tolist()])
    try:
        solution = square.solve(residual)
    except ZeroDivisionError:  # flint's way to say that the ball contains a singular matrix
        return None
    whole = flint().arb_mat(Z.ncols(), residual.ncols())
    for j, row in zip(columns, solution.tolist(), strict=True):
        for k, entry in enumerate(row):
            whole[j, k] = entry
    return whole
