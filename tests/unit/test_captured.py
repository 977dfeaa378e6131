"""Captured steps, as far as a CPU can try them: its graph calls the recorded function again."""

import dataclasses
import gc
import weakref

import pytest
import torch

from attnmem.lab import engine
from attnmem.lab.protocols import PROTOCOLS

from plain import association_run, bigram_run, memorization_run

CPU = torch.device("cpu")

TRAININGS = {
    "watched after the first chunk": bigram_run(T=128, batch=32, steps=4 * 40),
    "watched from the first chunk": bigram_run(T=128, batch=32, steps=4 * 10),
    "three layers and an MLP": bigram_run(layers=3, width=12, model="mlp", H=1),
    "epochs of a prime length": bigram_run(T=67 * 4, batch=4, steps=2 * 67),
    "one batch for all steps": association_run(d=3, d_h=2, H=1, steps=200, evaluate_every=10),
    "the last chunk shorter": memorization_run(steps=45, evaluate_every=20),
    "learned before the end": memorization_run(
        T=5, batch=4, lr=3e-2, steps=400, evaluate_every=10, early_stop=True
    ),
    "looks of twice a prime length apart": memorization_run(steps=2 * 67, evaluate_every=2 * 67),
    "own contexts": memorization_run(context="random", steps=45, evaluate_every=9),
}
GRAPHS = {"watched after the first chunk": 2, "epochs of a prime length": 0}  # of others one


class Replayed:
    """Stands for a graph on a CPU, where nothing can be recorded without being done."""

    def __init__(self, stack, function):
        self.function, found = function, []
        stack.rehearse(lambda: found.append(function()), times=1)
        [self.outputs] = found

    def replay(self):
        for held, new in zip(self.outputs, self.function(), strict=True):
            held.copy_(new)


@pytest.fixture
def graphs(monkeypatch):
    """All that are recorded; from now on a CPU's steps are captured, too."""
    made = []
    start = engine.Stack.__init__

    def captures(stack, *arguments, **options):
        start(stack, *arguments, **options)
        stack.captures = True

        def recorded(function):
            made.append(Replayed(stack, function))
            return made[-1], made[-1].outputs

        monkeypatch.setattr(engine, "recorded", recorded)

    monkeypatch.setattr(engine.Stack, "__init__", captures)
    return made


def found(runs):
    """What a stack reaches whose runs stay in it, as on a GPU."""
    protocol = PROTOCOLS[runs[0].task](runs, CPU, stays=True)
    while not protocol.done:
        protocol.advance()
    return protocol.reached


@pytest.mark.parametrize("name", TRAININGS)
def test_captured_steps_reach_what_single_ones_reach(name, request):
    runs = [dataclasses.replace(TRAININGS[name], seed=seed) for seed in range(2)]
    single = found(runs)
    graphs = request.getfixturevalue("graphs")
    assert found(runs) == single
    assert len(graphs) == GRAPHS.get(name, 1)
    assert all(outcome.accuracy is not None for outcome in single.values())


def test_what_is_released_is_freed_at_once():
    """Nothing waits for a search for circles, so that a GPU has the memory for the next stack."""
    gc.disable()
    try:
        protocol = PROTOCOLS["classes"]([TRAININGS["own contexts"]], CPU)
        protocol.advance()
        left = weakref.ref(protocol)
        protocol.stack.release()
        del protocol
        assert left() is None
    finally:
        gc.enable()
