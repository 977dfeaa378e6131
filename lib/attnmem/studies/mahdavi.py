"""The published grids of Mahdavi et al. 2024 as data, and one of ours on the same model."""

from __future__ import annotations

from typing import Any

from .trainings import Cells, Experiment, grid

HEADS = CONTEXTS = (1, 5, 10, 20, 30, 40, 50, 60)


def memorization(
    cells: Cells, *, context: str, real: bool = False, least_steps: int = 50_000, **changes: Any
) -> Cells:
    """Cells of the paper's protocol: dimension 64, 100 classes or real labels.

    Args:
        cells: The fields that differ from cell to cell, ``T`` among them.
        context: ``shared`` by all examples, or ``random`` for each.
        real: Whether labels are real numbers.
        least_steps: The number of steps, if 500 epochs are fewer.
        **changes: Fields that differ from the paper's.

    Returns:
        All fields of each cell.
    """
    common = {
        "model": "mha",
        "variant": "code",
        "N": None if real else 100,
        "d": 64,
        "d_h": 64,
        "width": None,
        "layers": 1,
        "task": "reals" if real else "classes",
        "context": context,
        "batch": 256,
        "schedule": "warmup-cosine",
        "lr": 1e-3,
        "lr_start": 0.01,
        "lr_end": 0.0,
        "evaluate_every": 500,
        "early_stop": not real,
    }
    return [
        common | {"steps": max(500 * cell["T"] // 256, least_steps)} | changes | cell
        for cell in cells
    ]


# The quick profile: a twenty-fifth of the steps, at ten times the rate.
SMALLER = {"d": 16, "d_h": 16, "evaluate_every": 250, "least_steps": 2000, "lr": 1e-2}


def _thousands(start: int, stop: int, step: int) -> range:
    return range(start * 1000, stop * 1000 + 1, step * 1000)


def _figure(
    name: str,
    what: str,
    paper: Cells,
    quick: Cells,
    context: str,
    least_steps: int = 50_000,
    curves: str = "T",
    **kind: Any,
) -> Experiment:
    cells = {
        "paper": memorization(paper, context=context, least_steps=least_steps, **kind),
        "quick": memorization(quick, context=context, **SMALLER | kind),
    }
    seeds = {"paper": 6, "quick": 2}
    return Experiment(f"mahdavi-{name}", "mahdavi", what, cells, seeds, curves=curves)


QUICK_H = grid(H=[1, 2, 4, 8], n=[8], T=[250, 500, 1000])
QUICK_N = grid(H=[4], n=[1, 2, 4, 8, 16], T=[250, 500])

PUBLISHED = [
    _figure(
        "fig2a",
        "Figure 2a",
        grid(H=HEADS, n=[32], T=_thousands(10, 40, 10)),
        QUICK_H,
        "shared",
    ),
    _figure(
        "fig2b",
        "Figure 2b",
        grid(H=[20], n=CONTEXTS, T=_thousands(6, 18, 4)),
        QUICK_N,
        "shared",
    ),
    _figure(
        "fig2c",
        "Figure 2c",
        grid(H=[30], n=[32], d_h=[*range(10, 61, 5), 64], T=_thousands(10, 20, 5)),
        grid(H=[4], n=[8], d_h=[1, 2, 4, 8, 16], T=[250, 500]),
        "shared",
        least_steps=300_000,
    ),
    _figure(
        "fig3",
        "Figure 3",
        [{"H": 4, "n": 32, "T": 550}, {"H": 8, "n": 32, "T": 1300}],
        [{"H": 4, "n": 8, "T": 60}, {"H": 8, "n": 8, "T": 200}],
        "shared",
        least_steps=300_000,
        early_stop=False,
    ),
    _figure(
        "fig4-heads",
        "Figure 4, left",
        grid(H=HEADS, n=[32], T=_thousands(30, 130, 20)),
        QUICK_H,
        "random",
    ),
    _figure(
        "fig4-context",
        "Figure 4, right",
        grid(H=[20], n=CONTEXTS, T=_thousands(20, 60, 10)),
        QUICK_N,
        "random",
    ),
    _figure(
        "fig5-shared-heads",
        "Figure 5",
        grid(H=HEADS, n=[32], T=_thousands(10, 30, 5)),
        QUICK_H,
        "shared",
        real=True,
    ),
    _figure(
        "fig5-shared-context",
        "Figure 5",
        grid(H=[20], n=CONTEXTS, T=_thousands(10, 25, 5)),
        QUICK_N,
        "shared",
        real=True,
    ),
    _figure(
        "fig5-random-heads",
        "Figure 5",
        grid(H=HEADS, n=[32], T=_thousands(10, 90, 20)),
        QUICK_H,
        "random",
        real=True,
    ),
    _figure(
        "fig5-random-context",
        "Figure 5",
        grid(H=[20], n=CONTEXTS, T=_thousands(10, 90, 20)),
        QUICK_N,
        "random",
        real=True,
    ),
]


# --- Not in the paper: longer, with a short last batch, and on one set of examples ----------------


def _ours(name: str, what: str, paper: Cells, quick: Cells, seeds: int) -> Experiment:
    cells, counts = {"paper": paper, "quick": quick}, {"paper": seeds, "quick": 2}
    return Experiment(f"mahdavi-{name}", "mahdavi", f"{what} (not in the paper)", cells, counts)


def _short(cells: Cells) -> Cells:
    """An epoch's last batch holds what is left, as in the published code."""
    return [cell | {"last_batch": "short"} for cell in cells]


def _shared(cells: Cells) -> Cells:
    """All seeds have the same examples."""
    return [cell | {"table": 0} for cell in cells]


SMALL_2A = memorization(grid(H=[5, 10], n=[32], T=[10_000]), context="shared")
SIZES_3 = memorization(
    [{"H": 4, "n": 32, "T": 550}, {"H": 8, "n": 32, "T": 1300}],
    context="shared",
    least_steps=300_000,
    early_stop=False,
)
QUICK_2A = memorization(grid(H=[2], n=[8], T=[250]), context="shared", **SMALLER)
QUICK_3 = memorization(
    [{"H": 4, "n": 8, "T": 60}], context="shared", **SMALLER | {"early_stop": False}
)

OURS = [
    # Does Figure 2a start flat for want of training? Its smallest size, longer.
    _ours(
        "fig2a-longer",
        "Figure 2a, twice as long",
        memorization(
            grid(H=[1, 5, 10, 20], n=[32], T=[10_000]), context="shared", least_steps=100_000
        ),
        memorization(
            grid(H=[1, 2, 4], n=[8], T=[250]), context="shared", **SMALLER | {"least_steps": 4000}
        ),
        seeds=1,
    ),
    _ours("fig2a-short", "Figure 2a, short last batch", _short(SMALL_2A), _short(QUICK_2A), 3),
    _ours(
        "fig2a-shared", "Figure 2a, the seeds' data shared", _shared(SMALL_2A), _shared(QUICK_2A), 3
    ),
    _ours("fig3-short", "Figure 3, short last batch", _short(SIZES_3), _short(QUICK_3), 6),
]
