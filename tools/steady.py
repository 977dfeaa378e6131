"""Run chapters under other arithmetics, and list the cells whose outputs differ from the stored.

    python -m tools.steady                               every chapter, on every emulated machine
    python -m tools.steady --on haswell,pentium dana/parity     these machines, this chapter

Each machine is this one with other code paths of torch, MKL, numpy and OpenBLAS, another number of
threads, or other work beside it. Pictures are not compared, all other outputs are, also those of
cells that nbval leaves alone. The exit status is 1 if a cell differs.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import nbformat

from .chapters import ROOT, chapters, notebook_path
from .run import ALONE, execute

STEADY = ROOT / "_build" / "steady"
MACHINES = {
    "own": {},
    "haswell": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "COMPATIBLE",
        "OPENBLAS_CORETYPE": "Haswell",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL",
    },
    "zen": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Zen",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL",
    },
    "skylake": {"ATEN_CPU_CAPABILITY": "avx512", "OPENBLAS_CORETYPE": "SkylakeX"},
    "pentium": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Prescott",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL",
    },
    "threads": dict.fromkeys(ALONE, "2"),
    "busy": {},
}
BUSY = "while True: pass"


def differing(chapter: str, machine: str) -> list[str]:
    """The cells of a chapter that print something else there, with what they print."""
    path = STEADY / machine / f"{chapter}.ipynb"
    try:
        execute(chapter, path, {})
    except Exception as error:
        return [f"{chapter} failed: {error}"]
    stored, now = (outputs(nbformat.read(each, 4)) for each in (notebook_path(chapter), path))
    said = []
    for position, (one, other) in enumerate(zip(stored, now, strict=True)):
        for line, was in zip(other, one, strict=False):
            if line != was:
                said.append(f"{chapter}, cell {position}:\n    - {was}\n    + {line}")
        if len(one) != len(other):
            said.append(f"{chapter}, cell {position}: {len(one)} lines, now {len(other)}")
    return said


def outputs(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """The lines that each code cell prints, pictures and addresses left out."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[line for each in cell.outputs for line in _lines(each)] for cell in cells]


def _lines(output: nbformat.NotebookNode) -> list[str]:
    data = {k: v for k, v in output.get("data", {}).items() if k != "image/png"}
    texts = [output.get("text", ""), *(str(v) for _, v in sorted(data.items()))]
    glued = [str(v) for _, v in sorted(output.get("metadata", {}).items())]
    return re.sub("0x[0-9a-f]{6,}", "0x", "\n".join(texts + glued)).splitlines()


def _become(changed: dict[str, str]) -> None:
    os.environ.update(changed)  # kernels, which are processes of their own, inherit it


def main() -> int:
    """Run what the command line asks for."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.steady", description=__doc__, formatter_class=raw)
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", default=chapters())
    parser.add_argument("--on", default=",".join(MACHINES), help="machines (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="chapters at a time")
    given, differs = parser.parse_args(), 0
    for machine in given.on.split(","):
        beside = [subprocess.Popen([sys.executable, "-c", BUSY])] * (machine == "busy")
        changed = {"TQDM_DISABLE": "1", **ALONE, **MACHINES[machine]}
        with ProcessPoolExecutor(given.jobs, initializer=_become, initargs=(changed,)) as pool:
            found = pool.map(differing, given.chapters, [machine] * len(given.chapters))
            lines = [line for each in found for line in each]
        for process in beside:
            process.kill()
        differs += len(lines)
        print(f"{machine}: {len(lines)} lines differ", *lines, sep="\n  ", flush=True)
    return int(differs > 0)


if __name__ == "__main__":
    sys.exit(main())
