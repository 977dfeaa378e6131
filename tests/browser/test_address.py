"""A small book below a made-up address: where its buttons lead, what its first cell installs."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest

from fresh import fresh_environment, library, run_notebook
from small_book import NOTEBOOK, PAGE, build
from tools.chapters import ROOT, wheel_name

REPOSITORY = "https://github.com/someone/somewhere"
NAME = "foundations-attention.ipynb"


@pytest.fixture(scope="module")
def published(tmp_path_factory, serve):
    """The book's address on this machine, and its folder."""
    folder = tmp_path_factory.mktemp("published")
    address = serve(folder / "_build" / "html").rstrip("/")
    there = {"repository": {"url": REPOSITORY, "branch": "main"}, "html": {"baseurl": address}}
    return address, build(folder, **there)


def follow(chromium, address, page, button):
    """Where a browser is after a click on a button of a page; all outside answers."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    outside = re.compile(f"^(?!{re.escape(address)})")
    context.route(outside, lambda route: route.fulfill(body="there", content_type="text/plain"))
    opened = context.new_page()
    opened.goto(f"{address}/{page}.html")
    link = opened.locator(button).first
    opened.locator(".dropdown", has=link).first.locator("button").first.click()
    with context.expect_page() as other:
        link.click()
    other.value.wait_for_load_state()
    url = other.value.url
    context.close()
    return url


def test_each_button_leads_to_a_file_that_is_there(chromium, published):
    address, html = published
    text = NOTEBOOK.replace("/notebooks/", "/text/")
    colab = follow(chromium, address, NOTEBOOK, "a[href*=colab]")
    there = f"someone/somewhere/blob/notebooks/{NAME}"
    assert colab == f"https://colab.research.google.com/github/{there}"
    assert (html / "downloads" / NAME).is_file()  # book.yml carries them to that branch
    binder = urlsplit(follow(chromium, address, NOTEBOOK, "a[href*=binder]"))
    assert binder.path == "/v2/gh/someone/somewhere/main"
    [opened] = parse_qs(binder.query)["urlpath"]
    assert (ROOT / opened.removeprefix("lab/tree/")).is_file()
    for page, source in ((NOTEBOOK, f"{text}.md"), (PAGE, f"{PAGE}.md")):
        edited = follow(chromium, address, page, "a.btn-source-edit-button")
        assert edited == f"{REPOSITORY}/edit/main/{source}"
        assert (ROOT / source).is_file()
        reported = follow(chromium, address, page, "a.btn-source-issues-button")
        assert reported.startswith(f"{REPOSITORY}/issues/new?title=")
        assert f"{page}.html" in parse_qs(urlsplit(reported).query)["title"][0]
    assert follow(chromium, address, PAGE, "a.btn-source-repository-button") == REPOSITORY


def test_a_first_cell_installs_the_library_from_the_address(published, tmp_path):
    """No wheel lies beside the notebook, and a wheel of another hash is refused."""
    address, html = published
    notebook = (html / "downloads" / NAME).read_text("utf-8")
    [known] = re.findall(f"{address}/downloads/{wheel_name()}#sha256=([0-9a-f]{{64}})", notebook)
    python, packages, variables = fresh_environment(tmp_path / "fresh")
    for name, text in (("changed", notebook.replace(known, known[::-1])), ("as-it-is", notebook)):
        (tmp_path / f"{name}.ipynb").write_text(text, "utf-8")
        run_notebook(python, variables, tmp_path, f"{name}.ipynb")
        installed = [*packages.glob("attnmem-*.dist-info")]
        assert len(installed) == (name == "as-it-is")
    assert library(python, variables).startswith(str(packages))
