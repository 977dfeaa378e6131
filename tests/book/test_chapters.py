"""The committed notebooks are the text sources, run cleanly from top to bottom, fit to be read."""

import re

import jupytext
import nbformat
import pytest
from jupytext.compare import compare_notebooks

from tools.chapters import (
    BOOK,
    COLAB,
    NOTEBOOKS,
    ROOT,
    chapters,
    colab_cell,
    notebook_path,
    pages,
    source,
    text_path,
)

LINES, WIDTH, BYTES = 25, 76, 500_000
CHAPTERS = chapters()
NAME = re.compile(r"[a-z]+/[a-z0-9]+(-[a-z0-9]+)*")  # of the chapter in book/text


def notebook(chapter):
    return nbformat.read(notebook_path(chapter), 4)


def code_cells(chapter):
    return [cell for cell in notebook(chapter).cells if cell.cell_type == "code"]


def tags(cell):
    return cell.metadata.get("tags", [])


def test_every_chapter_has_a_text_and_a_notebook_and_every_page_is_in_the_contents():
    found = {str(p.relative_to(NOTEBOOKS).with_suffix("")) for p in NOTEBOOKS.rglob("*.ipynb")}
    assert found == set(CHAPTERS)
    written = {str(p.relative_to(ROOT).with_suffix("")) for p in BOOK.glob("*.md")}
    assert {*pages()} == written | {f"book/notebooks/{chapter}" for chapter in CHAPTERS}
    assert [chapter for chapter in CHAPTERS if not NAME.fullmatch(chapter)] == []


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_notebook_has_the_cells_of_its_text_behind_one_that_installs_the_library(chapter):
    executed = notebook(chapter)
    first = code_cells(chapter)[0]
    assert (first.source, tags(first)) == (colab_cell().source, tags(colab_cell()))
    executed.cells.remove(first)  # tools/run.py adds it; the text must not have one of its own
    assert not any(COLAB in tags(cell) for cell in executed.cells)
    compare_notebooks(executed, jupytext.read(text_path(chapter)), fmt="md:myst")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_notebook_ran_from_top_to_bottom_without_error_and_stores_nothing_of_the_run(chapter):
    cells = code_cells(chapter)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o.text for o in outputs if o.get("name") == "stderr"]
    executed = notebook(chapter)
    assert "papermill" not in executed.metadata
    for cell in executed.cells:
        assert not {"papermill", "execution"} & set(cell.metadata)
        assert cell.metadata.get("tags") != []


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
