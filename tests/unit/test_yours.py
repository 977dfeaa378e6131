"""One's own data and layer: real tables, all kinds of input, torch modules, ranks of Jacobians."""

import argparse
import itertools
import json
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from attnmem import bounds
from attnmem.attention import mha
from attnmem.constructions import random_mha
from attnmem.yours import (
    capacity,
    cut,
    examine,
    from_config,
    from_torch,
    load_weights,
    memorize,
    save,
    to_torch,
)
from attnmem.yours import layer as one_layer
from attnmem.yours.commands import add_commands
from attnmem.yours.data import read, repeats

datasets = pytest.importorskip("sklearn.datasets")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(scope="module")
def digits():
    found = datasets.load_digits()
    return *cut(found.data[:400], 8), found.target[:400]


# --- what examine says ----------------------------------------------------------------------------


def test_digits_with_positions_are_examined_in_the_dimensions_that_they_have(digits):
    E, e, y = digits
    found = examine(E, e, y.astype(float), heads=2, head_dim=24, samples=200)
    sizes = [each["dimensions"] for each in found.dimensions.values()]
    assert sizes == [15, 9, 1]  # 8 pixels, 8 places of sum one; the mean query has one place
    assert found.rank.rank < 2 * (9 * 15 + 15) + 1 == 301  # pixels at the edge are hardly used
    assert found.met.rank < found.rank.rank < 400
    assert found.least_heads > 2
    assert "constant sum" in str(found)
    assert json.loads(found.to_json())["rank"]["rank"] == found.rank.rank


def test_the_two_equal_rows_of_iris_are_named():
    iris = datasets.load_iris()
    found = examine(np.eye(4), iris.data, iris.target, heads=2, head_dim=4)
    assert found.equal == [(101, 142)]
    assert not found.conflicts
    assert "equal examples: 101 and 142" in str(found)
    assert found.shared
    assert "3 classes" in found.labels
    fails = {each.name for each in found.findings if not each.holds}
    assert "Assumption 1 (queries)" in fails


@pytest.mark.parametrize("load", [datasets.load_wine, datasets.load_breast_cancer])
def test_equal_examples_that_are_hidden_in_a_table_are_found(load):
    table = load()
    rows = table.data[:60].copy()
    labels = table.target_names[table.target[:60]].copy()
    rows[40], rows[51] = rows[7], rows[3]
    other = next(name for name in table.target_names if name != labels[7])
    labels[40], labels[51] = other, labels[3]
    E, e = cut(rows[:, :10], 5)
    found = examine(E, e, labels, heads=1, head_dim=3, samples=50)
    assert found.equal == [(7, 40), (3, 51)]
    assert found.conflicts == [(7, 40)]
    built = memorize(E, e, labels, heads=3, head_dim=3)
    assert built.count == 59
    assert "7 and 40" in built.reason
    assert set(built.predict(E, e)) <= set(table.target_names)


def test_tokens_in_another_order_or_repeated_alike_make_equal_examples():
    a, b = normal(2, 3)
    E = torch.stack([torch.stack(x) for x in ([a, b, a, b], [b, b, a, a], [a, b, b, b])])
    found = repeats(read(E, torch.ones(3, 3), [0.0, 1.0, 2.0]))
    assert found.equal == [(0, 1)] == found.conflicts
    assert found.repeated_tokens == 3


def test_contexts_of_one_token_are_equal_whatever_the_query():
    E = normal(2, 1, 3).expand(2, 4, 3)[[0, 0, 1]]
    found = repeats(read(E, normal(3, 3), ["x", "y", "x"]))
    assert found.conflicts == [(0, 1)]
    assert found.constant == 3


@pytest.mark.parametrize(
    ("sizes", "change", "expected"),
    [
        ("free", lambda E, e: (E, e), (4, 4, 0)),
        ("a zero column", lambda E, e: (E * torch.tensor([1, 1, 1, 0]), e), (3, 4, 0)),
        ("a constant sum", lambda E, e: (E.softmax(-1), e), (3, 4, 1)),
        ("one query", lambda E, e: (E, e[:1].expand_as(e)), (4, 1, 0)),
        ("shared", lambda E, e: (E[0], e), (2, 4, 1)),
        ("one token", lambda E, e: (E[:, :1], e), (0, 4, 4)),
    ],
)
@pytest.mark.parametrize("heads", [1, 2])
def test_the_rank_is_the_count_in_the_dimensions_of_the_data(sizes, change, expected, heads):
    E, e = change(normal(80, 3, 4), normal(80, 4, seed=1))
    at = one_layer.reduced(read(E, e))
    assert at.sizes == expected
    start = one_layer.draw([0] * heads, 2, at, 2.0, seed=0)
    assert one_layer.rank_at(start, at).rank == one_layer.ceiling(heads, 2, at.sizes)
    whole, groups = one_layer.floor(2 * heads, 2, at.sizes)
    base = one_layer.draw(groups, 2, at, 2.0, seed=0)
    if expected != (0, 4, 4):
        assert one_layer.rank_at(base, at).rank == whole
    assert float(one_layer.outputs(base, at).abs().max()) < 1e-12


def test_counts_on_free_data_are_those_of_the_theorems():
    for heads, head_dim, dim in itertools.product((1, 4, 9), (1, 3, 7), (2, 5)):
        sizes = (dim, dim, 0)
        assert one_layer.ceiling(heads, head_dim, sizes) == bounds.own_context_ceiling(
            heads, head_dim, dim
        )
        assert one_layer.floor(heads, head_dim, sizes)[0] == bounds.own_context_floor(
            heads, head_dim, dim
        )


def test_the_derivative_is_that_of_autograd_with_masks_and_several_outputs():
    mask = torch.arange(5) >= torch.tensor([5, 2, 3, 1])[:, None]
    at = one_layer.reduced(read(normal(4, 5, 3), normal(4, 3), mask=mask))
    heads = one_layer.draw([0, 0], 2, at, 1.0, seed=0, outputs=2)

    def flat(*weights):
        return one_layer.outputs(one_layer.Heads(*weights), at).flatten()

    parts = torch.autograd.functional.jacobian(flat, tuple(heads))
    J = torch.cat([part.flatten(1) for part in parts], dim=1)
    here = one_layer.tangents(heads, at)
    torch.testing.assert_close(here.gram(), J @ J.T)
    rows = normal(8)
    step = torch.cat([part.flatten() for part in here.transposed(rows)])
    torch.testing.assert_close(step, rows @ J)


def test_many_vectors_are_examined_without_products_of_all_pairs():
    E, e = normal(3, 4), normal(60_000, 4, dtype=torch.float32)
    found = examine(E, e, heads=1, head_dim=2, samples=100)
    assert found.rank.rank == bounds.shared_context_ceiling(1, 3, 2, 4)


# --- what memorize meets --------------------------------------------------------------------------


def test_digits_are_met_as_reals_and_as_classes(digits):
    E, e, y = digits
    reals = memorize(E, e, y.astype(float), heads=5, head_dim=24)
    assert reals.count == 400
    outputs = mha(reals.weights, E, e)[:, 0]
    assert float((outputs - torch.tensor(y)).abs().max()) < 1e-5
    classes = memorize(E, e, y, heads=2, head_dim=24)
    assert classes.count == 400
    assert (classes.predict(E, e) == y).all()
    assert bool((classes.errors < 0).all())


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_random_labels_are_met_up_to_near_the_ceiling(share):
    T = int(share * bounds.own_context_ceiling(3, 2, 4))
    E, e, y = normal(T, 3, 4), normal(T, 4, seed=1), normal(T, seed=2)
    found = memorize(E, e, y, heads=3, head_dim=2)
    assert found.reason == "all labels are met"
    assert float((mha(found.weights, E, e)[:, 0] - y).abs().max()) <= 1e-6 * float(y.abs().max())


def test_beyond_the_ceiling_the_rank_is_the_reason_and_most_of_it_is_met():
    E, e, y = normal(70, 3, 4), normal(70, 4, seed=1), normal(70, seed=2)
    found = memorize(E, e, y, heads=3, head_dim=2)
    assert 0.8 * 48 <= found.count <= 48
    assert "rank 48" in found.reason


@pytest.mark.parametrize(
    "change",
    [
        lambda E, e: (E * 0, e),
        lambda E, e: (E, e * 0),
        lambda E, e: (E[:, :1], e),
        lambda E, e: (E[..., :1], e[:, :1]),
        lambda E, e: (E[:1].expand_as(E), e[:1].expand_as(e)),
        lambda E, e: (1e-20 * E, 1e20 * e),
    ],
)
@pytest.mark.parametrize("kind", ["reals", "classes", "rows"])
def test_something_is_met_on_every_degenerate_data_set(change, kind):
    E, e = change(normal(9, 3, 4), normal(9, 4, seed=1))
    labels = {"reals": normal(9), "classes": list("abcabcabc"), "rows": normal(9, 2)}[kind]
    found = memorize(E, e, labels, heads=2, head_dim=2, seconds=20)
    if E.any():
        assert found.count >= 1
    else:
        assert found.count == 0
        assert "all tokens are zero" in found.reason
    assert found.met.all() == (found.reason == "all labels are met")


def test_several_outputs_share_the_heads():
    E, e = normal(30, 3, 4), normal(30, 4, seed=1)
    found = memorize(E, e, normal(30, 2), heads=4, head_dim=2)
    assert found.count == 30
    low = normal(40, 1) @ normal(1, 9, seed=3)
    assert memorize(normal(40, 3, 4), normal(40, 4), low, heads=4, head_dim=2).count == 40


def test_random_classes_need_fewer_heads_than_reals():
    E, e = normal(78, 3, 6), normal(78, 6, seed=1)
    words = np.array(["a", "b", "c", "d"])[np.arange(78) % 4]
    assert bounds.own_context_ceiling(2, 4, 6) == 76
    found = memorize(E, e, words, heads=2, head_dim=4)
    assert found.count == 78
    assert (found.predict(E, e) == words).all()


@pytest.mark.parametrize("kinds", [2, 5])
def test_codes_of_classes_are_met_where_the_cross_entropy_leaves_errors(kinds, monkeypatch):
    monkeypatch.setattr(sys.modules[memorize.__module__], "DESCENT", 0)
    labels = np.arange(40) % kinds
    found = memorize(normal(40, 3, 4), normal(40, 4, seed=1), labels, heads=6, head_dim=2)
    assert found.count == 40
    assert "codes" in found.how


# --- what people bring ----------------------------------------------------------------------------

KINDS = {
    "list": lambda x: x.tolist(),
    "numpy float16": lambda x: x.numpy().astype(np.float16),
    "numpy big-endian": lambda x: x.numpy().astype(">f4"),
    "longdouble": lambda x: x.numpy().astype(np.longdouble),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "with gradients": lambda x: x.clone().requires_grad_(),
    "bfloat16": lambda x: x.bfloat16(),
    "integers": lambda x: (4 * x).round().to(torch.int16),
    "read-only": lambda x: np.broadcast_to(x.numpy(), x.shape),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_is_read(kind, tmp_path):
    E, e = normal(7, 3, 4, dtype=torch.float32), normal(7, 4, seed=1, dtype=torch.float32)
    data = read(KINDS[kind](E), KINDS[kind](e))
    assert data.contexts.dtype == torch.float64
    assert (data.contexts - (4 if kind == "integers" else 1) * E).abs().max() < 0.51
    assert not data.contexts.requires_grad


def test_frames_files_and_memory_maps_are_read(tmp_path):
    E, e = normal(5, 3, 4).numpy(), pd.DataFrame(normal(5, 4).numpy())
    np.save(tmp_path / "E.npy", E)
    mapped = np.load(tmp_path / "E.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = read(mapped, e, pd.Series(["x", "y", "x", "y", "x"], dtype="category"))
    assert data.classes == ["x", "y"]
    assert (data.queries.numpy() == e.to_numpy()).all()


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.array([3, 1, 3], np.uint8), [1, 3]),
        ([True, False, True], [False, True]),
        (np.array(["b", "a", "b"], object), ["a", "b"]),
        (torch.tensor([[7], [7], [8]]), [7, 8]),
        ([0.5, 1.0, 2.0], None),
        (torch.zeros(3, 2, dtype=torch.float16), None),
    ],
)
def test_integers_booleans_and_strings_are_classes(labels, classes):
    data = read(normal(3, 2, 4), normal(3, 4), labels)
    assert data.classes == classes
    if classes:
        assert [classes[k] for k in data.labels] == [*np.asarray(labels).reshape(-1)]


def test_lists_of_contexts_and_masks_mean_the_same():
    lengths = [2, 4, 3, 1, 4, 2]
    tables = [normal(n, 4, seed=n).numpy() for n in lengths]
    e, y = normal(6, 4), normal(6)
    padded = np.full((6, 4, 4), np.nan)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    mask = np.arange(4) >= np.array(lengths)[:, None]
    for contexts, given in ((tables, None), (padded, mask), (padded, np.where(mask, -np.inf, 0))):
        found = memorize(contexts, e, y, heads=2, head_dim=2, mask=given)
        assert found.count == 6
        layer = to_torch(found.weights)
        filled = torch.from_numpy(np.nan_to_num(padded))
        out = layer(e[:, None], filled, key_padding_mask=torch.from_numpy(mask))[0][:, 0, 0]
        assert (out - y).abs().max() < 1e-5
        assert "1 to 4 tokens" in str(examine(contexts, e, y, mask=given, samples=10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((normal(3, 2, 4), normal(3, 5)), "contexts: got d = 4"),
        ((normal(3, 2, 4), normal(2, 4)), "contexts: got 3 contexts"),
        ((normal(3, 2, 4), normal(3, 4), [1, 2]), "labels: got 2 labels"),
        ((normal(3, 2, 4) / 0, normal(3, 4)), "contexts: got no finite number at"),
        ((normal(3, 2, 4), normal(3, 4), [1.0, float("nan"), 0.0]), "labels: got NaN"),
        ((normal(3, 2, 4), [["a", "b"]]), "queries: got dtype <U1"),
        ((normal(3, 2, 4), normal(3, 4).to(torch.complex64)), "queries: got dtype torch.complex64"),
        ((normal(3, 2, 4), normal(3, 4), None, torch.ones(3, 2).bool()), "mask: got no token left"),
        ((normal(3, 2, 4), normal(3, 4), None, torch.ones(3)), "mask: got shape"),
    ],
)
def test_malformed_data_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        read(*arguments)


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(None, None), (5, 7)])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_a_torch_layer_gives_the_same_outputs(dtype, tolerance, bias, widths, batch_first, apart):
    torch.manual_seed(0)
    kind = {"bias": bias, "kdim": widths[0], "vdim": widths[1], "batch_first": batch_first}
    module = nn.MultiheadAttention(12, 3, dtype=dtype, **kind)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)  # biases too
    q, k = normal(6, 4, 12, dtype=dtype), normal(6, 5, widths[0] or 12, seed=1, dtype=dtype)
    v = normal(6, 5, widths[1] or 12, seed=2, dtype=dtype) if apart or widths[1] else k
    taken, alike = from_torch(module, apart=apart), v is k
    q, k, v = (x if batch_first else x.transpose(0, 1) for x in (q, k, v))
    wanted = module(q, k, v)[0]
    wanted = wanted if batch_first else wanted.transpose(0, 1)
    E, asked = taken.contexts(k, None if alike else v), taken.queries(q)
    for place in range(4):
        found = mha(taken.weights, E, asked[:, place]) + taken.bias
        assert (found - wanted[:, place]).abs().max() <= tolerance


def test_layers_of_transformers_give_the_same_outputs():
    models = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 8}
    bert = models.BertModel(models.BertConfig(**sizes, num_hidden_layers=1, vocab_size=9))
    patches = {"image_size": 8, "patch_size": 4}
    vit = models.ViTModel(models.ViTConfig(**sizes, **patches, num_hidden_layers=1))
    gpt = models.GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=9, bos_token_id=1)
    gpt.eos_token_id = 1
    x = normal(5, 4, 24)
    whole = nn.ModuleList([bert, vit, models.GPT2Model(gpt)]).double().eval()
    names = ("BertSelfAttention", "ViTAttention", "GPT2Attention")
    found = {type(module).__name__: module for module in whole.modules()}
    for name in names:
        taken = from_torch(found["BertAttention" if name.startswith("Bert") else name])
        got = mha(taken.weights, taken.contexts(x), taken.queries(x)[:, -1]) + taken.bias
        wanted = found[name](x)[0]
        if name.startswith("Bert"):  # before the residual and its norm
            wanted = found["BertAttention"].output.dense(wanted)
        assert (got - wanted[:, -1]).abs().max() < 1e-12
    with pytest.raises(ValueError, match="module: got Linear; expected one of MultiheadAttention"):
        from_torch(nn.Linear(2, 2))


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 3), (3, 5)])
def test_weights_become_torch_layers_and_files_and_come_back(heads, head_dim, tmp_path):
    weights = random_mha(heads, 6, head_dim, seed=0, value_dim=head_dim)
    wide = weights._replace(W_O=normal(heads * head_dim, 6), W_D=torch.eye(6, dtype=torch.float64))
    x = normal(7, 4, 6)
    bias = normal(6, seed=5)
    layer = to_torch(wide, bias)
    assert isinstance(layer, nn.MultiheadAttention) == (heads * head_dim == 6)
    wanted = mha(wide, x, x[:, 0]) + bias
    assert (layer(x[:, :1], x, x)[0][:, 0] - wanted).abs().max() < 1e-12
    save(wide._replace(W_O=wide.W_O.T.contiguous().T), tmp_path / "layer.safetensors")
    back = load_weights(tmp_path / "layer.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(back, wide, strict=True))


# --- capacity -------------------------------------------------------------------------------------


def layer_outputs(x, maps, groups, angles, norm):
    """One attention layer, plainly: the last token asks."""
    Q, K, V, W, q, k, v, total = maps
    if norm:
        x = x - x.mean(-1, keepdim=True)
        x = x / x.square().mean(-1, keepdim=True).sqrt()
    for h in range(len(Q)):
        g = h // (len(Q) // groups)
        keys = x @ K[g] + k[g]
        if angles:
            turn = (len(x) - 1 - torch.arange(len(x)))[:, None] * torch.tensor(angles)
            even, odd = keys[:, ::2], keys[:, 1::2]
            pairs = [even * turn.cos() - odd * turn.sin(), even * turn.sin() + odd * turn.cos()]
            keys = torch.stack(pairs, -1).flatten(-2)
        total = total + (keys @ (x[-1] @ Q[h] + q[h])).softmax(0) @ (x @ V[g] + v[g]) @ W[h]
    return total


def adapt(matrix, low, turned):
    """The maps of all heads plus one matrix of low rank; that of outputs stands upright."""
    change = low[0] @ low[1]
    if turned:
        return matrix + change.reshape(matrix.shape)
    return matrix + change.unflatten(1, (len(matrix), -1)).transpose(0, 1)


def jacobian_rank(layer, *, heads=4, dim=4, head_dim=2):
    """The rank of the Jacobian of all outputs in all weights, or in those of adapters."""
    groups, d_v, o = layer.get("kv_heads", heads), layer["value_dim"], layer["outputs"]
    shapes = [(heads, dim, head_dim), (groups, dim, head_dim), (groups, dim, d_v), (heads, d_v, o)]
    shapes += [(heads, head_dim), (groups, head_dim), (groups, d_v), (o,)]
    bias, rank = layer.get("bias", ""), layer.get("adapter")
    maps = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    maps[4:] = [b if k in bias else 0 * b for k, b in zip("qkvo", maps[4:], strict=True)]
    moved = [0, 1, 2, 3, *(4 + "qkvo".index(letter) for letter in bias)]
    start = [maps[i] for i in moved]
    if rank:
        moved = ["qkvo".index(letter) for letter in layer["adapted"]]
        wide = [(dim, len(W) * W.shape[2]) for W in maps[:3]] + [(heads * d_v, o)]
        sizes = [size for i in moved for size in ((wide[i][0], rank), (rank, wide[i][1]))]
        start = [normal(*size, seed=20 + i) for i, size in enumerate(sizes)]

    def outputs(x, *parts):
        now = list(maps)
        for j, i in enumerate(moved):
            now[i] = adapt(maps[i], parts[2 * j : 2 * j + 2], i == 3) if rank else parts[j]
        return layer_outputs(x, now, groups, layer.get("rope"), layer.get("norm"))

    T = 2 * sum(part.numel() for part in start) // min(o, 2) + 9
    jacobian = torch.func.jacrev(outputs, argnums=tuple(range(1, 1 + len(start))))
    parts = torch.func.vmap(lambda x: jacobian(x, *start))(normal(T, 3, dim, seed=50))
    J = torch.cat([part.flatten(0, 1).flatten(1) for part in parts], dim=1)
    scale = J.norm(dim=0)
    J = (J / scale)[:, scale > 1e-12 * scale.max()]
    values = torch.linalg.svdvals(J)
    return int((values > 1e-10 * values[0]).sum())


LAYERS = [
    {"value_dim": 2, "outputs": 1},
    {"value_dim": 3, "outputs": 4, "bias": "qkvo"},
    {"value_dim": 2, "outputs": 1, "kv_heads": 2, "bias": "q"},
    {"value_dim": 2, "outputs": 3, "kv_heads": 1, "bias": "qv"},
    {"value_dim": 1, "outputs": 1, "kv_heads": 2, "rope": [0.9]},
    {"value_dim": 2, "outputs": 2, "kv_heads": 2, "rope": [0.9], "bias": "qkv"},
    {"value_dim": 2, "outputs": 1, "norm": True, "bias": "qkvo"},
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_count_is_the_rank_of_the_jacobian(layer):
    found = capacity(4, 4, 2, **layer)
    assert found.effective == jacobian_rank(layer)
    assert (found.effective == found.one_output) or layer["outputs"] > 1
    assert found.floor is None or found.floor <= found.one_output


@pytest.mark.parametrize("adapted", ["q", "k", "v", "o", "qv", "ko"])
@pytest.mark.parametrize("adapter", [1, 2])
@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[3] | {"bias": ""}, LAYERS[4]], ids=str)
def test_the_count_of_adapters_is_the_rank_of_the_jacobian(layer, adapter, adapted):
    low = {"adapter": adapter, "adapted": adapted}
    assert capacity(4, 4, 2, **layer, **low).effective == jacobian_rank(layer | low)


def test_adapters_of_both_factors_have_an_upper_bound():
    layer = {"value_dim": 2, "outputs": 1, "adapter": 2, "adapted": "qkvo"}
    found = capacity(4, 4, 2, **layer)
    assert jacobian_rank(layer) <= found.effective
    assert "upper bound" in found.proved


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        ({"model_type": "gpt2", "n_embd": 768, "n_head": 12}, (2362368, 2260224, 1138933, 1032127)),
        (
            {"model_type": "t5", "d_model": 512, "num_heads": 8, "d_kv": 64},
            (1048576, 983040, 495616, 429248),
        ),
        (
            {
                "model_type": "qwen2",
                "hidden_size": 3584,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
            },
            (29364736, 29298688, 14784001, 7392000),
        ),
    ],
)
def test_well_known_models_have_their_counts(config, counts, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = from_config(tmp_path / "config.json")
    assert (found.parameters, found.effective, found.one_output, found.floor) == counts
    assert found.proved.startswith("proved" if config["model_type"] == "t5" else "certified at")


def test_unknown_models_are_refused():
    with pytest.raises(ValueError, match="model_type: got 'mamba'"):
        from_config({"model_type": "mamba"})


# --- the commands ---------------------------------------------------------------------------------


def test_the_commands_print_a_report(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    done = add_commands(parser.add_subparsers(dest="command"))

    def call(*words):
        given = parser.parse_args([str(word) for word in words])
        assert done[given.command](given) == 0
        return capsys.readouterr().out

    np.savez(tmp_path / "a.npz", E=normal(9, 3, 4), queries=normal(9, 4), labels=np.arange(9) % 2)
    look = ("examine", tmp_path / "a.npz", "--contexts", "E", "--heads", 1, "--samples", 20)
    assert "9 examples with contexts of their own" in call(*look)
    assert json.loads(call(*look, "--json"))["examples"] == 9
    frame = pd.DataFrame({"a": [1, 2, 3], "b": [4.0, 5.0, 7.0], "kind": ["x", "y", "x"]})
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert "2 classes ('x', 'y')" in call("examine", tmp_path / "t.csv", "--tokens", 2)
    sizes = ("--heads", 32, "--dim", 4096, "--head-dim", 128, "--kv-heads", 8, "--rope")
    assert "21,101,568" in call("capacity", *sizes)
