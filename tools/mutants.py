"""Small mistakes in a module of the library, as committed, that its tests do not see.

    python -m tools.mutants attnmem/pages/scaling.py
                        every mistake, by all tests of the module
    python -m tools.mutants attnmem/core/bounds.py --sample 100 --live 30
                        a hundred of them; fails if more than 30 per cent stay unseen

The tests of a module are the files that import it, or a name that it defines, themselves or by a
helper that they import. A module that none imports is refused, unless tests are named.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from .chapters import ROOT

COPY = ROOT / "_build" / "mutants"  # a clone, whose module is changed
RAY = ROOT / "_build" / "ray" / "bin"  # where cosmic-ray is installed, apart from the book's lock
HELPERS = ROOT / "tests"
TESTS = [HELPERS / room for room in ("unit", "theory")]
CONFIGURATION = """
[cosmic-ray]
module-path = "lib/{module}"
timeout = 300.0
test-command = "{python} -m pytest -qx -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
[cosmic-ray.filters.operators-filter]
exclude-operators = ["core/ReplaceBinaryOperator_BitOr_.*"] # of annotations: int | None
"""
SAMPLED = """
DELETE FROM work_items WHERE job_id NOT IN (SELECT job_id FROM work_items
  WHERE job_id NOT IN (SELECT job_id FROM work_results) ORDER BY random() LIMIT {sample});
DELETE FROM mutation_specs WHERE job_id NOT IN (SELECT job_id FROM work_items);
DELETE FROM work_results
"""  # which are of those that are filtered


def tests_of(module: str) -> list[str]:
    """The files of tests that import a module such as ``attnmem/core/bounds.py``, from the root."""
    name = ".".join(Path(module).with_suffix("").parts).removesuffix(".__init__")
    files = [path for folder in TESTS for path in sorted(folder.rglob("test_*.py"))]
    return [path.relative_to(ROOT).as_posix() for path in files if name in imported(path)]


@functools.cache
def imported(path: Path) -> set[str]:
    """The modules of the library that a file imports, or that define a name which it imports."""
    modules = set()
    for module, name in _imports(ast.parse(path.read_text("utf-8"))):
        if module.partition(".")[0] in ("attnmem", "attnmem_yours"):
            modules |= {module, _home(module, name)}
        helper = HELPERS / f"{module}.py"
        if helper.exists():
            modules |= imported(helper)
    return modules


def _imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Modules that code imports, each with a name from it, or with none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.module, alias.name) for alias in node.names)


def _home(module: str, name: str | None) -> str:
    """The module that defines a name, which may be a module itself."""
    thing = importlib.import_module(module)
    if name is not None:
        thing = getattr(thing, name, None) or importlib.import_module(f"{module}.{name}")
    if isinstance(thing, ModuleType):
        return thing.__name__
    return getattr(thing, "__module__", module)


def main() -> int:
    """Run what the command line asks for."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.mutants", description=__doc__, formatter_class=raw)
    parser.add_argument("module", metavar="MODULE", help="below lib, e.g. attnmem/core/bounds.py")
    parser.add_argument("--tests", nargs="+", help="files of tests (default: those that import it)")
    parser.add_argument("--sample", type=int, default=-1, help="how many mistakes (default: all)")
    parser.add_argument("--live", type=float, default=100, help="per cent that may stay unseen")
    options = parser.parse_args()
    if not (ROOT / "lib" / options.module).is_file():
        parser.error(f"MODULE: got {options.module!r}; expected a file below lib")
    tests = options.tests or tests_of(options.module)
    if not tests:
        parser.error(f"no test imports {options.module}: name files of tests (--tests)")
    print(f"{options.module}, by {len(tests)} files:", *tests, flush=True)
    shutil.rmtree(COPY, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", ROOT, COPY], check=True)
    values = {"module": options.module, "python": sys.executable, "tests": " ".join(tests)}
    (COPY / "ray.toml").write_text(CONFIGURATION.format(**values), "utf-8")
    _ray("cosmic-ray", "init", "ray.toml", "ray.sqlite")
    _ray("cr-filter-operators", "ray.sqlite", "ray.toml")
    with contextlib.closing(sqlite3.connect(COPY / "ray.sqlite")) as session:
        session.executescript(SAMPLED.format(sample=options.sample))
    _ray("cosmic-ray", "baseline", "ray.toml")
    _ray("cosmic-ray", "exec", "ray.toml", "ray.sqlite")
    _ray("cr-report", "--surviving-only", "--show-diff", "ray.sqlite")
    _ray("cr-rate", "--estimate", "--fail-over", str(options.live), "ray.sqlite")
    return 0


def _ray(command: str, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(COPY / "lib")}
    done = subprocess.run([RAY / command, *arguments], cwd=COPY, env=environment)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    sys.exit(main())
