"""Several layers meet what the floor promises, as a plain forward pass sees them."""

import itertools
import math

import numpy as np
import pytest
import torch

from attnmem import random_deep
from attnmem.core import bounds
from attnmem.theory.depth import memorize_by_depth
from attnmem.theory.solutions import certified_deep_solution

from oracles import PRIME, gaussian, partitions, product, rank_modulo, shares, written

F64 = {"dtype": torch.float64}


# --- the floor ------------------------------------------------------------------------------------


def rho(k, m, d_h):
    """The rank of a group of k heads in m dimensions, written out."""
    r, p = min(d_h, m), min(k - 1, m)
    missed = math.comb(p, 2) * r + math.comb(max(p - m + r, 0), 2) * (m - r)
    return p * r * (2 * m - r) - missed + m


def count(first, second, c, d, d_h):
    """The number of labels of two layers that carry c dimensions."""
    e = d - 1 - c

    def kappa(k):
        p = max(p for p in range(0, d + 1, 2) if p <= k - 1)
        return (p + 1) * d - p * (p - 1) // 2

    carried = sum(rho(k, d, d_h) + c * kappa(k) for k in first)
    return carried + sum(rho(k, e, d_h) for k in second) + d - 1


def parts(heads, G):
    """All ways to put each layer's heads into G groups that have heads in every layer."""
    ways = ([p for p in partitions(H) if len(p) == G] for H in heads)
    return itertools.product(*({*itertools.chain(*map(itertools.permutations, w))} for w in ways))


def spanned(sizes, d, d_h, d_v):
    """The most labels of groups that span the layers, of three tokens or more."""
    m, G = d - 1, len(sizes[0])
    r = min(d_h, m)
    total = m + sum(rho(sum(group), m, d_h) for group in zip(*sizes, strict=True))
    written = [[min(a * d_v, m) for a in layer] for layer in sizes]
    read = min(m, 2 * r * G)

    def carried(layers):
        """0 if a group has no heads in some part of the stack, cut at these layers."""
        ends = [-1, *layers, len(sizes) - 1]
        parts = [sizes[i + 1 : j + 1] for i, j in itertools.pairwise(ends)]
        if not all(any(layer[g] for layer in part) for part in parts for g in range(G)):
            return 0
        groups = [sum(written[i][g] for i in layers) for g in range(G)]
        return sum(read * k + min(G, m - read) * min(m, k) for k in groups)

    most = 0 if m == 1 else m if r * G >= m else m - r + 1
    numbers = range(min(most, len(sizes) - 1) + 1)
    cuts = (cut for k in numbers for cut in itertools.combinations(range(len(sizes) - 1), k))
    return total + max(map(carried, cuts))


def within(heads, d, d_h, d_v, cap):
    """The most labels of groups that stay within one of two layers."""
    return max(
        count(first, second, c, d, d_h)
        for first in partitions(heads[0], cap)
        for second in partitions(heads[1], cap)
        for c in range(min(d_v - 1, d - 2, len(second)) + 1)
    )


def one_layer(heads, m, d_h, cap=99):
    return max(sum(rho(k, m, d_h) for k in groups) for groups in partitions(heads, cap))


@pytest.mark.parametrize("d", [2, 3, 5, 6])
@pytest.mark.parametrize(
    "heads", [(1, 1), (1, 6), (7, 1), (4, 3), (9, 4), (5, 8), (2, 4, 3), (1, 1, 1, 1)]
)
def test_floor_is_the_best_of_all_groupings(heads, d):
    widths = {1, 2, 7, max(1, d - 2)}  # with d - 2 fewer layers count than there are
    for d_h, d_v, cap in itertools.product(widths, (1, 2, 4, 9), (99, 1, 2, 3)):
        best = one_layer(sum(heads), d - 1, d_h, cap) + d - 1
        pairs = itertools.combinations(heads, 2)
        best = max(best, *(within(pair, d, d_h, d_v, cap) for pair in pairs))
        best = max(best, one_layer(heads[-1], d, d_h, cap) + d - 1)
        two_tokens = best
        groups = bounds.deep_groups(heads, d_h, d_v, d, context=2, most=cap)
        assert groups.labels == two_tokens
        assert all(sum(layer) in (0, H) for layer, H in zip(groups.sizes, heads, strict=True))
        groups = bounds.deep_groups(heads, d_h, d_v, d, most=cap)
        if groups.carried is None and all(map(any, groups.sizes)):
            assert max(map(sum, zip(*groups.sizes, strict=True))) <= cap
            assert two_tokens <= groups.labels <= spanned(groups.sizes, d, d_h, d_v)
        else:
            assert groups.labels == two_tokens
        if math.prod(heads) < 30 or cap < 99:  # groups with heads in every layer
            for G in range(1, min(heads) + 1):
                for sizes in parts(heads, G):
                    if max(map(sum, zip(*sizes, strict=True))) <= cap:
                        assert spanned(sizes, d, d_h, d_v) <= groups.labels
        if cap == 99:
            floor = bounds.deep_floor(heads, d_h, d_v, d)
            assert floor <= bounds.deep_ceiling(heads, d_h, d_v, d)
            for more in ((1, *heads), (*heads, 1), (heads[0] + 1, *heads[1:])):
                assert floor <= bounds.deep_floor(more, d_h, d_v, d)


def test_the_whole_stack_of_a_usual_model_beats_one_layer_of_its_heads():
    """Not with two layers of full width; with two of GPT-2's, just."""
    for heads, d, d_h, floor in (
        ((12, 12), 768, 64, 2_286_713),
        ((12,) * 12, 768, 64, 19_370_873),
        ((16,) * 24, 1024, 64, 71_244_279),
        ((6,) * 12, 384, 64, 4_670_780),
        ((32,) * 32, 4096, 128, 1_556_228_079),
        ((*(12,) * 12, 1), 768, 64, 19_463_481),
        ((8, 8), 64, 64, 64_071),
        ((8,) * 3, 64, 64, 127_071),
        ((1,) * 8, 64, 64, 54_369),
    ):
        assert bounds.deep_floor(heads, d_h, d_h, d) == floor
        one = bounds.own_context_ceiling(sum(heads), d_h, d) + d
        assert (floor > one) == (heads != (8, 8))


def rank_at_silent_weights(sizes, d_h, d_v, d, n, T, *, causal):
    """Exact, modulo a prime: the derivative where groups span the layers and their values cancel.

    Tokens have the d - 1 coordinates that are read. All weights that read them move. The attention
    of a group is random, and the same in all layers.
    """
    g, m = np.random.default_rng(0), d - 1

    def draw(*shape):
        return g.integers(1, PRIME, shape)

    heads = [[k for k, count in enumerate(layer) for _ in range(count)] for layer in sizes]
    maps = [(draw(m, d_h), draw(m, d_h)) for _ in sizes[0]]
    V = [[draw(m, d_v) for _ in layer] for layer in heads]
    o = [[draw(d_v) for _ in layer] for layer in heads]
    for k in range(len(maps)):
        at = [
            (i, h) for i, layer in enumerate(heads) for h, group in enumerate(layer) if group == k
        ]
        total, (i, h) = sum(product(V[i][h], o[i][h]) for i, h in at), at[-1]
        V[i][h][:, 0] = (V[i][h][:, 0] - total * pow(int(o[i][h][0]), -1, PRIME)) % PRIME
    seen = np.tril(np.ones((n, n), np.int64)) if causal else 1
    A = [shares(draw(T, n, n) * seen) for _ in maps]
    weights = sum(map(len, heads)) * (2 * m * d_h + m * d_v + d_v * d) + m
    columns = iter(range(weights))

    X, dX = draw(T, n, m), np.zeros((T, weights, n, m), np.int64)
    output, d_output = np.zeros(T, np.int64), np.zeros((T, weights), np.int64)
    for layer, values, outs in zip(heads, V, o, strict=True):
        new = dX
        for k, W_V, o_h in zip(layer, values, outs, strict=True):
            W_O = np.hstack([np.zeros((d_v, m), np.int64), o_h[:, None]])
            wrote, change = written(X, dX, (*maps[k], W_V, W_O), A[k], columns)
            new = (new + change[..., :m]) % PRIME
            output = (output + wrote[:, -1, m]) % PRIME
            d_output = (d_output + change[:, :, -1, m]) % PRIME
        dX = new
    assert not output.any()
    d_output[:, -m:] += X[:, -1]  # the read-out
    return rank_modulo(d_output)


@pytest.mark.hostile("mahdavi-finding-two-layers")
def test_the_floor_is_the_exact_rank_at_silent_weights():
    """Held back; extremes first: one head a layer, one dimension of values, full width, few groups
    that read few dimensions, more layers than dimensions, groups of unlike sizes, long contexts.
    """
    sizes_and_widths = itertools.chain(
        itertools.product(
            [((1,), (1,)), ((1,), (2,), (1,)), ((2, 1), (1, 2))], [1, 2, 4], [1, 2, 3]
        ),
        itertools.product([((3,), (1,)), ((1,), (1,), (1,)), ((2,), (3,))], [1, 3], [1, 2, 4]),
        itertools.product([((1, 1, 1), (1, 1, 2)), ((1, 1), (3, 1), (1, 1))], [1, 2, 3], [1, 2]),
    )
    kinds = itertools.cycle([(3, False), (3, True), (4, False)])
    counted = 0  # by the library
    for (sizes, d_h, d_v), d, (n, causal) in zip(
        sizes_and_widths, itertools.cycle([5, 4, 6, 5]), kinds, strict=False
    ):
        r, v = min(d_h, d - 1), min(d_v, d - 1)
        groups = bounds.deep_groups([*map(sum, sizes)], r, v, d)
        floor = spanned(sizes, d, r, v)
        if groups.carried is None and all(map(any, groups.sizes)):
            sizes, floor, counted = groups.sizes, groups.labels, counted + 1
        T = floor + 3
        exact = rank_at_silent_weights(sizes, r, v, d, n, T, causal=causal)
        assert exact == floor or (exact > floor and len(sizes) > 2)
    assert counted >= 40, counted
    for sizes in (((1,), (2,), (1,), (1,)), ((1, 0), (0, 1), (1, 0), (1, 1))):
        exact = rank_at_silent_weights(sizes, 2, 1, 3, 3, 60, causal=False)
        assert exact >= spanned(sizes, 3, 2, 1)  # more layers than m = 2, layers without a group
    # Where r G < m fewer layers are counted, more carefully than at these weights.
    exact = rank_at_silent_weights(((1,),) * 4, 2, 1, 4, 3, 60, causal=False)
    assert exact == 32 > bounds.deep_floor((1,) * 4, 2, 1, 4) == 29
    # But all layers up to m would be too many: 106 labels, of values in all dimensions.
    assert rank_at_silent_weights(((1,),) * 5, 2, 4, 5, 3, 110, causal=False) == 102
    # Two tokens and one group that reads few dimensions: less, so three are asked for.
    few = rank_at_silent_weights(((1,), (1,), (1,)), 2, 4, 5, 2, 70, causal=False)
    assert few < spanned(((1,), (1,), (1,)), 5, 2, 4)


# --- the weights ----------------------------------------------------------------------------------


def forward(weights, x):
    """The network in loops over heads and tokens."""
    for layer in weights.layers:
        new = [token.clone() for token in x]
        for W_Q, W_K, W_V, W_O in zip(*layer, strict=True):
            for i, token in enumerate(x):
                logits = [float((token @ W_Q) @ (key @ W_K)) for key in x]
                powers = [math.exp(logit - max(logits)) for logit in logits]
                for key, power in zip(x, powers, strict=True):
                    new[i] += power / sum(powers) * (key @ W_V @ W_O)
        x = new
    return x[-1] @ weights.W_D[:, 0]


def errors(weights, X, y):
    return [abs(float(forward(weights, list(x)) - label)) for x, label in zip(X, y, strict=True)]


@pytest.mark.parametrize(
    ("heads", "d_h", "d_v", "d", "n"),
    [
        ((1, 1), 1, 1, 2, 2),
        ((2, 1), 5, 9, 3, 3),  # maps and values wider than the tokens
        ((3, 3), 2, 2, 3, 2),
        ((6, 3), 1, 3, 6, 2),
        ((5, 2), 6, 3, 6, 3),  # one group of five
        ((1, 7), 2, 2, 4, 5),  # the second layer alone
        ((1, 1), 5, 5, 5, 3),
        ((3, 3), 1, 5, 6, 4),  # groups of both layers, beyond one layer
        ((1, 1), 5, 5, 5, 2),
        ((2, 1, 2), 2, 3, 5, 3),
        ((1, 2, 1, 1, 1), 1, 2, 4, 3),  # of five layers
        ((3,), 2, 2, 4, 3),  # of one
        ((6, 1, 3), 5, 4, 4, 3),  # two of three layers
    ],
)
def test_every_label_at_the_floor(heads, d_h, d_v, d, n):
    T = bounds.deep_floor(heads, d_h, d_v, d, context=n)
    X, y = gaussian(0, T, n, d), gaussian(1, T)
    weights = memorize_by_depth(X, y, heads=heads, head_dim=d_h, value_dim=d_v, seed=2)
    for H, layer in zip(heads, weights.layers, strict=True):
        shapes = [tuple(W.shape) for W in layer]
        assert shapes == [(H, d, d_h), (H, d, d_h), (H, d, d_v), (H, d_v, d)]
    assert max(errors(weights, X, y)) < 1e-8 * (y.max() - y.min()) / 2
    X, y = gaussian(0, T + 1, n, d), gaussian(1, T + 1)
    with pytest.raises(ValueError, match=rf"labels: got T = {T + 1} .* at most {T}, the floor"):
        memorize_by_depth(X, y, heads=heads, head_dim=d_h, value_dim=d_v)


SMALL = {"heads": (3, 2), "head_dim": 2, "value_dim": 2}


@pytest.mark.parametrize("tokens", [1e-150, 1.0, 1e150])
@pytest.mark.parametrize("labels", [1e-100, 1.0, 1e100])
def test_scales(tokens, labels):
    X, y = tokens * gaussian(0, 31, 3, 4), labels * gaussian(1, 31)
    assert max(errors(memorize_by_depth(X, y, **SMALL), X, y)) < 1e-8 * y.abs().max()


@pytest.mark.hostile("mahdavi-finding-two-layers")
@pytest.mark.parametrize(
    "X",
    [
        gaussian(0, 31, 1, 4) + 0.1 * gaussian(1, 31, 3, 4),  # tokens of an example nearly equal
        gaussian(0, 1, 3, 4) + 0.01 * gaussian(1, 31, 3, 4),  # examples nearly equal
        10 + gaussian(0, 31, 3, 4),
        gaussian(0, 31, 3, 4) * torch.logspace(0, -6, 4, **F64),
        gaussian(0, 31, 3, 4).round(),
        torch.cat([gaussian(0, 1, 1, 4).expand(31, 1, 4), gaussian(1, 31, 2, 4)], 1),
    ],
)
def test_hostile_tokens(X):
    y = gaussian(2, 31).sign()
    assert max(errors(memorize_by_depth(X, y, **SMALL), X, y)) < 1e-8


@pytest.mark.parametrize("offset", [1e3, 1e9])
def test_labels_are_met_within_their_spread(offset):
    """Far from zero a label is a small part of itself off, and that may be all that it tells."""
    X, y = gaussian(0, 31, 3, 4), gaussian(1, 31)
    spread = (y.max() - y.min()) / 2
    if offset == 1e9:
        with pytest.raises(ValueError, match=r"errs by .* times what is allowed"):
            memorize_by_depth(X, y + offset, **SMALL)
    else:
        weights = memorize_by_depth(X, y + offset, **SMALL)
        assert max(errors(weights, X, y + offset)) < 1e-8 * spread


def test_few_and_equal_labels():
    X = gaussian(0, 31, 3, 4)
    zeros = memorize_by_depth(X, torch.zeros(31, **F64), **SMALL)
    assert max(errors(zeros, X, torch.zeros(31))) == 0
    one = memorize_by_depth(X[:1].float(), torch.ones(1), **SMALL)  # in float32
    assert errors(one, X[:1].float().double(), torch.ones(1))[0] < 1e-8
    again = memorize_by_depth(X, torch.ones(31), seed=1, **SMALL)
    assert not torch.equal(again.layers[0].W_Q, zeros.layers[0].W_Q)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens": gaussian(0, 5, 1, 4)},
            r"tokens: got shape \(5, 1, 4\); .* 2 tokens",
        ),
        ({"tokens": gaussian(0, 5, 3, 1)}, r"tokens: got shape \(5, 3, 1\); .* d >= 2"),
        ({"tokens": torch.full((5, 3, 4), math.nan)}, "tokens: got 60 entries that are NaN"),
        ({"tokens": torch.ones(5, 3, 4)}, "examples: got 0 and 1 equal, with different labels"),
        ({"heads": ()}, r"heads: got \(\); expected a sequence of integers, one or more"),
        # Both tokens are one: all attention is alike, and outputs are linear in it.
        ({"tokens": gaussian(0, 5, 1, 3).expand(5, 2, 3)}, "repeated token have rank 3 .* rank 5,"),
        (
            {"tokens": gaussian(0, 5, 3, 4) * (torch.arange(5.0) > 0)[:, None, None]},
            "outputs are odd",
        ),
        ({"tokens": torch.zeros(1, 3, 4), "labels": torch.ones(1)}, "tokens: got zeros only"),
        # Without biases outputs are odd.
        ({"tokens": torch.stack([X_1 := gaussian(0, 3, 4), -X_1]), "labels": torch.ones(2)}, "odd"),
        ({"tokens": gaussian(0, 5, 3, 4), "labels": 1e9 + gaussian(1, 5)}, "labels: got data on"),
        ({"tokens": gaussian(0, 5, 3, 4), "labels": gaussian(1, 5) - 1e9}, "labels: got data on"),
        (
            {"tokens": gaussian(0, 31, 3, 1) * gaussian(2, 4), "labels": gaussian(1, 31)},
            "all tokens have rank 1",
        ),
        (
            {
                "tokens": torch.cat([gaussian(0, 88, 2, 5), torch.ones(88, 1, 5, **F64)], 1),
                "labels": gaussian(1, 88),
                "heads": (2, 2, 2),
            },
            "the last tokens have rank 1",
        ),
        ({"tokens": 1e-150 * gaussian(0, 5, 3, 4), "labels": 1e200 * gaussian(1, 5)}, "by inf"),
    ],
)
def test_refusals(changes, message):
    arguments = {"tokens": gaussian(0, 5, 3, 4), "labels": gaussian(1, 5), **SMALL}
    with pytest.raises(ValueError, match=message):
        memorize_by_depth(**(arguments | changes))


# --- exact weights nearby -------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(2, 1), (3, 2)])
def test_exact_weights_are_proved_to_be_near(heads):
    size = {"head_dim": 1, "value_dim": 2}
    T = bounds.deep_floor(heads, 1, 2, 3)
    X, y = gaussian(0, T, 2, 3), gaussian(1, T)
    weights = memorize_by_depth(X, y, heads=heads, **size, seed=1)
    proof = certified_deep_solution(weights, X, y)
    assert proof.proven
    assert proof.distance < 1e-9
    assert proof.error == pytest.approx(max(errors(weights, X, y)), abs=1e-13)
    # Labels a little further off are met as well, by weights about as far away.
    near = certified_deep_solution(weights, X, y + 1e-9 * gaussian(2, T))
    assert near.proven
    assert 1e-10 < near.distance < 1e-5
    # No weights give two equal examples different labels.
    X[1] = X[0]
    assert not certified_deep_solution(weights, X, y, most_bits=128).proven


def test_proof_refuses_two_outputs():
    weights = random_deep((1,), 1, 1, 2, torch.Generator().manual_seed(0), outputs=2)
    with pytest.raises(ValueError, match=r"weights.W_D: got shape \(2, 2\); expected one output"):
        certified_deep_solution(weights, gaussian(0, 3, 2, 2), gaussian(1, 3))
