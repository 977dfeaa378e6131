"""Layers that start at random and descend, against PyTorch's own loop."""

import math

import pytest
import torch
import torch.nn.functional as F

from attnmem import MHAWeights, descend, mha, xavier


def test_xavier_layers_are_uniform_within_the_bounds():
    H, d, d_h = 13, 61, 31
    weights = xavier(H, d, d_h, 37, seed=0)
    fans = {"W_Q": d + d_h, "W_K": d + d_h, "W_V": d + 1, "W_O": H + d, "W_D": d + 37}
    for name, W in weights._asdict().items():
        shares = W.flatten() / math.sqrt(6 / fans[name])
        assert shares.abs().max() <= 1 + 1e-6, name
        assert shares.square().mean() == pytest.approx(1 / 3, abs=0.03), name
        assert shares.mean() == pytest.approx(0, abs=0.06), name
    assert not torch.equal(weights.W_Q, weights.W_K)
    assert not torch.equal(weights.W_Q, xavier(H, d, d_h, 37, seed=1).W_Q)


@pytest.mark.parametrize(("outputs", "shared"), [(1, True), (4, False)])
def test_descend_is_adam_along_a_cosine(outputs, shared):
    """Of the mean square for real labels, of the mean cross-entropy for classes; in float64."""
    g = torch.Generator().manual_seed(0)
    start = MHAWeights(*(W.double() for W in xavier(3, 5, 2, outputs, seed=0)))
    contexts = torch.rand(*(() if shared else (7,)), 4, 5, generator=g).double()
    queries = torch.rand(7, 5, generator=g).double()
    labels = torch.rand(7, generator=g).double() if outputs == 1 else torch.arange(7) % outputs
    last, losses = descend(start, contexts, queries, labels, steps=20, lr=0.05)

    leaves = [W.clone().requires_grad_() for W in start]
    optimizer = torch.optim.Adam(leaves, lr=1.0)
    for step in range(20):
        computed = mha(MHAWeights(*leaves), contexts, queries)
        if outputs == 1:
            loss = F.mse_loss(computed[:, 0], labels)
        else:
            loss = F.cross_entropy(computed, labels)
        assert losses[step].item() == pytest.approx(loss.item(), rel=1e-9)
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / 20)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for ours, plain in zip(last, leaves, strict=True):
        torch.testing.assert_close(ours, plain.detach(), rtol=1e-7, atol=1e-9)
    assert losses.shape == (20,)
    assert not any(W.requires_grad for W in start)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 1.01}, r"lr: got 1\.01"),
        ({"contexts": torch.rand(4, 6)}, r"contexts: got d = 6 \(shape \(4, 6\)\)"),
        ({"labels": torch.rand(6)}, r"labels: got T = 6"),
        ({"labels": torch.rand(7, 1)}, r"labels: got shape \(7, 1\)"),
    ],
)
def test_descend_refuses_what_does_not_fit(change, message):
    arguments = {"contexts": torch.rand(4, 5), "queries": torch.rand(7, 5), "labels": torch.rand(7)}
    with pytest.raises(ValueError, match=f"^{message}"):
        descend(xavier(3, 5, 2, 1, seed=0), steps=2, **arguments | {"lr": 1.0} | change)
