"""What rests on what: the claims, the statements behind them, and a picture of the references.

Nothing is typed. A proof that refers to a statement rests on it; a verdict rests on the statements
that its checks name, and names the one that is true instead. A theorem that states a claim of a
paper is that claim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from itertools import pairwise
from typing import NamedTuple

from attnmem.reporting import WORDS, Claim, claims

from .layered import Drawing, Frame, draw
from .statements import AUTHORS, References
from .verdicts import LEFT_OUT, NOT_YET, Recorded, word_of

RESTS, INSTEAD = "rests", "instead"
LINES = {RESTS: "leads to what it rests on", INSTEAD: "leads to what is true instead"}
TONES = {  # what a colour says: its mark, and the words in the legend
    "holds": ("✓", "confirmed, illustrated or met"),
    "part": ("◐", "in part"),
    "fails": ("✗", "contradicted, not as stated or not met"),
    "open": ("○", "not yet, or left out"),
    "proof": ("∎", "another statement, with its proof"),
    "plain": ("", "a definition, or a statement without its proof"),
}
SIGNS = {"varepsilon": "ε", "epsilon": "ε", "gamma": "γ", "ge": "≥", "le": "≤", "to": "→"}
FRAME = Frame(width=192, height=38, aside=36, above=8, page=900)
MARGIN = 4  # around the drawing, for the lines of its boxes
NAME, SUBJECT = 22, 28  # characters that fit into a box
ARROW = (
    '<marker id="graph-arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7"'
    ' markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="currentColor"/></marker>'
)


class Edge(NamedTuple):
    """The keys of two nodes, and what leads from one to the other."""

    source: str
    target: str
    kind: str


class Box(NamedTuple):
    """A node to be drawn."""

    name: str
    subject: str
    tone: str
    link: str
    title: str


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


def _box(key: str, book: References, verdicts: Mapping[str, Recorded]) -> Box:
    if key in claims():
        return _claim_box(claims()[key], book, verdicts.get(key))
    statement = book.statements[key]
    return Box(
        statement.name.replace(" et al.", ""),
        statement.subject,
        "proof" if key in book.proofs else "plain",
        f"notebooks/{statement.chapter}.html#{statement.label}",  # seen from the claims page
        statement.title,
    )


def _claim_box(claim: Claim, book: References, judged: Recorded | None) -> Box:
    stated = [each.subject for each in book.statements.values() if each.claims == [claim.key]]
    label, aside = re.fullmatch(r"([^,(]*[^,( ]),? ?(.*)", claim.label).groups()
    word = word_of(claim, judged)
    author = AUTHORS[claim.paper].removesuffix(" et al.")
    ours = claim.kind == "finding"
    says = f"{word} · {judged.grade}" if judged else word
    return Box(
        "Finding of this book" if ours else f"{author}, {label}",
        claim.label if ours else (stated or [aside.strip("()")])[0],
        tone(claim, word),
        f"#claim-{claim.key}",
        f"{AUTHORS[claim.paper]}: {claim.label} ({says})",
    )


def figure(book: References, verdicts: Mapping[str, Recorded]) -> str:
    """The picture with its legend, as HTML."""
    lines = edges(book, verdicts)
    drawn = draw([edge[:2] for edge in lines], FRAME)
    boxes = {key: _box(key, book, verdicts) for key in sorted(drawn.places)}
    width, height = (round(side + 2 * MARGIN) for side in drawn.size)
    parts = [
        _legend({box.tone for box in boxes.values()}, {line.kind for line in lines}),
        '<div class="graph full-width">',
        f'<svg width="{width}" height="{height}" viewBox="{-MARGIN} {-MARGIN} {width} {height}"'
        ' role="group" aria-labelledby="graph-title">',
        f'<title id="graph-title">What rests on what: {len(boxes)} statements,'
        f" {len(lines)} links from one to what it rests on</title>",
        f"<defs>{ARROW}</defs>",
        '<g marker-end="url(#graph-arrow)">',  # which the lines inherit
        *(_line(line, drawn) for line in lines),
        "</g>",
        *(_node(box, *drawn.places[key]) for key, box in boxes.items()),
        "</svg>",
        "</div>",
    ]
    return "\n".join(parts) + "\n"


def _legend(tones: set[str], kinds: set[str]) -> str:
    items = [
        f'<li class="tone-{name}"><b>{mark}</b> {words}</li>'
        for name, (mark, words) in TONES.items()
        if name in tones
    ]
    items += [
        f'<li><svg class="{kind}" width="34" height="8" aria-hidden="true">'
        f'<path d="M0 4 H28"/><path class="tip" d="M26 0 34 4 26 8z"/></svg> {words}</li>'
        for kind, words in LINES.items()
        if kind in kinds
    ]
    return "\n".join(['<ul class="legend">', *items, "</ul>"])


def _line(edge: Edge, drawn: Drawing) -> str:
    points = drawn.routes[edge[:2]]
    path = f"M{_at(*points[0])}"
    for (x, y), (u, v) in pairwise(points):
        middle = (x + u) / 2
        bent = f"C{_at(middle, y)} {_at(middle, v)} "
        path += f" {'L' if y == v else bent}{_at(u, v)}"
    return f'<path class="{edge.kind}" d="{path}"/>'


def _at(x: float, y: float) -> str:
    return f"{x:.0f} {y:.0f}"


def _node(box: Box, x: float, middle: float) -> str:
    y = middle - FRAME.height / 2
    name = f"{TONES[box.tone][0]} {_short(box.name, NAME)}".strip()
    return (
        f'<a class="tone-{box.tone}" href="{escape(box.link)}"><title>{escape(plain(box.title))}'
        f'</title><rect x="{x:.0f}" y="{y:.0f}" width="{FRAME.width}" height="{FRAME.height}"'
        f' rx="5"/><text x="{x + 8:.0f}" y="{y + 16:.0f}">{escape(name)}</text>'
        f'<text class="subject" x="{x + 8:.0f}" y="{y + 31:.0f}">'
        f"{escape(_short(box.subject, SUBJECT))}</text></a>"
    )


def _short(text: str, most: int) -> str:
    """The text in plain letters, without its end where that is too long."""
    text = plain(text)
    return text if len(text) <= most else text[: most - 1].rstrip(" ,") + "…"


def plain(text: str) -> str:
    """Formulas and links as plain letters."""
    text = re.sub(r"\{[\w:-]+\}`([^`<]*?)\s*(<[^`]*>)?`", r"\1", text)
    text = re.sub(r"\\(mathbb|mathrm|operatorname|text)\b", "", text)
    for sign, letter in SIGNS.items():
        text = re.sub(rf"\\{sign}\b", letter, text)
    return re.sub(r"[$\\{}`*]", "", text).strip()
