"""Each number of an examination against plain loops, and hypotheses of bounds."""

import math
import re

import numpy as np
import pytest

from attnmem.core import bounds
from attnmem.theory.counts import class_capacity
from attnmem_yours import Rank, examine
from attnmem_yours.examination import fewest_heads, remembered

from layouts import LAYOUTS, cancelling_rank, free_rank, layouts, normal


def ranked(rank):
    return Rank(rank, 100, 1.0, None, 1e-9, "")


@pytest.mark.parametrize("guess", [1, 7, 30, 40])
@pytest.mark.parametrize("full", [1, 29, 30, 31, 90])
def test_fewest_heads_of_a_rank_that_grows(full, guess):
    """Three for each head, but one for a first; the guess may be too low or too high."""
    fewest = next(H for H in range(1, 100) if full <= 3 * H - 2)
    heads = fewest_heads(lambda H: ranked(min(full, 3 * H - 2)), full, guess)
    assert heads == (fewest if guess < fewest else guess)


def test_fewest_heads_of_a_rank_that_stops():
    assert fewest_heads(lambda H: ranked(min(H, 20)), 30, 5) is None


def test_remembered_ranks_are_computed_once():
    calls = []

    def rank_with(heads):
        calls.append(heads)
        return ranked(10 * heads)

    rank = remembered(rank_with, 30)
    assert [rank(H).rank for H in (2, 2, 3, 5, 3, 1)] == [20, 20, 30, 30, 30, 10]
    assert calls == [2, 3, 1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_and_fewest_heads_of_plain_jacobians(name):
    E, e, mask, dimensions = layouts()[name]
    free = {H: free_rank(H, E, e, 2, mask) for H in (1, 2, 3)}
    cancelling = {H: cancelling_rank(H, E, e, 2, mask) for H in (1, 2, 3, 4)}
    for heads in (1, 2, 3):
        x = examine(E, e, normal(60), heads=heads, head_dim=2, mask=mask, samples=9)
        assert tuple(part["dimensions"] for part in x.dimensions.values()) == dimensions
        assert (x.rank.rank, x.rank.of) == (free[heads], x.differ)
        assert x.met.rank == cancelling[heads]
    # The fewest heads, on as many examples as two free heads reach, or four that cancel; and more.
    for T in {free[2], free[2] + 1, cancelling[4], cancelling[4] + 1} - {60, 61}:
        data = E if E.ndim == 2 else E[:T], e[:T]
        hidden = None if mask is None else mask[:T]
        x = examine(*data, head_dim=2, mask=hidden, samples=9)
        # Where heads cancel, float64 may need one more than exact arithmetic.
        for rank, heads, more in (
            (free_rank, x.least_heads, 0),
            (cancelling_rank, x.enough_heads, 1),
        ):
            fewest = next((H for H in range(1, 5) if rank(H, *data, 2, hidden) == T), None)
            if fewest is None:
                assert heads is None or heads > 4
            else:
                assert fewest <= heads <= fewest + more


def state(bound):
    if bound.missing:
        return "fails"
    return "open" if bound.unsure else "applies"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize("d_h", [1, 3])
def test_bounds_are_formulas_with_their_hypotheses(name, heads, d_h):
    E, e, mask, (m, q, c) = layouts()[name]
    n, d = E.shape[-2:]
    x = examine(E, e, normal(60), heads=heads, head_dim=d_h, mask=mask, samples=300)
    named = {bound.name: bound for bound in x.bounds}
    verdicts = {test.name: test.verdict for test in x.findings if test.precision == "float64"}

    def of(*assumed):
        words = [verdicts[name] for name in assumed]
        if any(word.startswith("fails") for word in words):
            return "fails"
        return "open" if "not refuted" in words else "applies"

    theorem = named["Theorem 1"]
    assert theorem.labels == heads * (min(n, d_h) - 1) + 1
    refused = mask is not None or n >= d
    assert state(theorem) == ("fails" if refused else of("Assumption 1", "Assumption 2"))
    shared = E.ndim == 2
    fitted = named.get("attention fitted to the labels")
    assert (fitted is not None) == (shared and 3 <= n <= d and d_h >= 2)
    if fitted:
        assert fitted.labels == heads * (d - 1)
        expected = "fails" if mask is not None else of("Assumption 2", "general position")
        assert state(fitted) == expected
    if n > 1:
        short = shared and n <= d
        keys, constant = (n - 1, 1) if short else (d, 0)
        r = min(d_h, keys)
        floor = bounds.own_context_floor(heads, d_h, d)
        if short:
            floor = bounds.shared_context_floor(heads, n, d_h, d)
        assert named["floor L(H)"].labels == floor
        free = (m, q, c) == (keys, d, constant)
        assert state(named["floor L(H)"]) == ("open" if free and mask is None else "fails")
        ceiling = named["ceiling P(H)"]
        assert ceiling.labels == heads * (r * (keys + d - r) + keys) + constant
        assert state(ceiling) == "applies"
    r = min(d_h, m, q)
    ceilings = [bound.labels for bound in x.bounds if "of more" in bound.means]
    assert heads * (r * (m + q - r) + m) + c in ceilings
    assert named["ceiling of random attention with a read-out"].labels == heads * m + c
    assert min(ceilings[:-1] or ceilings) >= x.rank.rank


def test_bounds_of_a_shared_context_as_long_as_wide():
    x = examine(normal(4, 4), normal(60, 4), heads=2, head_dim=2, samples=9)
    [ceiling] = [bound.labels for bound in x.bounds if bound.name == "ceiling P(H)"]
    assert ceiling == 2 * (2 * (3 + 4 - 2) + 3) + 1


CLASSES = {  # labels, heads, the bound at m = 4, and what is said of the formula
    "four": ([*"abcd"] * 10, 4, round(class_capacity(4 * 4, 4)), "a formula"),
    "two": ([0, 1] * 20, 3, 24, "a formula"),
    "two of 45% each": ([*"ab"] * 18 + [*"cdcd"], 4, 36, "a formula"),
    "65% in one": (["b"] * 26 + ["a"] * 14, 4, 32, "a formula"),
    "more in one": (["b"] * 27 + ["a"] * 13, 4, 32, "often too low"),
    "twenty": ([*range(20)] * 2, 2, None, "too high"),
    "one": ([0] * 40, 3, None, None),
}


@pytest.mark.parametrize(("labels", "heads", "count", "caveat"), CLASSES.values(), ids=CLASSES)
def test_bounds_of_classes(labels, heads, count, caveat):
    x = examine(normal(40, 3, 4), normal(40, 4, seed=1), labels, heads=heads, samples=9)
    known = [bound for bound in x.bounds if bound.name.endswith("for each class")]
    assert len(known) == (caveat is not None)
    for bound in known:
        assert count is None or bound.labels == count
        assert bound.means.startswith(f"about so many labels of {len({*labels})} classes")
        assert state(bound) == "open"
        assert caveat in bound.unsure[0]
        if caveat == "a formula":
            assert "too" not in bound.unsure[0]


def test_quick_fit_of_classes():
    E, e = normal(40, 3, 4), normal(40, 4, seed=1)
    easy = ["b" if tokens[:, 0].sum() > 0 else "a" for tokens in E]
    assert examine(E, e, easy, head_dim=2, samples=9).quick == (1, 40), "one head is tried first"
    x = examine(E, e, [*"abcd"] * 10, heads=4, head_dim=2, samples=9)
    assert (x.quick, x.wanted, x.sure) == ((4, 40), 4, True)
    E[7], e[7] = E[3], e[3]
    x = examine(E, e, [*"abcde"] * 8, heads=4, head_dim=2, samples=9)
    heads, right = x.quick
    assert right < 40
    assert x.wanted == (heads if right == 39 else 2 * heads)
    many = np.tile(E, (51, 1, 1)), np.tile(e, (51, 1)), [*"abcd"] * 510
    assert examine(*many, samples=9).quick is None, "a fit of more than 2,000 is not quick"


def test_notes_of_what_the_data_have():
    E, e = normal(30, 2, 4), normal(30, 4)
    assert examine(E, e, samples=9).notes == []
    thin = examine(E, np.c_[e[:, :3], e[:, :1] + 1e-8 * e[:, 3:]], samples=9)
    assert [note[:27] for note in thin.notes] == ["some dimensions are as thin"]
    E[..., 1] = 0
    zeros = "coordinates that are zero in all tokens: 1"
    assert examine(E, e, samples=9).notes == [zeros, "tokens lie in 3 of 4 dimensions"]
    mask = np.arange(2) >= np.array([1, 2] * 15)[:, None]
    assert examine(E, e, mask=mask, samples=9).notes[0] == "contexts of 1 to 2 tokens, by a mask"


def test_steps_are_told_once_and_in_order():
    told = []
    examine(normal(40, 3, 4), normal(40, 4), heads=2, say=lambda *step: told.append(step))
    places, of, words = zip(*told, strict=True)
    assert [*places] == sorted(places)
    assert {*places} == {*range(of[0])}
    assert len({*of}) == 1
    assert len({*words}) == len(words) == len({*told})
    assert not any(re.search(" 1 heads", line) for line in words)


def test_very_many_examples_are_looked_at_in_part():
    """Beyond 12,000 examples ranks are those of a random part, of more than their parameters."""
    E, e, _, _ = layouts(T=12_100)["shared, short"]
    x = examine(E, e, normal(12_100), heads=3, head_dim=2, samples=9)
    parameters = 3 * (2 * (2 + 4 - 2) + 2) + 1
    assert (x.rank.rank, x.rank.of) == (parameters, parameters + parameters // 8 + 50)
    assert x.met.rank == cancelling_rank(3, E, e[:80], 2)
    assert x.least_heads == math.ceil((12_100 - 1) / (2 * 4 + 2))
    assert x.enough_heads is None
