"""A newcomer adds an experiment, and a claim with its page, by CONTRIBUTING's own words."""

import os
import re
import shutil
import subprocess
import sys
import textwrap

import nbformat
import pytest

from tools.chapters import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
GRIDS, CLAIMS = "lib/attnmem/lab/grids.toml", "lib/attnmem/claims.toml"
KEY, PAGE = "mahdavi-finding-my-statement", "mahdavi/key-bias"
IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]


def run(root, *arguments):
    """A command in the copy: its exit status and what it says."""
    environment = {**os.environ, "PYTHONPATH": str(root / "lib"), "OMP_NUM_THREADS": "1"}
    environment.pop("ATTNMEM_MEASUREMENTS", None)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def run_well(root, *arguments):
    status, output = run(root, *arguments)
    assert status == 0, output
    return output


def entry(of):
    """The entry of CONTRIBUTING that begins with this table's head."""
    [block] = re.findall(rf"^    \[{re.escape(of)}\]\n(?:    .*\n)+", TEXT, re.M)
    return textwrap.dedent(block)


def append(path, text):
    path.write_text(path.read_text() + text)


@pytest.fixture
def repository(tmp_path):
    """All that git tracks, as it is now."""
    if not shutil.which("git"):
        pytest.skip("git is missing")
    root = tmp_path / "repository"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    return root


def commit(root):
    for command in (["init", "-q"], ["add", "."], [*IDENTITY, "commit", "-qm", "All"]):
        subprocess.run([shutil.which("git"), *command], cwd=root, check=True)


def test_from_an_entry_to_a_record(repository):
    append(repository / GRIDS, "\n" + entry("dana-exp7"))
    commit(repository)
    [line] = re.findall(r"`python (-m attnmem run dana-exp7 [^`]+)`", TEXT)
    assert "6 rows added" in run_well(repository, *line.split(), "--device", "cpu")
    template = (repository / "book/fragments/record.md").read_text()
    page = repository / "book/text/dana/exp7.md"
    page.write_text(template.replace("dana-exp1", "dana-exp7"))
    run_well(repository, "-m", "tools.run", "dana/exp7")
    notebook = nbformat.read(repository / "book/notebooks/dana/exp7.ipynb", 4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "".join(str(output.get("data", {}).get("text/markdown", "")) for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "6 of 6 trainings" in shown
    assert "`quick`: a smoke test, not a result" in shown
    assert "Exp. 7 (not in the paper), profile quick." in shown


HOSTILE = f"""import pytest


@pytest.mark.hostile("{KEY}")
def test_a_bias_of_the_keys_changes_nothing():
    pass
"""


def add_claim(root, text):
    """An entry, a page with this text, its line in the contents, a test; the page is run."""
    (root / "tests/unit/core/test_key_bias.py").write_text(HOSTILE)
    append(root / CLAIMS, "\n" + entry("mahdavi.finding-my-statement"))
    (root / f"book/text/{PAGE}.md").write_text(text)
    contents, line = root / "_toc.yml", "      - file: book/notebooks/mahdavi/one-head\n"
    assert line in contents.read_text()
    added = line + line.replace("one-head", "key-bias")
    contents.write_text(contents.read_text().replace(line, added))
    run_well(root, "-m", "tools.run", PAGE)
    run_well(root, "-m", "tools.claims")


def test_from_a_claim_to_its_page(repository):
    """A page like the template passes all that a page owes; without its anchor it is told why."""
    template = (repository / "book/fragments/statement.md").read_text()
    add_claim(repository, template.replace("ch-my-statement", "ch-key-bias"))
    assert "A bias of the keys" in (repository / "book/claims.md").read_text()
    files = [f"tests/book/test_{name}.py" for name in ("chapters", "claims", "verdicts", "hostile")]
    chosen = ["-k", "key-bias or my-statement or fresh or hostile"]
    owed = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *chosen]
    run_well(repository, *owed)
    page = repository / f"book/text/{PAGE}.md"
    anchor = f"(verdict-{KEY})=\n"
    page.write_text(page.read_text().replace(anchor, ""))
    run_well(repository, "-m", "tools.run", PAGE)
    status, output = run(repository, *owed)
    assert (status, anchor.strip() in output) == (1, True)
