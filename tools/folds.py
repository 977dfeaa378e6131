"""A Sphinx extension: the style sheet draws the mark of a fold, which else is a picture in each."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

MARKER = "sd-summary-state-marker"


class _Marks(SphinxPostTransform):
    """Empties the markers that sphinx-design's own transform has just filled."""

    default_priority = 200  # sphinx-design makes its folds at 199
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        for marker in self.document.findall(nodes.inline):
            if MARKER in marker["classes"]:
                marker.clear()


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_post_transform(_Marks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
