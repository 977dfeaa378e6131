"""The largest rank that the features of attention can have."""

from __future__ import annotations

from ..checks import check_integer, check_integers, checked_by


@checked_by(check_integers)
def shared_context_rank(heads: int, context: int) -> int:
    """Largest rank of the features ``Z`` on one context that all share: :math:`H (n - 1) + 1`.

    No weights exceed it, and with more than ``d`` tokens none reach it, since ``Z`` has ``H d``
    columns. So attention that is chosen without regard to the labels can serve no more examples.
    Attention that depends on the labels can (:func:`attnmem.constructions.memorize_scalars`).

    Args:
        heads: Number of heads ``H``.
        context: Tokens in the context, ``n``.

    Returns:
        The rank.

    Raises:
        ValueError: If an argument is not an integer of at least 1.

    Example:
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
    """Number of parameters that determine the one output of a layer on a shared context.

    The formula is :math:`H (r (n - 1 + d - r) + n - 1) + 1` with ``r = min(d_h, n - 1)``. Each head
    contributes its logits and its values, each less those of the last token. The logits form a
    matrix of shape ``(n - 1, d)`` and rank at most ``d_h``. A constant adds one. Weights that meet
    more real labels than that exist only for a set of labels of measure zero (Sard's theorem).

    Args:
        heads: Number of heads ``H``.
        context: Tokens in the context, ``n <= d``.
        head_dim: Head dimension ``d_h``.
        dim: Embedding dimension ``d``.
        embedded: Count for the model that Mahdavi et al. train, whose query embedding has a bias.
            It adds up to ``d``, for the point where all logits vanish.

    Returns:
        The number of examples beyond which almost all real labels are out of reach.

    Raises:
        ValueError: If a size is not an integer of at least 1, or ``context > dim``.

    Example:
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
    """Largest rank of ``Z`` if the coordinates of each token have one sum: :math:`H (d - 1) + 1`.

    Args:
        heads: Number of heads ``H``.
        dim: Embedding dimension ``d``.

    Returns:
        The rank.

    Raises:
        ValueError: If an argument is not an integer of at least 1.

    Example:
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

    No weights exceed it, and almost all weights reach it if there are enough examples, of at least
    two tokens each. It covers two cases. A shared context of ``n`` independent tokens spans
    ``a = n - 1`` (Proposition 2). Tokens with a constant coordinate sum lie in ``a = d - 1``,
    through the origin if that sum is zero (Proposition 5).

    Args:
        heads: Number of heads ``H``.
        span: Dimension ``a`` of the subspace ``A``, at least 0.
        through_origin: Whether ``A`` contains the zero vector.

    Returns:
        The rank.

    Raises:
        ValueError: If ``heads`` is not an integer of at least 1, or ``span`` not one of at least 0.

    Example:
        >>> affine_span_rank(heads=32, span=31) == shared_context_rank(heads=32, context=32)
        True

    Source: this book; it contains Mahdavi et al. 2024, Propositions 2 and 5.
    """
    return heads * span + (not through_origin)


def _check_own_contexts(heads, context, dim) -> None:
    check_integers(heads=heads, dim=dim)
    check_integer("context", context, least=2)


@checked_by(_check_own_contexts)
def own_context_rank(heads: int, context: int, dim: int) -> int:
    """Largest rank of ``Z`` when every example has a context of its own: :math:`H d`.

    Almost all weights and data reach it if a context has at least two tokens, with heads of any
    width. A read-out then meets any real labels of as many examples.

    Args:
        heads: Number of heads ``H``.
        context: Tokens in a context, ``n >= 2``. The rank does not depend on it.
        dim: Embedding dimension ``d``.

    Returns:
        The rank.

    Raises:
        ValueError: If ``heads`` or ``dim`` is not an integer of at least 1, or ``context`` not one
            of at least 2.

    Example:
        >>> own_context_rank(heads=32, context=32, dim=64)
        2048

    Source: this book, the chapter on generic layers; :func:`attnmem.constructions.random_mha`.
    """
    return heads * dim
