"""How many numbers of your model matter, and the labels this allows, from its configuration."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attnmem.checks import checked, reading, refuse
from attnmem.terminal import wrapped
from attnmem.theory.blocks import Model, Part
from attnmem.theory.capacity import Capacity

from .families import read

# What adapters call the maps of attention.
_MAPS = {f"{x}{end}": x for x in "qkvo" for end in ("_proj", "", "_lin")}
_MAPS |= {"query": "q", "key": "k", "value": "v", "out_proj": "o", "out_lin": "o"}
_BASE = "base_model_name_or_path"
# Fields of adapters with which more is trained, or otherwise.
_OTHERS = "rank_pattern use_dora modules_to_save layers_to_transform layer_replication lora_bias"
_OTHERS += " trainable_token_indices target_parameters exclude_modules use_qalora use_bdlora"


@dataclasses.dataclass(frozen=True)
class ModelCapacity:
    """At most how many numbers of a model matter, part by part."""

    model: Model
    parts: tuple[Part, ...]
    outputs: int = 1
    adapted: str = ""  # maps with adapters, which alone are trained

    @property
    def parameters(self) -> int:
        """The numbers that are trained, a read-out of ``outputs`` among them."""
        return sum(part.times * part.numbers for part in self.parts)

    @property
    def by_eps(self) -> int:
        """At most so many of them matter only since norms have an eps."""
        return sum(part.times * part.scales for part in self.parts)

    @property
    def matter(self) -> int:
        """At most so many; beyond ``matter / outputs`` examples almost no real labels are met."""
        return self.by_eps + sum(part.times * part.matter for part in self.parts)

    @property
    def layer(self) -> Capacity | None:
        """One attention layer by itself; not with norms of queries, or biases of norms alone."""
        layer, shift = self.model.blocks[0].attention, self.model.blocks[0].shift
        alone = shift and not {*"qv", *"k" * bool(layer.turned)} <= {*layer.bias}
        counted = not (layer.normed or alone)
        return layer.counted(self.model.name, layer.dim, None, "") if counted else None

    def __str__(self) -> str:
        """A report that a person reads: the answer, then where the numbers are."""
        model, layer, most = self.model, self.model.blocks[0].attention, self.matter // self.outputs
        read = "one output" if self.outputs == 1 else f"{self.outputs:,} outputs"
        what = f"adapters of {self.adapted} alone" if self.adapted else f"with a read-out of {read}"
        eps = f" ({self.by_eps:,} of them only as norms have an eps)" if self.by_eps else ""
        fewer = self.adapted or any(block.homogeneous for block in model.blocks)
        below = "It may be fewer." if fewer else "At nearly all small sizes it is so many."
        lines = [
            f"{model.name}: {len(model.blocks)} x {layer.heads} heads, d = {layer.dim}",
            f"Of {self.parameters:,} numbers, {what}, at most {self.matter:,} matter{eps}. So "
            f"random real labels of more than {most:,} examples are almost never met: proved. "
            f"({below} Counted are these parts alone, no pooler, deeper head or convolution.)",
            f"{'numbers':>20}{'matter':>16}",
        ]
        for name, numbers, matter, by_eps, times in self.parts:
            each = f"{times} x" if times > 1 else ""
            lines.append(f"{each:>5}{numbers:>15,}{matter + by_eps:>16,}  {name}")
        if self.adapted:
            return wrapped(lines)
        if model.tied is not None:
            own = dataclasses.replace(self, parts=tuple(model.parts(None)))
            tied = "tied to their vectors" if model.tied else "by a map of its own"
            lines.append(
                f"Read by all its {model.words:,} words, {tied}: at most {own.matter:,} of "
                f"{own.parameters:,}."
            )
        if (one := self.layer) and one.floor:
            lines.append(
                f"One attention layer, by itself: at most {one.one_output:,} labels at one output "
                f"(proved), and at least {one.floor:,} (compared with ranks)."
            )
        return wrapped(lines)


@checked
def model_capacity(
    config: str | Path | Mapping[str, Any],
    *,
    part: str = "",
    outputs: int = 1,
    adapter: int | None = None,
    adapted: str = "qv",
) -> ModelCapacity:
    """Count the numbers of a model that matter, at most, and the labels that they can hold.

    Args:
        config: A model's ``config.json``, its folder or its contents; or an adapter's folder or
            ``adapter_config.json``, whose base model is a folder here.
        part: That of a model of several, such as ``vision_config``.
        outputs: So many numbers are read at a token.
        adapter: Rank of low-rank adapters of the maps ``adapted`` of all attention, letters of
            ``qkvo``. They alone are trained.

    Raises ``ValueError`` for a model that is not counted, with what can be done instead.

    Example:
        >>> sizes = {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}
        >>> model_capacity({"model_type": "gpt2", "n_positions": 1024} | sizes).parameters
        124440576
    """
    if not adapted or not {*"qkvo"}.issuperset(adapted):
        refuse("adapted", repr(adapted), "letters of 'qkvo'")
    path = None if isinstance(config, Mapping) else Path(config)
    if path and path.is_dir():
        names = (path / "config.json", path / "adapter_config.json")
        path = next((name for name in names if name.exists()), names[0])
    if path and not path.is_file():
        refuse("config", f"no file {path}", "a model's folder or its config.json, on this machine")
    with reading(path or "config", "a model that is counted"):
        given = json.loads(path.read_bytes()) if path else config
        if not isinstance(given, Mapping):
            refuse("contents", type(given).__name__, "an object of names and values")
        if "model_type" in given or not given.keys() & {"peft_type", _BASE}:
            model = read(given, part)
        else:
            if adapter:
                refuse("adapter", adapter, "none beside an adapter's folder")
            adapter, adapted = _adapter(given)
            how = f"its folder here, or capacity FOLDER --adapter {adapter} --adapted {adapted}"
            at = [(path or Path()).parent, Path()]
            found = [x for y in at if (x := y / str(given.get(_BASE)) / "config.json").is_file()]
            if not found:
                refuse(_BASE, f"{given.get(_BASE)!r:.60}", how)
            model = model_capacity(found[0], part=part).model
    adapted = "".join(x for x in "qkvo" if x in adapted) if adapter else ""
    parts = _adapters(model, adapter, adapted) if adapter else model.parts(outputs)
    return ModelCapacity(model, tuple(parts), outputs, adapted)


def _adapter(given: Mapping[str, Any]) -> tuple[int, str]:
    """Rank and maps of a PEFT adapter of low rank."""
    usual = dict.fromkeys(_OTHERS.split()) | {"peft_type": "LORA", "bias": "none"}
    for name, value in usual.items():
        if (found := given.get(name)) and found != value:
            refuse(name, f"{found!r:.60}", f"{value}, as other adapters are not counted")
    rank, names = given.get("r"), given.get("target_modules")
    if type(rank) is not int or rank < 1:
        refuse("r", f"{rank!r:.60}", "an integer >= 1")
    if not isinstance(names, list) or not {*map(str, names)} <= _MAPS.keys() or not names:
        what = "maps of attention; those among them: capacity FOLDER --adapter R --adapted qv"
        refuse("target_modules", f"{names!r:.60}", what)
    return rank, "".join(x for x in "qkvo" if x in {_MAPS[name] for name in names})


def _adapters(model: Model, rank: int, adapted: str) -> Iterator[Part]:
    for block, times in Counter(model.blocks).items():
        layer, m = block.attention, block.attention.token_dim
        # Behind a norm with a bias, a map of frozen bias reads d dimensions.
        read = dataclasses.replace(layer, token_dim=layer.dim) if block.shift else layer
        numbers = rank * sum(sum(layer.shapes(layer.dim)[x]) for x in adapted)
        yield Part(f"adapters of {adapted}", numbers, read.shown(m, rank, adapted), times=times)
