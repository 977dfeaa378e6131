"""A newcomer adds an experiment: CONTRIBUTING's own entry and commands, up to the page."""

import os
import re
import shutil
import subprocess
import sys
import textwrap

import nbformat
import pytest

from tools.chapters import ROOT

SAID = (ROOT / "CONTRIBUTING.md").read_text()
GRIDS = "lib/attnmem/lab/grids.toml"


def in_copy(root, *arguments):
    """A command in the copy; what it says."""
    environment = {**os.environ, "PYTHONPATH": str(root / "lib"), "OMP_NUM_THREADS": "1"}
    environment.pop("ATTNMEM_MEASUREMENTS", None)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository in small, with the entry in its place, committed."""
    root = tmp_path_factory.mktemp("clone")
    for folder in ("tools", "book/fragments"):
        shutil.copytree(ROOT / folder, root / folder)
    without = shutil.ignore_patterns("measurements", "__pycache__")
    shutil.copytree(ROOT / "lib", root / "lib", ignore=without)
    for name in ("_config.yml", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    [entry] = re.findall(r"^    \[dana-exp7\]\n(?:    .*\n)+", SAID, re.M)
    with open(root / GRIDS, "a") as grids:
        grids.write(textwrap.dedent(entry))
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    git = shutil.which("git") or pytest.skip("git is missing")
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "All"]):
        subprocess.run([git, *command], cwd=root, check=True)
    return root


def test_from_the_entry_to_the_page(copy):
    [line] = re.findall(r"`python (-m attnmem run dana-exp7 [^`]+)`", SAID)
    assert "6 rows added" in in_copy(copy, *line.split(), "--device", "cpu")
    [template] = re.findall(r"copy `(\S+record\.md)`", SAID)
    page = copy / "book/text/dana/exp7.md"
    page.parent.mkdir(parents=True)
    page.write_text((copy / template).read_text().replace("dana-exp1", "dana-exp7"))
    in_copy(copy, "-m", "tools.run", "dana/exp7")
    cells = nbformat.read(copy / "book/notebooks/dana/exp7.ipynb", 4).cells
    shown = "".join(
        data.get("text/markdown", "") + " image/png" * ("image/png" in data)
        for cell in cells
        for data in (output.get("data", {}) for output in cell.get("outputs", []))
    )
    assert "6 of 6 trainings" in shown
    assert "`quick`: a smoke test, not a result" in shown
    assert "image/png" in shown
    assert "Exp. 7 (not in the paper), profile quick." in shown
