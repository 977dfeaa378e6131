"""Examples that a layer is to memorize: their units, and what is refused."""

import pytest
import torch

from attnmem.examples import check_data, check_distinct_examples, unit


@pytest.mark.parametrize(
    ("entries", "expected"),
    [([0.3, -0.9], 0.25), ([1.0], 1.0), ([-3.9, 2.0], 1.0), ([4.0], 4.0), ([0.0, 0.0], 1.0)],
)
def test_unit_is_a_power_of_four(entries, expected):
    assert unit(torch.tensor(entries, dtype=torch.float64)) == expected


def test_data_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match=r"^queries: got "):
        check_data(contexts=torch.zeros(2, 3), queries=torch.tensor([[0.0, float("nan")]]))


def test_equal_examples_are_refused():
    contexts, queries = torch.rand(2, 3), torch.rand(2, 3)
    check_distinct_examples(contexts, queries, torch.tensor([1.0, 2.0]))
    queries[1] = queries[0]
    with pytest.raises(ValueError, match=r"^examples: got 0 and 1"):
        check_distinct_examples(contexts, queries, torch.tensor([1.0, 2.0]))
