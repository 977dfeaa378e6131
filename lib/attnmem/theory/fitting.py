"""One layer, or several, with one output, trained on all examples at once by three optimizers.

They start from the ``weights`` given, compute in float64, make at most so many ``steps``, and stop
when the largest error is at most 1e-6 (or ``tolerance``) of the largest label. Of one layer
(:class:`~attnmem.theory.tangents.ScalarHeads`), contexts are own or shared. Of several layers
(:class:`~attnmem.core.stacked.DeepWeights`) they are own; the last token asks: ``queries`` is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ..checks import Range, Seed, checked, refuse
from ..core.descent import adam_steps
from ..core.layers import attention_weights
from ..core.memorize import SATURATED
from ..core.stacked import DeepWeights, Layer, deep, streams
from ..examples import Contexts, check_data
from . import tangents
from .tangents import DeepTangents, ScalarHeads, Tangents

__all__ = ["MET", "Fit", "Limits", "adam", "lbfgs", "levenberg_marquardt", "limits", "signs"]

MET = 1e-6  # of the largest label
_SMALLEST, _LARGEST = 1e-70, 1e70  # of largest labels; squared gradients are of fourth order
DAMPING, _LOWEST, HIGHEST = 1e-2, 1e-14, 1e8  # in units of the mean squared row
FALL, RISE = 5.0, 4.0  # factors of the damping after a step that helped, and one that did not
CHUNK = 20  # steps of L-BFGS between two looks at the largest error
_EVERY = 500  # steps of Adam between two looks

_Labels = Float[Tensor, " T"]
_Queries = Float[Tensor, "T d"] | None
Weights = ScalarHeads | DeepWeights
_Share = Annotated[int | float, Range(0, 1)]


class Fit(NamedTuple):
    """Where an optimizer ended."""

    weights: Weights
    error: float  # the largest of an output, in units of the largest label
    steps: int
    stop: str  # met; stuck if no step lowers the squared error; steps at the limit
    damping: float | None = None  # the last one of Levenberg-Marquardt


@checked
def _is_a_layer(layer: Layer, contexts: Float[Tensor, "T n d"]) -> None:
    """One of several layers, whose weights have the sizes of the tokens."""


def _can_be_fitted(weights, contexts, queries, labels) -> None:
    """Finite data, of which float64 holds squared gradients."""
    if isinstance(weights, DeepWeights):
        if queries is not None:
            refuse("queries", type(queries).__name__, "None, since the last token asks")
        for layer in weights.layers:
            _is_a_layer(layer, contexts)
        if weights.W_D.shape[1] != 1:
            refuse("weights.W_D", f"shape {(*weights.W_D.shape,)}", "one output, shape (d, 1)")
    elif queries is None:
        refuse("queries", "None", "one for each example")
    data = {"contexts": contexts} | ({} if queries is None else {"queries": queries})
    check_data(**data, labels=labels, **tangents.named(weights))
    largest = float(labels.abs().max())
    if largest and not _SMALLEST <= largest <= _LARGEST:
        got = f"a largest label of {largest:.0e}, where float64 may lose squared gradients"
        refuse("labels", got, f"one from {_SMALLEST:.0e} to {_LARGEST:.0e}, or zeros")
    with torch.no_grad():
        outputs = _Problem(contexts, queries, labels).outputs(_copied(weights))
    if not outputs.isfinite().all():
        got = "weights with which some output is not finite on these contexts and queries"
        refuse("weights", got, "finite outputs")


def _copied(weights: Weights, grad: bool = False) -> Weights:  # in float64
    tensors = (w.detach().clone(memory_format=torch.contiguous_format) for w in weights.tensors)
    return weights.like(tuple(w.double().requires_grad_(grad) for w in tensors))


class _Problem:
    """The examples in float64, and when their labels count as met; without queries of layers."""

    def __init__(
        self, contexts: Tensor, queries: Tensor | None, labels: Tensor, tolerance: float = MET
    ):
        self.contexts, self.labels = contexts.double(), labels.double()
        self.queries = None if queries is None else queries.double()
        self.largest = max(float(self.labels.abs().max()), torch.finfo(torch.float64).tiny)
        self.tolerance = tolerance

    def outputs(self, weights: Weights) -> _Labels:
        if self.queries is None:
            return deep(weights, self.contexts)[:, 0]
        return tangents.scalar_outputs(weights, self.contexts, self.queries)

    def tangents(self, weights: Weights) -> Tangents | DeepTangents:
        if self.queries is None:
            return tangents.deep_tangents(weights, self.contexts)
        return tangents.tangents(weights, self.contexts, self.queries)

    def loss(self, weights: Weights) -> Tensor:
        """The mean squared error; of one layer its gradient is put beside the weights."""
        if self.queries is None:
            return (self.outputs(weights) - self.labels).square().mean()
        with torch.no_grad():
            at = self.tangents(weights)
            residual = at.outputs - self.labels
            gradients = at.transposed(2 * residual / len(self.labels))
            for w, gradient in zip(weights, gradients, strict=True):
                w.grad = gradient.contiguous()
            return residual.square().mean()

    def attention(self, weights: Weights) -> list[Tensor]:
        """The attention weights of all heads on all examples, of each layer token by token."""
        asking = [(weights, self.contexts, self.queries)]
        if self.queries is None:
            pairs = zip(weights.layers, streams(weights, self.contexts), strict=False)
            asking = [(layer, X, query) for layer, X in pairs for query in X.unbind(1)]
            del asking[-self.contexts.shape[1] : -1]  # the last layer is read at the last token
        return [attention_weights(at.W_Q, at.W_K, X, query) for at, X, query in asking]

    def some(self, chosen: slice | Tensor) -> _Problem:
        """The same with some of the examples."""
        contexts = self.contexts if self.contexts.ndim == 2 else self.contexts[chosen]
        queries = None if self.queries is None else self.queries[chosen]
        return _Problem(contexts, queries, self.labels[chosen], self.tolerance)

    def error(self, residual: _Labels) -> float:
        """The largest, in units of the largest label."""
        return float(residual.abs().max()) / self.largest

    def fit(self, weights: Weights, *end: Any) -> Fit:
        """What to return, given steps, why there are no more of them, and the damping."""
        error = self.error(self.outputs(weights) - self.labels)
        fit = Fit(weights, error, *end)
        return fit._replace(stop="met") if error <= self.tolerance else fit


# --- Levenberg-Marquardt --------------------------------------------------------------------------


@checked(also=_can_be_fitted)
@torch.no_grad()
def levenberg_marquardt(
    weights: Weights,
    contexts: Contexts,
    queries: _Queries,
    labels: _Labels,
    *,
    steps: int,
    tolerance: _Share = MET,
) -> Fit:
    r"""Meet labels by damped Gauss-Newton steps.

    A step is :math:`-J^\top (J J^\top + \lambda s)^{-1} r` with the residual ``r``, where ``s`` is
    the mean diagonal entry of :math:`J J^\top`. The damping :math:`\lambda` falls by a factor of 5
    after a step that lowers the squared error, and rises by a factor of 4 otherwise, up to 1e8
    (``stuck``). A step of one layer costs ``T^2 d`` multiplications a head, one of several ``T^2``
    for each weight, and each damping ``T^3 / 6``.
    """
    problem = _Problem(contexts, queries, labels, tolerance)

    def done(made: int, residual: _Labels) -> bool:
        return problem.error(residual) <= tolerance or made == steps

    start = _copied(weights)
    made, weights, damping = newton(start, problem.outputs, problem.tangents, problem.labels, done)
    return problem.fit(weights, made, "stuck" if damping > HIGHEST else "steps", damping)


def newton(
    weights: Any,
    outputs: Callable[[Any], _Labels],
    derivative: Callable[[Any], Tangents | DeepTangents],
    labels: _Labels,
    done: Callable[[int, _Labels], bool],
) -> tuple[int, Any, float]:
    """Steps until ``done``, asked with their number and the errors; weights, and last damping.

    A damping above the highest says that no step lowers the squared error.
    """
    made, damping = 0, DAMPING
    while True:
        at = derivative(weights)
        residual = at.outputs - labels
        if done(made, residual):
            return made, weights, damping
        K = at.gram()  # J J^T
        diagonal = K.diagonal().clone()
        s, squared = float(diagonal.mean()), float(residual.square().sum())
        while damping <= HIGHEST:
            K.diagonal().copy_(diagonal + damping * s)
            factor, failed = torch.linalg.cholesky_ex(K)
            if not failed:
                moved = weights.moved(at.transposed(tangents.solved(factor, residual)), -1.0)
                if float((outputs(moved) - labels).square().sum()) < squared:
                    break
            damping *= RISE
        else:
            return made, weights, damping
        made, weights, damping = made + 1, moved, max(damping / FALL, _LOWEST)


def _are_signs(weights, contexts, queries, labels) -> None:
    _can_be_fitted(weights, contexts, queries, labels)
    if not (labels.abs() == 1).all():
        refuse("labels", f"values from {labels.min():g} to {labels.max():g}", "1 and -1")


@checked(also=_are_signs)
@torch.no_grad()
def signs(
    weights: ScalarHeads, contexts: Contexts, queries: _Queries, labels: _Labels, *, steps: int
) -> Fit:
    """Give outputs the signs of labels 1 and -1, by :func:`levenberg_marquardt` on squared hinges.

    It stops when all signs are right (``met``); ``error`` is the share of those that are wrong.
    """
    problem = _Problem(contexts, queries, labels)
    y = problem.labels

    def margins(at: ScalarHeads) -> _Labels:
        return (problem.outputs(at) * y).clamp(max=1)

    def derivative(at: ScalarHeads) -> Tangents:  # nothing is asked beyond the margin
        rows = problem.tangents(at)
        pull = (y * (rows.outputs * y < 1))[:, None]
        pulled = {name: pull * getattr(rows, name) for name in ("attended", "pulls", "keyed")}
        return rows._replace(outputs=(rows.outputs * y).clamp(max=1), **pulled)

    def done(made: int, short: _Labels) -> bool:
        return made == steps or bool((short > -1).all())

    start, ones = _copied(weights), torch.ones_like(y)
    made, weights, damping = newton(start, margins, derivative, ones, done)
    wrong = float((margins(weights) <= 0).double().mean())
    ended = "stuck" if damping > HIGHEST else "steps"
    return Fit(weights, wrong, made, ended if wrong else "met", damping)


# --- L-BFGS and Adam ------------------------------------------------------------------------------


@checked(also=_can_be_fitted)
def lbfgs(
    weights: Weights, contexts: Contexts, queries: _Queries, labels: _Labels, *, steps: int
) -> Fit:
    """Meet labels by L-BFGS on the mean squared error, with a strong Wolfe line search.

    Every 20 steps the errors are looked at; it is ``stuck`` if the squared one is no lower.
    """
    problem = _Problem(contexts, queries, labels)
    weights, made, before = _copied(weights, grad=True), 0, math.inf
    for made, _ in lbfgs_steps(lambda: problem.loss(weights), weights.tensors, steps):
        with torch.no_grad():
            residual = problem.outputs(weights) - problem.labels
        squared = float(residual.square().sum())
        if problem.error(residual) <= MET or not squared < before:
            return problem.fit(_copied(weights), made, "stuck")
        before = squared
    return problem.fit(_copied(weights), made, "steps")


def lbfgs_steps(
    loss: Callable[[], Tensor], leaves: Iterable[Tensor], steps: int, evaluations: int = 25 * CHUNK
) -> Iterator[tuple[int, Tensor]]:
    """:func:`~attnmem.core.descent.adam_steps` by L-BFGS, told after every 20 steps.

    The loss is that before these steps, which look at so many points at most, or one search more.
    """
    leaves = [*leaves]
    never = {"tolerance_grad": 0.0, "tolerance_change": 0.0}  # who is told decides when to stop
    search = {"max_eval": evaluations, "line_search_fn": "strong_wolfe"}
    optimizer, made = torch.optim.LBFGS(leaves, history_size=50, **search, **never), 0

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        if value.requires_grad:
            value.backward()
        return value.detach()

    while made < steps:
        optimizer.param_groups[0]["max_iter"] = min(CHUNK, steps - made)
        before = optimizer.step(closure)
        made = optimizer.state[leaves[0]]["n_iter"]
        yield made, before


@checked(also=_can_be_fitted)
def adam(
    weights: Weights,
    contexts: Contexts,
    queries: _Queries,
    labels: _Labels,
    *,
    steps: int,
    rate: Callable[[int], float],
    batch: int | None = None,
    seed: Seed = 0,
) -> Fit:
    """Meet labels by Adam on the mean squared error.

    Every 500 steps, as in Mahdavi et al. 2024, Appendix I, the whole set is evaluated, and the
    weights with the smallest squared error are kept; ``stop`` is never ``stuck``. ``rate`` is that
    of each step, from 0. A step sees all examples, or a ``batch`` from epochs shuffled by ``seed``.
    """
    problem = _Problem(contexts, queries, labels)
    weights = _copied(weights, grad=True)
    losses = (problem.some(part).loss(weights) for part in _batches(len(labels), batch, seed))
    loss, rates = partial(next, losses), partial(LambdaLR, lr_lambda=rate)  # which lr multiplies
    best, least = _copied(weights), math.inf
    for made, _ in adam_steps(loss, weights.tensors, steps, rates, lr=1.0, fused=True):
        if made % _EVERY and made < steps:
            continue
        now = _copied(weights)
        residual = problem.outputs(now) - problem.labels
        if (squared := float(residual.square().sum())) < least:
            best, least = now, squared
        if problem.error(residual) <= MET:
            return problem.fit(now, made, "met")
    return problem.fit(best, steps, "steps")


def _batches(T: int, batch: int | None, seed: int) -> Iterator[slice | Tensor]:
    """Examples of one step after the other; the last batch of an epoch may be short."""
    g, whole = torch.Generator().manual_seed(seed), batch is None or batch >= T
    while True:
        yield from (
            [slice(None)] if whole else torch.randperm(T, generator=g, device="cpu").split(batch)
        )


# --- what limits training ------------------------------------------------------------------------


class Limits(NamedTuple):
    """What tells a local minimum from bad conditioning, at the weights where an optimizer ended."""

    rms: float  # the root mean square of the errors, in units of the largest label
    gradient: float  # |J^T r| / (|J| |r|): 0 at a stationary point, else at least 1 / cond(J)
    least: float  # the least singular value of J that is one of the T largest
    largest: float  # the largest singular value
    saturated: float  # the share of heads, examples and tokens that ask with one above 0.99
    weight: float  # the largest weight


@checked(also=_can_be_fitted)
@torch.no_grad()
def limits(weights: Weights, contexts: Contexts, queries: _Queries, labels: _Labels) -> Limits:
    """Measure what limits training at some weights.

    Singular values are roots of eigenvalues: rounding hides those below ``1e-8`` of the largest.
    """
    problem, weights = _Problem(contexts, queries, labels), _copied(weights)
    at = problem.tangents(weights)
    residual = at.outputs - problem.labels
    values = torch.linalg.eigvalsh(at.gram()).clamp(min=0).sqrt()
    down = at.transposed(residual).tensors
    gradient = math.sqrt(sum(float(w.square().sum()) for w in down))
    size = float(residual.norm())
    tops = torch.cat([alpha.amax(-1).flatten() for alpha in problem.attention(weights)])
    return Limits(
        rms=size / len(labels) ** 0.5 / problem.largest,
        gradient=gradient / (float(values[-1]) * size) if size else 0.0,
        least=float(values[0]),
        largest=float(values[-1]),
        saturated=float((tops > SATURATED).to(torch.float64).mean()),
        weight=max(float(w.abs().max()) for w in weights.tensors),
    )
