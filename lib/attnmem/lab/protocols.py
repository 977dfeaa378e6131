"""The published ways to train a stack of runs: rates, batches, what is watched, when to stop.

Between two chunks of steps (:meth:`Protocol.advance`) a training can be stored, and go on later.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from ..core.memorize import SATURATED
from .data import Examples, generator, pairs, to_device
from .engine import CHUNK, Stack
from .models import FAMILIES, mha_heads
from .pairs import take_columns
from .store import Fitting, Run

LAST_BATCHES = slice(-101, -1)  # Dana et al. average the accuracy of batches -101 to -2


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


class Reached(NamedTuple):
    """What a run reached, in the fields of :class:`attnmem.lab.store.Outcome`."""

    accuracy: float | None
    loss: float | None
    curve: tuple[float, ...] | None = None
    best_step: int | None = None
    saturated: tuple[float, ...] | None = None
    served: tuple[float, ...] | None = None
    serving: tuple[float, ...] | None = None
    diverged: int | None = None


class Protocol(abc.ABC):
    """One stack of runs, trained as published.

    Subclasses draw the data, compute losses, and look at the runs every ``interval`` steps. Every
    epoch takes the examples of a run in a new random order. Its last batch is filled up by the next
    epoch, or, as in the published code of Mahdavi et al., by indices that are missing, which are -1
    (``Run.last_batch``).
    """

    varies = frozenset({"seed"})  # fields in which the runs of one stack may differ
    rate: Callable[[Run, int], float]  # the learning rate of a step, from 0
    watched: Container[int] = ()  # steps, from 0, of which the share that is right is wanted
    checkpointed: tuple[str, ...] = ()  # attributes of looks: lists of tensors, or plain values

    def __init__(
        self, runs: Sequence[Run], device: torch.device, *, stays: bool | None = None
    ) -> None:
        self.run, self.family = runs[0], FAMILIES[runs[0].model]  # what all have in common
        self.interval = self.run.evaluate_every or self.run.T // self.run.batch  # between looks
        self.stack = Stack(runs, device, self.losses, self.interval, stays=stays)
        self.ends = sorted({run.steps for run in runs})  # where some run has made all its steps
        self.count = 0  # steps so far
        self.reached: dict[str, Reached] = {}  # the best so far, by the runs' keys
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
        """Keep what the runs have reached, from what :meth:`Stack.train` gave for a chunk."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to train."""
        return self.count >= self.ends[-1] or len(self.finished) == len(self.stack.runs)

    def advance(self) -> None:
        """Make a chunk of steps: up to the next look or the end of a run, or a part of the way."""
        to_look = self.interval - self.count % self.interval
        to_end = next(end for end in self.ends if end > self.count) - self.count
        longest = self.stack.length if self.stack.length > 1 else CHUNK
        length = min(longest, to_look, to_end)
        steps = range(self.count, self.count + length)
        rates = [
            [self.rate(run, step) if step < run.steps else 0.0 for run in self.stack.runs]
            for step in steps
        ]
        rates = to_device(torch.tensor(rates, dtype=torch.float64), self.stack.device)
        watched = [step in self.watched for step in steps]
        losses, shares = self.stack.train(self.batches(length), rates, watched)
        self.count += length
        self.look(losses, shares)
        if self.finished and not self.stack.stays and not self.done:
            runs = enumerate(self.stack.runs)
            self.keep([index for index, run in runs if run.key not in self.finished])
            self.finished = set()

    def batches(self, count: int) -> Int[Tensor, "count R ..."]:
        """The next batches of every run on the device: indices of its examples, in random order."""
        batch = self.run.batch
        for index, run in enumerate(self.stack.runs):
            while len(self.left[index]) < count * batch:
                epoch = torch.randperm(run.T, generator=self.orders[index])
                if run.last_batch == "short":
                    epoch = F.pad(epoch, (0, -run.T % batch), value=-1)
                self.left[index] = torch.cat([self.left[index], epoch])
        taken = torch.stack([indices[: count * batch] for indices in self.left])
        self.left = [indices[count * batch :].clone() for indices in self.left]
        batches = taken.view(len(taken), count, batch).movedim(1, 0).contiguous()
        return to_device(batches, self.stack.device)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all runs but those at ``indices``."""
        self.stack.keep(indices)
        self.orders = [self.orders[index] for index in indices]
        self.left = [self.left[index] for index in indices]

    def is_due(self, run: Run) -> bool:
        """Whether a run is to be looked at after ``self.count`` steps."""
        due = self.count % self.interval == 0 or self.count == run.steps
        return due and run.key not in self.finished

    def note(self, run: Run, now: Reached, score: Callable[[Reached], Any]) -> None:
        """Keep what a run has reached after ``self.count`` steps if no ``score`` was as high.

        A run is finished when its steps are made, when it stops early, or when it has diverged.
        """
        best = self.reached.get(run.key)
        if not math.isfinite(now.loss):
            best = Reached(None, None, diverged=self.count)
        elif best is None or score(now) > score(best):
            best = now._replace(best_step=self.count)
        self.reached[run.key] = best
        stopped = run.early_stop and best.accuracy == 1
        if stopped or best.diverged or self.count >= run.steps:
            self.finished.add(run.key)

    def state(self) -> dict[str, Any]:
        """All that a training depends on, as tensors, numbers, lists and dictionaries."""
        return {
            "runs": [run.key for run in self.stack.runs],
            "count": self.count,
            "reached": {key: list(reached) for key, reached in self.reached.items()},
            "finished": sorted(self.finished),
            "order": {"generators": [g.get_state() for g in self.orders], "left": self.left},
            "stack": self.stack.state(),
            "looks": {name: getattr(self, name) for name in self.checkpointed},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` gave for the same runs."""
        indices = {run.key: index for index, run in enumerate(self.stack.runs)}
        left = [indices[key] for key in state["runs"]]
        if len(left) < len(indices):
            self.keep(left)
        self.count, self.finished = state["count"], set(state["finished"])
        self.reached = {
            key: Reached(*(tuple(x) if isinstance(x, list) else x for x in reached))
            for key, reached in state["reached"].items()
        }
        self.left = state["order"]["left"]
        for g, now in zip(self.orders, state["order"]["generators"], strict=True):
            g.set_state(now)
        self.stack.restore(state["stack"])
        for name, value in state["looks"].items():
            if isinstance(value, list):
                value = [x.to(self.stack.device) for x in value]
            setattr(self, name, value)


# --- Dana et al.: pairs of tokens -----------------------------------------------------------------


class _OnPairs(Protocol):
    """Trainings on pairs of tokens, each with the token that follows."""

    rate = staticmethod(linear)

    def __init__(self, runs, device, *, stays=None):
        super().__init__(runs, device, stays=stays)
        drawn = [pairs(run) for run in runs]
        tokens, labels, tables = (torch.stack(part) for part in zip(*drawn, strict=True))
        # Of every pair the first, the second and the next token: (R, 3, T).
        self.columns = torch.cat([tokens.mT, labels[:, None]], dim=1).to(device)
        self.tables = tables.to(device)

    @override
    def keep(self, indices):
        super().keep(indices)
        self.columns, self.tables = self.columns[[*indices]], self.tables[[*indices]]

    @override
    def losses(self, batch, watched):
        data = batch[:, :2].mT, batch[:, 2]
        losses, outputs, gradient = self.family.losses(self.stack.parameters, self.run, *data)
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
    """Accuracy (mean over the last hundred batches but one) and loss there, for every run.

    The curve is the accuracy on all pairs that there are, after every epoch.
    """

    checkpointed = ("seen", "curve", "last_losses")

    def __init__(self, runs, device, *, stays=None):
        super().__init__(runs, device, stays=stays)
        self.watched = range(self.run.steps)[LAST_BATCHES]
        self.seen: list[Tensor] = []  # (2, R): accuracy and loss of a watched batch
        self.curve: list[Tensor] = []  # (R,) after every epoch
        self.last_losses: list[Tensor] = []  # (R,) the loss of every epoch's last batch

    @override
    def batches(self, count):
        return take_columns(self.columns.expand(count, -1, -1, -1), super().batches(count))

    @override
    def look(self, losses, shares):
        steps = range(self.count - len(losses), self.count)
        wanted = [i for i, step in enumerate(steps) if step in self.watched]
        self.seen += [torch.stack([shares[i], losses[i].double()]) for i in wanted]
        if self.count % self.interval == 0:
            self.curve.append(self.right_of_all())
            self.last_losses.append(losses[-1].clone())
        if self.count < self.ends[-1]:
            return
        accuracies, losses = torch.stack(self.seen).cpu().mean(dim=0).tolist()
        curves = torch.stack(self.curve, dim=1).tolist()
        ends = torch.stack(self.last_losses, dim=1).tolist()
        for run, *averages, curve, end in zip(
            self.stack.runs, accuracies, losses, curves, ends, strict=True
        ):
            broken = [i for i, loss in enumerate(end, start=1) if not math.isfinite(loss)]
            if not math.isfinite(averages[1]):
                broken.append(len(end))
            if broken:
                self.reached[run.key] = Reached(None, None, diverged=broken[0] * self.interval)
            else:
                self.reached[run.key] = Reached(*averages, tuple(round(x, 4) for x in curve))

    @torch.inference_mode()
    def right_of_all(self, chunk: int = 8192) -> Float[Tensor, " R"]:
        """The share of all pairs whose next token is predicted, for every run."""
        N, every = self.run.N, torch.arange(self.run.N, device=self.stack.device)
        right = torch.zeros((), device=self.stack.device, dtype=torch.float64)
        for first in every.split(max(1, chunk // N)):
            outputs = self.family.logits_of_pairs(self.stack.parameters, self.run, first)
            answers = self.tables[:, first].flatten(1)
            right = right + _right_(outputs, answers).double().sum(dim=1)
        return right / N**2


class Associations(_OnPairs):
    """The best accuracy on the way, and the loss there, for every run.

    Each step takes all ``T`` associations, which are different pairs. A run is looked at every
    ``evaluate_every`` steps, before the last of them, and is done when all its answers are right.
    """

    def __init__(self, runs, device, *, stays=None):
        super().__init__(runs, device, stays=stays)
        last = self.ends[-1]
        self.watched = {*range(self.interval - 1, last, self.interval), last - 1}

    @override
    def batches(self, count):  # full-batch training: nothing to shuffle
        return self.columns.expand(count, -1, -1, -1)

    @override
    def look(self, losses, shares):
        if self.count % self.interval and self.count < self.ends[-1]:
            return
        ends = zip(self.stack.runs, shares[-1].tolist(), losses[-1].tolist(), strict=True)
        for run, *reached in ends:
            if self.is_due(run):
                self.note(run, Reached(*reached), lambda at: (at.accuracy, -at.loss))


# --- Mahdavi et al.: contexts and queries ---------------------------------------------------------


class Memorization(Protocol):
    """Accuracy and loss on the whole set at the best weights (by loss), for every run.

    A run whose best weights have 100% accuracy is done if ``early_stop``; where runs go on and
    labels are classes (Fig. 3), the saturation of the heads is followed. For real labels the
    accuracy is None and the loss is the mean square error.
    """

    varies = Protocol.varies | {"experiment", "profile", "T", "steps", "lr", "lr_start", "lr_end"}
    rate = staticmethod(warmup_cosine)
    checkpointed = ("free",)

    def __init__(self, runs, device, *, stays=None):
        super().__init__(runs, device, stays=stays)
        self.data = Examples(runs, device)
        follows = runs[0].N and not runs[0].early_stop
        self.saturation_steps = {run.key: saturation_steps(run) if follows else () for run in runs}
        self.free: dict[str, list[list[float]]] = {run.key: [] for run in runs}

    @override
    def keep(self, indices):
        super().keep(indices)
        self.data.keep(indices)

    @override
    @torch.inference_mode()
    def losses(self, index, watched):
        batch = self.data.at(index.clamp(min=0))
        each, _, gradient = self.family.losses(self.stack.parameters, self.run, *batch)
        if self.run.last_batch is None:
            return each.mean(dim=1), None, gradient(torch.full_like(each, 1 / each.shape[1]))
        part = (index >= 0).float()  # of the mean of those that are not missing
        part /= part.sum(dim=1, keepdim=True)
        return (each * part).sum(dim=1), None, gradient(part)

    @override
    def look(self, losses, shares):
        looked = {index: run for index, run in enumerate(self.stack.runs) if self.is_due(run)}
        if not looked:
            return
        reached = self.evaluate()
        followed = {i for i, run in looked.items() if self.count in self.saturation_steps[run.key]}
        free = self.free_heads() if followed else None
        for index, run in looked.items():
            if index in followed:
                self.free[run.key].append(free[index].tolist())
            self.note(run, reached[index], lambda at: -at.loss)
            best = self.reached[run.key]
            if run.key in self.finished and self.free[run.key] and best.diverged is None:
                at = torch.tensor(self.free[run.key], dtype=torch.float64)  # (looks, H + 1)
                saturated = 1 - at @ torch.arange(run.H + 1).double() / run.H
                paths = {"saturated": saturated, "served": 1 - at[:, 0], "serving": at[-1]}
                rounded = {k: tuple(round(x, 4) for x in v.tolist()) for k, v in paths.items()}
                self.reached[run.key] = best._replace(**rounded)

    @torch.inference_mode()
    def evaluate(self, chunk: int = 4096) -> list[Reached]:
        """Accuracy and mean loss over the whole set, for every run of the stack."""
        right, total = 0.0, 0.0
        for batch, there in self.data.chunks(chunk):
            losses, outputs, _ = self.family.losses(self.stack.parameters, self.run, *batch)
            total = total + losses.double().where(there, 0).sum(dim=1)
            if self.run.N:
                known = (outputs.argmax(dim=1) == batch[2]) & losses.isfinite()
                right = right + (known & there).double().sum(dim=1)
        losses = (total / self.data.sizes).tolist()
        shares = (right / self.data.sizes).tolist() if self.run.N else [None] * len(losses)
        return [*map(Reached, shares, losses)]

    @torch.inference_mode()
    def free_heads(self, chunk: int = 4096) -> Float[Tensor, "R counts"]:
        """The share of examples with 0, 1, ..., H heads that are not saturated."""
        counts = 0.0
        for (contexts, queries, _), there in self.data.chunks(chunk):
            alpha, _ = mha_heads(self.stack.parameters, self.run, contexts, queries)
            free = (alpha.amax(dim=-1) <= SATURATED).sum(dim=-1)
            each = F.one_hot(free, self.run.H + 1).double() * there[..., None]
            counts = counts + each.sum(dim=1)
        return counts / self.data.sizes[:, None]


def saturation_steps(run: Run, count: int = 32) -> set[int]:
    """The steps of the first looks at or after the end of each of ``count`` equal parts."""
    evaluations = -(-run.steps // run.evaluate_every)
    every = [-(-evaluations * part // count) for part in range(1, count + 1)]
    return {min(run.steps, k * run.evaluate_every) for k in every}


PROTOCOLS: dict[str, type[Protocol]] = {
    "bigrams": Bigrams,
    "associations": Associations,
    "classes": Memorization,
    "reals": Memorization,
}
