"""What an accuracy, a loss or an error says about how much a model knows."""

from __future__ import annotations

import math

import numpy as np

from ..checks import check_integer, check_integers, check_number, checked_by, refuse


def _check_accuracy(count, vocab, total) -> None:
    check_integers(vocab=vocab, total=total)
    check_number("count", count, least=0, most=total)


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
