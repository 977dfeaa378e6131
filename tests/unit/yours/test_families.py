"""Models from their config.json: their numbers and counts are those of the real modules."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem_yours.families import TABLE, read, row_of
from attnmem_yours.models import model_capacity

HERE = Path(__file__).parents[1]
# Files as they are published, some of them of 2022. `numbers` are those of the modules on torch's
# meta device; `matter`, without words or patches, was counted by other code.
PUBLIC = json.loads((HERE / "configurations.json").read_text())
NAMES = "gpt2", "bert-base-uncased", "Meta-Llama-3-8B", "phi-2"
GPT2, BERT, LLAMA, PHI = (PUBLIC[name]["config"] for name in NAMES)


def total(model, which, outputs=1, without=()):
    parts = [part for part in model.parts(outputs) if part.name not in without]
    return sum(part.times * getattr(part, which) for part in parts)


@pytest.mark.parametrize("name", PUBLIC)
def test_published_models_have_their_numbers(name):
    start, known = time.process_time(), PUBLIC[name]
    model = read(known["config"], known["part"])
    own = model.tied is not None
    assert (
        total(model, "numbers", None if own else 1, () if own else ("read-out",))
        == known["numbers"]
    )
    if known["matter"]:
        found = total(model, "matter", without=("word vectors", "map of patches"))
        assert found == known["matter"]
    assert total(model, "matter") < total(model, "numbers")
    assert time.process_time() - start < 1


def test_files_of_other_years_say_the_same():
    def layer(config):
        return read(config).blocks[0]

    rope = {"rope_type": "default", "rope_theta": 5e5}
    new = {x: y for x, y in LLAMA.items() if x != "rope_theta"} | {"rope_parameters": rope}
    assert read(new) == read(LLAMA)
    for name, old, share in [
        ("pythia-160m", "rotary_pct", 0.25),
        ("phi-2", "partial_rotary_factor", 0.4),
    ]:
        given = PUBLIC[name]["config"]
        head = layer(given).attention.head_dim
        assert layer(given).attention.turned == round(share * head)
        given = {x: y for x, y in given.items() if x != old}
        inside = {"rope_parameters": {"partial_rotary_factor": share}}
        assert read(given | inside) == read(PUBLIC[name]["config"])
    assert layer(GPT2) == layer(GPT2 | {"n_inner": None}) == layer(GPT2 | {"n_inner": 3072})
    renamed = {"n_embd": "hidden_size", "n_head": "num_attention_heads"}
    assert read({renamed.get(x, x): y for x, y in GPT2.items()}) == read(GPT2)
    assert layer(LLAMA | {"num_key_value_heads": None}).attention.groups == 32  # null is not absent
    assert layer({**LLAMA, "model_type": "mistral"}).attention.groups == 8
    del (shorter := {**PUBLIC["Mistral-7B-v0.1"]["config"]})["num_key_value_heads"]
    assert layer(shorter).attention.groups == 8


def test_the_parts_of_a_file_are_models():
    llava, name = PUBLIC["llava-1.5-7b"]["config"], "siglip_vision_model"
    assert len(read(llava, "vision_config").blocks) == 24
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    alone = read(sizes | {"model_type": name, "intermediate_size": 3072})
    assert read({"model_type": "siglip", "vision_config": {}}, "vision_config") == alone
    other = {"model_type": "new", "vision_config": {"model_type": name}}
    assert read(other, "vision_config") == alone
    assert (alone.name, alone.tied, alone.words) == (name, None, 0)
    named = GPT2 | {"_name_or_path": "mine"}
    assert read(named).name == "mine"
    for no_name in ("", "a\nb", 3, None):
        assert read(named | {"_name_or_path": no_name}).name == "gpt2"


def test_gated_units_of_dinov2():
    def units(d):
        sizes = {"hidden_size": d, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"image_size": 4, "patch_size": 2, "use_swiglu_ffn": True}
        return read(sizes | {"model_type": "dinov2"}).blocks[0].units

    assert [units(d) for d in (6, 10, 12, 1536)] == [16, 32, 32, 4096]


def test_first_block_of_modernbert_has_one_norm():
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8, "vocab_size": 9, "model_type": "modernbert"}
    assert [block.norms for block in read(sizes).blocks] == [1, 2, 2]


def test_some_blocks_have_no_rotary_positions():
    small = {"hidden_size": 8, "num_hidden_layers": 8, "num_attention_heads": 2}
    small |= {"intermediate_size": 8, "vocab_size": 9, "num_key_value_heads": 2}

    def turned(**given):
        return [bool(block.attention.turned) for block in read(small | given).blocks]

    every = [True, True, True, False] * 2
    assert turned(model_type="smollm3") == turned(model_type="cohere2") == every
    assert turned(model_type="smollm3", no_rope_layers=[1, 0] * 4) == [True, False] * 4
    assert turned(model_type="cohere2", sliding_window_pattern=2) == [True, False] * 4
    kinds = ["full_attention"] + ["sliding_attention"] * 7
    assert turned(model_type="cohere2", layer_types=kinds) == [False] + [True] * 7


REFUSED = [
    (
        {"model_type": "mixtral"},
        "got 'mixtral', with experts; expected a layer by hand: .*; or another model",
    ),
    ({"model_type": "mamba"}, "got 'mamba', with blocks without attention; .* --heads"),
    ({"model_type": "deepseek_v3"}, "got 'deepseek_v3', with latent attention, and experts"),
    ({"model_type": "phi-msft", "n_embd": 8}, "got 'phi-msft', whose file is of remote code"),
    ({"model_type": "albert"}, "got 'albert', with blocks that share their weights"),
    (
        {"model_type": "esm"},
        "got 'esm'; expected a layer by hand: capacity .*; or one of [0-9]+ fam",
    ),
    ({}, "model_type: got nothing; expected a layer by hand.*; or one of [0-9]+ families, such as"),
    ({"model_type": "lama"}, "got 'lama'; .* such as llama, "),
    ({"model_type": "qwen9_moe", "num_experts": 128}, "got 'qwen9_moe', with experts; expected a"),
    ({"model_type": "qwen9", "num_experts": 0}, "got 'qwen9'; expected a"),
    (
        {"model_type": "x", "a": {"layer_types": ["linear_attention"], "num_local_experts": 8}},
        "got 'x', with experts, with linear attention; expected a",
    ),
    ({"model_type": "x", "mamba_d_ssm": 8}, "got 'x', with state spaces; expected a"),
    ({"model_type": "x", "kv_lora_rank": 512}, "got 'x', with latent attention; expected a"),
    ({"model_type": ["gpt2"]}, r"model_type: got \['gpt2'\]"),
    (
        {"base_model_name_or_path": "base", "r": 8, "target_modules": ["q_proj"]},
        "base_model_name_or_path: got 'base'; expected its folder here, .* --adapter 8",
    ),
    (
        PUBLIC["llava-1.5-7b"]["config"],
        "got 'llava'; expected a layer by hand.*; or its --part 'text_config' or 'vision_config'",
    ),
    (BERT | {"position_embedding_type": "relative_key"}, "got 'relative_key'; expected absolute, "),
    (BERT | {"is_decoder": True}, "is_decoder: got True; expected False, for bert; .* --heads"),
    (BERT | {"pruned_heads": {"0": [1]}}, "pruned_heads: got {'0'"),
    (BERT | {"head_dim": 32}, "head_dim: got 32; expected 64, for bert"),
    (BERT | {"num_key_value_heads": 4}, "num_key_value_heads: got 4; expected 12"),
    (BERT | {"model_type": "electra"}, "embedding_size: got 128; expected 768, for electra"),
    (GPT2 | {"add_cross_attention": True}, "add_cross_attention: got True"),
    (GPT2 | {"n_head": 5}, r"n_head: got 5; expected sizes that divide each other.*d = 768"),
    (GPT2 | {"n_embd": "768"}, "n_embd: got '768'; expected an integer from 3"),
    (GPT2 | {"n_embd": -768}, "n_embd: got -768; expected an integer"),
    (GPT2 | {"n_layer": True}, "n_layer: got True; expected an integer from 1 to 10000"),
    (GPT2 | {"n_layer": 10**6}, "n_layer: got 1000000; expected"),
    (GPT2 | {"vocab_size": 1e4}, "vocab_size: got 10000.0; expected"),
    (GPT2 | {"n_positions": None}, "n_positions: got None; expected"),
    ({x: y for x, y in GPT2.items() if x != "n_head"}, "n_head: got nothing; expected an integer"),
    ({x: y for x, y in GPT2.items() if x != "n_positions"}, "n_positions: got nothing; expected"),
    (GPT2 | {"activation_function": "xielu"}, "activation_function: got 'xielu'; expected one of "),
    (GPT2 | {"activation_function": ["relu"]}, r"activation_function: got \['relu'\]"),
    (GPT2 | {"tie_word_embeddings": "yes"}, "tie_word_embeddings: got 'yes'; expected False or T"),
    (LLAMA | {"attention_bias": "qkv"}, "attention_bias: got 'qkv'; expected False or True"),
    (LLAMA | {"num_experts": 8}, "num_experts: got 8; expected 0 or 1, for llama"),
    (LLAMA | {"kv_lora_rank": 512}, "kv_lora_rank: got 512; expected nothing, for llama"),
    (LLAMA | {"num_key_value_heads": 5}, "expected sizes that divide each other.* 5 groups"),
    (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5; expected 1, for l"),
    (PHI | {"partial_rotary_factor": 0.27}, "turned pairs .*heads of 80 with 21 turned"),
    (PHI | {"partial_rotary_factor": 1.5}, "partial_rotary_factor: got 1.5; expected a number"),
    (PHI | {"partial_rotary_factor": float("nan")}, "partial_rotary_factor: got nan; expected a"),
    (LLAMA | {"model_type": "olmo", "clip_qkv": 8}, "clip_qkv: got 8; expected nothing"),
    (
        LLAMA | {"model_type": "cohere", "use_qk_norm": True},
        "use_qk_norm: got True; expected False",
    ),
    (LLAMA | {"model_type": "smollm3", "no_rope_layers": [1]}, r"no_rope_layers: .* a list of 32"),
    (PHI | {"qk_layernorm": True}, "qk_layernorm: got True"),
    (PUBLIC["opt-125m"]["config"] | {"do_layer_norm_before": False}, "expected True, for opt"),
    (PUBLIC["opt-125m"]["config"] | {"word_embed_proj_dim": 512}, "got 512; expected 768, for opt"),
    (PUBLIC["mpt-7b"]["config"] | {"attn_config": {"alibi": False}}, r"attn_config.alibi: got F"),
    (PUBLIC["falcon-7b"]["config"] | {"num_ln_in_parallel_attn": 2}, "got 2; expected 1, for falc"),
    (PUBLIC["vit-base-patch16-224"]["config"] | {"image_size": [224, 96]}, "image_size: got "),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_not_counted_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        model_capacity(config)


def test_part_of_an_unknown_type_is_refused():
    inner = {"model_type": "qwen9_moe_text", "num_experts": 128}
    for part in ("", "text_config"):
        with pytest.raises(ValueError, match=r"_moe(_text)?', with experts; ex") as error:
            model_capacity({"model_type": "qwen9_moe", "text_config": inner}, part=part)
        assert len(str(error.value)) <= 400


def test_classes_and_quantized_numbers_are_told():
    """A head of classes reads no words; a file of four bits is counted as if it were whole."""
    llama = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 50}
    llama |= {"num_hidden_layers": 2, "intermediate_size": 12}
    for name, words in (("ForCausalLM", True), ("ForSequenceClassification", False)):
        found = model_capacity(llama | {"architectures": [f"Llama{name}"], "num_labels": 3})
        assert ("Read by all its 50 words" in str(found)) == words
        assert found.matter == model_capacity(llama).matter
    packed = model_capacity(llama | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert "quantized in its file" in " ".join(str(packed).split())
    assert packed.matter == model_capacity(llama).matter


def test_part_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="part: got 'x'; expected 'text_config' or 'vision_conf"):
        read(PUBLIC["llava-1.5-7b"]["config"], "x")
    with pytest.raises(ValueError, match="part: got 'text_config'; expected no part, of this f"):
        read(GPT2, "text_config")


BAD = ["12", -1, True, 10**30, 0, None, 1.5, [], {}, {"a": 1}, float("nan"), float("inf"), [[1]]]


@pytest.mark.parametrize("kind", TABLE["family"])
def test_no_setting_breaks_the_reader(kind):
    """Each field that some row reads, with values of all kinds, one and three at a time."""
    row = row_of(kind)
    sizes = {"width": 12, "heads": 6, "groups": 6, "layers": 2, "inner": 12, "vocab": 9}
    sizes |= {"places": 8, "share": 1}
    good = {row[x]: size for x, size in sizes.items() if isinstance(row[x], str)}
    good |= {"model_type": kind, "embedding_size": 12, "rotary_dim": 2}
    good |= {"head_dim": 2} if "head_dim" in row["only"] else {}
    model = read(good)
    assert 0 < total(model, "matter") <= total(model, "numbers")
    fields = {x for x in row.values() if isinstance(x, str) and x}
    fields |= {"rope_parameters", "attn_config", *row["absent"], *row["only"], *TABLE["watched"]}
    fields |= {field for field, *_ in row["if"]}
    fields = sorted(fields)
    for field, bad in itertools.product(fields, BAD):
        check_read(good | {field: bad})

    @given(st.dictionaries(st.sampled_from(fields), st.sampled_from(BAD), min_size=3, max_size=3))
    @settings(max_examples=30)
    def several(settings):
        check_read(good | settings)

    several()


def check_read(config):
    try:
        list(read(config).parts(None))
    except ValueError as error:
        refusal = str(error)
        if ": got " not in refusal[:90] or len(refusal) >= 1500:
            raise


BAD_ROWS = [
    ({"like": "lama"}, r"like: got 'lama'; expected a family whose row stands above .* llama"),
    ({"like": "new"}, "like: got 'new'"),
    ({"widht": "d_model"}, r"widht: got 'd_model'; expected a field of \[default\], .*width"),
    ({"width": True}, "width: got True; expected the name of a field of the config, a number"),
    ({"norm": "rmsnorm"}, "norm: got 'rmsnorm'; expected 'rms' or 'layer'"),
    ({"place": "before"}, "place: got 'before'; expected 'pre' or 'post' or 'out' or 'both'"),
    ({"bias": "qx"}, "bias: got 'qx'; expected letters of 'qkvo'"),
    ({"bias": True}, "bias: got True; expected letters of 'qkvo'"),
    ({"gated": "no"}, "gated: got 'no'; expected true or false"),
    ({"norms": "2"}, "norms: got '2'; expected an integer"),
    ({"absent": [3]}, r"absent: got \[3\]; expected a table"),
    ({"only": {"bias": False}}, "only.bias: got False; expected a list"),
    ({"if": [["bias", True]]}, r"if: got \['bias', True\]; expected \[field of the config, value"),
    ({"if": [["bias", True, {"biass": "q"}]]}, "if.biass: got 'q'; expected a field of"),
]


@pytest.mark.parametrize(("row", "refusal"), BAD_ROWS)
def test_mistake_in_a_row_is_refused(row, refusal, monkeypatch):
    monkeypatch.setitem(TABLE["family"], "new", row)
    with pytest.raises(ValueError, match=rf"^families.toml, family.new.{refusal}"):
        row_of("new")


# --- the real modules -----------------------------------------------------------------------------

UNITS = "some units of ReLU are always on, or never"
# How much less than the count a rank is; None: somewhat.
UNEQUAL = {
    ("opt", ""): (None, UNITS),
    ("clip_vision_model", ""): (1, "the scale of the class token, which is normed alone"),
}


def test_each_row_is_the_real_module():
    """Its parameters, and at most the rank of its derivative, which is the rank where not said."""
    pytest.importorskip("transformers", minversion="5")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", HERE.parent / "real.py", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {one["kind"] for one in found["ranks"]} == TABLE["family"].keys()
    for one in found["parameters"]:
        assert one["found"] == one["counted"], one
    met = set()
    for one in found["ranks"]:
        case = one["kind"], " ".join(one["own"])
        (numbers, rank), (known, matter) = one["found"], one["counted"]
        least, most = one["gap"]
        assert numbers == known, one
        assert least > 1e-10, one
        assert most < 1e-13, one
        missing, _ = UNEQUAL.get(case, (0, ""))
        assert rank <= matter if missing is None else rank == matter - missing, one
        met.add(case)
    assert met >= UNEQUAL.keys()
