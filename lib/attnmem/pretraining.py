"""Small encoders trained here, for whoever reaches no hub: minutes on two cores, from a seed.

Each function trains one of Hugging Face's models on data of :mod:`attnmem.corpora`, saves it to a
folder for :func:`attnmem.features.trained_encoder`, and returns how good it is on data held out.
The folders are not part of the repository: the same seed makes the same model, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from . import corpora
from .corpora import need
from .features import normalized

DIGITS_VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 8,
    "patch_size": 2,
}
HELD_OUT = 360  # of the 1797 digits, the last in a random order


def digits_vit(folder: str | Path, *, seed: int, steps: int = 1200, batch: int = 128) -> float:
    """A ViT that reads digits of 8 x 8 pixels; returns its accuracy on those held out.

    Trained on the others, half of the batches shifted by at most one pixel: AdamW at a rate that
    falls from 1e-3 along a cosine, after a short warm-up.
    """
    library = need("transformers")
    g = torch.Generator().manual_seed(seed)
    images, labels = corpora.digits()
    order = torch.randperm(len(images), generator=g)
    known, held_out = order[:-HELD_OUT], order[-HELD_OUT:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = library.AutoModelForImageClassification.from_config(
            library.AutoConfig.for_model("vit", num_labels=10, **DIGITS_VIT)
        ).eval()  # no dropout: its draws are not the generator's

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


def _train(model: nn.Module, loss: Callable[[], Tensor], steps: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()
