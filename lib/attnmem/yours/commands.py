"""``python -m attnmem examine`` and ``capacity``: their arguments, and what they print."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable

from .capacity import capacity, from_config
from .data import load
from .examine import examine


def add_commands(
    commands: argparse._SubParsersAction,
) -> dict[str, Callable[[argparse.Namespace], int]]:
    """Add both commands to the parser of ``python -m attnmem``.

    Args:
        commands: What ``parser.add_subparsers(dest="command")`` returned.

    Returns:
        What does each command, by its name.
    """
    look = commands.add_parser("examine", help="what holds for your data, and what a layer meets")
    look.add_argument("file", help="npz, pt or safetensors with contexts and queries; npy or csv")
    look.add_argument("--heads", type=int, help="number of heads H")
    look.add_argument("--head-dim", type=int, help="width of a head (default: d)")
    for role in ("contexts", "queries", "labels", "mask"):
        look.add_argument(f"--{role}", metavar="NAME", help=f"the array (or column) of {role}")
    look.add_argument("--tokens", type=int, help="cut each row of a table into so many tokens")
    look.add_argument("--samples", type=int, default=1000, help="subsets drawn (default: 1000)")
    look.add_argument("--seed", type=int, default=0)
    look.add_argument("--json", action="store_true", help="print JSON instead of the report")
    count = commands.add_parser("capacity", help="how many labels your layer holds")
    count.add_argument("--config", help="config.json of a model; otherwise give sizes")
    for name in ("heads", "dim", "head-dim", "kv-heads", "value-dim", "outputs", "adapter"):
        count.add_argument(f"--{name}", type=int)
    count.add_argument("--adapted", default="qv", help="maps with an adapter (default: qv)")
    count.add_argument(
        "--bias", nargs="?", const="qkvo", default="", help="maps with a bias (all: qkvo)"
    )
    count.add_argument("--rope", action="store_true", help="rotary positions")
    count.add_argument("--norm", action="store_true", help="tokens come from a LayerNorm")
    count.add_argument("--json", action="store_true", help="print JSON instead of the report")
    return {"examine": _examine, "capacity": _capacity}


def _examine(given: argparse.Namespace) -> int:
    roles = ("contexts", "queries", "labels", "mask")
    names = {role: getattr(given, role) for role in roles if getattr(given, role)}
    data = load(given.file, names, given.tokens)
    found = examine(
        **data,
        heads=given.heads,
        head_dim=given.head_dim,
        samples=given.samples,
        seed=given.seed,
        say=lambda step: print(f"... {step}", file=sys.stderr, flush=True),
    )
    print(found.to_json() if given.json else found)
    return 0


def _capacity(given: argparse.Namespace) -> int:
    adapted = {"adapter": given.adapter, "adapted": given.adapted}
    if given.config:
        found = from_config(given.config, outputs=given.outputs, **adapted)
    else:
        found = capacity(
            given.heads,
            given.dim,
            given.head_dim,
            kv_heads=given.kv_heads,
            value_dim=given.value_dim,
            outputs=given.outputs,
            bias=given.bias,
            rope=given.rope,
            norm=given.norm,
            **adapted,
        )
    print(json.dumps(dataclasses.asdict(found), indent=2) if given.json else found)
    return 0
