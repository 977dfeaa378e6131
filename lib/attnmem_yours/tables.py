"""Tables of text as people have them: what is read of one, what is left out, and both in words."""

import codecs
import csv
import io
import math
import re
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnmem.checks import refuse

from .data import EXACT

SEPARATORS = {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "bars", " ": "spaces"}
GAPS = {"", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?", "-", "."}  # beside numbers

# Parts of a summary that Loaded.brief names, too.
LEFT_OUT, TAKEN_AS_GAPS, NO_ZEROS = "columns left out", "taken as gaps", "leading zeros dropped"
LINES_OUT = "lines left out"

# What sets a choice, not a truth: a person sees in the summary what became of each column.
MOST_WORDS = 12  # different words of a column that is coded unasked; items of a list that is shown
MOST_WORDS_ASKED = 1000  # of a column that --columns names: more would be mostly ids
SPARSE = 1 / 4  # share of gaps above which a column goes, and not the rows
ODD = 20  # of so many numbers one cell may be none, and is a gap; or one cell of fewer
ROOM = 110  # letters of a list of names in a refusal

_ENCODINGS = {codecs.BOM_UTF8: "utf-8-sig"}
_ENCODINGS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_NUMBER = re.compile(r"[+\u2212-]?(\d+[.,]?\d*|[.,]\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_WHOLE = re.compile(r"[+\u2212-]?\d+")
_LEADING_ZEROS = re.compile(r"[+\u2212-]?0\d.*", re.ASCII)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+", re.ASCII)  # or a decimal comma: who can tell
_DECIMAL_COMMAS, _DECIMAL_POINTS = str.maketrans(",.\u2212", ".,-"), str.maketrans("\u2212", "-")
_ROW_NAMES = "row names"

_Rows = list[tuple[int, list[str]]]  # the cells of each row, after the number of its line


class Table(NamedTuple):
    """The rows of a text that are used, in numbers."""

    numbers: np.ndarray  # (rows, columns), words coded as 0 and 1
    labels: np.ndarray  # float64, or texts of cells
    summary: dict[str, Any]


class Column(NamedTuple):
    """A column of numbers, of truths as 0 and 1, or of words."""

    name: str
    cells: np.ndarray  # texts, one a row
    values: np.ndarray | None  # None for words
    gaps: np.ndarray
    fault: str = ""  # why it is left out unless asked for
    odd: str = ""  # the first cell that is no number; among numbers such cells are gaps


class Sheet(NamedTuple):
    """All columns of a text, as they are read before any is chosen."""

    columns: list[Column]
    lines: np.ndarray  # of each row
    description: str


class _Selection(NamedTuple):
    """The columns and rows of a table that are used."""

    target: Column
    inputs: list[Column]
    left_out: dict[str, str]  # names of columns, and why
    labelled: np.ndarray  # rows that have a label
    kept: np.ndarray  # those of them without a gap

    @property
    def with_gaps(self) -> list[str]:
        """The columns whose gaps cost rows."""
        return [column.name for column in self.inputs if (column.gaps & self.labelled).any()]


def listed(value: Any, room: int = 2000) -> str:
    """A part of a summary in words, without characters that a terminal would obey."""
    if isinstance(value, dict):
        value = [f"{listed(name)[:60]} ({listed(about)})" for name, about in value.items()]
    if isinstance(value, list):
        shown = [listed(item)[:160] for item in value[:MOST_WORDS]]
        while len(shown) > 1 and len(", ".join(shown)) > room:
            shown.pop()
        text = ", ".join(shown)[: max(room, 200)]
        if len(value) > len(shown):
            text += f" and {len(value) - len(shown)} more"
        value = text
    return str(value) if str(value).isprintable() else repr(value)


def shortened(cell: str) -> str:
    """A cell of any length in a message."""
    return repr(cell if len(cell) <= 40 else f"{cell[:37]}...")


def read_table(
    path: str | Path,
    *,
    label: str | None = None,
    label_kind: str | None = None,
    columns: list[str] | None = None,
    drop_missing: str | None = None,
    header: bool | None = None,
) -> Table:
    """Choose columns, then the rows without gaps; code words."""
    sheet = read_sheet(path, header)
    names = {column.name for column in sheet.columns}
    if label is not None:
        _check_name("--label", label, names, sheet)
    for name in columns or ():
        _check_name("--columns", name, names, sheet)
    selection = _selected(sheet.columns, label, label_kind, {*(columns or ())}, drop_missing)
    target, kept = selection.target, selection.kept
    label_kind = _label_kind(target, kept, label_kind)
    words = _coded_words(selection)
    numbers = []
    for column in selection.inputs:
        if column.values is None:
            numbers += [column.cells[kept] == word for word in words[column.name]]
        else:
            numbers.append(column.values[kept])
    labels = target.cells[kept]
    if label_kind == "real" and target.values is not None:
        labels = target.values[kept]
    about_labels = _about_labels(target, kept, label_kind)
    if label is None:
        about_labels = f"the last column, {about_labels}"
    summary = _summary(sheet, selection, words, about_labels)
    return Table(np.array(numbers, dtype=np.float64).T, labels, summary)


def _check_name(option: str, name: str, names: set[str], sheet: Sheet) -> None:
    if name not in names:
        in_order = [column.name for column in sheet.columns]
        refuse(option, f"no column {shortened(name)}", f"one of {listed(in_order, 2 * ROOM)}")


def _selected(
    columns: list[Column],
    label: str | None,
    label_kind: str | None,
    chosen: set[str],
    drop_missing: str | None,
) -> _Selection:
    target = _target(columns, label)
    if target.name in chosen:
        expected = "others, or another --label"
        refuse("--columns", f"{shortened(target.name)}, the labels", expected)
    if label_kind == "class" and target.odd:
        target = target._replace(values=None, gaps=target.cells == "")
    labelled = ~target.gaps
    most_gaps = SPARSE * labelled.sum()
    if drop_missing == "columns":
        most_gaps = 0
    elif chosen or drop_missing == "rows":
        most_gaps = labelled.sum()
    inputs, left_out = [], {}
    for column in columns:
        if column.name == target.name:
            continue
        reason = _why_left_out(column, chosen, labelled, most_gaps)
        if reason:
            left_out[column.name] = reason
        else:
            inputs.append(column)
    kept = labelled.copy()
    for column in inputs:
        kept &= ~column.gaps
    selection = _Selection(target, inputs, left_out, labelled, kept)
    if not inputs or not kept.any():
        _refuse_selection(selection)
    return selection


def _target(columns: list[Column], label: str | None) -> Column:
    """The column of labels: that of a name, or the last with a value."""
    if label is not None:
        return next(column for column in columns if column.name == label)
    filled = [column for column in columns if not column.gaps.all()]
    return filled[-1] if filled else columns[-1]


def _why_left_out(
    column: Column, chosen: set[str], labelled: np.ndarray, most_gaps: float
) -> str | None:
    if chosen and column.name not in chosen:
        return "not in --columns"
    if column.fault and not chosen:
        return column.fault
    gaps = int((column.gaps & labelled).sum())
    if gaps <= most_gaps:
        return None
    reason = f"no value in {gaps} of {labelled.sum()} rows"
    return f"{reason}, as {column.odd}" if column.odd else reason


def _refuse_selection(selection: _Selection) -> None:
    if not selection.labelled.any():
        got = f"no label in {shortened(selection.target.name)}"
    elif selection.inputs:
        got = f"gaps in {listed(selection.with_gaps, ROOM)} of every row"
    else:
        got = "no column to use"
    expected = "others by --columns and --label, or --drop-missing columns"
    refuse("file", got, f"{expected}; left out: {listed(selection.left_out, ROOM) or 'none'}")


def _coded_words(selection: _Selection) -> dict[str, list[str]]:
    """The different words of each column of words."""
    words = {}
    for column in selection.inputs:
        if column.values is None:
            words[column.name] = sorted({*column.cells[selection.kept]})
            if (count := len(words[column.name])) > MOST_WORDS_ASKED:
                got = f"{count} words in {shortened(column.name)}"
                refuse("--columns", got, f"at most {MOST_WORDS_ASKED}")
    return words


def _label_kind(target: Column, kept: np.ndarray, asked: str | None) -> str:
    """What the labels are: reals, or a class by the text of the cell."""
    cells = target.cells[kept]
    integers = all(map(_WHOLE.fullmatch, cells))
    numbers = any(map(_NUMBER.fullmatch, cells))
    if asked == "real" and target.values is None:
        refuse("--label-kind", asked, f"class, as {target.odd}")
    if asked is not None:
        return asked
    ids = integers and target.values is None  # longer than float64 holds
    if target.odd and numbers and not ids:
        expected = "numbers alone, --label-kind class, or another --label"
        if target.values is not None:
            expected += ", or --label-kind real to leave such rows out"
        refuse("--label", f"{shortened(target.name)}, where {target.odd}", expected)
    decimals = target.values is not None and numbers and not integers
    return "real" if decimals else "class"


def _about_labels(target: Column, kept: np.ndarray, label_kind: str) -> str:
    cells = target.cells[kept]
    text = "numbers" if label_kind == "real" else f"classes: {len({*cells})}"
    if target.values is None:
        return text
    twins = _first_twins(cells, target.values[kept])
    if twins:
        count = "one" if label_kind == "real" else "two"
        text += f", {shortened(twins[0])} and {shortened(twins[1])} are {count}"
    if label_kind == "class":
        text += "; as numbers: --label-kind real"
    return text


def _first_twins(cells: np.ndarray, values: np.ndarray) -> tuple[str, str] | None:
    """Two texts of one number, if there are such."""
    text_of: dict[float, str] = {}
    for text, value in zip(cells, values, strict=True):
        earlier = text_of.setdefault(value, text)
        if earlier != text:
            return earlier, text
    return None


def _summary(
    sheet: Sheet, selection: _Selection, words: dict[str, list[str]], about_labels: str
) -> dict[str, Any]:
    """What was read, used and left out, by what it is about."""
    target, kept, labelled = selection.target, selection.kept, selection.labelled
    numbers = [column for column in selection.inputs if column.values is not None]
    zeros = [c.name for c in numbers if any(map(_LEADING_ZEROS.fullmatch, c.cells[kept]))]
    odd = {column.name: column.odd for column in numbers if column.odd}
    if target.values is not None and target.odd:
        odd[target.name] = target.odd
    lines_out = {
        "without a label": sheet.lines[~labelled].tolist(),
        f"with gaps in {listed(selection.with_gaps)}": sheet.lines[labelled & ~kept].tolist(),
    }
    return {
        "file": f"{sheet.description}, example 0 in line {sheet.lines[kept][0]}",
        "label": {target.name: about_labels},
        "numbers": [column.name for column in numbers],
        NO_ZEROS: zeros,
        TAKEN_AS_GAPS: odd,
        "words, coded as 0 and 1": words,
        LEFT_OUT: selection.left_out,
        LINES_OUT: {reason: lines for reason, lines in lines_out.items() if lines},
    }


# --- from the bytes of a file to its columns ------------------------------------------------------


def read_sheet(path: str | Path, header: bool | None = None) -> Sheet:
    """The columns of a text, the line of each row, and how it was read."""
    file = "standard input" if str(path) == "-" else Path(path).name
    raw = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    text, about_encoding = _text(raw, file)
    try:
        separator, rows = _split(text)
        names, rows, about_header = _headed(rows, header)
    except ValueError as error:
        if text.lstrip().startswith("#"):
            raise ValueError(f"{error}; and no comments (#) above the table") from error
        raise
    lines = np.array([line for line, _ in rows])
    cells_of = [*zip(*(cells for _, cells in rows), strict=True)]
    commas = _has_decimal_commas(cells_of)
    description = f"{file}: {len(rows)} rows of {len(names)} columns"
    description += f" between {SEPARATORS[separator]}"
    if commas:
        description += ", decimal commas"
    _check_different(names)
    columns = [
        _column(name, cells, lines, commas) for name, cells in zip(names, cells_of, strict=True)
    ]
    return Sheet(columns, lines, description + about_encoding + about_header)


def _check_different(names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            places = [place + 1 for place, n in enumerate(names) if n == name]
            got = f"{shortened(name)} as name of columns {listed(places)}"
            refuse("file", got, "a name for each")


def _text(raw: bytes, file: str) -> tuple[str, str]:
    """The text of a file, and how it is encoded where this is not UTF-8."""
    marked = [encoding for mark, encoding in _ENCODINGS.items() if raw.startswith(mark)]
    encoding, note = marked[0] if marked else "utf-8", ""
    if encoding == "utf-16":
        note = ", in UTF-16"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding != "utf-8":
            refuse("file", f"{file!r}, no {encoding.upper()} text ({error.reason})", "UTF-8")
        line = raw.count(b"\n", 0, error.start) + 1
        text, note = raw.decode("latin-1"), f", read as Latin-1 since line {line} is not in UTF-8"
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        refuse("file", f"a zero byte in line {line} of {file!r}", "text, saved as CSV in UTF-8")
    # Excel writes a line that names the separator, which is seen anyway.
    text = re.sub(r"\Asep=.(?=[\r\n])", "", text)
    if not text.strip():
        refuse("file", f"{file!r}, which is empty", "a line of names, and a line for each example")
    return text, note


def _split(text: str) -> tuple[str, _Rows]:
    """Rows by the separator that makes them equally long, with most numbers."""
    best_quality, best_separator, best_rows, first_fault = (False, 0.0, 0), "", [], ""
    for separator in SEPARATORS:
        rows, fault = _rows_between(separator, text)
        if fault:
            first_fault = first_fault or fault
            continue
        if not rows:
            refuse("file", "empty cells alone", "a line of names, and a line for each example")
        quality = _quality(rows)
        if quality > best_quality:
            best_quality, best_separator, best_rows = quality, separator, rows
    if first_fault and not best_quality[0]:
        refuse("file", first_fault, 'quotes " around whole cells, "" within them')
    if max(len(cells) for _, cells in best_rows) < 2:
        refuse("file", "one column", f"cells between {', '.join(SEPARATORS.values())}")
    return best_separator, best_rows


def _rows_between(separator: str, text: str) -> tuple[_Rows, str]:
    """The rows that are not empty, and what csv finds wrong."""
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
    rows, line = [], 1
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if any(cells):
                rows.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        return [], f"line {line}: {error}"
    return rows, ""


def _quality(rows: _Rows) -> tuple[bool, float, int]:
    """Whether rows are of one length, with the first or one shorter; share of numbers; width."""
    first, body = rows[0][1], [cells for _, cells in rows[1:]]
    widths = {len(cells) for cells in body or [first]}
    width = max(widths)
    even = width > 1 and len(widths) == 1 and width - len(first) in (0, 1)
    sample = [cell for cells in body[:199] for cell in cells]
    numbers = [cell for cell in sample if _NUMBER.fullmatch(cell)]
    return even, len(numbers) / max(1, len(sample)), len(first)


def _headed(rows: _Rows, header: bool | None) -> tuple[list[str], _Rows, str]:
    """The names of columns, rows of as many cells, and how they came."""
    (top, first), body, note = rows[0], rows[1:], ""
    if header is not False and {len(cells) for _, cells in body} == {len(first) + 1}:
        if not any(cells[-1] for _, cells in body):
            body = [(line, cells[:-1]) for line, cells in body]
            note = ", without the separators at ends"
        elif _are_row_names([cells[0] for _, cells in body]):  # as R writes them, without a head
            first, header = ["", *first], True
    for line, cells in body:
        if len(cells) != len(first):
            got = f"{len(cells)} cells in line {line} and {len(first)} in line {top}"
            refuse("file", got, 'as many in each line, in quotes " if they hold a separator')
    numbers = [cell for cell in first if _NUMBER.fullmatch(cell)]
    if header is None and 0 < len(numbers) < len(first):
        got = f"{shortened(numbers[0])} beside words in line {top}"
        refuse("file", got, "--header if these are names, --no-header if they are an example")
    if header is None:
        header = len(numbers) < len(first)
    if not header:
        note += f", no names in line {top}, so columns go by numbers"
        return [str(k + 1) for k in range(len(first))], [rows[0], *body], note
    if not body:
        refuse("file", f"names in line {top} and no row", "a row for each example")
    names = [name or f"column {k + 1}" for k, name in enumerate(first)]
    names[0] = first[0] or _ROW_NAMES
    return names, body, note


def _are_row_names(cells: list[str]) -> bool:
    """Whether a column counts from 0 or 1, or has different words."""
    for start in (0, 1):
        if cells == [str(start + k) for k in range(len(cells))]:
            return True
    return len({*cells}) == len(cells) and not any(map(_NUMBER.fullmatch, cells))


def _has_decimal_commas(cells_of: list[tuple[str, ...]]) -> bool:
    """Whether numbers are written 1,5: some have commas, none a point, not all may be thousands."""
    commas = []
    for cells in cells_of:
        for cell in cells:
            if ("," in cell or "." in cell) and _NUMBER.fullmatch(cell):
                if "." in cell:
                    return False
                commas.append(cell)
    return not all(map(_THOUSANDS.fullmatch, commas))


def _column(name: str, cells: tuple[str, ...], lines: np.ndarray, commas: bool) -> Column:
    """Numbers if all cells are such but gaps and few others; else words."""
    folded = [cell.casefold() for cell in cells]
    gaps = np.array([word in GAPS for word in folded])
    marks = _DECIMAL_COMMAS if commas else _DECIMAL_POINTS
    values = [_number(cell.translate(marks)) for cell in cells]
    if all(word in ("true", "false") or word in GAPS for word in folded):
        values = [1.0 if word == "true" else 0.0 for word in folded]
    odd = [row for row, value in enumerate(values) if value is None and not gaps[row]]
    too_large = [row for row in odd if "," not in cells[row] and _NUMBER.fullmatch(cells[row])]
    reason = fault = ""
    if name == _ROW_NAMES:
        fault = "the first column, without a name"
    if odd:
        row = (too_large or odd)[0]
        reason = f"{shortened(cells[row])} in line {lines[row]} is no number"
    if too_large:
        reason += " that float64 holds"
    texts = np.array(cells, dtype=object)
    if too_large or _are_many(odd, len(cells) - int(gaps.sum()) - len(odd)):
        fault = _fault_of_words(cells, fault, reason)
        return Column(name, texts, None, texts == "", fault, reason)
    gaps[odd] = True
    if len(odd) > 1:
        reason += f", nor are {len(odd) - 1} others"
    if gaps.all():
        fault = "no values"
    numbers = np.where(gaps, np.nan, np.array(values, dtype=np.float64))
    return Column(name, texts, numbers, gaps, fault, reason)


def _number(cell: str) -> float | None:
    """The number that a cell is; None if there is none, or float64 has none near it."""
    if "," in cell or not _NUMBER.fullmatch(cell):
        return None
    value, digits = float(cell), cell.lower().partition("e")[0]
    inexact = abs(value) >= EXACT and digits == cell and Decimal(cell) != Decimal(value)
    underflow = value == 0 and not {*digits}.isdisjoint("123456789")
    return None if inexact or underflow or math.isinf(value) else value


def _are_many(odd: list[int], n_numbers: int) -> bool:
    """Whether so many cells are no numbers that the column is one of words."""
    if len(odd) == 1:
        return n_numbers < 2
    return n_numbers < ODD * len(odd)


def _fault_of_words(cells: tuple[str, ...], fault: str, reason: str) -> str:
    """Why a column of words is left out: numbers among them, or too many words, or a single one."""
    if any(map(_NUMBER.fullmatch, cells)):
        return reason
    if fault:
        return fault
    count = len({*cells} - {""})
    if count == 1:
        return "1 different word"
    return f"{count} different words" if count > min(MOST_WORDS, len(cells) / 2) else ""
