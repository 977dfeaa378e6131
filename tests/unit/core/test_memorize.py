"""The steps of the construction on small data; the theorem itself is tested in tests/theory."""

import pytest
import torch

from attnmem import memorize_mha, mha, mha_attention
from attnmem.core import memorize

T, n, d, H, r = 13, 5, 11, 4, 4
F64 = {"dtype": torch.float64}


def data(shared, outputs=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    contexts = torch.rand(*(() if shared else (T,)), n, d, generator=g, **F64)
    return (
        contexts,
        torch.rand(T, d, generator=g, **F64),
        torch.rand(T, outputs, generator=g, **F64),
    )


KINDS = pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])


@KINDS
@pytest.mark.parametrize(("outputs", "value_dim", "skip"), [(1, None, False), (3, 6, True)])
def test_every_label_is_met(shared, outputs, value_dim, skip):
    E, e, y = data(shared, outputs)
    sizes = {"heads": H, "head_dim": r, "value_dim": value_dim}
    weights = memorize_mha(E, e, y, **sizes, skip=skip, seed=0)
    assert weights.W_V.shape == (H, d, value_dim or outputs)
    assert (mha(weights, E, e, skip=skip) - y).abs().max() < 1e-9


@KINDS
def test_heads_are_saturated_where_they_do_not_serve(shared):
    E, e, y = data(shared)
    weights = memorize_mha(E, e, y, heads=H, head_dim=r, seed=0)
    largest = mha_attention(weights, E, e).amax(-1)  # (T, H)
    serves = torch.zeros(T, H, dtype=torch.bool)
    serves[memorize.serve(T, H), torch.arange(H)[:, None]] = True
    assert (largest[~serves] > 1 - 1e-12).all()
    assert (largest[serves] < memorize.SATURATED).all()


@KINDS
def test_interpolating_keys_have_the_wanted_logits(shared):
    E, _, _ = data(shared)
    served = memorize.serve(T, H)
    logits = torch.randn(*served.shape, n, **F64)
    keys = memorize.interpolating_keys(E, served, logits)  # (H, d, k)
    contexts = E.expand(T, n, d)[served]
    torch.testing.assert_close(torch.einsum("hknd,hdk->hkn", contexts, keys), logits)


def test_dual_basis_tells_served_queries_apart():
    _, e, _ = data(shared=True)
    served = memorize.serve(T, H)
    duals, free = memorize.dual_basis(e, served)
    identity = torch.eye(served.shape[1], **F64).expand(H, -1, -1)
    torch.testing.assert_close(e[served] @ duals, identity)
    assert (e[served] @ free).abs().max() < 1e-12


def test_data_of_any_unit_have_the_same_layer():
    E, e, y = data(shared=False)
    weights = memorize_mha(E * 4.0**30, e * 4.0**-50, y * 4.0**40, heads=H, head_dim=r, seed=0)
    plain = memorize_mha(E, e, y, heads=H, head_dim=r, seed=0)
    outputs = mha(weights, E * 4.0**30, e * 4.0**-50)
    torch.testing.assert_close(outputs / 4.0**40, mha(plain, E, e), rtol=0, atol=1e-12)


def zero_query(E, e, y):
    e[3] = 0
    return E, e, y


REFUSED = {  # how data and sizes change, and what the error names
    "many": (lambda E, e, y: (E, e, y), {"heads": 3}, "labels: got T = 13 examples"),
    "values": (lambda E, e, y: (E, e, y.expand(-1, 2)), {"value_dim": 1}, "value_dim: got 1"),
    "zero": (zero_query, {}, "queries: got a zero vector"),
    "tokens": (lambda E, e, y: (torch.ones_like(E), e, y), {}, "contexts: got rank 1"),
    "repeated": (lambda E, e, y: (E, torch.ones_like(e), y), {}, "examples: got"),
}


@pytest.mark.parametrize(("change", "sizes", "message"), REFUSED.values(), ids=REFUSED)
def test_data_outside_the_theorem_are_refused(change, sizes, message):
    examples = change(*data(shared=True))
    with pytest.raises(ValueError, match=f"^{message}"):
        memorize_mha(*examples, **{"heads": H, "head_dim": r, "seed": 0} | sizes)
