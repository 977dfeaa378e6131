"""Linear changes of tokens and queries after which they spread alike in all directions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..examples import unit
from .tangents import ScalarHeads


class Coordinates(NamedTuple):
    """A linear change of tokens and queries: matrices that are multiplied from the right."""

    tokens: Float[Tensor, "d d"]
    queries: Float[Tensor, "d d"]

    @classmethod
    def balancing(
        cls, contexts: Float[Tensor, "*T n d"], queries: Float[Tensor, "T d"]
    ) -> Coordinates:
        """Coordinates in which second moments are one, but for directions hardly used.

        Contexts are own ``(T, n, d)`` or shared ``(n, d)``. Moments of own contexts are taken about
        their mean, since only differences of tokens change the attention.
        """
        own = contexts.ndim == 3
        return cls(balancing_map(contexts.flatten(0, -2), centred=own), balancing_map(queries))

    def outward(self, heads: ScalarHeads) -> ScalarHeads:
        """Weights on the data that compute what ``heads`` compute on the changed data."""
        return ScalarHeads(
            self.queries @ heads.W_Q, self.tokens @ heads.W_K, heads.mu @ self.tokens.mT
        )


def balancing_map(rows: Float[Tensor, "N d"], centred: bool = False) -> Float[Tensor, "d d"]:
    """A symmetric matrix after which rows have second moments of one, as :class:`Coordinates`."""
    size = unit(rows)
    rows = rows / size
    rows = rows - rows.mean(0) if centred else rows
    values, axes = torch.linalg.eigh(rows.T @ rows / len(rows))
    return (axes / values.clamp(min=1e-6 * float(values[-1])).sqrt()) @ axes.T / size
