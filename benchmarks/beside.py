"""The engine of this checkout beside that of another one: the time of a step, cell by cell.

    python benchmarks/beside.py OTHER_CHECKOUT [--only exp1] [--rounds 5]

Each checkout trains the same runs in a process of its own, on one thread, in turn, so that what
else runs on the machine slows both. Printed: milliseconds a step of the fastest round of both, and
their ratio, below 1 where this checkout is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def cells() -> dict[str, list]:
    """Stacks of short runs by name: of Dana et al.'s Experiments 1 and 5, and what departs."""
    from attnmem.lab import experiments, training

    def short(runs, steps, **changes):
        kept = {"profile": "benchmark", "steps": steps, "T": steps * runs[0].batch}
        return [dataclasses.replace(run, **kept | changes) for run in runs]

    first = training.stacks(experiments.runs("dana-exp1", "paper", 5, where={"d": 10}))
    found = {f"exp1, H = {stack[0].H}": short(stack, 512) for stack in first}
    for model in ("aot", "mlp"):
        stacks = training.stacks(experiments.runs(f"dana-exp5-{model}", "paper", 5))
        for stack in (stacks[0], stacks[-1]):
            found[f"exp5 {model}, d = {stack[0].d}"] = short(stack, 64)
    [some] = [stack for stack in first if stack[0].H == 16]
    found["wide, d = 40"] = short(some, 64, d=40, d_h=40, H=11)
    found["narrow heads, d = 20, d_h = 2"] = short(some, 64, d=20, d_h=2, variant="own-maps")
    found["narrow heads, d = 40, d_h = 4"] = short(some, 64, d=40, d_h=4, variant="own-maps")
    found["three layers"] = short(some, 64, layers=3)
    [run, *_] = experiments.runs("mahdavi-fig2a", "paper", 1)
    for context, n in (("shared", 32), ("random", 5), ("random", 32)):
        sizes = {"context": context, "H": 20, "n": n, "T": 4 * run.batch}
        sizes |= {"early_stop": False, "evaluate_every": 100}
        found[f"mha, {context}, n = {n}"] = short([run], 100, **sizes)
    return found


def serve() -> None:
    """Train the cells whose names come in, one a line, and answer with milliseconds a step."""
    import torch

    from attnmem.lab import training

    torch.set_num_threads(1)
    known = cells()
    print("\t".join(known), flush=True)
    for line in sys.stdin:
        runs, start = known[line.strip()], time.perf_counter()
        training.train(runs)
        print(1e3 * (time.perf_counter() - start) / runs[0].steps, flush=True)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--only", default="", help="what the names of cells have in common")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sides = []
    for root in (arguments.other, ROOT):
        environment = os.environ | {"PYTHONPATH": str(root / "lib")}
        command = [sys.executable, __file__, "serve"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        sides.append(subprocess.Popen(command, env=environment, **pipes))
    names, _ = (side.stdout.readline().rstrip("\n").split("\t") for side in sides)

    def asked(side, name) -> float:
        print(name, file=side.stdin, flush=True)
        return float(side.stdout.readline())

    for name in names:
        if arguments.only in name:
            rounds = [[asked(side, name) for side in sides] for _ in range(arguments.rounds)]
            other, ours = (min(took) for took in zip(*rounds, strict=True))
            print(f"{name:32} {other:8.2f} {ours:8.2f} {ours / other:6.2f}", flush=True)
    for side in sides:
        side.stdin.close()
        side.wait()


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
