"""Attention to pairs and its loss, with the gradients written out, against head-by-head sums."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from attnmem.lab import data, experiments, models, pairs
from attnmem.lab.embedded import cross_entropy_vjp
from attnmem.lab.models import aot_logits_of_pairs, aot_losses
from attnmem.lab.pairs import after_pairs, attend_to_one, attend_to_two

from plain import BigramModel

SIZES = [  # R, H, d, d_h, d_o, N, B; the second, the fifth and the last take many heads
    (1, 1, 1, 1, 1, 1, 1),
    (2, 7, 3, 5, 2, 4, 9),
    (1, 1, 2, 1, 3, 2, 4),
    (3, 5, 4, 2, 4, 6, 1),
    (1, 8, 2, 2, 13, 3, 5),
    (2, 2, 6, 3, 5, 3, 40),
    (3, 9, 5, 1, 11, 3, 4),
]


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def layer(sizes):
    """Maps, inputs, streams and tokens; the tokens repeat, and some pairs have two equal ones."""
    R, H, d, d_h, d_o, N, B = sizes
    maps = [*(numbers(R, H, d_h, d) for _ in range(3)), numbers(R, H, d_o, d_h)]
    tokens = torch.randint(N, (R, B, 2))
    tokens[:, 0] = N - 1
    return maps, numbers(R, 2, N, d), numbers(R, N, d_o), tokens


def head_by_head(maps, first, second):
    """What the second token gets by the softmax over both, one run, head and pair at a time."""
    R, H = maps[0].shape[:2]
    runs = []
    for r in range(R):
        columns = []
        for seen in zip(first[r].T, second[r].T, strict=True):
            seen, out = torch.stack(seen), 0
            for h in range(H):
                W_Q, W_K, W_V, W_O = (W[r, h] for W in maps)
                alpha = (seen @ W_K.T @ (W_Q @ seen[1])).softmax(dim=0)
                out = out + W_O @ W_V @ (alpha @ seen)
            columns.append(out)
        runs.append(torch.stack(columns, dim=-1))
    return torch.stack(runs)


def looked_up(table, tokens):
    return torch.stack([rows[chosen].T for rows, chosen in zip(table, tokens, strict=True)])


def assert_same(ours, theirs, inputs):
    """Equal values, and equal gradients in a random direction."""
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(theirs)
    for mine, plain in zip(
        *(torch.autograd.grad(y, inputs, direction, retain_graph=True) for y in (ours, theirs)),
        strict=True,
    ):
        assert mine.shape == plain.shape
        torch.testing.assert_close(mine, plain, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sizes", SIZES)
def test_attention_to_pairs_of_a_vocabulary_is_a_sum_over_heads(sizes):
    maps, inputs, stream, tokens = layer(sizes)
    a, b = tokens.unbind(-1)
    seen = looked_up(inputs[:, 0], a), looked_up(inputs[:, 1], b)
    theirs = looked_up(stream, b) + head_by_head(maps, *seen)
    assert_same(after_pairs(*maps, inputs, stream, tokens), theirs, [*maps, inputs, stream])


@pytest.mark.parametrize("sizes", SIZES)
def test_attention_to_two_vectors_is_a_sum_over_heads(sizes):
    R, _, d, _, _, _, B = sizes
    maps, (first, second) = layer(sizes)[0], (numbers(R, d, B), numbers(R, d, B))
    theirs = head_by_head(maps, first, second)
    assert_same(attend_to_two(*maps, first, second), theirs, [*maps, first, second])
    alone = head_by_head(maps, second, second)
    assert_same(attend_to_one(*maps[2:], second), alone, [*maps[2:], second])


@pytest.mark.parametrize("H", [2, 5])  # few heads and many
def test_the_written_out_gradient_against_finite_differences(H):
    def heads(*inputs):
        return pairs._WrittenOut.apply(pairs.heads_vjp, *inputs)

    inputs = [numbers(2, H, 3, 3), numbers(2, H, 2, 3), numbers(2, 3, 7), numbers(2, 3, 7)]
    assert torch.autograd.gradcheck(heads, inputs)


@pytest.mark.parametrize(("R", "N", "B"), [(1, 1, 1), (2, 5, 7), (3, 4, 50)])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_the_loss_is_cross_entropy(R, N, B, size):
    logits, answers = numbers(R, N, B), torch.randint(N, (R, B))
    weights = torch.randn(R, 1, 1, dtype=torch.float64)
    with torch.no_grad():
        ours, gradient = cross_entropy_vjp(size * logits, answers)
        found = gradient(weights)
    plain = F.cross_entropy(size * logits, answers, reduction="none")
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    [expected] = torch.autograd.grad(plain, logits, weights[:, 0].expand_as(plain))
    torch.testing.assert_close(size * found, expected, rtol=1e-10, atol=1e-10 * size)


def test_a_loss_that_is_not_finite_stays_so():
    logits = torch.tensor([[[1.0, torch.nan], [1.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]]])
    losses, _ = cross_entropy_vjp(logits, torch.zeros(2, 2).long())
    assert losses.isnan().tolist() == [[False, True], [False, False]]


def test_attention_gives_its_gradient_again_but_no_second_derivative():
    maps, *rest = layer(SIZES[3])
    stream = after_pairs(*maps, *rest)
    first, second = (torch.autograd.grad(stream.sum(), maps, retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(stream.sum(), maps, create_graph=True)


@pytest.mark.parametrize("changed", range(7))
def test_what_changes_in_place_before_the_gradient_is_noticed(changed):
    maps, *rest = layer(SIZES[3])
    after = after_pairs(*maps, *rest).sum()
    with torch.no_grad():
        [*maps, *rest][changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after.backward()


@pytest.mark.parametrize("variant", models.VARIANTS)
@pytest.mark.parametrize("sizes", [{"H": 3, "d_h": 5}, {"H": 7, "d_h": 3}, {"H": 2, "d_h": 2}])
@pytest.mark.parametrize(("width", "layers"), [(None, 1), (4, 1), (None, 2), (4, 3)])
def test_losses_logits_and_gradients_are_those_of_the_plain_model(variant, sizes, width, layers):
    [run, *_] = experiments.runs("dana-exp1", "paper", where={"d": 5, "H": 6})
    change = {"model": "mlp" if width else "aot", "variant": variant, "N": 6}
    run = dataclasses.replace(run, width=width, layers=layers, **change, **sizes)
    P = models.aot_parameters(run, data.generator(run, "weights"))
    P = {name: torch.stack([x, x + 0.1]).double().requires_grad_() for name, x in P.items()}
    tokens, answers = torch.randint(6, (2, 30, 2)), torch.randint(6, (2, 30))
    losses, logits, gradient = aot_losses(P, run, tokens, answers)
    found = gradient(torch.ones_like(losses))
    every = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    of_pairs = aot_logits_of_pairs(P, run, torch.arange(6))
    for r in range(2):
        plain = BigramModel(run, {name: x.detach()[r] for name, x in P.items()}).double()
        outputs = plain(tokens[r])
        loss = F.cross_entropy(outputs, answers[r])
        torch.testing.assert_close(losses[r], loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(logits[r].T, outputs, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(of_pairs[r].T, plain(every), rtol=1e-11, atol=1e-12)
        loss.backward()
        for name, mine in zip(P, found, strict=True):
            theirs = plain.P[name.replace(".", "_")].grad
            torch.testing.assert_close(mine[r], theirs, rtol=1e-9, atol=1e-12, msg=name)
