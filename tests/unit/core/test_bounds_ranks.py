"""The counts of layers one after the other against exact ranks, modulo a prime.

Exponentials of different logits are algebraically independent of each other and of the weights (if
Schanuel's conjecture holds), and so are random numbers modulo a prime, but for a small chance. The
derivative is taken forwards, one direction for each weight, and shares nothing with the library.
"""

import itertools
import random

import numpy as np
import pytest
import torch

from attnmem.core import bounds

import oracles
from oracles import PRIME, product, rank_modulo, shares, through, written


def rank_of_layers(
    heads, d_h, d_v, d, n, T, *, outputs=1, skip=True, causal=False, everywhere=False
):
    """The rank of the derivative of layers one after the other, at random weights and tokens.

    Of the outputs of the last token, or *everywhere*, at each.
    """
    g = np.random.default_rng(0)

    def draw(*shape):
        return g.integers(1, PRIME, shape)

    layers = [
        [draw(*shape) for _ in range(H) for shape in ((d, d_h), (d, d_h), (d, d_v), (d_v, d))]
        for H in heads
    ]
    W_D = draw(d, outputs)
    weights = sum(W.size for layer in layers for W in layer) + W_D.size
    seen = np.tril(np.ones((n, n), np.int64)) if causal else 1
    columns = iter(range(weights))

    X, dX = draw(T, n, d), np.zeros((T, weights, n, d), np.int64)  # of each example
    for layer in layers:
        new, d_new = (X, dX) if skip else (0 * X, 0 * dX)
        for maps in zip(*(layer[kind::4] for kind in range(4)), strict=True):
            powers = draw(T, n, n)
            if d == 1:  # a logit is a number times both tokens
                powers = np.tril(powers) + np.tril(powers, -1).swapaxes(1, 2)
            read, changed = written(X, dX, maps, shares(powers * seen), columns)
            new, d_new = (new + read) % PRIME, (d_new + changed) % PRIME
        X, dX = new, d_new
    changes = through(X, dX, W_D, columns)[1]
    changes = changes.transpose(0, 2, 3, 1)  # example, token, output, weight
    return rank_modulo((changes if everywhere else changes[:, -1]).reshape(-1, weights))


# d_h, d_v, d
WIDTHS = [(1, 1, 3), (1, 2, 3), (2, 1, 3), (2, 3, 4), (2, 4, 5), (1, 2, 6), (1, 4, 6)]
KINDS_OF_OUTPUT = itertools.cycle(((1, False), (2, False), (1, True)))  # outputs, skip
SIZES = [
    (heads, *widths, *next(KINDS_OF_OUTPUT))
    for heads in ((1, 1), (2, 1), (1, 2), (1, 1, 1))
    for widths in WIDTHS
]


SIZES += [  # few narrow heads: what later layers do not read is lost
    ((1, 1, 1), 1, 2, 9, 1, True),
    ((1, 1, 1, 1), 1, 1, 9, 2, True),
    ((1, 3, 1), 2, 1, 5, 2, False),
    ((1, 1, 1, 1), 3, 4, 4, 1, False),
    ((4, 4, 4), 1, 1, 1, 1, True),  # d = 1
    ((2, 2, 1), 1, 2, 4, 1, False),  # H d_v = d: values in complementary spaces
    ((2, 3), 1, 4, 7, 1, False),  # values of two heads share one dimension
]


@pytest.mark.hostile("mahdavi-finding-depth", "mahdavi-finding-depth-bare")
def test_deep_ceiling_is_the_exact_rank():
    """Narrow layers and wide ones, with full and with causal attention to three tokens, or two."""
    cases = zip(SIZES, itertools.cycle((False, True)), itertools.cycle((3, 3, 2)))
    for (heads, *widths, outputs, skip), causal, n in cases:
        count = bounds.deep_ceiling(heads, *widths, outputs=outputs, skip=skip)
        options = {"outputs": outputs, "skip": skip, "causal": causal}
        exact = rank_of_layers(heads, *widths, n, count + 2, **options)
        assert exact == count, (heads, widths, n, options)


def narrow(draw):
    """A size without skip connections at random, more outputs than dimensions included."""
    heads = [draw.choice((1, 1, 2, 3)) for _ in range(draw.choice((2, 3, 3, 4)))]
    return (heads, *(draw.randint(1, most) for most in (3, 3, 5))), draw.choice((1, 2, 6))


@pytest.mark.hostile("mahdavi-finding-depth-bare")
def test_deep_ceiling_without_skip_is_the_exact_rank():
    draw, tried = random.Random(2711), 0
    while tried < 40:
        size, outputs = narrow(draw)
        count = bounds.deep_ceiling(*size, outputs=outputs, skip=False)
        if 10 < count < 70:
            options = {"outputs": outputs, "skip": False, "causal": draw.random() < 0.5}
            assert rank_of_layers(*size, 3, count + 2, **options) == count, (size, options)
            tried += 1


def widths(heads, d_h, d_v, d, outputs):
    """Dimensions that layers without skip connections write and the next ones read, the largest."""
    e, last = [d, *[min(d, outputs)] * len(heads)], None
    e[1:-1] = [d] * (len(heads) - 1)
    while e != last:
        last = e.copy()
        for at, H in enumerate(heads, 1):
            e[at] = min(e[at], H * min(d_v, e[at - 1]))
        for at, H in enumerate(heads[1:], 1):
            e[at] = min(e[at], H * (2 * min(d_h, e[at]) + min(d_v, e[at], e[at + 1])))
    return e


def unseen(heads, d_h, d_v, d, outputs, causal):
    """Changes of all logit matrices that move no logit of two tokens, with any attention before."""
    g = np.random.default_rng(1)
    e, lost = widths(heads, d_h, d_v, d, outputs), 0
    x, delta = g.integers(1, PRIME, (2, 2 * d * d + 8, d))
    for H, m, after in zip(heads, e, e[1:], strict=False):
        Q, K = g.integers(1, PRIME, (2, m, min(d_h, m)))
        turns = [np.kron(np.eye(m, dtype=int), K), np.kron(Q, np.eye(m, dtype=int))]
        tangent = np.concatenate(turns, 1)  # to the matrices of rank d_h, at Q K^T
        asked = [x + delta] if causal else [x, x + delta]
        logits = np.concatenate([t[:, :, None] % PRIME * delta[:, None] % PRIME for t in asked])
        seen = rank_modulo(product(logits.reshape(-1, m * m), tangent))
        lost += H * (len(Q[0]) * (2 * m - len(Q[0])) - seen)
        new = np.zeros((2, len(x), after), int)
        for _ in range(H):
            V, O = (g.integers(1, PRIME, s) for s in ((m, min(d_v, m)), (min(d_v, m), after)))
            u, t = g.integers(1, PRIME, (2, len(x), 1)) * [[[1]], [[not causal]]]
            M = product(V, O)
            new += [product(x, M) + t * product(delta, M), u * product(delta, M) % PRIME]
        x, delta = new % PRIME
    return lost


@pytest.mark.hostile("mahdavi-finding-depth-bare")
def test_deep_ceiling_without_skip_two_tokens():
    """So they show all where no layer before the last writes more dimensions than are read."""
    draw, known = random.Random(2711), {((1, 2, 1), 4, 2, 4, 1): 2, ((1, 3, 1), 6, 2, 6, 2): 6}
    for size, lost in known.items():
        assert unseen(*size, causal=False) == lost
    tried = [0, 0]  # none is lost, some are
    while min(tried) < 12:
        (heads, *size), outputs = narrow(draw)
        size, causal = [size[0] + 2, *size[1:]], draw.random() < 0.7
        count = bounds.deep_ceiling(heads, *size, outputs=outputs, skip=False)
        lost = unseen(heads, *size, outputs, causal)
        if tried[lost > 0] < 12 and 10 < count < 90:
            e = widths(heads, *size, outputs)[:-1]
            assert not lost or e != sorted(e, reverse=True)
            options = {"outputs": outputs, "skip": False, "causal": causal}
            found = rank_of_layers(heads, *size, 2, count + 2, **options)
            assert found == count - lost, (heads, size, options)
            tried[lost > 0] += 1


def test_deep_ceiling_several_outputs_few_examples():
    """With one output T examples have rank min(T, P)."""
    for outputs, ranks in ((1, [12, 15, 30]), (4, [36, 42, 54])):
        found = [rank_of_layers((1, 1), 2, 1, 4, 2, T, outputs=outputs) for T in (12, 15, 30)]
        assert found == ranks
        assert bounds.deep_ceiling((1, 1), 2, 1, 4, outputs=outputs) == {1: 39, 4: 54}[outputs]


def least_bound(heads, d_h, d_v, d, n, T, outputs):
    """The least of the bounds for several outputs at depth."""
    o, r = min(outputs, d), min(d_h, d)
    bounds_of_it = [o * T]
    for layer in range(len(heads) + 1):
        numbers = min(d_v, d) * sum(heads[layer:])
        left = o - numbers
        if left > 0:
            below = heads[:layer]
            count = bounds.deep_ceiling(below, d_h, d_v, d, outputs=left) if below else left * d
            short = max(0, r * (2 * d - r) + 1 - (n - 1) * T)  # of each head's attention
            count -= sum(below[-1:]) * short
            bounds_of_it.append((o - left) * T + left * numbers + count)
    return min(bounds_of_it) + max(0, outputs - d) * min(T, d)


def test_several_outputs_have_the_least_bound():
    """Few narrow heads, more outputs than dimensions, wide values on two tokens, causal or not."""
    sizes = [
        ((1, 1), 2, 1, 4, 2, 4),
        ((1, 1), 3, 1, 8, 2, 2),  # outputs of the first layer's head saturate first
        ((1, 2, 1), 1, 1, 6, 3, 5),
        ((2, 1), 1, 2, 5, 3, 6),
        ((1, 1), 2, 1, 3, 2, 6),  # o > d
        ((1, 1, 1, 1), 1, 1, 5, 2, 5),
        ((3,), 1, 1, 1, 2, 4),  # d = 1
        ((1,), 4, 4, 4, 2, 4),  # too little attention
        ((1,), 3, 3, 7, 2, 4),
        ((2,), 3, 3, 6, 2, 7),
    ]
    binding = 0
    for (*size, n, outputs), causal in zip(sizes, itertools.cycle((False, True)), strict=False):
        steps = np.diff([least_bound(*size, n, T, outputs) for T in range(150)])
        turns = {T + k for T in np.flatnonzero(np.diff(steps)) for k in (1, 2)}
        for T in turns:
            found = rank_of_layers(*size, n, T, outputs=outputs, causal=causal)
            assert found == least_bound(*size, n, T, outputs), (size, n, T, outputs, causal)
            binding += found < min(outputs * T, bounds.deep_ceiling(*size, outputs=outputs))
    assert binding > 15


def test_several_outputs_have_the_proved_ranks():
    """All labels of few examples, and all parameters from as many as one output would show."""
    for heads, d_h, d_v, d, o in [
        ((1, 1), 2, 1, 4, 4),
        ((2, 1), 1, 3, 5, 3),
        ((1, 2), 4, 5, 5, 8),
        ((3, 4), 2, 2, 5, 2),
        ((2, 3), 4, 1, 4, 3),
    ]:
        count = bounds.deep_ceiling(heads, d_h, d_v, d, outputs=o)
        widths = [(d, d_h), (d - o, min(d_h, d - o))]
        w, w_beside = (r * (2 * m - r) for m, r in widths)
        few = d if o <= d else 0
        if o <= min(d_v, d):
            few = max(few, d * (1 + heads[-1]) + heads[-1] // o * w)
        if o < d:
            few = max(few, sum(heads) // o * (w_beside + d - o))
        many = min(bounds.deep_ceiling(heads, d_h, d_v, d), count - (o - 1) * few)
        for T, rank_there in ((few, o * few), (many, count)):
            if T:
                assert rank_of_layers(heads, d_h, d_v, d, 2, T, outputs=o) == rank_there


def test_several_outputs_of_one_layer():
    """Between the thresholds of the proposition."""
    sizes = [(1, 2, 2, 4, 4), (3, 2, 2, 4, 4), (2, 3, 2, 4, 1), (5, 2, 2, 3, 3), (1, 3, 3, 4, 2)]
    sizes += [(2, 4, 2, 4, 4), (2, 4, 2, 5, 3), (3, 5, 2, 5, 5)]  # few numbers of attention
    for H, o, n, d, d_h in [*sizes, (1, 4, 2, 4, 1), (1, 3, 2, 5, 5), (1, 2, 2, 2, 2)]:
        w = d_h * (2 * d - d_h)
        low, high = (H * d + shared * w for shared in (H // o, -(-H // o)))
        for T in {low + 1, (low + high) // 2, high - 1}:
            bound = min(o * T, o * H * d + H * min(w, max(0, (n - 1) * T - H + 1)))
            assert rank_of_layers((H,), d_h, o, d, n, T, outputs=o, skip=False) == bound, (H, o, T)


@pytest.mark.parametrize("causal", [False, True])
def test_labels_at_every_position_count_as_examples(causal):
    """But for first tokens that see only themselves; few sequences and many, long and short."""
    sizes = [(1, 1, 1), (3, 1, 1), (1, 2, 1), (2, 2, 3), (1, 3, 3), (2, 3, 1), (1, 5, 2), (3, 4, 2)]
    for (H, d, d_h), n in itertools.product(sizes, (2, 3, 8)):
        r = min(d_h, d)
        P = H * (r * (2 * d - r) + d)
        for T in {1, d, d + 1, P // n, P // n + 1, (P - d) // (n - 1), (P - d) // (n - 1) + 1} - {
            0
        }:
            rows = (n - 1) * T + min(T, d) if causal else n * T
            options = {"skip": False, "causal": causal, "everywhere": True}
            found = rank_of_layers((H,), d_h, 1, d, n, T, **options)
            assert found == min(rows, P), (H, d, d_h, n, T)


def rank_of_offers(pairs, heads, head_dim, dim):
    """The rank of what a layer offers on bigrams: the last token, and what each head attends to."""
    g = np.random.default_rng(0)
    first, last = pairs.T
    tokens, at = g.integers(0, PRIME, (pairs.max() + 1, dim)), g.integers(0, PRIME, (2, dim))
    starts, ends = tokens[first] + at[0], tokens[last] + at[1]
    blocks = [ends]
    for _ in range(heads):
        share = g.integers(0, PRIME, (len(tokens),) * 2)[first, last, None]
        attended = (ends + share * (starts - ends)) % PRIME
        blocks.append(product(attended, g.integers(0, PRIME, (dim, head_dim))))
    return rank_modulo(np.concatenate(blocks, axis=1))


@pytest.mark.hostile("dana-finding-told-apart")
def test_subset_bound_is_the_exact_rank_of_bigrams():
    drawn = [torch.randperm(25, generator=torch.Generator().manual_seed(s))[:8] for s in range(9)]
    sets = [torch.stack([codes // 5, codes % 5], 1) for codes in drawn]
    sets += [torch.cartesian_prod(torch.arange(k), torch.arange(m)) for k, m in ((3, 3), (2, 5))]
    binding = 0
    for pairs in sets:
        for heads, dim in itertools.product((1, 2, 3), (2, 3, 6)):
            for head_dim in {1, 2, dim}:
                exact = rank_of_offers(pairs.numpy(), heads, head_dim, dim)
                found = oracles.subset_rank(pairs, heads, head_dim, dim)
                assert found == exact, (pairs.tolist(), heads, head_dim, dim)
                binding += found < len(pairs)
    assert binding > 100


def test_deep_ceiling_is_the_conjectured_dimension():
    """L layers, logits of rank a, square values, outputs: L (a (2d - a) + d^2) - (L - 1) d^2."""
    for L, d in itertools.product(range(1, 5), range(1, 7)):
        for a in range(1, d + 1):
            known = L * (a * (2 * d - a) + d * d) - (L - 1) * d * d
            assert bounds.deep_ceiling([1] * L, a, d, d, outputs=d, skip=False) == known


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("heads", {"heads": []}),
        (r"heads\[1\]", {"heads": [2, 0]}),
        (r"heads\[0\]", {"heads": [2.5]}),
        ("head_dim", {"head_dim": 0}),
        ("value_dim", {"value_dim": -1}),
        ("dim", {"dim": 0}),
        ("outputs", {"outputs": 0}),
    ],
)
def test_deep_ceiling_refuses_sizes_by_name(name, change):
    sizes = {"heads": [2, 1], "head_dim": 2, "value_dim": 2, "dim": 3}
    with pytest.raises(ValueError, match=f"^{name}: got"):
        bounds.deep_ceiling(**(sizes | change))
