"""What readers take home from the built book runs without the book."""

import re
import shutil
import zipfile

import nbformat
import pytest

from fresh import fresh_environment, library, run_notebook
from tools.chapters import HTML, chapters, wheel_name

DOWNLOADS = HTML / "downloads"
CHAPTER = "foundations/attention"
MARKUP = r":::|^\(\S+\)=|\{[a-z]+(?::[a-z]+)?\}[`\[]|^`{3,}\{|^%|<script|<form|\bch-[a-z-]+"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The zip, unpacked."""
    folder = tmp_path_factory.mktemp("home")
    zipfile.ZipFile(DOWNLOADS / "attnmem-notebooks.zip").extractall(folder)
    return folder / "attnmem-notebooks"


@pytest.mark.parametrize("chapter", chapters())
def test_a_download_is_the_notebook_without_markup(home, chapter):
    """A notebook is that of the button and has no markup of the book."""
    path = home / f"{chapter.replace('/', '-')}.ipynb"
    button = HTML / "_sources" / "book" / "notebooks" / f"{chapter}.ipynb"
    assert button.read_bytes() == path.read_bytes()
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert texts[0].startswith("# ")
    for text in texts:
        assert re.findall(MARKUP, text, re.M) == []
        assert text.count("<details>") == text.count("</details>")


def test_a_download_runs_in_a_fresh_environment(home, tmp_path):
    """Its first cell installs the library; the rest comes from the environment of the tests."""
    python, packages, variables = fresh_environment(tmp_path / "fresh")
    name = f"{CHAPTER.replace('/', '-')}.ipynb"
    (tmp_path / "alone").mkdir()
    for file in (name, wheel_name()):
        shutil.copy(home / file, tmp_path / "alone")
    run_notebook(python, variables, tmp_path / "alone", name)
    cells = nbformat.read(tmp_path / "alone" / "out.ipynb", 4).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert library(python, variables).startswith(str(packages))
