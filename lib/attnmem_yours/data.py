"""Data as people have them: arrays, lists, data frames and tensors become one kind of data."""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnmem.checks import check_integer, refuse

ROLES = ("contexts", "queries", "labels", "mask")
REAL = "biuf"  # kinds of numpy types that are real numbers
EXACT = 2**53  # up to here float64 holds all integers
_HIDDEN = -1e4  # numbers that are added to logits to hide a token are at most so large


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

    @property
    def lengths(self) -> Int[Tensor, " T_or_one"]:
        """The number of tokens of each context."""
        *own, n, _ = self.contexts.shape
        return torch.full(own or [1], n) if self.mask is None else (~self.mask).sum(1)

    def some(self, rows: slice | Int[Tensor, " k"]) -> Data:
        """Some of the examples."""
        own = {"queries": self.queries, "labels": self.labels, "mask": self.mask}
        own |= {} if self.shared else {"contexts": self.contexts}
        return self._replace(**{name: x if x is None else x[rows] for name, x in own.items()})


def as_data(contexts: Any, queries: Any, labels: Any = None, mask: Any = None) -> Data:
    """Accept what :func:`attnmem_yours.examine` and :func:`attnmem_yours.memorize` are given."""
    contexts = unnested(contexts)
    tables = contexts if isinstance(contexts, (list, tuple)) else ()
    if mask is None and len({len(E) for E in tables if hasattr(E, "__len__")}) > 1:
        E, mask, *kinds = _padded(contexts)
    else:
        E, *kinds = _reals("contexts", contexts, (2, 3))
    e, kind = _reals("queries", queries, (2,))
    if E.shape[-1] != e.shape[-1]:
        got = f"d = {E.shape[-1]} (shape {tuple(E.shape)})"
        refuse("contexts", got, f"d = {e.shape[-1]}, as in queries (zeros may fill the shorter)")
    if E.ndim == 3 and len(E) != len(e):
        refuse("contexts", f"{len(E)} contexts", f"{len(e)}, one for each query, or a shared one")
    if mask is not None:
        E, mask = _masked(E, mask, len(e))
    for name, value in (("contexts", E), ("queries", e)):
        if not (finite := value.isfinite()).all():
            refuse(name, f"no finite number at {(~finite).nonzero()[0].tolist()}", "finite numbers")
    found, classes = (None, None) if labels is None else _labels(labels, len(e))
    return Data(E, e, found, classes, mask, max(*kinds, kind, key=_eps))


def _eps(kind: torch.dtype) -> float:
    return torch.finfo(kind).eps


def _padded(tables: list | tuple) -> tuple[Tensor, Tensor, torch.dtype]:
    """Contexts of different lengths as one tensor, where it is padded, and their precision."""
    found = [_reals(f"contexts[{t}]", table, (2,)) for t, table in enumerate(tables)]
    parts, kinds = zip(*found, strict=True)
    if len({part.shape[1] for part in parts}) > 1:
        refuse("contexts", "tokens of several widths", "one width d")
    lengths = torch.tensor([len(part) for part in parts])
    padded = torch.nn.utils.rnn.pad_sequence(parts, True)
    return padded, torch.arange(padded.shape[1]) >= lengths[:, None], max(kinds, key=_eps)


def _reals(name: str, value: Any, ndim: tuple[int, ...]) -> tuple[Tensor, torch.dtype]:
    """The value in float64 on the CPU, and the precision in which it came."""
    array = _array(name, value)
    check_exact(name, array if isinstance(value, Tensor) else value)
    kind = (value if isinstance(value, Tensor) else array).dtype
    kind = getattr(torch, str(kind).removeprefix("torch."), torch.float64)  # of longdouble too
    if array.ndim not in ndim or not array.size:
        axes = " or ".join({2: "(rows, d)", 3: "(T, n, d)"}[k] for k in ndim)
        refuse(name, f"shape {array.shape}", f"shape {axes}, none of them 0")
    kind = kind if kind.is_floating_point else torch.float64
    return torch.from_numpy(np.array(array, dtype=np.float64)), kind


def as_numpy(value: Any) -> Any:
    """Tensors and data frames as arrays of numpy; what floats torch has, as doubles."""
    if isinstance(value, Tensor):
        value = value.detach().to_dense().cpu()
        return (value.double() if value.is_floating_point() else value).numpy()
    if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
        return [as_numpy(part) for part in value]
    return value.to_numpy() if hasattr(value, "to_numpy") else value


def unnested(value: Any) -> Any:
    """The tables of a nested tensor, torch's own way to hold some of any lengths."""
    return [*value.unbind()] if getattr(value, "is_nested", False) else value


def _array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, Tensor) and (value.is_complex() or value.is_quantized):
        refuse(name, f"dtype {value.dtype}", "real numbers")
    value = as_numpy(value)
    try:
        array = np.ma.filled(value, np.nan) if np.ma.isMaskedArray(value) else np.asarray(value)
        array = array.astype(np.float64) if array.dtype.kind == "O" else array
    except (TypeError, ValueError):
        refuse(name, type(value).__name__, "numbers of one shape")
    if array.dtype.kind not in REAL:
        refuse(name, f"dtype {array.dtype}", "real numbers")
    return array


def check_exact(name: str, value: Any) -> None:
    """Refuse integers that float64 may round, such as long ids and times in nanoseconds."""
    if hasattr(value, "columns"):  # of types of their own
        for column in value.columns:
            check_exact(f"{name}, column {column!r}", value[column])
        return
    value = value if isinstance(value, (list, tuple)) else as_numpy(value)
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if isinstance(value, (list, tuple)) or kind == "O":
        for part in value:
            check_exact(name, part)
    elif isinstance(value, int) and abs(value) > EXACT:
        refuse(name, value, "integers up to 2^53, to which float64 is exact")
    elif kind in ("i", "u") and (far := value[(value > EXACT) | (value < -EXACT)]).size:
        check_exact(name, int(far[0]))


def _masked(E: Tensor, mask: Any, count: int) -> tuple[Tensor, Bool[Tensor, "T n"] | None]:
    """The contexts with zeros as padding, and where that is."""
    given = _array("mask", mask)
    hidden = given <= _HIDDEN if given.dtype.kind == "f" else given
    if given.dtype.kind in "iu" or (given.dtype.kind == "f" and given[~hidden].any()):
        kind = "integers" if given.dtype.kind in "iu" else "numbers that are neither 0 nor huge"
        expected = "True for padding, or -inf beside 0 (of a tokenizer's attention_mask: mask == 0)"
        refuse("mask", kind, expected)
    if hidden.ndim == 4 and hidden.shape[1:3] == (1, 1):  # as transformers hands it on
        hidden = hidden[:, 0, 0]
    hidden = torch.from_numpy(np.array(hidden, dtype=bool))
    shapes = {(count, E.shape[-2]), tuple(E.shape[:-1])}
    if tuple(hidden.shape) not in shapes:
        refuse("mask", f"shape {tuple(hidden.shape)}", " or ".join(f"shape {s}" for s in shapes))
    if (empty := hidden.all(-1)).any():
        where = int(empty.reshape(-1).nonzero()[0])
        refuse("mask", f"no token left in context {where}", "at least one (True means padding)")
    if hidden.ndim == 1:
        return E[~hidden], None
    E = torch.where(hidden[..., None], 0.0, E)  # each example its own part of a shared context
    return E, hidden if hidden.any() else None


def _labels(labels: Any, count: int) -> tuple[Tensor, list | None]:
    """Reals ``(T, d_out)``, or numbers of classes and the classes."""
    array = as_labels(labels)
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if array.dtype.kind not in REAL + "O" or array.ndim not in (1, 2):
        got = f"{array.dtype} of shape {array.shape}"
        refuse("labels", got, "numbers or words, (T,) or (T, d_out)")
    if len(array) != count:
        refuse("labels", f"{len(array)} labels", f"{count}, one for each query")
    if array.ndim == 1 and array.dtype.kind != "f":
        classes, numbers = np.unique(array, return_inverse=True)
        return torch.from_numpy(numbers.reshape(-1).astype(np.int64)), classes.tolist()
    check_exact("labels", labels)
    reals = torch.from_numpy(_array("labels", array).astype(np.float64)).reshape(count, -1)
    if not (finite := reals.isfinite().all(1)).all():
        row = finite.tolist().index(False)
        refuse("labels", f"NaN or an infinite number in row {row}", "finite numbers")
    return reals, None


def as_labels(labels: Any) -> np.ndarray:
    """Labels as numbers, or as words, which are whole texts in an array of objects."""
    kind = object if isinstance(labels, (list, tuple)) else None
    array = np.asarray(as_numpy(labels), dtype=kind)
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8", "backslashreplace")
    if array.dtype.kind not in "OU":
        return array
    each = array.reshape(-1).tolist()
    words = [isinstance(label, str) for label in each]
    if len({*words}) > 1:  # a missing one is no word
        row = words.index(not words[0])
        got = f"words beside others ({each[row]!r:.60} in row {row})"
        refuse("labels", got, "a label for each example, all of one kind")
    if any(words):
        return array.astype(object)
    try:
        array = np.array(each).reshape(array.shape)
    except ValueError:  # of several lengths
        array = array.astype(object)
    if array.dtype.kind == "O":
        refuse("labels", f"a {type(each[0]).__name__} among others", "numbers or words alone")
    return array


def cut(
    table: Any, tokens: int, *, positions: bool = True
) -> tuple[Float[Tensor, "T n d"], Float[Tensor, "T d"]]:
    """Cut each row of a table into tokens of equal width, with the mean token as query.

    With ``positions``, each token gets its place as ``n`` further coordinates, a one among zeros.

    Example:
        >>> contexts, queries = cut([[1, 2, 3, 4], [5, 6, 7, 8]], tokens=2)
        >>> contexts[0].tolist(), queries[0].tolist()
        ([[1.0, 2.0, 1.0, 0.0], [3.0, 4.0, 0.0, 1.0]], [2.0, 3.0, 0.5, 0.5])
    """
    rows, _ = _reals("table", table, (2,))
    check_integer("tokens", tokens)
    if not (finite := rows.isfinite()).all():
        row, k = (~finite).nonzero()[0].tolist()
        name = [*getattr(table, "columns", range(rows.shape[1]))][k]
        got = f"no finite number in row {row}, column {name!r}"
        refuse("table", got, "finite numbers: drop such rows or columns")
    if rows.shape[1] % tokens:
        refuse("tokens", tokens, f"a divisor of the table's width {rows.shape[1]}")
    contexts = rows.reshape(len(rows), tokens, -1)
    if positions:
        places = torch.eye(tokens, dtype=rows.dtype).expand(len(rows), -1, -1)
        contexts = torch.cat([contexts, places], dim=-1)
    return contexts, contexts.mean(dim=1)


class Repeats(NamedTuple):
    """Examples between which no layer can tell: one query, and tokens in the same proportions."""

    group: Int[Tensor, " T"]  # for each example, the number of the first one equal to it
    equal: list[tuple[int, int]]  # each repeated example, after the first one that it equals
    conflicts: list[tuple[int, int]]  # those of them with different labels
    repeated_tokens: int  # contexts with a token that occurs more than once
    constant: int  # contexts of one repeated token, whose outputs no query changes


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
    equal, y = [(s, t) for t, s in enumerate(group) if s != t], data.labels
    conflicts = [(s, t) for s, t in equal if y is not None and (y[s] != y[t]).any()]
    return Repeats(torch.tensor(group), equal, conflicts, repeated, constant)
