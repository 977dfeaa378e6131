"""Every type and shape that the library's signatures state, checked in every call.

``jaxtyping.install_import_hook`` does the same at twice the price: it checks the arguments again
with the result, and lets Python compile all that the library imports from its source. Calls that
are known to fit a signature with arrays, by types and shapes, are not looked at again.
"""

import ast
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Collection
from importlib.machinery import PathFinder, SourceFileLoader

import numpy as np
import torch
from beartype import beartype
from jaxtyping import jaxtyped

HERE = __name__
CHECKS = {}  # one for all functions of the same lines
BARE = set()  # the types of which a signature states no more than that
ARRAYS = torch.Tensor, np.ndarray
LONG = 10  # parts of a container, the most that are looked at to know it again
INSIDE = "__beartype_func"  # by this name beartype's function knows the one that it checks


def checked(thing):
    """The function with its arguments and its result checked; of a dataclass, its fields.

    A name of a size stands for one number within each call, and for others in the calls within it.
    """
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing):
            thing.__init__ = checked(thing.__init__)
        return thing
    if not thing.__annotations__:
        return thing
    if inspect.isgeneratorfunction(thing):  # checked when it is called, not when it is asked
        return jaxtyped(thing, typechecker=beartype)

    @functools.wraps(thing)
    def scoped(*args, **kwargs):
        if lines not in CHECKS:  # late: all names are there by now
            CHECKS[lines] = _Check(thing)
        return CHECKS[lines](thing, args, kwargs)

    # Two dataclasses may have equal code, and two functions of one name other lines.
    lines = thing.__module__, thing.__qualname__, thing.__code__
    return scoped


class _Check:
    """A signature, and the calls that are known to fit it."""

    def __init__(self, function):
        self.made = beartype(_resolved(function))
        hints = str(function.__annotations__)
        self.of_arrays = "Tensor" in hints or "ndarray" in hints
        self.known = set()

    def __call__(self, function, args, kwargs):
        if not self.of_arrays:  # quick to check
            return self.around(function)(*args, **kwargs)
        given = _form((args, kwargs))
        if given not in self.known:
            result = self.checked(function, args, kwargs)
        else:
            result = function(*args, **kwargs)
            if (given, _form(result)) in self.known:
                return result
            self.checked(lambda *args, **kwargs: result, args, kwargs)
        found = _form(result)
        if given is not None and found is not None:
            self.known |= {given, (given, found)}
        return result

    def checked(self, function, args, kwargs):
        """What the function returns; what it is given is checked first, then what it returns."""
        with jaxtyped("context"):
            return self.around(function)(*args, **kwargs)

    def around(self, function):
        """The function between its checks."""
        inside = self.made.__kwdefaults__ or {}
        if INSIDE not in inside:  # nothing that can be checked
            return function
        if inside[INSIDE] is function:
            return self.made
        made = types.FunctionType(self.made.__code__, self.made.__globals__)
        made.__kwdefaults__ = inside | {INSIDE: function}
        return made


def _form(value):
    """All that a signature can state of a value: equal for two that it cannot tell apart.

    None if that would take too long to say.
    """
    kind = type(value)
    if kind in BARE:
        return kind
    if isinstance(value, ARRAYS):
        return kind, value.dtype, value.shape
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, tuple | list):
        forms = [_form(part) for part in value[:LONG]]
        return None if None in forms or len(value) > LONG else (kind, *forms)
    if isinstance(value, str | type):
        return kind, value
    if isinstance(value, Collection):
        return None
    BARE.add(kind)
    return kind


def _resolved(function):
    """The function; what only a type checker imports, to name it, is not checked."""
    for name, annotation in function.__annotations__.items():
        stub = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints = typing.get_type_hints(stub, function.__globals__, include_extras=True)
        except NameError:
            hints = {name: typing.Any}
        function.__annotations__[name] = hints[name]
    return function


class _Loader(SourceFileLoader):
    """Puts ``checked`` next to every function, nested ones too, and around every class."""

    def get_code(self, fullname):
        """From the source, whatever is compiled already: that is without checks."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data, path, *, _optimize=-1):
        tree = ast.parse(data, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.decorator_list.append(self._decorator(node))
            elif isinstance(node, ast.ClassDef):
                node.decorator_list.insert(0, self._decorator(node))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    @staticmethod
    def _decorator(node):
        call = ast.parse(f"__import__({HERE!r}).checked", mode="eval").body
        for part in ast.walk(call):
            ast.copy_location(part, node)
        return call


class _Finder:
    """Finds the modules of one package."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, fullname, path=None, target=None):
        spec = None
        if f"{fullname}.".startswith(f"{self.package}."):
            spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            return spec
        return None


def check(package):
    """Check the signatures of a package that is not imported yet."""
    assert package not in sys.modules
    sys.meta_path.insert(0, _Finder(package))
