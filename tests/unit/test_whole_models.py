"""The rank of random whole models in float64 is at most their count, which is proved in the book.

Each model is written down here again, from its parts; sizes are the extremes at which a term of the
count would be too small: narrow heads and wide ones, few units, no biases or all, few words.
"""

import random

import pytest
import torch
from torch.func import jacfwd

from attnmem.yours.blocks import Block, Model
from attnmem.yours.capacity import _Layer

ACTS = {"gelu": torch.nn.functional.gelu, "relu": torch.relu}


def draw(rng):
    """A model at random, among those of the theorem, and whether attention is causal."""
    place = rng.choice(("pre", "pre", "pre", "post", "out", "both"))
    layer_norm = place in ("pre", "post") and rng.random() < 0.5
    shift = layer_norm and rng.random() < 0.6
    d, groups, each = rng.randint(3, 5), rng.randint(1, 2), rng.randint(1, 2)
    head, value = rng.randint(1, 4), rng.randint(1, 5)
    bias = "".join(x for x in "qkvo" if rng.random() < 0.4)
    turned = 2 * rng.randint(0, head // 2) * (rng.random() < 0.5)
    normed = rng.choice(("", "", "head", "all"))
    layer = _Layer(d, d - layer_norm, groups, each, head, value, turned, bias, normed)
    units, gated = rng.randint(0, 3), rng.random() < 0.3
    parallel = place == "pre" and units > 0 and rng.random() < 0.2
    same = rng.random() < 0.2 and not gated
    block = Block(
        attention=layer, units=units, mlp_bias=units > 0 and rng.random() < 0.5, gated=gated,
        homogeneous=same, norms=(1 + (units > 0)) * (1 + (place == "both")),
        affine=shift or rng.random() < 0.8, shift=shift,
        place=place, parallel=parallel, layer_scale=rng.random() < 0.1,
    )  # fmt: skip
    words, patch = rng.choice(((0, 0), (rng.randint(2, 7), 0), (0, rng.randint(2, 6))))
    positions = 3 * (patch > 0 or rng.random() < 0.5)
    types = rng.randint(0, 2) * (positions > 0)
    tied = words > 0 and place != "post" and (block.affine or layer_norm) and rng.random() < 0.5
    return Model(
        name="", blocks=(block,) * rng.randint(1, 2), words=words, patch=patch,
        patch_bias=rng.random() < 0.5, rows=positions, positions=positions, types=types,
        first=place == "post" or rng.random() < 0.3, tied=tied or None,
        offsets=(5, 5) if rng.random() < 0.2 else (0, 0), read_bias=tied and rng.random() < 0.5,
    ), rng.random() < 0.5  # fmt: skip


class Net:
    """A model of three tokens: weights are made where they are first read."""

    def __init__(self, model, causal, generator):
        self.model, self.causal, self.g, self.W = model, causal, generator, {}

    def __call__(self, W, data, outputs):
        self.W, model, name = W, self.model, iter(range(1000))
        block, d = model.blocks[0], model.blocks[0].attention.dim
        x = data
        if model.words:
            x = self.w("words", model.words, d)[data]
        if model.patch:
            x = data @ self.w("patch", model.patch, d)
            x = x + self.w("patch bias", d) if model.patch_bias else x
        if model.rows:
            x = x + self.w("places", 3, d)
        if model.types:
            x = x + self.w("types", model.types, d)[torch.arange(3) % model.types]
        x = self.norm(x, "first") if model.first else x
        for block in model.blocks:
            i = next(name)
            before = block.place in ("pre", "both")
            branches = [(self.attend, f"attention {i}"), (self.mlp, f"mlp {i}")]
            start = x
            for branch, own in branches[: 1 + (block.units > 0)]:
                z = start if block.parallel else x
                y = branch(block, self.norm(z, f"{own} norm") if before else z, own)
                y = y * self.w(f"{own} scale", d) if block.layer_scale else y
                if block.place in ("out", "both"):
                    y = self.norm(y, f"{own} behind")
                x = self.norm(x + y, f"{own} sum") if block.place == "post" else x + y
        x = x if block.place == "post" else self.norm(x, "last")
        if outputs is None:
            y = x @ self.w("words", model.words, d).mT
            return y + self.w("read bias", model.words) if model.read_bias else y
        return x @ self.w("read", d, outputs)

    def w(self, name, *shape):
        if name not in self.W:
            self.W[name] = torch.randn(shape, generator=self.g, dtype=torch.float64)
        return self.W[name]

    def norm(self, x, name):
        block, d = self.model.blocks[0], x.shape[-1]
        if block.attention.m < d:
            x = x - x.mean(-1, keepdim=True)
        x = x / x.square().mean(-1, keepdim=True).sqrt()
        x = x * self.w(f"{name} g", d) if block.affine else x
        return x + self.w(f"{name} b", d) if block.shift else x

    def map(self, x, name, width, biased):
        y = x @ self.w(name, x.shape[-1], width)
        return y + self.w(f"{name} b", width) if biased else y

    def attend(self, block, z, own):
        file, heads = block.attention, {}
        for x, several in (("q", file.heads), ("k", file.groups), ("v", file.groups)):
            wide = file.value_dim if x == "v" else file.head_dim
            y = self.map(z, own + x, several * wide, x in file.bias)
            if file.normed and x != "v":
                y = y if file.normed == "all" else y.unflatten(-1, (several, wide))
                y = y / y.square().mean(-1, keepdim=True).sqrt()
                y = (y * self.w(f"{own} {x} g", y.shape[-1])).reshape(*z.shape[:-1], -1)
            y = y.unflatten(-1, (several, wide)).transpose(-2, -3)
            y = self.turn(y, file.turned) if x != "v" else y
            heads[x] = y if x == "q" else y.repeat_interleave(file.each, -3)
        logits = heads["q"] @ heads["k"].mT
        if self.model.offsets[0]:
            i = torch.arange(3)
            logits = logits + self.w("offsets", file.heads, 5)[:, i[:, None] - i + 2]
        if self.causal:
            logits = logits + torch.full((3, 3), -torch.inf).triu(1)
        y = (logits.softmax(-1) @ heads["v"]).transpose(-2, -3).flatten(-2)
        return self.map(y, f"{own} o", file.dim, "o" in file.bias)

    @staticmethod
    def turn(y, turned):
        angle = torch.outer(torch.arange(3.0), 0.7 + torch.arange(turned // 2)).double()
        a, b = y[..., : turned // 2], y[..., turned // 2 : turned]
        a, b = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return torch.cat([a, b, y[..., turned:]], -1)

    def mlp(self, block, z, own):
        act = ACTS["relu" if block.homogeneous else "gelu"]
        y = act(self.map(z, f"{own} 1", block.units, block.mlp_bias))
        if block.gated:
            y = y * self.map(z, f"{own} up", block.units, block.mlp_bias)
        return self.map(y, f"{own} 2", z.shape[-1], block.mlp_bias)


def found(model, causal, outputs, seed):
    """The numbers that were made, the count of them and of those that matter, and the rank."""
    g = torch.Generator().manual_seed(seed)
    parts = [*model.parts(outputs)]
    count = sum(part.matter * part.times for part in parts)
    numbers = sum(part.numbers * part.times for part in parts)
    o, d = outputs or model.words, model.blocks[0].attention.dim
    T = max(20, 2 * count // (3 * o) + 10)
    if model.words:
        data = torch.randint(model.words, (T, 3), generator=g)
    else:
        data = torch.randn(T, 3, model.patch or d, generator=g, dtype=torch.float64)
    net = Net(model, causal, g)
    net({}, data, outputs)
    J = jacfwd(lambda W: net(W, data, outputs))(dict(net.W))
    J = torch.cat([part.reshape(T * 3 * o, -1) for part in J.values()], 1)
    J = J[J.isfinite().all(1)]  # no norm behind ReLUs that are all off
    s = torch.linalg.svdvals(J)
    return J.shape[1], numbers, count, int((s > 1e-10 * s[0]).sum())


@pytest.mark.hostile("mahdavi-finding-models")
@pytest.mark.parametrize("seed", range(60))
def test_no_rank_is_above_the_count(seed):
    model, causal = draw(random.Random(seed))
    made, numbers, count, rank = found(model, causal, None if model.tied else 2, seed)
    assert made == numbers
    assert rank <= count
