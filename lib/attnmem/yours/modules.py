"""A layer of torch or transformers in the book's letters, and back; to and from files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ..attention import MHAWeights
from ..checks import check_integer, check_size, refuse
from ..features.corpora import Inputs, need, reaching
from ..features.encoders import Encoder, trained_encoder


@dataclasses.dataclass(frozen=True)
class FromTorch:
    """A torch layer in the book's letters: ``mha(weights, contexts, queries) + bias``.

    A bias of the queries is one more coordinate, which is one in all contexts and queries. A bias
    of the keys moves all logits of a query alike, so it is left out. A bias of the values joins
    that of the outputs, since attention weights sum to one. Where keys and values have widths of
    their own, a token is both, side by side.

    Attributes:
        weights: The weights, in the layer's precision.
        bias: What is added to the outputs.
        widths: Widths of queries, keys and values; the values' is 0 where they are the keys.
        batch_first: Whether the layer's first axis is the batch.
    """

    weights: MHAWeights
    bias: Float[Tensor, " d_out"]
    widths: tuple[int, int, int]
    batch_first: bool = True

    def contexts(self, key: Tensor, value: Tensor | None = None) -> Float[Tensor, "T n d"]:
        """Contexts for :func:`attnmem.attention.mha`.

        Args:
            key: As the layer takes it.
            value: Likewise; None where it is the key.

        Returns:
            One context for each example.

        Raises:
            ValueError: If a width is not the layer's, or values differ from keys of the same width.
        """
        _, keys, values = self.widths
        check_size("key", key, -1, keys, "the width of the layer's keys")
        if values:
            value = key if value is None else value
            check_size("value", value, -1, values, "the width of the layer's values")
            return self._widened(torch.cat([key, value], dim=-1))
        if value is not None and value is not key:
            refuse("value", "other values than keys", "None, or the key itself")
        return self._widened(key)

    def queries(self, query: Tensor) -> Float[Tensor, "T L d"]:
        """Queries for :func:`attnmem.attention.mha`, ``L`` for each context.

        Args:
            query: As the layer takes it.

        Returns:
            ``[:, i]`` are the queries at place ``i``.
        """
        check_size("query", query, -1, self.widths[0], "the width of the layer's queries")
        return self._widened(query)

    def _widened(self, rows: Tensor) -> Tensor:
        rows = rows if self.batch_first else rows.transpose(0, 1)
        wide = F.pad(rows, (0, self.weights.W_Q.shape[-2] - rows.shape[-1]))
        wide[..., -1] = 1.0  # the constant coordinate
        return wide


def from_torch(module: nn.Module) -> FromTorch:
    """Take the weights of a trained attention layer.

    Args:
        module: A ``torch.nn.MultiheadAttention`` with any ``kdim``, ``vdim``, ``bias`` and
            ``batch_first``. Or a ``BertAttention``, ``ViTAttention`` or ``GPT2Attention`` of a
            model of transformers, such as ``model.h[0].attn``. BERT's output is then meant before
            the residual and its norm; each query of GPT-2 sees the tokens up to its own.

    Returns:
        The weights, with what turns its inputs into contexts and queries.

    Raises:
        ValueError: If the module is of another kind, or attends in another way.

    Example:
        >>> from attnmem.attention import mha
        >>> layer = torch.nn.MultiheadAttention(6, 2, batch_first=True)
        >>> taken = from_torch(layer)
        >>> x = torch.rand(5, 3, 6)
        >>> y = mha(taken.weights, taken.contexts(x), taken.queries(x)[:, 0]) + taken.bias
        >>> torch.allclose(y, layer(x, x, x)[0][:, 0], atol=1e-6)
        True
    """
    if _name(module) not in _READERS:
        refuse("module", _name(module), f"one of {', '.join(_READERS)}")
    return _READERS[_name(module)](module)


def _from_mha(module: nn.MultiheadAttention) -> FromTorch:
    if module.bias_k is not None or module.add_zero_attn:
        refuse("module", "add_bias_kv or add_zero_attn", "a layer that appends no tokens")
    apart = module.in_proj_weight is None  # then kdim or vdim differ from the queries' width
    maps = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    if not apart:
        maps = module.in_proj_weight.chunk(3)
    b = module.in_proj_bias
    b_q, _, b_v = (None, None, None) if b is None else b.chunk(3)
    out = module.out_proj
    taken = _taken([*maps, out.weight], [b_q, b_v, out.bias], module.num_heads, apart)
    return dataclasses.replace(taken, batch_first=module.batch_first)


def _taken(
    maps: Sequence[Tensor], biases: Sequence[Tensor | None], heads: int, apart: bool = False
) -> FromTorch:
    """The layer of maps that act from the left, with biases of queries, values and outputs."""
    W_q, W_k, W_v, W_o = (W.detach() for W in maps)
    b_q, b_v, b_o = (W_o.new_zeros(len(W_o)) if b is None else b.detach() for b in biases)
    widths = W_q.shape[1], W_k.shape[1], W_v.shape[1] if apart else 0
    d = max(widths[0], widths[1] + widths[2]) + 1

    def placed(W: Tensor, first: int = 0, last: Tensor | float = 0.0) -> Tensor:
        """One map for each head, from the coordinates that start at ``first``, and the last."""
        whole = W.new_zeros(d, len(W))
        whole[first : first + W.shape[1]] = W.T
        whole[-1] = last
        return whole.unflatten(1, (heads, -1)).transpose(0, 1).contiguous()

    weights = MHAWeights(
        (len(W_q) // heads) ** -0.5 * placed(W_q, last=b_q),
        placed(W_k),
        placed(W_v, widths[1] if apart else 0),
        W_o.T.contiguous(),
        torch.eye(len(W_o), dtype=W_o.dtype, device=W_o.device),
    )
    return FromTorch(weights, W_o @ b_v + b_o, widths)


def _from_linear(module: nn.Module) -> FromTorch:
    """BERT's and ViT's layers; ViT's is nested like BERT's in transformers 4."""
    inner = getattr(module, "self", getattr(module, "attention", module))
    if getattr(inner, "position_embedding_type", "absolute") != "absolute":  # in transformers 4
        refuse("module", "relative positions", "absolute ones")
    if inner is module:
        maps = [module.q_proj, module.k_proj, module.v_proj, module.o_proj]
    else:
        maps = [inner.query, inner.key, inner.value, module.output.dense]
    biases = [maps[i].bias for i in (0, 2, 3)]
    return _taken([linear.weight for linear in maps], biases, inner.num_attention_heads)


def _from_gpt2(module: nn.Module) -> FromTorch:
    plain = module.scale_attn_weights and not module.scale_attn_by_inverse_layer_idx
    if module.is_cross_attention or not plain:
        refuse("module", "cross-attention or other scales", "self-attention scaled by its width")
    # Conv1D acts from the right.
    b_q, _, b_v = module.c_attn.bias.chunk(3)
    maps = [*module.c_attn.weight.T.chunk(3), module.c_proj.weight.T]
    return _taken(maps, [b_q, b_v, module.c_proj.bias], module.num_heads)


_READERS: dict[str, Callable[[Any], FromTorch]] = {
    "torch.MultiheadAttention": _from_mha,
    "transformers.BertAttention": _from_linear,
    "transformers.GPT2Attention": _from_gpt2,
    "transformers.ViTAttention": _from_linear,
}


class _Reached(Exception):
    """The forward pass has come to the layer."""


@dataclasses.dataclass(frozen=True)
class SavedLayer:
    """The attention of one block of a saved model, and the model up to it.

    Attributes:
        taken: The weights, as :func:`from_torch` gives them.
        module: The layer itself.
        encoder: The model, which ends with this layer's block.
    """

    taken: FromTorch
    module: nn.Module
    encoder: Encoder

    def tokens(self, inputs: Inputs) -> Float[Tensor, "B n d"]:
        """What the layer reads on a batch. Nothing behind it is computed, and nothing else kept.

        Args:
            inputs: As an encoder of ``attnmem.features`` takes them: images, token numbers, or what
                a tokenizer or an image processor returns as tensors, texts of one length.

        Returns:
            The tokens, for ``taken.contexts`` and ``taken.queries``; ``encoder.query`` is the place
            of the query that the book uses.
        """
        seen: list[Tensor] = []

        def stop(_: nn.Module, args: tuple, others: dict[str, Any]) -> None:
            seen.append(args[0] if args else others["hidden_states"])
            raise _Reached

        hook = self.module.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.encoder(inputs)
        except _Reached:
            return seen[0]
        finally:
            hook.remove()
        raise AssertionError("the model ended before its layer")


def saved_layer(
    source: str | Path, block: int = 0, *, dtype: torch.dtype = torch.float32
) -> SavedLayer:
    """Read the attention of one block of a saved model.

    Args:
        source: A folder that ``transformers`` has saved, or a name on a hub, of a BERT, a ViT or a
            GPT-2.
        block: Its number, from 0.
        dtype: ``torch.float32`` or ``torch.float64``.

    Returns:
        The layer. Blocks behind it are not read.

    Raises:
        ValueError: If the model is of another kind, or has fewer blocks.
    """
    with reaching(str(source)):
        blocks = need("transformers").AutoConfig.from_pretrained(source).num_hidden_layers
    check_integer("block", block, least=0, most=blocks - 1)
    encoder = trained_encoder(str(source), depth=block + 1, dtype=dtype)
    layers = [part for part in encoder.model.modules() if _name(part) in _READERS]
    if not layers:
        refuse("source", f"a model of type {encoder.model.config.model_type}", "bert, vit or gpt2")
    return SavedLayer(from_torch(layers[-1]), layers[-1], encoder)


def _name(module: nn.Module) -> str:
    kind = type(module)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


class _Attention(nn.Module):
    """One layer whose heads, values and outputs have any width; its parameters are its weights."""

    def __init__(self, weights: MHAWeights, bias: Tensor | None) -> None:
        super().__init__()
        for name, tensor in weights._asdict().items():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))
        made = weights.W_D.new_zeros(weights.W_D.shape[-1]) if bias is None else bias.detach()
        self.bias = nn.Parameter(made.clone())

    def forward(
        self,
        query: Float[Tensor, "T L d"],
        key: Float[Tensor, "T n d"],
        value: Float[Tensor, "T n d"] | None = None,
        key_padding_mask: Bool[Tensor, "T n"] | None = None,
    ) -> tuple[Float[Tensor, "T L d_out"], Float[Tensor, "T L n"]]:
        """Outputs, and attention weights averaged over the heads."""
        value = key if value is None else value
        asked, keys = query[:, None] @ self.W_Q, key[:, None] @ self.W_K  # (T, H, L or n, d_h)
        logits = asked @ keys.mT
        if key_padding_mask is not None:
            logits = logits.masked_fill(key_padding_mask[:, None, None], -torch.inf)
        alpha = logits.softmax(-1)
        heads = alpha @ (value[:, None] @ self.W_V)
        outputs = heads.transpose(1, 2).flatten(2) @ self.W_O @ self.W_D + self.bias
        return outputs, alpha.mean(1)


def to_torch(weights: MHAWeights, bias: Tensor | None = None) -> nn.Module:
    """Make a torch module of a layer.

    Args:
        weights: The layer, without run axes.
        bias: What is added to its outputs.

    Returns:
        A ``torch.nn.MultiheadAttention`` with batch first, if ``H d_h = d``, values are as wide as
        heads and outputs as wide as tokens. Otherwise a module that is called in the same way with
        ``query``, ``key``, ``value`` (by default the key) and ``key_padding_mask``.

    Raises:
        ValueError: If the weights have run axes.

    Example:
        >>> from attnmem.constructions import random_mha
        >>> layer = to_torch(random_mha(2, 5, 3, seed=0))
        >>> x = torch.rand(7, 4, 5, dtype=torch.float64)
        >>> layer(x[:, :1], x)[0].shape
        torch.Size([7, 1, 1])
    """
    if weights.W_Q.ndim != 3:
        refuse("weights", f"{weights.W_Q.ndim - 3} run axes", "a single layer")
    H, d, d_h = weights.W_Q.shape
    if H * d_h != d or weights.W_V.shape != weights.W_Q.shape or weights.W_D.shape[1] != d:
        return _Attention(weights, bias)
    kind = {"dtype": weights.W_Q.dtype, "device": weights.W_Q.device}
    module = nn.MultiheadAttention(d, H, batch_first=True, bias=bias is not None, **kind)
    rows = [W.permute(0, 2, 1).flatten(0, 1) for W in weights[:3]]
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([d_h**0.5 * rows[0], *rows[1:]]))
        module.out_proj.weight.copy_((weights.W_O @ weights.W_D).T)
        if bias is not None:
            module.in_proj_bias.zero_()
            module.out_proj.bias.copy_(bias)
    return module


def save(weights: MHAWeights, path: str | Path) -> None:
    """Save a layer by safetensors.

    Args:
        weights: The layer.
        path: A file that ends in ``.safetensors``.
    """
    tensors = {name: W.detach().clone().contiguous() for name, W in weights._asdict().items()}
    need("safetensors.torch").save_file(tensors, path)


def load_weights(path: str | Path) -> MHAWeights:
    """Load a layer that :func:`save` saved.

    Args:
        path: The file.

    Returns:
        The layer.

    Raises:
        ValueError: If the file holds something else.
    """
    tensors = need("safetensors.torch").load_file(path)
    if set(tensors) != set(MHAWeights._fields):
        refuse("path", f"tensors {sorted(tensors)}", ", ".join(MHAWeights._fields))
    return MHAWeights(**tensors)
