"""One curve for all sweeps of Mahdavi et al., and what it says of curves before they are run.

Accuracy on classes depends on the numbers that matter over the price of the labels, ``D / (delta
T)``, and the variance of real labels that is left on ``P / T``: the columns ``x`` and ``left`` of
:func:`trainings`. ``predictions.toml`` (``PREDICTIONS``) is what :func:`predicted` said, once, of
curves without a row.
"""

import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy
from numpy.typing import ArrayLike, NDArray

from ..core import bounds
from ..theory import counts
from . import experiments

CLASSES = tuple(f"mahdavi-fig{k}" for k in ("2a", "2b", "2c", "4-heads", "4-context"))
REALS = tuple(
    f"mahdavi-fig5-{k}"
    for k in ("shared-heads", "shared-context", "random-heads", "random-context")
)
PREDICTIONS = tomllib.loads(Path(__file__).with_name("predictions.toml").read_text("utf-8"))
FITTED = 3  # so many seeds are fitted to; the others judge


def trainings(names: Sequence[str] = CLASSES + REALS, profile: str = "paper") -> pd.DataFrame:
    """The stored trainings of sweeps, with what the laws say that they depend on.

    ``x`` is ``D / (delta T)`` of classes and ``P / T`` of reals, NaN with a single token, on which
    all attention is; ``theorem`` the number of Theorem 1 over ``T``, ``rank`` the rank of the
    attended tokens over ``T``; ``bits`` what is known of a class in bits, ``left`` the share of the
    variance of reals that is not explained. The bias of embedded queries is not counted.
    """
    rows = pd.concat([experiments.table(name, profile) for name in names], ignore_index=True)
    promised = [bounds.mha_capacity(r.H, r.n, r.d_h) / r.T for r in rows.itertuples()]
    own = (rows.context == "random") | (rows.n > rows.d)
    told_apart = (rows.n - 1).mask(own & (rows.n > 1), rows.d)
    columns = {"x": shares(rows), "theorem": promised, "rank": rows.H * told_apart / rows["T"]}
    classes = rows.task == "classes"
    columns["bits"] = ((np.log(rows.N) - rows.loss) / math.log(2)).where(classes)
    return rows.assign(**columns, left=(12 * rows.loss).where(~classes))


def shares(rows: pd.DataFrame) -> pd.Series:
    """The column ``x`` of such rows."""
    return pd.Series([*map(_share, rows.itertuples())], rows.index)


def _share(run: Any) -> float:
    """The numbers that matter over what the labels cost."""
    if run.n == 1:
        return math.nan
    outputs, price = 1, 1.0
    if run.task == "classes":
        outputs = int(run.N)
        price = counts.class_price(outputs)
    sizes = run.H, run.n, run.d_h, run.d, outputs
    return counts.mha_dimension(*sizes, shared=run.context == "shared") / (price * run.T)


def means(rows: pd.DataFrame) -> pd.DataFrame:
    """The means over seeds of each setting."""
    settings = ["experiment", "task", "context", "T", "H", "n", "d_h"]
    values = ["x", "theorem", "rank", "accuracy", "bits", "left"]
    return rows.groupby(settings)[values].mean().reset_index()


def rising(x: ArrayLike, y: ArrayLike) -> Callable[[ArrayLike], NDArray]:
    """The rising curve that fits points best, straight between them and flat beyond."""
    means = pd.Series(np.asarray(y, dtype=float)).groupby(np.asarray(x, dtype=float))
    heights = scipy.optimize.isotonic_regression(means.mean(), weights=means.size()).x
    return lambda at: np.interp(at, means.mean().index, heights)


def explained(y: ArrayLike, expected: ArrayLike) -> float:
    """The share of the variance of ``y`` that a curve explains which need not be fitted to it."""
    y = np.asarray(y, dtype=float)
    return float(1 - ((y - expected) ** 2).sum() / ((y - y.mean()) ** 2).sum())


def bits_line(rows: pd.DataFrame) -> NDArray:
    """Slope and constant of the line in ``H`` through a curve's bits, below an accuracy of 0.95."""
    means = rows.groupby("H")[["accuracy", "bits", "T"]].mean()
    below = means[means.accuracy < 0.95]
    return np.polyfit(below.index, below.bits * below["T"], 1)


def accuracy_of_bits(rows: pd.DataFrame) -> Callable[[ArrayLike], NDArray]:
    """The bent function that turns bits into accuracy, from guessing to certainty."""
    N = int(rows.N.iloc[0])
    means = rows.groupby(["T", "H"])[["bits", "accuracy"]].mean()
    return rising([0, *means.bits, math.log2(N)], [1 / N, *means.accuracy, 1])


def held_back() -> pd.Series:
    """How well laws that are fitted to the first seeds hold for the means over the others.

    What curves of ``x``, ``theorem`` and ``rank`` explain of the accuracies of so many ``settings``
    of two tokens or more; the largest distance of ``left`` from ``1 - x`` up to ``x = 0.7`` on
    shared contexts of 32 tokens; the least that lines explain of the ``bits`` of curves in ``H``;
    and how far bits miss an ``accuracy`` with own contexts, by Figure 2a.
    """
    rows = trainings()
    rows = rows[rows.n > 1]
    fitted, kept = rows[rows.seed < FITTED], rows[rows.seed >= FITTED]
    others = means(kept)
    classes, fitted_classes = others[others.bits.notna()], fitted[fitted.bits.notna()]
    found: dict[str, float] = {"settings": len(classes)}
    for column in ("x", "theorem", "rank"):
        curve = rising(fitted_classes[column], fitted_classes.accuracy)
        found[column] = explained(classes.accuracy, curve(classes[column]))
    line = others[(others.experiment == REALS[0]) & (others.x <= 0.7)]
    found |= {"left": (line.left - 1 + line.x).abs().max(), "lefts": len(line)}
    straight = []
    for name in (CLASSES[0], CLASSES[3]):
        for T, curve in classes[classes.experiment == name].groupby("T"):
            below = curve[curve.accuracy < 0.95]
            if len(below) > 2:  # fewer cannot tell a line
                fit = bits_line(fitted[(fitted.experiment == name) & (fitted["T"] == T)])
                straight.append(explained(below.bits * T, np.polyval(fit, below.H)))
    found |= {"bits": min(straight), "curves": len(straight)}
    accuracy = accuracy_of_bits(fitted[fitted.experiment == CLASSES[0]])
    own = classes[classes.context == "random"]
    found |= {"accuracy": (own.accuracy - accuracy(own.bits)).abs().max(), "own": len(own)}
    seeds = kept.groupby(["experiment", "T", "H", "n", "d_h"]).seed.count()
    return pd.Series(found | {"seeds": seeds.min()})


# --- predictions ----------------------------------------------------------------------------------

_HEADS, _TOKENS, _OWN = CLASSES[3], CLASSES[4], REALS[2:]
_LARGEST, _OTHERS = {CLASSES[0]: 40_000, _HEADS: 50_000}, 30_000  # T that is read
PREDICTED = {_HEADS: (70_000, 90_000, 110_000, 130_000), _TOKENS: (40_000, 50_000, 60_000)}
PREDICTED |= dict.fromkeys(_OWN, (50_000, 70_000, 90_000))


def predicted() -> dict[str, dict[str, list[float]]]:
    """By sweep, and by law and ``T``: the means of the curves without a row.

    ``curve`` is the rising curve of ``x`` through Figures 2a, 2b and 4. ``bits`` are those at
    50,000 examples (Figure 4 left: the line in ``H``) or at 30,000 (right: with as many tokens);
    they grow by the power of ``T`` that the line's slope grew by from 30,000 to 50,000. ``left`` is
    straight in its logarithm between the means with own contexts, those of one head apart; a single
    token leaves ``1 - d / T``. Only the seeds 0 to 2 of what was stored then are read.
    """
    rows = trainings([*CLASSES[:2], _HEADS, _TOKENS, *_OWN])
    largest = rows.experiment.map(_LARGEST).fillna(_OTHERS)
    then = (rows["T"] <= largest) & ((rows["T"] < 50_000) | (rows.seed == 0))
    rows = rows[(rows.seed < FITTED) & then]
    of = dict(list(rows.groupby("experiment")))
    classes = rows[(rows.task == "classes") & (rows.n > 1)]
    curve = rising(classes.x, classes.accuracy)
    accuracy = accuracy_of_bits(of[CLASSES[0]])
    at_30, at_50 = (bits_line(of[_HEADS][of[_HEADS]["T"] == T]) for T in (30_000, 50_000))
    power = math.log(at_50[0] / at_30[0]) / math.log(50 / 30)
    by_tokens = of[_TOKENS][of[_TOKENS]["T"] == 30_000].groupby("n").bits.mean()

    def bits(run: Any) -> float:
        known, then = np.polyval(at_50, run.H), 50_000
        if run.experiment == _TOKENS:
            known, then = by_tokens[run.n] * 30_000, 30_000
        return known * (run.T / then) ** power / run.T

    def left(run: Any) -> float:
        if run.n == 1:
            return 1 - run.d / run.T
        reals = rows[(rows.task == "reals") & (rows.n > 1) & ((rows.H == 1) == (run.H == 1))]
        falls = rising([0, *reals.x], [0, *-np.log(reals.left)])
        return math.exp(-falls(_share(run)))

    laws = {"curve": lambda run: curve(_share(run)), "bits": lambda run: accuracy(bits(run))}
    found: dict[str, dict[str, list[float]]] = {}
    for name in PREDICTED:
        for law, value in (laws if name in CLASSES else {"left": left}).items():
            for run in experiments.runs(name, "paper", 1):
                if run.T in PREDICTED[name]:
                    points = found.setdefault(name, {}).setdefault(f"{law}-{run.T}", [])
                    points.append(round(float(value(run)), 3))
    return found


def foretold() -> pd.DataFrame:
    """The stored predictions: a row for each point of their curves.

    Columns: its ``experiment``, ``T``, ``H``, ``n``; the accuracies by ``curve`` and by ``bits``,
    or the share ``left``.
    """
    points = []
    for name, sizes in PREDICTED.items():
        laws = ("curve", "bits") if name in CLASSES else ("left",)
        for T in sizes:
            lines = [PREDICTIONS[name][f"{law}-{T}"] for law in laws]
            runs = experiments.runs(name, "paper", 1, where={"T": T})
            for run, *values in zip(runs, *lines, strict=True):
                point = {"experiment": name, "T": T, "H": run.H, "n": run.n}
                points.append(point | dict(zip(laws, values, strict=True)))
    return pd.DataFrame(points)


def predictions() -> pd.DataFrame:
    """The stored predictions, and what was trained since: a row for each point of their curves.

    Columns: the ``figure``, ``T``, ``H``, ``n``; the accuracies by ``curve`` and by ``bits``, and
    ``as many``, as if the number of right labels stayed as at the largest ``T`` of the laws, or the
    share ``left``; the mean of the ``trained``, NaN if there is no row, and how many ``seeds``.
    """
    setting = ["experiment", "T", "H", "n"]
    rows = trainings([*PREDICTED])
    measured = rows.accuracy.where(rows.task == "classes", rows.left)
    trained = measured.groupby([rows[field] for field in setting]).agg(
        trained="mean", seeds="count"
    )
    points = foretold()
    before = points.experiment.map(_LARGEST).fillna(_OTHERS).astype(int)
    known = points[setting].assign(T=before).join(trained, on=setting).trained
    as_many = (known * before / points["T"]).where(points.experiment.isin(CLASSES))
    figure = points.experiment.map(lambda name: experiments.EXPERIMENTS[name].what)
    points = points.assign(**{"figure": figure, "as many": as_many}).join(trained, on=setting)
    columns = ["figure", "T", "H", "n", "curve", "bits", "as many", "left", "trained", "seeds"]
    return points[columns]
