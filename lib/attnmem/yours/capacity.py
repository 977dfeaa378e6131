"""How many real labels one attention layer holds: a count from its configuration alone.

The count is the number of parameters that the layer's function shows. For one output of the layer
of the book it is ``P(H)``, a theorem. For keys and values that heads share, rotary positions,
biases and adapters it is compared with ranks of Jacobians at small sizes.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import bounds
from ..checks import check_integer, checked, refuse

CERTIFIED = "compared with Jacobian ranks at d <= 6, up to 3 groups of 3 heads, n = 2, 3, 5"
ADAPTED = "ranks 1 to 3 on one of q, k and one of v, o, at d <= 6, up to 4 heads, n = 3"
SERVED = ("q", "k", "v", "o")


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The counts of one attention layer, for free tokens.

    Attributes:
        name: Which layer.
        parameters: All its numbers.
        trained: Those that are trained: all, or those of the adapters.
        effective: Those that its function shows: a ceiling of real labels over all outputs.
        one_output: Those that one linear output shows: almost no more real labels are met.
        floor: So many real labels are met for almost all data by one output; None without a count.
        proved: What is proved of the ceiling for this kind of layer.
        floor_proved: What is proved of the floor.
    """

    name: str
    parameters: int
    trained: int
    effective: int
    one_output: int
    floor: int | None
    proved: str
    floor_proved: str

    def __str__(self) -> str:
        """A report that a person reads."""
        share = self.effective / self.trained
        floor = f"{'no':>13} floor is known {self.floor_proved}"
        if self.floor is not None:
            met = "labels of one output are met for almost all data"
            floor = f"{self.floor:>13,} {met}; {self.floor_proved}"
        lines = [
            self.name,
            f"{self.parameters:>13,} parameters, of which {self.trained:,} are trained",
            f"{self.effective:>13,} that the function shows ({share:.3f} of those trained)",
            f"{self.one_output:>13,} that one output shows, a ceiling of its labels; {self.proved}",
            floor,
        ]
        return "\n".join(lines)


@checked
def capacity(
    heads: int,
    dim: int,
    head_dim: int | None = None,
    *,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    outputs: int | None = None,
    bias: str = "",
    rope: bool | Sequence[float] = False,
    norm: bool = False,
    adapter: int | None = None,
    adapted: str = "qv",
    name: str | None = None,
) -> Capacity:
    r"""Count the parameters of an attention layer that matter, and the labels they can hold.

    With :math:`G` groups of :math:`g = H / G` heads that share keys and values, ``m = d`` (less one
    behind a LayerNorm) and ``b = 1`` with a bias of the queries, each group shows logits of
    :math:`r (m + g (m + b) - r)`, ``r = min(d_h, m)``, and values of :math:`s (m + g o - s)`, ``s =
    min(d_v, m, g o)``. Rotary positions show :math:`d_h (m + g (m + b))` less the dimension of the
    matrices that commute with the rotations, and a bias of the keys. Biases of values and outputs
    are one vector.

    Args:
        heads: Number of heads ``H``.
        dim: Width ``d`` of the tokens.
        head_dim: Width of a head ``d_h``, by default ``d / H``.
        kv_heads: Heads of keys and values ``G``, by default ``H``.
        value_dim: Width of the values, by default ``d_h``.
        outputs: Width of the layer's output, by default ``d``.
        bias: The maps that have a bias, letters of ``qkvo``.
        rope: Whether positions turn queries and keys; or the angle of each pair of coordinates, 0
            where they are not turned.
        norm: Whether tokens come from a LayerNorm.
        adapter: Rank of low-rank adapters, which alone are trained; None trains all.
        adapted: The maps that have an adapter, letters of ``qkvo``.
        name: What the layer is called in the report.

    Returns:
        The counts, with what is proved.

    Raises:
        ValueError: If a size is not an integer of at least 1, or sizes do not fit.

    Example:
        >>> capacity(12, 768, 64, bias="qkvo", norm=True).one_output
        1138933

    Source: this book; the tests compare the counts with ranks of Jacobians.
    """
    head_dim = head_dim or _divided("heads", heads, "dim", dim)
    groups = kv_heads or heads
    _divided("kv_heads", groups, "heads", heads)
    for which, letters in (("bias", bias), ("adapted", adapted)):
        if not set(letters) <= set(SERVED):
            refuse(which, repr(letters), "letters of 'qkvo'")
    value_dim, outputs = value_dim or head_dim, outputs or dim
    m = dim - norm
    check_integer("dim", dim, least=2 if norm else 1)
    angles = _angles(rope, head_dim)
    if angles and head_dim > m:
        refuse("head_dim", head_dim, f"at most {m} with rotary positions")
    layer = _Layer(heads, groups, dim, m, head_dim, value_dim, bias, angles)
    total = layer.parameters(outputs)
    effective, one = layer.effective(outputs), layer.effective(1)
    plain = groups == heads and not angles
    trained = total
    if adapter is not None:
        trained = layer.adapters(adapter, adapted, outputs)
        effective, one = (layer.adapted(adapter, adapted, o) for o in (outputs, 1))
    floor, floor_proved = layer.floor(plain) if adapter is None else (None, "with adapters")
    proved = f"certified at small sizes ({CERTIFIED})"
    if adapter is not None:
        both = {"q", "k"} <= set(adapted) or {"v", "o"} <= set(adapted)
        proved = "an upper bound, since adapters overlap" if both else f"certified ({ADAPTED})"
    if plain and not bias and not norm and adapter is None:
        proved = "proved (the capacity of one layer)"
    described = f"{heads} heads of width {head_dim}, {groups} of keys and values, d = {dim}"
    return Capacity(name or described, total, trained, effective, one, floor, proved, floor_proved)


def _divided(name: str, parts: int, whole_name: str, whole: int) -> int:
    if whole % parts:
        refuse(name, parts, f"a divisor of {whole_name} = {whole}")
    return whole // parts


def _angles(rope: bool | Sequence[float], head_dim: int) -> list[float]:
    if rope is False:
        return []
    angles = [10_000 ** (-2 * i / head_dim) for i in range(head_dim // 2)] if rope is True else rope
    if 2 * len(angles) != head_dim:
        refuse("rope", f"{len(angles)} angles", f"one for each pair of {head_dim} coordinates")
    return list(angles)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The sizes of one layer: tokens of width ``dim`` vary in ``m`` dimensions."""

    heads: int
    groups: int
    dim: int
    m: int
    head_dim: int
    value_dim: int
    bias: str
    angles: list[float]

    @property
    def each(self) -> int:
        return self.heads // self.groups

    def shapes(self, outputs: int) -> dict[str, tuple[int, int]]:
        """Rows and columns of the four maps."""
        return {
            "q": (self.dim, self.heads * self.head_dim),
            "k": (self.dim, self.groups * self.head_dim),
            "v": (self.dim, self.groups * self.value_dim),
            "o": (self.heads * self.value_dim, outputs),
        }

    def parameters(self, outputs: int) -> int:
        shapes = self.shapes(outputs)
        biases = sum(columns for letter, (_, columns) in shapes.items() if letter in self.bias)
        return sum(rows * columns for rows, columns in shapes.values()) + biases

    def effective(self, outputs: int) -> int:
        constant = outputs if "o" in self.bias else 0
        if "v" in self.bias:
            constant = constant or min(outputs, self.groups * self.value_dim)
        return self.logits() + self.values(outputs) + constant

    def values(self, outputs: int) -> int:
        """Of each group a matrix of shape ``(m, g o)`` and rank at most ``d_v``."""
        wide = self.each * outputs
        s = min(self.value_dim, self.m, wide)
        return self.groups * s * (self.m + wide - s)

    def logits(self) -> int:
        """Of each group a matrix of rank at most ``d_h``; turns show more of its factors."""
        asked = self.each * (self.m + ("q" in self.bias))  # a bias is one more coordinate
        if not self.angles:
            r = min(self.head_dim, self.m)
            return self.groups * r * (self.m + asked - r)
        often = collections.Counter(self.angles)
        still = 2 * often.pop(0, 0)
        turned = sum(2 * k for k in often.values())
        commuting = still**2 + sum(2 * k**2 for k in often.values())
        keyed = turned * ("k" in self.bias)
        return self.groups * (self.head_dim * (self.m + asked) + keyed - commuting)

    def floor(self, plain: bool) -> tuple[int | None, str]:
        """Labels that one output meets: the layer of the book, or pairs of whole groups."""
        if plain:
            found = bounds.own_context_floor(self.heads, self.head_dim, self.m)
            return found, "proved (biases zero)" if self.m == self.dim else (
                "proved for free tokens (biases zero); tokens on a sphere are not checked"
            )
        if self.groups < 2:
            return None, "with a single group, which leaves nothing to cancel"
        half = self.groups // 2
        unbiased = self.bias.replace("v", "").replace("o", "")
        pairs = dataclasses.replace(self, heads=half * self.each, groups=half, bias=unbiased)
        return pairs.effective(1), "by the same argument on pairs of groups, which cancel"

    def adapters(self, rank: int, adapted: str, outputs: int) -> int:
        return sum(rank * sum(shape) for k, shape in self.shapes(outputs).items() if k in adapted)

    def adapted(self, rank: int, adapted: str, outputs: int) -> int:
        """What adapters show: matrices of this rank, of the shapes that logits and values see."""
        r, s = min(self.head_dim, self.m), min(self.value_dim, self.m, self.each * outputs)
        seen = {
            "q": (self.m, self.heads * r),
            "k": (self.m, self.groups * r),
            "v": (self.m, self.groups * s),
            "o": (self.heads * min(self.value_dim, self.m), outputs),
        }

        def shown(letters: str, most: int) -> int:
            shapes = [seen[letter] for letter in letters if letter in adapted]
            ranks = [min(rank, *shape) for shape in shapes]
            counts = (k * (sum(shape) - k) for k, shape in zip(ranks, shapes, strict=True))
            return min(most, sum(counts))

        return shown("qk", self.logits()) + shown("vo", self.values(outputs))


# --- configurations of well-known models ----------------------------------------------------------

_BIASES = {"gpt2": "qkvo", "bert": "qkvo", "roberta": "qkvo", "distilbert": "qkvo", "vit": "qkvo"}
_BIASES |= {"deit": "qkvo", "llama": "", "mistral": "", "qwen2": "qkv", "t5": ""}
_ROTARY = ("llama", "mistral", "qwen2")


def from_config(config: str | Path | Mapping[str, Any], **others: Any) -> Capacity:
    """Count for one layer of a model, from its ``config.json``.

    Args:
        config: The file, or its contents.
        **others: Further arguments of :func:`capacity`, such as ``adapter``.

    Returns:
        The counts.

    Raises:
        ValueError: If the family of the model is not known, or a size is missing.

    Example:
        >>> from_config({"model_type": "gpt2", "n_embd": 768, "n_head": 12}).parameters
        2362368
    """
    given = dict(config) if isinstance(config, Mapping) else json.loads(Path(config).read_text())
    kind = given.get("model_type")
    if kind not in _BIASES:
        refuse("model_type", repr(kind), f"one of {', '.join(_BIASES)}")

    def first(*names: str, default: Any = None) -> Any:
        for name in names:
            if given.get(name) is not None:
                return given[name]
        if default is None:
            refuse("config", f"none of {', '.join(names)}", "one of them")
        return default

    heads = first("num_attention_heads", "n_head", "num_heads", "n_heads")
    dim = first("hidden_size", "n_embd", "d_model", "dim")
    bias = _BIASES[kind]
    if kind in ("llama", "mistral") and given.get("attention_bias"):
        bias = "qkvo"
    if kind in ("vit", "deit") and given.get("qkv_bias") is False:
        bias = "o"
    head_dim = first("head_dim", "d_kv", default=dim // heads)
    kv_heads = first("num_key_value_heads", default=heads)
    settings = {"kv_heads": kv_heads, "bias": bias, "name": given.get("_name_or_path") or kind}
    if kind in _ROTARY:
        base = given.get("rope_theta") or 10_000.0
        settings["rope"] = [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    settings["norm"] = kind not in (*_ROTARY, "t5")
    return capacity(**({"heads": heads, "dim": dim, "head_dim": head_dim} | settings | others))
