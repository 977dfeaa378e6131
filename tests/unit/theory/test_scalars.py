"""Labels in the attention: what the carrier's attention is, and where heads are idle."""

import pytest
import torch

from attnmem import mha, mha_attention
from attnmem.theory import scalars

F64 = {"dtype": torch.float64}
N, D = 4, 5


def drawn(T, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g, **F64) for shape in ((N, D), (T, D), (T,))]


@pytest.mark.parametrize(("T", "H"), [(8, 2), (5, 2), (1, 3)])
def test_attention_is_the_label_or_idle(T, H):
    """Where a head serves, the carrier's attention rises with the label from 1/4 to 3/4."""
    E, e, y = drawn(T)
    weights = scalars.memorize_scalars(E, e, y, heads=H)
    assert (mha(weights, E, e)[:, 0] - y).abs().max() < 1e-10
    attention = mha_attention(weights, E, e)
    served = torch.arange(T).tensor_split(H)
    for head, group in enumerate(served):
        share = torch.full((T,), 0.25, **F64) + (y - y.min()) / (2 * (y.max() - y.min()) + 1e-300)
        torch.testing.assert_close(attention[group, head, 0], share[group])
        if len(group):
            idle = [t for t in range(T) if t not in group]
            assert (attention[idle, head][:, 1:3].amax(-1) > 1 - 1e-12).all()


@pytest.mark.parametrize("labels", [[2.0, 2.0, 2.0], [-1.0, 0.0, 3.0]])
def test_carrier_logits_and_values_tell_the_labels(labels):
    y = torch.tensor(labels, **F64)
    E, lift = drawn(3)[0], torch.linalg.pinv(drawn(3)[0])
    logits = torch.stack([scalars.carrier_logits(y, N), *torch.zeros(N - 1, 3, **F64)])
    attention = torch.softmax(logits, 0)
    answers = E @ scalars.values(y, lift, 2).T  # what each head says of each token
    told = attention.T @ answers[:, 0] + answers[1, 1]  # one head serves, one is idle
    torch.testing.assert_close(told, y)
