"""The state of a training that is under way, in a file: tensors, numbers and lists, nothing else.

Files are written by ``torch.save`` and read with ``weights_only=True``, which refuses code. A file
belongs to a list of runs, a device, a version of torch and the sources of this library. One that
belongs to others is not used, since the training would not end as if it had never stopped.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..store import PACKAGE, Configuration, Run

EVERY = 60.0  # seconds between two stored states


class Checkpoint:
    """Where a training of some runs is stored while it is under way.

    Args:
        folder: The folder of the file, or None to store nothing.
        runs: What is trained.
        device: Where, such as ``cpu`` or the name of a GPU.
    """

    def __init__(self, folder: Path | None, runs: Sequence[Run], device: str) -> None:
        keys = [run.key for run in runs]
        self.origin = {
            "keys": keys,
            "device": device,
            "torch": str(torch.__version__),
            "sources": _sources(),
        }
        name = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"{keys[0]}-{name}.state"
        self.stored = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """The state that was stored last, or None if there is none of these very runs.

        Raises:
            ValueError: The file cannot be read. It is left as it is.
        """
        if self.path is None or not self.path.exists():
            return None
        try:
            held = torch.load(self.path, weights_only=True, map_location="cpu")
            origin, state = held["origin"], held["state"]
        except Exception as e:  # torch says in many ways that it cannot read a file
            why = "is damaged; without it the training starts again, so delete it to go on"
            raise ValueError(f"checkpoint: {self.path} {why}") from e
        return state if origin == self.origin else None

    def store(self, state: dict[str, Any]) -> None:
        """Write a state in place of the last one; a killed process leaves one of the two.

        Where it cannot be written, a warning says so, and the last one stays.
        """
        if self.path is None:
            return
        self.stored = time.monotonic()
        scratch = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"origin": self.origin, "state": state}, scratch)
            os.replace(scratch, self.path)
        except (OSError, RuntimeError) as error:  # torch says the latter where a disk is full
            with contextlib.suppress(OSError):
                scratch.unlink()
            warnings.warn(f"no checkpoint can be written to {self.path}: {error}", stacklevel=2)

    @property
    def due(self) -> bool:
        """Whether the last state is old enough to be replaced."""
        return self.path is not None and time.monotonic() - self.stored >= EVERY


def forget(folder: Path, runs: Sequence[Configuration]) -> None:
    """Delete the states of all stacks that begin with one of these runs, whose rows are stored."""
    keys = {run.key for run in runs}
    for path in folder.glob("*.state"):
        if path.name.partition("-")[0] in keys:
            path.unlink(missing_ok=True)


@functools.cache
def _sources() -> str:
    """A hash of the library's code, taken once, since a process reads the code once."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
