"""What the papers claim, and what this book adds: ``claims.toml``, read once."""

import functools
import re
import tomllib
from importlib import resources
from typing import NamedTuple

from .checks import refuse

KINDS = ("definition", "assumption", "theorem", "remark", "figure", "table", "finding")
NUMBERED = re.compile(r"[A-Z][a-z]+s? (\d|[A-J]\b)")  # such as Theorem 1, Figures 7, Appendix B.2
PAGES = re.compile(r"\bpp?\. (\d+)(?: and (\d+))?")  # such as p. 4, pp. 19 and 20


class Paper(NamedTuple):
    """A paper that the book judges: ``key`` names it everywhere, ``title`` heads its claims."""

    key: str
    authors: str
    year: int
    title: str
    pages: int = 0  # of the text to which places refer; 0: no page is known

    def source(self, place: str) -> str:
        """Where something stands in it, such as ``Dana et al. 2025, Exp. 1``."""
        return f"{self.authors} {self.year}, {place}"


class Claim(NamedTuple):
    """One claim of a paper, or a finding of ours; a table of ``claims.toml``."""

    key: str  # its name everywhere in the book, such as mahdavi-theorem-1
    paper: str  # the key of its paper
    kind: str  # definition, assumption, theorem, remark (in prose), figure, table or finding (ours)
    label: str  # its name in the paper
    says: str  # the claim, as close to the paper's own words as ours can be
    place: str = ""  # where it stands in the paper, beside its label
    reads: str = ""  # its quantifiers as we read them; every claim of a paper has some
    why: str = ""  # why the verdict is what it is, in a line, where that is not plain
    true_if: str = ""  # what would make a contradicted claim true, to be read behind "True if"
    rows: tuple[str, ...] = ()  # files that bear on it: <experiment>/<profile or *>
    universal: bool = False  # about all data, so that one counterexample contradicts; theorems are
    thresholds: str = ""  # limits in its checks that are ours, when fixed, and what was known then
    history: str = ""  # earlier limits, and the trials behind these: for claims.json, not the page
    against: str = ""  # the claim of a paper that this finding of ours contradicts, if any
    needs: str = ""  # what it takes to judge the claim, while no chapter does
    left_out: str = ""  # why the book does not judge the claim, if it does not mean to


@functools.cache
def _tables() -> dict[str, dict]:
    return tomllib.loads(resources.files(__package__).joinpath("claims.toml").read_text("utf-8"))


def _check_fields(where: str, table: dict, pages: int) -> None:
    """Refuse a claim whose fields are not those that the head of ``claims.toml`` lists.

    ``pages``: of its paper's text, 0 if its pages are not known.
    """
    allowed = {*Claim._fields} - {"key", "paper"}
    for field in sorted({*table} - allowed):
        refuse(f"claims.toml, {where}", f"the field {field!r}", ", ".join(sorted(allowed)))
    for field in ("kind", "label", "says"):
        if field not in table:
            refuse(f"claims.toml, {where}", f"no {field}", "kind, label and says")
    if table["kind"] not in KINDS:
        refuse(f"claims.toml, {where}.kind", repr(table["kind"]), " or ".join(KINDS))
    if table["kind"] == "finding":
        for field in {"place", "reads", "true_if"} & {*table}:
            refuse(f"claims.toml, {where}", f"{field} of a finding", "it in claims of a paper only")
        return
    if not table.get("reads"):
        expected = "reads: its quantifiers as we read them (for all ..., there is ...)"
        refuse(f"claims.toml, {where}", "no reads", expected)
    place = table.get("place", "")
    if pages:
        named = [int(page) for pair in PAGES.findall(place) for page in pair if page]
        if not named or not all(1 <= page <= pages for page in named):
            expected = f"section and page, of {pages}, such as Section 4, p. 4"
            refuse(f"claims.toml, {where}.place", repr(place), expected)
    elif not NUMBERED.search(f"{table['label']}; {place}"):
        expected = "a label or a place with a number, such as Theorem 1 or Section 4.4"
        refuse(f"claims.toml, {where}.place", repr(place), expected)


@functools.cache
def papers() -> dict[str, Paper]:
    """The papers that the book judges, by key, in the order of ``claims.toml``."""
    result = {}
    for key, table in _tables().items():
        if "authors" not in table:
            expected = "a paper with authors, year and title; a claim is [<paper>.<name>]"
            refuse(f"claims.toml, [{key}]", "no authors", expected)
        pages = table.get("pages", 0)
        result[key] = Paper(key, table["authors"], table["year"], table["title"], pages)
    return result


@functools.cache
def claims() -> dict[str, Claim]:
    """All claims that the book judges, by key, in the order of ``claims.toml``."""
    result = {}
    for paper, tables in _tables().items():
        for name, table in tables.items():
            if not isinstance(table, dict):  # authors, year, title and pages
                continue
            _check_fields(f"[{paper}.{name}]", table, tables.get("pages", 0))
            fields = {"universal": table["kind"] == "theorem"} | table
            fields["rows"] = tuple(table.get("rows", ()))
            key = f"{paper}-{name}"
            result[key] = Claim(key, paper, **fields)
    return result
