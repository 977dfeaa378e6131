"""What readers take home from the built book runs without the book."""

import os
import re
import shutil
import site
import subprocess
import sys
import zipfile

import nbformat
import pytest

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
    """Its first cell installs the library; what that needs comes from the environment of the tests.

    The fresh one is empty but for a path to those packages, among which the library is none.
    """
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
    python = tmp_path / "fresh" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output([python, "-c", where], text=True).strip()
    # A path of a .pth file is searched last, and the .pth files in it, as an editable library's
    # own, are not read.
    with open(f"{packages}/tests.pth", "w", encoding="utf-8") as paths:
        paths.write("\n".join(site.getsitepackages()))
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "JUPYTER_PATH")}
    name = f"{CHAPTER.replace('/', '-')}.ipynb"
    (tmp_path / "alone").mkdir()
    for file in (name, wheel_name()):
        shutil.copy(home / file, tmp_path / "alone")
    command = [python, "-m", "papermill", "--kernel", "python3", name, "out.ipynb"]
    done = subprocess.run(
        command, cwd=tmp_path / "alone", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    cells = nbformat.read(tmp_path / "alone" / "out.ipynb", 4).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    asked = [python, "-c", "import attnmem; print(attnmem.__file__)"]
    assert subprocess.check_output(asked, env=environment, text=True).startswith(packages)
