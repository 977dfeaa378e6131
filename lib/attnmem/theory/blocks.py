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

    def parts(self) -> Iterator[Part]:
        """The numbers of each branch, and of the norms."""
        layer, d, m = self.attention, self.attention.dim, self.attention.m
        # A map W behind a norm with weight g and bias b acts by diag(g) W, and b adds W^T b: so g
        # and b count nothing, and each map behind b has a bias of its own.
        seen = dataclasses.replace(layer, bias=layer.bias + "qkv" * self.shift)
        constants = [seen.constants(m), m * self.mlp_bias]
        if self.parallel and self.place == "pre":  # both add to one sum
            constants = [min(m, sum(constants)), 0]
        if self.place == "post" and self.shift:  # so does the bias of the norm before
            constants = [m, m]
        behind = int(self.place in ("both", "out"))  # what stands behind a branch is part of it
        scale = d * (self.layer_scale + behind * self.affine)
        yield Part("queries and keys", layer.numbers("qk"), seen.logits(), seen.scales)
        values = layer.groups * low_rank_dim(layer.value_dim, m, layer.each * m) + constants[0]
        values += self._behind(layer.heads * min(layer.value_dim, m) + ("o" in layer.bias))
        yield Part("values and outputs", layer.numbers("vo") + scale, values, behind)
        if self.units:
            inner = 1 + self.gated
            # A unit of ReLU or with a gate does not change when its maps trade a factor.
            each = inner * (m + (self.shift or self.mlp_bias)) + m - self.gated - self.homogeneous
            shown = self.units * each + constants[1] + self._behind(self.units + self.mlp_bias)
            maps = (inner + 1) * self.units * d + self.mlp_bias * (inner * self.units + d)
            yield Part("MLP", maps + scale, shown, behind)
        # The next norm ignores the scale of a sum, and with it that of the norm before.
        branches = (1 + bool(self.units)) * (self.place == "post") * self.affine
        norms = (self.norms - behind * (1 + bool(self.units))) * d * (self.affine + self.shift)
        yield Part("norms", norms, branches * (d - 1), branches)

    def _behind(self, rows: int) -> int:
        # A norm behind a map M shows M diag(g), and M M^T up to a scale, which is linear in g^-2.
        weighed = self.affine or self.layer_scale
        shown = weighed * min(self.attention.dim, rows * (rows + 1) // 2) - 1
        return shown if self.place in ("both", "out") else 0


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

    def parts(self, outputs: int | None = 1) -> Iterator[Part]:
        """All numbers, in the order of the computation; None is the model's own read-out."""
        block = self.blocks[0]
        d, m = block.attention.dim, block.attention.m
        post, norm = block.place == "post", d * (block.affine + block.shift)
        tied, biased = outputs is None and bool(self.tied), self.read_bias and outputs is None
        yield from self._embedding(d, m, tied, biased)
        if self.first:  # its scale is that of the stream
            own = block.affine and not post
            # Orthogonal maps of trained inputs and of the stream leave only its singular values.
            turned = block.place == "pre" and not tied and (self.words or self.patch)
            kept = own * ((m if turned else d) - 1) + m * (block.shift and not post)
            yield Part("first norm", norm, kept, int(own))
        if self.offsets[0]:  # a constant of each head is not seen
            heads, (stored, seen) = block.attention.heads, self.offsets
            yield Part("relative positions", heads * stored, heads * max(0, seen - 1))
        for equal, times in Counter(self.blocks).items():
            for part in equal.parts():
                yield part._replace(times=times)
        if tied or not post:  # a tied read-out shows it, unless own biases absorb its bias
            shown = tied * (norm - d * (block.shift and biased))
            yield Part("last norm", norm * (not post), shown)
        o, bias = outputs or self.words, biased or (block.shift and not tied)
        read = Part("read-out", o * (d + biased), o * (m + bias))
        yield read._replace(numbers=o * biased, matter=o * biased) if tied else read

    def _embedding(self, d: int, m: int, tied: bool, biased: bool) -> Iterator[Part]:
        block, rows = self.blocks[0], self.rows + self.types
        lost, learned = 0, self.words or self.patch
        shared = bool(self.positions or (self.words and not tied))  # they absorb one type
        places = (self.positions + max(0, self.types - shared)) * m
        if learned:
            # Norms ignore the scale of the stream; or that of each token, if it is normed alone.
            scales = (self.words or 1) if self.first and not places and not tied else 1
            # A shift of words and back of positions; a tied read-out does not show one by 1 / g, as
            # what LayerNorm leaves is orthogonal to 1. The orthogonal maps of a stream.
            shifts = (d - m) * (biased or not block.shift) if tied else m
            lost += shifts * bool(self.words and self.positions)
            lost -= m * bool(self.patch and self.patch_bias and not self.positions)
            if not tied:
                layer = block.attention
                writers = learned + layer.heads * min(layer.value_dim, m) + block.units
                turned = block.place == "pre" and not self.first and min(writers, 2 * learned) >= m
                lost += turned * m * (m - 1) // 2
            size = self.words * d or (self.patch + self.patch_bias) * d
            name = "word vectors" if self.words else "map of patches"
            kept = learned * (d if tied else m) - lost - scales
            yield Part(name, size, kept, scales)
        if rows:
            yield Part("positions", rows * d, places)
