"""Layers one after the other against a plain loop."""

import pytest
import torch

from attnmem import deep, random_deep
from attnmem.core.stacked import streams
from attnmem.theory.tangents import deep_tangents, jacobian

from oracles import F64, deep_output


def plain(weights, tokens, skip, causal):
    """One example, one head, one query and one key at a time."""
    last_tokens = [deep_output(weights.layers, x, skip=skip, causal=causal) for x in tokens]
    return torch.stack([last @ weights.W_D for last in last_tokens])


def network(heads, d_h, d_v, d, n, examples, *, outputs=1, seed=0, logits=2.0, values=1.5):
    """Weights with logits and values that are not small, and random tokens."""
    g = torch.Generator().manual_seed(seed)
    weights = random_deep(heads, d_h, d_v, d, g, outputs=outputs, logits=logits, values=values)
    return weights, 1.2 * torch.randn(examples, n, d, generator=g, **F64)


@pytest.mark.parametrize("skip", [True, False], ids=["skip", "bare"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_deep_and_derivative_are_those_of_a_loop(skip, causal):
    weights, tokens = network((2, 1), 2, 3, 5, 3, 4, outputs=2)
    wanted = plain(weights, tokens, skip, causal)
    torch.testing.assert_close(deep(weights, tokens, skip=skip, causal=causal), wanted)

    def outputs(*tensors):
        return plain(weights.like(tensors), tokens, skip, causal).flatten()

    parts = torch.autograd.functional.jacobian(outputs, weights.tensors)
    J = torch.cat([part.flatten(1) for part in parts], 1)
    torch.testing.assert_close(jacobian(weights, tokens, skip=skip, causal=causal), J)

    if skip and not causal:
        at = deep_tangents(weights._replace(W_D=weights.W_D[:, :1]), tokens)
        torch.testing.assert_close(at.outputs, wanted[:, 0])
        first = torch.cat([J[::2, :-10], J[::2, -10::2]], 1)  # of the first output alone
        torch.testing.assert_close(at.gram(), first @ first.T)
        rows = torch.arange(4.0, **F64)
        flat = torch.cat([W.flatten() for W in at.transposed(rows).tensors])
        torch.testing.assert_close(flat, rows @ first)


def test_streams_go_from_the_tokens_to_the_output():
    weights, tokens = network((2, 1, 3), 2, 3, 5, 3, 4)
    first, *_, last = layers = [*streams(weights, tokens)]
    assert len(layers) == 4
    assert first is tokens
    assert torch.equal(last[:, -1] @ weights.W_D, deep(weights, tokens))


def test_moved_weights_are_tensors_plus_a_step():
    weights, _ = network((2, 1), 2, 3, 5, 3, 1)
    step, _ = network((2, 1), 2, 3, 5, 3, 1, seed=1)
    moved = weights.moved(step, -0.5)
    assert [len(layer.W_Q) for layer in moved.layers] == [2, 1]
    for W, S, M in zip(weights.tensors, step.tensors, moved.tensors, strict=True):
        assert torch.equal(M, W - 0.5 * S)
