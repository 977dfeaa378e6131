"""A Sphinx extension: what leads to the repository is there only where that has an address.

The address is ``repository: url`` in ``_config.yml``. Where it is empty, the buttons that the
settings ask for are dropped. With one, pages see the tag ``address``: ``{only} address``.
"""

from __future__ import annotations

from typing import Any

DEFAULT = "https://github.com/executablebooks/jupyter-book"  # jupyter-book's, for a missing one
BUTTONS = ("repository", "issues", "edit_page", "source")
RUNNING = "book/running"  # the page that says what a notebook needs


def tidy(address: str | None) -> str:
    """An address as links are built on it; empty, if it is none."""
    address = (address or "").strip().rstrip("/").removesuffix(".git")
    return "" if address == DEFAULT else address


def _settle(app: Any, config: Any) -> None:
    """Runs before the theme reads its options."""
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


def _help(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
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


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("config-inited", _settle)
    app.connect("html-page-context", _help, priority=502)  # the theme adds its buttons at 501
    return {"parallel_read_safe": True, "parallel_write_safe": True}
