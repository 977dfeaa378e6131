"""Real modules of transformers at tiny sizes: their parameters, and ranks of their derivatives.

``python tests/real.py llama`` compares the row of a family in families.toml with its module, which
is built by the names of the row's own fields. test_families.py runs this file for all rows, with
``--json``, in a process of its own, in which :func:`main` leaves no float32.
"""

import difflib
import json
import sys

import torch
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

from attnmem.checks import refuse
from attnmem_yours.families import TABLE, read, row_of

N = 4  # tokens
# Far more words than d: attention and MLPs that read few words, or words alone, show less.
SIZES = {"width": 6, "layers": 1, "heads": 3, "groups": 1, "head": 2, "inner": 7, "vocab": 45}
SIZES |= {"types": 2, "places": N, "image": 4, "patch": 2, "channels": 2, "registers": 1}
SIZES |= {"buckets": 4, "turned": 2, "ratio": 1}
# Settings that transformers needs to build the module of these sizes.
OWN = {
    "codegen": {"n_embd": 8, "n_head": 4},
    "cohere2": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "electra": {"embedding_size": 6},
    "gpt_neo": {"attention_types": [[["global"], 1]]},
    "modernbert": {"num_hidden_layers": 2},
    "olmo2": {"num_key_value_heads": 3},
    "olmo3": {"num_key_value_heads": 3},
    "opt": {"word_embed_proj_dim": 6},
    "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "t5": {"num_layers": 2},
    "whisper": {"num_mel_bins": 5, "max_source_positions": N, "decoder_attention_heads": 3},
}
WIDE = {"head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
HALF = {"hidden_size": 8, "num_attention_heads": 2, "share": 0.5}
# Rows with other values of what changes them.
OTHERS = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2}),
    ("llama", {"hidden_act": "relu"}),
    ("qwen3", WIDE),
    ("gemma3_text", WIDE | {"num_hidden_layers": 2}),
    ("gemma2", {"attention_bias": True, "attn_logit_softcapping": 2.0}),  # all of b_K is turned
    ("olmo2", {"num_key_value_heads": 3, "attention_bias": True, "num_hidden_layers": 2}),
    ("glm4", WIDE | {"share": 0.5}),
    ("phi", HALF | {"head_dim": 4, "num_key_value_heads": 2}),
    ("gpt_neox", HALF),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("nemotron", {"mlp_bias": True, "attention_bias": True, "hidden_act": "gelu"}),
    ("stablelm", {"use_qkv_bias": True}),
    ("stablelm", {"use_parallel_residual": True}),
    ("starcoder2", {"use_bias": False}),
    ("cohere", {"attention_bias": True, "num_hidden_layers": 2}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 3, "bias": True}),
    ("falcon", {"multi_query": False, "parallel_attn": False, "alibi": True, "num_kv_heads": 3}),
    ("gpt_bigcode", {"multi_query": False}),
    ("opt", {"activation_function": "gelu", "enable_bias": False}),
    ("bert", {"num_hidden_layers": 2}),
    ("modernbert", {"attention_bias": True, "mlp_bias": True}),
    ("t5", {"feed_forward_proj": "gated-gelu"}),
    ("vit", {"qkv_bias": False}),
    ("vit", {"num_channels": 1}),
    ("dinov2", {"use_swiglu_ffn": True}),
]


def configuration(kind, own):
    """A tiny configuration of a row, and what its file says."""
    from transformers import AutoConfig

    row, own = row_of(kind), OWN.get(kind, {}) | own
    sizes = SIZES | {"places": N - min(0, row["more"]), "layers": 1 + bool(row["patch"])}
    given = {row[x]: size for x, size in sizes.items() if isinstance(row[x], str) and row[x]}
    pad = row["only"].get("pad_token_id", [0])[0]
    given |= {"pad_token_id": pad, "bos_token_id": 1, "eos_token_id": 2} if row["vocab"] else {}
    config = AutoConfig.for_model(kind, **given | {x: y for x, y in own.items() if x != "share"})
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:  # not by kind of block
        config.rope_parameters = rope | {"partial_rotary_factor": own.get("share", 1.0)}
    return config, json.loads(config.to_json_string(use_diff=False))


def built(config, head=False):
    """The module, or with its own read-out."""
    import transformers

    kind = config.model_type
    own = {"t5": "T5EncoderModel", "siglip_text_model": "SiglipTextModel"}.get(kind)
    make = transformers.AutoModelForCausalLM if head else transformers.AutoModel
    make = getattr(transformers, own) if own else make.from_config
    for config._attn_implementation in ("sdpa", "eager")[kind == "gemma2" :]:  # it has soft caps
        try:
            module = make(config).eval()
        except ValueError:  # of this module there is no sdpa
            continue
        return module.encoder if kind == "whisper" else module


def counted(model, which, outputs=1):
    """The sum of numbers, or of those that matter."""
    return sum(part.times * getattr(part, which) for part in model.parts(outputs))


def trained(kind, module):
    """Names of the parameters that are counted."""
    skipped = ["pooler", "mask_token", "head.", "conv1", "conv2"]
    skipped += ["embed_positions"] * (kind == "whisper")
    return [x for x, _ in module.named_parameters() if not any(y in x for y in skipped)]


def parameters(kind, own):
    """Numbers of the module and as they are counted, with a read-out of d, and with its own."""
    config, file = configuration(kind, own)
    model = read(file)
    with torch.device("meta"):
        module = built(config)
        sizes = {x: y.numel() for x, y in module.named_parameters()}
        found = [sum(sizes[x] for x in trained(kind, module)) + model.blocks[0].attention.dim]
        if model.tied is not None:
            module = built(config, head=True)
            module.tie_weights()
            found.append(sum(x.numel() for x in module.parameters()))
    known = [counted(model, "numbers", outputs) for outputs in (1, None)[: len(found)]]
    return {"kind": kind, "own": own, "found": found, "counted": known}


def inputs(model, row, file, count):
    """So many random sequences of words, or images, or spectrograms."""
    draw = torch.Generator().manual_seed(1)
    if model.words:
        given = {"input_ids": torch.randint(model.words, (count, N), generator=draw)}
        if model.types:
            given["token_type_ids"] = torch.randint(model.types, (count, N), generator=draw)
        if row["more"] < 0:
            given["position_ids"] = (torch.arange(N) - row["more"]).expand(count, N)
        return given
    if model.patch:
        shape = count, file["num_channels"], file["image_size"], file["image_size"]
        return {"pixel_values": torch.randn(shape, generator=draw)}
    return {"input_features": torch.randn(count, file["num_mel_bins"], 2 * N, generator=draw)}


def singular_values(kind, own):
    """Of the derivative of one number at the last token by all parameters, and how many these are.

    Its columns have length one, and then its rows; the largest value is one.
    """
    config, file = configuration(kind, own)
    model, module = read(file), built(config)
    for part in module.modules():
        for name in {"eps", "variance_epsilon"} & vars(part).keys():
            setattr(part, name, 0.0)
        part.padding_idx = None  # whose vector would not be moved
    torch.manual_seed(0)
    W = {}
    for name, value in module.named_parameters():
        noise = torch.randn(value.shape)
        W[name] = 1.2 * noise / value.shape[-1] ** 0.5 if noise.ndim > 1 else value + 0.5 * noise
    if kind == "whisper":
        W["embed_positions.weight"] = module.embed_positions.weight
    free = {x: W.pop(x).detach() for x in trained(kind, module)}
    free["read-out"] = torch.randn(model.blocks[0].attention.dim)
    numbers = sum(x.numel() for x in free.values())
    T = int(1.15 * numbers) + 20
    given = inputs(model, row_of(kind), file, T)
    options = {} if model.tied is None else {"use_cache": False}

    def output(free, one):
        given = {x: y[None] for x, y in one.items()} | options
        found = functional_call(module, W | {**free}, kwargs=given)
        # The last norm of CLIP is that of the class token.
        clip = kind == "clip_vision_model"
        last = found.pooler_output[0] if clip else found.last_hidden_state[0, -1]
        return last @ free["read-out"]

    try:
        rows = vmap(jacrev(output), (None, 0))(free, given)
    except RuntimeError:  # a module that looks at its input
        each = [jacrev(output)(free, {x: y[i] for x, y in given.items()}) for i in range(T)]
        rows = {x: torch.stack([one[x] for one in each]) for x in free}
    J = torch.cat([x.flatten(1) for x in rows.values()], 1)
    size = J.norm(dim=0)
    J = J[:, size > 1e-13 * size.max()] / size[size > 1e-13 * size.max()]
    s = torch.linalg.svdvals(J / J.norm(dim=1, keepdim=True))
    return s / s[0], numbers


def rank(kind, own):
    """The rank of this derivative."""
    s, numbers = singular_values(kind, own)
    model, found = read(configuration(kind, own)[1]), int((s > 1e-11).sum())
    gap = [*s.tolist(), 0.0][found - 1 : found + 1]
    known = [counted(model, which) for which in ("numbers", "matter")]
    return {"kind": kind, "own": own, "found": [numbers, found], "counted": known, "gap": gap}


def flags():
    """Each row, and with each of its flags turned."""
    for kind in TABLE["family"]:
        yield kind, {}
        for field, value, _ in row_of(kind)["if"]:
            if field not in row_of(kind)["only"]:
                yield kind, {field: value}


def told(result):
    """A comparison in a line; where numbers differ, all that were compared."""
    case = " ".join([result["kind"], *(f"{x}={y}" for x, y in result["own"].items())])
    found, counted = result["found"], result["counted"]
    names = (
        "numbers, and of these the rank" if "gap" in result else "numbers, without and with head"
    )
    if found == counted:
        return f"equal      {case}: {names}: {found}"
    config, file = configuration(result["kind"], result["own"])
    module = built(config)
    lines = [f"DIFFERENT  {case}: {names}: {found} in the module, {counted} by the row"]
    for name, x in module.named_parameters():
        uncounted = "" if name in trained(result["kind"], module) else "  (not counted)"
        lines.append(f"    {x.numel():8}  {name}{uncounted}")
    for part in read(file).parts(1):
        lines.append(
            f"    {part.times} x {part.numbers} counted, {part.matter} matter: {part.name}"
        )
    return "\n".join(lines)


def check(kind):
    """Refuse a family without a row or a module, a mistake in its row, and fields it has not."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    if kind not in TABLE["family"]:
        raise ValueError(f"no row [family.{kind}] in families.toml")
    row = row_of(kind)
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"family.{kind}: transformers has no model of this type to compare with")
    known = CONFIG_MAPPING[kind]
    fields = {*known().to_dict(), *known.attribute_map}
    for name in SIZES:
        field = row[name]
        own = isinstance(field, str) and field not in ("", TABLE["default"][name])
        if own and field not in fields:
            near = ", ".join(difflib.get_close_matches(field, fields, 3, 0))
            expected = f"a field of {known.__name__}, such as {near}"
            refuse(f"families.toml, family.{kind}.{name}", repr(field), expected)
    defaults = known().to_dict()
    for field, value in row["absent"].items():
        if field == "tie_word_embeddings" and not row["lm"]:
            continue  # nothing to tie
        if defaults.get(field, value) not in (value, None):
            expected = f"{defaults[field]!r}, the default of {known.__name__}"
            refuse(f"families.toml, family.{kind}.absent.{field}", repr(value), expected)
    if row["lm"] and kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        expected = "false, as transformers has no read-out for it"
        refuse(f"families.toml, family.{kind}.lm", "true", expected)


def unread(kind):
    """Flags of the config that no field, rule or list of the row reads."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    row = row_of(kind)
    read_fields = {
        *TABLE["watched"],
        *row["only"],
        *row["absent"],
        "tie_word_embeddings",
        "use_cache",
    }
    read_fields |= {field for field, *_ in row["if"]}
    read_fields |= {value for value in row.values() if isinstance(value, str)}
    of_all = PretrainedConfig().to_dict()  # what every config of transformers has
    fields = CONFIG_MAPPING[kind]().to_dict().items()
    flags = [name for name, value in fields if type(value) is bool and name not in of_all]
    return [name for name in flags if name not in read_fields]


def use_float64_and_no_eps():
    """In this process, on one thread, by all modules."""
    torch.float32 = torch.float = torch.float64  # modules upcast by these names
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    plain = F.layer_norm  # OLMo's eps is no attribute
    F.layer_norm = lambda x, shape, weight=None, bias=None, eps=0: plain(x, shape, weight, bias, 0)


def main(words):
    """Compare some rows with their modules, or all."""
    kinds = [word for word in words if word != "--json"]
    try:
        for kind in kinds:
            check(kind)
    except ValueError as error:
        sys.exit(str(error))
    use_float64_and_no_eps()
    from transformers.models.bloom import modeling_bloom

    # BLOOM's GELU has a derivative of its own.
    modeling_bloom.BloomGelu.forward = lambda self, x: F.gelu(x, approximate="tanh")
    every = [(kind, {}) for kind in TABLE["family"]] + OTHERS
    results = {
        "parameters": [parameters(*x) for x in flags() if not kinds or x[0] in kinds],
        "ranks": [rank(*x) for x in every if not kinds or x[0] in kinds],
    }
    if "--json" in words:
        print(json.dumps(results))
    else:
        print(*map(told, [*results["parameters"], *results["ranks"]]), sep="\n")
        for kind in kinds:
            print(f"not read   {kind}: {', '.join(unread(kind)) or 'no flag'}")


if __name__ == "__main__":
    main(sys.argv[1:])
