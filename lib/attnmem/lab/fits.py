"""How much of its ceiling attention reaches by training: which fits, and where they ended.

Three studies: of one layer (``LAYER``), also with signs (``SIGNS``), and of layers one after the
other with skip connections (``DEEP``), which have the same heads in all in one, two or three
layers, so the same number of weights. There is one output. Labels are uniform on [0, 1], or 1 above
one half and -1 below. The number of examples is a fraction
of the ceiling, beyond which almost no labels can be met. Optimizers that are given the same sizes,
number of examples and seed have the same data and the same start.
"""

import itertools
import time
import tomllib
from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..core import bounds
from ..core.random import gaussian, random_deep, random_maps
from ..theory import fitting
from ..theory.tangents import Coordinates, ScalarHeads
from . import store
from .data import generator
from .protocols import warmup_cosine
from .store import Fitted, Fitting, Row
from .study import ALL, Selection, Study, Unit, with_settings
from .training import origin

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
LOGITS, VALUES = 0.3, 0.5  # deviations at the start of a layer: of logits, and of a head's values


class Problem(NamedTuple):
    """What an optimizer is given: weights to start from, and data in their coordinates."""

    weights: fitting.Weights
    contexts: Float[Tensor, "*T n d"]
    queries: Float[Tensor, "T d"] | None  # of several layers the last token asks
    labels: Float[Tensor, " T"]


class Shape(NamedTuple):
    """The sizes of one layer and of its contexts, ``own`` or ``shared``."""

    context: str
    H: int
    n: int
    d: int
    d_h: int

    kind = "fits of one layer"
    derived = ("ceiling", "floor", "theorem")

    @property
    def ceiling(self) -> int:
        """Examples beyond which almost no labels can be met."""
        if self.context == "own":
            return bounds.own_context_ceiling(self.H, self.d_h, self.d)
        return bounds.shared_context_ceiling(self.H, self.n, self.d_h, self.d)

    @property
    def floor(self) -> int:
        """Examples whose labels a construction meets, for almost all data."""
        if self.context == "own":
            return bounds.own_context_floor(self.H, self.d_h, self.d)
        return bounds.shared_context_floor(self.H, self.n, self.d_h, self.d)

    @property
    def theorem(self) -> int:
        """Examples that Theorem 1 of Mahdavi et al. guarantees."""
        return bounds.mha_capacity(self.H, self.n, self.d_h)

    @property
    def words(self) -> str:
        """The sizes in words."""
        return f"{self.context}, H={self.H}, n={self.n}, d={self.d}, d_h={self.d_h}"

    def draw(self, fit: Fitting, g: torch.Generator) -> Problem:
        """Tokens, queries and labels are uniform; the start is Gaussian if data are balanced."""
        uniform = partial(torch.rand, generator=g, dtype=torch.float64)
        shape = (self.n, self.d)
        contexts = uniform(fit.T, *shape) if self.context == "own" else uniform(*shape)
        queries, labels = uniform(fit.T, self.d), uniform(fit.T)
        if fit.optimizer == "hinge":
            labels = (labels - 0.5).sign()
        maps = random_maps(g, self.H, self.d, min(self.d_h, self.d), LOGITS)
        heads = ScalarHeads(*maps, VALUES * gaussian(g, self.H, self.d))
        change = Coordinates.balancing(contexts, queries)
        if fit.coordinates == "raw":
            return Problem(change.outward(heads), contexts, queries, labels)
        return Problem(heads, contexts @ change.tokens, queries @ change.queries, labels)

    def way(self, fit: Fitting) -> str:
        """Adam is as published in the paper's coordinates at its rate; others are balanced."""
        if (fit.optimizer, fit.coordinates, fit.lr) == ("adam", "raw", AS_PUBLISHED["lr"]):
            return "Adam as published"
        names = {"lm": "Levenberg-Marquardt", "lbfgs": "L-BFGS", "adam": f"Adam, rate {fit.lr}"}
        name = (names | {"hinge": "squared hinge"})[fit.optimizer]
        return f"{name}, raw" if fit.coordinates == "raw" else name


class Network(NamedTuple):
    """The sizes of a network with ``H`` heads in each layer, and of its own contexts."""

    layers: int
    H: int
    n: int
    d: int
    d_h: int
    d_v: int

    kind = "fits of networks"
    derived = ("ceiling", "weights", "flat", "narrow")

    @property
    def ceiling(self) -> int:
        """Examples beyond which almost no labels can be met: ``P``."""
        return bounds.deep_ceiling([self.H] * self.layers, self.d_h, self.d_v, self.d)

    @property
    def weights(self) -> int:
        """All weights, whether they matter or not."""
        return self.layers * self.H * 2 * self.d * (self.d_h + self.d_v) + self.d

    @property
    def flat(self) -> int:
        """The ceiling of one layer of the same heads, and so of as many weights."""
        return self._replace(layers=1, H=self.layers * self.H).ceiling

    @property
    def narrow(self) -> int:
        """The ceiling of one layer of as many weights, in more heads with values of width one."""
        heads = (self.weights - self.d) // (2 * self.d * (self.d_h + 1))
        return self._replace(layers=1, H=heads, d_v=1).ceiling

    @property
    def words(self) -> str:
        """The sizes in words."""
        names = ("L", *self._fields[1:])
        return ", ".join(f"{name}={size}" for name, size in zip(names, self, strict=True))

    def draw(self, fit: Fitting, g: torch.Generator) -> Problem:
        """Entries of tokens are uniform with mean zero and variance one."""
        uniform = partial(torch.rand, generator=g, dtype=torch.float64)
        tokens, labels = 3**0.5 * (2 * uniform(fit.T, self.n, self.d) - 1), uniform(fit.T)
        start = {"logits": fit.logits, "values": fit.values}
        heads = (self.H,) * self.layers
        weights = random_deep(heads, self.d_h, self.d_v, self.d, g, **start)
        return Problem(weights, tokens, None, labels)

    def way(self, fit: Fitting) -> str:
        """The optimizer, and whether its start is sharp."""
        name = {"lm": "Levenberg-Marquardt", "adam": "Adam"}[fit.optimizer]
        return f"{name}, sharp start" if fit.logits == SHARP["logits"] else name


@dataclass(frozen=True, eq=False)
class FitStudy(Study):
    """Fits of one kind of ``sizes`` as listed in ``fits.toml``, on the CPU, in float64.

    Its table has, beside what follows from these sizes, ``shape``, the sizes in words,
    ``fraction``, the part of the ceiling that ``T`` is, ``met``, whether all labels are, ``ratio``,
    of the least and the largest singular value, and ``way``, the optimizer in words.
    """

    sizes: type[Shape] | type[Network]

    config = Fitting

    @property
    def kind(self) -> str:
        return self.sizes.kind

    def fittings(self, profile: str) -> dict[Fitting, float]:
        """All fits, every setting explicit, each with the fraction of the ceiling that ``T`` is."""
        self.check_profile(profile)
        fits = {}
        for line in _TABLES[self.name][profile]:
            settings = with_settings(f"fits.toml, {self.name}", line, _TABLES["optimizers"])
            group, fractions = settings.pop("sizes"), settings.pop("fractions")
            seeds = range(settings.pop("seeds"))
            shapes = named_sizes(self.sizes, *_TABLES["groups"].get(group, [group]))
            for fraction, sizes, seed in itertools.product(fractions, shapes, seeds):
                fields = settings | sizes._asdict() | {"T": int(fraction * sizes.ceiling)}
                fits[Fitting(self.name, profile, seed=seed, **fields)] = fraction
        return fits

    def sizes_of(self, fit: Fitting) -> Any:
        """The sizes of what is fitted."""
        return self.sizes(*(getattr(fit, name) for name in self.sizes._fields))

    def examples(self, fit: Fitting) -> Problem:
        """Data and start: the same for all optimizers, and the same data for all starts."""
        sizes = self.sizes_of(fit)
        return sizes.draw(fit, generator(f"{tuple(sizes)} {fit.T}", str(fit.seed)))

    def configs(self, profile: str, selection: Selection = ALL) -> list[Fitting]:
        super().configs(profile, selection)
        return [*self.fittings(profile)]

    def perform(self, unit: Unit, device: str, root: Path | None = None) -> list[Row]:
        store.commit()
        return [(fit, _fitted(fit, self.examples(fit))) for fit in unit]

    def say(self, rows: Sequence[Row]) -> str:
        fit, result = rows[-1]
        problem = f"{fit.optimizer}, {fit.coordinates}, {self.sizes_of(fit).words}, T={fit.T}"
        end = f"{result.stop} after {result.made} steps at {result.error:.1e}"
        return f"{problem}, seed {fit.seed}: {end}"

    def table(self, rows: Iterable[Row]) -> pd.DataFrame:
        rows = [*rows]
        table = super().table(rows)
        fits = [fit for fit, _ in rows]
        sizes = [self.sizes_of(fit) for fit in fits]
        table["shape"] = [shape.words for shape in sizes]
        for field in self.sizes.derived:
            table[field] = [getattr(shape, field) for shape in sizes]
        listed = ChainMap(*map(self.fittings, {*table.profile}))
        pairs = [*zip(fits, sizes, strict=True)]
        table["fraction"] = [listed.get(fit, fit.T / shape.ceiling) for fit, shape in pairs]
        table["met"], table["ratio"] = table.stop == "met", table.least / table.largest
        return table.assign(way=[shape.way(fit) for fit, shape in pairs])

    def reached(self, table: pd.DataFrame) -> pd.DataFrame:
        """How far each optimizer gets at each size, in the order of the rows of this table.

        ``seeds`` is the fewest of a fraction, ``all`` the largest fraction up to which every seed
        met its labels, ``some`` the largest that any seed met, ``tried`` the largest tried;
        ``every`` and ``most`` are the labels of ``all`` and ``some``. 0 is none.
        """
        lines = []
        columns = ["shape", "way", *self.sizes._fields, *self.sizes.derived]
        for _, rows in table.groupby(["shape", "way"], sort=False):
            met = rows[rows.met]
            met_by_all_seeds = rows[rows.fraction <= whole_up_to(rows)]
            line = rows[columns].iloc[0].to_dict()
            line["seeds"] = rows.groupby("fraction").size().min()
            line["all"] = whole_up_to(rows)
            line["some"] = max(met.fraction, default=0.0)
            line["tried"] = rows.fraction.max()
            line["every"] = max(met_by_all_seeds["T"], default=0)
            line["most"] = max(met["T"], default=0)
            lines.append(line)
        return pd.DataFrame(lines)


def _fitted(fit: Fitting, problem: Problem) -> Fitted:
    """The time is that of the optimizer."""
    adam = partial(fitting.adam, rate=partial(warmup_cosine, fit), batch=fit.batch, seed=fit.seed)
    optimizers = {"lm": fitting.levenberg_marquardt, "lbfgs": fitting.lbfgs, "adam": adam}
    optimize = (optimizers | {"hinge": fitting.signs})[fit.optimizer]
    start = time.perf_counter()
    end = optimize(*problem, steps=fit.steps)
    seconds = time.perf_counter() - start
    data = problem.contexts, problem.queries, problem.labels
    return Fitted(
        error=end.error,
        made=end.steps,
        stop=end.stop,
        damping=end.damping,
        **fitting.limits(end.weights, *data)._asdict(),
        **origin(seconds, problem.labels.device),
    )


def whole_up_to(rows: pd.DataFrame) -> float:
    """The largest fraction up to which all fits met their labels at every fraction tried, or 0."""
    up_to = rows.groupby("fraction").met.all().cummin()
    return float(up_to[up_to].index.max()) if up_to.any() else 0.0


def named_sizes(sizes: type[Shape] | type[Network], *names: str) -> tuple[Any, ...]:
    """Sizes that ``fits.toml`` gives a name."""
    return tuple(sizes(**_TABLES["sizes"][name]) for name in names)


ONE, FOUR, SHARED = named_sizes(Shape, "one", "four", "shared")
AS_PUBLISHED, SOFT, SHARP = (
    with_settings("fits.toml", {"like": name}, _TABLES["optimizers"])
    for name in ("as-published", "soft-newton", "sharp-newton")
)
RATES = (1e-2, 3e-2)  # of Adam, where it is tuned

_WHAT = "how much of its ceiling a {} reaches (not in the paper)"
LAYER = FitStudy("answer-training", "mahdavi", _WHAT.format("layer"), Shape)
SIGNS = FitStudy("answer-signs", "mahdavi", "signs that a layer meets (not in the paper)", Shape)
DEEP = FitStudy("answer-depth", "mahdavi", _WHAT.format("network"), Network)
FITS: dict[str, FitStudy] = {study.name: study for study in (LAYER, SIGNS, DEEP)}
