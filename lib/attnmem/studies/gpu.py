"""The first half hour on a GPU: whether it computes right, how fast, and the rows worth most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from .. import training
from ..results import Run
from . import cost, read
from .cost import Family, Pace, Paces, family
from .grids import EXPERIMENTS, PUBLISHED
from .plan import Budget, Piece, Planned, pieces, plan, units_of
from .run import check_limit, choose_device, pool
from .study import WHOLE, check_profile
from .trainings import PROFILES
from .work import measured

BENCHMARK = 0.1  # the share of the time that is spent on timing steps, at most
CHECKED_STEPS = 128


class Setting(NamedTuple):
    """Where the half hour is spent, and how long it is.

    Attributes:
        device: The GPU, or ``cpu``.
        profile: ``paper`` or ``quick``.
        workers: Units trained at once.
        budget: The time that there is.
        say: Called with every line.
    """

    device: str
    profile: str
    workers: int
    budget: Budget
    say: Callable[[str], None]


def first_half_hour(
    device: str = "cuda",
    minutes: int | float = 30,
    *,
    profile: str = "paper",
    workers: int = 1,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = monotonic,
) -> bool:
    """Do what is worth most on a GPU that is there for a short time; call it again to go on.

    First a check: a few steps of each kind of model, captured and one by one, and on a CPU. Then a
    benchmark: the time of steps, beside the rate of plain products. Then missing trainings of the
    published grids, in the order of :func:`attnmem.studies.plan.plan`. Rows are stored as units
    finish, and no unit is begun that is not expected to end in time.

    Args:
        device: ``cuda``, ``cuda:1``; or ``cpu``, to try it.
        minutes: The time that there is.
        profile: ``paper``, or ``quick`` to try it.
        workers: Units trained at once: streams of a GPU, processes on a CPU.
        say: Called with a line for each part and each unit.
        clock: The time in seconds.

    Returns:
        Whether the check was passed; if not, nothing is trained.

    Raises:
        ValueError: An argument is not possible; the message names it.
    """
    check_limit(minutes, "minutes")
    check_profile(profile, PROFILES)
    budget = Budget(60 * minutes, clock)
    setting = Setting(choose_device(device), profile, workers, budget, say)
    with pool(workers, setting.device) as executor:
        if not self_check(setting):
            return False
        paces = benchmark(setting)
        train_missing(setting, paces, executor)
    return True


def samples() -> list[list[Run]]:
    """A small unit of every family of models and tasks, from the quick grids."""
    found: dict[Family, list[Run]] = {}
    for experiment in EXPERIMENTS.values():
        for unit in experiment.units("quick", WHOLE, {}):
            found.setdefault(family(unit[0]), unit)
    return list(found.values())


def self_check(setting: Setting) -> bool:
    """Whether captured steps are those that are made one by one, and those of a CPU."""
    began = setting.budget.clock()
    units = samples()
    failed = training.selfcheck(setting.device, units, CHECKED_STEPS)
    for line in failed:
        setting.say(f"self-check: {line}")
    verdict = f"{len(failed)} differences, so nothing is trained" if failed else "no difference"
    _end(setting, f"self-check: {len(units)} kinds of training, {verdict}", began)
    return not failed


def missing_runs(profile: str) -> dict[str, list[Run]]:
    """The trainings of each published grid that have no row."""
    left = {name: read.missing(name, profile) for name in PUBLISHED}
    return {name: runs for name, runs in left.items() if runs}


def benchmark(setting: Setting) -> Paces:
    """How fast the missing trainings are, by stored rows of this device or by steps timed now."""
    began = setting.budget.clock()
    groups: dict[Family, list[Run]] = defaultdict(list)
    for runs in missing_runs(setting.profile).values():
        for run in runs:
            groups[family(run)].append(run)
    rate = cost.product_rate(setting.device)
    each = BENCHMARK * setting.budget.left / max(1, 2 * len(groups))
    paces = Paces(setting.device, timing=min(2.0, each))
    speeds = [_speed(runs, paces.of(runs), rate) for runs in groups.values()]
    products = f"benchmark: float32 products {rate / 1e12:.3g} TFLOP/s"
    _end(setting, "; ".join([products, *speeds]), began)
    return paces


def _speed(runs: list[Run], pace: Pace, rate: float) -> str:
    """The steps of the largest training, and the share of the rate of products that they reach."""
    run = max(runs, key=cost.operations)
    step = pace.seconds([run]) / run.steps
    share = cost.operations(run) / step / rate
    words = [run.model, run.task, run.context, f"{run.layers} layers" if run.layers > 1 else None]
    kind = " ".join(filter(None, words))
    return f"{kind} {1e6 * step:.0f} us a step, {share:.1%} of that ({pace.basis})"


def train_missing(setting: Setting, paces: Paces, executor) -> int:
    """Train what is missing and fits into the time.

    Args:
        setting: Where, and how long.
        paces: How long trainings take there.
        executor: By whom (see :func:`attnmem.studies.work.measured`).

    Returns:
        How many rows were added.
    """
    began = setting.budget.clock()
    order, seconds = planned(setting.profile, paces)

    def group(runs: list[Run]) -> list[list[Run]]:
        return training.stacks(runs, setting.device, workers=setting.workers)

    units = Planned(units_of(order, group, seconds), setting.budget)
    added = done = 0
    for landed in measured(units, setting.device, executor, setting.workers):
        added, done = added + landed.added, done + 1
        setting.say(f"  {landed.said}: {added} rows, {setting.budget.left:.0f} s left")
    left = sum(len(piece.runs) for piece in order) - added
    _end(setting, f"trainings: {added} rows added in {done} units, {left} missing", began)
    return added


def planned(profile: str, paces: Paces) -> tuple[list[Piece], Callable[[list[Run]], float]]:
    """What is missing of the published grids, in the order of its value.

    On a GPU all seeds of a curve come together, since a step of all is expected to take hardly
    longer than a step of one.

    Args:
        profile: ``paper`` or ``quick``.
        paces: How long trainings take on a device.

    Returns:
        The pieces in their order, and the seconds that their trainings are expected to take if they
        are made at once.
    """
    left = missing_runs(profile)
    known = {
        (name, kind): paces.of([run for run in runs if family(run) == kind])
        for name, runs in left.items()
        for kind in {family(run) for run in runs}
    }

    def seconds(runs: list[Run]) -> float:
        return known[runs[0].experiment, family(runs[0])].seconds(runs)

    found = [
        piece
        for name in left
        for piece in pieces(
            PUBLISHED[name], profile, WHOLE, read.rows(name, profile), together=paces.on_gpu
        )
    ]
    return plan(found, lambda run: seconds([run])), seconds


def _end(setting: Setting, line: str, began: float) -> None:
    setting.say(f"{line}: {setting.budget.clock() - began:.1f} s")
