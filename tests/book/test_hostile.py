"""Every theorem with a verdict is tested by hostile instances, and every such mark names a claim.

Marks are read from the source (``@pytest.mark.hostile("mahdavi-theorem-1")``), so that a test file
that cannot be imported is not taken for one without marks.
"""

import ast
from pathlib import Path

import pytest

from attnmem import reporting

from tools.verdicts import recorded

MARK = "pytest.mark.hostile"
TESTS = Path(__file__).parents[1]
FINDINGS = ("mahdavi-finding-generic", "mahdavi-finding-capacity", "dana-finding-exact")


def marks(source, name="<source>"):
    """``(claim, test)`` of every ``hostile`` mark on a test; any other use of it is refused."""
    tree, found = ast.parse(source), []
    uses = sum(ast.unparse(node) == MARK for node in ast.walk(tree) if isinstance(node, ast.expr))
    for function in ast.walk(tree):
        for mark in getattr(function, "decorator_list", []):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == MARK and mark.args:
                uses -= isinstance(function, ast.FunctionDef) and not mark.keywords
                found += [(getattr(x, "value", x), f"{name}::{function.name}") for x in mark.args]
    if uses or not all(isinstance(claim, str) and "::test_" in test for claim, test in found):
        raise ValueError(f"{name}: hostile takes claims, as strings, and marks tests")
    return found


MARKED = [
    mark
    for path in sorted(TESTS.rglob("test_*.py"))
    for mark in marks(path.read_text(), path.relative_to(TESTS).as_posix())
]
RECORDED = recorded()
UNIVERSAL = [
    claim.key
    for claim in reporting.claims().values()
    if claim.key in RECORDED
    and (claim.kind == "theorem" or claim.universal or claim.key in FINDINGS)
]


@pytest.mark.parametrize("key", UNIVERSAL)
def test_every_theorem_with_a_verdict_has_a_hostile_test(key):
    assert key in {claim for claim, _ in MARKED}, f'no test has @pytest.mark.hostile("{key}")'


def test_every_hostile_mark_names_a_claim():
    assert {"mahdavi-theorem-1", "dana-proposition-1", *FINDINGS} <= set(UNIVERSAL)
    unknown = [f"{where}: {claim}" for claim, where in MARKED if claim not in reporting.claims()]
    assert not unknown
