"""Runs in, outcomes out: which runs are trained at once, their training, and its checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..checks import check_integer, refuse
from .engine import device_name, device_settings, origin
from .models import MODELS, parameter_count
from .protocols import PROTOCOLS, Bigrams, Protocol
from .store import PACKAGE, Configuration, Outcome, Run

_CPU = torch.device("cpu")
_STORE_EVERY = 60.0  # seconds between two stored states
# A hash of the library's code, as this process has read it.
_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py"))))


# --- which runs are trained at once ---------------------------------------------------------------


def _common(run: Run, varies: Collection[str]) -> tuple[Any, ...]:
    """What a run has in common with those that differ from it in some fields only."""
    return tuple(value for name, value in vars(run).items() if name not in varies)


def stacks(runs: Sequence[Run], device: str = "cpu", *, workers: int = 1) -> list[list[Run]]:
    """Any runs in groups that :func:`train` accepts, in the order in which they first occur.

    On a CPU a group holds the seeds of one cell; on a GPU all runs of one shape, as many as fit
    into the memory that each of so many ``workers`` has.

    Example:
        >>> from attnmem.lab import experiments
        >>> [len(group) for group in stacks(experiments.runs("dana-exp6", "quick"))]
        [2, 2, 2]
    """
    check_integer("workers", workers)
    on_gpu = torch.device(device).type == "cuda"
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        varies = PROTOCOLS[run.task].varies if on_gpu else Protocol.varies
        groups.setdefault(_common(run, varies), []).append(run)
    if not on_gpu:
        return list(groups.values())
    free = 0  # bytes that other processes leave to this one, used or not; 0 without a GPU
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    parts = []
    for group in groups.values():
        fit = max(1, int(0.8 * free / workers / max(map(_footprint, group))))
        parts += [group[start : start + fit] for start in range(0, len(group), fit)]
    return parts


def _footprint(run: Run) -> int:
    """Bytes that a run takes on a device, estimated from above: data, weights, and one step."""
    tokens = 0 if run.context == "shared" else run.n * run.d
    data = run.T * (run.d + tokens + 1) if run.context else 4 * run.T
    # What the backward pass reads of each example: its tokens, and for each head logits, weights
    # and their gradients for every token, and four vectors of the head's width.
    each = tokens + run.H * (4 * run.n + 4 * max(run.d, run.d_h)) + 4 * (run.N or 1)
    each += 3 * (run.width or 0)
    looked_at = 4096 if run.context else 8192
    return 4 * (data + 5 * parameter_count(run) + (run.layers * run.batch + looked_at) * each)


def operations(run: Run) -> int:
    """Floating-point operations of the matrix products in one step, with its backward pass."""
    run = dataclasses.replace(run, T=max(run.batch, 1))
    protocol = PROTOCOLS[run.task]([run], _CPU)
    [batch] = protocol.batches(1)
    with FlopCounterMode(display=False) as counter:
        protocol.losses(batch, watched=False)
    return counter.get_total_flops()


def first_epochs(run: Run, epochs: int) -> tuple[float, ...]:
    """The first points of the curve of a training on bigrams, on the CPU, without the rest."""
    with device_settings(_CPU, tf32=False):
        protocol = Bigrams([run], _CPU)
        while len(protocol.curve) < epochs and not protocol.done:
            protocol.advance()
    return tuple(round(accuracy, 4) for [accuracy] in protocol.curve)


# --- a training from end to end -------------------------------------------------------------------


def train(
    runs: Sequence[Run], *, device: str = "cpu", checkpoints: Path | None = None
) -> list[Outcome]:
    """Train runs of one shape at once; one outcome each, in their order.

    Runs may differ by their seed; of Mahdavi et al.'s model, also by the number of their examples
    and steps, and by their rates. Everything is computed in float32. A run whose loss is not finite
    any more has an outcome that says so (``diverged``); the others go on. A stack for which a GPU
    has too little memory is trained in halves, and so on; where it has too little for a single run,
    ``torch.OutOfMemoryError`` is raised. ``wall_s`` is the stack's time shared equally.

    In the folder ``checkpoints`` the state of a long training is stored once a minute. The same
    call goes on from there, and ends with the outcomes that it would have had. States stay until
    :func:`forget` deletes them; one that cannot be read is refused.
    """
    if not runs:
        refuse("runs", "none", "at least one")
    for run in runs:
        model, ends = MODELS.get(run.model), (None, "short") if run.context else (None,)
        if not model or run.task not in model.tasks or run.variant not in model.variants:
            what = f"model {run.model!r}, variant {run.variant!r}, task {run.task!r}"
            refuse("runs", what, "a known model, variant and task")
        if run.last_batch not in ends:
            refuse("runs", f"last_batch {run.last_batch!r} in {run.task!r}", f"one of {ends}")
    varies = PROTOCOLS[runs[0].task].varies
    shapes = {_common(run, varies) for run in runs}
    if len(shapes) > 1:
        only = f"runs that differ by {', '.join(sorted(varies))} only"
        refuse("runs", f"{len(shapes)} different shapes", only)
    where = torch.device(device)
    with device_settings(where, tf32=runs[0].products == "tf32"):
        try:
            return _outcomes(runs, where, Checkpoint(checkpoints, runs, device_name(where)))
        except torch.OutOfMemoryError:
            if len(runs) == 1:
                raise
    middle = len(runs) // 2  # here, where the error no longer holds what did not fit
    first = train(runs[:middle], device=device, checkpoints=checkpoints)
    return first + train(runs[middle:], device=device, checkpoints=checkpoints)


def _outcomes(runs: Sequence[Run], device: torch.device, checkpoint: Checkpoint) -> list[Outcome]:
    """Train, or go on with a training; seconds count in this process and in those before."""
    start = time.perf_counter()
    cells = {_common(run, Protocol.varies) for run in runs}
    protocol = PROTOCOLS[runs[0].task](runs, device, stays=None if len(cells) == 1 else True)
    if state := checkpoint.load():
        protocol.restore(state["protocol"])
        start -= state["seconds"]
    try:
        while not protocol.done:
            protocol.advance()
            if checkpoint.due:
                seconds = time.perf_counter() - start
                checkpoint.store({"protocol": protocol.state(), "seconds": seconds})
    finally:
        if protocol.captured:
            protocol.captured.release()
    common = origin((time.perf_counter() - start) / len(runs), device)
    common |= {"tf32": runs[0].products == "tf32"}
    return [Outcome(**common, **protocol.reached[run.key]) for run in runs]


# --- checkpoints ----------------------------------------------------------------------------------


class Checkpoint:
    """The state of a training that is under way, in a file: tensors, numbers and lists, no code.

    It is only used for the same runs, device, version of torch and sources of this library, since
    else the training would not end as if it had never stopped.
    """

    def __init__(self, folder: Path | None, runs: Sequence[Run], device: str) -> None:
        keys = [run.key for run in runs]
        self.origin = {"keys": keys, "device": device, "torch": str(torch.__version__)}
        self.origin |= {"sources": _SOURCES.hexdigest()[:16]}
        name = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"{keys[0]}-{name}.state"
        self.stored = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the last state is old enough to be replaced."""
        return self.path is not None and time.monotonic() - self.stored >= _STORE_EVERY

    def load(self) -> dict[str, Any] | None:
        """The state that was stored last, or None if there is none of these very runs."""
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
        """Write a state in place of the last one, which stays where that is not possible."""
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


def forget(folder: Path, runs: Sequence[Configuration]) -> None:
    """Delete the states of all stacks that begin with one of these runs, whose rows are stored."""
    keys = {run.key for run in runs}
    for path in folder.glob("*.state"):
        if path.name.partition("-")[0] in keys:
            path.unlink(missing_ok=True)
