"""One fact more: written into a layer whose attention stays, kept exactly, and forgotten.

A fact is a linear equation for the read-out of ``mha_features``. It is met along the part of its
features that no other fact has, in lengths in which a sample of other inputs changes least.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ..checks import check_integer, check_size, check_tensor, checked, refuse
from ..core.layers import MHAWeights, mha_features
from ..examples import check_data
from .fitting import MET

_LEAST, _ALONE = 1e-9, 1e-6  # shares that count: of what is largest, of a fact's own features


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
        _, sizes, axes = torch.linalg.svd(self._sample / len(queries) ** 0.5, full_matrices=False)
        coarse = 8 * max(torch.finfo(x.dtype).eps for x in (contexts, queries, layer.W_Q))
        many = int((sizes > max(_LEAST, coarse) * sizes[0]).sum())
        self._map = axes[:many].T / sizes[:many]  # the sample spreads alike after it
        kept = self._features(*keep) if keep else ()
        self._facts: dict = {f"kept {k}": (x, x @ self._start) for k, x in enumerate(kept)}
        self._written = 0
        self._none = self._map.new_zeros(0, many), self._start
        self._axes, self._weights = self._after(*self._none, self._facts)

    @checked
    def _features(self, contexts: Float[Tensor, "*examples n d"], queries: Float[Tensor, "B d"]):
        check_data(contexts=contexts, queries=queries, **self._layer._asdict())
        return mha_features(self._layer, contexts, queries).detach()

    def _after(self, axes: Tensor, weights: Tensor, facts: dict) -> tuple[Tensor, Tensor]:
        """Orthonormal axes of facts, and weights, once more are met that each add an axis."""
        for x, y in facts.values():
            own = z = x @ self._map
            for _ in range(2):  # once more for what rounding left over
                own = own - (own @ axes.T) @ axes
            size = torch.linalg.vector_norm(own)
            if size > _ALONE * torch.linalg.vector_norm(z):
                axes = torch.cat([axes, own[None] / size])
                weights = weights + torch.outer(self._map @ axes[-1], (y - x @ weights) / size)
        return axes, weights

    def _met(self, facts: dict, weights: Tensor) -> bool:
        X, Y = (torch.stack(part) for part in zip(*facts.values(), strict=True))
        old = Y.abs() + X.abs() @ self._start.abs()
        most = MET * Y.abs() + 1e-9 * old + 1e-12 * old.amax(0)
        return bool(((X @ weights - Y).abs() <= most).all())

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
        [x] = self._features(context[None], query[None])
        facts = {**self._facts, self._written: (x, y)}
        axes, weights = self._after(self._axes, self._weights, {0: (x, y)})
        if not self._met(facts, weights):
            Z = torch.stack([x for x, _ in facts.values()]) @ self._map
            shares = (Z[-1] @ torch.linalg.pinv(Z[:-1])).abs()
            such = [f"fact {k}" for k, a in zip(self._facts, shares, strict=True) if a > _ALONE]
            by = ", ".join(such[:3]) + " and others" * (len(such) > 3) or "features of zeros"
            said = f"{_few(x @ self._weights)}, already fixed by {by} (room for {self.room})"
            own = len(axes) > len(self._axes)
            refuse("label", _few(y), "one that float64 can add" if own else said)
        self._axes, self._weights, self._facts = axes, weights, facts
        self._written += 1
        return self._written - 1

    def forget(self, number: int) -> None:
        """Take a fact out: the weights are those without it, to the last bit.

        ``ValueError`` if float64 cannot tell another fact from the rest without it.
        """
        if check_integer("number", number, least=0) not in self._facts:
            refuse("number", number, f"one of {[k for k in self._facts if isinstance(k, int)]}")
        facts = {k: fact for k, fact in self._facts.items() if k != number}
        axes, weights = self._after(*self._none, facts)
        if facts and not self._met(facts, weights):
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
        eye = torch.eye(M.shape[2]).to(M)
        return MHAWeights(*self._layer[:2], M, eye.repeat(len(M), 1), eye)


def _few(values: Tensor) -> str:
    """The first numbers of a label, and how many there are more."""
    shown = ", ".join(f"{value:.7g}" for value in values[:3])
    if len(values) > 3:
        shown += f", and {len(values) - 3} more"
    return f"[{shown}]"
