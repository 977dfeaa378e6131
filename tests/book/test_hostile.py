"""Every theorem with a verdict is tested by hostile instances, and every such mark names a claim.

Marks are read from the source (``@pytest.mark.hostile("mahdavi-theorem-1")``), so that a test file
that cannot be imported is not taken for one without marks.
"""

import ast
from pathlib import Path

from attnmem import papers

from tools.graph import recorded

FINDINGS = {"mahdavi-finding-generic", "mahdavi-finding-capacity", "dana-finding-exact"}


def marks(path):
    """The claims that ``hostile`` marks on tests of a file name; other uses of it count as none."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.hostile":
                    yield from map(ast.literal_eval, mark.args)


def test_judged_theorems_have_hostile_tests():
    paths = sorted(Path(__file__).parents[1].rglob("test_*.py"))
    marked = {claim for path in paths for claim in marks(path)}
    verdicts = recorded()
    judged = [claim for key, claim in papers.claims().items() if key in verdicts]
    stated = {c.key for c in judged if c.kind in ("theorem", "remark") or c.universal}
    assert {"mahdavi-theorem-1", "dana-proposition-1"} <= stated
    assert (stated | FINDINGS) - marked == set(), "mark a test of each by @pytest.mark.hostile(key)"
    assert marked - papers.claims().keys() == set(), "claims.toml has no such claims"
