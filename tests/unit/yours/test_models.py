"""Files of strangers: models, weights and configurations with faults are refused by name."""

import codecs
import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from attnmem.features import corpora
from attnmem.features.encoders import trained_encoder
from attnmem_yours import __main__ as cli
from attnmem_yours import capacity, model_capacity, saved_layer

pytestmark = pytest.mark.usefixtures("no_hub")


GPT2 = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 30}
GPT2 |= {"n_positions": 8, "add_cross_attention": False}
BERT = {"model_type": "bert", "hidden_size": 12, "num_attention_heads": 3, "pruned_heads": {}}
BERT |= {"num_hidden_layers": 2, "intermediate_size": 20, "vocab_size": 30}
BERT |= {"max_position_embeddings": 8}
QWEN = {"model_type": "qwen2", "hidden_size": 16, "num_attention_heads": 4}
QWEN |= {"num_key_value_heads": 2, "head_dim": 2, "num_hidden_layers": 2}
QWEN |= {"intermediate_size": 20, "vocab_size": 30}
JUNK = [None, -1, 0, 2.5, "7", "", [], [3], {}, {"a": 1}, True, False, float("nan"), "\x1b["]
HARMLESS = {  # of these names, as if nothing were said
    "add_cross_attention": [None, False, 0],
    "pruned_heads": [None, {}],
    "head_dim": [None],
    "num_key_value_heads": [None],
}


def write(folder, contents):
    path = folder / "config.json"
    path.write_bytes(contents if isinstance(contents, bytes) else json.dumps(contents).encode())
    return path


def refused(call, path):
    """What is wrong with the file; the refusal is a ValueError of one line that begins with it."""
    with pytest.raises(ValueError, match=r"\A" + re.escape(f"{path} cannot be read as ")) as error:
        call(path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("whole", [GPT2, BERT, QWEN], ids=lambda whole: whole["model_type"])
def test_junk_in_a_configuration_is_refused(whole, tmp_path, capsys):
    for key in whole:
        unsaid = {name: value for name, value in whole.items() if name != key}
        for junk in JUNK:
            path = write(tmp_path, whole | {key: junk})
            if any(type(junk) is type(value) and junk == value for value in HARMLESS.get(key, [])):
                alike = whole | {key: 4} if key == "num_key_value_heads" else unsaid
                assert model_capacity(path) == model_capacity(alike)  # 32 groups, if unsaid
            else:
                assert key in refused(model_capacity, path), (key, junk)
    assert cli.main(["capacity", str(write(tmp_path, whole | {key: "x"}))]) == 1
    said = capsys.readouterr().err
    assert key in said
    assert said.count("\n") == 1


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tmp_path_factory.mktemp("model") / "config.json"


CONTENTS = json.dumps(QWEN).encode()
PLACES = st.integers(0, len(CONTENTS) - 1)
CHARACTERS = st.sampled_from(b'0123456789.-e"{}[]:, \\\xff')


@given(
    changes=st.lists(st.tuples(PLACES, CHARACTERS), min_size=1, max_size=3),
    end=st.one_of(st.none(), PLACES),
)
def test_damaged_configuration_is_counted_or_refused(config, changes, end):
    damaged = bytearray(CONTENTS)
    for place, character in changes:
        damaged[place] = character
    config.write_bytes(damaged[:end])
    try:
        assert model_capacity(config).matter > 0
    except ValueError:
        refused(model_capacity, config)


NO_CONFIGURATION = {
    b"": "Expecting value",
    b"[]": "contents: got list",
    b'{"model_type": "bert",}': "line 1 column",
    b'{"model_type": "caf\xe9"}': "can't decode byte 0xe9",
    b"[" * 100_000: "recursion",
    b'{"a": ' + b"9" * 5000 + b"}": "4300 digits",
    b'{"text_config": {}}': "model_type: got nothing; expected a layer by hand: capacity",
    b'{"peft_type": "LORA", "base_model_name_or_path": "a/b"}': "r: got None; expected an integer",
    b'{"peft_type": "VERA", "r": 8}': "peft_type: got 'VERA'; expected LORA",
    b'{"model_type": "x", "a\\u001b[2J": {"model_type": "llama"}}': "or its --part 'a\\x1b[2J'",
    b'{"model_type": "' + b"x" * 9999 + b'"}': "model_type: got '"
    + "x" * 59
    + "; expected a layer",
    b'{"model_type": ["bert"]}': "model_type: got ['bert']",
    b'{"model_type": "bert", "hidden_size": 8}': "num_attention_heads: got nothing; expected",
}


@pytest.mark.parametrize(("contents", "said"), NO_CONFIGURATION.items(), ids=range(13))
def test_no_configuration_is_refused(contents, said, tmp_path, capsys):
    path = write(tmp_path, contents)
    assert said in refused(model_capacity, path)
    assert cli.main(["capacity", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{path} cannot be read as ")
    assert error.count("\n") == 1
    assert len(error) < 1000


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_folder_or_byte_order_mark(mark, tmp_path, capsys):
    path = write(tmp_path, mark + json.dumps(GPT2).encode())
    wanted = model_capacity(GPT2)
    assert all(model_capacity(each) == wanted for each in (path, tmp_path, str(tmp_path)))
    path.unlink()
    assert cli.main(["capacity", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err


OTHER_LAYERS = [
    (BERT, "position_embedding_type", "relative_key_query"),
    (BERT | {"is_decoder": True}, "add_cross_attention", True),
    (GPT2, "add_cross_attention", True),
    (BERT, "pruned_heads", {"0": [1]}),
    (BERT, "head_dim", 5),
    (BERT, "num_key_value_heads", 1),
    (QWEN, "attention_bias", True),  # transformers ignores it
    (QWEN, "num_experts", 8),
]


@pytest.mark.parametrize(("whole", "key", "value"), OTHER_LAYERS)
def test_setting_that_changes_the_layer_is_refused(whole, key, value):
    if "is_decoder" not in whole:
        assert model_capacity(whole).matter > 0
    with pytest.raises(ValueError, match="is_decoder|" + key) as error:
        model_capacity(whole | {key: value})
    assert "by hand: capacity --heads" in str(error.value)


def test_biases_are_those_of_the_model():
    """They belong to maps of 16 and 4 to 8 and 4 numbers."""
    llama = QWEN | {"model_type": "llama"}

    def maps(config):
        parts = {part.name: part.numbers for part in model_capacity(config).parts}
        return parts["queries and keys"], parts["values and outputs"]

    assert maps(llama) == (16 * (8 + 4), 16 * (4 + 8))
    assert maps(QWEN) == (16 * (8 + 4) + 8 + 4, 16 * (4 + 8) + 4)
    assert maps(llama | {"attention_bias": True}) == (16 * 12 + 12, 16 * 12 + 4 + 16)
    assert model_capacity(llama).layer == capacity(4, 16, 2, kv_heads=2, rope=True, name="llama")
    gptj = GPT2 | {"model_type": "gptj", "rotary_dim": 2, "activation_function": "gelu"}
    assert model_capacity(gptj).layer is None, "a LayerNorm's bias before maps without one"


def test_refused_argument_is_not_laid_to_the_file(tmp_path):
    path = write(tmp_path, GPT2 | {"_name_or_path": "\x1b[2J"})
    assert model_capacity(path).model.name == "gpt2", "no control codes on a terminal"
    for name, wrong in {"adapter": 0, "adapted": "mlp", "outputs": 0}.items():
        with pytest.raises(ValueError, match=rf"\A{name}: got '?{wrong}'?; expected"):
            model_capacity(path, **{name: wrong})


def test_report_begins_with_the_answer():
    """What fits stands before where the numbers are, and asides are last."""
    counts = model_capacity(GPT2)
    said = " ".join(str(counts).split())
    answers = [
        f"one number for each of {counts.floor.examples:,} inputs, whatever the numbers are (comp",
        f"For more than {counts.matter:,} inputs it can store almost no choice of numbers",
        "of their own is trained for its 30 words, about 107 texts can be",  # 29 * 12 / 3.25
        f"Any {counts.layer.floor:,} numbers fit (compared with ranks). Of more than "
        f"{counts.layer.one_output:,} almost no choice",
        f"half of all choices of {2 * counts.layer.floor:,} yes-or-no answers",
        "34 edits of one number",  # three heads in eleven dimensions, and a constant
        f"At most {counts.matter:,} of {counts.parameters:,} trained numbers matter",
        "convolutions are not counted. 1 of what matters does so only because norms add an eps.",
    ]
    assert [said.find(words) for words in answers] == sorted(map(said.find, answers))
    assert all(words in said for words in answers)


@pytest.mark.parametrize(
    ("config", "edits"),
    [
        (GPT2, 3 * 11 + 1),  # a LayerNorm with a bias
        (QWEN, 4 * 16),
        (QWEN | {"model_type": "olmo", "num_key_value_heads": 4}, 4 * 15),  # without one
        (QWEN | {"num_key_value_heads": 1, "head_dim": 4}, 4 * 16),
        (QWEN | {"num_key_value_heads": 1, "head_dim": 2}, None),  # four heads, values of two
    ],
    ids=["shift", "rms", "no shift", "one group", "narrow values"],
)
def test_edits_of_one_layer(config, edits):
    assert model_capacity(config).edits == edits
    assert model_capacity(config, adapter=2).edits is None
    assert ("edits of one number" in str(model_capacity(config))) == (edits is not None)


LORA = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": "base"}
LORA |= {"target_modules": ["v_proj", "q_proj"]}


@pytest.fixture
def adapter(tmp_path):
    """A folder with an adapter and its base model."""
    (tmp_path / "base").mkdir()
    write(tmp_path / "base", QWEN)
    (tmp_path / "adapter_config.json").write_text(json.dumps(LORA))
    return tmp_path


def test_adapter_counts_for_its_base_model(adapter):
    counts = model_capacity(adapter)
    assert counts == model_capacity(QWEN, adapter=2, adapted="qv")
    # Of rank 2 are changes of 16 x 8 numbers for queries, and of 16 x 2 in each of two groups.
    assert counts.parameters == 2 * (2 * (16 + 8) + 2 * (16 + 4))
    assert counts.matter == 2 * (2 * (16 + 8 - 2) + 2 * (16 + 4 - 2))
    assert "adapters of qv are trained (proved)" in str(counts)
    assert model_capacity(QWEN, adapter=2, adapted="vqq") == counts
    with pytest.raises(ValueError, match="adapter: got 4; expected none beside an adapter's fol"):
        model_capacity(adapter, adapter=4)


def test_adapter_behind_a_layer_norm():
    """Maps read 12 numbers if the norm has a bias, and else only d - 1."""
    assert model_capacity(GPT2, adapter=2).matter == 2 * 2 * 2 * (12 + 12 - 2)
    olmo = QWEN | {"model_type": "olmo", "num_key_value_heads": 4}
    assert model_capacity(olmo, adapter=2).matter == 2 * 2 * 2 * (15 + 8 - 2)


OTHER_ADAPTERS = [
    ("r", 0, "r: got 0; expected an integer"),
    ("target_modules", ["c_attn"], r"target_modules: got \['c_attn'\]; expected maps of att"),
    ("target_modules", [["q"]], "target_modules: got "),
    ("target_modules", "all-linear", "target_modules: got 'all-linear'"),
    ("target_modules", [], "target_modules: got "),
    ("target_modules", None, "target_modules: got None"),
    ("use_dora", True, "use_dora: got True; expected None, as other adapters"),
    ("bias", "all", "bias: got 'all'; expected none"),
    ("peft_type", "LOHA", "peft_type: got 'LOHA'; expected LORA"),
    ("base_model_name_or_path", ".", "its folder here, or capacity FOLDER --adapter 2 --adap"),
]


@pytest.mark.parametrize(("field", "value", "refusal"), OTHER_ADAPTERS)
def test_other_adapter_is_refused(adapter, field, value, refusal):
    (adapter / "adapter_config.json").write_text(json.dumps(LORA | {field: value}))
    with pytest.raises(ValueError, match=refusal):
        model_capacity(adapter)


SIZES = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "vocab_size": 9}
SIZES |= {"intermediate_size": 8, "max_position_embeddings": 8}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture
def model(tiny, tmp_path):
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def changed(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


MODEL, UNREAD = "source: got a model of type ", "source: {} cannot be read as a saved model or data"
MISSING = "source: got {} without embeddings.position_embeddings.weight"
BLOCKS = "source: {}: num_hidden_layers: got "
FAULTS = [
    ({"model_type": "llama"}, MODEL + "llama; expected one of bert, vit,"),
    ({"model_type": ["bert"]}, MODEL + "['bert']; expected one of bert"),
    ({"model_type": None}, MODEL + "None"),
    ({"is_decoder": True}, MODEL + "bert decoder"),
    ({"add_cross_attention": True}, MODEL + "bert decoder"),
    ({"position_embedding_type": "relative_key"}, MODEL + "bert with relative positions"),
    ({"num_attention_heads": 5}, UNREAD),
    ({"hidden_size": "12"}, UNREAD),
    ({"hidden_size": 3 * 10**12}, UNREAD),
    ({"max_position_embeddings": 7}, MISSING),
    ({"num_hidden_layers": 3, "max_position_embeddings": 9}, MISSING),
    ({"num_hidden_layers": 0}, BLOCKS + "0; expected an integer of "),
]


@pytest.mark.parametrize(("settings", "said"), FAULTS)
def test_saved_model_with_faults_is_refused(settings, said, model):
    changed(model, **settings)
    with pytest.raises(ValueError, match=r"\A" + re.escape(said.format(model))) as error:
        saved_layer(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("contents", [b"", b"[]", b"3", b"{,}", b"\xff\xfe\x00", b"[" * 100_000])
def test_folder_without_configuration_is_refused(contents, model):
    (model / "config.json").write_bytes(contents)
    for read in (saved_layer, trained_encoder):
        with pytest.raises(ValueError, match=r"\Asource: "):
            read(str(model))


def test_damaged_weights_of_a_model_are_refused(model):
    path = model / "model.safetensors"
    contents, tensors = path.read_bytes(), load_file(path)
    name = "encoder.layer.0.attention.self.query.weight"
    for damaged in (contents[:-100], b"hello", (2**60).to_bytes(8, "little") + contents[8:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"\Asource: {model} cannot be read as a saved mod"):
            saved_layer(model)
    bad = tensors[name].clone()
    bad[1, 2] = float("inf")
    save_file(tensors | {name: bad}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"\Asource: {model}: {name}: got 1 entries that are NaN"):
        saved_layer(model)
    path.unlink()
    torch.save(tensors, model / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no file named model\.safetensors"):
        saved_layer(model)


def test_missing_shard_of_a_saved_model_is_named(tmp_path):
    """One of several over which its weights are spread."""
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=rf"\Asource: {tmp_path} cannot be read .*{lost.name}"):
        saved_layer(tmp_path)


CODE = """
open({mark!r}, "w").close()
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
class Config(BertConfig): model_type = "unheard-of"
class Model(BertModel): pass
class Words(PreTrainedTokenizerFast): pass
"""


@pytest.mark.parametrize("kind", ["bert", "unheard-of"])
def test_code_of_a_model_is_not_run(kind, model, monkeypatch, tmp_path, save_words, save_data):
    mark = tmp_path / "was-run"
    own = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    own["AutoTokenizer"] = [None, "own.Words"]
    save_words(model, ["one", "two"])
    (model / "own.py").write_text(CODE.format(mark=str(mark)))
    changed(model, model_type=kind, auto_map=own)
    words = model / "tokenizer_config.json"
    settings = {"auto_map": own, "tokenizer_class": "Words"}
    words.write_text(json.dumps(json.loads(words.read_text()) | settings))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    text = save_data(tmp_path / "text", text=["one two one two one"])
    for call in (
        lambda: saved_layer(model),
        lambda: trained_encoder(str(model)),
        lambda: [*corpora.published_texts(text, str(model), 1, length=5)],
        lambda: [*corpora.distinct_passages("one two one", str(model), 1, length=5)],
    ):
        with contextlib.suppress(ValueError, TypeError):  # words without marks
            call()
        assert not mark.exists()
    if kind != "bert":
        with pytest.raises(ValueError, match=f"{MODEL}unheard-of; expected one"):
            saved_layer(model)


def call(capsys, *words):
    status = cli.main(["capacity", *map(str, words)])
    out, error = capsys.readouterr()
    return status, out + error


def test_command_reports_a_layer(capsys):
    sizes = ("--heads", 32, "--dim", 4096, "--head-dim", 128, "--kv-heads", 8, "--rope", "--bias")
    status, said = call(capsys, *sizes)
    assert (status, "21,106,689 matter for one output" in said) == (0, True)
    assert (
        "proved from above; with shared keys and values, rotary positions (from 3 tokens on)"
        in " ".join(said.split())
    )


WRONG_WORDS = {
    "": "--dim: got nothing; expected --heads and --dim, or a model's folder",
    "--dim 32": "--heads: got nothing; expected --heads and --dim",
    "--heads 0 --dim 32": "heads: got 0",
    "--heads 1 --dim 2 --norm": "dim: got 2; expected an integer of at least 3",
    "--heads 2 --dim 4 --bias x": "bias: got 'x'",
    "--heads 2 --dim 4 --head-dim 6 --rope": "head_dim: got 6",
    "{}": "{}/config.json cannot be read as a model that is counted: model_type",
    "{} --dim 32": "--dim: got 32; expected no sizes beside a model",
    "--part text_config": "--part: got text_config; expected a model's folder before",
}


@pytest.mark.parametrize("words", WRONG_WORDS)
def test_command_says_what_is_wrong(tmp_path, capsys, words):
    write(tmp_path, {"model_type": "mamba"})
    status, error = call(capsys, *words.format(tmp_path).split())
    assert status == 1
    assert error.startswith(WRONG_WORDS[words].format(tmp_path))
