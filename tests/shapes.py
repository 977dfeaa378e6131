"""Every type and shape that the library's signatures state, checked in every call.

``jaxtyping.install_import_hook`` does the same at twice the price: it checks the arguments again
with the result, and lets Python compile all that the library imports from its source.
"""

import ast
import dataclasses
import functools
import inspect
import sys
import types
import typing
from importlib.machinery import PathFinder, SourceFileLoader

from beartype import beartype
from jaxtyping import jaxtyped

HERE = __name__


def checked(thing):
    """The function with its arguments and its result checked; of a dataclass, its fields.

    A name of a size stands for one number within each call, and for others in the calls within it.
    """
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing):
            thing.__init__ = checked(thing.__init__)
        return thing
    if inspect.isgeneratorfunction(thing):  # checked when it is called, not when it is asked
        return jaxtyped(thing, typechecker=beartype)
    function = None

    @functools.wraps(thing)
    def scoped(*args, **kwargs):
        nonlocal function
        function = function or beartype(_resolved(thing))  # late: all names are there by now
        with jaxtyped("context"):
            return function(*args, **kwargs)

    return scoped


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
