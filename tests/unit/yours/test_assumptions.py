"""Verdicts on the assumptions: every set where there are few, samples, degenerate vectors."""

import itertools

import numpy as np
import pytest

from attnmem_yours import assumptions
from attnmem_yours.data import as_data

from layouts import layouts, normal, tokens_of


def assumption(name, E, e, mask=None, *, precision="float64", samples=9, seed=0):
    return assumptions.tested(as_data(E, e, mask=mask), name, precision, samples, seed)


@pytest.mark.parametrize(
    ("lengths", "verdict"), [("own", "fails to rounding"), ("longest", "holds")]
)
def test_assumption_3_takes_means_by_own_lengths(lengths, verdict):
    """Means by own lengths are made dependent, or those by the longest length."""
    E, e, mask, _ = layouts(T=7, n=3)["masked"]
    n = [3 if lengths == "longest" else len(tokens_of(E, mask, t)) for t in range(7)]
    assert len({len(tokens_of(E, mask, t)) for t in range(7)}) > 1
    assert assumption("Assumption 3", E, e, mask).verdict == "holds"  # every set is looked at
    sums = [e[t] + tokens_of(E, mask, t).sum(0) / n[t] for t in range(7)]
    e[6] += sums[0] + sums[1] - sums[6]
    assert assumption("Assumption 3", E, e, mask).verdict == verdict


@pytest.mark.parametrize(("size", "name"), [(3, "Assumption 1"), (4, "general position")])
@pytest.mark.parametrize("parts", [[], [2, 5, 1], [2, 5]])
@pytest.mark.parametrize("seed", range(3))
def test_every_set_of_few_queries_is_looked_at(seed, parts, size, name):
    rng = np.random.default_rng(seed)
    E, e = rng.standard_normal((9, 3, 4)), rng.standard_normal((9, 4))
    if parts:
        e[8] = e[parts].sum(0)
    least = min(np.linalg.matrix_rank(e[[*s]]) for s in itertools.combinations(range(9), size))
    verdict = "holds" if least == size else "fails to rounding"
    assert assumption(name, E, e).verdict == verdict


def test_one_dependent_set_among_samples_is_enough():
    """Of 60 queries two lie on one line: with three tokens 58 of 34,220 sets are dependent."""
    E, e = normal(60, 3, 4), normal(60, 4, seed=1)
    e[7] = -3 * e[31]
    counts = set()
    for samples, seed in itertools.product((200, 1000), range(6)):
        first = assumption("Assumption 1", E, e, samples=samples, seed=seed)
        drawn = int(first.detail.split(" of ")[0])
        assert first.verdict == ("fails to rounding" if drawn else "not refuted")
        counts.add(drawn)
    assert 1 in counts  # exactly one was met with


@pytest.mark.parametrize("precision", assumptions.PRECISIONS)
@pytest.mark.parametrize("name", ["Assumption 1", "general position"])
def test_a_vector_of_zeros_is_named(name, precision):
    E, e = normal(60, 3, 4), normal(60, 4, seed=1)
    e[3] = 0
    zero = assumption(name, E, e, precision=precision)
    assert (zero.verdict, zero.detail) == ("fails", "vector 3 is zero")


@pytest.mark.parametrize(
    ("precision", "verdict"), [("float32", "fails"), ("float64", "fails to rounding")]
)
def test_what_is_equal_in_one_precision_only(precision, verdict):
    E, e = normal(12, 2, 3), normal(12, 3, seed=1)
    e[5] = e[2] * (1 + 1e-9)
    assert assumption("Assumption 1", E, e, precision=precision).verdict == verdict


@pytest.mark.parametrize("precision", assumptions.PRECISIONS)
def test_deficient_contexts_are_counted(precision):
    E, e, mask, _ = layouts(T=40)["masked in front"]
    E[mask] = 0
    E[11, 2] = E[11, 1]  # if both are there
    E[30, 2] = 0
    ranks = [np.linalg.matrix_rank(tokens_of(E, mask, t)) for t in range(40)]
    short = [t for t in range(40) if ranks[t] < len(tokens_of(E, mask, t))]
    length = len(tokens_of(E, mask, short[0]))
    detail = assumption("Assumption 2", E, e, mask, precision=precision).detail
    assert f"deficient: {len(short)}, the first is {short[0]} ({length} tokens" in detail
    assert f"at least {ranks[short[0]]} dimensions" in detail


@pytest.mark.parametrize(
    ("n", "verdict", "first"),
    [(3, "fails to rounding", "2, the first is 2 (3"), (4, "fails", "6, the first is 0 (4")],
)
def test_more_tokens_than_dimensions_fail_exactly(n, verdict, first):
    E = normal(6, n, 3)
    E[2, 1], E[4, 1] = E[2, 0], E[4, 0]
    found = assumption("Assumption 2", E, normal(6, 3))
    assert found.verdict == verdict
    assert f"deficient: {first} tokens" in found.detail
