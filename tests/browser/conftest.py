"""Chromium, and the pages that `make html` has built, served to it alone."""

import contextlib
import functools
import http.server
import shutil
import threading

import pytest
from playwright.sync_api import sync_playwright

from tools.chapters import HTML
from tools.chapters import site as published
from tools.pdf import CHROMIUM, TYPESET

FITTED = "() => 'fitted' in document.body.dataset"  # book.js has found what is too wide


@pytest.fixture(scope="session")
def chromium():
    """Debian's Chromium if there is one, else the one that playwright has installed."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=CHROMIUM)
        yield found
        found.close()


@pytest.fixture(scope="session")
def overhang():
    """A function of a page: by how many pixels its window is too narrow for it, if it is."""
    return lambda page: page.evaluate("document.scrollingElement.scrollWidth - innerWidth")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def serve():
    """A function that serves a folder on this machine, also one that comes later: its address."""
    with contextlib.ExitStack() as servers:

        def start(folder):
            handler = functools.partial(_Quiet, directory=str(folder))
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
            servers.enter_context(server)
            servers.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            return f"http://127.0.0.1:{server.server_port}/"

        yield start


@pytest.fixture(scope="session")
def site(serve):
    """The address of a server of the built book on this machine."""
    assert HTML.is_dir(), "no built book: make html"
    return serve(HTML)


@pytest.fixture(scope="session")
def opened(chromium, site):
    """A function that opens a page and waits until it is complete; nothing else is reachable.

    What a page asks of the book's own address, if it has one, is the built book.
    What went wrong is in the page's ``faults``, what it asked for, also outside, in ``loaded``.
    """

    def answer(route):
        if published() and route.request.url.startswith(f"{published()}/"):
            name = route.request.url.removeprefix(f"{published()}/").split("?")[0]
            route.fulfill(path=HTML / name)
        else:
            route.abort()

    def open_page(name: str, width: int = 1280):
        context = chromium.new_context(viewport={"width": width, "height": 900})
        context.route(lambda url: not url.startswith(site), answer)
        page = context.new_page()
        page.faults, page.loaded = [], []
        page.on("console", lambda m: m.type == "error" and page.faults.append(m.text))
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("requestfailed", lambda request: page.faults.append(f"failed: {request.url}"))
        page.on("request", lambda request: page.loaded.append(request.url))
        page.goto(name if name.startswith(site) else site + name)
        page.evaluate(TYPESET)
        page.wait_for_function(FITTED)
        return page

    return open_page


@pytest.fixture
def visit(opened):
    """The same for one test, which leaves nothing open."""
    visited = []
    yield lambda *where: visited.append(opened(*where)) or visited[-1]
    for page in visited:
        page.context.close()
