"""Statements of Mahdavi et al. in whole numbers: they call no library."""

import pytest
import torch

import hostile
import oracles


@pytest.mark.hostile("mahdavi-section-4-4")
def test_section_4_4_tokens_can_cancel_positions():
    """Independent positions are no reason for independent tokens."""
    tokens, positions = torch.tensor([[0, 0], [1, -1]]), torch.eye(2, dtype=torch.int64)
    assert oracles.rank(positions) == 2
    assert oracles.rank(tokens + positions) == 1


@pytest.mark.hostile("mahdavi-assumption-3-relaxed")
@pytest.mark.parametrize(("n", "d"), [(2, 3), (2, 5), (3, 4), (4, 7)])
def test_assumption_3_neither_follows_nor_implies(n, d):
    """Queries are tokens of their contexts, whose means they cancel but for one vector."""
    T = 6
    asking, c = hostile.moments(T, d, d), torch.arange(2, d + 2)
    E = hostile.integers(3, T, n, d, size=9)
    E[:, 0] = asking
    E[:, -1] = n * c - n * asking - E[:, :-1].sum(1)
    assert all(oracles.rank(context) == n for context in E)  # Assumption 2
    assert oracles.kruskal(asking) >= n  # Assumption 1
    assert torch.equal(n * asking + E.sum(1), (n * c).expand(T, d))  # rank one, for Assumption 3
    equal = asking[:, None].expand(T, n, d)
    assert all(oracles.rank(context) == 1 for context in equal)
    assert oracles.kruskal(asking + equal.sum(1)) >= n  # Assumption 3 without Assumption 2
