"""The repository's address, set and not: buttons of a small book, and the notebooks' first cell."""

import html
import importlib.util
import os
import re
import sys
from urllib.parse import urlparse

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tools import chapters
from tools.chapters import ROOT

NOTEBOOK, PAGE, SHORT = "book/notebooks/foundations/attention", "book/running", "book/colab"
ADDRESS, BRANCH = "https://github.com/someone/somewhere", "trunk"
OUTSIDE = r"github|gitlab|bitbucket|colab|binder|jupyterhub"
DOORS = r"btn-source|btn-launch|launch-buttons|source-buttons|logo_(?:colab|binder|jupyterhub)"


def cells():
    return [nbformat.v4.new_markdown_cell("# A chapter"), chapters.colab_cell()]


@pytest.fixture(scope="module")
def closed(built):
    """Built without an address: what jupyter-book takes in its place is none, either."""
    return built(cells(), repository={"branch": "main"})


@pytest.fixture(scope="module")
def opened(built):
    """Built with an address."""
    return built(cells(), repository={"url": f"{ADDRESS}.git/", "branch": BRANCH})


def links(page):
    return {html.unescape(url) for url in re.findall(r'(?:href|src)="([^"]*)"', page.read_text())}


def outside(page):
    return {url for url in links(page) if re.search(OUTSIDE, urlparse(url).netloc)}


def words(page):
    article = page.read_text().split("<article", 1)[1].split("</article>")[0]
    return " ".join(re.sub(r"<[^>]+>", "", article).split())


def test_without_an_address_no_page_leads_to_a_repository_and_help_says_how_to_run(closed):
    pages = list(closed.rglob("*.html"))
    assert len(pages) >= 5
    for page in pages:
        assert outside(page) == set()
        assert not re.search(DOORS, page.read_text()), page.name
    text = words(closed / f"{PAGE}.html")
    assert "without a public address" in text
    assert "make wheel" in text
    assert "rocket" not in words(closed / f"{SHORT}.html")
    chapter = closed / f"{NOTEBOOK}.html"
    assert any(url.endswith(f"_sources/{NOTEBOOK}.ipynb") for url in links(chapter))
    [help_] = [url for url in links(chapter) if url.endswith("running.html#one-notebook")]
    target = (chapter.parent / help_).resolve().parent / "running.html"
    assert 'id="one-notebook"' in target.read_text()


def test_with_an_address_buttons_lead_to_files_of_that_branch_and_to_issues(opened):
    chapter, file = opened / f"{NOTEBOOK}.html", f"{NOTEBOOK}.ipynb"
    assert (ROOT / file).is_file()
    assert {url for url in outside(chapter) if "/issues/" not in url} == {
        f"https://mybinder.org/v2/gh/someone/somewhere/{BRANCH}?urlpath=lab/tree/{file}",
        f"https://colab.research.google.com/github/someone/somewhere/blob/{BRANCH}/{file}",
        ADDRESS,
    }
    for name in (NOTEBOOK, PAGE, SHORT):
        [issues] = [url for url in outside(opened / f"{name}.html") if "/issues/" in url]
        assert issues.startswith(f"{ADDRESS}/issues/new?")
        assert ADDRESS in links(opened / f"{name}.html")
    for name in (PAGE, SHORT):  # nothing to launch
        assert len(outside(opened / f"{name}.html")) == 2
        assert "without a public address" not in words(opened / f"{name}.html")
    assert "rocket" in words(opened / f"{SHORT}.html")


# --- the first cell -------------------------------------------------------------------------------


@pytest.fixture
def first_cell(monkeypatch, tmp_path):
    """Runs it in an empty folder: its error as text, and what it has asked pip for."""
    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    asked = []
    shell.register_magic_function(asked.append, "line", "pip")

    def run(installed=False, colab=False, **settings):
        monkeypatch.setattr(chapters, "config", lambda: settings)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
        if colab:
            monkeypatch.setitem(sys.modules, "google.colab", object())
        error = shell.run_cell(chapters.colab_cell().source).error_in_exec
        assert error is None or isinstance(error, ModuleNotFoundError)
        return str(error or ""), asked

    return run


THERE = {"repository": {"url": f"{ADDRESS}/", "branch": BRANCH}}
SITE = {"html": {"baseurl": f"{ADDRESS}/pages/"}}
FROM = {
    "nowhere": ({"repository": {"url": ""}}, ""),
    "the repository": (THERE, f"git+{ADDRESS}@{BRANCH}"),
    "the book": ({**THERE, **SITE}, f"{ADDRESS}/pages/downloads/{chapters.wheel_name()}"),
}


@pytest.mark.parametrize("colab", [True, False])
@pytest.mark.parametrize("place", FROM)
def test_the_first_cell_does_nothing_or_installs_or_says_what_is_needed(first_cell, colab, place):
    settings, source = FROM[place]
    assert first_cell(installed=True, colab=colab, **settings) == ("", [])
    error, asked = first_cell(colab=colab, **settings)
    if colab and source:
        assert (error, asked) == ("", [f'install -q "attnmem[certify] @ {source}"'])
    else:
        assert all(step in error for step in ("front page", "beside this notebook", "on Colab"))
        assert f"pip install '{source or 'attnmem-*.whl'}'" in error
        assert asked == []


@pytest.mark.parametrize("place", FROM)
@pytest.mark.parametrize("again", ["", " (1)"])
def test_it_installs_the_newest_wheel_beside_it(first_cell, tmp_path, again, place):
    """Also if a browser named it as a second download."""
    (tmp_path / f"attnmem-0.1.0-py3-none-any{again}.whl").touch()
    (tmp_path / "attnmem-0.2.0-py3-none-any.whl").touch()
    os.utime(tmp_path / "attnmem-0.2.0-py3-none-any.whl", (0, 0))
    error, [asked] = first_cell(**FROM[place][0])
    assert error == ""
    wheel = r"file://\S+/attnmem-0\.1\.0-py3-none-any\.whl"
    assert re.fullmatch(rf'install -q "attnmem\[certify\] @ {wheel}"', asked)


@pytest.mark.parametrize(
    ("url", "read"),
    [(None, ""), ("", ""), (f"{ADDRESS}/", ADDRESS), (f"{ADDRESS}.git", ADDRESS)],
)
def test_an_address_is_read_in_every_form(monkeypatch, url, read):
    monkeypatch.setattr(chapters, "config", lambda: {"repository": {"url": url}})
    assert chapters.repository() == (read, "main")
