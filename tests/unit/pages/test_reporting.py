"""What a chapter leaves behind is readable by machines and cannot be typed by hand."""

import pytest

from attnmem import papers
from attnmem.pages import reporting


@pytest.fixture
def displayed(monkeypatch):
    shown = []
    monkeypatch.setattr(
        reporting, "_display", lambda data, metadata: shown.append((data, metadata))
    )
    return shown


def test_claims_are_complete_and_keyed_by_paper():
    claims = papers.claims()
    assert {claim.paper for claim in claims.values()} == set(papers.papers())
    kinds = {"definition", "assumption", "theorem", "figure", "table", "remark", "finding"}
    assert {claim.kind for claim in claims.values()} == kinds
    assert all(claim.key == key and claim.says.endswith(".") for key, claim in claims.items())


def claim(kind, universal=None):
    universal = kind == "theorem" if universal is None else universal
    return papers.Claim("k", "dana", kind, "L", "Says.", universal=universal)


PROVED, FALSE = reporting.proved(True, by="thm-x"), reporting.disproved(True, by="thm-x")
EXACT, BALLS = reporting.certified(True), reporting.certified(False)
SEEN, UNSEEN = reporting.tried(True), reporting.tried(False)
ONE, FIVE, LOST = (reporting.measured(*m) for m in ((True, 1, 6), (True, 5, 5), (False, 3, 6)))
MUTE, ASIDE = reporting.measured(None, 2, 6), PROVED._replace(main=False)
BESIDE = LOST._replace(main=False)


@pytest.mark.parametrize("check", [reporting.proved, reporting.disproved])
def test_proved_refuses_an_instance_against_it(check):
    """It moves no word."""
    with pytest.raises(AssertionError, match="an instance misses what thm-x proves"):
        check(False, by="thm-x")


@pytest.mark.parametrize(
    ("kind", "checks", "word", "grade"),
    [
        ("theorem", [SEEN, SEEN], "confirmed", "checked"),
        ("theorem", [SEEN, PROVED, EXACT], "confirmed", "proved"),
        ("theorem", [SEEN, UNSEEN], "in part", "checked"),
        ("theorem", [SEEN] * 99 + [BALLS], "contradicted", "certified"),
        ("theorem", [PROVED, SEEN, FALSE], "contradicted", "proved"),
        ("theorem", [UNSEEN], "contradicted", "checked"),
        ("theorem", [PROVED, UNSEEN, LOST], "in part", "proved"),
        ("finding", [SEEN, PROVED, EXACT], "confirmed", "checked"),
        ("figure", [ONE, FIVE], "confirmed", "measured, 1 of 6 seeds"),
        ("figure", [LOST, LOST], "contradicted", "measured, 3 of 6 seeds"),
        ("figure", [FIVE, BESIDE], "in part", "measured, 1 of 2 checks, 3 of 6 seeds"),
        ("figure", [LOST, FIVE, ASIDE], "in part", "measured, 2 of 3 checks, 3 of 6 seeds"),
        ("figure", [LOST, MUTE], "in part", "measured, 0 of 2 checks, 3 of 6 seeds"),
        ("figure", [MUTE, ASIDE], "in part", "proved"),
        ("figure", [FIVE, MUTE, MUTE], "in part", "measured, 1 of 3 checks, 5 of 5 seeds"),
        ("figure", [PROVED, FIVE], "confirmed", "measured, 5 of 5 seeds"),
        ("definition", [PROVED, UNSEEN], "illustrated in part", "checked"),
        ("table", [reporting.measured(True, 1)], "confirmed", "measured, 1 seed"),
        ("definition", [SEEN], "illustrated", "checked"),
        ("assumption", [SEEN, UNSEEN], "met in part", "checked"),
        ("assumption", [UNSEEN], "not met", "checked"),
        # with the number of published curves, of which half must hold
        (4, [FIVE, FIVE], "confirmed", "measured, 2 of 4 curves, 5 of 5 seeds"),
        (5, [FIVE, FIVE], "in part", "measured, 2 of 5 curves, 5 of 5 seeds"),
        (4, [FIVE, ONE, MUTE], "confirmed", "measured, 2 of 4 curves, 1 of 6 seeds"),
        (3, [FIVE, FIVE, LOST], "in part", "measured, 2 of 3 curves, 3 of 6 seeds"),
        (9, [LOST, ASIDE], "contradicted", "measured, 0 of 9 curves, 3 of 6 seeds"),
        (5, [MUTE, ASIDE], "in part", "proved, 0 of 5 curves"),
    ],
)
def test_word_and_grade_follow_from_checks(kind, checks, word, grade):
    kind, curves = (kind, None) if isinstance(kind, str) else ("figure", kind)
    assert reporting.word_for(claim(kind), checks, curves) == word
    assert reporting.grade_for(claim(kind), checks, curves) == grade


def test_a_universal_claim_falls_by_one_check():
    assert reporting.word_for(claim("table", universal=True), [SEEN, BALLS]) == "contradicted"
    assert reporting.word_for(claim("table"), [SEEN, BALLS]) == "in part"


def test_a_verdict_is_shown_and_stored(displayed):
    checks = {"rank 993": EXACT, "error small": SEEN}
    reporting.verdict("mahdavi-theorem-1", checks)
    reporting.verdict("mahdavi-figure-3", {"half": ONE}, sizes="T = 550")
    [(data, metadata), (measured, entry)] = displayed
    assert metadata["attnmem"] == {
        "claim": "mahdavi-theorem-1",
        "verdict": "confirmed",
        "grade": "certified",
        "sizes": None,
        "instead": None,
        "checks": [
            ["rank 993", True, "certified", None, None, None, True],
            ["error small", True, "checked", None, None, None, True],
        ],
        "curves": None,
    }
    assert data["text/markdown"] == data["text/plain"]
    assert data["text/markdown"].splitlines() == [
        "**Theorem 1: confirmed** · certified",
        "",
        "- ✓ rank 993 *(certified)*",
        "- ✓ error small *(checked)*",
    ]
    assert "confirmed** · measured, 1 of 6 seeds · T = 550\n" in measured["text/markdown"]
    assert entry["attnmem"]["checks"] == [["half", True, "measured", None, 1, 6, True]]


def test_also_is_shown_and_cannot_carry(displayed):
    also = {"an offset": ONE}
    reporting.verdict("dana-experiment-6", {"slope": LOST}, also=also, sizes="N = 10", curves=3)
    [(data, metadata)] = displayed
    assert metadata["attnmem"]["verdict"] == "contradicted"
    assert metadata["attnmem"]["curves"] == 3
    assert [check[-1] for check in metadata["attnmem"]["checks"]] == [True, False]
    assert "- ✓ an offset" in data["text/markdown"]
    reporting.verdict("dana-experiment-6", {"slope": MUTE}, also=also, sizes="N = 10")
    assert "- · cannot tell: slope" in displayed[-1][0]["text/markdown"]


@pytest.mark.parametrize("key", ["mahdavi-figure-3", "mahdavi-table-1"])
def test_a_claim_is_not_judged_where_none_can_tell(displayed, key):
    reporting.verdict(key, {"one curve": MUTE})
    if needs := papers.claims()[key].needs:
        reporting.verdict(key, {})
    for data, metadata in displayed:
        assert not metadata
        assert "not yet" in data["text/markdown"]
        assert ("missing: " + needs in data["text/markdown"]) is bool(needs)
    assert "- · cannot tell: one curve" in displayed[0][0]["text/markdown"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mahdavi-theorem-9", {"x": SEEN}), ": got 'mahdavi-theorem-9'"),
        (("mahdavi-theorem-1", {}), " 'mahdavi-theorem-1': got no checks"),
        (("mahdavi-theorem-1", {"x": True}), " 'mahdavi-theorem-1': got True for 'x'"),
        (("mahdavi-figure-3", {"x": SEEN, "y": ONE}), " 'mahdavi-figure-3': got no sizes"),
        (("mahdavi-theorem-1", {"x": BALLS}), " 'mahdavi-theorem-1': got no instead"),
    ],
)
def test_a_verdict_without_its_evidence_is_refused(displayed, arguments, message):
    with pytest.raises(ValueError, match=f"^verdict{message}"):
        reporting.verdict(*arguments)
    assert not displayed


def test_a_contradicted_theorem_names_what_is_true(displayed):
    reporting.verdict("mahdavi-theorem-1", {"x": BALLS}, instead="thm-x")
    assert displayed[0][1]["attnmem"]["instead"] == "thm-x"


def test_code_that_is_copied_says_its_words(capsys):
    """Outside a notebook a glued value says nothing, and a verdict its text."""
    reporting.glue("any-name", 3)
    assert capsys.readouterr().out == ""
    reporting.verdict("mahdavi-theorem-1", {"rank 993": EXACT})
    assert "\n- ✓ rank 993" in capsys.readouterr().out


def test_glue_takes_rounded_values_only(displayed):
    reporting.glue("error", "1.2e-13")
    with pytest.raises(ValueError, match=r"^glue 'error': got 1\.2345e-13"):
        reporting.glue("error", 1.2345e-13)
    [(data, metadata)] = displayed
    assert data == {"application/papermill.record/text/plain": "'1.2e-13'"}
    assert metadata["scrapbook"]["name"] == "error"
