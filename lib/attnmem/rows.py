"""A row as one line of text, and back.

A row is a configuration and what was measured for it (:mod:`attnmem.kinds`). Its line ends with a
hash of the full configuration and with a checksum of its own text. :mod:`attnmem.results` keeps
rows in files.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import zlib
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, get_args

from .checks import refuse
from .kinds import Kind, Outcome, Row


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
    values = {**vars(asked), **vars(found), "key": asked.key}
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
