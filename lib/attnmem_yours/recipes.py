"""How weights are sought that meet labels: what is tried, in which order, and with which effort."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import scipy
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from attnmem.core import bounds
from attnmem.core.layers import MHAWeights
from attnmem.core.memorize import memorize_mha
from attnmem.core.random import gaussian
from attnmem.theory.cancelling import linearized, near
from attnmem.theory.fitting import CHUNK, MET, lbfgs_steps
from attnmem.theory.tangents import ScalarHeads

from . import layer
from .data import Examples, largest
from .layer import Reduction

THEOREM = "the construction of Theorem 1"
ZEROS = "values of zero"
CANCELLING = "heads that nearly cancel"
DESCENT = "Levenberg-Marquardt"
READ_OUT = "random attention, and a read-out that fits all outputs at once"
ENTROPY = "L-BFGS on the cross-entropy"

# Rules of thumb, but where a reason is given.
AIM = 1e-9  # of the largest label, where a fit stops: a thousandth of what counts as met
_SHARES = (1.0, 0.98, 0.94, 0.88, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # of the rank, tried in turn
_SPREADS = (0.5, 0.5, 2.0, 2.0)  # standard deviations of logits at the starts; sharp ones stall
_RESTARTS, _FEW = 4, 500  # starts of all labels, if there are at most so many
_SOFT = 0.1  # factor of the values where a descent starts
LONGEST, QUICK = 2000, 200  # steps of L-BFGS: at most, and of a quick fit
_PLATEAU, _LOWER = 100, 0.98  # steps in which the loss must fall below this share
_WORK, _MOST = 2e12, 20_000  # multiplications of all steps, some minutes of one core; and steps
_PATIENCE = 0.4  # share of the steps left that one attempt may take


class Problem(NamedTuple):
    """What is to be met, by heads of one width: of equal examples one."""

    examples: Examples  # as they came
    reduced: Examples  # the same in the dimensions that they have
    reduction: Reduction
    head_dim: int
    seed: int


def posed(
    examples: Examples, rows: Int[Tensor, " k"], labels: Tensor, head_dim: int, seed: int
) -> Problem:
    """The problem of meeting ``labels`` on some rows; the dimensions are those of all rows."""
    reduced, reduction = layer.reduced(examples)
    return Problem(
        examples=examples.some(rows)._replace(labels=labels),
        reduced=reduced.some(rows)._replace(labels=labels),
        reduction=reduction,
        head_dim=head_dim,
        seed=seed,
    )


@dataclasses.dataclass
class Effort:
    """What the search may still spend."""

    steps: int  # of Levenberg-Marquardt, of all attempts together
    until: float = math.inf  # on the clock time.monotonic


def late(until: float) -> bool:
    """Whether no new attempt may begin."""
    return time.monotonic() > until


def ceiling(problem: Problem, heads: int) -> int:
    """The numbers that one output of so many heads shows on these data."""
    return bounds.context_ceiling(heads, problem.head_dim, *problem.reduction.dimensions)


def affordable_steps(problem: Problem, heads: int) -> int:
    """Steps of Levenberg-Marquardt in some minutes."""
    T, D = problem.reduced.queries.shape
    T = min(T, ceiling(problem, heads))
    # Products of all pairs of rows, and Cholesky's factor of them.
    work = T**2 * (heads * (D + min(problem.head_dim, D)) + T / 3) + 1
    return math.ceil(min(_MOST, _WORK / work))


def candidates(
    problem: Problem, heads: int, effort: Effort, say: Callable[[str], None]
) -> Iterator[tuple[MHAWeights, str]]:
    """The recipe: weights that may meet the labels, and what built them."""
    weights = by_theorem(problem, heads)
    if weights is not None:
        yield weights, THEOREM
    if problem.examples.classes is None:
        fits = by_columns(problem, heads, effort, say)
        if fits is not None:
            yield fits
        yield by_read_out(problem, heads), READ_OUT
        return
    restarts = _RESTARTS if len(problem.examples.queries) <= _FEW else 1
    for attempt in range(restarts):
        say(f"{ENTROPY}, start {attempt + 1}")
        yield by_entropy(problem, heads, LONGEST, attempt, effort.until), ENTROPY
        if late(effort.until):
            return


def by_theorem(problem: Problem, heads: int) -> MHAWeights | None:
    """The construction of Theorem 1, on as many examples as it is for, if its hypotheses hold."""
    if problem.examples.mask is not None:
        return None
    n = problem.examples.contexts.shape[-2]
    examples = problem.examples.some(slice(bounds.mha_capacity(heads, n, problem.head_dim)))
    labels = examples.labels
    if examples.classes is not None:
        labels = F.one_hot(labels, len(examples.classes)).double()
    sizes = {"heads": heads, "head_dim": problem.head_dim, "seed": problem.seed}
    try:
        return memorize_mha(examples.contexts, examples.queries, labels, **sizes)
    except ValueError:  # an assumption fails
        return None


def start(problem: Problem, heads: int, attempt: int = 0) -> ScalarHeads:
    """Random heads where a fit begins."""
    spread, seed = _SPREADS[attempt % len(_SPREADS)], problem.seed + attempt
    dimensions = problem.reduction.dimensions
    return layer.draw(heads, problem.head_dim, problem.reduced, dimensions, spread, seed)


def assembled(problem: Problem, maps: ScalarHeads, values: Tensor, decoder: Tensor) -> MHAWeights:
    """The layer whose values, of the reduced examples, are added into the rows of ``decoder``."""
    outer = problem.reduction.maps.outward(maps)
    W_Q, W_K = (F.pad(W, (0, problem.head_dim - W.shape[2])) for W in (outer.W_Q, outer.W_K))
    W_O = torch.eye(values.shape[2], dtype=values.dtype).repeat(len(values), 1)
    return MHAWeights(W_Q, W_K, problem.reduction.maps.tokens @ values, W_O, decoder)


# --- real labels ----------------------------------------------------------------------------------


def by_read_out(problem: Problem, heads: int) -> MHAWeights:
    """Random attention, and values that meet as many examples as their features are independent."""
    labels = problem.reduced.labels
    size = largest(labels)
    random = start(problem, heads, attempt=2)
    Z = layer.attended(random.W_Q, random.W_K, problem.reduced).flatten(1)
    _, R, order = scipy.linalg.qr(Z.numpy().T, mode="economic", pivoting=True)
    pivots = np.abs(np.diag(R))
    rank = int((pivots > 1e-10 * pivots[0]).sum())
    rows = torch.from_numpy(order[:rank].astype(np.int64))
    M = torch.linalg.lstsq(Z[rows], (labels / size)[rows], driver="gelsd").solution
    return assembled(problem, random, M.unflatten(0, (heads, -1)), torch.diag(size))


def _factored(labels: Float[Tensor, "T o"]) -> tuple[Float[Tensor, "T k"], Float[Tensor, "k o"]]:
    """As few columns as span the labels, and the matrix that makes the labels of them."""
    size = largest(labels)
    Y = labels / size
    U, sizes, Vh = torch.linalg.svd(Y, full_matrices=False)
    k = max(1, int((sizes > 1e-12 * sizes[0]).sum()))
    if k == Y.shape[1]:
        return Y, torch.eye(k).double() * size
    return U[:, :k] * sizes[:k], Vh[:k] * size


def by_columns(
    problem: Problem, heads: int, effort: Effort, say: Callable[[str], None]
) -> tuple[MHAWeights, str] | None:
    """Some heads for each column of a factor of the labels, if there are enough; by what."""
    columns, decoder = _factored(problem.reduced.labels)
    k = columns.shape[1]
    if k > heads:
        return None
    share, more = divmod(heads, k)
    fits = []
    for j, y in enumerate(columns.T):
        n_heads = share + 1 if j < more else share
        fits.append(fit_output(problem, n_heads, y, effort, say))
    tensors = zip(*(heads for heads, _ in fits), strict=True)
    maps = ScalarHeads(*(torch.cat(tensor) for tensor in tensors))
    column = torch.arange(k).repeat_interleave(torch.tensor([len(heads.mu) for heads, _ in fits]))
    values = maps.mu[..., None] * F.one_hot(column, k)[:, None]
    builders = sorted({how for _, how in fits})
    return assembled(problem, maps, values, decoder), " and ".join(builders)


class Attempt(NamedTuple):
    """Heads for one output."""

    heads: ScalarHeads
    errors: Float[Tensor, " T"]
    how: str  # what built them


def fit_output(
    problem: Problem, heads: int, y: Float[Tensor, " T"], effort: Effort, say: Callable[[str], None]
) -> tuple[ScalarHeads, str]:
    """Heads that meet one output of all examples, or of as many as some attempt meets."""
    size = float(y.abs().max())
    zero = start(problem, heads)
    zero = zero._replace(mu=0 * zero.mu)
    if not size:
        return zero, ZEROS
    y = y / size
    best, best_met = Attempt(zero, y.abs(), ZEROS), int((y == 0).sum())
    say(CANCELLING)
    descents = by_descent(problem, heads, y, effort, say)
    for attempt in itertools.chain(by_cancelling(problem, heads, y), descents):
        met = int((attempt.errors <= MET).sum())
        if met > best_met or met == len(y):  # weights of a descent are smaller
            best, best_met = attempt, met
        if attempt.how == DESCENT and (best_met == len(y) or late(effort.until)):
            break
    return best.heads._replace(mu=size * best.heads.mu), best.how


def _errors(problem: Problem, heads: ScalarHeads, y: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Errors of one output, computed on the examples as they came."""
    weights = problem.reduction.maps.outward(heads).layer()
    return (layer.outputs(weights, problem.examples)[:, 0] - y).abs()


def by_cancelling(problem: Problem, heads: int, y: Float[Tensor, " T"]) -> Iterator[Attempt]:
    """Near heads that cancel: all labels of the rows whose number ``examine`` prints."""
    head_dim, dimensions, seed = problem.head_dim, problem.reduction.dimensions, problem.seed
    rows = layer.enough_rows(len(y), ceiling(problem, heads), seed)
    examples = problem.reduced.some(rows)
    base = layer.draw(heads, head_dim, examples, dimensions, layer.SHARP, seed, cancelling=True)
    clear, _ = layer.independent_rows(base, examples, layer.SURE)
    examples, rows = examples.some(clear), rows[clear]
    linear = linearized(base, layer.derivative(base, examples), y[rows])
    if linear is None:
        return
    for weights, error in near(linear, lambda w: layer.scalar_outputs(w, examples), y[rows]):
        if error <= MET:
            errors = _errors(problem, weights, y)
            yield Attempt(weights, errors, CANCELLING)
            if float(errors[rows].max()) <= MET:
                return


def by_descent(
    problem: Problem, heads: int, y: Float[Tensor, " T"], effort: Effort, say: Callable[[str], None]
) -> Iterator[Attempt]:
    """Fits of all labels; then of fewer and fewer, until one meets as many as it is for."""
    T = len(y)
    # The fits of all labels so far. Before the first, any order of the examples will do.
    complete = [Attempt(start(problem, heads), torch.full((T,), math.inf), DESCENT)]
    for rows, weights in _tries(problem, heads, complete):
        say(f"{DESCENT} on {len(rows)} examples")
        weights, steps = layer.fit(
            weights,
            problem.reduced.some(rows),
            y[rows],
            tolerance=AIM,
            steps=math.ceil(_PATIENCE * effort.steps),
            until=effort.until,
        )
        effort.steps -= steps
        attempt = Attempt(weights, _errors(problem, weights, y), DESCENT)
        yield attempt
        if len(rows) == T:
            complete.append(attempt)
        if int((attempt.errors <= MET).sum()) >= len(rows) or not effort.steps:
            return


def _tries(
    problem: Problem, heads: int, complete: list[Attempt]
) -> Iterator[tuple[Int[Tensor, " k"], ScalarHeads]]:
    """Examples, and where their fit starts: of fewer also from the nearest fit of all so far."""
    order = _independent(problem, heads)
    T = len(problem.reduced.queries)
    restarts = _RESTARTS if T <= _FEW else 1
    starts = [start(problem, heads, attempt) for attempt in range(restarts)]
    starts = [heads._replace(mu=_SOFT * heads.mu) for heads in starts]
    full = len(order) >= T
    if full:
        for weights in starts:
            yield order, weights
    if not len(order):
        return
    for share in _SHARES:
        count = max(1, int(share * len(order)))
        if full:
            nearest = min(complete, key=lambda attempt: float(attempt.errors.square().sum()))
            yield nearest.errors.argsort()[:count], nearest.heads
        if not full or T <= _FEW:
            for weights in starts:
                yield order[:count], weights


def _independent(problem: Problem, heads: int) -> Int[Tensor, " k"]:
    """Examples whose rows of the derivative are independent, at the start or at sharp attention."""
    head_dim, dimensions, seed = problem.head_dim, problem.reduction.dimensions, problem.seed
    rows = layer.enough_rows(len(problem.reduced.queries), ceiling(problem, heads), seed)
    examples = problem.reduced.some(rows)
    sharp = layer.draw(heads, head_dim, problem.reduced, dimensions, layer.SHARP, seed)
    orders = [layer.independent_rows(w, examples)[0] for w in (start(problem, heads), sharp)]
    return rows[max(orders, key=len)][: ceiling(problem, heads)]


# --- classes --------------------------------------------------------------------------------------


def by_entropy(
    problem: Problem, heads: int, steps: int, attempt: int = 0, until: float = math.inf
) -> MHAWeights:
    """All weights of the layer by at most so many steps of L-BFGS, with scores of full width."""
    labels, n_classes = problem.reduced.labels, len(problem.examples.classes)
    maps = start(problem, heads, attempt)
    g = torch.Generator().manual_seed(problem.seed + attempt)
    values = 0.1 * gaussian(g, *maps.mu.shape, n_classes)
    weights = [W.clone().requires_grad_() for W in (maps.W_Q, maps.W_K, values)]

    def scores() -> Tensor:
        W_Q, W_K, values = weights
        return torch.einsum("thd,hdk->tk", layer.attended(W_Q, W_K, problem.reduced), values)

    def loss() -> Tensor:
        return F.cross_entropy(scores(), labels)

    losses, window = [], _PLATEAU // CHUNK
    # Evaluations of the loss are as many as torch takes by default: five for four steps.
    chunks = lbfgs_steps(loss, weights, steps, evaluations=5 * CHUNK // 4)
    for _, before in itertools.islice(chunks, steps // CHUNK):
        losses.append(float(before))
        flat = len(losses) > window and losses[-1] > _LOWER * losses[-1 - window]
        with torch.no_grad():
            met = scores().argmax(1).equal(labels)
        if met or flat or late(until):
            break
    W_Q, W_K, values = (W.detach() for W in weights)
    maps = maps._replace(W_Q=W_Q, W_K=W_K)
    return assembled(problem, maps, values, torch.eye(n_classes).double())
