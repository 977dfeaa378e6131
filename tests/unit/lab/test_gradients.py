"""Gradients by hand against sums head by head and autograd; without them all trains, too."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from attnmem.lab import data, experiments, gradients, models
from attnmem.lab.gradients import written_out
from attnmem.lab.models import ACCELERATORS

from plain import bigram_run, memorization_run


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


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


def layer():
    """Maps, inputs, streams and tokens."""
    R, H, d, d_h, d_o, N, B = 3, 5, 4, 2, 6, 7, 8
    maps = [*(numbers(R, H, d_h, d) for _ in range(3)), numbers(R, H, d_o, d_h)]
    return maps, numbers(R, 2, N, d), numbers(R, N, d_o), torch.randint(N, (R, B, 2))


def test_written_out_has_no_second_derivative():
    """The first is given again."""
    maps, *rest = layer()
    stream = written_out(gradients.after_pairs_vjp, *maps, *rest)
    first, second = (torch.autograd.grad(stream.sum(), maps, retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    again = torch.autograd.grad(stream.square().sum(), maps, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        again[0].sum().backward()


@pytest.mark.parametrize("changed", [0, 4, 6])
def test_written_out_notices_changed_arguments(changed):
    maps, *rest = layer()
    after = written_out(gradients.after_pairs_vjp, *maps, *rest).sum()
    with torch.no_grad():
        [*maps, *rest][changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after.backward()


SIZES = [  # heads, their width, vocabulary and pairs; the second takes many heads
    {"H": 3, "d_h": 5, "N": 6, "B": 30},
    {"H": 7, "d_h": 3, "N": 2, "B": 9},
    {"H": 2, "d_h": 2, "N": 6, "B": 1},
    {"H": 1, "d_h": 1, "N": 1, "B": 4},
]


@pytest.mark.parametrize("variant", models.VARIANTS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("width", "layers"), [(None, 1), (4, 1), (None, 2), (4, 3)])
def test_transformers_are_accelerated(variant, sizes, width, layers):
    """Tokens repeat, and some pairs have two equal ones."""
    N, B, model = sizes["N"], sizes["B"], "mlp" if width else "aot"
    sizes = {"H": sizes["H"], "d_h": sizes["d_h"], "N": N, "width": width, "layers": layers}
    run = bigram_run(model=model, variant=variant, **sizes)
    P = models.initial_aot(run, data.generator(run, "weights"))
    P = {name: torch.stack([x, x + 0.1]).double().requires_grad_() for name, x in P.items()}
    tokens, answers = torch.randint(N, (2, B, 2)), torch.randint(N, (2, B))
    assert_accelerated(P, run, tokens, answers, weights=numbers(2, B).detach())


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
    P = {name: (300 * W).detach().requires_grad_() for name, W in P.items()}
    losses, outputs, gradient = gradients.mha_losses(P, run, *batch)
    torch.testing.assert_close(losses, F.cross_entropy(outputs, batch[-1], reduction="none"))
    assert all(g.isfinite().all() for g in gradient(torch.ones_like(losses)))


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
