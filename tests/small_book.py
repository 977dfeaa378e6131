"""A small book with each kind of markup, to be built with this book's extension."""

import base64
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import yaml

from tools.chapters import ROOT, colab_cell, config

NOTEBOOK, PAGE, NOTATION = "book/notebooks/foundations/attention", "book/running", "book/notation"
IMPORTS = "import torch\n\ntorch.set_default_dtype(torch.float64)"
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()  # no more than that is read
SAMPLE = r"""
(ch-attention)=
# A *sample* with $x_1$

{cite:t}`mahdavi2024` and others {cite}`dana2025` {term}`memorize` {glue:text}`count` labels; see
{ref}`ch-checking`, {ref}`ch-attention`, {prf:ref}`thm-sample`, {eq}`eq-sample`,
{numref}`tab-sample`, {numref}`fig-drawn`,
{take}`a file <wheel>` and [a page](https://example.org/a_b). Neither an asterisk \* nor a price of
\$5 is markup, `a|b` is code.
{index}`!An entry` is a word.

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

(fig-drawn)=

```{raw} html
:file: ../../assets/pictures/xor.html
```

```{raw} html
<form id="explorer"></form>
```

:::::{grid} 1 1 2 2
::::{grid-item-card} Read
:link: ch-checking
:link-type: ref
The words of a card.
::::
:::::

:::{container} finding
**One** number in a box.
:::

% A comment that nobody reads.

```{include} ../../fragments/downloads.md
```

{download}`Rows <../../references.bib>`

"""
SAMPLE += "\n".join(
    f":::{{prf:{kind}}}\n:label: {kind}-sample\nA {kind}.\n:::"
    for kind in ("lemma", "corollary", "proposition", "definition", "assumption", "remark")
)


def cells():
    """The sample in two cells, a glued value, a fold of imports, and a picture with a caption."""
    first, second = map(nbformat.v4.new_markdown_cell, SAMPLE.split("\n+++\n"))
    record = "application/papermill.record/"
    glued = nbformat.v4.new_output(
        "display_data",
        {f"{record}text/plain": "41"},
        metadata={"scrapbook": {"name": "count", "mime_prefix": record}},
    )
    figure = {"caption": "A caption with $x$. See {ref}`ch-checking`.", "name": "fig-sample"}
    picture = nbformat.v4.new_output("display_data", {"image/png": PIXEL})
    code = [
        nbformat.v4.new_code_cell("1", outputs=[glued], metadata={"tags": ["remove-cell"]}),
        nbformat.v4.new_code_cell(IMPORTS, metadata={"tags": ["hide-input", "imports"]}),
        nbformat.v4.new_code_cell("2", outputs=[picture], metadata={"mystnb": {"figure": figure}}),
    ]
    return [first, nbformat.from_dict({**colab_cell(), "source": "stale"}), *code, second]


def build(folder, **settings):
    """The sample and two pages, with this book's extension and some settings changed."""
    others = shutil.ignore_patterns("notebooks", "text", "mathjax")
    shutil.copytree(ROOT / "book", folder / "book", ignore=others)
    shutil.copytree(ROOT / "tools", folder / "tools")
    (folder / "lib").symlink_to(ROOT / "lib")
    for name in ("pyproject.toml", "README.md", "LICENSE", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = nbformat.v4.new_notebook(cells=cells(), metadata=metadata)
    (folder / NOTEBOOK).parent.mkdir(parents=True)
    nbformat.write(notebook, folder / f"{NOTEBOOK}.ipynb")
    listed = [{"file": page} for page in (PAGE, NOTATION)]
    toc = {"format": "jb-book", "root": NOTEBOOK, "options": {"numbered": True}}
    (folder / "_toc.yml").write_text(yaml.safe_dump({**toc, "chapters": listed}))
    (folder / "_config.yml").write_text(yaml.safe_dump({**config(), **settings}))
    command = [Path(sys.executable).parent / "jupyter-book", "build", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "_build" / "html"
