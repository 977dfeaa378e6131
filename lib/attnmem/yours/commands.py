"""The commands of this room: their arguments, and what they print."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from .capacity import capacity, from_config

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
    return {"capacity": _capacity}


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
