"""Every work that is named by its number has an entry, and every entry is complete and cited."""

import re

import pytest
from pybtex.database import parse_file

from tools.chapters import BOOK, ROOT, pages, source

ENTRIES = parse_file(BOOK / "references.bib").entries
CITED = re.compile(r"\{cite(?::[a-z]+)?\}`([^`]+)`")
ARXIV = re.compile(r"\barXiv[: ]*(\d{4}\.\d{4,5})")
VENUES = {"journal", "booktitle", "publisher"}
LIBRARY = sorted(path for kind in ("py", "toml") for path in (ROOT / "lib").rglob(f"*.{kind}"))


def cited(text):
    return {key.strip() for found in CITED.findall(text) for key in found.split(",")}


def test_citations_and_numbers_are_found():
    assert cited("{cite}`a,b` and {cite:t}`c`, not `d`") == {"a", "b", "c"}
    assert ARXIV.findall("arXiv 2306.02010, arXiv:2405.1371, 2405.13718") == [
        "2306.02010",
        "2405.1371",
    ]


def test_entries_are_those_that_pages_cite():
    assert set().union(*(cited(source(page).read_text()) for page in pages())) == set(ENTRIES)


@pytest.mark.parametrize("page", pages())
def test_a_page_cites_instead_of_naming_a_number(page):
    assert not ARXIV.findall(source(page).read_text())


def test_numbers_outside_pages_have_entries():
    listed = {
        number for e in ENTRIES.values() for number in ARXIV.findall(e.fields.get("note", ""))
    }
    named = {
        number
        for path in (ROOT / "README.md", *LIBRARY)
        for number in ARXIV.findall(path.read_text())
    }
    assert named <= listed


@pytest.mark.parametrize("key", ENTRIES)
def test_an_entry_has_names_in_full_and_a_venue_or_says_what_was_seen(key):
    entry = ENTRIES[key]
    authors, note = entry.persons.get("author", []), entry.fields.get("note", "")
    assert all(author.first_names and author.last_names for author in authors)
    assert authors or "without the names" in note
    assert VENUES & set(entry.fields) or re.search("abstract|Software", note)
