"""Steps of the construction of several layers: where heads stand, silent weights, coordinates."""

import pytest
import torch

from attnmem import deep
from attnmem.theory import depth
from attnmem.theory.deep_bounds import DeepGroups

from oracles import F64, gaussian

T, N, D = 6, 3, 5


def silent(family, tokens):
    """The outputs without a step, less what the read-out sees in the tokens themselves."""
    return (
        deep(family.network(torch.zeros(family.n_steps, **F64)), tokens)[:, 0] - tokens[:, -1, -1]
    )


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        ([[2, 1], [1, 1]], [[0, 1, 3], [2, 4]]),
        ([[3]], [[0, 1, 2]]),
        ([[0, 1], [2, 0], [1, 1]], [[3], [0, 1], [2, 4]]),
    ],
)
def test_places(layers, numbers):
    assert depth.places(layers) == numbers


@pytest.mark.parametrize("sizes", [[[2, 1], [1, 1]], [[1], [], [2]], [[2, 3]]])
def test_spanning_is_silent_without_a_step(sizes):
    """Whatever the size of the step; an idle layer is left out."""
    groups, g = DeepGroups(0, sizes), torch.Generator().manual_seed(0)
    family = depth.spanning(groups, D, 2, 4, 2.0, 0.3, g)
    assert silent(family, gaussian(1, T, N, D)).abs().max() < 1e-10
    network = family.network(torch.ones(family.n_steps, **F64))
    assert len(network.layers) == sum(map(bool, sizes))
    reads_w = [bool(layer.W_K[:, -1].any()) for layer in network.layers]
    assert reads_w == [len(network.layers) == 1] * len(network.layers)


@pytest.mark.parametrize("scale", [1e-100, 1.0, 1e100])
def test_balanced_and_back(scale):
    """The network on the data is that in balanced coordinates, with idle heads and layers."""
    tokens, labels = scale * gaussian(0, T, N, D), gaussian(1, T) / scale
    tokens[..., 0] *= 1e-5  # a direction that one map would not balance
    data = depth.balanced(tokens, labels)
    rows = data.tokens.flatten(0, 1)
    torch.testing.assert_close(rows.T @ rows / len(rows), torch.eye(D, **F64), atol=1e-6, rtol=0)
    groups, g = DeepGroups(0, [[2], [], [1]]), torch.Generator().manual_seed(0)
    family = depth.spanning(groups, D, 2, 1, 2.0, 0.3, g)
    network = family.network(gaussian(2, family.n_steps))
    outward = depth._outward(network, data, groups, (3, 2, 1), 6, 2)
    assert [layer.W_V.shape for layer in outward.layers] == [(H, D, 2) for H in (3, 2, 1)]
    assert outward.layers[0].W_Q.shape == (3, D, 6)
    wanted = data.label_unit * deep(network, data.tokens)
    torch.testing.assert_close(deep(outward, tokens), wanted, rtol=1e-9, atol=0)
