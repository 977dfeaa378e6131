"""Every capacity formula of the two papers and of this book, one function each.

Prose, figures and tests call these functions, so that no formula is written twice. The letters are
those of the notation page. ``heads`` is the number of heads ``H``, ``context`` the tokens in a
context ``n``, ``dim`` the embedding dimension ``d``, ``head_dim`` the head dimension ``d_h``,
``value_dim`` that of the values ``d_v``, ``outputs`` the number of outputs ``d_out``, ``width`` the
hidden units ``m``, ``vocab`` the size ``N`` of the vocabulary or number of classes, ``length`` the
tokens ``S`` of a sequence, ``total`` the number of sequences ``T_0`` or of labels ``T``.

All sizes are integers of at least 1, or of the range that is said there. Each function raises
``ValueError`` for other values. Formulas without a source are this book's.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import scipy

from .checks import Range, check_integer, checked, refuse

UpToDim = Annotated[int, Range(1, "dim")]
AtLeast2 = Annotated[int, Range(2)]

# --- what a layer memorizes -----------------------------------------------------------------------


@checked
def mha_capacity(heads: int, context: int, head_dim: int, query_rank: int | None = None) -> int:
    """Number of examples that one multi-head attention layer memorizes: :math:`H (r - 1) + 1`.

    Here ``r = min(n, d_h)``, or ``r = min(n, d_h, Q)`` if the Kruskal rank ``Q`` of the queries is
    given. Theorem 1 assumes ``Q >= n``, under which ``Q`` changes nothing.

    Example:
        >>> mha_capacity(heads=32, context=32, head_dim=32)
        993

    Source: Mahdavi et al. 2024, Theorem 1 and Remark 1.
    """
    return heads * (min(context, head_dim, query_rank or context) - 1) + 1


@checked
def relu_capacity(width: int, dim: int, outputs: int = 1) -> int:
    """Number of examples beyond which a two-layer ReLU network fails on some admissible data set.

    The formula is the whole part of :math:`(m (d + d_{out} + 1) + d_{out}) / d_{out}`: the number
    of weights per output that matter when all contexts are one constant. Some set with more
    examples satisfies the assumptions of Theorem 1 and cannot be memorized.

    Source: Mahdavi et al. 2024, Proposition 3.
    """
    return (width * (dim + outputs + 1) + outputs) // outputs


@checked
def aot_capacity(heads: int, head_dim: UpToDim, dim: int) -> int:
    """Number of associations that an attention-only transformer memorizes: :math:`H d_h + d`.

    This holds for sets of sequences that attention can tell apart, such as random ones. It does not
    hold for every set (theorems ``thm-parity``, ``thm-subsets`` and ``thm-random-bigrams``). The
    paper's layer has ``d_h <= d``.

    Example:
        >>> aot_capacity(heads=20, head_dim=10, dim=10)
        210

    Source: Dana et al. 2025, Theorem 1 and Corollary 1.
    """
    return heads * head_dim + dim


@checked
def previous_aot_capacity(heads: int, head_dim: int) -> int:
    """The earlier bound that Dana et al. compare with: :math:`H (d_h - 1) + 1` associations.

    Source: Mahdavi et al. 2024, Theorem 1, as quoted in Dana et al. 2025, Table 1.
    """
    return heads * (head_dim - 1) + 1


def _so_many_bigrams_exist(heads: int, head_dim: int, dim: int, vocab: int) -> None:
    if (count := heads * head_dim + dim) > vocab**2:
        least = math.isqrt(count - 1) + 1
        refuse("vocab", vocab, f"at least {least}, so that {count} bigrams exist")


@checked(also=_so_many_bigrams_exist)
def random_bigrams_risk(heads: int, head_dim: UpToDim, dim: int, vocab: int) -> float:
    """Upper bound of the probability that attention cannot tell ``H d_h + d`` random bigrams apart.

    The ``H d_h + d <= N^2`` bigrams, with ``d_h <= d``, are drawn uniformly from all ``N^2``
    without repetition. Unless the event of this probability occurs, the features ``F`` of almost
    every transformer have full rank on them, so that every choice of next tokens can be memorized.
    The bound is a union bound over sets of tokens, a sum of hypergeometric tails, cut off at one,
    where it says nothing (theorem ``thm-random-bigrams``).

    Example:
        >>> random_bigrams_risk(heads=20, head_dim=10, dim=10, vocab=50) < 1e-15
        True
    """
    H, d_h, d, N = heads, head_dim, dim, vocab
    T = H * d_h + d

    def term(choices: int, marked: int, most: int) -> float:
        """At most ``choices`` times the chance to draw more than ``most`` of ``marked`` bigrams."""
        log_tail = float(scipy.stats.hypergeom.logsf(most, N * N, marked, T))
        return math.exp(min(0.0, math.log(choices) + log_tail))

    # L last tokens end more than H d_h + L of the bigrams.
    few_last = sum(term(math.comb(N, L), N * L, H * d_h + L) for L in range(1, min(d - 1, N) + 1))
    # m tokens hold more than H ceil(m / 2) - spare of them, or more than d + spare are (a, a).
    crowded = [
        sum(
            term(math.comb(N, m), m * m, H * ((m + 1) // 2) - spare)
            for m in range(2, min(2 * d_h - 2, N) + 1)
        )
        + term(1, N, d + spare)
        for spare in range(H + 1)
    ]
    return min(1.0, few_last + min(crowded))


@checked
def scalar_capacity(
    heads: int,
    context: Annotated[int, Range(3, "dim")],
    head_dim: AtLeast2,
    dim: Annotated[int, Range(3)],
) -> int:
    """Number of scalar labels that attention fitted to them memorizes: :math:`H (d - 1)`.

    The context is shared and has ``3 <= n <= d`` independent tokens, the heads have width ``d_h >=
    2``, and the queries are in general position. The capacity depends neither on ``n`` nor on
    ``d_h``.

    Source: :func:`attnmem.constructions.memorize_scalars`.
    """
    return heads * (dim - 1)


# --- the largest rank that features can have ------------------------------------------------------


@checked
def shared_context_rank(heads: int, context: int) -> int:
    """Largest rank of the features ``Z`` on one context that all share: :math:`H (n - 1) + 1`.

    No weights exceed it, and with more than ``d`` tokens none reach it, since ``Z`` has ``H d``
    columns. So attention that is chosen without regard to the labels can serve no more examples.
    Attention that depends on the labels can (:func:`attnmem.constructions.memorize_scalars`).

    Source: Mahdavi et al. 2024, Proposition 2.
    """
    return heads * (context - 1) + 1


@checked
def affine_rank(heads: int, dim: int) -> int:
    """Largest rank of ``Z`` if the coordinates of each token have one sum: :math:`H (d - 1) + 1`.

    Source: Mahdavi et al. 2024, Proposition 5.
    """
    return heads * (dim - 1) + 1


@checked
def affine_span_rank(
    heads: int, span: Annotated[int, Range(0)], through_origin: bool = False
) -> int:
    r"""Largest rank of ``Z`` if all tokens lie in an affine subspace: :math:`H a + [0 \notin A]`.

    The subspace ``A`` has dimension ``a``, the ``span``, and contains zero or not. No weights
    exceed the rank, and almost all reach it if there are enough examples, of at least two tokens
    each. A shared context of ``n`` independent tokens spans ``a = n - 1`` (Proposition 2). Tokens
    with a constant coordinate sum lie in ``a = d - 1``, through the origin if that sum is zero
    (Proposition 5).

    Example:
        >>> affine_span_rank(heads=32, span=31) == shared_context_rank(heads=32, context=32)
        True

    It contains Mahdavi et al. 2024, Propositions 2 and 5.
    """
    return heads * span + (not through_origin)


@checked
def own_context_rank(heads: int, context: AtLeast2, dim: int) -> int:
    """Largest rank of ``Z`` when every example has a context of its own: :math:`H d`.

    Almost all weights and data reach it, with heads of any width, if contexts have ``n >= 2``
    tokens. A read-out then meets any real labels of as many examples. See
    :func:`attnmem.constructions.random_mha`.
    """
    return heads * dim


# --- real labels: ceilings and floors -------------------------------------------------------------


# A layer with one output is determined by its logit matrices, of rank at most d_h, and by its
# values. Their number is a ceiling: weights that meet more real labels exist only for a set of
# labels of measure zero (Sard's theorem). The floors are ranks of the derivative at weights where
# the output vanishes: the values of heads with equal attention cancel. Such heads form a group.


@checked
def own_context_ceiling(heads: int, head_dim: int, dim: int) -> int:
    """Number of parameters that determine the one output of a layer on own contexts.

    The formula is :math:`P(H) = H (r (2 d - r) + d)` with ``r = min(d_h, d)``. Each head
    contributes its logits, a matrix of shape ``(d, d)`` and rank at most ``r``, and its values.
    Beyond so many examples almost all real labels are out of reach. Contexts have at least two
    tokens. The count also holds for a shared context of more than ``d`` tokens.
    """
    r = min(head_dim, dim)
    return heads * (r * (2 * dim - r) + dim)


@checked
def shared_context_ceiling(
    heads: int, context: UpToDim, head_dim: int, dim: int, embedded: bool = False
) -> int:
    """Number of parameters that determine the one output of a layer on a shared context.

    The formula is :math:`H (r (n - 1 + d - r) + n - 1) + 1` with ``r = min(d_h, n - 1)``. Each head
    contributes its logits, a matrix of shape ``(n - 1, d)`` and rank at most ``r``, and its values,
    both less those of the last token. A constant adds one. Beyond so many examples almost all real
    labels are out of reach.

    Args:
        embedded: Count for the model that Mahdavi et al. train, whose query embedding has a bias.
            It adds :math:`\\min(d, H r)`, for the point where all logits vanish.
    """
    differences = context - 1
    r = min(head_dim, differences)
    origin = min(dim, heads * r) if embedded else 0
    return heads * (r * (differences + dim - r) + differences) + 1 + origin


@checked
def group_rank(size: int, keys: UpToDim, dim: int, rank: Annotated[int, Range(1, "keys")]) -> int:
    r"""Rank of the derivative in the weights of one group, whose values sum to zero.

    All heads of the group share one logit matrix, of shape ``(m, d)`` and rank ``r``. Their values
    span ``p = size - 1`` dimensions, or all ``m``. The formula is :math:`p r (m + d - r) - \binom
    p2 r - \binom{p - m + r}2 (d - r) + m`, whose last binomial is zero if ``p <= m - r``.

    Args:
        size: Number of heads in the group.
        keys: Dimensions ``m`` that tell tokens apart: ``d``, or ``n - 1`` on a shared context of
            ``n <= d`` tokens.
        rank: Rank of the logit matrix ``r``, at most ``m``.

    Example:
        >>> group_rank(size=2, keys=8, dim=8, rank=8) == own_context_ceiling(1, 8, 8)
        True
    """
    return _group_rank(size, keys, dim, rank)


def _group_rank(size: int, keys: int, dim: int, rank: int) -> int:
    p = min(size - 1, keys)
    missed = math.comb(p, 2) * rank + math.comb(max(p - keys + rank, 0), 2) * (dim - rank)
    return p * rank * (keys + dim - rank) - missed + keys


@checked
def best_groups(
    heads: int, keys: UpToDim, dim: int, rank: Annotated[int, Range(1, "keys")]
) -> list[int]:
    """Sizes of the groups of ``H`` heads whose sum of :func:`group_rank` is largest.

    From the second head of a group on, the gain of one more head falls. So groups of nearly equal
    size are best.

    Example:
        >>> best_groups(heads=32, keys=64, dim=64, rank=64)
        [11, 11, 10]
    """
    split, _ = _best_split(heads, keys, dim, rank)
    return [size for size, count in split.items() for _ in range(count)]


def _best_split(heads: int, *sizes: int, fewest: int = 1) -> tuple[dict[int, int], int]:
    """How many groups of each size are best, of at least so many, and the sum of their ranks.

    For ``G`` groups of nearly equal size the sum is ``G f(H / G)``, where ``f`` is the rank of one
    as a function of its size, with lines between whole numbers. It is concave, and so is the sum as
    a function of ``G``. So this rises up to the best ``G``.
    """

    def split(groups: int) -> dict[int, int]:
        small, larger = divmod(heads, groups)
        return {small + 1: larger, small: groups - larger}

    def ranks(groups: int) -> int:
        return sum(count * _group_rank(size, *sizes) for size, count in split(groups).items())

    def is_enough(groups: int) -> bool:
        return ranks(groups + 1) <= ranks(groups)

    best = fewest + bisect.bisect_left(range(fewest, heads), True, key=is_enough)
    return split(best), ranks(best)


@checked
def own_context_floor(heads: int, head_dim: int, dim: int) -> int:
    """Examples with own contexts whose real labels are all met, for almost all data.

    The count is the sum of :func:`group_rank` over the best groups, for contexts of at least two
    tokens. It is at least ``P(floor(H/2))`` and at most ``P(H)``, the
    :func:`own_context_ceiling`.
    """
    return _best_split(heads, dim, dim, min(head_dim, dim))[1]


@checked
def shared_context_floor(heads: int, context: AtLeast2, head_dim: int, dim: int) -> int:
    """Examples on one shared context whose real labels are all met, for almost all data.

    The count is the sum of :func:`group_rank` over the best groups, and one for a constant if the
    context has at most ``d`` tokens, of at least two. On longer contexts it is
    :func:`own_context_floor`.
    """
    if context > dim:
        return own_context_floor(heads, head_dim, dim)
    return _best_split(heads, context - 1, dim, min(head_dim, context - 1))[1] + 1


@checked
def sequences_ceiling(
    heads: int,
    head_dim: UpToDim,
    dim: int,
    vocab: int,
    length: AtLeast2,
    last_tokens: Annotated[int | None, Range(1, "vocab")] = None,
    trained: bool = False,
) -> int:
    """Number of parameters that determine one output for each of some token sequences.

    The formula is ``b + H (a + r (a + b - r))``: the skip connection contributes ``b = min(d, L)``
    for ``L`` last tokens. Each head contributes ``a = min(d, N + S - 2)`` values, and logits of
    rank ``r = min(d_h, a, b)``. With trained embeddings and positions the count is that of
    unlimited ``d``, or ``d (N + S - d) + H (d_h (2 d - d_h) + d)`` where that is less. Beyond so
    many sequences almost all real labels are out of reach.

    Args:
        vocab: Number of tokens ``N`` that the sequences use.
        last_tokens: Number of last tokens ``L`` that the sequences use; by default ``N``.
        trained: Whether embeddings and positions are trained, not fixed.
    """

    def count(a: int, b: int) -> int:
        r = min(head_dim, a, b)
        return b + heads * (a + r * (a + b - r))

    a, b = vocab + length - 2, last_tokens or vocab
    if not trained:
        return count(min(dim, a), min(dim, b))
    if dim > a + 1:
        return count(a, b)
    tables = dim * (vocab + length - dim)
    return min(count(a, b), tables + heads * (head_dim * (2 * dim - head_dim) + dim))


def _group_is_no_larger_than_its_values_span(size: int, dim: int) -> None:
    if size > dim + 1:
        refuse("size", size, f"an integer of at least 1 and at most {dim + 1}")


@checked(also=_group_is_no_larger_than_its_values_span)
def sequences_floor(groups: int, size: int, head_dim: UpToDim, dim: int) -> int:
    """Number of real labels that groups of cancelling heads meet, whatever the labels are.

    The formula is ``d`` plus :func:`group_rank` for each group of ``k <= d + 1`` heads of width
    ``d_h <= d``. It holds for almost all fixed embeddings if the last token of each sequence, and
    one token before it, are in no other sequence. A pair adds what one head adds to
    :func:`sequences_ceiling`.
    """
    return dim + groups * group_rank(size, dim, dim, head_dim)


# --- the price of a model, and what its function shows of it --------------------------------------


@checked
def mha_parameters(
    heads: int, head_dim: int, dim: int, value_dim: int = 1, outputs: int = 1
) -> int:
    """Number of parameters of a multi-head layer and its read-out.

    The formula is :math:`H d (2 d_h + d_v) + d_{out} (H d_v + 1)`: the attention maps and values of
    each head, and one linear map with bias from the heads to the outputs.
    """
    return heads * dim * (2 * head_dim + value_dim) + outputs * (heads * value_dim + 1)


@checked
def aot_parameters(
    heads: int, head_dim: UpToDim, dim: int, vocab: int, length: int, rank_one: bool = False
) -> int:
    """Number of parameters of an attention-only transformer: :math:`d (S + 2 N + 4 d_h H)`.

    With queries and keys of width one (``rank_one``) it is :math:`d (S + 2 N + 2 (d_h + 1) H)`.

    Source: Dana et al. 2025, Theorem 1 and Remark 2.
    """
    width = 1 if rank_one else head_dim
    return dim * (length + 2 * vocab + 2 * (head_dim + width) * heads)


def _fits_the_tables(head_dim: int, dim: int, vocab: int, shared_maps: bool) -> None:
    if shared_maps and head_dim > dim:
        refuse("head_dim", head_dim, f"at most d = {dim}, since maps are shared")
    if vocab <= dim:
        refuse("vocab", vocab, f"an integer of at least {dim + 1}")


@checked(also=_fits_the_tables)
def aot_dimension(
    heads: int,
    head_dim: int,
    dim: int,
    vocab: int,
    *,
    width: Annotated[int, Range(0)] = 0,
    shared_maps: bool = False,
    position_in_skip: bool = True,
) -> int:
    r"""Dimension of the family of functions of one-layer transformers on pairs of tokens.

    It is the number of parameters less all directions that leave every predicted distribution as it
    is, and the rank of the Jacobian of all predictions at almost all weights. With maps of their
    own, the heads show two matrices each, :math:`W_Q^\top W_K` and :math:`W_O W_V`, of rank ``r =
    min(d_h, d)``:

    .. math:: (2 N - 1) d - d^2 + 2 H r (2 d - r) + \min(d, 2 H r)

    The first term is the two tables, less a constant added to all logits. The second is a change of
    basis of the residual stream. The last is the difference of the two positions, which adds to the
    tokens and is seen by keys and values only. Positions that are not in the skip connection are
    seen by the queries too, which adds :math:`\min(d, H r)`. Maps that all heads share, with
    ``d_h`` different from ``d``, take the place of the heads' terms:
    :math:`2 d_h d + 2 H d_h^2 - 2 d_h^2`, and one or two positions of width ``d_h``. A feed-forward
    layer of width ``m`` behind adds all of its :math:`m (2 d + 1)` numbers.

    It is at most the dimension of all predictions of that form, which counts where the vocabulary
    is small or the heads are many: with :math:`k = \min(d, H r)` directions of the heads' outputs,
    or ``d`` with a feed-forward layer,

    .. math:: N^2 k + N (d - k) + k (d - k) + (N - 1) d - d^2

    Args:
        head_dim: Head dimension ``d_h``, at most ``d`` if maps are shared.
        vocab: Vocabulary size ``N``, greater than ``d``.
        width: Width ``m`` of a feed-forward layer without bias behind, 0 for none.
        shared_maps: Whether all heads share one map to ``d_h`` and one back.
        position_in_skip: Whether positions are in the residual stream, or in the attention's input
            only.
    """
    d, r = dim, min(head_dim, dim)
    if shared_maps:  # at d_h = d both are equal
        seen = 2 * head_dim * (d - head_dim) + 2 * heads * head_dim**2
        seen += head_dim * (1 if position_in_skip else 2)
    else:
        seen = 2 * heads * r * (2 * d - r) + min(d, 2 * heads * r)
        seen += 0 if position_in_skip else min(d, heads * r)
    k = d if width else min(d, heads * r)
    most = vocab**2 * k + (vocab + k) * (d - k) + (vocab - 1) * d - d**2
    return min(most, (2 * vocab - 1) * d - d**2 + seen + width * (2 * d + 1))


def _fits_the_context(context: int, dim: int, shared: bool) -> None:
    if shared and context > dim:
        refuse("context", context, f"at most d = {dim}, since the context is shared")


@checked(also=_fits_the_context)
def mha_dimension(
    heads: int,
    head_dim: int,
    dim: int,
    context: int,
    *,
    shared: bool,
    classes: Annotated[int | None, Range(2)] = None,
    embedded: bool = True,
) -> int:
    r"""Dimension of the family of functions of a multi-head layer with values of width one.

    It is the number of parameters less all directions that leave every output, or every predicted
    distribution over classes, as it is, and the rank of the Jacobian of all outputs at almost all
    weights and data. Let :math:`C` be 1 for a real output and one less than the
    number of classes otherwise, and :math:`k = \min(H, d, C)`. A head's values and its place in the
    outputs share a scale:

    - own contexts: :math:`H (r (2 d - r) + d) + k (H + C - k) - H`, ``r = min(d_h, d)``: the
      logits are a matrix of shape ``(d, d)`` and rank ``r``, the values a vector;
    - a shared context: :math:`H (r (n - 1 + d - r) + n - 1) + k (H + C - k) - H`, ``r = min(d_h,
      n - 1)``: logits and values less those of the last token.

    A bias adds :math:`C`; without one, a shared context adds the constant of its last token,
    :math:`k`. The embedding of the model that Mahdavi et al. train adds
    :math:`\min(d, H r)`, the query at which all logits vanish, and on own contexts the positions
    :math:`\min(n - 1, d) \min(d, H (r + 1))`, less what they have in common. With one token there
    are no logits: what is left is the bias and, on own contexts, a linear map of rank ``k``.

    Args:
        shared: Whether one context serves all examples; it then has at most ``d`` tokens.
        classes: Number of classes, at least 2; None for one real output.
        embedded: Whether queries and tokens are embedded and have positions, with a bias behind, as
            in the model that Mahdavi et al. train, or not, as in the layer of their theory.
    """
    H, n, d = heads, context, dim
    C = 1 if classes is None else classes - 1
    k = min(H, d, C)
    bias = C if embedded else k if shared else 0
    if n == 1:
        return C if shared else k * (d + C - k) + bias
    keys = n - 1 if shared else d
    r = min(head_dim, keys)
    head = r * (keys + d - r) + keys
    total = H * (head - 1) + k * (H + C - k) + bias
    if embedded:
        total += min(d, H * r)
        total += 0 if shared else min(n - 1, d) * min(d, H * (r + 1))
    return total


# --- several layers -------------------------------------------------------------------------------


def _is_a_network(heads) -> None:
    if not len(heads):
        refuse("heads", "no layer", "one number for each layer")
    for index, H in enumerate(heads):
        check_integer(f"heads[{index}]", H)


@checked(also=_is_a_network)
def deep_ceiling(
    heads: Sequence[int],
    head_dim: int,
    value_dim: int,
    dim: int,
    *,
    outputs: int = 1,
    skip: bool = True,
) -> int:
    r"""Largest rank of the derivative of attention layers one after the other, on own contexts.

    If there are more labels than that, counting each output's, almost no label vector is met. The
    outputs are read at the last token, by a matrix of shape ``(d, o)``. With ``skip``, let
    :math:`s_L = \min(o, d)` and, from the last layer to the first,

    .. math:: v_l = \min(d_v, d, s_l), \qquad s_{l-1} = \min(d, s_l + H_l (v_l + 2 r)),

    with ``r = min(d_h, d)``. Later layers read :math:`s_l` dimensions of what layer ``l`` writes.
    The rank is :math:`\sum_l H_l (r (2 d - r) + v_l (d + s_l - v_l)) + d o` for contexts of two
    tokens or more, with full or causal attention (theorem ``thm-depth-rank``).

    Without ``skip`` the formula counts the dimensions that are both written by one layer and read
    by the next. For ``o <= d`` it is proved to be the rank (theorem ``thm-depth-bare``) of one
    layer, and of several if :math:`H_l d_v \ge d` in all but the last and :math:`H_L (2 r +
    \min(d_v, o)) \ge d` there. From three tokens on it agrees with all other ranks that we
    computed; on two tokens, with full or causal attention, that of narrow layers can be smaller.

    Args:
        heads: One number for each layer.

    Example:
        >>> deep_ceiling([4], 2, 1, 6) == own_context_ceiling(4, 2, 6) + 6
        True
    """
    d, o = dim, min(outputs, dim)
    if skip:
        r, s, total = min(head_dim, d), o, d * outputs
        for H in reversed(heads):
            v = min(value_dim, d, s)
            total += H * (r * (2 * d - r) + v * (d + s - v))
            s = min(d, s + H * (v + 2 * r))
        return total
    # e[l] dimensions are both written by layer l and read by layer l + 1: the largest solution.
    L = len(heads)
    e, before = [d] * L + [o], None
    while e != before:
        before = e.copy()
        for i in range(1, L + 1):
            written = heads[i - 1] * min(value_dim, e[i - 1])
            read = o
            if i < L:
                read = heads[i] * (2 * min(head_dim, e[i]) + min(value_dim, e[i], e[i + 1]))
            e[i] = min(e[i], written, read)
    total = e[L] * outputs - sum(x * x for x in e[1:])
    for H, a, b in zip(heads, e, e[1:], strict=False):
        r, v = min(head_dim, a), min(value_dim, a, b)
        total += H * (r * (2 * a - r) + v * (a + b - v))
    return total


class DeepGroups(NamedTuple):
    """How the heads of two layers are grouped, and the labels that :func:`deep_floor` counts."""

    labels: int
    carried: int  # c, the dimensions that carry values from the first layer to the second
    first: list[int]  # sizes of the groups of the first layer
    second: list[int]  # sizes of the groups of the second, at least c of them
    both: list[int]  # or sizes of groups of the heads of both layers together; then c = 0


def _are_two_layers(heads, most=None) -> None:
    _is_a_network(heads)
    if len(heads) != 2:
        refuse("heads", f"{len(heads)} layers", "two")
    if most is not None:
        check_integer("most", most)


@checked
def carried_rank(size: int, dim: int) -> int:
    r"""Values of one group of heads that a second layer sees, for each dimension it reads.

    The formula is :math:`\kappa(k) = (p + 1) d - \binom p2`, where ``p`` is the largest even
    number up to ``min(k - 1, d)``. One value vector is the sum of those of all heads. The others
    belong to ``p`` heads whose attention differs a little, in a way that the output does not see.

    Example:
        >>> [carried_rank(size, 8) for size in (1, 2, 3, 4, 5)]
        [8, 8, 23, 23, 34]
    """
    p = min(size - 1, dim) // 2 * 2
    return (p + 1) * dim - math.comb(p, 2)


@checked(also=_are_two_layers)
def deep_groups(
    heads: Sequence[int],
    head_dim: int,
    value_dim: int,
    dim: AtLeast2,
    *,
    most: int | None = None,
) -> DeepGroups:
    """The groups of two layers, of at most ``most`` heads each, that admit the most labels.

    The labels are those that :func:`deep_floor` counts.

    Example:
        >>> deep_groups([6, 5], 1, 6, 8, most=2)
        DeepGroups(labels=305, carried=5, first=[1, 1, 1, 1, 1, 1], second=[1, 1, 1, 1, 1], both=[])
    """
    (H1, H2), d = heads, dim
    most, tried = most or H1 + H2, []

    def alike(heads: int, m: int, fewest: int) -> tuple[list[int], int]:
        fewest = max(fewest, -(-heads // most))
        split, total = _best_split(heads, m, m, min(head_dim, m), fewest=fewest)
        return [size for size, count in split.items() for _ in range(count)], total

    for c in range(min(value_dim - 1, d - 2, H2) + 1):
        gain = {
            k: _group_rank(k, d, d, min(head_dim, d)) + c * carried_rank(k, d)
            for k in range(1, min(H1, most) + 1)
        }
        best: list[tuple[int, list[int]]] = [(0, [])]  # for each number of heads
        for h in range(1, H1 + 1):
            ends = [(best[h - k][0] + gain[k], k) for k in gain if k <= h]
            total, k = max(ends)
            best.append((total, [*best[h - k][1], k]))
        second, total = alike(H2, d - 1 - c, max(c, 1))
        tried.append(DeepGroups(best[H1][0] + total + d - 1, c, best[H1][1], second, []))
    both, total = alike(H1 + H2, d - 1, 1)
    tried.append(DeepGroups(total + d - 1, 0, [], [], both))
    return max(tried, key=lambda groups: groups.labels)


@checked(also=_are_two_layers)
def deep_floor(heads: Sequence[int], head_dim: int, value_dim: int, dim: AtLeast2) -> int:
    r"""Examples with own contexts whose real labels two layers all meet, for almost all data.

    The layers have skip connections and one output, full or causal attention, and contexts of at
    least two tokens. The floor is :func:`own_context_floor` of all heads in ``d - 1`` dimensions,
    and ``d - 1`` (theorem ``thm-depth-width``), or the following, if that is larger (theorem
    ``thm-depth-floor``). Let ``c <= min(d_v - 1, d - 2)`` dimensions carry values of the first
    layer to the second, whose logits read ``e = d - 1 - c`` others. The first layer has groups of
    :math:`k_g` heads, the second at least ``c`` groups of :math:`k'_g`. With the :func:`group_rank`
    in ``d`` and ``e`` dimensions and :func:`carried_rank` for :math:`\kappa` it is the largest

    .. math:: \sum_g \bigl( \rho_d(k_g) + c \, \kappa(k_g) \bigr)
              + \sum_g \rho_e(k'_g) + d - 1 .

    Args:
        heads: One number for each of the two layers.

    Example:
        >>> deep_floor([6, 5], 1, 6, 8) > own_context_ceiling(11, 1, 8) + 8
        True

    Source: :func:`attnmem.constructions.memorize_by_depth`.
    """
    return deep_groups(heads, head_dim, value_dim, dim).labels


# --- what an accuracy, a loss or an error says ----------------------------------------------------


@checked
def associations_to_accuracy(
    count: Annotated[float | int, Range(0, "total")], vocab: int, total: int
) -> float:
    r"""Accuracy of a model that knows ``X`` of ``T_0`` associations and guesses the others.

    The formula is :math:`\varphi(X) = 1/N + (1 - 1/N) X / T_0`, for a uniform prior over the
    sequences and equally likely next tokens, and a ``count`` ``X`` from 0 to ``T_0``.

    Example:
        >>> associations_to_accuracy(count=210, vocab=50, total=2500)
        0.10232

    Source: Dana et al. 2025, Corollary 2.
    """
    return 1 / vocab + (1 - 1 / vocab) * count / total


def _is_not_half_precision(**arguments: Any) -> None:
    for name, value in arguments.items():
        if np.asarray(value).dtype == np.float16:  # it ends at 65504
            refuse(name, "dtype float16", "float32 or float64")


@checked(also=_is_not_half_precision)
def accuracy_to_associations(accuracy, vocab: AtLeast2, total: int):
    """Number of associations that an accuracy, a number or an array, amounts to.

    The inverse of :func:`associations_to_accuracy`. It is negative below the accuracy of guessing.

    Source: Dana et al. 2025, Corollary 2.
    """
    return (accuracy - 1 / vocab) / (1 - 1 / vocab) * total


def _is_a_share(accuracy: Any) -> None:
    _is_not_half_precision(accuracy=accuracy)
    share = np.asarray(accuracy)
    if not ((share >= 0) & (share <= 1)).all():
        refuse("accuracy", accuracy, "shares from 0 to 1")


@checked(also=_is_a_share)
def accuracy_to_bits(accuracy, vocab: AtLeast2, total: int):
    r"""Bits that a share of right answers, a number or an array, saves in a code for ``T`` labels.

    The formula is :math:`T (\log_2 N - h(p) - (1 - p) \log_2 (N - 1))` for a share ``p`` of right
    answers, with :math:`h(p) = -p \log_2 p - (1 - p) \log_2 (1 - p)`. The code says which answers
    are wrong, and the right label for each of these. The number of wrong answers, at most
    :math:`\log_2 (T + 1)` bits, is not charged. Fano's inequality says that no better can be had of
    the accuracy alone. The bits are :math:`T \log_2 N` if every answer is right, and zero if no
    more are right than by guessing.

    Source: Cover and Thomas, Elements of Information Theory, chapter 2.
    """
    p = np.maximum(accuracy, 1 / vocab)
    entr = scipy.special.entr
    nats = math.log(vocab) - entr(p) - entr(1 - p) - (1 - p) * math.log(vocab - 1)
    return total * np.maximum(nats, 0) / math.log(2)


@checked
def different_draws(total: int, draws: int) -> float:
    r"""Expected number of different pairs among ``T`` uniform draws from ``T_0``.

    The formula is :math:`T_0 (1 - (1 - 1/T_0)^{T})`.
    """
    return -total * math.expm1(draws * math.log1p(-1 / total)) if total > 1 else 1.0


def _is_a_mean_square(error: Any) -> None:
    _is_not_half_precision(error=error)
    if not (np.asarray(error) >= 0).all():
        refuse("error", error, "mean squares, at least 0")


@checked(also=_is_a_mean_square)
def error_to_bits(error, total: int):
    r"""Lower bound of the bits that a model knows of ``T`` labels uniform on :math:`[0, 1]`.

    The formula is :math:`T \max(0, -\tfrac12 \log_2 (2 \pi e D))` for mean square errors ``D``. It
    is what a code saves for labels that are normal around the outputs (Shannon's lower bound of the
    rate). It is zero from ``D = 0.0585`` on, and infinite at ``D = 0``. A model that always answers
    1/2 has ``D = 1/12``.

    Source: Cover and Thomas, Elements of Information Theory, chapter 10.
    """
    with np.errstate(divide="ignore"):
        rate = -np.log2(2 * math.pi * math.e * np.asarray(error)) / 2
    return total * np.maximum(rate, 0)


@checked(also=_is_not_half_precision)
def loss_to_bits(loss, vocab: AtLeast2, total: int):
    r"""Bits that a model knows of ``T`` labels: :math:`T (\ln N - \ell) / \ln 2`.

    The loss :math:`\ell` is the mean cross-entropy on the labels in nats, a number or an array.
    Labels uniform over ``N`` classes take :math:`T \log_2 N` bits. This is how many of them the
    model's predictions save: none for uniform guesses, and fewer for worse ones. On average over
    the labels it is at most the mutual information between labels and weights (Gibbs' inequality).

    Example:
        >>> round(loss_to_bits(0.0, vocab=100, total=10_000))
        66439
    """
    return total * (math.log(vocab) - loss) / math.log(2)
