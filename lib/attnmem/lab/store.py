"""The store of measured rows: one CSV per experiment and profile, one row per measurement.

A row is a configuration and its result; its line ends with a key, the hash of its configuration,
and a checksum. A file is whole at any moment. One that is damaged or foreign is refused with its
line, and nothing is written to it.
"""

import contextlib
import csv
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
DIGESTS = "DIGESTS"  # the file beside shipped rows that says what they were (tools/digests.py)
_PATIENCE = 5.0, 55.0  # seconds for which a lock is waited for in silence, and after saying so
UNKNOWN = "unknown"  # the commit of rows that come from a copy of the files without its repository

Row = tuple[Any, Any]  # a configuration and its result
Rows = Mapping[str, Row]  # by the configuration's key


class DamagedResultsError(ValueError):
    """A results file that cannot be trusted; the message names the file and the line."""


# --- what a row holds -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    """What is to be measured: ``experiment`` and ``profile`` name its file, all fields its key."""

    experiment: str
    profile: str

    @property
    def key(self) -> str:
        """Hash of all fields that are not ``None``. It identifies the row, and seeds a run."""
        text = json.dumps({k: v for k, v in vars(self).items() if v is not None}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Run(Configuration):
    """One training, with every hyper-parameter explicit; ``None`` is *not applicable*.

    Sizes are those of the notation page.
    """

    model: str  # aot, mlp or mha
    variant: str  # how the paper is read
    N: int | None  # the vocabulary, or classes; none for real labels
    n: int | None
    T: int  # examples, or the pairs of an epoch of bigrams
    d: int
    d_h: int
    H: int
    width: int | None
    layers: int
    seed: int
    steps: int
    task: str
    context: str | None  # shared or random
    batch: int
    schedule: str
    lr: float  # the rate goes from lr * lr_start to lr * lr_end
    lr_start: float
    lr_end: float
    evaluate_every: int | None = None
    early_stop: bool | None = None
    products: str | None = None  # tf32 where a GPU may compute them so
    table: int | None = None  # the number of the data that all seeds share, if they do
    last_batch: str | None = None  # short if the last of an epoch holds what is left


@dataclass(frozen=True)
class Outcome:
    """What a run measured: an accuracy and a loss, or the step ``diverged`` and neither.

    Shares are rounded to four places. Those of attention heads (pairs of an example and a head are
    saturated or not) are at 32 equally spaced steps, but for ``serving``.
    """

    accuracy: float | None
    loss: float | None
    wall_s: float
    device: str
    torch: str
    commit: str
    tf32: bool = False
    curve: tuple[float, ...] | None = None  # accuracy on all associations after every epoch
    best_step: int | None = None  # after which the weights that count were reached
    saturated: tuple[float, ...] | None = None  # the share of pairs
    served: tuple[float, ...] | None = None  # the share of examples with a head that is not
    serving: tuple[float, ...] | None = None  # at the end, that with 0, 1, ..., H such heads
    diverged: int | None = None

    def __post_init__(self) -> None:
        """A training has a loss or diverged, not both."""
        if (self.loss is None) != (self.diverged is not None):
            refuse("loss", f"{self.loss} with diverged = {self.diverged}", "one of the two")
        if self.diverged is not None and self.accuracy is not None:
            refuse("accuracy", f"{self.accuracy} with diverged = {self.diverged}", "None")


@dataclass(frozen=True)
class Check(Configuration):
    """A test of linear independence; ``profile`` is the tier of the data."""

    source: str
    architecture: str
    map: str
    dtype: str
    vectors: str  # queries, relaxed, contexts or positions (one table of them)
    T: int  # examples
    n: int  # tokens of each
    d: int
    size: int  # of subsets, or the rank that is tested for
    samples: int  # random subsets, or contexts
    seed: int


@dataclass(frozen=True)
class Finding:
    """What a test found."""

    dependent: int  # of the samples, those with a rank below their size
    ranked: int  # samples whose rank was computed
    least_rank: int | None
    most_rank: int | None
    wall_s: float
    device: str
    torch: str
    commit: str


@dataclass(frozen=True)
class Fitting(Configuration):
    """One layer or several with one output, fitted to uniform labels in float64."""

    optimizer: str  # lm, lbfgs or adam; hinge for signs
    coordinates: str  # raw or balanced
    context: str  # own or shared
    H: int  # of each layer
    n: int
    d: int
    d_h: int
    T: int
    seed: int
    steps: int  # the most that are made
    batch: int | None = None  # of Adam; none for all examples
    lr: float | None = None  # of Adam, as for a run
    lr_start: float | None = None
    lr_end: float | None = None
    layers: int | None = None  # of networks only, as are all that follow
    d_v: int | None = None
    logits: float | None = None  # standard deviations at the start
    values: float | None = None


@dataclass(frozen=True)
class Fitted:
    """Where a fit ended; the others are :class:`attnmem.theory.fitting.Limits`."""

    error: float  # the largest, in units of the largest label
    rms: float
    made: int  # steps
    stop: str  # met, stuck or steps
    damping: float | None  # the last of Levenberg-Marquardt
    gradient: float
    least: float
    largest: float
    saturated: float
    wall_s: float
    device: str
    torch: str
    commit: str
    weight: float | None = None  # the first rows do not have it


_RESULTS: dict[type[Configuration], type] = {Run: Outcome, Check: Finding, Fitting: Fitted}


def _columns(config: type[Configuration]) -> dict[str, tuple[type, bool]]:
    columns = {}
    for name, hint in (get_type_hints(config) | get_type_hints(_RESULTS[config])).items():
        [known, *_] = [one for one in get_args(hint) or [hint] if one is not NoneType]
        columns[name] = get_origin(known) or known, NoneType in get_args(hint)
    return columns


# Of each kind of row, by its configuration: the type of each column, and whether it may be missing.
COLUMNS = {config: _columns(config) for config in _RESULTS}
HEADERS = {config: ",".join([*columns, "key", "checksum"]) for config, columns in COLUMNS.items()}
_BY_HEADER = {header: config for config, header in HEADERS.items()}


# --- reading --------------------------------------------------------------------------------------


def known(experiment: str, profile: str, *, recompute: bool = False) -> dict[str, Row]:
    """Rows by key, those shipped and those measured here since; with ``recompute`` these only."""
    shipped, own = SHIPPED.resolve(), writable_root().resolve()
    if recompute and own == shipped:
        folder = "a folder for the new rows, named by the environment variable"
        refuse("recompute", "True", f"{folder} ATTNMEM_MEASUREMENTS, such as _build/rows")
    roots = [own] if recompute else dict.fromkeys([shipped, own])
    files = [read(root / experiment / f"{profile}.csv") for root in roots]
    return dict(row for rows in files for row in rows.items())


def read(path: Path) -> dict[str, Row]:
    """All rows of a file by key, in its order; none if there is no file.

    Line ends and byte-order mark may be those of another system. What :func:`append` did not write
    so raises :class:`DamagedResultsError`.
    """
    number, lines, rows = 1, [], {}
    note = path.with_suffix(".count")  # it is read first, since rows may be added meanwhile
    try:
        written = int(note.read_text("utf-8")) if note.exists() else 0
        if path.exists():
            text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
            *lines, end = [line.removesuffix("\r") for line in text.split("\n")]
            if end:
                number = len(lines) + 1
                raise ValueError("cut off before its end")
            if (kind := _BY_HEADER.get(lines.pop(0) if lines else "")) is None:
                raise ValueError("the header is not that of a results file")
        for number, line in enumerate(lines, start=2):  # noqa: B007  (the error names it)
            config, result = _parse(line, kind)
            if (config.experiment, config.profile) != (path.parent.name, path.stem):
                raise ValueError(f"it belongs to {config.experiment}/{config.profile}")
            if config.key in rows:
                raise ValueError(f"the run {config.key} stands in the file twice")
            rows[config.key] = config, result
        _check_whole(path, lines, written)
    except ValueError as error:
        raise DamagedResultsError(f"{path}, line {number}: {error}") from error
    return rows


def _check_whole(path: Path, lines: list[str], written: int) -> None:
    """A shipped file begins with the rows that were shipped, and no file of one's own loses any."""
    listed = path.parent.parent / DIGESTS
    if listed.exists():
        for entry in listed.read_text("utf-8").splitlines():
            file, count, shipped = entry.split()
            if path.match(file) and digest(lines[: int(count)]) != shipped:
                raise ValueError(f"its first {count} rows are not those that {listed} lists")
    elif path.exists() and len(lines) < written:  # who begins again may delete the file alone
        own = f"if you took some out yourself, delete {path.stem}.count"
        raise ValueError(f"{written} rows were written, {len(lines)} are there; {own}")


def digest(lines: list[str]) -> str:
    """The hash of the rows of a file, by which ``DIGESTS`` knows them."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _parse(line: str, kind: type[Configuration]) -> Row:
    body, _, checksum = line.rpartition(",")
    if checksum != format(zlib.crc32(body.encode() + b"\n"), "08x"):
        raise ValueError("its checksum does not fit its text")
    [[*texts, key]] = csv.reader([body])
    values = {}
    for (name, (type_, optional)), text in zip(COLUMNS[kind].items(), texts, strict=True):
        try:
            values[name] = None if optional and not text else _value(text, type_)
        except (ValueError, KeyError):
            raise ValueError(f"{name} = {text!r} cannot be read") from None
    result = _RESULTS[kind](**{name: values.pop(name) for name in _RESULTS[kind].__annotations__})
    config = kind(**values)
    if config.key != key:
        raise ValueError("its key is not the hash of its configuration")
    return config, result


def _value(text: str, kind: type) -> Any:
    if kind is bool:
        return {"True": True, "False": False}[text]
    value = tuple(map(float, text.split(" "))) if kind is tuple else kind(text)
    if not text or not _finite(value):
        raise ValueError
    return value


def _finite(value: Any) -> bool:
    total = sum(value) if isinstance(value, tuple) else value
    return not isinstance(total, float) or math.isfinite(total)


# --- writing --------------------------------------------------------------------------------------


def append(rows: Iterable[Row], root: Path | None = None) -> int:
    """Append rows to their files, those that are new, and flush them to disk; how many there were.

    A file is written anew beside the old one and renamed into its place, so readers and killed
    processes meet whole files only. A writer holds a lock on the file ``<profile>.lock``. The
    folder of the experiments' folders is ``root``, by default :func:`writable_root`.

    A file stays as it is if a value has no place in a row, such as NaN (``ValueError``), if it is
    damaged or holds rows of another kind (:class:`DamagedResultsError`), if the disk is full or a
    lock is not given up (``OSError``).
    """
    by_file: dict[Path, list[Row]] = {}
    for config, result in rows:
        folder = (root or writable_root()) / config.experiment
        by_file.setdefault(folder / f"{config.profile}.csv", []).append((config, result))
    return sum(_append(path, group) for path, group in by_file.items())


def _append(path: Path, rows: list[Row]) -> int:
    kind = type(rows[0][0])
    for row in rows:
        if (type(row[0]), type(row[1])) != (kind, _RESULTS[kind]):
            expected = f"{kind.__name__} with {_RESULTS[kind].__name__}"
            refuse("rows", f"{row}", f"{expected}, as the others of {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        have, lines = read(path), []
        for config, result in rows:
            if config.key not in have:
                have[config.key] = config, result
                lines.append(_line(config, result))
        before = path.read_bytes() if path.exists() else f"{HEADERS[kind]}\n".encode()
        if before.decode("utf-8-sig").splitlines()[0] != HEADERS[kind]:
            raise DamagedResultsError(f"{path}, line 1: not the header of such rows")
        _replace(path, before + "".join(lines).encode())
        if not (path.parents[1] / DIGESTS).exists():
            with contextlib.suppress(OSError):  # the rows are there, and the last count holds
                _replace(path.with_suffix(".count"), f"{len(have)}\n".encode())
    return len(lines)


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole, by renaming what is on the disk already."""
    scratch = path.with_suffix(".new")
    with open(scratch, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def _locked(path: Path) -> AcquireReturnProxy:
    """The lock of a file, as a ``with`` block; who waits for it says so, and not for ever."""
    lock = FileLock(path.with_suffix(".lock"))
    with contextlib.suppress(Timeout):
        return lock.acquire(timeout=_PATIENCE[0])
    said = f"waiting for {lock.lock_file}, which another process holds, for up to a minute"
    print(said, file=sys.stderr, flush=True)
    return lock.acquire(timeout=_PATIENCE[1])


def _line(config: Configuration, result: Any) -> str:
    values, texts = vars(config) | vars(result), []
    for name, (kind, optional) in COLUMNS[type(config)].items():
        value = values[name]
        if not _finite(value):
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
    return f"{line.getvalue()[:-1]},{zlib.crc32(line.getvalue().encode()):08x}\n"


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


def _in_checkout(package: Path) -> bool:
    """Whether a package lies in a source tree, whose measurements it then extends."""
    project = package.parent.parent / "pyproject.toml"
    ours = project.exists() and b'name = "attnmem"' in project.read_bytes()
    return ours and package.parent.name == "lib"


_DEFAULT_ROOT = SHIPPED if _in_checkout(PACKAGE) else Path("measurements")


def writable_root() -> Path:
    """Where new rows go: ``ATTNMEM_MEASUREMENTS``, or the checkout, or ``./measurements``."""
    named = os.environ.get("ATTNMEM_MEASUREMENTS", "").strip()
    try:
        return Path(named).expanduser() if named else _DEFAULT_ROOT
    except RuntimeError:
        refuse("ATTNMEM_MEASUREMENTS", repr(named), "a folder; no such home is known")


@functools.cache
def commit(package: Path = PACKAGE) -> str:
    """The code's commit by ``ATTNMEM_COMMIT`` or git, ``+`` if changed; asked once a process."""
    if named := os.environ.get("ATTNMEM_COMMIT", "").strip():
        return named
    # Git's hooks have variables that lead to their own repository.
    hooks = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    environment = {name: value for name, value in os.environ.items() if name not in hooks}
    where = {"env": environment, "stderr": subprocess.DEVNULL, "cwd": package}
    git = functools.partial(subprocess.check_output, **where)
    try:  # the last of these three is the folder as the commit has it
        found = git(["git", "rev-parse", "--show-toplevel", "HEAD", "HEAD:./"])
        what = ["--untracked-files=no", "--", ".", ":!*.csv"]
        changes = git(["git", "status", "--porcelain", *what])
        top, name, _ = os.fsdecode(found).splitlines()
        if not (_in_checkout(package) and os.path.samefile(top, package.parent.parent)):
            return UNKNOWN
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return name[:12] + "+" * bool(changes)
