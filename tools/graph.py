"""What rests on what: the claims, the statements behind them, and a picture of the references.

Nothing is typed. A proof that refers to a statement rests on it; a verdict rests on the statements
that its checks name, and names the one that is true instead. A theorem that states a claim of a
paper is that claim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from textwrap import wrap
from typing import NamedTuple

from attnmem.pages.reporting import WORDS
from attnmem.papers import Claim, claims

from .chapters import render
from .layered import Frame, draw
from .statements import AUTHORS, References
from .verdicts import LEFT_OUT, NOT_YET, Recorded, word_of

RESTS, INSTEAD = "rests", "instead"
FRAME = Frame(width=208, height=52, aside=32, above=10, page=900)
NAME, SUBJECT, LINES = 25, 31, 3  # letters in a line of a box, and lines
MARGIN = 4  # around the drawing, for the lines of its boxes
MARKS = {"holds": "✓", "part": "◐", "fails": "✗", "open": "○", "proof": "∎", "plain": ""}
SIGNS = {"varepsilon": "ε", "epsilon": "ε", "gamma": "γ", "ge": "≥", "le": "≤", "to": "→"}


class Edge(NamedTuple):
    """The keys of two nodes, and what leads from one to the other."""

    source: str
    target: str
    kind: str


def tone(claim: Claim, word: str) -> str:
    """The colour of a verdict."""
    if word in (NOT_YET, LEFT_OUT):
        return "open"
    words = WORDS.get(claim.kind, ("confirmed", "in part", "contradicted"))
    return ("holds", "part", "fails")[words.index(word)]


def edges(book: References, verdicts: Mapping[str, Recorded]) -> list[Edge]:
    """All edges between nodes, one for each pair: *rests* where both kinds join the same two."""
    instead = [Edge(key, v.instead, INSTEAD) for key, v in verdicts.items() if v.instead]
    used = [*book.proofs.items(), *((key, v.rests_on) for key, v in verdicts.items())]
    rests = [Edge(source, target, RESTS) for source, targets in used for target in targets]
    kinds = {
        (a, b): kind
        for source, target, kind in instead + rests
        for a in _nodes(source, book)
        for b in _nodes(target, book)
        if a != b
    }
    return sorted(Edge(*pair, kind) for pair, kind in kinds.items())


def _nodes(key: str, book: References) -> list[str]:
    """The nodes that a claim's key or a label stands for: claims of papers, else itself."""
    if key in claims() or key not in book.statements:
        return [key]
    return book.statements[key].claims or [key]


def figure(book: References, verdicts: Mapping[str, Recorded]) -> str:
    """The picture with its legend, as HTML."""
    lines = edges(book, verdicts)
    linked = {key for edge in lines for key in edge[:2]}
    drawn = draw(
        [edge[:2] for edge in lines], FRAME, [key for key in claims() if key not in linked]
    )
    boxes = [
        {"x": x, "y": middle - FRAME.height / 2} | _drawn(_box(key, book, verdicts))
        for key, (x, middle) in sorted(drawn.places.items())
    ]
    return render(
        "graph.html.jinja",
        {"plain": plain},
        frame=FRAME,
        marks=MARKS,
        boxes=boxes,
        lines=[(edge.kind, _path(drawn.routes[edge[:2]])) for edge in lines],
        width=round(drawn.size[0] + 2 * MARGIN),
        height=round(drawn.size[1] + 2 * MARGIN),
    )


def _drawn(box: dict[str, str]) -> dict[str, object]:
    return box | {"lines": _written(MARKS[box["tone"]], box["name"], box["subject"])}


def _box(key: str, book: References, verdicts: Mapping[str, Recorded]) -> dict[str, str]:
    """What a box says in short and in full, its colour, where it leads from the claims page."""
    if key in claims():
        return _claim_box(claims()[key], book, verdicts.get(key))
    statement = book.statements[key]
    return {
        "name": statement.name.replace(" et al.", ""),
        "subject": statement.subject,
        "title": statement.title,
        "tone": "proof" if key in book.proofs else "plain",
        "link": f"notebooks/{statement.chapter}.html#{key}",
    }


def _claim_box(claim: Claim, book: References, judged: Recorded | None) -> dict[str, str]:
    word, author = word_of(claim, judged), AUTHORS[claim.paper]
    says = f"{word} · {judged.grade}" if judged else word
    name, subject = "Finding of this book", claim.label
    if claim.kind != "finding":
        label, aside = re.fullmatch(r"([^,(]*[^,( ]),? ?(.*)", claim.label).groups()
        stated = [each.subject for each in book.statements.values() if each.claims == [claim.key]]
        name = f"{author.removesuffix(' et al.')}, {label}"
        subject = (stated or [aside.strip("()")])[0]
    title = f"{author}: {claim.label} ({says})"
    link = f"#claim-{claim.key}"
    return {
        "name": name,
        "subject": subject,
        "title": title,
        "tone": tone(claim, word),
        "link": link,
    }


def _path(points: list[tuple[float, float]]) -> str:
    """A line through points in SVG, level where it leaves them."""
    path = "M{:.0f} {:.0f}".format(*points[0])
    for (x, y), (u, v) in pairwise(points):
        middle = (x + u) / 2
        bent = f"C{middle:.0f} {y:.0f} {middle:.0f} {v:.0f} "
        path += f" {'L' if y == v else bent}{u:.0f} {v:.0f}"
    return path


def _written(mark: str, name: str, subject: str) -> list[tuple[str, str]]:
    """The lines of a box and their classes: whole words, an ellipsis for those without room."""
    first = wrap(f"{mark} {plain(name)}".strip(), NAME, max_lines=2, placeholder=" …")
    rest = wrap(plain(subject), SUBJECT, max_lines=LINES - len(first), placeholder=" …")
    return [("name", line) for line in first] + [("subject", line) for line in rest]


def plain(text: str) -> str:
    """Formulas and links as plain letters."""
    text = re.sub(r"\{[\w:-]+\}`([^`<]*?)\s*(<[^`]*>)?`", r"\1", text)
    text = re.sub(r"\\(mathbb|mathrm|operatorname|text)\b", "", text)
    for sign, letter in SIGNS.items():
        text = re.sub(rf"\\{sign}\b", letter, text)
    return re.sub(r"[$\\{}`*]", "", text).strip()
