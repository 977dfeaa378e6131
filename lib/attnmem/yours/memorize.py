"""Weights for one's own data: as many labels as could be met, and why no more."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..checks import Range, Seed, check_size, checked, refuse
from ..core import bounds
from ..core.layers import MHAWeights
from ..core.memorize import memorize_mha
from ..theory.cancellation import linearized, near
from ..theory.fitting import MET
from ..theory.tangents import ScalarHeads
from . import layer
from .data import Data, read, repeats, wrapped
from .layer import GRAM, Reduced

AIM = 1e-9  # of the largest label, where a fit stops
# Of the rank, tried in turn where not all can be met.
SHARES = (1.0, 0.98, 0.94, 0.88, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
SPREADS = (0.5, 0.5, 2.0, 2.0)  # standard deviations of the logits at the start; sharp ones stall
RESTARTS, FEW = 4, 500  # starts of all labels, if there are few
LONGEST, PLATEAU, CHUNK = 2000, 100, 20  # steps of L-BFGS: most, without progress, between looks
WORK, MOST = 2e12, 20_000  # multiplications of all steps, some minutes of one core; and steps
PATIENCE = 0.4  # share of the steps left that one attempt may take
CANCELLING, DESCENT = "heads that nearly cancel", "Levenberg-Marquardt"
ROWS = 2048  # examples whose outputs are computed at once


@dataclasses.dataclass(frozen=True)
class Memorized:
    """The weights that :func:`memorize` found, and how far they go.

    Attributes:
        weights: The layer, in float64; ``mha(weights, contexts, queries)`` computes it.
        errors: Of reals, the largest error of each example, in units of the largest label of its
            column. Of classes, the score of the best wrong class less that of the right one:
            negative where the right class wins.
        met: For each example whether its label is met.
        reason: Why the others are not; ``all labels are met`` if there are none.
        how: What built the weights.
        classes: The classes by output, None for reals.
    """

    weights: MHAWeights
    errors: Float[Tensor, " T"]
    met: Bool[Tensor, " T"]
    reason: str
    how: str
    classes: list | None

    @property
    def count(self) -> int:
        """Number of labels that are met."""
        return int(self.met.sum())

    def predict(self, contexts: Any, queries: Any, mask: Any = None) -> np.ndarray:
        """One number, row of numbers, or class for each example of data of the same width."""
        data, width = read(contexts, queries, None, mask), self.weights.W_Q.shape[-2]
        check_size("contexts", data.contexts, -1, width, "the width of what was memorized")
        scores = _apply(self.weights, data)
        if self.classes is not None:
            return np.array(self.classes)[scores.argmax(-1).numpy()]
        return scores.squeeze(-1).numpy()

    def __str__(self) -> str:
        """How many labels are met, by what, and why no more."""
        H, _, head_dim = self.weights.W_Q.shape
        width = self.weights.W_V.shape[-1]
        met = f"{self.count} of {len(self.met)} labels met"
        if self.count:
            worst = float(self.errors[self.met].max())
            met += f" (least margin {-worst:.1e})" if self.classes else f" (errors to {worst:.1e})"
        size = f"{H} head{'s' * (H > 1)} of width {head_dim}, values of width {width}"
        return wrapped([f"{met} by {size}: {self.how}", self.reason])


def _apply(weights: MHAWeights, data: Data) -> Float[Tensor, "T d_out"]:
    """Outputs of a layer, with padding left out."""
    found = []
    for start in range(0, len(data.queries), ROWS):
        rows = slice(start, start + ROWS)
        part = data._replace(
            contexts=data.contexts if data.shared else data.contexts[rows],
            queries=data.queries[rows],
            mask=None if data.mask is None else data.mask[rows],
        )
        z = layer.attended(weights.W_Q, weights.W_K, part)[1]
        found.append(torch.einsum("thd,hdv->thv", z, weights.W_V).flatten(1))
    return torch.cat(found) @ weights.W_O @ weights.W_D


@checked
def memorize(
    contexts: Any,
    queries: Any,
    labels: Any,
    *,
    heads: int,
    head_dim: int,
    seed: Seed = 0,
    mask: Any = None,
    seconds: Annotated[int | float | None, Range(0, 1e6)] = None,
    say: Callable[[str], None] | None = None,
) -> Memorized:
    """Find weights of one layer that meet as many labels as possible.

    A real label is met to 1e-6 of the largest one of its column. A class is met if its score is
    the largest, so a tie is not met. The construction of Theorem 1 is taken where its hypotheses
    hold. Otherwise real labels are met by heads that nearly cancel, which meet as many as
    :func:`examine` says for sure, and of more by Levenberg-Marquardt; classes by L-BFGS on the
    cross-entropy. All this is done in the dimensions that the data have. Steps are counted, so a
    call gives the same answer on a slow machine.

    Args:
        contexts: Tokens as rows, own ``(T, n, d)`` or shared ``(n, d)``, or a list of tables of
            different lengths.
        queries: One query a row, ``(T, d)``.
        labels: Reals ``(T,)`` or ``(T, d_out)``; integers, booleans and strings are classes.
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``.
        seed: Seed of the start, at least 0.
        mask: True where a token is padding, ``(T, n)``.
        seconds: The time after which no new attempt begins, by default none: then the answer
            depends on the machine.
        say: Is called with each attempt.

    Returns:
        The weights, each example's error, and the reason why some labels are not met.

    Example:
        >>> data = torch.rand(20, 3, 5), torch.rand(20, 5)
        >>> memorize(*data, ["yes", "no"] * 10, heads=2, head_dim=2).reason
        'all labels are met'

    Source: this book, the chapters on the capacity of one layer and on training.
    """
    if labels is None:
        refuse("labels", None, "one label for each query")
    data = read(contexts, queries, labels, mask)
    group = repeats(data).group
    kept = _representatives(data, group)
    first = group.unique()  # as in examine; labels are those of the representatives
    rows, at = kept[first], layer.reduced(data).some(first)
    until = math.inf if seconds is None else time.monotonic() + seconds
    say = say or (lambda _: None)
    steps = _steps(at, heads, head_dim)
    task = _Task(data, rows, at, data.labels[rows], heads, head_dim, seed, steps, until, say)
    most = -1
    for each, by in itertools.chain(
        _by_theorem(task), (_classes if data.classes else _reals)(task)
    ):
        if (count := task.met(each)) > most:
            weights, how, most = each, by, count
        if most == len(rows):
            break
    errors = _errors(data, _apply(weights, data))
    met = _met(data, errors)
    return Memorized(weights, errors, met, _reason(task, kept, met), how, data.classes)


def _steps(at: Reduced, heads: int, head_dim: int) -> int:
    """How many steps of Levenberg-Marquardt may be made."""
    D = at.queries.shape[1]
    T = min(len(at.queries), layer.ceiling(heads, head_dim, at.sizes))
    return math.ceil(min(MOST, WORK / (T**2 * (heads * (D + min(head_dim, D)) + T / 3) + 1)))


@dataclasses.dataclass
class _Task:
    """What is to be met: of equal examples one, with the label that most of them have."""

    data: Data
    rows: Int[Tensor, " k"]
    at: Reduced  # these rows
    labels: Tensor  # theirs
    heads: int
    head_dim: int
    seed: int
    steps: int  # of Levenberg-Marquardt that are left
    until: float
    say: Callable[[str], None]

    def late(self) -> bool:
        return time.monotonic() > self.until

    def start(self, heads: int, attempt: int = 0) -> ScalarHeads:
        spread = SPREADS[attempt % len(SPREADS)]
        return layer.draw(heads, self.head_dim, self.at, spread, self.seed + attempt)

    def met(self, weights: MHAWeights) -> int:
        """How many of the rows meet their labels."""
        errors = _errors(self.data, _apply(weights, self.data))[self.rows]
        return int(_met(self.data, errors).sum())

    def outputs(self, found: ScalarHeads) -> Float[Tensor, " k"]:
        """One output of the rows, computed on the data as they came."""
        return _apply(self.at.outward(found).layer(), self.data)[self.rows, 0]


Found = Iterator[tuple[MHAWeights, str]]  # weights, and what built them
Attempts = Iterator[tuple[ScalarHeads, Float[Tensor, " T"]]]  # heads of one output, and its errors


def _representatives(data: Data, group: Int[Tensor, " T"]) -> Int[Tensor, " T"]:
    """For each example the first equal one with the label that most of the equal ones have."""
    chosen = torch.arange(len(group))
    for s in group[group != chosen].unique():
        members = (group == s).nonzero()[:, 0]
        _, label, counts = data.labels[members].unique(
            dim=0, return_inverse=True, return_counts=True
        )
        chosen[members] = members[(label == counts.argmax()).nonzero()[0, 0]]
    return chosen


def _largest(labels: Float[Tensor, "T o"]) -> Float[Tensor, " o"]:
    """The largest label of each column; one of zeros."""
    size = labels.abs().amax(0)
    return torch.where(size > 0, size, 1.0)


def _errors(data: Data, scores: Tensor) -> Float[Tensor, " T"]:
    if data.classes is None:
        return ((scores - data.labels).abs() / _largest(data.labels)).amax(1)
    if len(data.classes) == 1:
        return scores.new_full((len(scores),), -1.0)
    right = scores.gather(1, data.labels[:, None])[:, 0]
    return scores.scatter(1, data.labels[:, None], -torch.inf).amax(1) - right


def _met(data: Data, errors: Float[Tensor, " T"]) -> Bool[Tensor, " T"]:
    return errors < 0 if data.classes else errors <= MET  # a tie of classes is not met


def _reason(task: _Task, kept: Int[Tensor, " T"], met: Bool[Tensor, " T"]) -> str:
    if met.all():
        return "all labels are met"
    T, left, data = len(met), int((~met).sum()), task.data
    said = f"{left} of {T} labels are not met: "
    if not data.contexts.any():
        return f"{said}all tokens are zero, hence all outputs of any weights"
    differs = (data.labels != data.labels[kept]).reshape(T, -1).any(1)
    disagree = (differs & ~met).nonzero()[:, 0].tolist()
    parts = []
    if disagree:
        s, t = sorted([disagree[0], int(kept[disagree[0]])])
        parts.append(
            f"{len(disagree)} because equal examples have different labels (such as {s} and {t}), "
            "which no weights of any size meet"
        )
    if left > len(disagree):
        parts.append(f"{left - len(disagree)} because {_shortfall(task, T - left)}")
    return said + "; ".join(parts)


def _shortfall(task: _Task, met: int) -> str:
    """Why labels of different examples are not met."""
    T, seconds = len(task.rows), ", more seconds" * task.late()
    more = f"no fit met more; another seed{seconds} or more heads may"
    if task.data.classes or task.labels.shape[1] > 1:
        return more
    room = layer.ceiling(task.heads, task.head_dim, task.at.sizes)
    why = f"with so many heads the outputs have {room} parameters on such data"
    if T <= GRAM:
        room = layer.free_rank(task.heads, task.head_dim, task.at, task.seed).rank
        why = f"with so many heads the derivative has rank {room} on these data (to rounding)"
    limit = f"{why}, and almost no real labels of more than {room} examples are met"
    return more if room >= T else limit if met >= room else f"{limit}; of {room}, {more}"


# --- real labels ----------------------------------------------------------------------------------


def _by_theorem(task: _Task) -> Found:
    """The construction of Theorem 1, on as many rows as it is for, if its hypotheses hold."""
    data, labels = task.data, task.labels
    if data.classes is not None:
        labels = torch.nn.functional.one_hot(labels, len(data.classes)).double()
    room = bounds.mha_capacity(task.heads, data.contexts.shape[-2], task.head_dim)
    rows = task.rows[:room]
    contexts = data.contexts if data.shared else data.contexts[rows]
    sizes = {"heads": task.heads, "head_dim": task.head_dim, "seed": task.seed}
    with contextlib.suppress(ValueError):  # an assumption fails
        if data.mask is None:
            weights = memorize_mha(contexts, data.queries[rows], labels[:room], **sizes)
            yield weights, "the construction of Theorem 1"


def _layer(task: _Task, maps: ScalarHeads, values: Tensor, decoder: Tensor) -> MHAWeights:
    """The layer whose values, of the reduced data, are added into ``decoder``'s rows."""
    outer = task.at.outward(maps)
    rest = task.head_dim - outer.W_Q.shape[2]
    W_Q, W_K = (torch.nn.functional.pad(W, (0, rest)) for W in outer[:2])
    W_O = torch.eye(values.shape[2], dtype=values.dtype).repeat(len(values), 1)
    return MHAWeights(W_Q, W_K, task.at.maps[0] @ values, W_O, decoder)


def _reals(task: _Task) -> Found:
    """Some heads for each column of a shortest factor of the labels, and a read-out of them all."""
    size = _largest(task.labels)
    Y = task.labels / size
    U, sizes, Vh = torch.linalg.svd(Y, full_matrices=False)
    k = max(1, int((sizes > 1e-12 * sizes[0]).sum()))
    columns, mixed = (
        (U[:, :k] * sizes[:k], Vh[:k]) if k < Y.shape[1] else (Y, torch.eye(k).double())
    )
    if k <= task.heads:
        share, more = divmod(task.heads, k)
        fits = [_fitted(task, y, share + (j < more)) for j, y in enumerate(columns.T)]
        heads, names = zip(*fits, strict=True)
        maps = ScalarHeads(*map(torch.cat, zip(*heads, strict=True)))
        owner = torch.arange(k).repeat_interleave(torch.tensor([len(fit.mu) for fit in heads]))
        values = maps.mu[..., None] * torch.nn.functional.one_hot(owner, k)[:, None]
        yield _layer(task, maps, values, mixed * size), " and ".join(sorted({*names}))
    yield _read_out(task, Y, size)


def _fitted(task: _Task, y: Float[Tensor, " T"], heads: int) -> tuple[ScalarHeads, str]:
    """Heads that meet one output of all examples, or of as many as some attempt meets."""
    size, start = float(y.abs().max()), task.start(heads)
    y = y / (size or 1.0)
    best, how, most = start._replace(mu=0 * start.mu), "values of zero", int((y == 0).sum())
    for attempts, name in ((_cancelling, CANCELLING), (_descents, DESCENT)) if size else ():
        for found, away in attempts(task, y, heads):
            met = int((away <= MET).sum())
            if met > most or met == len(y):  # weights of a descent are smaller
                best, how, most = found, name, met
            if attempts is _descents and (most == len(y) or task.late()):
                break
    return best._replace(mu=size * best.mu), how


def _cancelling(task: _Task, y: Float[Tensor, " T"], heads: int) -> Attempts:
    """Near heads that cancel: all labels of the rows whose number :func:`examine` prints."""
    task.say(CANCELLING)
    rows = layer.enough_rows(task.at, heads, task.head_dim, task.seed)
    at = task.at.some(rows)
    base = layer.cancelling(heads, task.head_dim, at, task.seed)
    clear = layer.independent_rows(base, at, layer.SURE)
    at, rows = at.some(clear), rows[clear]
    linear = linearized(base, layer.tangents(base, at), y[rows])
    for found, error in near(linear, lambda w: layer.outputs(w, at), y[rows]) if linear else ():
        if error <= MET:
            away = (task.outputs(found) - y).abs()
            yield found, away
            if float(away[rows].max()) <= MET:
                return


def _descents(task: _Task, y: Float[Tensor, " T"], heads: int) -> Attempts:
    """Fits of all labels; then of fewer and fewer, until one succeeds."""
    at, T = task.at, len(y)
    some = layer.enough_rows(at, heads, task.head_dim, task.seed)
    sharp = layer.draw(heads, task.head_dim, at, layer.SHARP, task.seed)
    orders = [layer.independent_rows(w, at.some(some)) for w in (task.start(heads), sharp)]
    order = some[max(orders, key=len)][: layer.ceiling(heads, task.head_dim, at.sizes)]
    full, starts = len(order) >= T, RESTARTS if T <= FEW else 1
    # How many examples, and from which start; None is from the nearest fit of all, the best of its.
    tries: list[tuple[int, int | None]] = [(T, attempt) for attempt in range(starts)] * full
    for share in SHARES if len(order) else ():
        count = max(1, int(share * len(order)))
        tries += [(count, None)] * full
        tries += [(count, attempt) for attempt in range(starts)] * (not full or T <= FEW)
    nearest, errors = task.start(heads), torch.full((T,), math.inf)
    for count, attempt in tries:
        task.say(f"{DESCENT} on {count} examples")
        start = task.start(heads, attempt or 0)
        first = nearest if attempt is None else start._replace(mu=0.1 * start.mu)
        rows = errors.argsort()[:count] if attempt is None else order[:count]
        limits = {"steps": math.ceil(PATIENCE * task.steps), "until": task.until}
        found, made = layer.meet(first, at.some(rows), y[rows], tolerance=AIM, **limits)
        task.steps -= made
        away = (task.outputs(found) - y).abs()
        yield found, away
        if count == T and float(away.square().sum()) < float(errors.square().sum()):
            nearest, errors = found, away
        if int((away <= MET).sum()) >= count or not task.steps:
            return


def _read_out(task: _Task, Y: Float[Tensor, "T o"], size: Tensor) -> tuple[MHAWeights, str]:
    """Random attention, and a read-out that meets all outputs of as many examples as it can."""
    heads = task.start(task.heads, attempt=2)
    Z = layer.features(heads.W_Q, heads.W_K, task.at).flatten(1)
    _, R, order = scipy.linalg.qr(Z.numpy().T, mode="economic", pivoting=True)
    steep = np.abs(np.diag(R))
    rows = torch.from_numpy(order[: int((steep > 1e-10 * steep[0]).sum())].astype(np.int64))
    M = torch.linalg.lstsq(Z[rows], Y[rows], driver="gelsd").solution
    values = M.unflatten(0, (task.heads, -1))
    how = "random attention, and a read-out that meets all outputs at once"
    return _layer(task, heads, values, torch.diag(size)), how


# --- classes --------------------------------------------------------------------------------------


def _classes(task: _Task) -> Found:
    """Several starts of the cross-entropy, if there are few examples."""
    for attempt in range(RESTARTS if len(task.rows) <= FEW else 1):
        task.say(f"L-BFGS on the cross-entropy, start {attempt + 1}")
        yield _by_entropy(task, attempt), "L-BFGS on the cross-entropy"
        if task.late():
            break


def _by_entropy(task: _Task, attempt: int) -> MHAWeights:
    """All weights of the layer by L-BFGS on the cross-entropy, scores of full width."""
    at, K, start = task.at, len(task.data.classes), task.start(task.heads, attempt)
    g = torch.Generator().manual_seed(task.seed + attempt)
    values = 0.1 * torch.randn(*start.mu.shape, K, generator=g, dtype=torch.float64)
    trained = [w.clone().requires_grad_() for w in (start.W_Q, start.W_K, values)]

    def scores() -> Tensor:
        return torch.einsum("thd,hdk->tk", layer.features(*trained[:2], at), trained[2])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(scores(), task.labels)
        loss.backward()
        return loss

    optimizer = torch.optim.LBFGS(
        trained,
        max_iter=CHUNK,
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=0.0,
        tolerance_change=0.0,
    )
    losses: list[float] = []
    for _ in range(LONGEST // CHUNK):
        losses.append(float(optimizer.step(closure).detach()))
        with torch.no_grad():
            wrong = bool((scores().argmax(1) != task.labels).any())
        flat = len(losses) > PLATEAU // CHUNK and losses[-1] > 0.98 * losses[-1 - PLATEAU // CHUNK]
        if not wrong or flat or task.late():
            break
    W_Q, W_K, values = (w.detach() for w in trained)
    return _layer(task, start._replace(W_Q=W_Q, W_K=W_K), values, torch.eye(K).double())
