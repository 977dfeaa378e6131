"""The derivative of a layer: padding and bases against autograd, coordinates, names of weights."""

import pytest
import torch

from attnmem import mha, random_deep
from attnmem.theory.tangents import (
    Coordinates,
    ScalarHeads,
    attended,
    balancing_map,
    deep_tangents,
    named,
    scalar_outputs,
    tangents,
)

F64 = {"dtype": torch.float64}
H, T, N, D, D_H = 2, 7, 3, 5, 4


def drawn(shared=False, n=N):
    g = torch.Generator().manual_seed(0)
    shapes = (H, D, D_H), (H, D, D_H), (H, D), (n, D) if shared else (T, n, D), (T, D)
    *heads, contexts, queries = (torch.randn(*shape, generator=g, **F64) for shape in shapes)
    return ScalarHeads(*heads), contexts, queries


def flat(heads):
    return torch.cat([W.flatten() for W in heads])


@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_padding_and_bases_against_autograd(padded, based):
    """Hidden tokens do not exist; a base is added to all tokens where values see them."""
    heads, contexts, queries = drawn()
    sizes = [1 + t % N for t in range(T)] if padded else [N] * T
    hidden = torch.tensor([[i >= size for i in range(N)] for size in sizes]) if padded else None
    base = torch.randn(T, D, generator=torch.Generator().manual_seed(1), **F64) if based else None

    def outputs(W_Q, W_K, mu):
        results = []
        for t, size in enumerate(sizes):
            E, e = contexts[t, :size], queries[t]
            values = E if base is None else E + base[t]
            for Q, K, m in zip(W_Q, W_K, mu, strict=True):
                results.append(torch.softmax(E @ K @ Q.T @ e, 0) @ values @ m)
        return torch.stack(results).view(T, H).sum(1)

    derivative = tangents(heads, contexts, queries, hidden, base)
    torch.testing.assert_close(derivative.outputs, outputs(*heads))
    J = torch.cat([J.flatten(1) for J in torch.func.jacrev(outputs, (0, 1, 2))(*heads)], 1)
    torch.testing.assert_close(torch.cat(derivative.parts(), 1), J)
    torch.testing.assert_close(derivative.gram(), J @ J.T)
    rows = torch.arange(T, **F64)
    torch.testing.assert_close(flat(derivative.transposed(rows)), rows @ J)


def test_hidden_tokens_get_no_attention():
    heads, contexts, queries = drawn()
    hidden = torch.zeros(T, N, dtype=torch.bool)
    hidden[:, 1] = True
    alpha, z = attended(heads.W_Q, heads.W_K, contexts, queries, hidden)
    without, z_without = attended(heads.W_Q, heads.W_K, contexts[:, [0, 2]], queries)
    assert not alpha[..., 1].any()
    torch.testing.assert_close(alpha[..., [0, 2]], without)
    torch.testing.assert_close(z, z_without)


def test_scalar_heads_are_a_layer():
    heads, contexts, queries = drawn()
    outputs = scalar_outputs(heads, contexts, queries)
    torch.testing.assert_close(mha(heads.layer(), contexts, queries)[:, 0], outputs)
    step = heads.like(tuple(torch.ones_like(W) for W in heads))
    torch.testing.assert_close(flat(heads.moved(step, 0.5)), flat(heads) + 0.5)


def test_deep_tangents_transposed():
    """A step along J^T r changes the outputs by J J^T r, to first order."""
    g = torch.Generator().manual_seed(0)
    weights, tokens = random_deep((2, 1), 2, 3, D, g), torch.randn(T, N, D, generator=g, **F64)
    derivative, rows = deep_tangents(weights, tokens), torch.randn(T, generator=g, **F64)
    step = derivative.transposed(rows)
    moved = deep_tangents(weights.moved(step, 1e-7), tokens).outputs - derivative.outputs
    torch.testing.assert_close(moved / 1e-7, derivative.gram() @ rows, rtol=1e-4, atol=1e-4)


def test_names_of_weights():
    heads = drawn()[0]
    assert list(named(heads)) == ["weights.W_Q", "weights.W_K", "weights.mu"]
    deep = random_deep((1, 1), 1, 1, 2, torch.Generator().manual_seed(0))
    names = [f"weights.layers[{i}].{name}" for i in (0, 1) for name in ("W_Q", "W_K", "W_V", "W_O")]
    assert list(named(deep)) == [*names, "weights.W_D"]
    assert all(a is b for a, b in zip(named(deep).values(), deep.tensors, strict=True))


@pytest.mark.parametrize("shared", [False, True])
def test_balanced_coordinates_change_no_output(shared):
    heads, contexts, queries = drawn(shared, n=7)
    change = Coordinates.balancing(contexts, queries)
    inside = scalar_outputs(heads, contexts @ change.tokens, queries @ change.queries)
    outside = scalar_outputs(change.outward(heads), contexts, queries)
    torch.testing.assert_close(outside, inside)
    tokens = (contexts @ change.tokens).flatten(0, -2)
    if not shared:
        tokens = tokens - tokens.mean(0)
    for rows in (queries @ change.queries, tokens):
        torch.testing.assert_close(rows.T @ rows / len(rows), torch.eye(D, **F64))


@pytest.mark.parametrize("size", [1.0, 1e150])
def test_missing_directions_stretch_by_a_thousand(size):
    rows = torch.zeros(4, 3, **F64)
    rows[:, 0], rows[:, 1] = 2.0, torch.tensor([1.0, -1.0, 1.0, -1.0])
    balanced = size * balancing_map(size * rows)
    torch.testing.assert_close(balanced, torch.diag(torch.tensor([0.5, 1.0, 500.0], **F64)))
