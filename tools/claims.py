"""Write book/claims.md: every claim of both papers, with the verdict that its chapter recorded.

Nothing on that page is typed: the claims come from attnmem.pages.reporting, the verdicts and their
evidence from the outputs of the executed notebooks, the graph from the references in the chapters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from attnmem.lab import experiments
from attnmem.lab.store import SHIPPED
from attnmem.lab.study import Experiment
from attnmem.pages.reporting import CLAIMED, GRADES, WORDS, Graded, marked, name_of, titled_table
from attnmem.papers import Claim, claims, papers

from . import graph, statements
from .chapters import BOOK, render, renew
from .statements import AUTHORS, References
from .verdicts import LEFT_OUT, NOT_YET, Recorded, recorded, word_of

PAGE, TOTALS = BOOK / "claims.md", BOOK / "fragments" / "totals.md"
GRAPH = BOOK / "fragments" / "graph.html"
ORDER = (*CLAIMED, *(word for words in WORDS.values() for word in words), NOT_YET, LEFT_OUT)


def page(verdicts: Mapping[str, Recorded]) -> str:
    """The page in MyST Markdown, from what was recorded."""
    book = statements.read()
    drawn = {node for edge in graph.edges(book, verdicts) for node in edge[:2]}
    judged = [(claim, verdicts.get(key)) for key, claim in claims().items()]
    filters = {"facets": facets, "files": files, "marked": _marked, "slug": slug}
    filters |= {"tone": graph.tone, "statement": lambda label: _statement(label, book)}
    return render(
        "claims.md.jinja",
        filters,
        authors=AUTHORS,
        claims=claims(),
        contradicted=_contradicted(verdicts, book),
        menus=_menus([facets(*pair) for pair in judged]),
        papers=[
            (p, [pair for pair in judged if pair[0].paper == p.key]) for p in papers().values()
        ],
        alone=len(claims().keys() - drawn),
    )


def totals(verdicts: Mapping[str, Recorded], paper: str | None = None) -> str:
    """How many claims have which verdict, and what those confirmed rest on, in one line.

    Of one paper, or of all ``papers``, these are its own claims, without our findings.
    """
    asked = [
        (claim, verdicts.get(key))
        for key, claim in claims().items()
        if paper is None or (paper in (claim.paper, "papers") and claim.kind != "finding")
    ]
    words = Counter(word_of(*pair) for pair in asked)
    counts = [f"**{words[word]}** {word}" for word in ORDER if words[word] or word in CLAIMED]
    grades = Counter(_grade(entry) for _, entry in asked if entry and entry.verdict == CLAIMED[0])
    rest = ", ".join(f"{grades[grade]} {grade}" for grade in GRADES if grades[grade])
    counts[0] += f" ({rest})" * bool(rest)
    whose = " of the two papers" if paper == "papers" else ""
    return f"Of **{len(asked)}** claims{whose}: {', '.join(counts)}.\n"


def coverage(paper: str, names: Mapping[str, Experiment]) -> str:
    """How many trainings of published grids are stored, and how many ran on a GPU, as a table."""
    table = experiments.coverage(names)[["source", "published runs", "published, stored"]]
    table["on a GPU"] = [
        len(experiments.table(name, "paper").query("device != 'cpu' and variant == @published"))
        for name, published in ((name, each.variants[0]) for name, each in names.items())
    ]
    table.loc[""] = ["all", *table.iloc[:, 1:].sum()]
    title = f"Published trainings of {AUTHORS[paper]}, how many are stored, and made on what"
    lines = [
        (where, *(f"{count:,}" for count in counts))
        for where, *counts in table.itertuples(False, None)
    ]
    head = ("Figure or experiment", "trainings", "stored", "of these on a GPU")
    return titled_table(title, f"tab-report-{paper}", [head, *lines]) + "\n"


def files(claim: Claim) -> list[str]:
    """The stored files of rows that bear on a claim, as ``<experiment>/<profile>``."""
    stored = (path for name in claim.rows for path in sorted(SHIPPED.glob(f"{name}.csv")))
    return [path.relative_to(SHIPPED).with_suffix("").as_posix() for path in stored]


def facets(claim: Claim, judged: Recorded | None) -> dict[str, str]:
    """The values by which the page can be filtered."""
    verdict, grade = word_of(claim, judged), _grade(judged)
    return {"paper": claim.paper, "kind": claim.kind, "verdict": verdict, "grade": grade}


def slug(word: str) -> str:
    """A word as a class of CSS and in an address."""
    return word.replace(" ", "-")


def _grade(judged: Recorded | None) -> str:
    """The grade without its seeds."""
    return judged.grade.partition(",")[0] if judged else ""


def _contradicted(verdicts: Mapping[str, Recorded], book: References) -> list[tuple]:
    """Claims that a verdict, or a confirmed finding, speaks against: evidence, verdict, truth."""
    rows = []
    for claim in claims().values():
        entry = verdicts.get(claim.key)
        if entry and entry.verdict == CLAIMED[-1]:
            instead = _statement(entry.instead, book) if entry.instead else "—"
            rows.append((claim, f"✗ {entry.failing}", entry, instead))
        if entry and entry.verdict == CLAIMED[0] and claim.against:
            link = f"{{ref}}`{claim.label} <claim-{claim.key}>`"
            rows.append((claims()[claim.against], claim.says, entry, link))
    return rows


def _statement(label: str, book: References) -> str:
    """A link to a statement, with what it is about."""
    statement = book.statements.get(label)
    about = f" ({statement.subject})" if statement and statement.subject else ""
    return f"{{prf:ref}}`{label}`{about}"


def _marked(evidence: str, check: Graded) -> str:
    """As the chapter shows it, with a link to the proof."""
    if check.by is None:
        return marked(evidence, check)
    mark = "✓" if check.holds else "✗"
    return f"{mark} {evidence} *({name_of([check])}:* {{prf:ref}}`{check.by}`*)*"


def _menus(occurring: list[dict[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """For each facet the values that occur, with their names, in a fixed order."""
    order = [*AUTHORS, *(facets["kind"] for facets in occurring), *ORDER, *GRADES]
    used = {menu: {facets[menu] for facets in occurring} for menu in occurring[0]}
    return {
        menu: [
            (value, AUTHORS.get(value, value)) for value in dict.fromkeys(order) if value in values
        ]
        for menu, values in used.items()
    }


if __name__ == "__main__":
    VERDICTS = recorded()
    renew(PAGE, page(VERDICTS))
    renew(TOTALS, totals(VERDICTS))
    renew(TOTALS.with_name("totals-papers.md"), totals(VERDICTS, "papers"))
    for key, grids in {"mahdavi": experiments.MAHDAVI, "dana": experiments.DANA}.items():
        renew(TOTALS.with_name(f"totals-{key}.md"), totals(VERDICTS, key))
        renew(TOTALS.with_name(f"coverage-{key}.md"), coverage(key, grids))
    renew(GRAPH, graph.figure(statements.read(), VERDICTS))
