"""How many real labels attention can meet on sequences of tokens: counts of parameters."""

from __future__ import annotations

from ..checks import check_integer, check_integers, checked_by
from .dimensions import group_rank


def _check_ceiling(heads, head_dim, dim, vocab, length, last_tokens, trained) -> None:
    check_integers(heads=heads, dim=dim, vocab=vocab)
    check_integer("length", length, least=2)
    check_integer("head_dim", head_dim, most=dim)
    if last_tokens is not None:
        check_integer("last_tokens", last_tokens, most=vocab)


@checked_by(_check_ceiling)
def sequences_ceiling(
    heads: int,
    head_dim: int,
    dim: int,
    vocab: int,
    length: int,
    last_tokens: int | None = None,
    trained: bool = False,
) -> int:
    """Number of parameters that determine one output for each of some token sequences.

    The formula is ``b + H (a + r (a + b - r))``: the skip connection contributes ``b = min(d, L)``
    for ``L`` last tokens. Each head contributes ``a = min(d, N + S - 2)`` values, and logits of
    rank ``r = min(d_h, a, b)``. Weights that meet more real labels than that exist only for a set
    of labels of measure zero (Sard's theorem). With trained embeddings and positions the count is
    that of unlimited ``d``, or ``d (N + S - d) + H (d_h (2 d - d_h) + d)`` where that is less.

    Args:
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``, at most ``d``.
        dim: Embedding dimension ``d``.
        vocab: Number of tokens ``N`` that the sequences use.
        length: Sequence length ``S``, at least 2.
        last_tokens: Number of last tokens ``L`` that the sequences use; by default ``N``.
        trained: Whether embeddings and positions are trained, not fixed.

    Returns:
        The number of sequences beyond which almost all real labels are out of reach.

    Raises:
        ValueError: If a size is not an integer or out of range.

    Example:
        >>> sizes = {"heads": 4, "head_dim": 10, "dim": 10, "vocab": 50, "length": 2}
        >>> sequences_ceiling(**sizes), sequences_ceiling(**sizes, trained=True)
        (450, 860)

    Source: this book, the chapter on token sequences.
    """
    asked = vocab if last_tokens is None else last_tokens
    differences = vocab + length - 2
    if not trained:
        return _count(heads, head_dim, min(dim, differences), min(dim, asked))
    unlimited = _count(heads, head_dim, differences, asked)
    if dim > differences + 1:
        return unlimited
    embedded = dim * (vocab + length - dim)
    return min(unlimited, embedded + heads * (head_dim * (2 * dim - head_dim) + dim))


def _count(heads: int, head_dim: int, values: int, asked: int) -> int:
    rank = min(head_dim, values, asked)
    return asked + heads * (values + rank * (values + asked - rank))


def _check_floor(groups, size, head_dim, dim) -> None:
    check_integers(groups=groups, dim=dim)
    check_integer("size", size, most=dim + 1)
    check_integer("head_dim", head_dim, most=dim)


@checked_by(_check_floor)
def sequences_floor(groups: int, size: int, head_dim: int, dim: int) -> int:
    r"""Number of real labels that groups of cancelling heads meet, whatever the labels are.

    The formula is ``d`` plus :func:`attnmem.bounds.group_rank` for each group of ``k`` heads. It
    holds for almost all fixed embeddings if the last token of each sequence, and one token before
    it, are in no other sequence. A pair adds what one head adds to :func:`sequences_ceiling`.

    Args:
        groups: Number of groups.
        size: Heads of each group ``k``, at most ``d + 1``.
        head_dim: Head dimension ``d_h``, at most ``d``.
        dim: Embedding dimension ``d``.

    Returns:
        The number of sequences.

    Raises:
        ValueError: If a size is not an integer or out of range.

    Example:
        >>> sequences_floor(2, 2, head_dim=10, dim=10), sequences_floor(1, 4, 10, 10)
        (230, 290)

    Source: this book, the chapter on token sequences.
    """
    return dim + groups * group_rank(size, dim, dim, head_dim)
