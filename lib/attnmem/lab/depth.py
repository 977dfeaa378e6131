"""How much of their ceiling attention layers one after the other reach by training.

The network has skip connections and one output at its last token. Networks of a family have the
same heads in all, so the same number of weights, in one, two or three layers. Otherwise this is as
for one layer (:mod:`attnmem.lab.fits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..core import bounds
from ..core.deep import DeepWeights
from ..core.random import random_deep
from .fits import FitStudy, drawing, listed, sizes_of, whole_up_to
from .store import Fitting, Row

NAME = "answer-depth"


class Network(NamedTuple):
    """The sizes of a network with ``H`` heads in each layer, and of its own contexts."""

    layers: int
    H: int
    n: int
    d: int
    d_h: int
    d_v: int

    @property
    def ceiling(self) -> int:
        """Examples beyond which almost no labels can be met: ``P``."""
        return bounds.deep_ceiling([self.H] * self.layers, self.d_h, self.d_v, self.d)

    @property
    def weights(self) -> int:
        """All weights, whether they matter or not."""
        return self.layers * self.H * 2 * self.d * (self.d_h + self.d_v) + self.d

    @property
    def words(self) -> str:
        """The network in words."""
        sizes = {"L": self.layers} | {k: v for k, v in self._asdict().items() if k != "layers"}
        return ", ".join(f"{name}={size}" for name, size in sizes.items())


def family(heads: int, d: int, width: int, depths: Sequence[int] = (1, 2, 3)) -> list[Network]:
    """Networks of so many heads in all, of key and value size ``width``, with equal weights."""
    return [Network(L, heads // L, 4, d, width, width) for L in depths]


FAMILIES = tuple(tuple(family(6, d, width)) for d, width in ((4, 2), (6, 2), (8, 3)))
WIDE = (*family(8, 4, 2, [1]), *family(8, 8, 3, [1]))  # with the ceiling of a deeper network
LARGE = family(12, 16, 4)

SOFT, SHARP = ({"logits": logits, "values": 0.5} for logits in (0.5, 6.0))
NEWTON = MappingProxyType({"optimizer": "lm", "steps": 300})
ADAM = MappingProxyType(
    {"optimizer": "adam", "steps": 10_000, "lr": 1e-2, "lr_start": 0.01, "lr_end": 0.0}
)


def fittings(profile: str) -> dict[Fitting, float]:
    """All fits, the most telling first, each with the fraction of the ceiling that ``T`` is.

    ``profile`` is ``paper`` or ``quick``; another one is refused. Every setting is explicit.
    """
    DEPTH[NAME].check_profile(profile)
    if profile == "quick":
        tiny, ways = family(2, 3, 2, [1, 2]), (NEWTON | {"steps": 50}, ADAM | {"steps": 500})
        parts = [(tiny, (0.5,), 1, way | SOFT) for way in ways]
    else:
        newton = NEWTON | SOFT
        small, of_eight = [*FAMILIES[0], *FAMILIES[1]], FAMILIES[2]
        small.sort(key=lambda net: (2, 1, 3).index(net.layers))
        parts = [
            (small, (0.9, 0.95, 0.8), 5, newton),
            (FAMILIES[1][1:2], (0.8, 0.95), 5, NEWTON | SHARP),
            ([net for net in small if net.layers > 1], (0.7, 0.6), 5, newton),
            (of_eight, (0.9,), 5, newton),
            (LARGE[1:2], (0.8,), 1, newton),
            (small, (0.98, 1.0), 5, newton),
            (FAMILIES[0][1:], (0.8,), 3, ADAM | SOFT),
            (of_eight, (0.8, 0.95), 5, newton),
            (of_eight[2:], (0.7, 0.6), 5, newton),
            (WIDE, (0.9, 0.95), 5, newton),
            (of_eight[:2], (0.98,), 5, newton),
            (of_eight[1:2], (1.0,), 5, newton),
            (of_eight[:1], (1.0,), 2, newton),  # where the time for measuring ended
        ]
    return listed(NAME, profile, parts, context="own", coordinates="raw")


class Examples(NamedTuple):
    """Data of a fit, and where it starts; ``queries`` is None, since the last token asks."""

    weights: DeepWeights
    contexts: Float[Tensor, "T n d"]
    queries: None
    labels: Float[Tensor, " T"]


def examples(fit: Fitting) -> Examples:
    """Data and start of a fit: the same for all optimizers; the same data for all starts.

    Entries of tokens are uniform with mean zero and variance one, labels are uniform on [0, 1].
    """
    net = sizes_of(fit, Network)
    g = drawing(net, fit)
    uniform = partial(torch.rand, generator=g, dtype=torch.float64)
    tokens, labels = 3**0.5 * (2 * uniform(fit.T, net.n, net.d) - 1), uniform(fit.T)
    start = {"logits": fit.logits, "values": fit.values}
    weights = random_deep((net.H,) * net.layers, net.d_h, net.d_v, net.d, g, **start)
    return Examples(weights, tokens, None, labels)


class DepthStudy(FitStudy):
    """The fits of :func:`fittings`, on the CPU, in float64.

    Its table is that of :class:`~attnmem.lab.fits.FitStudy`, with ``ceiling`` and ``weights``
    of the :class:`Network` and ``ratio``, of the least and the largest singular value.
    """

    kind = "fits of networks"
    sizes, known = Network, ("ceiling", "weights")
    fittings = staticmethod(fittings)
    examples = staticmethod(examples)

    def table(self, rows: Iterable[Row]) -> pd.DataFrame:
        return super().table(rows).assign(ratio=lambda table: table.least / table.largest)

    def way(self, fit: Fitting) -> str:
        """The optimizer, and whether its start is sharp."""
        name = {"lm": "Levenberg-Marquardt", "adam": "Adam"}[fit.optimizer]
        return name + (", sharp start" if fit.logits == SHARP["logits"] else "")


WHAT = "how much of its ceiling a network reaches (not in the paper)"
DEPTH = {NAME: DepthStudy(NAME, "mahdavi", WHAT)}


def reached(table: pd.DataFrame) -> pd.DataFrame:
    """How many labels each network met, in the order of the rows of this study's table.

    ``all`` is the largest fraction up to which every seed met its labels at every fraction tried,
    and ``every`` that number of labels (0 if there is none); ``some`` is the largest number that
    any seed met, and ``seeds`` is the fewest of a fraction. ``flat`` is the ceiling of one layer of
    the same heads, so with as many weights.
    """
    lines = []
    for net, rows in table.groupby([*Network._fields], sort=False):
        net, right = Network(*net), rows.groupby("fraction").met
        safe = rows[rows.fraction <= whole_up_to(rows)]
        flat = net._replace(layers=1, H=net.layers * net.H)
        lines.append(
            net._asdict()
            | {"weights": net.weights, "ceiling": net.ceiling, "flat": flat.ceiling}
            | {"all": whole_up_to(rows), "every": safe["T"].max() if len(safe) else 0}
            | {"some": rows["T"][rows.met].max() if rows.met.any() else 0}
            | {"seeds": right.size().min()}
        )
    return pd.DataFrame(lines)
