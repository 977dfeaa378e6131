"""Runs in, outcomes out: which runs are trained at once, their training, and its checkpoints."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..checks import refuse
from .models import MODELS
from .protocols import PROTOCOLS, Bigrams
from .store import PACKAGE, RESULTS, Configuration, Outcome, Run, Skewed, commit

_CPU = torch.device("cpu")
# A hash of the library's code, as this process has read it.
_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py"))))
# glibc's mallopt: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD; bytes
_MALLOC_OPTIONS = {-3: 2**30, -1: 2**31 - 1, -2: 2**28}
STREAMS = 31  # for workers: torch gives out 32 in turn, and the thread that starts them has one
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # of 8, the default, streams share some
_OF_THREAD = threading.local()
_LOCK = threading.Lock()
_TF32_BEFORE: list[bool] = []  # of each training under way, whether it was allowed before


# --- which runs are trained at once ---------------------------------------------------------------


def stacks(runs: Sequence[Run]) -> list[list[Run]]:
    """Any runs in groups that :func:`train` accepts: the seeds of each cell, in their order."""
    groups: dict[Run, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.cell, []).append(run)
    return [*groups.values()]


def first_epochs(run: Run, epochs: int) -> tuple[float, ...]:
    """The first points of the curve of a training on bigrams, on the CPU, without the rest."""
    with device_settings(_CPU, tf32=False):
        protocol = Bigrams([run], _CPU)
        while len(protocol.curve) < epochs and not protocol.done:
            protocol.advance()
    return tuple(round(accuracy, 4) for [accuracy] in protocol.curve)


# --- where a training runs ------------------------------------------------------------------------


@contextlib.contextmanager
def device_settings(device: torch.device, tf32: bool) -> Iterator[None]:
    """Set threads, denormals, TF32 and the CUDA stream for a training, then restore them."""
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        refuse("device", repr(str(device)), "cpu, since torch finds no GPU on this machine")
    with contextlib.ExitStack() as settings:
        # Small products gain nothing from more threads, and with one their rows stay the same.
        settings.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        if on_gpu:
            settings.enter_context(products(tf32))
            settings.enter_context(torch.cuda.device(device))
            stream = _stream_of_thread(device)
            settings.enter_context(torch.cuda.stream(stream))
            settings.callback(stream.synchronize)
        else:
            # A step asks for the same blocks of memory again, so the C library is to keep them for
            # this process. Else large arrays are mapped afresh and zeroed, an eighth of the time.
            with contextlib.suppress(OSError, AttributeError, TypeError):  # it may not know how
                for option, size in _MALLOC_OPTIONS.items():
                    ctypes.CDLL(None).mallopt(option, size)
            # Processors compute with numbers below the normal range in microcode, many times
            # slower. The softmax weights of saturated heads and their gradients hold many. Added to
            # weights near one, a number below 1e-38 changes no digit of float32.
            flushed = bool(torch.full((1,), 1e-40, dtype=torch.float32).mul(1) == 0)
            settings.callback(torch.set_flush_denormal, flushed)
            torch.set_flush_denormal(True)
        yield


def _stream_of_thread(device: torch.device) -> torch.cuda.Stream:
    """One stream for all stacks of a thread, so that several threads fill a GPU together."""
    # cuBLAS has a workspace for every stream, which graphs replayed at once must not share.
    streams = vars(_OF_THREAD)
    if device not in streams:
        streams[device] = torch.cuda.Stream()
    return streams[device]


@contextlib.contextmanager
def products(tf32: bool) -> Iterator[None]:
    """TF32 on or off, for the whole process; refused while other threads train with the other."""
    settings = torch.backends.cuda.matmul
    with _LOCK:
        if _TF32_BEFORE and settings.allow_tf32 != tf32:
            refuse("tf32", tf32, f"{not tf32}, as in the trainings that run at the same time")
        _TF32_BEFORE.append(settings.allow_tf32)
        settings.allow_tf32 = tf32
    try:
        yield
    finally:
        with _LOCK:  # in whatever order they end, the last one sets back what the first one found
            settings.allow_tf32 = _TF32_BEFORE.pop()


def device_name(device: torch.device) -> str:
    """What rows call a device: ``cpu``, or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def origin(seconds: float, device: torch.device) -> dict[str, Any]:
    """The fields of a result that say how long it took, and where it comes from."""
    return {
        "wall_s": round(seconds, 3),
        "device": device_name(device),
        "torch": str(torch.__version__),
        "commit": commit(),
    }


# --- a training from end to end -------------------------------------------------------------------


def train(
    runs: Sequence[Run], *, device: str = "cpu", checkpoints: Path | None = None
) -> list[Outcome]:
    """Train runs that differ by their seed at once; one outcome each, in their order.

    Everything is computed in float32. A run whose loss is not finite any more has an outcome that
    says so (``diverged``); the others go on. A stack for which a GPU has too little memory is
    trained in halves, and so on; where it has too little for a single run,
    ``torch.OutOfMemoryError`` is raised. ``wall_s`` is the stack's time shared equally.

    The state of a long training is stored in ``checkpoints`` once a minute, until :func:`forget`
    deletes it. The same call goes on from there, to the same outcomes, or refuses a damaged state.
    """
    if (cells := len(stacks(runs))) != 1:
        refuse("runs", f"{cells} different ones", "some that differ by their seed only")
    [run, *_] = runs
    model = MODELS.get(run.model)
    if not model or run.task not in model.tasks or run.variant not in model.variants:
        training = f"model {run.model!r}, variant {run.variant!r}, task {run.task!r}"
        refuse("runs", training, "a known model, variant and task")
    last_batches = (None, "short") if run.context else (None,)
    if run.last_batch not in last_batches:
        refuse("runs", f"last_batch {run.last_batch!r} in {run.task!r}", f"one of {last_batches}")
    if isinstance(run, Skewed) and run.task != "bigrams":
        refuse("runs", f"a prior or an entropy in {run.task!r}", "these of 'bigrams' only")
    place = torch.device(device)
    if run.task == "text" and place.type != "cpu":
        refuse("device", repr(device), "cpu, since a text has seconds of the processor")
    with device_settings(place, tf32=run.products == "tf32"):
        try:
            return _outcomes(runs, place, Checkpoint(checkpoints, runs, device_name(place)))
        except torch.OutOfMemoryError:
            if len(runs) == 1:
                raise
    middle = len(runs) // 2  # here, where the error no longer holds what did not fit
    first = train(runs[:middle], device=device, checkpoints=checkpoints)
    return first + train(runs[middle:], device=device, checkpoints=checkpoints)


def _outcomes(runs: Sequence[Run], device: torch.device, checkpoint: Checkpoint) -> list[Outcome]:
    """Train, or go on with a training; seconds count in this process and in those before."""
    start = time.perf_counter()
    protocol = PROTOCOLS[runs[0].task](runs, device)
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
    return [RESULTS[type(run)](**common, **protocol.reached[run.key]) for run in runs]


# --- checkpoints ----------------------------------------------------------------------------------


class Checkpoint:
    """The state of a training that is under way, in a file: tensors, numbers and lists, no code.

    Only the same runs, device, torch and sources of this library go on from it, to the same end.
    """

    interval = 60.0  # seconds between two states that are stored

    def __init__(self, folder: Path | None, runs: Sequence[Run], device: str) -> None:
        keys = [run.key for run in runs]
        sources, version = _SOURCES.hexdigest()[:16], str(torch.__version__)
        self.origin = {"keys": keys, "device": device, "torch": version, "sources": sources}
        name = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"{keys[0]}-{name}.state"
        self.stored = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the last state is old enough to be replaced."""
        return self.path is not None and time.monotonic() - self.stored >= self.interval

    def load(self) -> dict[str, Any] | None:
        """The state that was stored last, or None if there is none of these very runs."""
        if self.path is None or not self.path.exists():
            return None
        try:
            content = torch.load(self.path, weights_only=True, map_location="cpu")
            origin, state = content["origin"], content["state"]
        except Exception as error:  # torch says in many ways that it cannot read a file
            advice = "without it the training starts again, so delete it to go on"
            raise ValueError(f"checkpoint: {self.path} is damaged; {advice}") from error
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
