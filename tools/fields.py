"""A Sphinx extension that lists the fields of a named tuple once, not again as its members."""

from __future__ import annotations

from typing import Any, NamedTuple


class _Example(NamedTuple):
    field: int


FIELD = type(_Example.field)


def _skip(app: Any, what: str, name: str, member: object, skip: bool, options: Any) -> bool | None:
    return True if isinstance(member, FIELD) else None


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", _skip)
    return {"parallel_read_safe": True}
