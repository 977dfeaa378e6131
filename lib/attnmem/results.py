"""The store of measured rows: one CSV per experiment and profile, one row per run and seed.

A row is appended whole or not at all, carries a hash of the run's full configuration and a
checksum of its own text. A file that is damaged, truncated, foreign or self-contradictory is
refused with its name and line; nothing in it is used, and nothing is written to it.
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

import pandas as pd

from .checks import refuse

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "measurements"


@dataclass(frozen=True)
class Run:
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

    @property
    def key(self) -> str:
        """Hash of the full configuration: what identifies the row, and seeds the run.

        Fields that do not apply are left out, so a new optional field changes no old key.
        """
        applicable = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        text = json.dumps(applicable, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


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


CONFIGURATION = [field.name for field in dataclasses.fields(Run)]
MEASURED = [field.name for field in dataclasses.fields(Outcome)]
COLUMNS = [*CONFIGURATION, *MEASURED, "key", "checksum"]
WHOLE = {"N", "n", "T", "d", "d_h", "H", "width", "layers", "seed", "steps", "batch"}
WHOLE |= {"evaluate_every", "best_step"}
REAL = {"lr", "lr_start", "lr_end", "accuracy", "loss", "wall_s"}
TRUTH = {"early_stop", "tf32"}
SHARES = {"curve", "saturated", "served", "serving"}
OPTIONAL = {"N", "n", "width", "context", "evaluate_every", "early_stop", "accuracy", "best_step"}
OPTIONAL |= SHARES


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


def _row(run: Run, outcome: Outcome) -> str:
    for name in REAL & set(MEASURED):
        value = getattr(outcome, name)
        if value is not None and not math.isfinite(value):
            refuse(name, f"{value} for {run}", "a finite number")
    values = [*dataclasses.astuple(run), *dataclasses.astuple(outcome), run.key]
    fields = [_text(value) for value in values]
    return _line([*fields, _checksum(fields)])


def _value(name: str, text: str) -> object:
    if text == "" and name in OPTIONAL:
        return None
    if name in TRUTH:
        return {"True": True, "False": False}[text]
    if name in WHOLE:
        return int(text)
    if name in REAL:
        return _finite(text)
    if name in SHARES:
        return tuple(_finite(part) for part in text.split(" "))
    if not text:
        raise ValueError("empty")
    return text


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _parse(fields: list[str], experiment: str, profile: str) -> tuple[Run, Outcome]:
    if len(fields) != len(COLUMNS):
        raise ValueError(f"{len(fields)} fields where {len(COLUMNS)} are expected")
    if _checksum(fields[:-1]) != fields[-1]:
        raise ValueError("its checksum does not fit its text")
    values = {}
    for name, text in zip(COLUMNS[:-2], fields, strict=False):
        try:
            values[name] = _value(name, text)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{name} = {text!r} cannot be read") from error
    run = Run(**{name: values[name] for name in CONFIGURATION})
    if run.key != fields[-2]:
        raise ValueError("its key is not the hash of its configuration")
    if (run.experiment, run.profile) != (experiment, profile):
        raise ValueError(f"it belongs to {run.experiment}/{run.profile}")
    return run, Outcome(**{name: values[name] for name in MEASURED})


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


def read(path: Path) -> dict[str, tuple[Run, Outcome]]:
    """All rows of a file by key; empty if there is no file.

    Raises :class:`DamagedResultsError` on the first line that :func:`append` did not write so.
    """
    if not path.exists():
        return {}
    rows: dict[str, tuple[Run, Outcome]] = {}
    experiment, profile = path.parent.name, path.stem
    for number, line in _lines(path):
        try:
            fields = next(csv.reader([line], strict=True))
            if number == 1:
                if fields != COLUMNS:
                    raise ValueError("the header is not that of a results file")
                continue
            run, outcome = _parse(fields, experiment, profile)
            if _line(fields) != line:
                raise ValueError("it is not written as results are")
            if run.key in rows:
                raise ValueError(f"the run {run.key} stands in the file twice")
        except (ValueError, csv.Error) as error:
            raise DamagedResultsError(f"{path}, line {number}: {error}") from error
        rows[run.key] = (run, outcome)
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


def append(rows: Iterable[tuple[Run, Outcome]], root: Path | None = None) -> int:
    """Append rows to their files and flush them to disk; returns how many were new.

    A run that is in the file already is left as it is. Every row is one write of one line to a file
    opened for appending, so a killed process leaves whole lines only.
    """
    root = root or writable_root()
    written = 0
    by_file: dict[Path, list[tuple[Run, Outcome]]] = {}
    for run, outcome in rows:
        by_file.setdefault(file_of(run.experiment, run.profile, root), []).append((run, outcome))
    for path, group in by_file.items():
        with _locked(path):
            known = read(path)
            if not path.exists():
                _create(path)
            new = {run.key: _row(run, outcome) for run, outcome in group if run.key not in known}
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                for line in new.values():
                    os.write(descriptor, line.encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            written += len(new)
    return written


def _create(path: Path) -> None:
    """A file with its header, or no file."""
    scratch = path.with_suffix(".new")
    scratch.write_text(_line(COLUMNS))
    os.replace(scratch, path)


def known(experiment: str, profile: str) -> dict[str, tuple[Run, Outcome]]:
    """Rows of an experiment: those shipped with the library and those measured here since."""
    roots = dict.fromkeys([SHIPPED.resolve(), writable_root().resolve()])
    rows: dict[str, tuple[Run, Outcome]] = {}
    for root in roots:
        rows |= read(file_of(experiment, profile, root))
    return rows


def table(experiment: str, profile: str) -> pd.DataFrame:
    """The same rows as a table, in the columns of the file, without its checksums."""
    return as_table(known(experiment, profile).values())


def as_table(rows: Iterable[tuple[Run, Outcome]]) -> pd.DataFrame:
    """Rows as a table with a column for each field."""
    return pd.DataFrame(
        [dataclasses.asdict(run) | dataclasses.asdict(outcome) for run, outcome in rows],
        columns=[*CONFIGURATION, *MEASURED],
    )


def by_seed(table: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Accuracies with a row for every value of ``axis`` and a column for every seed."""
    return table.pivot(index=axis, columns="seed", values="accuracy")


@functools.cache
def published(paper: str) -> pd.DataFrame:
    """Means that a paper published, for comparison: ``dana-2025``."""
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
