"""Threads, denormals, TF32 and CUDA streams of a training; all are restored after it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ..checks import refuse
from . import store

# glibc's mallopt: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD; bytes
MALLOC_OPTIONS = {-3: 2**30, -1: 2**31 - 1, -2: 2**28}


@contextlib.contextmanager
def device_settings(device: torch.device, tf32: bool) -> Iterator[None]:
    """Set threads, denormals, TF32 and the CUDA stream for a training, then restore them."""
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        refuse("device", repr(str(device)), "cpu, since torch finds no GPU on this machine")
    # Small products gain nothing from more threads, and with one their rows stay the same.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if on_gpu:
            with _PRECISION.using(tf32), _own_stream(device):
                yield
        else:
            # A step asks for the same blocks of memory again, so the C library is to keep them for
            # this process. Else large arrays are mapped afresh and zeroed, a quarter of the time.
            with contextlib.suppress(OSError, AttributeError, TypeError):  # it may not know how
                for option, size in MALLOC_OPTIONS.items():
                    ctypes.CDLL(None).mallopt(option, size)
            # Processors compute with numbers below the normal range in microcode, many times
            # slower. The softmax weights of saturated heads and their gradients hold many. Added to
            # weights near one, a number below 1e-38 changes no digit of float32.
            flushed = bool(torch.full((1,), 1e-40, dtype=torch.float32).mul(1) == 0)
            torch.set_flush_denormal(True)
            try:
                yield
            finally:
                torch.set_flush_denormal(flushed)
    finally:
        torch.set_num_threads(threads)


def device_name(device: torch.device) -> str:
    """What rows call a device: ``cpu``, or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def origin(seconds: float, device: torch.device) -> dict[str, Any]:
    """The fields of a result that say how long it took, and where it comes from."""
    where = {"device": device_name(device), "torch": torch.__version__, "commit": store.commit()}
    return {"wall_s": round(seconds, 3)} | where


# --- GPU ------------------------------------------------------------------------------------------

STREAMS = 31  # for workers: torch gives out 32 in turn, and the thread that starts them has one
_STREAMS = threading.local()
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # of 8, the default, streams share some


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """One stream for all stacks of a thread, so that several threads fill a GPU together.

    cuBLAS has a workspace for every stream, which graphs that are replayed at once must not share.
    """
    streams = vars(_STREAMS)
    with torch.cuda.device(device):
        if device not in streams:
            streams[device] = torch.cuda.Stream()
        with torch.cuda.stream(streams[device]):
            try:
                yield
            finally:
                streams[device].synchronize()


class _Precision:
    """TF32 on or off for all threads that train at once; the setting is the process's."""

    def __init__(self) -> None:
        self.lock, self.users, self.before = threading.Lock(), 0, False

    @contextlib.contextmanager
    def using(self, tf32: bool) -> Iterator[None]:
        """Hold the setting; refuse it while other threads train with the other one."""
        settings = torch.backends.cuda.matmul
        with self.lock:
            if self.users and settings.allow_tf32 != tf32:
                refuse("tf32", tf32, f"{not tf32}, as in the trainings that run at the same time")
            if not self.users:
                self.before, settings.allow_tf32 = settings.allow_tf32, tf32
            self.users += 1
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if not self.users:
                    settings.allow_tf32 = self.before


_PRECISION = _Precision()
