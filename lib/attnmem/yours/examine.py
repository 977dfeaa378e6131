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

FEW = 200_000  # subsets of which every one is looked at
CONTEXTS = 2_000  # contexts whose ranks are computed at once
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One assumption in one precision.

    Attributes:
        name: What is assumed.
        precision: ``float32`` or ``float64``.
        holds: Whether it holds, or no sample contradicts it.
        how: ``exact``, or the number of samples with the bound that follows.
        detail: What was found.
    """

    name: str
    precision: str
    holds: bool
    how: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Bound:
    """One bound at these sizes.

    Attributes:
        name: Which one.
        labels: The number of labels.
        applies: Whether its hypotheses hold here.
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
        rank: Of the derivative at random weights with ``heads`` heads: no more labels than that are
            met, for almost all label vectors.
        met: Of the derivative where heads cancel: so many of these examples meet all their label
            vectors.
        least_heads: With fewer, almost no real labels of all these examples are met; None if no
            number of heads suffices.
        enough_heads: So many meet all real labels of all these examples; None likewise.
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
        parts = dataclasses.asdict(self)
        for name in ("rank", "met"):
            parts[name] = parts[name] and getattr(self, name)._asdict()
        return json.dumps(parts, indent=2)

    def __str__(self) -> str:
        """A report that a person reads."""
        kind = "a shared context" if self.shared else "contexts of their own"
        lines = [
            f"{self.examples} examples with {kind}: n = {self.tokens} tokens, d = {self.dim}",
            f"labels: {self.labels}",
            *_pairs("equal examples, different labels", self.conflicts),
            *_pairs("equal examples", self.equal),
            *self.notes,
        ]
        for name, sizes in self.dimensions.items():
            gap = f"singular values {sizes['kept']:.0e} | {sizes['dropped']:.0e} of the largest"
            lines.append(f"{name}: {sizes['dimensions']} dimensions ({gap})")
        lines.append("")
        for each in self.findings:
            word = "holds" if each.holds else "fails"
            lines.append(f"{each.name}, {each.precision}: {word} ({each.how}); {each.detail}")
        if self.heads is not None:
            lines += ["", f"{self.heads} heads of width {self.head_dim}:"]
            for bound in self.bounds:
                word = "applies" if bound.applies else "does not apply"
                lines.append(f"  {bound.labels:>9,} {bound.name}; {word}: {bound.why}")
            lines += _ranks(self)
        lines += ["", *_heads(self), f"weights: {self.builder}"]
        return "\n".join(lines)


def _pairs(what: str, pairs: list[tuple[int, int]]) -> list[str]:
    if not pairs:
        return []
    named = ", ".join(f"{s} and {t}" for s, t in pairs[:5])
    more = f" and {len(pairs) - 5} pairs more" if len(pairs) > 5 else ""
    return [f"{what}: {named}{more}"]


def _ranks(found: Examination) -> list[str]:
    """What the two ranks mean."""
    said, distinct = [], found.examples - len(found.equal)
    for rank, what, means in (
        (found.rank, "", "almost no real labels of more are met"),
        (found.met, ", heads in groups", "so many of these meet every real label"),
    ):
        if rank is None:
            continue
        least = "at least, " if rank.rank == rank.of < distinct else ""
        means = "all that differ" if rank.rank == distinct else means
        gap = f"{least}singular values {rank.kept:.0e} | {rank.dropped:.0e}, {rank.how}"
        said.append(
            f"  {rank.rank:>9,} rank of the derivative on these data{what}: {means} ({gap})"
        )
    return said


def _heads(found: Examination) -> list[str]:
    if found.least_heads is None:
        return ["no number of heads meets all real labels: equal examples, or no rank"]
    least, enough = found.least_heads, found.enough_heads
    return [
        f"all real labels: at least {least} heads of width {found.head_dim}; {enough} suffice; "
        "Levenberg-Marquardt succeeds near the first number"
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
    T, d, n = len(data.queries), data.queries.shape[1], data.contexts.shape[-2]
    head_dim = head_dim or d
    say("equal examples")
    same = repeats(data)
    say("dimensions")
    at = layer.reduced(data)
    findings = []
    for name, precision in DTYPES.items():
        say(f"assumptions in {name}")
        findings += _findings(data, name, precision, samples, seed)
    distinct = same.group.unique()
    alone = at if len(distinct) == T else at.some(distinct)
    rank = met = None
    if heads is not None:
        say("rank of the derivative")
        rank = _rank(alone, heads, head_dim, seed)
        say("rank where heads cancel")
        met = _rank(alone, heads, head_dim, seed, cancelling=True)
    say("fewest heads")
    known = [{heads: found.rank} if found else {} for found in (rank, met)]
    least = _fewest(alone, head_dim, seed, known[0])
    enough = least and _fewest(alone, head_dim, seed, known[1], cancelling=True)
    found = Examination(
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
        dimensions=_dimensions(at),
        findings=findings,
        bounds=_bounds(data, at, findings, heads, head_dim) if heads else [],
        rank=rank,
        met=met,
        least_heads=least,
        enough_heads=enough,
        builder="",
    )
    return dataclasses.replace(found, builder=_builder(found, at))


def _kind(data: Data) -> str:
    if data.labels is None:
        return "none given"
    if data.classes is None:
        outputs = data.labels.shape[1]
        return f"{outputs} real number{'s' * (outputs > 1)} for each example"
    shown = ", ".join(map(repr, data.classes[:5])) + ", ..." * (len(data.classes) > 5)
    hint = "; give floats if they are numbers to be met" if len(data.classes) > 20 else ""
    return f"{len(data.classes)} classes ({shown}){hint}"


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
        if zero := int((rows == 0).all(0).sum()):
            notes.append(f"coordinates that are zero in all {name}: {zero}")
    if m + c < d:
        notes.append(f"tokens lie in {m + c} of {d} dimensions")
    if c and not data.shared:
        notes.append(f"{c} linear function(s) are constant within each context (a constant sum?)")
    if q == 1:
        notes.append("all queries lie on one line: attention depends on the context alone")
    return notes


def _dimensions(at: Reduced) -> dict[str, Any]:
    names = ("tokens of a context differ in", "queries lie in", "contexts differ besides in")
    return {
        name: {"dimensions": each.rank, "kept": each.kept, "dropped": each.dropped}
        for name, each in zip(names, at.spectra, strict=True)
    }


# --- the assumptions ------------------------------------------------------------------------------


def _findings(data: Data, name: str, precision, samples: int, seed: int) -> list[Finding]:
    n, d = data.contexts.shape[-2:]
    counts = None if data.mask is None else (~data.mask).sum(1)
    whole = data.contexts.sum(-2)
    length = n if counts is None else counts[:, None]
    means = data.queries + whole / length  # padding is zero
    few = min(d, len(data.queries))
    how = {"samples": samples, "seed": seed}
    return [
        _vectors("Assumption 1 (queries)", data.queries, n, name, precision, **how),
        _contexts(data, counts, name, precision),
        _vectors("Assumption 3 (query plus mean)", means, n, name, precision, **how),
        _vectors("general position (queries)", data.queries, few, name, precision, **how),
    ]


def _vectors(title, vectors: Tensor, size: int, name, precision, *, samples, seed) -> Finding:
    """Whether any ``size`` of the vectors are independent."""
    T, d = vectors.shape
    size = min(size, T)
    if size > d:
        return Finding(title, name, False, "exact", f"{size} vectors in {d} dimensions")
    if (span := layer.spectrum(vectors, max(T, d) * torch.finfo(precision).eps).rank) < size:
        return Finding(title, name, False, "singular values", f"they span {span} dimensions")
    pair = _dependent_pair(vectors) if size > 1 else None
    if pair or not vectors.any(1).all():
        what = f"{pair[0]} and {pair[1]} are equal" if pair else "a vector is zero"
        return Finding(title, name, False, "exact", what)
    subsets = math.comb(T, size)
    if subsets <= FEW and precision == torch.float64:
        rank = kruskal_rank(vectors, max_subsets=FEW) if _small(T, size) else 0
        if rank:
            return Finding(title, name, rank >= size, "every subset", f"Kruskal rank {rank}")
    test = sampled_independence(vectors, size, samples=samples, seed=seed, dtype=precision)
    most = f"at most {test.dependent_at_most:.2%} of all, with 95% confidence"
    detail = f"{test.dependent} of {samples} sets of {size} are dependent"
    return Finding(title, name, not test.dependent, f"sampled; {most}", detail)


def _small(T: int, size: int) -> bool:
    return all(math.comb(T, k) <= FEW for k in range(1, size + 1))


def _dependent_pair(vectors: Tensor) -> tuple[int, int] | None:
    first: dict[bytes, int] = {}
    for t, row in enumerate(vectors.numpy() + 0.0):
        if (s := first.setdefault(row.tobytes(), t)) != t:
            return s, t
    return None


def _contexts(data: Data, counts: Tensor | None, name: str, precision) -> Finding:
    """Whether the tokens of each context are independent."""
    title, E = "Assumption 2 (contexts)", data.contexts
    E = E[None] if data.shared else E
    wanted = torch.full((len(E),), E.shape[1]) if counts is None else counts
    ranks = [numerical_rank(part, dtype=precision) for part in E.split(CONTEXTS)]
    poor = (torch.cat(ranks) < wanted).nonzero()[:, 0].tolist()
    if not poor:
        return Finding(title, name, True, "singular values", f"all {len(E)} of full rank")
    t = poor[0]
    detail = f"{len(poor)} of {len(E)} are deficient, the first is {t}"
    try:
        exact = certified_rank(E[t]).rank
        detail += f", whose numbers have rank {exact} exactly (modulo a prime)"
    except ImportError:
        pass
    return Finding(title, name, False, "singular values", detail)


# --- bounds and ranks -----------------------------------------------------------------------------


def _bounds(data: Data, at: Reduced, findings, heads: int, head_dim: int) -> list[Bound]:
    n, d = data.contexts.shape[-2:]
    m, q, c = at.sizes
    failing = [each.name for each in findings if each.precision == "float64" and not each.holds]
    failing = [name for name in failing if name.startswith(("Assumption 1", "Assumption 2"))]
    failing += [f"n = {n} is not below d = {d}"] if n >= d else []
    theorem = ", ".join(failing) or "Assumptions 1 and 2, n < d"
    few = data.shared and n <= d
    free = (m, q, c) == ((n - 1, d, 1) if few else (d, d, 0))
    sizes = f"m = {m}, q = {q}, c = {c}"
    general = "free data, almost all of them" if free else f"the data have {sizes}"
    found = [
        Bound("Theorem 1", bounds.mha_capacity(heads, n, head_dim), not failing, theorem),
        Bound("random attention, any read-out", heads * m + c, True, f"almost all data of {sizes}"),
    ]
    if n > 1 and few:
        low = bounds.shared_context_floor(heads, n, head_dim, d)
        high = bounds.shared_context_ceiling(heads, n, head_dim, d)
    elif n > 1:
        low = bounds.own_context_floor(heads, head_dim, d)
        high = bounds.own_context_ceiling(heads, head_dim, d)
    if n > 1:
        found.append(Bound("floor L(H)", low, free, general))
        found.append(Bound("ceiling P(H)", high, free, general))
    if not free:
        here = layer.floor(heads, head_dim, at.sizes)[0], layer.ceiling(heads, head_dim, at.sizes)
        why = f"almost all data of {sizes}; the ranks below are of these"
        found.append(Bound("floor in these dimensions", here[0], True, why))
        found.append(Bound("ceiling in these dimensions", here[1], True, f"all data of {sizes}"))
    return found


def _rank(at: Reduced, heads: int, head_dim: int, seed: int, cancelling: bool = False) -> Rank:
    """The rank at soft random weights; on some examples if there are too many for all pairs."""
    T, width = len(at.queries), layer.ceiling(heads, head_dim, at.sizes)
    if T > GRAM and (width > layer.SMALL or T * width > layer.EXPLICIT):
        g = torch.Generator().manual_seed(seed)
        at = at.some(torch.randperm(T, generator=g)[: min(GRAM, width + width // 8 + 50)])
    groups = layer.floor(heads, head_dim, at.sizes)[1] if cancelling else [0] * heads
    return layer.rank_at(layer.draw(groups, head_dim, at, 0.5, seed), at)


def _fewest(
    at: Reduced, head_dim: int, seed: int, known: dict[int, int], cancelling: bool = False
) -> int | None:
    """The fewest heads at which the rank is the number of examples, found by a secant.

    ``known`` has ranks by number of heads. Of too many examples for all pairs, the ranks of one and
    two heads, or four, are continued as a straight line.
    """
    T = len(at.queries)

    def count(heads: int) -> int:
        whole = layer.floor(heads, head_dim, at.sizes)[0]
        return whole if cancelling else layer.ceiling(heads, head_dim, at.sizes)

    def rank(heads: int) -> int:
        if heads not in known:
            known[heads] = _rank(at, heads, head_dim, seed, cancelling).rank
        return known[heads]

    if count(T) < T:
        return None
    if T > GRAM:
        few = 4 if cancelling else 2
        gain = (rank(few) - rank(few // 2)) / (few - few // 2)
        return few + max(0, math.ceil((T - rank(few)) / gain)) if gain else None
    low, high = 0, next(h for h in range(1, T + 1) if count(h) >= T)  # fewer never suffice
    known[low] = 0
    while rank(high) < T:
        gain = (rank(high) - known[low]) / (high - low)
        if gain < 0.5 or high > T:
            return None
        low, high = high, high + max(1, math.ceil((T - rank(high)) / gain))
    while high - low > 1 and low:  # the rank at low is too small
        middle = (low + high) // 2
        low, high = (low, middle) if rank(middle) >= T else (middle, high)
    return high


def _builder(found: Examination, at: Reduced) -> str:
    if found.heads is None:
        return "attnmem.memorize, with heads"
    T = found.examples
    if found.bounds[0].applies and found.bounds[0].labels >= T and not found.equal:
        return "memorize_mha builds them (Theorem 1)"
    if found.conflicts:
        left = T - len(found.conflicts)
        return f"attnmem.memorize; at most about {left} labels, as equal examples disagree"
    if found.met.rank >= T - len(found.equal):
        return "attnmem.memorize, for any real labels"
    if found.rank.rank >= T - len(found.equal):
        return "attnmem.memorize by Levenberg-Marquardt, beyond what is proved"
    return f"attnmem.memorize, for about {found.rank.rank} real labels; classes need fewer heads"
