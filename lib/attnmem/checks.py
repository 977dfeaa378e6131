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
    hints = {name: hints.get(name, Any) for name in signature.parameters}
    # An argument that bounds another one is checked first.
    names = sorted(hints, key=lambda name: _is_bounded(hints[name]))
    checks = {name: _check_of(hints[name]) for name in names}
    related = inspect.signature(also).parameters if also else {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in related.values()):
        related = checks

    @functools.wraps(function)
    def checking(*args, **kwargs):
        bound, sizes = signature.bind(*args, **kwargs), {}
        bound.apply_defaults()
        arguments = bound.arguments
        for name, check in checks.items():
            arguments[name] = check(name, arguments[name], arguments, sizes)
        if also:
            also(**{name: value for name, value in arguments.items() if name in related})
        return function(*bound.args, **bound.kwargs)

    return checking


def _ends(hint: Any) -> Range | None:
    """The :class:`Range` of an annotation, if it has one."""
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, Range):
            return extra
    return None


def _is_bounded(hint: Any) -> bool:
    """Whether another argument bounds one of this annotation."""
    return any(isinstance(end, str) for end in _ends(hint) or ())


def _check_of(hint: Any) -> _Check:
    """The check of an argument of this annotation."""
    ends = _ends(hint)
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    members = (hint,)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = typing.get_args(hint)
    types_but_none = tuple(member for member in members if member is not types.NoneType)
    check = _check_of_members(types_but_none, ends)
    if len(types_but_none) == len(members):
        return check
    return lambda name, value, *rest: None if value is None else check(name, value, *rest)


def _check_of_members(members: tuple[Any, ...], ends: Range | None) -> _Check:
    """The check of an argument that one of these types is to fit."""
    first = members[0]
    if any(hasattr(member, "dim_str") for member in members):
        return functools.partial(_check_array, _arrays(members))
    if members == (int,):
        return functools.partial(_check_within, check_integer, ends or Range())
    if set(members) <= {int, float}:
        return functools.partial(_check_within, check_number, ends or Range(-math.inf))
    if typing.get_origin(first) is Literal:
        return functools.partial(_check_choice, typing.get_args(first))
    if members == (Sequence[int],):
        return _check_integers
    is_class = len(members) == 1 and inspect.isclass(first) and first is not Any
    if is_class or all(hasattr(member, "_fields") for member in members):
        fields = {member: _fields(member) for member in members}
        return functools.partial(_check_instance, members, fields)
    return _check_nothing


def _check_nothing(name, value, arguments, sizes):
    return plain(value)


def _check_within(check, ends, name, value, arguments, sizes):
    least, most = (arguments[end] if isinstance(end, str) else end for end in ends)
    return check(name, value, least=least, most=most)


def _check_integers(name, value, arguments, sizes):
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, str) or not len(value):
        refuse(name, f"{value!r:.60}", "a sequence of integers, one or more")
    return [check_integer(f"{name}[{i}]", member) for i, member in enumerate(value)]


def _check_choice(choices, name, value, arguments, sizes):
    if value not in choices:
        refuse(name, repr(plain(value)), f"one of {', '.join(map(str, choices))}")
    return value


def _check_instance(members, fields, name, value, arguments, sizes):
    value = plain(value)
    if not isinstance(value, members):
        expected = " or ".join(member.__name__ for member in members)
        if bool in members:
            expected = "True or False"
        refuse(name, _named(value), expected)
    for field, arrays in fields.get(type(value), {}).items():  # of a tuple of weights
        _check_array(arrays, f"{name}.{field}", getattr(value, field), name, sizes)
    return value


def _named(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__


# --- arrays ---------------------------------------------------------------------------------------


class _Axis(NamedTuple):
    """An axis of an annotation: its size is a number times the sizes of some letters."""

    text: str
    factor: int
    letters: list[str]


_FREE = _Axis(text="", factor=1, letters=["*"])  # of any size, since no letter is called so


class _Shape(NamedTuple):
    """The shape of an annotation."""

    before: list[_Axis]  # the axes before ``*runs``, or all
    has_runs: bool
    after: list[_Axis]


class _Arrays(NamedTuple):
    """The arrays that an annotation accepts."""

    shapes: list[_Shape]
    text: str  # the shapes, for an error
    dtypes: tuple[torch.dtype, ...]  # () is all
    no_tensors: Any  # also accepted: arrays of numpy, which are converted, or what makes a tensor


def _fields(weights: type) -> dict[str, _Arrays]:
    """The arrays of a tuple of weights, by field."""
    if not hasattr(weights, "_fields"):
        return {}
    hints = typing.get_type_hints(weights)
    return {name: _arrays((hint,)) for name, hint in hints.items() if hasattr(hint, "dim_str")}


def _arrays(members: tuple[Any, ...]) -> _Arrays:
    arrays = [member for member in members if hasattr(member, "dim_str")]
    texts = [array.dim_str.split() for array in arrays]
    no_tensors = [array.array_type for array in arrays]
    if len(arrays) < len(members):
        no_tensors.append(Callable)
    return _Arrays(
        shapes=[_shape(text) for text in texts],
        text=" or ".join(map(_in_parentheses, texts)),
        dtypes=_dtypes(arrays),
        no_tensors=tuple(no_tensors),
    )


def _shape(text: list[str]) -> _Shape:
    axes = [_axis(word) for word in text]
    for i, word in enumerate(text):
        if word[0] in "*.":
            return _Shape(axes[:i], has_runs=True, after=axes[i + 1 :])
    return _Shape(axes, has_runs=False, after=[])


def _axis(word: str) -> _Axis:
    if word.isdecimal():
        return _Axis(word, factor=int(word), letters=[])
    return _Axis(word, factor=1, letters=word.split("*"))


def _in_parentheses(text: list[str]) -> str:
    return f"({text[0]},)" if len(text) == 1 else f"({', '.join(text)})"


def _dtypes(arrays: list[Any]) -> tuple[torch.dtype, ...]:
    """The dtypes that annotations such as ``Float[...]`` accept; any, if they differ."""
    names = {name for array in arrays if isinstance(array.dtypes, tuple) for name in array.dtypes}
    if len(names) == 1:
        return (getattr(torch, *names),)
    if "float32" in names and "int32" not in names:
        return FLOATS
    if "int32" in names and "float32" not in names:
        return _INTEGERS
    return ()


def _check_array(arrays, name, value, weights, sizes):
    """Check an array, in a tuple of weights of the name ``weights``, or by itself."""
    if not isinstance(value, Tensor):
        if isinstance(value, arrays.no_tensors):
            return value
        check_tensor(name, value, arrays.text, 0)
    shape = tuple(value.shape)
    for before, has_runs, after in arrays.shapes:
        spare = len(shape) - len(before) - len(after)
        runs = max(spare, 0) if has_runs else 0
        if has_runs and isinstance(weights, str):  # as many in all tensors of these weights
            runs, _ = sizes.setdefault(f"*{weights}", (runs, name))
        if spare == runs:
            break
    else:
        refuse(name, f"shape {shape}", f"shape {arrays.text}")
    if arrays.dtypes and value.dtype not in arrays.dtypes:
        refuse(name, f"dtype {value.dtype}", " or ".join(map(str, arrays.dtypes)))
    axes = [*before, *[_FREE] * runs, *after]
    for axis, size in zip(axes, shape, strict=True):
        if axis.letters == [axis.text]:
            sizes.setdefault(axis.text, (size, name))
        if all(letter in sizes for letter in axis.letters):
            expected = axis.factor * math.prod(sizes[letter][0] for letter in axis.letters)
            if size != expected:
                _refuse_size(name, axis.text, size, shape, expected, sizes)
    return value


def _refuse_size(name, axis, size, shape, expected, sizes) -> NoReturn:
    text = f"{axis} = {expected}"
    if axis in sizes:
        text = f"{text}, as in {sizes[axis][1]}"
    refuse(name, f"{axis} = {size} (shape {shape})", text)


# --- what checks and functions use ----------------------------------------------------------------


def plain(value: Any) -> Any:
    """Python's own numbers and bools in place of numpy's, in lists, tuples and dictionaries too."""
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {key: plain(entry) for key, entry in value.items()}
    scalar = isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0
    return value.item() if scalar and value.dtype.kind in "biuf" else value


def refuse(name: str, got: object, expected: str) -> NoReturn:
    """Raise the ``ValueError`` that every check of this library raises."""
    text = str(got)
    if len(text) > 200:  # an error is read in a terminal
        text = f"{text[:160]}... of {len(text)} letters"
    raise ValueError(f"{name}: got {text}; expected {expected}")


def check_integer(name: str, value: Any, *, least: int = 1, most: float = math.inf) -> int:
    """Accept an integer from ``least`` to ``most``, neither a bool nor a float."""
    value = plain(value)
    if isinstance(value, (bool, Tensor, np.ndarray)) or not hasattr(value, "__index__"):
        refuse(name, repr(value), "an integer")
    if not least <= value <= most:
        expected = f"an integer of at least {least}"
        if most < math.inf:
            expected = f"{expected} and at most {most}"
        refuse(name, value, expected)
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
        projects = {"flint": "python-flint", "skimage": "scikit-image", "sklearn": "scikit-learn"}
        raise ImportError(f"{package} is missing: pip install {projects.get(top, top)}") from error


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
