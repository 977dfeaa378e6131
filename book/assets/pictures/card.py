"""``python card.py`` draws the card that links to the book show.

It is the picture of the first chapter, as Chromium draws it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
CARD = HERE.parent / "card.png"
PAGE = """<!doctype html><body><h1>How much can attention memorize?</h1>
<style>
body {{ margin: 28px 60px; font-family: sans-serif; background: #fff; }}
h1 {{ margin: 0; font-size: 46px; text-align: center; }}
.pic {{ max-width: 890px !important; margin: 14px auto !important; }}
figcaption, .controls {{ display: none !important; }}
</style><style>{}</style>{}"""


def draw() -> None:
    """Draw the card in the 64 colours that it needs."""
    style = (HERE.parent / "pictures.css").read_text("utf-8")
    picture = (HERE / "teach.html").read_text("utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 630})
        page.set_content(PAGE.format(style, picture))
        page.screenshot(path=CARD)
        browser.close()
    with Image.open(CARD) as image:
        image.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(
            CARD, optimize=True
        )


if __name__ == "__main__":
    draw()
