"""The published ways to train a stack of runs: rates, batches, what is watched, when to stop.

Between two chunks of steps (:meth:`Protocol.advance`) a training can be stored, and go on later.
"""

import abc
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from ..core.memorize import SATURATED
from .data import contexts_of, generator, pairs_of
from .gradients import take_columns
from .models import MODELS, aot_logits, mha_heads
from .store import Fitting, Run

_LONGEST = 64  # steps that are made at once, at most


def warmup_cosine(run: Run | Fitting, step: int) -> float:
    """The rate of a step: a line from ``lr_start`` for 5% of them, then a cosine to ``lr_end``."""
    warmup = max(1, round(0.05 * run.steps))
    if step < warmup:
        return run.lr * (run.lr_start + (1 - run.lr_start) * step / warmup)
    progress = (step - warmup) / max(1, run.steps - warmup)
    return run.lr * (run.lr_end + (1 - run.lr_end) * (1 + math.cos(math.pi * progress)) / 2)


def linear(run: Run, step: int) -> float:
    """The rate of a step: ``lr`` times from ``lr_start`` to ``lr_end``, changed once an epoch."""
    epoch, epochs = step // (run.T // run.batch), run.steps // (run.T // run.batch)
    return run.lr * (run.lr_start + (run.lr_end - run.lr_start) * epoch / epochs)


# --- Adam -----------------------------------------------------------------------------------------


class _FusedAdam:
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
        gradients = [g.contiguous() for g in gradients]  # laid out as the weights are
        self.count += 1
        rule = {"lr": rate, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
        rule |= {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
        # The heart of torch.optim.Adam(fused=True), which takes 75 us more around it.
        averages, counts = (self.means, self.squares, []), [self.count] * len(gradients)
        torch._fused_adam_(self.weights, gradients, *averages, counts, **rule)

    def state(self) -> list[Tensor]:
        return [*(W.detach() for W in self.weights), *self.means, *self.squares, self.count]


# --- CUDA graphs ----------------------------------------------------------------------------------

_CAPTURING = threading.Lock()  # one capture at a time, and no graph may be dropped meanwhile


class _Captured:
    """What a function of tensors launches on a GPU, recorded at the second call, then replayed.

    A capture needs that all it holds has been done before. Its outputs hold until the next call.
    """

    def __init__(self) -> None:
        self.warm, self.graph, self.inputs, self.outputs = False, None, (), ()

    def __call__(
        self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
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


# --- a stack of runs ------------------------------------------------------------------------------


class Protocol(abc.ABC):
    """One stack of runs that differ by their seed only, trained as published.

    Every epoch takes the examples of a run in a new random order. Its last batch is filled up by
    the next epoch, or, as in the published code of Mahdavi et al. (``last_batch``), by indices -1.
    What a run does after it is done is ignored: in the stored stacks that is at most 3.5% of the
    steps. On a GPU many steps are captured once and replayed with one launch.
    """

    rate: Callable[[Run, int], float]  # the learning rate of a step, from 0
    kept = ("count", "reached", "finished", "left")  # attributes of plain values in a checkpoint

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        self.runs, self.device = [*runs], device
        self.run, self.model = runs[0], MODELS[runs[0].model]  # what all have in common
        each = [self.model.initial(run, generator(run, "weights")) for run in runs]
        stacked = {name: torch.stack([P[name] for P in each]) for name in each[0]}
        self.parameters = {k: W.to(device).requires_grad_() for k, W in stacked.items()}
        self.adam = _FusedAdam(self.parameters.values())
        self.captured = _Captured() if device.type == "cuda" else None
        self.interval = self.run.evaluate_every or self.run.T // self.run.batch  # between looks
        # Steps that are made at once: as many as divide the interval, so that one graph does.
        self.length = max(k for k in range(1, _LONGEST + 1) if self.interval % k == 0)
        self.count = 0  # steps so far
        self.reached: dict[str, dict[str, Any]] = {}  # by key the best so far, as in an Outcome
        self.finished: set[str] = set()
        self.orders = [generator(run, "order") for run in runs]
        self.left = [torch.empty(0, dtype=torch.long) for _ in runs]  # of the orders that are drawn

    @abc.abstractmethod
    def losses(
        self, batch: Int[Tensor, "R ..."], watched: bool
    ) -> tuple[Tensor, Tensor | None, Sequence[Tensor]]:
        """Losses ``(R,)`` on a batch, the share that is right if ``watched``, and the gradients."""

    @abc.abstractmethod
    def look(self, losses: Float[Tensor, "k R"], shares: Float[Tensor, "k R"]) -> None:
        """Keep what the runs have reached, from what :meth:`steps` gave for a chunk."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to train."""
        return self.count >= self.run.steps or len(self.finished) == len(self.runs)

    def due(self, count: int) -> bool:
        """Whether runs are looked at after so many steps."""
        return count % self.interval == 0 or count == self.run.steps

    def watched(self, step: int) -> bool:
        """Whether the share that is right before this step is wanted."""
        return False

    def advance(self) -> None:
        """Make a chunk of steps: up to the next look or the end, or a part of the way."""
        to_look = self.interval - self.count % self.interval
        length = min(self.length, to_look, self.run.steps - self.count)
        chunk = range(self.count, self.count + length)
        # A kernel on a GPU reads its rate as float32.
        dtype = torch.float64 if self.device.type == "cpu" else torch.float32
        rates = torch.tensor([self.rate(self.run, step) for step in chunk], dtype=dtype)
        rates = _to_device(rates, self.device)
        if self.captured and length == self.length:
            found = self.captured(self.steps, self.batches(length), rates)
        else:
            found = self.steps(self.batches(length), rates, [*map(self.watched, chunk)])
        self.count += length
        self.look(*found)

    def steps(
        self, batches: Int[Tensor, "k R *_"], rates: Tensor, watched: Sequence[bool] | None = None
    ) -> tuple[Float[Tensor, "k R"], Float[Tensor, "k R"]]:
        """The losses before each of ``k`` steps, and shares that were right, NaN if not watched."""
        losses, shares = [], []
        for step, batch in enumerate(batches):
            loss, share, gradients = self.losses(batch, watched is None or watched[step])
            self.adam.step(gradients, rates[step])
            losses.append(loss.detach())
            shares.append(share)
        unknown = torch.full_like(losses[0], torch.nan, dtype=torch.float64)
        return torch.stack(losses), torch.stack([unknown if x is None else x for x in shares])

    def batches(self, count: int) -> Int[Tensor, "count R ..."]:
        """The next batches of every run on the device: indices of its examples, in random order."""
        batch = self.run.batch
        for index, run in enumerate(self.runs):
            while len(self.left[index]) < count * batch:
                epoch = torch.randperm(run.T, generator=self.orders[index])
                if run.last_batch == "short":
                    epoch = F.pad(epoch, (0, -run.T % batch), value=-1)
                self.left[index] = torch.cat([self.left[index], epoch])
        taken = torch.stack([indices[: count * batch] for indices in self.left])
        self.left = [indices[count * batch :].clone() for indices in self.left]
        batches = taken.view(len(taken), count, batch).movedim(1, 0).contiguous()
        return _to_device(batches, self.device)

    def note(self, found: list[dict[str, Any]], score: Callable[[dict[str, Any]], Any]) -> None:
        """Keep what every run has reached after ``self.count`` steps if no ``score`` was as high.

        A run is finished when its steps are made, when it stops early, or when it has diverged.
        """
        for run, now in zip(self.runs, found, strict=True):
            best = self.reached.get(run.key)
            if run.key in self.finished:
                continue
            if not math.isfinite(now["loss"]):
                best = _diverged(self.count)
            elif best is None or score(now) > score(best):
                best = now | {"best_step": self.count}
            self.reached[run.key] = best
            stopped = run.early_stop and best["accuracy"] == 1
            if stopped or "diverged" in best or self.count == run.steps:
                self.finished.add(run.key)

    def state(self) -> dict[str, Any]:
        """All that a training depends on."""
        return {
            "orders": [g.get_state() for g in self.orders],
            "tensors": self.adam.state(),
            "values": {name: getattr(self, name) for name in self.kept},
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` gave for the same runs."""
        for g, now in zip(self.orders, state["orders"], strict=True):
            g.set_state(now)
        for ours, stored in zip(self.adam.state(), state["tensors"], strict=True):
            ours.copy_(stored)  # in place, since a captured graph reads them
        for name, value in state["values"].items():
            setattr(self, name, value)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU to the device without blocking."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def _diverged(step: int) -> dict[str, Any]:
    return {"accuracy": None, "loss": None, "diverged": step}


# --- Dana et al.: pairs of tokens -----------------------------------------------------------------


class _OnPairs(Protocol):
    rate = staticmethod(linear)

    def __init__(self, runs, device):
        super().__init__(runs, device)
        drawn = [pairs_of(run) for run in runs]
        tokens, labels, tables = (torch.stack(part) for part in zip(*drawn, strict=True))
        # Of every pair the first, the second and the next token: (R, 3, T).
        self.columns = torch.cat([tokens.mT, labels[:, None]], dim=1).to(device)
        self.tables = tables.to(device)

    @override
    def losses(self, batch, watched):
        data = batch[:, :2].mT, batch[:, 2]
        losses, outputs, gradient = self.model.losses(self.parameters, self.run, *data)
        share = None
        if watched:
            right = _right_(outputs.clone(), batch[:, 2]).double().sum(dim=1)
            # All right must be 1, but a mean on a GPU multiplies by 1 / B, and 49 * (1 / 49) < 1.
            share = right / torch.full_like(right, batch.shape[2])
        return losses, share, gradient(torch.ones_like(losses))


@torch.inference_mode()
def _right_(outputs: Float[Tensor, "R N B"], answers: Int[Tensor, "R B"]) -> Bool[Tensor, "R B"]:
    """True where the right token has the strictly largest logit. Overwrites ``outputs``."""
    # Faster than an argmax, and false where logits are no numbers.
    chosen = outputs.gather(1, answers[:, None])
    others = outputs.scatter_(1, answers[:, None], -math.inf)
    return (chosen > others.amax(dim=1, keepdim=True))[:, 0]


class Bigrams(_OnPairs):
    """Means over the last hundred batches but one; the curve is the accuracy on all pairs."""

    kept = (*Protocol.kept, "seen", "curve")

    def __init__(self, runs, device):
        super().__init__(runs, device)
        self.seen: list[list[list[float]]] = []  # of a watched batch the runs' shares and losses
        self.curve: list[list[float]] = []  # of every run after every epoch

    @override
    def watched(self, step):
        return step in range(self.run.steps)[-101:-1]  # which Dana et al. average

    @override
    def batches(self, count):
        return take_columns(self.columns.expand(count, -1, -1, -1), super().batches(count))

    @override
    def look(self, losses, shares):
        steps = range(self.count - len(losses), self.count)
        wanted = [i for i, step in enumerate(steps) if self.watched(step)]
        self.seen += [[shares[i].tolist(), losses[i].tolist()] for i in wanted]
        if self.count % self.interval == 0:
            self.curve.append(self.right_of_all().tolist())
            for run, loss in zip(self.runs, losses[-1].tolist(), strict=True):
                if not math.isfinite(loss):
                    self.reached.setdefault(run.key, _diverged(self.count))
        if not self.done:
            return
        means = torch.tensor(self.seen, dtype=torch.float64).mean(dim=0).tolist()
        curves = zip(*self.curve, strict=True)
        for run, accuracy, loss, curve in zip(self.runs, *means, curves, strict=True):
            path = tuple(round(share, 4) for share in curve)
            found = {"accuracy": accuracy, "loss": loss, "curve": path}
            ended = found if math.isfinite(loss) else _diverged(self.count)
            self.reached.setdefault(run.key, ended)

    @torch.inference_mode()
    def right_of_all(self, chunk: int = 8192) -> Float[Tensor, " R"]:
        """The share of all pairs whose next token is predicted, for every run."""
        every = torch.arange(self.run.N, device=self.device)
        pairs = torch.cartesian_prod(every, every).expand(len(self.tables), -1, -1)
        right, answers = 0.0, self.tables.flatten(1).split(chunk, dim=1)
        for tokens, theirs in zip(pairs.split(chunk, dim=1), answers, strict=True):
            outputs = aot_logits(self.parameters, self.run, tokens)
            right = right + _right_(outputs, theirs).double().sum(dim=1)
        return right / self.run.N**2


class Associations(_OnPairs):
    """The best accuracy on the way, and the loss there, for every run.

    Each step takes all ``T`` pairs. A run is looked at before the last of every ``evaluate_every``
    steps, and is done when all its answers are right.
    """

    @override
    def watched(self, step):
        return self.due(step + 1)

    @override
    def batches(self, count):  # full-batch training: nothing to shuffle
        return self.columns.expand(count, -1, -1, -1)

    @override
    def look(self, losses, shares):
        if not self.due(self.count):
            return
        pairs = zip(shares[-1].tolist(), losses[-1].tolist(), strict=True)
        now = [{"accuracy": share, "loss": loss} for share, loss in pairs]
        self.note(now, lambda at: (at["accuracy"], -at["loss"]))


# --- Mahdavi et al.: contexts and queries ---------------------------------------------------------


class Memorization(Protocol):
    """Accuracy and loss on the whole set at the best weights (by loss), for every run.

    A run whose best weights have 100% accuracy is done if ``early_stop``; else, for classes (Fig.
    3), the saturation of the heads is followed. Real labels have mean square errors, no accuracy.
    """

    rate = staticmethod(warmup_cosine)
    kept = (*Protocol.kept, "free")

    def __init__(self, runs, device):
        super().__init__(runs, device)
        for index, run in enumerate(runs):  # so that the host holds the data of one run only
            drawn = contexts_of(run)
            if index == 0:
                data = [x.new_empty(len(runs), *x.shape, device=device) for x in drawn]
            for held, part in zip(data, drawn, strict=True):
                held[index] = part
        # What examples have of their own lies in one array for all runs, and stays there.
        self.contexts = data.pop(0) if self.run.context == "shared" else None
        self.own = [x.flatten(0, 1) for x in data]
        self.first = self.run.T * torch.arange(len(runs), device=device)
        follows = self.run.N and not self.run.early_stop
        self.followed = _saturation_steps(self.run) if follows else ()
        # Of every look that is followed the shares of examples with 0, 1, ..., H free heads.
        self.free: dict[str, list[list[float]]] = {run.key: [] for run in runs}

    def examples(self, index: Int[Tensor, "R B"]) -> list[Tensor]:
        """Contexts ``(R, B, n, d)`` or ``(R, n, d)``, queries and labels of every run's batch."""
        rows = (index + self.first[:, None]).flatten()
        chosen = [x.index_select(0, rows).unflatten(0, index.shape) for x in self.own]
        return chosen if self.contexts is None else [self.contexts, *chosen]

    def chunks(self, size: int) -> Iterator[list[Tensor]]:
        """All examples in order."""
        every = torch.arange(self.run.T, device=self.device).expand(len(self.runs), -1)
        return map(self.examples, every.split(size, dim=1))

    @override
    @torch.inference_mode()
    def losses(self, index, watched):
        batch = self.examples(index.clamp(min=0))
        each, _, gradient = self.model.losses(self.parameters, self.run, *batch)
        if self.run.last_batch is None:
            return each.mean(dim=1), None, gradient(torch.full_like(each, 1 / each.shape[1]))
        part = (index >= 0).float()  # of the mean of those that are not missing
        part /= part.sum(dim=1, keepdim=True)
        return (each * part).sum(dim=1), None, gradient(part)

    @override
    def look(self, losses, shares):
        if not self.due(self.count):
            return
        if self.count in self.followed:
            for run, free in zip(self.runs, self.free_heads().tolist(), strict=True):
                self.free[run.key].append(free)
        self.note(self.evaluate(), lambda at: -at["loss"])
        if not (self.followed and self.done):
            return
        for run in self.runs:
            if "diverged" not in self.reached[run.key]:
                at = torch.tensor(self.free[run.key], dtype=torch.float64)  # (looks, H + 1)
                saturated = 1 - at @ torch.arange(run.H + 1).double() / run.H
                paths = {"saturated": saturated, "served": 1 - at[:, 0], "serving": at[-1]}
                shares = {k: tuple(round(x, 4) for x in v.tolist()) for k, v in paths.items()}
                self.reached[run.key] |= shares

    @torch.inference_mode()
    def evaluate(self, chunk: int = 4096) -> list[dict[str, Any]]:
        """Accuracy and mean loss over the whole set, for every run of the stack."""
        right, total = 0.0, 0.0
        for batch in self.chunks(chunk):
            losses, outputs, _ = self.model.losses(self.parameters, self.run, *batch)
            total = total + losses.double().sum(dim=1)
            right = right + (outputs.argmax(dim=1) == batch[2]).sum(dim=1)
        T, N = self.run.T, self.run.N  # divided here, since all right must be 1
        sums = zip(right.tolist(), total.tolist(), strict=True)
        return [{"accuracy": count / T if N else None, "loss": x / T} for count, x in sums]

    @torch.inference_mode()
    def free_heads(self, chunk: int = 4096) -> Float[Tensor, "R counts"]:
        """The share of examples with 0, 1, ..., H heads that are not saturated."""
        counts = 0.0
        for contexts, queries, _ in self.chunks(chunk):
            alpha, _ = mha_heads(self.parameters, self.run, contexts, queries)
            free = (alpha.amax(dim=-1) <= SATURATED).sum(dim=-1)
            counts = counts + F.one_hot(free, self.run.H + 1).sum(dim=1)
        return counts.double() / self.run.T


def _saturation_steps(run: Run, count: int = 32) -> set[int]:
    """The steps of the first looks at or after the end of each of ``count`` equal parts."""
    looks = math.ceil(run.steps / run.evaluate_every)
    every = [math.ceil(looks * part / count) for part in range(1, count + 1)]
    return {min(run.steps, k * run.evaluate_every) for k in every}


PROTOCOLS: dict[str, type[Protocol]] = {"bigrams": Bigrams, "associations": Associations}
PROTOCOLS |= dict.fromkeys(("classes", "reals"), Memorization)
