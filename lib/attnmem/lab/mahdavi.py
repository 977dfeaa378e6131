"""The published grids of Mahdavi et al. 2024 as data, and one of ours on the same model."""

from __future__ import annotations

from typing import Any

from .study import Cells, Experiment, grid

HEADS = CONTEXTS = (1, 5, 10, 20, 30, 40, 50, 60)


def memorization(
    cells: Cells, *, context: str, real: bool = False, least_steps: int = 50_000, **changes: Any
) -> Cells:
    """Cells of the paper's protocol: dimension 64, 100 classes or real labels.

    ``cells`` are the fields that differ from cell to cell; ``T`` is left open if it is not among
    them. There are 500 epochs, or ``least_steps`` if these are more.
    """
    common = {"model": "mha", "variant": "code", "N": None if real else 100, "d": 64, "d_h": 64}
    common |= {"width": None, "layers": 1, "task": "reals" if real else "classes"}
    common |= {"context": context, "batch": 256, "schedule": "warmup-cosine", "lr": 1e-3}
    common |= {"lr_start": 0.01, "lr_end": 0.0, "evaluate_every": 500, "early_stop": not real}
    return [
        common | {"steps": max(500 * cell.get("T", 0) // 256, least_steps)} | changes | cell
        for cell in cells
    ]


# The quick profile: a twenty-fifth of the steps, at ten times the rate.
SMALLER = {"d": 16, "d_h": 16, "evaluate_every": 250, "least_steps": 2000, "lr": 1e-2}


def _thousands(start: int, stop: int, step: int) -> range:
    return range(start * 1000, stop * 1000 + 1, step * 1000)


def _experiment(
    name: str, what: str, paper: Cells, quick: Cells, seeds: int, curves: str | None = None
) -> Experiment:
    cells, counts = {"paper": paper, "quick": quick}, {"paper": seeds, "quick": 2}
    return Experiment(f"mahdavi-{name}", "mahdavi", what, cells, counts, curves=curves)


def _figure(name: str, what: str, paper: Cells, quick: Cells, **protocol: Any) -> Experiment:
    """A figure with a curve for each number of examples."""
    cells = memorization(paper, **protocol), memorization(quick, **protocol | SMALLER)
    return _experiment(name, what, *cells, seeds=6, curves="T")


def _heads(name: str, what: str, T: range, **protocol: Any) -> Experiment:
    quick = grid(H=[1, 2, 4, 8], n=[8], T=[250, 500, 1000])
    return _figure(name, what, grid(H=HEADS, n=[32], T=T), quick, **protocol)


def _tokens(name: str, what: str, T: range, **protocol: Any) -> Experiment:
    quick = grid(H=[4], n=[1, 2, 4, 8, 16], T=[250, 500])
    return _figure(name, what, grid(H=[20], n=CONTEXTS, T=T), quick, **protocol)


SHARED, RANDOM = {"context": "shared"}, {"context": "random"}
LONG = SHARED | {"least_steps": 300_000}
TO_THE_END = LONG | {"early_stop": False}
REAL_SHARED, REAL_RANDOM = SHARED | {"real": True}, RANDOM | {"real": True}
SIZES_3 = [{"H": 4, "n": 32, "T": 550}, {"H": 8, "n": 32, "T": 1300}]
QUICK_3 = [{"H": 4, "n": 8, "T": 60}, {"H": 8, "n": 8, "T": 200}]

PUBLISHED = [
    _heads("fig2a", "Figure 2a", _thousands(10, 40, 10), **SHARED),
    _tokens("fig2b", "Figure 2b", _thousands(6, 18, 4), **SHARED),
    _figure(
        "fig2c",
        "Figure 2c",
        grid(H=[30], n=[32], d_h=[*range(10, 61, 5), 64], T=_thousands(10, 20, 5)),
        grid(H=[4], n=[8], d_h=[1, 2, 4, 8, 16], T=[250, 500]),
        **LONG,
    ),
    _figure("fig3", "Figure 3", SIZES_3, QUICK_3, **TO_THE_END),
    _heads("fig4-heads", "Figure 4, left", _thousands(30, 130, 20), **RANDOM),
    _tokens("fig4-context", "Figure 4, right", _thousands(20, 60, 10), **RANDOM),
    _heads("fig5-shared-heads", "Figure 5, shared, heads", _thousands(10, 30, 5), **REAL_SHARED),
    _tokens(
        "fig5-shared-context", "Figure 5, shared, tokens", _thousands(10, 25, 5), **REAL_SHARED
    ),
    _heads("fig5-random-heads", "Figure 5, own, heads", _thousands(10, 90, 20), **REAL_RANDOM),
    _tokens("fig5-random-context", "Figure 5, own, tokens", _thousands(10, 90, 20), **REAL_RANDOM),
]


# --- Not in the paper: longer, with a short last batch, and on one set of examples ----------------


def _changed(
    name: str, what: str, paper: Cells, quick: Cells, seeds: int, **field: Any
) -> Experiment:
    """A part of a published grid with one field changed."""
    cells = ([cell | field for cell in each] for each in (paper, quick))
    return _experiment(name, f"{what} (not in the paper)", *cells, seeds=seeds)


FIGURE_2A = (
    memorization(grid(H=[5, 10], n=[32], T=[10_000]), **SHARED),
    memorization(grid(H=[2], n=[8], T=[250]), **SHARED | SMALLER),
)
FIGURE_3 = memorization(SIZES_3, **TO_THE_END), memorization(QUICK_3[:1], **TO_THE_END | SMALLER)
SHORT = {"last_batch": "short"}  # an epoch's last batch holds what is left, as in the code
SAME = {"table": 0}  # all seeds have the same examples

OURS = [
    # Does Figure 2a start flat for want of training? Its smallest size, longer.
    _experiment(
        *("fig2a-longer", "Figure 2a, twice as long (not in the paper)"),
        memorization(grid(H=[1, 5, 10, 20], n=[32], T=[10_000]), **SHARED, least_steps=100_000),
        memorization(grid(H=[1, 2, 4], n=[8], T=[250]), **SHARED | SMALLER | {"least_steps": 4000}),
        seeds=1,
    ),
    _changed("fig2a-short", "Figure 2a, short last batch", *FIGURE_2A, 3, **SHORT),
    _changed("fig2a-shared", "Figure 2a, the seeds' data shared", *FIGURE_2A, 3, **SAME),
    _changed("fig3-short", "Figure 3, short last batch", *FIGURE_3, 6, **SHORT),
]
