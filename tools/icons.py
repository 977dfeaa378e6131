"""Drop the icons that no page shows from the built book: of the theme's 2000, some twenty stay.

The theme's script is 1.5 MB long, on every page. It holds each icon as an entry of an object,
``"name":[width,height,["alias"],"code","path"]``; what is left is a tenth of it.
"""

from __future__ import annotations

import re
import sys

from chapters import HTML, ROOT

SCRIPT = HTML / "_static" / "scripts" / "fontawesome.js"
TEXT = r'"(?:[^"\\]|\\.)*"'
ENTRY = re.compile(
    rf'"?([a-z0-9-]+)"?:\[\d+,\d+,\[([^\]]*)\],"[0-9a-f]+",(?:{TEXT}|\[{TEXT}(?:,{TEXT})*\])\],?'
)
MOST = 300_000  # characters of a script from which the icons were dropped


def used() -> set[str]:
    """Names of icons in the pages and in scripts, which put some on them."""
    files = [p for p in HTML.rglob("*") if p.suffix in {".html", ".js"} and p != SCRIPT]
    return {name for path in files for name in re.findall(r"\bfa-([a-z0-9-]+)", path.read_text())}


def slimmed(script: str, names: set[str]) -> str:
    """The script with the entries whose name or alias is among ``names``."""

    def keep(entry: re.Match) -> str:
        own = {entry[1], *re.findall(r'"([a-z0-9-]+)"', entry[2])}
        return entry[0] if own & names else ""

    return ENTRY.sub(keep, script)


def main() -> int:
    """Rewrite the script in place; fails if its form is no longer the one that is known."""
    script = slimmed(SCRIPT.read_text(), used())
    if len(script) > MOST:
        print(f"{SCRIPT.relative_to(ROOT)}: its icons were not recognized", file=sys.stderr)
        return 1
    SCRIPT.write_text(script)
    return 0


if __name__ == "__main__":
    sys.exit(main())
