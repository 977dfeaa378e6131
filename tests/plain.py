"""The published models and trainings as such code is usually written: one model, nothing stacked.

What the engine does is compared with these step by step. They share with it what a run's key
decides (initial weights, data, the generator of the order), and nothing else.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from attnmem.lab import data, models
from attnmem.lab.data import pairs_of, words_of
from attnmem.lab.store import Reading, Run, Skewed


def _run(fields):
    kind = Skewed if {"prior", "entropy"} & {*fields} else Run
    if fields["task"] == "text":
        kind = Reading
    return kind(experiment="test", profile="test", **fields)


def bigram_run(**changes):
    sizes = {"model": "aot", "variant": "code", "d": 5, "d_h": 5, "H": 3, "layers": 1}
    sizes |= {"N": 7, "n": 2, "T": 128, "steps": 40, "batch": 32, "width": None, "seed": 0}
    protocol = {"task": "bigrams", "context": None, "schedule": "linear"}
    protocol |= {"lr": 0.1, "lr_start": 0.1, "lr_end": 0.005}
    return _run(sizes | protocol | changes)


def memorization_run(**changes):
    sizes = {"model": "mha", "variant": "code", "d": 8, "d_h": 6, "H": 3, "layers": 1, "N": 5}
    sizes |= {"n": 4, "T": 50, "steps": 40, "batch": 16, "width": None, "seed": 0}
    protocol = {"task": "classes", "context": "shared", "schedule": "warmup-cosine"}
    protocol |= {"lr": 1e-2, "lr_start": 0.01, "lr_end": 0.0}
    protocol |= {"evaluate_every": 7, "early_stop": False}
    return _run(sizes | protocol | changes)


def association_run(**changes):
    protocol = {"task": "associations", "T": 30, "batch": 30, "evaluate_every": 7}
    protocol |= {"lr": 1e-2, "lr_start": 1.0, "lr_end": 0.1, "early_stop": True}
    return bigram_run(**(protocol | changes))


# --- models ---------------------------------------------------------------------------------------

READINGS = {  # shared maps, positions in the skip, scaled, published initialization, tied
    "code": (True, False, True, True, True),
    "own-maps": (False, False, True, True, True),
    "skip-positions": (True, True, True, True, True),
    "unscaled": (True, False, False, True, True),
    "default-init": (True, False, True, False, True),
    "own-layers": (True, False, True, True, False),
    "paper": (False, True, False, True, True),
    "paper-default-init": (False, True, False, False, True),
}


class BigramModel(nn.Module):
    """The published architecture, all places computed; what weights lack layers have in common."""

    def __init__(self, run, P):
        super().__init__()
        self.run = run
        self.P = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(x) for k, x in P.items()})

    def forward(self, tokens):
        run, P, S = self.run, self.P, tokens.shape[1]
        self.mask = torch.ones(S, S, dtype=torch.bool).triu(1)
        _, position_in_skip, _, _, tied = READINGS[run.variant]
        x = P["embedding"][tokens]
        for layer in range(run.layers):
            table = 0 if tied else layer
            positions = P[f"positions_{table}"][:S]
            if position_in_skip:
                x = x + positions
            a = F.linear(x, P[f"down_{table}"]) if f"down_{table}" in P else x
            if not position_in_skip:
                a = a + positions
            out = sum(self.head(layer, h, a) for h in range(run.H))
            x = x + (F.linear(out, P[f"up_{table}"]) if f"up_{table}" in P else out)
            if run.width:
                hidden = F.gelu(F.linear(x, P[f"W_1_{layer}"], P[f"b_1_{layer}"]))
                last = P.get(f"b_2_{layer}", None)
                x = x + F.linear(hidden, P[f"W_2_{layer}"], last)
        return F.linear(x, P["unembedding"])[:, -1]

    def head(self, layer, h, a):
        Q, K, V, O = (self.P[f"{name}_{layer}"][h] for name in ("W_Q", "W_K", "W_V", "W_O"))
        logits = (a @ Q.T) @ (a @ K.T).mT
        if READINGS[self.run.variant][2]:
            logits = logits / math.sqrt(self.run.d_h)
        alpha = logits.masked_fill(self.mask, -math.inf).softmax(-1)
        return F.linear(alpha @ (a @ V.T), O)


class Memorizer(nn.Module):
    """The model that Mahdavi et al. train: every token embedded and projected."""

    def __init__(self, run, P):
        super().__init__()
        self.run = run
        self.P = nn.ParameterDict({k: nn.Parameter(x) for k, x in P.items()})
        self.places = torch.tensor(
            [[self.wave(s, i) for i in range(run.d)] for s in range(run.n + 1)],
            dtype=P["W_E"].dtype,
        )

    def wave(self, place, i):
        """The sinusoids of Vaswani et al.: sines and cosines in turn."""
        angle = place / 10000 ** (i // 2 * 2 / self.run.d)
        return math.cos(angle) if i % 2 else math.sin(angle)

    def attention(self, contexts, queries):
        P = self.P
        E = F.linear(contexts, P["W_E"], P["b_E"]) + self.places[1:]
        e = F.linear(queries, P["W_E"], P["b_E"]) + self.places[0]
        keys = [(E @ P["W_K"][h]) @ (P["W_Q"][h].T @ e[..., None]) for h in range(self.run.H)]
        return E, torch.stack([(key[..., 0] / 8).softmax(-1) for key in keys], dim=1)

    def forward(self, contexts, queries):
        P = self.P
        E, alpha = self.attention(contexts, queries)
        o = [((alpha[:, h, None] @ E)[:, 0]) @ P["W_V"][h] for h in range(self.run.H)]
        return F.linear(torch.cat(o, dim=-1) @ P["W_O"], P["W_D"], P["b_D"])


# --- trainings ------------------------------------------------------------------------------------


class Path(NamedTuple):
    """Losses and rates of every step, and what is reported in the end."""

    losses: list[float]
    rates: list[float]
    reported: dict


def _start(run, module):
    initial = models.MODELS[run.model].initial
    model = module(run, initial(run, data.generator(run, "weights")))
    return model, torch.optim.Adam(model.parameters(), lr=run.lr)


def _step(optimizer, schedule, loss, path):
    path.losses.append(loss.item())
    path.rates.append(optimizer.param_groups[0]["lr"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if schedule:
        schedule.step()


def train_bigrams(run) -> Path:
    """Epoch by epoch, with PyTorch's LinearLR."""
    model, optimizer = _start(run, BigramModel)
    tokens, answers, table, distributions = pairs_of(run)
    labels = answers
    if distributions is not None:
        labels = distributions.T[run.N * tokens[:, 0] + tokens[:, 1]]
    batches = run.T // run.batch
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, run.lr_start, run.lr_end, run.steps // batches
    )
    order = data.generator(run, "order")
    everything = torch.cartesian_prod(torch.arange(run.N), torch.arange(run.N))
    if run.task == "text":
        _, new = words_of(run)
        everything, table = new[:, :2], new[:, 2]
    path, right, curve = Path([], [], {}), [], []
    for _ in range(run.steps // batches):
        for batch in torch.randperm(run.T, generator=order).split(run.batch):
            logits = model(tokens[batch])
            right.append((logits.argmax(-1) == answers[batch]).double().mean().item())
            _step(optimizer, None, F.cross_entropy(logits, labels[batch]), path)
        schedule.step()
        hits = model(everything).argmax(-1) == table.flatten()
        curve.append(hits.double().mean().item())
    last = slice(-101, -1)
    path.reported["accuracy"] = sum(right[last]) / len(right[last])
    path.reported["loss"] = sum(path.losses[last]) / len(right[last])
    path.reported["curve"] = curve
    if run.task == "text":
        path.reported["new_loss"] = F.cross_entropy(model(everything), table).item()
    return path


def train_associations(run) -> Path:
    """All associations at every step; looked at on the way."""
    model, optimizer = _start(run, BigramModel)
    tokens, answers, *_ = pairs_of(run)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, run.lr_start, run.lr_end, run.steps)
    path, best = Path([], [], {}), None
    for step in range(1, run.steps + 1):
        logits = model(tokens)
        loss = F.cross_entropy(logits, answers)
        right = (logits.argmax(-1) == answers).double().mean().item()
        _step(optimizer, schedule, loss, path)
        if step % run.evaluate_every == 0 or step == run.steps:
            if best is None or (right, -loss.item()) > best[:2]:
                best = right, -loss.item(), step
            if run.early_stop and best[0] == 1:
                break
    names = ("accuracy", "loss", "best_step")
    path.reported.update(zip(names, (best[0], -best[1], best[2]), strict=True))
    return path


def train_memorization(run) -> Path:
    """Batches in a new order every epoch; the best weights by the loss on the whole set."""
    model, optimizer = _start(run, Memorizer)
    contexts, queries, labels = data.contexts_of(run)
    if run.context == "shared":
        contexts = contexts.expand(run.T, -1, -1)
    warmup = round(0.05 * run.steps) or 1

    def factor(step):
        if step < warmup:
            return run.lr_start + (1 - run.lr_start) * step / warmup
        half_circle = math.pi * (step - warmup) / (run.steps - warmup)
        return run.lr_end + (1 - run.lr_end) * (1 + math.cos(half_circle)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    batches = _batches(run)
    path, best = Path([], [], {}), None
    evaluated = 0
    for step in range(1, run.steps + 1):
        batch = next(batches)
        outputs = model(contexts[batch], queries[batch])
        _step(optimizer, schedule, _loss(outputs, labels[batch]), path)
        if step % run.evaluate_every == 0 or step == run.steps:
            evaluated += 1
            with torch.no_grad():
                outputs = model(contexts, queries)
            loss = _loss(outputs, labels).item()
            if best is None or loss < best[0]:
                right = (outputs.argmax(-1) == labels).double().mean().item() if run.N else None
                best = loss, right, step
            if run.early_stop and best[1] == 1:
                break
    names = ("loss", "accuracy", "best_step")
    path.reported.update(zip(names, best, strict=True))
    if run.N and not run.early_stop:
        path.reported.update(saturation(model, contexts, queries))
    return path


def _batches(run):
    """Batches without end: epochs on end, or each with what is left as its last batch."""
    order = data.generator(run, "order")
    epochs = (torch.randperm(run.T, generator=order).tolist() for _ in itertools.count())
    if run.last_batch == "short":
        for epoch in epochs:
            yield from (epoch[i : i + run.batch] for i in range(0, run.T, run.batch))
    stream = itertools.chain.from_iterable(epochs)
    while True:
        yield [*itertools.islice(stream, run.batch)]


def _loss(outputs, labels):
    if labels.is_floating_point():
        return F.mse_loss(outputs[:, 0], labels)
    return F.cross_entropy(outputs, labels)


def saturation(model, contexts, queries) -> dict:
    """At the end: of pairs of an example and a head, of examples, of numbers of free heads."""
    with torch.no_grad():
        _, alpha = model.attention(contexts, queries)
    free = [sum(float(head.max()) <= 0.99 for head in heads) for heads in alpha]
    H, T = alpha.shape[1], len(free)
    return {
        "saturated": 1 - sum(free) / (H * T),
        "served": sum(count > 0 for count in free) / T,
        "serving": [free.count(k) / T for k in range(H + 1)],
    }


TRAINERS = {
    "bigrams": train_bigrams,
    "text": train_bigrams,
    "associations": train_associations,
    "classes": train_memorization,
    "reals": train_memorization,
}
