"""Weights with which a whole model of torch or transformers meets real labels."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from attnmem.checks import Seed, check_finite, check_size, check_tensor, checked, refuse
from attnmem.theory.fitting import MET

from . import families
from .modules import _drops

# Names of parameters in a block: of norms, of attention (the others are an MLP), and of the maps by
# which these two write to the tokens (the others read them).
_NORM, _ATTENTION = re.compile(r"norm|ln_"), re.compile(r"\.\d+\..*att(n|ention)")
_WRITES = re.compile(r"\b((o|out|c|down)_proj|dense(_4h_to_h)?|fc2|fc_out|linear2)\.")
# How much is written to the idle direction, and the largest label, at which Newton's steps are
# tried: large ones lose less to rounding, and at small ones the model is nearly linear.
_SIZES = ((0.1, 0.1), (0.1, 0.01), (0.01, 1e-4))
_SEEDS, _STEPS, _HALVINGS = 3, 30, 10
_ZERO = 1e-9  # of outputs, and of singular values beside the largest
_ENTRIES = 10**8  # of a derivative, at most

_Tensors = dict[str, Tensor]  # by the names of parameters


@dataclasses.dataclass(frozen=True)
class Met:
    """A model that :func:`meet_labels` has given weights, and how well it meets the labels."""

    module: nn.Module  # a copy in float64, whose parameters ask for no gradient
    read_out: Float[Tensor, " d"]  # labels are the last token's outputs times this vector
    rank: int  # of the derivative at the silent weights on these inputs
    errors: Float[Tensor, " T"]  # of ``predict``, in shares of the largest label

    def predict(self, inputs: Tensor) -> Float[Tensor, " B"]:
        """What the model answers, all in float64."""
        with torch.no_grad(), _Float64(), sdpa_kernel(SDPBackend.MATH):
            return _last_token(self.module, inputs) @ self.read_out


class _Float64(TorchFunctionMode):
    """What a module casts to float32, as the norms of Llama do, stays in float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def wide(argument):
            return torch.float64 if argument is torch.float32 else argument

        named = {name: wide(argument) for name, argument in (kwargs or {}).items()}
        if function is Tensor.float:
            function = Tensor.double
        return function(*map(wide, args), **named)


def _last_token(module: nn.Module, inputs: Tensor, weights: _Tensors | None = None) -> Tensor:
    if inputs.is_floating_point():
        inputs = inputs.double()
    outputs = functional_call(module, weights or {}, (inputs,))
    tokens = getattr(outputs, "last_hidden_state", outputs)
    check_tensor("module's outputs", tokens, "(B, n, d)", 3)
    return tokens[:, -1]


@checked
def meet_labels(
    module: nn.Module, inputs: Tensor, labels: Float[Tensor, " T"], *, seed: Seed = 0
) -> Met:
    """Find weights with which a model of pre-norm blocks meets real labels at its last token.

    A copy of the model gets silent weights: heads and units of different blocks cancel. Newton's
    steps from there meet the labels at a small scale, which the read-out makes up for. Where the
    inputs are words, the first block mixes them and is not silent.

    Args:
        module: Torch's encoder with ``norm_first``, behind an embedding or a linear map, or a model
            of transformers without its head, of a family that :func:`model_capacity` counts.
        inputs: What the module is called with, one example in each entry of the first axis.
        labels: One for each example; an error says how many are met at most.
        seed: Draws the silent weights.

    The errors are those of this model on these inputs, all in float64. They say nothing of other
    inputs. Rounded weights, and norms that a module computes in float32, lose digits, at worst
    nearly all.

    Example:
        >>> sizes = {"d_model": 6, "nhead": 2, "dim_feedforward": 4, "activation": "gelu"}
        >>> block = nn.TransformerEncoderLayer(**sizes, norm_first=True, batch_first=True)
        >>> encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        >>> model = nn.Sequential(nn.Linear(4, 6), encoder).eval()
        >>> met = meet_labels(model, torch.randn(30, 3, 4), torch.randn(30))
        >>> bool(met.errors.max() < 1e-6)
        True
    """
    check_size("inputs", inputs, 0, len(labels), "one for each label")
    check_finite("inputs", inputs)
    check_finite("labels", labels)
    _check_covered(module)
    largest = float(labels.abs().max()) or 1.0
    y = labels.double() / largest
    for draw in range(seed, seed + _SEEDS):
        with _Float64(), sdpa_kernel(SDPBackend.MATH):
            model = _silent(module, inputs, draw)
            rank = _rank(model, y)
            for written, scale in _SIZES:
                weights = model.weights(_newton(model, scale * y, written), written)
                read_out = weights.pop("read-out") * (largest / scale / written)
                model.module.load_state_dict(weights, strict=False)
                met = Met(model.module, read_out, rank, y)
                errors = (met.predict(inputs) / largest - y).abs()
                if errors.max() < MET:
                    return dataclasses.replace(met, errors=errors)
    refuse("labels", f"{len(y)} that Newton's steps did not meet", "fewer, or another seed")


# --- the maps of a model --------------------------------------------------------------------------


def _check_covered(module: Any) -> None:
    """Refuse, by name, what silent weights are not known for."""
    pre_norm, relu = True, False
    if hasattr(module, "config"):
        for block in families.read(json.loads(module.config.to_json_string(use_diff=False))).blocks:
            pre_norm, relu = pre_norm and block.place == "pre", relu or block.homogeneous
    for part in module.modules():
        if not getattr(part, "batch_first", True):
            refuse("module", "batch_first=False", "examples on the first axis")
        if part.training and _drops(part):
            refuse("module", "dropout, since it is in training mode", "module.eval()")
        pre_norm = pre_norm and getattr(part, "norm_first", True)
        relu = relu or isinstance(part, nn.ReLU) or getattr(part, "activation", None) is F.relu
    if not pre_norm:
        refuse("module", "norms behind sums or branches", "a norm before each branch, and no other")
    if relu:
        refuse("module", "ReLU", "GELU, SiLU or another smooth activation")


def _maps(name: str, block: nn.Module, turned: set[str]) -> _Tensors:
    """Weights, as views that act from the left, and biases, of all but the norms of a block."""
    maps = {}
    for path, W in block.named_parameters(name):
        if not _NORM.search(path.removeprefix(name)):
            maps[path] = W.data.T if path in turned else W.data
    weights = [path for path, W in maps.items() if W.ndim == 2]
    kinds = {(bool(_ATTENTION.search(x)), bool(_WRITES.search(x))) for x in weights}
    if len(kinds) < 4 or sum(bool(_WRITES.search(x)) for x in weights) > 2:
        refuse("module", f"a block of {', '.join(weights)}", "one attention and one MLP in a block")
    return maps


def _blocks(module: nn.Module) -> dict[str, nn.Module]:
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and len({*map(type, part)}) == 1:
            return {f"{name}.{i}": block for i, block in enumerate(part)}
    refuse("module", type(module).__name__, "a model with a list of equal blocks")


# --- silent weights -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Silent:
    """A model with silent weights, as a function of the maps of its silent blocks and a read-out.

    The idle direction is the difference of the first two coordinates. What is written to it, what
    the read-out reads beside it, and the outputs are in units of ``written``.
    """

    module: nn.Module
    inputs: Tensor
    maps: _Tensors  # of those that write and of the read-out, the first row is the idle direction
    turned: set[str]  # they act from the right, as in GPT-2

    @property
    def start(self) -> Float[Tensor, " N"]:
        return torch.cat([W.flatten() for W in self.maps.values()])

    def weights(self, at: Float[Tensor, " N"], written: float | Tensor) -> _Tensors:
        """Parameters of the module, and the read-out."""
        weights = {}
        pieces = at.split([W.numel() for W in self.maps.values()])
        for (name, W), piece in zip(self.maps.items(), pieces, strict=True):
            W = piece.view_as(W)
            if _WRITES.search(name):
                W = _rotated(written * W[:1], W[1:])
            if name == "read-out":
                W = _rotated(W[:1], written * W[1:])
            weights[name] = W.T if name in self.turned else W
        return weights

    def output(self, at: Float[Tensor, " N"], example: Tensor, written: float | Tensor) -> Tensor:
        weights = self.weights(at, written)
        read_out = weights.pop("read-out")
        token = _last_token(self.module, example[None], weights)[0]
        check_size("module's outputs", token, 0, len(read_out), "the width of its blocks")
        return token @ read_out

    def derivative(self, at: Float[Tensor, " N"], written: float) -> tuple[Tensor, Tensor]:
        """A row for each example, and the outputs."""

        def output(at, example):
            return self.output(at, example, written) / written

        return vmap(lambda example: grad_and_value(output)(at, example))(self.inputs)

    def limit(self, at: Float[Tensor, " N"], example: Tensor) -> tuple[Tensor, Tensor]:
        """The output over ``written`` as this goes to 0, a slope; and the output itself there."""
        zero, one = at.new_zeros(()), at.new_ones(())
        output, slope = jvp(lambda written: self.output(at, example, written), (zero,), (one,))
        return slope, output


def _rotated(idle: Tensor, others: Tensor) -> Tensor:
    """From coordinates along the difference and the sum of the first two, and the others."""
    difference, total = idle * 0.5**0.5, others[:1] * 0.5**0.5
    return torch.cat([total + difference, total - difference, others[1:]])


def _silent(module: Any, inputs: Tensor, seed: int) -> _Silent:
    """A copy of the model with silent weights."""
    module = copy.deepcopy(module).double().requires_grad_(False)
    if hasattr(module, "config"):
        module.config.update({"use_cache": False, "pad_token_id": None})
    turned = {f"{x}.weight" for x, y in module.named_modules() if type(y).__name__ == "Conv1D"}
    blocks = _blocks(module)
    maps = [_maps(*block, turned) for block in blocks.items()]
    *_, (d, units) = [W.shape for x, W in maps[0].items() if W.ndim == 2 and _WRITES.search(x)]
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for part in module.modules():  # norms keep the idle direction, and embeddings leave it free
        for W in part.parameters(recurse=False):
            axis = 0 if W.ndim == 1 or isinstance(part, (nn.Linear, nn.Conv2d)) else -1
            if W.shape[axis] == d:
                W.select(axis, 1).copy_(W.select(axis, 0))
    for path, W in (pair for block in maps for pair in block.items()):
        W.copy_(drawn(*W.shape) * (0.5 if W.ndim == 1 else 1.2 * W.shape[1] ** -0.5))
        if _WRITES.search(path):
            W[1] = W[0]
        elif W.ndim == 2:
            W[:, 1] = W[:, 0]  # does not read the idle direction, which helps Newton's steps

    mixing = 0 if inputs.is_floating_point() else 1
    silent = [*blocks.values()][mixing:]
    for block in silent[1:]:
        norms = {name: W for name, W in silent[0].state_dict().items() if _NORM.search(name)}
        block.load_state_dict(norms, strict=False)
    moved: _Tensors = {}
    for group in zip(*(block.items() for block in maps[mixing:]), strict=True):
        paths, Ws = zip(*group, strict=True)
        of_mlp = not _ATTENTION.search(paths[0])
        if _WRITES.search(paths[0]):
            Ws = [torch.zeros_like(W) for W in Ws]
            if Ws[0].ndim == 2:
                written = drawn(len(Ws), Ws[0].shape[1])
                if of_mlp:
                    _pair([*written[:, None]], sign=-1)
                else:
                    written -= written.mean(0)
                for W, row in zip(Ws, written, strict=True):
                    W[0] = row
        elif of_mlp:
            _pair([W.view(-1, units, *W.shape[1:]) for W in Ws])
        else:
            for W in Ws[1:]:
                W.copy_(Ws[0])
        moved |= zip(paths, Ws, strict=True)
    moved["read-out"] = torch.eye(d, dtype=torch.float64)[0]
    return _Silent(module, inputs, moved, turned)


def _pair(units: list[Float[Tensor, "k q *d"]], sign: int = 1) -> None:
    """Half of the units of each block become twins of the other half of the block before.

    In a circle; a unit in the middle has its twin in the next block, and without one writes zero.
    """
    half = units[0].shape[1] // 2
    for l, own in enumerate(units):
        own[:, :half] = sign * units[l - 1][:, half : 2 * half]
        if l % 2:
            own[:, 2 * half :] = sign * units[l - 1][:, 2 * half :]
    if sign < 0 and len(units) % 2:
        units[-1][:, 2 * half :] = 0


def _rank(model: _Silent, y: Float[Tensor, " T"]) -> int:
    """The rank of the derivative, if the weights are silent and the labels in its range."""
    if len(y) * len(model.start) > _ENTRIES:
        most = _ENTRIES // len(model.start)
        refuse("labels", f"{len(y)} of {len(model.start)} weights", f"at most {most}")
    derivative = grad_and_value(model.limit, has_aux=True)
    rows, (slopes, outputs) = vmap(lambda example: derivative(model.start, example))(model.inputs)
    if not outputs.abs().max() < _ZERO:
        got = "tokens whose first two coordinates differ before the first block"
        refuse("inputs", got, "a linear map or an embedding before it, in the module")
    if not slopes.abs().max() < _ZERO:
        got = f"outputs of {float(slopes.abs().max()):.0e} where blocks are to cancel"
        refuse("module", got, "blocks that are alike, with a norm before each branch")
    U, S, _ = torch.linalg.svd(rows, full_matrices=False)
    U = U[:, S / S[0] > _ZERO]
    if (y - U @ (U.T @ y)).abs().max() > MET:
        refuse("labels", len(y), f"at most {U.shape[1]}, the rank at silent weights")
    return U.shape[1]


def _newton(model: _Silent, y: Float[Tensor, " T"], written: float) -> Float[Tensor, " N"]:
    """Steps towards the labels, halved where they would lead away, until none leads nearer."""
    at = model.start
    rows, outputs = model.derivative(at, written)
    for _ in range(_STEPS):
        missing = y - outputs
        if missing.abs().max() < 0.01 * MET * y.abs().max():
            break
        step = torch.linalg.lstsq(rows, missing[:, None], driver="gelsd").solution[:, 0]
        for _ in range(_HALVINGS):
            rows, outputs = model.derivative(at + step, written)
            if (y - outputs).norm() < missing.norm():
                break
            step = step / 2
        else:
            break
        at = at + step
    return at
