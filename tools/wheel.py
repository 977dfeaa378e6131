"""Build the library's wheel into dist/: the same bytes from the same commit, on every machine."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .chapters import ROOT, wheel_name

FIRST = "315532800"  # 1980, before which a zip knows no time


def build_wheel(folder: Path) -> Path:
    """Build from a copy, since building leaves files behind, with the commit's time in it."""
    with tempfile.TemporaryDirectory() as copy:
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
        shutil.copytree(ROOT / "lib", Path(copy) / "lib", ignore=ignored)
        for path in Path(copy).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        command = "pip wheel --quiet --no-deps --no-build-isolation --wheel-dir"
        environment = {"SOURCE_DATE_EPOCH": _committed(), **os.environ}
        command = [sys.executable, "-m", *command.split(), str(folder), copy]
        subprocess.run(command, check=True, env=environment, umask=0o022)
    return folder / wheel_name()


def _committed() -> str:
    """Seconds of the last commit, if one is known."""
    command, options = ["git", "log", "-1", "--format=%ct"], {"stderr": subprocess.DEVNULL}
    try:
        seconds = subprocess.check_output(command, cwd=ROOT, encoding="utf-8", **options)
    except (OSError, subprocess.CalledProcessError):
        return FIRST
    return seconds.strip() or FIRST


if __name__ == "__main__":
    print(build_wheel(ROOT / "dist"))
