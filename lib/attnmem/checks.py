"""Checks of arguments: each error names the argument, its value and what was expected.

A reader may skip this file. A public function is decorated with :func:`checked`, which reads its
annotations once; relations between arguments go into one more function. So the body of the function
is only mathematics. Numbers of numpy become numbers of Python: an ``int16`` overflows where an
``int`` does not, and torch takes no ``int64`` for a seed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import numbers
import operator
import pathlib
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

_P = ParamSpec("_P")  # what a function takes
_R = TypeVar("_R")  # what it returns
FLOATS = (torch.float32, torch.float64)  # half precision is too coarse for ranks and logits
_INTEGERS = (torch.int64, torch.int32)

# Checks an argument: its name and value, all arguments, and for each letter of a shape its size and
# the argument that has it. It returns the value as the function gets it.
_Check = Callable[[str, Any, dict[str, Any], dict[str, tuple[int, str]]], Any]


class Range(NamedTuple):
    """The numbers that an annotation accepts, ends included: ``Annotated[int, Range(0, "dim")]``.

    An end may be the name of another argument.
    """

    least: int | float | str = 1
    most: int | float | str = math.inf


Seed = Annotated[int, Range(0, 2**63 - 1)]  # what seeds a generator, with room for further draws


@typing.overload
def checked(function: Callable[_P, _R]) -> Callable[_P, _R]: ...
@typing.overload
def checked(*, also: Callable[..., None]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def checked(function: Any = None, *, also: Callable[..., None] | None = None) -> Any:
    """Check the arguments of every call against the annotations of the function.

    An ``int`` is an integer of any type and at least 1, a ``float`` any number but NaN, within the
    :class:`Range` of an ``Annotated`` one. ``Float[Tensor, "T n d"]`` is a tensor of float32 or
    float64, ``Int[...]`` one of int32 or int64; each letter is one size in all arguments, and
    ``*runs`` any number of axes. Tuples of weights are checked field by field. Of a union, one
    member must fit. ``also`` checks relations between arguments: it is called with those that it
    names (all, if it takes ``**arguments``) after their own checks.

    Example:
        >>> @checked
        ... def double(heads: int, share: Annotated[float, Range(0, 1)] = 0.5) -> int:
        ...     return 2 * heads
        >>> double(0)
        Traceback (most recent call last):
        ValueError: heads: got 0; expected an integer of at least 1
    """
    return _checked(function, also) if function else functools.partial(_checked, also=also)


def _checked(function: Callable[..., Any], also: Callable[..., None] | None) -> Any:
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function, include_extras=True)
    pairs = {name: _check_of(hints.get(name, Any)) for name in signature.parameters}
    # An argument that bounds another one is checked first.
    checks = {name: pairs[name][1] for name in sorted(pairs, key=lambda name: pairs[name][0])}
    related = inspect.signature(also).parameters if also else {}
    if any(p.kind is p.VAR_KEYWORD for p in related.values()):
        related = checks

    @functools.wraps(function)
    def checking(*args, **kwargs):
        bound, sizes = signature.bind(*args, **kwargs), {}
        bound.apply_defaults()
        given = bound.arguments
        for name, check in checks.items():
            given[name] = check(name, given[name], given, sizes)
        if also:
            also(**{name: value for name, value in given.items() if name in related})
        return function(*bound.args, **bound.kwargs)

    return checking


def _check_of(hint: Any) -> tuple[bool, _Check]:
    """Whether another argument bounds one of this annotation, and its check."""
    kind, *extras = typing.get_args(hint) if typing.get_origin(hint) is Annotated else [hint]
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    every = typing.get_args(kind) if union else (kind,)
    members = tuple(member for member in every if member is not type(None))
    free = Range(-math.inf) if float in members else Range()
    [ends] = [extra for extra in extras if isinstance(extra, Range)] or [free]
    one_class = len(members) == 1 and inspect.isclass(members[0]) and members[0] is not Any
    if any(hasattr(member, "dim_str") for member in members):
        check = functools.partial(_check_array, _arrays(members))
    elif set(members) <= {int, float}:
        test = check_number if float in members else check_integer
        check = functools.partial(_check_within, test, ends)
    elif typing.get_origin(members[0]) is Literal:
        check = functools.partial(_check_choice, typing.get_args(members[0]))
    elif members == (Sequence[int],):
        check = _check_integers
    elif one_class or all(hasattr(member, "_fields") for member in members):
        check = functools.partial(_check_instance, members, {m: _fields(m) for m in members})
    else:
        check = _check_nothing
    bounded = any(isinstance(end, str) for end in ends)
    if len(members) == len(every):
        return bounded, check
    return bounded, lambda name, value, *rest: None if value is None else check(name, value, *rest)


def _check_nothing(name, value, given, sizes):
    return plain(value)


def _check_within(test, ends, name, value, given, sizes):
    least, most = (given[end] if isinstance(end, str) else end for end in ends)
    return test(name, value, least=least, most=most)


def _check_integers(name, value, given, sizes):
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, str) or not len(value):
        refuse(name, f"{value!r:.60}", "a sequence of integers, one or more")
    return [check_integer(f"{name}[{i}]", member) for i, member in enumerate(value)]


def _check_choice(choices, name, value, given, sizes):
    if value not in choices:
        refuse(name, repr(plain(value)), f"one of {', '.join(map(str, choices))}")
    return value


def _check_instance(members, fields, name, value, given, sizes):
    value = plain(value)
    if not isinstance(value, members):
        words = " or ".join(member.__name__ for member in members)
        refuse(name, _named(value), "True or False" if bool in members else words)
    for field, arrays in fields.get(type(value), {}).items():  # of a tuple of weights
        _check_array(arrays, f"{name}.{field}", getattr(value, field), name, sizes)
    return value


def _named(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__


# --- arrays ---------------------------------------------------------------------------------------


class _Arrays(NamedTuple):
    """The arrays that an annotation accepts."""

    # Of each shape the axes before and after ``*runs``, and whether those are there. An axis is its
    # text, and its size: a number times the sizes of some letters.
    shapes: list[tuple[list[tuple[str, int, list[str]]], bool, list[tuple[str, int, list[str]]]]]
    words: str  # the shapes, for an error
    dtypes: tuple[torch.dtype, ...]  # () is all
    others: Any  # what is no tensor: arrays of numpy, which are converted, or what makes one


_FREE = ("", 1, ["*"])  # an axis of any size, since no letter is called so


def _fields(kind: type) -> dict[str, _Arrays]:
    hints = typing.get_type_hints(kind) if hasattr(kind, "_fields") else {}
    return {name: _arrays((hint,)) for name, hint in hints.items() if hasattr(hint, "dim_str")}


def _arrays(members: tuple[Any, ...]) -> _Arrays:
    arrays = [member for member in members if hasattr(member, "dim_str")]
    texts, shapes = [array.dim_str.split() for array in arrays], []
    for text in texts:
        axes = [(x, int(x), []) if x.isdecimal() else (x, 1, x.split("*")) for x in text]
        runs = next((i for i, axis in enumerate(text) if axis[0] in "*."), len(text))
        shapes.append((axes[:runs], runs < len(text), axes[runs + 1 :]))
    words = " or ".join(f"({', '.join(text)}{',' * (len(text) == 1)})" for text in texts)
    names = {name for array in arrays if isinstance(array.dtypes, tuple) for name in array.dtypes}
    reals, whole = "float32" in names, "int32" in names
    dtypes = () if reals == whole else FLOATS if reals else _INTEGERS
    if len(names) == 1:
        dtypes = (getattr(torch, *names),)
    callables = [Callable] * (len(arrays) < len(members))
    return _Arrays(shapes, words, dtypes, (*(array.array_type for array in arrays), *callables))


def _check_array(arrays, name, value, weights, sizes):
    if not isinstance(value, Tensor):
        if isinstance(value, arrays.others):
            return value
        check_tensor(name, value, arrays.words, 0)
    shape = tuple(value.shape)
    for before, many, after in arrays.shapes:
        spare = len(shape) - len(before) - len(after)
        runs = max(spare, 0) if many else 0
        if many and isinstance(weights, str):  # as many in all tensors of these weights
            runs, _ = sizes.setdefault(f"*{weights}", (runs, name))
        if spare == runs:
            break
    else:
        refuse(name, f"shape {shape}", f"shape {arrays.words}")
    if arrays.dtypes and value.dtype not in arrays.dtypes:
        refuse(name, f"dtype {value.dtype}", " or ".join(map(str, arrays.dtypes)))
    for (axis, factor, letters), size in zip(before + [_FREE] * runs + after, shape, strict=True):
        if letters == [axis]:
            sizes.setdefault(axis, (size, name))
        if all(letter in sizes for letter in letters):
            known = factor * math.prod(sizes[letter][0] for letter in letters)
            if size != known:
                where = f", as in {sizes[axis][1]}" if axis in sizes else ""
                refuse(name, f"{axis} = {size} (shape {shape})", f"{axis} = {known}{where}")
    return value


# --- what checks and functions use ----------------------------------------------------------------


def plain(value: Any) -> Any:
    """Python's own numbers and bools in place of numpy's, in lists, tuples and dictionaries too."""
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {key: plain(part) for key, part in value.items()}
    scalar = isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0
    return value.item() if scalar and value.dtype.kind in "biuf" else value


def refuse(name: str, got: object, expected: str) -> NoReturn:
    """Raise the ``ValueError`` that every check of this library raises."""
    said = str(got)
    said = said if len(said) <= 200 else f"{said[:160]}... of {len(said)} letters"
    raise ValueError(f"{name}: got {said}; expected {expected}")


def check_integer(name: str, value: Any, *, least: int = 1, most: float = math.inf) -> int:
    """Accept an integer from ``least`` to ``most``, neither a bool nor a float."""
    value = plain(value)
    if isinstance(value, (bool, Tensor, np.ndarray)) or not hasattr(value, "__index__"):
        refuse(name, repr(value), "an integer")
    if not least <= value <= most:
        above = f" and at most {most}" if most < math.inf else ""
        refuse(name, value, f"an integer of at least {least}{above}")
    return operator.index(value)


def check_number(name: str, value: Any, *, least: float, most: float) -> int | float:
    """Accept a real number from ``least`` to ``most``, hence not NaN."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(name, repr(value), "a number")
    number = value if isinstance(value, int) else float(value)
    if not least <= number <= most:
        refuse(name, number, f"a number from {least} to {most}")
    return number


def check_tensor(name: str, value: object, shape: str, ndim: int) -> None:
    """Accept a torch tensor with ``ndim`` axes; the error says the expected shape in letters."""
    if not isinstance(value, Tensor):
        refuse(name, type(value).__name__, f"a torch.Tensor of shape {shape}")
    if value.ndim != ndim:
        refuse(name, f"shape {tuple(value.shape)}", f"shape {shape}")


def check_finite(name: str, value: Tensor) -> None:
    """Accept a tensor without NaN and infinity; the error counts such entries."""
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        refuse(name, f"{bad} entries that are NaN or infinite", "finite entries")


def check_tokens(name: str, value: Tensor, vocab: int) -> None:
    """Accept integer tokens from 0 to ``vocab - 1``; on a GPU and in ``torch.vmap`` only the dtype.

    Reading values would stall the GPU, where torch's own indexing asserts the range.
    """
    if value.dtype not in _INTEGERS:
        refuse(name, f"dtype {value.dtype}", "torch.int64 or torch.int32")
    if value.device.type == "cpu" and value.numel():
        low, high = value.aminmax()
        try:
            outside = bool((low < 0) | (high >= vocab))
        except RuntimeError:  # within vmap
            outside = False
        if outside:
            refuse(name, f"tokens from {low} to {high}", f"0 to N - 1 = {vocab - 1}")


def check_size(name: str, value: Tensor, axis: int, size: int, meaning: str) -> None:
    """Accept a tensor with ``size`` entries along an axis; ``meaning`` says what determines it."""
    if value.shape[axis] != size:
        refuse(name, f"shape {tuple(value.shape)}", f"{size} along axis {axis}, {meaning}")


def on_cpu(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function make its tensors on the CPU, whatever torch's default device is."""

    @functools.wraps(function)
    def placed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return placed


def construction(also: Callable[..., None]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """For functions that build weights: checked arguments, tensors on the CPU, no gradients."""
    return lambda function: on_cpu(checked(also=also)(torch.no_grad()(function)))


def need(package: str) -> Any:
    """A package of the extra ``hub``, imported where it is used."""
    try:
        with warnings.catch_warnings():
            # A progress bar that finds no widgets in a notebook falls back to text.
            warnings.filterwarnings("ignore", message="IProgress not found")
            return importlib.import_module(package)
    except ImportError as error:
        top = package.partition(".")[0]
        other = {"flint": "python-flint", "skimage": "scikit-image", "sklearn": "scikit-learn"}
        raise ImportError(f"{package} is missing: pip install {other.get(top, top)}") from error


@contextlib.contextmanager
def reading(source: str | pathlib.Path, what: str) -> Iterator[None]:
    """Whatever is wrong with somebody's file as a ``ValueError`` that begins with its name."""
    try:
        yield
    except Exception as error:  # libraries raise a dozen kinds
        if isinstance(error, ImportError) or getattr(error, "errno", None):
            raise  # of this machine, not of the file
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise ValueError(f"{source} cannot be read as {what}: {reason}") from error
