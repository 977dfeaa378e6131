"""Which tests `make mutants` runs: those that import the module."""

import sys

import pytest

from tools import mutants
from tools.chapters import ROOT

LIBRARY = ROOT / "lib" / "attnmem"
MODULES = [path.relative_to(LIBRARY).as_posix() for path in sorted(LIBRARY.rglob("*.py"))]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_tests_that_import_it(module):
    assert mutants.tests_of(module)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from attnmem.pages import scaling", {"attnmem.pages", "attnmem.pages.scaling"}),
        ("import attnmem.pages.scaling as laws", {"attnmem.pages.scaling"}),
        ("from attnmem import Memory", {"attnmem", "attnmem.yours.editing"}),
        ("from attnmem.yours import examine", {"attnmem.yours", "attnmem.yours.examine"}),
        (
            "def test():\n    from attnmem.core import bounds",
            {"attnmem.core", "attnmem.core.bounds"},
        ),
        ("import helper", {"attnmem.core", "attnmem.core.bounds"}),
        ("counts = tiny = [1]\nassert counts == tiny", set()),
        ("import scaling", set()),
        ("from .attnmem import scaling", set()),
    ],
)
def test_what_a_file_imports(tmp_path, monkeypatch, code, found):
    monkeypatch.setattr(mutants, "TESTS", [tmp_path])
    (tmp_path / "helper.py").write_text("from attnmem.core import bounds\n")
    (tmp_path / "test_one.py").write_text(code)
    assert mutants.imported(tmp_path / "test_one.py") == found


def test_words_are_no_imports():
    """Files that only have the word in a name of a variable or a function."""
    assert mutants.tests_of("pages/scaling.py") == ["tests/unit/test_scaling.py"]
    assert "tests/unit/test_rows.py" not in mutants.tests_of("yours/layer.py")
    assert mutants.tests_of("yours/editing.py") == ["tests/unit/test_editing.py"]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("pages/scaling.py", "no test imports pages/scaling.py: name files of tests"),
        ("pages/scalings.py", "MODULE: got 'pages/scalings.py'; expected a file below lib/attnmem"),
    ],
)
def test_what_cannot_be_tried_is_refused(tmp_path, monkeypatch, capsys, module, said):
    monkeypatch.setattr(mutants, "TESTS", [tmp_path])
    monkeypatch.setattr(mutants, "COPY", None)  # nothing may be done there
    monkeypatch.setattr(sys, "argv", ["mutants", module])
    with pytest.raises(SystemExit) as refused:
        mutants.main()
    assert refused.value.code == 2
    assert said in capsys.readouterr().err
