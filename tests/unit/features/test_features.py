"""Encoders, feature maps and corpora, on tiny models and whatever the machine carries."""

import gzip
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import nn

from attnmem.features import corpora, encoders, pretrained
from attnmem.theory.independence import certified_rank, numerical_rank

IMAGES = ("vit", "dinov2")  # the families that read images
BLOCKS = ("Layer", "Block")  # how classes of blocks end

pytestmark = pytest.mark.usefixtures("no_hub")


def inputs_of(kind):
    if kind == "vit":
        return next(corpora.photograph_crops(3, size=32, batch=3, seed=0))
    return next(corpora.library_passages(3, length=20, batch=3, seed=0, pairs=kind == "bert"))


@pytest.mark.parametrize("kind", ["vit", "bert", "gpt2"])
def test_precisions_share_their_weights_and_seeds_their_draws(kind):
    single = encoders.random_encoder(f"{kind}-tiny", depth=2, seed=1)
    double = encoders.random_encoder(f"{kind}-tiny", depth=2, dtype=torch.float64, seed=1)
    state = torch.get_rng_state()
    other = encoders.random_encoder(f"{kind}-tiny", depth=2, dtype=torch.float64, seed=2)
    assert torch.equal(state, torch.get_rng_state()), "the caller's draws are not disturbed"
    for name, P in single.model.state_dict().items():
        assert torch.equal(P.double(), double.model.state_dict()[name].double())
    for one, two, three in zip(*(e(inputs_of(kind)) for e in (single, double, other)), strict=True):
        assert (one.dtype, two.dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(one.double(), two, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(two, three)


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


def test_every_family_hands_on_what_its_blocks_read_and_write(family):
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
    with pytest.raises(ValueError, match="num_hidden_layers: got 2; expected an integer of at l"):
        trained(depth=3)


def test_the_token_that_asks_sees_all_tokens(family):
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


def test_every_family_computes_in_float64_from_end_to_end(family):
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


@pytest.mark.parametrize(("kind", "said"), [("opt", ""), ("vit_mae", ""), ("bert", " decoder")])
def test_other_types_are_refused_with_a_list_of_those_that_are_read(kind, said, tmp_path):
    sizes = {"is_decoder": True} if said else {}
    config = transformers.AutoConfig.for_model(kind, num_attention_heads=4, **sizes)
    config.save_pretrained(tmp_path)
    said = rf"^source: got a model of type {kind}{said}; expected one of vit, dinov2, bert, gpt2$"
    with pytest.raises(ValueError, match=said):
        encoders.trained_encoder(str(tmp_path))


def test_a_model_that_lacks_weights_is_refused(tmp_path):
    whole = whole_model("bert", tmp_path)
    lacks = "layer.1.output.dense", "pooler"
    kept = {n: P for n, P in whole.state_dict().items() if not any(part in n for part in lacks)}
    whole.save_pretrained(tmp_path, state_dict=kept)
    state = torch.get_rng_state()
    assert encoders.trained_encoder(str(tmp_path), depth=1).depth == 1, "nothing reads a pooler"
    assert torch.equal(state, torch.get_rng_state()), "the caller's draws are not disturbed"
    with pytest.raises(ValueError, match=r"^source: got .* without encoder.layer.1.output.dense.b"):
        encoders.trained_encoder(str(tmp_path), depth=2)


# --- what a tokenizer gives -----------------------------------------------------------------------


@pytest.fixture
def berts_tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]
    return transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})


SENTENCE, OTHER, LONG = "one two three", "two two one", "three one two one"


@pytest.mark.parametrize("pair", [None, "three one", "one two three one two"])
def test_sentences_and_pairs_are_read_as_the_model_reads_them(pair, tmp_path, berts_tokenizer):
    whole = whole_model("bert", tmp_path)
    encoder = encoders.trained_encoder(str(tmp_path), depth=2, dtype=torch.float64)
    given = berts_tokenizer(SENTENCE, pair, return_tensors="pt")
    expected = whole(**given, output_hidden_states=True).hidden_states
    for found, x in zip(encoder(given), expected, strict=True):
        torch.testing.assert_close(found, x.detach())
    if pair is None:
        assert torch.equal(encoder(given["input_ids"])[2], encoder(given)[2])


def test_input_that_a_model_does_not_read_is_named(tmp_path, berts_tokenizer):
    for kind in ("bert", "dinov2"):
        whole_model(kind, tmp_path / kind)
    bert, dino = (encoders.trained_encoder(str(tmp_path / kind)) for kind in ("bert", "dinov2"))
    vit, gpt2 = (encoders.random_encoder(f"{kind}-tiny", seed=0) for kind in ("vit", "gpt2"))
    padded = berts_tokenizer([SENTENCE, LONG], return_tensors="pt", padding=True)
    good = berts_tokenizer([SENTENCE, OTHER], return_tensors="pt")
    ids = good["input_ids"]
    levels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    for encoder, inputs, said in [
        (bert, padded, "attention_mask: got padding; expected none: batch texts by their number"),
        (bert, {"input_ids": ids, "token_type_ids": 2 + 0 * ids}, "token_type_ids: got tokens"),
        (gpt2, {"input_ids": ids, "token_type_ids": 1 + 0 * ids}, "token_type_ids: got tokens"),
        (bert, {"input_ids": ids, "token_type_ids": ids[:1]}, r"token_type_ids: got shape \(1, 5"),
        (bert, berts_tokenizer([SENTENCE]), "input_ids: got list; expected a torch.Tensor"),
        (bert, ids[:0], "input_ids: got shape"),
        (bert, ids + 50, "input_ids: got tokens from 52 to"),
        (bert, torch.ones(1, 513, dtype=torch.int64), "input_ids: got texts of 513 tokens"),
        (bert, {"pixel_values": levels}, "inputs: got pixel_values; expected input_ids"),
        (bert, {"input_ids": ids, "offset_mapping": ids}, "inputs: got input_ids, offset_mapping"),
        (vit, good, "inputs: got input_ids, token_type_ids, attention_mask; expected pixel_values"),
        (vit, levels.int(), "pixel_values: got torch.int32 for a vit"),
        (dino, levels, "pixel_values: got torch.uint8 for a dinov2; expected floats of its image"),
    ]:
        with pytest.raises(ValueError, match=f"^{said}"):
            encoder(inputs)
    with pytest.raises(ValueError, match=r"^encoder: got a dinov2; expected a vit"):
        encoders.exact_embeddings(dino, levels)


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


def test_random_attention_is_one_head_of_torch_with_the_same_weights():
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


def test_exact_embeddings_are_the_embeddings_and_prove_ranks():
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


def test_collecting_keeps_what_the_assumptions_speak_about():
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


@pytest.mark.parametrize(
    ("train", "options", "least", "most"),
    [
        (pretrained.digits_vit, {"steps": 150, "batch": 64}, 0.2, 1),  # of ten digits
        (pretrained.library_bert, {"steps": 30, "batch": 8}, 0.1, 0.5),  # a quarter are spaces
        (pretrained.library_gpt2, {"steps": 30, "batch": 8}, 0.1, 0.5),
    ],
)
def test_models_trained_here_learn_and_load(train, options, least, most, tmp_path):
    state = torch.get_rng_state()
    assert least < train(tmp_path, seed=0, **options) < most
    assert torch.equal(state, torch.get_rng_state())
    assert encoders.trained_encoder(str(tmp_path), depth=2).depth == 2


# --- corpora --------------------------------------------------------------------------------------


def test_crops_and_passages_do_not_depend_on_batches_or_on_their_number():
    crops = torch.cat([*corpora.photograph_crops(9, size=32, batch=4, seed=1)])
    assert crops.shape == (9, 3, 32, 32)
    again = torch.cat([*corpora.photograph_crops(6, size=32, batch=6, seed=1)])
    assert torch.equal(crops[:6], again)
    assert len({crop.numpy().tobytes() for crop in crops}) == 9
    texts = torch.cat([*corpora.library_passages(9, length=30, batch=4, seed=1)])
    again = torch.cat([*corpora.library_passages(5, length=30, batch=5, seed=1)])
    assert torch.equal(texts[:5], again)
    text = corpora.library_text()
    assert all(bytes(passage.tolist()) in text for passage in texts)
    [late] = corpora.library_passages(5, length=200, batch=5, seed=0, within=(0.9, 1.0))
    assert all(text.rfind(bytes(passage.tolist())) >= int(0.9 * len(text)) for passage in late)
    assert len(corpora.photographs()) == 7


@pytest.mark.parametrize("length", [11, 12])
def test_pairs_are_marked_as_berts_tokenizer_marks_them(length, berts_tokenizer):
    [pairs] = corpora.library_passages(2, length=length, batch=2, seed=0, pairs=True)
    [plain] = corpora.library_passages(2, length=length - 3, batch=2, seed=0)
    second = (length - 3) // 2  # tokens; the first may have one more
    words = berts_tokenizer(" ".join(["one"] * (length - 3 - second)), " ".join(["two"] * second))
    assert pairs["token_type_ids"].tolist() == [words["token_type_ids"]] * 2
    ids, marks = pairs["input_ids"], torch.tensor(words["input_ids"])
    assert (ids[:, marks == 2] == corpora.CLS).all()
    assert (ids[:, marks == 3] == corpora.SEP).all()
    assert torch.equal(ids[:, marks > 3], plain)


def test_data_of_debian_are_read_where_its_packages_are_unpacked(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNMEM_DEBIAN", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        corpora.clothes()
    grey = np.arange(2 * 28 * 28).reshape(2, 28, 28) % 251
    folder = tmp_path / "usr/share/datasets/fashion-mnist"
    folder.mkdir(parents=True)
    header = np.array([2051, 2, 28, 28], dtype=">i4").tobytes()
    packed = gzip.compress(header + grey.astype(np.uint8).tobytes())
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(packed)
    images = corpora.clothes()
    assert images.shape == (2, 3, 28, 28)
    assert torch.equal(images[1, 2], torch.from_numpy(grey[1]))
    [large] = corpora.enlarged(images, 56)
    assert torch.equal(large[1], corpora.resized(images[1], 56))
    folder = tmp_path / "usr/share/backgrounds/mate/nature"
    folder.mkdir(parents=True)
    for i in range(2):
        Image.new("RGB", (390, 300), (i, 100, 200)).save(folder / f"{i}.jpg")
    corpora.nature.cache_clear()
    assert [picture.shape for picture in corpora.nature()] == [(3, 100, 130)] * 2
    [crops] = corpora.photograph_crops(2, size=32, seed=0, source=corpora.nature)
    corpora.nature.cache_clear()
    assert (crops[:, 2].float().mean() - 200).abs() < 3


def test_the_published_path_runs_on_a_folder_of_images(tmp_path, save_data):
    arrays = np.random.default_rng(0).integers(0, 256, (5, 40, 50, 3), dtype=np.uint8)
    images = [*map(Image.fromarray, arrays)]
    images[1] = images[1].convert("L")
    source = save_data(tmp_path / "images", image=images)
    batches = list(corpora.published_images(source, 4, size=32, batch=2))
    assert [len(b) for b in batches] == [2, 1], "three of the first four have colour"
    first = corpora.resized(torch.from_numpy(arrays[0]).permute(2, 0, 1), 32)
    assert torch.equal(batches[0][0], first)


def test_texts_are_read_by_words_from_a_folder_or_from_one_string(tmp_path, save_words, save_data):
    words = ["[UNK]", "[CLS]", "[SEP]", "one", "two", "three"]
    save_words(tmp_path / "words", words, cls_token="[CLS]", sep_token="[SEP]")
    texts = ["one two", "one two three one two three", "three three three three three"]
    text = save_data(tmp_path / "text", text=texts * 2)
    read = partial(corpora.published_texts, text, str(tmp_path / "words"))
    [found] = read(3, length=5)
    assert found.tolist() == [[3, 4, 5, 3, 4], [5] * 5, [3, 4, 5, 3, 4]]
    [pairs] = read(2, length=7, pairs=True)
    assert pairs["input_ids"].tolist() == [[1, 3, 4, 2, 5, 3, 2], [1, 5, 5, 2, 5, 5, 2]]
    whole = "one two three two one two three two three three"
    distinct = partial(corpora.distinct_passages, whole, str(tmp_path / "words"), length=5)
    for count in (5, 1):
        [found] = distinct(count)
        assert found["input_ids"].tolist() == [[1, 3, 2, 4, 2], [1, 5, 2, 4, 2]][:count]
    with pytest.raises(ValueError, match=r"^source: \S+text cannot be read as .*: 'image'$"):
        next(corpora.published_images(text, 3))


@pytest.mark.parametrize(
    "load",
    [
        lambda: next(corpora.published_images("no/such-images", 3)),
        lambda: next(corpora.published_texts("no/such-text", "no/such-words", 3, length=9)),
        lambda: encoders.trained_encoder("no/such-model"),
    ],
)
def test_what_no_folder_and_no_hub_has_is_said_in_one_line(load):
    with pytest.raises(ConnectionError, match=r"^source 'no/such-\w+' is no folder here") as error:
        load()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: encoders.random_encoder("vit-giant", seed=0), "architecture"),
        (lambda: encoders.random_encoder("vit-tiny", dtype=torch.float16, seed=0), "dtype"),
        (lambda: encoders.collect([]), "batches"),
        (lambda: next(corpora.library_passages(3, length=2, seed=0)), "length"),
        (lambda: next(corpora.library_passages(3, length=9, seed=0, within=(0, 0))), "length"),
    ],
)
def test_bad_input_is_named(call, name):
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: got .*; expected "):
        call()
