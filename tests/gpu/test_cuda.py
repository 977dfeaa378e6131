"""The engine on a GPU; skipped where there is none.

Captured steps are compared with single ones bit for bit, and with a CPU within float32 rounding.
"""

import dataclasses
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attnmem.lab import gradients, training
from attnmem.lab.protocols import PROTOCOLS
from attnmem.lab.training import device_settings

from plain import association_run, bigram_run, memorization_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
CPU, GPU = torch.device("cpu"), torch.device("cuda")

RUNS = {
    "bigrams": bigram_run(T=128, batch=32, steps=64),
    "bigrams, watched after the first chunk": bigram_run(T=128, batch=32, steps=160),
    "three layers": bigram_run(layers=3, d_h=3),
    "mlp": bigram_run(model="mlp", H=1, width=12),
    "associations": association_run(d=8, d_h=8, H=4, steps=200, lr=3e-2, evaluate_every=10),
    "classes": memorization_run(steps=64, evaluate_every=16),
    "own contexts": memorization_run(steps=64, evaluate_every=16, context="random"),
    "reals": memorization_run(steps=64, evaluate_every=16, task="reals", N=None),
}


def seeds(run, count=3):
    return [dataclasses.replace(run, seed=seed) for seed in range(count)]


def results_of(outcomes):
    return [dataclasses.replace(outcome, wall_s=0.0) for outcome in outcomes]


def first_steps(runs, device, steps, *, captured):
    """Losses before each of the first steps, and the shares that were right, NaN if not watched."""
    seen = []
    with device_settings(device, tf32=False):
        protocol = PROTOCOLS[runs[0].task](runs, device)
        protocol.look = lambda *chunk: seen.append([x.to(CPU, copy=True) for x in chunk])
        if not captured:
            protocol.captured = None
        while sum(len(losses) for losses, _ in seen) < steps and not protocol.done:
            protocol.advance()
        if protocol.captured:
            protocol.captured.release()
    return [torch.cat(part)[:steps] for part in zip(*seen, strict=True)]


@pytest.mark.parametrize("name", RUNS)
def test_captured_steps_are_single_ones_and_a_cpus(name):
    """The single ones to the last bit; a CPU's within the rounding of float32, grown by training.

    A cross-entropy is rounded like its logits, however small it is.
    """
    runs = seeds(RUNS[name])
    losses, shares = first_steps(runs, GPU, 160, captured=True)
    single, watched = first_steps(runs, GPU, 160, captured=False)
    assert torch.equal(losses, single)
    known = ~watched.isnan()
    assert torch.equal(shares[known], watched[known])
    on_cpu, _ = first_steps(runs, CPU, 160, captured=False)
    assert ((losses - on_cpu).abs() / (on_cpu.abs() + 1e-4)).max() < 1e-2


@pytest.mark.parametrize("name", RUNS)
def test_a_training_repeats_to_the_last_bit(name):
    once, again = (results_of(training.train(seeds(RUNS[name]), device="cuda")) for _ in range(2))
    assert once == again


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("associations", {"T": 20, "batch": 20, "lr": 1e-2, "steps": 400}),
        ("classes", {"T": 4, "batch": 4, "lr": 1e-2, "steps": 1200}),
    ],
)
def test_finished_runs_change_nothing_for_others(name, other):
    """What they do afterwards is ignored."""
    run = dataclasses.replace(RUNS[name], early_stop=True, **other)
    together = training.train(seeds(run), device="cuda")
    for alone, outcome in zip(seeds(run), together, strict=True):
        [single] = training.train([alone], device="cuda")
        assert (single.accuracy, single.best_step) == (outcome.accuracy, outcome.best_step)


def test_a_training_with_all_49_right_stops():
    """49 times 1 / 49 is less than 1."""
    run = association_run(d=8, d_h=8, H=8, T=49, batch=49, steps=2000, lr=1e-2, early_stop=True)
    [outcome] = training.train([run], device="cuda")
    assert outcome.accuracy == 1
    assert outcome.best_step < run.steps


def test_four_workers_are_one():
    stacks = [seeds(run) for run in RUNS.values()]
    alone = [results_of(training.train(stack, device="cuda")) for stack in stacks]
    with ThreadPoolExecutor(4) as pool:
        together = pool.map(lambda stack: training.train(stack, device="cuda"), stacks)
        assert [results_of(outcomes) for outcomes in together] == alone


@pytest.mark.parametrize("name", RUNS)
def test_no_step_waits_for_the_host(name):
    """Once it is captured, a chunk is launched without synchronisation, batches included."""
    with device_settings(GPU, tf32=False):
        protocol = PROTOCOLS[RUNS[name].task](seeds(RUNS[name]), GPU)
        protocol.look = lambda losses, shares: None
        for _ in range(2):
            protocol.advance()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            protocol.advance()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            protocol.captured.release()


def test_an_error_gives_the_memory_back():
    def broken(losses, shares):
        raise RuntimeError("broken off")

    run = RUNS["own contexts"]
    training.train([run], device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with device_settings(GPU, tf32=False):
        protocol = PROTOCOLS[run.task]([run], GPU)
        protocol.look = broken
        with pytest.raises(RuntimeError, match="broken off"):
            protocol.advance()
        del protocol
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


def test_a_killed_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(training.Checkpoint, "interval", 0.0)
    stack = seeds(RUNS["classes"])
    whole = results_of(training.train(stack, device="cuda"))
    evaluate = PROTOCOLS["classes"].evaluate
    seen = []

    def killed(protocol):
        seen.append(protocol.count)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return evaluate(protocol)

    with monkeypatch.context() as patch:
        patch.setattr(PROTOCOLS["classes"], "evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            training.train(stack, device="cuda", checkpoints=tmp_path)
    assert results_of(training.train(stack, device="cuda", checkpoints=tmp_path)) == whole


def test_the_gradient_of_a_look_up_is_that_of_a_cpu():
    """And it repeats to the last bit."""
    table, tokens = torch.randn(3, 5, 7), torch.randint(7, (3, 100))
    weight = torch.randn(3, 5, 100)

    def gradient(device):
        _, vjp = gradients.take_columns_vjp(table.to(device), tokens.to(device))
        return vjp(weight.to(device))[0]

    assert torch.equal(gradient("cuda"), gradient("cuda"))
    torch.testing.assert_close(gradient("cuda").cpu(), gradient("cpu"))


def test_more_products_at_once_than_a_grid_has_rows():
    """An evaluation takes 4096 examples of every run, more than 65,535 in a stack of 16."""
    numbers = torch.arange(7.0, device="cuda").repeat(10_000)[:, None, None]
    left, right = numbers.expand(-1, 4, 4), torch.eye(4, device="cuda").expand(len(numbers), 4, 4)
    assert torch.equal(torch.bmm(left, right), left)
    assert torch.equal(torch.baddbmm(left, left, right), 2 * left)
