"""A Sphinx extension: a stored table is saved as ``dana-exp1-paper.csv``, not as ``paper.csv``."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from sphinx.addnodes import download_reference

FOLDER = "measurements"  # of tables, each in a folder named after its experiment


def name(target: str) -> str:
    """The name under which a browser saves a file; none for its own one."""
    path = PurePosixPath(target)
    return f"{path.parent.name}-{path.name}" if FOLDER in path.parts else ""


def _open(translator: Any, node: download_reference) -> None:
    type(translator).visit_download_reference(translator, node)
    named = f'download="{name(node["reftarget"])}"'
    translator.body[-1] = translator.body[-1].replace('download=""', named)


def _close(translator: Any, node: download_reference) -> None:
    type(translator).depart_download_reference(translator, node)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_node(download_reference, override=True, html=(_open, _close))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
