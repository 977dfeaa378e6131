"""CONTRIBUTING names what is there; test_newcomer walks its paths."""

import importlib.util
import re
import textwrap

import pytest
import torch

from attnmem import mha, papers

from tools.chapters import ROOT, chapters, text_path

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
WORDS = " ".join(TEXT.split())  # a command may go on in the next line
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?m)(?:^    .*\n)+", TEXT)]
CODE = re.findall(r"`([^`]+)`", WORDS)
COMMANDS = [code for code in CODE if code.startswith("make ")]
COMMANDS += [line.partition("#")[0] for line in "".join(BLOCKS).splitlines() if "make " in line]
PATHS = [word for code in CODE for word in code.split() if re.search(r"/|\.(md|toml|yml)$", word)]
RELATIVE = {"record.md": "book/fragments/", "chapter.md": "book/fragments/"}  # "beside it"
RELATIVE["claims.toml"] = "lib/attnmem/"


def existing(path):
    """The path below the root that a word of CONTRIBUTING stands for, with a real chapter."""
    variable, _, value = path.rpartition("=")
    value = value.replace("<part>/<name>", chapters()[0])
    folder = {"MODULE": "lib/", "CHAPTER": "book/text/"}.get(variable, RELATIVE.get(path, ""))
    suffix = ".md" if variable == "CHAPTER" else ""
    if value.startswith("book/notebooks/") and not value.endswith(".ipynb"):
        suffix = ".ipynb"  # as in _toc.yml
    return f"{folder}{value}{suffix}"


@pytest.mark.parametrize("path", sorted({*PATHS} - {".venv/bin/activate"}))
def test_a_path_is_there(path):
    assert [*ROOT.glob(existing(path))]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_make_is_there(command):
    makefile = (ROOT / "Makefile").read_text()
    for word in command.partition("&&")[0].split()[1:]:
        variable = re.fullmatch(r"([A-Z]+)=\S+", word)
        expected = f"$({variable[1]})" if variable else f"\n{word}:"
        assert expected in makefile or f"$(if $({word.partition('=')[0]})" in makefile, word


def test_modules_that_are_run_are_there():
    for module in re.findall(r"python -m ([\w.]+)", WORDS):
        assert importlib.util.find_spec(module)


@pytest.mark.parametrize("name", [code for code in CODE if code.startswith("attnmem.")])
def test_a_dotted_name_can_be_imported(name):
    module, _, last = name.rpartition(".")
    assert hasattr(importlib.import_module(module), last) or importlib.import_module(name)


def test_the_mark_is_of_the_claim_that_is_added():
    [mark] = re.findall(r'hostile\("([^"]+)"\)', TEXT)
    [paper, name] = re.findall(r"(?m)^    \[(\w+)\.(finding-\S+)\]$", TEXT)[0]
    assert mark == f"{paper}-{name}"
    assert paper in papers.papers()


def test_the_pages_list_each_module_of_theory():
    pages = "".join(page.read_text() for page in (ROOT / "book").glob("library*.md"))
    for module in (ROOT / "lib/attnmem/theory").glob("[a-z]*.py"):
        line = f".. automodule:: attnmem.theory.{module.stem}\n"
        assert line in pages, f"add {line!r} to book/library-weights.md"


def test_a_figure_is_found_with_caption_and_alt():
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
    [construction] = [block for block in BLOCKS if "@checked" in block]
    exec(head + construction, scope)
    tokens, context = torch.rand(5, 2), torch.rand(7, 5)
    out = mha(scope["average"](tokens), context, torch.rand(3, 5))
    torch.testing.assert_close(out, (context.mean(0) @ tokens).expand(3, 2))
    with pytest.raises(ValueError, match="tokens"):
        scope["average"](torch.rand(5))
