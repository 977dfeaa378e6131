"""Search, the filter of the claims, and the explorer, used as a reader uses them."""

import itertools
import json

import pytest

from attnmem import bounds

import claims

EXPLORER = "book/notebooks/beyond/explorer.html"
CLAIMS = "book/claims.html"


def test_search_finds_a_word_of_the_book(visit):
    page = visit("search.html?q=Kruskal")
    page.wait_for_selector("#search-results li")
    titles = page.locator("#search-results li a").all_inner_texts()
    assert any("Linear independence" in title for title in titles)
    assert page.faults == []


# --- claims ---------------------------------------------------------------------------------------


def shown(page):
    return page.locator("table.claims tbody tr:visible")


def test_claims_can_be_filtered_by_paper_kind_and_verdict(visit):
    page = visit(CLAIMS)
    known, recorded = claims.claims().values(), claims.recorded()
    assert shown(page).count() == len(known)
    verdicts = {claim: recorded[claim.key].verdict for claim in known if claim.key in recorded}
    page.select_option("[name=verdict]", "in part")
    assert shown(page).count() == [*verdicts.values()].count("in part") > 0
    page.select_option("[name=kind]", "figure")
    both = [c for c, verdict in verdicts.items() if (c.kind, verdict) == ("figure", "in part")]
    assert shown(page).count() == len(both) > 0
    page.select_option("[name=verdict]", "")
    page.select_option("[name=kind]", "")
    page.select_option("[name=paper]", index=2)
    assert shown(page).count() == sum(claim.paper == "dana" for claim in known)
    assert f"of {len(known)} claims" in page.locator("#claims-filter output").inner_text()
    assert page.locator("h2:visible").count() == 1


# --- the explorer ---------------------------------------------------------------------------------

GRID = itertools.product((1, 7, 64), (2, 31, 128), (1, 2, 64), (1, 2, 3, 40), (1, 5), (2, 50))


def expected(H, d, d_h, n, S, N):
    """Every count of the page by `attnmem.bounds`; None where a condition fails."""
    layer = bounds.mha_parameters(H, d_h, d)
    units = (layer - 1) // (bounds.relu_parameters(1, n, d) - 1)
    fits = d_h <= d
    return {
        "mha_capacity": bounds.mha_capacity(H, n, d_h) if n < d else None,
        "previous_aot_capacity": bounds.previous_aot_capacity(H, d_h) if d_h <= n <= d else None,
        "aot_capacity": bounds.aot_capacity(H, d_h, d) if fits else None,
        "own_context_rank": bounds.own_context_rank(H, n, d) if n >= 2 else None,
        "scalar_capacity": (
            bounds.scalar_capacity(H, n, d_h, d) if 3 <= n <= d and d_h >= 2 else None
        ),
        "shared_context_rank": bounds.shared_context_rank(H, n),
        "shared_context_ceiling": (bounds.shared_context_ceiling(H, n, d_h, d) if n <= d else None),
        "affine_rank": bounds.affine_rank(H, d),
        "relu_capacity": bounds.relu_capacity(units, d) if units else None,
        "mha_parameters": layer,
        "aot_parameters": bounds.aot_parameters(H, d_h, d, N, S) if fits else None,
    }


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
        sizes = dict(zip(("H", "d", "d_h", "n", "S", "N"), values, strict=True))
        page.evaluate(SET, sizes)
        found = page.eval_on_selector_all("[data-count]", READ)
        counts = expected(**sizes)
        assert found == counts, sizes
        total = sizes["N"] ** sizes["S"]
        known = min(counts["aot_capacity"] or 0, total)
        accuracy = bounds.associations_to_accuracy(known, sizes["N"], total)
        text = page.locator("[data-of=accuracy]").inner_text()
        assert float(text) == pytest.approx(accuracy, rel=5e-3)


def test_the_explorer_works_with_the_keyboard_and_remembers_sizes_in_its_address(visit):
    page = visit(EXPLORER)
    heads = page.locator("#size-H")
    heads.focus()
    before = int(heads.input_value())
    page.keyboard.press("ArrowRight")
    assert int(heads.input_value()) == before + 1
    assert page.locator("output[for=size-H]").inner_text() == str(before + 1)
    again = visit(page.url)
    assert again.locator("#size-H").input_value() == str(before + 1)
    assert again.eval_on_selector_all("[data-count]", READ) == page.eval_on_selector_all(
        "[data-count]", READ
    )


def test_the_nearest_point_of_a_measured_size_is_that_point(visit):
    page = visit(EXPLORER)
    points = json.loads(page.locator("#measured").text_content())
    for kind in ("capacity", "associations", "classes"):
        for point in [p for p in points if p["kind"] == kind][::7]:
            same = ("H", "d", "d_h", "n", "S", "N")
            page.evaluate(SET, {size: point[size] for size in same})
            row = page.locator(f"[data-nearest={kind}]")
            shown = int(row.locator("td").first.inner_text().replace(",", ""))
            twins = [p["known"] for p in points if all(p[s] == point[s] for s in ("kind", *same))]
            assert shown in twins
