"""What programs read: claims.json beside the claims page, BibTeX of findings, Zenodo's metadata.

All of it follows from the claims, the recorded verdicts, the rows and ``CITATION.cff``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pandas as pd
import yaml

from attnmem.lab.store import SHIPPED
from attnmem.papers import Claim, claims, papers

from .chapters import BOOK, ROOT, renew
from .claims import files
from .verdicts import Recorded, recorded, word_of

EXTRA = BOOK / "extra" / "book"  # copied beside the pages as it is
DATA, FINDINGS, ZENODO = EXTRA / "claims.json", EXTRA / "findings.bib", ROOT / ".zenodo.json"


def citation() -> dict[str, Any]:
    """What ``CITATION.cff`` says."""
    return yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))


def claims_json(verdicts: Mapping[str, Recorded]) -> str:
    """Every claim with its verdict and evidence; ``claims.schema.json`` describes the fields."""
    entries = [_entry(claim, verdicts.get(key)) for key, claim in claims().items()]
    cited = citation()
    book = {"title": cited["title"], "version": cited["version"], "claims": entries}
    return json.dumps({"$schema": "claims.schema.json"} | book, indent=1, ensure_ascii=False) + "\n"


def _entry(claim: Claim, judged: Recorded | None) -> dict[str, Any]:
    names = files(claim)
    entry: dict[str, Any] = {
        "id": claim.key,
        "source": papers()[claim.paper].source(claim.label),
        "kind": claim.kind,
        "statement": claim.says,
        "verdict": word_of(claim, judged),
        "rows": [f"{name}.csv" for name in names],
        "commits": _commits(names),
        "address": f"claims.html#claim-{claim.key}",
    }
    if judged:
        entry["grade"] = judged.grade.partition(",")[0]
        if seeds := re.search(r"(\d+) (?:of (\d+) )?seeds?", judged.grade):
            entry["seeds"] = int(seeds[1])
            entry["seeds_of_the_paper"] = int(seeds[2]) if seeds[2] else None
        if curves := re.search(r"(\d+) of (\d+) curves", judged.grade):
            entry["curves"], entry["curves_of_the_paper"] = map(int, curves.groups())
        entry["sizes"] = judged.sizes
        entry["checks"] = [
            {"evidence": evidence, "holds": check.holds, "grade": check.grade}
            | ({"proof": check.by} if check.by else {})
            | ({} if check.main else {"main": False})
            for evidence, check in judged.checks
        ]
        entry["cell"] = f"notebooks/{judged.chapter}.html#verdict-{claim.key}"
    return {name: value for name, value in entry.items() if value not in (None, [])}


def _commits(names: list[str]) -> list[str]:
    """The commits whose code measured the rows of files."""
    tables = [pd.read_csv(SHIPPED / f"{name}.csv", usecols=["commit"]) for name in names]
    return sorted({str(commit) for table in tables for commit in table.commit.dropna()})


def findings_bib(verdicts: Mapping[str, Recorded]) -> str:
    """An entry for each finding of this book that a cell has judged."""
    cited = citation()
    author = " and ".join(f"{{{author['name']}}}" for author in cited["authors"])
    year = cited["date-released"][:4]
    entries = []
    for key, claim in claims().items():
        if claim.kind == "finding" and key in verdicts:
            judged = verdicts[key]
            fields = {
                "author": author,
                "title": f"{{{claim.label}}}",
                "howpublished": f"In: {cited['title']}, version {cited['version']}",
                "year": year,
                "note": f"{claim.says} ({judged.verdict}, {judged.grade})",
            }
            body = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items())
            entries.append(f"@misc{{attnmem-{key},\n{body}}}\n")
    return "\n".join(entries)


def zenodo() -> str:
    """Zenodo's metadata of a release."""
    cited = citation()
    papers_cited = [one["identifiers"][0]["value"] for one in cited["references"]]
    record = {
        "title": cited["title"],
        "upload_type": "software",
        "version": cited["version"],
        "description": cited["message"],
        "creators": [{"name": author["name"]} for author in cited["authors"]],
        "license": cited["license"][0],
        "related_identifiers": [
            {"identifier": name, "relation": "references"} for name in papers_cited
        ],
    }
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    VERDICTS = recorded()
    EXTRA.mkdir(parents=True, exist_ok=True)
    renew(DATA, claims_json(VERDICTS))
    renew(FINDINGS, findings_bib(VERDICTS))
    renew(ZENODO, zenodo())
