"""``python -m attnmem``: list the experiments, run them, say what the store has."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import sys
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor

import torch

from . import assumptions, capacity, experiments, results
from .capacity import SEARCHES
from .experiments import EXPERIMENTS, PROFILES, Progress
from .results import Check, Finding, Run

GROUPS = {
    "all": list(EXPERIMENTS),
    "mahdavi": [name for name in EXPERIMENTS if name.startswith("mahdavi")],
    "dana": [name for name in EXPERIMENTS if name.startswith("dana")],
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m attnmem", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all experiments, with the number of their runs")
    status = commands.add_parser("status", help="how many rows the store has")
    status.add_argument("--profile", choices=PROFILES, action="append")
    run = commands.add_parser("run", help="train what is missing, append the rows")
    run.add_argument("names", nargs="+", metavar="NAME", help="experiments, or all, mahdavi, dana")
    run.add_argument("--profile", choices=PROFILES, default="paper")
    run.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto)")
    run.add_argument("--seeds", type=int, help="so many seeds (default: as many as published)")
    run.add_argument("--variant", default="code", help="the reading of the paper, or 'all'")
    run.add_argument("--where", nargs="+", default=[], metavar="FIELD=VALUE", type=_field)
    run.add_argument("--limit-minutes", type=float, help="start nothing after that time")
    run.add_argument(
        "--workers", type=int, default=1, help="processes on a CPU, streams on a GPU (default: 1)"
    )
    run.add_argument("--recompute", action="store_true", help="train shipped rows again, elsewhere")
    run.add_argument(
        "--tf32", action="store_true", help="allow TF32 products; recorded in the rows"
    )
    search = commands.add_parser("search", help="how many examples training memorizes")
    search.add_argument("names", nargs="+", metavar="NAME", choices=SEARCHES)
    search.add_argument("--profile", choices=PROFILES, default="paper")
    search.add_argument("--device", default="auto")
    check = commands.add_parser("check", help="test the assumptions on features of real models")
    check.add_argument("name", choices=assumptions.CASES)
    check.add_argument("--tier", default="shipped", help="published, shipped, ... (see list)")
    check.add_argument("--device", default="auto")
    return parser


def _field(text: str) -> tuple[str, int]:
    name, equals, value = text.partition("=")
    if not (name and equals and value.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not like d=10")
    return name, int(value)


def _named(name: str, variant: str) -> str:
    return name if variant == "code" else f"{name}, {variant}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _report(progress: Progress) -> None:
    run = progress.run
    sizes = {"d": run.d, "d_h": run.d_h, "H": run.H, "n": run.n, "T": run.T, "width": run.width}
    shown = " ".join(f"{name}={value}" for name, value in sizes.items() if value is not None)
    rate = 60 * progress.rows / progress.seconds
    print(
        f"[{progress.done}/{progress.units}] {_named(run.experiment, run.variant)} {shown}: "
        f"{progress.rows} rows, "
        f"{rate:.1f} a minute, {_clock(progress.seconds_left)} left",
        flush=True,
    )


def _list(_: argparse.Namespace) -> int:
    for name, experiment in EXPERIMENTS.items():
        counts = ", ".join(f"{len(experiments.runs(name, p))} {p}" for p in PROFILES)
        print(f"{name:28} {counts:22} {experiment.source}; {', '.join(experiment.variants)}")
    for name, search in SEARCHES.items():
        counts = ", ".join(f"{len(search.cells[p])} {p}" for p in PROFILES)
        print(f"{name:28} {counts:22} {search.source}; a search")
    for name, tiers in assumptions.CASES.items():
        counts = ", ".join(f"{len(assumptions.checks(name, tier))} {tier}" for tier in tiers)
        print(f"{name:28} {counts}; tests of linear independence")
    return 0


def _search(arguments: argparse.Namespace) -> int:
    def report(run: Run, memorized: bool) -> None:
        sizes = f"d={run.d} d_h={run.d_h} H={run.H} n={run.n}, restart {run.seed}"
        verb = "memorized" if memorized else "not memorized"
        print(f"{run.experiment} {sizes}: {run.T} {verb}", flush=True)

    _keep_memory()
    for name in arguments.names:
        rows = capacity.search(name, arguments.profile, arguments.device, report)
        print(f"{name}: {rows} rows added, all cells searched", flush=True)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    def report(asked: Check, found: Finding) -> None:
        what = f"{asked.map}, {asked.dtype}: {asked.vectors}, size {asked.size}"
        print(f"{what}: {found.dependent} of {asked.samples} dependent", flush=True)

    device = experiments.choose_device(arguments.device)
    rows = assumptions.run(arguments.name, arguments.tier, device, report)
    print(f"{arguments.name}, {arguments.tier}: {rows} rows added, none missing", flush=True)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    for profile in arguments.profile or PROFILES:
        for name, experiment in EXPERIMENTS.items():
            for variant in experiment.variants:
                wanted = len(experiments.runs(name, profile, variant=variant))
                have = wanted - len(experiments.missing(name, profile, variant=variant))
                word = "complete" if have == wanted else "" if have else "none"
                print(f"{profile:6} {name:28} {variant:18} {have:4} of {wanted:4}  {word}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    names = [name for group in arguments.names for name in GROUPS.get(group, [group])]
    asked = {"seeds": arguments.seeds, "where": dict(arguments.where)}
    jobs = [
        (name, asked | {"variant": variant})
        for name in names
        for variant in _variants(name, arguments)
    ]
    for name, chosen in jobs:  # all are checked before the first run
        experiments.runs(name, arguments.profile, **chosen)
    _keep_memory()
    for name, chosen in jobs:
        rows = _run_job(arguments, name, chosen)
        left = experiments.missing(name, arguments.profile, recompute=arguments.recompute, **chosen)
        print(
            f"{_named(name, chosen['variant'])}: {rows} rows added, {len(left)} missing", flush=True
        )
    return 0


def _variants(name: str, arguments: argparse.Namespace) -> tuple[str, ...]:
    everything = arguments.variant == "all" and name in EXPERIMENTS
    return EXPERIMENTS[name].variants if everything else (arguments.variant,)


def _run_job(arguments: argparse.Namespace, name: str, chosen: dict) -> int:
    options = chosen | {
        "limit_minutes": arguments.limit_minutes,
        "tf32": arguments.tf32,
        "recompute": arguments.recompute,
        "report": _report,
    }
    device = experiments.choose_device(arguments.device)
    if arguments.workers == 1:
        return experiments.run(name, arguments.profile, device, **options)
    with _workers(arguments.workers, device) as pool:
        return experiments.run(name, arguments.profile, device, pool, **options)


def _workers(count: int, device: str) -> Executor:
    """Threads share one GPU, each with a stream; on a CPU they would wait for one another."""
    if device != "cpu":
        return ThreadPoolExecutor(count)
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=spawn, initializer=_work_alone)


def _work_alone() -> None:
    torch.set_num_threads(1)
    _keep_memory()


def _keep_memory() -> None:
    """Let the C library keep freed memory: a step frees and asks for the same blocks again.

    Without this, each large array is mapped afresh and its pages zeroed, a quarter of the time of
    a step on a CPU. Where the C library knows no such option, nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        for option, size in MALLOC_OPTIONS.items():
            ctypes.CDLL(None).mallopt(option, size)


# glibc: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD; bytes
MALLOC_OPTIONS = {-3: 2**30, -1: 2**31 - 1, -2: 2**28}


COMMANDS = {"list": _list, "status": _status, "run": _run, "search": _search, "check": _check}


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; 1 on bad input or a damaged store, 130 on Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        return COMMANDS[arguments.command](arguments)
    except (ValueError, ConnectionError, results.DamagedResultsError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; every finished row is in the store", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
