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


def test_entries_are_those_that_pages_cite():
    assert set().union(*(cited(source(page).read_text()) for page in pages())) == set(ENTRIES)


def test_a_page_cites_instead_of_naming_a_number_and_other_numbers_have_entries():
    assert not [page for page in pages() if ARXIV.search(source(page).read_text())]
    notes = " ".join(entry.fields.get("note", "") for entry in ENTRIES.values())
    for path in (ROOT / "README.md", *LIBRARY):
        assert {*ARXIV.findall(path.read_text())} <= {*ARXIV.findall(notes)}, path


@pytest.mark.parametrize("key", ENTRIES)
def test_an_entry_has_names_in_full_and_a_venue_or_says_what_was_seen(key):
    entry = ENTRIES[key]
    authors, note = entry.persons.get("author", []), entry.fields.get("note", "")
    assert all(author.first_names and author.last_names for author in authors)
    assert authors or "without the names" in note
    assert VENUES & set(entry.fields) or re.search("abstract|Software", note)
