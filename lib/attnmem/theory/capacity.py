"""How many real labels one attention layer holds: a count from its sizes alone.

It is the number of parameters that the layer's function shows: ``P(H)`` for the layer of the book.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ..checks import Range, check_integer, check_number, checked, refuse
from ..core import bounds
from ..core.bounds import low_rank_dim
from ..terminal import wrapped

_COMPARED = "compared with ranks at d = 3 and 4, up to 4 heads, contexts of 3 tokens"
_EVERY = frozenset("qkvo")


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The counts of one attention layer, for examples of one query with a context of its own.

    ``floor`` is met for almost all data, with biases that are zero or undo a LayerNorm's shift.
    """

    name: str
    parameters: int
    trained: int  # all, or those of the adapters
    effective: int  # those of them that the layer's function shows, over all outputs
    one_output: int  # those of one output: beyond so many examples almost no real labels are met
    floor: int | None
    proved: str  # what is proved of both counts, and what is only compared
    floor_proved: str
    layers: int = 1
    deep: int | None = None  # a ceiling of so many layers, for one output at the last token

    def __str__(self) -> str:
        """A report that a person reads."""
        lines = [
            f"{self.parameters:>13,} parameters, of which {self.trained:,} are trained",
            f"{self.effective:>13,} of these matter at most ({self.effective / self.trained:.3f})",
            f"{self.one_output:>13,} matter for one output, a ceiling of its real labels",
            f"{'':12}({self.proved})",
            f"{'no' if self.floor is None else f'{self.floor:,}':>13} floor of these labels",
            f"{'':12}({self.floor_proved})",
        ]
        if self.floor:
            signs = "signs (two classes): at least half of all choices of so many"
            lines.insert(-1, f"{2 * self.floor:>13,} {signs} are met")
        if self.deep is not None:
            where = "such layers, a ceiling (proved)"
            lines.append(f"{self.deep:>13,} matter for one output of {self.layers} {where}")
            lines.append(f"{'':12}(with skip connections and a read-out, unlike above; no norm)")
        return wrapped([self.name, *lines])


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
    rope: bool | float = False,
    norm: bool = False,
    adapter: int | None = None,
    adapted: str = "qv",
    layers: Annotated[int, Range(1, 10_000)] = 1,
    name: str | None = None,
) -> Capacity:
    r"""Count the parameters of an attention layer that matter, and the labels they can hold.

    Tokens vary in ``m = d`` dimensions, or ``d - 1`` behind a LayerNorm. Each of the :math:`G`
    groups of :math:`g = H / G` heads shares keys and values. It shows logits of :math:`r (m + g (m
    + b) - r)`, where ``r = min(d_h, m)`` and ``b = 1`` with a bias of the queries, and values of
    :math:`s (m + g o - s)`, where ``s = min(d_v, m, g o)``. Rotary positions show more of the
    logits. By default ``d_h = d / H``, ``G = H``, ``d_v = d_h`` and ``o = d``.

    Args:
        bias: The maps that have a bias, letters of ``qkvo``.
        rope: Share of a head's coordinates that rotary positions turn, from 0 to 1, each pair by an
            angle of its own.
        norm: Whether tokens come from a LayerNorm, whose shift biases can undo.
        adapter: Rank of low-rank adapters of the maps ``adapted``, which alone are trained.
        layers: More than one, with skip connections, are counted for plain heads only.

    Example:
        >>> capacity(12, 768, bias="qkvo", norm=True).one_output
        1138933
    """
    check_integer("dim", dim, least=3 if norm else 1)
    check_number("rope", int(rope) if isinstance(rope, bool) else rope, least=0, most=1)
    for which, letters in (("bias", bias), ("adapted", adapted)):
        if not _EVERY.issuperset(letters):
            refuse(which, repr(letters), "letters of 'qkvo'")
    if adapter and not adapted:
        refuse("adapted", "no map", "at least one letter of 'qkvo'")
    head_dim = head_dim or _divided("heads", heads, "dim", dim)
    value_dim = value_dim or head_dim
    groups = kv_heads or heads
    each = _divided("kv_heads", groups, "heads", heads)
    m, turned = dim - norm, round(rope * head_dim)
    layer = LayerSizes(dim, m, groups, each, head_dim, value_dim, turned, bias)
    if turned % 2 or (turned and head_dim > m):
        refuse("head_dim", head_dim, f"at most {m} and turned in pairs with rotary positions")
    if layers > 1 and (bias or norm or adapter or not layer.plain):
        refuse("layers", layers, "1 for this kind of layer; several are counted for plain heads")
    name = name or f"{heads} heads of width {head_dim}, {groups} of keys and values, d = {dim}"
    deep = bounds.deep_ceiling([heads] * layers, head_dim, value_dim, dim) if layers > 1 else None
    return layer.counted(name, outputs or dim, adapter, adapted if adapter else "", layers, deep)


def _divided(name: str, parts: int, whole_name: str, whole: int) -> int:
    if whole % parts:
        refuse(name, parts, f"a divisor of {whole_name} = {whole}")
    return whole // parts


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """The sizes of one layer: ``each`` heads of a group share their keys and values."""

    dim: int
    m: int  # the dimensions in which tokens vary
    groups: int
    each: int
    head_dim: int
    value_dim: int
    turned: int = 0  # coordinates of a head that positions turn
    bias: str = ""
    normed: str = ""  # an RMSNorm of queries and keys: of each ``head``, or of ``all`` together

    @property
    def heads(self) -> int:
        """All query heads."""
        return self.groups * self.each

    @property
    def asked(self) -> int:
        """Coordinates of a group's queries: a bias is one more, which is always one."""
        return self.each * (self.m + ("q" in self.bias))

    @property
    def norms(self) -> int:
        """Weights of the norms of queries and keys."""
        each = {"": 0, "head": 2, "all": self.heads + self.groups}[self.normed]
        return each * self.head_dim

    @property
    def scales(self) -> int:
        """Scales of the maps that the norms of queries and keys ignore."""
        return {"": 0, "head": self.heads + self.groups, "all": 2}[self.normed]

    def shapes(self, outputs: int) -> dict[str, tuple[int, int]]:
        """Rows and columns of the four maps."""
        keys, values = self.groups * self.head_dim, self.groups * self.value_dim
        maps = {"q": (self.dim, self.each * keys), "k": (self.dim, keys)}
        return maps | {"v": (self.dim, values), "o": (self.each * values, outputs)}

    def numbers(self, maps: str, outputs: int | None = None) -> int:
        """Parameters of some maps and their biases, with norms of queries and keys."""
        shapes = {x: shape for x, shape in self.shapes(outputs or self.dim).items() if x in maps}
        total = sum(d_out * (d + (x in self.bias)) for x, (d, d_out) in shapes.items())
        return total + self.norms * ("q" in maps)

    def counted(self, name, outputs, adapter, adapted, *several) -> Capacity:
        """The counts of a layer with these sizes, in words and numbers."""
        shapes, total = self.shapes(outputs), self.numbers("qkvo", outputs)
        trained = sum(adapter * sum(shapes[x]) for x in {*adapted}) if adapter else total
        shown = [self.shown(seen, adapter, adapted) for seen in (outputs, 1)]
        floor = None if adapter else self.floor()
        return Capacity(name, total, trained, *shown, floor, *self.evidence(adapted), *several)

    # The last token x' of a context asks, and the softmax ignores what all tokens add alike. So the
    # outputs depend on the weights only through the logits of each group, its values, and constants
    # that attention passes on, since its weights sum to one. Their numbers add up.

    def shown(self, outputs: int, adapter: int | None = None, adapted: str = "") -> int:
        """Numbers of the weights, or of the adapters, that so many outputs show."""
        if adapter is None:
            return self.logits() + self.values(outputs)
        # An adapter adds a matrix of this rank to one map. The others show it up to their own
        # ranks: each head's K shows min(d_h, m) columns of Q, the queries of a group show columns
        # of K, its W show columns of V, and its V shows rows of W. The bias of the values shows one
        # more row of W where V has a kernel.
        heads, d_v = self.heads, self.value_dim
        shows = self.head_dim if self.turned or self.normed else min(self.head_dim, self.m)
        beside = "v" in self.bias and d_v > self.m
        seen = {
            "q": (self.m, heads * shows),
            "k": (self.m, self.groups * min(self.head_dim, self.asked)),
            "v": (self.m, self.groups * min(d_v, self.each * outputs)),
            "o": (heads * min(d_v, self.m) + beside, outputs),
        }
        own = {x: low_rank_dim(adapter, *seen[x]) if x in adapted else 0 for x in seen}
        # Both factors of one product overlap; the product itself is the other bound.
        logits = min(own["q"] + own["k"], self.logits())
        return logits + min(own["v"] + own["o"], self.values(outputs))

    def logits(self) -> int:
        """Numbers that the logits show."""
        # The logits of a group are x^T K [Q_1 .. Q_g]^T (x', 1), a matrix of shape (m, g (m + b))
        # and rank at most d_h. A bias of the keys adds the same to all tokens.
        # A token t places back is turned: each pair of coordinates is a complex one, which adds the
        # real part of exp(i t angle) (k^* x) (q x'). Different angles are told apart by different
        # t, so each pair shows its complex matrix k q^* of rank one, twice as many real numbers.
        # Its bias of the keys is one more coordinate, as it is turned too. The coordinates that
        # are not turned are as before.
        keys = self.m + ("k" in self.bias)
        if self.normed:
            # Norms ignore scales of the maps. Of the norms' weights g and g' the logits show g g'
            # at each coordinate, and of each turned pair three numbers.
            maps = self.groups * self.head_dim * (self.asked + keys) - self.scales
            shared = 1 if self.normed == "head" else self.groups
            return maps + self.norms - shared * (self.head_dim - self.turned // 2)
        turned = self.turned * low_rank_dim(1, keys, self.asked)
        return self.groups * (
            turned + low_rank_dim(self.head_dim - self.turned, self.m, self.asked)
        )

    def values(self, outputs: int) -> int:
        """Numbers that the values show."""
        # V [W_1 .. W_g] of a group has the shape (m, g o), and its rank is at most d_v.
        maps = self.groups * low_rank_dim(self.value_dim, self.m, self.each * outputs)
        return maps + self.constants(outputs)

    def constants(self, outputs: int) -> int:
        """Numbers that constants show, which attention passes on."""
        # The bias of the outputs is one vector. Those of the values reach b (W_1 + .. + W_g) of
        # each group, G d_v dimensions; if d_v > m, W_h also moves b W_h where V W_h stays.
        if "o" in self.bias or ("v" in self.bias and self.value_dim > self.m):
            return outputs
        return min(outputs, self.groups * self.value_dim) if "v" in self.bias else 0

    @property
    def plain(self) -> bool:
        """Whether this is the layer of the book, up to biases and the data."""
        return self.each == 1 and not self.turned

    def floor(self) -> int | None:
        """Examples whose labels are all met, if a floor is known."""
        if self.plain:
            return bounds.own_context_floor(self.groups, self.head_dim, self.m)
        # Two groups of equal logits and opposite values cancel. There the derivative is that of one
        # of them, so it has the rank that half of the groups show.
        half = self.groups // 2
        return dataclasses.replace(self, groups=half).shown(1) if half else None

    def evidence(self, adapted: str) -> tuple[str, str]:
        """What is proved of the counts, and of the floor."""
        normed = self.m < self.dim
        kinds = {"shared keys and values": self.each > 1}
        kinds |= {"rotary positions (from 3 tokens on)": self.turned, "biases": self.bias}
        kinds |= {"a LayerNorm whose shift biases undo": normed, "adapters": adapted}
        unlike = ", ".join(kind for kind, found in kinds.items() if found)
        above = f"proved from above; with {unlike}, equality only"
        counts = f"{above if unlike else 'one output: proved; several:'} {_COMPARED}"
        if {"q", "k"} <= set(adapted) or {"v", "o"} <= set(adapted):
            counts = "upper bounds: adapters of both factors of a product overlap"
        if adapted:
            return counts, "not known with adapters"
        if self.plain:
            where = "where queries are tokens" + (" behind a LayerNorm" if normed else "")
            return counts, f"proved for free tokens and queries; {where}, only {_COMPARED}"
        if self.groups < 2:
            return counts, "not known for a single group of keys and values"
        least = " (from 3 tokens on)" if self.turned else ""
        return counts, f"not proved, groups cancel in pairs{least}; {_COMPARED}"
