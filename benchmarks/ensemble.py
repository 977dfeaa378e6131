"""The engine against the plain loop, side by side in one process, on Dana et al.'s Experiment 1.

    python benchmarks/ensemble.py [--d 10] [--epochs 2] [--device cpu] [--threads 2]

The plain loop trains one model at a time as such code is usually written: an ``nn.Module`` with an
``nn.MultiheadAttention`` per head, a DataLoader, all places computed, PyTorch's Adam. The engine
trains the same runs (7 numbers of heads, 5 seeds) for as many steps; on a CPU in as many Python
threads as the plain loop may use inside its operations. Printed: seconds of both, their ratio, runs
per second against the size of the stack, and the fraction of the machine's measured rate of matrix
products. Both start from scratch, data and initial weights included.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from attnmem import experiments, training
from attnmem.results import Run


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


def plain_loop(run: Run, epochs: int, device: str) -> float:
    """Train one model; its mean accuracy over the last epoch."""
    torch.manual_seed(run.seed)
    model = PlainModel(run).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr * run.lr_start)
    tokens = torch.randint(run.N, (run.T, 2))
    table = torch.randint(run.N, (run.N, run.N))
    dataset = TensorDataset(tokens, table[tokens[:, 0], tokens[:, 1]])
    loader = DataLoader(dataset, batch_size=run.batch, shuffle=True)
    for _ in range(epochs):
        accuracies = []
        for batch, answers in loader:
            batch, answers = batch.to(device), answers.to(device)
            logits = model(batch)[:, -1]
            loss = F.cross_entropy(logits, answers)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accuracies.append((logits.argmax(-1) == answers).float().mean().item())
    return sum(accuracies) / len(accuracies)


def seconds(work, device: str) -> float:
    """Wall time of ``work()``, the device's queue included."""
    start = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def product_rate(device: str, size: int = 1024, times: int = 10) -> float:
    """Floating-point operations a second of square float32 matrix products."""
    A = torch.randn(size, size, device=device)

    def work():
        for _ in range(times):
            A @ A

    work()
    return times * 2 * size**3 / seconds(work, device)


def operations(run: Run) -> int:
    """Of one step of one run: forward and about twice as much backward (see the sweeps chapter)."""
    B, S, d = run.batch, 2, run.d
    per_head = 2 * d**3 + 2 * B * d * d + 2 * B * S * d
    return 3 * 2 * run.H * per_head


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--d", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2, help="at least 2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device, epochs = arguments.device, arguments.epochs

    runs = [run for run in experiments.runs("dana-exp1", "paper") if run.d == arguments.d]
    steps = epochs * (runs[0].T // runs[0].batch)
    runs = [dataclasses.replace(run, steps=steps) for run in runs]

    training.train([dataclasses.replace(runs[0], H=2)], device=device)  # warm up
    plain_loop(dataclasses.replace(runs[0], H=2), 1, device)
    stacks = training.stacks(runs)[::-1]  # the long ones first
    workers = arguments.threads if device == "cpu" else 1
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        engine = seconds(
            lambda: list(pool.map(lambda s: training.train(s, device=device), stacks)), device
        )
    plain = seconds(lambda: [plain_loop(run, epochs, device) for run in runs], device)
    print(f"{len(runs)} runs of Exp. 1 at d = {arguments.d}, {steps} steps each, {device}")
    print(f"  plain loop {plain:8.1f} s   {1e3 * plain / steps:8.1f} ms per step of all runs")
    print(f"  engine     {engine:8.1f} s   {1e3 * engine / steps:8.1f} ms per step of all runs")
    print(f"  ratio      {plain / engine:8.1f}")

    rate = product_rate(device)
    done = steps * sum(operations(run) for run in runs) / engine
    print(f"matrix products here: {rate / 1e9:.0f} GFLOP/s; the engine: {done / 1e9:.1f}, ", end="")
    print(f"a fraction of {done / rate:.2f}")

    cell = next(run for run in runs if run.H == 16)
    print("runs per second (of the full 4096 steps) against the size of the stack, H = 16:")
    for size in (1, 2, 5, 10, 20):
        stack = [dataclasses.replace(cell, seed=seed) for seed in range(size)]
        took = seconds(lambda stack=stack: training.train(stack, device=device), device)
        print(f"  {size:3} runs: {size / took * steps / 4096:.3f}")


if __name__ == "__main__":
    main()
