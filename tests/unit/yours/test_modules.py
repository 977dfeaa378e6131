"""Layers of torch and transformers have the same outputs in the book's letters, and back."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from attnmem import mha, random_mha
from attnmem_yours import from_torch, memorize, saved_layer, to_torch

PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-12)]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(None, None), (5, 7), (17, 12), (12, 7)])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_layer_has_the_same_outputs(dtype, tolerance, bias, widths, batch_first):
    """Of examples with contexts of their own, and of one whose axes have no batch."""
    kind = {"bias": bias, "kdim": widths[0], "vdim": widths[1], "batch_first": batch_first}
    module = nn.MultiheadAttention(12, 3, dtype=dtype, **kind)
    for seed, parameter in enumerate(module.parameters()):  # biases too
        parameter.data = 0.4 * normal(*parameter.shape, seed=seed, dtype=dtype)
    q, k = normal(6, 4, 12, dtype=dtype), normal(6, 5, widths[0] or 12, seed=1, dtype=dtype)
    v = normal(6, 5, widths[1], seed=2, dtype=dtype) if widths[1] else k
    given = [x if batch_first else x.transpose(0, 1) for x in (q, k, v)]
    wanted = module(*given)[0] if batch_first else module(*given)[0].transpose(0, 1)
    taken = from_torch(module)
    E = taken.contexts(given[1], given[2] if widths[1] else None)
    for place in range(4):
        found = mha(taken.weights, E, taken.queries(given[0])[:, place]) + taken.bias
        assert (found - wanted[:, place]).abs().max() <= tolerance
    with pytest.raises(ValueError, match="key: got shape"):
        taken.contexts(given[1][..., :4], given[2])
    for n in (12, 7):
        q, k = normal(n, 12, dtype=dtype), normal(n, widths[0] or 12, seed=1, dtype=dtype)
        v = normal(n, widths[1], seed=2, dtype=dtype) if widths[1] else k
        E = taken.contexts(k, v if widths[1] else None)
        assert E.shape[0] == n
        found = mha(taken.weights, E, taken.queries(q)) + taken.bias
        assert (found - module(q, k, v)[0]).abs().max() <= tolerance


def test_other_axes_are_refused():
    taken = from_torch(nn.MultiheadAttention(12, 3, kdim=5, vdim=7, dtype=torch.float64))
    for x in (normal(12), normal(2, 3, 4, 12)):
        with pytest.raises(ValueError, match=r"^key: got shape .*, or one for a single"):
            taken.contexts(x[..., :5], normal(3, 4, 7))
        with pytest.raises(ValueError, match=r"^value: got shape .*, or one for a single"):
            taken.contexts(normal(3, 4, 5), x[..., :7])
        with pytest.raises(ValueError, match=r"^query: got shape .*, or one for a single"):
            taken.queries(x)


def transformer(name, folder, **others):
    """The attention of a model of transformers that was saved, with biases that are not zero."""
    models = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1}
    sizes |= {"ViT": {"image_size": 8, "patch_size": 4}}.get(name, {"vocab_size": 9})
    sizes |= {"bos_token_id": 1, "eos_token_id": 1} if name == "GPT2" else {}
    config = getattr(models, f"{name}Config")(**sizes | others)
    model = getattr(models, f"{name}Model")(config)
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = 0.4 * normal(*parameter.shape, seed=seed, dtype=torch.float32)
    model.save_pretrained(folder)
    model = models.AutoModel.from_pretrained(folder).eval()
    *_, found = [part for part in model.modules() if type(part).__name__ == f"{name}Attention"]
    return found


def first(out):
    """The outputs of a layer, beside which most versions return something else."""
    return out if isinstance(out, torch.Tensor) else out[0]


@pytest.mark.parametrize("name", ["Bert", "ViT", "GPT2"])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_transformers_layer_has_the_same_outputs(name, dtype, tolerance, tmp_path):
    layer, x = transformer(name, tmp_path).to(dtype), normal(5, 4, 24, dtype=dtype)
    taken = from_torch(layer)
    found = mha(taken.weights, taken.contexts(x), taken.queries(x)[:, -1]) + taken.bias
    # BERT's is before the residual and its norm.
    wanted = layer.output.dense(layer.self(x)[0]) if name == "Bert" else first(layer(x))
    assert (found - wanted[:, -1]).abs().max() <= tolerance


@pytest.mark.parametrize("name", ["Bert", "ViT", "GPT2"])
def test_saved_layer_reads_the_tokens_of_its_block(name, tmp_path):
    layer = transformer(name, tmp_path, num_hidden_layers=3)  # the last of three
    saved = saved_layer(tmp_path, 1, dtype=torch.float64)
    assert saved.encoder.depth == 2
    inputs = torch.arange(12).view(2, 6) % 9
    if name == "ViT":
        inputs = normal(2, 3, 8, 8, dtype=torch.float32)
    x = saved.tokens(inputs)
    found = mha(saved.taken.weights, saved.taken.contexts(x), saved.taken.queries(x)[:, -1])
    outputs = []  # of the layer, in a pass through the whole model
    hook = saved.module.register_forward_hook(lambda _, args, out: outputs.append((args, out)))
    hidden = saved.encoder(inputs)
    hook.remove()
    assert name != "Bert" or torch.equal(x, hidden[1])
    if name != "Bert":  # whose output has passed the residual and its norm
        assert (found + saved.taken.bias - first(outputs[0][1])[:, -1]).abs().max() < 1e-12
    last = saved_layer(tmp_path, 2)
    assert torch.equal(last.taken.weights.W_Q, from_torch(layer).weights.W_Q)
    with pytest.raises(ValueError, match=r"block: got 3; .* at least 0 and at most 2"):
        saved_layer(tmp_path, 3)


@pytest.mark.parametrize(
    "scale", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}]
)
def test_gpt2_with_other_scales_is_refused(scale, tmp_path):
    with pytest.raises(ValueError, match=r"^module: got cross-attention or other scales"):
        from_torch(transformer("GPT2", tmp_path, **scale))


def test_values_other_than_keys_are_refused():
    taken, k = from_torch(nn.MultiheadAttention(4, 2)), normal(1, 2, 4)
    assert torch.equal(taken.contexts(k, k.clone()), taken.contexts(k)), "an equal copy"
    with pytest.raises(ValueError, match=r"^value: got other values"):
        taken.contexts(k, normal(1, 2, 4, seed=1))


class Softer(nn.MultiheadAttention):
    def forward(self, query, *others, **named):
        return super().forward(0.5 * query, *others, **named)


NAMESAKE = type("MultiheadAttention", (Softer,), {"__module__": "torch.elsewhere"})


def spectral(layer):
    return nn.utils.parametrizations.spectral_norm(layer, "in_proj_weight")


LAYER = partial(nn.MultiheadAttention, 4, 2)
WRONG = [
    (lambda: nn.Linear(2, 2), r"got torch\.Linear; expected one of torch\.Mul"),
    (lambda: LAYER(add_bias_kv=True), "got add_bias_kv or add_zero_attn"),
    (lambda: LAYER(add_zero_attn=True), "got add_bias_kv or add_zero_attn"),
    (lambda: Softer(4, 2), r"got Softer, a subclass, which may attend in another way; expected on"),
    (lambda: NAMESAKE(4, 2), "got MultiheadAttention, a subclass"),  # as torch has some
    (lambda: spectral(LAYER()), "got ParametrizedMultiheadAttention, a subclass"),
    (lambda: nn.TransformerEncoderLayer(4, 2), r"such as module.get_submodule\('self_attn'\)$"),
    (lambda: torch.compile(LAYER()), r"such as module.get_submodule\('_orig_mod'\)$"),
    (lambda: nn.Sequential(nn.Linear(4, 4), LAYER()), r"get_submodule\('1'\)$"),
    (lambda: LAYER().forward, "got builtins.method; expected one of torch.MultiheadAttention, tra"),
    (lambda: LAYER(dropout=0.1), "got dropout, since it is in training mode"),
    (lambda: LAYER(dtype=torch.complex64), "got torch.complex64 on cpu; expected floats in memory"),
    (lambda: LAYER(device="meta"), "got torch.float32 on meta; expected floats in memory"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # which torch.compile calls
@pytest.mark.parametrize(("make", "said"), WRONG)
def test_layer_with_other_outputs_is_refused(make, said):
    with pytest.raises(ValueError, match=rf"^module.*{said}"):
        from_torch(make())


def test_numbers_that_are_not_finite_are_refused():
    assert from_torch(LAYER(dropout=0.1).eval()).weights.W_Q.dtype == torch.float32
    layer = LAYER()
    layer.out_proj.weight.data[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"^module\.out_proj\.weight: got 1 entries that are NaN"):
        from_torch(layer)


class Wrapped(nn.Module):
    """A map beside which an adapter adds its own, as peft wraps it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)


def test_adapters_and_dropout_are_refused(tmp_path):
    layer = transformer("Bert", tmp_path)
    with pytest.raises(ValueError, match=r"^module: got dropout"):
        from_torch(layer.train())
    layer.eval().self.query.register_parameter("lora_A", nn.Parameter(torch.ones(2, 24)))
    with pytest.raises(ValueError, match=r"^module: got an adapter, self\.query\.lora_A; expected"):
        from_torch(layer)
    layer = transformer("Bert", tmp_path)
    layer.self.query = Wrapped(layer.self.query)
    with pytest.raises(ValueError, match=r"^module: got an adapter, self\.query\.base_layer\.wei"):
        from_torch(layer)


@pytest.mark.parametrize("heads", [3, 4])
def test_to_torch_takes_masks_as_torch_does(heads):
    """Three heads of width 2 become torch's own layer; four, the module of this library."""
    weights = random_mha(heads, 6, 2, seed=0, value_dim=2)
    weights = weights._replace(W_O=normal(heads * 2, 6), W_D=torch.eye(6, dtype=torch.float64))
    x, bias = normal(7, 5, 6), normal(6, seed=5)
    layer = to_torch(weights, bias)
    assert isinstance(layer, nn.MultiheadAttention) == (heads == 3)
    plain = mha(weights, x, x[:, 0]) + bias
    assert (layer(x[:, :1], x, x)[0][:, 0] - plain).abs().max() < 1e-12
    hidden = normal(7, 5, seed=1) > 0.5
    hidden[:, 0] = False
    added = torch.zeros(7, 5, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    pulled = normal(7, 5, seed=2)
    alpha = (x[:, None, :1] @ weights.W_Q @ (x[:, None] @ weights.W_K).mT)[..., 0, :]  # (T, H, n)
    for mask, logits in ((hidden, added), (added, added), (pulled, pulled), (pulled.float(), None)):
        if logits is None and heads == 3:
            continue  # torch wants the dtype of the layer
        shown = alpha + (pulled.float() if logits is None else logits)[:, None]
        z = shown.softmax(-1)[..., None, :] @ (x[:, None] @ weights.W_V)
        wanted = z.flatten(1) @ weights.W_O + bias
        found = layer(x[:, :1], x, x, key_padding_mask=mask)[0][:, 0]
        assert (found - wanted).abs().max() < 1e-12
        alone = layer(x[3, :1], x[3], x[3], key_padding_mask=mask[3])[0]
        assert (alone - wanted[3]).abs().max() < 1e-12
    if heads == 4:
        with pytest.raises(ValueError, match=r"^key: got shape \(4, 5\); expected width 6"):
            layer(x[0, :4], x[0, :4, :5])
        torchs, tokenizers = (
            layer(x[:, :1], x, x, key_padding_mask=mask)[0] for mask in (hidden, 1 - hidden.int())
        )
        assert torch.equal(torchs, tokenizers)
        for name, mask in (("key_padding_mask", 2 * hidden.int()), ("attn_mask", hidden[:1].int())):
            with pytest.raises(
                ValueError, match=rf"^{name}: got dtype torch.int32; expected bools"
            ):
                layer(x[:, :1], x, x, **{name: mask})
        with pytest.raises(ValueError, match=r"^attn_mask: got None with is_causal"):
            layer(x, x, is_causal=True)


def test_to_torch_of_other_widths_in_an_encoder():
    """In all calls, and in torch's encoder layer, in training and not."""
    weights, eye = random_mha(3, 6, 2, seed=0, value_dim=2), torch.eye(6, dtype=torch.float64)
    weights = weights._replace(W_O=normal(6, 6), W_D=eye)
    bias, x = normal(6, seed=5), normal(7, 5, 6)
    torchs = to_torch(weights, bias)
    assert isinstance(torchs, nn.MultiheadAttention)
    # An idle head more is another width, with the same outputs.
    wider = [torch.cat([W, 0 * W[:1]]) for W in weights[:3]]
    idle = torch.cat([weights.W_O, 0 * weights.W_O[:2]])
    own = to_torch(type(weights)(*wider, idle, eye), bias)
    assert not isinstance(own, nn.MultiheadAttention)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    added = torch.zeros(5, 5, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    for more in (
        {},
        {"attn_mask": hidden},
        {"attn_mask": added, "is_causal": True},
        {"need_weights": False},
        {"average_attn_weights": False},
    ):
        (found, alpha), (wanted, shown) = (layer(x, x, x, **more) for layer in (own, torchs))
        assert (found - wanted).abs().max() < 1e-12
        if shown is None:
            assert alpha is None
        elif "average_attn_weights" in more:
            assert (alpha[:, :3] - shown).abs().max() < 1e-12
    for wrong in ({"key_padding_mask": hidden[0]}, {"attn_mask": hidden[:1]}):
        with pytest.raises(ValueError, match=rf"^{min(wrong)}: got shape .*; expected \(.*5\)"):
            own(x, x, x, **wrong)
    half = to_torch(type(weights)(*wider, idle, eye), bias).bfloat16()
    y = x.bfloat16()
    assert half(y, y, y, attn_mask=hidden)[0].dtype == torch.bfloat16
    each = normal(4, 5, 5, seed=8)  # of each head
    batch, alone = own(x, x, x, attn_mask=each.repeat(7, 1, 1))[0], own(x[0], x[0], attn_mask=each)
    assert (batch[0] - alone[0]).abs().max() < 1e-12
    block = nn.TransformerEncoderLayer(6, 3, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
    for mode in (block.train, block.eval):
        outputs = []
        for block.self_attn in (own, torchs):
            mode()
            outputs.append(block(x, src_mask=hidden))
        assert (outputs[0] - outputs[1]).abs().max() < 1e-12


@pytest.mark.parametrize("widths", [(None, None), (5, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_into_layer_of_torch(bias, widths):
    kind = {"kdim": widths[0], "vdim": widths[1], "bias": bias, "batch_first": True}
    module = nn.MultiheadAttention(12, 3, dtype=torch.float64, **kind)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = 0.4 * normal(*parameter.shape, seed=seed)
    q, k, v = (normal(6, 4, width or 12, seed=i) for i, width in enumerate((12, *widths)))
    v = v if widths[1] else k
    before, taken = module(q, k, v)[0], from_torch(module)
    taken.into(module)
    assert (module(q, k, v)[0] - before).abs().max() < 1e-12
    edited = dataclasses.replace(
        taken, weights=taken.weights._replace(W_O=2 * taken.weights.W_O), bias=2 * taken.bias
    )
    edited.into(module)
    assert (module(q, k, v)[0] - 2 * before).abs().max() < 1e-12
    with pytest.raises(ValueError, match=r"^module: got a map of shape \(9, 9\); expected"):
        taken.into(nn.MultiheadAttention(9, 3))
    with pytest.raises(ValueError, match=r"^module: got 4 heads; expected 3, as the weights have"):
        taken.into(nn.MultiheadAttention(12, 4))
    huge = dataclasses.replace(taken, weights=taken.weights._replace(W_O=1e6 * taken.weights.W_O))
    with pytest.raises(ValueError, match=r"^weights in torch.float16: got .* infinite"):
        huge.into(nn.MultiheadAttention(12, 3, dtype=torch.float16, **kind))
    if not bias:
        moved = dataclasses.replace(taken, bias=taken.bias + 1)
        with pytest.raises(ValueError, match=r"^module: got no bias where the weights have one"):
            moved.into(module)
    if widths[1]:
        for name in ("W_K", "W_V"):
            crossed = taken.weights._replace(**{name: torch.ones_like(taken.weights.W_K)})
            with pytest.raises(ValueError, match=r"^weights: got keys that read values"):
                dataclasses.replace(taken, weights=crossed).into(module)


@pytest.mark.parametrize("kind", ["Bert", "ViT", "GPT2"])
def test_into_layer_of_transformers(kind, tmp_path):
    layer = transformer(kind, tmp_path).eval()
    taken = from_torch(layer)
    weights = taken.weights._replace(W_V=3 * taken.weights.W_V)
    dataclasses.replace(taken, weights=weights).into(layer)
    again = from_torch(layer)
    for W, there in zip(weights, again.weights, strict=True):
        assert (W - there).abs().max() < 1e-6
    x = normal(2, 5, taken.widths[0], dtype=taken.bias.dtype)
    E, e = taken.contexts(x), taken.queries(x)[:, -1]
    found = mha(again.weights, E, e) + again.bias
    assert (found - mha(weights, E, e) - taken.bias).abs().max() < 1e-5


def test_values_apart_from_keys_and_half_precision():
    """As DETR gives them: positions are added to queries and keys only."""
    module = nn.MultiheadAttention(12, 3, dtype=torch.float64, batch_first=True)
    x, place = normal(6, 5, 12), normal(5, 12, seed=1)
    taken = from_torch(module, apart=True)
    E, e = taken.contexts(x + place, x), taken.queries(x + place)
    for i in range(5):
        found = mha(taken.weights, E, e[:, i]) + taken.bias
        assert (found - module(x + place, x + place, x)[0][:, i]).abs().max() < 1e-12
    with pytest.raises(ValueError, match=r"^value: .* from_torch\(layer, apart=True\)$"):
        from_torch(module).contexts(x + place, x)
    for dtype in (torch.float16, torch.bfloat16):
        module.to(dtype)
        taken = from_torch(module)
        assert module.in_proj_weight.dtype == dtype, "the layer is left alone"
        assert taken.weights.W_Q.dtype == torch.float32
        for W, there in zip(taken.weights, from_torch(module.float()).weights, strict=True):
            assert torch.equal(W, there)


OTHER_WEIGHTS = [
    (lambda weights: [from_torch(LAYER())], "weights: got FromTorch"),
    (lambda weights: [weights._replace(W_V=weights.W_V.float())], "weights.W_V: got torch.float32"),
    (lambda weights: [weights, normal(2)], "bias: got d_out = 2"),
    (lambda weights: [type(weights)(*(W[None] for W in weights))], "weights: got 1 run axes"),
]


@pytest.mark.parametrize(("arguments", "refusal"), OTHER_WEIGHTS)
def test_to_torch_refuses_other_weights(arguments, refusal):
    weights = random_mha(2, 6, 3, seed=0, value_dim=3)
    with pytest.raises(ValueError, match=f"^{refusal}"):
        to_torch(*arguments(weights))


def test_predict_refuses_other_widths():
    E, e = normal(3, 2, 4), normal(3, 4, seed=1)
    found = memorize(E, e, [1.0, 2.0, 3.0], heads=2, head_dim=2)
    assert len(found.predict(E, e)) == 3
    with pytest.raises(ValueError, match=r"^contexts: got shape \(3, 2, 5\); expected 4 along"):
        found.predict(normal(3, 2, 5), normal(3, 5))
