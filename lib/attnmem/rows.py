"""What a row is: a configuration and what was measured for it, as one line of text and back.

Rows are of a *kind*: trainings (:class:`Run`, :class:`Outcome`), or tests of an assumption on
features (:class:`Check`, :class:`Finding`). A row ends with a hash of its full configuration and
with a checksum of its own text. :mod:`attnmem.results` keeps rows in files.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import io
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from .checks import refuse


class Configuration:
    """What was asked for: all that a row's key depends on. Names its file by two of its fields."""

    experiment: str
    profile: str

    @property
    def key(self) -> str:
        """Hash of the full configuration: what identifies the row, and seeds a run.

        Fields that are ``None`` are left out, so a new field that is ``None`` changes no old key.
        """
        applicable = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
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
        values = {**dataclasses.asdict(row[0]), **dataclasses.asdict(row[1])}
        return all(values[name] == self.defaults.get(name) for name in set(values) - set(header))


TRAININGS, TESTS = Kind(Run, Outcome), Kind(Check, Finding)
KINDS = (TRAININGS, TESTS)
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


# --- one row as one line --------------------------------------------------------------------------


def line_of(fields: Sequence[str]) -> str:
    """Fields as one line of a CSV file, with its end.

    Example:
        >>> line_of(["a", "b, c"])
        'a,"b, c"\\n'
    """
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(fields)
    return buffer.getvalue()


def fields_of(line: str) -> list[str]:
    """The fields of one line, which must be as :func:`line_of` writes it.

    Args:
        line: A line of a CSV file, with its end.

    Returns:
        The text of each field.

    Raises:
        ValueError: The line is no CSV, or is quoted in another way.
    """
    try:
        [fields] = csv.reader([line], strict=True)
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if line_of(fields) != line or line.find("\n") != len(line) - 1:
        raise ValueError("it is not written as results are")
    return fields


def write(row: Row, header: Sequence[str], kind: Kind) -> str:
    """One row as a line of a file.

    Args:
        row: A configuration and its measurement, which the file :meth:`Kind.holds`.
        header: The columns of the file, which :meth:`Kind.accepts`.
        kind: The kind of the file's rows.

    Returns:
        The line, with its end. :func:`parse` reads the row from it, with shares rounded.

    Raises:
        ValueError: A number is not finite, the row contradicts itself, or its line could not be
            read again.
    """
    asked, found = row
    values = {**dataclasses.asdict(asked), **dataclasses.asdict(found), "key": asked.key}
    for name, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(x, float) and not math.isfinite(x) for x in numbers):
            refuse(name, f"{value} for {asked}", "finite numbers")
    line = _sealed([_text(values[name]) for name in header[:-1]])
    try:
        parse(line, header, kind)
    except ValueError as error:
        refuse("rows", f"{asked}, {found}", f"a row that can be read again ({error})")
    return line


def parse(line: str, header: Sequence[str], kind: Kind) -> Row:
    """The row that a line of a file holds. Columns that the file lacks have their defaults.

    Args:
        line: A line of the file, with its end.
        header: The columns of the file, which :meth:`Kind.accepts`.
        kind: The kind of the file's rows.

    Returns:
        A configuration and its measurement.

    Raises:
        ValueError: :func:`write` did not write the line so; the message says what is wrong.
    """
    fields = fields_of(line)
    if len(fields) != len(header):
        raise ValueError(f"{len(fields)} fields where {len(header)} are expected")
    if _checksum(fields[:-1]) != fields[-1]:
        raise ValueError("its checksum does not fit its text")
    values = dict(kind.defaults)
    for name, text in zip(header[:-2], fields, strict=False):
        try:
            values[name] = _value(kind.hints[name], text)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{name} = {text!r} cannot be read") from error
    asked, found = (
        cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})
        for cls in (kind.configuration, kind.measured)
    )
    if asked.key != fields[-2]:
        raise ValueError("its key is not the hash of its configuration")
    if isinstance(found, Outcome):
        _check_divergence(found)
    return asked, found


def widen(line: str, header: Sequence[str], kind: Kind) -> str:
    """A line of a file with this header, as the line of a file that has every column of its kind.

    The text of what was stored stays as it is; the columns that are new hold their defaults.

    Args:
        line: A line of the file, with its end.
        header: The columns of the file, which :meth:`Kind.accepts`.
        kind: The kind of the file's rows.

    Returns:
        The new line, with its end.
    """
    texts = {name: _text(value) for name, value in kind.defaults.items()}
    texts |= dict(zip(header, fields_of(line), strict=True))
    return _sealed([texts[name] for name in kind.columns[:-1]])


def _check_divergence(found: Outcome) -> None:
    if (found.loss is None) != (found.diverged is not None):
        raise ValueError(
            f"loss = {found.loss} and diverged = {found.diverged}, where one of them is expected"
        )
    if found.diverged is not None and found.accuracy is not None:
        raise ValueError(f"accuracy = {found.accuracy} of a training that diverged")


def _sealed(fields: list[str]) -> str:
    return line_of([*fields, _checksum(fields)])


def _checksum(fields: Sequence[str]) -> str:
    return f"{zlib.crc32(line_of(fields).encode()):08x}"


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " ".join(f"{x:.4f}" for x in value)
    return repr(float(value)) if isinstance(value, float) else str(value)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _words(text: str) -> str:
    if not text:
        raise ValueError("empty")
    return text


READERS = {
    bool: {"True": True, "False": False}.__getitem__,
    int: int,
    float: _finite,
    str: _words,
    tuple[float, ...]: lambda text: tuple(map(_finite, text.split(" "))),
}


def _value(hint: Any, text: str) -> object:
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if text == "" and NoneType in options:
        return None
    return READERS[options[0]](text)
