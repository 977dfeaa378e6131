"""Runs in, outcomes out: which runs are trained at once, and their training from end to end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .. import results
from ..checks import check_integer, refuse
from ..results import Outcome, Run
from .checkpoints import Checkpoint
from .loop import Protocol, rounded
from .models import FAMILIES, parameter_count
from .places import device_name, place
from .protocols import PROTOCOLS, Bigrams

CPU = torch.device("cpu")
ROUNDING = 1e-4  # a cross-entropy is rounded like the logits, however small it is


def configuration(run: Run) -> Run:
    """What the seeds of one cell of a grid have in common: everything but the seed."""
    return dataclasses.replace(run, seed=0)


def _shape(run: Run) -> tuple[Any, ...]:
    """What runs that can be trained at once have in common."""
    varies = PROTOCOLS[run.task].varies
    fields = vars(run).items()
    return tuple(value for name, value in fields if name not in varies)


def _check(runs: Sequence[Run]) -> None:
    if not runs:
        refuse("runs", "none", "at least one")
    for run in runs:
        family = FAMILIES.get(run.model)
        if not family or run.task not in family.tasks or run.variant not in family.variants:
            what = f"model {run.model!r}, variant {run.variant!r}, task {run.task!r}"
            refuse("runs", what, "a known model, variant and task")
        if run.last_batch not in ((None, "short") if run.context else (None,)):
            what = f"last_batch {run.last_batch!r} in the task {run.task!r}"
            refuse("runs", what, "None, or 'short' where examples have contexts")
    shapes = {_shape(run) for run in runs}
    if len(shapes) > 1:
        varies = ", ".join(sorted(PROTOCOLS[runs[0].task].varies))
        refuse("runs", f"{len(shapes)} different shapes", f"runs that differ by {varies} only")


def stacks(runs: Sequence[Run], device: str = "cpu", *, workers: int = 1) -> list[list[Run]]:
    """Runs in groups that are trained at once, in the order in which they first occur.

    On a CPU a group holds the seeds of one cell. On a GPU it holds all runs of one shape, as many
    as fit into the memory that each of ``workers`` has.

    Args:
        runs: Any runs.
        device: Where they are to be trained.
        workers: How many groups are trained at the same time, at least 1.

    Returns:
        The groups, each of which :func:`train` accepts.

    Example:
        >>> from attnmem import experiments
        >>> [len(group) for group in stacks(experiments.runs("dana-exp6", "quick"))]
        [2, 2, 2]
    """
    check_integer("workers", workers)
    on_gpu = torch.device(device).type == "cuda"
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(_shape(run) if on_gpu else configuration(run), []).append(run)
    if not on_gpu:
        return list(groups.values())
    memory = 0.8 * _available(device) / workers
    return [part for group in groups.values() for part in admitted(group, memory)]


def _available(device: str) -> int:
    """Bytes of a GPU that other processes leave to this one, used or not; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def admitted(runs: Sequence[Run], memory: float) -> list[list[Run]]:
    """Divide runs into groups that fit into a memory.

    Args:
        runs: Runs of one shape.
        memory: Bytes for one group.

    Returns:
        The runs in their order, in groups that need at most ``memory`` by :func:`footprint`. A
        group of one run may need more.
    """
    groups: list[list[Run]] = [[]]
    taken = 0
    for run in runs:
        needed = footprint(run)
        if groups[-1] and taken + needed > memory:
            groups.append([])
            taken = 0
        groups[-1].append(run)
        taken += needed
    return groups


def footprint(run: Run) -> int:
    """Bytes that a run takes on a device, estimated from above: data, weights, and one step.

    Of a step, what the backward pass reads: for each example its tokens, and for each head logits,
    weights and their gradients for every token, and four vectors of the head's width.
    """
    own = run.context != "shared"
    tokens = run.n * run.d if own else 0
    data = run.T * (run.d + tokens + 1) if run.context else 4 * run.T
    each = tokens + run.H * (4 * run.n + 4 * max(run.d, run.d_h)) + 4 * (run.N or 1)
    each += 3 * (run.width or 0)
    looked_at = 4096 if run.context else 8192
    return 4 * (data + 5 * parameter_count(run) + (run.layers * run.batch + looked_at) * each)


def operations(run: Run) -> int:
    """Floating-point operations of the matrix products in one step, counted while one is made.

    A product of shapes ``(a, b)`` and ``(b, c)`` counts ``2 a b c``; the backward pass is included.
    """
    run = dataclasses.replace(run, T=max(run.batch, 1))
    protocol = PROTOCOLS[run.task]([run], CPU)
    [batch] = protocol.batches(1)
    with FlopCounterMode(display=False) as counter:
        protocol.losses(batch, watched=False)
    return counter.get_total_flops()


def opening(run: Run, epochs: int) -> tuple[float, ...]:
    """The beginning of a run's curve, without the rest of its training; on the CPU.

    Args:
        run: A training on bigrams.
        epochs: How many points of the curve.

    Returns:
        The accuracy on all pairs after each epoch, rounded to four places.
    """
    with place(CPU, tf32=False):
        protocol = Bigrams([run], CPU)
        while len(protocol.curve) < epochs and not protocol.done:
            protocol.advance()
    return rounded(accuracy.item() for accuracy in protocol.curve)


def train(
    runs: Sequence[Run],
    *,
    device: str = "cpu",
    checkpoints: Path | None = None,
) -> list[Outcome]:
    """Train runs of one shape at once; one outcome each, in their order.

    Everything is computed in float32, whatever torch's default is. A run whose loss is not finite
    any more has an outcome that says so (``diverged``); the others go on. A stack for which a GPU
    has too little memory is trained in halves, and so on.

    Args:
        runs: Runs that differ by their seed; of Mahdavi et al.'s model, also by the number of their
            examples and steps, and by their rates.
        device: ``cpu``, ``cuda``, ``cuda:1``, ...
        checkpoints: A folder in which the state of a long training is stored once a minute. The
            same call goes on from there, and ends with the outcomes that it would have had. States
            stay until :func:`forget` deletes them.

    Returns:
        Outcomes. ``wall_s`` is the stack's time shared equally among its runs.

    Raises:
        ValueError: ``runs`` that cannot be trained at once, a device that is not there, or a
            checkpoint that cannot be read.
        torch.OutOfMemoryError: The device has too little memory for a single run.
    """
    _check(runs)
    where = torch.device(device)
    with place(where, tf32=runs[0].products == "tf32"):
        checkpoint = Checkpoint(checkpoints, runs, device_name(where))
        try:
            return _outcomes(runs, where, checkpoint)
        except torch.OutOfMemoryError:
            if len(runs) == 1:
                raise
    middle = len(runs) // 2  # here, where the error no longer holds what did not fit
    return [
        outcome
        for half in (runs[:middle], runs[middle:])
        for outcome in train(half, device=device, checkpoints=checkpoints)
    ]


def _outcomes(runs: Sequence[Run], device: torch.device, checkpoint: Checkpoint) -> list[Outcome]:
    seconds, found = _trained(runs, device, checkpoint)
    kind = device_name(device)
    origin = {"device": kind, "torch": torch.__version__, "commit": results.commit()}
    origin |= {"wall_s": round(seconds / len(runs), 3), "tf32": runs[0].products == "tf32"}
    return [Outcome(**origin, **found[run.key]._asdict()) for run in runs]


def _trained(runs: Sequence[Run], device: torch.device, checkpoint: Checkpoint) -> tuple:
    """Seconds spent, in this process and before, and what was found, by key."""
    start = time.perf_counter()
    one = {configuration(run) for run in runs}
    protocol = PROTOCOLS[runs[0].task](runs, device, stays=None if len(one) == 1 else True)
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
        protocol.release()
    return time.perf_counter() - start, protocol.found


class First(NamedTuple):
    """What the first steps of a stack give, on the CPU.

    Attributes:
        losses: Before each step.
        shares: Of each batch that was right before it; NaN where nobody asks.
    """

    losses: Float[Tensor, "steps R"]
    shares: Float[Tensor, "steps R"]


def selfcheck(device: str, runs: Sequence[Sequence[Run]], steps: int = 128) -> list[str]:
    """Train short stacks in several ways and say how far the ways are apart; an empty list is good.

    Captured steps against steps made one by one on the same device, to the last bit; and against a
    CPU, within the rounding of float32 grown over ``steps`` steps.

    Args:
        device: A GPU; a CPU is compared with itself.
        runs: Stacks to try, one after the other.
        steps: How many steps, at most.

    Returns:
        A sentence for every comparison that failed.
    """
    failed = []
    for stack in runs:
        captured = first_steps(stack, device, steps, captured=True)
        single = first_steps(stack, device, steps, captured=False)
        on_cpu = first_steps(stack, "cpu", steps, captured=False)
        what = f"{stack[0].experiment} ({stack[0].model}, {stack[0].task})"
        if not torch.equal(captured.losses, single.losses):
            worst = (captured.losses - single.losses).abs().max()
            failed.append(f"{what}: captured and single steps differ by up to {worst:.1e}")
        asked = ~single.shares.isnan()
        if not torch.equal(captured.shares[asked], single.shares[asked]):
            failed.append(f"{what}: captured and single steps differ in what is right")
        apart = (captured.losses - on_cpu.losses).abs() / (on_cpu.losses.abs() + ROUNDING)
        if not apart.max() < 1e-2:
            failed.append(f"{what}: {apart.max():.1e} from the losses on a CPU")
    return failed


def first_steps(runs: Sequence[Run], device: str, steps: int, captured: bool) -> First:
    """Make the first steps of a stack.

    Args:
        runs: Runs of one shape.
        device: Where they are trained.
        steps: How many steps; fewer if the training ends before.
        captured: Whether a GPU may replay captured steps, or makes them one by one.

    Returns:
        What the steps give.
    """
    seen: list[tuple[Tensor, ...]] = []
    with place(torch.device(device), tf32=False):
        protocol: Protocol = PROTOCOLS[runs[0].task](runs, torch.device(device), stays=True)
        protocol.look = lambda *found: seen.append(tuple(x.to(CPU, copy=True) for x in found))
        protocol.steps.captures &= captured
        try:
            while sum(len(losses) for losses, *_ in seen) < steps and not protocol.done:
                protocol.advance()
        finally:
            protocol.release()
    return First(*(torch.cat(part)[:steps] for part in zip(*seen, strict=True)))
