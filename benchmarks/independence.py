"""The sampled rank test against the loop that the papers' notebooks have: one rank at a time.

    python benchmarks/independence.py [--samples 1000] [--threads 1]

2000 vectors of dimension 768 whose coordinates fall by eight orders; 197 of them at a time, as for
Assumption 1, in both precisions. Printed: seconds of both for the same subsets, how many each calls
dependent, and the time that 5000 subsets take.
"""

from __future__ import annotations

import argparse
import time

import torch

from attnmem.theory.independence import sampled_independence


def graded(T: int = 2000, d: int = 768) -> torch.Tensor:
    """Gaussian vectors, coordinate ``k`` scaled so that the last is 1e-8 of the first."""
    g = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -8, d, dtype=torch.float64)
    return torch.randn(T, d, generator=g, dtype=torch.float64) * scales


def one_at_a_time(vectors: torch.Tensor, size: int, samples: int) -> int:
    """How many of the subsets that ``sampled_independence`` draws with seed 0 are dependent."""
    g = torch.Generator().manual_seed(0)
    subsets = torch.rand(samples, len(vectors), generator=g).topk(size, dim=1).indices
    return sum(int(torch.linalg.matrix_rank(vectors[subset])) < size for subset in subsets)


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    samples, size = arguments.samples, 197
    print(f"{samples} subsets of {size} among 2000 x 768, {arguments.threads} threads")
    for dtype in (torch.float32, torch.float64):
        vectors = graded().to(dtype)
        start = time.perf_counter()
        plain = one_at_a_time(vectors, size, samples)
        middle = time.perf_counter()
        ours = sampled_independence(vectors, size, samples=samples, seed=0).dependent
        end = time.perf_counter()
        print(
            f"  {dtype}: one at a time {middle - start:.1f} s, here {end - middle:.1f} s, "
            f"ratio {(middle - start) / (end - middle):.1f}; dependent {plain} and {ours}; "
            f"5000 subsets here: {5000 / samples * (end - middle):.0f} s"
        )


if __name__ == "__main__":
    main()
