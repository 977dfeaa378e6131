"""Write book/claims.md: every claim of both papers, with the verdict that its chapter recorded.

Nothing on that page is typed: the claims come from attnmem.reporting, the verdicts and their
evidence from the outputs of the executed notebooks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

import nbformat

from attnmem.reporting import METADATA, Claim, claims
from attnmem.results import SHIPPED

from chapters import BOOK, chapters, notebook_path, renew

PAGE, TOTALS = BOOK / "claims.md", BOOK / "fragments" / "totals.md"
MEASURED = "../lib/attnmem/measurements"  # seen from the page
NOT_YET = "not yet"
WORDS = ("confirmed", "in part", "contradicted", NOT_YET)
PAPERS = {
    "mahdavi": ("Multi-head attention: Mahdavi, Liao and Thrampoulidis", "mahdavi2024"),
    "dana": ("Attention-only transformers: Dana, Pydi and Chevaleyre", "dana2025"),
}
HEAD = """\
(ch-claims)=
# Claims and verdicts

Every numbered statement, figure and table of the two papers, and every finding of our own, with
what this book can say about it. A verdict is recorded by the cell that checks the claim, when it
runs; this page is collected from those outputs.

**confirmed**
: every check of the chapter speaks for the claim, as we read it there;

**in part**
: some checks speak for the claim, others, marked ✗, against it;

**contradicted**
: every check speaks against it;

**not yet**
: no chapter has judged the claim.

A number stands for one run on one machine; the verdict links to the cell that made it, and where it
rests on trainings or on features of models, their rows can be saved from here.

```{include} fragments/totals.md
```

```{raw} html
:file: fragments/claims.html
```
"""


class Recorded(NamedTuple):
    """A verdict found in a notebook."""

    chapter: str
    verdict: str
    checks: list[tuple[str, bool]]


def recorded() -> dict[str, Recorded]:
    """All verdicts in the executed notebooks, by claim; two on one claim are an error."""
    found: dict[str, Recorded] = {}
    for chapter in chapters():
        for cell in nbformat.read(notebook_path(chapter), 4).cells:
            for output in cell.get("outputs", []):
                entry = output.get("metadata", {}).get(METADATA)
                if entry is None:
                    continue
                if entry["claim"] in found:
                    raise ValueError(f"{chapter} judges {entry['claim']} a second time")
                found[entry["claim"]] = Recorded(chapter, entry["verdict"], entry["checks"])
    return found


def page(verdicts: Mapping[str, Recorded]) -> str:
    """The page in MyST Markdown, from what was recorded."""
    parts = [HEAD]
    for paper, group in groupby(claims().values(), key=lambda claim: claim.paper):
        title, citation = PAPERS[paper]
        head = _TABLE_HEAD.format(paper=paper, citation=citation).splitlines()
        rows = [_row(claim, verdicts.get(claim.key)) for claim in group]
        parts.append("\n".join([f"## {title}\n", *head, *rows, ":::", ""]))
    return "\n".join(parts)


def totals(verdicts: Mapping[str, Recorded]) -> str:
    """How many claims have which verdict, in one line."""
    known = claims()
    counts = Counter(verdicts[key].verdict if key in verdicts else NOT_YET for key in known)
    parts = [f"**{counts[word]}** {word}" for word in WORDS]
    return f"Of **{len(known)}** claims: {', '.join(parts)}.\n"


_TABLE_HEAD = """\
:::{{list-table}} Claims of {{cite:t}}`{citation}`
:header-rows: 1
:widths: 20 43 37
:class: claims
:name: tab-claims-{paper}

* - Claim
  - What it says
  - Verdict and evidence"""


def _row(claim: Claim, found: Recorded | None) -> str:
    label = f"{claim.label}\n\n    *{claim.kind}*"
    return f"* - {label}\n  - {claim.says}\n  - {_evidence(claim, found)}"


def files(claim: Claim) -> list[str]:
    """The stored files of rows that bear on a claim, as ``<experiment>/<profile>``."""
    stored = (path for name in claim.rows for path in sorted(SHIPPED.glob(f"{name}.csv")))
    return [path.relative_to(SHIPPED).with_suffix("").as_posix() for path in stored]


def _evidence(claim: Claim, found: Recorded | None) -> str:
    rows = ", ".join(f"{{download}}`{name} <{MEASURED}/{name}.csv>`" for name in files(claim))
    parts = [f"{{ref}}`{found.verdict} <verdict-{claim.key}>`"] if found else [NOT_YET]
    if found:
        parts += [f"{'✓' if holds else '✗'} {text}" for text, holds in found.checks]
    return "\n\n    ".join(parts + [f"Rows: {rows}"] * bool(rows))


def main() -> int:
    """Write the page and the totals."""
    verdicts = recorded()
    renew(PAGE, page(verdicts))
    renew(TOTALS, totals(verdicts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
