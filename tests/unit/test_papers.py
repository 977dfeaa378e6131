"""The claims as data: what is read from ``claims.toml`` and what follows from it."""

import re

import pytest

from attnmem import papers as module
from attnmem.papers import claims, papers


def test_papers_are_cited_by_authors_year_and_place():
    assert [*papers()] == ["mahdavi", "dana"]
    assert papers()["dana"].source("Exp. 1") == "Dana et al. 2025, Exp. 1"


def test_claims_have_their_paper():
    for key, claim in claims().items():
        assert key == claim.key
        assert key.startswith(f"{claim.paper}-")
        assert isinstance(claim.rows, tuple)
        if claim.kind == "theorem":
            assert claim.universal
    assert claims()["mahdavi-theorem-1"].label == "Theorem 1"


def test_every_claim_of_a_paper_has_a_place_and_a_reading():
    """Its quantifiers, and a page if the paper has pages."""
    for claim in claims().values():
        if claim.kind != "finding":
            assert claim.reads.endswith(".")
            assert bool(re.search(r"\bpp?\. \d", claim.place)) == bool(papers()[claim.paper].pages)


SAID = {"kind": "finding", "label": "A name", "says": "Something."}
LEMMA = SAID | {"kind": "theorem", "reads": "For all.", "place": "Section 4, p. 4"}


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"dana-finding-new": SAID}, r"claims.toml, \[dana-finding-new\]: got no authors"),
        ({"dana": {"finding-new": SAID | {"note": "x"}}}, "got the field 'note'"),
        ({"dana": {"finding-new": {"kind": "finding"}}}, "got no label"),
        ({"dana": {"finding-new": SAID | {"kind": "statement"}}}, r"new\].kind: got 'statement'"),
        ({"dana": {"finding-new": SAID | {"reads": "For all."}}}, "got reads of a finding"),
        ({"dana": {"lemma-9": LEMMA | {"reads": ""}}}, r"dana.lemma-9\]: got no reads"),
        (
            {"dana": {"lemma-9": LEMMA | {"place": "Section 4"}}},
            r"place: got 'Section 4'; expected .* of 9",
        ),
        ({"dana": {"lemma-9": LEMMA | {"place": "pp. 9 and 10"}}}, "got 'pp. 9 and 10'"),
        ({"dana": {"pages": 0, "lemma-9": LEMMA | {"place": ""}}}, "expected a label or a place"),
    ],
    ids=[
        "no paper",
        "field",
        "label",
        "kind",
        "finding",
        "reading",
        "no page",
        "page",
        "no number",
    ],
)
def test_a_mistake_in_an_entry_is_named(monkeypatch, table, named):
    paper = {"authors": "A", "year": 2000, "title": "B", "pages": 9}
    table = {key: paper | value if key == "dana" else value for key, value in table.items()}
    monkeypatch.setattr(module, "_tables", lambda: table)
    read = module.claims if "dana" in table else module.papers
    with pytest.raises(ValueError, match=named):
        read.__wrapped__()
