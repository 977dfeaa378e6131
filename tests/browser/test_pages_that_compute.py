"""Search, the filter of the claims, and the explorer, used as a reader uses them."""

import itertools
import json
import math
import random
import re
import urllib.parse

import pytest

from attnmem.core import bounds
from attnmem.theory import counts
from attnmem_yours import capacity

from tools import claims
from tools.graph import edges, read, recorded

EXPLORER = "book/notebooks/beyond/explorer.html"
CLAIMS = "book/claims.html"


def test_search_finds_a_word_and_quotes_sentences(visit):
    """Search finds a word of the book, shows it and quotes sentences."""
    page = visit("search.html?q=Kruskal", 390)
    page.wait_for_selector("#search-results li .context")
    titles = page.locator("#search-results li a").all_inner_texts()
    assert any("linear independence" in title for title in titles)
    assert page.faults == []
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    quoted = page.locator("#search-results li .context").all_inner_texts()
    assert not any("Contents" in words for words in quoted)


def test_the_first_search_loads_the_index(visit):
    """The index of search is loaded by the first search, not by a page."""
    page = visit("book/notebooks/idea/turns.html")
    assert not any("searchindex" in url for url in page.loaded)
    page.keyboard.press("Control+k")
    page.keyboard.type("Kruskal")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    assert any("searchindex" in url for url in page.loaded)


def test_search_finds_known_models_by_name(visit):
    """Search finds the page of known models by their name."""
    page = visit("search.html?q=GPT-2")
    page.wait_for_selector("#search-results li a[href*=explorer]")


@pytest.mark.parametrize(
    ("asked", "first"),
    {
        "how many facts fit in my layer": "beyond/explorer.html",
        "How many facts fit in my layer?": "beyond/explorer.html",
        "LoRA": "beyond/explorer.html",
        "bf16": "answer/editing.html",
        "quantization": "answer/editing.html",
        "NTK": "idea/most.html",
        "superposition": "training/classes.html",
        "memorise": "book/notation.html",
    }.items(),
)
def test_search_finds_first_what_an_engineer_asks_for(visit, asked, first):
    """The page on it is the first result, and says the word where a reader sees it."""
    page = visit(f"search.html?q={urllib.parse.quote(asked)}")
    link = page.locator("#search-results li a").first
    link.wait_for()
    assert first in link.get_attribute("href")
    link.click()
    page.wait_for_selector("article.bd-article")
    said = page.locator("article.bd-article").inner_text().lower()
    assert asked.lower().rstrip("?") in said


@pytest.mark.parametrize("name", ["your-data", "explorer"])
def test_outputs_and_commands_fit_their_boxes(visit, name):
    """No output and no command of a tool is wider than its box."""
    page = visit(f"book/notebooks/beyond/{name}.html")
    wide = "boxes => boxes.filter(b => b.scrollWidth > b.clientWidth + 1).map(b => b.textContent)"
    assert page.locator("pre").evaluate_all(wide) == []


TALL = 120  # pixels of the page for each claim, with everything folded


def shown(page):
    return page.locator("details.claim:visible")


def test_claims_are_filtered_and_the_address_keeps_it(visit):
    """Claims can be filtered, and the address keeps what is asked."""
    page, verdicts, all_claims = visit(CLAIMS), recorded(), claims.claims().values()
    known = {claim.key: claims.facets(claim, verdicts.get(claim.key)) for claim in all_claims}
    assert shown(page).count() == len(known)
    assert f"{len(known)} of {len(known)} claims" in page.locator("#claims-filter").inner_text()
    for name in ("paper", "kind", "verdict", "grade"):
        for value in {each[name] for each in known.values()} - {""}:
            page.select_option(f"[name={name}]", claims.slug(value))
            wanted = [key for key, each in known.items() if each[name] == value]
            ids = shown(page).evaluate_all("entries => entries.map(entry => entry.id)")
            assert ids == [f"claim-{key}" for key in wanted]
            assert f"{name}={claims.slug(value)}" in page.url
        page.select_option(f"[name={name}]", "")
    assert "?" not in page.url
    page.select_option("[name=paper]", "dana")
    page.select_option("[name=kind]", "theorem")
    both = [each for each in known.values() if (each["paper"], each["kind"]) == ("dana", "theorem")]
    again = visit(page.url)
    assert shown(page).count() == shown(again).count() == len(both) > 0
    assert again.locator("[name=kind]").input_value() == "theorem"
    assert again.locator("section#all-claims h3:visible").count() == 1
    assert shown(visit(f"{CLAIMS}?kind=none")).count() == len(known)


def test_claims_are_searched_also_where_folded(visit):
    """Claims can be searched, also by what is folded and in formulas."""
    page, known = visit(CLAIMS), claims.claims()
    for words in ("kruskal", "sign of the ENTROPY", "H d_h", "dana-exp1/paper"):
        page.fill("[name=text]", words)
        assert 0 < shown(page).count() < len(known)
    exp1 = [claim for claim in known.values() if "dana-exp1/paper" in claims.files(claim)]
    assert shown(page).count() == len(exp1)
    again = visit(page.url)
    assert again.locator("[name=text]").input_value() == "dana-exp1/paper"
    assert shown(again).count() == len(exp1)
    again.fill("[name=text]", "no such words")
    assert shown(again).count() == 0
    assert again.locator("#claims-filter output").inner_text() == f"0 of {len(known)} claims"


def in_view(page, key):
    top = page.locator(f"#claim-{key}").evaluate("entry => entry.getBoundingClientRect().top")
    return 0 <= top < 400


def test_an_address_with_a_claim_unfolds_it(visit):
    """An address with a claim opens and shows it, and an unfolded claim is in the address."""
    page = visit(f"{CLAIMS}#claim-dana-corollary-1")
    for key in ("dana-corollary-1", "mahdavi-theorem-1"):
        page.evaluate(f"location.hash = '#claim-{key}'")
        page.wait_for_timeout(300)
        assert page.locator(f"#claim-{key}[open] .sd-summary-content").is_visible()
        assert in_view(page, key)
    hidden = visit(f"{CLAIMS}?paper=mahdavi#claim-dana-corollary-1")  # what is asked for gives way
    hidden.wait_for_timeout(300)
    assert in_view(hidden, "dana-corollary-1")
    assert "paper=" not in hidden.url
    page = visit(f"{CLAIMS}?paper=dana")
    for end in ("?paper=dana#claim-dana-lemma-1", "?paper=dana"):
        page.locator("#claim-dana-lemma-1 summary").click()
        page.wait_for_timeout(200)
        assert page.url.endswith(end)


def test_claims_are_short_and_a_list_without_script(visit, chromium, site):
    """The claims are short while folded, and a list without script."""
    page = visit(CLAIMS)
    assert page.locator("details.claim[open]").count() == 0
    assert page.evaluate("document.scrollingElement.scrollHeight") <= TALL * len(claims.claims())
    with chromium.new_context(java_script_enabled=False) as context:
        plain = context.new_page()
        plain.goto(site + CLAIMS)
        assert shown(plain).count() == len(claims.claims())
        assert not plain.locator("#claims-filter").is_visible()
    page = visit(f"{CLAIMS}#claim-dana-experiment-1")
    with page.expect_download() as saved:  # rows, under a name of their own
        page.click("#claim-dana-experiment-1 a[download]")
    assert saved.value.suggested_filename == "dana-exp1-paper.csv"


SEEN = """graph => {
    const { left, right, top, bottom } = graph.getBoundingClientRect();
    return [...graph.querySelectorAll("rect")].map((box) => box.getBoundingClientRect())
        .filter((b) => b.left >= left && b.right <= right && b.top >= top && b.bottom <= bottom)
        .length;
}"""
WIDE = """boxes => boxes.filter((box) => [...box.querySelectorAll("text")].some((text) =>
    text.getBoundingClientRect().right > box.querySelector("rect").getBoundingClientRect().right
)).map((box) => box.textContent)"""


@pytest.mark.parametrize(("width", "least"), [(1280, 6), (390, 1)])
def test_the_graph_has_legible_boxes_with_links(visit, width, least):
    """The graph opens on boxes that can be read and lead to their claims."""
    page = visit(CLAIMS, width)
    graph, drawn = page.locator(".graph"), page.locator('.graph a[href^="#claim-"]')
    linked = {node for edge in edges(read(), recorded()) for node in edge[:2]}
    assert drawn.count() == len(linked & {*claims.claims()})
    assert graph.evaluate(SEEN) >= least
    assert page.locator(".graph a").evaluate_all(WIDE) == []
    if width == 390:
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
        assert graph.evaluate("box => box.scrollWidth > box.clientWidth && box.clientWidth <= 390")
        entries = page.locator("details.claim, table.contradicted :is(td, caption)")
        assert min(entries.evaluate_all("parts => parts.map((part) => part.clientWidth)")) > 300
    drawn.first.click()
    page.wait_for_timeout(300)
    assert in_view(page, drawn.first.get_attribute("href").removeprefix("#claim-"))


SIZES = ("H", "d", "d_h", "n", "S", "N", "L")
GRID = itertools.product(
    (1, 7, 128), (2, 31, 8192), (1, 2, 64), (1, 2, 3, 40), (1, 5), (2, 50), (1, 3)
)


def expected(H, d, d_h, n, S, N, L):
    """Every count of the page by `attnmem.core.bounds`; None where a condition fails."""
    layer = counts.mha_parameters(H, d_h, d)
    units = (layer - 1) // ((n + 1) * d + 2)  # a unit reads n tokens and a query; two more weights
    wanted = {  # the condition, and the arguments
        "mha_capacity": (n < d, H, n, d_h),
        "aot_capacity": (d_h <= d, H, d_h, d),
        "own_context_rank": (n >= 2, H, n, d),
        "own_context_floor": (n >= 2, H, d_h, d),
        "shared_context_floor": (n >= 2, H, n, d_h, d),
        "scalar_capacity": (3 <= n <= d and d_h >= 2, H, n, d_h, d),
        "shared_context_rank": (True, H, n),
        "own_context_ceiling": (n >= 2, H, d_h, d),
        "deep_ceiling": (n >= 2, [H] * L, d_h, d_h, d),
        "shared_context_ceiling": (n <= d, H, n, d_h, d),
        "affine_rank": (True, H, d),
        "relu_capacity": (units, units, d),
        "mha_parameters": (True, H, d_h, d),
        "aot_parameters": (d_h <= d, H, d_h, d, N, S),
    }
    found = {
        k: getattr(counts if k.endswith("parameters") else bounds, k)(*rest) if fits else None
        for k, (fits, *rest) in wanted.items()
    }
    return found | {"previous_aot_capacity": H * (d_h - 1) + 1 if d_h <= n <= d else None}


READ = """rows => Object.fromEntries(rows.map(row => {
  const text = row.cells[1].textContent.replaceAll(",", "");
  return [row.dataset.count, /^[0-9]+$/.test(text) ? Number(text) : null];
}))"""
SET = """sizes => {
  for (const [name, value] of Object.entries(sizes))
    document.getElementById("size-" + name).value = value;
  document.getElementById("size-H").dispatchEvent(new Event("input", { bubbles: true }));
}"""


def test_the_explorer_shows_what_the_library_computes(visit):
    page = visit(EXPLORER)
    for values in GRID:
        sizes = dict(zip(SIZES, values, strict=True))
        page.evaluate(SET, sizes)
        wanted = expected(**sizes)
        assert page.eval_on_selector_all("[data-count]", READ) == wanted, sizes
        total = sizes["N"] ** sizes["S"]
        known = min(wanted["aot_capacity"] or 0, total)
        accuracy = (1 + (sizes["N"] - 1) * known / total) / sizes["N"]
        text = page.locator("[data-of=accuracy]").text_content()
        assert float(text) == pytest.approx(accuracy, rel=5e-3)


NORMED = {"heads": 12, "dim": 768, "bias": "qkvo", "norm": True}
LARGE = {"heads": 32, "dim": 4096, "kv_heads": 8, "rope": True}
MODELS = {
    "GPT-2": NORMED,
    "BERT base": NORMED,
    "Llama 3 8B": LARGE,
    "Mistral 7B": LARGE,
    "Qwen 2 7B": LARGE | {"heads": 28, "dim": 3584, "kv_heads": 4, "bias": "qkv"},
}


def test_explorer_has_the_counts_of_the_library(visit):
    """Known models and the widest layer have the counts of the library and a sentence."""
    page = visit(EXPLORER)
    said = page.locator("#result")
    assert said.inner_text() == (
        "One attention layer of GPT-2: at least 1.03 million numbers, at most 1.14 million, "
        "in 2.36 million parameters."
    )
    assert (
        "Ceiling: proved. Floor: proved for free tokens"
        in page.locator("[data-of=scope]").inner_text()
    )
    for name, sizes in MODELS.items():
        page.get_by_role("button", name=name, exact=True).click()
        found = capacity(**sizes)
        assert ends(page, "floor ceiling")[0] == [found.floor, found.one_output]
        assert ends(page, "weights")[0] == [found.parameters]
        assert name in said.inner_text()
    page.fill("#size-d", "4097")  # no slider stops there
    assert "Your layer" in said.inner_text()
    assert ends(page, "floor ceiling")[0][1] == bounds.own_context_ceiling(28, 128, 4097)
    for H, d, d_h in ((12, 768, 64), (32, 4096, 128), (128, 8192, 1024), (4, 4, 2)):
        page = visit(f"{EXPLORER}#H={H}&d={d}&d_h={d_h}")
        floor, ceiling = bounds.own_context_floor(H, d_h, d), bounds.own_context_ceiling(H, d_h, d)
        assert ends(page, "floor ceiling")[0] == [floor, ceiling]
        assert ends(page, "weights")[0] == [H * (2 * d * d_h + d)]
        assert [page.input_value(f"#size-{name}") for name in ("H", "d", "d_h")] == [
            *map(str, (H, d, d_h))
        ]
        page.locator("#yours[aria-pressed=true]").wait_for()
    assert "both counts are proved" in page.locator("[data-of=scope]").inner_text()
    said = page.locator("#result").inner_text()
    assert said == ("Your layer: at least 34 numbers, at most 64, in 80 weights with one output.")


SCALE = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
ANSWERS = """() => Object.fromEntries(
  [...document.querySelectorAll("#answers [data-of]")].map((x) => [x.dataset.of, x.textContent]))"""


def numbers(words):
    """What is written: 9,205, 1.03 million or 0.87."""
    found = re.findall(r"([\d.,]*\d)(?: (thousand|million|billion|trillion)\b)?", words)
    return [float(x.replace(",", "")) * SCALE.get(scale, 1) for x, scale in found]


def facts(H, d, d_h, n, N, weights, floor=None, ceiling=None, edits=None):
    """What the answers should say of a layer, by the library; given is what a model's layer has."""
    if n > 1:
        floor = floor or bounds.own_context_floor(H, d_h, d)
        ceiling = ceiling or bounds.own_context_ceiling(H, d_h, d)
        edits = edits or bounds.own_context_rank(H, n, d)
    else:
        floor = ceiling = edits = d
    words = counts.class_capacity(edits, N)
    return {
        "numbers": [floor] if floor == ceiling else [floor, ceiling],
        "signs": [2 * floor],
        "words": [words],
        "words-weights": [(N - 1) * edits],
        "words-behind": [counts.class_capacity(d, N)],
        "edits": [edits],
        "half": [edits // 2],
    }, {
        "signs-each": [(2 * floor - 1) / weights],
        "words-each": [words * math.log2(N) / ((N - 1) * edits)],
    }


def assert_facts(page, wanted):
    """What is rounded to three digits, or to hundredths, agrees as far as it is written."""
    said = page.evaluate(ANSWERS)
    rounded, hundredths = wanted
    for name, value in rounded.items():
        if max(value) < 1e6 and not name.startswith("words"):
            assert numbers(said[name]) == value, name
        assert numbers(said[name]) == pytest.approx(value, rel=1.01e-2), name
    for name, value in hundredths.items():
        assert numbers(said[name]) == pytest.approx(value, abs=0.0051), name


def drawn_sizes(seed):
    """Sizes that no page has, each as likely small as large."""
    draw = random.Random(seed)
    largest = {"H": 128, "d": 8192, "d_h": 1024, "n": 131_072, "N": 262_144, "L": 128}
    least = {"d": 2, "N": 2}
    return {
        name: max(least.get(name, 1), round(most ** draw.random()))
        for name, most in largest.items()
    }


@pytest.mark.parametrize("seed", [*range(40)])
def test_answers_are_those_of_the_library(opened_explorer, seed):
    """How many facts fit, at sizes drawn at random, one token among them."""
    sizes = drawn_sizes(seed)
    if seed % 8 == 0:
        sizes["n"] = 1
    page = opened_explorer
    page.evaluate(SET, sizes)
    H, d, d_h, n, N = (sizes[name] for name in ("H", "d", "d_h", "n", "N"))
    assert_facts(page, facts(H, d, d_h, n, N, H * d * (2 * d_h + 1)))
    price = round(counts.class_price(N), 6)  # two words are counted exactly
    few = [N > 2 and rank / price < 4 for rank in (d, d if n == 1 else H * d)]
    note = page.evaluate(ANSWERS)["words-note"].removesuffix(" for so many words")
    assert note == ["", "; the last is too high", "; both too high"][sum(few)]


@pytest.fixture(scope="module")
def opened_explorer(opened):
    page = opened(EXPLORER)
    yield page
    page.context.close()


def test_prices_between_those_of_the_page(opened_explorer):
    """They are the library's to a millionth, also at the ends."""
    price = "N => class_price(JSON.parse(measured.textContent).prices, N)"
    for N in (2, 3, 17, 19, 50, 100, 999, 30_522, 50_257, 152_064, 262_143, 262_144):
        found = opened_explorer.evaluate(price, N)
        assert found == pytest.approx(counts.class_price(N), rel=1e-6)


def test_known_models_say_at_once_how_many_facts_fit(visit):
    """GPT-2 is shown first, with the words that it has; so are the others."""
    page = visit(EXPLORER)
    said = " ".join(page.locator("#answers").inner_text().split())
    for words in (
        "any 1.03 million; of more than 1.14 million almost no choice",
        "at least half of all choices of 2.06 million",
        "about 32 million",
        "a formula, not a theorem",
        "9,205, each exact; at 4,602 other answers",
    ):
        assert words in said
    for name, sizes in MODELS.items():
        page.get_by_role("button", name=name, exact=True).click()
        H, d, d_h, n, N = (
            int(page.input_value(f"#size-{size}")) for size in ("H", "d", "d_h", "n", "N")
        )
        c = capacity(**sizes)
        given = {"floor": c.floor, "ceiling": c.one_output, "edits": c.edits}
        assert_facts(page, facts(H, d, d_h, n, N, c.parameters, **given))


def test_one_token_makes_the_layer_linear(visit):
    """It stores d numbers, at any width and depth."""
    page = visit(f"{EXPLORER}#H=12&d=768&d_h=64&n=1&L=3")
    said = page.locator("#result").inner_text()
    assert "with one token the layer is linear, so d = 768 numbers" in said
    assert ends(page, "floor ceiling")[0] == [768]
    assert ends(page, "floor layers")[0] == [768]
    assert page.evaluate(ANSWERS)["numbers"] == "any 768; of more almost no choice"


def test_explorer_works_with_the_keyboard(visit):
    """The explorer works with the keyboard and remembers sizes in its address."""
    page = visit(EXPLORER)
    heads, slider = page.locator("#size-H"), page.locator("input:has(+ #size-H)")
    slider.focus()
    before = int(heads.input_value())
    page.keyboard.press("ArrowRight")
    assert int(heads.input_value()) == before + 1
    assert slider.get_attribute("aria-valuetext") == str(before + 1)
    again, counts = visit(page.url), ("[data-count]", READ)
    assert again.locator("#size-H").input_value() == str(before + 1)
    assert again.eval_on_selector_all(*counts) == page.eval_on_selector_all(*counts)
    page.locator("input:has(+ #size-d)").focus()
    page.keyboard.press("End")
    assert page.input_value("#size-d") == "8192"
    page.keyboard.press("ArrowLeft")
    assert page.input_value("#size-d") == "8128", "far out a slider stops less often"


def test_explorer_bars_stay_in_view_on_a_phone(visit):
    """On a phone the bars stay in view while any slider moves."""
    page = visit(EXPLORER, 390)
    for slider in page.locator("form#explorer [type=range]").all():
        slider.scroll_into_view_if_needed()
        slider.evaluate("slider => scrollBy(0, slider.getBoundingClientRect().top - 600)")
        page.wait_for_timeout(50)
        box, bars = slider.bounding_box(), page.locator("#chart .bar")
        over = [bar.bounding_box() for bar in bars.all()]
        assert all(bar["y"] >= 100 and bar["y"] + bar["height"] <= box["y"] for bar in over)


DRAG = """slider => {
  const times = Array.from({ length: 60 }, (_, k) => {
    slider.value = 400 - k;
    const start = performance.now();
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    document.body.offsetHeight;
    return performance.now() - start;
  });
  return times.sort((a, b) => a - b)[30];
}"""


def test_explorer_answers_a_drag_within_a_frame(visit):
    """A drag is answered within a frame, also at many heads."""
    page = visit(f"{EXPLORER}#H=128&d=8192&d_h=1024&L=128")
    assert page.locator("input:has(+ #size-d)").evaluate(DRAG) < 1000 / 60


def test_explorer_shows_the_largest_sizes(visit):
    """Numbers are in one piece, and bars end on the axis at the largest sizes."""
    page = visit(f"{EXPLORER}#H=128&d=8192&d_h=1024&n=131072&L=128&S=131072&N=262144")
    numbers, drawn = ends(page, "floor layers")
    layers = bounds.deep_ceiling([128] * 128, 1024, 1024, 8192)
    assert numbers[1] == layers
    assert drawn[1] == pytest.approx(layers, rel=0.15)
    page.evaluate("for (const part of document.querySelectorAll('.explored')) part.open = true")
    heights = page.locator("#capacities td").evaluate_all(
        "cells => cells.filter(c => /^[0-9,]+$/.test(c.textContent)).map(c => {"
        "const range = document.createRange(); range.selectNodeContents(c);"
        "return range.getClientRects().length; })"
    )
    assert {*heights} == {1}
    assert page.locator("#guaranteed").inner_text().count("262,144131072") == 1  # a power
    page.emulate_media(media="print")
    assert not page.locator(".explorer label, .presets").first.is_visible()


def refused(page):
    """What the explorer says that it has no slider for, if that is all it shows."""
    said, counts = page.locator("#refused"), page.locator("#answers, #chart, .others, .explored")
    hidden = [not count.is_visible() for count in counts.all()]
    assert hidden == 5 * [said.is_visible()]
    return said.locator("output").inner_text() if said.is_visible() else None


def test_explorer_follows_its_address(visit):
    """The explorer follows its address and refuses sizes that it cannot show."""
    for sizes, said in {
        "d=8193&n=0": "d = 8193 (its slider: 2 to 8192), n = 0 (its slider: 1 to 131072)",
        "H=2.5": "H = 2.5 (its slider: 1 to 128)",
        "H=many": "H = many (its slider: 1 to 128)",
        "d=128&H=1": None,
        "the-measured-points": None,
    }.items():
        page = visit(f"{EXPLORER}#{sizes}")
        assert refused(page) == said
        assert page.url.endswith(sizes)
    page = visit(f"{EXPLORER}#d=40960")
    page.locator("input:has(+ #size-d)").focus()
    page.keyboard.press("ArrowRight")
    assert refused(page) is None
    assert "d=65&" in page.url
    page.evaluate("location.hash = 'd=50'")
    page.wait_for_function("document.getElementById('size-d').value === '50'")
    page.evaluate("location.hash = 'ch-your-model'")
    page.wait_for_timeout(100)
    assert page.input_value("#size-d") == "50", "a link down the page changes no size"
    page.fill("#size-d", "1")
    assert refused(page) == "d = 1 (its slider: 2 to 8192)"


def test_explorer_shows_measured_points_nearby(visit):
    """A point near a measured size is that point, and far ones are not shown."""
    page = visit(EXPLORER)
    points = json.loads(page.locator("#measured").text_content())["points"]
    page.evaluate("for (const part of document.querySelectorAll('.explored')) part.open = true")
    assert {point["kind"] for point in points} == {"capacity", "associations", "classes"}
    for point in points[::7]:
        page.evaluate(SET, {size: point[size] for size in SIZES[:-1]})
        bar = page.locator(f"[data-nearest={point['kind']}]")
        shown = int(bar.locator("output").inner_text().replace(",", ""))
        same = ("kind", *SIZES[:-1])
        assert shown in [p["known"] for p in points if all(p[s] == point[s] for s in same)]
    page.evaluate(SET, {"H": 64, "d": 2, "d_h": 128, "n": 128, "S": 64, "N": 512})
    assert page.locator("[data-nearest]:not(.idle)").count() == 0


def ends(page, name):
    """The numbers that a bar writes, and where its parts end, by the decades of the axis."""
    bar = page.locator(f"[data-bar^='{name}']").first
    numbers = bar.locator("output").inner_text().replace(",", "").split(" to ")
    track = bar.locator(".track").bounding_box()
    boxes = [part.bounding_box() for part in bar.locator(".track i").all()]
    parts = [(box["x"] + box["width"] - track["x"]) / track["width"] for box in boxes]
    decades = page.locator("#chart .axis span").count() - 1
    return [int(number) for number in numbers], [10 ** (decades * part) for part in parts]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_chart_draws_floor_and_ceiling(visit, width):
    """The chart draws floor and ceiling on its axis from each start."""
    page = visit(EXPLORER, width)
    starts = page.locator(".presets button:visible")
    assert starts.count() == 8
    for start in starts.all():
        start.click()
        assert start.get_attribute("aria-pressed") == "true"
        assert page.locator(".presets [aria-pressed=true]").count() == 1
        numbers, drawn = ends(page, "floor ceiling")
        assert drawn == pytest.approx(numbers, rel=0.15)  # a pixel or two
        if start.inner_text() not in MODELS:
            sizes = {name: int(page.locator(f"#size-{name}").input_value()) for name in SIZES}
            wanted = expected(**sizes)
            assert numbers == [wanted["own_context_floor"], wanted["own_context_ceiling"]]
    page.get_by_role("button", name="the layer of 80 weights").click()
    assert ends(page, "mha_capacity")[0] == [5]  # the five labels
    ticks = page.locator("#chart .axis span").all_inner_texts()
    assert (ticks[0], ticks[-1]) == ("1", "10M")
    chart, form = page.locator("#chart").bounding_box(), page.locator("#explorer").bounding_box()
    assert (chart["x"] > form["x"]) == (width > 800)


def test_what_is_refuted_is_not_called_a_theorem(visit):
    """What this book refutes is not called a theorem."""
    page = visit(EXPLORER)
    groups = {}
    for row in page.locator("#capacities tbody tr").all():
        if "group" in (row.get_attribute("class") or ""):
            group = groups.setdefault(row.text_content(), [])
        else:
            group.append(row.get_attribute("data-count"))
    assert "aot_capacity" not in groups["Memorized, by theorem"]
    assert groups["Claimed, and refuted as stated"] == ["aot_capacity"]


@pytest.mark.parametrize("width", [1280, 390])
def test_points_of_the_law_say_their_setting(opened, width):
    page = opened("book/notebooks/training/growth.html", width)
    points = json.loads(page.locator("script.points").text_content())
    figure = page.locator("#fig-growth-law")
    image, words = figure.locator("img"), figure.locator(".point")
    image.scroll_into_view_if_needed()
    assert words.is_hidden()
    box = image.bounding_box()
    for point in (points[0], points[-1]):
        right, down = point["at"]
        image.hover(position={"x": right * box["width"], "y": down * box["height"]})
        said = words.text_content()
        near = [p["says"] for p in points if math.dist(p["at"], point["at"]) < 0.02]
        assert said in near
        assert words.is_visible()
    page.mouse.move(2, 2)
    assert words.is_hidden()
    assert page.faults == []
    page.context.close()
