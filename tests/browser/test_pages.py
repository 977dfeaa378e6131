"""Every page, wide and on a phone, with nothing to reach but the book itself."""

import importlib
import inspect
import pkgutil
import re
import urllib.parse

import pytest
from axe_playwright_python.sync_playwright import Axe

import attnmem

from tools.chapters import HTML, pages, repository

PAGES = [f"{name}.html" for name in pages()]
WEIGHT = 1_500_000  # bytes of a page beside its typesetting


def on_disk(url):
    path = urllib.parse.unquote(urllib.parse.urlparse(url).path)
    return HTML / path.lstrip("/")


# Links of a picture have an address that is no string.
HREFS = "links => links.map(({ href }) => new URL(href.baseVal ?? href, document.baseURI).href)"


@pytest.fixture(scope="module", params=PAGES)
def wide(request, opened):
    """A page in a window of a desk, opened once for all tests of it."""
    page = opened(request.param)
    page.name = request.param
    yield page
    page.context.close()


def test_a_page_is_complete_asks_for_nothing_outside_and_fits_a_desk_and_a_phone(wide, visit, site):
    for page in (wide, visit(wide.name, 390)):
        assert page.faults == []
        assert [url for url in page.loaded if not url.startswith((site, "data:", "blob:"))] == []
        files = {on_disk(url) for url in page.loaded if url.startswith(site)}
        assert sum(file.stat().st_size for file in files if "mathjax" not in file.parts) < WEIGHT
        needed, window = page.evaluate("[document.scrollingElement.scrollWidth, innerWidth]")
        assert needed <= window
        formulas = page.locator("article .math").count()
        assert page.locator("article .math > mjx-container").count() >= formulas
        assert page.locator("mjx-merror").count() == 0
        assert page.locator("[data-icon] animate").count() == 0  # what an unknown icon becomes


WORDS = """article => {
    const copy = article.cloneNode(true);
    copy.querySelectorAll("pre, code, script, mjx-container").forEach(part => part.remove());
    return copy.textContent;
}"""


def test_no_formula_is_left_as_it_was_typed(wide):
    words = wide.locator("article").first.evaluate(WORDS)
    assert re.findall(r"\$[^$\n]+\$", words) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_serious_stands_in_the_way_of_any_reader(wide, theme):
    wide.add_style_tag(content="* { transition: none !important }")  # colours would still fade
    wide.emulate_media(color_scheme=theme)
    wide.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    found = Axe().run(wide).response["violations"]
    assert [fault for fault in found if fault["impact"] in ("serious", "critical")] == []


def test_links_within_the_book_lead_somewhere_and_buttons_outside_to_the_repository(wide, site):
    links = wide.eval_on_selector_all("a[href]", HREFS)
    for url in {link for link in links if link.startswith(site)}:
        target, fragment = on_disk(url), urllib.parse.urlparse(url).fragment
        assert target.is_file(), url
        if fragment:
            assert f'id="{urllib.parse.unquote(fragment)}"' in target.read_text(), url
    buttons = wide.locator('.article-header-buttons a[href^="http"]').evaluate_all(HREFS)
    assert bool(buttons) == bool(repository()[0])  # tests/book/test_address.py says where they lead


def test_the_download_is_an_existing_notebook_and_help_is_beside_it(wide):
    if "/notebooks/" not in wide.name:
        return
    saved = wide.locator("a.btn-download-source-button").first
    assert saved.get_attribute("download") is not None
    assert (HTML / wide.name).parent.joinpath(saved.get_attribute("href")).resolve().is_file()
    beside = wide.locator("ul", has=saved).locator("a.btn-how-to-run-button").first
    assert beside.get_attribute("href").endswith("running.html#one-notebook")


NUMBER = "figcaption .caption-number, caption .caption-number"


def test_every_picture_and_every_table_has_a_numbered_caption(wide):
    shown = wide.locator("article :is(img, table):not(.explored *)")
    captioned = shown.filter(has=wide.locator(NUMBER)).count()
    framed = wide.locator("article figure", has=wide.locator(NUMBER)).locator("img, table").count()
    assert shown.count() == captioned + framed


# The command line, what refuses bad input, and the grids of one paper.
INNER = {f"attnmem.{name}" for name in ("__main__", "checks", "examples", "studies.mahdavi")}
MODULES = {name for _, name, _ in pkgutil.walk_packages(attnmem.__path__, "attnmem.")} - INNER


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_public_name_of_the_library_is_documented(name):
    page = "".join(path.read_text() for path in (HTML / "book").glob("library*.html"))
    room = importlib.import_module(".".join(name.split(".")[:2]))
    whole = hasattr(room, "__all__")  # what it offers, wherever it is defined
    module = room if whole else importlib.import_module(name)
    offered = getattr(module, "__all__", [own for own in vars(module) if not own.startswith("_")])
    for own in offered:
        thing = getattr(module, own)
        home = getattr(thing, "__module__", None) or ""
        here = home.startswith("attnmem." if whole else module.__name__)
        if here and (inspect.isfunction(thing) or inspect.isclass(thing)):
            assert f'id="{module.__name__}.{own}"' in page or f'id="{home}.{own}"' in page, own
