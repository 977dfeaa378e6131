"""One fact more: written into a layer whose attention stays, kept exactly, and forgotten.

A fact is a linear equation for the read-out of ``mha_features``. It is met along the part of its
features that no other fact has, in lengths in which a sample of other inputs changes least.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..checks import check_integer, check_size, check_tensor, checked, refuse
from ..core.layers import MHAWeights, mha_features
from ..examples import check_data
from .fitting import MET

# Directions of the sample that count, of the largest: a square root of rounding, since lengths in
# others would be divided by as little.
_LEAST_SPREAD = 1e-9
_OWN = 1e-6  # of a fact's features: less of its own is what rounding left over
_ROUNDED = 8  # roundings of the sample's own precision that a direction must exceed
# What a fact may be missed by beside MET of its label: of its old answer, and of the largest one.
_OLD, _LARGEST_OLD = 1e-9, 1e-12
_NAMED = 3  # facts that a refusal names, and numbers of a label


class _Fact(NamedTuple):
    """One equation for the read-out: its features, times the weights, are the answer."""

    features: Float[Tensor, " Hd"]
    answer: Float[Tensor, " d_out"]


class Memory:
    """A layer that takes facts one by one, and answers each exactly until it is forgotten.

    ``contexts`` and ``queries`` are other inputs, shaped as ``mha`` takes them, several times as
    many as features (``H d``); of fewer, ``room`` is at most their number. The answers to ``keep``,
    a pair of such, never change. All is computed in float64; half precision is refused.
    """

    @checked
    def __init__(self, layer: MHAWeights, contexts: Tensor, queries: Tensor, *, keep: tuple = ()):
        check_tensor("layer.W_Q", layer.W_Q, "(H, d, d_h)", 3)
        if len(keep) not in (0, 2):
            refuse("keep", f"a tuple of {len(keep)}", "a pair of contexts and queries")
        self._layer = MHAWeights(*(W.detach().double().clone() for W in layer))
        self._start = torch.block_diag(*self._layer.W_V) @ self._layer.W_O @ self._layer.W_D
        self._sample = self._features(contexts, queries)
        rounding = max(torch.finfo(x.dtype).eps for x in (contexts, queries, layer.W_Q))
        self._map = _whitening(self._sample, max(_LEAST_SPREAD, _ROUNDED * rounding))
        self._no_axes = self._map.new_zeros(0, self._map.shape[1])
        self._facts: dict[int | str, _Fact] = {}
        if keep:
            for number, x in enumerate(self._features(*keep)):
                self._facts[f"kept {number}"] = _Fact(x, x @ self._start)
        self._written = 0
        self._axes, self._weights = self._met(self._facts.values(), self._no_axes, self._start)

    @checked
    def _features(self, contexts: Float[Tensor, "*examples n d"], queries: Float[Tensor, "B d"]):
        check_data(contexts=contexts, queries=queries, **self._layer._asdict())
        return mha_features(self._layer, contexts, queries).detach()

    def _met(self, facts: Iterable[_Fact], axes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Orthonormal axes of facts, and weights, once more are met that each add an axis."""
        for fact in facts:
            z = fact.features @ self._map
            remainder = _remainder(z, axes)  # what no other fact has
            size = torch.linalg.vector_norm(remainder)
            if size > _OWN * torch.linalg.vector_norm(z):
                axes = torch.cat([axes, remainder[None] / size])
                missing = fact.answer - fact.features @ weights
                weights = weights + torch.outer(self._map @ axes[-1], missing / size)
        return axes, weights

    def _answers(self, facts: Iterable[_Fact], weights: Tensor) -> bool:
        """Whether weights answer all facts."""
        X, Y = (torch.stack(tensors) for tensors in zip(*facts, strict=True))
        old = Y.abs() + X.abs() @ self._start.abs()
        allowed = MET * Y.abs() + _OLD * old + _LARGEST_OLD * old.amax(0)
        return bool(((X @ weights - Y).abs() <= allowed).all())

    def __repr__(self) -> str:
        """How many facts, with those of ``keep``, the room that is left, and the price."""
        return f"Memory: {len(self._facts)} facts, room for {self.room}, price {self.price:.1f}"

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
        check_data(layer=self._start, context=context, query=query, label=y)
        fact = _Fact(self._features(context[None], query[None])[0], y)
        axes, weights = self._met([fact], self._axes, self._weights)
        facts = self._facts | {self._written: fact}
        if not self._answers(facts.values(), weights):
            if len(axes) > len(self._axes):  # the fact has something of its own
                refuse("label", _shortened(y), "one that float64 can add")
            fixed = f"already fixed by {self._named_causes(fact)} (room for {self.room})"
            refuse("label", _shortened(y), f"{_shortened(fact.features @ self._weights)}, {fixed}")
        self._axes, self._weights, self._facts = axes, weights, facts
        self._written += 1
        return self._written - 1

    def _named_causes(self, fact: _Fact) -> str:
        """The facts of which this one is a combination."""
        if not self._facts:
            return "features of zeros"
        Z = torch.stack([earlier.features for earlier in self._facts.values()]) @ self._map
        shares = (fact.features @ self._map @ torch.linalg.pinv(Z)).abs()
        causes = [f"fact {k}" for k, a in zip(self._facts, shares, strict=True) if a > _OWN]
        if not causes:
            return "features of zeros"
        names = ", ".join(causes[:_NAMED])
        return f"{names} and others" if len(causes) > _NAMED else names

    def forget(self, number: int) -> None:
        """Take a fact out: the weights are those without it, to the last bit.

        ``ValueError`` if float64 cannot tell another fact from the rest without it.
        """
        if check_integer("number", number, least=0) not in self._facts:
            refuse("number", number, f"one of {[k for k in self._facts if isinstance(k, int)]}")
        facts = {k: fact for k, fact in self._facts.items() if k != number}
        axes, weights = self._met(facts.values(), self._no_axes, self._start)
        if facts and not self._answers(facts.values(), weights):
            refuse("number", number, "one without which the others can be kept")
        self._axes, self._weights, self._facts = axes, weights, facts

    @property
    def room(self) -> int:
        """How many more facts fit, almost whatever they are."""
        return self._map.shape[1] - len(self._axes)

    @property
    def price(self) -> float:
        """The mean square of what has been added to an answer of the sample."""
        return float((self._sample @ (self._weights - self._start)).square().mean())

    def layer(self) -> MHAWeights:
        """The layer with its facts, for ``mha``, in float64; values are as wide as its output."""
        M = self._weights.clone().unflatten(0, self._layer.W_V.shape[:2])
        W_D = torch.eye(M.shape[2]).to(M)
        W_O = W_D.repeat(len(M), 1)
        return MHAWeights(self._layer.W_Q, self._layer.W_K, M, W_O, W_D)


def _whitening(sample: Float[Tensor, "B Hd"], least: float) -> Float[Tensor, "Hd R"]:
    """A map after which the sample spreads alike in all directions, without those it hardly has."""
    _, spreads, axes = torch.linalg.svd(sample / len(sample) ** 0.5, full_matrices=False)
    rank = int((spreads > least * spreads[0]).sum())
    return axes[:rank].T / spreads[:rank]


def _remainder(z: Float[Tensor, " R"], axes: Float[Tensor, "k R"]) -> Float[Tensor, " R"]:
    """The part of a vector that is orthogonal to orthonormal axes."""
    for _ in range(2):  # once more for what rounding left over
        z = z - (z @ axes.T) @ axes
    return z


def _shortened(values: Tensor) -> str:
    """The first numbers of a label, and how many there are more."""
    numbers = ", ".join(f"{value:.7g}" for value in values[:_NAMED])
    if len(values) > _NAMED:
        numbers += f", and {len(values) - _NAMED} more"
    return f"[{numbers}]"
