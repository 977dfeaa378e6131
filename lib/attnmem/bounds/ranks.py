"""The largest rank that the features of attention can have."""

from __future__ import annotations

from ..checks import check_integer, check_integers, checked_by


@checked_by(check_integers)
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
    check_integers(heads=heads, dim=dim, head_dim=head_dim)
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


@checked_by(check_integers)
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


def _check_own_contexts(heads, context, dim) -> None:
    check_integers(heads=heads, dim=dim)
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
