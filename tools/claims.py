"""Write book/claims.md: every claim of both papers, with the verdict that its chapter recorded.

Nothing on that page is typed: the claims come from attnmem.reporting, the verdicts and their
evidence from the outputs of the executed notebooks, the graph from the references in the chapters.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from itertools import groupby

from attnmem.reporting import CLAIMED, GRADES, WORDS, Claim, Graded, claims, marked, name_of, papers
from attnmem.results import SHIPPED

from . import graph, statements
from .chapters import BOOK, renew
from .statements import AUTHORS, References
from .verdicts import LEFT_OUT, NOT_YET, Recorded, recorded, word_of

PAGE, TOTALS = BOOK / "claims.md", BOOK / "fragments" / "totals.md"
GRAPH = BOOK / "fragments" / "graph.html"
MEASURED = "../lib/attnmem/measurements"  # seen from the page
ORDER = (*CLAIMED, *(word for words in WORDS.values() for word in words), NOT_YET, LEFT_OUT)
TEMPLATE = BOOK / "fragments" / "claims-page.md"


def page(verdicts: Mapping[str, Recorded]) -> str:
    """The page in MyST Markdown, from what was recorded."""
    book = statements.read(statements.texts())
    drawn = {node for edge in graph.edges(book, verdicts) for node in edge[:2]}
    entries = []
    for key, group in groupby(claims().values(), key=lambda claim: claim.paper):
        entries.append(f"### {papers()[key].title}\n\n{{cite:t}}`{papers()[key].citation}`\n")
        entries += [_entry(claim, verdicts.get(claim.key), book) for claim in group]
    slots = {
        "contradicted": _contradicted(verdicts, book),
        "filter": _form(verdicts),
        "entries": "\n".join(entries),
        "alone": f"{len(claims().keys() - drawn)}",
    }
    text = TEMPLATE.read_text("utf-8")
    for slot, content in slots.items():
        text = text.replace(f"<!-- {slot} -->", content)
    return text


def totals(verdicts: Mapping[str, Recorded]) -> str:
    """How many claims have which verdict, and what those confirmed rest on, in one line."""
    words = Counter(word_of(claim, verdicts.get(key)) for key, claim in claims().items())
    counts = [f"**{words[word]}** {word}" for word in ORDER if words[word] or word in CLAIMED]
    grades = Counter(_grade(entry) for entry in verdicts.values() if entry.verdict == CLAIMED[0])
    rest = ", ".join(f"{grades[grade]} {grade}" for grade in GRADES if grades[grade])
    counts[0] += f" ({rest})" * bool(rest)
    return f"Of **{len(claims())}** claims: {', '.join(counts)}.\n"


def files(claim: Claim) -> list[str]:
    """The stored files of rows that bear on a claim, as ``<experiment>/<profile>``."""
    stored = (path for name in claim.rows for path in sorted(SHIPPED.glob(f"{name}.csv")))
    return [path.relative_to(SHIPPED).with_suffix("").as_posix() for path in stored]


def _grade(judged: Recorded | None) -> str:
    """The grade without its seeds."""
    return judged.grade.partition(",")[0] if judged else ""


# --- What we contradict ---------------------------------------------------------------------------


def _contradicted(verdicts: Mapping[str, Recorded], book: References) -> str:
    """Rows on contradicted claims, and on claims that a confirmed finding speaks against."""
    rows = []
    for claim in claims().values():
        entry = verdicts.get(claim.key)
        if entry and entry.verdict == CLAIMED[-1]:
            instead = _statement(entry.instead, book) if entry.instead else "—"
            rows.append(_row(claim, f"✗ {entry.failing}", entry, instead))
        if entry and entry.verdict == CLAIMED[0] and claim.against:
            against = claims()[claim.against]
            rows.append(_row(against, claim.says, entry, _link(claim, claim.label)))
    return "\n".join(rows)


def _row(claim: Claim, evidence: str, entry: Recorded, instead: str) -> str:
    statement = f"{_link(claim, f'{AUTHORS[claim.paper]}, {claim.label}')}\n\n    {claim.says}"
    scope = ": ".join(filter(None, (entry.grade.capitalize(), entry.sizes)))
    return "* - " + "\n  - ".join([statement, evidence, scope, instead])


def _link(claim: Claim, text: str) -> str:
    return f"{{ref}}`{text} <claim-{claim.key}>`"


def _statement(label: str, book: References) -> str:
    """A link to a statement, with what it is about."""
    statement = book.statements.get(label)
    about = f" ({statement.subject})" if statement and statement.subject else ""
    return f"{{prf:ref}}`{label}`{about}"


# --- The entries ----------------------------------------------------------------------------------


def _entry(claim: Claim, judged: Recorded | None, book: References) -> str:
    """One claim, folded: label, kind, verdict, what it says, sizes. Below it, the rest."""
    word = word_of(claim, judged)
    badge = f"{word} · {judged.grade}" if judged else word
    sizes = f' <span class="claim-sizes">{judged.sizes}</span>' if judged and judged.sizes else ""
    classes = [f"{name}-{slug(value)}" for name, value in facets(claim, judged).items() if value]
    unfolded = "\n\n".join(_unfolded(claim, judged, book))
    return f"""\
::::{{dropdown}} <span class="claim-head">**{claim.label}** \
<span class="claim-kind">{claim.kind}</span> <span class="claim-badge">{badge}</span></span> \
<span class="claim-says">{claim.says}</span>{sizes}
:name: claim-{claim.key}
:class-container: claim tone-{graph.tone(claim, word)} {" ".join(classes)}
:margin: 0

{unfolded}
::::
"""


def facets(claim: Claim, judged: Recorded | None) -> dict[str, str]:
    """The values by which the page can be filtered."""
    verdict, grade = word_of(claim, judged), _grade(judged)
    return {"paper": claim.paper, "kind": claim.kind, "verdict": verdict, "grade": grade}


def slug(word: str) -> str:
    """A word as a class of CSS and in an address."""
    return word.replace(" ", "-")


def _unfolded(claim: Claim, judged: Recorded | None, book: References) -> list[str]:
    """The paragraphs behind the fold."""
    parts, links = [], []
    if judged:
        parts.append("\n".join(f"- {_check(*check)}" for check in judged.checks))
        links.append(f"{{ref}}`The cell that records this <verdict-{claim.key}>`.")
    if judged and judged.instead:
        parts.append(f"True instead: {_statement(judged.instead, book)}.")
    if claim.against:
        against = claims()[claim.against]
        label = f"{AUTHORS[against.paper]}, {against.label}"
        parts.append(f"Speaks against {_link(against, label)}.")
    if claim.thresholds:
        parts.append(f"Limits that are ours: {claim.thresholds}")
    if not judged:
        parts.append(claim.left_out or f"Missing: {claim.needs}")
    if rows := [f"{{download}}`{name} <{MEASURED}/{name}.csv>`" for name in files(claim)]:
        links.append(f"Rows: {', '.join(rows)}.")
    return [*parts, " ".join(links)] if links else parts


def _check(evidence: str, check: Graded) -> str:
    """As the chapter shows it, with a link to the proof."""
    if check.by is None:
        return marked(evidence, check)
    mark = "✓" if check.holds else "✗"
    return f"{mark} {evidence} *({name_of([check])}:* {{prf:ref}}`{check.by}`*)*"


def _form(verdicts: Mapping[str, Recorded]) -> str:
    """Text search, and a menu for each facet with the values that occur; hidden without script."""
    occurring = [facets(claim, verdicts.get(claim.key)) for claim in claims().values()]
    menus = {name: {each[name] for each in occurring} for name in occurring[0]}
    known = (*AUTHORS, *(claim.kind for claim in claims().values()), *ORDER, *GRADES)
    lines = ['<form id="claims-filter" role="search" autocomplete="off" hidden>']
    lines.append('<label>Search <input type="search" name="text"></label>')
    for menu, values in menus.items():
        options = "".join(
            f'<option value="{slug(value)}">{AUTHORS.get(value, value)}</option>'
            for value in dict.fromkeys(known)
            if value in values
        )
        lines.append(
            f'<label>{menu.capitalize()} <select name="{menu}"><option value="">all</option>'
            f"{options}</select></label>"
        )
    return "\n".join([*lines, '<output role="status"></output>', "</form>"])


def main() -> int:
    """Write the page, the totals and the graph."""
    verdicts = recorded()
    renew(PAGE, page(verdicts))
    renew(TOTALS, totals(verdicts))
    renew(GRAPH, graph.figure(statements.read(statements.texts()), verdicts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
