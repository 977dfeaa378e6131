"""The library from a wheel, with no checkout around it, is enough to run a chapter."""

import os
import subprocess
import sys

import nbformat
import pytest

from tools.chapters import notebook_path
from tools.readers import build_wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with nothing but the unpacked wheel, built from the repository."""
    site, wheel = tmp_path_factory.mktemp("site"), build_wheel(tmp_path_factory.mktemp("wheel"))
    command = "pip --quiet install --no-deps --target"
    subprocess.run([sys.executable, "-m", *command.split(), site, wheel], check=True)
    return site


def elsewhere(installed, folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_carries_its_data(installed, tmp_path):
    code = (
        "import attnmem.pages.reporting as r, attnmem.lab.store as s;"
        "print(r.__file__, len(r.claims()), (s.SHIPPED / s.DIGESTS).exists())"
    )
    path, count, listed = elsewhere(installed, tmp_path, "-c", code).split()
    assert path.startswith(str(installed))
    assert int(count) > 50
    assert listed == "True"


def test_a_chapter_opened_alone_runs_to_its_end(installed, tmp_path):
    chapter = notebook_path("foundations/attention")
    elsewhere(installed, tmp_path, "-m", "papermill", "--kernel", "python3", chapter, "out.ipynb")
    cells = nbformat.read(tmp_path / "out.ipynb", 4).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
