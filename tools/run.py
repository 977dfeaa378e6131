"""Run chapters with papermill: from their text sources to executed notebooks, in place.

    python tools/run.py                         every chapter that changed since it last ran
    python tools/run.py --force                 every chapter, renewing all pictures
    python tools/run.py mahdavi/poor-queries -p heads 8
                                                one chapter with another parameter, into _build/runs

A chapter runs in a scratch folder and replaces its notebook only when it ran to the end. In a fresh
copy the notebook stays if only pictures differ, as they do between processors. Chapters
run side by side, each with one thread; one that fails is named with its traceback, and the others
finish.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import nbformat
import papermill
import yaml
from PIL import Image

from chapters import (
    ROOT,
    chapters,
    inputs,
    notebook_path,
    parameters,
    source_notebook,
    stamp,
    text_path,
)

RUNS, STAMPS = ROOT / "_build" / "runs", ROOT / "_build" / "stamps"
COLOURS = 128  # of a stored picture: no visible loss, about a third of the bytes
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Done(NamedTuple):
    """How long a chapter took, and whether its stored notebook stays although pictures differ."""

    seconds: float
    kept: bool


def run(chapter: str, values: dict[str, object], force: bool = False) -> Done:
    """Run one chapter; without parameter values, replace its notebook.

    The first run of an unedited chapter in a fresh copy keeps the stored notebook if nothing but
    pictures differ: their bytes depend on the processor. With ``force`` it is replaced.
    """
    start, read = time.perf_counter(), inputs(chapter)  # what is edited from here on is not run
    foreign = not (force or _stamp_file(chapter).exists() or _edited(chapter))
    scratch = RUNS / f"{chapter}.ipynb"
    source = scratch.with_suffix(".source.ipynb")
    scratch.parent.mkdir(parents=True, exist_ok=True)
    target = notebook_path(chapter)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(source_notebook(chapter), source)
    _execute(source, scratch, values, target.parent)  # where nbval runs it too
    kept = False
    if not values:
        clean = scratch.with_suffix(".clean.ipynb")
        nbformat.write(cleaned(nbformat.read(scratch, 4)), clean)
        kept = foreign and target.exists() and only_pictures_differ(clean, target)
        if not kept:
            clean.replace(target)
        _stamp_file(chapter).parent.mkdir(parents=True, exist_ok=True)
        _stamp_file(chapter).write_text(stamp(chapter, read), "utf-8")
    return Done(time.perf_counter() - start, kept)


def _execute(source: Path, scratch: Path, values: dict[str, object], folder: Path) -> None:
    """Run a notebook; once more if its kernel found one of its ports taken by another's."""
    for last in (False, True):
        try:
            papermill.execute_notebook(
                source,
                scratch,
                values,
                cwd=str(folder),
                kernel_name="python3",
                progress_bar=False,
                coalesce_streams=True,
                store_widget_state=False,
                extra_arguments=["--log-level=40"],
            )
            return
        except RuntimeError as error:  # papermill's own errors are others
            if last or "before replying" not in str(error):
                raise


def _edited(chapter: str) -> bool:
    """Whether the chapter's text or the library differ from the last commit, or there is none."""
    command = ["git", "status", "--porcelain", "--", "lib", str(text_path(chapter))]
    status = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    return status.returncode != 0 or bool(status.stdout)


def only_pictures_differ(one: Path, other: Path) -> bool:
    """Whether two notebooks differ, and are the same without their pictures."""
    if one.read_bytes() == other.read_bytes():
        return False
    notebooks = [nbformat.read(path, 4) for path in (one, other)]
    for notebook in notebooks:
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                output.get("data", {}).pop("image/png", None)
    return notebooks[0] == notebooks[1]


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop what changes from run to run and says nothing: time stamps, versions, empty tags."""
    notebook.metadata.pop("papermill", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = _smaller(data["image/png"])
    return notebook


def _smaller(png: str) -> str:
    """The same picture with a palette."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    out = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(out, format="png", optimize=True)
    return min(png, base64.b64encode(out.getvalue()).decode() + "\n", key=len)


def _stamp_file(chapter: str) -> Path:
    return STAMPS / f"{chapter}.sha256"


def up_to_date(chapter: str) -> bool:
    """Whether nothing changed since the chapter last ran here."""
    path = _stamp_file(chapter)
    return path.exists() and path.read_text("utf-8") == stamp(chapter, inputs(chapter))


def run_all(names: list[str], values: dict[str, object], jobs: int, force: bool) -> int:
    """Run chapters side by side, report each as it ends; returns the number of failures."""
    failures = []
    with ProcessPoolExecutor(jobs) as pool:
        running = {pool.submit(run, name, values, force): name for name in names}
        for done, future in enumerate(as_completed(running), start=1):
            name, error = running[future], future.exception()
            outcome = "FAILED" if error else _said(future.result())
            print(f"  [{done}/{len(names)}] {name:45} {outcome}", flush=True)
            if error:
                failures.append((name, error))
    for name, error in failures:
        print(f"\n{text_path(name).relative_to(ROOT)} failed:\n{error}", file=sys.stderr)
    return len(failures)


def _said(done: Done) -> str:
    kept = "  (only pictures differ: the stored ones stay, --force renews them)" * done.kept
    return f"{done.seconds:5.1f} s{kept}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help="e.g. foundations/attention")
    parser.add_argument(
        "--force", action="store_true", help="run even what did not change, renew pictures"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="chapters at a time")
    parser.add_argument(
        "-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="values"
    )
    arguments = parser.parse_args()
    arguments.values = {name: yaml.safe_load(value) for name, value in arguments.values}
    _refuse_unknown(parser, arguments)
    return arguments


def _refuse_unknown(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Papermill runs on with a mistyped parameter; this does not."""
    known = chapters()
    for name in arguments.chapters:
        if name not in known:
            parser.error(f"no chapter {name!r}; there are: {', '.join(known)}")
    for chapter in arguments.chapters or known:
        for name in arguments.values:
            if name not in parameters(chapter):
                names = ", ".join(parameters(chapter)) or "none"
                parser.error(f"{chapter} has no parameter {name!r}; it has: {names}")


def main() -> int:
    """Run what the command line asks for; the exit status is 1 if a chapter failed."""
    arguments = _arguments()
    names = arguments.chapters or chapters()
    if not (arguments.force or arguments.values):
        skipped = [name for name in names if up_to_date(name)]
        names = [name for name in names if name not in skipped]
        if skipped:
            print(f"{len(skipped)} chapters unchanged since they last ran")
    if not names:
        return 0
    os.environ.update({"TQDM_DISABLE": "1", **ONE_THREAD})
    if named := os.environ.get("ATTNMEM_MEASUREMENTS"):  # chapters run in folders of their own
        os.environ["ATTNMEM_MEASUREMENTS"] = str(Path(named).expanduser().absolute())
    jobs = max(1, min(arguments.jobs, len(names)))
    print(f"running {len(names)} chapters, {jobs} at a time", flush=True)
    failed = run_all(names, arguments.values, jobs, arguments.force)
    if arguments.values and not failed:
        print(f"notebooks with other parameters are in {RUNS.relative_to(ROOT)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
