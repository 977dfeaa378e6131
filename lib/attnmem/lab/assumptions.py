"""Mahdavi et al.'s assumptions on the features of real models: which tests, and what they found.

:func:`checks` lists the tests of a study at a tier, each of which becomes a row. The tiers:
``published``, the paper's models and data, which need a hub; ``shipped``, random models of the same
size on what lies on every machine; ``trained``, small models that are trained here first;
``pretrained``, trained models that Python packages carry (the extra ``pretrained``), on several
data; ``deeper``, every layer of the small models; ``quick``, a tiny model, a smoke test.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import refuse
from ..features import corpora, encoders, pretrained
from ..features.encoders import Encoder, Seen, random_encoder, trained_encoder
from ..theory.independence import numerical_rank, sampled_independence
from . import store
from .devices import origin
from .store import Check, Finding, Row
from .study import ALL, Selection, Study, Unit, _Named

SEED = 0
DTYPES = {"float32": torch.float32, "float64": torch.float64}
DRAWS, STEPS = 5, 3000  # draws of random labels, and steps to meet them
HEADS = 4  # of the attention layer that reads the features for them
RANKED = 20  # subsets of which the rank itself is computed, not only whether it is full
TIERS = ("published", "shipped", "trained", "pretrained")  # those that repeat the published tests
DEPTH = 4  # of the small models


@dataclass(frozen=True, eq=False)  # each is itself, as a key of a cache
class Case:
    """One architecture and its data: ``T`` examples of ``n`` tokens of dimension ``d``.

    ``model``: what is made at random, or None; ``trained``: weights on a hub, or a function that
    gives their folder. ``samples``: subsets that a test of size up to ``n`` draws, and that general
    position draws, where each costs a hundred times more: 300 without a failure leave less than 1%
    with 95% confidence. ``sizes``: of further tests, on the queries of the maps in ``curves``; a
    random attention layer is looked at only if it is among them. ``depth``: blocks looked at.
    ``labels``: numbers of examples whose random labels a read-out is trained to meet. ``also``:
    further data of the tier, each of another source.
    """

    source: str
    architecture: str
    T: int
    n: int
    d: int
    batches: Callable[[], Iterable[corpora.Inputs]]
    model: str | tuple[str, dict] | None
    trained: str | Callable[[], str] | None
    samples: tuple[int, int]
    sizes: tuple[int, ...] = ()
    curves: tuple[str, ...] = ("random attention",)
    positions: bool = False
    depth: int = 1
    labels: tuple[int, ...] = ()
    also: tuple[Case, ...] = ()

    def random(self, **options: Any) -> Encoder:
        """The model that is made at random."""
        return random_encoder(self.model, seed=SEED, **options)

    @property
    def maps(self) -> list[str]:
        """Names of the feature maps, as ``feature_maps`` of the features gives them."""
        layers = range(self.depth + 1)
        attention = [name for name in self.curves if name == "random attention"]
        trained = [f"trained L{at}" for at in layers] * bool(self.trained)
        return [f"random L{at}" for at in layers] * bool(self.model) + attention + trained


@functools.cache
def trained_here(train: Callable[..., float], least: float) -> str:
    """The folder of a model that is trained here, once a process; refused below ``least``."""
    folder = tempfile.mkdtemp(prefix="attnmem-")
    reached = train(folder, seed=SEED)
    if reached < least:
        refuse(train.__name__, f"{reached:.4f} on data held out", f"at least {least}")
    return folder


TINY_SIZES = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40}
TINY_VIT = ("vit", TINY_SIZES | {"image_size": 32, "patch_size": 8})
WIKIPEDIA = "wikimedia/wikipedia:20231101.en"
FULL, FEWER, QUICK = (5000, 5000), (5000, 300), (200, 100)  # samples
UNTRAINED = {"trained": None, "samples": FEWER}


def _vision(
    source: str, hub: str, architecture: str, shape: tuple[int, int], sizes: tuple[int, ...]
) -> dict[str, Case]:
    """The tiers of a ViT of ``shape`` tokens and dimensions, whose trained weights a hub has."""
    crops = partial(corpora.photograph_crops, seed=SEED)
    published = Case(
        *(source, architecture, 1973, *shape, lambda: corpora.published_images(source, 2000)),
        *(architecture, hub, FULL, sizes),
    )
    photographs = {"source": "photographs", "T": 2000, "batches": lambda: crops(2000)}
    shipped = replace(published, **photographs, **UNTRAINED)
    trained = Case(
        *("digits", "vit-digits", 1797, 17, 64, lambda: corpora.digits()[0].split(256)),
        model=("vit", pretrained.DIGITS_VIT),
        trained=partial(trained_here, pretrained.digits_vit, 0.97),
        samples=FULL,
        sizes=tuple(range(20, 64, 4)),
    )
    quick = Case(
        *("photographs", "vit-tiny", 60, 17, 24, lambda: crops(60, size=32)),
        *(TINY_VIT, None, QUICK, (10, 20)),
    )
    return _tiers(published, shipped, trained, quick)


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
    """The tiers of a BERT or a GPT-2; ``train`` makes the small one, refused below ``least``."""
    n, pairs = shape[0], kind == "bert"
    read = partial(corpora.library_passages, seed=SEED, pairs=pairs)
    texts = partial(corpora.published_texts, source, hub, 2000, length=n, batch=4)
    first = {"curves": ("random L1",), "positions": True}
    both = {"curves": ("random L1", "trained L1"), "positions": True}
    published = Case(
        *(source, architecture, 2000, *shape, lambda: texts(pairs=pairs)),
        *(architecture, hub, FULL, sizes),
        **both,
    )
    passages = partial(read, 2000, length=n, batch=4)
    shipped = replace(published, source="library", batches=passages, **UNTRAINED | first)
    trained = Case(
        *("library", f"{kind}-library", 2000, 64, 96, lambda: read(2000, length=64, batch=100)),
        *((kind, pretrained.LIBRARY[kind]), partial(trained_here, train, least), FULL),
        sizes=(*range(8, 64, 8), 72, 80, 88, 95),
        **both,
    )
    tiny = kind, pretrained.language_sizes(kind, length=20, d=24, layers=1)
    quick = Case(
        *("library", f"{kind}-tiny", 60, 20, 24, lambda: read(60, length=20)),
        *(tiny, None, QUICK, (10, 15, 23)),
        **first,
    )
    return _tiers(published, shipped, trained, quick)


def _tiers(published: Case, shipped: Case, trained: Case, quick: Case) -> dict[str, Case]:
    """With every layer of the small model, and what the next attention layer can memorize."""
    n, d = trained.n, trained.d
    deeper = replace(
        trained,
        samples=FEWER,
        sizes=tuple(size for size in (*range(8, d, 8), d - 4, d - 1) if size != n),
        curves=tuple(f"{kind} L{at}" for kind in ("random", "trained") for at in range(DEPTH + 1)),
        positions=False,
        depth=DEPTH,
        labels=(d, 3 * d // 2, 2 * d, 5 * d // 2),
    )
    tiers = {"published": published, "shipped": shipped, "trained": trained}
    return tiers | {"deeper": deeper, "quick": quick}


def _passages(text: Callable[[], str], count: int, length: int) -> Iterable[corpora.Inputs]:
    return corpora.distinct_passages(text(), pretrained.packaged_bert(), count, length=length)


PACKAGED_BERT = Case(
    *("manual", "minilm-l6", 2000, 64, 384, lambda: _passages(corpora.manual, 2000, 64)),
    model=("bert", pretrained.MINILM),
    trained=pretrained.packaged_bert,
    samples=FEWER,
    curves=(),
    positions=True,
    depth=6,
)


def _trained_on(
    case: Case, source: str, batches: Callable[[], Iterable[corpora.Inputs]], **sizes: int
) -> Case:
    """Further data of a trained model, of which two blocks are looked at."""
    return replace(case, source=source, batches=batches, model=None, depth=2, **sizes)


def _library() -> Iterable[corpora.Inputs]:
    return _passages(lambda: corpora.library_text().decode(), 2000, 256)


OF_MANUAL = {"T": 1024, "n": 128}  # all of its passages that are so long
LONGER = (
    _trained_on(
        PACKAGED_BERT, "manual-128", lambda: _passages(corpora.manual, 1024, 128), **OF_MANUAL
    ),
    _trained_on(PACKAGED_BERT, "library-256", _library, n=256),
)


def _pixels(images: Iterable[corpora.Images]) -> Iterable[Tensor]:
    return map(corpora.standardized, images)


PACKAGED_VIT = Case(
    *("photographs", "dinov2-small", 2000, 257, 384),
    batches=lambda: _pixels(corpora.photograph_crops(2000, seed=SEED)),
    model=("dinov2", pretrained.DINOV2_SMALL),
    trained=pretrained.packaged_vit,
    samples=FEWER,
    curves=(),
    depth=2,
)
MORE_IMAGES = tuple(
    _trained_on(PACKAGED_VIT, source, lambda images=images: _pixels(images()), T=T)
    for source, T, images in (
        ("nature", 2000, lambda: corpora.photograph_crops(2000, seed=SEED, source=corpora.nature)),
        ("digits", 1797, lambda: corpora.enlarged(corpora.digits()[0])),
        ("clothes", 2000, lambda: corpora.enlarged(corpora.clothes()[:2000])),
    )
)
CASES: dict[str, dict[str, Case]] = _Named(
    {
        "assumptions-bert": _language(
            *("bert", WIKIPEDIA, "bert-large-uncased", "bert-large", (512, 1024)),
            sizes=(*range(25, 401, 25), 800, 1023),
            train=pretrained.library_bert,
            least=0.4,
        )
        | {"pretrained": replace(PACKAGED_BERT, also=LONGER)},
        "assumptions-gpt2": _language(
            *("gpt2", WIKIPEDIA, "gpt2-large", "gpt2-large", (1024, 1280)),
            sizes=(25, 50, 100, 200, 400, 600, 800, 1152),
            train=pretrained.library_gpt2,
            least=0.5,
        ),
        "assumptions-vision": _vision(
            *("imagenet-1k", "google/vit-base-patch16-224-in21k", "vit-base", (197, 768)),
            sizes=(*range(25, 401, 25), 500, 600, 700),
        )
        | {"pretrained": replace(PACKAGED_VIT, also=MORE_IMAGES)},
    }
)


class AssumptionTests(Study):
    """The tests of the assumptions on one kind of model, at each tier of its cases.

    In its table ``test`` is ``A1``, ``A2``, ``A3``, ``GP`` (general position), ``GP of A3`` (of the
    vectors of Assumption 3), ``positions``, ``labels``, or ``curve`` for further sizes; ``share``
    the share of the samples that were independent; ``ranks`` from the least to the largest.
    """

    kind = "tests of linear independence"
    config = Check
    default_profile = "shipped"

    @property
    def profiles(self) -> tuple[str, ...]:  # not every model has every tier
        return (*CASES[self.name],)

    def perform(self, unit: Unit, device: str) -> list[Row]:
        store.commit()
        rows = []
        for check in unit:
            seen = collect(self.name, check.profile, check.dtype, device, check.source)
            rows.append((check, perform(seen[check.map], check)))
        return rows

    def say(self, rows: Sequence[Row]) -> str:
        check, finding = rows[-1]
        what = f"{check.map}, {check.dtype}: {check.vectors}, size {check.size}"
        return f"{check.experiment}, {what}, {finding.dependent} of {check.samples} dependent"

    def configs(self, profile: str, selection: Selection = ALL) -> list[Check]:
        super().configs(profile, selection)
        return checks(self.name, profile)

    def table(self, rows: Iterable[Row]) -> pd.DataFrame:
        table = super().table(rows)
        tests = [_test(row) for row in table.itertuples()]
        ranks = table.least_rank.astype(str) + " to " + table.most_rank.astype(str)
        return table.assign(test=tests, share=1 - table.dependent / table.samples, ranks=ranks)


TABLES = {
    "assumptions-bert": "Table 3, BERT",
    "assumptions-gpt2": "Table 3, GPT-2",
    "assumptions-vision": "Table 1",
}
TESTS = {name: AssumptionTests(name, "mahdavi", what) for name, what in TABLES.items()}


def _case(name: str, tier: str, source: str | None = None) -> Case:
    """With the data of a ``source``, by default the tier's first."""
    tiers = CASES[name]
    first = tiers.get(tier) or refuse("tier", repr(tier), f"one of {', '.join(tiers)} for {name}")
    cases = {case.source: case for case in (first, *first.also)}
    found = cases.get(source or first.source)
    return found or refuse("source", repr(source), f"one of {', '.join(cases)} for {tier}")


def checks(name: str, tier: str) -> list[Check]:
    """All tests of a study at a tier, in both precisions.

    Of every map: Assumption 1 (queries, size ``n``), Assumption 2 (contexts), general position
    (queries, size ``d``), and labels. Of the embeddings: Assumption 3 (relaxed) and its general
    position, and the rank of the position table. Of the maps in ``curves``: further sizes.
    """
    first = _case(name, tier)
    return [one for case in (first, *first.also) for one in _listed(name, tier, case)]


def _listed(name: str, tier: str, case: Case) -> list[Check]:
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
            of_map = {"source": case.source, "architecture": case.architecture, "map": map_}
            of_map |= {"dtype": dtype, "T": case.T, "n": case.n, "d": case.d}
            for vectors, size, samples in tests:
                test = {"vectors": vectors, "size": size, "samples": samples, "seed": SEED}
                listed.append(Check(experiment=name, profile=tier, **of_map, **test))
    return listed


def _test(row: Any) -> str:
    names = {"queries": ("A1", "GP"), "relaxed": ("A3", "GP of A3")}
    if row.vectors not in names:
        return "A2" if row.vectors == "contexts" else row.vectors
    few, many = names[row.vectors]
    return {row.n: few, row.d: many}.get(row.size, "curve")


def curve(rows: pd.DataFrame, map_: str) -> dict[str, tuple[pd.Series, pd.Series]]:
    """Of one map, for each precision, the sizes of sets of queries and their independent share."""
    of_map = rows[(rows["map"] == map_) & (rows.vectors == "queries")].sort_values("size")
    return {dtype: (part["size"], part.share) for dtype, part in of_map.groupby("dtype")}


def kruskal_estimate(rows: pd.DataFrame) -> int:
    """The largest size of which 99% of the sets of one map's queries are independent, or 0."""
    passed = rows[(rows.vectors == "queries") & (rows.share >= 0.99)]
    return max(passed["size"], default=0)


def by_precision(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column such as ``share`` or ``ranks``, a line for each test and map, by precision."""
    tests = rows[~rows.test.isin(["curve", "labels"])]  # of which there is one size
    return tests.pivot(index=["test", "map"], columns="dtype", values=column)


def by_tier(name: str, column: str) -> pd.DataFrame:
    """The same for each of the :data:`TIERS` that has rows, of its first data, side by side."""
    columns = {}
    for tier in TIERS:
        rows = TESTS[name].table(store.known(name, tier).values())
        if len(rows):
            columns[tier] = by_precision(rows[rows.source == _case(name, tier).source], column)
    return pd.concat(columns, axis=1).sort_index()


def by_source(name: str, column: str, tier: str = "pretrained") -> pd.DataFrame:
    """The same for each of the data of one tier, of trained weights and at most two blocks."""
    rows = TESTS[name].table(store.known(name, tier).values())
    rows = rows[rows["map"].isin(["trained L0", "trained L1", "trained L2"])]
    parts = rows.groupby("source", sort=False)
    return pd.concat({of: by_precision(part, column) for of, part in parts}, axis=1).sort_index()


def beside_paper(ours: pd.DataFrame, paper: pd.Series) -> pd.DataFrame:
    """Our numbers (:func:`by_tier`) with the paper's in the column ``paper``, of float32.

    Both have the same index. What is missing is an empty string.
    """
    both = ours.copy()
    both["paper", "float32"] = paper
    return both[sorted(both)].astype(object).fillna("")


def coverage(name: str) -> pd.DataFrame:
    """How many tests of each of the :data:`TIERS` are done, and of how many."""
    tiers = [tier for tier in TIERS if tier in CASES[name]]
    have = {tier: [len(store.known(name, tier)), len(checks(name, tier))] for tier in tiers}
    return pd.DataFrame(have, index=["tests done", "of"]).T


def collect(
    name: str, tier: str, dtype: str, device: str = "cpu", source: str | None = None
) -> dict[str, Seen]:
    """The features of each map that the tests of a tier look at, on its first data or a ``source``.

    Raises ``ConnectionError`` where the tier needs a hub that cannot be reached.
    """
    if dtype not in DTYPES:
        refuse("dtype", repr(dtype), f"one of {', '.join(DTYPES)}")
    return _collected(_case(name, tier, source), dtype, device)


@functools.lru_cache(maxsize=1)  # kept for the next test of the same features
def _collected(case: Case, dtype: str, device: str) -> dict[str, Seen]:
    options = {"dtype": DTYPES[dtype], "device": device, "depth": case.depth}
    random = case.random(**options) if case.model else None
    weights = case.trained() if callable(case.trained) else case.trained
    trained = trained_encoder(weights, **options) if weights else None
    seed = SEED if "random attention" in case.maps else None
    maps = encoders.feature_maps(random, trained, seed=seed)
    heads = HEADS if case.labels else 0
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # a GPU's convolutions
        query = (random or trained).query
        seen = encoders.collect(maps, case.batches(), query=query, heads=heads, seed=SEED)
    for of_map in seen.values():
        if len(of_map.queries) != case.T:
            refuse("source", f"{len(of_map.queries)} examples of {case.source}", f"{case.T}")
    for map_, encoder in {"random L0": random, "trained L0": trained}.items():
        if encoder:
            seen[map_] = seen[map_]._replace(positions=encoder.positions[: case.n])
    return seen


def perform(seen: Seen, check: Check) -> Finding:
    """Test one assumption on the features of its map, which are computed already."""
    start = time.perf_counter()
    if check.vectors in ("contexts", "labels"):
        ranks = seen.ranks if check.vectors == "contexts" else labels_met(seen.heads, check)
        dependent = int((ranks < check.size).sum())
    else:
        vectors = getattr(seen, check.vectors)
        sampled = sampled_independence(vectors, check.size, samples=check.samples, seed=check.seed)
        g, dependent = torch.Generator().manual_seed(check.seed + 1), sampled.dependent
        some = [torch.randperm(len(vectors), generator=g)[: check.size] for _ in range(RANKED)]
        ranks = torch.tensor([numerical_rank(vectors[subset]) for subset in some])
    return Finding(
        dependent=dependent,
        ranked=len(ranks),
        least_rank=int(ranks.min()),
        most_rank=int(ranks.max()),
        **origin(time.perf_counter() - start, next(iter(seen)).device),
    )


def labels_met(read: Float[Tensor, "T k"], check: Check) -> Int[Tensor, " samples"]:
    """How many of ``size`` random binary labels a trained linear read-out meets, for each draw.

    A logistic loss on the first ``size`` examples, coordinates scaled alike, all draws at once:
    full-batch Adam at a rate of 0.03 for ``STEPS`` steps.
    """
    x = read[: check.size]
    x = (x - x.mean(dim=0)) / x.std()
    g = torch.Generator().manual_seed(check.seed)
    signs = torch.randint(2, (check.size, check.samples), generator=g).to(x) * 2 - 1
    weights = x.new_zeros(x.shape[1], check.samples, requires_grad=True)
    bias = x.new_zeros(check.samples, requires_grad=True)
    optimizer = torch.optim.Adam([weights, bias], lr=0.03)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.softplus(-signs * (x @ weights + bias)).sum().backward()
        optimizer.step()
    return (signs * (x @ weights + bias) > 0).sum(dim=0).detach()
