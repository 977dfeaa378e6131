"""``python -m attnmem``: list the experiments, run them, say what the store has."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from . import experiments, results
from .experiments import EXPERIMENTS, PROFILES, Progress


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m attnmem", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all experiments, with the number of their runs")
    status = commands.add_parser("status", help="how many rows the store has")
    status.add_argument("--profile", choices=PROFILES, action="append")
    run = commands.add_parser("run", help="train what is missing, append the rows")
    run.add_argument("names", nargs="+", metavar="NAME", help="experiments, or 'all'")
    run.add_argument("--profile", choices=PROFILES, default="paper")
    run.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto)")
    run.add_argument("--seeds", type=int, help="only the first so many seeds")
    run.add_argument("--limit-minutes", type=float, help="start nothing after that time")
    run.add_argument("--processes", type=int, default=1, help="train in so many processes")
    run.add_argument("--recompute", action="store_true", help="train shipped rows again, elsewhere")
    run.add_argument(
        "--tf32", action="store_true", help="allow TF32 products; recorded in the rows"
    )
    return parser


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _report(progress: Progress) -> None:
    run = progress.run
    sizes = {"d": run.d, "d_h": run.d_h, "H": run.H, "n": run.n, "T": run.T, "width": run.width}
    shown = " ".join(f"{name}={value}" for name, value in sizes.items() if value is not None)
    rate = 60 * progress.rows / progress.seconds
    print(
        f"[{progress.done}/{progress.units}] {run.experiment} {shown}: {progress.rows} rows, "
        f"{rate:.1f} a minute, {_clock(progress.seconds_left)} left",
        flush=True,
    )


def _list() -> int:
    for name, experiment in EXPERIMENTS.items():
        counts = ", ".join(f"{len(experiments.runs(name, p))} {p}" for p in PROFILES)
        print(f"{name:28} {counts:22} {experiment.source}")
    return 0


def _status(profiles: list[str] | None) -> int:
    for profile in profiles or PROFILES:
        for name in EXPERIMENTS:
            wanted = len(experiments.runs(name, profile))
            have = wanted - len(experiments.missing(name, profile))
            word = "complete" if have == wanted else "" if have else "none"
            print(f"{profile:6} {name:28} {have:4} of {wanted:4}  {word}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    names = list(EXPERIMENTS) if arguments.names == ["all"] else arguments.names
    for name in names:  # all names are checked before the first run
        experiments.runs(name, arguments.profile, arguments.seeds)
    options = {
        "seeds": arguments.seeds,
        "limit_minutes": arguments.limit_minutes,
        "tf32": arguments.tf32,
        "recompute": arguments.recompute,
        "report": _report,
    }
    for name in names:
        if arguments.processes == 1:
            rows = experiments.run(name, arguments.profile, arguments.device, **options)
        else:
            with ProcessPoolExecutor(
                arguments.processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=torch.set_num_threads,
                initargs=(1,),
            ) as pool:
                rows = experiments.run(name, arguments.profile, arguments.device, pool, **options)
        left = experiments.missing(
            name, arguments.profile, arguments.seeds, recompute=arguments.recompute
        )
        print(f"{name}: {rows} rows added, {len(left)} missing", flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; 1 on bad input or a damaged store, 130 on Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "list":
            return _list()
        if arguments.command == "status":
            return _status(arguments.profile)
        return _run(arguments)
    except (ValueError, results.DamagedResultsError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; every finished row is in the store", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
