"""The claims as data: what is read from ``claims.toml`` and what follows from it."""

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
