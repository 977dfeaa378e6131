"""What makes steps fast: a device's settings, fused Adam, and CUDA graphs of many steps."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import refuse
from .store import commit

# --- where a training runs ------------------------------------------------------------------------

# glibc's mallopt: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD; bytes
_MALLOC_OPTIONS = {-3: 2**30, -1: 2**31 - 1, -2: 2**28}
STREAMS = 31  # for workers: torch gives out 32 in turn, and the thread that starts them has one
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # of 8, the default, streams share some
_OF_THREAD = threading.local()
_LOCK = threading.Lock()
_PRECISIONS: list[bool] = []  # whether TF32 was allowed before, then of every training under way


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
            settings.enter_context(_precision(tf32))
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
    """One stream for all stacks of a thread, so that several threads fill a GPU together.

    cuBLAS has a workspace for every stream, which graphs that are replayed at once must not share.
    """
    streams = vars(_OF_THREAD)
    if device not in streams:
        streams[device] = torch.cuda.Stream()
    return streams[device]


@contextlib.contextmanager
def _precision(tf32: bool) -> Iterator[None]:
    """TF32 on or off, for the whole process; refused while other threads train with the other."""
    settings = torch.backends.cuda.matmul
    with _LOCK:
        if _PRECISIONS and settings.allow_tf32 != tf32:
            refuse("tf32", tf32, f"{not tf32}, as in the trainings that run at the same time")
        if not _PRECISIONS:
            _PRECISIONS.append(settings.allow_tf32)
        _PRECISIONS.append(tf32)
        settings.allow_tf32 = tf32
    try:
        yield
    finally:
        with _LOCK:
            _PRECISIONS.pop()
            if len(_PRECISIONS) == 1:
                settings.allow_tf32 = _PRECISIONS.pop()


def device_name(device: torch.device) -> str:
    """What rows call a device: ``cpu``, or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def origin(seconds: float, device: torch.device) -> dict[str, Any]:
    """The fields of a result that say how long it took, and where it comes from."""
    where = {"device": device_name(device), "torch": torch.__version__, "commit": commit()}
    return {"wall_s": round(seconds, 3)} | where


# --- Adam -----------------------------------------------------------------------------------------


class FusedAdam:
    """PyTorch's fused Adam with its defaults, which both papers use, on weights of stacked runs.

    A step needs nothing from the host if its rate, a number in float32, is on the GPU.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.weights = [*weights]
        self.means = [torch.zeros_like(W) for W in self.weights]
        self.squares = [torch.zeros_like(W) for W in self.weights]
        self.count = torch.zeros((), dtype=torch.float32, device=self.weights[0].device)

    @torch.inference_mode()
    def step(self, gradients: Iterable[Tensor], rate: Float[Tensor, ""]) -> None:
        """Take one step down the gradients, one for each of the weights."""
        gradients = [g.contiguous() for g in gradients]  # laid out as the weights are
        self.count += 1
        rule = {"lr": rate, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
        rule |= {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
        # The heart of torch.optim.Adam(fused=True), which takes 75 us more around it.
        averages, counts = (self.means, self.squares, []), [self.count] * len(gradients)
        torch._fused_adam_(self.weights, gradients, *averages, counts, **rule)

    def keep(self, weights: Iterable[Tensor], index: Int[Tensor, " kept"]) -> None:
        """Forget all runs but those at ``index``, whose weights are ``weights`` from now on."""
        self.weights = [*weights]
        self.means = [x[index] for x in self.means]
        self.squares = [x[index] for x in self.squares]

    def state(self) -> list[Tensor]:
        """Weights, and what else a step reads, to be stored and written to."""
        return [*(W.detach() for W in self.weights), *self.means, *self.squares, self.count]


# --- CUDA graphs ----------------------------------------------------------------------------------

_CAPTURING = threading.Lock()  # one capture at a time, and no graph may be dropped meanwhile


class Captured:
    """What a function of tensors launches on a GPU, recorded at the second call, then replayed.

    A capture needs that all it holds has been done before.
    """

    def __init__(self) -> None:
        self.warm, self.graph, self.inputs, self.outputs = False, None, (), ()

    def __call__(
        self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """What the function gives, always the same one; it holds until the next call."""
        if not self.warm:
            self.warm = True
            return function(*inputs)
        if self.graph is None:
            self.inputs = [x.clone() for x in inputs]
            with _CAPTURING:
                self.graph, self.outputs = _recorded(lambda: function(*self.inputs))
        for held, new in zip(self.inputs, inputs, strict=True):
            held.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.outputs

    def release(self) -> None:
        """Give the graph and its memory back."""
        with _CAPTURING:
            self.graph, self.inputs, self.outputs = None, (), ()


def _recorded(function: Callable[[], tuple[Tensor, ...]]) -> tuple[Any, tuple[Tensor, ...]]:
    """A graph of this thread's stream, and the outputs that its replay renews."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outputs = function()
    except RuntimeError as error:  # a broken capture fails to end, which would hide what broke it
        raise (error.__context__ or error) from None
    return graph, outputs
