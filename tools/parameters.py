"""Write book/fragments/parameters.md: the parameters of every chapter, read off its text."""

import re
import sys

from .chapters import BOOK, chapters, parameters, renew, text_path

PAGE = BOOK / "fragments" / "parameters.md"
HEAD = """\
:::{list-table} Parameters of the chapters
:header-rows: 1
:widths: 50 50
:name: tab-parameters

* - Chapter
  - Parameters"""


def page() -> str:
    """A table in MyST Markdown: a line for each chapter that has parameters."""
    rows = []
    for chapter in chapters():
        if known := parameters(chapter):
            label = re.search(r"^\((.+)\)=$", text_path(chapter).read_text("utf-8"), re.M)[1]
            values = ", ".join(f"`{name} = {value!r}`" for name, value in known.items())
            rows.append(f"* - {{ref}}`{label}` (`{chapter}`)\n  - {values}")
    return "\n".join([HEAD, *rows, ":::", ""])


if __name__ == "__main__":
    sys.exit(renew(PAGE, page()))
