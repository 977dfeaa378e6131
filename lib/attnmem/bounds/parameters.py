"""The price of each model: its number of parameters, and how many of them its function shows."""

from __future__ import annotations

import math

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


def _check_aot_dimension(heads, head_dim, dim, vocab, width, shared_maps, position_in_skip) -> None:
    check_integers(heads=heads, dim=dim)
    check_integer("head_dim", head_dim, most=dim if shared_maps else math.inf)
    check_integer("vocab", vocab, least=dim + 1)
    check_integer("width", width, least=0)


@checked_by(_check_aot_dimension)
def aot_dimension(
    heads: int,
    head_dim: int,
    dim: int,
    vocab: int,
    *,
    width: int = 0,
    shared_maps: bool = False,
    position_in_skip: bool = True,
) -> int:
    r"""Dimension of the family of functions of one-layer transformers on pairs of tokens.

    It is the number of parameters less all directions that leave every predicted distribution as it
    is. With maps of their own, the heads show two matrices each, :math:`W_Q^\top W_K` and
    :math:`W_O W_V`, of rank ``r = min(d_h, d)``:

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
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``, at most ``d`` if maps are shared.
        dim: Embedding dimension ``d``.
        vocab: Vocabulary size ``N``, greater than ``d``.
        width: Width of a feed-forward layer without bias behind, 0 for none.
        shared_maps: Whether all heads share one map to ``d_h`` and one back.
        position_in_skip: Whether positions are in the residual stream, or in the attention's input
            only.

    Returns:
        The dimension. It is the rank of the Jacobian of all predictions at almost all weights.

    Raises:
        ValueError: If a size is not an integer or too small.

    Example:
        >>> aot_dimension(heads=4, head_dim=2, dim=10, vocab=50)
        1188

    Source: this book. The tests compare it with the rank of the Jacobian at small sizes.
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


def _check_mha_dimension(heads, head_dim, dim, context, shared, classes, embedded) -> None:
    check_integers(heads=heads, head_dim=head_dim, dim=dim)
    check_integer("context", context, most=dim if shared else math.inf)
    if classes is not None:
        check_integer("classes", classes, least=2)


@checked_by(_check_mha_dimension)
def mha_dimension(
    heads: int,
    head_dim: int,
    dim: int,
    context: int,
    *,
    shared: bool,
    classes: int | None = None,
    embedded: bool = True,
) -> int:
    r"""Dimension of the family of functions of a multi-head layer with values of width one.

    It is the number of parameters less all directions that leave every output, or every predicted
    distribution over classes, as it is. Let :math:`C` be 1 for a real output and one less than the
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
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``.
        dim: Embedding dimension ``d``.
        context: Tokens in a context, ``n``; at most ``d`` if it is shared.
        shared: Whether one context serves all examples.
        classes: Number of classes, None for one real output.
        embedded: Whether queries and tokens are embedded and have positions, with a bias behind, as
            in the model that Mahdavi et al. train. Otherwise it is the layer of their theory,
            without a bias.

    Returns:
        The dimension. It is the rank of the Jacobian of all outputs at almost all weights and data.

    Raises:
        ValueError: If a size is not an integer or out of range.

    Example:
        >>> mha_dimension(heads=4, head_dim=4, dim=8, context=4, shared=False, embedded=False)
        224

    Source: this book. The tests compare it with the rank of the Jacobian at small sizes.
    """
    H, n, d = heads, context, dim
    C = 1 if classes is None else classes - 1
    k = min(H, d, C)
    bias = C if embedded else k if shared else 0
    if n == 1:
        return C if shared else k * (d + C - k) + bias
    differences = n - 1
    r = min(head_dim, differences if shared else d)
    each = r * (differences + d - r) + differences if shared else r * (2 * d - r) + d
    total = H * (each - 1) + k * (H + C - k) + bias
    if embedded:
        total += min(d, H * r)
        total += 0 if shared else min(differences, d) * min(d, H * (r + 1))
    return total
