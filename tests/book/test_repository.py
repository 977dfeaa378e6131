"""Files that must agree with each other, and what must not be in any of them."""

import ast
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.chapters import ROOT, config, repository

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
TEXT = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
CONDA_PIP = ENVIRONMENT["dependencies"][-1]["pip"]


def git(*command, root=ROOT, **options):
    """What git says; None in a copy that is no repository, such as an archive, or without git."""
    try:
        return subprocess.run(["git", *command], cwd=root, check=True, **TEXT, **options).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def tracked(root=ROOT):
    """All files but those that are ignored."""
    said = git("ls-files", "--cached", "--others", "--exclude-standard", root=root)
    if said is None:
        ignored = [name.strip("/") for name in (root / ".gitignore").read_text().split()]
        names = [
            path.relative_to(root)
            for path in root.rglob("*")
            if not any(fnmatch(part, name) for part in path.parts for name in [".git", *ignored])
        ]
    else:
        names = said.split("\n")
    return [root / name for name in names if name and (root / name).is_file()]


def test_an_archive_has_the_same_files(tmp_path, monkeypatch):
    if (said := git("ls-files")) is None:
        pytest.skip("only a repository knows what is in it")
    for name in said.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(ROOT / ".gitignore", tmp_path)
    for name in ("_build/html/index.html", ".venv/bin/python", "lib/attnmem/__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("PATH", "")
    assert {str(path.relative_to(tmp_path)) for path in tracked(tmp_path)} == {*said.split()}


def pins(lines):
    """Name -> version of the requirements that are pinned exactly."""
    requirements = [Requirement(line) for line in lines if re.match(r"[A-Za-z]", line)]
    exact = [(r, re.fullmatch(r"==([^*,]+)", str(r.specifier))) for r in requirements]
    return {canonicalize_name(r.name): match[1] for r, match in exact if match}


CONSTRAINTS = pins((ROOT / "constraints.txt").read_text().splitlines())


def test_the_constraints_agree_with_every_requirement_and_every_pin_of_the_project():
    extras = PROJECT["optional-dependencies"]
    pinned = [line for extra in extras.values() for line in extra]
    assert pins(pinned).items() <= CONSTRAINTS.items()
    used = [line for extra in ("book", "test", "certify", "cluster") for line in extras[extra]]
    for requirement in map(Requirement, PROJECT["dependencies"] + used):
        version = CONSTRAINTS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} excludes {version}"
    needs = [Requirement(line) for line in PROJECT["dependencies"]]
    assert all(str(r.specifier).startswith(">=") for r in needs)  # Colab keeps what it has


def test_the_conda_environment_agrees_with_the_constraints():
    assert "--constraint constraints.txt" in CONDA_PIP
    assert pins(CONDA_PIP).items() <= CONSTRAINTS.items()
    assert {"torch", "numpy", "jupyter-book", "papermill", "nbval"} <= pins(CONDA_PIP).keys()
    python = next(d for d in ENVIRONMENT["dependencies"] if str(d).startswith("python"))
    assert python.removeprefix("python").startswith(PROJECT["requires-python"])


FORBIDDEN = {
    "an absolute path": r"(?<![\w.:/*-])/(?:home|root|work|tmp|Users)/\w",
    "a placeholder of an address": r"(?i)\b(?:org|owner|user(?:name)?)/repo\b",
    "a pickle": r"\bimport pickle\b|\.pkl\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_contains(what):
    here = "tests/book/test_repository.py"
    for path in tracked():
        if "assets/mathjax" in str(path) or str(path).endswith(here):
            continue
        assert path.stat().st_size <= 1_000_000, path
        found = re.search(FORBIDDEN[what], path.read_text(errors="ignore"))
        assert not found, f"{path.relative_to(ROOT)} contains {what}: {found[0]!r}"


def test_a_clone_has_the_same_bytes_where_line_ends_are_translated():
    files = [path for path in tracked() if path.suffix in (".csv", ".toml", ".md", ".ipynb")]
    names = "\n".join(str(path.relative_to(ROOT)) for path in files)
    said = git("check-attr", "--stdin", "eol", "text", input=names)
    if said is None:
        pytest.skip("git settles it, and this is no repository: run it in a clone")
    settled = set(re.findall(r"^(.*): (?:eol: lf|text: unset)$", said, re.MULTILINE))
    assert settled == set(names.split("\n"))


def test_the_address_of_the_repository_stands_in_one_place():
    if address := repository()[0]:
        for path in tracked():
            if path.suffix != ".ipynb" and path.name != "_config.yml":  # first cells have it
                assert address not in path.read_text(errors="ignore"), path.relative_to(ROOT)


def test_text_is_read_and_written_in_the_same_encoding_on_every_system():
    for path in (path for name in ("lib", "tools") for path in (ROOT / name).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call):
                name, said = ast.unparse(call.func), ast.unparse(call)
                binary = re.search(r"'[rwax]b\+?'|buffering=0", said)
                text = name.endswith((".read_text", ".write_text")) or "text=True" in said
                if text or (name in ("open", "tempfile.NamedTemporaryFile") and not binary):
                    assert "'utf-8" in said, f"{path.relative_to(ROOT)}, line {call.lineno}"


def test_the_book_is_built_from_committed_outputs_and_loads_no_folder_twice():
    assert config()["execute"]["execute_notebooks"] == "off"
    assert not (ROOT / "_static").exists()
