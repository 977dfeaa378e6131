"""What it is worth to flush denormal numbers, on one training of Mahdavi et al.'s Figure 2a.

    python benchmarks/denormals.py [--heads 5] [--steps 40000]

The engine trains the same run twice on one thread of a processor, side by side in two processes:
as it always does, with numbers below the normal range rounded to zero, and without. Printed:
seconds of both, their ratio, and the losses of both.
"""

from __future__ import annotations

import argparse
import dataclasses
from concurrent.futures import ProcessPoolExecutor

import torch
from ensemble import seconds

from attnmem.lab import experiments, training


def train(heads: int, steps: int, flushed: bool) -> tuple[float, float]:
    """Seconds and final loss of one training."""
    torch.set_num_threads(1)
    [run] = experiments.runs("mahdavi-fig2a", "paper", 1, where={"H": heads, "T": 10_000})
    run = dataclasses.replace(run, steps=steps, profile="benchmark")
    if not flushed:
        torch.set_flush_denormal = lambda flush: flush
    losses: list[float] = []
    took = seconds(lambda: losses.append(training.train([run])[0].loss), "cpu")
    return took, losses[0]


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, default=5, help="one of the figure's")
    parser.add_argument("--steps", type=int, default=40_000)
    arguments = parser.parse_args()
    sizes = (arguments.heads, arguments.steps)
    with ProcessPoolExecutor(2) as pool:
        kept, flushed = (pool.submit(train, *sizes, which) for which in (False, True))
    (slow, before), (fast, after) = kept.result(), flushed.result()
    print(f"Figure 2a, H = {sizes[0]}, T = 10000, {sizes[1]} steps, one thread each")
    print(f"  denormals kept    {slow:7.1f} s   loss {before:.6f}")
    print(f"  denormals flushed {fast:7.1f} s   loss {after:.6f}")
    print(f"  ratio             {slow / fast:7.1f}")


if __name__ == "__main__":
    main()
