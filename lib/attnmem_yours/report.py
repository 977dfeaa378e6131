"""Words for what ``examine`` and ``memorize`` found; nothing here computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmem.checks import refuse
from attnmem.terminal import wrapped
from attnmem.theory.fitting import MET

from .recipes import AIM

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .examination import Bound, Examination
    from .layer import Rank
    from .memorization import Memorized, Shortfall

_NAMED = 5  # pairs and classes that are named; others are counted
_MANY_CLASSES = 20  # more integers than these look like numbers
_WEAK = 1e-6  # directions below this share of the largest need weights as much larger

# What was looked at for an assumption.
REASONS = {
    "overflow": "numbers that this precision cannot hold",
    "too many": "{size} vectors in {dim} dimensions",
    "zero": "vector {example} is zero",
    "not zero": "no vector is zero (exact)",
    "equal": "vectors {first} and {second} are equal in this precision",
    "rank": "all vectors span {rank} dimensions to rounding",
    "certified rank": "all vectors span {rank} dimensions to rounding, at least {exact} exactly",
    "independent": "all {count} vectors are independent (singular values)",
    "every set": "every set of {size} was looked at, Kruskal rank {rank} to rounding",
    "samples": "{dependent} of {samples} random sets of {size} are dependent to rounding, "
    "at most {at_most:.2%} of all sets with 95% confidence",
    "full": "contexts of full rank: all {contexts:,} (singular values)",
    "deficient": "contexts that are deficient: {count:,}, the first is {first} "
    "({tokens} tokens in at least {rank} dimensions)",
}
# What else is degenerate in the data, in the order of the report.
NOTES = {
    "lengths": "contexts of {least} to {most} tokens, by a mask",
    "repeated tokens": "contexts with a repeated token: {count}",
    "one token": "contexts of one token, whose output no query changes: {count}",
    "zero coordinates": "coordinates that are zero in all {vectors}: {count}",
    "sizes": "coordinates of {vectors} have sizes {least:.0e} to {most:.0e}, each taken for exact",
    "flat": "tokens lie in {rank} of {dim} dimensions",
    "common": "sums of coordinates that all tokens of a context share "
    "(cut's marks of places are one): {count}",
    "one query": "all queries lie on one line",
    "thin": "some dimensions are as thin as rounding in single or lower precision",
}
# What a bound says of so many labels, and what may stand in its way.
ANY, FEW_OF_MORE = "any real labels fit", "of more, almost no real labels fit"
CLASSES = "about so many labels of {classes} classes fit"
HYPOTHESES = {
    "mask": "contexts with a mask",
    "long": "n = {n} is not below d = {d}",
    "dimensions": "the data have m = {m}, q = {q}, c = {c}",
    "almost all": "proved for almost all data of such sizes",
    "formula": "a formula",
    "high": "too high for so many classes",
    "low": "often too low where one class has most examples",
}
DIMENSIONS = ("tokens of a context differ in m", "queries lie in q", "whole contexts differ in c")
# What examine does, told as it begins.
EQUAL, QUICK = "equal examples and dimensions", "a quick fit of classes"
FEWEST, FEWEST_CANCELLING = "the fewest heads", "the fewest heads with outputs zero"
RANK, RANK_CANCELLING = "the rank with {heads} heads", "the rank with {heads} heads, outputs zero"


def label_words(outputs: int | None, classes: list | None) -> str:
    """What the labels are: so many reals for each example, or classes."""
    if outputs is None:
        return "none given"
    if classes is None:
        return f"{outputs} real number{_plural(outputs, 's')} for each example"
    shown = ", ".join(map(repr, classes[:_NAMED]))
    if len(classes) > _NAMED:
        shown += ", ..."
    kinds = f"{len(classes)} class{_plural(len(classes), 'es')} ({shown})"
    if len(classes) > _MANY_CLASSES:
        kinds += "; give floats if they are numbers"
    return kinds


def _plural(count: int, ending: str) -> str:
    return "" if count == 1 else ending


# --- the answer in three lines --------------------------------------------------------------------


def answer(x: Examination) -> str:
    """What was read, what a layer does with these labels, and what to call next."""
    data = f"{x.examples:,} examples of {x.tokens} tokens, labels: {x.labels}"
    call = f"memorize(..., heads={x.wanted}, head_dim={x.head_dim}) for weights"
    lines = {"data": data, "layer": holds(x), "next": f"{call}, found.details for more"}
    return wrapped([f"{name:12}{line}" for name, line in lines.items()])


def holds(x: Examination, fit: bool = True) -> str:
    """How many labels a layer stores: classes by a ``fit``, reals by the ranks."""
    clauses = _fit_clauses(x) if fit and x.quick else _rank_clauses(x)
    if x.conflicts:
        clauses.append(f"labels that contradict equal examples never fit: {len(x.conflicts)}")
    return f"heads of width {x.head_dim}: {'; '.join(clauses) or 'no number is known to do'}"


def _fit_clauses(x: Examination) -> list[str]:
    heads, right = x.quick
    clauses = [f"a quick fit with {heads} has {right:,} of {x.examples:,} right"]
    if right < x.examples - len(x.conflicts):
        clauses.append("more heads or steps may have more")
    return clauses


def _rank_clauses(x: Examination) -> list[str]:
    T, least, enough, heads = x.differ, x.least_heads, x.enough_heads, x.heads
    labels = "labels" if x.outputs in (None, 1) else "real labels of one output"
    clauses = []
    if heads is not None and x.met.rank < T:
        clauses.append(f"with {heads} any {x.met.rank:,} of {T:,} {labels} fit")
        if x.rank.rank < x.rank.of:
            clauses.append(f"almost never over {x.rank.rank:,}")
        heads = None
    if enough is not None:
        if heads is None:
            heads = enough
        clauses.append(f"with {heads} all {T:,} {labels} fit, whatever they are")
        if least is not None and least < enough:
            clauses.append(f"fewer than {enough} cannot promise it")
    if least is not None and least > 1:
        clauses.append(f"fewer than {least} cannot do it")
    return clauses


# --- the report -----------------------------------------------------------------------------------


def details(x: Examination) -> str:
    """What is degenerate, the assumptions, bounds and ranks."""
    contexts = "a shared context" if x.shared else "contexts of their own"
    lines = [f"{x.examples:,} examples with {contexts}: n = {x.tokens} tokens, d = {x.dim}"]
    lines.append(f"labels: {x.labels}")
    lines += _pairs("equal examples, different labels", x.conflicts)
    lines += _pairs("equal examples", x.equal)
    lines += x.notes
    for name, spectrum in x.dimensions.items():
        lines.append(f"{name} = {spectrum['dimensions']} dimensions")
    lines += ["", *_assumptions(x), ""]
    if x.heads is not None:
        lines += _limits(x)
    lines.append(f"all {x.differ:,} that differ, {holds(x, fit=False)} (to such tolerances)")
    lines.append(f"weights: {x.builder}")
    return wrapped(lines)


def _pairs(name: str, pairs: list[tuple[int, int]]) -> list[str]:
    if not pairs:
        return []
    line = f"{name}: " + ", ".join(f"{s} and {t}" for s, t in pairs[:_NAMED])
    if len(pairs) > _NAMED:
        line += f" and {len(pairs) - _NAMED} pairs more"
    return [line]


def _assumptions(x: Examination) -> list[str]:
    """A line for each; one for both precisions, where the outcome is the same."""
    precisions: dict[tuple[str, str, str], list[str]] = {}
    for test in x.findings:
        outcome = (test.name, test.verdict, test.detail)
        precisions.setdefault(outcome, []).append(test.precision)
    lines = []
    for (name, verdict, detail), names in precisions.items():
        lines.append(f"{name}, {' and '.join(names)}: {verdict}; {detail}")
    return lines


def _limits(x: Examination) -> list[str]:
    """Bounds and ranks with so many heads."""
    looked_at = " among those looked at" if x.rank.of < x.differ else ""
    meaning = f"of more, almost no real labels fit{looked_at}"
    if x.rank.rank == x.rank.of:
        meaning = f"full{looked_at}, it excludes nothing"
    return [
        f"{x.heads} heads of width {x.head_dim}, one real output:",
        *[f"  {line}" for line in map(bound, x.bounds)],
        _rank("rank of the derivative", x.rank, meaning),
        _rank("rank where all outputs are zero", x.met, "any labels of so many fit"),
    ]


def bound(x: Bound) -> str:
    """A bound in one line."""
    word, reasons = "applies", x.missing or x.unsure
    if x.missing:
        word = "does not apply"
    elif x.unsure:
        word = "may apply"
    if reasons:
        word += f" ({', '.join(reasons)})"
    return f"{x.labels:>9,} {x.name}: {x.means}; {word}"


def _rank(name: str, rank: Rank, meaning: str) -> str:
    tolerance = f"{rank.how} above {rank.tolerance:.0e}"
    if 0 < rank.kept < _WEAK:
        tolerance += "; some need huge weights"
    return f"  {rank.rank:>9,} {name}, of {rank.of:,} examples: {meaning} ({tolerance})"


def builder(by_theorem: bool) -> str:
    """Which function builds the weights."""
    if by_theorem:
        return "attnmem.memorize_mha (Theorem 1); it refuses if an assumption fails after all"
    return "attnmem_yours.memorize"


def draw(x: Examination, ax: Axes | None = None) -> Axes:
    """Draw the bounds and ranks as bars; bounds whose hypotheses fail are hollow."""
    if x.rank is None or x.met is None:
        refuse("heads", None, "a number, so that there is something to draw")
    import matplotlib.pyplot as plt

    ax = ax or plt.gca()
    solid, hollow = {"color": "C0"}, {"color": "none", "linestyle": ":"}
    bars = {"rank of the derivative": (x.rank.rank, solid)}
    bars["rank where all outputs are zero"] = (x.met.rank, solid)
    for b in x.bounds:
        if b.missing:
            bars[f"{b.name}, does not apply"] = (b.labels, hollow)
        else:
            bars[b.name] = (b.labels, solid)
    for name, (labels, style) in sorted(bars.items(), key=lambda bar: (bar[1][0], bar[0])):
        bar = ax.barh(name, labels, **style, edgecolor="C0")
        ax.bar_label(bar, [f" {labels:,}"], fontsize="small")
    ax.axvline(x.differ, color="black", linestyle="--", linewidth=1.2)
    ax.set(xscale="log", xlabel="real labels of one output")
    ax.text(x.differ, 1.01, f"{x.differ:,} examples", transform=ax.get_xaxis_transform())
    ax.margins(x=0.15)
    return ax


# --- what memorize stored -------------------------------------------------------------------------


def memorized(x: Memorized) -> str:
    """How many labels are stored, by what, and why no more."""
    H, _, head_dim = x.weights.W_Q.shape
    line = f"{x.count} of {len(x.met)} labels stored"
    if x.count:
        worst = float(x.errors[x.met].max())
        if x.classes is None:
            # Where a fit ends below 1e-8, rounding decides.
            round_number = next(error for error in (10 * AIM, MET, 0.01) if worst <= error)
            line += f" (errors below {round_number:.0e})"
        else:
            line += f" (least margin {-worst:.1e})"
    line += f" by {H} head{_plural(H, 's')} of width {head_dim}: {x.how}"
    kept = ", ".join(f"{count} in {name}" for name, count in x.kept.items())
    return wrapped([line, x.reason, f"of all {len(x.met)}, rounded weights keep {kept}"])


def reason(x: Shortfall | None) -> str:
    """Why labels are not stored."""
    if x is None:
        return "all labels are stored"
    missed, n_contradicting = x.examples - x.met, len(x.contradicting)
    causes = []
    if x.zero:
        causes = ["all tokens are zero, hence all outputs of any weights"]
    elif n_contradicting:
        s, t = x.contradicting[0]
        cause = f"equal examples have different labels (such as {s} and {t})"
        causes = [f"{n_contradicting} because {cause}, which no weights of any size give"]
    if not x.zero and missed > n_contradicting:
        causes.append(f"{missed - n_contradicting} because {_other_causes(x)}")
    sentence = f"{missed} of {x.examples} labels are not stored: {'; '.join(causes)}"
    if x.overflow:
        sentence += f"; some fit had weights beyond the largest {x.keep}"
    return sentence


def _other_causes(x: Shortfall) -> str:
    cause = "no fit stored more"
    if x.in_float64 > x.met:
        cause = f"{x.keep} keeps {x.met} of the {x.in_float64} stored in float64"
    help = "another seed, more seconds" if x.late else "another seed"
    cause = f"{cause}; {help} or more heads may help"
    if x.ceiling is None:
        return cause
    why = "the outputs have so many parameters"
    if x.by_rank:
        why = "the rank of the derivative on these data, to rounding"
    limit = f"so many heads store almost no real labels of more than {x.ceiling} examples ({why})"
    return limit if x.met >= x.ceiling else f"{limit}; of {x.ceiling}, {cause}"
