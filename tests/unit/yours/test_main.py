"""The command of the tool."""

import re

import pytest

from attnmem_yours import __main__ as cli


@pytest.mark.parametrize("name", ["capacity", "examine", "memorize"])
def test_each_option_for_data_and_layers_is_explained(capsys, monkeypatch, name):
    """Beside it or, where its name is long, in the next line; and with it its default."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    options = capsys.readouterr().out.partition("options:\n")[2]
    for option in re.split(r"\n  (?=-)", options.split("\n\n")[0])[1:]:
        assert re.search(r"\S\s{2,}\w", option), option
    default = "d / H" if name == "capacity" else "d"
    assert re.search(rf"--head-dim HEAD_DIM +.*default: {default}\b", options)
