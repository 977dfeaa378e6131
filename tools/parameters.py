"""Write book/fragments/parameters.md: the parameters of every chapter, read off its text."""

from __future__ import annotations

import sys

import jupytext

from chapters import BOOK, chapters, parameters, renew, text_path

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
    rows = [_row(chapter) for chapter in chapters() if parameters(chapter)]
    return "\n".join([HEAD, *rows, ":::", ""])


def _row(chapter: str) -> str:
    text = "".join(cell.source for cell in jupytext.read(text_path(chapter)).cells[:1])
    label = text[1 : text.index(")=")]
    values = ", ".join(f"`{name} = {value!r}`" for name, value in parameters(chapter).items())
    return f"* - {{ref}}`{label}` (`{chapter}`)\n  - {values}"


def main() -> int:
    """Write the table."""
    renew(PAGE, page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
