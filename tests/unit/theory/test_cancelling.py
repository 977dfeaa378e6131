"""Heads that cancel, the steps away from them, and which of the weights tried are kept."""

import math

import pytest
import torch

from attnmem import mha
from attnmem.theory import cancelling
from attnmem.theory.tangents import ScalarHeads, scalar_outputs, tangents

F64 = {"dtype": torch.float64}
T, N, D, D_H = 7, 3, 5, 2


@pytest.fixture
def data():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=g, **F64) for shape in ((T, N, D), (T, D), (T,))]


@pytest.fixture
def base(data):
    contexts, queries, labels = data
    heads = cancelling.draw_base([2, 3], D, D_H, 2.0, torch.Generator().manual_seed(1))
    return cancelling.linearized(heads, tangents(heads, contexts, queries), labels)


def test_base_is_silent_in_each_group(data, base):
    contexts, queries, _ = data
    for group in (slice(0, 2), slice(2, 5)):
        part = ScalarHeads(*(W[group] for W in base.heads))
        assert scalar_outputs(part, contexts, queries).abs().max() < 1e-12
        assert all(torch.equal(W[0], W[1]) for W in part[:2])
    assert not torch.equal(base.heads.W_Q[0], base.heads.W_Q[2])


@pytest.mark.parametrize("spread", [0.5, 8.0])
@pytest.mark.parametrize("dim", [1, 6])
def test_base_has_logits_of_its_spread(spread, dim):
    g = torch.Generator().manual_seed(0)
    heads = cancelling.draw_base([1] * 3000, dim, min(dim, 2), spread, g)
    x, e = (torch.randn(3000, dim, generator=g, **F64) for _ in range(2))
    logits = ((x[:, None] @ heads.W_K) * (e[:, None] @ heads.W_Q)).sum(-1)
    assert float(logits.square().mean().sqrt()) == pytest.approx(spread, rel=0.1)


def test_linearized_step_has_the_right_derivative(data, base):
    contexts, queries, labels = data
    J = torch.cat(tangents(base.heads, contexts, queries).parts(), 1)
    step = torch.cat([W.flatten() for W in base.step])
    torch.testing.assert_close(step, torch.linalg.pinv(J) @ labels)  # the shortest
    assert base.size == pytest.approx(math.sqrt(sum(W.square().mean() for W in base.step)))


def test_linearized_none_where_examples_repeat(data, base):
    contexts, queries, labels = (x[[0, 0, 1]] for x in data)
    derivative = tangents(base.heads, contexts, queries)
    assert cancelling.linearized(base.heads, derivative, labels) is None


def test_near_meets_labels_by_ever_shorter_steps(data, base):
    contexts, queries, labels = data
    steps = list(cancelling.near(base, lambda w: scalar_outputs(w, contexts, queries), labels))
    assert len(steps) == 8
    heads, error = min(steps, key=lambda step: step[1])
    assert error < 1e-10
    assert (scalar_outputs(heads, contexts, queries) - labels).abs().max() == error
    moved = [float((heads.W_Q - base.heads.W_Q).abs().max()) for heads, _ in steps]
    assert moved == sorted(moved, reverse=True)


@pytest.mark.parametrize("examples", [0, 3])
def test_near_zeros(data, base, examples):
    """One answer, all values zero; none without labels."""
    zero = base._replace(size=0.0)
    steps = list(cancelling.near(zero, lambda _: pytest.fail("asked"), torch.zeros(examples)))
    assert len(steps) == min(examples, 1)
    for heads, error in steps:
        assert not heads.mu.any()
        assert error == 0


def test_corrected_gives_up_where_outputs_are_nan(base):
    nothing = cancelling.corrected(base, lambda _: torch.full((T,), math.nan), torch.ones(T), 1.0)
    assert nothing == (None, math.inf)


@pytest.mark.parametrize(
    ("errors", "enough", "kept", "tried"),
    [
        ((3.0, 1.0, 2.0), 0.0, 1.0, 3),
        ((3.0, 1.0, 0.5), 1.0, 1.0, 2),
        ((math.nan, math.inf, 2.0), 0.0, 2.0, 3),
        ((math.nan, math.inf), 0.0, math.inf, 2),
        ((2.0, 2.0), 0.0, 2.0, 2),
    ],
)
def test_closest(errors, enough, kept, tried):
    attempts = iter(enumerate(errors))
    weights, error = cancelling.closest(attempts, enough)
    assert error == kept
    assert weights == (errors.index(kept) if kept < math.inf else None)
    assert len(errors) - len(list(attempts)) == tried


def test_side_by_side(data, base):
    """Each output is that of its own layer; a head left over is idle, maps are widened."""
    contexts, queries, _ = data
    layers = [base.heads, base.heads.moved(base.step)]
    weights = cancelling.side_by_side(layers, 11, 4)
    assert [W.shape for W in weights] == [(11, D, 4), (11, D, 4), (11, D, 1), (11, 2), (2, 2)]
    alone = [scalar_outputs(layer, contexts, queries) for layer in layers]
    torch.testing.assert_close(mha(weights, contexts, queries), torch.stack(alone, 1))
    assert not any(W[10].any() for W in weights[:4])
