"""What programs read says what the pages say."""

import json

import jsonschema
import pytest

from attnmem.papers import claims

from tools import publish, verdicts
from tools.chapters import ROOT, notebook_path, text_path

RECORDED = verdicts.recorded()
DATA = json.loads(publish.DATA.read_text())
BY_ID = {entry["id"]: entry for entry in DATA["claims"]}


def test_files_are_up_to_date():
    assert publish.DATA.read_text() == publish.claims_json(RECORDED), "make run renews them"
    assert publish.FINDINGS.read_text() == publish.findings_bib(RECORDED)
    assert publish.ZENODO.read_text() == publish.zenodo()


def test_claims_follow_their_schema_and_a_spoiled_one_does_not():
    schema = json.loads((publish.EXTRA / "claims.schema.json").read_text())
    jsonschema.validate(DATA, schema)
    for spoiled in ({"verdict": "true"}, {"grade": "sure"}, {"seeds": 0}, {"note": "new"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(DATA | {"claims": [DATA["claims"][0] | spoiled]}, schema)


def test_every_claim_is_there_with_its_verdict_and_an_address_that_exists():
    assert [*BY_ID] == [*claims()]
    for key, entry in BY_ID.items():
        judged = RECORDED.get(key)
        assert entry["verdict"] == verdicts.word_of(claims()[key], judged)
        assert ("cell" in entry) == (judged is not None)
        if judged:
            page, anchor = entry["cell"].split("#")
            chapter = page.removeprefix("notebooks/").removesuffix(".html")
            assert notebook_path(chapter).exists()
            assert f"({anchor})=" in text_path(chapter).read_text()
            assert len(entry["checks"]) == len(judged.checks)
        for name in entry.get("rows", []):
            assert (ROOT / "lib/attnmem/measurements" / name).exists()


def test_seeds_are_those_of_the_grade():
    for key, entry in BY_ID.items():
        if entry.get("grade") == "measured":
            grade = RECORDED[key].grade
            assert f", {entry['seeds']} " in grade
            seeds = grade.rpartition(", ")[2]
            assert f"of {entry.get('seeds_of_the_paper')} seed" in seeds or " of " not in seeds
            curves = RECORDED[key].curves
            assert entry.get("curves_of_the_paper") == curves
            assert curves is None or f", {entry['curves']} of {curves} curves" in grade


def test_each_judged_finding_has_one_entry_for_citations():
    found = [key for key in RECORDED if claims()[key].kind == "finding"]
    entries = publish.FINDINGS.read_text()
    assert entries.count("@misc{") == len(found)
    assert all(f"@misc{{attnmem-{key},\n" in entries for key in found)


def test_metadata_of_a_release_are_those_of_the_citation():
    record, cited = json.loads(publish.ZENODO.read_text()), publish.citation()
    assert (record["title"], record["version"]) == (cited["title"], cited["version"])
    assert [one["name"] for one in record["creators"]] == [a["name"] for a in cited["authors"]]
