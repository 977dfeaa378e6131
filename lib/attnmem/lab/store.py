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
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from filelock import AcquireReturnProxy, FileLock, Timeout

from ..checks import refuse

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = PACKAGE / "measurements"
DIGESTS = "DIGESTS"  # the file beside shipped rows that says what they were (tools/digests.py)
PATIENCE = 5.0, 55.0  # seconds for which a lock is waited for in silence, and after saying so
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
        fields = {name: value for name, value in vars(self).items() if value is not None}
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Run(Configuration):
    """One training, with every hyper-parameter explicit; ``None`` is *not applicable*.

    Sizes are those of the notation page.
    """

    prior = entropy = None  # the fields of Skewed, in no row of another run

    model: str  # aot, mlp, mha or block
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
    context: str | None  # shared or random; or shared, with queries that data.poor_queries makes
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

    @property
    def cell(self) -> "Run":
        """Its setting, alike for all seeds: the same run with seed 0."""
        return replace(self, seed=0)

    @property
    def shares_context(self) -> bool:
        """Whether all examples have one context."""
        return self.context is not None and self.context.startswith("shared")


@dataclass(frozen=True)
class Skewed(Run):
    """A training on bigrams whose prior is not uniform, or whose next tokens are not certain."""

    prior: float | None = None  # Zipf's exponent: the k-th likeliest pair has a share of k^-prior
    entropy: float | None = None  # of every pair's next token, in bits


@dataclass(frozen=True)
class Reading(Run):
    """A training on the next words of a text (:func:`attnmem.lab.data.words_of`)."""


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
class ReadOutcome(Outcome):
    """What a reading measured besides; its curve is the accuracy on new words.

    Seconds are those of the processor, of one run of a stack.
    """

    new_loss: float | None = None  # at the end, on the words after those of the training
    counted_loss: float | None = None  # of the training's own shares of words after every pair
    step_s: float | None = None  # for a step, the median of chunks
    use_s: float | None = None  # for a prediction, the least of all looks at the new words


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
class HubCheck(Check):
    """A test on data and models of a hub."""


@dataclass(frozen=True)
class HubFinding(Finding):
    """What a test on files of a hub found, and what these were: name, commit, digests."""

    data: str
    weights: str | None = None  # of trained models


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


RESULTS: dict[type[Configuration], type] = {Run: Outcome, Skewed: Outcome, Reading: ReadOutcome}
RESULTS |= {Check: Finding, HubCheck: HubFinding, Fitting: Fitted}


def _columns(config: type[Configuration]) -> dict[str, tuple[type, bool]]:
    columns = {}
    for name, hint in (get_type_hints(config) | get_type_hints(RESULTS[config])).items():
        alternatives = get_args(hint) or (hint,)
        value_type = next(type_ for type_ in alternatives if type_ is not NoneType)
        columns[name] = get_origin(value_type) or value_type, NoneType in alternatives
    return columns


# Of each kind of row, by its configuration: the type of each column, and whether it may be missing.
COLUMNS = {config: _columns(config) for config in RESULTS}
HEADERS = {config: ",".join([*columns, "key", "checksum"]) for config, columns in COLUMNS.items()}
_BY_HEADER = {header: config for config, header in HEADERS.items()}


# --- reading --------------------------------------------------------------------------------------


def known(
    experiment: str, profile: str, *, recompute: bool = False, root: Path | None = None
) -> dict[str, Row]:
    """Rows by key, those shipped and those measured here since; with ``recompute`` these only.

    The folder of the latter is ``root``, by default :func:`writable_root`.
    """
    shipped, measured = SHIPPED.resolve(), (root or writable_root()).resolve()
    if recompute and measured == shipped:
        folder = "a folder for the new rows, named by the environment variable"
        refuse("recompute", "True", f"{folder} ATTNMEM_MEASUREMENTS, such as _build/rows")
    file = Path(experiment) / f"{profile}.csv"
    rows = {}
    if not recompute:
        rows = read(shipped / file)
    if recompute or measured != shipped:
        rows |= read(measured / file)
    return rows


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
            header = lines.pop(0) if lines else ""
            if header not in _BY_HEADER:
                raise ValueError("the header is not that of a results file")
        for number, line in enumerate(lines, start=2):  # noqa: B007  (the error names it)
            config, result = _parse(line, _BY_HEADER[header])
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
        advice = f"if you took some out yourself, delete {path.stem}.count"
        raise ValueError(f"{written} rows were written, {len(lines)} are there; {advice}")


def digest(lines: list[str]) -> str:
    """The hash of the rows of a file, by which ``DIGESTS`` knows them."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _parse(line: str, config_type: type[Configuration]) -> Row:
    body, _, checksum = line.rpartition(",")
    if checksum != format(zlib.crc32(body.encode() + b"\n"), "08x"):
        raise ValueError("its checksum does not fit its text")
    [[*texts, key]] = csv.reader([body])
    values = {}
    columns = COLUMNS[config_type].items()
    for (name, (value_type, optional)), text in zip(columns, texts, strict=True):
        try:
            values[name] = None if optional and not text else _value(text, value_type)
        except (ValueError, KeyError):
            raise ValueError(f"{name} = {text!r} cannot be read") from None
    result_type = RESULTS[config_type]
    names = [field.name for field in fields(result_type)]
    result = result_type(**{name: values.pop(name) for name in names})
    config = config_type(**values)
    if config.key != key:
        raise ValueError("its key is not the hash of its configuration")
    return config, result


def _value(text: str, value_type: type) -> Any:
    if value_type is bool:
        return {"True": True, "False": False}[text]
    value = tuple(map(float, text.split(" "))) if value_type is tuple else value_type(text)
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
    config_type = type(rows[0][0])
    result_type = RESULTS[config_type]
    for row in rows:
        if (type(row[0]), type(row[1])) != (config_type, result_type):
            expected = f"{config_type.__name__} with {result_type.__name__}"
            refuse("rows", f"{row}", f"{expected}, as the others of {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        stored, lines = read(path), []
        for config, result in rows:
            if config.key not in stored:
                stored[config.key] = config, result
                lines.append(_line(config, result))
        header = HEADERS[config_type]
        before = path.read_bytes() if path.exists() else f"{header}\n".encode()
        if before.decode("utf-8-sig").splitlines()[0] != header:
            raise DamagedResultsError(f"{path}, line 1: not the header of such rows")
        _replace(path, before + "".join(lines).encode())
        if not (path.parents[1] / DIGESTS).exists():
            with contextlib.suppress(OSError):  # the rows are there, and the last count holds
                _replace(path.with_suffix(".count"), f"{len(stored)}\n".encode())
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
    in_silence, after_saying_so = PATIENCE
    with contextlib.suppress(Timeout):
        return lock.acquire(timeout=in_silence)
    message = f"waiting for {lock.lock_file}, which another process holds, for up to a minute"
    print(message, file=sys.stderr, flush=True)
    return lock.acquire(timeout=after_saying_so)


def _line(config: Configuration, result: Any) -> str:
    values, texts = vars(config) | vars(result), []
    for name, (value_type, optional) in COLUMNS[type(config)].items():
        value = values[name]
        if not _finite(value):
            refuse(name, f"{value} for {config}", "finite numbers")
        if value is None and optional:
            texts.append("")
        elif not isinstance(value, value_type) or (value_type is int and isinstance(value, bool)):
            refuse(name, f"{value!r} for {config}", f"a value of type {value_type.__name__}")
        elif value_type is str and (not value or "\n" in value or "\r" in value):
            refuse(name, f"{value!r} for {config}", "one line of text")
        elif value_type is tuple:
            texts.append(" ".join(f"{x:.4f}" for x in value))
        elif value_type is float:
            texts.append(repr(float(value)))
        else:
            texts.append(str(value))
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([*texts, config.key])
    return f"{line.getvalue()[:-1]},{zlib.crc32(line.getvalue().encode()):08x}\n"


def check_writable(config: Configuration, root: Path | None = None) -> None:
    """Raise OSError before a row is measured that could not be stored; warn if it has no commit."""
    path = (root or writable_root()) / config.experiment / f"{config.profile}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        if path.exists():
            path.open("ab").close()
    if commit() == UNKNOWN:
        reason = "git tells none of this copy, and ATTNMEM_COMMIT is not set"
        warnings.warn(f"rows will name no commit: {reason}", stacklevel=2)


# --- where rows go, and which code made them ------------------------------------------------------


def _in_checkout(package: Path) -> bool:
    """Whether a package lies in a source tree, whose measurements it then extends."""
    project = package.parent.parent / "pyproject.toml"
    if package.parent.name != "lib" or not project.exists():
        return False
    return b'name = "attnmem"' in project.read_bytes()


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

    def git(*arguments: str) -> bytes:
        options = {"env": environment, "stderr": subprocess.DEVNULL, "cwd": package}
        return subprocess.check_output(["git", *arguments], **options)

    try:  # the last of these three is the folder as the commit has it
        names = git("rev-parse", "--show-toplevel", "HEAD", "HEAD:./")
        code = ("--untracked-files=no", "--", ".", ":!*.csv")
        changes = git("status", "--porcelain", *code)
        top, name, _ = os.fsdecode(names).splitlines()
        if not (_in_checkout(package) and os.path.samefile(top, package.parent.parent)):
            return UNKNOWN
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return f"{name[:12]}+" if changes else name[:12]
