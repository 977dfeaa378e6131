"""Some hours of a GPU, or of a CPU, or with a hub: measure, then renew the book, in one commit.

    python -m tools.evening --hours 3                              on a GPU, eight streams
    python -m tools.evening --hours 48 --device cpu --workers 2
    python -m tools.evening --hours 3 --plan                       only say what would be trained
    python -m tools.evening --hours 0                              train no more, end what was begun
    python -m tools.evening --hub                                  fetch, and test what was fetched

What it does is `attnmem queue`, with a hub `attnmem run`, and at the end: digests, the chapters
that read new rows, the claims page, a report, a commit of these. Whenever it was ended before, the
same command goes on.
``git revert`` takes the commit back.
"""

import itertools
import json
import re
import subprocess
import sys

import nbformat

from attnmem import __main__ as command
from attnmem.lab import store
from attnmem.lab.experiments import STUDIES
from attnmem.lab.store import Row
from attnmem.papers import claims

from . import pictures
from .chapters import ROOT, chapters, notebook_path, text_path

BEGUN = ROOT / "_build" / "evening"  # there from the start to the commit
ROWS, CLAIMS = "lib/attnmem/measurements", "book/extra/book/claims.json"
DIGESTS = f"{ROWS}/{store.DIGESTS}"
# What it changes and commits: no other file may differ from the last commit.
RENEWED = (ROWS, "book/notebooks", "book/claims.md", "book/fragments", "book/extra/book")
OF_A_HUB = ["assumptions-vision", "assumptions-bert", "assumptions-gpt2"]
# How a chapter reads all figures without naming them.
READS_ALL = re.compile(r"\blaws\.\w+\(|\bexperiments\.(?:MAHDAVI|EXPERIMENTS|STUDIES)\b(?!\[)")
AGAIN = "the same command goes on from here"
NO_MORE = "`make gpu-queue HOURS=0` measures no more and ends with the rows that are there"


def git(*words: str, **options: str) -> str:
    """What git says in the repository; its errors are raised."""
    call = {"cwd": ROOT, "encoding": "utf-8", "check": True, "stdout": subprocess.PIPE}
    return subprocess.run(["git", *words], **call, **options).stdout


def changed() -> list[str]:
    """The files that differ from the last commit, or that git does not know."""
    entries = git("status", "--porcelain", "--no-renames", "-z", "-uall").split("\0")
    return [entry[3:] for entry in entries if entry]


def begin() -> None:
    """Refuse a tree with changes that would be lost among those of the evening."""
    if store.writable_root().resolve() != store.SHIPPED.resolve():
        sys.exit("ATTNMEM_MEASUREMENTS names another folder: unset it, the rows are committed here")
    git("var", "GIT_COMMITTER_IDENT")  # an error now, rather than after the evening
    if git("rev-parse", "--abbrev-ref", "HEAD").strip() == "HEAD":
        sys.exit(
            "no branch is checked out, on which the rows could be committed: git switch to one"
        )
    others = [name for name in changed() if not (BEGUN.exists() and name.startswith(RENEWED))]
    if others:
        names = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        sys.exit(f"uncommitted changes: {names}\nCommit or stash them (git stash -u) first.")
    git("checkout", "HEAD", "--", DIGESTS)  # renewed at the end; rows would name a changed commit
    BEGUN.parent.mkdir(exist_ok=True)
    BEGUN.touch()


def readers(names: list[str]) -> list[str]:
    """The chapters that read rows of some studies, or may do so."""
    found = []
    for chapter in chapters():
        text = text_path(chapter).read_text("utf-8")
        if READS_ALL.search(text) or any(re.search(rf"\b{n}\b(?!-)", text) for n in names):
            found.append(chapter)
    return found


def new_rows() -> dict[str, tuple[list[Row], list[Row]]]:
    """Of each study with new rows, those of the published profile before and now."""
    listed = git("show", f"HEAD:{DIGESTS}").splitlines()
    counts = {file: int(count) for file, count, _ in map(str.split, listed)}
    found = {}
    for path in sorted(store.SHIPPED.glob("*/*.csv")):
        rows = [*store.read(path).values()]
        before = counts.get(f"{path.parent.name}/{path.name}", 0)
        if len(rows) > before:
            found[f"{path.parent.name}/{path.stem}"] = rows[:before], rows
    return found


def report(rows: dict[str, tuple[list[Row], list[Row]]], before: str, after: str) -> list[str]:
    """What new rows, and ``claims.json`` before and after them, say."""
    lines = []
    for file, (old, new) in rows.items():
        name, _, profile = file.partition("/")
        study = STUDIES[name]
        lines.append(f"{file}: {len(old)} to {len(new)} rows")
        grid = study.configs(profile) if study.curves else []
        for curve in dict.fromkeys(map(study.curve_of, grid)):
            runs = {run.key: run for run in grid if study.curve_of(run) == curve}
            had, have = ([run for run, _ in part if run.key in runs] for part in (old, new))
            if len(have) > len(had):
                settings, *counts = (
                    len({run.cell for run in part}) for part in (runs.values(), had, have)
                )
                trainings = f"{len(had)} to {len(have)} of {len(runs)} trainings"
                said = f"{counts[0]} to {counts[1]} of {settings} settings"
                lines.append(f"- {study.curves} = {curve}: {trainings}, {said}")
    old_words, new_words = (
        {claim["id"]: _word(claim) for claim in json.loads(text)["claims"]}
        for text in (before, after)
    )
    moved = [key for key in new_words if old_words.get(key) != new_words[key]]
    lines.append(f"Verdicts that moved: {len(moved) or 'none'}")
    lines += [f"- {key}: {old_words.get(key)} -> {new_words[key]}" for key in moved]
    names = {file.partition("/")[0] for file in rows}
    asked = [
        key
        for key, claim in claims().items()
        if (claim.why or claim.needs) and names & {row.partition("/")[0] for row in claim.rows}
    ]
    if asked:
        lines.append(f"Written by hand, to be read again: why and needs of {', '.join(asked)}")
    return lines


def _word(claim: dict) -> str:
    """The verdict of a claim, with its grade, and of how many seeds and curves."""
    words = [claim["verdict"], *([claim["grade"]] if "grade" in claim else [])]
    for unit in ("seeds", "curves"):
        if unit in claim:
            of = claim.get(f"{unit}_of_the_paper")
            words.append(f"{claim[unit]} of {of} {unit}" if of else f"{claim[unit]} {unit}")
    return ", ".join(words)


def end() -> int:
    """Renew what depends on the new rows, say what changed, and commit it."""
    rows = new_rows()
    if not rows:
        BEGUN.unlink(missing_ok=True)
        print("no new rows, so nothing changed")
        return 0
    for file, (_, new) in rows.items():
        print(f"{file}: {len(new)} rows", flush=True)
    git("add", "--", ROWS)  # else the digests of a new file would be missing
    names = readers([file.partition("/")[0] for file in rows])
    for words in (["digests"], ["run", *names], ["claims"]):
        words[0] = f"tools.{words[0]}"
        if subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=False).returncode:
            print(f"{words[0]} failed: all rows are stored, nothing is committed. {AGAIN}")
            return 1
    for chapter in names:
        _keep_pictures(chapter)
    before, after = git("show", f"HEAD:{CLAIMS}"), (ROOT / CLAIMS).read_text("utf-8")
    count = sum(len(new) - len(old) for old, new in rows.values())
    kinds = sorted({STUDIES[file.partition("/")[0]].kind for file in rows})
    subject = f"[lab] {count} more {' and '.join(kinds)}"
    text = "\n".join([subject, "", *report(rows, before, after)])
    git("add", "--all", "--", *RENEWED)
    git("commit", "--quiet", "--file", "-", input=text + "\n")
    BEGUN.unlink()
    print(f"\n{text}\n\nCommitted as {git('rev-parse', '--short', 'HEAD').strip()}, with:")
    print(git("show", "--stat=100", "--format=", "HEAD"), "git revert takes it back", sep="")
    return 0


def _keep_pictures(chapter: str) -> None:
    """The committed notebook where a new one differs by how this machine draws, and no more."""
    path = notebook_path(chapter)
    name = path.relative_to(ROOT).as_posix()
    fresh, stored = nbformat.read(path, 4), nbformat.reads(git("show", f"HEAD:{name}"), 4)
    pictures.settle(fresh, stored)
    if fresh == stored:
        git("checkout", "HEAD", "--", name)


def main(words: list[str]) -> int:
    """Plan only, or measure until the hours are over and renew the book."""
    if "--plan" in words:
        return command.main(["queue", *words])
    begin()
    if words[:1] == ["--hub"]:
        options = [*itertools.dropwhile(lambda word: word[:1] != "-", words[1:])]
        names = words[1 : len(words) - len(options)] or OF_A_HUB
        measure = ["run", *names, "--profile", "published", *options]
    else:
        measure = ["queue", *words]
    try:
        status = command.main(measure)
    finally:
        if not changed():  # nothing was begun
            BEGUN.unlink(missing_ok=True)
    if status and BEGUN.exists():
        print(f"\nended early, all rows are stored: {AGAIN}; {NO_MORE}", file=sys.stderr)
    return status or end()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"{error}\nall rows are stored: {AGAIN}")
