"""The store of measured rows: one CSV per experiment and profile, one row per measurement.

A row is a configuration and its result: a training (:class:`Run`, :class:`Outcome`), a test of an
assumption (:class:`Check`, :class:`Finding`) or a fit (:class:`Fitting`, :class:`Fitted`). Its line
ends with a key, the hash of its configuration, and a checksum. A row is appended whole or not at
all. A file that is damaged or foreign is refused with its line, and nothing is written to it.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import functools
import hashlib
import io
import json
import math
import os
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from filelock import AcquireReturnProxy, FileLock, Timeout

from ..checks import refuse

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = PACKAGE / "measurements"
ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # git's hooks lead to their repository
DIGESTS = "DIGESTS"  # the file beside shipped rows that says what they were (tools/digests.py)
PATIENCE = 5.0, 55.0  # seconds for which a lock is waited for in silence, and after saying so
UNKNOWN = "unknown"  # the commit of rows that come from a copy of the files without its repository

Row = tuple[Any, Any]  # a configuration and its result
Rows = Mapping[str, Row]  # by the configuration's key


class DamagedResultsError(ValueError):
    """A results file that cannot be trusted; the message names the file and the line."""


# --- what a row holds -----------------------------------------------------------------------------


class Configuration:
    """What is to be measured. Its first two fields name its file, and all of them make its key."""

    experiment: str
    profile: str

    def __post_init__(self) -> None:
        """Numbers of numpy have no text in a key: they become Python's."""
        for name, value in vars(self).items():
            if type(value).__module__ == "numpy":
                object.__setattr__(self, name, value.item())

    @property
    def key(self) -> str:
        """Hash of all fields that are not ``None``. It identifies the row, and seeds a run."""
        text = json.dumps({k: v for k, v in vars(self).items() if v is not None}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Run(Configuration):
    """One training, with every hyper-parameter explicit; ``None`` is *not applicable*.

    ``model``: ``aot``, ``mlp`` or ``mha``; ``variant``: the reading of the paper; ``N``: the
    vocabulary, or classes (``None`` for real labels); ``T``: examples, or the pairs of an epoch of
    bigrams; ``context``: ``shared`` or ``random``; ``lr``: the rate goes from ``lr * lr_start`` to
    ``lr * lr_end``; ``products``: ``tf32`` where a GPU may compute them so; ``table``: the number
    of the data that all seeds share, if they do; ``last_batch``: ``short`` if an epoch's last batch
    holds what is left. The other sizes are as on the notation page.
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
    """What a run measured: an accuracy and a loss, or the step ``diverged`` and neither.

    ``curve``: accuracy on all associations after every epoch; ``best_step``: after which the
    weights that count were reached. Of attention heads, at 32 equally spaced steps: ``saturated``,
    the share of pairs of an example and a head that is saturated on it, and ``served``, the share
    of examples that some head is not saturated on; ``serving``: at the end, the share of examples
    with 0, 1, ..., H such heads. Shares are rounded to four places.
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

    def __post_init__(self) -> None:
        """A training has a loss or diverged, not both."""
        if (self.loss is None) != (self.diverged is not None):
            refuse("loss", f"{self.loss} with diverged = {self.diverged}", "one of the two")
        if self.diverged is not None and self.accuracy is not None:
            refuse("accuracy", f"{self.accuracy} with diverged = {self.diverged}", "None")


@dataclass(frozen=True)
class Check(Configuration):
    """A test of linear independence on the features of ``T`` examples, each of ``n`` tokens.

    ``profile`` is the tier of the data. ``vectors``: ``queries`` or ``relaxed``, of which
    ``samples`` random subsets of ``size`` are tested; ``contexts``, of which each is tested for
    rank ``size``; ``positions``, one table of them; or ``labels``: as many draws of random labels
    for ``size`` examples, which a read-out of the next attention layer is trained to meet.
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

    Ranks were computed for ``ranked`` samples. Of labels, the number that was met is the rank.
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
    """One layer or several with one output, fitted to uniform labels of ``T`` examples in float64.

    ``optimizer``: ``lm``, ``lbfgs`` or ``adam``; ``coordinates``: ``raw`` or ``balanced``;
    ``context``: ``own`` or ``shared``; ``steps``: the most that are made. Of Adam, ``batch``
    (None for all examples), and the rate as for :class:`Run`. Of networks only: ``layers``, each of
    ``H`` heads; ``d_v``; ``logits`` and ``values``, the standard deviations at the start.
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
    layers: int | None = None
    d_v: int | None = None
    logits: float | None = None
    values: float | None = None


@dataclass(frozen=True)
class Fitted:
    """Where a fit ended after ``made`` steps, and why: ``met``, ``stuck`` or ``steps``.

    ``error`` is the largest error, ``rms`` their root mean square, in units of the largest label;
    ``damping`` is the last of Levenberg-Marquardt; the others:
    :class:`attnmem.theory.fitting.Limits`. The first rows do not have ``weight``.
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
    weight: float | None = None


class RowSchema:
    """The columns of one kind of row: for each its type, and whether it may be missing."""

    def __init__(self, config: type[Configuration], result: type) -> None:
        self.config, self.result = config, result
        self.types: dict[str, tuple[type, bool]] = {}
        for name, hint in (get_type_hints(config) | get_type_hints(result)).items():
            [known, *_] = [one for one in get_args(hint) or [hint] if one is not NoneType]
            self.types[name] = get_origin(known) or known, NoneType in get_args(hint)
        self.columns = (*self.types, "key", "checksum")


KINDS = ((Run, Outcome), (Check, Finding), (Fitting, Fitted))
SCHEMAS = {config: RowSchema(config, result) for config, result in KINDS}
BY_HEADER = {",".join(schema.columns): schema for schema in SCHEMAS.values()}
BOOLEANS = {"True": True, "False": False}


# --- reading --------------------------------------------------------------------------------------


def known(experiment: str, profile: str, *, recompute: bool = False) -> dict[str, Row]:
    """Rows by key, those shipped and those measured here since; with ``recompute`` these only.

    Refuses ``recompute`` if new rows would go among the shipped ones. Raises as :func:`read`.
    """
    roots = dict.fromkeys([SHIPPED.resolve(), writable_root().resolve()])
    if recompute:
        if len(roots) == 1:
            folder = "a folder for the new rows, named by the environment variable"
            refuse("recompute", "True", f"{folder} ATTNMEM_MEASUREMENTS, such as _build/rows")
        del roots[SHIPPED.resolve()]
    rows: dict[str, Row] = {}
    for root in roots:
        rows |= read(root / experiment / f"{profile}.csv")
    return rows


def read(path: Path, *, locked: bool = False) -> dict[str, Row]:
    """All rows of a file by key, in its order; none if there is no file.

    Line ends and byte-order mark may be those of another system. Unless this process holds the lock
    (``locked``), a file that seems damaged is read again under it: a row may be half written. The
    first line that :func:`append` did not write so raises :class:`DamagedResultsError`, and so do
    shipped rows that are missing.
    """
    number, rows = 1, {}
    try:
        if not path.exists():
            _check_shipped(path, [])
            return {}
        data = path.read_bytes()
        lines = [line.removesuffix("\r") for line in data.decode("utf-8-sig").split("\n")]
        if lines.pop():
            number = len(lines) + 1
            raise ValueError("cut off before its end")
        if not lines:
            raise ValueError("the file is empty")
        schema = BY_HEADER.get(lines[0])
        if schema is None:
            raise ValueError("the header is not that of a results file")
        for number, line in enumerate(lines[1:], start=2):  # noqa: B007  (the error names it)
            config, result = _parse(line, schema)
            if (config.experiment, config.profile) != (path.parent.name, path.stem):
                raise ValueError(f"it belongs to {config.experiment}/{config.profile}")
            if config.key in rows:
                raise ValueError(f"the run {config.key} stands in the file twice")
            rows[config.key] = config, result
        _check_shipped(path, lines[1:])
    except ValueError as error:
        if not locked:
            with contextlib.suppress(OSError), _locked(path):
                return read(path, locked=True)
        if isinstance(error, UnicodeDecodeError):
            number, error = data[: error.start].count(b"\n") + 1, ValueError("not UTF-8 text")
        raise DamagedResultsError(f"{path}, line {number}: {error}") from error
    return rows


def _check_shipped(path: Path, lines: list[str]) -> None:
    """A shipped file begins with the rows that were shipped; new ones are behind them."""
    listed = path.parent.parent / DIGESTS
    for entry in listed.read_text("utf-8").splitlines() if listed.exists() else []:
        file, count, shipped = entry.split()
        if path.match(file) and digest(lines[: int(count)]) != shipped:
            raise ValueError(f"its first {count} rows are not those that {listed} lists")


def digest(lines: list[str]) -> str:
    """The hash of the rows of a file, by which ``DIGESTS`` knows them."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _parse(line: str, schema: RowSchema) -> Row:
    body, _, checksum = line.rpartition(",")
    if checksum != format(zlib.crc32(body.encode() + b"\n"), "08x"):
        raise ValueError("its checksum does not fit its text")
    [texts] = csv.reader([body])
    if len(texts) != len(schema.columns) - 1:
        raise ValueError(f"{len(texts) + 1} fields where {len(schema.columns)} are expected")
    values = {}
    for (name, (kind, optional)), text in zip(schema.types.items(), texts, strict=False):
        if optional and not text:
            values[name] = None
            continue
        try:
            if kind is tuple:
                value = tuple(map(float, text.split(" ")))
            else:
                value = BOOLEANS[text] if kind is bool else kind(text)
            number = sum(value) if kind is tuple else value
            if not text or (kind in (float, tuple) and not math.isfinite(number)):
                raise ValueError
        except (ValueError, KeyError):
            raise ValueError(f"{name} = {text!r} cannot be read") from None
        values[name] = value
    result = schema.result(**{name: values.pop(name) for name in schema.result.__annotations__})
    config = schema.config(**values)
    if config.key != texts[-1]:
        raise ValueError("its key is not the hash of its configuration")
    return config, result


# --- writing --------------------------------------------------------------------------------------


def append(rows: Iterable[Row], root: Path | None = None) -> int:
    """Append rows to their files, those that are new, and flush them to disk; how many there were.

    Every row is one write of one line, and a new file is renamed into its place, so a killed
    process leaves whole lines only. A writer holds a lock on the file ``<profile>.lock``. The
    folder of the experiments' folders is ``root``, by default :func:`writable_root`.

    Raises:
        ValueError: A value has no place in a row, such as NaN. Nothing is written to its file.
        DamagedResultsError: The file is damaged, or holds rows of another kind.
        OSError: A row cannot be written, as on a full disk; nothing of it is left in its file. Or
            another process does not give up its lock.
    """
    by_file: dict[Path, list[Row]] = {}
    for config, result in rows:
        folder = (root or writable_root()) / config.experiment
        by_file.setdefault(folder / f"{config.profile}.csv", []).append((config, result))
    added = 0
    for path, group in by_file.items():
        schema = SCHEMAS[type(group[0][0])]
        header = ",".join(schema.columns)
        for row in group:
            if (type(row[0]), type(row[1])) != (schema.config, schema.result):
                expected = f"{schema.config.__name__} with {schema.result.__name__}"
                refuse("rows", f"{row}", f"{expected}, as the others of {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            have = read(path, locked=True)
            new: dict[str, Row] = {}
            for row in group:
                if row[0].key not in have:
                    new.setdefault(row[0].key, row)
            lines = [_line(*row, schema) for row in new.values()]
            added += len(lines)
            if path.exists():
                if path.read_text("utf-8-sig").split("\n", 1)[0] != header:
                    raise DamagedResultsError(f"{path}, line 1: not the header of such rows")
                _write(path, lines)
            else:
                scratch = path.with_suffix(".new")
                scratch.unlink(missing_ok=True)
                _write(scratch, [header + "\n", *lines])
                os.replace(scratch, path)
    return added


def _locked(path: Path) -> AcquireReturnProxy:
    """The lock of a file, as a ``with`` block; who waits for it says so, and not for ever."""
    lock = FileLock(path.with_suffix(".lock"))
    with contextlib.suppress(Timeout):
        return lock.acquire(timeout=PATIENCE[0])
    said = f"waiting for {lock.lock_file}, which another process holds, for up to a minute"
    print(said, file=sys.stderr, flush=True)
    return lock.acquire(timeout=PATIENCE[1])


def _line(config: Configuration, result: Any, schema: RowSchema) -> str:
    values, texts = vars(config) | vars(result), []
    for name, (kind, optional) in schema.types.items():
        value = values[name]
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(x, float) and not math.isfinite(x) for x in numbers):
            refuse(name, f"{value} for {config}", "finite numbers")
        if value is None and optional:
            texts.append("")
        elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            refuse(name, f"{value!r} for {config}", f"a value of type {kind.__name__}")
        elif kind is str and (not value or "\n" in value or "\r" in value):
            refuse(name, f"{value!r} for {config}", "one line of text")
        elif kind is tuple:
            texts.append(" ".join(f"{x:.4f}" for x in value))
        else:
            texts.append(repr(float(value)) if kind is float else str(value))
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([*texts, config.key])
    checksum = zlib.crc32(line.getvalue().encode())
    return f"{line.getvalue()[:-1]},{checksum:08x}\n"


def _write(path: Path, lines: list[str]) -> None:
    """Write each line whole; a full disk would take a part of it."""
    with open(path, "ab", buffering=0) as file:
        for line in lines:
            end, text = os.fstat(file.fileno()).st_size, line.encode()
            try:
                if os.write(file.fileno(), text) < len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise
        os.fsync(file.fileno())


def check_writable(config: Configuration) -> None:
    """Raise OSError before a row is measured that could not be stored; warn if it has no commit."""
    path = writable_root() / config.experiment / f"{config.profile}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        if path.exists():
            path.open("ab").close()
    if commit() == UNKNOWN:
        said = "git tells none of this copy, and ATTNMEM_COMMIT is not set"
        warnings.warn(f"rows will name no commit: {said}", stacklevel=2)


# --- where rows go, and which code made them ------------------------------------------------------


def in_checkout(package: Path = PACKAGE) -> bool:
    """Whether a package lies in a source tree, whose measurements it then extends."""
    project = package.parent.parent / "pyproject.toml"
    ours = project.exists() and b'name = "attnmem"' in project.read_bytes()
    return ours and package.parent.name == "lib"


DEFAULT_ROOT = SHIPPED if in_checkout() else Path("measurements")


def writable_root() -> Path:
    """Where new rows go: ``ATTNMEM_MEASUREMENTS``, or the checkout, or ``./measurements``."""
    if not (named := os.environ.get("ATTNMEM_MEASUREMENTS", "").strip()):
        return DEFAULT_ROOT
    try:
        return Path(named).expanduser()
    except RuntimeError:
        refuse("ATTNMEM_MEASUREMENTS", repr(named), "a folder; no such home is known")


@functools.cache
def commit(package: Path = PACKAGE) -> str:
    """The code's commit, ``+`` if it has been changed since; asked once a process, as it is read.

    ``ATTNMEM_COMMIT`` names it; otherwise git, if this is a checkout; otherwise it is ``unknown``.
    """
    if named := os.environ.get("ATTNMEM_COMMIT", "").strip():
        return named
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    git = functools.partial(
        subprocess.check_output, env=environment, stderr=subprocess.DEVNULL, cwd=package
    )
    try:  # the last of these three is the folder as the commit has it
        found = git(["git", "rev-parse", "--show-toplevel", "HEAD", "HEAD:./"])
        changes = git(["git", "status", "--porcelain", "--untracked-files=no", "--", "."])
        top, name, _ = os.fsdecode(found).splitlines()
        if not (in_checkout(package) and os.path.samefile(top, package.parent.parent)):
            return UNKNOWN
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    changed = [line for line in os.fsdecode(changes).splitlines() if not line.endswith(".csv")]
    return name[:12] + "+" * bool(changed)
