"""Levenberg-Marquardt on the derivative of a layer with one output."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.tangents import ScalarHeads, solved
from ..checks import checked_by
from .problem import MET, Fit, Here, Problem, check_fit, in_double

FIRST, LOWEST, HIGHEST = 1e-2, 1e-14, 1e8  # damping, in units of the mean squared row
FALL, RISE = 5.0, 4.0  # factors of the damping after a step that helped, and one that did not


@checked_by(check_fit)
@torch.no_grad()
def levenberg_marquardt(
    heads: ScalarHeads,
    contexts: Float[Tensor, "*T n d"],
    queries: Float[Tensor, "T d"],
    labels: Float[Tensor, " T"],
    *,
    steps: int,
    tolerance: float = MET,
) -> Fit:
    r"""Meet labels by damped Gauss-Newton steps.

    A step is :math:`-J^\top (J J^\top + \lambda s)^{-1} r` with the residual ``r``, where ``s`` is
    the mean diagonal entry of :math:`J J^\top`. The damping :math:`\lambda` falls by a factor of 5
    after a step that lowers the squared error. It rises by a factor of 4 otherwise, and the step is
    tried again. A step costs ``T^2 d`` multiplications a head, and ``T^3 / 6`` for each damping.

    Args:
        heads: The start.
        contexts: Tokens as rows, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        labels: One real for each example.
        steps: The most steps that are made.
        tolerance: The largest error at which labels count as met, in units of the largest label.

    Returns:
        The last weights. ``stop`` is ``stuck`` if no damping up to 1e8 gives a better step.

    Raises:
        ValueError: If shapes do not fit, an entry is not finite, or a limit is out of range.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> E, e, y = (torch.rand(size, generator=g) for size in ((20, 3, 4), (20, 4), (20,)))
        >>> maps = torch.randn(2, 2, 4, 4, generator=g)
        >>> start = ScalarHeads(*maps, torch.randn(2, 4, generator=g))
        >>> levenberg_marquardt(start, E, e, y, steps=50).stop
        'met'

    Source: this book, the chapter on training; the method is Levenberg's and Marquardt's.
    """
    problem = Problem(contexts, queries, labels, tolerance)
    here, damping = problem.here(ScalarHeads(*map(in_double, heads))), FIRST
    for step in range(steps):
        if problem.met(here.residual):
            return problem.fit(here.heads, step, "met", damping)
        moved, damping = _better(problem, here, damping)
        if moved is None:
            return problem.fit(here.heads, step, "stuck", damping)
        here, damping = problem.here(moved), max(damping / FALL, LOWEST)
    return problem.fit(here.heads, steps, "steps", damping)


def _better(problem: Problem, here: Here, damping: float) -> tuple[ScalarHeads | None, float]:
    """Weights of a smaller squared error, and the damping that led there."""
    K = here.at.gram()
    diagonal = K.diagonal().clone()
    unit, squared = float(diagonal.mean()), float(here.residual.square().sum())
    while damping <= HIGHEST:
        K.diagonal().copy_(diagonal + damping * unit)
        factor, failed = torch.linalg.cholesky_ex(K)
        if not failed:
            step = here.at.transposed(solved(factor, here.residual))
            moved = here.heads.moved(step, -1.0)
            if float(problem.residual(moved).square().sum()) < squared:
                return moved, damping
        damping *= RISE
    return None, damping
