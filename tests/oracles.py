"""Oracles that share no code with the library: plain loops, integers, fractions and balls.

``softmax2`` is a softmax in base 2: integer logits have attention weights that are fractions, and
a layer with the map ``W log 2`` has them as its true attention. So the features of real layers are
known without a rounding error, and with them their ranks.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import torch
from flint import arb, arb_mat, ctx, fmpq, fmpq_mat, nmod_mat

F64 = {"dtype": torch.float64}
PRIME = 67_108_859  # so that sums of 2,000 products are exact in 64 bits


# --- float64 --------------------------------------------------------------------------------------


def gaussian(seed, *shape):
    """Standard normal numbers, of a seed or of a generator that goes on."""
    return torch.randn(*shape, generator=_generator(seed), **F64)


def uniform(seed, *shape):
    """Numbers between 0 and 1, of a seed or of a generator that goes on."""
    return torch.rand(*shape, generator=_generator(seed), **F64)


def _generator(seed):
    if isinstance(seed, torch.Generator):
        return seed
    return torch.Generator().manual_seed(seed)


def attend(query, tokens, W_Q, W_K, W_V, W_O):
    """What the heads of a layer write for one query ``(d,)`` and its tokens ``(n, d)``."""
    written = 0
    for Q, K, V, O in zip(W_Q, W_K, W_V, W_O, strict=True):
        alpha = torch.softmax(torch.stack([(token @ K) @ (query @ Q) for token in tokens]), dim=0)
        for weight, token in zip(alpha, tokens, strict=True):
            written = written + weight * (token @ V @ O)
    return written


def deep_output(layers, tokens, *, skip=True, causal=False):
    """The last token of one sequence behind layers of such heads."""
    stream = [*tokens]
    for layer in layers:
        after = []
        for position, query in enumerate(stream):
            keys = stream[: position + 1] if causal else stream
            written = attend(query, keys, *layer)
            after.append(query + written if skip else written)
        stream = after
    return stream[-1]


def derivative(outputs, weights):
    """Of a function of all weights whose result is a vector: a row for each of its entries."""
    blocks = torch.func.jacrev(outputs, argnums=tuple(range(len(weights))))(*weights)
    return torch.cat([block.flatten(1) for block in blocks], dim=1)


def rank_in_float(J, tolerance=1e-10):
    """Singular values above the tolerance, of columns that are scaled to length one."""
    values = torch.linalg.svdvals(J / J.norm(dim=0).clamp(min=1e-30))
    return int((values > tolerance * values[0]).sum())


def partitions(total, largest=None):
    """All ways to write a number as a sum, the largest summands first."""
    if not total:
        yield []
    for first in range(min(total, largest or total), 0, -1):
        for rest in partitions(total - first, first):
            yield [first, *rest]


# --- integers modulo a prime ----------------------------------------------------------------------


def rank_modulo(matrix, prime=PRIME):
    """The rank of whole numbers, a tensor or an array, modulo a prime."""
    residues = np.asarray(matrix).astype(np.int64) % prime
    return nmod_mat(*residues.shape, residues.flatten().tolist(), prime).rank()


def product(A, B):
    """Of arrays of residues."""
    return A @ B % PRIME


def shares(powers):
    """What sums to one in each row, in proportion."""
    totals = powers.sum(-1, keepdims=True) % PRIME
    inverses = [pow(int(total), -1, PRIME) for total in totals.flat]
    return powers * np.reshape(inverses, totals.shape) % PRIME


def through(X, dX, W, columns):
    """X W, and how it changes with all weights, of which the next columns are those of W."""
    change = product(dX, W)
    for (i, j), column in zip(np.ndindex(*W.shape), columns, strict=False):
        change[:, column, :, j] += X[..., i]
    return product(X, W), change % PRIME


def written(X, dX, maps, A, columns):
    """What a head of attention A writes by its maps to Q, K, V and back, and how it changes."""
    (Q, dQ), (K, dK), (V, dV) = (through(X, dX, W, columns) for W in maps[:3])
    logits = product(dQ, K.swapaxes(1, 2)[:, None])
    logits += product(Q[:, None], dK.swapaxes(2, 3))
    logits %= PRIME
    means = (A[:, None] * logits % PRIME).sum(-1, keepdims=True)
    dA = A[:, None] * ((logits - means) % PRIME) % PRIME
    changed = (product(dA, V[:, None]) + product(A[:, None], dV)) % PRIME
    return through(product(A, V), changed, maps[3], columns)


# --- fractions ------------------------------------------------------------------------------------


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
        if any(rank(list(subset)) < size for subset in itertools.combinations(rows, size)):
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


def centred(logits):
    """In whole numbers: times the number of tokens."""
    return logits.shape[1] * logits - logits.sum(dim=1, keepdim=True)


class ExactTransformer:
    """A transformer of integers or fractions, with rank-one attention in base 2.

    Of head ``h``, ``queries[h]`` and ``keys[h]`` are vectors, ``values[h]`` a matrix ``(d_h, d)``.
    """

    def __init__(self, embedding, positions, queries, keys, values):
        self.embedding, self.positions = embedding, positions
        self.queries, self.keys, self.values = queries, keys, values

    @classmethod
    def drawn(cls, seed, vocab, length, dim, head_dim, heads, size=2):
        shapes = ((vocab, dim), (length, dim), (heads, dim), (heads, dim), (heads, head_dim, dim))
        parts = []
        for i, shape in enumerate(shapes):
            g = torch.Generator().manual_seed(seed + i)
            parts.append(torch.randint(-size, size + 1, shape, generator=g).tolist())
        return cls(*parts)

    def embedded(self, sequence):
        return [
            [a + b for a, b in zip(self.embedding[token], place, strict=True)]
            for token, place in zip(sequence, self.positions, strict=True)
        ]

    def offers(self, sequence):
        """``[x(t, S); W_V^1 A^1(t); ...]``, as fractions."""
        x = self.embedded(sequence)
        row = [Fraction(entry) for entry in x[-1]]
        for q, k, V in zip(self.queries, self.keys, self.values, strict=True):
            asked = dot(q, x[-1])
            logits = [asked * dot(k, token) for token in x]
            assert all(Fraction(logit).denominator == 1 for logit in logits)
            A = averages(softmax2(logits), rows_of(x))
            row += [dot(line, A) for line in V]
        return row

    def offered(self, sequences):
        return [self.offers(sequence) for sequence in sequences]

    def weights(self, W_O=None, W_U=None):
        """The same tensors as for a softmax in base e, in the order of the library's fields."""
        W_V = torch.tensor(self.values, **F64)
        W_Q, W_K = torch.zeros_like(W_V), torch.zeros_like(W_V)
        W_Q[:, 0] = math.log(2) * torch.tensor(self.queries, **F64)
        W_K[:, 0] = torch.tensor(self.keys, **F64)
        embedding = torch.tensor(self.embedding, **F64)
        W_O = torch.zeros_like(W_V.mT) if W_O is None else W_O
        W_U = embedding if W_U is None else W_U
        positions = torch.tensor(self.positions, **F64)
        return embedding, positions, W_Q, W_K, W_V, W_O, W_U


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
