"""What both commands do alike."""

import argparse

import pytest

from attnmem.terminal import perform, wrapped


def test_wrapped_breaks_between_words():
    line = "weights     " + " ".join(["word"] * 40)
    first, *rest = wrapped([line, "short"]).splitlines()
    assert len(first) <= 74
    assert all(part.startswith(" " * 12 + "word") for part in rest[:-1])
    assert rest[-1] == "short"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("d: got 0"), 1, "d: got 0"),
        (MemoryError(), 1, "MemoryError, of a file too large"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_perform_says_errors_in_a_line(capsys, error, status, message):
    parser = argparse.ArgumentParser()
    parser.add_argument("command")

    def fail(_):
        raise error

    assert perform(parser, {"go": fail}, ["go"]) == status
    assert message in capsys.readouterr().err
