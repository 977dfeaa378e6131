"""A chapter is a text and its notebook, can be read, links words and works, leads to the next."""

import re

import jupytext
import nbformat
import pytest
from jupytext.compare import NotebookDifference, compare_notebooks
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
    tags,
    text_path,
)

LINES, WIDTH, BYTES = 25, 76, 500_000
CHAPTERS = chapters()
READ = [page.removeprefix("book/notebooks/") for page in pages()]  # from start to end, if they are
READ = [chapter for chapter in READ if chapter.split("/")[0] in ARGUMENT]  # of the argument
PAGES, WORDS = 17, 22_000  # of the argument
EACH = 350  # words of a page for each picture
NAME = re.compile(r"[a-z]+/[a-z0-9]+(-[a-z0-9]+)*")  # of the chapter in book/text


def source(page):
    """What people edit of a page of the contents."""
    return ROOT / f"{page.replace('book/notebooks', 'book/text')}.md"


def notebook(chapter):
    return nbformat.read(notebook_path(chapter), 4)


def code_cells(chapter):
    return [cell for cell in notebook(chapter).cells if cell.cell_type == "code"]


def run_again(chapter):
    return f"edit the text, then `make run CHAPTER={chapter}`, and commit both"


def test_every_text_has_a_notebook():
    executed = {
        p.relative_to(NOTEBOOKS).with_suffix("").as_posix() for p in NOTEBOOKS.rglob("*.ipynb")
    }
    assert {*CHAPTERS} - executed == set(), "`make run` executes them, commit the notebooks"
    assert executed - {*CHAPTERS} == set(), "delete notebooks that no text in book/text makes"
    misnamed = [chapter for chapter in CHAPTERS if not NAME.fullmatch(chapter)]
    assert misnamed == [], "rename: small letters, digits and hyphens"


def test_every_page_is_in_the_contents():
    written = {path.relative_to(ROOT).with_suffix("").as_posix() for path in BOOK.glob("*.md")}
    written |= {f"book/notebooks/{chapter}" for chapter in CHAPTERS}
    assert written - {*pages()} == set(), "add a line `- file: ...` to _toc.yml"
    assert {*pages()} - written == set(), "_toc.yml names pages that are not there"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_notebook_ran_to_its_end_cleanly(chapter):
    executed, cells = notebook(chapter), code_cells(chapter)
    counts = [cell.execution_count for cell in cells]
    assert counts == [*range(1, len(cells) + 1)], run_again(chapter)
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error", run_again(chapter)
        assert output.get("name") != "stderr", f"a warning: {output.text}\n{run_again(chapter)}"
    for part in (executed, *executed.cells):
        assert not {"papermill", "execution"} & set(part.metadata), run_again(chapter)
        assert part.metadata.get("tags") != [], run_again(chapter)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_notebook_has_the_cells_of_its_text(chapter):
    executed, first = notebook(chapter), code_cells(chapter)[0]
    assert (first.source, tags(first)) == (colab_cell().source, tags(colab_cell())), "`make run`"
    executed.cells.remove(first)  # tools/run.py adds it; the text must not have one of its own
    assert not any(COLAB in tags(cell) for cell in executed.cells), f"take the tag {COLAB} away"
    try:
        compare_notebooks(executed, jupytext.read(text_path(chapter)), fmt="md:myst")
    except NotebookDifference as difference:
        pytest.fail(f"{difference}\n{run_again(chapter)}", pytrace=False)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_cells_are_short_and_narrow(chapter):
    for cell in code_cells(chapter):
        lines = cell.source.splitlines()
        assert len(lines) <= LINES or "imports" in tags(cell), (
            f"cut, or move to the library: {len(lines)} lines\n{cell.source}"
        )
        wide = [line for line in lines if len(line) > WIDTH]
        remedy = (
            f"`make format` breaks code above {WIDTH} letters; cut strings and comments by hand"
        )
        assert not wide, f"{remedy}: {wide}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_pictures_are_small_bitmaps(chapter):
    size = notebook_path(chapter).stat().st_size
    assert size < BYTES, f"{size} bytes: draw fewer or smaller pictures, print less"
    assert "image/svg+xml" not in notebook_path(chapter).read_text(), "draw a png"


BY_KEYS = re.compile(r"\b(?!glue)(\w+)\.(?!i?loc\b)\w+\[\s*[\w\"']+, *[^\[\]:=]+\]")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_numbers_are_read_by_keys_that_are_unique(chapter):
    """By several keys; of others pandas 2 gives a column of one row, pandas 3 the number."""
    text = text_path(chapter).read_text("utf-8")
    for table in set(BY_KEYS.findall("\n".join(cell.source for cell in code_cells(chapter)))):
        line = f"assert {table}.index.is_unique"
        assert line in text, f"before {table} is read by several keys, say `{line}`"


def shows(cell, kind, mark=""):
    """Whether an output of the cell has data of that kind, with that mark in it."""
    return any(mark in output.get("data", {}).get(kind, ()) for output in cell.outputs)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_picture_or_table_has_caption_and_name(chapter):
    for cell in code_cells(chapter):
        picture, table = shows(cell, "image/png"), shows(cell, "text/html", "<table")
        if picture or table:
            head = f"say in the head of the cell, below `mystnb:`, %s\n{cell.source}"
            shown = {"figure": {}, "image": {}, **cell.metadata.get("mystnb", {})}
            kind = "fig-" if picture else "tab-"
            if not shows(cell, "text/markdown", ":name: tab-record-"):  # titles both
                assert shown["figure"].get("caption", "").strip(), head % "`figure: caption:`"
                assert shown["figure"].get("name", "").startswith(kind), head % f"`name: {kind}...`"
            assert shown["image"].get("alt") or not picture, head % "`image: alt:`"


@pytest.mark.parametrize("page", pages())
def test_a_written_table_has_caption_and_name(page):
    text = source(page).read_text()
    titled = r"^:::+\{(?:list-)?table\} \S.*\n(?::.*\n)*:name: tab-"
    written = re.findall(r"^\|[-: |]+\|$|\{list-table\}", text, re.MULTILINE)
    remedy = "put each table into `:::{table} Its caption` with `:name: tab-...`"
    assert len(written) == len(re.findall(titled, text, re.MULTILINE)), remedy


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_and_its_theorems_have_labels(chapter):
    text = text_path(chapter).read_text()
    first = text.split("---\n", 2)[2].lstrip()[:200]
    remedy = "below the head put `(ch-<its label>)=`, and in the next line `# Its title`"
    assert re.match(r"\(ch-[a-z0-9-]+\)=\n# \S", first), f"{remedy}, not\n{first}"
    for kind, title, label in re.findall(
        r":::\{prf:(theorem|proposition|lemma|corollary|definition|assumption)\}(.*)\n(.*)", text
    ):
        assert re.match(r" .+: .+", title), f"{kind}{title}: write `Source, Number: its name`"
        labelled = re.match(r":label: [a-z]+-[a-z0-9-]+", label)
        assert labelled, f"{kind}{title}: write `:label: thm-...` below"


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
def test_a_term_is_linked_at_first_use(chapter):
    text = body(chapter)
    links = [found.span() for found in LINK.finditer(text)]
    for word in words():
        if use := first_use(word, text):
            linked = any(start <= use.start() and use.end() <= end for start, end in links)
            near = text[max(0, use.start() - 30) : use.end() + 30]
            assert linked, f"write {{term}}`{word}` where it is first used: ...{near!r}"


@pytest.mark.parametrize("chapter", READ)
def test_a_chapter_asks_and_leads_to_the_next(chapter):
    text = body(chapter)
    opening = re.split(r"^(?:#|```)", text, maxsplit=1, flags=re.MULTILINE)[0]
    assert "?" in opening, "open with a question"
    _, _, exercise = text.partition("\n## Exercise\n")
    for part in ("\nattempt(", "among=", ":::{dropdown} Solution\n"):
        assert part in exercise, f"`## Exercise` has no {part!r}: see book/fragments/chapter.md"
    after = source(pages()[pages().index(f"book/notebooks/{chapter}") + 1]).read_text()
    label = re.search(r"^\((ch-[a-z0-9-]+)\)=\n# ", after, re.MULTILINE)[1]
    takeaway = re.search(r"^:::\{admonition\} Takeaway\n.*?^:::$", text, re.M | re.S)
    assert takeaway, "end with `:::{admonition} Takeaway`"
    following = re.search(rf"\*\*Next:\*\*.*`{label}`", takeaway[0], re.S)
    assert following, f"end the takeaway with `**Next:** {{ref}}`{label}``"


def visible_words(chapter):
    """Words of the prose that is not folded, and of captions."""
    text = re.sub(r"^:::+\{dropdown\}.*?^:::+$", "", body(chapter), flags=re.M | re.S)
    captions = re.findall(r"caption: (.*?)\n    name:", text, re.S)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return len(" ".join([text, *captions]).split())


def test_the_argument_fits_an_afternoon():
    assert len(READ) + 2 <= PAGES, "move a page to another part of _toc.yml"
    words = {chapter: visible_words(chapter) for chapter in READ}
    assert sum(words.values()) <= WORDS, f"shorten the argument, or fold proofs: {words}"


NOT_SEEN = re.compile(
    r"""^:::+\{dropdown\}.*?^:::+$  # folds
      | ^```.*?^```$           # cells and pictures, whose captions are counted
      | ^:::+.*?$              # openings of boxes
      | ^:[a-z-]+:.*?$         # their options
      | ^\([a-z0-9-]+\)=$      # targets
      | ^(?:\* )?[ ]*-(?=\s)   # marks of lists
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


def seen_words(chapter):
    """Words that a reader sees on a page, with captions and headings; a formula is one."""
    text = body(chapter)
    captions = re.findall(r"caption: (.*?)\n    name:", text, re.S)
    captions += [re.sub(r"<[^>]+>", "", caption) for caption in drawn_captions(text)]
    text = " ".join([NOT_SEEN.sub("", text), *captions])
    text = re.sub(r"\$\$.*?\$\$|\$[^$]+\$", "formula", text, flags=re.S)
    return len(text.split())


def drawn_captions(text):
    """Those of the pictures of book/assets/pictures that a text shows."""
    for path in re.findall(r"^:file: \.\./\.\./(assets/pictures/\S+)$", text, re.M):
        drawing = (BOOK / path).read_text("utf-8")
        yield re.search(r"<figcaption>(.*?)</figcaption>", drawing, re.S)[1]


@pytest.mark.parametrize("chapter", ["front/overview", *READ])
def test_a_page_of_the_argument_has_a_picture_in_350_words(chapter):
    """Plots and drawn pictures count alike, on each page and not in the mean."""
    plots = sum(
        shows(cell, "image/png") and "remove-cell" not in tags(cell) for cell in code_cells(chapter)
    )
    pictures = plots + len([*drawn_captions(body(chapter))])
    words = seen_words(chapter)
    assert words <= EACH * pictures, f"{words} words, {pictures} pictures: cut, or draw another"


ENTRIES = parse_file(BOOK / "references.bib").entries
CITED = re.compile(r"\{cite(?::[a-z]+)?\}`([^`]+)`")


def cited(text):
    return {key.strip() for found in CITED.findall(text) for key in found.split(",")}


def test_entries_are_those_that_pages_cite():
    used = set().union(*(cited(source(page).read_text()) for page in pages()))
    assert used - {*ENTRIES} == set(), "add entries to book/references.bib"
    assert {*ENTRIES} - used == set(), "no page cites these: delete them from book/references.bib"
