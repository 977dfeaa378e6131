"""The published grids as data, and how to run one.

``runs(name, profile)`` is the plain list of an experiment's trainings, every hyper-parameter
explicit; ``run(name, profile)`` trains those that the store does not have yet. Profile ``paper`` is
the published protocol, every run of it; ``quick`` is the same code on a grid that two processor
cores finish within a minute: a smoke test, never a result.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from typing import Any, NamedTuple

import pandas as pd
import torch

from . import results, training
from .checks import check_integer, checked_by, refuse
from .results import Outcome, Run

PROFILES = ("paper", "quick")
Cells = list[dict[str, Any]]


class Experiment(NamedTuple):
    """A figure or table of a paper: the cells of its grid for each profile, and its seeds.

    ``variants``: the readings of the paper that it is run in (``training.VARIANTS``), first the one
    that was published.
    """

    source: str
    cells: dict[str, Cells]
    seeds: dict[str, int]
    variants: tuple[str, ...] = ("code",)


def _grid(**axes: Iterable[Any]) -> Cells:
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


# --- Dana et al. ----------------------------------------------------------------------------------


def _bigrams(
    cells: Cells, *, N: int, batch: int, batches: int, epochs: int = 64, **changes: Any
) -> Cells:
    """Bigram trainings; the rate falls from 1e-2 to 0.1 ``lr_end`` (``lr`` is scaled twice)."""
    common = {
        "model": "aot",
        "variant": "code",
        "N": N,
        "n": 2,
        "T": batch * batches,
        "width": None,
        "layers": 1,
        "steps": epochs * batches,
        "task": "bigrams",
        "context": None,
        "batch": batch,
        "schedule": "linear",
        "lr": 0.1,
        "lr_start": 0.1,
        "lr_end": 0.005,
    }
    return [common | changes | {"d_h": cell.get("d")} | cell for cell in cells]


def _mlp(cells: Cells, width: Callable[[int, int], int], **sizes: Any) -> Cells:
    """One head and a feed-forward layer; ``width(d, step)`` from the swept ``step``."""
    plain = [{"d": cell["d"], "H": 1, "width": width(cell["d"], cell["step"])} for cell in cells]
    return _bigrams(plain, model="mlp", **sizes)


def _once(d: int, step: int) -> int:
    return d * step


def _twice(d: int, step: int) -> int:
    return 2 * d * step


SMALL = {"N": 50, "batch": 256, "batches": 64}
EXP5 = {"N": 70, "batch": 1024, "batches": 256}
DIM = {"N": 200, "batch": 1024, "batches": 64}
DEPTH = {"N": 70, "batch": 512, "batches": 128, "layers": 3}
DEPTH |= {"lr": 0.05, "lr_start": 0.05, "lr_end": 0.05}  # 2.5e-3 throughout
QUICK = {"N": 10, "batch": 128, "batches": 16, "epochs": 8}
QUICK_DEEP = QUICK | {"layers": 3, "lr": 0.05, "lr_start": 0.05, "lr_end": 0.05}

BOTH = ("code", "paper")
LAYERS = ("code", "own-layers")
READINGS = tuple(name for name in training.VARIANTS if name != "own-layers")

DANA = {
    "dana-exp1": Experiment(
        "Dana et al. 2025, Exp. 1",
        {
            "paper": _bigrams(_grid(d=range(3, 14), H=range(1, 32, 5)), **SMALL),
            "quick": _bigrams(_grid(d=[3, 5], H=[1, 6, 11]), **QUICK),
        },
        {"paper": 5, "quick": 2},
    ),
    "dana-exp2": Experiment(
        "Dana et al. 2025, Exp. 2",
        {
            "paper": _bigrams(_grid(d=[10], H=[20], d_h=range(1, 11)), **SMALL),
            "quick": _bigrams(_grid(d=[4], H=[5], d_h=[1, 2, 4]), **QUICK),
        },
        {"paper": 5, "quick": 2},
        READINGS,
    ),
    "dana-exp3": Experiment(
        "Dana et al. 2025, Exp. 3",
        {
            "paper": _bigrams(_grid(d=range(5, 16), H=[20], d_h=[10]), **SMALL),
            "quick": _bigrams(_grid(d=[2, 4, 6], H=[5], d_h=[4]), **QUICK),
        },
        {"paper": 5, "quick": 2},
        BOTH,
    ),
    "dana-exp5-aot": Experiment(
        "Dana et al. 2025, Exp. 5, attention",
        {
            "paper": _bigrams(_grid(d=[7, 10, 13], H=range(1, 32, 5)), **EXP5),
            "quick": _bigrams(_grid(d=[4], H=[1, 3, 6]), **QUICK),
        },
        {"paper": 5, "quick": 2},
    ),
    "dana-exp5-mlp": Experiment(
        "Dana et al. 2025, Exp. 5, MLP",
        {
            "paper": _mlp(_grid(d=[7, 10, 13], step=range(0, 31, 5)), _twice, lr_end=0.001, **EXP5),
            "quick": _mlp(_grid(d=[4], step=[0, 2, 5]), _twice, lr_end=0.001, **QUICK),
        },
        {"paper": 5, "quick": 2},
    ),
    "dana-exp6": Experiment(
        "Dana et al. 2025, Exp. 6",
        {
            "paper": _bigrams(_grid(d=[2], H=range(1, 22, 4)), **SMALL | {"N": 10}),
            "quick": _bigrams(_grid(d=[2], H=[1, 5, 9]), **QUICK),
        },
        {"paper": 20, "quick": 2},
        BOTH,
    ),
    "dana-dim1": Experiment(
        "Dana et al. 2025, Exp. 1, wider",
        {
            "paper": _bigrams(_grid(d=[40, 50, 60], H=range(1, 12, 2)), **DIM),
            "quick": _bigrams(_grid(d=[8], H=[1, 3]), **QUICK),
        },
        {"paper": 5, "quick": 2},
    ),
    "dana-dim2": Experiment(
        "Dana et al. 2025, Exp. 2, wider",
        {
            "paper": _bigrams(_grid(d=[50], H=[11], d_h=[1, *range(5, 51, 5)]), **DIM),
            "quick": _bigrams(_grid(d=[8], H=[3], d_h=[1, 4, 8]), **QUICK),
        },
        {"paper": 5, "quick": 2},
        BOTH,
    ),
    "dana-dim5": Experiment(
        "Dana et al. 2025, Exp. 5, wider",
        {
            "paper": _mlp(_grid(d=[40, 50, 60], step=range(0, 21, 4)), _once, lr_end=0.001, **DIM),
            "quick": _mlp(_grid(d=[8], step=[0, 4]), _once, lr_end=0.001, **QUICK),
        },
        {"paper": 5, "quick": 2},
    ),
    "dana-depth1": Experiment(
        "Dana et al. 2025, Exp. 1, three layers",
        {
            "paper": _bigrams(_grid(d=[7, 10, 13], H=range(1, 22, 4)), **DEPTH),
            "quick": _bigrams(_grid(d=[3], H=[1, 5]), **QUICK_DEEP),
        },
        {"paper": 5, "quick": 2},
    ),
    "dana-depth2": Experiment(
        "Dana et al. 2025, Exp. 2, three layers",
        {
            "paper": _bigrams(_grid(d=[10], H=[21], d_h=range(1, 11)), **DEPTH),
            "quick": _bigrams(_grid(d=[4], H=[3], d_h=[1, 4]), **QUICK_DEEP),
        },
        {"paper": 5, "quick": 2},
        LAYERS,
    ),
    "dana-depth5": Experiment(
        "Dana et al. 2025, Exp. 5, three layers",
        {
            "paper": _mlp(_grid(d=[7, 10, 13], step=range(0, 41, 8)), _once, **DEPTH),
            "quick": _mlp(_grid(d=[3], step=[0, 8]), _once, **QUICK_DEEP),
        },
        {"paper": 5, "quick": 2},
        LAYERS,
    ),
}


# --- Not in the papers: one budget of parameters, spent on few wide heads or on many narrow ones --


def _budget(d: int, total: int, widths: Iterable[int], **sizes: Any) -> Cells:
    """Own maps take ``4 d d_h H`` parameters; ``H d_h = total`` fixes them."""
    return _bigrams([{"d": d, "H": total // d_h, "d_h": d_h} for d_h in widths], **sizes)


BUDGET = Experiment(
    "Dana et al. 2025, Exp. 2 at equal parameters (not in the paper)",
    {"paper": _budget(10, 100, (1, 2, 5, 10), **SMALL), "quick": _budget(4, 8, (1, 4), **QUICK)},
    {"paper": 5, "quick": 2},
    BOTH,
)


# --- Is the MLP harder to train? Exp. 5 at other rates, and for longer ----------------------------


OTHER_RATES = (0.01, 0.03, 0.3, 1.0)  # the published one is 0.1; multiplied by 0.1 at the start


def _middle(model: str, longer: int = 1) -> dict[str, Cells]:
    """One size of Exp. 5 in each profile, trained ``longer`` times as long."""
    paper, quick = EXP5 | {"epochs": 64 * longer}, QUICK | {"epochs": 8 * longer}
    if model == "aot":
        return {
            "paper": _bigrams(_grid(d=[10], H=[21]), **paper),
            "quick": _bigrams(_grid(d=[4], H=[3]), **quick),
        }
    return {
        "paper": _mlp(_grid(d=[10], step=[20]), _twice, lr_end=0.001, **paper),
        "quick": _mlp(_grid(d=[4], step=[2]), _twice, lr_end=0.001, **quick),
    }


def _at_other_rates(cells: dict[str, Cells]) -> dict[str, Cells]:
    return {p: [cell | {"lr": lr} for cell in cells[p] for lr in OTHER_RATES] for p in cells}


def _ours(what: str, cells: dict[str, Cells]) -> Experiment:
    source = f"Dana et al. 2025, Exp. 5, {what} (not in the paper)"
    return Experiment(source, cells, {"paper": 3, "quick": 2})


OURS = {
    "dana-budget": BUDGET,
    "dana-exp5-aot-rates": _ours("attention at other rates", _at_other_rates(_middle("aot"))),
    "dana-exp5-mlp-rates": _ours("MLP at other rates", _at_other_rates(_middle("mlp"))),
    "dana-exp5-aot-longer": _ours("attention, four times as long", _middle("aot", longer=4)),
    "dana-exp5-mlp-longer": _ours("MLP, four times as long", _middle("mlp", longer=4)),
}


# --- Mahdavi et al. -------------------------------------------------------------------------------

HEADS = CONTEXTS = (1, 5, 10, 20, 30, 40, 50, 60)


def memorization(
    cells: Cells, *, context: str, real: bool = False, least_steps: int = 50_000, **changes: Any
) -> Cells:
    """Cells of Mahdavi et al.'s protocol: dimension 64, 100 classes or real labels."""
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
    source: str, paper: Cells, quick: Cells, context: str, least_steps: int = 50_000, **kind: Any
) -> Experiment:
    return Experiment(
        source,
        {
            "paper": memorization(paper, context=context, least_steps=least_steps, **kind),
            "quick": memorization(quick, context=context, **SMALLER | kind),
        },
        {"paper": 6, "quick": 2},
    )


QUICK_H = _grid(H=[1, 2, 4, 8], n=[8], T=[250, 500, 1000])
QUICK_N = _grid(H=[4], n=[1, 2, 4, 8, 16], T=[250, 500])

MAHDAVI = {
    "mahdavi-fig2a": _figure(
        "Mahdavi et al. 2024, Figure 2a",
        _grid(H=HEADS, n=[32], T=_thousands(10, 40, 10)),
        QUICK_H,
        "shared",
    ),
    "mahdavi-fig2b": _figure(
        "Mahdavi et al. 2024, Figure 2b",
        _grid(H=[20], n=CONTEXTS, T=_thousands(6, 18, 4)),
        QUICK_N,
        "shared",
    ),
    "mahdavi-fig2c": _figure(
        "Mahdavi et al. 2024, Figure 2c",
        _grid(H=[30], n=[32], d_h=[*range(10, 61, 5), 64], T=_thousands(10, 20, 5)),
        _grid(H=[4], n=[8], d_h=[1, 2, 4, 8, 16], T=[250, 500]),
        "shared",
        least_steps=300_000,
    ),
    "mahdavi-fig3": _figure(
        "Mahdavi et al. 2024, Figure 3",
        [{"H": 4, "n": 32, "T": 550}, {"H": 8, "n": 32, "T": 1300}],
        [{"H": 4, "n": 8, "T": 60}, {"H": 8, "n": 8, "T": 200}],
        "shared",
        least_steps=300_000,
        early_stop=False,
    ),
    "mahdavi-fig4-heads": _figure(
        "Mahdavi et al. 2024, Figure 4, left",
        _grid(H=HEADS, n=[32], T=_thousands(30, 130, 20)),
        QUICK_H,
        "random",
    ),
    "mahdavi-fig4-context": _figure(
        "Mahdavi et al. 2024, Figure 4, right",
        _grid(H=[20], n=CONTEXTS, T=_thousands(20, 60, 10)),
        QUICK_N,
        "random",
    ),
    "mahdavi-fig5-shared-heads": _figure(
        "Mahdavi et al. 2024, Figure 5",
        _grid(H=HEADS, n=[32], T=_thousands(10, 30, 5)),
        QUICK_H,
        "shared",
        real=True,
    ),
    "mahdavi-fig5-shared-context": _figure(
        "Mahdavi et al. 2024, Figure 5",
        _grid(H=[20], n=CONTEXTS, T=_thousands(10, 25, 5)),
        QUICK_N,
        "shared",
        real=True,
    ),
    "mahdavi-fig5-random-heads": _figure(
        "Mahdavi et al. 2024, Figure 5",
        _grid(H=HEADS, n=[32], T=_thousands(10, 90, 20)),
        QUICK_H,
        "random",
        real=True,
    ),
    "mahdavi-fig5-random-context": _figure(
        "Mahdavi et al. 2024, Figure 5",
        _grid(H=[20], n=CONTEXTS, T=_thousands(10, 90, 20)),
        QUICK_N,
        "random",
        real=True,
    ),
}

# --- Does Figure 2a start flat for want of training? Its smallest size, twice as long -------------


OURS["mahdavi-fig2a-longer"] = Experiment(
    "Mahdavi et al. 2024, Figure 2a, twice as long (not in the paper)",
    {
        "paper": memorization(
            _grid(H=[1, 5, 10, 20], n=[32], T=[10_000]), context="shared", least_steps=100_000
        ),
        "quick": memorization(
            _grid(H=[1, 2, 4], n=[8], T=[250]), context="shared", **SMALLER | {"least_steps": 4000}
        ),
    },
    {"paper": 1, "quick": 2},
)

PUBLISHED = MAHDAVI | DANA
EXPERIMENTS = PUBLISHED | OURS


# --- running --------------------------------------------------------------------------------------


def check_profile(profile) -> None:
    """Accept the profiles there are."""
    if profile not in PROFILES:
        refuse("profile", repr(profile), f"one of {', '.join(PROFILES)}")


def _check_name(name, profile, seeds=None, *, variant="code", where=None, curves=None) -> None:
    if name not in EXPERIMENTS:
        refuse("name", repr(name), f"one of {', '.join(EXPERIMENTS)}")
    check_profile(profile)
    if seeds is not None:
        check_integer("seeds", seeds)
    experiment = EXPERIMENTS[name]
    if variant not in experiment.variants:
        refuse("variant", repr(variant), f"one of {', '.join(experiment.variants)} for {name}")
    for field in where or {}:
        if field not in experiment.cells[profile][0]:
            refuse("where", f"the field {field!r}", f"one of {', '.join(SIZES)}")
    if curves is not None and curves not in SIZES:
        refuse("curves", repr(curves), f"one of {', '.join(SIZES)}")
    if not _chosen(experiment.cells[profile], where):
        refuse("where", where, f"values that stand together in the grid of {name}")


def _chosen(cells: Cells, where: Mapping[str, Any] | None) -> Cells:
    wanted = (where or {}).items()
    return [cell for cell in cells if all(cell[field] == value for field, value in wanted)]


SIZES = ("d", "d_h", "H", "n", "T", "width")  # what the published grids sweep


@checked_by(_check_name)
def runs(
    name: str,
    profile: str,
    seeds: int | None = None,
    *,
    variant: str = "code",
    where: Mapping[str, Any] | None = None,
) -> list[Run]:
    """All trainings of an experiment, one per cell of its grid and seed.

    ``seeds``: the first so many of them; by default as many as the paper has. ``variant``: how the
    paper is read. ``where``: only the cells with these values, such as ``{"d": 10}``.

    >>> len(runs("dana-exp1", "paper"))
    385
    """
    experiment = EXPERIMENTS[name]
    count = seeds or experiment.seeds[profile]
    return [
        Run(experiment=name, profile=profile, seed=seed, **cell | {"variant": variant})
        for cell in _chosen(experiment.cells[profile], where)
        for seed in range(count)
    ]


def stacks(wanted: Sequence[Run]) -> list[list[Run]]:
    """Runs that can be trained at once: equal but for their seeds, in the order of the grid."""
    groups: dict[Run, list[Run]] = {}
    for run in wanted:
        groups.setdefault(training.stack_name(run), []).append(run)
    return list(groups.values())


def missing(
    name: str,
    profile: str,
    seeds: int | None = None,
    *,
    recompute: bool = False,
    **chosen: Any,
) -> list[Run]:
    """The trainings of an experiment that the store does not have; ``chosen`` as for :func:`runs`.

    With ``recompute`` the rows that came with the library do not count, only those measured since;
    they need a folder of their own, so ``ValueError`` if new rows would go among the shipped ones.
    """
    root = results.writable_root()
    if recompute and root.resolve() == results.SHIPPED.resolve():
        refuse("recompute", "True", "ATTNMEM_MEASUREMENTS to name a folder for the new rows")
    path = results.file_of(name, profile, root)
    have = results.read(path) if recompute else results.known(name, profile)
    return [run for run in runs(name, profile, seeds, **chosen) if run.key not in have]


def train_stack(stack: list[Run], device: str, tf32: bool) -> list[tuple[Run, Outcome]]:
    """One unit of work, anywhere: train a stack and return its rows."""
    outcomes = training.train(stack, device=device, tf32=tf32)
    return list(zip(stack, outcomes, strict=True))


def coverage(names: Iterable[str]) -> pd.DataFrame:
    """How many of the published runs of experiments the store has, and how many of the quick."""
    counts = {}
    for name in names:
        counts[name] = {"source": EXPERIMENTS[name].source}
        for profile, title in (("paper", "published"), ("quick", "quick")):
            wanted = len(runs(name, profile))
            counts[name][f"{title} runs"] = wanted
            counts[name][f"{title}, stored"] = wanted - len(missing(name, profile))
    return pd.DataFrame(counts).T


@checked_by(_check_name)
def stored(
    name: str,
    profile: str,
    seeds: int | None = None,
    *,
    variant: str = "code",
    curves: str | None = None,
) -> tuple[pd.DataFrame, str]:
    """The rows of an experiment in the profile asked for, or, saying so, in the other one.

    A grid of which some cells have no row at all is passed over while the other profile's is whole,
    since a figure with holes misleads. With ``curves``, the field that tells the curves of a figure
    apart (such as ``"T"``), one curve without a hole is enough, and only such curves are returned.
    Only rows of the runs that :func:`runs` lists. Returns the table and the profile it is of;
    raises ``ValueError`` if the store has neither.
    """
    what = name if variant == "code" else f"{name}, variant {variant!r}"
    order = dict.fromkeys((profile, *PROFILES))
    found = {p: _rows_of(name, p, seeds, variant, curves) for p in order}
    whole = [p for p, rows in found.items() if rows.whole]
    some = [p for p, rows in found.items() if len(rows.table)]
    if not some:
        refuse("name", repr(what), "an experiment with stored rows (python -m attnmem run)")
    [chosen, *_] = [*whole, *some]
    have, wanted = len(found[profile].table), found[profile].wanted
    if chosen == profile:
        place = "on whole curves in the store" if curves else "in the store"
        print(f"{have} of {wanted} rows of {what} {place}, profile {profile!r}")
    else:
        missing = f"{have} of {wanted}" if have else "no"
        print(f"{missing} rows of {what} in profile {profile!r}; what follows is {chosen!r}")
    return found[chosen].table, chosen


class _Rows(NamedTuple):
    table: pd.DataFrame
    wanted: int
    whole: bool  # no cell of the grid, or of the curves that are returned, lacks a row


def _rows_of(name: str, profile: str, seeds: int | None, variant: str, curves: str | None) -> _Rows:
    wanted = {run.key: run for run in runs(name, profile, seeds, variant=variant)}
    known = results.known(name, profile)
    have = [known[key] for key in known if key in wanted]
    covered = {training.stack_name(run) for run, _ in have}
    holes = [run for run in wanted.values() if training.stack_name(run) not in covered]
    if curves and holes:
        torn = {getattr(run, curves) for run in holes}
        if sound := [row for row in have if getattr(row[0], curves) not in torn]:
            return _Rows(results.as_table(sound), len(wanted), True)
    return _Rows(results.as_table(have), len(wanted), not holes)


def beside_published(name: str) -> pd.DataFrame:
    """The published means of an experiment of Dana et al. beside ours, a line for each point.

    ``ours`` is the mean over the seeds of the published grid, ``seeds`` how many of them are
    stored, ``error`` its standard error and ``difference`` ours less the published. Points without
    a stored training are left out, and so are those that are not at hand
    (:func:`attnmem.results.published`).

    >>> len(beside_published("dana-exp1"))
    77
    """
    axes = ["N", "d", "d_h", "H", "width"]
    [model, *_] = {run.model for run in runs(name, "paper", 1)}
    points = results.published("dana-2025")
    points = points[(points.experiment == name.split("-")[1]) & (points.model == model)]
    table = _rows_of(name, "paper", None, "code", None).table
    sizes = table[axes].fillna(0).astype(int)
    accuracy = sizes.assign(accuracy=table.accuracy.astype(float))
    ours = accuracy.groupby(axes).accuracy.agg(ours="mean", seeds="count", error="sem")
    both = points.set_index(axes)[["accuracy"]].rename(columns={"accuracy": "published"})
    both = both.join(ours, how="inner")
    return both.assign(difference=both.ours - both.published).reset_index()


def with_parameters(table: pd.DataFrame, name: str, profile: str) -> pd.DataFrame:
    """Rows of an experiment with one more column, the number of parameters that each run trained.

    Counted from the tensors that the loss depends on (:func:`attnmem.training.parameter_count`).
    """
    fields = list(SIZES)
    counts = {
        tuple(getattr(run, field) or 0 for field in fields): training.parameter_count(run)
        for run in runs(name, profile, 1)
    }
    sizes = table[fields].fillna(0).astype(int).itertuples(index=False, name=None)
    for size in (sizes := [*sizes]):
        if size not in counts:
            got = f"a row with {dict(zip(fields, size, strict=True))}"
            refuse("table", got, f"rows of {name}, profile {profile!r}")
    return table.assign(parameters=[counts[size] for size in sizes])


def repeat(
    name: str,
    profile: str,
    *,
    variant: str = "code",
    where: Mapping[str, Any] | None = None,
    epochs: int | None = None,
) -> tuple[Any, Any]:
    """The first stored training of a part of a grid, done again on the CPU: (now, its row).

    The two accuracies; or, of the first ``epochs`` only, the two curves.
    """
    [run, *_] = runs(name, profile, 1, variant=variant, where=where)
    known = results.known(name, profile)
    if run.key not in known:
        refuse("where", f"{name}, {variant}, {where}", "a run whose row is in the store")
    _, row = known[run.key]
    if epochs is not None:
        if row.curve is None:
            refuse("epochs", epochs, "None, since the row was stored without a curve")
        return training.opening(run, epochs), row.curve[:epochs]
    [outcome] = training.train([run], device="cpu")
    return outcome.accuracy, row.accuracy


class Progress(NamedTuple):
    """After each unit: units done and all, rows written, seconds spent, the unit's first run."""

    done: int
    units: int
    rows: int
    seconds: float
    run: Run

    @property
    def seconds_left(self) -> float:
        """At the rate so far."""
        return self.seconds / self.done * (self.units - self.done)


def choose_device(device: str) -> str:
    """``auto`` is the GPU if there is one."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def run(
    name: str,
    profile: str = "paper",
    device: str = "auto",
    executor: Executor | None = None,
    *,
    seeds: int | None = None,
    limit_minutes: int | float | None = None,
    tf32: bool = False,
    recompute: bool = False,
    variant: str = "code",
    where: Mapping[str, Any] | None = None,
    report: Callable[[Progress], None] | None = None,
) -> int:
    """Train what is missing of an experiment and append the rows; returns how many were added.

    Rows land unit by unit (a unit is a stack of seeds), so an interrupted run loses the units in
    flight and nothing else, and the next call resumes.

    Arguments
        ``executor``: anything with the interface of ``concurrent.futures`` (processes, or dask's
        ``Client.get_executor()``); by default units are trained here, one after the other.
        ``seeds``, ``variant``, ``where``: which of the trainings (see :func:`runs`).
        ``limit_minutes``: start no unit after that time.
        ``recompute``: train again what shipped with the library (see :func:`missing`).
        ``report``: called after each unit.
    """
    chosen = {"variant": variant, "where": where}
    units = stacks(missing(name, profile, seeds, recompute=recompute, **chosen))
    device = choose_device(device)
    start, rows = time.monotonic(), 0

    def in_time() -> bool:
        return limit_minutes is None or time.monotonic() - start < 60 * limit_minutes

    trained = _here if executor is None else _elsewhere
    for done, unit in enumerate(trained(units, device, tf32, executor, in_time), start=1):
        rows += results.append(unit)
        if report:
            report(Progress(done, len(units), rows, time.monotonic() - start, unit[0][0]))
    return rows


def _here(units, device, tf32, _, in_time):
    for unit in units:
        if not in_time():
            return
        yield train_stack(unit, device, tf32)


def _elsewhere(units, device, tf32, executor, in_time):
    futures = [executor.submit(train_stack, unit, device, tf32) for unit in units]
    try:
        for future in as_completed(futures):
            yield future.result()
            if not in_time():
                return
    finally:
        for future in futures:
            future.cancel()
