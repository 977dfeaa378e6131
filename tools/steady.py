"""Run chapters under other arithmetics, and list the cells whose outputs differ from the stored.

    python -m tools.steady                               every chapter, on every emulated machine
    python -m tools.steady --on haswell,pentium dana/parity     these machines, this chapter

Each machine is this one with other code paths of torch, MKL, numpy and OpenBLAS, another number of
threads, or other work beside it. What each library then is, with a digest of what it computes, is
printed first: a switch that this processor does not have leaves the digest of ``own``. All that
``make book`` would commit is compared, pictures by thumbnails. The exit status is 1 if a cell
differs.
"""

import argparse
import contextlib
import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import nbformat

from . import pictures
from .chapters import ROOT, chapters, notebook_path
from .run import ALONE, cleaned, execute

STEADY = ROOT / "_build" / "steady"
# Names of numpy's features differ by version; those that it does not know it leaves alone.
NO_AVX512 = "X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
NO_AVX = f"{NO_AVX512} X86_V3 AVX2 FMA3"
SWITCHES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES")
MACHINES = {
    "own": {},
    "haswell": dict(zip(SWITCHES, ("avx2", "COMPATIBLE", "Haswell", NO_AVX512), strict=True)),
    "zen": dict(zip(SWITCHES, ("avx2", "AVX2", "Zen", NO_AVX512), strict=True)),
    "skylake": dict(zip(SWITCHES, ("avx512", "AVX512", "SkylakeX", ""), strict=True)),
    "nehalem": dict(zip(SWITCHES, ("default", "COMPATIBLE", "Nehalem", NO_AVX), strict=True)),
    "pentium": dict(zip(SWITCHES, ("default", "SSE4_2", "Prescott", NO_AVX), strict=True)),
    "threads": dict.fromkeys(ALONE, "2"),
    "busy": {},
}
BUSY = "while True: pass"
SEEN = """
import hashlib, warnings
import numpy, threadpoolctl, torch
def digest(*found):
    return hashlib.sha256(b"".join(numpy.asarray(x).tobytes() for x in found)).hexdigest()[:6]
x = numpy.sin(numpy.arange(40000.0)).reshape(200, 200)
t = torch.from_numpy(x)
blas = {each["architecture"] for each in threadpoolctl.threadpool_info() if "architecture" in each}
print("torch", torch.backends.cpu.get_cpu_capability(), digest(t.softmax(1)), end=", ")
print("MKL", digest(t @ t, torch.linalg.svdvals(t)), end=", ")
print("OpenBLAS", *sorted(filter(None, blas)), digest(x @ x, numpy.linalg.svd(x)[1]), end=", ")
print("numpy", digest(numpy.exp(x), numpy.tanh(x)), end=", ")
print(torch.get_num_threads(), "threads" if torch.get_num_threads() > 1 else "thread")
"""


def differing(chapter: str, machine: str) -> tuple[int, list[str]]:
    """How many cells of code a chapter has, and those that put out something else there."""
    path = STEADY / machine / f"{chapter}.ipynb"
    try:
        execute(chapter, path, {})
    except Exception as error:
        return 0, [f"{chapter} failed: {error}"]
    stored, now = nbformat.read(notebook_path(chapter), 4), cleaned(nbformat.read(path, 4))
    pictures.settle(now, stored)
    return compared(chapter, stored, now)


def compared(
    chapter: str, stored: nbformat.NotebookNode, now: nbformat.NotebookNode
) -> tuple[int, list[str]]:
    """The number of cells of code, counted from 0 as nbval does, and what differs in which."""
    said, cells = [], [cell for cell in now.cells if cell.cell_type == "code"]
    before = [cell for cell in stored.cells if cell.cell_type == "code"]
    for position, (one, other) in enumerate(zip(before, cells, strict=False)):
        if lines := _changed(one, other):
            begins = other.source.strip().splitlines()[:1]
            said.append("\n    ".join([f"{chapter}, cell {position}: {' '.join(begins)}", *lines]))
    if not said and stored != now:
        said.append(f"{chapter}: cells or metadata differ, is the notebook that of this text?")
    return len(cells), said


def _changed(one: nbformat.NotebookNode, other: nbformat.NotebookNode) -> list[str]:
    """Lines that only one of two cells has."""
    texts = [json.dumps(x, indent=1, sort_keys=True, ensure_ascii=False) for x in (one, other)]
    lines = [text.replace("\\n", "\n").splitlines() for text in texts]
    return [x for x in list(difflib.unified_diff(*lines, n=0))[2:] if not x.startswith("@@")]


@contextlib.contextmanager
def working(count: int) -> Iterator[list[subprocess.Popen]]:
    """So many processes that never wait, as long as this lasts."""
    beside = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield beside
    finally:
        for process in beside:
            process.kill()


def _become(changed: dict[str, str]) -> None:
    os.environ.update(changed)  # kernels, which are processes of their own, inherit it


def main() -> int:
    """Run what the command line asks for."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.steady", description=__doc__, formatter_class=raw)
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help="e.g. foundations/attention")
    parser.add_argument("--on", default=",".join(MACHINES), help="machines (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="chapters at a time")
    given, known, differ = parser.parse_args(), chapters(), 0
    names, machines = given.chapters or known, given.on.split(",")
    for asked, there in ((names, known), (machines, MACHINES)):
        if missing := [name for name in asked if name not in there]:
            parser.error(f"no {', '.join(missing)}; there are: {', '.join(there)}")
    for machine in machines:
        changed = {"TQDM_DISABLE": "1", **ALONE, **MACHINES[machine]}
        environment, loops = {**os.environ, **changed}, given.jobs * (machine == "busy")
        look = [sys.executable, "-c", SEEN]
        seen = subprocess.check_output(look, env=environment, encoding="utf-8")
        print(f"{machine}: {seen.strip()}", flush=True)
        begin = {"initializer": _become, "initargs": (changed,)}
        with working(loops), ProcessPoolExecutor(given.jobs, **begin) as pool:
            found = list(pool.map(differing, names, [machine] * len(names)))
        lines = [line for _, each in found for line in each]
        differ += len(lines)
        print(*(f"  {line}" for line in lines), sep="\n", end="\n" * bool(lines), flush=True)
    cells = sum(count for count, _ in found)
    what = f"{len(names)} chapters, {cells} cells of code, {len(machines)} machines"
    print(f"compared {what}: {differ} outputs differ")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
