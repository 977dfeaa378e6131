"""Proofs about stored weights, in ball arithmetic: that a layer memorizes, and its next tokens.

Every operation, the softmax included, carries a bound of its error, so that the result is a theorem
about the stored weights. Weights and data are taken as exact. The layers are those of Mahdavi et
al. 2024, Section 3, and Dana et al. 2025, equations (1) and (2).
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, NamedTuple

import numpy as np
import scipy
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import Range, check_tokens, checked, refuse
from ..core.layers import AoTWeights, MHAWeights, check_skip, mha_features
from ..core.stacked import DeepWeights
from ..examples import Contexts, Sequences, check_data
from . import balls
from .balls import BallMatrix, Enclosure, MostBits, exact, flint, precision, precisions
from .tangents import named


class CertifiedMemorization(NamedTuple):
    """What is proven about stored weights and their labels; infinite is what is not proven."""

    error: float  # no output of the stored weights, without rounding, is further from its label
    rank: int  # the features have at least this: the number of examples, or 0 without a proof
    shift: float  # some read-out gives every label exactly, and is entrywise as near to the stored
    radius: float  # the largest of the balls around its outputs, each of which contains its label
    bits: int  # the precision at which the proof was found, or the search given up


def can_be_enclosed(weights, **arguments) -> None:
    """Accept weights of one layer or several, and data, all of them finite and not empty."""
    data = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    if not isinstance(weights, DeepWeights) and weights.W_Q.ndim > 3:
        refuse("weights.W_Q", f"shape {tuple(weights.W_Q.shape)}", "three axes, of one layer")
    check_data(**named(weights), **data)
    for name in ("sequences", "next_tokens"):
        if name in data:
            check_tokens(name, data[name], len(weights.embedding))
    if isinstance(weights, MHAWeights) and arguments.get("skip"):
        check_skip(weights, data["queries"])


# --- layers ---------------------------------------------------------------------------------------


@checked(also=can_be_enclosed)
def enclosed_features(
    weights: MHAWeights, contexts: Contexts, queries: Float[Tensor, "T d"]
) -> Enclosure:
    """:func:`attnmem.core.layers.mha_features` in ball arithmetic, as a function of the bits."""

    def features() -> BallMatrix:
        e = exact(queries)
        maps = [(exact(W_Q), exact(W_K)) for W_Q, W_K in zip(weights.W_Q, weights.W_K, strict=True)]
        if contexts.ndim == 3:
            products = [W_Q * W_K.transpose() for W_Q, W_K in maps]
            attended = _attended(products, [exact(E) for E in contexts], e)
            return flint().arb_mat([z.entries() for z in attended])
        E = exact(contexts)
        heads = [(balls.attention(e * W_Q, E * W_K) * E).tolist() for W_Q, W_K in maps]
        return flint().arb_mat([[*itertools.chain(*row)] for row in zip(*heads, strict=True)])

    return balls.enclosing(features)


def _attended(
    products: list[BallMatrix], contexts: list[BallMatrix], e: BallMatrix
) -> list[BallMatrix]:
    """For each example the attended tokens, a row for each head, given each ``W_Q W_K^T``."""
    # An example's row of e W_Q W_K^T, by each head, are queries that ask its tokens themselves.
    queries = zip(*((e * product).tolist() for product in products), strict=True)
    attended = []
    for rows, E in zip(queries, contexts, strict=True):
        attended.append(balls.attention(flint().arb_mat(list(rows)), E) * E)
    return attended


@checked(also=can_be_enclosed)
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

    With the stored read-out, ``M_h = W_V W_O W_D`` for each head, the residual ``y - Z M`` is
    enclosed. As many columns of ``Z`` as there are examples, chosen by pivoting, form a square
    matrix ``S``. Solving ``S x = y - Z M`` in balls proves that ``S`` is invertible, and encloses a
    correction after which every output is exactly its label. The precision doubles, up to
    ``most_bits``, until the solution is found.

    Example:
        >>> from attnmem import memorize_mha
        >>> E, e, y = torch.eye(5)[:3], torch.eye(5), torch.arange(5.0)[:, None]
        >>> weights = memorize_mha(E, e, y, heads=2, head_dim=3, seed=0)
        >>> certified_memorization(weights, E, e, y).rank
        5

    Source: Mahdavi et al. 2024, Theorem 1.
    """
    enclosure = enclosed_features(weights, contexts, queries)
    columns = _pivots(mha_features(weights, contexts.double(), queries.double()))
    for bits in precisions(most_bits):
        with precision(bits):
            Z, M = enclosure(bits), _read_out(weights)
            y = exact(labels)
            if skip:
                y = y - exact(queries) * exact(weights.W_D)
            residual = y - Z * M
            error = balls.largest(residual)
            correction = _solved(Z, columns, residual)
            if correction is None:
                continue
            outputs = Z * (M + correction)
            radius = max(balls.above(entry.rad()) for entry in outputs.entries())
            if outputs.contains(y) and math.isfinite(radius):
                return CertifiedMemorization(
                    error=error,
                    rank=len(labels),
                    shift=balls.largest(correction),
                    radius=radius,
                    bits=bits,
                )
    return CertifiedMemorization(error, rank=0, shift=math.inf, radius=math.inf, bits=bits)


def _pivots(Z: Float[Tensor, "T m"]) -> list[int]:
    """The columns of a well-conditioned square part; too few if ``Z`` has too few."""
    rounded = Z.detach().cpu().nan_to_num().numpy()
    order = scipy.linalg.qr(rounded, mode="r", pivoting=True)[1]
    return np.sort(order[: len(rounded)]).tolist()


def _read_out(weights: MHAWeights) -> BallMatrix:
    """``W_V W_O W_D`` of each head, one below the other."""
    W_O, W_D = weights.W_O.unflatten(0, (len(weights.W_V), -1)), exact(weights.W_D)
    rows = []
    for W_V_h, W_O_h in zip(weights.W_V, W_O, strict=True):
        rows += (exact(W_V_h) * exact(W_O_h) * W_D).tolist()
    return flint().arb_mat(rows)


def _solved(Z: BallMatrix, columns: list[int], residual: BallMatrix) -> BallMatrix | None:
    """A ball around a correction of the read-out, zero outside ``columns``; None if not proven."""
    if len(columns) < Z.nrows():
        return None
    square = flint().arb_mat([[row[j] for j in columns] for row in Z.tolist()])
    try:
        solution = square.solve(residual)
    except ZeroDivisionError:  # flint raises it if the ball contains a singular matrix
        return None
    rows = dict(zip(columns, solution.tolist(), strict=True))
    zeros = [flint().arb(0)] * residual.ncols()
    return flint().arb_mat([rows.get(j, zeros) for j in range(Z.ncols())])


# --- attention-only transformers ------------------------------------------------------------------


class CertifiedAssociations(NamedTuple):
    """What is proven about the next tokens that stored weights predict."""

    memorized: int  # for so many sequences the right token leads; overlapping balls do not count
    margin: float  # by at least this much; 0 if there are none, infinite if no other token is there


@checked(also=can_be_enclosed)
def enclosed_offers(weights: AoTWeights, sequences: Sequences) -> Enclosure:
    """The matrix ``F`` of :func:`attnmem.core.sequences.offered` in ball arithmetic."""

    def offers() -> BallMatrix:
        positions = exact(weights.positions)
        contexts = [exact(weights.embedding[row]) + positions for row in sequences]  # x(t, s)
        last = flint().arb_mat([x.tolist()[-1] for x in contexts])  # x(t, S)
        maps = zip(weights.W_Q, weights.W_K, strict=True)
        products = [exact(W_Q).transpose() * exact(W_K) for W_Q, W_K in maps]
        W_V = [exact(W).transpose() for W in weights.W_V]
        rows = []
        for x, A in zip(last.tolist(), _attended(products, contexts, last), strict=True):
            row = list(x)
            for A_h, W_V_h in zip(A.tolist(), W_V, strict=True):
                row += (flint().arb_mat([A_h]) * W_V_h).entries()
            rows.append(row)
        return flint().arb_mat(rows)

    return balls.enclosing(offers)


@checked(also=can_be_enclosed)
def certified_associations(
    weights: AoTWeights,
    sequences: Sequences,
    next_tokens: Int[Tensor, " T"],
    *,
    bits: Annotated[int, Range(2)] = balls.FIRST_BITS,
) -> CertifiedAssociations:
    """Prove that the right token has the largest logit: its ball lies above all others.

    Source: Dana et al. 2025, Assumption 1 (the association task).
    """
    F = enclosed_offers(weights, sequences)(bits)
    skip = torch.eye(weights.embedding.shape[1]).to(weights.W_O)
    margins = []
    with precision(bits):
        # Logits are F times [1; W_O^1; ...]^T W_U^T.
        logits = F * exact(torch.cat([skip, *weights.W_O.mT])) * exact(weights.W_U).transpose()
        for row, right in zip(logits.tolist(), next_tokens.tolist(), strict=True):
            leads = [balls.below(row[right] - x) for token, x in enumerate(row) if token != right]
            margins.append(min(leads, default=math.inf))
    proven = [margin for margin in margins if margin > 0]
    return CertifiedAssociations(memorized=len(proven), margin=min(proven, default=0.0))
