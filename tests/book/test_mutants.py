"""Which tests `make mutants` runs: those that import the module."""

import sys

import pytest

from tools import mutants
from tools.chapters import ROOT

LIBRARY = ROOT / "lib"
MODULES = [path.relative_to(LIBRARY).as_posix() for path in sorted(LIBRARY.rglob("*.py"))]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_tests_that_import_it(module):
    assert mutants.tests_of(module), "add tests/unit/<room>/test_<module>.py"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import attnmem.pages.scaling as laws", {"attnmem.pages.scaling"}),
        ("from attnmem_yours import examine", {"attnmem_yours", "attnmem_yours.examination"}),
        ("def f():\n    from attnmem.pages import live", {"attnmem.pages", "attnmem.pages.live"}),
        ("import helper", {"attnmem.core", "attnmem.core.bounds"}),
        ("counts = tiny = [1]\nassert counts == tiny", set()),
        ("import scaling", set()),
        ("from .attnmem import scaling", set()),
    ],
)
def test_what_a_file_imports(tmp_path, monkeypatch, code, found):
    monkeypatch.setattr(mutants, "HELPERS", tmp_path)
    (tmp_path / "helper.py").write_text("from attnmem.core import bounds\n")
    (tmp_path / "test_one.py").write_text(code)
    assert mutants.imported(tmp_path / "test_one.py") == found


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("attnmem/pages/scaling.py", "no test imports attnmem/pages/scaling.py: name files"),
        ("attnmem/scalings.py", "MODULE: got 'attnmem/scalings.py'; expected a file below lib"),
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
