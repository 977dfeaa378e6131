"""The chapter runner on a small book of its own."""

import base64
import io
import os
import re
import shutil
import subprocess
import sys

import nbformat
import PIL.Image
import pytest

from tools.chapters import ROOT

HEADER = "---\nkernelspec:\n  display_name: Python 3\n  language: python\n  name: python3\n---\n\n"


def chapter(*cells):
    code = "".join(f"\n```{{code-cell}} ipython3\n{cell}\n```\n" for cell in cells)
    return f"{HEADER}# A chapter\n{code}"


GOOD = chapter(":tags: [parameters]\n\nsize = 3", 'print("size", size)')
DRAWN = """\
import base64
from IPython.display import Image
print("drawn")
Image(data=base64.b64decode("PICTURE"))"""


class Book:
    """A copy of the tools, with chapters of its own."""

    def __init__(self, root):
        self.root = root
        for folder in ("tools", "book/fragments"):
            shutil.copytree(ROOT / folder, root / folder)
        for name in ("_config.yml", "locks/constraints.txt"):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        (root / "lib").mkdir()

    def write(self, name, text):
        path = self.root / f"book/text/part/{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def notebook(self, name):
        return self.root / f"book/notebooks/part/{name}.ipynb"

    def said(self, name, folder="book/notebooks"):
        """What the chapter's notebook holds as output."""
        cells = nbformat.read(self.root / folder / f"part/{name}.ipynb", 4).cells
        return [o.text for c in cells if c.cell_type == "code" for o in c.outputs if "text" in o]

    def run(self, *arguments):
        command = [sys.executable, "-m", "tools.run", *arguments]
        options = {"cwd": self.root, "env": {**os.environ, "PYTHONPATH": ""}, "text": True}
        return subprocess.run(command, capture_output=True, **options)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """A chapter that works, one that does not, and the templates."""
    book = Book(tmp_path_factory.mktemp("book"))
    book.write("good", GOOD)
    book.write("bad", chapter('raise RuntimeError("this chapter is broken")'))
    for name in ("chapter", "record"):
        book.write(name, (ROOT / f"book/fragments/{name}.md").read_text())
    return book, book.run()


@pytest.fixture
def book(first_run):
    return first_run[0]


def test_a_failing_chapter_is_named(first_run):
    book, done = first_run
    assert done.returncode == 1
    assert re.search(r"part/bad +FAILED", done.stdout)
    assert "book/text/part/bad.md failed" in done.stderr
    assert "RuntimeError: this chapter is broken" in done.stderr
    assert book.said("good") == ["size 3\n"]
    assert not book.notebook("bad").exists()
    assert book.said("chapter") == ["examples: 29\n", "no answer yet\n"]
    record = book.notebook("record").read_text()
    assert "**Stored.** 385 of 385 trainings" in record
    assert "image/png" in record


def test_a_notebook_changes_as_its_chapter_does(book):
    notebook = book.notebook("good")
    before = notebook.read_bytes()
    assert "1 chapters unchanged" in book.run("part/good").stdout
    assert "[1/1] part/good" in book.run("part/good", "--force").stdout
    assert book.run("part/good", "-p", "size", "5").returncode == 0
    assert notebook.read_bytes() == before
    assert book.said("good", "_build/runs") == ["size 5\n"]
    notebook.write_bytes(before.replace(b"size 3", b"size 4"))
    assert "[1/1] part/good" in book.run("part/good").stdout
    assert notebook.read_bytes() == before
    book.write("good", GOOD + "\n```{code-cell} ipython3\n1 / 0\n```\n")
    assert book.run("part/good").returncode == 1
    assert notebook.read_bytes() == before
    book.write("good", GOOD)


def test_an_edit_during_a_run_is_run_again(book, monkeypatch):
    """And a chapter reads the rows of whoever runs it, though it runs in another folder."""
    rows = 'import os\nprint(os.environ["ATTNMEM_MEASUREMENTS"])'
    edit = "_ = open('../../text/part/edited.md', 'a').write('More.')"
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", "again")
    book.write("edited", chapter(rows, edit) + "\n")
    for _ in range(2):
        assert "[1/1] part/edited" in book.run("part/edited").stdout
    assert book.said("edited") == [f"{book.root / 'again'}\n"]


def picture(colour):
    out = io.BytesIO()
    PIL.Image.new("RGB", (9, 9), colour).save(out, format="png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def test_a_fresh_copy_keeps_pictures_that_look_alike(book):
    book.write("drawn", chapter(DRAWN.replace("PICTURE", picture("#a00000"))))
    assert book.run("part/drawn").returncode == 0
    notebook = book.notebook("drawn")
    ours = notebook.read_text()
    stored = '"image/png": "{}'.format  # theirs as another machine would have stored it
    theirs, another = (
        ours.replace(stored(picture("#a00000")), stored(picture(colour)))
        for colour in ("#a80800", "#00ff00")
    )
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    git = shutil.which("git") or pytest.skip("git is missing")
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "All"]):
        subprocess.run([git, *command], cwd=book.root, check=True)

    def rerun(before, *arguments):
        notebook.write_text(before)
        (book.root / "_build/stamps/part/drawn.sha256").unlink()
        said = book.run("part/drawn", *arguments).stdout
        assert ("only pictures differ" in said) == (notebook.read_text() == before)
        return notebook.read_text()

    assert rerun(theirs) == theirs != ours
    assert "1 chapters unchanged" in book.run("part/drawn").stdout
    assert rerun(another) == ours
    assert rerun(theirs, "--force") == ours
    assert rerun(theirs.replace("drawn\\n", "painted\\n")) == ours
    (book.root / "lib/module.py").write_text("")  # the picture may have changed for that
    assert rerun(theirs) == ours


TRAINS = ":tags: [parameters]\n\ndevice = 'cpu'\nminutes = 10\nprofile = 'paper'"
QUICK = "on a CPU say `-p device cpu -p profile quick`; to make, `DEVICE=cpu PROFILE=quick`"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "cpu"}, "profile: got 'paper', which is trained on a GPU only"),
        ({"device": "cpu", "profile": "paper"}, "profile: got 'paper', which is trained"),
        ({"device": "cuda:99", "profile": "quick"}, "device: got 'cuda:99'; expected a GPU that"),
        ({"device": "gpu", "profile": "quick"}, "device: got 'gpu'; expected auto, cpu"),
    ],
)
def test_what_trains_nothing_is_refused(book, values, message):
    book.write("trains", chapter(TRAINS, "raise RuntimeError('this chapter runs')"))
    given = [word for pair in values.items() for word in ("-p", *pair)]
    refused = book.run("part/trains", *given)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert QUICK in refused.stderr
    assert "this chapter runs" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trains", "-p", "device", "cpu", "-p", "profile", "quick"], "this chapter runs"),
        (["good", "-p", "sise", "5"], "part/good has no parameter 'sise'; it has: size"),
        (["bad", "-p", "size", "5"], "part/bad has no parameter 'size'; it has: none"),
        (["better"], "no chapter 'part/better'; there are: part/bad, "),
    ],
)
def test_what_exists_runs_and_else_is_refused(book, arguments, message):
    book.write("trains", chapter(TRAINS, "raise RuntimeError('this chapter runs')"))
    done = book.run(f"part/{arguments[0]}", *arguments[1:])
    assert done.returncode == (1 if "runs" in message else 2)
    assert message in done.stderr
