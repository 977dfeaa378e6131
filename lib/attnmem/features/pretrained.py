"""Small encoders trained here, for whoever reaches no hub: minutes on two cores, from a seed.

Each function trains one of Hugging Face's models on data of :mod:`attnmem.features.corpora`, saves
it to a folder for :func:`~attnmem.features.encoders.trained_encoder`, and returns how good it is on
data held out. The folders are not part of the repository: the same seed makes the same model, up to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from ..checks import check_integer, check_seed, checked_by
from ..constructions.random_layers import on_cpu
from . import corpora
from .corpora import BYTES, MASK, need, normalized

DIGITS_VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 8,
    "patch_size": 2,
}
HELD_OUT = 360  # of the 1797 digits, the last in a random order


def language_sizes(kind: str, *, length: int, d: int, layers: int) -> dict[str, Any]:
    """Sizes of a BERT or a GPT-2 that reads bytes, in its own words.

    Args:
        kind: ``bert`` or ``gpt2``.
        length: The most tokens that it reads.
        d: The width of a token, a multiple of its 4 heads.
        layers: The number of blocks.

    Returns:
        The fields of Hugging Face's configuration.
    """
    if kind == "bert":
        return {
            "vocab_size": BYTES,
            "max_position_embeddings": length,
            "hidden_size": d,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "intermediate_size": 4 * d,
            "pad_token_id": None,
        }
    return {
        "vocab_size": BYTES,
        "n_positions": length,
        "n_embd": d,
        "n_layer": layers,
        "n_head": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


LENGTH = 64
LIBRARY = {kind: language_sizes(kind, length=LENGTH, d=96, layers=4) for kind in ("bert", "gpt2")}
IGNORED = -100  # a label that costs nothing, in the library's models
READ, UNREAD = (0.0, 0.9), (0.9, 1.0)  # parts of the text


def _check_training(folder, *, seed, steps, batch) -> None:
    check_seed(seed)
    check_integer("steps", steps)
    check_integer("batch", batch)


@on_cpu
@checked_by(_check_training)
def digits_vit(folder: str | Path, *, seed: int, steps: int = 1200, batch: int = 128) -> float:
    """Train a ViT that reads digits of 8 x 8 pixels, and save it.

    It is trained on all digits but 360, half of the batches shifted by at most one pixel: AdamW at
    a rate that falls from 1e-3 along a cosine, after a short warm-up.

    Args:
        folder: Where the model is saved.
        seed: Decides weights, batches and shifts, and which digits are held out.
        steps: How many steps.
        batch: Digits of a step.

    Returns:
        The accuracy on the digits held out.
    """
    g = torch.Generator().manual_seed(seed)
    images, labels = corpora.digits()
    order = torch.randperm(len(images), generator=g)
    known, held_out = order[:-HELD_OUT], order[-HELD_OUT:]
    model = _untrained("ImageClassification", "vit", DIGITS_VIT | {"num_labels": 10}, seed)

    def loss() -> Tensor:
        chosen = known[torch.randint(len(known), (batch,), generator=g)]
        shift = torch.rand((), generator=g) < 0.5
        pixels = _shifted(images[chosen], g) if shift else images[chosen]
        return model(normalized(pixels, torch.float32), labels=labels[chosen]).loss

    _train(model, loss, steps, lr=1e-3)
    model.save_pretrained(folder)
    with torch.no_grad():
        logits = model(normalized(images[held_out], torch.float32)).logits
    return float((logits.argmax(dim=1) == labels[held_out]).double().mean())


def _shifted(images: UInt8[Tensor, "B 3 h w"], g: torch.Generator) -> Tensor:
    """Each image moved by -1, 0 or 1 pixels in both directions, zeros coming in."""
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    places = torch.randint(3, (len(images), 2), generator=g).tolist()
    size = images.shape[-1]
    moved = [x[:, i : i + size, j : j + size] for x, (i, j) in zip(padded, places, strict=True)]
    return torch.stack(moved)


@on_cpu
@checked_by(_check_training)
def library_gpt2(folder: str | Path, *, seed: int, steps: int = 1500, batch: int = 32) -> float:
    """Train a GPT-2 that reads the library byte by byte, and save it.

    It is trained on passages of 64 bytes from the first nine tenths of the text, and judged on the
    last.

    Args:
        folder: Where the model is saved.
        seed: Decides weights and passages.
        steps: How many steps.
        batch: Passages of a step.

    Returns:
        The share of the bytes held out that are predicted from those before them.
    """
    model = _untrained("CausalLM", "gpt2", LIBRARY["gpt2"], seed)
    read = corpora.library_passages(
        steps * batch, length=LENGTH, batch=batch, seed=seed, within=READ
    )

    def loss() -> Tensor:
        passages = next(read)
        return model(passages, labels=passages).loss

    _train(model, loss, steps, lr=3e-3)
    model.save_pretrained(folder)
    with torch.no_grad():
        right = [model(x).logits[:, :-1].argmax(dim=2) == x[:, 1:] for x in _unread(seed)]
    return float(torch.cat(right).double().mean())


@on_cpu
@checked_by(_check_training)
def library_bert(folder: str | Path, *, seed: int, steps: int = 2500, batch: int = 32) -> float:
    """Train a BERT that fills in masked bytes of the library, and save it.

    It is trained on pairs of passages, as long and from the same part as for :func:`library_gpt2`;
    a seventh of their bytes is masked. Initial weights have size 0.1, about ``d`` to the power of
    -1/2: from the library's 0.02, at three times the rate, 1500 steps did not lead beyond always
    guessing the most frequent byte.

    Args:
        folder: Where the model is saved.
        seed: Decides weights, passages and masks.
        steps: How many steps.
        batch: Pairs of a step.

    Returns:
        The share of the masked bytes held out that are filled in correctly.
    """
    sizes = LIBRARY["bert"] | {"initializer_range": 0.1}
    model = _untrained("MaskedLM", "bert", sizes, seed)
    g = torch.Generator().manual_seed(seed)
    read = corpora.library_passages(
        steps * batch, length=LENGTH, batch=batch, seed=seed, within=READ, pairs=True
    )

    def masked(pairs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        ids = pairs["input_ids"]
        chosen = (torch.rand(ids.shape, generator=g) < 1 / 7) & (ids < 256)
        shown = pairs | {"input_ids": ids.masked_fill(chosen, MASK)}
        return shown, ids.masked_fill(~chosen, IGNORED)

    def loss() -> Tensor:
        shown, hidden = masked(next(read))
        return model(**shown, labels=hidden).loss

    _train(model, loss, steps, lr=1e-3)
    model.save_pretrained(folder)
    right = []
    with torch.no_grad():
        for shown, hidden in map(masked, _unread(seed, pairs=True)):
            said = model(**shown).logits.argmax(dim=2)
            right.append((said == hidden)[hidden != IGNORED])
    return float(torch.cat(right).double().mean())


def _unread(seed: int, pairs: bool = False) -> Iterator[Tensor]:
    return corpora.library_passages(
        500, length=LENGTH, batch=100, seed=seed, within=UNREAD, pairs=pairs
    )


def _untrained(task: str, kind: str, sizes: dict[str, Any], seed: int) -> nn.Module:
    """A model with its library's initial weights, and no dropout: that would draw elsewhere."""
    library = need("transformers")
    config = library.AutoConfig.for_model(kind, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(library, f"AutoModelFor{task}").from_config(config).eval()


def _train(model: nn.Module, loss: Callable[[], Tensor], steps: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()
