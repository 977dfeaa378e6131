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

_MAPS = "qkvo"  # to queries, keys and values, and back


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """The counts of one attention layer, for examples of one query with a context of its own.

    ``floor`` is met for almost all data, with biases that are zero or undo a LayerNorm's shift.
    """

    name: str
    layer: LayerSizes
    adapted: str = ""  # the maps that have adapters
    parameters: int
    trained: int  # all, or those of the adapters
    effective: int  # those of them that the layer's function shows, over all outputs
    one_output: int  # those of one output: beyond so many examples almost no real labels are met
    floor: int | None
    layers: int = 1
    deep: int | None = None  # a ceiling of so many layers, for one output at the last token

    @property
    def edits(self) -> int | None:
        """Facts that the layer takes one by one, each exact, behind a LayerNorm with a shift."""
        return None if self.adapted else self.layer.edits()

    @property
    def proved(self) -> str:
        """What is proved of both counts, and what is only compared."""
        return _evidence_of_counts(self.layer, self.adapted)

    @property
    def floor_proved(self) -> str:
        """What is proved of the floor."""
        return _evidence_of_floor(self.layer, self.adapted)

    def __str__(self) -> str:
        """A report that a person reads."""
        return _report(self)


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
        if not set(letters) <= set(_MAPS):
            refuse(which, repr(letters), "letters of 'qkvo'")
    if adapter and not adapted:
        refuse("adapted", "no map", "at least one letter of 'qkvo'")
    head_dim = head_dim or _divided("heads", heads, "dim", dim)
    groups = kv_heads or heads
    layer = LayerSizes(
        dim=dim,
        token_dim=dim - 1 if norm else dim,
        groups=groups,
        heads_per_group=_divided("kv_heads", groups, "heads", heads),
        head_dim=head_dim,
        value_dim=value_dim or head_dim,
        turned=round(rope * head_dim),
        bias=bias,
    )
    if layer.turned % 2 or (layer.turned and head_dim > layer.token_dim):
        expected = f"at most {layer.token_dim} and turned in pairs with rotary positions"
        refuse("head_dim", head_dim, expected)
    name = name or f"{heads} heads of width {head_dim}, {groups} of keys and values, d = {dim}"
    if layers > 1 and (bias or norm or adapter or not layer.plain):
        refuse("layers", layers, "1 for this kind of layer; several are counted for plain heads")
    counts = layer.counted(name, outputs or dim, adapter, adapted if adapter else "")
    if layers == 1:
        return counts
    deep = bounds.deep_ceiling([heads] * layers, head_dim, layer.value_dim, dim)
    return dataclasses.replace(counts, layers=layers, deep=deep)


def _divided(name: str, parts: int, total_name: str, total: int) -> int:
    if total % parts:
        refuse(name, parts, f"a divisor of {total_name} = {total}")
    return total // parts


# --- the counts -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The sizes of one attention layer, and how many numbers of its weights its outputs show.

    Attributes:
        dim: Width ``d`` of the tokens, which the maps read.
        token_dim: Dimensions in which tokens vary, ``m`` of the chapter on whole models: ``d``, or
            ``d - 1`` behind a LayerNorm.
        groups: Groups of heads that share their keys and values, ``G``.
        heads_per_group: Heads of a group, ``g``, each with queries of its own.
        head_dim: Width ``d_h`` of queries and keys.
        value_dim: Width ``d_v`` of values.
        turned: Coordinates of a head that rotary positions turn.
        bias: The maps that have a bias, letters of ``qkvo``.
        normed: An RMSNorm of queries and keys: of each ``head``, or of ``all`` heads together.
    """

    dim: int
    token_dim: int
    groups: int
    heads_per_group: int
    head_dim: int
    value_dim: int
    turned: int = 0
    bias: str = ""
    normed: str = ""

    @property
    def heads(self) -> int:
        """All query heads."""
        return self.groups * self.heads_per_group

    @property
    def plain(self) -> bool:
        """Whether this is the layer of the book, up to biases and the data."""
        return self.heads_per_group == 1 and not self.turned and not self.normed

    @property
    def queries_dim(self) -> int:
        """Coordinates of a group's queries: a bias is one more, which is always one."""
        inputs = self.token_dim + 1 if "q" in self.bias else self.token_dim
        return self.heads_per_group * inputs

    @property
    def norm_weights(self) -> int:
        """Weights of the norms of queries and keys."""
        if self.normed == "head":  # shared by all heads
            return 2 * self.head_dim
        if self.normed == "all":
            return (self.heads + self.groups) * self.head_dim
        return 0

    @property
    def shown_norm_weights(self) -> int:
        """What the logits show of these weights."""
        # Of the weights g of queries and g' of keys they show g g' at each coordinate, and of each
        # turned pair three numbers.
        norms = {"": 0, "head": 1, "all": self.groups}[self.normed]
        return self.norm_weights - norms * (self.head_dim - self.turned // 2)

    @property
    def ignored_scales(self) -> int:
        """Scales of the maps that the norms of queries and keys ignore."""
        if self.normed == "head":
            return self.heads + self.groups
        if self.normed == "all":
            return 2
        return 0

    def shapes(self, outputs: int) -> dict[str, tuple[int, int]]:
        """Rows and columns of the four maps."""
        keys, values = self.groups * self.head_dim, self.groups * self.value_dim
        return {
            "q": (self.dim, self.heads_per_group * keys),
            "k": (self.dim, keys),
            "v": (self.dim, values),
            "o": (self.heads_per_group * values, outputs),
        }

    def numbers(self, maps: str, outputs: int | None = None) -> int:
        """Parameters of some maps and their biases, with norms of queries and keys."""
        shapes, total = self.shapes(outputs or self.dim), 0
        for name in maps:
            rows, columns = shapes[name]
            total += rows * columns
            if name in self.bias:
                total += columns
        if "q" in maps:
            total += self.norm_weights
        return total

    def counted(
        self, name: str, outputs: int, adapter: int | None = None, adapted: str = ""
    ) -> Capacity:
        """The counts of a layer with these sizes, or of its adapters."""
        shapes, parameters = self.shapes(outputs), self.numbers(_MAPS, outputs)
        if adapter is None:
            trained = parameters
        else:
            trained = adapter * sum(sum(shapes[name]) for name in set(adapted))
        return Capacity(
            name=name,
            layer=self,
            adapted=adapted,
            parameters=parameters,
            trained=trained,
            effective=self.shown(outputs, adapter, adapted),
            one_output=self.shown(1, adapter, adapted),
            floor=None if adapter else self.floor(),
        )

    # The last token x' of a context asks, and the softmax ignores what all tokens add alike. So the
    # outputs depend on the weights only through the logits of each group, its values, and constants
    # that attention passes on, since its weights sum to one. Their numbers add up.

    def shown(self, outputs: int, adapter: int | None = None, adapted: str = "") -> int:
        """Numbers of the weights, or of the adapters, that so many outputs show."""
        if adapter is None:
            return self.logits() + self.values(outputs)
        shown = dict.fromkeys(_MAPS, 0)
        for name, (rows, columns) in self.shapes_around(outputs).items():
            if name in adapted:
                shown[name] = low_rank_dim(adapter, rows, columns)
        # Both factors of one product overlap; the product itself is the other bound.
        logits = min(shown["q"] + shown["k"], self.logits())
        return logits + min(shown["v"] + shown["o"], self.values(outputs))

    def shapes_around(self, outputs: int) -> dict[str, tuple[int, int]]:
        """Rows and columns of an adapter of each map that the frozen maps around it show."""
        # An adapter adds a matrix of its rank to one map. The others show it up to their own
        # ranks: each head's K shows min(d_h, m) columns of Q, the queries of a group show columns
        # of K, its W show columns of V, and its V shows rows of W. The bias of the values shows one
        # more row of W where V has a kernel.
        m, d_v = self.token_dim, self.value_dim
        through_keys = self.head_dim
        if not (self.turned or self.normed):
            through_keys = min(self.head_dim, m)
        through_values = self.heads * min(d_v, m)
        if "v" in self.bias and d_v > m:
            through_values += 1
        return {
            "q": (m, self.heads * through_keys),
            "k": (m, self.groups * min(self.head_dim, self.queries_dim)),
            "v": (m, self.groups * min(d_v, self.heads_per_group * outputs)),
            "o": (through_values, outputs),
        }

    def logits(self) -> int:
        """Numbers that the logits show."""
        # The logits of a group are x^T K [Q_1 .. Q_g]^T (x', 1), a matrix of shape (m, g (m + b))
        # and rank at most d_h. A bias of the keys adds the same to all tokens.
        # A token t places back is turned: each pair of coordinates is a complex one, which adds the
        # real part of exp(i t angle) (k^* x) (q x'). Different angles are told apart by different
        # t, so each pair shows its complex matrix k q^* of rank one, twice as many real numbers.
        # Its bias of the keys is one more coordinate, as it is turned too. The coordinates that
        # are not turned are as before.
        keys_dim = self.token_dim + 1 if "k" in self.bias else self.token_dim
        if self.normed:
            # Norms ignore scales of the maps.
            maps = self.groups * self.head_dim * (self.queries_dim + keys_dim) - self.ignored_scales
            return maps + self.shown_norm_weights
        turned = self.turned * low_rank_dim(1, keys_dim, self.queries_dim)
        still = low_rank_dim(self.head_dim - self.turned, self.token_dim, self.queries_dim)
        return self.groups * (turned + still)

    def values(self, outputs: int) -> int:
        """Numbers that the values show."""
        # V [W_1 .. W_g] of a group has the shape (m, g o), and its rank is at most d_v.
        columns = self.heads_per_group * outputs
        maps = self.groups * low_rank_dim(self.value_dim, self.token_dim, columns)
        return maps + self.constants(outputs)

    def constants(self, outputs: int) -> int:
        """Numbers that constants show, which attention passes on."""
        # The bias of the outputs is one vector. Those of the values reach b (W_1 + .. + W_g) of
        # each group, G d_v dimensions; if d_v > m, W_h also moves b W_h where V W_h stays.
        if "o" in self.bias or ("v" in self.bias and self.value_dim > self.token_dim):
            return outputs
        return min(outputs, self.groups * self.value_dim) if "v" in self.bias else 0

    def edits(self, shift: bool = True) -> int | None:
        """Facts of one number that the layer takes while its attention stays, each kept exactly.

        It is the rank of a plain layer's features: ``H d``, or ``H (d - 1)`` behind a LayerNorm and
        one more if that has a ``shift``. None where more heads share values than these are wide.
        """
        if self.heads_per_group > self.value_dim:
            return None
        through_origin = self.token_dim == self.dim or not shift
        return bounds.affine_span_rank(self.heads, self.token_dim, through_origin)

    def floor(self) -> int | None:
        """Examples whose labels are all met, if a floor is known."""
        if self.plain:
            return bounds.own_context_floor(self.groups, self.head_dim, self.token_dim)
        # Two groups of equal logits and opposite values cancel. There the derivative is that of one
        # of them, so it has the rank that half of the groups show.
        half = self.groups // 2
        return dataclasses.replace(self, groups=half).shown(1) if half else None


# --- in words -------------------------------------------------------------------------------------

_COMPARED = "compared with ranks at d = 3 and 4, up to 4 heads, contexts of 3 tokens"


def _differences(layer: LayerSizes, adapted: str) -> list[str]:
    """In what a layer is not the layer of the book."""
    differences = []
    if layer.heads_per_group > 1:
        differences.append("shared keys and values")
    if layer.turned:
        differences.append("rotary positions (from 3 tokens on)")
    if layer.bias:
        differences.append("biases")
    if layer.token_dim < layer.dim:
        differences.append("a LayerNorm whose shift biases undo")
    if adapted:
        differences.append("adapters")
    return differences


def _evidence_of_counts(layer: LayerSizes, adapted: str) -> str:
    if {"q", "k"} <= set(adapted) or {"v", "o"} <= set(adapted):
        return "upper bounds: adapters of both factors of a product overlap"
    differences = ", ".join(_differences(layer, adapted))
    if differences:
        return f"proved from above; with {differences}, equality only {_COMPARED}"
    return f"one output: proved; several: {_COMPARED}"


def _evidence_of_floor(layer: LayerSizes, adapted: str) -> str:
    if adapted:
        return "not known with adapters"
    if layer.plain:
        tokens = "tokens behind a LayerNorm" if layer.token_dim < layer.dim else "tokens"
        return f"proved for free tokens and queries; where queries are {tokens}, only {_COMPARED}"
    if layer.groups < 2:
        return "not known for a single group of keys and values"
    fewest = " (from 3 tokens on)" if layer.turned else ""
    return f"not proved, groups cancel in pairs{fewest}; {_COMPARED}"


def _report(counts: Capacity) -> str:
    lines = [
        counts.name,
        f"{counts.parameters:>13,} parameters, of which {counts.trained:,} are trained",
        f"{counts.effective:>13,} of these matter at most "
        f"({counts.effective / counts.trained:.3f})",
        f"{counts.one_output:>13,} matter for one output, a ceiling of its real labels",
        f"{'':12}({counts.proved})",
    ]
    floor = "no" if counts.floor is None else f"{counts.floor:,}"
    lines.append(f"{floor:>13} floor of these labels")
    if counts.floor:
        signs = "signs (two classes): half of all choices fit, or more"
        lines.append(f"{2 * counts.floor:>13,} {signs}")
    lines.append(f"{'':12}({counts.floor_proved})")
    if counts.edits:
        edits = "edits, each exact, while attention stays (proved for plain layers)"
        lines.append(f"{counts.edits:>13,} {edits}")
    if counts.deep is not None:
        layers = f"{counts.layers} such layers, a ceiling (proved)"
        lines.append(f"{counts.deep:>13,} matter for one output of {layers}")
        lines.append(f"{'':12}(with skip connections and a read-out, unlike above; no norm)")
    return wrapped(lines)
