"""What `make nbval` sees: names of quoted numbers, verdicts in metadata, what pictures show."""

import base64
import io
import itertools
import os
import re
import shutil
import subprocess
import sys

import nbformat
import numpy as np
import PIL.Image
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tools import pictures
from tools.chapters import ROOT, chapters, notebook_path

SHOWN = """\
from IPython.display import display
display({"text/plain": "0.34"}, raw=True, metadata={"scrapbook": {"name": "deep"}})
display({"text/plain": "0.34"}, raw=True, metadata={"scrapbook": {"name": "flat"}})
display({"text/plain": "holds"}, raw=True, metadata={"attnmem": {"verdict": "proved"}})
display({"image/png": "PICTURE", "text/plain": "<Figure>"}, raw=True)
"""


def coded(image):
    out = io.BytesIO()
    image.save(out, format="png")
    return base64.b64encode(out.getvalue()).decode()


def figures():
    """Every picture of the book."""
    for chapter in chapters():
        for cell in nbformat.read(notebook_path(chapter), 4).cells:
            for output in cell.get("outputs", []):
                if png := output.get("data", {}).get("image/png"):
                    yield png


FIGURES = [*figures()]


def redrawn(png, shade=1):
    """The same picture with other bytes."""
    pixels = np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"))
    return coded(PIL.Image.fromarray(np.maximum(pixels, shade) - shade))


def test_two_pictures_of_the_book_are_never_alike():
    """And far enough apart that the tolerance may be for other processors."""
    apart = [pictures.difference(*pair) for pair in itertools.combinations(FIGURES, 2)]
    assert min(apart) > 2 * pictures.TOLERANCE


def test_a_picture_is_like_itself_in_other_bytes():
    for png in FIGURES:
        again = redrawn(png)
        assert again != png
        assert pictures.difference(png, again) <= 2


def test_a_curve_that_is_gone_is_missed():
    """Of those that cover at least 600 points nine in ten are, each wiped out alone."""
    missed = []
    for png in FIGURES:
        pixels = np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"))
        for colour in ((0, 114, 178), (213, 94, 0), (0, 158, 115)):
            curve = np.abs(pixels.astype(int) - colour).sum(2) < 120
            if curve.sum() >= 600:
                without = PIL.Image.fromarray(np.where(curve[..., None], np.uint8(255), pixels))
                missed.append(pictures.difference(png, coded(without)) > pictures.TOLERANCE)
    assert len(missed) > 40
    assert np.mean(missed) > 0.85


def stored(change):
    """A notebook that would be stored, after a change of its outputs."""
    one, other = FIGURES[:2]
    shown = [({"text/plain": "0.34"}, {"scrapbook": {"name": name}}) for name in ("deep", "flat")]
    shown.append(({"text/plain": "holds"}, {"attnmem": {"verdict": "proved"}}))
    shown.append(({"image/png": one, "text/plain": "<Figure>"}, {}))
    outputs = [new_output("display_data", data, metadata=said) for data, said in shown]
    deep, flat, verdict, figure = outputs
    if change == "names":
        deep.metadata, flat.metadata = flat.metadata, deep.metadata
    elif change == "verdict":
        verdict.metadata = {"attnmem": {"verdict": "contradicted"}}
    elif change == "another":
        figure.data["image/png"] = other
    elif change == "gone":
        del figure.data["image/png"]
    elif change == "redrawn":
        figure.data["image/png"] = redrawn(one, shade=4)
    source = SHOWN.replace("PICTURE", one.replace("\n", "\\n"))
    return new_notebook(cells=[new_code_cell(source, outputs=outputs, execution_count=1)])


SEEN = {  # and the words that say so
    "names": "scrapbook",
    "verdict": "contradicted",
    "another": "another picture, by",
    "gone": "image/png",
}
NOT_SEEN = ("as-it-was", "redrawn")


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What nbval says of notebooks that lie as those of the book do."""
    folder = tmp_path_factory.mktemp("book")
    shutil.copy(ROOT / "book/conftest.py", folder)
    for change in (*SEEN, *NOT_SEEN):
        nbformat.write(stored(change), folder / f"{change}.ipynb")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", folder, "-p", "no:cacheprovider"]
    options = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "text": True}
    command += ["--color=no", "--nbval", "--nbval-current-env", folder]
    return subprocess.run(command, capture_output=True, **options).stdout


@pytest.mark.parametrize("change", SEEN)
def test_nbval_sees(said, change):
    [report] = re.findall(rf"(?ms)^_+ {change}\.ipynb::Cell 0 _+$(.*?)(?=^[_=]+ )", said)
    assert SEEN[change] in report


def test_nbval_sees_nothing_else(said):
    assert f"{len(SEEN)} failed, {len(NOT_SEEN)} passed" in said
