"""The published grids of Dana et al. 2025 as data, and a few of ours on the same model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import models
from .study import Cells, Experiment, grid


def _bigrams(
    cells: Cells, *, N: int, batch: int, batches: int, epochs: int = 64, **changes: Any
) -> Cells:
    """Bigram trainings; the rate falls from 1e-2 to 0.1 ``lr_end`` (``lr`` is scaled twice)."""
    common = {"model": "aot", "variant": "code", "N": N, "n": 2, "T": batch * batches}
    common |= {"width": None, "layers": 1, "steps": epochs * batches, "task": "bigrams"}
    common |= {"context": None, "batch": batch, "schedule": "linear"}
    common |= {"lr": 0.1, "lr_start": 0.1, "lr_end": 0.005}
    return [common | changes | {"d_h": cell.get("d")} | cell for cell in cells]


def _mlp(cells: Cells, width: int, **sizes: Any) -> Cells:
    """One head and a feed-forward layer of ``width d step`` units, from the swept ``step``."""
    plain = [{"d": c["d"], "H": 1, "width": width * c["d"] * c["step"]} for c in cells]
    return _bigrams(plain, model="mlp", **sizes)


def _experiment(
    name: str, what: str, paper: Cells, quick: Cells, seeds: int = 5, **kind: Any
) -> Experiment:
    """An experiment on this paper's model, with two seeds in the profile ``quick``."""
    cells, counts = {"paper": paper, "quick": quick}, {"paper": seeds, "quick": 2}
    return Experiment(f"dana-{name}", "dana", what, cells, counts, **kind)


SMALL = {"N": 50, "batch": 256, "batches": 64}
EXP5 = {"N": 70, "batch": 1024, "batches": 256}
DIM = {"N": 200, "batch": 1024, "batches": 64}
DEEP = {"N": 70, "batch": 512, "batches": 128, "layers": 3}
DEPTH = DEEP | {"lr": 0.05, "lr_start": 0.05, "lr_end": 0.05}  # 2.5e-3 throughout
QUICK = {"N": 10, "batch": 128, "batches": 16, "epochs": 8}
QUICK_DEEP = QUICK | {"layers": 3, "lr": 0.05, "lr_start": 0.05, "lr_end": 0.05}

MLP = {"lr_end": 0.001}

BOTH = ("code", "paper")
LAYERS = ("own-layers",)  # differs from the code in deeper models only
READINGS = tuple(name for name in models.VARIANTS if name not in LAYERS)

PUBLISHED = [
    _experiment(
        *("exp1", "Exp. 1"),
        _bigrams(grid(d=range(3, 14), H=range(1, 32, 5)), **SMALL),
        _bigrams(grid(d=[3, 5], H=[1, 6, 11]), **QUICK),
        curves="d",
    ),
    _experiment(
        *("exp2", "Exp. 2"),
        _bigrams(grid(d=[10], H=[20], d_h=range(1, 11)), **SMALL),
        _bigrams(grid(d=[4], H=[5], d_h=[1, 2, 4]), **QUICK),
        variants=READINGS,
    ),
    _experiment(
        *("exp3", "Exp. 3"),
        _bigrams(grid(d=range(5, 16), H=[20], d_h=[10]), **SMALL),
        _bigrams(grid(d=[2, 4, 6], H=[5], d_h=[4]), **QUICK),
        variants=BOTH,
    ),
    _experiment(
        *("exp5-aot", "Exp. 5, attention"),
        _bigrams(grid(d=[7, 10, 13], H=range(1, 32, 5)), **EXP5),
        _bigrams(grid(d=[4], H=[1, 3, 6]), **QUICK),
        curves="d",
    ),
    _experiment(
        *("exp5-mlp", "Exp. 5, MLP"),
        _mlp(grid(d=[7, 10, 13], step=range(0, 31, 5)), 2, **MLP, **EXP5),
        _mlp(grid(d=[4], step=[0, 2, 5]), 2, **MLP, **QUICK),
        curves="d",
    ),
    _experiment(
        *("exp6", "Exp. 6"),
        _bigrams(grid(d=[2], H=range(1, 22, 4)), **SMALL | {"N": 10}),
        _bigrams(grid(d=[2], H=[1, 5, 9]), **QUICK),
        seeds=20,
        variants=BOTH,
    ),
    _experiment(
        *("dim1", "Exp. 1, wider"),
        _bigrams(grid(d=[40, 50, 60], H=range(1, 12, 2)), **DIM),
        _bigrams(grid(d=[8], H=[1, 3]), **QUICK),
        curves="d",
    ),
    _experiment(
        *("dim2", "Exp. 2, wider"),
        _bigrams(grid(d=[50], H=[11], d_h=[1, *range(5, 51, 5)]), **DIM),
        _bigrams(grid(d=[8], H=[3], d_h=[1, 4, 8]), **QUICK),
        variants=BOTH,
    ),
    _experiment(
        *("dim5", "Exp. 5, wider"),
        _mlp(grid(d=[40, 50, 60], step=range(0, 21, 4)), 1, **MLP, **DIM),
        _mlp(grid(d=[8], step=[0, 4]), 1, **MLP, **QUICK),
        curves="d",
    ),
    _experiment(
        *("depth1", "Exp. 1, three layers"),
        _bigrams(grid(d=[7, 10, 13], H=range(1, 22, 4)), **DEPTH),
        _bigrams(grid(d=[3], H=[1, 5]), **QUICK_DEEP),
        curves="d",
    ),
    _experiment(
        *("depth2", "Exp. 2, three layers"),
        _bigrams(grid(d=[10], H=[21], d_h=range(1, 11)), **DEPTH),
        _bigrams(grid(d=[4], H=[3], d_h=[1, 4]), **QUICK_DEEP),
    ),
    _experiment(
        *("depth5", "Exp. 5, three layers"),
        _mlp(grid(d=[7, 10, 13], step=range(0, 41, 8)), 1, **DEPTH),
        _mlp(grid(d=[3], step=[0, 8]), 1, **QUICK_DEEP),
        curves="d",
    ),
]


# --- Not in the paper -----------------------------------------------------------------------------


def _budget(d: int, total: int, widths: Iterable[int], **sizes: Any) -> Cells:
    """Own maps take ``4 d d_h H`` parameters; ``H d_h = total`` fixes them."""
    return _bigrams([{"d": d, "H": total // d_h, "d_h": d_h} for d_h in widths], **sizes)


def _on_tables(tables: int, cells: Cells) -> Cells:
    """Every cell on each of some tables of answers, which all its seeds share, as published."""
    return [cell | {"table": table} for cell in cells for table in range(tables)]


def _at_other_rates(name: str, what: str, paper: Cells, quick: Cells, seeds: int = 5) -> Experiment:
    """Is the MLP harder to train? Exp. 5 at its middle size, at other rates than ``lr = 0.1``."""
    rates = (0.01, 0.03, 0.3, 1.0)
    cells = ([cell | {"lr": lr} for cell in each for lr in rates] for each in (paper, quick))
    what = f"Exp. 5, {what} at other rates (not in the paper)"
    return _experiment(name, what, *cells, seeds, curves="d")


OURS = [
    _experiment(  # one budget of parameters, spent on few wide heads or on many narrow ones
        *("budget", "Exp. 2 at equal parameters (not in the paper)"),
        _budget(10, 100, (1, 2, 5, 10), **SMALL),
        _budget(4, 8, (1, 4), **QUICK),
        variants=BOTH,
    ),
    _experiment(
        "exp5-mlp-one-table",
        "Exp. 5, the widest MLP at d = 10, seeds on one table (not in the paper)",
        _on_tables(3, _mlp(grid(d=[10], step=[30]), 2, **MLP, **EXP5)),
        _on_tables(2, _mlp(grid(d=[4], step=[5]), 2, **MLP, **QUICK)),
    ),
    _experiment(
        *("exp6-one-table", "Exp. 6, seeds on one table (not in the paper)"),
        _on_tables(5, _bigrams(grid(d=[2], H=range(1, 22, 4)), **SMALL | {"N": 10})),
        _on_tables(2, _bigrams(grid(d=[2], H=[1, 5]), **QUICK)),
        seeds=20,
    ),
    _at_other_rates(
        *("exp5-aot-rates", "attention"),
        _bigrams(grid(d=[7, 10, 13], H=[21]), **EXP5),
        _bigrams(grid(d=[4], H=[3]), **QUICK),
    ),
    _at_other_rates(
        *("exp5-mlp-rates", "MLP"),
        _mlp(grid(d=[7, 10, 13], step=[20]), 2, **MLP, **EXP5),
        _mlp(grid(d=[4], step=[2]), 2, **MLP, **QUICK),
    ),
    _at_other_rates(  # about equal parameters: a head has 4 d^2, a unit of the MLP 2 d + 1
        *("dim5-aot-rates", "wider, attention"),
        _bigrams(grid(d=[40, 60], H=[7]), **DIM),
        _bigrams(grid(d=[8], H=[3]), **QUICK),
        seeds=3,
    ),
    _at_other_rates(
        *("dim5-mlp-rates", "wider, MLP"),
        _mlp(grid(d=[40, 60], step=[12]), 1, **MLP, **DIM),
        _mlp(grid(d=[8], step=[4]), 1, **MLP, **QUICK),
        seeds=3,
    ),
    _experiment(
        *("exp5-aot-longer", "Exp. 5, attention, four times as long (not in the paper)"),
        _bigrams(grid(d=[10], H=[21]), **EXP5, epochs=256),
        _bigrams(grid(d=[4], H=[3]), **QUICK | {"epochs": 32}),
        seeds=3,
    ),
    _experiment(
        *("exp5-mlp-longer", "Exp. 5, MLP, four times as long (not in the paper)"),
        _mlp(grid(d=[10], step=[20]), 2, **MLP, **EXP5, epochs=256),
        _mlp(grid(d=[4], step=[2]), 2, **MLP, **QUICK | {"epochs": 32}),
        seeds=3,
    ),
    _experiment(  # as many heads in one layer as in three, at a falling and at a constant rate
        *("depth-counts", "Exp. 1, three layers and one of as many heads (not in the paper)"),
        _bigrams(grid(d=[7, 10], H=[1, 5]), **DEEP)
        + _bigrams(grid(d=[7, 10], H=[3, 15]), **DEEP | {"layers": 1})
        + _bigrams(grid(d=[7, 10, 13], H=[3, 15]), **DEPTH | {"layers": 1}),
        _bigrams(grid(d=[3], H=[1]), **QUICK | {"layers": 3})
        + _bigrams(grid(d=[3], H=[3]), **QUICK)
        + _bigrams(grid(d=[3], H=[3]), **QUICK_DEEP | {"layers": 1}),
        seeds=3,
        curves="d",
    ),
    _experiment(  # positions and maps for every layer, a few cells of the deep experiments
        "depth-own-layers",
        "Exps. 2 and 5, three layers with positions and maps of their own (not in the paper)",
        _bigrams(grid(d=[10], H=[21], d_h=[2, 3, 5]), **DEPTH)
        + _mlp(grid(d=[13], step=[8]), 1, **DEPTH),
        _bigrams(grid(d=[4], H=[3], d_h=[1]), **QUICK_DEEP)
        + _mlp(grid(d=[3], step=[8]), 1, **QUICK_DEEP),
        variants=LAYERS,
        curves="model",
    ),
]
