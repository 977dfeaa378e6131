"""Exact ranks of token sequences; more in tests/theory, against fractions and derivatives."""

import pytest
import torch

from attnmem.theory.impossible import every_parity
from attnmem.theory.sequence_ranks import cancelling_rank, jacobian_rank, offered_rank

CUBE = every_parity(3)[0]


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
