"""Proofs that a layer memorizes: its features and its outputs in ball arithmetic.

A computation in float64 shows that an output equals its label up to rounding errors, of which
nothing is known. Here every operation, the softmax included, carries a bound of its error, so that
the result is a theorem about the stored weights. Weights, of one layer, and data are finite and
taken as exact. It needs python-flint.

The layers are those of Mahdavi et al. 2024, Section 3, and Dana et al. 2025, equations (1) and (2).
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, NamedTuple

import numpy as np
import scipy
from jaxtyping import Float, Int
from torch import Tensor

from . import balls
from .attention import AoTWeights, MHAWeights, check_skip, mha_features
from .balls import Ball, BallMatrix, Enclosure, exact, flint, precision, precisions
from .checks import Range, check_tokens, checked, refuse
from .examples import Contexts, Sequences, check_data

MostBits = Annotated[int, Range(balls.FIRST_BITS)]


class CertifiedMemorization(NamedTuple):
    """What is proven about stored weights and their labels.

    Attributes:
        error: No output of the stored weights, without rounding, is further from its label.
        rank: The features have at least this rank: the number of examples, or 0 without a proof.
        shift: Some read-out gives every label exactly, and no entry of it is further than this from
            the stored one. Infinite without a proof.
        radius: Largest radius of the balls around the outputs of that read-out, each of which
            contains its label. Infinite without a proof.
        bits: The precision at which the proof was found, or the search given up.
    """

    error: float
    rank: int
    shift: float
    radius: float
    bits: int


def check_enclosed(weights, **data) -> None:
    """Accept one layer without run axes, and data, all of them finite and not empty."""
    if weights.W_Q.ndim > 3:
        refuse("weights.W_Q", f"shape {tuple(weights.W_Q.shape)}", "three axes, of one layer")
    check_data(**{f"weights.{name}": W for name, W in weights._asdict().items()}, **data)


@checked(also=check_enclosed)
def enclosed_features(
    weights: MHAWeights, contexts: Contexts, queries: Float[Tensor, "T d"]
) -> Enclosure:
    """The features ``Z`` in ball arithmetic, as a function from bits to a ``(T, H d)`` ``arb_mat``.

    The balls contain the entries of :func:`attnmem.attention.mha_features` without rounding.
    """

    def features() -> BallMatrix:
        e = exact(queries)
        maps = [(exact(Q), exact(K)) for Q, K in zip(weights.W_Q, weights.W_K, strict=True)]
        if contexts.ndim == 3:
            products = [W_Q * W_K.transpose() for W_Q, W_K in maps]
            return _attended(products, [exact(context) for context in contexts], e)
        E = exact(contexts)
        logits = [e * (W_Q * (E * W_K).transpose()) for W_Q, W_K in maps]
        return _side_by_side([(_softmax_rows(rows) * E).tolist() for rows in logits])

    return balls.enclosing(features)


def _attended(products: list[BallMatrix], contexts: list[BallMatrix], e: BallMatrix) -> BallMatrix:
    """All heads' attended tokens, given each head's ``W_Q W_K^T``."""
    keys_of_heads = [(e * product).tolist() for product in products]
    rows = []
    for E, keys in zip(contexts, zip(*keys_of_heads, strict=True), strict=True):
        logits = flint().arb_mat(list(keys)) * E.transpose()
        rows.append((_softmax_rows(logits) * E).entries())
    return flint().arb_mat(rows)


def _side_by_side(blocks: list[list[list[Ball]]]) -> BallMatrix:
    return flint().arb_mat([[*itertools.chain(*rows)] for rows in zip(*blocks, strict=True)])


def _softmax_rows(logits: BallMatrix) -> BallMatrix:
    return flint().arb_mat([balls.softmax(row) for row in logits.tolist()])


def _has_labels(weights, contexts, queries, labels, skip) -> None:
    check_enclosed(weights, contexts=contexts, queries=queries, labels=labels)
    if skip:
        check_skip(weights, queries)


@checked(also=_has_labels)
def certified_memorization(
    weights: MHAWeights,
    contexts: Contexts,
    queries: Float[Tensor, "T d"],
    labels: Float[Tensor, "T d_out"],
    *,
    skip: bool = False,
    most_bits: MostBits = 1024,
) -> CertifiedMemorization:
    """Prove how far the stored weights are from their labels, and that exact ones are near.

    Let ``M`` be the stored read-out, ``M_h = W_V W_O W_D`` for each head. The residual ``y - Z M``
    is enclosed, and its size is the proven error. As many columns of ``Z`` as there are examples,
    chosen by pivoting, form a square matrix ``S``. Solving ``S x = y - Z M`` in balls proves that
    ``S`` is invertible, hence the rank, and encloses a correction after which every output is
    exactly its label. The precision doubles, up to ``most_bits``, until the solution is found.

    Example:
        >>> import torch
        >>> from attnmem.constructions import memorize_mha
        >>> E, e, y = torch.eye(5)[:3], torch.eye(5), torch.arange(5.0)[:, None]
        >>> weights = memorize_mha(E, e, y, heads=2, head_dim=3, seed=0)
        >>> certified_memorization(weights, E, e, y).rank
        5

    Source: Mahdavi et al. 2024, Theorem 1.
    """
    enclosure, H = enclosed_features(weights, contexts, queries), len(weights.W_V)
    # The columns of a well-conditioned square part; too few if Z has too few.
    rounded = mha_features(weights, contexts.double(), queries.double()).detach().cpu()
    order = scipy.linalg.qr(rounded.nan_to_num().numpy(), mode="r", pivoting=True)[1]
    columns = np.sort(order[: len(rounded)]).tolist()
    for bits in precisions(most_bits):
        with precision(bits):
            Z = enclosure(bits)
            heads = zip(weights.W_V, weights.W_O.unflatten(0, (H, -1)), strict=True)
            products = (exact(W_V) * exact(W_O) * exact(weights.W_D) for W_V, W_O in heads)
            M = flint().arb_mat([row for product in products for row in product.tolist()])
            y = exact(labels) - exact(queries) * exact(weights.W_D) if skip else exact(labels)
            residual = y - Z * M
            error = balls.largest(residual)
            correction = _solved(Z, columns, residual)
            if correction is None:
                continue
            outputs = Z * (M + correction)
            radius = max(balls.above(entry.rad()) for entry in outputs.entries())
            if outputs.contains(y) and math.isfinite(radius):
                return CertifiedMemorization(
                    error, len(labels), balls.largest(correction), radius, bits
                )
    return CertifiedMemorization(error, 0, math.inf, math.inf, bits)


def _solved(Z: BallMatrix, columns: list[int], residual: BallMatrix) -> BallMatrix | None:
    """A ball around a correction of the read-out, zero outside ``columns``; None if not proven."""
    if len(columns) < Z.nrows():
        return None
    square = flint().arb_mat([[row[j] for j in columns] for row in Z.tolist()])
    try:
        solution = square.solve(residual)
    except ZeroDivisionError:  # flint raises it if the ball contains a singular matrix
        return None
    whole = flint().arb_mat(Z.ncols(), residual.ncols())
    for j, row in zip(columns, solution.tolist(), strict=True):
        for k, entry in enumerate(row):
            whole[j, k] = entry
    return whole


# --- attention-only transformers ------------------------------------------------------------------


class CertifiedAssociations(NamedTuple):
    """What is proven about the next tokens that stored weights predict.

    Attributes:
        memorized: For so many sequences the right token has the largest logit, without rounding.
        margin: On each of these its logit is larger by at least this much. Zero if there are none,
            infinite if there is no other token.
    """

    memorized: int
    margin: float


def _are_sequences(weights, sequences, next_tokens=None) -> None:
    check_enclosed(weights, sequences=sequences)
    for name, tokens in (("sequences", sequences), ("next_tokens", next_tokens)):
        if tokens is not None:
            check_tokens(name, tokens, len(weights.embedding))


@checked(also=_are_sequences)
def enclosed_offers(weights: AoTWeights, sequences: Sequences) -> Enclosure:
    """The matrix ``F`` in ball arithmetic (see ``attnmem.constructions.dana.offered``).

    Source: Dana et al. 2025, proof of Theorem 1.
    """
    return balls.enclosing(lambda: _offers(weights, sequences))


def _offers(weights: AoTWeights, sequences: Tensor) -> BallMatrix:
    positions = exact(weights.positions)
    contexts = [exact(weights.embedding[row]) + positions for row in sequences]  # x(t, s)
    last = flint().arb_mat([x.tolist()[-1] for x in contexts])  # x(t, S)
    maps = zip(weights.W_Q, weights.W_K, strict=True)
    products = [exact(W_Q).transpose() * exact(W_K) for W_Q, W_K in maps]
    A, d = _attended(products, contexts, last).tolist(), last.ncols()
    offers = [last.tolist()]
    for head, W_V in enumerate(weights.W_V):
        attended = flint().arb_mat([row[head * d : (head + 1) * d] for row in A])
        offers.append((attended * exact(W_V).transpose()).tolist())
    return _side_by_side(offers)


@checked(also=_are_sequences)
def certified_associations(
    weights: AoTWeights,
    sequences: Sequences,
    next_tokens: Int[Tensor, " T"],
    *,
    bits: Annotated[int, Range(2)] = balls.FIRST_BITS,
) -> CertifiedAssociations:
    """Prove that the right token has the largest logit: its ball lies above all others.

    A sequence whose balls, of so many ``bits``, overlap does not count as memorized.

    Example:
        >>> from attnmem.constructions.impossible import every_parity, parity_by_heads
        >>> certified_associations(parity_by_heads(3), *every_parity(3)).memorized
        8

    Source: Dana et al. 2025, Assumption 1 (the association task).
    """
    F = enclosed_offers(weights, sequences)(bits)
    margins = []
    with precision(bits):
        d = weights.embedding.shape[1]
        skip = [[int(i == j) for j in range(d)] for i in range(d)]
        heads = [row for W_O in weights.W_O for row in exact(W_O).transpose().tolist()]
        logits = F * flint().arb_mat(skip + heads) * exact(weights.W_U).transpose()
        for row, right in zip(logits.tolist(), next_tokens.tolist(), strict=True):
            leads = (balls.below(row[right] - x) for token, x in enumerate(row) if token != right)
            margins.append(min(leads, default=math.inf))
    positive = [margin for margin in margins if margin > 0]
    return CertifiedAssociations(len(positive), min(positive, default=0.0))
