"""Stand-ins for what lies on a hub: a cache of the hub's layout, with small random models and data.

Tables 1 and 3, Figure 1 and Appendix J of Mahdavi et al. come out true for the ``good`` ones, by
counting. A block with one head and few hidden units writes into a space of few dimensions: the
pixels of a patch or the words of the texts, the positions, the hidden units, and one for a skip.
For the others some come out false: images and texts are repeated, and position tables differ.
"""

import dataclasses
import hashlib
import itertools
from pathlib import Path

import datasets
import numpy as np
import safetensors.torch
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from attnmem.features import encoders
from attnmem.lab import assumptions

COMMIT = "89abcdef01234567" * 2 + "89abcdef"
COUNT, WIDTH = 400, 384  # examples, their dimension
REPEATED = 20  # different ones among those that are repeated
WORDS = 100
LENGTH = 12  # tokens of a passage
SIZES = {  # of an image 4 patches of 300 numbers: after a random layer 300 + 5 + 1 dimensions
    "vision": {"image_size": 20, "patch_size": 10, "num_attention_heads": 1},
    "bert": {"max_position_embeddings": LENGTH, "vocab_size": 400, "num_attention_heads": 1},
    "gpt2": {"n_positions": LENGTH, "vocab_size": 400, "n_head": 1, "n_inner": 32},
}
SIZES["vision"] |= {"hidden_size": WIDTH, "intermediate_size": 32}
SIZES["bert"] |= {"hidden_size": WIDTH, "intermediate_size": 200, "initializer_range": 0.08}
SIZES["gpt2"] |= {"n_embd": WIDTH, "bos_token_id": 0, "eos_token_id": 0}
TYPES = {"vision": "vit", "bert": "bert", "gpt2": "gpt2"}
CHECKED = {"vision": (250, 350), "bert": (200, 360), "gpt2": (200,)}  # sizes of further tests


def use(monkeypatch, home, *kinds, good):
    """Let studies of these kinds read stand-ins only, at their sizes; rows go below ``home``.

    No argument of the library does so: at its own sizes the published tier refuses stand-ins.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path(home, "hub")))
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(Path(home, "rows")))
    monkeypatch.setattr(assumptions, "_RANKED", 2)
    for kind in kinds:
        tiers = assumptions.TESTS[f"assumptions-{kind}"].tiers
        architecture = TYPES[kind], SIZES[kind]
        monkeypatch.setitem(encoders.ARCHITECTURES, f"{kind}-stand-in", architecture)
        fill(home, tiers["published"], kind, good=good)
        monkeypatch.setitem(tiers, "published", small(tiers["published"], kind))


def small(case, kind):
    """A case at the sizes of its stand-ins, which every row of it says."""
    told = {"size": SIZES[kind]["image_size"]} if kind == "vision" else {"length": LENGTH}
    n = 5 if kind == "vision" else LENGTH
    return dataclasses.replace(
        case,
        architecture=f"{kind}-stand-in",
        T=COUNT,
        n=n,
        d=WIDTH,
        data={**case.data, **told, "count": COUNT, "batch": 100},
        sizes=CHECKED[kind],
        samples=(40, 4),
    )


def fill(home, case, kind, *, good):
    """Put stand-ins for a case's data and models into the cache of this home."""
    scratch = Path(home, "scratch", kind)
    file = scratch / "data" / case.data["files"].replace("*", "of-00041")
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = images(good) if kind == "vision" else {"text": texts(good)}
    datasets.Dataset.from_dict(columns).to_parquet(file)
    into_cache(home, "dataset", case.data["source"], scratch / "data")
    model = trained(kind, good)
    model.save_pretrained(scratch / "model")
    if kind == "bert":
        rename(scratch / "model" / "model.safetensors")
    if kind != "vision":
        save_words(scratch / "model")
    into_cache(home, "model", case.trained, scratch / "model")


def images(good):
    """Colour images of noise, one without colours among them."""
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 20, 20, 3), dtype=np.uint8)
    chosen = pixels if good else pixels[np.arange(COUNT) % REPEATED]
    pictures = [*map(Image.fromarray, chosen)]
    pictures.insert(3, pictures[3].convert("L"))
    return {"image": pictures, "label": [0] * len(pictures)}


def texts(good):
    """Texts of random words, one that is too short among them."""
    g = np.random.default_rng(0)
    drawn = g.integers(WORDS, size=(COUNT, LENGTH + 3)).tolist()
    passages = [" ".join(f"w{word}" for word in words) for words in drawn]
    chosen = passages if good else [*itertools.islice(itertools.cycle(passages[:REPEATED]), COUNT)]
    return ["w1 w2", *chosen]


def trained(kind, good):
    """A model of two blocks, drawn again, and changed such that its claims come out as asked."""
    model = encoders.initial_model("AutoModel", f"{kind}-stand-in", 1, num_hidden_layers=2)
    if kind == "gpt2" and good:  # a word that stands at both places makes one token twice
        model.wpe.weight.data[5] = model.wpe.weight.data[4]
    return model


def rename(file):
    """Give weights of a BERT the names that they have on the hub, where a head stands beside it."""
    weights = {"cls.predictions.bias": torch.zeros(9)}
    for name, P in safetensors.torch.load_file(file).items():
        for new, old in (("gamma", "weight"), ("beta", "bias")):
            name = name.replace(f"LayerNorm.{old}", f"LayerNorm.{new}")
        weights[f"bert.{name}"] = P
    safetensors.torch.save_file(weights, file, {"format": "pt"})


def save_words(folder):
    """A tokenizer of whole words behind three marks."""
    ids = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]"])}
    ids |= {f"w{i}": i + 3 for i in range(WORDS)}
    plain = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **marks)
    whole.save_pretrained(folder)


def into_cache(home, kind, name, folder):
    """Put the files of a folder where ``huggingface_hub`` would, as one commit."""
    repository = Path(home, "hub", f"{kind}s--{name.replace('/', '--')}")
    for path in filter(Path.is_file, sorted(folder.rglob("*"))):
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if path.suffix == ".json":  # a small file has the name that git gives it
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        blob = repository / "blobs" / digest
        link = repository / "snapshots" / COMMIT / path.relative_to(folder)
        for made in (blob, link, repository / "refs" / "main"):
            made.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.unlink(missing_ok=True)  # of a data set that two studies read
        link.symlink_to(blob)
    (repository / "refs" / "main").write_text(COMMIT)
