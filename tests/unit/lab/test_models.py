"""The models against plain ones, one run, head and example at a time; how their weights start."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from attnmem.lab import data, experiments, models, protocols, study, training
from attnmem.theory import blocks, counts
from attnmem.theory.capacity import LayerSizes

from plain import (
    READINGS,
    BigramModel,
    Memorizer,
    association_run,
    bigram_run,
    memorization_run,
)


def weights_of(run):
    """Initial weights of two runs in float64."""
    P = models.MODELS[run.model].initial(run, data.generator(run, "weights"))
    return {name: torch.stack([W, W + 0.1]).double().requires_grad_() for name, W in P.items()}


def assert_plain(P, batch, plain_outputs, derivatives, run):
    """Losses, outputs and gradients by autograd are those of a plain model of each run."""
    losses, outputs, gradient = models.by_autograd(P, run, *batch)
    gradients = gradient(derivatives)
    labels = batch[-1]
    for r in range(2):
        model, expected = plain_outputs(r)
        torch.testing.assert_close(outputs[r].T, expected, rtol=1e-11, atol=1e-11)
        if labels.is_floating_point():
            loss = (expected[:, 0] - labels[r]) ** 2
        else:
            loss = F.cross_entropy(expected, labels[r], reduction="none")
        torch.testing.assert_close(losses[r], loss, rtol=1e-11, atol=1e-11)
        (loss * derivatives[r]).sum().backward()
        for name, ours in zip(P, gradients, strict=True):
            theirs = model.P[name.replace(".", "_")].grad
            torch.testing.assert_close(ours[r], theirs, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("variant", models.VARIANTS)
@pytest.mark.parametrize(("width", "layers", "d_h"), [(None, 1, 5), (4, 1, 3), (4, 3, 2)])
def test_transformers_are_the_plain_ones(variant, width, layers, d_h):
    model = "mlp" if width else "aot"
    sizes = {"N": 6, "H": 3, "d_h": d_h, "width": width, "layers": layers}
    run = bigram_run(model=model, variant=variant, **sizes)
    P = weights_of(run)
    batch = torch.randint(6, (2, 30, 2)), torch.randint(6, (2, 30))

    def plain_outputs(r):
        plain = BigramModel(run, {name: x.detach()[r] for name, x in P.items()})
        return plain, plain(batch[0][r])

    assert_plain(P, batch, plain_outputs, torch.randn(2, 30).double(), run)


@pytest.mark.parametrize("sizes", [{}, {"n": 1, "H": 1}, {"d": 7, "d_h": 11, "n": 6}])
@pytest.mark.parametrize("context", ["shared", "random"])
@pytest.mark.parametrize("N", [None, 7])
def test_heads_on_contexts_are_the_plain_ones(context, N, sizes):
    run = memorization_run(context=context, N=N, **{"H": 3, "n": 4, "d": 5, "d_h": 3} | sizes)
    P = weights_of(run)
    contexts = torch.randn(2, *(() if context == "shared" else (23,)), run.n, run.d).double()
    queries = torch.randn(2, 23, run.d).double()
    labels = torch.randint(N, (2, 23)) if N else torch.randn(2, 23).double()

    def plain_outputs(r):
        plain = Memorizer(run, {name: W.detach()[r] for name, W in P.items()})
        return plain, plain(contexts[r].expand(23, -1, -1), queries[r])

    assert_plain(P, (contexts, queries, labels), plain_outputs, torch.randn(2, 23).double(), run)


def test_a_model_with_a_norm_needs_no_derivative(monkeypatch):
    """A new family is its initial weights and its outputs."""

    def normed(P, run, tokens):
        return F.layer_norm(models.aot_logits(P, run, tokens).mT, (run.N,)).mT

    family = models.MODELS["aot"]._replace(outputs=normed)
    monkeypatch.setitem(models.MODELS, "normed", family)
    runs = [bigram_run(seed=seed, steps=80) for seed in range(2)]
    plain, ours = (
        training.train([dataclasses.replace(run, model=model) for run in runs])
        for model in ("aot", "normed")
    )
    assert all(outcome.accuracy > 0.2 for outcome in ours)
    assert ours[0].loss != pytest.approx(plain[0].loss, rel=1e-3)


# --- one block that stores facts ------------------------------------------------------------------

BLOCK = {"model": "block", "N": 9, "d": 4, "d_h": 3, "H": 2, "width": 5}


def plain_block(P, run, subject, relation):
    """The logits after one pair, by the library functions of PyTorch."""
    pair = torch.stack([P["subjects"][subject], P["relations"][relation]])
    X, stream = F.rms_norm(pair, (run.d,), eps=1e-6), pair[1]
    for h in range(run.H):
        queries, keys, values = (X @ P[f"W_{name}.0"][h].T for name in "QKV")
        attended = F.scaled_dot_product_attention(queries, keys, values)
        stream = stream + P["W_O.0"][h] @ attended[1]
    units = F.gelu(P["W_1"] @ F.rms_norm(stream, (run.d,), eps=1e-6))
    return P["objects"] @ (stream + P["W_2"] @ units)


def test_a_block_is_the_plain_one():
    run = bigram_run(**BLOCK)
    P = {name: W.detach() for name, W in weights_of(run).items()}
    tokens = torch.randint(run.N, (2, 20, 2))
    logits = models.block_logits(P, run, tokens)
    for r in range(2):
        own = {name: W[r] for name, W in P.items()}
        expected = torch.stack([plain_block(own, run, *pair) for pair in tokens[r].tolist()])
        torch.testing.assert_close(logits[r].T, expected, rtol=1e-11, atol=1e-11)


def test_a_block_is_trained_and_the_vectors_around_it_are_not():
    run = association_run(**BLOCK, steps=20)
    protocol = protocols.Associations([run], torch.device("cpu"))
    before = {name: W.detach().clone() for name, W in protocol.parameters.items()}
    while not protocol.done:
        protocol.advance()
    for name, W in protocol.parameters.items():
        assert torch.equal(W, before[name]) == (name in models.FROZEN), name
    assert models.parameter_count(run) == 2 * 4 * 3 * 4 + 2 * 4 * 5


def numbers_that_matter(run):
    """By hand: two matrices of rank d_h of each head, and the units."""
    return run.H * 2 * run.d_h * (2 * run.d - run.d_h) + 2 * run.d * run.width


def test_the_numbers_of_a_block_that_matter_are_a_rank():
    """Of the derivative of what all pairs add to the stream."""
    run = bigram_run(**BLOCK)
    g = torch.Generator().manual_seed(0)
    P = {name: W[None].double() for name, W in models.initial_block(run, g).items()}
    P["objects"] = torch.eye(run.d).double()[None]
    given = {name: P.pop(name) for name in models.FROZEN}
    numbers = torch.arange(run.N)
    pairs = torch.cartesian_prod(numbers, numbers)[None]
    jacobian = torch.func.jacrev(lambda W: models.block_logits(given | W, run, pairs))(P)
    columns = torch.cat([J.reshape(run.d * run.N**2, -1) for J in jacobian.values()], dim=1)
    sizes = torch.linalg.svdvals(columns)
    rank = numbers_that_matter(run)
    assert sizes[rank - 1] > 1e-6 * sizes[0] > 1e8 * sizes[rank]
    maps = LayerSizes(dim=4, token_dim=4, groups=2, heads_per_group=1, head_dim=3, value_dim=3)
    block = blocks.Block(attention=maps, units=5, affine=False)
    assert sum(part.matter for part in block.parts()) == rank


def test_facts_are_counted_in_prices():
    """As many as 0.7 to 2 times what the price of an object says."""
    for profile in study.PROFILES:
        for run in experiments.runs("dana-facts", profile, 1):
            says = numbers_that_matter(run) / counts.class_price(run.N)
            assert run.T in [round(k * says) for k in (0.7, 1, 1.4, 2)]
            assert run.T == run.batch <= run.N**2


def test_variants_are_read_as_they_are_written_down():
    assert {name: tuple(variant) for name, variant in models.VARIANTS.items()} == READINGS


def test_parameters_are_counted_by_hand():
    """The unused row of positions does not count."""
    heads = 2 * 7 * 5 + 2 * 5 + 4 * 5 * 5 * 3
    assert models.parameter_count(bigram_run()) == heads
    mlp = bigram_run(model="mlp", width=11)
    assert models.parameter_count(mlp) == heads + 2 * 5 * 11 + 11


def test_heads_of_a_budget_have_as_many_parameters():
    runs = experiments.runs("dana-budget", "paper", variant="paper")
    assert {run.d_h for run in runs} == {1, 2, 5, 10}
    assert len({models.parameter_count(run) for run in runs}) == 1


# --- how weights start ----------------------------------------------------------------------------

SIZES = {"d": 61, "H": 13, "N": 37}
d, d_h, H = 61, 31, 13
LINEAR = d**-0.5  # PyTorch's Linear(d, ...), weight and bias
PACKED = (6 / (3 * d_h + d_h)) ** 0.5  # Xavier over the (3 d_h, d_h) matrix of three maps
OWN = (6 / (3 * d_h + d)) ** 0.5
INITIAL = {  # of each variant, and of Mahdavi et al.'s layer, the bounds, each of some weights
    "code": {
        LINEAR: "embedding unembedding down.0",
        d_h**-0.5: "positions.0 up.0 W_O.0",
        PACKED: "W_Q.0 W_K.0 W_V.0",
    },
    "paper": {
        LINEAR: "embedding unembedding positions.0",
        d_h**-0.5: "W_O.0",
        OWN: "W_Q.0 W_K.0 W_V.0",
    },
    "paper-default-init": {LINEAR: "unembedding W_Q.0 W_K.0 W_V.0", d_h**-0.5: "W_O.0"},
    "own-layers": {LINEAR: "W_1.0 b_1.0 W_1.1", 97**-0.5: "W_2.0 b_2.0 W_2.1 b_2.1"},
    "mahdavi": {
        LINEAR: "W_E b_E W_D b_D",
        (6 / (d + d_h)) ** 0.5: "W_Q W_K",
        (6 / (d + 1)) ** 0.5: "W_V",
        (6 / (H + d)) ** 0.5: "W_O",
    },
}


@pytest.mark.parametrize("name", INITIAL)
def test_initial_weights_keep_the_published_bounds(name):
    if name == "mahdavi":
        run = memorization_run(d_h=d_h, **SIZES)
    else:
        layers = {"model": "mlp", "width": 97, "layers": 2} if name == "own-layers" else {}
        run = bigram_run(d_h=d_h, variant=name, **layers, **SIZES)
    P = models.MODELS[run.model].initial(run, data.generator(run, "weights"))
    for bound, weights in INITIAL[name].items():
        for weight in weights.split():
            shares = P[weight].flatten() / bound
            assert 1 - 8 / len(shares) < shares.abs().max() <= 1 + 1e-6, weight
            assert shares.min() < -0.8 < 0.8 < shares.max(), weight
            assert shares.square().mean() == pytest.approx(1 / 3, abs=0.09), weight


def test_initial_tables_of_the_default_are_normal():
    """PyTorch's Embedding: mean 0, variance 1; as in the published code three rows of positions."""
    run = bigram_run(d_h=d_h, variant="default-init", **SIZES)
    P = models.initial_aot(run, data.generator(run, "weights"))
    assert P["embedding"].mean().item() == pytest.approx(0, abs=0.06)
    assert P["embedding"].square().mean().item() == pytest.approx(1, abs=0.09)
    assert (P["embedding"].abs() > 1.96).double().mean().item() == pytest.approx(0.05, abs=0.02)
    assert len(P["positions.0"]) == 3
