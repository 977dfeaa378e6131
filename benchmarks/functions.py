"""How many functions of the library a reader must pass to follow two calls, and in how many files.

python benchmarks/functions.py [-v]     -v lists them
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import attnmem
from attnmem.lab import experiments

LIBRARY = str(Path(attnmem.__file__).parent) + os.sep


def entered(call) -> set[tuple[str, str]]:
    """The files and functions of the library that a call enters, without comprehensions."""
    seen = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LIBRARY) and code.co_name[0] != "<":
            seen.add((code.co_filename.removeprefix(LIBRARY), code.co_qualname))

    sys.setprofile(note)
    try:
        with contextlib.redirect_stdout(None):
            call()
    finally:
        sys.setprofile(None)
    return seen


with tempfile.TemporaryDirectory() as folder:
    calls = {"stored": entered(lambda: experiments.stored("dana-exp1", "paper"))}
    os.environ["ATTNMEM_MEASUREMENTS"] = folder
    calls["quick run"] = entered(lambda: experiments.run("dana-exp1", "quick", "cpu"))
for name, found in calls.items():
    print(f"{name}: {len(found)} functions in {len({file for file, _ in found})} files")
    for file, function in sorted(found) if "-v" in sys.argv else ():
        print(f"  {file:30} {function}")
