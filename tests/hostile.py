"""Hostile instances: the data on which a theorem is likeliest to break.

Every function is pure, and yields or returns small instances under names. Data are integers
wherever the statement allows it, so that ranks are exact. Sizes are pairwise distinct primes where
a swapped axis could pass.
"""

import itertools
from fractions import Fraction
from typing import NamedTuple

import torch


class Examples(NamedTuple):
    """Contexts, own ``(T, n, d)`` or shared ``(n, d)``, and queries ``(T, d)``: integers."""

    contexts: torch.Tensor
    queries: torch.Tensor

    def double(self):
        """The same numbers, for the library."""
        return Examples(self.contexts.double(), self.queries.double())


def integers(seed, *shape, size=3):
    """Integers from ``-size`` to ``size``, uniform."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-size, size + 1, shape, generator=generator)


# H, n, d, d_h: one of each is as small or as large as the theorem of Mahdavi et al. allows.
SIZES = {
    "one head": (1, 3, 7, 5),
    "one token": (3, 1, 2, 5),
    "two tokens in the plane of three": (5, 2, 3, 7),
    "n = d - 1": (2, 4, 5, 7),
    "width one": (5, 3, 7, 1),
    "width below n": (3, 5, 7, 2),
    "width d": (2, 3, 5, 5),
}


def capacity(H, n, d_h):
    """What Theorem 1 of Mahdavi et al. promises, by counting: one, and ``r - 1`` for each head."""
    return 1 + sum(min(n, d_h) - 1 for _ in range(H))


def moments(count, rank, dim):
    """``count`` vectors of Kruskal rank exactly ``rank``, in a linear space of that dimension.

    ``(1, s, s^2, ...)`` at different integers ``s`` of least size (Vandermonde), behind zeros, in
    coordinates that are mixed by a triangle of ones. They lie on a flat off the origin, too.
    """
    s = torch.tensor([(i + 1) // 2 * (-1) ** i for i in range(count)])
    vectors = torch.zeros(count, dim, dtype=torch.int64)
    vectors[:, :rank] = s[:, None] ** torch.arange(rank)
    return vectors @ torch.ones(dim, dim, dtype=torch.int64).triu()


def contexts(count, n, d):
    """Named contexts of rank ``n <= d - 1``, as Assumption 2 asks, and hardly more."""
    one_hot = torch.eye(d, dtype=torch.int64)[:n]
    yield "one-hot, shared", one_hot
    yield "one-hot, own and all equal", one_hot.repeat(count, 1, 1)
    own = one_hot.repeat(count, 1, 1)
    yield "the tokens in every order", torch.stack([E.roll(t, 0) for t, E in enumerate(own)])
    last = own.clone()
    last[:, -1, d - 1] = torch.arange(count)
    yield "all tokens but one are shared", last
    rest = torch.ones(n, d, dtype=torch.int64)
    yield "nearly equal tokens, shared", 2**10 * rest + one_hot
    yield "corners of a cube, of constant sum, shared", 2 * one_hot - 1
    scaled = one_hot * 2 ** torch.arange(0, 10 * n, 10)[:n, None]
    yield "lengths from 1 to 2^10 and more, own", scaled.repeat(count, 1, 1) + last - own


def admissible():
    """Named examples and sizes where Theorem 1's hypotheses just hold, at its full count.

    Every context has rank ``n``, the queries have Kruskal rank exactly ``n``, and ``T`` is the
    capacity.
    """
    for size, (H, n, d, d_h) in SIZES.items():
        T = capacity(H, n, d_h)
        for name, E in contexts(T, n, d):
            yield f"{size}; {name}", (H, n, d, d_h), Examples(E, moments(T, n, d))


def inadmissible():
    """Named examples at ``H = 2, n = 3, d = 5, d_h = 3`` that miss one hypothesis by the least.

    With each comes the argument that is to be named.
    """
    E, e = torch.eye(5, dtype=torch.int64)[:3], moments(5, 3, 5)
    own = E.repeat(5, 1, 1)
    yield "queries of Kruskal rank n - 1", "queries", Examples(E, moments(5, 2, 5))
    again = e.clone()
    again[2] = -3 * again[1]
    yield "two queries on one line", "queries", Examples(own, again)
    yield "one query zero", "queries", Examples(own, e * (torch.arange(5) != 4)[:, None])
    poor = own.clone()
    poor[4, 2] = poor[4, 0] + poor[4, 1]
    yield "one context of rank n - 1", "contexts", Examples(poor, e)
    collinear = torch.arange(1, 4)[:, None] * torch.ones(1, 5, dtype=torch.int64)
    yield "collinear tokens", "contexts", Examples(collinear, e)
    yield "a repeated token", "contexts", Examples(E[[0, 1, 1]], e)
    yield "n = d", "contexts", Examples(torch.eye(5, dtype=torch.int64), e)
    yield "one example too many", "labels", Examples(E, moments(6, 3, 5))


def flats(d):
    """Named finite sets of tokens in ``R^d``, on flats through the origin and off it.

    Integers; some repeat, some are collinear.
    """
    eye = torch.eye(d, dtype=torch.int64)
    ones = torch.ones(1, d, dtype=torch.int64)
    yield "the origin", 0 * ones
    yield "one point, three times", ones.repeat(3, 1)
    yield "a point and its negative", torch.cat([ones, -ones])
    yield "a line through the origin", torch.arange(1, 4)[:, None] * ones
    if d > 1:
        yield "a line off the origin", torch.arange(-1, 3)[:, None] * eye[:1] + eye[1:2]
        yield "one-hot", eye
        yield "one-hot, one of them twice", torch.cat([eye, eye[-1:]])
        yield "sum zero", eye - eye.roll(1, 0)
    yield "one more than a basis", torch.cat([eye, 0 * ones])
    yield "the cube", torch.cartesian_prod(*[torch.arange(2)] * d).reshape(-1, d)


def constant_sum(d, total, size=2):
    """All integer points with entries up to ``size`` whose coordinates have the sum ``total``."""
    points = itertools.product(range(-size, size + 1), repeat=d)
    return torch.tensor([point for point in points if sum(point) == total])


def maps(seed, heads, dim, head_dim):
    """Integer maps ``W`` of heads, ``(H, d, d)``, each of rank at most ``head_dim``."""
    left = integers(seed, heads, dim, head_dim)
    return left @ integers(seed + 1, heads, head_dim, dim)


def matrices(rows, columns, entries=(-1, 0, 1)):
    """All matrices of a small shape over a few integers."""
    for flat in itertools.product(entries, repeat=rows * columns):
        yield [list(flat[i * columns : (i + 1) * columns]) for i in range(rows)]


def labelings(count, labels=2):
    """All ways to label so many examples."""
    return itertools.product(range(labels), repeat=count)


def every_sequence(vocab, length):
    """All sequences, ``(N^S, S)``."""
    return torch.tensor(list(itertools.product(range(vocab), repeat=length)))


def parity(bits, last=0):
    """All rows of ``bits`` zeros and ones behind one fixed last token, and their parities."""
    sequences = every_sequence(2, bits)
    tokens = torch.cat([sequences, torch.full((len(sequences), 1), last)], dim=1)
    return tokens, sequences.sum(dim=1) % 2


def lattice_distributions(vocab, parts, zeros=True):
    """All distributions over ``vocab`` tokens in multiples of ``1 / parts``."""
    for counts in itertools.product(range(0 if zeros else 1, parts + 1), repeat=vocab):
        if sum(counts) == parts:
            yield [Fraction(count, parts) for count in counts]


def dyadic_distributions(vocab):
    """Distributions of powers of two, whose logarithms in base 2 are integers.

    The first has ``2^-1, ..., 2^-(N-1)`` and its last entry twice; the others rotate it.
    """
    base = [Fraction(1, 2**k) for k in range(1, vocab)]
    base.append(base[-1] if base else Fraction(1))
    for turn in range(vocab):
        yield [*base[turn:], *base[:turn]]


def frames():
    """Named unembeddings with ``max |W W^T - I| < 1/2``, float64, their rows of several lengths."""
    f64 = {"dtype": torch.float64}
    for N in (2, 3, 5):
        yield f"orthonormal, N = {N}", torch.eye(N, **f64)
    signs = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], **f64)
    yield "tetrahedron", signs / 3**0.5
    for C in (0.125, 0.375, 0.4921875):
        rows = torch.eye(3, **f64)
        rows[1, 0], rows[2, 0] = C, -C  # as near to the first, and as far from it, as C allows
        yield f"near and far, C = {C}", rows / rows.norm(dim=1, keepdim=True)
        lengths = torch.tensor([1 - C, 1 + C, 1.0], **f64).sqrt()
        yield f"rows too short and too long, C = {C}", torch.eye(3, **f64) * lengths[:, None]
        yield f"the other way round, C = {C}", torch.eye(3, **f64) * lengths.flip(0)[:, None]
