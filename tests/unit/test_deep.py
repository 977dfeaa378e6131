"""Networks of attention layers against a plain loop, and the count of their parameters."""

import itertools

import pytest
import torch

from attnmem import deep, random_deep
from attnmem.core import bounds
from attnmem.theory.tangents import deep_tangents, jacobian

F64 = {"dtype": torch.float64}
KINDS = list(itertools.product([True, False], [True, False]))  # skip, causal


def plain(weights, tokens, skip, causal):
    """One example, one head, one query and one key at a time."""
    outputs = []
    for x in tokens:
        x = [*x]
        for W_Q, W_K, W_V, W_O in weights.layers:
            after = []
            for i, query in enumerate(x):
                keys = x[: i + 1] if causal else x
                y = query if skip else torch.zeros_like(query)
                for Q, K, V, O in zip(W_Q, W_K, W_V, W_O, strict=True):
                    powers = [torch.exp((query @ Q) @ (key @ K)) for key in keys]
                    for power, key in zip(powers, keys, strict=True):
                        y = y + power / sum(powers) * (key @ V @ O)
                after.append(y)
            x = after
        outputs.append(x[-1] @ weights.W_D)
    return torch.stack(outputs)


def network(heads, d_h, d_v, d, n, examples, *, outputs=1, seed=0, logits=2.0, values=1.5):
    """Weights with logits and values that are not small, and random tokens."""
    g = torch.Generator().manual_seed(seed)
    weights = random_deep(heads, d_h, d_v, d, g, outputs=outputs, logits=logits, values=values)
    return weights, 1.2 * torch.randn(examples, n, d, generator=g, **F64)


@pytest.mark.parametrize(("skip", "causal"), KINDS)
def test_outputs_and_derivative_are_those_of_a_plain_loop(skip, causal):
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


def test_one_head_a_layer_without_skip_has_the_dimension_of_the_known_conjecture():
    """L layers, logits of rank a, square values, outputs: L (a (2d - a) + d^2) - (L - 1) d^2."""
    for L, d in itertools.product(range(1, 5), range(1, 7)):
        for a in range(1, d + 1):
            known = L * (a * (2 * d - a) + d * d) - (L - 1) * d * d
            assert bounds.deep_ceiling([1] * L, a, d, d, outputs=d, skip=False) == known


def test_counts_by_hand():
    # One head each, d_h = 1: layer 2 reads w and 1 + 2 dimensions more, so s_1 = 4.
    both = 2 * 15 + 8 + 4 * 8  # logits of two layers, mu of the last, d x 4 values of the first
    assert bounds.deep_ceiling([1, 1], 1, 8, 8) == both + 8 == 78
    assert bounds.deep_ceiling([1, 1], 8, 8, 8) == 2 * 64 + 8 + 64 + 8


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("heads", {"heads": []}),
        (r"heads\[1\]", {"heads": [2, 0]}),
        (r"heads\[0\]", {"heads": [2.5]}),
        ("head_dim", {"head_dim": 0}),
        ("value_dim", {"value_dim": -1}),
        ("dim", {"dim": 0}),
        ("outputs", {"outputs": 0}),
    ],
)
def test_sizes_that_no_network_has_are_refused_by_name(name, change):
    sizes = {"heads": [2, 1], "head_dim": 2, "value_dim": 2, "dim": 3}
    with pytest.raises(ValueError, match=f"^{name}: got"):
        bounds.deep_ceiling(**(sizes | change))
