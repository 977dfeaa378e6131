"""Features of real models: the tokens that an attention layer meets behind a model's first blocks.

An encoder is one of Hugging Face's models, cut after ``depth`` blocks (0: the embeddings alone),
with random or trained weights. It computes in float32 or in float64 from end to end, by the same
float32 weights. Mahdavi et al. 2024 (Tables 1 and 3) check their assumptions on such features.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from .. import checks
from ..checks import FLOATS, Range, Seed, checked, need, on_cpu, refuse
from ..theory.independence import numerical_rank
from .corpora import BYTES, Inputs, normalized, reaching

# The model types that are read, and the position of the query token.
MODEL_TYPES = {"vit": 0, "dinov2": 0, "bert": 0, "gpt2": -1}
_Depth = Annotated[int, Range(0)]
_LAST_NORMS = ("layernorm", "ln_f")  # what a ViT and a GPT-2 do after their last block
# No code, no pickle; weights of other sizes are refused by name.
_SAFELY = {"trust_remote_code": False, "use_safetensors": True, "ignore_mismatched_sizes": True}
_MAY_MISS = ("pooler", *_LAST_NORMS)  # weights that a saved model may lack: nothing reads them
_OF_BYTES = {"vocab_size": BYTES, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}


def _architecture(table: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    sizes = {name: size for name, size in table.items() if name not in ("model_type", "tokens")}
    if "tokens" in table:
        sizes |= _OF_BYTES
    return table["model_type"], sizes


_TABLES = resources.files(__package__).joinpath("architectures.toml").read_text("utf-8")
ARCHITECTURES = {name: _architecture(table) for name, table in tomllib.loads(_TABLES).items()}


class Encoder(NamedTuple):
    """A model of one of the :data:`MODEL_TYPES`, cut after ``depth`` blocks.

    Call it on a batch: images, token numbers, or what a tokenizer or an image processor returns.
    Images are levels from 0 to 255 for a ViT, else the numbers of the model's own processor; texts
    have no padding. Models that draw at random or round on the way, as Llama does, are not read.
    """

    model: nn.Module  # one of Hugging Face's models, without the norm after its last block
    depth: int
    query: int  # the position of the query token: 0 for [CLS], -1 for the last

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> list[Float[Tensor, "B n d"]]:
        """The tokens before the first block and after every block: ``depth + 1`` tensors."""
        device, name = next(self.model.parameters()).device, self.model.main_input_name
        arguments = dict(inputs) if isinstance(inputs, Mapping) else {name: inputs}
        names = [name] if name == "pixel_values" else [name, "attention_mask", "token_type_ids"]
        if name not in arguments or not arguments.keys() <= {*names}:
            refuse("inputs", ", ".join(arguments), f"{name}, and nothing but {', '.join(names)}")
        if name == "pixel_values":
            tensors = {name: _pixels(self.model, arguments[name])}
        else:
            tensors = _texts(self.model.config, len(self.positions), arguments)
        tensors = {key: tensor.to(device) for key, tensor in tensors.items()}
        with torch.autocast(device.type, enabled=False):
            outputs = self.model(**tensors, output_hidden_states=True)
        return [*outputs.hidden_states] if self.depth else [outputs.last_hidden_state]

    @property
    def positions(self) -> Float[Tensor, "n d"]:
        """What the embedding adds to a token at each position."""
        if self.model.config.model_type == "gpt2":
            return self.model.wpe.weight.detach()
        table = self.model.embeddings.position_embeddings
        return (table[0] if isinstance(table, nn.Parameter) else table.weight).detach()


def _pixels(model: Any, pixel_values: Any) -> Tensor:
    """Images as a model takes them, from levels or from its image processor's numbers."""
    checks.check_tensor("pixel_values", pixel_values, "(B, 3, size, size)", 4)
    x, model_type = pixel_values.to(model.device), model.config.model_type
    if x.dtype == torch.uint8 and model_type == "vit":
        return normalized(x, model.dtype)
    if not x.is_floating_point():
        expected = "floats of its image processor, or uint8 levels for a vit"
        refuse("pixel_values", f"{x.dtype} for a {model_type}", expected)
    return x.to(model.dtype)


def _texts(config: Any, n_positions: int, texts: dict[str, Any]) -> dict[str, Tensor]:
    """Token numbers and their types, if the model has types, from what a tokenizer gives."""
    ids = texts["input_ids"]
    for name in ["input_ids", *(name for name in texts if name != "input_ids")]:
        checks.check_tensor(name, texts[name], "(B, n)", 2)
        shape = texts[name].shape
        if shape != ids.shape or not ids.numel():
            refuse(name, f"shape {tuple(shape)}", "one entry for each token, at least one")
    if "attention_mask" in texts and not texts["attention_mask"].all():
        refuse("attention_mask", "padding", "none: batch texts by their number of tokens")
    if ids.shape[1] > n_positions:
        refuse("input_ids", f"texts of {ids.shape[1]} tokens", f"at most {n_positions}")
    checks.check_tokens("input_ids", ids, config.vocab_size)
    types = texts["token_type_ids"] if "token_type_ids" in texts else torch.zeros_like(ids)
    n_types = getattr(config, "type_vocab_size", 0)  # a GPT-2 has no types
    checks.check_tokens("token_type_ids", types, max(n_types, 1))
    if n_types == 0:
        return {"input_ids": ids}
    return {"input_ids": ids, "token_type_ids": types}


def saved_config(source: str, types: Iterable[str] = tuple(MODEL_TYPES), least: int = 0) -> Any:
    """The configuration of a saved model with at least so many blocks; its own code is not run."""
    library = need("transformers")
    with reaching(source):
        table = dict(library.PretrainedConfig.get_config_dict(source)[0])
    model_type = str(table.get("model_type"))
    if table.get("is_decoder") or table.get("add_cross_attention"):
        model_type += " decoder"
    if table.get("position_embedding_type") not in (None, "absolute"):
        model_type += " with relative positions"
    if model_type not in types:
        refuse("source", f"a model of type {model_type}", f"one of {', '.join(types)}")
    with reaching(source):
        config = library.AutoConfig.from_pretrained(source, trust_remote_code=False)
    blocks = config.num_hidden_layers
    checks.check_integer(f"source: {source}: num_hidden_layers", blocks, least=least)
    return config


@checked
@on_cpu
def random_encoder(
    architecture: str,
    *,
    depth: _Depth = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: Seed,
) -> Encoder:
    """An encoder of ``architectures.toml`` with the initial weights of its library.

    They are the same on every device and in both precisions; another depth draws others.
    """
    model = initial_model("AutoModel", architecture, seed, num_hidden_layers=depth)
    return _encoder(model, depth, dtype, device)


def initial_model(auto: str, architecture: str, seed: int, **more: Any) -> nn.Module:
    """A model of one of the library's ``Auto`` classes with its initial weights."""
    if architecture not in ARCHITECTURES:
        refuse("architecture", repr(architecture), f"one of {', '.join(ARCHITECTURES)}")
    library, (model_type, sizes) = need("transformers"), ARCHITECTURES[architecture]
    config = library.AutoConfig.for_model(model_type, **sizes | more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(library, auto).from_config(config, dtype=torch.float32).eval()


@checked
@on_cpu
def trained_encoder(
    source: str, *, depth: _Depth = 1, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Encoder:
    """An encoder with trained weights, from a folder that ``transformers`` has saved, or a hub.

    If there is neither, ``ConnectionError`` is raised.
    """
    library, config = need("transformers"), saved_config(source, least=depth)
    config.num_hidden_layers = depth
    # What is missing is drawn, such as a pooler that nothing reads; what is cut off goes unsaid.
    verbosity = library.logging.get_verbosity()
    with reaching(source), contextlib.ExitStack() as after, torch.random.fork_rng(devices=[]):
        after.callback(library.logging.set_verbosity, verbosity)
        library.logging.set_verbosity_error()
        model, report = library.AutoModel.from_pretrained(
            source, config=config, dtype=torch.float32, output_loading_info=True, **_SAFELY
        )
    lacking = {*report["missing_keys"]}
    for key in report["mismatched_keys"]:  # with shapes from transformers 5 on
        lacking.add(key if isinstance(key, str) else key[0])
    needed = sorted(key for key in lacking if not key.startswith(_MAY_MISS))
    if needed:
        refuse("source", f"{source} without {', '.join(needed)}", "all weights, of the sizes said")
    for key, P in model.named_parameters():
        checks.check_finite(f"source: {source}: {key}", P)
    return _encoder(model, depth, dtype, device)


def check_architecture(encoder: Encoder, architecture: str) -> None:
    """Refuse an encoder whose model has not the type and the sizes that stand in the table."""
    config, (model_type, sizes) = encoder.model.config, ARCHITECTURES[architecture]
    expected = {"model_type": model_type} | sizes
    expected.pop("num_hidden_layers", None)  # which is cut
    for name, value in expected.items():
        found = getattr(config, name, None)
        if found != value:
            refuse("source", f"a model with {name} = {found!r}", f"{value!r}, as in {architecture}")


def _encoder(model: nn.Module, depth: int, dtype: torch.dtype, device: str) -> Encoder:
    if dtype not in FLOATS:
        refuse("dtype", str(dtype), "torch.float32 or torch.float64")
    for name in _LAST_NORMS:
        if hasattr(model, name):
            setattr(model, name, nn.Identity())
    query = MODEL_TYPES[model.config.model_type]
    return Encoder(model.eval().to(device, dtype), depth, query)


@checked
@on_cpu
def exact_embeddings(
    encoder: Encoder, images: UInt8[Tensor, "B 3 size size"]
) -> tuple[Int[Tensor, "B n m"], Float[Tensor, "m d"]]:
    """A ViT's embeddings as an exact product: integers times the encoder's own float32 numbers.

    They are affine in the pixels, so 255 times the tokens before the first block are ``A @ B``
    without any rounding, whose rank can be proven (``certified_rank`` with ``times``). ``A`` holds
    the levels of each patch, ``2 k - 255``, and which further rows of ``B`` are added.
    """
    model_type = encoder.model.config.model_type
    if model_type != "vit":
        refuse("encoder", f"a {model_type}", "a vit")
    embeddings = encoder.model.embeddings
    projection, side = (
        embeddings.patch_embeddings.projection,
        embeddings.patch_embeddings.patch_size,
    )
    W, bias = projection.weight.detach().flatten(1), projection.bias.detach()[None]
    levels = 2 * F.unfold(images.double(), side, stride=side).mT.long() - 255  # (B, n - 1, pixels)
    patches, pixels = levels.shape[1:]
    positions = embeddings.position_embeddings.detach()[0]
    B = torch.cat([W.T, bias, embeddings.cls_token.detach()[0], positions])
    A = torch.zeros(len(images), patches + 1, len(B), dtype=torch.int64)
    A[:, 1:, :pixels] = levels
    A[:, 1:, pixels] = 255  # the bias
    A[:, 0, pixels + 1] = 255  # [CLS]
    A[:, :, pixels + 2 :] = 255 * torch.eye(patches + 1, dtype=torch.int64)
    return A, B.float()


@checked
def random_attention(
    tokens: Float[Tensor, "B n d"], queries: Float[Tensor, "B m d"], *, seed: Seed
) -> Float[Tensor, "B m d"]:
    """One attention head with Xavier's weights on layer-normalized tokens, plus its input.

    The ``queries`` are the tokens whose output is wanted. Source: Mahdavi et al. 2024, Table 1.
    """
    d = tokens.shape[-1]
    g = torch.Generator().manual_seed(seed)
    maps = torch.empty(4, d, d, dtype=torch.float32, device="cpu")
    W_Q, W_K, W_V, W_O = (nn.init.xavier_uniform_(W, generator=g).to(tokens) for W in maps)
    with torch.autocast(tokens.device.type, enabled=False):
        x, q = F.layer_norm(tokens, (d,)), F.layer_norm(queries, (d,))
        # Re-associated: the queries are projected, no other token is.
        z = F.scaled_dot_product_attention(q @ (W_Q @ W_K.mT), x, x, scale=d**-0.5)
        return queries + z @ (W_V @ W_O)


class Seen(NamedTuple):
    """Of one feature map and ``T`` examples, what the assumptions speak about."""

    queries: Float[Tensor, "T d"]  # the query tokens (Assumption 1)
    relaxed: Float[Tensor, "T d"]  # each plus the mean of all tokens (Assumption 3)
    ranks: Int[Tensor, " T"]  # the numerical rank of each context (Assumption 2)
    positions: Float[Tensor, "n d"] | None = None  # of embeddings, the table of positions


def collect(
    batches: Iterable[Inputs],
    random: Encoder | None = None,
    trained: Encoder | None = None,
    *,
    attention: bool = False,
    seed: int = 0,
) -> dict[str, Seen]:
    """Stream batches through encoders; keep a few vectors and a rank of every example, by map.

    ``random L0`` are the embeddings of the random encoder, ``random L1`` what its first block makes
    of them, ``trained L0`` likewise, and ``random attention`` one random layer on the first.
    """
    kept: dict[str, Seen] = {}
    encoders = {}
    if random is not None:
        encoders["random"] = random
    if trained is not None:
        encoders["trained"] = trained
    for inputs in batches:
        tokens = {}
        for name, encoder in encoders.items():
            tokens |= {f"{name} L{depth}": layer for depth, layer in enumerate(encoder(inputs))}
        if attention:
            embedded = tokens["random L0"]
            tokens["random attention"] = random_attention(embedded, embedded, seed=seed)
        for name, x in tokens.items():
            queries = x[:, (random or trained).query].clone()  # a view would keep all tokens
            new = [queries, queries + x.mean(dim=1), numerical_rank(x)]
            if name in kept:
                # Copied at once: small pieces between large ones would break up free memory.
                new = [torch.cat(pair) for pair in zip(kept[name][:3], new, strict=True)]
            kept[name] = Seen(*new)
    if not kept:
        refuse("batches", "none", "at least one batch")
    for name, encoder in encoders.items():
        embedded = f"{name} L0"
        n = tokens[embedded].shape[1]
        kept[embedded] = kept[embedded]._replace(positions=encoder.positions[:n])
    return kept
