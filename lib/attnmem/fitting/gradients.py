"""Optimizers that use gradients alone: L-BFGS and Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.tangents import ScalarHeads, tangents
from ..checks import check_integer, check_seed, checked_by
from .problem import MET, Fit, Problem, check_fit, in_double

HISTORY = 50  # gradients that L-BFGS remembers
CHUNK = 20  # steps of L-BFGS between two looks at the largest error
LOOK = 500  # steps of Adam between two evaluations of the whole set, as Mahdavi et al. have them


def _trained(heads: ScalarHeads) -> ScalarHeads:
    """Copies of the weights with room for gradients."""
    return ScalarHeads(*(in_double(w).detach().clone().requires_grad_() for w in heads))


def _plain(weights: ScalarHeads) -> ScalarHeads:
    return ScalarHeads(*(w.detach().clone() for w in weights))


@torch.no_grad()
def _descend(weights: ScalarHeads, contexts, queries, labels) -> Tensor:
    """Put the gradient of the mean squared error beside the weights, and return that error."""
    at = tangents(weights, contexts, queries)
    residual = at.outputs - labels
    for w, gradient in zip(weights, at.transposed(2 * residual / len(labels)), strict=True):
        w.grad = gradient.contiguous()
    return residual.square().mean()


@checked_by(check_fit)
def lbfgs(
    heads: ScalarHeads,
    contexts: Float[Tensor, "*T n d"],
    queries: Float[Tensor, "T d"],
    labels: Float[Tensor, " T"],
    *,
    steps: int,
    tolerance: float = MET,
) -> Fit:
    """Meet labels by L-BFGS on the mean squared error, with a strong Wolfe line search.

    Every 20 steps the largest error is looked at.

    Args:
        heads: The start.
        contexts: Tokens as rows, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        labels: One real for each example.
        steps: The most steps that are made; each may look at several points.
        tolerance: As for :func:`levenberg_marquardt`.

    Returns:
        The last weights. ``stop`` is ``stuck`` if 20 steps do not lower the squared error.

    Raises:
        ValueError: As for :func:`levenberg_marquardt`.

    Source: ``torch.optim.LBFGS``, with 50 remembered gradients.
    """
    problem, weights = Problem(contexts, queries, labels, tolerance), _trained(heads)
    optimizer = torch.optim.LBFGS(
        weights,
        max_iter=CHUNK,
        max_eval=25 * CHUNK,
        history_size=HISTORY,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        return _descend(weights, problem.contexts, problem.queries, problem.labels)

    before = math.inf
    while (made := _made(optimizer)) < steps:
        optimizer.param_groups[0]["max_iter"] = min(CHUNK, steps - made)
        optimizer.step(closure)
        residual = problem.residual(_plain(weights))
        squared = float(residual.square().sum())
        if problem.met(residual) or not squared < before:
            return problem.fit(_plain(weights), _made(optimizer), "stuck")
        before = squared
    return problem.fit(_plain(weights), steps, "steps")


def _made(optimizer: torch.optim.LBFGS) -> int:
    """Steps that L-BFGS has made."""
    state = optimizer.state.get(optimizer.param_groups[0]["params"][0], {})
    return state.get("n_iter", 0)


def _check_adam(heads, contexts, queries, labels, steps, tolerance, rate, batch, seed) -> None:
    check_fit(heads, contexts, queries, labels, steps, tolerance)
    if batch is not None:
        check_integer("batch", batch)
    check_seed(seed)


@checked_by(_check_adam)
def adam(
    heads: ScalarHeads,
    contexts: Float[Tensor, "*T n d"],
    queries: Float[Tensor, "T d"],
    labels: Float[Tensor, " T"],
    *,
    steps: int,
    rate: Callable[[int], float],
    batch: int | None = None,
    seed: int = 0,
    tolerance: float = MET,
) -> Fit:
    """Meet labels by Adam on the mean squared error.

    Every 500 steps the whole set is evaluated. The weights with the smallest squared error at these
    steps are returned.

    Args:
        heads: The start.
        contexts: Tokens as rows, own ``(T, n, d)`` or shared ``(n, d)``.
        queries: One query a row.
        labels: One real for each example.
        steps: The most steps that are made.
        rate: The learning rate of each step, from 0.
        batch: Examples of one step, from epochs in random order; None for all examples.
        seed: Seed of the order.
        tolerance: As for :func:`levenberg_marquardt`.

    Returns:
        The best weights seen. ``stop`` is never ``stuck``.

    Raises:
        ValueError: As for :func:`levenberg_marquardt`, or if ``batch`` or ``seed`` is no integer in
            its range.

    Source: Mahdavi et al. 2024, Appendix I, for the evaluations.
    """
    problem, weights = Problem(contexts, queries, labels, tolerance), _trained(heads)
    optimizer = torch.optim.Adam(weights, fused=True)
    batches = _batches(len(queries), batch, seed)
    best, least = _plain(weights), math.inf
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        chosen = next(batches)
        _descend(
            weights,
            problem.contexts if contexts.ndim == 2 else problem.contexts[chosen],
            problem.queries[chosen],
            problem.labels[chosen],
        )
        optimizer.step()
        if (step + 1) % LOOK and step + 1 < steps:
            continue
        now = _plain(weights)
        residual = problem.residual(now)
        if (squared := float(residual.square().sum())) < least:
            best, least = now, squared
        if problem.met(residual):
            return problem.fit(now, step + 1, "met")
    return problem.fit(best, steps, "steps")


def _batches(T: int, batch: int | None, seed: int) -> Iterator[slice | Tensor]:
    """Examples of one step after the other; the last batch of an epoch may be short."""
    if batch is None or batch >= T:
        while True:
            yield slice(None)
    g = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(T, generator=g, device=g.device).split(batch)
