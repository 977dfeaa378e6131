"""Ranks of a model's derivative at silent weights: an oracle for floors.

At weights that span the blocks, the stream of a token is ``x``, in the ``m`` dimensions that the
data have behind a norm, and one number for each output, which is all that is written. Nothing reads
it, so each block sees the same ``x``. Ranks are exact modulo a prime. Points of the sphere are
rational, their scales are free numbers; so are the attention weights of each group and the sigmoids
of each pair, as exponentials of different logits are algebraically independent. Twins have the
same.

At two equal models side by side, it is the derivative of one whose norms are held.
"""

from collections import Counter
from itertools import count

import torch
from torch import einsum

from exact import F64, PRIME, Network, Reduced, power
from oracles import rank_modulo

reduced = Reduced.apply


def ein(spec, *factors):
    return reduced(einsum(spec, *factors))


def inverse(x):
    return power(torch.remainder(x, PRIME), PRIME - 2)


class Silent:
    """A model's blocks at silent weights, for contexts of ``n`` tokens.

    ``groups`` says for each kind of attention, and for each output, how many groups of heads share
    logits; heads that share keys or are turned or normed cancel in pairs. ``teams`` says who works
    for which output: some ``blocks``; some gaps between blocks, whose ``ends`` are shared with the
    next output; or a share of all, ``dealt`` out. With ``words`` contexts are sequences of so many
    words: what a token sees depends on the words up to it, or on all.
    """

    def __init__(
        self, model, n, outputs=1, *, teams="dealt", groups, causal=False, words=0, seed=0
    ):
        self.blocks, self.teams = model.blocks, teams
        self.n, self.causal, self.words = n, causal, words
        self.generator = torch.Generator().manual_seed(seed)
        self.outputs, self.groups = outputs, groups
        self.m = self.blocks[0].attention.token_dim - outputs
        self.weights, self.logits, self.units = {}, {}, {}  # the latter: ids that twins share
        self.arrange_units()
        self.arrange_heads()
        self.weights["read"] = torch.zeros(self.m, outputs, **F64)
        if self.blocks[0].shift:
            self.weights["read_b"] = torch.zeros(outputs, **F64)
        turned = max(block.attention.turned for block in self.blocks)
        self.angles = self.turns(turned // 2)

    def draw(self, *shape):
        return torch.randint(1, PRIME, shape, generator=self.generator).double()

    # --- who cancels with whom --------------------------------------------------------------------

    def shares(self, sizes):
        """The blocks whose units or heads write to each output: one entry for each of them."""
        outputs, slots = self.outputs, [i for i, size in enumerate(sizes) for _ in range(size)]
        if self.teams == "dealt":
            return [slots[first::outputs][: len(slots) // outputs] for first in range(outputs)]
        if self.teams == "blocks":
            blocks = len(sizes) // outputs
            return [[i for i in slots if i // blocks == output] for output in range(outputs)]
        gaps, shares = (len(sizes) - 1) // outputs, []  # the blocks at both ends are shared
        for first in range(0, gaps * outputs, gaps):
            inner = [i for i in slots if first < i < first + gaps]
            ends = [[i] * (sizes[i] // 2) for i in (first, first + gaps)]
            shares.append([*ends[0], *inner, *ends[1]])
        return shares

    @staticmethod
    def pairs(slots):
        """Pairs of these slots: one of each two consecutive blocks, others half of all apart."""
        left, pairs = Counter(slots), []
        for a in sorted(left):
            if left[a] and left[a + 1]:
                pairs.append((a, a + 1))
                left.subtract(pairs[-1])
        rest = sorted(left.elements())
        half = len(rest) // 2
        pairs += zip(rest[:half], rest[half : 2 * half], strict=True)
        return pairs, rest[2 * half :]

    def arrange_units(self):
        m, blocks = self.m, self.blocks
        members = [[] for _ in blocks]  # of each block: ids, outputs and signs
        ids = count()
        for output, slots in enumerate(self.shares([block.units for block in blocks])):
            pairs, alone = self.pairs(slots)
            for pair in pairs:
                twins = next(ids)
                for block, sign in zip(pair, (1, -1), strict=True):
                    members[block].append((twins, output, sign))
            for block in alone:
                members[block].append((next(ids), output, 0))
        for block, present in zip(blocks, members, strict=True):
            present += [(next(ids), 0, 0) for _ in range(block.units - len(present))]
        self.kinds = next(ids)
        maps = {x: self.draw(m + 1, self.kinds) for x in ("up", "gate")}
        a = self.draw(self.kinds)
        for i, (block, present) in enumerate(zip(blocks, members, strict=True)):
            if not block.units:
                continue
            self.units[i] = torch.tensor([id_ for id_, _, _ in present])
            for x in ("up", "gate") if block.gated else ("up",):
                self.weights[f"{i}{x}"] = maps[x][:m, self.units[i]]
                if block.mlp_bias or block.shift:
                    self.weights[f"{i}{x}_b"] = maps[x][m, self.units[i]]
            write = torch.zeros(block.units, m + self.outputs, **F64)
            for row, (id_, output, sign) in zip(write, present, strict=True):
                row[m + output] = a[id_] * sign % PRIME
            self.weights[f"{i}down"] = write
            if block.mlp_bias:
                self.weights[f"{i}down_b"] = torch.zeros(m + self.outputs, **F64)

    def arrange_heads(self):
        kinds = [block.attention for block in self.blocks]
        members = [[] for _ in kinds]  # of each block: ids of logits, and outputs
        ids, alike = count(), set()
        for kind in dict.fromkeys(kinds):  # heads cancel with heads of the same kind
            sizes = [kind.groups if other == kind else 0 for other in kinds]
            for output, slots in enumerate(self.shares(sizes)):
                if kind.plain and not kind.normed:
                    own = [next(ids) for _ in range(self.groups[kind])]
                    alike.update(own)
                    cancelling = [(own[turn % len(own)], [i]) for turn, i in enumerate(slots)]
                else:
                    pairs, alone = self.pairs(slots)
                    cancelling = [(next(ids), slots) for slots in (*pairs, *zip(alone))]
                for id_, present in cancelling:
                    for i in present:
                        members[i].append((id_, output))
        for i, kind in enumerate(kinds):
            members[i] += [(next(ids), 0) for _ in range(kind.groups - len(members[i]))]
        self.all_logits = next(ids)
        where = {}
        for i, present in enumerate(members):
            for h, (id_, _) in enumerate(present):
                where.setdefault(id_, []).append((i, h))
        for i, present in enumerate(members):
            if present:
                self.logits[i] = torch.tensor([id_ for id_, _ in present])
                self.heads_of_a_block(i, kinds[i], present)
        for id_, places in where.items():
            self.cancel(places, id_ in alike)

    def heads_of_a_block(self, i, kind, present):
        m, g, e, v, w = self.m, kind.heads_per_group, kind.head_dim, kind.value_dim, self.weights
        bias = kind.bias + "qkv" if self.blocks[i].shift else kind.bias
        shapes = {"q": (g, m, e), "k": (m, e), "q_b": (g, e), "k_b": (e,), "v": (m, v), "v_b": (v,)}
        for x, shape in shapes.items():
            if x[0] in bias or "_b" not in x:
                w[f"{i}{x}"] = self.draw(len(present), *shape)
        w[f"{i}o"] = torch.zeros(len(present), g, v, m + self.outputs, **F64)
        for h, (_, output) in enumerate(present):
            w[f"{i}o"][h, :, :, m + output] = self.draw(g, v)
        if "o" in bias:
            w[f"{i}o_b"] = torch.zeros(m + self.outputs, **F64)

    def cancel(self, places, plain):
        """Make the heads at these places attend alike, and what they write sum to zero."""
        w, m = self.weights, self.m
        (i0, h0), (last, h_last) = places[0], places[-1]
        for i, h in places[1:]:
            for x in ("q", "q_b", "k", "k_b"):
                if f"{i}{x}" in w:
                    w[f"{i}{x}"][h] = w[f"{i0}{x}"][h0]
        if not plain:
            if len(places) == 1:
                w[f"{i0}o"][h0] = 0
                return
            for x in ("v", "v_b"):
                if f"{last}{x}" in w:
                    w[f"{last}{x}"][h_last] = w[f"{i0}{x}"][h0]
            w[f"{last}o"][h_last] = -w[f"{i0}o"][h0] % PRIME
            return
        for x in ("v", "v_b"):
            if f"{last}{x}" in w:
                total = 0
                for i, h in places:
                    total += ein("...v,v->...", w[f"{i}{x}"][h], w[f"{i}o"][h, 0, :, m:].sum(-1))
                factor = inverse(w[f"{last}o"][h_last, 0, 0, m:].sum())
                w[f"{last}{x}"][h_last, ..., 0] -= reduced(reduced(total) * factor)
                w[f"{last}{x}"] %= PRIME

    # --- data -------------------------------------------------------------------------------------

    def turns(self, pairs):
        """Cosines and sines of each position's angles."""
        t = self.draw(pairs)
        scale = inverse(1 + reduced(t * t))
        a, b = reduced((1 - reduced(t * t)) * scale), reduced(2 * reduced(t * scale))
        rows = [(torch.ones_like(t), torch.zeros_like(t))]
        for _ in range(1, self.n):
            c, s = rows[-1]
            rows.append((reduced(c * a - reduced(s * b)), reduced(s * a + reduced(c * b))))
        return tuple(map(torch.stack, zip(*rows, strict=True)))

    def of_tokens(self, contexts, *shape):
        """Free numbers of all tokens; those of words depend on the words that a token sees."""
        if not self.words:
            return self.draw(contexts, self.n, *shape)
        numbers = []
        for i in range(self.n):
            seen = i + 1 if self.causal else self.n
            key = (self.sequences[:, :seen] * self.words ** torch.arange(seen)).sum(1)
            numbers.append(self.draw(self.words**seen, *shape)[key])
        return torch.stack(numbers, 1)

    def data(self, contexts):
        if self.words:
            order = torch.randperm(self.words**self.n, generator=self.generator)[:contexts]
            self.sequences = order[:, None] // self.words ** torch.arange(self.n) % self.words
        y = self.of_tokens(contexts, self.m)
        square = reduced(reduced(y * y).sum(-1, keepdim=True))
        pole = torch.eye(self.m, **F64)[0]  # reflected in a plane
        self.z = reduced(pole - reduced(reduced(2 * y[..., :1] * y) * inverse(square)))
        self.scale = self.of_tokens(contexts, 1)  # one over the norm
        g = max(block.attention.heads_per_group for block in self.blocks)
        mask = torch.ones(self.n, self.n, **F64)
        mask = mask.tril() if self.causal else mask
        A = self.of_tokens(contexts, self.all_logits, g, self.n) * mask[:, None, None]
        self.A = reduced(A * inverse(A.sum(-1, keepdim=True)))
        self.sigmoids = self.of_tokens(contexts, self.kinds)

    # --- the network and its derivative -----------------------------------------------------------

    def norm(self, x):
        """Its value at silent weights is known; its derivative forgets the radius."""
        z = self.z
        return reduced(z + reduced(self.scale * (x - reduced(z * reduced(z * x).sum(-1, True)))))

    def biased(self, y, name):
        b = self.w.get(f"{name}_b")
        if b is None:
            return y
        return reduced(y + b.reshape(len(b), *[1] * (y.ndim - b.ndim), *b.shape[1:]))

    def forward(self, weights):
        """The outputs at the last tokens; each context has weights of its own."""
        self.w = weights
        x = torch.zeros_like(self.z)
        written = torch.zeros(*x.shape[:2], self.outputs, **F64)
        for i, block in enumerate(self.blocks):
            z = self.norm(x)
            for branch, present in ((self.attend, self.logits), (self.feed, self.units)):
                if i in present:
                    y = branch(i, block, z if block.parallel else self.norm(x))
                    x, written = reduced(x + y[..., : self.m]), reduced(written + y[..., self.m :])
        if written.any():
            raise AssertionError("these weights are not silent")
        read = ein("td,tdo->to", self.z[:, -1], weights["read"])
        return self.biased(reduced(written[:, -1] * self.scale[:, -1]) + read, "read")

    def attend(self, i, block, z):
        kind, w = block.attention, self.w
        q = self.biased(ein("tnd,tkgde->tnkge", z, w[f"{i}q"]), f"{i}q")
        k = self.biased(ein("tnd,tkde->tnke", z, w[f"{i}k"]), f"{i}k")
        v = self.biased(ein("tnd,tkde->tnke", z, w[f"{i}v"]), f"{i}v")
        q, k = self.turned(q, kind.turned), self.turned(k, kind.turned)
        logits = ein("tikge,tjke->tikgj", q, k)
        A = self.A[:, :, self.logits[i], : kind.heads_per_group]
        moved = reduced(A * reduced(logits - logits.detach()))
        A = reduced(A + moved - reduced(A * moved.sum(-1, keepdim=True)))
        u = ein("tikgj,tjke->tikge", A, v)
        return self.biased(ein("tikge,tkged->tid", u, w[f"{i}o"]), f"{i}o")

    def turned(self, x, R):
        """The first ``R`` coordinates, turned in pairs by the token's position."""
        a, b, rest = x[..., 0:R:2], x[..., 1:R:2], x[..., R:]
        shape = (self.n, *[1] * (x.ndim - 3), R // 2)
        c, s = (part[:, : R // 2].reshape(shape) for part in self.angles)
        turned = a * c - reduced(b * s), a * s + reduced(b * c)
        return torch.cat([*map(reduced, turned), rest], -1)

    def feed(self, i, block, z):
        w = self.w
        up = self.biased(ein("tnd,tdq->tnq", z, w[f"{i}up"]), f"{i}up")
        gate = up
        if block.gated:
            gate = self.biased(ein("tnd,tdq->tnq", z, w[f"{i}gate"]), f"{i}gate")
        s, t = self.sigmoids[..., self.units[i]], gate.detach()
        slope = s + reduced(t * reduced(s * (1 - s)))  # that of SiLU, t s
        h = reduced(reduced(t * s) + reduced(reduced(slope) * (gate - t)))
        h = reduced(h * up) if block.gated else h
        return self.biased(ein("tnq,tqd->tnd", h, w[f"{i}down"]), f"{i}down")

    def rank(self, contexts):
        """Of the derivative of all outputs on so many contexts, in all weights.

        Of normed queries and keys it is without those: norms of heads are left out.
        """
        self.data(contexts)
        leaves = {
            name: w.expand(contexts, *w.shape).clone().requires_grad_()
            for name, w in self.weights.items()
        }
        rows = []
        for output in self.forward(leaves).unbind(-1):
            gradients = torch.autograd.grad(
                output.sum(), leaves.values(), retain_graph=True, materialize_grads=True
            )
            columns = [
                gradient.flatten(1)
                for name, gradient in zip(leaves, gradients, strict=True)
                if not self.left_out(name)
            ]
            rows.append(torch.cat(columns, 1))
        return rank_modulo(torch.cat(rows), PRIME)

    def left_out(self, name):
        block = name.rstrip("qk_b")
        maps = {f"{block}{x}{b}" for x in "qk" for b in ("", "_b")}
        return name in maps and bool(self.blocks[int(block)].attention.normed)


class Held(Network):
    """One of two equal models side by side, whose difference is read: opposite moves of both.

    These change no mean and no norm of what both have in common, to first order. A weight that both
    share does not move.
    """

    def norm(self, x, name):
        if self.centred:
            share = 1 / x.shape[-1] if self.real else pow(x.shape[-1], -1, PRIME)
            x = self.reduce(x - self.reduce(x.detach().sum(-1, keepdim=True) * share))
        return self.weighed(self.held(x, [-1]), name)

    def unit(self, x, axes):
        return super().unit(x, axes) if axes == [-1] else self.held(x, axes)

    def held(self, x, axes):
        """Divided by what is its norm now."""
        fixed = x.detach()
        value = super().unit(fixed, axes)
        largest = fixed.abs().argmax(-1, keepdim=True)  # any number that is not zero would do
        top, bottom = value.gather(-1, largest), fixed.gather(-1, largest)
        return self.reduce(x * (top / bottom if self.real else reduced(top * inverse(bottom))))

    def jacobian(self, contexts):
        columns = super().jacobian(contexts).split([w.numel() for w in self.weights.values()], 1)
        shared = {f"{i}{x}_norm" for i in range(len(self.model.blocks)) for x in "qk"}
        if self.model.blocks[0].attention.normed != "head":
            shared = set()
        kept = zip(self.weights, columns, strict=True)
        return torch.cat([column for name, column in kept if name not in shared], 1)
