"""Words for an examination, and the picture of it."""

import dataclasses
import re

import pytest

from attnmem_yours import Bound, examine, report
from attnmem_yours.memorization import Shortfall

from layouts import normal


def said(x):
    return " ".join(x.details.split())


def answer(x):
    """Which of three lines begins with ``layer``, in one piece."""
    data, layer, after = re.split(r"\n(?=\S)", str(x))
    assert (data[:12].strip(), after[:12].strip()) == ("data", "next")
    return " ".join(layer.split()).removeprefix(f"layer heads of width {x.head_dim}: ")


def test_answer_of_reals():
    E, e, y = normal(40, 3, 4), normal(40, 4, seed=1), normal(40, 2, seed=2)
    one = {H: examine(E, e, y[:, 0], heads=H, head_dim=2, samples=9) for H in (1, 3, 9)}
    least, enough = one[3].least_heads, one[3].enough_heads
    assert (least, enough) == (3, 5)
    promise = f"fewer than {enough} cannot promise it; fewer than {least} cannot do it"
    wide = f"with 9 all 40 labels fit, whatever they are; {promise}"
    unlabelled = examine(E, e, heads=9, head_dim=2, samples=9)
    assert answer(one[9]) == answer(unlabelled) == wide
    assert "heads=9, head_dim=2)" in str(one[9])
    fit = f"with 5 all 40 labels fit, whatever they are; {promise}"
    assert answer(one[3]) == f"with 3 any {one[3].met.rank} of 40 labels fit; {fit}"
    assert f"heads={enough}, head_dim=2)" in str(one[3])
    few = f"with 1 any {one[1].met.rank} of 40 labels fit; almost never over 16; "
    assert answer(one[1]) == few + fit
    several = fit.replace("labels", "real labels of one output")
    assert answer(examine(E, e, y, head_dim=2, samples=9)) == several


@pytest.mark.parametrize("conflicts", [[], [(3, 7)]])
@pytest.mark.parametrize("right", [38, 39, 40])
def test_answer_of_classes(right, conflicts):
    x = examine(normal(40, 3, 4), normal(40, 4), head_dim=2, samples=9)
    x = dataclasses.replace(x, quick=(2, right), conflicts=conflicts)
    clauses = [f"a quick fit with 2 has {right} of 40 right"]
    if right < 40 - len(conflicts):
        clauses.append("more heads or steps may have more")
    if conflicts:
        clauses.append("labels that contradict equal examples never fit: 1")
    assert answer(x) == "; ".join(clauses)


@pytest.mark.parametrize(
    ("outputs", "classes", "words"),
    [
        (None, None, "none given"),
        (1, None, "1 real number for each example"),
        (2, None, "2 real numbers for each example"),
        (0, ["a"], "1 class ('a')"),
        (0, [*range(5)], "5 classes (0, 1, 2, 3, 4)"),
        (0, [*range(20)], "20 classes (0, 1, 2, 3, 4, ...)"),
        (0, [*range(21)], "21 classes (0, 1, 2, 3, 4, ...); give floats if they are numbers"),
    ],
)
def test_labels_in_words(outputs, classes, words):
    assert report.label_words(outputs, classes).startswith(words)


@pytest.mark.parametrize(("equal", "more"), [(5, None), (8, 3)])
def test_pairs_that_are_not_named_are_counted(equal, more):
    E, e = normal(20, 3, 4), normal(20, 4)
    E[1 : equal + 1], e[1 : equal + 1] = E[0], e[0]
    words = said(examine(E, e, samples=9))
    assert ("pairs more" in words) == (more is not None)
    assert more is None or f"0 and 5 and {more} pairs more" in words


@pytest.mark.parametrize(
    ("missing", "unsure", "words"),
    [([], [], "applies"), ([], ["x"], "may apply (x)"), (["y"], ["x"], "does not apply (y)")],
)
def test_a_bound_says_whether_it_applies(missing, unsure, words):
    line = str(Bound("b", 1234, "met", missing, unsure))
    assert line == f"    1,234 b: met; {words}"


@pytest.mark.parametrize(("rank", "of"), [(20, 20), (9, 9), (8, 9), (19, 20)])
def test_a_rank_of_some_examples_is_not_that_of_all(rank, of):
    x = examine(normal(20, 3, 4), normal(20, 4), heads=2, head_dim=2, samples=9)
    x = dataclasses.replace(x, rank=dataclasses.replace(x.rank, rank=rank, of=of))
    part = " among those looked at" if of < 20 else ""
    assert (f"examples: full{part}, it excludes nothing" in said(x)) == (rank == of)
    assert (f"almost no real labels fit{part} (" in said(x)) == (rank < of)


def test_outcomes_of_both_precisions_are_one_line():
    E, e = normal(12, 2, 3), normal(12, 3, seed=1)
    e[5] = e[2] * (1 + 1e-9)
    words = said(examine(E, e, samples=9))
    assert "Assumption 2, float32 and float64: holds" in words
    assert "Assumption 1, float32: fails; vectors 2 and 5 are equal in this precision" in words


MORE = "no fit stored more; another seed or more heads may help"
PAIR = "2 because equal examples have different labels (such as 0 and 1), which no weights of any "
REASONS = {
    "zeros": ({"zero": True}, "all tokens are zero, hence all outputs of any weights"),
    "more": ({}, f"4 because {MORE}"),
    "late": ({"late": True}, f"4 because {MORE.replace('seed', 'seed, more seconds')}"),
    "rounded": (
        {"keep": "int8", "in_float64": 7},
        "4 because int8 keeps 6 of the 7 stored in float64",
    ),
    "as in float64": ({"keep": "int8", "in_float64": 6}, f"4 because {MORE}"),
    "pairs": ({"contradicting": [(0, 1), (0, 2)]}, f"{PAIR}size give; 2 because {MORE}"),
    "pairs alone": ({"contradicting": [(0, 1)] * 4}, PAIR.replace("2", "4", 1)),
    "at the ceiling": (
        {"ceiling": 6},
        "4 because so many heads store almost no real labels of more",
    ),
}


@pytest.mark.parametrize(("changes", "words"), REASONS.values(), ids=REASONS)
def test_reason_of_a_shortfall(changes, words):
    shortfall = Shortfall(10, 6, False, [], None, True)._replace(**changes)
    reason = report.reason(shortfall)
    assert reason.startswith(f"4 of 10 labels are not stored: {words}")
    assert report.reason(None) == "all labels are stored"


@pytest.mark.parametrize("met", [5, 6])
@pytest.mark.parametrize("by_rank", [False, True])
def test_reason_says_whether_the_ceiling_is_met(met, by_rank):
    reason = report.reason(Shortfall(10, met, False, [], 6, by_rank))
    why = "the rank of the derivative" if by_rank else "the outputs have so many parameters"
    assert f"more than 6 examples ({why}" in reason
    assert ("; of 6, no fit stored more" in reason) == (met < 6)


def test_draw_has_a_bar_for_each_bound_and_rank():
    x = examine(normal(40, 3, 5), normal(40, 5), heads=2, samples=9)
    ax = x.draw()
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert len(names) == len(x.bounds) + 2
    assert sum(name.endswith("not apply") for name in names) == sum(
        bool(b.missing) for b in x.bounds
    )
    assert f"{x.rank.rank:,}" in " ".join(text.get_text() for text in ax.texts)
    with pytest.raises(ValueError, match=r"^heads: got None"):
        examine(normal(4, 3, 5), normal(4, 5)).draw()
