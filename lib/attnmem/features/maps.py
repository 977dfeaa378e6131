"""What the layers of a ViT, a BERT or a GPT-2 hand on: the tokens that an attention layer meets.

Mahdavi et al. 2024 (Table 1, Table 3) check their assumptions on such features. An encoder is one
of Hugging Face's models, cut after its first blocks, with random or trained weights; it computes in
float32 or in float64 from end to end, and the weights are the same float32 numbers in both.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from ..checks import FLOATS, check_integer, checked_by, refuse
from ..independence import numerical_rank
from .corpora import need, pair_types, reaching

PUBLISHED = {
    "vit-base": ("vit", {"hidden_size": 768, "patch_size": 16, "image_size": 224}),
    "bert-large": (
        "bert",
        {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "gpt2-large": ("gpt2", {"n_embd": 1280, "n_head": 20}),
}
LAST_NORMS = ("layernorm", "ln_f")  # what a ViT and a GPT-2 do after their last block
BLOCKS = {"vit": "layers", "bert": "encoder.layer", "gpt2": "h"}  # where their blocks are


class Encoder(NamedTuple):
    """A model cut after ``depth`` blocks; call it on a batch of images or token numbers.

    A BERT takes its input for pairs, as :mod:`attnmem.features.corpora` makes them.

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
    def __call__(self, inputs: Tensor) -> list[Float[Tensor, "B n d"]]:
        """The tokens before the first block and after every block: ``depth + 1`` tensors."""
        device = next(self.model.parameters()).device
        inputs = inputs.to(device)
        if inputs.dtype == torch.uint8:
            inputs = normalized(inputs, self.dtype)
        more = {}
        if self.model.config.model_type == "bert":  # it reads pairs
            types = pair_types(inputs.shape[1]).to(device)
            more["token_type_ids"] = types.expand(inputs.shape)
        found = self.model(inputs, output_hidden_states=True, **more)
        return [*found.hidden_states] if self.depth else [found.last_hidden_state]

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
        check_integer("depth", depth, least=0, most=self.depth)
        model = copy.deepcopy(self.model)
        del model.get_submodule(BLOCKS[model.config.model_type])[depth:]
        return self._replace(model=model, depth=depth)

    @property
    def positions(self) -> Float[Tensor, "places d"]:
        """What the embedding adds to a token at each place."""
        if self.model.config.model_type == "gpt2":
            return self.model.wpe.weight.detach()
        table = self.model.embeddings.position_embeddings
        return (table.weight if isinstance(table, nn.Embedding) else table[0]).detach()


def normalized(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Levels as numbers from -1 to 1, as the published image processor has them.

    Args:
        images: Levels from 0 to 255, of any shape.
        dtype: The precision of the result.

    Returns:
        Numbers of the same shape.
    """
    return images.to(dtype) * (2 / 255) - 1


def _check_encoder(architecture=None, source=None, *, depth, dtype, seed=0, **_) -> None:
    check_integer("depth", depth, least=0)
    check_integer("seed", seed, least=0)
    if dtype not in FLOATS:
        refuse("dtype", str(dtype), "torch.float32 or torch.float64")
    if isinstance(architecture, str) and architecture not in PUBLISHED:
        refuse("architecture", repr(architecture), f"one of {', '.join(PUBLISHED)}, or a pair")


@checked_by(_check_encoder)
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
        architecture: A key of ``PUBLISHED``, or a pair of a model type (``"vit"``, ``"bert"``,
            ``"gpt2"``) and the sizes that differ from its defaults.
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
        model = library.AutoModel.from_config(config)
    return _encoder(model, depth, dtype, device)


@checked_by(_check_encoder)
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
        ValueError: The model has fewer blocks than ``depth``, or an argument is out of range.
        ConnectionError: There is neither such a folder nor a hub that gives the model.
    """
    library = need("transformers")
    with reaching(source):
        config = library.AutoConfig.from_pretrained(source)
    if depth > config.num_hidden_layers:
        refuse("depth", depth, f"at most {config.num_hidden_layers}, the blocks of {source}")
    config.num_hidden_layers = depth
    with reaching(source), _quiet(library.logging):
        model = library.AutoModel.from_pretrained(source, config=config, dtype=torch.float32)
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
    query = -1 if model.config.model_type == "gpt2" else 0
    return Encoder(model.eval().to(device, dtype), depth, query, dtype)


# --- feature maps ---------------------------------------------------------------------------------


def random_attention(
    tokens: Float[Tensor, "B n d"], asking: Float[Tensor, "B m d"], *, seed: int
) -> Float[Tensor, "B m d"]:
    r"""One attention head with Xavier's weights on layer-normalized tokens, plus its input.

    Logits are divided by :math:`\sqrt d`.

    Args:
        tokens: The tokens that are attended to.
        asking: Those of them whose output is wanted.
        seed: Decides the weights.

    Returns:
        The outputs of the tokens that ask.

    Source: Mahdavi et al. 2024, Table 1, "Random attention".
    """
    d = tokens.shape[-1]
    g = torch.Generator().manual_seed(seed)
    W_Q, W_K, W_V, W_O = (_xavier(g, d, d).to(tokens) for _ in range(4))
    keys, queries = (F.layer_norm(x, (d,)) for x in (tokens, asking))
    # Re-associated: no token is projected, only those that ask.
    z = F.scaled_dot_product_attention(queries @ (W_Q @ W_K.mT), keys, keys, scale=d**-0.5)
    return asking + z @ (W_V @ W_O)


def head_features(
    tokens: Float[Tensor, "B n d"], asking: Float[Tensor, "B d"], heads: int, *, seed: int
) -> Float[Tensor, "B d"]:
    """What random heads of width ``d / heads`` hand to their output map, side by side.

    The weights are Xavier's, the tokens layer-normalized. This is what a read-out of the next
    attention layer sees.

    Args:
        tokens: The tokens that are attended to.
        asking: The token of each example that asks.
        heads: How many heads.
        seed: Decides the weights.

    Returns:
        One vector for each example.
    """
    d = tokens.shape[-1]
    g = torch.Generator().manual_seed(seed)
    x, query = F.layer_norm(tokens, (d,)), F.layer_norm(asking, (d,))[:, None]
    read = []
    for _ in range(heads):
        W_Q, W_K, W_V = (_xavier(g, d, d // heads).to(tokens) for _ in range(3))
        read.append(F.scaled_dot_product_attention(query @ W_Q, x @ W_K, x @ W_V))
    return torch.cat(read, dim=2)[:, 0]


def _xavier(g: torch.Generator, *shape: int) -> Tensor:
    return nn.init.xavier_uniform_(torch.empty(shape), generator=g)


Maps = Callable[[Tensor], dict[str, Float[Tensor, "B n d"]]]


def feature_maps(
    random: Encoder | None = None, trained: Encoder | None = None, *, seed: int | None = None
) -> Maps:
    """A function from a batch to its tokens under every map, by name.

    ``random L0`` are the embeddings of the random encoder, ``random L1`` what its first block makes
    of them, and so on; ``trained L0``, ... likewise. ``random attention`` is one random layer on
    the random embeddings.

    Args:
        random: An encoder with random weights, if any; needed for a ``seed``.
        trained: An encoder with trained weights, if any.
        seed: Decides the weights of ``random attention``; without it that map is left out.

    Returns:
        The function. It takes images or token numbers.
    """

    def maps(inputs: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, encoder in (("random", random), ("trained", trained)):
            layers = encoder(inputs) if encoder else []
            found |= {f"{name} L{depth}": tokens for depth, tokens in enumerate(layers)}
        if seed is not None:
            embedded = found["random L0"]
            found["random attention"] = random_attention(embedded, embedded, seed=seed)
        return found

    return maps


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


class Seen(NamedTuple):
    """Of one feature map and ``T`` examples, what the assumptions speak about.

    Attributes:
        queries: The token that asks (Assumption 1).
        relaxed: That token plus the mean of all tokens (Assumption 3).
        ranks: The numerical rank of each context (Assumption 2); empty if not asked for.
        heads: What a random attention layer reads (see :func:`head_features`); empty likewise.
        positions: Of embeddings, the table of positions.
    """

    queries: Float[Tensor, "T d"]
    relaxed: Float[Tensor, "T d"]
    ranks: Int[Tensor, " T"]
    heads: Float[Tensor, "T k"]
    positions: Float[Tensor, "n d"] | None = None


def collect(
    maps: Maps,
    batches: Iterable[Tensor],
    *,
    query: int,
    ranks: bool = True,
    heads: int = 0,
    seed: int = 0,
) -> dict[str, Seen]:
    """Stream batches through feature maps and keep a few vectors and a rank of every example.

    Args:
        maps: What :func:`feature_maps` returns.
        batches: Images or token numbers.
        query: The place of the token that asks, as in :class:`Encoder`.
        ranks: Whether the ranks of contexts are computed.
        heads: The heads of the attention layer that reads the features; 0 for none.
        seed: Decides the weights of that layer.

    Returns:
        What was kept of each map, by its name.
    """
    kept: dict[str, Seen] = {}
    for inputs in batches:
        for name, tokens in maps(inputs).items():
            asking = tokens[:, query].clone()  # a view would keep all tokens
            rank = numerical_rank(tokens) if ranks else tokens.new_empty(0, dtype=torch.int64)
            read = (
                head_features(tokens, asking, heads, seed=seed) if heads else tokens.new_empty(0, 0)
            )
            new = Seen(asking, asking + tokens.mean(dim=1), rank, read)
            kept[name] = _extended(kept[name], new) if name in kept else new
    return kept


def _extended(seen: Seen, new: Seen) -> Seen:
    """Copied at once, since small pieces kept between large ones would break up free memory."""
    return Seen(*(torch.cat(pair) for pair in zip(seen[:4], new[:4], strict=True)))
