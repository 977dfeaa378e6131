"""Write book/fragments/parameters.md: the parameters of every chapter, read off its text."""

import re

from .chapters import BOOK, chapters, parameters, render, renew, text_path

PAGE = BOOK / "fragments" / "parameters.md"


def page() -> str:
    """A table in MyST Markdown: a line for each chapter that has parameters."""
    texts = {chapter: text_path(chapter).read_text("utf-8") for chapter in chapters()}
    labels = {chapter: re.search(r"^\((.+)\)=$", text, re.M)[1] for chapter, text in texts.items()}
    known = {chapter: (label, parameters(chapter)) for chapter, label in labels.items()}
    return render("parameters.md.jinja", {"repr": repr}, chapters=known)


if __name__ == "__main__":
    renew(PAGE, page())
