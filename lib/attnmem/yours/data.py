"""Data as people have them: arrays, lists, data frames and tensors become one kind of data."""

from __future__ import annotations

import collections
import math
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..checks import check_integer, refuse
from ..features.corpora import need

SUFFIXES = (".npz", ".npy", ".pt", ".safetensors", ".csv")
ROLES = ("contexts", "queries", "labels", "mask")
REAL = "biuf"  # kinds of numpy types that are real numbers


def wrapped(lines: list[str]) -> str:
    """A report, whose long lines go on below themselves."""
    return "\n".join(textwrap.fill(line, 79, subsequent_indent=" " * 12) for line in lines)


class Data(NamedTuple):
    """Examples in float64 on the CPU, and what was said about them."""

    contexts: Float[Tensor, "*T n d"]  # own or shared; padding is zero
    queries: Float[Tensor, "T d"]
    labels: Float[Tensor, "T d_out"] | Int[Tensor, " T"] | None  # reals, or numbers of classes
    classes: list | None  # as they came; None for reals
    mask: Bool[Tensor, "T n"] | None  # True where a token is padding, as in key_padding_mask
    precision: torch.dtype  # the coarsest in which contexts and queries came

    @property
    def shared(self) -> bool:
        """Whether one context serves all examples."""
        return self.contexts.ndim == 2


def read(contexts: Any, queries: Any, labels: Any = None, mask: Any = None) -> Data:
    """Accept what :func:`attnmem.yours.examine` and :func:`attnmem.yours.memorize` are given."""
    tables = contexts if isinstance(contexts, (list, tuple)) else ()
    if mask is None and len({len(E) for E in tables if hasattr(E, "__len__")}) > 1:
        contexts, mask = _padded(contexts)
    E, coarse = _reals("contexts", contexts, (2, 3))
    e, other = _reals("queries", queries, (2,))
    if E.shape[-1] != e.shape[-1]:
        got = f"d = {E.shape[-1]} (shape {tuple(E.shape)})"
        refuse("contexts", got, f"d = {e.shape[-1]}, as in queries (zeros may fill the shorter)")
    if E.ndim == 3 and len(E) != len(e):
        refuse("contexts", f"{len(E)} contexts", f"{len(e)}, one for each query, or a shared one")
    hidden = None if mask is None else _mask(mask, E, len(e))
    if hidden is not None and hidden.ndim == 1:
        E, hidden = E[~hidden], None
    elif hidden is not None:
        E = torch.where(hidden[..., None], 0.0, E)  # each example its own part of a shared context
        hidden = hidden if hidden.any() else None
    for name, value in (("contexts", E), ("queries", e)):
        if not (finite := value.isfinite()).all():
            refuse(name, f"no finite number at {(~finite).nonzero()[0].tolist()}", "finite numbers")
    found, classes = (None, None) if labels is None else _labels(labels, len(e))
    precision = max((coarse, other), key=lambda kind: torch.finfo(kind).eps)
    return Data(E, e, found, classes, hidden, precision)


def _padded(tables: list | tuple) -> tuple[Tensor, Tensor]:
    """Contexts of different lengths as one tensor, and where it is padded."""
    parts = [_reals(f"contexts[{t}]", table, (2,)) for t, table in enumerate(tables)]
    coarse = max((kind for _, kind in parts), key=lambda kind: torch.finfo(kind).eps)
    if len({part.shape[1] for part, _ in parts}) > 1:
        refuse("contexts", "tokens of several widths", "one width d")
    lengths = torch.tensor([len(part) for part, _ in parts])
    padded = torch.nn.utils.rnn.pad_sequence([part.to(coarse) for part, _ in parts], True)
    return padded, torch.arange(padded.shape[1]) >= lengths[:, None]


def _reals(name: str, value: Any, ndim: tuple[int, ...]) -> tuple[Tensor, torch.dtype]:
    """The value in float64 on the CPU, and the precision in which it came."""
    if isinstance(value, Tensor):
        if value.is_complex() or value.is_quantized:
            refuse(name, f"dtype {value.dtype}", "real numbers")
        kind = value.dtype if value.is_floating_point() else torch.float64
        found = value.detach().to_dense().cpu().to(torch.float64)
    else:
        array = _array(name, value)
        # A longdouble has no torch type; integers are exact.
        kind = getattr(torch, array.dtype.name, torch.float64)
        kind = kind if array.dtype.kind == "f" else torch.float64
        found = torch.from_numpy(np.array(array, dtype=np.float64))
    if found.ndim not in ndim or not found.numel():
        axes = " or ".join({2: "(rows, d)", 3: "(T, n, d)"}[k] for k in ndim)
        refuse(name, f"shape {tuple(found.shape)}", f"shape {axes}, none of them 0")
    return found, kind


def _array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
        value = [torch.as_tensor(part).detach().cpu().double().numpy() for part in value]
    value = value.to_numpy() if hasattr(value, "to_numpy") else value
    try:
        array = np.ma.filled(value, np.nan) if np.ma.isMaskedArray(value) else np.asarray(value)
        array = array.astype(np.float64) if array.dtype.kind == "O" else array
    except (TypeError, ValueError):
        refuse(name, type(value).__name__, "numbers of one shape")
    if array.dtype.kind not in REAL:
        refuse(name, f"dtype {array.dtype}", "real numbers")
    return array


def _mask(mask: Any, contexts: Tensor, count: int) -> Bool[Tensor, "*T n"]:
    given = mask.detach().cpu() if isinstance(mask, Tensor) else torch.as_tensor(np.array(mask))
    hidden = torch.isneginf(given) if given.is_floating_point() else given.bool()
    if given.is_floating_point() and given[~hidden].any():
        refuse("mask", "numbers that are added to logits", "zeros and minus infinities, or bools")
    shapes = {(count, contexts.shape[-2]), tuple(contexts.shape[:-1])}
    if tuple(hidden.shape) not in shapes:
        refuse("mask", f"shape {tuple(hidden.shape)}", " or ".join(f"shape {s}" for s in shapes))
    if (empty := hidden.all(-1)).any():
        where = int(empty.reshape(-1).nonzero()[0])
        refuse("mask", f"no token left in context {where}", "at least one (True means padding)")
    return hidden


def _labels(labels: Any, count: int) -> tuple[Tensor, list | None]:
    """Reals ``(T, d_out)``, or numbers of classes and the classes."""
    if isinstance(labels, Tensor):
        labels = labels.detach().cpu()
        labels = labels.double().numpy() if labels.is_floating_point() else labels.numpy()
    kind = object if isinstance(labels, (list, tuple)) else None
    array = np.asarray(labels.to_numpy() if hasattr(labels, "to_numpy") else labels, dtype=kind)
    if array.dtype.kind == "O":
        each = array.reshape(-1).tolist()
        if len({isinstance(label, str) for label in each}) > 1:  # a missing one is no word
            refuse("labels", "words beside others", "a label for each example, all of one kind")
        array = np.array(each).reshape(array.shape)
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if array.dtype.kind not in REAL + "US" or array.ndim not in (1, 2):
        refuse(
            "labels",
            f"{array.dtype} of shape {array.shape}",
            "numbers or words, (T,) or (T, d_out)",
        )
    if len(array) != count:
        refuse("labels", f"{len(array)} labels", f"{count}, one for each query")
    if array.ndim == 1 and array.dtype.kind != "f":
        classes, numbers = np.unique(array, return_inverse=True)
        return torch.from_numpy(numbers.reshape(-1).astype(np.int64)), classes.tolist()
    reals = torch.from_numpy(_array("labels", array).astype(np.float64)).reshape(count, -1)
    if not reals.isfinite().all():
        refuse("labels", "NaN or an infinite number", "finite numbers")
    return reals, None


def cut(
    table: Any, tokens: int, *, positions: bool = True
) -> tuple[Float[Tensor, "T n d"], Float[Tensor, "T d"]]:
    """Cut each row of a table into tokens of equal width, with the mean token as query.

    Args:
        table: One example a row, such as an image of 8 x 8 pixels, ``(T, width)``.
        tokens: Number of tokens ``n``; it divides the width.
        positions: Whether each token gets its place as ``n`` further coordinates, a one among
            zeros. Without them, attention does not see the order.

    Returns:
        Contexts and queries, in float64.

    Raises:
        ValueError: If the table is not one of numbers, or ``n`` does not divide its width.

    Example:
        >>> contexts, queries = cut([[1, 2, 3, 4], [5, 6, 7, 8]], tokens=2)
        >>> contexts[0].tolist(), queries[0].tolist()
        ([[1.0, 2.0, 1.0, 0.0], [3.0, 4.0, 0.0, 1.0]], [2.0, 3.0, 0.5, 0.5])
    """
    rows, _ = _reals("table", table, (2,))
    check_integer("tokens", tokens)
    if rows.shape[1] % tokens:
        refuse("tokens", tokens, f"a divisor of the table's width {rows.shape[1]}")
    contexts = rows.reshape(len(rows), tokens, -1)
    if positions:
        places = torch.eye(tokens, dtype=rows.dtype).expand(len(rows), -1, -1)
        contexts = torch.cat([contexts, places], dim=-1)
    return contexts, contexts.mean(dim=1)


def load(path: str | Path, names: dict[str, str], tokens: int | None = None) -> dict[str, Any]:
    """Read contexts, queries and labels from a file; nothing in it is ever executed.

    ``names`` are those of the arrays, by role, where they differ from the role's own.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        refuse("file", repr(path.name), f"a name that ends in {', '.join(SUFFIXES)}")
    if path.suffix in (".npy", ".csv"):
        return _table(path, names, tokens)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    elif path.suffix == ".pt":
        arrays = torch.load(path, weights_only=True, map_location="cpu")
    else:
        arrays = need("safetensors.torch").load_file(path)
    found = {}
    for role in ROLES:
        name = names.get(role, role)
        if name in arrays:
            found[role] = arrays[name]
        elif role in ("contexts", "queries") or role in names:
            refuse(role, f"no array {name!r}", f"one of {', '.join(arrays)}")
    return found


def _table(path: Path, names: dict[str, str], tokens: int | None) -> dict[str, Any]:
    labels = None
    if path.suffix == ".npy":
        table = np.load(path, allow_pickle=False, mmap_mode="r")
    else:
        import pandas as pd

        frame = pd.read_csv(path)
        column = names.get("labels", frame.columns[-1])
        if column not in frame.columns:
            refuse("labels", f"no column {column!r}", f"one of {[*map(str, frame.columns)]}")
        labels, table = frame[column], frame.drop(columns=[column])
        if words := [*table.select_dtypes(exclude="number").columns]:
            refuse("file", f"columns {words} of words", "numbers, but in the column of labels")
    if tokens is None:
        refuse("tokens", None, f"a number of tokens that divides {table.shape[-1]} columns")
    contexts, queries = cut(table, tokens)
    return {"contexts": contexts, "queries": queries, "labels": labels}


class Repeats(NamedTuple):
    """Examples between which no layer can tell: one query, and tokens in the same proportions."""

    group: Int[Tensor, " T"]  # for each example, the number of the first one equal to it
    conflicts: list[tuple[int, int]]  # pairs of equal examples with different labels
    repeated_tokens: int  # contexts with a token that occurs more than once
    constant: int  # contexts of one repeated token, whose outputs no query changes

    @property
    def equal(self) -> list[tuple[int, int]]:
        """Each repeated example, after the first one that it equals."""
        return [(s, t) for t, s in enumerate(self.group.tolist()) if s != t]


def repeats(data: Data) -> Repeats:
    """Find equal examples, among them those with different labels."""
    E, e = (x.numpy() + 0.0 for x in (data.contexts, data.queries))  # no negative zeros
    first: dict[Any, int] = {}
    group, repeated, constant = [], 0, 0
    for t, query in enumerate(e):
        if t == 0 or not data.shared:
            rows = E if data.shared else E[t] if data.mask is None else E[t][~data.mask[t].numpy()]
            counts = collections.Counter(row.tobytes() for row in rows)
            repeated += max(counts.values()) > 1
            constant += len(counts) == 1
            unit = math.gcd(*counts.values())
            tokens = tuple(sorted((row, k // unit) for row, k in counts.items()))
        key = tokens if len(tokens) == 1 else (query.tobytes(), None if data.shared else tokens)
        group.append(first.setdefault(key, t))
    pairs = [(s, t) for t, s in enumerate(group) if s != t] if data.labels is not None else []
    conflicts = [(s, t) for s, t in pairs if (data.labels[s] != data.labels[t]).any()]
    return Repeats(torch.tensor(group), conflicts, repeated, constant)
