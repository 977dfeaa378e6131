"""What an accuracy, a loss or an error says about how much a model knows."""

from __future__ import annotations

import math

import numpy as np
import scipy

from ..checks import check_integer, check_integers, check_number, checked_by, refuse


def _check_accuracy(count, vocab, total) -> None:
    check_integers(vocab=vocab, total=total)
    check_number("count", count, least=0, most=total)


@checked_by(_check_accuracy)
def associations_to_accuracy(count: int | float, vocab: int, total: int) -> float:
    r"""Accuracy of a model that knows ``count`` of ``total`` associations and guesses the others.

    The formula is :math:`\varphi(X) = 1/N + (1 - 1/N) X / T_0`, for a uniform prior over the
    sequences and equally likely next tokens.

    Args:
        count: Associations that the model knows, ``X``, from 0 to ``total``.
        vocab: Vocabulary size ``N``.
        total: Number of sequences ``T_0``.

    Returns:
        The accuracy, from ``1/N`` to 1.

    Raises:
        ValueError: If a size is not an integer of at least 1, or ``count`` is out of range.

    Example:
        >>> associations_to_accuracy(count=210, vocab=50, total=2500)
        0.10232

    Source: Dana et al. 2025, Corollary 2.
    """
    return 1 / vocab + (1 - 1 / vocab) * count / total


def _check_table(vocab, total, **measured) -> None:
    check_integer("vocab", vocab, least=2)
    check_integer("total", total)
    for name, value in measured.items():
        _check_wide(name, value)


def _check_wide(name, value) -> None:
    if np.asarray(value).dtype == np.float16:  # it ends at 65504
        refuse(name, "dtype float16", "float32 or float64")


@checked_by(_check_table)
def accuracy_to_associations(accuracy, vocab: int, total: int):
    """Number of associations that an accuracy amounts to.

    The inverse of :func:`associations_to_accuracy`.

    Args:
        accuracy: Accuracy, a number or an array.
        vocab: Vocabulary size ``N``, at least 2.
        total: Number of sequences ``T_0``.

    Returns:
        The number of associations, of the shape of ``accuracy``. It is negative where the accuracy
        is below that of guessing.

    Raises:
        ValueError: If ``vocab`` or ``total`` is not an integer or too small.

    Example:
        >>> round(accuracy_to_associations(0.10232, vocab=50, total=2500))
        210

    Source: Dana et al. 2025, Corollary 2.
    """
    return (accuracy - 1 / vocab) / (1 - 1 / vocab) * total


def _check_share(accuracy, vocab, total) -> None:
    _check_table(vocab, total, accuracy=accuracy)
    share = np.asarray(accuracy)
    if not ((share >= 0) & (share <= 1)).all():
        refuse("accuracy", accuracy, "shares from 0 to 1")


@checked_by(_check_share)
def accuracy_to_bits(accuracy, vocab: int, total: int):
    r"""Bits that a model's answers save in a code for ``total`` labels.

    The formula is :math:`T (\log_2 N - h(p) - (1 - p) \log_2 (N - 1))` for a share ``p`` of right
    answers, with :math:`h(p) = -p \log_2 p - (1 - p) \log_2 (1 - p)`. The code says which answers
    are wrong, and the right label for each of these. The number of wrong answers, at most
    :math:`\log_2 (T + 1)` bits, is not charged. Fano's inequality says that no better can be had of
    the accuracy alone.

    Args:
        accuracy: Share of right answers ``p``, a number or an array.
        vocab: Number of classes ``N``, at least 2.
        total: Number of labels ``T``.

    Returns:
        Bits, of the shape of ``accuracy``. They are :math:`T \log_2 N` if every answer is right,
        and zero if no more are right than by guessing.

    Raises:
        ValueError: If an accuracy is out of range, or a size is not an integer or too small.

    Example:
        >>> round(accuracy_to_bits(1.0, vocab=50, total=522))
        2946

    Source: Cover and Thomas, Elements of Information Theory, chapter 2.
    """
    p = np.maximum(accuracy, 1 / vocab)
    entr = scipy.special.entr
    nats = math.log(vocab) - entr(p) - entr(1 - p) - (1 - p) * math.log(vocab - 1)
    return total * np.maximum(nats, 0) / math.log(2)


@checked_by(check_integers)
def different_draws(total: int, draws: int) -> float:
    r"""Expected number of different pairs among uniform draws: :math:`T_0 (1 - (1 - 1/T_0)^{T})`.

    Args:
        total: Number of pairs that there are, ``T_0``.
        draws: Number of draws ``T``.

    Returns:
        The expected number.

    Raises:
        ValueError: If an argument is not an integer of at least 1.

    Example:
        >>> round(different_draws(total=2500, draws=16384))
        2496
    """
    return -total * math.expm1(draws * math.log1p(-1 / total)) if total > 1 else 1.0


def _check_error(error, total) -> None:
    check_integer("total", total)
    _check_wide("error", error)
    if not (np.asarray(error) >= 0).all():
        refuse("error", error, "mean squares, at least 0")


@checked_by(_check_error)
def error_to_bits(error, total: int):
    r"""Lower bound of the bits that a model knows of ``total`` labels uniform on :math:`[0, 1]`.

    The formula is :math:`T \max(0, -\tfrac12 \log_2 (2 \pi e D))` for a mean square error ``D``. It
    is what a code saves for labels that are normal around the outputs (Shannon's lower bound of the
    rate). It is zero from ``D = 0.0585`` on, and infinite at ``D = 0``. A model that always answers
    1/2 has ``D = 1/12``.

    Args:
        error: Mean square error ``D``, a number or an array, at least 0.
        total: Number of labels ``T``.

    Returns:
        Bits, of the shape of ``error``.

    Raises:
        ValueError: If an error is negative or NaN, or ``total`` is not an integer of at least 1.

    Example:
        >>> round(error_to_bits(1e-4, total=10_000))
        45968

    Source: Cover and Thomas, Elements of Information Theory, chapter 10.
    """
    with np.errstate(divide="ignore"):
        rate = -np.log2(2 * math.pi * math.e * np.asarray(error)) / 2
    return total * np.maximum(rate, 0)


@checked_by(_check_table)
def loss_to_bits(loss, vocab: int, total: int):
    r"""Bits that a model knows of ``total`` labels: :math:`T (\ln N - \ell) / \ln 2`.

    Labels uniform over ``N`` classes take :math:`T \log_2 N` bits. This is how many of them the
    model's predictions save. On average over the labels it is at most the mutual information
    between labels and weights (Gibbs' inequality).

    Args:
        loss: Mean cross-entropy :math:`\ell` on the labels in nats, a number or an array.
        vocab: Number of classes ``N``, at least 2.
        total: Number of labels ``T``.

    Returns:
        Bits, of the shape of ``loss``. They are zero for uniform guesses and negative for worse
        ones.

    Raises:
        ValueError: If ``vocab`` or ``total`` is not an integer or too small.

    Example:
        >>> round(loss_to_bits(0.0, vocab=100, total=10_000))
        66439
    """
    return total * (math.log(vocab) - loss) / math.log(2)
