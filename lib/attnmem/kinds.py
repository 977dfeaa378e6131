"""The kinds of rows: what was asked for, what was measured, and the columns of their files.

Rows are trainings (:class:`Run`, :class:`Outcome`), tests of an assumption on features
(:class:`Check`, :class:`Finding`), or fits of one layer to labels (:class:`Fitting`,
:class:`Fitted`). :mod:`attnmem.rows` writes rows as text.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from .checks import plain, refuse


class Configuration:
    """What was asked for: all that a row's key depends on. Names its file by two of its fields."""

    experiment: str
    profile: str

    def __post_init__(self) -> None:
        """Numbers of numpy have no text in a key: they become Python's."""
        for name, value in vars(self).items():
            object.__setattr__(self, name, plain(value))

    @property
    def key(self) -> str:
        """Hash of the full configuration: what identifies the row, and seeds a run.

        Fields that are ``None`` are left out, so a new field that is ``None`` changes no old key.
        """
        applicable = {k: v for k, v in vars(self).items() if v is not None}
        text = json.dumps(applicable, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Run(Configuration):
    """One training, with every hyper-parameter explicit; ``None`` is *not applicable*.

    ``model`` is ``aot``, ``mlp`` or ``mha``; ``variant`` says which reading of the paper it trains.
    ``N``: vocabulary, or classes of a classification; ``n``: context length; ``T``: examples (for
    bigrams, the pairs of one epoch); ``d``, ``d_h``, ``H``, ``width``, ``layers``: as on the
    notation page. ``context``: ``shared`` or ``random``. The rate goes from ``lr * lr_start`` to
    ``lr * lr_end`` by ``schedule``. ``products``: ``tf32`` where a GPU may compute them so.
    ``table``: the number of the table of next tokens, or of the set of examples, that all seeds
    share, where they do not draw their own. ``last_batch``: ``short`` where an epoch's last batch
    holds what is left; otherwise the next epoch fills it up.
    """

    experiment: str
    profile: str
    model: str
    variant: str
    N: int | None
    n: int | None
    T: int
    d: int
    d_h: int
    H: int
    width: int | None
    layers: int
    seed: int
    steps: int
    task: str
    context: str | None
    batch: int
    schedule: str
    lr: float
    lr_start: float
    lr_end: float
    evaluate_every: int | None = None
    early_stop: bool | None = None
    products: str | None = None
    table: int | None = None
    last_batch: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run measured.

    ``tf32``: whether reduced-precision products were asked for. Where the training records them:
    ``curve``, accuracy on all the associations there are after every epoch; ``best_step``, the step
    after which the weights that count were reached; and of attention heads, at 32 equally spaced
    moments, ``saturated``, the share of all pairs of an example and a head that is saturated on it,
    and ``served``, the share of examples that some head is not saturated on; ``serving``, at the
    end, the share of examples with 0, 1, ..., H such heads. Shares are rounded to four places.
    ``diverged``: the step after which the loss was first seen not finite; there is then neither an
    accuracy nor a loss. Otherwise there is a loss.
    """

    accuracy: float | None
    loss: float | None
    wall_s: float
    device: str
    torch: str
    commit: str
    tf32: bool = False
    curve: tuple[float, ...] | None = None
    best_step: int | None = None
    saturated: tuple[float, ...] | None = None
    served: tuple[float, ...] | None = None
    serving: tuple[float, ...] | None = None
    diverged: int | None = None


@dataclass(frozen=True)
class Check(Configuration):
    """A test of linear independence on the features of ``T`` examples, each of ``n`` tokens.

    ``experiment``: such as ``assumptions-vision``; ``profile``: the tier that the data are of.
    ``source``: the data; ``architecture``, ``map``, ``dtype``: where the features come from
    (:mod:`attnmem.features`). ``vectors``: ``queries`` or ``relaxed``, of which ``samples`` random
    subsets of ``size`` are tested, or ``contexts``, of which each is tested for rank ``size``, or
    ``positions``, one table of them; or ``labels``: as many draws of random labels for ``size``
    examples, which a read-out of the next attention layer is trained to meet.
    """

    experiment: str
    profile: str
    source: str
    architecture: str
    map: str
    dtype: str
    vectors: str
    T: int
    n: int
    d: int
    size: int
    samples: int
    seed: int


@dataclass(frozen=True)
class Finding:
    """What a test found: ``dependent`` of the samples have a rank below their size.

    Ranks were computed for ``ranked`` of the samples and lie from ``least_rank`` to ``most_rank``.
    Of labels, the number that was met takes the place of the rank.
    """

    dependent: int
    ranked: int
    least_rank: int | None
    most_rank: int | None
    wall_s: float
    device: str
    torch: str
    commit: str


@dataclass(frozen=True)
class Fitting(Configuration):
    """One layer with one output, fitted to uniform labels of ``T`` examples, in float64.

    ``optimizer``: ``lm``, ``lbfgs`` or ``adam``; ``coordinates``: ``raw``, or ``balanced``
    (:class:`attnmem.attention.coordinates.Coordinates`). ``context``: ``own`` or ``shared``.
    ``steps``: the most that are made. Of Adam, ``batch`` (None for all examples), and the rate as
    for :class:`Run`, with a linear rise and a cosine.
    """

    experiment: str
    profile: str
    optimizer: str
    coordinates: str
    context: str
    H: int
    n: int
    d: int
    d_h: int
    T: int
    seed: int
    steps: int
    batch: int | None = None
    lr: float | None = None
    lr_start: float | None = None
    lr_end: float | None = None


@dataclass(frozen=True)
class Fitted:
    """Where a fit ended after ``made`` steps, and why: ``met``, ``stuck`` or ``steps``.

    ``error`` is the largest error, ``rms`` their root mean square, both in units of the largest
    label. ``damping`` is the last one of Levenberg-Marquardt. The others are described at
    :class:`attnmem.fitting.Limits`.
    """

    error: float
    rms: float
    made: int
    stop: str
    damping: float | None
    gradient: float
    least: float
    largest: float
    saturated: float
    wall_s: float
    device: str
    torch: str
    commit: str


@dataclass(frozen=True)
class Kind:
    """A configuration and what is measured for it, as the fields of one row."""

    configuration: type[Configuration]
    measured: type

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        """The type of every field, in the order of the file."""
        return get_type_hints(self.configuration) | get_type_hints(self.measured)

    @functools.cached_property
    def columns(self) -> list[str]:
        """The header of a new file."""
        return [*self.hints, "key", "checksum"]

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The fields that a file may lack, and what they are in all of its rows."""
        return {
            field.name: field.default
            for cls in (self.configuration, self.measured)
            for field in dataclasses.fields(cls)
            if field.default is not dataclasses.MISSING
        }

    def accepts(self, header: Sequence[str]) -> bool:
        """Whether a file of this kind may begin so: all columns in order, or some optional less."""
        present = [name for name in self.columns if name in header or name not in self.defaults]
        return present == list(header)

    def holds(self, row: Row, header: Sequence[str]) -> bool:
        """Whether a file with this header has a place for all that is no default in a row.

        Args:
            row: A configuration and its measurement, of this kind.
            header: The columns of the file.

        Returns:
            False if a value that differs from its default would be lost.
        """
        values = {**vars(row[0]), **vars(row[1])}
        return all(values[name] == self.defaults.get(name) for name in set(values) - set(header))


TRAININGS, TESTS, FITS = Kind(Run, Outcome), Kind(Check, Finding), Kind(Fitting, Fitted)
KINDS = (TRAININGS, TESTS, FITS)
Row = tuple[Any, Any]  # a configuration and its measurement


def kind_of(header: Sequence[str]) -> Kind:
    """The kind of the rows in a file that begins with this header.

    Raises:
        ValueError: No file of results begins so.
    """
    for kind in KINDS:
        if kind.accepts(header):
            return kind
    raise ValueError("the header is not that of a results file")


def kind_of_row(row: Row) -> Kind:
    """The kind of a row.

    Raises:
        ValueError: The measurement does not belong to the configuration.
    """
    for kind in KINDS:
        if (type(row[0]), type(row[1])) == (kind.configuration, kind.measured):
            return kind
    pairs = (f"{kind.configuration.__name__} with {kind.measured.__name__}" for kind in KINDS)
    refuse("rows", f"{row}", " or ".join(pairs))
