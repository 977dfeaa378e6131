"""The commands of this room: their arguments, and what they print."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable

from ..checks import refuse
from .capacity import capacity, from_config
from .examine import examine
from .files import ALLOWED, TAKES, load

_SIZES = ("heads", "dim", "head_dim", "kv_heads", "value_dim", "outputs", "adapter", "layers")


def add_commands(
    commands: argparse._SubParsersAction,
) -> dict[str, Callable[[argparse.Namespace], int]]:
    """Add the commands to the parser of ``python -m attnmem``; what does each, by its name."""
    # Only what is given reaches capacity(), whose defaults stand there.
    kind = {"argument_default": argparse.SUPPRESS}
    count = commands.add_parser("capacity", help="how many labels your layer holds", **kind)
    count.add_argument("--config", help="config.json of a model; without it, give heads and dim")
    for name in _SIZES:
        count.add_argument(f"--{name.replace('_', '-')}", type=int)
    count.add_argument("--adapted", help="maps with an adapter (default: qv)")
    count.add_argument("--bias", nargs="?", const="qkvo", help="maps with a bias (alone: qkvo)")
    count.add_argument("--rope", action="store_true", help="rotary positions")
    count.add_argument("--norm", action="store_true", help="tokens come from a LayerNorm")
    look = commands.add_parser("examine", help="what holds for your data, and what a layer meets")
    _add_file(look)
    look.add_argument("--heads", type=int, help="number of heads H")
    look.add_argument("--head-dim", type=int, help="width of a head (default: d)")
    look.add_argument("--samples", type=int, default=1000, help="subsets drawn (default: 1000)")
    look.add_argument("--seed", type=int, default=0)
    look.add_argument("--picture", metavar="FILE", help="draw bounds and ranks: .png, .svg, .pdf")
    look.add_argument("--json", action="store_true", help="print JSON instead of the report")
    return {"capacity": _capacity, "examine": _examine}


def _capacity(given: argparse.Namespace) -> int:
    chosen = {name: value for name, value in vars(given).items() if name != "command"}
    if "config" in chosen:
        print(from_config(**chosen))
    else:
        if missing := {"heads", "dim"} - chosen.keys():
            refuse(f"--{min(missing)}", "nothing", "--heads and --dim, or a model's --config")
        print(capacity(**chosen))
    return 0


def _add_file(command: argparse.ArgumentParser) -> None:
    """The file of examples and how it is read; defaults are those of load()."""
    command.add_argument("file", help=f"{', '.join(TAKES)}, or - for a CSV from a pipe")
    table = command.add_argument_group("tables (csv, tsv, -; npy takes --tokens alone)")
    add = table.add_argument
    add("--label", "--labels", metavar="NAME", help="column (default: the last) or array of labels")
    add("--label-kind", choices=ALLOWED["label_kind"], help="default: decimals are real")
    add("--columns", metavar="A,B", type=_names, help="default: numbers, and words of few values")
    gaps = "those with gaps (default: few of both)"
    add("--drop-missing", choices=ALLOWED["drop_missing"], help=gaps)
    add("--tokens", type=int, help="cut each row into so many (default: about sqrt(width))")
    add("--header", action=argparse.BooleanOptionalAction, help="names in line 1 (default: seen)")
    arrays = command.add_argument_group("arrays (npz, safetensors, pt)")
    for role in ("contexts", "queries", "mask"):
        arrays.add_argument(f"--{role}", metavar="NAME", help=f"the array of {role}")


def _names(text: str) -> list[str]:
    """Names between commas, in quotes if they hold one."""
    return [name.strip() for name in next(csv.reader([text], skipinitialspace=True))]


def _examine(given: argparse.Namespace) -> int:
    chosen = vars(given)
    if given.picture and given.heads is None:
        refuse("--picture", given.picture, "--heads too, so that there is something to draw")
    reading = {name for names in TAKES.values() for name in names}
    data = load(given.file, **{name: chosen[name] for name in reading})
    sizes = {name: chosen[name] for name in ("heads", "head_dim", "samples", "seed")}
    found = examine(*data[:3], mask=data.mask, **sizes, say=_bar)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if given.json:
        print(json.dumps({"read": data.summary} | json.loads(found.to_json()), indent=2))
    else:
        print(data, found, sep="\n\n")
    if given.picture:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3.6), layout="constrained")
        found.draw(figure.subplots())
        figure.savefig(given.picture)
    return 0


def _bar(done: int, of: int, step: str) -> None:
    """A bar on a terminal; elsewhere, a line for each step."""
    if sys.stderr.isatty():
        filled = 20 * done // of
        shown = f"\r\x1b[K[{'#' * filled}{'.' * (20 - filled)}] {step}"
        print(shown[:100], end="", file=sys.stderr, flush=True)
    else:
        print(f"... {done + 1} of {of}: {step}", file=sys.stderr, flush=True)
