"""Numbers of the pictures, from the library, and the drawing of the first.

``python make.py`` renews ``query-to-label.html``, and the numbers in
``ruler.html`` and ``staircase.html``. What else these hold is
written by hand. ``tests/book/test_pictures.py`` compares the numbers with
the library.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch

from attnmem import MHAWeights, mha, mha_attention, mha_features
from attnmem.core import bounds, memorize
from attnmem.theory.independence import numerical_rank

HERE = Path(__file__).parent

# --- numbers --------------------------------------------------------------

TOKENS = [[0.7, 0.7, 0.4, 0.9], [0.8, 0.9, 0.1, 0.1], [0.2, 0.0, 0.9, 0.1]]
QUERIES = [
    [0.8, 0.8, 0.7, 0.0],
    [0.6, 0.4, 0.3, 0.9],
    [0.2, 0.5, 0.2, 0.5],
    [0.2, 0.5, 0.8, 0.9],
    [0.9, 0.6, 0.3, 0.9],
]
LABELS = [2, -1, 3, 1, -2]
CHOSEN = [
    [[0.2, 0.2, 0.6], [0.5, 0.1, 0.4]],
    [[0.1, 0.6, 0.3], [0.4, 0.4, 0.2]],
]


def built(tokens, queries, labels, chosen, seed: int) -> MHAWeights:
    """The layer of Theorem 1, its attention chosen where it is free."""
    heads, served_each = chosen.shape[:2]
    served = memorize.serve(1 + heads * served_each, heads)
    generator = torch.Generator().manual_seed(seed)
    duals, free = memorize.dual_basis(queries, served)
    u = memorize.separating_direction(tokens, generator)
    v = memorize.orthogonal_direction(free, queries, served, generator)
    keys = memorize.interpolating_keys(tokens, served, chosen.log())
    scale = memorize.saturating_scale(
        tokens, queries, served, duals, keys, u, v
    )
    root = scale.sqrt()[:, None]
    W_Q = torch.cat([duals, (root * v)[..., None]], dim=-1)
    W_K = torch.cat([keys, (root * u)[..., None]], dim=-1)
    one = torch.ones(1, 1, dtype=tokens.dtype)
    empty = MHAWeights(W_Q, W_K, W_Q[..., :1], one.repeat(heads, 1), one)
    Z = mha_features(empty, tokens, queries)
    M = memorize.read_out(Z, labels[:, None]).unflatten(0, (heads, -1))
    return MHAWeights(W_Q, W_K, M, one.repeat(heads, 1), one)


def example() -> dict:
    """Two heads, three tokens that five queries share, five labels."""
    tokens, queries, labels, chosen = (
        torch.tensor(each, dtype=torch.float64)
        for each in (TOKENS, QUERIES, LABELS, CHOSEN)
    )
    weights = built(tokens, queries, labels, chosen, seed=0)
    Z = mha_features(weights, tokens, queries)
    return {
        "tokens": TOKENS,
        "queries": QUERIES,
        "labels": LABELS,
        "attention": mha_attention(weights, tokens, queries)
        .round(decimals=9)
        .tolist(),
        "features": Z.round(decimals=9).tolist(),
        "read_out": (weights.W_V @ weights.W_O[:, None])
        .flatten()
        .round(decimals=9)
        .tolist(),
        "outputs": mha(weights, tokens, queries)[:, 0]
        .round(decimals=9)
        .tolist(),
        "rank": numerical_rank(Z),
    }


def staircase(heads: int = 3, tokens: int = 4, dim: int = 6) -> dict:
    """Attention of three heads on ten examples, and the rank of Z.

    The ranks are those with no head set, with one, with two and with all.
    A head that is not set yet looks at the first token on every example.
    """
    served_each = tokens - 1
    examples = bounds.mha_capacity(heads, tokens, tokens)
    generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "dtype": torch.float64}
    E, e = (
        torch.rand(tokens, dim, **draw),
        torch.rand(examples, dim, **draw),
    )
    chosen = torch.randn(heads, served_each, tokens, **draw).softmax(-1)
    weights = built(E, e, torch.rand(examples, **draw), chosen, seed=0)
    attention = mha_attention(weights, E, e)
    Z = attention @ E
    ranks = []
    for ready in range(heads + 1):
        now = Z.clone()
        now[:, ready:] = E[0]
        ranks.append(numerical_rank(now.flatten(1)))
    served = memorize.serve(examples, heads) + 1
    return {
        "attention": attention.round(decimals=3).tolist(),
        "served": served.tolist(),
        "ranks": ranks,
    }


WIDTH, CONTEXT, MOST_HEADS = 64, 32, 64
BUILT = {4: 8000}  # the chapter on weights
TRAINED = {
    1: [2496, "3 of 3 runs"],
    2: [7488, "1 of 1 run"],
}  # Levenberg-Marquardt, its chapter


def ruler() -> dict:
    """The counts for each number of heads; what was built or trained."""
    heads = range(1, MOST_HEADS + 1)
    return {
        "theorem": [bounds.mha_capacity(H, CONTEXT, WIDTH) for H in heads],
        "random": [
            bounds.own_context_rank(H, CONTEXT, WIDTH) for H in heads
        ],
        "floor": [bounds.own_context_floor(H, WIDTH, WIDTH) for H in heads],
        "ceiling": [
            bounds.own_context_ceiling(H, WIDTH, WIDTH) for H in heads
        ],
        "built": BUILT,
        "trained": TRAINED,
    }


# --- the first picture ----------------------------------------------------

ROW, TOP, COLUMN = (
    38,
    192,
    31,
)  # height of an example's row, where rows start, width of a number
HEADS = (80, 228)  # where the columns of the two heads start


def number(value: float, digits: int = 2) -> str:
    """A number with a true minus sign and no zeros at the end."""
    written = f"{value:.{digits}f}".rstrip("0").rstrip(".")
    return "0" if written in ("", "-0") else written.replace("-", "−")


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words at a place; the kind is a class of the fragment's style."""
    return (
        f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'.replace(
            ' class=""', ""
        )
    )


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    kind: str,
    more: str = "",
) -> str:
    """A filled box."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect class="{kind}" {place}{more}/>'


def dot(x: float, y: float, name: str, kind: str) -> str:
    """A dot with a number in it."""
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8"/>'
    name = f'<text x="{x:.1f}" y="{y + 3.6:.1f}">{name}</text>'
    return f'<g class="{kind}">{circle}{name}</g>'


def triangle(left: float, head: int, attention: torch.Tensor) -> list[str]:
    """A dot for each example, by its weights; at a corner side by side."""
    at = [(left + 51, 50), (left + 6, 128), (left + 96, 128)]
    lines = [text(left + 51, 14, f"Head {head + 1}", "name")]
    lines.append(
        f'<polygon points="{" ".join(f"{x:g},{y:g}" for x, y in at)}"/>'
    )
    for token, (x, y) in enumerate(at, start=1):
        lines.append(
            text(x, y + (-14 if token == 1 else 24), f"token {token}")
        )
    for t, weights in enumerate(attention.tolist()):
        x, y = (
            sum(a * p[axis] for a, p in zip(weights, at, strict=True))
            for axis in (0, 1)
        )
        if max(weights) < 1:
            lines.append(dot(x, y, str(t + 1), "free"))
            continue
        beside = [
            s
            for s in range(len(attention))
            if (attention[s] == attention[t]).all()
        ]
        shift = 17 * (beside.index(t) - (len(beside) - 1) / 2)
        lines.append(dot(x + shift, y, str(t + 1), "one"))
    return lines


def attend(data: dict) -> list[str]:
    """Left half: queries, and for each head a triangle and bars."""
    attention = torch.tensor(data["attention"], dtype=torch.float64)
    lines = [
        line
        for h, left in enumerate(HEADS)
        for line in triangle(left, h, attention[:, h])
    ]
    lines += [
        text(0, TOP - 22, "five", "start"),
        text(0, TOP - 8, "queries", "start"),
    ]
    lines += [
        text(left + 51, TOP - 16, "attention weights") for left in HEADS
    ]
    under = TOP + ROW * len(data["queries"]) + 10
    for left in HEADS:
        lines.append(text(left + 2, under, "token", "end"))
        lines += [
            text(left + 15 + 36 * i, under, str(i + 1)) for i in range(3)
        ]
    for t, query in enumerate(data["queries"]):
        base = TOP + ROW * t + ROW - 6
        lines.append(text(0, base - 4, str(t + 1), "start name"))
        columns = [
            f"M{14 + 10 * i} {base}v{-20 * value:g}h8v{20 * value:g}z"
            for i, value in enumerate(query)
        ]
        lines.append(f'<path class="query" d="{"".join(columns)}"/>')
        lines.append(
            f'<path class="arrow" d="M60 {base - 8}h14m-5 -4l5 4l-5 4"/>'
        )
        for head, left in enumerate(HEADS):
            weights = data["attention"][t][head]
            kind = "one" if max(weights) == 1 else "free"
            lines.append(f'<path class="base" d="M{left} {base}h102"/>')
            for token, weight in enumerate(weights):
                x, height = left + 36 * token, 18 * weight
                lines += [rect(x, base - height, 30, height, kind)] * (
                    weight > 0
                )
                lines.append(
                    text(x + 15, base - height - 3, number(weight))
                )
    return lines


def read(data: dict) -> list[str]:
    """Right half: the tokens, the matrix Z, the read-out and the labels."""
    last = TOP + ROW * len(data["labels"])
    columns = [20 + COLUMN * (i + 0.5) for i in range(8)]
    lines = [text(20, 14, "Three tokens, four numbers each", "start name")]
    for i, token in enumerate(data["tokens"]):
        lines.append(text(20, 38 + 20 * i, f"token {i + 1}", "start"))
        lines += [
            text(x + 58, 38 + 20 * i, number(value))
            for x, value in zip(columns, token, strict=False)
        ]
    lines.append(
        text(20, 120, "A row of Z: both heads' means", "start name")
    )
    lines.append(
        text(
            20,
            136,
            "the tokens, averaged with the weights of the bars",
            "start",
        )
    )
    lines += [
        text(20 + COLUMN * (2 + 4 * h), TOP - 16, f"mean by head {h + 1}")
        for h in (0, 1)
    ]
    lines.append(text(316, TOP - 16, "label", "name"))
    for t, row in enumerate(data["features"]):
        y = TOP + ROW * t
        lines.append(text(0, y + 24, str(t + 1), "start name"))
        for head in (0, 1):
            kind = "one" if max(data["attention"][t][head]) == 1 else "free"
            lines.append(
                rect(
                    21 + 4 * COLUMN * head,
                    y + 3,
                    4 * COLUMN - 2,
                    ROW - 6,
                    f"{kind} pale",
                )
            )
        lines += [
            text(x, y + 24, number(value))
            for x, value in zip(columns, row, strict=True)
        ]
        lines.append(
            f'<path class="arrow" d="M272 {y + 19}h14m-5 -4l5 4l-5 4"/>'
        )
        lines.append(rect(294, y + 3, 44, ROW - 6, "chip", ' rx="10"'))
        lines.append(text(316, y + 24, number(data["labels"][t]), "name"))
    lines.append(
        text(
            20, last + 20, "Read-out, the same for every row:", "start name"
        )
    )
    lines += [
        text(x, last + 38, number(v), "small")
        for x, v in zip(columns, data["read_out"], strict=True)
    ]
    lines.append(
        text(
            20,
            last + 56,
            "multiply column by column and add up to get the label",
            "start",
        )
    )
    return lines


def query_to_label() -> str:
    """The whole fragment."""
    data = example()
    panels = {"attend": attend(data), "read": read(data)}
    page = (HERE / "query-to-label.template.html").read_text(
        encoding="utf-8"
    )
    for name, lines in panels.items():
        page = page.replace(f"<!-- {name} -->", "\n    ".join(lines))
    return page.replace("<!-- numbers -->", json.dumps(data))


def with_numbers(page: str, data: dict) -> str:
    """A fragment with new numbers in its element for them."""
    element = r'(<script type="application/json"[^>]*>).*?(</script>)'
    return re.sub(
        element,
        lambda found: found[1] + json.dumps(data) + found[2],
        page,
        flags=re.S,
    )


# --- stills: what scripts draw first, for paper and without scripts -------

SCRIPTED = ("ruler", "xor", "staircase", "looking-away")
DRAWING = re.compile(r"<svg .*?</svg>", re.S)


def still(page: str, browser) -> str:
    """A fragment whose drawing is the one that its script makes of it."""
    tab = browser.new_page()
    tab.set_content(page)
    drawn = tab.eval_on_selector("svg", "drawing => drawing.outerHTML")
    tab.close()
    drawn = re.sub(r"></(rect|line|path|polygon|circle)>", "/>", drawn)
    drawn = re.sub(r"\s*\n\s*", "", drawn)
    drawn = re.sub(r"(?=<g|</svg)", "\n  ", drawn)
    drawn = drawn.replace("  </svg", "</svg")
    return DRAWING.sub(lambda _: drawn, page)


def main() -> None:
    """Write all of them."""
    from playwright.sync_api import sync_playwright

    (HERE / "query-to-label.html").write_text(query_to_label(), "utf-8")
    numbers = {"ruler": ruler(), "staircase": staircase()}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name in SCRIPTED:
            path = HERE / f"{name}.html"
            page = path.read_text(encoding="utf-8")
            if name in numbers:
                page = with_numbers(page, numbers[name])
            path.write_text(still(page, browser), encoding="utf-8")
        browser.close()


if __name__ == "__main__":
    main()
