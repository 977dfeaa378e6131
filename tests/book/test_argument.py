"""The argument is short, shows mechanisms and values, and hides what serves the page."""

import itertools
import re

import nbformat
import pytest
from test_prose import body

from tools.chapters import argument, notebook_path, text_path

PAGES, WORDS = 17, 24_000  # with the front page, the explorer and a page for the reader's data
HIDDEN = {"hide-input", "hide-cell", "remove-cell", "remove-input"}
CHAPTERS = argument()


def cells(chapter):
    return nbformat.read(notebook_path(chapter), 4).cells


def visible_words(chapter):
    """Words of the prose that is not folded, and of captions."""
    text = re.sub(r"^:::+\{dropdown\}.*?^:::+$", "", body(chapter), flags=re.M | re.S)
    captions = re.findall(r"caption: (.*?)\n    name:", text, re.S)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return len(" ".join([text, *captions]).split())


def printed(chapter):
    texts = [
        output.text
        for cell in cells(chapter)
        if cell.cell_type == "code" and not {"remove-cell"} & {*cell.metadata.get("tags", [])}
        for output in cell.outputs
        if output.output_type == "stream"
    ]
    return "".join(texts).splitlines()


def is_open(cell):
    return cell.cell_type == "code" and not HIDDEN & {*cell.metadata.get("tags", [])}


def test_the_argument_fits_an_afternoon():
    assert len(CHAPTERS) + 2 <= PAGES
    words = {chapter: visible_words(chapter) for chapter in CHAPTERS}
    assert sum(words.values()) <= WORDS, words


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_has_a_picture_of_a_mechanism_and_at_most_two_tables(chapter):
    text = text_path(chapter).read_text()
    pictures = re.findall(r"^:file: \.\./\.\./assets/pictures/[a-z-]+\.html$", text, re.M)
    assert pictures, "no picture from book/assets/pictures"
    assert len(set(re.findall(r"name: (tab-[a-z0-9-]+)", text))) <= 2


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_code_on_a_page_is_short_and_explained(chapter):
    shown = [cell for cell in cells(chapter) if "colab-setup" not in cell.metadata.get("tags", [])]
    assert sum(len(cell.source.splitlines()) for cell in shown if is_open(cell)) <= 70
    shown = [cell for cell in shown if "remove-cell" not in cell.metadata.get("tags", [])]
    pairs = itertools.pairwise(shown)
    after_another = sum(is_open(one) and is_open(two) for one, two in pairs)
    assert after_another <= max(1, sum(map(is_open, shown)) // 10)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_prints_values_rather_than_true(chapter):
    lines = printed(chapter)
    assert sum(line.endswith("True") for line in lines) <= len(lines) / 10


def test_the_argument_has_examples_and_questions_to_the_reader():
    text = " ".join(body(chapter) for chapter in CHAPTERS)
    asked = re.findall(r"for example|for instance|imagine|in other words|\?", text, re.I)
    assert len(asked) >= sum(map(visible_words, CHAPTERS)) / 1000
