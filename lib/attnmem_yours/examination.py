"""One answer about one's own data: what is degenerate, what can be met, and by which weights."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from attnmem.checks import Seed, checked
from attnmem.core import bounds
from attnmem.theory.counts import unequal_class_capacity

from . import assumptions, layer, report
from .assumptions import Tested
from .data import Examples, Repeats, as_data, repeats
from .layer import Dimensions, Rank, Reduction
from .memorization import quick_fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_QUICK = 2000  # examples with classes that are fitted at once, in some seconds
_WEAK = 1e-6  # what is smaller than this share of the largest may be rounding of single precision
_SLOW = 0.5  # labels that a further head must add for the search of the fewest heads to go on


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
        return report.bound(self)


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
    def wanted(self) -> int:
        """Heads with which all labels fit, as far as it is known; for classes a guess."""
        if self.quick is None:
            return max(self.heads or 1, self.enough_heads or 1)
        heads, right = self.quick
        if right < self.examples - len(self.conflicts):
            return 2 * heads
        return heads

    @property
    def sure(self) -> bool:
        """Whether so many heads are known to store all labels."""
        if self.quick is not None:
            return self.quick[1] == self.examples
        return self.outputs == 1 and self.enough_heads is not None and not self.conflicts

    @property
    def builder(self) -> str:
        """Which function builds the weights."""
        by_theorem = False
        if self.bounds and not self.equal:
            theorem = self.bounds[0]
            by_theorem = not theorem.missing and theorem.labels >= self.examples
        return report.builder(by_theorem)

    def draw(self, ax: Axes | None = None) -> Axes:
        """Draw the bounds and ranks as bars; bounds whose hypotheses fail here are hollow."""
        return report.draw(self, ax)

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(dataclasses.asdict(self) | {"builder": self.builder}, indent=2)

    def __str__(self) -> str:
        """What was read, what a layer does with these labels, and what to call next."""
        return report.answer(self)

    def holds(self, fit: bool = True) -> str:
        """How many labels a layer stores: classes by a ``fit``, reals by the ranks."""
        return report.holds(self, fit)

    @property
    def details(self) -> str:
        """The report: what is degenerate, the assumptions, bounds and ranks."""
        return report.details(self)


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
    examples = as_data(contexts, queries, labels, mask)
    T, d = examples.queries.shape
    head_dim = head_dim or d
    progress = _Progress(_steps(heads), say)

    progress.begin(report.EQUAL)
    duplicates = repeats(examples)
    reduced, reduction = layer.reduced(examples)

    findings = []
    for precision in assumptions.PRECISIONS:
        for name in assumptions.NAMES:
            progress.begin(f"{name} in {precision}")
            findings.append(assumptions.tested(examples, name, precision, samples, seed))

    distinct = reduced.some(duplicates.group.unique())
    free = _ranks(distinct, reduction.dimensions, head_dim, seed, progress, cancelling=False)
    cancelling = _ranks(distinct, reduction.dimensions, head_dim, seed, progress, cancelling=True)
    progress.begin(report.FEWEST)
    n_distinct = len(distinct.queries)
    guess = guessed_heads(n_distinct, head_dim, reduction.dimensions)
    least, enough = guess, None
    searched = n_distinct <= layer.GRAM  # of more, only the parameters are counted
    if searched:
        least = fewest_heads(free, n_distinct, guess or 1)
    progress.begin(report.FEWEST_CANCELLING)
    if searched and least is not None:
        enough = fewest_heads(cancelling, n_distinct, guess or 1)

    rank, met, known_bounds = None, None, []
    if heads is not None:
        progress.begin(report.RANK.format(heads=heads))
        rank = free(heads)
        progress.begin(report.RANK_CANCELLING.format(heads=heads))
        met = cancelling(heads)
        known_bounds = _bounds(examples, reduction.dimensions, findings, heads, head_dim)

    progress.begin(report.QUICK)
    outputs, quick = None, None
    if examples.classes is not None:
        outputs = 0
        if T <= _QUICK:
            quick = quick_fit(examples, heads or 2, head_dim, seed)
    elif examples.labels is not None:
        outputs = examples.labels.shape[1]
    return Examination(
        examples=T,
        tokens=examples.contexts.shape[-2],
        dim=d,
        shared=examples.shared,
        heads=heads,
        head_dim=head_dim,
        labels=report.label_words(outputs, examples.classes),
        equal=duplicates.equal,
        conflicts=duplicates.conflicts,
        notes=[
            report.NOTES[note].format(**n) for note, n in _notes(examples, duplicates, reduction)
        ],
        dimensions={
            name: {"dimensions": len(spectrum.sizes), **spectrum.limits}
            for name, spectrum in zip(report.DIMENSIONS, reduction.spectra, strict=True)
        },
        findings=findings,
        bounds=known_bounds,
        rank=rank,
        met=met,
        least_heads=least,
        enough_heads=enough,
        outputs=outputs,
        quick=quick,
    )


# --- steps ----------------------------------------------------------------------------------------


def _steps(heads: int | None) -> list[str]:
    """All that :func:`examine` does, in order."""
    steps = [report.EQUAL]
    for precision in assumptions.PRECISIONS:
        steps += [f"{name} in {precision}" for name in assumptions.NAMES]
    steps += [report.FEWEST, report.FEWEST_CANCELLING]
    if heads is not None:
        steps += [report.RANK.format(heads=heads), report.RANK_CANCELLING.format(heads=heads)]
    return [*steps, report.QUICK]


class _Progress:
    """Tells each step to whoever listens: how many are done, of how many, and what begins."""

    def __init__(self, steps: list[str], say: Callable[[int, int, str], None] | None) -> None:
        self.steps, self.say, self.done = steps, say, 0

    def begin(self, step: str) -> None:
        self.done = self.steps.index(step)
        self.tell(step)

    def tell(self, step: str) -> None:
        if self.say is not None:
            self.say(self.done, len(self.steps), step)


# --- ranks ----------------------------------------------------------------------------------------


def _ranks(
    distinct: Examples,
    dimensions: Dimensions,
    head_dim: int,
    seed: int,
    progress: _Progress,
    *,
    cancelling: bool,
) -> Callable[[int], Rank]:
    """A function of the number of heads: the rank on the examples, or on some if there are many."""
    T = len(distinct.queries)
    rank_with = layer.cancelling_rank if cancelling else layer.free_rank

    def computed(heads: int) -> Rank:
        step = "derivative of 1 head" if heads == 1 else f"derivative of {heads} heads"
        progress.tell(f"{step}, outputs zero" if cancelling else step)
        ceiling = bounds.context_ceiling(heads, head_dim, *dimensions)
        rows = layer.enough_rows(T, ceiling, seed)
        return rank_with(heads, head_dim, distinct.some(rows), dimensions, seed)

    return remembered(computed, T)


def remembered(computed: Callable[[int], Rank], full: int) -> Callable[[int], Rank]:
    """The function with its values kept; a full rank is that of all further heads, too."""
    ranks: dict[int, Rank] = {}

    def rank_with(heads: int) -> Rank:
        for fewer, rank in ranks.items():
            if fewer == heads or (fewer < heads and rank.rank == full):
                return rank
        ranks[heads] = computed(heads)
        return ranks[heads]

    return rank_with


def guessed_heads(T: int, head_dim: int, dimensions: Dimensions) -> int | None:
    """The fewest heads with as many parameters as examples; None if heads have none."""
    common = dimensions.c
    per_head = bounds.context_ceiling(1, head_dim, *dimensions) - common
    if not per_head:
        return None
    return max(1, math.ceil((T - common) / per_head))


def fewest_heads(rank_with: Callable[[int], Rank], full: int, guess: int) -> int | None:
    """The fewest heads whose rank is full, by a secant from a guess; None if it stops growing."""
    short, rank_of_short, heads = 0, 0, guess
    while (rank := rank_with(heads).rank) < full:
        gain = (rank - rank_of_short) / (heads - short)
        if gain < _SLOW or heads > full:
            return None
        short, rank_of_short = heads, rank
        heads += max(1, math.ceil((full - rank) / gain))
    while heads - short > 1 and short:  # the rank with ``short`` heads is too small
        middle = (short + heads) // 2
        if rank_with(middle).rank >= full:
            heads = middle
        else:
            short = middle
    return heads


# --- what is degenerate ---------------------------------------------------------------------------


def _notes(
    examples: Examples, duplicates: Repeats, reduction: Reduction
) -> list[tuple[str, dict[str, Any]]]:
    """What the data have: keys of ``report.NOTES``, with their numbers."""
    m, q, c = reduction.dimensions
    d = examples.queries.shape[1]
    notes: list[tuple[str, dict[str, Any]]] = []
    if examples.mask is not None:
        shortest, longest = (int(n) for n in examples.lengths.aminmax())
        notes.append(("lengths", {"least": shortest, "most": longest}))
    if duplicates.repeated_tokens:
        notes.append(("repeated tokens", {"count": duplicates.repeated_tokens}))
    if duplicates.constant:
        notes.append(("one token", {"count": duplicates.constant}))
    for vectors, rows in (("tokens", examples.contexts), ("queries", examples.queries)):
        largest = rows.flatten(0, -2).abs().amax(0).tolist()
        nonzero = [size for size in largest if size]
        if len(nonzero) < len(largest):
            count = len(largest) - len(nonzero)
            notes.append(("zero coordinates", {"vectors": vectors, "count": count}))
        if nonzero and min(nonzero) < _WEAK * max(nonzero):
            sizes = {"vectors": vectors, "least": min(nonzero), "most": max(nonzero)}
            notes.append(("sizes", sizes))
    if m + c < d:
        notes.append(("flat", {"rank": m + c, "dim": d}))
    if c and not examples.shared:
        notes.append(("common", {"count": c}))
    if q == 1:
        notes.append(("one query", {}))
    rounding = max(_WEAK, torch.finfo(examples.precision).eps)
    if any(rounding > spectrum.limits["kept"] > 0 for spectrum in reduction.spectra):
        notes.append(("thin", {}))
    return notes


# --- bounds ---------------------------------------------------------------------------------------


def _bounds(
    examples: Examples, dimensions: Dimensions, findings: list[Tested], heads: int, head_dim: int
) -> list[Bound]:
    """What is proved of so many heads, and a formula for classes."""
    n, d = examples.contexts.shape[-2:]
    m, q, c = dimensions
    queries, tokens = assumptions.INDEPENDENT_QUERIES, assumptions.INDEPENDENT_TOKENS
    broken, unsure = _hypotheses(examples, findings, (queries, tokens))
    if n >= d:
        broken.append(report.HYPOTHESES["long"].format(n=n, d=d))
    room = bounds.mha_capacity(heads, n, head_dim)
    proved = [Bound("Theorem 1", room, report.ANY, broken, unsure)]

    if examples.shared and 3 <= n <= d and head_dim >= 2:
        broken, unsure = _hypotheses(examples, findings, (tokens, assumptions.GENERAL))
        room = bounds.scalar_capacity(heads, n, head_dim, d)
        proved.append(Bound("attention fitted to the labels", room, report.ANY, broken, unsure))

    ceilings = {}
    if n > 1:
        free = Dimensions(d, d, 0)  # the dimensions of almost all data of such sizes
        if examples.shared and n <= d:
            free = Dimensions(n - 1, d, 1)
        broken, _ = _hypotheses(examples, findings, ())
        if dimensions != free:
            broken.append(report.HYPOTHESES["dimensions"].format(m=m, q=q, c=c))
        rank, _ = bounds.most_ranks(heads, free.m, free.q, min(head_dim, free.m))
        unsure = [report.HYPOTHESES["almost all"]]
        proved.append(Bound("floor L(H)", rank + free.c, report.ANY, broken, unsure))
        ceilings[bounds.context_ceiling(heads, head_dim, *free)] = "ceiling P(H)"
    ceiling = bounds.context_ceiling(heads, head_dim, *dimensions)
    ceilings.setdefault(ceiling, "ceiling in the data's dimensions")
    for labels, name in ceilings.items():
        proved.append(Bound(name, labels, report.FEW_OF_MORE, [], []))

    read_out = "random attention with a read-out"
    room = heads * m + c  # of its features
    if examples.classes is not None and len(examples.classes) > 1 and room:
        proved.append(_bound_of_classes(examples, f"{read_out} for each class", room))
    proved.append(Bound(f"ceiling of {read_out}", room, report.FEW_OF_MORE, [], []))
    return proved


def _hypotheses(
    examples: Examples, findings: list[Tested], assumed: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Of some assumptions, and contexts of one length: those that fail, and those left open."""
    verdicts = {x.name: x.verdict for x in findings if x.precision == "float64"}
    broken, unsure = [], []
    for name in assumed:
        if verdicts[name] in (assumptions.FAILS, assumptions.TO_ROUNDING):
            broken.append(f"{name} {verdicts[name]}")
        elif verdicts[name] == assumptions.NOT_REFUTED:
            unsure.append(f"{name} is {verdicts[name]}")
    if examples.mask is not None:
        broken.append(report.HYPOTHESES["mask"])
    return broken, unsure


def _bound_of_classes(examples: Examples, name: str, room: int) -> Bound:
    sizes = sorted(examples.labels.long().bincount().tolist(), reverse=True)
    T = sum(sizes)
    labels, k = unequal_class_capacity(room, sizes)
    caveats = [report.HYPOTHESES["formula"]]
    if labels * sum(sizes[:k]) < 4 * (k - 1) * T:  # of the k largest, a few examples for each
        caveats.append(report.HYPOTHESES["high"])
    if 3 * sizes[0] > 2 * T:
        caveats.append(report.HYPOTHESES["low"])
    means = report.CLASSES.format(classes=len(sizes))
    return Bound(name, round(labels), means, [], [", ".join(caveats)])
