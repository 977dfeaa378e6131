"""Captured steps, as far as a CPU can try them: its graph calls the recorded function again."""

import dataclasses
import gc
import weakref

import pytest
import torch

from attnmem.lab import engine
from attnmem.lab.protocols import PROTOCOLS, Protocol

from plain import association_run, bigram_run, memorization_run

CPU = torch.device("cpu")

TRAININGS = {
    "epochs longer than a chunk": bigram_run(T=128 * 4, batch=4, steps=4 * 128),
    "three layers and an MLP": bigram_run(layers=3, width=12, model="mlp", H=1),
    "epochs of a prime length": bigram_run(T=67 * 4, batch=4, steps=2 * 67),
    "one batch for all steps": association_run(d=3, d_h=2, H=1, steps=200, evaluate_every=10),
    "the last chunk shorter": memorization_run(steps=45, evaluate_every=20),
    "learned before the end": memorization_run(
        T=5, batch=4, lr=3e-2, steps=400, evaluate_every=10, early_stop=True
    ),
    "own contexts": memorization_run(context="random", steps=45, evaluate_every=9),
}


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


def found(runs, captured=None):
    """What a stack reaches whose runs stay in it, as on a GPU."""
    protocol = PROTOCOLS[runs[0].task](runs, CPU, stays=True)
    protocol.captured = captured
    while not protocol.done:
        protocol.advance()
    return protocol.reached


@pytest.mark.parametrize("name", TRAININGS)
def test_captured_steps_reach_what_single_ones_reach(name, monkeypatch):
    runs = [dataclasses.replace(TRAININGS[name], seed=seed) for seed in range(2)]
    single, made, stacks = found(runs), [], []

    def recorded(function):
        made.append(Replayed(function, stacks[-1].adam.state()))
        return made[-1], made[-1].outputs

    def steps(protocol, *arguments, original=Protocol.steps):
        stacks.append(protocol)
        return original(protocol, *arguments)

    monkeypatch.setattr(engine, "_recorded", recorded)
    monkeypatch.setattr(Protocol, "steps", steps)
    assert found(runs, engine.Captured()) == single
    assert len(made) == 1
    assert all(reached["accuracy"] is not None for reached in single.values())


def test_what_is_released_is_freed_at_once():
    """Nothing waits for a search for circles, so that a GPU has the memory for the next stack."""
    gc.disable()
    try:
        protocol = PROTOCOLS["classes"]([TRAININGS["own contexts"]], CPU)
        protocol.advance()
        left = weakref.ref(protocol)
        del protocol
        assert left() is None
    finally:
        gc.enable()
