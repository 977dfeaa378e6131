"""Chapters run cleanly, are fit to be read, link words and works, and lead from one to the next."""

import itertools
import re

import jupytext
import nbformat
import pytest
from jupytext.compare import compare_notebooks
from pybtex.database import parse_file

from tools.chapters import (
    ARGUMENT,
    BOOK,
    COLAB,
    NOTEBOOKS,
    ROOT,
    chapters,
    colab_cell,
    notebook_path,
    pages,
    text_path,
)

LINES, WIDTH, BYTES = 25, 76, 500_000
CHAPTERS = chapters()
READ = [page.removeprefix("book/notebooks/") for page in pages()]  # from start to end, if they are
READ = [chapter for chapter in READ if chapter.split("/")[0] in ARGUMENT]  # of the argument
PAGES, WORDS = 17, 22_000  # of the argument
NAME = re.compile(r"[a-z]+/[a-z0-9]+(-[a-z0-9]+)*")  # of the chapter in book/text


def source(page):
    """What people edit of a page of the contents."""
    return ROOT / f"{page.replace('book/notebooks', 'book/text')}.md"


def notebook(chapter):
    return nbformat.read(notebook_path(chapter), 4)


def code_cells(chapter):
    return [cell for cell in notebook(chapter).cells if cell.cell_type == "code"]


def tags(cell):
    return {*cell.metadata.get("tags", [])}


def test_every_chapter_has_a_text_and_a_notebook_and_every_page_is_in_the_contents():
    found = {str(p.relative_to(NOTEBOOKS).with_suffix("")) for p in NOTEBOOKS.rglob("*.ipynb")}
    assert found == set(CHAPTERS)
    written = {str(p.relative_to(ROOT).with_suffix("")) for p in BOOK.glob("*.md")}
    assert {*pages()} == written | {f"book/notebooks/{chapter}" for chapter in CHAPTERS}
    assert [chapter for chapter in CHAPTERS if not NAME.fullmatch(chapter)] == []


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_notebook_has_the_cells_of_its_text_and_no_error_and_nothing_of_the_run(chapter):
    executed, cells = notebook(chapter), code_cells(chapter)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o.text for o in outputs if o.get("name") == "stderr"]
    for each in (executed, *executed.cells):
        assert not {"papermill", "execution"} & set(each.metadata)
        assert each.metadata.get("tags") != []
    assert (cells[0].source, tags(cells[0])) == (colab_cell().source, tags(colab_cell()))
    executed.cells.remove(cells[0])  # tools/run.py adds it; the text must not have one of its own
    assert not any(COLAB in tags(cell) for cell in executed.cells)
    compare_notebooks(executed, jupytext.read(text_path(chapter)), fmt="md:myst")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_cells_are_short_and_narrow_and_pictures_are_small_bitmaps(chapter):
    for cell in code_cells(chapter):
        lines = cell.source.splitlines()
        assert len(lines) <= LINES, f"{len(lines)} lines:\n{cell.source}"
        wide = [line for line in lines if len(line) > WIDTH]
        assert not wide, f"wider than {WIDTH} characters: {wide}"
    assert notebook_path(chapter).stat().st_size < BYTES
    assert "image/svg+xml" not in notebook_path(chapter).read_text()


BY_KEYS = re.compile(r"\b(?!glue)(\w+)\.(?!i?loc\b)\w+\[\s*[\w\"']+, *[^\[\]:=]+\]")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_numbers_are_read_by_several_keys_where_those_are_known_to_be_unique(chapter):
    """Of others pandas 2 gives a column of one row, where pandas 3 gives the number."""
    text = text_path(chapter).read_text("utf-8")
    for table in set(BY_KEYS.findall("\n".join(cell.source for cell in code_cells(chapter)))):
        assert f"assert {table}.index.is_unique" in text, table


def shows(cell, kind, mark=""):
    """Whether an output of the cell has data of that kind, with that mark in it."""
    return any(mark in output.get("data", {}).get(kind, ()) for output in cell.outputs)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_picture_and_every_table_has_a_caption_and_a_name(chapter):
    for cell in code_cells(chapter):
        picture, table = shows(cell, "image/png"), shows(cell, "text/html", "<table")
        if picture or table:
            shown = {"figure": {}, "image": {}, **cell.metadata.get("mystnb", {})}
            name = shown["figure"].get("name", "")
            if not shows(cell, "text/markdown", ":name: tab-record-"):  # titles both
                assert shown["figure"].get("caption", "").strip(), f"no caption:\n{cell.source}"
                assert name.startswith("fig-" if picture else "tab-"), f"no name:\n{cell.source}"
            assert shown["image"].get("alt") or not picture, f"no alt text:\n{cell.source}"


@pytest.mark.parametrize("page", pages())
def test_every_written_table_has_a_caption_and_a_name(page):
    text = source(page).read_text()
    titled = r"^:::+\{(?:list-)?table\} \S.*\n(?::.*\n)*:name: tab-"
    written = re.findall(r"^\|[-: |]+\|$|\{list-table\}", text, re.MULTILINE)
    assert len(written) == len(re.findall(titled, text, re.MULTILINE))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapters_and_theorems_have_labels_and_titles_and_theorems_a_source(chapter):
    text = text_path(chapter).read_text()
    assert re.match(r"\(ch-[a-z0-9-]+\)=\n# \S", text.split("---\n", 2)[2].lstrip())
    for kind, title, label in re.findall(
        r":::\{prf:(theorem|proposition|lemma|corollary|definition|assumption)\}(.*)\n(.*)", text
    ):
        assert re.match(r" .+: .+", title), f"{kind}: no source and name: {title}"
        assert re.match(r":label: [a-z]+-[a-z0-9-]+", label), f"{kind}{title}: no label"


NOT_PROSE = re.compile(
    r"""```.*?^```$        # cells and raw blocks
      | ^:::\{prf:definition\}.*?^:::$  # where a word is defined
      | \$\$.*?\$\$.*?$     # displayed and
      | \$[^$]+\$          # inline mathematics
      | ^\#.*?$            # headings
      | ^:::.*?$           # openings of boxes, with their titles
      | ^:[a-z-]+:.*?$     # their options
      | ^\([a-z0-9-]+\)=$  # targets
      | ^\|.*?$            # tables
      | (?P<word>\{term\}`[^`]*`)   # a word that is linked is prose
      | \{[a-z:]+\}`[^`]*`  # other links, glued values
      | `[^`]*`            # code
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
LINK = re.compile(r"\{term\}`[^`]*`")


def body(chapter):
    """A chapter's text below its title."""
    text = text_path(chapter).read_text().split("---\n", 2)[2]
    return text.split("\n# ", 1)[1].split("\n", 1)[1]


def prose(text):
    """The text with all that is not prose blanked out, every character in its place."""
    return NOT_PROSE.sub(lambda found: found["word"] or re.sub(r"\S", " ", found[0]), text)


def words():
    """The terms of the notation page."""
    listed = (BOOK / "notation.md").read_text().split(":::{glossary}\n")[1].split("\n:::")[0]
    return re.findall(r"^[A-Za-z].*$", listed, re.MULTILINE)


def first_use(word, text):
    """Where the word first stands in prose, in any of its forms: memorize, memorized."""
    endings = {"e": "(?:e|es|ed|ing)", "y": "(?:y|ies)"}
    stem = r"\s+".join(re.escape(part) for part in word[:-1].split())
    last = endings.get(word[-1], f"{word[-1]}s?")
    return re.search(rf"\b{stem}{last}\b", prose(text), re.IGNORECASE)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_word_is_linked_where_it_is_first_used(chapter):
    text = body(chapter)
    links = [found.span() for found in LINK.finditer(text)]
    for word in words():
        if use := first_use(word, text):
            linked = any(start <= use.start() and use.end() <= end for start, end in links)
            assert linked, f"{word}: link it in ...{text[use.start() - 30 : use.end() + 30]!r}"


@pytest.mark.parametrize("chapter", READ)
def test_a_chapter_opens_with_a_question_has_an_exercise_and_leads_to_the_next(chapter):
    text = body(chapter)
    assert "?" in re.split(r"^(?:#|```)", text, maxsplit=1, flags=re.MULTILINE)[0]
    exercise = text.split("\n## Exercise\n")[1]
    assert "\nattempt(" in exercise, "no check that says whether the answer is right"
    assert "among=" in exercise, "no answers that the page can judge"
    assert ":::{dropdown} Solution\n" in exercise
    after = source(pages()[pages().index(f"book/notebooks/{chapter}") + 1]).read_text()
    label = re.search(r"^\((ch-[a-z0-9-]+)\)=\n# ", after, re.MULTILINE)[1]
    takeaway = re.search(r"^:::\{admonition\} Takeaway\n.*?^:::$", text, re.M | re.S)
    assert takeaway, "no takeaway"
    assert re.search(rf"\*\*Next:\*\*.*`{label}`", takeaway[0], re.S), f"next is {label}"


HIDDEN = {"hide-input", "hide-cell", "remove-cell", "remove-input"}


def visible_words(chapter):
    """Words of the prose that is not folded, and of captions."""
    text = re.sub(r"^:::+\{dropdown\}.*?^:::+$", "", body(chapter), flags=re.M | re.S)
    captions = re.findall(r"caption: (.*?)\n    name:", text, re.S)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return len(" ".join([text, *captions]).split())


def is_open(cell):
    return cell.cell_type == "code" and not HIDDEN & tags(cell)


def test_the_argument_fits_an_afternoon_and_has_examples_and_questions_to_the_reader():
    assert len(READ) + 2 <= PAGES
    words = {chapter: visible_words(chapter) for chapter in READ}
    assert sum(words.values()) <= WORDS, words
    text = " ".join(map(body, READ))
    asked = re.findall(r"for example|for instance|imagine|in other words|suppose|why\?", text, re.I)
    assert len(asked) >= 5 * sum(words.values()) / 1000
    shown = re.findall(r"assets/pictures/[a-z-]+\.html|^    name: fig-", text, re.M)
    assert len(shown) >= sum(words.values()) / 350


@pytest.mark.parametrize("chapter", READ)
def test_a_chapter_has_a_picture_of_a_mechanism_few_tables_short_code_and_prints_values(chapter):
    text = text_path(chapter).read_text()
    pictures = re.findall(r"^:file: \.\./\.\./assets/pictures/[a-z-]+\.html$", text, re.M)
    assert pictures, "no picture from book/assets/pictures"
    assert len(set(re.findall(r"name: (tab-[a-z0-9-]+)", text))) <= 2
    shown = [cell for cell in notebook(chapter).cells if COLAB not in tags(cell)]
    assert sum(len(cell.source.splitlines()) for cell in shown if is_open(cell)) <= 70
    shown = [cell for cell in shown if "remove-cell" not in tags(cell)]
    after_another = sum(is_open(one) and is_open(two) for one, two in itertools.pairwise(shown))
    assert after_another <= max(1, sum(map(is_open, shown)) // 10)
    outputs = [output for cell in shown for output in cell.get("outputs", [])]
    printed = "".join(o.text for o in outputs if o.output_type == "stream").splitlines()
    assert sum(line.endswith("True") for line in printed) <= len(printed) / 10


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
