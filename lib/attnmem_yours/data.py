"""Data as people have them: arrays, lists, data frames and tensors become one kind of examples."""

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
REAL = "biuf"  # numpy's letters for types that are real numbers
EXACT = 2**53  # up to here float64 holds all integers
# Numbers that are added to logits to hide a token are at most so large: half precision, which ends
# at -65,504, is given -1e4.
_HIDDEN = -1e4


class Examples(NamedTuple):
    """Examples in float64 on the CPU."""

    contexts: Float[Tensor, "*T n d"]  # own or shared; padding is zero
    queries: Float[Tensor, "T d"]
    labels: Float[Tensor, "T d_out"] | Int[Tensor, " T"] | None  # reals, or numbers of classes
    mask: Bool[Tensor, "T n"] | None  # True where a token is padding, as in key_padding_mask
    classes: list | None = None  # as they came; None for reals
    precision: torch.dtype = torch.float64  # the coarsest in which contexts and queries came
    offsets: Float[Tensor, "T_or_one d"] | None = None  # which values see added to all tokens

    @property
    def shared(self) -> bool:
        """Whether one context serves all examples."""
        return self.contexts.ndim == 2

    @property
    def lengths(self) -> Int[Tensor, " T_or_one"]:
        """The number of tokens of each context."""
        if self.mask is not None:
            return (~self.mask).sum(1)
        *contexts, n, _ = self.contexts.shape
        return torch.full(contexts or [1], n)

    def some(self, rows: slice | Int[Tensor, " k"]) -> Examples:
        """The examples of these rows; a shared context stays."""
        names = ["queries", "labels", "mask"]
        if not self.shared:
            names += ["contexts", "offsets"]
        arrays = {name: getattr(self, name) for name in names}
        present = {name: array for name, array in arrays.items() if array is not None}
        return self._replace(**{name: array[rows] for name, array in present.items()})


def as_data(contexts: Any, queries: Any, labels: Any = None, mask: Any = None) -> Examples:
    """Accept what :func:`attnmem_yours.examine` and :func:`attnmem_yours.memorize` are given."""
    contexts = unnested(contexts)
    if mask is None and _differ_in_length(contexts):
        E, mask, precision = _padded(contexts)
    else:
        E, precision = _reals("contexts", contexts, (2, 3))
    e, query_precision = _reals("queries", queries, (2,))
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
    numbers, classes = None, None
    if labels is not None:
        numbers, classes = _labels(labels, len(e))
    return Examples(
        contexts=E,
        queries=e,
        labels=numbers,
        mask=mask,
        classes=classes,
        precision=_coarsest([precision, query_precision]),
    )


def _coarsest(precisions: list[torch.dtype]) -> torch.dtype:
    return max(precisions, key=lambda precision: torch.finfo(precision).eps)


def _differ_in_length(contexts: Any) -> bool:
    if not isinstance(contexts, (list, tuple)):
        return False
    return len({len(table) for table in contexts if hasattr(table, "__len__")}) > 1


def _padded(tables: list | tuple) -> tuple[Tensor, Tensor, torch.dtype]:
    """Contexts of different lengths as one tensor, where it is padded, and their precision."""
    pairs = [_reals(f"contexts[{t}]", table, (2,)) for t, table in enumerate(tables)]
    contexts = [E for E, _ in pairs]
    if len({E.shape[1] for E in contexts}) > 1:
        refuse("contexts", "tokens of several widths", "one width d")
    lengths = torch.tensor([len(E) for E in contexts])
    padded = torch.nn.utils.rnn.pad_sequence(contexts, True)
    hidden = torch.arange(padded.shape[1]) >= lengths[:, None]
    return padded, hidden, _coarsest([precision for _, precision in pairs])


def _reals(name: str, value: Any, ndim: tuple[int, ...]) -> tuple[Tensor, torch.dtype]:
    """The value in float64 on the CPU, and the precision in which it came."""
    array = _array(name, value)
    came = value if isinstance(value, Tensor) else array
    check_exact(name, array if isinstance(value, Tensor) else value)
    if array.ndim not in ndim or not array.size:
        axes = " or ".join({2: "(rows, d)", 3: "(T, n, d)"}[k] for k in ndim)
        refuse(name, f"shape {array.shape}", f"shape {axes}, none of them 0")
    precision = getattr(torch, str(came.dtype).removeprefix("torch."), torch.float64)
    if not precision.is_floating_point:
        precision = torch.float64  # so is longdouble, which torch does not have
    return torch.from_numpy(np.array(array, dtype=np.float64)), precision


def as_numpy(value: Any) -> Any:
    """Tensors and data frames as arrays of numpy; what floats torch has, as doubles."""
    if isinstance(value, Tensor):
        value = value.detach().to_dense().cpu()
        if value.is_floating_point():
            value = value.double()
        return value.numpy()
    if isinstance(value, (list, tuple)) and any(isinstance(member, Tensor) for member in value):
        return [as_numpy(member) for member in value]
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
    sequence = isinstance(value, (list, tuple))
    if not sequence:
        value = as_numpy(value)
    letter = getattr(getattr(value, "dtype", None), "kind", "")
    if sequence or letter == "O":
        for member in value:
            check_exact(name, member)
    elif isinstance(value, int) and abs(value) > EXACT:
        refuse(name, value, "integers up to 2^53, to which float64 is exact")
    elif letter in ("i", "u") and (far := value[(value > EXACT) | (value < -EXACT)]).size:
        check_exact(name, int(far[0]))


def _masked(E: Tensor, mask: Any, count: int) -> tuple[Tensor, Bool[Tensor, "T n"] | None]:
    """The contexts with zeros as padding, and where that is."""
    array = _array("mask", mask)
    expected = "True for padding, or -inf beside 0 (of a tokenizer's attention_mask: mask == 0)"
    if array.dtype.kind in "iu":
        refuse("mask", "integers", expected)
    if array.dtype.kind == "f":
        added, array = array, array <= _HIDDEN
        if added[~array].any():
            refuse("mask", "numbers that are neither 0 nor huge", expected)
    if array.ndim == 4 and array.shape[1:3] == (1, 1):  # as transformers hands it on
        array = array[:, 0, 0]
    hidden = torch.from_numpy(np.array(array, dtype=bool))
    shapes = {(count, E.shape[-2]), tuple(E.shape[:-1])}
    if tuple(hidden.shape) not in shapes:
        refuse("mask", f"shape {tuple(hidden.shape)}", " or ".join(f"shape {s}" for s in shapes))
    if (empty := hidden.all(-1)).any():
        t = int(empty.reshape(-1).nonzero()[0])
        refuse("mask", f"no token left in context {t}", "at least one (True means padding)")
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
    if isinstance(labels, (list, tuple)):
        array = np.asarray(as_numpy(labels), dtype=object)
    else:
        array = np.asarray(as_numpy(labels))
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8", "backslashreplace")
    if array.dtype.kind not in "OU":
        return array
    entries = array.reshape(-1).tolist()
    are_words = [isinstance(entry, str) for entry in entries]
    if len({*are_words}) > 1:  # a missing one is no word
        row = are_words.index(not are_words[0])
        got = f"words beside others ({entries[row]!r:.60} in row {row})"
        refuse("labels", got, "a label for each example, all of one kind")
    if any(are_words):
        return array.astype(object)
    try:
        array = np.array(entries).reshape(array.shape)
    except ValueError:  # of several lengths
        array = array.astype(object)
    if array.dtype.kind == "O":
        refuse("labels", f"a {type(entries[0]).__name__} among others", "numbers or words alone")
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


def repeats(examples: Examples) -> Repeats:
    """Find equal examples, among them those with different labels."""
    counts = [_token_counts(tokens) for tokens in _contexts(examples)]
    alike: dict[Any, int] = {}  # contexts that attention cannot tell apart have one number
    numbers = [alike.setdefault(_proportions(count), len(alike)) for count in counts]
    first: dict[Any, int] = {}
    group = []
    for t, query in enumerate(_bytewise(examples.queries)):
        c = 0 if examples.shared else t
        key = (numbers[c], query.tobytes())
        if len(counts[c]) == 1:  # whatever the query
            key = (numbers[c], b"")
        group.append(first.setdefault(key, t))
    equal = [(s, t) for t, s in enumerate(group) if s != t]
    conflicts = []
    if (y := examples.labels) is not None:
        conflicts = [(s, t) for s, t in equal if (y[s] != y[t]).any()]
    return Repeats(
        group=torch.tensor(group),
        equal=equal,
        conflicts=conflicts,
        repeated_tokens=sum(max(count.values()) > 1 for count in counts),
        constant=sum(len(count) == 1 for count in counts),
    )


def _bytewise(x: Tensor) -> np.ndarray:
    """Numbers that are equal if their bytes are: without negative zeros."""
    return x.numpy() + 0.0


def _contexts(examples: Examples) -> list[np.ndarray]:
    """The tokens of each context, without padding; of a shared one once."""
    E = _bytewise(examples.contexts)
    if examples.shared:
        return [E]
    if examples.mask is None:
        return [*E]
    return [tokens[~hidden] for tokens, hidden in zip(E, examples.mask.numpy(), strict=True)]


def _token_counts(tokens: np.ndarray) -> collections.Counter[bytes]:
    return collections.Counter(token.tobytes() for token in tokens)


def _proportions(counts: collections.Counter[bytes]) -> tuple[tuple[bytes, int], ...]:
    """What attention sees of a context: its tokens in any order, and how many of each to others."""
    common = math.gcd(*counts.values())
    return tuple(sorted((token, count // common) for token, count in counts.items()))


def majority(labels: Tensor, group: Int[Tensor, " T"]) -> Int[Tensor, " T"]:
    """For each example the first equal one with the label that most of the equal ones have."""
    chosen = torch.arange(len(group))
    for s in group[group != chosen].unique():
        members = (group == s).nonzero()[:, 0]
        _, label, counts = labels[members].unique(return_inverse=True, return_counts=True, dim=0)
        chosen[members] = members[(label == counts.argmax()).nonzero()[0, 0]]
    return chosen


def largest(labels: Float[Tensor, "T o"]) -> Float[Tensor, " o"]:
    """The largest label of each column, the unit of its errors; one for a column of zeros."""
    size = labels.abs().amax(0)
    return torch.where(size > 0, size, 1.0)
