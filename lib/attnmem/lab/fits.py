"""How much of its ceiling one layer reaches by training: which fits, and where they ended.

The layer has one output, the labels are uniform on [0, 1] as tokens and queries are. The number of
examples is a fraction of the ceiling ``P(H)``, beyond which almost no labels can be met. Optimizers
that are given the same shape, number of examples and seed have the same data and the same start.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..core import bounds
from ..core.random import map_scale
from ..theory import fitting
from ..theory.tangents import Coordinates, ScalarHeads
from . import store
from .devices import origin
from .protocols import warmup_cosine
from .store import Fitted, Fitting, Row
from .study import ALL, Selection, Study, Unit

LOGITS, VALUES = 0.3, 0.5  # standard deviations at the start: of logits, and of a head's values
NAME = "answer-training"


class Shape(NamedTuple):
    """The sizes of a layer and of its contexts, ``own`` or ``shared``."""

    context: str
    H: int
    n: int
    d: int
    d_h: int

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
        """The shape in words."""
        return f"{self.context}, H={self.H}, n={self.n}, d={self.d}, d_h={self.d_h}"


ONE = Shape("own", 1, 4, 8, 8)
OWN, SHARED = Shape("own", 4, 4, 8, 8), Shape("shared", 4, 6, 8, 5)
SMALL = (
    *(ONE, Shape("own", 4, 4, 8, 2), SHARED, Shape("shared", 8, 4, 8, 3), OWN),
    *(Shape("own", 2, 8, 12, 12), Shape("own", 8, 3, 6, 6)),
)

NEWTON = MappingProxyType({"optimizer": "lm", "coordinates": "balanced", "steps": 300})
LBFGS = MappingProxyType({"optimizer": "lbfgs", "coordinates": "balanced", "steps": 5000})
AS_PUBLISHED = MappingProxyType(  # Mahdavi et al. 2024, Appendix I, for T up to 25,600
    {"optimizer": "adam", "coordinates": "raw", "steps": 50_000, "batch": 256}
    | {"lr": 1e-3, "lr_start": 0.01, "lr_end": 0.0}
)
TUNED = MappingProxyType(AS_PUBLISHED | {"coordinates": "balanced", "steps": 30_000, "batch": None})
RATES = (1e-2, 3e-2)  # of Adam, where it is tuned


def fittings(profile: str) -> dict[Fitting, float]:
    """All fits, about the cheapest first, each with the fraction of the ceiling that ``T`` is.

    ``profile`` is ``paper`` or ``quick``; another one is refused. Every setting is explicit.
    """
    FITS[NAME].check_profile(profile)
    if profile == "quick":
        tiny = (Shape("own", 2, 3, 4, 4), Shape("shared", 2, 3, 4, 4))
        ways = (NEWTON | {"steps": 50}, LBFGS | {"steps": 200}, TUNED | {"steps": 500, "lr": 1e-2})
        parts = [(tiny, (0.5,), 1, way) for way in ways]
    else:
        most, mid = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99, 1.0), (0.5, 0.8, 0.97)
        two = (OWN, SHARED)
        one_published, two_published = ((Shape("own", H, 32, 64, 64),) for H in (1, 2))
        large = NEWTON | {"steps": 150}
        parts = [
            ((ONE,), (0.2, 0.3, 0.4), 5, NEWTON),
            (SMALL, most, 5, NEWTON),
            (two, (0.5, 0.8, 0.97), 3, NEWTON | {"coordinates": "raw"}),
            (one_published, (0.5, 0.6, 0.7), 3, large),
            (two, mid, 3, LBFGS),
            *((two, mid, 3, TUNED | {"lr": rate}) for rate in RATES),
            (two_published, (0.5, 0.6), 1, large),
            (two, (0.25, 0.5), 3, AS_PUBLISHED),
            ((OWN,), (0.5,), 3, AS_PUBLISHED | {"coordinates": "balanced"}),
            ((OWN,), (0.5,), 3, AS_PUBLISHED | {"lr": RATES[0]}),
            (two, (0.8, 0.97), 3, AS_PUBLISHED),
            (two_published, (0.7, 0.8), 1, large),
            (one_published, (0.8,), 1, large),
            (two_published, (0.9,), 1, large),
        ]
    return listed(NAME, profile, parts)


def listed(name: str, profile: str, parts: Iterable[Any], **common: Any) -> dict[Fitting, float]:
    """The fits of some parts: each has shapes, fractions of their ceilings, seeds and a way."""
    return {
        Fitting(name, profile, seed=seed, T=T, **shape._asdict(), **common, **way): fraction
        for shapes, fractions, seeds, way in parts
        for fraction in fractions
        for shape in shapes
        for T in [int(fraction * shape.ceiling)]
        for seed in range(seeds)
    }


def drawing(sizes: NamedTuple, fit: Fitting) -> torch.Generator:
    """Where the data of a fit with these sizes and its start come from."""
    digest = hashlib.sha256(f"{tuple(sizes)} {fit.T} {fit.seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def sizes_of(fit: Fitting, kind: type = Shape) -> NamedTuple:
    """The sizes of a fit, as a :class:`Shape` or of another kind with the same names."""
    return kind(*(getattr(fit, name) for name in kind._fields))


class Examples(NamedTuple):
    """Data in the coordinates of a fit, and where it starts."""

    heads: ScalarHeads
    contexts: Float[Tensor, "*T n d"]
    queries: Float[Tensor, "T d"]
    labels: Float[Tensor, " T"]


def examples(fit: Fitting) -> Examples:
    """Data and start of a fit: the same for all optimizers, in the coordinates that it has.

    Tokens, queries and labels are uniform on [0, 1]. The start is Gaussian in balanced coordinates.
    """
    g = drawing(sizes_of(fit), fit)
    d, rank = fit.d, min(fit.d_h, fit.d)
    uniform = partial(torch.rand, generator=g, dtype=torch.float64)
    gaussian = partial(torch.randn, generator=g, dtype=torch.float64)
    contexts = uniform(*([fit.T] if fit.context == "own" else []), fit.n, d)
    queries, labels = uniform(fit.T, d), uniform(fit.T)
    scale = map_scale(LOGITS, d, rank)
    maps = (scale * gaussian(fit.H, d, rank) for _ in range(2))
    heads = ScalarHeads(*maps, VALUES * gaussian(fit.H, d))
    change = Coordinates.balancing(contexts, queries)
    if fit.coordinates == "raw":
        return Examples(change.outward(heads), contexts, queries, labels)
    return Examples(heads, contexts @ change.tokens, queries @ change.queries, labels)


class FitStudy(Study):
    """The fits of :func:`fittings`, on the CPU, in float64.

    Its table has ``ceiling``, ``floor`` and ``theorem`` of the :class:`Shape`, ``shape`` in words,
    ``fraction``, the part of the ceiling that ``T`` is, ``met``, whether all labels are, and
    ``way``, the optimizer in words.
    """

    kind = "fits of one layer"
    config = Fitting
    sizes, known = Shape, ("ceiling", "floor", "theorem")
    fittings = staticmethod(fittings)
    examples = staticmethod(examples)

    def perform(self, unit: Unit, device: str) -> list[Row]:
        store.commit()
        return [(fit, _fitted(fit, self.examples(fit))) for fit in unit]

    def say(self, rows: Sequence[Row]) -> str:
        fit, result = rows[-1]
        what = f"{fit.optimizer}, {fit.coordinates}, {sizes_of(fit, self.sizes).words}, T={fit.T}"
        ends = f"{result.stop} after {result.made} steps at {result.error:.1e}"
        return f"{what}, seed {fit.seed}: {ends}"

    def configs(self, profile: str, selection: Selection = ALL) -> list[Fitting]:
        super().configs(profile, selection)
        return [*self.fittings(profile)]

    def table(self, rows: Iterable[Row]) -> pd.DataFrame:
        rows = [*rows]
        table = super().table(rows)
        shapes = [sizes_of(fit, self.sizes) for fit, _ in rows]
        fraction_of = {
            (sizes_of(fit, self.sizes), fit.T): fraction
            for profile in {*table.profile}
            for fit, fraction in self.fittings(profile).items()
        }
        sizes = [*zip(shapes, table["T"], strict=True)]
        return table.assign(
            shape=[shape.words for shape in shapes],
            **{name: [getattr(shape, name) for shape in shapes] for name in self.known},
            fraction=[fraction_of.get((shape, T), T / shape.ceiling) for shape, T in sizes],
            met=table.stop == "met",
            way=[self.way(fit) for fit, _ in rows],
        )

    def way(self, fit: Fitting) -> str:
        """Adam is as published in the paper's coordinates at its rate; others are balanced."""
        if (fit.optimizer, fit.coordinates, fit.lr) == ("adam", "raw", AS_PUBLISHED["lr"]):
            return "Adam as published"
        names = {"lm": "Levenberg-Marquardt", "lbfgs": "L-BFGS", "adam": f"Adam, rate {fit.lr}"}
        return names[fit.optimizer] + (", raw" if fit.coordinates == "raw" else "")


WHAT = "how much of its ceiling a layer reaches (not in the paper)"
FITS = {NAME: FitStudy(NAME, "mahdavi", WHAT)}


def _fitted(fit: Fitting, given: NamedTuple) -> Fitted:
    """Fit the data of some ``Examples``; the time is that of the optimizer."""
    start = time.perf_counter()
    if fit.optimizer == "adam":
        rate = partial(warmup_cosine, fit)
        optimizer = partial(fitting.adam, rate=rate, batch=fit.batch, seed=fit.seed)
    else:
        optimizer = {"lm": fitting.levenberg_marquardt, "lbfgs": fitting.lbfgs}[fit.optimizer]
    end = optimizer(*given, steps=fit.steps)
    seconds = time.perf_counter() - start
    return Fitted(
        error=end.error,
        made=end.steps,
        stop=end.stop,
        damping=end.damping,
        **fitting.limits(end.weights, *given[1:])._asdict(),
        **origin(seconds, given.labels.device),
    )


def whole_up_to(rows: pd.DataFrame) -> float:
    """The largest fraction up to which all fits met their labels at every fraction tried, or 0."""
    whole = rows.groupby("fraction").met.all().cummin()
    return float(whole[whole].index.max()) if whole.any() else 0.0


def reached(table: pd.DataFrame) -> pd.DataFrame:
    """How far each optimizer gets at each shape, in the order of the rows of this study's table.

    ``seeds`` is the fewest of a fraction, ``all`` the largest fraction up to which every seed met
    its labels at every fraction tried, ``some`` the largest that any seed met (0 if none), and
    ``tried`` the largest tried. ``floor`` and ``theorem`` are in units of the ceiling.
    """
    lines = []
    for (shape, way), rows in table.groupby(["shape", "way"], sort=False):
        right = rows.groupby("fraction").met
        one = rows.iloc[0]
        lines.append(
            {"shape": shape, "way": way, "ceiling": one.ceiling, "seeds": int(right.size().min())}
            | {"all": whole_up_to(rows)}
            | {"some": float(rows.fraction[rows.met].max()) if rows.met.any() else 0.0}
            | {"tried": float(rows.fraction.max())}
            | {name: getattr(one, name) / one.ceiling for name in ("floor", "theorem")}
        )
    return pd.DataFrame(lines)
