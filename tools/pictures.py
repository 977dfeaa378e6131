"""Whether two pictures show the same, though processors and libraries draw other bytes."""

import base64
import io

import nbformat
import numpy as np
from PIL import Image

SIDE = 24  # of a thumbnail
# Of 255 grey values. Other processors and matplotlib 3.9 draw the book's figures up to 9 apart, and
# no two figures of the book are closer than 49. Without one of its curves a figure is mostly 18 to
# 26 away.
TOLERANCE = 18


def settle(fresh: nbformat.NotebookNode, stored: nbformat.NotebookNode) -> None:
    """Give a notebook the stored pictures that its own look like, and words for the others."""
    for cell, stored_cell in zip(fresh.cells, stored.cells, strict=False):
        settle_cell(cell.get("outputs", []), stored_cell.get("outputs", []))


def settle_cell(fresh: list[nbformat.NotebookNode], stored: list[nbformat.NotebookNode]) -> None:
    """The same for the outputs of a cell."""
    for new, old in zip(_drawn(fresh), _drawn(stored), strict=False):
        apart = difference(new["image/png"], old["image/png"])
        if apart <= TOLERANCE:
            new["image/png"] = old["image/png"]
        else:
            new["image/png"] = f"another picture, by {apart} of 255 grey values of a thumbnail"


def _drawn(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    return [output.data for output in outputs if "image/png" in output.get("data", {})]


def difference(first: str, second: str) -> int:
    """By how much the grey values of two pictures' thumbnails differ where they differ most."""
    return int(np.abs(_thumbnail(first) - _thumbnail(second)).max())


def _thumbnail(png: str) -> np.ndarray:
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").convert("L")
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC), int)
