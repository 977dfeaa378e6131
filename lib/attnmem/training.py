"""Many small models trained at once: runs that share shapes are stacked along a leading axis.

Every run keeps its own seed for weights, data and order, so a run in a stack follows the same path
as the same run alone, up to the rounding of batched products. The forward passes are those of
:mod:`attnmem.attention`; here are initialisations, schedules, and the two papers' training loops.

Where the papers leave something open, this module decides, and says so: see ``# open:``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from . import results, tasks
from .attention import (
    OWN,
    SHARED,
    MHAWeights,
    attend_and_add_columns,
    attention_logits,
    attention_weights,
    check_features,
    combine_heads,
    head_values,
    look_up,
    mha,
    over_tokens,
)
from .checks import check_integer, check_number, checked_by, refuse
from .results import Outcome, Run

Parameters = dict[str, Tensor]
LAST_BATCHES = slice(-101, -1)  # Dana et al. average the accuracy of batches -101 to -2


class Found(NamedTuple):
    """What a run reached, in the fields of :class:`attnmem.results.Outcome`."""

    accuracy: float | None
    loss: float
    curve: tuple[float, ...] | None = None
    best_step: int | None = None
    saturated: tuple[float, ...] | None = None
    served: tuple[float, ...] | None = None
    serving: tuple[float, ...] | None = None


class Variant(NamedTuple):
    """How an attention-only transformer is read: the paper's equations or the published code.

    ``shared_maps``: all heads share one map to dimension ``d_h`` and one back (the code, used where
    ``d_h`` differs from ``d``), or each head projects from dimension ``d`` (the equations).
    ``position_in_skip``: positions are added to the residual stream, or to the attention's input
    only. ``scaled``: logits are divided by the root of ``d_h``, or not. ``published_init``: initial
    weights as in the published code, or PyTorch's defaults for an ``Embedding`` and a ``Linear``.
    ``tied``: all layers use one table of positions and one pair of maps, and the feed-forward
    layer's second map has no bias (the code); or each layer has its own, and the bias.
    """

    shared_maps: bool = True
    position_in_skip: bool = False
    scaled: bool = True
    published_init: bool = True
    tied: bool = True


VARIANTS = {
    "code": Variant(),
    "own-maps": Variant(shared_maps=False),
    "skip-positions": Variant(position_in_skip=True),
    "unscaled": Variant(scaled=False),
    "default-init": Variant(published_init=False),
    "own-layers": Variant(tied=False),
    "paper": Variant(shared_maps=False, position_in_skip=True, scaled=False),
    "paper-default-init": Variant(False, True, False, False),
}


def generator(run: Run, stream: str) -> torch.Generator:
    """A generator of its own for every run and purpose, the same on every machine."""
    digest = hashlib.sha256(f"{run.key} {stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def stack_name(run: Run) -> Run:
    """What runs of one stack have in common: everything but the seed."""
    return dataclasses.replace(run, seed=0)


# --- initial weights ------------------------------------------------------------------------------


def _uniform(g: torch.Generator, bound: float, *shape: int) -> Tensor:
    return (2 * torch.rand(*shape, generator=g) - 1) * bound


def _linear(g: torch.Generator, outputs: int, inputs: int) -> Tensor:
    """PyTorch's default for ``Linear(inputs, outputs)``, whose weight is ``(outputs, inputs)``."""
    return _uniform(g, inputs**-0.5, outputs, inputs)


def _xavier(g: torch.Generator, *shape: int) -> Tensor:
    """Xavier's uniform matrices, in the last two axes."""
    return _uniform(g, math.sqrt(6 / sum(shape[-2:])), *shape)


def _embedding(g: torch.Generator, rows: int, dim: int) -> Tensor:
    """PyTorch's default for ``Embedding(rows, dim)``."""
    return torch.randn(rows, dim, generator=g)


def aot_parameters(run: Run, g: torch.Generator) -> Parameters:
    """Initial weights of an attention-only or MLP transformer, drawn as its variant says."""
    variant, d, d_h = VARIANTS[run.variant], run.d, run.d_h
    shared = variant.shared_maps and d_h != d
    inner = d_h if shared else d
    published = variant.published_init
    table = _linear if published else _embedding
    P = {"embedding": table(g, run.N, d), "unembedding": _linear(g, run.N, d)}
    for layer in range(run.layers):
        if layer == 0 or not variant.tied:
            at = _shared_by(variant, layer)
            # Three rows of positions for two places, as in the code.
            P[f"positions.{at}"] = table(g, 3, d if variant.position_in_skip else inner)
            if shared:  # open: without bias, as the heads are
                P[f"down.{at}"] = _linear(g, d_h, d)
                P[f"up.{at}"] = _linear(g, d, d_h)
        # Xavier over the packed (3 d_h, inner) matrix, or each map on its own
        bound = math.sqrt(6 / (3 * d_h + inner)) if published else inner**-0.5
        for name in ("W_Q", "W_K", "W_V"):
            P[f"{name}.{layer}"] = _uniform(g, bound, run.H, d_h, inner)
        P[f"W_O.{layer}"] = _uniform(g, d_h**-0.5, run.H, inner, d_h)
        if run.width:
            P[f"W_1.{layer}"], P[f"b_1.{layer}"] = _with_bias(g, run.width, d)
            P[f"W_2.{layer}"] = _linear(g, d, run.width)
            if not variant.tied:
                P[f"b_2.{layer}"] = _bias(g, d, run.width)
    return P


def _shared_by(variant: Variant, layer: int) -> int:
    """The layer whose positions and maps a layer uses: the first one's, or its own."""
    return 0 if variant.tied else layer


def _with_bias(g: torch.Generator, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    return _linear(g, outputs, inputs), _bias(g, outputs, inputs)


def _bias(g: torch.Generator, outputs: int, inputs: int) -> Tensor:
    """PyTorch's default for the bias of ``Linear(inputs, outputs)``."""
    return _uniform(g, inputs**-0.5, outputs)


def parameter_count(run: Run) -> int:
    """Trained numbers of a model that the loss depends on: all but the unused third position."""
    initial = mha_parameters if run.model == "mha" else aot_parameters
    P = initial(run, generator(run, "weights"))
    unused = sum(x[run.n :].numel() for name, x in P.items() if name.startswith("positions."))
    return sum(x.numel() for x in P.values()) - unused


def mha_parameters(run: Run, g: torch.Generator) -> Parameters:
    """Initial weights of the model that Mahdavi et al. train (``d_v = 1``)."""
    d, d_h, H = run.d, run.d_h, run.H
    outputs = run.N or 1
    W_E, b_E = _with_bias(g, d, d)
    W_D, b_D = _with_bias(g, outputs, d)
    return {
        "W_E": W_E,
        "b_E": b_E,
        "W_Q": _xavier(g, H, d, d_h),
        "W_K": _xavier(g, H, d, d_h),
        "W_V": _xavier(g, H, d, 1),
        "W_O": _xavier(g, H, d),
        "W_D": W_D,
        "b_D": b_D,
    }


# --- forward passes, stacked ----------------------------------------------------------------------


def aot_logits(P: Parameters, run: Run, tokens: Int[Tensor, "R B S"]) -> Float[Tensor, "R N B"]:
    """Logits after the last token, examples along the last axis as everywhere on the way.

    Hidden layers compute every place, the last layer only one. The first place sees itself alone,
    so it is computed once for every token that there is, not for every example.
    """
    S = tokens.shape[-1]
    x = _columns(P["embedding"], tokens)
    first = P["embedding"].mT[:, None]
    for layer in range(run.layers - 1):
        entered = _enter(P, run, layer, x)
        later = [_block(P, run, layer, *entered, s) for s in range(1, S)]
        first = _block(P, run, layer, *_enter(P, run, layer, first), 0)[:, None]
        [chosen] = _columns(first[:, 0].mT, tokens[..., :1]).unbind(dim=1)
        x = torch.stack([chosen, *later], dim=1)
    layer = run.layers - 1
    return P["unembedding"] @ _block(P, run, layer, *_enter(P, run, layer, x), S - 1)


def _columns(table: Float[Tensor, "R N d"], tokens: Tensor) -> Float[Tensor, "R S d B"]:
    return look_up(table, tokens).permute(0, 2, 3, 1).contiguous()


def _enter(P: Parameters, run: Run, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer adds to, and what its attention sees, at the first places of the sequence."""
    variant = VARIANTS[run.variant]
    at = _shared_by(variant, layer)
    positions = P[f"positions.{at}"][:, : x.shape[1], :, None]
    if variant.position_in_skip:
        x = x + positions
    inputs = P[f"down.{at}"][:, None] @ x if f"down.{at}" in P else x
    return x, inputs if variant.position_in_skip else inputs + positions


def _block(P: Parameters, run: Run, layer: int, x: Tensor, inputs: Tensor, s: int) -> Tensor:
    """Attention of place ``s`` to those up to it, then the feed-forward layer if there is one."""
    W_Q, W_K, W_V, W_O = (P[f"{name}.{layer}"] for name in ("W_Q", "W_K", "W_V", "W_O"))
    if VARIANTS[run.variant].scaled:
        W_Q = W_Q * run.d_h**-0.5
    seen, asking = inputs[:, : s + 1], inputs[:, s]
    update = attend_and_add_columns(W_Q.mT, W_K.mT, W_V, W_O, seen, asking)
    at = _shared_by(VARIANTS[run.variant], layer)
    if f"up.{at}" in P:
        update = P[f"up.{at}"] @ update
    y = x[:, s] + update
    if run.width:
        hidden = F.gelu(P[f"W_1.{layer}"] @ y + P[f"b_1.{layer}"][..., None])
        y = y + P[f"W_2.{layer}"] @ hidden
        if f"b_2.{layer}" in P:
            y = y + P[f"b_2.{layer}"][..., None]
    return y


def sinusoids(places: int, dim: int) -> Float[Tensor, "places dim"]:
    """The fixed positions: sines in the even coordinates, cosines in the odd ones."""
    angles = torch.arange(places)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :dim]


@functools.cache
def _positions(places: int, dim: int, device: torch.device) -> Float[Tensor, "places dim"]:
    """On the device once: a captured step may not copy from the host."""
    return sinusoids(places, dim).to(device)


def mha_outputs(
    P: Parameters, run: Run, contexts: Tensor, queries: Float[Tensor, "R B d"]
) -> Float[Tensor, "R B d_out"]:
    """Embed, add positions (the query's is 0), attend, decode; logits over the root of 64."""
    _, values = mha_heads(P, run, contexts, queries)
    return combine_heads(values.flatten(-2), P["W_O"], P["W_D"].mT) + P["b_D"][:, None]


def mha_heads(
    P: Parameters, run: Run, contexts: Tensor, queries: Float[Tensor, "R B d"]
) -> tuple[Float[Tensor, "R B H n"], Float[Tensor, "R B H 1"]]:
    """Attention weights and values of every head in :func:`mha_outputs`.

    Own contexts are never embedded: logits and values are linear in tokens and in positions, so the
    embedding goes into the heads' maps, and positions, which all share, are attended to apart.
    """
    positions = _positions(run.n + 1, run.d, queries.device)
    W_E, W_Q, W_K, W_V = P["W_E"].mT, P["W_Q"] / 8, P["W_K"], P["W_V"]
    e = queries @ W_E + P["b_E"][:, None] + positions[0]
    places = positions[1:] + P["b_E"][:, None]
    if contexts.ndim == queries.ndim:
        E = contexts @ W_E + places
        alpha = attention_weights(W_Q, W_K, E, e)
        return alpha, head_values(alpha, E, W_V, SHARED)
    into = W_E[:, None]
    logits = attention_logits(W_Q, into @ W_K, contexts, e)
    # Without the bias, which adds the same to all tokens' logits and would cost a gradient.
    alpha = over_tokens(logits + attention_logits(W_Q, W_K, positions[1:], e))
    values = head_values(alpha, contexts, into @ W_V, OWN)
    return alpha, values + head_values(alpha, places, W_V, SHARED)


# --- a stack --------------------------------------------------------------------------------------


class Stack:
    """Runs with the same shapes: their weights along a leading axis, and one fused Adam for all."""

    def __init__(self, runs: Sequence[Run], device: torch.device, initial: Callable) -> None:
        each = [initial(run, generator(run, "weights")) for run in runs]
        self.runs = list(runs)
        self.device = device
        self._adopt({name: torch.stack([P[name] for P in each]).to(device) for name in each[0]})

    def _adopt(self, parameters: Parameters) -> None:
        self.parameters = {name: P.requires_grad_() for name, P in parameters.items()}
        # A captured step reads the rate from the device, where `set_rate` writes it.
        on_gpu = self.device.type == "cuda"
        rate = torch.zeros((), device=self.device) if on_gpu else 0.0
        self.optimizer = torch.optim.Adam(
            self.parameters.values(), lr=rate, fused=True, capturable=on_gpu
        )

    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps to come."""
        group = self.optimizer.param_groups[0]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate

    def step(self, loss: Float[Tensor, " R"]) -> None:
        """One Adam step; the runs' gradients do not mix, since the sum of losses separates."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.sum().backward()
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        """Everything that a step changes: weights and the optimizer's state."""
        states = [self.optimizer.state[P] for P in self.parameters.values()]
        return [*self.parameters.values(), *(x for state in states for x in state.values())]

    def keep(self, places: Sequence[int]) -> None:
        """Drop all runs but those at ``places``, with their optimizer state."""
        index = torch.tensor(places, device=self.device)
        before = [(P, self.optimizer.state[P]) for P in self.parameters.values()]
        self.runs = [self.runs[place] for place in places]
        self._adopt({name: P.detach()[index] for name, P in self.parameters.items()})
        for P, (_, state) in zip(self.parameters.values(), before, strict=True):
            averages = {name: state[name][index] for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[P] = {"step": state["step"], **averages}


Batch = Sequence[Tensor]
Step = Callable[..., tuple[Tensor, Tensor]]  # batch -> the runs' losses, and the model's outputs


def stepper(stack: Stack, model: Callable[..., tuple[Tensor, Tensor]], example: Batch) -> Step:
    """A function that takes one batch, makes one step, and returns losses and outputs.

    ``model`` computes the runs' losses ``(R,)`` and its outputs from a batch. What a step returns
    holds until the next one. On a GPU the whole step (forward, backward, optimizer) is captured
    once as a CUDA graph and replayed, so that a hundred small kernels cost one launch.
    """

    def step(*batch: Tensor) -> tuple[Tensor, Tensor]:
        loss, outputs = model(*batch)
        stack.step(loss)
        return loss.detach(), outputs.detach()

    return _captured(stack, step, example) if stack.device.type == "cuda" else step


CAPTURING = threading.Lock()  # a capture waits for the whole device, which no other capture bears


def _captured(stack: Stack, step: Step, example: Batch) -> Step:
    held = [x.clone() for x in example]
    graph = torch.cuda.CUDAGraph()
    with CAPTURING:
        rehearse(stack, lambda: step(*held))
        stack.optimizer.zero_grad(set_to_none=True)
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            returned = step(*held)

    def replay(*batch: Tensor) -> tuple[Tensor, Tensor]:
        for place, x in zip(held, batch, strict=True):
            place.copy_(x)
        graph.replay()
        return returned

    return replay


STREAMS = threading.local()


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """A stream for each thread, so that stacks trained by several fill a GPU together.

    All stacks of a thread use the same one, in rehearsal, capture and replay: cuBLAS keeps a
    workspace for every stream, which graphs that are replayed at once must not share.
    """
    streams = vars(STREAMS)
    with torch.cuda.device(device):
        if device not in streams:
            streams[device] = torch.cuda.Stream()
        with torch.cuda.stream(streams[device]):
            yield
        streams[device].synchronize()


@contextlib.contextmanager
def _flushing_denormals() -> Iterator[None]:
    """Round numbers below the normal range to zero while in here, on this thread.

    Processors compute with such numbers in microcode, many times slower, and the softmax weights of
    saturated heads, with their gradients, hold many. Added to weights near one, a number below
    1e-38 changes no digit of float32.
    """
    before = bool(torch.full((1,), 1e-40, dtype=torch.float32).mul(1) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def rehearse(stack: Stack, step: Callable[[], object], times: int = 3) -> None:
    """Run a step a few times, as a capture requires, and take back all that it changed.

    The optimizer creates its state at the first step, as zeros; so what was not there before is
    set to zero.
    """
    before = {id(x): x.detach().clone() for x in stack.tensors()}
    for _ in range(times):
        step()
    with torch.no_grad():
        for x in stack.tensors():
            x.copy_(before.get(id(x), torch.zeros_like(x)))


def _losses(outputs: Tensor, labels: Tensor) -> Float[Tensor, "R B"]:
    """Cross-entropy for classes, squared error for reals."""
    if labels.is_floating_point():
        return (outputs[..., 0] - labels).square()
    each = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
    return each.view(labels.shape)


# --- Dana et al.: bigrams -------------------------------------------------------------------------


def train_bigrams(runs: Sequence[Run], device: torch.device) -> list[Found]:
    """Accuracy (mean over the last hundred batches but one) and loss there, for every run.

    The curve is the accuracy on all pairs that there are, after every epoch.
    """
    watched, curve = zip(*_epochs(runs, device), strict=True)
    ends = torch.stack([*itertools.chain(*watched)]).mean(dim=0).T.tolist()
    curves = torch.stack(curve, dim=1).tolist()
    return [Found(*end, _rounded(path)) for end, path in zip(ends, curves, strict=True)]


def opening(run: Run, epochs: int) -> tuple[float, ...]:
    """The beginning of a run's curve, without the rest of its training; on the CPU."""
    done = itertools.islice(_epochs([run], torch.device("cpu")), epochs)
    return _rounded(accuracy.item() for _, accuracy in done)


def _rounded(curve: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(accuracy, 4) for accuracy in curve)


def _epochs(
    runs: Sequence[Run], device: torch.device
) -> Iterator[tuple[list[Float[Tensor, "2 R"]], Float[Tensor, " R"]]]:
    """Train; after every epoch yield (accuracy and loss of its watched batches, of all pairs)."""
    stack = Stack(runs, device, aot_parameters)
    run = runs[0]
    data = [tasks.bigrams(generator(run, "data"), run.N, run.T) for run in runs]
    tokens, labels, tables = (torch.stack(part).to(device) for part in zip(*data, strict=True))
    orders = [generator(run, "order") for run in runs]
    batches = run.T // run.batch
    first = slice(run.batch)
    step = stepper(stack, _bigram_model(stack), (tokens[:, first], labels[:, first]))
    watched = range(run.steps)[LAST_BATCHES]
    for epoch in range(run.steps // batches):
        order = torch.stack([torch.randperm(run.T, generator=g) for g in orders]).to(device)
        shuffled = torch.take_along_dim(tokens, order[..., None], dim=1)
        answers = torch.take_along_dim(labels, order, dim=1)
        stack.set_rate(linear_by_epoch(run, epoch))
        seen = []
        for batch in range(batches):
            part = slice(batch * run.batch, (batch + 1) * run.batch)
            loss, outputs = step(shuffled[:, part], answers[:, part])
            if epoch * batches + batch in watched:
                seen.append(torch.stack([_right(outputs, answers[:, part]), loss]))
        yield seen, _right_of_all(stack, tables)


def _bigram_model(stack: Stack) -> Callable[..., tuple[Tensor, Tensor]]:
    def model(tokens: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        outputs = aot_logits(stack.parameters, stack.runs[0], tokens)
        return F.cross_entropy(outputs, answers, reduction="none").mean(dim=1), outputs

    return model


def _right(outputs: Float[Tensor, "R N B"], answers: Int[Tensor, "R B"]) -> Float[Tensor, " R"]:
    return (outputs.argmax(dim=1) == answers).double().mean(dim=1)


@torch.no_grad()
def _right_of_all(stack: Stack, tables: Int[Tensor, "R N N"], chunk: int = 8192) -> Tensor:
    """The share of all pairs whose next token is predicted, for every run."""
    N = tables.shape[-1]
    pairs = torch.cartesian_prod(*[torch.arange(N, device=tables.device)] * 2)
    answers = tables.flatten(1)
    right = 0.0
    for start in range(0, N * N, chunk):
        part = slice(start, start + chunk)
        outputs = aot_logits(
            stack.parameters, stack.runs[0], pairs[part].expand(len(tables), -1, -1)
        )
        right = right + (outputs.argmax(dim=1) == answers[:, part]).double().sum(dim=1)
    return right / N**2


def train_associations(runs: Sequence[Run], device: torch.device) -> list[Found]:
    """The best accuracy on the way, and the loss there, for every run.

    Each step takes all ``T`` associations, which are different pairs. A run is looked at every
    ``evaluate_every`` steps, and leaves the stack when all its answers are right.
    """
    stack = Stack(runs, device, aot_parameters)
    data = [tasks.associations(generator(run, "data"), run.N, run.T) for run in runs]
    tokens, labels = (torch.stack([d[i] for d in data]).to(device) for i in (0, 1))
    step = stepper(stack, _bigram_model(stack), (tokens, labels))
    best: dict[str, Found] = {}
    for count in range(1, runs[0].steps + 1):
        stack.set_rate(linear_by_epoch(runs[0], count - 1))
        loss, outputs = step(tokens, labels)
        if count % runs[0].evaluate_every and count < runs[0].steps:
            continue
        now = zip(_right(outputs, labels).tolist(), loss.tolist(), strict=True)
        _keep_best(best, stack, [Found(*found) for found in now], count, _most_right)
        left = _unfinished(stack, best)
        if not left:
            break
        if len(left) < len(stack.runs):
            stack.keep(left)
            tokens, labels = tokens[left], labels[left]
            step = stepper(stack, _bigram_model(stack), (tokens, labels))
    return [best[run.key] for run in runs]


def _most_right(found: Found) -> tuple[float, float]:
    return found.accuracy, -found.loss


def _least_loss(found: Found) -> float:
    return -found.loss


def _keep_best(
    best: dict[str, Found],
    stack: Stack,
    now: Sequence[Found],
    count: int,
    merit: Callable[[Found], object],
) -> None:
    """Of every run in the stack, what it reached after ``count`` steps if never better before."""
    for run, found in zip(stack.runs, now, strict=True):
        if run.key not in best or merit(found) > merit(best[run.key]):
            best[run.key] = found._replace(best_step=count)


def _unfinished(stack: Stack, best: dict[str, Found]) -> list[int]:
    """Places of the runs that are not stopped early, at 100% accuracy."""
    return [
        place
        for place, run in enumerate(stack.runs)
        if not (run.early_stop and best[run.key].accuracy == 1)
    ]


def linear_by_epoch(run: Run, epoch: int) -> float:
    """PyTorch's ``LinearLR``: the factor goes from ``lr_start`` to ``lr_end``, once an epoch."""
    epochs = run.steps // (run.T // run.batch)
    return run.lr * (run.lr_start + (run.lr_end - run.lr_start) * epoch / epochs)


# --- Mahdavi et al.: contexts and queries ---------------------------------------------------------


def train_memorization(runs: Sequence[Run], device: torch.device) -> list[Found]:
    """Accuracy and loss on the whole set at the best weights (by loss), for every run.

    Runs that reach 100% accuracy leave the stack if ``early_stop``; where none does and labels are
    classes (Fig. 3), the saturation of the heads is followed. For real labels the accuracy is None
    and the loss is the mean square error.
    """
    stack = Stack(runs, device, mha_parameters)
    data = _Examples(runs, device)
    best: dict[str, Found] = {}
    free = []
    watched = _moments(runs[0]) if runs[0].N and not runs[0].early_stop else ()
    step = _memorization_step(stack, data)
    for count, index in zip(range(1, runs[0].steps + 1), data.batches(), strict=False):
        stack.set_rate(warmup_cosine(runs[0], count - 1))
        step(index)
        if count % runs[0].evaluate_every and count < runs[0].steps:
            continue
        _keep_best(best, stack, _evaluate(stack, data), count, _least_loss)
        if count in watched:
            free.append(_free_heads(stack, data))
        left = _unfinished(stack, best)
        if not left:
            break
        if len(left) < len(stack.runs):
            stack.keep(left)
            data.keep(left)
            step = _memorization_step(stack, data)
    found = [best[run.key] for run in runs]
    return _with_saturation(found, torch.stack(free, dim=1)) if free else found


def _moments(run: Run, count: int = 32) -> set[int]:
    """The first evaluation after each of ``count`` equal parts of the training."""
    evaluations = -(-run.steps // run.evaluate_every)
    every = [-(-evaluations * part // count) for part in range(1, count + 1)]
    return {min(run.steps, k * run.evaluate_every) for k in every}


SATURATED = 0.99  # a head is saturated for an example if one of its attention weights is above


@torch.no_grad()
def _free_heads(stack: Stack, data: _Examples, chunk: int = 4096) -> Float[Tensor, "R counts"]:
    """The share of examples with 0, 1, ..., H heads that are not saturated."""
    run, counts = stack.runs[0], 0.0
    for contexts, queries, _ in data.chunks(chunk):
        alpha, _ = mha_heads(stack.parameters, run, contexts, queries)
        free = (alpha.amax(dim=-1) <= SATURATED).sum(dim=-1)
        counts = counts + F.one_hot(free, run.H + 1).double().sum(dim=1)
    return counts / data.T


def _with_saturation(
    found: Sequence[Found], free: Float[Tensor, "R moments counts"]
) -> list[Found]:
    heads = free.shape[-1] - 1
    saturated = 1 - free @ torch.arange(heads + 1, device=free.device).double() / heads
    paths = zip(saturated.tolist(), (1 - free[..., 0]).tolist(), free[:, -1].tolist(), strict=True)
    return [
        one._replace(saturated=_rounded(some), served=_rounded(most), serving=_rounded(last))
        for one, (some, most, last) in zip(found, paths, strict=True)
    ]


def _memorization_step(stack: Stack, data: _Examples) -> Step:
    def model(index: Tensor) -> tuple[Tensor, Tensor]:
        contexts, queries, labels = data.at(index)
        outputs = mha_outputs(stack.parameters, stack.runs[0], contexts, queries)
        return _losses(outputs, labels).mean(dim=1), outputs

    example = torch.zeros(len(stack.runs), data.batch, dtype=torch.long, device=stack.device)
    return stepper(stack, model, (example,))


def warmup_cosine(run: Run, step: int) -> float:
    """Linear from ``lr_start`` over the first 5% of the steps, then a cosine to ``lr_end``."""
    warmup = max(1, round(0.05 * run.steps))
    if step < warmup:
        return run.lr * (run.lr_start + (1 - run.lr_start) * step / warmup)
    progress = (step - warmup) / max(1, run.steps - warmup)
    return run.lr * (run.lr_end + (1 - run.lr_end) * (1 + math.cos(math.pi * progress)) / 2)


def examples(run: Run) -> tasks.ContextQueries:
    """The contexts, queries and labels that a run of Mahdavi et al.'s is trained on."""
    g, shared = generator(run, "data"), run.context == "shared"
    return tasks.context_queries(g, run.T, run.n, run.d, shared=shared, classes=run.N)


class _Examples:
    """The data of a stack on its device, with an order of its own for every run."""

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        first = runs[0]
        drawn = [examples(run) for run in runs]
        self.contexts, self.queries, self.labels = (
            torch.stack(part).to(device) for part in zip(*drawn, strict=True)
        )
        self.shared = first.context == "shared"
        self.orders = [generator(run, "order") for run in runs]
        self.places = torch.arange(len(runs), device=device)  # of the runs still in the stack
        self.batch, self.T, self.device = first.batch, first.T, device

    def batches(self) -> Iterator[Int[Tensor, "R B"]]:
        """Indices of successive batches; an epoch's last batch is filled up by the next epoch.

        They lie on the device an epoch at a time, so that a step does not wait for the host.
        """
        left = torch.empty(len(self.orders), 0, dtype=torch.long, device=self.device)
        while True:
            while left.shape[1] < self.batch:
                epoch = torch.stack([torch.randperm(self.T, generator=g) for g in self.orders])
                left = torch.cat([left, epoch.to(self.device)], dim=1)
            yield left[:, : self.batch].index_select(0, self.places)
            left = left[:, self.batch :]

    def at(self, index: Int[Tensor, "R B"]) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts, queries and labels of the runs still in the stack."""
        first = self.T * torch.arange(len(index), device=self.device)
        rows = (index + first[:, None]).flatten()

        def chosen(x: Tensor) -> Tensor:
            return x.flatten(0, 1).index_select(0, rows).unflatten(0, index.shape)

        contexts = self.contexts if self.shared else chosen(self.contexts)
        return contexts, chosen(self.queries), chosen(self.labels)

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All examples, in order."""
        for start in range(0, self.T, size):
            index = torch.arange(start, min(start + size, self.T), device=self.device)
            yield self.at(index.expand(len(self.places), -1))

    def keep(self, left: Sequence[int]) -> None:
        """Drop all runs of the stack but these."""
        self.contexts, self.queries, self.labels, self.places = (
            x[left] for x in (self.contexts, self.queries, self.labels, self.places)
        )


@torch.no_grad()
def _evaluate(stack: Stack, data: _Examples, chunk: int = 4096) -> list[Found]:
    """Accuracy and mean loss over the whole set."""
    right, total = 0.0, 0.0
    for contexts, queries, labels in data.chunks(chunk):
        outputs = mha_outputs(stack.parameters, stack.runs[0], contexts, queries)
        total = total + _losses(outputs, labels).double().sum(dim=1)
        if not labels.is_floating_point():
            right = right + (outputs.argmax(-1) == labels).double().sum(dim=1)
    losses = (total / data.T).tolist()
    if data.labels.is_floating_point():
        return [Found(None, loss) for loss in losses]
    return [Found(*found) for found in zip((right / data.T).tolist(), losses, strict=True)]


# --- the theorem's own layer, a single one --------------------------------------------------------


def _check_xavier(heads, dim, head_dim, outputs, seed) -> None:
    sizes = {"heads": heads, "dim": dim, "head_dim": head_dim, "outputs": outputs}
    for name, value in sizes.items():
        check_integer(name, value)
    check_integer("seed", seed, least=0)


@checked_by(_check_xavier)
def xavier(heads: int, dim: int, head_dim: int, outputs: int, *, seed: int) -> MHAWeights:
    """Random weights to start from, uniform with Xavier's bounds; ``d_v = 1`` and ``d_o = d``.

    >>> xavier(heads=2, dim=5, head_dim=3, outputs=4, seed=0).W_D.shape
    torch.Size([5, 4])
    """
    g = torch.Generator().manual_seed(seed)
    shapes = [(heads, dim, head_dim)] * 2 + [(heads, dim, 1), (heads, dim), (dim, outputs)]
    return MHAWeights(*(_xavier(g, *shape) for shape in shapes))


def _check_descend(weights, contexts, queries, labels, steps, lr) -> None:
    check_features(weights, contexts, queries)
    check_integer("steps", steps)
    check_number("lr", lr, least=0.0, most=1.0)
    if labels.shape != queries.shape[:1]:
        refuse("labels", f"shape {tuple(labels.shape)}", f"one for each of {len(queries)} queries")


@checked_by(_check_descend)
def descend(
    weights: MHAWeights,
    contexts: Tensor,
    queries: Float[Tensor, "T d"],
    labels: Tensor,
    *,
    steps: int,
    lr: float,
) -> tuple[MHAWeights, Float[Tensor, " steps"]]:
    """Gradient descent on the layer of the theorem, from ``weights``: (the last weights, losses).

    Adam on the whole set at once, in the precision of the arguments; the rate falls from ``lr``
    along a cosine to zero. Integer labels are classes (cross-entropy of the logits), real ones
    are met in the mean square by the one output.
    """
    leaves = MHAWeights(*(W.detach().clone().requires_grad_() for W in weights))
    optimizer = torch.optim.Adam(leaves, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        outputs = mha(leaves, contexts, queries)
        loss = _losses(outputs[None], labels[None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return MHAWeights(*(W.detach() for W in leaves)), torch.stack(losses)


# --- any stack ------------------------------------------------------------------------------------

LOOPS = {
    "bigrams": train_bigrams,
    "associations": train_associations,
    "classes": train_memorization,
    "reals": train_memorization,
}
MODELS = ("aot", "mlp", "mha")


def operations(run: Run) -> int:
    """Floating-point operations of the matrix products in one step, counted while one is made.

    A product of shapes ``(a, b)`` and ``(b, c)`` counts ``2 a b c``; the backward pass is included.
    """
    run = dataclasses.replace(run, T=run.batch)
    cpu = torch.device("cpu")
    if run.model == "mha":
        stack = Stack([run], cpu, mha_parameters)
        step = _memorization_step(stack, _Examples([run], cpu))
        example = (torch.arange(run.batch)[None],)
    else:
        stack = Stack([run], cpu, aot_parameters)
        tokens = torch.zeros(1, run.batch, run.n, dtype=torch.long)
        example = (tokens, tokens[..., 0])
        step = stepper(stack, _bigram_model(stack), example)
    with FlopCounterMode(display=False) as counter:
        step(*example)
    return counter.get_total_flops()


def train(runs: Sequence[Run], *, device: str = "cpu", tf32: bool = False) -> list[Outcome]:
    """Train runs that differ by their seed only, at once; one outcome each, in their order.

    ``tf32`` allows reduced-precision products on a GPU and is recorded in the rows. ``wall_s`` is
    the stack's time shared equally among its runs.
    """
    names = {stack_name(run) for run in runs}
    if len(names) != 1:
        refuse("runs", f"{len(names)} different configurations", "runs that differ by their seed")
    [name] = names
    known = name.model in MODELS and (name.model == "mha" or name.variant in VARIANTS)
    if not known or name.task not in LOOPS:
        what = f"model {name.model!r}, variant {name.variant!r}, task {name.task!r}"
        refuse("runs", what, "a known model, variant and task")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    place = torch.device(device)
    start = time.perf_counter()
    with _own_stream(place) if place.type == "cuda" else _flushing_denormals():
        found = LOOPS[name.task](runs, place)
    seconds = (time.perf_counter() - start) / len(runs)
    kind = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
    versions = {"device": kind, "torch": torch.__version__, "commit": results.commit()}
    return [
        Outcome(wall_s=round(seconds, 3), **versions, tf32=tf32, **end._asdict()) for end in found
    ]
