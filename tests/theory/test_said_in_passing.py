"""What the papers say beside their numbered statements, tried where it is likeliest to break."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem.attention import AoTWeights, aot
from attnmem.independence import certified_rank

F64 = {"dtype": torch.float64}
seeds = st.integers(0, 2**32)


def integers(*shape, seed, most=9):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=draw)


def centred(logits):
    """In whole numbers: times the number of tokens."""
    return logits.shape[1] * logits - logits.sum(dim=1, keepdim=True)


@pytest.mark.hostile("dana-section-3")
@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(0, 3), seeds)
def test_any_number_of_distributions_is_exact_in_one_dimension_but_independent_ones_are_not(
    d, more, seed
):
    """A transformer without heads has a distribution for each of N > d tokens, all different."""
    N = d + 2 + more
    embedding = torch.cat([torch.arange(N)[:, None], integers(N, d - 1, seed=seed)], dim=1)
    silent = torch.zeros(1, 1, d, **F64)
    tokens = embedding.to(**F64)
    weights = AoTWeights(tokens, silent[0], silent, silent, silent, silent.mT, tokens)
    logits = aot(weights, torch.arange(N)[:, None])
    exact = embedding @ embedding.T
    assert torch.equal(logits, exact.to(**F64))
    assert len(torch.unique(centred(exact), dim=0)) == N > d
    assert certified_rank(centred(exact)).rank <= d
    others = centred(torch.eye(d + 1, N, dtype=torch.int64))
    assert certified_rank(others).rank == d + 1, "logits W E have rank d at most"
