"""How much of its ceiling one layer reaches by training: which fits, and what they found.

The layer has one output, the labels are uniform on [0, 1] as tokens and queries are. The number of
examples is a fraction of the ceiling ``P(H)``, beyond which almost no labels can be met. Optimizers
that are given the same shape, number of examples and seed have the same data and the same start.
:func:`fittings` lists the fits, and :func:`table` reads their rows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from .. import bounds, fitting, results
from ..attention.coordinates import Coordinates
from ..attention.tangents import ScalarHeads
from ..constructions.random_layers import map_scale
from ..results import Fitted, Fitting, Row
from ..training import warmup_cosine
from ..training.places import device_name
from . import read
from .study import Done, Part, Rows, Unit, check_profile, check_whole, source_of
from .trainings import PROFILES

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
    def words(self) -> str:
        """The shape in words."""
        return f"{self.context}, H={self.H}, n={self.n}, d={self.d}, d_h={self.d_h}"

    @property
    def theorem(self) -> int:
        """Examples that Theorem 1 of Mahdavi et al. guarantees."""
        return bounds.mha_capacity(self.H, self.n, self.d_h)


ONE = Shape("own", 1, 4, 8, 8)
NARROW = Shape("own", 4, 4, 8, 2)
OWN, SHARED = Shape("own", 4, 4, 8, 8), Shape("shared", 4, 6, 8, 5)
SMALL = (ONE, NARROW, SHARED, Shape("shared", 8, 4, 8, 3), OWN, Shape("own", 2, 8, 12, 12))
SMALL = (*SMALL, Shape("own", 8, 3, 6, 6))
PUBLISHED = {heads: Shape("own", heads, 32, 64, 64) for heads in (1, 2)}

NEWTON = MappingProxyType({"optimizer": "lm", "coordinates": "balanced", "steps": 300})
LBFGS = MappingProxyType({"optimizer": "lbfgs", "coordinates": "balanced", "steps": 5000})
AS_PUBLISHED = MappingProxyType(  # Mahdavi et al. 2024, Appendix I, for T up to 25,600
    {
        "optimizer": "adam",
        "coordinates": "raw",
        "steps": 50_000,
        "batch": 256,
        "lr": 1e-3,
        "lr_start": 0.01,
        "lr_end": 0.0,
    }
)
TUNED = MappingProxyType(AS_PUBLISHED | {"coordinates": "balanced", "steps": 30_000, "batch": None})
RATES = (1e-2, 3e-2)  # of Adam, where it is tuned


def _each(
    shapes: Sequence[Shape], fractions: Sequence[float], seeds: int, profile: str, **how: Any
) -> list[Fitting]:
    return [
        Fitting(
            experiment=NAME,
            profile=profile,
            T=int(fraction * shape.ceiling),
            seed=seed,
            **shape._asdict(),
            **how,
        )
        for fraction in fractions
        for shape in shapes
        for seed in range(seeds)
    ]


def fittings(profile: str) -> list[Fitting]:
    """All fits, about the cheapest first.

    Args:
        profile: ``paper`` or ``quick``.

    Returns:
        The fits, with every setting explicit.

    Raises:
        ValueError: The profile is unknown.
    """
    check_profile(profile, PROFILES)
    if profile == "quick":
        ways = (NEWTON | {"steps": 50}, LBFGS | {"steps": 200}, TUNED | {"steps": 500, "lr": 1e-2})
        tiny = (Shape("own", 2, 3, 4, 4), Shape("shared", 2, 3, 4, 4))
        return [fit for way in ways for fit in _each(tiny, (0.5,), 1, profile, **way)]
    each = partial(_each, profile=profile)
    most, mid = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99, 1.0), (0.5, 0.8, 0.97)
    large, two = NEWTON | {"steps": 150}, (OWN, SHARED)
    return [
        *each((ONE,), (0.2, 0.3, 0.4), 5, **NEWTON),
        *each(SMALL, most, 5, **NEWTON),
        *each(two, (0.5, 0.8, 0.97), 3, **NEWTON | {"coordinates": "raw"}),
        *each((PUBLISHED[1],), (0.5, 0.6, 0.7), 3, **large),
        *each(two, mid, 3, **LBFGS),
        *(fit for rate in RATES for fit in each(two, mid, 3, **TUNED | {"lr": rate})),
        *each((PUBLISHED[2],), (0.5, 0.6), 1, **large),
        *each(two, (0.25, 0.5), 3, **AS_PUBLISHED),
        *each((OWN,), (0.5,), 3, **AS_PUBLISHED | {"coordinates": "balanced"}),
        *each((OWN,), (0.5,), 3, **AS_PUBLISHED | {"lr": RATES[0]}),
        *each(two, (0.8, 0.97), 3, **AS_PUBLISHED),
        *each((PUBLISHED[2],), (0.7, 0.8), 1, **large),
        *each((PUBLISHED[1],), (0.8,), 1, **large),
        *each((PUBLISHED[2],), (0.9,), 1, **large),
    ]


class Examples(NamedTuple):
    """Data in the coordinates of a fit, and where it starts."""

    heads: ScalarHeads
    contexts: Float[Tensor, "*T n d"]
    queries: Float[Tensor, "T d"]
    labels: Float[Tensor, " T"]


def examples(asked: Fitting) -> Examples:
    """Data and start of a fit: the same for all optimizers, in the coordinates of this one.

    Tokens, queries and labels are uniform on [0, 1]. The start is Gaussian in balanced coordinates.

    Args:
        asked: The fit.

    Returns:
        Both, in float64.
    """
    shape = Shape(asked.context, asked.H, asked.n, asked.d, asked.d_h)
    digest = hashlib.sha256(f"{tuple(shape)} {asked.T} {asked.seed}".encode()).digest()
    g = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    d, rank = asked.d, min(asked.d_h, asked.d)
    uniform = partial(torch.rand, generator=g, dtype=torch.float64)
    gaussian = partial(torch.randn, generator=g, dtype=torch.float64)
    contexts = uniform(*([asked.T] if asked.context == "own" else []), asked.n, d)
    queries, labels = uniform(asked.T, d), uniform(asked.T)
    scale = map_scale(LOGITS, d, rank)
    heads = ScalarHeads(
        scale * gaussian(asked.H, d, rank),
        scale * gaussian(asked.H, d, rank),
        VALUES * gaussian(asked.H, d),
    )
    change = Coordinates.balancing(contexts, queries)
    if asked.coordinates == "raw":
        return Examples(change.outward(heads), contexts, queries, labels)
    return Examples(heads, contexts @ change.tokens, queries @ change.queries, labels)


def perform(asked: Fitting) -> Fitted:
    """Fit a layer and measure where it ended.

    Args:
        asked: The fit.

    Returns:
        Its outcome.
    """
    start, given = time.perf_counter(), examples(asked)
    if asked.optimizer == "adam":
        rate = partial(warmup_cosine, asked)
        optimizer = partial(fitting.adam, rate=rate, batch=asked.batch, seed=asked.seed)
    else:
        optimizer = {"lm": fitting.levenberg_marquardt, "lbfgs": fitting.lbfgs}[asked.optimizer]
    fit = optimizer(*given, steps=asked.steps)
    seconds = time.perf_counter() - start
    return Fitted(
        error=fit.error,
        made=fit.steps,
        stop=fit.stop,
        damping=fit.damping,
        wall_s=round(seconds, 3),
        device=device_name(given.queries.device),
        torch=torch.__version__,
        commit=results.commit(),
        **fitting.limits(fit.heads, *given[1:])._asdict(),
    )


class FitStudy(NamedTuple):
    """The fits of :func:`fittings`."""

    name: str
    paper: str
    what: str

    kind = "fits of one layer"
    profiles = PROFILES
    usual = "paper"
    variants = ()
    foreseen = True

    source = source_of
    check = check_whole

    def units(
        self, profile: str, part: Part, rows: Rows, device: str, workers: int, urgent: bool
    ) -> Iterator[Unit]:
        """The fits that have no row yet, one by one.

        Args:
            profile: ``paper`` or ``quick``.
            part: The whole.
            rows: Stored rows by key.
            device: Has no effect: fits are computed on the CPU, in float64.
            workers: Has no effect, since a unit is one fit everywhere.
            urgent: Has no effect.

        Yields:
            A fit.
        """
        self.check(profile, part)
        yield from ([asked] for asked in fittings(profile) if asked.key not in rows)

    def perform(self, unit: Unit, device: str) -> list[Row]:
        """Fit layers, on the CPU.

        Args:
            unit: The fits.
            device: Has no effect.

        Returns:
            Each fit with its outcome.
        """
        return [(asked, perform(asked)) for asked in unit]

    def done(self, profile: str, part: Part, rows: Rows) -> Done:
        """How many of the fits have a row.

        Args:
            profile: ``paper`` or ``quick``.
            part: The whole.
            rows: Stored rows by key.

        Returns:
            The number of fits with a row, and of all fits.
        """
        self.check(profile, part)
        listed = fittings(profile)
        return Done(sum(asked.key in rows for asked in listed), len(listed))

    def say(self, rows: Sequence[Row]) -> str:
        """What was fitted, and how it ended."""
        asked, found = rows[-1]
        shape = f"{asked.context} H={asked.H} n={asked.n} d={asked.d} d_h={asked.d_h} T={asked.T}"
        ends = f"{found.stop} after {found.made} steps at {found.error:.1e}"
        return f"{asked.optimizer}, {asked.coordinates}, {shape}, seed {asked.seed}: {ends}"


FITS = {
    NAME: FitStudy(NAME, "mahdavi", "how much of its ceiling a layer reaches (not in the paper)")
}


def table(profile: str) -> pd.DataFrame:
    """The rows with the bounds of their shapes.

    Args:
        profile: ``paper`` or ``quick``.

    Returns:
        The columns of the store, and more. ``ceiling``, ``floor`` and ``theorem`` are those of the
        :class:`Shape`, ``shape`` is the shape in words, ``fraction`` the one of the ceiling
        that was asked for, ``met`` whether all labels are, ``way`` the optimizer in words.
    """
    found = results.as_table(read.rows(NAME, profile).values(), results.FITS)
    shapes = [Shape(*sizes) for sizes in zip(*(found[f] for f in Shape._fields), strict=True)]
    counts = {name: [getattr(shape, name) for shape in shapes] for name in BOUNDS}
    found = found.assign(shape=[shape.words for shape in shapes], **counts)
    fractions = [_fraction(*sizes) for sizes in zip(found["T"], found.ceiling, strict=True)]
    return found.assign(fraction=fractions, met=found.stop == "met", way=_ways(found))


BOUNDS = ("ceiling", "floor", "theorem")
FRACTIONS = (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99, 1.0)


def _fraction(T: int, ceiling: int) -> float:
    """The fraction of the ceiling that was asked for, of which ``T`` is the whole part."""
    return next(fraction for fraction in FRACTIONS if int(fraction * ceiling) == T)


def _ways(found: pd.DataFrame) -> list[str]:
    """Adam is as published in the paper's coordinates at the paper's rate; others are balanced."""
    ways = []
    for optimizer, coordinates, rate in found[["optimizer", "coordinates", "lr"]].itertuples(False):
        if optimizer == "adam" and (coordinates, rate) == ("raw", AS_PUBLISHED["lr"]):
            ways.append("Adam as published")
            continue
        names = {"lm": "Levenberg-Marquardt", "lbfgs": "L-BFGS", "adam": f"Adam, rate {rate}"}
        ways.append(names[optimizer] + (", raw" if coordinates == "raw" else ""))
    return ways


def reached(found: pd.DataFrame) -> pd.DataFrame:
    """How far each optimizer gets at each shape.

    Args:
        found: Lines of a :func:`table`.

    Returns:
        A line for each shape and way, in the order of their rows. ``seeds`` is the fewest of a
        fraction, ``all`` the largest fraction up to which every seed met its labels at every
        fraction tried, ``some`` the largest that any seed met, and ``tried`` the largest tried. A
        fraction that nothing met is 0. ``floor`` and ``theorem`` are in units of the ceiling.
    """
    lines = []
    for (shape, way), rows in found.groupby(["shape", "way"], sort=False):
        right = rows.groupby("fraction").met
        whole = right.all().cummin()
        one = rows.iloc[0]
        lines.append(
            {"shape": shape, "way": way, "ceiling": one.ceiling, "seeds": int(right.size().min())}
            | {"all": float(whole[whole].index.max()) if whole.any() else 0.0}
            | {"some": float(rows.fraction[rows.met].max()) if rows.met.any() else 0.0}
            | {"tried": float(rows.fraction.max())}
            | {name: getattr(one, name) / one.ceiling for name in ("floor", "theorem")}
        )
    return pd.DataFrame(lines)
