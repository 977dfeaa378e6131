"""One answer about one's own data: what is degenerate, what can be met, and by which weights."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnmem.checks import Seed, checked, refuse
from attnmem.core import bounds
from attnmem.examples import unit
from attnmem.terminal import wrapped
from attnmem.theory.counts import unequal_class_capacity
from attnmem.theory.independence import certified_rank, kruskal_rank, sample_subsets

from . import layer
from .data import Data, Repeats, as_data, repeats
from .layer import Rank, Reduced
from .memorization import quick_fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FEW = 200_000  # subsets of which every one is looked at, and numbers whose rank is certified
_QUICK = 2000  # examples with classes that are fitted at once
_WEAK = 1e-6  # what is smaller than this share of the largest may be rounding of single precision
_A1, _A2, _A3, _GENERAL = "Assumption 1", "Assumption 2", "Assumption 3", "general position"
_DIMENSIONS = ("tokens of a context differ in m", "queries lie in q", "whole contexts differ in c")


@dataclasses.dataclass(frozen=True)
class Tested:
    """One assumption in one precision."""

    name: str
    precision: str  # float32 or float64
    verdict: str  # holds, fails, fails to rounding (by a tolerance), or not refuted (by samples)
    detail: str  # what was looked at, and what was found


@dataclasses.dataclass(frozen=True)
class Bound:
    """One bound at these sizes."""

    name: str
    labels: int
    means: str  # what holds of so many labels, under the bound's hypotheses
    missing: list[str]  # hypotheses that fail here
    unsure: list[str]  # those that could not be settled

    def __str__(self) -> str:
        """The bound in one line."""
        word = "does not apply" if self.missing else "may apply" if self.unsure else "applies"
        why = ", ".join(self.missing or self.unsure)
        return f"{self.labels:>9,} {self.name}: {self.means}; {word}{why and f' ({why})'}"


@dataclasses.dataclass(frozen=True)
class Examination:
    """What :func:`examine` found; ``str()`` is the answer in three lines, ``details`` the report.

    Ranks are of the derivative on the examples that differ, ``met`` where all outputs are zero.
    """

    examples: int  # T
    tokens: int  # n, of the longest context
    dim: int  # d
    shared: bool  # whether one context serves all examples
    heads: int | None  # H that was asked about
    head_dim: int  # d_h
    labels: str  # what they are
    equal: list[tuple[int, int]]  # pairs of equal examples
    conflicts: list[tuple[int, int]]  # those of them with different labels
    notes: list[str]  # what else is degenerate
    # Those of differences of tokens, of queries, and of contexts besides, with singular values.
    dimensions: dict[str, dict[str, float]]
    findings: list[Tested]  # the assumptions
    bounds: list[Bound]  # with heads; else none
    rank: Rank | None
    met: Rank | None
    least_heads: int | None  # the fewest with which rank can be the number of examples that differ
    enough_heads: int | None  # the fewest found with which met is; None if none were found
    outputs: int | None  # reals of a label; 0 for classes, None without labels
    quick: tuple[int, int] | None  # heads of a quick fit of classes, and how many it had right

    @property
    def differ(self) -> int:
        """Number of examples that differ."""
        return self.examples - len(self.equal)

    @property
    def builder(self) -> str:
        """Which function builds the weights."""
        theorem = self.bounds[0] if self.bounds else None
        if theorem and not theorem.missing and theorem.labels >= self.examples == self.differ:
            return "attnmem.memorize_mha (Theorem 1); it refuses if an assumption fails after all"
        return "attnmem_yours.memorize"

    def draw(self, ax: Axes | None = None) -> Axes:
        """Draw the bounds and ranks as bars; bounds whose hypotheses fail here are hollow."""
        if self.rank is None:
            refuse("heads", None, "a number, so that there is something to draw")
        import matplotlib.pyplot as plt

        ax = ax or plt.gca()
        bars = [(x.labels, x.name + ", does not apply" * bool(x.missing)) for x in self.bounds]
        bars += [(self.met.rank, "rank where all outputs are zero")]
        for labels, name in sorted([*bars, (self.rank.rank, "rank of the derivative")]):
            style = {"color": "none", "linestyle": ":"} if name.endswith("apply") else {}
            bar = ax.barh(name, labels, **{"color": "C0", **style}, edgecolor="C0")
            ax.bar_label(bar, [f" {labels:,}"], fontsize="small")
        ax.axvline(self.differ, color="black", linestyle="--", linewidth=1.2)
        ax.set(xscale="log", xlabel="real labels of one output")
        ax.text(self.differ, 1.01, f"{self.differ:,} examples", transform=ax.get_xaxis_transform())
        ax.margins(x=0.15)
        return ax

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(dataclasses.asdict(self) | {"builder": self.builder}, indent=2)

    def __str__(self) -> str:
        """What was read, what a layer does with these labels, and what to call next."""
        data = f"{self.examples:,} examples of {self.tokens} tokens, labels: {self.labels}"
        call = f"memorize(..., heads={self.wanted}, head_dim={self.head_dim}) for weights"
        lines = {"data": data, "layer": self.holds(), "next": f"{call}, found.details for more"}
        return wrapped([f"{name:12}{words}" for name, words in lines.items()])

    @property
    def wanted(self) -> int:
        """Heads with which all labels fit, as far as it is known; for classes a guess."""
        heads, right = self.quick or (max(self.heads or 1, self.enough_heads or 1), self.examples)
        return heads * (1 + (right < self.examples - len(self.conflicts)))

    @property
    def sure(self) -> bool:
        """Whether so many heads are known to store all labels."""
        if self.quick:
            return self.quick[1] == self.examples
        return self.outputs == 1 and bool(self.enough_heads) and not self.conflicts

    def holds(self, fit: bool = True) -> str:
        """How many labels a layer stores: classes by a ``fit``, reals by the ranks."""
        T, least, enough, asked = self.differ, self.least_heads, self.enough_heads, self.heads
        left, parts = len(self.conflicts), []
        if fit and self.quick:
            heads, right = self.quick
            parts = [f"a quick fit with {heads} has {right:,} of {self.examples:,} right"]
            parts += ["more heads or steps may have more"] * (right < self.examples - left)
        else:
            what = "labels" if self.outputs in (None, 1) else "real labels of one output"
            if asked and self.met.rank < T:
                parts += [f"with {asked} any {self.met.rank:,} of {T:,} {what} fit"]
                parts += [f"almost never over {self.rank.rank:,}"] * (self.rank.rank < self.rank.of)
                asked = None
            if enough:
                parts += [f"with {asked or enough} all {T:,} {what} fit, whatever they are"]
                parts += [f"fewer than {enough} cannot promise it"] * ((least or enough) < enough)
            parts += [f"fewer than {least} cannot do it"] * ((least or 1) > 1)
        parts += [f"labels that contradict equal examples never fit: {left}"] * (left > 0)
        return f"heads of width {self.head_dim}: {'; '.join(parts) or 'no number is known to do'}"

    @property
    def details(self) -> str:
        """The report: what is degenerate, the assumptions, bounds and ranks."""
        kind = "a shared context" if self.shared else "contexts of their own"
        sizes = f"n = {self.tokens} tokens, d = {self.dim}"
        lines = [f"{self.examples:,} examples with {kind}: {sizes}", f"labels: {self.labels}"]
        lines += _pairs("equal examples, different labels", self.conflicts)
        lines += _pairs("equal examples", self.equal) + self.notes
        lines += [f"{name} = {x['dimensions']} dimensions" for name, x in self.dimensions.items()]
        said: dict[tuple[str, str, str], list[str]] = {}  # what both precisions say, once
        for x in self.findings:
            said.setdefault((x.name, x.verdict, x.detail), []).append(x.precision)
        each = [f"{k[0]}, {' and '.join(found)}: {k[1]}; {k[2]}" for k, found in said.items()]
        lines += ["", *each, ""]
        if self.heads is not None:
            lines.append(f"{self.heads} heads of width {self.head_dim}, one real output:")
            lines += [f"  {bound}" for bound in self.bounds]
            part = " among those looked at" * (self.rank.of < self.differ)
            limit = f"almost no real labels of more are met{part}"
            limit = f"full{part}, it excludes nothing" if self.rank.rank == self.rank.of else limit
            lines += [_rank("rank of the derivative", self.rank, limit)]
            lines += [_rank("rank where all outputs are zero", self.met, "any such labels are met")]
        lines.append(f"all {self.differ:,} that differ, {self.holds(False)} (to such tolerances)")
        return wrapped([*lines, f"weights: {self.builder}"])


def _pairs(what: str, pairs: list[tuple[int, int]]) -> list[str]:
    named = ", ".join(f"{s} and {t}" for s, t in pairs[:5])
    more = f" and {len(pairs) - 5} pairs more" if len(pairs) > 5 else ""
    return [f"{what}: {named}{more}"] if pairs else []


def _rank(name: str, rank: Rank, means: str) -> str:
    weak = "; some need huge weights" * (0 < rank.kept < _WEAK)
    found = f"{rank.how} above {rank.tolerance:.0e}{weak}"
    return f"  {rank.rank:>9,} {name}, of {rank.of:,} examples: {means} ({found})"


@checked
def examine(
    contexts: Any,
    queries: Any,
    labels: Any = None,
    *,
    heads: int | None = None,
    head_dim: int | None = None,
    mask: Any = None,
    samples: int = 1000,
    seed: Seed = 0,
    say: Callable[[int, int, str], None] | None = None,
) -> Examination:
    """Say how many labels of some data one layer stores, and what in the data stands in the way.

    Tokens are rows of ``contexts``: own ``(T, n, d)``, shared ``(n, d)``, or tables of any lengths;
    ``mask``, ``(T, n)``, is true at padding. ``labels`` are reals ``(T,)`` or ``(T, d_out)``;
    integers, booleans and strings are classes, of which a quick fit is tried. ``head_dim`` is by
    default ``d``; ``samples`` subsets are drawn where not all can be looked at. ``say`` is told at
    each step: parts done, of how many, and what is done now.

    Example:
        >>> examine(torch.rand(30, 3, 5), torch.rand(30, 5), head_dim=2).least_heads
        2
    """
    data, done = as_data(contexts, queries, labels, mask), -1
    T, d = data.queries.shape

    def tell(words: str, more: int = 1) -> None:
        nonlocal done
        done += more
        if say:
            say(done, 14 if heads else 12, words)

    tell("equal examples and dimensions")
    same, at = repeats(data), layer.reduced(data)
    tested = []
    for kind in ("float32", "float64"):
        for name in (_A1, _A2, _A3, _GENERAL):
            tell(f"{name} in {kind}")
            tested.append(Tested(name, kind, *_verdict(data, name, kind, samples, seed)))
    ranks = _Ranks(at.some(same.group.unique()), head_dim or d, seed, tell)
    tell("the fewest heads")
    least = ranks.fewest(False)
    tell("the fewest heads with outputs zero")
    enough = least and ranks.fewest(True)
    found = [None, None]
    for zero, words in enumerate(("", ", outputs zero") if heads else ()):
        tell(f"the rank with {heads} heads{words}")
        found[zero] = ranks.of(heads, bool(zero))
    kind, outputs = _kind(data)
    tell("a quick fit of classes")
    quick = data.classes and T <= _QUICK and quick_fit(data, heads or 2, ranks.head_dim, seed)
    spectra = zip(_DIMENSIONS, at.spectra, strict=True)
    dimensions = {name: {"dimensions": len(x.sizes), **x.limits} for name, x in spectra}
    asked = heads and _bounds(data, at.sizes, tested, heads, ranks.head_dim)
    return Examination(  # in the order of its fields
        *(T, data.contexts.shape[-2], d, data.shared, heads, ranks.head_dim, kind),
        *(same.equal, same.conflicts, _notes(data, same, at), dimensions),
        *(tested, asked or [], *found, least, enough, outputs, quick or None),
    )


def _kind(data: Data) -> tuple[str, int | None]:
    """Of which kind the labels are, and how many reals each has."""
    if data.labels is None:
        return "none given", None
    if data.classes is None:
        outputs = data.labels.shape[1]
        return f"{outputs} real number{'s' * (outputs > 1)} for each example", outputs
    shown = ", ".join(map(repr, data.classes[:5])) + ", ..." * (len(data.classes) > 5)
    hint = "; give floats if they are numbers to be met" if len(data.classes) > 20 else ""
    return f"{len(data.classes)} class{'es' * (len(data.classes) > 1)} ({shown}){hint}", 0


def _notes(data: Data, same: Repeats, at: Reduced) -> list[str]:
    (m, q, c), d, n = at.sizes, data.queries.shape[1], data.lengths
    token, query = same.repeated_tokens, same.constant
    notes = [f"contexts of {n.min()} to {n.max()} tokens, by a mask"] * (data.mask is not None)
    notes += [f"contexts with a repeated token: {token}"] * (token > 0)
    notes += [f"contexts of one token, whose output no query changes: {query}"] * (query > 0)
    for name, rows in (("tokens", data.contexts.flatten(0, -2)), ("queries", data.queries)):
        largest = rows.abs().amax(0).tolist()
        used, zeros = [x for x in largest if x] or [1.0], largest.count(0)
        notes += [f"coordinates that are zero in all {name}: {zeros}"] * (zeros > 0)
        if min(used) < _WEAK * max(used):
            sizes = f"{min(used):.0e} to {max(used):.0e}, each taken for exact"
            notes.append(f"coordinates of {name} have sizes {sizes}")
    if m + c < d:
        notes.append(f"tokens lie in {m + c} of {d} dimensions")
    if c and not data.shared:
        shared = "sums of coordinates that all tokens of a context share"
        notes.append(f"{shared} (cut's marks of places are one): {c}")
    notes += ["all queries lie on one line"] * (q == 1)
    thin = max(_WEAK, torch.finfo(data.precision).eps)
    hardly = "some dimensions are as thin as rounding in single or lower precision"
    return notes + [hardly] * any(0 < each.limits["kept"] < thin for each in at.spectra)


def _verdict(data: Data, name: str, kind: str, samples: int, seed: int) -> tuple[str, str]:
    """Whether an assumption holds in a precision, and what was found."""
    precision, vectors = getattr(torch, kind), data.contexts if name == _A2 else data.queries
    if name == _A3:  # of the mean tokens; padding is zero
        vectors = vectors + data.contexts.sum(-2) / data.lengths[:, None]
    if not vectors.to(precision).isfinite().all():
        return "fails", "numbers that this precision cannot hold"
    # Each coordinate in its own unit, as for the dimensions: no rank depends on units.
    here = (vectors / unit(vectors, (*range(vectors.ndim - 1),))).to(precision)
    if name == _A2:
        return _all_are_full(here.view(-1, *here.shape[-2:]), data.lengths)
    T, d = here.shape
    size = min(T, d if name == _GENERAL else data.contexts.shape[-2])
    if size > d:
        return "fails", f"{size} vectors in {d} dimensions"
    if zero := (~here.any(1)).nonzero()[:1].flatten().tolist():
        return "fails", f"vector {zero[0]} is zero"
    if size == 1:
        return "holds", "no vector is zero (exact)"
    _, group, counts = here.unique(dim=0, return_inverse=True, return_counts=True)
    if counts.max() > 1:
        s, t = (group == counts.argmax()).nonzero()[:2, 0].tolist()
        return "fails", f"vectors {s} and {t} are equal in this precision"
    if (rank := int(torch.linalg.matrix_rank(here))) < size:
        exact = f", at least {certified_rank(here).rank} exactly" if here.numel() <= _FEW else ""
        return "fails to rounding", f"all vectors span {rank} dimensions to rounding{exact}"
    if size == T:
        return "holds", f"all {T} vectors are independent (singular values)"
    if kind == "float64" and max(math.comb(T, k) for k in range(d + 1)) <= _FEW:
        rank = kruskal_rank(here, max_subsets=_FEW)
        verdict = "holds" if rank >= size else "fails to rounding"
        return verdict, f"every set of {size} was looked at, Kruskal rank {rank} to rounding"
    test = sample_subsets(here, size, samples, seed)
    drawn = f"{test.dependent} of {samples} random sets of {size} are dependent to rounding"
    most = f"at most {test.dependent_at_most:.2%} of all sets with 95% confidence"
    return ("fails to rounding" if test.dependent else "not refuted"), f"{drawn}, {most}"


def _all_are_full(E: Float[Tensor, "T n d"], lengths: Int[Tensor, " T"]) -> tuple[str, str]:
    """Whether the tokens of each context are independent."""
    poor = (torch.linalg.matrix_rank(E) < lengths).nonzero()
    if not len(poor):
        return "holds", f"contexts of full rank: all {len(E):,} (singular values)"
    t, n = int(poor[0]), int(lengths[poor[0]])
    first = f"{n} tokens in at least {certified_rank(E[t]).rank} dimensions"
    verdict = "fails" if n > E.shape[2] else "fails to rounding"
    return verdict, f"contexts that are deficient: {len(poor):,}, the first is {t} ({first})"


def _bounds(
    data: Data, sizes: tuple[int, int, int], tested: list[Tested], heads: int, width: int
) -> list[Bound]:
    n, d = data.contexts.shape[-2:]
    verdicts = {x.name: x.verdict for x in tested if x.precision == "float64"}
    several = ["contexts with a mask"] * (data.mask is not None)
    met, unmet = "any real labels are met", "almost no real labels of more are met"

    def proved(name: str, labels: int, assumed: tuple[str, ...], missing: list[str]) -> Bound:
        fails = [f"{x} {verdicts[x]}" for x in assumed if verdicts[x].startswith("fails")]
        unsure = [f"{x} is not refuted" for x in assumed if verdicts[x] == "not refuted"]
        return Bound(name, labels, met, fails + several + missing, unsure)

    long = [f"n = {n} is not below d = {d}"] * (n >= d)
    found = [proved("Theorem 1", bounds.mha_capacity(heads, n, width), (_A1, _A2), long)]
    if data.shared and 3 <= n <= d and width >= 2:
        room = bounds.scalar_capacity(heads, n, width, d)
        found.append(proved("attention fitted to the labels", room, (_A2, _GENERAL), []))
    ceilings = {}
    if n > 1:
        free = (n - 1, d, 1) if data.shared and n <= d else (d, d, 0)
        here = ["the data have m = {}, q = {}, c = {}".format(*sizes)] * (sizes != free)
        floor = bounds.most_ranks(heads, *free[:2], min(width, free[0]))[0] + free[2]
        found.append(proved("floor L(H)", floor, (), here))
        found[-1].unsure.append("proved for almost all data of such sizes")
        ceilings[bounds.context_ceiling(heads, width, *free)] = "ceiling P(H)"
    ceilings.setdefault(
        bounds.context_ceiling(heads, width, *sizes), "ceiling in the data's dimensions"
    )
    found += [Bound(name, labels, unmet, [], []) for labels, name in ceilings.items()]
    room, what = heads * sizes[0] + sizes[2], "random attention with a read-out"
    if data.labels is not None and (N := len(data.classes or ())) > 1 and room:
        most = sorted(data.labels.long().bincount().tolist(), reverse=True)
        each, k = unequal_class_capacity(room, most)
        means, high = f"about so many labels of {N} classes are met", "a formula"
        if each * sum(most[:k]) < 4 * (k - 1) * sum(most):
            high += ", too high for so many classes"
        if 3 * most[0] > 2 * sum(most):
            high += ", often too low where one class has most examples"
        found.append(Bound(f"{what} for each class", round(each), means, [], [high]))
    return [*found, Bound(f"ceiling of {what}", room, unmet, [], [])]


@dataclasses.dataclass
class _Ranks:
    """Ranks of the derivative, each computed once; if it is full, it is for all further heads."""

    at: Reduced
    head_dim: int
    seed: int
    tell: Callable[[str, int], None]
    known: dict[bool, dict[int, Rank]] = dataclasses.field(default_factory=dict)

    def of(self, heads: int, zero: bool) -> Rank:
        """At random weights, or at those with which all outputs are zero."""
        T, known = len(self.at.queries), self.known.setdefault(zero, {})
        for h, rank in known.items():
            if h == heads or (h < heads and rank.rank == T):
                return rank
        step = f"derivative of {heads} head" if heads == 1 else f"derivative of {heads} heads"
        self.tell(f"{step}, outputs zero" if zero else step, 0)
        some = self.at.some(layer.enough_rows(self.at, heads, self.head_dim, self.seed))
        if zero:
            groups = layer.draw(heads, self.head_dim, some, layer.SHARP, self.seed, groups=True)
            known[heads] = layer.rank_at(groups, some, layer.SURE)
        else:
            known[heads] = layer.free_rank(heads, self.head_dim, some, self.seed)
        return known[heads]

    def fewest(self, zero: bool) -> int | None:
        """The fewest heads of full rank, by a secant; for very many examples, of parameters."""
        T, c = len(self.at.queries), self.at.sizes[2]
        each = bounds.context_ceiling(1, self.head_dim, *self.at.sizes) - c
        low, below, high = 0, 0, max(1, math.ceil((T - c) / each)) if each else 1
        if T > layer.GRAM:
            return None if zero or not each else high
        while (rank := self.of(high, zero).rank) < T:
            gain = (rank - below) / (high - low)
            if gain < 0.5 or high > T:
                return None
            low, below, high = high, rank, high + max(1, math.ceil((T - rank) / gain))
        while high - low > 1 and low:  # the rank at low is too small
            middle = (low + high) // 2
            low, high = (low, middle) if self.of(middle, zero).rank >= T else (middle, high)
        return high
