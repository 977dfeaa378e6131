"""The pictures of book/assets/pictures, used as a reader uses them."""

import itertools
import json
import math
import re

import pytest
import torch

from attnmem import AoTWeights, aot, mha
from attnmem.core import bounds
from attnmem.theory.fitting import levenberg_marquardt
from attnmem.theory.impossible import every_parity, impossible_subset
from attnmem.theory.independence import numerical_rank
from attnmem.theory.tangents import ScalarHeads, tangents

from tools.chapters import BOOK

PICTURES = BOOK / "assets" / "pictures"
FRAGMENTS = sorted(PICTURES.glob("*.html"))
SCRIPTED = [path.stem for path in FRAGMENTS if "<script>" in path.read_text("utf-8")]
STYLE, SCRIPT = (PICTURES.with_suffix(kind).read_text("utf-8") for kind in (".css", ".js"))


@pytest.fixture
def drawn(chromium):
    """A function that opens a fragment alone; what goes wrong is in its ``faults``."""
    contexts = []

    def opened(name, width=390, hash="", **more):
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, **more))
        page = contexts[-1].new_page()
        page.faults = []
        page.on("console", lambda message: page.faults.append(message.text))
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        picture = (PICTURES / f"{name}.html").read_text(encoding="utf-8")
        page.evaluate("hash => (location.hash = hash)", hash)
        page.set_content(f"<style>{STYLE}</style><script>{SCRIPT}</script>{picture}")
        return page

    yield opened
    for context in contexts:
        context.close()


def slide(page, name, value):
    page.eval_on_selector(
        name,
        """(slider, value) => {
          slider.value = value;
          slider.dispatchEvent(new Event("input", { bubbles: true }));
        }""",
        value,
    )


def tree(page):
    """The drawings without spaces between their elements."""
    return page.locator("svg").evaluate_all(
        "all => all.map(svg => svg.outerHTML.replace(/\\s+(?=<)/g, '').replace(/ style=\"\"/g, ''))"
    )


@pytest.mark.parametrize("name", SCRIPTED)
def test_the_still_is_what_the_script_draws_first(drawn, name):
    still, now = drawn(name, java_script_enabled=True), drawn(name, java_script_enabled=False)
    assert tree(still) == tree(now)
    assert still.faults == []
    assert still.locator(".controls").is_visible()
    assert not now.locator(".controls").is_visible()


@pytest.mark.parametrize("width", [360, 720])
def test_the_ruler_marks_counts_without_overlap(drawn, width):
    """The ruler has a mark for each count, and no two labels overlap."""
    page = drawn("ruler", width)
    data = json.loads(page.locator('script[type="application/json"]').text_content())
    for heads in range(1, 65):
        slide(page, "input", heads)
        at = [data[name][heads - 1] for name in ("theorem", "floor", "ceiling")]
        assert page.locator(".three b").all_text_contents() == [f"{count:,}" for count in at]
        at += [data["built"][f"{heads}"]] if f"{heads}" in data["built"] else []
        at += [*data["trained"].get(f"{heads}", [])[:1], data["random"][heads - 1]]
        assert page.locator(".count").all_text_contents() == [f"{count:,}" for count in at]
        boxes = page.locator("svg text").evaluate_all(
            "all => all.map(each => each.getBoundingClientRect()).map("
            "at => [at.left, at.right, at.top, at.bottom])"
        )
        assert all(0 <= left < right <= width for left, right, *_ in boxes), heads
        for one, two in itertools.combinations(boxes, 2):
            apart = one[1] <= two[0] or two[1] <= one[0]
            assert apart or one[3] <= two[2] + 3 or two[3] <= one[2] + 3, heads


def test_xor_needs_two_heads(drawn):
    """Xor has three corners with one head and four with two, also by keyboard."""
    page = drawn("xor")
    right = page.locator(".corner.right")
    assert right.count() == 3
    for values in itertools.product((-3, -1, 0, 2), (-2, 1, 3), (-3, -1, 0.5)):
        for name, value in zip("abc", values, strict=True):
            slide(page, f"#xor-{name}", value)
        assert right.count() <= 3
        assert "but" not in page.locator(".sums").text_content()
    for name, value in {"a": 2, "b": 2, "c": -1}.items():
        slide(page, f"#xor-{name}", value)
    page.focus("#xor-second")
    page.keyboard.press("Space")
    assert right.count() == 4
    assert "but" in page.locator(".sums").text_content()
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    assert page.locator("#xor-g").input_value() == "6"


def test_small_transformer_says_xor_for_each_pair(drawn):
    page = drawn("aot")
    boxes = page.locator("[type=checkbox]").all()
    for bits in itertools.product((0, 1), repeat=2):
        for box, bit in zip(boxes, bits, strict=True):
            box.set_checked(bool(bit))
        assert page.locator(".token").all_text_contents() == [f"{bit}" for bit in bits]
        right = bits[0] ^ bits[1]
        logits = [f"token {token}: {'1' if token == right else '−1'}" for token in (0, 1)]
        assert page.locator(".logit").all_text_contents() == logits
        framed = float(page.locator("rect.asks").nth(1).get_attribute("x"))
        assert framed == (112, 236)[right]
    assert page.faults == []


def test_dials_of_growth_count_as_the_library_does(drawn):
    page = drawn("growth-dials")
    for H, n, width in itertools.product((1, 3, 8), (2, 3, 4), (1, 2, 3, 4)):
        for name, value in {"H": H, "n": n, "k": width}.items():
            slide(page, f"#dial-{name}", value)
        shared = bounds.shared_context_ceiling(H, n, width, 4)
        counts = [f"{shared}", f"{bounds.own_context_ceiling(H, width, 4)}"]
        assert page.locator(".count").all_text_contents() == counts
    slide(page, "#dial-n", 1)
    assert page.locator(".count").all_text_contents() == ["1", "4"]
    assert page.faults == []


def test_the_valley_is_left_with_a_third_step_size(drawn):
    """The valley is walked with two step sizes, and left with a third."""
    page = drawn("getting-there")
    for size, steps, words in ((0.9, 20, "48% in the flat direction, 0%"), (1.8, 40, "5% in")):
        slide(page, "#valley-size", size)
        slide(page, "#valley-steps", steps)
        assert words in page.locator(".left").text_content()
        assert page.locator(".gradient circle").count() == steps + 1
    slide(page, "#valley-size", 2.1)
    assert "it grows" in page.locator(".left").text_content()


def test_a_walk_over_the_fold_turns_round_at_it(drawn):
    page = drawn("fold")
    places = []
    for v in (-0.5, 0, 0.5):
        slide(page, "#fold-v", v)
        places.append(float(page.locator("#fold-out").get_attribute("cx")))
    assert places == [367.5, 400, 367.5]


def test_a_push_moves_the_free_head(drawn):
    """A push moves the free head and hardly the saturated one."""
    page = drawn("trained-turns")
    slide(page, "#turns-push", 2.5)
    moved = []
    for kind, before, off in (
        ("free", [0.5, 0.3, 0.2], 6e-3),
        ("full", [0.995, 0.003, 0.002], 6e-4),
    ):
        pushed = torch.softmax(torch.tensor(before).log() + torch.tensor([2.5, 0, 0]), 0)
        shown = [float(text) for text in page.locator(f".{kind} text").all_text_contents()[-3:]]
        assert shown == pytest.approx(pushed.tolist(), abs=off)
        ring, dot = (page.locator(f".{kind} .{moment}") for moment in ("before", "after"))
        moved.append(float(ring.get_attribute("cy")) - float(dot.get_attribute("cy")))
    assert moved[0] > 40
    assert 0 < moved[1] < 1


def test_the_staircase_plays_and_is_whole_on_paper(drawn):
    """The staircase plays until a reader steps, and is complete on paper."""
    page = drawn("staircase")
    free = page.locator(".cell.free")
    assert free.count() == 9
    page.focus("#staircase-ready")
    for left in (6, 3, 0, 0):
        page.keyboard.press("ArrowLeft")
        assert free.count() == left
    page.keyboard.press("ArrowRight")
    assert "rank of Z 4" in page.locator("output").text_content()
    page.click("text=play")
    page.wait_for_timeout(1800)
    assert free.count() == 3
    page.focus("#staircase-ready")
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(1800)
    assert free.count() == 6
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert free.count() == 9


def test_a_head_looks_away_from_an_orthogonal_query(drawn):
    """A head looks away from the query that is orthogonal to v."""
    page = drawn("looking-away")
    dot = page.locator(".query .dot").nth(0)
    slide(page, "#away-v", 110)
    assert page.locator(".query.free").count() == 1
    places = []
    for c in (0, 40):
        slide(page, "#away-c", c)
        places.append(
            page.locator(".query .dot").evaluate_all(
                "dots => dots.map(dot => [dot.cx.baseVal.value, dot.cy.baseVal.value])"
            )
        )
    assert places[0][0] == places[1][0]
    assert all(before != after for before, after in zip(places[0][1:], places[1][1:], strict=True))
    grip = page.locator(".grip").bounding_box()
    x, y = grip["x"] + grip["width"] / 2, grip["y"] + grip["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 60, y + 10, steps=4)
    page.mouse.up()
    assert page.locator("#away-v").input_value() != "110"
    assert dot.is_visible()


def amounts_of_one_head(e, *amounts):
    """A layer whose sum is ``e`` plus an amount for each bit: a token 1 weighs 2, a token 0 one."""
    values, two = [*amounts, (e - sum(amounts)) / 2], float(torch.tensor(2.0).log())
    asks, reads, writes = torch.eye(3).reshape(3, 1, 1, 3)
    positions = torch.tensor([[two * (s == 3), value, 0] for s, value in enumerate(values)])
    embedding = torch.tensor([[0, 0, 0], [two, 0, 0]])
    W_U = torch.stack([torch.zeros(3), writes.flatten()])
    return AoTWeights(embedding, positions, asks / two, asks, reads, writes.mT, W_U)


def test_four_switches_show_their_curve_or_say_none(drawn):
    """Each combination of four switches shows its curve or says that it has none."""
    page = drawn("suspects")
    boxes = page.locator("[type=checkbox]").all()
    trained = {"0000", "1000", "0100", "0010", "0001", "1110", "1111"}
    for key in map("".join, itertools.product("01", repeat=4)):
        for box, on in zip(boxes, key, strict=True):
            box.set_checked(on == "1")
        seen = page.locator(".curve >> visible=true")
        assert [one.get_attribute("data-key") for one in seen.all()] == [
            key if key in trained else None
        ]


def test_heads_nod_or_refuse_as_is_proved(drawn):
    """Heads nod or refuse as the library proves, and what balances cancels."""
    page, (cube, _) = drawn("cube"), every_parity(3)
    needed = {2: [0] * 4, 3: [0] * 4}
    for size, rows in ((2, cube[::2]), (3, cube)):
        page.locator(f"[type=radio] >> nth={size - 2}").check()
        for labels in itertools.product((0, 1), repeat=len(rows)):
            sizes, words, pans = page.evaluate(
                """labels => {
                  const pic = document.getElementById("pic-cube");
                  [...pic.querySelectorAll("[type=checkbox]")]
                    .filter((box) => !box.parentNode.hidden)
                    .forEach((box, k) => box.checked === !!labels[k] || box.click());
                  return [
                    [...pic.querySelectorAll(".face.no")].length,
                    pic.querySelector("title").textContent.split(/: \\d\\. /)[1],
                    [...pic.querySelectorAll(".corner:not([data-corner])")].map((ball) =>
                      [ball.textContent, ball.matches(".black")]),
                  ];
                }""",
                labels,
            )
            y = torch.tensor(labels)
            heads = 1 + sum(impossible_subset(rows, y, H) is not None for H in range(1, size))
            needed[size][heads] += 1
            assert sizes == heads * (heads - 1) // 2  # faces that shake
            if heads == 1:
                terms = re.findall(r"(−?)(\d+)(?: b([₁₂₃]))?", words.replace("− ", "−"))
                found = {at: int(f"-{x}" if sign else x) for sign, x, at in terms}
                layer = amounts_of_one_head(*[found.get(at, 0) for at in ("", *"₁₂₃")])
                assert aot(layer, rows).argmax(-1).tolist() == list(labels)
                continue
            sides = dict(zip(map(tuple, rows[:, :size].tolist()), labels, strict=True))
            weights = {tuple(map(int, bits)): 1 if dark else -1 for bits, dark in pans}
            assert all(weights[bits] == 2 * sides[bits] - 1 for bits in weights)
            for places in itertools.combinations(range(size), heads - 1):
                for values in itertools.product((0, 1), repeat=heads - 1):
                    agree = [x for b, x in weights.items() if tuple(b[s] for s in places) == values]
                    assert sum(agree) == 0
    assert needed == {2: [0, 14, 2, 0], 3: [0, 104, 150, 2]}
    assert "You found" not in page.locator(".said").text_content()
    page.locator(".corner >> nth=0").click()  # of eight black ones
    assert page.locator(".said").text_content().startswith("Next tokens 01111111")
    page.focus("[value='0'][type=checkbox]")
    page.keyboard.press("Space")
    assert page.locator("[data-corner].black").count() == 8
    assert page.faults == []


def test_the_microscope_shows_float32_and_its_rank(drawn):
    """The microscope shows what float32 stores, and what its rank says."""
    page = drawn("features")
    told = {0: "stored as one vector", 1: "taken for one direction", 2: "two directions"}
    for k in range(15):
        slide(page, "input", k)
        c = (10, 30)[k % 2] * 10 ** (k // 2)
        pair = torch.tensor([[c + 1, c], [c, c + 1]], dtype=torch.float32)
        rows = page.eval_on_selector_all(".u, .v", "rows => rows.map(row => row.textContent)")
        for row, stored in zip(rows, pair[0].tolist(), strict=True):
            assert int(row, 2) == int(math.ldexp(math.frexp(stored)[0], 24))
        rank = numerical_rank(pair) if pair[0, 0] != pair[0, 1] else 0
        assert page.locator(".told").text_content() == told[rank]
        top, bottom = (float(tip.get_attribute("cy")) for tip in page.locator(".tip").all())
        inside = float(page.locator("g > .band").get_attribute("height")) >= bottom - top
        assert inside == (rank < 2)


def drag(page, name, k, x=0, y=0, to=()):
    """Drag the k-th element by so many pixels, or to a place."""
    box = page.locator(name).nth(k).bounding_box()
    start = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*(to or (start[0] + x, start[1] + y)), steps=5)
    page.mouse.up()


def taught(tokens, queries, wishes, fixed):
    """Attention of both heads, each W = V + c u v^T as in the first chapter, with v found here."""
    heads = []
    for served, wish, signs in (([1, 2], wishes, (1, -1, 1)), ([3, 4], fixed, (1, -1, 1))):
        others = [t for t in range(5) if t not in served]
        blind = torch.linalg.svd(queries[served])[2][2:]
        products = queries[others] @ blind.T
        v = torch.linalg.pinv(products) @ torch.tensor(signs, dtype=torch.float64) @ blind
        v = v - torch.linalg.pinv(queries[served]) @ (queries[served] @ v)
        V = torch.linalg.pinv(tokens) @ wish.log().T @ torch.linalg.pinv(queries[served]).T
        u = torch.tensor([0, 0, 1, 0], dtype=torch.float64)
        logits = queries @ (V + 1e6 * torch.outer(u, v)).T @ tokens.T
        heads.append(logits.softmax(1))
    return torch.stack(heads, 1)


def test_a_layer_is_taught_what_torch_computes(drawn):
    page = drawn("teach", width=700)
    data = json.loads(page.locator('script[type="application/json"]').text_content())
    double = {"dtype": torch.float64}
    tokens, queries = (torch.tensor(data[key], **double) for key in ("tokens", "queries"))
    before, ranks = [], []

    def check():
        state = json.loads(page.locator(".pic").get_attribute("data-state"))
        alpha, Z, labels, m = (
            torch.tensor(state[key], **double) for key in ("attention", "rows", "labels", "readOut")
        )
        asked = queries.clone()
        if "sum" in page.locator(".pic").get_attribute("class"):
            asked[3] = queries[1] + queries[2]
        expected = taught(tokens, asked, alpha[1:3, 0], alpha[3:5, 1])
        close = {"atol": 1e-6, "rtol": 0}
        torch.testing.assert_close(alpha[:5], expected, **close)
        torch.testing.assert_close((alpha @ tokens).flatten(1), Z, **close)
        torch.testing.assert_close(torch.linalg.pinv(Z) @ labels, m, atol=1e-6, rtol=1e-9)
        torch.testing.assert_close(Z @ m, labels, **close)
        assert numerical_rank(Z) == state["rank"]
        assert abs(torch.linalg.svdvals(Z)[-1] - state["room"]) < 1e-6
        assert page.locator(".label text.name").all_text_contents()[: len(labels)] == [
            f"{round(y, 1) + 0:g}".replace("-", "−") for y in labels.tolist()
        ]
        before.append(labels)
        ranks.append(state["rank"])

    def key(k, *presses):
        page.locator("input").nth(k).focus()
        for press in presses:
            page.keyboard.press(press)

    def ring(t):
        assert page.locator(".ring").count() == 1
        return page.locator(".label").nth(t).get_attribute("class") == "label ring"

    check()
    drag(page, ".label", 1, x=40)
    check()
    assert (before[1] - before[0])[[0, 2, 3, 4]].abs().max() < 1e-9 < before[1][1] - before[0][1]
    key(6, "Home")
    assert ring(4)
    check()
    assert abs(before[2][4] + 8) < 1e-9
    drag(page, ".mine", 0, x=25, y=-10)
    check()
    key(1, "ArrowRight", "ArrowDown", "ArrowLeft")
    check()
    page.click("text=start again")
    triangle = page.locator("polygon").first.bounding_box()
    weights = (0.36 / 0.6, 0.1, 0.3)  # near the line 0.06 + 0.54 (0.6 a_2 - 0.3 a_1) = 0
    to = (
        triangle["x"] + triangle["width"] * (weights[2] + weights[0] / 2),
        triangle["y"] + triangle["height"] * (1 - weights[0]),
    )
    drag(page, ".mine", 0, to=to)
    check()
    assert (
        "4 independent rows: labels 1, 2, 3, 4, 5 are tied" in page.locator(".said").text_content()
    )
    drag(page, ".label", 3, x=20)
    check()
    assert (before[-1] - before[-2]).abs().min() > 0.01
    page.click("text=start again")
    page.click("text=a sixth question")
    check()
    drag(page, ".label", 5, x=-30)
    check()
    y = before[-1]
    assert abs(y[5] - (y[2] + y[4] - y[0])) < 1e-9
    assert (y - before[-2])[[1, 3]].abs().max() < 1e-9
    page.click("text=question 4 :=")
    key(0, "ArrowUp", "ArrowUp")
    check()
    page.click("text=start again")
    check()
    assert before[-1].tolist() == before[0].tolist()
    assert ranks == [5, 5, 5, 5, 5, 4, 4, 5, 5, 5, 5]
    assert page.faults == []


def test_a_head_saturates_as_its_lead_grows(drawn):
    page = drawn("lead")
    for lead in (0, 1.1, 5.3, 10):
        slide(page, "#lead-by", lead)
        weights = torch.tensor([0.0, lead, 0.0]).double().softmax(0).tolist()
        shown = [float(word) for word in page.locator(".weight").all_text_contents()]
        assert shown == pytest.approx(weights, abs=5e-3)
        heights = page.locator(".bar").evaluate_all(
            "all => all.map(bar => bar.height.baseVal.value)"
        )
        assert heights == pytest.approx([80 * weight for weight in weights], abs=0.06)
    assert page.faults == []


def filled(page, ended=False):
    """What the page computes with: weights, contexts, queries, labels, and all of its state."""
    if ended:
        page.wait_for_function("document.querySelector('figure').state.stop", timeout=60_000)
    state = page.eval_on_selector("figure", "({ state }) => ({ ...state, rank: state.rank() })")
    w, data = (torch.tensor(state[name], dtype=torch.float64) for name in ("w", "data"))
    heads = ScalarHeads(*w[:64].view(2, 4, 4, 2), w[64:].view(4, 4))
    return heads, data[:, :16].unflatten(1, (4, 4)), data[:, 16:20], data[:, 20], state


@pytest.mark.parametrize(
    ("T", "seed", "end"),
    [(T, seed, "met") for T, seed in ((1, 1), (5, 9), (20, 1), (20, 4), (33, 2), (34, 3), (48, 5))]
    + [(48, 1, "met"), (70, 1, ""), (80, 2, "")],
)
def test_a_layer_learns_as_in_the_library(drawn, T, seed, end):
    """A layer of 80 weights learns in the page as in the library."""
    page = drawn("fill", reduced_motion="reduce", hash=f"T={T}&by=lm&seed={seed}")
    start, *data, state = filled(page)
    answers = torch.tensor(state["answers"], dtype=torch.float64)
    torch.testing.assert_close(mha(start.layer(), *data[:2])[:, 0], answers, atol=1e-9, rtol=0)
    assert (len(data[2]), state["seed"]) == (T, seed)
    page.evaluate("document.querySelector('figure').dataset.steps = 3")
    page.click("button")
    after, *_, state = filled(page, ended=True)
    fit = levenberg_marquardt(start, *data, steps=3)
    torch.testing.assert_close(fit.weights, after, atol=1e-7, rtol=0)
    assert (len(state["errors"]) - 1, state["errors"][-1]) == (fit.steps, pytest.approx(fit.error))
    J = torch.cat(tangents(after, *data[:2]).parts(), 1)
    assert state["rank"] == numerical_rank(J) == min(T, 64)
    page.evaluate("document.querySelector('figure').dataset.steps = 200")
    page.eval_on_selector("#fill-T", "slider => slider.dispatchEvent(new Event('input'))")
    page.click("button")
    state = filled(page, ended=True)[-1]
    assert (state["stop"] == "met") == (end == "met")
    assert page.locator(".runs text").last.get_attribute("class") == end
    assert page.evaluate("location.hash") == f"#T={T}&by=lm&seed={seed}"


def test_silent_twins_reach_labels_by_magnified_steps(drawn):
    """Silent twins answer nothing, and magnified steps reach any labels."""
    page = drawn("fill", hash="T=24&by=twins")
    slide(page, "#fill-eps", 8)
    heads, *data, state = filled(page)
    near = heads._replace(mu=heads.mu * 1e-2)
    for weights in near[:2]:
        assert (weights[::2] - weights[1::2]).abs().max() > 0
    answers = torch.tensor(state["answers"], dtype=torch.float64)
    torch.testing.assert_close(mha(heads.layer(), *data[:2])[:, 0], answers, atol=1e-9, rtol=0)
    assert (answers - data[2]).abs().max() < 0.1
    assert (mha(near.layer(), *data[:2]) * 10).abs().max() < 1
    slide(page, "#fill-eps", 20)
    assert (torch.tensor(filled(page)[-1]["answers"]) - data[2]).abs().max() < 1e-5


def test_adam_learns_and_a_second_press_draws_labels(drawn):
    """Adam learns in the page, too, and a second press draws other labels."""
    page = drawn("fill", hash="T=12&by=adam&seed=2")
    page.click("button")
    first = filled(page, ended=True)
    page.click("button")
    second = filled(page, ended=True)
    assert first[-1]["stop"] == second[-1]["stop"] == "met"
    assert (first[-1]["seed"], second[-1]["seed"]) == (2, 3)
    assert page.locator(".runs .met").count() == 2
    assert "All 12 labels fit" in page.locator("p").text_content()


def test_a_new_label_slides_the_crossing(drawn):
    """A new label slides the crossing along the other line."""
    page = drawn("independent-rows")
    for label in (2, 4.5, 8):
        slide(page, "#rows-label", label)
        m = torch.linalg.solve(torch.tensor([[2.0, 1], [1, 2]]), torch.tensor([4.0, label]))
        shown = page.locator(".at tspan").all_text_contents()
        assert [float(x.replace("−", "-")) for x in shown] == pytest.approx(m.tolist(), abs=5e-3)
        place = page.locator(".met").evaluate(
            "dot => { const at = new DOMPoint(dot.cx.baseVal.value, dot.cy.baseVal.value);"
            " const to = at.matrixTransform(dot.parentNode.transform.baseVal[0].matrix);"
            " return [to.x, to.y]; }"
        )
        expected = torch.tensor([67.3, 213.5]) + torch.tensor([59.1, -47]) * m
        assert place == pytest.approx(expected.tolist(), abs=0.2)
        verdict = " ".join(page.locator(".verdict").all_text_contents())
        assert ("one line" in verdict) == (label == 8)
    assert page.faults == []


def test_one_more_keeps_sixteen_facts_or_fades(drawn):
    """One more keeps sixteen facts with a memory, and fades without."""
    page = drawn("one-more")
    full = page.locator('.fact[fill-opacity="1.0"]')
    assert full.count() == 10
    for _ in range(6):
        page.click(".write")
    assert full.count() == 16
    assert "room for 0 more" in page.locator("p").text_content()
    assert page.locator(".write").is_disabled()
    page.click(".forget")
    assert full.count() == 15
    page.click(".write")
    assert full.count() == 16
    page.check("input")
    for _ in range(10):
        page.click(".write")
    assert 1 <= full.count() < 16
    assert page.locator(".fact.wrong").count() > 0
    assert page.locator(".forget").is_disabled()
    assert page.faults == []


def test_a_choice_of_labels_has_an_arc_and_its_bits(drawn):
    """A choice of labels has an arc, and survives in so many bits as a dot of it needs."""
    page = drawn("arcs")
    features = [(1, 0), (0, 1), (1, 1), (1, -2), (-3, 4), (-1, -20)]
    rows = page.locator(".row").evaluate_all("all => all.map((row) => row.getAttribute('d'))")
    ends = torch.tensor([[float(x) for x in re.split("L| ", row)[2:]] for row in rows])
    units = torch.nn.functional.normalize(torch.tensor(features, dtype=torch.float32))
    torch.testing.assert_close(ends, 130 + units * torch.tensor([54, -54]), atol=0.06, rtol=0)

    def signs(read_outs, T):
        """The sign vectors that they meet; an output of zero has no sign."""
        outputs = [[x * i + y * j for x, y in features[:T]] for i, j in read_outs]
        return {"".join("+" if y > 0 else "−" for y in each) for each in outputs if all(each)}

    around = [(math.cos(a), math.sin(a)) for a in torch.arange(0, 7, 0.01).tolist()]
    found = []
    for T, bits in itertools.product(range(1, 7), repeat=2):
        odd = range(1 - 2**bits, 2**bits, 2)  # the levels, times 2**bits
        met, held = signs(around, T), signs(itertools.product(odd, odd), T)
        assert len(met) == bounds.sign_vectors(T, 2)
        slide(page, "#arcs-T", T)
        slide(page, "#arcs-b", bits)
        assert page.locator(".dots").get_attribute("d").count("h0") == 4**bits
        for y in range(2**T) if bits in (1, 6) else (0,):
            slide(page, "#arcs-y", y)
            asked = page.locator("output").nth(1).text_content()
            assert page.locator("#arcs-y").get_attribute("aria-valuetext") == asked
            assert asked == "".join("+−"[y >> t & 1] for t in range(T))
            *_, said, enough, hold = page.locator("svg text.say").all_text_contents()
            assert said == f"{asked} fits {'on the lit arc' if asked in met else 'nowhere'}"
            assert bool(enough) == (asked in met)
            assert (enough.endswith("enough") and " not " not in enough) == (asked in held)
            assert hold == f"{len(held)} of {len(met)} arcs hold a dot"
        found.append(len(held))
    assert found[12:18] == [2, 6, 6, 6, 6, 6]
    assert found[-6:] == [2, 8, 10, 10, 12, 12]
    slide(page, "#arcs-T", 1)  # the slider of the labels ends where they do
    assert page.locator("output").all_text_contents() == ["1", "−", "6"]
    assert page.faults == []
