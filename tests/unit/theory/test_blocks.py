"""Counts of whole models are ranks of derivatives, and their proofs' symmetries are symmetries."""

import dataclasses
import functools
import random

import pytest
import torch

from attnmem.theory.blocks import Block, Model
from attnmem.theory.capacity import LayerSizes

from exact import F64, Network

# --- the counts at drawn sizes --------------------------------------------------------------------

KINDS = {  # whether norms are LayerNorms, where they stand, and norms of queries and keys
    "LayerNorm before": (True, "pre", ""),
    "RMSNorm before": (False, "pre", ""),
    "LayerNorm behind": (True, "post", ""),
    "RMSNorm behind": (False, "post", ""),
    "RMSNorm before and behind a branch": (False, "both", ""),
    "RMSNorm behind a branch": (False, "out", ""),
    "each head normed": (None, None, "head"),
    "all heads normed": (None, None, "all"),
}


def count(model, outputs=1):
    return sum(part.matter * part.times for part in model.parts(outputs))


def draw(kind, seed, inputs=""):
    """A model with a context's length, outputs, and whether it is causal."""
    rng = random.Random(f"{kind} {inputs} {seed}")

    def often(share):
        return rng.random() < share

    centred, place, normed = KINDS[kind]
    if centred is None:
        centred = often(0.5)
    if place is None:
        place = rng.choice(("pre", "pre", "both", "out", "post"))
    centred &= place in ("pre", "post")
    d = rng.randint(3 if centred else 2, 6)
    m = d - 1 if centred else d
    shapes = [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 3), (2, 3)]
    if normed:  # of all heads together: with few dimensions one head alone
        shapes = shapes[: 1 if normed == "all" and m <= 3 else 3]
    groups, heads_per_group = rng.choice(shapes)
    e, v = rng.randint(2 if normed else 1, m if normed else 4), rng.randint(1, 4)
    if normed == "all":
        e = 2
    turned = rng.choice([R for R in (0, 0, 2, 4) if min(e, m) >= R])
    n = rng.randint(3 if turned else 2, 4)
    if place in ("both", "out") and groups * v < 2:
        v = 2  # else the norm leaves a sign
    attention = LayerSizes(
        dim=d,
        token_dim=m,
        groups=groups,
        heads_per_group=heads_per_group,
        head_dim=e,
        value_dim=v,
        turned=turned,
        bias="".join(x for x in "qkvo" if often(0.5)),
        normed=normed,
    )
    units = rng.choice((0, 2, 3, 4))
    branches = 2 if units else 1
    gated = often(0.4)
    block = Block(
        attention=attention,
        units=units,
        mlp_bias=often(0.5),
        gated=gated,
        homogeneous=often(0.2) and not gated and not normed,
        norms=2 * branches if place == "both" else branches,
        affine=bool(inputs) or often(0.9),
        place=place,
        parallel=bool(units) and place == "pre" and often(0.25),
    )
    block = dataclasses.replace(block, shift=block.affine and centred and often(0.6))
    causal, learned = often(0.4), bool(inputs) or often(0.4)
    layers = rng.randint(2 if place == "out" and learned else 1, 3)  # one reads raw tokens narrowly
    offsets = 0, 0
    if not turned and not learned and often(0.3):
        offsets = 2 * n - 1, n if causal or layers == 1 else 2 * n - 1
    patch, patch_bias, types = rng.randint(m, d + 2), often(0.5), rng.choice((0, 0, 0, 2, 3))
    model = Model(
        name="",
        blocks=(block,) * layers,
        patch=patch if inputs == "patches" else 0,
        patch_bias=patch_bias,
        rows=n if learned else 0,
        positions=n if learned else 0,
        types=types if learned else 0,
        first=place == "post" or often(0.3),
        offsets=offsets,
    )
    return model, n, rng.choice((1, 1, 2, d, d + 1)), causal


@functools.cache
def drawn(kind, number, inputs=""):
    """The first so many models that are not too large."""
    seed, models = 0, []
    while len(models) < number:
        model, n, outputs, causal = draw(kind, seed, inputs)
        if count(model, outputs) <= 80:
            models.append((model, n, outputs, causal))
        seed += 1
    return models


DRAWN = [(kind, i) for kind in KINDS for i in range(14 if "LayerNorm" in kind else 11)]


@pytest.mark.hostile("mahdavi-finding-models")
@pytest.mark.parametrize(("kind", "number"), DRAWN)
def test_count_is_the_rank(kind, number):
    model, n, outputs, causal = drawn(kind, 14 if "LayerNorm" in kind else 11)[number]
    network = Network(model, n, outputs, causal=causal, seed=number)
    numbers = sum(part.numbers * part.times for part in model.parts(outputs))
    assert numbers == network.numbers
    assert network.rank(count(model, outputs) + 12) == count(model, outputs), model


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("kind", ["LayerNorm before", "RMSNorm before"])
def test_count_with_a_map_of_patches(kind, positions, number):
    model, n, outputs, causal = drawn(kind, 6, inputs="patches")[number]
    if not positions:  # no more than the bias of the map is the same for all tokens
        model = dataclasses.replace(model, rows=0, positions=0, types=0)
    network = Network(model, n, outputs, causal=causal)
    assert network.rank(count(model, outputs) + 12) == count(model, outputs), model


# --- words ----------------------------------------------------------------------------------------


SIZES = ("dim", "token_dim", "groups", "heads_per_group", "head_dim", "value_dim", "turned")


def sized(*sizes, bias="", normed="", block=None, layers=2, **inputs):
    """A model of equal blocks, from the sizes of their attention."""
    attention = LayerSizes(**dict(zip(SIZES, sizes, strict=True)), bias=bias, normed=normed)
    block = Block(attention=attention, **(block or {}))
    return Model(name="", blocks=(block,) * layers, **inputs)


def in_float(model, n=3, outputs=1, causal=False, **others):
    """The count, and the rank in float64, whose gap must be clear."""
    network = Network(model, n, outputs, causal=causal, real=True, seed=1, **others)
    rank, gap = network.rank(2 * count(model, outputs) + 30)
    assert gap > 1e3
    return count(model, outputs), rank


MLP = {"units": 3, "mlp_bias": True}
AT_3 = {"rows": 3, "positions": 3}
TRAINED = {  # sizes of the attention, and the block
    "LayerNorm before": ((4, 3, 2, 1, 2, 1, 0), {**MLP, "shift": True}),
    "LayerNorm without biases before": ((4, 3, 2, 1, 2, 1, 0), MLP),
    "RMSNorm before": ((3, 3, 2, 1, 2, 1, 0), MLP),
    "RMSNorm behind": ((4, 4, 1, 1, 2, 1, 0), {**MLP, "place": "post"}),
    "RMSNorm before and behind a branch": ((3, 3, 2, 1, 2, 1, 0), {**MLP, "place": "both"}),
    "RMSNorm behind a branch": ((3, 3, 2, 1, 2, 1, 0), {**MLP, "place": "out"}),
}


@pytest.mark.parametrize("read", ["a number", "own", "own, biased", "tied", "tied, biased"])
@pytest.mark.parametrize("positions", [0, 3])
@pytest.mark.parametrize("kind", [*TRAINED, "LayerNorm before, first", "RMSNorm before, first"])
def test_count_with_trained_words(kind, positions, read):
    sizes, block = TRAINED[kind.removesuffix(", first")]
    model = sized(
        *sizes,
        bias="qkvo" if positions else "",
        block=block,
        words=12,
        rows=positions,
        positions=positions,
        first="first" in kind or kind == "RMSNorm behind",
        tied="tied" in read,
        read_bias="biased" in read,
    )
    counted, rank = in_float(model, outputs=1 if read == "a number" else None)
    assert counted == rank


# --- where it is largest or least -----------------------------------------------------------------

GATED = {"units": 2, "gated": True}
SHIFTED = {**MLP, "shift": True}
FELT = {"units": 3, "homogeneous": True, "place": "post"}
EXTREMES = [  # the count, the rank modulo the prime, tokens, and the model
    (81, 81, 3, sized(3, 2, 2, 1, 2, 2, 0, bias="qkvo", block=SHIFTED)),
    (
        77,
        77,
        3,
        sized(3, 2, 2, 1, 1, 1, 0, bias="qkvo", block={**SHIFTED, "place": "post"}, first=True),
    ),
    (
        80,
        80,
        3,
        sized(3, 2, 2, 1, 2, 2, 0, bias="qkvo", block={**MLP, "affine": False}, first=True),
    ),
    (119, 119, 3, sized(3, 3, 2, 1, 5, 1, 0, bias="q", block=MLP)),  # wide heads
    (113, 113, 3, sized(3, 3, 2, 1, 1, 5, 0, bias="v", block=MLP)),
    (150, 150, 3, sized(6, 6, 2, 1, 1, 1, 0, block={"units": 2, "place": "both"})),  # 2 * 3 / 2 < 6
    (190, 190, 3, sized(6, 6, 2, 1, 1, 1, 0, bias="o", block={**MLP, "units": 2, "place": "both"})),
    (22, 22, 3, sized(2, 2, 2, 1, 2, 1, 0, normed="head", layers=1)),
    # Too large: numbers, which the norm leaves only a sign;
    (89, 73, 3, sized(3, 3, 2, 1, 1, 1, 0, normed="head", block=MLP)),
    # normed heads wider than what they read, whose quadratic forms are few;
    (31, 24, 3, sized(2, 2, 2, 1, 3, 1, 0, normed="head", layers=1)),
    (61, 51, 3, sized(3, 3, 2, 1, 4, 1, 0, normed="head", layers=1)),
    (39, 27, 3, sized(2, 2, 3, 1, 2, 1, 0, normed="all", layers=1)),
    (42, 33, 3, sized(2, 2, 3, 1, 2, 1, 2, normed="all", layers=1)),
    # a norm that homogeneous units do not feel, so its weight is that of the sum before;
    (106, 100, 3, sized(4, 4, 1, 1, 2, 2, 0, block=FELT, first=True)),
    # one layer that reads positions without a norm, in 4 directions of 5 but for the asked token;
    (
        87,
        81,
        3,
        sized(5, 5, 1, 1, 1, 1, 0, bias="o", block={**MLP, "place": "out"}, layers=1, **AT_3),
    ),
]
FEW = [  # contexts of two tokens have three offsets, which tell few turned pairs apart
    (165, 165, 2, sized(5, 5, 1, 1, 4, 2, 4, block=GATED)),
    (47, 42, 2, sized(3, 3, 1, 1, 4, 2, 4, block=GATED, layers=1)),
    (91, 86, 2, sized(3, 3, 1, 1, 4, 2, 4, block=GATED)),
    (47, 47, 3, sized(3, 3, 1, 1, 4, 2, 4, block=GATED, layers=1)),
    (178, 178, 2, sized(4, 4, 2, 1, 2, 2, 0, bias="qkvo", block=MLP)),
]


@pytest.mark.parametrize(("counted", "rank", "n", "model"), [*EXTREMES, *FEW])
def test_count_at_extremes(counted, rank, n, model):
    assert count(model) == counted
    assert Network(model, n).rank(counted + 12) == rank


SIGNS = {"place": "both"}
LESS_IN_FLOAT = [
    # LayerNorm of two numbers, RMSNorm of one, and of one value in one direction leave a sign;
    (36, 1, sized(2, 1, 2, 1, 1, 1, 0, bias="qkvo", block=SHIFTED)),
    (
        40,
        1,
        sized(2, 1, 2, 1, 1, 1, 0, bias="qkvo", block={**SHIFTED, "place": "post"}, first=True),
    ),
    (21, 1, sized(1, 1, 2, 1, 2, 2, 0, block={**GATED, "units": 3})),
    (32, 10, sized(4, 4, 1, 1, 1, 1, 0, block=SIGNS)),
    # units of ReLU that are on, or off, for almost all tokens are linear, or nothing;
    (124, 116, sized(4, 4, 1, 1, 2, 2, 0, block={**MLP, "units": 4, "homogeneous": True})),
    # five words show less of all maps; so do twelve of a norm with 5 * 6 / 2 numbers; and two
    # values have forms of three numbers, so the words may turn.
    (127, 74, sized(4, 4, 1, 1, 2, 2, 0, block=MLP, words=5)),
    (119, 117, sized(5, 5, 1, 2, 1, 1, 0, bias="v", words=13, first=True)),
    (119, 113, sized(4, 4, 1, 1, 2, 2, 0, bias="k", block={"place": "out"}, words=16)),
]


@pytest.mark.parametrize(("counted", "rank", "model"), LESS_IN_FLOAT)
def test_count_too_large_in_float(counted, rank, model):
    assert in_float(model) == (counted, rank)


# --- the symmetries of the proof ------------------------------------------------------------------

LAYER = 4, 3, 2, 2, 2, 3, 0
ROOT = 4, 4, 2, 2, 2, 3, 0
TURNED = 4, 4, 2, 2, 4, 3, 4
WRITERS = [f"{i}{x}{b}" for i in "01" for x in ("o", "down") for b in ("", "_b")]
INNER = {"attend": ("q", "k", "v"), "feed": ("up",)}


def behind(name):
    """The maps behind a norm."""
    return {"last": ["read"]}.get(name) or [name[0] + x for x in INNER[name[1:]]]


def norms_weight(w, draw):
    for name in ("0attend", "0feed", "1feed", "last"):
        factor = draw(4).exp()
        w[name] /= factor
        w[f"{name}_b"] /= factor
        for x in behind(name):
            w[x] *= factor[:, None]


def norms_bias(w, draw):
    for name in ("0attend", "1feed", "last"):
        moved = draw(4)
        w[f"{name}_b"] += moved
        for x in behind(name):
            w[f"{x}_b"] -= torch.einsum("d,...de->...e", moved, w[x])


def bias_of_its_own(w, draw):  # W gains (1 / g) a^T, of which the tokens show b^T (1 / g) a
    for name in ("0attend", "1feed", "last"):
        row = 1 / w[name]
        for x in behind(name):
            a = draw(*w[x].shape[:-2], w[x].shape[-1])
            w[x] += torch.einsum("d,...e->...de", row, a)
            w[f"{x}_b"] -= (w[f"{name}_b"] @ row) * a


def keys_bias(w, draw):
    w["1k_b"] += draw(2, 2)


def queries_and_keys(w, draw):
    A = draw(2, 2, 2)
    w["0q"], w["0q_b"] = w["0q"] @ A[:, None], (w["0q_b"][..., None, :] @ A[:, None])[..., 0, :]
    w["0k"] = w["0k"] @ torch.linalg.inv(A).mT
    w["0k_b"] = (w["0k_b"][:, None] @ torch.linalg.inv(A).mT)[:, 0]


def turned_pairs(w, draw):
    for x, sign in (("q", 1), ("k", -1)):  # a complex number, and one over its conjugate
        torch.manual_seed(0)
        z = torch.polar(torch.rand(2, 2, **F64) + 1, torch.rand(2, 2, **F64))
        z = z if sign > 0 else 1 / z.conj()
        for b in ("", "_b"):
            part = torch.view_as_complex(w[f"1{x}{b}"].unflatten(-1, (2, 2)).contiguous())
            shape = (2, *[1] * (part.ndim - 2), 2)
            w[f"1{x}{b}"] = torch.view_as_real(part * z.reshape(shape)).flatten(-2)


def values_and_outputs(w, draw):
    B = draw(2, 3, 3)
    w["0v"], w["0v_b"] = w["0v"] @ B, (w["0v_b"][:, None] @ B)[:, 0]
    w["0o"] = torch.linalg.inv(B)[:, None] @ w["0o"]


def values_bias(w, draw):
    moved = draw(2, 3)
    w["0v_b"] += moved
    w["0o_b"] -= torch.einsum("kv,kgvd->d", moved, w["0o"])


def written_along_ones(w, draw):
    for name in (*WRITERS, "places"):
        w[name] += draw(*w[name].shape[:-1], 1)


def units_of_a_gate(w, draw):
    c = draw(3).exp()
    w["0up"], w["0up_b"], w["0down"] = w["0up"] * c, w["0up_b"] * c, w["0down"] / c[:, None]


def constants_of_one_sum(w, draw):
    moved = draw(4)
    w["1o_b"] += moved
    w["1down_b"] -= moved


def scale_behind(w, draw):
    for norm, out, maps in (("first", "0o", "qkv"), ("0attend", "0down", ["up"])):
        for name in (norm, f"{norm}_b", out, f"{out}_b"):
            w[name] *= 1.7
        for x in maps:
            w[f"0{x}"] /= 1.7


def bias_behind(w, draw):
    moved = draw(4)
    w["0attend_b"] += moved
    w["0up_b"] -= moved @ w["0up"]
    w["0down_b"] -= moved


def scale_of_the_stream(w, draw):
    for name in ("first", "first_b", *WRITERS):
        w[name] *= 1.7


def scale_of_a_branch(w, draw):
    for name in ("0o", "0o_b", "1down", "1down_b"):
        w[name] *= 1.7


def scales_of_normed_heads(w, draw):
    c, a, b = draw(2).exp(), draw(2, 2, 1, 1).exp(), draw(2, 1, 1).exp()
    w["0q"], w["0q_b"], w["0q_norm"] = w["0q"] * a, w["0q_b"] * a[..., 0], w["0q_norm"] * c
    w["0k"], w["0k_b"], w["0k_norm"] = w["0k"] * b, w["0k_b"] * b[..., 0], w["0k_norm"] / c


def scales_of_all_heads(w, draw):
    c = draw(2, 1, 2).exp()
    w["0q"], w["0q_b"], w["0q_norm"] = 1.7 * w["0q"], 1.7 * w["0q_b"], w["0q_norm"] * c
    w["0k_norm"] = w["0k_norm"] / c[:, 0]


def constants_of_offsets(w, draw):
    w["offsets"] += draw(4, 1)


def orthogonal_maps(w, draw):
    R = torch.linalg.qr(draw(4, 4)).Q
    for name in ("words", "places", *WRITERS):
        w[name] = w[name] @ R
    for name in ("0attend", "0feed", "1attend", "1feed", "last"):
        for x in behind(name):
            w[x] = (R.T * (w[name])) @ w[x] / w[name][:, None]


def shift_of_words(w, draw):
    moved = draw(4)
    w["words"] += moved
    w["places"] -= moved


def shift_of_tied_words(w, draw):
    w["words"] += 1 / w["last"]
    w["places"] -= 1 / w["last"]


biased = functools.partial(sized, bias="qkvo")
SYMMETRIES = {
    norms_weight: biased(*LAYER, block=SHIFTED),
    norms_bias: biased(*LAYER, block=SHIFTED, words=5, read_bias=True),
    bias_of_its_own: biased(*LAYER, block=SHIFTED, words=5, read_bias=True),
    keys_bias: biased(*LAYER, block=SHIFTED),
    queries_and_keys: biased(*ROOT, block=MLP),
    turned_pairs: biased(*TURNED, block=MLP),
    values_and_outputs: biased(*ROOT, block=MLP),
    values_bias: biased(*ROOT, block=MLP),
    written_along_ones: biased(*LAYER, block=SHIFTED, **AT_3),
    units_of_a_gate: biased(*ROOT, block={**MLP, "gated": True}),
    constants_of_one_sum: biased(*ROOT, block={**MLP, "parallel": True}),
    scale_behind: biased(*LAYER, block={**SHIFTED, "place": "post"}, first=True),
    bias_behind: biased(*LAYER, block={**SHIFTED, "place": "post"}, first=True),
    scale_of_the_stream: biased(*LAYER, block=SHIFTED, first=True),
    scale_of_a_branch: biased(*ROOT, block={**MLP, "place": "both"}),
    scales_of_normed_heads: biased(*ROOT, normed="head", block=MLP),
    scales_of_all_heads: biased(*ROOT, normed="all", block=MLP),
    constants_of_offsets: biased(*ROOT, block=MLP, offsets=(5, 5)),
    orthogonal_maps: biased(*ROOT, block=MLP, words=5, **AT_3),
    shift_of_words: biased(*ROOT, block=MLP, words=5, **AT_3),
    shift_of_tied_words: biased(*LAYER, block=MLP, words=5, tied=True, **AT_3),
}


@pytest.mark.parametrize("symmetry", SYMMETRIES, ids=lambda f: f.__name__)
def test_outputs_keep_a_symmetry(symmetry):
    model = SYMMETRIES[symmetry]
    network = Network(model, 3, None if model.words else 2, real=True)
    noise = network.contexts(20)
    outputs = network.outputs(network.copies(20), noise)
    before = {name: w.clone() for name, w in network.weights.items()}
    symmetry(network.weights, network.draw)
    assert any((w - before[name]).abs().max() > 0.1 for name, w in network.weights.items())
    torch.testing.assert_close(
        network.outputs(network.copies(20), noise), outputs, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("homogeneous", [True, False])
def test_units_of_relu_trade_a_factor(homogeneous):
    network = Network(biased(*ROOT, block={**MLP, "homogeneous": homogeneous}), 3, 2, real=True)
    noise = network.contexts(20)
    outputs = network.outputs(network.copies(20), noise)
    units_of_a_gate(network.weights, network.draw)
    moved = (network.outputs(network.copies(20), noise) - outputs).abs().max()
    assert (moved < 1e-10) == homogeneous


# --- norms with eps -------------------------------------------------------------------------------

SMALL = (3, 3, 2, 1, 2, 1, 0)
WITH_EPS = {
    "behind": sized(*SMALL, block={**MLP, "place": "post"}, first=True),
    "before and behind a branch": sized(*SMALL, block={**MLP, "place": "both"}),
    "behind a branch": sized(*SMALL, block={**MLP, "place": "out"}),
    "each head": sized(*SMALL, normed="head", block=MLP),
    "all heads": sized(4, 4, 2, 1, 2, 1, 0, normed="all", block=MLP),
    "words": sized(*SMALL, block=MLP, words=12),
    "words and a first norm": sized(*SMALL, block=MLP, words=12, first=True),
}


@pytest.mark.parametrize("kind", WITH_EPS)
def test_scales_matter_with_eps(kind):
    counted, rank = in_float(WITH_EPS[kind], eps=0.3)
    scales = sum(part.scales * part.times for part in WITH_EPS[kind].parts())
    assert counted < rank <= counted + scales
    # With eps such a norm has an inverse, so the blocks absorb its weight, and words may turn.
    assert (rank < counted + scales) == (kind == "words and a first norm")
