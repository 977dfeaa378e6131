"""Where the chapters are, and what makes a text source and a notebook one chapter."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
import yaml

from address import tidy

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
TEXT, NOTEBOOKS = BOOK / "text", BOOK / "notebooks"
HTML = ROOT / "_build" / "html"  # the built book

COLAB = "colab-setup"
INSTALL = """\
import importlib.util
import sys

if importlib.util.find_spec("attnmem") is None:
    source = "git+{address}@{branch}"
    if "google.colab" not in sys.modules:
        raise ModuleNotFoundError(f"No attnmem: pip install '{{source}}'")
    %pip install -q "attnmem[certify] @ $source"
"""
INSTALL_WHEEL = """\
import importlib.util
import re
import shutil
import tempfile
from pathlib import Path

if importlib.util.find_spec("attnmem") is None:
    wheels = [*Path().glob("attnmem-*.whl")]
    if not wheels:
        raise ModuleNotFoundError(
            "This notebook needs the book's library, attnmem: in a copy of "
            "the book's repository, `pip install .` installs it, or "
            "`make wheel` builds dist/attnmem-*.whl, to be put beside this "
            "notebook (on Colab: to be uploaded under Files)."
        )
    newest = max(wheels, key=lambda path: path.stat().st_mtime)
    # A second download is named "... (1).whl", which pip does not take.
    name = re.sub(r" ?\\(\\d+\\)", "", newest.name)
    wheel = Path(shutil.copy(newest, Path(tempfile.mkdtemp()) / name))
    %pip install -q "attnmem[certify] @ {wheel.as_uri()}"
"""


def chapters() -> list[str]:
    """Names such as ``mahdavi/capacity-by-construction``, found in ``book/text``."""
    return sorted(path.relative_to(TEXT).with_suffix("").as_posix() for path in TEXT.rglob("*.md"))


def pages() -> list[str]:
    """Every page of the table of contents, such as ``book/notation``, in its order."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    return [toc["root"]] + [page["file"] for part in toc["parts"] for page in part["chapters"]]


def source(page: str) -> Path:
    """What people edit of a page of the table of contents: a chapter's text, or the page itself."""
    return ROOT / f"{page.replace('book/notebooks', 'book/text')}.md"


def renew(path: Path, text: str) -> None:
    """Write a page that is made from others, if it changed."""
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8", newline="\n")
        print(f"wrote {path.relative_to(ROOT)}")


def text_path(chapter: str) -> Path:
    """The text source: what people edit."""
    return TEXT / f"{chapter}.md"


def notebook_path(chapter: str) -> Path:
    """The executed notebook: what the book renders."""
    return NOTEBOOKS / f"{chapter}.ipynb"


def config() -> dict:
    """The book's configuration."""
    return yaml.safe_load((ROOT / "_config.yml").read_text("utf-8"))


def repository() -> tuple[str, str]:
    """The repository's public address, empty as long as there is none, and the branch."""
    setting = config().get("repository") or {}
    return tidy(setting.get("url")), setting.get("branch") or "main"


def colab_cell() -> nbformat.NotebookNode:
    """The first cell of every notebook, which does nothing where the library is installed.

    On Colab it installs the library from the repository's address, which stands in ``_config.yml``;
    without an address, anywhere, from a wheel beside the notebook. Else it says what is needed.
    """
    address, branch = repository()
    source = INSTALL.format(address=address, branch=branch) if address else INSTALL_WHEEL
    cell = nbformat.v4.new_code_cell(source.rstrip(), id=COLAB)
    cell.metadata["tags"] = [COLAB, "remove-cell"]
    return cell


def has_tag(cell: nbformat.NotebookNode, tag: str) -> bool:
    """Whether a notebook cell carries ``tag``."""
    return tag in cell.metadata.get("tags", [])


def source_notebook(chapter: str) -> nbformat.NotebookNode:
    """The text source as a notebook to run: its cells, behind the set-up cell for Colab.

    Cell ids depend on the chapter and the cell's position only, so that a re-run changes none.
    """
    notebook = jupytext.read(text_path(chapter))
    for position, cell in enumerate(notebook.cells):
        cell.id = hashlib.sha256(f"{chapter} {position}".encode()).hexdigest()[:8]
    first_code = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells.insert(first_code, colab_cell())
    return notebook


def parameters(chapter: str) -> dict[str, object]:
    """Names and default values in the chapter's cell tagged ``parameters``, if it has one."""
    for cell in jupytext.read(text_path(chapter)).cells:
        if has_tag(cell, "parameters"):
            return dict(_assignments(cell.source))
    return {}


def _assignments(source: str) -> Iterator[tuple[str, object]]:
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            yield statement.targets[0].id, ast.literal_eval(statement.value)


def inputs(chapter: str) -> str:
    """A digest of all that a run of the chapter reads: its text, the library, data and tools."""
    decisive = ("_config.yml", "constraints.txt", "tools/chapters.py", "tools/run.py")
    paths = [text_path(chapter), *(ROOT / name for name in decisive)]
    return _digest(paths + sorted(path for path in (ROOT / "lib").rglob("*") if _decides(path)))


def stamp(chapter: str, read: str) -> str:
    """What says that the notebook that now lies there came from a run that read ``read``."""
    return f"{read} {_digest([notebook_path(chapter)])}"


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes() if path.exists() else b"missing")
    return digest.hexdigest()


def _decides(path: Path) -> bool:
    return path.suffix in {".py", ".toml", ".csv"} and path.is_file()
