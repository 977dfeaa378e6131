"""Every page, wide and on a phone, with nothing to reach but the book itself."""

import importlib
import inspect
import pkgutil
import re
import urllib.parse

import pytest
from axe_playwright_python.sync_playwright import Axe

import attnmem

from tools.chapters import ARGUMENT, HTML, ROOT, config, pages, repository
from tools.chapters import site as published

PAGES = [f"{name}.html" for name in pages()]
LIGHT, HEAVY = 1_900_000, 2_200_000  # bytes: of a page of the argument, and of any page


def on_disk(url):
    path = urllib.parse.unquote(urllib.parse.urlparse(url).path)
    return HTML / path.lstrip("/")


# Links of a picture have an address that is no string.
HREFS = "links => links.map(({ href }) => new URL(href.baseVal ?? href, document.baseURI).href)"


WORDS = """article => {
    const copy = article.cloneNode(true);
    copy.querySelectorAll("pre, code, script, mjx-container").forEach(part => part.remove());
    return copy.textContent;
}"""


@pytest.fixture(scope="module", params=PAGES)
def wide(request, opened):
    """A page in a window of a desk, opened once for all tests of it."""
    page = opened(request.param)
    page.name = request.param
    yield page
    page.context.close()


def test_a_page_is_complete_and_fits(wide, visit, site, overhang):
    """It asks for nothing outside, and nothing in it is wider than the page."""
    for page in (wide, visit(wide.name, 390)):
        assert page.faults == []
        assert [url for url in page.loaded if not url.startswith((site, "data:", "blob:"))] == []
        files = {on_disk(url) for url in page.loaded if url.startswith(site)}
        most = LIGHT if wide.name.split("/")[-2] in ARGUMENT else HEAVY
        assert sum(file.stat().st_size for file in files) <= most
        assert not any(file.name == "searchindex.js" for file in files)
        assert overhang(page) <= 0
        formulas = page.locator("article .math").count()
        assert page.locator("article .math > mjx-container").count() >= formulas
        assert page.locator("mjx-merror").count() == 0
        assert page.locator("[data-icon] animate").count() == 0  # what an unknown icon becomes
    words = wide.locator("article").first.evaluate(WORDS)
    assert re.findall(r"\$[^$\n]+\$", words) == []  # no formula is left as it was typed


PAINTED = "performance.getEntriesByName('first-contentful-paint').length > 0"


def test_mathematics_do_not_hold_up_the_first_paint(chromium, site):
    """Without MathJax a page is painted, and its scripts have run."""
    page = chromium.new_page()
    page.route("**/mathjax/**", lambda route: None)  # no answer comes
    page.goto(f"{site}book/notebooks/idea/turns.html", wait_until="domcontentloaded")
    page.wait_for_function(PAINTED)
    page.wait_for_selector(".attempt input")
    assert page.locator("mjx-container").count() == 0
    page.close()


# Rules of axe-core that it does not try by itself.
MORE = {"rules": {"label-content-name-mismatch": {"enabled": True}}}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_is_accessible(wide, theme):
    """Nothing stands in the way of any reader, as far as axe-core can tell."""
    if theme == "dark" and wide.name.split("/")[-2] not in ARGUMENT:
        pytest.skip("colours are the same on all pages, and the argument has the pictures")
    wide.add_style_tag(content="* { transition: none !important }")  # colours would still fade
    wide.emulate_media(color_scheme=theme)
    wide.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    found = Axe().run(wide, options=MORE).response["violations"]
    nodes = [(fault["id"], node["target"][0]) for fault in found for node in fault["nodes"]]
    heads = [where for name, where in nodes if name == "empty-table-header"]
    formulas = [where for where in heads if wide.locator(where).locator("mjx-math").count()]
    assert [node for node in nodes if node[1] not in formulas] == []  # axe reads no formula


# Of the visible parts of an article: what its box hides, what leaves the article where nothing
# scrolls, and what scrolls without a sign of it or without the keyboard.
CUT = """article => {
    const edge = article.getBoundingClientRect().right + 1;
    const scrolls = (part) => /auto|scroll/.test(getComputedStyle(part).overflowX);
    const wider = (part) => part.scrollWidth > part.clientWidth + 2;
    const cut = (part) => {
        const { overflowX, display, position } = getComputedStyle(part);
        const { right, width, height } = part.getBoundingClientRect();
        if (!width || !height || display === "inline" || position === "absolute") return false;
        if (part.parentElement.closest("svg, mjx-container")) return false;
        if (/hidden|clip/.test(overflowX) && wider(part)) return "hides";
        if (scrolls(part) && wider(part)) {
            if (!part.matches(".wide.more-right")) return "scrolls without a sign";
            if (part.tabIndex < 0) return "scrolls for the mouse alone";
        }
        if (right <= edge || part.matches(".full-width")) return false;
        for (let above = part.parentElement; above !== article; above = above.parentElement)
            if (scrolls(above)) return false;
        return "leaves the page";
    };
    return [...article.querySelectorAll("*")].map((part) => [cut(part), part])
        .filter(([fault]) => fault)
        .map(([fault, part]) => [fault, part.outerHTML.slice(0, 120)]);
}"""
# Sizes of letters on the screen: of pictures that are text, and of drawn ones, whose least has 20
# pixels in the file (10 points at 144 to an inch).
LETTERS = """article => [
    ...[...article.querySelectorAll("figure svg text")].filter((text) => text.getScreenCTM())
        .filter((text) => text.textContent.trim() && text.getBoundingClientRect().width)
        .map((text) => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a),
    ...[...article.querySelectorAll(".picture img")].filter((image) => image.clientWidth)
        .map((image) => (20 * image.clientWidth) / image.naturalWidth),
]"""
OPEN = "document.querySelectorAll('details').forEach((fold) => (fold.open = true))"
SETTLED = "new Promise((done) => setTimeout(done, 300))"


@pytest.mark.parametrize("width", [390, 320])  # the last is a desk at 400%
def test_nothing_is_cut_and_letters_can_be_read(wide, visit, overhang, width):
    if width == 320 and wide.name.split("/")[-2] not in ARGUMENT:
        pytest.skip("the record is tried at 390 pixels")
    page = visit(wide.name, width)
    page.evaluate(OPEN)
    page.evaluate(SETTLED)
    article = page.locator("article.bd-article")
    assert article.evaluate(CUT) == []
    assert overhang(page) <= 0
    if width == 390:
        assert [size for size in article.evaluate(LETTERS) if size < 8.95] == []


LOOSE = """formulas => formulas.filter((formula) => {
    const next = formula.nextSibling;
    return !formula.closest(".glue") && next?.nodeType === 3 && /^[^\\w\\s]/.test(next.data);
}).map((formula) => formula.parentElement.textContent)"""
BROKEN = "glued => glued.filter((each) => getComputedStyle(each).whiteSpace !== 'nowrap').length"


def test_punctuation_stays_with_the_formula_before_it(wide):
    assert wide.locator("article span.math").evaluate_all(LOOSE) == []
    assert wide.locator("article .glue").evaluate_all(BROKEN) == 0


def test_a_page_has_a_title_an_icon_and_a_card(wide):
    """A page says what it is once, and has an icon and a card."""

    def said(name, of="content"):
        (tag,) = wide.locator(f"head {name}").all()
        return tag.get_attribute(of)

    assert "width=device-width" in said('meta[name="viewport"]')
    assert 40 <= len(said('meta[name="description"]')) <= 200
    assert said('meta[property="og:title"]')
    assert said('meta[name="author"]') == config()["author"]
    for address, most in (
        (said('meta[property="og:image"]'), 200_000),
        (said('link[rel*="icon"]', "href"), 2_000),
    ):
        beside = (HTML / wide.name).parent / address
        file = HTML / address.removeprefix(f"{published()}/") if published() else beside
        assert (file if file.is_file() else beside).stat().st_size < most
    if (ROOT / ".git").exists():
        state = wide.locator("footer .built").inner_text()
        assert re.fullmatch(r"State of \d{4}-\d\d-\d\d, commit [0-9a-f]{7,}\.", state)


@pytest.mark.parametrize("name", ["genindex.html", "prf-prf.html", "404.html"])
def test_pages_that_sphinx_makes_fit_a_phone(visit, overhang, name, site):
    page = visit(name, 390)
    assert overhang(page) <= 0
    assert page.locator('head meta[name="viewport"]').count() == 1
    if name == "404.html":  # a wrong address may have any depth
        base = f"{published()}/" if published() else site
        assert page.evaluate("document.baseURI") == base
        assert page.locator("nav li a").count() > 10


def test_links_and_buttons_lead_somewhere(wide, site):
    """Buttons lead to the repository, and the download to a notebook."""
    links = wide.eval_on_selector_all("a[href]", HREFS)
    for url in {link for link in links if link.startswith(site)}:
        target, fragment = on_disk(url), urllib.parse.urlparse(url).fragment
        assert target.is_file(), url
        if fragment:
            assert f'id="{urllib.parse.unquote(fragment)}"' in target.read_text(), url
    buttons = wide.locator('.article-header-buttons a[href^="http"]').evaluate_all(HREFS)
    assert bool(buttons) == bool(repository()[0])  # tests/book/test_built.py says where they lead
    if "/notebooks/" in wide.name:  # help is beside the download
        saved = wide.locator("a.btn-download-source-button").first
        assert saved.get_attribute("download") is not None
        beside = wide.locator("ul", has=saved).locator("a.btn-how-to-run-button").first
        assert beside.get_attribute("href").endswith("running.html#one-notebook")


NUMBER = "figcaption .caption-number, caption .caption-number"


def test_pictures_and_tables_have_numbered_captions(wide):
    """Every picture and every table has a numbered caption, but for what the explorer answers."""
    shown = wide.locator("article :is(img, table):not(.explored *, #answers)")
    captioned = shown.filter(has=wide.locator(NUMBER)).count()
    framed = wide.locator("article figure", has=wide.locator(NUMBER)).locator("img, table").count()
    # A record shows its picture above its table, whose title is that of both.
    record = wide.locator("article .cell", has_text="record(").locator("img")
    assert shown.count() == captioned + framed + record.count()
    assert wide.locator("article figure.pic").filter(has_not=wide.locator(NUMBER)).count() == 0


# The command line, what refuses bad input, and what writes this book's pages (of it readers see
# verdicts and exercises, which tests/book/test_library.py looks for).
INNER = {f"attnmem.{name}" for name in ("__main__", "checks", "examples", "terminal", "pages")}
INNER |= {f"attnmem.pages.{name}" for name in ("figures", "live", "record", "reporting", "scaling")}
MODULES = {name for _, name, _ in pkgutil.walk_packages(attnmem.__path__, "attnmem.")} - INNER


@pytest.mark.parametrize("name", sorted(MODULES))
def test_public_names_are_documented(name):
    """Every public name of the library is documented."""
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
