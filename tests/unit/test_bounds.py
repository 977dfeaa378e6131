"""The formulas against values worked out by hand, and against counts."""

import pytest

from attnmem import bounds


@pytest.mark.parametrize(
    ("arguments", "capacity"),
    [
        ({"heads": 32, "context": 32, "head_dim": 64}, 993),  # r = n
        ({"heads": 60, "context": 32, "head_dim": 64}, 1861),
        ({"heads": 8, "context": 8, "head_dim": 4}, 25),  # r = d_h
        ({"heads": 8, "context": 8, "head_dim": 4, "query_rank": 3}, 17),  # r = Q
        ({"heads": 8, "context": 8, "head_dim": 4, "query_rank": 99}, 25),
        ({"heads": 7, "context": 1, "head_dim": 4}, 1),  # one token: one example
    ],
)
def test_mha_capacity(arguments, capacity):
    assert bounds.mha_capacity(**arguments) == capacity


def test_shared_contexts_meet_the_upper_bound_when_heads_are_wide():
    for heads in (1, 2, 7):
        for context in (1, 2, 5):
            capacity = bounds.mha_capacity(heads, context, head_dim=context)
            assert capacity == bounds.shared_context_rank(heads, context)


def test_affine_rank_is_below_the_number_of_feature_columns():
    assert bounds.affine_rank(heads=5, dim=13) == 5 * 13 - 4


@pytest.mark.parametrize(
    ("width", "dim", "outputs", "largest"), [(10, 64, 1, 661), (3, 5, 2, 13), (1, 1, 1, 4)]
)
def test_relu_capacity(width, dim, outputs, largest):
    # Weights of a network with `dim` inputs: hidden weights and biases, output weights and biases.
    weights = width * (dim + 1) + outputs * (width + 1)
    assert bounds.relu_capacity(width, dim, outputs) == largest == weights // outputs


def test_aot_capacity_exceeds_the_previous_bound_by_heads_plus_dim_minus_one():
    for heads, head_dim, dim in [(499, 2, 2), (249, 10, 10), (3, 1, 7)]:
        gain = bounds.aot_capacity(heads, head_dim, dim) - bounds.previous_aot_capacity(
            heads, head_dim
        )
        assert gain == heads + dim - 1
    assert bounds.aot_capacity(heads=499, head_dim=2, dim=2) == 1000


def test_accuracy_is_chance_without_associations_and_one_with_all():
    assert bounds.associations_to_accuracy(0, vocab=50, total=2500) == pytest.approx(1 / 50)
    assert bounds.associations_to_accuracy(2500, vocab=50, total=2500) == pytest.approx(1)
    half = bounds.associations_to_accuracy(1250, vocab=50, total=2500)
    assert half == pytest.approx((1 + 1 / 50) / 2)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: bounds.mha_capacity(0, 3, 3), "heads"),
        (lambda: bounds.mha_capacity(2, -1, 3), "context"),
        (lambda: bounds.mha_capacity(2, 3, 2.5), "head_dim"),
        (lambda: bounds.mha_capacity(2, 3, 3, query_rank=0), "query_rank"),
        (lambda: bounds.shared_context_rank(True, 3), "heads"),
        (lambda: bounds.affine_rank(2, 0), "dim"),
        (lambda: bounds.relu_capacity("2", 3), "width"),
        (lambda: bounds.aot_capacity(2, head_dim=5, dim=4), "head_dim"),
        (lambda: bounds.associations_to_accuracy(11, vocab=3, total=10), "count"),
        (lambda: bounds.associations_to_accuracy(float("nan"), vocab=3, total=10), "count"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: got "):
        call()


@pytest.mark.parametrize("count", [0, 1, 210, 2500])
def test_accuracy_and_associations_are_inverse(count):
    accuracy = bounds.associations_to_accuracy(count, vocab=50, total=2500)
    assert bounds.accuracy_to_associations(accuracy, 50, 2500) == pytest.approx(count, abs=1e-9)
