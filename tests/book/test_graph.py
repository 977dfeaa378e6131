"""The graph of what rests on what: collected from the chapters, and drawn without a collision."""

import graphlib
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmem import papers
from attnmem.pages import reporting

from tools import graph
from tools.chapters import BOOK
from tools.graph import Recorded, recorded

RECORDED, FOUND = recorded(), graph.read()
MADE_UP = """\
:::{prf:assumption} Mahdavi et al., Assumptions 1 and 2: queries and contexts
:label: ass-both
:::

:::{prf:lemma} Remark of this book: small
:label: lem-small
A statement that uses {prf:ref}`def-far` rests on nothing yet.
:::

::::{dropdown} Proof
:::{prf:proof}
By {prf:ref}`ass-both` and {prf:ref}`a definition
<def-far>`.
:::
::::

Between them, {prf:ref}`lem-far` is mentioned.

:::{prf:theorem} Dana et al., Corollary 1: associations
:label: thm-one
:::

```{prf:proof}
From {prf:ref}`lem-small`, and {prf:ref}`thm-one` itself.

*Of {prf:ref}`lem-far` and {prf:ref}`lem-farther`.* By {prf:ref}`thm-one`.

Still of those, by {prf:ref}`lem-small`.
```
"""


def judged(instead=None, *checks):
    return Recorded("a/chapter", "confirmed", "proved", None, instead, [*checks])


def test_edges_join_proofs_and_verdicts():
    found = graph.read({"a/chapter": MADE_UP})
    assert [*found.statements] == ["ass-both", "lem-small", "thm-one"]
    verdicts = {
        "dana-corollary-1": judged("lem-small", ("no", reporting.disproved(True, by="lem-far"))),
        "dana-lemma-2": judged(None, ("yes", reporting.proved(True, by="thm-one"))),
        "dana-lemma-3": judged("lem-far", ("no", reporting.certified(False))),
    }
    assert graph.edges(found, verdicts) == sorted(
        [
            ("lem-small", "mahdavi-assumption-1", "rests"),  # one box states two claims
            ("lem-small", "mahdavi-assumption-2", "rests"),
            ("lem-small", "def-far", "rests"),
            ("dana-corollary-1", "lem-small", "rests"),  # by its proof; also true instead
            ("lem-far", "dana-corollary-1", "rests"),
            ("lem-far", "lem-small", "rests"),
            ("lem-farther", "dana-corollary-1", "rests"),
            ("lem-farther", "lem-small", "rests"),
            ("dana-corollary-1", "lem-far", "rests"),  # by its verdict
            ("dana-lemma-2", "dana-corollary-1", "rests"),
            ("dana-lemma-3", "lem-far", "instead"),
        ]
    )


def test_what_is_named_is_there_and_proved():
    by = {label for entry in RECORDED.values() for label in entry.rests_on}
    instead = {entry.instead for entry in RECORDED.values() if entry.instead}
    missing = by.union(instead, *FOUND.proofs.values()) - {*FOUND.statements}
    assert missing == set(), "no page states these: correct `by` or `instead`, or add `:label:`"
    assert by - {*FOUND.proofs} == set(), "these have no proof on their pages"
    graphlib.TopologicalSorter(FOUND.proofs).prepare()  # no proof rests on itself


def test_a_label_without_a_statement_is_refused():
    key, entry = next(iter(RECORDED.items()))
    wrong = {**RECORDED, key: entry._replace(instead="prop-nothing")}
    with pytest.raises(ValueError, match="got 'prop-nothing'; expected the label of a statement"):
        graph.figure(FOUND, wrong)


def test_every_node_is_a_link():
    edges = graph.edges(FOUND, RECORDED)
    drawn = {node for edge in edges for node in edge[:2]}
    picture = (BOOK / "fragments" / "graph.html").read_text()
    links = re.findall(r'<a class="[\w-]+" href="([^"]+)"', picture)
    assert sorted(links) == sorted(
        f"#claim-{node}"
        if node in papers.claims()
        else f"notebooks/{FOUND.statements[node].chapter}.html#{node}"
        for node in drawn
    )


FRAME = graph.Frame(width=10, height=4, aside=5, above=2, page=60)
GRAPHS = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=25)


@given(GRAPHS.map(lambda pairs: [(a, b) for a, b in pairs if a != b] or [(0, 1)]), st.booleans())
def test_draw_boxes_apart_lines_to_the_right(edges, ordered):
    if ordered:  # without a circle
        edges = [(max(pair), min(pair)) for pair in edges]
    places, routes, (width, height) = drawn = graph.draw(edges, FRAME)
    assert drawn == graph.draw(edges[::-1], FRAME)
    assert {*places} == {node for edge in edges for node in edge}
    for (x, y), (u, v) in itertools.combinations(places.values(), 2):
        assert abs(x - u) >= FRAME.width or abs(y - v) >= FRAME.height
    for x, y in places.values():
        assert 0 <= x <= width - FRAME.width
        assert FRAME.height / 2 <= y + 1e-9 <= height - FRAME.height / 2 + 2e-9
    for edge, points in routes.items():
        for node, (x, y) in zip(edge, (points[0], points[-1]), strict=True):
            left, middle = places[node]
            assert y == middle
            assert x in (left, left + FRAME.width)
        if ordered:
            assert points[0][0] < points[-1][0]


def test_draw_parts_side_by_side():
    pairs = [("a", "b"), ("c", "d"), ("e", "f")]  # a column is 15 wide, the page 60
    places, _, size = graph.draw(pairs, FRAME)
    assert [places[node] for node in "ace"] == [(0, 2), (30, 2), (0, 10)]
    assert size == (55, 12)
    places, _, _ = graph.draw([("a", "y"), ("b", "x"), ("b", "y"), ("c", "x")], FRAME)
    a, c, x, y = (places[node][1] for node in "acxy")
    assert (a - c) * (y - x) > 0
    chain, _, _ = graph.draw([("a", "b"), ("b", "c")], FRAME)
    assert {middle for _, middle in chain.values()} == {FRAME.height / 2}
