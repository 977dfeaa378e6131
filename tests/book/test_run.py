"""The chapter runner on a small book of its own: one chapter that works and one that does not."""

import os
import shutil
import subprocess
import sys

import nbformat
import pytest

from chapters import ROOT

pytestmark = pytest.mark.xdist_group("run")  # what they share is made once

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
    command = [sys.executable, "tools/run.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run(command, cwd=book, capture_output=True, text=True, env=environment)


def outputs(path):
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    return [output.text for cell in cells for output in cell.outputs]


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    root = tmp_path_factory.mktemp("book")
    shutil.copytree(ROOT / "tools", root / "tools")
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
def test_other_parameters_leave_the_book_alone(book):
    notebook = book / "book/notebooks/part/good.ipynb"
    before = notebook.read_bytes()
    assert run(book, "part/good", "-p", "size", "5").returncode == 0
    assert notebook.read_bytes() == before
    assert outputs(book / "_build/runs/part/good.ipynb") == ["size 5\n"]


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
