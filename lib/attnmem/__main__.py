"""``python -m attnmem``: list the studies, run them, say what is stored."""

import argparse
import contextlib
import functools
import math
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from . import __version__
from .checks import refuse
from .lab import experiments
from .lab.experiments import EXPERIMENTS, STUDIES, Job, Progress
from .lab.store import Rows
from .lab.study import ALL, Selection, Study
from .papers import papers
from .terminal import perform, say_no_more

_GROUPS = {"all": list(EXPERIMENTS)} | {
    paper: [name for name, experiment in EXPERIMENTS.items() if experiment.paper == paper]
    for paper in papers()
}
_PROFILES = [*dict.fromkeys(profile for study in STUDIES.values() for profile in study.profiles)]


def _parser() -> tuple[argparse.ArgumentParser, dict[str, Callable[[argparse.Namespace], int]]]:
    """The parser, and what does each command."""
    exact = functools.partial(argparse.ArgumentParser, allow_abbrev=False)
    parser = exact(prog="python -m attnmem", description=__doc__.replace("``", ""))
    parser.add_argument("--version", action="version", version=f"attnmem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=exact)
    commands.add_parser("list", help="all studies, with the number of their runs")
    status = commands.add_parser("status", help="rows in the store; a CPU's time for the others")
    status.add_argument("--profile", choices=_PROFILES, action="append")
    run = commands.add_parser("run", help="measure what is missing, append the rows")
    groups = f"studies, or all trainings of a paper: {', '.join(_GROUPS)}"
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
    return parser, {"list": _list, "status": _status, "run": _run}


def _field(text: str) -> tuple[str, int | float]:
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):
        if name and math.isfinite(float(value)):
            return name, int(value) if value.isdecimal() else float(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not like d=10 or lr=0.3")


def _report(progress: Progress) -> None:
    done, units, rows, seconds, said = progress
    count, left = f"{done}", ""
    if units is not None:
        at_this_rate = timedelta(seconds=round(seconds / done * (units - done)))
        count, left = f"{done}/{units}", f", {at_this_rate} left"
    _say(f"[{count}] {said}: {rows} rows, {60 * rows / seconds:.1f} a minute{left}")


def _say(line: str) -> None:
    """Print a line of a measurement, which goes on where nobody reads any more."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        say_no_more()


def _list(_: argparse.Namespace) -> int:
    for name, each in STUDIES.items():
        counts = ", ".join(f"{each.done(p, ALL, {})[1]} {p}" for p in each.profiles)
        kind = ", ".join(each.variants) or each.kind
        print(f"{name:28} {counts:22} {each.source}; {kind}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    for profile in arguments.profile or _PROFILES:
        for each in [one for one in STUDIES.values() if profile in one.profiles]:
            rows = experiments.rows(each.name, profile)
            for variant in each.variants or (None,):
                print(*_status_lines(each, profile, variant, rows), sep="\n", flush=True)
    return 0


def _status_lines(each: Study, profile: str, variant: str | None, rows: Rows) -> list[str]:
    """How much of a study is stored, and what a CPU needs for the rest, by its own rows."""
    selection = Selection(variant=variant)
    have, of = each.done(profile, selection, rows)
    word = "complete" if have == of else "in part" if have else "none"
    line = f"{profile:9} {each.name:28} {variant or '':18} {have:4} of {of:4}  {word}"
    if have == of or not each.units_known:
        return [line.rstrip()]
    missing = each.missing(profile, selection, rows)
    prices: dict[Any, list[float]] = {}
    for one, seconds in zip(missing, each.prices(missing, rows), strict=True):
        prices.setdefault(each.curve_of(one), []).append(seconds)
    lines = [f"{line:81}{_hours(sum(map(sum, prices.values())))}"]
    for curve, of_it in sorted(prices.items()) if each.curves else ():
        lines.append(f"{'':9} {each.curves} = {curve}: {len(of_it)} missing {_hours(sum(of_it))}")
    return [line.rstrip() for line in lines]


def _hours(seconds: float) -> str:
    long = f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
    return "" if math.isnan(seconds) else long


def _run(arguments: argparse.Namespace) -> int:
    names = [name for group in arguments.names for name in _GROUPS.get(group, [group])]
    jobs = [job for name in dict.fromkeys(names) for job in _jobs(name, arguments)]
    device = experiments.choose_device(arguments.device)
    options = {key: getattr(arguments, key) for key in ("workers", "limit_minutes", "recompute")}
    with experiments.pool(arguments.workers, device) as executor:
        added = experiments.run_jobs(jobs, device, executor, report=_report, **options)
    _say(f"{added} rows added")
    for job in jobs:
        rows = experiments.rows(job.name, job.profile, recompute=arguments.recompute)
        have, of = STUDIES[job.name].done(job.profile, job.selection, rows)
        variant, published = job.selection.variant, (None, *STUDIES[job.name].variants[:1])
        _say(f"{job.name}{'' if variant in published else f', {variant}'}: {of - have} missing")
    return 0


def _jobs(name: str, arguments: argparse.Namespace) -> list[Job]:
    if name not in STUDIES:
        refuse("name", repr(name), f"one of {', '.join([*_GROUPS, *STUDIES])}")
    each = STUDIES[name]
    asked = arguments.variant
    variants = each.variants if asked == "all" and each.variants else (asked,)
    for field, count in Counter(field for field, _ in arguments.where).items():
        if count > 1:
            refuse("where", f"{count} values of {field}", "one value of each field")
    profile, where = arguments.profile or each.default_profile, dict(arguments.where) or None
    parts = [Selection(arguments.seeds, variant, where, arguments.tf32) for variant in variants]
    return [Job(name, profile, part) for part in parts]


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; 1 on bad input or a store that fails, 130 on Ctrl-C."""
    return perform(*_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
