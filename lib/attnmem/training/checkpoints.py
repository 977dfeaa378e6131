"""The state of a training that is under way, in a file: tensors, numbers and lists, nothing else.

Files are written by ``torch.save`` and read with ``weights_only=True``, which refuses code. A file
belongs to a list of runs, a device, a version of torch and a commit of this library. One that
belongs to another is not used, since the training would not end as if it had never stopped.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import results
from ..results import Run

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
            "commit": results.commit(),
        }
        name = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"{name}.state"
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
        """Write a state in place of the last one; a killed process leaves one of the two."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(f".{os.getpid()}")
        torch.save({"origin": self.origin, "state": state}, scratch)
        os.replace(scratch, self.path)
        self.stored = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the last state is old enough to be replaced."""
        return self.path is not None and time.monotonic() - self.stored >= EVERY

    def remove(self) -> None:
        """Forget the state of a training that has ended."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
