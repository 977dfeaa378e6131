"""Say what the shipped rows are, once they are committed: ``python -m tools.digests``.

Each line of ``lib/attnmem/measurements/DIGESTS`` names a file, the number of its rows and their
hash. A reader refuses a file that does not begin with these rows; new ones may stand behind them.
This brings the list up to date; it refuses to if rows are lost, unless ``--lost`` says so.
"""

import subprocess
import sys
from pathlib import Path

from attnmem.lab import store

LIST = store.SHIPPED / store.DIGESTS


def shipped() -> list[Path]:
    """The files of rows that git knows, or will know with the next commit; without git, all."""
    command, options = ["git", "ls-files", "--", "*/*.csv"], {"stderr": subprocess.DEVNULL}
    try:
        listing = subprocess.check_output(command, cwd=store.SHIPPED, encoding="utf-8", **options)
        names = listing.split()
    except (OSError, subprocess.CalledProcessError):  # an archive of the repository
        files = store.SHIPPED.glob("*/*.csv")
        names = [path.relative_to(store.SHIPPED).as_posix() for path in files]
    return [store.SHIPPED / name for name in sorted(names)]


def entry(path: Path) -> str:
    """The line of one file."""
    rows = path.read_text("utf-8").splitlines()[1:]
    return f"{path.parent.name}/{path.name} {len(rows)} {store.digest(rows)}"


def listed() -> dict[str, str]:
    """The lines that are there, by file."""
    lines = LIST.read_text("utf-8").splitlines() if LIST.exists() else []
    return {line.split()[0]: line for line in lines}


if __name__ == "__main__":
    if "--lost" not in sys.argv[1:]:
        for file in listed():  # refuses one that has lost some of its listed rows, or all
            store.read(store.SHIPPED / file)
    LIST.write_text("".join(entry(path) + "\n" for path in shipped()), "utf-8")
