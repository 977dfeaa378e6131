"""How many bits of its labels every stored training holds, and in how many parameters.

One estimator serves all rows. Without the model, an ideal code for ``T`` labels that are uniform
over ``N`` classes needs ``T log2 N`` bits. With the model at hand it needs fewer, and the bits that
it saves are those that the model holds (:func:`saved_bits`).
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import pandas as pd
import torch

from ..checks import Range, checked, refuse
from ..theory import counts
from . import models, protocols
from .experiments import EXPERIMENTS, rows
from .searches import SEARCHES
from .store import Run
from .training import device_settings

SHAPE = ("model", "variant", "context", "N", "n", "d", "d_h", "H", "width", "layers")
CELL = (*SHAPE, "T", "experiment", "steps", "lr")
_COUNTS = ("parameters", "layer_parameters", "dimension")
_PRECISION = 1e-8  # real labels that are met more closely count as met to this
Positive = Annotated[int | float, Range(0, math.inf)]


@checked
def saved_bits(
    accuracy: Annotated[int | float | None, Range(0, 1)],
    loss: Positive,
    classes: int | None,
    labels: Positive,
) -> float:
    """Bits that a model saves in a code for so many labels.

    For classes it is the better of two codes: one with the model's probabilities, whose ``loss`` is
    the mean cross-entropy in nats, and one that lists the answers that are wrong. For real labels
    (``classes`` and ``accuracy`` None) that are uniform on [0, 1] it is a normal code around the
    outputs; mean square errors, the ``loss``, below ``1e-16`` count as that.

    Example:
        >>> round(saved_bits(1.0, 0.07, classes=50, labels=20))
        113

    Source: this book; :mod:`attnmem.theory.counts` has the three codes.
    """
    if classes is None:
        return labels * float(counts.error_to_bits(max(loss, _PRECISION**2), 1))
    if accuracy is None:
        refuse("accuracy", accuracy, "a share, since the labels are classes")
    by_loss = counts.loss_to_bits(loss, classes, 1)
    return labels * max(0.0, by_loss, float(counts.accuracy_to_bits(accuracy, classes, 1)))


def _labels(run: Run) -> float:
    """The labels that a run is trained on; of bigrams, the pairs expected in its draws."""
    return counts.different_draws(run.N**2, run.T) if run.task == "bigrams" else float(run.T)


def trainings(profile: str) -> pd.DataFrame:
    """Every stored training that did not diverge, with its bits and three counts of parameters.

    Beside the fields of its configuration a line has ``accuracy`` and ``loss``, ``labels``,
    ``bits``, ``parameters`` (all that are trained), ``layer_parameters`` (without tables) and
    ``dimension`` (of the family of functions; missing if it is not known).
    """
    lines = []
    for name in (*EXPERIMENTS, *SEARCHES):
        for run, outcome in rows(name, profile).values():
            if outcome.diverged is not None:
                continue
            sizes = (models.parameter_count(run, tables=tables) for tables in (True, False))
            counted = dict(zip(_COUNTS, (*sizes, models.dimension(run)), strict=True))
            found = {"accuracy": outcome.accuracy, "loss": outcome.loss, "labels": _labels(run)}
            bits = saved_bits(outcome.accuracy, outcome.loss, run.N, found["labels"])
            lines.append(vars(run) | found | {"bits": bits} | counted)
    return pd.DataFrame(lines)


class Recount(NamedTuple):
    """Bits of a training on bigrams: as its row is read, and counted over all its pairs."""

    read: float
    counted: float


def recount(run: Run) -> Recount:
    """Train on bigrams once more, and count the bits on every pair that was drawn.

    A row's accuracy and loss lean towards pairs that were drawn often.
    """
    if run.task != "bigrams":
        refuse("run", f"the task {run.task!r}", "bigrams")
    cpu = torch.device("cpu")
    with device_settings(cpu, tf32=False):
        protocol = protocols.PROTOCOLS["bigrams"]([run], cpu)
        while not protocol.done:
            protocol.advance()
        found = protocol.reached[run.key]
        drawn = protocol.columns[0].unique(dim=1)
        tokens, answers = drawn[:2].mT, drawn[2]
        with torch.no_grad():
            logits = models.aot_logits(protocol.parameters, run, tokens[None])[0].double()
    loss = torch.nn.functional.cross_entropy(logits.T, answers).item()
    accuracy = (logits.argmax(dim=0) == answers).double().mean().item()
    return Recount(
        saved_bits(found["accuracy"], found["loss"], run.N, _labels(run)),
        saved_bits(accuracy, loss, run.N, len(answers)),
    )


def largest_sets(table: pd.DataFrame) -> pd.DataFrame:
    """Of every shape, the :func:`trainings` of the largest set that any got right."""
    right = table[table.accuracy == 1]
    most = right.groupby([*SHAPE], dropna=False)["T"].transform("max")
    return right[right["T"] == most]


def span(table: pd.DataFrame) -> dict[str, float]:
    """Bits per parameter over the cells of :func:`trainings`, each the mean of its seeds.

    ``low`` and ``high`` are the least and the largest number of bits for each of all parameters;
    of the cell that has the largest there are bits for each parameter without tables and for each
    dimension, NaN if that is not known. ``cells`` is how many there are.
    """
    if table.empty:
        refuse("table", "no lines", "at least one")
    cells = table.groupby([*CELL], dropna=False)[["bits", *_COUNTS]].mean().reset_index()
    each = cells.bits / cells.parameters
    best = cells.loc[each.idxmax()]
    others = {name: float(best.bits / best[name]) for name in _COUNTS[1:]}
    return {"low": each.min(), "high": each.max(), **others, "cells": len(cells)}
