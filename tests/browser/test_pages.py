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


def check_loaded(page, site):
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


def test_a_page_is_complete_asks_for_nothing_outside_and_fits_its_window(wide, site):
    check_loaded(wide, site)


@pytest.mark.parametrize("name", PAGES)
def test_so_it_is_on_a_phone(visit, site, name):
    check_loaded(visit(name, 390), site)


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
    serious = [
        f"{fault['id']}: {node['target']} {node['failureSummary']}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]
    assert serious == []


def test_every_link_within_the_book_leads_somewhere(wide, site):
    links = wide.eval_on_selector_all("a[href]", HREFS)
    for url in {link for link in links if link.startswith(site)}:
        target, fragment = on_disk(url), urllib.parse.urlparse(url).fragment
        assert target.is_file(), url
        if fragment:
            assert f'id="{urllib.parse.unquote(fragment)}"' in target.read_text(), url


def test_header_buttons_lead_outside_only_where_the_repository_has_an_address(wide):
    address, branch = repository()
    buttons = wide.locator('.article-header-buttons a[href^="http"]')
    found = {urllib.parse.urlparse(url).netloc: url for url in buttons.evaluate_all(HREFS)}
    notebook = wide.name.removesuffix(".html") + ".ipynb"
    ends = {}
    if address and "/notebooks/" in wide.name:
        ends = {"colab.research.google.com": f"/blob/{branch}/{notebook}"}
        ends |= {"mybinder.org": f"/{branch}?urlpath=lab/tree/{notebook}"}
    assert all(found[host].endswith(end) for host, end in ends.items())
    assert {*found} == ({*ends, urllib.parse.urlparse(address).netloc} if address else set())


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


INNER = {"attnmem.__main__", "attnmem.checks"}  # the command line, and what refuses bad input
MODULES = sorted(
    name for _, name, _ in pkgutil.walk_packages(attnmem.__path__, "attnmem.") if name not in INNER
)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_of_the_library_is_documented(name):
    page = "".join(path.read_text() for path in (HTML / "book").glob("library*.html"))
    room = importlib.import_module(".".join(name.split(".")[:2]))
    whole = hasattr(room, "__all__")  # what it offers, wherever it is defined
    module = room if whole else importlib.import_module(name)
    offered = [own for own in getattr(module, "__all__", vars(module)) if not own.startswith("_")]
    named = {
        own: {f"{module.__name__}.{own}", f"{thing.__module__}.{own}"}
        for own in offered
        if inspect.isfunction(thing := getattr(module, own)) or inspect.isclass(thing)
        if thing.__module__.startswith("attnmem." if whole else module.__name__)
    }
    assert named or not offered
    assert [own for own, ids in named.items() if not any(f'id="{x}"' in page for x in ids)] == []
