"""The library's house: its table of rooms, what imports what, and the form of the docstrings."""

import ast
import graphlib
import importlib
import inspect
import re

import pytest

import attnmem

from tools.chapters import ROOT

LIBRARY = ROOT / "lib" / "attnmem"


def module_name(path):
    """``a.b`` for ``a/b.py`` and ``a`` for ``a/__init__.py``; empty for the library itself."""
    parts = path.relative_to(LIBRARY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(LIBRARY.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
ROOMS = re.findall(r"^``(\w+)``", inspect.getdoc(attnmem), re.M)  # the table, from top to bottom


def room(name):
    return name.split(".")[0]


def imported(name):
    """The modules of the library that a module imports, anywhere in its code."""
    package = (name if MODULES[name].stem == "__init__" else name.rpartition(".")[0]).split(".")
    package = [part for part in package if part]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join((["attnmem", *above] if node.level else []) + [node.module or ""])
            full = [f"{base.rstrip('.')}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in full:
            if target.split(".")[0] == "attnmem":
                inner = target.removeprefix("attnmem").lstrip(".")
                yield inner if inner in MODULES else inner.rpartition(".")[0]


IMPORTS = {name: {*imported(name)} - {"", name} for name in MODULES}


def test_the_table_names_every_room_once():
    assert sorted(ROOMS) == sorted({room(name) for name in MODULES} - {""})


def test_a_room_imports_only_from_rooms_above_it_in_the_table():
    assert {"attention", "independence", "checks"} <= IMPORTS["constructions.mahdavi"]
    upwards = [
        f"{name} imports {target}"
        for name, targets in IMPORTS.items()
        for target in targets
        if room(name) != room(target) and ROOMS.index(room(target)) >= ROOMS.index(room(name))
    ]
    assert upwards == []


def test_no_module_imports_itself_by_a_detour():
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises CycleError, which names the circle


# --- docstrings -----------------------------------------------------------------------------------

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples")


def overrides(module, kind, method):
    bases = getattr(importlib.import_module(f"attnmem.{module}"), kind).__bases__
    return any(hasattr(base, method) for base in bases)


def documented(name):
    """Public functions, classes and methods of a module, with their qualified names.

    A method that overrides another one is left out, since it has that one's documentation.
    """
    for node in TREES[name].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                public = isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_")
                if public and not overrides(name, node.name, inner.name):
                    yield f"{node.name}.{inner.name}", inner


def sections(text):
    """What each section of a Google-style docstring holds, without its indentation."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):$", text, flags=re.M)[1:]
    bodies = (re.split(r"\n(?=\S)", part)[0] for part in parts[1::2])
    return {
        head: "\n".join(re.findall(r"^    (.*)$", body, re.M))
        for head, body in zip(parts[::2], bodies, strict=True)
    }


def entries(body):
    return re.findall(r"^(\*{0,2}\w+)(?: \([^)]*\))?:", body, re.M)


def parameters(function):
    """The parameters in their order, each with whether it has an annotation."""
    given = function.args
    found = [(argument.arg, argument) for argument in given.posonlyargs + given.args]
    found += [(f"*{given.vararg.arg}", given.vararg)] if given.vararg else []
    found += [(argument.arg, argument) for argument in given.kwonlyargs]
    found += [(f"**{given.kwarg.arg}", given.kwarg)] if given.kwarg else []
    return {name: bool(one.annotation) for name, one in found if name not in ("self", "cls")}


def faults(node, text):
    """What is not as Google's style and this book's ask."""
    found, lines = sections(text), text.splitlines()
    if not re.search(r"[.:]$", lines[0]) or (len(lines) > 1 and lines[1]):
        yield "no sentence in the first line"
    if re.search(r"^(Arguments|Parameters|Returns|Raises|Source)$", text, re.M):
        yield "a heading without a colon"
    returns = re.sub(r"(:\w+:)?`[^`]*`", "", found.get("Returns", "").split("\n")[0])
    if re.search(r":(\s|$)", returns):
        yield "a colon in the first line of Returns, which is taken for the end of a type"
    if isinstance(node, ast.ClassDef):
        fields = [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]
        if "Attributes" in found and entries(found["Attributes"]) != fields:
            yield f"Attributes: {entries(found['Attributes'])}, not {fields}"
        return
    given, annotated = entries(found.get("Args", "")), parameters(node)
    if given != [name for name in annotated if name in given]:
        yield f"Args: {given}, not parameters in the order of {[*annotated]}"
    if len(annotated) > 1 and found.keys() & {"Args", "Returns", "Yields", "Raises"}:
        unsaid = [name for name in annotated if not annotated[name] and name not in given]
        if unsaid:
            yield f"neither an annotation nor an entry in Args: {unsaid}"


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_are_in_googles_style_and_name_parameters_that_exist(name):
    assert ast.get_docstring(TREES[name])
    for qualified, node in documented(name):
        text = ast.get_docstring(node)
        assert text, f"{name}.{qualified} has no docstring"
        assert [*faults(node, text)] == [], f"{name}.{qualified}"
