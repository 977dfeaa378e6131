"""Weights for one's own data: as many labels as could be met, and why no more."""

import contextlib
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import scipy
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnmem.checks import Range, Seed, check_size, checked, need, reading, refuse
from attnmem.core import bounds
from attnmem.core.layers import MHAWeights
from attnmem.core.memorize import memorize_mha
from attnmem.terminal import wrapped
from attnmem.theory.cancelling import linearized, near
from attnmem.theory.fitting import CHUNK, MET, lbfgs_steps
from attnmem.theory.tangents import ScalarHeads, attended

from . import layer
from .data import Data, as_data, repeats

_AIM = 1e-9  # of the largest label, where a fit stops
# Of the rank, tried in turn where not all can be met.
_SHARES = (1.0, 0.98, 0.94, 0.88, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
_SPREADS = (0.5, 0.5, 2.0, 2.0)  # standard deviations of the logits at the start; sharp ones stall
_RESTARTS, _FEW = 4, 500  # starts of all labels, if there are few
_LONGEST, _QUICK, _PLATEAU = 2000, 200, 100  # steps of L-BFGS: most, soon, without progress
_WORK, _MOST = 2e12, 20_000  # multiplications of all steps, some minutes of one core; and steps
_PATIENCE = 0.4  # share of the steps left that one attempt may take
_CANCELLING, _DESCENT = "heads that nearly cancel", "Levenberg-Marquardt"
_KEPT, _BLOCKS, _LARGEST = 0.01, 16, 4e6  # of the largest label; rounds; entries of a derivative
_ROWS = 2048  # examples whose outputs are computed at once

NumberType = Literal["float32", "bfloat16", "float16", "int8"]
_Found = Iterator[tuple[MHAWeights, str]]  # weights, and what built them


@dataclasses.dataclass(frozen=True)
class Memorized:
    """The weights that :func:`memorize` found, and how far they go."""

    weights: MHAWeights  # in float64; mha(weights, contexts, queries) computes the layer
    errors: Float[Tensor, " T"]  # shares of the largest label; of classes, less the margin
    met: Bool[Tensor, " T"]
    reason: str  # why the others are not; "all labels are met" if there are none
    how: str  # what built the weights
    classes: list | None  # by output; None for reals
    kept: dict[str, int]  # labels kept, reals to 1%, by number type; of ``keep`` alone

    @property
    def count(self) -> int:
        """Number of labels that are met."""
        return int(self.met.sum())

    def predict(self, contexts: Any, queries: Any, mask: Any = None) -> np.ndarray:
        """One number, row of numbers, or class for each example of data of the same width."""
        return _answers(self.weights, self.classes, as_data(contexts, queries, None, mask))

    def __str__(self) -> str:
        """How many labels are met, by what, and why no more."""
        H, _, head_dim = self.weights.W_Q.shape
        met = f"{self.count} of {len(self.met)} labels stored"
        if self.count:
            worst = float(self.errors[self.met].max())
            bound = next(x for x in (10 * _AIM, MET, _KEPT) if worst <= x)
            real = f" (errors below {bound:.0e})"  # where a fit ends below that, rounding decides
            met += f" (least margin {-worst:.1e})" if self.classes else real
        met += f" by {H} head{'s' * (H > 1)} of width {head_dim}: {self.how}"
        kept = ", ".join(f"{count} in {name}" for name, count in self.kept.items())
        return wrapped([met, self.reason, f"of all {len(self.met)}, rounded weights keep {kept}"])


def predict(path: str | Path, contexts: Any, queries: Any, mask: Any = None) -> np.ndarray:
    """What weights in a file answer: as :meth:`Memorized.predict`, with the texts of classes.

    ``python -m attnmem_yours memorize`` writes such a file, and prints the call that gives its
    labels back. The weights alone are ``MHAWeights(**safetensors.torch.load_file(path))``, for
    ``mha``.
    """
    with reading(path, "weights of a layer"), need("safetensors").safe_open(path, "pt") as file:
        weights = MHAWeights(*map(file.get_tensor, MHAWeights._fields))
        classes = json.loads((file.metadata() or {}).get("classes", "null"))
    weights = MHAWeights(*(W.double() for W in weights))
    return _answers(weights, classes, as_data(contexts, queries, None, mask))


def _answers(weights: MHAWeights, classes: list | None, data: Data) -> np.ndarray:
    width = weights.W_Q.shape[-2]
    check_size("contexts", data.contexts, -1, width, "the width of what was memorized")
    scores = _apply(weights, data)
    if classes is None:
        return scores.squeeze(-1).numpy()
    whole = object if isinstance(classes[0], str) else None  # numpy's own texts lose zero bytes
    return np.array(classes, dtype=whole)[scores.argmax(-1).numpy()]


def _apply(weights: MHAWeights, data: Data) -> Float[Tensor, "T d_out"]:
    """Outputs of a layer, with padding left out."""
    found = []
    for start in range(0, len(data.queries), _ROWS):
        part = data.some(slice(start, start + _ROWS))
        z = attended(weights.W_Q, weights.W_K, part.contexts, part.queries, part.mask)[1]
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
    keep: NumberType | None = None,
    say: Callable[[str], None] | None = None,
) -> Memorized:
    """Find weights of one layer that meet as many labels as possible.

    A real label is met to 1e-6 of the largest one of its column, a class if its score alone is the
    largest. The construction of Theorem 1 is taken where its hypotheses hold. Otherwise real labels
    are met by heads that nearly cancel, of more by Levenberg-Marquardt, classes by L-BFGS on the
    cross-entropy. Steps are counted, so a call gives the same answer on a slow machine.

    Contexts, queries, labels and ``mask`` are as :func:`examine` takes them. After ``seconds``, by
    default never, no new attempt begins. ``say`` is called with each attempt. With ``keep`` the
    weights are numbers of that type and a real label is met to 1%: a sixteenth of the weights is
    rounded at a time, and the others make up for it.

    Example:
        >>> data = torch.rand(20, 3, 5), torch.rand(20, 5)
        >>> memorize(*data, ["yes", "no"] * 10, heads=2, head_dim=2).reason
        'all labels are met'
    """
    if labels is None:
        refuse("labels", None, "one label for each query")
    data = as_data(contexts, queries, labels, mask)
    until = math.inf if seconds is None else time.monotonic() + seconds
    task = _Task(data, heads, head_dim, seed, until, say or (lambda _: None))
    most, before, beyond = -1, 0, False
    strict, loose = (0, 0) if data.classes else (MET, _KEPT)  # a tie of classes is not met
    built = itertools.chain(task.by_theorem(), task.classes() if data.classes else task.reals())
    tried = ((W, V, how) for V, how in built for W in (_rounded(data, V, keep) if keep else [V]))
    for weights, wide, how in tried:
        if keep:
            before = max(before, int((_errors(data, _apply(wide, data)) < strict).sum()))
        beyond |= not all(W.isfinite().all() for W in weights)
        errors = _errors(data, _apply(weights, data))
        met = errors < (loose if keep else strict)
        if (count := int(met[task.rows].sum())) > most:
            best, most = (weights, errors, met, how), count
        if most == len(task.rows):
            break
    weights, errors, met, how = best
    types = [keep] if keep else get_args(NumberType)
    kept = {x: int((_errors(data, _apply(stored(weights, x), data)) < loose).sum()) for x in types}
    beyond = f"; some fit had weights beyond the largest {keep}" * (beyond and not met.all())
    less = f"{keep} keeps {int(met.sum())} of the {before} met in float64"
    reason = task.reason(met, less if keep and before > met.sum() else "no fit met more") + beyond
    how += f", in {keep}" * bool(keep)
    return Memorized(weights, errors, met, reason, how, data.classes, kept)


def stored(weights: MHAWeights, number_type: NumberType) -> MHAWeights:
    """The weights as a number type holds them, in float64; ``int8`` scaled for each output."""
    if number_type != "int8":
        return MHAWeights(*(W.to(getattr(torch, number_type)).double() for W in weights))
    steps = [W.abs().amax(-2, keepdim=True).clamp(min=1e-320) / 127 for W in weights]
    return MHAWeights(*((W / s).round() * s for W, s in zip(weights, steps, strict=True)))


def _rounded(data: Data, weights: MHAWeights, keep: NumberType) -> Iterator[MHAWeights]:
    """The nearest weights of a number type; then others of it, of nearly the same outputs."""
    yield stored(weights, keep)
    sizes, flat = [W.numel() for W in weights], torch.cat([W.flatten() for W in weights])

    def layer(flat: Tensor) -> MHAWeights:
        parts = zip(flat.split(sizes), weights, strict=True)
        return MHAWeights(*(part.view_as(W) for part, W in parts))

    def outputs(flat: Tensor) -> Tensor:
        return (_apply(layer(flat), data) / scale).flatten()

    def nearest(flat: Tensor) -> Tensor:
        return torch.cat([W.flatten() for W in stored(layer(flat), keep)])

    scale, top = _largest(_apply(weights, data)).clamp(min=1e-300), float(flat.abs().max())
    aim, free = outputs(flat), ~torch.isclose(nearest(flat), flat, rtol=1e-12, atol=0)
    if len(aim) * len(flat) > _LARGEST or not nearest(flat).isfinite().all():
        return
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
    for block in order[free[order]].chunk(_BLOCKS):
        flat[block], free[block] = nearest(flat)[block], False
        J = torch.func.jacrev(outputs)(flat)[:, free] * flat[free]
        step = torch.linalg.lstsq(J, aim - outputs(flat), rcond=1e-6, driver="gelsd").solution
        flat[free] = (flat[free] * (1 + step.clamp(-0.5, 0.5))).clamp(-top, top)
    yield stored(layer(flat), keep)  # once more, in case some weight has changed a scale


def quick_fit(data: Data, heads: int, head_dim: int, seed: int) -> tuple[int, int]:
    """How many classes one head has right after some seconds, or else all heads; and how many."""
    for count in sorted({1, heads}):
        weights = _Task(data, count, head_dim, seed, math.inf, lambda _: None).by_entropy(0, _QUICK)
        right = int((_errors(data, _apply(weights, data)) < 0).sum())
        if right == len(data.queries):
            break
    return count, right


def _representatives(data: Data, group: Int[Tensor, " T"]) -> Int[Tensor, " T"]:
    """For each example the first equal one with the label that most of the equal ones have."""
    chosen = torch.arange(len(group))
    for s in group[group != chosen].unique():
        members = (group == s).nonzero()[:, 0]
        labels = data.labels[members]
        _, label, counts = labels.unique(return_inverse=True, return_counts=True, dim=0)
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
        return -torch.ones_like(scores[:, 0])
    right = scores.gather(1, data.labels[:, None])[:, 0]
    return scores.scatter(1, data.labels[:, None], -torch.inf).amax(1) - right


@dataclasses.dataclass
class _Task:
    """What is to be met, of equal examples one with the label that most of them have; and how."""

    data: Data
    heads: int
    head_dim: int
    seed: int
    until: float
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        data, heads, head_dim = self.data, self.heads, self.head_dim
        group = repeats(data).group
        first = group.unique()  # as in examine; labels are those of the representatives
        self.kept = _representatives(data, group)
        self.rows = self.kept[first]
        self.labels, self.at = data.labels[self.rows], layer.reduced(data).some(first)
        self.room = bounds.context_ceiling(heads, head_dim, *self.at.sizes)
        D, T = self.at.queries.shape[1], min(len(first), self.room)
        work = T**2 * (heads * (D + min(head_dim, D)) + T / 3) + 1
        self.steps = math.ceil(min(_MOST, _WORK / work))  # of Levenberg-Marquardt that are left

    def late(self) -> bool:
        return time.monotonic() > self.until

    def start(self, heads: int, attempt: int = 0) -> ScalarHeads:
        spread = _SPREADS[attempt % len(_SPREADS)]
        return layer.draw(heads, self.head_dim, self.at, spread, self.seed + attempt)

    def away(self, found: ScalarHeads, y: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """Errors of one output of the rows, computed on the data as they came."""
        return (_apply(self.at.outward(found).layer(), self.data)[self.rows, 0] - y).abs()

    def layer(self, maps: ScalarHeads, values: Tensor, decoder: Tensor) -> MHAWeights:
        """The layer whose values, of the reduced data, are added into ``decoder``'s rows."""
        outer = self.at.outward(maps)
        W_Q, W_K = (F.pad(W, (0, self.head_dim - W.shape[2])) for W in outer[:2])
        W_O = torch.eye(values.shape[2], dtype=values.dtype).repeat(len(values), 1)
        return MHAWeights(W_Q, W_K, self.at.maps[0] @ values, W_O, decoder)

    def reason(self, met: Bool[Tensor, " T"], less: str) -> str:
        if met.all():
            return "all labels are met"
        T, left, labels = len(met), int((~met).sum()), self.data.labels
        said = f"{left} of {T} labels are not met: "
        if not self.data.contexts.any():
            return f"{said}all tokens are zero, hence all outputs of any weights"
        differs = (labels != labels[self.kept]).reshape(T, -1).any(1)
        disagree = (differs & ~met).nonzero()[:, 0].tolist()
        others = left - len(disagree)
        parts = [f"{others} because {self._shortfall(T - left, less)}"] if others else []
        if disagree:
            s, t = sorted([disagree[0], int(self.kept[disagree[0]])])
            such = f"equal examples have different labels (such as {s} and {t})"
            parts.insert(0, f"{len(disagree)} because {such}, which no weights of any size meet")
        return said + "; ".join(parts)

    def _shortfall(self, met: int, less: str) -> str:
        T, room, why = len(self.rows), self.room, "the outputs have so many parameters"
        more = f"{less}; another seed{', more seconds' * self.late()} or more heads may help"
        if self.data.classes or self.labels.shape[1] > 1:
            return more
        if T <= layer.GRAM:
            room = layer.free_rank(self.heads, self.head_dim, self.at, self.seed).rank
            why = "the rank of the derivative on these data, to rounding"
        limit = f"so many heads meet almost no real labels of more than {room} examples ({why})"
        return more if room >= T else limit if met >= room else f"{limit}; of {room}, {more}"

    def by_theorem(self) -> _Found:
        """The construction of Theorem 1, on as many rows as it is for, if its hypotheses hold."""
        room = bounds.mha_capacity(self.heads, self.data.contexts.shape[-2], self.head_dim)
        data = self.data.some(self.rows[:room])
        labels = F.one_hot(data.labels, len(data.classes)).double() if data.classes else data.labels
        how = "the construction of Theorem 1"
        sizes = {"heads": self.heads, "head_dim": self.head_dim, "seed": self.seed}
        with contextlib.suppress(ValueError):  # an assumption fails
            if data.mask is None:
                yield memorize_mha(data.contexts, data.queries, labels, **sizes), how

    def reals(self) -> _Found:
        """Some heads for each column of a factor of the labels; and a read-out of all heads."""
        size = _largest(self.labels)
        Y = self.labels / size
        U, sizes, Vh = torch.linalg.svd(Y, full_matrices=False)
        k = max(1, int((sizes > 1e-12 * sizes[0]).sum()))
        full = k == Y.shape[1]
        columns, mixed = (Y, torch.eye(k).double()) if full else (U[:, :k] * sizes[:k], Vh[:k])
        if k <= self.heads:
            share, more = divmod(self.heads, k)
            fits = [self._fitted(y, share + (j < more)) for j, y in enumerate(columns.T)]
            heads, names = zip(*fits, strict=True)
            maps = ScalarHeads(*map(torch.cat, zip(*heads, strict=True)))
            owner = torch.arange(k).repeat_interleave(torch.tensor([len(x.mu) for x in heads]))
            values = maps.mu[..., None] * F.one_hot(owner, k)[:, None]
            yield self.layer(maps, values, mixed * size), " and ".join(sorted({*names}))
        heads = self.start(self.heads, attempt=2)
        Z = self.at.features(heads.W_Q, heads.W_K).flatten(1)
        _, R, order = scipy.linalg.qr(Z.numpy().T, mode="economic", pivoting=True)
        steep = np.abs(np.diag(R))
        rows = torch.from_numpy(order[: int((steep > 1e-10 * steep[0]).sum())].astype(np.int64))
        M = torch.linalg.lstsq(Z[rows], Y[rows], driver="gelsd").solution
        how = "random attention, and a read-out that meets all outputs at once"
        yield self.layer(heads, M.unflatten(0, (self.heads, -1)), torch.diag(size)), how

    def _fitted(self, y: Float[Tensor, " T"], heads: int) -> tuple[ScalarHeads, str]:
        """Heads that meet one output of all examples, or of as many as some attempt meets."""
        size, start = float(y.abs().max()), self.start(heads)
        best, how, most = start._replace(mu=0 * start.mu), "values of zero", int((y == 0).sum())
        y = y / (size or 1.0)
        attempts = self._cancelling(y, heads), self._descending(y, heads)
        for found, away, name in itertools.chain(*attempts) if size else ():
            met = int((away <= MET).sum())
            if met > most or met == len(y):  # weights of a descent are smaller
                best, how, most = found, name, met
            if name == _DESCENT and (most == len(y) or self.late()):
                break
        return best._replace(mu=size * best.mu), how

    def _cancelling(self, y: Float[Tensor, " T"], heads: int) -> Iterator:
        """Near heads that cancel: all labels of the rows whose number :func:`examine` prints."""
        self.say(_CANCELLING)
        rows = layer.enough_rows(self.at, heads, self.head_dim, self.seed)
        at = self.at.some(rows)
        base = layer.draw(heads, self.head_dim, at, layer.SHARP, self.seed, groups=True)
        clear, _ = layer.independent_rows(base, at, layer.SURE)
        at, rows = at.some(clear), rows[clear]
        linear = linearized(base, at.tangents(base), y[rows])
        tried = near(linear, at.outputs, y[rows]) if linear else ()
        for found, error in tried:
            if error <= MET:
                away = self.away(found, y)
                yield found, away, _CANCELLING
                if float(away[rows].max()) <= MET:
                    return

    def _descending(self, y: Float[Tensor, " T"], heads: int) -> Iterator:
        """Fits of all labels; then of fewer and fewer, until one succeeds."""
        at, T = self.at, len(y)
        some = layer.enough_rows(at, heads, self.head_dim, self.seed)
        sharp = layer.draw(heads, self.head_dim, at, layer.SHARP, self.seed)
        orders = [layer.independent_rows(w, at.some(some))[0] for w in (self.start(heads), sharp)]
        order = some[max(orders, key=len)][
            : bounds.context_ceiling(heads, self.head_dim, *at.sizes)
        ]
        nearest, errors = self.start(heads), torch.full((T,), math.inf)  # the best fit of all

        starts = [self.start(heads, k) for k in range(_RESTARTS if T <= _FEW else 1)]
        starts = [start._replace(mu=0.1 * start.mu) for start in starts]
        full = len(order) >= T

        def tries() -> Iterator[tuple[Tensor, ScalarHeads]]:
            """Rows, and where their fit starts: of fewer also from the nearest fit of all."""
            if full:
                yield from ((order, start) for start in starts)
            for share in _SHARES if len(order) else ():
                count = max(1, int(share * len(order)))
                if full:
                    yield errors.argsort()[:count], nearest
                if not full or T <= _FEW:
                    yield from ((order[:count], start) for start in starts)

        for rows, start in tries():
            self.say(f"{_DESCENT} on {len(rows)} examples")
            limits = {"steps": math.ceil(_PATIENCE * self.steps), "until": self.until}
            found, made = layer.meet(start, at.some(rows), y[rows], tolerance=_AIM, **limits)
            self.steps -= made
            away = self.away(found, y)
            yield found, away, _DESCENT
            if len(rows) == T and float(away.square().sum()) < float(errors.square().sum()):
                nearest, errors = found, away
            if int((away <= MET).sum()) >= len(rows) or not self.steps:
                return

    def classes(self) -> _Found:
        name = "L-BFGS on the cross-entropy"
        for attempt in range(_RESTARTS if len(self.rows) <= _FEW else 1):
            self.say(f"{name}, start {attempt + 1}")
            yield self.by_entropy(attempt, _LONGEST), name
            if self.late():
                break

    def by_entropy(self, attempt: int, most: int) -> MHAWeights:
        """All weights of the layer by L-BFGS on the cross-entropy, scores of full width."""
        K, start = len(self.data.classes), self.start(self.heads, attempt)
        g = torch.Generator().manual_seed(self.seed + attempt)
        values = 0.1 * torch.randn(*start.mu.shape, K, generator=g, dtype=torch.float64)
        trained = [w.clone().requires_grad_() for w in (start.W_Q, start.W_K, values)]

        def scores() -> Tensor:
            return torch.einsum("thd,hdk->tk", self.at.features(*trained[:2]), trained[2])

        def loss() -> Tensor:
            return F.cross_entropy(scores(), self.labels)

        losses, back = [], _PLATEAU // CHUNK
        made = lbfgs_steps(loss, trained, most, evaluations=5 * CHUNK // 4)
        for _, before in itertools.islice(made, most // CHUNK):
            losses.append(float(before))
            flat = len(losses) > back and losses[-1] > 0.98 * losses[-1 - back]
            with torch.no_grad():
                met = scores().argmax(1).equal(self.labels)
            if met or flat or self.late():
                break
        W_Q, W_K, values = (w.detach() for w in trained)
        return self.layer(start._replace(W_Q=W_Q, W_K=W_K), values, torch.eye(K).double())
