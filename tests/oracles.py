"""Oracles that share no code with the library: integers, fractions and balls, entry by entry.

``softmax2`` is a softmax in base 2: integer logits have attention weights that are fractions, and
a layer with the map ``W log 2`` has them as its true attention. So the features of real layers are
known without a rounding error, and with them their ranks.
"""

import itertools
from fractions import Fraction

import torch
from flint import arb, arb_mat, ctx, fmpq, fmpq_mat


def rows_of(matrix):
    """Nested lists of fractions: the exact entries of a tensor, or of nested lists."""
    rows = matrix.tolist() if isinstance(matrix, torch.Tensor) else matrix
    return [[Fraction(entry) for entry in row] for row in rows]


def rational(matrix):
    """A matrix of flint with the same entries."""
    rows = rows_of(matrix)
    entries = [fmpq(entry.numerator, entry.denominator) for row in rows for entry in row]
    return fmpq_mat(len(rows), len(rows[0]), entries)


def fractions(matrix):
    """Back from a matrix of flint."""
    return [[Fraction(int(x.p), int(x.q)) for x in row] for row in matrix.tolist()]


def rank(matrix):
    """The rank over the rationals."""
    return rational(matrix).rank() if len(matrix) else 0


def subset_rank(pairs, H, d_h, d):
    """The formula of the theorem on subsets, as in the chapter on associations."""
    T, codes = len(pairs), pairs.unique(return_inverse=True)[1]
    a, b = torch.nn.functional.one_hot(codes).double().unbind(1)
    delta = torch.cat([a - b, torch.ones(T, 1)], 1)
    J = torch.cartesian_prod(*[torch.arange(2.0, dtype=torch.float64)] * T).view(-1, T)
    r = torch.linalg.matrix_rank(J[..., None] * delta)
    L = (J @ b).gt(0).sum(1)
    return int((T - J.sum(1) + H * r.clamp(max=d_h) + L.clamp(max=d)).min())


def kruskal(vectors):
    """The Kruskal rank by its definition: every subset is looked at."""
    rows = rows_of(vectors)
    for size in range(1, rank(rows) + 1):
        if any(rank(list(part)) < size for part in itertools.combinations(rows, size)):
            return size - 1
    return rank(rows)


def affine(points):
    """The dimension of the affine hull, and whether the origin lies in it."""
    rows = rows_of(points)
    differences = [[x - y for x, y in zip(row, rows[0], strict=True)] for row in rows[1:]]
    dimension = rank(differences)
    return dimension, rank(rows) == dimension


def dot(x, y):
    """The product of two vectors."""
    return sum((a * b for a, b in zip(x, y, strict=True)), start=0 * x[0] * y[0])


def averages(alpha, tokens):
    """The token that attention weights average to."""
    return [dot(alpha, column) for column in zip(*tokens, strict=True)]


def softmax2(logits):
    """The softmax in base 2 of integers, as fractions."""
    powers = [Fraction(2) ** int(logit) for logit in logits]
    return [power / sum(powers) for power in powers]


def features2(maps, contexts, queries):
    """``Z`` of heads with the logits ``E W e log 2``, exactly; one ``W`` a head, all integers."""
    Z = []
    for t, e in enumerate(queries.tolist()):
        E = (contexts if contexts.ndim == 2 else contexts[t]).tolist()
        row = []
        for W in maps.tolist():
            key = [dot(line, e) for line in W]
            row += averages(softmax2([dot(token, key) for token in E]), rows_of(E))
        Z.append(row)
    return Z


def corner_rank(contexts, heads):
    """The largest rank of ``Z`` over all attention whatever, on these contexts ``(C, n, d)``.

    Every row is linear in the attention weights, and these are averages of one-hot choices; so the
    rows of all choices span all rows that there are.
    """
    rows = []
    for context in contexts.tolist():
        rows += [[*itertools.chain(*c)] for c in itertools.product(context, repeat=heads)]
    return rank(rows)


# --- balls ----------------------------------------------------------------------------------------


def balls(matrix):
    """The exact entries of a tensor."""
    return arb_mat([[arb(x) for x in row] for row in matrix.tolist()])


def ball_attention(W_Q, W_K, E, e):
    """Attention weights of one head on one example, as balls, from the definition."""
    key = balls(W_K) * (balls(W_Q).transpose() * balls(e[:, None]))
    logits = (balls(E) * key).entries()
    peak = max(logits, key=lambda logit: float(logit.mid()))
    powers = [(logit - peak).exp() for logit in logits]
    total = sum(powers, start=arb(0))
    return [power / total for power in powers]


def ball_features(weights, contexts, queries, bits=300):
    """``Z`` of a layer of the library, as balls."""
    with workprec(bits):
        Z = []
        for t, e in enumerate(queries):
            E = contexts if contexts.ndim == 2 else contexts[t]
            row = []
            for W_Q, W_K in zip(weights.W_Q, weights.W_K, strict=True):
                alpha = arb_mat([ball_attention(W_Q, W_K, E, e)])
                row += (alpha * balls(E)).entries()
            Z.append(row)
        return arb_mat(Z)


def ball_error(weights, contexts, queries, labels, skip=False, bits=300):
    """A proven bound on the distance of the layer's outputs from their labels."""
    with workprec(bits):
        Z = ball_features(weights, contexts, queries, bits)
        W_O = weights.W_O.unflatten(0, (len(weights.W_V), -1))
        W_D = balls(weights.W_D)
        M = []
        for value, out in zip(weights.W_V, W_O, strict=True):
            M += (balls(value) * balls(out) * W_D).tolist()
        outputs = Z * arb_mat(M)
        if skip:
            outputs += balls(queries) * W_D
        return max(float(abs(x).upper()) for x in (outputs - balls(labels)).entries())


def surely_independent(Z, bits=300):
    """Whether the rows of a matrix of balls are proven independent, by the Gram determinant."""
    with workprec(bits):
        return (Z * Z.transpose()).det() != 0


def workprec(bits):
    """A ``with`` block of so many bits."""
    return ctx.workprec(bits)
