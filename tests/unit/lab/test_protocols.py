"""The published trainings against plain loops over one model, step by step, and at their edges."""

import dataclasses
import itertools
import math

import pytest
import torch

from attnmem.lab import data, models, protocols
from attnmem.lab.protocols import PROTOCOLS, Bigrams, Memorization
from benchmarks.ensemble import operations

from plain import (
    TRAINERS,
    Memorizer,
    association_run,
    bigram_run,
    memorization_run,
    saturation,
)

CPU = torch.device("cpu")


def recorded(runs):
    """A protocol with lists of the losses of its steps."""
    protocol = PROTOCOLS[runs[0].task](runs, CPU)
    protocol.paths = {run.key: [] for run in runs}
    look = protocol.look

    def noted(losses, shares):
        for place, run in enumerate(protocol.runs):
            protocol.paths[run.key] += losses[:, place].tolist()
        look(losses, shares)

    protocol.look = noted
    return protocol


class Replayed:
    """Stands for a graph on a CPU, where nothing can be recorded without being done."""

    def __init__(self, function, tensors):
        self.function, before = function, [x.clone() for x in tensors]
        self.outputs = function()
        with torch.no_grad():
            for x, was in zip(tensors, before, strict=True):
                x.copy_(was)

    def replay(self):
        for held, new in zip(self.outputs, self.function(), strict=True):
            held.copy_(new)


def capture(protocol, monkeypatch):
    """Let a protocol on a CPU capture its steps; all that is recorded."""
    graphs, protocol.captured = [], protocols.Captured()

    def graph(function):
        graphs.append(Replayed(function, protocol.adam.state()))
        return graphs[-1], graphs[-1].outputs

    monkeypatch.setattr(protocols, "record_graph", graph)
    return graphs


def finish(protocol):
    while not protocol.done:
        protocol.advance()
    return protocol


# --- step by step ---------------------------------------------------------------------------------

LOOPS = {
    "bigrams, two windows of watched batches": bigram_run(T=128, batch=32, steps=4 * 30),
    "bigrams, epochs of two chunks": bigram_run(T=70 * 4, batch=4, steps=2 * 70),
    "bigrams, one batch an epoch": bigram_run(T=32, batch=32, steps=20),
    "bigrams, three layers and an MLP": bigram_run(layers=3, width=12, model="mlp", H=1),
    "bigrams, the paper's reading": bigram_run(variant="paper", d_h=3),
    "bigrams, layers of their own": bigram_run(variant="own-layers", layers=2, d_h=3),
    "bigrams, a Zipf prior": bigram_run(prior=1.0),
    "bigrams, uncertain next tokens": bigram_run(entropy=1.5),
    "bigrams, uncertain next tokens and an MLP": bigram_run(
        entropy=0.5, prior=0.5, width=12, model="mlp", H=1
    ),
    "next words": bigram_run(task="text", N=40),
    "next words and an MLP": bigram_run(task="text", N=40, width=12, model="mlp", H=1),
    "associations": association_run(d=3, d_h=2, H=1),
    "associations that are all learned": association_run(d=8, d_h=8, H=4, steps=400, lr=3e-2),
    "classes": memorization_run(),
    "classes, 1.85 steps of warm-up": memorization_run(steps=37),
    "classes, learned before the end": memorization_run(
        T=5, batch=4, lr=3e-2, steps=400, evaluate_every=10, early_stop=True
    ),
    "classes, learned early, with looks further apart than chunks": memorization_run(
        T=5, batch=4, lr=2e-2, steps=400, evaluate_every=66, early_stop=True
    ),
    "classes, a short last batch": memorization_run(last_batch="short"),
    "classes, one short batch an epoch": memorization_run(last_batch="short", T=11),
    "classes, own contexts": memorization_run(context="random", steps=45, evaluate_every=9),
    "reals": memorization_run(task="reals", N=None, lr=5e-2, evaluate_every=1),
    "reals, fewer steps than twenty": memorization_run(task="reals", N=None, steps=7),
    "reals, own contexts, a short last batch": memorization_run(
        task="reals", N=None, context="random", last_batch="short"
    ),
}


@pytest.mark.parametrize("engine", ["accelerated", "captured", "by autograd"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_training_is_the_plain_one(name, engine, monkeypatch):
    """Of two runs at once: rates and losses of every step, when it stops, and what it reports."""
    if engine == "by autograd":
        monkeypatch.setattr(models, "ACCELERATORS", {})
    runs = [dataclasses.replace(LOOPS[name], seed=seed) for seed in range(2)]
    protocol = recorded(runs)
    graphs = capture(protocol, monkeypatch) if engine == "captured" else []
    finish(protocol)
    assert len(graphs) == (engine == "captured" and protocol.count >= 2 * protocol.length)
    for run in runs:
        plain, reached = TRAINERS[run.task](run), protocol.reached[run.key]
        steps = len(plain.losses)
        losses = protocol.paths[run.key][:steps]
        rates = [protocol.rate(run, step) for step in range(steps)]
        assert rates == pytest.approx(plain.rates, rel=1e-6, abs=1e-12)
        assert losses[:5] == pytest.approx(plain.losses[:5], rel=1e-5)
        assert losses == pytest.approx(plain.losses, rel=2e-2, abs=1e-5)
        for field, value in plain.reported.items():
            ours = reached[field]
            if field in ("saturated", "served"):
                assert ours[-1] == pytest.approx(value, abs=6e-5)
            elif field == "best_step" or value is None:
                assert ours == value
            else:
                assert ours == pytest.approx(value, rel=2e-3, abs=1e-4), field
        assert "diverged" not in reached


def test_adam_is_torchs_down_to_its_epsilon():
    """On gradients of the weights from large ones to some as small as that."""
    protocol = Bigrams([bigram_run(), bigram_run(seed=1)], CPU)
    P = protocol.parameters
    plain = [W.detach().clone().requires_grad_() for W in P.values()]
    torchs = torch.optim.Adam(plain, lr=0.1)
    for step in range(7):
        for W in plain:
            sizes = 10.0 ** -torch.randint(12, W.shape)
            W.grad = (1 + torch.rand(W.shape)) * sizes * torch.randn(W.shape).sign()
        torchs.step()
        protocol.adam.step([W.grad for W in plain], torch.tensor(0.1, dtype=torch.float64))
        for name, W in zip(P, plain, strict=True):
            torch.testing.assert_close(P[name], W, rtol=1e-4, atol=1e-5, msg=f"{name}, {step}")


@pytest.mark.parametrize("context", ["shared", "random"])
def test_operations_of_a_step_by_hand(context):
    """The large products of a step: forward, and twice as much backward."""
    B, n, d, H = 256, 32, 64, 20
    sizes = {"d": d, "d_h": d, "H": H, "n": n, "N": 100, "batch": B, "T": 1000}
    run = memorization_run(context=context, **sizes)
    large = 3 * B * n * d * H + 3 * 2 * n * d * d * H  # logits; shared keys and what asks them
    if context == "random":  # those were of the positions; now of own tokens
        large += 3 * B * H * d * d + 3 * 2 * H * d**3  # what asks them, by products of two maps
        large += 2 * 2 * B * H * n * d  # logits and values, without a gradient to the tokens
    assert operations(run) == pytest.approx(2 * large, rel=0.15)


# --- accuracy -------------------------------------------------------------------------------------


def test_an_answer_is_right_by_the_largest_logit_alone():
    """By the smallest float too; not where two lead, another leads, or none is a number."""
    up = torch.tensor(1.0).nextafter(torch.tensor(2.0)).item()
    columns = [[2.0, 1, 0], [up, 1, 1], [1, 1, 0], [1, 1, 1], [0, 1, 2], [math.nan, 0, 0]]
    outputs = torch.tensor(columns).T[None]  # (1, 3, 6)
    answers = torch.zeros(1, 6, dtype=torch.long)
    expected = [[True, True] + 4 * [False]]
    assert protocols.are_right(outputs.clone(), answers).tolist() == expected
    assert protocols.are_right(outputs[:, [1, 0, 2]], answers + 1).tolist() == expected
    random, answers = torch.randn(2, 7, 500), torch.randint(7, (2, 500))
    assert torch.equal(protocols.are_right(random.clone(), answers), random.argmax(1) == answers)
    assert protocols.are_right(torch.zeros(1, 1, 4), torch.zeros(1, 4, dtype=torch.long)).all()


@pytest.mark.parametrize("context", ["shared", "random"])
def test_evaluation_in_chunks_is_evaluation_at_once(context):
    runs = [memorization_run(context=context, T=33, seed=seed) for seed in range(2)]
    protocol = Memorization(runs, CPU)
    for whole, chunked in zip(protocol.evaluate(), protocol.evaluate(chunk=16), strict=True):
        assert whole["accuracy"] == chunked["accuracy"]
        assert whole["loss"] == pytest.approx(chunked["loss"], rel=1e-6)
    assert torch.equal(protocol.free_heads(), protocol.free_heads(chunk=16))


def test_all_pairs_in_chunks_are_all_pairs_at_once():
    """With tables so that no answer is right by chance alone."""
    protocol = Bigrams([bigram_run(seed=seed) for seed in range(3)], CPU)
    N = protocol.run.N
    pairs = torch.cartesian_prod(torch.arange(N), torch.arange(N)).expand(3, -1, -1)
    right = models.aot_logits(protocol.parameters, protocol.run, pairs).argmax(dim=1)
    protocol.tables = right.unflatten(1, (N, N)).clone()
    assert protocol.right_of_all().tolist() == [1.0, 1.0, 1.0]
    for wrong in ((0, 0), (1, -1), (1, 1, 2)):  # a row of seven; another, and one more
        protocol.tables[wrong] = (protocol.tables[wrong] + 1) % N
    for chunk in (8192, 2 * N, N + 1, 1):
        share = protocol.right_of_all(chunk=chunk) * N**2
        assert share.tolist() == pytest.approx([42, 41, 49])


# --- what is kept ---------------------------------------------------------------------------------


def diverged(step):
    return {"accuracy": None, "loss": None, "diverged": step}


@pytest.mark.parametrize(
    ("broken", "noticed"),
    [(2, 8), (3, 4), (7, 8)],  # 3 ends an epoch; 7 is not in the average
)
def test_bigrams_diverge_by_one_loss(broken, noticed):
    """After its epoch if it is the epoch's last; otherwise in the end, if it is averaged."""
    losses, shares = torch.ones(8, 1), torch.ones(8, 1) / 2
    losses[broken] = math.inf
    protocol = Bigrams([bigram_run(T=64, batch=32, steps=8)], CPU)
    for start in range(0, 8, protocol.interval):
        protocol.count = start + protocol.interval
        protocol.look(losses[start : protocol.count], shares[start : protocol.count])
    assert [*protocol.reached.values()] == [diverged(noticed)]


@pytest.mark.parametrize(
    ("looks", "early_stop", "best", "steps"),
    [
        ([(0.1, 3.0), (0.5, 1.0), (0.2, 2.0), (0.3, 1.0)], False, (0.5, 1.0, 4, None), 8),
        ([(0.9, 1.0), (1.0, 2.0), (1.0, 0.5), (1.0, 0.1)], True, (1.0, 0.5, 6, None), 6),
        ([(0.9, 1.0), (1.0, 0.5), (0.9, 0.7)], False, (1.0, 0.5, 4, None), 6),
        ([(0.9999, 1.0), (0.9999, 1.0)], True, (0.9999, 1.0, 2, None), 4),
        ([(0.5, 1.0), (0.6, math.inf), (0.7, 0.1)], True, (None, None, None, 4), 4),
    ],
)
def test_the_best_weights_by_the_loss_count(looks, early_stop, best, steps, monkeypatch):
    """They decide when to stop; of equals the first. A loss that is not finite ends a run."""
    run = memorization_run(steps=2 * len(looks), evaluate_every=2, early_stop=early_stop)
    protocol = Memorization([run], CPU)
    results = iter([{"accuracy": accuracy, "loss": loss} for accuracy, loss in looks])
    monkeypatch.setattr(protocol, "evaluate", lambda: [next(results)])
    reached = finish(protocol).reached[run.key]
    names = ("accuracy", "loss", "best_step", "diverged")
    assert tuple(map(reached.get, names)) == best
    assert ("saturated" not in reached) == early_stop
    assert protocol.count == steps


def poisoned(monkeypatch, key, model):
    """One run starts from weights that are not numbers."""
    family = models.MODELS[model]

    def initial(run, g):
        P = family.initial(run, g)
        return {k: x * math.nan for k, x in P.items()} if run.key == key else P

    monkeypatch.setitem(models.MODELS, model, family._replace(initial=initial))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("run", "noticed"),
    [
        (bigram_run(T=64, batch=32, steps=8), 2),
        (association_run(), 7),
        (memorization_run(), 7),
        (memorization_run(N=None, task="reals", context="random"), 7),
    ],
    ids=lambda x: getattr(x, "task", ""),
)
def test_neighbours_of_a_run_that_diverges_live(run, noticed, captured, monkeypatch):
    runs = [dataclasses.replace(run, seed=seed) for seed in range(3)]
    healthy = finish(PROTOCOLS[run.task](runs, CPU)).reached
    poisoned(monkeypatch, runs[1].key, run.model)
    protocol = PROTOCOLS[run.task](runs, CPU)
    if captured:
        capture(protocol, monkeypatch)
    reached = finish(protocol).reached
    assert reached[runs[1].key] == diverged(noticed)
    for run in (runs[0], runs[2]):
        ours, alone = reached[run.key], healthy[run.key]
        assert ours["accuracy"] == alone["accuracy"]
        assert ours.get("best_step") == alone.get("best_step")
        assert ours["loss"] == pytest.approx(alone["loss"], rel=1e-4)


# --- saturation -----------------------------------------------------------------------------------


def test_free_heads_are_counted_as_defined():
    """Weights large enough that some heads are saturated, against the plain model."""
    runs = [memorization_run(context="random", seed=seed, H=4) for seed in range(2)]
    protocol = Memorization(runs, CPU)
    with torch.no_grad():
        protocol.parameters["W_Q"] *= 100
    shares = protocol.free_heads(chunk=16)
    for r, run in enumerate(runs):
        P = {name: W.detach()[r] for name, W in protocol.parameters.items()}
        contexts, queries, _ = data.contexts_of(run)
        expected = saturation(Memorizer(run, P), contexts, queries)
        assert 0 < expected["saturated"] < 1
        assert shares[r].tolist() == pytest.approx(expected["serving"])


def test_saturation_is_followed_at_equal_distances():
    run = memorization_run(steps=300_000, evaluate_every=500)
    moments = sorted(Memorization([run], CPU).followed)
    assert len(moments) == 32
    assert moments[-1] == 300_000
    assert all(moment % 500 == 0 for moment in moments)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    assert max(gaps) - min(gaps) <= 500
