"""Answers of every natural kind get words: right, not yet with a reason, and never a traceback."""

import pytest
import torch

from attnmem.core import bounds
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


def test_whoever_stops_a_check_stops_it():
    with pytest.raises(KeyboardInterrupt):
        attempt(1, lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
