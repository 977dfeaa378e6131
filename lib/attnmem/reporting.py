"""What a chapter leaves behind when it runs: numbers to quote, and verdicts on claims.

Both travel inside the notebook's outputs, so the book quotes and judges only what a run produced.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import NamedTuple

from .checks import checked_by, refuse

GLUE = "application/papermill.record/"  # the MIME prefix that myst_nb reads glued values from
METADATA = "attnmem"  # the key of a verdict in its output's metadata


class Paper(NamedTuple):
    """A paper that the book judges: ``key`` names it everywhere, ``title`` heads its claims."""

    key: str
    authors: str
    year: int
    title: str

    @property
    def citation(self) -> str:
        """Its key in the bibliography, such as ``dana2025``."""
        return f"{self.key}{self.year}"

    def source(self, what: str) -> str:
        """Where something stands in it, such as ``Dana et al. 2025, Exp. 1``."""
        return f"{self.authors} {self.year}, {what}"


class Claim(NamedTuple):
    """One claim of a paper: ``key`` names it everywhere, ``label`` is its name in the paper.

    ``kind``: definition, assumption, theorem, figure, table or finding (ours).
    ``says``: the claim, as close to the paper's own words as ours can be.
    ``rows``: the files of measurements that bear on it, as ``<experiment>/<profile>``,
    or ``<experiment>/*`` for every profile that is stored.
    ``universal``: a statement about all data, which one counterexample contradicts, as theorems.
    ``thresholds``: the limits in its checks that are ours, when they were fixed, what was known.
    ``against``: the claim of a paper that this finding of ours speaks against, if it does.
    """

    key: str
    paper: str
    kind: str
    label: str
    says: str
    rows: tuple[str, ...] = ()
    universal: bool = False
    thresholds: str = ""
    against: str = ""


class Graded(NamedTuple):
    """What a check found, and what it rests on: see :func:`proved` and its neighbours."""

    holds: bool
    grade: str
    by: str | None = None
    seeds: int | None = None
    of: int | None = None


GRADES = ("proved", "certified", "checked", "measured")  # strongest first
EXACT = ("proved", "certified")


def proved(holds: bool, *, by: str) -> Graded:
    """Rests on a proof in the book, labelled ``by``; ``holds``: what the page computes agrees."""
    return Graded(bool(holds), "proved", by=by)


def certified(holds: bool) -> Graded:
    """Rests on exact or ball arithmetic, at the sizes that the evidence names."""
    return Graded(bool(holds), "certified")


def checked(holds: bool) -> Graded:
    """Rests on instances in floating point, which the evidence names."""
    return Graded(bool(holds), "checked")


def measured(holds: bool, seeds: int, of: int | None = None) -> Graded:
    """Rests on trainings or samples with ``seeds`` seeds, ``of`` so many as were published."""
    return Graded(bool(holds), "measured", seeds=int(seeds), of=None if of is None else int(of))


@functools.cache
def _papers_and_claims() -> dict[str, dict]:
    """``claims.toml``: for each paper what is known of it, and a table for each of its claims."""
    return tomllib.loads(resources.files(__package__).joinpath("claims.toml").read_text("utf-8"))


@functools.cache
def papers() -> dict[str, Paper]:
    """The papers that the book judges, by key, in the order of ``claims.toml``.

    Returns:
        A :class:`Paper` for each key.

    Example:
        >>> papers()["dana"].source("Exp. 1")
        'Dana et al. 2025, Exp. 1'
    """
    return {
        key: Paper(key, entry["authors"], entry["year"], entry["title"])
        for key, entry in _papers_and_claims().items()
    }


@functools.cache
def claims() -> dict[str, Claim]:
    """All claims that the book judges, by key, in the order of the papers (``claims.toml``)."""
    return {
        f"{paper}-{key}": _claim(paper, key, entry)
        for paper, entries in _papers_and_claims().items()
        for key, entry in entries.items()
        if isinstance(entry, dict)
    }


def _claim(paper: str, key: str, entry: dict) -> Claim:
    entry = {"universal": entry["kind"] == "theorem"} | entry
    return Claim(f"{paper}-{key}", paper, **entry | {"rows": (*entry.get("rows", ()),)})


def _check_glue(key, value) -> None:
    if not isinstance(value, (str, int)):
        refuse(f"glue {key!r}", repr(value), "a string or an integer: round floats first")


@checked_by(_check_glue)
def glue(key: str, value: str | int) -> None:
    """Store a rounded string or an integer under ``key``; pages quote it with ``{glue:text}``.

    The same as ``myst_nb.glue``, without Sphinx, so that it works on Colab.
    """
    data = {f"{GLUE}text/plain": repr(value)}
    _display(data, {"scrapbook": {"name": key, "mime_prefix": GLUE}})


def _check_verdict(key, checks, *, sizes=None, instead=None) -> None:
    if key not in claims():
        refuse("verdict", repr(key), "a key of claims()")
    if not checks:
        refuse(f"verdict {key!r}", "no checks", "at least one")
    for evidence, check in checks.items():
        if not isinstance(check, Graded):
            refuse(
                f"verdict {key!r}",
                f"{check!r} for {evidence!r}",
                "what it rests on: proved(...), certified(...), checked(...) or measured(...)",
            )
    if sizes is None and any(check.grade == "measured" for check in checks.values()):
        refuse(f"verdict {key!r}", "no sizes", "sizes: what was measured, since some checks are")
    word = word_for(claims()[key], checks.values())
    if claims()[key].universal and word == "contradicted" and instead is None:
        refuse(f"verdict {key!r}", "no instead", "the label of what is true, as it is contradicted")


@checked_by(_check_verdict)
def verdict(
    key: str,
    checks: Mapping[str, Graded],
    *,
    sizes: str | None = None,
    instead: str | None = None,
) -> None:
    """Judge a claim by named checks; show the verdict, and store it for the claims page.

    ``checks`` maps each piece of evidence, a sentence with its numbers, to whether it speaks for
    the claim and what it rests on: :func:`proved`, :func:`certified`, :func:`checked` or
    :func:`measured`. The word and its grade follow (:func:`word_for`, :func:`grade_for`).

    ``sizes``: the sizes and data of what was measured, shown beside the verdict. ``instead``: the
    label of the statement that is true instead, asked for where a theorem is contradicted.
    Raises ``ValueError`` for an unknown claim, no checks, a check without a grade, measured checks
    without ``sizes``, and a contradicted theorem without ``instead``.
    """
    claim = claims()[key]
    entry = {
        "claim": key,
        "verdict": word_for(claim, checks.values()),
        "grade": grade_for(claim, checks.values()),
        "sizes": sizes,
        "instead": instead,
        # A list, since notebooks sort the keys of a dict.
        "checks": [[evidence, *check] for evidence, check in checks.items()],
    }
    word = f"**{claim.label}: {entry['verdict']}**"
    head = " · ".join(filter(None, [word, entry["grade"], sizes]))
    marks = [f"- {marked(evidence, check)}" for evidence, check in checks.items()]
    text = "\n".join([head, "", *marks])
    _display({"text/markdown": text, "text/plain": text}, {METADATA: entry})


def marked(evidence: str, check: Graded) -> str:
    """One line: whether a check speaks for the claim, what it found, and what it rests on."""
    return f"{'✓' if check.holds else '✗'} {evidence} *({name_of([check])})*"


WORDS = {
    "definition": ("illustrated", "illustrated in part", "not as stated"),
    "assumption": ("met", "met in part", "not met"),
}
CLAIMED = ("confirmed", "in part", "contradicted")


def word_for(claim: Claim, checks: Iterable[Graded]) -> str:
    """The word that follows: all checks hold, some do, none does.

    A universal statement with one proved or certified counterexample is contradicted, however many
    instances agree with it.
    """
    checks = [*checks]
    all_hold, some_hold, none_holds = WORDS.get(claim.kind, CLAIMED)
    failing = [check for check in checks if not check.holds]
    if not failing:
        return all_hold
    counterexample = claim.universal and any(check.grade in EXACT for check in failing)
    return none_holds if counterexample or len(failing) == len(checks) else some_hold


def grade_for(claim: Claim, checks: Iterable[Graded]) -> str:
    """What the word rests on: for a universal statement its strongest check, else its weakest.

    Of a contradicted claim the checks that fail decide. Measured checks add the fewest seeds.
    """
    checks = [*checks]
    if word_for(claim, checks) == WORDS.get(claim.kind, CLAIMED)[-1]:
        checks = [check for check in checks if not check.holds]
    order = sorted(checks, key=lambda check: GRADES.index(check.grade))
    decisive = order[0 if claim.universal else -1].grade
    return name_of(check for check in checks if check.grade == decisive)


def name_of(checks: Iterable[Graded]) -> str:
    """The grade of checks of one grade, such as ``measured, 1 of 6 seeds``."""
    least = min(checks, key=lambda check: check.seeds or 0)
    if least.grade != "measured":
        return least.grade
    of = "" if least.of is None else f" of {least.of}"
    return f"measured, {least.seeds}{of} seed{'s' * ((least.of or least.seeds) != 1)}"


def _display(data: dict[str, str], metadata: dict) -> None:
    try:
        from IPython.display import display
    except ImportError as error:
        raise ImportError(
            "attnmem.reporting needs IPython: run it in a notebook, or pip install 'attnmem[book]'"
        ) from error
    display(data, metadata=metadata, raw=True)
