"""Files that must agree with each other, and what must not be in any of them."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import attnmem

from tools.chapters import ARGUMENT, BOOK, ROOT, config, contents, repository, site
from tools.chapters import TEXT as TEXTS

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
TEXT = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
CITED = yaml.safe_load((ROOT / "CITATION.cff").read_text())
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


LINES = (ROOT / "locks/constraints.txt").read_text().splitlines()
CONSTRAINTS = pins(LINES)
LOCK = (ROOT / "locks/requirements.txt").read_text()


def test_constraints_agree_with_requirements_and_pins():
    extras = PROJECT["optional-dependencies"]
    pinned = [line for extra in extras.values() for line in extra]
    assert pins(pinned).items() <= CONSTRAINTS.items()
    locked = ("book", "test", "certify", "cluster", "hub", "browser")
    used = [line for extra in locked for line in extras[extra]]
    for requirement in map(Requirement, PROJECT["dependencies"] + used):
        version = CONSTRAINTS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} excludes {version}"
    needs = [Requirement(line) for line in PROJECT["dependencies"]]
    assert all(str(r.specifier).startswith(">=") for r in needs)  # Colab keeps what it has


def hashed(text):
    """The lines of a lock that have a hash; all others must be comments."""
    locked = re.findall(r"(?m)^([a-z].*) \\$\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text)
    said = "".join(f"{line} \\\n{hashes}" for line, hashes in locked)
    assert said == re.sub(r"(?m)^#.*\n", "", text)  # no line without a hash, no index, no path
    return {line for line, _ in locked}


def test_lock_has_hashes_and_names_no_host():
    torch = PYPROJECT["tool"]["uv"]["constraint-dependencies"]
    assert {*torch, *hashed(LOCK)} == {line for line in LINES if line[0] != "#"}
    assert "://" not in LOCK + "".join(LINES)


@pytest.mark.parametrize("group", PYPROJECT["dependency-groups"])
def test_what_is_installed_apart_is_locked(group):
    """In the versions of the book's lock, where it has the same."""
    locked = pins(hashed((ROOT / f"locks/{group}.txt").read_text()))
    assert pins(PYPROJECT["dependency-groups"][group]).items() <= locked.items()
    assert {
        name: CONSTRAINTS[name] for name in locked if name in CONSTRAINTS
    }.items() <= locked.items()


def test_pip_takes_only_hashed_wheels():
    """In the container and the workflows, in the Makefile all but torch and the library itself."""
    files = [
        ROOT / ".binder/Dockerfile",
        ROOT / "Makefile",
        *(ROOT / ".github/workflows").glob("*.yml"),
    ]
    calls = {
        path: re.findall(r"(?<!uv )\bpip install ([^\n;]*)", path.read_text()) for path in files
    }
    assert sum(map(len, calls.values())) >= 8
    for path, arguments in calls.items():
        for said in arguments:
            if path.name != "Makefile" or said not in ("--quiet", "--quiet --python $(BIN)/python"):
                assert "--only-binary :all: --require-hashes --requirement" in said, said
    makefile = (ROOT / "Makefile").read_text()
    assert (
        "HASHED := --only-binary :all: --require-hashes --requirement locks/requirements.txt\n"
        in makefile
    )
    assert len(re.findall(r"\$\(PIP\)", makefile)) == 3


def test_audit_reads_every_lock_and_can_fail():
    jobs = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())["jobs"]
    [audit] = [
        step["run"] for step in jobs["audit"]["steps"] if "pip-audit -" in step.get("run", "")
    ]
    assert "for lock in locks/*.txt" in audit
    assert "pip-audit --strict " in audit


def test_conda_agrees_with_the_constraints():
    assert "--constraint locks/constraints.txt" in CONDA_PIP
    assert pins(CONDA_PIP).items() <= CONSTRAINTS.items()
    assert {"torch", "numpy", "jupyter-book", "papermill", "nbval"} <= pins(CONDA_PIP).keys()
    python = next(d for d in ENVIRONMENT["dependencies"] if str(d).startswith("python"))
    assert python.removeprefix("python").startswith(PROJECT["requires-python"])


def test_container_copies_and_makes_what_is_there():
    steps = (ROOT / ".binder/Dockerfile").read_text()
    copied = re.findall(r"(?m)^COPY --chown=\S+ (.+) \S+$", steps)
    assert all((ROOT / path).exists() for line in copied for path in line.split())
    makefile = (ROOT / "Makefile").read_text()
    assert copied == ["Makefile", "locks", "."]  # what the lock's target needs, then all
    [needed] = re.findall(r"(?m)^\$\(LOCKED\): (.+)$", makefile)
    assert all(path.startswith("locks/") for path in needed.split())
    assert "--require-hashes --requirement locks/container.txt\n" in steps
    assert "LOCKED := $(VENV)/.locked\n" in makefile
    for target in re.findall(r"\bmake ([a-z]+)", steps):
        assert re.search(rf"(?m)^{target}:", makefile), target
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).samefile(
        ROOT / ".binder/Dockerfile"
    )
    assert "useradd --create-home --uid $NB_UID $NB_USER\nUSER $NB_USER\n" in steps
    assert f"ARG NB_USER={container['remoteUser']} NB_UID=1000\n" in steps  # as Binder asks


def test_metadata_of_wheel_and_citation_agree():
    """Addresses come into both when the book is built."""
    for field in ("authors", "keywords"):
        assert PROJECT[field] == CITED[field]
    assert len(CITED["abstract"].split()) > 30
    assert "urls" not in PROJECT
    assert not {"url", "repository-code"} & CITED.keys()


def test_the_version_is_the_same_everywhere():
    """Also that of the tag, when one is released."""
    versions = {CITED["version"], os.environ.get("VERSION", CITED["version"])}
    assert versions == {attnmem.__version__}


def test_versions_of_python_are_the_same():
    makefile, readme = ((ROOT / name).read_text() for name in ("Makefile", "README.md"))
    first, last = re.search(r"\(3, (\d+)\) <= v <= \(3, (\d+)\)", makefile).groups()
    minors = [str(minor) for minor in range(int(first), int(last) + 1)]
    kinds = [kind.rpartition(" :: 3.") for kind in PROJECT["classifiers"]]
    assert [minor for kind, _, minor in kinds if kind == "Programming Language :: Python"] == minors
    assert PROJECT["requires-python"] == f">=3.{first}"
    assert f"python>=3.{first},<3.{int(last) + 1}" in ENVIRONMENT["dependencies"]
    said = re.findall(
        r"\b3\.\d+ to 3\.\d+\b", makefile + readme + (BOOK / "running.md").read_text()
    )
    assert len(said) == 4
    assert {*said} == {f"3.{first} to 3.{last}"}
    assert f'python-version: "3.{last}"' in (ROOT / ".github/workflows/weekly.yml").read_text()


COUNTS = ["twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"]


def test_chapters_of_the_argument_are_counted_right():
    pages = [page for pages in dict(contents()[1:]).values() for page in pages]
    count = sum(Path(page).parent.name in ARGUMENT for page in pages)
    files = [
        ROOT / "README.md",
        *BOOK.glob("*.md"),
        *BOOK.glob("fragments/*"),
        *TEXTS.rglob("*.md"),
    ]
    counted = rf"(?i)\b({'|'.join(COUNTS)}) (?:chapters|boxes)\b"
    said = {}
    for path in files:
        for paragraph in path.read_text().split("\n\n"):
            if re.search(r"(?i)\bargument\b", paragraph) and "new chapters" not in paragraph:
                said |= {(path.name, word.lower()): path for word in re.findall(counted, paragraph)}
    assert {word for _, word in said} == {COUNTS[count - 12]}
    assert {"README.md", "claims.md", "overview.md", "argument.html"} <= {name for name, _ in said}


ACTION = re.compile(r"^ *-? *uses: (\S+)(.*)$", re.M)


def test_workflows_are_pinned_and_hold_few_permissions():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        for action, comment in ACTION.findall(text):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), f"{path.name}: {action}"
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{path.name}: {action}"
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {}
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"]
            commands = [step for step in job["steps"] if "run" in step]
            assert not any("${{" in step["run"] for step in commands), path.name


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


def test_a_clone_has_the_same_bytes_on_windows():
    files = [path for path in tracked() if path.suffix in (".csv", ".toml", ".md", ".ipynb")]
    names = "\n".join(str(path.relative_to(ROOT)) for path in files)
    said = git("check-attr", "--stdin", "eol", "text", input=names)
    settled = set(re.findall(r"^(.*): (?:eol: lf|text: unset)$", said, re.MULTILINE))
    assert settled == set(names.split("\n"))


def test_the_address_stands_in_one_place():
    for address in filter(None, (repository()[0], site())):
        for path in tracked():
            if path.name != "_config.yml":
                assert address not in path.read_text(errors="ignore"), path.relative_to(ROOT)


def test_text_has_one_encoding_on_every_system():
    for path in (path for name in ("lib", "tools") for path in (ROOT / name).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call):
                name, said = ast.unparse(call.func), ast.unparse(call)
                binary = re.search(r"'[rwax]b\+?'|buffering=0", said)
                text = name.endswith((".read_text", ".write_text")) or "text=True" in said
                if text or (name in ("open", "tempfile.NamedTemporaryFile") and not binary):
                    assert "'utf-8" in said, f"{path.relative_to(ROOT)}, line {call.lineno}"


def test_python_below_make_reads_utf8_in_every_locale():
    """Names of folders, too, in the file that leads to the library."""
    look = "import locale; print(locale.getencoding())"
    seen = {"input": f'seen:\n\t@{sys.executable!r} -c "{look}"\n', "encoding": "utf-8"}
    for name in ("C", "POSIX"):
        environment = {**os.environ, "LC_ALL": name, "LANG": name, "LC_CTYPE": name}
        command = ["make", "-s", "-f", "Makefile", "-f", "-", "seen"]
        assert "UTF-8\n" in subprocess.check_output(command, cwd=ROOT, env=environment, **seen)


def test_the_book_is_built_from_committed_outputs():
    assert config()["execute"]["execute_notebooks"] == "off"
    assert not (ROOT / "_static").exists()
