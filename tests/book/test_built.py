"""A small book, with and without an address: its doors, what it hands out, its first cell."""

import base64
import hashlib
import html
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import urlparse
from xml.etree import ElementTree

import nbformat
import pytest
import yaml
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tools import chapters
from tools.chapters import BOOK, ROOT, TEXT, colab_cell, config, wheel_name
from tools.wheel import FIRST, build_wheel

NOTEBOOK, PAGE, NOTATION = "book/notebooks/foundations/attention", "book/running", "book/notation"
ADDRESS, BRANCH = "https://github.com/someone/somewhere", "trunk"
THERE = {"repository": {"url": f"{ADDRESS}.git/", "branch": BRANCH}}
SITE = {"html": {"baseurl": "https://someone.example/book"}}
OUTSIDE = r"github|gitlab|bitbucket|colab|binder|jupyterhub"
DOORS = r"btn-source|btn-launch|launch-buttons|source-buttons|logo_(?:colab|binder|jupyterhub)"
CODE = "code-cell"  # a cell, no directive of a notebook
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
PLAIN = [
    "# A *sample* with $x_1$",
    "Mahdavi *et al.* (2024) and others (Dana *et al.*, 2025) memorize 41 labels",
    "see\nChecked, in CI and by you, A sample with x\\_1, Theorem 1, (1),\nTable 1, ",
    "Table 1, Fig. 2,\na file and ",
    "[a page](https://example.org/a_b). Neither an asterisk \\* nor a price of\n\\$5 is",
    "markup, `a|b` is code.\nAn entry is a word.",
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
    "**Fig. 2.** Can one head compute xor?",
    "*In the book this part moves; a notebook cannot show that.*",
    "**Read**\n\nThe words of a card.",
    "**One** number in a box.\n\n- The library as one file",
    "**Fig. 1.** A caption with $x$. See Checked, in CI and by you.",
]
MARKUP = r":::|^\(\S+\)=|\{[a-z:-]+\}[`\[]|^`{3,}\{|^%|sd-|<script|<form"

ROLE, DIRECTIVE = r"\{([\w:-]+)\}`", r"(?m)^[ >]*(?::{3,}|`{3,})\{([\w:-]+)\}"
IMPORTS = "import torch\n\ntorch.set_default_dtype(torch.float64)"
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()  # no more than that is read


@pytest.mark.parametrize("kind", [ROLE, DIRECTIVE])
def test_sample_has_each_role_and_directive(kind):
    paths = [*TEXT.rglob("*.md"), *BOOK.glob("fragments/*.md")]
    used = {name for path in paths for name in re.findall(kind, path.read_text("utf-8"))}
    missing = used - {CODE} - {*re.findall(kind, SAMPLE)}
    assert missing == set(), "add them to SAMPLE here, and to PLAIN what readers take home"


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
    for name in ("pyproject.toml", "README.md", "LICENSE"):
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


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """Without an address: what jupyter-book takes in its place is none, either."""
    return build(tmp_path_factory.mktemp("closed"), repository={"branch": "main"})


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """With an address of the repository, and one of the book."""
    return build(tmp_path_factory.mktemp("opened"), **THERE, **SITE)


def links(page):
    return {html.unescape(url) for url in re.findall(r'(?:href|src)="([^"]*)"', page.read_text())}


def outside(page):
    return {url for url in links(page) if re.search(OUTSIDE, urlparse(url).netloc)}


def words(page):
    article = page.read_text().split("<article", 1)[1].split("</article>")[0]
    return " ".join(re.sub(r"<[^>]+>", "", article).split())


def test_no_address_no_door(closed):
    pages = list(closed.rglob("*.html"))
    assert len(pages) >= 5
    for page in pages:
        assert outside(page) == set()
        assert not re.search(DOORS, page.read_text()), page.name
    text = words(closed / f"{PAGE}.html")
    assert "without a public address" in text
    assert "make wheel" in text
    assert "rocket" not in words(closed / f"{PAGE}.html")
    chapter = closed / f"{NOTEBOOK}.html"
    assert any(url.endswith(f"_sources/{NOTEBOOK}.ipynb") for url in links(chapter))
    [help_] = {url for url in links(chapter) if url.endswith("running.html#one-notebook")}
    target = (chapter.parent / help_).resolve().parent / "running.html"
    assert 'id="one-notebook"' in target.read_text()


def test_a_fold_of_imports_says_so_and_where_the_library_is(closed):
    folds = re.findall(r"<details.*?</details>", (closed / f"{NOTEBOOK}.html").read_text(), re.S)
    [fold] = [fold for fold in folds if "set_default_dtype" in fold]
    assert ">Imports, float64</p>" in fold
    assert "The library <code>attnmem</code> comes with this book" in fold
    assert 'running.html#one-notebook">how to install it</a>' in fold


def test_a_picture_has_a_number_where_its_name_leads(closed):
    """Those of book/assets/pictures have it among the plots."""
    chapter = (closed / f"{NOTEBOOK}.html").read_text()
    linked = re.search(r'href="#(fig-drawn)"><span class="std std-numref">(.*?)</span>', chapter)
    _, anchor, drawn = chapter.partition(f'<span id="{linked[1]}"></span><figure class="pic"')
    assert anchor
    assert f'<figcaption><span class="caption-number">{linked[2]} </span>Can one head' in drawn
    assert 'href="#pic-xor" title="Link to this picture"' in drawn


def test_address_opens_files_of_that_branch(opened):
    chapter, file = opened / f"{NOTEBOOK}.html", f"{NOTEBOOK}.ipynb"
    assert {url for url in outside(chapter) if "/issues/" not in url} == {
        f"https://mybinder.org/v2/gh/someone/somewhere/{BRANCH}?urlpath=lab/tree/{file}",
        f"https://colab.research.google.com/github/someone/somewhere/blob/{BRANCH}/{file}",
        ADDRESS,
    }
    for name in (NOTEBOOK, PAGE, NOTATION):
        [issues] = [url for url in outside(opened / f"{name}.html") if "/issues/" in url]
        assert issues.startswith(f"{ADDRESS}/issues/new?")
    for name in (PAGE, NOTATION):  # nothing to launch
        assert len(outside(opened / f"{name}.html")) == 2
        assert "without a public address" not in words(opened / f"{name}.html")
    assert "rocket" in words(opened / f"{PAGE}.html")


def published(site):
    """The hash of the library that a built book hands out."""
    return hashlib.sha256((site / "downloads" / wheel_name()).read_bytes()).hexdigest()


def downloaded(site):
    return nbformat.read(site / "downloads" / "foundations-attention.ipynb", 4)


def text(site):
    return "\n\n".join(c.source for c in downloaded(site).cells if c.cell_type == "markdown")


def test_downloads_are_plain_markdown(closed):
    found = text(closed)
    for part in PLAIN:
        assert part in found, found
    assert re.findall(MARKUP, found, re.M) == []
    assert "comment" not in found
    picture = r'<img alt="(.*?)" [^>]*src="data:image/svg\+xml;base64,(.*?)"'
    [(alt, data)] = re.findall(picture, found)
    drawing = ElementTree.fromstring(base64.b64decode(data))
    assert alt
    assert {child.tag.rpartition("}")[2] for child in drawing} == {"style", "svg"}


def test_downloads_keep_cells_but_the_first(closed):
    found = downloaded(closed).cells
    kinds = "".join(cell.cell_type[0] for cell in found)
    assert kinds == "mccccmm"  # below the picture its caption
    assert found[1].source == colab_cell(published(closed)).source
    assert [cell.source for cell in found[2:5]] == ["1", IMPORTS, "2"]
    assert found[4].outputs[0].data["image/png"].strip() == PIXEL


def test_downloads_link_to_the_built_pages(opened):
    found, site = text(opened), SITE["html"]["baseurl"]
    assert f"[Checked, in CI and by you]({site}/book/running.html#ch-checking)" in found
    assert f"[a file]({site}/downloads/{wheel_name()})" in found
    assert f"[Theorem 1]({site}/{NOTEBOOK}.html#thm-sample)" in found
    assert re.search(rf"\({re.escape(site)}/book/notation.html#id\d+\)", found)
    wheel = f"{site}/downloads/{wheel_name()}#sha256={published(opened)}"
    assert f'"{wheel}"' in downloaded(opened).cells[1].source


def test_downloads_are_the_same_by_each_way(closed):
    ours = (closed / "downloads" / "foundations-attention.ipynb").read_bytes()
    assert (closed / "_sources" / f"{NOTEBOOK}.ipynb").read_bytes() == ours
    with zipfile.ZipFile(closed / "downloads" / "attnmem-notebooks.zip") as archive:
        names = [f"attnmem-notebooks/{n}" for n in ("foundations-attention.ipynb", wheel_name())]
        assert sorted(archive.namelist()) == sorted(names)
        packed, wheel = map(archive.read, names)
    assert packed == ours
    assert (closed / "downloads" / wheel_name()).read_bytes() == wheel
    kinds = ("*.py", "*.toml", "*.csv", "DIGESTS")  # the library with all its data
    paths = [path for kind in kinds for path in (ROOT / "lib" / "attnmem").rglob(kind)]
    library = {path.relative_to(ROOT / "lib").as_posix() for path in paths}
    assert library <= {*zipfile.ZipFile(io.BytesIO(wheel)).namelist()}
    for page in (PAGE, NOTEBOOK):
        for name in (wheel_name(), "attnmem-notebooks.zip"):
            up = "../" * page.count("/")
            assert f'href="{up}downloads/{name}"' in (closed / f"{page}.html").read_text()


def test_pages_bring_no_more_than_they_show(closed):
    """Icons in a font of their own; the index of search for the page that searches."""
    assert (closed / "_static" / "icons.woff").stat().st_size < 10_000
    loading = [page.name for page in closed.rglob("*.html") if "searchindex" in page.read_text()]
    assert loading == ["search.html"]


@pytest.fixture
def first_cell(monkeypatch, tmp_path):
    """Runs it in an empty folder: its error as text, and what it has asked pip for."""
    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    asked = []
    shell.register_magic_function(asked.append, "line", "pip")

    def run(installed=False, colab=False, sha256="", **settings):
        monkeypatch.setattr(chapters, "config", lambda: settings)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
        if colab:
            monkeypatch.setitem(sys.modules, "google.colab", object())
        error = shell.run_cell(colab_cell(sha256).source).error_in_exec
        assert error is None or isinstance(error, ModuleNotFoundError)
        return str(error or ""), asked

    return run


FROM = {
    "nowhere": ({"repository": {"url": ""}}, ""),
    "the repository": (THERE, f"git+{ADDRESS}@{BRANCH}"),
    "the book": ({**THERE, **SITE}, f"https://someone.example/book/downloads/{wheel_name()}"),
}


@pytest.mark.parametrize("colab", [True, False])
@pytest.mark.parametrize("place", FROM)
def test_first_cell_installs_or_says_how(first_cell, colab, place):
    settings, source = FROM[place]
    assert first_cell(installed=True, colab=colab, **settings) == ("", [])
    error, asked = first_cell(colab=colab, **settings)
    if colab and source:
        assert (error, asked) == ("", [f'install -q "attnmem[certify] @ {source}"'])
    else:
        assert all(step in error for step in ("front page", "beside this notebook", "on Colab"))
        assert f"pip install '{source or 'attnmem-*.whl'}'" in error
        assert asked == []


@pytest.mark.parametrize("place", FROM)
def test_first_cell_installs_the_newest_wheel(first_cell, tmp_path, place):
    """Also if a browser named it as a second download."""
    (tmp_path / "attnmem-0.1.0-py3-none-any (1).whl").touch()
    (tmp_path / "attnmem-0.2.0-py3-none-any.whl").touch()
    os.utime(tmp_path / "attnmem-0.2.0-py3-none-any.whl", (0, 0))
    error, [asked] = first_cell(**FROM[place][0])
    wheel = r"file://\S+/attnmem-0\.1\.0-py3-none-any\.whl"
    assert re.fullmatch(rf'install -q "attnmem\[certify\] @ {wheel}"', asked)
    assert error == ""


def test_first_cell_installs_the_published_wheel(first_cell, tmp_path, capsys):
    again, later = tmp_path / "attnmem-0.1.0-py3-none-any (1).whl", tmp_path / "attnmem-9.0.whl"
    again.write_bytes(b"the library")
    later.write_bytes(b"another")
    os.utime(again, (0, 0))
    known = hashlib.sha256(b"the library").hexdigest()
    error, [asked] = first_cell(sha256=known)
    assert error == ""
    assert "attnmem-0.1.0-py3-none-any.whl" in asked
    assert "not checked" not in capsys.readouterr().out
    again.unlink()
    error, asked = first_cell(sha256=known)
    assert len(asked) == 1
    other = hashlib.sha256(b"another").hexdigest()
    assert all(said in error for said in (later.name, known, other, "front page"))
    first_cell()
    assert f"{later.name} {other} not checked" in capsys.readouterr().out


def test_wheel_has_the_same_bytes_everywhere(closed, opened, tmp_path, monkeypatch):
    one, other = published(closed), published(opened)
    assert one == other
    monkeypatch.setenv("SOURCE_DATE_EPOCH", FIRST)  # as in an archive of the repository
    before = os.umask(0o077)
    built = build_wheel(tmp_path)
    os.umask(before)
    assert hashlib.sha256(built.read_bytes()).hexdigest() == one


@pytest.mark.parametrize(
    ("url", "read"), [(None, ""), ("", ""), (f"{ADDRESS}/", ADDRESS), (f"{ADDRESS}.git", ADDRESS)]
)
def test_repository_reads_every_form(monkeypatch, url, read):
    monkeypatch.setattr(chapters, "config", lambda: {"repository": {"url": url}})
    assert chapters.repository() == (read, "main")
