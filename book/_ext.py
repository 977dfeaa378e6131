"""The book's own Sphinx extension: what Sphinx alone does not do."""

from __future__ import annotations

import hashlib
import html
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import nbformat
from docutils import nodes
from fontTools import subset
from sphinx.addnodes import download_reference
from sphinx.roles import XRefRole
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import ReferenceRole

from tools import readers
from tools.chapters import below, tidy, wheel_name
from tools.wheel import addressed_citation, build_wheel

# --- Address: nothing leads to a repository that has none -----------------

BUTTONS = ("repository", "issues", "edit_page", "source")
RUNNING = "book/running"  # the page that says what a notebook needs


def _settle_address(app: Any, config: Any) -> None:
    """Drop the buttons that need one, or set a tag: ``{only} address``."""
    options = config.html_theme_options
    address = tidy(options.pop("repository_url", None))
    if not address:
        for name in ("launch_buttons", *(f"use_{button}_button" for button in BUTTONS)):
            options.pop(name, None)
        return
    app.tags.add("address")
    options["repository_url"] = address
    options["repository_branch"] = options.get("repository_branch") or "main"
    if "github.com" not in address:  # Colab opens notebooks of GitHub only
        options.get("launch_buttons", {}).pop("colab_url", None)


TAKEN = "notebooks"  # the branch with what readers download, which book.yml writes
COLAB = re.compile(r"/blob/[^/]+/book/notebooks/(.+)$")
EDIT = re.compile(r"/book/notebooks/(.+)\.ipynb$")


def _lead_to_sources(app: Any, page: str, template: str, context: dict[str, Any], _: Any) -> None:
    """Colab opens a notebook in plain Markdown, an edit is one of the text, marks are of one font."""
    for group in context.get("header_buttons", ()):
        for button in (group, *group.get("buttons", ())):
            url = button.get("url") or ""
            if "fab " in (button.get("icon") or ""):  # a font of 110 kB for one mark
                button["icon"] = "fas fa-code-branch"
            if button.get("text") == "Colab" and (found := COLAB.search(url)):
                name = found[1].replace("/", "-")
                button["url"] = f"{url[: found.start()]}/blob/{TAKEN}/{name}"
            elif button.get("label") == "source-edit-button":
                button["url"] = EDIT.sub(r"/book/text/\1.md", url)


def _add_help(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Among the downloads of a notebook stands a link to what it needs."""
    if context.get("page_source_suffix") != ".ipynb":
        return
    for group in context["header_buttons"]:
        if group["label"] == "download-buttons":
            link = {
                "type": "link",
                "url": context["pathto"](RUNNING) + "#one-notebook",
                "text": "How to run it",
                "tooltip": "What the notebook needs on your machine",
                "icon": "fas fa-circle-question",
                "label": "how-to-run-button",
            }
            group["buttons"].append(link)


# --- What a page says about itself, for search and links ------------------

CARD = "_static/card.png"
TEX = r"\\(mathbb|mathrm|operatorname|text)\b|[\\{}]"
LOST = "404"  # the page of a wrong address, which may have any depth


def _paragraph(doctree: nodes.document) -> str:
    """The first paragraph outside all boxes, in 200 letters."""
    for node in doctree.findall(nodes.paragraph):
        if isinstance(node.parent, nodes.section | nodes.document):
            words = " ".join(node.astext().split())
            if len(words) > 200:
                words = words[:199].rsplit(" ", 1)[0].rstrip(",;:") + "…"
            return re.sub(TEX, "", words)
    return ""


def _describe(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Tags of a page's head; addresses are whole if the book has one."""
    base = app.config.html_baseurl
    card = below(base, CARD) or context["pathto"](CARD, 1)
    tags = {
        "author": app.config.author,
        "og:type": "article",
        "og:site_name": app.config.html_title or app.config.project,
        "og:title": re.sub(r"<[^>]+>", "", context.get("title", "")),
        "og:image": card,
    }
    words = _paragraph(doctree) if doctree else ""
    if words:
        tags |= {"description": words, "og:description": words}
    lines = [
        f'<meta {"property" if ":" in name else "name"}="{name}" '
        f'content="{html.escape(html.unescape(text))}" />'
        for name, text in tags.items()
    ]
    if page == LOST:
        lines.insert(0, f'<base href="{base.rstrip("/")}/" />')
    known = context.get("metatags", "")
    context["metatags"] = "\n".join([known, *lines])


def _lost(app: Any) -> Iterator[tuple[str, dict[str, str], str]]:
    title = "No such page"
    words = "The list of all pages stands beside these lines; on a phone, the menu at the top opens it."
    yield LOST, {"title": title, "body": f"<h1>{title}</h1><p>{words}</p>"}, "page.html"


def _sign(app: Any, config: Any) -> None:
    """Date and commit in the footer, if this is a repository of git."""
    asked = ["git", "log", "-1", "--format=%cs %h"]
    try:
        told = subprocess.run(asked, cwd=app.srcdir, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return
    footer = '<p class="built">State of {}, commit {}.</p>'.format(*told.stdout.split())
    config.html_theme_options["extra_footer"] = footer


VIEWPORT = re.compile(r'\s*<meta name="viewport"[^>]*>')


def _keep_one_viewport(app: Any, failure: Exception | None) -> None:
    """Each of three layers below this one has told it."""
    if failure or app.builder.format != "html":
        return
    for path in Path(app.outdir).rglob("*.html"):
        text = path.read_text("utf-8")
        start, found, rest = text.partition('<meta name="viewport"')
        once = start + found + VIEWPORT.sub("", rest)
        if once != text:
            path.write_text(once, "utf-8")


# --- Punctuation stays with the formula before it -------------------------

AFTER = re.compile(r"[^\w\s]+")


class _Glue(SphinxPostTransform):
    default_priority = 950  # all references are resolved
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        for formula in list(self.document.findall(nodes.math)):
            parent, place = formula.parent, formula.parent.index(formula)
            follows = parent[place + 1] if place + 1 < len(parent) else ""
            mark = isinstance(follows, nodes.Text) and AFTER.match(follows)
            if mark:
                words = nodes.Text(mark[0])
                glued = nodes.inline("", "", formula, words, classes=["glue"])
                rest = nodes.Text(follows[mark.end() :])
                parent[place : place + 2] = [glued, rest]


# --- Downloads: dana-exp1-paper.csv, not paper.csv ------------------------


class _Rows(XRefRole):
    """A link to stored rows: ``{rows}`dana-exp1/paper``` from any page."""

    def process_link(self, env: Any, node: Any, explicit: bool, title: str, target: str) -> Any:
        return title, f"/lib/attnmem/measurements/{target}.csv"


def _open_download(translator: Any, node: download_reference) -> None:
    type(translator).visit_download_reference(translator, node)
    path = PurePosixPath(node["reftarget"])
    if "measurements" in path.parts:
        named = f'download="{path.parent.name}-{path.name}"'
        translator.body[-1] = translator.body[-1].replace('download=""', named)


def _close_download(translator: Any, node: download_reference) -> None:
    type(translator).depart_download_reference(translator, node)


# --- What readers take home: plain notebooks, the wheel, and a zip of both -


ARCHIVE = "attnmem-notebooks"  # the zip's name, and the folder in it
CITATION = "CITATION.cff"


class _Take(ReferenceRole):
    """A link to it from any page: ``{take}`the wheel <wheel>```, ``<notebooks>``, ``<citation>``."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        names = {"wheel": wheel_name(), "notebooks": f"{ARCHIVE}.zip", "citation": CITATION}
        name = names[self.target]
        address = "../" * self.env.docname.count("/") + f"downloads/{name}"
        return [nodes.reference("", self.title, refuri=address)], []


def _taken(app: Any, page: str) -> Path:
    name = page.removeprefix("book/notebooks/").replace("/", "-")
    return Path(app.outdir) / "downloads" / f"{name}.ipynb"


def _write_notebook(app: Any, doctree: nodes.document, page: str) -> None:
    source = Path(app.env.doc2path(page))
    if app.builder.format != "html" or source.suffix != ".ipynb":
        return
    address = (app.config.html_baseurl, app.builder.get_target_uri(page))
    numbers = app.env.toc_fignumbers.get(page, {})
    how = (app.config.numfig_format, numbers, *address, app.wheel_hash)
    nbformat.write(readers.rewritten(nbformat.read(source, 4), doctree, *how), _taken(app, page))


def _build_library(app: Any) -> None:
    """Once, before the notebooks are written: their first cells know its hash."""
    if app.builder.format == "html":
        wheel = build_wheel(Path(app.outdir) / "downloads")
        app.wheel_hash = hashlib.sha256(wheel.read_bytes()).hexdigest()


def _hand_out(app: Any, failure: Exception | None) -> None:
    """The theme's buttons lead to the same notebooks."""
    if failure or app.builder.format != "html":
        return
    downloads = Path(app.outdir) / "downloads"
    (downloads / CITATION).write_text(addressed_citation(), "utf-8")
    with zipfile.ZipFile(downloads / f"{ARCHIVE}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(downloads / wheel_name(), f"{ARCHIVE}/{wheel_name()}")
        for page in sorted(app.env.found_docs):
            if (path := _taken(app, page)).exists():
                shutil.copy(path, Path(app.outdir) / "_sources" / f"{page}.ipynb")
                archive.write(path, f"{ARCHIVE}/{path.name}")


def _map_site(app: Any, failure: Exception | None) -> None:
    """A list of all pages for search engines, in a book that has an address."""
    base = app.config.html_baseurl
    if failure or not base or app.builder.format != "html":
        return
    pages = [below(base, app.builder.get_target_uri(page)) for page in sorted(app.env.found_docs)]
    lines = [f"<url><loc>{html.escape(page)}</loc></url>" for page in pages]
    opening = '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">'
    listed = "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', opening, *lines, "</urlset>\n"])
    (Path(app.outdir) / "sitemap.xml").write_text(listed, "utf-8")


# --- Icons: of the theme's font, which has 1,400, what the pages show -----

ICON_RULE = r'((?:\.fa-[\w-]+:before,?)+)\{content:"\\(\w+)"'
ICON_OF_THE_THEME = r'--pst-icon-[\w-]+:"(\W)"'


def _pick_icons(app: Any, failure: Exception | None) -> None:
    """Write the font ``icons.woff``; what it lacks, a browser finds in the whole one."""
    if failure or app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"
    style = (static / "styles" / "pydata-sphinx-theme.css").read_text("utf-8")
    named = {
        name: chr(int(code, 16))
        for names, code in re.findall(ICON_RULE, style)
        for name in re.findall(r"fa-[\w-]+", names)
    }
    files = [*Path(app.outdir).rglob("*.html"), *(static / "scripts").glob("*.js")]
    shown = {name for file in files for name in re.findall(r"fa-[\w-]+", file.read_text("utf-8"))}
    icons = [named[name] for name in shown & named.keys()]
    options = subset.Options(flavor="woff")
    whole = static / "vendor" / "fontawesome" / "webfonts" / "fa-solid-900.ttf"
    font = subset.load_font(whole, options)
    chosen = subset.Subsetter(options)
    chosen.populate(text="".join([*icons, *re.findall(ICON_OF_THE_THEME, style)]))
    chosen.subset(font)
    subset.save_font(font, static / "icons.woff", options)


# --- Fields: those of a named tuple are listed once -----------------------


class _Example(NamedTuple):
    field: int


def _skip_field(app: Any, what: str, name: str, member: object, *_: Any) -> bool | None:
    return True if isinstance(member, type(_Example.field)) else None


# --- Signatures: each of their words has a span, and most have two ---------

SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', re.S)
WORD = re.compile(r'<span class="pre">([^<]*)</span>')


def _lighten(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The second span keeps a word on one line, and makes a fifth of a page of the library."""
    body = context.get("body", "")
    context["body"] = SIGNATURE.sub(lambda found: WORD.sub(r"\1", found[0]), body)


# --- Folds: the style sheet draws their marks -----------------------------


class _Folds(SphinxPostTransform):
    default_priority = 200  # sphinx-design fills the marks at 199
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        for marker in self.document.findall(nodes.inline):
            if "sd-summary-state-marker" in marker["classes"]:
                marker.clear()


# --- Imports: one line, which opens to the code and to where the library comes from ---

FOLDS = {"imports": "Imports", "parameters": "Parameters"}  # by the tag of a cell


class library_note(nodes.Element):
    """A sentence of every page. It is no text, so search does not find each page by it."""


class _NameFolds(SphinxPostTransform):
    default_priority = 198  # myst-nb folds at 199
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        for cell in self.document.findall(nodes.container):
            for tag, name in FOLDS.items():
                if f"tag_{tag}" in cell["classes"] and "hide_mode" in cell:
                    if "set_default_dtype(torch.float64)" in cell.astext():
                        name += ", float64"
                    cell["prompt_show"] = cell["prompt_hide"] = name
                    if tag == "imports":
                        cell[0] += library_note()


def _write_note(translator: Any, node: library_note) -> None:
    builder = translator.builder
    address = builder.get_relative_uri(builder.current_docname, RUNNING) + "#one-notebook"
    link = f'<a href="{address}">how to install it</a>'
    words = f"The library <code>attnmem</code> comes with this book, as a wheel: {link}."
    translator.body.append(f'<p class="library-note">{words}</p>\n')
    raise nodes.SkipNode


# --- Tables: outputs that are named tab-... are numbered as tables --------


class table_output(nodes.figure):
    """What a cell has printed as a table, below its caption."""


class _Tables(SphinxTransform):
    default_priority = 500

    def apply(self) -> None:
        for figure in list(self.document.findall(nodes.figure)):
            if any(name.startswith("tab-") for name in figure["names"]):
                table = table_output(figure.rawsource, **figure.attributes)
                table += sorted(figure.children, key=lambda child: not _is_caption(child))
                figure.replace_self(table)
                self.document.ids.update(dict.fromkeys(table["ids"], table))


def _is_caption(node: nodes.Node) -> bool:
    return isinstance(node, nodes.caption)


def _title(table: table_output) -> str:
    return next(child.astext() for child in table if _is_caption(child))


def _open_table(translator: Any, table: table_output) -> None:
    translator.body.append(translator.starttag(table, "figure", CLASS="table-output"))
    caption = table.pop(0)
    caption.parent = table
    caption.walkabout(translator)  # opens its element and leaves it open, for a legend
    translator.body.append("</figcaption>\n")


def _close_table(translator: Any, table: table_output) -> None:
    translator.body.append("</figure>\n")


# --- Pictures: those of book/assets/pictures are numbered among the plots ---

DRAWN = re.compile(r'<figure class="pic" id="([^"]+)"')  # each has one figcaption


class picture(nodes.General, nodes.Element):
    """A raw picture. A target above it, `(fig-...)=`, names it for ``{numref}``."""


class _Pictures(SphinxTransform):
    default_priority = 500  # targets are resolved at 260

    def apply(self) -> None:
        for raw in list(self.document.findall(nodes.raw)):
            if drawn := DRAWN.search(raw.astext()):
                numbered = picture("", ids=[drawn[1], *raw["ids"]], names=raw["names"])
                numbered.line = raw.line
                raw.replace_self(numbered)
                raw["ids"], raw["names"] = [], []
                numbered += raw
                self.document.ids.update(dict.fromkeys(numbered["ids"], numbered))


def _caption(drawing: picture) -> str:
    caption = re.search(r"<figcaption>(.*?)</figcaption>", drawing.astext(), re.S)[1]
    return html.unescape(re.sub(r"<[^>]+>", "", caption))


def _write_picture(translator: Any, drawing: picture) -> None:
    before, opening, rest = drawing.astext().partition("<figcaption>")
    caption, closing, after = rest.partition("</figcaption>")
    for name in drawing["ids"][1:]:  # the first is that of the figure itself
        translator.body.append(f'<span id="{name}"></span>')
    translator.body.append(before + opening)
    translator.add_fignumber(drawing)
    translator.body.append(caption)
    translator.add_permalink_ref(drawing, "Link to this picture")
    translator.body.append(closing + after + "\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("config-inited", _settle_address)  # before the theme reads its options
    app.connect("html-page-context", _add_help, priority=502)  # the theme adds its buttons at 501
    app.connect("html-page-context", _lead_to_sources, priority=502)
    app.connect("config-inited", _sign)
    app.connect("html-page-context", _describe)
    app.connect("html-collect-pages", _lost)
    download = (_open_download, _close_download)
    app.add_node(download_reference, override=True, html=download)
    app.connect("autodoc-skip-member", _skip_field)
    app.connect("html-page-context", _lighten)
    app.add_post_transform(_Folds)
    app.add_post_transform(_NameFolds)
    app.add_node(library_note, html=(_write_note, None))
    app.add_post_transform(_Glue)
    app.add_enumerable_node(table_output, "table", _title, html=(_open_table, _close_table))
    app.add_transform(_Tables)
    app.add_enumerable_node(picture, "figure", _caption, html=(_write_picture, None))
    app.add_transform(_Pictures)
    app.add_role("take", _Take())
    app.add_role("rows", _Rows(nodeclass=download_reference))
    app.connect("builder-inited", _build_library)
    app.connect("doctree-resolved", _write_notebook, priority=900)
    app.connect("build-finished", _hand_out)
    app.connect("build-finished", _map_site)
    app.connect("build-finished", _keep_one_viewport)
    app.connect("build-finished", _pick_icons)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
