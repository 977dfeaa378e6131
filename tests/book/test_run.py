"""The chapter runner on a small book of its own: one chapter that works and one that does not."""

import base64
import io
import os
import shutil
import subprocess
import sys

import nbformat
import PIL.Image
import pytest

from tools import run as runner
from tools.chapters import ROOT

HEADER = """\
---
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

"""
GOOD = """\
# Good

```{code-cell} ipython3
:tags: [parameters]

size = 3
```

```{code-cell} ipython3
print("size", size)
```
"""
BAD = """\
# Bad

```{code-cell} ipython3
raise RuntimeError("this chapter is broken")
```
"""


def run(book, *arguments):
    command = [sys.executable, "-m", "tools.run", *arguments]
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run(command, cwd=book, capture_output=True, text=True, env=environment)


def outputs(path):
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    return [output.text for cell in cells for output in cell.outputs]


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    root = tmp_path_factory.mktemp("book")
    shutil.copytree(ROOT / "tools", root / "tools")
    shutil.copytree(ROOT / "book/fragments", root / "book/fragments")
    for name in ("_config.yml", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    (root / "lib").mkdir()
    (root / "book/text/part").mkdir(parents=True)
    (root / "book/text/part/good.md").write_text(HEADER + GOOD)
    (root / "book/text/part/bad.md").write_text(HEADER + BAD)
    return root


@pytest.fixture(scope="module")
def first_run(book):
    return run(book)


def test_a_failing_chapter_is_named_with_its_traceback_and_the_others_finish(book, first_run):
    assert first_run.returncode == 1
    assert "part/bad" in first_run.stdout
    assert "FAILED" in first_run.stdout
    assert "book/text/part/bad.md failed" in first_run.stderr
    assert "RuntimeError: this chapter is broken" in first_run.stderr
    assert outputs(book / "book/notebooks/part/good.ipynb") == ["size 3\n"]
    assert not (book / "book/notebooks/part/bad.ipynb").exists()


@pytest.mark.usefixtures("first_run")
def test_a_copy_of_the_template_is_a_chapter(book):
    copy = book / "book/text/part/new.md"
    shutil.copy(ROOT / "book/fragments/chapter.md", copy)
    done = run(book, "part/new")
    assert done.returncode == 0, done.stderr
    assert outputs(book / "book/notebooks/part/new.ipynb") == ["examples: 29\n"]
    copy.unlink()


@pytest.mark.usefixtures("first_run")
def test_a_chapter_that_fails_later_keeps_its_last_good_notebook(book):
    text, notebook = book / "book/text/part/good.md", book / "book/notebooks/part/good.ipynb"
    before = notebook.read_bytes()
    text.write_text(HEADER + GOOD + "\n```{code-cell} ipython3\n1 / 0\n```\n")
    assert run(book, "part/good").returncode == 1
    assert notebook.read_bytes() == before
    text.write_text(HEADER + GOOD)


@pytest.mark.usefixtures("first_run")
def test_unchanged_chapters_rest_and_a_forced_run_changes_no_byte(book):
    assert "1 chapters unchanged" in run(book, "part/good").stdout
    notebook = book / "book/notebooks/part/good.ipynb"
    before = notebook.read_bytes()
    assert "[1/1] part/good" in run(book, "part/good", "--force").stdout
    assert notebook.read_bytes() == before
    notebook.write_bytes(before.replace(b"size 3", b"size 4"))
    assert "[1/1] part/good" in run(book, "part/good").stdout
    assert notebook.read_bytes() == before


@pytest.mark.usefixtures("first_run")
def test_a_folder_for_rows_is_that_of_who_runs_the_chapter(book, monkeypatch):
    """A chapter runs in the folder of its notebook, where another program would not look."""
    chapter = book / "book/text/part/rows.md"
    cell = 'import os\n\nprint(os.environ["ATTNMEM_MEASUREMENTS"])'
    chapter.write_text(f"{HEADER}# Rows\n\n```{{code-cell}} ipython3\n{cell}\n```\n")
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", "again")
    assert run(book, "part/rows").returncode == 0
    assert outputs(book / "book/notebooks/part/rows.ipynb") == [f"{book / 'again'}\n"]
    chapter.unlink()


@pytest.mark.usefixtures("first_run")
def test_other_parameters_leave_the_book_alone(book):
    notebook = book / "book/notebooks/part/good.ipynb"
    before = notebook.read_bytes()
    assert run(book, "part/good", "-p", "size", "5").returncode == 0
    assert notebook.read_bytes() == before
    assert outputs(book / "_build/runs/part/good.ipynb") == ["size 5\n"]


DRAWN = """\
# Drawn

```{code-cell} ipython3
import base64

from IPython.display import Image

print("drawn")
Image(data=base64.b64decode("PICTURE"))
```
"""


def picture(colour):
    out = io.BytesIO()
    PIL.Image.new("RGB", (9, 9), colour).save(out, format="png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def stored(path, colour, said="drawn"):
    """The notebook at ``path`` as another machine would have stored it."""
    notebook = nbformat.read(path, 4)
    [text, shown] = notebook.cells[-1].outputs
    text.text = f"{said}\n"
    shown.data["image/png"] = picture(colour) + "\n"
    return nbformat.writes(notebook) + "\n"


@pytest.mark.usefixtures("first_run")
def test_in_a_fresh_copy_a_notebook_stays_where_only_pictures_differ(book):
    text, notebook = book / "book/text/part/drawn.md", book / "book/notebooks/part/drawn.ipynb"
    stamps, module = book / "_build/stamps/part/drawn.sha256", book / "lib/module.py"
    text.write_text(HEADER + DRAWN.replace("PICTURE", picture("red")))
    module.write_text("")
    assert run(book, "part/drawn").returncode == 0
    ours = notebook.read_text()
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "All"]):
        subprocess.run(["git", *command], cwd=book, check=True)

    def rerun(*arguments):
        notebook.write_text(theirs)
        stamps.unlink()
        said = run(book, "part/drawn", *arguments).stdout
        assert ("only pictures differ" in said) == (notebook.read_text() == theirs)
        return notebook.read_text()

    theirs = stored(notebook, "blue")
    assert rerun() == theirs
    assert "1 chapters unchanged" in run(book, "part/drawn").stdout
    assert rerun("--force") == ours
    module.write_text("colour = 1\n")  # edited: the picture may have changed for that
    assert rerun() == ours
    text.unlink()
    shutil.rmtree(book / ".git")


@pytest.mark.parametrize(
    ("colour", "said", "expected"),
    [("red", "drawn", False), ("blue", "drawn", True), ("blue", "painted", False)],
)
def test_notebooks_are_compared_without_their_pictures(tmp_path, colour, said, expected):
    outputs = [
        nbformat.v4.new_output("stream", text="drawn\n"),
        nbformat.v4.new_output("display_data", {"image/png": picture("red") + "\n"}),
    ]
    cell = nbformat.v4.new_code_cell("draw()", id="cell", outputs=outputs)
    one, other = tmp_path / "one.ipynb", tmp_path / "other.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), one)
    other.write_text(stored(one, colour, said))
    assert runner._only_pictures_differ(one, other) == expected


@pytest.mark.usefixtures("first_run")
def test_what_is_edited_while_a_chapter_runs_is_run_again(book):
    text = book / "book/text/part/edited.md"
    edit = "open('../../text/part/edited.md', 'a').write('More.')"
    text.write_text(f"{HEADER}# Edited\n\n```{{code-cell}} ipython3\n_ = {edit}\n```\n\n")
    assert "[1/1] part/edited" in run(book, "part/edited").stdout
    assert "[1/1] part/edited" in run(book, "part/edited").stdout
    text.unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["part/good", "-p", "sise", "5"], "part/good has no parameter 'sise'; it has: size"),
        (["-p", "size", "5"], "part/bad has no parameter 'size'; it has: none"),
        (["part/better"], "no chapter 'part/better'; there are: part/bad, part/good"),
    ],
)
def test_what_does_not_exist_is_refused(book, arguments, message):
    refused = run(book, *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr


def test_a_kernel_that_lost_its_port_is_started_once_more(monkeypatch, tmp_path):
    failures = []

    def execute(*arguments, **options):
        if failures:
            raise failures.pop(0)

    monkeypatch.setattr(runner.papermill, "execute_notebook", execute)
    lost = RuntimeError("Kernel died before replying to kernel_info")
    failures[:] = [lost]
    runner._execute(tmp_path, tmp_path, {}, tmp_path)
    for once in ([lost, lost], [RuntimeError("another")]):
        failures[:] = once
        with pytest.raises(RuntimeError, match=str(once[0])):
            runner._execute(tmp_path, tmp_path, {}, tmp_path)
        assert failures == []
