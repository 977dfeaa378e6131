"""The cheapest orders of products equal the formula of the core."""

import pytest
import torch

from attnmem.core import layers
from attnmem.theory import products

H = 3
SIZES = {  # B, n, d, d_h, d_v: at each another order is the cheapest
    "primes": (17, 19, 11, 5, 7),
    "one-example": (1, 3, 11, 7, 1),
    "few-examples": (2, 3, 11, 7, 5),
    "wide-heads": (97, 3, 11, 11, 2),
    "narrow-heads": (97, 7, 11, 3, 2),
    "long-context": (97, 19, 11, 13, 1),
}


def draw(*shape):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64
    )


@pytest.mark.parametrize("runs", [(), (2,)], ids=["one", "runs"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize(("B", "n", "d", "d_h", "d_v"), SIZES.values(), ids=SIZES)
def test_products_equal_the_formula(B, n, d, d_h, d_v, shared, runs):
    W_Q, W_K, W_V = draw(*runs, H, d, d_h), draw(*runs, H, d, d_h).flip(-1), draw(*runs, H, d, d_v)
    context = draw(*runs, n, d) / d if shared else draw(*runs, B, n, d) / d
    query = draw(*runs, B, d)
    alpha, z = layers.attend(W_Q, W_K, context, query)
    close = {"rtol": 1e-12, "atol": 1e-12}  # a few hundred roundings of float64
    torch.testing.assert_close(products.attend(W_Q, W_K, context, query), (alpha, z), **close)
    axes = products.token_axes(context, query)
    values = products.head_values(alpha, context, W_V, axes)
    torch.testing.assert_close(values, torch.einsum("...bhd,...hdv->...bhv", z, W_V), **close)
