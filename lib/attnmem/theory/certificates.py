"""Proofs that a layer memorizes, or that exact weights are near, in ball arithmetic.

A computation in float64 shows that an output equals its label up to rounding errors, of which
nothing is known. Here every operation, the softmax included, carries a bound of its error, so that
the result is a theorem about the stored weights. Weights, of one layer, and data are finite and
taken as exact. It needs python-flint.

The layers are those of Mahdavi et al. 2024, Section 3, and Dana et al. 2025, equations (1) and (2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import scipy
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import Range, check_tokens, checked, refuse
from ..core.deep import DeepWeights
from ..core.layers import AoTWeights, MHAWeights, check_skip, mha_features
from ..examples import Contexts, Labels, Sequences, check_data
from . import balls
from .balls import Ball, BallMatrix, Enclosure, MostBits, exact, flint, precision, precisions


class CertifiedMemorization(NamedTuple):
    """What is proven about stored weights and their labels; infinite is what is not proven."""

    error: float  # no output of the stored weights, without rounding, is further from its label
    rank: int  # the features have at least this: the number of examples, or 0 without a proof
    shift: float  # some read-out gives every label exactly, and is entrywise as near to the stored
    radius: float  # the largest of the balls around its outputs, each of which contains its label
    bits: int  # the precision at which the proof was found, or the search given up


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

    The balls contain the entries of :func:`attnmem.core.layers.mha_features` without rounding.
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
    """What is proven about the next tokens that stored weights predict."""

    memorized: int  # for so many sequences the right token has the largest logit, without rounding
    margin: float  # by at least this much; 0 if there are none, infinite if no other token is there


def _are_sequences(weights, sequences, next_tokens=None) -> None:
    check_enclosed(weights, sequences=sequences)
    for name, tokens in (("sequences", sequences), ("next_tokens", next_tokens)):
        if tokens is not None:
            check_tokens(name, tokens, len(weights.embedding))


@checked(also=_are_sequences)
def enclosed_offers(weights: AoTWeights, sequences: Sequences) -> Enclosure:
    """The matrix ``F`` in ball arithmetic (see ``attnmem.theory.dana.offered``).

    Source: Dana et al. 2025, proof of Theorem 1.
    """

    def offers() -> BallMatrix:
        positions = exact(weights.positions)
        contexts = [exact(weights.embedding[row]) + positions for row in sequences]  # x(t, s)
        last = flint().arb_mat([x.tolist()[-1] for x in contexts])  # x(t, S)
        maps = zip(weights.W_Q, weights.W_K, strict=True)
        products = [exact(W_Q).transpose() * exact(W_K) for W_Q, W_K in maps]
        A, d = _attended(products, contexts, last).tolist(), last.ncols()
        blocks = [last.tolist()]
        for head, W_V in enumerate(weights.W_V):
            attended = flint().arb_mat([row[head * d : (head + 1) * d] for row in A])
            blocks.append((attended * exact(W_V).transpose()).tolist())
        return _side_by_side(blocks)

    return balls.enclosing(offers)


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
        >>> from attnmem.theory.sequences import every_parity, parity_by_heads
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


# --- exact weights near stored ones ---------------------------------------------------------------

# The outputs of a layer depend on its weights through softmaxes, so no linear system gives weights
# that meet labels exactly. The theorem of Newton and Kantorovich in Krawczyk's form proves that
# they exist: stored weights move along as many directions as there are examples, and the outputs,
# as functions of these lengths, are close to the identity in a small box around zero.


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


def _is_deep(weights, tokens) -> None:
    data = {f"weights.tensors[{i}]": W for i, W in enumerate(weights.tensors)}
    check_data(**data, tokens=tokens)


@checked(also=_is_deep)
def enclosed_jacobian(
    weights: DeepWeights, tokens: Float[Tensor, "T n d"], *, skip: bool = True, causal: bool = False
) -> Enclosure:
    """The derivative of layers one after the other, in all weights, in ball arithmetic.

    Weights and tokens are taken as exact. Rows and columns are those of
    :func:`attnmem.theory.tangents.jacobian`.

    Source: this book, the chapter on several layers.
    """

    def derivative() -> BallMatrix:
        layers = [[[*map(exact, W)] for W in layer] for layer in weights.layers]
        return _deep_derivative(layers, exact(weights.W_D), tokens, skip, causal)[1]

    return balls.enclosing(derivative)


def _deep_derivative(
    layers: list, W_D: BallMatrix, tokens: Tensor, skip: bool, causal: bool
) -> tuple[list[Ball], BallMatrix]:
    """The outputs, and their derivative in all weights."""
    outputs, rows = [], []
    for x in tokens:
        inner, X = [], exact(x)
        for layer in layers:
            heads = [_BallHead.of(X, maps, causal) for maps in zip(*layer, strict=True)]
            inner.append((X, heads))
            X = sum((head.A * head.V * head.W_O for head in heads), X if skip else 0 * X)
        last = X.nrows() - 1
        outputs += (X * W_D).tolist()[last]
        for c in range(W_D.ncols()):
            # The derivative in the last tokens, then in those of each layer before.
            G, at = 0 * X, flint().arb_mat(X.ncols(), W_D.ncols())
            for j in range(X.ncols()):
                G[last, j], at[j, c] = W_D[j, c], X[last, j]
            row = at.entries()
            for Y, heads in reversed(inner):
                parts, pulled = zip(*(head.pull(Y, G) for head in heads), strict=True)
                kinds = zip(*parts, strict=True)  # W_Q of all heads, then W_K, W_V, W_O
                row = [b for kind in kinds for part in kind for b in part.entries()] + row
                G = sum(pulled, G if skip else 0 * G)
            rows.append(row)
    return outputs, flint().arb_mat(rows)


class _BallHead(NamedTuple):
    """A head in balls: its maps, and its queries, keys, values and attention on one context."""

    W_Q: BallMatrix
    W_K: BallMatrix
    W_V: BallMatrix
    W_O: BallMatrix
    Q: BallMatrix
    K: BallMatrix
    V: BallMatrix
    A: BallMatrix

    @classmethod
    def of(cls, X: BallMatrix, maps: Sequence[BallMatrix], causal: bool) -> _BallHead:
        Q, K, V = (X * W for W in maps[:3])
        A = []
        for i, logits in enumerate((Q * K.transpose()).tolist()):
            seen = logits[: i + 1] if causal else logits
            A.append(balls.softmax(seen) + [flint().arb(0)] * (len(logits) - len(seen)))
        return cls(*maps, Q, K, V, flint().arb_mat(A))

    def pull(self, X: BallMatrix, G: BallMatrix) -> tuple[list[BallMatrix], BallMatrix]:
        """The derivative in the four maps and in ``X``, given that in what the head adds."""
        pulled = G * self.W_O.transpose()
        pairs = zip(self.A.tolist(), (pulled * self.V.transpose()).tolist(), strict=True)
        logits = []  # the derivative in the logits: A_ij (g_ij - sum_k A_ik g_ik)
        for A, g in pairs:
            mean = sum(a * b for a, b in zip(A, g, strict=True))
            logits.append([a * (b - mean) for a, b in zip(A, g, strict=True)])
        Z = flint().arb_mat(logits)
        Q, K, V = Z * self.K, Z.transpose() * self.Q, self.A.transpose() * pulled
        own = [X.transpose() * each for each in (Q, K, V)]
        own.append((self.A * self.V).transpose() * G)
        maps = ((Q, self.W_Q), (K, self.W_K), (V, self.W_V))
        return own, sum((each * W.transpose() for each, W in maps), 0 * X)


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
            z, c = _moments(E, keys[t], head.mu)
            outputs[t] += head.factor * (z * head.mu)[0, 0]
            pulled = (c * head.W_K).entries()
            parts = (
                [x * k for x in query for k in pulled],  # by W_Q: e (W_K^T c)^T
                [x * x_q for x in c.entries() for x_q in q[t]],  # by W_K: c (W_Q^T e)^T
                z.entries(),  # by the values
            )
            rows[t] += [head.factor * x for x in itertools.chain(*parts)]
    return outputs, flint().arb_mat(rows)


def _moments(E: BallMatrix, key: list[Ball], mu: BallMatrix) -> tuple[BallMatrix, BallMatrix]:
    """The attended token ``z`` and the covariance of the tokens times the values, as rows."""
    logits = (E * flint().arb_mat(len(key), 1, key)).entries()
    alpha = balls.softmax(logits)
    values = (E * mu).entries()
    mean = sum((a * s for a, s in zip(alpha, values, strict=True)), flint().arb(0))
    pulls = [a * (s - mean) for a, s in zip(alpha, values, strict=True)]
    z, c = (flint().arb_mat(1, len(row), row) * E for row in (alpha, pulls))
    return z, c


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
        >>> from attnmem.theory.near import memorize_by_difference
        >>> E, e, y = torch.rand(6, 3, 2), torch.rand(6, 2), torch.rand(6)
        >>> weights = memorize_by_difference(E, e, y, heads=2, head_dim=2, seed=0)
        >>> certified_solution(weights, E, e, y).proven
        True

    Source: this book, the chapter on the capacity of one layer; R. Krawczyk, Computing 4 (1969).
    """

    def derivative(steps: list[Ball]) -> tuple[list[Ball], BallMatrix]:
        return _derivative(_moved(_stored(weights), steps), contexts, queries)

    sizes = [_size(W) for W in weights[:3] for _ in range(W[0].numel())] * len(weights.W_Q)
    return _near_stored(derivative, sizes, labels, most_bits)


def _near_stored(
    derivative: Callable[[list[Ball]], tuple[list[Ball], BallMatrix]],
    sizes: list[float],
    labels: Tensor,
    most_bits: int,
) -> CertifiedSolution:
    """The proof, from outputs and derivative as functions of a step in each weight.

    ``sizes`` are those of the weights, to which steps are relative.
    """
    error = contraction = math.inf
    for bits in precisions(most_bits):
        with precision(bits):
            outputs, J = derivative([flint().arb(0)] * len(sizes))
            outputs = flint().arb_mat(len(outputs), 1, outputs)
            error = balls.largest(outputs - exact(labels.reshape(-1, 1)))
            B = _right_inverse(J, sizes)
            # The box |u| <= 2 |G(0)|, and q >= |I - G'| there in the largest-entry norm.
            u = flint().arb_mat(len(labels), 1, [flint().arb(0, 2 * error)] * len(labels))
            steps = B * u
            near = derivative(steps.entries())[1]
            sums = [[sum(map(abs, row))] for row in (near * B - 1).tolist()]
            contraction = balls.largest(flint().arb_mat(sums))
            if contraction < 0.5:
                return CertifiedSolution(error, balls.largest(steps), contraction, bits)
    return CertifiedSolution(error, math.inf, contraction, bits)


def _size(W: Tensor) -> float:
    """The root mean square of weights of one kind; one, if all are zero."""
    top = W.abs().max().item()  # so that no square overflows
    return top * (W / top).square().mean().sqrt().item() if top > 0 else 1.0


def _right_inverse(J: BallMatrix, sizes: list[float]) -> BallMatrix:
    """Exact numbers ``B`` with ``J B`` near the identity, if the rows of ``J`` are independent."""
    # Floats see rows scaled to a largest entry of one, so that none of them is too large or too
    # small.
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
    return [_Head(*(_step(W, step) for W in head[:3]), head.factor) for head in heads]


def _step(W: BallMatrix, step: Iterator[Ball]) -> BallMatrix:
    """The matrix after the next steps, one for each entry."""
    return flint().arb_mat(W.nrows(), W.ncols(), [x + next(step) for x in W.entries()])


def _has_one_output(weights, tokens, labels) -> None:
    _is_deep(weights, tokens)
    check_data(tokens=tokens, labels=labels)
    if weights.W_D.shape[1] != 1:
        refuse("weights.W_D", f"shape {tuple(weights.W_D.shape)}", "one output")


@checked(also=_has_one_output)
def certified_deep_solution(
    weights: DeepWeights,
    tokens: Float[Tensor, "T n d"],
    labels: Float[Tensor, " T"],
    *,
    skip: bool = True,
    causal: bool = False,
    most_bits: MostBits = 512,
) -> CertifiedSolution:
    """Prove that weights near those of layers one after the other meet every label exactly.

    All weights move, and the proof is that of :func:`certified_solution`.

    Example:
        >>> from attnmem.theory.near import memorize_by_depth
        >>> X, y = torch.rand(9, 2, 2), torch.rand(9)
        >>> weights = memorize_by_depth(X, y, heads=(2, 3), head_dim=1, value_dim=1, seed=0)
        >>> certified_deep_solution(weights, X, y).proven
        True

    Source: this book, the chapter on weights of two layers; R. Krawczyk, Computing 4 (1969).
    """

    def derivative(steps: list[Ball]) -> tuple[list[Ball], BallMatrix]:
        step = iter(steps)
        layers = [
            [[_step(exact(W), step) for W in kind] for kind in layer] for layer in weights.layers
        ]
        return _deep_derivative(layers, _step(exact(weights.W_D), step), tokens, skip, causal)

    sizes = [_size(W) for W in weights.tensors for _ in range(W.numel())]
    return _near_stored(derivative, sizes, labels, most_bits)
