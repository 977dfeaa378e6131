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
    choice = ", ".join(f"{name}={value!r}" for name, value in values.items())
    path = VARIED / re.sub(r"[^\w=.-]+", "_", choice) / f"{chapter}.ipynb"
    try:
        execute(chapter, path, values)
    except Exception as error:
        lines = str(error).strip().splitlines() or [repr(error)]
        by_name = re.match(rf"ValueError: {refused}: got .*; expected ", lines[-1])
        if by_name and not verdicts(path):
            return []
        return [f"{chapter}, {choice}: {lines[-1]}"]
    if refused:
        return [f"{chapter}, {choice}: ran to the end; expected that {refused} is refused"]
    lines = differences(verdicts(notebook_path(chapter)), verdicts(path))
    return [f"{chapter}, {choice}: {line}" for line in lines]


def verdicts(path: Path) -> dict[str, str]:
    """The word of each verdict in a notebook and the marks of its checks, by its claim."""
    cells = nbformat.read(path, 4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    entries = [output.get("metadata", {}).get(METADATA) for output in outputs]
    by_claim = {}
    for entry in filter(None, entries):
        marks = "".join(MARKS[holds] for _, holds, *_ in entry["checks"])
        by_claim[entry["claim"]] = f"{entry['verdict']} {marks}"
    return by_claim


def differences(stored: dict[str, str], fresh: dict[str, str]) -> list[str]:
    """A line for each claim whose verdicts differ, or that only one of two notebooks judges."""
    lines = []
    for claim in {**stored, **fresh}:
        old, new = (verdicts.get(claim, "no verdict") for verdicts in (stored, fresh))
        if old != new:
            lines.append(f"{claim}: stored {old!r}, now {new!r}")
    return lines


def small(chapter: str) -> list[tuple[dict[str, object], str | None]]:
    """Values to run a chapter with, and which of them it has to refuse, if one."""
    defaults, ends, least = parameters(chapter), ranges(chapter), {}
    for name, (low, _) in ends.items():
        least[name] = eval(low, {}, least)
    outside = [(name, eval(low, {}, defaults) - 1) for name, (low, _) in ends.items()]
    outside += [(name, eval(high, {}, defaults) + 1) for name, (_, high) in ends.items() if high]
    names = [name for name, value in defaults.items() if value is None or isinstance(value, str)]
    outside += [(name, "no such") for name in names if name not in OF_TRAINING]
    if "profile" in defaults:
        least |= QUICK
    choices: list[tuple[dict[str, object], str | None]] = []
    if least:
        choices.append((least, None))
    return choices + [({name: value}, name) for name, value in outside]


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
    options = parser.parse_args()
    if missing := [name for name in options.chapters if name not in chapters()]:
        parser.error(f"no {', '.join(missing)}; there are: {', '.join(chapters())}")
    names = options.chapters or chapters()
    if options.since:
        changed = changed_since(options.since)
        names = [name for name in names if name in changed]
    if options.small:
        runs = [(name, *choice) for name in names for choice in small(name)]
    else:
        with_seed = [name for name in names if "seed" in parameters(name)]
        runs = [(name, {"seed": seed}) for name in with_seed for seed in options.seeds]
    n_varied = len({name for name, *_ in runs})
    print(f"{len(names) - n_varied} of {len(names)} chapters have nothing to vary", flush=True)
    os.environ.update({"TQDM_DISABLE": "1", **ALONE})  # kernels inherit it
    n_differ = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for future in as_completed([pool.submit(run_with, *arguments) for arguments in runs]):
            n_differ += len(future.result())
            for line in future.result():
                print(f"  {line}", flush=True)
    print(f"{n_varied} chapters ran with {len(runs)} choices of values: {n_differ} differences")
    return 1 if n_differ else 0


if __name__ == "__main__":
    sys.exit(main())
