"""The notebooks that readers take home, in plain Markdown: Jupyter and Colab do not know MyST.

A notebook's text is written again from the page that Sphinx has resolved: references, numbers,
citations and glued values are words there already.
"""

import base64
import html
import re
import textwrap
from collections import defaultdict
from urllib.parse import urljoin

import nbformat
from docutils import nodes

from tools.chapters import BOOK, COLAB, below, colab_cell

SVG = "http://www.w3.org/2000/svg"
PICTURES = BOOK / "assets" / "pictures.css"  # what all of them share
PLAIN = "margin: 0; max-width: none; background: #fff"  # of a picture that no page surrounds
BESIDE = 24  # letters of a picture may stand so far beside its box
LINES = 10_000  # myst-nb counts the lines of cell i from LINES * (i + 1)


class _Markdown:
    """Writes nodes of a page as Markdown; a method is named after the class of nodes it is for."""

    def __init__(self, formats: dict[str, str], numbers: dict[str, dict], address: str) -> None:
        self.formats, self.numbers, self.address = formats, numbers, address

    def __call__(self, node: nodes.Node) -> str:
        for ancestor in type(node).__mro__:
            if write := getattr(self, ancestor.__name__, None):
                return write(node)
        raise TypeError(f"no Markdown for {type(node).__name__}")

    def number(self, node: nodes.Element, element: str) -> str:
        """Such as 2.1, or nothing."""
        for name in node["ids"]:
            if number := self.numbers.get(element, {}).get(name):
                return ".".join(map(str, number))
        return ""

    def named(self, node: nodes.Element, element: str, caption: nodes.Element) -> str:
        """A caption, behind such as Fig. 2.1."""
        if number := self.number(node, element):
            return f"**{self.formats[element] % number}.** {self(caption)}"
        return self(caption)

    # --- What stands in a line ---

    def TextElement(self, node: nodes.Element) -> str:
        return "".join(map(self, node.children))

    def Text(self, node: nodes.Text) -> str:
        if "bibtex-citation" in node.parent.get("classes", ()):
            node = node.translate(str.maketrans("[]", "()"))
        return re.sub(r"([\\`*_$<\[|])", r"\\\1", node)

    def math(self, node: nodes.Element) -> str:
        return f"${_single_line(node)}$"

    def literal(self, node: nodes.Element) -> str:
        code = _single_line(node)
        return f"`` {code} ``" if "`" in code else f"`{code}`"

    def emphasis(self, node: nodes.Element) -> str:
        return f"*{self.TextElement(node)}*"

    def strong(self, node: nodes.Element) -> str:
        return f"**{self.TextElement(node)}**"

    rubric = strong

    def reference(self, node: nodes.Element) -> str:
        text = self.TextElement(node)
        target = node.get("refuri") or "#" + node.get("refid", "")
        if re.match(r"\w+:", target):
            return f"<{target}>" if node.astext() == target else f"[{text}]({target})"
        return f"[{text}]({urljoin(self.address, target)})" if self.address else text

    download_reference = TextElement

    # --- Blocks ---

    def Element(self, node: nodes.Element) -> str:
        return "\n\n".join(filter(None, (self(child).strip("\n") for child in node.children)))

    def Invisible(self, node: nodes.Element) -> str:
        return ""

    toctree = Invisible

    def paragraph(self, node: nodes.Element) -> str:
        """No line of it begins like a list or a heading."""
        return re.sub(r"(?m)^(\d*)([-+#>.)])(?=\s)", r"\1\\\2", self.TextElement(node))

    def math_block(self, node: nodes.Element) -> str:
        formula = node.astext().strip()
        if node.get("no-wrap", node.get("nowrap")):  # an environment of its own
            return formula
        if r"\\" in formula:
            formula = f"\\begin{{split}}\n{formula}\n\\end{{split}}"
        if tag := self.number(node, "displaymath") or node.get("number"):
            formula += f" \\tag{{{tag}}}"
        return f"$$\n{formula}\n$$"

    def literal_block(self, node: nodes.Element) -> str:
        return f"````{node.get('language', '')}\n{node.astext()}\n````"

    def block_quote(self, node: nodes.Element) -> str:
        return textwrap.indent(self.Element(node), "> ", lambda line: True)

    def Admonition(self, node: nodes.Element) -> str:
        """A quotation below its title, with the number of a theorem, or a fold."""
        title = node.children[0]
        if isinstance(title, nodes.title):
            if "dropdown" in node["classes"]:
                return self.dropdown_main(node)
            number = self.number(node, node.get("countertype", ""))
            name = f"{node.get('realtype', '').title()} {number}".strip()
            node[0] = nodes.rubric("", name, *title.children)
        return self.block_quote(node)

    def dropdown_main(self, node: nodes.Element) -> str:
        title, *body = node.children
        summary = ""
        for text in title.findall(nodes.Text):
            summary += f"${text}$" if isinstance(text.parent, nodes.math) else html.escape(text)
        head = f"<details>\n<summary>{summary}</summary>"
        return "\n\n".join([head, self.Element(nodes.container("", *body)), "</details>"])

    def container(self, node: nodes.Element) -> str:
        return self.strong(node) if "sd-card-title" in node["classes"] else self.Element(node)

    def proof_node(self, node: nodes.Element) -> str:
        return self.Element(node.children[0])

    def bullet_list(self, node: nodes.Element) -> str:
        items = []
        for number, item in enumerate(node.children, node.get("start", 1)):
            mark = f"{number}. " if isinstance(node, nodes.enumerated_list) else "- "
            items.append(mark + textwrap.indent(self.Element(item), " " * len(mark)).lstrip())
        return "\n".join(items)

    enumerated_list = bullet_list

    def figure(self, node: nodes.Element) -> str:
        """The caption alone: a cell makes the picture, or the table."""
        [caption] = (child for child in node.children if isinstance(child, nodes.caption))
        return self.named(node, type(node).__name__.removesuffix("_output"), caption)

    def picture(self, node: nodes.Element) -> str:
        """As raw, with a number before its caption."""
        number = self.formats["figure"] % self.number(node, "figure")
        opening = "<figcaption>"
        numbered = node.astext().replace(opening, f"{opening}**{number}.** ")
        return self.raw(nodes.raw("", numbered, format="html"))

    def table(self, node: nodes.Element) -> str:
        rows = [list(map(self.entry, row.children)) for row in node.findall(nodes.row)]
        if not node.next_node(nodes.thead):
            rows.insert(0, [""] * len(rows[0]))
        rows.insert(1, ["---"] * len(rows[0]))
        lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        title = node.next_node(nodes.title)
        return f"{self.named(node, 'table', title)}\n\n{lines}" if title else lines

    def entry(self, node: nodes.Element) -> str:
        """One line, in which no bar ends the cell: neither of a formula nor of code."""
        bars = {r"\|": r"\Vert ", "|": r"\vert "}
        for formula in node.findall(nodes.math):
            text = re.sub(r"\\?\|", lambda bar: bars[bar[0]], formula.astext())
            formula[:] = [nodes.Text(text)]
        for code in node.findall(nodes.literal):
            code[:] = [nodes.Text(code.astext().replace("|", r"\|"))]
        return re.sub(r"\n\n+", "<br>", self.Element(node)).replace("\n", " ")

    def raw(self, node: nodes.Element) -> str:
        """Still pictures, each with its styles, and a caption; what moves is in the book only."""
        source = node.astext() if "html" in node["format"] else ""
        if not re.search(r"<(svg|script|form)", source):
            return source
        name = re.search(r'<figure[^>]*\bid="([^"]+)"', source)
        styles = "".join(re.findall(r"<style>.*?</style>", source, re.S))
        drawings = re.finditer(r'<svg[^>]*viewBox="(.*?)".*?</svg>', source, re.S)
        shown = [_still(svg, name[1], styles) for svg in drawings]
        shown += re.findall(r"<figcaption>(.*?)</figcaption>", source, re.S)
        if re.search(r"<(script|form)", source):
            shown.append("*In the book this part moves; a notebook cannot show that.*")
        return "\n\n".join(shown)


def _still(svg: re.Match, name: str, styles: str) -> str:
    """A drawing as an image, with the styles of its page."""
    alt = re.search(r'aria-label="([^"]*)"|<title[^>]*>([^<]*)<', svg[0])
    width, height = map(float, svg[1].split()[2:])
    inner = f'<svg style="width: {width}px; height: {height}px; overflow: visible"{svg[0][4:]}'
    box = f"{-BESIDE} 0 {width + 2 * BESIDE} {height}"
    within = f'xmlns="{SVG}" class="pic" id="{name}" viewBox="{box}" style="{PLAIN}"'
    styles = f"<style>{PICTURES.read_text('utf-8')}</style>{styles}"
    data = base64.b64encode(f"<svg {within}>{styles}{inner}</svg>".encode()).decode()
    source = f"data:image/svg+xml;base64,{data}"
    return f'<img alt="{alt[1] or alt[2]}" width="{1.4 * width:.0f}" src="{source}" />'


def _single_line(node: nodes.Element) -> str:
    return " ".join(node.astext().split())


def _texts(page: nodes.document, markdown: _Markdown) -> dict[int, list[str]]:
    """Under the position of each cell, the Markdown that stands in it or is the cell's caption."""
    texts = defaultdict(list)

    def walk(section: nodes.Element, depth: int, cell: int) -> int:
        for node in section.children:
            lines = (inner.line for inner in node.findall() if getattr(inner, "line", None))
            cell = max(cell, next(lines, 0) // LINES - 1)
            if isinstance(node, nodes.section):
                cell = walk(node, depth + 1, cell)
            elif isinstance(node, nodes.title):
                texts[cell].append(f"{'#' * depth} {markdown(node)}")
            elif "cell_index" in node:
                texts[cell] += map(markdown, node.findall(nodes.figure))
            else:
                texts[cell].append(markdown(node))
        return cell

    walk(page, 0, 0)
    return texts


def rewritten(
    notebook: nbformat.NotebookNode,
    page: nodes.document,
    formats: dict,
    numbers: dict,
    base: str,
    target: str,
    sha256: str,
) -> nbformat.NotebookNode:
    """The notebook with its text in plain Markdown, captions below their cells, the first new.

    Formats are such as ``{"figure": "Fig. %s"}``, numbers those of each kind of element by its
    identifier. The base is the address of the built book, and the target that of the page below it;
    without a base, links within the book are words. The hash is that of the wheel.
    """
    texts, cells = _texts(page.deepcopy(), _Markdown(formats, numbers, below(base, target))), []
    for position, cell in enumerate(notebook.cells):
        text = "\n\n".join(filter(None, texts[position]))
        if cell.cell_type == "code":
            cells.append(colab_cell(base, sha256) if cell.get("id") == COLAB else cell)
        if text:
            name = cell.id if cell.cell_type == "markdown" else f"{cell.id}-caption"
            cells.append(nbformat.v4.new_markdown_cell(text, id=name))
    kept = {key: value for key, value in notebook.metadata.items() if key != "jupytext"}
    return nbformat.v4.new_notebook(cells=cells, metadata=kept)
