"""How many numbers of your model matter, and the labels this allows, from its configuration."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attnmem.checks import checked, reading, refuse
from attnmem.terminal import wrapped
from attnmem.theory.blocks import Model, Part
from attnmem.theory.capacity import Capacity
from attnmem.theory.counts import class_capacity
from attnmem.theory.floors import Floor, model_floor

from .families import read

# What adapters call the maps of attention.
_MAPS = {"query": "q", "key": "k", "value": "v", "out_proj": "o", "out_lin": "o"}
for _letter in "qkvo":
    _MAPS |= dict.fromkeys((_letter, f"{_letter}_proj", f"{_letter}_lin"), _letter)
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
        """At most so many; beyond ``matter / outputs`` examples almost no real labels fit."""
        return self.by_eps + sum(part.times * part.matter for part in self.parts)

    @property
    def floor(self) -> Floor | None:
        """Examples whose labels all fit, whatever these are; not known for adapters."""
        return None if self.adapted else model_floor(self.model, self.outputs)

    @property
    def layer(self) -> Capacity | None:
        """One attention layer by itself; not with norms of queries, or biases of norms alone."""
        block = self.model.blocks[0]
        layer = block.attention
        if layer.normed:
            return None
        biased = "qkv" if layer.turned else "qv"  # maps whose biases absorb that of a norm
        if block.shift and not {*biased} <= {*layer.bias}:
            return None
        return layer.counted(self.model.name, layer.dim, None, "")

    @property
    def edits(self) -> int | None:
        """Facts that one attention layer takes while its attention stays, each kept exactly."""
        block = self.model.blocks[0]
        return None if self.adapted else block.attention.edits(block.shift)

    def __str__(self) -> str:
        """A report that a person reads: the answer, then where the numbers are, then asides."""
        model = self.model
        heads, dim = model.blocks[0].attention.heads, model.blocks[0].attention.dim
        lines = [f"{model.name}: {len(model.blocks)} x {heads} heads, d = {dim}", ""]
        lines += self._answer()
        if not self.adapted:
            lines += self._own_words()
            lines += self._one_layer()
        lines += ["", *self._table()]
        if not self.adapted:
            lines += self._own_read_out()
        lines += self._asides()
        return wrapped(lines, indent=2)

    def _answer(self) -> list[str]:
        most, floor = self.matter // self.outputs, self.floor
        stores, given = "one number", "it is trained"
        if self.outputs > 1:
            stores = f"{self.outputs:,} numbers"
        if self.adapted:
            given = f"adapters of {self.adapted} are trained"
        lines = []
        if floor and floor.examples:
            lines.append(
                f"It can store {stores} for each of {floor.examples:,} inputs, whatever the "
                f"numbers are ({floor.evidence})."
            )
        lines.append(
            f"For more than {most:,} inputs it can store almost no choice of numbers, however "
            f"{given} (proved)."
        )
        return lines

    def _own_words(self) -> list[str]:
        model = self.model
        if model.tied is None or model.words < 2:
            return []
        texts = _about(class_capacity(model.blocks[0].attention.dim, model.words))
        trained = f"the read-out of its {model.words:,} words is trained"
        if model.tied:
            trained = f"a read-out of their own is trained for its {model.words:,} words"
        return [
            f"If only {trained}, about {texts} texts can be given a next word each (a formula, not "
            "a theorem)."
        ]

    def _one_layer(self) -> list[str]:
        lines, layer = [], self.layer
        if layer is not None and layer.floor:
            lines.append(
                f"Any {layer.floor:,} numbers fit (compared with ranks). Of more than "
                f"{layer.one_output:,} almost no choice does (proved)."
            )
            lines.append(
                f"In bits: at least half of all choices of {2 * layer.floor:,} yes-or-no answers "
                "fit (from the same ranks)."
            )
        if self.edits:
            lines.append(
                f"While its attention stays, it takes {self.edits:,} edits of one number, each "
                "exact (proved for plain layers). At half of them other answers have moved by "
                "about a label or more."
            )
        if lines:
            lines = ["", "One attention layer alone, read by one output:", *lines]
        return lines

    def _table(self) -> list[str]:
        matter = f"{self.matter:,} of {self.parameters:,}"
        share = f"{self.matter / self.parameters:.1%}"
        lines = [f"At most {matter} trained numbers matter ({share}):"]
        lines.append(f"{'numbers':>20}{'matter':>16}")
        for part in self.parts:
            times = f"{part.times} x" if part.times > 1 else ""
            matter = part.matter + part.scales
            lines.append(f"{times:>5}{part.numbers:>15,}{matter:>16,}  {part.name}")
        return lines

    def _own_read_out(self) -> list[str]:
        model = self.model
        if model.tied is None:
            return []
        own = dataclasses.replace(self, parts=tuple(model.parts(None)))
        tied = "tied to their vectors" if model.tied else "by a map of its own"
        counts = f"at most {own.matter:,} of {own.parameters:,} matter"
        return [f"Read by all its {model.words:,} words, {tied}: {counts}."]

    def _asides(self) -> list[str]:
        exactness = "At nearly all small sizes compared, exactly so many matter."
        if self.adapted or any(block.homogeneous for block in self.model.blocks):
            exactness = "Perhaps fewer matter."
        lines = [f"{exactness} Poolers, deeper heads and convolutions are not counted."]
        if self.by_eps:
            do = "does" if self.by_eps == 1 else "do"
            lines.append(f"{self.by_eps:,} of what matters {do} so only because norms add an eps.")
        return lines


def _about(count: float) -> str:
    """Three digits of it: no formula is better than that."""
    return f"{int(float(f'{count:.3g}')):,}"


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
    path = None if isinstance(config, Mapping) else _path(Path(config))
    with reading(path or "config", "a model that is counted"):
        contents = json.loads(path.read_bytes()) if path else config
        if not isinstance(contents, Mapping):
            refuse("contents", type(contents).__name__, "an object of names and values")
        if "model_type" in contents or not contents.keys() & {"peft_type", _BASE}:
            model = read(contents, part)
        else:
            if adapter:
                refuse("adapter", adapter, "none beside an adapter's folder")
            adapter, adapted = _adapter(contents)
            folder = path.parent if path else Path()
            model = _base_model(contents, folder, part, adapter, adapted)
    if adapter is None:
        return ModelCapacity(model, tuple(model.parts(outputs)), outputs)
    adapted = _in_order(adapted)
    return ModelCapacity(model, tuple(_adapters(model, adapter, adapted)), outputs, adapted)


def _path(path: Path) -> Path:
    """The file of a configuration, or of an adapter, by its own name or that of its folder."""
    if path.is_dir():
        folder, path = path, path / "config.json"
        if not path.exists() and (folder / "adapter_config.json").exists():
            path = folder / "adapter_config.json"
    if not path.is_file():
        refuse("config", f"no file {path}", "a model's folder or its config.json, on this machine")
    return path


def _in_order(maps: Iterable[str]) -> str:
    return "".join(letter for letter in "qkvo" if letter in maps)


def _adapter(settings: Mapping[str, Any]) -> tuple[int, str]:
    """Rank and maps of a PEFT adapter of low rank."""
    counted = dict.fromkeys(_OTHERS.split()) | {"peft_type": "LORA", "bias": "none"}
    for name, value in counted.items():
        if settings.get(name) and settings[name] != value:
            expected = f"{value}, as other adapters are not counted"
            refuse(name, f"{settings[name]!r:.60}", expected)
    rank, names = settings.get("r"), settings.get("target_modules")
    if type(rank) is not int or rank < 1:
        refuse("r", f"{rank!r:.60}", "an integer >= 1")
    if not isinstance(names, list) or not {*map(str, names)} <= _MAPS.keys() or not names:
        expected = "maps of attention; those among them: capacity FOLDER --adapter R --adapted qv"
        refuse("target_modules", f"{names!r:.60}", expected)
    return rank, _in_order({_MAPS[name] for name in names})


def _base_model(
    settings: Mapping[str, Any], folder: Path, part: str, adapter: int, adapted: str
) -> Model:
    """The model that an adapter changes, whose folder is beside the adapter's or here."""
    name = settings.get(_BASE)
    for parent in (folder, Path()):
        path = parent / str(name) / "config.json"
        if path.is_file():
            return model_capacity(path, part=part).model
    expected = f"its folder here, or capacity FOLDER --adapter {adapter} --adapted {adapted}"
    refuse(_BASE, f"{name!r:.60}", expected)


def _adapters(model: Model, rank: int, adapted: str) -> Iterator[Part]:
    for block, times in Counter(model.blocks).items():
        layer = block.attention
        outputs, shapes = layer.token_dim, layer.shapes(layer.dim)
        numbers = sum(rank * sum(shapes[letter]) for letter in adapted)
        if block.shift:  # a map of frozen bias reads d dimensions behind a norm with a bias
            layer = dataclasses.replace(layer, token_dim=layer.dim)
        matter = layer.shown(outputs, rank, adapted)
        yield Part(f"adapters of {adapted}", numbers, matter, times=times)
