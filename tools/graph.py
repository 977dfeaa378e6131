"""What rests on what: the verdicts, statements and proofs of the chapters, and their picture.

A proof belongs to the last labelled statement before it. Where one box proves several, or another,
a paragraph of it that opens with ``*Of {prf:ref}`label`.*`` begins the proof of that one. A proof
that refers to a statement rests on it; a verdict rests on the statements that its checks name, and
names the one that is true instead. A theorem that states a claim of a paper is that claim.
"""

import difflib
import re
from collections.abc import Hashable, Iterable, Mapping
from itertools import pairwise, product
from statistics import fmean
from textwrap import wrap
from typing import NamedTuple

import nbformat
import networkx as nx
import numpy as np
from scipy.optimize import isotonic_regression

from attnmem.checks import refuse
from attnmem.pages.reporting import CLAIMED, METADATA, NOT_YET, WORDS, Graded
from attnmem.papers import Claim, claims, papers

from .chapters import chapters, notebook_path, render, text_path

LEFT_OUT = "left out"  # what a claim is called that no chapter means to judge
AUTHORS = {key: paper.authors for key, paper in papers().items()}

BOX = r"^(?P<fence>:{3,}|`{3,})\{prf:(?P<kind>\w+)\} *(?P<title>.*)\n"
BOX += r"(?=(?P<content>(?:.*\n)*?)(?P=fence) *$)"  # looked at only, since boxes may stand in it
LABEL = re.compile(r"^:label: *(\S+)", re.M)
REF = re.compile(r"\{prf:ref\}`(?:[^`<]*<)?([^`>]+)>?`")
LINK = r"\{prf:ref\}`[^`]+`"
HEAD = re.compile(rf"\*(?:Of )?{LINK}(?:(?:,| and)\s{LINK})*\.\*")
Node = Hashable  # a key, or (edge, column) where an edge crosses a column
Point = tuple[float, float]


class Frame(NamedTuple):
    """The sizes of a drawing: a node's box, the room between boxes, the width to be filled."""

    width: float
    height: float
    aside: float
    above: float
    page: float


FRAME = Frame(width=208, height=52, aside=32, above=10, page=900)
NAME, SUBJECT, LINES = 25, 31, 3  # letters in a line of a box, and lines
SWEEPS, SORTING = 24, 4  # over the columns of the drawing; the first ones look to one side
MARKS = {"holds": "✓", "part": "◐", "fails": "✗", "open": "○", "proof": "∎", "plain": ""}
SIGNS = {"varepsilon": "ε", "epsilon": "ε", "gamma": "γ", "ge": "≥", "le": "≤", "to": "→"}


class Recorded(NamedTuple):
    """A verdict found in a notebook."""

    chapter: str
    verdict: str
    grade: str
    sizes: str | None
    instead: str | None
    checks: list[tuple[str, Graded]]
    curves: int | None = None

    @property
    def rests_on(self) -> set[str]:
        """The labels of the statements that its checks name."""
        return {check.by for _, check in self.checks if check.by}


def recorded() -> dict[str, Recorded]:
    """All verdicts in the executed notebooks, by claim; two on one claim are an error."""
    verdicts: dict[str, Recorded] = {}
    for chapter in chapters():
        cells = nbformat.read(notebook_path(chapter), 4).cells
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        for output in outputs:
            if entry := {**output.get("metadata", {}).get(METADATA, {})}:
                if (claim := entry.pop("claim")) in verdicts:
                    raise ValueError(f"{chapter} judges {claim} a second time")
                checks = entry["checks"]
                entry["checks"] = [(evidence, Graded(*check)) for evidence, *check in checks]
                verdicts[claim] = Recorded(chapter, **entry)
    return verdicts


def word_of(claim: Claim, judged: Recorded | None) -> str:
    """The word of the verdict on a claim, or what it is called without one."""
    if judged:
        return judged.verdict
    return LEFT_OUT if claim.left_out else NOT_YET


class Statement(NamedTuple):
    """A theorem, lemma, definition or the like."""

    chapter: str
    name: str  # in its title "Dana et al., Lemma 2: rank" what stands before the colon
    subject: str  # and behind it

    @property
    def claims(self) -> list[str]:
        """The keys of the claims of a paper that it states, by the paper's name and number.

        ``Dana et al., Lemmas 1 and 5`` names two. ``Dana et al., Lemma 2 (Step 2)`` states the
        claims Lemma 2 and Step 2, unless there is one of the whole name.
        """
        names = [self.name]
        if several := re.fullmatch(r"(.*\w)s (\w+(?:, \w+)*) and (\w+)", self.name):
            numbers = [*several[2].split(", "), several[3]]
            names = [f"{several[1]} {number}" for number in numbers]
        return [key for name in names for key in _stated(name)]


def _stated(name: str) -> list[str]:
    """The keys of the claims of a name: exactly those, or else those of which it is a part."""
    author, _, label = name.partition(", ")
    exact, by_part = [], []
    for claim in claims().values():
        if claim.kind != "finding" and AUTHORS[claim.paper] == author:
            parts = claim.label.removesuffix(")").split(" (")
            if label in (claim.label, ", ".join(parts)):
                exact.append(claim.key)
            if label in parts:
                by_part.append(claim.key)
    return exact or by_part


class References(NamedTuple):
    """Statements by label, and what each proof refers to."""

    statements: dict[str, Statement]
    proofs: dict[str, set[str]]


def read(texts: Mapping[str, str] | None = None) -> References:
    """All statements and proofs of the chapters; two statements of one label are an error."""
    statements, proofs = References({}, {})
    texts = texts or {chapter: text_path(chapter).read_text("utf-8") for chapter in chapters()}
    for chapter, text in texts.items():
        owners: set[str] = set()  # of a proof that does not say whose it is
        for box in re.finditer(BOX, text, re.M):
            if box["kind"] == "proof":
                _add_proof(proofs, owners, box["content"])
            elif label := LABEL.search(box["content"]):
                owners = {label[1]}
                if label[1] in statements:
                    raise ValueError(f"{chapter} labels a second statement {label[1]!r}")
                name, _, subject = box["title"].strip().partition(": ")
                statements[label[1]] = Statement(chapter, name, subject)
    return References(statements, proofs)


def _add_proof(proofs: dict[str, set[str]], owners: set[str], content: str) -> None:
    for paragraph in re.split(r"\n\s*\n", content.strip()):
        head = HEAD.match(paragraph)
        owners = set(REF.findall(head[0])) if head else owners
        if not owners:
            raise ValueError(f"a proof without a statement: {paragraph[:60]}")
        for owner in owners:
            proofs.setdefault(owner, set()).update(set(REF.findall(paragraph)) - owners)


# --- The graph ------------------------------------------------------------------------------------


def tone(claim: Claim, word: str) -> str:
    """The colour of a verdict."""
    if word in (NOT_YET, LEFT_OUT):
        return "open"
    tones = dict(zip(WORDS.get(claim.kind, CLAIMED), ("holds", "part", "fails"), strict=True))
    return tones[word]


def edges(book: References, verdicts: Mapping[str, Recorded]) -> list[tuple[str, str, str]]:
    """Source, target and kind of all edges, one for each pair: *rests* where both kinds join it."""
    links = [(key, verdict.instead, "instead") for key, verdict in verdicts.items()]
    grounds = [*book.proofs.items(), *((key, v.rests_on) for key, v in verdicts.items())]
    links += [(source, target, "rests") for source, targets in grounds for target in targets]
    kinds = {}
    for source, target, kind in links:
        if target is not None:
            for pair in product(_nodes(source, book), _nodes(target, book)):
                if pair[0] != pair[1]:
                    kinds[pair] = kind
    return sorted((*pair, kind) for pair, kind in kinds.items())


def _nodes(key: str, book: References) -> list[str]:
    """The claims of papers that a statement is, if it states any, or else itself."""
    if key in book.statements:
        return book.statements[key].claims or [key]
    return [key]


def figure(book: References, verdicts: Mapping[str, Recorded]) -> str:
    """The picture with its legend, as HTML."""
    lines = edges(book, verdicts)
    places, routes, (width, height) = draw([edge[:2] for edge in lines], FRAME)
    return render(
        "graph.html.jinja",
        {"plain": plain},
        frame=FRAME,
        marks=MARKS,
        boxes=[
            {"x": x, "y": middle - FRAME.height / 2} | _box(key, book, verdicts)
            for key, (x, middle) in sorted(places.items())
        ],
        lines=[(edge[2], _curve(routes[edge[:2]])) for edge in lines],
        width=round(width + 8),  # a margin for the lines of boxes
        height=round(height + 8),
    )


def _box(key: str, book: References, verdicts: Mapping[str, Recorded]) -> dict[str, object]:
    """What a box says in short and in full, its colour, where it leads from the claims page."""
    if key in claims():
        claim, judged = claims()[key], verdicts.get(key)
        word, link = word_of(claim, judged), f"#claim-{key}"
        outcome = f"{word} · {judged.grade}" if judged else word
        title, shade = f"{AUTHORS[claim.paper]}: {claim.label} ({outcome})", tone(claim, word)
        name, subject = _heading(claim, book)
    else:
        if key not in book.statements:
            near = ", ".join(difflib.get_close_matches(key, book.statements, 3, 0))
            refuse("by or instead of a verdict", repr(key), f"the label of a statement: {near}")
        statement = book.statements[key]
        name, subject = statement.name.replace(" et al.", ""), statement.subject
        title, shade = f"{statement.name}: {subject}", "proof" if key in book.proofs else "plain"
        link = f"notebooks/{statement.chapter}.html#{key}"
    cut = {"placeholder": " …"}  # whole words, an ellipsis for those without room
    names = wrap(f"{MARKS[shade]} {plain(name)}".strip(), NAME, max_lines=2, **cut)
    subjects = wrap(plain(subject), SUBJECT, max_lines=LINES - len(names), **cut)
    lines = [("name", line) for line in names] + [("subject", line) for line in subjects]
    return {"lines": lines, "title": title, "tone": shade, "link": link}


def _heading(claim: Claim, book: References) -> tuple[str, str]:
    """The name of a claim in short, and its subject, if one statement alone is the claim."""
    if claim.kind == "finding":
        return "Finding of this book", claim.label
    label, remark = re.fullmatch(r"([^,(]*[^,( ]),? ?(.*)", claim.label).groups()
    subjects = [s.subject for s in book.statements.values() if s.claims == [claim.key]]
    subject = subjects[0] if subjects else remark.strip("()")
    return f"{AUTHORS[claim.paper].removesuffix(' et al.')}, {label}", subject


def _curve(points: list[Point]) -> str:
    """A line through points in SVG, level where it leaves them."""
    path = "M{:.0f} {:.0f}".format(*points[0])
    for (x, y), (u, v) in pairwise(points):
        middle = (x + u) / 2
        if y == v:
            path += "L"
        else:
            path += f"C{middle:.0f} {y:.0f} {middle:.0f} {v:.0f} "
        path += f"{u:.0f} {v:.0f}"
    return path


def plain(text: str) -> str:
    """Formulas and links as plain letters."""
    text = re.sub(r"\{[\w:-]+\}`([^`<]*?)\s*(<[^`]*>)?`", r"\1", text)
    text = re.sub(r"\\(mathbb|mathrm|operatorname|text)\b", "", text)
    for sign, letter in SIGNS.items():
        text = re.sub(rf"\\{sign}\b", letter, text)
    return re.sub(r"[$\\{}`*]", "", text).strip()


# --- The drawing, by the method of Sugiyama in its plainest form ----------------------------------


def draw(
    edges: Iterable[tuple[Node, Node]], frame: Frame
) -> tuple[dict[Node, Point], dict[tuple[Node, Node], list[Point]], Point]:
    """Left and middle of each node, the points through which each edge goes, and the whole size.

    Each connected part is drawn by itself, the largest first, small ones side by side.
    """
    places, routes, x, y, right, bottom = {}, {}, 0.0, 0.0, 0.0, 0.0
    edges = sorted(set(edges), key=str)
    components = nx.connected_components(nx.Graph(edges))
    for nodes in sorted(components, key=lambda nodes: (-len(nodes), str(min(nodes, key=str)))):
        places_of_part, paths = _part([edge for edge in edges if edge[0] in nodes], frame)
        width = max(start for start, _ in places_of_part.values()) + frame.width
        if x and x + width > max(frame.page, right):
            x, y = 0.0, bottom + 2 * frame.above
        places |= {node: (x + a, y + b) for node, (a, b) in places_of_part.items()}
        routes |= {edge: [(x + a, y + b) for a, b in path] for edge, path in paths.items()}
        right = max(right, x + width)
        points = [*places.values(), *(point for path in routes.values() for point in path)]
        bottom = max(b for _, b in points) + frame.height / 2
        x += width + frame.aside
    return places, routes, (right, bottom)


def _part(edges: list[tuple[Node, Node]], frame: Frame) -> tuple[dict, dict]:
    """The places and the routes of a connected part."""
    graph, depth = nx.DiGraph(edges), {}  # of each node, the longest path to an end
    for node in nx.dfs_postorder_nodes(graph):  # an edge that closes a circle counts as reversed
        depth[node] = 1 + max((depth[n] for n in graph[node] if n in depth), default=-1)
    steps, column, paths = nx.Graph(), dict(depth), {}
    for edge in edges:  # from left to right, with a point for each column that it crosses
        source, target = sorted(edge, key=lambda node: -depth[node])
        crossed = {(edge, i): i for i in range(depth[source] - 1, depth[target], -1)}
        paths[edge], column = [source, *crossed, target], column | crossed
        nx.add_path(steps, paths[edge])
    nodes, last = sorted(column, key=str), max(column.values())
    columns = [[n for n in nodes if column[n] == i] for i in range(last + 1)]  # from the right
    rooms = {node: frame.height if node in depth else frame.above for node in nodes}
    height = _heights(columns, steps, rooms, frame)
    start = {node: (last - i) * (frame.width + frame.aside) for node, i in column.items()}
    routes = {}
    for edge, path in paths.items():
        points = [(x, height[n]) for n in path for x in (start[n], start[n] + frame.width)]
        points = points[1:-1]  # from the right of the first box to the left of the last
        routes[edge] = points if path[0] == edge[0] else points[::-1]
    return {node: (start[node], height[node]) for node in depth}, routes


def _heights(columns: list[list[Node]], steps: nx.Graph, rooms: dict, frame: Frame) -> dict:
    """Sort columns by the means of neighbours, and bring each node near its own, boxes apart.

    To and fro, first by the neighbours in the column before, then by those on both sides.
    """
    height = {node: i * frame.height for column in columns for i, node in enumerate(column)}
    for sweep in range(SWEEPS):
        before = {}
        for column in columns[::-1] if sweep % 2 else columns:
            placed = before if sweep < SORTING else height
            near = {}
            for node in column:
                near[node] = [placed[n] for n in steps[node] if n in placed] or [height[node]]
            column.sort(key=lambda node: fmean(near[node]))
            gaps = [(rooms[a] + rooms[b]) / 2 + frame.above for a, b in pairwise(column)]
            least = np.cumsum([0.0, *gaps])
            wished = np.array([fmean(near[node]) for node in column])
            nearest = isotonic_regression(wished - least).x + least  # in squares
            before = dict(zip(column, nearest.tolist(), strict=True))
            height |= before
    top = min(height.values())
    return {node: value - top + frame.height / 2 for node, value in height.items()}
