"""Steps of Mahdavi et al.'s trainings, one stack alone on a device.

    python benchmarks/gpu.py [--device cuda] [--steps N] [--rounds 3]

Each stack holds the first seeds of one cell, as a sweep would train them.
Printed: the fastest round. The rate counts the operations of the matrix products, as
``ensemble.py`` does. ``gpu.txt`` has what an H200 and an H100 gave.
"""

from __future__ import annotations

import argparse
import time

import torch
from ensemble import operations

from attnmem.lab import experiments
from attnmem.lab.protocols import PROTOCOLS
from attnmem.lab.training import device_name, device_settings

STACKS = [  # of which figure, its fields, how many runs
    ("mahdavi-fig2a", {"H": 20, "T": 10_000}, 1),
    ("mahdavi-fig2a", {"H": 20, "T": 10_000}, 6),
    ("mahdavi-fig2a", {"H": 60, "T": 10_000}, 6),
    ("mahdavi-fig2b", {"n": 60, "T": 10_000}, 6),
    ("mahdavi-fig2c", {"d_h": 30, "T": 10_000}, 6),
    ("mahdavi-fig5-shared-heads", {"H": 60, "T": 10_000}, 6),
    ("mahdavi-fig4-context", {"n": 10, "T": 20_000}, 6),
    ("mahdavi-fig4-context", {"n": 60, "T": 20_000}, 6),
    ("mahdavi-fig4-heads", {"H": 10, "T": 30_000}, 6),
    ("mahdavi-fig4-heads", {"H": 60, "T": 30_000}, 6),
    ("mahdavi-fig5-random-context", {"n": 30, "T": 10_000}, 6),
]


def timed(runs, device: torch.device, steps: int, rounds: int) -> float:
    """Seconds of a step of a stack, its data made and its graph captured before."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    protocol = PROTOCOLS[runs[0].task](runs, device)
    for _ in range(2):  # the first steps are made one by one
        protocol.advance()
    best = float("inf")
    for _ in range(rounds):
        synchronize()
        start, before = time.perf_counter(), protocol.count
        while protocol.count < before + steps:
            protocol.advance()
        synchronize()
        best = min(best, (time.perf_counter() - start) / (protocol.count - before))
    if protocol.captured:
        protocol.captured.release()
    return best


def main() -> None:
    """Time every stack and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=400, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device = torch.device(args.device)
    print(f"{device_name(device)}, torch {torch.__version__}; float32, no TF32.")
    print(f"{'figure':28}{'stack':18}{'runs':>5}{'ms/step':>9}{'run-steps/s':>13}{'TFLOP/s':>9}")
    with device_settings(device, tf32=False):
        for name, fields, count in STACKS:
            runs = [
                run
                for run in experiments.runs(name, "paper")
                if all(getattr(run, field) == value for field, value in fields.items())
            ][:count]
            seconds = timed(runs, device, args.steps, args.rounds)
            flops = sum(operations(run) for run in runs) / seconds
            stack = ", ".join(f"{field} = {value}" for field, value in fields.items())
            print(
                f"{name:28}{stack:18}{len(runs):5}{1000 * seconds:9.2f}"
                f"{len(runs) / seconds:13,.0f}{flops / 1e12:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
