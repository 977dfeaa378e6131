"""One answer about one's own data: what is degenerate, what can be met, and by which weights."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import bounds
from ..checks import Seed, checked
from ..independence import certified_rank, kruskal_rank, numerical_rank, sampled_independence
from . import layer
from .data import Data, Repeats, read, repeats
from .layer import GRAM, Rank, Reduced

FEW = 200_000  # subsets of which every one is looked at, and numbers whose rank is certified
BLOCK = 2_000  # contexts whose ranks are computed at once
WEAK = 1e-6  # what is smaller than this share of the largest may be rounding of single precision
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One assumption in one precision.

    Attributes:
        name: What is assumed.
        precision: ``float32`` or ``float64``.
        verdict: ``holds``, ``fails``, ``fails to rounding`` (sets are dependent to a tolerance), or
            ``not refuted`` (by samples).
        detail: What was looked at, and what was found.
    """

    name: str
    precision: str
    verdict: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Bound:
    """One bound at these sizes.

    Attributes:
        name: Which one.
        labels: The number of labels.
        applies: Whether its hypotheses hold here, as far as could be computed.
        why: What they are, or what is missing.
    """

    name: str
    labels: int
    applies: bool
    why: str


@dataclasses.dataclass(frozen=True)
class Examination:
    """What :func:`examine` found; ``str()`` is a report.

    Attributes:
        examples: Number of examples ``T``.
        tokens: Tokens of the longest context, ``n``.
        dim: Width ``d``.
        shared: Whether one context serves all examples.
        heads: Number of heads ``H`` that was asked about, or None.
        head_dim: Head dimension ``d_h``.
        labels: What the labels are.
        equal: Pairs of equal examples.
        conflicts: Those of them with different labels.
        notes: What else is degenerate.
        dimensions: In how many dimensions tokens of a context differ (``m``), queries lie (``q``),
            and contexts differ beyond that (``c``); with the singular values beside the tolerance.
        findings: The assumptions.
        bounds: The bounds, if ``heads`` is given.
        rank: Of the derivative at random weights of the layer, on the examples that differ.
        met: Of the derivative at random weights with which all outputs are zero. So many of these
            examples meet any real labels.
        least_heads: The fewest heads found with which ``rank`` is the number of examples that
            differ; None if there are none, or too many examples.
        enough_heads: The fewest found with which ``met`` is; None likewise.
        builder: Which function builds the weights.
    """

    examples: int
    tokens: int
    dim: int
    shared: bool
    heads: int | None
    head_dim: int
    labels: str
    equal: list[tuple[int, int]]
    conflicts: list[tuple[int, int]]
    notes: list[str]
    dimensions: dict[str, Any]
    findings: list[Finding]
    bounds: list[Bound]
    rank: Rank | None
    met: Rank | None
    least_heads: int | None
    enough_heads: int | None
    builder: str

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def __str__(self) -> str:
        """A report that a person reads."""
        kind = "a shared context" if self.shared else "contexts of their own"
        lines = [
            f"{self.examples} examples with {kind}: n = {self.tokens} tokens, d = {self.dim}",
            f"labels: {self.labels}",
            *_pairs("equal examples, different labels", self.conflicts),
            *_pairs("equal examples", self.equal),
            *self.notes,
            *(
                f"{name} {size['dimensions']} dimensions (singular values "
                f"{size['kept']:.0e} | {size['dropped']:.0e}, tolerance {size['tolerance']:.0e})"
                for name, size in self.dimensions.items()
            ),
            "",
            *(f"{x.name}, {x.precision}: {x.verdict}; {x.detail}" for x in self.findings),
            "",
        ]
        if self.heads is not None:
            lines.append(f"{self.heads} heads of width {self.head_dim}, one real output:")
            for bound in self.bounds:
                word = "applies" if bound.applies else "does not apply"
                lines.append(f"  {bound.labels:>9,} {bound.name}; {word}: {bound.why}")
            lines += _ranks(self)
        return "\n".join([*lines, *_heads(self), f"weights: {self.builder}"])


def _pairs(what: str, pairs: list[tuple[int, int]]) -> list[str]:
    named = ", ".join(f"{s} and {t}" for s, t in pairs[:5])
    more = f" and {len(pairs) - 5} pairs more" if len(pairs) > 5 else ""
    return [f"{what}: {named}{more}"] if pairs else []


def _ranks(found: Examination) -> list[str]:
    """What the two ranks mean."""
    said, distinct = [], found.examples - len(found.equal)
    limits = "almost no real labels of more examples are met"
    promise = "at random weights whose outputs are zero: so many of these meet any real labels"
    for rank, means in ((found.rank, f"at random weights: {limits}"), (found.met, promise)):
        of = f"on {rank.of:,} of the {distinct:,} examples that differ"
        if rank is found.rank and rank.rank in (rank.of, found.examples):
            means = "at random weights: full, so that it rules nothing out"
        if rank.of < distinct:
            means += "; at least so many of all" if rank.rank == rank.of else ""
        dropped = "not computed" if rank.dropped is None else f"{rank.dropped:.0e}"
        gap = f"{rank.how} {rank.kept:.0e} | {dropped}, tolerance {rank.tolerance:.0e}"
        weak = "; some labels need huge weights" if 0 < rank.kept < WEAK else ""
        said.append(f"  {rank.rank:>9,} rank of the derivative {of}, {means} ({gap}{weak})")
    return said


def _heads(found: Examination) -> list[str]:
    differ = found.examples - len(found.equal)
    if found.least_heads is None:
        why = f"more than {GRAM:,} examples" if differ > GRAM else "the rank ends below it"
        return [f"fewest heads with a rank of {differ:,}: none found ({why})"]
    enough = f"{found.enough_heads} heads meet any" if found.enough_heads else "no proof found"
    return [
        f"all {differ:,} examples that differ, heads of width {found.head_dim}: fewer than "
        f"{found.least_heads} heads meet almost no real labels, {enough} (by ranks as above)"
    ]


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
    say: Callable[[str], None] | None = None,
) -> Examination:
    """Say what is degenerate in some data, how many of their labels one layer meets, and how.

    Args:
        contexts: Tokens as rows, own ``(T, n, d)`` or shared ``(n, d)``, or a list of tables of
            different lengths: arrays, data frames or tensors of any real type.
        queries: One query a row, ``(T, d)``.
        labels: Reals ``(T,)`` or ``(T, d_out)``; integers, booleans and strings are classes.
        heads: Number of heads ``H``, for the bounds and ranks.
        head_dim: Head dimension ``d_h``, by default ``d``.
        mask: True where a token is padding, ``(T, n)``.
        samples: Subsets that are drawn where not all of them can be looked at.
        seed: Seed of samples and weights, at least 0.
        say: Is called with each step of the work.

    Returns:
        The findings.

    Raises:
        ValueError: If the data are malformed; the message names what.

    Example:
        >>> found = examine(torch.rand(30, 3, 5), torch.rand(30, 5), heads=2, head_dim=2)
        >>> found.rank.rank, found.least_heads
        (30, 2)

    Source: this book, the chapter on the capacity of one layer.
    """
    say = say or (lambda _: None)
    data = read(contexts, queries, labels, mask)
    (T, d), n = data.queries.shape, data.contexts.shape[-2]
    head_dim = head_dim or d
    say("equal examples and dimensions")
    same, at = repeats(data), layer.reduced(data)
    findings = []
    for name in DTYPES:
        say(f"assumptions in {name}")
        findings += _findings(data, name, samples, seed)
    differ = at.some(same.group.unique()) if same.equal else at
    ranks = _Ranks(differ, head_dim, seed, say)
    least = ranks.fewest(groups=False)
    enough = ranks.fewest(groups=True) if least else None
    rank, met = (ranks(heads, groups) if heads else None for groups in (False, True))
    return Examination(
        examples=T,
        tokens=n,
        dim=d,
        shared=data.shared,
        heads=heads,
        head_dim=head_dim,
        labels=_kind(data),
        equal=same.equal,
        conflicts=same.conflicts,
        notes=_notes(data, same, at),
        dimensions=_dimensions(data, at),
        findings=findings,
        bounds=_bounds(data, at, findings, heads, head_dim) if heads else [],
        rank=rank,
        met=met,
        least_heads=least,
        enough_heads=enough,
        builder=_builder(data, same, findings, heads, head_dim, rank, met),
    )


def _kind(data: Data) -> str:
    if data.labels is None:
        return "none given"
    if data.classes is None:
        outputs = data.labels.shape[1]
        return f"{outputs} real number{'s' * (outputs > 1)} for each example"
    shown = ", ".join(map(repr, data.classes[:5])) + ", ..." * (len(data.classes) > 5)
    hint = "; give floats if they are numbers to be met" if len(data.classes) > 20 else ""
    return f"{len(data.classes)} class{'es' * (len(data.classes) > 1)} ({shown}){hint}"


def _notes(data: Data, same: Repeats, at: Reduced) -> list[str]:
    m, q, c = at.sizes
    d, notes = data.queries.shape[1], []
    if data.mask is not None:
        lengths = (~data.mask).sum(1)
        notes.append(f"contexts of {int(lengths.min())} to {int(lengths.max())} tokens, by a mask")
    if same.repeated_tokens:
        notes.append(f"contexts with a repeated token: {same.repeated_tokens}")
    if same.constant:
        notes.append(f"contexts of one token, whose output no query changes: {same.constant}")
    for name, rows in (("tokens", data.contexts.flatten(0, -2)), ("queries", data.queries)):
        largest = rows.abs().amax(0)
        if zero := int((largest == 0).sum()):
            notes.append(f"coordinates that are zero in all {name}: {zero}")
        used = largest[largest > 0]
        if len(used) and float(used.min()) < WEAK * float(used.max()):
            sizes = f"{float(used.min()):.0e} to {float(used.max()):.0e}"
            notes.append(f"coordinates of {name} have sizes {sizes}, each taken for exact")
    if m + c < d:
        notes.append(f"tokens lie in {m + c} of {d} dimensions")
    if c and not data.shared:
        notes.append(f"{c} linear function(s) are constant within each context (a constant sum?)")
    if q == 1:
        notes.append("all queries lie on one line")
    if any(0 < each.kept < WEAK for each in at.spectra):
        notes.append("some dimensions are very thin: rounding, if the numbers were once float32")
    return notes


def _dimensions(data: Data, at: Reduced) -> dict[str, Any]:
    names = ("tokens of a context differ in", "queries lie in", "contexts differ besides in")
    rtol = layer.tolerance(data.precision)
    return {
        name: {"dimensions": size, "kept": each.kept, "dropped": each.dropped, "tolerance": rtol}
        for name, size, each in zip(names, at.sizes, at.spectra, strict=True)
    }


# --- the assumptions ------------------------------------------------------------------------------


def _findings(data: Data, name: str, samples: int, seed: int) -> list[Finding]:
    n, d = data.contexts.shape[-2:]
    length = n if data.mask is None else (~data.mask).sum(1, keepdim=True)
    means = data.queries + data.contexts.sum(-2) / length  # padding is zero
    tests = {
        "Assumption 1 (queries)": (data.queries, n),
        "Assumption 3 (query plus mean of tokens)": (means, n),
        "general position (queries)": (data.queries, d),
    }
    first, *others = (
        Finding(title, name, *_any_are_independent(vectors, size, DTYPES[name], samples, seed))
        for title, (vectors, size) in tests.items()
    )
    return [
        first,
        Finding("Assumption 2 (contexts)", name, *_contexts(data, DTYPES[name])),
        *others,
    ]


def _any_are_independent(
    vectors: Tensor, size: int, precision: torch.dtype, samples: int, seed: int
) -> tuple[str, str]:
    """A verdict on any ``size`` of the vectors, or on all if there are fewer, and what it is of."""
    T, d = vectors.shape
    size, here = min(size, T), vectors.to(precision)
    if size > d:
        return "fails", f"{size} vectors in {d} dimensions"
    if not here.isfinite().all():
        return "fails", "numbers that this precision cannot hold"
    if zero := (~here.any(1)).nonzero()[:1].flatten().tolist():
        return "fails", f"query {zero[0]} is a zero vector"
    if size > 1 and len(here.unique(dim=0)) < T:
        _, group = here.unique(dim=0, return_inverse=True)
        last = {int(k): t for t, k in reversed([*enumerate(group)])}
        s, t = next((last[int(k)], t) for t, k in enumerate(group) if last[int(k)] != t)
        return "fails", f"vectors {s} and {t} are equal"
    if (rank := numerical_rank(here)) < size:
        exact = (
            f", {certified_rank(here).rank} modulo a random prime" if here.numel() <= FEW else ""
        )
        return "fails to rounding", f"all vectors have rank {rank} to rounding{exact}"
    if size == T:
        return "holds", f"all {T} vectors are independent (singular values)"
    if size == 1:
        return "holds", "no vector is zero (exact)"
    sets = math.comb(T, size)
    if precision == torch.float64 and max(math.comb(T, k) for k in range(d + 1)) <= FEW:
        rank = kruskal_rank(vectors, max_subsets=FEW)
        return ("holds" if rank >= size else "fails to rounding"), (
            f"every set of {size} was looked at, Kruskal rank {rank} (to rounding)"
        )
    test = sampled_independence(here, size, samples=samples, seed=seed)
    drawn = f"{test.dependent} of {samples} random sets of {size} are dependent to rounding"
    most = f"with 95% confidence at most {test.dependent_at_most:.2%} of all {sets:.1e}"
    return ("fails to rounding" if test.dependent else "not refuted"), f"{drawn}; {most}"


def _contexts(data: Data, precision: torch.dtype) -> tuple[str, str]:
    """A verdict on whether the tokens of each context are independent."""
    E = data.contexts[None] if data.shared else data.contexts
    wanted = torch.full((len(E),), E.shape[1]) if data.mask is None else (~data.mask).sum(1)
    here = E.to(precision)
    if not here.isfinite().all():
        return "fails", "numbers that this precision cannot hold"
    poor = (torch.cat([numerical_rank(part) for part in here.split(BLOCK)]) < wanted).nonzero()
    if not len(poor):
        return "holds", f"all {len(E)} contexts are of full rank (singular values)"
    t = int(poor[0])
    sure = int(wanted[t]) > E.shape[2]
    exact = certified_rank(here[t]).rank
    detail = f"{len(poor)} of {len(E)} are deficient, first {t}: {int(wanted[t])} tokens"
    return ("fails" if sure else "fails to rounding"), f"{detail}, of rank {exact} modulo a prime"


# --- bounds and ranks -----------------------------------------------------------------------------


def _theorem_1(findings: list[Finding], n: int, d: int) -> tuple[bool, str]:
    """Whether nothing contradicts the hypotheses of Theorem 1, and what does."""
    names = ("Assumption 1", "Assumption 2")
    asked = [x for x in findings if x.precision == "float64" and x.name.startswith(names)]
    missing = [f"{x.name} {x.verdict}" for x in asked if x.verdict.startswith("fails")]
    missing += [f"n = {n} is not below d = {d}"] if n >= d else []
    known = [f"{x.name} {x.verdict}" for x in asked]
    return not missing, ", ".join(missing or known)


def _bounds(data: Data, at: Reduced, findings, heads: int, head_dim: int) -> list[Bound]:
    n, d = data.contexts.shape[-2:]
    m, q, c = at.sizes
    few = data.shared and n <= d
    free = data.mask is None and at.sizes == ((n - 1, d, 1) if few else (d, d, 0))
    sizes = f"m = {m}, q = {q}, c = {c}"
    why = "almost all data of these sizes, perhaps not these" if free else f"the data have {sizes}"
    found = [
        Bound("Theorem 1", bounds.mha_capacity(heads, n, head_dim), *_theorem_1(findings, n, d))
    ]
    found.append(
        Bound(
            "random attention with a read-out, at most",
            heads * m + c,
            True,
            "the rank of all attended tokens is no higher, to the tolerance of m and c",
        )
    )
    if n > 1:
        low, high = (
            (
                bounds.shared_context_floor(heads, n, head_dim, d),
                bounds.shared_context_ceiling(heads, n, head_dim, d),
            )
            if few
            else (
                bounds.own_context_floor(heads, head_dim, d),
                bounds.own_context_ceiling(heads, head_dim, d),
            )
        )
        found.append(Bound("floor L(H)", low, free, why))
        above = "almost no real labels of more examples are met"
        found.append(Bound("ceiling P(H)", high, True, f"all data of these sizes: {above}"))
    if not free:
        here = layer.ceiling(heads, head_dim, at.sizes)
        found.append(Bound("the same ceiling for these data", here, True, f"{sizes}, as computed"))
    return found


class _Ranks:
    """Ranks of the derivative on some data, by number of heads, each computed once.

    Further heads do not lower the rank, so a number of heads with full rank speaks for all above.
    """

    def __init__(self, at: Reduced, head_dim: int, seed: int, say: Callable[[str], None]):
        self.at, self.head_dim, self.seed, self.say = at, head_dim, seed, say
        self.known: dict[tuple[int, bool], Rank] = {}

    def __call__(self, heads: int, groups: bool) -> Rank:
        T = len(self.at.queries)
        for (h, kind), rank in self.known.items():
            if (h == heads and kind == groups) or (h < heads and kind == groups and rank.rank == T):
                return rank
        self.say(f"rank of the derivative with {heads} heads" + groups * ", outputs zero")
        at = self.at
        if T > GRAM:
            g = torch.Generator().manual_seed(self.seed)
            width = layer.ceiling(heads, self.head_dim, at.sizes)
            at = at.some(torch.randperm(T, generator=g)[: min(GRAM, width + width // 8 + 50)])
        drawn = layer.draw(heads, self.head_dim, at, 0.5, self.seed, groups)
        self.known[heads, groups] = layer.rank_at(drawn, at)
        return self.known[heads, groups]

    def fewest(self, groups: bool) -> int | None:
        """The fewest heads at which the rank is the number of examples, found by a secant."""
        T = len(self.at.queries)

        def count(heads: int) -> int:
            return layer.ceiling(heads, self.head_dim, self.at.sizes)

        if T > GRAM or count(T) < T:
            return None
        low, below, high = 0, 0, next(h for h in range(1, T + 1) if count(h) >= T)
        while (rank := self(high, groups).rank) < T:
            gain = (rank - below) / (high - low)
            if gain < 0.5 or high > T:
                return None
            low, below, high = high, rank, high + max(1, math.ceil((T - rank) / gain))
        while high - low > 1 and low:  # the rank at low is too small
            middle = (low + high) // 2
            low, high = (low, middle) if self(middle, groups).rank >= T else (middle, high)
        return high


def _builder(data: Data, same: Repeats, findings, heads, head_dim, rank, met) -> str:
    if heads is None:
        return "attnmem.memorize, with heads"
    T, (n, d), left = len(data.queries), data.contexts.shape[-2:], len(same.conflicts)
    room = bounds.mha_capacity(heads, n, head_dim)
    if _theorem_1(findings, n, d)[0] and room >= T and not same.equal and data.mask is None:
        return "memorize_mha builds them (Theorem 1), unless it finds that Assumption 1 fails"
    differ = T - len(same.equal)
    words = "attnmem.memorize"
    if left:
        words += f"; {left} labels disagree with those of equal examples"
    if met.rank >= differ:
        return f"{words}; any real labels of examples that differ can be met"
    if rank.rank >= differ:
        return f"{words} by Levenberg-Marquardt, beyond what is proved for all labels"
    return f"{words}, for at most about {rank.rank:,} real labels; classes may need fewer heads"
