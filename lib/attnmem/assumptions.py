"""Mahdavi et al.'s assumptions on the features of real models: which tests, on what, and the rows.

``checks(name, tier)`` lists the tests of an experiment, ``run(name, tier)`` does those that have no
row yet. Tiers: ``published``, the paper's models and data, which need a hub; ``shipped``, random
models of the same size on what lies on every machine; ``trained``, small models that are trained
here first; ``quick``, a tiny model, a smoke test.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from . import corpora, features, pretraining, results
from .checks import checked_by, refuse
from .features import Encoder, Seen
from .independence import numerical_rank, sampled_independence
from .results import Check, Finding

DTYPES = {"float32": torch.float32, "float64": torch.float64}
RANKED = 20  # subsets of which the rank itself is computed, not only whether it is full
SEED = 0


class Case(NamedTuple):
    """One architecture and its data; ``random`` and ``trained`` take ``dtype`` and ``device``.

    ``T`` examples of ``n`` tokens of dimension ``d``. ``samples``: subsets that a test of size up
    to ``n`` draws, and subsets that general position draws, where each costs a hundred times more:
    300 without a failure leave less than 1% with 95% confidence. ``sizes``: of further tests, on
    ``random attention``.
    """

    source: str
    architecture: str
    T: int
    n: int
    d: int
    batches: Callable[[], Iterable[Tensor]]
    random: Callable[..., Encoder]
    trained: Callable[..., Encoder] | None = None
    samples: tuple[int, int] = (5000, 300)
    sizes: tuple[int, ...] = ()

    @property
    def maps(self) -> list[str]:
        """Names of the feature maps, as :func:`attnmem.features.feature_maps` gives them."""
        random = ["random L0", "random L1", "random attention"]
        return random + ["trained L0", "trained L1"] * bool(self.trained)


def _random(architecture: str | tuple[str, dict]) -> Callable[..., Encoder]:
    return functools.partial(features.random_encoder, architecture, seed=SEED)


def _trained_here(train: Callable[..., float], least: float) -> Callable[..., Encoder]:
    return lambda **options: features.trained_encoder(_made(train, least), **options)


@functools.cache
def _made(train: Callable[..., float], least: float) -> str:
    """The folder of a model that :mod:`attnmem.pretraining` has made, once a process.

    Raises ``ValueError`` if it is worse than ``least``: no rows come from a model that failed.
    """
    folder = tempfile.mkdtemp(prefix="attnmem-")
    reached = train(folder, seed=SEED)
    if reached < least:
        refuse(train.__name__, f"{reached:.4f} on data held out", f"at least {least}")
    return folder


TINY_SIZES = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40}
TINY_VIT = ("vit", TINY_SIZES | {"image_size": 32, "patch_size": 8})
FIGURE_1 = (*range(150, 401, 25), 500, 600, 700)

CASES: dict[str, dict[str, Case]] = {
    "assumptions-vision": {
        "published": Case(
            "imagenet-1k",
            "vit-base",
            1973,
            197,
            768,
            lambda: corpora.published_images("imagenet-1k", 2000),
            _random("vit-base"),
            functools.partial(features.trained_encoder, "google/vit-base-patch16-224-in21k"),
            samples=(5000, 5000),
            sizes=FIGURE_1,
        ),
        "shipped": Case(
            "photographs",
            "vit-base",
            2000,
            197,
            768,
            lambda: corpora.photograph_crops(2000, seed=SEED),
            _random("vit-base"),
            sizes=FIGURE_1,
        ),
        "trained": Case(
            "digits",
            "vit-digits",
            1797,
            17,
            64,
            lambda: corpora.digits()[0].split(256),
            _random(("vit", pretraining.DIGITS_VIT)),
            _trained_here(pretraining.digits_vit, least=0.97),
            samples=(5000, 5000),
            sizes=(*range(20, 64, 4),),
        ),
        "quick": Case(
            "photographs",
            "vit-tiny",
            60,
            17,
            24,
            lambda: corpora.photograph_crops(60, size=32, seed=SEED),
            _random(TINY_VIT),
            samples=(200, 100),
            sizes=(10, 20),
        ),
    },
}


def _check_name(name: str, tier: str) -> None:
    if name not in CASES:
        refuse("name", repr(name), f"one of {', '.join(CASES)}")
    if tier not in CASES[name]:
        refuse("tier", repr(tier), f"one of {', '.join(CASES[name])} for {name}")


@checked_by(_check_name)
def checks(name: str, tier: str) -> list[Check]:
    """All tests of an experiment at a tier, in both precisions.

    Of every map: Assumption 1 (queries, size ``n``), Assumption 2 (contexts) and general position
    (queries, size ``d``). Of the embeddings: Assumption 3 (relaxed) and its general position. Of
    random attention: the queries at every size of Figure 1.
    """
    case = CASES[name][tier]
    many, few = case.samples
    listed = []
    for dtype in DTYPES:
        for map_ in case.maps:
            tests = [("queries", case.n, many), ("contexts", case.n, case.T)]
            tests += [("queries", case.d, few)]
            if map_.endswith("L0"):
                tests += [("relaxed", case.n, many), ("relaxed", case.d, few)]
            if map_ == "random attention":
                tests += [("queries", size, few) for size in case.sizes]
            listed += [
                Check(
                    experiment=name,
                    profile=tier,
                    source=case.source,
                    architecture=case.architecture,
                    map=map_,
                    dtype=dtype,
                    vectors=vectors,
                    T=case.T,
                    n=case.n,
                    d=case.d,
                    size=size,
                    samples=samples,
                    seed=SEED,
                )
                for vectors, size, samples in tests
            ]
    return listed


def missing(name: str, tier: str) -> list[Check]:
    """The tests that have no row yet."""
    known = results.known(name, tier)
    return [asked for asked in checks(name, tier) if asked.key not in known]


def table(name: str, tier: str) -> pd.DataFrame:
    """The rows of an experiment at a tier."""
    return results.table(name, tier, results.TESTS)


def collect(name: str, tier: str, dtype: str, device: str = "cpu") -> dict[str, Seen]:
    """The features that the tests of a tier look at, by map, in one precision."""
    case = CASES[name][tier]
    options = {"dtype": DTYPES[dtype], "device": device}
    random = case.random(**options)
    trained = case.trained(**options) if case.trained else None
    maps = features.feature_maps(random, trained, seed=SEED)
    seen = features.collect(maps, case.batches(), query=random.query)
    for found in seen.values():
        if len(found.queries) != case.T:
            refuse("source", f"{len(found.queries)} examples of {case.source}", f"{case.T}")
    return seen


def run(
    name: str,
    tier: str,
    device: str = "cpu",
    report: Callable[[Check, Finding], None] | None = None,
) -> int:
    """Do what is missing and append the rows, one by one; returns how many were added.

    The features are computed once in each precision; an interrupted run goes on at the next test.
    """
    added = 0
    for dtype in DTYPES:
        left = [asked for asked in missing(name, tier) if asked.dtype == dtype]
        seen = collect(name, tier, dtype, device) if left else {}
        for asked in left:
            found = perform(seen[asked.map], asked)
            added += results.append([(asked, found)])
            if report:
                report(asked, found)
    return added


def perform(seen: Seen, asked: Check) -> Finding:
    """Test one assumption on features that lie there."""
    start = time.perf_counter()
    if asked.vectors == "contexts":
        dependent, ranks = int((seen.ranks < asked.size).sum()), seen.ranks
    else:
        vectors = getattr(seen, asked.vectors)
        sampled = sampled_independence(vectors, asked.size, samples=asked.samples, seed=asked.seed)
        dependent, ranks = sampled.dependent, _some_ranks(vectors, asked)
    device = next(iter(seen)).device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Finding(
        dependent=dependent,
        ranked=len(ranks),
        least_rank=int(ranks.min()),
        most_rank=int(ranks.max()),
        wall_s=round(time.perf_counter() - start, 3),
        device=kind,
        torch=torch.__version__,
        commit=results.commit(),
    )


def _some_ranks(vectors: Tensor, asked: Check) -> Tensor:
    g = torch.Generator().manual_seed(asked.seed + 1)
    subsets = [torch.randperm(len(vectors), generator=g)[: asked.size] for _ in range(RANKED)]
    return torch.tensor([numerical_rank(vectors[subset]) for subset in subsets])
