"""What a chapter leaves behind is readable by machines and cannot be typed by hand."""

import pytest

from attnmem import reporting


@pytest.fixture
def displayed(monkeypatch):
    shown = []
    monkeypatch.setattr(
        reporting, "_display", lambda data, metadata: shown.append((data, metadata))
    )
    return shown


def test_claims_are_complete_and_keyed_by_paper():
    claims = reporting.claims()
    assert {claim.paper for claim in claims.values()} == {"mahdavi", "dana"}
    kinds = {"definition", "assumption", "theorem", "figure", "table", "finding"}
    assert {claim.kind for claim in claims.values()} == kinds
    assert all(claim.key == key and claim.says.endswith(".") for key, claim in claims.items())


@pytest.mark.parametrize(
    ("checks", "word"),
    [
        ((True, True), "confirmed"),
        ((True, False), "in part"),
        ((False, True), "in part"),
        ((False, False), "contradicted"),
    ],
)
def test_a_verdict_is_what_its_checks_say(displayed, checks, word):
    reporting.verdict(
        "mahdavi-theorem-1", dict(zip(("rank 993", "error small"), checks, strict=True))
    )
    [(data, metadata)] = displayed
    assert metadata["attnmem"]["verdict"] == word
    assert data["text/markdown"].startswith(f"**Theorem 1: {word}.**")


def test_a_verdict_needs_a_known_claim_and_a_check(displayed):
    with pytest.raises(ValueError, match=r"^verdict: got 'mahdavi-theorem-9'"):
        reporting.verdict("mahdavi-theorem-9", {"x": True})
    with pytest.raises(ValueError, match="no checks"):
        reporting.verdict("mahdavi-theorem-1", {})
    assert not displayed


def test_glue_takes_rounded_values_only(displayed):
    reporting.glue("error", "1.2e-13")
    with pytest.raises(ValueError, match="round floats first"):
        reporting.glue("error", 1.2345e-13)
    [(data, metadata)] = displayed
    assert data == {"application/papermill.record/text/plain": "'1.2e-13'"}
    assert metadata["scrapbook"]["name"] == "error"
