"""What the mutation tests change, and that a survivor is told from what the tests see."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mutants
from mutants import Survivors, rejudged, section
from mutations import mutations

SOURCE = '''
"""A module."""

LEAST = 2

@checked_by(check)
@functools.cache
def area(width: int, height: float = 1.5, *, scale=1):
    """The area of ``1 + 1`` things."""
    if width <= LEAST:
        refuse("width", width + 1, "more")
    total = min(area(height, width) for _ in range(width) if width and height)
    return max(total[1:], -total[-1], key=-height)
'''
EXPECTED = {
    "": {"2 -> 3", "2 -> 1"},
    "area": {
        "checked_by(check) -> nothing",
        *("1.5 -> 1.4249999999999998", "1 -> 2", "1 -> 0"),
        "width <= LEAST -> width < LEAST",
        "refuse('width', width + 1, 'more') -> nothing",
        *("min -> max", "area(height, width) -> area(width, height)"),
        *("range(width) -> range(width + 1)", "range(width) -> range(width - 1)"),
        *("width and height -> nothing", "width and height -> width or height"),
        *("width -> nothing", "height -> nothing", "max -> min"),
        *("1 -> None", "1 -> 2 (#2)", "1 -> 0 (#2)"),
        *("-total[-1] -> total[-1]", "-1 -> 1", "-1 -> -1 + 1", "-1 -> -1 - 1"),
        *("key=-height -> nothing", "-height -> height"),
    },
}


def test_every_small_mistake_is_made_once():
    made = list(mutations(ast.parse(SOURCE)))
    assert {(m.function, m.text) for m in made} == {
        (function, text) for function, texts in EXPECTED.items() for text in texts
    }
    assert len(made) == sum(map(len, EXPECTED.values()))
    hosted = {m.text for m in made if m.host}
    assert {m.host for m in made} == {None, "area"}
    assert not hosted & {"1.5 -> 1.4249999999999998", "1 -> 2", "checked_by(check) -> nothing"}


@pytest.mark.parametrize("number", range(sum(map(len, EXPECTED.values()))))
def test_a_mutation_changes_one_line_and_leaves_a_program(number):
    tree = ast.parse(SOURCE)
    list(mutations(tree))[number].apply()
    changed = ast.unparse(ast.fix_missing_locations(tree))
    assert compile(changed, "changed", "exec")
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    assert len([line for line in before if line not in changed.splitlines()]) == 1


def test_survivors_are_told_from_what_the_tests_see(tmp_path):
    """In either way: code swapped into collected tests, or a module imported anew."""
    module = tmp_path / "lib" / "length.py"
    module.parent.mkdir()
    module.write_text(
        "LEAST = 3\nSPARE = 5\n\n"
        "def table(of):\n    return [of + 1 > of]\n\n"
        "TABLE = table(1)\n\n"
        "def is_long(x):\n    return min(x, 9) > LEAST and x > 0\n"
        "\nclass Named(dict):\n    def __init__(self):\n        super().__init__(name=__name__)\n"
    )
    (tmp_path / "test_length.py").write_text(
        "import sys\nsys.path.insert(0, 'lib')\nimport length\n\n"
        "def test_long():\n    assert [length.is_long(x) for x in (2, 3, 4)] == [0, 0, 1]\n\n"
        "def test_table():\n    assert length.TABLE == [True]\n\n"
        "def test_named():\n    assert length.Named()['name'] == 'length'\n"
    )
    (tmp_path / "try.py").write_text(
        "import json\nfrom pathlib import Path\n\nimport mutants\n\n"
        "mutants.ROOT = Path().resolve()\n"
        "module, found = mutants.ROOT / 'lib' / 'length.py', []\n"
        "for drawn in ({}, {'sample': 6, 'seed': 1}):\n"
        "    left, tried, of = mutants.survivors(['test_*.py'], module, **drawn)\n"
        "    of_text = [[f'{m.line} {m.text}' for m in some] for some in (left, tried)]\n"
        "    found.append([*of_text, of])\n"
        "Path('found').write_text(json.dumps(found))\n"
    )
    tools = str(Path(mutants.__file__).parent)
    environment = os.environ | {"PYTHONPATH": tools, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run([sys.executable, "try.py"], cwd=tmp_path, env=environment, check=True)
    (left, tried, of), (part, drawn, all_) = json.loads((tmp_path / "found").read_text())
    assert set(part) == set(left) & set(drawn) != set(drawn)
    assert (len(tried), len(drawn), of, all_) == (24, 6, 24, 24)
    assert [text.partition(" ")[2] for text in left] == [
        *("5 -> 6", "5 -> 4"),
        *("of + 1 > of -> of + 1 >= of", "1 -> 2"),
        *("1 -> 2", "1 -> 0"),  # of table(1)
        *("9 -> 10", "9 -> 8"),
        *("x > 0 -> nothing", "x > 0 -> x >= 0", "0 -> 1", "0 -> -1"),
    ]


@pytest.mark.parametrize(
    ("work", "ends"),
    [
        (lambda: 0, 0),
        (lambda: 1, 1),
        (lambda: 1 / 0, mutants.BROKEN),
        (lambda: len([0] * 2**29), 1),
        (lambda: mutants._run([(Test(lambda: [0] * 2**29), 60)], Session), 1),  # 4 GiB
        (lambda: mutants._run([(Test(lambda: time.sleep(60)), 1)], Session), -signal.SIGALRM),
        (lambda: mutants._run([(Test(lambda: None), 60)] * 2, Session), 0),
    ],
)
def test_a_mutant_that_fills_memory_or_never_ends_is_stopped(work, ends):
    _, status = os.waitpid(mutants._fork(work, 100), 0)
    assert os.waitstatus_to_exitcode(status) == ends


class Session:
    testsfailed = 0


class Test:
    """As much of a test of pytest as it takes to run it."""

    __test__ = False

    def __init__(self, body):
        self.config = self.hook = self
        self.body = body

    def pytest_runtest_protocol(self, item, nextitem):
        try:
            self.body()
        except MemoryError:
            Session.testsfailed += 1


def test_the_report_says_why_or_that_nobody_has(tmp_path):
    some = list(mutations(ast.parse("def f(a, b):\n    return a | b\n")))
    tried = some + [some[0]] * 3
    judged = {("f", "a | b -> a"): "a reason"}
    text = section("f.py", Survivors(some, tried, 5), judged)
    assert text.startswith("## f.py\n\n3 of 5 mutants are seen by the tests.\n")
    assert "| 2 | f | `a \\| b -> a` | a reason |\n" in text
    assert text.endswith("| 2 | f | `a \\| b -> b` | **not judged** |\n")
    assert rejudged(section("f.py", Survivors(some, tried, 5), {}), judged) == text
    assert rejudged(text, {}) == section("f.py", Survivors(some, tried, 5), {})
    text = section("f.py", Survivors([], tried, 70), {})
    assert text == "## f.py\n\n5 of 5 mutants, drawn at random from 70, are seen by the tests.\n"
