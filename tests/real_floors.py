"""Floors of real modules of transformers at tiny sizes, beside the ranks of their derivatives.

``python tests/real_floors.py 40`` draws so many configurations of ten families, in turn.
"""

import json
import random
import sys

from attnmem.theory.floors import model_floor
from attnmem_yours.families import read, row_of

import real

FAMILIES = ["llama", "gpt2", "qwen2", "qwen3", "gpt_neox", "bert"]
FAMILIES += ["gemma2", "olmo2", "phi", "starcoder2"]
ALL_HEADS_HAVE_KEYS = "olmo2", "phi"


def drawn(kind, rng):
    """Sizes of a tiny model, under the names of its family."""
    row, heads = row_of(kind), rng.choice((2, 2, 3))
    groups = heads if kind in ALL_HEADS_HAVE_KEYS else rng.choice((1, heads))
    sizes = {
        "width": 2 * heads,
        "layers": rng.choice((2, 2, 3)),
        "heads": heads,
        "groups": groups,
        "head": 2,
        "inner": rng.randint(2, 6),
        "vocab": rng.randint(16, 24),
    }
    return {row[x]: size for x, size in sizes.items() if isinstance(row[x], str) and row[x]}


def compared(kind, own):
    """A module's floor, and of so many independent directions of its derivative the weakest."""
    floor = model_floor(read(real.configuration(kind, own)[1])).examples
    values, numbers = real.singular_values(kind, own)
    least = values[floor - 1].item() if floor <= len(values) else 0.0
    return {"kind": kind, "own": own, "numbers": numbers, "floor": floor, "least": least}


def main(number):
    real.use_float64_and_no_eps()
    rng, results = random.Random(0), []
    for i in range(number):
        kind = FAMILIES[i % len(FAMILIES)]
        results.append(compared(kind, drawn(kind, rng)))
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]))
