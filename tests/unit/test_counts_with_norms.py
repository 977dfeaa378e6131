"""What norms, MLPs and positions add to the count of several layers, against ranks in float64.

Of those with a norm before the read-out the chapter ``answer/models`` proves upper bounds.
"""

import pytest
import torch
from torch.func import jacrev, vmap

from attnmem.theory.independence import numerical_rank


def normed(x, norm):
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x / x.square().mean(-1, keepdim=True).sqrt() if norm else x


def output(weights, x, norm, last):
    """At the last token of one context; weights are those of shapes(...), behind positions."""
    x, *weights, W_D = x + weights[0], *weights[1:]
    while weights:
        W_Q, W_K, W_V, W_O, *weights = weights
        z = normed(x, norm)
        A = torch.softmax(z @ W_Q @ (z @ W_K).mT, -1)
        x = x + (A @ (z @ W_V) @ W_O).sum(0)
        if weights and weights[0].ndim == 2:  # an MLP
            W_1, b_1, W_2, b_2, *weights = weights
            x = x + torch.nn.functional.gelu(normed(x, norm) @ W_1 + b_1) @ W_2 + b_2
    return (normed(x, norm) if last else x)[-1] @ W_D


def shapes(L, H, d, d_h, d_v, q):
    heads = [(H, d, d_h), (H, d, d_h), (H, d, d_v), (H, d_v, d)]
    mlp = [(d, q), (q,), (q, d), (d,)] if q else []
    return (L - 1) * (heads + mlp) + heads + [(d,)]


def count(norm, last, q, positions, L, H, n, d, d_h, d_v):
    """The parameters that matter, if every direction is read."""
    m = d - (norm == "layer")  # what a layer reads
    end = m if last else d  # what the read-out reads
    s = end if norm == "layer" else d  # what is seen of inner layers
    r, total = min(d_h, m), end + positions * n * m
    for layer in range(1, L + 1):
        seen = s if layer < L or last else 1
        v = min(d_v, m, seen)
        total += H * (r * (2 * m - r) + v * (m + seen - v))
    mlps = (L - 1) * bool(q)
    if norm == "layer" and not last:  # one sum of all along (1, ..., 1)
        total += positions - max(0, mlps + positions - 1)
    return total + mlps * (q * (m + 1 + s) + s)


def rank(norm, last, q, positions, L, H, n, d, d_h, d_v):
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        size = 1.2 / shape[-2] ** 0.5 if shape[1:] else 1
        return size * torch.randn(shape, generator=g, dtype=torch.float64)

    weights = [draw(*shape) for shape in shapes(L, H, d, d_h, d_v, q)]
    place = positions * draw(n, d)
    moved = [place, *weights] if positions else weights
    examples = int(1.3 * count(norm, last, q, positions, L, H, n, d, d_h, d_v)) + 10
    X = torch.randn(examples, n, d, generator=g, dtype=torch.float64)

    def f(W, x):
        return output(W if positions else [place, *W], x, norm, last)

    J = torch.cat([part.flatten(1) for part in vmap(jacrev(f), (None, 0))(moved, X)], 1)
    return numerical_rank(J / J.norm(dim=0).clamp_min(1e-300))


EQUAL = [  # norm, last (the read-out is behind a norm), q, positions, L, H, n, d, d_h, d_v
    ("rms", False, 0, False, 2, 2, 3, 5, 2, 1),
    ("rms", True, 0, False, 2, 1, 2, 6, 1, 3),
    ("rms", True, 3, False, 3, 1, 2, 5, 1, 2),
    ("rms", False, 0, True, 2, 2, 3, 4, 3, 2),
    ("layer", False, 0, False, 2, 3, 2, 4, 1, 2),
    ("layer", True, 0, False, 3, 1, 3, 5, 2, 2),
    ("layer", True, 3, False, 2, 1, 3, 5, 2, 2),
    ("layer", False, 2, False, 3, 1, 2, 4, 2, 1),
    (None, False, 3, False, 2, 2, 3, 5, 3, 1),
    (None, False, 1, False, 3, 2, 3, 4, 2, 1),
    (None, False, 0, True, 2, 2, 3, 5, 3, 2),
    (None, False, 2, True, 2, 2, 3, 4, 2, 2),
    ("layer", True, 0, True, 1, 1, 3, 6, 2, 1),
    ("layer", False, 0, True, 2, 1, 2, 4, 2, 2),
    ("layer", False, 3, True, 2, 1, 3, 5, 2, 2),
    ("layer", True, 3, True, 2, 2, 4, 4, 2, 2),
]
TOO_LARGE = {  # few directions are read without a norm; or a norm leaves only a sign
    (None, False, 2, False, 3, 1, 4, 4, 3, 2): (121, 120),
    (None, False, 0, True, 2, 1, 3, 4, 1, 2): (46, 45),
    (None, False, 1, True, 2, 1, 4, 6, 3, 1): (120, 115),
    ("rms", True, 0, False, 2, 2, 3, 1, 1, 1): (9, 5),
    ("layer", False, 0, False, 2, 2, 3, 2, 1, 1): (12, 5),
}


@pytest.mark.parametrize("network", EQUAL)
def test_the_count_is_the_rank(network):
    assert count(*network) == rank(*network)


@pytest.mark.parametrize(("network", "found"), TOO_LARGE.items())
def test_where_few_directions_are_read_or_left_the_count_is_too_large(network, found):
    assert (count(*network), rank(*network)) == found
