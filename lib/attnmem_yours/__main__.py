"""``python -m attnmem_yours``: what your data, layer or model can hold."""

import argparse
import csv
import functools
import json
import shlex
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from attnmem import __version__
from attnmem.checks import need, refuse
from attnmem.terminal import perform, wrapped
from attnmem.theory.capacity import capacity

from .examination import examine
from .files import ALLOWED, TAKES, Loaded, load
from .memorization import NumberType, memorize
from .models import model_capacity

_SIZES = {"heads": "number of heads H", "dim": "width d of tokens", "layers": "default: 1"}
_SIZES |= {"head_dim": "default: d / H", "value_dim": "default: head-dim", "outputs": "default: d"}
_SIZES |= {"kv_heads": "heads of keys and values (default: H)", "adapter": "rank of adapters"}


def _add_yours(commands: argparse._SubParsersAction) -> None:
    # Only what is given reaches capacity(), whose defaults stand there.
    kind = {"argument_default": argparse.SUPPRESS}
    count = commands.add_parser("capacity", help="what your model or layer can hold", **kind)
    what = "a model's folder, config.json, or adapter; without it, give a layer's heads and dim"
    count.add_argument("config", nargs="?", metavar="MODEL", help=what)
    count.add_argument("--part", help="of a model of several, such as vision_config")
    for name, said in _SIZES.items():
        count.add_argument(f"--{name.replace('_', '-')}", type=int, help=said)
    count.add_argument("--adapted", help="maps with an adapter (default: qv)")
    count.add_argument("--bias", nargs="?", const="qkvo", help="maps with a bias (alone: qkvo)")
    turned = "rotary positions, of this share of a head (alone: 1)"
    count.add_argument("--rope", nargs="?", const=1.0, type=float, metavar="SHARE", help=turned)
    count.add_argument("--norm", action="store_true", help="tokens come from a LayerNorm")
    look = commands.add_parser("examine", help="what holds for your data, and what a layer meets")
    _add_file(look, heads_needed=False)
    look.add_argument("--samples", type=int, default=1000, help="subsets drawn (default: 1000)")
    look.add_argument("--picture", metavar="FILE", help="draw bounds and ranks: .png, .svg, .pdf")
    look.add_argument("--details", action="store_true", help="also what was read, and the report")
    look.add_argument("--json", action="store_true", help="print JSON instead")
    store = commands.add_parser("memorize", help="weights of a layer that stores your labels")
    _add_file(store, heads_needed=True)
    store.add_argument("--out", required=True, help="a new file, .safetensors")
    store.add_argument("--partial", action="store_true", help="write weights that miss some labels")
    numbers = "float64 weights that such numbers hold as they are; reals to 1%% (default: 1e-6)"
    store.add_argument("--keep", choices=get_args(NumberType), help=numbers)


def _capacity(given: argparse.Namespace) -> int:
    chosen = {name: value for name, value in vars(given).items() if name != "command"}
    if "config" in chosen:
        if sizes := chosen.keys() - {"config", "part", "outputs", "adapter", "adapted"}:
            name = min(sizes)
            refuse(f"--{name.replace('_', '-')}", chosen[name], "no sizes beside a model")
        print(model_capacity(**chosen))
        return 0
    if "part" in chosen:
        refuse("--part", chosen["part"], "a model's folder before it")
    if missing := {"heads", "dim"} - chosen.keys():
        refuse(f"--{min(missing)}", "nothing", "--heads and --dim, or a model's folder")
    print(capacity(**chosen))
    return 0


def _add_file(command: argparse.ArgumentParser, heads_needed: bool) -> None:
    """The file of examples and how it is read, with the defaults of load(); sizes of the layer."""
    command.add_argument("--heads", type=int, required=heads_needed, help="number of heads H")
    command.add_argument("--head-dim", type=int, help="width of a head (default: d)")
    command.add_argument("--seed", type=int, default=0, help="of all draws (default: 0)")
    command.add_argument("file", help=f"{', '.join(TAKES)}, or - for a CSV from a pipe")
    table = command.add_argument_group("tables (csv, tsv, -; npy takes --tokens alone)")
    add = table.add_argument
    add("--label", "--labels", metavar="NAME", help="column (default: the last) or array of labels")
    add("--label-kind", choices=ALLOWED["label_kind"], help="default: decimals are real")
    add("--columns", metavar="A,B", help="default: numbers, and words of few values")
    gaps = "leave out those with gaps (default: few of both)"
    add("--drop-missing", choices=ALLOWED["drop_missing"], help=gaps)
    add("--tokens", type=int, help="cut each row into so many (default: about sqrt(width))")
    add("--header", action=argparse.BooleanOptionalAction, help="names in line 1 (default: seen)")
    arrays = command.add_argument_group("arrays (npz, safetensors, pt)")
    for role in ("contexts", "queries", "mask"):
        arrays.add_argument(f"--{role}", metavar="NAME", help=f"the array of {role}")


def _read(given: argparse.Namespace) -> tuple[Loaded, str, str]:
    """The data, the words that ask for them, and the call in Python that does."""
    options = {name: vars(given)[name] for names in TAKES.values() for name in names}
    said = [
        f"--{name.replace('_', '-')}={x}" for name, x in options.items() if type(x) in (int, str)
    ]
    said += {None: [], True: ["--header"], False: ["--no-header"]}[given.header]
    if given.columns:  # between commas, in quotes if one is in a name
        names = next(csv.reader([given.columns], skipinitialspace=True))
        options["columns"] = [name.strip() for name in names]
    chosen = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    words = shlex.join([given.file, *said])
    return load(given.file, **options), words, f"load({given.file!r}{chosen})"


def _can_be_written(option: str, path: str, kinds: Iterable[str]) -> None:
    """Refuse, before the work is done, a file that could not take what comes out of it."""
    out = Path(path)
    if out.suffix not in kinds:
        refuse(option, repr(path), f"a name that ends in {', '.join(kinds)}")
    try:
        with out.open("ab") if out.exists() else tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        refuse(option, f"{path!r} ({error.strerror})", "a file in a folder that can be written to")


def _examine(given: argparse.Namespace) -> int:
    if given.picture and given.heads is None:
        refuse("--picture", given.picture, "--heads too, so that there is something to draw")
    if given.picture:
        figure = need("matplotlib.figure").Figure(figsize=(8, 3.6), layout="constrained")
        kinds = [f".{kind}" for kind in figure.canvas.get_supported_filetypes()]
        _can_be_written("--picture", given.picture, kinds)
    data, words, _ = _read(given)
    sizes = {name: vars(given)[name] for name in ("heads", "head_dim", "samples", "seed")}
    found = examine(*data[:3], mask=data.mask, **sizes, say=_bar)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if given.json:
        print(json.dumps({"read": data.summary} | json.loads(found.to_json()), indent=2))
    else:
        print(wrapped([f"data        {data.brief}", f"layer       {found.holds()}"]))
        sizes = f"--heads {found.wanted} --head-dim {found.head_dim} --out weights.safetensors"
        sizes += "" if found.sure else " --partial"  # or nothing would be written
        after = f"python -m attnmem_yours memorize {words} {sizes}"
        after = after if found.outputs is not None else "labels, without which there are no weights"
        print(f"next        {after}")  # in one piece
        print(*["", data, "", found.details] * given.details, sep="\n", end="\n" * given.details)
    if given.picture:
        found.draw(figure.subplots())
        figure.savefig(given.picture)
    return 0


def _memorize(given: argparse.Namespace) -> int:
    out, torchs = Path(given.out), need("safetensors.torch")
    if out.exists():
        refuse("--out", f"{given.out!r}, which exists", "a new file, named .safetensors")
    _can_be_written("--out", given.out, [".safetensors"])
    data, _, call = _read(given)
    sizes = {"heads": given.heads, "head_dim": given.head_dim or len(data.queries[0])}
    say = functools.partial(print, "...", file=sys.stderr, flush=True)
    options = {"seed": given.seed, "mask": data.mask, "keep": given.keep, "say": say}
    found = memorize(*data[:3], **sizes, **options)
    stored = f"{found.count} of {len(found.met)} labels, by {found.how}"
    if found.count < len(found.met) and not given.partial:
        raise ValueError(f"nothing written, only {stored}: {found.reason}; --partial writes them")
    weights = {name: tensor.contiguous() for name, tensor in found.weights._asdict().items()}
    classes = found.classes and {"classes": json.dumps([*map(str, found.classes)])}
    out.write_bytes(torchs.save(weights, metadata=classes))
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in weights.items())
    lines = [f"data        {data.brief}", f"stored      {stored}", f"weights     {out}: {shapes}"]
    print(wrapped(lines))
    inputs = "data.contexts, data.queries"
    if data.mask is not None:
        inputs += ", data.mask"
    call = f"data = {call}; print(predict({given.out!r}, {inputs}))"
    meaning = "the labels" if found.met.all() else "the labels that are stored"
    print(f"load        from attnmem_yours import load, predict; {call}  # {meaning}")
    return 0


def _bar(done: int, of: int, step: str) -> None:
    """A line for each step; on a terminal in place of the one before."""
    ends = ("\x1b[K", "\r") if sys.stderr.isatty() else ("", "\n")
    print(f"... {done + 1} of {of}: {step[:70]}{ends[0]}", end=ends[1], file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> int:
    """Do what the command line asks for."""
    exact = functools.partial(argparse.ArgumentParser, allow_abbrev=False)
    parser = exact(prog="python -m attnmem_yours", description=__doc__.replace("``", ""))
    parser.add_argument("--version", action="version", version=f"attnmem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=exact)
    _add_yours(commands)
    doers = {"capacity": _capacity, "examine": _examine, "memorize": _memorize}
    return perform(parser, doers, words)


if __name__ == "__main__":
    sys.exit(main())
