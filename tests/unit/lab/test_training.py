"""A training from end to end: what it accepts, what it leaves alone, and how it goes on."""

import dataclasses
import itertools
import shutil
import weakref
from pathlib import Path

import pytest
import torch

from attnmem.lab import experiments, training
from attnmem.lab.protocols import Memorization, Protocol
from attnmem.lab.training import Checkpoint

from plain import association_run, bigram_run, memorization_run

CPU = torch.device("cpu")


def timeless(outcomes):
    return [dataclasses.replace(outcome, wall_s=0.0) for outcome in outcomes]


# --- what is trained ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "runs",
    [
        [bigram_run(), bigram_run(T=64)],
        [memorization_run(), memorization_run(n=5)],
        [bigram_run(model="lstm")],
        [memorization_run(variant="paper")],
        [memorization_run(model="aot")],
        [bigram_run(last_batch="short")],
        [association_run(entropy=1.0)],
        [memorization_run(prior=1.0)],
        [memorization_run(last_batch="long")],
        [],
    ],
)
def test_train_refuses_what_cannot_be_stacked(runs):
    with pytest.raises(ValueError, match=r"^runs: got "):
        training.train(runs)


def test_train_refuses_a_gpu_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("there is one; tests/gpu use it")
    with pytest.raises(ValueError, match=r"^device: got 'cuda'"):
        training.train([bigram_run()], device="cuda")


def test_train_times_a_text_on_the_processor_only():
    with pytest.raises(ValueError, match=r"^device: got 'meta'; expected cpu"):
        training.train([bigram_run(task="text")], device="meta")
    runs = [bigram_run(task="text", seed=seed) for seed in range(2)]
    for outcome in training.train(runs):
        assert 0 < outcome.use_s < outcome.step_s
        assert outcome.step_s * runs[0].steps < 10 * outcome.wall_s
        assert 0 < outcome.counted_loss < outcome.loss


def test_train_in_tf32_is_another_training():
    """It has a key of its own, shares no stack with float32, and its row says so."""
    run = bigram_run(steps=8)
    reduced = dataclasses.replace(run, products="tf32")
    assert reduced.key != run.key
    assert training.train([reduced])[0].tf32
    with pytest.raises(ValueError, match=r"^runs: got 2 different ones"):
        training.train([run, reduced])


def test_stacks_hold_the_seeds_of_a_cell():
    runs = experiments.runs("dana-exp1", "quick", 2)
    groups = training.stacks(runs[::-1])
    assert [run for group in groups for run in group] == runs[::-1]
    assert all(len(group) == 2 == len({run.seed for run in group}) for group in groups)
    assert len({(group[0].d, group[0].H) for group in groups}) == len(groups)


def test_first_epochs_of_a_curve_are_its_beginning():
    run = bigram_run(T=64, steps=20)
    [outcome] = training.train([run])
    for epochs in (1, 3, 10):
        assert training.first_epochs(run, epochs) == outcome.curve[:epochs]


def test_outcomes_share_seconds_and_name_the_device(monkeypatch):
    clock = itertools.count(0, 6)
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(clock)))
    outcomes = training.train([bigram_run(steps=8, seed=seed) for seed in range(3)])
    assert {(x.wall_s, x.device, x.torch, x.tf32) for x in outcomes} == {
        (2.0, "cpu", torch.__version__, False)
    }
    assert all(outcome.commit for outcome in outcomes)


# --- where it runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        bigram_run(),
        memorization_run(context="random", last_batch="short", T=43),
        memorization_run(N=None, task="reals"),
    ],
    ids=lambda run: f"{run.task}-{run.context}",
)
def test_train_is_in_float32_whatever_the_default(run):
    """The same row to the last bit; and a float32 training after it still works."""
    rows = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            rows += timeless(training.train([run]))
        finally:
            torch.set_default_dtype(torch.float32)
    assert rows[0] == rows[1] == rows[2]


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


@pytest.mark.usefixtures("torch_as_it_was")
@pytest.mark.parametrize("before", [False, True])
def test_device_settings_on_a_cpu_are_set_back(before):
    """One thread, and numbers below the normal range are zero."""
    torch.set_num_threads(2)
    if torch.set_flush_denormal(before) is False:
        pytest.skip("this processor cannot flush denormals")
    with training.device_settings(CPU, tf32=False):
        assert torch.get_num_threads() == 1
        assert flushed()
    assert torch.get_num_threads() == 2
    assert flushed() == before


@pytest.mark.usefixtures("torch_as_it_was")
@pytest.mark.parametrize("before", [False, True])
def test_products_at_once_are_of_one_precision(before):
    """The last training sets it back, in whatever order they end."""
    settings = torch.backends.cuda.matmul
    settings.allow_tf32 = before
    for tf32 in (True, False):
        with training.products(tf32):
            with training.products(tf32):  # one that ends before the first does
                assert settings.allow_tf32 == tf32
            with pytest.raises(ValueError, match=f"^tf32: got {not tf32}"):
                training.products(not tf32).__enter__()
            assert settings.allow_tf32 == tf32
        assert settings.allow_tf32 == before


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture
def stored_at_once(monkeypatch):
    """The state of a training is stored after every chunk."""
    monkeypatch.setattr(Checkpoint, "interval", 0.0)


@pytest.mark.usefixtures("stored_at_once")
def test_a_stack_that_does_not_fit_is_halved(tmp_path, monkeypatch):
    """As each half would be alone; nothing is left of the stack when its halves begin.

    There is memory for two runs after 21 steps.
    """
    stacks, kept = [], []

    def advance(protocol, advance=Memorization.advance):
        if protocol.count == 0:
            kept.extend(stack for stack in stacks if stack())
            stacks.append(weakref.ref(protocol))
        advance(protocol)
        if protocol.count >= 21 and len(protocol.runs) > 2:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(Memorization, "advance", advance)
    runs = [memorization_run(seed=seed) for seed in range(5)]
    outcomes = training.train(runs, device="cpu:0", checkpoints=tmp_path)
    assert len(stacks) == 5  # of five, two, three, one, two
    assert not kept
    alone = [outcome for run in runs for outcome in training.train([run], device="cpu:0")]
    assert [x.loss for x in outcomes] == pytest.approx([x.loss for x in alone], rel=1e-4)
    assert [x.best_step for x in outcomes] == [x.best_step for x in alone]
    training.forget(tmp_path, runs)
    assert not list(tmp_path.iterdir())


def test_a_single_run_that_does_not_fit_is_an_error(monkeypatch):
    def advance(protocol):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Memorization, "advance", advance)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        training.train([memorization_run(seed=seed) for seed in range(3)])


# --- going on -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stored_at_once")
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
def test_a_killed_training_has_the_same_outcome(run, tmp_path, monkeypatch):
    """Stored after every chunk, and killed three times, once before anything was stored."""
    runs = [dataclasses.replace(run, seed=seed) for seed in range(3)]
    whole = training.train(runs)
    for chunks in (0, 1, 2):
        left = itertools.count(chunks, -1)

        def advance(protocol, advance=Protocol.advance, left=left):
            if next(left) == 0:
                raise KeyboardInterrupt
            advance(protocol)

        with monkeypatch.context() as patch:
            patch.setattr(Protocol, "advance", advance)
            with pytest.raises(KeyboardInterrupt):
                training.train(runs, checkpoints=tmp_path)
    resumed = training.train(runs, checkpoints=tmp_path)
    assert timeless(resumed) == timeless(whole)
    training.forget(tmp_path, runs[1:])
    assert [*tmp_path.iterdir()]
    training.forget(tmp_path, runs[:1])
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("stored_at_once")
def test_a_resumed_training_does_not_start_again(tmp_path, monkeypatch):
    """The second process makes the steps that are left, and its seconds are added."""
    run, counts = memorization_run(steps=100, evaluate_every=10), []

    def advance(protocol, advance=Protocol.advance):
        counts.append(protocol.count)
        if counts == [0, 10, 20, 30]:
            raise KeyboardInterrupt
        advance(protocol)

    monkeypatch.setattr(Protocol, "advance", advance)
    with pytest.raises(KeyboardInterrupt):
        training.train([run], checkpoints=tmp_path)
    [path] = tmp_path.iterdir()
    content = torch.load(path, weights_only=True)
    content["state"]["seconds"] += 1000
    torch.save(content, path)
    [outcome] = training.train([run], checkpoints=tmp_path)
    assert counts == [0, 10, 20, 30, *range(30, 100, 10)]
    assert outcome.wall_s > 1000


def test_a_checkpoint_belongs_to_its_origin(tmp_path):
    """That is runs in their order, a device, a version of torch and the sources."""
    folder, runs = tmp_path / "new", [memorization_run(), memorization_run(seed=1)]
    checkpoint = Checkpoint(folder, runs, "cpu")
    checkpoint.store({"count": 7})
    assert Checkpoint(folder, runs, "cpu").load() == {"count": 7}
    other = Checkpoint(folder, runs[::-1], "cpu")
    assert other.load() is None
    shutil.copy(checkpoint.path, other.path)
    assert other.load() is None
    assert Checkpoint(folder, runs, "another").load() is None
    for field in ("sources", "torch"):
        other = Checkpoint(folder, runs, "cpu")
        other.origin[field] = "0"
        assert other.load() is None


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


def test_a_state_not_written_whole_leaves_the_last(tmp_path, monkeypatch):
    """A killed process leaves half a file; where the disk is full, the training goes on."""
    checkpoint = Checkpoint(tmp_path, [memorization_run()], "cpu")
    checkpoint.store({"count": 7})
    errors = iter([KeyboardInterrupt(), RuntimeError("iostream error")])

    def save(content, path):
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
