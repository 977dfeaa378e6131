"""What is asked of an optimizer: labels, a tolerance, and where it ended."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.tangents import ScalarHeads, Tangents, scalar_outputs, tangents
from ..checks import (
    check_example_sizes,
    check_integer,
    check_number,
    check_reals,
    check_size,
    check_tensor,
)

MET = 1e-6  # of the largest label


class Fit(NamedTuple):
    """Where an optimizer ended.

    Attributes:
        heads: The weights.
        error: The largest error of an output, in units of the largest label.
        steps: Steps that were made.
        stop: ``met``; ``stuck`` if no step lowers the squared error; ``steps`` at the limit.
        damping: Of Levenberg-Marquardt, the last damping; otherwise None.
    """

    heads: ScalarHeads
    error: float
    steps: int
    stop: str
    damping: float | None = None


def check_fit(heads, contexts, queries, labels, steps, tolerance, **_) -> None:
    """Accept a start, examples and limits that fit together.

    Args:
        heads: The start.
        contexts: Tokens as rows, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        labels: One real for each example.
        steps: The most steps.
        tolerance: The largest error at which labels count as met.
        **_: What one optimizer has beyond the others.

    Raises:
        ValueError: If shapes do not fit, an entry is not finite, or a limit is out of range.
    """
    check_tensor("queries", queries, "(T, d)", 2)
    check_tensor("contexts", contexts, "(T, n, d) or, shared, (n, d)", (2, 3))
    check_tensor("labels", labels, "(T,)", 1)
    check_example_sizes(contexts, queries, labels)
    for name, weights in heads._asdict().items():
        check_size(f"heads.{name}", weights, 1, queries.shape[1], "d of the queries")
    tensors = {"contexts": contexts, "queries": queries, "labels": labels, **heads._asdict()}
    for name, tensor in tensors.items():
        check_reals(name, tensor)
    check_integer("steps", steps)
    check_number("tolerance", tolerance, least=0, most=1)


class Here(NamedTuple):
    """Weights on the way.

    Attributes:
        heads: The weights.
        at: The derivative there.
        residual: Outputs less labels.
    """

    heads: ScalarHeads
    at: Tangents
    residual: Float[Tensor, " T"]


class Problem:
    """The examples in float64, and when their labels count as met.

    Args:
        contexts: Tokens as rows, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        labels: One real for each example.
        tolerance: The largest error, in units of the largest label.
    """

    def __init__(
        self, contexts: Tensor, queries: Tensor, labels: Tensor, tolerance: float = MET
    ) -> None:
        self.contexts, self.queries, self.labels = map(in_double, (contexts, queries, labels))
        self.largest = max(float(self.labels.abs().max()), torch.finfo(torch.float64).tiny)
        self.tolerance = tolerance

    def residual(self, heads: ScalarHeads) -> Float[Tensor, " T"]:
        """Outputs less labels."""
        return scalar_outputs(heads, self.contexts, self.queries) - self.labels

    def here(self, heads: ScalarHeads) -> Here:
        """The same with the derivative."""
        at = tangents(heads, self.contexts, self.queries)
        return Here(heads, at, at.outputs - self.labels)

    def error(self, residual: Float[Tensor, " T"]) -> float:
        """The largest error, in units of the largest label."""
        return float(residual.abs().max()) / self.largest

    def met(self, residual: Float[Tensor, " T"]) -> bool:
        """Whether it is small enough; never of a residual that is not a number."""
        return self.error(residual) <= self.tolerance

    def fit(
        self, heads: ScalarHeads, steps: int, otherwise: str, damping: float | None = None
    ) -> Fit:
        """What to return.

        Args:
            heads: The last weights.
            steps: Steps that were made.
            otherwise: Why there are no more, if the labels are not met.
            damping: The last damping.

        Returns:
            The weights with their error.
        """
        residual = self.residual(heads)
        stop = "met" if self.met(residual) else otherwise
        return Fit(heads, self.error(residual), steps, stop, damping)


def in_double(x: Tensor) -> Tensor:
    """The same numbers in float64."""
    return x.to(torch.float64)
