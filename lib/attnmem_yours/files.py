"""Files as people have them: arrays and tables for ``examine`` and ``memorize``, and a summary."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from attnmem.checks import check_integer, need, refuse
from attnmem.terminal import wrapped

from .data import REAL, ROLES, as_data, as_labels, check_exact, cut, unnested
from .tables import (
    LEFT_OUT,
    LINES_OUT,
    NO_ZEROS,
    ROOM,
    TAKEN_AS_GAPS,
    listed,
    read_table,
    shortened,
)

_TABLE = ("tokens", "label", "label_kind", "columns", "drop_missing", "header")
_NAMED = ("contexts", "queries", "mask", "label", "label_kind")
TAKES = {".csv": _TABLE, ".tsv": _TABLE, ".npy": ("tokens",)}  # options of each kind of file
TAKES |= dict.fromkeys((".npz", ".safetensors", ".pt"), _NAMED)
ALLOWED = {"label_kind": ("real", "class"), "drop_missing": ("rows", "columns")}


class Loaded(NamedTuple):
    """What :func:`load` read, for ``examine`` and ``memorize``, and a summary of it."""

    contexts: Any
    queries: Any
    labels: Any
    mask: Any
    summary: dict[str, Any]  # texts, lists and dictionaries, by what they are about

    def __str__(self) -> str:
        """The summary, a line for each part."""
        return wrapped(
            [f"{name}: {listed(about)}" for name, about in self.summary.items() if about]
        )

    @property
    def brief(self) -> str:
        """The same in a line: examples, labels, and what was left out, shortened."""
        if isinstance(self.contexts, list):
            n_tokens = max(map(len, self.contexts))
        else:
            n_tokens = self.contexts.shape[-2]
        file = self.summary["file"].partition(":")[0]
        labels = self.summary.get("label") or self.summary.get("labels") or "none"
        sentences = [
            f"{file}: {len(self.queries):,} examples of {n_tokens} tokens, labels: {listed(labels)}"
        ]
        for name in (LEFT_OUT, TAKEN_AS_GAPS, NO_ZEROS):
            if self.summary.get(name):
                sentences.append(f"{name}: {listed(self.summary[name], 2 * ROOM)}")
        n_lines = sum(map(len, self.summary.get(LINES_OUT, {}).values()))
        if n_lines:
            sentences.append(f"{LINES_OUT}: {n_lines}")
        return "; ".join(sentences)


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
    ending = _ending(path)
    options = {name: value for name, value in options.items() if value is not None}
    for name, value in options.items():
        _check_option(name, value, ending)
    tokens, file = options.pop("tokens", None), Path(path).name
    if TAKES[ending] is _TABLE:
        table = read_table(path, **options)
        loaded = _cut(table.numbers, tokens, table.labels, table.summary)
        loaded.summary["options"] = ", ".join(map(_flag, _TABLE))
        return loaded
    arrays = _opened(path, ending)
    if TAKES[ending] is not _NAMED:
        summary = {"file": f"{file}: shape {arrays.shape}, one example a row"}
        return _cut(arrays, tokens, None, summary)
    try:
        return _named_arrays(arrays, file, options)
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # torch has tensors that hold no numbers, or hide them
        got = f"{file!r}, with a tensor that cannot be read ({type(error).__name__})"
        refuse("file", got, "plain tensors in memory, like those of torch.zeros")


def _ending(path: str | Path) -> str:
    """The kind of a file that is there."""
    name = str(path)
    if "://" in name:
        refuse("file", repr(name), "a file here: download it, or pipe it into `examine -`")
    if name == "-":
        return ".csv"
    if Path(path).is_dir():
        refuse("file", f"{name!r}, a folder", "a file")
    if not Path(path).is_file():
        refuse("file", f"{name!r}, not there", "a file")
    for ending in TAKES:
        if name.lower().endswith(ending):
            return ending
    refuse("file", repr(name), f"a name that ends in {', '.join(TAKES)}: save it as such")


def _check_option(name: str, value: Any, ending: str) -> None:
    if name not in TAKES[ending]:
        takes = ", ".join(map(_flag, TAKES[ending]))
        refuse(_flag(name), repr(value), f"of {ending} only {takes}")
    if name in ALLOWED and value not in ALLOWED[name]:
        refuse(_flag(name), repr(value), " or ".join(ALLOWED[name]))


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _cut(
    table: np.ndarray, tokens: int | None, labels: np.ndarray | None, summary: dict[str, Any]
) -> Loaded:
    """Examples from the rows of a table, filled up with zeros."""
    width = table.shape[-1] if table.ndim == 2 else 0
    if width:  # else cut refuses it
        if tokens is None:
            tokens = math.isqrt(width - 1) + 1
        check_integer("--tokens", tokens, most=width)
        n_zeros = -width % tokens
        if n_zeros:
            table = np.pad(table, ((0, 0), (0, n_zeros)))
        token_width = table.shape[1] // tokens
        summary["tokens"] = f"{tokens} of {token_width} numbers and a mark of the place"
        if n_zeros:
            summary["tokens"] += f", filled up with zeros: {n_zeros}"
    contexts, queries = cut(table, tokens or 1)
    return Loaded(contexts=contexts, queries=queries, labels=labels, mask=None, summary=summary)


# --- files of arrays ------------------------------------------------------------------------------


def _opened(path: str | Path, ending: str) -> Any:
    if ending == ".pt" and torch.__version__ < (2, 10):
        got = f"{ending} with torch {torch.__version__}, which may run what is in it"
        refuse("file", got, "torch 2.10 or later, or a .safetensors file of the same arrays")
    try:
        if ending == ".pt":
            return torch.load(path, weights_only=True, map_location="cpu")
        if ending == ".safetensors":
            return need("safetensors.torch").load_file(path)
        with open(path, "rb") as file:
            arrays = np.load(file, allow_pickle=False)
            return dict(arrays) if ending == ".npz" else np.asarray(arrays)
    except (ImportError, PermissionError):
        raise
    except Exception as error:  # anything, often in words that advise to trust the file
        fault = f"damaged or with more than numbers ({type(error).__name__})"
        expected = f"arrays of numbers, written as {ending}"
        if ending == ".pt" and "numpy" in str(error):
            fault = "with arrays or numbers of numpy"
            expected = "tensors (torch.as_tensor), or a .npz, which numpy.savez writes"
        elif "Object arrays" in str(error):
            fault = "with an array of Python objects"
            expected = "arrays of numbers, and of words as np.array(words, dtype=str)"
        refuse("file", f"{Path(path).name!r}, {fault}", expected)


def _named_arrays(arrays: Any, file: str, options: dict[str, str]) -> Loaded:
    if not isinstance(arrays, dict):
        refuse("file", f"{file!r} with a {type(arrays).__name__}", "a dictionary of tensors")
    data = {}
    summary = {"file": f"{file}: {listed([*map(str, arrays)])}"}
    for role in ROLES:
        option = "label" if role == "labels" else role
        data[role] = _array_of(role, arrays, file, options.get(option))
        if data[role] is not None:
            summary[role] = f"{listed(options.get(option) or role)}, {_shape(data[role])}"
    as_data(data["contexts"], data["queries"], None, data["mask"])
    n_used = sum(1 for array in data.values() if array is not None)
    if data["labels"] is not None:
        data["labels"], about = _of_kind(data["labels"], options.get("label_kind"))
        summary["labels"] += f", {about}"
    elif len(arrays) > n_used:
        summary["labels"] = "none (--label takes an array as labels)"
    return Loaded(**data, summary=summary)


def _array_of(role: str, arrays: dict, file: str, asked: str | None) -> Any:
    """The array of a role, by the name that was asked for or its own; None if it has none."""
    name = asked or role
    array = unnested(arrays.get(name))
    if array is None and (asked or role in ("contexts", "queries")):
        expected = f"one of {listed([*map(str, arrays)], ROOM)}; a table of rows X goes as .csv"
        expected += ", or in Python through cut(X, tokens)"
        refuse(f"--{role}", f"no array {name!r} in {file!r}", expected)
    if isinstance(array, tuple):
        array = [*array]
    if array is not None and not (isinstance(array, list) or hasattr(array, "shape")):
        got = f"{name!r} in {file!r}, a {type(array).__name__}"
        refuse(f"--{role}", got, "an array, or a list")
    return array


def _shape(array: Any) -> str:
    if isinstance(array, list):
        return f"a list of {len(array)}"
    return f"of shape {tuple(array.shape)}"


def _of_kind(labels: Any, label_kind: str | None) -> tuple[np.ndarray, str]:
    """Labels of an array as numbers or as classes, and that in words."""
    array = as_labels(labels)
    one_each = array.ndim == 1 or array.shape[1:] == (1,)
    floats, numbers = array.dtype.kind == "f", array.dtype.kind in REAL
    if label_kind is None:
        label_kind = "class" if one_each and not floats else "real"
    if label_kind == "real":
        if not numbers:
            word = shortened(str(array.flat[0]))
            refuse("--label-kind", label_kind, f"class, as {word} is no number")
        check_exact("label", array)
        return array.astype(np.float64), "numbers"
    if not one_each:
        expected = f"real for shape {array.shape}, or the argmax of one-hot rows"
        refuse("--label-kind", label_kind, expected)
    if floats and not np.isfinite(array).all():
        got = f"{label_kind} for NaN or an infinite number"
        refuse("--label-kind", got, "numbers that are finite")
    text = f"classes: {len({*array.reshape(-1).tolist()})}"
    if numbers:
        text += "; as numbers: --label-kind real"
    if floats:
        array = (array + 0.0).astype(str)  # no negative zeros
    return array, text
