"""Gradients by hand against sums head by head and autograd; without them all trains, too."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from attnmem.lab import data, experiments, gradients, models
from attnmem.lab.gradients import written_out
from attnmem.lab.models import ACCELERATORS

from plain import memorization_run


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


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


def assert_accelerated(P, run, *batch, weights):
    """The accelerator's losses, outputs and gradients are those of autograd."""
    accelerated = ACCELERATORS[run.model, run.variant](P, run, *batch)
    plain = models.by_autograd(P, run, *batch)
    for ours, theirs in zip(accelerated[:2], plain[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    pairs = zip(P, accelerated[2](weights), plain[2](weights), strict=True)
    for name, ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=name)


# --- pairs of tokens ------------------------------------------------------------------------------

SIZES = [  # R, H, d, d_h, d_o, N, B; the second, the fifth and the last take many heads
    (1, 1, 1, 1, 1, 1, 1),
    (2, 7, 3, 5, 2, 4, 9),
    (1, 1, 2, 1, 3, 2, 4),
    (3, 5, 4, 2, 4, 6, 1),
    (1, 8, 2, 2, 13, 3, 5),
    (2, 2, 6, 3, 5, 3, 40),
    (3, 9, 5, 1, 11, 3, 4),
]


def layer(sizes):
    """Maps, inputs, streams and tokens; the tokens repeat, and some pairs have two equal ones."""
    R, H, d, d_h, d_o, N, B = sizes
    maps = [*(numbers(R, H, d_h, d) for _ in range(3)), numbers(R, H, d_o, d_h)]
    tokens = torch.randint(N, (R, B, 2))
    tokens[:, 0] = N - 1
    return maps, numbers(R, 2, N, d), numbers(R, N, d_o), tokens


def looked_up(table, tokens):
    return torch.stack([rows[chosen].T for rows, chosen in zip(table, tokens, strict=True)])


@pytest.mark.parametrize("sizes", SIZES)
def test_after_pairs_is_a_sum_of_softmaxes(sizes):
    """One run, head and pair at a time."""
    maps, inputs, stream, tokens = layer(sizes)
    first, second = (looked_up(inputs[:, i], tokens[..., i]) for i in range(2))
    runs = []
    for r in range(sizes[0]):
        columns = []
        for pair in zip(first[r].T, second[r].T, strict=True):
            seen, out = torch.stack(pair), 0
            for W_Q, W_K, W_V, W_O in zip(*(W[r] for W in maps), strict=True):
                alpha = (seen @ W_K.T @ (W_Q @ seen[1])).softmax(dim=0)
                out = out + W_O @ W_V @ (alpha @ seen)
            columns.append(out)
        runs.append(torch.stack(columns, dim=-1))
    theirs = looked_up(stream, tokens[..., 1]) + torch.stack(runs)
    ours = written_out(gradients.after_pairs_vjp, *maps, inputs, stream, tokens)
    assert_same(ours, theirs, [*maps, inputs, stream])


def test_written_out_has_no_second_derivative():
    """The first is given again."""
    maps, *rest = layer(SIZES[3])
    stream = written_out(gradients.after_pairs_vjp, *maps, *rest)
    first, second = (torch.autograd.grad(stream.sum(), maps, retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    again = torch.autograd.grad(stream.square().sum(), maps, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        again[0].sum().backward()


@pytest.mark.parametrize("changed", [0, 4, 6])
def test_written_out_notices_arguments_changed_in_place(changed):
    maps, *rest = layer(SIZES[3])
    after = written_out(gradients.after_pairs_vjp, *maps, *rest).sum()
    with torch.no_grad():
        [*maps, *rest][changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after.backward()


@pytest.mark.parametrize(("R", "N", "B"), [(1, 1, 1), (2, 5, 7), (3, 4, 50)])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_cross_entropy_is_torchs(R, N, B, size):
    logits, answers = numbers(R, N, B), torch.randint(N, (R, B))
    weights = torch.randn(R, 1, 1, dtype=torch.float64)
    with torch.no_grad():
        ours, gradient = gradients.cross_entropy_vjp(size * logits, answers)
        g_logits = gradient(weights)
    plain = F.cross_entropy(size * logits, answers, reduction="none")
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    [expected] = torch.autograd.grad(plain, logits, weights[:, 0].expand_as(plain))
    torch.testing.assert_close(size * g_logits, expected, rtol=1e-10, atol=1e-10 * size)


@pytest.mark.parametrize("variant", models.VARIANTS)
@pytest.mark.parametrize("sizes", [{"H": 3, "d_h": 5}, {"H": 7, "d_h": 3}, {"H": 2, "d_h": 2}])
@pytest.mark.parametrize(("width", "layers"), [(None, 1), (4, 1), (None, 2), (4, 3)])
def test_transformers_are_accelerated(variant, sizes, width, layers):
    [run, *_] = experiments.runs("dana-exp1", "paper", where={"d": 5, "H": 6})
    change = {"model": "mlp" if width else "aot", "variant": variant, "N": 6}
    run = dataclasses.replace(run, width=width, layers=layers, **change, **sizes)
    P = models.initial_aot(run, data.generator(run, "weights"))
    P = {name: torch.stack([x, x + 0.1]).double().requires_grad_() for name, x in P.items()}
    tokens, answers = torch.randint(6, (2, 30, 2)), torch.randint(6, (2, 30))
    assert_accelerated(P, run, tokens, answers, weights=numbers(2, 30).detach())


# --- contexts and queries -------------------------------------------------------------------------

SMALL = {"H": 3, "n": 4, "d": 5, "d_h": 3}


def model_and_data(context, N, B=23, **sizes):
    """A run, weights of two, contexts, queries and labels, in float64."""
    run = memorization_run(context=context, N=N, **SMALL | sizes)
    drawn = models.initial_mha(run, data.generator(run, "weights")).items()
    P = {name: torch.stack([W, 3 * W]).double().requires_grad_() for name, W in drawn}
    contexts = numbers(2, *(() if context == "shared" else (B,)), run.n, run.d).detach()
    labels = torch.randint(N, (2, B)) if N else numbers(2, B).detach()
    return run, P, contexts, numbers(2, B, run.d).detach(), labels


CONTEXTS = pytest.mark.parametrize("context", ["shared", "random"])


@pytest.mark.parametrize("sizes", [{}, {"n": 1, "H": 1}, {"d": 7, "d_h": 11, "n": 6, "B": 1}])
@CONTEXTS
@pytest.mark.parametrize("N", [None, 7])
def test_heads_on_contexts_are_accelerated(context, N, sizes):
    run, P, *batch = model_and_data(context, N, **sizes)
    weights = numbers(*batch[-1].shape).detach()
    weights[:, -1] = 0  # an example that does not count
    assert_accelerated(P, run, *batch, weights=weights)


@CONTEXTS
def test_large_logits_have_finite_gradients(context):
    """Heads look at one token only, and one class has all the probability."""
    run, P, *batch = model_and_data(context, 7)
    P = {name: 300 * W.detach() for name, W in P.items()}
    losses, outputs, gradient = gradients.mha_losses(P, run, *batch)
    torch.testing.assert_close(losses, F.cross_entropy(outputs, batch[-1], reduction="none"))
    assert all(g.isfinite().all() for g in gradient(torch.ones_like(losses)))


@CONTEXTS
def test_a_run_that_is_not_finite_leaves_the_others(context):
    run, P, *batch = model_and_data(context, 7)
    both = []
    for first in (1.0, torch.nan):
        with torch.no_grad():
            P["W_Q"][0, 0, 0, 0] = first
        losses, _, gradient = gradients.mha_losses(P, run, *batch)
        both.append([losses, *gradient(torch.ones_like(losses))])
    whole, broken = both
    assert broken[0][0].isnan().all()
    assert all(torch.equal(ours[1], theirs[1]) for ours, theirs in zip(broken, whole, strict=True))


# --- without the file -----------------------------------------------------------------------------

WITHOUT = """
import sys
sys.modules["attnmem.lab.gradients"] = None
from attnmem.lab import experiments, models
assert not models.ACCELERATORS
print(experiments.run("dana-exp6", "quick", "cpu", seeds=1, where={"H": 5}))
"""


def test_the_file_can_be_taken_out(store):
    """A process that does not find it trains by autograd, to the same row up to rounding."""
    environment = {**os.environ, "ATTNMEM_COMMIT": "abc"}
    words = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"
    then, now = experiments.repeat("dana-exp6", "quick", where={"H": 5})
    assert then == pytest.approx(now, abs=0.005)
    assert ACCELERATORS
