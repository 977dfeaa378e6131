"""Write what is collected from the chapters: the claims, with the verdicts that cells recorded.

They make ``book/claims.md`` with its graph, and ``claims.json`` and BibTeX for programs; beside
them stands a table of the chapters' parameters. Nothing is typed: claims come from attnmem.papers,
verdicts and evidence from the outputs of the executed notebooks, references from the texts.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd
import yaml

from attnmem.lab import experiments
from attnmem.lab.store import SHIPPED
from attnmem.lab.study import ALL, Experiment
from attnmem.pages.reporting import (
    CLAIMED,
    GRADES,
    WORDS,
    Graded,
    ground,
    marked,
    ticked,
    titled_table,
)
from attnmem.papers import Claim, claims, papers

from . import graph
from .chapters import ROOT, chapters, parameters, ranges, render, text_path
from .graph import AUTHORS, LEFT_OUT, NOT_YET, Recorded, References, recorded, word_of

ORDER = (*CLAIMED, *(word for words in WORDS.values() for word in words), NOT_YET, LEFT_OUT)
CITED = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
TICKS = 2  # checks that hold and are shown in an entry; more are counted
NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e-?\d+)?")
GRIDS = {"mahdavi": experiments.MAHDAVI, "dana": experiments.DANA}


def page(verdicts: Mapping[str, Recorded], book: References) -> str:
    """The page in MyST Markdown."""
    drawn = {node for edge in graph.edges(book, verdicts) for node in edge[:2]}
    judged = [(claim, verdicts.get(key)) for key, claim in claims().items()]
    filters = {"facets": facets, "files": files, "marked": _marked, "shown": shown, "slug": slug}
    return render(
        "claims.md.jinja",
        filters | {"tone": graph.tone},
        authors=AUTHORS,
        claims=claims(),
        contradicted=_contradicted(verdicts),
        against=_against(verdicts),
        menus=_menus([facets(*pair) for pair in judged]),
        papers=papers().values(),
        judged=judged,
        alone=len(claims().keys() - drawn),
        statements=book.statements,
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
    n_word = Counter(word_of(claim, entry) for claim, entry in asked)
    parts = [f"**{n_word[word]}** {word}" for word in ORDER if n_word[word] or word in CLAIMED]
    confirmed = [entry for _, entry in asked if entry and entry.verdict == CLAIMED[0]]
    n_grade = Counter(_grade(entry) for entry in confirmed)
    grades = [f"{n_grade[grade]} {grade}" for grade in GRADES if n_grade[grade]]
    if grades:
        parts[0] += f" ({', '.join(grades)})"
    whose = " of the two papers" if paper == "papers" else ""
    return f"Of **{len(asked)}** claims{whose}: {', '.join(parts)}.\n"


def coverage(paper: str, names: Mapping[str, Experiment]) -> str:
    """How many trainings of published grids are stored, and how many ran on a GPU, as a table."""
    counts = []
    for name, experiment in names.items():
        stored, total = experiment.done("paper", ALL, experiments.rows(name, "paper"))
        on_gpu = f"device != 'cpu' and variant == {experiment.variants[0]!r}"
        counts.append((total, stored, len(experiments.table(name, "paper").query(on_gpu))))
    counts.append(tuple(sum(column) for column in zip(*counts, strict=True)))
    sources = [experiment.source for experiment in names.values()]
    title = f"Published trainings of {AUTHORS[paper]}, how many are stored, and made on what"
    head = ("Figure or experiment", "trainings", "stored", "of these on a GPU")
    pairs = zip([*sources, "all"], counts, strict=True)
    rows = [[source, *map("{:,}".format, row)] for source, row in pairs]
    return titled_table(title, f"tab-report-{paper}", [head, *rows]) + "\n"


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


class Shown(NamedTuple):
    """What an entry shows of the checks of a verdict."""

    failing: list[tuple[str, Graded]]  # all that do not hold, or cannot tell
    holding: list[tuple[str, Graded]]  # two of those that do
    count: str  # how many of all hold, if some of these are not shown


def shown(judged: Recorded) -> Shown:
    """All checks that do not hold, and at most two of those that do, the strongest first.

    If more than two hold, one stands for all that say the same with other numbers, or of another
    setting (before a colon), and no instance in floating point beside the proof that decides.
    """
    failing = [pair for pair in judged.checks if pair[1].holds is not True]
    holding = [pair for pair in judged.checks if pair[1].holds is True]
    holding.sort(key=lambda pair: GRADES.index(pair[1].grade))
    count = ""
    if len(holding) > TICKS:
        count = f"{len(holding)} of {len(judged.checks)} checks hold"
        if _grade(judged) == "proved":
            holding = [pair for pair in holding if pair[1].grade != "checked"] or holding
        first = {_said(pair[0]): pair for pair in reversed(holding)}
        holding = [pair for pair in holding if pair in first.values()][:TICKS]
    return Shown(failing, holding, count)


def _said(evidence: str) -> str:
    """What a check says, without its setting and numbers."""
    _, _, words = evidence.partition(": ")
    return NUMBER.sub("", words or evidence)


def _contradicted(verdicts: Mapping[str, Recorded]) -> list[tuple[Claim, str, Recorded]]:
    """Claims that a verdict contradicts, each with the strongest check that speaks against it."""
    rows = []
    for claim, entry in _judged(verdicts):
        if entry.verdict == CLAIMED[-1]:
            failing = [pair for pair in entry.checks if pair[1].holds is False]
            evidence, _ = min(failing, key=lambda pair: GRADES.index(pair[1].grade))
            rows.append((claim, evidence, entry))
    return rows


def _against(verdicts: Mapping[str, Recorded]) -> dict[str, list[Claim]]:
    """The confirmed findings of ours that speak against part of a claim, by its key."""
    findings: dict[str, list[Claim]] = {}
    for claim, entry in _judged(verdicts):
        if claim.against and entry.verdict == CLAIMED[0]:
            findings.setdefault(claim.against, []).append(claim)
    return findings


def _judged(verdicts: Mapping[str, Recorded]) -> list[tuple[Claim, Recorded]]:
    """The claims that have a verdict, in their order."""
    return [(claim, verdicts[key]) for key, claim in claims().items() if key in verdicts]


def _marked(evidence: str, check: Graded, judged: Recorded) -> str:
    """As the chapter shows it, with a link to the proof; without a grade that the badge says."""
    said = re.sub(r", \d+ of \d+ (curves|checks)", "", judged.grade) == ground(check)
    proof = f"{{prf:ref}}`{check.by}`"
    if check.by:
        return f"{ticked(evidence, check)} " + (f"({proof})" if said else f"*(proved:* {proof}*)*")
    return ticked(evidence, check) if said else marked(evidence, check)


def _menus(occurring: list[dict[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """For each facet the values that occur, with their names, in a fixed order."""
    order = dict.fromkeys([*AUTHORS, *(entry["kind"] for entry in occurring), *ORDER, *GRADES])
    menus = {}
    for menu in occurring[0]:
        values = {entry[menu] for entry in occurring}
        menus[menu] = [(value, AUTHORS.get(value, value)) for value in order if value in values]
    return menus


# --- For programs ---------------------------------------------------------------------------------


def claims_json(verdicts: Mapping[str, Recorded]) -> str:
    """Every claim with its verdict and evidence; ``claims.schema.json`` describes the fields."""
    book = {"$schema": "claims.schema.json", "title": CITED["title"], "version": CITED["version"]}
    book["claims"] = [_entry(claim, verdicts.get(key)) for key, claim in claims().items()]
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _entry(claim: Claim, judged: Recorded | None) -> dict[str, Any]:
    names = files(claim)
    commits: set[str] = set()
    for name in names:
        table = pd.read_csv(SHIPPED / f"{name}.csv", usecols=["commit"])
        commits.update(map(str, table.commit.dropna()))
    entry: dict[str, Any] = {
        "id": claim.key,
        "source": papers()[claim.paper].source(claim.label),
        "kind": claim.kind,
        "statement": claim.says,
        "place": claim.place or None,
        "reads": claim.reads or None,
        "verdict": word_of(claim, judged),
        "why": claim.why or None,
        "true_if": claim.true_if or None,
        "limits": claim.thresholds or None,
        "history": claim.history or None,
        "rows": [f"{name}.csv" for name in names],
        "commits": sorted(commits),
        "address": f"claims.html#claim-{claim.key}",
    }
    if judged:
        entry["grade"] = _grade(judged)
        for unit, form in {"seeds": r"(?:of (\d+) )?seeds?", "curves": r"of (\d+) curves"}.items():
            if counts := re.search(rf"(\d+) {form}", judged.grade):
                entry[unit] = int(counts[1])
                entry[f"{unit}_of_the_paper"] = int(counts[2]) if counts[2] else None
        entry["sizes"] = judged.sizes
        entry["checks"] = [_check(evidence, check) for evidence, check in judged.checks]
        entry["cell"] = f"notebooks/{judged.chapter}.html#verdict-{claim.key}"
    return {name: value for name, value in entry.items() if value not in (None, [])}


def _check(evidence: str, check: Graded) -> dict[str, Any]:
    fields: dict[str, Any] = {"evidence": evidence, "holds": check.holds, "grade": check.grade}
    if check.by:
        fields["proof"] = check.by
    if not check.main:
        fields["main"] = False
    return fields


def findings_bib(verdicts: Mapping[str, Recorded]) -> str:
    """An entry for each finding of this book that a cell has judged."""
    findings = [pair for pair in _judged(verdicts) if pair[0].kind == "finding"]
    return render("findings.bib.jinja", {"braced": "{{{}}}".format}, cited=CITED, findings=findings)


def parameters_table() -> str:
    """A line for each chapter that has parameters."""
    lines = {}
    for chapter in chapters():
        label = re.search(r"^\((.+)\)=$", text_path(chapter).read_text("utf-8"), re.M)[1]
        lines[chapter] = label, parameters(chapter), ranges(chapter)
    return render("parameters.md.jinja", {"repr": repr}, chapters=lines)


def products() -> dict[str, str]:
    """Each file that is made, from the root, and its text."""
    verdicts, book = recorded(), graph.read()
    return {
        "book/claims.md": page(verdicts, book),
        "book/fragments/graph.html": graph.figure(book, verdicts),
        "book/fragments/totals.md": totals(verdicts),
        "book/fragments/totals-papers.md": totals(verdicts, "papers"),
        **{f"book/fragments/totals-{key}.md": totals(verdicts, key) for key in GRIDS},
        **{f"book/fragments/coverage-{key}.md": coverage(key, GRIDS[key]) for key in GRIDS},
        "book/fragments/parameters.md": parameters_table(),
        "book/extra/book/claims.json": claims_json(verdicts),
        "book/extra/book/findings.bib": findings_bib(verdicts),
    }


if __name__ == "__main__":
    for name, text in products().items():
        if not (path := ROOT / name).exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8", newline="\n")
            print(f"wrote {name}")
