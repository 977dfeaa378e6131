"""Theorems, terms and citations, which open in place: with a mouse, with the keyboard, at a tap."""

import re

import pytest
from axe_playwright_python.sync_playwright import Axe

PAGE = "book/notebooks/idea/turns.html"
# A link of each kind, and words of what it leads to.
LINKS = {
    'a[href$="#thm-mha-capacity"]': r"Theorem [\d.]+ \(Mahdavi",
    'a[href$="#term-Kruskal-rank"]': "Kruskal rank",
    'a[href*="notation.html#id"]': "Memorization capacity of multi-head attention",
    'a.internal[href^="#equation-eq"]': r"\(3\.\d+\)",
}


def shown(page, link, words):
    """The box beside a link; its formulas are typeset and it hides no part of the link."""
    page.wait_for_selector("#peek:visible")
    box = page.locator("#peek")
    assert re.search(words, box.inner_text())
    page.wait_for_function("!/\\\\\\(/.test(document.querySelector('#peek').innerText)")
    assert link.get_attribute("aria-describedby") == "peek"
    assert box.locator("a, [id]").count() == 0
    at, line = box.bounding_box(), link.evaluate("link => link.getClientRects()[0].toJSON()")
    assert at["y"] >= line["bottom"] or at["y"] + at["height"] <= line["top"]
    assert 0 <= at["x"] <= at["x"] + at["width"] <= page.viewport_size["width"]
    return box


@pytest.fixture(scope="module")
def page(opened):
    page = opened(PAGE)
    yield page
    page.context.close()


@pytest.mark.parametrize("selector", LINKS)
def test_a_mouse_opens_it_and_leaves_it(page, selector):
    page.faults.clear()  # axe asks for a style sheet that is not there
    link = page.locator(f"article {selector}").first
    link.scroll_into_view_if_needed()
    link.hover()
    box = shown(page, link, LINKS[selector])
    assert page.faults == []
    assert Axe().run(page, context="#peek").response["violations"] == []
    box.hover(position={"x": 5, "y": 5})
    page.wait_for_timeout(600)
    assert box.is_visible()  # one can go into it
    page.mouse.move(2, 2)
    page.wait_for_selector("#peek", state="hidden")


def test_the_keyboard_opens_it_and_escape_closes_it(page):
    (selector, words), *_ = LINKS.items()
    link = page.locator(f"article {selector}").first
    page.keyboard.press("Tab")  # what has the focus now has it from the keyboard
    link.focus()
    box = shown(page, link, words)
    page.keyboard.press("Escape")
    assert box.is_hidden()
    assert link.get_attribute("aria-describedby") is None
    link.blur()
    link.focus()
    shown(page, link, words)
    page.keyboard.press("Enter")
    page.wait_for_url("**/capacity-by-construction.html#thm-mha-capacity")


def test_a_tap_opens_it_and_a_second_one_follows(chromium, site):
    context = chromium.new_context(viewport={"width": 390, "height": 800}, has_touch=True)
    page = context.new_page()
    page.goto(site + PAGE)
    (selector, words), *_ = LINKS.items()
    link = page.locator(f"article {selector}").first
    link.tap()
    box = shown(page, link, words)
    page.locator("article h1").tap()
    assert box.is_hidden()
    link.tap()
    shown(page, link, words)
    link.tap()
    page.wait_for_url("**/capacity-by-construction.html#thm-mha-capacity")
    link = page.locator("article a[href*='#ch-']").first  # to what does not open
    link.tap()
    page.wait_for_url("**#ch-*")
    context.close()
