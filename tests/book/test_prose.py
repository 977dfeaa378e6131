"""A chapter opens with its question, links words where they first stand, and leads to the next."""

import re

import pytest

from tools.chapters import BOOK, argument, chapters, pages, source, text_path

CHAPTERS = chapters()
NOT_PROSE = re.compile(
    r"""```.*?^```$        # cells and raw blocks
      | ^:::\{prf:definition\}.*?^:::$  # where a word is defined
      | \$\$.*?\$\$.*?$     # displayed and
      | \$[^$]+\$          # inline mathematics
      | ^\#.*?$            # headings
      | ^:::.*?$           # openings of boxes, with their titles
      | ^:[a-z-]+:.*?$     # their options
      | ^\([a-z0-9-]+\)=$  # targets
      | ^\|.*?$            # tables
      | (?P<word>\{term\}`[^`]*`)   # a word that is linked is prose
      | \{[a-z:]+\}`[^`]*`  # other links, glued values
      | `[^`]*`            # code
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
LINK = re.compile(r"\{term\}`[^`]*`")


def body(chapter):
    """A chapter's text below its title."""
    text = text_path(chapter).read_text().split("---\n", 2)[2]
    return text.split("\n# ", 1)[1].split("\n", 1)[1]


def prose(text):
    """The text with all that is not prose blanked out, every character in its place."""
    return NOT_PROSE.sub(lambda found: found["word"] or re.sub(r"\S", " ", found[0]), text)


def words():
    """The terms of the notation page."""
    listed = (BOOK / "notation.md").read_text().split(":::{glossary}\n")[1].split("\n:::")[0]
    return re.findall(r"^[A-Za-z].*$", listed, re.MULTILINE)


def first_use(word, text):
    """Where the word first stands in prose, in any of its forms: memorize, memorized."""
    endings = {"e": "(?:e|es|ed|ing)", "y": "(?:y|ies)"}
    stem = r"\s+".join(re.escape(part) for part in word[:-1].split())
    last = endings.get(word[-1], f"{word[-1]}s?")
    return re.search(rf"\b{stem}{last}\b", prose(text), re.IGNORECASE)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_word_is_linked_where_it_is_first_used(chapter):
    text = body(chapter)
    links = [found.span() for found in LINK.finditer(text)]
    for word in words():
        if use := first_use(word, text):
            linked = any(start <= use.start() and use.end() <= end for start, end in links)
            assert linked, f"{word}: link it in ...{text[use.start() - 30 : use.end() + 30]!r}"


@pytest.mark.parametrize("chapter", argument())
def test_a_chapter_opens_with_a_question_has_an_exercise_and_leads_to_the_next(chapter):
    text = body(chapter)
    assert "?" in re.split(r"^(?:#|```)", text, maxsplit=1, flags=re.MULTILINE)[0]
    exercise = text.split("\n## Exercise\n")[1]
    assert "\nattempt(" in exercise, "no check that says whether the answer is right"
    assert ":::{dropdown} Solution\n" in exercise
    after = source(pages()[pages().index(f"book/notebooks/{chapter}") + 1]).read_text()
    label = re.search(r"^\((ch-[a-z0-9-]+)\)=\n# ", after, re.MULTILINE)[1]
    takeaway = re.search(r"^:::\{admonition\} Takeaway\n.*?^:::$", text, re.M | re.S)
    assert takeaway, "no takeaway"
    assert re.search(rf"\*\*Next:\*\*.*`{label}`", takeaway[0], re.S), f"next is {label}"
