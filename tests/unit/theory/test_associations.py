"""What is in the way of a task, and heads that cancel. More in tests/theory, on hostile sets."""

import re

import pytest
import torch

from attnmem.theory import associations
from attnmem.theory.associations import memorize_next_tokens, obstacle
from attnmem.theory.impossible import every_parity

PAIRS = torch.cartesian_prod(torch.arange(4), torch.arange(4))
TOKENS = PAIRS.sum(1) % 4


@pytest.mark.parametrize(
    ("task", "heads", "why"),
    [
        (every_parity(2), 1, r"impossible for H = 1 .* the 4 sequences \[0, .* of 1 place$"),
        (every_parity(3), 2, r"impossible for H = 2 .* the 8 sequences \[0, .* of 2 places$"),
        ((PAIRS, TOKENS), 2, r"no weights tell .* all 16 have rank 12 at H = 2, d_h = 9, d = 9$"),
        ((PAIRS, TOKENS), 3, None),
    ],
)
def test_obstacle_names_the_reason(task, heads, why):
    """By hand: 16 pairs of four tokens have four last tokens, and steps in four dimensions."""
    found = obstacle(*task, heads=heads, head_dim=9, dim=9)
    assert (found is None) == (why is None)
    assert why is None or re.search(why, found)


@pytest.mark.parametrize("most", [8, 10])
def test_lost_margins_are_refused_after_all_draws(most, monkeypatch):
    monkeypatch.setattr(associations, "margins", lambda logits, tokens: -torch.ones(1))
    monkeypatch.setattr(associations, "_MOST", most)
    sizes = {"vocab": 4, "dim": 3, "head_dim": 2, "groups": (2, 2), "seed": 0}
    with pytest.raises(ValueError, match=rf"^sequences: got 16 .* each of {most} draws"):
        memorize_next_tokens(PAIRS, TOKENS, **sizes)
