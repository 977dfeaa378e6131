"""The published ways to train a stack of runs: rates, batches, what is watched, when to stop.

A protocol trains a chunk of steps at a time (:meth:`Protocol.advance`). Between two chunks a
training can be stored, and it can go on later as if nothing had happened.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from ..attention.pairs import take_columns
from ..store import Fitting, Run
from .data import Examples, generator, pairs, to_device
from .engine import CHUNK, Stack
from .models import FAMILIES, mha_heads

LAST_BATCHES = slice(-101, -1)  # Dana et al. average the accuracy of batches -101 to -2
SATURATED = 0.99  # a head is saturated for an example if one of its attention weights is above


def warmup_cosine(run: Run | Fitting, step: int) -> float:
    """The rate of a step: linear from ``lr_start`` over the first 5%, then a cosine to ``lr_end``.

    Args:
        run: The training, or a fit by Adam.
        step: The step, from 0 to ``run.steps``.
    """
    warmup = max(1, round(0.05 * run.steps))
    if step < warmup:
        return run.lr * (run.lr_start + (1 - run.lr_start) * step / warmup)
    progress = (step - warmup) / max(1, run.steps - warmup)
    return run.lr * (run.lr_end + (1 - run.lr_end) * (1 + math.cos(math.pi * progress)) / 2)


class Reached(NamedTuple):
    """What a run reached, in the fields of :class:`attnmem.store.Outcome`."""

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
    checkpointed: tuple[str, ...] = ()  # attributes of looks: lists of tensors, or plain values

    def __init__(
        self, runs: Sequence[Run], device: torch.device, *, stays: bool | None = None
    ) -> None:
        self.run = runs[0]  # for what all have in common
        self.interval = self.run.evaluate_every or self.run.T // self.run.batch  # between looks
        self.stack = Stack(runs, device, self.losses, self.interval, stays=stays)
        self.ends = sorted({run.steps for run in runs})  # where some run has made all its steps
        self.count = 0  # steps so far
        self.reached: dict[str, Reached] = {}  # the best so far, by the runs' keys
        self.finished: set[str] = set()
        self.orders = [generator(run, "order") for run in runs]
        self.left = [torch.empty(0, dtype=torch.long) for _ in runs]  # of the orders that are drawn

    @abc.abstractmethod
    def batches(self, count: int) -> Int[Tensor, "count R ..."]:
        """The next batches of every run: indices of the data, or the examples themselves."""

    @abc.abstractmethod
    def losses(
        self, batch: Int[Tensor, "R ..."], watched: bool
    ) -> tuple[Tensor, Tensor | None, Sequence[Tensor]]:
        """Losses ``(R,)`` on a batch, the share that is right if ``watched``, and the gradients."""

    @abc.abstractmethod
    def rate(self, run: Run, step: int) -> float:
        """The learning rate of a step, counted from 0."""

    def watches(self, step: int) -> bool:
        """Whether the share that is right is wanted of a step, counted from 0."""
        return False

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
        rates = [[self.rate(run, step) for run in self.stack.runs] for step in steps]
        rates = to_device(torch.tensor(rates, dtype=torch.float64), self.stack.device)
        watched = [self.watches(step) for step in steps]
        losses, shares = self.stack.train(self.batches(length), rates, watched)
        self.count += length
        self.look(losses, shares)
        if self.finished and not self.stack.stays and not self.done:
            runs = enumerate(self.stack.runs)
            self.keep([index for index, run in runs if run.key not in self.finished])
            self.finished = set()

    def take(self, count: int) -> Int[Tensor, "count R B"]:
        """The next ``count`` batches of every run, in random order, on the device."""
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

    def note(self, run: Run, now: Reached, better: bool) -> None:
        """Keep what a run has reached after ``self.count`` steps if it is ``better``.

        A run is finished when its steps are made, when it stops early, or when it has diverged.
        """
        if now.loss is None or not math.isfinite(now.loss):
            self.reached[run.key] = Reached(None, None, diverged=self.count)
        elif better or run.key not in self.reached:
            self.reached[run.key] = now._replace(best_step=self.count)
        best = self.reached[run.key]
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
            tensors = isinstance(value, list)
            setattr(self, name, [x.to(self.stack.device) for x in value] if tensors else value)


# --- Dana et al.: pairs of tokens -----------------------------------------------------------------


class _OnPairs(Protocol):
    """Trainings on pairs of tokens, each with the token that follows.

    The factor of the rate goes linearly from ``lr_start`` to ``lr_end``, changed once an epoch of
    ``T / batch`` steps.
    """

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
    def rate(self, run, step):
        epoch, epochs = step // (run.T // run.batch), run.steps // (run.T // run.batch)
        return run.lr * (run.lr_start + (run.lr_end - run.lr_start) * epoch / epochs)

    @override
    def batches(self, count):
        return take_columns(self.columns.expand(count, -1, -1, -1), self.take(count))

    @override
    def losses(self, batch, watched):
        tokens, answers = batch[:, :2].mT, batch[:, 2]
        losses_of = FAMILIES[self.run.model].losses
        losses, outputs, gradient = losses_of(self.stack.parameters, self.run, tokens, answers)
        share = None
        if watched:
            right = _right_(outputs.clone(), answers).double().sum(dim=1)
            # All right must be 1, but a mean on a GPU multiplies by 1 / B, and 49 * (1 / 49) < 1.
            share = right / torch.full_like(right, answers.shape[1])
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
        self.seen: list[Tensor] = []  # (2, R): accuracy and loss of a watched batch
        self.curve: list[Tensor] = []  # (R,) after every epoch
        self.last_losses: list[Tensor] = []  # (R,) the loss of every epoch's last batch

    @override
    def watches(self, step):
        return step in range(self.run.steps)[LAST_BATCHES]

    @override
    def look(self, losses, shares):
        first = self.count - len(losses)
        wanted = [i for i in range(len(losses)) if self.watches(first + i)]
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
            if broken or not math.isfinite(averages[1]):
                epoch = broken[0] if broken else len(end)
                self.reached[run.key] = Reached(None, None, diverged=epoch * self.interval)
            else:
                self.reached[run.key] = Reached(*averages, tuple(round(x, 4) for x in curve))

    @torch.inference_mode()
    def right_of_all(self, chunk: int = 8192) -> Float[Tensor, " R"]:
        """The share of all pairs whose next token is predicted, for every run."""
        logits_of_pairs, N = FAMILIES[self.run.model].logits_of_pairs, self.run.N
        every = torch.arange(N, device=self.stack.device)
        right = torch.zeros((), device=self.stack.device, dtype=torch.float64)
        for first in every.split(max(1, chunk // N)):
            outputs = logits_of_pairs(self.stack.parameters, self.run, first)
            answers = self.tables[:, first].flatten(1)
            right = right + _right_(outputs, answers).double().sum(dim=1)
        return right / N**2


class Associations(_OnPairs):
    """The best accuracy on the way, and the loss there, for every run.

    Each step takes all ``T`` associations, which are different pairs. A run is looked at every
    ``evaluate_every`` steps, before the last of them, and is done when all its answers are right.
    """

    @override
    def batches(self, count):  # full-batch training: nothing to shuffle
        return self.columns.expand(count, -1, -1, -1)

    @override
    def watches(self, step):
        return (step + 1) % self.interval == 0 or step + 1 == self.ends[-1]

    @override
    def look(self, losses, shares):
        if self.count % self.interval and self.count < self.ends[-1]:
            return
        ends = zip(self.stack.runs, shares[-1].tolist(), losses[-1].tolist(), strict=True)
        for run, *reached in ends:
            if self.is_due(run):
                now, best = Reached(*reached), self.reached.get(run.key)
                better = best and (now.accuracy, -now.loss) > (best.accuracy, -best.loss)
                self.note(run, now, bool(better))


# --- Mahdavi et al.: contexts and queries ---------------------------------------------------------


class Memorization(Protocol):
    """Accuracy and loss on the whole set at the best weights (by loss), for every run.

    A run whose best weights have 100% accuracy is done if ``early_stop``; where runs go on and
    labels are classes (Fig. 3), the saturation of the heads is followed. For real labels the
    accuracy is None and the loss is the mean square error.
    """

    varies = Protocol.varies | {"experiment", "profile", "T", "steps", "lr", "lr_start", "lr_end"}
    checkpointed = ("free",)

    def __init__(self, runs, device, *, stays=None):
        super().__init__(runs, device, stays=stays)
        self.data = Examples(runs, device)
        followed = runs if runs[0].N and not runs[0].early_stop else []
        self.saturation_steps = {run.key: saturation_steps(run) for run in followed}
        self.free: dict[str, list[list[float]]] = {run.key: [] for run in runs}

    @override
    def keep(self, indices):
        super().keep(indices)
        self.data.keep(indices)

    @override
    def batches(self, count):
        return self.take(count)

    @override
    @torch.inference_mode()
    def losses(self, index, watched):
        if self.run.last_batch is None:
            each, _, gradient = self._losses_of(*self.data.at(index))
            return each.mean(dim=1), None, gradient(torch.full_like(each, 1 / each.shape[1]))
        part = (index >= 0).float()
        part /= part.sum(dim=1, keepdim=True)
        each, _, gradient = self._losses_of(*self.data.at(index.clamp(min=0)))
        return (each * part).sum(dim=1), None, gradient(part)

    def _losses_of(self, contexts, queries, labels):
        """Of each example the loss, the outputs, and how gradients follow from them."""
        losses = FAMILIES[self.run.model].losses
        return losses(self.stack.parameters, self.run, contexts, queries, labels)

    @override
    def rate(self, run, step):
        return warmup_cosine(run, step) if step < run.steps else 0.0

    @override
    def look(self, losses, shares):
        looked = [run for run in self.stack.runs if self.is_due(run)]
        if not looked:
            return
        reached = self.evaluate()
        moments = self.saturation_steps
        counted = {run.key for run in looked if self.count in moments.get(run.key, ())}
        free = self.free_heads() if counted else None
        for index, (run, now) in enumerate(zip(self.stack.runs, reached, strict=True)):
            if run not in looked:
                continue
            if run.key in counted:
                self.free[run.key].append(free[index].tolist())
            best = self.reached.get(run.key)
            self.note(run, now, bool(best and now.loss < best.loss))
            if run.key in self.finished and self.free[run.key]:
                self._note_saturation(run)

    @torch.inference_mode()
    def evaluate(self, chunk: int = 4096) -> list[Reached]:
        """Accuracy and mean loss over the whole set, for every run of the stack."""
        right, total = 0.0, 0.0
        for batch, there in self.data.chunks(chunk):
            losses, outputs, _ = self._losses_of(*batch)
            total = total + losses.double().where(there, 0).sum(dim=1)
            if self.run.N:
                known = (outputs.argmax(dim=1) == batch[2]) & losses.isfinite()
                right = right + (known & there).double().sum(dim=1)
        losses = (total / self.data.sizes).tolist()
        if not self.run.N:
            return [Reached(None, loss) for loss in losses]
        accuracies = (right / self.data.sizes).tolist()
        return [*map(Reached, accuracies, losses)]

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

    def _note_saturation(self, run: Run) -> None:
        best = self.reached[run.key]
        if best.diverged is not None:
            return
        free = torch.tensor(self.free[run.key], dtype=torch.float64)  # (moments, H + 1)
        saturated = 1 - free @ torch.arange(run.H + 1).double() / run.H
        paths = {"saturated": saturated, "served": 1 - free[:, 0], "serving": free[-1]}
        for name, path in paths.items():
            best = best._replace(**{name: tuple(round(x, 4) for x in path.tolist())})
        self.reached[run.key] = best


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
