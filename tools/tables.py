"""A Sphinx extension: captioned outputs whose names begin with ``tab-`` are tables, not figures."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform


class table_output(nodes.figure):
    """What a cell has printed as a table, below its caption."""


class _Tables(SphinxTransform):
    """myst-nb makes a figure of every captioned output; those named ``tab-...`` become tables."""

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


def _open(translator: Any, table: table_output) -> None:
    translator.body.append(translator.starttag(table, "figure", CLASS="table-output"))
    caption = table.pop(0)
    caption.parent = table
    caption.walkabout(translator)  # opens its element and leaves it open, for a legend
    translator.body.append("</figcaption>\n")


def _close(translator: Any, table: table_output) -> None:
    translator.body.append("</figure>\n")


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_enumerable_node(table_output, "table", _title, html=(_open, _close))
    app.add_transform(_Tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
