"""The rules of the trainings, each at its edges: on losses by hand, and on weights just drawn."""

import copy
import dataclasses
import hashlib
import math
import shutil
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from attnmem import MHAWeights, descend, mha, xavier
from attnmem.lab import data, models, protocols, training
from attnmem.lab.protocols import Bigrams, Memorization
from attnmem.lab.training import Checkpoint

from plain import bigram_run, memorization_run

CPU = torch.device("cpu")


# --- Adam -----------------------------------------------------------------------------------------


def test_adam_is_torchs_for_gradients_from_large_to_as_small_as_its_epsilon():
    gradients = torch.rand(7, 2, 6).add(1) * 10.0 ** -torch.arange(0, 12, 2)
    gradients *= torch.randn(7, 2, 6).sign()
    plain = torch.zeros(2, 6, requires_grad=True)
    torchs = torch.optim.Adam([plain], lr=0.1)
    W = torch.zeros(2, 6, requires_grad=True)
    ours = protocols._FusedAdam([W])
    for g in gradients:
        plain.grad = g
        torchs.step()
        ours.step([g], torch.tensor(0.1, dtype=torch.float64))
        torch.testing.assert_close(W, plain, rtol=1e-4, atol=0)


# --- accuracy -------------------------------------------------------------------------------------


def test_an_answer_is_right_if_its_logit_is_larger_than_any_other():
    """Alone, by the smallest float too; not where two lead, another leads, or none is a number."""
    up = torch.tensor(1.0).nextafter(torch.tensor(2.0)).item()
    columns = [[2.0, 1, 0], [up, 1, 1], [1, 1, 0], [1, 1, 1], [0, 1, 2], [math.nan, 0, 0]]
    outputs = torch.tensor(columns).T[None]  # (1, 3, 6)
    answers = torch.zeros(1, 6, dtype=torch.long)
    assert protocols._right_(outputs.clone(), answers).tolist() == [[True, True] + 4 * [False]]
    same = outputs[:, [1, 0, 2]]
    assert protocols._right_(same, answers + 1).tolist() == [[True, True] + 4 * [False]]
    random, chosen = torch.randn(2, 7, 500), torch.randint(7, (2, 500))
    assert torch.equal(protocols._right_(random.clone(), chosen), random.argmax(1) == chosen)
    assert protocols._right_(torch.zeros(1, 1, 4), torch.zeros(1, 4, dtype=torch.long)).all()


# --- what is kept ---------------------------------------------------------------------------------


def diverged(step):
    return {"accuracy": None, "loss": None, "diverged": step}


def told(protocol, losses, shares):
    """Let a protocol look at losses and shares of one run, chunk by chunk."""
    for chunk in zip(*(x[:, None].split(protocol.interval) for x in (losses, shares)), strict=True):
        protocol.count += len(chunk[0])
        protocol.look(*chunk)
    return [*protocol.reached.values()]


@pytest.mark.parametrize(
    ("broken", "seen"),
    [(2, 8), (3, 4), (7, 8)],  # 3 ends an epoch; 7 is not in the average
)
def test_bigrams_diverge_by_one_loss_that_is_not_finite(broken, seen):
    """After its epoch if it is the epoch's last; else in the end, if it is averaged."""
    losses = torch.ones(8)
    losses[broken] = math.inf
    [found] = told(Bigrams([bigram_run(T=64, batch=32, steps=8)], CPU), losses, torch.ones(8) / 2)
    assert found == diverged(seen)


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
def test_the_best_weights_by_the_loss_are_reported_and_decide_when_to_stop(
    looks, early_stop, best, steps, monkeypatch
):
    """Of equals the first; a loss that is not finite ends a run."""
    run = memorization_run(steps=2 * len(looks), evaluate_every=2, early_stop=early_stop)
    protocol = Memorization([run], CPU)
    every = iter([{"accuracy": accuracy, "loss": loss} for accuracy, loss in looks])
    monkeypatch.setattr(protocol, "evaluate", lambda: [next(every)])
    while not protocol.done:
        protocol.advance()
    found = protocol.reached[run.key]
    names = ("accuracy", "loss", "best_step", "diverged")
    assert tuple(map(found.get, names)) == best
    assert ("saturated" not in found) == early_stop
    assert protocol.count == steps


# --- random numbers -------------------------------------------------------------------------------


def test_runs_and_purposes_have_different_random_numbers():
    runs = [bigram_run(), bigram_run(seed=1), bigram_run(H=4), memorization_run()]
    streams = [(run, purpose) for run in runs for purpose in ("weights", "data", "order")]
    drawn = [torch.rand(3, generator=data.generator(*stream)) for stream in streams]
    assert len(torch.stack(drawn).unique(dim=0)) == len(streams)
    again = torch.rand(3, generator=data.generator(bigram_run(), "weights"))
    assert torch.equal(again, drawn[0])


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
def test_initial_weights_are_uniform_within_the_published_bounds(name):
    if name == "mahdavi":
        run = memorization_run(d_h=d_h, **SIZES)
    else:
        layers = {"model": "mlp", "width": 97, "layers": 2} if name == "own-layers" else {}
        run = bigram_run(d_h=d_h, variant=name, **layers, **SIZES)
    P = models.MODELS[run.model].initial(run, data.generator(run, "weights"))
    for bound, weights in INITIAL[name].items():
        for weight in weights.split():
            parts = P[weight].flatten() / bound
            assert 1 - 8 / len(parts) < parts.abs().max() <= 1 + 1e-6, weight
            assert parts.min() < -0.8 < 0.8 < parts.max(), weight
            assert parts.square().mean() == pytest.approx(1 / 3, abs=0.09), weight


def test_tables_of_the_default_initialization_are_normal():
    """PyTorch's Embedding: mean 0, variance 1; as in the published code three rows of positions."""
    run = bigram_run(d_h=d_h, variant="default-init", **SIZES)
    P = models.initial_aot(run, data.generator(run, "weights"))
    assert P["embedding"].mean().item() == pytest.approx(0, abs=0.06)
    assert P["embedding"].square().mean().item() == pytest.approx(1, abs=0.09)
    assert (P["embedding"].abs() > 1.96).double().mean().item() == pytest.approx(0.05, abs=0.02)
    assert len(P["positions.0"]) == 3


# --- where a training runs ------------------------------------------------------------------------


def flushed():
    """Whether this thread rounds a number below float32's normal range to zero."""
    return bool(torch.full((1,), 1e-40, dtype=torch.float32).mul(1) == 0)


@pytest.fixture
def torch_as_it_was():
    threads, denormals = torch.get_num_threads(), flushed()
    tf32 = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.set_num_threads(threads)
    torch.set_flush_denormal(denormals)


@pytest.mark.parametrize("before", [False, True])
def test_on_a_cpu_one_thread_flushes_denormals_and_all_is_set_back(before, torch_as_it_was):
    torch.set_num_threads(2)
    if torch.set_flush_denormal(before) is False:
        pytest.skip("this processor cannot flush denormals")
    with training.device_settings(CPU, tf32=False):
        assert torch.get_num_threads() == 1
        assert flushed()
    assert torch.get_num_threads() == 2
    assert flushed() == before


@pytest.mark.parametrize("before", [False, True])
def test_trainings_at_once_share_a_precision_and_the_last_one_sets_it_back(before, torch_as_it_was):
    settings = torch.backends.cuda.matmul
    settings.allow_tf32 = before
    for tf32 in (True, False):
        with training._precision(tf32):
            with training._precision(tf32):  # one that ends before the first does
                assert settings.allow_tf32 == tf32
            with pytest.raises(ValueError, match="tf32"), training._precision(not tf32):
                pass
            assert settings.allow_tf32 == tf32
        assert settings.allow_tf32 == before


# --- memory ---------------------------------------------------------------------------------------


def test_a_stack_that_does_not_fit_is_trained_in_halves(tmp_path, monkeypatch):
    """As each half would be alone; nothing is left of the stack when its halves begin.

    There is memory for two runs after 21 steps.
    """
    left, there = [], []

    def advance(protocol, made=Memorization.advance):
        if protocol.count == 0:
            there.extend(stack for stack in left if stack())
            left.append(weakref.ref(protocol))
        made(protocol)
        if protocol.count >= 21 and len(protocol.runs) > 2:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(Memorization, "advance", advance)
    monkeypatch.setattr(training, "_STORE_EVERY", 0.0)
    runs = [memorization_run(seed=seed) for seed in range(5)]
    found = training.train(runs, device="cpu:0", checkpoints=tmp_path)
    assert len(left) == 5  # of five, two, three, one, two
    assert not there
    alone = [outcome for run in runs for outcome in training.train([run], device="cpu:0")]
    assert [x.loss for x in found] == pytest.approx([x.loss for x in alone], rel=1e-4)
    assert [x.best_step for x in found] == [x.best_step for x in alone]
    training.forget(tmp_path, runs)
    assert not list(tmp_path.iterdir())


def test_a_single_run_that_does_not_fit_is_an_error(monkeypatch):
    def advance(protocol):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Memorization, "advance", advance)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        training.train([memorization_run(seed=seed) for seed in range(3)])


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_run_that_is_done_stays_as_it_was_when_its_stack_goes_on():
    one = memorization_run(T=9, lr=2e-2, steps=300, early_stop=True)
    runs = [dataclasses.replace(one, seed=seed) for seed in range(2)]
    whole, resumed = (Memorization(runs, CPU) for _ in range(2))
    while not whole.finished:
        whole.advance()
    resumed.restore(copy.deepcopy(whole.state()))
    for protocol in (whole, resumed):
        while not protocol.done:
            protocol.advance()
    assert resumed.reached == whole.reached
    assert len(whole.reached) == 2


def test_a_checkpoint_belongs_to_runs_a_device_a_torch_and_the_sources(tmp_path, monkeypatch):
    runs = [memorization_run(), memorization_run(seed=1)]
    checkpoint = Checkpoint(tmp_path / "new", runs, "cpu")
    checkpoint.store({"count": 7})
    tmp_path /= "new"
    assert Checkpoint(tmp_path, runs, "another").load() is None
    other = Checkpoint(tmp_path, runs[::-1], "cpu")
    assert other.load() is None
    shutil.copy(checkpoint.path, other.path)
    assert other.load() is None
    with monkeypatch.context() as patch:
        patch.setattr(training, "_SOURCES", hashlib.sha256(b"other code"))
        assert Checkpoint(tmp_path, runs, "cpu").load() is None
    assert Checkpoint(tmp_path, runs, "cpu").load() == {"count": 7}
    monkeypatch.setattr(torch, "__version__", "0")
    assert Checkpoint(tmp_path, runs, "cpu").load() is None


def test_a_damaged_checkpoint_is_refused_and_stays(tmp_path):
    """What else than data a file may hold could run code when it is read."""
    checkpoint = Checkpoint(tmp_path, [memorization_run()], "cpu")
    checkpoint.store({"count": 7})
    whole = checkpoint.path.read_bytes()
    torch.save({"origin": checkpoint.origin, "state": Path("here")}, checkpoint.path)
    for damaged in (whole[:-100], checkpoint.path.read_bytes()):
        checkpoint.path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"^checkpoint: .* damaged"):
            training.train([memorization_run()], checkpoints=tmp_path)
        assert checkpoint.path.read_bytes() == damaged


def test_a_state_that_is_not_written_whole_leaves_the_last_one(tmp_path, monkeypatch):
    """A killed process leaves half a file; where the disk is full, the training goes on."""
    checkpoint = Checkpoint(tmp_path, [memorization_run()], "cpu")
    checkpoint.store({"count": 7})
    errors = iter([KeyboardInterrupt(), RuntimeError("iostream error")])

    def save(held, path):
        Path(path).write_bytes(b"half of it")
        raise next(errors)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.store({"count": 8})
    with pytest.warns(UserWarning, match=f"^no checkpoint .* {checkpoint.path}: iostream error"):
        checkpoint.store({"count": 8})
    assert [*tmp_path.iterdir()] == [checkpoint.path]
    assert checkpoint.load() == {"count": 7}
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match=r"^no checkpoint .* File exists"):
        Checkpoint(tmp_path / "file", [memorization_run()], "cpu").store({"count": 8})


# --- the layer of the theorem ---------------------------------------------------------------------


def test_random_layers_are_uniform_within_xaviers_bounds():
    weights = xavier(H, d, d_h, 37, seed=0)
    fans = {"W_Q": d + d_h, "W_K": d + d_h, "W_V": d + 1, "W_O": H + d, "W_D": d + 37}
    for name, W in weights._asdict().items():
        parts = W.flatten() / math.sqrt(6 / fans[name])
        assert parts.abs().max() <= 1 + 1e-6, name
        assert parts.square().mean() == pytest.approx(1 / 3, abs=0.03), name
        assert parts.mean() == pytest.approx(0, abs=0.06), name
    assert not torch.equal(weights.W_Q, weights.W_K)
    assert not torch.equal(weights.W_Q, xavier(H, d, d_h, 37, seed=1).W_Q)


@pytest.mark.parametrize(("outputs", "shared"), [(1, True), (4, False)])
def test_descent_is_adam_with_a_rate_that_falls_along_a_cosine(outputs, shared):
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
def test_descent_refuses_what_does_not_fit(change, message):
    arguments = {"contexts": torch.rand(4, 5), "queries": torch.rand(7, 5), "labels": torch.rand(7)}
    with pytest.raises(ValueError, match=f"^{message}"):
        descend(xavier(3, 5, 2, 1, seed=0), steps=2, **arguments | {"lr": 1.0} | change)
