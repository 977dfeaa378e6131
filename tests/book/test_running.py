"""The page on running the book: its commands are run here or by CI, or listed as untried."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.chapters import BOOK, ROOT, parameters

PAGE = BOOK / "running.md"
BY_CI = {  # `.ci/run` and the workflows run them as a whole
    "make book",
    "make test",
    "make unit",
    "make nbval",
    "make browser",
    "make steady",
    "make seeds",
    "make small",
}


def commands():
    """Every line of every shell block of the page."""
    text = PAGE.read_text()
    return set("\n".join(re.findall(r"```bash\n(.*?)\n```", text, re.S)).split("\n")) - {""}


def untried():
    table = PAGE.read_text().split("What could not be tried here")[1]
    return set(re.findall(r"^\* - `(.+)`$", table, re.M))


# Where the environment is active, the page says `python`: the same commands.
HERE = sorted({re.sub("^python ", ".venv/bin/python ", c) for c in commands() - BY_CI - untried()})


def test_lists_of_commands_agree():
    assert untried() | BY_CI <= commands()
    assert not untried() & BY_CI
    assert len(HERE) >= 6
    ci = (ROOT / ".ci" / "run").read_text() + (ROOT / "Makefile").read_text()
    ci += "".join(path.read_text() for path in (ROOT / ".github" / "workflows").iterdir())
    for command in BY_CI:
        words = [word for word in command.split() if re.fullmatch(r"[a-zA-Z_=]+", word)]
        assert all(word in ci for word in words), command


def run(command, folder, **options):
    """Run it to its end, with rows in a folder of its own."""
    environment = {**os.environ, "ATTNMEM_MEASUREMENTS": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("command", HERE)
def test_a_command_of_the_page_runs(command, tmp_path):
    binaries = Path(sys.executable).parent
    command = command.replace(".venv/bin/", f"{binaries}/").replace("_build/", f"{tmp_path}/")
    done = run(command, tmp_path, shell=True, cwd=ROOT)
    assert "unknown parameter" not in done.stdout + done.stderr  # as papermill warns


def test_parameters_that_the_page_names_are_the_chapters():
    text = PAGE.read_text() + (ROOT / "tools" / "run.py").read_text()
    named = re.findall(r"(?:tools\.run |notebooks/)([a-z]+/[a-z-]+)(.* -p .+)", text)
    assert len(named) >= 5
    for chapter, options in named:
        assert {*re.findall(r"-p (\w+)", options)} <= parameters(chapter).keys(), chapter


BLOCKS = {
    f"{page.stem}-{k}": block
    for page in (PAGE, BOOK / "library.md", ROOT / "README.md")
    for k, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
    if "SLURMCluster" not in block  # the page says that this one was not run
}


@pytest.mark.parametrize("block", BLOCKS)
def test_code_of_the_pages_runs_as_a_file(block, tmp_path):
    """With a quick profile and two processes in place of a sweep."""
    text = BLOCKS[block].replace('"dana-exp1", "paper"', '"dana-exp6", "quick"')
    (tmp_path / "block.py").write_text(re.sub(r"^(\s+)8,$", r"\g<1>2,", text, flags=re.M))
    printed = run([sys.executable, tmp_path / "block.py"], tmp_path).stdout.splitlines()
    if block.startswith("README"):  # a comment says what is printed: a number, or one below it
        said = re.findall(r"^print\(.*\)  # (below )?([\d,]+(?:e-\d+)?)", text, re.M)
        assert len(said) == len(printed) == text.count("print(")
        for line, (below, number) in zip(printed, said, strict=True):
            value = float(re.search(r"[\d.]+(?:e-\d+)?", line)[0])
            stated = float(number.replace(",", ""))
            assert value < stated if below else value == stated
