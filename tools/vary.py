"""Run chapters with other values of their parameters: no error, and each verdict as it was.

    python -m tools.vary --seeds 1 2 3                  every chapter with a parameter ``seed``
    python -m tools.vary --seeds 5 dana/parity          this chapter
    python -m tools.vary --seeds 1 --since origin/main  chapters whose text differs from there
    python -m tools.vary --small                        every chapter at its least values

The word of a verdict must be the same, and whether each of its checks holds, since a check that
fails need not move the word. A line for each difference names the chapter, the values, the claim
and both, or ends with the error. The exit status is 1 if there is one. Notebooks are left in
``_build/vary``. With ``--small`` each chapter runs with its numbers at their least, as the comments
of its parameters say, and with the profile ``quick``; and it has to refuse by name, before any
verdict, each number just outside its range and each word that names nothing.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import nbformat

from attnmem.pages.reporting import METADATA

from .chapters import ROOT, chapters, notebook_path, parameters, ranges, text_path
from .run import ALONE, execute

VARIED = ROOT / "_build" / "vary"
MARKS = {True: "✓", False: "✗", None: "·"}
QUICK = {"profile": "quick", "minutes": 0.2}
OF_TRAINING = ("device", *QUICK)  # what live.train refuses, whose tests try it


def run_with(chapter: str, values: dict[str, object], refused: str | None = None) -> list[str]:
    """Run a chapter with these parameters; a line for each verdict that differs, or the error.

    Where a parameter has to be ``refused``, a line if it is not, or not by its name.
    """
    said = ", ".join(f"{name}={value!r}" for name, value in values.items())
    path = VARIED / re.sub(r"[^\w=.-]+", "_", said) / f"{chapter}.ipynb"
    try:
        execute(chapter, path, values)
    except Exception as error:
        lines = str(error).strip().splitlines() or [repr(error)]
        by_name = re.match(rf"ValueError: {refused}: got .*; expected ", lines[-1])
        return [] if by_name and not words(path) else [f"{chapter}, {said}: {lines[-1]}"]
    if refused:
        return [f"{chapter}, {said}: ran to the end; expected that {refused} is refused"]
    stored, now = words(notebook_path(chapter)), words(path)
    return [f"{chapter}, {said}: {line}" for line in differences(stored, now)]


def words(path: Path) -> dict[str, str]:
    """The word of each verdict in a notebook and the marks of its checks, by its claim."""
    cells = nbformat.read(path, 4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    entries = [output.get("metadata", {}).get(METADATA) for output in outputs]
    found = {}
    for entry in filter(None, entries):
        marks = "".join(MARKS[holds] for _, holds, *_ in entry["checks"])
        found[entry["claim"]] = f"{entry['verdict']} {marks}"
    return found


def differences(stored: dict[str, str], now: dict[str, str]) -> list[str]:
    """A line for each claim whose verdicts differ, or that only one of two notebooks judges."""
    return [
        f"{claim}: stored {stored.get(claim, 'no verdict')!r}, now {now.get(claim, 'no verdict')!r}"
        for claim in {**stored, **now}
        if stored.get(claim) != now.get(claim)
    ]


def small(chapter: str) -> list[tuple[dict[str, object], str | None]]:
    """Values to run a chapter with, and which of them it has to refuse, if one."""
    given, ends, least = parameters(chapter), ranges(chapter), {}
    for name, (low, _) in ends.items():
        least[name] = eval(low, {}, least)
    outside = [(name, eval(low, {}, given) - 1) for name, (low, _) in ends.items()]
    outside += [(name, eval(high, {}, given) + 1) for name, (_, high) in ends.items() if high]
    words = [name for name, value in given.items() if value is None or isinstance(value, str)]
    outside += [(name, "no such") for name in words if name not in OF_TRAINING]
    within = least | (QUICK if "profile" in given else {})
    tried = [(within, None)] if within else []
    return tried + [({name: value}, name) for name, value in outside]


def changed_since(commit: str) -> list[str]:
    """Chapters whose text was changed since a branch left this commit, committed or not."""
    command = ["git", "diff", "--name-only", "--merge-base", commit, "--", "book/text"]
    paths = subprocess.check_output(command, cwd=ROOT, encoding="utf-8").splitlines()
    return [name for name in chapters() if text_path(name).relative_to(ROOT).as_posix() in paths]


def main() -> int:
    """Run what the command line asks for."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.vary", description=__doc__, formatter_class=raw)
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help="e.g. dana/parity")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seeds", nargs="+", type=int, help="e.g. 1 2 3")
    which.add_argument("--small", action="store_true", help="the least values, and those outside")
    parser.add_argument("--since", metavar="COMMIT", help="only chapters whose text changed since")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="chapters at a time")
    given, known = parser.parse_args(), chapters()
    if missing := [name for name in given.chapters if name not in known]:
        parser.error(f"no {', '.join(missing)}; there are: {', '.join(known)}")
    names = given.chapters or known
    if given.since:
        changed = changed_since(given.since)
        names = [name for name in names if name in changed]
    if given.small:
        asked = [(name, *one) for name in names for one in small(name)]
    else:
        with_seed = [name for name in names if "seed" in parameters(name)]
        asked = [(name, {"seed": seed}) for name in with_seed for seed in given.seeds]
    varied = len({name for name, *_ in asked})
    print(f"{len(names) - varied} of {len(names)} chapters have nothing to vary", flush=True)
    os.environ.update({"TQDM_DISABLE": "1", **ALONE})  # kernels inherit it
    differ = 0
    with ProcessPoolExecutor(given.jobs) as pool:
        for run in as_completed([pool.submit(run_with, *one) for one in asked]):
            differ += len(run.result())
            for line in run.result():
                print(f"  {line}", flush=True)
    print(f"{varied} chapters ran with {len(asked)} choices of values: {differ} differences")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
