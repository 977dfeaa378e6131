"""Linear changes of tokens and queries after which they spread alike in all directions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..examples import unit
from .tangents import ScalarHeads


class Coordinates(NamedTuple):
    """A linear change of tokens and queries.

    Attributes:
        tokens: Multiplied to tokens from the right.
        queries: Likewise to queries.
    """

    tokens: Float[Tensor, "d d"]
    queries: Float[Tensor, "d d"]

    @classmethod
    def balancing(
        cls, contexts: Float[Tensor, "*T n d"], queries: Float[Tensor, "T d"]
    ) -> Coordinates:
        """Coordinates in which second moments are one, but for directions hardly used.

        Moments of own contexts are taken about their mean, since only differences of tokens change
        the attention.

        Args:
            contexts: Tokens as rows, own ``(T, n, d)`` or shared ``(n, d)``.
            queries: One query a row.

        Returns:
            The change of both.
        """
        own = contexts.ndim == 3
        return cls(balancing_map(contexts.flatten(0, -2), centred=own), balancing_map(queries))

    def outward(self, heads: ScalarHeads) -> ScalarHeads:
        """Weights on the data that compute what ``heads`` compute on the changed data.

        Args:
            heads: Weights for changed tokens and queries.

        Returns:
            Weights for the tokens and queries as they were.
        """
        return ScalarHeads(
            self.queries @ heads.W_Q, self.tokens @ heads.W_K, heads.mu @ self.tokens.mT
        )


def balancing_map(rows: Float[Tensor, "N d"], centred: bool = False) -> Float[Tensor, "d d"]:
    """A map after which rows have second moments of one, but for directions hardly used.

    Args:
        rows: Vectors.
        centred: Whether moments are taken about the mean.

    Returns:
        A symmetric matrix, to be multiplied from the right.
    """
    size = unit(rows)
    rows = rows / size
    rows = rows - rows.mean(0) if centred else rows
    values, axes = torch.linalg.eigh(rows.T @ rows / len(rows))
    return (axes / values.clamp(min=1e-6 * float(values[-1])).sqrt()) @ axes.T / size
