"""Attention to pairs and its loss, with the gradients written out, against head-by-head sums."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from attnmem import experiments, training
from attnmem.attention import Maps, after_pairs, next_token_losses, pairs
from attnmem.training import transformers

SIZES = [  # R, H, d, d_h, d_o, N, B
    (1, 1, 1, 1, 1, 1, 1),
    (1, 1, 2, 1, 3, 2, 4),
    (2, 7, 3, 5, 2, 4, 9),
    (3, 5, 4, 2, 4, 6, 1),
    (2, 2, 6, 3, 5, 3, 40),
]


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def layer(sizes):
    """Maps, inputs, streams and tokens; the tokens repeat, and some pairs have two equal ones."""
    R, H, d, d_h, d_o, N, B = sizes
    maps = Maps(*(numbers(R, H, d_h, d) for _ in range(3)), numbers(R, H, d_o, d_h))
    tokens = torch.randint(N, (R, B, 2))
    tokens[:, 0] = N - 1
    return maps, numbers(R, 2, N, d), numbers(R, N, d_o), tokens


def head_by_head(maps, inputs, stream, tokens):
    """Softmax over both places, one run, head and pair at a time."""
    R, H = maps.W_Q.shape[:2]
    runs = []
    for r in range(R):
        columns = []
        for a, b in tokens[r].tolist():
            seen, out = torch.stack([inputs[r, 0, a], inputs[r, 1, b]]), stream[r, b]
            for h in range(H):
                W_Q, W_K, W_V, W_O = (W[r, h] for W in maps)
                alpha = (seen @ W_K.T @ (W_Q @ seen[1])).softmax(dim=0)
                out = out + W_O @ W_V @ (alpha @ seen)
            columns.append(out)
        runs.append(torch.stack(columns, dim=-1))
    return torch.stack(runs)


@pytest.mark.parametrize("road", [pairs.OUTER, pairs.WIDE])
@pytest.mark.parametrize("sizes", SIZES)
def test_both_roads_are_a_sum_over_heads(monkeypatch, road, sizes):
    monkeypatch.setattr(pairs, "_shorter_road", lambda *_: road)
    maps, *rest = layer(sizes)
    inputs = [*maps, *rest[:2]]
    ours, theirs = after_pairs(maps, *rest), head_by_head(maps, *rest)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(theirs)
    for mine, plain in zip(
        torch.autograd.grad(ours, inputs, direction),
        torch.autograd.grad(theirs, inputs, direction),
        strict=True,
    ):
        torch.testing.assert_close(mine, plain, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("H", "d", "d_o", "road"),
    [
        (10, 10, 10, pairs.WIDE),
        (11, 10, 10, pairs.OUTER),
        (7, 3, 9, pairs.OUTER),
        (6, 3, 9, pairs.WIDE),
        (1, 1, 1, pairs.WIDE),
        (9, 14, 5, pairs.WIDE),
    ],
)
def test_the_road_has_less_between_the_products(H, d, d_o, road):
    A, M = torch.empty(1, H, d, d), torch.empty(1, H, d_o, d)
    assert pairs._shorter_road(A, M) is road
    smaller = (d + d_o) * d < 2 * H * d
    assert (road is pairs.OUTER) == smaller


@pytest.mark.parametrize(("R", "N", "d", "B"), [(1, 1, 1, 1), (2, 5, 3, 7), (3, 4, 6, 50)])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_the_loss_is_cross_entropy(R, N, d, B, size):
    unembedding, stream = numbers(R, N, d), numbers(R, d, B)
    answers = torch.randint(N, (R, B))
    ours, logits = next_token_losses(size * unembedding, stream, answers)
    plain = F.cross_entropy(size * unembedding @ stream, answers, reduction="none").mean(dim=1)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits, size * unembedding @ stream)
    assert not logits.requires_grad
    weights = torch.randn(R, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad(ours, [unembedding, stream], weights),
        torch.autograd.grad(plain, [unembedding, stream], weights),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10 * size)


def test_a_loss_that_is_not_finite_stays_so():
    stream = torch.tensor([[[1.0, torch.nan]], [[1.0, 2.0]]])
    losses, _ = next_token_losses(torch.ones(2, 3, 1), stream, torch.zeros(2, 2, dtype=torch.long))
    assert losses.isnan().tolist() == [True, False]


def test_losses_refuse_a_second_gradient_and_attention_gives_it_again():
    """Arrays of the losses are used in place, so a second gradient would be wrong."""
    maps, *rest = layer(SIZES[3])
    stream = after_pairs(maps, *rest)
    first, second = (torch.autograd.grad(stream.sum(), maps, retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(stream.sum(), maps, create_graph=True)
    unembedding = numbers(3, 6, 4)
    losses, _ = next_token_losses(unembedding, numbers(3, 4, 1), torch.zeros(3, 1).long())
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(losses.sum(), unembedding, create_graph=True)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        losses.sum().backward()


@pytest.mark.parametrize("changed", range(6))
def test_what_changes_in_place_before_the_gradient_is_noticed(changed):
    maps, *rest = layer(SIZES[3])
    after = after_pairs(maps, *rest).sum()
    with torch.no_grad():
        [*maps, *rest][changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after.backward()


@pytest.mark.parametrize("changed", [0, 1])
def test_losses_notice_what_changes_in_place_before_the_gradient(changed):
    given = numbers(3, 6, 4), numbers(3, 4, 1)
    losses, _ = next_token_losses(*given, torch.zeros(3, 1).long())
    with torch.no_grad():
        given[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


@pytest.mark.parametrize("variant", training.VARIANTS)
@pytest.mark.parametrize("sizes", [{"H": 3, "d_h": 5}, {"H": 7, "d_h": 3}, {"H": 2, "d_h": 2}])
@pytest.mark.parametrize("width", [None, 4])
def test_tables_of_tokens_change_nothing_but_rounding(monkeypatch, variant, sizes, width):
    [run, *_] = experiments.runs("dana-exp1", "paper", where={"d": 5, "H": 6})
    model = "mlp" if width else "aot"
    run = dataclasses.replace(run, model=model, variant=variant, N=6, width=width, **sizes)
    P = {
        name: torch.stack([x, x + 0.1]).double().requires_grad_()
        for name, x in training.aot_parameters(run, training.generator(run, "weights")).items()
    }
    tokens, answers = torch.randint(6, (2, 30, 2)), torch.randint(6, (2, 30))

    def losses_and_gradients():
        losses, _, gradient = transformers.aot_losses(P, run, tokens, answers)
        return losses.sum(), gradient(torch.ones_like(losses))

    monkeypatch.setattr(transformers, "_narrow", lambda P: False)
    ours, found = losses_and_gradients()
    monkeypatch.setattr(transformers, "_narrow", lambda P: True)
    logits = training.aot_logits(P, run, tokens)
    plain = F.cross_entropy(logits, answers, reduction="none").mean(dim=1).sum()
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(plain, [*P.values()])
    for name, mine, theirs in zip(P, found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12, msg=name)
