"""Checks of arguments: each error names the argument, its value and what was expected.

A public function is decorated with :func:`checked`, which reads its annotations; relations between
arguments go into one more function. So the body of the function is only mathematics. Numbers of
numpy become numbers of Python first: an ``int16`` overflows where an ``int`` does not, and torch
takes no ``int64`` for a seed.
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
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
FLOATS = (torch.float32, torch.float64)  # half precision is too coarse for ranks and logits
INTEGERS = (torch.int64, torch.int32)
MANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class Range(NamedTuple):
    """The numbers that an annotation accepts, ends included: ``Annotated[int, Range(0, "dim")]``.

    An end may be the name of another argument.
    """

    least: int | float | str = 1
    most: int | float | str = math.inf


ANY = Range(-math.inf, math.inf)
Seed = Annotated[int, Range(0, 2**63 - 1)]  # what seeds a generator, with room for further draws


def checked(function: Function | None = None, *, also: Callable[..., None] | None = None) -> Any:
    """Check the arguments of every call against the annotations of the function.

    An ``int`` is an integer of any type and at least 1, a ``float`` any number but NaN, within the
    :class:`Range` of an ``Annotated`` one. ``Float[Tensor, "T n d"]`` is a tensor of float32 or
    float64, ``Int[...]`` one of int32 or int64; each letter is one size in all arguments, and
    ``*runs`` any number of axes. Tuples of weights are checked field by field. Of a union, one
    member must fit.

    Args:
        also: Checks relations between arguments: called with those that it names (all, if it takes
            ``**arguments``) after their own checks. It raises ``ValueError``.

    Example:
        >>> @checked
        ... def double(heads: int, share: Annotated[float, Range(0, 1)] = 0.5) -> int:
        ...     return 2 * heads
        >>> double(3)
        6
        >>> double(0)
        Traceback (most recent call last):
        ValueError: heads: got 0; expected an integer of at least 1
    """
    if function is None:
        return functools.partial(checked, also=also)
    signature = inspect.signature(function)
    named = inspect.signature(also).parameters if also else {}
    whole = any(p.kind is p.VAR_KEYWORD for p in named.values())

    @functools.cache
    def hints() -> dict[str, _Hint]:  # at the first call, when all names are there
        types = typing.get_type_hints(function, include_extras=True)
        single = [p.name for p in signature.parameters.values() if p.kind not in MANY]
        parsed = {name: _parsed(types[name]) for name in single if name in types}
        # An argument that bounds another one is checked first.
        relative = {n: any(isinstance(end, str) for end in h.range) for n, h in parsed.items()}
        return {name: parsed[name] for name in sorted(parsed, key=relative.get)}

    @functools.wraps(function)
    def checking(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        for name, value in arguments.items():
            arguments[name] = plain(value)
        sizes: dict[str, tuple[int, str]] = {}
        for name, hint in hints().items():
            _check(name, arguments[name], hint, arguments, sizes)
        if also:
            also(**{name: v for name, v in arguments.items() if whole or name in named})
        return function(*bound.args, **bound.kwargs)

    return checking


class _Arrays(NamedTuple):
    """The arrays that an annotation accepts: their shapes, dtypes, and classes."""

    # Of each shape the axes before and after ``*runs``, as text and as the letters of a product.
    shapes: list[tuple[list[tuple[str, list[str]]], str | None, list[tuple[str, list[str]]]]]
    words: str  # the shapes, for an error
    dtypes: tuple[torch.dtype, ...]  # () is all
    classes: tuple[type, ...]


class _Hint(NamedTuple):
    """An annotation: members of its union, arrays among them, whether None is one, and a range."""

    members: tuple[Any, ...]
    arrays: _Arrays | None
    optional: bool
    range: Range


def _parsed(hint: Any) -> _Hint:
    kind, *extras = typing.get_args(hint) if typing.get_origin(hint) is Annotated else [hint]
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    every = typing.get_args(kind) if union else (kind,)
    members = tuple(member for member in every if member is not type(None))
    arrays = [member for member in members if hasattr(member, "dim_str")]
    [known] = [e for e in extras if isinstance(e, Range)] or [ANY if float in members else Range()]
    return _Hint(members, _arrays(arrays) if arrays else None, type(None) in every, known)


def _arrays(members: Sequence[Any]) -> _Arrays:
    shapes = []
    for member in members:
        axes = member.dim_str.split()
        many = next((i for i, axis in enumerate(axes) if axis[0] in "*."), len(axes))
        runs, split = [*axes[many:], None][0], [(axis, axis.split("*")) for axis in axes]
        shapes.append((split[:many], runs, split[many + 1 :]))
    texts = [", ".join(member.dim_str.split()) for member in members]
    words = " or ".join(f"({text})" if ", " in text else f"({text},)" for text in texts)
    names = {name for m in members if isinstance(m.dtypes, tuple) for name in m.dtypes}
    reals, whole = "float32" in names, "int32" in names
    dtypes = () if reals == whole else FLOATS if reals else INTEGERS
    if len(names) == 1:
        dtypes = (getattr(torch, *names),)
    return _Arrays(shapes, words, dtypes, tuple(member.array_type for member in members))


def _check(name: str, value: Any, hint: _Hint, arguments: dict, sizes: dict) -> None:
    """Check one argument; ``sizes`` has the size of each letter, and the argument it is from."""
    members, kind = hint.members, hint.members[0]
    if value is None and hint.optional:
        return
    if hint.arrays:
        if not callable(value) or not any(typing.get_origin(m) is Callable for m in members):
            _check_array(name, value, hint.arrays, sizes)
    elif set(members) <= {int, float}:
        least, most = (arguments[end] if isinstance(end, str) else end for end in hint.range)
        check = check_number if float in members else check_integer
        check(name, value, least=least, most=most)
    elif len(members) > 1 and not all(hasattr(member, "_fields") for member in members):
        return
    elif typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            refuse(name, repr(value), f"one of {', '.join(map(str, typing.get_args(kind)))}")
    elif typing.get_origin(kind) is Sequence and typing.get_args(kind) == (int,):
        if not isinstance(value, (Sequence, range, np.ndarray)) or isinstance(value, str):
            refuse(name, _named(value), "a sequence of integers")
        for i, member in enumerate(value):
            check_integer(f"{name}[{i}]", member)
    elif not inspect.isclass(kind) or kind is Any or getattr(kind, "_is_protocol", False):
        return
    elif not isinstance(value, members):
        words = " or ".join(member.__name__ for member in members)
        refuse(name, _named(value), "True or False" if kind is bool else words)
    elif hasattr(kind, "_fields"):  # a tuple of weights
        inner = {axis: size for axis, size in sizes.items() if axis[0] not in "*."}
        for field, arrays in _fields(type(value)).items():
            _check_array(f"{name}.{field}", getattr(value, field), arrays, inner, tied=True)
        sizes |= {axis: size for axis, size in inner.items() if axis not in sizes}


@functools.cache
def _fields(kind: type) -> dict[str, _Arrays]:
    hints = typing.get_type_hints(kind).items()
    return {name: _arrays([hint]) for name, hint in hints if hasattr(hint, "dim_str")}


def _named(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _check_array(name: str, value: Any, arrays: _Arrays, sizes: dict, tied: bool = False) -> None:
    """Check a tensor. With ``tied``, ``*runs`` is the same number of axes in all of them."""
    if not isinstance(value, Tensor):
        if isinstance(value, arrays.classes):
            return  # an array of numpy, which the function converts
        refuse(name, type(value).__name__, f"a torch.Tensor of shape {arrays.words}")
    shape = value.shape
    for before, runs, after in arrays.shapes:
        spare = len(shape) - len(before) - len(after)
        known = max(spare, 0) if runs else 0
        if runs and tied:
            known, _ = sizes.setdefault(runs, (known, name))
        if spare == known:
            break
    else:
        refuse(name, f"shape {tuple(shape)}", f"shape {arrays.words}")
    if arrays.dtypes and value.dtype not in arrays.dtypes:
        refuse(name, f"dtype {value.dtype}", " or ".join(map(str, arrays.dtypes)))
    last = shape[len(shape) - len(after) :]
    for (axis, letters), size in (
        *zip(before, shape, strict=False),
        *zip(after, last, strict=True),
    ):
        source = ""
        if axis.isdecimal():
            known = int(axis)
        elif axis == "_" or (len(letters) > 1 and not all(x in sizes for x in letters)):
            continue
        elif len(letters) > 1:
            known = math.prod(sizes[letter][0] for letter in letters)
        else:
            known, source = sizes.setdefault(axis, (size, name))
        if size != known:
            where = f", as in {source}" if source else ""
            refuse(name, f"{axis} = {size} (shape {tuple(shape)})", f"{axis} = {known}{where}")


def plain(value: Any) -> Any:
    """Python's own numbers and bools in place of numpy's, in lists, tuples and dictionaries too."""
    if isinstance(value, (Tensor, int, float, str)):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, numbers.Real):
        return operator.index(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, (np.ndarray, np.bool_)) and value.ndim == 0 and value.dtype.kind in "biuf":
        return value.item()
    return value


def refuse(name: str, got: object, expected: str) -> None:
    """Raise the ``ValueError`` that every check of this library raises.

    Example:
        >>> refuse("heads", 0, "an integer of at least 1")
        Traceback (most recent call last):
        ValueError: heads: got 0; expected an integer of at least 1
    """
    raise ValueError(f"{name}: got {got}; expected {expected}")


def check_integer(
    name: str, value: object, *, least: int = 1, most: int | float = math.inf
) -> None:
    """Accept an integer from ``least`` to ``most``, neither a bool nor a float."""
    if isinstance(value, (bool, Tensor)):
        refuse(name, repr(value), "an integer")
    try:
        operator.index(value)
    except TypeError:  # every array has an index, but not every one is an integer
        refuse(name, repr(value), "an integer")
    if not least <= value <= most:
        above = f" and at most {most}" if most < math.inf else ""
        refuse(name, value, f"an integer of at least {least}{above}")


def check_number(name: str, value: object, *, least: int | float, most: int | float) -> None:
    """Accept a real number from ``least`` to ``most``, hence not NaN."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(name, repr(value), "a number")
    if not least <= value <= most:
        refuse(name, value, f"a number from {least} to {most}")


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
    """Accept integer tokens from 0 to ``vocab - 1``.

    On a GPU only the dtype is checked. Reading the values would stall the device, and torch's own
    indexing asserts the range there. Values that ``torch.vmap`` hides are not checked either.
    """
    if value.dtype not in INTEGERS:
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


def on_cpu(function: Function) -> Function:
    """Let a function make its tensors on the CPU, whatever torch's default device is."""

    @functools.wraps(function)
    def placed(*args, **kwargs):
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return placed


def need(package: str) -> Any:
    """A package of the extra ``hub``, imported where it is used."""
    try:
        with warnings.catch_warnings():
            # A progress bar that finds no widgets in a notebook falls back to text.
            warnings.filterwarnings("ignore", message="IProgress not found")
            return importlib.import_module(package)
    except ImportError as error:
        top = package.partition(".")[0]
        name = {"skimage": "scikit-image", "sklearn": "scikit-learn"}.get(top, top)
        raise ImportError(f"{package} is missing: pip install {name}") from error


@contextlib.contextmanager
def reading(source: str | pathlib.Path, what: str) -> Iterator[None]:
    """Whatever is wrong with somebody's file as a ``ValueError`` that begins with its name."""
    try:
        yield
    except Exception as error:  # libraries raise a dozen kinds
        if isinstance(error, (ImportError, FileNotFoundError)) or getattr(error, "errno", None):
            raise  # of this machine, not of the file
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise ValueError(f"{source} cannot be read as {what}: {reason}") from error
