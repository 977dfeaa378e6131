"""The graph of what rests on what: collected from the chapters, and drawn without a collision."""

import graphlib
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmem import reporting

from tools import claims, graph, layered, statements
from tools.chapters import chapters, text_path
from tools.verdicts import Recorded, recorded

RECORDED = recorded()
FOUND = statements.read()
BY = {(key, label) for key, entry in RECORDED.items() for label in entry.rests_on}
INSTEAD = {(key, entry.instead) for key, entry in RECORDED.items() if entry.instead}

MADE_UP = """\
# A chapter

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
REFERENCES = {
    ("lem-small", "ass-both"),
    ("lem-small", "def-far"),
    ("thm-one", "lem-small"),
    ("lem-far", "thm-one"),
    ("lem-far", "lem-small"),
    ("lem-farther", "thm-one"),
    ("lem-farther", "lem-small"),
}


def plainly(text):
    """References within proofs, read word by word: what belongs to which label."""
    found, owners, last, fence = set(), [], [], None
    for line in text.replace("\n<", "<").split("\n"):
        if fence is None and (opened := re.match(r"(:::+|```+)\{prf:proof\}", line)):
            fence, owners = opened[1], last
        elif line.strip() == fence:
            fence = None
        elif fence is None and line.startswith(":label:"):
            last = [line.split()[1]]
        elif fence is not None:
            if line.startswith(("*{prf:ref}", "*Of {prf:ref}")):
                head, line = line[1:].split(".*", 1)
                owners = head.split("`")[1::2]
            for role in line.split("{prf:ref}`")[1:]:
                label = role.split("`")[0].rstrip(">").split("<")[-1]
                found |= {(owner, label) for owner in owners if label not in owners}
    return found


def pairs(found):
    return {(owner, label) for owner, labels in found.proofs.items() for label in labels}


def test_references_are_found_as_by_hand_and_by_a_second_parser():
    found = statements.read({"a/chapter": MADE_UP})
    assert pairs(found) == REFERENCES == plainly(MADE_UP)
    assert [*found.statements] == ["ass-both", "lem-small", "thm-one"]
    assert found.statements["lem-small"].title == "Remark of this book: small"
    in_book = set().union(*(plainly(text_path(chapter).read_text()) for chapter in chapters()))
    assert pairs(FOUND) == in_book


def judged(instead=None, *checks):
    return Recorded("a/chapter", "confirmed", "proved", None, instead, [*checks])


def test_edges_join_the_proofs_and_the_verdicts_of_a_made_up_chapter():
    found = statements.read({"a/chapter": MADE_UP})
    verdicts = {
        "dana-corollary-1": judged("lem-small", ("no", reporting.proved(False, by="lem-far"))),
        "dana-lemma-2": judged(None, ("yes", reporting.proved(True, by="thm-one"))),
        "dana-lemma-3": judged("lem-far", ("no", reporting.certified(False))),
        "dana-theorem-1": judged(None, ("yes", reporting.checked(True))),
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


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        ("Mahdavi et al., Theorem 1: memorization", ["mahdavi-theorem-1"]),
        ("Dana et al., Theorem 1: distributions", ["dana-theorem-1"]),
        ("Mahdavi et al., Definition 1: Kruskal rank", ["mahdavi-definition-1"]),
        ("Mahdavi et al., Step 2: the read-out", ["mahdavi-step-2"]),
        ("Mahdavi et al., Lemmas 1 and 5: ranks", ["mahdavi-lemma-1", "mahdavi-lemma-5"]),
        ("Mahdavi et al., Theorem 11: none", []),
        ("Mahdavi et al., Sec. 3: attention", []),
        ("Theorem of this book: Theorem 1", []),
        ("Generic layers do better", []),
    ],
)
def test_a_title_with_a_papers_name_and_number_states_its_claim(title, keys):
    assert statements.Statement("label", "theorem", title, "a/chapter").claims == keys


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (":::{prf:lemma} One\n:label: a\n:::\n:::{prf:lemma} Two\n:label: a\n:::\n", "second"),
        (":::{prf:lemma} One\n:label: a\n", "not closed"),
        (":::{prf:proof}\nOf nothing.\n:::\n", "without a statement"),
    ],
)
def test_what_cannot_be_read_is_refused(text, fault):
    with pytest.raises(ValueError, match=fault):
        statements.read({"a/chapter": text})


def test_whatever_is_named_is_in_the_book_whatever_is_called_proved_has_a_proof():
    named = pairs(FOUND) | BY | INSTEAD
    assert {pair for pair in named if pair[1] not in FOUND.statements} == set()
    assert {(key, label) for key, label in BY if label not in FOUND.proofs} == set()
    graphlib.TopologicalSorter(FOUND.proofs).prepare()  # no proof rests on itself


def test_the_fragment_is_up_to_date_and_every_node_is_a_link():
    assert claims.GRAPH.read_text() == graph.figure(FOUND, RECORDED), "make run renews the graph"
    edges = graph.edges(FOUND, RECORDED)
    drawn = {node for edge in edges for node in edge[:2]}
    links = re.findall(r'<a class="[\w-]+" href="([^"]+)"', claims.GRAPH.read_text())
    assert sorted(links) == sorted(
        f"#claim-{node}"
        if node in reporting.claims()
        else f"notebooks/{FOUND.statements[node].chapter}.html#{node}"
        for node in drawn
    )


# --- the drawing ----------------------------------------------------------------------------------

FRAME = layered.Frame(width=10, height=4, aside=5, above=2, page=60)
GRAPHS = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=25)


@given(GRAPHS.map(lambda pairs: [(a, b) for a, b in pairs if a != b] or [(0, 1)]))
def test_boxes_do_not_overlap_and_lines_join_them(edges):
    drawn = layered.draw(edges, FRAME)
    assert drawn == layered.draw(edges[::-1], FRAME)
    assert {*drawn.places} == {node for edge in edges for node in edge}
    for (x, y), (u, v) in itertools.combinations(drawn.places.values(), 2):
        assert abs(x - u) >= FRAME.width or abs(y - v) >= FRAME.height
    for x, y in drawn.places.values():
        assert 0 <= x <= drawn.size[0] - FRAME.width
        assert FRAME.height / 2 <= y + 1e-9
        assert y <= drawn.size[1] - FRAME.height / 2 + 1e-9
    for edge, points in drawn.routes.items():
        for node, (x, y) in zip(edge, (points[0], points[-1]), strict=True):
            left, middle = drawn.places[node]
            assert y == middle
            assert x in (left, left + FRAME.width)


@given(GRAPHS)
def test_without_a_circle_every_node_is_left_of_all_that_it_leads_to(pairs):
    edges = [(max(pair), min(pair)) for pair in pairs if pair[0] != pair[1]] or [(1, 0)]
    drawn = layered.draw(edges, FRAME)
    for source, target in edges:
        assert drawn.places[source][0] + FRAME.width < drawn.places[target][0]
    starts = {source for source, _ in edges}
    for start in starts:  # no further than it must
        nearest = min(drawn.places[target][0] for source, target in edges if source == start)
        assert nearest - drawn.places[start][0] == FRAME.width + FRAME.aside


def test_two_that_cross_are_exchanged_and_neighbours_are_level():
    drawn = layered.draw([("a", "y"), ("b", "x"), ("b", "y"), ("c", "x")], FRAME)
    a, b, c, x, y = (drawn.places[node][1] for node in "abcxy")
    assert (a - c) * (y - x) > 0
    assert min(a, c) < b < max(a, c)
    chain = layered.draw([("a", "b"), ("b", "c")], FRAME).places
    assert {middle for _, middle in chain.values()} == {FRAME.height / 2}
    fork = layered.draw([("a", "b"), ("a", "c")], FRAME).places
    assert abs(fork["b"][1] - fork["c"][1]) == FRAME.height + FRAME.above  # no further than it must
    assert fork["a"][1] == (fork["b"][1] + fork["c"][1]) / 2


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("any combinations on $r$ examples", "any combinations on r examples"),
        (r"within $\varepsilon$ of $\mathbb R^d$", "within ε of  R^d"),
        ("all {term}`contexts <context>`", "all contexts"),
    ],
)
def test_formulas_in_a_picture_are_plain_letters(text, letters):
    assert graph.plain(text) == letters
