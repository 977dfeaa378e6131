"""Checks of arguments: each error names the argument, its value and what was expected.

A public function declares its checks with :func:`checked_by`, so that its body is only mathematics.
The check runs before any shape annotation is enforced. A caller therefore always sees the named
``ValueError``, with or without a runtime type checker. Numbers of numpy become numbers of Python
first: an ``int16`` overflows where an ``int`` does not, and torch takes no ``int64`` for a seed.
"""

from __future__ import annotations

import collections
import functools
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
FLOATS = (torch.float32, torch.float64)


def checked_by(check: Callable[..., None]) -> Callable[[Function], Function]:
    """Call ``check`` with all arguments, defaults filled in, before the decorated function.

    Both see Python's own numbers and bools in place of numpy's, in lists, tuples and
    dictionaries too.

    Args:
        check: A function with the parameters of the decorated one (or ``**arguments``). It raises
            ``ValueError`` on bad input; what it returns is ignored.

    Returns:
        A decorator.

    Example:
        >>> @checked_by(lambda heads: check_integer("heads", heads))
        ... def double(heads: int) -> int:
        ...     return 2 * heads
        >>> double(3)
        6
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for name, value in bound.arguments.items():
                bound.arguments[name] = plain(value)
            check(**bound.arguments)
            return function(*bound.args, **bound.kwargs)

        return checked

    return decorate


def plain(value: Any) -> Any:
    """The same value with Python's own numbers and bools in place of numpy's.

    Args:
        value: Any value. Lists, tuples and dictionaries are converted part by part.

    Returns:
        The value; all that is no such number stays as it is.

    Example:
        >>> import numpy as np
        >>> plain([np.uint8(200), np.True_, "a"])
        [200, True, 'a']
    """
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, numbers.Real) and not isinstance(value, (int, float)):
        return operator.index(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, (np.ndarray, np.bool_)) and value.ndim == 0 and value.dtype.kind in "biuf":
        return value.item()
    return value


def refuse(name: str, got: object, expected: str) -> None:
    """Raise the ``ValueError`` that every check of this library raises.

    Args:
        name: The argument.
        got: Its value, or what is wrong with it.
        expected: What would have been accepted.

    Raises:
        ValueError: Always.

    Example:
        >>> refuse("heads", 0, "an integer of at least 1")
        Traceback (most recent call last):
        ValueError: heads: got 0; expected an integer of at least 1
    """
    raise ValueError(f"{name}: got {got}; expected {expected}")


def check_integer(
    name: str, value: object, *, least: int = 1, most: int | float = math.inf
) -> None:
    """Accept an ``int`` with ``least <= value <= most``, neither a ``bool`` nor a float.

    Args:
        name: The argument, for the error.
        value: Its value.
        least: The smallest value that is accepted.
        most: The largest one.

    Raises:
        ValueError: If the value is not an integer or lies outside the range.
    """
    if isinstance(value, (bool, Tensor)):
        refuse(name, repr(value), "an integer")
    try:
        operator.index(value)
    except TypeError:  # every array has an index, but not every one is an integer
        refuse(name, repr(value), "an integer")
    if not least <= value <= most:
        above = f" and at most {most}" if most < math.inf else ""
        refuse(name, value, f"an integer of at least {least}{above}")


def check_integers(**arguments) -> None:
    """Accept integers of at least 1, and None for what was left out.

    Args:
        **arguments: The arguments by name.

    Raises:
        ValueError: If a value is not an integer of at least 1.
    """
    for name, value in arguments.items():
        if value is not None:
            check_integer(name, value)


def check_seed(seed: object) -> None:
    """Accept what seeds a generator, with room for those of further draws.

    Args:
        seed: The argument ``seed``.

    Raises:
        ValueError: If it is not an integer from 0 to 2^63 - 1.
    """
    check_integer("seed", seed, least=0, most=2**63 - 1)


def check_number(name: str, value: object, *, least: int | float, most: int | float) -> None:
    """Accept a real number with ``least <= value <= most``, hence not NaN.

    Args:
        name: The argument, for the error.
        value: Its value.
        least: The smallest value that is accepted.
        most: The largest one.

    Raises:
        ValueError: If the value is not a number or lies outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(name, repr(value), "a number")
    if not least <= value <= most:
        refuse(name, value, f"a number from {least} to {most}")


def check_tensor(name: str, value: object, shape: str, ndim: int | Sequence[int]) -> None:
    """Accept a torch tensor with the right number of axes.

    Args:
        name: The argument, for the error.
        value: Its value.
        shape: The expected shape in letters, for the error.
        ndim: The number of axes, or all the numbers that are accepted.

    Raises:
        ValueError: If the value is no tensor or has another number of axes.
    """
    if not isinstance(value, Tensor):
        refuse(name, type(value).__name__, f"a torch.Tensor of shape {shape}")
    if value.ndim not in ((ndim,) if isinstance(ndim, int) else ndim):
        refuse(name, f"shape {tuple(value.shape)}", f"shape {shape}")


def check_floats(name: str, value: Tensor) -> None:
    """Accept float32 and float64 only: half precision is too coarse for ranks and logits.

    Args:
        name: The argument, for the error.
        value: Its value.

    Raises:
        ValueError: If the tensor has another dtype.
    """
    if value.dtype not in FLOATS:
        refuse(name, f"dtype {value.dtype}", "torch.float32 or torch.float64")


def check_finite(name: str, value: Tensor) -> None:
    """Accept a tensor without NaN and infinity.

    Args:
        name: The argument, for the error.
        value: Its value.

    Raises:
        ValueError: If an entry is not finite. The error counts such entries.
    """
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        refuse(name, f"{bad} entries that are NaN or infinite", "finite entries")


def check_reals(name: str, value: Tensor) -> None:
    """Accept finite float32 and float64 only.

    Args:
        name: The argument, for the error.
        value: Its value.

    Raises:
        ValueError: If the tensor has another dtype or an entry that is not finite.
    """
    check_floats(name, value)
    check_finite(name, value)


def check_tokens(name: str, value: Tensor, vocab: int) -> None:
    """Accept integer tokens from 0 to ``vocab - 1``.

    On a GPU only the dtype is checked. Reading the values would stall the device, and torch's own
    indexing asserts the range there. Values that ``torch.vmap`` hides are not checked either.

    Args:
        name: The argument, for the error.
        value: Its value, of any shape.
        vocab: The number of tokens ``N``.

    Raises:
        ValueError: If the dtype is neither int32 nor int64, or a token is out of range.
    """
    if value.dtype not in (torch.int32, torch.int64):
        refuse(name, f"dtype {value.dtype}", "torch.int64 or torch.int32")
    if value.device.type == "cpu" and value.numel():
        low, high = value.aminmax()
        try:
            outside = bool((low < 0) | (high >= vocab))
        except RuntimeError:  # within vmap
            outside = False
        if outside:
            refuse(name, f"tokens from {low} to {high}", f"0 to N - 1 = {vocab - 1}")


def check_examples(contexts: object, queries: object, labels: object) -> None:
    """Accept contexts, queries and labels of real numbers, none of them empty, on one device.

    Args:
        contexts: Contexts, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        labels: Labels, ``(T, d_out)`` or ``(T,)``.

    Raises:
        ValueError: One of them is not so; the message names it.
    """
    check_tensor("queries", queries, "(T, d)", 2)
    check_tensor("contexts", contexts, "(T, n, d) or, shared, (n, d)", (2, 3))
    check_tensor("labels", labels, "(T, d_out) or (T,)", (1, 2))
    for name, tensor in (("contexts", contexts), ("queries", queries), ("labels", labels)):
        check_reals(name, tensor)
        if tensor.device != queries.device:
            refuse(name, f"device {tensor.device}", f"that of the queries, {queries.device}")
        if not tensor.numel():
            refuse(name, f"shape {tuple(tensor.shape)}", "at least one entry")


def check_example_sizes(contexts: Tensor, queries: Tensor, labels: Tensor) -> None:
    """Accept contexts and labels of as many examples as there are queries, in their dimension.

    Args:
        contexts: Contexts, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        labels: One label a row.

    Raises:
        ValueError: The sizes of contexts or labels do not fit; the message names them.
    """
    T, d = queries.shape
    check_size("labels", labels, 0, T, "the number of queries")
    check_size("contexts", contexts, -1, d, "d of the queries")
    if contexts.ndim == 3:
        check_size("contexts", contexts, 0, T, "the number of queries")


def check_distinct(
    name: str, rows: Sequence[Hashable], answers: Sequence[object], what: str = "labels"
) -> None:
    """Accept rows of which no two are equal.

    Args:
        name: The argument, for the error.
        rows: What stands for each row.
        answers: What is to be learned of each row; of repeats, two with different ones are named.
        what: The answers, for the error.

    Raises:
        ValueError: Two rows are equal. The error names them, and says whether their answers differ.

    Example:
        >>> check_distinct("examples", ["a", "b", "a"], [0, 0, 1])
        Traceback (most recent call last):
        ValueError: examples: got 0 and 2 equal, with different labels; expected distinct ones
    """
    first: dict[Hashable, int] = {}
    pairs = [(first.setdefault(row, t), t) for t, row in enumerate(rows)]
    repeats = [pair for pair in pairs if pair[0] < pair[1]]
    conflicts = [(s, t) for s, t in repeats if answers[s] != answers[t]]
    for s, t in (conflicts or repeats)[:1]:
        differ = f", with different {what}" if conflicts else f" (repeats in all: {len(repeats)})"
        refuse(name, f"{s} and {t} equal{differ}", "distinct ones")


def check_distinct_examples(contexts: Tensor, queries: Tensor, labels: Tensor) -> None:
    """Accept examples of which no two have one query and the same tokens, in whatever order.

    Args:
        contexts: Contexts, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        labels: One label a row.

    Raises:
        ValueError: Two examples are equal, so that every layer gives them one output.
    """
    rows = [query.tobytes() for query in _comparable(queries)]
    if contexts.ndim == 3:
        often = {row for row, count in collections.Counter(rows).items() if count > 1}
        tokens = _comparable(contexts)
        for t, row in enumerate(rows):
            if row in often:
                rows[t] = b"".join([row, *sorted(token.tobytes() for token in tokens[t])])
    check_distinct("examples", rows, labels.tolist())


def _comparable(x: Tensor) -> np.ndarray:
    """The numbers for comparison by their bytes: without negative zeros."""
    return x.detach().cpu().numpy() + 0


def check_size(name: str, value: Tensor, axis: int, size: int, meaning: str) -> None:
    """Accept a tensor whose ``axis`` has the given ``size``.

    Args:
        name: The argument, for the error.
        value: Its value.
        axis: The axis; negative ones count from the end.
        size: The expected number of entries along it.
        meaning: What determines the size, for the error.

    Raises:
        ValueError: If the axis has another size.
    """
    if value.shape[axis] != size:
        refuse(name, f"shape {tuple(value.shape)}", f"{size} along axis {axis}, {meaning}")
