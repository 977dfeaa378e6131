"""Mutation tests, by hand: ``make mutants``, or ``python tools/mutants.py bounds.py balls.py``.

Of a module whose tests take long, ``--sample 60 --seed 0`` tries so many mutations, drawn at
random. ``--judge`` runs nothing: it renews the reasons in the report.

A mutant is a module with one small mistake in it (:mod:`mutations`). The tests of the module must
fail on it; where they pass, either a test is missing or nobody can observe the mistake. The file
``tests/mutants.toml`` says which tests belong to which module, and of each survivor that is left
why it is no mistake; ``tests/mutants.md`` is the report. The exit status is 1 if a survivor is not
judged, or if a judgement is of no survivor.

This is no library, for two reasons. Mistakes that matter here are swapped arguments, the wrong end
of a ball, a dropped term, a missing check: cosmic-ray 8.7 makes none of these (mutmut 3.8 was only
skimmed).
And a Python for each mutant takes longer to import torch than most tests run. Here a mutant is a
fork of a process that has collected the tests, and the mistake is in its memory only.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import importlib.machinery
import itertools
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import tomllib
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mutations import Mutation, mutations

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "lib" / "attnmem"
JUDGED, REPORT = ROOT / "tests" / "mutants.toml", ROOT / "tests" / "mutants.md"
PROCESSES = 2
SPARE = 2**31  # bytes of memory for each, since some mutants fill lists without end
BROKEN = 99  # the status of a process that did not come to its tests
LOADED_ONCE = (
    "torch",
    "pandas",
    "scipy.optimize",
    "scipy.stats",
    "pytest",
    "hypothesis",
    "beartype",
)

# --- running the tests ----------------------------------------------------------------------------


class Survivors(NamedTuple):
    """What the tests of a module do not see, of what was tried, of so many mutations in all."""

    left: list[Mutation]
    tried: list[Mutation]
    of: int


def survivors(
    tests: list[str], module: Path, sample: int | None = None, seed: int = 0
) -> Survivors:
    """Run the tests of a module on each of its mutations, or on so many drawn with a seed."""
    every = _every(module)
    chosen = range(len(every))
    if sample is not None and sample < len(every):
        chosen = sorted(random.Random(seed).sample(chosen, sample))
    named = [[name] if name[0] == "-" else map(str, sorted(ROOT.glob(name))) for name in tests]
    arguments = ["-x", "-q", "-s", "-p", "no:cacheprovider", *itertools.chain(*named)]
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as answer:
        collected = partial(_test, arguments, [Collected(module, Path(answer.name), chosen)])
        _, status = os.waitpid(_fork(collected, 86400), 0)
        if status:
            sys.exit(f"{module.name}: its tests fail, or there are none: {' '.join(tests)}")
        limit, again = json.load(answer)
    jobs = {-1: partial(_test, arguments, [])}
    jobs |= {number: partial(_imported, module, number, arguments) for number in again}
    left = _surviving(module, jobs, limit)
    found = ([every[number] for number in numbers] for numbers in (sorted(left), chosen))
    return Survivors(*found, len(every))


def _every(module: Path) -> list[Mutation]:
    return list(mutations(ast.parse(module.read_text("utf-8"))))


class Collected(NamedTuple):
    """A plugin of pytest that collects the tests once and runs them in a fork for each mutation.

    There the mutated function gets its new code, whoever has imported it. Quick tests come first.
    What no test sees may have run while the module was imported: :func:`_imported` tries it again.
    """

    module: Path
    answer: Path
    chosen: Sequence[int]

    def pytest_runtestloop(self, session) -> bool:
        """Take the place of the loop over the tests."""
        items = session.items
        if os.waitpid(_fork(partial(self._rehearse, session), 3600), 0)[1]:
            sys.exit(1)
        times = json.loads(self.answer.read_text("utf-8"))
        order = sorted(range(len(items)), key=times.__getitem__)
        run = partial(_run, [(items[i], 10 + 20 * times[i]) for i in order], session)
        limit = 60 + 5 * sum(times)
        living = _living(self.module)
        jobs, again = {-1: run}, set()
        every = _every(self.module)
        for number in self.chosen:
            host = every[number].host
            if len(living.get(host, [])) == 1:
                jobs[number] = partial(self._try, run, number, living[host][0], host)
            else:
                again.add(number)
        again |= _surviving(self.module, jobs, limit)
        self.answer.write_text(json.dumps([limit, sorted(again)]), "utf-8")
        return True

    def _rehearse(self, session) -> int:
        times = []
        for item in session.items:
            began = time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            times.append(time.monotonic() - began)
        self.answer.write_text(json.dumps(times), "utf-8")
        return session.testsfailed or not times

    def _try(self, run, number: int, function: types.FunctionType, name: str) -> int:
        codes = [compile(_mutant(self.module, number), self.module, "exec")]
        for code in codes:  # which grows
            codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        [code] = [code for code in codes if code.co_qualname == name]
        if code.co_freevars != function.__code__.co_freevars:  # it no longer says super()
            return 0  # as if unseen, so that it is tried again
        function.__code__ = code
        return run()


def _mutant(module: Path, number: int) -> str:
    tree = ast.parse(module.read_text("utf-8"))
    list(mutations(tree))[number].apply()
    return ast.unparse(ast.fix_missing_locations(tree))


def _run(items: list[tuple], session) -> int:
    """Run tests until one fails, each with a limit of its own: some mutants never end."""
    for item, limit in items:
        signal.alarm(round(limit))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        if session.testsfailed:
            return 1
    return 0


def _living(module: Path) -> dict[str, list[types.FunctionType]]:
    """The functions of a module by name, without what decorators have made of them."""
    found: dict[str, list[types.FunctionType]] = {}
    for function in gc.get_objects():
        code = function.__code__ if type(function) is types.FunctionType else None
        if code and Path(code.co_filename) == module:
            found.setdefault(code.co_qualname, []).append(function)
    return found


def _imported(module: Path, number: int, arguments: list[str]) -> int:
    """Run the tests where importing a module sees the text of a mutation, and no compiled file."""
    text = _mutant(module, number).encode()
    loader = importlib.machinery.SourceFileLoader
    read, stats = loader.get_data, loader.path_stats
    sys.dont_write_bytecode = True

    def path_stats(self, path):
        if Path(path) == module:
            raise OSError
        return stats(self, path)

    loader.get_data = lambda self, path: text if Path(path) == module else read(self, path)
    loader.path_stats = path_stats
    return _test(arguments, [])


def _test(arguments: list[str], plugins: list[object]) -> int:
    import pytest

    return pytest.main(arguments, plugins)


def _fork(work: Callable[[], int], limit: float) -> int:
    """Do the work in another process, in silence; its id. The status is 0 if the work gives 0."""
    if pid := os.fork():
        return pid
    code = BROKEN
    try:
        os.setsid()
        signal.alarm(max(1, round(limit)))
        used = int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, resource.RLIM_INFINITY))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = work()
    except MemoryError:  # pytest, too, may find none left when it reports a mutant that fills it
        code = 1
    finally:
        os._exit(code)


def _surviving(module: Path, jobs: dict[int, Callable[[], int]], limit: float) -> set[int]:
    """The mutations whose tests pass. Those of job -1, with no mutation and in any order, must."""
    passing = set(_passing(jobs, limit))
    if -1 not in passing:
        sys.exit(f"{module.name}: its tests fail with no mutation")
    return passing - {-1}


def _passing(jobs: dict[int, Callable[[], int]], limit: float) -> Iterator[int]:
    """The jobs that return 0, in the order in which they end; two at a time."""
    waiting, running = list(jobs), {}
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            number = waiting.pop()
            running[_fork(jobs[number], limit)] = number
        pid, status = os.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what its tests had started
        number = running.pop(pid)
        print(f"\r{len(waiting)} to do ", end="", file=sys.stderr, flush=True)
        if os.waitstatus_to_exitcode(status) == BROKEN:
            sys.exit(f"mutation {number} could not be tried")
        if status == 0:
            yield number


# --- the report -----------------------------------------------------------------------------------


HEAD = """# Mutants

Written by `make mutants`. Of each small mistake that the tests of a module do not see, the reason
why it is none, from `mutants.toml`.
"""


NOT_JUDGED = "**not judged**"


def section(name: str, found: Survivors, judged: dict[tuple[str, str], str]) -> str:
    """The part of the report on one module."""
    tried = len(found.tried)
    drawn = f", drawn at random from {found.of}," if tried < found.of else ""
    seen = f"{tried - len(found.left)} of {tried} mutants{drawn} are seen by the tests."
    lines = [f"## {name}", "", seen, ""]
    if found.left:
        lines += ["| line | function | mutation | why it is no mistake |", "|---|---|---|---|"]
    for mutation in found.left:
        lines.append(_row(str(mutation.line), mutation.function, mutation.text, judged))
    return "\n".join(lines).rstrip() + "\n"


def _row(line: str, function: str, text: str, judged: dict[tuple[str, str], str]) -> str:
    cells = line, function, f"`{text}`", judged.get((function, text), NOT_JUDGED)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def rejudged(part: str, judged: dict[tuple[str, str], str]) -> str:
    """A part of the report with the reasons as they are now; survivors stay as they were found."""

    def renewed(row: re.Match) -> str:
        return _row(*(cell.replace(r"\|", "|") for cell in row.groups()), judged)

    return re.sub(r"^\| (\d+) \| (.*?) \| `(.*)` \| .*\|$", renewed, part, flags=re.M)


def _sections() -> dict[str, str]:
    """The parts of the report that is there, by module."""
    parts = re.split(r"^(?=## )", REPORT.read_text("utf-8") if REPORT.exists() else "", flags=re.M)[
        1:
    ]
    return {part.split()[1]: part.rstrip() + "\n" for part in parts}


def _write(parts: dict[str, str]) -> None:
    REPORT.write_text("\n".join([HEAD, *(parts[name] for name in sorted(parts))]), "utf-8")


def _judged(known: dict, module: str) -> dict[tuple[str, str], str]:
    """From function and mutation to the reason why a survivor of the module is no mistake."""
    return {
        (entry["function"], mutation): entry["reason"]
        for entry in known.get("equivalent", [])
        if entry["module"] == module
        for mutation in entry["mutations"]
    }


def main() -> None:
    """Test the modules named, or all; write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", help="such as bounds.py; all if there are none")
    parser.add_argument("--sample", type=int, help="so many mutations of each module; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--judge", action="store_true", help="renew the reasons, run nothing")
    options = parser.parse_args()
    wanted = options.modules
    known = tomllib.loads(JUDGED.read_text("utf-8"))
    modules = {
        path.relative_to(LIBRARY).as_posix(): tests
        for pattern, tests in known["tests"].items()
        for path in sorted(LIBRARY.glob(pattern))
    }
    if unknown := set(wanted) - set(modules):
        parser.error(f"no tests are named in {JUDGED.name} for {', '.join(sorted(unknown))}")
    if options.judge:
        parts = {name: rejudged(part, _judged(known, name)) for name, part in _sections().items()}
        _write(parts)
        sys.exit(NOT_JUDGED in "".join(parts.values()))
    os.chdir(ROOT)
    sys.path.insert(0, str(LIBRARY.parent))
    for name in LOADED_ONCE:
        importlib.import_module(name)
    wrong = []
    for name in wanted or modules:
        print(name, flush=True)
        judged = _judged(known, name)
        found = survivors(modules[name], LIBRARY / name, options.sample, options.seed)
        left, tried = (
            {(mutation.function, mutation.text) for mutation in part}
            for part in (found.left, found.tried)
        )
        wrong += [f"{name}, {f}: {text}: not judged" for f, text in sorted(left - judged.keys())]
        gone = judged.keys() - left
        if len(found.tried) < found.of:
            gone &= tried
        wrong += [f"{name}, {f}: {text}: does not survive" for f, text in sorted(gone)]
        parts = _sections() | {name: section(name, found, judged)}
        _write({n: part for n, part in parts.items() if n in modules})
    sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
