"""Code runs as printed: a reader sees all that it uses, and needs the library's wheel alone."""

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile

import jupytext
import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.chapters import chapters, notebook_path, tags, text_path
from tools.wheel import build_wheel

HIDDEN = {"remove-cell", "remove-input"}
TUTORIALS = {"beyond/your-data", "beyond/explorer"}  # their imports are what they teach


def is_seen(cell):
    """Whether its code is on the page, at once or in a fold."""
    return cell.cell_type == "code" and not HIDDEN & tags(cell)


def printed(chapter):
    """The code that a reader sees, from top to bottom."""
    cells = jupytext.read(text_path(chapter)).cells
    return "\n\n".join(cell.source for cell in cells if is_seen(cell)) + "\n"


PRINTED = {chapter: code for chapter in chapters() if (code := printed(chapter)).strip()}
FOLDED = [chapter for chapter in PRINTED if chapter not in TUTORIALS]


def test_most_pages_print_code():
    without = {*chapters()} - {*PRINTED}
    assert without == {"front/overview"}
    assert {*PRINTED} > TUTORIALS


def imports(cell):
    nodes = ast.walk(ast.parse(cell.source))
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes)


@pytest.mark.parametrize("chapter", FOLDED)
def test_imports_and_dtype_stand_in_one_fold_at_the_top(chapter):
    remedy = "all imports and the dtype: one cell in the opening, `:tags: [hide-input, imports]`"
    cells = jupytext.read(text_path(chapter)).cells
    [place] = [k for k, cell in enumerate(cells) if "imports" in tags(cell)] or [None]
    assert place is not None, remedy
    assert "hide-input" in tags(cells[place]), remedy
    for cell in cells[:place]:
        assert "\n## " not in cell.source, remedy
        assert cell.cell_type == "markdown" or "parameters" in tags(cell), remedy
    for cell in cells[:place] + cells[place + 1 :]:
        if cell.cell_type == "code":
            assert not imports(cell), f"{remedy}\n{cell.source}"
            assert "set_default_dtype" not in cell.source, f"{remedy}\n{cell.source}"


def test_a_reader_sees_where_each_name_comes_from(tmp_path):
    """No cell that is removed defines what one that is shown uses."""
    for chapter, code in PRINTED.items():
        (tmp_path / f"{chapter.replace('/', '+')}.py").write_text(code, "utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,E9"]
    command += ["--output-format", "json", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    found = {f"{fault['filename']}: {fault['message']}" for fault in json.loads(done.stdout)}
    assert found == set(), "of a removed cell: show it, as `hide-input`, or move the line"


# --- a Python that has the wheel and what pip brings with it -------------------------------------

# A minute together: some of the argument, and of the record two that print a construction.
CHEAP = ["idea/by-hand", "idea/independent-rows", "idea/turns", "sequences/apart"]
CHEAP += ["mahdavi/capacity-by-construction", "mahdavi/relaxed-assumption"]
RUN = """
import sys
from importlib.machinery import PathFinder
others = sys.argv[2].split()
class Alone(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in others:
            return super().find_spec(name, path, target)
sys.meta_path = [Alone if finder is PathFinder else finder for finder in sys.meta_path]
from matplotlib import pyplot
pyplot.show = lambda: pyplot.close("all")  # the reader closes the window
exec(compile(open(sys.argv[1], encoding="utf-8").read(), sys.argv[1], "exec"), {"__name__": "page"})
"""


def brought(project, known):
    """All that pip installs with a project, by the metadata of what is installed."""
    name = canonicalize_name(project)
    if name not in known:
        known.add(name)
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            if not needed.marker or needed.marker.evaluate({"extra": ""}):
                brought(needed.name, known)
    return known


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The wheel, unpacked, and the packages that it does without."""
    folder = tmp_path_factory.mktemp("alone")
    zipfile.ZipFile(build_wheel(folder)).extractall(folder)
    known = brought("attnmem", set())
    others = [
        package
        for package, projects in importlib.metadata.packages_distributions().items()
        if not known & {*map(canonicalize_name, projects)}
    ]
    assert {"IPython", "transformers", "pytest"} <= {*others}
    assert not {"torch", "pandas", "attnmem"} & {*others}
    return folder, " ".join(others)


def shown(chapter):
    """What the notebook's printed cells have printed, and said in words."""
    words = []
    for cell in nbformat.read(notebook_path(chapter), 4).cells:
        for output in cell.outputs if is_seen(cell) else []:
            if output.output_type == "stream":
                words.append(output.text)
            elif output.output_type == "display_data" and "image/png" not in output.data:
                words.append(output.data.get("text/plain", "") + "\n")
    return [line for line in "".join(words).splitlines() if line]


@pytest.mark.parametrize("chapter", CHEAP)
def test_printed_code_runs_with_the_wheel_alone(chapter, alone, tmp_path):
    """In a fresh process, in an empty folder, and prints what the page prints."""
    folder, others = alone
    (tmp_path / "page.py").write_text(PRINTED[chapter], "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder), "MPLBACKEND": "agg"}
    environment.pop("ATTNMEM_MEASUREMENTS", None)
    command = [sys.executable, "-P", "-c", RUN, "page.py", others]
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line] == shown(chapter)
