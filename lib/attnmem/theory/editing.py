"""One fact more: written into a layer whose attention stays, kept exactly, and forgotten.

A fact is a linear equation for the read-out of ``mha_features``. It is met along the part of its
features that no other fact has, in lengths in which a sample of other inputs changes least.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..checks import check_finite, check_integer, check_size, check_tensor, checked, refuse
from ..core.layers import MHAWeights, mha_features
from ..examples import check_data
from .fitting import MET

# Directions of the sample that count, of the largest: a square root of rounding, since lengths in
# others would be divided by as little.
_LEAST_SPREAD = 1e-9
_OWN = 1e-6  # of a fact's features: less of its own is what rounding left over
_SHRUNK = 0.5  # to less of a vector: then it is made orthogonal once more
_ROUNDED = 8  # roundings of the sample's own precision that a direction must exceed
# What a fact may be missed by beside MET of its label: of its old answer, and of the largest one.
_OLD, _LARGEST_OLD = 1e-9, 1e-12
_NAMED = 3  # facts that a refusal names, and numbers of a label
_FIRST_ROWS = 16  # of a buffer
_AT_ONCE = 64  # axes


class _Rows(NamedTuple):
    """Rows, of which more are appended in a buffer that doubles when it is full."""

    buffer: Float[Tensor, "most k"]
    count: int

    @property
    def filled(self) -> Float[Tensor, "count k"]:
        """The rows so far, without a copy."""
        return self.buffer[: self.count]

    def appended(self, row: Float[Tensor, " k"]) -> _Rows:
        """One row more, in the same buffer: the rows before it stay a value of their own."""
        buffer = self.buffer
        if self.count == len(buffer):
            buffer = buffer.new_empty(max(_FIRST_ROWS, 2 * self.count), buffer.shape[1])
            buffer[: self.count] = self.buffer
        buffer[self.count] = row
        return _Rows(buffer, self.count + 1)


class _Facts(NamedTuple):
    """Equations for the read-out: features, times the weights, are the answers."""

    numbers: tuple[int | str, ...]  # what each is called
    features: _Rows
    answers: _Rows
    sizes: _Rows  # of the terms of which the answer, and the one before, are sums

    def appended(self, number: int | str, *rows: Float[Tensor, " k"]) -> _Facts:
        more = [old.appended(row) for old, row in zip(self[1:], rows, strict=True)]
        return _Facts((*self.numbers, number), *more)


class Memory:
    """A layer that takes facts one by one, and answers each exactly until it is forgotten.

    ``contexts`` and ``queries`` are other inputs, shaped as ``mha`` takes them, several times as
    many as features (``H d``); of fewer, ``room`` is at most their number. The answers to ``keep``,
    a pair of such, never change. With ``same_widths`` only ``W_O`` changes: features are then the
    values that it reads, ``H d_v`` of them, and the edited layer is as wide as before. A ``bias``
    is what is added to the layer's outputs, and labels are those with it. All is computed in
    float64; half precision is refused.
    """

    @checked
    def __init__(
        self,
        layer: MHAWeights,
        contexts: Tensor,
        queries: Tensor,
        *,
        keep: tuple = (),
        same_widths: bool = False,
        bias: Float[Tensor, " d_out"] | None = None,
    ):
        check_tensor("layer.W_Q", layer.W_Q, "(H, d, d_h)", 3)
        if len(keep) not in (0, 2):
            refuse("keep", f"a tuple of {len(keep)}", "a pair of contexts and queries")
        self._layer = MHAWeights(*(W.detach().double().clone() for W in layer))
        check_data(**self._layer._asdict())
        self._same_widths = same_widths
        self._start = self._layer.W_O @ self._layer.W_D
        if not same_widths:
            self._start = torch.block_diag(*self._layer.W_V) @ self._start
        self._start_sizes = self._start.abs()
        self._bias = self._start.new_zeros(self._start.shape[1])
        if bias is not None:
            check_finite("bias", bias)
            self._bias = self._bias + bias.detach()
        self._sample = self._features(contexts, queries)
        rounding = max(torch.finfo(x.dtype).eps for x in (contexts, queries, layer.W_Q))
        self._map = _whitening(self._sample, max(_LEAST_SPREAD, _ROUNDED * rounding))
        self._no_axes = _Rows(self._map.new_empty(0, self._map.shape[1]), 0)
        widths = self._start.shape[0], self._start.shape[1], self._start.shape[1]
        self._facts = _Facts((), *(_Rows(self._map.new_empty(0, width), 0) for width in widths))
        if keep:
            for number, x in enumerate(self._features(*keep)):
                self._facts = self._with(self._facts, f"kept {number}", x, x @ self._start)
        self._written = 0
        self._axes, self._weights = self._met(self._facts, self._no_axes, self._start)

    @checked
    def _features(self, contexts: Float[Tensor, "*examples n d"], queries: Float[Tensor, "B d"]):
        # One row of the layer, whose numbers have been checked: for the device.
        check_data(layer=self._start[:1], contexts=contexts, queries=queries)
        z = mha_features(self._layer, contexts, queries).detach()
        if not self._same_widths:
            return z
        H, d, _ = self._layer.W_V.shape
        return torch.einsum("bhd,hdv->bhv", z.unflatten(1, (H, d)), self._layer.W_V).flatten(1)

    def _with(self, facts: _Facts, number: int | str, features: Tensor, answer: Tensor) -> _Facts:
        """These facts and one more."""
        sizes = answer.abs() + features.abs() @ self._start_sizes
        return facts.appended(number, features, answer, sizes)

    def _met(self, facts: _Facts, axes: _Rows, weights: Tensor) -> tuple[_Rows, Tensor]:
        """Orthonormal axes of facts, and weights, once facts are met that each add an axis."""
        for features, answer in zip(facts.features.filled, facts.answers.filled, strict=True):
            axes, weights = self._met_one(features.clone(), answer, axes, weights)
        return axes, weights

    def _met_one(
        self, features: Tensor, answer: Tensor, axes: _Rows, weights: Tensor
    ) -> tuple[_Rows, Tensor]:
        z = features @ self._map
        remainder = _remainder(z, axes.filled)  # what no other fact has
        size = torch.linalg.vector_norm(remainder)
        if size > _OWN * torch.linalg.vector_norm(z):
            axis = remainder / size
            axes = axes.appended(axis)
            missing = answer - features @ weights
            weights = weights + torch.outer(self._map @ axis, missing / size)
        return axes, weights

    def _answers(self, facts: _Facts, weights: Tensor) -> bool:
        """Whether weights answer all facts."""
        X, Y, sizes = (rows.filled for rows in facts[1:])
        if not len(X):
            return True
        allowed = MET * Y.abs() + _OLD * sizes + _LARGEST_OLD * sizes.amax(0)
        return bool(((X @ weights - Y).abs() <= allowed).all())

    def __copy__(self) -> Memory:
        """A memory of its own: two that share a buffer would write into each other's rows."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        """How many facts, with those of ``keep``, the room that is left, and the price."""
        n_facts = len(self._facts.numbers)
        return f"Memory: {n_facts} facts, room for {self.room}, price {self.price:.1f}"

    @checked
    def write(self, context: Float[Tensor, "n d"], query: Float[Tensor, " d"], label) -> int:
        """Store a fact, whose label is a number or has shape ``(d_out,)``. Returns its own number.

        One that follows from others takes no room. ``ValueError`` if the others say something else,
        or any is missed by over 1e-6 of its label, 1e-9 of its old answer and 1e-12 of the largest.
        """
        if not hasattr(label, "__float__"):
            refuse("label", f"{label!r:.60}", "a number or a tensor")
        y = torch.as_tensor(label, dtype=torch.float64).detach().reshape(-1).to(self._start)
        check_size("label", y, 0, self._start.shape[1], "the number of outputs")
        check_data(layer=self._start[:1], context=context, query=query, label=y)
        x = self._features(context[None], query[None])[0]
        answer = y - self._bias
        axes, weights = self._met_one(x, answer, self._axes, self._weights)
        facts = self._with(self._facts, self._written, x, answer)
        if not self._answers(facts, weights):
            if axes.count > self._axes.count:  # the fact has something of its own
                refuse("label", _shortened(y), "one that float64 can add")
            fixed = f"already fixed by {self._named_causes(x)} ({self._room_in_words()})"
            said = _shortened(x @ self._weights + self._bias)
            refuse("label", _shortened(y), f"{said}, {fixed}")
        self._axes, self._weights, self._facts = axes, weights, facts
        self._written += 1
        return self._written - 1

    def _room_in_words(self) -> str:
        if not self._same_widths:
            return f"room for {self.room}"
        n_features, n_inputs = self._map.shape[1], len(self._start)
        return f"room for {self.room} of {n_features}; W_O has {n_inputs} rows"

    def _named_causes(self, features: Float[Tensor, " Hd"]) -> str:
        """The facts of which this one is a combination."""
        Z = self._facts.features.filled @ self._map
        shares = (features @ self._map @ torch.linalg.pinv(Z)).abs()
        numbers = self._facts.numbers
        causes = [f"fact {k}" for k, a in zip(numbers, shares, strict=True) if a > _OWN]
        if not causes:
            return "features of zeros"
        names = ", ".join(causes[:_NAMED])
        return f"{names} and others" if len(causes) > _NAMED else names

    def forget(self, number: int) -> None:
        """Take a fact out: the weights are those without it, to the last bit.

        ``ValueError`` if float64 cannot tell another fact from the rest without it.
        """
        numbers = self._facts.numbers
        if check_integer("number", number, least=0) not in numbers:
            refuse("number", number, f"one of {[k for k in numbers if isinstance(k, int)]}")
        others = [place for place, k in enumerate(numbers) if k != number]
        rows = [_Rows(rows.filled[others], len(others)) for rows in self._facts[1:]]
        facts = _Facts(tuple(numbers[place] for place in others), *rows)
        axes, weights = self._met(facts, self._no_axes, self._start)
        if not self._answers(facts, weights):
            refuse("number", number, "one without which the others can be kept")
        self._axes, self._weights, self._facts = axes, weights, facts

    @property
    def room(self) -> int:
        """How many more facts fit, almost whatever they are."""
        return self._map.shape[1] - self._axes.count

    @property
    def price(self) -> float:
        """The mean square of what has been added to an answer of the sample."""
        return float((self._sample @ (self._weights - self._start)).square().mean())

    def missed(self, dtype: torch.dtype) -> float:
        """How far a fact is off at most, once the weights that hold facts are rounded to a dtype.

        It is a share of the largest number in the fact's label, or in the answer before.
        """
        X, Y, _ = (rows.filled for rows in self._facts[1:])
        if not len(X):
            return 0.0
        off = (X @ self._weights.to(dtype).double() - Y).abs().amax(1)
        largest = (torch.stack([Y, X @ self._start]) + self._bias).abs().amax((0, 2))
        return float(torch.where(off == 0, off, off / largest).max())

    def layer(self) -> MHAWeights:
        """The layer with its facts, for ``mha``, in float64; values are as wide as its output.

        With ``same_widths`` only ``W_O`` and ``W_D`` differ from the layer's own; ``W_D`` is the
        identity, and ``W_O`` what was the product of both.
        """
        W_Q, W_K, W_V, *_ = (W.clone() for W in self._layer)
        W_D = torch.eye(self._start.shape[1]).to(self._start)
        if self._same_widths:
            return MHAWeights(W_Q, W_K, W_V, self._weights.clone(), W_D)
        M = self._weights.clone().unflatten(0, W_V.shape[:2])
        return MHAWeights(W_Q, W_K, M, W_D.repeat(len(M), 1), W_D)


def _whitening(sample: Float[Tensor, "B Hd"], least: float) -> Float[Tensor, "Hd R"]:
    """A map after which the sample spreads alike in all directions, without those it hardly has."""
    _, spreads, axes = torch.linalg.svd(sample / len(sample) ** 0.5, full_matrices=False)
    rank = int((spreads > least * spreads[0]).sum())
    return axes[:rank].T / spreads[:rank]


def _remainder(z: Float[Tensor, " R"], axes: Float[Tensor, "k R"]) -> Float[Tensor, " R"]:
    """The part of a vector that is orthogonal to orthonormal axes."""
    rest = _orthogonal(z, axes)
    if torch.linalg.vector_norm(rest) < _SHRUNK * torch.linalg.vector_norm(z):
        rest = _orthogonal(rest, axes)  # once more, for what rounding left over
    return rest


def _orthogonal(z: Float[Tensor, " R"], axes: Float[Tensor, "k R"]) -> Float[Tensor, " R"]:
    """One pass of Gram and Schmidt, by as many axes at once as a cache holds: each is read once."""
    for block in axes.split(_AT_ONCE):
        z = z - (block @ z) @ block
    return z


def _shortened(values: Tensor) -> str:
    """The first numbers of a label, and how many there are more."""
    numbers = ", ".join(f"{value:.7g}" for value in values[:_NAMED])
    if len(values) > _NAMED:
        numbers += f", and {len(values) - _NAMED} more"
    return f"[{numbers}]"
