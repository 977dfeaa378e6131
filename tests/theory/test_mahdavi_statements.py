"""Every other statement of Mahdavi et al. 2024, each against an oracle of its own.

Ranks are exact wherever the statement allows rational numbers.
"""

import pytest
import torch
from flint import fmpz_mat
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem import memorize_mha, mha, random_mha
from attnmem.core import bounds
from attnmem.theory.independence import certified_rank

import hostile
import oracles

F64 = {"dtype": torch.float64}
seeds = st.integers(0, 2**32)
quick = settings(max_examples=40)


def exact(matrix):
    """The rank of an integer matrix (too low only if a random prime of 62 bits divides minors)."""
    return certified_rank(matrix).rank


def integers(generator, *shape, size=9):
    return torch.randint(-size, size + 1, shape, generator=generator)


def gaussian(generator, *shape):
    return torch.randn(*shape, generator=generator, **F64)


# --- the proposition behind the theorem, the skip connection, and readings ------------------------


def test_appendix_c_the_shifted_labels_fix_the_decoder():
    """Doubling W_D and halving W_O is the same layer without the skip, and another one with it."""
    E, e, y = torch.rand(5, 7, **F64), torch.rand(9, 7, **F64), torch.rand(9, 2, **F64)
    layer = memorize_mha(E, e, y, heads=2, head_dim=5, seed=0, skip=True)
    other = layer._replace(W_O=layer.W_O / 2, W_D=2 * layer.W_D)
    torch.testing.assert_close(mha(other, E, e), mha(layer, E, e))
    torch.testing.assert_close(mha(layer, E, e, skip=True), y, rtol=0, atol=1e-8)
    assert (mha(other, E, e, skip=True) - y).abs().max() > 1e-2


@pytest.mark.hostile("mahdavi-readings")
@pytest.mark.parametrize(("H", "n", "d"), [(1, 2, 3), (2, 3, 4), (5, 4, 9), (3, 8, 9)])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_readings_of_theorem_1_with_their_constants(H, n, d, number):
    d_h, d_v, outputs = {1: (n, 1, 1), 2: (d, d, 1), 3: (d, d, d)}[number]
    unit = H * n * d if number == 1 else H * d * d
    T = bounds.mha_capacity(H, n, d_h)
    E, e, y = (torch.rand(T, *shape, **F64) for shape in ((n, d), (d,), (outputs,)))
    layer = memorize_mha(E, e, y, heads=H, head_dim=d_h, seed=0, value_dim=d_v)
    parameters = sum(W.numel() for W in layer)
    assert (number + 1) * unit <= parameters <= (number + 2) * unit
    assert parameters >= T * outputs >= H * n * outputs / 2
    if number == 3:
        assert parameters <= 10 * d / n * T * outputs


# --- upper bounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d", "m", "outputs"), [(2, 3, 4, 1), (1, 2, 5, 3), (3, 4, 2, 2)])
def test_proposition_3_equal_contexts_leave_few_effective_parameters(n, d, m, outputs):
    """The exact rank of the Jacobian, at integer weights and queries."""
    generator = torch.Generator().manual_seed(n)
    inputs, T = (n + 1) * d, 40 * m
    W, b = integers(generator, m, inputs), integers(generator, m)
    A = integers(generator, m, outputs)
    context = torch.eye(d, dtype=torch.int64)[:n].flatten()
    X = torch.cat([context.expand(T, -1), integers(generator, T, d)], 1)
    before = X @ W.T + b
    active = (before > 0).long()
    parts = []
    for k in range(outputs):
        slope = active * A[:, k]
        unit = torch.zeros(T, m, outputs, dtype=torch.int64)
        unit[..., k] = before.clamp(min=0)
        constant = torch.eye(outputs, dtype=torch.int64)[k].expand(T, -1)
        by_W = (slope[:, :, None] * X[:, None]).flatten(1)
        parts.append(torch.cat([by_W, slope, unit.flatten(1), constant], 1))
    jacobian = torch.cat(parts)
    effective = m * (d + outputs) + outputs
    assert exact(jacobian) == effective
    assert effective <= outputs * bounds.relu_capacity(m, d, outputs) + outputs
    assert jacobian.shape[1] > effective


@pytest.mark.hostile("mahdavi-wide-heads")
@quick
@given(st.integers(1, 4), st.integers(2, 5), st.integers(2, 8), st.integers(1, 8), seeds)
def test_wide_heads_add_nothing_on_a_shared_context(H, n, d, d_h, seed):
    generator = torch.Generator().manual_seed(seed)
    E, e = gaussian(generator, n, d), gaussian(generator, 12, d)
    layer = random_mha(H, d, d_h, seed=seed % 1000, spread=3)
    span = torch.linalg.qr((E[1:] - E[0]).T).Q  # (d, min(n - 1, d))
    narrow = layer._replace(W_K=span.expand(H, *span.shape), W_Q=layer.W_Q @ (layer.W_K.mT @ span))
    assert narrow.W_K.shape[-1] <= n - 1
    torch.testing.assert_close(mha(narrow, E, e), mha(layer, E, e), rtol=1e-7, atol=1e-9)


@pytest.mark.hostile("mahdavi-section-4-4")
def test_section_4_4_tokens_can_cancel_independent_positions():
    tokens, positions = torch.tensor([[0, 0], [1, -1]]), torch.eye(2, dtype=torch.int64)
    assert fmpz_mat(positions.tolist()).rank() == 2
    assert fmpz_mat((tokens + positions).tolist()).rank() == 1


@pytest.mark.hostile("mahdavi-section-4-3")
def test_section_4_3_one_relu_unit_beats_any_attention_on_one_token():
    token, label = torch.tensor([[1, 0], [0, 1], [1, 1]]), torch.tensor([0, 0, 1])
    assert torch.equal((token.sum(1) - 1).clamp(min=0), label)
    layer = random_mha(50, 2, 2, seed=0, spread=3)
    outputs = mha(layer, token[:, None].double(), token.double())[:, 0]
    torch.testing.assert_close(outputs[0] + outputs[1], outputs[2])  # and 0 + 0 is not 1


@pytest.mark.hostile("mahdavi-assumption-3-relaxed")
@pytest.mark.parametrize(("n", "d"), [(1, 2), (2, 2), (2, 3), (3, 4)])
def test_assumption_3_relaxed_follows_from_neither_assumption_nor_implies_them(n, d):
    """Queries that cancel the means of their contexts; equal tokens, independent queries."""
    T = 6
    asking = hostile.moments(T, d, d)  # n times the queries
    E = hostile.integers(3, T, n, d, size=9)
    E[:, -1] = -asking - E[:, :-1].sum(1)
    assert all(oracles.rank(context) == n for context in E)  # Assumption 2
    assert oracles.kruskal(asking) >= n  # Assumption 1
    assert not (asking + E.sum(1)).any()  # no vector of Assumption 3 is different from zero
    equal = asking[:, None].expand(T, n, d)
    assert all(oracles.rank(context) == 1 for context in equal)
    assert oracles.kruskal(asking + equal.sum(1)) >= n  # Assumption 3 without Assumption 2
