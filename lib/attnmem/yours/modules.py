"""To and from ``torch.nn.MultiheadAttention``, with biases, and to and from files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ..attention import MHAWeights
from ..checks import refuse


@dataclasses.dataclass(frozen=True)
class FromTorch:
    """A torch layer in the book's letters: ``mha(weights, contexts, queries) + bias``.

    A bias of the queries is a coordinate that is one: both contexts and queries get it. A bias of
    the keys moves all logits of a query alike, so it is left out. One of the values is the same for
    all examples, since attention weights sum to one. It joins the bias of the output. Where keys
    and values differ, a token is both, side by side.

    Attributes:
        weights: The weights, in the layer's precision.
        bias: What is added to the outputs.
        widths: Widths of queries, keys and values; the values' is 0 where they are the keys.
        batch_first: Whether the layer's first axis is the batch.
    """

    weights: MHAWeights
    bias: Float[Tensor, " d_out"]
    widths: tuple[int, int, int]
    batch_first: bool

    def contexts(self, key: Tensor, value: Tensor | None = None) -> Float[Tensor, "T n d"]:
        """Contexts for :func:`attnmem.attention.mha`.

        Args:
            key: As the layer takes it.
            value: Likewise; None where it is the key.

        Returns:
            One context for each example.
        """
        if not self.widths[2] and value is not None and value is not key:
            refuse("value", "other values than keys", "none, or from_torch(module, apart=True)")
        both = [key, key if value is None else value][: 2 if self.widths[2] else 1]
        if not self.batch_first:
            both = [part.transpose(0, 1) for part in both]
        return self._widened(torch.cat(both, dim=-1))

    def queries(self, query: Tensor) -> Float[Tensor, "T L d"]:
        """Queries for :func:`attnmem.attention.mha`, ``L`` for each context.

        Args:
            query: As the layer takes it.

        Returns:
            ``[:, i]`` are the queries at place ``i``.
        """
        return self._widened(query if self.batch_first else query.transpose(0, 1))

    def _widened(self, rows: Tensor) -> Tensor:
        d = self.weights.W_Q.shape[-2]
        wide = torch.nn.functional.pad(rows, (0, d - rows.shape[-1]))
        wide[..., -1] = 1.0  # the constant coordinate
        return wide


def from_torch(module: nn.Module, *, apart: bool = False) -> FromTorch:
    """Take the weights of a trained attention layer.

    Args:
        module: A ``torch.nn.MultiheadAttention`` with any ``kdim``, ``vdim``, ``bias`` and
            ``batch_first``. Or a ``BertAttention``, ``ViTAttention`` or ``GPT2Attention`` of
            transformers, whose output is then meant before the residual and its norm; each query of
            GPT-2 sees the tokens up to its own.
        apart: Whether values differ from keys although they are as wide.

    Returns:
        The weights, with what turns its inputs into contexts and queries.

    Raises:
        ValueError: If the module is of another kind, or appends tokens of its own.

    Example:
        >>> from attnmem.attention import mha
        >>> layer = torch.nn.MultiheadAttention(6, 2, batch_first=True)
        >>> taken = from_torch(layer)
        >>> x = torch.rand(5, 3, 6)
        >>> y = mha(taken.weights, taken.contexts(x), taken.queries(x)[:, 0]) + taken.bias
        >>> torch.allclose(y, layer(x, x, x)[0][:, 0], atol=1e-6)
        True
    """
    if isinstance(module, nn.MultiheadAttention):
        return _from_mha(module, apart)
    reader = _READERS.get(type(module).__name__)
    if reader is None:
        known = ", ".join(["MultiheadAttention", *_READERS])
        refuse("module", type(module).__name__, f"one of {known}")
    return reader(module)


def _from_mha(module: nn.MultiheadAttention, apart: bool) -> FromTorch:
    if module.bias_k is not None or module.add_zero_attn:
        refuse("module", "add_bias_kv or add_zero_attn", "a layer that appends no tokens")
    E = module.embed_dim
    if module.in_proj_weight is not None:
        W_q, W_k, W_v = module.in_proj_weight.detach().split(E)
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        W_q, W_k, W_v = (getattr(module, name).detach() for name in names)
    b = module.in_proj_bias
    biases = (None, None) if b is None else (b.detach()[:E], b.detach()[2 * E :])
    out = module.out_proj
    return _taken(
        (W_q, W_k, W_v, out.weight.detach()),
        (*biases, None if out.bias is None else out.bias.detach()),
        module.num_heads,
        batch_first=module.batch_first,
        apart=apart or not module._qkv_same_embed_dim,
    )


def _taken(matrices, biases, heads: int, *, batch_first=True, apart=False) -> FromTorch:
    """The layer of matrices that act from the left, with biases of queries, values and outputs."""
    W_q, W_k, W_v, W_o = matrices
    b_q, b_v, b_o = (torch.zeros_like(W_o[:, 0]) if b is None else b for b in biases)
    widths = W_q.shape[1], W_k.shape[1], W_v.shape[1] if apart else 0
    d = max(widths[0], widths[1] + widths[2]) + 1

    def placed(W: Tensor, first: int, bias: Tensor | None = None) -> Tensor:
        """One map for each head, from ``d`` coordinates of which those from ``first`` on count."""
        whole = W.new_zeros(d, len(W))
        whole[first : first + W.shape[1]] = W.T
        if bias is not None:
            whole[-1] = bias
        return whole.unflatten(1, (heads, -1)).permute(1, 0, 2).contiguous()

    scale = (len(W_q) // heads) ** -0.5
    weights = MHAWeights(
        scale * placed(W_q, 0, b_q),
        placed(W_k, 0),
        placed(W_v, widths[1] if apart else 0),
        W_o.T.contiguous(),
        torch.eye(len(W_o), dtype=W_o.dtype, device=W_o.device),
    )
    return FromTorch(weights, W_o @ b_v + b_o, widths, batch_first)


def _linear(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias; transformers' ``Conv1D`` acts from the right."""
    turned = type(module).__name__ == "Conv1D"
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    return (weight.T if turned else weight), bias


def _from_linear(module: nn.Module, names: tuple[str, ...], heads: int) -> FromTorch:
    """The layer of four linear maps with these names."""
    (W_q, b_q), (W_k, _), (W_v, b_v), (W_o, b_o) = map(_linear, map(module.get_submodule, names))
    return _taken((W_q, W_k, W_v, W_o), (b_q, b_v, b_o), heads)


def _from_bert(module: nn.Module) -> FromTorch:
    inner = module.get_submodule("self")
    names = ("self.query", "self.key", "self.value", "output.dense")
    return _from_linear(module, names, inner.num_attention_heads)


def _from_vit(module: nn.Module) -> FromTorch:
    if hasattr(module, "attention"):  # transformers 4
        inner = ("attention.query", "attention.key", "attention.value", "output.dense")
        return _from_linear(module, inner, module.attention.num_attention_heads)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return _from_linear(module, names, module.config.num_attention_heads)


def _from_gpt2(module: nn.Module) -> FromTorch:
    if module.is_cross_attention or module.config.scale_attn_by_inverse_layer_idx:
        refuse("module", "cross-attention or logits scaled by layer", "plain self-attention")
    W, b = _linear(module.c_attn)
    (W_q, W_k, W_v), (b_q, _, b_v) = W.chunk(3), b.chunk(3)
    W_o, b_o = _linear(module.c_proj)
    return _taken((W_q, W_k, W_v, W_o), (b_q, b_v, b_o), module.num_heads)


_READERS: dict[str, Callable[[Any], FromTorch]] = {
    "BertAttention": _from_bert,
    "GPT2Attention": _from_gpt2,
    "ViTAttention": _from_vit,
}


class Attention(nn.Module):
    """One layer as a torch module, called as ``torch.nn.MultiheadAttention`` with batch first.

    Its parameters are those of :class:`attnmem.attention.MHAWeights` and a bias, so heads, values
    and outputs may have any width.
    """

    def __init__(self, weights: MHAWeights, bias: Tensor | None = None) -> None:
        super().__init__()
        for name, tensor in weights._asdict().items():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone().contiguous()))
        made = weights.W_D.new_zeros(weights.W_D.shape[-1]) if bias is None else bias.detach()
        self.bias = nn.Parameter(made.clone())

    def forward(
        self,
        query: Float[Tensor, "T L d"],
        key: Float[Tensor, "T n d"],
        value: Tensor | None = None,
        key_padding_mask: Bool[Tensor, "T n"] | None = None,
        need_weights: bool = True,
    ) -> tuple[Float[Tensor, "T L d_out"], Float[Tensor, "T L n"] | None]:
        """Outputs, and attention weights averaged over the heads.

        Args:
            query: Some queries for each context.
            key: The tokens.
            value: What is attended to; by default the tokens.
            key_padding_mask: True where a token is ignored.
            need_weights: Whether attention weights are returned.

        Returns:
            Both; None for weights that are not needed.
        """
        value = key if value is None else value
        asked = torch.einsum("tle,her->thlr", query, self.W_Q)
        logits = asked @ torch.einsum("tnd,hdr->thrn", key, self.W_K)
        if key_padding_mask is not None:
            logits = logits.masked_fill(key_padding_mask[:, None, None], -torch.inf)
        alpha = logits.softmax(-1)
        heads = alpha @ torch.einsum("tnd,hdv->thnv", value, self.W_V)
        outputs = heads.transpose(1, 2).flatten(2) @ self.W_O @ self.W_D + self.bias
        return outputs, alpha.mean(1) if need_weights else None


def to_torch(weights: MHAWeights, bias: Tensor | None = None) -> nn.Module:
    """Make a torch module of a layer.

    Args:
        weights: The layer, without run axes.
        bias: What is added to its outputs.

    Returns:
        A ``torch.nn.MultiheadAttention`` with batch first, if ``H d_h = d``, values are as wide as
        heads and outputs as wide as tokens. Otherwise a module that is called in the same way.

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
        return Attention(weights, bias)
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
    from safetensors.torch import save_file

    tensors = {name: w.detach().contiguous().clone() for name, w in weights._asdict().items()}
    save_file(tensors, path)


def load_weights(path: str | Path) -> MHAWeights:
    """Load a layer that :func:`save` saved.

    Args:
        path: The file.

    Returns:
        The layer.

    Raises:
        ValueError: If the file holds something else.
    """
    from safetensors.torch import load_file

    tensors = load_file(path)
    if set(tensors) != set(MHAWeights._fields):
        refuse("path", f"tensors {sorted(tensors)}", f"{', '.join(MHAWeights._fields)}")
    return MHAWeights(**tensors)
