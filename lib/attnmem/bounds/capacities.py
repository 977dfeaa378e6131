"""How many examples or associations a model memorizes."""

from __future__ import annotations

import math

import scipy

from ..checks import check_integer, check_integers, checked_by, refuse


@checked_by(check_integers)
def mha_capacity(heads: int, context: int, head_dim: int, query_rank: int | None = None) -> int:
    """Number of examples that one multi-head attention layer memorizes: :math:`H (r - 1) + 1`.

    Here ``r = min(n, d_h)``, or ``r = min(n, d_h, Q)`` if the Kruskal rank ``Q`` of the queries is
    given. Theorem 1 assumes ``Q >= n``, under which ``Q`` changes nothing.

    Args:
        heads: Number of heads ``H``.
        context: Tokens in a context, ``n``.
        head_dim: Head dimension ``d_h``.
        query_rank: Kruskal rank ``Q`` of the queries; None if it is at least ``n``.

    Returns:
        The number of examples.

    Raises:
        ValueError: If an argument is not an integer of at least 1.

    Example:
        >>> mha_capacity(heads=32, context=32, head_dim=32)
        993

    Source: Mahdavi et al. 2024, Theorem 1 and Remark 1.
    """
    return heads * (min(context, head_dim, query_rank or context) - 1) + 1


@checked_by(check_integers)
def relu_capacity(width: int, dim: int, outputs: int = 1) -> int:
    """Number of examples beyond which a two-layer ReLU network fails on some admissible data set.

    The formula is the whole part of :math:`(m (d + d_{out} + 1) + d_{out}) / d_{out}` for width
    ``m``: the number of weights per output that matter when all contexts are one constant. Some set
    with more examples satisfies the assumptions of Theorem 1 and cannot be memorized.

    Args:
        width: Number of hidden units ``m``.
        dim: Embedding dimension ``d``.
        outputs: Number of outputs ``d_out``.

    Returns:
        The number of examples.

    Raises:
        ValueError: If an argument is not an integer of at least 1.

    Example:
        >>> relu_capacity(width=10, dim=64)
        661

    Source: Mahdavi et al. 2024, Proposition 3.
    """
    return (width * (dim + outputs + 1) + outputs) // outputs


def _check_aot(heads, head_dim, dim) -> None:
    check_integers(heads=heads, dim=dim)
    check_integer("head_dim", head_dim, most=dim)


@checked_by(_check_aot)
def aot_capacity(heads: int, head_dim: int, dim: int) -> int:
    """Number of associations that an attention-only transformer memorizes: :math:`H d_h + d`.

    This holds for sets of sequences that attention can tell apart, such as random ones. It does not
    hold for every set (theorems ``thm-parity``, ``thm-subsets`` and ``thm-random-bigrams`` of the
    book).

    Args:
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``, at most ``d``.
        dim: Embedding dimension ``d``.

    Returns:
        The number of associations.

    Raises:
        ValueError: If a size is not an integer of at least 1, or ``head_dim > dim``, which the
            paper's layer excludes.

    Example:
        >>> aot_capacity(heads=20, head_dim=10, dim=10)
        210

    Source: Dana et al. 2025, Theorem 1 and Corollary 1.
    """
    return heads * head_dim + dim


@checked_by(check_integers)
def previous_aot_capacity(heads: int, head_dim: int) -> int:
    """The earlier bound that Dana et al. compare with: :math:`H (d_h - 1) + 1`.

    Args:
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``.

    Returns:
        The number of associations.

    Raises:
        ValueError: If an argument is not an integer of at least 1.

    Example:
        >>> previous_aot_capacity(heads=20, head_dim=10)
        181

    Source: Mahdavi et al. 2024, Theorem 1, as quoted in Dana et al. 2025, Table 1.
    """
    return heads * (head_dim - 1) + 1


def _check_random_bigrams(heads, head_dim, dim, vocab) -> None:
    _check_aot(heads, head_dim, dim)
    check_integer("vocab", vocab)
    if (count := heads * head_dim + dim) > vocab**2:
        refuse(
            "vocab", vocab, f"at least {math.isqrt(count - 1) + 1}, so that {count} bigrams exist"
        )


@checked_by(_check_random_bigrams)
def random_bigrams_risk(heads: int, head_dim: int, dim: int, vocab: int) -> float:
    """Upper bound of the probability that attention cannot tell ``H d_h + d`` random bigrams apart.

    The bigrams are drawn uniformly from all ``N^2`` without repetition. Unless the event of this
    probability occurs, the features ``F`` of almost every transformer have full rank on them, so
    that every choice of next tokens can be memorized. The bound is a union bound over sets of
    tokens, a sum of hypergeometric tails, cut off at one.

    Args:
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``, at most ``d``.
        dim: Embedding dimension ``d``.
        vocab: Vocabulary size ``N``, large enough that so many bigrams exist.

    Returns:
        A number from 0 to 1. At 1 the bound says nothing.

    Raises:
        ValueError: If a size is not an integer of at least 1, ``head_dim > dim``, or ``vocab^2 <
            heads head_dim + dim``.

    Example:
        >>> random_bigrams_risk(heads=20, head_dim=10, dim=10, vocab=50) < 1e-15
        True
        >>> random_bigrams_risk(heads=1, head_dim=10, dim=10, vocab=50)
        1.0

    Source: this book, theorem ``thm-random-bigrams``.
    """
    H, d_h, d, N = heads, head_dim, dim, vocab
    T = H * d_h + d

    def term(choices: int, marked: int, most: int) -> float:
        """At most ``choices`` times the chance to draw more than ``most`` of ``marked`` bigrams."""
        log_tail = float(scipy.stats.hypergeom.logsf(most, N * N, marked, T))
        return math.exp(min(0.0, math.log(choices) + log_tail))

    few_last = sum(term(math.comb(N, L), N * L, H * d_h + L) for L in range(1, min(d - 1, N) + 1))
    crowded = [
        sum(
            term(math.comb(N, m), m * m, H * ((m + 1) // 2) - spare)
            for m in range(2, min(2 * d_h - 2, N) + 1)
        )
        + term(1, N, d + spare)
        for spare in range(H + 1)
    ]
    return min(1.0, few_last + min(crowded))


def _check_scalars(heads, context, head_dim, dim) -> None:
    check_integers(heads=heads)
    check_integer("dim", dim, least=3)
    check_integer("context", context, least=3, most=dim)
    check_integer("head_dim", head_dim, least=2)


@checked_by(_check_scalars)
def scalar_capacity(heads: int, context: int, head_dim: int, dim: int) -> int:
    """Number of scalar labels that attention fitted to them memorizes: :math:`H (d - 1)`.

    The context is shared and has at least three independent tokens. The heads have width two or
    more, and the queries are in general position.

    Args:
        heads: Number of heads ``H``.
        context: Tokens in the context, ``3 <= n <= d``, to be independent. The capacity does not
            depend on it.
        head_dim: Head dimension ``d_h >= 2``. The capacity does not depend on it.
        dim: Embedding dimension ``d``, at least 3.

    Returns:
        The number of examples.

    Raises:
        ValueError: If a size is not an integer or out of its range.

    Example:
        >>> scalar_capacity(heads=32, context=3, head_dim=2, dim=64)
        2016

    Source: this book, :func:`attnmem.constructions.memorize_scalars`.
    """
    return heads * (dim - 1)
