"""How much the layers can memorize: what the papers promise, ceilings and floors.

What the layers can fit is a matter of counting: how many numbers do their outputs show of the
weights? A *capacity* is what a theorem of the papers says. Beyond a *ceiling* almost all labels are
out of reach; up to a *floor* all are met, for almost all data. For example, 32 heads of width 32
memorize 993 examples on a shared context of 32 tokens in 64 dimensions by Theorem 1, which allows
all data that satisfy its assumptions. For almost all data they meet any real labels of 50,301
examples, and of more than 64,481 almost none (:func:`shared_context_floor`). The theorem fixes the
attention before it sees the labels; the floor moves it to fit them.

The letters are those of the notation page: ``heads`` is ``H``, ``context`` the tokens ``n``,
``dim`` the embedding dimension ``d``, ``head_dim`` ``d_h``, ``value_dim`` ``d_v``, ``outputs``
``d_out``, ``width`` the hidden units ``m``, ``vocab`` the size ``N`` of the vocabulary, ``length``
the tokens ``S`` of a sequence. Sizes are integers of at least 1, or of the range that is said
there; others raise ``ValueError``. Formulas without a source are this book's.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Annotated

from ..checks import Range, checked, refuse

UpToDim = Annotated[int, Range(1, "dim")]
AtLeast2 = Annotated[int, Range(2)]
Heads = Sequence[int]  # the heads of each layer, from the first to the last


# Most formulas are made of this number. A head shows two things of its weights: its logits, which
# are a matrix W_K W_Q^T of rank at most d_h, and its values: one output sees W_V W_O W_D alone, a
# vector of d numbers, whatever d_v is.
def low_rank_dim(rank: int, a: int, b: int) -> int:
    """Dimension of the set of matrices of shape ``(a, b)`` and of at most this rank."""
    r = min(rank, a, b)
    return r * (a + b - r)


# --- what a layer memorizes -----------------------------------------------------------------------


@checked
def mha_capacity(heads: int, context: int, head_dim: int, query_rank: int | None = None) -> int:
    """Examples that one layer memorizes: :math:`H (r - 1) + 1` with ``r = min(n, d_h, Q)``.

    ``Q``, the Kruskal rank of the queries, is at least ``n`` in Theorem 1.

    Example:
        >>> mha_capacity(heads=32, context=32, head_dim=32)
        993

    Source: Mahdavi et al. 2024, Theorem 1 and Remark 1.
    """
    if query_rank is None:
        query_rank = context
    return heads * (min(context, head_dim, query_rank) - 1) + 1


@checked
def relu_capacity(width: int, dim: int, outputs: int = 1) -> int:
    """Examples beyond which a two-layer ReLU network fails on some set as in Theorem 1.

    The whole part of :math:`(m (d + d_{out} + 1) + d_{out}) / d_{out}`: the weights per output that
    matter when all contexts are one constant. Source: Mahdavi et al. 2024, Proposition 3.
    """
    return (width * (dim + outputs + 1) + outputs) // outputs


@checked
def aot_capacity(heads: int, head_dim: UpToDim, dim: int) -> int:
    """Associations that an attention-only transformer memorizes: :math:`H d_h + d`, ``d_h <= d``.

    An association is a sequence of tokens and the one that follows; an output reads ``d_h`` numbers
    of each head and ``d`` of the last token. It holds for sets that attention can tell apart, such
    as random ones, and not for every set (``thm-parity``, ``thm-subsets``, ``thm-random-bigrams``).
    Source: Dana et al. 2025, Theorem 1 and Corollary 1.
    """
    return heads * head_dim + dim


@checked
def scalar_capacity(
    heads: int,
    context: Annotated[int, Range(3, "dim")],
    head_dim: AtLeast2,
    dim: Annotated[int, Range(3)],
) -> int:
    """Scalar labels that attention fitted to them memorizes: :math:`H (d - 1)`.

    On a shared context of ``3 <= n <= d`` independent tokens, with heads of width ``d_h >= 2`` and
    queries in general position (:func:`attnmem.theory.scalars.memorize_scalars`).
    """
    return heads * (dim - 1)


# --- the largest rank that features can have ------------------------------------------------------


@checked
def shared_context_rank(heads: int, context: int) -> int:
    """Largest rank of the features ``Z`` on one context that all share: :math:`H (n - 1) + 1`.

    Attention that is chosen without regard to the labels serves no more examples. Source: Mahdavi
    et al. 2024, Proposition 2.
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

    ``span`` is its dimension ``a``. Almost all weights reach it with enough examples of at least
    two tokens. It contains Propositions 2 (``a = n - 1``) and 5 (``a = d - 1``) of Mahdavi et al.
    """
    if through_origin:
        return heads * span
    return heads * span + 1


@checked
def own_context_rank(heads: int, context: AtLeast2, dim: int) -> int:
    """Largest rank of ``Z`` when every example has a context of ``n >= 2`` tokens: :math:`H d`.

    Almost all weights and data reach it, with heads of any width.
    """
    return heads * dim


@checked
def sign_vectors(total: int, rank: int) -> int:
    r"""Sign vectors of ``T`` examples that a read-out gives: :math:`2 \sum_{k<R} \binom{T-1}{k}`.

    It holds for features of rank ``R`` of which any ``min(T, R)`` are independent, as those of
    random attention are. With trained attention it is a lower bound, where ``R`` is the floor of
    real labels. For other features see :func:`attnmem.theory.independence.regions`.

    Example:
        >>> sign_vectors(total=3, rank=2)
        6

    Source: Cover 1965, Theorem 1.
    """
    count = term = 2
    for k in range(1, min(rank, total)):
        term = term * (total - k) // k
        count += term
    return count


# --- real labels: ceilings and floors -------------------------------------------------------------

# A ceiling counts the parameters that one output shows: beyond so many examples almost all real
# labels are out of reach (Sard's theorem). A floor rests on weights where the output is zero:
# 1. The heads of a group attend alike and their values sum to zero, so they cancel for all data.
# 2. When such heads move apart, the output moves. If the derivative in the weights has rank T,
#    small steps store all small labels of T examples; its rank is the same for almost all data.
# 3. The read-out W_D scales small labels to any size. Near weights with another output it would
#    scale that output, too, which is why the heads have to cancel.
# Two heads with values w and -w count as one free head does. Contexts have at least two tokens.


def context_ceiling(heads: int, head_dim: int, tokens: int, queries: int, common: int) -> int:
    """Numbers that one output shows: logits and values of each head, and what all have in common.

    ``tokens`` and ``queries`` are the dimensions that the data span. ``common`` is what all heads
    share: nothing on own contexts, one constant on a shared one.
    """
    return heads * (low_rank_dim(head_dim, tokens, queries) + tokens) + common


@checked
def own_context_ceiling(heads: int, head_dim: int, dim: int) -> int:
    """Parameters that determine one output on own contexts: :math:`P(H) = H (r (2 d - r) + d)`.

    Here ``r = min(d_h, d)``. Beyond so many examples almost all real labels are out of reach. The
    count also holds for a shared context of more than ``d`` tokens.
    """
    return context_ceiling(heads, head_dim, dim, dim, 0)


@checked
def shared_context_ceiling(
    heads: int, context: UpToDim, head_dim: int, dim: int, embedded: bool = False
) -> int:
    r"""The same on a shared context: :math:`H (r (n - 1 + d - r) + n - 1) + 1`.

    Here ``r = min(d_h, n - 1)``. Logits and values count less those of the last token, a constant
    adds one. The model that Mahdavi et al. train (``embedded``) has a bias of queries, which shows
    in ``r`` numbers of each head and adds :math:`\min(d, H r)`.
    """
    # A softmax sees differences of logits only; of the values one constant is left, for all heads.
    ceiling = context_ceiling(heads, head_dim, context - 1, dim, 1)
    if embedded:
        ceiling += min(dim, heads * min(head_dim, context - 1))
    return ceiling


@checked
def group_rank(size: int, keys: UpToDim, dim: int, rank: Annotated[int, Range(1, "keys")]) -> int:
    r"""Rank of the derivative in the weights of one group, whose values sum to zero.

    The heads share one logit matrix, of shape ``(m, d)`` and rank ``r``; ``keys`` are the ``m``
    dimensions that tell tokens apart, ``d``, or ``n - 1`` on a shared context. Values span
    ``p = size - 1`` dimensions, or all ``m``. The formula is :math:`p r (m + d - r) - \binom p2 r
    - \binom{p - m + r}2 (d - r) + m`, whose last binomial is zero if ``p <= m - r``.

    Example:
        >>> group_rank(size=2, keys=8, dim=8, rank=8) == own_context_ceiling(1, 8, 8)
        True
    """
    return _group_rank(size, keys, dim, rank)


def _group_rank(size: int, keys: int, dim: int, rank: int) -> int:
    """As :func:`group_rank`, of sizes that are checked."""
    p = min(size - 1, keys)  # dimensions that the values w_h of the heads span, as they sum to zero
    # For each of these the logits may move along the matrices of rank r. A move D_h of the logit
    # matrix changes the output by w_h^T C D_h e, where C is the covariance of the tokens under
    # their attention. It is symmetric, so D_i = w_j g^T and D_j = -w_i g^T cancel, for any vector
    # g. In the r coordinates of queries that the logits see, any two of the p values cancel so. In
    # the d - r others the columns of D_h lie among those of the logits, r of m dimensions, which
    # meet the span of the values in p - m + r. The values themselves add m.
    missed = math.comb(p, 2) * rank + math.comb(max(p - keys + rank, 0), 2) * (dim - rank)
    return p * low_rank_dim(rank, keys, dim) - missed + keys


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
    return group_sizes(heads, most_ranks(heads, keys, dim, rank)[1])


def group_sizes(heads: int, groups: int) -> list[int]:
    """The sizes of so many groups that differ by one head at most, large ones first."""
    small, larger = divmod(heads, groups)
    return [small + 1] * larger + [small] * (groups - larger)


def sum_of_ranks(heads: int, groups: int, *shape: int) -> int:
    """The ranks of so many groups whose sizes differ by one head at most.

    ``shape`` is ``keys, dim, rank`` of :func:`group_rank`.
    """
    small, larger = divmod(heads, groups)
    of_large, of_small = (_group_rank(size, *shape) for size in (small + 1, small))
    return larger * of_large + (groups - larger) * of_small


def most_ranks(heads: int, *shape: int, fewest: int = 1) -> tuple[int, int]:
    """The largest sum of the ranks of groups, of at least so many, and the number of these groups.

    For ``G`` groups of nearly equal size the sum is ``G f(H / G)``, where ``f`` is the rank of one
    as a function of its size, with lines between whole numbers. It is concave, and so is the sum as
    a function of ``G``. So this rises up to the best ``G``.
    """

    def ranks(groups: int) -> int:
        return sum_of_ranks(heads, groups, *shape)

    falls = bisect.bisect_left(range(fewest, heads), True, key=lambda G: ranks(G + 1) <= ranks(G))
    return ranks(fewest + falls), fewest + falls


@checked
def own_context_floor(heads: int, head_dim: int, dim: int) -> int:
    """Examples with own contexts whose real labels are all met, for almost all data.

    The sum of :func:`group_rank` over the best groups: at least ``P(floor(H/2))``, at most
    ``P(H)``, the :func:`own_context_ceiling`.
    """
    return most_ranks(heads, dim, dim, min(head_dim, dim))[0]


@checked
def shared_context_floor(heads: int, context: AtLeast2, head_dim: int, dim: int) -> int:
    """Examples on one shared context whose real labels are all met, for almost all data.

    The count is the sum of :func:`group_rank` over the best groups, and one for a constant if the
    context has at most ``d`` tokens, of at least two. On longer contexts it is
    :func:`own_context_floor`.

    Example:
        >>> sizes = {"heads": 32, "context": 32, "head_dim": 32}
        >>> mha_capacity(**sizes), shared_context_floor(**sizes, dim=64)
        (993, 50301)
        >>> shared_context_ceiling(**sizes, dim=64)
        64481
    """
    if context > dim:
        return own_context_floor(heads, head_dim, dim)
    return most_ranks(heads, context - 1, dim, min(head_dim, context - 1))[0] + 1


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
    """Parameters of one output for each of some token sequences: ``b + H (a + r (a + b - r))``.

    ``b = min(d, L)`` for ``L`` last tokens (by default ``N``), ``r = min(d_h, a, b)``, and ``a =
    min(d, N + S - 2)``, which differences of embeddings and of positions span. If these are
    ``trained``, it is the count with ``a = N + S - 2`` and ``b = L`` for every ``d``, or ``d (N + S
    - d) + H (d_h (2 d - d_h) + d)`` where that is less.
    """
    a, b = vocab + length - 2, last_tokens or vocab
    if not trained:
        a, b = min(dim, a), min(dim, b)
    free = context_ceiling(heads, head_dim, a, b, b)
    if not trained or dim > a + 1:
        return free
    return min(free, context_ceiling(heads, head_dim, dim, dim, dim * (vocab + length - dim)))


def _group_is_no_larger_than_its_values_span(size: int, dim: int) -> None:
    if size > dim + 1:
        refuse("size", size, f"an integer of at least 1 and at most {dim + 1}")


@checked(also=_group_is_no_larger_than_its_values_span)
def sequences_floor(groups: int, size: int, head_dim: UpToDim, dim: int) -> int:
    """Real labels of sequences that groups meet: ``d`` and a :func:`group_rank` for each group.

    It holds for almost all fixed embeddings if the last token of each sequence, and one token
    before it, are in no other sequence; ``size <= d + 1``.
    """
    return dim + groups * group_rank(size, dim, dim, head_dim)


# --- several layers -------------------------------------------------------------------------------


@checked
def deep_ceiling(
    heads: Heads, head_dim: int, value_dim: int, dim: int, *, outputs: int = 1, skip: bool = True
) -> int:
    r"""Largest rank of the derivative of layers of so many ``heads`` each, on own contexts.

    If there are more labels, counting each output's, almost no label vector is met. The outputs
    are read at the last token. Later layers read :math:`s_l` dimensions of what layer ``l`` writes.
    With :math:`s_L = \min(o, d)` and ``r = min(d_h, d)``, from the last layer to the first,

    .. math:: v_l = \min(d_v, d, s_l), \qquad s_{l-1} = \min(d, s_l + H_l (v_l + 2 r)).

    The rank is :math:`\sum_l H_l (r (2 d - r) + v_l (d + s_l - v_l)) + d o` for contexts of two
    tokens or more, with full or causal attention (theorem ``thm-depth-rank``). Without ``skip`` the
    count is the rank for three tokens or more (``thm-depth-bare``); for two the rank can be smaller
    if a layer before the last writes more dimensions than are written before it.

    Example:
        >>> deep_ceiling([4], 2, 1, 6) == own_context_ceiling(4, 2, 6) + 6
        True
    """
    if not skip:
        return _ceiling_without_skip(heads, head_dim, value_dim, dim, outputs)
    s, total = min(outputs, dim), dim * outputs  # s_L, and the entries of the read-out
    for H in reversed(heads):  # logits, and values as far as s_l dimensions show them
        total += H * (low_rank_dim(head_dim, dim, dim) + low_rank_dim(value_dim, dim, s))
        s = min(dim, s + H * (min(value_dim, s) + 2 * min(head_dim, dim)))
    return total


def _ceiling_without_skip(
    heads: Heads, head_dim: int, value_dim: int, dim: int, outputs: int
) -> int:
    """The same without skip connections, by what one layer writes and the next one reads."""
    # e[l] dimensions are both written by layer l and read by layer l + 1: the largest solution.
    L, o = len(heads), min(outputs, dim)
    e, before = [dim] * L + [o], None
    while e != before:
        before = e.copy()
        for layer in range(1, L + 1):
            written = heads[layer - 1] * min(value_dim, e[layer - 1])
            read = o
            if layer < L:  # by the logits of the next layer, and by its values
                values = min(value_dim, e[layer], e[layer + 1])
                read = heads[layer] * (2 * min(head_dim, e[layer]) + values)
            e[layer] = min(e[layer], written, read)
    # An invertible map of these dimensions changes both layers and no output: e^2 directions.
    total = e[L] * outputs - sum(x * x for x in e[1:])
    for H, a, b in zip(heads, e, e[1:], strict=False):
        total += H * (low_rank_dim(head_dim, a, a) + low_rank_dim(value_dim, a, b))
    return total
