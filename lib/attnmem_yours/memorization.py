"""Weights for one's own data: as many labels as could be met, and why no more."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnmem.checks import Range, Seed, check_size, checked, need, reading, refuse
from attnmem.core.layers import MHAWeights
from attnmem.theory.fitting import MET

from . import layer, recipes, report
from .data import Examples, as_data, largest, majority, repeats
from .recipes import Effort, Problem
from .rounding import NumberType, roundings, stored

KEPT = 0.01  # of the largest label: what rounded weights may err, a percent


@dataclasses.dataclass(frozen=True)
class Memorized:
    """The weights that :func:`memorize` found, and how far they go."""

    weights: MHAWeights  # in float64; mha(weights, contexts, queries) computes the layer
    errors: Float[Tensor, " T"]  # shares of the largest label; of classes, less the margin
    met: Bool[Tensor, " T"]
    reason: str  # why the others are not; "all labels are stored" if there are none
    how: str  # what built the weights
    classes: list | None  # by output; None for reals
    kept: dict[str, int]  # labels kept, reals to 1%, by number type; of ``keep`` alone

    @property
    def count(self) -> int:
        """Number of labels that are stored."""
        return int(self.met.sum())

    def predict(self, contexts: Any, queries: Any, mask: Any = None) -> np.ndarray:
        """One number, row of numbers, or class for each example of data of the same width."""
        return _answers(self.weights, self.classes, as_data(contexts, queries, None, mask))

    def __str__(self) -> str:
        """How many labels are stored, by what, and why no more."""
        return report.memorized(self)


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


def _answers(weights: MHAWeights, classes: list | None, examples: Examples) -> np.ndarray:
    width = weights.W_Q.shape[-2]
    check_size("contexts", examples.contexts, -1, width, "the width of what was memorized")
    scores = layer.outputs(weights, examples)
    if classes is None:
        return scores.squeeze(-1).numpy()
    # Texts stay whole as objects, since numpy's own lose zero bytes.
    names = np.array(classes, dtype=object if isinstance(classes[0], str) else None)
    return names[scores.argmax(-1).numpy()]


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
        'all labels are stored'
    """
    if labels is None:
        refuse("labels", None, "one label for each query")
    until = math.inf if seconds is None else time.monotonic() + seconds
    examples = as_data(contexts, queries, labels, mask)
    problem, chosen = _posed(examples, head_dim, seed)
    rows = chosen.unique()  # the labels that decide: of equal examples that of most
    effort = Effort(recipes.affordable_steps(problem, heads), until)
    exact, rounded = MET, KEPT
    if examples.classes is not None:  # a tie of classes is not met
        exact, rounded = 0.0, 0.0
    tolerance = exact if keep is None else rounded

    best_count, in_float64, overflow = -1, 0, False
    candidates = recipes.candidates(problem, heads, effort, say or (lambda _: None))
    for weights, full, how in _versions(examples, candidates, keep):
        if keep is not None:
            n_met = int((_errors(examples, layer.outputs(full, examples)) < exact).sum())
            in_float64 = max(in_float64, n_met)
        if not all(W.isfinite().all() for W in weights):
            overflow = True
        errors = _errors(examples, layer.outputs(weights, examples))
        met = errors < tolerance
        if (count := int(met[rows].sum())) > best_count:
            best, best_count = (weights, errors, met, how), count
        if best_count == len(rows):
            break
    weights, errors, met, how = best

    shortfall = None
    if not met.all():
        shortfall = _shortfall(examples, problem, heads, chosen, met)
        shortfall = shortfall._replace(late=recipes.late(until), keep=keep)
        shortfall = shortfall._replace(in_float64=in_float64, overflow=overflow)
    kept = {}
    for number_type in get_args(NumberType) if keep is None else [keep]:
        scores = layer.outputs(stored(weights, number_type), examples)
        kept[number_type] = int((_errors(examples, scores) < rounded).sum())
    return Memorized(
        weights=weights,
        errors=errors,
        met=met,
        reason=report.reason(shortfall),
        how=how if keep is None else f"{how}, in {keep}",
        classes=examples.classes,
        kept=kept,
    )


def _posed(examples: Examples, head_dim: int, seed: int) -> tuple[Problem, Int[Tensor, " T"]]:
    """The problem, and for each example the equal one whose label is to be met."""
    group = repeats(examples).group
    chosen, first = majority(examples.labels, group), group.unique()
    labels = examples.labels[chosen[first]]
    return recipes.posed(examples, first, labels, head_dim, seed), chosen


def _versions(
    examples: Examples, candidates: Iterator[tuple[MHAWeights, str]], keep: NumberType | None
) -> Iterator[tuple[MHAWeights, MHAWeights, str]]:
    """Candidates, or with ``keep`` numbers of that type near them; as they were; by what built."""
    for weights, how in candidates:
        if keep is None:
            yield weights, weights, how
        else:
            for rounded in roundings(examples, weights, keep):
                yield rounded, weights, how


def _errors(examples: Examples, scores: Float[Tensor, "T k"]) -> Float[Tensor, " T"]:
    """Shares of the largest label; of classes the best wrong score less the right one."""
    y = examples.labels
    if examples.classes is None:
        return ((scores - y).abs() / largest(y)).amax(1)
    if len(examples.classes) == 1:
        return -torch.ones_like(scores[:, 0])
    right = scores.gather(1, y[:, None])[:, 0]
    return scores.scatter(1, y[:, None], -torch.inf).amax(1) - right


def quick_fit(examples: Examples, heads: int, head_dim: int, seed: int) -> tuple[int, int]:
    """How many classes one head has right after some seconds, or else all heads; and how many."""
    problem, _ = _posed(examples, head_dim, seed)
    for count in sorted({1, heads}):
        weights = recipes.by_entropy(problem, count, recipes.QUICK)
        right = int((_errors(examples, layer.outputs(weights, examples)) < 0).sum())
        if right == len(examples.queries):
            break
    return count, right


class Shortfall(NamedTuple):
    """What stands between a fit and all labels."""

    examples: int
    met: int
    zero: bool  # whether all tokens are zero
    contradicting: list[tuple[int, int]]  # pairs of equal examples, of which one is not met
    ceiling: (
        int | None
    )  # so many heads meet almost no real labels of more; None if it excludes none
    by_rank: bool  # whether that is a rank on these data, and no count of parameters
    late: bool = False  # whether the seconds were over
    keep: str | None = None  # the number type that was asked for
    in_float64: int = 0  # labels met before rounding
    overflow: bool = False  # whether some fit had weights that the number type does not hold


def _shortfall(
    examples: Examples,
    problem: Problem,
    heads: int,
    chosen: Int[Tensor, " T"],
    met: Bool[Tensor, " T"],
) -> Shortfall:
    T, n_met, y = len(problem.reduced.queries), int(met.sum()), examples.labels
    differs = (y != y[chosen]).reshape(len(met), -1).any(1)
    rows = (differs & ~met).nonzero()[:, 0].tolist()
    contradicting = [(min(s, int(chosen[s])), max(s, int(chosen[s]))) for s in rows]
    ceiling, by_rank = None, T <= layer.GRAM
    if examples.classes is None and y.shape[1] == 1 and len(met) - n_met > len(rows):
        ceiling = recipes.ceiling(problem, heads)
        if by_rank:
            dimensions, head_dim = problem.reduction.dimensions, problem.head_dim
            sizes = heads, head_dim, problem.reduced, dimensions, problem.seed
            ceiling = layer.free_rank(*sizes).rank
        if ceiling >= T:
            ceiling = None
    zero = not examples.contexts.any()
    return Shortfall(len(met), n_met, zero, contradicting, ceiling, by_rank)
