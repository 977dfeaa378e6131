"""The store of measured rows: one CSV per experiment and profile, one row per measurement.

Rows are of a *kind*: trainings (:class:`Run`, :class:`Outcome`), or tests of an assumption on
features (:class:`Check`, :class:`Finding`); a file holds one of them. A row is appended whole or
not at all, carries a hash of its full configuration and a checksum of its own text. A file that is
damaged, truncated, foreign or self-contradictory is refused with its name and line; nothing in it
is used, and nothing is written to it.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
import json
import math
import os
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import pandas as pd

from .checks import refuse

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "measurements"


class Configuration:
    """What was asked for: all that a row's key depends on. Names its file by two of its fields."""

    experiment: str
    profile: str

    @property
    def key(self) -> str:
        """Hash of the full configuration: what identifies the row, and seeds a run.

        Fields that do not apply are left out, so a new optional field changes no old key.
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
    notation page. ``context``: ``shared`` or ``random``. The learning rate goes from
    ``lr * lr_start`` to ``lr * lr_end`` by ``schedule``.
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


@dataclass(frozen=True)
class Outcome:
    """What a run measured.

    ``tf32``: whether reduced-precision products were asked for. Where the training records them:
    ``curve``, accuracy on all the associations there are after every epoch; ``best_step``, the step
    after which the weights that count were reached; and of attention heads, at 32 equally spaced
    moments, ``saturated``, the share of all pairs of an example and a head that is saturated on it,
    and ``served``, the share of examples that some head is not saturated on; ``serving``, at the
    end, the share of examples with 0, 1, ..., H such heads. Shares are rounded to four places.
    """

    accuracy: float | None
    loss: float
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
        return {
            field.name: get_type_hints(cls)[field.name]
            for cls in (self.configuration, self.measured)
            for field in dataclasses.fields(cls)
        }

    @functools.cached_property
    def columns(self) -> list[str]:
        """The header of a file."""
        return [*self.hints, "key", "checksum"]


TRAININGS, TESTS = Kind(Run, Outcome), Kind(Check, Finding)
KINDS = (TRAININGS, TESTS)
Row = tuple[Any, Any]  # a configuration and its measurement


class DamagedResultsError(ValueError):
    """A results file that cannot be trusted; the message names the file and the line."""


# --- one row as one line --------------------------------------------------------------------------


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " ".join(f"{x:.4f}" for x in value)
    return repr(value) if isinstance(value, float) else str(value)


def _line(fields: list[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(fields)
    return buffer.getvalue()


def _checksum(fields: list[str]) -> str:
    return f"{zlib.crc32(_line(fields).encode()):08x}"


def _row(asked: Configuration, found: Any) -> str:
    for name, value in dataclasses.asdict(found).items():
        if isinstance(value, float) and not math.isfinite(value):
            refuse(name, f"{value} for {asked}", "a finite number")
    values = [*dataclasses.astuple(asked), *dataclasses.astuple(found), asked.key]
    fields = [_text(value) for value in values]
    return _line([*fields, _checksum(fields)])


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


def _parse(fields: list[str], kind: Kind, experiment: str, profile: str) -> Row:
    if len(fields) != len(kind.columns):
        raise ValueError(f"{len(fields)} fields where {len(kind.columns)} are expected")
    if _checksum(fields[:-1]) != fields[-1]:
        raise ValueError("its checksum does not fit its text")
    values = []
    for (name, hint), text in zip(kind.hints.items(), fields, strict=False):
        try:
            values.append(_value(hint, text))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{name} = {text!r} cannot be read") from error
    split = len(dataclasses.fields(kind.configuration))
    asked = kind.configuration(*values[:split])
    if asked.key != fields[-2]:
        raise ValueError("its key is not the hash of its configuration")
    if (asked.experiment, asked.profile) != (experiment, profile):
        raise ValueError(f"it belongs to {asked.experiment}/{asked.profile}")
    return asked, kind.measured(*values[split:])


def _kind_of(header: list[str]) -> Kind:
    for kind in KINDS:
        if header == kind.columns:
            return kind
    raise ValueError("the header is not that of a results file")


# --- files ----------------------------------------------------------------------------------------


def in_checkout() -> bool:
    """Whether the library runs from a source tree, whose measurements it then extends."""
    return (PACKAGE.parent.parent / "pyproject.toml").exists() and PACKAGE.parent.name == "lib"


def writable_root() -> Path:
    """Where new rows go: ``ATTNMEM_MEASUREMENTS``, or the checkout, or ``./measurements``."""
    named = os.environ.get("ATTNMEM_MEASUREMENTS")
    return Path(named) if named else SHIPPED if in_checkout() else Path("measurements")


def file_of(experiment: str, profile: str, root: Path) -> Path:
    """The file of one experiment and profile under ``root``."""
    return root / experiment / f"{profile}.csv"


def read(path: Path) -> dict[str, Row]:
    """All rows of a file by key; empty if there is no file.

    Raises :class:`DamagedResultsError` on the first line that :func:`append` did not write so.
    """
    if not path.exists():
        return {}
    rows: dict[str, Row] = {}
    experiment, profile = path.parent.name, path.stem
    for number, line in _lines(path):
        try:
            fields = next(csv.reader([line], strict=True))
            if number == 1:
                kind = _kind_of(fields)
                continue
            asked, found = _parse(fields, kind, experiment, profile)
            if _line(fields) != line:
                raise ValueError("it is not written as results are")
            if asked.key in rows:
                raise ValueError(f"the run {asked.key} stands in the file twice")
        except (ValueError, csv.Error) as error:
            raise DamagedResultsError(f"{path}, line {number}: {error}") from error
        rows[asked.key] = (asked, found)
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DamagedResultsError(f"{path}, line {line}: not UTF-8 text") from error
    lines = text.split("\n")
    if lines.pop():
        raise DamagedResultsError(f"{path}, line {len(lines) + 1}: cut off before its end")
    if not lines:
        raise DamagedResultsError(f"{path}, line 1: the file is empty")
    yield from ((number, line + "\n") for number, line in enumerate(lines, start=1))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time, across processes; the lock dies with its holder."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def append(rows: Iterable[Row], root: Path | None = None) -> int:
    """Append rows to their files and flush them to disk; returns how many were new.

    What is in the file already is left as it is. Every row is one write of one line to a file
    opened for appending, so a killed process leaves whole lines only.
    """
    root = root or writable_root()
    written = 0
    by_file: dict[Path, list[Row]] = {}
    for asked, found in rows:
        by_file.setdefault(file_of(asked.experiment, asked.profile, root), []).append(
            (asked, found)
        )
    for path, group in by_file.items():
        [kind] = {Kind(type(asked), type(found)) for asked, found in group}
        with _locked(path):
            known = read(path)
            if not path.exists():
                _create(path, kind)
            elif next(_lines(path))[1] != _line(kind.columns):
                raise DamagedResultsError(f"{path}, line 1: not the header of such rows")
            new = {a.key: _row(a, found) for a, found in group if a.key not in known}
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                for line in new.values():
                    os.write(descriptor, line.encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            written += len(new)
    return written


def _create(path: Path, kind: Kind) -> None:
    """A file with its header, or no file."""
    scratch = path.with_suffix(".new")
    scratch.write_text(_line(kind.columns))
    os.replace(scratch, path)


def known(experiment: str, profile: str) -> dict[str, Row]:
    """Rows of an experiment: those shipped with the library and those measured here since."""
    roots = dict.fromkeys([SHIPPED.resolve(), writable_root().resolve()])
    rows: dict[str, Row] = {}
    for root in roots:
        rows |= read(file_of(experiment, profile, root))
    return rows


def table(experiment: str, profile: str, kind: Kind = TRAININGS) -> pd.DataFrame:
    """The same rows as a table, in the columns of the file, without its checksums."""
    return as_table(known(experiment, profile).values(), kind)


def as_table(rows: Iterable[Row], kind: Kind = TRAININGS) -> pd.DataFrame:
    """Rows as a table with a column for each field; ``kind`` decides them if there are none."""
    return pd.DataFrame(
        [dataclasses.asdict(asked) | dataclasses.asdict(found) for asked, found in rows],
        columns=[*kind.hints],
    )


def by_seed(table: pd.DataFrame, axis: str, measured: str = "accuracy") -> pd.DataFrame:
    """What was ``measured``, with a row for every value of ``axis`` and a column for every seed."""
    return table.pivot(index=axis, columns="seed", values=measured)


def spans(table: pd.DataFrame, *fields: str) -> str:
    """The least and the largest value of each field: ``"T = 10,000 to 40,000, n = 32"``.

    For the ``sizes`` of a verdict, so that they follow the rows.

    >>> spans(pd.DataFrame({"T": [250, 1000], "n": [8, 8]}), "T", "n")
    'T = 250 to 1,000, n = 8'
    """
    for field in fields:
        if field not in table or table[field].isna().any():
            refuse("fields", repr(field), "a column without missing values")
    ends = {field: dict.fromkeys((table[field].min(), table[field].max())) for field in fields}
    return ", ".join(
        f"{field} = {' to '.join(f'{int(end):,}' for end in both)}" for field, both in ends.items()
    )


def fewest_seeds(table: pd.DataFrame) -> int:
    """How many seeds every training of a table has at least: the fewest of any configuration."""
    other = [f.name for f in dataclasses.fields(Run) if f.name != "seed"]
    return int(table.groupby(other, dropna=False).seed.nunique().min())


@functools.cache
def published(paper: str) -> pd.DataFrame:
    """Numbers that a paper published, for comparison: ``dana-2025`` or ``mahdavi-2024``.

    Of the experiments of Dana et al. with three layers, ``depth1`` is complete; of ``depth2`` and
    ``depth5`` there are four points, with three digits, chosen because our rows are far from them.
    """
    return pd.read_csv(PACKAGE / "published" / f"{paper}.csv")


@functools.cache
def commit() -> str:
    """The commit that the code comes from, ``+`` if it has been changed since; else the version.

    Asked once a process, since that is when the code was read.
    """
    from . import __version__

    if not in_checkout():
        return __version__
    git = ["git", "-C", str(PACKAGE)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", str(PACKAGE)],
            capture_output=True,
        )
    except OSError:
        return __version__
    if name.returncode:
        return __version__
    changed = [line for line in changes.stdout.decode().splitlines() if not line.endswith(".csv")]
    return name.stdout.decode().strip() + ("+" if changed else "")
