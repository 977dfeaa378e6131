"""The floor of a whole model, attacked: exact ranks at silent weights, and real modules."""

import dataclasses
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem.core.bounds import most_ranks
from attnmem.theory.blocks import Block, Model
from attnmem.theory.capacity import LayerSizes
from attnmem.theory.floors import model_floor

from silent import Held, Silent

SEEDS = st.integers(0, 10**9)


def attention(d, centred=False, heads=2, shared=1, e=1, v=1, **fields):
    return LayerSizes(
        dim=d,
        token_dim=d - 1 if centred else d,
        groups=heads,
        heads_per_group=shared,
        head_dim=e,
        value_dim=v,
        **fields,
    )


def alike(blocks, layer, units, **fields):
    block = Block(attention=layer, units=units, **fields)
    return Model(name="", blocks=(block,) * blocks)


def arrangements(model, outputs=1):
    """Who may work for which output, and in how many groups heads cancel then."""
    L = len(model.blocks)
    gaps, blocks = (L - 1) // outputs, L // outputs
    kinds = Counter(block.attention for block in model.blocks)

    def grouped(heads, fewest):
        """For each kind of attention, the best number of groups, of at least so many."""
        return {
            layer: best_groups(heads(layer, times), max(1, fewest(layer)), layer, outputs)
            for layer, times in kinds.items()
        }

    def share(layer, times):
        return layer.groups * times // outputs

    def between(layer, _):
        return layer.groups * (gaps - 1) + layer.groups // 2 * 2

    def of_blocks(layer, _):
        return layer.groups * blocks

    def all_heads(layer):
        return layer.groups

    yield "dealt", grouped(share, fewest=lambda _: 1)
    if outputs == 1 < L:
        yield "dealt", grouped(share, fewest=all_heads)
    if outputs > 1 and gaps:
        at_ends = all_heads if gaps > 1 else lambda layer: layer.groups // 2
        yield "ends", grouped(between, fewest=at_ends)
    if outputs > 1 and blocks > 1:
        yield "blocks", grouped(of_blocks, fewest=all_heads)


def best_groups(heads, fewest, layer, outputs):
    if not heads or not layer.plain:
        return 1
    m = layer.token_dim - outputs
    return most_ranks(heads, m, m + ("q" in layer.bias), min(layer.head_dim, m), fewest=fewest)[1]


def rank(model, n, contexts, outputs=1, **others):
    """The largest one of all arrangements."""
    found = 0
    for teams, groups in arrangements(model, outputs):
        network = Silent(model, n, outputs, teams=teams, groups=groups, **others)
        found = max(found, network.rank(contexts))
        if found == outputs * contexts:
            break
    return found


# --- ranks that others found ----------------------------------------------------------------------

KNOWN = [  # in float64, without outer biases: dimensions, heads, their width, units, blocks, rank
    (3, 0, 1, 4, 2, 32),
    (3, 0, 1, 4, 3, 54),
    (3, 0, 1, 6, 4, 114),
    (4, 0, 1, 6, 3, 102),
    (3, 2, 1, 4, 2, 60),
    (3, 2, 1, 4, 3, 96),
    (4, 2, 2, 6, 3, 202),
    (3, 2, 1, 6, 4, 168),
]
GATED = [(3, 4, 2, 36), (3, 4, 3, 60), (4, 6, 3, 120), (5, 6, 4, 210), (3, 5, 3, 73)]


@pytest.mark.parametrize(("m", "heads", "width", "units", "L", "known"), KNOWN)
def test_known_ranks(m, heads, width, units, L, known):
    layer = attention(m + 1, heads=heads, e=width, v=width)
    model = alike(L, layer, units, mlp_bias=True)
    network = Silent(model, 3, groups={layer: max(1, heads)})
    # The read-out and a constant, and outer biases, which are heard, too.
    assert network.rank(known + L * m + 10) == known + m + 1 + (L - 1) * m
    assert model_floor(model).examples >= known + m + 1  # which chooses the groups


@pytest.mark.parametrize(("m", "units", "L", "known"), GATED)
def test_known_ranks_of_gated_units(m, units, L, known):
    model = alike(L, attention(m + 1, heads=0), units, gated=True)
    assert model_floor(model).examples == known + m
    assert rank(model, 2, known + m + 10) == known + m


# --- held-back sizes ------------------------------------------------------------------------------


def draw(rng, blocks=(1, 2, 2, 3, 3, 4), units=range(8), normed=True):
    """A model with norms before its branches, a context's length, and whether it is causal."""

    def often(share):
        return rng.random() < share

    centred, d = often(0.5), rng.randint(4, 9)
    m = d - 2 if centred else d - 1
    e, v = (rng.choice((1, 1, 2, 3, m, m + 1)) for _ in "ev")
    turned, biased = 0, often(0.5)
    heads, q = rng.randint(0, 3), rng.choice(units)
    if often(0.25):
        e = max(e, 2)
        turned = rng.choice((2, e // 2 * 2))
    layer = attention(
        d,
        centred,
        heads=heads,
        shared=rng.choice((1, 1, 1, 2)),
        e=e,
        v=v,
        turned=turned,
        bias=rng.choice(("qkvo", "qkv", "q", "o")) if biased and heads else "",
        normed=rng.choice(("head", "all")) if normed and often(0.1) else "",
    )
    model = alike(
        rng.choice(blocks),
        layer,
        q,
        mlp_bias=biased and q > 0 and often(0.7),
        gated=often(0.35),
        shift=biased and centred and often(0.5),
        parallel=often(0.25),
    )
    return model, rng.randint(3 if turned else 2, 4), often(0.5)


def drawn(seed, most, outputs=1, **fields):
    """The first model of a seed whose floor is neither zero nor too large."""
    rng = random.Random(seed)
    while True:
        model, n, causal = draw(rng, **fields)
        if 0 < model_floor(model, outputs).examples * outputs <= most:
            return model, n, causal


def exactly(model):
    """Whether the floor counts all: what it leaves out comes from biases, and turned or shared."""
    block = model.blocks[0]
    layer = block.attention
    few = block.units == 1 or not block.units
    return not (few or layer.bias or block.mlp_bias or block.shift or layer.normed) and layer.plain


@settings(max_examples=70)
@given(SEEDS)
def test_floor_is_at_most_the_rank(seed):
    model, n, causal = drawn(seed, most=160)
    floor = model_floor(model).examples
    fields = {"causal": causal, "seed": seed}
    assert rank(model, n, floor, **fields) == floor
    if exactly(model):  # in groups that have one head of a layer at most
        *_, (teams, groups) = arrangements(model)
        network = Silent(model, n, teams=teams, groups=groups, **fields)
        assert network.rank(floor + 10) == floor


@settings(max_examples=40)
@given(SEEDS, st.integers(2, 3))
def test_floor_of_several_outputs(seed, outputs):
    fields = {"blocks": range(1, 8), "normed": False}
    model, n, causal = drawn(seed, 160, outputs, **fields)
    floor = model_floor(model, outputs).examples
    assert rank(model, n, floor, outputs, causal=causal, seed=seed) == outputs * floor


@settings(max_examples=15)
@given(SEEDS, st.integers(12, 16))
def test_floor_of_sequences_of_words_that_were_mixed(seed, words):
    model, _, causal = drawn(seed, most=160)
    floor = model_floor(model).examples
    assert rank(model, 3, floor, causal=causal, words=words, seed=seed) == floor


@settings(max_examples=20)
@given(SEEDS)
def test_floor_of_heads_alone(seed):
    model, n, causal = drawn(seed, 160, units=[0], blocks=(2, 2, 3, 4))
    floor = model_floor(model).examples
    assert rank(model, n, floor, causal=causal, seed=seed) == floor


@settings(max_examples=20)
@given(SEEDS)
def test_floor_of_blocks_with_different_heads(seed):
    rng = random.Random(seed)
    model, _, causal = draw(rng)
    block = model.blocks[0]
    kinds = [dataclasses.replace(block.attention, head_dim=2, turned=R) for R in (0, 2)]
    blocks = [dataclasses.replace(block, attention=rng.choice(kinds)) for _ in range(4)]
    model = dataclasses.replace(model, blocks=tuple(blocks))
    floor = model_floor(model).examples
    if 0 < floor <= 200:
        assert rank(model, 3, floor, causal=causal, seed=seed) == floor


# --- where it is likeliest to break ---------------------------------------------------------------

PLAIN = {"heads": 2, "e": 2, "v": 2}
TRAPS = {
    "a circle, behind a LayerNorm of four": alike(3, attention(4, centred=True, **PLAIN), 4),
    "one block": alike(1, attention(5, **PLAIN), 4, mlp_bias=True),
    "odd numbers of units and heads": alike(3, attention(5, heads=3), 5, gated=True),
    "fewer units than dimensions": alike(4, attention(9, heads=0), 2, parallel=True),
    "a unit in each block": alike(4, attention(5, heads=1), 1),
    "heads that are wider than the tokens": alike(2, attention(4, heads=3, e=7, v=7), 4),
    "ReLU": alike(3, attention(5, **PLAIN), 6, homogeneous=True, mlp_bias=True),
    "a query bias alone": alike(2, attention(5, **PLAIN, bias="q"), 3),
    "one group of keys": alike(3, attention(5, heads=1, shared=3, v=3), 4),
    "fewer groups than heads of a layer would be best": alike(
        2, attention(9, heads=3, e=1, v=8), 2
    ),
    "heads of one kind in one block alone": Model(
        name="",
        blocks=tuple(Block(attention=attention(6, e=2, turned=R), units=4) for R in (0, 2, 2)),
    ),
    "all turned": alike(2, attention(5, heads=2, e=4, turned=4), 4),
}


@pytest.mark.hostile("mahdavi-finding-models-floor")
@pytest.mark.parametrize("trap", TRAPS)
def test_floor_in_traps(trap):
    model = TRAPS[trap]
    floor = model_floor(model).examples
    units = 0 if model.blocks[0].homogeneous else model.blocks[0].units
    blocks = [dataclasses.replace(block, units=units) for block in model.blocks]
    model = dataclasses.replace(model, blocks=tuple(blocks))
    for n, causal in ((3, False), (3, True), (2, False)):
        if n == 3 or not any(block.attention.turned for block in model.blocks):
            assert rank(model, n, floor, causal=causal) == floor > 0


def test_turned_heads_want_three_tokens():
    """Two positions tell few turned pairs apart."""
    model = alike(1, attention(7, heads=2, e=6, turned=6, bias="qkvo"), 0)
    floor = model_floor(model).examples
    assert rank(model, 2, floor) < floor == rank(model, 3, floor)


# --- two equal models side by side ----------------------------------------------------------------


def draw_doubled(rng):
    """A model with trained words whose norms may stand anywhere, and one of half its width."""

    def often(share):
        return rng.random() < share

    place = rng.choice(("pre", "post", "both", "out"))
    centred = place in ("pre", "post") and often(0.3)
    normed = rng.choice(("", "", "head", "all"))
    d = rng.randint(3, 4)
    m = d - 1 if centred else d
    e = rng.randint(2, m) if normed else rng.randint(1, m)
    positions = rng.choice((0, 3))
    blocks, heads, units = rng.randint(1, 3), rng.randint(1, 2), rng.choice((0, 3, 4))
    sizes = {
        "centred": centred,
        "shared": rng.choice((1, 1, 2)),
        "e": e,
        "v": rng.randint(2, 3),
        "turned": rng.choice([R for R in (0, 0, 2) if min(e, m) >= R]),
        "bias": rng.choice(("", "", "qkv", "qkvo", "o")),
        "normed": normed,
    }
    block = {
        "place": place,
        "mlp_bias": units > 0 and often(0.5),
        "gated": often(0.4),
        "parallel": place == "pre" and units > 0 and often(0.25),
    }
    inputs = {
        "words": rng.randint(3 * d + 3, 24),
        "rows": positions,
        "positions": positions,
        "first": place == "post" or often(0.3),
    }

    def of(copies):
        layer = attention(copies * d, **sizes, heads=copies * heads)
        if centred:  # each half is without its mean
            layer = dataclasses.replace(layer, token_dim=copies * d - 1)
        model = alike(blocks, layer, copies * units, **block)
        return dataclasses.replace(model, **inputs)

    return of(2), of(1)


def rank_of_one(half, floor, **others):
    """The largest at four draws, as of some the least singular values are lost in rounding."""
    networks = (Held(half, 3, real=True, seed=seed, **others) for seed in range(4))
    return max(network.rank(2 * floor + 20)[0] for network in networks)


@settings(max_examples=25)
@given(SEEDS)
def test_floor_of_two_equal_models(seed):
    rng = random.Random(seed)
    floor = 0
    while not 0 < floor <= 150:
        model, half = draw_doubled(rng)
        floor = model_floor(model).examples
    assert rank_of_one(half, floor, causal=rng.random() < 0.5) >= floor


@pytest.mark.parametrize("positions", [0, 3])
@pytest.mark.parametrize("place", ["pre", "post", "both", "out"])
def test_floor_of_two_equal_models_is_their_rank(place, positions):
    def of(copies):
        layer = attention(3 * copies, heads=2 * copies, e=2, bias="qkvo")
        model = alike(2, layer, 3 * copies, mlp_bias=True, place=place)
        inputs = {"words": 16, "rows": positions, "positions": positions, "first": place == "post"}
        return dataclasses.replace(model, **inputs)

    floor = model_floor(of(2)).examples
    assert rank_of_one(of(1), floor) == floor


# --- modules of transformers ----------------------------------------------------------------------


def test_floor_is_at_most_the_rank_of_real_modules():
    """Of ten families, at sizes that are drawn."""
    pytest.importorskip("transformers")
    script = Path(__file__).parents[1] / "real_floors.py"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", script, "10"], capture_output=True, text=True, check=True
    )
    results = json.loads(run.stdout)
    assert len({result["kind"] for result in results}) == len(results) == 10
    for result in results:
        assert result["floor"] > 0, result
        assert result["least"] > 1e-9, result  # a million times the rounding
