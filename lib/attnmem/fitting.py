"""One layer with one output, trained on all examples at once, in float64, by three optimizers.

All of them start from the ``heads`` that they are given and stop when every label is met: when
the largest error is at most ``tolerance``, in units of the largest label. They make at most so
many ``steps``. (Adam looks after some of its steps only, so it may leave a start that meets them.)
Whether they can is a question of the optimizer and of the number of examples, so the data, the
start and the derivative (:mod:`attnmem.attention.tangents`) are the same for all. Contexts are own
``(T, n, d)`` or shared ``(n, d)``, with one query and one real label for each example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .attention import attention_weights
from .attention.tangents import ScalarHeads, Tangents, scalar_outputs, solved, tangents
from .checks import Range, Seed, checked, refuse
from .examples import Contexts, check_data
from .training import SATURATED

__all__ = ["MET", "Fit", "Limits", "adam", "lbfgs", "levenberg_marquardt", "limits"]

MET = 1e-6  # of the largest label
SMALLEST, LARGEST = 1e-70, 1e70  # of largest labels; squared gradients are of fourth order
DAMPING, LOWEST, HIGHEST = 1e-2, 1e-14, 1e8  # in units of the mean squared row
FALL, RISE = 5.0, 4.0  # factors of the damping after a step that helped, and one that did not
HISTORY = 50  # gradients that L-BFGS remembers
CHUNK = 20  # steps of L-BFGS between two looks at the largest error
EVALUATE_EVERY = 500  # steps of Adam, as Mahdavi et al. have them

Labels = Float[Tensor, " T"]
Share = Annotated[int | float, Range(0, 1)]


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


def _can_be_fitted(heads, contexts, queries, labels) -> None:
    """Finite data, of which float64 holds squared gradients."""
    named = {f"heads.{name}": weights for name, weights in heads._asdict().items()}
    check_data(contexts=contexts, queries=queries, labels=labels, **named)
    largest = float(labels.abs().max())
    if largest and not SMALLEST <= largest <= LARGEST:
        got = f"a largest label of {largest:.0e}, where float64 may lose squared gradients"
        refuse("labels", got, f"one from {SMALLEST:.0e} to {LARGEST:.0e}, or zeros")
    with torch.no_grad():
        outputs = scalar_outputs(_copied(heads), contexts.double(), queries.double())
    if not outputs.isfinite().all():
        got = "weights with which some output is not finite on these contexts and queries"
        refuse("heads", got, "finite outputs")


def _copied(heads: ScalarHeads, grad: bool = False) -> ScalarHeads:  # in float64
    return ScalarHeads(*(w.double().detach().clone().requires_grad_(grad) for w in heads))


class _Problem:
    """The examples in float64, and when their labels count as met."""

    def __init__(self, contexts: Tensor, queries: Tensor, labels: Tensor, tolerance: float = MET):
        self.contexts, self.queries, self.labels = (x.double() for x in (contexts, queries, labels))
        self.largest = max(float(self.labels.abs().max()), torch.finfo(torch.float64).tiny)
        self.tolerance = tolerance

    def residual(self, heads: ScalarHeads) -> Labels:
        """Outputs less labels."""
        return scalar_outputs(heads, self.contexts, self.queries) - self.labels

    def linearized(self, heads: ScalarHeads) -> tuple[Tangents, Labels]:
        """The derivative, and the residual."""
        at = tangents(heads, self.contexts, self.queries)
        return at, at.outputs - self.labels

    def met(self, residual: Labels) -> bool:
        """Whether the largest error is small enough; never of one that is not a number."""
        return float(residual.abs().max()) / self.largest <= self.tolerance

    def fit(self, heads: ScalarHeads, steps: int, stop: str, damping: float | None = None) -> Fit:
        """What to return; if labels are not met, ``stop`` says why there are no more steps."""
        residual = self.residual(heads)
        stop = "met" if self.met(residual) else stop
        return Fit(heads, float(residual.abs().max()) / self.largest, steps, stop, damping)


# --- Levenberg-Marquardt --------------------------------------------------------------------------


@checked(also=_can_be_fitted)
@torch.no_grad()
def levenberg_marquardt(
    heads: ScalarHeads,
    contexts: Contexts,
    queries: Float[Tensor, "T d"],
    labels: Labels,
    *,
    steps: int,
    tolerance: Share = MET,
) -> Fit:
    r"""Meet labels by damped Gauss-Newton steps.

    A step is :math:`-J^\top (J J^\top + \lambda s)^{-1} r` with the residual ``r``, where ``s`` is
    the mean diagonal entry of :math:`J J^\top`. The damping :math:`\lambda` falls by a factor of 5
    after a step that lowers the squared error. It rises by a factor of 4 otherwise, and the step is
    tried again; no damping above 1e8 is tried (``stuck``). A step costs ``T^2 d`` multiplications a
    head, and ``T^3 / 6`` for each damping.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> E, e, y = (torch.rand(size, generator=g) for size in ((20, 3, 4), (20, 4), (20,)))
        >>> maps = torch.randn(2, 2, 4, 4, generator=g)
        >>> start = ScalarHeads(*maps, torch.randn(2, 4, generator=g))
        >>> levenberg_marquardt(start, E, e, y, steps=50).stop
        'met'

    Source: this book, the chapter on training; the method is Levenberg's and Marquardt's.
    """
    problem = _Problem(contexts, queries, labels, tolerance)
    heads, damping = _copied(heads), DAMPING
    at, residual = problem.linearized(heads)
    for step in range(steps):
        if problem.met(residual):
            return problem.fit(heads, step, "met", damping)
        moved, damping = better(problem.residual, heads, at, residual, damping)
        if moved is None:
            return problem.fit(heads, step, "stuck", damping)
        heads, damping = moved, max(damping / FALL, LOWEST)
        at, residual = problem.linearized(heads)
    return problem.fit(heads, steps, "steps", damping)


def better(
    errors: Callable[[ScalarHeads], Labels],
    heads: ScalarHeads,
    at: Tangents,
    residual: Labels,
    damping: float,
) -> tuple[ScalarHeads | None, float]:
    """Weights of a smaller squared error, and the damping that led there; ``errors`` of weights."""
    K = at.gram()  # J J^T
    diagonal = K.diagonal().clone()
    s, squared = float(diagonal.mean()), float(residual.square().sum())
    while damping <= HIGHEST:
        K.diagonal().copy_(diagonal + damping * s)
        factor, failed = torch.linalg.cholesky_ex(K)
        if not failed:
            moved = heads.moved(at.transposed(solved(factor, residual)), -1.0)
            if float(errors(moved).square().sum()) < squared:
                return moved, damping
        damping *= RISE
    return None, damping


# --- L-BFGS and Adam ------------------------------------------------------------------------------


@torch.no_grad()
def _descend(weights: ScalarHeads, contexts, queries, labels) -> Tensor:
    """Put the gradient of the mean squared error beside the weights, and return that error."""
    at = tangents(weights, contexts, queries)
    residual = at.outputs - labels
    for w, gradient in zip(weights, at.transposed(2 * residual / len(labels)), strict=True):
        w.grad = gradient.contiguous()
    return residual.square().mean()


@checked(also=_can_be_fitted)
def lbfgs(
    heads: ScalarHeads,
    contexts: Contexts,
    queries: Float[Tensor, "T d"],
    labels: Labels,
    *,
    steps: int,
    tolerance: Share = MET,
) -> Fit:
    """Meet labels by L-BFGS on the mean squared error, with a strong Wolfe line search.

    Every 20 steps the largest error is looked at. The fit is ``stuck`` if 20 steps do not lower the
    squared error. Each step may look at several points.

    Source: ``torch.optim.LBFGS``, with 50 remembered gradients.
    """
    problem, weights = _Problem(contexts, queries, labels, tolerance), _copied(heads, grad=True)
    never = {"tolerance_grad": 0.0, "tolerance_change": 0.0}  # stop by our own rules only
    evaluations = {"max_eval": 25 * CHUNK, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(weights, history_size=HISTORY, **evaluations, **never)

    data = problem.contexts, problem.queries, problem.labels
    made, before = 0, math.inf
    while made < steps:
        optimizer.param_groups[0]["max_iter"] = min(CHUNK, steps - made)
        optimizer.step(lambda: _descend(weights, *data))
        made = optimizer.state[weights[0]]["n_iter"]
        residual = problem.residual(_copied(weights))
        squared = float(residual.square().sum())
        if problem.met(residual) or not squared < before:
            return problem.fit(_copied(weights), made, "stuck")
        before = squared
    return problem.fit(_copied(weights), steps, "steps")


@checked(also=_can_be_fitted)
def adam(
    heads: ScalarHeads,
    contexts: Contexts,
    queries: Float[Tensor, "T d"],
    labels: Labels,
    *,
    steps: int,
    rate: Callable[[int], float],
    batch: int | None = None,
    seed: Seed = 0,
    tolerance: Share = MET,
) -> Fit:
    """Meet labels by Adam on the mean squared error.

    Every 500 steps the whole set is evaluated. The weights with the smallest squared error at these
    steps are returned; ``stop`` is never ``stuck``.

    Args:
        rate: The learning rate of each step, from 0.
        batch: Examples of one step, from epochs in random order; None for all examples.
        seed: Seed of the order.

    Source: Mahdavi et al. 2024, Appendix I, for the evaluations.
    """
    problem, weights = _Problem(contexts, queries, labels, tolerance), _copied(heads, grad=True)
    optimizer = torch.optim.Adam(weights, fused=True)
    batches = _batches(len(queries), batch, seed)
    best, least = _copied(weights), math.inf
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        chosen = next(batches)
        some = problem.contexts if contexts.ndim == 2 else problem.contexts[chosen]
        _descend(weights, some, problem.queries[chosen], problem.labels[chosen])
        optimizer.step()
        if (step + 1) % EVALUATE_EVERY and step + 1 < steps:
            continue
        now = _copied(weights)
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


# --- what limits training ------------------------------------------------------------------------


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


@checked(also=_can_be_fitted)
@torch.no_grad()
def limits(
    heads: ScalarHeads, contexts: Contexts, queries: Float[Tensor, "T d"], labels: Labels
) -> Limits:
    """Measure what limits training at some weights.

    Singular values are roots of eigenvalues, so that those below ``1e-8`` of the largest are lost
    to rounding.
    """
    problem = _Problem(contexts, queries, labels)
    at, residual = problem.linearized(heads)
    values = torch.linalg.eigvalsh(at.gram()).clamp(min=0).sqrt()
    gradient = math.sqrt(sum(float(w.square().sum()) for w in at.transposed(residual)))
    size = float(residual.norm())
    alpha = attention_weights(heads.W_Q, heads.W_K, problem.contexts, problem.queries)
    return Limits(
        rms=size / len(labels) ** 0.5 / problem.largest,
        gradient=gradient / (float(values[-1]) * size) if size else 0.0,
        least=float(values[0]),
        largest=float(values[-1]),
        saturated=float((alpha.amax(-1) > SATURATED).to(torch.float64).mean()),
    )
