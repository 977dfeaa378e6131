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
PROBE = """
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
    stored, fresh = nbformat.read(notebook_path(chapter), 4), cleaned(nbformat.read(path, 4))
    pictures.settle(fresh, stored)
    return compared(chapter, stored, fresh)


def compared(
    chapter: str, stored: nbformat.NotebookNode, fresh: nbformat.NotebookNode
) -> tuple[int, list[str]]:
    """The number of cells of code, counted from 0 as nbval does, and what differs in which."""
    cells, stored_cells = _code_cells(fresh), _code_cells(stored)
    reports = []
    for position, (old, new) in enumerate(zip(stored_cells, cells, strict=False)):
        if lines := _changed(old, new):
            first_line = "".join(new.source.strip().splitlines()[:1])
            reports.append("\n    ".join([f"{chapter}, cell {position}: {first_line}", *lines]))
    if not reports and stored != fresh:
        reports.append(f"{chapter}: cells or metadata differ, is the notebook that of this text?")
    return len(cells), reports


def _code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _changed(old: nbformat.NotebookNode, new: nbformat.NotebookNode) -> list[str]:
    """Lines that only one of two cells has."""
    texts = [json.dumps(x, indent=1, sort_keys=True, ensure_ascii=False) for x in (old, new)]
    lines = [text.replace("\\n", "\n").splitlines() for text in texts]
    return [x for x in list(difflib.unified_diff(*lines, n=0))[2:] if not x.startswith("@@")]


@contextlib.contextmanager
def working(count: int) -> Iterator[list[subprocess.Popen]]:
    """So many processes that never wait, as long as this lasts."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
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
    options, n_differ = parser.parse_args(), 0
    names, machines = options.chapters or chapters(), options.on.split(",")
    for asked, available in ((names, chapters()), (machines, MACHINES)):
        if missing := [name for name in asked if name not in available]:
            parser.error(f"no {', '.join(missing)}; there are: {', '.join(available)}")
    for machine in machines:
        changed = {"TQDM_DISABLE": "1", **ALONE, **MACHINES[machine]}
        probe = [sys.executable, "-c", PROBE]
        environment = {**os.environ, **changed}
        libraries = subprocess.check_output(probe, env=environment, encoding="utf-8")
        print(f"{machine}: {libraries.strip()}", flush=True)
        begin = {"initializer": _become, "initargs": (changed,)}
        n_loops = options.jobs if machine == "busy" else 0
        with working(n_loops), ProcessPoolExecutor(options.jobs, **begin) as pool:
            results = list(pool.map(differing, names, [machine] * len(names)))
        for _, reports in results:
            n_differ += len(reports)
            for report in reports:
                print(f"  {report}", flush=True)
    n_cells = sum(count for count, _ in results)
    compared_cells = f"{len(names)} chapters, {n_cells} cells of code, {len(machines)} machines"
    print(f"compared {compared_cells}: {n_differ} outputs differ")
    return 1 if n_differ else 0


if __name__ == "__main__":
    sys.exit(main())
