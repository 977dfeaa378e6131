"""Numbers of the pictures, from the library.

``python make.py`` renews the numbers in ``teach.html``, ``ruler.html`` and
``staircase.html``, and what scripts draw first. What else these hold is
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
    [[0.2, 0.6, 0.2], [0.6, 0.3, 0.1]],
    [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]],
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
    detectors = torch.linalg.pinv(queries[[1, 2]])
    return {
        "tokens": TOKENS,
        "queries": QUERIES,
        "labels": LABELS,
        "logits": (queries @ detectors @ chosen[0].log())
        .round(decimals=9)
        .tolist(),  # of head 1, without the part that looks away
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

SCRIPTED = (
    "teach",
    "lead",
    "independent-rows",
    "ruler",
    "xor",
    "staircase",
    "looking-away",
    "fill",
    "sheet",
)
DRAWING = re.compile(r"<svg .*?</svg>", re.S)


def still(page: str, browser) -> str:
    """A fragment whose drawings are those that its script makes of them."""
    tab = browser.new_page()
    tab.set_content(page)
    drawn = "".join(
        tab.locator("svg").evaluate_all(
            "drawings => drawings.map((each) => each.outerHTML)"
        )
    )
    tab.close()
    drawn = re.sub(r"></(rect|line|path|polygon|circle)>", "/>", drawn)
    drawn = re.sub(r"\s*\n\s*", "", drawn)
    drawn = re.sub(r"(?=<g|</svg)", "\n  ", drawn)
    drawn = iter(DRAWING.findall(drawn.replace("  </svg", "</svg")))
    return DRAWING.sub(lambda _: next(drawn), page)


def main() -> None:
    """Write all of them."""
    from playwright.sync_api import sync_playwright

    numbers = {
        "teach": example(),
        "ruler": ruler(),
        "staircase": staircase(),
    }
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
