"""What a chapter leaves behind when it runs: numbers to quote, and verdicts on claims.

Both are stored in the notebook's outputs, so the book quotes and judges only what a run produced.
"""

import difflib
import html
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..checks import need, refuse
from ..papers import Claim, claims

_GLUE = "application/papermill.record/"  # the MIME prefix that myst_nb reads glued values from
METADATA = "attnmem"  # the key of a verdict in its output's metadata
GRADES = ("proved", "certified", "checked", "measured")  # strongest first
CLAIMED = ("confirmed", "in part", "contradicted")  # see word_for
NOT_YET = "not yet"  # while nothing can tell
WORDS = {
    "definition": ("illustrated", "illustrated in part", "not as stated"),
    "assumption": ("met", "met in part", "not met"),
}


class Graded(NamedTuple):
    """Whether a check supports the claim, and what it rests on."""

    holds: bool | None  # None where a measured curve cannot tell
    grade: str  # one of GRADES
    by: str | None = None  # the label of the proof, for a proved check
    seeds: int | None = None  # for a measured check
    of: int | None = None  # the seeds that the paper used, where ours are fewer
    main: bool = True  # whether it can carry the claim


def proved(agrees: bool, *, by: str) -> Graded:
    """What a proof in the book shows, whose label is ``by``, such as ``thm-parity``.

    The proof is by hand, on the page of that statement; nothing here repeats or checks it.
    ``agrees``: whether the instances that go with it do. If not, the check is wrong, or the proof,
    and the error says so: no instance moves the word of what is proved.
    """
    if not agrees:
        raise AssertionError(f"an instance misses what {by} proves: correct the check or the proof")
    return Graded(True, "proved", by=by)


def disproved(agrees: bool, *, by: str) -> Graded:
    """What a proof in the book shows to be false; the rest as for :func:`proved`."""
    return proved(agrees, by=by)._replace(holds=False)


def certified(holds: bool) -> Graded:
    """A check that rests on exact or ball arithmetic, at the sizes that the evidence names."""
    return Graded(bool(holds), "certified")


def tried(holds: bool) -> Graded:
    """A check that rests on instances in floating point, which the evidence names."""
    return Graded(bool(holds), "checked")


def measured(holds: bool | None, seeds: int, of: int | None = None) -> Graded:
    """A check that rests on so many seeds, ``of`` the paper's; None: they cannot tell."""
    holds = None if holds is None else bool(holds)
    return Graded(holds, "measured", seeds=int(seeds), of=None if of is None else int(of))


def word_for(claim: Claim, checks: Iterable[Graded], curves: int | None = None) -> str:
    """The word of a verdict: no check fails, every main check does, or neither is so.

    For the first, at least half of the published ``curves`` must hold (without these: of the main
    checks). A universal statement with one proved or certified counterexample is contradicted,
    however many instances agree with it. The kind of the claim decides which three words there are.
    """
    checks = [*checks]
    all_hold, some_hold, none_holds = WORDS.get(claim.kind, CLAIMED)
    failing = [check for check in checks if check.holds is False]
    main = [check.holds for check in checks if check.main]
    exact = any(check.grade in ("proved", "certified") for check in failing)
    if (claim.universal and exact) or {*main} == {False}:
        return none_holds
    enough = 2 * main.count(True) >= (curves or len(main))
    return all_hold if enough and not failing else some_hold


def grade_for(claim: Claim, checks: Iterable[Graded], curves: int | None = None) -> str:
    """What the word rests on: the strongest check of a universal statement, else the weakest.

    For a contradicted claim only the checks that fail count. Measured checks add the fewest seeds,
    and on how many of the published ``curves`` the main ones hold; without curves, how many of all
    checks hold, if the claim is true in part: such as ``measured, 1 of 4 curves, 6 seeds``.
    """
    checks = [*checks]
    _, some_hold, none_holds = WORDS.get(claim.kind, CLAIMED)
    word = word_for(claim, checks, curves)
    held = sum(check.holds is True for check in checks if check.main or not curves)
    n_checks = len(checks)
    if word == none_holds:
        checks = [check for check in checks if not check.holds]
    telling = [check for check in checks if check.holds is not None]
    ranked = sorted((check.grade for check in telling), key=GRADES.index)
    decisive = ranked[0] if claim.universal else ranked[-1]
    grade, *seeds = _grade_of([c for c in telling if c.grade == decisive]).split(", ")
    counts = []
    if curves:
        counts = [f"{held} of {curves} curves"]
    elif word == some_hold and decisive == "measured":
        counts = [f"{held} of {n_checks} checks"]
    return ", ".join([grade, *counts, *seeds])


def _grade_of(checks: Iterable[Graded]) -> str:
    """The grade of checks that have the same one, with the fewest seeds if it is ``measured``."""
    weakest = min(checks, key=lambda check: check.seeds or 0)
    if weakest.grade != "measured":
        return weakest.grade
    noun = "seed" if (weakest.of or weakest.seeds) == 1 else "seeds"
    if weakest.of is None:
        return f"measured, {weakest.seeds} {noun}"
    return f"measured, {weakest.seeds} of {weakest.of} {noun}"


def glue(key: str, value: str | int) -> None:
    """Store a rounded string or an integer, which pages quote by its key with ``{glue:text}``.

    The same as ``myst_nb.glue``, without Sphinx, so that it works on Colab.
    """
    if not isinstance(value, (str, int)):
        refuse(f"glue {key!r}", repr(value), "a string or an integer: round floats first")
    data = {f"{_GLUE}text/plain": repr(value)}
    _display(data, {"scrapbook": {"name": key, "mime_prefix": _GLUE}})


def verdict(
    key: str,
    checks: Mapping[str, Graded],
    *,
    also: Mapping[str, Graded] | None = None,
    sizes: str | None = None,
    instead: str | None = None,
    curves: int | None = None,
) -> None:
    """Judge a claim by named checks; show the verdict, and store it for the claims page.

    The word and its grade follow from the checks (:func:`word_for`, :func:`grade_for`). A check
    joins all that the claim says of one curve: from its evidence, a sentence with its numbers, to
    what :func:`proved`, :func:`certified`, :func:`tried` or :func:`measured` returned. Those in
    ``also`` must hold, too, but cannot carry the claim alone. Measured checks need ``sizes``, the
    sizes and data of what was measured, and a contradicted theorem ``instead``, the label of what
    is true. ``curves``: how many the paper published, if the main checks are one for each. While no
    check can tell, the claim is not judged yet; only one that ``needs`` something may have none.
    """
    if key not in claims():
        near = ", ".join(difflib.get_close_matches(key, claims(), 3, 0))
        refuse("verdict", repr(key), f"the key of a claim in claims.toml, such as {near}")
    claim, name = claims()[key], f"verdict {key!r}"
    for evidence, check in {**checks, **(also or {})}.items():
        if not isinstance(check, Graded):
            grades = "(dis)proved(...), certified(...), tried(...), measured(...)"
            refuse(name, f"{check!r} for {evidence!r}", f"what it rests on: one of {grades}")
    secondary = {evidence: check._replace(main=False) for evidence, check in (also or {}).items()}
    checks = {**checks, **secondary}
    lines = [f"- {marked(evidence, check)}" for evidence, check in checks.items()]
    if not checks and not claim.needs:
        refuse(name, "no checks", "at least one")
    if all(check.holds is None for check in checks.values()):
        if claim.needs:
            lines.append(f"- missing: {claim.needs}")
        show("\n".join([f"**{claim.label}: {NOT_YET}**", "", *lines]))
        return
    if sizes is None and any(check.grade == "measured" for check in checks.values()):
        refuse(name, "no sizes", "sizes: what was measured, since some checks are")
    word = word_for(claim, checks.values(), curves)
    if claim.universal and word == "contradicted" and instead is None:
        refuse(name, "no instead", "the label of what is true, as it is contradicted")
    grade = grade_for(claim, checks.values(), curves)
    entry = {"claim": key, "verdict": word, "grade": grade, "sizes": sizes, "instead": instead}
    # A list, since notebooks sort the keys of a dict.
    entry["checks"] = [[evidence, *check] for evidence, check in checks.items()]
    entry["curves"] = curves
    head = " · ".join(filter(None, [f"**{claim.label}: {word}**", grade, sizes]))
    show("\n".join([head, "", *lines]), {METADATA: entry})


def ground(check: Graded) -> str:
    """What a check rests on: its grade, with its seeds."""
    return _grade_of([check])


def ticked(evidence: str, check: Graded) -> str:
    """Whether a check supports the claim, and its evidence."""
    mark = "✓" if check.holds else "✗"
    if check.holds is None:
        mark = "· cannot tell:"
    return f"{mark} {evidence}"


def marked(evidence: str, check: Graded) -> str:
    """One line about a check: whether it supports the claim, its evidence and what it rests on."""
    return f"{ticked(evidence, check)} *({ground(check)})*"


def titled_table(title: str, name: str, rows: Sequence[Iterable[object]]) -> str:
    """A numbered table in MyST Markdown; the first of the rows is its head."""
    head, *body = ([*map(str, row)] for row in rows)
    lines = "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))
    return f":::{{table}} {title}\n:name: {name}\n\n{lines}\n:::"


def show(text: str, metadata: dict | None = None) -> None:
    """Show a text in MyST Markdown, as the output of a cell."""
    _display({"text/markdown": text, "text/plain": text}, metadata or {})


def attempt(
    answer: object, check: Callable[[Any], bool | str], among: Iterable[Any] | str = ()
) -> None:
    """Say whether an answer to an exercise is right; None is no answer yet.

    ``check`` returns True, or what is wrong with the answer, in words. A whole number may be
    written as ``3.0``. An answer that the check cannot take, such as a number where four are asked
    for, is wrong, and the check's own words say why. Without an answer, the book's page gets a
    field: it judges the answers ``among``, increasing numbers or strings, by what the check says of
    them now, or by the function of that name in a picture of the page.

    Example:
        >>> attempt(4, lambda heads: heads == 3 or f"{heads} heads store {9 * heads} labels")
        not yet: 4 heads store 36 labels
    """
    if answer is not None:
        print(_judged(answer, check))
        return
    print("no answer yet")
    if among:
        answers = json.dumps(among if isinstance(among, str) else _spans(among, check))
        field = f'<div class="attempt" hidden data-answers="{html.escape(answers)}"></div>'
        _display({"text/html": field, "text/plain": ""}, {})


def _spans(among: Iterable[Any], check: Callable[[Any], bool | str]) -> list[list]:
    """First and last of answers in a row that get the same line, and the line; a string alone."""
    spans: list[list] = []
    for answer in among:
        line = _judged(answer, check)
        if spans and spans[-1][2] == line and not isinstance(answer, str):
            spans[-1][1] = answer
        else:
            spans.append([answer, answer, line])
    return spans


def _judged(answer: Any, check: Callable[[Any], bool | str]) -> str:
    """The line that an answer gets."""
    number = answer
    if isinstance(answer, float) and answer.is_integer():
        number = int(answer)
    try:
        result = check(number)
    except Exception as error:  # of any kind, since an answer may be anything
        why = (str(error) or type(error).__name__).splitlines()[0]
        return f"not yet: {answer!r} cannot be checked ({why})"
    if isinstance(result, str):
        return f"not yet: {result}"
    if result:
        return "right"
    return f"not yet: try another answer than {answer!r}"


def _display(data: dict[str, str], metadata: dict) -> None:
    """In a notebook all of it; in a plain Python, as for code that is copied, its text."""
    notebook = sys.modules.get("IPython")
    if notebook and notebook.get_ipython():
        need("IPython.display").display(data, metadata=metadata, raw=True)
    elif text := data.get("text/plain"):
        print(text)
