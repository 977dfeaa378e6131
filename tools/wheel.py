"""Build the library's wheel into dist/: the same bytes from the same commit, on every machine.

With --sdist FOLDER an sdist into that folder, from which the same wheel comes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .chapters import ROOT, repository, site, wheel_name

BESIDE = ("README.md", "LICENSE")  # what the wheel has from beside the library
FIRST = "315532800"  # 1980, before which a zip knows no time
SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def build_wheel(folder: Path) -> Path:
    """The wheel, with the book's addresses in its metadata."""
    with _copy() as copy:
        command = "pip wheel --quiet --no-deps --no-build-isolation --wheel-dir"
        _run(["-m", *command.split(), str(folder.resolve()), "."], copy)
    return folder / wheel_name()


def build_sdist(folder: Path) -> None:
    """What is built of it is the wheel of the pages."""
    with _copy() as copy:
        _run(["-c", SDIST, str(folder.resolve())], copy)


def addressed_citation() -> str:
    """``CITATION.cff`` with the addresses, if the book has them."""
    names = {"url": site(), "repository-code": repository()[0]}
    lines = [f'{name}: "{address}"\n' for name, address in names.items() if address]
    return (ROOT / "CITATION.cff").read_text("utf-8") + "".join(lines)


def _addressed_project() -> str:
    """``pyproject.toml`` with them."""
    names = {"Homepage": site(), "Repository": repository()[0]}
    lines = [f'{name} = "{address}"\n' for name, address in names.items() if address]
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    return "".join([text, "\n[project.urls]\n", *lines]) if lines else text


@contextmanager
def _copy() -> Iterator[str]:
    """A copy of what belongs to the library, since building leaves files behind."""
    with tempfile.TemporaryDirectory() as copy:
        for name in BESIDE:
            shutil.copy(ROOT / name, copy)
        Path(copy, "pyproject.toml").write_text(_addressed_project(), "utf-8")
        ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
        shutil.copytree(ROOT / "lib", Path(copy) / "lib", ignore=ignored)
        for path in Path(copy).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield copy


def _run(arguments: list[str], folder: str) -> None:
    """Run Python there, with the commit's time for what it writes."""
    environment = {"SOURCE_DATE_EPOCH": committed(), **os.environ}
    subprocess.run(
        [sys.executable, *arguments], check=True, cwd=folder, env=environment, umask=0o022
    )


def committed() -> str:
    """Seconds of the last commit of the library, if one is known: others change no wheel."""
    command = ["git", "log", "-1", "--format=%ct", "--", *BESIDE, "lib", "pyproject.toml"]
    options = {"stderr": subprocess.DEVNULL}
    try:
        seconds = subprocess.check_output(command, cwd=ROOT, encoding="utf-8", **options)
    except (OSError, subprocess.CalledProcessError):
        return FIRST
    return seconds.strip() or FIRST


if __name__ == "__main__":
    if "--sdist" in sys.argv:
        build_sdist(Path(sys.argv[-1]))
    else:
        print(build_wheel(ROOT / "dist"))
