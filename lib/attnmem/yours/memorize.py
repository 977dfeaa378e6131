"""Weights for one's own data: the best that can be done, and why it is no better."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention import MHAWeights
from ..bounds import mha_capacity
from ..checks import Range, Seed, checked, refuse
from ..constructions import memorize_mha
from . import layer
from .data import Data, Repeats, read, repeats
from .layer import GRAM, Heads, Reduced

MET = 1e-6  # of the largest label
AIM = 1e-9
SHARES = (1.0, 0.98, 0.94, 0.88, 0.8)  # of the rank, tried in turn where not all labels are met
SPREADS = (0.5, 0.5, 2.0, 2.0)  # standard deviations of the logits at the start; sharp ones stall
RESTARTS, FEW = 4, 500  # starts of all labels, if there are few
DESCENT, PLATEAU = 2000, 100  # the most steps of L-BFGS, and those in which the loss must fall
PATIENCE = 0.4  # share of the time left that one attempt may take


@dataclasses.dataclass(frozen=True)
class Memorized:
    """The weights that :func:`memorize` found, and how far they go.

    Attributes:
        weights: The layer, in float64; ``mha(weights, contexts, queries)`` computes it.
        errors: Of reals, the largest error of each example. Of classes, the score of the best
            wrong class less that of the right one: negative where the right class wins.
        met: For each example whether its label is met.
        reason: Why the others are not; ``all labels are met`` if there are none.
        how: What built the weights.
        classes: The classes by output, None for reals.
    """

    weights: MHAWeights
    errors: Float[Tensor, " T"]
    met: Tensor
    reason: str
    how: str
    classes: list | None

    @property
    def count(self) -> int:
        """Number of labels that are met."""
        return int(self.met.sum())

    def predict(self, contexts: Any, queries: Any, mask: Any = None) -> np.ndarray:
        """Outputs, or classes as they came, for data of the same width.

        Args:
            contexts: As for :func:`memorize`.
            queries: One query a row.
            mask: True where a token is padding.

        Returns:
            One number, row of numbers, or class for each example.
        """
        scores = apply(self.weights, read(contexts, queries, None, mask))
        if self.classes is not None:
            return np.array(self.classes)[scores.argmax(-1).numpy()]
        return scores.squeeze(-1).numpy()

    def __str__(self) -> str:
        """How many labels are met, by what, and why no more."""
        H, _, head_dim = self.weights.W_Q.shape
        width = self.weights.W_V.shape[-1]
        layer = f"{H} heads of width {head_dim}, values of width {width}"
        met = f"{self.count} of {len(self.met)} labels met"
        if self.count:
            worst = float(self.errors[self.met].max())
            met += f" (least margin {-worst:.1e})" if self.classes else f" (errors to {worst:.1e})"
        return f"{met} by {layer}: {self.how}\n{self.reason}"


def apply(weights: MHAWeights, data: Data) -> Float[Tensor, "T d_out"]:
    """Outputs of a layer, with padding left out."""
    E, e = data.contexts, data.queries
    found = []
    for start in range(0, len(e), 2048):
        rows = slice(start, start + 2048)
        tokens = E if data.shared else E[rows]
        asked = torch.einsum("te,her->thr", e[rows], weights.W_Q.double())
        logits = torch.einsum("thr,hdr->thd", asked, weights.W_K.double()) @ tokens.mT
        if data.mask is not None:
            logits = logits.masked_fill(data.mask[rows, None], -torch.inf)
        z = logits.softmax(-1) @ tokens
        values = torch.einsum("thd,hdv->thv", z, weights.W_V.double()).flatten(1)
        found.append(values @ weights.W_O.double() @ weights.W_D.double())
    return torch.cat(found)


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
    seconds: Annotated[int | float, Range(0, 1e6)] = 240,
) -> Memorized:
    """Find weights of one layer that meet as many labels as possible.

    Real labels are met to 1e-6 of the largest one. Of classes, the score of the right one is the
    largest. The construction of Theorem 1 is taken where its hypotheses hold. Otherwise real labels
    are met by Levenberg-Marquardt, in the dimensions that the data have, and classes by L-BFGS on
    the cross-entropy first, which needs fewer heads.

    Args:
        contexts: Tokens as rows, own ``(T, n, d)`` or shared ``(n, d)``, or a list of tables of
            different lengths.
        queries: One query a row, ``(T, d)``.
        labels: Reals ``(T,)`` or ``(T, d_out)``; integers, booleans and strings are classes.
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``.
        seed: Seed of the start, at least 0.
        mask: True where a token is padding, ``(T, n)``.
        seconds: The time after which no new attempt begins.

    Returns:
        The weights, each example's error, and the reason why some labels are not met.

    Raises:
        ValueError: If the data are malformed; the message names what.

    Example:
        >>> data = torch.rand(20, 3, 5), torch.rand(20, 5)
        >>> memorize(*data, ["yes", "no"] * 10, heads=2, head_dim=2).reason
        'all labels are met'

    Source: this book, the chapters on the capacity of one layer and on training.
    """
    if labels is None:
        refuse("labels", None, "one label for each query")
    data = read(contexts, queries, labels, mask)
    same = repeats(data)
    rows = _representatives(data, same)
    task = _Task(data, rows, heads, head_dim, seed, time.monotonic() + seconds)
    weights, how = _by_theorem(task) or (_classes(task) if data.classes else _reals(task))
    errors = _errors(data, apply(weights, data))
    met = errors < 0 if data.classes else errors <= MET * float(data.labels.abs().max())
    return Memorized(weights, errors, met, _reason(task, same, met), how, data.classes)


@dataclasses.dataclass
class _Task:
    """What is to be met: of equal examples one, with the label that most of them have."""

    data: Data
    rows: Int[Tensor, " k"]
    heads: int
    head_dim: int
    seed: int
    until: float

    def __post_init__(self) -> None:
        self.at: Reduced = layer.reduced(self.data)
        self.at = self.at.some(self.rows)
        self.labels = self.data.labels[self.rows]


def _representatives(data: Data, same: Repeats) -> Int[Tensor, " k"]:
    """An example of each group of equal ones, one of the most frequent label."""
    groups = collections.defaultdict(list)
    for t, s in enumerate(same.group.tolist()):
        groups[s].append(t)
    chosen = []
    for members in groups.values():
        labels = [tuple(data.labels[t].reshape(-1).tolist()) for t in members]
        most, _ = collections.Counter(labels).most_common(1)[0]
        chosen.append(members[labels.index(most)])
    return torch.tensor(chosen)


def _errors(data: Data, scores: Tensor) -> Float[Tensor, " T"]:
    if data.classes is None:
        return (scores - data.labels).abs().amax(1)
    right = scores.gather(1, data.labels[:, None])[:, 0]
    others = scores.scatter(1, data.labels[:, None], -torch.inf).amax(1)
    return others - right if len(data.classes) > 1 else -torch.ones(len(scores)).double()


def _reason(task: _Task, same: Repeats, met: Tensor) -> str:
    if met.all():
        return "all labels are met"
    T, left = len(met), int((~met).sum())
    if not task.at.sizes[0] + task.at.sizes[2]:
        return f"{left} of {T} labels are not met: all tokens are zero, hence all outputs"
    disagree = [t for t in (~met).nonzero()[:, 0].tolist() if _disagrees(task, same, t)]
    parts = []
    if disagree:
        s, t = next(((s, t) for s, t in same.conflicts), (0, 0))
        parts.append(
            f"{len(disagree)} because equal examples have different labels (such as {s} and {t}), "
            "which no weights of any size meet"
        )
    if left > len(disagree):
        rank = _rank(task)
        outputs = 1 if task.data.classes else task.labels.shape[1]
        if task.data.classes is None and outputs == 1 and len(task.rows) > rank.rank:
            parts.append(
                f"the derivative has rank {rank.rank} on these data with {task.heads} heads, so "
                f"almost no real labels of more than {rank.rank} examples are met; more heads help"
            )
        elif task.data.classes is None and outputs == 1:
            parts.append(
                f"the rank of the derivative, {rank.rank}, leaves room for them, but the fit ended "
                "before it met them: another seed, more time or one more head may"
            )
        else:
            parts.append(f"the fit met no more with {task.heads} heads; more heads help")
    return f"{left} of {T} labels are not met: " + "; ".join(parts)


def _disagrees(task: _Task, same: Repeats, t: int) -> bool:
    kept = task.rows[same.group[task.rows] == same.group[t]]
    return bool((task.data.labels[kept[0]] != task.data.labels[t]).any())


def _rank(task: _Task) -> layer.Rank:
    at = task.at
    if len(at.queries) > GRAM:
        at = at.some(torch.arange(GRAM))
    heads = layer.draw([0] * task.heads, task.head_dim, at, SPREADS[0], task.seed)
    return layer.rank_at(heads, at)


# --- builders -------------------------------------------------------------------------------------


def _by_theorem(task: _Task) -> tuple[MHAWeights, str] | None:
    """The construction of Theorem 1, if its hypotheses hold."""
    data, rows = task.data, task.rows
    n, d = data.contexts.shape[-2:]
    if data.mask is not None or n >= d:
        return None
    if len(rows) > mha_capacity(task.heads, n, task.head_dim):
        return None
    labels = task.labels
    if data.classes is not None:
        labels = torch.nn.functional.one_hot(labels, len(data.classes)).double()
    contexts = data.contexts if data.shared else data.contexts[rows]
    sizes = {"heads": task.heads, "head_dim": task.head_dim, "seed": task.seed}
    try:
        weights = memorize_mha(contexts, data.queries[rows], labels, **sizes)
    except ValueError:  # an assumption fails
        return None
    return weights, "the construction of Theorem 1"


def _layer(task: _Task, heads: Heads, values: Tensor, decoder: Tensor) -> MHAWeights:
    """The layer whose values are ``(H, d, d_v)``, each head's added into ``decoder``'s rows."""
    W_Q, W_K, _ = task.at.outward(heads, task.head_dim)
    missing = task.heads - len(W_Q)
    W_Q, W_K, values = (
        torch.cat([W, W.new_zeros(missing, *W.shape[1:])]) for W in (W_Q, W_K, values)
    )
    W_O = torch.eye(values.shape[2], dtype=values.dtype).repeat(task.heads, 1)
    return MHAWeights(W_Q, W_K, values, W_O, decoder)


def _reals(task: _Task) -> tuple[MHAWeights, str]:
    """Levenberg-Marquardt on a shortest factor of the labels; a read-out alone if that is more."""
    Y = task.labels
    columns, mixed = Y, torch.eye(Y.shape[1], dtype=Y.dtype)
    if Y.shape[1] > 1:
        U, sizes, Vh = torch.linalg.svd(Y, full_matrices=False)
        k = max(1, int((sizes > 1e-12 * sizes[0]).sum()))
        if k < Y.shape[1]:
            columns, mixed = U[:, :k] * sizes[:k], Vh[:k]
    if columns.shape[1] > 1 and columns.numel() > GRAM:
        return _random(task)
    heads = _fitted(task, columns)
    _, _, values = task.at.outward(heads, task.head_dim)
    fit = _layer(task, heads, values, mixed), "Levenberg-Marquardt"
    if _met(task, fit[0]) == len(Y):
        return fit
    return max(fit, _random(task), key=lambda found: _met(task, found[0]))


def _met(task: _Task, weights: MHAWeights) -> int:
    errors = _errors(task.data, apply(weights, task.data))[task.rows]
    return int((errors <= MET * float(task.data.labels.abs().max())).sum())


def _fitted(task: _Task, y: Float[Tensor, "T k"]) -> Heads:
    """A fit of all labels, or of the largest set of examples on which one succeeds."""
    at, size, (T, k) = task.at, float(y.abs().max()), y.shape
    sizes = task.heads, task.head_dim, at.sizes

    def drawn(attempt: int) -> Heads:
        spread = SPREADS[attempt % len(SPREADS)]
        start = layer.draw([0] * task.heads, task.head_dim, at, spread, task.seed + attempt, k)
        return start._replace(mu=0.1 * start.mu)

    start = drawn(0)
    if not size or not at.sizes[0] + at.sizes[2]:
        return start._replace(mu=0 * start.mu)
    y = y / size
    room = layer.ceiling(*sizes, k) // k
    one = start._replace(mu=start.mu[..., :1], beta=start.beta[:, :1])
    some = _spread_out(T, min(T, GRAM), task.seed)
    order = some[layer.independent_rows(one, at.some(some))]
    order = order[:room]
    sure, groups = layer.floor(*sizes)
    whole = torch.arange(T)
    tries = [(whole, lambda i=i: drawn(i)) for i in range(RESTARTS if T * k <= FEW else 1)]
    tries += [(whole, lambda: _cancelling(task, groups, y))] * (k == 1 and sure >= T)
    tries = tries if len(order) >= T else []
    for share in SHARES:
        some = order[: max(1, int(share * len(order)))]
        tries += [(some, lambda: nearest)] * bool(tries) + [(some, lambda: start)]
    best, most, nearest, least = start, -1, start, math.inf
    for rows, begin in tries:
        if (first := begin()) is None:
            continue
        until = time.monotonic() + PATIENCE * max(task.until - time.monotonic(), 0.0)
        part, wanted = at.some(rows), y[rows]
        found = layer.meet(first, part, wanted, tolerance=AIM, until=until)
        away = layer.outputs(found, at) - y
        met = int((away.abs().amax(1) <= MET).sum())
        best, most = (found, met) if met > most else (best, most)
        if len(rows) == T and float(away.square().sum()) < least:
            nearest, least = found, float(away.square().sum())
        if most >= len(rows) or time.monotonic() > task.until:
            break
    return best._replace(mu=size * best.mu, beta=size * best.beta)


def _spread_out(T: int, count: int, seed: int) -> Int[Tensor, " k"]:
    return torch.randperm(T, generator=torch.Generator().manual_seed(seed))[:count]


def _cancelling(task: _Task, groups: list[int], y: Float[Tensor, "T 1"]) -> Heads | None:
    """Heads that cancel, moved a little such that the outputs are the labels to first order."""
    base = layer.draw(groups, task.head_dim, task.at, 2.0, task.seed)
    here = layer.tangents(base, task.at)
    factor, failed = torch.linalg.cholesky_ex(here.gram())
    if failed:
        return None
    step = here.transposed(layer.solved(factor, y[:, 0]))
    size = sum(float(w.square().sum()) for w in step[:3]) ** 0.5
    eps = 0.01 / max(size, 1e-12)
    near = base.moved(step, eps)
    return near._replace(mu=near.mu / eps, beta=near.beta / eps)


def _random(task: _Task) -> tuple[MHAWeights, str]:
    """Attention at random, and a read-out that meets all outputs of as many examples as it can."""
    heads = layer.draw([0] * task.heads, task.head_dim, task.at, 2.0, task.seed)
    here = layer.tangents(heads, task.at)
    Z = torch.cat([here.attended.flatten(1), here.fixed], dim=1)
    _, R, order = _pivoted_columns(Z.T)
    steep = np.append(np.abs(np.diag(R)), 0.0)
    rows = torch.from_numpy(order[: int((steep > 1e-10 * steep[0]).sum())].astype(np.int64))
    M = torch.linalg.lstsq(Z[rows], task.labels[rows], driver="gelsd").solution
    return _layer(task, heads, _values(task, M), torch.eye(M.shape[1], dtype=M.dtype)), (
        "random attention, and a read-out that meets all outputs at once"
    )


def _pivoted_columns(matrix: Tensor):
    import scipy

    return scipy.linalg.qr(matrix.numpy(), mode="economic", pivoting=True)


def _values(task: _Task, M: Float[Tensor, "Hm_c o"]) -> Float[Tensor, "H d o"]:
    """The values that read the features ``M`` reads, for the data as they came."""
    m, _, _ = task.at.sizes
    tokens, _, fixed = task.at.maps
    inner = M[: task.heads * m].unflatten(0, (task.heads, m))
    values = tokens @ inner
    values[0] += fixed @ M[task.heads * m :]
    return values


def _classes(task: _Task) -> tuple[MHAWeights, str]:
    """Cross-entropy first; where it leaves errors, one or two real numbers for each class."""
    how, right = "L-BFGS on the cross-entropy", -1
    for attempt in range(RESTARTS if len(task.rows) <= FEW else 1):
        found = _by_entropy(task, attempt)
        won = int((apply(found, task.data)[task.rows].argmax(1) == task.labels).sum())
        weights, right = (found, won) if won > right else (weights, right)
        if right == len(task.rows) or time.monotonic() > task.until:
            break
    if right == len(task.rows) or len(task.data.classes) < 2 or len(task.rows) > GRAM:
        return weights, how
    codes = _codes(len(task.data.classes))
    room = layer.ceiling(task.heads, task.head_dim, task.at.sizes, codes.shape[1])
    if room // codes.shape[1] <= right or time.monotonic() > task.until:
        return weights, how
    reals = task.data._replace(labels=codes[task.data.labels], classes=None)
    inner = _Task(reals, task.rows, task.heads, task.head_dim, task.seed, task.until)
    found, _ = _reals(inner)
    decoded = found._replace(W_D=found.W_D @ codes.T)
    won = int((apply(decoded, task.data)[task.rows].argmax(1) == task.labels).sum())
    if won <= right:
        return weights, how
    return decoded, "Levenberg-Marquardt on codes of the classes"


def _codes(count: int) -> Float[Tensor, "K k"]:
    """Vectors of length one: each has its largest product with itself. Two classes need one."""
    if count == 2:
        return torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    angles = 2 * torch.pi * torch.arange(count, dtype=torch.float64) / count
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def _by_entropy(task: _Task, attempt: int) -> MHAWeights:
    """All weights of the layer by L-BFGS on the cross-entropy, scores of full width."""
    at, K = task.at, len(task.data.classes)
    seed, spread = task.seed + attempt, SPREADS[attempt % len(SPREADS)]
    start = layer.draw([0] * task.heads, task.head_dim, at, spread, seed)
    m, _, c = at.sizes
    g = torch.Generator().manual_seed(seed)
    M = 0.1 * torch.randn(task.heads * m + c, K, generator=g, dtype=torch.float64)
    trained = [w.clone().requires_grad_() for w in (start.Q, start.K, M)]

    def scores() -> Tensor:
        z = layer.attend(trained[0], trained[1], at)[2]
        return torch.cat([z.flatten(1), at.fixed], dim=1) @ trained[2]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(scores(), task.labels)
        loss.backward()
        return loss

    optimizer = torch.optim.LBFGS(
        trained,
        max_iter=20,
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=0.0,
        tolerance_change=0.0,
    )
    losses: list[float] = []
    for _ in range(DESCENT // 20):
        losses.append(float(optimizer.step(closure).detach()))
        with torch.no_grad():
            wrong = bool((scores().argmax(1) != task.labels).any())
        flat = len(losses) > PLATEAU // 20 and losses[-1] > 0.98 * losses[-1 - PLATEAU // 20]
        if not wrong or flat or time.monotonic() > task.until:
            break
    Q, keys, M = (w.detach() for w in trained)
    heads = Heads(Q, keys, start.mu, start.beta)
    return _layer(task, heads, _values(task, M), torch.eye(K, dtype=torch.float64))
