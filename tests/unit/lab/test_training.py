"""The three published trainings against plain loops over one model, step by step."""

import dataclasses
import itertools
import math

import pytest
import torch

from attnmem.lab import data, experiments, models, protocols, training
from attnmem.lab.protocols import PROTOCOLS, Bigrams, Memorization, Protocol
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
    made, protocol.captured = [], protocols._Captured()

    def graph(function):
        made.append(Replayed(function, protocol.adam.state()))
        return made[-1], made[-1].outputs

    monkeypatch.setattr(protocols, "_recorded", graph)
    return made


def finish(protocol):
    while not protocol.done:
        protocol.advance()
    return protocol


LOOPS = {
    "bigrams, two windows of watched batches": bigram_run(T=128, batch=32, steps=4 * 30),
    "bigrams, epochs of two chunks": bigram_run(T=70 * 4, batch=4, steps=2 * 70),
    "bigrams, one batch an epoch": bigram_run(T=32, batch=32, steps=20),
    "bigrams, three layers and an MLP": bigram_run(layers=3, width=12, model="mlp", H=1),
    "bigrams, the paper's reading": bigram_run(variant="paper", d_h=3),
    "bigrams, layers of their own": bigram_run(variant="own-layers", layers=2, d_h=3),
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


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_a_training_is_the_plain_one(name, captured, monkeypatch):
    """Of two runs at once: rates and losses of every step, when it stops, and what it reports."""
    runs = [dataclasses.replace(LOOPS[name], seed=seed) for seed in range(2)]
    protocol = recorded(runs)
    made = capture(protocol, monkeypatch) if captured else []
    finish(protocol)
    assert len(made) == (protocol.count >= 2 * protocol.length and captured)
    for run in runs:
        plain, found = TRAINERS[run.task](run), protocol.reached[run.key]
        steps = len(plain.losses)
        losses = protocol.paths[run.key][:steps]
        rates = [protocol.rate(run, step) for step in range(steps)]
        assert rates == pytest.approx(plain.rates, rel=1e-6, abs=1e-12)
        assert losses[:5] == pytest.approx(plain.losses[:5], rel=1e-5)
        assert losses == pytest.approx(plain.losses, rel=2e-2, abs=1e-5)
        for field, value in plain.reported.items():
            ours = found[field]
            if field in ("saturated", "served"):
                assert ours[-1] == pytest.approx(value, abs=6e-5)
            elif field == "best_step" or value is None:
                assert ours == value
            else:
                assert ours == pytest.approx(value, rel=2e-3, abs=1e-4), field
        assert "diverged" not in found


# --- the default dtype ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        bigram_run(),
        memorization_run(context="random", last_batch="short", T=43),
        memorization_run(N=None, task="reals"),
    ],
    ids=lambda run: f"{run.task}-{run.context}",
)
def test_training_is_float32_whatever_the_default(run):
    """The same row to the last bit; and a float32 training after it still works."""
    found = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            [outcome] = training.train([run])
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(dataclasses.replace(outcome, wall_s=0.0))
    assert found[0] == found[1] == found[2]


# --- divergence -----------------------------------------------------------------------------------


def poisoned(monkeypatch, key, model):
    """One run starts from weights that are not numbers."""
    family = models.MODELS[model]

    def initial(run, g):
        P = family.initial(run, g)
        return {k: x * math.nan for k, x in P.items()} if run.key == key else P

    monkeypatch.setitem(models.MODELS, model, family._replace(initial=initial))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("run", "seen"),
    [
        (bigram_run(T=64, batch=32, steps=8), 2),
        (association_run(), 7),
        (memorization_run(N=None, task="reals", context="random"), 7),
    ],
    ids=lambda x: getattr(x, "task", ""),
)
def test_a_run_that_diverges_is_a_result_and_its_neighbours_live(run, seen, captured, monkeypatch):
    runs = [dataclasses.replace(run, seed=seed) for seed in range(3)]
    healthy = finish(PROTOCOLS[run.task](runs, CPU)).reached
    poisoned(monkeypatch, runs[1].key, run.model)
    protocol = PROTOCOLS[run.task](runs, CPU)
    if captured:
        capture(protocol, monkeypatch)
    found = finish(protocol).reached
    assert found[runs[1].key] == {"accuracy": None, "loss": None, "diverged": seen}
    for run in (runs[0], runs[2]):
        ours, its = found[run.key], healthy[run.key]
        assert ours["accuracy"] == its["accuracy"]
        assert ours.get("best_step") == its.get("best_step")
        assert ours["loss"] == pytest.approx(its["loss"], rel=1e-4)


# --- what is watched on the way -------------------------------------------------------------------


@pytest.mark.parametrize("context", ["shared", "random"])
def test_evaluation_in_chunks_is_evaluation_at_once(context):
    runs = [memorization_run(context=context, T=33, seed=seed) for seed in range(2)]
    protocol = Memorization(runs, CPU)
    for one, other in zip(protocol.evaluate(), protocol.evaluate(chunk=16), strict=True):
        assert one["accuracy"] == other["accuracy"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert torch.equal(protocol.free_heads(), protocol.free_heads(chunk=16))


def test_all_pairs_in_chunks_are_all_pairs_at_once():
    """With tables so that no answer is right by chance alone."""
    protocol = Bigrams([bigram_run(seed=seed) for seed in range(3)], CPU)
    N = protocol.run.N
    every = torch.cartesian_prod(torch.arange(N), torch.arange(N)).expand(3, -1, -1)
    right = models.aot_logits(protocol.parameters, protocol.run, every).argmax(dim=1)
    protocol.tables = right.unflatten(1, (N, N)).clone()
    assert protocol.right_of_all().tolist() == [1.0, 1.0, 1.0]
    for wrong in ((0, 0), (1, -1), (1, 1, 2)):  # a row of seven; another, and one more
        protocol.tables[wrong] = (protocol.tables[wrong] + 1) % N
    for chunk in (8192, 2 * N, N + 1, 1):
        share = protocol.right_of_all(chunk=chunk) * N**2
        assert share.tolist() == pytest.approx([42, 41, 49])


def test_the_first_epochs_of_a_curve_are_its_beginning():
    run = bigram_run(T=64, steps=20)
    [outcome] = training.train([run])
    for epochs in (1, 3, 10):
        assert training.first_epochs(run, epochs) == outcome.curve[:epochs]


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


def test_saturation_is_looked_at_in_equally_spaced_evaluations():
    run = memorization_run(steps=300_000, evaluate_every=500)
    moments = sorted(protocols._saturation_steps(run))
    assert len(moments) == 32
    assert moments[-1] == 300_000
    assert all(moment % 500 == 0 for moment in moments)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    assert max(gaps) - min(gaps) <= 500


# --- going on -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        bigram_run(T=67 * 2, batch=2, steps=134),
        association_run(d=8, d_h=8, H=4, steps=200, lr=3e-2),
        memorization_run(steps=100, evaluate_every=20),
        memorization_run(T=5, batch=4, lr=3e-2, steps=200, early_stop=True),
        memorization_run(context="random", N=None, task="reals"),
    ],
    ids=lambda run: run.task,
)
def test_a_killed_training_goes_on_to_the_same_outcome(run, tmp_path, monkeypatch):
    """Stored after every chunk, and killed three times, once before anything was stored."""
    runs = [dataclasses.replace(run, seed=seed) for seed in range(3)]
    whole = training.train(runs)
    monkeypatch.setattr("attnmem.lab.training._STORE_EVERY", 0.0)
    for chunks in (0, 1, 2):
        left = itertools.count(chunks, -1)

        def advance(protocol, original=Protocol.advance, left=left):
            if next(left) == 0:
                raise KeyboardInterrupt
            original(protocol)

        with monkeypatch.context() as patch:
            patch.setattr(Protocol, "advance", advance)
            with pytest.raises(KeyboardInterrupt):
                training.train(runs, checkpoints=tmp_path)
    resumed = training.train(runs, checkpoints=tmp_path)
    for one, other in zip(whole, resumed, strict=True):
        same = {"wall_s": 0.0}
        assert dataclasses.replace(one, **same) == dataclasses.replace(other, **same)
    training.forget(tmp_path, runs[1:])
    assert [*tmp_path.iterdir()]
    training.forget(tmp_path, runs[:1])
    assert not [*tmp_path.iterdir()]


def test_a_resumed_training_does_not_start_again(tmp_path, monkeypatch):
    """The second process makes the steps that are left, and its seconds are added."""
    monkeypatch.setattr("attnmem.lab.training._STORE_EVERY", 0.0)
    run, counts = memorization_run(steps=100, evaluate_every=10), []

    def advance(protocol, original=Protocol.advance):
        counts.append(protocol.count)
        if counts == [0, 10, 20, 30]:
            raise KeyboardInterrupt
        original(protocol)

    monkeypatch.setattr(Protocol, "advance", advance)
    with pytest.raises(KeyboardInterrupt):
        training.train([run], checkpoints=tmp_path)
    [path] = tmp_path.iterdir()
    held = torch.load(path, weights_only=True)
    held["state"]["seconds"] += 1000
    torch.save(held, path)
    [outcome] = training.train([run], checkpoints=tmp_path)
    assert counts == [0, 10, 20, 30, *range(30, 100, 10)]
    assert outcome.wall_s > 1000


# --- what comes back ------------------------------------------------------------------------------


def test_outcomes_share_the_seconds_and_say_where_they_come_from(monkeypatch):
    clock = itertools.count(0, 6)
    monkeypatch.setattr("attnmem.lab.training.time.perf_counter", lambda: float(next(clock)))
    outcomes = training.train([bigram_run(steps=8, seed=seed) for seed in range(3)])
    assert {(x.wall_s, x.device, x.torch, x.tf32) for x in outcomes} == {
        (2.0, "cpu", torch.__version__, False)
    }
    assert all(outcome.commit for outcome in outcomes)


def test_a_training_in_tf32_is_another_one():
    """It has a key of its own, shares no stack with float32, and its row says so."""
    run = bigram_run(steps=8)
    reduced = dataclasses.replace(run, products="tf32")
    assert reduced.key != run.key
    assert training.train([reduced])[0].tf32
    with pytest.raises(ValueError, match=r"^runs: got 2 different ones"):
        training.train([run, reduced])


@pytest.mark.parametrize(
    "runs",
    [
        [bigram_run(), bigram_run(T=64)],
        [memorization_run(), memorization_run(n=5)],
        [bigram_run(model="lstm")],
        [memorization_run(variant="paper")],
        [memorization_run(model="aot")],
        [bigram_run(last_batch="short")],
        [memorization_run(last_batch="long")],
        [],
    ],
)
def test_what_cannot_be_stacked_is_refused(runs):
    with pytest.raises(ValueError, match=r"^runs: got "):
        training.train(runs)


def test_a_gpu_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one; tests/gpu use it")
    with pytest.raises(ValueError, match=r"^device: got 'cuda'"):
        training.train([bigram_run()], device="cuda")


def test_stacks_hold_the_seeds_of_a_cell():
    runs = experiments.runs("dana-exp1", "quick", 2)
    groups = training.stacks(runs[::-1])
    assert [run for group in groups for run in group] == runs[::-1]
    assert all(len(group) == 2 == len({run.seed for run in group}) for group in groups)
    assert len({(group[0].d, group[0].H) for group in groups}) == len(groups)


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
