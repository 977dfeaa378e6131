"""Exercises of the argument, answered in the page as a reader does."""

import itertools
import json
import re

import pytest

from tools.chapters import ARGUMENT, pages

# Of each chapter: a right answer, a wrong one with words of its reply, and nonsense.
EXERCISES = {
    "sequences/apart": ("3", ("2", "of F is 12"), "none"),
    "idea/independent-rows": ("-1", ("-6", "misses a label by 1.25"), "tied"),
    "idea/by-hand": ("1, 0, 4, -2", ("9, 6, -14, 4", "it is not orthogonal to it"), "far"),
    "training/mlp": ("130", ("120", "have 3,796"), "many"),
    "sequences/code": ("7", ("4", "500 parameters"), "none"),
    "training/classes": ("42", ("21", "of 21 examples 100%"), "half"),
    "sequences/xor": ("00111100", ("01101001", "parity"), "black"),
    "idea/most": ("29", ("28", "promise 96,704"), "many"),
    "idea/turns": ("33", ("20", "takes 61: you need 100"), "many"),
    "idea/depth": ("1", ("4", "50% count"), "wide"),
    "data/one-more": ("11", ("10", "the others move by more"), "few"),
    "data/features": ("23", ("20", "both directions stay"), "many"),
    "training/capacity": ("193", ("64", "too small"), "steep"),
    "training/turns": ("1744", ("1992", "too few"), "few"),
    "training/growth": ("11", ("12", "11 already gives"), "wide"),
}
CHAPTERS = [page.removeprefix("book/notebooks/") for page in pages()]
CHAPTERS = [chapter for chapter in CHAPTERS if chapter.split("/")[0] in ARGUMENT]


def test_every_chapter_of_the_argument_has_its_answers():
    assert {*EXERCISES} == {*CHAPTERS}


@pytest.mark.parametrize("chapter", EXERCISES)
def test_an_answer_is_judged_in_words(visit, chapter):
    page = visit(f"book/notebooks/{chapter}.html")
    field, said = page.locator(".attempt input"), page.locator(".attempt output")
    assert field.count() == 1
    assert page.get_by_text("no answer yet", exact=True).locator("visible=true").count() == 0
    right, (wrong, words), nonsense = EXERCISES[chapter]
    for answer, pattern in (
        (right, r"Right\.$"),
        (wrong, rf"Not yet: .*{words}"),
        (nonsense, "Not yet: "),
        ("", "Not yet: "),
    ):
        field.fill(answer)
        field.press("Enter")
        assert re.match(pattern, said.text_content()), (answer, said.text_content())
    assert page.faults == []


@pytest.mark.parametrize("chapter", EXERCISES)
def test_answers_are_judged_as_in_the_notebook(visit, chapter):
    """The page says of each answer what the notebook says."""
    page = visit(f"book/notebooks/{chapter}.html")
    known = json.loads(page.locator(".attempt").get_attribute("data-answers"))
    if isinstance(known, str):
        pytest.skip("a picture of the page judges")
    for first, last, words in known:
        for answer in {first, last}:
            assert page.evaluate("([a, k]) => judged(String(a), k)", [answer, known]) == words
    if isinstance(known[0][0], str):
        return
    gap = next(((a[1] + b[0]) / 2 for a, b in itertools.pairwise(known) if b[0] != a[1]), None)
    said = page.evaluate("([a, k]) => judged(String(a), k)", [gap, known])
    assert said.startswith("not yet; near your answer, ")
