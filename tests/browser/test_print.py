"""The book on paper: what a reader's print, and `make pdf`, put there."""

import re
import unicodedata

import pytest
from pypdf import PdfReader

from tools import pdf

PROOFS = "book/notebooks/answer/capacity"
TABLES = [
    f"book/notebooks/{name}"
    for name in ("dana/published-sweeps", "dana/associations", "answer/training")
]
LINE = 658  # pixels of 174 mm, what the margins leave of A4
LIGHT, DARK = "light", "dark"


def letters(text):
    """A text without spaces and ligatures, which a PDF has of its own."""
    return re.sub(r"\s", "", unicodedata.normalize("NFKC", text))


@pytest.fixture
def printed(visit, tmp_path):
    """A function that opens a page in a theme and prints it: the page, and its pages of paper."""

    def on_paper(name, theme=DARK):
        page = visit(f"{name}.html")
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        path = tmp_path / f"{theme}.pdf"
        page.pdf(path=path, format="A4", print_background=True)
        return page, PdfReader(path).pages

    return on_paper


def test_a_dark_page_is_printed_as_a_light_one(printed):
    """A dark page is printed as a light one, and is dark again afterwards."""
    page, dark = printed(PROOFS, DARK)
    _, light = printed(PROOFS, LIGHT)
    drawn = [[sheet.get_contents().get_data() for sheet in sheets] for sheets in (dark, light)]
    assert drawn[0] == drawn[1]
    assert page.evaluate("document.documentElement.dataset.theme") == DARK


FOLDED = """() => [...document.querySelectorAll(".bd-article details.sd-dropdown p")].map(
  ({ childNodes }) => [...childNodes].find((part) => part.nodeType === 3)?.data ?? "")"""


def test_proofs_and_solutions_unfold_in_print(printed):
    """Proofs and solutions unfold, and folded code leaves no stub."""
    page, sheets = printed(PROOFS)
    text = letters("".join(sheet.extract_text() for sheet in sheets))
    folded = [letters(words) for words in page.evaluate(FOLDED)]
    assert sum(len(words) > 10 for words in folded) > 5
    assert [words for words in folded if words not in text] == []
    page, sheets = printed("book/notebooks/idea/turns")
    text = letters("".join(sheet.extract_text() for sheet in sheets))
    assert page.locator("details.hide").count() > 0
    assert "codecellsource" not in text
    hidden = page.locator("details.hide pre").first.text_content()
    assert letters(hidden) not in text


BOXES = """() => [...document.querySelectorAll(".bd-article :is(div.admonition, div.sd-card)")]
  .filter((box) => !box.closest("details, .attempt, [hidden]"))
  .map((box) => [...box.querySelectorAll("p")].filter((words) => !words.closest("details"))
    .map(({ childNodes }) => [...childNodes].find((part) => part.nodeType === 3)?.data ?? ""))"""


@pytest.mark.parametrize("name", ["book/notebooks/front/overview", PROOFS])
def test_no_card_is_cut_in_print(printed, name):
    """Cards, theorems and notes stand on one sheet."""
    page, sheets = printed(name)
    texts = [letters(sheet.extract_text()) for sheet in sheets]
    boxes = [[letters(words) for words in box] for box in page.evaluate(BOXES)]
    assert len(boxes) > 2
    for box in boxes:
        assert any(all(words in text for words in box) for text in texts), box


CELLS = """() => [...document.querySelectorAll(".bd-article :is(th, td):last-child")].map(
  (cell) => cell.textContent)"""
RIGHT = """() => [...document.querySelectorAll(
    ".bd-article :is(table, img, pre, figure, mjx-container[display=true])")].map(
  (wide) => wide.getBoundingClientRect().left + wide.scrollWidth * (wide.currentCSSZoom ?? 1))"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", TABLES)
def test_tables_and_formulas_are_whole_in_print(printed, visit, name, width):
    """Tables and formulas are whole, whatever the window."""
    page = visit(f"{name}.html", width)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": LINE, "height": 900})
    assert max(page.evaluate(RIGHT)) <= LINE + 1
    if width == 1280:
        page, sheets = printed(name)
        text = letters("".join(sheet.extract_text() for sheet in sheets))
        assert [cell for cell in page.evaluate(CELLS) if letters(cell) not in text] == []


def titles(outline, level=0):
    for item in outline:
        if isinstance(item, list):
            yield from titles(item, level + 1)
        else:
            yield level, item.title


def test_the_pdf_has_bookmarks_numbers_and_links(chromium, tmp_path):
    """The printed book has bookmarks, page numbers and links within."""
    parts = [
        ("", ["book/notebooks/front/overview"]),
        ("Part", [PROOFS, "book/notebooks/beyond/generic-layers"]),
    ]
    pdf.build(chromium, parts, tmp_path / "book.pdf")
    book = PdfReader(tmp_path / "book.pdf")
    bookmarks = list(titles(book.outline))
    assert bookmarks[0] == (0, "How much can attention memorize?")
    part = bookmarks.index((0, "Part"))
    names = [title for level, title in bookmarks[part:] if level == 1]
    assert [re.sub(r"^\d+\. ", "", name) for name in names] == [
        "How much one layer can memorize: floor and ceiling",
        "What almost every layer can do",
    ]
    assert len(bookmarks) > 10
    for number, sheet in enumerate(book.pages, 1):
        assert f"{number}" in sheet.extract_text().split()[:20]
    generic = next(item for item in book.outline[-1] if "What almost" in getattr(item, "title", ""))
    second = book.get_destination_page_number(generic)
    numbers = {sheet.indirect_reference.idnum: at for at, sheet in enumerate(book.pages)}
    led = set()
    for at, sheet in enumerate(book.pages):
        for link in (each.get_object() for each in sheet.get("/Annots", [])):
            assert "file:" not in str(link.get("/A"))
            led |= {(at, numbers[link["/Dest"][0].idnum])} if "/Dest" in link else set()
    assert any(at < second <= target for at, target in led)  # from one chapter into the next
