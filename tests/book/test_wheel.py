"""The library from a wheel, with no checkout around it, is enough to run a chapter."""

import os
import shutil
import subprocess
import sys

import nbformat
import pytest

from tools.chapters import ROOT, notebook_path


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with nothing but the unpacked wheel, built from the repository."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheel", "site"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):  # a copy: building leaves files behind
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "lib", source / "lib", ignore=shutil.ignore_patterns("*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source]
    subprocess.run([*pip, *build], check=True)
    [wheel] = wheels.glob("attnmem-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    return site


def elsewhere(installed, folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_carries_its_data(installed, tmp_path):
    code = "import attnmem.reporting as r; print(r.__file__, len(r.claims()))"
    path, count = elsewhere(installed, tmp_path, "-c", code).split()
    assert path.startswith(str(installed))
    assert int(count) > 50


def test_a_chapter_opened_alone_runs_to_its_end(installed, tmp_path):
    chapter = notebook_path("foundations/attention")
    elsewhere(installed, tmp_path, "-m", "papermill", "--kernel", "python3", chapter, "out.ipynb")
    cells = nbformat.read(tmp_path / "out.ipynb", 4).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
