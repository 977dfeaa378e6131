"""``python -m attnmem``: list the studies, run them, say what the store has."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor

from . import results
from .reporting import papers
from .studies import STUDIES, read, study
from .studies.grids import EXPERIMENTS
from .studies.run import Job, Progress, choose_device, run_jobs
from .studies.study import Part

GROUPS = {"all": list(EXPERIMENTS)} | {
    paper: [name for name, experiment in EXPERIMENTS.items() if experiment.paper == paper]
    for paper in papers()
}
PROFILES = [*dict.fromkeys(profile for study in STUDIES.values() for profile in study.profiles)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m attnmem", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all studies, with the number of their runs")
    status = commands.add_parser("status", help="how many rows the store has")
    status.add_argument("--profile", choices=PROFILES, action="append")
    run = commands.add_parser("run", help="measure what is missing, append the rows")
    groups = f"studies, or all trainings of a paper: {', '.join(GROUPS)}"
    run.add_argument("names", nargs="+", metavar="NAME", help=groups)
    run.add_argument("--profile", choices=PROFILES, help="default: paper; of tests: shipped")
    run.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto)")
    run.add_argument("--seeds", type=int, help="so many seeds (default: as many as published)")
    run.add_argument("--variant", help="the reading of the paper, or 'all'")
    run.add_argument("--where", nargs="+", default=[], metavar="FIELD=VALUE", type=_field)
    run.add_argument("--limit-minutes", type=float, help="start nothing after that time")
    run.add_argument(
        "--workers", type=int, default=1, help="processes on a CPU, streams on a GPU (default: 1)"
    )
    run.add_argument("--recompute", action="store_true", help="measure shipped rows again")
    run.add_argument(
        "--tf32", action="store_true", help="allow TF32 products; recorded in the rows"
    )
    return parser


def _field(text: str) -> tuple[str, int]:
    name, equals, value = text.partition("=")
    if not (name and equals and value.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not like d=10")
    return name, int(value)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _report(progress: Progress) -> None:
    count = f"{progress.done}/{progress.units}" if progress.units else f"{progress.done}"
    rate = 60 * progress.rows / progress.seconds
    left = progress.seconds_left
    ends = f", {_clock(left)} left" if left is not None else ""
    print(f"[{count}] {progress.said}: {progress.rows} rows, {rate:.1f} a minute{ends}", flush=True)


def _list(_: argparse.Namespace) -> int:
    for name, each in STUDIES.items():
        sizes = {p: each.done(p, Part(), {}).of for p in each.profiles}
        counts = ", ".join(f"{size} {profile}" for profile, size in sizes.items())
        readings = ", ".join(each.variants)
        kind = readings if name in EXPERIMENTS else each.kind
        print(f"{name:28} {counts:22} {each.source}; {kind}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    for profile in arguments.profile or PROFILES:
        for name, each in STUDIES.items():
            if profile not in each.profiles:
                continue
            rows = read.rows(name, profile)
            for variant in each.variants or (None,):
                have, of = each.done(profile, Part(variant=variant), rows)
                word = "complete" if have == of else "" if have else "none"
                print(f"{profile:9} {name:28} {variant or '':18} {have:4} of {of:4}  {word}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    names = [name for group in arguments.names for name in GROUPS.get(group, [group])]
    jobs = [job for name in names for job in _jobs(name, arguments)]
    for job in jobs:  # all are checked before the first run
        job.check()
    device = choose_device(arguments.device)
    with _workers(arguments.workers, device) as pool:
        for job in jobs:
            rows = run_jobs(
                [job],
                device,
                pool,
                limit_minutes=arguments.limit_minutes,
                tf32=arguments.tf32,
                recompute=arguments.recompute,
                report=_report,
            )
            _say_left(job, rows, arguments.recompute)
    return 0


def _jobs(name: str, arguments: argparse.Namespace) -> list[Job]:
    each = study(name)
    everything = arguments.variant == "all" and each.variants
    variants = each.variants if everything else (arguments.variant,)
    profile = arguments.profile or each.usual
    chosen = arguments.seeds, dict(arguments.where) or None
    return [Job(name, profile, Part(chosen[0], variant, chosen[1])) for variant in variants]


def _say_left(job: Job, added: int, recompute: bool) -> None:
    each = study(job.name)
    rows = read.rows(job.name, job.profile, recompute=recompute)
    have, of = each.done(job.profile, job.part, rows)
    usual = job.part.variant in (None, *each.variants[:1])
    name = job.name if usual else f"{job.name}, {job.part.variant}"
    print(f"{name}: {added} rows added, {of - have} missing", flush=True)


def _workers(count: int, device: str) -> contextlib.AbstractContextManager[Executor | None]:
    """Threads share one GPU, each with a stream; on a CPU they would wait for one another."""
    if count == 1:
        return contextlib.nullcontext()
    if device != "cpu":
        return ThreadPoolExecutor(count)
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=spawn)


COMMANDS = {"list": _list, "status": _status, "run": _run}


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; 1 on bad input or a damaged store, 130 on Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        done = COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
        return done
    except BrokenPipeError:  # whoever read has read enough; nothing is left to say at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, ConnectionError, results.DamagedResultsError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; every finished row is in the store", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
