"""The store of measured rows: one CSV per experiment and profile, one row per measurement.

What a row is, :mod:`attnmem.kinds` defines; a file holds rows of one kind. A row is appended whole
or not at all. A file that is damaged, truncated, foreign or self-contradictory is refused with its
name and line; nothing in it is used, and nothing is written to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import subprocess
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
from filelock import FileLock

from .checks import refuse
from .kinds import (  # noqa: F401  (kinds of rows and their files are used together)
    FITS,
    TESTS,
    TRAININGS,
    Check,
    Configuration,
    Finding,
    Fitted,
    Fitting,
    Kind,
    Outcome,
    Row,
    Run,
    kind_of,
    kind_of_row,
)
from .rows import fields_of, line_of, parse, widen, write

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "measurements"
ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # git's hooks lead to their repository
UNKNOWN = "unknown"  # the commit of rows that come from a copy of the files without its repository


class DamagedResultsError(ValueError):
    """A results file that cannot be trusted; the message names the file and the line."""


def in_checkout() -> bool:
    """Whether the library runs from a source tree, whose measurements it then extends."""
    project = PACKAGE.parent.parent / "pyproject.toml"
    ours = project.exists() and b'name = "attnmem"' in project.read_bytes()
    return ours and PACKAGE.parent.name == "lib"


def writable_root() -> Path:
    """Where new rows go: ``ATTNMEM_MEASUREMENTS``, or the checkout, or ``./measurements``."""
    if not (named := os.environ.get("ATTNMEM_MEASUREMENTS", "").strip()):
        return SHIPPED if in_checkout() else Path("measurements")
    try:
        return Path(named).expanduser()
    except RuntimeError:
        refuse("ATTNMEM_MEASUREMENTS", repr(named), "a folder; no such home is known")


def file_of(experiment: str, profile: str, root: Path) -> Path:
    """The file of one experiment and profile.

    Args:
        experiment: The name of the experiment.
        profile: ``paper``, ``quick`` or a tier of features.
        root: The folder of the experiments' folders.

    Returns:
        Its path, whether or not there is such a file.
    """
    return root / experiment / f"{profile}.csv"


def read(path: Path) -> dict[str, Row]:
    """All rows of a file by key, in its order.

    Args:
        path: ``<root>/<experiment>/<profile>.csv``. It may lack columns whose field has a default,
            which its rows then have; and have the line ends or byte-order mark of another system.

    Returns:
        Configuration and measurement by the configuration's key; empty if there is no file.

    Raises:
        DamagedResultsError: On the first line that :func:`append` did not write so.
    """
    if not path.exists():
        return {}
    try:
        return _contents(path)[1]
    except DamagedResultsError:
        with contextlib.suppress(OSError), _lock(path):  # a row may just have been half written
            return _contents(path)[1]
        raise


def _contents(path: Path) -> tuple[list[str], dict[str, Row]]:
    """The header of a file, and its rows."""
    header: list[str] = []
    rows: dict[str, Row] = {}
    for number, line in _lines(path):
        try:
            if number == 1:
                header = fields_of(line)
                kind = kind_of(header)
                continue
            asked, found = parse(line, header, kind)
            if (asked.experiment, asked.profile) != (path.parent.name, path.stem):
                raise ValueError(f"it belongs to {asked.experiment}/{asked.profile}")
            if asked.key in rows:
                raise ValueError(f"the run {asked.key} stands in the file twice")
        except ValueError as error:
            raise DamagedResultsError(f"{path}, line {number}: {error}") from error
        rows[asked.key] = (asked, found)
    return header, rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DamagedResultsError(f"{path}, line {line}: not UTF-8 text") from error
    lines = text.split("\n")
    if lines.pop():
        raise DamagedResultsError(f"{path}, line {len(lines) + 1}: cut off before its end")
    if not lines:
        raise DamagedResultsError(f"{path}, line 1: the file is empty")
    for number, line in enumerate(lines, start=1):
        yield number, line.removesuffix("\r") + "\n"


def append(rows: Iterable[Row], root: Path | None = None) -> int:
    """Append rows to their files and flush them to disk.

    What is in a file already is left as it is. A file that lacks columns is written on in its own
    columns as long as they hold the new rows; otherwise a copy with all columns takes its place.
    Every row is one write of one line to a file opened for appending, and a new file is renamed
    into its place when it is whole. So a killed process leaves whole lines only, and loses no row
    of another. One process writes at a time; a lock in the file ``<profile>.lock`` sees to it.

    Args:
        rows: Configurations, each with its measurement.
        root: The folder of the experiments' folders; :func:`writable_root` if it is ``None``.

    Returns:
        How many rows were new.

    Raises:
        ValueError: A row holds a number that is not finite, or contradicts itself. Nothing is
            written to its file.
        DamagedResultsError: The file is damaged, or holds rows of another kind.
        OSError: A row cannot be written, as on a full disk; nothing of it is left in its file.
    """
    root = root or writable_root()
    by_file: dict[Path, list[Row]] = {}
    for row in rows:
        by_file.setdefault(file_of(row[0].experiment, row[0].profile, root), []).append(row)
    return sum(_append(path, group) for path, group in by_file.items())


def _append(path: Path, group: list[Row]) -> int:
    kind = kind_of_row(group[0])
    with _lock(path):
        header, have = _contents(path) if path.exists() else ([], {})
        kinds = {kind_of_row(row) for row in group} | ({kind_of(header)} if header else set())
        if len(kinds) > 1:
            raise DamagedResultsError(f"{path}, line 1: not the header of such rows")
        new: dict[str, Row] = {}
        for row in group:
            if row[0].key not in have:
                new.setdefault(row[0].key, row)
        fits = all(kind.holds(row, header) for row in new.values())
        columns = header if fits else kind.columns
        lines = [write(row, columns, kind) for row in new.values()]
        if columns != header:
            old = (widen(line, header, kind) for number, line in _lines(path) if number > 1)
            _replace(path, [line_of(columns), *(old if header else ())])
        _add(path, lines)
    return len(lines)


def _lock(path: Path) -> contextlib.AbstractContextManager:
    """What one process that writes to a file holds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_suffix(".lock")).acquire(poll_interval=0.01)


def check_writable(asked: Configuration, root: Path | None = None) -> None:
    """Accept a configuration whose row could be stored, before it is measured.

    Warns once a process if the row will not name a commit.

    Args:
        asked: The configuration.
        root: As for :func:`append`.

    Raises:
        OSError: The folder of its file is none, or cannot be written to.
    """
    path = file_of(asked.experiment, asked.profile, root or writable_root())
    with _lock(path), open(path, "ab") if path.exists() else contextlib.nullcontext():
        pass
    if commit() == UNKNOWN:
        _warn_of_rows_without_commit()


@functools.cache
def _warn_of_rows_without_commit() -> None:
    said = "rows will name no commit: git tells none of this copy, and ATTNMEM_COMMIT is not set"
    warnings.warn(said, stacklevel=3)


def _replace(path: Path, lines: list[str]) -> None:
    """A file of these lines, on the disk, or the file that was there before."""
    scratch = path.with_suffix(".new")
    with open(scratch, "w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def _add(path: Path, lines: list[str]) -> None:
    with open(path, "ab", buffering=0) as file:
        for line in lines:
            _write(file.fileno(), line.encode())
        os.fsync(file.fileno())


def _write(descriptor: int, text: bytes) -> None:
    """Write a text whole; a full disk would take a part of it."""
    end = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(descriptor, end)
        raise


def known(experiment: str, profile: str) -> dict[str, Row]:
    """Rows of an experiment: those shipped with the library and those measured here since.

    Args:
        experiment: The name of the experiment, which is that of its folder.
        profile: ``paper``, ``quick`` or a tier of features; the name of the file.

    Returns:
        Configuration and measurement by the configuration's key; empty if there are none.

    Raises:
        DamagedResultsError: A file of theirs is damaged.
    """
    roots = dict.fromkeys([SHIPPED.resolve(), writable_root().resolve()])
    rows: dict[str, Row] = {}
    for root in roots:
        rows |= read(file_of(experiment, profile, root))
    return rows


def table(experiment: str, profile: str, kind: Kind = TRAININGS) -> pd.DataFrame:
    """The rows of :func:`known` as a table.

    Args:
        experiment: The name of the experiment.
        profile: ``paper``, ``quick`` or a tier of features.
        kind: The kind of its rows.

    Returns:
        What :func:`as_table` makes of them.

    Raises:
        DamagedResultsError: A file of theirs is damaged.
    """
    return as_table(known(experiment, profile).values(), kind)


def as_table(rows: Iterable[Row], kind: Kind = TRAININGS) -> pd.DataFrame:
    """Rows as a table with a column for each field, in the order of the file.

    Args:
        rows: Configurations, each with its measurement.
        kind: Their kind, which decides the columns even if there are no rows.

    Returns:
        One line for each row. Of a training that diverged, ``accuracy`` and ``loss`` are missing,
        and ``diverged`` is its step; of the others ``diverged`` is missing.
    """
    values = [vars(asked) | vars(found) for asked, found in rows]
    return pd.DataFrame(values, columns=[*kind.hints])


def by_seed(table: pd.DataFrame, axis: str, measured: str = "accuracy") -> pd.DataFrame:
    """One measurement, with a row for every value of one field and a column for every seed.

    Args:
        table: Rows that differ in the field and in the seed only, as :func:`as_table` makes them.
        axis: The field.
        measured: The column of the measurement.

    Returns:
        The table, indexed by the values of the field in rising order. What no row measured is
        missing: a seed that was not trained, or one that diverged.

    Raises:
        ValueError: Two rows have the same seed and the same value of the field.
    """
    return table.pivot(index=axis, columns="seed", values=measured)


def spans(table: pd.DataFrame, *fields: str) -> str:
    """The least and the largest value of each field, for the ``sizes`` of a verdict.

    Args:
        table: Rows, as :func:`as_table` makes them.
        *fields: Columns of whole numbers.

    Returns:
        The fields in their order, with one value where the two agree.

    Raises:
        ValueError: A field is no column, or has missing values.

    Example:
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
    """How many seeds each configuration of a table was trained with at least.

    Args:
        table: Trainings, as :func:`as_table` makes them. A seed that diverged counts: it was
            trained, and its row says so.

    Returns:
        The number of seeds of the configuration that has the fewest.
    """
    other = [f.name for f in dataclasses.fields(Run) if f.name != "seed"]
    return int(table.groupby(other, dropna=False).seed.nunique().min())


@functools.cache
def published(paper: str) -> pd.DataFrame:
    """Numbers that a paper published, for comparison.

    Args:
        paper: ``dana-2025`` or ``mahdavi-2024``; or ``bits-per-parameter``, of several papers.

    Returns:
        One line for each number, with the sizes that it belongs to. Of the experiments of Dana et
        al. with three layers, ``depth1`` is complete; of ``depth2`` and ``depth5`` there are four
        points, with three digits, chosen because rows of an earlier model were far from them.
    """
    return pd.read_csv(PACKAGE / "published" / f"{paper}.csv")


@functools.cache
def commit() -> str:
    """The commit that the code comes from, ``+`` if it has been changed since.

    It is what ``ATTNMEM_COMMIT`` says, or else what git says of the checkout, if that is the top
    of a repository which has the library in this place; or else ``unknown``. Asked once a process,
    since that is when the code was read.
    """
    if named := os.environ.get("ATTNMEM_COMMIT", "").strip():
        return named
    try:  # the last of these is the folder as the commit has it
        top, name, _ = _git("rev-parse", "--show-toplevel", "HEAD", "HEAD:./")
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", str(PACKAGE))
        if not (in_checkout() and os.path.samefile(top, PACKAGE.parent.parent)):
            return UNKNOWN
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return name[:12] + "+" * any(not line.endswith(".csv") for line in changes)


def _git(*asked: str) -> list[str]:
    command = ["git", "-C", str(PACKAGE), *asked]
    here = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    found = subprocess.run(command, capture_output=True, check=True, env=here).stdout
    return os.fsdecode(found).splitlines()
