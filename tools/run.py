"""Run chapters with papermill: from their text sources to executed notebooks, in place.

    python -m tools.run                         every chapter that changed since it last ran
    python -m tools.run --force                 every chapter, renewing all pictures
    python -m tools.run mahdavi/poor-queries -p heads 8
                                                one chapter with another parameter, into _build/runs
    python -m tools.run training/growth -p device cuda -p minutes 10
                                                its figures trained again, and what came out

A chapter replaces its notebook only when it ran to the end. Chapters run side by side, each with
one thread; one that fails is named with its traceback, and the others finish.
"""

import argparse
import base64
import hashlib
import io
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import nbformat
import papermill
import yaml
from PIL import Image

from . import pictures
from .chapters import ROOT, chapters, notebook_path, parameters, source_notebook, text_path

RUNS, STAMPS = ROOT / "_build" / "runs", ROOT / "_build" / "stamps"
# What every chapter reads.
READ = ["_config.yml", "locks/constraints.txt", "tools/chapters.py", "tools/run.py"]
READ += ["book/fragments/install.ipy"]
COLOURS = 128  # of a stored picture: no visible loss, about a third of the bytes
ALONE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
KEPT = "  (only pictures differ: the stored ones stay, --force renews them)"


def run(chapter: str, values: dict[str, object], force: bool = False) -> str:
    """Run one chapter and say how long it took; without parameter values, replace its notebook.

    The first run of an unedited chapter in a fresh copy keeps the stored notebook if nothing but
    pictures differ: their bytes depend on the processor. With ``force`` it is replaced.
    """
    start, read = time.perf_counter(), _inputs(chapter)  # what is edited from here on is not run
    target, stamp, scratch = notebook_path(chapter), _stamp(chapter), RUNS / f"{chapter}.ipynb"
    for path in (stamp, target):
        path.parent.mkdir(parents=True, exist_ok=True)
    execute(chapter, scratch, values)
    kept = False
    if not values:
        nbformat.write(cleaned(nbformat.read(scratch, 4)), scratch)
        fresh = not (force or stamp.exists() or _edited(chapter))
        kept = fresh and target.exists() and _only_pictures_differ(scratch, target)
        if not kept:
            scratch.replace(target)
        stamp.write_text(f"{read} {_digest([target])}", "utf-8")
    seconds = f"{time.perf_counter() - start:5.1f} s"
    return seconds + KEPT if kept else seconds


def execute(chapter: str, path: Path, values: dict[str, object]) -> None:
    """Run a chapter's text by papermill, with these parameters, into a notebook."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(source_notebook(chapter), path)
    options = {"coalesce_streams": True, "store_widget_state": False, "progress_bar": False}
    options |= {"kernel_name": "python3", "extra_arguments": ["--log-level=50"]}
    options |= {"cwd": str(notebook_path(chapter).parent)}  # where nbval runs it too
    try:
        papermill.execute_notebook(path, path, values, **options)
    except RuntimeError as error:  # papermill's own errors are others
        if "before replying" not in str(error):
            raise
        papermill.execute_notebook(path, path, values, **options)  # its port was another's


def trained(chapter: str) -> tuple[str, int]:
    """What the last run with other parameters trained, in its own words, and how many rows."""
    cells = nbformat.read(RUNS / f"{chapter}.ipynb", 4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    reports = [output for output in outputs if "trained" in output.get("metadata", {})]
    text = "\n\n".join(output.data["text/plain"] for output in reports)
    return text, sum(output.metadata["trained"] for output in reports)


def _edited(chapter: str) -> bool:
    """Whether the chapter's text or the library differ from the last commit, or none is known."""
    command = ["git", "status", "--porcelain", "--", "lib", str(text_path(chapter))]
    try:
        return bool(subprocess.check_output(command, cwd=ROOT, stderr=subprocess.DEVNULL))
    except (OSError, subprocess.CalledProcessError):  # no git on this machine, or no repository
        return True


def _only_pictures_differ(fresh_path: Path, stored_path: Path) -> bool:
    """And these show the same."""
    fresh, stored = nbformat.read(fresh_path, 4), nbformat.read(stored_path, 4)
    pictures.settle(fresh, stored)
    return fresh == stored and fresh_path.read_bytes() != stored_path.read_bytes()


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop what changes from run to run and says nothing: time stamps, versions, empty tags."""
    notebook.metadata.get("language_info", {}).pop("version", None)
    notebook.metadata.pop("papermill", None)
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                image, small = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
                image = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
                image.save(small, format="png", optimize=True)
                coded = base64.b64encode(small.getvalue()).decode() + "\n"
                output.data["image/png"] = min(png, coded, key=len)
    return notebook


def _stamp(chapter: str) -> Path:
    """It holds digests of what the chapter last read and of the notebook that it wrote."""
    return STAMPS / f"{chapter}.sha256"


def _up_to_date(chapter: str) -> bool:
    stamp = _stamp(chapter)
    digests = f"{_inputs(chapter)} {_digest([notebook_path(chapter)])}"
    return stamp.exists() and stamp.read_text("utf-8") == digests


def _inputs(chapter: str) -> str:
    """A digest of all that a run of the chapter reads: its text, the library, data and tools."""
    endings = {".py", ".toml", ".csv"}
    library = [path for path in (ROOT / "lib").rglob("*.*") if path.suffix in endings]
    return _digest([text_path(chapter), *(ROOT / name for name in READ), *sorted(library)])


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes() if path.exists() else b"missing")
    return digest.hexdigest()


def refusal(chapter: str, values: dict[str, object]) -> str:
    """Why nothing would be trained with these values, which name a device, and what to say."""
    from attnmem.lab import experiments

    quick = "on a CPU say `-p device cpu -p profile quick`; to make, `DEVICE=cpu PROFILE=quick`"
    try:
        device = experiments.choose_device(str(values["device"]))
    except ValueError as error:
        return f"{error}; {quick}"
    profile = {**parameters(chapter), **values}.get("profile")
    if (device, profile) == ("cpu", "paper"):
        return f"profile: got 'paper', which is trained on a GPU only; {quick}"
    return ""


def _run_all(names: list[str], arguments: argparse.Namespace) -> int:
    """Run chapters side by side, report each as it ends; returns the number of failures."""
    failures, jobs = {}, max(1, min(arguments.jobs, len(names)))
    print(f"running {len(names)} chapters, {jobs} at a time", flush=True)
    with ProcessPoolExecutor(jobs) as pool:
        running = {pool.submit(run, n, arguments.values, arguments.force): n for n in names}
        for done, future in enumerate(as_completed(running), start=1):
            name, error = running[future], future.exception()
            outcome = "FAILED" if error else future.result()
            print(f"  [{done}/{len(names)}] {name:45} {outcome}", flush=True)
            if error:
                failures[name] = error
    for name, error in failures.items():
        print(f"\n{text_path(name).relative_to(ROOT)} failed:\n{error}", file=sys.stderr)
    return len(failures)


def _check_values(parser: argparse.ArgumentParser, chapter: str, values: dict[str, object]) -> None:
    """End with an error where a chapter has no such parameter, or would train nothing."""
    names = parameters(chapter)
    for name in values.keys() - names:
        listed = ", ".join(names) or "none"
        parser.error(f"{chapter} has no parameter {name!r}; it has: {listed}")
    if "device" in values and (reason := refusal(chapter, values)):
        parser.error(reason)


def main() -> int:
    """Run what the command line asks for; the exit status is 1 if a chapter failed."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.run", description=__doc__, formatter_class=raw)
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help="e.g. foundations/attention")
    renewed = "run even what did not change, renew pictures"
    parser.add_argument("--force", action="store_true", help=renewed)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="chapters at a time")
    pair = {"nargs": 2, "metavar": ("NAME", "VALUE"), "dest": "values"}
    parser.add_argument("-p", action="append", default=[], **pair)
    arguments = parser.parse_args()
    values = arguments.values = {name: yaml.safe_load(value) for name, value in arguments.values}
    for chapter in arguments.chapters:
        if chapter not in chapters():
            parser.error(f"no chapter {chapter!r}; there are: {', '.join(chapters())}")
    names = arguments.chapters or chapters()
    if values:  # papermill would run on with a mistyped name
        for chapter in names:
            _check_values(parser, chapter, values)
    if not (arguments.force or values):
        changed = [name for name in names if not _up_to_date(name)]
        if skipped := len(names) - len(changed):
            print(f"{skipped} chapters unchanged since they last ran")
        names = changed
    os.environ.update({"TQDM_DISABLE": "1", **ALONE})
    if named := os.environ.get("ATTNMEM_MEASUREMENTS"):  # chapters run in folders of their own
        os.environ["ATTNMEM_MEASUREMENTS"] = str(Path(named).expanduser().absolute())
    failed = _run_all(names, arguments) if names else 0
    if values and not failed:
        print(f"notebooks with other parameters are in {RUNS.relative_to(ROOT)}")
    if "device" in values and not failed:
        for chapter in names:
            text, rows = trained(chapter)
            print(f"\n{chapter}\n\n{text or 'nothing was trained'}")
            if rows == 0:
                failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
