"""The pictures of book/assets/pictures, used as a reader uses them."""


def test_the_microscope_shows_what_float32_stores_and_what_its_rank_says(drawn):
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
