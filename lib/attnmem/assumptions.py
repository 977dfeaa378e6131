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
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from . import corpora, features, pretraining, results
from .checks import checked_by, refuse
from .features import Encoder, Seen
from .independence import numerical_rank, sampled_independence
from .results import Check, Finding

DTYPES = {"float32": torch.float32, "float64": torch.float64}
DEPTH = 4  # of the small models
DRAWS, STEPS = 5, 3000  # draws of random labels, and steps to meet them
HEADS = 4  # of the attention layer that reads the features for them
RANKED = 20  # subsets of which the rank itself is computed, not only whether it is full
SEED = 0
TIERS = ("published", "shipped", "trained")  # those that repeat the published tests


class Case(NamedTuple):
    """One architecture and its data; ``random`` and ``trained`` take ``dtype`` and ``device``.

    ``T`` examples of ``n`` tokens of dimension ``d``. ``samples``: subsets that a test of size up
    to ``n`` draws, and subsets that general position draws, where each costs a hundred times more:
    300 without a failure leave less than 1% with 95% confidence. ``sizes``: of further tests, on
    the queries of the maps in ``curves``; a random attention layer is looked at only if it is
    among them. ``positions``: whether the position table is tested, too. ``depth``: blocks looked
    at. ``labels``: numbers of examples whose random labels a read-out of the next attention layer
    is trained to meet.
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
    curves: tuple[str, ...] = ("random attention",)
    positions: bool = False
    depth: int = 1
    labels: tuple[int, ...] = ()

    @property
    def maps(self) -> list[str]:
        """Names of the feature maps, as :func:`attnmem.features.feature_maps` gives them."""
        layers = range(self.depth + 1)
        random = [f"random L{at}" for at in layers] + ["random attention"] * self.attention
        return random + [f"trained L{at}" for at in layers] * bool(self.trained)

    @property
    def attention(self) -> bool:
        """Whether one random attention layer is among the maps."""
        return "random attention" in self.curves


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
WIKIPEDIA = "wikimedia/wikipedia:20231101.en"


def _deeper(trained: Case) -> Case:
    """Every layer of a small model, and what the next attention layer can memorize from it.

    Its heads read ``d`` numbers, which separate ``2 d`` random labels every other time if they are
    in general position.
    """
    n, d = trained.n, trained.d
    layers = range(DEPTH + 1)
    return trained._replace(
        samples=(5000, 300),
        sizes=tuple(size for size in (*range(8, d, 8), d - 4, d - 1) if size != n),
        curves=tuple(f"{kind} L{at}" for kind in ("random", "trained") for at in layers),
        positions=False,
        depth=DEPTH,
        labels=(d, 3 * d // 2, 2 * d, 5 * d // 2),
    )


def _vision(
    source: str,
    hub: str,
    architecture: str,
    shape: tuple[int, int],
    sizes: tuple[int, ...],
) -> dict[str, Case]:
    """The tiers of a ViT; ``source``: the published images, ``hub``: the trained weights.

    ``architecture``: the published one, of so many tokens and dimensions (``shape``), whose random
    attention is tested at further ``sizes``.
    """
    trained = Case(
        "digits",
        "vit-digits",
        1797,
        17,
        64,
        lambda: corpora.digits()[0].split(256),
        _random(("vit", pretraining.DIGITS_VIT)),
        _trained_here(pretraining.digits_vit, least=0.97),
        samples=(5000, 5000),
        sizes=tuple(range(20, 64, 4)),
    )
    return {
        "published": Case(
            source,
            architecture,
            1973,
            *shape,
            lambda: corpora.published_images(source, 2000),
            _random(architecture),
            functools.partial(features.trained_encoder, hub),
            samples=(5000, 5000),
            sizes=sizes,
        ),
        "shipped": Case(
            "photographs",
            architecture,
            2000,
            *shape,
            lambda: corpora.photograph_crops(2000, seed=SEED),
            _random(architecture),
            sizes=sizes,
        ),
        "trained": trained,
        "deeper": _deeper(trained),
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
    }


def _language(
    kind: str,
    source: str,
    hub: str,
    architecture: str,
    shape: tuple[int, int],
    sizes: tuple[int, ...],
    train: Callable[..., float],
    least: float,
) -> dict[str, Case]:
    """The tiers of a BERT or a GPT-2, as for :func:`_vision`.

    ``sizes``: of further tests after the first block. ``train``: makes the one that is trained
    here, refused below ``least``.
    """
    pairs = kind == "bert"
    read = functools.partial(corpora.library_passages, seed=SEED, pairs=pairs)
    tiny = kind, pretraining.language_sizes(kind, length=20, d=24, layers=1)
    first, both = ("random L1",), ("random L1", "trained L1")
    trained = Case(
        "library",
        f"{kind}-library",
        2000,
        64,
        96,
        lambda: read(2000, length=64, batch=100),
        _random((kind, pretraining.LIBRARY[kind])),
        _trained_here(train, least),
        samples=(5000, 5000),
        sizes=(*range(8, 64, 8), 72, 80, 88, 95),
        curves=both,
        positions=True,
    )
    return {
        "published": Case(
            source,
            architecture,
            2000,
            *shape,
            lambda: corpora.published_texts(
                source, hub, 2000, length=shape[0], batch=4, pairs=pairs
            ),
            _random(architecture),
            functools.partial(features.trained_encoder, hub),
            samples=(5000, 5000),
            sizes=sizes,
            curves=both,
            positions=True,
        ),
        "shipped": Case(
            "library",
            architecture,
            2000,
            *shape,
            lambda: read(2000, length=shape[0], batch=4),
            _random(architecture),
            sizes=sizes,
            curves=first,
            positions=True,
        ),
        "trained": trained,
        "deeper": _deeper(trained),
        "quick": Case(
            "library",
            f"{kind}-tiny",
            60,
            20,
            24,
            lambda: read(60, length=20),
            _random(tiny),
            samples=(200, 100),
            sizes=(10, 15, 23),
            curves=first,
            positions=True,
        ),
    }


CASES: dict[str, dict[str, Case]] = {
    "assumptions-bert": _language(
        "bert",
        WIKIPEDIA,
        "bert-large-uncased",
        "bert-large",
        (512, 1024),
        (*range(25, 401, 25), 800, 1023),
        pretraining.library_bert,
        least=0.4,
    ),
    "assumptions-gpt2": _language(
        "gpt2",
        WIKIPEDIA,
        "gpt2-large",
        "gpt2-large",
        (1024, 1280),
        (25, 50, 100, 200, 400, 600, 800, 1152),
        pretraining.library_gpt2,
        least=0.5,
    ),
    "assumptions-vision": _vision(
        "imagenet-1k",
        "google/vit-base-patch16-224-in21k",
        "vit-base",
        (197, 768),
        (*range(25, 401, 25), 500, 600, 700),
    ),
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
    the maps in ``curves``: the queries at every further size. Of the position tables: their rank.
    Of every map that heads read: random labels.
    """
    case = CASES[name][tier]
    many, few = case.samples
    listed = []
    for dtype in DTYPES:
        for map_ in case.maps:
            tests = [("queries", case.n, many), ("contexts", case.n, case.T)]
            tests += [("queries", case.d, few)]
            tests += [("labels", size, DRAWS) for size in case.labels]
            if map_.endswith("L0"):
                tests += [("relaxed", case.n, many), ("relaxed", case.d, few)]
                tests += [("positions", case.n, 1)] * case.positions
            if map_ in case.curves:
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
    """The rows of an experiment at a tier, with the name of each ``test`` and what it found.

    ``test``: ``A1``, ``A2``, ``A3``, ``GP`` (general position), ``GP of A3`` (of the vectors of
    Assumption 3), ``positions``, ``labels``, or ``curve`` for further sizes. ``share``: of the
    samples, those that were independent. ``ranks``: from the least to the largest that was found.
    """
    rows = results.table(name, tier, results.TESTS)
    tests = [_test(row) for row in rows.itertuples()]
    share = 1 - rows.dependent / rows.samples
    ranks = rows.least_rank.astype(str) + " to " + rows.most_rank.astype(str)
    return rows.assign(test=tests, share=share, ranks=ranks)


def _test(row: Any) -> str:
    if row.vectors in ("positions", "labels"):
        return row.vectors
    if row.vectors == "contexts":
        return "A2"
    few, many = {"queries": ("A1", "GP"), "relaxed": ("A3", "GP of A3")}[row.vectors]
    return {row.n: few, row.d: many}.get(row.size, "curve")


def curve(rows: pd.DataFrame, map_: str) -> dict[str, tuple[pd.Series, pd.Series]]:
    """Of one map in a :func:`table`, sizes of sets of queries and the share that is independent.

    Sorted by size; one curve for each precision.
    """
    asked = rows[(rows["map"] == map_) & (rows.vectors == "queries")].sort_values("size")
    return {dtype: (part["size"], part.share) for dtype, part in asked.groupby("dtype")}


def kruskal_estimate(rows: pd.DataFrame) -> int:
    """The largest size tested of which 99% of the sets of queries are independent, or 0.

    ``rows``: those of one map and precision in a :func:`table`.
    """
    passed = rows[(rows.vectors == "queries") & (rows.share >= 0.99)]
    return max(passed["size"], default=0)


def by_precision(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column of a :func:`table`: a line for each test and map, a column for each precision."""
    tests = rows[~rows.test.isin(["curve", "labels"])]  # of which there is one size
    return tests.pivot(index=["test", "map"], columns="dtype", values=column)


def by_tier(name: str, column: str) -> pd.DataFrame:
    """The same of each of the :data:`TIERS` that has rows, side by side: columns tier and dtype."""
    rows = {tier: table(name, tier) for tier in TIERS}
    found = {tier: by_precision(tests, column) for tier, tests in rows.items() if len(tests)}
    return pd.concat(found, axis=1).sort_index()


def beside_paper(ours: pd.DataFrame, paper: pd.Series) -> pd.DataFrame:
    """Lines of :func:`by_tier` behind the paper's numbers for them; what is missing is empty."""
    both = ours.copy()
    both["paper", "float32"] = paper
    return both[sorted(both)].astype(object).fillna("")


def coverage(name: str) -> pd.DataFrame:
    """How many tests of each of the :data:`TIERS` are done, and of how many."""
    have = {tier: [len(table(name, tier)), len(checks(name, tier))] for tier in TIERS}
    return pd.DataFrame(have, index=["tests done", "of"]).T


def collect(name: str, tier: str, dtype: str, device: str = "cpu") -> dict[str, Seen]:
    """The features that the tests of a tier look at, by map, in one precision."""
    case = CASES[name][tier]
    options = {"dtype": DTYPES[dtype], "device": device, "depth": case.depth}
    random = case.random(**options)
    trained = case.trained(**options) if case.trained else None
    maps = features.feature_maps(random, trained, seed=SEED if case.attention else None)
    heads = HEADS if case.labels else 0
    seen = features.collect(maps, case.batches(), query=random.query, heads=heads, seed=SEED)
    for found in seen.values():
        if len(found.queries) != case.T:
            refuse("source", f"{len(found.queries)} examples of {case.source}", f"{case.T}")
    for map_, encoder in {"random L0": random, "trained L0": trained}.items():
        if encoder:
            seen[map_] = seen[map_]._replace(positions=encoder.positions[: case.n])
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
    if asked.vectors in ("contexts", "labels"):
        each = seen.ranks if asked.vectors == "contexts" else labels_met(seen.heads, asked)
        dependent, ranks = int((each < asked.size).sum()), each
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


def labels_met(read: Float[Tensor, "T k"], asked: Check) -> Int[Tensor, " samples"]:
    """How many of ``size`` random binary labels a trained linear read-out meets, for each draw.

    A logistic loss on the first ``size`` examples, coordinates scaled alike, all draws at once:
    Adam at a rate of 0.03 for ``STEPS`` steps of the whole set.
    """
    x = read[: asked.size]
    x = (x - x.mean(dim=0)) / x.std()
    g = torch.Generator().manual_seed(asked.seed)
    signs = torch.randint(2, (asked.size, asked.samples), generator=g).to(x) * 2 - 1
    weights = x.new_zeros(x.shape[1], asked.samples, requires_grad=True)
    bias = x.new_zeros(asked.samples, requires_grad=True)
    optimizer = torch.optim.Adam([weights, bias], lr=0.03)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.softplus(-signs * (x @ weights + bias)).sum().backward()
        optimizer.step()
    return (signs * (x @ weights + bias) > 0).sum(dim=0).detach()


def _some_ranks(vectors: Tensor, asked: Check) -> Tensor:
    g = torch.Generator().manual_seed(asked.seed + 1)
    subsets = [torch.randperm(len(vectors), generator=g)[: asked.size] for _ in range(RANKED)]
    return torch.tensor([numerical_rank(vectors[subset]) for subset in subsets])
