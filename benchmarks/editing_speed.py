"""1,500 facts written one by one at d = 384, beside an editor that stacks all facts each time.

    python benchmarks/editing_speed.py

Four heads on 16 Gaussian tokens, one output: room for 1536 facts. Times are of this process on one
core, without the decomposition of the sample, which both share. A layer of torch is the second:
twelve heads, and labels of 384 numbers, of which as many fit.
"""

import time

import torch
from torch import nn

from attnmem import mha_features, random_mha
from attnmem.theory.editing import Memory
from attnmem_yours import LayerMemory

FACTS, SAMPLE, TOKENS, WIDTH = 1500, 4000, 16, 384


class Stacked:
    """The plain editor: the same steps, all facts and axes copied at each."""

    def __init__(self, memory, layer):
        self.layer, self.map = layer, memory._map
        self.start = self.weights = memory._start
        self.axes, self.facts = memory._map.new_zeros(0, memory._map.shape[1]), []

    def write(self, context, query, label):
        """Store a fact, and look at all of them."""
        x = mha_features(self.layer, context[None], query[None])[0].double()
        z = rest = x @ self.map
        for _ in range(2):
            rest = rest - (rest @ self.axes.T) @ self.axes
        size = torch.linalg.vector_norm(rest)
        self.axes = torch.cat([self.axes, rest[None] / size])
        step = torch.outer(self.map @ self.axes[-1], (label - x @ self.weights) / size)
        self.weights = self.weights + step
        self.facts = [*self.facts, (x, label)]
        X, Y = (torch.stack(tensors) for tensors in zip(*self.facts, strict=True))
        old = Y.abs() + X.abs() @ self.start.abs()
        allowed = 1e-6 * Y.abs() + 1e-9 * old + 1e-12 * old.amax(0)
        assert size > 1e-6 * z.norm()
        assert ((X @ self.weights - Y).abs() <= allowed).all()


def seconds(editors, E, e, y):
    """What writing all facts takes each, in turns of 50, so that other work slows all alike."""
    spent = [0.0] * len(editors)
    for turn in torch.arange(len(y)).split(50):
        for k, editor in enumerate(editors):
            start = time.process_time()
            for t in turn.tolist():
                editor.write(E[t], e[t], y[t])
            spent[k] += time.process_time() - start
    return spent


def main():
    """Both editors, and a layer of torch."""
    g = torch.Generator().manual_seed(0)
    E = torch.randn(FACTS + SAMPLE, TOKENS, WIDTH, generator=g)
    e, y = torch.randn(len(E), WIDTH, generator=g), torch.randn(FACTS, 1, generator=g).double()
    layer = random_mha(4, WIDTH, 32, seed=1, value_dim=32)
    layer = type(layer)(*(W.double() for W in layer))
    memory = Memory(layer, E[FACTS:], e[FACTS:])
    plain = Stacked(memory, layer)
    ours, theirs = seconds([memory, plain], E, e, y)
    off = float((memory.layer().W_V.flatten(0, 1) - plain.weights).abs().max())
    largest = float(plain.weights.abs().max())
    print(f"{FACTS} facts: {ours:.1f} s, stacked {theirs:.1f} s, ratio {theirs / ours:.1f}")
    print(f"largest weight {largest:.2f}, largest difference {off:.0e}", flush=True)
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, 12, batch_first=True)
    E, e = E[: WIDTH + 1600], e[: WIDTH + 1600]
    memory = LayerMemory(module, E[WIDTH:], e[WIDTH:])
    room, labels = memory.room, torch.randn(WIDTH, WIDTH, generator=g)
    [spent] = seconds([memory], E, e, labels)
    print(f"layer of torch: {room} facts in {spent:.1f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
