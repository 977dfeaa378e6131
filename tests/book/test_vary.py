"""A word that other values of a parameter move is seen, named and counted."""

import sys
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from attnmem.pages.reporting import METADATA

from tools import vary

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


def test_an_error_is_told_by_its_last_line(chapter):
    expected = ["part/name, seed=13: ValueError: singular"]
    assert vary.run_with("part/name", {"seed": 13}) == expected


def test_chapters_without_a_seed_are_skipped_and_a_difference_is_an_error(
    chapter, monkeypatch, capsys
):
    monkeypatch.setattr(vary, "ProcessPoolExecutor", ThreadPoolExecutor)
    named = ["dana/parity", "training/growth"]  # the second one has no seed
    for seeds, status in (["3", "5"], 0), (["3", "13"], 1):
        monkeypatch.setattr(sys, "argv", ["vary", "--seeds", *seeds, "--", *named])
        assert vary.main() == status
    said = capsys.readouterr().out
    assert said.startswith("1 of 2 chapters have no seed\n1 chapters ran with 2 seeds: 0 diff")
    assert said.endswith(": singular\n1 chapters ran with 2 seeds: 1 differences\n")


def test_chapters_are_those_whose_text_changed_since_a_commit(monkeypatch):
    lines = "book/text/dana/parity.md\nbook/text/dana/no-more.md\n"
    monkeypatch.setattr(vary.subprocess, "check_output", lambda *_, **__: lines)
    assert vary.changed_since("HEAD~1") == ["dana/parity"]
