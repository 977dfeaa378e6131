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
from typing import Any, get_args

from attnmem import __version__
from attnmem.checks import need, refuse
from attnmem.terminal import parser_of, perform, wrapped
from attnmem.theory.capacity import capacity

from .examination import Examination, examine
from .files import ALLOWED, TAKES, Loaded, load
from .memorization import Memorized, NumberType, memorize
from .models import model_capacity

_SIZES = {
    "heads": "number of heads H",
    "dim": "width d of tokens",
    "layers": "default: 1",
    "head_dim": "default: d / H",
    "value_dim": "default: head-dim",
    "outputs": "default: d",
    "kv_heads": "heads of keys and values (default: H)",
    "adapter": "rank of adapters",
}
_OF_MODELS = {"config", "part", "outputs", "adapter", "adapted"}  # options beside a model's folder
_STEP = 70  # letters of a step that is shown: with the count before it, a line of a terminal


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# --- what the commands take -----------------------------------------------------------------------


def _add_capacity(commands: argparse._SubParsersAction) -> None:
    # Only what is given reaches capacity(), whose defaults stand there.
    about = "what your model or layer can hold"
    command = commands.add_parser("capacity", help=about, argument_default=argparse.SUPPRESS)
    model = "a model's folder, config.json, or adapter; without it, give a layer's heads and dim"
    command.add_argument("config", nargs="?", metavar="MODEL", help=model)
    command.add_argument("--part", help="of a model of several, such as vision_config")
    for name, meaning in _SIZES.items():
        command.add_argument(_option(name), type=int, help=meaning)
    command.add_argument("--adapted", help="maps with an adapter (default: qv)")
    bias = "maps with a bias (alone: qkvo)"
    command.add_argument("--bias", nargs="?", const="qkvo", help=bias)
    rope = "rotary positions, of this share of a head (alone: 1)"
    command.add_argument("--rope", nargs="?", const=1.0, type=float, metavar="SHARE", help=rope)
    command.add_argument("--norm", action="store_true", help="tokens come from a LayerNorm")


def _add_examine(commands: argparse._SubParsersAction) -> None:
    about = "what holds for your data, and what a layer stores"
    command = commands.add_parser("examine", help=about)
    _add_file(command, heads_needed=False)
    command.add_argument("--samples", type=int, default=1000, help="subsets drawn (default: 1000)")
    picture = "draw bounds and ranks: .png, .svg, .pdf"
    command.add_argument("--picture", metavar="FILE", help=picture)
    command.add_argument(
        "--details", action="store_true", help="also what was read, and the report"
    )
    command.add_argument("--json", action="store_true", help="print JSON instead")


def _add_memorize(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("memorize", help="weights of a layer that stores your labels")
    _add_file(command, heads_needed=True)
    command.add_argument("--out", required=True, help="a new file, .safetensors")
    partial = "write weights that miss some labels"
    command.add_argument("--partial", action="store_true", help=partial)
    numbers = "float64 weights that such numbers hold as they are; reals to 1%% (default: 1e-6)"
    command.add_argument("--keep", choices=get_args(NumberType), help=numbers)


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


# --- what they do ---------------------------------------------------------------------------------


def _capacity(arguments: argparse.Namespace) -> int:
    options = {name: value for name, value in vars(arguments).items() if name != "command"}
    if "config" in options:
        if sizes := options.keys() - _OF_MODELS:
            name = min(sizes)
            refuse(_option(name), options[name], "no sizes beside a model")
        print(model_capacity(**options))
        return 0
    if "part" in options:
        refuse("--part", options["part"], "a model's folder before it")
    if missing := {"heads", "dim"} - options.keys():
        refuse(f"--{min(missing)}", "nothing", "--heads and --dim, or a model's folder")
    print(capacity(**options))
    return 0


def _reading(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of load(), None where nothing is given."""
    options = {name: vars(arguments)[name] for names in TAKES.values() for name in names}
    if arguments.columns:  # between commas, in quotes if one is in a name
        names = next(csv.reader([arguments.columns], skipinitialspace=True))
        options["columns"] = [name.strip() for name in names]
    return options


def _words(arguments: argparse.Namespace) -> str:
    """The file and how it is read, as one types it."""
    typed = [arguments.file]
    for name in _reading(arguments):
        value = vars(arguments)[name]
        if type(value) in (int, str):
            typed.append(f"{_option(name)}={value}")
    if arguments.header is not None:
        typed.append("--header" if arguments.header else "--no-header")
    return shlex.join(typed)


def _call(arguments: argparse.Namespace) -> str:
    """The same in Python."""
    options = {name: value for name, value in _reading(arguments).items() if value is not None}
    chosen = [f"{name}={value!r}" for name, value in options.items()]
    return f"load({', '.join([repr(arguments.file), *chosen])})"


def _can_be_written(option: str, path: str, endings: Iterable[str]) -> None:
    """Refuse, before the work is done, a file that could not take what comes out of it."""
    out = Path(path)
    if out.suffix not in endings:
        refuse(option, repr(path), f"a name that ends in {', '.join(endings)}")
    try:
        with out.open("ab") if out.exists() else tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        refuse(option, f"{path!r} ({error.strerror})", "a file in a folder that can be written to")


def _examine(arguments: argparse.Namespace) -> int:
    if arguments.picture and arguments.heads is None:
        refuse("--picture", arguments.picture, "--heads too, so that there is something to draw")
    if arguments.picture:
        figure = need("matplotlib.figure").Figure(figsize=(8, 3.6), layout="constrained")
        endings = [f".{ending}" for ending in figure.canvas.get_supported_filetypes()]
        _can_be_written("--picture", arguments.picture, endings)
    data = load(arguments.file, **_reading(arguments))
    report = examine(
        data.contexts,
        data.queries,
        data.labels,
        mask=data.mask,
        heads=arguments.heads,
        head_dim=arguments.head_dim,
        samples=arguments.samples,
        seed=arguments.seed,
        say=_bar,
    )
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"read": data.summary} | json.loads(report.to_json()), indent=2))
    else:
        print(_answer(data, report, _words(arguments)))
        if arguments.details:
            print("", data, "", report.details, sep="\n")
    if arguments.picture:
        report.draw(figure.subplots())
        figure.savefig(arguments.picture)
    return 0


def _answer(data: Loaded, report: Examination, source: str) -> str:
    """Three lines, the last one in one piece."""
    lines = wrapped([f"data        {data.brief}", f"layer       {report.holds()}"])
    if report.outputs is None:
        return f"{lines}\nnext        labels, without which there are no weights"
    sizes = f"--heads {report.wanted} --head-dim {report.head_dim} --out weights.safetensors"
    if not report.sure:  # or nothing would be written
        sizes += " --partial"
    return f"{lines}\nnext        python -m attnmem_yours memorize {source} {sizes}"


def _memorize(arguments: argparse.Namespace) -> int:
    out, torchs = Path(arguments.out), need("safetensors.torch")
    if out.exists():
        refuse("--out", f"{arguments.out!r}, which exists", "a new file, named .safetensors")
    _can_be_written("--out", arguments.out, [".safetensors"])
    data = load(arguments.file, **_reading(arguments))
    memorized = memorize(
        data.contexts,
        data.queries,
        data.labels,
        heads=arguments.heads,
        head_dim=arguments.head_dim or len(data.queries[0]),
        seed=arguments.seed,
        mask=data.mask,
        keep=arguments.keep,
        say=functools.partial(print, "...", file=sys.stderr, flush=True),
    )
    stored = f"{memorized.count} of {len(memorized.met)} labels, by {memorized.how}"
    if not memorized.met.all() and not arguments.partial:
        reason = f"only {stored}: {memorized.reason}"
        raise ValueError(f"nothing written, {reason}; --partial writes them")
    weights = {name: W.contiguous() for name, W in memorized.weights._asdict().items()}
    metadata = None
    if memorized.classes is not None:
        metadata = {"classes": json.dumps([*map(str, memorized.classes)])}
    out.write_bytes(torchs.save(weights, metadata=metadata))
    shapes = ", ".join(f"{name} {tuple(W.shape)}" for name, W in weights.items())
    lines = [f"data        {data.brief}", f"stored      {stored}", f"weights     {out}: {shapes}"]
    print(wrapped(lines))
    print(f"load        {_prediction(arguments, data, memorized)}")
    return 0


def _prediction(arguments: argparse.Namespace, data: Loaded, memorized: Memorized) -> str:
    """The line of Python that gives the labels back."""
    inputs = "data.contexts, data.queries"
    if data.mask is not None:
        inputs += ", data.mask"
    meaning = "the labels" if memorized.met.all() else "the labels that are stored"
    predicted = f"print(predict({arguments.out!r}, {inputs}))  # {meaning}"
    imported = "from attnmem_yours import load, predict"
    return f"{imported}; data = {_call(arguments)}; {predicted}"


def _bar(done: int, steps: int, step: str) -> None:
    """A line for each step; on a terminal in place of the one before."""
    line = f"... {done + 1} of {steps}: {step[:_STEP]}"
    if sys.stderr.isatty():
        print(f"{line}\x1b[K", end="\r", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> int:
    """Do what the command line asks for."""
    parser, commands = parser_of("attnmem_yours", __doc__, __version__)
    _add_capacity(commands)
    _add_examine(commands)
    _add_memorize(commands)
    return perform(
        parser, {"capacity": _capacity, "examine": _examine, "memorize": _memorize}, words
    )


if __name__ == "__main__":
    sys.exit(main())
