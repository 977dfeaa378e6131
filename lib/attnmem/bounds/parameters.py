"""The price of each model: its number of parameters."""

from __future__ import annotations

from ..checks import check_integer, check_integers, checked_by


@checked_by(check_integers)
def mha_parameters(
    heads: int, head_dim: int, dim: int, value_dim: int = 1, outputs: int = 1
) -> int:
    """Number of parameters of a multi-head layer and its read-out.

    The formula is :math:`H d (2 d_h + d_v) + d_{out} (H d_v + 1)`: the attention maps and values of
    each head, and one linear map with bias from the heads to the outputs.

    Args:
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``.
        dim: Embedding dimension ``d``.
        value_dim: Width of the values, ``d_v``.
        outputs: Number of outputs ``d_out``.

    Returns:
        The number of parameters.

    Raises:
        ValueError: If an argument is not an integer of at least 1.

    Example:
        >>> mha_parameters(heads=20, head_dim=10, dim=10)
        4221
    """
    return heads * dim * (2 * head_dim + value_dim) + outputs * (heads * value_dim + 1)


def _check_aot_parameters(heads, head_dim, dim, vocab, length, rank_one) -> None:
    check_integers(heads=heads, dim=dim, vocab=vocab, length=length)
    check_integer("head_dim", head_dim, most=dim)


@checked_by(_check_aot_parameters)
def aot_parameters(
    heads: int, head_dim: int, dim: int, vocab: int, length: int, rank_one: bool = False
) -> int:
    """Number of parameters of an attention-only transformer: :math:`d (S + 2 N + 4 d_h H)`.

    With queries and keys of width one it is :math:`d (S + 2 N + 2 (d_h + 1) H)`.

    Args:
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``, at most ``d``.
        dim: Embedding dimension ``d``.
        vocab: Vocabulary size ``N``.
        length: Sequence length ``S``.
        rank_one: Whether queries and keys have width one.

    Returns:
        The number of parameters.

    Raises:
        ValueError: If a size is not an integer of at least 1, or ``head_dim > dim``.

    Example:
        >>> aot_parameters(heads=20, head_dim=10, dim=10, vocab=50, length=2)
        9020

    Source: Dana et al. 2025, Theorem 1 and Remark 2.
    """
    width = 1 if rank_one else head_dim
    return dim * (length + 2 * vocab + 2 * (head_dim + width) * heads)


@checked_by(check_integers)
def relu_parameters(width: int, context: int, dim: int, outputs: int = 1) -> int:
    """Number of parameters of a two-layer ReLU network that reads ``n`` tokens and a query.

    The formula is :math:`m ((n + 1) d + 1 + d_{out}) + d_{out}` for width ``m``.

    Args:
        width: Number of hidden units ``m``.
        context: Tokens in a context, ``n``.
        dim: Embedding dimension ``d``.
        outputs: Number of outputs ``d_out``.

    Returns:
        The number of parameters.

    Raises:
        ValueError: If an argument is not an integer of at least 1.

    Example:
        >>> relu_parameters(width=10, context=32, dim=64)
        21141
    """
    return width * ((context + 1) * dim + 1 + outputs) + outputs
