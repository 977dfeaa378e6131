"""The library's house: its table of rooms, what imports what, and the form of the docstrings."""

import ast
import graphlib
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


def room(name):
    return name.split(".")[0]


# --- rooms ----------------------------------------------------------------------------------------


def rooms():
    """The first column of the table in the library's docstring."""
    return re.findall(r"^``(\w+)``", inspect.getdoc(attnmem), re.M)


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
    found = {room(name) for name in MODULES} - {""}
    assert sorted(rooms()) == sorted(found)


def test_imports_are_found():
    assert {"attention", "independence", "checks"} <= IMPORTS["constructions.mahdavi"]
    assert IMPORTS["constructions.mahdavi"] >= {"constructions.units"}
    assert {target for targets in IMPORTS.values() for target in targets} <= MODULES.keys()


def test_a_room_imports_only_from_rooms_above_it_in_the_table():
    place = {name: line for line, name in enumerate(rooms())}
    upwards = [
        f"{name} imports {target}"
        for name, targets in IMPORTS.items()
        for target in targets
        if room(name) != room(target) and place[room(target)] >= place[room(name)]
    ]
    assert upwards == []


def test_no_module_imports_itself_by_a_detour():
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises CycleError, which names the circle


# --- docstrings -----------------------------------------------------------------------------------

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples")
FUNCTION = ast.FunctionDef


def overrides(node):
    """Whether a method has the documentation of the one that it overrides."""
    return any(isinstance(mark, ast.Name) and mark.id == "override" for mark in node.decorator_list)


def documented(name):
    """Public functions, classes and methods of a module, with their qualified names.

    A method that overrides another one is left out, since it has that one's documentation.
    """
    for node in TREES[name].body:
        if isinstance(node, (FUNCTION, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if not isinstance(inner, FUNCTION) or inner.name.startswith("_"):
                    continue
                if not overrides(inner):
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
    given = function.args
    names = [argument.arg for argument in given.posonlyargs + given.args]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [argument.arg for argument in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return [name for name in names if name not in ("self", "cls")]


def faults(node, text):
    """What is not as Google's style and this book's ask."""
    found, lines = sections(text), text.splitlines()
    if not re.search(r"[.:]$", lines[0]) or (len(lines) > 1 and lines[1]):
        yield "no sentence in the first line"
    if re.search(r"^(Arguments|Parameters|Returns|Raises|Source)$", text, re.M):
        yield "a heading without a colon"
    if re.search(
        r":(\s|$)", re.sub(r"(:\w+:)?`[^`]*`", "", found.get("Returns", "").split("\n")[0])
    ):
        yield "a colon in the first line of Returns, which is taken for the end of a type"
    if isinstance(node, ast.ClassDef):
        fields = [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]
        if "Attributes" in found and entries(found["Attributes"]) != fields:
            yield f"Attributes: {entries(found['Attributes'])}, not {fields}"
        return
    names = parameters(node)
    if "Args" in found and entries(found["Args"]) != names:
        yield f"Args: {entries(found['Args'])}, not {names}"
    if "Args" not in found and len(names) > 1 and found.keys() & {"Returns", "Yields", "Raises"}:
        yield "no Args"


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_are_in_googles_style_and_name_every_parameter(name):
    assert ast.get_docstring(TREES[name])
    for qualified, node in documented(name):
        text = ast.get_docstring(node)
        assert text, f"{name}.{qualified} has no docstring"
        assert [*faults(node, text)] == [], f"{name}.{qualified}"


GOOD = '''
def f(a, *b, c=1, **d):
    """Do something.

    Args:
        a: The first,
            in two lines.
        *b: Others.
        c (int): Named.
        **d: More.

    Returns:
        A number.
    """
'''


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        ("a: The", "e: The", "Args: ['e', "),
        ("        *b: Others.\n", "", "Args: ['a', 'c', '**d']"),
        ("Args:", "Arguments", "a heading without"),
        ("Args:", "Whatever", "no Args"),
        ("A number", "float: a number", "a colon"),
        ("something.\n\n", "something\n", "no sentence"),
    ],
)
def test_a_fault_is_found(old, new, fault):
    [node] = ast.parse(GOOD.replace(old, new, 1)).body
    found = [*faults(node, ast.get_docstring(node))]
    assert any(each.startswith(fault) for each in found) if fault else found == []
