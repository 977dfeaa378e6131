"""Every capacity formula of the two papers and of this book, one function each; and its price.

Prose, figures and tests call these functions; nobody retypes a formula. Letters as on the notation
page: ``H`` heads, ``n`` context length, ``d`` embedding dimension, ``d_h`` head dimension, ``T``
examples, ``N`` vocabulary, ``T_0`` sequences.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import hypergeom

from .checks import check_integer, check_number, checked_by, refuse


def _check_integers(**arguments) -> None:
    for name, value in arguments.items():
        if value is not None:
            check_integer(name, value)


def _check_aot(heads, head_dim, dim) -> None:
    _check_integers(heads=heads, dim=dim)
    check_integer("head_dim", head_dim, most=dim)


def _check_aot_parameters(heads, head_dim, dim, vocab, length, rank_one) -> None:
    _check_aot(heads, head_dim, dim)
    _check_integers(vocab=vocab, length=length)


def _check_accuracy(count, vocab, total) -> None:
    _check_integers(vocab=vocab, total=total)
    check_number("count", count, least=0, most=total)


@checked_by(_check_integers)
def mha_capacity(heads: int, context: int, head_dim: int, query_rank: int | None = None) -> int:
    r"""Examples that one multi-head attention layer memorizes: :math:`H (r - 1) + 1`.

    Here ``r = min(n, d_h)``, and ``r = min(n, d_h, Q)`` if the queries' Kruskal rank ``Q`` is given
    (``query_rank``; the assumption of the theorem is ``Q >= n``, under which it changes nothing).

    >>> mha_capacity(heads=32, context=32, head_dim=32)
    993

    Source: Mahdavi et al. 2024, Theorem 1 and Remark 1.
    """
    return heads * (min(context, head_dim, query_rank or context) - 1) + 1


@checked_by(_check_integers)
def shared_context_rank(heads: int, context: int) -> int:
    r"""Largest rank of the features ``Z`` when all examples share one context: :math:`H(n-1)+1`.

    No weights exceed it. So attention chosen without regard to the labels can serve no more
    examples; attention that depends on them can (:func:`attnmem.constructions.memorize_scalars`).

    >>> shared_context_rank(heads=32, context=32)
    993

    Source: Mahdavi et al. 2024, Proposition 2.
    """
    return heads * (context - 1) + 1


def _check_ceiling(heads, context, head_dim, dim, embedded) -> None:
    _check_integers(heads=heads, dim=dim, head_dim=head_dim)
    check_integer("context", context, most=dim)


@checked_by(_check_ceiling)
def shared_context_ceiling(
    heads: int, context: int, head_dim: int, dim: int, embedded: bool = False
) -> int:
    r"""Numbers that decide the one output of a layer on a context that all examples share.

    :math:`H (r (n - 1 + d - r) + n - 1) + 1` with ``r = min(d_h, n - 1)``: of every head the
    logits, a matrix of shape ``(n - 1, d)`` and rank at most ``d_h`` once the last token's are
    subtracted, and the values, less the last token's; and a constant. More real labels than that
    are met by no weights, but for a set of labels of measure zero (Sard's theorem). With
    ``embedded``, of the model that Mahdavi et al. train, whose query embedding has a bias: up to
    ``d`` more, for the point where all logits vanish. ``context <= dim``.

    >>> shared_context_ceiling(heads=4, context=32, head_dim=32, dim=64)
    8061

    Source: this book.
    """
    differences = context - 1
    r = min(head_dim, differences)
    logits = r * (differences + dim - r)
    origin = min(dim, heads * r) if embedded else 0
    return heads * (logits + differences) + 1 + origin


@checked_by(_check_integers)
def affine_rank(heads: int, dim: int) -> int:
    r"""Largest rank of ``Z`` when every token's coordinates have the same sum: :math:`H(d-1)+1`.

    >>> affine_rank(heads=5, dim=13)
    61

    Source: Mahdavi et al. 2024, Proposition 5.
    """
    return heads * (dim - 1) + 1


def _check_span(heads, span, through_origin) -> None:
    check_integer("heads", heads)
    check_integer("span", span, least=0)


@checked_by(_check_span)
def affine_span_rank(heads: int, span: int, through_origin: bool = False) -> int:
    r"""Largest rank of ``Z`` if all tokens lie in an affine subspace: :math:`H a + [0 \notin A]`.

    ``span`` is the dimension ``a`` of the subspace ``A``; ``through_origin`` says whether it
    contains the zero vector. ``n`` shared independent tokens span ``a = n - 1`` (Proposition 2);
    tokens with a constant coordinate sum lie in ``a = d - 1``, through the origin if the sum is 0
    (Proposition 5). No weights exceed it, and almost all reach it if there are examples enough.

    >>> affine_span_rank(heads=32, span=31) == shared_context_rank(heads=32, context=32)
    True

    Source: the common form of Mahdavi et al. 2024, Propositions 2 and 5.
    """
    return heads * span + (not through_origin)


@checked_by(_check_integers)
def relu_capacity(width: int, dim: int, outputs: int = 1) -> int:
    r"""Examples beyond which a two-layer ReLU network fails on some admissible data set.

    The whole part of :math:`(m (d + d_{out} + 1) + d_{out}) / d_{out}` for width ``m``: the number
    of its weights that matter when all contexts are one constant, per output. Some set with more
    examples that satisfies the assumptions of Theorem 1 cannot be memorized.

    >>> relu_capacity(width=10, dim=64)
    661

    Source: Mahdavi et al. 2024, Proposition 3.
    """
    return (width * (dim + outputs + 1) + outputs) // outputs


@checked_by(_check_aot)
def aot_capacity(heads: int, head_dim: int, dim: int) -> int:
    r"""Associations that an attention-only transformer memorizes: :math:`H d_h + d`.

    For sets of sequences that attention can tell apart, such as random ones; not for every set
    (theorems ``thm-parity``, ``thm-subsets`` and ``thm-random-bigrams`` of the book).

    Raises ``ValueError`` if ``head_dim > dim``, which the paper's layer excludes.

    >>> aot_capacity(heads=20, head_dim=10, dim=10)
    210

    Source: Dana et al. 2025, Theorem 1 and Corollary 1.
    """
    return heads * head_dim + dim


def _check_random_bigrams(heads, head_dim, dim, vocab) -> None:
    _check_aot(heads, head_dim, dim)
    check_integer("vocab", vocab)
    if (count := heads * head_dim + dim) > vocab**2:
        refuse(
            "vocab", vocab, f"at least {math.isqrt(count - 1) + 1}, so that {count} bigrams exist"
        )


@checked_by(_check_random_bigrams)
def random_bigrams_risk(heads: int, head_dim: int, dim: int, vocab: int) -> float:
    r"""With at most this probability attention cannot tell ``H d_h + d`` random bigrams apart.

    The bigrams are drawn without repetition, uniformly from all ``N^2``. With the opposite
    probability almost every transformer's ``F`` has full rank on them, so every choice of next
    tokens is memorized. A union bound over sets of tokens, of hypergeometric tails; at most one.

    >>> random_bigrams_risk(heads=20, head_dim=10, dim=10, vocab=50) < 1e-15
    True
    >>> random_bigrams_risk(heads=1, head_dim=10, dim=10, vocab=50)  # says nothing
    1.0

    Source: ours (theorem ``thm-random-bigrams`` of the book).
    """
    H, d_h, d, N = heads, head_dim, dim, vocab
    T = H * d_h + d

    def term(choices: int, marked: int, most: int) -> float:
        """So many choices of ``marked`` bigrams, more than ``most`` of them drawn; at most one."""
        log_tail = float(hypergeom.logsf(most, N * N, marked, T))
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


@checked_by(_check_integers)
def previous_aot_capacity(heads: int, head_dim: int) -> int:
    r"""The earlier bound that Dana et al. compare with: :math:`H (d_h - 1) + 1`.

    >>> previous_aot_capacity(heads=20, head_dim=10)
    181

    Source: Mahdavi et al. 2024, Theorem 1, as quoted in Dana et al. 2025, Table 1.
    """
    return heads * (head_dim - 1) + 1


def _check_own_contexts(heads, context, dim) -> None:
    _check_integers(heads=heads, dim=dim)
    check_integer("context", context, least=2)


@checked_by(_check_own_contexts)
def own_context_rank(heads: int, context: int, dim: int) -> int:
    r"""Largest rank of ``Z`` when every example has a context of its own: :math:`H d`.

    Almost all weights and data reach it, from two tokens a context and heads of width one on, so
    that any real labels of as many examples can be read off.

    >>> own_context_rank(heads=32, context=32, dim=64)
    2048

    Source: this book (the chapter on generic layers); :func:`attnmem.constructions.random_mha`.
    """
    return heads * dim


def _check_scalars(heads, context, head_dim, dim) -> None:
    _check_integers(heads=heads, dim=dim)
    check_integer("context", context, least=3)
    check_integer("head_dim", head_dim, least=2)


@checked_by(_check_scalars)
def scalar_capacity(heads: int, context: int, head_dim: int, dim: int) -> int:
    r"""Scalar labels that attention chosen with regard to them memorizes: :math:`H (d - 1)`.

    On one shared context of at least three tokens, with heads of width two or more and queries in
    general position.

    >>> scalar_capacity(heads=32, context=3, head_dim=2, dim=64)
    2016

    Source: this book, :func:`attnmem.constructions.memorize_scalars`.
    """
    return heads * (dim - 1)


# --- the price: how many numbers each model has ---------------------------------------------------


@checked_by(_check_integers)
def mha_parameters(
    heads: int, head_dim: int, dim: int, value_dim: int = 1, outputs: int = 1
) -> int:
    r"""Parameters of a multi-head layer and its read-out.

    :math:`H d (2 d_h + d_v) + d_{out} (H d_v + 1)`: the attention maps and values of each head, and
    one linear map with bias from the heads to the outputs.

    >>> mha_parameters(heads=20, head_dim=10, dim=10)
    4221
    """
    return heads * dim * (2 * head_dim + value_dim) + outputs * (heads * value_dim + 1)


@checked_by(_check_aot_parameters)
def aot_parameters(
    heads: int, head_dim: int, dim: int, vocab: int, length: int, rank_one: bool = False
) -> int:
    r"""Parameters of an attention-only transformer: :math:`d (S + 2 N + 4 d_h H)`.

    With queries and keys of width one (``rank_one``) :math:`d (S + 2 N + 2 (d_h + 1) H)`.

    >>> aot_parameters(heads=20, head_dim=10, dim=10, vocab=50, length=2)
    9020

    Source: Dana et al. 2025, Theorem 1 and Remark 2.
    """
    width = 1 if rank_one else head_dim
    return dim * (length + 2 * vocab + 2 * (head_dim + width) * heads)


@checked_by(_check_integers)
def relu_parameters(width: int, context: int, dim: int, outputs: int = 1) -> int:
    r"""Parameters of a two-layer ReLU network on ``n`` tokens and a query: it reads them all.

    :math:`m ((n + 1) d + 1 + d_{out}) + d_{out}` for width ``m``.

    >>> relu_parameters(width=10, context=32, dim=64)
    21141
    """
    return width * ((context + 1) * dim + 1 + outputs) + outputs


# --- associations, accuracy and bits --------------------------------------------------------------


@checked_by(_check_accuracy)
def associations_to_accuracy(count: int | float, vocab: int, total: int) -> float:
    r"""Accuracy of a model that knows ``count`` of ``total`` associations and guesses the others.

    :math:`\varphi(X) = 1/N + (1 - 1/N) X / T_0` for a uniform prior over ``total`` sequences and
    ``vocab`` equally likely next tokens; ``0 <= count <= total``.

    >>> associations_to_accuracy(count=210, vocab=50, total=2500)
    0.10232

    Source: Dana et al. 2025, Corollary 2.
    """
    return 1 / vocab + (1 - 1 / vocab) * count / total


def _check_error(error, total) -> None:
    check_integer("total", total)
    if not (np.asarray(error) >= 0).all():
        refuse("error", error, "mean squares, at least 0")


@checked_by(_check_error)
def error_to_bits(error, total: int):
    r"""Bits that a model knows at least of ``total`` labels uniform on :math:`[0, 1]`.

    :math:`T \max(0, -\tfrac12 \log_2 (2 \pi e D))` for a mean square error ``D``, a number or an
    array: what is saved by a code for labels that are normal around the outputs (Shannon's lower
    bound of the rate). Zero from ``D = 0.0585`` on; the constant 1/2 has 1/12. Infinite at 0.

    >>> round(error_to_bits(1e-4, total=10_000))
    45968

    Source: Cover and Thomas, Elements of Information Theory, chapter 10.
    """
    with np.errstate(divide="ignore"):
        rate = -np.log2(2 * math.pi * math.e * np.asarray(error)) / 2
    return total * np.maximum(rate, 0)


def _check_table(vocab, total, **measured) -> None:
    check_integer("vocab", vocab, least=2)
    check_integer("total", total)


@checked_by(_check_table)
def accuracy_to_associations(accuracy, vocab: int, total: int):
    r"""The inverse of :func:`associations_to_accuracy`, for a number or an array of them.

    Negative where ``accuracy`` is below that of guessing.

    >>> round(accuracy_to_associations(0.10232, vocab=50, total=2500))
    210
    """
    return (accuracy - 1 / vocab) / (1 - 1 / vocab) * total


@checked_by(_check_table)
def loss_to_bits(loss, vocab: int, total: int):
    r"""Bits that a model knows of ``total`` labels: :math:`T (\ln N - \ell) / \ln 2`.

    What its predictions save of the :math:`T \log_2 N` bits that labels uniform over ``vocab``
    classes take; ``loss`` is its mean cross-entropy on them in nats, a number or an array. On
    average over the labels at most the mutual information between them and the weights (Gibbs'
    inequality). Zero for uniform guesses, negative below them.

    >>> round(loss_to_bits(0.0, vocab=100, total=10_000))
    66439
    """
    return total * (math.log(vocab) - loss) / math.log(2)
