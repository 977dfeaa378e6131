"""What limits training at the weights where an optimizer ended."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import attention_weights
from ..attention.tangents import ScalarHeads
from ..checks import checked_by
from ..training import SATURATED
from .problem import Problem, check_problem


class Limits(NamedTuple):
    """What tells a local minimum from bad conditioning, at the weights where an optimizer ended.

    Attributes:
        rms: The root mean square of the errors, in units of the largest label.
        gradient: :math:`|J^T r| / (|J| |r|)` with the spectral norm of ``J``; zero at a stationary
            point, and at least the inverse condition number of ``J``.
        least: The least singular value of ``J`` that is one of the ``T`` largest.
        largest: The largest singular value.
        saturated: The share of pairs of a head and an example with an attention weight above 0.99.
    """

    rms: float
    gradient: float
    least: float
    largest: float
    saturated: float


@checked_by(check_problem)
@torch.no_grad()
def limits(
    heads: ScalarHeads,
    contexts: Float[Tensor, "*T n d"],
    queries: Float[Tensor, "T d"],
    labels: Float[Tensor, " T"],
) -> Limits:
    """Measure what limits training at some weights.

    Args:
        heads: The weights.
        contexts: Tokens as rows, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        labels: One real for each example.

    Returns:
        The measures. Singular values are roots of eigenvalues, so that those below ``1e-8`` of the
        largest are lost to rounding.

    Raises:
        ValueError: As for :func:`levenberg_marquardt`.
    """
    problem = Problem(contexts, queries, labels)
    here = problem.here(heads)
    values = torch.linalg.eigvalsh(here.at.gram()).clamp(min=0).sqrt()
    gradient = math.sqrt(sum(float(w.square().sum()) for w in here.at.transposed(here.residual)))
    size = float(here.residual.norm())
    alpha = attention_weights(heads.W_Q, heads.W_K, problem.contexts, problem.queries)
    return Limits(
        rms=size / len(labels) ** 0.5 / problem.largest,
        gradient=gradient / (float(values[-1]) * size) if size else 0.0,
        least=float(values[0]),
        largest=float(values[-1]),
        saturated=float((alpha.amax(-1) > SATURATED).to(torch.float64).mean()),
    )
