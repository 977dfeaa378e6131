"""The price of each model: its number of parameters."""

from __future__ import annotations

from ..checks import check_integer, check_integers, checked_by


@checked_by(check_integers)
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


def _check_aot_parameters(heads, head_dim, dim, vocab, length, rank_one) -> None:
    check_integers(heads=heads, dim=dim, vocab=vocab, length=length)
    check_integer("head_dim", head_dim, most=dim)


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


@checked_by(check_integers)
def relu_parameters(width: int, context: int, dim: int, outputs: int = 1) -> int:
    r"""Parameters of a two-layer ReLU network on ``n`` tokens and a query: it reads them all.

    :math:`m ((n + 1) d + 1 + d_{out}) + d_{out}` for width ``m``.

    >>> relu_parameters(width=10, context=32, dim=64)
    21141
    """
    return width * ((context + 1) * dim + 1 + outputs) + outputs
