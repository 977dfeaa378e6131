"""What all protocols share: chunks of steps, looks in between, runs that are done, stored states.

A protocol trains a chunk of steps at a time (:meth:`Protocol.advance`). Between two chunks a
training can be stored, and it can go on later as if nothing had happened.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..results import Run
from .data import Examples, Order, Pairs, Whole, sent
from .engine import CHUNK, Stack, Steps, chunk_length


class Found(NamedTuple):
    """What a run reached, in the fields of :class:`attnmem.results.Outcome`."""

    accuracy: float | None
    loss: float | None
    curve: tuple[float, ...] | None = None
    best_step: int | None = None
    saturated: tuple[float, ...] | None = None
    served: tuple[float, ...] | None = None
    serving: tuple[float, ...] | None = None
    diverged: int | None = None


def diverged_at(step: int) -> Found:
    """Of a run whose loss was seen not to be finite after ``step`` steps."""
    return Found(None, None, diverged=step)


def rounded(shares: Iterable[float]) -> tuple[float, ...]:
    """Shares to four places, as rows hold them."""
    return tuple(round(share, 4) for share in shares)


# --- what all protocols share ---------------------------------------------------------------------


class Protocol(abc.ABC):
    """One stack of runs, trained as published.

    Subclasses draw the data, compute losses, and look at the runs every ``interval`` steps.

    Args:
        runs: Runs that are equal but for what may vary within a stack (:attr:`varies`).
        device: Where they are trained.
        stays: See :class:`attnmem.training.engine.Stack`.
    """

    varies = frozenset({"seed"})  # fields in which the runs of one stack may differ
    noted: tuple[str, ...] = ()  # attributes that looks write: lists of tensors, or plain values

    def __init__(
        self, runs: Sequence[Run], device: torch.device, *, stays: bool | None = None
    ) -> None:
        self.stack = Stack(runs, device, stays=stays)
        self.run = runs[0]  # for what all have in common
        self.ends = sorted({run.steps for run in runs})  # where some run has made all its steps
        self.count = 0  # steps so far
        self.found: dict[str, Found] = {}  # the best so far, by the runs' keys
        self.finished: set[str] = set()
        self.order = self.draw(runs, device)
        self.steps = Steps(self.stack, self.losses, chunk_length(self.interval))

    # What a subclass says.

    interval: int  # steps between two looks
    data: Pairs | Examples

    @abc.abstractmethod
    def draw(self, runs: Sequence[Run], device: torch.device) -> Order | Whole:
        """Put ``self.data`` on the device.

        Args:
            runs: The runs of the stack.
            device: Where they are trained.

        Returns:
            The order of the batches.
        """

    @abc.abstractmethod
    def batches(self, count: int) -> Int[Tensor, "count R ..."]:
        """The next batches of every run: places in the data, or the examples themselves.

        Args:
            count: How many.

        Returns:
            The batches, on the device.
        """

    @abc.abstractmethod
    def losses(
        self, batch: Int[Tensor, "R ..."], watched: bool
    ) -> tuple[Tensor, Tensor | None, Sequence[Tensor]]:
        """Compute the runs' losses on a batch, and their gradients.

        Args:
            batch: One of :meth:`batches`.
            watched: Whether the share of the batch that is right is wanted.

        Returns:
            The losses ``(R,)``, the shares ``(R,)``, or None if they are not known or wanted, and
            the gradient of each run's loss at each of the weights, in the order of the stack's.
        """

    @abc.abstractmethod
    def rate(self, run: Run, step: int) -> float:
        """The learning rate of a step.

        Args:
            run: A run of the stack.
            step: The step, counted from 0.

        Returns:
            The rate.
        """

    def watches(self, step: int) -> bool:
        """Whether the share that is right is wanted of a step, counted from 0."""
        return False

    @abc.abstractmethod
    def look(self, losses: Float[Tensor, "k R"], shares: Float[Tensor, "k R"]) -> None:
        """Note what the runs have reached after ``self.count`` steps; called after every chunk.

        Args:
            losses: The loss of each run before each of the chunk's ``k`` steps.
            shares: The share of each batch that was right, NaN where it was not watched.
        """

    # What follows from it.

    @property
    def done(self) -> bool:
        """Whether nothing is left to train."""
        return self.count >= self.ends[-1] or len(self.finished) == len(self.stack.runs)

    def advance(self) -> None:
        """Make a chunk of steps: up to the next look or the end of a run, or a part of the way."""
        to_look = self.interval - self.count % self.interval
        to_end = next(end for end in self.ends if end > self.count) - self.count
        longest = self.steps.length if self.steps.length > 1 else CHUNK
        length = min(longest, to_look, to_end)
        steps = range(self.count, self.count + length)
        rates = [[self.rate(run, step) for run in self.stack.runs] for step in steps]
        rates = sent(torch.tensor(rates, dtype=torch.float64), self.stack.device)
        watched = [self.watches(step) for step in steps]
        losses, shares = self.steps(self.batches(length), rates, watched)
        self.count += length
        self.look(losses, shares)
        if self.finished and not self.stack.stays and not self.done:
            self._drop_finished()

    def _drop_finished(self) -> None:
        self._keep([p for p, run in enumerate(self.stack.runs) if run.key not in self.finished])
        self.finished = set()

    def _keep(self, places: Sequence[int]) -> None:
        for part in (self.stack, self.order, self.data):
            part.keep(places)

    def at_interval(self, run: Run) -> bool:
        """Whether a run is to be looked at after ``self.count`` steps."""
        due = self.count % self.interval == 0 or self.count == run.steps
        return due and run.key not in self.finished

    def note(self, run: Run, now: Found, better: bool) -> None:
        """Keep what a run has reached after ``self.count`` steps if it is ``better``.

        A run is finished when its steps are made, when it stops early, or when it has diverged.

        Args:
            run: A run of the stack.
            now: What it has reached.
            better: Whether that is better than what was kept before.
        """
        if now.loss is None or not math.isfinite(now.loss):
            self.found[run.key] = diverged_at(self.count)
        elif better or run.key not in self.found:
            self.found[run.key] = now._replace(best_step=self.count)
        best = self.found[run.key]
        stopped = run.early_stop and best.accuracy == 1
        if stopped or best.diverged or self.count >= run.steps:
            self.finished.add(run.key)

    def release(self) -> None:
        """Give back what the steps hold on the device."""
        self.steps.release()

    # Storing and going on.

    def state(self) -> dict[str, Any]:
        """All that a training depends on, as tensors, numbers, lists and dictionaries."""
        return {
            "runs": [run.key for run in self.stack.runs],
            "count": self.count,
            "found": {key: list(found) for key, found in self.found.items()},
            "finished": sorted(self.finished),
            "order": self.order.state(),
            "stack": self.stack.state(),
            "noted": {name: getattr(self, name) for name in self.noted},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` gave for the same runs."""
        places = {run.key: place for place, run in enumerate(self.stack.runs)}
        left = [places[key] for key in state["runs"]]
        if len(left) < len(places):
            self._keep(left)
        self.count, self.finished = state["count"], set(state["finished"])
        self.found = {key: Found(*map(_plain, found)) for key, found in state["found"].items()}
        self.order.restore(state["order"])
        self.stack.restore(state["stack"])
        for name, value in state["noted"].items():
            tensors = isinstance(value, list)
            setattr(self, name, [x.to(self.stack.device) for x in value] if tensors else value)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
