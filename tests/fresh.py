"""An environment without the library, to see how a reader's notebook installs it."""

import os
import site
import subprocess
import sys
from pathlib import Path


def fresh_environment(folder: Path) -> tuple[Path, Path, dict[str, str]]:
    """Its Python, the folder of its packages, and the variables to run it with.

    It is empty but for a path to the packages of the tests, among which the library is none: a path
    of a .pth file is searched last, and the .pth files in it, as an editable library's own, are
    not read.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.check_output([python, "-c", where], text=True).strip())
    (packages / "tests.pth").write_text("\n".join(site.getsitepackages()), "utf-8")
    left = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "JUPYTER_PATH")}
    return python, packages, left


def run_notebook(python: Path, variables: dict[str, str], folder: Path, name: str) -> None:
    """Run a notebook there from its first cell to its last, into ``out.ipynb``."""
    command = [python, "-m", "papermill", "--kernel", "python3", name, "out.ipynb"]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def library(python: Path, variables: dict[str, str]) -> str:
    """Where it has the library from."""
    asked = [python, "-c", "import attnmem; print(attnmem.__file__)"]
    return subprocess.check_output(asked, env=variables, text=True)
