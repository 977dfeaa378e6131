"""Drop the icons that no page shows from the built book: of the theme's 2000, some twenty stay.

They are on every page, twice. The theme's script, 1.5 MB long, holds each icon as an entry of an
object, ``"name":[width,height,["alias"],"code","path"]``; its style sheet, as a rule
``.fa-name:before,.fa-alias:before{content:"code"}``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import NamedTuple

from chapters import HTML, ROOT

TEXT = r'"(?:[^"\\]|\\.)*"'


class Form(NamedTuple):
    """How a file writes an icon, what names it has there, and how long the file is without most."""

    icon: re.Pattern
    names: Callable[[re.Match], set[str]]
    most: int  # characters; a longer file is not of the form that is known


SCRIPT = HTML / "_static" / "scripts" / "fontawesome.js"
SHEET = HTML / "_static" / "styles" / "pydata-sphinx-theme.css"
FORMS = {
    SCRIPT: Form(
        re.compile(
            r'"?([a-z0-9-]+)"?:\[\d+,\d+,\[([^\]]*)\],'
            rf'"[0-9a-f]+",(?:{TEXT}|\[{TEXT}(?:,{TEXT})*\])\],?'
        ),
        lambda entry: {entry[1], *re.findall(r'"([a-z0-9-]+)"', entry[2])},
        300_000,
    ),
    SHEET: Form(
        re.compile(rf"((?:\.fa-[a-z0-9-]+:before,?)+)\{{content:{TEXT}\}}"),
        lambda rule: set(re.findall(r"\.fa-([a-z0-9-]+)", rule[1])),
        330_000,
    ),
}


def used() -> set[str]:
    """Names of icons in the pages and in scripts, which put some on them."""
    files = [p for p in HTML.rglob("*") if p.suffix in {".html", ".js"} and p != SCRIPT]
    return {name for path in files for name in re.findall(r"\bfa-([a-z0-9-]+)", path.read_text())}


def slimmed(text: str, form: Form, names: set[str]) -> str:
    """A file's text with those of its icons that have a name among ``names``."""
    return form.icon.sub(lambda icon: icon[0] if form.names(icon) & names else "", text)


def main() -> int:
    """Rewrite both files in place; fails if the form of one is no longer the one that is known."""
    names = used()
    for path, form in FORMS.items():
        text = slimmed(path.read_text(), form, names)
        if len(text) > form.most:
            print(f"{path.relative_to(ROOT)}: its icons were not recognized", file=sys.stderr)
            return 1
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
