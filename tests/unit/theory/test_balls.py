"""Balls contain what is true, and floats beside them are rounded outwards."""

import math
import random

import pytest
from flint import arb, arb_mat, fmpq

from attnmem.theory import balls


def test_softmax_of_known_logits():
    alpha = balls.softmax([arb(2).log(), arb(0), arb(5).log()])
    assert all(ball.contains(fmpq(k, 8)) for ball, k in zip(alpha, (2, 1, 5), strict=True))
    assert balls.softmax([]) == []


@pytest.mark.parametrize("x", [-1, 0, 1])
def test_softmax_of_a_wide_logit(x):
    [widened, _] = balls.softmax([arb(0, 1), arb(0)])
    assert widened.contains(1 / (1 + (-arb(x)).exp()))


def test_attention_sees_keys_up_to_its_own():
    ones = arb_mat(3, 2, [0] * 6)
    assert balls.attention(ones, ones).contains(arb_mat(3, 3, [fmpq(1, 3)] * 9))
    causal = [[1, 0, 0], [fmpq(1, 2), fmpq(1, 2), 0], [fmpq(1, 3)] * 3]
    assert balls.attention(ones, ones, causal=True).contains(arb_mat(causal))


def test_ends_are_the_floats_next_to_them():
    draw = random.Random(0)
    for _ in range(200):
        exact = arb(draw.random() - 0.5) * arb(3).sqrt()
        lower, upper = exact.lower(), exact.upper()
        assert lower - 1e-15 < arb(balls.below(lower)) < lower
        assert upper < arb(balls.above(upper)) < upper + 1e-15
    assert balls.below(arb(1)) == math.nextafter(1, 0)
    assert balls.above(arb(1)) == math.nextafter(1, 2)
    assert 1.999 < balls.below(arb(2.5, 0.5)) < 2 < 3 < balls.above(arb(2.5, 0.5)) < 3.001


@pytest.mark.parametrize("power", [0, 400, -400])
def test_ends_of_balls_beyond_the_floats(power):
    ball = arb(3, 0.25) * arb(10) ** power
    for x in (ball, -ball, ball - ball):
        assert arb(balls.below(x)) < x < arb(balls.above(x))


def test_ends_of_what_is_not_finite():
    assert balls.below(arb.neg_inf()) == balls.below(arb.nan()) == -math.inf
    assert balls.above(arb.pos_inf()) == balls.above(arb.nan()) == math.inf


def test_largest_entry_is_that_of_outer_ends():
    wide = arb_mat([[arb(1, 0.5), arb(-2, 0.25)], [arb(0, 2.125), arb(2)]])
    assert 2.25 < balls.largest(wide) < 2.2500001  # radii have 30 bits
    assert balls.largest(arb_mat([[-3, 2]])) == math.nextafter(3, 4)
    assert balls.largest(arb_mat(0, 3)) == 0.0


@pytest.mark.parametrize(("most", "tried"), [(128, [128]), (255, [128]), (513, [128, 256, 512])])
def test_precisions_double_up_to_the_most(most, tried):
    assert [*balls.precisions(most)] == tried
