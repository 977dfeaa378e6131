"""One address, in one file of settings: which are accepted, and what is written."""

import pytest
import yaml

from tools import address
from tools.address import addresses, main, settled
from tools.chapters import ROOT

HERE = "https://github.com/Some-One/some.where"
PAGES = "https://some-one.github.io/some.where"


@pytest.mark.parametrize(
    ("url", "site", "expected"),
    [
        (HERE, "", (HERE, PAGES)),
        (f"  {HERE}.git/ ", "", (HERE, PAGES)),
        (HERE.replace("://", "://www."), "", (HERE, PAGES)),
        (HERE, "https://someone.example/book/", (HERE, "https://someone.example/book")),
        (
            "https://github.com/a/A.github.io",
            "",
            ("https://github.com/a/A.github.io", "https://a.github.io"),
        ),
        (
            "https://gitlab.com/a/b/c",
            "https://d.example",
            ("https://gitlab.com/a/b/c", "https://d.example"),
        ),
        (HERE, "http://127.0.0.1:8000", (HERE, "http://127.0.0.1:8000")),
        ("", "", ("", "")),
    ],
)
def test_an_address_is_read_in_every_form(url, site, expected):
    assert addresses(url, site) == expected


@pytest.mark.parametrize(
    ("url", "site", "refused"),
    [
        ("github.com/a/b", "", "URL: got 'github.com/a/b'; expected an https address"),
        ("http://github.com/a/b", "", "URL: got 'http:"),
        ("git@github.com:a/b.git", "", "URL: got"),
        (
            "https://github.com/a",
            "",
            "URL: got https://github.com/a; expected the name of its owner",
        ),
        ("https://github.com/a/b/tree/main", "", "URL: got"),
        (PAGES, "", "expected the repository's address"),
        ("https://gitlab.com/a/b", "", "SITE: got nothing; expected where the book will stand"),
        (HERE, "book", "SITE: got 'book'; expected an https address"),
        (f'{HERE}"\\nx: 1', "", "letters, digits"),
        (HERE, "https://a.example/$(x)", "SITE: got .*letters, digits"),
        ("", PAGES, "SITE: got .*none without URL"),
    ],
)
def test_what_is_no_address_is_refused(url, site, refused):
    with pytest.raises(ValueError, match=refused.replace("(", r"\(")):
        addresses(url, site)


def test_only_the_two_settings_change():
    before = (ROOT / "_config.yml").read_text("utf-8")
    after = settled(before, HERE, PAGES)
    read = yaml.safe_load(after)
    assert (read["repository"]["url"], read["html"]["baseurl"]) == (HERE, PAGES)
    changed = [a != b for a, b in zip(before.splitlines(), after.splitlines(), strict=True)]
    assert sum(changed) == 2
    emptied = settled(before, "", "")
    assert settled(after, "", "") == emptied
    with pytest.raises(ValueError, match=r"_config\.yml: got 0 lines"):
        settled(before.replace("  url:", "  address:"), HERE, PAGES)


def test_make_address_writes_takes_back_and_refuses(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "_config.yml"
    before = settled((ROOT / "_config.yml").read_text("utf-8"), "", "")
    copy.write_text(before, "utf-8")
    monkeypatch.setattr(address, "CONFIG", copy)
    assert main(["github.com/a/b"]) == 1
    assert "URL: got" in capsys.readouterr().err
    assert copy.read_text("utf-8") == before
    assert main([HERE, ""]) == 0
    assert PAGES in capsys.readouterr().out
    assert copy.read_text("utf-8") == settled(before, HERE, PAGES)
    assert main(["", ""]) == 0
    assert copy.read_text("utf-8") == before
