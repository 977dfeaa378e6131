"""The commands of this room: their arguments, and what they print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from .capacity import capacity, from_config
from .data import ROLES, SUFFIXES, load
from .examine import examine

SIZES = ("heads", "dim", "head_dim", "kv_heads", "value_dim", "outputs", "adapter")
CHOICES = (*SIZES, "adapted", "bias", "rope", "norm")


def add_commands(
    commands: argparse._SubParsersAction,
) -> dict[str, Callable[[argparse.Namespace], int]]:
    """Add the commands to the parser of ``python -m attnmem``.

    Args:
        commands: What ``parser.add_subparsers(dest="command")`` returned.

    Returns:
        What does each command, by its name.
    """
    _add_capacity(commands)
    _add_examine(commands)
    return {"capacity": _capacity, "examine": _examine}


def _add_capacity(commands: argparse._SubParsersAction) -> None:
    # Only what is given reaches capacity(), whose defaults stand there.
    kind = {"argument_default": argparse.SUPPRESS}
    count = commands.add_parser("capacity", help="how many labels your layer holds", **kind)
    count.add_argument("--config", help="config.json of a model; without it, give heads and dim")
    for name in SIZES:
        count.add_argument(f"--{name.replace('_', '-')}", type=int)
    count.add_argument("--adapted", help="maps with an adapter (default: qv)")
    count.add_argument("--bias", nargs="?", const="qkvo", help="maps with a bias (alone: qkvo)")
    count.add_argument("--rope", action="store_true", help="rotary positions")
    count.add_argument("--norm", action="store_true", help="tokens come from a LayerNorm")


def _capacity(given: argparse.Namespace) -> int:
    chosen = {name: getattr(given, name) for name in CHOICES if hasattr(given, name)}
    if hasattr(given, "config"):
        print(from_config(given.config, **chosen))
    else:
        print(capacity(**({"heads": None, "dim": None} | chosen)))
    return 0


def _add_examine(commands: argparse._SubParsersAction) -> None:
    look = commands.add_parser("examine", help="what holds for your data, and what a layer meets")
    look.add_argument(
        "file", help=f"{', '.join(SUFFIXES)}; npy and csv are tables, one example a row"
    )
    look.add_argument("--heads", type=int, help="number of heads H")
    look.add_argument("--head-dim", type=int, help="width of a head (default: d)")
    for role in ROLES:
        look.add_argument(f"--{role}", metavar="NAME", help=f"the array (or column) of {role}")
    look.add_argument("--tokens", type=int, help="cut each row of a table into so many tokens")
    look.add_argument("--samples", type=int, default=1000, help="subsets drawn (default: 1000)")
    look.add_argument("--seed", type=int, default=0)
    look.add_argument("--json", action="store_true", help="print JSON instead of the report")


def _examine(given: argparse.Namespace) -> int:
    chosen = vars(given)
    names = {role: chosen[role] for role in ROLES if chosen[role]}
    found = examine(
        **load(given.file, names, given.tokens),
        **{name: chosen[name] for name in ("heads", "head_dim", "samples", "seed")},
        say=lambda step: print(f"... {step}", file=sys.stderr, flush=True),
    )
    print(found.to_json() if given.json else found)
    return 0
