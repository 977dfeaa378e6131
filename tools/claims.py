"""Write book/claims.md: every claim of both papers, with the verdict that its chapter recorded.

Nothing on that page is typed: the claims come from attnmem.reporting, the verdicts and their
evidence from the outputs of the executed notebooks, the graph from the references in the chapters.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

import nbformat

from attnmem.reporting import (
    CLAIMED,
    GRADES,
    METADATA,
    WORDS,
    Claim,
    Graded,
    claims,
    marked,
    name_of,
    papers,
)
from attnmem.results import SHIPPED

import graph
import statements
from chapters import BOOK, chapters, notebook_path, renew
from graph import LEFT_OUT, NOT_YET, word_of

PAGE, TOTALS = BOOK / "claims.md", BOOK / "fragments" / "totals.md"
GRAPH = BOOK / "fragments" / "graph.html"
MEASURED = "../lib/attnmem/measurements"  # seen from the page
ORDER = (*CLAIMED, *(word for words in WORDS.values() for word in words), NOT_YET, LEFT_OUT)
HEAD = """\
(ch-claims)=
# Claims and verdicts

Every numbered statement, figure and table of the two papers, and every finding of our own, with
what this book can say about it. The cell that checks a claim records the verdict when it runs; this
page is collected from those records, and each entry links to its cell.

```{include} fragments/totals.md
```

**Words.** A claim is *confirmed* if all checks speak for it, *contradicted* if none does, and true
*in part* otherwise. A statement about all data is contradicted by one proved or certified
counterexample, however many instances agree with it. A definition is *illustrated* by instances, or
*not as stated*; an assumption is *met* by the data that was tried, or *not met*. *Not yet* means
that no chapter can judge the claim so far, and its entry says what is missing. *Left out* means
that the book does not mean to judge it, and the entry says why.

**Grades** say what a verdict rests on:

- *proved*: a proof in this book, linked beside the check;
- *certified*: exact or ball arithmetic, at the sizes that the evidence names;
- *checked*: instances in floating point, which the evidence names;
- *measured*: trainings or samples; the number of seeds is ours, of those in the paper.

A statement about all data has the grade of its strongest check, any other claim that of its
weakest. If the claim is contradicted, only the checks that speak against it count.
"""
CONTRADICTED = """\
(contradicted)=
## What we contradict

Rows with ✗ are contradicted: the mark stands before the evidence. In the other rows a finding of
ours speaks against part of the statement, within its scope.

:::{list-table} Statements that are contradicted, or that a finding of ours speaks against
:header-rows: 1
:widths: 30 31 19 20
:class: contradicted
:name: tab-contradicted

* - Statement
  - Counterexample or measurement
  - Scope
  - True instead"""
ALL = """\
(all-claims)=
## All claims

```{{raw}} html
{form}
```
"""
RESTS = """\
(what-rests-on-what)=
## What rests on what

The links are collected from the proofs and the verdicts of the chapters: a proof leads to the
statements that it refers to, a verdict to the statements that its checks name. The colour of a
claim is its verdict. Each box leads to the claim's entry or to the statement's page. {alone} claims
are not drawn, since their proofs and checks name no other statement.

```{{raw}} html
:file: fragments/graph.html
```

```{{raw}} html
<script src="../_static/claims.js"></script>
```
"""


class Recorded(NamedTuple):
    """A verdict found in a notebook."""

    chapter: str
    verdict: str
    grade: str
    sizes: str | None
    instead: str | None
    checks: list[tuple[str, Graded]]

    @property
    def rests_on(self) -> set[str]:
        """The labels of the statements that its checks name."""
        return {check.by for _, check in self.checks if check.by}

    @property
    def failing(self) -> str:
        """The evidence that decides against the claim: of the checks that fail the strongest."""
        failing = [(evidence, check) for evidence, check in self.checks if not check.holds]
        return min(failing, key=lambda each: GRADES.index(each[1].grade))[0]


def recorded() -> dict[str, Recorded]:
    """All verdicts in the executed notebooks, by claim; two on one claim are an error."""
    found: dict[str, Recorded] = {}
    for chapter in chapters():
        for cell in nbformat.read(notebook_path(chapter), 4).cells:
            for output in cell.get("outputs", []):
                entry = dict(output.get("metadata", {}).get(METADATA, {}))
                if not entry:
                    continue
                claim = entry.pop("claim")
                if claim in found:
                    raise ValueError(f"{chapter} judges {claim} a second time")
                checks = [(evidence, Graded(*check)) for evidence, *check in entry.pop("checks")]
                found[claim] = Recorded(chapter, **entry, checks=checks)
    return found


def page(verdicts: Mapping[str, Recorded]) -> str:
    """The page in MyST Markdown, from what was recorded."""
    found = statements.read(statements.texts())
    drawn = {node for edge in graph.edges(found, verdicts) for node in edge[:2]}
    parts = [
        HEAD,
        *_contradicted(verdicts, found),
        ALL.format(form=_form(verdicts)),
    ]
    for key, group in groupby(claims().values(), key=lambda claim: claim.paper):
        paper = papers()[key]
        entries = [_entry(claim, verdicts.get(claim.key), found) for claim in group]
        parts += [f"### {paper.title}\n\n{{cite:t}}`{paper.citation}`\n", *entries]
    return "\n".join([*parts, RESTS.format(alone=len(claims().keys() - drawn))])


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


def _grade(found: Recorded | None) -> str:
    """The grade without its seeds."""
    return found.grade.partition(",")[0] if found else ""


# --- What we contradict ---------------------------------------------------------------------------


def _contradicted(verdicts: Mapping[str, Recorded], found: statements.Found) -> list[str]:
    """A table of contradicted claims, and of claims that a confirmed finding speaks against."""
    rows = []
    for claim in claims().values():
        entry = verdicts.get(claim.key)
        if entry and entry.verdict == CLAIMED[-1]:
            instead = _statement(entry.instead, found) if entry.instead else "—"
            rows.append(_row(claim, f"✗ {entry.failing}", entry, instead))
        if entry and entry.verdict == CLAIMED[0] and claim.against:
            against = claims()[claim.against]
            rows.append(_row(against, claim.says, entry, _link(claim, claim.label)))
    return ["\n".join([CONTRADICTED, *rows, ":::", ""])] if rows else []


def _row(claim: Claim, evidence: str, entry: Recorded, instead: str) -> str:
    paper = f"{statements.AUTHORS[claim.paper]}, {claim.label}"
    scope = ": ".join(filter(None, (entry.grade.capitalize(), entry.sizes)))
    cells = [f"{_link(claim, paper)}\n\n    {claim.says}", evidence, scope, instead]
    return "* - " + "\n  - ".join(cells)


def _link(claim: Claim, text: str) -> str:
    return f"{{ref}}`{text} <claim-{claim.key}>`"


def _statement(label: str, found: statements.Found) -> str:
    """A link to a statement, with what it is about."""
    known = found.statements.get(label)
    about = f" ({known.subject})" if known and known.subject else ""
    return f"{{prf:ref}}`{label}`{about}"


# --- The entries ----------------------------------------------------------------------------------


def _entry(claim: Claim, judged: Recorded | None, found: statements.Found) -> str:
    """One claim, folded: label, kind, verdict, what it says, sizes. Below it, the rest."""
    word = word_of(claim, judged)
    badge = " · ".join(part for part in (word, judged.grade if judged else "") if part)
    title = [
        f'<span class="claim-head">**{claim.label}** <span class="claim-kind">{claim.kind}</span>'
        f' <span class="claim-badge">{badge}</span></span>',
        f'<span class="claim-says">{claim.says}</span>',
    ]
    if judged and judged.sizes:
        title.append(f'<span class="claim-sizes">{judged.sizes}</span>')
    classes = [f"{name}-{slug(value)}" for name, value in _facets(claim, judged) if value]
    return "\n".join(
        [
            f"::::{{dropdown}} {' '.join(title)}",
            f":name: claim-{claim.key}",
            f":class-container: claim tone-{graph.tone(claim, word)} {' '.join(classes)}",
            ":margin: 0",
            "",
            "\n\n".join(_unfolded(claim, judged, found)),
            "::::",
            "",
        ]
    )


def _facets(claim: Claim, judged: Recorded | None) -> list[tuple[str, str]]:
    """What the page can be filtered by."""
    return [
        ("paper", claim.paper),
        ("kind", claim.kind),
        ("verdict", word_of(claim, judged)),
        ("grade", _grade(judged)),
    ]


def slug(word: str) -> str:
    """A word as a class of CSS and in an address."""
    return word.replace(" ", "-")


def _unfolded(claim: Claim, judged: Recorded | None, found: statements.Found) -> list[str]:
    """The paragraphs behind the fold."""
    parts = []
    if judged:
        parts.append("\n".join(f"- {_check(*check)}" for check in judged.checks))
    if judged and judged.instead:
        parts.append(f"True instead: {_statement(judged.instead, found)}.")
    if claim.against:
        against = claims()[claim.against]
        author = statements.AUTHORS[against.paper]
        parts.append(f"Speaks against {_link(against, f'{author}, {against.label}')}.")
    if claim.thresholds:
        parts.append(f"Limits that are ours: {claim.thresholds}")
    rows = [f"{{download}}`{name} <{MEASURED}/{name}.csv>`" for name in files(claim)]
    links = [f"{{ref}}`The cell that records this <verdict-{claim.key}>`."] if judged else []
    links += [f"Rows: {', '.join(rows)}."] if rows else []
    if not judged:
        parts.append(claim.left_out or f"Missing: {claim.needs}")
    return [*parts, *filter(None, [" ".join(links)])]


def _check(evidence: str, check: Graded) -> str:
    """As the chapter shows it, with a link to the proof."""
    if check.by is None:
        return marked(evidence, check)
    mark = "✓" if check.holds else "✗"
    return f"{mark} {evidence} *({name_of([check])}:* {{prf:ref}}`{check.by}`*)*"


# --- The filter -----------------------------------------------------------------------------------


def _form(verdicts: Mapping[str, Recorded]) -> str:
    """Text search, and a menu for each facet with the values that occur; hidden without script."""
    occurring = [_facets(claim, verdicts.get(claim.key)) for claim in claims().values()]
    kinds = list(dict.fromkeys(claim.kind for claim in claims().values()))
    menus = {"paper": statements.AUTHORS, "kind": kinds, "verdict": ORDER, "grade": GRADES}
    lines = ['<form id="claims-filter" role="search" autocomplete="off" hidden>']
    lines.append('<label>Search <input type="search" name="text"></label>')
    for menu, values in menus.items():
        used = {value for facets in occurring for name, value in facets if name == menu}
        options = "".join(
            f'<option value="{slug(value)}">{statements.AUTHORS.get(value, value)}</option>'
            for value in values
            if value in used
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
