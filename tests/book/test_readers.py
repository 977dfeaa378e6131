"""Downloaded notebooks: each role and directive of the chapters becomes plain Markdown."""

import base64
import io
import re
import zipfile
from xml.etree import ElementTree

import nbformat
import pytest

from tools.chapters import BOOK, TEXT, colab_cell, wheel_name

ADDRESS = "https://someone.example/book"
CODE = "code-cell"  # a cell, no directive of a notebook
SAMPLE = r"""
(ch-attention)=
# A *sample* with $x_1$

{cite:t}`mahdavi2024` and others {cite}`dana2025` {term}`memorize` {glue:text}`count` labels; see
{ref}`ch-colab`, {ref}`ch-attention`, {prf:ref}`thm-sample`, {eq}`eq-sample`, {numref}`tab-sample`,
{take}`a file <wheel>` and [a page](https://example.org/a_b). Neither an asterisk \* nor a price of
\$5 is markup, `a|b` is code.

$$
a &= |b| \\
c &= d
$$ (eq-sample)

\begin{align}
a &= b
\end{align}

```{math}
:label: eq-second
e = f
```
+++
:::{prf:theorem} A. Author, Theorem 2: of $H$ heads
:label: thm-sample

It holds that

$$
1 < 2 .
$$
:::

::::{dropdown} Proof of $H$ & more
:::{prf:proof}
By counting.

1. One.
2. Two:
   - nested
:::
::::

:::{prf:lemma}
:label: lem-sample
A lemma.
:::
:::{prf:corollary}
:label: cor-sample
A corollary.
:::
:::{prf:proposition}
:label: pro-sample
A proposition.
:::
:::{prf:definition}
:label: def-sample
A definition.
:::
:::{prf:assumption}
:label: ass-sample
An assumption.
:::
:::{prf:remark}
:label: rem-sample
A remark.
:::

## Below

:::{admonition} Differences from the paper
- **One** difference.
- Another.
:::

:::{table} A table of $x$.
:name: tab-sample

| Letter | Meaning |
|---|---|
| $\|x\|$ | a norm, or `x\|y` |
:::

:::{list-table} Items
:header-rows: 1
* - To
  - Do
* - run
  - `make`
:::

```{raw} html
:file: ../../assets/pictures/xor.html
```

```{raw} html
<form id="explorer"></form>
```

:::::{grid} 1 1 2 2
::::{grid-item-card} Read
:link: ch-colab
:link-type: ref
The words of a card.
::::
:::::

% A comment that nobody reads.

```{include} ../../fragments/downloads.md
```

{download}`Rows <../../references.bib>`
"""
PLAIN = [
    "# A *sample* with $x_1$",
    "Mahdavi *et al.* (2024) and others (Dana *et al.*, 2025) memorize 41 labels",
    "see\nOn Colab, A sample with x\\_1, Theorem 1, (1), Table 1,\na file and ",
    "[a page](https://example.org/a_b). Neither an asterisk \\* nor a price of\n\\$5 is",
    "markup, `a|b` is code.",
    "$$\n\\begin{split}\na &= |b| \\\\\nc &= d\n\\end{split} \\tag{1}\n$$",
    "\\begin{align}\na &= b\n\\end{align}",
    "$$\ne = f \\tag{3}\n$$",
    "> **Theorem 1 (A. Author, Theorem 2: of $H$ heads)**\n> \n> It holds that\n> \n> $$\n",
    "<details>\n<summary>Proof of $H$ &amp; more</summary>\n\nProof. By counting.",
    "1. One.\n2. Two:\n\n   - nested",
    "> **Lemma 1**\n> \n> A lemma.",
    "## Below",
    "> **Differences from the paper**\n> \n> - **One** difference.\n> - Another.",
    "**Table 1.** A table of $x$.\n\n| Letter | Meaning |\n| --- | --- |\n",
    r"| $\vert x\vert$ | a norm, or `x\|y` |",
    "| To | Do |\n| --- | --- |\n| run | `make` |",
    "Can one head compute xor?",
    "*In the book this part moves; a notebook cannot show that.*",
    "**Read**\n\nThe words of a card.",
    "- The library as one file",
    "**Fig. 1.** A caption with $x$. See On Colab.",
]
MARKUP = r":::|^\(\S+\)=|\{[a-z:-]+\}[`\[]|^`{3,}\{|^%|sd-|<script|<form"


ROLE, DIRECTIVE = r"\{([\w:-]+)\}`", r"(?m)^[ >]*(?::{3,}|`{3,})\{([\w:-]+)\}"
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()  # no more than that is read


@pytest.mark.parametrize("kind", [ROLE, DIRECTIVE])
def test_the_sample_has_each_role_and_directive_of_the_chapters(kind):
    paths = [*TEXT.rglob("*.md"), *BOOK.glob("fragments/*.md")]
    used = {name for path in paths for name in re.findall(kind, path.read_text("utf-8"))}
    assert used - {CODE} <= set(re.findall(kind, SAMPLE))


def cells():
    """The sample in two cells, a value that is glued, and a picture with a caption."""
    first, second = map(nbformat.v4.new_markdown_cell, SAMPLE.split("\n+++\n"))
    record = "application/papermill.record/"
    glued = nbformat.v4.new_output(
        "display_data",
        {f"{record}text/plain": "41"},
        metadata={"scrapbook": {"name": "count", "mime_prefix": record}},
    )
    figure = {"caption": "A caption with $x$. See {ref}`ch-colab`.", "name": "fig-sample"}
    picture = nbformat.v4.new_output("display_data", {"image/png": PIXEL})
    code = [
        nbformat.v4.new_code_cell("1", outputs=[glued], metadata={"tags": ["remove-cell"]}),
        nbformat.v4.new_code_cell("2", outputs=[picture], metadata={"mystnb": {"figure": figure}}),
    ]
    stale = {**colab_cell(), "source": "stale"}
    return [first, nbformat.from_dict(stale), *code, second]


@pytest.fixture(scope="module")
def closed(built):
    """A book without an address."""
    return built(cells())


@pytest.fixture(scope="module")
def opened(built):
    """A book with one."""
    return built(cells(), html={"baseurl": ADDRESS})


def downloaded(site):
    return nbformat.read(site / "downloads" / "foundations-attention.ipynb", 4)


def text(site):
    return "\n\n".join(c.source for c in downloaded(site).cells if c.cell_type == "markdown")


def test_everything_is_plain_markdown_and_links_within_the_book_are_words(closed):
    found = text(closed)
    for part in PLAIN:
        assert part in found, found
    assert re.findall(MARKUP, found, re.M) == []
    assert "comment" not in found


def test_cells_keep_their_order_and_the_first_one_is_new(closed):
    found = downloaded(closed).cells
    kinds = "".join(cell.cell_type[0] for cell in found)
    assert kinds == "mcccmm"  # below the picture its caption
    assert found[1].source == colab_cell().source
    assert [cell.source for cell in found[2:4]] == ["1", "2"]
    assert found[3].outputs[0].data["image/png"].strip() == PIXEL


def test_with_an_address_links_lead_to_the_built_pages(opened):
    found, page = text(opened), f"{ADDRESS}/book/notebooks/foundations/attention.html"
    assert f"[On Colab]({ADDRESS}/book/colab.html#ch-colab)" in found
    assert f"[a file]({ADDRESS}/downloads/{wheel_name()})" in found
    assert f"[Theorem 1]({page}#thm-sample)" in found
    assert f"({ADDRESS}/book/bibliography.html#id2)" in found
    assert f"{ADDRESS}/downloads/{wheel_name()}" in downloaded(opened).cells[1].source


def test_a_picture_is_shown_still_with_its_styles(closed):
    [(alt, data)] = re.findall(
        r'<img alt="(.*?)" [^>]*src="data:image/svg\+xml;base64,(.*?)"', text(closed)
    )
    drawing = ElementTree.fromstring(base64.b64decode(data))
    assert alt
    assert drawing.get("viewBox")
    assert {child.tag.rpartition("}")[2] for child in drawing} == {"style", "svg"}


def test_the_button_the_zip_and_the_page_of_downloads_give_the_same(closed):
    ours = (closed / "downloads" / "foundations-attention.ipynb").read_bytes()
    assert (closed / "_sources/book/notebooks/foundations/attention.ipynb").read_bytes() == ours
    with zipfile.ZipFile(closed / "downloads" / "attnmem-notebooks.zip") as archive:
        names = {
            f"attnmem-notebooks/{name}" for name in ("foundations-attention.ipynb", wheel_name())
        }
        assert set(archive.namelist()) == names
        assert archive.read("attnmem-notebooks/foundations-attention.ipynb") == ours
        wheel = archive.read(f"attnmem-notebooks/{wheel_name()}")
    assert (closed / "downloads" / wheel_name()).read_bytes() == wheel
    assert "attnmem/core/bounds.py" in zipfile.ZipFile(io.BytesIO(wheel)).namelist()
    for page, up in (
        ("book/running", "../"),
        ("book/notebooks/foundations/attention", "../../../"),
    ):
        for name in (wheel_name(), "attnmem-notebooks.zip"):
            assert f'href="{up}downloads/{name}"' in (closed / f"{page}.html").read_text()
