"""How many numbers of a whole model matter: counts of real blocks, from their sizes.

Each count is an upper bound, proved in the book's chapter ``answer/models`` from the symmetries
that the comments name. It is for the outputs at any tokens of contexts of two tokens or more.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ..core.bounds import _low_rank
from .capacity import _Layer


class Part(NamedTuple):
    """Some numbers of a model, and at most how many of them matter."""

    name: str
    numbers: int
    matter: int = 0
    scales: int = 0  # matter besides if the eps of the norms is not neglected
    times: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """An attention layer and an MLP of ``units``, each with a skip connection and its norms.

    ``place`` says where norms stand: ``pre``, before a branch; ``post``, behind each sum; ``out``,
    behind a branch; ``both``, before and behind it; the last two without biases of norms.
    """

    attention: _Layer
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
        file, d, m = self.attention, self.attention.dim, self.attention.m
        # A map behind a norm of weight g and bias b reads the normed token by diag(g) W, and its
        # bias by W^T b: so g and b count nothing, and each map behind b has a bias of its own.
        free = self.shift
        seen = dataclasses.replace(file, bias=file.bias + "qkv" * free)
        constants = [seen.constants(m), m * self.mlp_bias]
        if self.parallel:  # both add to one sum
            constants = [min(m, sum(constants)), 0]
        if self.place == "post" and free:  # the norm before shifts the sum as well
            constants = [m, m]
        # A norm behind a branch shows its map M times diag(g), and M M^T up to a scale.
        rows = [file.heads * min(file.value_dim, m) + bool(constants[0])]
        rows += [self.units + self.mlp_bias]
        behind = [min(d, k * (k + 1) // 2) - 1 for k in rows]
        behind = behind if self.place in ("both", "out") else [0, 0]
        kept = [_low_rank(file.value_dim, m, file.each * m) * file.groups, 0]
        # A unit of a gated MLP or of ReLU keeps its outputs when its maps trade a scale.
        inner = (1 + self.gated) * (m + (free or self.mlp_bias))
        kept[1] = self.units * (inner + m - (self.gated or self.homogeneous))
        own = d * self.layer_scale, (1 + self.gated) * self.units + d
        scales = int(self.place in ("both", "out"))
        numbers = [file.numbers("vo") + own[0], own[1] * self.mlp_bias + own[0]]
        numbers[1] += (2 + self.gated) * d * self.units
        at_most = [x + y + z for x, y, z in zip(kept, constants, behind, strict=True)]
        yield Part("queries and keys", file.numbers("qk"), seen.logits(), seen.scales)
        yield Part("values and outputs", numbers[0], at_most[0], scales)
        if self.units:
            yield Part("MLP", numbers[1], at_most[1], scales)
        # The next norm ignores the scale of a sum, with it that of the norm before.
        branches = (1 + bool(self.units)) * (self.place == "post") * self.affine
        norm = d * (self.affine + self.shift)
        yield Part("norms", self.norms * norm, branches * (d - 1), branches)


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
        tied = outputs is None and bool(self.tied)
        yield from self._embedding(d, m, tied)
        if self.first:  # its scale is that of the stream
            own = block.affine and not post
            yield Part("first norm", norm, own * (d - 1) + m * (block.shift and not post), int(own))
        if self.offsets[0]:  # a constant of each head is not seen
            heads, (stored, seen) = block.attention.heads, self.offsets
            yield Part("relative positions", heads * stored, heads * (seen - 1))
        for equal, times in Counter(self.blocks).items():
            for part in equal.parts():
                yield part._replace(times=times)
        if not post:
            yield Part("last norm", norm, norm * tied)
        o, biased = outputs or self.words, self.read_bias and outputs is None
        bias = biased or (block.shift and not tied)
        read = Part("read-out", o * (d + biased), o * (m + bias))
        yield read._replace(numbers=o * biased, matter=o * biased) if tied else read

    def _embedding(self, d: int, m: int, tied: bool) -> Iterator[Part]:
        block, rows = self.blocks[0], self.rows + self.types
        lost, learned = 0, self.words or self.patch
        places = self.positions * m + max(0, self.types - 1) * m
        if learned:
            # Norms ignore the scale of the stream; or that of each token, if it is normed alone.
            scales = self.words if self.first and not places and not tied else 1
            if not tied:  # a shift of words and back of positions; the orthogonal maps of a stream
                lost += m * bool(self.words and rows)
                turned = block.place == "pre" and not self.first and learned >= m
                lost += turned * m * (m - 1) // 2
            size = self.words * d or (self.patch + self.patch_bias) * d
            name = "word vectors" if self.words else "map of patches"
            kept = learned * (d if tied else m) - lost - scales
            yield Part(name, size, kept, scales)
        if rows:
            yield Part("positions", rows * d, places)
