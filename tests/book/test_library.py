"""The library's house: its table of rooms, what imports what, and the form of the docstrings."""

import ast
import graphlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys

import pytest

import attnmem
from attnmem.pages import reporting
from attnmem.pages.reporting import Graded

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


def test_a_room_imports_only_from_rooms_above_it():
    assert {"core.layers", "core.bounds", "checks"} <= IMPORTS["core.memorize"]
    upwards = [
        f"{name} imports {target}"
        for name, targets in IMPORTS.items()
        for target in targets
        if name and room(name) != room(target)  # the library itself shows what the core has
        if ROOMS.index(room(target)) >= ROOMS.index(room(name))
    ]
    assert upwards == []


NAMED_TUPLE = {"_asdict", "_fields", "_replace"}  # public, whatever they are called
TOOL = sorted((ROOT / "lib" / "attnmem_yours").glob("*.py"))


def test_the_library_never_imports_the_tool():
    for path in LIBRARY.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) attnmem_yours", path.read_text(), re.M), path


def test_only_pages_of_the_tool_use_it():
    pages = (ROOT / "book" / "text").glob("*/*.md")
    users = {page.stem for page in pages if re.search("(?m)^from attnmem_yours", page.read_text())}
    assert users == {"your-data", "explorer"}


@pytest.mark.parametrize("path", TOOL, ids=lambda path: path.stem)
def test_the_tool_stands_on_public_names(path):
    """It imports no private name of the library, and asks none of a module of it."""
    tree = ast.parse(path.read_text())
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnmem"):
            for alias in node.names:
                assert not alias.name.startswith("_") or alias.name == "__version__", alias.name
                modules.add(alias.asname or alias.name)
    private = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in modules
        and re.match("_[^_]", node.attr)
        and node.attr not in NAMED_TUPLE
    }
    assert private == set()


@pytest.mark.parametrize("package", ["attnmem.core", "attnmem", "attnmem_yours"])
def test_no_name_of_a_package_hides_a_module(package):
    module = importlib.import_module(package)
    for path in pkgutil.iter_modules(module.__path__):
        offered = getattr(module, path.name, None)
        assert offered is None or inspect.ismodule(offered), path.name


SOURCES = [path for path in (ROOT / "lib").rglob("*.py") if path.name != "__init__.py"]


@pytest.mark.parametrize("path", [path.relative_to(ROOT).as_posix() for path in SOURCES])
def test_a_module_has_tests_in_its_place(path):
    """``make test FILE=`` finds them; what it says names the file to add."""
    command = ["make", "--just-print", "test", f"FILE={path}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_what_a_printed_verdict_calls_is_documented():
    """Each function that grades a check, those that judge, and what asks the reader."""
    [listed] = re.findall(
        r"attnmem\.pages\.reporting\n   :members: (.*)\n",
        (ROOT / "book" / "library-lab.md").read_text(),
    )
    grading = {
        name
        for name, thing in vars(reporting).items()
        if inspect.isfunction(thing) and inspect.signature(thing).return_annotation is Graded
    }
    assert {"proved", "measured"} <= grading
    judging = {"Graded", "word_for", "grade_for", "verdict", "attempt"}
    assert {*listed.split(", ")} == grading | judging


def test_no_module_imports_itself_by_a_detour():
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises CycleError, which names the circle


CORE = [name for name in MODULES if room(name) == "core"]
# Whatever the core imports by itself, while it is used: all but the modules of torch and numpy.
ALONE = """
import builtins, sys
theirs, ours = builtins.__import__, {"torch", "numpy", "jaxtyping", "attnmem"}
def only(name, scope=None, *rest):
    if (scope or {}).get("__name__", "").startswith("attnmem") and not (rest and rest[-1]):
        assert name.split(".")[0] in ours | sys.stdlib_module_names, name
    return theirs(name, scope, *rest)
for name in ("scipy", "pandas", "matplotlib", "flint", "filelock", "tqdm"):
    sys.modules[name] = None  # refuses the import
builtins.__import__ = only
import torch, attnmem
torch.manual_seed(0)
E, e, y = torch.rand(8, 16), torch.rand(25, 16), torch.rand(25)
weights = attnmem.memorize_mha(E, e, y, heads=8, head_dim=4, seed=0)
assert (attnmem.mha(weights, E, e)[:, 0] - y).abs().max() < 1e-6
pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
small = attnmem.memorize_aot(pairs, pairs[:, 0], vocab=3, dim=3, head_dim=3, heads=2, seed=0)
assert (attnmem.aot(small, pairs).argmax(-1) == pairs[:, 0]).all()
most = attnmem.bounds.own_context_ceiling(4, 2, 6)
assert attnmem.bounds.deep_ceiling([4], 2, 1, 6) == most + 6
_, losses = attnmem.descend(attnmem.xavier(2, 16, 4, 1, seed=0), E, e, y, steps=50, lr=0.01)
assert losses[-1] < losses[0]
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("attnmem.")}
assert rooms == {"checks", "examples", "core"}, rooms
"""


def test_the_core_imports_only_checks_and_examples():
    reached = {room(target) for name in CORE for target in IMPORTS[name]}
    assert reached == {"core", "checks", "examples"}
    assert IMPORTS["checks"] == set()
    assert IMPORTS["examples"] == {"checks"}


@pytest.mark.parametrize("name", ["memorize_mha", "memorize_aot", "memorize_by_difference"])
def test_a_construction_stands_beside_the_bounds(name):
    """Also one of the theory, which is imported when it is asked for."""
    assert {"bounds", name} <= {*attnmem.__all__} & {*dir(attnmem)}
    assert getattr(attnmem, name).__module__.startswith("attnmem.")


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(AttributeError, match=r"'attnmem' has no attribute 'memorize_all'"):
        _ = attnmem.memorize_all


def test_the_core_runs_with_torch_and_numpy_alone():
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=300)


# --- docstrings; for their form ruff looks --------------------------------------------------------


def named(node):
    """What a docstring may name: the fields of a class, the parameters of a function."""
    if isinstance(node, ast.ClassDef):
        return {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}
    return {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_name_what_exists(name):
    assert ast.get_docstring(TREES[name])
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = (ast.get_docstring(node) or "") + "\n"
            for section in re.findall(r"^(?:Args|Attributes):\n((?: .*\n|\n)*)", text, re.M):
                given = re.findall(r"^    \*{0,2}(\w+)(?: \([^)]*\))?:", section, re.M)
                assert {*given} <= named(node), node.name
