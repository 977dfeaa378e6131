"""What differs under other arithmetics is seen, named and counted."""

import base64
import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import nbformat
import PIL.Image
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tools import steady


def notebook(*texts, **metadata):
    outputs = ([new_output("stream", text=text)] for text in texts)
    cells = [new_code_cell("show()", id=f"c{k}", outputs=x) for k, x in enumerate(outputs)]
    return new_notebook(cells=cells, metadata=metadata)


def test_a_cell_is_named_with_both_lines():
    stored, again, now = (notebook("same\n", f"rank 3\nerror {x}\n") for x in (1, 1, 2))
    assert steady.compared("part/one", stored, again) == (2, [])
    _, [said] = steady.compared("part/one", stored, now)
    assert said.startswith("part/one, cell 1: show()")
    assert {"-error 1", "+error 2"} < {*said.split("\n    ")}
    assert "rank" not in said


@pytest.mark.parametrize("now", [notebook("same\n"), notebook("same\n", "more\n", language="R")])
def test_cells_and_metadata_that_differ_are_seen(now):
    _, [said] = steady.compared("part/one", notebook("same\n", "more\n"), now)
    assert "cells or metadata differ" in said


@pytest.mark.parametrize(
    ("grey", "value", "differ"), [(120, "'0.34'", 0), (150, "'0.34'", 1), (100, "'0.35'", 1)]
)
def test_glued_values_count_and_what_pictures_show(monkeypatch, tmp_path, grey, value, differ):
    def written(name, grey, value):
        shown = {"image/png": picture(grey), "text/plain": "<Figure>"}, {"text/plain": value}
        outputs = [new_output("display_data", data) for data in shown]
        path = tmp_path / f"{name}.ipynb"
        nbformat.write(new_notebook(cells=[new_code_cell(id="a", outputs=outputs)]), path)
        return path

    monkeypatch.setattr(steady, "STEADY", tmp_path)
    monkeypatch.setattr(steady, "execute", lambda *_: None)
    monkeypatch.setattr(steady, "notebook_path", lambda _: written("stored", 110, "'0.34'"))
    (tmp_path / "own").mkdir()
    written("own/one", grey, value)
    count, said = steady.differing("one", "own")
    assert (count, len(said)) == (1, differ)


def picture(grey):
    out = io.BytesIO()
    PIL.Image.new("L", (40, 30), grey).save(out, format="png")
    return base64.b64encode(out.getvalue()).decode() + "\n"


def test_main_counts_differences(monkeypatch, capsys):
    found = {"dana/parity": (3, ["dana/parity, cell 1"]), "idea/turns": (2, [])}
    monkeypatch.setattr(steady, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(steady, "_become", lambda _: None)
    monkeypatch.setattr(steady, "differing", lambda name, _: found[name])
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: "torch")
    for names, status in ((["idea/turns"], 0), (["idea/turns", "dana/parity"], 1)):
        monkeypatch.setattr(sys, "argv", ["steady", "--on", "own,haswell", *names])
        assert steady.main() == status
    said = capsys.readouterr().out
    assert said.endswith("compared 2 chapters, 5 cells of code, 2 machines: 2 outputs differ\n")


def test_work_beside_the_busy_machine_ends_with_it():
    with steady.working(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.wait(10) for process in processes)
