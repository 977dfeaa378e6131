"""Ranks of a model's derivative, from the model itself: an oracle for counts.

Modulo a prime ranks are exact. The exponentials of logits, and values and slopes of activations,
are then random numbers, since those of different logits are algebraically independent. The scale of
a norm is a true square root: numbers are drawn anew, token by token, until it exists. In float64
all functions are the true ones.
"""

import math

import torch
from torch import einsum
from torch.nn.functional import one_hot, relu, silu

from oracles import rank_modulo

PRIME = 2**23 - 21  # 3 modulo 4: a root is a power; a sum of 128 products is exact in float64
F64 = {"dtype": torch.float64}


class Reduced(torch.autograd.Function):
    """Numbers modulo the prime, and their derivatives too."""

    @staticmethod
    def forward(ctx, x):
        return torch.remainder(x, PRIME)

    @staticmethod
    def backward(ctx, slope):
        return torch.remainder(slope, PRIME)


def power(x, exponent):
    """By squaring, digit by digit of the exponent."""
    result = torch.ones_like(x)
    for digit in f"{exponent:b}":
        result = torch.remainder(result * result, PRIME)
        if digit == "1":
            result = torch.remainder(result * x, PRIME)
    return result


class Network:
    """A network of a model's sizes, on contexts of ``n`` tokens; None is its own read-out.

    ``weights`` maps names to tensors. Those of block 1 begin with ``1``, biases end with ``_b``.
    """

    def __init__(self, model, n, outputs=1, *, causal=False, seed=0, real=False, eps=0.0):
        self.model, self.n, self.causal, self.real, self.eps = model, n, causal, real, eps
        self.generator = torch.Generator().manual_seed(seed)
        self.centred = (
            model.blocks[0].attention.token_dim < model.blocks[0].attention.dim
        )  # LayerNorm
        self.tied = outputs is None and model.tied
        self.weights = {name: self.draw(*shape) for name, shape in self.shapes(outputs)}
        if real:  # of a size that keeps the singular values apart
            for name, w in self.weights.items():
                if w.ndim > 1 and name != "words":
                    w *= 1.3 / w.shape[-2] ** 0.5
        pairs = max(b.attention.turned for b in model.blocks) // 2
        self.angles = self.turns(pairs)

    @property
    def numbers(self):
        return sum(w.numel() for w in self.weights.values())

    def draw(self, *shape):
        if self.real:
            return torch.randn(shape, generator=self.generator, **F64)
        return torch.randint(1, PRIME, shape, generator=self.generator).double()

    def reduce(self, x):
        return x if self.real else Reduced.apply(x)

    def ein(self, spec, *factors):
        return self.reduce(einsum(spec, *factors))

    def shapes(self, outputs_or_none):
        """Names and shapes of all weights."""
        model, n = self.model, self.n
        d = model.blocks[0].attention.dim

        def norm(name, block=model.blocks[0]):
            if block.affine:
                yield name, (d,)
            if block.shift:
                yield f"{name}_b", (d,)

        if model.words or model.patch:
            yield "words", (model.words or model.patch, d)
        if model.patch and model.patch_bias:
            yield "words_b", (d,)
        if model.positions:
            yield "places", (n, d)
        if model.types:
            yield "types", (model.types, d)
        if model.first:
            yield from norm("first")
        if model.offsets[0]:
            yield "offsets", (model.blocks[0].attention.heads, 2 * n - 1)
        for i, block in enumerate(model.blocks):
            yield from self.shapes_of_attention(f"{i}", block.attention)
            if block.place != "out":
                yield from norm(f"{i}attend")
            if block.place in ("both", "out"):
                yield from norm(f"{i}attended")
            if not block.units:
                continue
            for x, shape in self.shapes_of_units(block).items():
                yield f"{i}{x}", shape
                if block.mlp_bias:
                    yield f"{i}{x}_b", shape[1:]
            if block.place != "out":
                yield from norm(f"{i}feed")
            if block.place in ("both", "out"):
                yield from norm(f"{i}feeded")
        if model.blocks[0].place != "post":
            yield from norm("last")
        outputs = outputs_or_none or model.words
        if not self.tied:
            yield "read", (d, outputs)
        if model.read_bias and outputs_or_none is None:
            yield "read_b", (outputs,)

    @staticmethod
    def shapes_of_attention(block, file):
        G, g, d = file.groups, file.heads_per_group, file.dim
        e, v = file.head_dim, file.value_dim
        maps = {"q": (G, g, d, e), "k": (G, d, e), "v": (G, d, v), "o": (G, g, v, d)}
        biases = {"q": (G, g, e), "k": (G, e), "v": (G, v), "o": (d,)}
        for x, shape in maps.items():
            yield f"{block}{x}", shape
            if x in file.bias:
                yield f"{block}{x}_b", biases[x]
        if file.normed == "all":
            yield f"{block}q_norm", biases["q"]
            yield f"{block}k_norm", biases["k"]
        elif file.normed:
            yield f"{block}q_norm", (1, 1, e)
            yield f"{block}k_norm", (1, e)

    @staticmethod
    def shapes_of_units(block):
        d, units = block.attention.dim, block.units
        shapes = {"up": (d, units), "down": (units, d)}
        return {"gate": (d, units), **shapes} if block.gated else shapes

    def turns(self, pairs):
        """Cosines and sines of each position's angles."""
        if self.real:
            angles = torch.arange(self.n)[:, None] * (0.3 + self.draw(pairs).abs())
            return angles.cos(), angles.sin()
        t = self.draw(pairs)
        scale = power(self.reduce(1 + t * t), PRIME - 2)
        a, b = self.reduce((1 - t * t) * scale), self.reduce(2 * self.reduce(t * scale))
        rows = [(torch.ones_like(t), torch.zeros_like(t))]
        for _ in range(1, self.n):
            c, s = rows[-1]
            rows.append((self.reduce(c * a - s * b), self.reduce(s * a + c * b)))
        return tuple(map(torch.stack, zip(*rows, strict=True)))

    def sizes(self):
        """Numbers for each token: its data, then what is free in each branch."""
        model, d = self.model, self.model.blocks[0].attention.dim
        yield "data", (model.words or model.patch or d) + bool(model.types)
        for block in model.blocks:
            yield "attention", block.attention.heads * self.n
            if block.units:
                yield "MLP", 2 * block.units

    # --- the network: axes are context, token, and those of a vector ------------------------------

    def outputs(self, weights, noise):
        """Of all tokens; each context has weights of its own."""
        model, x, w = self.model, noise[0], weights
        self.of, self.noise, self.stage, self.unmet = weights, noise, 0, []
        if model.types:
            kinds, x = (x[..., -1] * 1009).floor().long() % model.types, x[..., :-1]
        if model.words:  # a random one, in float64
            x = one_hot(x.argmax(-1), model.words).double()
        if "words" in w:
            x = self.biased(self.ein("tnw,twd->tnd", x, w["words"]), "words")
        if "types" in w:
            x = x + einsum("tnk,tkd->tnd", one_hot(kinds, model.types).double(), w["types"])
        x = self.reduce(x + w["places"] if "places" in w else x)
        x = self.norm(x, "first") if model.first else x
        for i, block in enumerate(model.blocks):
            attend, feed = self.branch(self.attend, i, block), self.branch(self.feed, i, block)
            z, x = x, attend(x, x)
            if block.units:
                x = feed(x, z if block.parallel else x)
        x = x if model.blocks[0].place == "post" else self.norm(x, "last")
        if self.tied:
            return self.biased(self.ein("tnd,twd->tnw", x, w["words"]), "read")
        return self.biased(self.ein("tnd,tdo->tno", x, w["read"]), "read")

    def branch(self, f, i, block):
        """What a branch and its norms make of a stream; it may read another stream."""
        name, place = f"{i}{f.__name__}", block.place

        def added(x, z):
            y = f(self.norm(z, name) if place in ("pre", "both") else z, i, block)
            x = self.reduce(x + (self.norm(y, f"{name}ed") if place in ("both", "out") else y))
            return self.norm(x, name) if place == "post" else x

        return added

    def biased(self, y, name):
        b = self.of.get(f"{name}_b")
        return y if b is None else self.reduce(y + b[:, None])

    def norm(self, x, name):
        if self.centred:
            share = 1 / x.shape[-1] if self.real else pow(x.shape[-1], -1, PRIME)
            x = self.reduce(x - self.reduce(x.sum(-1, keepdim=True) * share))
        return self.weighed(self.unit(x, [-1]), name)

    def weighed(self, x, name):
        x = self.reduce(x * self.of[name][:, None]) if name in self.of else x
        return self.biased(x, name)

    def unit(self, x, axes):
        """Divided by its norm over these axes."""
        q = self.reduce(self.reduce(x * x).sum(axes, keepdim=True))
        if self.real:
            return x / (q / math.prod(x.shape[a] for a in axes) + self.eps).sqrt()
        root = power(q.detach(), (PRIME - 3) // 4)  # one over it
        square = torch.remainder(root * root, PRIME)
        unmet = torch.remainder(square * q.detach(), PRIME) != 1
        self.unmet.append((self.stage, unmet.flatten(2).any(-1)))
        slope = torch.remainder(torch.remainder(square * root, PRIME) * (PRIME // 2), PRIME)
        return self.reduce(x * self.given(q, root, slope))

    def given(self, x, value, slope):
        """A function of ``x`` of which this value and this slope are known."""
        return self.reduce(value + slope * self.reduce(x - x.detach()))

    def next(self, *shape):
        """The free numbers of the next branch."""
        self.stage += 1
        return self.noise[self.stage].reshape(*self.noise[0].shape[:2], *shape)

    def attend(self, z, i, block):
        file, w, n = block.attention, self.of, self.n
        q = self.biased(self.ein("tnd,tkgde->tnkge", z, w[f"{i}q"]), f"{i}q")
        k = self.biased(self.ein("tnd,tkde->tnke", z, w[f"{i}k"]), f"{i}k")
        v = self.biased(self.ein("tnd,tkde->tnke", z, w[f"{i}v"]), f"{i}v")
        if file.normed:
            all_heads = file.normed == "all"  # in one norm
            q = self.weighed(self.unit(q, [-3, -2, -1] if all_heads else [-1]), f"{i}q_norm")
            k = self.weighed(self.unit(k, [-2, -1] if all_heads else [-1]), f"{i}k_norm")
        q, k = self.turned(q, file.turned), self.turned(k, file.turned)
        logits = self.ein("tikge,tjke->tikgj", q, k)
        if "offsets" in w:
            offsets = torch.arange(n) - torch.arange(n)[:, None] + n - 1
            b = w["offsets"][:, :, offsets].unflatten(1, (file.groups, file.heads_per_group))
            logits = self.reduce(logits + b.permute(0, 3, 1, 2, 4))
        mask = torch.ones(n, n, **F64)
        if self.causal:
            mask = mask.tril()
        mask = mask[:, None, None]
        noise = self.next(file.groups, file.heads_per_group, n)
        if self.real:
            A = logits.masked_fill(mask == 0, -math.inf).softmax(-1)
        else:
            total = self.reduce((noise * mask).sum(-1, keepdim=True))
            self.unmet.append((self.stage, (total == 0).flatten(2).any(-1)))
            A = self.reduce(noise * mask * power(total, PRIME - 2))
            moved = self.reduce(A * self.reduce(logits - logits.detach()))
            A = self.reduce(A + moved - self.reduce(A * moved.sum(-1, keepdim=True)))
        u = self.ein("tikgj,tjke->tikge", A, v)
        return self.biased(self.ein("tikge,tkged->tid", u, w[f"{i}o"]), f"{i}o")

    def turned(self, x, R):
        """The first ``R`` coordinates, turned in pairs by the token's position."""
        a, b, rest = x[..., 0:R:2], x[..., 1:R:2], x[..., R:]
        shape = (self.n, *[1] * (x.ndim - 3), R // 2)
        c, s = (part[:, : R // 2].reshape(shape) for part in self.angles)
        return torch.cat([self.reduce(a * c - b * s), self.reduce(a * s + b * c), rest], -1)

    def feed(self, z, i, block):
        up = self.biased(self.ein("tnd,tdq->tnq", z, self.of[f"{i}up"]), f"{i}up")
        gate = up
        if block.gated:
            gate = self.biased(self.ein("tnd,tdq->tnq", z, self.of[f"{i}gate"]), f"{i}gate")
        value, slope = self.next(2, block.units).unbind(2)
        if self.real:
            h = (relu if block.homogeneous else silu)(gate)
        elif block.homogeneous:
            h = gate * (value % 2)
        else:
            h = self.given(gate, value, slope)
        h = self.reduce(h * up) if block.gated else h
        return self.biased(self.ein("tnq,tqd->tnd", h, self.of[f"{i}down"]), f"{i}down")

    # --- its derivative ---------------------------------------------------------------------------

    def contexts(self, count):
        """Data of so many contexts, and free numbers such that all norms have their roots."""
        kinds, sizes = zip(*self.sizes(), strict=True)
        noise = [self.draw(count, self.n, size) for size in sizes]
        unready, passes = torch.arange(0 if self.real else count), 0  # contexts without some root
        relus = any(block.homogeneous for block in self.model.blocks)
        while len(unready):
            passes += 1
            if relus and not passes % 40:  # these have few states: there may be no root
                for numbers, size in zip(noise, sizes, strict=True):
                    numbers[unready] = self.draw(len(unready), self.n, size)
            self.outputs(self.copies(len(unready)), [numbers[unready] for numbers in noise])
            unmet = torch.zeros(len(kinds), len(unready), self.n, dtype=torch.bool)
            for stage, tokens in self.unmet:
                unmet[stage] |= tokens
            first = unmet.any(2).long().argmax(0)
            for stage in range(len(kinds)):
                rows, tokens = (unmet[stage] & (first == stage)[:, None]).nonzero().T
                free = torch.full_like(tokens, stage)
                if self.causal:  # the first token attends to itself alone, whatever the logits
                    moved = max(s for s in range(stage + 1) if kinds[s] != "attention")
                    free[tokens == 0] = moved
                for s in range(stage + 1):
                    context, token = unready[rows[free == s]], tokens[free == s]
                    noise[s][context, token] = self.draw(len(context), sizes[s])
            unready = unready[unmet.flatten(2).any(2).any(0)]
        return noise

    def copies(self, count):
        return {name: w.expand(count, *w.shape) for name, w in self.weights.items()}

    def jacobian(self, contexts):
        """The derivative of the outputs at the last tokens of so many contexts."""
        noise = self.contexts(contexts)
        leaves = {name: w.clone().requires_grad_() for name, w in self.copies(contexts).items()}
        rows = []
        for output in self.outputs(leaves, noise)[:, -1].unbind(-1):
            gradients = torch.autograd.grad(
                output.sum(), leaves.values(), retain_graph=True, materialize_grads=True
            )
            rows.append(torch.cat([gradient.flatten(1) for gradient in gradients], 1))
        return self.reduce(torch.cat(rows)).detach()

    def rank(self, contexts):
        """Of this derivative: modulo the prime, or in float64 with the gap of singular values."""
        J = self.jacobian(contexts)
        return rank_in_float(J) if self.real else rank_modulo(J, PRIME)


def rank_in_float(J):
    """The rank, and by which factor the least singular value is above what counts as zero."""
    norms = J.norm(dim=0)
    counted = norms > 1e-12 * norms.max()
    values = torch.linalg.svdvals(J[:, counted] / norms[counted])
    rank = int((values > 1e-10 * values[0]).sum())
    rest = values[rank].item() if rank < len(values) else 0.0
    return rank, values[rank - 1].item() / max(rest, 1e-17)
