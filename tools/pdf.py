"""The built book as one PDF: its pages in the order of the contents, bookmarks, page numbers."""

import json
import shutil
import tempfile
from pathlib import Path
from urllib.parse import unquote

from playwright.sync_api import Browser, sync_playwright
from pypdf import PdfReader, PdfWriter
from pypdf.annotations import Link
from pypdf.generic import Fit

from tools.chapters import HTML, ROOT, config, contents

CHROMIUM = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
TYPESET = "window.MathJax?.startup?.promise ?? true"  # resolves when all mathematics is set

# Chromium writes down the place of an element only if a link of the page leads to it: one for each.
PLACES = """() => document.querySelectorAll(".bd-article [id]").forEach(({ id }) => {
  document.body.appendChild(document.createElement("a")).href = "#" + encodeURIComponent(id);
})"""
HEADINGS = """() => [...document.querySelectorAll(".bd-article section > :is(h1, h2, h3)")].map(
  (heading) => {
    const words = heading.cloneNode(true);
    words.querySelectorAll(".headerlink").forEach((link) => link.remove());
    const text = words.textContent.replace(/\\s+/g, " ").trim();
    return [Number(heading.tagName[1]), text, heading.parentElement.id];
  })"""
NUMBERS = """
@page { @top-right { content: %s; font: 8pt sans-serif; color: #555; } }
@page :first { counter-set: page %d; @top-right { content: none; } }"""


def _print(browser: Browser, address: str, path: Path, first: int) -> list[tuple[int, str, str]]:
    """Print a page of the book, numbered from ``first``; level, words and id of its headings."""
    page = browser.new_page()
    page.goto(address)
    page.evaluate(TYPESET)
    headings = page.evaluate(HEADINGS)
    page.evaluate(PLACES)
    page.add_style_tag(content=NUMBERS % (json.dumps(headings[0][1]), first))
    page.pdf(path=path, format="A4", print_background=True)
    page.close()
    return headings


class _Book:
    """A PDF that grows; its places are numbers of pages, from zero, and heights on them."""

    def __init__(self) -> None:
        self.writer = PdfWriter()
        self.places: dict[str, tuple[int, float]] = {}
        self.links: list[tuple[int, list, str]] = []  # page, rectangle, target

    def add(self, printed: PdfReader, address: str) -> None:
        """Add pages, without their links; those wait until every place is known."""
        before = len(self.writer.pages)
        self.places[address] = before, float(printed.pages[0].mediabox.top)
        for name, destination in printed.named_destinations.items():
            number = before + printed.get_destination_page_number(destination)
            self.places[f"{address}#{unquote(name[1:])}"] = number, float(destination.top)
        for number, page in enumerate(printed.pages, before):
            for annotation in page.pop("/Annots", []):
                link = annotation.get_object()
                inside = f"{address}#{str(link.get('/Dest', ''))[1:]}"
                target = unquote(link.get("/A", {}).get("/URI", inside))
                self.links.append((number, link["/Rect"], target))
            self.writer.add_page(page)

    def bookmark(self, headings: list[tuple[int, str, str]], address: str, top: object) -> None:
        """Add bookmarks below that of a part, nested as the headings are."""
        parents = {0: top}
        for level, title, name in headings:
            number, height = self.places.get(f"{address}#{name}", self.places[address])
            parents = {above: item for above, item in parents.items() if above < level}
            place = {"page_number": number, "fit": Fit.xyz(top=height)}
            parents[level] = self.writer.add_outline_item(
                title=title, parent=parents[max(parents)], is_open=False, **place
            )

    def link(self) -> None:
        """Lead links within the book to its pages; files beside it are not in reach."""
        for number, rectangle, target in self.links:
            place = self.places.get(target) or self.places.get(target.partition("#")[0])
            if place:
                page, height = place
                link = Link(rect=rectangle, target_page_index=page, fit=Fit.xyz(top=height))
                self.writer.add_annotation(number, link)
            elif target.startswith("http"):
                self.writer.add_annotation(number, Link(rect=rectangle, url=target))


def build(browser: Browser, parts: list[tuple[str, list[str]]], out: Path) -> None:
    """Print parts of the built book, each a caption and names of its pages, into one PDF."""
    book = _Book()
    with tempfile.TemporaryDirectory() as folder:
        for caption, names in parts:
            outline_item = None
            for name in names:
                address, before = (HTML / f"{name}.html").as_uri(), len(book.writer.pages)
                headings = _print(browser, address, Path(folder, "page.pdf"), before + 1)
                book.add(PdfReader(Path(folder, "page.pdf")), address)
                if caption and not outline_item:
                    outline_item = book.writer.add_outline_item(title=caption, page_number=before)
                book.bookmark(headings, address, outline_item)
                print(f"{before + 1:5}  {headings[0][1]}", flush=True)
    book.link()
    book.writer.add_metadata({"/Title": config()["title"], "/Author": config()["author"]})
    book.writer.page_mode = "/UseOutlines"
    book.writer.write(out)


if __name__ == "__main__":
    with sync_playwright() as playwright:
        binary = shutil.which("chromium")
        chromium = playwright.chromium.launch(executable_path=binary, args=CHROMIUM)
        build(chromium, contents(), ROOT / "_build" / "book.pdf")
        chromium.close()
