"""Counts of parameters, dimensions and bits: what a layer costs, and what it knows of labels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import scipy

from ..checks import Range, checked, refuse
from ..core.bounds import AtLeast2, UpToDim, low_rank_dim

_Classes = Annotated[int, Range(2, 10**12)]  # the quadrature fails from 10^15 on
_NODES = 400  # of the quadrature, in each of two dimensions: errors are as class_price says
_WIDEST = 8.5  # standard deviations: a normal number is beyond them with probability 1e-17
_FASTEST = 9.0  # frequency: the transform of the normal law is below 1e-17 beyond
_SURE = 9  # standard deviations of a sum by which it is never exceeded


def _so_many_bigrams_exist(heads: int, head_dim: int, dim: int, vocab: int) -> None:
    count = heads * head_dim + dim
    if count > vocab**2:
        least = math.isqrt(count - 1) + 1
        refuse("vocab", vocab, f"at least {least}, so that {count} bigrams exist")


@checked(also=_so_many_bigrams_exist)
def random_bigrams_risk(heads: int, head_dim: UpToDim, dim: int, vocab: int) -> float:
    """Bound of the probability that attention cannot tell ``H d_h + d`` random bigrams apart.

    A union bound over sets of tokens, a sum of hypergeometric tails (``thm-random-bigrams``).
    """
    H, d_h, d, N, T = heads, head_dim, dim, vocab, heads * head_dim + dim

    def risk(choices: int, marked: int, room: int) -> float:
        """At most ``choices`` times the chance to draw more than ``room`` of ``marked`` bigrams."""
        log_tail = float(scipy.stats.hypergeom.logsf(room, N * N, marked, T))
        return math.exp(min(0.0, math.log(choices) + log_tail))

    # L last tokens end more than H d_h + L of the bigrams.
    last_tokens = range(1, min(d - 1, N) + 1)
    few_last = sum(risk(math.comb(N, L), N * L, H * d_h + L) for L in last_tokens)
    # m tokens hold more than H ceil(m / 2) - spare of them, or more than d + spare are (a, a).
    tokens, crowded = range(2, min(2 * d_h - 2, N) + 1), []
    for spare in range(H + 1):
        held = sum(risk(math.comb(N, m), m * m, H * ((m + 1) // 2) - spare) for m in tokens)
        crowded.append(held + risk(1, N, d + spare))
    return min(1.0, few_last + min(crowded))


@checked
def mha_parameters(
    heads: int, head_dim: int, dim: int, value_dim: int = 1, outputs: int = 1
) -> int:
    """Parameters of a layer and its read-out: :math:`H d (2 d_h + d_v) + d_{out} (H d_v + 1)`."""
    return heads * dim * (2 * head_dim + value_dim) + outputs * (heads * value_dim + 1)


@checked
def aot_parameters(heads: int, head_dim: UpToDim, dim: int, vocab: int, length: int) -> int:
    """Parameters of an attention-only transformer: :math:`d (S + 2 N + 4 d_h H)`."""
    return dim * (length + 2 * vocab + 4 * head_dim * heads)


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
    r"""Dimension of the functions of one-layer transformers on pairs of tokens, ``N > d``.

    It is the rank of the Jacobian of all predictions at almost all weights. With ``r = min(d_h,
    d)`` and maps of its own for each head it is

    .. math:: (2 N - 1) d - d^2 + 2 H r (2 d - r) + \min(d, 2 H r) :

    the tables less a constant in all logits, less a change of basis of the residual stream; the
    matrices :math:`W_Q^\top W_K` and :math:`W_O W_V`; the difference of the positions. Positions
    that are not in the skip connection add :math:`\min(d, H r)`. Maps that all heads share (``d_h
    <= d``) count :math:`2 d_h d + 2 H d_h^2 - 2 d_h^2`, and one or two positions of width ``d_h``.
    A feed-forward layer of ``width`` ``m`` adds :math:`m (2 d + 1)`. With ``k`` directions of
    outputs (:math:`\min(d, H r)`; ``d`` with such a layer) it is at most :math:`N^2 k + N (d - k) +
    k (d - k) + (N - 1) d - d^2`.
    """
    d, r = dim, min(head_dim, dim)
    if shared_maps:  # at d_h = d both are equal
        attention = 2 * head_dim * (d - head_dim) + 2 * heads * head_dim**2
        positions = head_dim if position_in_skip else 2 * head_dim
    else:
        attention = 2 * heads * low_rank_dim(r, d, d)
        positions = min(d, 2 * heads * r)
        if not position_in_skip:
            positions += min(d, heads * r)
    tables = (2 * vocab - 1) * d - d**2
    k = d if width else min(d, heads * r)
    ceiling = vocab**2 * k + (vocab + k) * (d - k) + (vocab - 1) * d - d**2
    return min(ceiling, tables + attention + positions + width * (2 * d + 1))


@checked
def mha_dimension(
    heads: int, context: AtLeast2, head_dim: int, dim: int, outputs: int = 1, shared: bool = True
) -> int:
    r"""Dimension of the functions of one layer of ``d_o = d_v = d``: the numbers that matter.

    It is the rank of the Jacobian of all outputs at almost all weights,

    .. math:: H r (m + d - r) + s (H m + c + d_{out} - s) :

    the logits of each head, ``r = min(d_h, m)``, and the rows that a read-out of rank ``s = min(d,
    H m + c, d_out)`` reads. On a ``shared`` context of ``n <= d`` tokens ``m = n - 1`` and ``c =
    1``, a constant; otherwise ``m = d`` and ``c = 0``. For one output it is the ceiling of real
    labels, :func:`~attnmem.core.bounds.shared_context_ceiling` or ``own_context_ceiling``.

    Example:
        >>> mha_dimension(heads=20, context=32, head_dim=64, dim=64, outputs=100)
        81728
    """
    constant = int(shared and context <= dim)
    m = context - 1 if constant else dim
    logits = heads * low_rank_dim(head_dim, m, dim)
    return logits + low_rank_dim(dim, heads * m + constant, outputs)


def _is_not_half_precision(**arguments: Any) -> None:
    for name, value in arguments.items():
        if np.asarray(value).dtype == np.float16:  # it ends at 65504
            refuse(name, "dtype float16", "float32 or float64")


@checked(also=_is_not_half_precision)
def accuracy_to_associations(accuracy, vocab: AtLeast2, total: int):
    """Associations that an accuracy, a number or an array, amounts to; negative below guessing."""
    return (accuracy - 1 / vocab) / (1 - 1 / vocab) * total


@checked(also=_is_not_half_precision)
def loss_to_bits(loss, vocab: AtLeast2, total: int):
    r"""Bits that a model knows of ``T`` labels: :math:`T (\ln N - \ell) / \ln 2`.

    The loss :math:`\ell` is the mean cross-entropy in nats. On average over the labels the bits are
    at most the mutual information between labels and weights (Gibbs' inequality).
    """
    return total * (math.log(vocab) - loss) / math.log(2)


# --- class labels ---------------------------------------------------------------------------------


@checked
@functools.cache
def class_price(classes: _Classes) -> float:
    r"""The price :math:`\delta_N` of a label of ``N`` classes: the rivals that are in its way.

    Of ``N`` standard normal outputs the right one is raised, and those above it are lowered, to one
    level, by the least change. The price is the mean number of those lowered: 1/2, 5/6 for two and
    three classes, about :math:`2 \ln N` for very many. Errors are below 1e-8 of it up to 10^6, and
    below 1e-4 up to 10^12.

    Example:
        >>> round(class_price(classes=10), 6)
        1.992089
    """
    # A rival at b is lowered if a + S < b: the right output a and what exceeds b of the N - 2
    # others, S. The integral over b, by Gauss's quadrature as that over the frequency t.
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    b = _WIDEST * nodes[:, None]
    density = np.exp(-b * b / 2) / math.sqrt(2 * math.pi)
    lowered = _chance_to_be_lowered(classes - 2, b, nodes, weights)
    return (classes - 1) * _WIDEST * float(weights * density[:, 0] @ lowered)


def _chance_to_be_lowered(
    others: int, b: np.ndarray, nodes: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """The probability of a + S < b for each level b, a column."""
    t = _FASTEST / 2 * (nodes + 1)
    bell, above = np.exp(-b * b / 2), scipy.special.ndtr(-b)
    # By Gil-Pelaez it is 1/2 - 1/pi int_0 Im E exp(i t (a + S - b)) / t dt, with, for each other x,
    # E exp(i t (x - b)_+) = Phi(b) + int_0 exp(i t u) phi(b + u) du, a Faddeeva function.
    transform = scipy.special.ndtr(b) + bell / 2 * scipy.special.wofz((t + 1j * b) / math.sqrt(2))
    turns = np.exp(others * np.log(transform) - t * t / 2 - 1j * t * b).imag / t
    chance = 0.5 - turns @ weights * (_FASTEST / 2) / math.pi
    # Where S exceeds b for certain, the integrand turns too fast.
    density = bell / math.sqrt(2 * math.pi)
    mean = density - b * above  # of what exceeds b
    spread = np.sqrt(1 + others * ((1 + b * b) * above - b * density - mean**2))
    never = b < others * mean - _SURE * spread
    return np.where(never[:, 0], 0, chance)


@checked
def class_capacity(rank: int, classes: _Classes) -> float:
    r"""Examples of which half of all choices of ``N`` classes are met: :math:`(N-1) R / \delta_N`.

    One read-out for each class, of features of rank ``R``; the right output is the largest. Exact
    for two classes, beyond them a formula, measured within a tenth where classes are equal and
    ``R`` is at least four prices. Where ``R`` is one price, about 0.6 of it are met.
    """
    return (classes - 1) * rank / class_price(classes)


@checked
def unequal_class_capacity(rank: int, sizes: Sequence[int]) -> tuple[float, int]:
    """The same for classes of such ``sizes``, in proportion to their examples; and which ``k``.

    The ``k`` largest must be told apart, however few the others are. So it is the least, over
    ``k``, of :func:`class_capacity` of ``k`` over their share. For ``k = 2`` this is proved from
    above (Cover): of more examples of two classes fewer than half of all choices are met. Beyond it
    is a formula, measured within 0.86 and 1.03. It is too low by a factor of about two if one class
    has nine tenths and features a mean, along which a read-out can say that class of all.
    """
    if len(sizes) < 2:
        refuse("sizes", sizes, "those of two classes or more")
    largest, total = sorted(sizes, reverse=True), sum(sizes)
    # Among equal classes it rises, then falls, as class_capacity is concave: ends are enough.
    ends = {2, len(sizes)} | {k for k in range(3, len(sizes)) if largest[k] < largest[k - 1]}
    return min((class_capacity(rank, k) * total / sum(largest[:k]), k) for k in ends)
