"""``python -m attnmem``: list the studies, run them, say what is stored."""

import argparse
import contextlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

import torch

from . import __version__
from .checks import refuse
from .lab import experiments, queue, training
from .lab.experiments import EXPERIMENTS, STUDIES, Job, Progress
from .lab.laws import PREDICTED
from .lab.store import Rows
from .lab.study import ALL, PROFILES, Selection, Study
from .papers import papers
from .terminal import parser_of, perform, say_no_more


def _names(paper: str) -> list[str]:
    return [name for name, experiment in EXPERIMENTS.items() if experiment.paper == paper]


GROUPS = {"all": [*EXPERIMENTS]} | {paper: _names(paper) for paper in papers()}
_PROFILES: list[str] = []
for _study in STUDIES.values():
    _PROFILES += [profile for profile in _study.profiles if profile not in _PROFILES]


def _parser() -> tuple[argparse.ArgumentParser, dict[str, Callable[[argparse.Namespace], int]]]:
    """The parser, and what does each command."""
    parser, commands = parser_of("attnmem", __doc__, __version__)
    commands.add_parser("list", help="all studies, with the number of their runs")
    status = commands.add_parser("status", help="rows in the store; a CPU's time for the others")
    status.add_argument("--profile", choices=_PROFILES, action="append")
    run = commands.add_parser("run", help="measure what is missing, append the rows")
    groups = f"studies, or all trainings of a paper: {', '.join(GROUPS)}"
    run.add_argument("names", nargs="+", metavar="NAME", help=groups)
    run.add_argument("--profile", choices=_PROFILES, help="default: paper; of tests: shipped")
    run.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto)")
    run.add_argument("--seeds", type=int, help="so many seeds (default: as many as published)")
    run.add_argument("--variant", help="the reading of the paper, or 'all'")
    only = {"nargs": "+", "action": "extend", "default": [], "type": _field}
    run.add_argument("--where", metavar="FIELD=VALUE", **only)
    limit = {"default": math.inf, "help": "cheapest first, none after that"}
    run.add_argument("--limit-minutes", type=float, **limit)
    workers = "processes on a CPU, streams on a GPU (default: 1)"
    run.add_argument("--workers", type=int, default=1, help=workers)
    run.add_argument("--recompute", action="store_true", help="measure shipped rows again")
    run.add_argument("--tf32", action="store_true", help="allow TF32 products; rows of their own")
    evening = "train what is missing of Mahdavi et al.'s figures, what is worth most first"
    some_hours = commands.add_parser("queue", help=evening)
    some_hours.add_argument("--hours", type=float, required=True, help="for the trainings")
    cards = "as for run; with --plan also a card that rows name, such as H100"
    some_hours.add_argument("--device", default="auto", help=cards)
    fill = f"as for run (default: {queue.FILLED} on a GPU, which fill it; else 1)"
    some_hours.add_argument("--workers", type=int, help=fill)
    some_hours.add_argument("--profile", choices=PROFILES, default="paper")
    some_hours.add_argument("--plan", action="store_true", help="say what would be trained")
    return parser, {"list": _list, "status": _status, "run": _run, "queue": _queue}


def _field(text: str) -> tuple[str, int | float]:
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):
        if name and math.isfinite(float(value)):
            return name, int(value) if value.isdecimal() else float(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not like d=10 or lr=0.3")


def _report(progress: Progress) -> None:
    done, units, seconds = progress.done, progress.units, progress.seconds
    count, remaining = f"{done}", ""
    if units is not None:
        at_this_rate = timedelta(seconds=round(seconds / done * (units - done)))
        count, remaining = f"{done}/{units}", f", {at_this_rate} left"
    rate = 60 * progress.rows / seconds
    _say(f"[{count}] {progress.said}: {progress.rows} rows, {rate:.1f} a minute{remaining}")


def _say(line: str) -> None:
    """Print a line of a measurement, which goes on where nobody reads any more."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        say_no_more()


def _list(_: argparse.Namespace) -> int:
    for name, study in STUDIES.items():
        totals = {profile: study.done(profile, ALL, {})[1] for profile in study.profiles}
        counts = ", ".join(f"{total} {profile}" for profile, total in totals.items())
        details = ", ".join(study.variants) if study.variants else study.kind
        print(f"{name:28} {counts:22} {study.source}; {details}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    for profile in arguments.profile or _PROFILES:
        for study in STUDIES.values():
            if profile not in study.profiles:
                continue
            rows = experiments.rows(study.name, profile)
            for variant in study.variants or (None,):
                print(*_status_lines(study, profile, variant, rows), sep="\n", flush=True)
    return 0


def _status_lines(study: Study, profile: str, variant: str | None, rows: Rows) -> list[str]:
    """How much of a study is stored, and what a CPU needs for the rest, by its own rows."""
    selection = Selection(variant=variant)
    count, total = study.done(profile, selection, rows)
    word = "in part" if count else "none"
    if count == total:
        word = "complete"
    line = f"{profile:9} {study.name:28} {variant or '':18} {count:4} of {total:4}  {word}"
    if count == total or not study.units_known:
        return [line.rstrip()]
    missing = study.missing(profile, selection, rows)
    prices: dict[Any, list[float]] = {}
    for config, seconds in zip(missing, study.prices(missing, rows), strict=True):
        prices.setdefault(study.curve_of(config), []).append(seconds)
    lines = [f"{line:81}{_hours(sum(map(sum, prices.values())))}"]
    if study.curves:
        for curve, times in sorted(prices.items()):
            name = f"{study.curves} = {curve}"
            said = f"{'':9} {name}: {len(times)} missing {_hours(sum(times))}"
            if profile == "paper" and curve in PREDICTED.get(study.name, ()):
                said += ", predicted"
            lines.append(said)
    return [line.rstrip() for line in lines]


def _hours(seconds: float) -> str:
    if math.isnan(seconds):
        return ""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _run(arguments: argparse.Namespace) -> int:
    names = [name for group in arguments.names for name in GROUPS.get(group, [group])]
    jobs = [job for name in dict.fromkeys(names) for job in _jobs(name, arguments)]
    device = experiments.choose_device(arguments.device)
    options = {key: getattr(arguments, key) for key in ("workers", "limit_minutes", "recompute")}
    with experiments.pool(arguments.workers, device) as executor:
        added = experiments.run_jobs(jobs, device, executor, report=_report, **options)
    _say(f"{added} rows added")
    for job in jobs:
        rows = experiments.rows(job.name, job.profile, recompute=arguments.recompute)
        study, variant = STUDIES[job.name], job.selection.variant
        count, total = study.done(job.profile, job.selection, rows)
        name = job.name
        if variant not in (None, *study.variants[:1]):  # the first is the published one
            name = f"{name}, {variant}"
        _say(f"{name}: {total - count} missing")
    return 0


def _jobs(name: str, arguments: argparse.Namespace) -> list[Job]:
    if name not in STUDIES:
        refuse("name", repr(name), f"one of {', '.join([*GROUPS, *STUDIES])}")
    study = STUDIES[name]
    variants = (arguments.variant,)
    if arguments.variant == "all" and study.variants:
        variants = study.variants
    for field, count in Counter(field for field, _ in arguments.where).items():
        if count > 1:
            refuse("where", f"{count} values of {field}", "one value of each field")
    profile, where = arguments.profile or study.default_profile, dict(arguments.where) or None
    jobs = []
    for variant in variants:
        selection = Selection(arguments.seeds, variant, where, arguments.tf32)
        jobs.append(Job(name, profile, selection))
    return jobs


def _queue(arguments: argparse.Namespace) -> int:
    profile, ends = arguments.profile, monotonic() + 3600 * arguments.hours
    if not arguments.hours >= 0:
        refuse("hours", arguments.hours, "a number, at least 0")
    device, card = _card(arguments, queue.cards(queue.stored(profile)))
    workers = arguments.workers
    if workers is None:
        workers = 1 if device == "cpu" else queue.FILLED
    ratio = None
    while True:  # a plan ends early where trainings were faster than their prices
        rows = queue.stored(profile)
        missing = queue.items(rows, card, profile)
        known = card in queue.cards(rows) and (device != "cpu" or arguments.plan)
        if arguments.hours and missing and not known:  # "cpu" names no processor
            ratio = ratio or _ratio(missing, card, device, workers)
            missing = [item._replace(seconds=ratio * item.seconds) for item in missing]
        hours = max(0.0, ends - monotonic()) / 3600
        plan = _plan(missing, card, queue.at_once(workers, device), hours)
        if arguments.plan or not plan:
            return 0
        jobs, options = [item.job for item in plan], {"workers": workers, "report": _report}
        with experiments.pool(workers, device) as executor:
            added = experiments.run_jobs(
                jobs, device, executor, limit_minutes=60 * hours, **options
            )
        _say(f"{added} rows added")


def _card(arguments: argparse.Namespace, known: list[str]) -> tuple[str, str]:
    """The device, and how rows call it; for a plan alone any that they call so will do."""
    named = [card for card in known if arguments.device in card]
    if arguments.plan and len(named) == 1:
        return "cpu" if named == ["cpu"] else "cuda", named[0]
    if arguments.plan and not arguments.device.startswith(("auto", "cpu", "cuda")):
        refuse("device", repr(arguments.device), f"a part of one name of {', '.join(known)}")
    device = experiments.choose_device(arguments.device)
    return device, training.device_name(torch.device(device))


def _ratio(missing: list[queue.Item], card: str, device: str, workers: int) -> float:
    _say(f"no row says what trainings take on this {card}: measuring for a minute")
    ratio = queue.measured_ratio(missing, device, workers)
    _say(f"{ratio:.2f} times what stored rows took")
    return ratio


def _plan(missing: list[queue.Item], card: str, at_once: int, hours: float) -> list[queue.Item]:
    """What the hours hold, said by curves."""
    plan, seconds = queue.fitted(missing, hours, at_once)
    stage = None
    for (index, name, curve), group in itertools.groupby(plan, lambda item: item.curve):
        if index != stage:
            _say(f"{queue.STAGES[index]}:")
        stage, trainings = index, [*group]
        count, cost = queue.totals(trainings)
        of_curve = f"{STUDIES[name].curves} = {curve}"
        word = "trainings" if count > 1 else "training"
        _say(f"  {name:28} {of_curve:12} {count:4} {word:9} {_hours(cost):>9}")
    (planned, cost), (of, all_cost) = queue.totals(plan), queue.totals(missing)
    _say(f"planned: {planned} of {of} missing trainings, {_hours(cost)} of {_hours(all_cost)}")
    _say(f"on {card}, {at_once} at once: {_hours(seconds)} of {_hours(3600 * hours)}")
    return plan


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; 1 on bad input or a store that fails, 130 on Ctrl-C."""
    return perform(*_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
