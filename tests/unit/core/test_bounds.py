"""The formulas against values worked out by hand, and against counts."""

import functools
import inspect
import itertools
import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from attnmem import MHAWeights, memorize_aot, mha, random_mha
from attnmem.core import bounds
from attnmem.theory import counts
from attnmem.theory.independence import numerical_rank

# By hand, at sizes that differ from each other.
LITERAL = [
    (bounds.mha_capacity, (7, 5, 3), 7 * 2 + 1),
    (bounds.mha_capacity, (7, 5, 11, 3), 7 * 2 + 1),
    (bounds.mha_capacity, (7, 5, 3, 99), 7 * 2 + 1),
    (bounds.shared_context_rank, (7, 5), 7 * 4 + 1),
    (bounds.shared_context_ceiling, (2, 5, 3, 11), 2 * (3 * 12 + 4) + 1),
    (bounds.shared_context_ceiling, (2, 5, 3, 11, True), 2 * (3 * 12 + 4) + 1 + 6),
    (bounds.shared_context_ceiling, (5, 5, 3, 11, True), 5 * (3 * 12 + 4) + 1 + 11),
    (bounds.shared_context_ceiling, (5, 3, 7, 11, True), 5 * (2 * 11 + 2) + 1 + 10),
    (bounds.shared_context_ceiling, (5, 7, 2, 7), 5 * (2 * 11 + 6) + 1),
    (bounds.own_context_ceiling, (5, 3, 11), 5 * (3 * 19 + 11)),
    (bounds.own_context_ceiling, (5, 13, 11), 5 * (11 * 11 + 11)),
    (bounds.group_rank, (1, 5, 11, 3), 5),
    (bounds.group_rank, (3, 5, 11, 3), 2 * 3 * 13 - 3 + 5),
    (bounds.group_rank, (5, 5, 11, 3), 4 * 3 * 13 - 6 * 3 - 1 * 8 + 5),
    (bounds.group_rank, (9, 5, 11, 3), 5 * 3 * 13 - 10 * 3 - 3 * 8 + 5),
    (bounds.best_groups, (7, 11, 11, 11), [4, 3]),
    (bounds.own_context_floor, (3, 2, 5), 2 * 2 * 8 - 2 + 5),
    (bounds.shared_context_floor, (2, 4, 2, 7), 2 * 8 + 3 + 1),
    (bounds.shared_context_floor, (2, 7, 2, 7), 2 * 11 + 6 + 1),
    (bounds.shared_context_floor, (2, 8, 2, 7), 2 * 12 + 7),
    (bounds.shared_context_floor, (5, 9, 2, 7), 4 * 2 * 12 - 6 * 2 + 7),
    (bounds.affine_rank, (7, 5), 7 * 4 + 1),
    (bounds.affine_span_rank, (7, 5), 7 * 5 + 1),
    (bounds.affine_span_rank, (7, 5, True), 7 * 5),
    (bounds.relu_capacity, (7, 5), 7 * 7 + 1),
    (bounds.relu_capacity, (7, 5, 3), 22),  # (7 * 9 + 3) / 3, a whole number
    (bounds.relu_capacity, (5, 7, 3), 19),  # (5 * 11 + 3) / 3, rounded down by 1/3
    (bounds.aot_capacity, (7, 3, 5), 7 * 3 + 5),
    (bounds.own_context_rank, (7, 2, 5), 7 * 5),
    (bounds.scalar_capacity, (7, 3, 2, 5), 7 * 4),
    (bounds.sequences_ceiling, (7, 3, 5, 11, 2), 5 + 7 * (5 + 3 * (5 + 5 - 3))),
    (bounds.sequences_ceiling, (7, 3, 13, 5, 4, 2), 2 + 7 * (7 + 2 * (7 + 2 - 2))),
    (bounds.sequences_ceiling, (7, 2, 5, 11, 3, None, True), 5 * 9 + 7 * (2 * 8 + 5)),
    (bounds.sequences_ceiling, (7, 2, 9, 5, 3, None, True), 5 + 7 * (6 + 2 * (6 + 5 - 2))),
    (bounds.sequences_ceiling, (7, 2, 5, 11, 3, 1, True), 1 + 7 * (12 + 1 * 12)),
    (bounds.sequences_ceiling, (1, 1, 11, 9, 2, None, True), 9 + (9 + 1 * 17)),
    (bounds.sequences_floor, (7, 1, 3, 5), 5 + 7 * 5),
    (bounds.sequences_floor, (7, 4, 2, 5), 5 + 7 * (5 + 3 * 2 * 8 - 2 * 3)),
    (bounds.sequences_floor, (7, 4, 4, 5), 5 + 7 * (5 + 3 * 4 * 6 - 4 * 3 - 1 * 1)),
    (bounds.sequences_floor, (7, 6, 2, 5), 5 + 7 * (5 + 5 * 2 * 8 - 2 * 10 - 3 * 1)),
    (counts.mha_parameters, (7, 3, 5), 7 * 5 * (3 + 3 + 1) + 7 + 1),
    (counts.mha_parameters, (7, 3, 5, 2, 11), 7 * 5 * (3 + 3 + 2) + 11 * (14 + 1)),
    (counts.aot_parameters, (7, 3, 5, 11, 2), 5 * (2 + 11 + 11) + 7 * 4 * 3 * 5),
    (counts.accuracy_to_associations, (39 / 55, 5, 11), 7),
    (counts.accuracy_to_associations, (1 / 5 - 4 / 55, 5, 11), -1),
    (counts.loss_to_bits, (math.log(3), 12, 5), 5 * 2),
    (counts.loss_to_bits, (math.log(24), 12, 5), -5),
    (counts.aot_dimension, (7, 2, 3, 11), 21 * 3 - 9 + 2 * 7 * 2 * 4 + 3),
]


@pytest.mark.parametrize(("formula", "arguments", "value"), LITERAL)
def test_formulas_at_sizes_that_differ(formula, arguments, value):
    exact = {"abs": 1e-12, "rel": 0} if isinstance(value, int) else {"rel": 1e-14}
    assert formula(*arguments) == pytest.approx(value, **exact)


LEAST = {
    (bounds.affine_span_rank, "span"): 0,
    (bounds.own_context_rank, "context"): 2,
    (bounds.sequences_ceiling, "length"): 2,
    (bounds.shared_context_floor, "context"): 2,
    (bounds.scalar_capacity, "context"): 3,
    (bounds.scalar_capacity, "dim"): 3,
    (bounds.scalar_capacity, "head_dim"): 2,
    (counts.mha_dimension, "context"): 2,
    (counts.accuracy_to_associations, "vocab"): 2,
    (counts.loss_to_bits, "vocab"): 2,
    (counts.class_price, "classes"): 2,
    (counts.class_capacity, "classes"): 2,
    (counts.aot_dimension, "vocab"): 2,
    (counts.aot_dimension, "width"): 0,
}
NO_SIZES = dict.fromkeys(("accuracy", "loss", "error", "count"), 0.0)
NO_SIZES |= dict.fromkeys(("embedded", "through_origin", "rank_one", "trained"), False)
NO_SIZES |= dict.fromkeys(("shared", "shared_maps", "position_in_skip"), False) | {"sizes": [1, 1]}
# Unchecked, as checked formulas are made of them.
PARTS = {
    "low_rank_dim",
    "context_ceiling",
    "group_sizes",
    "sum_of_ranks",
    "most_ranks",
}  # unchecked
FORMULAS = [  # all but those of networks, in test_bounds_ranks.py
    formula
    for module in (bounds, counts)
    for name, formula in inspect.getmembers(module, inspect.isfunction)
    if formula.__module__ == module.__name__ and name[0] != "_"
    if name not in PARTS and not name.startswith("deep")
]


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
def test_least_sizes_are_accepted_smaller_ones_refused(formula):
    parameters = inspect.signature(formula).parameters
    least = {name: LEAST.get((formula, name), 1) for name in parameters if name not in NO_SIZES}
    smallest = {name: least.get(name, NO_SIZES.get(name)) for name in parameters}
    if formula is counts.random_bigrams_risk:
        smallest["vocab"] = 2  # of two bigrams
    assert formula(**smallest) is not None
    for name, size in least.items():
        with pytest.raises(ValueError, match=rf"^{name}: got {size - 1}; expected an integer"):
            formula(**smallest | {name: size - 1})


def test_best_groups_are_the_best_partition():
    @functools.cache
    def best(heads, keys, dim, rank):
        if not heads:
            return 0
        last = range(1, heads + 1)
        ranks = {k: bounds.group_rank(k, keys, dim, rank) for k in last}
        return max(ranks[k] + best(heads - k, keys, dim, rank) for k in last)

    for dim, heads in itertools.product(range(1, 6), range(1, 13)):
        for keys in range(1, dim + 1):
            for r in range(1, keys + 1):
                sizes = bounds.best_groups(heads, keys, dim, r)
                assert sum(sizes) == heads
                reached = sum(bounds.group_rank(k, keys, dim, r) for k in sizes)
                assert reached == best(heads, keys, dim, r), (heads, keys, dim, r)
    assert len(bounds.best_groups(10**6, 64, 64, 8)) == 66667  # at once


def exact_risk(H, d_h, d, N):
    """The union bound of theorem thm-random-bigrams, term by term, in fractions."""
    T = H * d_h + d

    def tail(choices, marked, most):
        """Expected number of choices of which more than ``most`` bigrams are drawn; at most 1."""
        count = sum(
            math.comb(marked, k) * math.comb(N * N - marked, T - k)
            for k in range(max(0, most + 1), min(marked, T) + 1)
        )
        return min(1, Fraction(choices * count, math.comb(N * N, T)))

    last = sum(tail(math.comb(N, L), N * L, H * d_h + L) for L in range(1, N + 1) if d > L)
    squares = []
    for spare in range(H + 1):
        within = (m for m in range(2, N + 1) if m <= 2 * d_h - 2)
        inside = sum(tail(math.comb(N, m), m * m, H * math.ceil(m / 2) - spare) for m in within)
        squares.append(inside + tail(1, N, d + spare))
    return min(Fraction(1), last + min(squares))


RISKS = [(2, 2, 3, 11), (3, 2, 2, 7), (5, 1, 2, 11), (7, 3, 3, 13), (5, 3, 11, 7), (6, 3, 3, 5)]
RISKS += [(7, 2, 3, 5), (5, 2, 15, 5), (5, 2, 14, 5), (2, 5, 7, 17), (3, 4, 5, 13)]


@pytest.mark.parametrize(("H", "d_h", "d", "N"), RISKS)
def test_risk_of_random_bigrams_is_the_union_bound(H, d_h, d, N):
    exact = pytest.approx(float(exact_risk(H, d_h, d, N)), rel=1e-9, abs=1e-300)
    assert counts.random_bigrams_risk(H, d_h, d, N) == exact


def test_all_bigrams_may_be_drawn_and_no_more():
    assert counts.random_bigrams_risk(2, 2, 5, vocab=3) == 1.0
    with pytest.raises(ValueError, match=r"^vocab: got 2; expected at least 3, so that 9 bigrams"):
        counts.random_bigrams_risk(2, 2, 5, vocab=2)
    with pytest.raises(ValueError, match=r"^vocab: got 3; expected at least 4, so that 10 bigrams"):
        counts.random_bigrams_risk(2, 2, 6, vocab=3)


NAN, HALF = float("nan"), np.ones(2, np.float16)


@pytest.mark.parametrize(
    ("formula", "arguments", "name"),
    [
        (bounds.scalar_capacity, (2, 5, 2, 4), "context"),
        (counts.aot_parameters, (2, 5, 4, 3, 2), "head_dim"),
        (bounds.aot_capacity, (2, 5, 4), "head_dim"),
        (counts.random_bigrams_risk, (2, 5, 4, 9), "head_dim"),
        (bounds.shared_context_ceiling, (2, 5, 3, 4), "context"),
        (bounds.group_rank, (2, 5, 4, 2), "keys"),
        (bounds.group_rank, (2, 3, 4, 4), "rank"),
        (bounds.best_groups, (2, 5, 4, 2), "keys"),
        (bounds.best_groups, (2, 3, 4, 4), "rank"),
        (bounds.sequences_ceiling, (2, 5, 4, 3, 2), "head_dim"),
        (bounds.sequences_ceiling, (2, 4, 4, 3, 2, 4), "last_tokens"),
        (bounds.sequences_floor, (2, 6, 4, 4), "size"),
        (bounds.sequences_floor, (2, 2, 5, 4), "head_dim"),
        (counts.aot_dimension, (2, 3, 4, 4), "vocab"),
        (partial(counts.aot_dimension, shared_maps=True), (2, 5, 4, 9), "head_dim"),
        (counts.accuracy_to_associations, (HALF, 3, 1), "accuracy"),
        (counts.loss_to_bits, (HALF, 3, 1), "loss"),
    ],
)
def test_bad_arguments_are_named(formula, arguments, name):
    with pytest.raises(ValueError, match=rf"^{name}: got "):
        formula(*arguments)


def test_bits_take_arrays():
    bits = counts.loss_to_bits(np.array([math.log(8), math.log(2), 0.0]), vocab=8, total=10)
    assert bits == pytest.approx([0, 20, 30])


@pytest.mark.parametrize(
    ("H", "n", "d_h", "d"),
    [(2, 3, 4, 4), (2, 4, 2, 5), (1, 1, 3, 3), (3, 3, 3, 3), (1, 4, 4, 6), (2, 2, 1, 4)],
)
def test_shared_ceiling_is_the_rank_of_the_jacobian(H, n, d_h, d):
    g = torch.Generator().manual_seed(n)
    E = torch.randn(n, d, dtype=torch.float64, generator=g)
    ceiling = bounds.shared_context_ceiling(H, n, d_h, d)
    e = torch.randn(ceiling + 5, d, dtype=torch.float64, generator=g)
    layer = [*random_mha(H, d, d_h, seed=1)]
    jacobians = torch.func.jacrev(lambda W: mha(MHAWeights(*W), E, e)[:, 0])(layer)
    J = torch.cat([J.flatten(1) for J in jacobians], dim=1)
    assert numerical_rank(J, rtol=1e-10) == ceiling


def test_parameters_are_those_of_layers_that_are_built():
    heads, head_dim, dim, vocab, length = 3, 2, 4, 7, 5
    tokens = torch.arange(length).repeat(2, 1)
    tokens[1, 0] = vocab - 1
    size = {"vocab": vocab, "dim": dim, "head_dim": head_dim, "heads": heads}
    counted = sum(W.numel() for W in memorize_aot(tokens, torch.tensor([0, 1]), seed=0, **size))
    assert counts.aot_parameters(heads, head_dim, dim, vocab, length) == counted
