"""The claims page is what the chapters recorded, and every verdict can be followed to its cell."""

import re
from pathlib import Path

import nbformat
import pytest

from attnmem import reporting, results

import claims
from chapters import chapters, notebook_path, text_path

RECORDED = claims.recorded()


def test_the_page_is_up_to_date():
    assert claims.PAGE.read_text() == claims.page(RECORDED), "make run renews book/claims.md"
    assert claims.TOTALS.read_text() == claims.totals(RECORDED)


def test_every_claim_is_on_the_page():
    page = claims.PAGE.read_text()
    assert all(f"* - {claim.label}\n" in page for claim in reporting.claims().values())
    assert page.count("  - not yet\n") == len(reporting.claims()) - len(RECORDED)


@pytest.mark.parametrize("claim", [c for c in reporting.claims().values() if c.rows])
def test_the_rows_behind_a_claim_are_there_and_its_chapter_reads_them(claim):
    for name in claim.rows:
        experiment, profile = name.split("/")
        files = [path.stem for path in (results.SHIPPED / experiment).glob("*.csv")]
        wanted = files if profile == "*" else [profile]
        assert wanted, f"no rows of {experiment}"
        assert set(wanted) <= set(files)
        assert {f"{experiment}/{each}" for each in wanted} <= set(claims.files(claim))
        if claim.key in RECORDED:
            text = text_path(RECORDED[claim.key].chapter).read_text()
            words = set(re.findall(r"[a-z0-9]+", text))
            assert set(experiment.split("-")) <= words, f"{claim.key} does not rest on {experiment}"


@pytest.mark.parametrize("key", sorted(RECORDED))
def test_a_verdict_follows_from_its_checks_and_has_a_target(key):
    found = RECORDED[key]
    assert found.checks
    assert found.verdict == reporting.word_for(result for _, result in found.checks)
    assert f"(verdict-{key})=" in text_path(found.chapter).read_text()


def test_targets_without_a_verdict_are_promises_not_kept():
    for chapter in chapters():
        for line in text_path(chapter).read_text().splitlines():
            if line.startswith("(verdict-"):
                assert RECORDED[line[len("(verdict-") : -2]].chapter == chapter


def test_a_verdict_is_an_output_of_the_cell_that_computes_it():
    for chapter in chapters():
        for cell in nbformat.read(notebook_path(chapter), 4).cells:
            for output in cell.get("outputs", []):
                entry = output.get("metadata", {}).get(reporting.METADATA)
                assert entry is None or f'"{entry["claim"]}"' in cell.source


def test_two_verdicts_on_one_claim_are_refused(monkeypatch):
    doubled = [*chapters(), next(iter(RECORDED.values())).chapter]
    monkeypatch.setattr(claims, "chapters", lambda: doubled)
    with pytest.raises(ValueError, match="a second time"):
        claims.recorded()


THEORY = Path(__file__).parents[1] / "theory"
JUDGED_THEOREMS = [key for key in RECORDED if reporting.claims()[key].kind == "theorem"]


@pytest.mark.parametrize("key", JUDGED_THEOREMS)
def test_every_theorem_with_a_verdict_has_a_test_of_its_own(key):
    paper, name = key.split("-", 1)
    tests = "\n".join(path.read_text() for path in THEORY.glob(f"test_{paper}_*.py"))
    assert f"\ndef test_{name.replace('-', '_')}_" in tests
