"""The verdicts that the executed notebooks record, and what a claim is called without one."""

from typing import NamedTuple

import nbformat

from attnmem.pages.reporting import METADATA, Graded
from attnmem.papers import Claim

from .chapters import chapters, notebook_path

NOT_YET, LEFT_OUT = "not yet", "left out"


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
        for output in (output for cell in cells for output in cell.get("outputs", [])):
            if entry := {**output.get("metadata", {}).get(METADATA, {})}:
                if (claim := entry.pop("claim")) in verdicts:
                    raise ValueError(f"{chapter} judges {claim} a second time")
                entry["checks"] = [(said, Graded(*check)) for said, *check in entry["checks"]]
                verdicts[claim] = Recorded(chapter, **entry)
    return verdicts


def word_of(claim: Claim, judged: Recorded | None) -> str:
    """The word of the verdict on a claim, or what it is called without one."""
    return judged.verdict if judged else LEFT_OUT if claim.left_out else NOT_YET
