"""Layers one after the other against a plain loop; counts against exact ranks, modulo a prime.

Exponentials of different logits are algebraically independent of each other and of the weights (if
Schanuel's conjecture holds), and so are random numbers modulo a prime, but for a small chance. The
derivative is taken forwards, one direction for each weight, and shares nothing with the library.
"""

import itertools
import random

import numpy as np
import pytest
import torch

from attnmem import deep, random_deep
from attnmem.core import bounds
from attnmem.theory.tangents import deep_tangents, jacobian

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
def test_the_count_of_layers_is_the_exact_rank():
    """Narrow layers and wide ones, with full and with causal attention to three tokens, or two."""
    cases = zip(SIZES, itertools.cycle((False, True)), itertools.cycle((3, 3, 2)))
    for (heads, *widths, outputs, skip), causal, n in cases:
        count = bounds.deep_ceiling(heads, *widths, outputs=outputs, skip=skip)
        options = {"outputs": outputs, "skip": skip, "causal": causal}
        found = rank_of_layers(heads, *widths, n, count + 2, **options)
        assert found == count, (heads, widths, n, options)


def narrow(draw):
    """A size without skip connections at random, more outputs than dimensions included."""
    heads = [draw.choice((1, 1, 2, 3)) for _ in range(draw.choice((2, 3, 3, 4)))]
    return (heads, *(draw.randint(1, most) for most in (3, 3, 5))), draw.choice((1, 2, 6))


@pytest.mark.hostile("mahdavi-finding-depth-bare")
def test_the_count_without_skip_connections_is_the_exact_rank_of_three_tokens():
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
def test_two_tokens_show_all_but_what_moves_no_logit_of_theirs():
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


def test_with_several_outputs_fewer_labels_than_the_count_may_be_dependent():
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


def test_at_depth_several_outputs_have_the_rank_of_the_least_bound():
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


def test_several_outputs_at_depth_have_the_ranks_that_are_proved():
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


def test_several_outputs_of_one_layer_have_the_rank_of_their_bound():
    """Between the thresholds of the proposition."""
    sizes = [(1, 2, 2, 4, 4), (3, 2, 2, 4, 4), (2, 3, 2, 4, 1), (5, 2, 2, 3, 3), (1, 3, 3, 4, 2)]
    sizes += [(2, 4, 2, 4, 4), (2, 4, 2, 5, 3), (3, 5, 2, 5, 5)]  # few numbers of attention
    for H, o, n, d, d_h in [*sizes, (1, 4, 2, 4, 1), (1, 3, 2, 5, 5), (1, 2, 2, 2, 2)]:
        w = d_h * (2 * d - d_h)
        low, high = (H * d + shared * w for shared in (H // o, -(-H // o)))
        for T in {low + 1, (low + high) // 2, high - 1}:
            full = bounds.deep_ceiling((H,), d_h, o, d, outputs=o, skip=False)
            bound = min(o * T, full, o * H * d + H * max(0, (n - 1) * T - H + 1))
            assert rank_of_layers((H,), d_h, o, d, n, T, outputs=o, skip=False) == bound, (H, o, T)


@pytest.mark.parametrize("causal", [False, True])
def test_a_label_at_every_position_counts_like_an_example(causal):
    """But for first tokens that see only themselves; few sequences and many, long and short."""
    sizes = [(1, 1, 1), (3, 1, 1), (1, 2, 1), (2, 2, 3), (1, 3, 3), (2, 3, 1), (1, 5, 2), (3, 4, 2)]
    for (H, d, d_h), n in itertools.product(sizes, (2, 3, 8)):
        P = bounds.own_context_ceiling(H, d_h, d)
        for T in {1, d, d + 1, P // n, P // n + 1, (P - d) // (n - 1), (P - d) // (n - 1) + 1} - {
            0
        }:
            rows = (n - 1) * T + min(T, d) if causal else n * T
            options = {"skip": False, "causal": causal, "everywhere": True}
            found = rank_of_layers((H,), d_h, 1, d, n, T, **options)
            assert found == min(rows, P), (H, d, d_h, n, T)


F64 = {"dtype": torch.float64}
KINDS = list(itertools.product([True, False], [True, False]))  # skip, causal


def plain(weights, tokens, skip, causal):
    """One example, one head, one query and one key at a time."""
    outputs = []
    for x in tokens:
        x = [*x]
        for W_Q, W_K, W_V, W_O in weights.layers:
            after = []
            for i, query in enumerate(x):
                keys = x[: i + 1] if causal else x
                y = query if skip else torch.zeros_like(query)
                for Q, K, V, O in zip(W_Q, W_K, W_V, W_O, strict=True):
                    powers = [torch.exp((query @ Q) @ (key @ K)) for key in keys]
                    for power, key in zip(powers, keys, strict=True):
                        y = y + power / sum(powers) * (key @ V @ O)
                after.append(y)
            x = after
        outputs.append(x[-1] @ weights.W_D)
    return torch.stack(outputs)


def network(heads, d_h, d_v, d, n, examples, *, outputs=1, seed=0, logits=2.0, values=1.5):
    """Weights with logits and values that are not small, and random tokens."""
    g = torch.Generator().manual_seed(seed)
    weights = random_deep(heads, d_h, d_v, d, g, outputs=outputs, logits=logits, values=values)
    return weights, 1.2 * torch.randn(examples, n, d, generator=g, **F64)


@pytest.mark.parametrize(("skip", "causal"), KINDS)
def test_outputs_and_derivative_are_those_of_a_plain_loop(skip, causal):
    weights, tokens = network((2, 1), 2, 3, 5, 3, 4, outputs=2)
    wanted = plain(weights, tokens, skip, causal)
    torch.testing.assert_close(deep(weights, tokens, skip=skip, causal=causal), wanted)

    def outputs(*tensors):
        return plain(weights.like(tensors), tokens, skip, causal).flatten()

    parts = torch.autograd.functional.jacobian(outputs, weights.tensors)
    J = torch.cat([part.flatten(1) for part in parts], 1)
    torch.testing.assert_close(jacobian(weights, tokens, skip=skip, causal=causal), J)

    if skip and not causal:
        at = deep_tangents(weights._replace(W_D=weights.W_D[:, :1]), tokens)
        torch.testing.assert_close(at.outputs, wanted[:, 0])
        first = torch.cat([J[::2, :-10], J[::2, -10::2]], 1)  # of the first output alone
        torch.testing.assert_close(at.gram(), first @ first.T)
        rows = torch.arange(4.0, **F64)
        flat = torch.cat([W.flatten() for W in at.transposed(rows).tensors])
        torch.testing.assert_close(flat, rows @ first)


def test_one_head_a_layer_without_skip_has_the_dimension_of_the_known_conjecture():
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
def test_sizes_that_no_network_has_are_refused_by_name(name, change):
    sizes = {"heads": [2, 1], "head_dim": 2, "value_dim": 2, "dim": 3}
    with pytest.raises(ValueError, match=f"^{name}: got"):
        bounds.deep_ceiling(**(sizes | change))
