"""Proofs that a layer memorizes, or that exact weights are near, in ball arithmetic.

Every operation, the softmax included, carries a bound of its error, so that the result is a theorem
about the stored weights. Weights and data are taken as exact. The layers are those of Mahdavi et
al. 2024, Section 3, and Dana et al. 2025, equations (1) and (2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import scipy
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import Range, check_tokens, checked, refuse
from ..core.layers import AoTWeights, MHAWeights, check_skip, mha_features
from ..core.stacked import DeepWeights
from ..examples import Contexts, Labels, Sequences, check_data, unit
from . import balls
from .balls import Ball, BallMatrix, Enclosure, MostBits, exact, flint, precision, precisions
from .tangents import named


class CertifiedMemorization(NamedTuple):
    """What is proven about stored weights and their labels; infinite is what is not proven."""

    error: float  # no output of the stored weights, without rounding, is further from its label
    rank: int  # the features have at least this: the number of examples, or 0 without a proof
    shift: float  # some read-out gives every label exactly, and is entrywise as near to the stored
    radius: float  # the largest of the balls around its outputs, each of which contains its label
    bits: int  # the precision at which the proof was found, or the search given up


def _can_be_enclosed(weights, **given) -> None:
    """Accept weights of one layer or several, and data, all of them finite and not empty."""
    data = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
    if not isinstance(weights, DeepWeights) and weights.W_Q.ndim > 3:
        refuse("weights.W_Q", f"shape {tuple(weights.W_Q.shape)}", "three axes, of one layer")
    check_data(**named(weights), **data)
    for name in {"sequences", "next_tokens"} & {*data}:
        check_tokens(name, data[name], len(weights.embedding))
    if isinstance(weights, MHAWeights) and given.get("skip"):
        check_skip(weights, data["queries"])


def _has_one_output(weights, **given) -> None:
    _can_be_enclosed(weights, **given)
    whats = {"W_V": "values of width one", "W_D": "one output"}
    for name in whats if isinstance(weights, MHAWeights) else ("W_D",):
        shape = tuple(getattr(weights, name).shape)
        if shape[-1] != 1:
            refuse(f"weights.{name}", f"shape {shape}", whats[name])
    if (labels := given.get("labels")) is not None and labels.numel() != len(labels):
        refuse("labels", f"shape {tuple(labels.shape)}", "one output")


@checked(also=_can_be_enclosed)
def enclosed_features(
    weights: MHAWeights, contexts: Contexts, queries: Float[Tensor, "T d"]
) -> Enclosure:
    """:func:`attnmem.core.layers.mha_features` in ball arithmetic, as a function of the bits."""

    def features() -> BallMatrix:
        e = exact(queries)
        maps = [(exact(W_Q), exact(W_K)) for W_Q, W_K in zip(weights.W_Q, weights.W_K, strict=True)]
        if contexts.ndim == 2:
            E = exact(contexts)
            heads = ((_attention(e * W_Q, E * W_K) * E).tolist() for W_Q, W_K in maps)
            return flint().arb_mat([[*itertools.chain(*row)] for row in zip(*heads, strict=True)])
        products = [W_Q * W_K.transpose() for W_Q, W_K in maps]
        attended = _attended(products, [*map(exact, contexts)], e)
        return flint().arb_mat([z.entries() for z in attended])

    return balls.enclosing(features)


def _attended(
    products: list[BallMatrix], contexts: list[BallMatrix], e: BallMatrix
) -> list[BallMatrix]:
    """For each example the attended tokens, a row for each head, given each ``W_Q W_K^T``."""
    keys = zip(*((e * product).tolist() for product in products), strict=True)
    pairs = zip(map(flint().arb_mat, map(list, keys)), contexts, strict=True)
    return [_attention(rows, E) * E for rows, E in pairs]


def _attention(Q: BallMatrix, K: BallMatrix, causal: bool = False) -> BallMatrix:
    """Attention weights, a row for each query; with ``causal``, for keys up to its own."""
    A = []
    for i, logits in enumerate((Q * K.transpose()).tolist()):
        seen = logits[: i + 1] if causal else logits
        A.append(balls.softmax(seen) + [flint().arb(0)] * (len(logits) - len(seen)))
    return flint().arb_mat(A)


@checked(also=_can_be_enclosed)
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
                largest = balls.largest(correction)
                return CertifiedMemorization(error, len(labels), largest, radius, bits)
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
    rows = dict(zip(columns, solution.tolist(), strict=True))
    zeros = [flint().arb(0)] * residual.ncols()
    return flint().arb_mat([rows.get(j, zeros) for j in range(Z.ncols())])


# --- attention-only transformers ------------------------------------------------------------------


class CertifiedAssociations(NamedTuple):
    """What is proven about the next tokens that stored weights predict."""

    memorized: int  # for so many sequences the right token leads; overlapping balls do not count
    margin: float  # by at least this much; 0 if there are none, infinite if no other token is there


@checked(also=_can_be_enclosed)
def enclosed_offers(weights: AoTWeights, sequences: Sequences) -> Enclosure:
    """The matrix ``F`` of :func:`attnmem.theory.associations.offered` in ball arithmetic."""

    def offers() -> BallMatrix:
        positions = exact(weights.positions)
        contexts = [exact(weights.embedding[row]) + positions for row in sequences]  # x(t, s)
        last = flint().arb_mat([x.tolist()[-1] for x in contexts])  # x(t, S)
        maps = zip(weights.W_Q, weights.W_K, strict=True)
        products = [exact(W_Q).transpose() * exact(W_K) for W_Q, W_K in maps]
        W_V, rows = [exact(W).transpose() for W in weights.W_V], last.tolist()
        for row, z in zip(rows, _attended(products, contexts, last), strict=True):
            for z_h, W in zip(z.tolist(), W_V, strict=True):
                row += (flint().arb_mat([z_h]) * W).entries()
        return flint().arb_mat(rows)

    return balls.enclosing(offers)


@checked(also=_can_be_enclosed)
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
    margins = []
    with precision(bits):
        heads = torch.cat([torch.eye(weights.embedding.shape[1]).to(weights.W_O), *weights.W_O.mT])
        logits = F * exact(heads) * exact(weights.W_U).transpose()
        for row, right in zip(logits.tolist(), next_tokens.tolist(), strict=True):
            leads = (balls.below(row[right] - x) for token, x in enumerate(row) if token != right)
            margins.append(min(leads, default=math.inf))
    positive = [margin for margin in margins if margin > 0]
    return CertifiedAssociations(len(positive), min(positive, default=0.0))


# --- exact weights near stored ones ---------------------------------------------------------------

# The theorem of Newton and Kantorovich in Krawczyk's form: stored weights move along as many
# directions as there are examples, and the outputs, as functions of these lengths, are close to the
# identity in a small box around zero.


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


@checked(also=_has_one_output)
def enclosed_derivative(
    weights: MHAWeights, contexts: Contexts, queries: Float[Tensor, "T d"]
) -> Enclosure:
    """The derivative of the outputs in ``W_Q``, ``W_K`` and ``W_V``, in ball arithmetic.

    A certified rank of this matrix, of shape ``(T, H (2 d d_h + d))``, is a theorem about these
    data, and about almost all data of its size (the chapter on the capacity of one layer).
    """
    return _enclosed(*_of_layer(weights, contexts, queries))


@checked(also=_can_be_enclosed)
def enclosed_jacobian(
    weights: DeepWeights, tokens: Float[Tensor, "T n d"], *, skip: bool = True, causal: bool = False
) -> Enclosure:
    """The derivative of layers one after the other, in all weights, in ball arithmetic.

    Rows and columns are those of :func:`attnmem.theory.tangents.jacobian`.
    """
    return _enclosed(*_of_network(weights, tokens, skip, causal))


# The matrices that move, with the size of their kind; outputs and derivative as a function of them.
_Derivative = Callable[[list[BallMatrix]], tuple[list[Ball], BallMatrix]]
_Stored = list[tuple[Tensor, float]]


def _enclosed(stored: _Stored, derivative: _Derivative) -> Enclosure:
    return balls.enclosing(lambda: derivative([exact(W) for W, _ in stored])[1])


def _sized(kinds: Iterable[Tensor]) -> _Stored:
    """The matrices of each kind, with the root mean square of its weights; one, if all are zero."""
    tops = ((kind, unit(kind)) for kind in kinds)  # so that no square overflows
    sizes = ((kind, float(top * (kind / top).square().mean().sqrt())) for kind, top in tops)
    return [(W, size or 1.0) for kind, size in sizes for W in kind]


def _row(parts: Iterable[Sequence[BallMatrix]]) -> list[Ball]:
    """A row of the derivative from those in the maps of each head: kind by kind."""
    return [b for kind in zip(*parts, strict=True) for part in kind for b in part.entries()]


def _of_layer(
    weights: MHAWeights, contexts: Tensor, queries: Tensor
) -> tuple[_Stored, _Derivative]:
    """Of a layer with values of width one and one output."""
    H = len(weights.W_Q)

    def derivative(maps: list[BallMatrix]) -> tuple[list[Ball], BallMatrix]:
        W_D, outputs, rows = exact(weights.W_D), [], []
        tokens = map(exact, contexts) if contexts.ndim == 3 else [exact(contexts)] * len(queries)
        W_O = [exact(W[None]) for W in weights.W_O]
        heads = [*zip(maps[:H], maps[H : 2 * H], maps[2 * H :], W_O, strict=True)]
        for E, x in zip(tokens, queries, strict=True):
            inner = [_Head(maps, exact(x[None]), E) for maps in heads]
            outputs.append(sum((head.added * W_D)[0, 0] for head in inner))
            rows.append(_row(head.pull(W_D.transpose())[0][:3] for head in inner))
        return outputs, flint().arb_mat(rows)

    return _sized(weights[:3]), derivative


def _of_network(
    weights: DeepWeights, tokens: Tensor, skip: bool, causal: bool = False
) -> tuple[_Stored, _Derivative]:
    """Of layers one after the other, all weights in the order of ``weights.tensors``."""

    def derivative(maps: list[BallMatrix]) -> tuple[list[Ball], BallMatrix]:
        step = iter(maps)
        layers = [[[next(step) for _ in kind] for kind in layer] for layer in weights.layers]
        W_D, outputs, rows = next(step), [], []
        for x in tokens:
            inner, X = [], exact(x)
            for layer in layers:
                inner.append([_Head(maps, X, X, causal) for maps in zip(*layer, strict=True)])
                X = sum((head.added for head in inner[-1]), X if skip else 0 * X)
            last = X.nrows() - 1
            outputs += (X * W_D).tolist()[last]
            for c in range(W_D.ncols()):
                # The derivative in the last tokens, then in those of each layer before.
                G, at = 0 * X, flint().arb_mat(X.ncols(), W_D.ncols())
                for j in range(X.ncols()):
                    G[last, j], at[j, c] = W_D[j, c], X[last, j]
                row = at.entries()
                for heads in reversed(inner):
                    parts, inward = zip(*(head.pull(G) for head in heads), strict=True)
                    row = _row(parts) + row
                    G = G if skip else 0 * G
                    for head, by_QKV in zip(heads, inward, strict=True):
                        pairs = zip(by_QKV, head.maps[:3], strict=True)
                        G = sum((each * W.transpose() for each, W in pairs), G)
                rows.append(row)
        return outputs, flint().arb_mat(rows)

    return _sized(W.reshape(-1, *W.shape[-2:]) for W in weights.tensors), derivative


class _Head:
    """A head ``W_Q, W_K, W_V, W_O``, and what it makes of queries ``X`` and tokens ``E``."""

    def __init__(self, maps: Sequence[BallMatrix], X, E, causal: bool = False) -> None:
        self.maps, self.X, self.E = maps, X, E
        self.Q, self.K, self.V = X * maps[0], E * maps[1], E * maps[2]
        self.A = _attention(self.Q, self.K, causal)

    @property
    def added(self) -> BallMatrix:
        return self.A * self.V * self.maps[3]

    def pull(self, G: BallMatrix) -> tuple[list[BallMatrix], Sequence[BallMatrix]]:
        """Given the derivative in what the head adds, those in the maps; and in ``Q, K, V``."""
        pulled, rows = G * self.maps[3].transpose(), []
        for alpha, g in zip(self.A.tolist(), (pulled * self.V.transpose()).tolist(), strict=True):
            mean = sum(a * b for a, b in zip(alpha, g, strict=True))
            rows.append([a * (b - mean) for a, b in zip(alpha, g, strict=True)])
        Z = flint().arb_mat(rows)  # the derivative in the logits
        by_Q, by_K, by_V = Z * self.K, Z.transpose() * self.Q, self.A.transpose() * pulled
        own = [self.X.transpose() * by_Q, self.E.transpose() * by_K, self.E.transpose() * by_V]
        own.append((self.A * self.V).transpose() * G)
        return own, (by_Q, by_K, by_V)


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
        >>> from attnmem.theory.near import memorize_by_difference
        >>> E, e, y = torch.rand(6, 3, 2), torch.rand(6, 2), torch.rand(6)
        >>> weights = memorize_by_difference(E, e, y, heads=2, head_dim=2, seed=0)
        >>> certified_solution(weights, E, e, y).proven
        True

    Source: this book, the chapter on the capacity of one layer; R. Krawczyk, Computing 4 (1969).
    """
    return _near_stored(*_of_layer(weights, contexts, queries), labels, most_bits)


def _near_stored(
    stored: _Stored, derivative: _Derivative, labels: Tensor, most_bits: int
) -> CertifiedSolution:
    sizes = [size for W, size in stored for _ in range(W.numel())]
    error = contraction = math.inf
    for bits in precisions(most_bits):
        with precision(bits):
            maps = [exact(W) for W, _ in stored]
            outputs, J = derivative(maps)
            outputs = flint().arb_mat(len(outputs), 1, outputs)
            error = balls.largest(outputs - exact(labels.reshape(-1, 1)))
            B = _right_inverse(J, sizes)
            # The box |u| <= 2 |G(0)|, and q >= |I - G'| there in the largest-entry norm.
            u = flint().arb_mat(len(labels), 1, [flint().arb(0, 2 * error)] * len(labels))
            steps = B * u
            step = iter(steps.entries())
            near = derivative([_moved(W, step) for W in maps])[1]
            contraction = max(balls.above(sum(map(abs, row))) for row in (near * B - 1).tolist())
            if contraction < 0.5:
                return CertifiedSolution(error, balls.largest(steps), contraction, bits)
    return CertifiedSolution(error, math.inf, contraction, bits)


def _moved(W: BallMatrix, step: Iterator[Ball]) -> BallMatrix:
    """The matrix after the next steps, one for each entry."""
    return flint().arb_mat(W.nrows(), W.ncols(), [x + next(step) for x in W.entries()])


def _right_inverse(J: BallMatrix, sizes: list[float]) -> BallMatrix:
    """Exact numbers ``B`` with ``J B`` near the identity, if the rows of ``J`` are independent."""
    # Floats see rows scaled to a largest entry of one, so that none is too large or too small.
    rows = [[(x * s).mid() for x, s in zip(row, sizes, strict=True)] for row in J.tolist()]
    tops = [max(map(abs, row)) for row in rows]
    scaled = [[float(x / top) for x in row] for row, top in zip(rows, tops, strict=True)]
    scaled = torch.tensor(scaled, dtype=torch.float64).nan_to_num()  # of a row of zeros
    steps = zip(exact(torch.linalg.pinv(scaled, rtol=1e-14)).tolist(), sizes, strict=True)
    B = [[x * s / top for x, top in zip(row, tops, strict=True)] for row, s in steps]
    return flint().arb_mat(B).mid()


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
    return _near_stored(*_of_network(weights, tokens, skip), labels, most_bits)


# --- weights that are rounded ---------------------------------------------------------------------


@checked(also=_can_be_enclosed)
def certified_rounding(
    weights: MHAWeights,
    contexts: Contexts,
    queries: Float[Tensor, "T d"],
    labels: Float[Tensor, "T d_out"],
    *,
    digits: Annotated[int, Range(0, 1000)],
) -> float:
    """No output is further from its label, whichever way all weights are rounded; or infinity.

    Each weight ``w`` of all five matrices may become any number within ``2^-(digits + 1) |w|``; its
    nearest number of so many binary digits after the first is one. An output moves by at most the
    sum of these radii times the absolute derivatives, enclosed on all balls at once.

    Source: this book, the theorem on rounding all weights.
    """
    kinds, away = (*weights[:3], weights.W_O.unflatten(0, (len(weights.W_Q), -1))), 0.0
    with precision(balls.FIRST_BITS + digits):
        radius, W_D = flint().arb(2) ** -(digits + 1), exact(weights.W_D)
        ball, zero = 1 + radius * flint().arb(0, 1), flint().arb_mat(1, W_D.nrows())
        stored = [[*map(exact, maps)] for maps in zip(*kinds, strict=True)]
        tokens = [exact(E) for E in contexts.reshape(-1, *contexts.shape[-2:])]
        for t, (query, y) in enumerate(zip(queries, labels.tolist(), strict=True)):
            x, E = exact(query[None]), tokens[t % len(tokens)]
            outputs = sum((_Head(maps, x, E).added for maps in stored), zero) * W_D
            heads = [_Head([W * ball for W in maps], x, E) for maps in stored]
            last = sum((head.added for head in heads), zero).entries()
            for c, read in enumerate(W_D.transpose().tolist()):
                G = flint().arb_mat([[w * ball for w in read]])
                row = _row(head.pull(G)[0] for head in heads) + last
                moved = (abs(g * w) for g, w in zip(row, _row(stored) + read, strict=True))
                away = max(away, balls.above(abs(outputs[0, c] - y[c]) + radius * sum(moved)))
    return away


def certified_digits(*data: Tensor | MHAWeights, tolerance: float = 0.01) -> int | None:
    """The least digits for which :func:`certified_rounding` is ``tolerance`` of the largest label.

    More keep the labels, too: what they round to lies in the same balls. None if 52 do not. Float32
    has 23, float16 10 and bfloat16 7, of weights neither too large nor too small for the exponent.
    """
    limit = tolerance * float(data[-1].abs().max())
    return next((m for m in range(53) if certified_rounding(*data, digits=m) <= limit), None)
