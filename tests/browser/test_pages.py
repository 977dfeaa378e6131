"""Every page, wide and on a phone, with nothing to reach but the book itself."""

import importlib
import inspect
import pkgutil
import urllib.parse

import pytest
from axe_playwright_python.sync_playwright import Axe

import attnmem

from .conftest import HTML, pages
from chapters import ROOT, config

PAGES = pages()
WIDTHS = (1280, 390)
WEIGHT = 1_500_000  # bytes of a page beside its typesetting


def on_disk(url):
    path = urllib.parse.unquote(urllib.parse.urlparse(url).path)
    return HTML / path.lstrip("/")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_complete_asks_for_nothing_outside_and_fits_its_window(visit, site, name, width):
    page = visit(name, width)
    assert page.faults == []
    assert [url for url in page.loaded if not url.startswith((site, "data:", "blob:"))] == []
    files = {on_disk(url) for url in page.loaded if url.startswith(site)}
    assert sum(file.stat().st_size for file in files if "mathjax" not in file.parts) < WEIGHT
    wide, window = page.evaluate("[document.scrollingElement.scrollWidth, innerWidth]")
    assert wide <= window
    formulas = page.locator("article .math").count()
    assert page.locator("article .math > mjx-container").count() >= formulas
    assert page.locator("mjx-merror").count() == 0
    assert page.locator("[data-icon] animate").count() == 0  # what an unknown icon becomes


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_serious_stands_in_the_way_of_any_reader(visit, name, theme):
    page = visit(name, color_scheme=theme)
    page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    found = Axe().run(page).response["violations"]
    serious = [
        f"{fault['id']}: {node['target']} {node['failureSummary']}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]
    assert serious == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_within_the_book_leads_somewhere(visit, site, name):
    page = visit(name)
    links = page.eval_on_selector_all("a[href]", "links => links.map(a => a.href)")
    for url in {link for link in links if link.startswith(site)}:
        target, fragment = on_disk(url), urllib.parse.urlparse(url).fragment
        assert target.is_file(), url
        if fragment:
            assert f'id="{urllib.parse.unquote(fragment)}"' in target.read_text(), url


@pytest.mark.parametrize("name", [name for name in PAGES if "/notebooks/" in name])
def test_launch_links_and_the_download_are_those_of_an_existing_notebook(visit, name):
    page = visit(name)
    notebook = name.removesuffix(".html") + ".ipynb"
    assert (ROOT / notebook).is_file()
    repository = config()["repository"]
    colab = page.locator('a[href*="colab.research.google.com"]').first.get_attribute("href")
    assert colab.endswith(f"/blob/{repository['branch']}/{notebook}")
    binder = page.locator('a[href*="mybinder.org"]').first.get_attribute("href")
    assert binder.endswith(f"urlpath=lab/tree/{notebook}")
    saved = page.locator("a.btn-download-source-button").first
    assert saved.get_attribute("download") is not None
    assert (HTML / name).parent.joinpath(saved.get_attribute("href")).resolve().is_file()


INNER = {"attnmem.__main__", "attnmem.checks"}  # the command line, and what refuses bad input
MODULES = sorted(
    name for _, name, _ in pkgutil.walk_packages(attnmem.__path__, "attnmem.") if name not in INNER
)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_of_the_library_is_documented(name):
    page = "".join(path.read_text() for path in (HTML / "book").glob("library*.html"))
    module = importlib.import_module(name)
    package = next((p for p in ("constructions", "independence") if f".{p}" in name), None)
    if package:  # what the package offers
        offered = importlib.import_module(f"attnmem.{package}").__all__
        expected = [f"attnmem.{package}.{own}" for own in offered]
    else:
        expected = [
            f"{name}.{own}"
            for own, value in vars(module).items()
            if not own.startswith("_")
            and getattr(value, "__module__", None) == name
            and (inspect.isfunction(value) or inspect.isclass(value))
        ]
    assert expected
    assert [own for own in expected if f'id="{own}"' not in page] == []
