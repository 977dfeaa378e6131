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
from typing import TYPE_CHECKING, NamedTuple

from attnmem.reporting import WORDS, Claim, claims

from layered import Drawing, Frame, draw
from statements import AUTHORS, Found, Statement

if TYPE_CHECKING:
    from claims import Recorded

NOT_YET, LEFT_OUT = "not yet", "left out"
RESTS, INSTEAD = "rests", "instead"
TONES = {  # what a colour says: its mark, and the words in the legend
    "holds": ("✓", "confirmed, illustrated or met"),
    "part": ("◐", "in part"),
    "fails": ("✗", "contradicted, not as stated or not met"),
    "open": ("○", "not yet, or left out"),
    "proof": ("∎", "another statement, with its proof"),
    "plain": ("", "a definition, or a statement without its proof"),
}
FRAME = Frame(width=192, height=38, aside=36, above=8, page=900)
ROOM = 4  # around the drawing, for the lines of its boxes
NAME, SUBJECT = 22, 28  # characters that fit into a box


class Edge(NamedTuple):
    """One node's key and another's, and what leads from the one to the other."""

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


def word_of(claim: Claim, judged: Recorded | None) -> str:
    """The word of the verdict on a claim, or what it is called without one."""
    if judged:
        return judged.verdict
    return LEFT_OUT if claim.left_out else NOT_YET


def tone(claim: Claim, word: str) -> str:
    """The colour of a verdict."""
    if word in (NOT_YET, LEFT_OUT):
        return "open"
    words = WORDS.get(claim.kind, ("confirmed", "in part", "contradicted"))
    return ("holds", "part", "fails")[words.index(word)]


def edges(found: Found, verdicts: Mapping[str, Recorded]) -> list[Edge]:
    """All edges between nodes; where two statements lean on each other twice, one line."""
    kinds: dict[tuple[str, str], str] = {}
    pairs = [
        *(pair for key, entry in verdicts.items() for pair in _instead(key, entry)),
        *(pair for label, used in found.proofs.items() for pair in _rests(label, used)),
        *(pair for key, entry in verdicts.items() for pair in _rests(key, entry.rests_on)),
    ]
    for source, target, kind in pairs:
        for a in nodes(source, found):
            for b in nodes(target, found):
                if a != b:
                    kinds[a, b] = kind
    return sorted(Edge(*pair, kind) for pair, kind in kinds.items())


def _rests(source: str, targets: set[str]) -> list[Edge]:
    return [Edge(source, target, RESTS) for target in sorted(targets)]


def _instead(key: str, entry: Recorded) -> list[Edge]:
    return [Edge(key, entry.instead, INSTEAD)] if entry.instead else []


def nodes(key: str, found: Found) -> list[str]:
    """The nodes that a claim's key or a label stands for: claims of papers, else itself."""
    if key in claims() or key not in found.statements:
        return [key]
    return found.statements[key].claims or [key]


def box(key: str, found: Found, verdicts: Mapping[str, Recorded]) -> Box:
    """How a node looks, and where it leads, seen from the claims page."""
    if key in claims():
        return _claim(claims()[key], found, verdicts)
    statement = found.statements[key]
    return Box(
        statement.name.replace(" et al.", ""),
        statement.subject,
        "proof" if key in found.proofs else "plain",
        place(statement),
        statement.title,
    )


def _claim(claim: Claim, found: Found, verdicts: Mapping[str, Recorded]) -> Box:
    stated = [each.subject for each in found.statements.values() if each.claims == [claim.key]]
    label, aside = re.fullmatch(r"([^,(]*[^,( ]),? ?(.*)", claim.label).groups()
    judged = verdicts.get(claim.key)
    word = word_of(claim, judged)
    author = AUTHORS[claim.paper].removesuffix(" et al.")
    ours = claim.kind == "finding"
    says = [word, judged.grade] if judged else [word]
    return Box(
        "Finding of this book" if ours else f"{author}, {label}",
        claim.label if ours else (stated or [aside.strip("()")])[0],
        tone(claim, word),
        f"#claim-{claim.key}",
        f"{AUTHORS[claim.paper]}: {claim.label} ({' · '.join(says)})",
    )


def place(statement: Statement) -> str:
    """The address of a statement, seen from the claims page."""
    return f"notebooks/{statement.chapter}.html#{statement.label}"


def figure(found: Found, verdicts: Mapping[str, Recorded]) -> str:
    """The picture with its legend, as HTML."""
    lines = edges(found, verdicts)
    drawn = draw([edge[:2] for edge in lines], FRAME)
    boxes = {key: box(key, found, verdicts) for key in sorted(drawn.places)}
    width, height = (round(side + 2 * ROOM) for side in drawn.size)
    about = f"{len(boxes)} statements, {len(lines)} links from one to what it rests on"
    return "\n".join(
        [
            _legend({each.tone for each in boxes.values()}, {line.kind for line in lines}),
            '<div class="graph full-width">',
            f'<svg width="{width}" height="{height}" viewBox="{-ROOM} {-ROOM} {width} {height}"'
            ' role="group" aria-labelledby="graph-title">',
            f'<title id="graph-title">What rests on what: {about}</title>',
            f"<defs>{_ARROW}</defs>",
            '<g marker-end="url(#graph-arrow)">',  # which the lines inherit
            *(_line(line, drawn) for line in lines),
            "</g>",
            *(_node(key, boxes[key], drawn) for key in boxes),
            "</svg>",
            "</div>",
            "",
        ]
    )


_ARROW = (
    '<marker id="graph-arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7"'
    ' markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="currentColor"/></marker>'
)


def _legend(tones: set[str], kinds: set[str]) -> str:
    shown = [(name, *TONES[name]) for name in TONES if name in tones]
    items = [f'<li class="tone-{name}"><b>{mark}</b> {words}</li>' for name, mark, words in shown]
    lines = {RESTS: "leads to what it rests on", INSTEAD: "leads to what is true instead"}
    items += [
        f'<li><svg class="{kind}" width="34" height="8" aria-hidden="true">'
        f'<path d="M0 4 H28"/><path class="tip" d="M26 0 34 4 26 8z"/></svg> {words}</li>'
        for kind, words in lines.items()
        if kind in kinds
    ]
    return "\n".join(['<ul class="legend">', *items, "</ul>"])


def _line(edge: Edge, drawn: Drawing) -> str:
    points = drawn.routes[edge[:2]]
    path = "M" + _at(points[0])
    for (x, y), (u, v) in pairwise(points):
        middle = (x + u) / 2
        bent = f"C{_at((middle, y))} {_at((middle, v))} "
        path += f" {'L' if y == v else bent}{_at((u, v))}"
    return f'<path class="{edge.kind}" d="{path}"/>'


def _at(point: tuple[float, float]) -> str:
    return f"{point[0]:.0f} {point[1]:.0f}"


def _node(key: str, node: Box, drawn: Drawing) -> str:
    x, middle = drawn.places[key]
    y = middle - FRAME.height / 2
    mark = TONES[node.tone][0]
    name = f"{mark} {short(node.name, NAME)}".strip()
    return (
        f'<a class="tone-{node.tone}" href="{escape(node.link)}">'
        f"<title>{escape(plain(node.title))}</title>"
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{FRAME.width:.0f}" height="{FRAME.height:.0f}"'
        ' rx="5"/>'
        f'<text x="{x + 8:.0f}" y="{y + 16:.0f}">{escape(name)}</text>'
        f'<text class="subject" x="{x + 8:.0f}" y="{y + 31:.0f}">'
        f"{escape(short(node.subject, SUBJECT))}</text></a>"
    )


def short(text: str, most: int) -> str:
    """The text without the signs of TeX, and without its end where that is too long."""
    text = plain(text)
    return text if len(text) <= most else text[: most - 1].rstrip(" ,") + "…"


def plain(text: str) -> str:
    """Formulas and links as plain letters."""
    text = re.sub(r"\{[\w:-]+\}`([^`<]*?)\s*(<[^`]*>)?`", r"\1", text)
    text = re.sub(r"\\(mathbb|mathrm|operatorname|text)\b", "", text)
    for sign, letter in _SIGNS.items():
        text = re.sub(rf"\\{sign}\b", letter, text)
    return re.sub(r"[$\\{}`*]", "", text).strip()


_SIGNS = {"varepsilon": "ε", "epsilon": "ε", "gamma": "γ", "ge": "≥", "le": "≤", "to": "→"}
