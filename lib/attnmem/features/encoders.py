"""Encoders: models of known families, cut after their first blocks, with random or trained weights.

An encoder is one of Hugging Face's models. It computes in float32 or in float64 from end to end,
and the weights are the same float32 numbers in both.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from ..checks import (
    FLOATS,
    check_integer,
    check_seed,
    check_tensor,
    check_tokens,
    checked_by,
    refuse,
)
from ..constructions.random_layers import on_cpu
from .corpora import Inputs, need, normalized, reaching

PUBLISHED = {
    "vit-base": ("vit", {"hidden_size": 768, "patch_size": 16, "image_size": 224}),
    "bert-large": (
        "bert",
        {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "gpt2-large": ("gpt2", {"n_embd": 1280, "n_head": 20}),
}
LAST_NORMS = ("layernorm", "ln_f")  # what a ViT and a GPT-2 do after their last block
FAMILIES = {  # the model types that are read, and the place of the token that asks
    "vit": 0,
    "deit": 0,
    "dinov2": 0,
    "bert": 0,
    "roberta": 0,
    "xlm-roberta": 0,
    "camembert": 0,
    "electra": 0,
    "distilbert": 0,
    "mpnet": 0,
    "gpt2": -1,
}
MAY_MISS = ("pooler", *LAST_NORMS)  # weights that a saved model may lack, since nothing reads them


class Encoder(NamedTuple):
    """A model of one of the :data:`FAMILIES`, cut after ``depth`` blocks.

    Call it on a batch: images, token numbers, or what a tokenizer or an image processor returns as
    tensors. Images are levels from 0 to 255 for a ViT, else the numbers of the model's own
    processor. Token numbers alone are single texts without padding, of type 0. A tokenizer's types
    are taken as they are; its padding is left out, so all texts of a batch need as many tokens.

    Families that draw at random or round to float32 on the way, as Llama does, are not read.

    Attributes:
        model: One of Hugging Face's models, without the norm after its last block.
        depth: The blocks that it has.
        query: The place of the token that asks: 0 for [CLS], -1 for the last.
        dtype: The precision of weights and features.
    """

    model: nn.Module
    depth: int
    query: int
    dtype: torch.dtype

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> list[Float[Tensor, "B n d"]]:
        """The tokens before the first block and after every block: ``depth + 1`` tensors."""
        _check_family("model", self.model.config)
        weight, name = next(self.model.parameters()), self.model.main_input_name
        if weight.dtype != self.dtype or self.dtype not in FLOATS:
            what = f"those of the dtype, {self.dtype}, which is torch.float32 or torch.float64"
            refuse("model", f"weights of {weight.dtype}", what)
        given = dict(inputs) if isinstance(inputs, Mapping) else {name: inputs}
        names = [name] if name == "pixel_values" else [name, "attention_mask", "token_type_ids"]
        if name not in given or not given.keys() <= {*names}:
            refuse("inputs", ", ".join(given), f"{name}, and nothing but {', '.join(names)}")
        given = self._pixels(**given) if name == "pixel_values" else self._texts(given)
        given = {key: value.to(weight.device) for key, value in given.items()}
        with torch.autocast(weight.device.type, enabled=False):
            found = self.model(**given, output_hidden_states=True)
        return [*found.hidden_states] if self.depth else [found.last_hidden_state]

    def _pixels(self, pixel_values: Any) -> dict[str, Tensor]:
        """Numbers of an image processor as they are, levels as numbers from -1 to 1."""
        check_tensor("pixel_values", pixel_values, "(B, 3, size, size)", 4)
        x, kind = pixel_values.to(self.model.device), self.model.config.model_type
        if x.dtype == torch.uint8 and kind == "vit":
            return {"pixel_values": normalized(x, self.dtype)}
        if not x.is_floating_point():
            what = "floats of its image processor, or uint8 levels for a vit"
            refuse("pixel_values", f"{x.dtype} for a {kind}", what)
        return {"pixel_values": x.to(self.dtype)}

    def _texts(self, given: dict[str, Any]) -> dict[str, Tensor]:
        """Token numbers and their types, without padding."""
        for key, value in ({"input_ids": None} | given).items():  # that one first
            check_tensor(key, value, "(B, n)", 2)
            if value.shape != given["input_ids"].shape or not value.numel():
                refuse(key, f"shape {tuple(value.shape)}", "one entry for each token, at least one")
        mask = given.pop("attention_mask", given["input_ids"].new_ones((), dtype=torch.bool))
        check_tokens("attention_mask", mask.long() if mask.dtype == torch.bool else mask, 2)
        mask = (mask != 0).expand(given["input_ids"].shape)
        least, n = (int(count) for count in mask.sum(dim=1).aminmax())
        if not 0 < least == n <= len(self.positions):
            what = f"as many in all of a batch, 1 to {len(self.positions)}; batch texts by length"
            refuse("input_ids", f"texts of {least} to {n} tokens", what)
        given = {key: value[mask].view(len(mask), n) for key, value in given.items()}
        check_tokens("input_ids", given["input_ids"], self.model.config.vocab_size)
        types = given.pop("token_type_ids", torch.zeros_like(given["input_ids"]))
        kinds = getattr(self.model.config, "type_vocab_size", 0)  # some models have no types
        check_tokens("token_type_ids", types, max(kinds, 1))
        return given | ({"token_type_ids": types} if kinds else {})

    @checked_by(lambda self, depth: check_integer("depth", depth, least=0, most=self.depth))
    def cut(self, depth: int) -> Encoder:
        """A copy with the first blocks only.

        Args:
            depth: Blocks to keep, at most those that it has.

        Returns:
            The encoder. Its weights are these, while :func:`random_encoder` draws others for
            another depth.

        Raises:
            ValueError: ``depth`` is no such number.
        """
        _check_family("model", self.model.config)
        model = copy.deepcopy(self.model)
        blocks = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
        del blocks[depth:]
        return self._replace(model=model, depth=depth)

    @property
    def positions(self) -> Float[Tensor, "places d"]:
        """What the embedding adds to a token at each place."""
        if self.model.config.model_type == "gpt2":
            return self.model.wpe.weight.detach()
        table = self.model.embeddings.position_embeddings
        if isinstance(table, nn.Parameter):
            return table[0].detach()
        padding = -1 if table.padding_idx is None else table.padding_idx
        return table.weight[padding + 1 :].detach()  # RoBERTa counts from there


def _check_family(name: str, config: Any) -> None:
    kind = config.model_type + " decoder" * getattr(config, "is_decoder", False)
    if kind not in FAMILIES:
        refuse(name, f"a model of type {kind}", f"one of {', '.join(FAMILIES)}")


def _check_encoder(architecture="vit-base", *, depth, dtype, seed=0, **_) -> None:
    check_integer("depth", depth, least=0)
    check_seed(seed)
    if dtype not in FLOATS:
        refuse("dtype", str(dtype), "torch.float32 or torch.float64")
    if isinstance(architecture, str) and architecture in PUBLISHED:
        return
    pair = isinstance(architecture, (tuple, list)) and len(architecture) == 2
    if not (pair and isinstance(architecture[1], Mapping)):
        known = f"one of {', '.join(PUBLISHED)}, or a pair of a type and its sizes"
        refuse("architecture", repr(architecture), known)
    kind, sizes = architecture
    if kind not in FAMILIES:
        refuse("architecture", f"a model of type {kind}", f"one of {', '.join(FAMILIES)}")
    known = need("transformers").AutoConfig.for_model(kind)
    for name in sizes:
        if not hasattr(known, name):
            refuse("architecture", f"the size {name}", f"what a {kind} has, see its configuration")


@checked_by(_check_encoder)
@on_cpu
def random_encoder(
    architecture: str | tuple[str, Mapping[str, Any]],
    *,
    depth: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int,
) -> Encoder:
    """An encoder with the initial weights of its library.

    Args:
        architecture: A key of ``PUBLISHED``, or a pair of a model type, one of the
            :data:`FAMILIES`, and the sizes that differ from its defaults.
        depth: Blocks that are drawn; 0 for the embeddings alone.
        dtype: The precision of the encoder, float32 or float64; the weights are float32 numbers.
        device: Where it computes.
        seed: Decides the weights of this depth, the same on every device and in both precisions.

    Returns:
        The encoder, in evaluation mode.

    Raises:
        ValueError: The architecture is unknown, or another argument is out of range.
    """
    kind, sizes = PUBLISHED[architecture] if isinstance(architecture, str) else architecture
    library = need("transformers")
    config = library.AutoConfig.for_model(kind, **sizes)
    config.num_hidden_layers = depth
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = library.AutoModel.from_config(config, dtype=torch.float32)
    return _encoder(model, depth, dtype, device)


@checked_by(_check_encoder)
@on_cpu
def trained_encoder(
    source: str, *, depth: int = 1, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Encoder:
    """An encoder with trained weights.

    Args:
        source: A folder that ``transformers`` has saved, or a name on a hub such as
            ``bert-large-uncased``.
        depth: Blocks to keep; 0 for the embeddings alone.
        dtype: The precision of the encoder, float32 or float64; the weights are float32 numbers.
        device: Where it computes.

    Returns:
        The encoder, in evaluation mode.

    Raises:
        ValueError: The model is of none of the :data:`FAMILIES`, has fewer blocks than ``depth``,
            or lacks weights, or an argument is out of range.
        ConnectionError: There is neither such a folder nor a hub that gives the model.
    """
    library = need("transformers")
    with reaching(source):
        config = library.AutoConfig.from_pretrained(source)
    _check_family("source", config)
    if depth > config.num_hidden_layers:
        refuse("depth", depth, f"at most {config.num_hidden_layers}, the blocks of {source}")
    config.num_hidden_layers = depth
    # What is missing is drawn, such as a pooler that nothing reads.
    with reaching(source), _quiet(library.logging), torch.random.fork_rng(devices=[]):
        model, found = library.AutoModel.from_pretrained(
            source, config=config, dtype=torch.float32, output_loading_info=True
        )
    if missing := [key for key in found["missing_keys"] if not key.startswith(MAY_MISS)]:
        refuse("source", f"{source} without {', '.join(sorted(missing))}", "all weights")
    return _encoder(model, depth, dtype, device)


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """No report on the blocks that were cut off."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _encoder(model: nn.Module, depth: int, dtype: torch.dtype, device: str) -> Encoder:
    for name in LAST_NORMS:
        if hasattr(model, name):
            setattr(model, name, nn.Identity())
    _check_family("architecture", model.config)
    query = FAMILIES[model.config.model_type]
    return Encoder(model.eval().to(device, dtype), depth, query, dtype)


def _check_vit(encoder, images) -> None:
    if encoder.model.config.model_type != "vit":
        refuse("encoder", f"a {encoder.model.config.model_type}", "a vit")


@checked_by(_check_vit)
@on_cpu
def exact_embeddings(
    encoder: Encoder, images: UInt8[Tensor, "B 3 size size"]
) -> tuple[Int[Tensor, "B n m"], Float[Tensor, "m d"]]:
    r"""A ViT's embeddings as an exact product: integers times the encoder's own float32 numbers.

    The embedding is affine in the pixels, so 255 times the tokens before the first block are
    ``A @ B`` without any rounding. A rank of such a product can be proven:
    :func:`attnmem.independence.certified_rank` with ``times``.

    Args:
        encoder: A ViT.
        images: Levels from 0 to 255.

    Returns:
        ``A`` and ``B``. ``A`` holds the levels of each patch, ``2 k - 255``, and which further rows
        of ``B`` are added; ``B`` holds the patch projection, its bias, the [CLS] token and the
        positions.
    """
    own = encoder.model.embeddings
    projection = own.patch_embeddings.projection
    W, side = projection.weight.detach().flatten(1), projection.kernel_size
    levels = 2 * F.unfold(images.double(), side, stride=side).mT.long() - 255  # (B, n - 1, pixels)
    patches, pixels = levels.shape[1:]
    positions = own.position_embeddings.detach()[0]
    B = torch.cat([W.T, projection.bias.detach()[None], own.cls_token.detach()[0], positions])
    A = torch.zeros(len(images), patches + 1, len(B), dtype=torch.int64)
    A[:, 1:, :pixels] = levels
    A[:, 1:, pixels] = 255  # the bias
    A[:, 0, pixels + 1] = 255  # [CLS]
    A[:, :, pixels + 2 :] = 255 * torch.eye(patches + 1, dtype=torch.int64)
    return A, B.float()
