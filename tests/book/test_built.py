"""A small book, with and without an address: its doors, what it hands out, its first cell."""

import base64
import hashlib
import html
import importlib.util
import io
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from urllib.parse import urlparse
from xml.etree import ElementTree

import nbformat
import pytest
import yaml
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from small_book import IMPORTS, NOTATION, NOTEBOOK, PAGE, PIXEL, SAMPLE, build
from tools import chapters, wheel
from tools.chapters import BOOK, ROOT, TEXT, colab_cell, wheel_name
from tools.wheel import FIRST, build_sdist, build_wheel

ADDRESS, BRANCH = "https://github.com/someone/somewhere", "trunk"
THERE = {"repository": {"url": f"{ADDRESS}.git/", "branch": BRANCH}}
SITE = {"html": {"baseurl": "https://someone.example/book"}}
COLAB = "https://colab.research.google.com/github"
OUTSIDE = r"github|gitlab|bitbucket|colab|binder|jupyterhub"
DOORS = r"btn-source|btn-launch|launch-buttons|source-buttons|logo_(?:colab|binder|jupyterhub)"
CODE = "code-cell"  # a cell, no directive of a notebook
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


@pytest.mark.parametrize("kind", [ROLE, DIRECTIVE])
def test_sample_has_each_role_and_directive(kind):
    paths = [*TEXT.rglob("*.md"), *BOOK.glob("fragments/*.md")]
    used = {name for path in paths for name in re.findall(kind, path.read_text("utf-8"))}
    missing = used - {CODE} - {*re.findall(kind, SAMPLE)}
    assert missing == set(), "add them to SAMPLE here, and to PLAIN what readers take home"


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """Without an address: what jupyter-book takes in its place is none, either."""
    nowhere = {"repository": {"branch": "main"}, "html": {"baseurl": ""}}
    return build(tmp_path_factory.mktemp("closed"), **nowhere)


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
    """Colab opens what readers download, an edit is one of the text."""
    file, branch = f"{NOTEBOOK}.ipynb", f"{ADDRESS}/edit/{BRANCH}"
    chapter, text = opened / f"{NOTEBOOK}.html", NOTEBOOK.replace("/notebooks/", "/text/")
    assert {url for url in outside(chapter) if "/issues/" not in url} == {
        f"https://mybinder.org/v2/gh/someone/somewhere/{BRANCH}?urlpath=lab/tree/{file}",
        f"{COLAB}/someone/somewhere/blob/notebooks/foundations-attention.ipynb",
        f"{branch}/{text}.md",
        ADDRESS,
    }
    for name in (NOTEBOOK, PAGE, NOTATION):
        [issues] = [url for url in outside(opened / f"{name}.html") if "/issues/" in url]
        assert issues.startswith(f"{ADDRESS}/issues/new?")
    for name in (PAGE, NOTATION):  # nothing to launch
        assert f"{branch}/{name}.md" in outside(opened / f"{name}.html")
        assert len(outside(opened / f"{name}.html")) == 3
        assert "without a public address" not in words(opened / f"{name}.html")
    assert "rocket" in words(opened / f"{PAGE}.html")


def test_address_is_told_to_search_engines_and_citations(opened, closed):
    site = SITE["html"]["baseurl"]
    listed = ElementTree.parse(opened / "sitemap.xml").getroot()
    found = {place[0].text for place in listed}
    assert {f"{site}/{name}.html" for name in (NOTEBOOK, PAGE, NOTATION)} <= found
    for url in found:
        assert (opened / url.removeprefix(f"{site}/")).is_file()
    assert (
        f'<link rel="canonical" href="{site}/{PAGE}.html"' in (opened / f"{PAGE}.html").read_text()
    )
    assert not (closed / "sitemap.xml").exists()
    for book, base in ((opened, f"{site}/"), (closed, "/")):  # of links in a page of any depth
        assert f'<base href="{base}" />' in (book / "404.html").read_text()
    cited = yaml.safe_load((opened / "downloads" / "CITATION.cff").read_text())
    assert (cited.pop("url"), cited.pop("repository-code")) == (site, ADDRESS)
    assert cited == yaml.safe_load((closed / "downloads" / "CITATION.cff").read_text())


def metadata(site):
    with zipfile.ZipFile(site / "downloads" / wheel_name()) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        return message_from_bytes(wheel.read(name))


def test_address_is_in_the_metadata_of_the_wheel(opened, closed):
    """Which are otherwise the same, as all files of the library are."""
    told = metadata(opened)
    homepage = SITE["html"]["baseurl"]
    assert told.get_all("Project-URL") == [f"Homepage, {homepage}", f"Repository, {ADDRESS}"]
    del told["Project-URL"]
    assert told.as_string() == metadata(closed).as_string()
    assert "urls" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
    assert found[1].source == colab_cell(sha256=published(closed)).source
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

    def run(installed=False, base="", sha256=""):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
        error = shell.run_cell(colab_cell(base, sha256).source).error_in_exec
        assert error is None or isinstance(error, ModuleNotFoundError)
        return str(error or ""), asked

    return run


BASE = SITE["html"]["baseurl"]


def test_first_cell_installs_from_the_address_or_says_how(first_cell):
    for base in ("", BASE):
        assert first_cell(installed=True, base=base) == ("", [])
    error, asked = first_cell()
    assert all(step in error for step in ("front page", "beside this notebook", "on Colab"))
    assert "pip install 'attnmem-*.whl'" in error
    assert asked == []
    error, asked = first_cell(base=f"{BASE}/", sha256="0" * 64)
    wheel = f"{BASE}/downloads/{wheel_name()}#sha256={'0' * 64}"
    assert (error, asked) == ("", [f'install -q "attnmem[certify] @ {wheel}"'])


@pytest.mark.parametrize("base", ["", BASE])
def test_first_cell_installs_the_newest_wheel(first_cell, tmp_path, base):
    """Also if a browser named it as a second download."""
    (tmp_path / "attnmem-0.1.0-py3-none-any (1).whl").touch()
    (tmp_path / "attnmem-0.2.0-py3-none-any.whl").touch()
    os.utime(tmp_path / "attnmem-0.2.0-py3-none-any.whl", (0, 0))
    error, [asked] = first_cell(base=base)
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
    assert first_cell(base=BASE, sha256=known)[1][1:] == [
        f'install -q "attnmem[certify] @ {BASE}/downloads/{wheel_name()}#sha256={known}"'
    ]
    first_cell()
    assert f"{later.name} {other} not checked" in capsys.readouterr().out


def test_wheel_has_the_same_bytes_everywhere(closed, tmp_path, monkeypatch):
    one = published(closed)
    monkeypatch.setattr(wheel, "site", lambda: "")
    monkeypatch.setattr(wheel, "repository", lambda: ("", "main"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", FIRST)  # as in an archive of the repository
    before = os.umask(0o077)
    built = build_wheel(tmp_path)
    os.umask(before)
    assert hashlib.sha256(built.read_bytes()).hexdigest() == one
    (tmp_path / "source").mkdir()
    build_sdist(tmp_path / "source")
    [sdist] = (tmp_path / "source").iterdir()
    command = "pip wheel --quiet --no-deps --no-build-isolation --wheel-dir"
    subprocess.run([sys.executable, "-m", *command.split(), sdist.parent, sdist], check=True)
    again = sdist.parent / wheel_name()
    assert hashlib.sha256(again.read_bytes()).hexdigest() == one


@pytest.mark.parametrize(
    ("url", "read"), [(None, ""), ("", ""), (f"{ADDRESS}/", ADDRESS), (f"{ADDRESS}.git", ADDRESS)]
)
def test_repository_reads_every_form(monkeypatch, url, read):
    monkeypatch.setattr(chapters, "config", lambda: {"repository": {"url": url}})
    assert chapters.repository() == (read, "main")
