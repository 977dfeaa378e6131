"""A small book with this book's extension, its library and its settings."""

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

from tools.chapters import ROOT, config

NOTEBOOK, PAGE, SHORT = "book/notebooks/foundations/attention", "book/running", "book/colab"
OTHERS = [PAGE, SHORT, "book/bibliography"]


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A function that builds a notebook and three pages, with some settings changed."""

    def build(cells, **settings):
        folder = tmp_path_factory.mktemp("book")
        others = shutil.ignore_patterns("notebooks", "text", "mathjax")
        shutil.copytree(ROOT / "book", folder / "book", ignore=others)
        shutil.copytree(ROOT / "tools", folder / "tools")
        (folder / "lib").symlink_to(ROOT / "lib")
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
        (folder / NOTEBOOK).parent.mkdir(parents=True)
        nbformat.write(notebook, folder / f"{NOTEBOOK}.ipynb")
        pages = [{"file": page} for page in OTHERS]
        toc = {"format": "jb-book", "root": NOTEBOOK, "options": {"numbered": True}}
        (folder / "_toc.yml").write_text(yaml.safe_dump({**toc, "chapters": pages}))
        (folder / "_config.yml").write_text(yaml.safe_dump({**config(), **settings}))
        command = [Path(sys.executable).parent / "jupyter-book", "build", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder / "_build" / "html"

    return build
