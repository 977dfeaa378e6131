"""Answers of every natural kind get words: right, not yet with a reason, and never a traceback."""

import html
import json
import re

import pytest
import torch

from attnmem.core import bounds
from attnmem.pages import reporting
from attnmem.pages.reporting import attempt


def all_right(four):
    return bool((torch.tensor(four) @ torch.ones(4) == 10).all())


def enough(heads):
    return bounds.mha_capacity(heads, 6, 4) >= 100


@pytest.mark.parametrize(
    ("answer", "check", "said"),
    [
        (33.0, enough, "right"),
        (32.0, enough, "not yet: try another answer "),
        ("ten", enough, "not yet: 'ten' cannot be"),
        ([1.0, 2.0], all_right, "not yet: [1.0, 2.0] cannot be checked ("),
        (0, lambda x: 1 / x > 0, "not yet: 0 cannot be checked (division by zero)"),
    ],
)
def test_an_answer_gets_one_line(capsys, answer, check, said):
    attempt(answer, check)
    out = capsys.readouterr().out
    assert out.startswith(said)
    assert out.count("\n") == 1


@pytest.mark.parametrize(
    ("among", "spans"),
    [
        (range(1, 6), [[1, 2, "not yet: few"], [3, 5, "right"]]),
        (["a", "b", "long"], [["a", "a", "right"], ["b", "b", "right"], ["long", "long", "right"]]),
        ("judge", "judge"),
    ],
    ids=["numbers", "words", "function"],
)
def test_a_field_joins_numbers_of_one_line(monkeypatch, among, spans):
    """A word is an answer by itself, a single string names a function."""
    shown = []
    monkeypatch.setattr(reporting, "_display", lambda data, _: shown.append(data["text/html"]))
    attempt(None, lambda x: isinstance(x, str) or x >= 3 or "few", among)
    [answers] = re.findall('data-answers="(.*?)"', shown[0])
    assert json.loads(html.unescape(answers)) == spans


def test_whoever_stops_a_check_stops_it():
    with pytest.raises(KeyboardInterrupt):
        attempt(1, lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
