"""One layer, or several, with one output, trained on all examples at once by three optimizers.

They start from the ``weights`` given, compute in float64, make at most so many ``steps``, and stop
when the largest error is at most 1e-6 (or ``tolerance``) of the largest label. Of one layer
(:class:`~attnmem.theory.tangents.ScalarHeads`), contexts are own or shared. Of several layers
(:class:`~attnmem.core.stacked.DeepWeights`) they are own; the last token asks: ``queries`` is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ..checks import Range, Seed, checked, refuse
from ..core.memorize import SATURATED
from ..core.stacked import DeepWeights, Layer, deep, streams
from ..examples import Contexts, check_data
from . import tangents
from .products import attention_weights
from .tangents import DeepTangents, ScalarHeads, Tangents

__all__ = ["MET", "Fit", "Limits", "adam", "lbfgs", "levenberg_marquardt", "limits", "signs"]

# What the studies' stored rows are made with; other values would make other rows.
MET = 1e-6  # error, of the largest label, within which labels count as met
# Largest labels that are accepted: squared gradients are of fourth order in them, and float64 holds
# numbers from 1e-308 to 1e308.
_SMALLEST, _LARGEST = 1e-70, 1e70
# Damping of Levenberg-Marquardt, in units of the mean squared row: at the start; where rounding of
# J J^T damps as much; and where a step is so short that none is hoped for.
DAMPING, _LOWEST, HIGHEST = 1e-2, 1e-14, 1e8
FALL, RISE = 5.0, 4.0  # factors of the damping after a step that helped, and one that did not
CHUNK = 20  # steps of L-BFGS between two looks at the largest error
_SEARCH = 25  # points that a line search of torch looks at, at most
_HISTORY = 50  # steps that L-BFGS remembers
_EVERY = 500  # steps of Adam between two looks, as in Mahdavi et al. 2024, Appendix I

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
    data = {"contexts": contexts}
    if isinstance(weights, DeepWeights):
        if queries is not None:
            refuse("queries", type(queries).__name__, "None, since the last token asks")
        for layer in weights.layers:
            _is_a_layer(layer, contexts)
        if weights.W_D.shape[1] != 1:
            refuse("weights.W_D", f"shape {(*weights.W_D.shape,)}", "one output, shape (d, 1)")
    else:
        if queries is None:
            refuse("queries", "None", "one for each example")
        data["queries"] = queries
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


def _copied(weights: Weights, grad: bool = False) -> Weights:
    """The same in float64, with tensors of their own."""
    tensors = (W.detach().clone(memory_format=torch.contiguous_format) for W in weights.tensors)
    return weights.like(tuple(W.double().requires_grad_(grad) for W in tensors))


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

    def residual(self, weights: Weights) -> _Labels:
        return self.outputs(weights) - self.labels

    def loss(self, weights: Weights) -> Tensor:
        """The mean squared error; of one layer its gradient is put beside the weights."""
        if self.queries is None:
            return self.residual(weights).square().mean()
        with torch.no_grad():
            derivative = self.tangents(weights)
            residual = derivative.outputs - self.labels
            gradients = derivative.transposed(2 * residual / len(self.labels))
            for W, gradient in zip(weights, gradients, strict=True):
                W.grad = gradient.contiguous()
            return residual.square().mean()

    def attention(self, weights: Weights) -> list[Tensor]:
        """The attention weights of all heads on all examples, of each layer token by token."""
        if self.queries is not None:
            return [attention_weights(weights.W_Q, weights.W_K, self.contexts, self.queries)]
        *inputs, _ = streams(weights, self.contexts)
        asking = [*inputs[:-1], inputs[-1][:, -1:]]  # the last layer is read at the last token
        attention = []
        for layer, X, tokens in zip(weights.layers, inputs, asking, strict=True):
            for query in tokens.unbind(1):
                attention.append(attention_weights(layer.W_Q, layer.W_K, X, query))
        return attention

    def subset(self, rows: slice | Tensor) -> _Problem:
        """The same with some of the examples."""
        contexts = self.contexts if self.contexts.ndim == 2 else self.contexts[rows]
        queries = None if self.queries is None else self.queries[rows]
        return _Problem(contexts, queries, self.labels[rows], self.tolerance)

    def error(self, residual: _Labels) -> float:
        """The largest, in units of the largest label."""
        return float(residual.abs().max()) / self.largest

    def fit(self, weights: Weights, steps: int, stop: str, damping: float | None = None) -> Fit:
        """What to return; ``stop`` says why there are no more steps if labels are not met."""
        error = self.error(self.residual(weights))
        if error <= self.tolerance:
            stop = "met"
        return Fit(weights=weights, error=error, steps=steps, stop=stop, damping=damping)


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

    def done(n_steps: int, residual: _Labels) -> bool:
        return problem.error(residual) <= tolerance or n_steps == steps

    start = _copied(weights)
    n_steps, end, damping = newton(start, problem.outputs, problem.tangents, problem.labels, done)
    return problem.fit(end, n_steps, _reason(damping), damping)


def _reason(damping: float) -> str:
    """Why Levenberg-Marquardt ended, if not since labels are met."""
    return "stuck" if damping > HIGHEST else "steps"


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
    n_steps, damping = 0, DAMPING
    while True:
        tangent = derivative(weights)
        residual = tangent.outputs - labels
        if done(n_steps, residual):
            return n_steps, weights, damping
        moved, damping = _damped_step(weights, tangent, residual, outputs, labels, damping)
        if moved is None:
            return n_steps, weights, damping
        weights, n_steps, damping = moved, n_steps + 1, max(damping / FALL, _LOWEST)


def _damped_step(
    weights: Any,
    tangent: Tangents | DeepTangents,
    residual: _Labels,
    outputs: Callable[[Any], _Labels],
    labels: _Labels,
    damping: float,
) -> tuple[Any, float]:
    """Weights with a smaller squared error, or None, and the damping that was enough, or too much.

    The step is ``J^T (J J^T + damping s)^-1 r``, where ``s`` is the mean squared row of ``J``.
    """
    K = tangent.gram()  # J J^T
    diagonal = K.diagonal().clone()
    s, squared = float(diagonal.mean()), float(residual.square().sum())
    while damping <= HIGHEST:
        K.diagonal().copy_(diagonal + damping * s)
        factor, failed = torch.linalg.cholesky_ex(K)
        if not failed:
            step = tangent.transposed(tangents.solved(factor, residual))
            moved = weights.moved(step, -1.0)
            if float((outputs(moved) - labels).square().sum()) < squared:
                return moved, damping
        damping *= RISE
    return None, damping


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

    def margins(heads: ScalarHeads) -> _Labels:
        return (problem.outputs(heads) * y).clamp(max=1)

    def derivative(heads: ScalarHeads) -> Tangents:  # nothing is asked beyond the margin
        rows = problem.tangents(heads)
        pull = (y * (rows.outputs * y < 1))[:, None]
        return rows._replace(
            outputs=(rows.outputs * y).clamp(max=1),
            attended=pull * rows.attended,
            pulls=pull * rows.pulls,
            keyed=pull * rows.keyed,
        )

    def done(n_steps: int, residual: _Labels) -> bool:  # all margins are above zero
        return n_steps == steps or bool((residual > -1).all())

    start, ones = _copied(weights), torch.ones_like(y)
    n_steps, end, damping = newton(start, margins, derivative, ones, done)
    wrong = float((margins(end) <= 0).double().mean())
    stop = _reason(damping) if wrong else "met"
    return Fit(weights=end, error=wrong, steps=n_steps, stop=stop, damping=damping)


# --- L-BFGS and Adam ------------------------------------------------------------------------------


@checked(also=_can_be_fitted)
def lbfgs(
    weights: Weights, contexts: Contexts, queries: _Queries, labels: _Labels, *, steps: int
) -> Fit:
    """Meet labels by L-BFGS on the mean squared error, with a strong Wolfe line search.

    Every 20 steps the errors are looked at; it is ``stuck`` if the squared one is no lower.
    """
    problem = _Problem(contexts, queries, labels)
    weights, n_steps, before = _copied(weights, grad=True), 0, math.inf
    for n_steps, _ in lbfgs_steps(lambda: problem.loss(weights), weights.tensors, steps):
        with torch.no_grad():
            residual = problem.residual(weights)
        squared = float(residual.square().sum())
        if problem.error(residual) <= MET or not squared < before:
            return problem.fit(_copied(weights), n_steps, "stuck")
        before = squared
    return problem.fit(_copied(weights), n_steps, "steps")


def lbfgs_steps(
    loss: Callable[[], Tensor],
    leaves: Iterable[Tensor],
    steps: int,
    evaluations: int = _SEARCH * CHUNK,
) -> Iterator[tuple[int, Tensor]]:
    """Minimize a loss over its leaves by L-BFGS; after every 20 steps their number, and the loss.

    The loss is that before these steps, which look at so many points at most, or one search more.
    It may put the gradients beside the leaves itself: then it needs no gradient.
    """
    leaves = [*leaves]
    optimizer = torch.optim.LBFGS(
        leaves,
        max_eval=evaluations,
        history_size=_HISTORY,
        line_search_fn="strong_wolfe",
        tolerance_grad=0.0,  # who is told decides when to stop
        tolerance_change=0.0,
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        if value.requires_grad:
            value.backward()
        return value.detach()

    n_steps = 0
    while n_steps < steps:
        optimizer.param_groups[0]["max_iter"] = min(CHUNK, steps - n_steps)
        before = optimizer.step(closure)
        n_steps = optimizer.state[leaves[0]]["n_iter"]
        yield n_steps, before


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
    optimizer = torch.optim.Adam(weights.tensors, lr=1.0, fused=True)  # times the rate of a step
    rates = LambdaLR(optimizer, lr_lambda=rate)
    batches = _batches(len(labels), batch, seed)
    best, least = _copied(weights), math.inf
    for n_steps in range(1, steps + 1):
        optimizer.zero_grad()
        loss = problem.subset(next(batches)).loss(weights)
        if loss.requires_grad:  # that of one layer has put the gradient beside the weights itself
            loss.backward()
        optimizer.step()
        rates.step()
        if n_steps % _EVERY and n_steps < steps:
            continue
        current = _copied(weights)
        residual = problem.residual(current)
        squared = float(residual.square().sum())
        if squared < least:
            best, least = current, squared
        if problem.error(residual) <= MET:
            return problem.fit(current, n_steps, "met")
    return problem.fit(best, steps, "steps")


def _batches(T: int, batch: int | None, seed: int) -> Iterator[slice | Tensor]:
    """Examples of one step after the other; the last batch of an epoch may be short."""
    if batch is None or batch >= T:
        while True:
            yield slice(None)
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(T, generator=generator, device="cpu").split(batch)


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
    derivative = problem.tangents(weights)
    residual = derivative.outputs - problem.labels
    singular = torch.linalg.eigvalsh(derivative.gram()).clamp(min=0).sqrt()
    least, largest = float(singular[0]), float(singular[-1])
    downhill = derivative.transposed(residual).tensors  # J^T r
    gradient = math.sqrt(sum(float(W.square().sum()) for W in downhill))
    size = float(residual.norm())
    tops = torch.cat([alpha.amax(-1).flatten() for alpha in problem.attention(weights)])
    return Limits(
        rms=size / len(labels) ** 0.5 / problem.largest,
        gradient=gradient / (largest * size) if size else 0.0,
        least=least,
        largest=largest,
        saturated=float((tops > SATURATED).to(torch.float64).mean()),
        weight=max(float(W.abs().max()) for W in weights.tensors),
    )
