"""A layer of torch or transformers in the book's letters, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ..checks import FLOATS, check_finite, check_integer, checked, refuse
from ..core.layers import MHAWeights
from ..features.corpora import Inputs
from ..features.encoders import Encoder, saved_config, trained_encoder


@dataclasses.dataclass(frozen=True)
class FromTorch:
    """A torch layer in the book's letters: ``mha(weights, contexts, queries) + bias``.

    A bias of the queries is one more coordinate, which is one. A bias of the keys moves all logits
    of a query alike, so it is left out; that of the values joins the outputs', since attention
    weights sum to one. Where keys and values have their own widths, a token is both, side by side.
    """

    weights: MHAWeights
    bias: Float[Tensor, " d_out"]
    widths: tuple[int, int, int]  # of queries, keys and values; 0 where values are the keys
    batch_first: bool = True

    def contexts(self, key: Tensor, value: Tensor | None = None) -> Float[Tensor, "*T n d"]:
        """Contexts for ``mha`` from what the layer takes."""
        _, keys, values = self.widths
        rows = _of_width("key", key, keys)
        if values:
            values = _of_width("value", key if value is None else value, values)
            rows = torch.cat([rows, values], -1)
        elif value is not None and not torch.equal(value, key):
            refuse("value", "other values than keys", "None, or the key itself")
        return self._widened(rows)

    def queries(self, query: Tensor) -> Float[Tensor, "*T L d"]:
        """Queries for ``mha``: ``[:, i]`` are those at place ``i``; of a single context ``[i]``."""
        return self._widened(_of_width("query", query, self.widths[0]))

    def _widened(self, rows: Tensor) -> Tensor:
        if rows.ndim == 3 and not self.batch_first:
            rows = rows.transpose(0, 1)
        wide = F.pad(rows, (0, self.weights.W_Q.shape[-2] - rows.shape[-1]))
        wide[..., -1] = 1.0  # the constant coordinate
        return wide


def _of_width(name: str, rows: Tensor, width: int) -> Tensor:
    if rows.ndim not in (2, 3) or rows.shape[-1] != width:
        what = f"width {width}, with two axes before it, or one for a single context"
        refuse(name, f"shape {tuple(rows.shape)}", what)
    return rows


def from_torch(module: nn.Module) -> FromTorch:
    """Take the weights of a trained attention layer.

    It is a ``torch.nn.MultiheadAttention``, or a ``BertAttention``, ``ViTAttention`` or
    ``GPT2Attention`` of transformers, such as ``model.h[0].attn``, with finite weights in float32
    or float64. BERT's output is meant before the residual and its norm.
    """
    if _name(module) not in _READERS:
        wanted = f"one of {', '.join(_READERS)}"
        parts = module.named_modules() if isinstance(module, nn.Module) else ()
        if inside := [name for name, part in parts if _name(part) in _READERS]:
            wanted += f", such as module.get_submodule({inside[0]!r})"
        refuse("module", _name(module), wanted)
    for name, P in module.named_parameters():
        if P.is_meta or P.dtype not in FLOATS:
            wanted = "torch.float32 or torch.float64 in memory, as module.float() makes them"
            refuse(f"module.{name}", f"{P.dtype} on {P.device}", wanted)
        check_finite(f"module.{name}", P)
        if "lora" in name or "base_layer" in name:
            refuse("module", f"an adapter, {name}", "a layer into which its adapters are merged")
    drops = [vars(part).get(name) for part in module.modules() for name in _DROPS]
    if module.training and any(drops):
        refuse("module", "dropout, since it is in training mode", "module.eval()")
    return _READERS[_name(module)](module)


def _from_mha(module: nn.MultiheadAttention) -> FromTorch:
    if module.bias_k is not None or module.add_zero_attn:
        refuse("module", "add_bias_kv or add_zero_attn", "a layer that appends no tokens")
    W, b, out = module.in_proj_weight, module.in_proj_bias, module.out_proj
    apart = W is None  # then kdim or vdim differ from the queries' width
    own = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    b_q, _, b_v = (None, None, None) if b is None else b.chunk(3)
    maps = [*(own if apart else W.chunk(3)), out.weight]
    taken = _taken(maps, [b_q, b_v, out.bias], module.num_heads, apart)
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

    W_Q = (len(W_q) // heads) ** -0.5 * placed(W_q, last=b_q)
    inner = W_Q, placed(W_k), placed(W_v, widths[1] if apart else 0)
    W_D = torch.eye(len(W_o), dtype=W_o.dtype, device=W_o.device)
    return FromTorch(MHAWeights(*inner, W_o.T.contiguous(), W_D), W_o @ b_v + b_o, widths)


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


_READERS: dict[str, Callable[[Any], FromTorch]] = {"torch.MultiheadAttention": _from_mha}
_READERS |= dict.fromkeys(("transformers.BertAttention", "transformers.ViTAttention"), _from_linear)
_READERS |= {"transformers.GPT2Attention": _from_gpt2}
_DROPS = ("p", "dropout", "dropout_prob", "attention_dropout")  # what layers call its share


@dataclasses.dataclass(frozen=True)
class SavedLayer:
    """The attention of one block of a saved model, and the model up to it."""

    taken: FromTorch  # the weights, as from_torch gives them
    module: nn.Module  # the layer itself
    encoder: Encoder  # ends with this layer's block

    def tokens(self, inputs: Inputs) -> Float[Tensor, "B n d"]:
        """What the layer reads on a batch of ``encoder``, for ``taken``."""
        read = []
        hook = self.module.register_forward_pre_hook(
            lambda _, args, others: read.extend(args or [others["hidden_states"]]), with_kwargs=True
        )
        try:
            self.encoder(inputs)
        finally:
            hook.remove()
        return read[0]


def saved_layer(
    source: str | Path, block: int = 0, *, dtype: torch.dtype = torch.float32
) -> SavedLayer:
    """Read the attention of one block, from 0, of a saved BERT, ViT or GPT-2.

    ``source`` is a folder that ``transformers`` has saved, or a name on a hub. Code that comes with
    it is never run, and pickles are not read.
    """
    config = saved_config(str(source), ("bert", "vit", "gpt2"), least=1)
    check_integer("block", block, least=0, most=config.num_hidden_layers - 1)
    encoder = trained_encoder(str(source), depth=block + 1, dtype=dtype)
    layers = [part for part in encoder.model.modules() if _name(part) in _READERS]
    return SavedLayer(from_torch(layers[-1]), layers[-1], encoder)


def _name(module: nn.Module) -> str:
    kind = type(module)
    if isinstance(module, nn.MultiheadAttention) and kind is not nn.MultiheadAttention:
        return f"{kind.__name__}, a subclass, which may attend in another way"
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


class _Attention(nn.Module):
    """One layer whose heads, values and outputs have any width; its parameters are its weights."""

    def __init__(self, weights: MHAWeights, bias: Tensor | None) -> None:
        super().__init__()
        bias = weights.W_D.new_zeros(weights.W_D.shape[-1]) if bias is None else bias
        for name, tensor in {**weights._asdict(), "bias": bias}.items():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))

    def forward(
        self,
        query: Float[Tensor, "*T L d"],
        key: Float[Tensor, "*T n d"],
        value: Float[Tensor, "*T n d"] | None = None,
        key_padding_mask: Bool[Tensor, "*T n"] | Float[Tensor, "*T n"] | None = None,
    ) -> tuple[Float[Tensor, "*T L d_out"], Float[Tensor, "*T L n"]]:
        """Outputs, and attention weights averaged over the heads; a mask of floats is added."""
        value, mask = key if value is None else value, key_padding_mask
        for name, rows in (("query", query), ("key", key), ("value", value)):
            _of_width(name, rows, self.W_Q.shape[1])
        # The axis of heads before the rows: (*T, H, L or n, d_h).
        logits = (query.unsqueeze(-3) @ self.W_Q) @ (key.unsqueeze(-3) @ self.W_K).mT
        if mask is not None:
            if mask.dtype != torch.bool and not mask.is_floating_point():
                what = "bools, True at padding, or floats to add; a tokenizer's mask becomes == 0"
                refuse("key_padding_mask", f"dtype {mask.dtype}", what)
            added = torch.where(mask, -torch.inf, 0.0) if mask.dtype == torch.bool else mask
            logits = logits + added[..., None, None, :]
        alpha = logits.softmax(-1)
        heads = alpha @ (value.unsqueeze(-3) @ self.W_V)
        outputs = heads.transpose(-3, -2).flatten(-2) @ self.W_O @ self.W_D + self.bias
        return outputs, alpha.mean(-3)


def _is_one_layer(weights: MHAWeights) -> None:
    for name, W in weights._asdict().items():
        check_finite(f"weights.{name}", W)
        if W.dtype != weights.W_Q.dtype or not W.numel():
            what = f"{weights.W_Q.dtype}, as of W_Q, and no size of 0"
            refuse(f"weights.{name}", f"{W.dtype} of shape {tuple(W.shape)}", what)
    if weights.W_Q.ndim != 3:
        refuse("weights", f"{weights.W_Q.ndim - 3} run axes", "a single layer")


@checked(also=_is_one_layer)
def to_torch(weights: MHAWeights, bias: Float[Tensor, " d_out"] | None = None) -> nn.Module:
    """Make a torch module of a layer, whose outputs ``bias`` is added to.

    It is a ``torch.nn.MultiheadAttention`` with batch first, if that has these sizes. Otherwise it
    is called alike, with ``query``, ``key``, ``value`` (by default the key) and
    ``key_padding_mask``.
    """
    H, d, d_h = weights.W_Q.shape
    if H * d_h != d or weights.W_V.shape != weights.W_Q.shape or weights.W_D.shape[1] != d:
        return _Attention(weights, bias)
    module = nn.MultiheadAttention(d, H, batch_first=True, bias=bias is not None).to(weights.W_Q)
    rows = [W.permute(0, 2, 1).flatten(0, 1) for W in weights[:3]]
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([d_h**0.5 * rows[0], *rows[1:]]))
        module.out_proj.weight.copy_((weights.W_O @ weights.W_D).T)
        if bias is not None:
            module.in_proj_bias.zero_()
            module.out_proj.bias.copy_(bias)
    return module
