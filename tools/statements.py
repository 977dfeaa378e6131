"""The statements that the chapters make, their proofs, and what the proofs refer to.

A proof belongs to the last labelled statement before it. Where one box proves several, or another,
a paragraph of it that opens with ``*Of {prf:ref}`label`.*`` begins the proof of that one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from attnmem.papers import claims, papers

from .chapters import chapters, text_path

AUTHORS = {key: paper.authors for key, paper in papers().items()}

BOX = re.compile(  # whose content is looked at only, since boxes may stand in it
    r"^(?P<fence>:{3,}|`{3,})\{prf:(?P<kind>\w+)\} *(?P<title>.*)\n"
    r"(?=(?P<content>(?:.*\n)*?)(?P=fence) *$)",
    re.MULTILINE,
)
LABEL = re.compile(r"^:label: *(\S+)", re.MULTILINE)
REF = re.compile(r"\{prf:ref\}`(?:[^`<]*<)?([^`>]+)>?`")
LINK = r"\{prf:ref\}`[^`]+`"
HEAD = re.compile(rf"\*(?:Of )?{LINK}(?:(?:,| and)\s{LINK})*\.\*")


class Statement(NamedTuple):
    """A theorem, lemma, definition or the like; ``title`` as in "Dana et al., Lemma 2: rank"."""

    label: str
    title: str
    chapter: str

    @property
    def name(self) -> str:
        """The title before the colon."""
        return self.title.partition(": ")[0]

    @property
    def subject(self) -> str:
        """The title behind the colon."""
        return self.title.partition(": ")[2]

    @property
    def claims(self) -> list[str]:
        """The keys of the claims of a paper that it states, by the paper's name and number.

        ``Dana et al., Lemmas 1 and 5`` names two. ``Dana et al., Lemma 2 (Step 2)`` states the
        claims Lemma 2 and Step 2, unless there is one of the whole name.
        """
        several = re.fullmatch(r"(.*\w)s (\w+(?:, \w+)*) and (\w+)", self.name)
        numbers = [*several[2].split(", "), several[3]] if several else []
        names = [f"{several[1]} {number}" for number in numbers] or [self.name]
        return [key for name in names for key in _stated(name)]


def _stated(name: str) -> list[str]:
    exact, parts = [], []
    for key, claim in claims().items():
        author = f"{AUTHORS[claim.paper]}, "
        if claim.kind != "finding" and name.startswith(author):
            label, named = name.removeprefix(author), claim.label.removesuffix(")").split(" (")
            if label in (claim.label, ", ".join(named)):
                exact.append(key)
            elif label in named:
                parts.append(key)
    return exact or parts


class References(NamedTuple):
    """Statements by label, and what each proof refers to."""

    statements: dict[str, Statement]
    proofs: dict[str, set[str]]


def read(texts: Mapping[str, str] | None = None) -> References:
    """All statements and proofs of the chapters; two statements of one label are an error."""
    statements, proofs = References({}, {})
    texts = texts or {chapter: text_path(chapter).read_text("utf-8") for chapter in chapters()}
    for chapter, text in texts.items():
        owners: set[str] = set()  # of a proof that does not say whose it is
        for box in BOX.finditer(text):
            if box["kind"] == "proof":
                _add_proof(proofs, owners, box["content"])
            elif label := LABEL.search(box["content"]):
                owners = {label[1]}
                if label[1] in statements:
                    raise ValueError(f"{chapter} labels a second statement {label[1]!r}")
                statements[label[1]] = Statement(label[1], box["title"].strip(), chapter)
    return References(statements, proofs)


def _add_proof(proofs: dict[str, set[str]], owners: set[str], content: str) -> None:
    for paragraph in re.split(r"\n\s*\n", content.strip()):
        head = HEAD.match(paragraph)
        owners = set(REF.findall(head[0])) if head else owners
        if not owners:
            raise ValueError(f"a proof without a statement: {paragraph[:60]}")
        for owner in owners:
            proofs.setdefault(owner, set()).update(set(REF.findall(paragraph)) - owners)
