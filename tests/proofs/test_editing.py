"""The chapter on editing against itself, in fractions and by averages: it calls no library."""

import itertools
from fractions import Fraction

import pytest
import torch

from oracles import F64, dot, fractions, rank, rational


def least(Z, Y):
    """The read-out of least norm: a row of ``R`` fractions for each output."""
    Z = rational(Z)
    coefficients = (Z * Z.transpose()).solve(rational(Y))
    return fractions(coefficients.transpose() * Z)


def integers(seed, T, R, outputs):
    """Features and labels of ``T`` facts, as fractions."""
    g = torch.Generator().manual_seed(seed)
    Z, Y = (torch.randint(-9, 10, (T, size), generator=g) for size in (R, outputs))
    return fractions(rational(Z)), fractions(rational(Y))


def moved(row, step, direction):
    return [x + step * u for x, u in zip(row, direction, strict=True)]


def signs(*shape, generator):
    return torch.randint(2, shape, generator=generator) * 2.0 - 1


@pytest.mark.parametrize(("T", "R"), [(4, 6), (6, 6), (1, 3)])
def test_one_by_one_is_the_least_norm_solution(T, R):
    """Each fact is written along the part of its features that is orthogonal to those before."""
    Z, Y = integers(T, T, R, 2)
    P = fractions(rational(torch.eye(R)))
    W = [[Fraction(0)] * R for _ in range(2)]
    for z, y in zip(Z, Y, strict=True):
        own = [dot(row, z) for row in P]
        size = dot(own, z)
        W = [moved(row, (label - dot(row, z)) / size, own) for row, label in zip(W, y, strict=True)]
        P = [moved(row, -u / size, own) for row, u in zip(P, own, strict=True)]
    assert least(Z, Y) == W


@pytest.mark.parametrize("t", range(4))
def test_forgetting_is_a_step_along_the_own_part(t):
    Z, Y = integers(7, 4, 6, 2)
    others = [s for s in range(4) if s != t]
    W = least(Z, Y)
    [own] = least(Z, [[Fraction(s == t)] for s in range(4)])
    assert [dot(own, z) for z in Z] == [Fraction(s == t) for s in range(4)]
    less = [moved(row, -dot(row, own) / dot(own, own), own) for row in W]
    assert less == least([Z[s] for s in others], [Y[s] for s in others])


@pytest.mark.hostile("mahdavi-finding-readable")
def test_the_weights_show_their_facts():
    """If there are as many outputs as facts, all different, and room is left."""
    Z, Y = integers(8, 4, 6, 4)
    outside = [Fraction(k * k - 3) for k in range(6)]
    W = least(Z, Y)
    assert rank(Y) == rank(W) == rank([*W, *Z]) == 4
    assert rank([*W, outside]) == 5
    few_outputs = least(Z, [y[:3] for y in Y])  # no fact lies in the span
    assert [rank([*few_outputs, z]) for z in Z] == [4] * 4
    alike = least(Z, [Y[0], Y[0], *Y[2:]])  # two facts have one change: again, no fact does
    assert rank(alike) == 3
    assert [rank([*alike, z]) for z in Z] == [4] * 4
    full_Z, full_Y = integers(9, 6, 6, 6)  # no room left: everything lies in the span
    assert rank([*least(full_Z, full_Y), outside]) == rank(full_Z) == 6


R, T = 24, 12


@pytest.mark.hostile("mahdavi-finding-edits-price")
@pytest.mark.parametrize("kind", ["Gaussian", "signs"])
def test_the_own_part_decides_the_price(kind):
    """E tr G^-1 = T / (R - T - 1) for Gaussian features; at least T / (R - T + 1) for others."""
    draw = torch.randn if kind == "Gaussian" else signs
    Z = draw(4000, T, R, generator=torch.Generator().manual_seed(0)).double()
    price = torch.linalg.inv(Z @ Z.mT).diagonal(dim1=1, dim2=2).sum(1)
    mean, error = float(price.mean()), float(price.std()) / len(Z) ** 0.5
    if kind == "Gaussian":
        assert abs(mean - T / (R - T - 1)) < 5 * error
    else:
        assert mean > T / (R - T + 1)


@pytest.mark.hostile("mahdavi-finding-edits-price")
def test_answers_before_raise_the_price():
    """For Gaussian features, E c' G^-1 c = T / (R - T - 1) + |m|^2 T / R, if c = y - Z m."""
    g, draws = torch.Generator().manual_seed(1), 20000
    m, Z = 2 * torch.randn(R, generator=g), torch.randn(draws, T, R, generator=g)
    c = signs(draws, T, generator=g) - Z @ m
    price = (c * torch.linalg.solve(Z @ Z.mT, c)).sum(1)
    law = T / (R - T - 1) + float(m.square().sum()) * T / R
    assert abs(float(price.mean()) - law) < 5 * float(price.std()) / draws**0.5


@pytest.mark.hostile("mahdavi-finding-fading")
def test_an_editor_without_memory_keeps_a_power():
    """Isotropic directions, here all axes: on average exactly (1 - 1/R)^k of the label."""
    R, k = 3, 2
    axes = [sign * axis for axis in torch.eye(R, **F64) for sign in (1, -1)]
    z0 = torch.tensor([1.0, 2.0, -1.0], **F64)
    first = z0 / (z0 @ z0)  # label 1, written into empty weights
    answers = []
    for later in itertools.product(axes, repeat=k):
        for labels in itertools.product((-1.0, 1.0), repeat=k):
            w = first
            for z, y in zip(later, labels, strict=True):
                w = w + (y - w @ z) * z / (z @ z)
            answers.append(float(w @ z0))
    assert sum(answers) / len(answers) == pytest.approx((1 - 1 / R) ** k, abs=1e-12)
