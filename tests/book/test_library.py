"""The library's house: its table of rooms, what imports what, and the form of the docstrings."""

import ast
import graphlib
import importlib.util
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
    package = "attnmem." + (name if MODULES[name].stem == "__init__" else name.rpartition(".")[0])
    for node in ast.walk(TREES[name]):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        targets = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package.rstrip("."))
            targets = [f"{base}.{target}" for target in targets]
        for target in targets:
            if target.split(".")[0] == "attnmem":
                inner = target.removeprefix("attnmem").lstrip(".")
                yield inner if inner in MODULES else inner.rpartition(".")[0]


IMPORTS = {name: {*imported(name)} - {"", name} for name in MODULES}


def test_the_table_names_every_room_once():
    assert sorted(ROOMS) == sorted({room(name) for name in MODULES} - {""})


def test_a_room_imports_only_from_rooms_above_it_in_the_table():
    assert {"core.layers", "core.bounds", "checks"} <= IMPORTS["core.memorize"]
    upwards = [
        f"{name} imports {target}"
        for name, targets in IMPORTS.items()
        for target in targets
        if name and room(name) != room(target)  # the library itself shows what the core has
        if ROOMS.index(room(target)) >= ROOMS.index(room(name))
    ]
    assert upwards == []


def test_no_module_imports_itself_by_a_detour():
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises CycleError, which names the circle


# --- docstrings -----------------------------------------------------------------------------------


def documented(name):
    """Public functions, classes and methods of a module, with their docstrings."""
    for node in TREES[name].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            inner = node.body if isinstance(node, ast.ClassDef) else ()
            for each in (node, *(one for one in inner if isinstance(one, ast.FunctionDef))):
                if text := ast.get_docstring(each):  # ruff sees where one is missing
                    yield f"{node.name}, {each.name}", each, text


def parameters(function):
    given = function.args
    stars = [("*", given.vararg), *(("", one) for one in given.kwonlyargs), ("**", given.kwarg)]
    named = [one.arg for one in given.posonlyargs + given.args]
    return named + [f"{star}{one.arg}" for star, one in stars if one]


def faults(node, text):
    """What is not as Google's style and this book's ask."""
    lines, kind = text.splitlines(), isinstance(node, ast.ClassDef)
    if not re.search(r"[.:]$", lines[0]) or (len(lines) > 1 and lines[1]):
        yield "no sentence in the first line"
    if re.search(r"^(Arguments|Parameters|Returns|Raises|Source)$", text, re.M):
        yield "a heading without a colon"
    section = re.search(
        rf"^{'Attributes' if kind else 'Args'}:\n((?: .*\n|\n)*)", text + "\n", re.M
    )
    if section:
        given = re.findall(r"^    (\*{0,2}\w+)(?: \([^)]*\))?:", section[1], re.M)
        fields = [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]
        names = fields if kind else [name for name in parameters(node) if name in given]
        if given != names:
            yield f"{given}, not {names}"


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_are_in_googles_style_and_name_parameters_that_exist(name):
    assert ast.get_docstring(TREES[name])
    for where, node, text in documented(name):
        assert [*faults(node, text)] == [], f"{name}: {where}"
