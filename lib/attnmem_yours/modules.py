"""A layer of torch or transformers in the book's letters, and back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnmem.checks import (
    FLOATS,
    Range,
    check_finite,
    check_integer,
    check_tensor,
    checked,
    refuse,
)
from attnmem.core.layers import MHAWeights
from attnmem.features.corpora import Inputs
from attnmem.features.encoders import Encoder, saved_config, trained_encoder
from attnmem.theory.editing import Memory


@dataclasses.dataclass(frozen=True)
class FromTorch:
    """A torch layer in the book's letters: ``mha(weights, contexts, queries) + bias``.

    A bias of the queries is one more coordinate, which is one. A bias of the keys moves all logits
    of a query alike, so it is left out; that of the values joins the outputs', since attention
    weights sum to one. Where keys and values have their own widths, or are apart, a token is both,
    side by side.
    """

    weights: MHAWeights
    bias: Float[Tensor, " d_out"]
    widths: tuple[int, int, int]  # of queries, keys and values; 0 where values are the keys
    batch_first: bool = True

    def contexts(self, key: Tensor, value: Tensor | None = None) -> Float[Tensor, "*T n d"]:
        """Contexts for ``mha`` from what the layer takes."""
        _, d_keys, d_values = self.widths
        rows = _of_width("key", key, d_keys)
        if d_values:
            values = _of_width("value", key if value is None else value, d_values)
            rows = torch.cat([rows, values], -1)
        elif value is not None and not torch.equal(value, key):
            refuse("value", "other values than keys", "the key, or from_torch(layer, apart=True)")
        return self._widened(rows)

    def queries(self, query: Tensor) -> Float[Tensor, "*T L d"]:
        """Queries for ``mha``: ``[:, i]`` are those at place ``i``; of a single context ``[i]``."""
        return self._widened(_of_width("query", query, self.widths[0]))

    def into(self, module: nn.Module) -> None:
        """Write the weights, which may have been edited, into a layer like that they are from.

        Raises ``ValueError`` where the layer has no place for them, and then writes nothing.
        """
        layer = _linear_maps(module)
        heads = len(self.weights.W_Q)
        if layer.heads != heads:
            refuse("module", f"{layer.heads} heads", f"{heads}, as the weights have")
        maps, biases = self._linear_maps()
        pairs = list(zip(maps, biases, layer.maps, layer.biases, strict=True))
        for W, b, target, target_bias in pairs:
            if W.shape != target.shape:
                refuse("module", f"a map of shape {(*target.shape,)}", f"shape {(*W.shape,)}")
            rounded = torch.cat([W.flatten(), b]).to(target.dtype)
            check_finite(f"weights in {target.dtype}", rounded)
            if target_bias is None and b.any():
                refuse("module", "no bias where the weights have one", "a layer with biases")
        with torch.no_grad():
            for W, b, target, target_bias in pairs:
                target.copy_(W)
                if target_bias is not None:
                    target_bias.copy_(b)

    def _linear_maps(self) -> tuple[list[Tensor], list[Tensor]]:
        """Maps that act from the left, and biases, of queries, keys, values and outputs."""
        W_Q, W_K, W_V, W_O, W_D = self.weights
        d_queries, d_keys, d_values = self.widths
        read_by_values = slice(0, d_keys)
        if d_values:  # a token is a key, and a value beside it
            read_by_values = slice(d_keys, d_keys + d_values)
            crossed = W_K[:, d_keys:-1], W_V[:, :d_keys], W_V[:, d_keys + d_values : -1]
            if any(W.any() for W in crossed):
                refuse("weights", "keys that read values, or the reverse", "maps that are apart")
        maps, biases = [], []
        for W, coordinates in (
            (W_Q * W_Q.shape[-1] ** 0.5, slice(0, d_queries)),
            (W_K, slice(0, d_keys)),
            (W_V, read_by_values),
        ):
            rows = W.transpose(1, 2).flatten(0, 1)
            maps.append(rows[:, coordinates])
            biases.append(rows[:, -1])
        return [*maps, (W_O @ W_D).T], [*biases, self.bias]

    def _widened(self, rows: Tensor) -> Tensor:
        if rows.ndim == 3 and not self.batch_first:
            rows = rows.transpose(0, 1)
        _, d, _ = self.weights.W_Q.shape
        wide = F.pad(rows.to(self.weights.W_Q.dtype), (0, d - rows.shape[-1]))
        wide[..., -1] = 1.0  # the constant coordinate
        return wide


def _of_width(name: str, rows: Tensor, width: int) -> Tensor:
    if rows.ndim not in (2, 3) or rows.shape[-1] != width:
        expected = f"width {width}, with two axes before it, or one for a single context"
        refuse(name, f"shape {tuple(rows.shape)}", expected)
    return rows


def from_torch(module: nn.Module, *, apart: bool = False) -> FromTorch:
    """Take the weights of a trained attention layer.

    It is a ``torch.nn.MultiheadAttention``, or a ``BertAttention``, ``ViTAttention`` or
    ``GPT2Attention`` of transformers, such as ``model.h[0].attn``, with finite weights; those in
    half precision become float32, which is exact. BERT's output is meant before the residual and
    its norm. With ``apart``, values are other rows than keys, as in DETR, where positions are added
    to keys alone.
    """
    layer = _linear_maps(module)
    for name, P in module.named_parameters():
        if P.is_meta or P.dtype not in (*FLOATS, torch.float16, torch.bfloat16):
            refuse(f"module.{name}", f"{P.dtype} on {P.device}", "floats in memory")
        check_finite(f"module.{name}", P)
        if "lora" in name or "base_layer" in name:
            refuse("module", f"an adapter, {name}", "a layer into which its adapters are merged")
    if module.training and _drops(module):
        refuse("module", "dropout, since it is in training mode", "module.eval()")
    if layer.maps[0].dtype not in FLOATS:
        layer = _linear_maps(copy.deepcopy(module).float())
    return _in_letters(layer, apart or layer.apart)


def _drops(module: nn.Module) -> bool:
    """Whether a layer drops a share of anything in training."""
    for submodule in module.modules():
        for name in _DROPS:
            if vars(submodule).get(name):
                return True
    return False


class _LinearMaps(NamedTuple):
    """Maps that act from the left, and biases: of queries, keys, values and outputs; all views."""

    maps: list[Tensor]
    biases: list[Tensor | None]
    heads: int
    apart: bool = False  # keys and values have their own widths
    batch_first: bool = True


def _linear_maps(module: nn.Module) -> _LinearMaps:
    name = _name(module)
    if name not in _READERS:
        expected = f"one of {', '.join(_READERS)}"
        submodules = module.named_modules() if isinstance(module, nn.Module) else ()
        inside = [path for path, submodule in submodules if _name(submodule) in _READERS]
        if inside:
            expected += f", such as module.get_submodule({inside[0]!r})"
        refuse("module", name, expected)
    return _READERS[name](module)


def _of_mha(module: nn.MultiheadAttention) -> _LinearMaps:
    if module.bias_k is not None or module.add_zero_attn:
        refuse("module", "add_bias_kv or add_zero_attn", "a layer that appends no tokens")
    apart = module.in_proj_weight is None
    if apart:
        maps = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        maps = [*module.in_proj_weight.chunk(3)]
    biases: list[Tensor | None] = [None, None, None]
    if module.in_proj_bias is not None:
        biases = [*module.in_proj_bias.chunk(3)]
    return _LinearMaps(
        maps=[*maps, module.out_proj.weight],
        biases=[*biases, module.out_proj.bias],
        heads=module.num_heads,
        apart=apart,
        batch_first=module.batch_first,
    )


def _in_letters(layer: _LinearMaps, apart: bool) -> FromTorch:
    W_q, W_k, W_v, W_o = (W.detach() for W in layer.maps)
    biases = []
    for W, b in zip(layer.maps, layer.biases, strict=True):
        biases.append(W_o.new_zeros(len(W)) if b is None else b.detach())
    b_q, _, b_v, b_o = biases
    widths = W_q.shape[1], W_k.shape[1], W_v.shape[1] if apart else 0
    d = max(widths[0], widths[1] + widths[2]) + 1

    def placed(W: Tensor, first: int = 0, last: Tensor | float = 0.0) -> Tensor:
        """One map for each head, from the coordinates that start at ``first``, and the last."""
        rows = W.new_zeros(d, len(W))
        rows[first : first + W.shape[1]] = W.T
        rows[-1] = last
        return rows.unflatten(1, (layer.heads, -1)).transpose(0, 1).contiguous()

    W_Q = (len(W_q) // layer.heads) ** -0.5 * placed(W_q, last=b_q)
    weights = MHAWeights(
        W_Q=W_Q,
        W_K=placed(W_k),
        W_V=placed(W_v, widths[1] if apart else 0),
        W_O=W_o.T.contiguous(),
        W_D=torch.eye(len(W_o), dtype=W_o.dtype, device=W_o.device),
    )
    return FromTorch(weights, W_o @ b_v + b_o, widths, layer.batch_first)


def _of_linear(module: nn.Module) -> _LinearMaps:
    """BERT's and ViT's layers; ViT's is nested like BERT's in transformers 4."""
    inner = getattr(module, "self", getattr(module, "attention", module))
    if getattr(inner, "position_embedding_type", "absolute") != "absolute":  # in transformers 4
        refuse("module", "relative positions", "absolute ones")
    if inner is module:
        maps = [module.q_proj, module.k_proj, module.v_proj, module.o_proj]
    else:
        maps = [inner.query, inner.key, inner.value, module.output.dense]
    return _LinearMaps(
        maps=[linear.weight for linear in maps],
        biases=[linear.bias for linear in maps],
        heads=inner.num_attention_heads,
    )


def _of_gpt2(module: nn.Module) -> _LinearMaps:
    plain = module.scale_attn_weights and not module.scale_attn_by_inverse_layer_idx
    if module.is_cross_attention or not plain:
        refuse("module", "cross-attention or other scales", "self-attention scaled by its width")
    # Conv1D acts from the right.
    return _LinearMaps(
        maps=[*module.c_attn.weight.T.chunk(3), module.c_proj.weight.T],
        biases=[*module.c_attn.bias.chunk(3), module.c_proj.bias],
        heads=module.num_heads,
    )


_READERS: dict[str, Callable[[Any], _LinearMaps]] = {"torch.MultiheadAttention": _of_mha}
_READERS |= dict.fromkeys(("transformers.BertAttention", "transformers.ViTAttention"), _of_linear)
_READERS |= {"transformers.GPT2Attention": _of_gpt2}
_DROPS = ("p", "dropout", "dropout_prob", "attention_dropout")  # what layers call its share


class LayerMemory(Memory):
    """A :class:`Memory` of a layer of torch or transformers, whose facts go back into its model.

    Facts change its output map alone, such as ``out_proj.weight``; biases, widths and all else
    stay. So there is room for at most as many facts as this map has inputs. ``contexts`` and
    ``queries``, and those of ``keep``, are tokens as the layer takes them: all that a query sees,
    so without padding, and in GPT-2 none behind it; and one query for each context. Tokens are keys
    and values, and facts may have contexts of any length. A label is all that the layer is to
    return there, with its bias; of BERT's layer before the residual and its norm.

    Example:
        >>> layer, x = nn.MultiheadAttention(6, 2, batch_first=True), torch.randn(50, 3, 6)
        >>> memory = LayerMemory(layer, x[1:], x[1:, 0])
        >>> memory.write(x[0], x[0, 0], torch.ones(6))
        0
        >>> layer = memory.into(layer)
        >>> bool((layer(x[:1, :1], x[:1], x[:1])[0] - 1).abs().max() < 1e-3)
        True
    """

    def __init__(
        self, layer: nn.Module, contexts: Tensor, queries: Tensor, *, keep: tuple = ()
    ) -> None:
        self._taken, maps = from_torch(layer), _linear_maps(layer)
        self._staying = copy.deepcopy(_staying(maps))
        weights, (_, _, b_v, b_o) = self._taken.weights, maps.biases
        if b_v is not None:  # a part of what the output map reads
            W_V = weights.W_V.clone()
            W_V[:, -1] = b_v.detach().to(W_V).unflatten(0, (maps.heads, -1))
            weights = weights._replace(W_V=W_V)
        if isinstance(keep, tuple) and len(keep) == 2:
            keep = self._inputs(*keep)
        super().__init__(
            weights,
            *self._inputs(contexts, queries),
            keep=keep,
            same_widths=True,
            bias=None if b_o is None else b_o.detach().to(weights.W_O),
        )

    def _inputs(self, contexts: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer takes, in the book's letters."""
        check_tensor("queries", queries, "(B, d)", 2)
        return self._taken.contexts(contexts), self._taken.queries(queries)

    def write(self, context: Tensor, query: Tensor, label: Tensor) -> int:
        """Store a fact: ``context`` has shape ``(n, d)``, ``query`` and ``label`` ``(d,)``.

        Returns its own number; what is refused is what :meth:`Memory.write` refuses.
        """
        check_tensor("context", context, "(n, d)", 2)
        check_tensor("query", query, "(d,)", 1)
        contexts, queries = self._inputs(context, query[None])
        return super().write(contexts, queries[0], label)

    @checked
    def into(self, layer: nn.Module, *, tolerance: Annotated[float, Range(0)] = 1e-3) -> nn.Module:
        """Write the facts into the layer that they are of, or a copy of it, and return it.

        Only the output map changes, from whatever it was, and is rounded to its own precision.
        ``ValueError``, and nothing is written, if all else is not as it was in the layer of this
        memory, or if a fact is then missed by over ``tolerance`` (see :meth:`Memory.missed`).
        """
        maps = _linear_maps(layer)
        for name, part in _staying(maps).items():
            ours = self._staying[name]
            if isinstance(part, Tensor) and isinstance(ours, Tensor):
                same = torch.equal(part.to(ours.device).double(), ours.double())
            else:
                same = part is ours or part == ours
            if not same:
                refuse("layer", f"another {name}", "the layer of this memory, or a copy of it")
        target = maps.maps[-1]
        W = self.layer().W_O.T.to(target)
        check_finite(f"weights in {target.dtype}", W)
        missed = self.missed(target.dtype)
        if missed > tolerance:
            got = f"{target.dtype}, in which a fact is missed by {missed:.1e} of its label"
            refuse("layer", got, f"at most tolerance = {tolerance:g}")
        with torch.no_grad():
            target.copy_(W)
        return layer


def _staying(layer: _LinearMaps) -> dict[str, Tensor | int | None]:
    """All of a layer but its output map."""
    parts: dict[str, Tensor | int | None] = {"number of heads": layer.heads}
    names = "queries", "keys", "values", "outputs"
    for name, W, b in zip(names, layer.maps, layer.biases, strict=True):
        parts[f"bias of {name}"] = None if b is None else b.detach()
        if name != "outputs":
            parts[f"map of {name}"] = W.detach()
    return parts


@dataclasses.dataclass(frozen=True)
class SavedLayer:
    """The attention of one block of a saved model, and the model up to it."""

    taken: FromTorch  # the weights, as from_torch gives them
    module: nn.Module  # the layer itself
    encoder: Encoder  # ends with this layer's block

    def tokens(self, inputs: Inputs) -> Float[Tensor, "B n d"]:
        """What the layer reads on a batch of ``encoder``, for ``taken``."""
        tokens = []

        def keep(_, args, named):
            tokens.append(args[0] if args else named["hidden_states"])

        with self.module.register_forward_pre_hook(keep, with_kwargs=True):
            self.encoder(inputs)
        return tokens[0]


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
    layers = [module for module in encoder.model.modules() if _name(module) in _READERS]
    return SavedLayer(taken=from_torch(layers[-1]), module=layers[-1], encoder=encoder)


def _name(module: nn.Module) -> str:
    layer_type = type(module)
    if isinstance(module, nn.MultiheadAttention) and layer_type is not nn.MultiheadAttention:
        return f"{layer_type.__name__}, a subclass, which may attend in another way"
    return f"{layer_type.__module__.partition('.')[0]}.{layer_type.__name__}"


class _Attention(nn.Module):
    """One layer whose heads, values and outputs have any width; its parameters are its weights."""

    def __init__(self, weights: MHAWeights, bias: Tensor | None) -> None:
        super().__init__()
        bias = weights.W_D.new_zeros(weights.W_D.shape[-1]) if bias is None else bias
        for name, tensor in {**weights._asdict(), "bias": bias}.items():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))

        # What torch's encoder layer asks of its attention, before it calls it.
        self.batch_first = True
        self.in_proj_bias = None
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Float[Tensor, "*T L d"],
        key: Float[Tensor, "*T n d"],
        value: Float[Tensor, "*T n d"] | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Float[Tensor, "*T L d_out"], Tensor | None]:
        """As ``torch.nn.MultiheadAttention``; integers in a mask of keys are a tokenizer's."""
        value = key if value is None else value
        for name, rows in (("query", query), ("key", key), ("value", value)):
            _of_width(name, rows, self.W_Q.shape[1])
        # The axis of heads before the rows: (*T, H, L or n, d_h).
        logits = (query.unsqueeze(-3) @ self.W_Q) @ (key.unsqueeze(-3) @ self.W_K).mT
        if key_padding_mask is not None:
            added = _added("key_padding_mask", key_padding_mask, logits, key.shape[:-1])
            logits = logits + added[..., None, None, :]
        if attn_mask is not None:
            of_all_heads = logits.shape[:-2].numel(), *logits.shape[-2:]
            added = _added("attn_mask", attn_mask, logits, logits.shape[-2:], of_all_heads)
            if added.ndim == 3:
                added = added.view_as(logits)
            logits = logits + added
        elif is_causal:
            refuse("attn_mask", "None with is_causal", "the mask itself, as torch asks for")
        alpha = logits.softmax(-1)
        heads = alpha @ (value.unsqueeze(-3) @ self.W_V)
        outputs = heads.transpose(-3, -2).flatten(-2) @ self.W_O @ self.W_D + self.bias
        if not need_weights:
            return outputs, None
        return outputs, alpha.mean(-3) if average_attn_weights else alpha


def _added(name: str, mask: Tensor, logits: Tensor, *shapes: tuple[int, ...]) -> Tensor:
    """What a mask adds to logits: bools hide where True, a tokenizer's integers where 0."""
    if mask.shape not in shapes:
        expected = " or ".join(f"{(*shape,)}" for shape in shapes)
        refuse(name, f"shape {(*mask.shape,)}", expected)
    if mask.is_floating_point():
        return mask.to(logits)
    hidden = mask
    if mask.dtype != torch.bool:
        tokenizers = name == "key_padding_mask" and ((mask == 0) | (mask == 1)).all()
        if not tokenizers:
            expected = "bools, True where hidden, floats to add, or a tokenizer's 0 and 1 for keys"
            refuse(name, f"dtype {mask.dtype}", expected)
        hidden = mask == 0
    return torch.zeros_like(mask, dtype=logits.dtype).masked_fill(hidden, -torch.inf)


def _is_one_layer(weights: MHAWeights) -> None:
    for name, W in weights._asdict().items():
        check_finite(f"weights.{name}", W)
        if W.dtype != weights.W_Q.dtype or not W.numel():
            expected = f"{weights.W_Q.dtype}, as of W_Q, and no size of 0"
            refuse(f"weights.{name}", f"{W.dtype} of shape {tuple(W.shape)}", expected)
    if weights.W_Q.ndim != 3:
        refuse("weights", f"{weights.W_Q.ndim - 3} run axes", "a single layer")


@checked(also=_is_one_layer)
def to_torch(weights: MHAWeights, bias: Float[Tensor, " d_out"] | None = None) -> nn.Module:
    """Make a torch module of a layer, whose outputs ``bias`` is added to.

    It is a ``torch.nn.MultiheadAttention`` with batch first, if that has these sizes. Otherwise it
    is called alike, with the key as value by default, and can stand in torch's encoder, with batch
    first and without nested tensors. ``FromTorch.into`` writes edited weights where they are from.
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
