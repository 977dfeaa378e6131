"""Every theorem with a verdict is tested by hostile instances, and every such mark names a claim.

Marks are read from the source (``@pytest.mark.hostile("mahdavi-theorem-1")``), so that a test file
that cannot be imported is not taken for one without marks.
"""

import ast
from pathlib import Path

import pytest

from attnmem import papers

from tools.verdicts import recorded

MARK = "pytest.mark.hostile"
TESTS = Path(__file__).parents[1]
FINDINGS = ("mahdavi-finding-generic", "mahdavi-finding-capacity", "dana-finding-exact")


def marks(path):
    """The claims that ``hostile`` marks on tests of a file name; other uses of it count as none."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == MARK:
                    yield from map(ast.literal_eval, mark.args)


MARKED = {claim for path in sorted(TESTS.rglob("test_*.py")) for claim in marks(path)}
RECORDED = recorded()
UNIVERSAL = [
    claim.key
    for claim in papers.claims().values()
    if claim.key in RECORDED
    and (claim.kind == "theorem" or claim.universal or claim.key in FINDINGS)
]


@pytest.mark.parametrize("key", UNIVERSAL)
def test_every_theorem_with_a_verdict_has_a_hostile_test(key):
    assert key in MARKED, f'no test has @pytest.mark.hostile("{key}")'


def test_every_hostile_mark_names_a_claim():
    assert {"mahdavi-theorem-1", "dana-proposition-1", *FINDINGS} <= set(UNIVERSAL)
    assert MARKED - papers.claims().keys() == set()
