"""Floors of whole models, against numbers by hand and against what must be true of any."""

import dataclasses

import pytest

from attnmem.core import bounds
from attnmem.theory.blocks import Block, Model
from attnmem.theory.capacity import LayerSizes
from attnmem.theory.floors import model_floor


def layer(dim=9, heads=2, shared=1, head_dim=2, **fields):
    sizes = {"groups": heads // shared, "heads_per_group": shared, "head_dim": head_dim}
    return LayerSizes(dim=dim, token_dim=dim, value_dim=head_dim, **sizes, **fields)


def model(blocks=3, attention=None, units=4, **fields):
    block = Block(attention=attention or layer(), units=units, **fields)
    return Model(name="", blocks=(block,) * blocks)


def labels(*args, **fields):
    return model_floor(model(*args, **fields)).examples


NO_HEADS = layer(heads=0)
M = 8  # of these sizes: one dimension is idle


def test_floor_of_units_by_hand():
    pairs, heard = 3 * 4 // 2 * (M + 1), 2 * 4 * M
    assert labels(attention=NO_HEADS) == pairs + heard + M
    assert labels(attention=NO_HEADS, mlp_bias=True) == pairs + 6 + heard + M + 1
    assert labels(attention=NO_HEADS, gated=True) == 6 * 2 * M + heard + M
    assert labels(attention=NO_HEADS, units=5) == 7 * (M + 1) + 1 + 2 * 5 * M + M


def test_floor_of_one_block_hears_nothing():
    alone = bounds.own_context_floor(2, 2, M)
    assert labels(1) == alone + 2 * (M + 1) + M


def test_floor_of_heads_with_units_by_hand():
    own = 2 * bounds.group_rank(3, M, M, 2)  # a head of each block in each group
    heard = 2 * 4 * M + 6 * 2 * M
    assert labels() == own + 6 * (M + 1) + heard + M
    assert labels(parallel=True) == labels() - 2 * 2 * M


def test_floor_of_heads_alone_by_hand():
    own = 3 * bounds.group_rank(2, M, M, 2)  # two of them listen
    assert labels(units=0) == own + 2 * 2 * 2 * M + M
    assert labels(homogeneous=True) == labels(units=0)


def test_floor_of_shared_keys_by_hand():
    shared = layer(heads=4, shared=2, turned=2)
    pair = 2 * (M + 2 * M - 1) + bounds.low_rank_dim(2, M, 2)
    heard = 2 * 4 * M + 2 * 4 * 2 * M
    assert labels(attention=shared) == 3 * pair + 6 * (M + 1) + heard + M


def test_words_take_a_block_to_mix():
    with_words = dataclasses.replace(model(4), words=50)
    assert model_floor(with_words).examples == labels(3)
    assert model_floor(model(4)).evidence == "proved"
    assert "compared" in model_floor(with_words).evidence


def test_several_outputs_share_the_blocks():
    whole = labels(9)
    for outputs in (2, 3, 4):
        found = model_floor(model(9), outputs).examples * outputs
        assert whole / 2 < found < whole


@pytest.mark.parametrize("dim", [1, 2])
def test_too_few_dimensions_have_no_floor(dim):
    assert labels(attention=layer(dim=dim)) == 0


def test_outputs_below_one_are_refused():
    with pytest.raises(ValueError, match=r"^outputs: got 0"):
        model_floor(model(), 0)


def test_doubling_is_what_half_a_model_shows():
    """By hand: RMSNorms behind sums, two blocks of two heads and four units, twenty words."""
    attention = layer(dim=8)
    block = Block(attention=attention, units=4, place="post")
    d = 4  # half the width, one head, two units
    logits = values = bounds.low_rank_dim(2, d, d)
    units = 2 * (d + d) + 2 * (d + 1)  # the last outer maps show one column
    words = 20 * d - d * d - d  # up to maps of the stream, and to shifts
    by_hand = 2 * (logits + values) + units + words + d
    post = Model(name="", blocks=(block,) * 2, words=20)
    assert model_floor(post).examples == by_hand
    assert model_floor(dataclasses.replace(post, words=0)).examples == 0  # tokens are not doubled


def test_blocks_of_two_kinds_count_no_less_than_heads_apart():
    turned, still = layer(turned=2), layer()
    blocks = [Block(attention=a, units=4) for a in (turned, turned, still)]
    mixed = model_floor(Model(name="", blocks=tuple(blocks))).examples
    assert mixed < labels()
    assert mixed > labels(attention=NO_HEADS)
