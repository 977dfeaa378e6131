"""A stack of runs: its weights along a leading axis, its optimizer, and its steps, many at a time.

On a CPU a step runs operation by operation, and runs that are done leave the stack. On a GPU many
steps are captured once as a CUDA graph, which reads batches and learning rates from device arrays,
and replayed with one launch. Runs that are done stay there, since a new capture would cost more
than their steps, and what they do afterwards is ignored.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from .data import generator
from .models import FAMILIES, Parameters
from .store import Run

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Adam's, PyTorch's defaults, which both papers use

# From a batch of every run (R, ...), and whether anything but the loss is wanted, to the runs'
# losses (R,), the share of the batch that is right (R,) or None, and the gradients of the losses.
Model = Callable[[Tensor, bool], tuple[Tensor, Tensor | None, Sequence[Tensor]]]


class FusedAdam:
    """PyTorch's fused Adam, for runs with one learning rate: the fastest on a CPU."""

    def __init__(self, parameters: Parameters, *, beta_2: float = BETA_2) -> None:
        self.parameters, self.beta_2 = parameters, beta_2
        self.mean = {name: torch.zeros_like(P) for name, P in parameters.items()}
        self.square = {name: torch.zeros_like(P) for name, P in parameters.items()}
        self.count = torch.zeros((), device="cpu")

    @torch.inference_mode()
    def step(self, gradients: Sequence[Tensor], rates: Float[Tensor, " R"]) -> None:
        """Take one step down the gradients, one for each of the weights; all rates are the same."""
        each = [*self.parameters.values()]
        gradients = [g.contiguous() for g in gradients]  # laid out as the weights are
        averages = [*self.mean.values()], [*self.square.values()]
        self.count += 1
        rule = {"lr": float(rates[0]), "beta1": BETA_1, "beta2": self.beta_2, "eps": EPSILON}
        rule |= {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
        # The heart of torch.optim.Adam(fused=True), which takes 75 us more around it.
        torch._fused_adam_(each, gradients, *averages, [], [self.count] * len(each), **rule)

    def state(self) -> Parameters:
        """What a step reads besides the weights, by name."""
        means = {f"mean {name}": x for name, x in self.mean.items()}
        squares = {f"square {name}": x for name, x in self.square.items()}
        return {**means, **squares, "count": self.count}

    def kept(self, parameters: Parameters, index: Tensor) -> FusedAdam:
        """A new optimizer of the runs at ``index``, whose weights are ``parameters``."""
        kept = FusedAdam(parameters, beta_2=self.beta_2)
        _set({k: v[index] if v.ndim else v for k, v in self.state().items()}, kept.state())
        return kept


class RunwiseAdam:
    """Adam with a learning rate for every run, as a few operations on flat arrays.

    All weights lie in one array, and so do the two averages. A step needs nothing from the host.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        each = [*parameters.values()]
        self.flat = torch.cat([P.detach().flatten() for P in each])
        for P, part in zip(each, self.flat.split([P.numel() for P in each]), strict=True):
            P.data = part.view(P.shape)
        runs = torch.arange(len(each[0]), device=self.flat.device)
        self.run_of = torch.cat([runs.repeat_interleave(P[0].numel()) for P in each])
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.count = torch.zeros((), dtype=torch.float64, device=self.flat.device)

    @torch.inference_mode()
    def step(self, gradients: Sequence[Tensor], rates: Float[Tensor, " R"]) -> None:
        """Take one step down the gradients, each run with its own rate."""
        g = torch.cat([gradient.flatten() for gradient in gradients])
        self.count += 1
        self.mean.lerp_(g, 1 - BETA_1)
        self.square.mul_(BETA_2).addcmul_(g, g, value=1 - BETA_2)
        size = (rates / (1 - BETA_1**self.count)).float()[self.run_of].mul_(self.mean)
        root = (self.square / (1 - BETA_2**self.count)).sqrt_().add_(EPSILON)
        self.flat.addcdiv_(size, root, value=-1.0)

    def state(self) -> Parameters:
        """What a step reads besides the weights, by name."""
        return {"mean": self.mean, "square": self.square, "count": self.count}


# --- a stack --------------------------------------------------------------------------------------

CHUNK = 64  # steps that are captured at once, at most
CAPTURING = threading.Lock()  # one capture at a time


class Stack:
    """Runs with the same shapes, their weights along a leading axis, and their steps.

    A graph holds as many steps as divide the ``interval`` between two looks, at most
    :data:`CHUNK`; another number is made one by one. With ``stays``, by default on a GPU, runs that
    are done stay in the stack, and each run has its own learning rate.
    """

    def __init__(
        self, runs: Sequence[Run], device: torch.device, model: Model, interval: int, *, stays=None
    ) -> None:
        initial = FAMILIES[runs[0].model].initial
        each = [initial(run, generator(run, "weights")) for run in runs]
        self.runs, self.device, self.model = list(runs), device, model
        self.stays = device.type != "cpu" if stays is None else stays
        self.parameters = {
            name: torch.stack([P[name] for P in each]).to(device).requires_grad_()
            for name in each[0]
        }
        self.optimizer = (RunwiseAdam if self.stays else FusedAdam)(self.parameters)
        self.length = max(k for k in range(1, CHUNK + 1) if interval % k == 0)
        self.captures = device.type == "cuda"
        self.watches = False  # whether the graph says what is right
        self.graph, self.inputs, self.outputs = None, (), ()

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all runs but those at ``indices``, with their optimizer state."""
        index = torch.tensor(indices, device=self.device)
        self.runs = [self.runs[i] for i in indices]
        self.parameters = {
            name: P.detach()[index].requires_grad_() for name, P in self.parameters.items()
        }
        self.optimizer = self.optimizer.kept(self.parameters, index)

    def state(self) -> dict[str, Parameters]:
        """Weights and optimizer, as tensors by name."""
        weights = {name: P.detach() for name, P in self.parameters.items()}
        return {"weights": weights, "optimizer": self.optimizer.state()}

    @torch.no_grad()
    def restore(self, state: dict[str, Parameters]) -> None:
        """Go on from what :meth:`state` gave for the same runs."""
        for part, tensors in self.state().items():
            _set(state[part], tensors)

    def train(
        self, batches: Int[Tensor, "k R *_"], rates: Float[Tensor, "k R"], watched: Sequence[bool]
    ) -> tuple[Float[Tensor, "k R"], Float[Tensor, "k R"]]:
        """Train on ``k`` batches in turn; the losses, and the shares that were right, before each.

        Where ``watched`` is False a share may be NaN. Both hold until the next call.
        """
        if not self.captures or len(batches) != self.length:
            return self._one_by_one(batches, rates, watched)
        if self.graph is None or (any(watched) and not self.watches):
            self._capture(batches, rates, any(watched))
        for held, new in zip(self.inputs, (batches, rates), strict=True):
            _once(held).copy_(_once(new), non_blocking=True)
        self.graph.replay()
        return self.outputs

    def _one_by_one(self, batches, rates, watched) -> tuple[Tensor, Tensor]:
        losses, shares = [], []
        for batch, rate, wanted in zip(batches.unbind(), rates.unbind(), watched, strict=True):
            loss, share, gradients = self.model(batch, wanted)
            self.optimizer.step(gradients, rate)
            losses.append(loss.detach())
            shares.append(share)
        unknown = torch.full_like(losses[0], torch.nan, dtype=torch.float64)
        return torch.stack(losses), torch.stack([unknown if x is None else x for x in shares])

    def _capture(self, batches, rates, watched: bool) -> None:
        """Record ``length`` steps, watched or not, after a rehearsal that leaves no trace."""
        with CAPTURING:
            self.graph, self.outputs = None, ()  # before another one takes memory
        self.inputs = _once(batches).clone().expand_as(batches), rates.clone()
        self.watches = watched
        every = [watched] * self.length
        first = [x[:2] for x in self.inputs]  # two, so that what joins steps is rehearsed as well
        with CAPTURING:
            self.rehearse(lambda: self._one_by_one(*first, every[: len(first[0])]))
            self.graph, self.outputs = recorded(lambda: self._one_by_one(*self.inputs, every))

    def rehearse(self, step: Callable[[], object], times: int = 3) -> None:
        """Run a step a few times, as a capture requires, and set weights and optimizer back."""
        before = {
            part: {name: x.clone() for name, x in tensors.items()}
            for part, tensors in self.state().items()
        }
        for _ in range(times):
            step()
        self.restore(before)

    def release(self) -> None:
        """Give the graph and its memory back."""
        with CAPTURING:  # a graph must not be dropped while another thread captures
            self.graph, self.inputs, self.outputs = None, (), ()
        del self.model  # which holds the training that holds this stack: no memory would be freed


def _set(values: Parameters, tensors: Parameters) -> None:
    """Give tensors the values of the same names; in place, since a captured graph reads them."""
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def recorded(function: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple]:
    """Record what a function launches on this thread's stream; each replay renews what it returned.

    The caller holds :data:`CAPTURING`, and has called the function before.
    """
    torch.cuda.current_stream().synchronize()
    free, total = torch.cuda.mem_get_info()
    if free < total / 2:
        torch.cuda.empty_cache()  # which torch does by itself, but not while it captures
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        outputs = function()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # would hide the error that broke the capture
            graph.capture_end()
        raise
    graph.capture_end()
    return graph, outputs


def _once(x: Num[Tensor, "k *rest"]) -> Num[Tensor, "_ *rest"]:
    """Full-batch training expands one batch to all steps: only that one is to be copied."""
    return x if x.stride(0) else x[:1]
