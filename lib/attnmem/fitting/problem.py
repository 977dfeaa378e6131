"""What is asked of an optimizer: labels, a tolerance, and where it ended."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.tangents import ScalarHeads, Tangents, scalar_outputs, tangents
from ..checks import (
    check_example_sizes,
    check_examples,
    check_integer,
    check_number,
    check_reals,
    check_tensor,
    refuse,
)

MET = 1e-6  # of the largest label
SMALLEST, LARGEST = 1e-70, 1e70  # of largest labels; squared gradients are of fourth order


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
    check_problem(heads, contexts, queries, labels)
    check_integer("steps", steps)
    check_number("tolerance", tolerance, least=0, most=1)


def check_problem(heads, contexts, queries, labels) -> None:
    """Accept weights and examples that fit together, and whose squared gradients float64 holds.

    Args:
        heads: The weights.
        contexts: Tokens as rows, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        labels: One real for each example.

    Raises:
        ValueError: If shapes do not fit, an entry is not finite, labels are too large or too small
            for squared gradients, or an output is not finite.
    """
    check_examples(contexts, queries, labels)
    check_tensor("labels", labels, "(T,)", 1)
    check_example_sizes(contexts, queries, labels)
    check_tensor("heads.W_Q", heads.W_Q, "(H, d, d_h)", 3)
    H, d_h, d = len(heads.W_Q), heads.W_Q.shape[2], queries.shape[1]
    for name, weights in heads._asdict().items():
        wanted = (H, d) if name == "mu" else (H, d, d_h)
        if tuple(weights.shape) != wanted or not weights.numel():
            more = "with H and d_h of W_Q and d of the queries, none of them 0"
            refuse(f"heads.{name}", f"shape {tuple(weights.shape)}", f"shape {wanted}, {more}")
        check_reals(f"heads.{name}", weights)
    largest = float(labels.abs().max())
    if largest and not SMALLEST <= largest <= LARGEST:
        got = f"a largest label of {largest:.0e}, where float64 may lose squared gradients"
        refuse("labels", got, f"one from {SMALLEST:.0e} to {LARGEST:.0e}, or zeros")
    with torch.no_grad():
        outputs = scalar_outputs(
            ScalarHeads(*map(in_double, heads)), in_double(contexts), in_double(queries)
        )
    if not outputs.isfinite().all():
        got = "weights with which some output is not finite on these contexts and queries"
        refuse("heads", got, "finite outputs")


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
