"""Files as people have them: what is read of a file, what is left out, and both in words."""

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
import torch

from attnmem.checks import check_integer, need, refuse
from attnmem.terminal import wrapped

from .data import EXACT, REAL, ROLES, as_data, as_labels, check_exact, cut, unnested

_TABLE = ("tokens", "label", "label_kind", "columns", "drop_missing", "header")
_NAMED = ("contexts", "queries", "mask", "label", "label_kind")
TAKES = {".csv": _TABLE, ".tsv": _TABLE, ".npy": ("tokens",)}  # options of each kind of file
TAKES |= dict.fromkeys((".npz", ".safetensors", ".pt"), _NAMED)
ALLOWED = {"label_kind": ("real", "class"), "drop_missing": ("rows", "columns")}
_SEPARATORS = {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "bars", " ": "spaces"}
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_MARKS = {codecs.BOM_UTF8: "utf-8-sig"} | _UTF16
_NUMBER = re.compile(r"[+\u2212-]?(\d+[.,]?\d*|[.,]\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_WHOLE = re.compile(r"[+\u2212-]?\d+")
_ZEROS = re.compile(r"[+\u2212-]?0\d.*", re.ASCII)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+", re.ASCII)  # or a decimal comma: who can tell
_SWAPPED, _PLAIN = str.maketrans(",.\u2212", ".,-"), str.maketrans("\u2212", "-")
_ROW_NAMES = "row names"
_LEFT, _TAKEN, _DROPPED = "columns left out", "taken as gaps", "leading zeros dropped"
_GAPS = {"", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?", "-", "."}  # beside numbers
_FEW, _MANY = 12, 1000  # different words that are coded: unasked, and by --columns
_SPARSE = 1 / 4  # share of gaps above which a column goes, and not the rows
_ODD = 20  # of so many numbers one cell may be none, and is a gap; or one cell of fewer
_ROOM = 110  # letters of a list of names in a refusal

_Rows = list[tuple[int, list[str]]]  # the cells of each row, after the number of its line


class Loaded(NamedTuple):
    """What :func:`load` read, for ``examine`` and ``memorize``, and a summary of it."""

    contexts: Any
    queries: Any
    labels: Any
    mask: Any
    summary: dict[str, Any]  # texts, lists and dictionaries, by what they are about

    def __str__(self) -> str:
        """The summary, a line for each part."""
        return wrapped([f"{name}: {_said(part)}" for name, part in self.summary.items() if part])

    @property
    def brief(self) -> str:
        """The same in a line: examples, labels, and what was left out, shortened."""
        said, T, E = self.summary, len(self.queries), self.contexts
        n = max(map(len, E)) if isinstance(E, list) else E.shape[-2]
        file, labels = said["file"].partition(":")[0], said.get("label") or said.get("labels")
        gone = {name: said.get(name) for name in (_LEFT, _TAKEN, _DROPPED)}
        lines = sum(map(len, said.get("lines left out", {}).values()))
        parts = [f"{file}: {T:,} examples of {n} tokens, labels: {_said(labels or 'none')}"]
        parts += [f"{name}: {_said(part, 2 * _ROOM)}" for name, part in gone.items() if part]
        return "; ".join(parts + [f"lines left out: {lines}"] * (lines > 0))


class _Column(NamedTuple):
    name: str
    cells: np.ndarray  # texts, one a row
    values: np.ndarray | None  # None for words
    gaps: np.ndarray
    trouble: str  # why it is left out unless asked for
    odd: str = ""  # the first cell that is no number; among numbers such cells are gaps


def load(path: str | Path, **options: Any) -> Loaded:
    """Read contexts, queries and labels from a file; nothing in it is ever executed.

    It is a table with one example a row (.csv, .tsv, .npy, or ``-`` for a CSV from standard input),
    cut into ``tokens`` (by default the square root of its width), or holds arrays by name (.npz,
    .safetensors, .pt). Options of a text are ``columns``, a list of names (by default numbers, and
    words of few values), ``drop_missing``, the ``rows`` or ``columns`` with gaps, and ``header``,
    whether line 1 holds names; of arrays the names of ``contexts``, ``queries`` and ``mask``; of
    both ``label``, a column (by default the last) or array, and ``label_kind``. By default decimals
    are ``real``; words, truths and whole numbers are a ``class``, the text of the cell as it
    stands: 02110 stays 02110, and 4 and 04 are two.
    """
    name, given = str(path), {k: value for k, value in options.items() if value is not None}
    if "://" in name:
        refuse("file", repr(name), "a file here: download it, or pipe it into `examine -`")
    kind = ".csv" if name == "-" else next(filter(name.lower().endswith, TAKES), None)
    if name != "-" and not Path(path).is_file():
        refuse("file", f"{name!r}, {'a folder' if Path(path).is_dir() else 'not there'}", "a file")
    if kind is None:
        refuse("file", repr(name), f"a name that ends in {', '.join(TAKES)}: save it as such")
    for name, value in given.items():
        option, *takes = map(_option, (name, *TAKES[kind]))
        if option not in takes:
            refuse(option, repr(value), f"of {kind} only {', '.join(takes)}")
        if value not in ALLOWED.get(name, [value]):
            refuse(option, repr(value), " or ".join(ALLOWED[name]))
    if TAKES[kind] is _TABLE:
        return _table(path, given)
    arrays, file = _opened(path, kind), Path(path).name
    if TAKES[kind] is not _NAMED:
        said = {"file": f"{file}: shape {arrays.shape}, one example a row"}
        return _pieces(arrays, given.get("tokens"), None, said)
    try:
        return _arrays(arrays, file, given)
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # torch has tensors that hold no numbers, or hide them
        got = f"{file!r}, with a tensor that cannot be read ({type(error).__name__})"
        refuse("file", got, "plain tensors in memory, like those of torch.zeros")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _said(part: Any, room: int = 2000) -> str:
    """A part of a summary in words, without characters that a terminal would obey."""
    if isinstance(part, dict):
        part = [f"{_said(name)[:60]} ({_said(value)})" for name, value in part.items()]
    if isinstance(part, list):
        first = [_said(each)[:160] for each in part[:_FEW]]
        while len(first) > 1 and len(", ".join(first)) > room:
            first.pop()
        listed = ", ".join(first)[: max(room, 200)]
        if len(part) > len(first):
            listed += f" and {len(part) - len(first)} more"
        part = listed
    return str(part) if str(part).isprintable() else repr(part)


def _short(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else f"{cell[:37]}...")


def _opened(path: str | Path, kind: str) -> Any:
    if kind == ".pt" and torch.__version__ < (2, 10):
        where = f"{kind} with torch {torch.__version__}, which may run what is in it"
        refuse("file", where, "torch 2.10 or later, or a .safetensors file of the same arrays")
    try:
        if kind == ".pt":
            return torch.load(path, weights_only=True, map_location="cpu")
        if kind == ".safetensors":
            return need("safetensors.torch").load_file(path)
        with open(path, "rb") as file:
            found = np.load(file, allow_pickle=False)
            return dict(found) if kind == ".npz" else np.asarray(found)
    except (ImportError, PermissionError):
        raise
    except Exception as error:  # anything, often in words that advise to trust the file
        what = f"damaged or with more than numbers ({type(error).__name__})"
        expected = f"arrays of numbers, written as {kind}"
        if kind == ".pt" and "numpy" in str(error):
            what = "with arrays or numbers of numpy"
            expected = "tensors (torch.as_tensor), or a .npz, which numpy.savez writes"
        elif "Object arrays" in str(error):
            what = "with an array of Python objects"
            expected = "arrays of numbers, and of words as np.array(words, dtype=str)"
        refuse("file", f"{Path(path).name!r}, {what}", expected)


def _arrays(arrays: Any, file: str, given: dict[str, str]) -> Loaded:
    if not isinstance(arrays, dict):
        refuse("file", f"{file!r} with a {type(arrays).__name__}", "a dictionary of tensors")
    all_names = _said([*map(str, arrays)])
    found, said = dict.fromkeys(ROLES), {"file": f"{file}: {all_names}"}
    for role in ROLES:
        name = given.get("label" if role == "labels" else role)
        array = arrays.get(name or role)
        if array is None and (name or role in ("contexts", "queries")):
            such = f"one of {_said([*map(str, arrays)], _ROOM)}; a table of rows X goes as .csv"
            such += ", or in Python through cut(X, tokens)"
            refuse(f"--{role}", f"no array {name or role!r} in {file!r}", such)
        array = unnested(array)
        if isinstance(array, (list, tuple)):
            found[role], shape = [*array], f"a list of {len(array)}"
        elif hasattr(array, "shape"):
            found[role], shape = array, f"of shape {tuple(array.shape)}"
        elif array is not None:
            got = f"{name or role!r} in {file!r}, a {type(array).__name__}"
            refuse(f"--{role}", got, "an array, or a list")
        if found[role] is not None:
            said[role] = f"{_said(name or role)}, {shape}"
    as_data(found["contexts"], found["queries"], None, found["mask"])
    if found["labels"] is not None:
        found["labels"], words = _of_kind(found["labels"], given.get("label_kind"))
        said["labels"] += f", {words}"
    elif len(arrays) > sum(array is not None for array in found.values()):
        said["labels"] = "none (--label takes an array as labels)"
    return Loaded(**found, summary=said)


def _of_kind(labels: Any, kind: str | None) -> tuple[np.ndarray, str]:
    """Labels of an array as numbers or as classes, and that in words."""
    array = as_labels(labels)
    single = array.ndim == 1 or array.shape[1:] == (1,)
    kind = kind or ("class" if single and array.dtype.kind != "f" else "real")
    if kind == "real" and array.dtype.kind not in REAL:
        refuse("--label-kind", kind, f"class, as {_short(str(array.flat[0]))} is no number")
    if kind == "class" and not single:
        refuse("--label-kind", kind, f"real for shape {array.shape}, or the argmax of one-hot rows")
    if kind == "real":
        check_exact("label", array)
        return array.astype(np.float64), "numbers"
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        refuse("--label-kind", f"{kind} for NaN or an infinite number", "numbers that are finite")
    words = f"classes: {len(set(array.reshape(-1).tolist()))}"
    words += "; as numbers: --label-kind real" * (array.dtype.kind in REAL)
    return (array + 0.0).astype(str) if array.dtype.kind == "f" else array, words


def _pieces(table: np.ndarray, tokens: int | None, labels: Any, said: dict[str, Any]) -> Loaded:
    """Examples from the rows of a table, filled up with zeros."""
    width = table.shape[-1] if table.ndim == 2 else 0
    if width:  # else cut refuses it
        tokens = math.isqrt(width - 1) + 1 if tokens is None else tokens
        check_integer("--tokens", tokens, most=width)
        if fill := -width % tokens:
            table = np.pad(table, ((0, 0), (0, fill)))
        said["tokens"] = f"{tokens} of {table.shape[1] // tokens} numbers and a mark of the place"
        said["tokens"] += f", filled up with zeros: {fill}" * (fill > 0)
    return Loaded(*cut(table, tokens or 1), labels, None, said)


def _table(path: str | Path, given: dict[str, Any]) -> Loaded:
    """Choose columns, then the rows without gaps; code words."""
    label, columns, drop = map(given.get, ("label", "columns", "drop_missing"))
    found, lines, said = _columns(path, given.get("header"))
    names = {column.name: column for column in found}
    for option, name in [("--label", label), *(("--columns", name) for name in columns or ())]:
        if name is not None and name not in names:
            refuse(option, f"no column {_short(name)}", f"one of {_said([*names], 2 * _ROOM)}")
    filled = [column for column in found if not column.gaps.all()] or found
    target = names[label] if label is not None else filled[-1]
    chosen = {*(columns or names)}
    if columns and target.name in chosen:
        refuse("--columns", f"{_short(target.name)}, the labels", "others, or another --label")
    if given.get("label_kind") == "class" and target.odd:
        target = target._replace(values=None, gaps=target.cells == "")
    labelled, left = ~target.gaps, {}
    most = labelled.sum() * (0 if drop == "columns" else 1 if columns or drop else _SPARSE)
    for column in found:
        gaps = int((column.gaps & labelled).sum())
        why = f"no value in {gaps} of {labelled.sum()} rows" if gaps > most else ""
        why += f", as {column.odd}" if why and column.odd else ""
        why = why if columns else column.trouble or why
        why = why if column.name in chosen else "not in --columns"
        left |= {column.name: why} if why and column.name != target.name else {}
    used = [column for column in found if column.name != target.name and column.name not in left]
    holes = [column.name for column in used if (column.gaps & labelled).any()]
    kept = labelled & ~np.any([target.gaps, *(column.gaps for column in used)], axis=0)
    if not used or not kept.any():
        lacks = f"gaps in {_said(holes, _ROOM)} of every row" if used else "no column to use"
        lacks = lacks if labelled.any() else f"no label in {_short(target.name)}"
        others = "others by --columns and --label, or --drop-missing columns"
        refuse("file", lacks, f"{others}; left out: {_said(left, _ROOM) or 'none'}")
    labels, words = _labels(target, kept, given.get("label_kind"))
    last = "" if label is not None else "the last column, "
    coded = {c.name: sorted({*c.cells[kept]}) for c in used if c.values is None}
    parts = []
    for column in used:
        each = coded.get(column.name, [])
        if len(each) > _MANY:
            refuse("--columns", f"{len(each)} words in {_short(column.name)}", f"at most {_MANY}")
        parts += [column.cells[kept] == word for word in each] or [column.values[kept]]
    gone = {"without a label": lines[~labelled].tolist()}
    gone |= {f"with gaps in {_said(holes)}": lines[labelled & ~kept].tolist()}
    said["file"] += f", example 0 in line {lines[kept][0]}"
    said["label"] = {target.name: last + words}
    numbers = [column for column in used if column.values is not None]
    said["numbers"] = [column.name for column in numbers]
    said[_DROPPED] = [c.name for c in numbers if any(map(_ZEROS.fullmatch, c.cells[kept]))]
    if target.values is not None:
        numbers.append(target)
    said[_TAKEN] = {column.name: column.odd for column in numbers if column.odd}
    said |= {"words, coded as 0 and 1": coded, _LEFT: left}
    said["lines left out"] = {why: each for why, each in gone.items() if each}
    read = _pieces(np.array(parts, dtype=np.float64).T, given.get("tokens"), labels, said)
    said["options"] = ", ".join(map(_option, _TABLE))
    return read


def _labels(target: _Column, kept: np.ndarray, kind: str | None) -> tuple[np.ndarray, str]:
    """Labels of the rows that are kept, reals or the texts of their cells; and that in words."""
    cells, values = target.cells[kept], target.values
    whole = all(map(_WHOLE.fullmatch, cells))
    numbers = any(map(_NUMBER.fullmatch, cells))
    if kind is None and target.odd and numbers and not (whole and values is None):
        expected = "numbers alone, --label-kind class, or another --label"
        if values is not None:
            expected += ", or --label-kind real to leave such rows out"
        refuse("--label", f"{_short(target.name)}, where {target.odd}", expected)
    if kind is None:
        kind = "real" if values is not None and numbers and not whole else "class"
    if kind == "real" and values is None:
        refuse("--label-kind", kind, f"class, as {target.odd}")
    words, texts = "numbers" if kind == "real" else f"classes: {len({*cells})}", {}
    for text, value in {} if values is None else zip(cells, values[kept], strict=True):
        if (other := texts.setdefault(value, text)) != text:  # of the same number
            alike = "one" if kind == "real" else "two"
            words += f", {_short(other)} and {_short(text)} are {alike}"
            break
    if kind == "real":
        return values[kept], words
    if values is not None:
        words += "; as numbers: --label-kind real"
    return cells, words


def _columns(path: str | Path, header: bool | None) -> tuple[list[_Column], np.ndarray, dict]:
    """The columns of a text, the line of each row, and how it was read."""
    name = "standard input" if str(path) == "-" else Path(path).name
    text, encoding = _text(path, name)
    try:
        separator, rows = _split(text)
        names, rows, how = _headed(rows, header)
    except ValueError as error:
        if text.lstrip().startswith("#"):
            raise ValueError(f"{error}; and no comments (#) above the table") from error
        raise
    lines = np.array([line for line, _ in rows])
    parts = [*zip(*(cells for _, cells in rows), strict=True)]
    marked = [x for part in parts for x in part if {*x} & {*",."} and _NUMBER.fullmatch(x)]
    comma = not any("." in cell for cell in marked) and not all(map(_THOUSANDS.fullmatch, marked))
    said = f"{name}: {len(rows)} rows of {len(parts)} columns between {_SEPARATORS[separator]}"
    said += ", decimal commas" * comma + encoding + how
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        places = [k + 1 for k, name in enumerate(names) if name == twice[0]]
        refuse("file", f"{_short(twice[0])} as name of columns {_said(places)}", "a name for each")
    found = [_column(*each, lines, comma) for each in zip(names, parts, strict=True)]
    return found, lines, {"file": said}


def _text(path: str | Path, name: str) -> tuple[str, str]:
    """The text of a file, and how it is encoded where this is not UTF-8."""
    raw = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    encoding = next((code for mark, code in _MARKS.items() if raw.startswith(mark)), "utf-8")
    said = f", in {encoding.upper()}" if encoding[:5] != "utf-8" else ""
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding != "utf-8":
            refuse("file", f"{name!r}, no {encoding.upper()} text ({error.reason})", "UTF-8")
        line = raw.count(b"\n", 0, error.start) + 1
        text, said = raw.decode("latin-1"), f", read as Latin-1 since line {line} is not in UTF-8"
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        refuse("file", f"a zero byte in line {line} of {name!r}", "text, saved as CSV in UTF-8")
    # Excel writes a line that names the separator, which is seen anyway.
    text = re.sub(r"\Asep=.(?=[\r\n])", "", text)
    if not text.strip():
        refuse("file", f"{name!r}, which is empty", "a line of names, and a line for each example")
    return text, said


def _split(text: str) -> tuple[str, _Rows]:
    """Rows by the separator that makes them equally long, with most numbers."""
    best, fault = ((False,), "", []), ""
    for mark in _SEPARATORS:
        style = {"delimiter": mark, "skipinitialspace": True, "strict": True}
        reader, rows, line = csv.reader(io.StringIO(text, newline=""), **style), [], 1
        try:
            for cells in reader:
                rows.append((line, [cell.strip() for cell in cells]))
                line = reader.line_num + 1
        except csv.Error as error:
            fault = fault or f"line {line}: {error}"
            continue
        rows = [row for row in rows if any(row[1])]
        widths, top = {len(cells) for _, cells in rows[1:] or rows}, len(rows[0][1])
        even = max(widths) > 1 and len(widths) == 1 and max(widths) - top in (0, 1)
        some = [cell for _, cells in rows[1:200] for cell in cells]
        numbers = sum(map(bool, map(_NUMBER.fullmatch, some))) / max(1, len(some))
        best = max(best, ((even, numbers, top), mark, rows), key=lambda each: each[0])
    if fault and not best[0][0]:
        refuse("file", fault, 'quotes " around whole cells, "" within them')
    if max(len(cells) for _, cells in best[2]) < 2:
        refuse("file", "one column", f"cells between {', '.join(_SEPARATORS.values())}")
    return best[1:]


def _headed(rows: _Rows, header: bool | None) -> tuple[list[str], _Rows, str]:
    """The names of columns, rows of as many cells, and how they came."""
    (top, first), body, how = rows[0], rows[1:], ""
    if header is not False and {len(cells) for _, cells in body} == {len(first) + 1}:
        heads = [cells[0] for _, cells in body]
        counted = heads in ([str(k + start) for k in range(len(body))] for start in (0, 1))
        words = len({*heads}) == len(heads) and not any(map(_NUMBER.fullmatch, heads))
        if not any(cells[-1] for _, cells in body):
            body = [(line, cells[:-1]) for line, cells in body]
            how = ", without the separators at ends"
        elif counted or words:  # as R writes names of rows
            first, header = ["", *first], True
    for line, cells in body:
        if len(cells) != len(first):
            got = f"{len(cells)} cells in line {line} and {len(first)} in line {top}"
            refuse("file", got, 'as many in each line, in quotes " if they hold a separator')
    numbers = [cell for cell in first if _NUMBER.fullmatch(cell)]
    if header is None and 0 < len(numbers) < len(first):
        got = f"{_short(numbers[0])} beside words in line {top}"
        refuse("file", got, "--header if these are names, --no-header if they are an example")
    if header is False or (header is None and len(numbers) == len(first)):
        how += f", no names in line {top}, so columns go by numbers"
        return [str(k + 1) for k in range(len(first))], [rows[0], *body], how
    if not body:
        refuse("file", f"names in line {top} and no row", "a row for each example")
    names = [name or (f"column {k + 1}" if k else _ROW_NAMES) for k, name in enumerate(first)]
    return names, body, how


def _number(cell: str) -> float | None:
    """The number that a cell is; None if there is none, or float64 has none near it."""
    if "," in cell or not _NUMBER.fullmatch(cell):
        return None
    value, digits = float(cell), cell.lower().partition("e")[0]
    far = abs(value) >= EXACT and digits == cell and Decimal(cell) != Decimal(value)
    lost = value == 0 and not {*digits}.isdisjoint("123456789")
    return None if far or lost or math.isinf(value) else value


def _column(name: str, part: tuple[str, ...], lines: np.ndarray, comma: bool) -> _Column:
    """A column of numbers, of truths as 0 and 1, or of words."""
    cells, low = np.array(part, dtype=object), [cell.casefold() for cell in part]
    gaps = np.array([cell in _GAPS for cell in low])
    values = [_number(cell.translate(_SWAPPED if comma else _PLAIN)) for cell in part]
    if all(cell in ("true", "false") for cell in low if cell not in _GAPS):
        values = [float(cell == "true") for cell in low]
    odd = [k for k, value in enumerate(values) if value is None and not gaps[k]]
    beyond = [k for k in odd if "," not in part[k] and _NUMBER.fullmatch(part[k])]
    said = trouble = ""
    if name == _ROW_NAMES:
        trouble = "the first column, without a name"
    if odd:
        first = (beyond or odd)[0]
        said = f"{_short(part[first])} in line {lines[first]} is no number"
        if beyond:
            said += " that float64 holds"
    count = len(part) - int(gaps.sum()) - len(odd)  # of numbers
    if not beyond and (not odd or len(odd) == 1 < count or _ODD * len(odd) <= count):
        gaps[odd] = True
        values = np.where(gaps, np.nan, np.array(values, dtype=np.float64))
        if len(odd) > 1:
            said += f", nor are {len(odd) - 1} others"
        return _Column(name, cells, values, gaps, "no values" if gaps.all() else trouble, said)
    count = len({*part} - {""})
    if count > min(_FEW, len(part) / 2) or count == 1:
        trouble = trouble or f"{count} different word{'s' * (count > 1)}"
    trouble = said if any(map(_NUMBER.fullmatch, part)) else trouble
    return _Column(name, cells, None, cells == "", trouble, said)
