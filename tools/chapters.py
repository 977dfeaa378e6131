"""Where the chapters are, and what makes a text source and a notebook one chapter."""

import ast
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import jinja2
import jupytext
import nbformat
import yaml

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
TEXT, NOTEBOOKS = BOOK / "text", BOOK / "notebooks"
HTML = ROOT / "_build" / "html"  # the built book
DEFAULT = "https://github.com/executablebooks/jupyter-book"  # jupyter-book's, for a missing address
COLAB = "colab-setup"
ARGUMENT = ("idea", "training", "sequences", "data")  # parts to read from start to end


def chapters() -> list[str]:
    """Names such as ``mahdavi/capacity-by-construction``, found in ``book/text``."""
    return sorted(path.relative_to(TEXT).with_suffix("").as_posix() for path in TEXT.rglob("*.md"))


def contents() -> list[tuple[str, list[str]]]:
    """The parts of the table of contents with their pages; the first is the front page alone."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    parts = [("", [toc["root"]])]
    for part in toc["parts"]:
        parts.append((part["caption"], [page["file"] for page in part["chapters"]]))
    return parts


def pages() -> list[str]:
    """Every page of the table of contents, such as ``book/notation``, in its order."""
    return [page for _, pages_of_part in contents() for page in pages_of_part]


def text_path(chapter: str) -> Path:
    """The text source: what people edit."""
    return TEXT / f"{chapter}.md"


def notebook_path(chapter: str) -> Path:
    """The executed notebook: what the book renders."""
    return NOTEBOOKS / f"{chapter}.ipynb"


def render(template: str, filters: dict[str, Callable], **values: object) -> str:
    """The text of a template in ``book/fragments``, filled in."""
    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(BOOK / "fragments"), **options)
    environment.filters |= filters
    return environment.get_template(template).render(values)


def config() -> dict:
    """The book's configuration."""
    return yaml.safe_load((ROOT / "_config.yml").read_text("utf-8"))


def tidy(address: str | None) -> str:
    """An address as links are built on it; empty, if it is none."""
    address = (address or "").strip().rstrip("/").removesuffix(".git")
    return "" if address == DEFAULT else address


def repository() -> tuple[str, str]:
    """The repository's public address, empty as long as there is none, and the branch."""
    setting = config().get("repository") or {}
    return tidy(setting.get("url")), setting.get("branch") or "main"


def wheel_name() -> str:
    """The library's wheel, as pip names it."""
    package = (ROOT / "lib" / "attnmem" / "__init__.py").read_text("utf-8")
    version = re.search(r'^__version__ = "(.+)"', package, re.M)[1]
    return f"attnmem-{version}-py3-none-any.whl"


def site() -> str:
    """Where the built book stands, empty as long as it stands nowhere."""
    return tidy((config().get("html") or {}).get("baseurl"))


def below(base: str | None, path: str) -> str:
    """The address of a file of the book; empty, if the book has none."""
    return f"{base.rstrip('/')}/{path}" if base else ""


def colab_cell(base: str = "", sha256: str = "") -> nbformat.NotebookNode:
    """The first cell of every notebook, which does nothing where the library is installed.

    It installs the library from a wheel beside the notebook, else from the address of the built
    book, which only a downloaded notebook knows. Without either it says what is needed. A wheel
    whose hash is another is refused, unless none is known, as in the repository.
    """
    place = below(base, f"downloads/{wheel_name()}") if base else ""
    if place and sha256:
        place += f"#sha256={sha256}"
    source = (BOOK / "fragments" / "install.ipy").read_text("utf-8").rstrip()
    source = source.replace("<address>", place).replace("<sha256>", sha256)
    metadata = {"tags": [COLAB, "remove-cell"]}
    return nbformat.v4.new_code_cell(source, id=COLAB, metadata=metadata)


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


def tags(cell: nbformat.NotebookNode) -> set[str]:
    """What decides how a cell is shown, such as ``hide-input``."""
    return {*cell.metadata.get("tags", [])}


def parameters(chapter: str) -> dict[str, object]:
    """Names and default values in the chapter's cell tagged ``parameters``, if it has one."""
    return {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in ast.parse(_parameters_cell(chapter)).body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }


def ranges(chapter: str) -> dict[str, tuple[str, str | None]]:
    """The least and the most of the numbers in that cell, as their comments say.

    ``1 or more`` or ``1 to dim``. An end may be computed from other parameters, a least one from
    those above it.
    """
    bounded = r"^(\w+) = .*  # ([\w.]+(?: \+ \d+)?) (?:or more|to ([\w.]+))$"
    lines = re.findall(bounded, _parameters_cell(chapter), re.M)
    return {name: (least, largest or None) for name, least, largest in lines}


def _parameters_cell(chapter: str) -> str:
    cells = jupytext.read(text_path(chapter)).cells
    tagged = [cell.source for cell in cells if "parameters" in tags(cell)]
    return "\n".join(tagged)
