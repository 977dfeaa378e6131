"""The library from a wheel, with no checkout around it, is enough to run a chapter."""

import os
import subprocess
import sys

import nbformat
import pytest

from tools.chapters import notebook_path
from tools.readers import build_wheel


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A function that runs Python in a folder, with nothing but the wheel, unpacked beside it."""
    site, wheel = tmp_path_factory.mktemp("site"), build_wheel(tmp_path_factory.mktemp("wheel"))
    command = "pip --quiet install --no-deps --target"
    subprocess.run([sys.executable, "-m", *command.split(), site, wheel], check=True)
    options = {"env": {**os.environ, "PYTHONPATH": str(site)}, "text": True}

    def run(folder, *command):
        return subprocess.check_output([sys.executable, *command], cwd=folder, **options)

    return run


def test_the_wheel_carries_its_data(elsewhere, tmp_path):
    code = (
        "import attnmem.papers as p, attnmem.lab.store as s, attnmem.lab.experiments as e;"
        "print(p.__file__, len(p.claims()) + len(e.STUDIES), (s.SHIPPED / s.DIGESTS).exists())"
    )
    path, count, listed = elsewhere(tmp_path, "-c", code).split()
    assert path.startswith(f"{tmp_path.parent}/site")
    assert int(count) > 50
    assert listed == "True"


def test_a_chapter_opened_alone_runs_to_its_end(elsewhere, tmp_path):
    chapter = notebook_path("foundations/attention")
    elsewhere(tmp_path, "-m", "papermill", "--kernel", "python3", chapter, "out.ipynb")
    cells = nbformat.read(tmp_path / "out.ipynb", 4).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
