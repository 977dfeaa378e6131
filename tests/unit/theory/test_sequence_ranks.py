"""Exact ranks of token sequences: by hand, and under changes that leave them as they are.

More in tests/theory: against fractions, real exponentials and the layer's own derivative.
"""

import pytest
import torch

from attnmem.theory.impossible import every_parity
from attnmem.theory.sequence_ranks import (
    cancelling_rank,
    dependent_subset,
    jacobian_rank,
    offered_rank,
)

CUBE = every_parity(3)[0]


@pytest.mark.parametrize(("heads", "rank"), [(1, 4), (2, 7), (3, 8)])
def test_bits_behind_one_query(heads, rank):
    """Polynomials of degree ``H`` in three bits, each bit at most once."""
    assert offered_rank(CUBE, heads, 9, 9) == rank
    assert offered_rank(CUBE, heads, 9, 9, skip=False) == rank  # its one last token adds nothing


def test_skip_connection_adds_the_last_tokens():
    rows = torch.arange(8)[:, None].expand(8, 2)
    assert offered_rank(rows, 1, 2, 5) == 1 + 5  # values differ from tokens by a constant
    assert offered_rank(rows, 1, 2, 5, skip=False) == 2


@pytest.mark.parametrize("seed", range(3))
def test_names_and_order_change_no_rank(seed):
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(4, (30, 3), generator=g).unique(dim=0)
    renamed = (torch.randperm(4, generator=g) * 17)[rows[torch.randperm(len(rows), generator=g)]]
    for rank in (offered_rank, jacobian_rank):
        assert rank(renamed, 2, 2, 4) == rank(rows, 2, 2, 4)
    assert cancelling_rank(renamed, [2, 3], 2, 4) == cancelling_rank(rows, [2, 3], 2, 4)


def test_pair_that_cancels_is_worth_a_head():
    assert cancelling_rank(CUBE, [2, 2], 1, 4) == jacobian_rank(CUBE, 2, 1, 4)
    assert cancelling_rank(CUBE, [1], 1, 4) == 4  # u and m alone move: a value of zero


def test_dependent_subset_is_the_smallest_circuit_found():
    """One head meets all of eight sequences apart but not the four of two bits."""
    apart = torch.arange(20, 44).reshape(8, 3)
    rows = torch.cat([apart[:3], every_parity(2)[0], apart[3:]])
    assert dependent_subset(rows, 1, 10, 10).tolist() == [3, 4, 5, 6]
    assert dependent_subset(apart, 1, 10, 10).tolist() == []
