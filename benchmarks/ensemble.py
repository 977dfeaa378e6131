"""The engine beside a plain loop and a compiled program, and beside the machine's product rate.

    python benchmarks/ensemble.py [--d 10] [--steps N] [--device cpu]

Dana et al.'s Experiment 1 is trained three times, for every number of heads. The plain loop trains
one model at a time as such code is usually written: an ``nn.Module`` with an
``nn.MultiheadAttention`` per head, a DataLoader, all places computed, PyTorch's Adam. The engine
and the compiled program train the seeds of a cell at once. The compiled program is JAX's: ``vmap``
over the runs and ``scan`` over the steps, under ``jit``. The engine also counts right answers after
every epoch, which the other two do not.

The floor of a step is the number of its operations, as :func:`operations` counts them, over the
rate of a plain matrix product in the same process. For Mahdavi et al.'s model only engine and floor
are compared, and beside them the layers of the book with PyTorch's autograd and fused Adam. On a
CPU all runs on one core. JAX is optional: ``pip install -e '.[bench]'``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import math
import os
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from attnmem.lab import data, experiments, models, training
from attnmem.lab.protocols import PROTOCOLS
from attnmem.lab.store import Run

MEMORIZATION = [  # context, H, n: sizes from Mahdavi et al.'s Figs. 2-4
    ("shared", 20, 32),
    ("random", 20, 5),
    ("random", 20, 32),
]


class PlainModel(nn.Module):
    """The published architecture, head by head."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.embedding = nn.Embedding(run.N, run.d)
        self.positions = nn.Embedding(3, run.d)
        self.heads = nn.ModuleList(
            nn.MultiheadAttention(run.d, 1, bias=False, batch_first=True) for _ in range(run.H)
        )
        self.unembedding = nn.Linear(run.d, run.N, bias=False)
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool).triu(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits at every place."""
        x = self.embedding(tokens)
        a = x + self.positions.weight[: tokens.shape[1]]
        for head in self.heads:
            x = x + head(a, a, a, attn_mask=self.mask, need_weights=False)[0]
        return self.unembedding(x)


def bigrams(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of tokens and their next tokens."""
    tokens = torch.randint(run.N, (run.T, 2))
    table = torch.randint(run.N, (run.N, run.N))
    return tokens, table[tokens[:, 0], tokens[:, 1]]


def plain_loop(run: Run, device: str) -> None:
    """Train one model."""
    torch.manual_seed(run.seed)
    model = PlainModel(run).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr * run.lr_start)
    loader = DataLoader(TensorDataset(*bigrams(run)), batch_size=run.batch, shuffle=True)
    for _ in range(run.steps // len(loader)):
        for batch, answers in loader:
            logits = model(batch.to(device))[:, -1]
            loss = F.cross_entropy(logits, answers.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def compiled_program(runs: list[Run]) -> Callable[[], object]:
    """Training all runs at once in JAX from the engine's weights: compiled now, run when called."""
    import jax
    import jax.numpy as jnp

    run = runs[0]

    def loss(P, tokens, answers):
        x = P["embedding"][tokens]
        a = x + P["positions.0"][:2]
        last = a[:, 1]
        q = jnp.einsum("bd,hkd->bhk", last, P["W_Q.0"]) * run.d_h**-0.5
        k = jnp.einsum("bsd,hkd->bshk", a, P["W_K.0"])
        alpha = jax.nn.softmax(jnp.einsum("bhk,bshk->bhs", q, k), axis=-1)
        v = jnp.einsum("bsd,hkd->bshk", a, P["W_V.0"])
        z = jnp.einsum("bhs,bshk->bhk", alpha, v)
        y = x[:, 1] + jnp.einsum("bhk,hdk->bd", z, P["W_O.0"])
        scores = jax.nn.log_softmax(y @ P["unembedding"].T)
        return -jnp.take_along_axis(scores, answers[:, None], axis=1).mean()

    def step(state, batch):
        P, first, second, count = state
        value, g = jax.value_and_grad(loss)(P, *batch)
        count = count + 1
        first = jax.tree.map(lambda m, x: 0.9 * m + 0.1 * x, first, g)
        second = jax.tree.map(lambda s, x: 0.999 * s + 0.001 * x * x, second, g)
        unbiased = jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        rate = run.lr * run.lr_start * unbiased
        P = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), P, first, second)
        return (P, first, second, count), value

    def train(P, tokens, answers):
        zeros = jax.tree.map(jnp.zeros_like, P)
        state = (P, zeros, jax.tree.map(jnp.zeros_like, P), 0.0)
        return jax.lax.scan(step, state, (tokens, answers))[1]

    weights = [models.initial_aot(run, data.generator(run, "weights")) for run in runs]
    P = {name: jnp.stack([W[name].numpy() for W in weights]) for name in weights[0]}
    epochs = run.steps * run.batch // run.T
    drawn = [[part.repeat(epochs, *[1] * (part.ndim - 1)) for part in bigrams(run)] for run in runs]
    tokens, answers = (
        jnp.stack([part.view(run.steps, run.batch, *part.shape[1:]).numpy() for part in parts])
        for parts in zip(*drawn, strict=True)
    )
    compiled = jax.jit(jax.vmap(train)).lower(P, tokens, answers).compile()
    return lambda: jax.block_until_ready(compiled(P, tokens, answers))


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall time of ``work()``, the device's queue included."""
    start = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def side_by_side(ways: Sequence[Callable[[], object]], device: str, times: int = 3) -> list[float]:
    """The shortest wall time of each way, of so many that are taken in turn."""
    rounds = [[seconds(way, device) for way in ways] for _ in range(times)]
    return [min(took) for took in zip(*rounds, strict=True)]


def shortened(run: Run, steps: int) -> Run:
    """The same run for about ``steps`` steps: whole epochs, or one shorter one."""
    T = min(run.T, steps * run.batch)
    return dataclasses.replace(run, T=T, steps=steps - steps % (T // run.batch))


def bigram_stacks(d: int, steps: int) -> list[list[Run]]:
    """The cells of Experiment 1 with one dimension, all seeds of each."""
    runs = [run for run in experiments.runs("dana-exp1", "paper") if run.d == d]
    cells: dict[int, list[Run]] = {}
    for run in runs:
        cells.setdefault(run.H, []).append(shortened(run, steps))
    return list(cells.values())


def compiled_in(stack: list[Run], device: str) -> tuple[Callable[[], object], float]:
    """The compiled program and the seconds that it took to compile; nothing without JAX."""
    if importlib.util.find_spec("jax") is None:
        return lambda: None, math.nan
    start = time.perf_counter()
    program = compiled_program(stack)
    return program, time.perf_counter() - start


def compare(stack: list[Run], device: str, rate: float) -> tuple[float, float, float]:
    """One line, and its first numbers: milliseconds per step of all runs, by each of the three."""
    run, per_step = stack[0], 1e3 / stack[0].steps
    few = [shortened(run, 2) for run in stack]
    short = shortened(run, run.steps // 4)  # of the slow one a quarter
    training.train(few, device=device)  # warm up
    plain_loop(few[0], device)
    compiled, compiling = compiled_in(stack, device)
    compiled()
    ways = (
        lambda: plain_loop(short, device),
        lambda: training.train(stack, device=device),
        compiled,
    )
    plain, engine, jax = (per_step * took for took in side_by_side(ways, device))
    plain *= len(stack) * run.steps / short.steps  # it trains one at a time
    jax = jax if math.isfinite(compiling) else math.nan
    floor = 1e3 * len(stack) * operations(run) / rate
    print(
        f"  {run.H:3} {plain:9.2f} {engine:9.2f} {jax:9.2f} {compiling:9.1f} {floor:9.3f}"
        f" {plain / engine:9.1f} {jax / engine:9.2f} {floor / engine:9.2f}",
        flush=True,
    )
    return plain, engine, jax


def by_autograd(run: Run, device: str) -> None:
    """Train one of Mahdavi et al.'s models by its layers, PyTorch's autograd and fused Adam."""
    weights = models.initial_mha(run, data.generator(run, "weights"))
    P = {name: W[None].to(device).requires_grad_() for name, W in weights.items()}
    contexts, queries, labels = (part.to(device) for part in data.contexts_of(run))
    adam = torch.optim.Adam(P.values(), lr=run.lr, fused=True)
    for step in range(run.steps):
        batch = slice(step % 4 * run.batch, (step % 4 + 1) * run.batch)
        seen = contexts if run.context == "shared" else contexts[batch]
        _, values = models.mha_heads(P, run, seen[None], queries[None, batch])
        outputs = values[0] @ (P["W_O"][0] @ P["W_D"][0].T) + P["b_D"][0]
        adam.zero_grad()
        F.cross_entropy(outputs, labels[batch]).backward()
        adam.step()


def memorization_step(context: str, H: int, n: int, steps: int, device: str, rate: float) -> None:
    """One line: a step of Mahdavi et al.'s model, by the engine and by autograd, and its floor.

    A time is the difference of a longer and a shorter training, so that what happens once, data
    and the evaluation at the end, does not count.
    """
    [first, *_] = experiments.runs("mahdavi-fig2a", "paper", 1)
    sizes = {"context": context, "H": H, "n": n, "T": 4 * first.batch}
    run = dataclasses.replace(first, profile="benchmark", early_stop=False, **sizes)
    ends = [dataclasses.replace(run, steps=k, evaluate_every=k) for k in (steps, 2 * steps)]
    ways = [functools.partial(training.train, [end], device=device) for end in ends]
    ways += [functools.partial(by_autograd, end, device) for end in ends]
    took = side_by_side(ways, device, times=5)
    engine, autograd = (1e3 * (took[i + 1] - took[i]) / steps for i in (0, 2))
    counted = operations(run)
    floor = 1e3 * counted / rate
    print(
        f"  {context:6} {H:3} {n:3} {counted / 1e6:8.0f} {autograd:9.2f} {engine:9.2f} {floor:9.2f}"
        f" {autograd / engine:9.2f} {floor / engine:9.2f}",
        flush=True,
    )


def operations(run: Run) -> int:
    """Floating-point operations of the matrix products in one step, with its backward pass."""
    run = dataclasses.replace(run, T=max(run.batch, 1))
    protocol = PROTOCOLS[run.task]([run], torch.device("cpu"))
    [batch] = protocol.batches(1)
    with FlopCounterMode(display=False) as counter:
        protocol.losses(batch, watched=False)
    return counter.get_total_flops()


def product_rate(device: str, seconds: float = 0.5) -> float:
    """Floating-point operations a second in the fastest of some large float32 products."""
    size = 1024 if device == "cpu" else 4096
    factor = torch.ones(size, size, dtype=torch.float32, device=device)
    wait = torch.cuda.synchronize if factor.is_cuda else lambda: None
    best, start = 0.0, time.perf_counter()
    while best == 0.0 or time.perf_counter() < start + seconds:
        wait()
        begin = time.perf_counter()
        factor @ factor
        wait()
        best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best


def main() -> None:
    """Print the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--d", type=int, default=10)
    usual = "1024 on a CPU; 8192 on a GPU, where steps are captured first"
    parser.add_argument("--steps", type=int, help=usual)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device = arguments.device
    steps = arguments.steps or (1024 if device == "cpu" else 8192)
    torch.set_num_threads(1)
    if device == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # of JAX's threads too

    rate = product_rate(device)
    print(f"one core of {device}" if device == "cpu" else device, end="; ")
    print(f"matrix products at {rate / 1e9:.0f} GFLOP/s")
    stacks = bigram_stacks(arguments.d, steps)
    run = stacks[0][0]
    print(f"Exp. 1 at d = {run.d}, {run.steps} steps; ms per step of {len(stacks[0])} runs:")
    if importlib.util.find_spec("jax") is None:
        print("  JAX is not installed: pip install -e '.[bench]' for its column")
    print("    H     plain    engine       JAX compile/s     floor plain/eng   JAX/eng floor/eng")
    each = [compare(stack, device, rate) for stack in stacks]
    plain, engine, jax = map(sum, zip(*each, strict=True))
    print(f"  all {plain:9.1f} {engine:9.2f} {jax:9.2f} {plain / engine:29.1f} {jax / engine:9.2f}")
    print("Mahdavi et al.'s model, one run:")
    print("  context  H   n   MFLOP  autograd    engine     floor auto/eng floor/eng")
    for cell in MEMORIZATION:
        memorization_step(*cell, steps // 4, device, rate)

    cell = next(stack[0] for stack in stacks if stack[0].H == 16)
    print("Exp. 1, H = 16: runs a second (of the full 4096 steps) against the size of the stack:")
    for size in (1, 2, 5, 10, 20):
        stack = [dataclasses.replace(cell, seed=seed) for seed in range(size)]
        took = seconds(lambda stack=stack: training.train(stack, device=device), device)
        print(f"  {size:3} runs: {size / took * cell.steps / 4096:.3f}", flush=True)


if __name__ == "__main__":
    main()
