"""Files that must agree with each other, and what must not be in any of them."""

import ast
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.chapters import ROOT, config, repository

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
TEXT = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
CONDA_PIP = ENVIRONMENT["dependencies"][-1]["pip"]


def git(*command, **options):
    return subprocess.run(["git", *command], cwd=ROOT, check=True, **TEXT, **options).stdout


def tracked():
    """All files but those that are ignored."""
    try:
        names = git("ls-files", "--cached", "--others", "--exclude-standard").split("\n")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only git knows what is ignored, and this is no repository: try it in a clone")
    return [ROOT / name for name in names if (ROOT / name).is_file()]


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


def test_metadata_of_a_release_are_those_of_the_citation():
    record = json.loads((ROOT / ".zenodo.json").read_text())
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (record["title"], record["version"]) == (cited["title"], cited["version"])
    assert (record["description"], record["license"]) == (cited["message"], cited["license"][0])
    assert [one["name"] for one in record["creators"]] == [one["name"] for one in cited["authors"]]
    works = [one["identifiers"][0]["value"] for one in cited["references"]]
    assert [one["identifier"] for one in record["related_identifiers"]] == works


FORBIDDEN = {
    "an absolute path": r"(?<![\w.:/*-])/(?:home|root|work|tmp|Users)/\w",
    "a placeholder of an address": r"(?i)\b(?:org|owner|user(?:name)?)/repo\b",
    "a pickle": r"\bimport pickle\b|\.pkl\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_contains(what):
    for path in tracked():
        if "assets/mathjax" not in str(path) and path != Path(__file__):
            assert path.stat().st_size <= 1_000_000, path
            found = re.search(FORBIDDEN[what], path.read_text(errors="ignore"))
            assert not found, f"{path.relative_to(ROOT)} contains {what}: {found[0]!r}"


def test_a_clone_has_the_same_bytes_where_line_ends_are_translated():
    files = [path for path in tracked() if path.suffix in (".csv", ".toml", ".md", ".ipynb")]
    names = "\n".join(str(path.relative_to(ROOT)) for path in files)
    said = git("check-attr", "--stdin", "eol", "text", input=names)
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
