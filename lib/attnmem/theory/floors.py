r"""Real labels that a whole model meets, whatever they are: a floor from its sizes.

At silent weights the output is zero on all data, and near them every label vector is met, if the
derivative has full rank there. Two kinds of silent weights are counted here: units in pairs and
heads in groups that cancel over the blocks, for models whose norms stand before their branches; and
two copies of a model of half the width side by side, for any norms. The chapter ``answer/models``
has the theorems.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..checks import check_integer
from ..core.bounds import group_rank, low_rank_dim, most_ranks
from .blocks import Block, Model
from .capacity import LayerSizes


class Floor(NamedTuple):
    """So many examples, each with all its labels, and what this rests on."""

    examples: int
    evidence: str


def model_floor(model: Model, outputs: int = 1) -> Floor:
    r"""Examples whose real labels some weights of a model meet, whatever the labels are.

    A model whose tokens are given counts for almost all data. With word vectors or patches the
    first block mixes the tokens, and the others are counted.

    Args:
        model: Its sizes. Of units with ReLU no pairs over several blocks are counted.
        outputs: So many labels of an example, ``o``. Up to one for each gap between two blocks,
            consecutive blocks work for one output; beyond, a share of all units and heads does.

    Example:
        >>> heads = {"groups": 12, "heads_per_group": 1, "head_dim": 64, "value_dim": 64}
        >>> layer = LayerSizes(dim=768, token_dim=767, **heads, bias="qkvo")
        >>> block = Block(attention=layer, units=3072, mlp_bias=True, shift=True)
        >>> model_floor(Model(name="the blocks of GPT-2", blocks=(block,) * 12)).examples
        59477736

    Source: theorem ``thm-models-floor`` and corollary ``cor-doubling``.
    """
    check_integer("outputs", outputs)
    doubled = Floor(_doubled(model, outputs), "compared with ranks at small sizes")
    if any(block.place != "pre" for block in model.blocks):
        return doubled
    blocks, evidence = model.blocks, "proved"
    if model.learned:
        blocks, evidence = model.blocks[1:], "compared with ranks at small sizes"
    return max(Floor(_spanning(blocks, outputs), evidence), doubled)


# --- units in pairs and heads in groups, over several blocks -------------------------------------


def _spanning(blocks: Sequence[Block], outputs: int) -> int:
    """Examples that pairs of units and groups of heads meet, which cancel over the blocks."""
    if not blocks:
        return 0
    m = blocks[0].attention.token_dim - outputs  # one direction for each output is idle in the data
    if m < 2:
        return 0
    silent = [_without_relu(block) for block in blocks]
    labels = max(_alone(silent, m, outputs), _heard(silent, m, outputs))
    if len({*silent}) == 1:  # or each output has blocks of its own
        labels = max(labels, _heard(silent[: len(silent) // outputs], m, 1))
    return labels + _read_out(blocks, m)


def _without_relu(block: Block) -> Block:
    return dataclasses.replace(block, units=0) if block.homogeneous else block


def _read_out(blocks: Sequence[Block], m: int) -> int:
    """What the read-out shows, and a constant that some bias writes."""
    written = any(
        (block.mlp_bias and block.units)
        or (block.attention.groups and {*"vo"} & {*block.attention.bias})
        for block in blocks
    )
    return m + int(blocks[0].shift) + int(written)


def _alone(blocks: Sequence[Block], m: int, outputs: int) -> int:
    """Labels of each output if no later layer hears what a layer writes into other dimensions.

    Units and heads are shared out among the outputs.
    """
    block = blocks[0]
    labels = _pairs_of_units(block, sum(block.units for block in blocks) // outputs, m)
    for layer, times in Counter(block.attention for block in blocks).items():
        groups = layer.groups
        if layer.normed == "all":  # pairs stand in one layer
            groups -= groups % 2
        labels += _groups_of_heads(layer, groups * times // outputs, m)
    return labels


def _pairs_of_units(block: Block, units: int, m: int) -> int:
    """What so many units show in pairs with equal inner maps, whose outer ones cancel."""
    inputs = m + 1 if block.mlp_bias else m
    shown = 2 * inputs if block.gated else inputs + 1
    return units // 2 * shown + units % 2


def _groups_of_heads(layer: LayerSizes, groups: int, m: int, fewest: int = 1) -> int:
    """What heads show in at least so many groups of equal attention, whose values cancel."""
    if not groups:
        return 0
    if layer.plain:
        return most_ranks(groups, *_shape(layer, m), fewest=fewest)[0]
    return groups // 2 * _pair_of_groups(layer, m)


def _shape(layer: LayerSizes, m: int) -> tuple[int, int, int]:
    """Keys, queries and rank of the logits, for ``group_rank``."""
    queries = m + 1 if "q" in layer.bias else m
    return m, queries, min(layer.head_dim, m)


def _attends_by_signs(layer: LayerSizes) -> bool:
    """Whether norms leave only signs of queries and keys, which do not move with the weights."""
    return bool(layer.normed) and layer.head_dim == 1


def _pair_of_groups(layer: LayerSizes, m: int) -> int:
    """What two groups of equal keys show, whose values cancel."""
    values = low_rank_dim(layer.value_dim, m, layer.heads_per_group)
    if _attends_by_signs(layer):
        return 0
    # Logits behind norms, or turned in more dimensions than they read, are left out.
    if layer.normed or (layer.turned and layer.head_dim > m):
        return values
    return dataclasses.replace(layer, token_dim=m, groups=1).logits() + values


def _heard(blocks: Sequence[Block], m: int, outputs: int) -> int:
    """Labels of each output if later layers hear what a layer writes into other dimensions.

    In each gap between two blocks a pair of units listens, as it does not cancel there; ``0`` where
    this is not proved. Each output has some consecutive gaps to itself. The blocks at both ends of
    these share their units and heads with the next output.
    """
    gaps = max(0, len(blocks) - 1) // outputs
    if not gaps:
        return 0
    first, layers = blocks[0], [*dict.fromkeys(block.attention for block in blocks)]
    sizes = {(block.units, block.attention.heads, block.attention.value_dim) for block in blocks}
    if len(sizes) > 1:
        return 0
    layer, q, heads = layers[0], first.units, first.attention.heads
    written = 0 if _attends_by_signs(layer) else min(layer.value_dim, m) * m
    plain = layer.plain and len(layers) == 1
    if q < 2:
        return _heard_by_heads(layer, gaps, m) if plain and not q and outputs == 1 else 0
    labels = gaps * (m * q + heads * written)
    if outputs == 1:
        labels += _pairs_of_units(first, q * len(blocks), m)
        if plain and not first.parallel:  # the first heads are heard by those of their groups
            labels += heads * written
        for layer, times in Counter(block.attention for block in blocks).items():
            # Two heads of one layer with equal attention would be heard as one, and heads that are
            # normed together attend alike in whole layers only.
            if times % 2 == 0 or (times > 1 and layer.normed != "all"):
                labels += _groups_of_heads(layer, layer.groups * times, m, fewest=max(1, heads))
        return labels
    labels += _pairs_of_units(first, q * (gaps - 1) + q // 2 * 2, m)
    if len(layers) == 1 and layer.normed != "all":
        groups, ends = layer.groups * (gaps - 1), layer.groups // 2
        fewest = layer.groups if gaps > 1 else ends
        labels += _groups_of_heads(layer, groups + 2 * ends, m, fewest=max(1, fewest))
    return labels


def _heard_by_heads(layer: LayerSizes, gaps: int, m: int) -> int:
    """The same for heads alone, one output: in each gap a group of two heads listens."""
    heads, shape = layer.heads, _shape(layer, m)
    rest = heads * (gaps + 1) - 2 * gaps
    if heads < min(2, gaps):
        return 0
    labels = gaps * (group_rank(2, *shape) + heads * min(layer.value_dim, m) * m)
    if rest:
        labels += most_ranks(rest, *shape, fewest=max(1, heads - 1))[0]
    return labels


# --- copies side by side --------------------------------------------------------------------------


def _doubled(model: Model, outputs: int) -> int:
    """Examples by two equal models for each output, side by side; 0 where sizes do not divide."""
    copies, block = 2 * outputs, model.blocks[0]
    if not model.learned or block.attention.dim % copies:
        return 0
    if len(model.blocks) == 1:  # which reads words before they are mixed
        return 0
    blocks = [_part_of_width(block, copies) for block in model.blocks]
    if block.parallel:  # the first MLP reads words before they are mixed, which may be few
        blocks[0] = dataclasses.replace(blocks[0], units=0)
    d, m = blocks[0].attention.dim, blocks[0].attention.token_dim
    # Turned or normed heads that are wider than their input show less.
    if m < 1 or any(
        (block.attention.turned or block.attention.normed) and block.attention.head_dim > m
        for block in blocks
    ):
        return 0
    # Norms that are held fixed are linear: so any invertible map of the stream is undone, and
    # nothing of the norms is seen.
    labels = sum(_seen(block) for block in blocks) - _unseen_at_the_end(blocks[-1])
    rows = model.learned + 1 if model.patch and model.patch_bias else model.learned
    labels += rows * m - d * d + model.places(tied=False) * m
    # Words can be shifted, and positions back, or behind norms that are held fixed the biases.
    if model.words and (model.positions or block.place == "post"):
        labels -= m
    if block.place == "out":
        labels -= m - 1
    return max(0, labels + m + int(block.shift))


def _part_of_width(block: Block, copies: int) -> Block:
    layer = block.attention
    dim = layer.dim // copies
    part = dataclasses.replace(
        layer,
        dim=dim,
        token_dim=dim - (layer.dim - layer.token_dim),
        groups=layer.groups // copies,
        normed="head" if layer.normed == "head" else "",
    )
    silent = block.homogeneous and block.place != "pre"
    units = 0 if silent else block.units // copies
    return dataclasses.replace(block, attention=part, units=units, place="pre")


def _seen(block: Block) -> int:
    """What an attention layer and an MLP show, if norms are held fixed."""
    return sum(part.matter for part in block.parts()) - block.attention.shown_norm_weights


def _unseen_at_the_end(block: Block) -> int:
    """What one output does not see of the last outer maps: all but one of their columns."""
    layer, m = block.attention, block.attention.token_dim
    unseen = block.units * (m - 1) + (m - 1 if block.mlp_bias else 0)
    if block.parallel or not block.units:
        g = layer.heads_per_group
        shown = low_rank_dim(layer.value_dim, m, g * m) - low_rank_dim(layer.value_dim, m, g)
        unseen += layer.groups * shown + m
    return unseen
