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
from ..theory.fitting import MET

_LEAST, _ALONE = 1e-9, 1e-6  # shares that count: of the sample's directions, of a fact's features


@checked
def _features(
    layer: MHAWeights, contexts: Float[Tensor, "*examples n d"], queries: Float[Tensor, "B d"]
) -> Float[Tensor, "B Hd"]:
    check_data(contexts=contexts, queries=queries, **layer._asdict())
    return mha_features(layer, contexts.double(), queries.double())


class Memory:
    """A layer that takes facts one by one, and answers each exactly until it is forgotten.

    ``contexts`` and ``queries`` are other inputs, shaped as ``mha`` takes them, several times as
    many as features (``H d``); of fewer, ``room`` is at most their number. The answers to ``keep``,
    contexts and queries, never change. All is computed in float64; half precision is refused.
    """

    def __init__(self, layer: MHAWeights, contexts: Tensor, queries: Tensor, *, keep=None):
        check_tensor("layer.W_Q", layer.W_Q, "(H, d, d_h)", 3)
        self._layer, self._written = MHAWeights(*(W.double() for W in layer)), 0
        Z = _features(layer, contexts, queries)
        heads = self._layer.W_V @ self._layer.W_O.unflatten(0, layer.W_V.shape[::2])
        self._start = (heads @ self._layer.W_D).flatten(0, 1)
        _, sizes, axes = torch.linalg.svd(Z / len(Z) ** 0.5, full_matrices=False)
        coarse = 8 * max(torch.finfo(x.dtype).eps for x in (contexts, queries, layer.W_Q))
        many = int((sizes > max(_LEAST, coarse) * sizes[0]).sum())
        self._map = axes[:many].T / sizes[:many]  # the sample spreads alike after it
        self._facts: dict[int | str, tuple[Tensor, Tensor]] = {}  # features and answers
        for k, x in enumerate(_features(layer, *keep) if keep else ()):
            self._facts[f"kept {k}"] = x, x @ self._start
        self._replay()

    def _replay(self) -> None:
        self._axes = self._start.new_zeros(0, self._map.shape[1])  # orthonormal, of the facts
        self._change = self._start.new_zeros(self._map.shape[1], self._start.shape[1])
        for fact in self._facts.values():
            self._meet(*fact)

    def _meet(self, x: Tensor, y: Tensor) -> None:
        """A step along what of a fact's features no other fact has, if there is any."""
        own = z = x @ self._map
        for _ in range(2):  # once more for what rounding left over
            own = own - (own @ self._axes.T) @ self._axes
        size = torch.linalg.vector_norm(own)
        if size > _ALONE * torch.linalg.vector_norm(z):
            self._axes = torch.cat([self._axes, own[None] / size])
            step = (y - x @ self._start - z @ self._change) / size
            self._change = self._change + torch.outer(own / size, step)

    def write(self, context: Tensor, query: Tensor, label: float | Tensor) -> int:
        """Store a fact: context ``(n, d)``, query ``(d,)``, label ``(d_out,)``. Returns its number.

        One that follows from others takes no room. ``ValueError`` if the others say something else,
        or if one of all would be missed by more than 1e-6 of the largest change, or of the label.
        """
        y = torch.as_tensor(label, dtype=torch.float64).reshape(-1)
        check_size("label", y, 0, self._start.shape[1], "the number of outputs")
        check_data(label=y)
        [x] = _features(self._layer, context[None], query[None])
        before = self._axes, self._change
        self._meet(x, y)
        X, Y = (torch.stack(part) for part in zip(*self._facts.values(), (x, y), strict=True))
        largest = max((Y - X @ self._start).abs().max(), y.abs().max())
        if not (X @ self._weights - Y).abs().max() <= MET * largest:
            own, (self._axes, self._change) = len(self._axes) > len(before[0]), before
            Z = X @ self._map
            shares = torch.linalg.lstsq(Z[:-1].T, Z[-1:].T, driver="gelsd").solution[:, 0].abs()
            such = [f"{k}" for k, share in zip(self._facts, shares, strict=True) if share > _ALONE]
            said = ", ".join(such[:3]) + " and others" * (len(such) > 3) or "features of zeros"
            said = f"{(x @ self._weights).tolist()}, from {said} (room for {self.room})"
            refuse("label", y.tolist(), "one that float64 can add" if own else said)
        self._facts[self._written] = x, y
        self._written += 1
        return self._written - 1

    def forget(self, number: int) -> None:
        """Take a fact out: the weights are those without it, to the last bit."""
        if check_integer("number", number, least=0) not in self._facts:
            refuse("number", number, f"one of {[k for k in self._facts if isinstance(k, int)]}")
        del self._facts[number]
        self._replay()

    @property
    def room(self) -> int:
        """How many more facts fit, almost whatever they are."""
        return self._map.shape[1] - len(self._axes)

    @property
    def price(self) -> float:
        """The mean square of what has been added to an answer of the sample."""
        return float(self._change.square().sum() / self._change.shape[1])

    @property
    def _weights(self) -> Tensor:
        return self._start + self._map @ self._change

    def layer(self) -> MHAWeights:
        """The layer with its facts, in float64; its values are as wide as its output."""
        W_Q, W_K, W_V, *_ = self._layer
        M = self._weights.unflatten(0, W_V.shape[:2])
        eye = torch.eye(M.shape[2], dtype=M.dtype)
        return MHAWeights(W_Q, W_K, M, eye.repeat(len(W_V), 1), eye)
