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


class Claim(NamedTuple):
    """One claim of a paper: ``key`` names it everywhere, ``label`` is its name in the paper.

    ``rows``: the files of measurements that bear on it, as ``<experiment>/<profile>``,
    or ``<experiment>/*`` for every profile that is stored.
    """

    key: str
    paper: str
    kind: str
    label: str
    says: str
    rows: tuple[str, ...]


@functools.cache
def claims() -> dict[str, Claim]:
    """All claims that the book judges, by key, in the order of the papers (``claims.toml``)."""
    table = tomllib.loads(resources.files(__package__).joinpath("claims.toml").read_text("utf-8"))
    return {
        f"{paper}-{key}": Claim(
            f"{paper}-{key}", paper, **entry | {"rows": (*entry.get("rows", ()),)}
        )
        for paper, entries in table.items()
        for key, entry in entries.items()
    }


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


def verdict(key: str, checks: Mapping[str, bool]) -> None:
    """Judge a claim by named checks: confirmed if all hold, contradicted if none, else in part.

    ``checks`` maps each piece of evidence, a sentence with its measured numbers, to whether it
    speaks for the claim. The verdict is shown, and stored for the claims page.
    """
    if key not in claims():
        refuse("verdict", repr(key), "a key of claims()")
    if not checks:
        refuse(f"verdict {key!r}", "no checks", "at least one")
    results = {evidence: bool(holds) for evidence, holds in checks.items()}
    word = word_for(results.values())
    claim = claims()[key]
    marks = [f"- {'✓' if holds else '✗'} {evidence}" for evidence, holds in results.items()]
    text = "\n".join([f"**{claim.label}: {word}.**", "", *marks])
    data = {"text/markdown": text, "text/plain": text}
    checks_in_order = [list(item) for item in results.items()]  # notebooks sort the keys of a dict
    _display(data, {METADATA: {"claim": key, "verdict": word, "checks": checks_in_order}})


def word_for(checks: Iterable[bool]) -> str:
    """The verdict that follows from the checks."""
    return {(True,): "confirmed", (False,): "contradicted"}.get((*{*checks},), "in part")


def _display(data: dict[str, str], metadata: dict) -> None:
    try:
        from IPython.display import display
    except ImportError as error:
        raise ImportError(
            "attnmem.reporting needs IPython: run it in a notebook, or pip install 'attnmem[book]'"
        ) from error
    display(data, metadata=metadata, raw=True)
