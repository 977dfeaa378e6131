"""The published ways to train a stack of runs: rates, batches, what is watched, when to stop.

Between two chunks of steps (:meth:`Protocol.advance`) a training can be stored, and go on later.
"""

import abc
import importlib.util
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from ..core.memorize import SATURATED
from . import models
from .data import contexts_of, generator, pairs_of, words_of
from .models import MODELS, mha_heads, take_columns
from .store import Fitting, Run

if importlib.util.find_spec(f"{__package__}.gradients"):  # a file that one can take out
    from . import gradients  # noqa: F401

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


class Captured:
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
                self.graph, self.outputs = record_graph(lambda: function(*self.inputs))
        for held, new in zip(self.inputs, inputs, strict=True):
            held.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.outputs

    def release(self) -> None:
        with _CAPTURING:
            self.graph, self.inputs, self.outputs = None, (), ()


def record_graph(function: Callable[[], tuple[Tensor, ...]]) -> tuple[Any, tuple[Tensor, ...]]:
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
        initial = [self.model.initial(run, generator(run, "weights")) for run in runs]
        stacked = {name: torch.stack([P[name] for P in initial]) for name in initial[0]}
        self.parameters = {
            name: W.to(device).requires_grad_(name not in self.model.frozen)
            for name, W in stacked.items()
        }
        self.adam = FusedAdam(W for W in self.parameters.values() if W.requires_grad)
        self.captured = Captured() if device.type == "cuda" else None
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
            losses, shares = self.captured(self.steps, self.batches(length), rates)
        else:
            watched = [self.watched(step) for step in chunk]
            losses, shares = self.steps(self.batches(length), rates, watched)
        self.count += length
        self.look(losses, shares)

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
        shares = [unknown if share is None else share for share in shares]
        return torch.stack(losses), torch.stack(shares)

    def batches(self, count: int) -> Int[Tensor, "count R ..."]:
        """The next batches of every run on the device: indices of its examples, in random order."""
        batch = self.run.batch
        for index, run in enumerate(self.runs):
            while len(self.left[index]) < count * batch:
                epoch = torch.randperm(run.T, generator=self.orders[index])
                if run.last_batch == "short":
                    epoch = F.pad(epoch, (0, -run.T % batch), value=-1)
                self.left[index] = torch.cat([self.left[index], epoch])
        drawn = torch.stack([indices[: count * batch] for indices in self.left])
        self.left = [indices[count * batch :].clone() for indices in self.left]
        batches = drawn.view(len(drawn), count, batch).movedim(1, 0).contiguous()
        return _to_device(batches, self.device)

    def note(self, results: list[dict[str, Any]], score: Callable[[dict[str, Any]], Any]) -> None:
        """Keep what every run has reached after ``self.count`` steps if no ``score`` was as high.

        A run is finished when its steps are made, when it stops early, or when it has diverged.
        """
        for run, result in zip(self.runs, results, strict=True):
            best = self.reached.get(run.key)
            if run.key in self.finished:
                continue
            if not math.isfinite(result["loss"]):
                best = _diverged(self.count)
            elif best is None or score(result) > score(best):
                best = result | {"best_step": self.count}
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
        for order, stored in zip(self.orders, state["orders"], strict=True):
            order.set_state(stored)
        for tensor, stored in zip(self.adam.state(), state["tensors"], strict=True):
            tensor.copy_(stored)  # in place, since a captured graph reads them
        for name, value in state["values"].items():
            setattr(self, name, value)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU to the device without blocking."""
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x


def _diverged(step: int) -> dict[str, Any]:
    return {"accuracy": None, "loss": None, "diverged": step}


# --- Dana et al.: pairs of tokens -----------------------------------------------------------------


class _OnPairs(Protocol):
    rate = staticmethod(linear)

    def __init__(self, runs, device):
        super().__init__(runs, device)
        data = [pairs_of(run) for run in runs]
        tokens = torch.stack([pairs.tokens for pairs in data])
        next_tokens = torch.stack([pairs.next_tokens for pairs in data])
        # Of every pair the first, the second and the next token: (R, 3, T).
        self.columns = torch.cat([tokens.mT, next_tokens[:, None]], dim=1).to(device)
        if self.run.task != "text":
            self.tables = torch.stack([pairs.table for pairs in data]).to(device)
        self.distributions = None
        if self.run.entropy is not None:
            self.distributions = torch.stack([pairs.distributions for pairs in data]).to(device)

    @override
    def losses(self, batch, watched):
        tokens, answers = batch[:, :2].mT, batch[:, 2]
        labels = answers
        if self.distributions is not None:
            labels = take_columns(self.distributions, self.run.N * batch[:, 0] + batch[:, 1])
        by_pair, outputs, gradient = models.losses(self.parameters, self.run, tokens, labels)
        share = None
        if watched:
            right = are_right(outputs.clone(), answers).double().sum(dim=1)
            # All right must be 1, but a mean on a GPU multiplies by 1 / B, and 49 * (1 / 49) < 1.
            share = right / torch.full_like(right, batch.shape[2])
        derivatives = torch.full_like(by_pair, 1 / by_pair.shape[1])
        return by_pair.mean(dim=1), share, gradient(derivatives)


@torch.inference_mode()
def are_right(outputs: Float[Tensor, "R N B"], answers: Int[Tensor, "R B"]) -> Bool[Tensor, "R B"]:
    """True where the right token has the strictly largest logit. Overwrites ``outputs``."""
    # Faster than an argmax, and false where logits are no numbers.
    right_logits = outputs.gather(1, answers[:, None])
    wrong_logits = outputs.scatter_(1, answers[:, None], -math.inf)
    return (right_logits > wrong_logits.amax(dim=1, keepdim=True))[:, 0]


class Bigrams(_OnPairs):
    """Means over the last hundred batches but one; the curve is the accuracy on all pairs."""

    kept = (*Protocol.kept, "averaged", "curve")

    def __init__(self, runs, device):
        super().__init__(runs, device)
        self.averaged: list[list[list[float]]] = []  # of a watched batch runs' shares and losses
        self.curve: list[list[float]] = []  # of every run after every epoch

    @override
    def watched(self, step):
        return step in range(self.run.steps)[-101:-1]  # which Dana et al. average

    @override
    def batches(self, count):
        return take_columns(self.columns.expand(count, -1, -1, -1), super().batches(count))

    @override
    def look(self, losses, shares):
        start = self.count - len(losses)
        for i in range(len(losses)):
            if self.watched(start + i):
                self.averaged.append([shares[i].tolist(), losses[i].tolist()])
        if self.count % self.interval == 0:
            self.curve.append(self.right_of_all().tolist())
            for run, loss in zip(self.runs, losses[-1].tolist(), strict=True):
                if not math.isfinite(loss):
                    self.reached.setdefault(run.key, _diverged(self.count))
        if not self.done:
            return
        means = torch.tensor(self.averaged, dtype=torch.float64).mean(dim=0).tolist()
        curves = zip(*self.curve, strict=True)
        for run, accuracy, loss, curve in zip(self.runs, *means, curves, strict=True):
            result = _diverged(self.count)
            if math.isfinite(loss):
                rounded = tuple(round(share, 4) for share in curve)
                result = {"accuracy": accuracy, "loss": loss, "curve": rounded}
            self.reached.setdefault(run.key, result)

    @torch.inference_mode()
    def right_of_all(self, chunk: int = 8192) -> Float[Tensor, " R"]:
        """The share of all pairs whose next token is predicted, for every run."""
        vocabulary = torch.arange(self.run.N, device=self.device)
        pairs = torch.cartesian_prod(vocabulary, vocabulary).expand(len(self.tables), -1, -1)
        next_tokens = self.tables.flatten(1)
        right = torch.zeros(len(self.tables), dtype=torch.float64, device=self.device)
        chunks = zip(pairs.split(chunk, dim=1), next_tokens.split(chunk, dim=1), strict=True)
        for tokens, answers in chunks:
            _, outputs, _ = models.losses(self.parameters, self.run, tokens, answers)
            right = right + are_right(outputs, answers).double().sum(dim=1)
        return right / self.run.N**2


class NextWords(Bigrams):
    """As bigrams, on a text: the curve is the accuracy on words that are new to the training."""

    kept = (*Bigrams.kept, "spent", "used")

    def __init__(self, runs, device):
        super().__init__(runs, device)
        words, new = words_of(self.run)
        self.new = new.mT.expand(len(runs), -1, -1)  # as the columns
        self.counted_loss = _entropy(words) - _entropy(words[:, :2])
        self.spent: list[float] = []  # seconds of the processor for a step, of every chunk
        self.used: list[float] = []  # and for a prediction, of every look

    @override
    def steps(self, batches, rates, watched=None):
        start = time.process_time()
        made = super().steps(batches, rates, watched)
        self.spent.append((time.process_time() - start) / (len(self.runs) * len(batches)))
        return made

    @override
    @torch.inference_mode()
    def right_of_all(self, chunk=1024):
        right, total, seconds, count = 0.0, 0.0, 0.0, self.new.shape[2]
        for columns in self.new.split(chunk, dim=2):
            start = time.process_time()
            outputs = self.model.outputs(self.parameters, self.run, columns[:, :2].mT)
            seconds += time.process_time() - start
            losses = F.cross_entropy(outputs, columns[:, 2], reduction="none")
            total = total + losses.double().sum(dim=1)
            right = right + are_right(outputs, columns[:, 2]).double().sum(dim=1)
        self.used.append(seconds / (len(self.runs) * count))
        self.new_losses = (total / count).tolist()
        return right / count

    @override
    def look(self, losses, shares):
        super().look(losses, shares)
        if not self.done:
            return
        common = {"counted_loss": self.counted_loss, "use_s": min(self.used)}
        common |= {"step_s": statistics.median(self.spent)}
        for run, new_loss in zip(self.runs, self.new_losses, strict=True):
            if "diverged" not in self.reached[run.key]:
                self.reached[run.key] |= common | {"new_loss": new_loss}


def _entropy(rows: Int[Tensor, "count _"]) -> float:
    """Of a row that is drawn from these, in nats."""
    _, counts = rows.unique(dim=0, return_counts=True)
    return torch.special.entr(counts.double() / len(rows)).sum().item()


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
        results = [{"accuracy": share, "loss": loss} for share, loss in pairs]
        self.note(results, lambda result: (result["accuracy"], -result["loss"]))


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
            data = contexts_of(run)
            if index == 0:
                stacks = [x.new_empty(len(runs), *x.shape, device=device) for x in data]
            for stack, x in zip(stacks, data, strict=True):
                stack[index] = x
        # What examples have of their own lies in one array for all runs, and stays there.
        self.contexts = stacks.pop(0) if self.run.shares_context else None
        self.by_example = [stack.flatten(0, 1) for stack in stacks]
        self.first = self.run.T * torch.arange(len(runs), device=device)
        self.followed: set[int] = set()  # the steps after which saturation is looked at
        if self.run.N and not self.run.early_stop:
            self.followed = _saturation_steps(self.run)
        # Of every look that is followed the shares of examples with 0, 1, ..., H free heads.
        self.free: dict[str, list[list[float]]] = {run.key: [] for run in runs}

    def examples(self, index: Int[Tensor, "R B"]) -> list[Tensor]:
        """Contexts ``(R, B, n, d)`` or ``(R, n, d)``, queries and labels of every run's batch."""
        rows = (index + self.first[:, None]).flatten()
        batch = [x.index_select(0, rows).unflatten(0, index.shape) for x in self.by_example]
        return batch if self.contexts is None else [self.contexts, *batch]

    def chunks(self, size: int) -> Iterator[list[Tensor]]:
        """All examples in order."""
        indices = torch.arange(self.run.T, device=self.device).expand(len(self.runs), -1)
        return map(self.examples, indices.split(size, dim=1))

    @override
    def losses(self, index, watched):
        batch = self.examples(index.clamp(min=0))
        by_example, _, gradient = models.losses(self.parameters, self.run, *batch)
        if self.run.last_batch is None:
            derivatives = torch.full_like(by_example, 1 / by_example.shape[1])
            return by_example.mean(dim=1), None, gradient(derivatives)
        shares = (index >= 0).float()  # of the mean of those that are not missing
        shares /= shares.sum(dim=1, keepdim=True)
        return (by_example * shares).sum(dim=1), None, gradient(shares)

    @override
    def look(self, losses, shares):
        if not self.due(self.count):
            return
        if self.count in self.followed:
            for run, free in zip(self.runs, self.free_heads().tolist(), strict=True):
                self.free[run.key].append(free)
        self.note(self.evaluate(), lambda result: -result["loss"])
        if not (self.followed and self.done):
            return
        for run in self.runs:
            if "diverged" in self.reached[run.key]:
                continue
            free = torch.tensor(self.free[run.key], dtype=torch.float64)  # (looks, H + 1)
            saturated = 1 - free @ torch.arange(run.H + 1).double() / run.H
            paths = {"saturated": saturated, "served": 1 - free[:, 0], "serving": free[-1]}
            for name, path in paths.items():
                self.reached[run.key][name] = tuple(round(x, 4) for x in path.tolist())

    @torch.inference_mode()
    def evaluate(self, chunk: int = 4096) -> list[dict[str, Any]]:
        """Accuracy and mean loss over the whole set, for every run of the stack."""
        right, total = 0.0, 0.0
        for batch in self.chunks(chunk):
            by_example, outputs, _ = models.losses(self.parameters, self.run, *batch)
            total = total + by_example.double().sum(dim=1)
            right = right + (outputs.argmax(dim=1) == batch[2]).sum(dim=1)
        results = []
        for count, loss in zip(right.tolist(), total.tolist(), strict=True):
            # Divided here, since all right must be 1.
            accuracy = count / self.run.T if self.run.N else None
            results.append({"accuracy": accuracy, "loss": loss / self.run.T})
        return results

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
    chosen = [math.ceil(looks * part / count) for part in range(1, count + 1)]
    return {min(run.steps, look * run.evaluate_every) for look in chosen}


PROTOCOLS: dict[str, type[Protocol]] = {"bigrams": Bigrams, "associations": Associations}
PROTOCOLS |= {"text": NextWords} | dict.fromkeys(("classes", "reals"), Memorization)
