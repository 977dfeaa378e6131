"""The numbers in the pictures of book/assets/pictures are the library's."""

import functools
import importlib.util
import itertools
import json
import math
import re

import jupytext
import numpy as np
import pytest
import torch

from attnmem import aot, aot_features
from attnmem.core import bounds
from attnmem.core.memorize import SATURATED
from attnmem.core.sequences import circle, fitted, offered
from attnmem.lab import experiments, fits, models, searches
from attnmem.theory import counts
from attnmem.theory.independence import kruskal_rank, numerical_rank, regions
from attnmem.theory.sequence_ranks import dependent_subset, offered_rank
from attnmem.theory.tangents import ScalarHeads, scalar_outputs, tangents

from tools.chapters import BOOK

PICTURES = BOOK / "assets" / "pictures"
BITS = torch.cartesian_prod(torch.arange(2), torch.arange(2))
SMALL = {  # the draw of the small transformer, which the chapters on token sequences share
    "embedding": [[1, 0], [0, 1]],
    "positions": [[1, 1], [0, 0]],
    "W_Q": [[[1, 0], [0, 1]]],
    "W_K": [[[math.log(3) / 2, -math.log(3) / 2], [0, 0]]],
    "W_V": [[[1, 0], [0, 1]]],
}
FRAGMENTS = sorted(path.stem for path in PICTURES.glob("*.html"))


def make():
    """The script that writes the numbers."""
    spec = importlib.util.spec_from_file_location("pictures_make", PICTURES / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name):
    return (PICTURES / f"{name}.html").read_text(encoding="utf-8")


def numbers(name):
    element = r'<script type="application/json">(.*?)</script>'
    return json.loads(re.search(element, page(name), re.S)[1])


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def floats(texts):
    """Numbers that a picture has as text, in lists as they are."""
    return torch.from_numpy(np.asarray(texts, dtype=float))


def near(found, expected, apart=0.06):
    """As near as numbers are that a picture rounds to a tenth."""
    torch.testing.assert_close(found, expected, atol=apart, rtol=0)


def same(found, expected):
    """Equal; fractions within 1e-3, as they are printed, since other machines round otherwise."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        return all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected or (isinstance(expected, float) and abs(found - expected) < 1e-3)


def test_numbers_are_the_librarys():
    made = make()
    for name, data in {
        "teach": made.example(),
        "staircase": made.staircase(),
        "ruler": json.loads(json.dumps(made.ruler())),
    }.items():
        assert same(numbers(name), data), name


def test_teach_labels_follow_from_attention():
    data = numbers("teach")
    alpha, tokens, features = (tensor(data[key]) for key in ("attention", "tokens", "features"))
    torch.testing.assert_close((alpha @ tokens).flatten(1), features)
    torch.testing.assert_close(features @ tensor(data["read_out"]), tensor(data["labels"]))
    assert len(alpha) == bounds.mha_capacity(2, len(tokens), head_dim=3) == data["rank"] == 5


@pytest.fixture
def double():
    """As chapters compute."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def variables(chapter, first_line):
    """What the cells of a chapter that begin so leave behind, silently."""
    names = {"torch": torch, "print": lambda *values, **options: None}
    for cell in jupytext.read(BOOK / "text" / f"{chapter}.md").cells:
        if cell.cell_type == "code" and re.match(first_line, cell.source):
            exec(cell.source, names)
    return names


def test_teach_is_computed_by_the_first_chapters(double):
    names = variables("idea/by-hand", r"E = |def head")
    data = numbers("teach")
    for key, name in {"tokens": "E", "queries": "e", "labels": "y"}.items():
        assert names[name].tolist() == data[key]
    alpha = torch.stack([names["alpha_1"], names["alpha_2"]], dim=1)
    torch.testing.assert_close(alpha, tensor(data["attention"]))
    Z = variables("idea/independent-rows", "Z = ")["Z"]
    torch.testing.assert_close(Z, tensor(data["features"]))


def test_teach_is_drawn_by_the_first_chapter():
    data = numbers("teach")
    shown = page("equations")
    values = itertools.chain(*data["features"], data["read_out"], data["labels"])
    for value in values:
        assert f">{round(value, 2) + 0:g}</text>".replace("-", "−") in shown
    blind = page("blind").split("head 2:")
    for half, v in zip(blind, ([9, 6, -14, -4], [-3, 21, 0, -11]), strict=True):
        for t, product in enumerate((tensor(data["queries"]) @ tensor(v)).tolist(), start=1):
            place = re.search(rf'<circle cx="([\d.]+)"[^>]*/><text[^>]*>{t}</text>', half)
            assert float(place[1]) == pytest.approx(214 + 13 * product, abs=0.06)
    marks = re.findall(r'<circle class="mark" cx="(\S+)" cy="(\S+)"', page("lead"))
    corners = tensor([[350, 48], [295, 158], [405, 158]])
    for lead, mark in zip([0, 1, 2, 3, 5], marks, strict=True):
        expected = tensor([0, lead, 0]).softmax(0) @ corners
        near(floats(mark), expected)


def test_independent_rows_meet_where_lines_cross():
    data = numbers("independent-rows")
    rows, labels = (tensor(data["independent"][key]) for key in ("rows", "labels"))
    torch.testing.assert_close(
        torch.linalg.solve(rows, labels), tensor(data["independent"]["read_out"])
    )
    first, second = data["dependent"]["rows"]
    assert second == [2 * value for value in first]
    assert data["dependent"]["only"] == 2 * data["independent"]["labels"][0]
    unit = tensor([59.1, -47])  # of the drawing, whose origin is at (67.3, 213.5)
    lines = re.findall(
        r'class="(?:one|two)" d="M(\S+) (\S+)L(\S+) (\S+)"', page("independent-rows")
    )
    drawn = [*zip([[2, 1], [1, 2], [2, 1], [4, 2]], [4, 5, 4, 5], lines, strict=True)]
    for row, label, ends in drawn:
        points = (floats(ends).view(2, 2) - tensor([67.3, 213.5])) / unit
        assert ((points @ tensor(row) - label).abs() < 0.01).all()


def test_knobs_are_columns_of_the_pseudoinverse():
    data = numbers("teach")
    knobs = torch.linalg.pinv(tensor(data["features"]))
    paths = re.findall(r'class="bars( sum)?" d="(.*?)"', page("knobs"))
    heights = [tensor([-float(h) for h in re.findall(r"v(\S+?)h", path)]) for _, path in paths]
    near(torch.stack(heights[:5]) / 12, knobs.T, 0.01)
    near(heights[5] / 8, tensor(data["read_out"]), 0.01)
    met = re.findall(r'class="met" cx="(\S+)" cy="(\S+)"', page("near"))
    for gap, place in zip([1, 1 / 2, 1 / 4], met, strict=True):
        read_out = torch.linalg.solve(tensor([[1, 1], [1, 1 + gap]]), tensor([0, 1]))
        assert floats(place).tolist() == [
            322 + 62 * read_out[0],
            292 - 62 * read_out[1],
        ]
        assert re.search(rf"\(−{1 / gap:g}, {1 / gap:g}\)", page("near"))
    rank = [
        kruskal_rank(tensor(set_)) for set_ in ([[1, 0], [0, 1], [1, 1]], [[1, 0], [0, 1], [2, 0]])
    ]
    assert [int(k) for k in re.findall(r"rank 2, Kruskal rank (\d)", page("kruskal"))] == rank


def test_ruler_shows_what_every_run_met():
    rows = experiments.table(fits.LAYER.name, "paper")
    rows = rows[(rows.n == 32) & (rows.d == 64) & (rows.d_h == 64) & (rows.context == "own")]
    largest = {}
    for (heads, count), runs in rows.groupby(["H", "T"]):
        if runs.met.all():
            words = f"{len(runs)} of {len(runs)} run{'s' if len(runs) > 1 else ''}"
            largest[str(heads)] = [count, words]
    assert numbers("ruler")["trained"] == largest


def test_ruler_shows_what_a_chapter_builds():
    chapter = (BOOK / "text" / "answer" / "capacity.md").read_text(encoding="utf-8")
    ((heads, count),) = numbers("ruler")["built"].items()
    assert f"\nlabels = {count}  # " in chapter
    assert f"heads={heads}" in chapter.replace(" ", "")
    assert count <= bounds.own_context_floor(int(heads), 64, 64)


def test_growth_outputs_lie_in_their_triangles():
    shown = page("growth")
    triangles = re.findall(r'class="hull" d="M([\d .]+)L([\d .]+)L([\d .]+)Z"', shown)
    outputs = re.findall(r'class="out" cx="(\d+)" cy="(\d+)"', shown)
    corners = [[[float(x) for x in corner.split()] for corner in each] for each in triangles]
    assert len(corners) == 4
    assert len(outputs) == 6
    for k, output in enumerate(outputs):
        three = tensor(corners[max(0, k - 2)]).T  # one triangle for three, then one for each
        weights = torch.linalg.solve(
            torch.vstack([three, torch.ones(1, 3, dtype=torch.float64)]),
            tensor([*map(float, output), 1.0]),
        )
        assert weights.min() > 0.05
    assert "n − 1 = 2 directions" in shown
    assert bounds.shared_context_rank(1, 3) == 1 + 2


def test_growth_dials_start_at_the_counts():
    shown = page("growth-dials")
    found = [int(count) for count in re.findall(r'count".*?>(\d+)<', shown)]
    assert found == [bounds.shared_context_ceiling(4, 4, 2, 4), bounds.own_context_ceiling(4, 2, 4)]
    widths = [float(width) for width in re.findall(r'height="24" width="(\S+)"', shown)]
    assert widths == [2.5 * count for count in found for _ in range(2)]


def test_mlp_mixes_and_cuts():
    shown = page("mlp")
    assert ">z = (3, 0.5)<" in shown
    inputs = re.findall(r">\((\d), (\d)\): (\d)<", shown)
    assert len(inputs) == 3
    assert all(max(int(x) + int(y) - 1, 0) == int(answer) for x, y, answer in inputs)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_fragment_stands_alone(name):
    text = page(name)
    assert f'id="pic-{name}"' in text, f'<figure ... id="pic-{name}"> is its name'
    assert text.count("<figure") == text.count("</figure>") == text.count("<figcaption>") == 1
    outside = re.findall(r"https?://(?!www\.w3\.org/)|src=|@import", text)
    assert outside == [], "a picture loads nothing: put it into the file"
    assert not re.search(r"dana-|mahdavi-|answer-training", text), "name experiments for people"
    for svg in re.findall(r"<svg [^>]*>.*?</svg>", text, re.S):
        assert re.search('<svg [^>]*role="img"', svg), 'write <svg role="img">'
        said = re.search('aria-label="[^"]{40,}"|<title [^>]*>[^<]{40,}</title>', svg)
        assert said, "say what it shows in `aria-label` or <title>"
        assert "<text" in svg, "draw the still, without a script"


def test_most_draws_the_parameters_that_matter():
    drawn = page("most").split("<title")[1]
    stored, seen = drawn.count('class="free"'), drawn.count('class="follows"')
    dim, head_dim = 4, 2
    weights = 2 * dim * head_dim + dim
    matter = bounds.own_context_ceiling(1, head_dim, dim)
    assert (stored, seen) == (weights + matter, dim**2 + dim - matter)
    assert f">{weights} weights<" in drawn
    assert f">{matter} count<" in drawn
    assert f"only {4 * matter} of the {4 * weights} weights" in drawn


def test_sheet_draws_the_curve_beside_the_ring(double):
    drawn = page("sheet")
    at = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", re.search(r'class="curve" d="(.*?)"', drawn)[1])
    outputs = []
    for w in torch.arange(-60, 61) / 10:
        heads = ScalarHeads(*torch.tensor([[[[w]]], [[[1.0]]]]), torch.ones(1, 1))
        queries = torch.tensor([[1.6], [0.5]])
        outputs.append(scalar_outputs(heads, torch.tensor([[-1.0], [1.0]]), queries))
    places = torch.stack(outputs) * 90 * torch.tensor([1, -1]) + torch.tensor([130, 122])
    found = floats(at)
    near(found, places)
    ring = tensor([float(x) for x in re.search(r'want" cx="(\S+)" cy="(\S+)"', drawn).groups()])
    assert (found - ring).norm(dim=1).min() > 20


def test_twins_are_silent_and_step_to_the_labels(double):
    drawn, data = page("twins"), numbers("twins")
    E, e, y, q, k, mu = (
        tensor(data[name]) for name in ("tokens", "queries", "labels", "W_Q", "W_K", "mu")
    )
    twins = ScalarHeads(q.expand(2, 2, 1), k.expand(2, 2, 1), torch.stack([mu, -mu]))
    at = tangents(twins, E, e)
    moved = twins.moved(at.transposed(torch.linalg.solve(at.gram(), y)), 0.1)
    answers = scalar_outputs(moved, E, e)
    totals = [*[0.0] * 3, *answers.tolist(), *(10 * answers).tolist()]
    assert at.outputs.abs().max() < 1e-12
    found = [text.replace("−", "-") for text in re.findall(r'total" [^>]*>([^<]+)<', drawn)]
    assert [float(x) for x in found] == pytest.approx(totals, abs=6e-3)
    single = [scalar_outputs(ScalarHeads(*(w[h : h + 1] for w in moved)), E, e) for h in (0, 1)]
    for kind, alone in zip(("one", "two"), single, strict=True):
        high = re.findall(rf'class="{kind}" [^>]*height="([\d.]+)"', drawn)[3:]
        near(floats(high), 26 * alone.abs())


def test_getting_there_is_steps_of_gradient_and_newton():
    drawn = page("getting-there").split("<script>")[0]
    dots = [
        tuple(map(float, at)) for at in re.findall(r'<circle cx="(\S+)" cy="(\S+)" r="2.6"', drawn)
    ]
    start, end = dots[0], re.search(r'class="newton"><path d="M(\S+) (\S+)L(\S+) (\S+)"', drawn)
    assert tuple(map(float, end.groups()[:2])) == start
    lowest, values, rate = tensor([*map(float, end.groups()[2:])]), tensor([1 / 5, 1]), 1.8
    at = tensor(start)
    assert len(dots) == 21
    for dot in dots:
        near(tensor(dot), at)  # printed to a tenth
        at = at - rate * values**2 * (at - lowest)


def test_fold_is_where_a_singular_value_is_zero():
    drawn = page("fold")
    v, shown = torch.tensor(0.5), float(re.search(r"smallest singular value: (\S+)<", drawn)[1])
    J = torch.func.jacrev(lambda u, v: torch.stack([-(v**2), u + 0.4 * v]), argnums=(0, 1))
    values = [torch.linalg.svdvals(torch.stack(J(torch.tensor(0.0), at))) for at in (v, 0 * v)]
    assert abs(values[0][-1] - shown) < 0.005
    assert values[1][-1] == 0
    at = re.search(r'id="fold-out" cx="(\S+)" cy="(\S+)"', drawn).groups()
    assert [*map(float, at)] == [400 - 130 * v**2, 110 + 55 * 0.4 * v]


def points(name, mark):
    """Centres of the circles of a class, in their order."""
    circle = rf'<circle class="{mark}" cx="([\d.]+)" cy="([\d.]+)"'
    return floats(re.findall(circle, page(name)))


def test_apart_steps_span_three_dimensions():
    below, above = points("apart", "token").unflatten(0, (2, 3))
    torch.testing.assert_close(above - below, (above - below)[:1].expand(3, 2))
    start, end = below[1], above[0]  # the pair (a, b)
    for stop in points("apart", "share"):
        share = (stop - start) @ (end - start) / (end - start).square().sum()
        near(start + share * (end - start), stop, 0.1)
    nine = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    assert [offered_rank(nine, heads, 10, 10) for heads in (1, 2)] == [3 + 3, 3 + 3 + 3]


def test_offers_maps_four_pairs_to_xor():
    """As drawn: rows of F in two parts, their factors, and the sums whose sign is the token."""
    shown = page("offers").replace("−", "-")
    vectors = re.findall(r">\(([^()]+)\)</text>", shown)
    F = tensor([[float(x) for x in vector.split(", ")] for vector in vectors]).reshape(5, 4)
    F, factors = F[:4], F[4]
    assert torch.linalg.matrix_rank(F) == 4
    sums = re.findall(
        r'x="352" y="\d+">(-?1)</text><text class="name" x="412" y="\d+">(\d)<', shown
    )
    assert [[float(x), int(token)] for x, token in sums] == [
        [value, (1 - value) / 2] for value in (F @ factors).tolist()
    ]
    first, last = torch.cartesian_prod(torch.arange(2), torch.arange(2)).T
    assert [int(token) for _, token in sums] == (first ^ last).tolist()
    x = torch.eye(2, dtype=torch.float64)
    steps = x[first] + 1 - x[last]  # the place of the first token adds (1, 1)
    shares = tensor([0.5, 0.5, 0.25, 0.5])[:, None]
    torch.testing.assert_close(F, torch.cat([x[last], x[last] + shares * steps], dim=1))
    half = torch.cat([x[last], x[last] + steps / 2], dim=1)
    assert torch.equal(half[0] + half[3], half[1] + half[2])


def small_transformer():
    """The weights that the chapter computes for xor."""
    e, pos, W_Q, W_K, W_V = (tensor(SMALL[name]) for name in SMALL)
    targets = torch.stack([1.0 - 2 * (BITS[:, 0] ^ BITS[:, 1]), BITS[:, 1]], dim=1).double()
    return fitted((e, pos, W_Q, W_K, W_V), circle(2), BITS, targets)


def test_aot_is_the_small_transformer():
    """The still has the pair 10; the script has the weights, for all four pairs."""
    weights = small_transformer()
    shown = page("aot").replace("−", "-")
    x = weights.embedding[BITS] + weights.positions
    mean = aot_features(weights, BITS)
    value = mean @ weights.W_V[0].T
    written = value @ weights.W_O[0].T
    one = 2  # the number of the pair 10
    at_10 = [*x[one], mean[one], value[one], written[one], x[one, 1] + written[one]]
    vectors = re.findall(r'class="name vector"[^>]*>\(([^()]+)\)<', shown)
    near(tensor([[float(y) for y in v.split(", ")] for v in vectors]), torch.stack(at_10), 1e-9)
    logits = [float(y) for y in re.findall(r">token \d: (-?\d+)<", shown)]
    near(tensor(logits), aot(weights, BITS)[one], 1e-9)
    assert aot(weights, BITS).argmax(1).tolist() == (BITS[:, 0] ^ BITS[:, 1]).tolist()
    share = ((mean - x[:, 1]) / (x[:, 0] - x[:, 1])).nanmean(1)
    near(share, tensor([0.5, 0.5, 0.25, 0.5]), 1e-9)
    tables = [weights.embedding, weights.positions, 9 * weights.W_V[0], weights.W_O[0]]
    for name, W in zip((" e =", " places =", "times(", " written = times("), tables, strict=True):
        found = re.search(re.escape(name) + r" ?(\[\[.*?\]\])", shown)[1]
        near(tensor(json.loads(found)), W, 1e-9)
    assert sum(W.numel() for W in weights) == 28


def test_moved_has_the_numbers_of_the_pair_10():
    weights = small_transformer()
    last, value = tensor([1, 0]), tensor([1, 0.5])
    skip = weights.embedding.T @ last  # M, since the draw has unit vectors
    written = weights.W_O[0] @ value
    near(offered(weights, BITS)[2, 2:], value, 1e-9)
    for half in page("moved").replace("−", "-").split("<svg")[1:]:
        found = re.findall(r"\((-?[\d.]+), (-?[\d.]+)\)(?=[^<]*</text>)", half)
        found = {(float(a), float(b)) for a, b in found}
        wanted = [last, skip, value, written, skip + written]
        assert found == {tuple(v.round(decimals=9).add(0).tolist()) for v in wanted}


def test_blame_and_pairs_are_the_librarys():
    blamed = re.findall(r'class="blamed".*?>([abc])([abc])<', page("blame"))
    pairs = torch.tensor([["abc".index(token) for token in pair] for pair in blamed])
    nine = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    found = nine[dependent_subset(nine, heads=1, head_dim=10, dim=10)]
    assert sorted(pairs.tolist()) == found.tolist()
    assert f"{len(pairs)} pairs to blame" in page("blame")
    shown = page("pairs")
    for name, line in {
        "count": lambda H: bounds.aot_capacity(H, 10, 10),
        "made": lambda H: 10 + bounds.own_context_floor(H, 10, 10),
        "ceiling": lambda H: bounds.sequences_ceiling(H, 10, 10, 50, 2, trained=True),
    }.items():
        drawn = re.search(rf'class="{name}" d="M([^"]+)"', shown)[1].split("L")
        heights = [232 - line(H) / 7 for H in range(1, 9)]
        assert heights == pytest.approx([float(at.split()[1]) for at in drawn], abs=0.06)
    rows = searches.found("dana-capacity", "paper").query("d == 10 and d_h == 10")
    crosses = re.findall(r"M([\d.]+) ([\d.]+)l10 10", shown)
    at = floats(crosses)
    expected = [
        [52 + 36 * (H - 1) - 5, 227 - T / 7] for H, T in zip(rows.H, rows.memorized, strict=True)
    ]
    near(at, tensor(expected))


def test_circle_leads_by_what_it_says():
    W_U = circle(10)
    lead = 1 - (W_U @ W_U[2]).sort().values[-2]
    assert f"the lead is {lead:.2f}" in page("circle")
    drawn = re.findall(r'class="(?:token|right)" cx="([\d.]+)" cy="([\d.]+)"', page("circle"))
    expected = tensor([150, 146]) + 108 * W_U * tensor([1, -1])
    near(floats(drawn), expected)


def test_code_tokens_fall_on_the_lines():
    own, shared = points("code", "token").unflatten(0, (2, 2))
    assert torch.equal(own, shared)
    origin = tensor([150, 150])
    e = tensor(SMALL["embedding"]) * tensor([1, -1])  # y is down
    torch.testing.assert_close(own, origin + 104 * e)
    feet = points("code", "foot").unflatten(0, (3, 2))
    for line, found in zip(tensor([[1, -1], [1, 1], [2, -1]]), feet, strict=True):
        unit = line / line.norm()
        expected = origin + ((own - origin) @ unit)[:, None] * unit
        near(found, expected, 0.1)
    torch.testing.assert_close(points("code", "same").expand(2, 2), feet[0])


def percent(name, variant):
    rows = experiments.table(name, "paper").query("variant == @variant")
    return 100 * rows.groupby("d_h").accuracy.mean()


def test_suspects_show_the_stored_curves():
    """A switch is on where a model differs from the published code."""
    shown = page("suspects")
    drawn = dict(re.findall(r'data-key="(\d+)">.*?Z"/><path d="M([^"]+)"', shown))
    variants = experiments.EXPERIMENTS["dana-exp2"].variants
    code = models.VARIANTS["code"]
    for variant in variants:
        differs = [a != b for a, b in zip(models.VARIANTS[variant], code, strict=True)]
        key = "".join(f"{int(differ)}" for differ in differs[:4])
        curve = [[float(x) for x in dot.split()] for dot in drawn.pop(key).split("L")]
        expected = percent("dana-exp2", variant)
        assert [226 - 2.05 * y for y in expected] == pytest.approx([y for _, y in curve], abs=0.06)
        gap = (expected - percent("dana-exp2", "code")).abs().max()
        words = rf'{key}">.*?(up to {gap:.0f}|than {gap:.1f}) percent'
        assert variant == "code" or re.search(words, shown)
    assert drawn == {}


def test_parameters_and_budget_are_as_stored():
    for kind, variant in (("own", "paper"), ("shared", "code")):
        runs = experiments.runs("dana-exp2", "paper", 1, variant=variant)
        counted = {}
        for run in runs:  # but the tables of tokens and positions
            P = models.initial_aot(run, torch.Generator())
            of_layers = [W.numel() for name, W in P.items() if name[:2] in ("W_", "up", "do")]
            counted[run.d_h] = sum(of_layers)
        heights = [224 - counted[width] / 40 for width in range(1, 11)]
        assert heights == pytest.approx(points("parameters", kind)[:, 1].tolist(), abs=0.06)
    bars = re.findall(r'width="([\d.]+)".*?>(\d+)%<', page("budget"))
    expected = percent("dana-budget", "paper").tolist()
    assert [float(bar) for bar, _ in bars] == pytest.approx([2.2 * y for y in expected], abs=0.06)
    assert [int(words) for _, words in bars] == [round(y) for y in expected]


def test_one_plane_leaves_28_weights_that_count(double):
    """As the chapter says of the layer of 80 weights: the rank of its derivative."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    X, e = draw(99, 4, 4), draw(99, 4)

    def answers(Q, K, M, D):
        logits = torch.einsum("td,hde,hce,tnc->htn", e @ D, Q, K, X @ D)
        return torch.einsum("htn,tnd,hd->t", logits.softmax(-1), X @ D, M)

    def count(dim, plane):
        weights = draw(4, dim, 2), draw(4, dim, 2), draw(4, dim), plane
        J = torch.func.jacrev(answers, (0, 1, 2, 3)[: 4 if dim < 4 else 3])(*weights)
        return numerical_rank(torch.cat([j.flatten(1) for j in J], dim=1))

    assert count(4, torch.eye(4)) == bounds.own_context_ceiling(4, 2, 4) == 64
    assert count(2, draw(4, 2)) == bounds.own_context_ceiling(4, 2, 2) + 2 * (4 - 2) == 28


def test_trained_turns_push_a_saturated_head():
    """Both heads get one push: the logit of token 1 rises by 1. Dots are averages of corners."""
    corners = tensor([[80, 48], [18, 152], [142, 152]])
    before_saturation = {}
    for kind, group in re.findall(
        r'<g class="(free|full)".*?(<text.*?)</g>', page("trained-turns"), re.S
    ):
        weights = [
            tensor([float(x) for x in re.findall(r">(0\.\d+)</text>", line)])
            for line in re.findall(r"(?:before|after)</text>.*", group)
        ]
        before_saturation[kind] = weights[0].max()
        pushed = torch.softmax(weights[0].log() + tensor([1, 0, 0]), 0)
        assert (pushed - weights[1]).abs().max() < (6e-3 if kind == "free" else 6e-4)
        for moment, exact in (("before", weights[0]), ("after", pushed)):
            at = re.search(rf'class="{moment}" cx="([\d.]+)" cy="([\d.]+)"', group).groups()
            near(floats(at), exact @ corners)
    assert before_saturation["full"] > SATURATED > before_saturation["free"]


def test_failures_cost_what_they_say():
    """With one query each head shows a vector of logits and one of values; a plane has d - 1."""
    shown = re.findall(r'class="holds"[^>]*>(\d+) labels<', page("failures"))
    assert [*map(int, shown)] == [4 * (4 + 4), bounds.own_context_ceiling(4, 2, 4 - 1)]
    assert f"whose ceiling is {bounds.own_context_ceiling(4, 2, 4)}," in page("failures")


def test_xor_heads_differ_by_the_signs_of_xor():
    shown = page("xor-heads")
    for ones in range(3):
        first, second = (20 * 2 * ones / (3 + ones), 18 * 4 * ones / (3 + 3 * ones))
        gap = re.search(rf'class="gap" d="M{70 + 110 * ones} ([\d.]+)V([\d.]+)"', shown)
        assert tuple(map(float, gap.groups())) == (216 - 10 * (1 + first), 216 - 10 * second)
        words = f">{second:.0f} − {1 + first:.0f} = {second - 1 - first:.0f}<"
        assert words.replace("-", "−") in shown


def test_xor_terms_cancel_and_queries_frame():
    drawn = page("xor-cancel").split(">−</text>"), page("xor-cancel").split(">+</text>")
    assert [len(parts) - 1 for parts in drawn] == [2 + 1 + 1, 2 + 1]
    cube = list(itertools.product((0, 1), repeat=3))
    for term, left in (((0,), 0), ((0, 1), 0), ((0, 1, 2), -1)):
        assert sum((-1) ** sum(b) for b in cube if all(b[s] for s in term)) == left
    frame = r'class="asks" x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"'
    pair = r'cx="(\d+)" cy="(\d+)" r="16"/><text[^>]*>(\d)(\d)<'
    inside = []
    for u, v, w, h in [map(int, found) for found in re.findall(frame, page("xor-queries"))]:
        at = [map(int, found) for found in re.findall(pair, page("xor-queries"))]
        inside.append({second for x, y, _, second in at if u < x < u + w and v < y < v + h})
    assert inside == [{0, 1}, {1}, {0}]


def test_audience_counts_as_depth():
    shown = page("audience")
    for heads, total in (([2], "2 · (5 + 3) + 3 = 19"), ([1, 1], "5 + 5 + 5 + 3 + 3 = 21")):
        assert f">{total}<" in shown
        assert bounds.deep_ceiling(heads, 1, 1, 3) == int(total[-2:])


def test_arcs_are_as_many_as_cover_counts():
    shown = page("arcs")
    arcs = re.findall(r'class="arc([^"]*)" data-signs="([+−]*)"', shown)
    for T in range(1, 7):
        assert len({signs[:T] for _, signs in arcs}) == bounds.sign_vectors(T, 2) == 2 * T
    assert len(arcs) == 12
    assert not {"++−", "−−+"} & {signs[:3] for _, signs in arcs}  # as the chapter says
    assert all((lit == " lit") == signs.startswith("+++") for lit, signs in arcs)


def test_flat_misses_the_label_of_the_fold():
    """Oblique drawing: the third input lies at the sum of the first two, its label one higher."""
    dots = {mark: points("flat", mark) for mark in ("dot", "got", "want")}
    first, second = dots["dot"][:2]
    origin = tensor([20, 150])  # of the left panel
    torch.testing.assert_close(dots["got"][0], first + second - origin)
    assert dots["want"][0, 0] == dots["got"][0, 0]
    assert dots["want"][0, 1] < dots["got"][0, 1]


def test_silence_serves_width_minus_one():
    heads = re.split('class="start name"', page("silence").split("<svg")[1])[1:]
    widths = [(head.count('class="wish"'), head.count('class="silence"')) for head in heads]
    assert widths == [(3, 1), (1, 1), (0, 1)]
    for (wishes, silence), head in zip(widths, heads, strict=True):
        served = bounds.mha_capacity(1, 64, wishes + silence) - 1
        assert (f">{served} example" in head) if served else (">no examples<" in head)


def test_new_part_times_step_is_one_label():
    """Arrows of 48 to the label: old, new and step of each panel begin at one point."""
    for mark, start in ((0, [30, 190]), (1, [268, 190])):
        tips = {
            name: (points_of_tips("new-part", name)[mark] - tensor(start)) * tensor([1, -1]) / 48
            for name in ("old", "new", "step")
        }
        assert abs(float(tips["step"] @ tips["old"])) < 0.01
        assert float(tips["step"] @ tips["new"]) == pytest.approx(1, abs=0.01)
        part, step = float(tips["new"][1]), float(tips["step"][1])
        assert f"of which {part:.1f} is new" in page("new-part")
        assert f"1 / {part:.1f} = {step:.2f}<" in page("new-part")


def points_of_tips(name, mark):
    """Where the arrows of that class end."""
    found = re.findall(rf'class="{mark} tip" d="M([\d.]+) ([\d.]+)L', page(name))
    return floats(found)


def test_price_is_what_the_nearest_outputs_lower():
    """The outputs move as little as they can until none is above the right one."""
    lowered = []
    for case in re.findall(r'<g class="case">(.*?)</g>', page("price")):
        circle_at = r'<circle class="([^"]*)" cx="(\d+)" cy="([\d.]+)"'
        before, after = {}, {}
        for kind, x, y in re.findall(circle_at, case):
            (before if "before" in kind else after)[int(x)] = -float(y)
        before = after | before
        right, *rivals = sorted(before)  # the right one stands first
        level = before[right]
        down = []
        for rival in sorted(rivals, key=before.get, reverse=True):
            if before[rival] > level:
                down.append(rival)
                level = np.mean([before[right], *(before[x] for x in down)])
        expected = before | dict.fromkeys([right, *down], level)
        assert after == pytest.approx(expected, abs=0.06)
        assert f">{len(down)} come{'s' * (len(down) == 1)} down<" in case
        lowered += int(re.search(r">(\d) of 6 times<", case)[1]) * [len(down)]
    assert len(lowered) == 6
    assert "= 5/6 of a rival" in page("price")
    assert np.mean(lowered) == pytest.approx(5 / 6) == counts.class_price(3)


def test_planes_split_as_cover_counts():
    """Lines of the plane are planes through the origin; the horizon is one more."""
    lines = re.findall(r'class="(?:plane|new)" d="M(.*?) (.*?)L(.*?) (.*?)"', page("planes"))
    ends = floats(lines).unflatten(1, (2, 2))
    ends = torch.cat([ends - tensor([160, 112]), torch.ones(4, 2, 1)], dim=2)
    normals = torch.linalg.cross(ends[:, 0], ends[:, 1])
    horizon = tensor([[0, 0, 1]])
    old, new = torch.cat([horizon, normals[:3]]), torch.cat([horizon, normals])
    counted = [regions((4 * each).round().long()) for each in (old, new)]
    assert counted == [bounds.sign_vectors(total=T, rank=3) for T in (4, 5)] == [14, 22]
    assert "14 + 8 = 22" in page("planes")
    cuts = floats(re.findall(r'class="cut" cx="(.*?)" cy="(.*?)"', page("planes")))
    at = torch.cat([cuts - tensor([160, 112]), torch.ones(3, 1)], dim=1)
    on = (at @ (normals / normals[:, :2].norm(dim=1, keepdim=True)).T).abs() < 0.2
    assert on.sum(0).tolist() == [1, 1, 1, 3]


def test_families_are_as_long_as_their_ranks():
    """All ways to divide the four heads of the layer of 80 weights, and which is best."""
    totals = {}
    for best, way in re.findall(r'class="way( best)?">(.*?)</g>', page("families")):
        bars = re.findall(r'width="(\d+)".*?<text[^>]*>(\d+)</text>', way)
        ranks = [int(rank) for _, rank in bars]
        assert [int(width) for width, _ in bars] == [8 * rank for rank in ranks]
        total = int(re.search(r">(\d+)</text>$", way)[1])
        assert total == sum(ranks)
        totals[tuple(ranks)] = total
        assert bool(best) == (total == bounds.own_context_floor(4, 2, 4))
    rank = {size: bounds.group_rank(size, keys=4, dim=4, rank=2) for size in (1, 2, 3, 4)}
    ways = (1, 1, 1, 1), (2, 1, 1), (2, 2), (3, 1), (4,)
    assert {*totals} == {tuple(rank[size] for size in way) for way in ways}
