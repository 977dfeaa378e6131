"""An evening ends with one commit of what it renewed, and goes on after whatever ended it."""

import json
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest

from attnmem.lab import experiments
from attnmem.lab import store as storage
from attnmem.lab.store import Outcome

from tools import digests, evening
from tools.chapters import chapters, text_path

NAME, CLAIM = "mahdavi-fig4-heads", "mahdavi-figure-4-heads"
HOUR = ["--hours", "1"]
ROWS, NOTEBOOK = f"{evening.ROWS}/{NAME}/paper.csv", "book/notebooks/part/one.ipynb"


def claims_that_say(verdict, **counts):
    entries = [{"id": "other", "verdict": "left out"}, {"id": CLAIM, "verdict": verdict, **counts}]
    return json.dumps({"claims": entries})


def rows(where):
    runs = [run for run in experiments.runs(NAME, "paper") if where(run)]
    return [(run, Outcome(0.5, 0.1, 1.0, "NVIDIA new", "2", "abc")) for run in runs]


class Book:
    """A repository with a few rows, one chapter and one claim; what each tool does can be set."""

    def __init__(self, root, monkeypatch):
        self.root, self.trained, self.fails, self.said = (
            root,
            rows(lambda run: run.T < 60_000),
            (),
            [],
        )
        shipped = root / evening.ROWS
        monkeypatch.setattr(storage, "SHIPPED", shipped)
        monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(shipped))
        monkeypatch.setattr(digests, "LIST", shipped / storage.DIGESTS)
        for name, path in {"ROOT": root, "BEGUN": root / "_build/evening"}.items():
            monkeypatch.setattr(evening, name, path)
        monkeypatch.setattr(evening, "chapters", lambda: ["part/one"])
        monkeypatch.setattr(evening, "text_path", lambda chapter: root / "one.md")
        monkeypatch.setattr(evening, "notebook_path", lambda chapter: root / NOTEBOOK)
        monkeypatch.setattr(evening.command, "main", self.train)
        self.git_itself, self.run = evening.git, subprocess.run
        monkeypatch.setattr(evening.subprocess, "run", self.tool)
        for part in ("AUTHOR", "COMMITTER"):
            monkeypatch.setenv(f"GIT_{part}_NAME", "A")
            monkeypatch.setenv(f"GIT_{part}_EMAIL", "a@example.org")
        storage.append(rows(lambda run: run.T == 30_000))
        self.write("one.md", f'experiments.table("{NAME}")')
        for name in ("book/claims.md", "book/fragments/totals.md"):
            self.write(name, "made")
        self.write(".gitignore", "_build/\n*.lock\n*.count\n")
        self.write(
            evening.CLAIMS,
            claims_that_say("in part", grade="measured", curves=1, curves_of_the_paper=6),
        )
        self.notebook("one curve")
        self.digests()
        evening.git("init", "--quiet")
        self.commit()

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def notebook(self, said):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(said, id="a")])
        self.write(NOTEBOOK, nbformat.writes(notebook))

    def digests(self):
        paths = sorted((self.root / evening.ROWS).glob("*/*.csv"))
        digests.LIST.write_text("".join(digests.entry(path) + "\n" for path in paths))

    def commit(self):
        evening.git("add", "--all")
        evening.git("commit", "--quiet", "--message", "before")

    def train(self, words):
        assert evening.DIGESTS not in evening.changed(), "rows would name a changed commit"
        self.said.append(words)
        storage.append(self.trained)
        return 1 if "queue" in self.fails else 0

    def tool(self, command, **options):
        """As ``subprocess.run``: git is the real one."""
        if command[0] == "git":
            return self.run(command, **options)
        python, _, name, *words = command
        self.said.append([name, *words])
        if name in self.fails:
            return SimpleNamespace(returncode=1)
        assert python == sys.executable
        if name == "tools.digests":
            self.digests()
        elif name == "tools.run":
            self.notebook("two curves")
        else:
            said = claims_that_say("confirmed", grade="measured", curves=2, seeds=6)
            self.write(evening.CLAIMS, said)
        return SimpleNamespace(returncode=0)


@pytest.fixture
def book(tmp_path, monkeypatch):
    return Book(tmp_path, monkeypatch)


def test_an_evening_is_one_commit_that_can_be_reverted(book, capsys):
    before = evening.git("rev-parse", "HEAD^{tree}")
    assert evening.main(HOUR) == 0
    assert book.said == [
        ["queue", *HOUR],
        ["tools.digests"],
        ["tools.run", "part/one"],
        ["tools.claims"],
    ]
    assert evening.changed() == []
    assert evening.git("log", "--format=%s").splitlines() == [
        "[lab] 48 more trainings",
        "before",
    ]
    files = evening.git("show", "--name-only", "--format=", "HEAD").split()
    renewed = {ROWS, evening.DIGESTS, NOTEBOOK, evening.CLAIMS}
    assert {*files} == renewed
    body = evening.git("show", "--no-patch", "--format=%b", "HEAD").splitlines()
    assert body[:4] == [
        f"{NAME}/paper: 48 to 96 rows",
        "- T = 50000: 0 to 48 of 48 trainings, 0 to 8 of 8 settings",
        "Verdicts that moved: 1",
        f"- {CLAIM}: in part, measured, 1 of 6 curves -> confirmed, measured, 6 seeds, 2 curves",
    ]
    assert body[4] == f"Written by hand, to be read again: why and needs of {CLAIM}"
    assert "git revert takes it back" in capsys.readouterr().out
    evening.git("revert", "--no-edit", "HEAD")
    assert evening.git("rev-parse", "HEAD^{tree}") == before


def test_a_tree_with_changes_is_refused(book):
    """Of a file that it renews, too: what is committed at the end is its own."""
    for name in ("notes.txt", "one.md", NOTEBOOK):
        book.write(name, "mine")
        with pytest.raises(SystemExit, match=f"^uncommitted changes: {name}\nCommit or stash"):
            evening.main(HOUR)
        book.commit()
    assert book.said == []
    book.write("notes.txt", "other")
    book.train = lambda words: 0
    assert evening.main([*HOUR, "--plan"]) == 0, "which changes nothing"


def test_rows_of_another_folder_are_refused(book, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(tmp_path / "rows"))
    with pytest.raises(SystemExit, match=r"^ATTNMEM_MEASUREMENTS names another folder"):
        evening.main(HOUR)


@pytest.mark.parametrize("step", ["queue", "tools.digests", "tools.run", "tools.claims"])
def test_what_ended_goes_on_with_the_same_command(book, step, capsys):
    """Whatever failed, nothing is committed; with no hour left it ends with the rows there are."""
    book.fails = step
    assert evening.main(HOUR) == 1
    assert "all rows are stored" in "".join(capsys.readouterr())
    assert evening.git("log", "--format=%s") == "before\n"
    assert ROWS in evening.changed()
    book.fails, book.trained = (), []
    book.write("notes.txt", "mine")
    with pytest.raises(SystemExit, match=r"^uncommitted changes: notes.txt\n"):
        evening.main(HOUR)
    (book.root / "notes.txt").unlink()
    assert evening.main(["--hours", "0"]) == 0
    assert evening.changed() == []
    assert "[lab] 48 more trainings" in evening.git("log", "--format=%s")
    assert not evening.BEGUN.exists()


def test_what_is_refused_before_a_measurement_leaves_nothing_begun(book, capsys):
    """So a change that is made after it counts as one; and rows need a branch."""
    book.fails, book.trained = "queue", []
    assert evening.main(HOUR) == 1
    assert "rows are stored" not in "".join(capsys.readouterr())
    book.write("book/claims.md", "changed by hand")
    with pytest.raises(SystemExit, match=r"^uncommitted changes: book/claims\.md"):
        evening.main(HOUR)
    evening.git("checkout", "--", "book/claims.md")
    evening.git("checkout", "--quiet", "--detach")
    with pytest.raises(SystemExit, match=r"^no branch is checked out"):
        evening.main(HOUR)


def test_a_hub_gives_rows_in_place_of_the_queue(book):
    """Of all three studies or of those that are named; the end is the same."""
    assert evening.main(["--hub", "--device", "cpu"]) == 0
    run = ["run", *evening.OF_A_HUB, "--profile", "published", "--device", "cpu"]
    assert book.said[0] == run
    assert evening.git("log", "--format=%s").startswith("[lab] 48 more")
    book.trained = []
    assert evening.main(["--hub", "assumptions-gpt2"]) == 0
    assert ["run", "assumptions-gpt2", "--profile", "published"] in book.said


def test_rows_of_assumptions_are_reported_without_curves():
    tests = {"assumptions-vision/published": ([], [])}
    said = evening.report(tests, claims_that_say("not yet"), claims_that_say("confirmed"))
    assert said[:2] == ["assumptions-vision/published: 0 to 0 rows", "Verdicts that moved: 1"]
    assert said[2] == f"- {CLAIM}: not yet -> confirmed"


def test_an_evening_without_rows_commits_nothing(book):
    book.trained = []
    assert evening.main(HOUR) == 0
    assert evening.git("log", "--format=%s") == "before\n"
    assert not evening.BEGUN.exists()


def test_a_notebook_that_looks_the_same_stays(book, monkeypatch):
    """Another machine draws other bytes."""
    monkeypatch.setattr(evening.pictures, "settle", lambda fresh, stored: fresh.update(stored))
    assert evening.main(HOUR) == 0
    assert "one curve" in (book.root / NOTEBOOK).read_text()
    assert NOTEBOOK not in evening.git("show", "--name-only", "--format=", "HEAD")


def test_chapters_that_read_a_study_are_found():
    """Those that name it, and those that read all figures."""
    by_laws = {"training/growth"}
    all_figures = {"front/overview", "foundations/sweeps"}
    assert {"mahdavi/figures-4-and-5"} | by_laws | all_figures <= {*evening.readers([NAME])}
    short = "mahdavi-fig3-short"
    for name in ("mahdavi-fig3", short):
        assert {"training/turns", "mahdavi/heads-take-turns"} <= {*evening.readers([name])}
    assert "training/capacity" in evening.readers(["mahdavi-fig3"])
    assert "training/capacity" not in evening.readers([short])
    assert "dana/associations" not in evening.readers([*experiments.MAHDAVI])
    texts = {chapter: text_path(chapter).read_text() for chapter in chapters()}
    for name in experiments.MAHDAVI:
        named = {chapter for chapter, text in texts.items() if f'"{name}"' in text}
        assert named <= {*evening.readers([name])}
