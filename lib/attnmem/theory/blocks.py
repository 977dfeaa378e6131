"""How many numbers of a whole model matter: counts of real blocks, from their sizes.

Each count is an upper bound, proved in the book's chapter ``answer/models`` from the symmetries
that the comments name. It is for the outputs at any tokens of contexts of two tokens or more.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ..core.bounds import low_rank_dim
from .capacity import LayerSizes


class Part(NamedTuple):
    """Some numbers of a model; at most how many of them matter if norms have no eps."""

    name: str
    numbers: int
    matter: int = 0
    scales: int = 0  # so many more if they have one
    times: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """An attention layer and an MLP of ``units``, each with a skip connection and its norms.

    ``place`` says where norms stand: ``pre``, before a branch; ``post``, behind each sum, with
    one of the embeddings; ``out``, behind a branch; ``both``, before and behind it. The last two
    are counted with RMSNorms without biases.
    """

    attention: LayerSizes
    units: int = 0
    mlp_bias: bool = False
    gated: bool = False
    homogeneous: bool = False  # ReLU or its square
    norms: int = 2
    affine: bool = True  # norms have weights
    shift: bool = False  # norms have biases
    place: str = "pre"
    parallel: bool = False
    layer_scale: bool = False

    @property
    def branches(self) -> int:
        """The attention, and the MLP if there is one."""
        return 2 if self.units else 1

    @property
    def normed_behind(self) -> bool:
        """Whether a norm stands behind each branch, and is counted as a part of it."""
        return self.place in ("both", "out")

    @property
    def numbers_of_a_norm(self) -> int:
        """Its weights and its biases."""
        numbers = 0
        if self.affine:
            numbers += self.attention.dim
        if self.shift:
            numbers += self.attention.dim
        return numbers

    def parts(self) -> Iterator[Part]:
        """The numbers of each branch, and of the norms."""
        yield self._queries_and_keys()
        yield self._values_and_outputs()
        if self.units:
            yield self._mlp()
        yield self._norms()

    def _behind_biases(self) -> LayerSizes:
        # A map W behind a norm with weight g and bias b acts by diag(g) W, and b adds W^T b: so g
        # and b count nothing, and each map behind b has a bias of its own.
        layer = self.attention
        return dataclasses.replace(layer, bias=layer.bias + "qkv") if self.shift else layer

    def _queries_and_keys(self) -> Part:
        layer, numbers = self._behind_biases(), self.attention.numbers("qk")
        return Part("queries and keys", numbers, layer.logits(), layer.ignored_scales)

    def _values_and_outputs(self) -> Part:
        layer, m = self.attention, self.attention.token_dim
        maps = low_rank_dim(layer.value_dim, m, layer.heads_per_group * m)
        rows = layer.heads * min(layer.value_dim, m)
        if "o" in layer.bias:
            rows += 1
        attention_constants, _ = self._constants()
        matter = layer.groups * maps + attention_constants + self._shown_behind(rows)
        numbers = layer.numbers("vo") + self._weights_behind()
        return Part("values and outputs", numbers, matter, int(self.normed_behind))

    def _mlp(self) -> Part:
        d, m = self.attention.dim, self.attention.token_dim
        inner_maps = 2 if self.gated else 1
        inputs = m + 1 if self.shift or self.mlp_bias else m
        shown_of_a_unit = inner_maps * inputs + m
        # A unit of ReLU or with a gate does not change when its maps trade a factor.
        if self.gated:
            shown_of_a_unit -= 1
        if self.homogeneous:
            shown_of_a_unit -= 1
        rows, numbers = self.units, (inner_maps + 1) * self.units * d
        if self.mlp_bias:
            rows += 1
            numbers += inner_maps * self.units + d
        _, mlp_constants = self._constants()
        matter = self.units * shown_of_a_unit + mlp_constants + self._shown_behind(rows)
        return Part("MLP", numbers + self._weights_behind(), matter, int(self.normed_behind))

    def _norms(self) -> Part:
        alone = self.norms
        if self.normed_behind:
            alone -= self.branches
        # The next norm ignores the scale of a sum, and with it that of the norm before.
        sums = self.branches if self.place == "post" and self.affine else 0
        matter = sums * (self.attention.dim - 1)
        return Part("norms", alone * self.numbers_of_a_norm, matter, sums)

    def _constants(self) -> tuple[int, int]:
        """What the biases show of the attention, and of the MLP."""
        m = self.attention.token_dim
        attention, mlp = self._behind_biases().constants(m), m if self.mlp_bias else 0
        if self.parallel and self.place == "pre":  # both add to one sum
            return min(m, attention + mlp), 0
        if self.place == "post" and self.shift:  # so does the bias of the norm before
            return m, m
        return attention, mlp

    def _weights_behind(self) -> int:
        """Numbers of a layer scale and of a norm behind a branch, which are part of it."""
        weights = 0
        if self.layer_scale:
            weights += self.attention.dim
        if self.normed_behind and self.affine:
            weights += self.attention.dim
        return weights

    def _shown_behind(self, rows: int) -> int:
        """What a norm behind a branch adds, whose outer map has so many rows."""
        # A norm behind a map M shows M diag(g), and M M^T up to a scale, which is linear in g^-2.
        if not self.normed_behind:
            return 0
        forms = 0
        if self.affine or self.layer_scale:
            forms = min(self.attention.dim, rows * (rows + 1) // 2)
        return forms - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Blocks between an embedding and a read-out."""

    name: str
    blocks: tuple[Block, ...]
    words: int = 0  # trained vectors; with patches 0 too, tokens are given
    patch: int = 0  # numbers of a patch, mapped to a token
    patch_bias: bool = True
    rows: int = 0  # learned positions that are stored, with class tokens and registers
    positions: int = 0  # of these, used
    types: int = 0  # token types
    first: bool = False  # a norm of the embeddings
    offsets: tuple[int, int] = (0, 0)  # relative positions of a head: stored, and seen
    tied: bool | None = None  # whether the own read-out is that of the words; None: it has none
    read_bias: bool = False

    @property
    def learned(self) -> int:
        """Trained vectors of words, or rows of the map of patches."""
        return self.words or self.patch

    def parts(self, outputs: int | None = 1) -> Iterator[Part]:
        """All numbers, in the order of the computation; None is the model's own read-out."""
        tied = outputs is None and bool(self.tied)
        biased = outputs is None and self.read_bias
        if self.learned:
            yield self._vectors(tied, biased)
        if self.rows or self.types:
            numbers = (self.rows + self.types) * self.blocks[0].attention.dim
            yield Part("positions", numbers, self._places(tied))
        if self.first:
            yield self._first_norm(tied)
        if self.offsets[0]:
            yield self._relative_positions()
        for block, times in Counter(self.blocks).items():
            for part in block.parts():
                yield part._replace(times=times)
        if tied or self.blocks[0].place != "post":
            yield self._last_norm(tied, biased)
        yield self._read_out(outputs or self.words, tied, biased)

    def _vectors(self, tied: bool, biased: bool) -> Part:
        d, m = self.blocks[0].attention.dim, self.blocks[0].attention.token_dim
        scales = self._scales(tied)
        shown = self.learned * (d if tied else m) - scales
        shown -= self._shifts(tied, biased) + self._turns(tied)
        if self.patch and self.patch_bias and not self.positions:  # which would absorb it
            shown += m
        if self.words:
            return Part("word vectors", self.words * d, shown, scales)
        rows = self.patch + 1 if self.patch_bias else self.patch
        return Part("map of patches", rows * d, shown, scales)

    def _scales(self, tied: bool) -> int:
        """Scales of the embeddings that norms ignore."""
        # That of the stream; or that of each token, if it is normed alone.
        if self.first and not self._places(tied) and not tied:
            return self.words or 1
        return 1

    def _shifts(self, tied: bool, biased: bool) -> int:
        """Dimensions in which words can be shifted, and positions back."""
        if not (self.words and self.positions):
            return 0
        block = self.blocks[0]
        if not tied:
            return block.attention.token_dim
        # A tied read-out does not show a shift by 1 / g, as what LayerNorm leaves is orthogonal
        # to 1.
        if biased or not block.shift:
            return block.attention.dim - block.attention.token_dim
        return 0

    def _turns(self, tied: bool) -> int:
        """Dimensions of the orthogonal maps of the stream."""
        block, m = self.blocks[0], self.blocks[0].attention.token_dim
        if tied or self.first or block.place != "pre":
            return 0
        writers = self.learned + block.attention.heads * min(block.attention.value_dim, m)
        writers += block.units
        return m * (m - 1) // 2 if min(writers, 2 * self.learned) >= m else 0

    def _places(self, tied: bool) -> int:
        """What positions and types show; positions, or words that are not tied, absorb one type."""
        return self.places(tied=tied) * self.blocks[0].attention.token_dim

    def places(self, *, tied: bool) -> int:
        """Vectors of positions and types that show, one type less if others absorb it."""
        absorbed = 1 if self.positions or (self.words and not tied) else 0
        return self.positions + max(0, self.types - absorbed)

    def _first_norm(self, tied: bool) -> Part:
        block, m = self.blocks[0], self.blocks[0].attention.token_dim
        if block.place == "post":
            return Part("first norm", block.numbers_of_a_norm)
        matter, scales = 0, 0
        if block.affine:
            # Orthogonal maps of trained inputs and of the stream leave only its singular values.
            turned = block.place == "pre" and not tied and self.learned
            matter += (m if turned else block.attention.dim) - 1
            scales = 1  # that of the stream
        if block.shift:
            matter += m
        return Part("first norm", block.numbers_of_a_norm, matter, scales)

    def _relative_positions(self) -> Part:
        heads, (stored, occurring) = self.blocks[0].attention.heads, self.offsets
        shown = max(0, occurring - 1)  # a constant of each head is not seen
        return Part("relative positions", heads * stored, heads * shown)

    def _last_norm(self, tied: bool, biased: bool) -> Part:
        block = self.blocks[0]
        matter = 0
        if tied:  # a tied read-out shows it, unless own biases absorb its bias
            matter = block.numbers_of_a_norm
            if block.shift and biased:
                matter -= block.attention.dim
        numbers = 0 if block.place == "post" else block.numbers_of_a_norm
        return Part("last norm", numbers, matter)

    def _read_out(self, outputs: int, tied: bool, biased: bool) -> Part:
        layer, biases = self.blocks[0].attention, outputs if biased else 0
        if tied:
            return Part("read-out", biases, biases)
        constants = outputs if biased or self.blocks[0].shift else 0
        matter = outputs * layer.token_dim + constants
        return Part("read-out", outputs * layer.dim + biases, matter)
