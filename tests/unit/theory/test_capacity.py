"""The counts of one layer in words: what is proved, what is compared; and what is refused."""

import pytest

from attnmem.core import bounds
from attnmem.theory.capacity import LayerSizes, capacity

SIZES = {"heads": 4, "dim": 8, "head_dim": 2}
OTHERS = {  # arguments, and the words for them
    "groups": ({"kv_heads": 2}, "shared keys and values"),
    "rotary": ({"rope": True}, "rotary positions (from 3 tokens on)"),
    "bias": ({"bias": "q"}, "biases"),
    "norm": ({"norm": True}, "a LayerNorm whose shift biases undo"),
    "adapter": ({"adapter": 1, "adapted": "q"}, "adapters"),
}


def test_layer_of_the_book():
    counts = capacity(**SIZES)
    assert counts.one_output == bounds.own_context_ceiling(4, 2, 8)
    assert counts.floor == bounds.own_context_floor(4, 2, 8)
    assert counts.proved.startswith("one output: proved; several: compared with ranks")
    assert counts.floor_proved.startswith("proved for free tokens and queries; where queries are")


@pytest.mark.parametrize("kind", OTHERS)
def test_each_difference_is_named(kind):
    arguments, words = OTHERS[kind]
    assert capacity(**SIZES, **arguments).proved.startswith(
        f"proved from above; with {words}, equality only compared"
    )


def test_differences_are_named_together():
    counts = capacity(**SIZES, kv_heads=2, rope=True, bias="qk", norm=True)
    first_four = ", ".join(words for _, words in list(OTHERS.values())[:4])
    assert f"with {first_four}, equality" in counts.proved


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"norm": True}, "where queries are tokens behind a LayerNorm, only compared"),
        ({"kv_heads": 1}, "not known for a single group of keys and values"),
        ({"kv_heads": 2}, "not proved, groups cancel in pairs; compared"),
        ({"kv_heads": 2, "rope": True}, "groups cancel in pairs (from 3 tokens on); compared"),
        ({"adapter": 1}, "not known with adapters"),
    ],
)
def test_floor_in_words(arguments, words):
    assert words in capacity(**SIZES, **arguments).floor_proved


@pytest.mark.parametrize("adapted", ["qk", "vo", "qkv"])
def test_adapters_of_both_factors_are_bounds(adapted):
    counts = capacity(**SIZES, adapter=1, adapted=adapted)
    assert counts.proved == "upper bounds: adapters of both factors of a product overlap"


def test_report_of_several_layers():
    lines = str(capacity(**SIZES, layers=3)).splitlines()
    floor, deep = bounds.own_context_floor(4, 2, 8), bounds.deep_ceiling([4] * 3, 2, 2, 8)
    assert lines[0] == "4 heads of width 2, 4 of keys and values, d = 8"
    assert any(line.startswith(f"{floor:>13,} floor of these labels") for line in lines)
    assert any(line.startswith(f"{2 * floor:>13,} signs (two classes)") for line in lines)
    assert any(line.startswith(f"{deep:>13,} matter for one output of 3 such") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "edits"), [({}, 4 * 8), ({"norm": True}, 4 * 7 + 1), ({"adapter": 1}, None)]
)
def test_edits(arguments, edits):
    counts = capacity(**SIZES, **arguments)
    assert counts.edits == edits
    line = f"{edits or 0:>13,} edits, each exact"
    assert (line in str(counts)) == (edits is not None)


def test_report_without_a_floor():
    report = str(capacity(**SIZES, adapter=1))
    assert f"{'no':>13} floor of these labels" in report
    assert "signs" not in report
    assert "such layers" not in report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 3, "head_dim": None}, "^heads: got 3"),
        ({"kv_heads": 3}, "^kv_heads: got 3"),
        ({"dim": 2, "norm": True}, "^dim: got 2"),
        ({"rope": 1.5}, "^rope: got 1.5"),
        ({"rope": 0.5}, "^head_dim: got 2"),  # one coordinate, no pair
        ({"rope": True, "dim": 4, "head_dim": 6}, "^head_dim: got 6"),
        ({"bias": "x"}, "^bias: got 'x'"),
        ({"adapted": "kz"}, "^adapted: got 'kz'"),
        ({"adapter": 1, "adapted": ""}, "^adapted: got no map"),
        ({"layers": 2, "bias": "o"}, "^layers: got 2"),
        ({"layers": 2, "norm": True}, "^layers: got 2"),
        ({"layers": 2, "kv_heads": 2}, "^layers: got 2"),
        ({"layers": 2, "adapter": 1}, "^layers: got 2"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        capacity(**SIZES | arguments)


@pytest.mark.parametrize(
    ("normed", "norm_weights", "scales"), [("", 0, 0), ("head", 6, 6), ("all", 18, 2)]
)
def test_norms_of_queries_and_keys(normed, norm_weights, scales):
    """Four heads and two groups of width three: norms of a head are shared by all."""
    layer = LayerSizes(
        dim=8,
        token_dim=8,
        groups=2,
        heads_per_group=2,
        head_dim=3,
        value_dim=3,
        normed=normed,
    )
    assert (layer.norm_weights, layer.ignored_scales) == (norm_weights, scales)
    assert layer.numbers("q") == 8 * 12 + norm_weights
    assert layer.numbers("kv") == 2 * 8 * 6
