"""Whole models of torch and transformers meet labels, up to the rank of a closed form."""

import re

import pytest
import torch
from torch import nn

from attnmem_yours import meet_labels

D, UNITS, HEADS = 8, 4, 2
EPS = 1e-14  # so that norms put tokens on a sphere, as the closed form has it
# Families with what decides their rank: in how many dimensions tokens are behind a norm, heads with
# own keys and values, coordinates that positions turn, maps with biases, the shape of a block.
FAMILIES = {
    "gpt2": {"m": 6, "groups": 2, "turned": 0, "bias": "qkvo", "mlp": "biased"},
    "llama": {"m": 7, "groups": 1, "turned": 4, "bias": "", "mlp": "gated"},
    "qwen2": {"m": 7, "groups": 1, "turned": 4, "bias": "qkv", "mlp": "gated"},
    "gemma": {"m": 7, "groups": 1, "turned": 4, "bias": "", "mlp": "gated"},
    "stablelm": {"m": 6, "groups": 1, "turned": 2, "bias": "", "mlp": "gated"},
    "olmo": {"m": 6, "groups": 1, "turned": 4, "bias": "", "mlp": "gated"},
    "phi": {"m": 6, "groups": 1, "turned": 2, "bias": "qkvo", "mlp": "biased", "parallel": True},
    "gpt_neox": {"m": 6, "groups": 2, "turned": 2, "bias": "qkvo", "mlp": "biased"}
    | {"parallel": True},
}
# Other names of sizes, and what makes a share of the coordinates turn.
OWN = {
    "gpt2": {"n_embd": D, "n_head": HEADS, "n_inner": UNITS, "n_layer": 3, "n_positions": 8},
    "phi": {"partial_rotary_factor": 0.5},
    "stablelm": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": HEADS},
}


def low_rank(r, a, b):
    """The dimension of matrices of rank r and of this shape."""
    r = min(r, a, b)
    return r * (a + b - r)


def closed_form(m, groups, turned, bias, mlp, parallel=False, units=UNITS):
    """The rank of two silent blocks with a read-out, part by part."""
    a, d_h = HEADS // groups, D // HEADS
    keys, queries = m + ("k" in bias), a * (m + ("q" in bias))
    logits = turned * low_rank(1, keys, queries) + low_rank(d_h - turned, m, queries)
    attention = groups * (logits + low_rank(d_h, m, a))
    pairs = units * (2 * m if mlp == "gated" else m + 2)  # inner maps, biases, and one outer number
    heard = m * units + m * HEADS * d_h  # what the first block writes, by the second
    if not parallel:
        heard += m * HEADS * d_h  # heads of the second block by its own MLP
    if "o" in bias:
        heard += m if parallel else 2 * m  # constants
    constant = 1 if "v" in bias or "o" in bias else 0
    return attention + pairs + heard + constant + m


def built(kind, **others):
    """A tiny model with three blocks, of which the first mixes words."""
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": D, "num_attention_heads": HEADS, "intermediate_size": UNITS}
    sizes |= {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": D // HEADS}
    sizes |= {"rms_norm_eps": EPS, "layer_norm_eps": EPS, "layer_norm_epsilon": EPS}
    if kind == "gpt2":
        sizes = {"layer_norm_epsilon": EPS}
    sizes |= {"vocab_size": 10, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, **sizes | OWN.get(kind, {}) | others)
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config).eval()


def sequences(count):
    """Different ones of three words."""
    every = torch.cartesian_prod(*[torch.arange(10)] * 3)
    return every[torch.randperm(len(every), generator=torch.Generator().manual_seed(1))[:count]]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoder(blocks=2, units=UNITS, before=None, norm=True, **others):
    torch.manual_seed(0)
    sizes = {"d_model": D, "nhead": HEADS, "dim_feedforward": units, "activation": "gelu"}
    sizes |= {"norm_first": True, "batch_first": True, "layer_norm_eps": EPS}
    block = nn.TransformerEncoderLayer(**sizes | others)
    last = nn.LayerNorm(D, eps=EPS) if norm else None
    stack = nn.TransformerEncoder(block, blocks, last, enable_nested_tensor=False)
    return nn.Sequential(before or nn.Linear(D, D), stack).eval()


def rank(module, inputs):
    """What an error says of too many labels."""
    with pytest.raises(ValueError, match=r"^labels: got .*; expected at most") as error:
        meet_labels(module, inputs, normal(len(inputs)))
    return int(re.search(r"at most (\d+)", str(error.value))[1])


@pytest.mark.parametrize("kind", FAMILIES)
def test_family_meets_nine_tenths_of_its_rank(kind):
    """The rank is the closed form; the labels are met by the module itself, called as usual."""
    module, wanted = built(kind), closed_form(**FAMILIES[kind])
    inputs = sequences(wanted + 60)
    assert rank(module, inputs) == wanted
    T = -(-9 * wanted // 10)
    labels = 1000 * normal(T, seed=1)
    before = {name: W.clone() for name, W in module.state_dict().items()}
    met = meet_labels(module, inputs[:T], labels)
    assert met.rank == T
    assert met.errors.max() < 1e-6
    assert all(torch.equal(W, before[name]) for name, W in module.state_dict().items())
    assert type(met.module) is type(module)
    with torch.no_grad():
        answers = met.module(inputs[:T]).last_hidden_state[:, -1].double() @ met.read_out
    # Other families have norms, or positions, in float32, which the docstring excludes.
    tolerance = 1e-6 if kind == "gpt2" else 0.02
    assert (answers - labels).abs().max() < tolerance * labels.abs().max()


@pytest.mark.parametrize("units", [UNITS, 3, 1])
def test_torch_encoder_meets_nine_tenths_of_its_rank(units):
    sizes = FAMILIES["gpt2"] | {"units": units}
    wanted = closed_form(**sizes)
    inputs = normal(wanted + 60, 3, D, seed=1)
    module = encoder(units=units)
    assert rank(module, inputs) == wanted
    T = -(-9 * wanted // 10)
    met = meet_labels(module, inputs[:T], normal(T, seed=2).double())
    assert met.errors.max() < 1e-6
    with torch.no_grad():
        answers = met.module(inputs[:T].double())[:, -1] @ met.read_out
    assert (answers - normal(T, seed=2)).abs().max() < 1e-5


def test_three_blocks_pair_in_a_circle():
    """Of three blocks of three units one has no twin, which adds its outer number alone."""
    m, units = 6, 3
    group = 2 * low_rank(4, m, m + 1) - 4 + m  # of three heads; theory of attention alone
    own = 4 * (m + 2) + 1 + 2 * group
    heard = 2 * m * units + 3 * m * 2 * 4 + 4 * m
    assert rank(encoder(3, units), normal(480, 3, D, seed=1)) == own + heard + 1 + m


def test_one_block_pairs_its_units_within():
    """Its heads write nothing, so that only their outer numbers count."""
    assert rank(encoder(1, 4), normal(80, 3, D, seed=1)) == 2 * (6 + 2) + D + 1 + 6


def test_all_labels_at_the_rank_are_met_and_not_one_more():
    module, inputs = encoder(1, 4), normal(32, 3, D, seed=1)
    assert meet_labels(module, inputs[:31], normal(31)).errors.max() < 1e-6
    with pytest.raises(ValueError, match=r"^labels: got 32; expected at most 31"):
        meet_labels(module, inputs, normal(32))


def test_words_of_torch_are_mixed_by_the_first_block():
    """Words in the same places have the same tokens, so contexts are told apart by the mixing."""
    module = encoder(2, before=nn.Embedding(10, D))
    inputs = torch.combinations(torch.arange(10), 3)[:25]
    met = meet_labels(module, inputs, normal(25))
    assert met.errors.max() < 1e-6
    first = met.module[1].layers[0].linear2.weight
    assert torch.equal(first[0], first[1])
    assert first[2:].any()


def test_equal_inputs_have_equal_labels():
    module, inputs, labels = encoder(1, 4), normal(20, 3, D, seed=1), normal(20)
    inputs[1], labels[1] = inputs[0], labels[0]
    met = meet_labels(module, inputs, labels)
    assert met.errors.max() < 1e-6
    assert met.rank == 19
    labels[1] += 1
    with pytest.raises(ValueError, match=r"^labels: got 20; expected at most 19"):
        meet_labels(module, inputs, labels)


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e20])
def test_labels_of_any_size(size):
    met = meet_labels(encoder(1, 4), normal(20, 3, D, seed=1), size * normal(20))
    assert met.errors.max() < 1e-6


def test_predictions_are_those_of_the_module():
    """Of a model without a last norm, on inputs that it was not given."""
    module, inputs = encoder(norm=False), normal(30, 3, D, seed=1)
    met = meet_labels(module, inputs[:20], normal(20))
    other = meet_labels(module, inputs[:20], normal(20), seed=1)
    with torch.no_grad():
        answers = met.module(inputs.double())[:, -1] @ met.read_out
    largest = answers.abs().max()
    assert (met.predict(inputs) - answers).abs().max() < 1e-6 * largest
    again = meet_labels(module, inputs[:20], normal(20))
    assert torch.equal(met.read_out, again.read_out)
    assert (other.predict(inputs[20:]) - answers[20:]).abs().max() > 1e-3 * largest


def head_alone():
    return nn.Sequential(encoder(), nn.Linear(D, 3)).eval()


def flat():
    return nn.Sequential(encoder(), nn.Flatten()).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: encoder(norm_first=False), "module: got norms behind"),
        (lambda: encoder(activation="relu"), "module: got ReLU"),
        (lambda: encoder(activation=nn.ReLU()), "module: got ReLU"),
        (lambda: encoder(batch_first=False), "module: got batch_first=False"),
        (lambda: encoder(dropout=0.1).train(), "module: got dropout"),
        (lambda: nn.Linear(D, D), "module: got Linear"),
        (lambda: encoder(before=nn.Identity()), "inputs: got tokens whose first two"),
        (head_alone, "module's outputs: got shape"),
        (flat, "module's outputs: got shape"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=rf"^{message}"):
        meet_labels(make(), normal(20, 3, D), normal(20))


@pytest.mark.parametrize("kind", ["bert", "gemma2", "olmo2"])
def test_other_norms_of_transformers_are_refused(kind):
    module = built(kind, num_key_value_heads=HEADS)
    with pytest.raises(ValueError, match=r"^module: got norms behind"):
        meet_labels(module, sequences(20), normal(20))


def test_what_is_not_one_label_for_each_example_is_refused():
    inputs = normal(20, 3, D)
    with pytest.raises(ValueError, match=r"^inputs: got shape"):
        meet_labels(encoder(), inputs, normal(19))
    with pytest.raises(ValueError, match=r"^labels: got 1 entries that are NaN"):
        meet_labels(encoder(), inputs, torch.cat([normal(19), torch.tensor([torch.nan])]))
    with pytest.raises(ValueError, match=r"^labels: got .* of .* weights; expected at most"):
        meet_labels(encoder(), normal(1, 3, D).expand(10**6, 3, D), torch.zeros(10**6))


def test_one_block_of_words_leaves_the_read_out():
    """The block mixes the words, so that only tokens are read: six of their coordinates."""
    module = encoder(1, before=nn.Embedding(10, D))
    inputs = torch.combinations(torch.arange(10), 3)
    assert meet_labels(module, inputs[:6], normal(6)).errors.max() < 1e-6
    with pytest.raises(ValueError, match=r"^labels: got 7; expected at most 6"):
        meet_labels(module, inputs[:7], normal(7))


def test_names_around_the_blocks_do_not_matter():
    module = nn.Sequential()
    module.add_module("attention_norm_dense", encoder(1))
    assert meet_labels(module.eval(), normal(20, 3, D), normal(20)).errors.max() < 1e-6


def test_norms_of_a_trained_model_are_kept_or_shared():
    """All silent blocks have the norms of the first one; the last norm keeps its own."""
    module = encoder()
    for seed, (name, W) in enumerate(module.named_parameters()):
        if "norm" in name:
            W.data = 1 + 0.5 * normal(len(W), seed=seed)
    met = meet_labels(module, normal(100, 3, D), normal(100))
    assert met.errors.max() < 1e-6
    blocks = met.module[1].layers
    assert torch.equal(blocks[0].norm1.weight, blocks[1].norm1.weight)
    assert torch.equal(met.module[1].norm.weight[2:], module[1].norm.weight[2:].double())


def test_a_word_may_be_that_of_padding():
    met = meet_labels(built("gpt2", pad_token_id=0), sequences(50), normal(50))
    assert met.errors.max() < 1e-6
