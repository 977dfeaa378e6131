"""What both commands do alike: a parser, reports, errors in a line, a quiet end."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import textwrap
from collections.abc import Callable, Mapping


def wrapped(lines: list[str], indent: int = 12) -> str:
    """A report, whose long lines go on below themselves, so many letters to the right."""
    wrapper = textwrap.TextWrapper(
        width=74, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in lines)


def parser_of(
    program: str, description: str, version: str
) -> tuple[argparse.ArgumentParser, argparse._SubParsersAction]:
    """A parser with ``--version``, and where its commands are added; nothing is abbreviated."""
    exact = functools.partial(argparse.ArgumentParser, allow_abbrev=False)
    parser = exact(prog=f"python -m {program}", description=description.replace("``", ""))
    parser.add_argument("--version", action="version", version=f"attnmem {version}")
    return parser, parser.add_subparsers(dest="command", required=True, parser_class=exact)


def perform(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, Callable[[argparse.Namespace], int]],
    argv: list[str] | None = None,
) -> int:
    """Parse a command line and do what it asks for; 1 on bad input, 130 on Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):  # a name in other letters does not lose a report
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    arguments = parser.parse_args(argv)
    try:
        status = commands[arguments.command](arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read has read enough; nothing is left to say at the exit
        say_no_more()
        return 0
    except (ValueError, OSError, ImportError, MemoryError, RecursionError) as error:
        print(str(error) or f"{type(error).__name__}, of a file too large", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; every finished row is in the store", file=sys.stderr)
        return 130


def say_no_more() -> None:
    """Send all further output to nowhere, as its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
