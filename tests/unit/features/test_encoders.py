"""Encoders and feature maps, on tiny models."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from attnmem.features import corpora, encoders
from attnmem.theory.independence import certified_rank, numerical_rank

IMAGES = ("vit", "dinov2")  # the families that read images
BLOCKS = ("Layer", "Block")  # how classes of blocks end

pytestmark = pytest.mark.usefixtures("no_hub")


def inputs_of(kind):
    if kind == "vit":
        return next(corpora.photograph_crops(3, size=32, batch=3, seed=0))
    return next(corpora.library_passages(3, length=20, batch=3, seed=0, pairs=kind == "bert"))


@pytest.mark.parametrize("kind", ["vit", "bert", "gpt2"])
def test_precisions_share_their_weights(kind):
    single = encoders.random_encoder(f"{kind}-tiny", depth=2, seed=1)
    double = encoders.random_encoder(f"{kind}-tiny", depth=2, dtype=torch.float64, seed=1)
    state = torch.get_rng_state()
    other = encoders.random_encoder(f"{kind}-tiny", depth=2, dtype=torch.float64, seed=2)
    assert torch.equal(state, torch.get_rng_state()), "the caller's draws are not disturbed"
    for name, P in single.model.state_dict().items():
        assert torch.equal(P.double(), double.model.state_dict()[name].double())
    layers = (encoder(inputs_of(kind)) for encoder in (single, double, other))
    for x, exact, redrawn in zip(*layers, strict=True):
        assert (x.dtype, exact.dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(x.double(), exact, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(exact, redrawn)


SIZES = {  # tiny models of all families
    kind: {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40}
    | ({"image_size": 32, "patch_size": 8} if kind in IMAGES else {"vocab_size": 50})
    for kind in encoders.MODEL_TYPES
}
SIZES["dinov2"] = {k: v for k, v in SIZES["dinov2"].items() if k != "intermediate_size"}
SIZES["gpt2"] = {"n_embd": 24, "n_head": 4, "vocab_size": 50} | dict.fromkeys(
    ("bos_token_id", "eos_token_id"), 0
)


def whole_model(kind, folder):
    """A model of transformers as it comes, of two blocks; no weight has a special value."""
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=2, **SIZES[kind])
    model = transformers.AutoModel.from_config(config).eval()
    for P in model.parameters():
        P.data += 0.1 * torch.randn_like(P)
    model.save_pretrained(folder)
    return model.double()


@pytest.fixture(params=encoders.MODEL_TYPES)
def family(request, tmp_path):
    """Of every type its name, a whole model, its encoders in float64, by depth, and a batch."""
    kind = request.param
    whole = whole_model(kind, tmp_path)
    inputs = torch.rand(3, 3, 32, 32) if kind in IMAGES else torch.randint(3, 50, (3, 9))
    return (
        kind,
        whole,
        partial(encoders.trained_encoder, str(tmp_path), dtype=torch.float64),
        inputs,
    )


def test_layers_are_what_blocks_read_and_write(family):
    (kind, whole, trained, inputs), seen = family, []
    blocks = [part for part in whole.modules() if type(part).__name__.endswith(BLOCKS)]
    assert len(blocks) == 2
    blocks[0].register_forward_pre_hook(
        lambda _, args, named: seen.append(args[0] if args else named["hidden_states"]),
        with_kwargs=True,
    )
    for block in blocks:
        block.register_forward_hook(
            lambda _, args, x: seen.append(x if torch.is_tensor(x) else x[0])
        )
    whole(inputs.double() if kind in IMAGES else inputs)
    for depth in range(3):
        found = trained(depth=depth)(inputs)
        assert len(found) == depth + 1
        for x, expected in zip(found, seen, strict=False):
            torch.testing.assert_close(x, expected.detach())
    with pytest.raises(ValueError, match="num_hidden_layers: got 2;"):
        trained(depth=3)


def test_token_that_asks_sees_all_tokens(family):
    kind, _, trained, x = family
    encoder = trained(depth=1)
    asked = encoder(x)[1][:, encoder.query]
    for i in range(9):
        other = x.clone()
        if kind in IMAGES:
            row, column = divmod(i, 3)
            other[:, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1
        else:
            other[:, i] = 1 + other[:, i] % 47 + 2 * (other[:, i] % 47 < 2)
        changed = (encoder(other)[1][:, encoder.query] - asked).abs().amax(dim=1)
        assert (changed > 1e-4).all()


def test_float64_from_end_to_end(family):
    """Differences over 1e-9 and 1e-6 agree; a float32 on the way makes the first one noise."""
    _, _, trained, inputs = family
    encoder = trained(depth=2)
    moved = [(P, P.detach().clone(), torch.randn_like(P)) for P in encoder.model.parameters()]

    def slope(step):
        ends = []
        for sign in (1, -1):
            for P, start, direction in moved:
                P.data = start + sign * step * direction
            ends.append(encoder(inputs)[2])
        return (ends[0] - ends[1]) / (2 * step)

    torch.testing.assert_close(slope(1e-9), slope(1e-6), rtol=1e-3, atol=1e-3)


def test_positions_are_what_the_embedding_adds(family):
    kind, _, trained, inputs = family
    encoder = trained(depth=0)
    for name, P in encoder.model.named_parameters():
        if "position" not in name and "wpe" not in name:
            P.data.fill_("LayerNorm.weight" in name)
        else:
            P.data = torch.randn_like(P)
    [[x, *_]] = encoder(inputs)
    added = encoder.positions[: len(x)]
    if kind == "bert":  # which normalizes the sum
        added = encoder.model.embeddings.LayerNorm(added).detach()
    torch.testing.assert_close(x, added)


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("opt", {}, "opt"),
        ("vit_mae", {}, "vit_mae"),
        ("bert", {"is_decoder": True}, "bert decoder"),
    ],
)
def test_other_types_are_refused(kind, options, name, tmp_path):
    config = transformers.AutoConfig.for_model(kind, num_attention_heads=4, **options)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"^source: got a model of type {name};"):
        encoders.trained_encoder(str(tmp_path))


def test_model_that_lacks_weights_is_refused(tmp_path):
    whole = whole_model("bert", tmp_path)
    lacks = "layer.1.output.dense", "pooler"
    kept = {n: P for n, P in whole.state_dict().items() if not any(part in n for part in lacks)}
    whole.save_pretrained(tmp_path, state_dict=kept)
    state = torch.get_rng_state()
    assert encoders.trained_encoder(str(tmp_path), depth=1).depth == 1, "nothing reads a pooler"
    assert torch.equal(state, torch.get_rng_state()), "the caller's draws are not disturbed"
    with pytest.raises(ValueError, match=r"^source: got .* without encoder.layer.1.output.dense.b"):
        encoders.trained_encoder(str(tmp_path), depth=2)


@pytest.mark.parametrize("pair", [None, "three one", "one two three one two"])
def test_sentences_and_pairs_are_read_by_the_model(pair, tmp_path, berts_tokenizer):
    whole = whole_model("bert", tmp_path)
    encoder = encoders.trained_encoder(str(tmp_path), depth=2, dtype=torch.float64)
    given = berts_tokenizer("one two three", pair, return_tensors="pt")
    expected = whole(**given, output_hidden_states=True).hidden_states
    for found, x in zip(encoder(given), expected, strict=True):
        torch.testing.assert_close(found, x.detach())
    if pair is None:
        assert torch.equal(encoder(given["input_ids"])[2], encoder(given)[2])


IDS = torch.tensor([[2, 5, 6, 3], [2, 7, 7, 3]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
LEVELS = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One tiny encoder of each type; the BERT has two types of tokens."""
    made = {kind: encoders.random_encoder(f"{kind}-tiny", seed=0) for kind in ("vit", "gpt2")}
    for kind in ("bert", "dinov2"):
        folder = tmp_path_factory.mktemp(kind)
        whole_model(kind, folder)
        made[kind] = encoders.trained_encoder(str(folder))
    return made


@pytest.mark.parametrize(
    ("kind", "inputs", "message"),
    [
        ("bert", {"input_ids": IDS, "attention_mask": MASK}, "attention_mask: got padding"),
        ("bert", {"input_ids": IDS, "token_type_ids": 2 + 0 * IDS}, "token_type_ids: got tokens"),
        ("gpt2", {"input_ids": IDS, "token_type_ids": 1 + 0 * IDS}, "token_type_ids: got tokens"),
        ("bert", {"token_type_ids": IDS[:1], "input_ids": IDS}, "token_type_ids: got shape"),
        ("bert", {"input_ids": IDS.tolist()}, "input_ids: got list"),
        ("bert", IDS[:0], "input_ids: got shape"),
        ("bert", IDS + 50, "input_ids: got tokens from 52 to"),
        ("bert", torch.ones(1, 513, dtype=torch.int64), "input_ids: got texts of 513 tokens"),
        ("bert", {"pixel_values": LEVELS}, "inputs: got pixel_values"),
        (
            "bert",
            {"input_ids": IDS, "offset_mapping": IDS},
            "inputs: got input_ids, offset",
        ),
        ("vit", {"input_ids": IDS}, "inputs: got input_ids"),
        ("vit", LEVELS.int(), "pixel_values: got torch.int32 for a vit"),
        ("dinov2", LEVELS, "pixel_values: got torch.uint8 for a dinov2"),
    ],
)
def test_inputs_of_another_kind_are_refused(kind, inputs, message, models):
    with pytest.raises(ValueError, match=f"^{message}"):
        models[kind](inputs)


def test_encoders_refuse_by_name(models):
    with pytest.raises(ValueError, match=r"^encoder: got a dinov2"):
        encoders.exact_embeddings(models["dinov2"], LEVELS)
    with pytest.raises(ValueError, match=r"^architecture: got 'vit-giant'"):
        encoders.random_encoder("vit-giant", seed=0)
    with pytest.raises(ValueError, match=r"^dtype: got torch.float16"):
        encoders.random_encoder("vit-tiny", dtype=torch.float16, seed=0)
    with pytest.raises(ValueError, match=r"^batches: got none"):
        encoders.collect([])


@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_surroundings_change_no_feature(kind, tmp_path):
    """A default device or dtype, automatic half precision, and weights that were stored in half."""
    architecture, inputs = f"{kind}-tiny", inputs_of(kind)

    def found():
        encoder = encoders.random_encoder(architecture, seed=1)
        return encoders.collect([inputs], encoder, attention=True, seed=3)

    expected = found()

    def check():
        for name, seen in found().items():
            assert all(map(torch.equal, seen[:3], expected[name][:3]))

    with torch.device("meta"):
        check()
        made = inputs_of(kind)
        assert (made["input_ids"] if kind == "bert" else made).device.type == "cpu"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check()
    torch.set_default_dtype(torch.float64)
    try:
        check()
    finally:
        torch.set_default_dtype(torch.float32)
    model = encoders.random_encoder(architecture, seed=1).model.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    encoder = encoders.trained_encoder(str(tmp_path))
    rounded = encoders.Encoder(model.float(), 1, 0)
    assert torch.equal(encoder(inputs)[1], rounded(inputs)[1])


def test_random_attention_is_one_head_of_torch():
    x = torch.randn(3, 7, 12, dtype=torch.float64)
    y, head = F.layer_norm(x, (12,)), nn.MultiheadAttention(12, 1, bias=False, batch_first=True)
    g = torch.Generator().manual_seed(5)
    W_Q, W_K, W_V, W_O = (nn.init.xavier_uniform_(torch.empty(12, 12), generator=g) for _ in "QKVO")
    head.in_proj_weight.data, head.out_proj.weight.data = torch.cat([W_Q.T, W_K.T, W_V.T]), W_O.T
    head.double()
    expected = (x + head(y, y, y)[0]).detach()
    torch.testing.assert_close(encoders.random_attention(x, x, seed=5), expected)
    some = encoders.random_attention(x, x[:, [0, 3]], seed=5)
    torch.testing.assert_close(some, expected[:, [0, 3]])


def test_exact_embeddings_prove_ranks():
    encoder = encoders.random_encoder("vit-tiny", dtype=torch.float64, seed=0)
    images = torch.cat([*corpora.photograph_crops(30, size=32, seed=0)])
    A, B = encoders.exact_embeddings(encoder, images)
    tokens = encoder(images)[0]
    torch.testing.assert_close(A.double() @ B.double() / 255, tokens, rtol=1e-12, atol=1e-12)
    assert certified_rank(A[0], times=B).full
    relaxed = 17 * A[:, 0] + A.sum(dim=1)
    torch.testing.assert_close(
        relaxed.double() @ B.double() / (17 * 255), tokens[:, 0] + tokens.mean(dim=1)
    )
    assert certified_rank(relaxed, times=B) == (24, (30, 24), certified_rank(A[0]).proof)
    assert certified_rank(A[:, 0], times=B).rank == 1


def test_collect_keeps_what_assumptions_speak_about():
    encoder = encoders.random_encoder("vit-tiny", dtype=torch.float64, seed=0)
    batches = list(corpora.photograph_crops(5, size=32, batch=2, seed=0))
    seen = encoders.collect(batches, encoder, encoder, attention=True, seed=3)
    assert [*seen] == ["random L0", "random L1", "trained L0", "trained L1", "random attention"]
    first, x = encoder(torch.cat(batches))
    tokens = dict(zip(seen, (first, x, first, x), strict=False))
    tokens["random attention"] = encoders.random_attention(first, first, seed=3)
    for name, found in seen.items():
        torch.testing.assert_close(found.queries, tokens[name][:, 0])
        relaxed = tokens[name][:, 0] + tokens[name].mean(dim=1)
        torch.testing.assert_close(found.relaxed, relaxed)
        assert found.ranks.tolist() == numerical_rank(tokens[name]).tolist()
        assert (found.positions is None) == (not name.endswith("L0"))
    assert numerical_rank(seen["random L0"].queries) == 1, "[CLS] and its position never change"
    assert seen["random L0"].ranks.tolist() == [17] * 5
    assert torch.equal(seen["trained L0"].positions, encoder.positions)
    last = encoders.collect(batches[:1], encoder._replace(query=-1))["random L1"]
    torch.testing.assert_close(last.queries, x[:2, 16])
    assert last.queries.untyped_storage().nbytes() == last.queries.nbytes, "no view into the rest"
