"""Set the book's address in _config.yml, or take it back: all else follows when the book is built.

``make address URL=https://github.com/...`` sets that of the repository; the built book is then
expected where GitHub serves a repository's pages, unless ``SITE=https://...`` says another place.
``URL=`` alone takes both back.
"""

import argparse
import re
import sys
from urllib.parse import urlsplit

from attnmem.checks import refuse

from .chapters import ROOT, tidy

CONFIG = ROOT / "_config.yml"
SETTINGS = {  # in the order of their values below
    "repository": re.compile(r'^(  url: )"[^"\n]*"', re.M),
    "site": re.compile(r'^(html: \{baseurl: )"[^"\n]*"', re.M),
}


def addresses(url: str, site: str = "") -> tuple[str, str]:
    """Of the repository and of the built book; GitHub's pages are named after the repository."""
    url = tidy(url).replace("://www.github.com/", "://github.com/")
    site = tidy(site)
    if not url:
        if site:
            refuse("SITE", site, "none without URL, the repository's address")
        return "", ""
    for name, address in (("URL", url), ("SITE", site)):
        parts = urlsplit(address)
        local = parts.hostname in ("127.0.0.1", "localhost")
        if address and not (parts.hostname and (parts.scheme == "https" or local)):
            example = {"URL": "https://github.com/...", "SITE": "https://book.example"}[name]
            refuse(name, repr(address), f"an https address such as {example}")
        if re.search(r"[^\w.:/~-]", address):
            refuse(name, repr(address), "letters, digits and . : / ~ - only")
    host, path = urlsplit(url).hostname, urlsplit(url).path.strip("/").split("/")
    if host.endswith(".github.io"):
        refuse("URL", url, "the repository's address, https://github.com/...; its pages follow")
    if host == "github.com" and len(path) != 2:
        refuse("URL", url, "the name of its owner and its own behind https://github.com/")
    if not site:
        if host != "github.com":
            refuse("SITE", "nothing", f"where the book will stand: pages of {host} are not known")
        owner, name = path
        site = f"https://{owner.lower()}.github.io"
        if name.lower() != f"{owner.lower()}.github.io":
            site += f"/{name}"
    return url, site


def settled(text: str, repository: str, site: str) -> str:
    """The text of ``_config.yml`` with both addresses."""
    for name, address in (("repository", repository), ("site", site)):
        text, count = SETTINGS[name].subn(rf'\g<1>"{address}"', text)
        if count != 1:
            refuse("_config.yml", f"{count} lines with the address of the {name}", "one")
    return text


def main(argv: list[str] | None = None) -> int:
    """Write ``_config.yml``, and say what follows; 1 on an address that is none."""
    parser = argparse.ArgumentParser(prog="make address", description=__doc__)
    parser.add_argument("url", metavar="URL")
    parser.add_argument("site", metavar="SITE", nargs="?", default="")
    arguments = parser.parse_args(argv)
    try:
        repository, site = addresses(arguments.url, arguments.site)
        text = settled(CONFIG.read_text("utf-8"), repository, site)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    CONFIG.write_text(text, "utf-8")
    if repository:
        print(f"repository: {repository}\nthe book:   {site}\nNow `make html`.")
    else:
        print("no address: no page leads outside. Now `make html`.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
