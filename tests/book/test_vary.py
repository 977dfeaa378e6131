"""A word that other values of a parameter move is seen, named and counted."""

import sys
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from attnmem.pages.reporting import METADATA

import tools.chapters
from tools import vary
from tools.chapters import chapters, parameters

CONFIRMED = "confirmed", True, None


def write(path, **verdicts):
    """A notebook with these verdicts, a word and what its checks say, and one output without."""
    outputs = [new_output("display_data")]
    for claim, (word, *holds) in verdicts.items():
        entry = {"claim": claim, "verdict": word, "checks": [["so", h, "checked"] for h in holds]}
        outputs.append(new_output("display_data", metadata={METADATA: entry}))
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=[new_code_cell(id="a", outputs=outputs)]), path)


@pytest.fixture
def chapter(monkeypatch, tmp_path):
    """Chapters whose stored notebook confirms ``one``; ``ran`` says what a run gives."""
    stored, ran = tmp_path / "stored.ipynb", {"one": CONFIRMED}
    write(stored, **ran)

    def execute(_, path, values):
        if values.get("seed") == 13:
            raise RuntimeError("a cell failed\nValueError: singular\n")
        write(path, **ran)

    monkeypatch.setattr(vary, "VARIED", tmp_path / "vary")
    monkeypatch.setattr(vary, "notebook_path", lambda _: stored)
    monkeypatch.setattr(vary, "execute", execute)
    return ran


@pytest.mark.parametrize(
    ("now", "line"),
    [
        ({"one": CONFIRMED}, None),
        ({"one": ("in part", True, None)}, "one: stored 'confirmed ✓·', now 'in part ✓·'"),
        ({"one": ("confirmed", True, False)}, "one: stored 'confirmed ✓·', now 'confirmed ✓✗'"),
        ({}, "one: stored 'confirmed ✓·', now 'no verdict'"),
        ({"one": CONFIRMED, "two": ("met", True)}, "two: stored 'no verdict', now 'met ✓'"),
    ],
)
def test_a_verdict_that_differs_is_named(chapter, now, line):
    chapter.clear()
    chapter.update(now)
    expected = [f"part/name, seed=3, file='a/b': {line}"] if line else []
    assert vary.run_with("part/name", {"seed": 3, "file": "a/b"}) == expected


@pytest.mark.parametrize(
    ("error", "shown", "right"),
    [
        ("ValueError: size: got 0; expected an integer of at least 1", {}, True),
        ("ValueError: size: got 0; expected an integer of at least 1", {"one": CONFIRMED}, False),
        ("ValueError: dim: got 0; expected an integer of at least 1", {}, False),
        ("IndexError: size: got 0; expected an integer of at least 1", {}, False),
        (None, {}, False),
    ],
)
def test_a_value_is_refused_by_name_before_any_verdict(chapter, monkeypatch, error, shown, right):
    def execute(_, path, values):
        write(path, **shown)
        if error:
            raise RuntimeError(f"a cell failed\n{error}\n")

    monkeypatch.setattr(vary, "execute", execute)
    assert (vary.run_with("part/name", {"size": 0}, "size") == []) is right


def test_small_takes_the_ends_of_comments(monkeypatch):
    cell = """
size = 5  # 2 or more
dim = 9  # size + 1 or more
part = 3  # 1 to dim
file = ""  # a table
seed = 0
minutes = 10
profile = "paper"
"""
    monkeypatch.setattr(tools.chapters, "_parameters_cell", lambda _: cell)
    least = {"size": 2, "dim": 3, "part": 1, "profile": "quick", "minutes": 0.2}
    outside = [("size", 1), ("dim", 5), ("part", 0), ("part", 10), ("file", "no such")]
    tried = [(least, None)] + [({name: value}, name) for name, value in outside]
    assert vary.small("part/name") == tried


@pytest.mark.parametrize("chapter", chapters())
def test_every_parameter_has_a_range(chapter):
    """Seeds by ``--seeds``; words and None by words that name nothing."""
    given, tried = parameters(chapter), {"seed", *vary.OF_TRAINING}
    tried |= {name for values, _ in vary.small(chapter) for name in values}
    tried |= {name for name, value in given.items() if isinstance(value, bool)}
    assert given.keys() <= tried, "a number has a comment such as `# 1 or more`, or `# 1 to dim`"


def test_main_skips_chapters_without_a_seed(chapter, monkeypatch, capsys):
    """A difference is an error, and an error is told by its last line."""
    monkeypatch.setattr(vary, "ProcessPoolExecutor", ThreadPoolExecutor)
    named = ["dana/parity", "training/growth"]  # the second one has no seed
    for seeds, status in (["3", "5"], 0), (["3", "13"], 1):
        monkeypatch.setattr(sys, "argv", ["vary", "--seeds", *seeds, "--", *named])
        assert vary.main() == status
    said = capsys.readouterr().out
    ran = "1 chapters ran with 2 choices of values"
    assert said.startswith(f"1 of 2 chapters have nothing to vary\n{ran}: 0 differences\n")
    assert said.endswith(f"seed=13: ValueError: singular\n{ran}: 1 differences\n")


def test_changed_since_names_chapters(monkeypatch):
    lines = "book/text/dana/parity.md\nbook/text/dana/no-more.md\n"
    monkeypatch.setattr(vary.subprocess, "check_output", lambda *_, **__: lines)
    assert vary.changed_since("HEAD~1") == ["dana/parity"]
