"""Layers of torch and transformers have the same outputs in the book's letters, and back."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from attnmem import mha, random_mha
from attnmem_yours import LayerMemory, from_torch, memorize, saved_layer, to_torch

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


def torch_layer(**kind):
    """A layer of torch with biases that are not zero."""
    module = nn.MultiheadAttention(12, 3, **kind).eval()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = 0.4 * normal(*parameter.shape, seed=seed).to(parameter)
    return module


def asked(layer, x, query):
    """What a layer of torch returns to one query for each context, batch first."""
    if layer.batch_first:
        return layer(query[:, None], x, x)[0][:, 0].detach()
    x = x.transpose(0, 1)
    return layer(query[None], x, x)[0][0].detach()


def parts(layer):
    return {name: P.detach().clone() for name, P in layer.state_dict().items()}


# Where a layer of transformers ends, before the residual.
OUTPUT_MAPS = ("output.dense", "o_proj", "c_proj")


def norm_before(model):
    """The first norm of a ViT's first block."""
    [*_, norm] = [
        part for path, part in model.named_modules() if path.endswith("0.layernorm_before")
    ]
    return norm


TORCH_LAYERS = [{}, {"bias": False}, {"batch_first": False}, {"kdim": 7, "vdim": 7}]


@pytest.mark.parametrize("kind", TORCH_LAYERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_facts_go_back_into_a_layer_of_torch(kind, dtype, tolerance, tmp_path):
    kind = {"batch_first": True, "dtype": dtype} | kind
    layer = torch_layer(**kind)
    x = normal(100, 5, kind.get("kdim", 12), seed=1).to(dtype)
    q = normal(100, 12, seed=2).to(dtype)
    given = x if layer.batch_first else x.transpose(0, 1)
    of = (lambda k: given[k]) if layer.batch_first else (lambda k: given[:, k])
    before, others = asked(layer, x, q), slice(12, None)
    memory = LayerMemory(layer, of(others), q[others], keep=(of(slice(8, 12)), q[8:12]))
    assert memory.room == 8
    labels = normal(6, 12, seed=3).to(dtype)
    for t in range(6):
        assert memory.write(x[t], q[t], labels[t]) == t
    old = parts(layer)
    assert memory.into(layer) is layer
    changed = [name for name, P in parts(layer).items() if not torch.equal(P, old[name])]
    assert changed == ["out_proj.weight"]
    after = asked(layer, x, q)
    assert (after[:6] - labels).abs().max() < tolerance
    assert (after[8:12] - before[8:12]).abs().max() < tolerance
    assert (after[6:8] - before[6:8]).abs().max() > 1e-2, "others move"
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    loaded = nn.MultiheadAttention(12, 3, **kind).eval()
    loaded.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(asked(loaded, x, q), after)
    for number in range(6):  # the edited layer takes the first map again
        memory.forget(number)
    memory.into(loaded)
    for name, P in parts(loaded).items():
        assert torch.equal(P, old[name]), name


@pytest.mark.parametrize("name", ["Bert", "ViT", "GPT2"])
def test_facts_go_back_into_a_saved_model(name, tmp_path):
    """The model runs with them as a whole, before it is saved and when it is loaded."""
    models = pytest.importorskip("transformers")
    transformer(name, tmp_path, num_hidden_layers=2)
    load = partial(models.AutoModel.from_pretrained, tmp_path)
    model = load().eval()
    inputs = torch.randint(9, (60, 5), generator=torch.Generator().manual_seed(0))
    if name == "ViT":
        inputs = normal(60, 3, 8, 8, dtype=torch.float32)
    place = -1 if name == "GPT2" else 0

    def run(model):
        """The layer's inputs and outputs at that place, and the model's own outputs."""
        layer = next(part for part in model.modules() if type(part).__name__ == f"{name}Attention")
        end = next(part for path, part in layer.named_modules() if path.endswith(OUTPUT_MAPS))
        seen = []
        hook = end.register_forward_hook(lambda _, args, out: seen.append(out))
        with torch.no_grad():
            out = model(inputs, output_hidden_states=True)
        hook.remove()
        x = out.hidden_states[0]
        if name != "Bert":
            block = model.h[0].ln_1 if name == "GPT2" else norm_before(model)
            x = block(x).detach()
        return layer, x, seen[0].view(*x.shape)[:, place], out.last_hidden_state

    layer, x, before, _ = run(model)
    memory = LayerMemory(layer, x[20:], x[20:, place], keep=(x[10:20], x[10:20, place]))
    for t in range(10):
        memory.write(x[t], x[t, place], before[t + 1])
    old = parts(model)
    memory.into(layer)
    changed = [key for key, P in parts(model).items() if not torch.equal(P, old[key])]
    assert len(changed) == 1
    assert changed[0].removesuffix(".weight").endswith(OUTPUT_MAPS)
    *_, after, last = run(model)
    size = before.abs().max()
    assert (after[:10] - before[1:11]).abs().max() < 1e-3 * size
    assert (after[10:20] - before[10:20]).abs().max() < 1e-3 * size
    assert (before[:10] - before[1:11]).abs().amax(1).min() > 1e-2 * size
    model.save_pretrained(tmp_path)
    *_, again, last_again = run(load().eval())
    assert torch.equal(again, after)
    assert torch.equal(last_again, last)


def test_layer_memory_without_facts_and_with_the_same_fact_twice():
    layer, x = torch_layer(batch_first=True), normal(80, 5, 12, dtype=torch.float32)
    memory, old = LayerMemory(layer, x[20:], x[20:, 0]), parts(layer)
    memory.into(layer)
    assert all(torch.equal(P, old[name]) for name, P in parts(layer).items())
    label = normal(12, dtype=torch.float32)
    memory.write(x[0], x[0, 0], label)
    assert memory.write(x[0, [3, 1, 2, 0, 4]], x[0, 0], label) == 1
    assert memory.room == 11
    with pytest.raises(
        ValueError, match=r"label: got \[.*, and 9 more\]; .*already fixed by fact 0"
    ):
        memory.write(x[0], x[0, 0], label + 1)
    for t in range(1, 12):
        memory.write(x[t], x[t, 0], label + t)
    with pytest.raises(ValueError, match=r"and others \(room for 0 of 12; W_O has 12 rows\)$"):
        memory.write(x[12], x[12, 0], label)
    out = asked(memory.into(copy.deepcopy(layer)), x, x[:, 0])
    assert (out[0] - label).abs().max() < 1e-3
    assert (out[1:12] - label - torch.arange(1, 12)[:, None]).abs().max() < 1e-3


def test_facts_of_contexts_of_any_length():
    layer, x = torch_layer(batch_first=True), normal(80, 5, 12, dtype=torch.float32)
    memory, label = LayerMemory(layer, x, x[:, 0]), normal(5, 12, dtype=torch.float32)
    contexts = [normal(n, 12, seed=n, dtype=torch.float32) for n in range(1, 6)]
    for E, y in zip(contexts, label, strict=True):
        memory.write(E, E[-1], y)
    memory.into(layer)
    for E, y in zip(contexts, label, strict=True):
        assert (asked(layer, E[None], E[-1:])[0] - y).abs().max() < 1e-4


def test_layer_memory_of_a_layer_that_is_frozen_or_in_half_precision():
    layer = torch_layer(batch_first=True).requires_grad_(False)
    x = normal(80, 5, 12, dtype=torch.float32)
    memory = LayerMemory(layer, x[20:], x[20:, 0])
    memory.write(x[0], x[0, 0], torch.ones(12))
    assert not memory.into(layer).out_proj.weight.requires_grad
    for dtype, off in ((torch.float16, 1e-2), (torch.bfloat16, 1e-1)):
        layer = torch_layer(batch_first=True).to(dtype)
        y = x.to(dtype)
        memory = LayerMemory(layer, y[20:], y[20:, 0])
        for t in range(10):
            memory.write(y[t], y[t, 0], torch.full((12,), 1.0 + t))
        before = layer.out_proj.weight.clone()
        with pytest.raises(ValueError, match=rf"^layer: got {dtype}, in which a fact is missed by"):
            memory.into(layer, tolerance=1e-6)
        assert torch.equal(layer.out_proj.weight, before)
        out = asked(memory.into(layer, tolerance=off), y, y[:, 0])
        assert layer.out_proj.weight.dtype == dtype
        wanted = torch.arange(1, 11)[:, None]
        assert ((out[:10] - wanted) / wanted).abs().max() < 3 * off
    layer = torch_layer(batch_first=True).half()
    memory = LayerMemory(layer, x[20:], x[20:, 0])
    memory.write(x[0], x[0, 0], torch.full((12,), 1e9))
    with pytest.raises(ValueError, match=r"^weights in torch.float16: got .* infinite"):
        memory.into(layer, tolerance=1)


def other(change):
    layer = torch_layer(batch_first=True)
    with torch.no_grad():
        change(layer)
    return layer


OTHER_LAYERS = [
    (lambda: nn.MultiheadAttention(12, 4), "another number of heads"),
    (lambda: nn.MultiheadAttention(9, 3), "another bias of queries"),
    (lambda: torch_layer(bias=False), "another bias of queries"),
    (lambda: other(lambda layer: layer.in_proj_weight[0].add_(1)), "another map of queries"),
    (lambda: other(lambda layer: layer.in_proj_weight[-1].add_(1)), "another map of values"),
    (lambda: other(lambda layer: layer.in_proj_bias[-1].add_(1)), "another bias of values"),
    (lambda: other(lambda layer: layer.out_proj.bias.add_(1)), "another bias of outputs"),
    (lambda: torch_layer().half(), "another bias of queries"),
]


@pytest.mark.parametrize(("make", "said"), OTHER_LAYERS)
def test_facts_of_another_layer_are_refused(make, said):
    layer, x = torch_layer(batch_first=True), normal(80, 5, 12, dtype=torch.float32)
    memory = LayerMemory(layer, x[20:], x[20:, 0])
    memory.write(x[0], x[0, 0], torch.ones(12))
    wrong = make()
    before = parts(wrong)
    with pytest.raises(ValueError, match=rf"^layer: got {said}; expected the layer of this memory"):
        memory.into(wrong)
    for name, P in parts(wrong).items():
        assert torch.equal(P, before[name])
    double = copy.deepcopy(layer).double()  # the same numbers, in another dtype
    out = asked(memory.into(double), x.double(), x[:, 0].double())
    assert (out[0] - 1).abs().max() < 1e-6


def test_layer_memory_refuses_what_the_layer_does_not_take():
    layer, x = torch_layer(batch_first=True), normal(80, 5, 12, dtype=torch.float32)
    memory = LayerMemory(layer, x[20:], x[20:, 0])
    cases = [
        ((x[:1], x[0, 0], x[0, 0]), r"context: got shape \(1, 5, 12\); expected shape \(n, d\)"),
        ((x[0], x[0, :1], x[0, 0]), r"query: got shape \(1, 12\); expected shape \(d,\)"),
        ((x[0, :, :5], x[0, 0], x[0, 0]), "key: got shape"),
        ((x[0], x[0, 0, :5], x[0, 0]), "query: got shape"),
        ((x[0], x[0, 0], torch.ones(1)), r"label: got shape \(1,\); expected 12"),
        ((x[0], x[0, 0], 1.0), r"label: got shape \(1,\); expected 12"),
        ((x[0], x[0, 0], torch.nan * x[0, 0]), "label: got 12 entries that are NaN"),
        ((x[0].tolist(), x[0, 0], x[0, 0]), "context: got list"),
    ]
    for fact, said in cases:
        with pytest.raises(ValueError, match=f"^{said}"):
            memory.write(*fact)
    assert memory.room == 12
    for keep, said in (((x,), "a tuple of 1"), (x, "Tensor; expected tuple")):
        with pytest.raises(ValueError, match=f"^keep: got {said}"):
            LayerMemory(layer, x, x[:, 0], keep=keep)
    with pytest.raises(ValueError, match=r"^queries: got shape \(80, 5, 12\)"):
        LayerMemory(layer, x, x)
    with pytest.raises(ValueError, match=r"^context: got shape \(80, 5, 13\); expected 9"):
        LayerMemory(layer, x, x[:9, 0])
    with pytest.raises(ValueError, match=r"^tolerance: got -1"):
        memory.into(layer, tolerance=-1)
    with pytest.raises(ValueError, match=r"^value: got shape"):
        LayerMemory(nn.MultiheadAttention(12, 3, kdim=12, vdim=7), x, x[:, 0])
    weights = random_mha(3, 12, 5, seed=0, value_dim=5)
    wide = to_torch(weights._replace(W_D=normal(1, 12)))  # heads wider than d / H
    with pytest.raises(ValueError, match=r"^module: got attnmem_yours\._Attention; expected one"):
        LayerMemory(wide, x, x[:, 0])
