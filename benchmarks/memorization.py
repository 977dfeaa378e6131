"""The engine against a textbook trainer on small cells of Mahdavi et al.'s protocol.

    python benchmarks/memorization.py [--seeds 4] [--steps 6000] [--device cpu]

The textbook trainer trains one model at a time as such code is usually written: an ``nn.Module``
that embeds and projects every token of every example, a DataLoader, PyTorch's Adam and
``LambdaLR``, its own initial weights and data. The engine trains the same cells, all seeds of one
at once, both on one thread. Printed for each cell: final losses of both (mean and standard
deviation over seeds), which must agree within that spread, and milliseconds per step of one model.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics

import torch
import torch.nn.functional as F
from ensemble import seconds
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from attnmem.lab import experiments, protocols, training
from attnmem.lab.store import Run

CELLS = [  # H, n, T
    (2, 4, 1000),
    (4, 4, 2000),
    (4, 8, 2000),
]


class TextbookModel(nn.Module):
    """Embedding, positions, one attention layer with ``d_v = 1``, decoder; keys per example."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.n = run.n
        self.embed = nn.Linear(run.d, run.d)
        self.W_Q, self.W_K = (
            nn.ParameterList(self._xavier(run.d, run.d_h) for _ in range(run.H)) for _ in range(2)
        )
        self.W_V = nn.ParameterList(self._xavier(run.d, 1) for _ in range(run.H))
        self.W_O = self._xavier(run.H, run.d)
        self.decode = nn.Linear(run.d, run.N)
        place = torch.arange(run.n + 1)[:, None]
        frequency = torch.exp(-math.log(10000.0) * torch.arange(0, run.d, 2) / run.d)
        positions = torch.zeros(run.n + 1, run.d)
        positions[:, 0::2], positions[:, 1::2] = (
            torch.sin(place * frequency),
            torch.cos(place * frequency),
        )
        self.register_buffer("positions", positions)

    @staticmethod
    def _xavier(*shape: int) -> nn.Parameter:
        return nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))

    def forward(self, contexts: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Logits over the classes, from contexts ``(B, n, d)`` and queries ``(B, d)``."""
        E = self.embed(contexts) + self.positions[1:]
        e = self.embed(queries) + self.positions[0]
        heads = []
        for W_Q, W_K, W_V in zip(self.W_Q, self.W_K, self.W_V, strict=True):
            logits = ((E @ W_K) @ (e @ W_Q)[:, :, None])[:, :, 0] / 8
            alpha = logits.softmax(dim=-1)
            heads.append((alpha[:, None] @ (E @ W_V))[:, 0])
        return self.decode(torch.cat(heads, dim=-1) @ self.W_O)


def textbook(run: Run, device: str) -> float:
    """Train one model; the least mean loss over the whole set, looked at every 500 steps."""
    torch.manual_seed(run.seed)
    model = TextbookModel(run).to(device)
    shared = run.context == "shared"
    contexts = torch.rand(1 if shared else run.T, run.n, run.d).expand(run.T, -1, -1).to(device)
    queries = torch.rand(run.T, run.d).to(device)
    labels = torch.randint(run.N, (run.T,)).to(device)
    dataset = TensorDataset(torch.arange(run.T))
    loader = DataLoader(dataset, batch_size=run.batch, shuffle=True, drop_last=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: protocols.warmup_cosine(run, step) / run.lr
    )
    best, step = math.inf, 0
    while step < run.steps:
        for (index,) in loader:
            loss = F.cross_entropy(model(contexts[index], queries[index]), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % 500 == 0:
                with torch.no_grad():
                    best = min(best, F.cross_entropy(model(contexts, queries), labels).item())
            if step == run.steps:
                break
    return best


def cell(H: int, n: int, T: int, context: str, seeds: int, steps: int) -> list[Run]:
    """The runs of one cell, in the published protocol but for the number of steps."""
    [first, *_] = experiments.runs("mahdavi-fig2a", "paper", 1)
    first = dataclasses.replace(
        first, H=H, n=n, T=T, context=context, steps=steps, early_stop=False, profile="benchmark"
    )
    return [dataclasses.replace(first, seed=seed) for seed in range(seeds)]


def shown(losses: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(losses):.4f} +- {statistics.stdev(losses):.4f}"


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=4, help="at least 2")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device, seeds, steps = arguments.device, arguments.seeds, arguments.steps
    print(f"{seeds} seeds, {steps} steps, {device}; final loss, and ms per step of one model")
    for context in ("shared", "random"):
        for H, n, T in CELLS:
            runs = cell(H, n, T, context, seeds, steps)
            losses: dict[str, list[float]] = {}

            def plain(runs=runs, losses=losses) -> None:
                losses["textbook"] = [textbook(run, device) for run in runs]

            def stacked(runs=runs, losses=losses) -> None:
                losses["engine"] = [found.loss for found in training.train(runs, device=device)]

            took = {name: seconds(work, device) for name, work in (("t", plain), ("e", stacked))}
            ms = {name: 1e3 * time / seeds / steps for name, time in took.items()}
            print(
                f"{context:6} H={H} n={n} T={T}: textbook {shown(losses['textbook'])}, "
                f"engine {shown(losses['engine'])}; {ms['t']:.2f} and {ms['e']:.2f} ms, "
                f"ratio {took['t'] / took['e']:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
