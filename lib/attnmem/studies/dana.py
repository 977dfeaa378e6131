"""The published grids of Dana et al. 2025 as data, and a few of ours on the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .. import training
from .trainings import Cells, Experiment, grid


def _bigrams(
    cells: Cells, *, N: int, batch: int, batches: int, epochs: int = 64, **changes: Any
) -> Cells:
    """Bigram trainings; the rate falls from 1e-2 to 0.1 ``lr_end`` (``lr`` is scaled twice)."""
    common = {"model": "aot", "variant": "code", "N": N, "n": 2, "T": batch * batches}
    common |= {"width": None, "layers": 1, "steps": epochs * batches, "task": "bigrams"}
    common |= {"context": None, "batch": batch, "schedule": "linear"}
    common |= {"lr": 0.1, "lr_start": 0.1, "lr_end": 0.005}
    return [common | changes | {"d_h": cell.get("d")} | cell for cell in cells]


def _mlp(cells: Cells, width: Callable[[int, int], int], **sizes: Any) -> Cells:
    """One head and a feed-forward layer; ``width(d, step)`` from the swept ``step``."""
    plain = [{"d": cell["d"], "H": 1, "width": width(cell["d"], cell["step"])} for cell in cells]
    return _bigrams(plain, model="mlp", **sizes)


def _once(d: int, step: int) -> int:
    return d * step


def _twice(d: int, step: int) -> int:
    return 2 * d * step


def _experiment(
    name: str,
    what: str,
    *,
    paper: Cells,
    quick: Cells,
    seeds: int = 5,
    variants: tuple[str, ...] = ("code",),
    curves: str | None = None,
) -> Experiment:
    """An experiment on this paper's model, with two seeds in the profile ``quick``."""
    cells, counts = {"paper": paper, "quick": quick}, {"paper": seeds, "quick": 2}
    return Experiment(f"dana-{name}", "dana", what, cells, counts, variants, curves)


SMALL = {"N": 50, "batch": 256, "batches": 64}
EXP5 = {"N": 70, "batch": 1024, "batches": 256}
DIM = {"N": 200, "batch": 1024, "batches": 64}
DEPTH = {"N": 70, "batch": 512, "batches": 128, "layers": 3}
DEPTH |= {"lr": 0.05, "lr_start": 0.05, "lr_end": 0.05}  # 2.5e-3 throughout
QUICK = {"N": 10, "batch": 128, "batches": 16, "epochs": 8}
QUICK_DEEP = QUICK | {"layers": 3, "lr": 0.05, "lr_start": 0.05, "lr_end": 0.05}

BOTH = ("code", "paper")
LAYERS = ("own-layers",)  # differs from the code in deeper models only
READINGS = tuple(name for name in training.VARIANTS if name not in LAYERS)

PUBLISHED = [
    _experiment(
        "exp1",
        "Exp. 1",
        paper=_bigrams(grid(d=range(3, 14), H=range(1, 32, 5)), **SMALL),
        quick=_bigrams(grid(d=[3, 5], H=[1, 6, 11]), **QUICK),
        curves="d",
    ),
    _experiment(
        "exp2",
        "Exp. 2",
        paper=_bigrams(grid(d=[10], H=[20], d_h=range(1, 11)), **SMALL),
        quick=_bigrams(grid(d=[4], H=[5], d_h=[1, 2, 4]), **QUICK),
        variants=READINGS,
    ),
    _experiment(
        "exp3",
        "Exp. 3",
        paper=_bigrams(grid(d=range(5, 16), H=[20], d_h=[10]), **SMALL),
        quick=_bigrams(grid(d=[2, 4, 6], H=[5], d_h=[4]), **QUICK),
        variants=BOTH,
    ),
    _experiment(
        "exp5-aot",
        "Exp. 5, attention",
        paper=_bigrams(grid(d=[7, 10, 13], H=range(1, 32, 5)), **EXP5),
        quick=_bigrams(grid(d=[4], H=[1, 3, 6]), **QUICK),
        curves="d",
    ),
    _experiment(
        "exp5-mlp",
        "Exp. 5, MLP",
        paper=_mlp(grid(d=[7, 10, 13], step=range(0, 31, 5)), _twice, lr_end=0.001, **EXP5),
        quick=_mlp(grid(d=[4], step=[0, 2, 5]), _twice, lr_end=0.001, **QUICK),
        curves="d",
    ),
    _experiment(
        "exp6",
        "Exp. 6",
        paper=_bigrams(grid(d=[2], H=range(1, 22, 4)), **SMALL | {"N": 10}),
        quick=_bigrams(grid(d=[2], H=[1, 5, 9]), **QUICK),
        seeds=20,
        variants=BOTH,
    ),
    _experiment(
        "dim1",
        "Exp. 1, wider",
        paper=_bigrams(grid(d=[40, 50, 60], H=range(1, 12, 2)), **DIM),
        quick=_bigrams(grid(d=[8], H=[1, 3]), **QUICK),
        curves="d",
    ),
    _experiment(
        "dim2",
        "Exp. 2, wider",
        paper=_bigrams(grid(d=[50], H=[11], d_h=[1, *range(5, 51, 5)]), **DIM),
        quick=_bigrams(grid(d=[8], H=[3], d_h=[1, 4, 8]), **QUICK),
        variants=BOTH,
    ),
    _experiment(
        "dim5",
        "Exp. 5, wider",
        paper=_mlp(grid(d=[40, 50, 60], step=range(0, 21, 4)), _once, lr_end=0.001, **DIM),
        quick=_mlp(grid(d=[8], step=[0, 4]), _once, lr_end=0.001, **QUICK),
        curves="d",
    ),
    _experiment(
        "depth1",
        "Exp. 1, three layers",
        paper=_bigrams(grid(d=[7, 10, 13], H=range(1, 22, 4)), **DEPTH),
        quick=_bigrams(grid(d=[3], H=[1, 5]), **QUICK_DEEP),
        curves="d",
    ),
    _experiment(
        "depth2",
        "Exp. 2, three layers",
        paper=_bigrams(grid(d=[10], H=[21], d_h=range(1, 11)), **DEPTH),
        quick=_bigrams(grid(d=[4], H=[3], d_h=[1, 4]), **QUICK_DEEP),
    ),
    _experiment(
        "depth5",
        "Exp. 5, three layers",
        paper=_mlp(grid(d=[7, 10, 13], step=range(0, 41, 8)), _once, **DEPTH),
        quick=_mlp(grid(d=[3], step=[0, 8]), _once, **QUICK_DEEP),
        curves="d",
    ),
]


# --- Not in the paper: one budget of parameters, spent on few wide heads or on many narrow ones ---


def _budget(d: int, total: int, widths: Iterable[int], **sizes: Any) -> Cells:
    """Own maps take ``4 d d_h H`` parameters; ``H d_h = total`` fixes them."""
    return _bigrams([{"d": d, "H": total // d_h, "d_h": d_h} for d_h in widths], **sizes)


BUDGET = _experiment(
    "budget",
    "Exp. 2 at equal parameters (not in the paper)",
    paper=_budget(10, 100, (1, 2, 5, 10), **SMALL),
    quick=_budget(4, 8, (1, 4), **QUICK),
    variants=BOTH,
)


# --- Not in the paper: positions and maps for every layer, a few cells of the deep experiments ----


OWN_LAYERS = _experiment(
    "depth-own-layers",
    "Exps. 2 and 5, three layers with positions and maps of their own (not in the paper)",
    paper=_bigrams(grid(d=[10], H=[21], d_h=[2, 3, 5]), **DEPTH)
    + _mlp(grid(d=[13], step=[8]), _once, **DEPTH),
    quick=_bigrams(grid(d=[4], H=[3], d_h=[1]), **QUICK_DEEP)
    + _mlp(grid(d=[3], step=[8]), _once, **QUICK_DEEP),
    variants=LAYERS,
    curves="model",
)


# --- Not in the paper: all repetitions on one table of answers, as published ----------------------


def _on_tables(tables: int, cells: Cells) -> Cells:
    """Every cell on each of some tables, which all its seeds share."""
    return [cell | {"table": table} for cell in cells for table in range(tables)]


ONE_TABLE = [
    _experiment(
        "exp5-mlp-one-table",
        "Exp. 5, the widest MLP at d = 10, seeds on one table (not in the paper)",
        paper=_on_tables(3, _mlp(grid(d=[10], step=[30]), _twice, lr_end=0.001, **EXP5)),
        quick=_on_tables(2, _mlp(grid(d=[4], step=[5]), _twice, lr_end=0.001, **QUICK)),
    ),
    _experiment(
        "exp6-one-table",
        "Exp. 6, seeds on one table (not in the paper)",
        paper=_on_tables(5, _bigrams(grid(d=[2], H=range(1, 22, 4)), **SMALL | {"N": 10})),
        quick=_on_tables(2, _bigrams(grid(d=[2], H=[1, 5]), **QUICK)),
        seeds=20,
    ),
]


# --- Not in the paper: is the MLP harder to train? Exp. 5 at other rates, and for longer ----------


OTHER_RATES = (0.01, 0.03, 0.3, 1.0)  # the published one is 0.1; multiplied by 0.1 at the start


def _middle(model: str, ds: Iterable[int] = (7, 10, 13), longer: int = 1) -> dict[str, Cells]:
    """The middle size of Exp. 5 for some ``ds`` in each profile, ``longer`` times as long."""
    paper, quick = EXP5 | {"epochs": 64 * longer}, QUICK | {"epochs": 8 * longer}
    if model == "aot":
        return {
            "paper": _bigrams(grid(d=ds, H=[21]), **paper),
            "quick": _bigrams(grid(d=[4], H=[3]), **quick),
        }
    return {
        "paper": _mlp(grid(d=ds, step=[20]), _twice, lr_end=0.001, **paper),
        "quick": _mlp(grid(d=[4], step=[2]), _twice, lr_end=0.001, **quick),
    }


WIDE = {  # about equal parameters: a head has 4 d^2, a unit of the MLP 2 d + 1
    "aot": {
        "paper": _bigrams(grid(d=[40, 60], H=[7]), **DIM),
        "quick": _bigrams(grid(d=[8], H=[3]), **QUICK),
    },
    "mlp": {
        "paper": _mlp(grid(d=[40, 60], step=[12]), _once, lr_end=0.001, **DIM),
        "quick": _mlp(grid(d=[8], step=[4]), _once, lr_end=0.001, **QUICK),
    },
}


def _at_other_rates(cells: dict[str, Cells]) -> dict[str, Cells]:
    return {p: [cell | {"lr": lr} for cell in cells[p] for lr in OTHER_RATES] for p in cells}


def _other(name: str, what: str, cells: dict[str, Cells], seeds: int = 3) -> Experiment:
    what = f"Exp. 5, {what} (not in the paper)"
    curves = None if name.endswith("longer") else "d"
    return _experiment(name, what, seeds=seeds, curves=curves, **cells)


OURS = [
    BUDGET,
    *ONE_TABLE,
    _other("exp5-aot-rates", "attention at other rates", _at_other_rates(_middle("aot")), 5),
    _other("exp5-mlp-rates", "MLP at other rates", _at_other_rates(_middle("mlp")), 5),
    _other("dim5-aot-rates", "wider, attention at other rates", _at_other_rates(WIDE["aot"])),
    _other("dim5-mlp-rates", "wider, MLP at other rates", _at_other_rates(WIDE["mlp"])),
    _other("exp5-aot-longer", "attention, four times as long", _middle("aot", [10], longer=4)),
    _other("exp5-mlp-longer", "MLP, four times as long", _middle("mlp", [10], longer=4)),
    OWN_LAYERS,
]
