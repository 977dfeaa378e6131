"""The published ways to train a stack of runs: rates, batches, what is watched, when to stop."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from ..results import Fitting, Run
from .data import Examples, Order, Pairs, Whole
from .gradients import by_autograd
from .loop import Found, Protocol, diverged_at, rounded
from .models import FAMILIES, mha_heads

LAST_BATCHES = slice(-101, -1)  # Dana et al. average the accuracy of batches -101 to -2
SATURATED = 0.99  # a head is saturated for an example if one of its attention weights is above
MOMENTS = 32  # equally spaced, at which the saturation of heads is looked at


# --- learning rates -------------------------------------------------------------------------------


def linear_by_epoch(run: Run, epoch: int) -> float:
    """PyTorch's ``LinearLR``: the factor goes from ``lr_start`` to ``lr_end``, once an epoch.

    Args:
        run: The training. An epoch of it has ``T / batch`` steps.
        epoch: The epoch, counted from 0.

    Returns:
        The learning rate of the epoch's steps.
    """
    epochs = run.steps // (run.T // run.batch)
    return run.lr * (run.lr_start + (run.lr_end - run.lr_start) * epoch / epochs)


def warmup_cosine(run: Run | Fitting, step: int) -> float:
    """Linear from ``lr_start`` over the first 5% of the steps, then a cosine to ``lr_end``.

    Args:
        run: The training, or a fit by Adam.
        step: The step, from 0 to ``run.steps``.

    Returns:
        The learning rate of the step.
    """
    warmup = max(1, round(0.05 * run.steps))
    if step < warmup:
        return run.lr * (run.lr_start + (1 - run.lr_start) * step / warmup)
    progress = (step - warmup) / max(1, run.steps - warmup)
    return run.lr * (run.lr_end + (1 - run.lr_end) * (1 + math.cos(math.pi * progress)) / 2)


# --- Dana et al.: pairs of tokens -----------------------------------------------------------------


class _OnPairs(Protocol):
    """Trainings on pairs of tokens, each with the token that follows."""

    @override
    def draw(self, runs, device):
        self.data = Pairs(runs, device)
        return Order(runs, device)

    @override
    def batches(self, count):
        return self.data.at(self.order.take(count))

    @override
    def losses(self, batch, watched):
        tokens, answers = batch[:, :2].mT, batch[:, 2]
        family, P = FAMILIES[self.run.model], self.stack.parameters
        if family.losses:
            losses, outputs, gradient = family.losses(P, self.run, tokens, answers)
        else:
            outputs = family.outputs(P, self.run, tokens)
            losses = F.cross_entropy(outputs, answers, reduction="none").mean(dim=1)
            gradient = by_autograd(P, losses)
        share = _share(_right_(outputs.clone(), answers)) if watched else None
        return losses, share, gradient(torch.ones_like(losses))


@torch.inference_mode()
def _right_(outputs: Float[Tensor, "R N B"], answers: Int[Tensor, "R B"]) -> Bool[Tensor, "R B"]:
    """Whether the right logit exceeds all others: faster than an argmax. It overwrites that one."""
    chosen = outputs.gather(1, answers[:, None])
    others = outputs.scatter_(1, answers[:, None], -math.inf)
    return (chosen > others.amax(dim=1, keepdim=True))[:, 0]


def _share(right: Bool[Tensor, "R B"]) -> Float[Tensor, " R"]:
    """The share that is right: 1 if all are, which on a GPU the mean misses for some ``B``.

    There it multiplies by ``1 / B``, and 49 times 1 / 49 is below 1.
    """
    count = right.double().sum(dim=1)
    return count / torch.full_like(count, right.shape[1])


class Bigrams(_OnPairs):
    """Accuracy (mean over the last hundred batches but one) and loss there, for every run.

    The curve is the accuracy on all pairs that there are, after every epoch.
    """

    noted = ("seen", "curve", "last_losses")

    def __init__(self, runs, device, *, stays=None):
        self.watched = range(runs[0].steps)[LAST_BATCHES]
        self.interval = runs[0].T // runs[0].batch  # an epoch
        self.seen: list[Tensor] = []  # (2, R): accuracy and loss of a watched batch
        self.curve: list[Tensor] = []  # (R,) after every epoch
        self.last_losses: list[Tensor] = []  # (R,) the loss of every epoch's last batch
        super().__init__(runs, device, stays=stays)

    @override
    def rate(self, run, step):
        return linear_by_epoch(run, step // self.interval)

    @override
    def watches(self, step):
        return step in self.watched

    @override
    def look(self, losses, shares):
        first = self.count - len(losses)
        wanted = [i for i in range(len(losses)) if self.watches(first + i)]
        self.seen += [torch.stack([shares[i], losses[i].double()]) for i in wanted]
        if self.count % self.interval == 0:
            self.curve.append(self.right_of_all())
            self.last_losses.append(losses[-1].clone())
        if self.count == self.ends[-1]:
            self._conclude()

    def _conclude(self) -> None:
        accuracies, losses = torch.stack(self.seen).cpu().mean(dim=0).tolist()
        curves = torch.stack(self.curve, dim=1).tolist()
        ends = torch.stack(self.last_losses, dim=1).tolist()
        for run, *found, curve, end in zip(
            self.stack.runs, accuracies, losses, curves, ends, strict=True
        ):
            broken = [i for i, loss in enumerate(end, start=1) if not math.isfinite(loss)]
            if broken or not math.isfinite(found[1]):
                epoch = broken[0] if broken else len(end)
                self.found[run.key] = diverged_at(epoch * self.interval)
            else:
                self.found[run.key] = Found(*found, rounded(curve))

    @torch.inference_mode()
    def right_of_all(self, chunk: int = 8192) -> Float[Tensor, " R"]:
        """The share of all pairs whose next token is predicted, for every run."""
        family, N = FAMILIES[self.run.model], self.run.N
        every = torch.arange(N, device=self.stack.device)
        right = torch.zeros((), device=self.stack.device, dtype=torch.float64)
        for first in every.split(max(1, chunk // N)):
            outputs = family.pairs(self.stack.parameters, self.run, first)
            answers = self.data.tables[:, first].flatten(1)
            right = right + _right_(outputs, answers).double().sum(dim=1)
        return right / N**2


class Associations(_OnPairs):
    """The best accuracy on the way, and the loss there, for every run.

    Each step takes all ``T`` associations, which are different pairs. A run is looked at every
    ``evaluate_every`` steps, before the last of them, and is done when all its answers are right.
    """

    def __init__(self, runs, device, *, stays=None):
        self.interval = runs[0].evaluate_every
        super().__init__(runs, device, stays=stays)

    @override
    def draw(self, runs, device):
        self.data = Pairs(runs, device)
        return Whole()

    @override
    def batches(self, count):
        return self.data.columns.expand(count, -1, -1, -1)

    @override
    def rate(self, run, step):
        return linear_by_epoch(run, step)

    @override
    def watches(self, step):
        return (step + 1) % self.interval == 0 or step + 1 == self.ends[-1]

    @override
    def look(self, losses, shares):
        if self.count % self.interval and self.count < self.ends[-1]:
            return
        now = zip(self.stack.runs, shares[-1].tolist(), losses[-1].tolist(), strict=True)
        for run, *reached in now:
            if self.at_interval(run):
                found, best = Found(*reached), self.found.get(run.key)
                better = best and (found.accuracy, -found.loss) > (best.accuracy, -best.loss)
                self.note(run, found, bool(better))


# --- Mahdavi et al.: contexts and queries ---------------------------------------------------------


class Memorization(Protocol):
    """Accuracy and loss on the whole set at the best weights (by loss), for every run.

    A run whose best weights have 100% accuracy is done if ``early_stop``; where runs go on and
    labels are classes (Fig. 3), the saturation of the heads is followed. For real labels the
    accuracy is None and the loss is the mean square error.
    """

    varies = Protocol.varies | {"experiment", "profile", "T", "steps", "lr", "lr_start", "lr_end"}
    noted = ("free",)

    def __init__(self, runs, device, *, stays=None):
        self.interval = runs[0].evaluate_every
        follows = runs[0].N and not runs[0].early_stop
        self.moments = {run.key: moments(run) if follows else set() for run in runs}
        self.free: dict[str, list[list[float]]] = {run.key: [] for run in runs}
        super().__init__(runs, device, stays=stays)

    @override
    def draw(self, runs, device):
        self.data = Examples(runs, device)
        return Order(runs, device)

    @override
    def batches(self, count):
        return self.order.take(count)

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
        looked = [run for run in self.stack.runs if self.at_interval(run)]
        if not looked:
            return
        reached = dict(zip((run.key for run in self.stack.runs), self.evaluate(), strict=True))
        free = self.free_heads() if any(self._is_moment(run) for run in looked) else None
        for place, run in enumerate(self.stack.runs):
            if run not in looked:
                continue
            if self._is_moment(run):
                self.free[run.key].append(free[place].tolist())
            now, best = reached[run.key], self.found.get(run.key)
            self.note(run, now, bool(best and now.loss < best.loss))
            if run.key in self.finished and self.free[run.key]:
                self._with_saturation(run)

    def _is_moment(self, run: Run) -> bool:
        return self.count in self.moments[run.key]

    @torch.inference_mode()
    def evaluate(self, chunk: int = 4096) -> list[Found]:
        """Accuracy and mean loss over the whole set, for every run of the stack."""
        right, total = 0.0, 0.0
        for batch, there in self.data.chunks(chunk):
            losses, outputs, _ = self._losses_of(*batch)
            total = total + losses.double().where(there, 0).sum(dim=1)
            if self.run.N:
                right = right + ((outputs.argmax(dim=1) == batch[2]) & there).double().sum(dim=1)
        losses = (total / self.data.sizes).tolist()
        if not self.run.N:
            return [Found(None, loss) for loss in losses]
        accuracies = (right / self.data.sizes).tolist()
        return [Found(*found) for found in zip(accuracies, losses, strict=True)]

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

    def _with_saturation(self, run: Run) -> None:
        free = torch.tensor(self.free[run.key], dtype=torch.float64)  # (moments, H + 1)
        saturated = 1 - free @ torch.arange(run.H + 1).double() / run.H
        paths = saturated.tolist(), (1 - free[:, 0]).tolist(), free[-1].tolist()
        if self.found[run.key].diverged is None:
            names = ("saturated", "served", "serving")
            found = dict(zip(names, map(rounded, paths), strict=True))
            self.found[run.key] = self.found[run.key]._replace(**found)


def moments(run: Run, count: int = MOMENTS) -> set[int]:
    """The steps after which the saturation of a run's heads is noted.

    Args:
        run: A training that is looked at every ``evaluate_every`` steps.
        count: The number of equal parts of the training.

    Returns:
        The numbers of steps, of the first look at or after the end of each part.
    """
    evaluations = -(-run.steps // run.evaluate_every)
    every = [-(-evaluations * part // count) for part in range(1, count + 1)]
    return {min(run.steps, k * run.evaluate_every) for k in every}


PROTOCOLS: dict[str, type[Protocol]] = {
    "bigrams": Bigrams,
    "associations": Associations,
    "classes": Memorization,
    "reals": Memorization,
}
