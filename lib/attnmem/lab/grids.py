"""The grids of ``grids.toml``, which says how it is read: what experiments and searches try."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from ..checks import refuse
from .store import COLUMNS, Run

PROFILES = ("paper", "quick")
Cells = list[dict[str, Any]]

_FILE = Path(__file__).with_suffix(".toml")
_ENTRY = ("title", "ours", *PROFILES, "curves", "variants", "search")
_TYPES = {field: kind for field, (kind, _) in COLUMNS[Run].items()}
_TYPES |= dict.fromkeys(("seeds", "batches", "epochs", "least_steps", "width_per_d"), int)
_OPTIONAL = [field for field, (_, optional) in COLUMNS[Run].items() if optional]
_BY_STUDY = ("experiment", "profile", "seed")
_SAID = [f.name for f in fields(Run) if f.default is MISSING and f.name not in _BY_STUDY]


def entries(*, search: bool = False) -> Iterator[dict[str, Any]]:
    """What makes each experiment, or each search. A bad entry is refused by its name and field."""
    tables = tomllib.loads(_FILE.read_text("utf-8"))
    settings = tables.pop("settings")
    for name, entry in tables.items():
        for field in entry:
            if field not in _ENTRY:
                refuse(f"grids.toml, {name}", f"the field {field!r}", f"one of {', '.join(_ENTRY)}")
        if ("title" in entry) == ("ours" in entry) or not {*PROFILES} <= {*entry}:
            refuse(f"grids.toml, {name}", ", ".join(entry), "title or ours, and paper and quick")
        if entry.get("search", False) == search:
            what = entry.get("title") or f"{entry['ours']} (not in the paper)"
            read: dict[str, Any] = {"name": name, "paper": name.partition("-")[0], "what": what}
            read |= {"cells": {}, "seeds": {}}
            for profile in PROFILES:
                cells = _cells(f"grids.toml, {name}, {profile}", entry[profile], settings, search)
                read["seeds"][profile] = max(cell.pop("seeds") for cell in cells)
                read["cells"][profile] = cells
            yield read | {key: entry[key] for key in ("curves", "variants") if key in entry}


def _cells(at: str, grids: Any, settings: dict[str, Any], search: bool) -> Cells:
    """Every combination of the values of a grid, or of several grids."""
    cells = []
    for grid in grids if isinstance(grids, list) else [grids]:
        axes = {f: _values(f"{at}, {f}", f, x) for f, x in _merged(at, grid, settings).items()}
        for point in itertools.product(*axes.values()):
            cells.append(_cell(at, dict(zip(axes, point, strict=True)), search))
    return cells or refuse(at, grids, "one grid or several")


def _merged(at: str, grid: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that a grid names, then its own, which override them."""
    merged, like = {}, grid.get("like", [])
    for name in [like] if isinstance(like, str) else like:
        if name not in settings:
            refuse(f"{at}, like", repr(name), f"one of {', '.join(settings)}")
        merged |= _merged(at, settings[name], settings)
    before = {field: value for field, value in merged.items() if field not in grid}
    return before | {field: value for field, value in grid.items() if field != "like"}


def _values(at: str, field: str, given: Any) -> list[Any]:
    """The values of one axis; ``1, 5..15 by 5`` are 1, 5, 10 and 15."""
    kind = _TYPES.get(field) or refuse(at, "a field that nothing reads", ", ".join(_TYPES))
    values = given if isinstance(given, list) else [given]
    if kind is int and isinstance(given, str):
        values = []
        for piece in given.split(","):
            ends, _, step = piece.partition(" by ")
            first, _, last = ends.partition("..")
            try:
                values += range(int(first), int(last or first) + 1, int(step or 1))
            except ValueError:
                refuse(at, repr(given), "whole numbers, such as '1, 5..50 by 5'")
    if kind is float:
        values = [float(x) if isinstance(x, int) else x for x in values]
    if not values or not all(isinstance(x, kind) for x in values):
        refuse(at, repr(given), f"one or several of type {kind.__name__}")
    return values


def _cell(at: str, given: dict[str, Any], search: bool) -> dict[str, Any]:
    """A training's fields, with those that follow from others, and ``seeds``."""
    cell = {"variant": "code", "d_h": given.get("d", 0)} | given
    if "batches" in cell:
        cell["T"] = cell["batches"] * cell.get("batch", 0)
    if "epochs" in cell:
        steps = cell["epochs"] * cell.get("T", 0) // cell.get("batch", 1)
        cell = {"steps": max(steps, cell.get("least_steps", 0))} | cell
    if "width_per_d" in cell:
        cell["width"] = cell["width_per_d"] * cell.get("d", 0)
    for field in ("seeds", *_SAID):
        if field not in cell and not (search and field in ("T", "batch")):
            if field not in _OPTIONAL:
                refuse(f"{at}, {field}", "nothing", "a value")
            cell[field] = None
    return {field: cell[field] for field in ("seeds", *COLUMNS[Run]) if field in cell}
