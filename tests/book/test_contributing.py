"""CONTRIBUTING is one screen and names what is there; test_newcomer walks its experiment."""

import importlib.util
import re
import textwrap

import pytest
import torch

from attnmem import mha, papers

from tools.chapters import ROOT, chapters, text_path

SAID = (ROOT / "CONTRIBUTING.md").read_text()
WORDS = " ".join(SAID.split())  # a command may go on in the next line
CODE = re.findall(r"`([^`]+)`", WORDS)
PATHS = [word for code in CODE for word in code.split() if re.search(r"/|\.(md|toml|yml)$", word)]
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?m)(?:^    .*\n)+", SAID)]


def test_it_is_one_screen():
    lines = SAID.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("path", sorted({*PATHS} - {".venv/bin/activate"}))
def test_a_path_is_there(path):
    if "<" in path or path.startswith("MODULE="):
        name = chapters()[0]
        path = path.replace("<part>/<name>", name).replace("MODULE=", "lib/")
        path = path.replace("CHAPTER=", "book/text/") + ".md" * path.startswith("CHAPTER=")
    assert (ROOT / path).exists()


def test_targets_variables_and_commands_are_those_of_the_makefile_and_of_the_modules():
    makefile = (ROOT / "Makefile").read_text()
    commands = [re.match(r"make ([^&]+)", code) for code in CODE]
    for word in (word for command in commands if command for word in command[1].split()):
        variable = re.fullmatch(r"([A-Z]+)=\S+", word)
        assert (f"$({variable[1]})" if variable else f"\n{word}:") in makefile, word
    for module in re.findall(r"python -m ([\w.]+)", WORDS):
        assert importlib.util.find_spec(module)


def test_dotted_names_can_be_imported_marks_name_claims_and_the_page_lists_modules():
    for name in (code for code in CODE if code.startswith("attnmem.")):
        module, _, last = name.rpartition(".")
        module = importlib.import_module(module)
        assert hasattr(module, last) or importlib.import_module(name), name
    [mark] = re.findall(r'hostile\("([^"]+)"\)', SAID)
    assert mark in papers.claims()
    listed = "".join(page.read_text() for page in (ROOT / "book").glob("library*.md"))
    for module in (ROOT / "lib/attnmem/theory").glob("[a-z]*.py"):
        assert f"automodule:: attnmem.theory.{module.stem}\n" in listed


def test_a_figure_is_found_with_its_caption_and_its_alternative_text():
    [sought] = re.findall(r'`git grep -n "(name: fig-[^"]+)" book/text`', WORDS)
    texts = "\n".join(text_path(chapter).read_text() for chapter in chapters())
    cells = re.findall(r"^```\{code-cell\}.*?^```$", texts, re.M | re.S)
    [cell] = [cell for cell in cells if sought in cell]
    assert "caption: " in cell
    assert "alt: " in cell


@pytest.mark.parametrize("room", ["core", "theory"])
def test_the_construction_is_right_in_each_room(room):
    assert f"`lib/attnmem/{room}`" in WORDS
    head = "import torch\nfrom jaxtyping import Float\nfrom torch import Tensor\n"
    head += "from ..checks import checked\nfrom ..core.layers import MHAWeights\n"
    scope = {"__package__": f"attnmem.{room}", "__name__": f"attnmem.{room}.new"}
    exec(head + BLOCKS[1], scope)
    tokens, context = torch.rand(5, 2), torch.rand(7, 5)
    out = mha(scope["average"](tokens), context, torch.rand(3, 5))
    torch.testing.assert_close(out, (context.mean(0) @ tokens).expand(3, 2))
    with pytest.raises(ValueError, match="tokens"):
        scope["average"](torch.rand(5))
